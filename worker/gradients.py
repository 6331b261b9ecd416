"""A worker that pushes gradients, for the server's optimizer to step. The main thread owns it, but for parts that leave early.

Rules
- The parameters are the pulled state; the script's optimizer never steps here, and its hyper-parameters go along.
- With a bound of 0 nothing changes the parameters but a state that step() waits for, and gradients stay as they are until
  their push is folded. So neither needs a copy of ours (`Arrays.direct`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from narrows.compression.codecs import raw_pieces
from narrows.protocols import effects as e
from narrows.protocols.errors import UsageError
from narrows.protocols.keys import Keys, parts
from narrows.protocols.modes import ELEMENTWISE
from narrows.protocols.wire import pack
from narrows.worker.arrays import Arrays
from narrows.worker.flat import FloatArray
from narrows.worker.overlap import Overlap
from narrows.worker.shards import WAIT_LIMIT_S
from narrows.worker.updates import Updates

if TYPE_CHECKING:
    from narrows.worker.engine import Engine

PLAIN = (bool, int, float, str, type(None))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def hyper_of(optimizer: torch.optim.Optimizer) -> bytes:
    """Plain hyper-parameters of each group. Raises UsageError naming one that is not plain."""
    groups = []
    known = inspect.signature(type(optimizer).__init__).parameters
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
    kind, name = type(inner), type(inner).__name__
    why = ""
    if kind.__module__.split(".")[:2] != ["torch", "optim"]:
        why = f"{kind.__module__}.{name} is not in torch.optim"
    elif name not in ELEMENTWISE:
        why = f"{name} is not elementwise, and shards cut tensors"
    if why:
        raise UsageError(
            f"--push gradient needs an optimizer that the server can rebuild, but {why}: use --push update"
        )
    return name


class Gradients(Updates):
    """See `Sync`. `overlap`: backward passes of a step whose gradients leave during the last one; 0: they leave at step()."""

    def __init__(self, engine: Engine, arrays: Arrays, overlap: int) -> None:
        super().__init__(engine, arrays)
        self.passes = overlap
        self.overlap: Overlap | None = None
        if overlap and not engine.tuning.up_raw:
            raise UsageError(
                f"overlap=True sends gradients part by part, --compress {engine.settings.compress} codes all of them "
                "at once: use --compress dense, or leave out overlap=True"
            )

    def begin(self, event: e.Started) -> None:
        super().begin(event)
        if self.passes and self.overlap is None:
            self.overlap = Overlap(self.engine.flat, list(event.ranges), self.passes, self._send_part)

    def ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        super().ready(limit_s)
        if self.overlap is not None:  # backward may begin: its parts need a free place in the window
            self.shards.wait_window()
            self.overlap.open(self.arrays.buffer(self.shards.clock))

    def resume(self) -> bool:
        if self.overlap is not None and self.composed != self.shards.epoch:
            self.overlap.drop()
        return super().resume()

    def step(self, closure: Callable[[], Any] | None) -> Any:
        if self.overlap is None:
            self.shards.wait_window()
        if self.resume() and closure is None:
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.overlap is not None:
            self._close(self.overlap)
        else:
            self._push()
        self.ready()
        return loss

    def _close(self, overlap: Overlap) -> None:
        gradient, absent = overlap.close()
        hyper = pack([hyper_of(self.engine.inner), absent])
        for shard, cuts in enumerate(overlap.cuts):
            self._send_part(shard, 0, len(cuts), cuts[0], gradient[slice(*cuts[0])], hyper)
        self.shards.pushed()

    def _send_part(self, shard: int, part: int, count: int, keys: Keys, values: FloatArray, hyper: bytes = b"") -> None:
        (piece,) = raw_pieces(values, keys[0], [keys])
        self.shards.send_part(shard, part, count, piece, hyper)

    def _push(self) -> None:
        clock, hyper = self.shards.clock, pack([hyper_of(self.engine.inner), self.engine.flat.absent()])
        keys = [exchange.turn(clock) for exchange in self.shards.exchanges]
        if not self.shards.tuning.up_raw:
            self.send("gradient", keys, [self.arrays.gradients(each, clock) for each in keys], hyper=hyper)
            return
        for shard, ours in enumerate(keys):
            cuts = list(parts(*ours))
            for part, cut in enumerate(cuts):  # each as soon as it is read
                self._send_part(shard, part, len(cuts), cut, self.arrays.gradients(cut, clock), hyper)
        self.shards.pushed()

    def flush(self) -> FloatArray:
        """No gradient is left, and residuals of gradients are nothing to end with."""
        self.shards.wait_window()
        self.resume()
        return self.shards.master(flushed=True, resume=self.shards.wait_ready)

    def load_residual(self, whole: FloatArray) -> None:
        if not self.shards.tuning.up_lossless:  # else it is of another mode: an update is no gradient
            super().load_residual(whole)
