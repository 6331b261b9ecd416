"""The replica that a child computes on, and the rule by which it reads its own writes (Ho et al. 2013, sec. 3).

    replica = pulled state + gain * residual + sum over own clocks c of stand_in(c) * u_c,   u_c as sent

An own update stands in for the mean of its clock until that mean is complete: at weight `ahead` while it is not in the pulled
state, at ahead - w once it was folded with weight w, not at all once every live worker's update of that clock is in. The shard
says both numbers with each state: `gain` is what the weights of a mean sum up to, `ahead` a little more than it, for the
others' updates are in flight too.
docs/design/read-my-writes.md has the figures beside the naive rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from narrows.protocols.config.key_ranges import CodedPiece
from narrows.protocols.config.modes import Mode, Rule

# With no bound (async) a slow peer would hold own updates at full weight for ever. Among windows 1, 2, 4, 8 and no
# limit, with one worker 4x slower, 1 ended lowest in every setting measured (docs/design/read-my-writes.md).
STANDS_IN_UNBOUNDED = 1


def stand_in(mode: Mode, clock: int, own_clock: int, settled: int, weight: float | None, ahead: float = 1.0) -> float:
    """Weight of own update `clock` in the replica of a worker whose clock is `own_clock`.

    settled: of the pulled state; own updates below it are in, and so are the others' that were folded with them.
    weight: what it was folded with in the pulled state, None where it is not in it. ahead: as that state says.
    """
    if mode.rule is Rule.OPTIMIZER or clock < settled:
        return 0.0
    if mode.bound is None and clock < own_clock - STANDS_IN_UNBOUNDED:
        return 0.0
    if weight is None or mode.rule is Rule.OUTER:  # an outer step is no mean: full weight until its round is folded
        return ahead
    return ahead - weight


A = TypeVar("A")  # an array: float32 of the host, or of a device


class Replica(Protocol[A]):
    """The arrays of one child for keys [begin, end): the pulled state and the residual. Only payloads leave it."""

    begin: int
    end: int

    def absorb(self, pieces: Sequence[CodedPiece], add: bool) -> None:
        """Change the pulled state by these pieces, which are added, or values of their keys. Raises ValueError for a payload
        that is none; then nothing has changed."""

    def early(self, piece: CodedPiece) -> None:
        """A piece of a whole state that is not all here: for who has a use for it before `absorb` has them all."""

    def encode(self, update: A, clock: int, dense: bool = False) -> Sequence[CodedPiece]:
        """Return what is sent of `update`, the keys whose turn `clock` is, and of the residual; the rest is the
        residual from now on. `dense`: all of it. Raises ValueError for values that cannot be coded; then nothing has
        changed."""

    def give_back(self, pieces: Iterable[CodedPiece], clock: int) -> None:
        """These pieces, encoded last, were not sent: they are in the residual again."""

    def base(
        self, stand_ins: Iterable[tuple[float, CodedPiece]], begin: int, end: int, out: A, gain: float = 1.0
    ) -> None:
        """The replica of keys [begin, end), whole fragments, into `out`: pulled + gain * residual + weight * piece."""

    def master(self, pieces: Sequence[CodedPiece]) -> A:
        """The values of these pieces, which are all keys, in an array of their own. Raises ValueError as `absorb`."""
