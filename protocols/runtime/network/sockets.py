"""Sockets: the one way of frames in and out of a process, over ZeroMQ. They carry frames and know no message.

How it works

    listen ── ROUTER <── those who dial us: a peer is the routing id (bytes), `DiallerId` where keys are used
    send(address, frames) ── DEALER for each address: a peer is the address that we dialled (str)
    receive(limit_ms) yields (peer, frames), BURST of one socket in a row

1. `send` never waits. A message that finds no room, or no peer, is dropped; its `Receipt` says why. Frames of
   ZERO_COPY_BYTES or more are lent: the buffer must not change until the receipt says that they have left.
2. `receive` polls all sockets, the monitors of dialled connections, and file descriptors that others watch. Each
   message leaves its queue when it is asked for, not before.
3. `control=True` sends by a connection of its own, so that a heartbeat never waits behind a large push.
4. A monitor thread tells which connections came and ended (curve_auth.py, connections.py). `cut` is told of an end one
   turn later: by then the peer's last messages were read.

Rules
- One thread owns a `Sockets`. Another thread may only `wake` it.
- Nothing that a peer sends raises. A library error costs the message that was being read, and is counted
  (`LibraryFaults`). Only FAULTS_MAX of them in a row are raised.
- With curve_auth.py and encryption_cost.py this is all that imports zmq.
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
import zmq.utils.garbage  # its own exit handler, needed for zero-copy sends, must be registered before our last push at exit

from narrows.protocols.addresses import ANY_HOSTS, LOCAL_HOSTS, local_endpoint, parse_address, parted
from narrows.protocols.errors import UsageError
from narrows.protocols.messages import PARTS_MAX, Buffer
from narrows.protocols.runtime.network import curve_auth as keys
from narrows.protocols.runtime.network.connections import Connections
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
from narrows.protocols.wire import HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX

QUEUE_MESSAGES_MAX = 4 * PARTS_MAX  # one state of the largest shard, four times: beyond it a slow peer loses messages
UNREAD_MESSAGES_MAX = 64  # of one peer: the rest stays with it until these are read
FRAMES_MAX = 2  # of a message; what comes beyond them is thrown away, and with it the connection
THROWN_MAX = 8192  # frames of it in a row: some 20 ms
BACKLOG = 4096  # connections that wait to be accepted: strangers must not take the place of all others
SILENT_MS = 60_000  # who takes none of what it is sent for so long is cut off
LINGER_MS = 2000  # what was sent last may take so long to leave
UNMET_LINGER_MS = 500  # the same, where nobody has answered yet
BURST = 64  # messages of one socket in a row: then the others, the commands and the clock have their turn
ZERO_COPY_BYTES = 1 << 16  # below it pyzmq copies anyway
RECONNECT_MS_MAX = 500  # a peer that comes back is found within this
MESSAGE_BYTES_MAX = max(PAYLOAD_BYTES_MAX, HEADER_BYTES_MAX)  # of one frame: longer ones end their connection
REFUSED_MAX = 64  # refusals that are remembered until they are told
GONE_MAX = 4096  # ends of connections, the same
NO_DESCRIPTOR = -1  # of a message whose connection is not known
OPTIONS = {
    zmq.LINGER: LINGER_MS,
    zmq.SNDHWM: QUEUE_MESSAGES_MAX,
    zmq.RCVHWM: UNREAD_MESSAGES_MAX,
    zmq.MAXMSGSIZE: MESSAGE_BYTES_MAX,
    zmq.RECONNECT_IVL_MAX: RECONNECT_MS_MAX,
    zmq.BACKLOG: BACKLOG,
    zmq.TCP_MAXRT: SILENT_MS,
}
ROUTER = ("", False)  # in place of an address that we dialled

Peer = str | bytes
Socket = zmq.Socket[bytes]


@dataclass(slots=True)
class Receipt:
    """The fate of a message. `dropped`: why it was not sent, "" where it was."""

    dropped: str = ""
    _tracker: zmq.MessageTracker | None = None

    @property
    def lent(self) -> bool:
        """The frames may still be read: a buffer among them must not change."""
        return self._tracker is not None and not self._tracker.done


SENT = Receipt()  # the frames were copied
FULL = Receipt("its queue is full")
NOBODY = Receipt("nobody is connected under its name")
NOWHERE = Receipt("its address leads nowhere")


class Port(Protocol):
    """A runner sends and receives by this."""

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        """Send without waiting. Frames are not copied: they must not change while the receipt says that they are lent.
        `control`: by a connection of its own, so that large messages to the same peer do not hold it up."""

    def receive(self, limit_ms: int) -> Iterable[tuple[Peer, list[Buffer]]]:
        """Return the messages that came, after at most `limit_ms`. Each leaves its queue when it is asked for, not before."""

    def wake(self) -> None:
        """End the wait of `receive`, from any thread."""

    def hang_up(self, address: str) -> None:
        """Let go of what was dialled there."""

    def close(self) -> None:
        """Let go of all; the last messages have LINGER_MS to leave."""


class Drops:
    """Messages that were dropped, by name, and messages of others that were refused. `tell` gets a sentence about the first
    drop of each name and the first refusal of each kind: a stranger must not fill the log.

    A message to a peer that has gone, such as the answer to a member's last word, counts as no drop: nobody misses it. The end
    of a member that was lost is told apart.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.tell = tell

    def refuse(self, text: str) -> None:
        if text not in self.refused and len(self.refused) < REFUSED_MAX:
            self.refused.add(text)
            self.tell(f"{text}; more of them are not told")

    def note(self, name: str, receipt: Receipt) -> None:
        if receipt.dropped and receipt is not NOBODY:
            if name not in self.counts:
                self.tell(f"a message to a peer was dropped ({name}): {receipt.dropped}; more of them are only counted")
            self.counts[name] += 1


