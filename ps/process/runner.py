"""Runs the machine of one server process: messages, ticks and stdin go in, effects are carried out. It has no rule of its own.

Workers (and, with process 0, the other shards, and other clusters that gossip) dial this process. Process i > 0 dials process
0, and each the shard above, where there is one, and the clusters that it gossips with. One thread owns everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.addresses import is_address
from narrows.protocols.cluster.coordinator import Coordinator
from narrows.protocols.effects import NS, Checkpoint, Load, Log, Send, ServerEffect, Stop, Tell
from narrows.protocols.errors import BY_EXIT_CODE, NarrowsError
from narrows.protocols.member.member import Member
from narrows.protocols.modes import Rule
from narrows.protocols.plan import Plan
from narrows.protocols.runtime.clock import Awake
from narrows.protocols.runtime.curve import Why
from narrows.protocols.runtime.keys import SERVER, Secret, refusal
from narrows.protocols.runtime.sockets import Drops, Peer, Port, Receipt, Sockets, reached
from narrows.protocols.settings import Settings
from narrows.protocols.timing import Timing
from narrows.protocols.wire import decode, encode
from narrows.ps.changes import Load as LoadArrays
from narrows.ps.planned import Means
from narrows.ps.process import checkpoints
from narrows.ps.process.gate import Gate
from narrows.ps.process.writer import Writer
from narrows.ps.reports import COORDINATOR
from narrows.ps.server import OF_CLUSTERS, Server
from narrows.ps.shard import Shard
from narrows.ps.store import ServerOptimizer

TICK_MS = 20  # longest time without a tick
STOP_S = 20.0  # shards that do not come to rest within this are ended as they are
RUN_EPOCHS = 1 << 40  # more than a run has until it is resumed


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
    keeps: bool = True  # checkpoints outlive the run: the last one is written too
    secret: str = ""  # of the shards of this server: who reports must know it
    parent: str = ""  # address of process 0 of the server above, where there is one
    parent_timeout: float = 30.0
    keys: str = ""  # folder; "": in the open
    parent_key: str = ""  # file

    @property
    def folder(self) -> Path | None:
        return Path(self.checkpoint_dir) if self.checkpoint_dir else None


def _optimizers() -> Callable[[Plan, int, int], ServerOptimizer]:
    from narrows.ps.optimizers import TorchOptimizer, warm_up  # seconds of imports that adding updates can do without

    warm_up()
    return TorchOptimizer


def keys_that_fit() -> int:
    """Parameters whose master copy and published copy, float32 each, this machine's memory holds."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8


