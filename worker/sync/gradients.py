"""A worker that pushes gradients, for the server's optimizer to step. The main thread owns it, but for parts that leave early.

Rules
- The parameters are the pulled state; the script's optimizer never steps here, and its hyper-parameters go along.
- With a bound of 0 nothing changes the parameters but a state that step() waits for, and gradients stay as they are until
  their push is folded. So neither needs a copy of ours (`WorkerArrays.direct`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from narrows.compression.codecs import raw_pieces
from narrows.protocols import effects as e
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import pack
from narrows.worker.checkpoint.server_state import ServerOptimizerState
from narrows.worker.model.arrays import WorkerArrays
from narrows.worker.model.flat import Array, FloatArray
from narrows.worker.model.optimizers import call_step_hooks, each_of, why_whole
from narrows.worker.runtime.launcher_pipe import complain
from narrows.worker.sync.overlap import GradientOverlap
from narrows.worker.sync.step import StepEngine
from narrows.worker.sync.updates import UpdateStep, evaluated

PLAIN = (bool, int, float, str, type(None))
UNUSED = (
    "load_state_dict(): where gradients are pushed the servers' state of the optimizer holds, and what was loaded is not used; "
    "go on with their checkpoints by --resume, or use --push update"
)
ONCE = "initial_accumulator_value"  # Adagrad has it once, for all of its groups


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def hyper_of(optimizer: torch.optim.Optimizer) -> bytes:
    """Plain hyper-parameters of each group. Raises UsageError naming one that is not plain."""
    groups = []
    known = inspect.signature(type(each_of(optimizer)[0]).__init__).parameters  # several are of one class
    for group in optimizer.param_groups:
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


def rebuilt_by(inner: torch.optim.Optimizer) -> str:
    """The name that the server rebuilds this optimizer by. Raises UsageError where it cannot."""
    each = each_of(inner)
    kinds = list(dict.fromkeys(type(optimizer) for optimizer in each))
    reasons = [why for kind in kinds if (why := why_whole(kind))]
    if len(kinds) > 1:
        reasons.append(f"{' and '.join(kind.__name__ for kind in kinds)} are not of one class")
    if len({optimizer.defaults.get(ONCE) for optimizer in each}) > 1:
        reasons.append(f"it would give all optimizers the {ONCE} of the first")
    if reasons:
        raise UsageError(
            f"--push gradient needs an optimizer that the server can rebuild, but {reasons[0]}: use --push update"
        )
    return kinds[0].__name__


class GradientStep(UpdateStep):
    """See `SyncStep`. `overlap`: backward passes of a step whose gradients leave during the last one; 0: they leave at
    step()."""

    def __init__(self, engine: StepEngine, arrays: WorkerArrays, overlap: int) -> None:
        super().__init__(engine, arrays)
        self.passes = overlap
        if overlap and engine.privacy is not None:
            raise UsageError(
                "overlap=True sends gradients part by part, and --dp-clip needs the length of all before the first leaves: "
                "leave out one of the two"
            )
        self.servers = ServerOptimizerState(engine, self.shards)
        for each in each_of(engine.inner):
            each.register_load_state_dict_post_hook(self._loaded)
        self.overlap: GradientOverlap | None = None
        if overlap and not engine.tuning.up_raw:
            raise UsageError(
                f"overlap=True sends gradients part by part, --compress {engine.settings.compress} codes all of them "
                "at once: use --compress dense, or leave out overlap=True"
            )

    def begin(self, event: e.Started) -> None:
        super().begin(event)
        if self.overlap is not None and len(self.overlap.cuts) != len(event.ranges):
            self.overlap.cut(list(event.ranges))
        if self.passes and self.overlap is None:
            self.overlap = GradientOverlap(
                self.engine.flat, list(event.ranges), self.passes, self._landed, self.engine.home
            )

    def handle(self, event: MemberEffect) -> None:
        super().handle(event)
        if isinstance(event, e.MomentsArrived):
            self.servers.arrived(event)
        if isinstance(event, e.Moved) and self.overlap is not None:  # no part has left: ready() waits for the move
            self.overlap.cut(list(event.ranges))

    def ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        super().ready(limit_s)
        if self.overlap is not None:  # backward may begin: its parts need a free place in the window
            self.shards.wait_window()
            self.overlap.open(self.arrays.landing(self.shards.clock))

    def resume(self) -> bool:
        if self.overlap is not None and self.composed != self.shards.epoch:
            self.overlap.drop()
        return super().resume()

    def idle(self) -> None:
        if self.overlap is not None:
            self.overlap.drop()
        super().idle()
        if self.overlap is not None and self.overlap.target is None:
            self.overlap.open(self.arrays.landing(self.shards.clock))

    def step(self, closure: Callable[[], Any] | None) -> Any:
        if self.overlap is None:
            self.shards.wait_window()
        if self.resume() and self.drops(closure):
            return None
        loss = evaluated(closure)
        if self.overlap is not None:
            self._hooks(after=False)
            self._close(self.overlap)
        elif self.engine.reduce() or self.engine.hides:  # where noise hides what is pushed, it hides a step without
            self._hooks(after=False)
            self._push()
        else:
            self.shards.skip()
        self.ready()
        if not self.engine.skips.newest:
            self._hooks(after=True)
        return loss

    def _hooks(self, after: bool) -> None:
        """Call the step hooks of the script's optimizers, which see the gradients that leave and the weights that come."""
        cut = self.engine.slice
        with cut.stepped() if cut is not None else nullcontext():
            call_step_hooks(self.engine.inner, after)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """A state was loaded into one of the script's optimizers."""
        if optimizer.state:
            complain(UNUSED)

    def _close(self, overlap: GradientOverlap) -> None:
        gradient, absent = overlap.close()
        flat, values = self.engine.flat, torch.from_numpy(gradient)
        cuts_of = zip(flat.names, flat.offsets, flat.offsets[1:], strict=False)
        counts = self.engine.looked([(repr(name), values[begin:end]) for name, begin, end in cuts_of])
        hyper = pack([hyper_of(self.engine.inner), absent])
        for shard, cuts in enumerate(overlap.cuts):
            (piece,) = raw_pieces(gradient[slice(*cuts[0])], cuts[0][0], cuts[:1])
            self.shards.send_part(shard, 0, len(cuts), piece, hyper, counts)
        self.shards.pushed()

    def _landed(self, shard: int, part: int, count: int, keys: Keys, values: FloatArray) -> None:
        """A part is on the host, and may leave."""
        (piece,) = raw_pieces(values, keys[0], [keys])
        self.shards.send_part(shard, part, count, piece)

    def _push(self) -> None:
        clock, absent = self.shards.clock, self.arrays.flat.absent()
        if self.engine.hides:
            absent = []  # a tensor without a gradient gets noise as well: which these are may depend on the data
        tables = self.engine.tables
        hyper = pack([hyper_of(self.engine.dense), absent, *([rates] if (rates := tables.rates()) else [])])
        rows = tables.pieces() or [[] for _ in self.shards.ours]
        keys = [exchange.turn(clock) for exchange in self.shards.exchanges]
        if not self.shards.tuning.up_raw or self.engine.privacy is not None:
            self.send("gradient", keys, [self.arrays.gradients(each, clock) for each in keys], hyper=hyper, rows=rows)
            return
        for shard, ours, more in zip(self.shards.ours, keys, rows, strict=True):
            cuts = list(parts(*ours))
            count = len(cuts) + len(more)
            for part, cut in enumerate(cuts):  # each as soon as it is read
                (piece,) = self.arrays.home.raw_pieces(self.arrays.gradients(cut, clock), cut[0], [cut])
                self.shards.send_part(shard, part, count, piece, hyper)
            for part, piece in enumerate(more, len(cuts)):
                self.shards.send_part(shard, part, count, piece)
        self.shards.pushed()

    def flush(self, last: bool) -> Array:
        """No gradient is left, and residuals of gradients are nothing to end with."""
        self.shards.wait_window()
        self.resume()
        return self.end(last)

    def load_residual(self, whole: FloatArray) -> None:
        if not self.shards.tuning.up_lossless:  # else it is of another mode: an update is no gradient
            super().load_residual(whole)
