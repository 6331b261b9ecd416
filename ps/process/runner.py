"""Runs the machine of one server process: turns messages, ticks and stdin into events, and carries out the effects.

How it works

    Sockets, stdin, tick ─> event ─┬─ 1. Journal.note             a killed process goes on from the journal
                                   ├─ 2. ReplicationPrimary.note  the standby gets the event
                                   └─ 3. Server.happen ─> effects ─┬─ Log, WriteCheckpoint, LoadCheckpoint: at once
                                                                   └─ Send, SendToPeer, StopProcess: `_let_out`, or `held`

1. `receive` decodes a message. The kind of its event depends on the sender: a peer that dialled this process (BELOW),
   shard 0 (COORDINATOR), the parent's shard (ABOVE) or the parent's standby (BESIDE).
2. A message from a peer that dialled us has to pass `AccessControl.check`. `BootstrapServer` and `ReplicationPrimary`
   answer messages that are no event of the machine.
3. `_happen` notes the event in the journal and for the standby, and then gives it to the machine. So each effect that
   a peer sees has its cause on record.
4. `apply` carries out the effects, and then those of the messages between shard 0 and the coordinator
   (`Server.inner`). After that the journal begins anew, if it is due.
5. While a standby follows, effects that a peer can see are held (`BufferLoans.held`) until the standby has
   acknowledged their event (`_release`).
6. The machine is that of a standby which takes over (`copy`), that of the journal (`_replay`), or a new one
   (`machine_factory.machine`).

Rules
- The runner decides nothing about the protocol.
- Workers, and the clusters that gossip with this one, dial this process; the other shards of the server dial process 0.
  Process i > 0 dials process 0. Each process dials the parent's shard, if there is one, and the clusters that it
  gossips with.
- One thread owns everything.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.addresses import front, is_address
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.effects import (
    CopyEffect,
    LoadCheckpoint,
    Log,
    Send,
    SendToPeer,
    ServerEffect,
    StartServing,
    StopProcess,
    WriteCheckpoint,
)
from narrows.protocols.errors import NarrowsError
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.curve_auth import HandshakeFailure
from narrows.protocols.runtime.network.key_files import refusal
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.shared_memory import owned
from narrows.protocols.runtime.network.sockets import FULL, NOBODY, Drops, Peer, Port, Sockets
from narrows.protocols.wire import decode, encode
from narrows.ps.checkpoints.checkpoint_writer import WrittenCheckpoint
from narrows.ps.journal.journal import Journal, JournalReplay, allocator
from narrows.ps.journal.machine_pickling import frozen
from narrows.ps.process.access_control import AccessControl
from narrows.ps.process.bootstrap_server import BootstrapServer
from narrows.ps.process.buffer_loans import BufferLoans
from narrows.ps.process.checkpoint_disk import CheckpointDisk
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.machine_factory import journal_most, machine, original
from narrows.ps.process.shard_trace import ShardTrace
from narrows.ps.process.standby_runner import StandbyRunner
from narrows.ps.process.watchdog import Watchdog
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import OF_CLUSTERS
from narrows.ps.shard.model_shard import ClockStage
from narrows.ps.shard.reports import COORDINATOR

STOP_S = 20.0  # after Ctrl-C a shard ends within this time, at rest or not


class ServerRunner:
    """Carries out the effects of one `Server`.

    Args:
        config: the config of the process.
        port: its sockets.
        number: the TCP port by which peers reach it, 0 behind one port.
        access_control: which peers it serves; None: without keys.
        copy: the standby that takes over, with the machine; None: the machine comes from the journal or is new.

    Raises:
        NarrowsError: a checkpoint or the journal cannot be read.
    """

    def __init__(
        self,
        config: ServerConfig,
        port: Port,
        number: int,
        access_control: AccessControl | None = None,
        copy: StandbyRunner | None = None,
    ) -> None:
        self.config, self.port, self.number = config, port, number
        self.access_control = access_control or AccessControl("", "", config.secret, config.coordinator, config.follows)
        self.clock = AwakeClock()  # the machine's time
        self.drops = Drops(lambda text: None if self.server.over else self._log("dropped", text=text))
        self.lending = copy.lending if copy is not None else BufferLoans()
        self.arrays = copy.arrays if copy is not None else allocator(config.journal)
        self.watchdog = Watchdog(self.access_control, config.index, config.folder, config.seals)
        self.dialled = ParentAddresses(port)
        self.trace = ShardTrace(config.trace, config.index) if config.trace else None
        self.unreached: list[bytes] = []  # routing ids that have no connection, as a send or its end has shown
        self.running, self.end = True, StopProcess()
        self.stop_by = float("inf")  # time.monotonic() at which the process ends in any case
        # `answering` answers messages that are no event of the machine, and `original` those of a standby.
        self.disk, self.answering = CheckpointDisk(config), BootstrapServer(config)
        most = journal_most(config.settings.shards)
        lent = self.lending.any
        self.journal = Journal(config.journal, lent, most, self.arrays) if config.journal is not None else None
        self.anew = True  # the journal has to begin again
        self.trimmed = False  # True once `give_back` has run
        self.began_ns = 0  # when the handling of the present event began, 0: none is handled
        self.turns = Loop(port, self.receive, self._tick, self._turn)
        again = self.journal if self.journal is not None and self.journal.whole and config.replay else None
        if copy is not None:
            self.server = copy.server
        elif again is not None:
            self.server = again.machine()
        else:
            own = self.access_control.guard.own if self.access_control.guard is not None else None
            self.server = machine(config, number, lent, self.arrays, own, self.disk.sound)
        self.bytes_up, self.bytes_down = self.server.shard.moved  # to and from the parent and other clusters
        self.access_control.serve(self.server)
        siblings = copy.standby.siblings if copy is not None else None
        self.original = original(config, self.server, number, lambda: frozen(self.server, lent), siblings)
        if copy is not None:
            self._go_on(copy.replay, here=False)
            self._at_once(copy.serves)
        elif again is not None:
            self._replay(again)
        self._keep()

    def _log(self, event: str, **told: Any) -> None:
        emit("log", name=event, values={"shard": self.config.index, **told})

    # The journal.

    def _happen(self, event: MachineEvent, frames: Sequence[m.Buffer] = ()) -> list[ServerEffect]:
        """Note an event, and let the machine handle it. Return its effects.

        Args:
            event: the event.
            frames: the frames of its message.

        Raises:
            RemoteProtocolError: the message is one that no peer may send.
        """
        self.began_ns = time.monotonic_ns()
        # A standby would see other bytes than this machine if a peer changed a frame in its memory.
        in_place = self.server.shard.reads_in_place(event.message) and not self.original.holds
        noted = self.journal.note(event, frames, in_place) if self.journal is not None else frames
        noted = noted if in_place else owned(noted)
        if noted is not frames:
            event, frames = replace(event, message=decode(noted)), noted
        self._at_once(self.original.note(event, frames))
        return self.server.happen(event)

    def happen(self, event: MachineEvent, frames: Sequence[m.Buffer] = ()) -> None:
        """Let the machine handle an event, and carry out the effects."""
        self.apply(self._happen(event, frames), event.now_ns)

    def _keep(self) -> None:
        """Begin the journal anew if it is due."""
        journal = self.journal
        if journal is None:
            return
        if self.began_ns:
            journal.spend(time.monotonic_ns() - self.began_ns)
        self.began_ns = 0
        if self.anew or journal.due(self.server.shard.min_clock if self._has_weights() else -1):
            self.anew = False
            journal.begin(self.server)
        if journal.failure:
            self.journal = None
            why = f"shard {self.config.index} cannot keep its journal ({journal.failure})"
            self._log("journal", text=f"{why}: if it dies it goes back to a checkpoint")

    def _has_weights(self) -> bool:
        shard = self.server.shard.model_shard
        return shard is not None and shard.store.publication >= 0

    def _replay(self, journal: Journal) -> None:
        """Replay the events of the journal. Peers have seen their effects, or will ask for them again."""
        began = time.monotonic()
        done = journal.replay(self.server, self._load, self.original.again)
        again = f"{done.events} events done again in {time.monotonic() - began:.1f} s"
        text = f"shard {self.config.index} goes on where it was ({again})"
        self._log("replayed", clock=self.server.shard.min_clock, text=text)
        self._go_on(done)

    def _go_on(self, done: JournalReplay, here: bool = True) -> None:
        """Go on with a machine after its replay. `here`: its checkpoints are on this machine's disk."""
        self.running, self.end = done.stop is None, done.stop or self.end
        self.clock = AwakeClock(begins_ns=self.server.now_ns)
        shard = self.server.shard
        # In the later stages of a clock the arrays may already have values of the next clock.
        whole = shard.model_shard is not None and shard.model_shard.stage in (ClockStage.FOLD, ClockStage.CHECKPOINT)
        writing = shard.writing
        if writing == shard.min_clock and whole:
            self.disk.write(writing, self.server)
        elif self.config.folder is not None and (writing >= 0 or not here):
            clock = writing if writing >= 0 else shard.checkpoint_tried
            self._write_down(WrittenCheckpoint(clock, self.disk.clocks(), 0))
        elif self.server.over and shard.checkpoints:  # ps-serve waits for this event, and may not have it yet
            self._carry_out([self.disk.announced(shard.checkpoints[-1])])

    # Effects.

    def apply(self, effects: Iterable[ServerEffect], now_ns: int) -> None:
        """Carry out effects, and those of the messages between shard 0 and the coordinator that follow from them."""
        self._carry_out(effects)
        while self.server.inner:
            self._carry_out(self.server.advance(now_ns))
        if self.trace is not None:
            self.trace.handled(self.server, now_ns, self.clock.now())
        self._keep()

    def _carry_out(self, effects: Iterable[ServerEffect]) -> None:
        for effect in effects:
            match effect:
                case Log(event, values):
                    if event != "summary" or self.config.watched:
                        emit("log", name=event, values=values)
                case WriteCheckpoint(clock):
                    self.disk.write(clock, self.server)
                    self.turns.tick_soon()  # the shard waited for the copy, and goes on with the tick
                case LoadCheckpoint(clock):
                    self._load(clock)
                case _ if self.original.holds or self.lending.held:  # wait until the standby has the event
                    self.lending.held.append((self.server.happened, effect))
                case _:
                    self._let_out(effect)

    def _let_out(self, effect: Send | SendToPeer | StopProcess) -> None:
        """Carry out an effect that peers can see."""
        match effect:
            case Send(bytes(peer), message):
                self._put(self.config.coordinator if peer == COORDINATOR else peer, message)
            case Send(_, message) if above := self.server.above:
                if self.trace is not None:
                    self.trace.sent(message, self.clock.now())
                self.bytes_up += self._put(self.dialled.turn(above), message)
            case SendToPeer(address, m.FailoverVote() as vote):
                if address == self.server.beside and self.dialled.ask(address):  # else the parent was heard again
                    self._put(address, vote)
            case SendToPeer(address, message) if address == self.original.before:
                self._put(address, message)
            case SendToPeer(address, message) if self.dialled.tell(address, self.server.shard.parent_slot.addresses):
                self.bytes_up += self._put(address, message)
            case StopProcess():
                self.running, self.end = False, effect

    def _release(self) -> None:
        """Carry out the held effects of events that the standby has acknowledged."""
        held, original = self.lending.held, self.original
        while held and (not original.holds or held[0][0] <= original.feed.acked):
            self._let_out(held.popleft()[1])

    def _at_once(self, effects: Iterable[CopyEffect]) -> None:
        """Carry out effects of replication and failover. No event is their cause, so they are never held."""
        for effect in effects:
            match effect:
                case StartServing(view, standby):
                    before = self.original.before if self.original.before != self.server.before else ""
                    self.happen(
                        MachineEvent(EventKind.VIEW, self.clock.now(), values=(view, standby, self.number, before))
                    )
                    if not standby:
                        self.original.feed.forget()
                case Log(event, values):
                    emit("log", name=event, values=values)
                case _:
                    self._let_out(effect)
        self._release()

    def _put(self, to: Peer, message: m.Message) -> int:
        """Send `message`, unless the peer has not taken too much already. Return the size of the message in bytes."""
        if isinstance(message, m.TIMED):
            message = replace(message, sent_ns=self.clock.now())
        frames = encode(message)
        full = self.lending.full(to, frames[-1], lambda: self.server.shard.nbytes)
        receipt = FULL if full else self.port.send(to, frames, control=isinstance(message, m.CONTROL))
        self.lending.add(to, receipt, frames[-1])
        if receipt is NOBODY and isinstance(to, bytes) and to != self.original.feed.peer:
            self.unreached.append(to)
        self.drops.note(type(message).__name__, receipt)
        size = sum(map(len, frames))
        self.watchdog.encryption_cost.add(size)
        return size

    def _load(self, clock: int) -> None:
        self.disk.load(clock, self.server)
        self.anew = True  # a replay of this event would need the checkpoint, which may be gone by then

    def wrote(self, last: bool = False) -> None:
        """Handle a checkpoint that is on disk by now, or that could not be written. `last`: wait for it."""
        if (written := self.disk.take(last)) is not None:
            self._write_down(written)

    def _write_down(self, written: WrittenCheckpoint) -> None:
        self.happen(
            MachineEvent(EventKind.WROTE, self.clock.now(), values=(written.clock, [*written.kept], written.took_ns))
        )
        self._carry_out(self.disk.tell(written))

    # Events.

    def receive(self, peer: Peer, frames: list[m.Buffer]) -> None:
        """Make a message an event and handle it.

        Args:
            peer: the sender: a routing id (bytes) of a peer that dialled this process, or the address (str) that this
                process dialled.
            frames: of the message.
        """
        now_ns = self.clock.now()
        if isinstance(peer, bytes):
            self._receive_below(peer, frames, now_ns)
        elif peer == self.config.coordinator:
            message = decode(frames)
            if isinstance(message, m.FailoverNotice):
                self._at_once(self.original.hear_view(message))
            else:
                self.happen(MachineEvent(EventKind.COORDINATOR, now_ns, message=message), frames)
        elif peer in (self.server.above, self.server.beside):
            self.bytes_down += sum(map(len, frames))
            try:
                message = decode(frames)
            except NarrowsError as error:
                self.fail_above(str(error))
            else:
                if self.trace is not None and peer == self.server.above:
                    self.trace.heard(message, now_ns)
                kind = EventKind.ABOVE if peer == self.server.above else EventKind.BESIDE
                self.happen(MachineEvent(kind, now_ns, message=message), frames)

    def fail_above(self, text: str, code: int = m.RefuseCode.INCOMPATIBLE) -> None:
        """The session with the parent is over."""
        self.happen(MachineEvent(EventKind.FAILED_ABOVE, self.clock.now(), values=(text, int(code))))

    def _receive_below(self, peer: bytes, frames: list[m.Buffer], now_ns: int) -> None:
        try:
            message, size = decode(frames), sum(map(len, frames))
            self.watchdog.encryption_cost.add(size)
            self.access_control.check(peer, message, size)
            if m.beside(message):
                answer = self.answering.hear(peer, message, self.server)
                self._at_once(self.original.receive(peer, message, now_ns) if answer is None else answer)
                return self.access_control.connections.let_in(peer)
            if isinstance(message, OF_CLUSTERS):
                self.bytes_down += size
            effects = self._happen(
                MachineEvent(EventKind.BELOW, now_ns, peer, message, self.access_control.key_of(peer, message)), frames
            )
            self.access_control.connections.let_in(peer)
        except NarrowsError as error:
            effects = self.server.refused(peer, error)
            if not self.access_control.counted(str(error), peer):
                effects = [effect for effect in effects if not isinstance(effect, Log)]
        self.apply(effects, now_ns)

    def shut_out(self, address: str, why: HandshakeFailure, public: str) -> None:
        """A handshake has failed: of a peer that dialled us (`address` ""), or of this process at `address`.

        Another cluster may not know our key yet: the next message to it dials anew.
        """
        if not address:
            self.access_control.stranger(why, public)
        elif self.dialled.lose(address) or address != self.server.above:
            return
        elif text := refusal(why, self.access_control.parent_key, "--parent-key"):
            self.fail_above(text, m.RefuseCode.AUTHENTICATION)

    def linked(self, address: str) -> None:
        """There is a new connection to an address that this process has dialled."""
        if address == self.server.above or address in self.dialled.clusters:
            peer = address if address in self.dialled.clusters else ""
            self.happen(MachineEvent(EventKind.LINKED, self.clock.now(), values=(peer,)))

    def cut(self, peer: Peer) -> None:
        """The connection of a peer has ended."""
        if peer == self.original.feed.peer:
            self.original.feed.cut(self.clock.now())
        elif isinstance(peer, bytes):
            self.unreached.append(peer)

    def stop(self) -> None:
        """Stop after Ctrl-C or after the end of ps-serve: within STOP_S."""
        self.stop_by = time.monotonic() + STOP_S
        self.happen(MachineEvent(EventKind.STOP, self.clock.now()))

    def loop(self, sockets: Sockets) -> None:
        """Serve until the run is over.

        A line on stdin is "" (show the tree), "stop" or the number of shards to reshard to. The end of stdin means
        stop; with a standby the process ends at once, and the standby goes on.
        """
        stdin = sys.stdin.fileno()

        def hear_parent() -> None:
            if not (lines := os.read(stdin, 4096).decode().splitlines()):
                sockets.unwatch(stdin)
                if (stops := self.stop_by < float("inf")) or not self.original.holds:
                    return None if stops else self.stop()
                text = "ps-serve was killed; its standby goes on"
                self.running, self.end = False, StopProcess(m.RefuseCode.SERVER_LOST, text)
            for line in lines:
                match line:
                    case "":
                        self.apply(self.server.show_tree(), self.clock.now())
                    case "stop":
                        self.stop()
                    case _:
                        self.happen(MachineEvent(EventKind.RESHARD, self.clock.now(), values=(int(line),)))

        sockets.watch(stdin, hear_parent)
        self.happen(MachineEvent(EventKind.START, self.clock.now()))
        if self.config.done:
            self.happen(MachineEvent(EventKind.ENDED, self.clock.now(), values=self.config.done))
        self.turns.tick_soon()
        self.turns.run(self.clock.turn, self._goes_on)
        self.wrote(last=True)
        self._tell_trace(last=True)

    def _tell_trace(self, last: bool = False) -> None:
        if self.trace is not None and (told := self.trace.take(self.server, self.clock.now(), last)):
            emit("log", name="trace", values=told)

    def _goes_on(self) -> bool:
        return self.running and (not self.server.ended or bool(self.lending.held)) and time.monotonic() < self.stop_by

    def _turn(self) -> None:
        """Handle what other threads and the sockets have left: written checkpoints, answers, lost peers."""
        self.wrote()
        if not self.trimmed and self._has_weights():
            self.trimmed = True
            give_back()
        if answers := self.answering.take():
            self._carry_out(answers)
        if self.unreached:
            unreached, self.unreached = self.unreached, []
            for lost in dict.fromkeys(unreached):
                self.happen(MachineEvent(EventKind.UNREACHED, self.clock.now(), lost))

    def _tick(self, now_ns: int) -> None:
        self.happen(MachineEvent(EventKind.TICK, now_ns, values=(self.bytes_up, self.bytes_down)))
        self._at_once(self.original.tick(now_ns))
        self._tell_trace()
        self.access_control.tick()
        self.watchdog.beat(lambda: self.server.shard.nbytes, self._reached)

    def _reached(self) -> int:
        """Return the clock that all live members have reached; -1 where none is known, as under gossip."""
        coordinator = self.server.coordinator
        if coordinator is None or self.server.shard.mode.rule is FoldRule.MIX:
            return -1
        return coordinator.min_clock


