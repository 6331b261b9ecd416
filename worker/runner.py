"""Runs a `Member` over ZeroMQ in a thread of its own: the only file of worker/ that knows sockets.

One DEALER for each shard (several connects on one socket would take turns), and one more to shard 0 for what must not wait
behind large messages (`CONTROL`); under gossip one for each peer too, and a ROUTER that they dial. The thread owns the
sockets and the machine; other threads hand it commands with `call` and take what it delivers with `take`.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq
import zmq.utils.garbage  # its own exit handler, needed for zero-copy sends, must be registered before our last push at exit

from narrows.protocols import messages as m
from narrows.protocols.effects import Failed, Joined, Left, MemberEffect, RosterNews, Send, Tell
from narrows.protocols.errors import BY_EXIT_CODE, NarrowsError, RemoteProtocolError
from narrows.protocols.member.member import Member
from narrows.protocols.modes import Rule
from narrows.protocols.runtime.flags import parse_address
from narrows.protocols.settings import Settings
from narrows.protocols.timing import Timing
from narrows.protocols.wire import HEADER_BYTES_MAX, LOCAL_HOSTS, PAYLOAD_BYTES_MAX, decode, encode, local_endpoint

TICK_MS = 50
QUEUE_MESSAGES_MAX = 4 * m.PARTS_MAX
LINGER_MS = 2000
BURST = 64
ZERO_COPY_BYTES = 1 << 16

Command = Callable[[Member, int], list[MemberEffect]]


def endpoint(host: str, port: int) -> str:
    """Where to dial: the Unix socket of a server on this machine, where there is one, else TCP."""
    if sys.platform == "linux" and host in LOCAL_HOSTS:
        local = local_endpoint(port)
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect("\0" + local.removeprefix("ipc://@"))
            return local
    return f"tcp://{host}:{port}"


def own_host(host: str, port: int) -> str:
    """The address of this machine that leads to `host`: where peers on the same network reach it."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # UDP: nothing is sent
        found = str(probe.getsockname()[0])
    return f"[{found}]" if ":" in found else found


