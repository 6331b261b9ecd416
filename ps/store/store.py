"""The store of one shard: the master copy x and the published copy p of its key range, and what is done to them.

Rules
- `apply(change)` is the only way in: x, p and all beside them follow from the changes, in their order. A `Publish` is numbered,
  from 0 on, the first weights.
- A view of p or x that was handed out may still be on its way: `lent()` says so, and then the next change goes to a fresh
  buffer instead of the lent one. Nobody ever sees a buffer change under a message.
- Reduction is in the order given (worker id), in float32, weight times value then added: bit for bit repeatable.
- A lossy downlink keeps its residual as x - p: one for the shard, not one for each child.
- Rows of tables are beside the keys (embedding_rows.py): changes step them too, and no publication has them.
- An exchange in fragments (Streaming DiLoCo, 2501.18512) changes x, p and the momentum at the fragment's keys alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from narrows.compression import Memory, NonFiniteError, accumulate, codecs, parse
from narrows.protocols.config.checkpoint_names import OPTIMIZER
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.messages import CREDIT_MAX
from narrows.ps.store.changes import (
    Change,
    FloatArray,
    Fold,
    LoadArrays,
    MergeStoppedModels,
    OuterStep,
    Publish,
    Rebase,
    SetFirstWeights,
    Step,
    Terms,
)
from narrows.ps.store.embedding_rows import EmbeddingRows
from narrows.ps.store.reduction import TrimmedMean, WeightedMean
from narrows.ps.store.update_gain import Gain

DELTAS_MAX = CREDIT_MAX  # publications kept encoded: a child further behind gets the whole state
DELTA_BYTES_RATIO = 1.0  # kept deltas never hold more bytes than this share of the dense state


class ServerOptimizer(Protocol):
    """Steps the weights of a shard along a folded gradient; see ps/store/torch_optimizer.py."""

    def step(
        self, weights: FloatArray, gradient: FloatArray, hyper: bytes, absent: Sequence[int], scale: float
    ) -> None:
        """Change `weights` in place. `absent`: tensors without a gradient. `scale` multiplies the learning rate."""

    def check(self, hyper: bytes) -> None:
        """Raise RemoteProtocolError for hyper-parameters that a step would refuse."""

    def state(self) -> dict[str, FloatArray]: ...

    def kept(self) -> list[list[Any]]:
        """Return what is kept of each tensor: its index, the name, and the value if one is for all of it, else None."""

    def read(self, name: str, begin: int, end: int) -> FloatArray:
        """Values [begin, end) of this name, of the keys of the shard; zeros where nothing is kept."""

    def load(self, state: dict[str, FloatArray]) -> None: ...


def fits(array: npt.NDArray[Any], size: int) -> bool:
    """True if this is an array of so many parameters, as kernels take it."""
    return array.dtype == np.float32 and array.shape == (size,)


def assume_lent() -> bool:
    """Where nobody knows better."""
    return True


class Store:
    """Arrays of keys [begin, end). `codings`: what publications may be coded with, the last until another is asked for.
    `outer`: rate and momentum of the outer optimizer. `barrier`: x changes between two publications only. `cut`: of a trimmed
    mean, 0: a mean."""

    def __init__(
        self,
        begin: int,
        end: int,
        *,
        barrier: bool,
        codings: Sequence[str] = ("dense",),
        outer: tuple[float, float] | None = None,
        optimizer: ServerOptimizer | None = None,
        lent: Callable[[], bool] = assume_lent,
        gain: Gain | None = None,
        cut: float = 0.0,
        tables: EmbeddingRows | None = None,
    ) -> None:
        self.begin, self.end = begin, end
        self.size = end - begin
        self.tables = tables or EmbeddingRows()
        self.gain = gain or Gain(self.size)  # told of each update that is added
        self.lent = lent
        self.down = parse(codings[-1]).contraction()  # x - p is its error feedback
        self.memories: dict[Keys, Memory] = {}  # of the downlink: each fragment is a stream of its own
        self.publication = -1
        self.x: FloatArray = np.zeros(self.size, np.float32)
        self.p: FloatArray = self.x
        self.outer, self.optimizer = outer, optimizer
        self.momentum: FloatArray | None = np.zeros(self.size, np.float32) if outer else None
        self.mean = TrimmedMean(begin, self.size, cut) if cut else WeightedMean(begin, self.size)
        # Publications as keys and payload; None: the values are in p. All that are here are of one of these kinds.
        self.deltas: OrderedDict[int, tuple[Keys, bytes | None]] = OrderedDict()
        self.rebased = False  # since the last publication: then it is of all keys
        # p is x itself: between two barriers neither changes, and no lossy compressor ever needs both.
        self.shared = barrier and self.down.lossless and len(codings) == 1

    @property
    def whole(self) -> Keys:
        return (self.begin, self.end)

    def apply(self, change: Change) -> None:
        APPLY[type(change)](self, change)

    def weights_length(self) -> float:
        """The L2 norm of x."""
        return math.sqrt(float(np.dot(self.x, self.x)))

    def norm(self, terms: Terms) -> float:
        """The squared L2 norm of the sum of `terms`."""
        if not terms:
            return 0.0
        mean = self.mean.of(terms)
        with np.errstate(over="ignore", invalid="ignore"):  # what is too long to be squared counts as not finite
            return float(np.dot(mean, mean))

    def _own_x(self) -> FloatArray:
        """x, fit to be written."""
        if self.shared and self.lent():
            self.x = self.p = self.x.copy()
        return self.x

    def _at(self, keys: Keys) -> slice:
        return slice(keys[0] - self.begin, keys[1] - self.begin)

    def check(self) -> None:
        """Raises ValueError where an array does not fit the keys: kernels would read and write beyond it."""
        for name, array in self.arrays().items():
            if name in ("x", "p", "outer.momentum") and not fits(array, self.size):
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, and not float32[{self.size}]")

    # Changes.

    def _first_weights(self, change: SetFirstWeights) -> None:
        x = np.zeros(self.size, np.float32)
        for piece in change.pieces:
            codecs.put(piece, 1.0, x, self.begin)
        self._begin(x, x, 0)

    def _joined(self, change: MergeStoppedModels) -> None:
        x = np.zeros(self.size, np.float32)
        for piece in change.pieces:
            codecs.put(piece, 1.0, x, self.begin)
        x = self.x + (x - self.x) / np.float32(change.count)
        self._begin(x, x, 0)

    def _begin(self, x: FloatArray, p: FloatArray, publication: int) -> None:
        self.x, self.publication = x, publication
        self.p = x if self.shared else p.copy() if p is x else p
        self.deltas.clear()

    def _fold(self, change: Fold) -> None:
        x, gain = self._own_x(), self.gain.factor  # which the first of them may change
        for (weight, update), (worker, share) in zip(change.terms, change.of, strict=True):
            before = x[self.gain.at]
            for piece in update:
                codecs.add(piece, weight, x, self.begin)
            # As it was folded: one that was shortened counts as long as it is now.
            self.gain.saw(worker, share, share * gain, before, x[self.gain.at])
        shares = [share for _, share in change.of]
        self._fold_rows(shares, change.terms, change.rates)

    def _fold_rows(self, weights: Sequence[float], terms: Terms, rates: bytes) -> None:
        pieces = [(weight, piece) for weight, (_, update) in zip(weights, terms, strict=True) for piece in update]
        self.tables.fold([each for each in pieces if each[1].codec == codecs.ROWS], rates)

    def _outer(self, change: OuterStep) -> None:
        assert self.outer is not None and self.momentum is not None
        rate, momentum = np.float32(self.outer[0]), np.float32(self.outer[1])
        at = self._at(change.keys)
        x, velocity, mean = self._own_x()[at], self.momentum[at], self.mean.of(change.terms)[at]
        velocity *= momentum
        velocity += mean
        x += rate * (mean + momentum * velocity)
        self.mean.clear()

    def _step(self, change: Step) -> None:
        assert self.optimizer is not None
        mean = self.mean.of(change.terms)
        if change.shrink < 1.0:
            mean *= np.float32(change.shrink)
        self.optimizer.step(self._own_x(), mean, change.hyper, change.absent, change.scale)
        self._fold_rows([change.scale * weight for weight, _ in change.terms], change.terms, change.rates)
        self.mean.clear()

    def _rebase(self, change: Rebase) -> None:
        x = self._own_x()
        x -= change.before
        x += change.base
        self.rebased = True

    def _load(self, change: LoadArrays) -> None:
        arrays = change.arrays
        self.tables.load(arrays)
        self._begin(arrays["x"].copy(), arrays["p"].copy(), change.publication)
        if "gain" in arrays:
            self.gain.load(arrays["gain"])
        if self.momentum is not None and "outer.momentum" in arrays:
            self.momentum = arrays["outer.momentum"].copy()
        if self.optimizer is not None:
            saved = {n.removeprefix(OPTIMIZER): v for n, v in arrays.items() if n.startswith(OPTIMIZER)}
            self.optimizer.load(saved)

    def arrays(self) -> dict[str, FloatArray]:
        """Everything a checkpoint holds of the keys of this shard; views."""
        arrays = {"x": self.x, "p": self.p}
        if self.gain.agreement:
            arrays["gain"] = self.gain.state()
        if self.momentum is not None:
            arrays["outer.momentum"] = self.momentum
        if self.optimizer is not None:
            arrays |= {f"{OPTIMIZER}{name}": value for name, value in self.optimizer.state().items()}
        return arrays

    # Publications.

    def _publish(self, change: Publish) -> None:
        """A state that overflowed (a sum of finite updates may) is published whole: whoever trains must see it as it is."""
        if change.spec:
            self.down = parse(change.spec).contraction()  # what the one before left out is in x - p
        keys = self.whole if change.keys is None or self.rebased else change.keys
        self.publication += 1
        self.rebased = False
        delta = None if self.down.lossless else self._delta(keys)
        overflows = delta is None and not self.down.lossless
        if any((payload is None) != (delta is None) for _, payload in self.deltas.values()):
            self.deltas.clear()  # what is read from p would have been added to, or be added to once more
        if delta is not None:
            if self.lent():
                self.p = self.p.copy()
            accumulate(delta, 1.0, self.p[self._at(keys)])
            self.deltas[self.publication] = (keys, delta)
        elif overflows or keys == self.whole:
            self.deltas.clear()  # nothing leads over this publication but the whole state
            self._show(self.whole)
        else:
            self.deltas[self.publication] = (keys, None)
            self._show(keys)
        self._forget()

    def _show(self, keys: Keys) -> None:
        """p = x at these keys."""
        if self.shared:
            return
        if self.lent() and keys == self.whole:
            self.p = self.x.copy()
            return
        if self.lent():
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

    def since(self, have: int) -> list[tuple[int, Keys, bytes | None]]:
        """Number, keys and payload of each publication after `have`; none where only the whole state will do.

        No payload: the values of these keys in p.
        """
        wanted = range(have + 1, self.publication + 1)
        if have < 0 or not all(number in self.deltas for number in wanted):
            return []
        return [(number, *self.deltas[number]) for number in wanted]


APPLY: dict[type[Change], Callable[[Store, Any], None]] = {
    SetFirstWeights: Store._first_weights,
    MergeStoppedModels: Store._joined,
    Fold: Store._fold,
    OuterStep: Store._outer,
    Step: Store._step,
    Rebase: Store._rebase,
    Publish: Store._publish,
    LoadArrays: Store._load,
}
