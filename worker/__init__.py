"""narrows.worker: ps-worker, the torch optimizer wrapper and the session that feeds it.

    from narrows.worker import DistributedOptimizer
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

Run as plain `python SCRIPT.py` the same script trains alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__all__ = [
    "LAMB",
    "LARS",
    "DistributedOptimizer",
    "Embedding",
    "ScheduleEager1F1B",
    "Subspace",
    "Writer",
    "agree",
    "clock",
    "device",
    "local_rank",
    "pipeline",
    "ranges",
    "rank",
    "record",
    "replica",
    "replicas",
    "resumable",
    "sampler",
    "saved_state",
    "stage",
    "stage_layers",
    "stages",
    "step_count",
    "world_size",
]

if TYPE_CHECKING:
    __version__: str
    from narrows.protocols.layerwise import LAMB, LARS
    from narrows.worker.checkpoint.load_optimizer_state import saved_state
    from narrows.worker.data.datasets import ranges, sampler
    from narrows.worker.data.loader_states import resumable
    from narrows.worker.model.embedding import Embedding
    from narrows.worker.optimizer import DistributedOptimizer
    from narrows.worker.pipelining import pipeline, replica, replicas, stage, stage_layers, stages
    from narrows.worker.pipelining.schedule import ScheduleEager1F1B
    from narrows.worker.pipelining.subspace import Subspace, Writer
    from narrows.worker.runtime.device import device, local_rank
    from narrows.worker.session import agree, clock, rank, record, step_count, world_size
else:
    HOMES = {
        **dict.fromkeys(("device", "local_rank"), "runtime.device"),
        **dict.fromkeys(("Subspace", "Writer"), "pipelining.subspace"),
        **dict.fromkeys(("pipeline", "replica", "replicas", "stage", "stage_layers", "stages"), "pipelining"),
        **dict.fromkeys(("LAMB", "LARS"), "model.optimizers"),
        "DistributedOptimizer": "optimizer",
        "Embedding": "model.embedding",
        "ScheduleEager1F1B": "pipelining.schedule",
        "ranges": "data.datasets",
        "resumable": "data.loader_states",
        "sampler": "data.datasets",
        "saved_state": "checkpoint.load_optimizer_state",
    }

    def __getattr__(name):
        """Import a public name on its first use: ps-worker is in this package too, and starts without torch."""
        if name == "__version__":
            return import_module("importlib.metadata").version("narrows")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{HOMES.get(name, 'session')}"), name)
