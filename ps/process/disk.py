"""The checkpoints of one server process: written beside its work, read when the run goes back."""

from __future__ import annotations

from narrows.protocols.effects import Log
from narrows.ps.process import checkpoints
from narrows.ps.process.machine import Process
from narrows.ps.process.writer import Writer, Written
from narrows.ps.server import Server


class Disk:
    """Of one process; without a folder it does nothing."""

    def __init__(self, process: Process) -> None:
        self.process, self.folder, self.index = process, process.folder, process.index
        self.writer = Writer(process.folder, process.index) if process.folder is not None else None
        self.trouble = ""  # said once

    def write(self, clock: int, server: Server) -> None:
        """Begin to write one; the last of a run is waited for."""
        planned, coordinator, last = server.shard.planned, server.coordinator, server.over
        if self.writer is None or planned is None or planned.store.publication < 0 or (last and not self.process.keeps):
            return
        facts = {
            "publication": planned.store.publication,
            "shards": server.shard.settings.shards,
            "plan": planned.plan.packed(),
            "buffers": coordinator.buffers if coordinator is not None else b"",
            "epoch": coordinator.run.epoch if coordinator is not None else 0,
        }
        self.writer.write(clock, planned.store.arrays(), facts, server.shard.ledger.shared)
        if last:
            self.writer.wait()

    def take(self) -> Written | None:
        """One that is on disk by now, or could not be written."""
        return self.writer.take() if self.writer is not None else None

    def tell(self, written: Written) -> list[Log]:
        """What the console is told of it."""
        said, self.trouble = self.trouble, written.trouble
        where: dict[str, object] = {"shard": self.index, "clock": written.clock}
        if written.trouble and written.trouble != said:
            text = f"shard {self.index} cannot write a checkpoint and tries again: {written.trouble}"
            return [Log("disk", where | {"text": text})]
        # Else its process was killed meanwhile.
        return [Log("checkpoint", where)] if written.clock in written.kept and not written.trouble else []

    def load(self, clock: int, server: Server) -> None:
        """Read the checkpoint of this clock into the machine, and drop all after it. Raises NarrowsError."""
        if self.folder is None or self.writer is None:
            return
        self.writer.forget()
        checkpoints.drop_after(self.folder, self.index, clock)
        if clock < 0:
            return
        planned = server.shard.planned
        assert planned is not None
        planned.begin(*checkpoints.read_for(self.folder, self.index, server.shard.settings.shards, clock))
