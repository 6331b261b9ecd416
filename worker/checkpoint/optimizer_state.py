"""Saves the state that only a worker has to a folder, and loads it when a worker joins a run under way.

The state is that of the worker's own optimizer, such as the moments of Adam, and the parameters that its script changes
and no optimizer steps, such as a teacher.

How it works
1. `OptimizerStateFile.of` looks for the file of this rank. In a run at clock 0 it renames the files of earlier runs.
2. In a run under way it loads this rank's file, or the newest of another rank: replicas have nearly the same moments.
3. After each step `stepped` checks whether a file is due, by the rule of checkpoints. A thread of this class writes it,
   tensor by tensor, from the memory of the optimizer: forward and backward pass change nothing there.
4. Before the optimizer steps again, `settle` waits until the thread has read all tensors. So a file is of one step.
5. At the end `end` writes the last state, if END_S is enough.

Rules
- A rank has one file, complete or absent. A new file replaces it.
- No file of the user or of an earlier run is deleted or overwritten: a file of that name that was not loaded is
  renamed.
- A file is loaded if its tensors and optimizers are those of this worker. Its clock may be some clocks before or after
  that of the run, because moments are means over many steps, and a run goes back to a checkpoint that no worker
  chooses.
- Only the state is loaded. Learning rates and all other entries of the groups are those of the script. Residuals of
  compression are lost.
- No tensor on the host is copied, but for views, parameters of the script, and tensors that share memory with parameters
  or gradients. A state on a GPU is copied to the host at once.
- At an address in a store each file is an object. It is put once all tensors are read, so no step waits for the store.
- A disk that takes no file within SETTLE_S delays training no longer: the optimizer steps, and the file is dropped.
- There is at most one file at a time.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map

from narrows.protocols.addresses import is_stored
from narrows.protocols.config.checkpoint_names import STATE, state_file
from narrows.protocols.config.modes import FoldRule, Mode
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import CHECKPOINT_COST_TIMES, CHECKPOINT_LEAST_NS
from narrows.protocols.effects import NS
from narrows.protocols.runtime.storage.store_copy import NO_COPY, FolderCopy, opened
from narrows.worker.group.event_wait import EventWait
from narrows.worker.group.group import Group
from narrows.worker.model.flat import FlatModel, local_part
from narrows.worker.model.model_slices import ModelCut, ModelSlice, placed
from narrows.worker.model.optimizers import each_of
from narrows.worker.model.weight_edit_check import OwnedTensor
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.runtime.member_link import LinkCommands

OWNED = "owned"  # the entry of a file with parameters that the script changes
SETTLE_S = 60.0  # how long a step waits for a file that is being written
END_S = 8.0  # limit for writing the last file; ps-worker waits longer, also if leaving takes its time
MINMAX = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # torch.aminmax takes these
AHEAD = 1000  # a file this many clocks, plus the run's clock, ahead is of another run: no run goes back by more


class StatefulWorker(Protocol):
    """The part of a worker's engine from which optimizer states, in the worker or on the servers, are read."""

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
    @property
    def waiting(self) -> EventWait: ...
    @property
    def link(self) -> LinkCommands: ...


class SteppedWorker(StatefulWorker, Protocol):
    """A `StatefulWorker` that calls `before_step` before its optimizer changes its state."""

    @property
    def before_step(self) -> list[Callable[[], object]]: ...


