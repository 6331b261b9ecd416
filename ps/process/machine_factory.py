"""Makes the machine of a server process: for a new run, or from the newest checkpoint of a run that is resumed.

How it works
1. `MachineFactory` holds the arguments of a process, as ps-serve sent them.
2. `machine` reads which checkpoints of this shard are sound. In process 0 it chooses the newest clock that all shards
   have, and takes from that checkpoint the epoch, the settings of the newest plan, the model spec, the buffers and the
   ranges.
3. `machine` makes the parts: `Coordinator` in process 0, `Member` in process 0 of a cluster, `Shard` in each process,
   and `Server` around them. A shard reads its arrays later, when the ledger names the checkpoint (`LoadCheckpoint`).
4. `original` adds the part that replicates the machine to a standby. `introduction` is what a standby, or a remote
   host, has to know of this server.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from narrows.compression import ladder
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import OF_PLAN, Settings
from narrows.protocols.config.timing import Timing, standby_lost_ns
from narrows.protocols.effects import NS
from narrows.protocols.member.member import Member
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.hosts import reached
from narrows.protocols.runtime.network.key_files import SecretKeyFile
from narrows.protocols.wire import pack
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.planner.codec_costs import coded
from narrows.ps.replication.peer_shards import PeerShards
from narrows.ps.replication.replication_primary import ReplicationPrimary
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ShardResources
from narrows.ps.shard.shard import Shard
from narrows.ps.store.store import ServerOptimizer

RUN_EPOCHS = 1 << 40  # more epochs than a run has before it is resumed
TOLD = ("secret", "parent_timeout", "first_epoch", "replicas")  # fields that a standby is sent

# Takes the number of shards. Returns the clocks that a shard can begin from, and a sentence for each damaged file.
SoundCheckpoints = Callable[[int], tuple[tuple[int, ...], list[str]]]


@dataclass(frozen=True)
class MachineFactory:
    """The arguments of one server process."""

    index: int
    settings: Settings
    bind: str  # tcp://host:port; port 0 or * takes any
    coordinator: str  # address of process 0, "" in it
    first_epoch: int
    checkpoint_dir: str
    resume: bool
    again: bool = False  # a shard of this server was restarted in this run: the workers join again
    keeps: bool = True  # the user keeps the checkpoints after the run, so the last one is written too
    secret: str = ""  # shared by the shards of this server: a Report must come from a process that knows it
    parent: str = ""  # address of the parent's process 0, "": this server is a root
    parent_timeout: float = 30.0  # seconds of silence after which the parent counts as lost
    keys: str = ""  # folder of --keys; "": connections are not encrypted
    parent_key: str = ""  # file of --parent-key
    seals: float = 0.0  # bytes per second that one core of this machine encrypts, 0: not measured
    replay: bool = False  # go on with the machine in the journal
    done: tuple[int, ...] = ()  # shards that had ended when this process was restarted
    replicas: int = 0  # number of standbys that may follow this server
    follows: str = ""  # address of the shard that this one follows as a standby
    host: str = ""  # of a remote shard: the host at which members reach it
    watched: bool = False  # a console or dashboard shows the members' summaries
    away: tuple[tuple[int, str], ...] = ()  # (shard, host) of each remote shard

    @property
    def folder(self) -> Path | None:
        """The folder of checkpoints, None: there is none."""
        return Path(self.checkpoint_dir) if self.checkpoint_dir else None


def _optimizers() -> Callable[[ModelSpec, int, int], ServerOptimizer]:
    from narrows.ps.store.torch_optimizer import (  # seconds of imports that adding updates can do without
        TorchOptimizer,
        warm_up,
    )

    warm_up()
    return TorchOptimizer


def keys_that_fit() -> int:
    """The number of parameters whose master copy and published copy, float32 each, fit into this machine's memory."""
    return _memory() // 8


def journal_most(shards: int) -> int:
    """The largest machine, in bytes, with which the journals of all shards take at most half of the memory."""
    return _memory() // (8 * shards)