def give_back() -> None:
    """Give free memory back to the system, where libc is glibc: it keeps the memory of the messages of first weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


class ParentAddresses:
    """Decides which addresses are dialled over `port`.

    It hangs up on an address that is no longer used: else the messages that wait there would be sent after all if the
    address came back.
    """

    def __init__(self, port: Port) -> None:
        self.port = port
        self.above = self.beside = ""  # addresses of the parent's shard and of its standby; "": none was dialled
        self.clusters: set[str] = set()  # addresses of the other clusters that were dialled

    def turn(self, above: str) -> str:
        """Use `above` as the address of the parent's shard, and hang up on the one before. Return `above`."""
        if above != self.above:
            self._forget(self.above)
            self.above, self.beside = above, "" if above == self.beside else self.beside
        return above

    def ask(self, beside: str) -> bool:
        """Use `beside` as the address of the parent's standby. Return False if it is no address."""
        if beside != self.beside and is_address(beside):
            self._forget(self.beside)
            self.beside = beside
        return beside == self.beside

    def _forget(self, address: str) -> None:
        if address:  # "" stands for peers that dial this process
            self.port.hang_up(address)

    def tell(self, address: str, known: Set[str]) -> bool:
        """Use `address` for another cluster, and hang up on the clusters that are not in `known`.

        Return False if it is no address; then its owner will count as silent.
        """
        if address not in self.clusters and is_address(front(address)):
            for gone in self.clusters - known:
                self.lose(gone)
            self.clusters.add(address)
        return address in self.clusters

    def lose(self, address: str) -> bool:
        """Hang up on a cluster or the parent's standby, so that the next message dials anew. False if it is neither."""
        ours = address in self.clusters or address == self.beside != ""
        if ours:
            self.port.hang_up(address)
            self.clusters.discard(address)
        return ours
