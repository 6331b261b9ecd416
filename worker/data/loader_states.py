"""Resumes a worker's data loader with the run: keeps the loader's states of several steps in a folder.

A run that is resumed goes back to the clock of a checkpoint, which no worker chooses or knows before. So a worker keeps
the states of several steps, loads the newest that is not ahead of the run, and skips the batches that the run has used
since.

Rules
- After going back by a steps the worker skips the batches of fewer than a steps, or of fewer than `every`, whichever is
  more.
- The number of files grows with the logarithm of the steps.
- A run at step 0 renames the states that an earlier run has left. A run that goes back deletes the states of steps that
  it has yet to take.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from narrows.protocols.addresses import located
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.storage.store_copy import opened
from narrows.worker import session
from narrows.worker.checkpoint.optimizer_state import write_whole
from narrows.worker.runtime.child_process import NotAWorkerError, WorkerOfChild
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.session import rank, world_size


def resumable(
    loader: Any, folder: str | os.PathLike[str], *, steps: int | None = None, batches: int = 1, every: int = 50
) -> Iterator[Any]:
    """Iterate over the batches of `loader`, epoch after epoch, from the step of the run on.

    The iteration begins after DistributedOptimizer is made. A worker with another rank than before, or in a run of
    another size, finds no state of its share, and skips all batches that the run has used.

    Args:
        loader: has state_dict() and load_state_dict(), as torchdata's StatefulDataLoader and litdata's
            StreamingDataLoader. Its dataset must be this worker's share. (A DataLoader with `sampler(dataset, batch)`
            resumes without this function.)
        folder: keeps the loader's states; a path, or an address such as s3://BUCKET/NAME. All workers may use the same.
        steps: steps of the whole run. The batches end once the run has taken them, and after the last of them the
            module shows the shared model, as after the optimizer's eval(). None: the batches have no end.
        batches: batches of one optimizer step.
        every: steps between two states.

    Raises:
        UsageError: the loader has no state_dict, a number is out of range, or DistributedOptimizer is not made yet.
    """
    if not (hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")):
        raise UsageError(
            f"resumable got a {type(loader).__name__}, which has no state_dict: give it a StatefulDataLoader of "
            "torchdata, or use a DataLoader with sampler(dataset, batch)"
        )
    if batches < 1 or every < 1:
        raise UsageError(f"resumable(batches={batches}, every={every}): give positive numbers")
    if steps is not None:
        session.makes(steps)
    place = located("resumable:", os.fspath(folder))
    return _read(loader, place, math.inf if steps is None else steps, batches, every)


def _read(loader: Any, folder: str, steps: float, batches: int, every: int) -> Iterator[Any]:
    ours = session.current()
    if isinstance(ours, WorkerOfChild):
        raise NotAWorkerError("resumable()")
    if ours.link is not None and ours.engine is None:
        raise UsageError(
            "resumable was read before DistributedOptimizer was made: the run's step is not known until then"
        )
    step, states = ours.step_count, LoaderStates(folder)
    at = states.load(step, loader)
    passing = (step - at) * batches
    while step < steps:
        empty = True
        for batch in loader:
            empty = False
            if passing:
                passing -= 1
                continue
            yield batch
            before, step = step, ours.step_count
            if step // every > before // every:
                states.save(step, loader.state_dict())
            if step >= steps:
                return
        if empty:
            raise UsageError(f"the loader of rank {rank()} has no batch: give each of {world_size()} workers a share")


class LoaderStates:
    """The states of this worker's loader, a file each. A file is complete or absent."""

    def __init__(self, place: str) -> None:
        self.stem = f"narrows-loader-{rank()}-of-{world_size()}.step-"
        self.folder, self.copy = opened(place, self.stem, "resumable:")
        self.copy.pull(self.folder, lambda name: name.startswith(self.stem))

    def load(self, step: int, loader: Any) -> int:
        """Load the newest state that is not ahead of `step` into the loader.

        States ahead of `step` are deleted, because the run has not taken those steps. At step 0 all states are of an
        earlier run, and are renamed.

        Returns:
            The step of the loaded state; 0 if none was loaded and the loader begins anew.
        """
        kept = self._steps()
        if kept and not step:
            names = self.copy.set_aside(self.folder, lambda name: self._step(name) is not None, math.inf)
            newest = max(names, key=lambda name: self._step(Path(name).stem) or 0, default="")
            say(f"the states of an earlier run's loader are kept, the newest as {newest}")
            return 0
        self._drop([other for other in kept if other > step])
        at = max([other for other in kept if other <= step], default=0)
        if at:
            loader.load_state_dict(torch.load(self._path(at), weights_only=True))
        return at

    def save(self, step: int, state: Any) -> None:
        write_whole(self._path(step), state, copy=self.copy)
        self._drop(superfluous(self._steps()))

    def _drop(self, steps: Sequence[int]) -> None:
        names = {self._path(step).name for step in steps}
        for name in names:
            (self.folder / name).unlink()
        if names:
            self.copy.remove(lambda there: names & {*there})

    def _path(self, step: int) -> Path:
        return self.folder / f"{self.stem}{step}.pt"

    def _steps(self) -> list[int]:
        found = (self._step(path.name) for path in self.folder.glob(f"{self.stem}*.pt"))
        return sorted(step for step in found if step is not None)

    def _step(self, name: str) -> int | None:
        match = re.fullmatch(rf"{self.stem}(\d+)\.pt", name)
        return int(match[1]) if match else None


def superfluous(steps: Sequence[int]) -> list[int]:
    """Return the steps whose states may be deleted.

    Args:
        steps: the steps of all states, rising.

    Returns:
        The steps whose two neighbours are no further apart than the later neighbour is from the newest step.
    """
    kept, gone = [0], []
    for step, after in pairwise(steps):
        if after - kept[-1] <= steps[-1] - after:
            gone.append(step)
        else:
            kept.append(step)
    return gone
