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
- A part with NaN, infinity or no samples keeps its place without its values: the update becomes whole, and the update
  filters leave it out (ps/filters/update_filters.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from narrows.compression import PayloadError, codecs
from narrows.compression.errors import NonFinitePayloadError
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, covers
from narrows.protocols.config.modes import Mode
from narrows.protocols.effects import Log
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.store.changes import PushedUpdate


@dataclass(slots=True)
class PushSequence:
    """One member on this shard. `clock`: updates of it accepted here."""

    worker: int
    epoch: int
    clock: int
    taken: int  # updates of it below are in x (barrier)
    settled: int  # and below this in the published state, or min_clock is here, before which it was no member
    name: bytes = b""  # of its routing ids
    peer: bytes = b""
    samples: int = -1  # of its newest update, -1: it has made none
    news: int = 0  # the first report that tells of its last update
    partial: dict[int, dict[int, m.Push]] = field(default_factory=dict)
    squared: dict[tuple[int, int], float] = field(
        default_factory=dict
    )  # of each update and part in `partial`, its norm


def check_part(message: m.Push | m.FirstWeights, keys: Keys) -> float:
    """Raise RemoteProtocolError unless it is a part of values of these keys; their squared norm, inf: not all are finite,
    or there are none."""
    inside = keys[0] <= message.begin <= message.end <= keys[1]
    if not inside or not 0 <= message.part < message.parts <= m.PARTS_MAX:
        raise RemoteProtocolError(
            f"part {message.part} of {message.parts}, keys [{message.begin}, {message.end}), is not within "
            f"this shard's [{keys[0]}, {keys[1]})"
        )
    if isinstance(message, m.Push) and not message.samples:
        return math.inf  # there is no update
    try:
        return codecs.check(message, finite=True)
    except NonFinitePayloadError:
        return math.inf
    except PayloadError as error:
        raise RemoteProtocolError(f"a payload that is none: {error}") from None


class PushAssembler:
    """The inbox of shard `index`."""

    def __init__(self, index: int, mode: Mode) -> None:
        self.index, self.mode = index, mode
        self.epoch = 0
        self.seats: dict[int, PushSequence] = {}
        self.gone: dict[int, PushSequence] = {}  # of which the coordinator does not know yet how far they came
        self.discarded = 0

    def members(self, ledger: m.Ledger, min_clock: int) -> list[Log]:
        """Go by the ledger's members; say what is discarded of those that left."""
        if ledger.epoch == self.epoch:
            return []
        self.epoch = ledger.epoch
        live = {row[0] for row in ledger.members}
        logs = []
        for worker in self.seats.keys() - live:
            self.gone[worker] = gone = self.seats.pop(worker)
            for clock, pieces in gone.partial.items():
                logs.append(self.discard(worker, clock, f"{len(pieces)} of its parts had come"))
        for place, (worker, epoch, clock) in enumerate(ledger.members):
            if worker not in self.seats:
                name = ledger.names[place * m.NAME_BYTES : (place + 1) * m.NAME_BYTES]
                self.seats[worker] = PushSequence(worker, epoch, clock, clock, min(clock, min_clock), name)
        return logs

    def discard(self, worker: int, clock: int, why: str) -> Log:
        self.discarded += 1
        return Log("discarded", {"worker": worker, "clock": clock, "shard": self.index, "why": why})

    def settle(self, min_clock: int) -> None:
        """The updates that are in x are in the published state too."""
        for seat in self.seats.values():
            seat.settled = min(seat.taken, min_clock)

    def samples(self, newest: int) -> list[tuple[int, int]]:
        """Each worker with its last known samples; unknown ones count as `newest`."""
        return [(worker, seat.samples if seat.samples >= 0 else newest) for worker, seat in self.seats.items()]

    def add(self, seat: PushSequence, push: m.Push, keys: Keys, squared: float = 0.0) -> None:
        """Take one part of an update that is not accepted yet, and carries these keys; `squared`: its norm. Raises
        RemoteProtocolError; then nothing has changed."""
        if push.clock >= seat.clock + self.mode.window:
            raise RemoteProtocolError(
                f"update {push.clock} of worker {seat.worker}, whose clock is {seat.clock}: "
                f"at most {self.mode.window} may be in flight"
            )
        if not 0 <= push.samples <= m.CLOCK_MAX:
            raise RemoteProtocolError(f"{push.samples} samples")
        pieces = seat.partial.get(push.clock, {}) | {push.part: push}
        whole = len(pieces) >= push.parts and not covers([(each.begin, each.end) for each in pieces.values()], *keys)
        if whole or any(each.parts != push.parts for each in pieces.values()):
            raise RemoteProtocolError("the parts of a push do not cover this shard's keys exactly once")
        seat.partial[push.clock], seat.squared[push.clock, push.part] = pieces, squared

    def next(self, seat: PushSequence) -> PushedUpdate | None:
        """The next update of this member, if all its parts are here."""
        pieces = seat.partial.get(seat.clock)
        if pieces is None or len(pieces) < next(iter(pieces.values())).parts:
            return None
        del seat.partial[seat.clock]
        seat.samples = pieces[0].samples
        update = PushedUpdate(pieces[part] for part in sorted(pieces))
        update.empty = not seat.samples
        update.length = math.sqrt(sum(seat.squared.pop((seat.clock, part)) for part in pieces))
        return update
