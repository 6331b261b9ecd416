"""Runs a `Member` over a `Sockets`, in a thread of its own. That thread owns both: other threads hand it commands with `call`,
and take what it delivers with `take`.

Each shard is dialled, and shard 0 once more for what must not wait behind large messages (`CONTROL`); under gossip each peer
too, and they dial us.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from narrows.protocols import messages as m
from narrows.protocols.addresses import is_address, parse_address, parse_addresses, parted
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS, Failed, Joined, MemberEffect, Moved, RosterNews, Send, SendToPeer, Turned
from narrows.protocols.errors import BY_EXIT_CODE, AuthenticationError, NarrowsError, RemoteProtocolError
from narrows.protocols.member.member import Member
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.curve_auth import NOBODY, CurveKeys, DiallerId, HandshakeFailure, KeyPair
from narrows.protocols.runtime.network.hosts import endpoint, own_host, unknown
from narrows.protocols.runtime.network.key_files import Secret, keyed, refusal
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import LINGER_MS, Drops, Peer, Receipt, Sockets
from narrows.protocols.wire import decode, encode
from narrows.worker.runtime import launcher_pipe
from narrows.worker.runtime.child_process import NotAWorkerError
from narrows.worker.runtime.launcher_pipe import complain as say
from narrows.worker.runtime.server_silence_notice import SilenceNotice

CLOSE_S = 10.0  # the thread ends within a tick, and its sockets within LINGER_MS

Command = Callable[[Member, int], list[MemberEffect]]


class LinkEvents:
    """From the thread that hears them to the one that takes them."""

    def __init__(self) -> None:
        self._pid = os.getpid()  # of the process that hears them: one that is forked from it has no thread
        self._events: deque[MemberEffect] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def take(self, timeout_s: float) -> MemberEffect | None:
        """The next event, or None after `timeout_s`. Raises the error that ended the session, NotAWorkerError in a child
        process."""
        self._only_here()
        with self._changed:
            if not self._events and self._error is None:
                self._changed.wait(timeout_s)
            if self._events:
                return self._events.popleft()
            if self._error is not None:
                raise self._error
        return None

    def _only_here(self) -> None:
        if os.getpid() != self._pid:
            raise NotAWorkerError("a step, the shared model or finish()")

    def _deliver(self, event: MemberEffect) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class LinkCommands:
    """The commands that an engine gives the I/O thread."""

    run_clock = 0  # of the run, as the server has told last
    waits = ""  # for which members the run waits, a clause; "": for none

    def call(self, command: Command) -> None:
        raise NotImplementedError

    def say(self, shard: int, messages: Sequence[m.Message]) -> None:
        self.call(lambda member, now: member.say(shard, messages, now))

    def declare(self, plan: bytes) -> None:
        self.call(lambda member, now: member.declare(plan, now))

    def buffers(self, packed: bytes, clock: int) -> None:
        self.call(lambda member, now: member.buffers(packed, clock))

    def ask_buffers(self, clock: int) -> None:
        self.call(lambda member, now: member.ask_buffers(clock))

    def ask_range(self, ask: m.RangeAsk) -> None:
        self.call(lambda member, now: member.say(0, [ask], now))

    def ask_agreed(self, ask: m.AgreeAsk) -> None:
        self.call(lambda member, now: member.say(0, [ask], now))

    def leave(self, clock: int) -> None:
        self.call(lambda member, now: member.leave(clock, now))

    def ask_link(self) -> None:
        """Ask what the link does; the answer is the next event."""
        self.call(lambda member, now: [member.meter.read()])


class MemberLink(LinkEvents, LinkCommands):
    """The session of this process with its server. Close it; it is a context manager of nothing but its own thread."""

    def __init__(
        self,
        address: str,
        token: str,
        host: str,
        expect: bytes,
        timing: Timing | None = None,
        key: Secret | None = None,
    ) -> None:
        super().__init__()
        self.address, self.key = address, key
        self.host, self.port = parse_address("--server", address)
        self.member = Member(token, host, expect, timing)
        self.clock = AwakeClock()
        self.bytes_up = self.bytes_down = 0
        self.drops = Drops(say)
        self._shards = [endpoint(self.host, self.port)]  # where each is dialled
        self._standby = ""  # where it is dialled
        self._silence = SilenceNotice()
        self._peers: set[str] = set()  # of gossip, that are dialled
        self._names: dict[str, bytes] = {}  # of each, how our routing ids begin there
        self._admitted: frozenset[str] = frozenset()  # their keys
        name = os.urandom(m.NAME_BYTES)  # that the server knows us by; no peer hears it
        self._sockets = Sockets(
            io_threads=2,
            known_as=lambda address: (
                name if address in (self._standby, *self._shards) else self._names.get(address, b"")
            ),
            curve=CurveKeys(key.pair, self._keys_at, lambda public: public in self._admitted)
            if key is not None
            else None,
            failed=self._shut_out,
            linked=self._linked,
            cut=self._cut,
            faulted=self.drops.refuse,
        )
        self._loop = Loop(self._sockets, self._hear, self._tick)
        self._thread = threading.Thread(target=self._main, name="narrows-io", daemon=True)
        self._thread.start()
        self.call(lambda member, now: member.join(now))

    # Any thread.

    @property
    def run_clock(self) -> int:  # type: ignore[override]
        return self.member.run_clock

    @property
    def waits(self) -> str:  # type: ignore[override]
        return self.member.waits

    def call(self, command: Command) -> None:
        """Have the I/O thread run `command` and carry out its effects. Raises NotAWorkerError in a child process."""
        self._only_here()
        self._loop.call(lambda: self._apply(command(self.member, self.clock.now())))

    def listen(self) -> None:
        """Let peers dial this worker: on the address by which the server's network knows this machine."""

        def open_to_peers(member: Member, now_ns: int) -> list[MemberEffect]:
            host = own_host(self.host, self.port)
            member.address = keyed(f"tcp://{host}:{self._sockets.listen(f'tcp://{host}:0')}", self.key)
            return []

        self.call(open_to_peers)

    def close(self) -> None:
        """End the thread and its sockets; what was sent last has LINGER_MS to leave. In a child process: nothing."""
        if os.getpid() != self._pid:
            return
        self._loop.stop()
        self._thread.join(CLOSE_S)

    # The I/O thread.

    def _main(self) -> None:
        try:
            if why := unknown(self.host):  # a manager may give it its name a moment later
                launcher_pipe.say(
                    f"{self.address}: {why}; waiting up to {self.member.timing.connect_ns / NS:g} s for it ..."
                )
            self._loop.run(self.clock.turn)
        except BaseException as error:
            self._fail(type(error)(f"{self.address}: {error}") if isinstance(error, RemoteProtocolError) else error)
        finally:
            self._sockets.close()

    def _tick(self, now_ns: int) -> None:
        self._apply(self.member.tick(now_ns))
        if text := self._silence.sentence(self.member, f"tcp://{self.host}:{self.port}", now_ns):
            say(text)

    def _hear(self, peer: Peer, frames: list[m.Buffer]) -> None:
        if peer in self._shards:
            self.bytes_down += sum(map(len, frames))
            self._apply(self.member.receive(self._shards.index(peer), decode(frames), self.clock.now()))
        elif peer == self._standby:
            self.bytes_down += sum(map(len, frames))
            self._apply(self.member.receive_standby(decode(frames), self.clock.now()))
        elif isinstance(peer, bytes):
            self.bytes_down += sum(map(len, frames))
            try:
                message = decode(frames)
                self._check_speaker(peer, message)
                sender = None if isinstance(peer, DiallerId) else peer  # else its key was looked at
                effects = self.member.receive_peer(message, self.clock.now(), sender)
            except NarrowsError as error:  # of another version too: who dials must not end what others began
                self.drops.refuse(f"a peer's message was refused: {error}")
            else:
                self._apply(effects)

    def _apply(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(int(shard), message):
                    if shard < len(self._shards):
                        self._put(self._shards[shard], message)
                case SendToPeer(address, message):
                    if address in self._peers:
                        self._put(address, message)
                    elif isinstance(message, m.FailoverVote) and is_address(address):
                        self._standby = endpoint(*parse_address("", address))
                        self._put(self._standby, message)
                case Turned(address, ports):
                    self._move(address, ports)
                case Failed(code, text):
                    if code == m.RefuseCode.UNREACHABLE and (why := unknown(self.host)):
                        text = f"{why}; check the name"
                    self._fail(BY_EXIT_CODE.get(code, NarrowsError)(f"{self.address}: {text}"))
                case _:
                    if isinstance(effect, (Joined, Moved)):
                        self._find(effect.ports, effect.hosts)
                    elif isinstance(effect, RosterNews):
                        self._dial(effect.roster)
                    self._deliver(effect)

    def _move(self, address: str, ports: tuple[int, ...]) -> None:
        """The server is another one from now on, and knows us as the one before did."""
        for gone in {self._standby, *self._shards}:
            self._sockets.hang_up(gone)
        (self.host, self.port), self._standby = parse_address("", address), ""
        self._shards = [endpoint(self.host, port) for port in ports]
        self._silence.told = False
        say(f"the standby at {address} serves now; training goes on")

    def _find(self, ports: tuple[int, ...], hosts: tuple[str, ...]) -> None:
        """The shards are there, and nowhere else; the first stays where it is."""
        others = list(zip(hosts or ("",) * len(ports), ports, strict=True))[1:]
        there = [self._shards[0], *(endpoint(host or self.host, port) for host, port in others)]
        for gone in set(self._shards) - set(there):
            self._sockets.hang_up(gone)
        self._shards = there

    def _dial(self, roster: m.Roster) -> None:
        """Those who are named, and no others. An address that is none: its owner will count as silent."""
        named = {address for address in roster.addresses if is_address(address)} - {self.member.address}
        names = {address: name.encode() for address, name in zip(roster.addresses, roster.names, strict=False)}
        for gone in {*(self._peers - named), *(each for each in self._names if self._names[each] != names.get(each))}:
            self._sockets.hang_up(gone)
        self._names = names
        self._peers, self._admitted = named, frozenset(parted(address)[1] for address in named) - {""}

    # Keys.

    def _keys_at(self, address: str) -> tuple[KeyPair, str]:
        assert self.key is not None
        return self.key.pair, (parted(address)[1] or NOBODY) if address in self._peers else self.key.server

    def _check_speaker(self, peer: bytes, message: m.Message) -> None:
        """Raise RemoteProtocolError where a peer speaks with another's number."""
        if not isinstance(peer, DiallerId):
            return
        peers = self.member.peers
        known = peers.peers.get(getattr(message, "worker", -1)) if peers is not None else None
        if known is None or parted(known.address)[1] != peer.key:  # it says it again, when our roster may have it
            raise RemoteProtocolError("its number is not that of the worker whose key it has")

    def _shut_out(self, address: str, why: HandshakeFailure, public: str) -> None:
        """A handshake has failed. A peer may not know of us yet: the next message to it dials anew."""
        if not address:
            self.drops.note("stranger", Receipt(why.value))
        elif address in (self._standby, *self._peers):
            self._sockets.hang_up(address)
        elif text := refusal(why, self.key, "--key"):
            self._fail(AuthenticationError(f"{self.address}: {text}"))

    def _linked(self, address: str) -> None:
        if address in self._shards:
            self.member.repeat_soon(self._shards.index(address))

    def _cut(self, peer: Peer) -> None:
        if peer in self._shards:
            self.member.cut(self._shards.index(peer), self.clock.now())

    def _put(self, to: str, message: m.Message) -> None:
        frames = encode(message)
        self.bytes_up += sum(map(len, frames))
        receipt = self._sockets.send(to, frames, control=isinstance(message, m.CONTROL))
        self.drops.note(type(message).__name__, receipt)


def tell_left(address: str, token: str, key: Secret | None = None) -> None:
    """Tell a coordinator that the worker of `token` is gone, and wait a little for its answer."""
    curve = CurveKeys(None, lambda address: (key.pair, key.server), lambda public: False) if key is not None else None
    with contextlib.closing(Sockets(curve=curve)) as sockets:
        for one in parse_addresses("--server", address):
            sockets.send(endpoint(*parse_address("--server", one)), encode(m.Leave(token, -1)))
        next(iter(sockets.receive(LINGER_MS)), None)