def emit(event: str, **values: Any) -> None:
    """One line of JSON for the parent process, if it is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps({"event": event, **values}).encode() + b"\n")


def machine(process: Process, port: int, lent: Callable[[], bool], own: Secret | None) -> Server:
    """The machine of a process that listens on `port`, with the newest checkpoint of the run where it resumes one. `own`: the
    key that other clusters find here."""
    folder, settings, child = process.folder, process.settings, bool(process.parent)
    restart, first_epoch = -1, process.first_epoch
    kept: tuple[int, ...] = ()
    facts: dict[str, Any] = {}
    coordinator = member = None
    if folder is not None and process.resume:
        kept, damaged = checkpoints.sound(folder, process.index, settings.shards)
        for text in damaged:
            emit("log", name="damaged", values={"shard": process.index, "text": text})
        if not process.index:
            restart = checkpoints.newest(folder, settings.shards)
    if not process.index:
        if restart >= 0 and folder is not None:
            _, facts = checkpoints.read(folder, 0, restart, only=())
            first_epoch = max(first_epoch, facts.get("epoch", 0) + RUN_EPOCHS)  # a clock may have been set back
        coordinator = Coordinator(settings, first_epoch, restart, child, keys_that_fit())
        if facts:
            coordinator.roster.adopt(facts["plan"])
            coordinator.buffers = facts["buffers"]
        if child:
            lost_ns = int(process.parent_timeout * NS)
            timing = Timing(lost_ns=lost_ns, connect_ns=lost_ns)
            member = Member(uuid.uuid4().hex, f"{socket.gethostname()}:{port}", timing=timing, below=coordinator.tree)
    means = Means(
        optimizer=_optimizers() if settings.mode().rule is Rule.OPTIMIZER else None,
        lent=lent,
        child=child,
        member=member,
        coordinator=coordinator,
    )
    shard = Shard(process.index, settings, time.time_ns(), port, kept, means)
    host = reached(process.bind, process.parent) if member else ""
    return Server(shard, coordinator, member, process.parent, host, own.public if own is not None else "")


class Runner:
    """Carries out the effects of one `Server`, which listens on `number`."""

    def __init__(self, process: Process, port: Port, number: int, gate: Gate | None = None) -> None:
        self.process, self.port = process, port
        self.gate = gate or Gate("", "", process.secret, process.coordinator)
        self.clock = Awake()
        self.bytes_up = self.bytes_down = 0  # to and from the server above, and other clusters
        self.drops = Drops(self._say_dropped)
        self.lending: list[Receipt] = []  # of views of the store
        self.told: set[str] = set()  # clusters that are dialled
        self.end = Stop()
        self.running = True
        self.stop_by = float("inf")
        self.server = machine(process, number, self._lent, self.gate.guard.own if self.gate.guard is not None else None)
        self.gate.known = self.server
        self.writer = Writer(process.folder, process.index) if process.folder is not None else None
        self.trouble = ""  # of the disk, said once

    def _lent(self) -> bool:
        self.lending = [receipt for receipt in self.lending if receipt.lent]
        return bool(self.lending)

    def _say_dropped(self, text: str) -> None:
        if not self.server.over:
            emit("log", name="dropped", values={"shard": self.process.index, "text": text})

    # Effects.

    def apply(self, effects: Iterable[ServerEffect]) -> None:
        """Carry out what the machine asks for, and what follows from that inside it."""
        self._carry_out(effects)
        while self.server.inner:
            self._carry_out(self.server.advance(self.clock.now()))

    def _carry_out(self, effects: Iterable[ServerEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(bytes(peer), message):
                    self._put(self.process.coordinator if peer == COORDINATOR else peer, message)
                case Send(_, message):
                    self.bytes_up += self._put(self.server.above, message)
                case Tell(address, message):
                    self._tell(address, message)
                case Log(event, values):
                    emit("log", name=event, values=values)
                case Checkpoint(clock):
                    self._checkpoint(clock)
                case Load(clock):
                    self._load(clock)
                case Stop():
                    self.running, self.end = False, effect

    def _tell(self, address: str, message: m.Message) -> None:
        """Send to another cluster. If the address is none, its owner will count as silent."""
        if address not in self.told and is_address(address):
            for gone in self.told - self.server.shard.above.addresses:
                self.told.remove(gone)
                self.port.hang_up(gone)
            self.told.add(address)
        if address in self.told:
            self.bytes_up += self._put(address, message)

    def _put(self, to: Peer, message: m.Message) -> int:
        """Send `message`; return its bytes."""
        if isinstance(message, m.TIMED):
            message = replace(message, sent_ns=self.clock.now())
        frames = encode(message)
        receipt = self.port.send(to, frames, control=isinstance(message, m.CONTROL))
        if receipt.lent and not isinstance(frames[-1], bytes):  # bytes never change
            self.lending.append(receipt)
        self.drops.note(type(message).__name__, receipt)
        return sum(map(len, frames))

    def _checkpoint(self, clock: int) -> None:
        """Begin to write one; the last of a run is waited for."""
        planned, coordinator = self.server.shard.planned, self.server.coordinator
        last = self.server.over
        if self.writer is None or planned is None or planned.store.publication < 0 or (last and not self.process.keeps):
            return
        facts = {
            "publication": planned.store.publication,
            "shards": self.process.settings.shards,
            "plan": planned.plan.packed(),
            "buffers": coordinator.buffers if coordinator is not None else b"",
            "epoch": coordinator.run.epoch if coordinator is not None else 0,
        }
        self.writer.write(clock, planned.store.arrays(), facts, self.server.shard.ledger.shared)
        if last:
            self.writer.wait()
            self.wrote(at_once=False)  # effects are being carried out, and a report is among them

    def wrote(self, at_once: bool = True) -> None:
        """Tell of a checkpoint that is on disk by now, or could not be written."""
        written = self.writer.take() if self.writer is not None else None
        if written is None:
            return
        index, now_ns = self.process.index, self.clock.now()
        told = (written.clock, written.kept, written.took_ns)
        if at_once:
            self.apply(self.server.wrote_checkpoint(*told, now_ns))
        else:
            self.server.shard.wrote_checkpoint(*told)
        if not written.trouble:
            emit("log", name="checkpoint", values={"shard": index, "clock": written.clock})
        elif written.trouble != self.trouble:
            text = f"shard {index} cannot write a checkpoint and tries again: {written.trouble}"
            emit("log", name="disk", values={"shard": index, "clock": written.clock, "text": text})
        self.trouble = written.trouble

    def _load(self, clock: int) -> None:
        planned, folder = self.server.shard.planned, self.process.folder
        if folder is None or self.writer is None:
            return
        self.writer.forget()
        checkpoints.drop_after(folder, self.process.index, clock)
        if clock < 0:
            return
        assert planned is not None
        arrays, facts = checkpoints.read(folder, self.process.index, clock)
        keys, held = planned.store.size, arrays["x"].size
        if held != keys:
            raise NarrowsError(f"the checkpoint of clock {clock} has {held} keys here, not {keys}")
        planned.apply([LoadArrays(arrays, int(facts["publication"]))])

    # Events.

    def receive(self, peer: Peer, frames: list[m.Buffer]) -> None:
        now_ns = self.clock.now()
        if isinstance(peer, bytes):
            self._receive_below(peer, frames, now_ns)
        elif peer == self.process.coordinator:
            self.apply(self.server.handle(COORDINATOR, decode(frames), now_ns))
        elif peer == self.server.above:
            self.bytes_down += sum(map(len, frames))
            try:
                effects = self.server.handle_above(decode(frames), now_ns)
            except NarrowsError as error:
                effects = self.server.fail_above(str(error), now_ns)
            self.apply(effects)

    def _receive_below(self, peer: bytes, frames: list[m.Buffer], now_ns: int) -> None:
        try:
            message, size = decode(frames), sum(map(len, frames))
            self.gate.check(peer, message, size)
            if isinstance(message, OF_CLUSTERS):
                self.bytes_down += size
            effects = self.server.handle(peer, message, now_ns)
        except NarrowsError as error:
            effects = self.server.refused(peer, error)
            if not self.gate.counted(str(error)):
                effects = [effect for effect in effects if not isinstance(effect, Log)]
        self.apply(effects)

    def shut_out(self, address: str, why: Why, public: str) -> None:
        """A handshake has failed. Another cluster may not know of us yet: the next message to it dials anew."""
        if not address:
            self.gate.stranger(why, public, lambda text: emit("log", name="stranger", values={"text": text}))
        elif address in self.told:
            self.port.hang_up(address)
            self.told.remove(address)
        elif address == self.server.above and (text := refusal(why, self.gate.parent_key, "--parent-key")):
            self.apply(self.server.fail_above(text, self.clock.now(), m.RefuseCode.AUTHENTICATION))

    def stop(self) -> None:
        """Ctrl-C or the end of the parent."""
        self.stop_by = time.monotonic() + STOP_S
        self.apply(self.server.stop(self.clock.now()))

    def loop(self, sockets: Sockets) -> None:
        """Until the run is over. A line on stdin: show the tree; its end: stop."""
        stdin = sys.stdin.fileno()

        def hear_parent() -> None:
            if os.read(stdin, 4096):
                self.apply(self.server.show_tree())
            else:
                sockets.unwatch(stdin)
                self.stop()

        sockets.watch(stdin, hear_parent)
        self.apply(self.server.start(self.clock.now()))
        ticked = self.clock.turn()
        while self.running and not self.server.ended and time.monotonic() < self.stop_by:
            for peer, frames in sockets.receive(TICK_MS):
                self.receive(peer, frames)
            self.wrote()
            now_ns = self.clock.turn()
            if now_ns - ticked >= TICK_MS * NS // 1000:
                ticked = now_ns
                self.apply(self.server.tick(now_ns))
                self.gate.tick()

    def totals(self) -> None:
        """Tell the parent that this process is done, and what moved and was dropped."""
        dropped = dict(self.drops.counts)
        if self.process.parent:
            there = f"{self.process.parent} and its clusters" if self.told else self.process.parent
            moved = f"pushed {self.bytes_up / 1e6:.2f} MB to {there} and pulled {self.bytes_down / 1e6:.2f} MB"
            values = {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down, "dropped": dropped}
            text = f"shard {self.process.index} {moved}"
            emit("log", name="above", values={"shard": self.process.index, **values, "text": text})
        for name, size in sorted(self.gate.sent.items()):
            text = f"shard {self.process.index}: {name} sent {size / 1e6:.2f} MB"
            if name != SERVER:
                emit(
                    "log", name="sent", values={"shard": self.process.index, "name": name, "bytes": size, "text": text}
                )
        emit("done", dropped=dropped, refused=dict(self.gate.refused))


def run(process: Process, ready: Callable[..., None]) -> None:
    """Serve until the run is over or stdin ends. `ready` is told the port once it is bound, and the epoch that this life of the
    coordinator begins in (0 where there is none)."""
    gate = Gate(process.keys, process.parent_key, process.secret, process.coordinator)
    with contextlib.closing(Sockets(known_as=gate.name_at, curve=gate.curve)) as sockets:
        number = sockets.listen(process.bind)
        runner = Runner(process, sockets, number, gate)
        sockets.failed = runner.shut_out
        coordinator = runner.server.coordinator
        ready(port=number, epoch=coordinator.run.first_epoch if coordinator is not None else 0)
        runner.loop(sockets)
    if runner.stop_by < float("inf") and not process.keeps and process.folder is not None:
        shutil.rmtree(process.folder, ignore_errors=True)  # whoever would do it may have been killed
    if runner.end.code:
        raise BY_EXIT_CODE.get(runner.end.code, NarrowsError)(runner.end.text)
    runner.totals()
