"""The store of one shard: the master copy x and the published copy p of its key range, and the changes of both.

How it works

    Fold | OuterStep | Step ──> x += ...            master copy, float32[size]
    Rebase ───────────────────> x = base + (x - before)
    Publish ──────────────────> p ──> number n      published copy, float32[size]
                                 └──> deltas[n]     the change from n - 1, coded or as keys of p
    since(have) ──────────────> deltas[have + 1], ..., or nothing: then the child gets p whole
    beyond() ─────────────────> x - p, coded by `LAST`: what a child of p lacks of the master copy

1. `SetFirstWeights` or `LoadArrays` fills x and p and sets the number of the publication.
2. Changes move x. At a barrier they come between two publications only.
3. `Publish` moves p to x. With a lossless downlink p becomes equal to x. With a lossy one p gains the coded difference,
   and what coding left out stays in x - p: this is the error feedback of the downlink.
4. The store keeps the newest difference, and earlier ones: at most DELTAS_MAX, with at most the bytes of the whole state.

Rules
- `apply(change)` is the only way in: x, p and everything beside them follow from the changes, in their order.
  Publications are numbered from 0, the first weights.
- A view of p or x may still be on its way to a child: `lent()` is true then. A change copies the array
  first, and writes to the copy. So the values of a message never change while it is sent.
- Reduction is in the order given (worker ids), in float32, weight times value then added: bit for bit repeatable.
- A lossy downlink has one residual for the shard, x - p, and not one for each child.
- Embedding rows are beside the keys (embedding_rows.py): changes step them too, and no publication has them.
- An exchange in fragments (Streaming DiLoCo, 2501.18512) changes x, p and the momentum at the fragment's keys alone.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from narrows.compression import Ladder, Memory, NonFiniteError, accumulate, codecs, ladder
from narrows.compression.buffers import ChunkedUpdate
from narrows.compression.compressor import LAST
from narrows.compression.payload import no_values
from narrows.protocols.config.checkpoint_names import OPTIMIZER
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.config.memory import DELTA_BYTES_RATIO
from narrows.protocols.messages import CREDIT_MAX
from narrows.ps.store.changes import (
    Change,
    DropHandover,
    FloatArray,
    Fold,
    LoadArrays,
    MergeStoppedModels,
    OuterStep,
    Publish,
    Rebase,
    RoundLast,
    SetFirstWeights,
    Step,
    Terms,
)
from narrows.ps.store.embedding_rows import EmbeddingRows
from narrows.ps.store.reduction import Mean, TrimmedMean, WeightedMean, parts_of
from narrows.ps.store.spectrum import equal_spectrum
from narrows.ps.store.update_gain import Gain

DELTAS_MAX = CREDIT_MAX  # publications kept coded; a child further behind gets the whole state


class ServerOptimizer(Protocol):
    """Steps the weights of a shard along a folded gradient; see `TorchOptimizer` (ps/store/torch_optimizer.py)."""

    def step(self, weights: FloatArray, gradient: Mean, hyper: bytes, absent: Sequence[int], scale: float) -> None:
        """Take one step of the optimizer.

        Args:
            weights: The weights of the shard, float32[size], changed in place.
            gradient: Gives the folded gradient, part by part.
            hyper: The packed hyper-parameters of the parameter groups.
            absent: Indices of the tensors without a gradient; they stay as they are.
            scale: The factor on the learning rate.
        """

    def check(self, hyper: bytes) -> None:
        """Raise RemoteProtocolError for hyper-parameters that a step would refuse."""

    def state(self) -> dict[str, FloatArray]:
        """Return the state as a checkpoint holds it: float32 arrays by name."""
        ...

    def kept(self) -> list[list[Any]]:
        """Return [tensor index, name, value] of each state; the value is None if there is one for each key."""

    def read(self, name: str, begin: int, end: int) -> FloatArray:
        """Return the state of this name at keys [begin, end), counted from the shard's first key.

        Returns:
            float32[end - begin], zeros where there is no state.
        """

    def load(self, state: dict[str, FloatArray]) -> None:
        """Take over a state that `state` has returned."""
        ...


def fits(array: npt.NDArray[Any], size: int) -> bool:
    """True if the array is float32[size], as the kernels take it."""
    return array.dtype == np.float32 and array.shape == (size,)


class ArrayAllocator(Protocol):
    """Makes the large arrays of a shard."""

    def empty(self, count: int) -> FloatArray:
        """Return an array, float32[count], of any values."""
        ...


class HeapArrays:
    """Arrays as NumPy makes them."""

    def empty(self, count: int) -> FloatArray:
        """See ArrayAllocator."""
        return np.empty(count, np.float32)


HEAP: ArrayAllocator = HeapArrays()


def assume_lent() -> bool:
    """Treat each view as still on its way: safe if no runner says otherwise."""
    return True


def _times(mean: Mean, factor: np.float32) -> Mean:
    def product(low: int, high: int) -> FloatArray:
        part = mean(low, high)
        part *= factor
        return part

    return product


class Store:
    """The arrays of keys [begin, end)."""

    def __init__(
        self,
        begin: int,
        end: int,
        *,
        barrier: bool,
        codings: Ladder | None = None,
        outer: tuple[float, float] | None = None,
        matrices: Sequence[tuple[int, int, tuple[int, ...]]] = (),
        optimizer: ServerOptimizer | None = None,
        handover: ServerOptimizer | None = None,
        lent: Callable[[], bool] = assume_lent,
        gain: Gain | None = None,
        cut: float = 0.0,
        tables: EmbeddingRows | None = None,
        arrays: ArrayAllocator = HEAP,
    ) -> None:
        """A store of zeros without a publication.

        Args:
            begin: The first key.
            end: The key after the last.
            barrier: True if x changes between two publications only.
            codings: The compressors that may code publications, None for `dense`; the last one holds until a Publish names
                another.
            outer: Learning rate and momentum of the outer optimizer; None if there is none.
            matrices: In the order of keys (first key, key after the last, shape) of each matrix whose mean update gets equal
                singular values before an outer step.
            optimizer: The server's optimizer, for pushed gradients.
            handover: The optimizer of a start that is over. It steps nothing: workers take its state over.
            lent: True while a message that is still on its way may read x or p.
            gain: The gain, which sees each update that is added.
            cut: The share that a trimmed mean leaves out at either end; 0 for a plain mean.
            tables: The embedding rows of the shard.
            arrays: The allocator of x, p and the outer momentum.
        """
        self.begin, self.allocator = begin, arrays
        self.size = end - begin
        self.tables = tables or EmbeddingRows()
        self.gain = gain or Gain(self.size)  # sees each update that is added
        self.lent = lent
        self.codings = codings or ladder("dense")
        self.down = self.codings.compressor().contraction()  # x - p is its error feedback
        # compressor memory of the downlink; each fragment is a stream of its own
        self.memories: dict[Keys, Memory] = {}
        self.publication = -1
        self.x: FloatArray = self._zeros()
        self.p: FloatArray = self.x
        self.outer, self.matrices = outer, matrices
        self.optimizer, self.handover = optimizer, handover
        self.momentum: FloatArray | None = self._zeros() if outer and outer[1] else None
        self.mean = TrimmedMean(begin, self.size, cut) if cut else WeightedMean(begin, self.size)
        # By number: (keys, coded difference), or (keys, None) for values in p. All entries are coded, or none is.
        self.deltas: OrderedDict[int, tuple[Keys, bytes | None]] = OrderedDict()
        self.rounded: list[bytes] | None = None  # `beyond`, as RoundLast has made it, until the next change
        self.rebased = False  # True if x was rebased since the newest publication: the next one covers all keys
        self.unpublished = (
            False  # True if p is x, and x has changed since the newest publication: no child may be sent p
        )
        # p is x itself: between two barriers neither changes, and a lossless downlink never needs both.
        self.shared = barrier and self.down.lossless and len(self.codings.rungs) == 1

    @property
    def whole(self) -> Keys:
        """The keys [begin, end) of this shard."""
        return (self.begin, self.begin + self.size)

    def apply(self, change: Change) -> None:
        """Carry out one change."""
        self.rounded = None
        APPLY[type(change)](self, change)

    def weights_length(self) -> float:
        """Return the L2 norm of x."""
        return math.sqrt(float(np.dot(self.x, self.x)))

    def norm(self, terms: Terms) -> float:
        """Return the squared L2 norm of the sum of `terms`."""
        if not terms:
            return 0.0
        mean = self.mean.of(terms)
        with np.errstate(over="ignore", invalid="ignore"):  # a square that overflows counts as not finite
            return sum(float(np.dot(part, part)) for part in (mean(*at) for at in parts_of(0, self.size)))

    def _zeros(self) -> FloatArray:
        made = self.allocator.empty(self.size)
        made.fill(0)
        return made

    def _copied(self, values: FloatArray) -> FloatArray:
        made = self.allocator.empty(self.size)
        np.copyto(made, values)
        return made

    def _own_x(self) -> FloatArray:
        """Return x in an array that no message reads, so that a change may write to it."""
        self.unpublished = self.shared
        if self.shared and self.lent():
            self.x = self.p = self._copied(self.x)
        return self.x

    def _at(self, keys: Keys) -> slice:
        return slice(keys[0] - self.begin, keys[1] - self.begin)

    def check(self) -> None:
        """Raise ValueError if an array does not fit the keys: the kernels would read and write beyond its end."""
        for name, array in self.arrays().items():
            if name in ("x", "p", "outer.momentum") and not fits(array, self.size):
                raise ValueError(f"{name} is {array.dtype}{list(array.shape)}, and not float32[{self.size}]")

    # Changes.

    def _first_weights(self, change: SetFirstWeights) -> None:
        x = self._zeros() if self.publication >= 0 else self._own_x()  # the zeros that it began with
        for piece in change.pieces:
            codecs.put(piece, 1.0, x, self.begin)
        self._begin(x, x, 0)

    def _merge_stopped(self, change: MergeStoppedModels) -> None:
        """Take the model of one more stopped worker into the mean."""
        x = self._zeros()
        for piece in change.pieces:
            codecs.put(piece, 1.0, x, self.begin)
        x -= self.x
        x /= np.float32(change.count)
        x += self.x
        self._begin(x, x, 0)

    def _begin(self, x: FloatArray, p: FloatArray, publication: int) -> None:
        """Make x and p the arrays of publication `publication`, and forget the differences to earlier ones."""
        self.x, self.publication, self.unpublished = x, publication, False
        self.p = x if self.shared else self._copied(p) if p is x else p
        self.deltas.clear()

    def _fold(self, change: Fold) -> None:
        x, gain = self._own_x(), self.gain.factor  # the factor of all terms, though the first may change the gain
        for (weight, update), (worker, share) in zip(change.terms, change.of, strict=True):
            before = x[self.gain.at]
            for piece in update:
                codecs.add(piece, weight, x, self.begin)
            # A filter may have shortened the update: the gain measures how far x really moved.
            self.gain.saw(worker, share, share * gain, before, x[self.gain.at])
        shares = [share for _, share in change.of]
        self._fold_rows(shares, change.terms, change.rates)

    def _fold_rows(self, weights: Sequence[float], terms: Terms, rates: bytes) -> None:
        """Step embedding rows along the sum of weight * gradient of the terms."""
        pieces = [(weight, piece) for weight, (_, update) in zip(weights, terms, strict=True) for piece in update]
        self.tables.fold([each for each in pieces if each[1].codec == codecs.ROWS], rates)

    def _outer(self, change: OuterStep) -> None:
        assert self.outer is not None
        rate, momentum = np.float32(self.outer[0]), np.float32(self.outer[1])
        x, mean = self._own_x(), self.mean.of(change.terms)
        for low, high, shape in self._outer_parts(change.keys):
            step = mean(low, high)
            if shape:
                equal_spectrum(step.reshape(shape))
            if self.momentum is not None:
                velocity = self.momentum[low:high]
                velocity *= momentum
                velocity += step
                step += momentum * velocity
            step *= rate
            x[low:high] += step

    def _outer_parts(self, keys: Keys) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Cut keys into (low, high, shape), counted from the shard's first key: each of `matrices`, and parts of shape ()."""
        last, end = keys[0], keys[1]
        for first, after, shape in (each for each in self.matrices if keys[0] <= each[0] and each[1] <= end):
            yield from ((low, high, ()) for low, high in parts_of(last - self.begin, first - self.begin))
            yield first - self.begin, after - self.begin, shape
            last = after
        yield from ((low, high, ()) for low, high in parts_of(last - self.begin, end - self.begin))

    def _step(self, change: Step) -> None:
        assert self.optimizer is not None
        mean = self.mean.of(change.terms)
        if change.shrink < 1.0:
            mean = _times(mean, np.float32(change.shrink))
        self.optimizer.step(self._own_x(), mean, change.hyper, change.absent, change.scale)
        self._fold_rows([change.scale * weight for weight, _ in change.terms], change.terms, change.rates)

    def _rebase(self, change: Rebase) -> None:
        x = self._own_x()
        x -= change.before
        x += change.base
        self.rebased = True

    def _load(self, change: LoadArrays) -> None:
        arrays = change.arrays
        self.tables.load(arrays)
        x = self._copied(arrays["x"])
        self._begin(x, x if self.shared else self._copied(arrays["p"]), change.publication)
        if "gain" in arrays:
            self.gain.load(arrays["gain"])
        if self.momentum is not None and "outer.momentum" in arrays:
            self.momentum = self._copied(arrays["outer.momentum"])
        if (optimizer := self.optimizer or self.handover) is not None:
            saved = {n.removeprefix(OPTIMIZER): v for n, v in arrays.items() if n.startswith(OPTIMIZER)}
            optimizer.load(saved)

    def _drop_handover(self, change: DropHandover) -> None:
        self.handover = None

    def arrays(self) -> dict[str, FloatArray]:
        """Return views of all that a checkpoint holds of the keys of this shard."""
        arrays = {"x": self.x, "p": self.p}
        if self.gain.agreement:
            arrays["gain"] = self.gain.state()
        if self.momentum is not None:
            arrays["outer.momentum"] = self.momentum
        if (optimizer := self.optimizer or self.handover) is not None:
            arrays |= {f"{OPTIMIZER}{name}": value for name, value in optimizer.state().items()}
        return arrays

    # Publications.

    def _publish(self, change: Publish) -> None:
        """Publish x.

        A state that overflowed (the sum of finite updates may) is published whole: the workers must see it as it is.
        """
        if change.spec:
            self.down = self.codings.compressor(
                change.spec
            ).contraction()  # what the coding before left out is in x - p
        keys = self.whole if change.keys is None or self.rebased else change.keys
        self.publication += 1
        self.rebased = self.unpublished = False
        delta = None if self.down.lossless else self._delta(keys)
        overflows = delta is None and not self.down.lossless
        if any((payload is None) != (delta is None) for _, payload in self.deltas.values()):
            # values read from p have later coded differences in them: a child would add those twice
            self.deltas.clear()
        if delta is not None:
            if self.lent():
                self.p = self._copied(self.p)
            accumulate(delta, 1.0, self.p[self._at(keys)])
            self.deltas[self.publication] = (keys, delta)
        elif overflows or keys == self.whole:
            self.deltas.clear()  # only the whole state leads to this publication
            self._show(self.whole)
        else:
            self.deltas[self.publication] = (keys, None)
            self._show(keys)
        self._forget()

    def _show(self, keys: Keys) -> None:
        """Set p = x at these keys."""
        if self.shared:
            return
        if self.lent() and keys == self.whole:
            self.p = self._copied(self.x)
            return
        if self.lent():
            self.p = self._copied(self.p)
        np.copyto(self.p[self._at(keys)], self.x[self._at(keys)])

    def _forget(self) -> None:
        """Drop the oldest differences while there are too many, or together they are longer than the whole state.

        One uncoded difference of each fragment has together the bytes of the whole state, so one turn of all fragments is kept.
        """
        limit = DELTA_BYTES_RATIO * 4 * self.size

        def kept() -> int:
            return sum(4 * (end - begin) if raw is None else len(raw) for (begin, end), raw in self.deltas.values())

        while len(self.deltas) > DELTAS_MAX or (len(self.deltas) > 1 and kept() > limit):
            self.deltas.popitem(last=False)

    def _delta(self, keys: Keys) -> bytes | None:
        """Return x - p at `keys`, coded; None if it is not finite."""
        memory = self.memories.setdefault(keys, Memory(seed=self.begin))
        # publication n has the pushes of clock n - 1, since publication 0 is the first weights
        memory.go_to(self.publication - 1)
        at = self._at(keys)
        left = ChunkedUpdate(keys, self.x[at], self.p[at], sampled=False)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                return b"".join(self.down.encode_parts(left, memory))  # of one part: the part itself
        except NonFiniteError:
            return None

    def beyond(self) -> list[bytes] | None:
        """Return x - p, coded by `LAST`, for each part of the keys; None if the child of p must get all values.

        A lossless downlink is not rounded: there the child of p has all of a part, or must get all values.
        """
        if self.unpublished:
            return None
        payloads = []
        for begin, end in parts(*self.whole):
            x, p = self.x[self._at((begin, end))], self.p[self._at((begin, end))]
            if self.shared or np.array_equal(x, p):
                payloads.append(no_values(end - begin))
                continue
            if self.down.lossless:
                return None
            with np.errstate(over="ignore", invalid="ignore"):
                left = x - p
            try:
                payloads.append(bytes(LAST.encode(left)))
            except NonFiniteError:
                return None
        return payloads

    def _round(self, change: RoundLast) -> None:
        """Keep `beyond`, and set x to what a child makes of it."""
        payloads = self.beyond()
        if payloads is not None and not self.shared:
            for keys, payload in zip(parts(*self.whole), payloads, strict=True):
                at = self._at(keys)
                np.copyto(self.x[at], self.p[at])
                accumulate(payload, 1.0, self.x[at])
        self.rounded = payloads

    def since(self, have: int) -> list[tuple[int, Keys, bytes | None]]:
        """Return (number, keys, payload) of each publication after `have`, or [] if only the whole state will do.

        A payload of None stands for the values of these keys in p.
        """
        wanted = range(have + 1, self.publication + 1)
        if have < 0 or not all(number in self.deltas for number in wanted):
            return []
        return [(number, *self.deltas[number]) for number in wanted]


APPLY: dict[type[Change], Callable[[Store, Any], None]] = {
    SetFirstWeights: Store._first_weights,
    MergeStoppedModels: Store._merge_stopped,
    Fold: Store._fold,
    OuterStep: Store._outer,
    Step: Store._step,
    Rebase: Store._rebase,
    Publish: Store._publish,
    RoundLast: Store._round,
    LoadArrays: Store._load,
    DropHandover: Store._drop_handover,
}
