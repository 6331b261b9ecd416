"""A worker's arrays: the parameters, what was pulled, and what updates are measured from. They live where `home` is.

Whoever steps (worker/sync/engine.py and its modes) hands these arrays around and looks into none: they may be a device's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from narrows.compression.codecs import Piece, PieceLike, check
from narrows.compression.home import HOST, Feedback, Home
from narrows.compression.replica import ArrayReplica, HostReplica
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.errors import UsageError
from narrows.protocols.member.exchange import Exchange
from narrows.worker.model.flat import Array, FlatSpace, FloatArray

SPARE = 2  # buffers beside those of updates in flight: the one that is computed, and one that the link may still read
Feedbacks = Sequence[tuple[Keys, Feedback[Any]]]


class InPlaceArrays(HostReplica):
    """The parameters are the pulled state, and hold each part of it as it comes."""

    def __init__(self, begin: int, end: int, feedbacks: Feedbacks, flat: FlatSpace) -> None:
        super().__init__(begin, end, feedbacks, parts, np.empty(0, np.float32))
        self.flat = flat

    def early(self, piece: PieceLike) -> None:
        check(piece)
        self.flat.write_keys(piece.begin, np.frombuffer(piece.payload, np.float32))

    def absorb(self, pieces: Sequence[PieceLike], add: bool) -> None:
        """All of them are here already."""


class WorkerArrays:
    """The arrays of all keys of `flat`, float32[size]. `shared`: the pulled state is what is computed on, as where
    gradients are pushed; `direct`: the parameters are it. `rounds`: updates of all keys whose bytes may still be on
    their way. `lends`: gradients may be pushed where they lie, for nobody changes them. `home`: where all of them live
    but for the parameters."""

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
        if home is not HOST:
            flat.hold()
        self._allocate()

    def _allocate(self) -> None:
        flat, home = self.flat, self.home
        self.keys = flat.keys
        self.shown = False  # the base has been put into the parameters
        self.pulled = home.zeros(flat.size)
        self.base = self.pulled if self.shared else home.zeros(flat.size)  # what is computed on
        # An update is measured from this: the base as the parameters' dtype rounds it, or the rounding of a bf16 worker
        # would be pushed into the fp32 master.
        exact = self.shared or all(p.dtype == torch.float32 for p in flat.parameters)
        self.start = self.base if exact else home.zeros(flat.size)
        # Buffers of pushes: one is free again once its push is settled and no longer stands in. A push leaves a device
        # as a copy, so there it is free at once.
        self.fit_rounds(self.rounds)

    def fit_rounds(self, rounds: int) -> None:
        """So many updates may be on their way from now on; none is."""
        home, self.rounds = self.home, rounds
        self.ring = [home.zeros(self.flat.size) for _ in range(rounds if home is HOST else min(rounds, 1))]
        self.landings = self.ring if home is HOST else list[FloatArray]()

    def fit(self, ranges: Sequence[Keys]) -> range:
        """The shards have these keys. Which of them are ours: our arrays have theirs from now on."""
        moving = self.flat.moves(ranges)
        kept = (
            [self.flat.whole(self.home.host(each)) for each in (self.pulled, self.base, self.start)] if moving else []
        )
        shown, ours = self.shown, self.flat.own(ranges)
        if self.flat.keys != self.keys:
            self._allocate()
        if moving:
            self.shown = shown
            for array, values in zip((self.pulled, self.base, self.start), kept, strict=True):
                self.home.load(values[slice(*self.keys)], array)
        return ours

    def _at(self, array: Array, begin: int, end: int) -> Array:
        """Keys [begin, end) of it."""
        return array[begin - self.keys[0] : end - self.keys[0]]

    def replica(self, begin: int, end: int, feedbacks: Feedbacks) -> ArrayReplica[Array]:
        """Make the replica of one shard's keys."""
        if self.direct:
            return InPlaceArrays(begin, end, feedbacks, self.flat)
        return ArrayReplica(begin, end, feedbacks, parts, self._at(self.pulled, begin, end), self.home)

    def first(self, begin: int, end: int) -> list[Piece]:
        """Return the values of these keys that are computed on, raw: the parameters as they are before the first step.
        Later they hold what was not sent, and may not be meant to be (privacy.py)."""
        values = self.home.empty(end - begin)
        if self.shown:
            self.home.copy(self._at(self.base, begin, end), values)
        else:
            self.flat.read_keys(begin, values)
        return self.home.raw_pieces(values, begin, parts(begin, end))

    # The model that is computed on.

    def show(self, exchanges: Sequence[Exchange[Array]]) -> None:
        """Put the replica into the parameters; of no exchanges, the base as it is."""
        if self.direct:
            return
        self.shown = True
        if self.base is not self.pulled:
            for exchange in exchanges:
                begin, end = exchange.replica.begin, exchange.replica.end
                exchange.base(begin, end, self._at(self.base, begin, end))
        self.flat.write(self.base)
        if self.start is not self.base:
            self.flat.read_keys(self.keys[0], self.start)

    def merge(self, exchange: Exchange[Array], keys: Keys, alpha: float) -> None:
        """local = alpha * local + (1 - alpha) * global at the keys of a fragment; updates are measured from the global values
        (Streaming DiLoCo, 2501.18512, alg. 2)."""
        begin, end = keys
        base, ours = self._at(self.base, begin, end), self.home.empty(end - begin)
        exchange.base(begin, end, base)
        if alpha:
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
        return self.ring[turn % len(self.ring)]

    def landing(self, turn: int) -> FloatArray:
        """float32[size] of the host, for a push whose parts leave one by one."""
        if not self.landings:
            self.landings = [self.home.landing(self.flat.size) for _ in range(self.rounds)]
        return self.landings[turn % len(self.landings)]

    def moved(self, keys: Keys, turn: int) -> Array:
        """Return what the parameters of these keys have moved by."""
        begin, end = keys
        update = self._at(self.buffer(turn), begin, end)
        self.flat.read_keys(begin, update)
        update -= self._at(self.start, begin, end)
        return update

    def gradients(self, keys: Keys, turn: int) -> Array:
        """The gradients of these keys: as they lie in p.grad where that stays as it is until they are folded."""
        begin, end = keys
        lent = self.flat.lend_gradient(begin, end) if self.lends else None
        if lent is None:
            lent = self._at(self.buffer(turn), begin, end)
            self.flat.read_gradients(begin, lent)
        return lent

    def where_not_finite(self, begin: int, values: Array) -> str:
        """The first tensor that has such a value; values[0] is key `begin`."""
        wrong = ~np.isfinite(self.home.host(values))
        return repr(self.flat.name_of(begin + int(np.argmax(wrong)))) if wrong.any() else "the residual"

    # The shared model, and what is kept back.

    def joined(self, masters: Sequence[Array]) -> Array:
        """The master copies of all shards as one model."""
        whole, begin = self.home.empty(sum(len(master) for master in masters)), 0
        for master in masters:
            self.home.copy(master, whole[begin : begin + len(master)])
            begin += len(master)
        return whole

    def owes(self, replicas: Sequence[ArrayReplica[Array]]) -> bool:
        """Something is kept back."""
        return self.flat.anywhere(any(self.home.any(each) for replica in replicas for *_, each in replica.residuals))

    def residual(self, replicas: Sequence[ArrayReplica[Array]]) -> FloatArray | None:
        """A copy on the host of what is still to be sent, float32[total], or None where nothing ever is."""
        kept = [residual for replica in replicas for residual in replica.residuals]
        if not self.flat.anywhere(bool(kept)):
            return None
        whole = np.zeros(self.flat.size, np.float32)
        for begin, end, values in kept:
            self._at(whole, begin, end)[:] = self.home.host(values)
        return self.flat.whole(whole)

    def load_residual(self, replicas: Sequence[ArrayReplica[Array]], whole: FloatArray) -> None:
        """Take over a residual of any number of shards. Raises UsageError for one of another size."""
        if whole.shape != (self.flat.total,) or whole.dtype != np.float32:
            raise UsageError(
                f"the residual in this state_dict is {whole.dtype}{list(whole.shape)}, this model needs "
                f"float32[{self.flat.total}]"
            )
        for replica in replicas:
            for (begin, end), feedback in replica.feedbacks:
                feedback.load_state_dict({"residual": whole[begin:end]})
