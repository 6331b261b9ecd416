"""`narrows.worker.transformers`, as scripts import it."""

from narrows.worker.integrations.transformers import distributed as distributed
