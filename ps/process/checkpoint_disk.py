"""The checkpoints of one server process: a thread writes them while the shard works; the runner reads them back."""

from __future__ import annotations

import time

from narrows.protocols.config.key_ranges import VALUES
from narrows.protocols.effects import Log
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.checkpoints.checkpoint_writer import CheckpointWriter, WrittenCheckpoint
from narrows.ps.checkpoints.remote_archive import ArchiveClient
from narrows.ps.dashboard.event_texts import sentence
from narrows.ps.process.access_control import AccessControl
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.watchdog import BEAT_S, BYTES_PER_S, HANG_S
from narrows.ps.server.server import Server


class CheckpointDisk:
    """Writes and reads the checkpoints of one process. Without a folder it does nothing.

    The file of a remote shard is in this machine's folder only while it is on its way to or from shard 0's machine.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.folder, self.index = config, config.folder, config.index
        self.away: ArchiveClient | None = None  # of a remote shard: the folder on shard 0's machine
        if config.host and config.folder is not None:
            self.away = ArchiveClient(config.folder, config.index, config.coordinator, self._dial, self._alive)
        self.copy = config.copy(f"shard-{config.index}.", self._alive)
        self.writer = (
            CheckpointWriter(config.folder, config.index, self.away, self.copy) if config.folder is not None else None
        )
        self.failure = ""  # why the newest write failed, "" if it did not; logged once
        self.nbytes, self.due_s = 0, 0.0  # bytes of the machine; time.monotonic() of the next sign of life

    def _dial(self) -> Sockets:
        config = self.config
        access_control = AccessControl(config.keys, "", config.secret, config.coordinator)
        return Sockets(known_as=access_control.name_at, curve=access_control.curve)

    def _alive(self) -> None:
        """Give ps-serve a sign of life while a file is on its way: the loop may wait for it."""
        if (now := time.monotonic()) >= self.due_s:
            self.due_s = now + BEAT_S
            emit("alive", within=HANG_S + self.nbytes / BYTES_PER_S, clock=-1)

    def clocks(self) -> tuple[int, ...]:
        """Return the clocks of this shard's checkpoints. Raises NarrowsError."""
        if self.away is not None:
            return self.away.held()
        return checkpoint_files.clocks(self.folder, self.index) if self.folder is not None else ()

    def sound(self, shards: int) -> tuple[tuple[int, ...], list[str]]:
        """As `checkpoint_files.sound`. Raises NarrowsError if shard 0's machine does not answer."""
        if self.folder is None:
            return (), []
        return (self.away.sound(shards), []) if self.away else checkpoint_files.sound(self.folder, self.index, shards)

    def write(self, clock: int, server: Server) -> None:
        """Begin to write the checkpoint of a clock; wait for it if the run is over."""
        planned, coordinator, last = server.shard.model_shard, server.coordinator, server.over
        if self.writer is None or planned is None or planned.store.publication < 0 or (last and not self.config.keeps):
            return
        facts = {
            "publication": planned.store.publication,
            "shards": server.shard.settings.shards,
            "plan": planned.plan.packed(),
            "buffers": coordinator.buffers.packed if coordinator is not None else b"",
            "epoch": coordinator.run.epoch if coordinator is not None else 0,
            "ranges": coordinator.ranges.packed(clock) if coordinator is not None else b"",
            "saved": planned.saved,
            "steps": planned.steps,
            # The settings from this clock on: during a replan those of the next generation.
            "settings": coordinator.resharding.next.packed() if coordinator is not None else b"",
        }
        if (cut := server.shard.settings.cut) != VALUES:
            facts["cut"] = cut
        self.nbytes = server.shard.nbytes
        self.writer.write(clock, planned.arrays(server.shard.ledger), facts, server.shard.ledger.shared)
        if last:
            self.writer.wait()

    def take(self, last: bool = False) -> WrittenCheckpoint | None:
        """A checkpoint that was written, or could not be, since the last call; None: there is none.

        Args:
            last: the process ends, so wait for a write under way.
        """
        if last and self.writer is not None:
            self.writer.wait()
        return self.writer.take() if self.writer is not None else None

    def tell(self, written: WrittenCheckpoint) -> list[Log]:
        """Return the log events of a write. A disk's error is logged once for as long as it stays the same."""
        said, self.failure = self.failure, written.trouble
        where: dict[str, object] = {"shard": self.index, "clock": written.clock}
        if written.trouble and written.trouble != said:
            text = f"shard {self.index} cannot write a checkpoint and tries again: {written.trouble}"
            return [Log("disk", where | {"text": text, "why": f"shard {self.index}: {written.trouble}"})]
        # If the clock is not in `kept`, its process was killed during the write.
        return [self.announced(written.clock)] if written.clock in written.kept and not written.trouble else []

    def announced(self, clock: int) -> Log:
        """Return the event of a checkpoint that is on disk."""
        values: dict[str, object] = {"shard": self.index, "clock": clock}
        if not self.config.keeps:  # --checkpoint-dir none: tell the user that no file will stay
            values["text"] = sentence("checkpoint", values) + ", in a temporary folder while the run lasts"
        return Log("checkpoint", values)

    def load(self, clock: int, server: Server) -> None:
        """Read the checkpoint of this clock into the machine, and drop all after it. Raises NarrowsError."""
        if self.folder is None or self.writer is None:
            return
        self.writer.forget()
        if self.away is None:  # of a remote shard, shard 0's machine drops them with the next write
            checkpoint_files.drop_after(self.folder, self.index, clock, self.copy)
        if clock < 0:
            return
        planned, settings = server.shard.model_shard, server.shard.settings
        assert planned is not None
        if self.away is not None:
            return planned.begin(*self.away.load(settings.shards, settings.cut, clock))
        facts = checkpoint_files.facts_of(self.folder, clock)
        where = (self.folder, self.index, settings.shards, settings.cut)
        planned.begin(*checkpoint_files.read_for(*where, clock, facts))
