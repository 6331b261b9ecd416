"""Which samples of a dataset a worker trains on: its share of each epoch, by the run's clock (`sampler`), or what the run hands
out next (`ranges`). Who joins late starts in the middle, either way."""

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

PASSES_MAX = 100  # passes over the data without a step of the run: a loader that gives no batch would be read for ever


class RunSampler(Sampler[int]):
    """Indices of `dataset`, for a DataLoader. Each epoch is a permutation of its own, cut into one share for each worker. No
    index is in two shares. The shares are of one length, so the last few indices of a permutation may be left out.

    A loop over epochs asks `epochs()` for their numbers: range() would begin at 0 in a run that goes on.

    batch: samples of this worker in an optimizer step. A worker that begins in the middle, or again, leaves out what its share
    of the run's steps has used already. One that comes on top of those that the run was started for has a share with another.
    steps: of the run. One pass then goes on from epoch to epoch until the run has made them; without, it ends with the epoch.
    After the last of them the module shows the shared model: the optimizer calls its eval().
    drop_last: leave out the last samples of a share where they make no whole step, as `steps` does.

    A pass begins where the run is. After one that was read to its end it begins with the next epoch at least, also where the
    loader made fewer steps of it than are counted here, so no loop reads one tail for ever. Raises UsageError where the dataset
    is too small, and after PASSES_MAX passes without a step.
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
        self.training = -1  # of the newest pass: which of this process
        self.ended: tuple[int, int, int] | None = None  # the newest whole pass: the run's step, its first step, its end
        self.idle = 0  # whole passes since the newest step
        self.told = False
        self.told_epoch = -1  # that epochs() has given, and passes read
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
        """Samples of a whole epoch here; with `steps`, of the steps that the run has yet to make."""
        if self.steps is not None:
            return max(0, self.steps - session.current().step_count) * self.batch
        return self.epoch_steps * self.batch if self.drop_last else self.share

    def __iter__(self) -> Iterator[int]:
        ours, each = session.current(), self.epoch_steps
        now, ours.batch = ours.step_count, self.batch
        if ours.training != self.training:  # another one than that of the pass before
            self.training, self.ended, self.idle = ours.training, None, 0
            if self.steps is not None:
                session.makes(self.steps)
        first = self._first(now)
        if self.told_epoch >= 0:  # a further pass over an epoch that is done reads all of it
            begin, end = self.told_epoch * each, (self.told_epoch + 1) * each
            first = max(now, begin) if now < end else begin
        else:
            end = (first // each + 1) * each if self.steps is None else self.steps
        own: list[int] = []
        for step in range(first, end):
            epoch, place = divmod(step, each)
            if not own or not place:
                own = self._own(epoch)
            yield from own[place * self.batch : (place + 1) * self.batch]
        self.ended = now, first, end

    @property
    def epoch(self) -> int:
        """The epoch that a pass reads now, from 0. Raises UsageError before DistributedOptimizer was made."""
        return self.told_epoch if self.told_epoch >= 0 else self._step() // self.epoch_steps

    def _step(self) -> int:
        """Return the run's step, which is known once DistributedOptimizer was made."""
        ours = session.current()
        if ours.link is not None and ours.engine is None:
            raise UsageError(
                "an epoch of sampler() was asked for before DistributedOptimizer was made: the run's step is unknown until then"
            )
        return ours.step_count

    def epochs(self, count: int, schedule: ScheduleCatchUp | None = None) -> Iterator[int]:
        """Numbers of the epochs that the run has yet to make, in place of range(count).

            for epoch in share.epochs(10, schedule):
                for x, y in loader:
                    ...
                schedule.step()

        A run that goes on in the middle of an epoch begins with its number, and a pass reads what is left of it. A body that
        leaves its pass early is followed by the next epoch.

        Args:
            count: epochs of the whole run. After the last step of them the module shows the shared model, as with `steps`.
            schedule: a new scheduler that the script steps once an epoch. It is brought to the epoch that begins.

        Raises:
            UsageError: `steps` was given too, the schedule follows a metric, or DistributedOptimizer was not made before.
        """
        if count < 0 or self.steps is not None:
            told = f"epochs({count})" if self.steps is None else f"epochs() and steps={self.steps}"
            raise UsageError(f"{told}: give the epochs of the whole run, or its steps")
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
                # Below, the run has gone back to a checkpoint. A schedule cannot.
                epoch = now // each if now < began else max(epoch + 1, now // each)
        finally:
            self.told_epoch = -1

    def _own(self, epoch: int) -> list[int]:
        """This worker's share of an epoch."""
        order = torch.arange(len(self.dataset))
        if self.shuffle:
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + epoch))
        own: list[int] = order[rank() % world_size() :: world_size()][: self.share].tolist()
        return own

    def _first(self, now: int) -> int:
        """The step that the next pass begins with; the run is at step `now`."""
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
        return first if now == began and whole_epoch else max(now, end)  # who took no step has only looked at the data

    def _compare(self, counted: int, made: int) -> None:
        if self.told or not made or abs(counted - made) <= max(1, counted // 10):
            return
        self.told = True
        say(
            f"sampler(batch={self.batch}) counts {counted} steps in a pass over the data, and this worker has made {made}: "
            "give it the samples of one step as batch=, else a worker that joins late or resumes begins in the wrong place"
        )


sampler = RunSampler  # DataLoader(dataset, batch, sampler=sampler(dataset, batch))


class RangeIterator(Iterator[torch.Tensor]):
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
        if isinstance(ours, WorkerOfChild):
            raise NotAWorkerError("ranges()")
        session.follows("end")
        index = self._alone(ours) if isinstance(ours, session.LocalSession) else self._of_run(ours)
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
        return part if len(part) else rows[:1]  # a mean over none is not finite

    def _alone(self, ours: session.LocalSession) -> int:
        if ours.taken >= self.limit:
            return -1
        ours.taken += 1
        return ours.taken - 1

    def _of_run(self, ours: session.RunSession) -> int:
        if ours.engine is None:
            raise UsageError("ranges() before DistributedOptimizer was made: the run hands out samples for its updates")
        index, fresh = ours.engine.take(self.samples, self.size, self.limit)
        ours.batch = fresh * self.size // (1 if ours.group is None else ours.group.size)
        return index


def ranges(samples: int, size: int, *, epochs: int = 1, shuffle: bool = True, seed: int = 0) -> RangeIterator:
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
    return RangeIterator(samples, size, epochs, shuffle, seed)
