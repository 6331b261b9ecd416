"""Keeps what a worker alone has, in a folder, and takes it from there where the worker begins in a run that is under way:
the state of its own optimizer, such as the moments of Adam, and parameters that its script changes and no optimizer steps, such
as a teacher.

Rules
- A rank has one file, whole or absent. A new one replaces it. A run at clock 0 begins without any.
- No file of the user or of an earlier run is deleted or written over: a file of that name that was not taken over is renamed.
- A file is taken where tensors and optimizers are ours. Its clock may be some clocks before the run's or after it: moments are
  means over many steps, and a run goes back to a checkpoint that no worker chooses.
- The state is taken alone. Rates and all else in the groups are those of the script today. Residuals of
  compression are lost.
- The step's thread copies, another one writes. There is one copy at most.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from narrows.protocols.config.checkpoint_names import FOLDER, STATE, state_file
from narrows.protocols.config.modes import Mode, Rule
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import CHECKPOINT_COST_TIMES, CHECKPOINT_LEAST_NS
from narrows.protocols.effects import NS
from narrows.protocols.runtime.cli.output import set_aside
from narrows.worker.group.group import Group
from narrows.worker.model.flat import FlatModel
from narrows.worker.model.model_slices import ModelCut, ModelSlice, placed
from narrows.worker.model.optimizers import each_of
from narrows.worker.model.weight_edit_check import OwnedTensor
from narrows.worker.runtime.launcher_pipe import say

OWNED = "owned"  # of a file: parameters that the script changes
END_S = 8.0  # the last file is written within it: ps-worker waits longer, also where taking leave takes its time
AHEAD = 1000  # clocks, and as many as the run has: no run goes back by more, and a file from there is another run's


class StatefulWorker(Protocol):
    """The part of a worker's engine that states of its optimizers, here or with the servers, are read from."""

    @property
    def inner(self) -> torch.optim.Optimizer: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def mode(self) -> Mode: ...
    @property
    def flat(self) -> FlatModel: ...
    @property
    def slice(self) -> ModelSlice | None: ...
    @property
    def group(self) -> Group | None: ...
    @property
    def finished(self) -> bool: ...

    def wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Handle events until `done`; raise NarrowsError after `limit_s`."""


def write_whole(path: Path, content: Any) -> None:
    """A file that torch.load reads, whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    torch.save(content, new)
    new.replace(path)