def _memory() -> int:
    """Bytes of memory that this computer has, or that its container may use."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max": there is no limit
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most


def original(
    process: MachineFactory, server: Server, port: int, freeze: Callable[[], bytes], siblings: PeerShards | None
) -> ReplicationPrimary:
    """Make the part of a process that replicates its shard to a standby.

    Args:
        process: its arguments.
        server: its machine.
        port: the port that it listens on.
        freeze: returns the machine as bytes.
        siblings: what shard 0 knows of the other shards, if this server was a standby; else None.
    """
    lost_ns, coordinator = standby_lost_ns(process.settings.lease), server.coordinator
    first_view = coordinator.run.first_epoch if coordinator is not None else 0
    before = process.follows if siblings is not None else ""
    siblings = siblings or PeerShards(process.settings.shards, lost_ns)
    return ReplicationPrimary(process.index, server, port, lost_ns, freeze, siblings, first_view, before)


def introduction(process: MachineFactory, server: Server, *more: str) -> m.ReplicationBegin:
    """What a standby, or a remote host, has to know of this server. `more`: names of further fields of `process`."""
    assert server.coordinator is not None
    reports, settings = server.coordinator.reports, server.coordinator.run.settings
    told = {
        "release": release(),
        "settings": asdict(settings),
        "ports": [reports[shard].port if shard in reports else 0 for shard in range(settings.shards)],
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "parent": server.above,
        "has_parent_key": bool(process.parent_key),
        **{name: getattr(process, name) for name in (*TOLD, *more)},
    }
    return m.ReplicationBegin(pack(told))


def release() -> str:
    """The versions that must be equal in both processes when a pickled machine goes from one to the other."""
    names = ("narrows", "numpy", "torch")
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])


def resumed(settings: Settings, kept: bytes) -> Settings:
    """The settings with the newest plan: with --replan change, that of the checkpoint if it is newer.

    Args:
        settings: of the flags.
        kept: the packed settings of the checkpoint, or b"".
    """
    if (
        settings.replan != "change"
        or not kept
        or (before := Settings.unpacked(kept)).plan_number <= settings.plan_number
    ):
        return settings
    return replace(settings, **{name: getattr(before, name) for name in OF_PLAN}).validated()


def machine(
    process: MachineFactory, port: int, lent: Callable[[], bool], own: SecretKeyFile | None, sound: SoundCheckpoints
) -> Server:
    """Make the machine of a process: for a new run, or from the newest checkpoint if the process resumes a run.

    Args:
        process: its arguments.
        port: the port that it listens on.
        lent: returns True while arrays of the machine are lent to a reader.
        own: the key by which other clusters know this process; None: without keys.
        sound: as `CheckpointDisk.sound`.

    Raises:
        NarrowsError: no sound checkpoint is left, or a file cannot be read.
    """
    folder, settings, child = process.folder, process.settings, bool(process.parent)
    mixes = settings.mode().rule is FoldRule.MIX and not process.again  # a gossip run resumes from its workers' models
    restart, first_epoch = -1, process.first_epoch
    kept: tuple[int, ...] = ()
    facts: dict[str, Any] = {}
    coordinator = member = None
    if folder is not None and process.resume:
        kept, damaged = sound(settings.shards)
        for text in damaged:
            emit("log", name="damaged", values={"shard": process.index, "text": text})
        if not process.index and not mixes:
            restart = checkpoint_files.newest(folder, settings.shards)
    if not process.index:
        if restart >= 0 and folder is not None:
            _, facts = checkpoint_files.read(folder, 0, restart, only=())
            first_epoch = max(first_epoch, facts.get("epoch", 0) + RUN_EPOCHS)  # also if the system's time was set back
            before, settings = settings, resumed(settings, facts.get("settings", b""))
            if settings.plan_number > before.plan_number:
                emit("log", name="replan", values=settings.told(restart))
        priced = coded() if ladder(settings.compress).auto else coded(settings.compress)
        coordinator = Coordinator(settings, first_epoch, restart, child, keys_that_fit(), dict(process.away), priced)
        if not process.again:
            coordinator.checkpoint_schedule.resumed()
            coordinator.checkpoint_schedule.resumes = mixes and process.resume
            if restart >= 0:
                text = f"goes on from the checkpoint of clock {restart}"
                emit("log", name="resumed", values={"clock": restart, "text": text})
        if facts:
            coordinator.members.adopt(facts["plan"])
            coordinator.buffers.packed = facts["buffers"]
        if facts.get("ranges") and folder is not None:
            parts = [checkpoint_files.read(folder, each, restart, only=())[1] for each in range(facts.get("shards", 1))]
            coordinator.ranges.load(facts["ranges"], restart, [dict(part.get("saved", ())) for part in parts])
        if child:
            lost_ns = int(process.parent_timeout * NS)
            timing = Timing(lost_ns=lost_ns, connect_ns=lost_ns)
            expect = pack({"plan_digest": settings.plan_digest})
            member = Member(uuid.uuid4().hex, f"{socket.gethostname()}:{port}", expect, timing, coordinator.tree)
    resources = ShardResources(
        optimizer=_optimizers() if settings.mode().rule is FoldRule.OPTIMIZER else None,
        lent=lent,
        child=child,
        member=member,
        coordinator=coordinator,
        host=process.host,
    )
    shard = Shard(process.index, settings, time.time_ns(), port, kept, resources)
    host = reached(process.bind, process.parent) if member else ""
    public = own.public if own is not None else ""
    return Server(shard, coordinator, member, process.parent, host, public, process.replicas > 0)
