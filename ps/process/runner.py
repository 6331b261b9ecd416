"""Runs one server process over ZeroMQ: the only file of ps/ that knows sockets, clocks and files together.

A ROUTER takes workers (and, in process 0, the other shards, and other clusters that gossip); process i > 0 also dials process
0 with a DEALER, and each the clusters that it gossips with. One thread owns everything. It has no rule of its own: messages and
ticks go into the machine, effects are carried out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import zmq

from narrows.protocols import messages as m
from narrows.protocols.cluster.coordinator import Coordinator
from narrows.protocols.effects import NS, Checkpoint, Load, Log, Send, ServerEffect, Stop, Tell
from narrows.protocols.errors import BY_EXIT_CODE, NarrowsError, RemoteProtocolError, UsageError
from narrows.protocols.member.member import Member
from narrows.protocols.modes import Rule
from narrows.protocols.plan import Plan
from narrows.protocols.runtime.flags import parse_address
from narrows.protocols.settings import Settings
from narrows.protocols.timing import Timing
from narrows.protocols.wire import HEADER_BYTES_MAX, LOCAL_HOSTS, PAYLOAD_BYTES_MAX, decode, encode, local_endpoint
from narrows.ps import store
from narrows.ps.planned import Means
from narrows.ps.process import checkpoints
from narrows.ps.reports import COORDINATOR
from narrows.ps.server import OF_CLUSTERS, Server
from narrows.ps.shard import Shard
from narrows.ps.store import ServerOptimizer

TICK_MS = 20  # longest time without a tick
QUEUE_MESSAGES_MAX = 4 * m.PARTS_MAX  # one state of the largest shard, four times: beyond it a slow peer loses messages
ZERO_COPY_BYTES = 1 << 16  # below it pyzmq copies anyway
LINGER_MS = 2000  # what was sent last may take so long to leave
STOP_S = 20.0  # shards that do not come to rest within this are ended as they are
RECONNECT_MS_MAX = 2000
BURST = 64  # messages handled between two looks at the clock


@dataclass(frozen=True)
class Process:
    """What one server process is told."""

    index: int
    settings: Settings
    bind: str  # tcp://host:port; port 0 or * takes any
    coordinator: str  # address of process 0, "" in it
    first_epoch: int
    checkpoint_dir: str
    resume: bool
    parent: str = ""  # address of process 0 of the server above, where there is one
    parent_timeout: float = 30.0


def _optimizers() -> Callable[[Plan, int, int], ServerOptimizer]:
    from narrows.ps.optimizers import TorchOptimizer, warm_up  # seconds of imports that adding updates can do without

    warm_up()
    return TorchOptimizer


class Lent:
    """Trackers of the frames that ZeroMQ may still read."""

    def __init__(self) -> None:
        self.trackers: list[zmq.MessageTracker] = []

    def __call__(self) -> bool:
        self.trackers = [tracker for tracker in self.trackers if not tracker.done]
        return bool(self.trackers)


def bind(router: zmq.Socket[bytes], address: str) -> int:
    """Bind and return the port. Raises UsageError naming the address."""
    try:
        router.bind(address.removesuffix(":0") + ":*" if address.endswith(":0") else address)
    except zmq.ZMQError as error:
        raise UsageError(f"cannot listen on {address}: {error.strerror}; is another ps-serve running there?") from None
    host, port = router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rsplit(":", 1)
    if sys.platform == "linux" and host in ("0.0.0.0", *LOCAL_HOSTS):
        router.bind(local_endpoint(int(port)))
    return int(port)


def reached(bound: str, parent: str) -> str:
    """The host by which other clusters reach what is bound to `bound`: that itself, or the address that leads to `parent`."""
    host = bound.removeprefix("tcp://").rpartition(":")[0]
    if host not in ("0.0.0.0", "*", "[::]"):
        return host
    above = parse_address("--parent", parent)
    with contextlib.suppress(OSError):
        family, kind, protocol, _, target = socket.getaddrinfo(*above, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # UDP: nothing is sent
            found = str(probe.getsockname()[0])
        return f"[{found}]" if ":" in found else found
    return socket.gethostname()


def keys_that_fit() -> int:
    """Parameters whose master copy and published copy, float32 each, this machine's memory holds."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8