def write_whole(path: Path, content: Any, check: Callable[[], object] = bool, copy: FolderCopy = NO_COPY) -> None:
    """Write a file that torch.load reads. A reader finds the complete file or none.

    Args:
        path: of the file.
        content: what torch.save takes. Tensors on the host are written from where they are.
        check: is called once all of the content is written. If it raises an error, there is no file.
        copy: where else the files of the folder are kept. If that fails, there is no new file here either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    try:
        torch.save(content, new)
        check()
        copy.put(new, path.name)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)  # a full disk needs the space
        raise
    new.replace(path)


class OptimizerStateFile:
    """The file of one worker's optimizer state, or of the slice of one process of a group."""

    @staticmethod
    def of(
        worker: SteppedWorker,
        owned: OwnedTensor,
        clock: Callable[[], int],
        rank: int,
        folder: str,
        began_unix: float = math.inf,
        taken: bool = False,
    ) -> OptimizerStateFile | None:
        """Load the state in the folder of --checkpoint-dir, and keep it up to date there.

        Args:
            owned: parameters that the script changes.
            clock: returns the clock of this worker in the run.
            folder: the folder, or its address in a store; "" or "none" for none.
            began_unix: when this worker's session began, in seconds. In a run at clock 0 an older file is of an earlier
                run.
            taken: the optimizer has its state already, from the servers: load none.

        Returns:
            None without a folder, or if there is nothing to keep: the servers have the moments, or the optimizer has
            weights in its state, as schedule-free ones do, and would take the run back to their clock.
        """
        if folder in ("", "none") or not (_has_moments(worker) or owned.tensors):
            return None
        moments = OptimizerStateFile(worker, owned, clock, folder, rank)
        if taken:
            moments._set_aside(moments.path.name.__eq__, began_unix)
        else:
            moments.begin(began_unix)
        return moments

    def __init__(
        self, worker: SteppedWorker, owned: OwnedTensor, now: Callable[[], int], place: str, rank: int
    ) -> None:
        self.worker, self.owned, self.now = worker, owned, now
        self.place, (self.folder, self.copy) = place.rstrip("/"), opened(place, f"{Path(state_file(rank)).stem}.")
        self.path = self.folder / state_file(rank)
        owned.keep_in(self.place)
        self.at_ns, self.took_ns = time.monotonic_ns(), 0  # when the newest file was begun, and how long it took
        self.clock = now()  # the clock of the newest file
        self.kept = True  # no step was taken since the newest file was begun
        self.failed = False  # the newest file was not written, and the user was told
        self.torn = False  # the state has changed while it was read
        self.idle, self.settled = threading.Event(), threading.Event()  # no file is written; no tensor is read for one
        self.idle.set()
        self.settled.set()
        worker.before_step.append(self.settle)
        self.todo: queue.Queue[dict[str, Any]] = queue.Queue(1)
        threading.Thread(target=self._main, name="narrows-moments", daemon=True).start()  # none starts at exit

    @property
    def steps(self) -> bool:
        """True if the state of the script's optimizer is kept; False: only the script's own tensors."""
        return _has_moments(self.worker)

    # Taking over.

    def begin(self, began_unix: float) -> None:
        handed = self.worker.settings.hands_over(self.clock)  # the state of the optimizer comes from the servers
        if not self.clock:
            self._set_aside(STATE.fullmatch, began_unix)
            return
        lost = self._fetch()
        states = (path for path in self.folder.glob("*") if STATE.fullmatch(path.name))
        found, why = self._found(sorted(states, key=lambda path: path != self.path))  # this rank's file first
        why = lost or why
        group = self.worker.group
        if group is not None and not group.least(found is not None)[0]:
            found, why = None, why or "another process of this group has none"
        if found is None:
            self._set_aside(self.path.name.__eq__)
            if self.steps and not handed:
                say(f"the optimizer of rank {self.path.stem.rpartition('-')[2]} begins anew: {why}")
            return
        if not handed:
            self._take(found["state"])
        if self.steps and not handed:
            say(f"optimizers go on with their states in {self.place}")
        self.owned.load(found.get(OWNED, {}))

    def _fetch(self) -> str:
        """Fetch this rank's file from an address, and all others if it is absent, old or of other tensors.

        Returns:
            Why that failed, "" if it did not.
        """
        try:
            own = self._read_file(self.path, True)[0] if self.copy.pull(self.folder, self.path.name.__eq__) else None
            if own is None or 2 * int(own["clock"]) < self.clock:
                self.copy.pull(self.folder, STATE.fullmatch)
        except OSError as error:
            return str(error)
        return ""

    def _named(self, path: Path) -> str:
        """Return the name of a file for the user."""
        return f"{self.place}/{path.name}" if is_stored(self.place) else str(path)

    def _set_aside(self, wanted: Callable[[str], object], before_unix: float = math.inf) -> None:
        """Rename the files of these names that were last written before `before_unix`."""
        with suppress(OSError):
            for kept in self.copy.set_aside(self.folder, wanted, before_unix):
                say(f"an earlier state of an optimizer is kept as {kept}")

    def _read_file(self, path: Path, mapped: bool) -> tuple[dict[str, Any] | None, str]:
        """Return the content of a file that fits this worker, or None and the reason."""
        try:
            content = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
            text = self._why_not(content)
        except Exception as error:  # what a file holds may be anything, and so is what torch raises
            content, text = None, f"is no state of an optimizer ({type(error).__name__})"
        return content if not text else None, text and f"{self._named(path)} {text}"

    def _found(self, files: list[Path]) -> tuple[dict[str, Any] | None, str]:
        """Return the content of this rank's file, or of the newest file if this rank's is old; or None and the reason.

        Replicas have nearly the same moments, so another rank's file serves too.
        """
        usable, why = list[tuple[bool, int, Path]](), ""
        for path in files:
            content, text = self._read_file(path, mapped=True)
            why = why or text
            if content is not None:
                clock = int(content["clock"])
                usable.append((path == self.path and 2 * clock >= self.clock, clock, path))
        best = max(usable, default=None)
        if best is None:
            return None, why or f"{self.place} has no state of it"
        # On the host the tensors of the file become those of the optimizer. For a GPU each is read when it is copied.
        return self._read_file(best[2], mapped=any(p.device.type != "cpu" for _, p in self._tensors()))

    def _why_not(self, content: dict[str, Any]) -> str:
        """Return why this content of a file cannot be loaded; "" if it can."""
        if content["of"] != self._of():
            return "is of another model, another optimizer or another part of the model"
        ahead = 2 * self.clock + AHEAD < content["clock"]
        return f"is of clock {content['clock']} of another run: this one is at {self.clock}" if ahead else ""

    def _of(self) -> dict[str, Any]:
        """Return what a state must agree with: optimizers, keys and tensors."""
        flat = self.worker.slice or self.worker.flat
        tensors = [[name, list(local_part(tensor).shape), str(tensor.dtype)] for name, tensor in self._tensors()]
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
                        for key, values in states.pop(name).items()
                    }

    # Keeping.

    def stepped(self) -> None:
        """Begin to write the state after a step of the script, if a file is due and no other is being written."""
        self.kept = False
        if self.idle.is_set() and self._due(time.monotonic_ns()):
            self._begin_file()

    def settle(self) -> None:
        """Wait until the thread has read all tensors, so that a step may change them. After SETTLE_S give the file up."""
        if not self.torn and not self.settled.wait(SETTLE_S):
            self.torn = True

    def _due(self, now_ns: int) -> bool:
        """Return whether a file is due, by the rule of checkpoints (ps/coordinator/checkpoint_schedule.py).

        A file is due at multiples of the flag's clocks, after the flag's time, or after a time that follows from its
        cost.
        """
        settings = self.worker.settings
        if (clocks := settings.checkpoint_clocks) > 0:
            return self.now() // clocks > self.clock // clocks
        told_ns = int(settings.checkpoint_every * NS)
        every_ns = told_ns if told_ns >= 0 else max(CHECKPOINT_LEAST_NS, CHECKPOINT_COST_TIMES * self.took_ns)
        return every_ns > 0 and now_ns - self.at_ns >= every_ns

    def _begin_file(self) -> None:
        self.at_ns, self.clock, self.kept = time.monotonic_ns(), self.now(), True
        state, changing = self.worker.inner.state if self.steps else {}, self._changing()
        found = {
            name: tree_map(lambda value: _on_host(value, changing), dict(state[ours]))
            for name, ours in self._tensors()
            if ours in state
        }
        owned = self.owned.state()
        if self.steps or owned:
            self.torn = False
            self.idle.clear()
            self.settled.clear()
            self.todo.put_nowait({"of": self._of(), "clock": self.clock, "state": found, OWNED: owned})

    def _changing(self) -> set[int]:
        """Return where the memory begins of parameters and gradients, which change between two steps."""
        tensors = [each for _, p in self._tensors() for each in (p, p.grad) if each is not None]
        strided = (local_part(each) for each in tensors if each.layout == torch.strided)
        return {each.untyped_storage().data_ptr() for each in strided}

    def _main(self) -> None:
        while True:
            content = self.todo.get()
            try:
                # Else a worker that loads the file would fail at once.
                if all(map(_finite, tree_leaves((content["state"], content[OWNED])))):
                    write_whole(self.path, content, self._read, self.copy)
                self.failed = False
            except Exception as error:  # torch raises RuntimeError for a full disk, any error for a wrong value
                self._warn(error)
            del content
            self.took_ns = time.monotonic_ns() - self.at_ns
            self.settled.set()
            self.idle.set()

    def _read(self) -> None:
        """Let the next step begin: all tensors are read. Raises TimeoutError if a step has not waited for it."""
        if self.torn:
            raise TimeoutError(f"the disk took more than {SETTLE_S:.0f} s for it, and the next step did not wait")
        self.settled.set()

    def _warn(self, error: Exception) -> None:
        """Tell the user that a file was not written, once until one is written again."""
        if not self.failed:
            why = (str(error) or type(error).__name__).splitlines()[0]
            say(f"{self._named(self.path)} was not written: {why}; training goes on")
        self.failed = True

    def end(self) -> None:
        """Write the last state, if that takes at most END_S."""
        stop_by = time.monotonic() + END_S
        if not self.kept and self.idle.wait(END_S):
            try:
                self._begin_file()
            except RuntimeError as error:  # of a GPU that has failed
                self._warn(error)
        self.idle.wait(max(0.0, stop_by - time.monotonic()))


