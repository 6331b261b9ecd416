"""Keys on the wire (CURVE): the keys of a socket, the keys that it admits, and the reasons of a failed handshake.

How it works
1. `listens` gives a listening socket the server's keys. `dials` gives a dialling socket its own keys, and the public
   key that the other end must have.
2. `CurveAuthenticator` runs a thread (ZAP). For each new connection it asks `CurveKeys.admits` about the public key.
3. `ListenerMonitor` runs a thread for a listening socket: it reports failed handshakes and ended connections, and ends
   strangers (connections.py).
4. `HandshakeMonitor` watches one dialled connection. Its owner polls it and asks `take` why a handshake has failed.

Rules
- A public key is written as 64 hex digits. Each end of a connection knows the other's key before any message passes.
- `admits` is asked once for each connection. The reader of the messages checks each sender again.
- A dialler learns why its handshake failed, as far as ZeroMQ tells: see `HandshakeMonitor`.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from narrows.protocols.addresses import by_proxy, parted
from narrows.protocols.runtime.network.connections import Connections
from narrows.protocols.runtime.network.socks_dialler import asked

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
EVENT = struct.Struct("=Hi")  # an event of a monitor: its kind, and a value
PROBE_S = 1.0  # limit of waiting for a greeting: it comes at once, or not at all
GREETING_BEGINS = b"\xff" + bytes(8) + b"\x7f\x03"  # ZMTP 3: signature and version
GREETING_BYTES, GREETING_NAMES = 64, slice(12, 32)  # how long it is, and where it has the name of the mechanism
LOOK_S = 0.25  # interval of checking how much strangers have sent
NOBODY = "0" * 64  # the key of nobody: who names none where there are keys is dialled in vain, and never in the open
STRANGE_MAX = (
    4  # handshakes that end without a reason with one who greets as we do, over so many seconds: once may be chance
)
STRANGE_S = 0.5
FAULTS_MAX = 1000  # library errors in a row, without a successful read between them: no single connection causes these
LIBRARY = (zmq.ZMQError, OSError, ValueError, struct.error)  # what pyzmq and the modules below it raise while they read


class LibraryFaults:
    """Counts the errors that libraries raise while one thread reads from its sockets.

    One error costs the message or the event that was being read. `tell` gets a sentence about the first error of each kind.
    `broken` is set once FAULTS_MAX of them came in a row.
    """

    def __init__(self, tell: Callable[[str], None] = lambda text: None) -> None:
        self.tell = tell
        self.counts: Counter[str] = Counter()
        self.broken: Exception | None = None
        self._row = 0

    def add(self, what: str, error: Exception) -> None:
        """Count `error`, which was raised while the thread read `what`."""
        known = isinstance(error, (zmq.ZMQError, OSError))  # other texts may hold what a stranger sent
        text = f"{what} could not be read ({error if known else type(error).__name__})"
        self.counts[text] += 1
        if self.counts[text] == 1:
            self.tell(text)
        self._row += 1
        if self._row >= FAULTS_MAX:
            self.broken = error

    def well(self) -> None:
        """Note a successful read: the row of errors ends."""
        self._row = 0


@dataclass(frozen=True)
class KeyPair:
    """A pair of CURVE keys, 32 bytes each, as 64 hex digits."""

    public: str
    secret: str


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def public_of(secret: str) -> str:
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


@dataclass(frozen=True)
class CurveKeys:
    """The keys of one process."""

    own: KeyPair | None  # of the listening socket; None: it listens without encryption
    dials: Callable[[str], tuple[KeyPair, str] | None]  # address -> own pair, public key there; None: no encryption
    admits: Callable[[str], bool]  # True if the owner of a public key may dial this process; any thread calls this


class DiallerId(bytes):
    """The routing id of a peer that has proved that it has the secret of the public key `key`."""

    key: str

    @staticmethod
    def of(frame: zmq.Frame) -> DiallerId:
        """Return the sender of a message by its first frame. Raises an error of LIBRARY if the frame names no key."""
        made = DiallerId(frame.bytes)
        made.key = z85.decode(str(frame.get("User-Id"))).hex()
        return made


class HandshakeFailure(Enum):
    """Why a handshake has failed."""

    REFUSED = "the key is not one of the accepted keys"
    KEYLESS = "one side has keys and the other has none"
    STRANGE = "the peer does not have the expected key"


class HandshakeMonitor:
    """Finds why handshakes of one dialling socket fail. The owner polls `monitor`, and calls `take` after each wake too.

    Args:
        watched: the socket.
        address: that it dials.
        wake: called by a thread once `take` may have a reason without a further event.
        clock: seconds.
    """

    def __init__(
        self,
        watched: zmq.Socket[bytes],
        address: str,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.watched, self.address, self.wake, self.clock = watched, address, wake, clock
        ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor: Any = watched.get_monitor_socket(FAILURES | ends)
        self._asking: threading.Thread | None = None  # asks for the greeting at the address, which may take PROBE_S
        self._greeted: deque[bytes] = deque(maxlen=1)  # its answer
        self.strange = 0  # handshakes that ended without a reason, with a peer that greets by the same mechanism
        self.since = 0.0  # time of the first of these
        self.met = False  # a handshake has succeeded: the peer has the key
        self.anew = False  # a further one has succeeded, since the last call of `changed`
        self.cut = False  # a connection has ended, since then
        self.refused = False  # a handshake has failed for good: no message will leave

    def take(self) -> list[HandshakeFailure]:
        """Return the reasons of the failures since the last call."""
        found = []
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            match event["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.met, self.anew = True, self.met
                case zmq.EVENT_DISCONNECTED:
                    self.cut |= self.met
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    found.append(HandshakeFailure.REFUSED)
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    found.append(_meant(event["value"]))
                case _ if not self.met and self._asking is None:
                    self._asking = threading.Thread(target=self._ask, daemon=True, name="ps-greeting")
                    self._asking.start()
        if self.answered:
            self._asking = None
            found += self._hung_up(self._greeted.popleft())
        self.refused |= bool(found)
        return found

    def changed(self) -> tuple[bool, bool]:
        """Return whether the connection was made anew, and whether one has ended, since the last call."""
        found, self.anew, self.cut = (self.anew, self.cut), False, False
        return found

    @property
    def answered(self) -> bool:
        """True if `take` has a greeting to judge."""
        return bool(self._greeted)

    def _ask(self) -> None:
        """Ask for the greeting. In a thread: a process that is being started has a port, and greets nobody yet."""
        self._greeted.append(mechanism(self.address))
        self.wake()

    def _hung_up(self, greeted: bytes) -> list[HandshakeFailure]:
        """Return the reason of a handshake that the peer ended without giving one; [] if it is not certain.

        If only one side has keys, either side may hang up before the other has read the reason: then the greeting tells.
        A tunnel hangs up while no process listens behind it: a tunnel does not greet.

        Args:
            greeted: the mechanism that the peer greets with; b"" if it does not greet, or if it came since.
        """
        if self.met:
            return []
        if greeted != self._own():
            return [HandshakeFailure.KEYLESS] if greeted else []
        self.strange += 1
        self.since = self.since if self.strange > 1 else self.clock()
        often = self.strange >= STRANGE_MAX and self.clock() - self.since >= STRANGE_S
        return [HandshakeFailure.STRANGE] if often else []

    def _own(self) -> bytes:
        return b"NULL" if self.watched.getsockopt(zmq.MECHANISM) == zmq.NULL else b"CURVE"

    def close(self) -> None:
        self.watched.disable_monitor()
        self.monitor.close()


def mechanism(address: str) -> bytes:
    """Return the handshake mechanism that the greeting at an address names; b"" if none comes within PROBE_S."""
    endpoint = parted(address)[0]
    with suppress(OSError, ValueError):
        if endpoint.startswith("ipc://@"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_S)
                probe.connect("\0" + endpoint.removeprefix("ipc://@"))
                return _greeted(probe)
        by = by_proxy(endpoint)
        host, _, port = (by[0] if by else endpoint.removeprefix("tcp://")).rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as probe:
            if by:
                asked(probe, by[1])  # else shard 0 would greet in the place of a dead shard
            return _greeted(probe)
    return b""


def _greeted(probe: socket.socket) -> bytes:
    """Return the mechanism in the other end's greeting. The other end sends all of it once it knows our version."""
    heard = b""
    probe.sendall(GREETING_BEGINS)
    while len(heard) < GREETING_BYTES and (piece := probe.recv(GREETING_BYTES - len(heard))):
        heard += piece
    if heard[:1] != GREETING_BEGINS[:1] or heard[9:10] != GREETING_BEGINS[9:10]:
        return b""  # not ZeroMQ: a web server, or something else
    return heard[GREETING_NAMES].rstrip(b"\0")


