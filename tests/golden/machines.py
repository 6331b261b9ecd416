"""Parts of the golden record that run machines in virtual time.

- campaigns: simulated runs of each kind, by their seeds: who told whom what, and when.
- events: what happened to servers of some runs, with frames, recorded once (events.json). A machine of today is told the same;
  what it answers and the checkpoint that it then writes are recorded.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import astuple, is_dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgpack
from simulation.actors import TIMING, Kit, PlainSGD, Process
from simulation.campaigns import Run, case_of
from simulation.mirror import Violation
from simulation.run_kinds import KINDS
from simulation.trees import Tree, fault_case

from golden.digests import Entries, digest, plain, said
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import ServerEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.member.member import Member
from narrows.protocols.wire import MAGIC, PREFIX_BYTES, VERSION, encode
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.process.checkpoint_disk import CheckpointDisk
from narrows.ps.process.config import ServerConfig
from narrows.ps.replication.events import MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ShardResources
from narrows.ps.shard.shard import Shard

SEEDS = range(12)  # of each kind of runs: in run 7 the plan changes, where a kind has such runs
EVENTS = Path(__file__).resolve().parent / "events.json"
PREFIX = MAGIC + bytes((VERSION,))


def campaigns_part() -> Entries:
    return {f"{kind} {seed}": partial(_campaign, kind, seed) for kind in KINDS for seed in SEEDS}


def _campaign(kind: str, seed: int) -> str:
    """Run one seed; return a digest of all messages that arrived: when, from whom, at whom, and what they say."""
    told: list[bytes] = []
    numbers: dict[str, int] = {}  # of addresses, in the order in which they show up

    def trace(now_ns: int, text: str, message: Any) -> None:
        if message is None:
            return
        source, _, target = text.split(" ")[:3]
        ends = [numbers.setdefault(end, len(numbers)) for end in (source, target)]
        told.append(msgpack.packb([now_ns, *ends]))
        told.extend(_said(message))

    run = KINDS[kind].make(seed, Kit(), trace)
    end = "done"
    try:
        run.run()
    except Violation:  # of a seed that fails at the commit of the record: so it must do later
        end = "violation"
    return f"{end} {len(told)} {run.sim.now_ns} {digest(*told)}"


def _said(message: Any) -> list[bytes]:
    """What a message says; of a machine that is copied, that it is: its bytes have names of Python in them."""
    if isinstance(message, m.ReplicationEntry) and message.parts:
        return [b"machine"]
    if isinstance(message, m.Message):
        return [bytes((m.KIND_OF[type(message)],)), *said(message)]
    assert is_dataclass(message) and not isinstance(message, type)  # of a simulation alone
    return [msgpack.packb(plain([*astuple(message)]))]


# Events.


RUNS = {0: ("s0", "s1"), 3: ("s0",), 7: ("s1",)}  # by the seed: bsp, local under --robust median, async with gradients
TREES = {2: ("s0", "c0.s0")}  # ssp with sparse payloads both ways, above bsp


def _runs() -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    """What makes each run, and the processes that are recorded of it, by their ports."""
    runs = {f"run {seed}": (partial(Run, case_of(seed)), ports) for seed, ports in RUNS.items()}
    trees = {f"tree {seed}": (partial(Tree, fault_case(seed)), ports) for seed, ports in TREES.items()}
    return {**runs, **trees}


def _server(name: str) -> Server:
    """The machine of a recorded process before its first event, as simulation.actors makes it."""
    kind, seed, port = name.split(" ")
    child = port.startswith("c")
    if kind == "run":
        settings = case_of(int(seed)).settings
    else:
        tree = fault_case(int(seed))
        settings = tree.below if child else tree.above
    index = int(port[-1])
    coordinator = Coordinator(settings, 1 << 20, -1, child=child) if not index else None
    member = Member(f"{port}.0", "here", timing=TIMING, below=coordinator.tree) if child and coordinator else None
    means = ShardResources(optimizer=PlainSGD, child=child, member=member, coordinator=coordinator, timing=TIMING)
    shard = Shard(index, settings, 1, 1 + index, (), means)
    return Server(shard, coordinator, member, "s0" if child else "")


class _Recorder:
    """Goes along with a process: writes down what happens to it."""

    def __init__(self, process: Process, kept: dict[str, list[Any]]) -> None:
        self.events: list[Any] = kept.setdefault(process.port, [])

    def written(self, event: MachineEvent) -> MachineEvent:
        frames = [bytes(frame) for frame in encode(event.message)] if event.message is not None else []
        frames[:1] = [frame[PREFIX_BYTES:] for frame in frames[:1]]  # without the version of the wire
        self.events.append([event.described(), frames])
        return event

    def happened(self, event: MachineEvent, effects: Sequence[ServerEffect]) -> None: ...

    def changed(self) -> None: ...


def record_events() -> None:
    """Run each case, and write what happened to its processes."""
    found = {}
    before = Process.shadow_of
    for name, (make, ports) in _runs().items():
        kept: dict[str, list[Any]] = {}
        Process.shadow_of = partial(_Recorder, kept=kept)
        try:
            make().run()
        finally:
            Process.shadow_of = before
        for port in ports:
            found[f"{name} {port}"] = b64encode(zlib.compress(msgpack.packb(kept[port]), 9)).decode()
    EVENTS.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def events_part() -> Entries:
    found = json.loads(EVENTS.read_text())
    return {name: partial(_replayed, name, packed) for name, packed in found.items()}


def _replayed(name: str, packed: str) -> str:
    """Tell a machine what happened then; return digests of what it sends, and of the checkpoints that it would write halfway
    and in the end."""
    happened = msgpack.unpackb(zlib.decompress(b64decode(packed)))
    server, answers, checkpoints = _server(name), [], []
    for number, (about, frames) in enumerate(happened):
        event = MachineEvent.of(about, [PREFIX + frames[0], *frames[1:]] if frames else [])
        answers += _answers(server, event)
        if number in (len(happened) // 2, len(happened) - 1):
            checkpoints.append(_checkpoint(server))
    return " ".join((str(len(happened)), str(len(answers)), digest(*answers), *checkpoints))


def _answers(server: Server, event: MachineEvent) -> list[bytes]:
    made: list[ServerEffect] = []
    try:
        made += server.happen(event)
    except NarrowsError:
        return [b"refused"]
    while server.inner:
        made += server.advance(event.now_ns)
    found = []
    for effect in made:
        match effect:
            case e.Send(peer, message):
                found += [b"%d" % peer if isinstance(peer, int) else bytes(peer), *_said(message)]
            case e.SendToPeer(address, message):
                found += [address.encode(), *_said(message)]
            case e.WriteCheckpoint(clock) | e.LoadCheckpoint(clock):
                found.append(b"%d" % clock)
            case e.StopProcess():
                found.append(b"stop")
    return found


def _checkpoint(server: Server) -> str:
    """A digest of the file that this machine's process would write now."""
    shard = server.shard
    with TemporaryDirectory() as folder:
        config = ServerConfig(
            index=shard.index,
            settings=shard.settings,
            bind="",
            coordinator="",
            first_epoch=1 << 20,
            checkpoint_dir=folder,
            resume=False,
        )
        disk = CheckpointDisk(config)
        disk.write(shard.min_clock, server)
        disk.take(last=True)
        return digest(*(file.read_bytes() for file in sorted(Path(folder).iterdir())))
