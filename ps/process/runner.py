"""Runs the machine of one server process: messages, ticks and stdin go in, effects are carried out. It has no rule of its own.

Workers (and, with process 0, the other shards, and other clusters that gossip) dial this process. Process i > 0 dials process
0, and each the shard above, where there is one, and the clusters that it gossips with. One thread owns everything.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.addresses import is_address
from narrows.protocols.effects import NS, Checkpoint, Load, Log, Send, ServerEffect, Stop, Tell
from narrows.protocols.errors import BY_EXIT_CODE, NarrowsError
from narrows.protocols.runtime.clock import Awake
from narrows.protocols.runtime.curve import Why
from narrows.protocols.runtime.keys import SERVER, refusal
from narrows.protocols.runtime.sockets import NOBODY, Drops, Peer, Port, Receipt, Sockets
from narrows.protocols.wire import decode, encode
from narrows.ps.changes import Load as LoadArrays
from narrows.ps.events import Event, Kind
from narrows.ps.planned import Stage
from narrows.ps.process import checkpoints
from narrows.ps.process.gate import Gate
from narrows.ps.process.journal import Journal
from narrows.ps.process.machine import Process, emit, journal_most, machine
from narrows.ps.process.writer import Writer, Written
from narrows.ps.reports import COORDINATOR
from narrows.ps.server import OF_CLUSTERS

TICK_MS = 20  # longest time without a tick
STOP_S = 20.0  # shards that do not come to rest within this are ended as they are


class Runner:
    """Carries out the effects of one `Server`, which listens on `number`. `both`: files for its journal."""

    def __init__(
        self,
        process: Process,
        port: Port,
        number: int,
        gate: Gate | None = None,
        both: tuple[int, int] | None = None,
    ) -> None:
        self.process, self.port = process, port
        self.gate = gate or Gate("", "", process.secret, process.coordinator)
        self.clock = Awake()
        self.bytes_up = self.bytes_down = 0  # to and from the server above, and other clusters
        self.drops = Drops(self._say_dropped)
        self.lending: list[Receipt] = []  # of views of the store
        self.told: set[str] = set()  # clusters that are dialled
        self.unreached: list[bytes] = []  # peers that were sent something and are not there
        self.end = Stop()
        self.running = True
        self.stop_by = float("inf")
        self.writer = Writer(process.folder, process.index) if process.folder is not None else None
        self.trouble = ""  # of the disk, said once
        most = journal_most(process.settings.shards)
        self.journal = Journal(both, self._lent, most) if both is not None else None
        self.anew = True  # the journal is to begin again
        self.began_ns = 0  # when the event was, that is being handled
        if self.journal is not None and self.journal.whole and process.replay:
            self.gate.known = self.server = self.journal.machine()
            self._replay(self.journal)
        else:
            own = self.gate.guard.own if self.gate.guard is not None else None
            self.server = machine(process, number, self._lent, own)
        self.gate.known = self.server
        self._keep()

    def _lent(self) -> bool:
        self.lending = [receipt for receipt in self.lending if receipt.lent]
        return bool(self.lending)

    def _log(self, event: str, **told: Any) -> None:
        emit("log", name=event, values={"shard": self.process.index, **told})

    def _say_dropped(self, text: str) -> None:
        if not self.server.over:
            self._log("dropped", text=text)

    # The journal.

    def _happen(self, event: Event, frames: Sequence[m.Buffer] = ()) -> list[ServerEffect]:
        """Return the effects of an event, whose message has these frames. Raises RemoteProtocolError as the machine does."""
        self.began_ns = time.monotonic_ns()
        if self.journal is not None:
            self.journal.note(event, frames)
        return self.server.happen(event)

    def happen(self, event: Event, frames: Sequence[m.Buffer] = ()) -> None:
        """One event, with all that follows."""
        self.apply(self._happen(event, frames), event.now_ns)

    def _keep(self) -> None:
        """Begin the journal anew where it is time for that."""
        journal = self.journal
        if journal is None:
            return
        journal.spent_ns += time.monotonic_ns() - self.began_ns if self.began_ns else 0
        self.began_ns = 0
        if self.anew or journal.due:
            self.anew = False
            journal.begin(self.server)
        if journal.trouble:
            self.journal, index = None, self.process.index
            text = f"shard {index} cannot keep its journal ({journal.trouble}): if it dies it goes back to a checkpoint"
            self._log("journal", text=text)

    def _replay(self, journal: Journal) -> None:
        """All that happened since the machine was written, but for what others have seen of it."""
        began = time.monotonic()
        done = journal.replay(self.server, self._load)
        self.running, self.end = done.stop is None, done.stop or self.end
        self.clock = Awake(begins_ns=self.server.now_ns)
        index, shard = self.process.index, self.server.shard
        again = f"{done.events} events done again in {time.monotonic() - began:.1f} s"
        self._log("replayed", clock=shard.min_clock, text=f"shard {index} goes on where it was ({again})")
        # Later in a clock the arrays may have what belongs to the next one.
        whole = shard.planned is not None and shard.planned.stage in (Stage.FOLD, Stage.CHECKPOINT)
        writing = shard.writing
        if writing == shard.min_clock and whole:
            self._checkpoint(writing)
        elif writing >= 0 and self.process.folder is not None:
            self._write_down(Written(writing, checkpoints.clocks(self.process.folder, index), 0))
        elif self.server.over and shard.checkpoints:  # who waits for it may not have been told
            self._log("checkpoint", clock=shard.checkpoints[-1])

    # Effects.

    def apply(self, effects: Iterable[ServerEffect], now_ns: int) -> None:
        """Carry out what the machine asks for, and what follows from that inside it."""
        self._carry_out(effects)
        while self.server.inner:
            self._carry_out(self.server.advance(now_ns))
        self._keep()

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
        if receipt is NOBODY and isinstance(to, bytes):
            self.unreached.append(to)
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

    def wrote(self) -> None:
        """Tell of a checkpoint that is on disk by now, or could not be written."""
        if self.writer is not None and (written := self.writer.take()) is not None:
            self._write_down(written)

    def _write_down(self, written: Written) -> None:
        index = self.process.index
        self.happen(Event(Kind.WROTE, self.clock.now(), values=(written.clock, [*written.kept], written.took_ns)))
        if written.trouble and written.trouble != self.trouble:
            text = f"shard {index} cannot write a checkpoint and tries again: {written.trouble}"
            self._log("disk", clock=written.clock, text=text)
        elif written.clock in written.kept and not written.trouble:  # else its process was killed meanwhile
            self._log("checkpoint", clock=written.clock)
        self.trouble = written.trouble

    def _load(self, clock: int) -> None:
        planned, folder = self.server.shard.planned, self.process.folder
        if folder is None or self.writer is None:
            return
        self.writer.forget()
        checkpoints.drop_after(folder, self.process.index, clock)
        self.anew = True  # done again later, it would drop what was written since; and the file may be gone by then
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
            self.happen(Event(Kind.COORDINATOR, now_ns, message=decode(frames)), frames)
        elif peer == self.server.above:
            self.bytes_down += sum(map(len, frames))
            try:
                message = decode(frames)
            except NarrowsError as error:
                self.fail_above(str(error))
            else:
                self.happen(Event(Kind.ABOVE, now_ns, message=message), frames)

    def fail_above(self, text: str, code: int = m.RefuseCode.INCOMPATIBLE) -> None:
        """The session with the server above is over."""
        self.happen(Event(Kind.FAILED_ABOVE, self.clock.now(), values=(text, int(code))))

    def _receive_below(self, peer: bytes, frames: list[m.Buffer], now_ns: int) -> None:
        try:
            message, size = decode(frames), sum(map(len, frames))
            self.gate.check(peer, message, size)
            if isinstance(message, OF_CLUSTERS):
                self.bytes_down += size
            effects = self._happen(Event(Kind.BELOW, now_ns, peer, message), frames)
        except NarrowsError as error:
            effects = self.server.refused(peer, error)
            if not self.gate.counted(str(error)):
                effects = [effect for effect in effects if not isinstance(effect, Log)]
        self.apply(effects, now_ns)

    def shut_out(self, address: str, why: Why, public: str) -> None:
        """A handshake has failed. Another cluster may not know of us yet: the next message to it dials anew."""
        if not address:
            self.gate.stranger(why, public, lambda text: emit("log", name="stranger", values={"text": text}))
        elif address in self.told:
            self.port.hang_up(address)
            self.told.remove(address)
        elif address == self.server.above and (text := refusal(why, self.gate.parent_key, "--parent-key")):
            self.fail_above(text, m.RefuseCode.AUTHENTICATION)

    def linked(self, address: str) -> None:
        """What we have dialled is connected anew."""
        if address == self.server.above or address in self.told:
            self.happen(Event(Kind.LINKED, self.clock.now(), values=(address if address in self.told else "",)))

    def stop(self) -> None:
        """Ctrl-C or the end of the parent."""
        self.stop_by = time.monotonic() + STOP_S
        self.happen(Event(Kind.STOP, self.clock.now()))

    def loop(self, sockets: Sockets) -> None:
        """Until the run is over. A line on stdin: show the tree; its end: stop."""
        stdin = sys.stdin.fileno()

        def hear_parent() -> None:
            if os.read(stdin, 4096):
                self.apply(self.server.show_tree(), self.clock.now())
            else:
                sockets.unwatch(stdin)
                self.stop()

        sockets.watch(stdin, hear_parent)
        self.happen(Event(Kind.START, self.clock.now()))
        if self.process.done:
            self.happen(Event(Kind.ENDED, self.clock.now(), values=self.process.done))
        ticked = self.clock.turn()
        while self.running and not self.server.ended and time.monotonic() < self.stop_by:
            for peer, frames in sockets.receive(TICK_MS):
                self.receive(peer, frames)
            self.wrote()
            unreached, self.unreached = self.unreached, []
            for lost in dict.fromkeys(unreached):
                self.happen(Event(Kind.UNREACHED, self.clock.now(), lost))
            now_ns = self.clock.turn()
            if now_ns - ticked >= TICK_MS * NS // 1000:
                ticked = now_ns
                self.happen(Event(Kind.TICK, now_ns))
                self.gate.tick()
        self.wrote()

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
            if name != SERVER:
                text = f"shard {self.process.index}: {name} sent {size / 1e6:.2f} MB"
                self._log("sent", name=name, bytes=size, text=text)
        emit("done", dropped=dropped, refused=dict(self.gate.refused))


def run(process: Process, ready: Callable[..., None], both: tuple[int, int] | None = None) -> None:
    """Serve until the run is over or stdin ends. `ready` is told the port once it is bound, and the epoch that this life of the
    coordinator begins in (0 where there is none). `both`: files for its journal."""
    gate = Gate(process.keys, process.parent_key, process.secret, process.coordinator)
    with contextlib.closing(Sockets(known_as=gate.name_at, curve=gate.curve)) as sockets:
        number = sockets.listen(process.bind)
        runner = Runner(process, sockets, number, gate, both)
        sockets.failed, sockets.linked = runner.shut_out, runner.linked
        coordinator = runner.server.coordinator
        ready(port=number, epoch=coordinator.run.first_epoch if coordinator is not None else 0)
        runner.loop(sockets)
    if runner.stop_by < float("inf") and not process.keeps and process.folder is not None:
        shutil.rmtree(process.folder, ignore_errors=True)  # whoever would do it may have been killed
    if runner.end.code:
        raise BY_EXIT_CODE.get(runner.end.code, NarrowsError)(runner.end.text)
    runner.totals()
