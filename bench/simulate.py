"""Run thousands of simulated clusters, every invariant checked after every event, and say how often each fault struck.

    python bench/simulate.py --campaign 100000 --jobs 2     of every kind its share
    python bench/simulate.py --runs 10000 --trees 1000      so many of these kinds
    python bench/simulate.py --replay 17 --restart          one seed again, with its trace; or --kill, --tree, --gossip
    python bench/simulate.py --tree --clusters 50 --workers 1000 --above ssp --sync ssp
                                                            one tree without faults, and the closed form of a round
    python bench/simulate.py --gossip --workers 1000 --topology ring --compress int8
                                                            the same of a gossip run, and of its bytes

A run is tests/simulation/campaigns.py's: at least 4 workers, 2 shards and 20 clocks, all modes in turn. In a restart a shard
goes on from a checkpoint, in a kill several go on from their journals (tests/simulation/lives.py). A tree is
tests/simulation/trees.py's, a felled one has kills. `--above all --sync all` is every pair of modes, `--clusters 0` puts all
workers below the root. A gossip run is tests/simulation/gossips.py's, and rounds.py's without
faults. Exit code 1 where one failed.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from simulation import rounds as gossip
from simulation.campaigns import Run, case_of
from simulation.forms import Forms, explained, measured_s
from simulation.gossips import COUNT, Campaign
from simulation.mirrors import Violation
from simulation.trees import SYNCS, Trace, Tree, fault_case, tree_of

from narrows.protocols.effects import NS
from narrows.protocols.gossip.topology import TOPOLOGIES
from narrows.protocols.messages import Message

BATCH = 50  # runs of one job between two reports
FAILED_SHOWN = 20
COLLECT_EVERY = 10  # runs: what one leaves behind is freed then


@dataclass
class Tally:
    """What some runs came to."""

    kinds: Counter[str] = field(default_factory=Counter)  # of KINDS
    virtual_s: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    runs_struck: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.kinds += other.kinds
        self.virtual_s += other.virtual_s
        self.struck += other.struck
        self.runs_struck += other.runs_struck
        self.failed += other.failed


class Kind(NamedTuple):
    """`share`: of a campaign, in percent. `option`: of --replay."""

    share: int
    option: str
    make: Callable[[int, Trace | None], Run | Tree | Campaign]


KINDS = {
    "runs": Kind(50, "", lambda seed, trace: Run(case_of(seed), trace=trace)),
    "restarts": Kind(10, " --restart", lambda seed, trace: Run(case_of(seed, restart=True), trace=trace)),
    "kills": Kind(20, " --kill", lambda seed, trace: Run(case_of(seed, seed % 4 == 3, kills=True), trace=trace)),
    "trees": Kind(8, " --tree", lambda seed, trace: Tree(fault_case(seed), trace=trace)),
    "felled": Kind(6, " --tree --kill", lambda seed, trace: Tree(fault_case(seed, kills=True), trace=trace)),
    "gossips": Kind(6, " --gossip", lambda seed, trace: Campaign(seed, trace)),
}


def shares(total: int) -> dict[str, int]:
    """Of a campaign of so many runs."""
    return {name: total * kind.share // 100 for name, kind in KINDS.items()}


def batch(first: int, count: int, kind: str) -> Tally:
    tally = Tally(Counter({kind: count}))
    gc.disable()  # a run makes few cycles, and the collector looks at all that there is, again and again
    for seed in range(first, first + count):
        run = KINDS[kind].make(seed, None)
        try:
            run.run()
        except Violation as violation:
            tally.failed.append(f"{violation}\n    python bench/simulate.py --replay {seed}{KINDS[kind].option}")
        tally.virtual_s += run.sim.now_ns / NS
        tally.struck += run.sim.struck
        tally.runs_struck.update(fault for fault, times in run.sim.struck.items() if times)
        if seed % COLLECT_EVERY == 0:
            del run
            gc.collect()
    return tally


def batches(first: int, totals: dict[str, int]) -> list[tuple[int, int, str]]:
    """First seed, count and kind; all kinds evenly mixed, for one who cannot wait to the end."""
    works = [
        (begin / total, (first + begin, min(BATCH, total - begin), kind))
        for kind, total in totals.items()
        for begin in range(0, total, BATCH)
    ]
    return [work for _, work in sorted(works)]


def campaign(first: int, totals: dict[str, int], jobs: int) -> Tally:
    """All runs, over `jobs` processes; after Ctrl-C those that there were."""
    tally = Tally()
    # spawn: a fork would copy whatever threads numba has started
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), gc.freeze) as pool:
        try:
            for future in as_completed([pool.submit(batch, *work) for work in batches(first, totals)]):
                tally.add(future.result())
                if sys.stderr.isatty():
                    print(f"\r{tally.kinds.total()} of {sum(totals.values())} runs", end="", file=sys.stderr)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    return tally


def show(tally: Tally, wall_s: float, jobs: int) -> None:
    total, kinds = tally.kinds.total(), tally.kinds
    what = f"{kinds['runs']} runs, {kinds['restarts']} in which a shard restarts, {kinds['kills']} in which shards are killed, "
    what += f"{kinds['trees']} trees, {kinds['felled']} in which shards are killed, and {kinds['gossips']} gossip runs"
    print(f"{what}: {len(tally.failed)} failed")
    print(
        f"{wall_s:.0f} s, {total / wall_s:.1f} runs/s with {jobs} jobs, {tally.virtual_s / 3600:.1f} h of virtual time\n"
    )
    print(f"{'fault':<18}{'struck':>10}{'a run':>9}{'runs struck':>13}")
    for fault, times in tally.struck.most_common():
        print(f"{fault:<18}{times:>10}{times / total:>9.2f}{tally.runs_struck[fault]:>13}")
    for text in sorted(tally.failed)[:FAILED_SHOWN]:
        print(f"\n{text}")


def replay(seed: int, kind: str) -> int:
    """One run, each event a line."""

    def trace(now_ns: int, text: str, message: Message | None) -> None:
        print(f"{now_ns / NS:9.4f} {text} {describe(message)}".rstrip())

    run = KINDS[kind].make(seed, trace)
    print(run.case)
    try:
        run.run()
    except Violation as violation:
        print(violation)
        return 1
    finally:
        print(f"digest {run.sim.digest:08x}, {dict(run.sim.struck)}")
    return 0


def describe(message: Message | None) -> str:
    """The fields of a message that fit on a line: no bytes."""
    if message is None:
        return ""
    values = ((f.name, getattr(message, f.name)) for f in fields(message))  # type: ignore[arg-type]
    return " ".join(f"{name}={value}" for name, value in values if not isinstance(value, (bytes, memoryview)))


def trees(told: argparse.Namespace) -> int:
    """Each pair of modes that was asked for: a line."""
    if told.workers < max(1, told.clusters) or told.workers % max(1, told.clusters):
        print(f"--workers {told.workers}: give as many to each of --clusters {told.clusters}", file=sys.stderr)
        return 2
    aboves = (SYNCS if told.above == "all" else (told.above,)) if told.clusters else ("-",)
    belows = SYNCS if told.sync == "all" else (told.sync,)
    where = f"in {told.clusters} clusters" if told.clusters else "of one server"
    print(f"{told.workers} workers {where}, {told.rounds} rounds, seed {told.seed}\n")
    print(
        f"{'above':<7}{'below':<7}{'s a round':>10}{'closed form':>20}{'virtual s':>11}{'events':>9}{'real s':>8}{'cpu s':>8}"
    )
    return max(tree_line(told, above, below) for above in aboves for below in belows)


def tree_line(told: argparse.Namespace, above: str, below: str) -> int:
    """One tree. 1 where an invariant or the closed form does not hold."""

    def flags(sync: str, **more: str) -> dict[str, Any]:
        return {"sync": sync, **more} | ({"local_steps": told.local_steps} if sync == "local" else {})

    root = flags(above, push="update") if told.clusters else flags(below)
    clocks = told.rounds * (told.local_steps if above == "local" else 1)
    workers = told.workers // max(1, told.clusters)
    case = tree_of(told.seed, root, flags(below), told.clusters, workers, clocks)
    began, cpu_began = time.perf_counter(), time.process_time()
    tree = Tree(case)
    try:
        tree.run()
    except Violation as violation:
        print(violation)
        return 1
    real_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    form, seconds = Forms(case).round_s(), measured_s(tree)
    text = f"{form.low:.4f}" + (f" to {form.high:.4f}" if form.high > form.low else "")
    holds = explained(form, seconds, told.rounds)
    print(
        f"{above:<7}{below:<7}{seconds:>10.4f}{text:>20}{tree.sim.now_ns / NS:>11.1f}"
        f"{tree.events:>9}{real_s:>8.1f}{cpu_s:>8.1f}{'' if holds else '  not the closed form'}",
        flush=True,
    )
    return 0 if holds else 1


def gossips(told: argparse.Namespace) -> int:
    """Each topology, compression and staleness that was asked for: a line."""
    print(f"{told.workers} workers, {told.rounds} rounds, {COUNT} values, seed {told.seed}\n")
    print(
        f"{'topology':<13}{'codec':<7}{'s':>2}{'s a round':>10}{'closed form':>20}{'bytes':>11}{'closed form':>13}"
        f"{'distance':>10}{'events':>9}{'real s':>8}{'cpu s':>8}"
    )
    topologies = [*TOPOLOGIES] if told.topology == "all" else [told.topology]
    bounds = [0, 1] if told.staleness is None else [told.staleness]
    return max(gossip_line(told, topology, bound) for topology in topologies for bound in bounds)


def gossip_line(told: argparse.Namespace, topology: str, bound: int) -> int:
    """One run to the last of its rounds. 1 where an invariant or a closed form does not hold."""
    case = gossip.drawn(told.seed, topology, told.compress, bound, told.rounds, told.workers)
    began, cpu_began = time.perf_counter(), time.process_time()
    run = gossip.Rounds(case)
    try:
        run.run()
    except AssertionError as violation:
        print(f"{topology}: {violation}")
        return 1
    real_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    form, sent = gossip.round_s(case), gossip.bytes_of(case)
    wrong = [] if gossip.explained(form, run.round_s) else ["not the closed form"]
    wrong += [f"worker {w}: {run.passed[w]} bytes" for w in case.workers if run.passed[w] != sent[w]][:FAILED_SHOWN]
    print(
        f"{topology:<13}{told.compress:<7}{bound:>2}{run.round_s:>10.4f}{f'{form.low:.4f} to {form.high:.4f}':>20}"
        f"{sum(run.passed):>11}{sum(sent):>13}{run.distance:>10.1e}{run.events:>9}{real_s:>8.1f}{cpu_s:>8.1f}",
        *wrong,
        sep="  ",
        flush=True,
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaign", type=int, default=0, metavar="N", help="N runs, of every kind its share")
    parser.add_argument("--runs", type=int, default=0, help="of one cluster, with every fault")
    parser.add_argument("--restarts", type=int, default=0, help="such runs in which a shard restarts")
    parser.add_argument("--kills", type=int, default=0, help="such runs in which shards are killed, and replayed")
    parser.add_argument("--trees", type=int, default=0, help="small trees of clusters, with every fault")
    parser.add_argument("--felled", type=int, default=0, help="such trees in which shards are killed, and replayed")
    parser.add_argument("--gossips", type=int, default=0, help="small gossip runs in which anything may happen")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print its trace")
    parser.add_argument("--restart", action="store_true", help="with --replay: the run in which a shard restarts")
    parser.add_argument("--kill", action="store_true", help="with --replay: that in which shards are killed")
    parser.add_argument("--tree", action="store_true", help="one large tree, without faults, against its closed form")
    parser.add_argument("--gossip", action="store_true", help="one large gossip run, without faults, the same way")
    parser.add_argument("--workers", type=int, default=1000, help="with --tree: of all clusters; with --gossip")
    parser.add_argument("--clusters", type=int, default=50, help="with --tree; 0: all workers below the root")
    parser.add_argument("--sync", choices=[*SYNCS, "all"], default="ssp", help="with --tree: of each cluster")
    parser.add_argument("--above", choices=[*SYNCS, "all"], default="ssp", help="with --tree: of the root")
    parser.add_argument("--local-steps", type=int, default=4, help="with --tree: of local")
    parser.add_argument("--rounds", type=int, default=20, help="with --tree: of the root; with --gossip")
    parser.add_argument("--topology", choices=[*TOPOLOGIES, "all"], default="all", help="with --gossip")
    parser.add_argument("--compress", choices=gossip.SPECS, default="dense", help="with --gossip: payloads of one size")
    parser.add_argument("--staleness", type=int, choices=[0, 1], help="with --gossip; not given: both")
    told = parser.parse_args()
    if told.replay is not None:
        asked = {option for option in ("restart", "kill", "tree", "gossip") if getattr(told, option)}
        kind = next(name for name, kind in KINDS.items() if {*kind.option.replace("--", "").split()} == asked)
        return replay(told.replay, kind)
    if told.tree:
        return trees(told)
    if told.gossip:
        return gossips(told)
    began = time.monotonic()
    totals = shares(told.campaign) if told.campaign else {kind: getattr(told, kind) for kind in KINDS}
    tally = campaign(told.seed, totals, told.jobs)
    show(tally, time.monotonic() - began, told.jobs)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
