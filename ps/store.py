"""The store of one shard: the master copy x and the published copy p of its key range, and what is done to them.

Rules
- x changes only by `fold*`; p only by `publish`. Publications are numbered from 0, the first weights.
- A view of p or x that was handed out may still be on its way: `lent()` says so, and then the next change goes to a fresh
  buffer instead of the lent one. Nobody ever sees a buffer change under a message.
- Reduction is in the order given (worker id), in float32, weight times value then added: bit for bit repeatable.
- A lossy downlink keeps its residual as x - p: one for the shard, not one for each child.
- What is exchanged in fragments (Streaming DiLoCo, 2501.18512) changes x and p at their keys alone, and the momentum too.
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
Keys = tuple[int, int]  # [begin, end)
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
        barrier: bool,
        compress_down: str = "dense",
        outer: tuple[float, float] | None = None,
        lent: Callable[[], bool] = lambda: True,
    ) -> None:
        self.begin, self.end = begin, end
        self.size = end - begin
        rungs = ladder(compress_down)
        self.code_with(rungs[0].spec)
        self.memories: dict[Keys, Memory] = {}  # of the downlink: each fragment is a stream of its own
        self.lent = lent
        self.publication = -1
        self.x: FloatArray = np.zeros(self.size, np.float32)
        self.p: FloatArray = self.x
        self.outer = outer
        self.momentum: FloatArray | None = np.zeros(self.size, np.float32) if outer else None
        self._total: FloatArray | None = None  # of `mean`, kept: fresh memory costs more than the sum itself
        self.optimizer: ServerOptimizer | None = None
        # Publications as keys and payload; None: the values are in p. Of both kinds there is never more than one here.
        self.deltas: OrderedDict[int, tuple[Keys, bytes | None]] = OrderedDict()
        self.rebased = False  # since the last publication: then it is of all keys
        # p is x itself: between two barriers neither changes, and no lossy compressor ever needs both.
        self.shared = barrier and self.down.lossless and len(rungs) == 1

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
        self.rebased = True

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

    def _at(self, keys: Keys) -> slice:
        return slice(keys[0] - self.begin, keys[1] - self.begin)

    def fold_outer(self, mean: FloatArray, keys: Keys) -> None:
        """Outer SGD with Nesterov momentum on the pseudo-gradient -mean (DiLoCo, 2311.08105, alg. 1) at `keys`, which are
        those of one fragment: what has not its turn keeps its momentum. mean: float32[size]."""
        assert self.outer is not None and self.momentum is not None
        rate, momentum = np.float32(self.outer[0]), np.float32(self.outer[1])
        at = self._at(keys)
        x, velocity, mean = self._own_x()[at], self.momentum[at], mean[at]
        velocity *= momentum
        velocity += mean
        x += rate * (mean + momentum * velocity)

    def fold_gradient(self, mean: FloatArray, hyper: bytes, absent: Sequence[int], scale: float) -> None:
        """One step of the script's optimizer along the mean gradient."""
        assert self.optimizer is not None
        self.optimizer.step(self._own_x(), mean, hyper, absent, scale)

    def code_with(self, spec: str) -> None:
        """Code publications with another SPEC from now on; what the one before left out is in x - p."""
        self.down = parse(spec).contraction()  # x - p is its error feedback

    def publish(self, keys: Keys | None = None) -> None:
        """Make x the published state, through the downlink's compressor where it has one. keys: all that changed since the
        last publication, None: any may have.

        A state that overflowed (a sum of finite updates may) is published whole: whoever trains must see it as it is.
        """
        whole = (self.begin, self.end)
        keys = whole if keys is None or self.rebased else keys
        self.publication += 1
        self.rebased = False
        delta = None if self.down.lossless else self._delta(keys)
        overflows = delta is None and not self.down.lossless
        if any((payload is None) != (delta is None) for _, payload in self.deltas.values()):
            self.deltas.clear()  # what is read from p would have been added to, or be added to once more
        if delta is None:
            if overflows or keys == whole:
                keys = whole
                self.deltas.clear()  # nothing leads over this publication but the whole state
            else:
                self.deltas[self.publication] = (keys, None)
            if not self.shared:
                self._show(keys)
        else:
            if self.lent():
                self.p = self.p.copy()
            accumulate(delta, 1.0, self.p[self._at(keys)])
            self.deltas[self.publication] = (keys, delta)
        self._forget()

    def _show(self, keys: Keys) -> None:
        """p = x at these keys."""
        if not self.lent():
            np.copyto(self.p[self._at(keys)], self.x[self._at(keys)])
        elif keys == (self.begin, self.end):
            self.p = self.x.copy()
        else:
            self.p = self.p.copy()
            np.copyto(self.p[self._at(keys)], self.x[self._at(keys)])

    def _forget(self) -> None:
        """Keep no more publications than are worth it: those of all fragments once are as long as the whole state."""
        limit = DELTA_BYTES_RATIO * 4 * self.size

        def kept() -> int:
            return sum(4 * (end - begin) if raw is None else len(raw) for (begin, end), raw in self.deltas.values())

        while len(self.deltas) > DELTAS_MAX or (len(self.deltas) > 1 and kept() > limit):
            self.deltas.popitem(last=False)

    def _delta(self, keys: Keys) -> bytes | None:
        """x - p at `keys`, coded; None where it is not finite."""
        memory = self.memories.setdefault(keys, Memory(seed=self.begin))
        memory.step = self.publication - 1  # the clock that is complete with it: that of the pushes in it
        with np.errstate(over="ignore", invalid="ignore"):
            left = self.x[self._at(keys)] - self.p[self._at(keys)]
        try:
            return bytes(self.down.encode(left, memory))
        except NonFiniteError:
            return None

    def since(self, have: int) -> list[tuple[int, Keys, bytes | None]] | None:
        """Number, keys and payload of each publication after `have`, or None where only the whole state will do.

        No payload: the values of these keys in p.
        """
        wanted = range(have + 1, self.publication + 1)
        if have < 0 or not all(number in self.deltas for number in wanted):
            return None
        return [(number, *self.deltas[number]) for number in wanted]

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