class OptimizerStateFile:
    """The moments of one worker, or of the slice of one process of a group."""

    @staticmethod
    def of(
        worker: StatefulWorker, owned: OwnedTensor, clock: Callable[[], int], rank: int, began_unix: float = math.inf
    ) -> OptimizerStateFile | None:
        """Take over what the folder in NARROWS_CHECKPOINT_DIR has.

        Args:
            owned: parameters that the script changes.
            clock: returns the clock of this worker in the run.
            began_unix: when this worker's session began, in seconds. In a run at clock 0 an older file is of an earlier run.

        Returns:
            None without a folder, or where there is nothing to keep: the servers may have the moments, and an optimizer that
            has weights in its state, as schedule-free ones do, would lead the run back to their clock.
        """
        folder = os.environ.get(FOLDER, "")
        if folder in ("", "none") or not (_has_moments(worker) or owned.tensors):
            return None
        moments = OptimizerStateFile(worker, owned, clock, Path(folder), rank)
        moments.begin(began_unix)
        return moments

    def __init__(
        self, worker: StatefulWorker, owned: OwnedTensor, now: Callable[[], int], folder: Path, rank: int
    ) -> None:
        self.worker, self.owned, self.now = worker, owned, now
        self.folder, self.path = folder, folder / state_file(rank)
        self.steps = _has_moments(worker)  # else the script's own tensors alone are kept
        owned.kept_in = str(folder)
        self.at_ns, self.took_ns = time.monotonic_ns(), 0  # of the newest copy: when, and with writing how long
        self.clock = now()  # of that
        self.kept = True  # no step was taken since
        self.failed = False  # the newest was not written, and that was said
        self.idle = threading.Event()
        self.idle.set()
        self.todo: queue.Queue[dict[str, Any]] = queue.Queue(1)
        threading.Thread(target=self._main, name="narrows-moments", daemon=True).start()  # none starts at exit

    # Taking over.

    def begin(self, began_unix: float) -> None:
        states = (path for path in self.folder.glob("*") if STATE.fullmatch(path.name))
        files = sorted(states, key=lambda path: path != self.path)  # ours first
        if not self.clock:
            for path in files:
                self._set_aside(path, began_unix)
            return
        found, why = self._found(files)
        group = self.worker.group
        if group is not None and not group.least(found is not None)[0]:
            found, why = None, why or "another process of this group has none"
        if found is None:
            self._set_aside(self.path)
            if self.steps:
                say(f"the optimizer of rank {self.path.stem.rpartition('-')[2]} begins anew: {why}")
            return
        self._take(found["state"])
        if self.steps:
            say(f"optimizers go on with their states in {self.folder}")
        self.owned.load(found.get(OWNED, {}))

    def _set_aside(self, path: Path, before_unix: float = math.inf) -> None:
        """Keep a file that was last written before `before_unix` under another name. Another worker may do so first."""
        with suppress(OSError):
            if path.stat().st_mtime < before_unix and (kept := set_aside(path)):
                say(f"an earlier state of an optimizer is kept as {kept}")

    def _found(self, files: list[Path]) -> tuple[dict[str, Any] | None, str]:
        """The file of this rank, or the newest where ours is of long ago: replicas have nearly the same moments. Or why there
        is none."""
        usable, why = list[tuple[bool, int, dict[str, Any]]](), ""
        for path in files:
            try:
                content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
                text, clock = self._why_not(content), int(content["clock"])
            except Exception as error:  # what a file holds may be anything, and so is what torch raises
                text = f"is no state of an optimizer ({type(error).__name__})"
            if text:
                why = why or f"{path} {text}"
            else:
                usable.append((path == self.path and 2 * clock >= self.clock, clock, content))
        best = max(usable, key=lambda each: each[:2], default=None)
        return best and best[2], why or f"{self.folder} has no state of it"

    def _why_not(self, content: dict[str, Any]) -> str:
        """Why this content of a file is not to be taken, "": it is."""
        if content["of"] != self._of():
            return "is of another model, another optimizer or another part of the model"
        ahead = 2 * self.clock + AHEAD < content["clock"]
        return f"is of clock {content['clock']} of another run: this one is at {self.clock}" if ahead else ""

    def _of(self) -> dict[str, Any]:
        """Return what a state must agree with: optimizers, keys and tensors."""
        flat = self.worker.slice or self.worker.flat
        tensors = [[name, list(_local(tensor).shape), str(tensor.dtype)] for name, tensor in self._tensors()]
        kinds = [f"{type(each).__module__}.{type(each).__qualname__}" for each in each_of(self.worker.inner)]
        return {"optimizers": kinds, "keys": list(flat.keys), "tensors": tensors}

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors that the optimizers step in this process, by name."""
        cut = self.worker.slice
        flat = cut if isinstance(cut, ModelCut) else self.worker.flat
        return zip(flat.names, flat.parameters, strict=True)

    def _take(self, states: dict[str, dict[str, Any]]) -> None:
        cut, inner = self.worker.slice, self.worker.inner
        with cut.stepped() if cut is not None else nullcontext():
            groups = {id(p): group for group in inner.param_groups for p in group["params"]}
            for name, ours in self._tensors():
                if name in states:
                    inner.state[ours] = {
                        key: tree_map(lambda value, key=key: _back(key, value, ours, groups[id(ours)]), values)  # noqa: B023
                        for key, values in states[name].items()
                    }

    # Keeping.

    def stepped(self) -> None:
        """After each step of the script."""
        self.kept = False
        if self.idle.is_set() and self._due(time.monotonic_ns()):
            self._copy()

    def _due(self, now_ns: int) -> bool:
        """As checkpoints are (ps/coordinator/checkpoint_schedule.py): at told clocks, or after a time, told or by what
        one takes."""
        settings = self.worker.settings
        if (clocks := settings.checkpoint_clocks) > 0:
            return self.now() // clocks > self.clock // clocks
        told_ns = int(settings.checkpoint_every * NS)
        every_ns = told_ns if told_ns >= 0 else max(CHECKPOINT_LEAST_NS, CHECKPOINT_COST_TIMES * self.took_ns)
        return every_ns > 0 and now_ns - self.at_ns >= every_ns

    def _copy(self) -> None:
        self.at_ns, self.clock, self.kept = time.monotonic_ns(), self.now(), True
        state = self.worker.inner.state if self.steps else {}
        found = {name: tree_map(_host, dict(state[ours])) for name, ours in self._tensors() if ours in state}
        owned = self.owned.state()
        if self.steps or owned:
            self.idle.clear()
            self.todo.put_nowait({"of": self._of(), "clock": self.clock, "state": found, OWNED: owned})

    def _main(self) -> None:
        while True:
            content = self.todo.get()
            try:
                kept = tree_leaves((content["state"], content[OWNED]))
                if all(map(_finite, kept)):  # else whoever takes it over would fail at once
                    write_whole(self.path, content)
                self.failed = False
            except Exception as error:  # torch makes a RuntimeError of a full disk, and any of what it cannot write
                self._say(error)
            del content
            self.took_ns = time.monotonic_ns() - self.at_ns
            self.idle.set()

    def _say(self, error: Exception) -> None:
        """Once, until one is written again."""
        if not self.failed:
            why = (str(error) or type(error).__name__).splitlines()[0]
            say(f"{self.path} was not written: {why}; training goes on")
        self.failed = True

    def end(self) -> None:
        """Keep the last state, where that can be done in END_S."""
        stop_by = time.monotonic() + END_S
        if not self.kept and self.idle.wait(END_S):
            try:
                self._copy()
            except RuntimeError as error:  # of a GPU that has failed
                self._say(error)
        self.idle.wait(max(0.0, stop_by - time.monotonic()))


def _has_moments(worker: StatefulWorker) -> bool:
    """Whether this worker's optimizers have a state that another process goes on with."""
    holds_weights = any(hasattr(each, "eval") for each in each_of(worker.inner))
    return worker.mode.rule is not Rule.OPTIMIZER and not holds_weights


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that is here, where FSDP has sharded it."""
    here: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return here


def _host(value: Any) -> Any:
    """A copy on the host."""
    return _local(value).detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _back(name: str, value: Any, ours: torch.Tensor, group: dict[str, Any]) -> Any:
    """A copy where the optimizer has it; sharded as `ours` is, where it is as large."""
    if not isinstance(value, torch.Tensor):
        return value
    value = placed(name, value.clone(), ours, group)
    if hasattr(ours, "to_local") and value.dim() and value.shape == _local(ours).shape:
        from torch.distributed.tensor import DTensor

        mesh, placements = ours.device_mesh, ours.placements  # type: ignore[attr-defined]
        return DTensor.from_local(value, mesh, placements, shape=ours.shape, stride=ours.stride())
    return value


def _finite(value: Any) -> bool:
    numbers = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return not numbers or bool(torch.isfinite(value).all())
