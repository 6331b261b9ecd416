"""Which samples of a dataset a worker trains on. It goes by the run's clock: who joins late starts in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from narrows.protocols.errors import UsageError
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
