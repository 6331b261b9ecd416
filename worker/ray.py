"""`narrows.worker.ray`, as scripts import it."""

from narrows.worker.integrations.ray import Progress as Progress
from narrows.worker.integrations.ray import Result as Result
from narrows.worker.integrations.ray import train as train
