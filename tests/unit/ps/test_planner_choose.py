"""ps-plan: its prices against plain loops and simulated runs, its choice against others, its commands and plan.json."""

from __future__ import annotations

import json
import re
import shlex
import time
from dataclasses import replace
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import BadParameter
from click.testing import CliRunner
from kit.planned_networks import cities, drawn_cities, planned, told
from planning.paper_networks import worldwide
from simulation.actors import Kit
from simulation.closed_forms import measured_s
from simulation.trees import Road, Tree, tree_of

from narrows.compression.losses import STEPS_POWER
from narrows.compression.predict import Cost, Link, clock_s, cluster_clock_s, step_s, whole_clock_s
from narrows.protocols.config.deployment import parse
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.ps.command import cli as serve
from narrows.ps.command.planning.clustered import ASYNC_RANGE, step_ms
from narrows.ps.command.planning.plan import command as ps_plan
from narrows.ps.planner.bottleneck import decides
from narrows.ps.planner.candidate_prices import partitions
from narrows.ps.planner.choose import EXACT_MAX, NEAR, NEAR_MAX, PATIENT, TIE, Chooser, choices, choose, simplest_first
from narrows.ps.planner.codec_costs import CodecCost, coded
from narrows.ps.planner.modes_and_specs import BELOW, DENSE_UPDATES, WAYS, ModeAndSpec
from narrows.ps.planner.network import Network
from narrows.ps.planner.network_places import placed
from narrows.ps.planner.plan_writer import HostAddresses, clustered, long_commands
from narrows.ps.planner.step_prices import (
    Groups,
    StepPrices,
    TrainingWork,
    cuts,
    joined,
    merges,
    places,
)
from narrows.ps.probe.measured_network import parse as measured
from narrows.worker.command import cli as worker

CODED = coded()
NS = 1_000_000_000
NETWORKS = Path(__file__).parent / "networks"


WORK = TrainingWork(2e6, 0.1, CODED)
# Loss over bsp of 16 workers that push updates without delay, by the SPEC both ways.
PUSHED = {"int4": 0.019, "topk:0.5+sign": 0.048, "topk:0.11+sign": 0.12}


# The price.


@pytest.mark.parametrize("way", [w for w in WAYS if w.compress != "dense" or w.mode.window == 1], ids=str)
def test_a_link_of_two_is_priced_as_compression_predict_does(way: ModeAndSpec) -> None:
    """A server that handles updates for nothing is all that it does not know."""
    network, free = cities([1, 1], 20, 60), {spec: replace(row, serve_s=0.0) for spec, row in CODED.items()}
    prices = StepPrices(network, replace(WORK, coded=free))
    row, mode = CODED[way.compress], way.mode
    size, back = row.bytes * WORK.parameters, CODED[way.down].bytes * WORK.parameters
    outer_s = 1.8e-10 * 2e6 * 1e7 ** (1 / 3) if way.outer else 0.0  # each round waits for it, as for an encode
    cost = Cost(WORK.step_s, row.encode_s * WORK.parameters + outer_s, size, back)
    own = step_s(Link(1e12, 0.0), replace(cost, up_bytes=0.0, down_bytes=0.0), mode.window, mode.local_steps)
    away = step_s(Link(20e6 / 8, 0.06), cost, mode.window, mode.local_steps)
    found = prices.above_s(way, prices.compute_s, ((0,), (1,)), prices.hosts)[0]
    assert found == pytest.approx(2 / (1 / own + 1 / away) if mode.bound is None else max(own, away))


def plain_s(
    network: Network, way: ModeAndSpec, own: list[float], at: list[int], children: Groups, server: int, inside: int = 1
) -> float:
    """Seconds of a step of one level in plain words: `at` has the host that each child speaks from."""
    size, back = (CODED[spec].bytes * WORK.parameters for spec in (way.compress, way.down))
    mode, n = way.mode, len(network.hosts)
    rate, place = network.rates[-1], places(network)
    homes = [[{int(row[host]) for host in group} for group in children] for row in place]
    clocks = []
    for child, host in enumerate(at):
        up = down = trip = 0.0
        if host != server:
            level = next((number for number, row in enumerate(place) if row[host] != row[server]), None)
            share = 1 if level is None or len(homes[level][child]) > 1 else homes[level].count(homes[level][child])
            card_in = max(rate[other, server] for other in range(n) if other != server)
            card_out = max(rate[server, other] for other in range(n) if other != server)
            up = max(size * share / rate[host, server], size * (len(at) - 1) / card_in)
            down = max(back * share / rate[server, host], back * (len(at) - 1) / card_out)
            trip = network.delay_s[host, server] + network.delay_s[server, host]
        up = max(up, len(at) * CODED[way.compress].serve_s * WORK.parameters)
        encode = CODED[way.compress].encode_s * WORK.parameters
        encode += 1.8e-10 * 2e6 * 1e7 ** (1 / 3) if way.outer else 0.0
        busy, road = mode.local_steps * own[child] + encode, encode + up + down + trip
        if inside > 1 and len(children[child]) > 1 and way.down != "dense" and mode.local_steps == 1:
            deep = (inside * own[child] + road) / (mode.window + inside - 1)
            clocks.append(max(own[child], encode, up, down, road / mode.window, deep))
            continue
        overlapped = busy if way.down == "dense" else busy / mode.window
        clocks.append(max(busy, up, down, overlapped + (up + down + trip) / mode.window))
    folded = sum(len(group) / clock for group, clock in zip(children, clocks, strict=True))  # workers' updates a second
    whole = sum(map(len, children)) / folded if mode.bound is None else max(clocks)
    return float(whole / mode.local_steps)


def plainly(network: Network, groups: Groups, above: ModeAndSpec, below: ModeAndSpec) -> float:
    """The least cost over every root and every server of each cluster."""
    compute = [WORK.step_s / float(speed) for speed in network.compute]
    inside = {
        (group, server): plain_s(
            network, below, [compute[h] for h in group], [*group], tuple((h,) for h in group), server
        )
        if len(group) > 1
        else compute[server]
        for group in groups
        for server in group
    }
    found = [
        plain_s(
            network,
            above,
            [inside[g, s] for g, s in zip(groups, servers, strict=True)],
            [*servers],
            groups,
            root,
            below.mode.window if below.compress != "dense" else 1,
        )
        for root in range(len(network.hosts))
        for servers in product(*groups)
    ]
    n, clusters = len(network.hosts), len(groups) < len(network.hosts)
    if clusters and above == WAYS[0]:  # clusters push updates
        above = DENSE_UPDATES
    if below == WAYS[0] or not clusters:
        return min(found) * above.steps(len(groups))
    return min(found) * max(above.steps(n) * below.steps(2), above.steps(2) * below.steps(n))


