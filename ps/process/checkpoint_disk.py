"""The checkpoints of one server process: written beside its work, read when the run goes back."""

from __future__ import annotations

import time

from narrows.protocols.effects import Log
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.checkpoints.checkpoint_writer import CheckpointWriter, WrittenCheckpoint
from narrows.ps.checkpoints.remote_archive import ArchiveClient
from narrows.ps.dashboard.event_texts import sentence
from narrows.ps.process.access_control import AccessControl
from narrows.ps.process.machine_factory import MachineFactory
from narrows.ps.process.watchdog import BEAT_S, BYTES_PER_S, HANG_S
from narrows.ps.server.server import Server


class CheckpointDisk:
    """The checkpoints of one process; without a folder it does nothing. On another machine than that of shard 0 a file
    is here while it travels."""

    def __init__(self, process: MachineFactory) -> None:
        self.process, self.folder, self.index = process, process.folder, process.index
        self.away: ArchiveClient | None = None
        if process.host and process.folder is not None:
            self.away = ArchiveClient(process.folder, process.index, process.coordinator, self._dial, self._alive)
        self.writer = CheckpointWriter(process.folder, process.index, self.away) if process.folder is not None else None
        self.trouble = ""  # said once
        self.nbytes, self.due_s = 0, 0.0
        self.prepared = False  # memory for the first copy was asked for

    def _dial(self) -> Sockets:
        process = self.process
        gate = AccessControl(process.keys, "", process.secret, process.coordinator)
        return Sockets(known_as=gate.name_at, curve=gate.curve)

    def _alive(self) -> None:
        """While all else may wait for what travels, this is the sign of life."""
        if (now := time.monotonic()) >= self.due_s:
            self.due_s = now + BEAT_S
            emit("alive", within=HANG_S + self.nbytes / BYTES_PER_S)

    def clocks(self) -> tuple[int, ...]:
        """Return the clocks of this shard's checkpoints. Raises NarrowsError."""
        if self.away is not None:
            return self.away.held()
        return checkpoint_files.clocks(self.folder, self.index) if self.folder is not None else ()

    def sound(self, shards: int) -> tuple[tuple[int, ...], list[str]]:
        """As checkpoints.sound. Raises NarrowsError."""
        if self.folder is None:
            return (), []
        return (self.away.sound(shards), []) if self.away else checkpoint_files.sound(self.folder, self.index, shards)

    def prepare(self, server: Server) -> None:
        """Once there are arrays, the first copy of them has its memory soon."""
        planned = server.shard.planned
        if self.writer is not None and not self.prepared and planned is not None and planned.store.publication >= 0:
            self.prepared = True
            self.writer.prepare(planned.store.arrays())

    def write(self, clock: int, server: Server) -> None:
        """Begin to write one; the last of a run is waited for."""
        planned, coordinator, last = server.shard.planned, server.coordinator, server.over
        if self.writer is None or planned is None or planned.store.publication < 0 or (last and not self.process.keeps):
            return
        facts = {
            "publication": planned.store.publication,
            "shards": server.shard.settings.shards,
            "plan": planned.plan.packed(),
            "buffers": coordinator.buffers.packed if coordinator is not None else b"",
            "epoch": coordinator.run.epoch if coordinator is not None else 0,
            "ranges": coordinator.ranges.packed(clock) if coordinator is not None else b"",
            "saved": planned.saved,
            # They hold from this clock on: where the plan is about to change, these are the settings of the next one.
            "settings": coordinator.moves.next.packed() if coordinator is not None else b"",
        }
        self.nbytes, self.prepared = server.shard.nbytes, True
        self.writer.write(clock, planned.arrays(server.shard.ledger), facts, server.shard.ledger.shared)
        if last:
            self.writer.wait()

    def take(self, last: bool = False) -> WrittenCheckpoint | None:
        """One that is on disk by now, or could not be written. `last`: the process ends, so one that is being written is waited
        for."""
        if last and self.writer is not None:
            self.writer.wait()
        return self.writer.take() if self.writer is not None else None

    def tell(self, written: WrittenCheckpoint) -> list[Log]:
        """Return what the console is told of a write."""
        said, self.trouble = self.trouble, written.trouble
        where: dict[str, object] = {"shard": self.index, "clock": written.clock}
        if written.trouble and written.trouble != said:
            text = f"shard {self.index} cannot write a checkpoint and tries again: {written.trouble}"
            return [Log("disk", where | {"text": text, "why": f"shard {self.index}: {written.trouble}"})]
        # Else its process was killed meanwhile.
        return [self.announced(written.clock)] if written.clock in written.kept and not written.trouble else []

    def announced(self, clock: int) -> Log:
        """Return the event of a checkpoint that is on disk."""
        told: dict[str, object] = {"shard": self.index, "clock": clock}
        if not self.process.keeps:  # --checkpoint-dir none: who reads of it would look for a file
            told["text"] = sentence("checkpoint", told) + ", in a temporary folder while the run lasts"
        return Log("checkpoint", told)

    def load(self, clock: int, server: Server) -> None:
        """Read the checkpoint of this clock into the machine, and drop all after it. Raises NarrowsError."""
        if self.folder is None or self.writer is None:
            return
        self.writer.forget()
        if self.away is None:  # else they are dropped there, with the next that is written
            checkpoint_files.drop_after(self.folder, self.index, clock)
        if clock < 0:
            return
        planned, shards = server.shard.planned, server.shard.settings.shards
        assert planned is not None
        if self.away is not None:
            return planned.begin(*self.away.load(shards, clock))
        facts = checkpoint_files.facts_of(self.folder, clock)
        planned.begin(*checkpoint_files.read_for(self.folder, self.index, shards, clock, facts))
