"""Assembles the pushes of the members of one shard: parts become whole updates, each once and in its turn. No I/O.

How it works

    Push clock 7, part 0 of 3 ─┐
    Push clock 7, part 2 of 3 ─┼─> PushSequence.partial[7] ─(all parts)─> PushedUpdate ─> Folding.accept
    Push clock 7, part 1 of 3 ─┘        one PushSequence a member

1. The shard checks a part (`check_part`): its keys lie within the shard's, and its payload decodes to that many
   values. A part that fails is refused, and nothing has changed.
2. `add` files the part under its clock. A member may have `Mode.window` updates in flight; the shard refuses a part
   of a later clock.
3. `next` returns the update of clock c once all its parts are here and update c - 1 was accepted. The caller then
   raises the member's clock. A part of an update that was accepted before is acknowledged again and not filed.
4. The coordinator's ledger says who is a member (`members`). The parts of a member that has left are discarded,
   logged and counted.

Rules
- A worker's updates are accepted in the order of their clocks, each exactly once.
- The shard files a part with NaN, infinity or no samples as VOID, without its values. So the update becomes whole, and
  the update filters leave it out (ps/filters/update_filters.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from narrows.compression import PayloadError, codecs
from narrows.compression.errors import NonFinitePayloadError
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, covers
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.settings import STALENESS_MAX
from narrows.protocols.effects import Log
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.store.changes import PushedUpdate


@dataclass(slots=True)
class PushSequence:
    """The pushes of one member on this shard. `clock`: the number of its updates that this shard has accepted."""

    worker: int
    epoch: int
    clock: int
    taken: int  # at a barrier: all updates of this member below this clock are folded into x
    # All its updates below this clock are published. A new member begins with the smaller of its first clock and min_clock.
    settled: int
    name: bytes = b""  # the name in the member's routing ids
    peer: bytes = b""  # routing id of the member's newest message
    samples: int = -1  # samples of its newest update, -1 before the first
    news: int = 0  # version of the first report that contains its present clock
    # by clock, the parts received of an update that is not complete; by part number
    partial: dict[int, dict[int, m.Push]] = field(default_factory=dict)
    # by (clock, part): the squared L2 norm of a part in `partial`
    squared: dict[tuple[int, int], float] = field(default_factory=dict)

    def heard(self, peer: bytes) -> None:
        """Note the routing id of the member's newest message: answers go there."""
        self.peer = peer

    def accept(self) -> None:
        """Count one more update as accepted."""
        self.clock += 1

    def tell(self, version: int) -> None:
        """Have the reports from this version on contain the member's clock, until one is acknowledged."""
        self.news = version


def check_part(message: m.Push | m.FirstWeights, keys: Keys) -> float:
    """Check one part of an update or of the first weights.

    Args:
        message: The part as received.
        keys: The key range [begin, end) of this shard.

    Returns:
        The squared L2 norm of the part's values; inf if a value is not finite or the push has no samples.

    Raises:
        RemoteProtocolError: The keys are outside the shard's range, or the payload does not decode to that many values.
    """
    inside = keys[0] <= message.begin <= message.end <= keys[1]
    if not inside or not 0 <= message.part < message.parts <= m.PARTS_MAX:
        raise RemoteProtocolError(
            f"part {message.part} of {message.parts}, keys [{message.begin}, {message.end}), is not within "
            f"this shard's [{keys[0]}, {keys[1]})"
        )
    if isinstance(message, m.Push) and not message.samples:
        return math.inf  # a push without samples has no values
    try:
        return codecs.check(message, finite=True)
    except NonFinitePayloadError:
        return math.inf
    except PayloadError as error:
        raise RemoteProtocolError(f"an invalid payload: {error}") from None


