"""The runner of a `Student` over `Sockets`: the requests of one process to its teachers.

How it works

    script's thread              thread of the sockets                     teachers
    ask   ── command ──>  Student.ask     ── TeacherRequest ──> Sockets
    take  <── answer ──   Student.receive <── TeacherAnswer ─── Sockets

1. `ask` returns at once, unless AHEAD_MAX requests or ASKED_BYTES_MAX of them have no answer.
2. `take` waits for an answer. It returns None where the student goes on without one.
3. An error of the machine is kept. The next call of the script's thread raises it.

Rules
- A process that is forked from this one has the object without its thread, and perhaps with a lock that nobody opens. So
  each method looks at the pid before it takes the lock.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.distillation.limits import (
    AHEAD_MAX,
    ANSWER_BYTES_MAX,
    ASKED_BYTES_MAX,
    REQUEST_BYTES_MAX,
    UNTAKEN_BYTES_MAX,
)
from narrows.protocols.distillation.student import (
    AnswerArrived,
    AnswerMissed,
    Effect,
    HangUp,
    Student,
    TeacherChanged,
)
from narrows.protocols.effects import NS, MemberFailed, SendToPeer
from narrows.protocols.errors import (
    BY_EXIT_CODE,
    AuthenticationError,
    NarrowsError,
    RemoteProtocolError,
    ServerLostError,
    UsageError,
)
from narrows.protocols.messages import Buffer, TeacherAnswer
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.curve_auth import CurveKeys, HandshakeFailure
from narrows.protocols.runtime.network.key_files import SecretKeyFile, refusal
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import Drops, Peer, Sockets
from narrows.protocols.wire import decode, encode
from narrows.worker.runtime.child_process import NotAWorkerError
from narrows.worker.runtime.teacher_meter import TeacherMeter

CLOSE_S = 10.0  # the thread ends within a tick, and its sockets within LINGER_MS


class StudentRunner:
    """The connections of one student to its teachers.

    Args:
        keys: of each teacher, by address; None: that teacher has none.
        coding: of the answers.
        temperature: of the answers.
        check: raises ValueError if the payload of an answer to so many samples is not valid.
        waits: requests wait for a teacher while none is there; False: they end without an answer.
        start_s: time for a first teacher to answer.
        say: gets sentences for the user.
        meter: gets the bytes of all messages.
    """

    def __init__(
        self,
        keys: Mapping[str, SecretKeyFile | None],
        coding: str,
        temperature: float,
        check: Callable[[TeacherAnswer, int], object],
        waits: bool,
        start_s: float,
        say: Callable[[str], None],
        meter: TeacherMeter,
    ) -> None:
        self.keys, self._say, self._drops, self._meter = keys, say, Drops(say), meter
        self.refused = 0  # messages of teachers that were refused
        self.clock = AwakeClock()
        self._student = Student(
            [*keys], secrets.randbits(62), coding, temperature, check, waits, int(start_s * NS), self.clock.now()
        )
        self._came: dict[int, TeacherAnswer | None] = {}  # by number: answers that the script has not taken
        self._unwanted = set[int]()  # numbers of requests whose answers nobody takes
        self._asked = 0  # requests
        self._open = dict[int, int]()  # by number: payload bytes of requests without an answer
        self._open_bytes = self._came_bytes = 0  # of `_open`, and of the answers in `_came`
        self._changed = threading.Condition()  # guards `_came`, `_open`, their bytes, and `_error`
        self._pid = os.getpid()
        self._error: BaseException | None = None
        pairs = {address: (key.pair, key.server) for address, key in keys.items() if key is not None}
        self._sockets = Sockets(
            curve=CurveKeys(None, pairs.get, lambda public: False) if pairs else None,
            failed=self._shut_out,
            linked=self._linked,
            cut=self._cut,
            faulted=self._drops.refuse,
            bytes_max=max(ANSWER_BYTES_MAX, REQUEST_BYTES_MAX),
        )
        self._loop = Loop(self._sockets, self._hear, self._tick)
        self._thread = threading.Thread(target=self._main, name="narrows-student", daemon=True)
        self._thread.start()

    # The script's thread.

    def ask(self, samples: int, fields: bytes, payload: Buffer) -> int:
        """Send a request, and return its number.

        Args:
            samples: whose inputs the payload has.
            fields: what the payload holds, packed.
            payload: lent: must not change from now on.

        Raises:
            UsageError: the script takes no answers, or this process is forked from that of the script.
            NarrowsError: the error that ended the connections, or ServerLostError after WAIT_LIMIT_S.
        """
        if os.getpid() != self._pid:
            raise NotAWorkerError("teacher.ask()")
        size = len(payload)
        with self._changed:
            if self._came_bytes > UNTAKEN_BYTES_MAX:
                raise UsageError(
                    f"the script has not taken {self._came_bytes >> 20} MiB of answers that it has asked a teacher for: call "
                    "take() on what ask() returns, or drop it"
                )
            there = self._changed.wait_for(lambda: self._has_room(size) or self._error is not None, WAIT_LIMIT_S)
            if self._error is not None:
                raise self._error
            if not there:
                raise ServerLostError(f"no teacher answered within {WAIT_LIMIT_S:.0f} s")
            number = self._asked
            self._asked += 1
            self._open[number] = size
            self._open_bytes += size
            # With the lock: the machine counts requests too, and the script may have several threads.
            self._loop.call(lambda: self._apply(self._student.ask(samples, fields, payload, self.clock.now())))
            return number

    def _has_room(self, size: int) -> bool:
        return not self._open or (len(self._open) < AHEAD_MAX and self._open_bytes + size <= ASKED_BYTES_MAX)

    def ready(self, numbers: Sequence[int]) -> bool:
        """True if `take` would not wait for these requests."""
        return all(number in self._came for number in numbers) or self._error is not None

    def wait(self, numbers: Sequence[int], limit_s: float) -> bool:
        """Wait until these requests are answered, or end without an answer. Returns False after `limit_s`.

        Raises:
            NarrowsError: the error that ended the connections.
        """
        if os.getpid() != self._pid:
            raise NotAWorkerError("Asked.take()")
        with self._changed:
            there = self._changed.wait_for(lambda: self.ready(numbers), limit_s)
            if self._error is not None and not all(number in self._came for number in numbers):
                raise self._error
            return there

    def take(self, number: int) -> TeacherAnswer | None:
        """Take the answer of a request that `wait` has seen end; None: there is none."""
        with self._changed:
            return self._taken(number)

    def _taken(self, number: int) -> TeacherAnswer | None:
        answer = self._came.pop(number)
        self._came_bytes -= 0 if answer is None else len(answer.payload)
        return answer

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop the answers of requests that nobody takes, also those that come later. A finalizer calls this, in any thread."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            for number in numbers:
                if number in self._came:
                    self._taken(number)
                elif number in self._open:
                    self._unwanted.add(number)

    def close(self) -> None:
        """Tell the teachers that this student ends, and end the thread. Answers that are here can be taken later."""
        if os.getpid() != self._pid:
            return
        self._fail(UsageError("the connections to the teachers were closed: ask before that"))
        self._loop.call(lambda: self._apply(self._student.leave()))
        self._loop.stop()
        self._thread.join(CLOSE_S)

    # The thread of the sockets.

    def _main(self) -> None:
        try:
            self._loop.run(self.clock.turn)
        except BaseException as error:
            self._fail(error)
        finally:
            self._sockets.close()

    def _tick(self, now_ns: int) -> None:
        self._apply(self._student.tick(now_ns))

    def _hear(self, peer: Peer, frames: list[Buffer]) -> None:
        assert isinstance(peer, str)
        self._meter.received(sum(map(len, frames)))
        try:
            effects = self._student.receive(peer, decode(frames), self.clock.now())
        except RemoteProtocolError as error:
            self.refused += 1
            self._drops.refuse(f"a message of the teacher at {peer} was refused: {error}")
            self._apply(self._student.unasked(peer, self.clock.now()))
        except NarrowsError as error:  # such as another version of the protocol
            self._apply(self._student.refuses(peer, error.exit_code, str(error), self.clock.now()))
        else:
            self._apply(effects)

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendToPeer(address, message):
                    frames = encode(message)
                    self._meter.sent(sum(map(len, frames)))
                    self._drops.note(type(message).__name__, self._sockets.send(address, frames))
                case AnswerArrived(number, answer):
                    self._end(number, answer)
                case AnswerMissed(number):
                    self._end(number, None)
                case TeacherChanged(_, text):
                    self._say(text)
                case HangUp(address):
                    self._sockets.hang_up(address)
                case MemberFailed(code, text):
                    self._fail(BY_EXIT_CODE.get(code, NarrowsError)(text))

    def _end(self, number: int, answer: TeacherAnswer | None) -> None:
        with self._changed:
            self._open_bytes -= self._open.pop(number)
            self._came[number] = answer
            self._came_bytes += 0 if answer is None else len(answer.payload)
            if number in self._unwanted:  # looked up last: a finalizer may call `forget` between any two lines
                self._unwanted.remove(number)
                self._taken(number)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _linked(self, address: str) -> None:
        self._apply(self._student.linked(address, self.clock.now()))

    def _cut(self, peer: Peer) -> None:
        assert isinstance(peer, str)
        self._student.cut(peer, self.clock.now())

    def _shut_out(self, address: str, why: HandshakeFailure, public: str) -> None:
        key = self.keys[address]
        if text := refusal(why, key, "--teacher-key"):
            self._apply(self._student.refuses(address, AuthenticationError.exit_code, text, self.clock.now()))
