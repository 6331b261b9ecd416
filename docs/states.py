"""Writes the table of states in docs/protocol.md from the phases and their transitions in the code.

`python docs/states.py` rewrites it. `python docs/states.py --check` exits with 1, and one sentence, where the page is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from marked_tables import MarkedTable

from narrows.protocols.gossip import driver
from narrows.protocols.member import member
from narrows.ps.coordinator import run
from narrows.ps.shard import model_shard

Steps = list[tuple[str, Enum, Enum]]  # what happens, the phase before it, the phase after it
Phase = TypeVar("Phase", bound=Enum)


def by_trigger(table: Mapping[str, Mapping[Phase, Phase]]) -> Steps:
    return [(trigger, before, after) for trigger, pairs in table.items() for before, after in pairs.items()]


def by_phase(table: Mapping[Phase, Mapping[str, Phase]]) -> Steps:
    return [(trigger, before, after) for before, pairs in table.items() for trigger, after in pairs.items()]


MACHINES: tuple[tuple[str, str, type[Enum], Steps], ...] = (
    ("member", "protocols/member/member.py", member.MemberPhase, by_trigger(member.TRANSITIONS)),
    ("gossip driver", "protocols/gossip/driver.py", driver.GossipPhase, by_trigger(driver.TRANSITIONS)),
    ("run", "ps/coordinator/run.py", run.RunPhase, by_phase(run.RUN_LIFE)),
    ("seat", "ps/coordinator/run.py", run.SeatPhase, by_phase(run.SEAT_LIFE)),
    (
        "shard",
        "ps/shard/model_shard.py",
        model_shard.ClockStage,
        [("done", *step) for step in model_shard.NEXT.items()],
    ),
)


def rows(steps: Iterable[tuple[str, Enum, Enum]], phases: type[Enum]) -> Iterator[tuple[str, str, str]]:
    """(what happens, phases before it, phase after it): one row for all that lead to the same phase."""
    merged: dict[tuple[str, Enum], list[Enum]] = {}
    for trigger, before, after in steps:
        merged.setdefault((trigger, after), []).append(before)
    for (trigger, after), befores in merged.items():
        missing = [phase.value for phase in phases if phase not in befores]
        names = ", ".join(before.value for before in befores)
        if len(missing) < 2 < len(befores):
            names = f"any but {missing[0]}" if missing else "any"
        yield trigger, names, after.value


def table() -> str:
    lines = ["| machine | what happens | before | after |", "|---|---|---|---|"]
    for name, path, phases, steps in MACHINES:
        first = f"{name}, `{path}`"
        if name == "shard":  # a ring: each stage leads to the next
            ring = " → ".join([*(before.value for _, before, _ in steps), steps[-1][2].value])
            lines.append(f"| {first} | a stage is done | {ring} | |")
            continue
        for trigger, before, after in rows(steps, phases):
            lines.append(f"| {first} | {trigger} | {before} | {after} |")
            first = ""
    return "\n".join(lines)


TABLE = MarkedTable("states", Path(__file__).parent / "protocol.md", table)

if __name__ == "__main__":
    sys.exit(TABLE.main(sys.argv[1:]))
