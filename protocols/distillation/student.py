"""The machine of a student: it shares its requests among the teachers, and repeats what is lost. No I/O.

How it works

    ask ──> pending ──> link.open ── TeacherRequest ──> teacher
                ^           │
                └───────────┘ the teacher is lost, or has not got the request
    AnswerArrived <── TeacherAnswer

1. A request goes to the teacher that will answer it first: by what that teacher has open, and by the time that it took
   for a sample so far. A teacher has at most as many open requests as its welcome allows.
2. A teacher that is silent for a lease is lost, as is one that leaves, that hangs up, or that sends answers that are not
   valid. Its open requests go to the others. It counts again once it welcomes this student again.
3. If no teacher is left, requests wait for one, or they end without an answer (`waits`).

Rules
- An answer counts if its teacher has the request open, and if `check` finds its payload valid. Nothing else is taken.
- A teacher that has sent a wrong payload, or STRIKES_MAX messages in a row that nobody asked for, is asked no more. Its
  connection ends.
- A request is sent to a teacher again only if it is known to be lost, or after the time that a slow link takes for all that
  is open: copies would fill a narrow link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from narrows.protocols import messages as m
from narrows.protocols.config.retry import LONG_AGO_NS, SLOW_LINK_BYTES_PER_SECOND, Retry, transfer_ns
from narrows.protocols.distillation.limits import (
    BEATS,
    CLASSES_MAX,
    CONFIRM_BYTES,
    CREDIT,
    CUT_NS,
    HELLOS_MAX,
    LEASE_NS,
    OPEN_BYTES_MAX,
    POSITIONS_MAX,
    STRIKES_MAX,
    STUCK_NS,
)
from narrows.protocols.effects import NS, MemberFailed, SendToPeer
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError, UnreachableError, printable
from narrows.protocols.messages.base import RefuseCode

HELLO_RETRY = Retry(NS // 2, most=8)  # a hello that no welcome has answered: the wait grows with each
RESEND = Retry(2 * LEASE_NS // BEATS, SLOW_LINK_BYTES_PER_SECOND, most=8)  # a request that no beat has had open
PATIENCE_MOST = 4  # doublings of the lease of a teacher that was lost by silence, and has answered nothing since
SAMPLE_WEIGHT = 0.2  # of the newest answer in the mean time of a sample


@dataclass(frozen=True, slots=True)
class AnswerArrived:
    """A request is answered."""

    number: int
    answer: m.TeacherAnswer


@dataclass(frozen=True, slots=True)
class AnswerMissed:
    """A request has no answer: no teacher is left, and the student goes on without."""

    number: int


@dataclass(frozen=True, slots=True)
class TeacherChanged:
    """A teacher is lost, or is there again. `text` says so to the user."""

    address: str
    text: str


@dataclass(frozen=True, slots=True)
class HangUp:
    """End the connection to a teacher, with all that waits to be sent. The next message to it makes another."""

    address: str


Effect = SendToPeer | AnswerArrived | AnswerMissed | TeacherChanged | MemberFailed | HangUp


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request without an answer."""

    message: m.TeacherRequest
    given_ns: int = 0  # when the teacher that has it got it
    ahead: int = 1  # samples that this teacher then had open, with those of this request
    sent_ns: int = 0  # the last time
    times: int = 0  # sent to this teacher
    place: int = -1  # among all that was sent to this teacher


@dataclass(slots=True, eq=False)
class TeacherLink:
    """One teacher, as its student sees it."""

    address: str
    life: int = -1  # random number of its process; -1: it has not welcomed this student
    credit: int = 0
    samples: int = 0  # of its dataset
    heard_ns: int = 0
    hello_ns: int = LONG_AGO_NS
    hellos: int = 0  # sent since the newest welcome
    sample_ns: float = 0.0  # mean time of a sample, by the times of its requests; 0: not known
    answer_bytes: float = 0.0  # of a sample in the newest answer
    answer_ns: int = 0  # time of the newest answer, or since which there are open requests
    unconfirmed: int = 0  # bytes of answers since the newest beat to it
    cut_ns: int = -1  # since when its connection is ended; -1: it is not
    anew: bool = False  # the connection is a new one, on which it has not welcomed this student
    full: bool = False  # it takes no more students, and the user knows
    places: int = 0  # requests sent to it
    arrived: int = -1  # the last place that it is known to have had
    strikes: int = 0  # messages in a row that nobody asked for
    losses: int = 0  # by silence, since its newest answer
    wrong: str = ""  # why it is asked no more
    open: dict[int, OpenRequest] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        return self.life >= 0 and not self.wrong

    def takes(self, request: OpenRequest) -> bool:
        """True if it may be asked now."""
        room = not self.open or self.open_bytes + len(request.message.payload) <= OPEN_BYTES_MAX
        return self.there and not self.anew and self.cut_ns < 0 and len(self.open) < self.credit and room

    @property
    def open_bytes(self) -> int:
        return sum(len(each.message.payload) for each in self.open.values())

    @property
    def open_samples(self) -> int:
        return sum(each.message.samples for each in self.open.values())

    def silent_ns(self) -> int:
        """Silence after which it is lost: a message of its open answers may take long on a slow link."""
        wait_ns = LEASE_NS + transfer_ns(int(self.answer_bytes * self.open_samples))
        return min(wait_ns << min(self.losses, PATIENCE_MOST), STUCK_NS)


