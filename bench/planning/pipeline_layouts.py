"""Layouts of pipelines on the five networks of 2206.01288: our search beside the paper's, and what minding compute gains.

    python bench/planning/pipeline_layouts.py                    # all tables; about 4 minutes of one core
    python bench/planning/pipeline_layouts.py --evaluations 100  # a look
    python bench/planning/pipeline_layouts.py --only sizes

Rules
- Both searches price layouts with the same `Costs`, and start from random layouts. One evaluation is one priced layout: order
  and matchings included, whether it was kept or not. Gains that guide moves are sums over links, and are none in either.
- The networks are facts of the authors' repository (DS3Lab/DT-FM, cda948f, its scheduler's cases 0 to 4), the job is their
  GPT3-XL: 24 layers, 8 stages of 8 replicas, 0.65 GB of gradients a stage, 0.471 GB of activations a replica. We took no code.
- `paper` restates the paper's search (sec. 3.4): 100 random layouts; then two parents, five hosts of the one's partition into
  the other's, cycles of moves by the paper's gain, and the worse parent makes room for a child that is no worse.
- "contiguous" has hosts in the order of the table, "random" is the mean of 20 layouts. Seconds are of the process, one core.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from narrows.ps.planner.network import Network, from_places
from narrows.ps.planner.pipelines.cost import Costs, Indices, Job
from narrows.ps.planner.pipelines.cycles import cycled
from narrows.ps.planner.pipelines.search import FoundLayout, plan

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import record

GPT3_XL = Job(stages=8, replicas=8, layers=24, layer_bytes=0.65e9 / 3, activation_bytes=0.47124922275543213e9)
PAPER_POPULATION = 100
CROSSED = 5  # hosts
RANDOM = 20  # layouts of a mean
TARGETS = {"on demand": 17.0, "spot": 49.5, "universities": 17.7, "regional": 39.3, "worldwide": 59.5}


def clusters(counts: list[int], gbps: list[float], between_gbps: float, delays_ms: tuple[float, float]) -> Network:
    """Clusters of so many hosts with rates of their own inside, one rate between all; delays inside and between."""
    one = np.eye(len(counts), dtype=bool)
    return from_places(
        {
            "order": [str(number) for number in range(len(counts))],
            "delay_ms": np.where(one, *delays_ms),
            "bandwidth_gbps": np.where(one, np.array(gbps), between_gbps),
        },
        counts,
    )


def cities(count: int, names: str, links: str) -> Network:
    """`count` hosts in each city, 5 ms and 2 Gbit/s inside. `links`: a row for each pair, "ms Gbit/s", in order."""
    order = names.split()
    delay, rate = np.full((2, len(order), len(order)), [[[5.0]], [[2.0]]])
    pairs = zip(*np.triu_indices(len(order), 1), strict=True)
    for (a, b), link in zip(pairs, links.split(","), strict=True):
        delay[[a, b], [b, a]], rate[[a, b], [b, a]] = (float(value) for value in link.split())
    return from_places({"order": order, "delay_ms": delay, "bandwidth_gbps": rate}, [count] * len(order))


def worldwide(count: int) -> Network:
    """`count` hosts in each of eight cities."""
    return cities(
        count,
        "Oregon Virginia Ohio Tokyo Seoul London Frankfurt Ireland",
        "67 0.79, 49 1.10, 96 0.523, 124 0.46, 136 0.42, 143 0.404, 124 0.482,"
        "11 1.12, 143 0.524, 172 0.5, 76 1.16, 90 1.02, 67 1.05,"
        "130 0.694, 159 0.529, 86 1.05, 99 0.799, 77 1.14,"
        "34 1.10, 210 0.366, 223 0.36, 199 0.465,"
        "238 0.342, 235 0.358, 228 0.335,"
        "14 1.14, 12 1.09,"
        "24 1.08",
    )


NETWORKS: dict[str, Network] = {
    "on demand": clusters([8] * 8, [100.0] * 8, 3.125, (0, 0)),
    "spot": clusters([4] * 8 + [1] * 32, [100.0] * 8 + [1.25] * 32, 1.25, (0, 0)),
    "universities": clusters([32, 32], [5.0, 5.0], 1.12, (1, 11)),
    "regional": cities(16, "Virginia Oregon California Ohio", "67 1.15, 59 1.05, 11 1.12, 12 1.25, 49 1.10, 52 1.02"),
    "worldwide": worldwide(8),
}


def half_slow(network: Network, slowness: float = 4.0) -> Network:
    """Every second host is so many times slower."""
    speed = np.where(np.arange(len(network.hosts)) % 2, 1 / slowness, 1.0)
    return replace(network, compute=speed)


def paper(costs: Costs, seed: int, evaluations: int) -> tuple[float, int]:
    """(total, the evaluation that found it) of the paper's search, restated."""
    job, random = costs.job, np.random.default_rng(seed)
    links = costs.links / 2
    hosts = len(links)

    def priced(labels: Indices) -> float:
        groups = np.argsort(labels, kind="stable").reshape(job.stages, job.replicas)
        return costs.price(costs.arrange(groups)).total

    even = np.repeat(np.arange(job.stages), job.replicas)
    population = [random.permutation(even) for _ in range(min(PAPER_POPULATION, evaluations))]
    totals = [priced(labels) for labels in population]
    found = [*totals]
    while len(found) < evaluations:
        one, other = random.integers(len(population), size=2)
        child = population[other].copy()
        five = random.choice(hosts, CROSSED, replace=False)
        child[five] = population[one][five]
        child = cycled(balanced(child, job), links, job.stages)
        found.append(priced(child))
        worse = one if totals[one] > totals[other] else other
        if found[-1] <= totals[worse]:
            population[worse], totals[worse] = child, found[-1]
    return min(found), int(np.argmin(found)) + 1


