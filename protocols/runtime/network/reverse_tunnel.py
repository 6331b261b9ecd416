"""A reverse tunnel: a node that nobody can dial takes connections that a relay hands it.

How it works

    peer ── CONNECT node-... ──> relay <── spare connections ── ReverseTunnel ── loopback ──> socket of this node

1. The tunnel dials the relay, SPARES times at once. On each connection it proves that it has the key of its name, and
   waits: the BIND of SOCKS5 (RFC 1928, section 6), with a private method of authentication.

       node:  5, 1, PROVES                           relay: 5, PROVES, nonce[NONCE_BYTES]
       node:  BIND name, proof[PROOF_BYTES]          relay: an answer DONE: registered, with the number of this count
                                                     relay: answers COUNTED, one in BEAT_S, with the bytes so far
                                                     relay: an answer DONE: a peer is there
       both:  the bytes of the peer

2. Once a peer is there, the tunnel dials the own socket, moves the bytes both ways, and dials another spare connection.
3. Peers of the node's own network need no relay: the tunnel listens there too, and takes a CONNECT that has its name
   (`_near`). By the name a peer knows that this is the node, and not another host that has the same private address.
4. A connection that ends, or on which no answer comes for SILENT_S, is dialled anew.

Rules
- What the tunnel moves is what the peer sent: keys go from end to end.
- At most STREAMS_MAX peers' connections at a time. While there are so many, no spare one is open.
- At most NEAR_MAX connections in the own network that have not said the name, each for NEAR_S.
- A relay that refuses the first proof, or that was never reached within the limit, is an error of this node. One that
  was reached, and is lost, is dialled until `close`.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable

from narrows.protocols.errors import AuthenticationError, NarrowsError, UnreachableError
from narrows.protocols.gossip.relay_ticket import NONCE_BYTES, proof
from narrows.protocols.runtime.network.socks_dialler import (
    ANSWER_BYTES,
    CONNECT,
    DIAL_S,
    DONE,
    NAME,
    NEAR_S,
    NO_AUTHENTICATION,
    SOCKS,
    moved,
)

BIND = 2
PROVES = 0x80  # the first private method (RFC 1928, section 3)
COUNTED = 0x80  # an answer while the node waits; in place of an address it has the bytes relayed so far
NOT_ALLOWED = 2  # RFC 1928, section 6
COUNT_AT = 4  # where an answer has that number: 6 bytes
SPARES = 2  # connections that wait for peers: a peer opens two at once
NEAR_MAX = 32  # connections in the own network that have not said the name yet
STREAMS_MAX = 256  # connections of peers at a time; each takes two threads
BEAT_S = 3.0  # between two answers to a node that waits: a NAT forgets a silent connection
SILENT_S = 5 * BEAT_S  # without an answer
RETRY_S = 0.5  # between two tries to reach the relay
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, probes


def stays(line: socket.socket) -> None:
    """Have the kernel probe a connection that may be silent for long: a NAT forgets it, or its end may be gone."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def received(line: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes. Raises ConnectionError at the end of the connection."""
    heard = b""
    while len(heard) < size:
        heard += (piece := line.recv(size - len(heard)))
        if not piece:
            raise ConnectionError("the relay has ended the connection")
    return heard


class NoRelayError(ConnectionError):
    """Something else than a relay answers."""


