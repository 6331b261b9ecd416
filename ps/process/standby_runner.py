"""Runs a `Standby`: one shard of a server that follows a primary, until the run is over or this server takes over."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from narrows.protocols import messages as m
from narrows.protocols.addresses import parse_address
from narrows.protocols.config.timing import ELECTION_TIMEOUT_NS, standby_lost_ns
from narrows.protocols.effects import NS, CopyEffect, Log, Send, SendToPeer, StartServing
from narrows.protocols.errors import NarrowsError, ServerLostError
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.hosts import reached
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import Peer, Sockets
from narrows.protocols.wire import decode, encode
from narrows.ps.journal.journal import JournalReplay, allocator
from narrows.ps.journal.machine_pickling import thaw
from narrows.ps.process.access_control import AccessControl
from narrows.ps.process.buffer_loans import BufferLoans
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.watchdog import Watchdog
from narrows.ps.replication.events import MachineEvent
from narrows.ps.replication.standby import MachineParts, PeerShards, Standby
from narrows.ps.server.server import Server
from narrows.ps.shard.reports import COORDINATOR

PLACE_NS = 60 * NS  # a primary has lost a dead standby within this time plus two `lost_ns`


class StandbyRunner:
    """Runs the standby of one process.

    Args:
        config: the config of the process.
        port: its sockets.
        number: the TCP port by which peers reach it, 0 behind one port.
        access_control: its access control.
    """

    def __init__(self, config: ServerConfig, port: Sockets, number: int, access_control: AccessControl) -> None:
        self.config, self.port, self.access_control = config, port, access_control
        self.clock, self.lending, self.watchdog = (
            AwakeClock(),
            BufferLoans(),
            Watchdog(access_control, config.index, None),
        )
        self.arrays = allocator(config.journal)
        self.replay: JournalReplay  # of the newest machine, once there is one
        self.serves: list[StartServing] = []  # the view in which this server takes over, once there is one
        self.stale = False  # the primary went back to a checkpoint that is not here
        self.refused_ns = 0  # since when the primary has another standby, 0: it has none
        first = config.front(parse_address("", config.coordinator)[1] if config.coordinator else number)
        address = f"tcp://{reached(first, config.follows)}:{parse_address('', first)[1]}"
        lost_ns = standby_lost_ns(config.settings.lease)
        siblings = PeerShards(config.settings.shards, lost_ns)
        self.standby = Standby(
            config.index, config.follows, address, number, lost_ns, siblings, self._thaw, self._again
        )
        self.standby.heard(self.clock.now())
        self.announced = False  # the console has shown that this server stands by

    @property
    def server(self) -> Server:
        """The primary's machine, as far as it is here. Only once the standby has a machine."""
        return self.replay.server

    def _thaw(self, packed: MachineParts) -> Server:
        server = thaw(packed, self.lending.any, self.arrays)
        self.replay = JournalReplay(server, self._load)
        self.access_control.serve(server)
        return server

    def _load(self, clock: int) -> None:
        self.stale = True  # the checkpoint is on the primary's disk

    def _again(self, event: MachineEvent) -> None:
        self.replay.again(event)
        if self.stale:
            self.stale = False
            self.standby.begin_anew()

    @property
    def over(self) -> bool:
        """True if the run has ended.

        The standby goes on until the primary is gone: the primary holds its last effects until they are acknowledged.
        """
        machine = self.standby.machine
        return machine is not None and (self.replay.stop is not None or self.server.ended)

    def _carry_out(self, effects: Iterable[CopyEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(bytes(peer), message):
                    self.port.send(self.config.coordinator if peer == COORDINATOR else peer, encode(message))
                case SendToPeer(address, message):
                    self.port.send(address, encode(message))
                case Log(event, values):
                    emit("log", name=event, values=values)
                case StartServing():
                    self.serves.append(effect)

    def _receive(self, peer: Peer, frames: list[m.Buffer]) -> None:
        now_ns = self.clock.now()
        try:
            message = decode(frames)
            if isinstance(peer, bytes):
                self.access_control.check(peer, message, sum(map(len, frames)))
                self.access_control.connections.let_in(peer)
        except NarrowsError as error:
            if not isinstance(peer, bytes):
                raise
            if self.access_control.counted(str(error)):
                emit("log", name="refused", values={"text": str(error)})
            return
        match message:
            case m.ReplicationEntry() if peer == self.config.follows:
                self.refused_ns = 0
                self.standby.receive(message, now_ns)
            case m.Refuse(code, _, _, text) if peer == self.config.follows:
                self._refused(code, text, now_ns)
            case m.FailoverNotice() if peer == self.config.coordinator:
                self._carry_out(self.standby.hear_view(message))
            case m.FailoverVote() if isinstance(peer, bytes):
                self._carry_out(self.standby.vote(peer, message, now_ns))
            case m.Hello() if isinstance(peer, bytes):
                text = (
                    f"this server stands by for the one at {self.config.follows}: give --server {self.config.follows}"
                )
                self._carry_out([Send(peer, m.Refuse(m.RefuseCode.INCOMPATIBLE, -1, 0, text))])
            case m.ReplicationProgress() if isinstance(peer, bytes):
                self.standby.siblings.hear(peer, message, now_ns)

    def _refused(self, code: int, text: str, now_ns: int) -> None:
        """The primary refuses this standby.

        If the primary has another standby, wait: that may be an earlier process of this standby, which the primary will
        lose.

        Raises:
            NarrowsError: the primary refuses it for another reason, or has not lost the other standby in time.
        """
        limit_ns = PLACE_NS + 2 * self.standby.lost_ns
        if code != m.RefuseCode.TAKEN or (self.refused_ns and now_ns - self.refused_ns > limit_ns):
            raise NarrowsError(f"{self.config.follows}: {text}")
        self.standby.heard(now_ns)
        if not self.refused_ns:
            self.refused_ns = now_ns
            if not self.config.index:
                more = f"this one waits {limit_ns // NS} s at most for the server to lose it"
                emit("log", name="standby", values={"text": f"{self.config.follows}: {text}; {more}"})

    def cut(self, peer: Peer) -> None:
        """The connection of `peer` has ended."""
        if peer == self.config.follows:
            self.standby.cut(self.clock.now())

    def loop(self, sockets: Sockets) -> bool:
        """Stand by until the run is over or stdin ends (returns False), or this server takes over (returns True).

        Raises:
            ServerLostError: the primary is gone, and too few members have voted for this standby.
        """
        stdin, ended = sys.stdin.fileno(), list[bool]()

        def hear_parent() -> None:
            said = os.read(stdin, 4096)
            if not said or b"stop" in said:
                sockets.unwatch(stdin)
                ended.append(True)

        sockets.watch(stdin, hear_parent)

        def goes_on() -> bool:
            return not self.serves and not ended and not (self.over and self.standby.lost(self.clock.now()))

        Loop(sockets, self._receive, self._tick, tick_ms=0).run(self.clock.turn, goes_on)
        if self.serves:
            sockets.unwatch(stdin)
            index, clock = self.config.index, self.server.shard.min_clock
            text = f"shard {index} serves in the place of {self.config.follows}, from clock {clock} on"
            emit("log", name="took over", values={"shard": index, "clock": clock, "text": text})
        return bool(self.serves)

    def _tick(self, now_ns: int) -> None:
        """Acknowledge what is here, and give signs of life. Raises ServerLostError as `loop`."""
        self._carry_out([*self.standby.acknowledge(now_ns), *self.standby.tick(now_ns)])
        self.watchdog.beat(lambda: self.server.shard.nbytes if self.standby.machine else self.standby.coming)
        if self.standby.stands_by and not self.announced and not self.config.index:
            self.announced = True
            text = f"stands by for {self.config.follows}: all that it has is here, {self.standby.have} events"
            emit("log", name="standby", values={"text": text})
        if now_ns - self.standby.heard_ns > ELECTION_TIMEOUT_NS:
            raise ServerLostError(
                f"the server at {self.config.follows} is silent, and too few workers have turned to this one"
            )
