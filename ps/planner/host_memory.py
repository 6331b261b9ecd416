"""The memory that workers and servers of a plan need on each host, beside the memory that the host has. No I/O.

The figures are those of the account (protocols/config/memory.py) with AdamW. They are without activations, PyTorch, and
the journals, which --no-journal leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from narrows.compression.ladder import Codecs
from narrows.protocols.config.memory import ArrayFacts, ShardFacts, parent_arrays, shard_arrays, worker_arrays
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.ps.planner.modes_and_specs import WAYS, ModeAndSpec
from narrows.ps.planner.network import Network

MOMENTS = 2.0  # of AdamW, for each parameter
ALONE_MODELS = 2 + MOMENTS  # of a script without Narrows: parameters, gradients, the optimizer's state
VALUE_BYTES = 4


class HostMemory(NamedTuple):
    """The memory of the host of one process of a run.

    Attributes:
        host: its name; "": not known.
        bytes: 0: not known.
    """

    host: str = ""
    bytes: int = 0


UNKNOWN = HostMemory()


class MemoryNeed(NamedTuple):
    """What one process, or all shards of a server, need on a host."""

    host: int
    what: str
    bytes: float


@lru_cache(maxsize=256)
def _resolved(way: ModeAndSpec, updates: bool) -> tuple[Settings, Codecs]:
    settings = Settings(**way.flags(updates)).validated()
    return settings, Codecs.of(settings.compress, settings.compress_down)


def _child(way: ModeAndSpec, updates: bool) -> tuple[Mode, ArrayFacts]:
    settings, codecs = _resolved(way, updates)
    return settings.mode(), ArrayFacts.of(settings, codecs, MOMENTS)


def worker_models(way: ModeAndSpec, updates: bool = False) -> float:
    """Return the memory of a worker in models; `updates`: its server's children are clusters too."""
    return sum(row.models for row in worker_arrays(*_child(way, updates)))


def server_models(way: ModeAndSpec, children: int, updates: bool = False, parent: ModeAndSpec | None = None) -> float:
    """Return the memory of all shards of a server in models, without their journals.

    Args:
        way: the mode and SPEC of the server.
        children: of the server.
        updates: the children are clusters.
        parent: of a cluster: the mode and SPEC of the root.
    """
    settings, codecs = _resolved(way, updates)
    above = _child(parent, True) if parent is not None else None
    facts = ShardFacts.of(settings, codecs, MOMENTS)._replace(workers=children, journal=False, parent=above)
    return sum(row.models for row in shard_arrays(settings.mode(), facts))


def parent_models(way: ModeAndSpec) -> float:
    """Return the memory that the shards of a cluster need for its parent's way, in models."""
    return sum(row.models for row in parent_arrays(*_child(way, True)))


def stage_models(replicas: int) -> float:
    """Return the least memory of a worker of a stage and the stage's server together, in models, over all ways."""
    ways = WAYS if replicas > 1 else WAYS[:1]
    return min(worker_models(way) + server_models(way, replicas) for way in ways)


def check(network: Network, needs: Iterable[MemoryNeed]) -> str:
    """Return a sentence on the host that has the least room left.

    Raises:
        UsageError: a host has too little memory; one sentence.
    """
    by_host = _by_host(needs)

    def left(host: int) -> tuple[float, float]:
        taken = sum(need.bytes for need in by_host[host])
        return float(network.memory_bytes[host]) - taken, -taken

    host = min(by_host, key=left)
    room, taken = left(host)
    parts = " and ".join(f"{_gb(need.bytes)} for {need.what}" for need in by_host[host])
    text = f"{network.hosts[host]} needs {_gb(-taken)} for its arrays: {parts}"
    if room < 0:
        has = _gb(float(network.memory_bytes[host]))
        raise UsageError(f"{text}; it has {has}: leave the host out of the network, or cut the model by --pipeline")
    return f"memory: {text}; activations and PyTorch come on top"


def _by_host(needs: Iterable[MemoryNeed]) -> dict[int, list[MemoryNeed]]:
    found: dict[int, list[MemoryNeed]] = {}
    for need in needs:
        found.setdefault(need.host, []).append(need)
    return found


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


def of_level(
    way: ModeAndSpec,
    parameters: float,
    workers: Sequence[int],
    servers: Sequence[int],
    what: str,
    children: int,
    updates: bool = False,
    parent: ModeAndSpec | None = None,
) -> list[MemoryNeed]:
    """Return what the workers of a server and its shards need.

    Args:
        way: the mode and SPEC of the server.
        parameters: of the model, or of the stage.
        workers: hosts of the workers.
        servers: hosts that have a part of the shards each.
        what: the server, in words.
        children: of the server, workers and clusters.
        updates, parent: as for `server_models`.
    """
    model = VALUE_BYTES * parameters
    whole = model * server_models(way, children, updates, parent)
    each = [MemoryNeed(host, f"a worker under {way}", model * worker_models(way, updates)) for host in workers]
    return [*each, *(MemoryNeed(host, what, whole / len(servers)) for host in servers)]


def too_small(
    way: ModeAndSpec,
    now: ModeAndSpec,
    parameters: float,
    servers: Sequence[HostMemory],
    workers: Sequence[HostMemory],
    clusters: Sequence[HostMemory] = (),
    updates: bool = True,
) -> str:
    """Return the name of a host on which a running run has no memory for another way; "" if all have enough.

    A host on which the way needs no more than the present one has enough. So has a host whose memory is not known.

    Args:
        way: the mode and SPEC that the run would have.
        now: that the run has.
        parameters: of the model.
        servers: the host of each shard.
        workers: the host of each worker of the server.
        clusters: of each child that is a cluster: the host of its shards, with what they leave of its memory.
        updates: the children push updates under bsp too.
    """
    hosts: dict[str, int] = {}
    room: dict[int, float] = {}

    def at(memory: HostMemory) -> int:
        host = hosts.setdefault(memory.host or f"host {len(hosts)}", len(hosts))
        room[host] = min(room.get(host, math.inf), memory.bytes or math.inf)
        return host

    places = [[*map(at, each)] for each in (workers, servers, clusters)]

    def taken(of: ModeAndSpec) -> dict[int, float]:
        needs = of_level(of, parameters, places[0], places[1], "", len(workers) + len(clusters), updates)
        needs += [MemoryNeed(host, "", VALUE_BYTES * parameters * parent_models(of)) for host in places[2]]
        return {host: sum(need.bytes for need in each) for host, each in _by_host(needs).items()}

    before = taken(now)
    after = taken(way)
    return next((name for name, host in hosts.items() if after[host] > max(room[host], before[host])), "")
