"""The machines of a teacher and its students, by messages and time alone: who is admitted, asked, answered, lost."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from narrows.protocols import messages as m
from narrows.protocols.distillation import limits, teacher
from narrows.protocols.distillation.limits import (
    BEATS,
    CREDIT,
    CUT_NS,
    LEASE_NS,
    QUEUE_BYTES_MAX,
    REQUEST_BYTES_MAX,
    STRIKES_MAX,
    STUCK_NS,
    STUDENTS_MAX,
    UNREAD_BYTES_MAX,
)
from narrows.protocols.distillation.student import (
    AnswerArrived,
    AnswerMissed,
    HangUp,
    Student,
    TeacherChanged,
    TeacherLink,
)
from narrows.protocols.distillation.teacher import SEAT_LEASE_NS, QueuedRequest, Teacher
from narrows.protocols.effects import NS, MemberFailed, Send, SendToPeer
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages.base import RefuseCode
from narrows.protocols.wire import decode, encode

MS = NS // 1000
A, B = "tcp://a:1", "tcp://b:1"
ANSWER = b"answer"


def known(coding: str) -> None:
    if coding != "top:4+int8":
        raise ValueError("there is no such coding")


def valid(answer: m.TeacherAnswer, samples: int) -> None:
    if bytes(answer.payload) != ANSWER:
        raise ValueError("these are no records")


def student_of(*addresses: str, waits: bool = True, number: int = 7) -> Student:
    return Student(addresses or (A,), number, "top:4+int8", 1.0, valid, waits, 30 * NS, 0)


def teacher_of(life: int = 1, credit: int = CREDIT) -> Teacher:
    return Teacher(life, 0, known, 0, credit)


def hello(number: int = 7, coding: str = "top:4+int8", temperature: float = 1.0) -> m.TeacherHello:
    return m.TeacherHello(number, coding, temperature)


def request(
    number: int, payload: bytes = b"x", student: int = 7, samples: int = 1, fields: bytes = b"f"
) -> m.TeacherRequest:
    return m.TeacherRequest(student, number, samples, fields, payload)


def sent(effects: Sequence[Any]) -> list[Any]:
    return [each.message for each in effects if isinstance(each, (Send, SendToPeer))]


def of(effects: Sequence[Any], kind: type) -> list[Any]:
    return [each for each in effects if isinstance(each, kind)]


# A teacher.


def test_a_teacher_admits_answers_and_forgets() -> None:
    t = teacher_of()
    assert sent(t.receive(b"s", hello(), 0)) == [m.TeacherWelcome(7, 1, CREDIT, 0)]
    assert t.receive(b"s", request(0), 0) == [] and t.queued_bytes == 2
    (queued,) = t.next_requests(8)
    assert t.next_requests(8) == [] and t.waiting == 0
    assert sent(t.answered(queued, 5, (3,), ANSWER)) == [m.TeacherAnswer(7, 1, 0, 5, (3,), "", ANSWER)]
    assert t.queued_bytes == 0 and t.answered(queued, 5, (3,), ANSWER) == [], "a second answer is none"
    t.receive(b"s", request(1), 0)
    (queued,) = t.next_requests(8)
    (failed,) = sent(t.failed(queued, "no\n\x1b[2J" + "x" * 9999))
    assert failed.text.isprintable() and len(failed.text) == m.TEXT_MAX and failed.classes == 0
    assert t.gone(b"s") and not t.seats and t.gone(b"s") == []
    assert t.queued_bytes == t.unread_bytes == 0


def test_who_is_not_admitted() -> None:
    t = teacher_of()
    for temperature in (0.0, -1.0, 1e9, float("nan"), float("inf")):
        with pytest.raises(RemoteProtocolError, match="temperature"):
            t.receive(b"s", hello(temperature=temperature), 0)
    (refusal,) = sent(t.receive(b"s", hello(coding="top:9+int9"), 0))
    assert refusal.code == RefuseCode.INCOMPATIBLE and "no such coding" in refusal.text
    for number in range(STUDENTS_MAX):
        t.receive(b"%d" % number, hello(number), 0)
    (refusal,) = sent(t.receive(b"s", hello(), 0))
    assert refusal.code == RefuseCode.TAKEN and len(t.seats) == STUDENTS_MAX
    assert sent(t.receive(b"3", hello(3), 0))[0].student == 3, "who has a seat keeps it"
    with pytest.raises(RemoteProtocolError, match="no message to a teacher"):
        t.receive(b"s", m.TeacherWelcome(7, 1, 1, 0), 0)


def test_without_a_seat_nothing_is_queued() -> None:
    t = teacher_of()
    for message in (request(0), m.TeacherBeat(7, 1, 0, (), False)):
        assert sent(t.receive(b"s", message, 0))[0].code == RefuseCode.NOT_A_MEMBER
    t.receive(b"s", hello(), 0)
    assert sent(t.receive(b"s", request(0, student=8), 0))[0].code == RefuseCode.NOT_A_MEMBER
    assert not t.waiting and not t.queued_bytes


def test_credit_and_sizes() -> None:
    t = teacher_of(credit=4)
    t.receive(b"s", hello(), 0)
    for number in (0, 1, 2, 3, 3, 0):
        t.receive(b"s", request(number), 0)
    assert t.waiting == 4 and t.queued_bytes == 8, "a request that is open is no second one"
    with pytest.raises(RemoteProtocolError, match="more than 4"):
        t.receive(b"s", request(4), 0)
    u = teacher_of()
    u.receive(b"s", hello(), 0)
    for wrong in (
        request(0, bytes(REQUEST_BYTES_MAX + 1)),
        request(0, samples=0),
        request(0, samples=-1),
        request(0, samples=1 << 40),
        request(0, fields=bytes(limits.FIELDS_BYTES_MAX + 1)),
    ):
        with pytest.raises(RemoteProtocolError, match="more than a teacher takes"):
            u.receive(b"s", wrong, 0)
    with pytest.raises(RemoteProtocolError, match="open requests"):
        u.receive(b"s", m.TeacherBeat(7, 1, 0, (*range(CREDIT + 1),), False), 0)
    assert not u.queued_bytes and not u.waiting


def test_students_take_turns_and_alike_requests_go_together() -> None:
    t = teacher_of()
    for peer, number in ((b"a", 1), (b"b", 2)):
        t.receive(peer, hello(number), 0)
    for number in range(6):
        t.receive(b"a", request(number, student=1, samples=4), 0)
    t.receive(b"b", request(0, student=2, samples=4), 0)
    t.receive(b"b", request(1, student=2, samples=4, fields=b"other"), 0)

    def turn() -> list[tuple[int, int]]:
        return [(each.message.student, each.message.number) for each in t.next_requests(8)]

    assert turn() == [(1, 0), (1, 1)], "at most 8 samples"
    assert turn() == [(2, 0), (1, 2)], "the other student is next; requests with equal fields go together"
    assert turn() == [(2, 1)], "other fields go alone"
    assert turn() == [(1, 3), (1, 4)] and turn() == [(1, 5)] and turn() == []
    u = teacher_of()
    for number, (coding, temperature) in enumerate([("top:4+int8", 1.0), ("top:4+int8", 2.0)]):
        u.receive(b"%d" % number, hello(number, coding, temperature), 0)
        u.receive(b"%d" % number, request(0, student=number), 0)
    assert [len(u.next_requests(8)) for _ in range(2)] == [1, 1], "each temperature alone"
    u.receive(b"0", request(1, student=0, samples=100), 0)
    assert len(u.next_requests(8)) == 1, "the first one comes whatever its size"


def test_no_student_takes_all_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "QUEUE_BYTES_MAX", 1000)
    t = teacher_of()
    for number in range(4):
        t.receive(b"%d" % number, hello(number), 0)
        for each in range(30):
            t.receive(b"%d" % number, request(each, bytes(99), number), 0)
    held = [seat.nbytes for seat in t.seats.values()]
    assert held[0] == 500 and min(held) > 0 and sum(held) == t.queued_bytes <= 1000, "each at most what is free"
    assert t.dropped == 120 - sum(len(seat.open) for seat in t.seats.values())


def test_answers_that_one_student_leaves_unread_do_not_stop_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of the model answers several requests: their answers may have more bytes than the bound."""
    monkeypatch.setattr(teacher, "UNREAD_BYTES_MAX", 100_000)
    t = teacher_of()
    for student in (1, 2):
        t.receive(b"%d" % student, hello(student), 0)
    for number in range(4):
        t.receive(b"1", request(number, student=1), 0)
    for found in t.next_requests(4):
        t.answered(found, 5, (), bytes(40_000))
    assert t.unread_bytes > 100_000
    t.receive(b"1", request(4, student=1), 0)
    t.receive(b"2", request(0, student=2), 0)
    (found,) = t.next_requests(4)
    assert found.peer == b"2" and not t.waiting


