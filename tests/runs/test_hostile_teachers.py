"""Forged answers, answers for samples nobody asked, floods: refused and bounded, at a student and at a teacher."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq
from kit.processes import until
from kit.teaching import CLASSES, CODING, INPUTS, asking, inputs, linear, taught, top

from narrows.compression.logits import parse_logits
from narrows.protocols import messages as m
from narrows.protocols.distillation import limits, teacher
from narrows.protocols.errors import AuthenticationError, IncompatibleError
from narrows.protocols.messages.base import RefuseCode
from narrows.protocols.runtime.network import connections, key_files
from narrows.protocols.wire import decode, encode, pack
from narrows.worker.distillation.batches import samples_of

LIMIT_S = 30.0
LIFE = 5
Answering = Callable[[m.TeacherRequest, m.TeacherAnswer], Sequence[Any]]


def true(request: m.TeacherRequest, answer: m.TeacherAnswer) -> Sequence[Any]:
    return [answer]


class Liar:
    """A teacher by hand: it welcomes, and answers a request with what `answers` makes of the true answer."""

    def __init__(
        self, net: torch.nn.Module, answers: Answering, welcomes: Callable[[m.TeacherWelcome], Any] = lambda w: w
    ) -> None:
        self.net, self.answers, self.welcomes = net, answers, welcomes
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.student, self.ends = 0, threading.Event()
        self.hellos = self.requests = 0
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.thread.start()

    def _main(self) -> None:
        beaten = 0.0
        peer = b""
        while not self.ends.is_set():
            if peer and self.student and time.monotonic() - beaten > 1:
                beaten = time.monotonic()
                self.send(peer, m.TeacherBeat(self.student, LIFE, -1, (), False))
            if not self.socket.poll(20):
                continue
            peer, *frames = self.socket.recv_multipart()
            message = decode(frames)
            if isinstance(message, m.TeacherHello):
                self.hellos += 1
                self.student = message.student
                self.send(peer, self.welcomes(m.TeacherWelcome(self.student, LIFE, 8, 0)))
            if isinstance(message, m.TeacherRequest):
                self.requests += 1
                for each in self.answers(message, self.true(message)):
                    self.send(peer, each)

    def true(self, request: m.TeacherRequest) -> m.TeacherAnswer:
        x = torch.frombuffer(bytearray(request.payload), dtype=torch.float32).reshape(request.samples, INPUTS)
        coding = parse_logits(CODING)
        values, ids = top(self.net(x), coding.top)
        payload = coding.pack(coding.encode(values.astype(np.float32), ids, CLASSES), CLASSES)
        return m.TeacherAnswer(self.student, LIFE, request.number, CLASSES, (), "", payload)

    def send(self, peer: bytes, message: Any) -> None:
        self.socket.send_multipart(
            [peer, *(encode(message) if isinstance(message, m.Message) else message)], zmq.NOBLOCK
        )

    def close(self) -> None:
        self.ends.set()
        self.thread.join(10)
        self.context.destroy(0)


@contextmanager
def lying(answers: Answering, net: torch.nn.Module | None = None, **values: Any) -> Iterator[Liar]:
    made = Liar(net or linear(), answers, **values)
    try:
        yield made
    finally:
        made.close()


def resident() -> int:
    """The bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def right(soft: Any, logits: torch.Tensor) -> bool:
    return soft is not None and (soft.ids.numpy() == top(logits, 4)[1]).all()


# Before the true answer comes another message, and once more after it: training does not see it.
EXTRA: dict[str, Callable[[m.TeacherRequest, m.TeacherAnswer], Any]] = {
    "one that nobody asked for": lambda request, answer: replace(answer, number=request.number + 1000),
    "of a negative number": lambda request, answer: replace(answer, number=-1),
    "of another life": lambda request, answer: replace(answer, teacher=LIFE + 1),
    "for another student": lambda request, answer: replace(answer, student=answer.student ^ 1),
    "a request": lambda request, answer: request,
    "a hello": lambda request, answer: m.TeacherHello(answer.student, CODING, 1.0),
    "a message of a run": lambda request, answer: m.Pull(1, 1, 1, 1),
    "a beat of another life": lambda request, answer: m.TeacherBeat(answer.student, LIFE + 1, 0, (), True),
    "a welcome of another life": lambda request, answer: m.TeacherWelcome(answer.student, LIFE + 1, 1, 0),
    "the welcome again": lambda request, answer: m.TeacherWelcome(answer.student, LIFE, 1, 0),
    "no frames of ours": lambda request, answer: [b"GET / HTTP/1.1"],
    "an empty frame": lambda request, answer: [b""],
    "too many frames": lambda request, answer: [b"x"] * 5,
    "a broken header": lambda request, answer: [encode(answer)[0][:-3], b"x"],
    "a kind that is not there": lambda request, answer: [bytes(encode(answer)[0][:5]) + b"\x91\x7f"],
}


