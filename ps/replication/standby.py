"""A shard that follows a primary, and takes its place when the primary is lost. No I/O.

replication_primary.py and replication_stream.py have the rules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from narrows.protocols import messages as m
from narrows.protocols.config.timing import REPLICATION_BEAT_NS, REPLICATION_CUT_NS
from narrows.protocols.effects import CopyEffect, Send, SendToPeer, StartServing
from narrows.ps.replication.events import MachineEvent
from narrows.ps.replication.replication_stream import ReplicatedMachine
from narrows.ps.shard.reports import COORDINATOR


@dataclass(slots=True)
class PeerShard:
    """What shard 0 knows of another shard of its server."""

    peer: bytes
    said: m.ReplicationProgress  # its newest
    heard_ns: int  # when that arrived


class PeerShards:
    """The other shards of shard 0's server. `lost_ns`: progress that is older than this counts no more."""

    def __init__(self, shards: int, lost_ns: int) -> None:
        self.shards, self.lost_ns = shards, lost_ns
        self.known: dict[int, PeerShard] = {}

    def hear(self, peer: bytes, said: m.ReplicationProgress, now_ns: int) -> None:
        """Take the progress that another shard reports."""
        if 0 < said.shard < self.shards:
            self.known[said.shard] = PeerShard(peer, said, now_ns)

    def whole(self, now_ns: int, standby: str) -> bool:
        """True if each other shard has lately reported that `standby` has a whole copy of it.

        While one standby takes the place of another, different shards may have different standbys.
        """
        heard = [sibling for sibling in self.known.values() if now_ns - sibling.heard_ns <= self.lost_ns]
        return len(heard) == self.shards - 1 and all(sibling.said.standby == standby for sibling in heard)

    def at(self, view: int) -> bool:
        """True if all other shards are in this view."""
        return len(self.known) == self.shards - 1 and all(s.said.view == view for s in self.known.values())

    @property
    def newest(self) -> int:
        """The newest view that another shard is in."""
        return max((sibling.said.view for sibling in self.known.values()), default=0)

    def behind(self, view: m.FailoverNotice) -> list[Send]:
        """The notice of this view, for each shard that is in an older one."""
        return [Send(sibling.peer, view) for sibling in self.known.values() if sibling.said.view < view.view]

    def ports(self, own: int) -> tuple[int, ...]:
        """The ports of all shards, in their order. `own`: the port of shard 0."""
        return (own, *(self.known[shard].said.port for shard in sorted(self.known)))