def emit(event: str, **values: Any) -> None:
    """One line of JSON for the parent process, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps({"event": event, **values}).encode() + b"\n")


def limit(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, max(PAYLOAD_BYTES_MAX, HEADER_BYTES_MAX))


class Runner:
    """Carries out the effects of one `Server`."""

    def __init__(
        self, process: Process, router: zmq.Socket[bytes], upward: zmq.Socket[bytes] | None, port: int
    ) -> None:
        self.process, self.router, self.upward = process, router, upward
        # Toward the shard above, dialled with the first message to it; of process 0 one more for `CONTROL`.
        self.above: dict[bool, zmq.Socket[bytes]] = {}
        self.peers: dict[str, zmq.Socket[bytes]] = {}  # toward other clusters, by address
        self.bytes_up = self.bytes_down = 0  # over these links
        self.poller = zmq.Poller()
        self.end = Stop()
        child = bool(process.parent)
        self.folder = Path(process.checkpoint_dir) if process.checkpoint_dir else None
        self.lent = Lent()
        kept = checkpoints.clocks(self.folder, process.index) if self.folder and process.resume else ()
        coordinator = member = None
        if process.index == 0:
            restart = self._restart_clock() if process.resume else -1
            coordinator = Coordinator(process.settings, process.first_epoch, restart, child, keys_that_fit())
            if child:
                lost_ns = int(process.parent_timeout * NS)
                timing = Timing(lost_ns=lost_ns, connect_ns=lost_ns)
                host = f"{socket.gethostname()}:{port}"
                member = Member(uuid.uuid4().hex, host, timing=timing, below=coordinator.tree)
            if restart >= 0 and self.folder is not None:
                _, facts = checkpoints.read(self.folder, 0, restart, only=())
                coordinator.adopt_plan(facts["plan"])
                coordinator.buffers = facts["buffers"]
        means = Means(
            optimizer=_optimizers() if process.settings.mode().rule is Rule.OPTIMIZER else None,
            lent=self.lent,
            child=child,
            member=member,
            coordinator=coordinator,
        )
        shard = Shard(process.index, process.settings, time.time_ns(), port, kept, means)
        host = reached(process.bind, process.parent) if member is not None else ""
        self.server = Server(shard, coordinator, member, process.parent, host)
        self.stopping = False
        self.stop_by = float("inf")
        self.running = True

    def _restart_clock(self) -> int:
        assert self.folder is not None
        return checkpoints.newest(self.folder, self.process.settings.shards)

    def apply(self, effects: Iterable[ServerEffect]) -> None:
        """Carry out what the machine asks for, and what follows from that inside it."""
        self._carry_out(effects)
        while self.server.inner:
            self._carry_out(self.server.advance(time.monotonic_ns()))

    def _carry_out(self, effects: Iterable[ServerEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Tell):
                self._tell(effect)
            elif isinstance(effect, Log):
                emit("log", name=effect.event, values=effect.values)
            elif isinstance(effect, Checkpoint):
                self._checkpoint(effect.clock)
            elif isinstance(effect, Load):
                self._load(effect.clock)
            elif isinstance(effect, Stop):
                self.running, self.end = False, effect

    def _send(self, effect: Send) -> None:
        message = effect.message
        if isinstance(message, m.TIMED):
            message = replace(message, sent_ns=time.monotonic_ns())
        frames = encode(message)
        if isinstance(effect.peer, int):
            target, head = self._dialled(isinstance(message, m.CONTROL)), [frames[0]]
            self.bytes_up += sum(map(len, frames))
        elif effect.peer == COORDINATOR:
            assert self.upward is not None
            target, head = self.upward, [frames[0]]
        else:
            target, head = self.router, [effect.peer, frames[0]]
        self._put(target, head, frames)

    def _tell(self, effect: Tell) -> None:
        if effect.address not in self.peers:
            for address in self.peers.keys() - self.server.shard.above.addresses:
                self.peers.pop(address).close()
            with contextlib.suppress(UsageError):  # an address that is none: its owner will count as silent
                parse_address("a cluster's address", effect.address)
                self.peers[effect.address] = self._dealer(effect.address)
        if effect.address in self.peers:
            frames = encode(effect.message)
            self.bytes_up += sum(map(len, frames))
            self._put(self.peers[effect.address], [frames[0]], frames)

    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        dealer = cast("zmq.Socket[bytes]", self.router.context.socket(zmq.DEALER))
        limit(dealer)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        dealer.connect(address)
        return dealer

    def _put(self, target: zmq.Socket[bytes], head: Sequence[m.Buffer], frames: Sequence[m.Buffer]) -> None:
        try:
            if len(frames) == 2 and len(frames[1]) >= ZERO_COPY_BYTES:
                target.send_multipart(head, zmq.SNDMORE | zmq.NOBLOCK)
                tracker = target.send(frames[1], zmq.NOBLOCK, copy=False, track=True)
                assert tracker is not None
                self.lent.trackers.append(tracker)
            else:
                target.send_multipart([*head, *frames[1:]], zmq.NOBLOCK)
        except zmq.Again:
            pass  # its queue is full; it will ask again
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # gone: its lease will tell
                raise

    def _dialled(self, control: bool) -> zmq.Socket[bytes]:
        """A socket toward the shard above: over TCP, also on this machine, so that bytes are those of a link."""
        if control not in self.above:
            host, port = parse_address("--parent", self.process.parent)
            place = self.server.shard.above.place
            if self.process.index and place is not None:
                port = place.ports[self.process.index]
            self.above[control] = self._dealer(f"tcp://{host}:{port}")
            self.poller.register(self.above[control], zmq.POLLIN)
        return self.above[control]

    def _receive_above(self, frames: list[zmq.Frame], now_ns: int) -> None:
        self.bytes_down += sum(len(frame.buffer) for frame in frames)
        try:
            effects = self.server.handle_above(decode([frame.buffer for frame in frames]), now_ns)
        except NarrowsError as error:
            effects = self.server.fail_above(str(error), now_ns)
        self.apply(effects)

    def _checkpoint(self, clock: int) -> None:
        shard, planned = self.server.shard, self.server.shard.planned
        if self.folder is None or planned is None or planned.store.publication < 0:
            return
        coordinator = self.server.coordinator
        facts = {
            "publication": planned.store.publication,
            "shards": self.process.settings.shards,
            "plan": planned.plan.packed(),
            "buffers": coordinator.buffers if coordinator is not None else b"",
        }
        kept = checkpoints.write(self.folder, shard.index, clock, planned.store.arrays(), facts)
        shard.wrote_checkpoint(clock, kept)
        emit("log", name="checkpoint", values={"shard": shard.index, "clock": clock})

    def _load(self, clock: int) -> None:
        planned = self.server.shard.planned
        assert self.folder is not None
        checkpoints.drop_after(self.folder, self.process.index, clock)
        if clock < 0:
            return
        assert planned is not None
        arrays, facts = checkpoints.read(self.folder, self.process.index, clock)
        if arrays["x"].size != planned.store.size:
            raise NarrowsError(
                f"the checkpoint of clock {clock} has {arrays['x'].size} keys here, not {planned.store.size}"
            )
        planned.apply([store.Load(arrays, int(facts["publication"]))])

    def receive(self, frames: list[zmq.Frame], now_ns: int, from_coordinator: bool) -> None:
        peer = COORDINATOR if from_coordinator else frames[0].bytes
        try:
            message = decode([frame.buffer for frame in (frames if from_coordinator else frames[1:])])
            if isinstance(message, OF_CLUSTERS):
                self.bytes_down += sum(len(frame.buffer) for frame in frames[1:])
            effects = self.server.handle(peer, message, now_ns)
        except NarrowsError as error:
            if from_coordinator:
                raise
            emit("log", name="refused", values={"text": str(error)})
            if isinstance(error, RemoteProtocolError) or error.exit_code == m.RefuseCode.INCOMPATIBLE:
                self._send(Send(peer, m.Refuse(m.RefuseCode.INCOMPATIBLE, -1, 0, str(error)[: m.TEXT_MAX])))
            return
        self.apply(effects)

    def stop(self) -> None:
        """Ctrl-C or the end of the parent."""
        self.stopping, self.stop_by = True, time.monotonic() + STOP_S
        self.apply(self.server.stop(time.monotonic_ns()))

    def loop(self) -> None:
        poller = self.poller
        poller.register(self.router, zmq.POLLIN)
        if self.upward is not None:
            poller.register(self.upward, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self.apply(self.server.start(time.monotonic_ns()))
        ticked = time.monotonic_ns()
        while self.running:
            ready = dict(poller.poll(TICK_MS))
            if sys.stdin.fileno() in ready and not self.stopping:
                if os.read(sys.stdin.fileno(), 4096):  # a line: show the tree
                    self.apply(self.server.show_tree())
                else:
                    poller.unregister(sys.stdin.fileno())
                    self.stop()
            for source in (self.router, self.upward, *self.above.values()):
                for _ in range(BURST if source is not None and source in ready else 0):
                    assert source is not None
                    try:
                        frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
                    except zmq.Again:
                        break
                    if source in self.above.values():
                        self._receive_above(frames, time.monotonic_ns())
                    else:
                        self.receive(frames, time.monotonic_ns(), from_coordinator=source is self.upward)
            now_ns = time.monotonic_ns()
            if now_ns - ticked >= TICK_MS * NS // 1000:
                ticked = now_ns
                self.apply(self.server.tick(now_ns))
            ledger = self.server.shard.ledger
            if self.server.coordinator is None and ledger.over:
                shard = self.server.shard
                self.running = shard.min_clock < ledger.min_clock or not shard.at_rest  # its last report is on its way
            if time.monotonic() > self.stop_by:
                break


def run(process: Process, ready: Callable[[int], None]) -> None:
    """Serve until the run is over or stdin ends. `ready` is called with the port once it is bound."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        limit(router)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = bind(router, process.bind)
        upward = runner = None
        if process.coordinator:
            upward = context.socket(zmq.DEALER)
            limit(upward)
            upward.connect(process.coordinator)
        try:
            runner = Runner(process, router, upward, port)
            ready(port)
            runner.loop()
        finally:
            for dialled in (upward, *((*runner.above.values(), *runner.peers.values()) if runner is not None else ())):
                if dialled is not None:
                    dialled.close()
    if runner.end.code:
        raise BY_EXIT_CODE.get(runner.end.code, NarrowsError)(runner.end.text)
    if process.parent:
        there = f"{process.parent} and its clusters" if runner.peers else process.parent
        moved = f"pushed {runner.bytes_up / 1e6:.2f} MB to {there} and pulled {runner.bytes_down / 1e6:.2f} MB"
        values = {"shard": process.index, "bytes_up": runner.bytes_up, "bytes_down": runner.bytes_down}
        emit("log", name="above", values=values | {"text": f"shard {process.index} {moved}"})
    emit("done")
