"""narrows.worker: ps-worker, the torch optimizer wrapper and the session that feeds it.

    from narrows.worker import DistributedOptimizer
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

Run as plain `python SCRIPT.py` the same script trains alone.
"""

from narrows.worker.optimizer import DistributedOptimizer
from narrows.worker.session import clock, rank, record, step_count, world_size

__all__ = ["DistributedOptimizer", "clock", "rank", "record", "step_count", "world_size"]
