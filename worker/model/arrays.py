"""A worker's arrays: the pulled state, the base that it computes on, and the start that updates are measured from.

How it works

                    float32[size] each, where `home` is
    pulled   ──┐    the newest state of the shards
               ├─ compose (Exchange.base: pulled + residual + own updates that are not in the state)
    base     <─┘    the replica
       │  write, in the parameters' dtype
       v
    parameters      the script's optimizer steps them: p
    start           base as the parameters' dtype rounds it
    update          p - start: in a buffer of the ring, or computed as a coder reads it

1. `show` composes the base and writes it to the parameters.
2. `moved` reads an update; `gradients` reads gradients, or lends the memory of p.grad.
3. A buffer of the ring is free again once its push is settled and is no longer part of the replica.
4. If keys move between the ranks of a group, `fit` carries the values of all arrays over.

Variants: with `shared` the pulled state is the base, and with `direct` the parameters are both.

The code that steps (worker/sync/engine.py and the steps) passes these arrays on and reads no value of them, because
they may be in a device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from narrows.compression import PayloadError
from narrows.compression.buffers import ChunkedUpdate, DeviceDifference
from narrows.compression.codecs import RAW, Piece, PieceLike, check
from narrows.compression.home import HOST, Feedback, Home
from narrows.compression.payload import no_values
from narrows.compression.replica import ArrayReplica, HostReplica
from narrows.protocols.config.key_ranges import CodedPiece, Keys, parts
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.member.exchange import Exchange
from narrows.worker.model.flat import Array, FlatSpace, FloatArray, alike

Feedbacks = Sequence[tuple[Keys, Feedback[Any]]]
# A model's values of this process's keys: checked pieces, the later ones instead of earlier ones; or float32[size].
SharedWeights: TypeAlias = "Iterator[CodedPiece] | Array"


class InPlaceArrays(HostReplica):
    """The replica of a shard whose pulled state is the parameters: each part is written to them as it arrives."""

    def __init__(self, begin: int, end: int, feedbacks: Feedbacks, flat: FlatSpace) -> None:
        super().__init__(begin, end, feedbacks, parts, np.empty(0, np.float32))
        self.flat = flat

    def early(self, piece: PieceLike) -> None:
        if piece.codec != RAW or not self.begin <= piece.begin <= piece.end <= self.end:
            raise PayloadError(
                f"keys {piece.begin} to {piece.end} in codec {piece.codec}, not of {self.begin} to {self.end}"
            )
        check(piece)
        self.flat.write_keys(piece.begin, np.frombuffer(piece.payload, np.float32))

    def absorb(self, pieces: Sequence[PieceLike], add: bool) -> None:
        """Do nothing: `early` has written all parts."""

    def plus(self, pieces: Iterable[PieceLike]) -> Iterator[PieceLike]:
        """Yield nothing: the parameters are the pulled state, and a lossless downlink leaves no difference to it."""
        for piece in pieces:
            if bytes(piece.payload) != no_values(piece.end - piece.begin):
                raise RemoteProtocolError("the server sent a difference to parameters that it publishes losslessly")
        return iter(())


class WorkerArrays:
    """The arrays of all keys of `flat`, float32[size] each.

    Args:
        flat: the parameters of the worker, or of its slice.
        shared: the worker computes on the pulled state itself, as where gradients are pushed.
        direct: the parameters are the pulled state, so a state needs no copy.
        rounds: buffers for updates of all keys: the updates in flight, and SPARE.
        lends: a push may send the memory of p.grad, because nothing changes it until the push is folded.
        home: where all arrays but the parameters live.
    """

    def __init__(
        self,
        flat: FlatSpace,
        shared: bool,
        direct: bool,
        rounds: int,
        lends: bool = True,
        home: Home[Array] = HOST,
    ) -> None:
        self.flat, self.direct, self.lends, self.home = flat, direct, direct and lends, home
        self.shared, self.rounds = shared, rounds
        if home is not HOST or alike(flat.parameters):  # a state is then written in one copy, and not in one a tensor
            flat.hold()
        self._allocate()

    def _allocate(self) -> None:
        flat, home = self.flat, self.home
        self.keys = flat.keys
        self.shown = False  # `show` has written the base to the parameters
        self.pulled = home.zeros(flat.size)
        self.base = self.pulled if self.shared else home.zeros(flat.size)  # the replica
        # Updates are measured from `start`, the base as the parameters' dtype rounds it. Else a bf16 worker would push
        # its rounding errors into the fp32 master.
        exact = self.shared or all(p.dtype == torch.float32 for p in flat.parameters)
        self.start = self.base if exact else home.zeros(flat.size)
        self.fit_rounds(self.rounds)

    def become(self, shared: bool, direct: bool, rounds: int, lends: bool = True) -> None:
        """Serve another kind of step, with empty arrays: the next state fills them. Arguments as of the constructor."""
        self.shared, self.direct, self.lends, self.rounds = shared, direct, direct and lends, rounds
        self._allocate()

    def fit_rounds(self, rounds: int) -> None:
        """Make room for `rounds` updates. No update may be in flight."""
        self.rounds = rounds
        # A buffer is free again once its push is settled and is no longer part of the replica. A push leaves a device
        # as a copy, so there one buffer is enough; and it is made when it is first used, since most coders need none.
        self.ring: list[Array] = [self.home.zeros(self.flat.size) for _ in range(rounds)] if self.home is HOST else []
        self.landings = self.ring if self.home is HOST else list[FloatArray]()
        self.unlent = dict[tuple[int, int, int], Array]()  # see `gradients`

    def fit(self, ranges: Sequence[Keys]) -> range:
        """Fit the arrays to new key ranges, and carry their values over.

        Args:
            ranges: the keys [begin, end) of each shard.

        Returns:
            The shards with which this process exchanges.
        """
        moving = self.flat.moves(ranges)
        kept = (
            [self.flat.whole(self.home.host(each)) for each in (self.pulled, self.base, self.start)] if moving else []
        )
        shown, ours = self.shown, self.flat.own(ranges)
        self.unlent.clear()
        if self.flat.keys != self.keys:
            self._allocate()
        if moving:
            self.shown = shown
            for array, values in zip((self.pulled, self.base, self.start), kept, strict=True):
                self.home.load(values[slice(*self.keys)], array)
        return ours

    def _at(self, array: Array, begin: int, end: int) -> Array:
        """A view of keys [begin, end) of `array`."""
        return array[begin - self.keys[0] : end - self.keys[0]]

    def replica(self, begin: int, end: int, feedbacks: Feedbacks) -> ArrayReplica[Array]:
        """Make the replica of one shard's keys [begin, end), with the error feedback of each of its fragments."""
        if self.direct:
            return InPlaceArrays(begin, end, feedbacks, self.flat)
        pulled, aside = self._at(self.pulled, begin, end), not self.shared
        return ArrayReplica(begin, end, feedbacks, parts, pulled, self.home, aside)

    def first(self, begin: int, end: int) -> list[Piece]:
        """Return raw pieces of the first weights, for a server that has none.

        Before the first step these are the parameters, later the base. The parameters then hold steps that were not
        sent, and that must not be sent without noise (privacy.py).
        """
        values = self.home.empty(end - begin)
        if self.shown:
            self.home.copy(self._at(self.base, begin, end), values)
        else:
            self.flat.read_keys(begin, values)
        return self.home.raw_pieces(values, begin, parts(begin, end))

    # The replica.

    def show(self, exchanges: Sequence[Exchange[Array]]) -> None:
        """Compose the replica of each exchange, and write it to the parameters; without exchanges, the present base.

        It is not called with `direct`: the parameters are the replica.
        """
        self.shown = True
        if self.base is not self.pulled:
            with self.home.active():
                for exchange in exchanges:
                    begin, end = exchange.replica.begin, exchange.replica.end
                    exchange.base(begin, end, self._at(self.base, begin, end))
        self.flat.write(self.base)
        if self.start is not self.base:
            self.flat.read_keys(self.keys[0], self.start)

    def merge(self, exchange: Exchange[Array], keys: Keys, alpha: float) -> None:
        """Merge the global values of a fragment's keys: local = alpha * local + (1 - alpha) * global.

        The next update is measured from the global values (Streaming DiLoCo, 2501.18512, alg. 2).
        """
        begin, end = keys
        base = self._at(self.base, begin, end)
        exchange.base(begin, end, base)
        if alpha:
            ours = self.home.empty(end - begin)
            self.flat.read_keys(begin, ours)
            ours -= base
            ours *= float(np.float32(alpha))
        self.flat.write_keys(begin, base + ours if alpha else base)
        if self.start is not self.base:
            start = self._at(self.start, begin, end)
            self.flat.read_keys(begin, start)
            if alpha:
                start -= ours

    # Pushes.

    def buffer(self, turn: int) -> Array:
        """Return float32[size] for an update of this turn."""
        if not self.ring:
            self.ring.append(self.home.empty(self.flat.size))
        return self.ring[turn % len(self.ring)]

    def landing(self, turn: int) -> FloatArray:
        """Return float32[size] on the host, into which gradients are copied whose parts leave one by one."""
        if not self.landings:
            self.landings = [self.home.landing(self.flat.size) for _ in range(self.rounds)]
        return self.landings[turn % len(self.landings)]

    def moved(self, keys: Keys, turn: int, lazy: bool = False) -> Array | ChunkedUpdate:
        """Return what the parameters of these keys have moved by.

        Args:
            keys: the keys [begin, end).
            turn: the buffer of the ring that the values are in.
            lazy: compute the values as they are read, so that they need no buffer. On a device the parameters must be
                held in one tensor for that.
        """
        begin, end = keys
        if lazy and self.home is HOST:
            return ChunkedUpdate(keys, self.flat.read_keys, self._at(self.start, begin, end))
        if lazy and (held := self.flat.memory(begin, end)) is not None:
            return DeviceDifference(held, self._at(self.start, begin, end))
        update = self._at(self.buffer(turn), begin, end)
        self.flat.read_keys(begin, update, self._at(self.start, begin, end))
        return update

    def gradients(self, keys: Keys, turn: int, lazy: bool = False) -> Array | ChunkedUpdate:
        """Return the gradients of these keys: the memory of p.grad if it may be lent, else a copy in buffer `turn`.

        Where gradients may be lent, the copy of keys that cannot be has an array of its own. In a buffer of all keys a
        huge page would be taken for each of them. `lazy` as in `moved`.
        """
        begin, end = keys
        if lazy and self.home is HOST:
            return ChunkedUpdate(keys, self.flat.read_gradients, None)
        if self.lends and (lent := self.flat.lend_gradient(begin, end)) is not None:
            return lent
        if self.lends and self.home is HOST:
            at = (turn % len(self.ring), begin, end)
            copy = self.unlent[at] if at in self.unlent else self.unlent.setdefault(at, self.home.empty(end - begin))
        else:
            copy = self._at(self.buffer(turn), begin, end)
        self.flat.read_gradients(begin, copy)
        return copy

    def where_not_finite(self, begin: int, values: Array | ChunkedUpdate) -> str:
        """Name the first tensor with a value that is not finite; values[0] is key `begin`."""
        if isinstance(values, DeviceDifference):
            chunks: Iterable[tuple[int, FloatArray]] = [(0, np.subtract(*map(self.home.host, values)))]
        else:
            chunks = values.chunks() if isinstance(values, ChunkedUpdate) else [(0, self.home.host(values))]
        for low, part in chunks:
            wrong = ~np.isfinite(part)
            if wrong.any():
                return repr(self.flat.name_of(begin + low + int(np.argmax(wrong))))
        return "the residual"

    # The shared model, and the residual.

    def joined(self, pieces: Iterable[PieceLike]) -> Array:
        """Return the values of checked pieces that cover all keys, float32[size]."""
        whole = self.home.empty(self.flat.size)
        for piece in pieces:
            self.home.put(piece, whole, self.keys[0])
        return whole

    def write(self, pieces: Iterable[PieceLike]) -> None:
        """Write checked pieces to the parameters, one after the other: no array of the size of the model is made."""
        for piece in pieces:
            values = self.home.empty(piece.end - piece.begin)
            self.home.put(piece, values, piece.begin)
            self.flat.write_keys(piece.begin, values)

    def owes(self, replicas: Sequence[ArrayReplica[Array]]) -> bool:
        """True if a residual of any replica, in any process of the group, is not zero."""
        return self.flat.anywhere(any(self.home.any(each) for replica in replicas for *_, each in replica.residuals))

    def residual(self, replicas: Sequence[ArrayReplica[Array]]) -> FloatArray | None:
        """Return a copy of the residual on the host, float32[total]; None if the replicas have no error feedback."""
        kept = [residual for replica in replicas for residual in replica.residuals]
        if not self.flat.anywhere(bool(kept)):
            return None
        whole = np.zeros(self.flat.size, np.float32)
        for begin, end, values in kept:
            self._at(whole, begin, end)[:] = self.home.host(values)
        return self.flat.whole(whole)

    def load_residual(self, replicas: Sequence[ArrayReplica[Array]], whole: FloatArray) -> None:
        """Load a residual, float32[total], of a run with any number of shards. Raises UsageError for another size."""
        if whole.shape != (self.flat.total,) or whole.dtype != np.float32:
            raise UsageError(
                f"the residual in this state_dict is {whole.dtype}{list(whole.shape)}, this model needs "
                f"float32[{self.flat.total}]"
            )
        for replica in replicas:
            for (begin, end), feedback in replica.feedbacks:
                feedback.load_state_dict({"residual": whole[begin:end]})