class PushAssembler:
    """The assembler of shard `index`: one PushSequence for each member."""

    def __init__(self, index: int, mode: Mode) -> None:
        self.index, self.mode = index, mode
        self.epoch = 0
        self.seats: dict[int, PushSequence] = {}
        # members that left and whose last clock the coordinator does not know yet
        self.gone: dict[int, PushSequence] = {}
        self.discarded = 0  # updates that were dropped so far

    def members(self, ledger: m.Ledger, min_clock: int, seen: int, version: int) -> list[Log]:
        """Take over the members of the ledger.

        Args:
            ledger: The ledger.
            min_clock: The shard's min_clock.
            seen: The newest version of this shard's reports that the coordinator has acknowledged.
            version: The version of the next report, which contains the last clocks of members that have left.

        Returns:
            A log line for each incomplete update of a member that left.
        """
        self.gone = {worker: seat for worker, seat in self.gone.items() if seat.news > seen}
        if ledger.epoch == self.epoch:
            return []
        self.epoch = ledger.epoch
        live = {row[0] for row in ledger.members}
        logs = []
        for worker in self.seats.keys() - live:
            self.gone[worker] = gone = self.seats.pop(worker)
            gone.tell(version)
            for clock, pieces in gone.partial.items():
                logs.append(self.discard(worker, clock, f"{len(pieces)} of its parts had come"))
        for place, (worker, epoch, clock) in enumerate(ledger.members):
            if worker not in self.seats:
                name = ledger.names[place * m.NAME_BYTES : (place + 1) * m.NAME_BYTES]
                self.seats[worker] = PushSequence(worker, epoch, clock, clock, min(clock, min_clock), name)
        return logs

    def discard(self, worker: int, clock: int, why: str) -> Log:
        """Count one dropped update and return its log line."""
        self.discarded += 1
        return Log("discarded", {"worker": worker, "clock": clock, "shard": self.index, "why": why})

    def folded(self, pairs: Iterable[m.Pair]) -> None:
        """Note that these updates, (worker, clock), are folded into x at a barrier."""
        for worker, clock in pairs:
            if worker in self.seats:
                self.seats[worker].taken = clock + 1

    def settle(self, min_clock: int) -> None:
        """Mark the updates that are folded into x as published: the state of `min_clock` has them."""
        for seat in self.seats.values():
            seat.settled = min(seat.taken, min_clock)

    def samples(self, newest: int) -> list[tuple[int, int]]:
        """Return (worker, samples of its newest update) of each member; one without an update counts as `newest`."""
        return [(worker, seat.samples if seat.samples >= 0 else newest) for worker, seat in self.seats.items()]

    def add(self, seat: PushSequence, push: m.Push, keys: Keys, squared: float = 0.0) -> None:
        """File one part of an update that is not accepted yet.

        Args:
            seat: The member's sequence.
            push: The part.
            keys: The key range [begin, end) that the whole update carries.
            squared: The squared norm of the part, from `check_part`.

        Raises:
            RemoteProtocolError: The update is beyond the window, or its parts do not cover `keys`. Nothing has changed.
        """
        if push.clock >= seat.clock + self.mode.window:
            raise RemoteProtocolError(
                f"update {push.clock} of worker {seat.worker}, whose clock is {seat.clock}: "
                f"at most {self.mode.window} may be in flight"
            )
        if not 0 <= push.samples <= m.CLOCK_MAX or not 0 <= push.steps <= STALENESS_MAX:
            raise RemoteProtocolError(f"{push.samples} samples and {push.steps} local steps")
        pieces = seat.partial.get(push.clock, {}) | {push.part: push}
        uncovered = len(pieces) >= push.parts and not covers(
            [(each.begin, each.end) for each in pieces.values()], *keys
        )
        if uncovered or any(each.parts != push.parts for each in pieces.values()):
            raise RemoteProtocolError("the parts of a push do not cover this shard's keys exactly once")
        seat.partial[push.clock], seat.squared[push.clock, push.part] = pieces, squared

    def next(self, seat: PushSequence) -> PushedUpdate | None:
        """Return the member's next update, or None if a part is missing."""
        pieces = seat.partial.get(seat.clock)
        if pieces is None or len(pieces) < next(iter(pieces.values())).parts:
            return None
        del seat.partial[seat.clock]
        seat.samples = pieces[0].samples
        update = PushedUpdate(pieces[part] for part in sorted(pieces))
        update.empty = not seat.samples
        update.length = math.sqrt(sum(seat.squared.pop((seat.clock, part)) for part in pieces))
        return update
