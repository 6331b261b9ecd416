"""An in-process cluster whose servers have a checkpoint folder. A server's runner carries out its disk effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kit import in_process
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, Send, ServerEffect
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.sockets import Peer, Receipt
from narrows.protocols.wire import decode
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.runner import ServerRunner
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.shard.reports import COORDINATOR
from narrows.worker import clock

COORDINATORS = "tcp://coordinator:1"  # address


class Carried:
    """The sockets of a server process in an in-process cluster: they send to the cluster, and receive nothing."""

    def __init__(self, cluster: OnDisk, index: int) -> None:
        self.cluster, self.index = cluster, index

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        peer = COORDINATOR if to == COORDINATORS else self.index if isinstance(to, str) else to
        self.cluster.carry(self.index, Send(peer, decode(frames)))
        return Receipt()

    def receive(self, limit_ms: int) -> list[tuple[Peer, list[Buffer]]]:
        return []

    def wake(self) -> None: ...

    def hang_up(self, address: str) -> None: ...

    def close(self) -> None: ...


class OnDisk(in_process.Cluster):
    """An in-process cluster whose servers have a checkpoint folder."""

    lives = 0

    def __init__(
        self, settings: Settings, folder: Path, resume: bool = False, parent: in_process.Cluster | None = None
    ) -> None:
        OnDisk.lives += 1
        self.folder, self.resume = folder, resume
        self.runners: list[ServerRunner] = []
        super().__init__(settings, parent, "cluster0")
        with self.changed:
            self.ahead_ns = 0
            self._apply(0, self.servers[0].tick(self.now()))

    def _server(self, index: int) -> Server:
        config = ServerConfig(
            index=index,
            settings=self.settings,
            bind="",
            coordinator=COORDINATORS if index else "",
            first_epoch=OnDisk.lives << 20,
            checkpoint_dir=str(self.folder),
            resume=self.resume,
            parent="tcp://parent:1" if self.parent is not None else "",
        )
        self.runners.append(ServerRunner(config, Carried(self, index), 1 + index))
        return self.runners[-1].server

    def carry(self, index: int, effect: Send) -> None:
        self._carry_out(index, [effect])

    def _apply(self, index: int, effects: Iterable[ServerEffect]) -> None:
        runner = self.runners[index]
        runner.apply(list(effects), self.now())
        if runner.disk.writer is not None:
            runner.disk.writer.wait()
        runner.wrote()

    def checkpoint_soon(self) -> None:
        """Advance the clock so that a checkpoint is due. It is written at the next clock of the run."""
        with self.changed:
            self.ahead_ns += int(self.settings.checkpoint_every * NS)
            self._apply(0, self.servers[0].tick(self.now() + self.ahead_ns))

    def move(self, shards: int) -> None:
        """Cut the keys over `shards` shards, as ps-serve does: start the new processes, and notify process 0."""
        with self.changed:
            first = range(len(self.servers), shards)
            self.settings = replace(self.settings, shards=max(shards, len(self.servers)))
            self.runners[0].happen(MachineEvent(EventKind.RESHARD, self.now(), values=(shards,)))
            for index in first:
                self.servers.append(self._server(index))
                self._apply(index, self.servers[index].start(self.now()))

    def change(self, **way: Any) -> None:
        """Change settings of the running run, as --replan change does."""
        coordinator = self.servers[0].coordinator
        assert coordinator is not None
        with self.changed:
            coordinator.resharding.change(coordinator.run.settings.changed(**way))
            self._apply(0, self.servers[0].tick(self.now()))

    def changing(self, ways: dict[int, int | dict[str, Any]]) -> Callable[[int, int], None]:
        """Return a function for `one_process.until`. At these clocks of worker 0 it moves the keys, or changes the plan.

        Args:
            ways: by clock: so many shards, as for `move`, or settings, as for `change`.
        """
        left = dict(ways)

        def at(worker: int, step: int) -> None:
            way = left.pop(clock(), None) if worker == 0 else None
            if isinstance(way, dict):
                self.change(**way)
            elif way is not None:
                self.move(way)

        return at

    def interrupt(self) -> None:
        """Interrupt the servers, as Ctrl-C does."""
        with self.changed:
            self._apply(0, self.servers[0].stop(self.now()))
