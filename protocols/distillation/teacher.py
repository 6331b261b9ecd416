"""The machine of a teacher: it admits students, queues their requests, and hands them out in turn. No I/O.

How it works

    student ── TeacherHello ──> seat ── TeacherRequest ──> seat.open, seat.queue
                                                              │ `next_requests`: one student after the other
    student <── TeacherAnswer ── `answered` <── the model ────┘

1. `receive` takes a message. A request waits in the queue of its student.
2. The runner's other thread calls `next_requests`, and `answered` or `failed` for each request that it got.
3. `tick` sends each student a beat, and ends the seat of a student that is silent for SEAT_LEASE_NS.

Rules
- A student has at most CREDIT requests open. All queues together hold at most QUEUE_BYTES_MAX, and one student at most as
  much as is free: so none takes the room of all others. A request beyond that is dropped; the next beat shows it, and the
  student sends it again.
- A student that reads no answers gets no more of them. All answers that no beat has confirmed have at most
  UNREAD_BYTES_MAX, and those of one student as much as is free, beside the answers of one call of the model to each
  student. So a student that reads is answered, whatever others leave unread.
- A request that is open already, or of a student without a seat, is no second request.
- Nothing of a student outlives its seat: a student that comes back sends its open requests again.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from narrows.protocols import messages as m
from narrows.protocols.config.retry import transfer_ns
from narrows.protocols.distillation.limits import (
    BEATS,
    CREDIT,
    ENTRY_BYTES,
    FIELDS_BYTES_MAX,
    LEASE_NS,
    QUEUE_BYTES_MAX,
    REQUEST_BYTES_MAX,
    SAMPLES_MAX,
    STUDENTS_MAX,
    TEMPERATURE_LEAST,
    TEMPERATURE_MOST,
    UNREAD_BYTES_MAX,
)
from narrows.protocols.effects import NS, Log, Send
from narrows.protocols.errors import RemoteProtocolError, printable
from narrows.protocols.messages.base import RefuseCode

Effect = Send | Log

SEAT_LEASE_NS = LEASE_NS + transfer_ns(REQUEST_BYTES_MAX)  # the beats of a student wait behind its requests


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that is not answered yet."""

    peer: bytes
    coding: str
    temperature: float
    message: m.TeacherRequest

    @property
    def nbytes(self) -> int:
        return len(self.message.payload) + len(self.message.fields)


@dataclass(slots=True, eq=False)
class StudentSeat:
    """A student that this teacher has admitted."""

    peer: bytes  # its routing id
    number: int  # random number of its process
    coding: str
    temperature: float
    heard_ns: int
    seen: int = -1  # the highest number of its requests
    open: dict[int, QueuedRequest] = field(default_factory=dict)  # by number: requests without an answer
    queue: deque[QueuedRequest] = field(default_factory=deque)  # those of them that the model has not
    nbytes: int = 0  # of the open requests
    unread: dict[int, int] = field(default_factory=dict)  # by number: bytes of answers that no beat has confirmed
    unread_bytes: int = 0  # of them


