"""The store of one shard: the master copy x and the published copy p of its key range, and what is done to them.

Rules
- x changes only by `fold*`; p only by `publish`. Publications are numbered from 0, the first weights.
- A view of p or x that was handed out may still be on its way: `lent()` says so, and then the next change goes to a fresh
  buffer instead of the lent one. Nobody ever sees a buffer change under a message.
- Reduction is in the order given (worker id), in float32, weight times value then added: bit for bit repeatable.
- A lossy downlink keeps its residual as x - p: one for the shard, not one for each child.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from narrows.compression import Memory, NonFiniteError, PayloadError, accumulate, add_raw, check, ladder, parse
from narrows.protocols import messages as m
from narrows.protocols.errors import RemoteProtocolError

FloatArray = npt.NDArray[np.float32]
DELTAS_MAX = 16  # publications kept encoded: a child further behind gets the whole state
DELTA_BYTES_RATIO = 1.0  # kept deltas never hold more bytes than this share of the dense state


class ServerOptimizer(Protocol):
    """Steps the weights of a shard along a folded gradient; see ps/optimizers.py."""

    def step(
        self, weights: FloatArray, gradient: FloatArray, hyper: bytes, absent: Sequence[int], scale: float
    ) -> None:
        """Change `weights` in place. `absent`: tensors without a gradient. `scale` multiplies the learning rate."""

    def check(self, hyper: bytes) -> None:
        """Raise RemoteProtocolError for hyper-parameters that a step would refuse."""

    def state(self) -> dict[str, FloatArray]: ...

    def load(self, state: dict[str, FloatArray]) -> None: ...


class Payloads(Protocol):
    """What the store needs of a push or first-weights message."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def codec(self) -> int: ...
    @property
    def payload(self) -> m.Buffer: ...


def check_payload(message: Payloads, finite: bool) -> None:
    """Raise RemoteProtocolError where the payload is not one of exactly the keys that the message names.

    `finite`: NaN and infinity are refused too. A dense downlink carries them to whoever trains; no other coding can.
    """
    count = message.end - message.begin
    if message.codec == m.RAW_FLOAT32:
        if len(message.payload) != 4 * count:
            raise RemoteProtocolError(
                f"{count} raw values are {4 * count} bytes, the payload has {len(message.payload)}"
            )
        if finite and not np.isfinite(np.frombuffer(message.payload, np.float32)).all():
            raise RemoteProtocolError("the payload holds NaN or infinity, which --compress-down cannot code")
    elif message.codec == m.CODED:
        try:
            check(message.payload, count, finite=finite)
        except PayloadError as error:
            raise RemoteProtocolError(f"a payload that is none: {error}") from None
    else:
        raise RemoteProtocolError(f"unknown codec {message.codec}")


def add(message: Payloads, weight: float, out: FloatArray, origin: int) -> None:
    """out += weight * payload, at the message's keys; out[0] is key `origin`. One pass, straight from the bytes."""
    add_coded = accumulate if message.codec == m.CODED else add_raw
    add_coded(message.payload, weight, out[message.begin - origin : message.end - origin])


def put(message: Payloads, weight: float, out: FloatArray, origin: int) -> None:
    """out = weight * payload, at the message's keys."""
    target = out[message.begin - origin : message.end - origin]
    if message.codec == m.CODED:
        target.fill(0.0)
        accumulate(message.payload, weight, target)
    else:
        np.multiply(np.frombuffer(message.payload, np.float32), np.float32(weight), out=target)