def balanced(labels: Indices, job: Job) -> Indices:
    """The first hosts of groups that are too large go to groups that are too small."""
    sizes = np.bincount(labels, minlength=job.stages)
    for host in range(len(labels)):
        if sizes[labels[host]] > job.replicas:
            sizes[labels[host]] -= 1
            labels[host] = sizes.argmin()
            sizes[labels[host]] += 1
    return labels


def timed(network: Network, job: Job, seed: int, evaluations: int | None) -> tuple[FoundLayout, float]:
    began = time.process_time()
    return plan(network, job, seed, evaluations), time.process_time() - began


def networks(recorder: record.Recorder, seeds: int, evaluations: int) -> None:
    for name, network in NETWORKS.items():
        costs, hosts = Costs(network, GPT3_XL), len(network.hosts)
        layouts = [np.arange(hosts), *(np.random.default_rng(seed).permutation(hosts) for seed in range(RANDOM))]
        contiguous, *random = (
            costs.price(costs.arrange(layout.reshape(GPT3_XL.stages, -1))).total for layout in layouts
        )
        figures: record.Figures = {"aim": (TARGETS[name], ""), "contiguous": (contiguous, "")}
        figures["random"] = (statistics.mean(random), "")
        for seed in range(seeds):
            theirs, at = paper(costs, seed, evaluations)
            ours, spent = timed(network, GPT3_XL, seed, evaluations)
            both: record.Figures = {"ours": (ours.prediction.total, ""), "the paper's": (theirs, "")}
            both |= {"ours found at": (ours.found_at, ""), "the paper's found at": (at, ""), "ours, CPU": (spent, "s")}
            recorder.add(name, both | figures, table="networks", seed=seed, arguments={"evaluations": evaluations})


def compute(recorder: record.Recorder, seeds: int, evaluations: int) -> None:
    """The two universities, every second host 4 times slower; a layer takes 1.25 s of a fast one, 16 micro-batches."""
    network = half_slow(NETWORKS["universities"])
    job = replace(GPT3_XL, layer_s=1.25, micro_batches=16)
    costs = Costs(network, job)
    for seed in range(seeds):
        blind = plan(network.alike(), job, seed, evaluations).layout
        seconds = {"minding compute": plan(network, job, seed, evaluations).prediction.seconds}
        seconds |= {"blind": costs.price(blind).seconds}
        seconds |= {"blind, depths by speed": costs.price(costs.arrange(blind.grid)).seconds}
        for name, value in seconds.items():
            recorder.add(name, {"step": (value, "virtual seconds")}, table="every second host 4 times slower",
                         beside="minding compute", seed=seed, arguments={"evaluations": evaluations})  # fmt: skip


def sizes(recorder: record.Recorder) -> None:
    """How long a search of the default length takes: hosts in the eight cities, 8 replicas or 8 stages."""
    for hosts, stages in ((64, 8), (128, 8), (256, 8), (512, 8), (512, 64)):
        network = worldwide(hosts // 8)
        job = replace(GPT3_XL, stages=stages, replicas=hosts // stages, layers=max(24, stages))
        costs = Costs(network, job)
        contiguous = costs.price(costs.arrange(np.arange(hosts).reshape(stages, -1))).total
        found, spent = timed(network, job, 0, None)
        figures: record.Figures = {"found": (found.prediction.total, ""), "contiguous": (contiguous, "")}
        figures |= {"evaluations": (found.evaluations, ""), "CPU": (spent, "s")}
        recorder.add(f"{hosts} hosts, {stages} stages", figures, table="sizes", seed=0)


@click.command(help=__doc__)
@click.option("--seeds", default=10, show_default=True)
@click.option("--evaluations", default=300, show_default=True, help="of each search; the authors' script has 5000")
@click.option("--only", type=click.Choice(["networks", "compute", "sizes"]))
@record.out_option("planning/pipeline_layouts")
def main(seeds: int, evaluations: int, only: str | None, out: Path) -> None:
    with record.Recorder("planning/pipeline_layouts", out) as recorder:
        if only in (None, "networks"):
            networks(recorder, seeds, evaluations)
        if only in (None, "compute"):
            compute(recorder, seeds, evaluations)
        if only in (None, "sizes"):
            sizes(recorder)


if __name__ == "__main__":
    main()