class Teacher:
    """The machine of one teacher.

    Args:
        life: a random number of this process.
        samples: of the teacher's own dataset; 0: it has none.
        check: raises an error for a coding that this teacher does not know.
        now_ns: the time.
        credit: requests that a student may have open.
    """

    def __init__(
        self, life: int, samples: int, check: Callable[[str], object], now_ns: int, credit: int = CREDIT
    ) -> None:
        self.life, self.samples, self.check, self.credit = life, samples, check, credit
        self.beat_ns = now_ns
        self.seats: OrderedDict[bytes, StudentSeat] = OrderedDict()  # by routing id, the next one to be served first
        self.queued_bytes = self.unread_bytes = 0  # of all open requests, and of all answers that are not confirmed
        self.dropped = 0  # requests that found no room

    # Messages that come.

    def receive(self, peer: bytes, message: m.Message, now_ns: int) -> list[Effect]:
        """Handle a message of a student.

        Raises:
            RemoteProtocolError: no student sends such a message now.
        """
        if isinstance(message, m.TeacherHello):
            return self._admit(peer, message, now_ns)
        if not isinstance(message, (m.TeacherRequest, m.TeacherBeat)):
            raise RemoteProtocolError(f"{type(message).__name__} is no message to a teacher")
        seat = self.seats.get(peer)
        if seat is None or seat.number != message.student:
            text = "this teacher does not know the student any more: it greets the teacher again"
            return [Send(peer, m.Refuse(RefuseCode.NOT_A_MEMBER, -1, 0, text))]
        seat.heard_ns = now_ns
        if isinstance(message, m.TeacherRequest):
            return self._queue(seat, message)
        if message.left:
            return self._end(seat, "has left")
        if len(message.open) > self.credit:
            raise RemoteProtocolError(f"a beat names more than {self.credit} open requests")
        self._confirm(seat, {*seat.unread} - {*message.open})
        return []

    def _admit(self, peer: bytes, hello: m.TeacherHello, now_ns: int) -> list[Effect]:
        if not TEMPERATURE_LEAST <= hello.temperature <= TEMPERATURE_MOST:
            raise RemoteProtocolError(f"a temperature of {hello.temperature:g} is not between {TEMPERATURE_LEAST:g} and "
                                      f"{TEMPERATURE_MOST:g}")  # fmt: skip
        try:
            self.check(hello.coding)
        except ValueError as error:
            return [
                Send(
                    peer,
                    m.Refuse(RefuseCode.INCOMPATIBLE, -1, 0, f"the teacher cannot answer in {hello.coding}: {error}"),
                )
            ]
        effects: list[Effect] = []
        seat = self.seats.get(peer)
        if seat is None or (seat.number, seat.coding, seat.temperature) != (
            hello.student,
            hello.coding,
            hello.temperature,
        ):
            if seat is not None:
                effects += self._end(seat, "has begun anew")
            if len(self.seats) >= STUDENTS_MAX:
                text = f"the teacher has {STUDENTS_MAX} students, and takes no more"
                return [*effects, Send(peer, m.Refuse(RefuseCode.TAKEN, -1, 0, text))]
            seat = self.seats[peer] = StudentSeat(peer, hello.student, hello.coding, hello.temperature, now_ns)
            effects.append(Log("student", {"students": len(self.seats), "coding": hello.coding}))
        seat.heard_ns = now_ns
        return [*effects, Send(peer, m.TeacherWelcome(seat.number, self.life, self.credit, self.samples))]

    def _queue(self, seat: StudentSeat, request: m.TeacherRequest) -> list[Effect]:
        size = len(request.payload)
        if (
            not 1 <= request.samples <= SAMPLES_MAX
            or size > REQUEST_BYTES_MAX
            or len(request.fields) > FIELDS_BYTES_MAX
        ):
            raise RemoteProtocolError(
                f"a request of {request.samples} samples and {size} bytes is more than a teacher takes"
            )
        seat.seen = max(seat.seen, request.number)
        if request.number in seat.open:
            return []
        if len(seat.open) >= self.credit:
            raise RemoteProtocolError(f"a student has more than {self.credit} requests open")
        queued = QueuedRequest(seat.peer, seat.coding, seat.temperature, request)
        if seat.nbytes + queued.nbytes > QUEUE_BYTES_MAX - self.queued_bytes:
            self.dropped += 1
            return []
        self._confirm(seat, {request.number} & {*seat.unread})  # its answer was lost
        seat.open[request.number] = queued
        seat.queue.append(queued)
        seat.nbytes += queued.nbytes
        self.queued_bytes += queued.nbytes
        return []

    def _confirm(self, seat: StudentSeat, numbers: set[int]) -> None:
        """Note that a student has read these answers, or that they are lost."""
        size = sum(seat.unread.pop(number) for number in numbers)
        seat.unread_bytes -= size
        self.unread_bytes -= size

    # The model.

    @property
    def waiting(self) -> int:
        """The requests that `next_requests` can hand out now."""
        return sum(len(seat.queue) for seat in self.seats.values() if self._reads(seat))

    def _reads(self, seat: StudentSeat) -> bool:
        """True if a student has room for another answer: who has read all always has, whatever others leave unread."""
        return not seat.unread or seat.unread_bytes <= UNREAD_BYTES_MAX - self.unread_bytes

    def next_requests(self, samples: int) -> list[QueuedRequest]:
        """Hand out the next requests, of one student after the other: requests with equal fields, coding and temperature.

        Args:
            samples: of all of them together, at most; the first one comes whatever its size.
        """
        found: list[QueuedRequest] = []
        for seat in [each for each in self.seats.values() if self._reads(each)]:
            while seat.queue and (not found or (_fits(found, seat.queue[0], samples))):
                found.append(seat.queue.popleft())
                self.seats.move_to_end(seat.peer)
        return found

    def answered(
        self, request: QueuedRequest, classes: int, positions: tuple[int, ...], payload: m.Buffer
    ) -> list[Effect]:
        """Send the answer of a request. Does nothing if its student has gone."""
        return self._answer(request, classes, positions, "", payload)

    def failed(self, request: QueuedRequest, text: str) -> list[Effect]:
        """Tell a student why its request has no answer."""
        return self._answer(request, 0, (), " ".join(printable(text).split())[: m.TEXT_MAX], b"")

    def _answer(
        self, request: QueuedRequest, classes: int, positions: tuple[int, ...], text: str, payload: m.Buffer
    ) -> list[Effect]:
        seat, number = self.seats.get(request.peer), request.message.number
        if seat is None or seat.open.get(number) is not request:
            return []
        self._close(seat, number)
        seat.unread[number] = size = len(payload) + ENTRY_BYTES
        seat.unread_bytes += size
        self.unread_bytes += size
        answer = m.TeacherAnswer(seat.number, self.life, number, classes, positions, text, payload)
        return [Send(seat.peer, answer)]

    def _close(self, seat: StudentSeat, number: int) -> None:
        size = seat.open.pop(number).nbytes
        seat.nbytes -= size
        self.queued_bytes -= size

    # Time.

    def tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for seat in [*self.seats.values()]:
            if now_ns - seat.heard_ns > SEAT_LEASE_NS:
                effects += self._end(seat, f"was not heard for {SEAT_LEASE_NS / NS:.0f} s")
        if now_ns - self.beat_ns < LEASE_NS // BEATS:
            return effects
        self.beat_ns = now_ns
        return [*effects, *(self._beat(seat) for seat in self.seats.values())]

    def leave(self) -> list[Effect]:
        """Tell all students that this teacher ends."""
        return [self._beat(seat, left=True) for seat in self.seats.values()]

    def gone(self, peer: bytes) -> list[Effect]:
        """Note that the connection of a student has ended."""
        return self._end(self.seats[peer], "has hung up") if peer in self.seats else []

    def _beat(self, seat: StudentSeat, left: bool = False) -> Send:
        return Send(seat.peer, m.TeacherBeat(seat.number, self.life, seat.seen, tuple(seat.open), left))

    def _end(self, seat: StudentSeat, how: str) -> list[Effect]:
        for number in [*seat.open]:
            self._close(seat, number)
        self._confirm(seat, {*seat.unread})
        seat.queue.clear()
        del self.seats[seat.peer]
        return [Log("student", {"students": len(self.seats), "left": how})]


def _fits(found: list[QueuedRequest], more: QueuedRequest, samples: int) -> bool:
    """True if `more` can be computed together with the requests in `found`."""
    first = found[0]
    alike = (first.coding, first.temperature, first.message.fields) == (
        more.coding,
        more.temperature,
        more.message.fields,
    )
    return alike and sum(each.message.samples for each in (*found, more)) <= samples
