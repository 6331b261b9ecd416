"""Which samples of a dataset a worker trains on: its share of each epoch, by the run's clock (`sampler`), or what the run hands
out next (`ranges`). Who joins late starts in the middle, either way."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from narrows.protocols.errors import UsageError
from narrows.worker import session
from narrows.worker.session import rank, step_count, world_size


class RunSampler(Sampler[int]):
    """Indices of `dataset`, for a DataLoader. Each epoch is a permutation of its own, cut into one share for each worker. No
    index is in two shares. The shares are of one length, so the last few indices of a permutation may be left out.

    batch: samples of this worker in an optimizer step. A worker that begins in the middle, or again, leaves out what its share
    of the run's steps has used already. One that comes on top of those that the run was started for has a share with another.
    Raises UsageError where the dataset is too small.
    """

    def __init__(self, dataset: Sized, batch: int, *, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.batch, self.shuffle, self.seed = dataset, batch, shuffle, seed
        if batch < 1:
            raise UsageError(f"batch={batch}: give the samples of this worker in a step")
        if not len(self):
            raise UsageError(f"a dataset of {len(dataset)} samples has none for each of {world_size()} workers")

    def __len__(self) -> int:
        """Samples of a whole epoch here."""
        return len(self.dataset) // world_size()

    def __iter__(self) -> Iterator[int]:
        share, order = len(self), torch.arange(len(self.dataset))
        epoch, steps = divmod(step_count(), -(-share // self.batch))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + epoch))
        yield from order[rank() % world_size() :: world_size()][steps * self.batch : share].tolist()


def sampler(dataset: Sized, batch: int, *, shuffle: bool = True, seed: int = 0) -> RunSampler:
    """See RunSampler: DataLoader(dataset, batch, sampler=sampler(dataset, batch))."""
    return RunSampler(dataset, batch, shuffle=shuffle, seed=seed)


class Ranges(Iterator[torch.Tensor]):
    """See `ranges`. epoch: of the samples that were given last, -1 before."""

    def __init__(self, samples: int, size: int, epochs: int, shuffle: bool, seed: int) -> None:
        if min(samples, size) < 1 or epochs < 0:
            raise UsageError(
                f"ranges({samples}, {size}, epochs={epochs}): give samples, of a range at least one, and epochs"
            )
        self.samples, self.size, self.shuffle, self.seed = samples, size, shuffle, seed
        self.each = -(-samples // size)  # ranges of an epoch
        self.limit, self.epoch = epochs * self.each, -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __next__(self) -> torch.Tensor:
        ours = session.current()
        index = self._alone(ours) if isinstance(ours, session.Alone) else self._of_run(ours)
        if index < 0:
            raise StopIteration
        epoch, place = divmod(index, self.each)
        if epoch != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._order = (
                torch.randperm(self.samples, generator=generator) if self.shuffle else torch.arange(self.samples)
            )
            self.epoch = epoch
        rows = self._order[place * self.size : (place + 1) * self.size]
        group = ours.group if isinstance(ours, session.Connected) else None
        if group is None:
            return rows
        part = rows[group.rank :: group.size]
        return part if len(part) else rows[:1]  # a mean over none is not finite

    def _alone(self, ours: session.Alone) -> int:
        if ours.taken >= self.limit:
            return -1
        ours.taken += 1
        return ours.taken - 1

    def _of_run(self, ours: session.Connected) -> int:
        if ours.engine is None:
            raise UsageError("ranges() before DistributedOptimizer was made: the run hands out samples for its updates")
        return ours.engine.take(self.samples, self.size, self.limit)


def ranges(samples: int, size: int, *, epochs: int = 1, shuffle: bool = True, seed: int = 0) -> Ranges:
    """Positions in a dataset of so many samples, int64[size], which the run hands out to whichever worker asks.

        for rows in ranges(len(data), 64, epochs=3):
            loss_of(model, data[rows]).backward()
            optimizer.step()

    It ends once the run has done so many epochs: the update of each range is in the model of all shards. Another worker
    does what one that dies has not done, so no sample of an epoch is left out. Faster workers take more. The last range of an
    epoch may be shorter. `epochs` counts from the beginning of the run: `epochs=epoch + 1` ends after this one, and for who
    joins later at once, if that epoch is over.

    All workers of a run give the same `samples` and `size`. Each epoch has an order of its own, by `seed`; shuffle=False: the
    order of the dataset. In a group each process has a part of the range. Several ranges may be in one step: where no range is
    left and some have no step yet, the loop ends for this worker, which then steps. Alone a script has all of them.
    """
    return Ranges(samples, size, epochs, shuffle, seed)
