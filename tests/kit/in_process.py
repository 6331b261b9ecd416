"""A whole cluster in one process: the real machines and the real engine, joined by function calls instead of sockets.

With `SharedPorts` (kit/ports.py) the messages between a worker and a shard go over sockets of this process.

Each worker runs in its own thread, because an engine waits. One lock makes the machines take turns.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from kit.ports import Ports
from narrows.compression import warm_up
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import (
    NS,
    Log,
    MemberEffect,
    MemberFailed,
    MemberWelcomed,
    Send,
    SendToPeer,
    ServerEffect,
    StopProcess,
    WriteCheckpoint,
)
from narrows.protocols.member.member import Member
from narrows.protocols.messages import NAME_BYTES, TIMED, Buffer, Message, Push, State
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.shared_memory import owned
from narrows.protocols.runtime.network.sockets import Drops
from narrows.protocols.wire import decode, encode
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.journal.machine_pickling import frozen
from narrows.ps.process.shard_trace import ShardTrace
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ShardResources
from narrows.ps.shard.reports import COORDINATOR
from narrows.ps.shard.shard import Shard
from narrows.ps.store.store import Store, assume_lent
from narrows.ps.store.torch_optimizer import TorchOptimizer
from narrows.worker.runtime.member_link import LinkCommands

FREEZE_EVERY = 97  # events
THREAD = "in-process"  # the name of each thread that the kit starts

warm_up()  # as ps-serve and ps-worker do: compiling a kernel in the middle of a run would stop all threads


def store_of(server: Server) -> Store:
    """Return the store of a server whose model has been declared."""
    assert server.shard.model_shard is not None
    return server.shard.model_shard.store


def member_of(cluster: Cluster) -> Member:
    """Return the member as which this cluster takes part in its parent's run."""
    membership = cluster.servers[0].membership
    assert membership is not None
    return membership.member


