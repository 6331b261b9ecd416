"""A process that is killed can be made again from its journal: a twin does the same, under every fault; and bugs planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from narrows.protocols.effects import NS, ServerEffect
from narrows.ps.coordinator.members import Members
from narrows.ps.journal.journal import Journal
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import HAPPENS, Server
from narrows.ps.shard.publications import Publications
from narrows.ps.shard.push_assembler import PushAssembler
from narrows.ps.shard.reports import Reports
from narrows.ps.store.update_gain import Gain
from simulation.actors import Process
from simulation.bug_hunt import hunt
from simulation.campaigns import DRAWN_MODES, Run, case_of
from simulation.mirror import Violation
from simulation.replay_twins import Twin
from simulation.trees import Tree, fault_case

# Seeds: every second mode, with a barrier and without, of gradients and of updates; the trees have ssp.
RUNS, RESTARTS, TREES = range(0, len(DRAWN_MODES), 2), range(1), 1
REPLAYS_LEAST = 20  # of one run
PLANTED_SEEDS = 30  # within so many a planted bug is found


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "shadow_of", Twin)


@pytest.mark.parametrize(("restart", "seeds"), [(False, RUNS), (True, RESTARTS)])
def test_of_one_level(restart: bool, seeds: range) -> None:
    before = Twin.replays
    for seed in seeds:
        Run(case_of(seed, restart)).run()
    assert Twin.replays - before > REPLAYS_LEAST * len(seeds)


def test_of_two_levels() -> None:
    before = Twin.replays
    for seed in range(TREES):
        Tree(fault_case(seed)).run()
    assert Twin.replays - before > REPLAYS_LEAST * TREES


# Bugs planted: each is something that a machine remembers, and its journal does not.


def forgets(*names: str) -> Callable[[Any], Any]:
    """A machine is written without these attributes: they are again what they were in an empty one."""

    def state(machine: Any) -> Any:
        plain = hasattr(machine, "__dict__")
        values = vars(machine) if plain else {name: getattr(machine, name) for name in machine.__slots__}
        values = {name: type(value)() if name in names else value for name, value in values.items()}
        return values if plain else (None, values)

    return state


def leaves_out(journal: Journal, event: MachineEvent, frames: Any, note: Callable[..., Any] = Journal.note) -> Any:
    return note(journal, event, frames) if event.kind is not EventKind.TICK else frames


def by_another_clock(server: Server, event: MachineEvent) -> list[ServerEffect]:
    by_another_clock.late += NS  # type: ignore[attr-defined]
    return server.tick(event.now_ns + by_another_clock.late % 7)  # type: ignore[attr-defined]


by_another_clock.late = 0  # type: ignore[attr-defined]

PLANTED: dict[str, tuple[Any, Any, Any]] = {
    "a tick is not written": (Journal, "note", leaves_out),
    "a time that is not written": (HAPPENS, EventKind.TICK, by_another_clock),
    "a part of a push is forgotten": (PushAssembler, "__getstate__", forgets("seats")),
    "the windows of the gain are forgotten": (Gain, "__getstate__", forgets("windows")),
    "what children were sent is forgotten": (Publications, "__getstate__", forgets("children")),
    "what was published is forgotten": (Publications, "__getstate__", forgets("made")),
    "tokens are forgotten": (Members, "__getstate__", forgets("gone", "waiting")),
    "the number of a report is forgotten": (Reports, "__getstate__", forgets("version")),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, what = PLANTED[bug]
    monkeypatch.setitem(where, name, what) if isinstance(where, dict) else monkeypatch.setattr(
        where, name, what, raising=False
    )
    with pytest.raises((Violation, KeyError)):
        hunt(bug, lambda seed: Run(case_of(seed)).run(), PLANTED_SEEDS)
