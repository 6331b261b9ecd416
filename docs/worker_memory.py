"""Writes the table of a worker's arrays in docs/modes.md, from protocols/config/memory.py.

`python docs/worker_memory.py` rewrites it. `python docs/worker_memory.py --check` exits with 1, and one sentence, where the
page is stale.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from marked_tables import MarkedTable

from narrows.compression.ladder import Codecs
from narrows.protocols.config.memory import ArrayFacts, worker_arrays
from narrows.protocols.config.settings import Settings

RUNS: dict[str, dict[str, Any]] = {
    "`bsp`": {"sync": "bsp"},
    "`bsp --compress int8`": {"sync": "bsp", "compress": "int8"},
    "`ssp --compress topk:0.05+int8`": {"sync": "ssp", "compress": "topk:0.05+int8"},
    "`ssp --staleness 16 --compress topk:0.05+int8`": {"sync": "ssp", "staleness": 16, "compress": "topk:0.05+int8"},
    "`ssp`": {"sync": "ssp"},
    "`async --compress int8`": {"sync": "async", "compress": "int8"},
    "`local`": {"sync": "local"},
    "`local --compress int4`": {"sync": "local", "compress": "int4"},
}
MOMENTS = 2.0  # of AdamW
NAMES = ("parameters", "gradients", "optimizer's state", "pulled state", "replica", "residual", "raw updates")


def table() -> str:
    lines = [f"| | {' | '.join(NAMES)} | in all |", f"|---{'|---' * len(NAMES)}|---|"]
    for name, flags in RUNS.items():
        settings = Settings(**flags).validated()
        codecs = Codecs.of(settings.compress, settings.compress_down)
        facts = ArrayFacts(codecs.up.lossless, codecs.down.lossless, moments=MOMENTS)
        models = {array.name: array.models for array in worker_arrays(settings.mode(), facts)}
        cells = [f"{models[column]:g}" if column in models else "" for column in NAMES]
        lines.append(f"| {name} | {' | '.join(cells)} | {sum(models.values()):g} |")
    return "\n".join(lines)


TABLE = MarkedTable("worker_memory", Path(__file__).parent / "modes.md", table)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
