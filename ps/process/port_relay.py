"""The process of --one-port: it takes connections at the one port of a server, and moves their bytes to its shards.

How it works

    worker ── TCP ──> one port (PortRelay) ── TCP over loopback ──> shard 0, shard 1, ..., the page

1. ps-serve binds the port, and passes it on. So a connection that comes while this process is dead waits for the next.
2. The first byte of a connection decides where it leads. 5 is SOCKS5 (RFC 1928, without authentication): CONNECT names
   the shard (`shard_name`) or PAGE. A letter of METHODS is HTTP, and leads to the page. All else leads to shard 0.
3. Both ways of a connection are then moved as they are, by `splice` where the system has it. Keys go from end to end:
   this process sees what a router on the way sees.
4. The lines on stdin are the ports of the shards and of the page, as they change. At its end no connection is taken any
   more; those that are there have LINGER_S to get their last bytes.

Rules
- It leads to the shards and the page of this server, and nowhere else.
- What a peer sends costs at most its own connection. Without a whole request it is ended after FIRST_S. If there are too
  many connections, the oldest of those that have got less than LITTLE_BYTES is ended: a shard answers its members.
- A shard ends the connections of strangers, as without --one-port (connections.py). The relay then ends its side too.
- One thread owns everything, and waits for nothing but the next event.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from narrows.protocols.addresses import shard_name
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.socks_dialler import (
    CHUNK_BYTES,
    CONNECT,
    DONE,
    NAME,
    NO_AUTHENTICATION,
    SILENT_MS,
    SOCKS,
    SPLICES,
)
from narrows.protocols.runtime.processes import signals
from narrows.ps.process.main import may_open_more

LISTENER = "NARROWS_ONE_PORT_FD"  # environment variable: the descriptor of the port
PAGE = "page"
LOOPBACK = "127.0.0.1"
METHODS = b"GHP"  # first letters of GET, HEAD, POST and PUT
FIRST_S = 10.0  # for the first byte of a connection, and for the whole request of one that speaks SOCKS
LINGER_S = 2.0  # for the last bytes of a connection that its shard has ended
LITTLE_BYTES = 1 << 16  # a connection that has got less may be a stranger's
DESCRIPTORS = 4  # of a connection: two sockets, and a pipe while it waits for one of them
CONNECTIONS_MAX = 1 << 13
ACCEPTED_MAX = 64  # connections accepted in a row
PIPES_MAX = 64  # kept for later
TURN_S = 0.25  # between two looks at what is overdue
# Packets of a slow link come one by one, and to wake up for each takes more of a core than to move it. So after a turn that
# has moved less than GATHER_BYTES, those of GATHER_S come together.
GATHER_BYTES, GATHER_S = 1 << 15, 0.0005
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
# Of SOCKS5, as RFC 1928 has them: sections 3, 4 and 6.
NO_METHOD = 255
ADDRESS_BYTES = {1: 4, 4: 16}  # length of an address of each type but NAME
NOT_ALLOWED, REFUSED, NO_COMMAND, NO_TYPE = 2, 5, 7, 8


def missing(said: bytes) -> int:
    """Return how many bytes of a SOCKS5 greeting and request are still to come, as far as `said` tells: 0 for none."""
    if len(said) < 2:
        return 2 - len(said)
    begin = 2 + said[1]
    if len(said) < begin + 5:
        # The client sends its request once the greeting is answered.
        return begin - len(said) if len(said) < begin else begin + 5 - len(said)
    kind = said[begin + 3]
    size = 1 + said[begin + 4] if kind == NAME else ADDRESS_BYTES.get(kind, 1)
    return max(0, begin + 4 + size + 2 - len(said)) if kind == NAME or kind in ADDRESS_BYTES else 0


def requested(said: bytes) -> tuple[str, int]:
    """Return the host that a whole SOCKS5 request names, and DONE; or "" and the code that refuses it."""
    request = said[2 + said[1] :]
    if request[0] != SOCKS or request[1] != CONNECT:
        return "", NO_COMMAND
    if request[3] != NAME:
        return "", NO_TYPE
    return request[5 : 5 + request[4]].decode("ascii", "replace"), DONE


def answer(code: int) -> bytes:
    """Return the answer to a SOCKS5 request. The address in it has no meaning here."""
    return bytes((SOCKS, code, 0, 1)) + bytes(6)


class Pipes:
    """Pipes that splice moves bytes through: those that are empty are kept."""

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []

    def take(self) -> tuple[int, int]:
        """Return both ends of a pipe. Raises OSError."""
        if self.free:
            return self.free.pop()
        made = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(ImportError, AttributeError, OSError):  # the user has many pipes: it stays a small one
            import fcntl

            fcntl.fcntl(made[1], fcntl.F_SETPIPE_SZ, CHUNK_BYTES)
        return made

    def close(self) -> None:
        while self.free:
            self.give_back(self.free.pop(), False)

    def give_back(self, pipe: tuple[int, int], empty: bool) -> None:
        if empty and len(self.free) < PIPES_MAX:
            self.free.append(pipe)
        else:
            for end in pipe:
                os.close(end)


class ByteFlow:
    """The bytes that go one way through a connection.

    Args:
        source: they come from here.
        sink: they go there.
        pipes: for splice.
    """

    def __init__(self, source: socket.socket, sink: socket.socket, pipes: Pipes) -> None:
        self.source, self.sink, self.pipes = source, sink, pipes
        self.pipe: tuple[int, int] | None = None
        self.buffer = b""  # in place of a pipe, where the system has no splice
        self.held = 0  # bytes that have left the source, and are not in the sink yet
        self.moved = 0
        self.over = False  # the source sends no more

    def move(self) -> int:
        """Move bytes, at most CHUNK_BYTES, as far as both ends allow. Return how many have left. Raises OSError."""
        sent = 0
        if not self.held and not self.over:
            with contextlib.suppress(BlockingIOError):
                self.held = self._take()
                self.over = self.held == 0
        if self.held:
            with contextlib.suppress(BlockingIOError):
                sent = self._give()
                self.held -= sent
                self.moved += sent
        if not self.held:
            self.free()
        return sent

    def _take(self) -> int:
        if not SPLICES:
            self.buffer = self.source.recv(CHUNK_BYTES)
            return len(self.buffer)
        self.pipe = self.pipe or self.pipes.take()
        return os.splice(self.source.fileno(), self.pipe[1], CHUNK_BYTES, flags=os.SPLICE_F_NONBLOCK)

    def _give(self) -> int:
        if not SPLICES:
            sent = self.sink.send(self.buffer)
            self.buffer = self.buffer[sent:]
            return sent
        assert self.pipe is not None
        return os.splice(self.pipe[0], self.sink.fileno(), self.held, flags=os.SPLICE_F_NONBLOCK)

    def lose(self) -> None:
        """Move no more: one of the ends is gone."""
        self.free()
        self.held, self.over = 0, True

    def free(self) -> None:
        """Give the pipe back."""
        if self.pipe is not None:
            self.pipes.give_back(self.pipe, self.held == 0)
            self.pipe = None


class RelayedConnection:
    """A client's connection to the one port, and the relay's connection to the shard or the page."""

    def __init__(self, client: socket.socket, now_s: float) -> None:
        self.client = client
        self.since_s = now_s  # when it was accepted; once it ends, when its shard ended it
        self.said = b""  # its SOCKS5 greeting and request, so far
        self.socks = False
        self.server: socket.socket | None = None
        self.up: ByteFlow | None = None  # to the server, once that one is reached
        self.down: ByteFlow | None = None

    def speaks_socks(self, first: int) -> bool:
        """Note the first byte. Return whether it begins SOCKS5."""
        self.socks = first == SOCKS
        return self.socks

    def ends(self, now_s: float) -> None:
        """Note that it ends from now on."""
        self.since_s = now_s

    def hear(self, more: bytes) -> bytes:
        """Take more of the SOCKS5 request. Return all of it so far."""
        self.said += more
        return self.said

    def dial(self, address: tuple[str, int]) -> socket.socket:
        """Begin to dial the server."""
        self.server = socket.socket()
        self.server.setblocking(False)
        self.server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.server.connect_ex(address)
        return self.server

    def lead(self, server: socket.socket) -> None:
        """Lead to this connection, which is there already."""
        self.server = server

    def begin(self, pipes: Pipes) -> None:
        """Begin to move bytes: the server is reached."""
        assert self.server is not None
        self.up, self.down = ByteFlow(self.client, self.server, pipes), ByteFlow(self.server, self.client, pipes)

    def close(self) -> None:
        for flow in (self.up, self.down):
            if flow is not None:
                flow.free()
        for each in (self.client, self.server):
            if each is not None:
                each.close()


def dropped(text: str) -> None:
    """Send a sentence about an ended connection to ps-serve."""
    emit("log", name="dropped", values={"text": text})


class PortRelay:
    """Moves the bytes of all connections to the one port.

    Args:
        listener: the port, bound and listening.
        most: connections at a time.
        tell: gets a sentence about the first connection that is ended for each reason.
    """

    def __init__(self, listener: socket.socket, most: int, tell: Callable[[str], None] = dropped) -> None:
        self.listener, self.most, self.tell = listener, most, tell
        self.doors: dict[str, int] = {}  # by name, the port on loopback
        self.selector = selectors.DefaultSelector()
        self.wants: dict[socket.socket, int] = {}  # events that are waited for
        self.pipes = Pipes()
        # The oldest first: those that have not said where they lead, those that have got little, those that end, others.
        self.asked = OrderedDict[RelayedConnection, None]()
        self.little = OrderedDict[RelayedConnection, None]()
        self.ending = OrderedDict[RelayedConnection, None]()
        self.known = OrderedDict[RelayedConnection, None]()
        self.of: dict[socket.socket, RelayedConnection] = {}
        self.ended: Counter[str] = Counter()  # reason -> connections ended for it
        self.closing_s = float("inf")  # when to end, time.monotonic
        self.told = b""  # the beginning of a line of stdin
        self.moved = 0  # bytes of this turn
        listener.setblocking(False)
        self._want(listener, READ)

    @property
    def count(self) -> int:
        """The number of connections."""
        return len(self.asked) + len(self.little) + len(self.ending) + len(self.known)

    def lead(self, doors: dict[str, int]) -> None:
        """Lead to these from now on: by name, the port on loopback."""
        self.doors = doors

    def hear(self, fd: int) -> None:
        """Take the lines of this descriptor: by name, the port on loopback, as JSON. Its end ends this process."""
        self.selector.register(fd, READ)

    def _hear(self, fd: int) -> None:
        piece = os.read(fd, CHUNK_BYTES)
        *lines, self.told = (self.told + piece).split(b"\n")
        if lines:
            self.lead(json.loads(lines[-1]))
        if not piece:
            self.selector.unregister(fd)
            self.close()

    def close(self) -> None:
        """Take no more connections. Those that are there end within LINGER_S."""
        self.closing_s = time.monotonic() + LINGER_S
        self._want(self.listener, 0)
        self.listener.close()
        for each in [*self.asked]:
            self._end(each)

    @property
    def closed(self) -> bool:
        """True once the last connection has ended, or LINGER_S have passed."""
        return self.closing_s < float("inf") and (self.count == 0 or time.monotonic() > self.closing_s)

    def free(self) -> None:
        """End what is left."""
        for each in (*self.asked, *self.little, *self.known, *self.ending):
            self._end(each)
        self.pipes.close()
        self.selector.close()

    # Events.

    def turn(self, limit_s: float) -> None:
        """Handle the events that come within `limit_s`."""
        self.moved = 0
        for key, events in self.selector.select(limit_s):
            ready = key.fileobj
            if not isinstance(ready, socket.socket):
                self._hear(key.fd)
            elif ready is self.listener:
                self._accept()
            elif (connection := self.of.get(ready)) is not None:
                try:
                    self._ready(connection, ready, events)
                except OSError:  # its peer was reset, or no descriptor is left
                    self._end(connection)
        now_s = time.monotonic()
        self._expire(self.asked, now_s - FIRST_S, f"{FIRST_S:g} s without a whole request")
        self._expire(self.ending, now_s - LINGER_S, "")
        if 0 < self.moved < GATHER_BYTES:
            time.sleep(GATHER_S)

    def _expire(self, those: Iterable[RelayedConnection], before_s: float, why: str) -> None:
        for each in [*those]:
            if each.since_s > before_s:
                break
            self._end(each, why)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                client, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it has hung up, or no descriptor is left
                return self._make_room(self.count - 1)
            self._make_room(self.most - 1)
            client.setblocking(False)
            with contextlib.suppress(OSError):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
            made = RelayedConnection(client, time.monotonic())
            self.asked[made] = None
            self.of[client] = made
            self._want(client, READ)

    def _make_room(self, most: int) -> None:
        """End connections until at most `most` are left: first the oldest of those that may be strangers'."""
        while self.count > max(most, 0):
            new = [next(iter(kind)) for kind in (self.asked, self.little) if kind]
            old = [next(iter(kind)) for kind in (self.ending, self.known) if kind]
            self._end(min(new or old, key=lambda each: each.since_s), "too many connections")

    def _ready(self, connection: RelayedConnection, ready: socket.socket, events: int) -> None:
        if connection in self.asked:
            if connection.server is None:
                self._ask(connection)
            elif ready is connection.server:
                self._reached(connection)
            return
        if connection in self.ending:
            if not ready.recv(CHUNK_BYTES):  # thrown away: its shard has ended
                self._end(connection)
            return
        assert connection.up is not None and connection.down is not None
        for flow in (connection.down, connection.up):
            if (ready is flow.source and events & READ) or (ready is flow.sink and events & WRITE):
                try:
                    self.moved += flow.move()
                except OSError:  # one end was reset; what the server has sent before is still there
                    flow.lose()
        if connection.down.over and not connection.down.held:
            return self._server_ended(connection)
        if connection in self.little and connection.down.moved >= LITTLE_BYTES:
            del self.little[connection]
            self.known[connection] = None
        if connection.up.over and not connection.up.held:
            with contextlib.suppress(OSError):  # a second time: no harm
                connection.up.sink.shutdown(socket.SHUT_WR)
        self._wait(connection)

    def _wait(self, connection: RelayedConnection) -> None:
        """Wait for what each flow needs next: room in its sink for what it holds, else bytes of its source."""
        for inward, outward in ((connection.up, connection.down), (connection.down, connection.up)):
            assert inward is not None and outward is not None
            reads = not inward.over and not inward.held
            self._want(inward.source, READ * reads | WRITE * (outward.held > 0))

    def _want(self, of: socket.socket, events: int) -> None:
        before = self.wants.get(of, 0)
        if events and not before:
            self.selector.register(of, events)
        elif before and not events:
            self.selector.unregister(of)
        elif events != before:
            self.selector.modify(of, events)
        self.wants[of] = events

    # Where a connection leads.

    def _ask(self, connection: RelayedConnection) -> None:
        """Read where a connection leads. Bytes that its shard is to get stay in its socket."""
        client = connection.client
        if not connection.socks:
            first = client.recv(1, socket.MSG_PEEK)
            if not first:
                return self._end(connection)
            if not connection.speaks_socks(first[0]):
                page = first in METHODS and PAGE in self.doors
                return self._reach(connection, PAGE if page else shard_name(0))
        more = client.recv(missing(connection.said))
        if not more:
            return self._end(connection)
        greeted = len(connection.said) >= 2 and len(connection.said) >= 2 + connection.said[1]
        said = connection.hear(more)
        if not greeted and len(said) >= 2 and len(said) == 2 + said[1]:
            return self._greeted(connection, said[2:])
        if missing(said) == 0:
            name, code = requested(said)
            return self._named(connection, name) if code == DONE else self._refuse(connection, code)

    def _greeted(self, connection: RelayedConnection, methods: bytes) -> None:
        """Answer a greeting that offers these methods of authentication."""
        known = NO_AUTHENTICATION in methods
        connection.client.send(bytes((SOCKS, NO_AUTHENTICATION if known else NO_METHOD)))
        if not known:
            self._finish(connection)

    def _named(self, connection: RelayedConnection, name: str) -> None:
        """Lead a connection to the host that its CONNECT names."""
        if name in self.doors:
            self._reach(connection, name)
        else:
            self._refuse(connection, NOT_ALLOWED)

    def _reach(self, connection: RelayedConnection, name: str) -> None:
        if name not in self.doors:  # before shard 0 has bound; and it is not on a machine that has joined its server
            return self._end(connection)
        server = connection.dial((LOOPBACK, self.doors[name]))
        self.of[server] = connection
        self._want(connection.client, 0)
        self._want(server, WRITE)

    def _reached(self, connection: RelayedConnection) -> None:
        """Begin to move bytes, now that the server has accepted or refused the connection."""
        server = connection.server
        assert server is not None
        if server.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # the shard has died, and comes back
            return self._refuse(connection, REFUSED) if connection.socks else self._end(connection)
        self._begin(connection)

    def _begin(self, connection: RelayedConnection) -> None:
        """Begin to move bytes. Raises OSError."""
        if connection.socks:
            connection.client.send(answer(DONE))
        connection.begin(self.pipes)
        del self.asked[connection]
        self.little[connection] = None
        self._wait(connection)

    # Ends.

    def _refuse(self, connection: RelayedConnection, code: int) -> None:
        connection.client.send(answer(code))
        self._finish(connection)

    def _server_ended(self, connection: RelayedConnection) -> None:
        assert connection.server is not None and connection.up is not None
        self._want(connection.server, 0)
        del self.of[connection.server]
        self.wants.pop(connection.server, None)
        connection.up.lose()
        connection.server.close()
        self._finish(connection)

    def _finish(self, connection: RelayedConnection) -> None:
        """End a connection once its peer has the last bytes: a close with unread bytes would take them back."""
        for kind in (self.asked, self.little, self.known):
            kind.pop(connection, None)
        connection.ends(time.monotonic())
        self.ending[connection] = None
        self._want(connection.client, READ)
        connection.client.shutdown(socket.SHUT_WR)

    def _end(self, connection: RelayedConnection, why: str = "") -> None:
        for kind in (self.asked, self.little, self.known, self.ending):
            kind.pop(connection, None)
        for each in (connection.client, connection.server):
            if each is not None and self.of.pop(each, None) is not None:
                self._want(each, 0)
            if each is not None:
                self.wants.pop(each, None)
        connection.close()
        if why:
            self.ended[why] += 1
            if self.ended[why] == 1:
                self.tell(f"a connection to the one port was ended: {why}; more of them are only counted")


def most_connections() -> int:
    """Return how many connections the limit of this process's descriptors allows."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return CONNECTIONS_MAX if soft == resource.RLIM_INFINITY else min(CONNECTIONS_MAX, soft // DESCRIPTORS)
    return CONNECTIONS_MAX


def main() -> int:
    may_open_more()
    signals.leave_to_parent()
    relay = PortRelay(socket.socket(fileno=int(os.environ[LISTENER])), most_connections())
    relay.hear(0)
    while not relay.closed:
        relay.turn(TURN_S)
    relay.free()
    return 0


if __name__ == "__main__":
    sys.exit(main())
