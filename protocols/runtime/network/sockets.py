"""Sockets: all frames in and out of a process go through here, over ZeroMQ. They carry frames and know no message.

How it works

    listen ── ROUTER <── peers that dial this process: a peer is its routing id (bytes; with keys a `DiallerId`)
    send(address, frames) ── DEALER for each address: a peer is the address that this process dialled (str)
    receive(limit_ms) yields (peer, frames), at most BURST of one socket in a row

1. `send` never waits. A message for a full queue, or for no peer, is dropped; its `Receipt` says why. Frames of
   ZERO_COPY_BYTES or more are lent: the buffer must not change until the receipt says that they have left.
2. `receive` polls all sockets, the monitors of dialled connections, and the file descriptors of `watch`. Each message
   stays in its queue until the caller asks for it.
3. `control=True` sends over a connection of its own, so that a heartbeat never waits behind a large push.
4. To a process of the same machine and user a large frame goes as a reference: a third frame, after an empty second one
   (shared_memory.py).
5. A shard behind the one port of its server (`by_proxy`) is dialled by SOCKS5 (socks_dialler.py).
6. A monitor thread sees connections come and end (curve_auth.py, connections.py). `cut` gets an end one turn later: by
   then the peer's last messages were read.

Rules
- One thread owns a `Sockets`. Another thread may only `wake` it.
- Nothing that a peer sends raises an exception. A library error costs the message that was being read, and is counted
  (`LibraryFaults`). The error is raised only after FAULTS_MAX of them in a row.
- Only this file, curve_auth.py and encryption_cost.py import zmq.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq
import zmq.utils.garbage  # its exit handler, for zero-copy sends, must be registered before that of our last push

from narrows.protocols.addresses import ANY_HOSTS, LOCAL_HOSTS, by_proxy, local_endpoint, parse_address, parted
from narrows.protocols.errors import UsageError
from narrows.protocols.member.heartbeat_summary import SHARED_MEMORY, TCP, UNIX_SOCKET, UNKNOWN
from narrows.protocols.messages import PARTS_MAX, Buffer
from narrows.protocols.runtime.network import curve_auth as keys
from narrows.protocols.runtime.network.connections import BACKLOG, Connections
from narrows.protocols.runtime.network.curve_auth import (
    LIBRARY,
    CurveAuthenticator,
    CurveKeys,
    DiallerId,
    HandshakeFailure,
    HandshakeMonitor,
    LibraryFaults,
    ListenerMonitor,
)
from narrows.protocols.runtime.network.hosts import is_ipv6
from narrows.protocols.runtime.network.shared_memory import REFERENCE, SharedMemory, Turn
from narrows.protocols.runtime.network.socks_dialler import SILENT_MS, SocksDialler
from narrows.protocols.wire import HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX

QUEUE_MESSAGES_MAX = 4 * PARTS_MAX  # four states of the largest shard; a slower peer loses messages
UNREAD_MESSAGES_MAX = 64  # of one peer; further messages stay with the peer until these are read
FRAMES_MAX = 3  # of a message; further frames are thrown away, and the connection is ended
THROWN_MAX = 8192  # frames thrown away in a row: some 20 ms
LINGER_MS = 2000  # time for the last messages to leave
UNMET_LINGER_MS = 500  # the same for a connection on which no peer has answered yet
BURST = 64  # messages of one socket in a row: then the other sockets, the commands and the tick have their turn
ZERO_COPY_BYTES = 1 << 16  # smaller frames pyzmq copies anyway
RECONNECT_MS_MAX = 500  # interval of dialling again: a peer that comes back is found within this
MESSAGE_BYTES_MAX = max(PAYLOAD_BYTES_MAX, HEADER_BYTES_MAX)  # of one frame; a longer one ends its connection
REFUSED_MAX = 64  # refusals kept until the owner's thread reports them
GONE_MAX = 4096  # ends of connections kept, the same
NO_DESCRIPTOR = -1  # of a message whose connection is not known
OPTIONS = {
    zmq.LINGER: LINGER_MS,
    zmq.SNDHWM: QUEUE_MESSAGES_MAX,
    zmq.RCVHWM: UNREAD_MESSAGES_MAX,
    zmq.RECONNECT_IVL_MAX: RECONNECT_MS_MAX,
    zmq.BACKLOG: BACKLOG,
    zmq.TCP_MAXRT: SILENT_MS,
}
ROUTER = ("", False)  # the key of the listening socket, in place of (address, control)

Peer = str | bytes
Socket = zmq.Socket[bytes]


@dataclass(slots=True)
class Receipt:
    """What became of a message."""

    dropped: str = ""  # why the message was not sent; "": it was
    _tracker: zmq.MessageTracker | Turn | None = None

    @property
    def lent(self) -> bool:
        """True while ZeroMQ may still read the frames: their buffers must not change."""
        return self._tracker is not None and not self._tracker.done


SENT = Receipt()  # the frames were copied
FULL = Receipt("its queue is full")
NOBODY = Receipt("no peer is connected under its name")
NOWHERE = Receipt("its address leads nowhere")


class Port(Protocol):
    """The transport of a runner. One thread owns a port and calls its methods; any thread may call `wake`."""

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        """Send one message. Never waits, and never raises for a peer that is not there.

        Args:
            to: the routing id of a peer that dialled this process, or an address to dial.
            frames: not copied. Their buffers must not change while the receipt is `lent`.
            control: send over a connection of its own, so that large messages to the same peer do not delay this one.
        """

    def receive(self, limit_ms: int) -> Iterable[tuple[Peer, list[Buffer]]]:
        """Return the messages that came, after at most `limit_ms`: (peer, frames) each, read-only buffers.

        A message stays in its queue until the caller asks for it.
        """

    def wake(self) -> None:
        """End the wait of `receive`. Any thread may call this."""

    def hang_up(self, address: str) -> None:
        """Close the connections that were dialled to this address."""

    def close(self) -> None:
        """Close all connections. The last messages have LINGER_MS to leave."""


class Drops:
    """Counts messages that were dropped, by kind, and notes messages of peers that were refused.

    `tell` is called with a sentence for the first drop of each kind and the first refusal of each text. Later ones are
    only counted, so that a stranger cannot fill the log. A message to a peer that has left, such as the answer to a
    member's Leave, does not count as dropped: no process waits for it. The loss of a member is reported elsewhere.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.tell = tell

    def refuse(self, text: str) -> None:
        if text not in self.refused and len(self.refused) < REFUSED_MAX:
            self.refused.add(text)
            self.tell(f"{text}; more of them are not shown")

    def note(self, name: str, receipt: Receipt) -> None:
        if receipt.dropped and receipt is not NOBODY:
            if name not in self.counts:
                self.tell(f"a message to a peer was dropped ({name}): {receipt.dropped}; more of them are only counted")
            self.counts[name] += 1


