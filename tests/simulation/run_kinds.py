"""The kinds of runs that a campaign mixes, each by its seed: bench/faults/simulate.py runs them, planted_bugs.py plants bugs.

KINDS["kills"].make(17, Kit(), None).run()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from simulation.actors import Kit
from simulation.campaigns import DRAWN_MODES, Case, Run, Trace, case_of, with_rows
from simulation.gossip_runs import Campaign
from simulation.replanned_standby_trees import AIMS, Losing, Orphaned, losing_case
from simulation.replanned_trees import Changing, fall_of
from simulation.replans import Replanned, drops_of
from simulation.resharding import Moved, moves_of
from simulation.simulator import Simulator
from simulation.standby_trees import Pairs, pair_case
from simulation.standbys import Theatre
from simulation.starts import Started, start_of
from simulation.trees import Tree, fault_case


class Simulated(Protocol):
    """One run. `run` raises Violation where an invariant does not hold."""

    @property
    def sim(self) -> Simulator[Any]: ...
    @property
    def case(self) -> object: ...
    def run(self) -> object: ...


class Kind(NamedTuple):
    """`share`: of a campaign, in percent. `option`: of bench/faults/simulate.py --replay. `make`: of seed, machines, trace."""

    share: int
    option: str
    text: str
    make: Callable[[int, Kit, Trace | None], Simulated]


def _some_with_rows(case: Case) -> Case:
    """One of six has an embedding table, in each mode that may have one."""
    return with_rows(case) if case.seed // len(DRAWN_MODES) % 6 == 1 else case


def _moved(seed: int, faults: tuple[bool, bool], kit: Kit, trace: Trace | None) -> Moved:
    plans = seed % 12 == 7  # none of those that test_planted_bugs.py names
    return Replanned(drops_of(seed, *faults), kit, trace) if plans else Moved(moves_of(seed, *faults), kit, trace)


def _tree(seed: int, kills: bool, kit: Kit, trace: Trace | None) -> Tree:
    """One of 12 changes its plan: the root, each cluster, or both."""
    if seed % 12 != 7:
        return Tree(fault_case(seed, kills), kit, trace)
    return Changing(fall_of(seed, ("above", "inside", "both")[seed // 12 % 3], kills), kit, trace)


def _pairs(seed: int, kit: Kit, trace: Trace | None) -> Pairs:
    """In one of 12 the root changes its plan, and is lost at a phase of that change; in half of these nobody stands by."""
    if seed % 12 != 7:
        return Pairs(pair_case(seed), kit, trace)
    kind = Losing if seed % 24 == 7 else Orphaned
    return kind(losing_case(seed), AIMS[seed // 12 % len(AIMS)], kit, trace)


KINDS = {
    "runs": Kind(
        *(34, "", "runs of one cluster, with every fault of links and a worker's crash"),
        lambda seed, kit, trace: Run(_some_with_rows(case_of(seed)), kit, trace),
    ),
    "restarts": Kind(
        *(8, " --restart", "such runs in which a shard begins anew from a checkpoint"),
        lambda seed, kit, trace: Run(_some_with_rows(case_of(seed, restart=True)), kit, trace),
    ),
    "kills": Kind(
        *(16, " --kill", "such runs in which shards are killed, and replayed; in one of four one begins anew"),
        lambda seed, kit, trace: Run(_some_with_rows(case_of(seed, seed % 4 == 3, kills=True)), kit, trace),
    ),
    "trees": Kind(
        *(
            8,
            " --tree",
            "small trees of clusters, with every fault of links and a worker's crash; of 12 one whose plan changes",
        ),
        lambda seed, kit, trace: _tree(seed, False, kit, trace),
    ),
    "felled": Kind(
        *(6, " --tree --kill", "such trees in which shards are killed, and replayed"),
        lambda seed, kit, trace: _tree(seed, True, kit, trace),
    ),
    "gossips": Kind(
        *(6, " --gossip", "small gossip runs in which anything may happen"),
        lambda seed, kit, trace: Campaign(seed, trace),
    ),
    "standbys": Kind(
        *(8, " --standby", "servers and their standbys, of which machines are lost"),
        lambda seed, kit, trace: Theatre(seed, trace=trace),
    ),
    "pairs": Kind(
        *(
            2,
            " --pair",
            "trees whose root and clusters have standbys, of which machines are lost; of 12 one whose plan changes",
        ),
        _pairs,
    ),
    "moves": Kind(
        *(
            8,
            " --move",
            "runs of one cluster whose keys move, of 12 one whose plan changes; of three one with kills and one with a restart",
        ),
        lambda seed, kit, trace: _moved(seed, (seed % 3 == 2, seed % 3 == 1), kit, trace),
    ),
    "starts": Kind(
        *(4, " --start", "runs of one cluster with a start, of three one with kills and one with a restart"),
        lambda seed, kit, trace: Started(start_of(seed, seed % 3 == 2, seed % 3 == 1), kit, trace),
    ),
}


def shares(total: int) -> dict[str, int]:
    """Runs of each kind, of a campaign of so many."""
    return {name: total * kind.share // 100 for name, kind in KINDS.items()}


def mixed(totals: dict[str, int], each: int = 1) -> list[tuple[str, int, int]]:
    """Kind, first number and count of each piece of a campaign, all kinds evenly mixed for one who cannot wait to the end.
    `each`: runs of one piece."""
    pieces = [
        (begin / total, (kind, begin, min(each, total - begin)))
        for kind, total in totals.items()
        for begin in range(0, total, each)
    ]
    return [piece for _, piece in sorted(pieces, key=lambda found: found[0])]
