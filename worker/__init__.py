"""narrows.worker: ps-worker, the torch optimizer wrapper and the session that feeds it.

    from narrows.worker import DistributedOptimizer
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

Run as plain `python SCRIPT.py` the same script trains alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "DistributedOptimizer",
    "clock",
    "device",
    "local_rank",
    "pipeline",
    "rank",
    "record",
    "replica",
    "replicas",
    "sampler",
    "stage",
    "stages",
    "step_count",
    "world_size",
]

if TYPE_CHECKING:
    from narrows.worker.datasets import sampler
    from narrows.worker.machine import device, local_rank
    from narrows.worker.optimizer import DistributedOptimizer
    from narrows.worker.pipelining import pipeline, replica, replicas, stage, stages
    from narrows.worker.session import clock, rank, record, step_count, world_size
else:
    HOMES = {"DistributedOptimizer": "optimizer", "device": "machine", "local_rank": "machine", "sampler": "datasets"}
    HOMES |= dict.fromkeys(("pipeline", "replica", "replicas", "stage", "stages"), "pipelining")

    def __getattr__(name):
        """On first use: ps-worker is in this package too, and need not wait for torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{HOMES.get(name, 'session')}"), name)