class Sockets:
    """A `Port` over ZeroMQ: a ROUTER for those who dial us, and a DEALER for each address that we dial.

    `known_as`: for an address, how the routing id begins by which we are known there; b"": by any. `curve`: the keys of this
    process; None: all is in the open. `failed` is told of handshakes that fail: the address that we dialled, or "" where others
    dialled us, why, and the key that was refused, where there is one. `linked` is told of an address that we dialled,
    and whose connection is another one: what was under way may be lost. `cut` is told of a peer whose connection has ended; of
    those who dialled us where there are `connections`: of who dials us; None: all are kept. `faulted` is told of the first
    library error of each kind, in a sentence.
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
    ) -> None:
        self.known_as, self.curve, self.failed, self.linked = known_as, curve, failed, linked
        self.cut, self.connections = cut, connections
        self.faults = LibraryFaults(faulted)
        self._door: CurveAuthenticator | None = None
        self._strangers: ListenerMonitor | None = None
        self._refused: deque[tuple[HandshakeFailure, str]] = deque(maxlen=REFUSED_MAX)  # by the threads of the door
        self._gone: deque[Peer] = deque(maxlen=GONE_MAX)  # whose connections have ended, by the thread of the door too
        self._going: list[Peer] = []  # those who are told in the next turn
        self._failures: dict[Socket, HandshakeMonitor] = {}
        self._endless: set[Socket] = set()  # in the midst of a message that has too many frames
        self._context = zmq.Context(io_threads=io_threads)
        self._poller = zmq.Poller()
        self._opened: dict[tuple[str, bool], Socket] = {}  # by the address dialled and `control`; ROUTER: the router
        self._watched: dict[int, Callable[[], object]] = {}
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self.watch(self._awake.fileno(), self._wake_up)

    def _open(self, key: tuple[str, bool], kind: int) -> Socket:
        made = self._opened[key] = self._context.socket(kind)
        for option, value in OPTIONS.items():
            made.setsockopt(option, value)
        self._poller.register(made, zmq.POLLIN)
        if key != ROUTER:
            self._failures[made] = watched = HandshakeMonitor(made, key[0])
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

    def _refuse(self, why: HandshakeFailure, key: str = "") -> None:
        """Somebody who dialled us was refused; the threads of the door say so."""
        told = bool(self._refused)
        self._refused.append((why, key))
        if not told:  # else it is awake already
            self.wake()

    def listen(self, address: str) -> int:
        """Let others dial tcp://host:port, where port 0 takes any, and the Unix socket beside it; return the port.

        Raises UsageError naming the address.
        """
        router = self._open(ROUTER, zmq.ROUTER)
        bound, _ = parse_address("cannot listen on", address, any_port=True)
        router.setsockopt(zmq.IPV6, is_ipv6(bound))  # of [::] IPv4 too
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(
            zmq.ROUTER_HANDOVER, 1
        )  # who dials anew keeps its name; the link before may seem alive for hours
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
        if sys.platform == "linux" and host in (*ANY_HOSTS, *LOCAL_HOSTS):
            try:
                router.bind(local_endpoint(int(port)))
            except zmq.ZMQError as error:  # the name belongs to nobody: any process of this machine may have it
                why = zmq.strerror(error.errno or 0)
                self.faults.tell(f"the Unix socket beside port {port} is taken ({why}): workers here come over TCP")
        return int(port)

    def _dial(self, key: tuple[str, bool]) -> Socket:
        """A DEALER of its own for each address: several connects on one socket would take turns."""
        dealer = self._open(key, zmq.DEALER)
        if name := self.known_as(key[0]):
            dealer.setsockopt(zmq.ROUTING_ID, name + os.urandom(8))
        if self.curve is not None and (there := self.curve.dials(key[0])):
            keys.dials(dealer, *there)
        try:
            if (address := parted(key[0])[0]).startswith("tcp://"):
                dealer.setsockopt(zmq.IPV6, is_ipv6(address.removeprefix("tcp://").rpartition(":")[0]))
            dealer.connect(address)
        except zmq.ZMQError:
            self._close(self._opened.pop(key))
            raise
        return dealer

    def hang_up(self, address: str) -> None:
        for key in [key for key in self._opened if key[0] == address]:
            self._close(self._opened.pop(key))

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        key, head = ((to, control), frames[:1]) if isinstance(to, str) else (ROUTER, [to, frames[0]])
        try:
            target = self._opened.get(key) or self._dial(key)
        except zmq.ZMQError:
            return NOWHERE
        try:
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
        """Return what there is to read within `limit_ms`. How a handshake went is told here, and ends no wait."""
        deadline = time.monotonic() + limit_ms / 1000
        while True:
            try:
                ready = dict(self._poller.poll(max(0, int(1000 * (deadline - time.monotonic())))))
            except LIBRARY as error:
                self._fault("the sockets", error)
                return {}
            if not ready:
                self.faults.well()
            monitors = [each for each in self._failures.values() if each.monitor in ready]
            for each in monitors:
                del ready[each.monitor]
                try:
                    found = each.take() if not each.watched.closed else []  # by what was told before
                except LIBRARY as error:
                    self._fault("an event of a connection", error)
                    continue
                for why in found:
                    self.failed(each.address, why, "")
                if each.anew:
                    each.anew = False
                    self.linked(each.address)
                if each.cut:
                    each.cut = False
                    self._gone.append(each.address)
            if ready or not monitors or time.monotonic() >= deadline:
                return ready

    def _fault(self, what: str, error: Exception) -> None:
        """Count an error of a library. Raises one that does not end."""
        self.faults.add(what, error)
        if self.faults.broken is not None:
            raise self.faults.broken

    def receive(self, limit_ms: int) -> Iterator[tuple[Peer, list[Buffer]]]:
        if self._strangers is not None and self._strangers.faults.broken is not None:
            raise self._strangers.faults.broken
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
            while left and not source.closed:  # it may be hung up on between two messages
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

    def _tell_gone(self) -> None:
        """Tell which peers' connections have ended, a turn later: by then what they had sent is read."""
        told, self._going = self._going, [self._gone.popleft() for _ in range(len(self._gone))]
        for peer in told:
            if (
                isinstance(peer, str) or self.connections is None or peer not in self.connections.named
            ):  # else it is back
                self.cut(peer)

    def _message(self, source: Socket, key: tuple[str, bool]) -> tuple[Peer, list[Buffer]] | None:
        """Return the next message and its sender; None where it is not to be read."""
        frames = self._frames(source, key == ROUTER)
        first = frames.pop(0) if key == ROUTER else None
        if first is not None and not self._reads(first):
            return None
        # In the open a peer may call itself what it likes: there only the routing id counts.
        peer = key[0] if first is None else DiallerId.of(first) if self._door is not None else first.bytes
        return peer, [frame.buffer for frame in frames]

    def _frames(self, source: Socket, named: bool) -> list[zmq.Frame]:
        """The next message, after the routing id where it is `named`; of one that has too many frames one more than may be.
        It must be read to its end before the next one, so its sender is stopped, and the rest thrown away a turn at a time."""
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
        """A read has failed. What is left of a message whose first frames were read is thrown away."""
        with contextlib.suppress(*LIBRARY):
            if source.getsockopt(zmq.RCVMORE):
                self._endless.add(source)

    def _goes_on(self, source: Socket) -> bool:
        """Whether the next frame begins a message. Some frames of a message that has too many are thrown away."""
        if source in self._endless and not all(source.recv(copy=False).more for _ in range(THROWN_MAX)):
            self._endless.remove(source)
        return source not in self._endless

    def _reads(self, first: zmq.Frame) -> bool:
        """Whether the message is read that begins with this frame, the routing id."""
        if self.connections is None:
            return True
        try:
            descriptor = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:  # its connection was reset before ZeroMQ accepted it
            descriptor = NO_DESCRIPTOR
        return self.connections.said(first.bytes, descriptor)

    def watch(self, fd: int, called: Callable[[], object]) -> None:
        """Have `called` run by `receive` while this file descriptor has something to be read."""
        self._watched[fd] = called
        self._poller.register(fd, zmq.POLLIN)

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]
        self._poller.unregister(fd)

    def wake(self) -> None:
        """End the wait of `receive`; any thread. Where it is awake already, or closed, that is no reason to wait."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._awake.recv(4096)

    def close(self) -> None:
        if self._strangers is not None:
            self._strangers.close()
        for opened in self._opened.values():
            self._close(opened)
        if self._door is not None:
            self._door.close()
        self._awake.close()
        self._waker.close()
        self._context.term()
