"""The replica of a child in arrays: the pulled state and the residual of keys [begin, end).

`ArrayReplica` implements the interface `Replica` of protocols/member/replica.py, which documents the shared methods.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Generic

import numpy as np

from narrows.compression.buffers import ChunkedUpdate, FloatArray
from narrows.compression.codecs import CODED, Piece, PieceLike, check, coded_piece
from narrows.compression.home import HOST, A, Feedback, Home, Sample
from narrows.compression.sampling import sample_of

Keys = tuple[int, int]  # [begin, end)


class ArrayReplica(Generic[A]):
    """The pulled state of one shard's keys, and the error feedback of each fragment of them.

    On the host, payloads of raw values are views of the arrays that the caller gave, not copies.

    Attributes:
        pulled: the pulled state, float32[end - begin]; empty once it is `handed_over`.
        feedbacks: keys and error feedback of each fragment; update c carries fragment c % len(feedbacks).
    """

    def __init__(
        self,
        begin: int,
        end: int,
        feedbacks: Sequence[tuple[Keys, Feedback[A]]],
        cut: Callable[[int, int], Iterable[Keys]],
        pulled: A | None = None,
        home: Home[A] = HOST,  # type: ignore[assignment]  # the default is a home of NumPy's arrays
        aside: bool = False,
    ) -> None:
        """Make a replica of keys [begin, end).

        Args:
            begin, end: the keys of the shard.
            feedbacks: keys [low, high) and error feedback of each fragment, in the order of their turns.
            cut: cuts a range of keys into the ranges of the pieces of raw values.
            pulled: the array of the pulled state, float32[end - begin]; None: a new array of zeros.
            home: the home of all arrays here.
            aside: states are folded beside what the script does on the device: no other code uses `pulled`.
        """
        self.begin, self.end, self.feedbacks, self.cut, self.home = begin, end, list(feedbacks), cut, home
        self.aside = aside
        self.pulled: Any = home.zeros(end - begin) if pulled is None else pulled
        self.samples = [home.places(sample_of(high - low)) for (low, high), _ in self.feedbacks]
        self._sampled: tuple[Sample, Sample] | None = None  # samples of an update and of its residual, not read yet
        self._held_back = 0.0  # as `held_back`, of the newest samples that were read

    def inherit(self, before: "Iterable[ArrayReplica[A]]") -> None:
        """Copy pulled values and residuals of this replica's keys from earlier replicas, after keys have moved."""
        for other in before:
            low, high = max(self.begin, other.begin), min(self.end, other.end)
            if low < high and self.pulled.size:
                source = other.pulled[low - other.begin : high - other.begin]
                self.home.copy(source, self.pulled[low - self.begin : high - self.begin])
        kept = [(low, high, self.home.host(values)) for other in before for low, high, values in other.residuals]
        for (begin, end), feedback in self.feedbacks:
            common = [(max(begin, low), min(end, high), low, values) for low, high, values in kept]
            if any(low < high for low, high, *_ in common):
                residual = np.zeros(end - begin, np.float32)
                for low, high, start, values in common:
                    if low < high:
                        residual[low - begin : high - begin] = values[low - start : high - start]
                feedback.load_state_dict({"residual": residual})

    @property
    def residuals(self) -> list[tuple[int, int, A]]:
        """Begin, end and values of each residual that is not None, float32[end - begin]."""
        return [(*keys, kept.residual) for keys, kept in self.feedbacks if kept.residual is not None]

    def fragment(self, clock: int) -> Keys:
        """Return the keys [begin, end) of the fragment that update `clock` carries: all, if no update is encoded here."""
        return self.turn(clock)[0] if self.feedbacks else (self.begin, self.end)

    def turn(self, clock: int) -> tuple[Keys, Feedback[A]]:
        """Return the keys [begin, end) of the fragment that update `clock` carries, and its feedback."""
        return self.feedbacks[clock % len(self.feedbacks)]

    def absorb(self, pieces: Sequence[PieceLike], add: bool) -> None:
        """Change the pulled state: add the pieces, or set their keys to them. If one is not valid, nothing changes."""
        alone = add and len(pieces) == 1 and pieces[0].codec == CODED and self.pulled.size
        if not alone:  # one piece is checked as it is added, before a value changes
            self.check(pieces)
        if not self.pulled.size:
            return
        with self.home.aside() if self.aside else nullcontext():
            for piece in pieces:
                if add:
                    self.home.add(piece, 1.0, self.pulled, self.begin)
                else:
                    self.home.put(piece, self.pulled, self.begin)

    def handed_over(self) -> A:
        """Return the pulled state, which is the caller's from now on. Later states are checked, and change nothing."""
        pulled, self.pulled = self.pulled, self.home.empty(0)
        return pulled  # type: ignore[no-any-return]

    def check(self, pieces: Sequence[PieceLike]) -> None:
        """Raise PayloadError if a payload is not valid for the keys of its piece."""
        for piece in pieces:
            check(piece)

    def early(self, piece: PieceLike) -> None:
        """Do nothing: `absorb` writes the piece together with the others."""

    def start_encode(self, update: A | ChunkedUpdate, clock: int) -> None:
        """Launch the encode of an update, if a device computes it.

        `encode` gets the same next, and `last` is False; or `drop_encode` is called.
        """
        _, feedback = self.turn(clock)
        if feedback.compressor.spec != "dense":
            feedback.memory.go_to(clock)
            feedback.start_encode(update)

    def drop_encode(self, clock: int) -> None:
        """Give up the encode that `start_encode` has launched, if there is one. The residual has no part of the update."""
        self.turn(clock)[1].drop_encode()

    def encode(self, update: A | ChunkedUpdate, clock: int, last: bool = False) -> list[Piece]:
        """Encode update + residual of the fragment whose turn `clock` is.

        Args:
            update: float32, the keys of the fragment; on the host also in chunks.
            clock: the clock of the update; also the step of the compressor's random numbers and cycles.
            last: the last update of this fragment. A lossless compressor sends float32 values; `LAST` codes all values
                and the residual of any other, which keeps the residual until `sent_last`.

        Raises:
            NonFiniteError: a value cannot be coded.
        """
        (begin, end), feedback = self.turn(clock)
        if feedback.compressor.spec == "dense" or (last and feedback.compressor.lossless):
            return self.home.raw_pieces(feedback.take(update), begin, self.cut(begin, end))
        if last:
            cuts = list(self.cut(begin, end))
            payloads = feedback.encode_last(update, [(low - begin, high - begin) for low, high in cuts])
            return [coded_piece(payload, *keys) for payload, keys in zip(payloads, cuts, strict=True)]
        feedback.memory.go_to(clock)  # the same step in all workers, whenever they joined
        piece = coded_piece(feedback.encode(update), begin, end, feedback.coded)
        if feedback.residual is not None and self._sampled is None:
            at = self.samples[clock % len(self.feedbacks)]
            self._sampled = self.home.sampling(update, at, 0), self.home.sampling(feedback.residual, at, 1)
        return [piece]

    def sent_last(self, clock: int) -> None:
        """Forget the residual of a fragment: the pieces of its last update, `clock`, are sent."""
        self.turn(clock)[1].forget()

    @property
    def held_back(self) -> float:
        """The norm of the residual over that of the update, at a sample of an encoded fragment; 0.0 until there is one.

        The fragment is the first that was encoded after this was read last, if its sample has reached the host.
        """
        if self._sampled is not None and all(sample.here() for sample in self._sampled):
            moved, left = (sample.read() for sample in self._sampled)
            if moved.any():  # float64 of float32 values: the squares are finite
                self._held_back = float(np.linalg.norm(left) / np.linalg.norm(moved))
            self._sampled = None
        return self._held_back

    def give_back(self, pieces: Iterable[PieceLike], clock: int) -> None:
        """Add pieces that were encoded for `clock`, and not sent, to the residual."""
        for piece in pieces:
            self.turn(clock)[1].restore(piece.payload)

    def base(
        self, stand_ins: Iterable[tuple[float, PieceLike]], begin: int, end: int, out: A, gain: float = 1.0
    ) -> None:
        """Set out, float32[end - begin], to pulled + gain * residual + sum of weight * piece, for keys [begin, end)."""
        target: Any = out
        pulled = self.pulled[begin - self.begin : end - self.begin]
        # After a move of keys [begin, end) may be parts of fragments.
        cut = [(max(begin, low), min(end, high), low, kept) for low, high, kept in self.residuals]
        residuals: list[tuple[int, int, Any]] = [
            (low, high, kept[low - of : high - of])  # type: ignore[index]
            for low, high, of, kept in cut
            if low < high
        ]
        if sum(high - low for low, high, _ in residuals) < end - begin:  # some keys have none
            self.home.copy(pulled, out)
        for low, high, residual in residuals:
            part = slice(low - begin, high - begin)
            self.home.sum_scaled(pulled[part], residual, gain, target[part])
        for weight, piece in stand_ins:
            if begin <= piece.begin and piece.end <= end:
                self.home.add(piece, weight, out, begin)

    def plus(self, pieces: Iterable[PieceLike]) -> Iterator[PieceLike]:
        """Yield raw pieces of pulled + piece, one array of a piece's size after the other."""
        for piece in pieces:
            values: Any = self.home.empty(piece.end - piece.begin)
            self.home.copy(self.pulled[piece.begin - self.begin : piece.end - self.begin], values)
            self.home.add(piece, 1.0, values, piece.begin)
            yield from self.home.raw_pieces(values, piece.begin, [(piece.begin, piece.end)])

    def master(self, pieces: Iterable[PieceLike]) -> A:
        """Decode checked pieces that cover all keys into a new array, float32[end - begin]."""
        out = self.home.empty(self.end - self.begin)
        for piece in pieces:
            self.home.put(piece, out, self.begin)
        return out


HostReplica = ArrayReplica[FloatArray]
