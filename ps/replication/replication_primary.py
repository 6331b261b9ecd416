"""Replicates one shard of a server to a standby, and decides with the members which of the two servers serves. No I/O.

How it works

    primary                              standby                         members
    machine, in parts ─────────────────> rebuilds it
    event 12, before its effects leave ─> stores event 12
      <── ReplicationFollow have 12 ───── handles event 12 again
      effects of event 12 leave ───────────────────────────────────────> State, PushAck, ...
    silent for `lost_ns` ............... counts votes  <── FailoverVote ── a member that has not heard the primary
                                         serves with the votes of half of the members

1. Each shard has a `ReplicationPrimary`. It sends the standby the machine once and then each event
   (replication_stream.py).
2. The standby acknowledges an event before any effect of this event leaves the primary. So the standby has the cause
   of everything that members have seen.
3. A view is one choice of server and standby; views are numbered. A member votes once in each view: for the primary,
   or for its standby.
4. The standby serves with the votes of half of the members. The primary goes on without its standby with the votes of
   more than half. A member votes once in a view, so the two never serve in one view.
5. Shard 0 decides a view for all shards of its server; the other shards take a view from shard 0 alone.

standby.py is the other side, and has what shard 0 knows of the other shards. docs/archive/decisions.md has the
reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from narrows.protocols import messages as m
from narrows.protocols.config.timing import (
    DEPOSE_NS,
    ELECTION_TIMEOUT_NS,
    REPLICATION_BEAT_NS,
    STANDBY_MISSED_NS,
)
from narrows.protocols.effects import CopyEffect, Log, Send, SendToPeer, StartServing, StopProcess
from narrows.protocols.messages import RefuseCode, name_of
from narrows.protocols.wire import encode
from narrows.ps.replication.events import MachineEvent
from narrows.ps.replication.replication_stream import ReplicatedMachine, ReplicatedMember, ReplicationStream
from narrows.ps.replication.standby import PeerShards
from narrows.ps.shard.reports import COORDINATOR


class ReplicationPrimary:
    """Replicates a shard that serves to its standby, and takes part in the choice of the server.

    Args:
        index: the shard's number.
        machine: the shard's machine.
        port: the port that the shard listens on.
        lost_ns: the silence after which the standby counts as lost.
        freeze: returns the machine as bytes.
        siblings: what shard 0 knows of the other shards.
        first_view: greater than any view of an earlier life of the run.
        before: address of the primary whose place this shard took as its standby; "": it took none.
    """

    def __init__(
        self,
        index: int,
        machine: ReplicatedMachine,
        port: int,
        lost_ns: int,
        freeze: Callable[[], bytes],
        siblings: PeerShards,
        first_view: int = 0,
        before: str = "",
    ) -> None:
        self.index, self.machine, self.port, self.siblings = index, machine, port, siblings
        self.feed, self.first_view, self.followed = ReplicationStream(machine, lost_ns, freeze), first_view, before
        self.said_ns = 0  # when the newest beat was sent
        # (event, its members by worker). The oldest entry holds at the newest event that the standby has acknowledged.
        self.rosters: deque[tuple[int, dict[int, ReplicatedMember]]] = deque()
        self.known = machine.happened  # the first event of `rosters`: a restarted process lacks the older ones
        self.votes: dict[int, int] = {}  # by worker, the newest view that it voted for this server in
        self.shown = 0  # the newest view whose standby the console has shown
        self.greeted: set[int] = set()  # members that were told of the standby
        self.missed_ns = 0  # since when the standby is silent; 0: it is not
        self.deposed_ns = 0  # for how long this server has told `before` that it serves now

    # Events of this shard.

    @property
    def before(self) -> str:
        """Address of the shard whose place this one took, "": none. Perhaps only a replayed journal names it."""
        return self.followed or self.machine.before

    @property
    def holds(self) -> bool:
        """True if effects wait until the standby has acknowledged their event."""
        return bool(self.machine.standby)

    def note(self, event: MachineEvent, frames: Sequence[m.Buffer]) -> list[Send]:
        """Return the messages that bring an event to the standby. Call it before the machine handles the event."""
        self._roster()
        return self.feed.note(event, frames)

    def again(self, event: MachineEvent) -> None:
        """Note an event of the journal before its replay: the standby may lack it."""
        self.note(event, encode(event.message) if event.message is not None else ())

    def _roster(self) -> None:
        members = {member.worker: member for member in self.machine.members}
        if not self.rosters or self.rosters[-1][1].keys() != members.keys():
            lone = not self.machine.standby and not self.feed.streams
            if lone and len(self.rosters) > 1 and self.rosters[-1][0] > self.machine.viewed:
                self.rosters.pop()  # these members have never known of a standby
            self.rosters.append((self.machine.happened, members))
        while len(self.rosters) > 1 and self.rosters[1][0] <= self.feed.acked:
            self.rosters.popleft()

    # Messages of the standby, of members, and of the other shards.

    def receive(self, peer: bytes, message: m.Message, now_ns: int) -> list[CopyEffect]:
        """Return the effects of a message of replication or failover."""
        match message:
            case m.ReplicationFollow():
                return [*self.feed.copy(peer, message, now_ns)]
            case m.ReplicationProgress():
                self.siblings.hear(peer, message, now_ns)
            case m.FailoverNotice():
                return self.deposed(message)
            case m.FailoverVote():
                return self.vote(peer, message)
        return []

    # Views.

    def hear_view(self, view: m.FailoverNotice) -> list[CopyEffect]:
        """Take a newer view from shard 0."""
        return [StartServing(view.view, view.standby)] if view.view > self.machine.view else []

    def deposed(self, view: m.FailoverNotice) -> list[CopyEffect]:
        """Stop this server, if the notice comes from a standby that serves in a newer view."""
        if view.view <= self.machine.view:
            return []
        return [
            StopProcess(RefuseCode.SERVER_LOST, f"the standby at {self.machine.standby or 'its address'} serves now")
        ]

    def vote(self, peer: bytes, vote: m.FailoverVote) -> list[CopyEffect]:
        """Take a member's vote for this server. A member that has failed over to this server gets the shards' ports."""
        for member in self._electors():
            if (member.worker, member.name) == (vote.worker, name_of(peer)) and vote.view <= self.machine.view + 1:
                self.votes[vote.worker] = max(self.votes.get(vote.worker, 0), vote.view)
        if self.missed_ns and self._elected(self.machine.view + 1):
            self.said_ns = 0  # so the next tick decides
        if not vote.attempt or not self.siblings.at(self.machine.view):
            return []
        # A member whose lease expired in the meantime gets them too: it may join again.
        return [
            Send(peer, m.FailoverNotice(self.machine.view, self.machine.standby, True, self.siblings.ports(self.port)))
        ]

    def _electors(self) -> list[ReplicatedMember]:
        """All members that the standby may count, also those that have left since."""
        self._roster()
        return [*{worker: member for _, members in self.rosters for worker, member in members.items()}.values()]

    def _elected(self, view: int) -> bool:
        """True if more than half of the members have voted for this server, by each roster that the standby may have.

        The standby has the roster of this view or a newer one.
        """
        if max(self.feed.acked, self.machine.viewed) < self.known:
            return False
        self._roster()
        for _, members in self.rosters:
            if 2 * sum(self.votes.get(worker, 0) >= view for worker in members) <= len(members) and members:
                return False
        return True

    # Time.

    def tick(self, now_ns: int) -> list[CopyEffect]:
        """Send the beat of replication when it is due: report to shard 0, or decide as shard 0."""
        if now_ns - self.said_ns < REPLICATION_BEAT_NS or not (self.feed.peer or self.machine.view):
            return self._greet() if self.feed.copied(now_ns) else []
        self.said_ns = now_ns
        if self.feed.peer and not self.machine.standby and now_ns - self.feed.heard_ns > self.feed.lost_ns:
            self.feed.forget()  # the standby was lost before it had the whole machine
        effects: list[CopyEffect] = []
        if self.before and self.deposed_ns < DEPOSE_NS:
            self.deposed_ns += REPLICATION_BEAT_NS
            effects.append(SendToPeer(self.before, m.FailoverNotice(self.machine.view, "", True)))
        if self.index:
            there = self.feed.address if self.feed.copied(now_ns) else ""
            return [*effects, Send(COORDINATOR, m.ReplicationProgress(self.index, self.machine.view, there, self.port))]
        decided = self._decide(now_ns)
        if any(isinstance(effect, StartServing) for effect in decided):
            self.said_ns = 0  # the other shards hear of it with the next tick
        return effects + decided

    def _greet(self) -> list[CopyEffect]:
        """Tell new members of the standby at once: they may need it soon."""
        holds = self.machine.standby and self.siblings.at(self.machine.view) and not self.missed_ns
        members = {member.worker: member.peer for member in self.machine.members} if holds else {}
        new = [peer for worker, peer in members.items() if worker not in self.greeted]
        self.greeted = set(members)
        return [Send(peer, m.FailoverNotice(self.machine.view, self.machine.standby, True)) for peer in new]

    def _decide(self, now_ns: int) -> list[CopyEffect]:
        """Decide the next view as shard 0, if there is a reason for one, and repeat the present view to members."""
        machine, siblings = self.machine, self.siblings
        whole = self.feed.copied(now_ns) and siblings.whole(now_ns, self.feed.address)
        effects: list[CopyEffect] = [*siblings.behind(m.FailoverNotice(machine.view, machine.standby, True))]
        if not machine.standby:
            self.missed_ns = 0
            if siblings.newest > machine.view:  # this shard failed and went back to a checkpoint
                return [*effects, StartServing(max(siblings.newest + 1, self.first_view), "")]
            if whole and siblings.at(machine.view):
                effects.append(StartServing(max(machine.view + 1, self.first_view), self.feed.address))
            return effects + self._tell(m.FailoverNotice(machine.view, "", True))
        if not siblings.at(machine.view):
            return effects
        if whole:
            # A member that has voted for this server in the next view no longer counts on the standby.
            if any(view > machine.view for view in self.votes.values()):
                return [*effects, StartServing(machine.view + 2, machine.standby)]
            self.missed_ns = 0
            if self.shown != machine.view and all(
                self.votes.get(each.worker, 0) >= machine.view for each in machine.members
            ):
                self.shown = machine.view
                text = f"{machine.standby} stands by: it has all that is here, and the workers know it"
                effects.append(Log("standby", {"there": True, "text": text}))
            return effects + self._tell(m.FailoverNotice(machine.view, machine.standby, True))
        self.missed_ns = self.missed_ns or now_ns
        if now_ns - self.missed_ns < STANDBY_MISSED_NS:
            return effects
        if self._elected(machine.view + 1):
            text = f"the standby at {machine.standby} is lost; the run goes on without one"
            return [*effects, Log("standby", {"there": False, "text": text}), StartServing(machine.view + 1, "")]
        if now_ns - self.missed_ns > ELECTION_TIMEOUT_NS:
            text = "neither the standby nor most of the workers answer; if the standby serves, go on there"
            return [StopProcess(RefuseCode.SERVER_LOST, text)]
        return effects + [
            Send(member.peer, m.FailoverNotice(machine.view + 1, "", False)) for member in self._electors()
        ]

    def _tell(self, view: m.FailoverNotice) -> list[Send]:
        """Repeat the view to all members: a member that has voted for this server may not know yet who was elected.

        Members that have left hear it too until the standby has that event. Such a member waits for the answer to its
        Leave, which is held back until then, and would take silence for the end of this server.
        """
        return [Send(member.peer, view) for member in (self._electors() if view.view else [])]
