"""The step of a worker that pushes gradients, along which the server's optimizer steps.

The main thread owns it. With overlap, autograd's threads send parts of a gradient.

How it works

    without overlap    backward ........ step(): reduce, push gradient, wait for the state | next forward
    with overlap       backward ........ step(): first part of each shard                  | next forward
                       parts leave                                                           waits layer by layer

1. `step` calls the step hooks of the script's optimizer before the push and after the new state has come. The optimizer
   itself never steps here.
2. Each push carries the hyper-parameters of the parameter groups, and names the tensors without a gradient.
3. If a gradient is not finite, an update of weight 0 is pushed. With --dp-noise it is noise.
4. With overlap step() returns while the state is on its way, if the parameters are the pulled state. Each parameter waits
   for its own values at its first use (`AwaitedParameters`). `arrive` waits for all: before the next gradient leaves, and
   before all else that this class does.

Rules
- The parameters are the pulled state.
- With a staleness bound of 0 only the state of the newest step changes the parameters, before the script uses them. Without
  overlap gradients stay in place until their push is folded. So neither need a copy (`WorkerArrays.direct`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from narrows.compression.codecs import raw_pieces
from narrows.protocols import effects as e
from narrows.protocols.config.key_ranges import TENSORS, Keys, parts_of_tensors
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import pack
from narrows.worker.model.arrays import SharedWeights, WorkerArrays
from narrows.worker.model.awaited_parameters import AwaitedParameters, compiled, why_not
from narrows.worker.model.flat import FloatArray
from narrows.worker.model.optimizers import call_step_hooks, each_of, why_whole
from narrows.worker.runtime.launcher_pipe import say_here
from narrows.worker.sync.overlap import GradientOverlap
from narrows.worker.sync.sync_step import StepEngine
from narrows.worker.sync.updates import UpdateStep, evaluated

PLAIN = (bool, int, float, str, type(None))
UNUSED = (
    "load_state_dict(): where gradients are pushed the servers' state of the optimizer holds, and what was loaded is not used; "
    "go on with their checkpoints by --resume, or use --push update"
)
ONCE = "initial_accumulator_value"  # one value for all groups of an Adagrad


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


@cache
def _arguments(kind: Any) -> frozenset[str]:
    """Return the names of the arguments of an optimizer's constructor."""
    return frozenset(inspect.signature(kind.__init__).parameters)


def hyper_of(optimizer: torch.optim.Optimizer) -> bytes:
    """Pack the hyper-parameters of each parameter group.

    Tensors of one element count as numbers. Values that the optimizer's constructor does not take, such as those that a
    scheduler adds, are left out. Raises UsageError with the name of a hyper-parameter that is not a plain value.
    """
    groups = []
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (type(each), group) for each in each_of(optimizer) for group in each.param_groups
    ]
    for kind, group in kinds:
        known = _arguments(kind)
        values: dict[str, Any] = {}
        for name, value in group.items():
            if name == "params" or name not in known:
                continue
            value = [_plain(v) for v in value] if isinstance(value, (tuple, list)) else _plain(value)
            if not all(isinstance(v, PLAIN) for v in (value if isinstance(value, list) else [value])):
                raise UsageError(f"hyper-parameter {name!r} is no plain value: use --push update")
            values[name] = value
        groups.append(values)
    return pack(groups)


def rebuilt_by(inner: torch.optim.Optimizer, cut: str, starts: bool = False) -> str:
    """Return the names of the classes by which the server rebuilds this optimizer, as `ModelSpec.optimizer` has them.

    Args:
        inner: the optimizer; several as a `CombinedOptimizer`.
        cut: where the run cuts the model, one of CUTS.
        starts: gradients are pushed in the start of the run alone.

    Raises:
        UsageError: the server cannot rebuild it.
    """
    flag, instead = ("--start-steps", "leave it out") if starts else ("--push gradient", "use --push update")
    each = each_of(inner)
    kinds = list(dict.fromkeys(type(optimizer) for optimizer in each))
    reasons = [(why, kind) for kind in kinds if (why := why_whole(kind, cut))]
    if reasons:
        why, kind = reasons[0]
        other = ", or start the server with --cut tensors" if not why_whole(kind, TENSORS) else ""
        raise UsageError(f"{flag} needs an optimizer that the server can rebuild, but {why}: {instead}{other}")
    for kind in kinds:
        same = [optimizer for optimizer in each if type(optimizer) is kind]
        if len({optimizer.defaults.get(ONCE) for optimizer in same}) > 1:
            raise UsageError(
                f"{flag} needs an optimizer that the server can rebuild, but it would give all optimizers the {ONCE} of the "
                f"first: {instead}"
            )
    names = [type(optimizer).__name__ for optimizer in each for _ in optimizer.param_groups]
    return names[0] if len(kinds) == 1 else "+".join(names)


