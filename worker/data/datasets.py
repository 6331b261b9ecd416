"""The samples that a worker trains on: its share of each epoch (`sampler`), or what the run hands out (`ranges`).

`sampler` follows the run's clock. In both cases a worker that joins late starts where the run is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from narrows.protocols.errors import UsageError
from narrows.worker import session
from narrows.worker.runtime.child_process import NotAWorkerError, WorkerOfChild
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.schedules import ScheduleCatchUp, catch_up
from narrows.worker.session import rank, world_size

PASSES_MAX = 100  # passes over the data without a step of the run; then the loader gives no batch, and reading ends


class RunSampler(Sampler[int]):
    """This worker's share of a dataset: a torch Sampler of indices, for a DataLoader.

    Each epoch is another permutation of the dataset, cut into one share for each worker. No index is in two shares. All
    shares have the same length, so the last few indices of a permutation may be left out. A worker beyond the number
    that the run was started for has the same share as another worker.

    A pass over the sampler begins at the run's step: a worker that joins late or resumes leaves out the samples of its
    share that the run's steps so far have used. After a pass that was read to its end, the next pass begins with the
    next epoch at least, even if the script took fewer steps than the sampler counts. So no loop reads the end of an
    epoch again and again.

    A loop over epochs takes their numbers from `epochs()`, because range() would begin at 0 in a run that is resumed.

    Args:
        dataset: the dataset, with a length.
        batch: samples of this worker in one optimizer step.
        steps: steps of the whole run. One pass then goes on from epoch to epoch until the run has taken them. After the
            last of them the module shows the shared model, as after the optimizer's eval(). None: a pass ends with its
            epoch.
        drop_last: leave out the last samples of a share that make no whole step, as with `steps`.
        shuffle: False keeps the order of the dataset.
        seed: the seed of the permutations, the same in all workers.

    Raises:
        UsageError: the dataset is too small; or PASSES_MAX passes were read without a step of the run.
    """

    def __init__(
        self,
        dataset: Sized,
        batch: int,
        *,
        steps: int | None = None,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.dataset, self.batch, self.steps, self.shuffle, self.seed = dataset, batch, steps, shuffle, seed
        self.drop_last = drop_last or steps is not None
        self.training = -1  # the training of the newest pass (`LocalSession.training`)
        self.ended: tuple[int, int, int] | None = None  # newest whole pass: run's step then, first step, end
        self.idle = 0  # whole passes since the newest step
        self.warned = False  # the user was told that `batch` does not fit the steps
        self.told_epoch = -1  # the epoch of the loop over epochs(); -1: no such loop
        if batch < 1:
            raise UsageError(f"batch={batch}: give the samples of this worker in a step")
        if steps is not None:
            session.makes(steps)
        if not self.share:
            raise UsageError(f"a dataset of {len(dataset)} samples has none for each of {world_size()} workers")
        if not self.epoch_steps:
            raise UsageError(
                f"each of {world_size()} workers has {self.share} samples, which make no whole step of {batch}: lower batch="
            )

    @property
    def share(self) -> int:
        """Samples of this worker in an epoch."""
        return len(self.dataset) // world_size()

    @property
    def epoch_steps(self) -> int:
        return self.share // self.batch if self.drop_last else -(-self.share // self.batch)

    def __len__(self) -> int:
        """Samples of this worker in an epoch; with `steps`, in the steps that the run has yet to take."""
        if self.steps is not None:
            return max(0, self.steps - session.current().step_count) * self.batch
        return self.epoch_steps * self.batch if self.drop_last else self.share

    def __iter__(self) -> Iterator[int]:
        ours, each = session.current(), self.epoch_steps
        now = ours.step_count
        ours.reads(self.batch)
        if ours.training != self.training:  # a new training has begun since the last pass
            self.training, self.ended, self.idle = ours.training, None, 0
            if self.steps is not None:
                session.makes(self.steps)
        first = self._first(now)
        if self.told_epoch >= 0:  # a second pass over the same epoch reads all of it
            begin, end = self.told_epoch * each, (self.told_epoch + 1) * each
            first = max(now, begin) if now < end else begin
        else:
            end = (first // each + 1) * each if self.steps is None else self.steps
        own: list[int] = []
        for step in range(first, end):
            if first == now and ours.step_count >= end:
                break  # the run's step grows by more than this worker's: rounds that it missed, or made fewer steps in
            epoch, place = divmod(step, each)
            if not own or not place:
                own = self._own(epoch)
            yield from own[place * self.batch : (place + 1) * self.batch]
        self.ended = now, first, end

    @property
    def epoch(self) -> int:
        """The epoch of the present pass, from 0. Raises UsageError before DistributedOptimizer is made."""
        return self.told_epoch if self.told_epoch >= 0 else self._step() // self.epoch_steps

    def _step(self) -> int:
        """Return the run's step. Raises UsageError before DistributedOptimizer is made."""
        ours = session.current()
        if ours.link is not None and ours.engine is None:
            raise UsageError(
                "an epoch of sampler() was asked for before DistributedOptimizer was made: the run's step is unknown until then"
            )
        return ours.step_count

    def epochs(self, count: int, schedule: ScheduleCatchUp | None = None) -> Iterator[int]:
        """Yield the numbers of the epochs that the run has yet to take, in place of range(count).

            for epoch in share.epochs(10, schedule):
                for x, y in loader:
                    ...
                schedule.step()

        If the run is in the middle of an epoch, the first number is of that epoch, and a pass reads the rest of it. If
        the loop's body leaves its pass early, the next number is of the next epoch.

        Args:
            count: epochs of the whole run. After their last step the module shows the shared model, as with `steps`.
            schedule: a new scheduler that the script steps once an epoch. It is advanced to the epoch that begins.

        Raises:
            UsageError: `steps` was given too, the schedule follows a metric, or DistributedOptimizer is not made yet.
        """
        if count < 0 or self.steps is not None:
            call = f"epochs({count})" if self.steps is None else f"epochs() and steps={self.steps}"
            raise UsageError(f"{call}: give the epochs of the whole run, or its steps")
        session.makes(count * self.epoch_steps)
        return self._epochs(count, schedule)

    def _epochs(self, count: int, schedule: ScheduleCatchUp | None) -> Iterator[int]:
        ours, each, stepped = session.current(), self.epoch_steps, 0
        epoch = self._step() // each
        try:
            while epoch < count:
                if schedule is not None:
                    catch_up(schedule, epoch - stepped)
                self.told_epoch, began, stepped = epoch, ours.step_count, max(epoch, stepped) + 1
                yield epoch
                now = ours.step_count
                # now < began: the run has gone back to a checkpoint. A schedule cannot go back.
                epoch = now // each if now < began else max(epoch + 1, now // each)
        finally:
            self.told_epoch = -1

    def _own(self, epoch: int) -> list[int]:
        """Return the indices of this worker's share of an epoch."""
        order = torch.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + epoch))
        own: list[int] = order[rank() % world_size() :: world_size()][: self.share].tolist()
        return own

    def _first(self, now: int) -> int:
        """Return the first step of the next pass, when the run is at step `now`."""
        if self.ended is None:
            return now
        (began, first, end), self.ended = self.ended, None
        self.idle = 0 if now != began else self.idle + 1
        if self.idle >= PASSES_MAX:
            raise UsageError(
                f"{PASSES_MAX} passes over the data were made without a step: the loop takes none, or the DataLoader drops all "
                f"that it reads: lower its batch_size, for this worker has {self.share} samples, or leave out drop_last=True"
            )
        if now < began:
            return now  # the run has gone back to a checkpoint
        if first == began:
            self._compare(end - first, now - began)
        whole_epoch = self.steps is None and first % self.epoch_steps == 0
        return first if now == began and whole_epoch else max(now, end)  # no step: the script only read the data

    def _compare(self, counted: int, made: int) -> None:
        if self.warned or not made or abs(counted - made) <= max(1, counted // 10):
            return
        self.warned = True
        say(
            f"sampler(batch={self.batch}) counts {counted} steps in a pass over the data, and this worker has made {made}: "
            "give it the samples of one step as batch=, else a worker that joins late or resumes begins in the wrong place"
        )


sampler = RunSampler  # DataLoader(dataset, batch, sampler=sampler(dataset, batch))


class RangeIterator(Iterator[torch.Tensor]):
    """See `ranges`. `epoch` is that of the newest samples; -1 before the first."""

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
        if isinstance(ours, WorkerOfChild):
            raise NotAWorkerError("ranges()")
        session.follows("end")
        index = ours.take_range(self.limit) if isinstance(ours, session.LocalSession) else self._of_run(ours)
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
        group = ours.group if isinstance(ours, session.RunSession) else None
        if group is None:
            return rows
        part = rows[group.rank :: group.size]
        return part if len(part) else rows[:1]  # the mean loss of an empty batch would be NaN

    def _of_run(self, ours: session.RunSession) -> int:
        if ours.engine is None:
            raise UsageError("ranges() before DistributedOptimizer was made: the run hands out samples for its updates")
        index, fresh = ours.engine.take(self.samples, self.size, self.limit)
        ours.reads(fresh * self.size // (1 if ours.group is None else ours.group.size))
        return index


def ranges(samples: int, size: int, *, epochs: int = 1, shuffle: bool = True, seed: int = 0) -> RangeIterator:
    """Iterate over index ranges of a dataset, which the run hands out to each worker as it asks.

        for rows in ranges(len(data), 64, epochs=3):
            loss_of(model, data[rows]).backward()
            optimizer.step()

    The loop ends once the run has done all epochs: the update of each range is in the model of all shards. If a worker
    dies, other workers get the ranges that it has not done, so no sample of an epoch is left out. Faster workers take
    more ranges.

    A step may hold several ranges. If no range is left and this worker has ranges without a step, its loop ends, and
    the script must step. In a group each process gets a part of each range. A script without a run gets all ranges.

    Args:
        samples: samples of the dataset, the same in all workers.
        size: samples of a range, the same in all workers. The last range of an epoch may be shorter.
        epochs: epochs counted from the beginning of the run. With `epochs=epoch + 1` the loop ends after epoch `epoch`;
            for a worker that joins when that epoch is over it ends at once.
        shuffle: each epoch has another order; False: the order of the dataset.
        seed: the seed of these orders.

    Returns:
        An iterator of indices, int64[size].

    Raises:
        UsageError: an argument is out of range; or while iterating, DistributedOptimizer is not made yet.
    """
    return RangeIterator(samples, size, epochs, shuffle, seed)
