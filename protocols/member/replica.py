"""The replica that a child computes on, and the rule by which it reads its own writes (Ho et al. 2013, sec. 3).

    replica = pulled state + gain * residual + sum over own clocks c of stand_in(c) * u_c,   u_c as sent

An own update stands in for the mean of its clock until that mean is complete:

    not in the pulled state                                    weight `ahead`
    folded into the pulled state with weight w                 weight ahead - w
    the update of every live worker for that clock is folded   weight 0

The shard sends `gain` and `ahead` with each state. `gain` is the sum of the weights of a mean. `ahead` is a little more
than `gain`, because the updates of other workers are in flight too.
docs/design/read-my-writes.md compares this rule with the naive ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from narrows.protocols.config.key_ranges import CodedPiece, Keys
from narrows.protocols.config.modes import FoldRule, Mode

# Own updates that stand in without a staleness bound (async), in clocks. Without this limit a slow worker would keep
# the own updates of the others at full weight for ever. Among windows 1, 2, 4, 8 and no limit, with one worker 4x
# slower, 1 ended lowest in every setting measured (docs/design/read-my-writes.md).
STANDS_IN_UNBOUNDED = 1


def stand_in(mode: Mode, clock: int, own_clock: int, settled: int, weight: float | None, ahead: float = 1.0) -> float:
    """Return the weight of own update `clock` in the replica.

    Args:
        mode: of the run.
        clock: of the own update.
        own_clock: the child's clock now.
        settled: of the pulled state; it contains all own updates below, and the others' that were folded with them.
        weight: with which the update was folded into the pulled state; None: the state does not contain the update.
        ahead: of the pulled state.
    """
    if mode.rule is FoldRule.OPTIMIZER or clock < settled:  # a gradient is no difference of weights: it cannot stand in
        return 0.0
    if mode.bound is None and clock < own_clock - STANDS_IN_UNBOUNDED:
        return 0.0
    if weight is None or mode.rule is FoldRule.OUTER:  # an outer step is no mean: full weight until its round is folded
        return ahead
    return ahead - weight


A = TypeVar("A")  # an array: float32 of the host, or of a device


class Replica(Protocol[A]):
    """The arrays of one child for keys [begin, end): the pulled state and the residual, float32[end - begin] each.

    A replica keeps its arrays to itself. It takes and returns coded pieces; `base` and `master` write to other arrays.
    """

    begin: int
    end: int

    def fragment(self, clock: int) -> Keys:
        """Return the keys [low, high) of the fragment that update `clock` carries."""

    def absorb(self, pieces: Sequence[CodedPiece], add: bool) -> None:
        """Change the pulled state.

        Args:
            pieces: each key at most once.
            add: True: add the pieces to the state; False: the pieces are the new values of their keys.

        Raises:
            ValueError: a payload is not valid; then nothing has changed.
        """

    def early(self, piece: CodedPiece) -> None:
        """Take one piece of a whole state while other pieces are still on their way.

        Each piece of a whole state comes here first; `absorb` gets it again, together with all others. An
        implementation does nothing here, or writes the piece at once and does nothing in `absorb`, where the piece may
        have lost its payload.

        Raises:
            ValueError: the payload is not valid.
        """

    def start_encode(self, update: A, clock: int) -> None:
        """Begin to encode an update, if that takes a device some time. The next `encode` gets the same two arguments.

        `update` must not change before that. Without that `encode` call `drop_encode`.

        Raises:
            ValueError: the values cannot be coded, such as NaN; then nothing has changed.
        """

    def drop_encode(self, clock: int) -> None:
        """Give up an encode that `start_encode` has begun; do nothing if there is none."""

    def encode(self, update: A, clock: int, last: bool = False) -> Sequence[CodedPiece]:
        """Encode an update plus the residual. What the pieces leave out is the new residual.

        Args:
            update: float32, the keys whose turn `clock` is (`Exchange.turn`).
            clock: of the update.
            last: True: leave out no more than a rounding, which is lost. The residual is not sent before `sent_last`.

        Returns:
            The pieces to send.

        Raises:
            ValueError: the values cannot be coded, such as NaN; then nothing has changed.
        """

    def sent_last(self, clock: int) -> None:
        """Forget the residual: the pieces of the last update, `clock`, are sent."""

    def give_back(self, pieces: Iterable[CodedPiece], clock: int) -> None:
        """Add pieces to the residual again: those of the last `encode`, which were not sent."""

    def base(
        self, stand_ins: Iterable[tuple[float, CodedPiece]], begin: int, end: int, out: A, gain: float = 1.0
    ) -> None:
        """Write the replica of keys [begin, end) to `out`: pulled + gain * residual + sum of weight * piece.

        Args:
            stand_ins: weight and piece of each own update that stands in.
            begin, end: borders of fragments, or of parts of them after a move of keys.
            out: float32[end - begin], overwritten.
            gain: of the pulled state.
        """

    def check(self, pieces: Sequence[CodedPiece]) -> None:
        """Raise ValueError if a payload is not valid for the keys of its piece."""

    def plus(self, pieces: Iterable[CodedPiece]) -> Iterator[CodedPiece]:
        """Yield the values of pulled + piece for each of these checked pieces, as raw pieces.

        No piece is yielded for keys whose pulled values are where they belong, in the parameters.
        """

    def master(self, pieces: Iterable[CodedPiece]) -> A:
        """Decode checked pieces that cover all keys into a new array, float32[end - begin]."""
