"""How a server has a standby: an `Original` for each of its shards; the other side is in standby.py. No I/O.

Rules
- The standby has an event before anything that follows from it is sent. So what others have seen of a shard, the standby has
  the cause of.
- Who serves is a view, and views have numbers. A member votes once in each, for the server or for its standby. The standby
  serves with the votes of half of the members, the server goes on without it with those of more than half: never both.
- All shards change together: shard 0 decides, and a shard takes a view from shard 0 alone.
- A standby that lags by TAIL_BYTES is none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from narrows.protocols import messages as m
from narrows.protocols.effects import NS, CopyEffect, Log, Send, Serve, Stop, Tell
from narrows.protocols.messages import RefuseCode, name_of
from narrows.protocols.wire import encode
from narrows.ps.events import Event
from narrows.ps.reports import COORDINATOR
from narrows.ps.siblings import Siblings

PART_BYTES = 1 << 20  # of a machine
PARTS_AHEAD = 16  # that were sent and are not acknowledged
TAIL_BYTES, TAIL_TIMES = 1 << 28, 2  # of events that are not acknowledged, or so often the machine where that is more
BYTES_PER_SECOND = 1_250_000  # of the slowest link to a standby: bytes that are under way get so long
SAY_NS = NS // 2  # between two signs of life
AGAIN_NS = NS  # without progress: then what was sent last is sent again
LOST_LEASES, LOST_LEAST_NS = 0.25, NS  # silence after which the other side is taken for lost
CUT_NS = NS // 2  # of silence after the end of the connection: who lives has connected anew by then
DEPOSE_NS = 600 * NS  # for so long the one before is told that it serves no more
GIVE_UP_NS = 60 * NS  # a server that has lost its standby, and that most members do not hear, ends


def lost_after(lease: float) -> int:
    """Nanoseconds of silence, of a lease in seconds."""
    return max(LOST_LEAST_NS, int(LOST_LEASES * lease * NS))


def again_after(size: int) -> int:
    """Nanoseconds without progress after which so many bytes that are under way count as lost."""
    return AGAIN_NS + size * NS // BYTES_PER_SECOND


class Member(Protocol):
    """The part of a member that is known here."""

    worker: int
    peer: bytes
    name: bytes


class Machine(Protocol):
    """The part of a shard's machine that is asked for here."""

    view: int
    standby: str
    happened: int
    incarnation: int  # of the life in which they happened; that of a later life is greater
    viewed: int  # the event with which the present view began
    before: str

    @property
    def members(self) -> Sequence[Member]: ...


