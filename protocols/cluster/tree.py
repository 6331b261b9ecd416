"""A server and all below it as text: its children, and what clusters among them say of theirs."""

from __future__ import annotations

from narrows.protocols.cluster.rounds import Rounds
from narrows.protocols.cluster.run import Run
from narrows.protocols.messages import TEXT_MAX

CHARACTERS_MAX = TEXT_MAX - 64  # one string of a message, with the line that ends it


def tree(run: Run, rounds: Rounds) -> str:
    """A line each; of a large run the first lines."""
    lines = [f"{run.settings.summary()}, {run.shards} shards, clock {rounds.min_clock}"]
    for seat in sorted(run.declared, key=lambda seat: seat.rank):
        first, *rest = seat.below.splitlines() or [""]
        what = f"cluster: {first}" if first else f"worker, clock {rounds.clock(seat)}"
        lines += [f"    rank {seat.rank} ({seat.host}) {what}", *(f"    {line}" for line in rest)]
    kept, size = 0, 0
    while kept < len(lines) and size + len(lines[kept]) < CHARACTERS_MAX:
        size += len(lines[kept]) + 1
        kept += 1
    more = [f"    and {len(lines) - kept} lines more"] if kept < len(lines) else []
    return "\n".join(lines[:kept] + more)
