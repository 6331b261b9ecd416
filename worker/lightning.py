"""`narrows.worker.lightning`, as scripts import it."""

from narrows.worker.data.datasets import sampler as sampler
from narrows.worker.integrations.lightning import NarrowsCallback as NarrowsCallback
