"""Simulated clusters run under faults, and each invariant is checked after each event. The bench counts runs and failures.

    python bench/faults/simulate.py --campaign 100000 --jobs 2     of every kind its share
    python bench/faults/simulate.py --runs 10000 --trees 1000      so many of these kinds
    python bench/faults/simulate.py --replay 17 --restart          one seed again, with its trace; or --kill, --tree, --gossip,
                                                            --standby, --pair, --move
    python bench/faults/simulate.py --planted                      how soon a campaign finds each bug that is planted
    python bench/faults/simulate.py --tree --clusters 50 --workers 1000 --above ssp --sync ssp
                                                            one tree without faults, and the closed form of a round
    python bench/faults/simulate.py --gossip --workers 1000 --topology ring --compress int8
                                                            the same of a gossip run, and of its bytes

Kinds of runs are those of tests/simulation/run_kinds.py. `--above all --sync all` is every pair of modes, `--clusters
0` puts all workers below the root. Runs without faults are tests/simulation/trees.py's and gossip_timing.py's. Exit
code 1 where one failed.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from narrows.protocols.config.topology import TOPOLOGIES
from narrows.protocols.effects import NS
from narrows.protocols.messages import Message

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "../tests")]

from lab import record
from simulation import gossip_timing as gossip
from simulation.actors import Kit
from simulation.closed_forms import Forms, explained, measured_s
from simulation.gossip_runs import COUNT
from simulation.mirror import Violation
from simulation.planted_bugs import PLANTED, WITHIN, Found, find
from simulation.run_kinds import KINDS, mixed, shares
from simulation.trees import SYNCS, Tree, tree_of

BATCH = 50  # runs of one job between two reports
FAILED_SHOWN = 20
COLLECT_EVERY = 10  # runs: what one leaves behind is freed then
TELL_S = 60  # between two lines of progress, where nobody watches


@dataclass
class Tally:
    """The totals of some runs."""

    kinds: Counter[str] = field(default_factory=Counter)  # of KINDS
    cpu_ns: Counter[str] = field(default_factory=Counter)  # of each kind
    virtual_s: float = 0.0
    struck: Counter[str] = field(default_factory=Counter)
    runs_struck: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.kinds += other.kinds
        self.cpu_ns += other.cpu_ns
        self.virtual_s += other.virtual_s
        self.struck += other.struck
        self.runs_struck += other.runs_struck
        self.failed += other.failed


def batch(kind: str, first: int, count: int) -> Tally:
    tally, began_ns = Tally(Counter({kind: count})), time.process_time_ns()
    gc.disable()  # a run makes few cycles, and the collector looks at all that there is, again and again
    for seed in range(first, first + count):
        run = KINDS[kind].make(seed, Kit(), None)
        try:
            run.run()
        except Exception as error:  # whatever it is, this run has failed, and the others go on
            name = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
            tally.failed.append(
                f"{name}{error}\n    python bench/faults/simulate.py --replay {seed}{KINDS[kind].option}"
            )
        tally.virtual_s += run.sim.now_ns / NS
        tally.struck += run.sim.struck
        tally.runs_struck.update(fault for fault, times in run.sim.struck.items() if times)
        if seed % COLLECT_EVERY == 0:
            del run
            gc.collect()
    tally.cpu_ns[kind] = time.process_time_ns() - began_ns
    return tally


def campaign(first: int, totals: dict[str, int], jobs: int, limit_s: float | None) -> Tally:
    """All runs, over `jobs` processes; after Ctrl-C, or so many seconds, those that there were."""
    tally, total, told_s = Tally(), sum(totals.values()), 0.0
    # spawn: a fork would copy whatever threads numba has started
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), gc.freeze) as pool:
        pieces = [(kind, first + begin, count) for kind, begin, count in mixed(totals, BATCH)]
        try:
            for future in as_completed([pool.submit(batch, *piece) for piece in pieces], limit_s):
                done = future.result()
                tally.add(done)
                for text in done.failed:
                    print(f"\nfailed: {text}", file=sys.stderr, flush=True)
                watched = sys.stderr.isatty()
                if watched or time.monotonic() - told_s >= TELL_S:
                    told_s = time.monotonic()
                    where = f"{tally.kinds.total()} of {total} runs, {len(tally.failed)} failed"
                    print(f"\r{where}" if watched else where, end="" if watched else "\n", file=sys.stderr, flush=True)
        except (KeyboardInterrupt, TimeoutError, BrokenProcessPool) as error:
            if isinstance(error, BrokenProcessPool):
                tally.failed.append(f"not all was done: {error}")
            pool.shutdown(wait=False, cancel_futures=True)
    return tally


def show(tally: Tally, wall_s: float, recorder: record.Recorder, first: int) -> None:
    total = tally.kinds.total()
    for kind, runs in tally.kinds.items():
        cpu_ms = 1000 * tally.cpu_ns[kind] / NS / runs
        recorder.add(kind, {"runs": (runs, ""), "CPU time a run": (cpu_ms, "ms")}, seed=first, note=KINDS[kind].text)
    figures: record.Figures = {"runs": (total, ""), "failed": (len(tally.failed), "")}
    recorder.add(
        "all", figures | {"virtual time": (tally.virtual_s / 3600, "hours"), "time": (wall_s, "s")}, seed=first
    )
    recorder.show()
    print(f"\n{'fault':<22}{'struck':>10}{'a run':>9}{'runs struck':>13}")
    for fault, times in tally.struck.most_common():
        print(f"{fault:<22}{times:>10}{times / total:>9.2f}{tally.runs_struck[fault]:>13}")
    for text in sorted(tally.failed)[:FAILED_SHOWN]:
        print(f"\n{text}")


def planted(jobs: int) -> int:
    """Each planted bug, and the first run of a campaign that finds it. 1 where one is not found."""
    print(f"{'bug':<54}{'found in run':>12}  {'by':<24}{'which says'}", flush=True)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), gc.freeze) as pool:
        found = pool.map(find, PLANTED)
        return max(planted_line(bug, each) for bug, each in zip(PLANTED, found, strict=True))


def planted_line(bug: str, found: Found | None) -> int:
    if found is None:
        print(f"{bug:<54}{f'not in {WITHIN}':>12}", flush=True)
        return 1
    replay = f"--replay {found.seed}{KINDS[found.kind].option}"
    print(f"{bug:<54}{found.run:>12}  {replay:<24}{found.says[:80]}", flush=True)
    return 0


def replay(seed: int, kind: str) -> int:
    """One run, each event a line."""

    def trace(now_ns: int, text: str, message: Message | None) -> None:
        print(f"{now_ns / NS:9.4f} {text} {describe(message)}".rstrip())

    run = KINDS[kind].make(seed, Kit(), trace)
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
    for name, each in KINDS.items():
        parser.add_argument(f"--{name}", type=int, default=0, metavar="N", help=each.text)
    parser.add_argument("--planted", action="store_true", help="how soon a campaign finds each bug that is planted")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--minutes", type=float, help="end after so long, with the runs that there were")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one seed and print its trace")
    parser.add_argument("--restart", action="store_true", help="with --replay: the run in which a shard restarts")
    parser.add_argument("--kill", action="store_true", help="with --replay: that in which shards are killed")
    parser.add_argument("--standby", action="store_true", help="with --replay: that with standbys")
    parser.add_argument("--pair", action="store_true", help="with --replay: the tree with standbys")
    parser.add_argument("--move", action="store_true", help="with --replay: that in which keys move")
    parser.add_argument("--start", action="store_true", help="with --replay: that with a start")
    parser.add_argument("--tree", action="store_true", help="one large tree, without faults, against its closed form")
    parser.add_argument("--gossip", action="store_true", help="one large gossip run, without faults, the same way")
    parser.add_argument("--workers", type=int, default=1000, help="with --tree: of all clusters; with --gossip")
    parser.add_argument("--clusters", type=int, default=50, help="with --tree; 0: all workers below the root")
    parser.add_argument("--sync", choices=[*SYNCS, "all"], default="ssp", help="with --tree: of each cluster")
    parser.add_argument("--above", choices=[*SYNCS, "all"], default="ssp", help="with --tree: of the root")
    parser.add_argument("--local-steps", type=int, default=4, help="with --tree: of local")
    parser.add_argument("--rounds", type=int, default=20, help="with --tree: of the root; with --gossip")
    parser.add_argument("--topology", choices=[*TOPOLOGIES, "all"], default="all", help="with --gossip")
    parser.add_argument(
        "--compress", choices=gossip.OF_ONE_SIZE, default="dense", help="with --gossip: payloads of one size"
    )
    parser.add_argument("--staleness", type=int, choices=[0, 1], help="with --gossip; not given: both")
    default = record.RESULTS / "simulate.jsonl"
    parser.add_argument("--out", type=Path, default=default, help="JSON lines of a campaign")
    told = parser.parse_args()
    if told.replay is not None:
        options = {option for each in KINDS.values() for option in each.option.split()}
        asked = {option for option in options if getattr(told, option.removeprefix("--"))}
        for name, each in KINDS.items():
            if {*each.option.split()} == asked:
                return replay(told.replay, name)
        parser.error(f"--replay {told.replay} {' '.join(sorted(asked))}: no kind of runs has these together")
    if told.planted:
        return planted(told.jobs)
    if told.tree:
        return trees(told)
    if told.gossip:
        return gossips(told)
    recorder, began = record.Recorder("faults/simulate", told.out), time.monotonic()
    totals = shares(told.campaign) if told.campaign else {kind: getattr(told, kind) for kind in KINDS}
    tally = campaign(told.seed, totals, told.jobs, told.minutes * 60 if told.minutes else None)
    show(tally, time.monotonic() - began, recorder, told.seed)
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