class Sockets:
    """A `Port` over ZeroMQ: a ROUTER for peers that dial this process, and a DEALER for each address that it dials.

    Args:
        io_threads: of the ZeroMQ context.
        known_as: returns for an address the first bytes of the routing id to dial it with; b"": any.
        curve: the keys of this process; None: nothing is encrypted.
        failed: gets each handshake that fails: the address that was dialled ("": a peer dialled this process), why, and
            the refused public key ("": none).
        linked: gets an address that was dialled, when its connection is a new one: messages under way may be lost.
        cut: gets a peer whose connection has ended: one that was dialled, and with `connections` also one that dialled.
        connections: limits the connections of peers that dial this process; None: no limit.
        faulted: gets a sentence about the first library error of each kind.
        shares: peers of this machine and user that dial this process may send frames in shared memory (shared_memory.py):
            its owner copies each frame that a peer must not change before it reads it.
        bytes_max: of one frame of a peer; a longer one ends its connection.
    """

    def __init__(
        self,
        io_threads: int = 1,
        known_as: Callable[[str], bytes] = lambda address: b"",
        curve: CurveKeys | None = None,
        failed: Callable[[str, HandshakeFailure, str], None] = lambda address, why, key: None,
        linked: Callable[[str], None] = lambda address: None,
        cut: Callable[[Peer], None] = lambda peer: None,
        connections: Connections | None = None,
        faulted: Callable[[str], None] = lambda text: None,
        shares: bool = False,
        bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        self.known_as, self.curve, self.failed, self.linked = known_as, curve, failed, linked
        self.cut, self.connections, self.shares, self.bytes_max = cut, connections, shares, bytes_max
        self.faults = LibraryFaults(faulted)
        self._door: CurveAuthenticator | None = None
        self._strangers: ListenerMonitor | None = None
        self._refused: deque[tuple[HandshakeFailure, str]] = deque(maxlen=REFUSED_MAX)  # filled by the auth threads
        self._gone: deque[Peer] = deque(maxlen=GONE_MAX)  # peers whose connections have ended; filled by any thread
        self._going: list[Peer] = []  # those of them that `cut` gets in the next turn
        self._failures: dict[Socket, HandshakeMonitor] = {}
        self._diallers: dict[Socket, SocksDialler] = {}  # of sockets that dial a shard behind one port
        self._leaving: list[SocksDialler] = []  # of those that are closed: last bytes may be in them
        self._endless: set[Socket] = set()  # sockets in the middle of a message with too many frames
        self._context = zmq.Context(io_threads=io_threads)
        self._poller = zmq.Poller()
        self._opened: dict[tuple[str, bool], Socket] = {}  # by the address dialled and `control`; ROUTER: the router
        self._watched: dict[int, Callable[[], object]] = {}
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self.watch(self._awake.fileno(), self._wake_up)
        self.memory = SharedMemory(self.watch, self.unwatch)

    def report_to(
        self,
        cut: Callable[[Peer], None],
        linked: Callable[[str], None] | None = None,
        failed: Callable[[str, HandshakeFailure, str], None] | None = None,
    ) -> None:
        """Report connections to these from now on, as the arguments of this class say; None: to the one before."""
        self.cut, self.linked, self.failed = cut, linked or self.linked, failed or self.failed

    def _open(self, key: tuple[str, bool], kind: int) -> Socket:
        made = self._opened[key] = self._context.socket(kind)
        for option, value in OPTIONS.items():
            made.setsockopt(option, value)
        made.setsockopt(zmq.MAXMSGSIZE, self.bytes_max)
        self._poller.register(made, zmq.POLLIN)
        if key != ROUTER:
            self._failures[made] = watched = HandshakeMonitor(made, key[0], self.wake)
            self._poller.register(watched.monitor, zmq.POLLIN)
        return made

    def _close(self, opened: Socket) -> None:
        self._poller.unregister(opened)
        if watched := self._failures.pop(opened, None):
            self._poller.unregister(watched.monitor)
            watched.close()
            if watched.refused or not watched.met:
                opened.setsockopt(zmq.LINGER, 0 if watched.refused else UNMET_LINGER_MS)
        self._endless.discard(opened)
        opened.close()
        if dialler := self._diallers.pop(opened, None):
            dialler.close()
            self._leaving.append(dialler)

    def _refuse(self, why: HandshakeFailure, key: str = "") -> None:
        """Note a refused peer that dialled this process. The threads of CURVE call this."""
        told = bool(self._refused)
        self._refused.append((why, key))
        if not told:  # with a refusal before, the owner's thread is awake already
            self.wake()

    def listen(self, address: str, beside: str | None = None) -> int:
        """Listen on an address, and on the Unix socket beside it.

        Args:
            address: tcp://host:port; port 0 takes any free port.
            beside: the endpoint of that Unix socket, "" for none; None: the one of the port, if this machine reaches it
                by a host of LOCAL_HOSTS.

        Returns:
            The port.

        Raises:
            UsageError: the address is taken or not valid; names the address.
        """
        router = self._open(ROUTER, zmq.ROUTER)
        bound, _ = parse_address("cannot listen on", address, any_port=True)
        router.setsockopt(zmq.IPV6, is_ipv6(bound))  # [::] listens to IPv4 too
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(
            zmq.ROUTER_HANDOVER, 1
        )  # a peer that dials again keeps its name: its earlier connection may seem alive for hours
        self._strangers = ListenerMonitor(router, self._refuse, self._gone.append, self.connections)
        if self.curve is not None and self.curve.own is not None:
            self._door = CurveAuthenticator(self._context, self.curve, self._refuse)
            keys.listens(router, self.curve.own)
        try:
            router.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
        except zmq.ZMQError as error:
            why = f"{error.strerror}; is another ps-serve running there?"
            raise UsageError(f"cannot listen on {address}: {why}") from None
        host, port = router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rsplit(":", 1)
        if beside is None:
            beside = local_endpoint(int(port)) if host in (*ANY_HOSTS, *LOCAL_HOSTS) else ""
        if sys.platform == "linux" and beside:
            if self.shares:
                self.memory.listen(beside)
            try:
                router.bind(beside)
            except zmq.ZMQError as error:  # any process of this machine may have taken the name
                why = zmq.strerror(error.errno or 0)
                self.faults.tell(f"the Unix socket beside port {port} is taken ({why}): workers here come over TCP")
        return int(port)

    def _dial(self, key: tuple[str, bool]) -> Socket:
        """Dial an address with a DEALER of its own: a socket with several connects would send to each in turn."""
        dealer = self._open(key, zmq.DEALER)
        if name := self.known_as(key[0]):
            dealer.setsockopt(zmq.ROUTING_ID, name := name + os.urandom(8))
        if self.curve is not None and (pair := self.curve.dials(key[0])):
            keys.dials(dealer, *pair)
        try:
            address = parted(key[0])[0]
            if by := by_proxy(address):
                self._diallers[dealer] = dialler = SocksDialler(*by)
                address = dialler.endpoint
            if address.startswith("tcp://"):
                dealer.setsockopt(zmq.IPV6, is_ipv6(address.removeprefix("tcp://").rpartition(":")[0]))
            dealer.connect(address)
        except (zmq.ZMQError, OSError) as error:
            self._close(self._opened.pop(key))
            raise error if isinstance(error, zmq.ZMQError) else zmq.ZMQError(error.errno) from None
        if name and not key[1]:
            self.memory.dial(key[0], name)
        return dealer

    def hang_up(self, address: str) -> None:
        for key in [key for key in self._opened if key[0] == address]:
            self._close(self._opened.pop(key))
        self.memory.forget(address)

    def way(self, address: str) -> str:
        """Return how large messages to an address that was dialled go, one of WAYS."""
        if (address, False) not in self._opened:
            return UNKNOWN
        if address in self.memory.met:
            return SHARED_MEMORY
        return UNIX_SOCKET if address.startswith("ipc:") else TCP

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        key, head = ((to, control), frames[:1]) if isinstance(to, str) else (ROUTER, [to, frames[0]])
        try:
            target = self._opened.get(key) or self._dial(key)
        except zmq.ZMQError:
            return NOWHERE
        try:
            link = self.memory.link(to, frames[1]) if len(frames) == 2 else None
            if link is not None and not control and (reference := link.put(frames[1], key is ROUTER)) is not None:
                try:
                    target.send_multipart([*head, b"", reference], zmq.NOBLOCK)
                except zmq.ZMQError:
                    link.unsend()
                    raise
                return Receipt("", link.pool.present) if key is ROUTER else SENT
            if len(frames) == 2 and len(frames[1]) >= ZERO_COPY_BYTES:
                target.send_multipart(head, zmq.SNDMORE | zmq.NOBLOCK)
                return Receipt("", target.send(frames[1], zmq.NOBLOCK, copy=False, track=True))
            target.send_multipart([*head, *frames[1:]], zmq.NOBLOCK)
        except zmq.Again:
            return FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return NOBODY
        return SENT

    def _ready(self, limit_ms: int) -> dict[Any, int]:
        """Return the sockets that can be read within `limit_ms`. Reports handshakes on the way; they end no wait."""
        deadline = time.monotonic() + limit_ms / 1000
        while True:
            try:
                ready = dict(self._poller.poll(max(0, int(1000 * (deadline - time.monotonic())))))
            except LIBRARY as error:
                self._fault("the sockets", error)
                return {}
            if not ready:
                self.faults.well()
            monitors = [each for each in self._failures.values() if each.monitor in ready or each.answered]
            for each in monitors:
                ready.pop(each.monitor, None)
                try:
                    found = each.take() if not each.watched.closed else []  # a callback may have closed the socket
                except LIBRARY as error:
                    self._fault("an event of a connection", error)
                    continue
                for why in found:
                    self.failed(each.address, why, "")
                anew, cut = each.changed()
                if anew or cut:
                    (self.memory.dial if anew else self.memory.drop)(each.address)
                if anew:
                    self.linked(each.address)
                if cut:
                    self._gone.append(each.address)
            if ready or not monitors or time.monotonic() >= deadline:
                return ready

    def _fault(self, what: str, error: Exception) -> None:
        """Count an error of a library. Raises it once FAULTS_MAX came in a row."""
        self.faults.add(what, error)
        if self.faults.broken is not None:
            raise self.faults.broken

    def receive(self, limit_ms: int) -> Iterator[tuple[Peer, list[Buffer]]]:
        if self._strangers is not None and self._strangers.faults.broken is not None:
            raise self._strangers.faults.broken
        self.memory.turn()
        ready = self._ready(limit_ms)
        while self._refused:
            why, public = self._refused.popleft()
            self.failed("", why, public)
        if self._gone or self._going:
            self._tell_gone()
        for fd, called in [*self._watched.items()]:
            if fd in ready:
                called()
        for key, source in [*self._opened.items()]:
            left = BURST if source in ready else 0
            while left and not source.closed:  # the caller may hang up between two messages
                try:
                    if (left == BURST and not self._goes_on(source)) or source in self._endless:
                        break
                    message = self._message(source, key)
                except zmq.Again:
                    break
                except LIBRARY as error:
                    self._broken_off(source)
                    self._fault("a message", error)
                    break
                left -= 1
                if message is not None:
                    yield message
                    self.memory.turn()

    def _tell_gone(self) -> None:
        """Report ended connections to `cut` one turn later: by then the peers' last messages are read."""
        told, self._going = self._going, [self._gone.popleft() for _ in range(len(self._gone))]
        for peer in told:
            if (
                isinstance(peer, str) or self.connections is None or peer not in self.connections.named
            ):  # a peer in `named` has connected again
                self.memory.drop(peer)
                self.cut(peer)

    def _message(self, source: Socket, key: tuple[str, bool]) -> tuple[Peer, list[Buffer]] | None:
        """Return the sender and frames of the next message; None if its connection, or its link, was ended meanwhile."""
        frames = self._frames(source, key == ROUTER)
        first = frames.pop(0) if key == ROUTER else None
        if first is not None and not self._reads(first):
            return None
        # Without CURVE a peer may claim any name: only the routing id counts there.
        peer = key[0] if first is None else DiallerId.of(first) if self._door is not None else first.bytes
        buffers: list[Buffer] = [frame.buffer for frame in frames]
        if len(buffers) == FRAMES_MAX:
            link = self.memory.links.get(peer)
            refers = link is not None or (self.memory.on and not buffers[1] and len(buffers[2]) == REFERENCE.size)
            found = link.open(buffers[2]) if link is not None else None
            if refers and found is None:
                return None  # of an earlier link: the sender repeats what it has in the message
            buffers = [buffers[0], found] if found is not None else buffers
        return peer, buffers

    def _frames(self, source: Socket, named: bool) -> list[zmq.Frame]:
        """Return the frames of the next message, at most FRAMES_MAX + 1 of them.

        Such a message must be read to its end before the next one. So its connection is ended, and the rest is thrown
        away a part in each turn.

        Args:
            source: the socket.
            named: the first frame is the routing id.
        """
        frames = [source.recv(zmq.NOBLOCK, copy=False)]
        self.faults.well()
        while (more := frames[-1].more) and len(frames) <= FRAMES_MAX + named:
            frames.append(source.recv(copy=False))
        if more:
            self._endless.add(source)
        if more and named and self.connections is not None and self._reads(frames[0]):
            self.connections.end(frames[0].bytes, "messages of too many frames")
        return frames

    def _broken_off(self, source: Socket) -> None:
        """Throw away the rest of a message in whose middle a read has failed."""
        with contextlib.suppress(*LIBRARY):
            if source.getsockopt(zmq.RCVMORE):
                self._endless.add(source)

    def _goes_on(self, source: Socket) -> bool:
        """True if the next frame begins a message. Throws away up to THROWN_MAX frames of a message with too many."""
        if source in self._endless and not all(source.recv(copy=False).more for _ in range(THROWN_MAX)):
            self._endless.remove(source)
        return source not in self._endless

    def _reads(self, first: zmq.Frame) -> bool:
        """True if the message that begins with this frame, the routing id, is to be read."""
        if self.connections is None:
            return True
        try:
            descriptor = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:  # its connection was reset before ZeroMQ accepted it
            descriptor = NO_DESCRIPTOR
        return self.connections.said(first.bytes, descriptor)

    def watch(self, fd: int, called: Callable[[], object]) -> None:
        """Have `receive` run `called` whenever this file descriptor can be read."""
        self._watched[fd] = called
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]
        self._poller.unregister(fd)

    def wake(self) -> None:
        """End the wait of `receive`. Any thread may call this, also after `close`; it never waits."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._awake.recv(4096)

    def close(self) -> None:
        if self._strangers is not None:
            self._strangers.close()
        self.memory.close()
        for opened in self._opened.values():
            self._close(opened)
        if self._door is not None:
            self._door.close()
        self._awake.close()
        self._waker.close()
        self._context.term()
        deadline = time.monotonic() + LINGER_MS / 1000
        for dialler in self._leaving:
            dialler.join(deadline)