class Cluster:
    """The servers of one run, or of one cluster with a `parent`, and the links to them."""

    applied = 0  # calls of `_apply`
    held_ns = 0  # the time that all bytes together took on their links

    def __init__(
        self, settings: Settings, parent: Cluster | None = None, name: str = "cluster", ports: Ports | None = None
    ) -> None:
        self.settings, self.parent, self.name = settings.validated().begun(), parent, name
        self.ports = ports or Ports()
        self.changed: threading.Condition = parent.changed if parent is not None else threading.Condition()
        self.links: dict[bytes, tuple[Link, int]] = {}
        self.workers: dict[str, Link] = {}  # by the address that peers know
        self.lost: Callable[[SendToPeer], bool] = lambda tell: False  # True: this message between peers is lost
        # By shard, a function that takes messages in place of the shard's machine. Machines are saved, so a test must
        # not attach anything to them.
        self.heard: dict[int, Callable[[bytes, Message, int], list[ServerEffect]]] = {}
        self.heard_above: dict[int, Callable[[Message, int], list[ServerEffect]]] = {}
        self.traces: dict[int, ShardTrace] = {}  # by shard, as of ps-serve --trace
        self.children: dict[bytes, tuple[Cluster, int]] = {}
        self.told = deque[tuple[Cluster, int, bytes, list[bytes]]]()  # messages among clusters, in the order of sending
        self.telling = False
        self.siblings: dict[str, tuple[Cluster, int]] = {}  # shards of child clusters, by their address
        self.bytes_above = [0, 0]  # bytes of pushes up, of states down
        self.stopped: StopProcess | None = None
        self.checkpoints: list[int] = []  # the clocks of requested checkpoints
        self.logs: list[Log] = []
        self.servers: list[Server] = []
        for index in range(self.settings.shards):
            self.servers.append(self._server(index))
            if parent is not None:
                parent.siblings[f"tcp://{name}:{1 + index}"] = (self, index)
        with self.changed:
            for index, server in enumerate(self.servers):
                self._apply(index, server.start(self.now()))

    def _server(self, index: int) -> Server:
        child = self.parent is not None
        # As of servers that were started at different times, their epochs differ.
        first = (1 << 20) + ((1 + len(self.parent.siblings)) << 12 if self.parent is not None else 0)
        coordinator = Coordinator(self.settings, first, child=child) if index == 0 else None
        member = Member(self.name, "here", below=coordinator.tree) if child and coordinator is not None else None
        means = ShardResources(optimizer=TorchOptimizer, child=child, member=member, coordinator=coordinator)
        shard = Shard(index, self.settings, 1, 1 + index, (), means)
        return Server(shard, coordinator, member, "tcp://parent:1", self.name)

    def now(self) -> int:
        return time.monotonic_ns() + self.held_ns

    def hold(self, link: Link, frames: Sequence[Buffer]) -> None:
        """Advance the clock by the time that a message takes on this link. No thread waits."""
        self.held_ns += int(sum(map(len, frames)) / link.rate * NS)

    def arrive(self, shard: int, peer: bytes, message: Message) -> None:
        """Deliver a message to one of the shards."""
        hear = self.heard.get(shard, self.servers[shard].handle)
        self._apply(shard, hear(peer, message, self.now()))

    def arrive_above(self, shard: int, message: Message) -> None:
        """Deliver a message of the parent's shard."""
        if shard in self.traces:
            self.traces[shard].heard(message, self.now())
        hear = self.heard_above.get(shard, self.servers[shard].handle_above)
        self._apply(shard, hear(message, self.now()))

    def _apply(self, index: int, effects: Iterable[ServerEffect]) -> None:
        """Carry out the effects of a server.

        All effects that follow inside the server are collected first, because a message that is sent arrives at once
        and is answered at once. Every FREEZE_EVERY calls the machine is pickled, as for a journal or a standby.
        """
        made = [*effects]
        self.applied += 1
        began_ns = self.now()
        if self.applied % FREEZE_EVERY == 0:
            frozen(self.servers[index], assume_lent)
        while self.servers[index].inner:
            made += self.servers[index].advance(self.now())
        folds: list[list[int]] = []
        if (its := self.traces.get(index)) is not None:
            before = len(its.folds)
            its.handled(self.servers[index], began_ns, self.now())
            folds = its.folds[before:]
        self._carry_out(index, made)
        for fold in folds:  # sending belongs to it, and what is sent may come back before that has ended
            fold[2] = self.now()

    def _carry_out(self, index: int, made: Sequence[ServerEffect]) -> None:
        """Carry out effects. Shards know each other as b"shard-<index>"."""
        for effect in made:
            if isinstance(effect, SendToPeer) and self.parent is not None and not self.parent.lost(effect):
                frames = [bytes(frame) for frame in encode(effect.message)]
                self.parent.told.append((*self.parent.siblings[effect.address], self.name.encode(), frames))
        for effect in made:
            if isinstance(effect, StopProcess):
                self.stopped = effect
            if isinstance(effect, Log):
                self.logs.append(effect)
            if isinstance(effect, WriteCheckpoint):
                self.checkpoints.append(effect.clock)
            if isinstance(effect, Send):
                peer = effect.peer
                message = effect.message
                if isinstance(message, TIMED):
                    message = replace(message, sent_ns=self.now())  # as ps/process/runner.py does
                frames = [bytes(frame) for frame in encode(message)]
                message = decode(frames)
                if isinstance(peer, int):
                    assert self.parent is not None and peer == index
                    if index in self.traces:
                        self.traces[index].sent(message, self.now())
                    self.bytes_above[0] += sum(map(len, frames)) if isinstance(message, Push) else 0
                    mine = b"%s.%d" % (self.name.encode().ljust(NAME_BYTES), index)
                    self.parent.children[mine] = (self, index)
                    self.parent.arrive(index, mine, message)
                elif peer in self.children:
                    below, shard = self.children[peer]
                    below.bytes_above[1] += sum(map(len, frames)) if isinstance(message, State) else 0
                    below.arrive_above(shard, message)
                elif peer == COORDINATOR:
                    self.arrive(0, b"shard-%d" % index, message)
                elif peer.startswith(b"shard-"):
                    self.arrive(int(peer[6:]), COORDINATOR, message)
                elif peer in self.links:
                    link, shard = self.links[peer]
                    self.hold(link, frames)
                    message = decode(self.ports.down((self.name, shard), link, frames))
                    if link.pushes is not None:
                        link.pushes.heard(shard, message, self.now())
                    link.deliver(link.member.receive(shard, message, self.now()))

        if self.parent is not None:
            self.parent._pass_on()

    def _pass_on(self) -> None:
        """Deliver the messages among child clusters in the order of sending, as a link does."""
        if not self.telling:
            self.telling = True
            try:
                while self.told:
                    other, shard, peer, frames = self.told.popleft()
                    other.arrive(shard, peer, decode(frames))
            finally:
                self.telling = False

    def send(self, link: Link, shard: int, frames: list[bytes]) -> None:
        peer = id(link).to_bytes(NAME_BYTES, "big") + b".%d" % shard
        self.links[peer] = (link, shard)
        self.hold(link, frames)
        message, got = self.carried(link, shard, frames)
        self.arrive(shard, peer, message)
        self.ports.taken(link, (self.name, shard), got)

    def carried(self, link: Link, shard: int, frames: Sequence[Buffer]) -> tuple[Message, Sequence[Buffer]]:
        """Return the message that a shard gets of a worker's frames, and the frames that it reads as it handles it.

        As in ps/process/runner.py it copies most frames of a peer's memory before it reads them.
        """
        got = self.ports.up(link, (self.name, shard), frames)
        message = decode(got)
        if self.servers[shard].shard.reads_in_place(message):
            return message, got
        copied = owned(got)
        self.ports.taken(link, (self.name, shard), got)
        return decode(copied), copied


