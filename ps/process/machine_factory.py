"""Makes the machine of a server process: for a new run, or from the newest checkpoint of a run that is resumed.

How it works
1. `machine` reads which checkpoints of this shard are sound. In process 0 it chooses the newest clock that all shards
   have, and takes from that checkpoint the epoch, the settings of the newest plan, the model spec, the buffers and the
   ranges.
2. `machine` makes the parts: `Coordinator` in process 0, `Member` in process 0 of a cluster, `Shard` in each process,
   and `Server` around them. A shard reads its arrays later, when the ledger names the checkpoint (`LoadCheckpoint`).
3. `original` adds the part that replicates the machine to a standby. `introduction` is what a standby, or a remote
   host, has to know of this server.
"""

from __future__ import annotations

import os
import platform
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from typing import Any

from narrows.compression import ladder
from narrows.protocols import messages as m
from narrows.protocols.addresses import is_mailbox, parse_address
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import OF_PLAN, Settings
from narrows.protocols.config.timing import Timing, standby_lost_ns
from narrows.protocols.effects import NS
from narrows.protocols.errors import IncompatibleError
from narrows.protocols.member.member import Member
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.hosts import memory_bytes, reached
from narrows.protocols.runtime.network.key_files import SecretKeyFile
from narrows.protocols.wire import pack
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.planner.codec_costs import coded
from narrows.ps.planner.host_memory import HostMemory
from narrows.ps.process.config import OF_PRIMARY, ServerConfig
from narrows.ps.replication.replication_primary import ReplicationPrimary
from narrows.ps.replication.standby import PeerShards
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ShardResources
from narrows.ps.shard.shard import Shard
from narrows.ps.store.store import ArrayAllocator, ServerOptimizer

RUN_EPOCHS = 1 << 40  # more epochs than a run has before it is resumed
UNKNOWN = -1  # port of a shard that has not reported yet; 0 is that of a shard behind one port

# Takes the number of shards. Returns the clocks that a shard can begin from, and a sentence for each damaged file.
SoundCheckpoints = Callable[[int], tuple[tuple[int, ...], list[str]]]


def _optimizers(arrays: ArrayAllocator) -> Callable[[ModelSpec, int, int], ServerOptimizer]:
    from narrows.ps.store.torch_optimizer import (  # seconds of imports that adding updates can do without
        TorchOptimizer,
        warm_up,
    )

    warm_up()
    return partial(TorchOptimizer, arrays=arrays)


def keys_that_fit() -> int:
    """The number of parameters whose master copy and published copy, float32 each, fit into this machine's memory."""
    return memory_bytes() // 8


def journal_most(shards: int) -> int:
    """Return the largest machine, in bytes, for which a shard keeps a journal.

    Machine and journal take three times as much: the arrays, their copy, and events. All shards together then take at
    most half of the memory.
    """
    return memory_bytes() // (6 * shards)


def original(
    config: ServerConfig, server: Server, port: int, freeze: Callable[[], bytes], siblings: PeerShards | None
) -> ReplicationPrimary:
    """Make the part of a process that replicates its shard to a standby.

    Args:
        config: the config of the process.
        server: its machine.
        port: the TCP port by which peers reach it, 0 behind one port.
        freeze: returns the machine as bytes.
        siblings: what shard 0 knows of the other shards, if this server was a standby; else None.
    """
    lost_ns, coordinator = standby_lost_ns(config.settings.lease), server.coordinator
    first_view = coordinator.run.first_epoch if coordinator is not None else 0
    before = config.follows if siblings is not None else ""
    siblings = siblings or PeerShards(config.settings.shards, lost_ns)
    return ReplicationPrimary(config.index, server, port, lost_ns, freeze, siblings, first_view, before)


def introduction(config: ServerConfig, server: Server, *more: str) -> m.ReplicationBegin:
    """What a standby, or a remote host, has to know of this server. `more`: names of further fields of `config`."""
    assert server.coordinator is not None
    reports, settings = server.coordinator.reports, server.coordinator.run.settings
    told = {
        "release": release(),
        "settings": asdict(settings),
        "ports": [reports[shard].port if shard in reports else UNKNOWN for shard in range(settings.shards)],
        "bind": config.one_port or config.bind,
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "parent": server.above,
        "has_parent_key": bool(config.parent_key),
        **{name: getattr(config, name) for name in (*OF_PRIMARY, *more)},
    }
    return m.ReplicationBegin(pack(told))


def release() -> str:
    """The versions that must be equal in both processes when a pickled machine goes from one to the other."""
    names = ("narrows", "numpy", "torch")
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])


def resumed(settings: Settings, kept: bytes, clock: int) -> Settings:
    """The settings with the newest plan: with --replan change, that of the checkpoint if it is newer.

    A run with a start is resumed in the midst of it, or after it. Before a checkpoint without a start no worker can have
    the state of the servers' optimizer: such a run has no start any more.

    Args:
        settings: of the flags.
        kept: the packed settings of the checkpoint, or b"".
        clock: of the checkpoint.
    """
    settings = settings.flagged()
    went_back = settings.start_clock > clock  # the process before this one was further
    settings = replace(settings, start_clock=-1, plan_number=settings.plan_number + went_back)
    if not kept or (settings.replan != "change" and settings.start_steps < 0):
        return settings.begun()
    before = Settings.unpacked(kept)
    if settings.replan == "change" and before.plan_number > max(settings.plan_number, 1 + (before.start_clock >= 0)):
        settings = replace(settings, **{name: getattr(before.flagged(), name) for name in OF_PLAN}).validated()
    if settings.start_steps < 0:
        return settings
    settings = replace(settings, plan_number=max(settings.plan_number, before.plan_number))
    if before.mode().rule is FoldRule.OPTIMIZER or before.start_clock > clock:
        return settings.begun() if clock < settings.start_steps else settings.relaxed(clock)
    return replace(settings, start_clock=max(before.start_clock, 0))