def _has_moments(worker: StatefulWorker) -> bool:
    """True if this worker's optimizers have a state with which another process can go on."""
    holds_weights = any(hasattr(each, "eval") for each in each_of(worker.inner))
    return worker.mode.rule is not FoldRule.OPTIMIZER and not holds_weights


def _on_host(value: Any, changing: Collection[int]) -> Any:
    """Return a tensor on the host whose memory nothing changes between two steps: the value itself, or a copy.

    Args:
        value: of an optimizer's state.
        changing: where memory begins that does change between two steps.
    """
    if not isinstance(value, torch.Tensor):
        return value
    local = local_part(value).detach()
    if type(local) is torch.Tensor and local.layout == torch.strided and local.device.type == "cpu":
        storage = local.untyped_storage()  # a file has all of it
        if storage.nbytes() == local.nbytes and storage.data_ptr() not in changing:
            return local
    return local.to("cpu", copy=True)


def _back(name: str, value: Any, ours: torch.Tensor, group: dict[str, Any]) -> Any:
    """Return a value of a file on the optimizer's device, sharded like `ours` if it has the same size."""
    if not isinstance(value, torch.Tensor):
        return value
    value = placed(name, value, ours, group)
    if hasattr(ours, "to_local") and value.dim() and value.shape == local_part(ours).shape:
        from torch.distributed.tensor import DTensor

        mesh, placements = ours.device_mesh, ours.placements  # type: ignore[attr-defined]
        return DTensor.from_local(value, mesh, placements, shape=ours.shape, stride=ours.stride())
    return value


def _finite(value: Any) -> bool:
    """Return whether a tensor has finite values only. On the host no array of its size is made."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    values = torch.view_as_real(value) if value.is_complex() else value
    if values.dtype in MINMAX and values.numel():
        return all(map(math.isfinite, map(float, torch.aminmax(values))))  # NaN is the least and the greatest
    return bool(torch.isfinite(values).all())