class Link(LinkCommands):
    """Stands in for a worker's `MemberLink`, with the methods that the engine needs."""

    def __init__(self, cluster: Cluster, token: str) -> None:
        self.clock = AwakeClock(lambda: 0)  # no lease runs out here
        self.cluster, self.address = cluster, f"tcp://{cluster.name}"
        self.member = Member(token, "here")
        self.member.reached_at(f"worker-{id(self)}")
        cluster.workers[self.member.address] = self
        self.events: deque[MemberEffect] = deque()
        self.error = ""
        self.bytes_up = self.bytes_down = 0
        self.drops = Drops(print)
        self.rate = float("inf")  # bytes a second, each way
        self.call(lambda member, now: member.join(now))
        joined = self.take(1.0)
        assert isinstance(joined, MemberWelcomed)
        self.joined = joined

    def listen(self) -> None:
        """Do nothing: peers reach this link from the start."""

    def call(self, command: Callable[[Member, int], list[MemberEffect]]) -> None:
        with self.cluster.changed:
            self.deliver(command(self.member, self.cluster.now()))

    def deliver(self, effects: Sequence[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                assert isinstance(effect.peer, int)
                if self.pushes is not None:
                    self.pushes.sent(effect.peer, effect.message, self.cluster.now())
                frames = [bytes(frame) for frame in encode(effect.message)]
                self.bytes_up += sum(map(len, frames))
                self.cluster.send(self, effect.peer, frames)
            elif isinstance(effect, SendToPeer):
                frames = [bytes(frame) for frame in encode(effect.message)]
                self.bytes_up += sum(map(len, frames))
                peer = self.cluster.workers.get(effect.address)
                if peer is not None and not self.cluster.lost(effect):
                    peer.bytes_down += sum(map(len, frames))
                    peer.deliver(peer.member.receive_peer(decode(frames), self.cluster.now()))
            elif isinstance(effect, MemberFailed):
                self.error = effect.text
            else:
                self.events.append(effect)
        self.cluster.changed.notify_all()

    def end(self, error: str) -> None:
        """Make each present and later wait for an event of this link raise this error."""
        with self.cluster.changed:
            self.error = self.error or error
            self.cluster.changed.notify_all()

    def take(self, timeout_s: float) -> MemberEffect | None:
        return self.next_of(self.events, timeout_s)

    def next_of(self, events: deque[MemberEffect], timeout_s: float) -> MemberEffect | None:
        """Return the next of these events of the link; None after `timeout_s`."""
        with self.cluster.changed:
            if not events and not self.error:
                self.cluster.changed.wait(timeout_s)
            if events:
                return events.popleft()
            if self.error:
                raise RuntimeError(self.error)
        return None


def together(work: Callable[[int], Any], workers: int) -> list[Any]:
    """Run work(0), work(1), ... each in a thread; return their results in order, or raise the first error."""
    results: list[Any] = [None] * workers
    errors: list[BaseException] = []

    def one(worker: int) -> None:
        try:
            results[worker] = work(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(worker,), daemon=True, name=THREAD) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results