class Store:
    """Arrays of keys [begin, end)."""

    def __init__(
        self,
        begin: int,
        end: int,
        *,
        at_once: bool,
        compress_down: str = "dense",
        outer: tuple[float, float] | None = None,
        lent: Callable[[], bool] = lambda: True,
    ) -> None:
        self.begin, self.end = begin, end
        self.size = end - begin
        self.at_once = at_once
        rungs = ladder(compress_down)
        self.code_with(rungs[0].spec)
        self.down_memory = Memory(seed=begin)
        self.lent = lent
        self.publication = -1
        self.x: FloatArray = np.zeros(self.size, np.float32)
        self.p: FloatArray = self.x
        self.outer = outer
        self.momentum: FloatArray | None = np.zeros(self.size, np.float32) if outer else None
        self._total: FloatArray | None = None  # of `mean`, kept: fresh memory costs more than the sum itself
        self.optimizer: ServerOptimizer | None = None
        self.deltas: OrderedDict[int, bytes] = OrderedDict()
        # p is x itself: between two barriers neither changes, and no lossy compressor ever needs both.
        self.shared = not at_once and self.down.lossless and len(rungs) == 1

    def first_weights(self, parts: Sequence[Payloads]) -> None:
        """The first weights of the run, whole."""
        self.x = np.zeros(self.size, np.float32)
        for part in parts:
            add(part, 1.0, self.x, self.begin)
        self.restart(self.x, self.x if self.shared else self.x.copy(), 0)

    def restart(self, x: FloatArray, p: FloatArray, publication: int) -> None:
        """Begin from these arrays (first weights or a checkpoint)."""
        self.x, self.p, self.publication = x, x if self.shared else p, publication
        self.deltas.clear()

    def _own_x(self) -> FloatArray:
        """x, fit to be written."""
        if self.shared and self.lent():
            self.x = self.p = self.x.copy()
        return self.x

    def rebase(self, before: FloatArray, base: FloatArray) -> None:
        """x = base + (x - before): exactly base, where nothing was folded on top of `before`."""
        x = self._own_x()
        x -= before
        x += base

    def fold_update(self, parts: Sequence[Payloads], weight: float) -> None:
        """x += weight * update."""
        x = self._own_x()
        for part in parts:
            add(part, weight, x, self.begin)

    def total(self) -> FloatArray:
        """What `mean` has written, float32[size]."""
        if self._total is None:
            self._total = np.empty(self.size, np.float32)
        return self._total

    def mean(self, pushes: Sequence[tuple[float, Sequence[Payloads]]]) -> FloatArray:
        """`total`, where the pushes have keys: the sum of weight * push in the order given."""
        total = self.total()
        for turn, (weight, parts) in enumerate(pushes):
            for part in parts:
                (add if turn else put)(part, weight, total, self.begin)
        return total

    def fold_outer(self, mean: FloatArray) -> None:
        """Outer SGD with Nesterov momentum on the pseudo-gradient -mean (DiLoCo, 2311.08105, alg. 1)."""
        assert self.outer is not None and self.momentum is not None
        rate, momentum = np.float32(self.outer[0]), np.float32(self.outer[1])
        x = self._own_x()
        self.momentum *= momentum
        self.momentum += mean
        x += rate * (mean + momentum * self.momentum)

    def fold_gradient(self, mean: FloatArray, hyper: bytes, absent: Sequence[int], scale: float) -> None:
        """One step of the script's optimizer along the mean gradient."""
        assert self.optimizer is not None
        self.optimizer.step(self._own_x(), mean, hyper, absent, scale)

    def code_with(self, spec: str) -> None:
        """Code publications with another SPEC from now on; what the one before left out is in x - p."""
        self.down = parse(spec).contraction()  # x - p is its error feedback

    def publish(self) -> None:
        """Make x the published state, through the downlink's compressor where it has one.

        A state that overflowed (a sum of finite updates may) is published whole: whoever trains must see it as it is.
        """
        self.publication += 1
        if self.shared:
            return
        delta = None if self.down.lossless else self._delta()
        if delta is None:
            self.deltas.clear()  # nothing leads over this publication but the whole state
            if self.lent():
                self.p = self.x.copy()
            else:
                np.copyto(self.p, self.x)
            return
        if self.lent():
            self.p = self.p.copy()
        accumulate(delta, 1.0, self.p)
        self.deltas[self.publication] = delta
        limit = DELTA_BYTES_RATIO * 4 * self.size
        while len(self.deltas) > DELTAS_MAX or (len(self.deltas) > 1 and sum(map(len, self.deltas.values())) > limit):
            self.deltas.popitem(last=False)

    def _delta(self) -> bytes | None:
        """x - p, coded; None where it is not finite."""
        self.down_memory.step = self.publication - 1  # the clock that is complete with it: that of the pushes in it
        with np.errstate(over="ignore", invalid="ignore"):
            left = self.x - self.p
        try:
            return bytes(self.down.encode(left, self.down_memory))
        except NonFiniteError:
            return None

    def since(self, have: int) -> list[tuple[int, bytes]] | None:
        """(number, delta) of each publication after `have`, or None where only the whole state will do."""
        wanted = range(have + 1, self.publication + 1)
        if have < 0 or not all(number in self.deltas for number in wanted):
            return None
        return [(number, self.deltas[number]) for number in wanted]

    def arrays(self) -> dict[str, FloatArray]:
        """Everything a checkpoint holds of this shard; views."""
        arrays = {"x": self.x, "p": self.p}
        if self.momentum is not None:
            arrays["outer.momentum"] = self.momentum
        if self.optimizer is not None:
            arrays |= {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        return arrays

    def load(self, arrays: dict[str, FloatArray], publication: int) -> None:
        """The inverse of `arrays`."""
        self.restart(arrays["x"].copy(), arrays["p"].copy(), publication)
        if self.momentum is not None and "outer.momentum" in arrays:
            self.momentum = arrays["outer.momentum"].copy()
        if self.optimizer is not None:
            prefix = "optimizer."
            self.optimizer.load({n[len(prefix) :]: v for n, v in arrays.items() if n.startswith(prefix)})