class MachineParts:
    """The parts of a machine that have been received, as a file. What has been read is freed."""

    def __init__(self) -> None:
        self.count, self._left = 0, deque[memoryview]()

    @property
    def nbytes(self) -> int:
        """The number of bytes that are here."""
        return sum(map(len, self._left))

    def append(self, part: m.Buffer) -> None:
        self.count += 1
        self._left.append(memoryview(part).cast("B"))

    def readinto(self, room: bytearray | memoryview) -> int:
        """Read into all of `room`, or as much as there is. Returns the number of bytes."""
        out, at = memoryview(room).cast("B"), 0
        while at < len(out) and self._left:
            first = self._left.popleft()
            taken, rest = first[: len(out) - at], first[len(out) - at :]
            out[at : at + len(taken)], at = taken, at + len(taken)
            if rest:
                self._left.appendleft(rest)
        return at

    def read(self, size: int = -1) -> bytes:
        room = bytearray(self.nbytes if size < 0 else min(size, self.nbytes))
        self.readinto(room)
        return bytes(room)

    def readline(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (more := self.read(1)):
            line += more
        return line


class Standby:
    """A shard of a standby.

    Args:
        index: the shard's number.
        original: address of the primary's shard that this one follows.
        address: address at which members would find this server.
        port: the port that this shard listens on.
        lost_ns: the silence after which the primary counts as lost.
        siblings: what shard 0 knows of the other shards of this standby.
        thaw: makes a machine of a file with its bytes; whatever it raises, `receive` raises.
        again: lets the machine handle an event.
    """

    def __init__(
        self,
        index: int,
        original: str,
        address: str,
        port: int,
        lost_ns: int,
        siblings: PeerShards,
        thaw: Callable[[MachineParts], ReplicatedMachine],
        again: Callable[[MachineEvent], None],
    ) -> None:
        self.index, self.original, self.address, self.port, self.lost_ns = index, original, address, port, lost_ns
        self.siblings, self.thaw, self.again = siblings, thaw, again
        self.machine: ReplicatedMachine | None = None
        self.have = -1  # number of the newest event that is here, -1: no machine yet
        self.life = -1  # the primary's incarnation in which these events happened
        self.parts = MachineParts()  # the first parts of a machine that is being received
        self.parts_of = -1  # the newest event of that machine
        self.events: deque[MachineEvent] = deque()  # events that are here and that the machine has not handled yet
        # When the primary was last heard, when it was last sent an acknowledgement, and shard 0 its progress.
        self.heard_ns = self.said_ns = self.told_ns = 0
        self.owes = True  # an acknowledgement is due
        self.votes: dict[int, int] = {}  # by worker, the view in which it has voted for this standby
        self.void: dict[int, int] = {}  # by worker, its newest attempt that does not count

    # Messages of the primary.

    @property
    def coming(self) -> int:
        """Bytes received of a machine that is not whole yet."""
        return self.parts.nbytes

    def heard(self, now_ns: int) -> None:
        """Note that the primary is live."""
        self.heard_ns = now_ns

    def receive(self, copied: m.ReplicationEntry, now_ns: int) -> None:
        """Take an event, or a part of a machine. Raises what `thaw` raises."""
        if copied.life < self.life:
            return  # a late message of an earlier life of the primary
        self.heard_ns, self.owes = now_ns, True
        if copied.life > self.life:  # the primary went back to a checkpoint, and its events have new numbers
            self.begin_anew()
            self.life = copied.life
        if not copied.parts:
            if copied.number == self.have + 1:
                frames = [copied.header, copied.payload][: copied.frames]
                self.events.append(MachineEvent.of(copied.about, frames))
                self.have = copied.number
            return
        if copied.number < max(self.have, self.parts_of):
            return  # a late part of an older machine
        if copied.number != self.parts_of:
            self.begin_anew()
            self.parts_of = copied.number
        if copied.part == self.parts.count and self.have < 0:
            self.parts.append(copied.payload)
        if self.parts.count == copied.parts:
            whole, self.parts = self.parts, MachineParts()
            self.machine, self.have = self.thaw(whole), copied.number

    def begin_anew(self) -> None:
        """Forget the machine, its parts and its events, so that the primary sends a whole machine again."""
        self.machine, self.have, self.parts, self.parts_of = None, -1, MachineParts(), -1
        self.events.clear()

    def handle(self) -> None:
        """Let the machine handle the events that are here."""
        while self.events and self.machine is not None:
            self.again(self.events.popleft())

    def acknowledge(self, now_ns: int) -> list[CopyEffect]:
        """Acknowledge to the primary what is here, if an acknowledgement is due."""
        if not self.owes:
            return []
        self.owes, self.said_ns = False, now_ns
        of = self.parts_of if self.have < 0 else -1
        return [
            SendToPeer(
                self.original, m.ReplicationFollow(self.index, self.have, self.life, of, self.parts.count, self.address)
            )
        ]

    def cut(self, now_ns: int) -> None:
        """The connection to the primary has ended: it counts as lost after REPLICATION_CUT_NS more of silence.

        Members wait for longer before they vote for this standby.
        """
        self.heard_ns = min(self.heard_ns, now_ns - self.lost_ns + REPLICATION_CUT_NS)

    # Members, and the other shards.

    @property
    def stands_by(self) -> bool:
        """True if the present view names this server as standby, so that members know of it."""
        return self.machine is not None and self.machine.standby == self.address

    def lost(self, now_ns: int) -> bool:
        """True if the primary has been silent for longer than `lost_ns`."""
        return now_ns - self.heard_ns > self.lost_ns

    def vote(self, peer: bytes, vote: m.FailoverVote, now_ns: int) -> list[CopyEffect]:
        """Take the vote of a member that has not heard the primary.

        While this standby hears the primary, it voids the vote and asks the member to stay with the primary.
        """
        machine = self.machine
        if machine is not None and self._knows(machine, peer, vote) and self.lost(now_ns):
            if vote.attempt > self.void.get(vote.worker, 0):
                self.votes[vote.worker] = vote.view
                return []
        elif self.lost(now_ns) or len(self.void) >= m.WORKERS_MAX:
            return []  # the vote does not count, but the member is not sent back: the primary may be gone
        self.votes.pop(vote.worker, None)
        self.void[vote.worker] = max(self.void.get(vote.worker, 0), vote.attempt)
        return [Send(peer, m.KeepServing(vote.view, vote.attempt))]

    def _knows(self, machine: ReplicatedMachine, peer: bytes, vote: m.FailoverVote) -> bool:
        """True if the vote comes from a member and is for the next view."""
        known = (vote.worker, m.name_of(peer)) in [(member.worker, member.name) for member in machine.members]
        return known and self.stands_by and vote.view == machine.view + 1

    def hear_view(self, view: m.FailoverNotice) -> list[CopyEffect]:
        """Take a view from shard 0 of this server: this shard serves in it."""
        if self.machine is None or view.view <= self.machine.view:
            return []
        self.handle()
        return [StartServing(view.view, view.standby)]

    def tick(self, now_ns: int) -> list[CopyEffect]:
        """Handle events, send beats, and as shard 0 begin to serve once half of the members have voted for it."""
        self.handle()
        machine, effects = self.machine, list[CopyEffect]()
        if now_ns - self.said_ns >= REPLICATION_BEAT_NS:
            self.owes = True
            effects += self.acknowledge(now_ns)
        # Repeat it: a shard 0 that was killed and restarted knows nothing of the other shards.
        if self.index and now_ns - self.told_ns >= REPLICATION_BEAT_NS:
            self.told_ns = now_ns
            view, there = machine.view if machine is not None else 0, self.address if self.stands_by else ""
            effects.append(Send(COORDINATOR, m.ReplicationProgress(self.index, view, there, self.port)))
        if machine is None or self.index or not self.stands_by or not self.lost(now_ns):
            return effects
        if not self.siblings.whole(now_ns, self.address) or not self.siblings.at(machine.view):
            return effects
        members = [member.worker for member in machine.members]
        view = machine.view + 1
        if members and 2 * sum(self.votes.get(worker) == view for worker in members) >= len(members):
            effects.append(StartServing(machine.view + 1, ""))
        return effects