def test_a_student_that_reads_no_answers_gets_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "UNREAD_BYTES_MAX", 100_000)
    t = teacher_of()
    for number in (1, 2):
        t.receive(b"%d" % number, hello(number), 0)
    for number in range(200):
        for student in (1, 2):
            t.receive(b"%d" % student, request(number, student=student), 0)
            if student == 2:  # which reads
                t.receive(b"2", m.TeacherBeat(2, 1, number, (number,), False), 0)
        while found := t.next_requests(1):
            assert sent(t.answered(found[0], 5, (), bytes(9_000)))
        assert t.unread_bytes == sum(seat.unread_bytes for seat in t.seats.values()) <= 110_000
        if len(t.seats[b"1"].open) == CREDIT:
            break
    reads = len(t.seats[b"2"].unread)
    assert not t.waiting and reads <= 1 and 4 <= len(t.seats[b"1"].unread) <= 6
    t.receive(b"1", m.TeacherBeat(1, 1, 99, tuple(t.seats[b"1"].open), False), 0)
    assert t.waiting == CREDIT, "what it has read makes room"
    (again,) = t.next_requests(1)
    t.answered(again, 5, (), b"")
    t.receive(b"1", request(again.message.number, student=1), 0)
    assert again.message.number not in t.seats[b"1"].unread, "an answer that was lost is not unread for ever"
    for peer in (b"1", b"2"):
        t.gone(peer)
    assert t.unread_bytes == 0
    assert UNREAD_BYTES_MAX == 512 << 20