class GradientStep(UpdateStep):
    """See `SyncStep`.

    Args:
        engine: the engine of this worker.
        arrays: arrays in which the pulled state is what the worker computes on (`shared`).
        overlap: backward passes of a step, if gradients leave during the last of them; 0: gradients leave at step().
        before: as of `UpdateStep`.

    Raises:
        UsageError: overlap together with --dp-clip, or with a SPEC that codes all gradients at once.
    """

    def __init__(
        self, engine: StepEngine, arrays: WorkerArrays, overlap: int, before: UpdateStep | None = None
    ) -> None:
        super().__init__(engine, arrays, before)
        self.passes = overlap
        if overlap and engine.privacy is not None:
            raise UsageError(
                "overlap=True sends gradients part by part, and --dp-clip needs the length of all before the first leaves: "
                "leave out one of the two"
            )
        self.hooks = [each.register_load_state_dict_post_hook(self._loaded) for each in each_of(engine.inner)]
        self.overlap: GradientOverlap | None = None
        self.awaited: AwaitedParameters | None = None  # None: step() always waits for the whole state
        if overlap and not engine.tuning.up_raw:
            raise UsageError(
                f"overlap=True sends gradients part by part, --compress {engine.settings.compress} codes all of them "
                "at once: use --compress dense, or leave out overlap=True"
            )

    def begin(self, event: e.MemberStarted) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            super().begin(event)
        if self.awaited is not None:
            self.awaited.recount()
        if self.overlap is not None and len(self.overlap.cuts) != len(event.ranges):
            self.overlap.cut(list(event.ranges))
        if self.passes and self.overlap is None:
            self.overlap = GradientOverlap(
                self.engine.flat, list(event.ranges), self.passes, self._landed, self.engine.home, self.arrive
            )
            if self.arrays.direct and self.mode.barrier and not why_not(self.engine.flat):
                self.awaited = AwaitedParameters(self.engine.flat, self._wait, self.arrive)

    def end_kind(self) -> None:
        self.awaited = None  # of a start, in which step() waits for the whole state
        for hook in self.hooks:
            hook.remove()
        if self.overlap is not None:
            self.overlap.end()
        self.overlap, self.passes = None, 0
        self.shards.let_leave(False)

    def handle(self, event: MemberEffect) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # what handles events waits for none
            super().handle(event)
        if self.awaited is not None:
            if isinstance(event, e.StatePart):
                self.awaited.arrived(event.state.begin, event.state.end)
            elif isinstance(event, e.MemberResharded):
                self.awaited.recount()
        if (
            isinstance(event, e.MemberResharded) and self.overlap is not None
        ):  # no part has left: ready() waits for the move
            self.overlap.cut(list(event.ranges))

    def ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        super().ready(limit_s)
        if self.awaited is not None and self.awaited.pending:
            self.awaited.end()
        if self.overlap is not None:  # parts that leave in backward need room in the window
            self.shards.wait_window()
        if self.overlap is not None:  # the start of the run may have ended meanwhile
            self._open(self.overlap)

    def _open(self, overlap: GradientOverlap) -> None:
        """Let parts of the present clock's update leave: from here on it is pushed, whatever a Reshard says."""
        self.shards.let_leave(True)
        overlap.open(self.arrays.landing(self.shards.clock))

    def _drop(self, overlap: GradientOverlap) -> None:
        self.shards.let_leave(False)
        overlap.drop()

    def resume(self) -> bool:
        if self.overlap is not None and self.composed != self.shards.epoch:
            self._drop(self.overlap)
        return super().resume()

    def idle(self) -> None:
        self.arrive()
        if self.overlap is not None:
            self._drop(self.overlap)
        super().idle()
        if self.overlap is not None and self.overlap.target is None:
            self.shards.wait_window()  # async: this worker may hold, and parts that leave are of an update that is pushed
            self._open(self.overlap)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Wait for parameters of the state that is on its way."""
        self.engine.waiting.until(done, WAIT_LIMIT_S, f"a state for clock {self.shards.clock}")

    def arrive(self) -> None:
        """Wait until all parameters have their new values, and let gradients of the next backward pass leave.

        If this worker had to rejoin meanwhile, the parameters that the script has used may be of two states. Then no
        gradient leaves, and the next step() drops those that the script makes (`resume`).
        """
        awaited, overlap = self.awaited, self.overlap
        if awaited is None or overlap is None or not awaited.pending:
            return
        with awaited.lock:
            if awaited.pending:
                epoch = self.composed
                self.ready()
                if self.composed != epoch:
                    self._drop(overlap)
                    self.composed = epoch

    @property
    def may_await(self) -> bool:
        """True if step() may return while the state is on its way."""
        return self.awaited is not None and not self.engine.settings.starting and not compiled()

    @property
    def staleness(self) -> int:
        return 0 if self.awaited is not None and self.awaited.pending else super().staleness

    def shared(self) -> SharedWeights:
        self.arrive()
        return super().shared()

    def step(self, closure: Callable[[], Any] | None) -> Any:
        self.arrive()
        if self.overlap is None:
            self.shards.wait_window()
        if self.resume() and self.drops(closure):
            return None
        with self.engine.trace.script:
            loss = evaluated(closure)
        if self.overlap is not None:
            self._hooks(after=False)
            self._close(self.overlap)
        elif self.engine.reduce() or self.engine.hides:  # --dp-noise: a skipped step is pushed as noise too
            self._hooks(after=False)
            self._push()
        else:
            self.shards.skip()
        if self.awaited is not None and self.may_await:
            self.awaited.begin()
        else:
            self.ready()
        if not self.engine.skips.newest:
            self._hooks(after=True)
        return loss

    def _hooks(self, after: bool) -> None:
        """Call the step hooks of the script's optimizers, before the push or after the new state has come."""
        cut = self.engine.slice
        with cut.stepped() if cut is not None else nullcontext():
            call_step_hooks(self.engine.inner, after)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn that a state loaded into the script's optimizer is not used, since the servers step."""
        if optimizer.state:
            say_here(UNUSED)

    def _close(self, overlap: GradientOverlap) -> None:
        gradient, absent = overlap.close()
        self.shards.let_leave(False)
        flat, values = self.engine.flat, torch.from_numpy(gradient)
        cuts_of = zip(flat.names, flat.offsets, flat.offsets[1:], strict=False)
        counts = self.engine.skips.look([(name, values[begin:end]) for name, begin, end in cuts_of])
        hyper = pack([hyper_of(self.engine.inner), absent])
        for shard, cuts in enumerate(overlap.cuts):
            (piece,) = raw_pieces(gradient[slice(*cuts[0])], cuts[0][0], cuts[:1])
            self.shards.send_part(shard, 0, len(cuts), piece, hyper, counts, last=True)
        self.shards.pushed()

    def _landed(self, shard: int, part: int, count: int, keys: Keys, values: FloatArray) -> None:
        """Send a part of the gradient that is on the host now."""
        (piece,) = raw_pieces(values, keys[0], [keys])
        self.shards.send_part(shard, part, count, piece)

    def _push(self) -> None:
        clock, absent, trace = self.shards.clock, self.arrays.flat.absent(), self.engine.trace
        if self.engine.hides:
            absent = []  # these get noise too: which tensors have no gradient may depend on the data
        tables = self.engine.tables
        hyper = pack([hyper_of(self.engine.dense), absent, *([rates] if (rates := tables.rates()) else [])])
        rows = tables.pieces() or [[] for _ in self.shards.ours]
        keys = [exchange.turn(clock) for exchange in self.shards.exchanges]
        if not self.shards.tuning.up_raw or self.engine.privacy is not None:
            with trace.difference:
                values = [self.arrays.gradients(each, clock, self.lazy) for each in keys]
            self.send("gradient", keys, values, hyper=hyper, rows=rows)
            return
        for shard, ours, more in zip(self.shards.ours, keys, rows, strict=True):
            cuts = list(parts_of_tensors(*ours, self.engine.flat.offsets))
            count = len(cuts) + len(more)
            for part, cut in enumerate(cuts):  # each part leaves as soon as it is read
                with trace.difference:
                    gradient = self.arrays.gradients(cut, clock)
                with trace.encode:
                    (piece,) = self.arrays.home.raw_pieces(gradient, cut[0], [cut])
                self.shards.send_part(shard, part, count, piece, hyper, last=part == count - 1)
            for part, piece in enumerate(more, len(cuts)):
                self.shards.send_part(shard, part, count, piece, last=part == count - 1)
        self.shards.pushed()

    def flush(self, last: bool) -> SharedWeights:
        """Pull the model to end with. No gradient is left to send, and a residual of gradients is not sent."""
        self.arrive()
        if self.overlap is not None:
            self._drop(self.overlap)
        self.shards.wait_window()
        self.resume()
        if self.shards.promised:
            self.shards.skip()  # other members wait for an update that was to leave in a backward pass
        return self.end(last)

    def load_residual(self, whole: FloatArray) -> None:
        if not self.shards.tuning.up_lossless:  # else the residual is of a mode that pushes updates
            super().load_residual(whole)