@pytest.mark.parametrize("extra", EXTRA)
def test_a_student_takes_what_it_has_asked_for_and_nothing_else(extra: str) -> None:
    net, said = linear(), list[str]()

    def answers(request: m.TeacherRequest, answer: m.TeacherAnswer) -> Sequence[Any]:
        more = EXTRA[extra](request, answer)
        return [more, more, answer, more]

    with lying(answers, net) as liar, asking(liar.address, said=said, waits=False) as teachers:
        for seed in range(5):
            x = inputs(3, seed)
            assert right(teachers.ask(x).take(LIMIT_S), net(x))
        assert not teachers.runner._came and len(teachers.cache._answers) == 15
        assert len([text for text in said if "refused" in text]) <= 3, said


def test_an_answer_twice_counts_once() -> None:
    net = linear()
    with lying(lambda request, answer: [answer] * 3, net) as liar, asking(liar.address) as teachers:
        for seed in range(40):
            x = inputs(3, seed)
            assert right(teachers.ask(x).take(LIMIT_S), net(x))
        runner = teachers.runner
        assert not runner._open and not runner._came and not runner._open_bytes and not runner._came_bytes


WRONG: dict[str, Callable[[m.TeacherAnswer], m.TeacherAnswer]] = {
    "classes 0": lambda a: replace(a, classes=0),
    "classes -1": lambda a: replace(a, classes=-1),
    "one class more": lambda a: replace(a, classes=CLASSES + 1),
    "few classes": lambda a: replace(a, classes=1),
    "classes without end": lambda a: replace(a, classes=(1 << 63) - 1),
    "positions": lambda a: replace(a, positions=(2,)),
    "positions 0": lambda a: replace(a, positions=(0,)),
    "positions -1": lambda a: replace(a, positions=(-1,), payload=bytes(a.payload)[:16]),
    "positions without end": lambda a: replace(a, positions=((1 << 63) - 1,) * 8),
    "the product of positions is 2**64": lambda a: replace(a, positions=(1 << 32, 1 << 32)),
    "too many dimensions": lambda a: replace(a, positions=(1,) * 100_000),
    "no payload": lambda a: replace(a, payload=b""),
    "a short payload": lambda a: replace(a, payload=bytes(a.payload)[:-1]),
    "a long payload": lambda a: replace(a, payload=bytes(a.payload) + b"x"),
    "NaN": lambda a: replace(a, payload=bytes(a.payload)[:-40] + b"\xff" * 40),
    "zeros": lambda a: replace(a, payload=bytes(len(a.payload))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_answer_excludes_its_teacher(wrong: str) -> None:
    """Another answers in its place; alone, training goes on without, or ends with a sentence."""
    net, said = linear(), list[str]()
    with lying(lambda request, answer: [WRONG[wrong](answer)], net) as liar, taught(net) as honest:
        with asking(liar.address, honest.address, said=said) as teachers:
            until(lambda: all(link.there for link in teachers.runner._student.links.values()), "both teachers")
            for seed in range(3):
                asked = [teachers.ask(inputs(3, 100 * seed + each)) for each in range(4)]
                assert all(right(each.take(LIMIT_S), net(inputs(3, 100 * seed + at))) for at, each in enumerate(asked))
            assert any("asked no more" in text for text in said), said
        with asking(liar.address, waits=False) as teachers:
            until(lambda: teachers.runner._student.met, "the liar's welcome")
            assert teachers.ask(inputs()).take(LIMIT_S) is None and not teachers.cache._answers
        with asking(liar.address) as teachers, pytest.raises(IncompatibleError, match="not valid"):
            teachers.ask(inputs()).take(LIMIT_S)


def test_a_text_of_a_teacher_is_one_line() -> None:
    with (
        lying(lambda request, answer: [replace(answer, classes=0, payload=b"", text="it cannot")]) as liar,
        asking(liar.address) as teachers,
        pytest.raises(IncompatibleError, match="it cannot"),
    ):
        teachers.ask(inputs()).take(LIMIT_S)
    with pytest.raises(Exception, match="text"):
        m.TeacherAnswer(1, 1, 1, 0, (), "\x1b[2J", b"")


def test_a_flood_of_answers_is_hung_up_on() -> None:
    """2 GB that nobody asked for: memory stays, the liar is named, and the honest teacher goes on."""
    net, said = linear(), list[str]()
    junk = bytes(4 << 20)

    def flood(request: m.TeacherRequest, answer: m.TeacherAnswer) -> Iterator[Any]:
        for number in range(500):
            yield replace(answer, number=number % 7 + 100_000, payload=junk)

    with lying(flood, net) as liar, taught(net) as honest:  # type: ignore[arg-type]
        liar.socket.setsockopt(zmq.SNDHWM, 0)
        with asking(liar.address, honest.address, said=said) as teachers:
            until(lambda: all(link.there for link in teachers.runner._student.links.values()), "both teachers")
            began = resident()
            asked = [teachers.ask(inputs(2, seed)) for seed in range(6)]
            most = 0

            def named() -> bool:
                nonlocal most
                most = max(most, resident() - began)
                return any("nobody asked for" in text for text in said)

            until(named, "the flooder")
            assert all(right(each.take(LIMIT_S), net(inputs(2, seed))) for seed, each in enumerate(asked))
            assert teachers.runner.refused >= limits.STRIKES_MAX - 64
            hellos = liar.hellos
            for seed in range(20):
                assert right(teachers.ask(inputs(2, 50 + seed)).take(LIMIT_S), net(inputs(2, 50 + seed)))
            assert liar.hellos == hellos, "it is not greeted again"
            assert most < 2_000 << 20


def test_who_has_a_wire_of_another_version() -> None:
    def other(welcome: m.TeacherWelcome) -> Any:
        header = bytearray(encode(welcome)[0])
        header[4] += 1
        return [bytes(header)]

    with (
        lying(true, welcomes=other) as liar,
        asking(liar.address) as teachers,
        pytest.raises(IncompatibleError, match="protocol version"),
    ):
        teachers.ask(inputs()).take(LIMIT_S)


# Against a teacher.


class Attacker:
    """A student by hand."""

    def __init__(self, port: int) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self.socket.setsockopt(option, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, *messages: Any) -> None:
        for each in messages:
            self.socket.send_multipart(encode(each) if isinstance(each, m.Message) else each)

    def next(self, kind: type[Any], limit_s: float = LIMIT_S) -> Any:
        """The next message of this kind."""
        deadline = time.monotonic() + limit_s
        while self.socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            found = decode(self.socket.recv_multipart())
            if isinstance(found, kind):
                return found
        raise AssertionError(f"no {kind.__name__} came")


@contextmanager
def attacking(port: int, count: int = 1) -> Iterator[Any]:
    made = [Attacker(port) for _ in range(count)]
    try:
        yield made[0] if count == 1 else made
    finally:
        for each in made:
            each.context.destroy(0)


HELLO = m.TeacherHello(9, CODING, 1.0)


def asked(x: torch.Tensor, number: int = 0, **values: Any) -> m.TeacherRequest:
    of = samples_of(x)
    whole: dict[str, Any] = {"samples": len(of), "fields": of.packed_fields, "payload": of.payload(np.arange(len(of)))}
    return m.TeacherRequest(student=9, number=number, **(whole | values))


def serves(teaching: Any, seed: int = 77) -> None:
    """An honest student is still answered."""
    x = inputs(3, seed)
    with asking(teaching.address) as teachers:
        assert right(teachers.ask(x).take(LIMIT_S), teaching.answering.model(x))


def test_without_a_hello_nobody_is_heard_for_long() -> None:
    with taught(linear()) as teaching, attacking(teaching.port) as attacker:
        attacker.send(asked(inputs()))
        assert attacker.next(m.Refuse).code == RefuseCode.NOT_A_MEMBER
        attacker.send(*[asked(inputs(), number=number) for number in range(connections.REFUSED_MAX)])
        ended = teaching.runner._connections.ended
        until(lambda: ended["too many messages that were refused"], "the end of the connection")
        with attacking(teaching.port) as other:
            other.send(*[asked(inputs(), payload=bytes(1 << 20), number=number) for number in range(60)])
            until(lambda: sum(ended.values()) == 2, "the end of that of one who sends much")
        assert not teaching.runner._teacher.queued_bytes and teaching.runner.refused >= connections.REFUSED_MAX
        serves(teaching)


FIELDS: dict[str, Any] = {
    "no fields": b"",
    "no msgpack": b"\xc1",
    "not a list": pack({}),
    "no row": pack([[]]),
    "a name that is code": pack([["a b()", "float32", "float32", [INPUTS]]]),
    "a long name": pack([["x" * 65, "float32", "float32", [INPUTS]]]),
    "dtype object": pack([["", "object", "object", [INPUTS]]]),
    "dtype of a string": pack([["", "S4", "float32", [INPUTS]]]),
    "a pair that loses": pack([["", "float64", "int8", [INPUTS]]]),
    "a pair that wraps": pack([["", "int64", "uint8", [INPUTS]]]),
    "a negative shape": pack([["", "float32", "float32", [-INPUTS, -1]]]),
    "a shape with 0": pack([["", "float32", "float32", [0, 1 << 31, 1 << 31, 1 << 31]]]),
    "a shape whose product is 2**64": pack([["", "float32", "float32", [1 << 31, 1 << 31, 4]]]),
    "a shape of floats": pack([["", "float32", "float32", [6.0]]]),
    "a shape of bools": pack([["", "float32", "float32", [True]]]),
    "many dimensions": pack([["", "float32", "float32", [1] * 9]]),
    "many tensors": pack([[f"a{each}", "float32", "float32", [1]] for each in range(17)]),
    "one name twice": pack([["a", "float32", "float32", [3]], ["a", "float32", "float32", [3]]]),
    "short": pack([["", "float32", "float32", [INPUTS + 1]]]),
    "long": pack([["", "float32", "float32", [INPUTS - 1]]]),
    "a keyword that the model lacks": pack([["other", "float32", "float32", [INPUTS]]]),
    "bools of 3": pack([["", "bool", "bool", [4 * INPUTS]]]),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_lie_end_with_a_sentence(name: str) -> None:
    with taught(linear()) as teaching, attacking(teaching.port) as attacker:
        attacker.send(HELLO, asked(inputs(), fields=FIELDS[name]))
        answer = attacker.next(m.TeacherAnswer)
        assert answer.text and not answer.classes and not answer.payload
        attacker.send(asked(inputs(), number=1))
        assert not attacker.next(m.TeacherAnswer).text, "the same connection goes on"


def test_ids_beyond_a_table_and_indices_beyond_a_dataset() -> None:
    table = torch.nn.Embedding(10, 5)
    with taught(table, dataset=[torch.tensor([1])] * 4) as teaching, attacking(teaching.port) as attacker:
        attacker.send(HELLO)
        for number, wrong in enumerate([[10], [-1], [1 << 60], [-(1 << 63)]]):
            attacker.send(asked(torch.tensor([wrong]), number=number))
            assert "10 rows" in attacker.next(m.TeacherAnswer).text
            indices = np.array(wrong, np.int64).tobytes()
            attacker.send(asked(torch.zeros(1, 1), number=number, fields=pack([]), payload=indices))
            assert "4 samples" in attacker.next(m.TeacherAnswer).text
        attacker.send(asked(torch.zeros(1, 1), number=50, fields=pack([]), payload=b"123"))
        assert "8 bytes" in attacker.next(m.TeacherAnswer).text


def test_more_than_the_credit_and_too_much() -> None:
    with taught(linear(), turns=False) as teaching, attacking(teaching.port) as attacker:
        attacker.send(HELLO, *[asked(inputs(), number=number) for number in range(limits.CREDIT + 9)])
        until(lambda: teaching.runner.refused == 9, "refusals")
        assert teaching.runner._teacher.waiting == limits.CREDIT
        attacker.send(asked(inputs(), payload=bytes(limits.REQUEST_BYTES_MAX + 1)))
        until(lambda: not teaching.runner._teacher.seats, "the end of the connection: such a frame is not read")
        assert not teaching.runner._teacher.queued_bytes
        teaching.thread.start()
        serves(teaching)


def test_many_students_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "STUDENTS_MAX", 8)
    with taught(linear()) as teaching:
        with attacking(teaching.port, 20) as attackers:
            for number, each in enumerate(attackers):
                each.send(m.TeacherHello(number, CODING, 1.0))
            found = [each.next((m.TeacherWelcome, m.Refuse)) for each in attackers]
            assert sum(isinstance(each, m.TeacherWelcome) for each in found) == 8
            admitted = attackers[[isinstance(each, m.TeacherWelcome) for each in found].index(True)]
            for number in range(500):  # a new student on each hello
                admitted.send(m.TeacherHello(1000 + number, CODING, 1.0))
            until(lambda: isinstance(admitted.next(m.TeacherWelcome), m.TeacherWelcome), "a welcome")
        until(lambda: not teaching.runner._teacher.seats, "the ends of the connections")
        assert len(teaching.said) < 20, "the console is not flooded"
        serves(teaching)


def test_who_reads_no_answers_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 480 KB to requests of 96 bytes: unread ones are bounded, and honest students go on."""
    monkeypatch.setattr(teacher, "UNREAD_BYTES_MAX", 8 << 20)

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), 10_000, 10) if x.shape[1] == 1 else net(x)

    net = linear()
    with taught(model, cache_bytes=0) as teaching, attacking(teaching.port) as attacker:
        attacker.send(HELLO)
        attacker.next(m.TeacherWelcome)
        began = resident()
        for number in range(limits.CREDIT):
            attacker.send(asked(torch.full((4, 1), float(number)), number=number))
        machine = teaching.runner._teacher

        def stands() -> bool:
            """All have come, and the model has none of those without an answer."""
            (seat,) = machine.seats.values()
            return len(seat.open) + len(seat.unread) == limits.CREDIT and len(seat.queue) == len(seat.open)

        until(stands, "answers that nobody reads")
        assert machine.queued_bytes and not machine.waiting, "more are asked for"
        sent, x = teaching.runner.bytes_up, inputs()
        assert 3 << 20 < machine.unread_bytes < 12 << 20
        with asking(teaching.address) as teachers:
            assert right(teachers.ask(x).take(LIMIT_S), net(x))
        assert teaching.runner.bytes_up - sent < 1 << 20 and resident() - began < 300 << 20


def test_no_student_puts_an_answer_under_the_inputs_of_another() -> None:
    """Whatever numbers, samples and fields it names: the teacher makes the digest of what its model gets."""
    net, x = linear(), inputs(4)
    with taught(net) as teaching, attacking(teaching.port) as attacker:
        attacker.send(HELLO)
        for number, given in enumerate([x.double(), x + 1, x.half(), x.reshape(2, 12), x.flip(1)]):
            attacker.send(asked(given, number=number))
            attacker.next(m.TeacherAnswer)
        attacker.send(m.TeacherAnswer(9, teaching.runner._teacher.life, 0, CLASSES, (), "", b"x" * 90))
        with asking(teaching.address) as teachers:
            assert right(teachers.ask(x).take(LIMIT_S), net(x))
        assert teaching.answering.cache.hits == 0


def test_keys(tmp_path: Path) -> None:
    """No key, a wrong key, a revoked key: each is refused with a sentence."""
    folder, others = tmp_path / "keys", tmp_path / "others"
    for each in (folder, others):
        key_files.make(str(each))
    mine, wrong = (
        key_files.member_key(str(key_files.add(str(each), "city", "worker")), "--teacher-key")
        for each in (folder, others)
    )
    net, x, said = linear(), inputs(), list[str]()
    wrong = replace(wrong, server=mine.server)
    with taught(net, keys=str(folder)) as teaching:
        for keys in (None, wrong):
            with (
                asking(teaching.address, keys=keys, waits=False) as teachers,
                pytest.raises(AuthenticationError, match="key"),
            ):
                teachers.ask(x).take(LIMIT_S)
        assert not teaching.runner._teacher.seats
        with asking(teaching.address, keys=mine, said=said, waits=False) as teachers:
            assert right(teachers.ask(x).take(LIMIT_S), net(x))
            key_files.revoke(str(folder), "city")
            until(lambda: not teaching.runner._teacher.seats, "the end of the seat")
            until(lambda: any("key" in text for text in said), "a sentence")
            assert teachers.ask(inputs(3, 8)).take(LIMIT_S) is None, "go-on goes on"