def machine(
    config: ServerConfig,
    port: int,
    lent: Callable[[], bool],
    arrays: ArrayAllocator,
    own: SecretKeyFile | None,
    sound: SoundCheckpoints,
) -> Server:
    """Make the machine of a process: for a new run, or from the newest checkpoint if the process resumes a run.

    Args:
        config: the config of the process.
        port: the TCP port by which peers reach it, 0 behind one port.
        lent: returns True while arrays of the machine are lent to a reader.
        arrays: the allocator of the machine's arrays.
        own: the key by which other clusters know this process; None: without keys.
        sound: as `CheckpointDisk.sound`.

    Raises:
        NarrowsError: no sound checkpoint is left, or a file cannot be read.
        IncompatibleError: the checkpoint's model cannot be cut as the flags say, or the shards cannot step its optimizer.
    """
    folder, settings, child = config.folder, config.settings.begun(), bool(config.parent)
    mixes = settings.mode().rule is FoldRule.MIX and not config.again  # a gossip run resumes from its workers' models
    restart, first_epoch = -1, config.first_epoch
    kept: tuple[int, ...] = ()
    facts: dict[str, Any] = {}
    coordinator = member = None
    if folder is not None and config.resume:
        kept, damaged = sound(settings.shards)
        for text in damaged:
            emit("log", name="damaged", values={"shard": config.index, "text": text})
        if not config.index and not mixes:
            restart = checkpoint_files.newest(folder, settings.shards)
    if not config.index:
        if restart >= 0 and folder is not None:
            _, facts = checkpoint_files.read(folder, 0, restart, only=())
            first_epoch = max(first_epoch, facts.get("epoch", 0) + RUN_EPOCHS)  # also if the system's time was set back
            before, settings = settings, resumed(settings, facts.get("settings", b""), restart)
            if settings.plan_number > before.plan_number:
                emit("log", name="replan", values=settings.told(restart))
        else:
            settings = settings.back_at(-1)
        flagged = settings.flagged()
        priced = coded(*(spec for spec in (flagged.compress, flagged.compress_down) if not ladder(spec).auto))
        here = HostMemory(socket.gethostname(), memory_bytes())
        away = dict(config.away)
        fit, connected = keys_that_fit(), not config.via
        coordinator = Coordinator(settings, first_epoch, restart, child, fit, away, priced, here, connected)
        if config.relay_secret:
            coordinator.gossip_directory.meet_at(config.relay, config.relay_secret)
        if not config.again:
            coordinator.checkpoint_schedule.resumed(from_workers=mixes and config.resume)
            if restart >= 0:
                text = f"goes on from the checkpoint of clock {restart}"
                emit("log", name="resumed", values={"clock": restart, "text": text})
        if facts:
            plan = ModelSpec.unpacked(facts["plan"])
            steps = (settings.mode().rule is FoldRule.OPTIMIZER or settings.start_steps > 0) and plan.optimizer != ""
            if why := plan.why_not_held(settings.shards, settings.cut, steps):
                raise IncompatibleError(why)
            coordinator.members.adopt(facts["plan"])
            coordinator.buffers.adopt(facts["buffers"])
        if facts.get("ranges") and folder is not None:
            parts = [checkpoint_files.read(folder, each, restart, only=())[1] for each in range(facts.get("shards", 1))]
            coordinator.ranges.load(facts["ranges"], restart, [dict(part.get("saved", ())) for part in parts])
        if child:
            lost_ns = int(config.parent_timeout * NS)
            timing = Timing(lost_ns=lost_ns, connect_ns=lost_ns)
            timing = timing.through_mailbox(config.round_trip) if is_mailbox(config.parent) else timing
            expect = pack({"plan_digest": settings.plan_digest, "name": settings.name})
            there = parse_address("", config.one_port)[1] if config.one_port else port  # where members dial
            name = f"{socket.gethostname()}:{there}"
            member = Member(uuid.uuid4().hex, name, expect, timing, coordinator.tree)
    resources = ShardResources(
        optimizer=_optimizers(arrays)
        if settings.mode().rule is FoldRule.OPTIMIZER or settings.start_steps > 0
        else None,
        lent=lent,
        arrays=arrays,
        child=child,
        member=member,
        coordinator=coordinator,
        timing=Timing().through_mailbox(config.round_trip) if config.round_trip else Timing(),
        host=config.host,
    )
    shard = Shard(config.index, settings, time.time_ns(), port, kept, resources)
    host = reached(config.front(port), config.parent) if member else ""
    host += f":{parse_address('', config.one_port)[1]}" if member and config.one_port else ""
    public = own.public if own is not None else ""
    return Server(shard, coordinator, member, config.parent, host, public, config.replicas > 0)
