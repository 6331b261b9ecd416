"""Writes the tables of the arrays of workers and servers in docs/modes.md, from protocols/config/memory.py.

`python docs/memory_table.py` rewrites it. `python docs/memory_table.py --check` exits with 1, and one sentence, where the
page is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marked_tables import MarkedTable

from narrows.compression.ladder import Codecs
from narrows.protocols.config.memory import (
    ArrayFacts,
    ModelArray,
    ShardFacts,
    device_arrays,
    shard_arrays,
    worker_arrays,
)
from narrows.protocols.config.settings import Settings

RUNS: dict[str, dict[str, Any]] = {
    "`bsp`": {"sync": "bsp"},
    "`bsp --compress int8`": {"sync": "bsp", "compress": "int8"},
    "`ssp --compress topk:0.05+int8`": {"sync": "ssp", "compress": "topk:0.05+int8"},
    "`ssp --staleness 16 --compress topk:0.05+int8`": {"sync": "ssp", "staleness": 16, "compress": "topk:0.05+int8"},
    "`ssp`": {"sync": "ssp"},
    "`async --compress int8`": {"sync": "async", "compress": "int8"},
    "`local --local-steps 20`": {"sync": "local", "local_steps": 20},
    "`local --compress int4`": {"sync": "local", "compress": "int4"},
}
GOSSIP: dict[str, dict[str, Any]] = {
    "`gossip`, 2 workers": {"sync": "gossip", "workers": 2},
    "`gossip --compress int8`, 2 workers": {"sync": "gossip", "workers": 2, "compress": "int8"},
    "`gossip --compress int8`, 8 workers": {"sync": "gossip", "workers": 8, "compress": "int8"},
    "`gossip --compress int8 --topology ring`, 8 workers": {
        "sync": "gossip",
        "workers": 8,
        "compress": "int8",
        "topology": "ring",
    },
    "`gossip --local-steps 20 --compress int8`, 2 workers": {
        "sync": "gossip",
        "workers": 2,
        "compress": "int8",
        "local_steps": 20,
    },
}
MOMENTS, WORKERS = 2.0, 2  # of AdamW; children of the servers
DEVICE = (
    "What a worker takes of a GPU over the script's own parameters, gradients and optimizer's state, with four shards:"
)
SERVERS = "The same of all shards of a run together, with two workers and a journal:"


def of_worker(settings: Settings) -> list[ModelArray]:
    codecs = Codecs.of(settings.compress, settings.compress_down)
    return worker_arrays(settings.mode(), ArrayFacts.of(settings, codecs, MOMENTS))


def of_device(settings: Settings) -> list[ModelArray]:
    codecs = Codecs.of(settings.compress, settings.compress_down)
    return device_arrays(settings.mode(), ArrayFacts.of(settings, codecs, MOMENTS))


def of_shards(settings: Settings) -> list[ModelArray]:
    codecs = Codecs.of(settings.compress, settings.compress_down)
    return shard_arrays(settings.mode(), ShardFacts.of(settings, codecs, MOMENTS))


def arrays_of(runs: dict[str, dict[str, Any]], arrays: Callable[[Settings], list[ModelArray]]) -> str:
    """Return a table with a row for each run, and a column for each array that any of them has."""
    rows: dict[str, dict[str, float]] = {}
    for name, flags in runs.items():
        rows[name] = {
            array.name: array.models for array in arrays(Settings(**{"workers": WORKERS} | flags).validated())
        }
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [f"| | {' | '.join(columns)} | in all |", f"|---{'|---' * len(columns)}|---|"]
    for name, models in rows.items():
        cells = [f"{models[column]:.3g}" if column in models else "" for column in columns]
        lines.append(f"| {name} | {' | '.join(cells)} | {sum(models.values()):.3g} |")
    return "\n".join(lines)


def table() -> str:
    workers = f"{arrays_of(RUNS, of_worker)}\n\n{arrays_of(GOSSIP, of_worker)}"
    sharded = {name: {**flags, "shards": 4} for name, flags in (RUNS | GOSSIP).items()}
    devices = f"{DEVICE}\n\n{arrays_of(sharded, of_device)}"
    return f"{workers}\n\n{devices}\n\n{SERVERS}\n\n{arrays_of(RUNS, of_shards)}"


TABLE = MarkedTable("memory_table", Path(__file__).parent / "modes.md", table)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