class Student:
    """The machine of one student.

    Args:
        addresses: of the teachers.
        number: a random number of this process.
        coding: of the answers.
        temperature: of the answers.
        check: raises an error if the payload of an answer to so many samples is not valid.
        waits: requests wait for a teacher while none is there; False: they end without an answer.
        start_ns: time for a first teacher to answer.
        now_ns: the time.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        number: int,
        coding: str,
        temperature: float,
        check: Callable[[m.TeacherAnswer, int], object],
        waits: bool,
        start_ns: int,
        now_ns: int,
    ) -> None:
        self.number, self.coding, self.temperature = number, coding, temperature
        self.check, self.waits, self.start_ns = check, waits, start_ns
        self.links = {address: TeacherLink(address) for address in addresses}
        self.pending: deque[OpenRequest] = deque()  # requests that no teacher has
        self.next = 0  # number of the next request
        self.began_ns = self.beat_ns = now_ns
        self.met = False  # a teacher has welcomed this student
        self.told_missing = False  # the user knows that none has come at the start

    @property
    def there(self) -> bool:
        """True if there is a teacher to ask."""
        return any(link.there for link in self.links.values())

    @property
    def unanswered(self) -> int:
        return len(self.pending) + sum(len(link.open) for link in self.links.values())

    # Commands.

    def ask(self, samples: int, fields: bytes, payload: m.Buffer, now_ns: int) -> list[Effect]:
        """Ask for the soft targets of some samples. The request gets the number `next`."""
        request = m.TeacherRequest(self.number, self.next, samples, fields, payload)
        self.next += 1
        self.pending.append(OpenRequest(request))
        return self._assign(now_ns)

    def leave(self) -> list[Effect]:
        """Tell the teachers that this student ends."""
        return [self._beat(link, left=True) for link in self.links.values() if link.there]

    # Connections.

    def linked(self, address: str, now_ns: int) -> list[Effect]:
        """Greet a teacher over a new connection. Its welcome has all that is open sent again: it may be lost."""
        link = self.links[address]
        if link.wrong:
            return []
        link.cut_ns, link.anew = -1, True
        return self._hello(link, now_ns)

    def cut(self, address: str, now_ns: int) -> None:
        """Note that a connection has ended."""
        self.links[address].cut_ns = now_ns

    def distrust(self, address: str, why: str, now_ns: int) -> list[Effect]:
        """Ask this teacher no more. `why`: a clause for the user."""
        return self._exclude(self.links[address], f"{why}; it is asked no more", IncompatibleError.exit_code, now_ns)

    def refuses(self, address: str, code: int, why: str, now_ns: int) -> list[Effect]:
        """Note that a teacher takes no request of this student. `why`: a sentence."""
        return self._exclude(self.links[address], f"does not answer: {why}", code, now_ns)

    def unasked(self, address: str, now_ns: int) -> list[Effect]:
        """Note a message of a teacher that nobody asked for."""
        link = self.links[address]
        link.strikes += 1
        if link.strikes < STRIKES_MAX or link.wrong:
            return []
        return self.distrust(address, f"has sent {link.strikes} messages that nobody asked for", now_ns)

    def _exclude(self, link: TeacherLink, why: str, code: int, now_ns: int) -> list[Effect]:
        if link.wrong:
            return []
        link.wrong, met = why, self.met
        if all(each.wrong for each in self.links.values()) and (self.waits or not met):
            return [HangUp(link.address), MemberFailed(code, f"the teacher at {link.address} {why}")]
        return [*self._lose(link, why, now_ns), *self._assign(now_ns)]

    # Messages that come.

    def receive(self, address: str, message: m.Message, now_ns: int) -> list[Effect]:
        """Handle a message of a teacher.

        Raises:
            RemoteProtocolError: this student did not ask for such a message.
        """
        link = self.links[address]
        if link.wrong:
            return []
        if isinstance(message, m.Refuse):
            return self._refused(link, message, now_ns)
        if not isinstance(message, (m.TeacherWelcome, m.TeacherAnswer, m.TeacherBeat)):
            raise RemoteProtocolError(f"{type(message).__name__} is no message of a teacher")
        if message.student != self.number:
            raise RemoteProtocolError(f"a {type(message).__name__} is for another student")
        if isinstance(message, m.TeacherWelcome):
            return self._welcomed(link, message, now_ns)
        if link.life < 0:  # it was lost, and what it had sent before comes now
            return self.unasked(address, now_ns)
        if message.teacher != link.life:
            raise RemoteProtocolError(f"a {type(message).__name__} of a teacher that has not welcomed this student")
        link.heard_ns, link.cut_ns = now_ns, -1
        if isinstance(message, m.TeacherBeat):
            return self._heard(link, message, now_ns)
        return self._answered(link, message, now_ns)

    def _welcomed(self, link: TeacherLink, welcome: m.TeacherWelcome, now_ns: int) -> list[Effect]:
        if welcome.credit < 1:
            raise RemoteProtocolError("a teacher that lets no request be open")
        anew = link.life != welcome.teacher
        if not link.hellos:
            if anew:
                raise RemoteProtocolError("a TeacherWelcome that no hello has asked for")
            return self.unasked(link.address, now_ns)
        first, again = not self.met, self.met and not link.there
        link.heard_ns, link.life, link.hellos = now_ns, welcome.teacher, 0
        link.credit, link.samples = min(welcome.credit, CREDIT), welcome.samples
        again_sent, link.anew, link.cut_ns, link.full = link.anew, False, -1, False
        self.met = True
        effects: list[Effect] = []
        if again or (first and self.told_missing):
            effects.append(
                TeacherChanged(link.address, f"the teacher at {link.address} is there: it is asked from now on")
            )
        if anew:
            self._take_back(link)
        elif again_sent:
            effects += [self._send(link, each, now_ns) for each in link.open.values()]
        return [*effects, *self._assign(now_ns)]

    def _heard(self, link: TeacherLink, beat: m.TeacherBeat, now_ns: int) -> list[Effect]:
        if beat.left:
            return [*self._lose(link, "has ended", now_ns), *self._assign(now_ns)]
        there = {*beat.open}
        link.arrived = max([each.place for number, each in link.open.items() if number in there] + [link.arrived])
        size, effects = link.open_bytes, list[Effect]()
        for number, each in link.open.items():
            if number not in there and not link.anew:
                surely = each.times == 1 and each.place < link.arrived
                seen = number <= beat.seen or each.place < link.arrived
                if surely or (seen and RESEND.due(each.sent_ns, now_ns, size, each.times)):
                    effects.append(self._send(link, each, now_ns))
        return effects

    def _answered(self, link: TeacherLink, answer: m.TeacherAnswer, now_ns: int) -> list[Effect]:
        request = link.open.get(answer.number)
        if request is None:
            if not 0 <= answer.number < self.next:
                raise RemoteProtocolError("an answer to a request that nobody has sent")
            return self.unasked(link.address, now_ns)  # such as the second answer to a request that was sent twice
        samples = request.message.samples
        if not answer.text:
            try:
                if not 1 <= answer.classes <= CLASSES_MAX or len(answer.positions) > POSITIONS_MAX:
                    raise ValueError(
                        f"{answer.classes} classes and {len(answer.positions)} dimensions are out of range"
                    )
                self.check(answer, samples)
            except ValueError as error:
                return self.distrust(link.address, f"sends answers that are not valid ({error})", now_ns)
        took = (now_ns - request.given_ns) / request.ahead
        link.sample_ns = took if not link.sample_ns else link.sample_ns + SAMPLE_WEIGHT * (took - link.sample_ns)
        link.answer_bytes = len(answer.payload) / samples
        link.answer_ns, link.strikes, link.losses = now_ns, 0, 0
        link.arrived = max(link.arrived, request.place)
        link.unconfirmed += len(answer.payload)
        del link.open[answer.number]
        confirmed = [self._beat(link)] if link.unconfirmed >= CONFIRM_BYTES else []
        return [AnswerArrived(answer.number, answer), *confirmed, *self._assign(now_ns)]

    def _refused(self, link: TeacherLink, refusal: m.Refuse, now_ns: int) -> list[Effect]:
        text = printable(refusal.text).replace("\n", " ")
        if refusal.code not in (RefuseCode.NOT_A_MEMBER, RefuseCode.TAKEN):
            return self.refuses(link.address, refusal.code, text, now_ns)
        effects, was = self.unasked(link.address, now_ns), link.life
        if link.wrong:
            return effects
        link.life = -1  # the hello is repeated
        self._take_back(link)
        if refusal.code == RefuseCode.TAKEN and not link.full:
            link.full = True
            effects.append(TeacherChanged(link.address, f"the teacher at {link.address}: {text}; it is asked again"))
        if refusal.code == RefuseCode.NOT_A_MEMBER and was >= 0:
            effects += self._hello(link, now_ns)
        return [*effects, *self._assign(now_ns)]

    # Time.

    def tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for link in self.links.values():
            if link.there and now_ns - link.heard_ns > link.silent_ns():
                link.losses += 1
                effects += self._lose(link, f"was not heard for {(now_ns - link.heard_ns) / NS:.0f} s", now_ns)
            if link.there and link.cut_ns >= 0 and now_ns - link.cut_ns > CUT_NS:
                effects += self._lose(link, "has hung up", now_ns)
            if link.there and link.open and now_ns - link.answer_ns > STUCK_NS:
                effects += self._lose(link, f"has answered nothing for {STUCK_NS / NS:.0f} s", now_ns)
            if link.life < 0 and not link.wrong and HELLO_RETRY.due(link.hello_ns, now_ns, factor=link.hellos):
                if link.hellos and link.hellos % HELLOS_MAX == 0:
                    effects.append(HangUp(link.address))
                effects += self._hello(link, now_ns)
        if not self.met and not self.told_missing and now_ns - self.began_ns > self.start_ns:
            text = f"no teacher answered at {', '.join(self.links)} within {self.start_ns / NS:g} s"
            if self.waits:
                return [
                    MemberFailed(UnreachableError.exit_code, f"{text}: start ps-teach there, or leave --teacher out")
                ]
            self.told_missing = True
            effects.append(TeacherChanged("", f"{text}: training goes on without a teacher until one does"))
        if now_ns - self.beat_ns >= LEASE_NS // BEATS:
            self.beat_ns = now_ns
            effects += [self._beat(link) for link in self.links.values() if link.there]
        return [*effects, *self._assign(now_ns)]

    # Parts.

    def _assign(self, now_ns: int) -> list[Effect]:
        """Give pending requests to the teachers that will answer them first; without a teacher, end them if none waits."""
        effects: list[Effect] = []
        while self.pending:
            free = [link for link in self.links.values() if link.takes(self.pending[0])]
            if not free:
                break
            request = self.pending.popleft()
            best = min(free, key=lambda link: (self._finish_ns(link, request.message.samples), link.open_samples))
            best.answer_ns = best.answer_ns if best.open else now_ns
            best.open[request.message.number] = request
            request.given_ns, request.ahead, request.times = now_ns, best.open_samples, 0
            effects.append(self._send(best, request, now_ns))
        given_up = self.met or self.told_missing or all(link.wrong for link in self.links.values())
        if self.pending and not self.waits and not self.there and given_up:
            effects += [AnswerMissed(each.message.number) for each in self.pending]
            self.pending.clear()
        return effects

    def _finish_ns(self, link: TeacherLink, samples: int) -> float:
        """Return when this teacher would have answered so many samples more. One that is new counts as the fastest."""
        known = [each.sample_ns for each in self.links.values() if each.sample_ns]
        return (link.sample_ns or min(known, default=0.0)) * (link.open_samples + samples)

    def _send(self, link: TeacherLink, request: OpenRequest, now_ns: int) -> SendToPeer:
        request.sent_ns, request.times, request.place = now_ns, request.times + 1, link.places
        link.places += 1
        return SendToPeer(link.address, request.message)

    def _take_back(self, link: TeacherLink) -> None:
        """Have the open requests of a teacher wait for another one, the oldest first."""
        waiting = sorted([*link.open.values(), *self.pending], key=lambda each: each.message.number)
        link.open.clear()
        self.pending = deque(waiting)

    def _lose(self, link: TeacherLink, how: str, now_ns: int) -> list[Effect]:
        link.life, link.hello_ns, link.hellos, link.cut_ns, link.anew = -1, now_ns, 1, -1, False
        self._take_back(link)
        others = sum(each.there for each in self.links.values())
        then = (
            f"{others} other{'s answer' if others > 1 else ' answers'} for it"
            if others
            else "its students wait for it"
            if self.waits
            else "training goes on without a teacher"
            if link.wrong
            else "training goes on without a teacher until it is back"
        )
        return [HangUp(link.address), TeacherChanged(link.address, f"the teacher at {link.address} {how}: {then}")]

    def _hello(self, link: TeacherLink, now_ns: int) -> list[Effect]:
        link.hello_ns, link.hellos = now_ns, link.hellos + 1
        link.strikes = max(0, link.strikes - 1)  # it may answer that it takes no more students
        return [SendToPeer(link.address, m.TeacherHello(self.number, self.coding, self.temperature))]

    def _beat(self, link: TeacherLink, left: bool = False) -> SendToPeer:
        link.unconfirmed = 0
        return SendToPeer(
            link.address, m.TeacherBeat(self.number, link.life, max(link.open, default=-1), tuple(link.open), left)
        )