class Link:
    """The session of this process with its server. Close it; it is a context manager of nothing but its own thread."""

    def __init__(self, address: str, token: str, host: str, expect: bytes, timing: Timing | None = None) -> None:
        self.address = address
        self.host, self.port = parse_address("--server", address)
        self.member = Member(token, host, expect, timing)
        self._commands: deque[Command] = deque()
        self._events: deque[MemberEffect] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self.bytes_up = self.bytes_down = 0
        self._context = zmq.Context(io_threads=2)
        wake = f"inproc://narrows-{id(self)}"
        self._wake_in = self._context.socket(zmq.PAIR)
        self._wake_in.bind(wake)
        self._wake_out = self._context.socket(zmq.PAIR)
        self._wake_out.connect(wake)
        self._wake_lock = threading.Lock()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._control: zmq.Socket[bytes] | None = None
        self._inbound: zmq.Socket[bytes] | None = None  # what peers dial
        self._peers: dict[str, zmq.Socket[bytes]] = {}  # by address
        self._thread = threading.Thread(target=self._main, name="narrows-io", daemon=True)
        self._thread.start()
        self.call(lambda member, now: member.join(now))

    # Any thread.

    def call(self, command: Command) -> None:
        """Have the I/O thread run `command` and carry out its effects."""
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        """Have the I/O thread look. Where it has ended, or has so many of these before it, that is no reason to wait."""
        with self._wake_lock, contextlib.suppress(zmq.Again):
            self._wake_out.send(b"", zmq.NOBLOCK)

    def take(self, timeout_s: float) -> MemberEffect | None:
        """The next event, or None after `timeout_s`. Raises the error that ended the session."""
        with self._changed:
            if not self._events and self._error is None:
                self._changed.wait(timeout_s)
            if self._events:
                return self._events.popleft()
            if self._error is not None:
                raise self._error
        return None

    def close(self) -> None:
        """End the thread and its sockets; what was sent last has LINGER_MS to leave."""
        if not self._closing:
            self._closing = True
            self._wake()
            self._thread.join(10.0)
            self._wake_out.close(0)
            self._context.term() if not self._thread.is_alive() else None

    # The I/O thread.

    def _deliver(self, event: MemberEffect) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, LINGER_MS)
        made.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        made.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        made.setsockopt(zmq.MAXMSGSIZE, max(PAYLOAD_BYTES_MAX, HEADER_BYTES_MAX))
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        return made

    def _connect(self, poller: zmq.Poller, port: int) -> zmq.Socket[bytes]:
        dealer = self._socket(zmq.DEALER)
        dealer.connect(endpoint(self.host, port))
        poller.register(dealer, zmq.POLLIN)
        return dealer

    def _open_to_peers(self, poller: zmq.Poller) -> None:
        """Listen on the address by which the server's network knows this machine."""
        self._inbound = self._socket(zmq.ROUTER)
        host = own_host(self.host, self.port)
        port = self._inbound.bind_to_random_port(f"tcp://{host}")
        poller.register(self._inbound, zmq.POLLIN)
        self.member.address = f"tcp://{host}:{port}"

    def _dial(self, named: set[str]) -> None:
        """A DEALER for each peer that is named, and none for others."""
        for address in set(self._peers) - named:
            self._peers.pop(address).close()
        for address in named - set(self._peers) - {self.member.address}:
            parse_address("a peer's address", address)
            self._peers[address] = self._socket(zmq.DEALER)
            self._peers[address].connect(address)

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_in, zmq.POLLIN)
        try:
            self._control = self._connect(poller, self.port)
            self._sockets.append(self._connect(poller, self.port))
            ticked = time.monotonic_ns()
            while not self._closing or self._commands:
                ready = dict(poller.poll(TICK_MS))
                if self._wake_in in ready:
                    self._wake_in.recv()
                while self._commands:
                    command = self._commands.popleft()
                    self._apply(poller, command(self.member, time.monotonic_ns()))
                for shard, dealer in [(0, self._control), *enumerate(self._sockets)]:
                    for _ in range(BURST if dealer in ready else 0):
                        try:
                            frames = dealer.recv_multipart(zmq.NOBLOCK, copy=False)
                        except zmq.Again:
                            break
                        self.bytes_down += sum(len(frame.buffer) for frame in frames)
                        message = decode([frame.buffer for frame in frames])
                        self._apply(poller, self.member.receive(shard, message, time.monotonic_ns()))
                for _ in range(BURST if self._inbound in ready else 0):
                    if not self._hear_peer(poller):
                        break
                now = time.monotonic_ns()
                if now - ticked >= TICK_MS * 1_000_000:
                    ticked = now
                    self._apply(poller, self.member.tick(now))
        except BaseException as error:
            if isinstance(error, RemoteProtocolError):
                error = type(error)(f"{self.address}: {error}")
            self._fail(error)
        finally:
            for opened in (self._control, *self._sockets, *self._peers.values(), self._inbound):
                if opened is not None:
                    opened.close()
            self._wake_in.close(0)

    def _hear_peer(self, poller: zmq.Poller) -> bool:
        """Handle one message of a peer, if there is one. Bytes that are none of ours are dropped: anyone may dial."""
        assert self._inbound is not None
        try:
            _, *frames = self._inbound.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self.bytes_down += sum(len(frame.buffer) for frame in frames)
        try:
            message = decode([frame.buffer for frame in frames])
            effects = self.member.receive_peer(message, time.monotonic_ns())
        except NarrowsError as error:  # also of another version: who dials must not end what others have begun
            print(f"ps-worker: a peer's message was refused: {error}", file=sys.stderr)
            return True
        self._apply(poller, effects)
        return True

    def _apply(self, poller: zmq.Poller, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Tell):
                if effect.address in self._peers:
                    self._put(self._peers[effect.address], effect.message)
            elif isinstance(effect, Failed):
                kind: Any = BY_EXIT_CODE.get(effect.code, NarrowsError)
                self._fail(kind(f"{self.address}: {effect.text}"))
            else:
                if isinstance(effect, Joined):
                    for port in effect.ports[len(self._sockets) :]:
                        self._sockets.append(self._connect(poller, port))
                    mixes = Settings.unpacked(effect.settings).mode().rule is Rule.MIX
                    if mixes and self._inbound is None:
                        self._open_to_peers(poller)
                if isinstance(effect, RosterNews):
                    self._dial(set(effect.roster.addresses))
                self._deliver(effect)
                if isinstance(effect, Left):
                    return

    def _send(self, effect: Send) -> None:
        assert isinstance(effect.peer, int)
        if effect.peer >= len(self._sockets):
            return
        controls = self._control if isinstance(effect.message, m.CONTROL) else None
        self._put(controls or self._sockets[effect.peer], effect.message)

    def _put(self, dealer: zmq.Socket[bytes], message: m.Message) -> None:
        frames = encode(message)
        self.bytes_up += sum(map(len, frames))
        try:
            if len(frames) == 2 and len(frames[1]) >= ZERO_COPY_BYTES:
                dealer.send(frames[0], zmq.SNDMORE | zmq.NOBLOCK)
                dealer.send(frames[1], zmq.NOBLOCK, copy=False)
            else:
                dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            pass  # its queue is full: the request is repeated


def tell_left(address: str, token: str) -> None:
    """Tell a coordinator that the worker of `token` is gone, a few times, without waiting for its answer."""
    message = m.Leave(token, -1)
    host, port = parse_address("--server", address)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, LINGER_MS)
        dealer.connect(endpoint(host, port))
        dealer.send_multipart(encode(message))
        dealer.poll(LINGER_MS)
