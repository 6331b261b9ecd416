"""Shards that are killed at any event of a run, and go on from their journals; what is refused; and bugs planted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from narrows.protocols import messages
from narrows.protocols.config.settings import Settings
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.journal.event_file import EventFile
from narrows.ps.journal.journal import Journal, JournalReplay
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.store.changes import Fold, OuterStep, Step
from narrows.ps.store.store import Store
from simulation.actors import Bug, Disk, Kit, planted
from simulation.bug_hunt import hunt
from simulation.campaigns import Case, Run, case_of
from simulation.mirror import Violation
from simulation.shard_kills import Kept
from simulation.trees import Tree, fault_case

KILLS, FELLED = range(8, 12), range(3, 6)  # seeds: test_run_kinds.py has those before
PLANTED_SEEDS = 61  # within so many a planted bug is found


def killed(seed: int) -> Case:
    return case_of(seed, restart=seed % 4 == 3, kills=True)


def restarted(seed: int) -> Case:
    return case_of(seed, restart=True)


def with_stranger(seed: int) -> Case:
    return next(case for case in map(case_of, range(30 * seed, 30 * seed + 30)) if case.stranger)


def test_a_killed_shard_goes_on_and_every_invariant_holds() -> None:
    struck = sum((Run(killed(seed)).run().sim.struck for seed in KILLS), Counter[str]())
    assert struck["shard killed"] > 2 * len(KILLS)


def test_in_a_tree_on_both_levels() -> None:
    trees = [Tree(fault_case(seed, kills=True)).run() for seed in FELLED]
    assert sum(tree.sim.struck["shard killed"] for tree in trees) > 2 * len(FELLED)
    assert {name == "root" for tree in trees for name, _ in tree.case.kills} == {True, False}


def test_a_seed_with_kills_replays_exactly() -> None:
    first, second = (Run(killed(3)).run().sim for _ in range(2))
    assert (first.digest, first.now_ns, first.struck) == (second.digest, second.now_ns, second.struck)


def test_the_cases_have_every_fault() -> None:
    cases = [killed(seed) for seed in range(200)]
    assert {case.cut.way for case in cases if case.cut is not None} == {"both", "up", "down"}
    assert {case.settings.robust for case in cases} >= {"", "cosine", "trim:0.1", "median"}
    assert all(sum(found) > 0.05 * len(cases) for found in (
        [case.stop is not None for case in cases],
        [case.stranger for case in cases],
        [case.torn > 0 for case in cases],
        [case.slow_ns > 1e9 for case in cases],
        [0 <= case.liar < case.settings.workers and case.settings.robust == "cosine" for case in cases],
    ))  # fmt: skip


def test_a_liar_is_left_out_in_a_simulated_run() -> None:
    """Else nothing would look at the weight of 0, and at those of the others."""
    seeds = [seed for seed in range(200) if case_of(seed).settings.robust == "cosine" and case_of(seed).liar == 0]
    assert sum(Run(case_of(seed)).run().sim.struck["left out"] for seed in seeds[:3]) > 10


def test_a_stranger_is_refused_in_a_simulated_run() -> None:
    run = Run(with_stranger(0)).run()
    assert run.sim.struck["stranger refused"] > 10


def test_the_checkpoint_before_a_damaged_one_is_still_there() -> None:
    """Shard 0 begins anew, finds its newest checkpoint torn, and asks for the one before it: the other shard has written one
    more meanwhile, and had dropped that one (seed 2411)."""
    run = Run(restarted(2411)).run()
    assert run.case.torn and run.sim.struck["shard restarted"] and not run.sim.struck["shard failed"]


# Bugs planted: what makes the next process the same as the one before, or keeps a stranger and an old life out.


def writes_late(kept: Kept, event: MachineEvent, late: dict[int, MachineEvent] = {}) -> MachineEvent:  # noqa: B006
    """An event is written with the next one: what follows from it may be sent before."""
    before = late.get(id(kept))
    late[id(kept)] = event
    if before is not None:
        written_of(kept, before)
    return event


def loses_one(kept: Kept, event: MachineEvent) -> MachineEvent:
    return written_of(kept, event) if event.kind is not EventKind.BELOW or event.now_ns % 8 else event


def writes_over(log: EventFile, serial: int) -> None:
    """Events begin at the first byte again, though the machine still reads payloads there."""
    log.gone.extend(log.held)
    restart_of(log, serial)
    log.held.clear()


def folds_again(journal: Journal, server: Server, load: Callable[[int], None], note: Any) -> JournalReplay:
    """The last update that was done again is done once more."""
    changes: list[Any] = []

    def applied(store: Store, change: Any) -> None:
        apply_of(store, change)
        if isinstance(change, (Fold, OuterStep, Step)):
            changes[:] = [(store, change)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "apply", applied)
        done = replay_of(journal, server, load, note)
    planned = server.shard.model_shard
    if changes and planned is not None and changes[0][0] is planned.store:
        apply_of(*changes[0])
    return done


class SameEpoch(Coordinator):
    """Each life of shard 0 counts its epochs from the same one."""

    def __init__(self, settings: Settings, first_epoch: int, *more: Any, **others: Any) -> None:
        super().__init__(settings, 1 << 20, *more, **others)


def any_peer(peer: bytes, name: bytes, worker: int) -> None:
    """Whoever says that it is this worker is believed."""


def as_it_is(disk: Disk, shard: int, shards: int, clock: int) -> bool:
    """Nobody looks whether a checkpoint is what was written."""
    torn, disk.torn = disk.torn, set()
    try:
        return begins_of(disk, shard, shards, clock)
    finally:
        disk.torn = torn


written_of, replay_of, apply_of, begins_of = Kept.written, Journal.replay, Store.apply, Disk._begins
restart_of = EventFile.restart
PLANTED: dict[str, tuple[Bug, Callable[[int], Case], str]] = {
    "an effect sent before its event is written": ([(Kept, "written", writes_late)], killed, "seed"),
    "events over payloads that wait": ([(EventFile, "restart", writes_over)], killed, "seed"),
    "an event of the journal lost": ([(Kept, "written", loses_one)], killed, "seed"),
    "a replayed update folded twice": ([(Journal, "replay", folds_again)], killed, "the log gives"),
    "checkpoints dropped by what is done again": ([(Kept, "changed", lambda kept: None)], killed, "says it has checkpoint"),
    "an identity unchecked": ([(messages, "check_name", any_peer)], with_stranger, "seed"),
    "a checkpoint altered and not noticed": ([(Disk, "_begins", as_it_is)], restarted, "the log gives"),
    "an epoch reused by a new life of shard 0": (Kit(coordinator=SameEpoch), restarted, "seed"),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, case, complaint = PLANTED[bug]
    kit = planted(which, monkeypatch)
    with pytest.raises(Violation, match=complaint):
        hunt(bug, lambda seed: Run(case(seed), kit).run(), PLANTED_SEEDS)