class CountedBytes:
    """The bytes of a node's peers as its relay has counted them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = b""  # of the present count
        self._before = self._counted = 0  # bytes of earlier counts, of the present one

    @property
    def total(self) -> int:
        return self._before + self._counted

    def begin(self, number: bytes) -> None:
        """Take the number of a count. It is another one where the relay has begun anew, or had forgotten the node."""
        with self._lock:
            if number != self._number:
                self._before, self._counted, self._number = self.total, 0, number

    def take(self, number: bytes, size: int) -> None:
        """Take a count. Those of several connections come in any order."""
        with self._lock:
            if number == self._number:
                self._counted = max(self._counted, size)


class ReverseTunnel:
    """Takes the connections of peers for one socket of this process.

    Args:
        relay: tcp://host:port of the relay.
        host: of this machine, where peers of its own network reach it.
        name: of this node there.
        key: of this name, in hex digits.
        port: of the own socket, on loopback.
        limit_s: the relay must have been reached once within this time.
        tell: gets a sentence for the user when the relay is lost, and when it is there again.
        fail: gets the error that ends the tunnel: AuthenticationError, UnreachableError.

    Raises:
        OSError: no port is free.
    """

    def __init__(
        self,
        relay: str,
        host: str,
        name: str,
        key: str,
        port: int,
        limit_s: float,
        tell: Callable[[str], None],
        fail: Callable[[NarrowsError], None],
    ) -> None:
        there, _, relay_port = relay.removeprefix("tcp://").rpartition(":")
        self.relay, self.where, self.name, self.key = relay, (there.strip("[]"), int(relay_port)), name, key
        self.port, self.tell, self.fail = port, tell, fail
        self.deadline_s = time.monotonic() + limit_s
        self.over = threading.Event()
        self.room = threading.BoundedSemaphore(STREAMS_MAX)
        self.lock = threading.Lock()
        self.lines = set[socket.socket]()  # connections to the relay, of all threads
        self.waiting = 0  # spare connections
        self.ever = self.lost = False  # the relay was reached once; it was lost since
        self.peer_bytes = CountedBytes()
        bare = host.strip("[]")
        self.listener = socket.create_server((bare, 0), family=socket.AF_INET6 if ":" in bare else socket.AF_INET)
        self.near = f"{host}:{self.listener.getsockname()[1]}"
        self.doors = threading.BoundedSemaphore(NEAR_MAX)
        threading.Thread(target=self._accept, name="narrows-tunnel", daemon=True).start()
        for _ in range(SPARES):
            threading.Thread(target=self._keep, name="narrows-tunnel", daemon=True).start()

    def _accept(self) -> None:
        """Take connections in the own network. Runs in a thread of its own."""
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                line, _ = self.listener.accept()
                if self.doors.acquire(blocking=False):
                    threading.Thread(target=self._near, args=(line,), name="narrows-tunnel", daemon=True).start()
                else:
                    line.close()

    def _near(self, line: socket.socket) -> None:
        """Take a connection that asks for this node by its name. Runs in a thread of its own."""
        with self.lock:
            self.lines.add(line)
        named = False
        try:
            with contextlib.suppress(OSError):
                named = self._named(line)
        finally:
            self.doors.release()
        if named and self.room.acquire(blocking=False):
            self._lead(line)
        else:
            self._drop(line)

    def _named(self, line: socket.socket) -> bool:
        """Answer a CONNECT. Return whether it has the name of this node. Raises OSError."""
        line.settimeout(NEAR_S)
        name = self.name.encode()
        wish = bytes((SOCKS, CONNECT, 0, NAME, len(name))) + name + bytes(2)
        if received(line, 3) != bytes((SOCKS, 1, NO_AUTHENTICATION)):
            return False
        line.sendall(bytes((SOCKS, NO_AUTHENTICATION)))
        if not hmac.compare_digest(received(line, len(wish)), wish):
            return False
        line.sendall(bytes((SOCKS, DONE, 0, 1)) + bytes(6))
        line.settimeout(None)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stays(line)
        return True

    def _keep(self) -> None:
        """Keep one spare connection open. Runs in a thread of its own."""
        while not self.over.is_set():
            self.room.acquire()
            try:
                line = self._spare()
            except OSError as error:
                self.room.release()
                self._missed(error)
                self.over.wait(RETRY_S)
                continue
            threading.Thread(target=self._lead, args=(line,), name="narrows-tunnel", daemon=True).start()

    def _spare(self) -> socket.socket:
        """Return a connection that has a peer now. Raises OSError."""
        line = socket.create_connection(self.where, DIAL_S)
        with self.lock:
            self.lines.add(line)
        waits = False
        try:
            if self.over.is_set():
                raise ConnectionError("this node has ended")
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stays(line)
            line.sendall(bytes((SOCKS, 1, PROVES)))
            if received(line, 2) != bytes((SOCKS, PROVES)):
                raise NoRelayError
            name = self.name.encode()
            nonce = received(line, NONCE_BYTES)
            line.sendall(bytes((SOCKS, BIND, 0, NAME, len(name))) + name + bytes(2) + proof(self.key, self.name, nonce))
            self._answered(answer := received(line, ANSWER_BYTES))
            self.peer_bytes.begin(number := answer[COUNT_AT:])
            line.settimeout(SILENT_S)
            self._waits(1)
            waits = True
            while self._answered(answer := received(line, ANSWER_BYTES)) != DONE:
                self.peer_bytes.take(number, int.from_bytes(answer[COUNT_AT:], "big"))
            line.settimeout(None)
            return line
        except BaseException:
            self._drop(line)
            raise
        finally:
            if waits:
                self._waits(-1)

    def _answered(self, answer: bytes) -> int:
        """Return the code of an answer, DONE or COUNTED. Raises OSError for another."""
        if answer[0] != SOCKS or answer[1] not in (DONE, COUNTED, NOT_ALLOWED):
            raise ConnectionError("the relay has no room")
        if answer[1] == NOT_ALLOWED:
            if not self.ever:
                self._end(AuthenticationError(f"{self.relay}: the relay refuses this worker: its --key is not the --relay-key "
                                              "of the server; copy the file of the one to the other"))  # fmt: skip
            raise ConnectionError("the relay refuses the proof")
        return answer[1]

    def _waits(self, more: int) -> None:
        """Note that one more spare connection is there, or is no more."""
        with self.lock:
            self.waiting += more
            self.ever = True
            again, self.lost = self.lost, self.lost and more < 0
        if again and more > 0:
            self.tell(f"the relay at {self.relay} answers again")

    def _missed(self, error: OSError) -> None:
        """Note that the relay was not reached, or has ended a spare connection."""
        if self.over.is_set():
            return
        late = not self.ever and time.monotonic() > self.deadline_s
        if late and isinstance(error, NoRelayError):
            self._end(UnreachableError(f"{self.relay}: this is no relay: start ps-serve relay there, or name its address in "
                                       "--relay-at of ps-serve"))  # fmt: skip
        elif late:
            self._end(UnreachableError(f"{self.relay}: no relay answers there ({error.strerror or error}): start ps-serve "
                                       "relay there, or open its port"))  # fmt: skip
        with self.lock:
            news = self.ever and not self.lost and self.waiting == 0
            self.lost = self.lost or news
        if news:
            self.tell(f"the relay at {self.relay} does not answer; this worker dials it again and again")

    def _end(self, error: NarrowsError) -> None:
        with self.lock:
            first = not self.over.is_set()
            self.over.set()
        if first:
            self.fail(error)

    def _lead(self, line: socket.socket) -> None:
        """Move the bytes between a peer and the own socket. Runs in a thread of its own."""
        try:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), DIAL_S) as here:
                here.settimeout(None)
                here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                up = threading.Thread(target=moved, args=(here, line), name="narrows-tunnel", daemon=True)
                up.start()
                moved(line, here)
                up.join()
        finally:
            self._drop(line)
            self.room.release()

    def _drop(self, line: socket.socket) -> None:
        with self.lock:
            self.lines.discard(line)
        line.close()

    def close(self) -> None:
        """End all connections. The threads end by themselves."""
        self.over.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.lock:
            for line in self.lines:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)
