"""Sends a standby its shard's machine, and then each event before any effect of this event leaves the shard. No I/O.

Rules
- The standby has an event before any effect of it leaves. So the standby has the cause of everything that others have
  seen of the shard.
- The stream keeps events until they are acknowledged, and sends them again if no acknowledgement comes. A standby that
  lags by more than TAIL_BYTES counts as lost, and has to begin again with the machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from narrows.protocols import messages as m
from narrows.protocols.config.retry import NumberedStream
from narrows.protocols.config.timing import REPLICATION_CUT_NS, REPLICATION_RETRY
from narrows.protocols.effects import Send
from narrows.protocols.messages import RefuseCode
from narrows.ps.replication.events import MachineEvent

PART_BYTES = 1 << 20  # size of one part of a machine
PARTS_AHEAD = 16  # parts that are in flight at most
TAIL_BYTES, TAIL_TIMES = 1 << 28, 2  # unacknowledged events: at most this, or twice the machine if that is more


class ReplicatedMember(Protocol):
    """What replication reads of a member."""

    worker: int
    peer: bytes  # its routing id
    name: bytes  # the prefix of its routing ids


class ReplicatedMachine(Protocol):
    """What replication reads of a shard's machine. Only the machine changes these fields."""

    view: int  # the present view
    standby: str  # address of the standby in it, "": none
    happened: int  # number of events that the machine has handled in this incarnation
    incarnation: int  # the life of the machine in which they happened; a later life has a greater number
    viewed: int  # number of the event that began the present view
    before: str  # address of the primary whose place the machine took, "": none

    @property
    def members(self) -> Sequence[ReplicatedMember]: ...


class ReplicationStream:
    """Brings a machine and its events to the standby.

    Args:
        machine: the machine.
        lost_ns: the silence after which the standby counts as lost.
        freeze: returns the machine as bytes.
    """

    def __init__(self, machine: ReplicatedMachine, lost_ns: int, freeze: Callable[[], bytes]) -> None:
        self.machine, self.lost_ns, self.freeze = machine, lost_ns, freeze
        self.peer, self.address = b"", ""  # routing id of this shard's standby, and where members find the standby
        self.heard_ns = self.progress_ns = 0  # when the standby was last heard, and last acknowledged something new
        self.tail: deque[m.ReplicationEntry] = deque()  # events that are not yet acknowledged
        self.tail_bytes, self.streams = 0, False  # bytes of the tail; the standby has a machine and gets each event
        self.events, self.parts = NumberedStream(), NumberedStream(PARTS_AHEAD)  # `parts`: of a frozen machine
        self.frozen, self.frozen_at = b"", -1  # the machine that is being sent, and its newest event
        self.size = 0  # bytes of the newest frozen machine

    def note(self, event: MachineEvent, frames: Sequence[m.Buffer]) -> list[Send]:
        """Return the message that brings an event to the standby. Call it before the machine handles the event."""
        if not self.peer and not self.machine.standby:
            return []
        header, payload = bytes(frames[0]) if frames else b"", frames[1] if len(frames) > 1 else b""
        number = self.machine.happened + 1
        copied = m.ReplicationEntry(
            self.machine.incarnation, number, 0, 0, event.described(), len(frames), header, payload
        )
        self.tail.append(copied)
        self.tail_bytes += len(header) + len(payload)
        if self.tail_bytes > max(TAIL_BYTES, TAIL_TIMES * self.size):
            self.forget()
            return []
        if not self.streams:
            return []
        self.events.take(number)
        return [Send(self.peer, copied)]

    def forget(self) -> None:
        """Forget the standby. It, or another one, has to begin with the whole machine."""
        self.peer, self.address, self.streams = b"", "", False
        self.tail.clear()
        self.tail_bytes, self.frozen, self.frozen_at = 0, b"", -1

    def copy(self, peer: bytes, copy: m.ReplicationFollow, now_ns: int) -> list[Send]:
        """Send a standby the events or the machine that it lacks; refuse it if there is another standby."""
        other = self.machine.standby or (self.address if now_ns - self.heard_ns <= self.lost_ns else "")
        if other and copy.address != other:
            text = f"another server stands by already, at {other}"
            return [Send(peer, m.Refuse(RefuseCode.TAKEN, -1, 0, text))]
        self.peer, self.address, self.heard_ns = peer, copy.address, now_ns
        held = self.tail[0].number - 1 if self.tail else self.machine.happened
        if copy.life != self.machine.incarnation:
            copy = replace(copy, have=-1, machine=-1)  # the standby has the machine of an earlier life
        if 0 <= copy.have < self.acked:
            return []  # a late message
        if not held <= copy.have <= self.machine.happened:
            return self._give_machine(copy, now_ns)
        self.streams, self.frozen, self.frozen_at = True, b"", -1
        while self.tail and self.tail[0].number <= copy.have:
            gone = self.tail.popleft()
            self.tail_bytes -= len(gone.header) + len(gone.payload)
        self._acknowledged(self.events, copy.have, self.tail_bytes, now_ns)
        missing = self.events.take(self.tail[-1].number if self.tail else 0)  # events count from 1: n is n - 1 there
        return [Send(peer, copied) for copied in self.tail if copied.number > missing.start]

    def _acknowledged(self, stream: NumberedStream, count: int, size: int, now_ns: int) -> None:
        """Take an acknowledgement of `count` events or parts of `stream`.

        If it is no progress for too long, the `size` bytes in flight count as lost, and are sent again.
        """
        if stream.acknowledge(count):
            self.progress_ns = now_ns
        elif REPLICATION_RETRY.due(self.progress_ns, now_ns, size):
            stream.go_back()
            self.progress_ns = now_ns

    def _give_machine(self, copy: m.ReplicationFollow, now_ns: int) -> list[Send]:
        """Freeze the machine if there is no frozen one, and return the next parts of it."""
        if not self.frozen:
            self.tail.clear()
            self.tail_bytes, self.streams = 0, False
            self.frozen, self.frozen_at = self.freeze(), self.machine.happened
            self.parts.begin_anew()
            self.size = len(self.frozen)
        parts = -(-len(self.frozen) // PART_BYTES)
        here = copy.parts if copy.machine == self.frozen_at else 0
        self._acknowledged(self.parts, here, (self.parts.sent - here) * PART_BYTES, now_ns)
        of, view, size = (self.machine.incarnation, self.frozen_at), memoryview(self.frozen), PART_BYTES
        return [
            Send(self.peer, m.ReplicationEntry(*of, n, parts, b"", 0, b"", view[n * size : (n + 1) * size]))
            for n in self.parts.take(parts)
        ]

    @property
    def acked(self) -> int:
        """Number of the newest event up to which the standby has all."""
        return self.events.acked

    def copied(self, now_ns: int) -> bool:
        """True if the standby follows this shard, is not silent, and has the event that began the present view."""
        return self.streams and self.acked >= self.machine.viewed and now_ns - self.heard_ns <= self.lost_ns

    def cut(self, now_ns: int) -> None:
        """The connection to the standby has ended: it counts as lost after REPLICATION_CUT_NS more of silence."""
        self.heard_ns = min(self.heard_ns, now_ns - self.lost_ns + REPLICATION_CUT_NS)
