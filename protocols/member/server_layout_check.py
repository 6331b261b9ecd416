"""Checks of a server's layout, before a member takes it over: the addresses of its shards, and how it cuts the model.

Each check raises RemoteProtocolError for a layout that cannot be. `plan` is the member's `ModelSpec`, packed.
"""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.protocols.addresses import are_addresses
from narrows.protocols.config.key_ranges import Keys, split
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError


def _cut(ranges: m.Sets, plan: bytes, shards: int) -> tuple[Keys, ...] | None:
    """Return `ranges` as keys if they cut the model for this number of shards as `split` does, else None."""
    right = split(ModelSpec.unpacked(plan).size, shards)
    return tuple(right) if list(ranges) == right else None


def welcomed(welcome: m.Welcome) -> Settings:
    """Check a Welcome. Returns the settings of the run."""
    settings, ports = Settings.unpacked(welcome.settings), welcome.ports
    if len(ports) != settings.shards or not are_addresses(welcome.hosts, ports):
        text = f"the server has {settings.shards} shards and sent {len(ports)} ports, or an invalid port"
        raise RemoteProtocolError(text)
    return settings


def readied(ready: m.Ready, plan: bytes, shards: int) -> tuple[Keys, ...]:
    """Check a Ready. Returns the keys of each shard."""
    ranges = _cut(ready.ranges, plan, shards)
    if ranges is None or not 0 <= ready.clock <= m.CLOCK_MAX:
        text = "the server sent an invalid place: it cuts the model elsewhere, or has no such clock"
        raise RemoteProtocolError(text)
    return ranges


def moved(move: m.Reshard, plan: bytes, before: Settings) -> tuple[Settings, tuple[Keys, ...]]:
    """Check a Reshard.

    Args:
        move: with a place > 0.
        plan: the member's `ModelSpec`, packed.
        before: the settings of the run until this move.

    Returns:
        The settings of the run from this move on, and the keys of each shard.
    """
    settings, ranges = Settings.unpacked(move.settings), _cut(move.ranges, plan, len(move.ports))
    placed = len(move.ports) == settings.shards and are_addresses(move.hosts, move.ports)
    if ranges is None or not placed or not settings.follows(before):
        raise RemoteProtocolError("the server sent an invalid place: it cuts the model elsewhere")
    return settings, ranges
