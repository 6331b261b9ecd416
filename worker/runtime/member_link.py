"""A worker's link: runs its `Member` over a `Sockets`, in an I/O thread of its own.

How it works

    main thread      engine ── call(command) ──>  ┐              ┌── take() <── events
                                                  v              │
    I/O thread       Loop: commands, received messages, ticks ── Member ── effects ── _apply
                       │                                                               │ Send, SendToPeer
                       └──────────────────────── Sockets <─────────────────────────────┘

1. The constructor starts the I/O thread, which owns `Member` and `Sockets`, and gives it the command to join.
2. Other threads give commands with `call`. The I/O thread runs them on the member and carries out the effects.
3. `_hear` gives a received message to the member. `_tick` gives it the time.
4. Effects are sent, change the addresses that are dialled, or are delivered to the engine, which takes them with
   `take`.
5. An error of the session is kept; each later `take` raises it, once all events before it are taken.

Each shard is dialled, and shard 0 a second time for messages that must not wait behind large ones (`CONTROL`). Under
gossip peers are dialled too, and peers dial this worker, or come through a relay (reverse_tunnel.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from narrows.protocols import messages as m
from narrows.protocols.addresses import (
    KEYLESS,
    at_relay,
    behind,
    is_address,
    is_mailbox,
    parse_address,
    parse_addresses,
    parse_mailbox,
    parted,
    reached_by,
)
from narrows.protocols.config.timing import SILENT_BEATS, Timing
from narrows.protocols.effects import (
    NS,
    MemberEffect,
    MemberFailed,
    MemberResharded,
    MemberWelcomed,
    RosterChanged,
    Send,
    SendToPeer,
    ServerChanged,
)
from narrows.protocols.errors import (
    BY_EXIT_CODE,
    AuthenticationError,
    IncompatibleError,
    NarrowsError,
    RemoteProtocolError,
    UnreachableError,
    UsageError,
)
from narrows.protocols.gossip.relay_ticket import checked
from narrows.protocols.member.member import Member, MemberPhase
from narrows.protocols.member.push_trace import PushTrace
from narrows.protocols.runtime.mailbox.mailbox import Mailbox
from narrows.protocols.runtime.mailbox.stores import MeteredStore, opened, store_of
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.curve_auth import NOBODY, CurveKeys, DiallerId, HandshakeFailure, KeyPair
from narrows.protocols.runtime.network.hosts import endpoint, own_host, unknown
from narrows.protocols.runtime.network.key_files import SecretKeyFile, keyed, refusal
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.reverse_tunnel import ReverseTunnel
from narrows.protocols.runtime.network.sockets import LINGER_MS, Drops, Peer, Receipt, Sockets
from narrows.protocols.wire import decode, encode
from narrows.worker.runtime import launcher_pipe
from narrows.worker.runtime.child_process import NotAWorkerError
from narrows.worker.runtime.launcher_pipe import say_here

TRY_S = 5.0  # wait for one of several servers before the next one is dialled
SILENT_NS = 3 * NS  # the server sends each member a message at least once a second
CLOSE_S = 10.0  # wait for the thread, which ends within a tick, and its sockets within LINGER_MS

Command = Callable[[Member, int], list[MemberEffect]]


class LinkEvents:
    """The queue of events from the thread that receives them to the thread that takes them."""

    def __init__(self) -> None:
        self._pid = os.getpid()  # the process with the receiving thread; a fork of it has none
        self._events: deque[MemberEffect] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def take(self, timeout_s: float) -> MemberEffect | None:
        """Return the next event, or None after `timeout_s` seconds.

        Raises the error that has ended the session, or NotAWorkerError in a child process.
        """
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

    run_clock = 0  # the run's clock, as the server has sent it last
    relayed = False, 0  # peers come through a relay; their bytes
    waits = ""  # a clause that says for which members the run waits; "": none
    ways: Sequence[str] = ()  # by shard, how its large messages go, of WAYS
    pushes: PushTrace | None = None  # of this link, with --trace
    store: MeteredStore | None = None  # of the mailbox; None: this worker meets its server over sockets

    def call(self, command: Command) -> None:
        raise NotImplementedError

    def trace(self, every: int) -> PushTrace:
        """Trace the updates of the clocks that `every` divides, from now on."""
        self.pushes = PushTrace(every)
        return self.pushes

    def send(self, shard: int, messages: Sequence[m.Message]) -> None:
        """Send the messages of an `Exchange` to its shard, if there are any."""
        if messages:
            self.call(lambda member, now: member.send(shard, messages, now))

    def send_each(self, messages: Mapping[int, Sequence[m.Message]]) -> None:
        """Send the messages of each shard, by its number."""
        for shard, each in messages.items():
            self.send(shard, each)

    def write_in_place(self) -> None:
        self.call(lambda member, now: member.write_in_place())

    def declare(self, plan: bytes) -> None:
        self.call(lambda member, now: member.declare(plan, now))

    def buffers(self, packed: bytes, clock: int) -> None:
        self.call(lambda member, now: member.buffers(packed, clock))

    def ask_buffers(self, clock: int) -> None:
        self.call(lambda member, now: member.ask_buffers(clock))

    def ask_range(self, ask: m.RangeRequest) -> None:
        self.call(lambda member, now: member.send(0, [ask], now))

    def holds_at(self, number: int, clock: int) -> None:
        """Acknowledge the Reshard of this number, with the clock that this worker holds at."""
        self.call(lambda member, now: member.holds_at(number, clock, now))

    def ask_agreed(self, ask: m.AgreeRequest) -> None:
        self.call(lambda member, now: member.send(0, [ask], now))

    def leave(self, clock: int) -> None:
        self.call(lambda member, now: member.leave(clock, now))

    def ask_link(self) -> None:
        """Ask for the link's figures, which arrive as an event `LinkMeasured`."""
        self.call(lambda member, now: [member.meter.read()])


