"""The arrays of a child of a server: what it pulled of keys [begin, end), and what it still owes of them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import numpy as np

from narrows.compression.buffers import FloatArray
from narrows.compression.codecs import Piece, PieceLike, check, coded_piece
from narrows.compression.home import HOST, A, Feedback, Home, Sample
from narrows.compression.sampling import sample_of

Keys = tuple[int, int]  # [begin, end)


class ArrayReplica(Generic[A]):
    """pulled, float32[end - begin]; `feedbacks`: keys and error feedback of each fragment, whose turn is every so many clocks.

    cut: how raw values are cut into pieces. On the host, payloads of what is raw are the arrays that were given, not copies.
    home: where all of these arrays live.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        feedbacks: Sequence[tuple[Keys, Feedback[A]]],
        cut: Callable[[int, int], Iterable[Keys]],
        pulled: A | None = None,
        home: Home[A] = HOST,  # type: ignore[assignment]  # of NumPy's arrays, where nothing else is said
    ) -> None:
        self.begin, self.end, self.feedbacks, self.cut, self.home = begin, end, list(feedbacks), cut, home
        self.pulled: Any = home.zeros(end - begin) if pulled is None else pulled
        self.samples = [home.places(sample_of(high - low)) for (low, high), _ in self.feedbacks]
        self._sampled: tuple[Sample, Sample] | None = None  # of the newest update, and of what was left
        self._held_back = 0.0

    def inherit(self, before: "Iterable[ArrayReplica[A]]") -> None:
        """Take over what these have of our keys: pulled values and residuals."""
        for other in before:
            low, high = max(self.begin, other.begin), min(self.end, other.end)
            if low < high and len(self.pulled):
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
        """Begin, end and values of each residual that there is."""
        return [(*keys, kept.residual) for keys, kept in self.feedbacks if kept.residual is not None]

    def turn(self, clock: int) -> tuple[Keys, Feedback[A]]:
        """Keys [begin, end) of the fragment that update `clock` carries, and its feedback."""
        return self.feedbacks[clock % len(self.feedbacks)]

    def absorb(self, pieces: Sequence[PieceLike], add: bool) -> None:
        """Change `pulled`: pieces are added, or are values of their keys. PayloadError changes nothing."""
        self._write(pieces, add, self.pulled)

    def _write(self, pieces: Sequence[PieceLike], adds: bool, out: A) -> A:
        for piece in pieces:
            check(piece)
        for piece in pieces:
            if adds:
                self.home.add(piece, 1.0, out, self.begin)
            else:
                self.home.put(piece, out, self.begin)
        return out

    def early(self, piece: PieceLike) -> None:
        """It waits for the others."""

    def encode(self, update: A, clock: int, dense: bool = False) -> list[Piece]:
        """Pieces of update + residual of the fragment whose turn `clock` is; NonFiniteError changes nothing."""
        (begin, end), feedback = self.turn(clock)
        if dense or feedback.compressor.spec == "dense":
            if feedback.residual is not None:
                update = self.home.sum(update, feedback.residual)
            feedback.load_state_dict({})
            return self.home.raw_pieces(update, begin, self.cut(begin, end))
        feedback.memory.step = clock  # alike on all workers, whenever they joined
        at = self.samples[clock % len(self.feedbacks)]
        self._look()
        moved = self.home.sampling(update, at, 0)
        piece = coded_piece(feedback.encode(update), begin, end)
        if feedback.residual is not None:
            self._sampled = moved, self.home.sampling(feedback.residual, at, 1)
        return [piece]

    @property
    def held_back(self) -> float:
        """How long the residual was beside an update, at a sample of the newest fragment: the newest of which that is known."""
        if self._sampled is not None and all(sample.here() for sample in self._sampled):
            self._look()
        return self._held_back

    def _look(self) -> None:
        if self._sampled is not None:
            moved, left = (sample.read() for sample in self._sampled)
            if moved.any():  # and its square is finite
                self._held_back = float(np.linalg.norm(left) / np.linalg.norm(moved))
            self._sampled = None

    def give_back(self, pieces: Iterable[PieceLike], clock: int) -> None:
        """These, encoded for `clock`, were not sent."""
        for piece in pieces:
            self.turn(clock)[1].restore(piece.payload)

    def base(
        self, stand_ins: Iterable[tuple[float, PieceLike]], begin: int, end: int, out: A, gain: float = 1.0
    ) -> None:
        """out, float32[end - begin] = pulled + gain * residual + weight * piece, where they are of keys [begin, end)."""
        target: Any = out
        self.home.copy(self.pulled[begin - self.begin : end - self.begin], out)
        for low, high, residual in self.residuals:
            if begin <= low and high <= end:
                self.home.add_scaled(residual, gain, target[low - begin : high - begin])
        for weight, piece in stand_ins:
            if begin <= piece.begin and piece.end <= end:
                self.home.add(piece, weight, out, begin)

    def master(self, pieces: Sequence[PieceLike]) -> A:
        """The values of these pieces, which are all keys, float32[end - begin]."""
        return self._write(pieces, False, self.home.empty(self.end - self.begin))


HostReplica = ArrayReplica[FloatArray]
