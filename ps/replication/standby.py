"""A shard that copies another one, and takes its place when that is lost. The rules are in replication_primary.py and
replication_stream.py. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from narrows.protocols import messages as m
from narrows.protocols.config.timing import REPLICATION_BEAT_NS, REPLICATION_CUT_NS
from narrows.protocols.effects import CopyEffect, Send, SendToPeer, Serve
from narrows.ps.replication.events import MachineEvent
from narrows.ps.replication.peer_shards import PeerShards
from narrows.ps.replication.replication_stream import ReplicatedMachine
from narrows.ps.shard.reports import COORDINATOR


class Standby:
    """A shard that copies the one at `original`. `address`: of this server, as members will find it; `port`: of this
    shard. `thaw`: a machine of bytes; `again`: handles an event of it."""

    def __init__(
        self,
        index: int,
        original: str,
        address: str,
        port: int,
        lost_ns: int,
        siblings: PeerShards,
        thaw: Callable[[bytes], ReplicatedMachine],
        again: Callable[[MachineEvent], None],
    ) -> None:
        self.index, self.original, self.address, self.port, self.lost_ns = index, original, address, port, lost_ns
        self.siblings, self.thaw, self.again = siblings, thaw, again
        self.machine: ReplicatedMachine | None = None
        self.have = -1  # events that are here
        self.life = -1  # of the original, in which they happened
        self.parts: list[m.Buffer] = []  # of a machine
        self.parts_of = -1
        self.events: deque[MachineEvent] = deque()  # that are here and not handled
        self.heard_ns = self.said_ns = self.told_ns = 0  # the original heard, and told; our shard 0 told
        self.owes = True  # an acknowledgement
        self.votes: dict[int, int] = {}  # of each worker, the view that it has turned to us for
        self.void: dict[int, int] = {}  # the newest that does not

    # Messages of the original.

    @property
    def coming(self) -> int:
        """Bytes of a machine that are here, of which the rest is to come."""
        return sum(map(len, self.parts))

    def receive(self, copied: m.ReplicationEntry, now_ns: int) -> None:
        """Take an event, or a part of a machine. Raises what `thaw` raises."""
        if copied.life < self.life:
            return  # of one that is over
        self.heard_ns, self.owes = now_ns, True
        if copied.life > self.life:  # it went back to a checkpoint, and counts its events anew
            self.begin_anew()
            self.life = copied.life
        if not copied.parts:
            if copied.number == self.have + 1:
                frames = [copied.header, copied.payload][: copied.frames]
                self.events.append(MachineEvent.of(copied.about, frames))
                self.have = copied.number
            return
        if copied.number < max(self.have, self.parts_of):
            return  # of a machine that was sent before this one
        if copied.number != self.parts_of:
            self.begin_anew()
            self.parts_of = copied.number
        if copied.part == len(self.parts) and self.have < 0:
            self.parts.append(copied.payload)
        if len(self.parts) == copied.parts:
            self.machine, self.have = self.thaw(b"".join(self.parts)), copied.number
            self.parts = []

    def begin_anew(self) -> None:
        """Forget the machine, its parts and its events: they are of no use."""
        self.machine, self.have, self.parts, self.parts_of = None, -1, [], -1
        self.events.clear()

    def handle(self) -> None:
        """Let all that has come happen to the machine."""
        while self.events and self.machine is not None:
            self.again(self.events.popleft())

    def acknowledge(self, now_ns: int) -> list[CopyEffect]:
        """Tell the original what is here, where that has changed."""
        if not self.owes:
            return []
        self.owes, self.said_ns = False, now_ns
        of = self.parts_of if self.have < 0 else -1
        return [
            SendToPeer(
                self.original, m.ReplicationFollow(self.index, self.have, self.life, of, len(self.parts), self.address)
            )
        ]

    def cut(self, now_ns: int) -> None:
        """The connection to the original has ended: REPLICATION_CUT_NS of silence are enough. Members wait for longer, and then
        ask."""
        self.heard_ns = min(self.heard_ns, now_ns - self.lost_ns + REPLICATION_CUT_NS)

    # Members, and the other shards.

    @property
    def stands_by(self) -> bool:
        """Members know of this server."""
        return self.machine is not None and self.machine.standby == self.address

    def lost(self, now_ns: int) -> bool:
        """The original has been silent for long."""
        return now_ns - self.heard_ns > self.lost_ns

    def vote(self, peer: bytes, vote: m.FailoverVote, now_ns: int) -> list[CopyEffect]:
        """A member has not heard the server."""
        machine = self.machine
        if machine is not None and self._knows(machine, peer, vote) and self.lost(now_ns):
            if vote.attempt > self.void.get(vote.worker, 0):
                self.votes[vote.worker] = vote.view
                return []
        elif self.lost(now_ns) or len(self.void) >= m.WORKERS_MAX:
            return []  # what does not count is not given back either: the server may be gone
        self.votes.pop(vote.worker, None)
        self.void[vote.worker] = max(self.void.get(vote.worker, 0), vote.attempt)
        return [Send(peer, m.KeepServing(vote.view, vote.attempt))]

    def _knows(self, machine: ReplicatedMachine, peer: bytes, vote: m.FailoverVote) -> bool:
        """It is the vote of a member, for the view after this one."""
        known = (vote.worker, m.name_of(peer)) in [(member.worker, member.name) for member in machine.members]
        return known and self.stands_by and vote.view == machine.view + 1

    def hear_view(self, view: m.FailoverNotice) -> list[CopyEffect]:
        """From shard 0 of this server."""
        if self.machine is None or view.view <= self.machine.view:
            return []
        self.handle()
        return [Serve(view.view, view.standby)]

    def tick(self, now_ns: int) -> list[CopyEffect]:
        self.handle()
        machine, effects = self.machine, list[CopyEffect]()
        if now_ns - self.said_ns >= REPLICATION_BEAT_NS:
            self.owes = True
            effects += self.acknowledge(now_ns)
        # A shard 0 that was killed knows nothing of this standby any more.
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
            effects.append(Serve(machine.view + 1, ""))
        return effects
