"""Keys on the wire (CURVE): by which pair of keys a socket speaks, whom it answers, and what a failed handshake means.

Rules
- A public key is written as 64 hex digits. Both ends of a connection know the other's before it carries anything.
- Who may dial is asked once for each connection, on a thread of its own (ZAP), and by whoever reads its messages again.
- A handshake that fails says why to whoever dials, as far as ZeroMQ tells it: see `Failures`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
STRANGE_MAX = 4  # handshakes in a row that end without a reason: that of a server which is starting may be one


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
class Curve:
    """own: the pair by which those who dial us know us; None: we listen in the open. dials: for an address our pair there, and
    the public key that must answer; None: it is dialled in the open. admits: whether the owner of a public key may dial us;
    any thread asks."""

    own: KeyPair | None
    dials: Callable[[str], tuple[KeyPair, str] | None]
    admits: Callable[[str], bool]


class Dialler(bytes):
    """The routing id of a peer that has proved to have the secret of `key`."""

    key: str

    @staticmethod
    def of(frame: zmq.Frame) -> bytes:
        """Who sent this, the first frame of a message."""
        try:
            user = str(frame.get("User-Id"))
        except zmq.ZMQError:  # in the open
            return frame.bytes
        made = Dialler(frame.bytes)
        made.key = z85.decode(user).hex()
        return made


class Why(Enum):
    """Why a handshake has failed."""

    REFUSED = "the key is not one of those that are let in"
    KEYLESS = "one side has keys and the other has none"
    STRANGE = "who is there has not the key that was expected"


class Failures:
    """Of one socket: its monitor, to be polled, and what the failures there mean."""

    def __init__(self, watched: zmq.Socket[bytes], address: str) -> None:
        self.watched, self.address = watched, address
        self.monitor: Any = watched.get_monitor_socket(EVENTS)
        self.strange = 0

    def take(self) -> list[Why]:
        """What has happened since."""
        found = []
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)
            match event["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.strange = 0
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    found.append(Why.REFUSED)
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    mismatch = event["value"] == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
                    found.append(Why.KEYLESS if mismatch else Why.STRANGE)
                case _:
                    self.strange += 1
                    # Who lives on this machine asks first whether there is a Unix socket, by a connection that says nothing.
                    asks = not self.address and not event["endpoint"].startswith(b"ipc:")
                    found += [Why.STRANGE] if asks or self.strange == STRANGE_MAX else []
        return found

    def close(self) -> None:
        self.watched.disable_monitor()
        self.monitor.close()


class Door:
    """The thread that asks `admits` about each connection to a listening socket of this context."""

    def __init__(self, context: zmq.Context[Any], curve: Curve, refused: Callable[[str], None]) -> None:
        from zmq.auth.thread import ThreadAuthenticator  # and asyncio, which others do without

        self.curve, self.refused = curve, refused
        self.thread = ThreadAuthenticator(context)
        self.thread.start()
        self.thread.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq with the key in z85."""
        public = z85.decode(key).hex()
        admitted = self.curve.admits(public)
        if not admitted:
            self.refused(public)
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
