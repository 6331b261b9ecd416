"""The runner of a `Teacher` over `Sockets`.

How it works

    thread of the model                 thread of the sockets                     students
    next_requests  <──── queue ────  Teacher.receive  <── TeacherRequest ── Sockets
    answered, failed ── command ──>  Teacher.answered ── TeacherAnswer ───> Sockets

Rules
- With keys a peer needs a key of the folder; a key that is taken off the list is refused at its next message.
- A peer that is refused REFUSED_MAX times in a row is hung up on (connections.py). One that has no seat counts as refused,
  whatever it sends.
- The console gets a line about students every NEWS_NS at most.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

from narrows.protocols.distillation.limits import CREDIT, REQUEST_BYTES_MAX
from narrows.protocols.distillation.teacher import Effect, QueuedRequest, Teacher
from narrows.protocols.effects import NS, Log, Send
from narrows.protocols.errors import AuthenticationError, IncompatibleError, NarrowsError, RemoteProtocolError
from narrows.protocols.messages import Buffer, Message, Refuse
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.connections import STRANGER_BYTES_MAX, Connections
from narrows.protocols.runtime.network.curve_auth import CurveKeys, DiallerId, HandshakeFailure
from narrows.protocols.runtime.network.key_files import AdmittedKeys
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import Drops, Peer, Sockets
from narrows.protocols.wire import decode, encode

NEWS_NS = NS  # between two lines about students that come and go
CLOSE_S = 10.0  # the thread ends within a tick, and its sockets within LINGER_MS


class TeacherRunner:
    """A teacher that listens to its students.

    Args:
        bind: tcp://host:port; port 0 takes any free port.
        samples: of the teacher's own dataset; 0: it has none.
        check: raises ValueError for a coding that this teacher does not know.
        say: gets sentences for the user.
        note: gets an event and its fields for the record: a student has come or is gone.
        keys: folder that ps-serve keys init made; "": nothing is encrypted.
        credit: requests that a student may have open.

    Raises:
        UsageError: the address is taken, or the folder has no keys.
    """

    def __init__(
        self,
        bind: str,
        samples: int,
        check: Callable[[str], object],
        say: Callable[[str], None],
        keys: str = "",
        credit: int = CREDIT,
        note: Callable[..., None] = lambda event, **values: None,
    ) -> None:
        self.guard = AdmittedKeys(keys) if keys else None
        self.bytes_up = self.bytes_down = self.students = 0
        self.refused = 0  # messages and connections that were refused
        self._news, self._news_ns = "", 0  # a line about students that is not said yet, and the time of the newest one
        self.clock = AwakeClock()
        self._say, self._note, self._drops = say, note, Drops(say)
        self._teacher = Teacher(secrets.randbits(62), samples, check, self.clock.now(), credit)
        self._given = 0  # answers that the thread of the sockets has not sent
        self._changed = threading.Condition()  # guards `_teacher`, `_given` and `_error`
        self._error: BaseException | None = None
        self._connections = Connections()
        self._connections.allow(STRANGER_BYTES_MAX + REQUEST_BYTES_MAX)  # after a reconnect a request follows the hello
        curve = None
        if self.guard is not None:
            guard = self.guard
            curve = CurveKeys(guard.own.pair, lambda address: None, lambda public: guard.who(public) is not None)
        self._sockets = Sockets(
            curve=curve,
            failed=self._shut_out,
            cut=self._gone,
            connections=self._connections,
            faulted=self._drops.refuse,
            bytes_max=REQUEST_BYTES_MAX,
        )
        self._loop = Loop(self._sockets, self._hear, self._tick)
        try:
            self.port = self._sockets.listen(bind)
        except BaseException:
            self._sockets.close()
            raise
        self._thread = threading.Thread(target=self._main, name="narrows-teacher", daemon=True)
        self._thread.start()

    # The thread of the model.

    def next_requests(self, samples: int, limit_s: float) -> list[QueuedRequest]:
        """Wait for requests. Returns none after `limit_s`.

        Args:
            samples: of all requests together, at most; the first one comes whatever its size.
            limit_s: of the wait.

        Raises:
            NarrowsError: the error that ended the thread of the sockets.
        """
        with self._changed:
            # First the answers that were given: who has not read them gets no more (protocols/distillation/teacher.py).
            self._changed.wait_for(
                lambda: (self._teacher.waiting and not self._given) or self._error is not None, limit_s
            )
            if self._error is not None:
                raise self._error
            return [] if self._given else self._teacher.next_requests(samples)

    def answered(self, request: QueuedRequest, classes: int, positions: tuple[int, ...], payload: Buffer) -> None:
        """Send the answer of a request. The payload is lent."""
        self._give(lambda: self._teacher.answered(request, classes, positions, payload))

    def failed(self, request: QueuedRequest, text: str) -> None:
        """Tell a student in one sentence why its request has no answer."""
        self._give(lambda: self._teacher.failed(request, text))

    def _give(self, command: Callable[[], Sequence[Effect]]) -> None:
        def given() -> None:
            with self._changed:  # one step for the thread of the model: the lock is taken twice
                self._given -= 1
                self._with(command)

        with self._changed:
            self._given += 1
        self._loop.call(given)

    def close(self) -> None:
        """Tell the students that this teacher ends, and end the thread."""
        self._loop.call(lambda: self._with(self._teacher.leave))
        self._loop.stop()
        self._thread.join(CLOSE_S)

    # The thread of the sockets.

    def _main(self) -> None:
        try:
            self._loop.run(self.clock.turn)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._sockets.close()

    def _with(self, command: Callable[[], Sequence[Effect]]) -> None:
        """Run a command of the machine, and carry out what it returns."""
        with self._changed:
            effects = command()
            self.students = len(self._teacher.seats)
            if self._teacher.waiting:
                self._changed.notify_all()
        for effect in effects:
            match effect:
                case Send(peer, message) if isinstance(peer, bytes):
                    self._send(peer, message)
                case Log(name, values):
                    self._note(name, **values)
                    self._news = f"a student {values.get('left', 'is there')}; students: {values['students']}"
                    self._tell(self.clock.now())

    def _tell(self, now_ns: int) -> None:
        """Say the newest about students, unless a line was said just before."""
        if self._news and now_ns - self._news_ns >= NEWS_NS:
            self._say(self._news)
            self._news, self._news_ns = "", now_ns

    def _send(self, peer: bytes, message: Message) -> None:
        frames = encode(message)
        self.bytes_up += sum(map(len, frames))
        self._drops.note(type(message).__name__, self._sockets.send(peer, frames))

    def _tick(self, now_ns: int) -> None:
        self._with(lambda: self._teacher.tick(now_ns))
        self._tell(now_ns)

    def _hear(self, peer: Peer, frames: list[Buffer]) -> None:
        assert isinstance(peer, bytes)
        self.bytes_down += sum(map(len, frames))
        try:
            message = decode(frames)
            if self.guard is not None and (not isinstance(peer, DiallerId) or self.guard.who(peer.key) is None):
                self._gone(peer)
                raise AuthenticationError("a student's key was taken off the list of this teacher")
            seated = peer in self._teacher.seats  # only this thread changes them
            self._with(lambda: self._teacher.receive(peer, message, self.clock.now()))
            seated = seated or peer in self._teacher.seats
        except NarrowsError as error:
            self.refused += 1
            self._connections.refused(peer)
            self._drops.refuse(f"a message was refused: {error}")
            if isinstance(error, (AuthenticationError, IncompatibleError)) and not isinstance(
                error, RemoteProtocolError
            ):
                self._send(peer, Refuse(error.exit_code, -1, 0, str(error)))
        else:
            self.refused += not seated
            (self._connections.let_in if seated else self._connections.refused)(peer)

    def _gone(self, peer: Peer) -> None:
        assert isinstance(peer, bytes)
        self._with(lambda: self._teacher.gone(peer))

    def _shut_out(self, address: str, why: HandshakeFailure, public: str) -> None:
        self.refused += 1
        if self.guard is None and why is not HandshakeFailure.KEYLESS:
            return
        what = (
            "with a key that is not on the list"
            if why is HandshakeFailure.REFUSED
            else "without the keys of this teacher"
        )
        self._drops.refuse(
            f"a connection {what if self.guard else 'with a key, where this teacher has none,'} was refused"
        )