def test_a_seat_expires_and_beats_tell_what_is_open() -> None:
    t = teacher_of()
    t.receive(b"s", hello(), 0)
    t.receive(b"s", request(5), 0)
    (beat,) = sent(t.tick(LEASE_NS // BEATS))
    assert beat == m.TeacherBeat(7, 1, 5, (5,), False)
    assert t.tick(LEASE_NS // BEATS + 1) == []
    (queued,) = t.next_requests(1)
    t.tick(SEAT_LEASE_NS + 1)
    assert not t.seats and not t.queued_bytes and t.answered(queued, 1, (), b"") == []
    t.receive(b"s", hello(), 0)
    (beat,) = t.leave()
    assert isinstance(beat, Send) and isinstance(beat.message, m.TeacherBeat) and beat.message.left
    t.receive(b"s", m.TeacherBeat(7, 1, -1, (), True), 0)
    assert not t.seats
    assert SEAT_LEASE_NS > REQUEST_BYTES_MAX / 125_000 * NS, (
        "a request of the largest size takes so long on a slow link"
    )


# A student.


def met(s: Student, address: str, life: int = 1, now_ns: int = 0, credit: int = CREDIT) -> list[Any]:
    s.linked(address, now_ns)
    return [*s.receive(address, m.TeacherWelcome(s.number, life, credit, 0), now_ns)]


def answer(number: int, life: int = 1, payload: bytes = ANSWER, **other: Any) -> m.TeacherAnswer:
    values: dict[str, Any] = {
        "student": 7,
        "teacher": life,
        "number": number,
        "classes": 9,
        "positions": (),
        "text": "",
    }
    return m.TeacherAnswer(**(values | other), payload=payload)


def ask(s: Student, now_ns: int = 0, payload: bytes = b"x", samples: int = 1) -> list[Any]:
    return [*s.ask(samples, b"f", payload, now_ns)]


def test_a_request_waits_for_a_welcome_and_ends_once() -> None:
    s = student_of()
    assert ask(s) == [] and s.unanswered == 1
    assert sent(s.tick(0)) == [hello()]
    (asked,) = sent(met(s, A))
    assert asked == request(0)
    assert s.receive(A, answer(0), NS) == [AnswerArrived(0, answer(0))]
    assert s.receive(A, answer(0), NS) == [] and s.links[A].strikes == 1, "the second answer changes nothing"
    assert not s.unanswered
    with pytest.raises(RemoteProtocolError, match="nobody has sent"):
        s.receive(A, answer(1), NS)


def test_never_more_than_the_credit() -> None:
    s = student_of()
    met(s, A, credit=2)
    for _ in range(5):
        ask(s)
    assert len(s.links[A].open) == 2 and len(s.pending) == 3
    assert sent(s.receive(A, answer(1), NS)) == [request(2)]
    huge = student_of()
    met(huge, A, credit=1 << 40)
    assert huge.links[A].credit == CREDIT
    with pytest.raises(RemoteProtocolError, match="no request"):
        met(student_of(), A, credit=0)


def test_a_dropped_request_is_sent_again_and_a_slow_one_is_not() -> None:
    s = student_of()
    met(s, A)
    for _ in range(3):
        ask(s)
    assert sent(s.receive(A, m.TeacherBeat(7, 1, 1, (1,), False), MS)) == [request(0)], "1 came after it and is there"
    assert sent(s.receive(A, m.TeacherBeat(7, 1, 1, (1,), False), 2 * MS)) == [], "its copy is under way"
    assert sent(s.receive(A, m.TeacherBeat(7, 1, 1, (1,), False), 5 * NS)) == [request(0)]
    assert not [each for each in sent(s.receive(A, m.TeacherBeat(7, 1, 1, (1,), False), 60 * NS)) if each.number == 2]
    s = student_of()
    met(s, A)
    big = bytes(10 << 20)
    ask(s, payload=big)
    copies = [sent(s.receive(A, m.TeacherBeat(7, 1, 0, (), False), second * NS)) for second in range(80)]
    assert not any(copies), "80 s on a link of 125 kB/s: no copy"
    assert sent(s.receive(A, m.TeacherBeat(7, 1, 0, (), False), 90 * NS))


def test_a_new_connection_and_a_new_life() -> None:
    s = student_of()
    met(s, A)
    ask(s)
    ask(s)
    s.cut(A, NS)
    assert ask(s) == [], "nothing is sent into a connection that has ended"
    assert sent(s.linked(A, NS)) == [hello()], "first the hello; a teacher of a new life would get all twice"
    assert sent(s.receive(A, m.TeacherWelcome(7, 1, CREDIT, 0), NS)) == [request(0), request(1), request(2)]
    assert sent(s.receive(A, m.TeacherWelcome(7, 1, CREDIT, 0), NS)) == [], "once"
    s.linked(A, 2 * NS)
    assert sent(s.receive(A, m.TeacherWelcome(7, 2, CREDIT, 0), 2 * NS)) == [request(0), request(1), request(2)]
    with pytest.raises(RemoteProtocolError, match="no hello"):
        s.receive(A, m.TeacherWelcome(7, 3, CREDIT, 0), 2 * NS)
    (greets,) = sent(s.receive(A, m.Refuse(RefuseCode.NOT_A_MEMBER, -1, 0, "who?"), 3 * NS))
    assert greets == hello() and len(s.pending) == 3
    assert len(sent(s.receive(A, m.TeacherWelcome(7, 2, CREDIT, 0), 3 * NS))) == 3


@pytest.mark.parametrize("waits", [True, False])
def test_a_lost_teacher(waits: bool) -> None:
    """Its requests go to the other; without another they wait, or are missed."""
    s = student_of(A, B, waits=waits)
    met(s, A)
    met(s, B, life=2)
    for _ in range(4):
        ask(s)
    assert {len(link.open) for link in s.links.values()} == {2}
    s.receive(B, m.TeacherBeat(7, 2, 9, (*s.links[B].open,), False), LEASE_NS)
    effects = s.tick(LEASE_NS + 1)
    assert of(effects, HangUp) == [HangUp(A)] and "1 other answers" in of(effects, TeacherChanged)[0].text
    assert len(s.links[B].open) == 4 and not s.pending
    effects = s.receive(B, m.TeacherBeat(7, 2, 9, (), True), LEASE_NS + 2)
    assert "has ended" in of(effects, TeacherChanged)[0].text
    assert sorted(each.number for each in of(effects, AnswerMissed)) == ([] if waits else [0, 1, 2, 3])
    assert of(ask(s, LEASE_NS + 3), AnswerMissed) == ([] if waits else [AnswerMissed(4)])
    effects = met(s, A, life=3, now_ns=LEASE_NS + 4)
    assert "is there" in of(effects, TeacherChanged)[0].text
    assert len(sent(effects)) == (5 if waits else 0)
    assert sent(ask(s, LEASE_NS + 5)) == [request(5)]


def test_a_teacher_that_hangs_up_or_hangs_is_lost() -> None:
    s = student_of(waits=False)
    met(s, A)
    ask(s)
    s.cut(A, NS)
    assert not of(s.tick(NS + CUT_NS), TeacherChanged)
    assert "has hung up" in of(s.tick(NS + CUT_NS + 1), TeacherChanged)[0].text
    s = student_of(waits=False)
    met(s, A)
    ask(s)
    for at in range(0, STUCK_NS + 1, NS):
        s.receive(A, m.TeacherBeat(7, 1, 0, (0,), False), at)
        assert not of(s.tick(at), TeacherChanged)
    effects = s.tick(STUCK_NS + 1)
    assert "answered nothing" in of(effects, TeacherChanged)[0].text and of(effects, AnswerMissed) == [AnswerMissed(0)]


def test_a_slow_first_answer_is_waited_for_in_the_end() -> None:
    """Its teacher is silent, since its beats wait behind an answer that takes 100 s."""
    s = student_of()
    now = lost = 0
    for _ in range(6):
        met(s, A, now_ns=now)
        if not s.links[A].open:
            ask(s, now)
        for at in range(now, now + 100 * NS, NS):
            if of(s.tick(at), TeacherChanged):
                lost, now = lost + 1, at
                break
        else:
            break
    else:
        pytest.fail("it is lost again and again")
    assert lost == 4, "10, 20, 40, 80 s, and then 160"
    s.receive(A, answer(0), now + 100 * NS)
    assert s.links[A].silent_ns() == LEASE_NS


def test_no_teacher_at_the_start() -> None:
    (failed,) = student_of(waits=True).tick(31 * NS)
    assert isinstance(failed, MemberFailed) and failed.code == 3 and "within 30 s" in failed.text
    s = student_of(waits=False)
    assert ask(s) == [] and not of(s.tick(29 * NS), AnswerMissed)
    effects = s.tick(31 * NS)
    assert of(effects, AnswerMissed) == [AnswerMissed(0)] and "goes on without" in of(effects, TeacherChanged)[0].text
    assert "is there" in of(met(s, A, now_ns=40 * NS), TeacherChanged)[0].text
    hellos = sum(bool(sent(s.tick(at))) for at in range(0, 10 * NS, 50 * MS))
    assert hellos < 20


def test_hellos_that_nobody_hears_do_not_pile_up() -> None:
    s = student_of(waits=False)
    waiting = most = 0
    for at in range(0, 3600 * NS, 100 * MS):
        for effect in s.tick(at):
            waiting = 0 if isinstance(effect, HangUp) else waiting + isinstance(effect, SendToPeer)
            most = max(most, waiting)
    assert 1 < most <= limits.HELLOS_MAX


WRONG: dict[str, dict[str, Any]] = {
    "payload": {"payload": b"other"},
    "no classes": {"classes": 0},
    "negative classes": {"classes": -1},
    "too many classes": {"classes": limits.CLASSES_MAX + 1},
    "too many dimensions": {"positions": (1,) * 9},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("waits", [True, False])
def test_a_teacher_whose_answer_is_wrong_is_asked_no_more(wrong: str, waits: bool) -> None:
    s = student_of(A, B, waits=waits)
    met(s, A)
    met(s, B, life=2)
    ask(s)
    ask(s)
    (number,) = s.links[A].open
    effects = s.receive(A, answer(number, **WRONG[wrong]), NS)
    assert "asked no more" in of(effects, TeacherChanged)[0].text and of(effects, HangUp)
    assert number in s.links[B].open, "the other answers it"
    assert s.receive(A, answer(number), NS) == [] == s.linked(A, NS), "nothing of it counts"
    assert not any(isinstance(each, SendToPeer) and each.address == A for each in s.tick(2 * NS))
    effects = s.distrust(B, "lies", NS)
    assert of(effects, MemberFailed) if waits else len(of(effects, AnswerMissed)) == 2
    if not waits:
        assert of(ask(s), AnswerMissed) and "until it is back" not in of(effects, TeacherChanged)[0].text


FORGED: list[tuple[str, m.Message]] = [
    ("of another life", answer(0, life=5)),
    ("for another student", answer(0, student=8)),
    ("to a request that is not there", answer(1 << 40)),
    ("to a negative number", answer(-1)),
    ("a beat of another life", m.TeacherBeat(7, 5, 0, (), True)),
    ("a welcome for another", m.TeacherWelcome(8, 1, 1, 0)),
    ("a welcome of another life", m.TeacherWelcome(7, 5, 1, 0)),
    ("no message of a teacher", hello()),
]


@pytest.mark.parametrize(("what", "message"), FORGED)
def test_what_nobody_asked_for_changes_nothing(what: str, message: m.Message) -> None:
    s = student_of(waits=False)
    met(s, A)
    ask(s)
    with pytest.raises(RemoteProtocolError):
        s.receive(A, message, NS)
    assert [*s.links[A].open] == [0] and s.links[A].life == 1
    for _ in range(STRIKES_MAX - 1):
        assert s.unasked(A, NS) == []
    effects = s.unasked(A, NS)
    assert of(effects, HangUp) and of(effects, AnswerMissed) == [AnswerMissed(0)]
    assert "nobody asked for" in of(effects, TeacherChanged)[0].text


def test_refusals_end_the_start_or_exclude_one_teacher() -> None:
    s = student_of(waits=False)
    (failed,) = of(s.receive(A, m.Refuse(RefuseCode.INCOMPATIBLE, -1, 0, "no\n\x1b"), 0), MemberFailed)
    assert failed.code == 5 and "no" in failed.text and failed.text.isprintable()
    s = student_of(waits=False)
    met(s, A)
    effects = s.receive(A, m.Refuse(RefuseCode.AUTHENTICATION, -1, 0, "your key was taken off"), 0)
    assert not of(effects, MemberFailed) and "your key" in of(effects, TeacherChanged)[0].text, "go-on goes on"
    s = student_of(A, B)
    met(s, A)
    assert not of(s.refuses(B, 4, "no", 0), MemberFailed) and sent(ask(s))
    s = student_of()
    s.tick(0)
    told = [
        text
        for _ in range(2000)
        for text in of(s.receive(A, m.Refuse(RefuseCode.TAKEN, -1, 0, "full"), 0), TeacherChanged)
    ]
    assert len(told) == 1 or s.links[A].wrong, "said once"
    patient = student_of()
    now = 0
    for _ in range(1000):
        now += 4 * NS
        if sent(patient.tick(now)):
            patient.receive(A, m.Refuse(RefuseCode.TAKEN, -1, 0, "full"), now)
        patient.met = True
    assert not patient.links[A].wrong, "a teacher that is full for an hour is asked again and again"


def test_a_slow_script_confirms_what_it_reads() -> None:
    s = Student((A,), 7, "top:4+int8", 1.0, lambda answer, samples: None, True, NS, 0)
    met(s, A)
    for _ in range(3):
        ask(s)
    assert not sent(s.receive(A, answer(0, payload=bytes(5 << 20)), NS))
    (beat,) = sent(s.receive(A, answer(1, payload=bytes(5 << 20)), NS))
    assert beat.open == (2,)


# Both, with connections that lose messages and processes that end.


class World:
    """Students and teachers, by virtual time. Messages take `delay`; a model answers a sample in its own time."""

    def __init__(self, seed: int, students: int, speeds: Sequence[int], waits: bool, credit: int = 4) -> None:
        self.rng, self.now, self.delay = random.Random(seed), 0, 20 * MS
        self.speeds, self.credit, self.lives = speeds, credit, iter(range(1, 1 << 30))
        self.addresses = [f"tcp://t{each}:1" for each in range(len(speeds))]
        self.teachers: dict[str, Teacher | None] = dict.fromkeys(self.addresses)
        self.busy: dict[str, tuple[int, list[QueuedRequest]]] = {}
        self.students: list[Student | None] = []
        self.waits, self.ended = waits, list[Counter[int]]()
        self.missed = self.answers = 0
        self.wires: dict[tuple[int, str], Wire] = {}
        self.answered_by: Counter[str] = Counter()
        self.failed: list[str] = []
        for address in self.addresses:
            self.start(address)
        for _ in range(students):
            self.add()

    def add(self) -> None:
        at = len(self.students)
        self.students.append(Student(self.addresses, at, "top:4+int8", 1.0, valid, self.waits, 30 * NS, self.now))
        self.ended.append(Counter())

    def start(self, address: str) -> None:
        self.teachers[address] = Teacher(next(self.lives), 0, known, self.now, self.credit)

    def kill(self, address: str) -> None:
        self.teachers[address] = None
        self.busy.pop(address, None)
        for at, student in enumerate(self.students):
            if student is not None:
                self.cut(at, address)

    def kill_student(self, at: int) -> None:
        for address in self.addresses:
            self.cut(at, address)
        self.students[at] = None

    def cut(self, at: int, address: str, told: bool = True) -> None:
        wire = self.wires.pop((at, address), None)
        if wire is None:
            return
        found = self.teachers[address]
        if found is not None and told:
            self.from_teacher(address, found.gone(wire.peer))
        student = self.students[at]
        if student is not None and told:
            student.cut(address, self.now)

    def apply(self, at: int, effects: Sequence[Any]) -> None:
        """Carry out what a student wants."""
        student = self.students[at]
        assert student is not None
        for effect in effects:
            match effect:
                case SendToPeer(address, message):
                    wire = self.wires.get((at, address))
                    if wire is None:
                        if self.teachers[address] is None:
                            continue  # nobody listens there; the hello is repeated
                        wire = self.wires[at, address] = Wire(b"%d" % self.rng.randrange(1 << 60))
                        self.apply(at, student.linked(address, self.now))
                    wire.up.append((self.now + self.delay, decode(encode(message))))
                case HangUp(address):
                    self.cut(at, address)
                case AnswerArrived(number, _):
                    self.ended[at][number] += 1
                    self.answers += 1
                case AnswerMissed(number):
                    self.ended[at][number] += 1
                    self.missed += 1
                case MemberFailed(_, text):
                    self.failed.append(text)

    def from_teacher(self, address: str, effects: Sequence[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                for (_, to), wire in self.wires.items():
                    if to == address and wire.peer == effect.peer:
                        wire.down.append((self.now + self.delay, effect.message))

    def turn(self, ns: int = 20 * MS) -> None:
        self.now += ns
        for (at, address), wire in [*self.wires.items()]:
            found, student = self.teachers[address], self.students[at]
            while found is not None and wire.up and wire.up[0][0] <= self.now:
                self.from_teacher(address, found.receive(wire.peer, wire.up.popleft()[1], self.now))
            while student is not None and wire.down and wire.down[0][0] <= self.now:
                self.apply(at, student.receive(address, wire.down.popleft()[1], self.now))
        for address, speed in zip(self.addresses, self.speeds, strict=True):
            if (found := self.teachers[address]) is None:
                continue
            until, requests = self.busy.get(address, (0, []))
            if requests and until <= self.now:
                for each in requests:
                    self.answered_by[address] += each.message.samples
                    self.from_teacher(address, found.answered(each, 9, (), ANSWER))
                requests = []
                del self.busy[address]
            if not requests and (requests := found.next_requests(8)):
                work = speed * sum(each.message.samples for each in requests)
                self.busy[address] = self.now + work, requests
            self.from_teacher(address, found.tick(self.now))
        for at, student in enumerate(self.students):
            if student is not None:
                self.apply(at, student.tick(self.now))
        self.check()

    def check(self) -> None:
        """What holds at any time."""
        for found in self.teachers.values():
            if found is None:
                continue
            assert found.queued_bytes == sum(
                each.nbytes for seat in found.seats.values() for each in seat.open.values()
            )
            assert found.queued_bytes <= vars(teacher)["QUEUE_BYTES_MAX"]
            for seat in found.seats.values():
                assert len(seat.open) <= found.credit and {*seat.queue} <= {*seat.open.values()}
                assert seat.unread_bytes == sum(seat.unread.values())
                assert len(seat.unread) <= 4 * self.credit + 60, "answers that were read are forgotten"
        for at, student in enumerate(self.students):
            if student is None:
                continue
            held = [number for link in student.links.values() for number in link.open]
            held += [each.message.number for each in student.pending]
            assert len(held) == len({*held}), "a request is in one place"
            assert all(len(link.open) <= self.credit for link in student.links.values())
            assert {*held} | {*self.ended[at]} == {*range(student.next)}, "and none is lost"
            assert all(count == 1 for count in self.ended[at].values()), "each ends once"
            assert not {*held} & {*self.ended[at]}
        assert not self.failed, self.failed

    def settle(self, limit_s: int = 120) -> None:
        deadline = self.now + limit_s * NS
        while any(student is not None and student.unanswered for student in self.students):
            assert self.now < deadline, "requests do not end"
            self.turn(100 * MS)


class Wire:
    """A connection of a student to a teacher."""

    def __init__(self, peer: bytes) -> None:
        self.peer = peer
        self.up: deque[tuple[int, m.Message]] = deque()
        self.down: deque[tuple[int, Any]] = deque()


def shaken(seed: int) -> World:
    """Run students and teachers that are killed, restarted, and cut off."""
    rng = random.Random(seed)
    waits = seed % 2 == 0
    world = World(seed, rng.randint(1, 3), [rng.choice((5, 20, 80)) * MS for _ in range(rng.randint(1, 3))], waits)
    for _ in range(50):
        for at, student in enumerate(world.students):
            if student is not None and student.unanswered < 12 and rng.random() < 0.3:
                world.apply(
                    at,
                    student.ask(
                        rng.randint(1, 4), rng.choice((b"f", b"g")), rng.randbytes(rng.randint(1, 60)), world.now
                    ),
                )
        drawn, address = rng.random(), rng.choice(world.addresses)
        if drawn < 0.05:
            world.kill(address)
        elif drawn < 0.15 and world.teachers[address] is None:
            world.start(address)
        elif drawn < 0.20:
            world.cut(rng.randrange(len(world.students)), address)
        elif drawn < 0.22 and len(world.students) < 5:
            world.kill_student(rng.randrange(len(world.students)))
            world.add()
        world.turn(rng.choice((20, 20, 100, 500)) * MS)
    for address in world.addresses:
        if world.teachers[address] is None:
            world.start(address)
    world.settle()
    for _ in range(3):
        world.turn(NS)
    assert not any(found.queued_bytes for found in world.teachers.values() if found is not None)
    assert not (waits and world.missed), "in wait mode each request is answered once a teacher is there"
    return world


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_each_request_ends_once_whatever_is_killed(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "QUEUE_BYTES_MAX", 300)  # requests are dropped too
    worlds = [shaken(seed) for seed in range(first, first + 30)]
    assert sum(world.answers for world in worlds) > 300 and sum(world.missed for world in worlds) > 5
    assert QUEUE_BYTES_MAX > 300


def test_two_teachers_share_by_their_speed() -> None:
    world = World(1, 1, [10 * MS, 40 * MS], waits=True, credit=CREDIT)
    student = world.students[0]
    assert student is not None
    for _ in range(1500):
        while student.unanswered < 32:
            world.apply(0, student.ask(1, b"f", b"x", world.now))
        world.turn(5 * MS)
    fast, slow = (world.answered_by[address] for address in world.addresses)
    assert 3 < fast / slow < 5.5, f"{fast} and {slow}"
    assert fast + slow > 0.9 * 7.5 * (100 + 25), "and both are busy"


def test_a_world_goes_on_after_a_restart() -> None:
    world = World(3, 2, [5 * MS], waits=True)
    for at in (0, 1):
        student = world.students[at]
        assert student is not None
        for _ in range(10):
            world.apply(at, student.ask(1, b"f", b"x", world.now))
    for _ in range(5):
        world.turn()
    world.kill(world.addresses[0])
    for _ in range(300):
        world.turn(100 * MS)
    assert sum(map(len, world.ended)) < 20
    world.start(world.addresses[0])
    world.settle()
    assert world.answers == 20 and not world.missed


def keeps(self: Teacher, seat: Any, number: int) -> None:
    seat.open.pop(number)


def answers_twice(self: Student, link: TeacherLink, answer: m.TeacherAnswer, now_ns: int) -> list[Any]:
    return [AnswerArrived(answer.number, answer)]


def forgets(self: Student, link: TeacherLink) -> None:
    link.open.clear()


def takes_all(self: TeacherLink, request: Any) -> bool:
    return self.there


PLANTED: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "bytes of an answered request are not given back": (Teacher, "_close", keeps),
    "an answer does not end its request": (Student, "_answered", answers_twice),
    "requests of a lost teacher are forgotten": (Student, "_take_back", forgets),
    "the credit is not looked at": (TeacherLink, "takes", takes_all),
    "a dropped request is not sent again": (Student, "_heard", lambda self, link, beat, now_ns: []),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "QUEUE_BYTES_MAX", 300)
    owner, name, by = PLANTED[bug]
    monkeypatch.setattr(owner, name, by)
    with pytest.raises((AssertionError, RemoteProtocolError)):
        [shaken(seed) for seed in range(60)]
