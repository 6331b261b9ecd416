"""narrows.worker: ps-worker, the torch optimizer wrapper and the session that feeds it.

    from narrows.worker import DistributedOptimizer
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

Run as plain `python SCRIPT.py` the same script trains alone.
"""

from typing import TYPE_CHECKING

__all__ = ["DistributedOptimizer", "clock", "local_rank", "rank", "record", "step_count", "world_size"]

if TYPE_CHECKING:
    from narrows.worker.optimizer import DistributedOptimizer
    from narrows.worker.session import clock, local_rank, rank, record, step_count, world_size
else:

    def __getattr__(name):
        """On first use: ps-worker is in this package too, and need not wait for torch."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from narrows.worker import optimizer, session

        return getattr(optimizer if name == "DistributedOptimizer" else session, name)