class SilenceNotice:
    """Tells the user of a silent server long before it counts as lost. Else steps would stop without a reason."""

    def __init__(self) -> None:
        self._told = False

    def sentence(self, member: Member, address: str, now_ns: int) -> str:
        """Return a sentence when the server falls silent, and another when it answers again; else ""."""
        beat_ns = member.timing.beat_ns(member.settings.lease)
        limit_ns = max(SILENT_NS, SILENT_BEATS * beat_ns)
        silent = member.phase is MemberPhase.RUNNING and now_ns - member.heard_ns >= limit_ns
        if silent == self._told:
            return ""
        self._told = silent
        if not silent:
            return f"the server at {address} answers again" if member.phase is MemberPhase.RUNNING else ""
        standby = f", or until its standby at {member.views.standby} serves" if member.views.standby else ""
        lost_s, silent_s = member.timing.lost_ns / NS, limit_ns / NS
        return f"the server at {address} has not answered for {silent_s:g} s; waiting up to {lost_s:g} s{standby}"


class MemberLink(LinkEvents, LinkCommands):
    """The session of this process with its server. Its owner must call close().

    Args:
        address: HOST:PORT of the server.
        token: identifies this worker to the coordinator, also after a reconnect.
        host: the name of this machine.
        expect: the flags of the run that ps-worker was given, a msgpack map. The coordinator refuses a contradiction.
        timing: the limits of all waits.
        key: the worker's key pair and the server's public key; None without encryption.
    """

    def __init__(
        self,
        address: str,
        token: str,
        host: str,
        expect: bytes,
        timing: Timing | None = None,
        key: SecretKeyFile | None = None,
    ) -> None:
        super().__init__()
        self.address, self.key = address, key
        self.host, self.port = ("", 0) if is_mailbox(address) else parse_address("--server", address)
        self.clock = AwakeClock()
        self.bytes_up = self.bytes_down = 0
        self.drops = Drops(say_here)
        self._shards = [self._endpoint(0, self.port)]  # the endpoint of each shard
        self._tunnel: ReverseTunnel | None = None  # by which peers come; None: they dial this worker
        self._standby = ""  # the endpoint of the standby; "": not dialled
        self._silence = SilenceNotice()
        self._peers: set[str] = set()  # gossip peers that are dialled
        self._names: dict[str, bytes] = {}  # by peer, the prefix of this worker's routing ids there
        self._admitted: frozenset[str] = frozenset()  # public keys of the peers
        name = os.urandom(m.NAME_BYTES)  # the prefix of this worker's routing ids at the server, secret from peers
        timing = timing or Timing()
        self._sockets: Mailbox | Sockets
        if is_mailbox(address):
            store = partial(opened, limit_s=timing.connect_ns / NS)
            self._sockets = mailbox = mailbox_at(address, key, store, name, self._linked, self.drops.refuse)
            self.store, timing = mailbox.store, timing.through_mailbox(mailbox.round_trip_s)
        else:
            self._sockets = Sockets(
                io_threads=2,
                known_as=lambda address: (
                    name if address in (self._standby, *self._shards) else self._names.get(address, b"")
                ),
                curve=CurveKeys(key.pair, partial(self._keys_at, key), lambda public: public in self._admitted)
                if key is not None
                else None,
                failed=self._shut_out,
                linked=self._linked,
                cut=self._cut,
                faulted=self.drops.refuse,
            )
        self.member = Member(token, host, expect, timing)
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

    @property
    def ways(self) -> Sequence[str]:  # type: ignore[override]
        return [self._sockets.way(each) for each in self._shards]

    def call(self, command: Command) -> None:
        """Have the I/O thread run `command` and carry out its effects. Raises NotAWorkerError in a child process."""
        self._only_here()
        self._loop.call(lambda: self._apply(command(self.member, self.clock.now())))

    def send_each(self, messages: Mapping[int, Sequence[m.Message]]) -> None:
        """Send the messages of each shard in one command: the I/O thread wakes once, and takes the GIL once."""
        self.call(lambda member, now: [effect for each in messages.items() for effect in member.send(*each, now)])

    def listen(self) -> None:
        """Let peers dial this worker, on the address of this machine in the server's network."""

        def open_to_peers(member: Member, now_ns: int) -> list[MemberEffect]:
            assert isinstance(self._sockets, Sockets)  # a server with a mailbox refuses gossip
            host = own_host(self.host, self.port)
            member.reached_at(keyed(f"tcp://{host}:{self._sockets.listen(f'tcp://{host}:0')}", self.key))
            return []

        self.call(open_to_peers)

    def open_tunnel(self) -> None:
        """Let peers reach this worker through the relay of the run, and in its own network.

        Raises:
            IncompatibleError: the run has no relay.
            RemoteProtocolError: the server sent a ticket that is none.
        """
        ticket = self.member.welcome.relay if self.member.welcome is not None else ()
        if not ticket:
            raise IncompatibleError(
                f"--relay: the server at {self.address} names no relay: --sync gossip has one, with --one-port or with "
                "--relay-at ADDR, the address of a ps-serve relay; give one of these there, or leave --relay out"
            )
        name, key, relay = checked(ticket)

        def open_to_relay(member: Member, now_ns: int) -> list[MemberEffect]:
            assert isinstance(self._sockets, Sockets)  # a server with a mailbox has no relay
            port, limit_s = self._sockets.listen("tcp://127.0.0.1:0", ""), member.timing.connect_ns / NS
            place, host = relay or f"tcp://{self.host}:{self.port}", own_host(self.host, self.port)
            self._tunnel = ReverseTunnel(place, host, name, key, port, limit_s, say_here, self._fail)
            member.reached_at(keyed(at_relay(relay, name, self._tunnel.near), self.key))
            return []

        self.call(open_to_relay)

    @property
    def relayed(self) -> tuple[bool, int]:  # type: ignore[override]
        """Whether peers reach this worker through a relay, and the bytes of these peers as the relay has counted them."""
        return (True, self._tunnel.peer_bytes.total) if self._tunnel is not None else (False, 0)

    def close(self) -> None:
        """End the thread and its sockets; last messages have LINGER_MS to leave. Does nothing in a child process."""
        if os.getpid() != self._pid:
            return
        self._loop.stop()
        self._thread.join(CLOSE_S)

    # The I/O thread.

    def _main(self) -> None:
        try:
            if self.host and (why := unknown(self.host)):  # a manager may register the name a moment later
                launcher_pipe.say(
                    f"{self.address}: {why}; waiting up to {self.member.timing.connect_ns / NS:g} s for it ..."
                )
            self._loop.run(self.clock.turn)
        except BaseException as error:
            self._fail(type(error)(f"{self.address}: {error}") if isinstance(error, RemoteProtocolError) else error)
        finally:
            self._sockets.close()
            if self._tunnel is not None:
                self._tunnel.close()

    def _tick(self, now_ns: int) -> None:
        self._apply(self.member.tick(now_ns))
        if text := self._silence.sentence(
            self.member, f"tcp://{self.host}:{self.port}" if self.host else self.address, now_ns
        ):
            say_here(text)

    def _hear(self, peer: Peer, frames: list[m.Buffer]) -> None:
        if peer in self._shards:
            self.bytes_down += sum(map(len, frames))
            shard, message, now_ns = self._shards.index(peer), decode(frames), self.clock.now()
            if self.pushes is not None:
                self.pushes.heard(shard, message, now_ns)
            if isinstance(message, m.Roster):
                message = replace(message, addresses=tuple(self._reached_by(each) for each in message.addresses))
            self._apply(self.member.receive(shard, message, now_ns))
        elif peer == self._standby:
            self.bytes_down += sum(map(len, frames))
            self._apply(self.member.receive_standby(decode(frames), self.clock.now()))
        elif isinstance(peer, bytes):
            self.bytes_down += sum(map(len, frames))
            try:
                message = decode(frames)
                self._check_speaker(peer, message)
                sender = None if isinstance(peer, DiallerId) else peer  # else its key was checked
                effects = self.member.receive_peer(message, self.clock.now(), sender)
            except NarrowsError as error:  # also for another version: no peer may end this session
                self.drops.refuse(f"a peer's message was refused: {error}")
            else:
                self._apply(effects)

    def _apply(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(int(shard), message):
                    if shard < len(self._shards):
                        if self.pushes is not None:
                            self.pushes.sent(shard, message, self.clock.now())
                        self._put(self._shards[shard], message)
                case SendToPeer(address, message):
                    if address in self._peers:
                        self._put(address, message)
                    elif isinstance(message, m.FailoverVote) and is_address(address):
                        self._standby = endpoint(*parse_address("", address))
                        self._put(self._standby, message)
                case ServerChanged(address, ports):
                    self._move(address, ports)
                case MemberFailed(code, text):
                    if isinstance(self._sockets, Mailbox):
                        text = of_silent_mailbox(code, text, self.member.timing, self._sockets.trouble)
                    elif code == m.RefuseCode.UNREACHABLE and (why := unknown(self.host)):
                        text = f"{why}; check the name"
                    self._fail(BY_EXIT_CODE.get(code, NarrowsError)(f"{self.address}: {text}"))
                case _:
                    if isinstance(effect, (MemberWelcomed, MemberResharded)):
                        self._find(effect.ports, effect.hosts)
                    elif isinstance(effect, RosterChanged):
                        self._dial(effect.roster)
                    self._deliver(effect)

    def _move(self, address: str, ports: tuple[int, ...]) -> None:
        """Dial the new server after a failover. It knows this worker as the lost server did."""
        for gone in {self._standby, *self._shards}:
            self._sockets.hang_up(gone)
        (self.host, self.port), self._standby = parse_address("", address), ""
        self._shards = [self._endpoint(shard, port) for shard, port in enumerate(ports)]
        self._silence = SilenceNotice()
        say_here(f"the standby at {address} serves now; training goes on")

    def _find(self, ports: tuple[int, ...], hosts: tuple[str, ...]) -> None:
        """Set the endpoints of the shards, and hang up on others. Shard 0 keeps its endpoint."""
        others = list(enumerate(zip(hosts or ("",) * len(ports), ports, strict=True)))[1:]
        there = [self._shards[0], *(self._endpoint(shard, port, host) for shard, (host, port) in others)]
        for gone in set(self._shards) - set(there):
            self._sockets.hang_up(gone)
        self._shards = there

    def _reached_by(self, address: str) -> str:
        """Return where a peer is reached that has declared this address."""
        return reached_by(address, f"{self.host}:{self.port}")

    def _endpoint(self, shard: int, port: int, host: str = "") -> str:
        """Return the endpoint of a shard by its port and its host, which are as `are_addresses` has them."""
        if is_mailbox(self.address):
            return behind(self.address, shard)
        if port:
            return endpoint(host or self.host, port)
        return endpoint(*(parse_address("", f"tcp://{host}") if host else (self.host, self.port)), shard)

    def _dial(self, roster: m.Roster) -> None:
        """Dial the peers of the roster, and hang up on others. A peer with an invalid address will count as silent."""
        ours = self._reached_by(self.member.address)
        named = {address for address in roster.addresses if is_address(address)} - {ours}
        names = {address: name.encode() for address, name in zip(roster.addresses, roster.names, strict=False)}
        for gone in {*(self._peers - named), *(each for each in self._names if self._names[each] != names.get(each))}:
            self._sockets.hang_up(gone)
        self._names = names
        self._peers, self._admitted = named, frozenset(parted(address)[1] for address in named) - {""}

    # Keys.

    def _keys_at(self, key: SecretKeyFile, address: str) -> tuple[KeyPair, str]:
        return key.pair, (parted(address)[1] or NOBODY) if address in self._peers else key.server

    def _check_speaker(self, peer: bytes, message: m.Message) -> None:
        """Raise RemoteProtocolError if a peer sends a message with the number of another worker."""
        if not isinstance(peer, DiallerId):
            return
        peers = self.member.peers
        known = peers.peers.get(getattr(message, "worker", -1)) if peers is not None else None
        if known is None or parted(known.address)[1] != peer.key:  # the peer repeats it; our roster may know it then
            raise RemoteProtocolError("its number is not that of the worker whose key it has")

    def _shut_out(self, address: str, why: HandshakeFailure, public: str) -> None:
        """Handle a failed handshake. A peer may not know this worker's key yet; the next message dials it anew."""
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


def of_silent_mailbox(code: int, text: str, timing: Timing, trouble: str) -> str:
    """Return a sentence for a server that does not answer in its mailbox; other sentences as they are.

    Args:
        code: of the error.
        text: its sentence.
        timing: the limits of the waits.
        trouble: why requests to the store fail, "": they do not.
    """
    if code not in (m.RefuseCode.UNREACHABLE, m.RefuseCode.SERVER_LOST):
        return text
    if trouble:
        return f"{text.partition(';')[0]}; the store fails ({trouble})"
    if code == m.RefuseCode.SERVER_LOST:
        return text
    limit = f"{timing.connect_ns / NS:g} s"
    return f"no server answered within {limit}; check that ps-serve runs with this --via, and that it lists this key"


def mailbox_at(
    address: str,
    key: SecretKeyFile | None,
    store: Callable[[str], MeteredStore],
    name: bytes = b"",
    linked: Callable[[str], None] = lambda address: None,
    refused: Callable[[str], None] = lambda text: None,
) -> Mailbox:
    """Return the mailbox of a server.

    Args:
        address: of the mailbox.
        key: the worker's key; there is none without.
        store: opens the store of this address.
        name, linked, refused: as in `Mailbox`.

    Raises:
        NarrowsError: the store cannot be used, or there is no key.
    """
    if key is None:
        raise UsageError(f"--server {address}: {KEYLESS}")
    address = parse_mailbox("--server", address)
    return Mailbox(address, store(address), key.pair, server=key.server, name=name, linked=linked, refused=refused)


def tell_store(link: MemberLink, rank: int) -> None:
    """Tell ps-worker and the user what a worker has asked of the store of its mailbox, if it has one."""
    if link.store is not None:
        launcher_pipe.tell("mailbox", address=link.address, **link.store.counts.told())
        launcher_pipe.say(f"rank {rank} asked {link.address}: {link.store.counts.text()}")


def tell_left(address: str, token: str, key: SecretKeyFile | None = None) -> None:
    """Tell the coordinator that the worker of `token` has left, and wait up to LINGER_MS for the answer."""
    if is_mailbox(address):
        # Without a test of the store: this Leave has to come before the Hello of the process that takes its place.
        with contextlib.closing(mailbox_at(address, key, lambda there: MeteredStore(store_of(there)))) as mailbox:
            mailbox.send(mailbox.address, encode(m.Leave(token, -1)))  # closing waits until it was taken
        return
    curve = CurveKeys(None, lambda address: (key.pair, key.server), lambda public: False) if key is not None else None
    with contextlib.closing(Sockets(curve=curve)) as sockets:
        for one in parse_addresses("--server", address):
            sockets.send(endpoint(*parse_address("--server", one)), encode(m.Leave(token, -1)))
        next(iter(sockets.receive(LINGER_MS)), None)


def let_in(
    addresses: Sequence[str], dial: Callable[[str, float], MemberLink], connect_s: float
) -> tuple[MemberLink, MemberWelcomed]:
    """Dial each address in turn until a server admits this worker.

    Args:
        addresses: the server and its standbys; a standby refuses while it does not serve.
        dial: opens a link to one address, with a limit in seconds.
        connect_s: the limit for all attempts together, in seconds.

    Returns:
        The link to the server, and this worker's place in the run.

    Raises:
        UnreachableError: no server has answered in time.
        NarrowsError: the first server's refusal, if all have refused.
    """
    deadline = time.monotonic() + connect_s
    try_s = connect_s if len(addresses) == 1 else min(TRY_S, connect_s)
    while True:
        errors = list[NarrowsError]()
        for address in addresses:
            link = dial(address, try_s)
            try:
                return link, _joined(link, try_s)
            except NarrowsError as error:
                link.close()
                errors.append(error)
        if not any(isinstance(error, UnreachableError) for error in errors) or len(addresses) == 1:
            raise errors[0]
        if time.monotonic() > deadline:
            raise UnreachableError(f"none of {', '.join(addresses)} let this worker in within {connect_s:.0f} s")


def _joined(link: MemberLink, limit_s: float) -> MemberWelcomed:
    deadline = time.monotonic() + limit_s + 1
    while not isinstance(joined := link.take(0.5), MemberWelcomed):
        if time.monotonic() > deadline:
            raise UnreachableError(f"{link.address}: the server did not let this worker in within {limit_s:.0f} s")
    return joined
