"""The texts of events: a sentence for an event without a text, and the characters that a terminal may show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = {
    "member": "worker {worker} (rank {rank}, {host}) {how} at clock {clock}; {live} live",
    "discarded": "update {clock} of worker {worker} was discarded on shard {shard}: {why}",
    "restart": "shard {shard} was restarted: the run goes back from clock {to_clock} to {from_clock}",
    "checkpoint": "shard {shard}: checkpoint of clock {clock}",
    "start": "--sync {mode}, --compress {compress}, {workers} workers, {shards} shards",
    "late": "{age} rounds closed without worker {worker} before clock {clock}",
    "compress": "worker {worker} codes with {to}, not {from}, from clock {clock} on: {reason}",
    "skipped": "steps that rank {rank} ({host}) has skipped by clock {clock}, for a gradient that was not finite: {steps:,}",
    "mailbox": "shard {shard} asked {address}: {puts:,} PUT, {gets:,} GET, {lists:,} LIST, {deletes:,} DELETE",
    "privacy": "worker {worker} has spent epsilon {epsilon:.4g} at delta {delta:g}",
}
OF_WORKERS = {  # for a record of ps-worker, which has local ranks in place of worker ids
    "member": "local rank {local_rank} {how}",
    "done": "the run is over",
    "late": "{age} rounds closed without local rank {local_rank} before clock {clock}",
    "compress": "local rank {local_rank} codes with {to}, not {from}, from clock {clock} on: {reason}",
    "mailbox": "local rank {local_rank} asked {address}: {puts:,} PUT, {gets:,} GET, {lists:,} LIST, {deletes:,} DELETE",
    "privacy": "local rank {local_rank} has spent epsilon {epsilon:.4g} at delta {delta:g}",
}


def sentence(name: str, event: Mapping[str, Any]) -> str:
    """Return the sentence of an event; "" for an event that only has figures."""
    for table in (SHOWN, OF_WORKERS):
        try:
            return table[name].format(**event)
        except (KeyError, ValueError, TypeError, IndexError):
            continue
    return ""