class Original:
    """Copies shard `index`, which serves and listens on `port`, to a standby. `freeze`: its machine, as bytes.
    `first_view`: none of an earlier life of the run was as large. `before`: where the shard is that this one copied,
    and in whose place it serves now."""

    def __init__(
        self,
        index: int,
        machine: Machine,
        port: int,
        lost_ns: int,
        freeze: Callable[[], bytes],
        siblings: Siblings,
        first_view: int = 0,
        before: str = "",
    ) -> None:
        self.index, self.machine, self.port, self.lost_ns = index, machine, port, lost_ns
        self.freeze, self.siblings = freeze, siblings
        self.first_view, self.followed = first_view, before
        self.peer, self.address = b"", ""  # of the standby of this shard, and where members find it
        self.heard_ns = self.progress_ns = self.said_ns = 0
        self.tail: deque[m.Copied] = deque()  # events that it has not acknowledged
        self.tail_bytes, self.streams = 0, False  # whether it has a machine, and gets each event
        self.acked = self.sent = 0  # events
        self.frozen, self.frozen_at, self.frozen_sent = b"", -1, 0  # a machine that is on its way; parts
        self.here = self.size = 0  # parts of it that are there; bytes of the newest one
        self.rosters: deque[tuple[int, dict[int, Member]]] = deque()  # since this event, back to the acknowledged one
        self.known = machine.happened  # of a process that was killed, no roster is from before this event
        self.votes: dict[int, int] = {}  # of each worker, its newest view
        self.shown = 0  # the view whose standby was shown on the console
        self.greeted: set[int] = set()  # members
        self.missed_ns = self.deposed_ns = 0  # when the standby was missed first, 0: it is there; told the one before

    # Events of this shard.

    @property
    def before(self) -> str:
        """Where the shard is in whose place this one serves. A journal that is done again may be the first to say it."""
        return self.followed or self.machine.before

    @property
    def holds(self) -> bool:
        """Whether effects wait until the standby has the event that they follow from."""
        return bool(self.machine.standby)

    def note(self, event: Event, frames: Sequence[m.Buffer]) -> list[CopyEffect]:
        """Before an event is handled: the standby is to have it."""
        self._roster()
        if not self.peer and not self.machine.standby:
            return []
        header, payload = bytes(frames[0]) if frames else b"", frames[1] if len(frames) > 1 else b""
        number = self.machine.happened + 1
        copied = m.Copied(self.machine.incarnation, number, 0, 0, event.described(), len(frames), header, payload)
        self.tail.append(copied)
        self.tail_bytes += len(header) + len(payload)
        if self.tail_bytes > max(TAIL_BYTES, TAIL_TIMES * self.size):
            self.forget()
            return []
        if not self.streams:
            return []
        self.sent = number
        return [Send(self.peer, copied)]

    def again(self, event: Event) -> None:
        """Before an event is handled that a process before this one has handled: the standby may lack it."""
        self.note(event, encode(event.message) if event.message is not None else ())

    def _roster(self) -> None:
        members = {member.worker: member for member in self.machine.members}
        if not self.rosters or self.rosters[-1][1].keys() != members.keys():
            lone = not self.machine.standby and not self.streams
            if lone and len(self.rosters) > 1 and self.rosters[-1][0] > self.machine.viewed:
                self.rosters.pop()  # its members have known of no standby
            self.rosters.append((self.machine.happened, members))
        while len(self.rosters) > 1 and self.rosters[1][0] <= self.acked:
            self.rosters.popleft()

    def forget(self) -> None:
        """The standby must begin anew."""
        self.peer, self.address, self.streams = b"", "", False
        self.tail.clear()
        self.tail_bytes, self.frozen, self.frozen_at = 0, b"", -1

    # Messages of a standby, of a member of it, and of the other shards.

    def receive(self, peer: bytes, message: m.Message, now_ns: int) -> list[CopyEffect]:
        """Return the effects of one of OF_COPIES."""
        match message:
            case m.Copy():
                return self.copy(peer, message, now_ns)
            case m.Copying():
                self.siblings.hear(peer, message, now_ns)
            case m.View():
                return self.deposed(message)
            case m.Vote():
                return self.vote(peer, message)
        return []

    def copy(self, peer: bytes, copy: m.Copy, now_ns: int) -> list[CopyEffect]:
        """Send a standby what it lacks, events or the machine; refuse it where another stands by."""
        other = self.machine.standby or (self.address if now_ns - self.heard_ns <= self.lost_ns else "")
        if other and copy.address != other:
            text = f"another server stands by already, at {other}"
            return [Send(peer, m.Refuse(RefuseCode.INCOMPATIBLE, -1, 0, text))]
        self.peer, self.address, self.heard_ns = peer, copy.address, now_ns
        held = self.tail[0].number - 1 if self.tail else self.machine.happened
        if copy.life != self.machine.incarnation:
            copy = replace(copy, have=-1, machine=-1)  # of a life that is over
        if 0 <= copy.have < self.acked:
            return []  # a late one
        if not held <= copy.have <= self.machine.happened:
            return self._give_machine(copy, now_ns)
        if copy.have > self.acked:
            self.progress_ns = now_ns
        self.streams, self.frozen, self.frozen_at = True, b"", -1
        self.acked = copy.have
        while self.tail and self.tail[0].number <= copy.have:
            gone = self.tail.popleft()
            self.tail_bytes -= len(gone.header) + len(gone.payload)
        if now_ns - self.progress_ns >= again_after(self.tail_bytes):
            self.sent, self.progress_ns = copy.have, now_ns
        missing = [copied for copied in self.tail if copied.number > self.sent]
        self.sent = missing[-1].number if missing else self.sent
        return [Send(peer, copied) for copied in missing]

    def _give_machine(self, copy: m.Copy, now_ns: int) -> list[CopyEffect]:
        if not self.frozen:
            self.tail.clear()
            self.tail_bytes, self.streams = 0, False
            self.frozen, self.frozen_at, self.frozen_sent = self.freeze(), self.machine.happened, 0
            self.size = len(self.frozen)
        parts = -(-len(self.frozen) // PART_BYTES)
        here = copy.parts if copy.machine == self.frozen_at else 0
        if here > self.here:
            self.progress_ns = now_ns
        elif now_ns - self.progress_ns >= again_after((self.frozen_sent - here) * PART_BYTES):
            self.frozen_sent, self.progress_ns = here, now_ns
        self.here = here
        first, self.frozen_sent = self.frozen_sent, max(self.frozen_sent, min(parts, here + PARTS_AHEAD))
        of, view, size = (self.machine.incarnation, self.frozen_at), memoryview(self.frozen), PART_BYTES
        sent = range(first, self.frozen_sent)
        return [Send(self.peer, m.Copied(*of, n, parts, b"", 0, b"", view[n * size : (n + 1) * size])) for n in sent]

    def copied(self, now_ns: int) -> bool:
        """The standby follows this shard, was heard a moment ago, and knows of the present view."""
        return self.streams and self.acked >= self.machine.viewed and now_ns - self.heard_ns <= self.lost_ns

    def cut(self, now_ns: int) -> None:
        """The connection of the standby has ended: CUT_NS of silence are enough."""
        self.heard_ns = min(self.heard_ns, now_ns - self.lost_ns + CUT_NS)

    # Views.

    def hear_view(self, view: m.View) -> list[CopyEffect]:
        """From shard 0; or from the standby, which serves by now."""
        return [Serve(view.view, view.standby)] if view.view > self.machine.view else []

    def deposed(self, view: m.View) -> list[CopyEffect]:
        """A standby says that it serves by now; then this server stops."""
        if view.view <= self.machine.view:
            return []
        return [Stop(RefuseCode.SERVER_LOST, f"the standby at {self.machine.standby or 'its address'} serves now")]

    def vote(self, peer: bytes, vote: m.Vote) -> list[CopyEffect]:
        """A member knows of a view. One that has turned to us is told where our shards are."""
        for member in self._electors():
            if (member.worker, member.name) == (vote.worker, name_of(peer)) and vote.view <= self.machine.view + 1:
                self.votes[vote.worker] = max(self.votes.get(vote.worker, 0), vote.view)
        if self.missed_ns and self._elected(self.machine.view + 1):
            self.said_ns = 0  # that is decided with the next tick
        if not vote.attempt or not self.siblings.at(self.machine.view):
            return []
        # Who has expired meanwhile may join again.
        return [Send(peer, m.View(self.machine.view, self.machine.standby, True, self.siblings.ports(self.port)))]

    def _electors(self) -> list[Member]:
        """All whom the standby may count, who have left since too."""
        self._roster()
        return [*{worker: member for _, members in self.rosters for worker, member in members.items()}.values()]

    def _elected(self, view: int) -> bool:
        """More than half of the members have voted for us, whichever roster the standby knows: it has that of this view."""
        if max(self.acked, self.machine.viewed) < self.known:
            return False
        self._roster()
        for _, members in self.rosters:
            if 2 * sum(self.votes.get(worker, 0) >= view for worker in members) <= len(members) and members:
                return False
        return True

    # Time.

    def tick(self, now_ns: int) -> list[CopyEffect]:
        if now_ns - self.said_ns < SAY_NS or not (self.peer or self.machine.view):
            return self._greet() if self.copied(now_ns) else []
        self.said_ns = now_ns
        if self.peer and not self.machine.standby and now_ns - self.heard_ns > self.lost_ns:
            self.forget()  # it was lost before it had all
        effects: list[CopyEffect] = []
        if self.before and self.deposed_ns < DEPOSE_NS:
            self.deposed_ns += SAY_NS
            effects.append(Tell(self.before, m.View(self.machine.view, "", True)))
        if self.index:
            there = self.address if self.copied(now_ns) else ""
            return [*effects, Send(COORDINATOR, m.Copying(self.index, self.machine.view, there, self.port))]
        decided = self._decide(now_ns)
        if any(isinstance(effect, Serve) for effect in decided):
            self.said_ns = 0  # the other shards hear of it with the next tick
        return effects + decided

    def _greet(self) -> list[CopyEffect]:
        """Tell new members of the standby: they may need it soon."""
        holds = self.machine.standby and self.siblings.at(self.machine.view) and not self.missed_ns
        members = {member.worker: member.peer for member in self.machine.members} if holds else {}
        new = [peer for worker, peer in members.items() if worker not in self.greeted]
        self.greeted = set(members)
        return [Send(peer, m.View(self.machine.view, self.machine.standby, True)) for peer in new]

    def _decide(self, now_ns: int) -> list[CopyEffect]:
        machine, siblings = self.machine, self.siblings
        whole = self.copied(now_ns) and siblings.whole(now_ns, self.address)
        effects: list[CopyEffect] = [*siblings.behind(m.View(machine.view, machine.standby, True))]
        if not machine.standby:
            self.missed_ns = 0
            if siblings.newest > machine.view:  # this shard failed, and began from a checkpoint
                return [*effects, Serve(max(siblings.newest + 1, self.first_view), "")]
            if whole and siblings.at(machine.view):
                effects.append(Serve(max(machine.view + 1, self.first_view), self.address))
            return effects + self._tell(m.View(machine.view, "", True))
        if not siblings.at(machine.view):
            return effects
        if whole:
            if any(view > machine.view for view in self.votes.values()):  # these know of no standby any more
                return [*effects, Serve(machine.view + 2, machine.standby)]
            self.missed_ns = 0
            if self.shown != machine.view and all(
                self.votes.get(each.worker, 0) >= machine.view for each in machine.members
            ):
                self.shown = machine.view
                text = f"{machine.standby} stands by: it has all that is here, and the workers know it"
                effects.append(Log("standby", {"there": True, "text": text}))
            return effects + self._tell(m.View(machine.view, machine.standby, True))
        self.missed_ns = self.missed_ns or now_ns
        if now_ns - self.missed_ns < AGAIN_NS:
            return effects
        if self._elected(machine.view + 1):
            text = f"the standby at {machine.standby} is lost; the run goes on without one"
            return [*effects, Log("standby", {"there": False, "text": text}), Serve(machine.view + 1, "")]
        if now_ns - self.missed_ns > GIVE_UP_NS:
            text = "neither the standby nor most of the workers answer; if the standby serves, go on there"
            return [Stop(RefuseCode.SERVER_LOST, text)]
        return effects + [Send(member.peer, m.View(machine.view + 1, "", False)) for member in self._electors()]

    def _tell(self, view: m.View) -> list[Send]:
        """All members, again and again: a vote for us does not say that its member knows who was elected. Who has left hears us
        too until the standby knows of it: it waits for its answer, and would take silence for our end."""
        return [Send(member.peer, view) for member in (self._electors() if view.view else [])]
