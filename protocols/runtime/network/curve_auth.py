"""Keys on the wire (CURVE): by which pair of keys a socket speaks, whom it answers, and what a failed handshake means.

Rules
- A public key is written as 64 hex digits. Both ends of a connection know the other's before it carries anything.
- Who may dial is asked once for each connection, on a thread of its own (ZAP), and by whoever reads its messages again.
- A handshake that fails says why to whoever dials, as far as ZeroMQ tells it: see `HandshakeMonitor`.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from narrows.protocols.addresses import parted
from narrows.protocols.runtime.network.connections import Connections

FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
EVENT = struct.Struct("=Hi")  # what a monitor tells: its kind, and a value
PROBE_S = 1.0  # a greeting comes at once, or not at all
GREETING_BEGINS = b"\xff" + bytes(8) + b"\x7f\x03"  # ZMTP 3: signature and version
GREETING_BYTES, GREETING_NAMES = 64, slice(12, 32)  # how long it is, and where it has the name of the mechanism
LOOK_S = 0.25  # between two looks at what strangers have sent
NOBODY = "0" * 64  # the key of nobody: who names none where there are keys is dialled in vain, and never in the open
STRANGE_MAX = (
    4  # handshakes that end without a reason with one who greets as we do, over so many seconds: once may be chance
)
STRANGE_S = 0.5
FAULTS_MAX = 1000  # library errors in a row, with nothing read between them: no connection causes these
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
        """Counts `error`, which was raised while the thread read `what`."""
        known = isinstance(error, (zmq.ZMQError, OSError))  # other texts may hold what a stranger sent
        text = f"{what} could not be read ({error if known else type(error).__name__})"
        self.counts[text] += 1
        if self.counts[text] == 1:
            self.tell(text)
        self._row += 1
        if self._row >= FAULTS_MAX:
            self.broken = error

    def well(self) -> None:
        """A read has succeeded: the row ends."""
        self._row = 0


@dataclass(frozen=True)
class KeyPair:
    """32 bytes each, as hex digits."""

    public: str
    secret: str


def new_pair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def public_of(secret: str) -> str:
    return z85.decode(zmq.curve_public(z85.encode(bytes.fromhex(secret)))).hex()


@dataclass(frozen=True)
class CurveKeys:
    """own: the pair by which those who dial us know us; None: we listen in the open. dials: for an address our pair there, and
    the public key that must answer; None: it is dialled in the open. admits: whether the owner of a public key may dial us;
    any thread asks."""

    own: KeyPair | None
    dials: Callable[[str], tuple[KeyPair, str] | None]
    admits: Callable[[str], bool]


class DiallerId(bytes):
    """The routing id of a peer that has proved to have the secret of `key`."""

    key: str

    @staticmethod
    def of(frame: zmq.Frame) -> DiallerId:
        """Returns the sender of a message by its first frame. Raises an error of LIBRARY where the frame names no key."""
        made = DiallerId(frame.bytes)
        made.key = z85.decode(str(frame.get("User-Id"))).hex()
        return made


class HandshakeFailure(Enum):
    """Why a handshake has failed."""

    REFUSED = "the key is not one of those that are let in"
    KEYLESS = "one side has keys and the other has none"
    STRANGE = "who is there has not the key that was expected"


class HandshakeMonitor:
    """The failures of one socket that dials `address`: its monitor, to be polled, and what each failure means."""

    def __init__(self, watched: zmq.Socket[bytes], address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.watched, self.address, self.clock = watched, address, clock
        ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor: Any = watched.get_monitor_socket(FAILURES | ends)
        self.strange = 0
        self.since = 0.0  # the first of these
        self.met = False  # a handshake has succeeded: who is there has the key
        self.anew = False  # another one has, since this was looked at
        self.cut = False  # a connection of ours has ended, since this was looked at
        self.refused = False  # nothing that was sent will leave

    def take(self) -> list[HandshakeFailure]:
        """Return the failures since the last call, by what they mean."""
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
                case _:
                    found += self._hung_up() if not self.met else []
        self.refused |= bool(found)
        return found

    def _hung_up(self) -> list[HandshakeFailure]:
        """Without a word. Where one has keys and the other has none, either may hang up before the other has read why. A tunnel
        hangs up as long as nobody is behind it: that one does not greet."""
        greeted = mechanism(self.address)
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
    """By what handshake those there are let in who dial it, as its greeting says; b"" where none comes within PROBE_S."""
    endpoint = parted(address)[0]
    with suppress(OSError, ValueError):
        if endpoint.startswith("ipc://@"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(PROBE_S)
                probe.connect("\0" + endpoint.removeprefix("ipc://@"))
                return _greeted(probe)
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), PROBE_S) as probe:
            return _greeted(probe)
    return b""


def _greeted(probe: socket.socket) -> bytes:
    """The mechanism that the greeting of the other end names. It says all of that once it knows our version."""
    heard = b""
    probe.sendall(GREETING_BEGINS)
    while len(heard) < GREETING_BYTES and (piece := probe.recv(GREETING_BYTES - len(heard))):
        heard += piece
    if heard[:1] != GREETING_BEGINS[:1] or heard[9:10] != GREETING_BEGINS[9:10]:
        return b""  # a web server, or something else
    return heard[GREETING_NAMES].rstrip(b"\0")


def _meant(value: int) -> HandshakeFailure:
    """By a failure of the protocol."""
    return HandshakeFailure.KEYLESS if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH else HandshakeFailure.STRANGE


class ListenerMonitor:
    """The thread that hears of those who dial a listening socket, and are not let in, say nothing, or are gone.

    It does nothing else: events that nobody takes would stop the thread of ZeroMQ that makes them, and they come as fast as
    others dial.
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
        # The door knows more of a key that was refused. Who lives on this machine asks first whether there is a Unix
        # socket, by a connection that says nothing.
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
        from zmq.auth.thread import ThreadAuthenticator  # and asyncio, which others do without

        self.curve, self.refused = curve, refused
        self.thread = ThreadAuthenticator(context)
        self.thread.start()
        self.thread.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq with the key in z85. An error here would end the thread, and with it all handshakes to come."""
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
    """Have a socket that others dial answer with our key, and nobody in the open."""
    made.setsockopt(zmq.CURVE_SERVER, 1)
    made.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(own.secret))


def dials(made: zmq.Socket[bytes], pair: KeyPair, there: str) -> None:
    """Have a socket dial with `pair` whoever has the public key `there`."""
    made.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(there))
    made.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(pair.public))
    made.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(pair.secret))