def _meant(value: int) -> HandshakeFailure:
    """Return the reason of a protocol failure with this event value."""
    return HandshakeFailure.KEYLESS if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else HandshakeFailure.STRANGE


class ListenerMonitor:
    """The thread that takes the events of a listening socket: refused handshakes, new and ended connections.

    The thread does nothing else. Events come as fast as strangers dial, and events that are not taken would stop the
    thread of ZeroMQ that makes them.
    """

    def __init__(
        self,
        watched: zmq.Socket[bytes],
        refused: Callable[[HandshakeFailure], None],
        gone: Callable[[bytes], None],
        connections: Connections | None,
    ) -> None:
        self.watched, self.refused, self.gone, self.connections = watched, refused, gone, connections
        self.faults = LibraryFaults()
        counted = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED if connections is not None else 0
        self.monitor: Any = watched.get_monitor_socket(FAILURES | counted | zmq.EVENT_MONITOR_STOPPED)
        self.thread = threading.Thread(target=self._main, name="narrows-strangers", daemon=True)
        self.thread.start()

    def _main(self) -> None:
        looked, stopped = time.monotonic(), False
        while not stopped and self.faults.broken is None:
            try:
                if self.connections is not None and time.monotonic() - looked >= LOOK_S:
                    looked = time.monotonic()
                    self.connections.look()
                if not self.monitor.poll(int(1000 * LOOK_S)):
                    continue
                about, endpoint = self.monitor.recv_multipart()
                event, value = EVENT.unpack(about)
                stopped = event == zmq.EVENT_MONITOR_STOPPED
                self._take(event, value, endpoint)
                self.faults.well()
            except LIBRARY as error:
                self.faults.add("an event of a connection", error)
        self.monitor.close()

    def _take(self, event: int, value: int, endpoint: bytes) -> None:
        # CurveAuthenticator reports refused keys itself. A dialler on this machine first tests the Unix socket, with a
        # connection that sends nothing: no failure.
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self.refused(_meant(value))
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and not endpoint.startswith(b"ipc:"):
            self.refused(HandshakeFailure.STRANGE)
        elif event == zmq.EVENT_ACCEPTED and self.connections is not None:
            self.connections.accept(value)
        elif (
            event == zmq.EVENT_DISCONNECTED and self.connections is not None and (name := self.connections.gone(value))
        ):
            self.gone(name)

    def close(self) -> None:
        self.watched.disable_monitor()
        self.thread.join()


class CurveAuthenticator:
    """The thread that asks `admits` about each connection to a listening socket of this context."""

    def __init__(
        self, context: zmq.Context[Any], curve: CurveKeys, refused: Callable[[HandshakeFailure, str], None]
    ) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # imports asyncio: not without keys

        self.curve, self.refused = curve, refused
        self.thread = ThreadAuthenticator(context)
        self.thread.start()
        self.thread.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Decide about a key (z85). pyzmq calls this: an error here would end the thread, and all later handshakes."""
        try:
            public = z85.decode(key).hex()
            admitted = self.curve.admits(public)
        except LIBRARY:
            return False
        if not admitted:
            self.refused(HandshakeFailure.REFUSED, public)
        return admitted

    def close(self) -> None:
        self.thread.stop()


def listens(made: zmq.Socket[bytes], own: KeyPair) -> None:
    """Give a listening socket its keys. It then refuses peers without encryption."""
    made.setsockopt(zmq.CURVE_SERVER, 1)
    made.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(own.secret))


def dials(made: zmq.Socket[bytes], pair: KeyPair, there: str) -> None:
    """Give a dialling socket its own `pair`, and the public key `there` that the other end must have."""
    made.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(there))
    made.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
    made.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(pair.secret))