@pytest.mark.parametrize("seed", range(3))
def test_no_root_no_server_no_way_and_no_cut_is_cheaper(seed: int) -> None:
    network = drawn_cities(seed, 4 + seed % 2)
    plan = choose(network, WORK)
    alone: Groups = tuple((host,) for host in range(len(network.hosts)))
    tried = [(alone, above, BELOW[0]) for above in WAYS]
    tried += list(product(cuts(network, 99), WAYS, BELOW[:3]))
    costs = {(groups, above, below): plainly(network, groups, above, below) for groups, above, below in tried}
    assert plan.cost <= min(costs.values()) * 1.002
    if (plan.groups, plan.above, plan.below) in costs and not plan.spread:
        assert plan.cost == pytest.approx(costs[plan.groups, plan.above, plan.below])


@pytest.mark.parametrize("seed", range(8))
def test_no_other_clusters_and_no_other_ways_are_cheaper(seed: int) -> None:
    """Every partition of 3 or 4 hosts with every two ways, each priced by itself."""
    network = drawn_cities(100 + seed, 3 + seed % 2)
    work = replace(WORK, parameters=(2e5, 2e6, 2e7, 1e8)[seed // 2 % 4])
    plan, chooser = choose(network, work), Chooser(network, work)
    every = [groups for groups in partitions([*range(len(network.hosts))]) if len(groups) > 1]
    assert len(every) == {3: 4, 4: 14}[len(network.hosts)]
    for groups, above, below in product(every, WAYS, BELOW[:: 1 + seed % 3]):
        other = chooser.priced(groups, above, below, chooser.prices.hosts)
        assert plan.cost * PATIENT <= other.cost, other


@pytest.mark.parametrize("seed", range(8))
def test_moves_come_near_to_the_cheapest_of_all_plans(seed: int) -> None:
    """On 6 and 7 hosts, all of whose plans are priced too."""
    network = drawn_cities(seed, 6 + seed % 2)
    work = replace(WORK, parameters=(2e5, 2e6, 2e7, 1e8)[seed // 2 % 4])
    moved, every = Chooser(network, work), Chooser(network, work)
    moved.nearby()
    every.every()
    assert every.least <= moved.least <= every.least * 1.04


def test_up_to_eight_hosts_every_partition_is_priced() -> None:
    assert [len([*partitions([*range(count)])]) for count in range(1, 9)] == [1, 2, 5, 15, 52, 203, 877, 4140]
    for count, every in ((EXACT_MAX, True), (EXACT_MAX + 1, False)):
        chooser = Chooser(cities([count - 3, 3], 20, 60), WORK)
        chooser.search()
        assert (len(chooser.looks[0].groupings) == 4139) is every


SPARSE = {"compress": "topk:0.5", "compress_down": "topk:0.5"}
CODES = {
    "dense": CodecCost(4.0, 0.0, whole_clock_s),
    "topk:0.5": CodecCost(2.0, 0.0, clock_s, cluster_s=cluster_clock_s),
}


def way_of(flags: dict[str, Any]) -> ModeAndSpec:
    loss = (0.0,)
    return ModeAndSpec(
        flags["sync"], loss, flags.get("compress", "dense"), flags.get("staleness", -1), flags.get("local_steps", -1)
    )


# Flags above, flags inside two clusters of two (None: no clusters), seconds of a step of each worker, the least and the most
# that the simulated run may take of the price. Sparse states under a bound overlap more than the form says.
@pytest.mark.parametrize(("above", "below", "step_s", "least", "most"), [
    ({"sync": "bsp", "push": "update"}, {"sync": "bsp"}, (0.1, 0.1, 0.1, 0.1), 0.99, 1.01),
    ({"sync": "ssp", "staleness": 1}, {"sync": "bsp"}, (0.1, 0.1, 0.1, 0.1), 0.99, 1.01),
    ({"sync": "ssp", "staleness": 1, **SPARSE}, {"sync": "bsp"}, (0.1, 0.1, 0.1, 0.1), 0.8, 1.01),
    ({"sync": "local", "local_steps": 5}, {"sync": "bsp"}, (0.1, 0.1, 0.1, 0.1), 0.99, 1.01),
    ({"sync": "async", **SPARSE}, {"sync": "bsp"}, (0.1, 0.1, 0.1, 0.2), 0.97, 1.05),
    ({"sync": "ssp", "staleness": 1, **SPARSE}, {"sync": "ssp", "staleness": 1, **SPARSE}, (0.1, 0.1, 0.1, 0.1), 0.8, 1.01),
    ({"sync": "ssp", "staleness": 2, **SPARSE}, {"sync": "ssp", "staleness": 1, **SPARSE}, (0.1, 0.12, 0.2, 0.1), 0.99, 1.01),
    ({"sync": "bsp", "push": "update"}, None, (0.1, 0.15, 0.1, 0.2), 0.99, 1.01),
    ({"sync": "bsp", "push": "update", **SPARSE}, None, (0.1, 0.15, 0.1, 0.2), 0.99, 1.01),
    ({"sync": "ssp", "staleness": 2, **SPARSE}, None, (0.1, 0.1, 0.1, 0.2), 0.99, 1.01),
    ({"sync": "async", **SPARSE}, None, (0.1, 0.1, 0.2, 0.3), 0.99, 1.01),
], ids=str)  # fmt: skip
def test_a_simulated_run_takes_as_long_as_predicted(
    above: dict[str, Any], below: dict[str, Any] | None, step_s: tuple[float, ...], least: float, most: float
) -> None:
    """The machines of a run in virtual time: a model of 1 MiB, a server on a worker's host, 10 MB/s and 30 ms to the others.
    Two cities of two each have a cluster; without clusters four cities have a worker each."""
    here, near, far = (
        Road(ns, rate) for ns, rate in ((0, 1 << 50), (NS // 5000, 125_000_000), (3 * NS // 100, 10_000_000))
    )
    case = tree_of(1, above, below or above, 2 if below else 0, 2 if below else 4, 40)
    roads, roads_up = ((here, near) * 2, (here, far)) if below else ((here, far, far, far), ())
    case = replace(case, step_ns=tuple(int(each * NS) for each in step_s), roads=roads, roads_up=roads_up)
    tree = Tree(case, Kit())
    tree.run()
    speed, way = 0.1 / np.array(step_s), way_of(above)
    network = replace(cities([2, 2] if below else [1] * 4, 80, 30), compute=speed)
    work = TrainingWork((1 << 20) / 4, 0.1, CODES)
    if below:
        network.delay_s[[0, 1, 2, 3], [1, 0, 3, 2]] = 0.0002
        prices, inside, groups = StepPrices(network, work), way_of(below), ((0, 1), (2, 3))
        own_s = np.concatenate([prices.inside_s(inside, np.array([group]))[0] for group in groups])
        found = prices.above_s(way, own_s, groups, np.array([0]), inside.inside)[0]
    else:
        prices = StepPrices(network, work)
        prices.port_in[0] = prices.port_out[0] = 1e12  # each worker has a wire of its own
        found = prices.above_s(way, prices.compute_s, ((0,), (1,), (2,), (3,)), np.array([0]))[0]
    assert least < measured_s(tree) / way.mode.local_steps / found < most


def test_plans_that_cost_nearly_as_much_and_the_best_of_each_shape_are_named_too() -> None:
    plan, *others = choices(cities([2, 2], 20, 60), WORK)
    assert plan == choose(cities([2, 2], 20, 60), WORK)
    near = others[:NEAR_MAX]
    assert [c.cost for c in near] == sorted(c.cost for c in near) and all(c.cost <= NEAR * plan.cost for c in near)
    assert len({c.kind for c in [plan, *others]}) == 1 + len(others)
    for shape in (lambda c: c.clusters, lambda c: not c.clusters and not c.spread, lambda c: c.spread):
        assert any(map(shape, [plan, *others]))


def test_a_server_of_many_decides_by_what_it_handles_and_shards_share_it() -> None:
    """64 workers of 100 M parameters in one rack, dense: a step takes as long as the server is busy with them."""
    network, work = cities([64], 20, 60), TrainingWork(1e8, 0.1, CODED)
    network.rates[:] = 1e12
    whole = 64 * CODED["dense"].serve_s * 1e8
    for shards in (1, 4):
        prices = StepPrices(network, replace(work, shards=shards))
        found = prices.above_s(WAYS[1], prices.compute_s, tuple((host,) for host in range(64)), np.array([0]))[0]
        assert found == pytest.approx(max(whole / shards, 0.1 + whole / shards / 2), rel=0.01)


@pytest.mark.parametrize("way", [way for way in WAYS if way.push], ids=str)
def test_updates_without_delay_take_a_whole_exchange_in_each_step(way: ModeAndSpec) -> None:
    """Nothing of it is hidden behind computing, and states are as wide as updates."""
    prices, size = StepPrices(cities([1, 1], 20, 60), WORK), CODED[way.compress].bytes * WORK.parameters
    found = prices.above_s(way, prices.compute_s, ((0,), (1,)), np.array([0]))[0]
    assert found == pytest.approx(0.1 + 2e-9 * WORK.parameters + 2 * 0.06 + 2 * size / 2.5e6, rel=1e-3)
    settings = Settings(**way.flags()).validated()
    assert (settings.sync, settings.push, settings.mode().window) == ("bsp", "update", 1)
    assert settings.compress == settings.compress_down == way.compress
    assert way.flags() == way.flags(updates=True)


# The choice.


# Seconds of a step, Mbit/s, the SPEC of updates without delay; "": updates travel while workers compute.
@pytest.mark.parametrize(("step_s", "mbits", "spec"), [(0.3, 20, ""), (1.0, 100, "topk:0.5+sign"), (3.0, 100, "int4")])
def test_sixteen_workers_wait_for_a_link_where_that_ends_sooner(step_s: float, mbits: float, spec: str) -> None:
    """The least of seconds x steps by the measured losses. Two workers on the same links never wait."""
    network, work = cities([1] * 16, mbits, 20), replace(WORK, step_s=step_s)
    plan, two = choose(network, work), choose(cities([1] * 2, mbits, 20), work)
    assert not plan.clusters and bool(plan.above.push) == bool(spec) and not two.above.push
    assert plan.above.compress == spec or not spec
    prices = StepPrices(network, work)
    for way in WAYS:
        found = prices.above_s(way, prices.compute_s, tuple((host,) for host in range(16)), prices.hosts)[0]
        cost = found * (1 + PUSHED[way.compress]) ** STEPS_POWER if way.push else found * way.steps(16)
        assert plan.cost * PATIENT <= cost, way


def test_a_gpu_that_codes_in_no_time_sends_fewer_bytes() -> None:
    """30.8 M parameters and 30 ms a step at 200 Mbit/s. On a CPU coding takes longer than the step, and hides bytes."""
    found = {}
    for gpu in (False, True):
        work = TrainingWork(30.8e6, 0.03, coded(gpu=gpu), shards=4)
        found[gpu] = choose(cities([1, 1], 200, 10), work)
    own_s = 0.03 + 1e-3 * (0.72 + (2.70 - 0.72) * 20.8 / 90)
    sent_s = CODED["cycle:0.15+sign"].bytes * 30.8e6 / 25e6
    assert found[False].above.sync == "local"
    assert str(found[True].above) == "ssp, S = 2, cycle:0.15+sign"
    assert found[True].step_s == pytest.approx((own_s + 0.02 + 2 * sent_s) / 3, rel=1e-3)
    assert found[True].cost < 0.5 * found[False].cost


def test_rounds_with_equal_singular_values_are_planned_where_coding_each_step_takes_long(tmp_path: Path) -> None:
    """30.8 M parameters, coded on a CPU once in 20 steps; all four shards decompose their matrices meanwhile."""
    words = ("--parameters", "30.8e6", "--step", "0.08", "--shards", "4", "--insecure")
    output, plan = planned(tmp_path, cities([1, 1], 1000, 10), *words)
    assert plan["stages"][0]["flags"] == {
        "sync": "local", "local_steps": 20, "cut": "tensors", "outer": "iso", "compress": "2bit", "compress_down": "int4",
        "shards": 4,
    }  # fmt: skip
    count = 30.8e6
    outer_s, sent_s = 1.8e-10 * count * (5 * count) ** (1 / 3) / 4, (0.2559 + 0.531) * count / 125e6
    step_s = (20 * 0.08 + 2e-9 * count + outer_s + 0.02 + sent_s) / 20
    assert f"predicted {1e3 * step_s:.3g} ms a step, and 1.00 times bsp's steps" in output, "it ends 3.6 % below bsp"
    assert step_s < 0.08 + 2e-9 * count, "any update of one step takes longer to code alone"


def test_an_outer_step_that_takes_longer_than_a_round_is_what_decides() -> None:
    """One shard decomposes 30.8 M parameters for 3 s, and 20 steps take 0.6 s."""
    chooser = Chooser(cities([1, 1], 10_000, 1), TrainingWork(30.8e6, 0.03, CODED))
    way = next(way for way in WAYS if way.outer and way.local_steps == 20)
    plan = chooser.priced(chooser.alone, way, BELOW[0], np.array([0]))
    assert decides(chooser, plan) == "the outer step on a-0 decides: 2.97e+03 ms of a round"
    assert plan.step_s > (2.97 + 0.6) / 20


def test_coding_on_a_gpu_takes_what_was_measured() -> None:
    costs = coded("topk:0.01+int8", gpu=True)
    for spec, parameters, ms in (
        ("cycle:0.03+sign", 1e7, 0.72),
        ("cycle:0.03+sign", 2e8, 2.70 + 1.98 * 100 / 90),
        ("topk:0.11+sign", 1e8, 5.83),
        ("topk:0.01+int8", 1e5, 1.48),
        ("int4", 55e6, (1.21 + 5.83) / 2),
        ("dense", 1e8, 0.0),
    ):
        assert costs[spec].worker_s(parameters) == pytest.approx(1e-3 * ms), spec
        assert CODED[spec].worker_s(parameters) == CODED[spec].encode_s * parameters if spec in CODED else True


def test_a_clusters_server_codes_on_a_cpu() -> None:
    """Beside a worker that codes on a GPU. Neither has a link to pass."""
    prices, way = StepPrices(cities([1, 1], 200, 10), replace(WORK, coded=coded(gpu=True))), WAYS[3]
    nothing = np.zeros(2)
    worker_s, cluster_s = prices.clocks(way, nothing, nothing, nothing, nothing, np.array([0, 1]))
    assert worker_s == pytest.approx(1e-3 * (1.43 + (1.21 - 1.43) / 9)) and cluster_s == pytest.approx(2e-9 * 2e6)


def test_two_cities_are_two_clusters_and_a_rack_is_none() -> None:
    far, rack = (
        choose(cities([3, 3], 2, 60), replace(WORK, step_s=3.0)),
        choose(cities([4], 20, 60), TrainingWork(2e4, 10.0, CODED)),
    )
    assert far.groups == ((0, 1, 2), (3, 4, 5))
    assert far.above.compress != "dense" and far.below.sync == "bsp"
    assert rack.clusters == []


@pytest.mark.parametrize(
    ("hosts", "mbits", "parameters", "step_s"),
    [(4, 100, 2e6, 0.1), (4, 1000, 2e4, 1.0), (6, 1000, 2e7, 0.1), (8, 1000, 1e8, 0.1)],
)
def test_a_rack_of_alike_machines_has_one_level(hosts: int, mbits: float, parameters: float, step_s: float) -> None:
    network = cities([hosts], 20, 60)
    network.rates[:] = 1e6 * mbits / 8
    work = TrainingWork(parameters, step_s, CODED)
    assert simplest_first(choices(network, work))[0].clusters == []


def test_of_plans_that_cost_alike_the_simplest_is_printed() -> None:
    """Within TIE, with fewer levels, then clusters; what is dearer by more is not."""
    chooser = Chooser(cities([4], 1000, 0.1), replace(WORK, parameters=2e4))
    flat, two, three = (
        chooser.priced(groups, WAYS[0], BELOW[0], chooser.prices.hosts)
        for groups in (chooser.alone, ((0, 1), (2, 3)), ((0, 1), (2,), (3,)))
    )
    for dear, first in ((0.99, flat), (1.01, flat), (1.05, three)):
        plans = [replace(two, cost=1.0), replace(three, cost=1.0), replace(flat, cost=dear)]
        assert simplest_first(plans)[0].groups == first.groups
        assert {plan.groups for plan in simplest_first(plans)} == {plan.groups for plan in plans}
    assert 1.01 < TIE < 1.05


def test_a_wire_carries_the_messages_of_both_levels() -> None:
    """Each cluster lies in two cities, so its workers and the clusters share the wire between these."""
    chooser, groups, way = Chooser(cities([2, 2], 20, 10), WORK), ((0, 2), (1, 3)), WAYS[4]
    update_s = CODED[way.compress].bytes * WORK.parameters / 2.5e6
    # From city a to b: the update of worker 1, the state of worker 2 and the state of the second cluster.
    assert chooser.busiest(groups, (0, 3), 0, way, way).seconds == pytest.approx(3 * update_s, rel=1e-3)
    plan = chooser.priced(groups, way, way, chooser.prices.hosts)
    assert (
        plan.step_s == chooser.busiest(groups, plan.servers, plan.root, way, way).seconds == pytest.approx(2 * update_s)
    )
    assert decides(chooser, plan) == "the wire from b-1 to a-1 decides: 126 ms of bytes"
    free = next(row for row in WAYS if row.sync == "async")  # a slow child sends less than once a step
    assert chooser.busiest(groups, (0, 3), 0, free, way).seconds == 0.0


def test_a_step_without_a_bound_is_printed_as_a_range() -> None:
    plan = choose(cities([2, 2], 20, 60), WORK)
    least, most = (1e3 * factor * 0.1 for factor in ASYNC_RANGE)
    free = next(row for row in WAYS if row.sync == "async")
    for way, text in ((WAYS[0], "100"), (free, f"{least:.3g} to {most:.3g}")):
        assert step_ms(replace(plan, above=way, step_s=0.1)) == text


def without(network: Network, *pairs: tuple[int, int]) -> Network:
    """The network, where nobody measured the first way of these pairs."""
    delay_s, rates = network.delay_s.copy(), network.rates.copy()
    for a, b in pairs:
        delay_s[a, b], rates[:, a, b] = np.inf, 0.0
    return replace(network, delay_s=delay_s, rates=rates)


@pytest.mark.parametrize("hosts", [[2, 2, 1], [2, 2, 14]])
def test_links_that_no_plan_needs_may_be_missing(hosts: list[int]) -> None:
    """Host 2 has links to all, and no other two have one."""
    whole, others = cities(hosts, 20, 60), [host for host in range(sum(hosts)) if host != 2]
    network = without(whole, *permutations(others, 2))
    plan, least = choose(network, WORK), choose(whole, WORK).cost
    assert np.isfinite(plan.cost) and plan.cost >= least * PATIENT
    assert all(len(group) == 1 or 2 in group for group in plan.groups)
    assert choose(without(whole, (0, 1)), WORK).cost >= least * PATIENT


@pytest.mark.parametrize("hosts", [6, 10])
def test_two_stars_joined_by_one_link_are_two_clusters(hosts: int) -> None:
    links = {(host % 2, host) for host in range(2, hosts)} | {(0, 1)}
    kept = links | {(b, a) for a, b in links}
    network = without(cities([1] * hosts, 20, 60), *({*permutations(range(hosts), 2)} - kept))
    plan = choose(network, WORK)
    assert np.isfinite(plan.cost)
    for server, group in plan.clusters:
        assert all(host == server or (server, host) in kept for host in group)
    with pytest.raises(UsageError, match=r"measure both ways of a-0 to d-0, or leave these hosts out"):
        choose(without(network, (1, 3)), WORK)


@pytest.mark.parametrize("kept", [{(0, 1), (0, 2)}, {(0, 1), (0, 2), (0, 3)}, {(0, 1), (1, 2), (2, 3)}], ids=str)
def test_a_candidate_that_needs_a_missing_link_is_none(kept: set[tuple[int, int]]) -> None:
    """Stars and a chain: what is chosen takes finite time."""
    hosts = 1 + max(map(max, kept))
    absent = [pair for link in combinations(range(hosts), 2) if link not in kept for pair in (link, link[::-1])]
    network = without(cities([1] * hosts, 20, 60), *absent)
    plans = choices(network, WORK)
    assert all(np.isfinite(plan.cost) for plan in plans)
    for server, group in (edge for plan in plans for edge in [*plan.clusters, (plan.root, plan.servers)]):
        assert all(np.isfinite(network.delay_s[server, host]) for host in group if host != server), plans


def test_a_star_is_planned_by_the_command(tmp_path: Path) -> None:
    document = json.loads((NETWORKS / "star-of-3.json").read_text())
    output, plan = planned(tmp_path, cities([3], 20, 60), "--step", "0.2", "--insecure", document=document)
    assert plan["stages"][0]["host"] == "hub" and len(plan["processes"]) == 3 and "DDP finds no ring" in output


def test_a_plan_is_the_same_each_time_and_soon_there() -> None:
    network = worldwide(8)
    began = time.process_time()
    plan = choose(network, WORK)
    assert time.process_time() - began < 1
    assert choose(network, WORK) == plan


# The hosts.


def test_a_city_behind_a_satellite_is_left_out(tmp_path: Path) -> None:
    """One city makes the samples of a step in twice the time, and a loss comes sooner."""
    document = json.loads((NETWORKS / "satellite.json").read_text())
    words = ("--step", "0.1", "--insecure")
    output, plan = planned(tmp_path, cities([4], 20, 60), *words, document=document)
    assert [*plan["hosts"]] == ["a0", "a1"] == [process["host"] for process in plan["processes"]]
    assert "left out: b0, b1; with all hosts a loss takes 1.10 times as long; --all-hosts keeps them" in output
    assert "each other host computes 2 times its even share: give the script 2 times its batch" in output
    assert "without a0, the host that is missed least, a loss takes 1.95 times as long" in output
    assert "on b0" not in output and "predicted 205 ms a step" in output
    output, plan = planned(tmp_path, cities([4], 20, 60), *words, "--all-hosts", document=document)
    assert len(plan["processes"]) == 4 and "left out" not in output
    batch = ("--batch", "60", "--script", "train.py {samples}")
    output, plan = planned(tmp_path, cities([4], 20, 60), *words, *batch, document=document | {"compute": [2, 1, 1, 1]})
    assert plan["samples"] == [40, 20] and "give the script" not in output


@pytest.mark.parametrize("case", ["straggler", "dial-up"])
@pytest.mark.parametrize("count", [4, 9])
def test_a_host_that_costs_more_than_it_adds_is_left_out(tmp_path: Path, count: int, case: str) -> None:
    """The last one is ten times as slow, or has a modem."""
    network, slow = cities([count], 20, 60), count - 1
    if case == "straggler":
        network.compute[slow] = 0.1
    else:
        for table, value in ((network.rates[0], 7e3), (network.delay_s, 0.2)):
            table[slow], table[:, slow] = value, value
    output, plan = planned(tmp_path, network, "--insecure")
    assert [*plan["hosts"]] == [*network.hosts[:slow]] and f"left out: {network.hosts[slow]}; with all hosts" in output
    output, plan = planned(tmp_path, network, "--insecure", "--all-hosts")
    assert ("--batch, with {samples} in --script, shares a step by speed" in output) is (case == "straggler")
    gain = re.search(
        rf"without {network.hosts[slow]}, the host that is missed least, a loss takes (0\.\d+) times", output
    )
    assert len(plan["hosts"]) == count and gain and float(gain[1]) < 0.95


@pytest.mark.parametrize("count", [4, 9])
def test_of_hosts_that_are_alike_none_is_left_out(tmp_path: Path, count: int) -> None:
    assert len(planned(tmp_path, cities([count], 20, 60), "--insecure")[1]["hosts"]) == count


@pytest.mark.parametrize("count", [6, 9])
def test_hosts_that_nobody_reaches_over_two_links_are_left_out(tmp_path: Path, count: int) -> None:
    """Of a chain five hosts in a row have a plan."""

    def chain(value: float) -> list[list[float | None]]:
        return [[value if abs(a - b) < 2 else None for b in range(count)] for a in range(count)]

    document = {"format": 1, "hosts": [f"h{number}" for number in range(count)], "delay_s": chain(0.001),
                "rates": [{"message_bytes": 1, "bits_per_second": chain(1e8)}]}  # fmt: skip
    words = ("--insecure", "--step", "0.1")
    output, plan = planned(tmp_path, cities([2], 20, 60), *words, document=document)
    assert [*np.diff([int(name[1:]) for name in plan["hosts"]])] == [1] * 4
    assert "with all hosts there is no plan: no host reaches all others" in output and "measure both ways of" in output
    with pytest.raises(UsageError, match="measure both ways of"):
        planned(tmp_path, cities([2], 20, 60), *words, "--all-hosts", document=document)


def test_one_machine_alone_is_a_plan(tmp_path: Path) -> None:
    """Where a model is large and links are narrow. A step of one has the samples of all."""
    output, plan = planned(tmp_path, cities([1, 1, 1], 1, 60), "--insecure", "--step", "0.01")
    assert [*plan["hosts"]] == ["a-0"] and plan["processes"][0]["host"] == plan["stages"][0]["host"] == "a-0"
    assert "a-0 alone is fastest: python SCRIPT.py trains there without a server, too" in output
    assert "each other host computes 3 times its even share" in output and "missed least" not in output


def test_fewer_samples_than_hosts_are_for_fewer_hosts(tmp_path: Path) -> None:
    words = ("--step", "0.1", "--insecure", "--batch", "2", "--script", "train.py {samples}")
    output, plan = planned(tmp_path, cities([3], 20, 60), *words)
    assert plan["samples"] == [1, 1] and "with all hosts there is --batch 2: 3 workers need a sample each" in output
    with pytest.raises(UsageError, match="--batch 2: 3 workers need a sample each"):
        planned(tmp_path, cities([3], 20, 60), *words, "--all-hosts")


def test_who_is_slow_has_fewer_samples_and_all_have_one() -> None:
    network = replace(cities([3], 20, 60), compute=np.array([1.0, 0.5, 1e-9]))
    work = replace(WORK, batch=31)
    assert work.samples(network) == [20, 10, 1]
    even = replace(cities([2], 20, 60), compute=np.array([1.0, 0.5]))
    assert replace(WORK, batch=30).compute_s(even) == pytest.approx([2 / 1.5 * 0.1] * 2)
    with pytest.raises(UsageError, match="--batch 2: 3 workers"):
        replace(WORK, batch=2).samples(network)


def test_a_loss_grows_with_children_and_goes_on_after_sixteen() -> None:
    for way in WAYS[1:]:
        steps = [way.steps(count) for count in (1, 2, 3, 4, 8, 16, 32, 64)]
        assert steps == sorted(steps) and steps[0] == 1 < steps[-1]
    assert WAYS[3].steps(16) == pytest.approx(1.175**4.7)
    assert WAYS[3].steps(32) == pytest.approx(1.256**4.7)
    assert WAYS[0].steps(512) == 1


def test_single_linkage_cuts_where_rates_differ_most() -> None:
    network = cities([2, 1, 2], 20, 60)
    assert cuts(network, 9) == [((0, 1), (2,), (3, 4))]
    assert joined(5, merges(network)) == ((0, 1, 2, 3, 4),)


def together(network: Network) -> list[Groups]:
    """Of each level, the places of several hosts."""
    found = []
    for row in places(network):
        groups = [tuple(int(host) for host in np.flatnonzero(row == number)) for number in np.unique(row)]
        found.append(tuple(sorted(group for group in groups if len(group) > 1)))
    return found


def unnamed(network: Network, rates: dict[tuple[int, int], float] | None = None) -> Network:
    """The network, of which nobody has named places, with other rates (Mbit/s) between some hosts."""
    table = 8 * network.rates[0]
    for (a, b), value in (rates or {}).items():
        table[a, b] = table[b, a] = 1e6 * value
    np.fill_diagonal(table, 1.0)
    document = {"format": 1, "hosts": network.hosts, "delay_s": network.delay_s}
    return Network.parse(document | {"rates": [{"message_bytes": 1, "bits_per_second": table}]})


def test_places_are_branches_each_with_a_gap_of_its_own() -> None:
    """A fast city beside a slow one; racks in a city; a host of its own; rates that differ as measurements do."""
    uneven = Network.parse(json.loads((NETWORKS / "uneven-lans.json").read_text()))
    assert together(uneven) == [((0, 1), (2, 3, 4, 5))]
    racks = {(a, b): 10_000.0 if a // 2 == b // 2 else 1000.0 for a, b in combinations(range(4), 2)}
    nested = unnamed(cities([1] * 6, 20, 20), racks | {(4, 5): 1000.0})
    assert together(nested) == [((0, 1, 2, 3), (4, 5)), ((0, 1), (2, 3))]
    assert together(unnamed(cities([3], 20, 60), {(0, 1): 950, (0, 2): 912, (1, 2): 959})) == [()]
    assert together(unnamed(cities([2, 1, 2], 20, 60))) == [((0, 1), (3, 4))]


@pytest.mark.parametrize(
    ("mbits", "ms", "shared"), [(600, 0.1, True), (800, 0.1, False), (900, 20, True), (990, 20, False)]
)
def test_a_wire_that_is_nearly_as_fast_as_a_city_is_shared_too(mbits: float, ms: float, shared: bool) -> None:
    """1000 Mbit/s inside two cities. Where rates say little, delays tell."""
    network = unnamed(cities([2, 2], mbits, ms))
    assert together(network) == [((0, 1), (2, 3)) if shared else ()]


def test_network_json_names_places_and_wires() -> None:
    """Four hosts that are alike stand in two cities. Both workers of a city push over one wire, and that has its own rate."""
    document: dict[str, Any] = {
        "format": 1, "hosts": [*"abcd"], "delay_s": [[0.001] * 4] * 4,
        "rates": [{"message_bytes": 1, "bits_per_second": [[1e9] * 4] * 4}],
    }  # fmt: skip

    def took_s(**given: Any) -> float:
        prices = StepPrices(Network.parse(document | given), replace(WORK, parameters=1e8))
        groups: Groups = ((0,), (1,), (2,), (3,))
        return prices.above_s(WAYS[0], np.zeros(4), groups, np.array([0]))[0]

    named = {"places": {"oslo": ["a", "b"], "rome": ["c", "d"]}}
    port_s, one_s, serve_s = 3 * 3.2, 3.2, 4 * 1e8 * CODED["dense"].serve_s
    assert took_s() == pytest.approx(2 * port_s, rel=0.01) and serve_s < port_s
    both = ["oslo", "rome"]
    assert took_s(**named) == took_s(**named, wires=[{"places": both, "bits_per_second": 1e10}])
    slow = took_s(**named, wires=[{"places": both, "bits_per_second": 1e8}])
    assert slow == pytest.approx(2 * 2 * 10 * one_s, rel=0.01)
    assert together(Network.parse(document | {"places": {}})) == [()]
    nested = named | {"places": {**named["places"], "norway": ["a", "b", "c"], "hut": ["c"]}}
    with pytest.raises(
        UsageError, match="places of the network: rome and norway overlap in c; places are nested or apart"
    ):
        Network.parse(document | nested)
    for given, why in (
        ({"places": ["a"]}, "places of the network is no table of hosts"),
        ({"places": {"x": ["e"]}}, "places of the network: x has e, and no host has that name"),
        (named | {"wires": [{"places": both}]}, "wires of the network: write"),
        (named | {"wires": [{"places": ["oslo", "bonn"], "bits_per_second": 1}]}, "bonn is not one of its places"),
        (named | {"wires": [{"places": ["oslo", "oslo"], "bits_per_second": 1}]}, "oslo and oslo are not apart"),
    ):
        with pytest.raises(UsageError, match=why):
            Network.parse(document | given)
    network = Network.parse(document | named)
    assert network.of([1, 3, 2]).places == ((0,), (1, 2))
    kept = measured(document | named | {"wires": []})
    kept.add(measured(document | {"hosts": [*"efgh"]}))
    assert kept.document()["places"] == named["places"]


def test_a_plan_minds_the_wire_of_a_slower_city() -> None:
    """The widest gap lies inside the faster city. The wire between the cities was taken for one of each host, and the plan
    took three times as long."""
    network, work = (
        Network.parse(json.loads((NETWORKS / "uneven-lans.json").read_text())),
        TrainingWork(3e7, 0.15, CODED),
    )
    flat = Chooser(network, work).priced(tuple((h,) for h in range(6)), WAYS[4], BELOW[0], np.array([0]))
    size = CODED["topk:0.11+sign"].bytes * 3e7
    assert flat.step_s == pytest.approx(4 * size / (1e8 / 8), rel=0.01)
    assert choose(network, work).step_s < 0.5 * flat.step_s


# The command.


@pytest.mark.parametrize("way", [way for way in WAYS if way.outer], ids=str)
def test_rounds_with_equal_singular_values_are_in_plan_json_with_all_that_they_need(way: ModeAndSpec) -> None:
    """Shards of clusters begin where those of the root do: else the root refuses them. No cluster has such rounds inside."""
    network, groups = cities([2, 2], 20, 60), ((0, 1), (2, 3))
    assert all(not each.outer for each in BELOW)
    plan = Chooser(network, WORK).priced(groups, way, BELOW[0], np.arange(4))
    layout = parse(clustered(HostAddresses(network, {}), plan, WORK, 2, insecure=True, keys="").text())
    root, *clusters = (Settings(**layout.settings(server.place, 2)).validated() for server in layout.servers())
    assert (root.sync, root.cut, root.outer, root.outer_lr, root.local_steps) == (
        "local",
        "tensors",
        "iso",
        1.8,
        way.local_steps,
    )
    assert (root.compress, root.compress_down) == (way.compress, way.down)
    assert [(each.sync, each.cut, each.outer) for each in clusters] == [("bsp", "tensors", "")] * 2
    lines = [line for lines in long_commands(layout, "train.py").values() for line in lines]
    assert sum("--cut tensors" in line for line in lines) == 3 and sum("--outer iso" in line for line in lines) == 1
    for line in lines:
        if line.startswith("ps-serve"):
            serve.command.make_context("ps-serve", shlex.split(line)[1:])


@pytest.mark.parametrize("form", ["short", "long"])
def test_all_servers_of_a_plan_replan_as_it_says(tmp_path: Path, form: str) -> None:
    """Guests have no flags: the root says what the run is."""
    words = ("--replan", "change", "--replan-after", "60", "--insecure", "--commands", form, "--step", "3")
    output, plan = planned(tmp_path, cities([2, 2], 2, 60), *words)
    servers = [*plan["stages"], *plan["clusters"]]
    assert len(servers) == 3 and all(s["flags"]["replan"] == "change" for s in servers)
    layout = parse(json.dumps(plan))
    for server in layout.servers():
        settings = Settings(**layout.settings(server.place, len(server.children))).validated()
        assert (settings.replan, settings.replan_after) == ("change", 60.0)
    assert output.count("--replan change --replan-after 60.0") == 3 * (form == "long")
    _, plain = planned(tmp_path, cities([2, 2], 20, 60), "--insecure")
    assert not {"replan", "replan_after"} & {flag for stage in plain["stages"] for flag in stage["flags"]}


def test_hosts_whose_speed_nobody_knows_are_named(tmp_path: Path) -> None:
    network = cities([2, 1], 20, 60)
    assert "count as" not in planned(tmp_path, network, "--insecure")[0]
    document = json.loads((tmp_path / "network.json").read_text())
    for given, said in (
        (
            {"step_seconds": [0.1, None, 0.2], "compute": None},
            "count as fast as the fastest: a-1; ps-probe --script measures it",
        ),
        ({"compute": [1.0, None, None]}, "count as fast as the fastest: a-1, b-0; ps-probe"),
        ({"step_seconds": None, "compute": None}, "all count as equally fast"),
    ):
        output, _ = planned(tmp_path, network, "--insecure", "--step", "0.1", document=document | given)
        assert said in output


def test_a_network_of_places_is_planned(tmp_path: Path) -> None:
    """A file of several, in the shape of the data of 2206.01288."""
    link, wide = {"delay_ms": 11, "bandwidth_gbps": 1.12}, {"delay_ms": 1, "bandwidth_gbps": 5.0}
    table = {"delay_ms": [[5, 67], [67, 5]], "bandwidth_gbps": [[2, 0.79], [0.79, 2]]}
    document: dict[str, Any] = {
        "source": "made up",
        "pairwise_wan_table": {"Ohio-Oslo": link},
        "cities_2": {"order": ["Ohio", "Oslo"], **table},
        "model_defaults": {"layers": 24},
        "scenarios": {
            "ranges": {"nodes": 5, "groups": {"Ohio": "0-1", "Oslo": "2-4"}, "intra_group": wide, "inter_group": link},
            "even": {"nodes": 5, "groups": "as even as can be", "order": ["Ohio", "Oslo"], **table},
            "alike": {"groups": "2 x 2 and 1", "intra_group": wide, "inter_group": link},
            "plain": link,
        },
    }
    for words, hosts in (
        (("--places", "cities_2", "--machines", "3"), "Ohio-0 Ohio-1 Oslo-0"),
        (("--places", "cities_2", "--machines", "1,2"), "Ohio-0 Oslo-0 Oslo-1"),
        (("--places", "ranges"), "Ohio-0 Ohio-1 Oslo-0 Oslo-1 Oslo-2"),
        (("--places", "even"), "Ohio-0 Ohio-1 Ohio-2 Oslo-0 Oslo-1"),
        (("--places", "alike", "--machines", "2x2,1"), "place0-0 place0-1 place1-0 place1-1 place2-0"),
        (("--places", "plain", "--machines", "3x1"), "place0-0 place1-0 place2-0"),
    ):
        output, plan = planned(tmp_path, cities([2], 20, 60), "--step", "1", "--insecure", *words, document=document)
        assert " ".join(plan["hosts"]) == hosts and "all count as equally fast" in output
    network = placed(document, "ranges")
    assert network.delay_s[0].tolist()[1:] == [0.001, 0.011, 0.011, 0.011]
    assert (8e-9 * network.rates[0, 2, 0], 8e-9 * network.rates[0, 2, 3]) == (1.12, 5.0)
    assert placed(document["cities_2"], "", "2").hosts == ("Ohio-0", "Oslo-0")
    for given, why in (
        (
            ("",),
            "it has several networks: name one by --places; there are cities_2, ranges, even, alike, Ohio-Oslo, plain",
        ),
        (("x",), "--places x: it has no such network; there are cities_2"),
        (("cities_2",), "--machines is missing: give how many in all, or in each place, as in 8x4,32x1"),
        (("cities_2", "3x"), "--machines 3x: give how many"),
        (("cities_2", "1,1,1"), "2 places and 3 counts"),
        (("cities_2", "5000"), "--machines 5000: at most 4096"),
        (("alike", "5"), "it does not say how many places there are"),
    ):
        with pytest.raises(UsageError, match=why):
            placed(document, *given)
    with pytest.raises(UsageError, match="it describes no network"):
        placed({"format": 1})
    with pytest.raises(UsageError, match="its network lacks a field or has a wrong one: 'bandwidth_gbps'"):
        placed({"order": ["a"], "machines": 2, "inter_group": {}, "delay_ms": [[1]]})
    with pytest.raises(
        UsageError, match="--places and --machines are for a file that describes places; this one has hosts"
    ):
        planned(tmp_path, cities([2], 20, 60), "--insecure", "--machines", "2")


@pytest.mark.parametrize(("text", "why"), [
    ("[" * 100_000, "its brackets are nested too deeply"),
    ('{"a": ' * 5000 + "1" + "}" * 5000, "its brackets are nested too deeply"),
    ('{"format": 1, "hosts": ["a", "b"], "delay_s": [[0, NaN], [1, 0]]}', "NaN is no number of JSON"),
])  # fmt: skip
def test_a_file_that_is_no_network_is_named(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "network.json").write_text(text)
    words = [str(tmp_path / "network.json"), "--parameters", "1e6", "--step", "1", "--out", str(tmp_path / "plan.json")]
    with pytest.raises(UsageError, match=f"network.json: it is no network .*{why}"):
        CliRunner().invoke(ps_plan, words, catch_exceptions=False, standalone_mode=False)


def test_no_two_plans_that_are_named_read_alike(tmp_path: Path) -> None:
    document = json.loads((NETWORKS / "star-of-3.json").read_text())
    output, _ = planned(tmp_path, cities([3], 20, 60), "--step", "0.2", "--insecure", document=document)
    lines = [line.partition(", predicted")[0] for line in output.splitlines() if line.startswith("next: ")]
    assert len(lines) == 2 == len({*lines})


def test_one_cluster_is_not_said_to_be_several(tmp_path: Path) -> None:
    output, _ = planned(tmp_path, cities([2, 1], 20, 60), "--script", "train.py", "--insecure")
    assert " over 1 cluster with " in output and "1 clusters" not in output, output


@pytest.mark.parametrize("access", [["--insecure"], []])
def test_printed_commands_are_ones_that_can_be_pasted(tmp_path: Path, access: list[str]) -> None:
    network = cities([2, 2, 1], 2, 60)
    output, plan = planned(
        tmp_path, network, "--batch", "32", "--script", "train.py --rows {samples}", "--shards", "2", "--commands", "long",
        "--step", "3", *access,
    )  # fmt: skip
    servers = [words for words in told(output) if words[0] == "ps-serve" and "keys" not in words]
    workers = [words for words in told(output) if words[0] == "ps-worker"]
    assert len(servers) == 3 and len(workers) == 5
    for words in servers:
        given = serve.command.make_context("ps-serve", words[1:]).params
        names = {name: value for name, value in given.items() if name in Settings.__slots__ and value is not None}
        assert Settings(**names).validated().shards == 2
    for words in workers:
        worker.command.make_context("ps-worker", words[1:])
    listening = {
        f"tcp://{host}:{port}" for host, port in ((s["host"], s["port"]) for s in plan["stages"] + plan["clusters"])
    }
    assert {words[words.index("--server") + 1] for words in workers} <= listening
    assert len(listening) == 3
    assert [words[-1] for words in workers] == [str(count) for count in plan["samples"]] and sum(plan["samples"]) == 32
    made = {f"{words[5]}/{words[3]}.key" for words in told(output) if words[1:3] == ["keys", "add"]}
    needed = {
        words[words.index(flag) + 1] for words in told(output) for flag in ("--key", "--parent-key") if flag in words
    }
    assert needed == made and bool(made) == (not access)
    assert "decides" in output and "DDP" in output and re.search(r"predicted [\d.e+]+ ms a step, and", output)


def test_a_plan_without_clusters_has_the_fields_of_a_pipeline_alone(tmp_path: Path) -> None:
    _, plan = planned(tmp_path, cities([2], 20, 60), "--insecure")
    assert plan.keys() == {"version", "hosts", "stages", "processes", "lease", "checkpoint_clocks", "insecure"}


def test_a_plan_that_is_there_is_kept(tmp_path: Path) -> None:
    """It may be edited by hand, or the one of a run that is under way."""
    (tmp_path / "plan.json").write_text("by hand")
    output, first = planned(tmp_path, cities([2, 2], 100, 10))
    assert (tmp_path / "plan.json.1").read_text() == "by hand"
    assert f"kept as {tmp_path}/plan.json.1\n" in output
    output, second = planned(tmp_path, cities([2, 2], 100, 10))
    assert first == second and "kept as" not in output and not (tmp_path / "plan.json.2").exists()


def test_short_commands_are_two_for_each_host_and_make_the_keys_of_the_long_ones(tmp_path: Path) -> None:
    words = ("--batch", "32", "--script", "train.py --rows {samples}")
    short, long = (
        told(planned(tmp_path, cities([2, 1], 20, 60), *words, "--commands", form)[0]) for form in ("short", "long")
    )
    plan = parse((tmp_path / "plan.json").read_text())
    assert [line for line in short if "keys" in line] == [line for line in long if "keys" in line] != []
    rest = [line for line in short if "keys" not in line]
    assert rest and all(line[1:3] == ["--plan", str(tmp_path / "plan.json")] for line in rest)
    served = {server.place.host for server in plan.servers()}
    assert sorted((line[0], line[4]) for line in rest) == sorted(
        [("ps-serve", name) for name in served] + [("ps-worker", name) for name in plan.hosts]
    )
    assert all(line[5:] == ["train.py", "--rows", "{samples}"] for line in rest if line[0] == "ps-worker")


@pytest.mark.parametrize(("words", "why"), [
    (["--batch", "8"], "--batch: give it together with {samples}"),
    (["--address", "x=1"], "--address x=1: give HOST=ADDR"),
    (["--address", "a-0=1.1.1.1", "--address", "a-0=1.1.1.2"], "--address a-0=1.1.1.2: it has 1.1.1.1 already"),
    (["--address", "a-0=1.1.1.1:5"], "--address a-0=1.1.1.1:5: give a host name or an IP address alone"),
    (["--address", "a-0=x y"], "--address a-0=x y: give a host name or an IP address alone"),
    (["--pipeline", "2", "--micro-batches", "1000000"], "1000000 is not in the range"),
    (["--parameters", "nan"], "nan is no number"),
    (["--step", "inf"], "inf is not in the range"),
    (["--micro-batches", "4"], "--micro-batches: a plan without --pipeline has no use for it"),
    (["--seed", "1"], "--seed: a plan without --pipeline has no use for it"),
    (["--script", "a 'b"], "--script a 'b: close each quote"),
    (["--script", "a 'b", "--commands", "long"], "--script a 'b: close each quote"),
    (["--out", "/nowhere/plan.json"], "--out /nowhere/plan.json: No such file"),
])  # fmt: skip
def test_a_plan_that_cannot_be_made_is_refused_in_a_sentence(tmp_path: Path, words: list[str], why: str) -> None:
    with pytest.raises((UsageError, BadParameter), match=why.replace("{", r"\{")):
        planned(tmp_path, cities([2], 20, 60), *words)
    assert not (tmp_path / "plan.json").exists()
