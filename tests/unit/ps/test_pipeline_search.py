"""Layouts of pipelines: the cost against plain loops, the search against every layout, and the networks of 2206.01288."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
import pytest
from kit.planned_networks import drawn
from planning.paper_networks import GPT3_XL, NETWORKS, TARGETS, half_slow
from scipy.optimize import Bounds, LinearConstraint, milp

from narrows.protocols.errors import UsageError
from narrows.ps.planner.network import HOSTS_MAX, Array, Network, from_places
from narrows.ps.planner.pipelines.cost import Costs, Indices, Job, Layout
from narrows.ps.planner.pipelines.matching import EXACT_MAX, matched, shortest_path
from narrows.ps.planner.pipelines.search import EVERY_MAX, partitions, partitions_count, plan

CUTS = [(1, 4, 4), (2, 3, 6), (3, 2, 6), (4, 2, 8), (2, 4, 8), (8, 1, 8), (3, 2, 7)]  # stages, replicas, hosts


def job(stages: int, replicas: int, **given: Any) -> Job:
    sizes: dict[str, Any] = {
        "layers": 3 * stages,
        "layer_bytes": 3e6,
        "activation_bytes": 1e6,
        "layer_s": 0.1,
        "micro_batches": 4,
    }
    return Job(stages, replicas, **(sizes | {"layer_memory_bytes": 1e9, "money_s": 20.0} | given))


def sent_s(network: Network, a: int, b: int, message_bytes: float) -> float:
    """Seconds of one message, in plain words; the rate between two sizes is linear in the logarithm of the size."""
    rates, sizes = network.rates[:, a, b], network.sizes_bytes
    rate = rates[0]
    for k in range(1, len(sizes)):
        if message_bytes >= sizes[k]:
            rate = rates[k]
        elif message_bytes > sizes[k - 1]:
            part = np.log(message_bytes / sizes[k - 1]) / np.log(sizes[k] / sizes[k - 1])
            rate = (1 - part) * rates[k - 1] + part * rates[k]
    return float(network.delay_s[a, b] + message_bytes / rate)


def reference(network: Network, job: Job, grid: list[list[int]], depths: Indices) -> float:
    """The cost of a layout, with a loop for each sum: docs/planning.md, "The cost of a layout"."""
    exchange, money, stage_s = 0.0, 0.0, []
    for group, depth in zip(grid, depths, strict=True):
        sent = depth * job.layer_bytes / job.replicas
        for a in group:
            others = [b for b in group if b != a]
            exchange = max(exchange, sum(sent_s(network, a, b, sent) + sent_s(network, b, a, sent) for b in others))
            money += sum(2 * sent * network.price[a, b] for b in others)
        stage_s.append(max(depth * job.layer_s / network.compute[a] for a in group))
    pipeline = 0.0
    for left, right in pairwise(grid):
        size = job.activation_bytes
        pipeline += max(
            sent_s(network, a, b, size) + sent_s(network, b, a, size) for a, b in zip(left, right, strict=True)
        )
        money += sum((network.price[a, b] + network.price[b, a]) * size for a, b in zip(left, right, strict=True))
    slowest = max(stage_s)
    computing = slowest + (sum(stage_s) - slowest) / job.micro_batches
    return float(exchange + pipeline + computing + job.money_s * money)


def every_arrangement(groups: list[tuple[int, ...]]) -> Iterator[list[list[int]]]:
    for first, *rest in permutations(groups):
        grids = [[list(first)]]
        for group in rest:
            grids = [[*grid, list(row)] for grid in grids for row in permutations(group)]
        yield from grids


@pytest.mark.parametrize(("stages", "replicas", "hosts"), CUTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_price_is_the_reference(seed: int, stages: int, replicas: int, hosts: int) -> None:
    network, what = drawn(seed, hosts), job(stages, replicas)
    grid = np.random.default_rng(seed).permutation(hosts)[: stages * replicas].reshape(stages, replicas)
    costs = Costs(network, what)
    layout = Layout(grid, costs.depths(grid))
    found = costs.price(layout)
    assert not found.missing
    assert found.total == pytest.approx(reference(network, what, grid.tolist(), layout.depths), rel=1e-9)


@pytest.mark.parametrize("money_s", [0.0, 20.0, 500.0])
@pytest.mark.parametrize(("stages", "replicas"), [(2, 3), (3, 2), (4, 1), (2, 4)])
def test_order_and_matchings_are_the_cheapest(stages: int, replicas: int, money_s: float) -> None:
    for seed in range(4):
        network, what = drawn(seed, stages * replicas), job(stages, replicas, money_s=money_s)
        costs = Costs(network, what)
        groups = np.arange(stages * replicas).reshape(stages, replicas)
        found = costs.price(costs.arrange(groups)).total
        least = min(
            costs.price(Layout(np.array(grid), costs.depths(np.array(grid)))).total
            for grid in every_arrangement([tuple(group) for group in groups.tolist()])
        )
        assert found == pytest.approx(least, rel=1e-8)


def least_of_all(costs: Costs) -> float:
    """The cheapest of all layouts: each host on each place. No computing, and equal depths."""
    stages, replicas = costs.job.stages, costs.job.replicas
    every = np.array(list(permutations(range(len(costs.network.hosts)), stages * replicas))).reshape(
        -1, stages, replicas
    )
    groups, neighbours = (every[:, :, :, None], every[:, :, None, :]), (every[:, :-1], every[:, 1:])
    seconds = costs.exchange(costs.depth)[groups].sum(3).max((1, 2)) + costs.links[neighbours].max(2).sum(1)
    money = costs.layer_tolls[groups].sum((1, 2, 3)) / 2 * costs.depth + costs.tolls[neighbours].sum((1, 2))
    return float((seconds + costs.job.money_s * money).min())


@pytest.mark.parametrize(("stages", "replicas", "hosts"), CUTS)
@pytest.mark.parametrize("money_s", [0.0, 20.0])
def test_a_plan_of_up_to_8_hosts_is_the_cheapest_there_is(
    money_s: float, stages: int, replicas: int, hosts: int
) -> None:
    what = job(stages, replicas, money_s=money_s, layer_s=0.0, layer_memory_bytes=0.0)
    for seed in range(2):
        costs = Costs(drawn(seed, hosts), what)
        found = plan(costs.network, what, seed)
        assert found.prediction.total == pytest.approx(least_of_all(costs), rel=1e-8)


def test_the_search_finds_what_pricing_every_partition_finds() -> None:
    """Ten hosts, with all that a cost can have: 945 partitions."""
    costs = Costs(drawn(2, 10), job(5, 2))
    least = min(costs.price(costs.arrange(np.array(groups))).total for groups in partitions(range(10), 5, 2))
    found = plan(costs.network, costs.job, 0, evaluations=200)
    assert found.evaluations <= 200 < partitions_count(10, costs.job) == sum(1 for _ in partitions(range(10), 5, 2))
    assert found.prediction.total == pytest.approx(least, rel=1e-8)


@pytest.mark.parametrize("hosts", range(2, 9))
def test_every_partition_of_8_hosts_is_few_enough(hosts: int) -> None:
    for stages in range(1, hosts + 1):
        for replicas in range(1, hosts // stages + 1):
            what = job(stages, replicas)
            every = {frozenset(map(frozenset, groups)) for groups in partitions(range(hosts), stages, replicas)}
            assert len(every) == partitions_count(hosts, what) <= EVERY_MAX


def test_the_search_finds_what_an_integer_program_finds() -> None:
    """The paper's cost as a mixed integer linear program of whole layouts, without groups, matchings or paths.

    x[i, k, r] is 1 where host i is replica r of stage k. The other variables are each boundary's slowest pair and the slowest
    exchange; they are at least a pair's seconds where both its hosts have these places.
    """
    stages, replicas, hosts = 3, 2, 6
    costs = Costs(drawn(7, hosts), job(stages, replicas, layers=3, money_s=0.0, layer_s=0.0))
    exchange = costs.exchange(1)
    places = hosts * stages * replicas
    count = places + stages  # a variable for each place, then the boundaries', then the exchange

    def x(host: int, stage: int, replica: int) -> int:
        return (host * stages + stage) * replicas + replica

    rows, least, most = [], [], []

    def constrain(terms: dict[int, float], low: float, high: float) -> None:
        row = np.zeros(count)
        row[list(terms)] = list(terms.values())
        rows.append(row)
        least.append(low)
        most.append(high)

    for host in range(hosts):
        constrain({x(host, k, r): 1 for k in range(stages) for r in range(replicas)}, 1, 1)
    for k in range(stages):
        for r in range(replicas):
            constrain({x(host, k, r): 1 for host in range(hosts)}, 1, 1)
    for a, b in permutations(range(hosts), 2):
        for k in range(stages - 1):
            for r in range(replicas):
                seconds = costs.links[a, b]
                constrain({places + k: 1, x(a, k, r): -seconds, x(b, k + 1, r): -seconds}, -seconds, np.inf)
        for k in range(stages):
            seconds = exchange[a, b]
            constrain({count - 1: 1, x(a, k, 0): -seconds, x(b, k, 1): -seconds}, -seconds, np.inf)
    objective = np.zeros(count)
    objective[places:] = 1
    upper = np.ones(count)
    upper[places:] = np.inf
    whole = np.ones(count)
    whole[places:] = 0
    answer = milp(
        objective, integrality=whole, bounds=Bounds(0, upper), constraints=LinearConstraint(np.array(rows), least, most)
    )
    assert answer.success
    assert plan(costs.network, costs.job).prediction.total == pytest.approx(answer.fun, rel=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_seed_reaches_the_contiguous_layout_from_a_random_one(name: str) -> None:
    for seed in range(2 if name == "worldwide" else 1):
        found = plan(NETWORKS[name], GPT3_XL, seed, evaluations=60)
        assert found.evaluations <= 60
        assert found.prediction.total <= TARGETS[name]
        assert sorted(found.layout.grid.ravel()) == list(range(64))


def test_a_contiguous_layout_costs_what_was_computed_with_the_same_model_elsewhere() -> None:
    for name, total in zip(NETWORKS, (16.98, 49.50, 17.65, 39.24, 59.44), strict=True):
        costs = Costs(NETWORKS[name], GPT3_XL)
        assert round(costs.price(costs.arrange(np.arange(64).reshape(8, 8))).total, 2) == total


def test_a_seed_repeats_its_plan_and_seeds_differ() -> None:
    one, again, other = (plan(NETWORKS["worldwide"], GPT3_XL, seed, evaluations=8) for seed in (3, 3, 4))
    assert (one.layout.grid == again.layout.grid).all() and one.prediction == again.prediction
    assert (one.layout.grid != other.layout.grid).any()


def test_a_plan_does_not_depend_on_the_units() -> None:
    """All seconds a thousandth, and speeds 128 times as high: powers of two, so that every sum is the same."""
    network, small = drawn(1, 12), 2.0**-10
    what = job(4, 2, money_s=0.0)
    other = replace(
        network, delay_s=network.delay_s * small, rates=network.rates / small, compute=network.compute * 2.0**7
    )
    found = plan(network, what, evaluations=30)
    scaled = plan(other, replace(what, layer_s=what.layer_s * 2.0**7 * small), evaluations=30)
    assert found.evaluations == 30 < partitions_count(12, what)
    assert (found.layout.grid == scaled.layout.grid).all()
    assert scaled.prediction.seconds == found.prediction.seconds * small


def test_a_plan_that_minds_compute_is_faster_than_a_blind_one() -> None:
    """16 hosts in two cities, every second one 4 times slower."""
    places = {"order": ["a", "b"], "delay_ms": [[1, 11], [11, 1]], "bandwidth_gbps": [[5, 1.12], [1.12, 5]]}
    network = half_slow(from_places(places, [8, 8]))
    what = replace(GPT3_XL, stages=4, replicas=4, layer_s=1.25, micro_batches=16)
    blind = Costs(network, what).price(plan(network.alike(), what, evaluations=50).layout)
    found = plan(network, what, evaluations=50)
    assert blind.seconds >= 1.2 * found.prediction.seconds
    speeds = network.compute[found.layout.grid]
    assert (speeds.max(1) == speeds.min(1)).all()  # a stage has hosts of one speed
    assert found.layout.depths.sum() == 24 and found.layout.depths.max() > found.layout.depths.min()


def test_depths_make_the_slowest_stage_as_fast_as_it_can_be() -> None:
    for seed in range(20):
        costs = Costs(drawn(seed, 6), job(3, 2))
        groups = np.arange(6).reshape(3, 2)
        speed, room = costs.speed[groups].min(1), costs.room[groups].min(1)
        every = [np.array((a, b, 9 - a - b)) for a in range(1, 8) for b in range(1, 9 - a)]
        least = min((depths / speed).max() for depths in every if (depths <= room).all())
        found = costs.depths(groups)
        assert (found.sum(), (found / speed).max()) == (9, pytest.approx(least)) and (found <= room).all()


def test_memory_is_kept_to_and_too_little_is_said() -> None:
    small = drawn(0, 4, memory_bytes=[2e9, 8e9, 8e9, 2e9])
    found = plan(small, job(2, 2, layers=9))
    assert sorted(found.layout.depths) == [2, 7] and {0, 3} in [set(group) for group in found.layout.grid.tolist()]
    with pytest.raises(UsageError, match="1 of 9 layers have no host with memory for them"):
        plan(drawn(0, 4, memory_bytes=[4e9] * 4), job(2, 2, layers=9))


def test_money_is_saved_where_it_is_worth_more_than_time() -> None:
    network = drawn(2, 8)
    fast, cheap = (plan(network, job(2, 4, money_s=money_s)).prediction for money_s in (0.0, 1e4))
    assert cheap.money < fast.money and fast.seconds < cheap.seconds


def test_hosts_that_are_not_needed_are_spare_and_slow_ones_first() -> None:
    found = plan(drawn(0, 7, compute=[1, 1, 0.01, 1, 1, 1, 1]), job(3, 2))
    assert found.spare == (2,)
    with pytest.raises(UsageError, match="4 stages of 2 replicas need 8 hosts; the network has 7"):
        plan(drawn(0, 7), job(4, 2))


def test_matchings_and_paths_are_those_of_brute_force() -> None:
    random = np.random.default_rng(0)
    for size in (1, 2, 3, 5):
        for _ in range(20):
            links = random.integers(1, 6, (size, size)).astype(np.float64)  # many are equal
            tolls = (random.integers(0, 2) * random.integers(0, 4, (size, size))).astype(np.float64)
            cost, columns = matched(links, tolls)
            every = [
                (links[range(size), p].max() + tolls[range(size), p].sum())
                for p in map(list, permutations(range(size)))
            ]
            assert cost == min(every) == links[range(size), columns].max() + tolls[range(size), columns].sum()
            between = links + links.T
            order = shortest_path(between)
            assert sorted(order) == list(range(size))
            assert length(between, order) == min(length(between, list(p)) for p in permutations(range(size)))


def length(between: Array, order: list[int]) -> float:
    return float(sum(between[a, b] for a, b in pairwise(order)))


def test_a_long_path_cannot_be_shortened_by_a_reversal() -> None:
    random = np.random.default_rng(1)
    between = random.uniform(1, 9, (EXACT_MAX + 20, EXACT_MAX + 20))
    between += between.T
    order = shortest_path(between)
    assert sorted(order) == list(range(len(between)))
    for i, j in combinations(range(len(order) + 1), 2):
        assert length(between, order[:i] + order[i:j][::-1] + order[j:]) >= length(between, order) - 1e-7


def test_a_rate_depends_on_the_size_of_a_message() -> None:
    network = drawn(0, 3)
    for size in (1.0, 1e4, 3e5, 1e7, 1e9):
        expected = [[sent_s(network, a, b, size) if a != b else 0.0 for b in range(3)] for a in range(3)]
        assert np.allclose(network.transfer_s(size), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"format": 2}, "format 2; this version reads 1"),
        ({"hosts": ["a", "a", "b"]}, "3 hosts; 2 to 4096 with different names"),
        ({"hosts": [str(number) for number in range(HOSTS_MAX + 1)]}, "4097 hosts"),
        ({"delay_s": [[0, 1], [1, 0]]}, "delay_s of the network has shape"),
        ({"delay_s": [[0, 1, -1]] * 3}, r"delay_s\[0\]\[2\] of the network is -1; a number from 0 to 1e"),
        ({"delay_s": "far"}, "delay_s of the network"),
        ({"rates": []}, "1 to 16 different ones"),
        ({"rates": [{"message_bytes": 1}]}, "lacks a field"),
        (
            {"rates": [{"message_bytes": 1, "bits_per_second": [[0, 0, 1]] * 3}]},
            r"bits_per_second\[0\]\[1\] of the network is 0; a number from 1 to 1e",
        ),
        ({"compute": [1, 2, 0]}, r"compute\[2\] of the network is 0; a number from 1e-09"),
        ({"price_per_byte": [[0, 1, None]] * 3}, r"price_per_byte\[0\]\[2\] of the network is null"),
        ({"compute": [1, 2, "fast"]}, r'compute\[2\] of the network is "fast"; a number'),
        ({"compute": [1, 2, "3"]}, r'compute\[2\] of the network is "3"; a number'),
        ({"compute": [1, True, 2]}, r"compute\[1\] of the network is true; a number"),
        ({"compute": [1, float("nan"), 2]}, r"compute\[1\] of the network is NaN; a number"),
        ({"compute": [1, 1e-300, 2]}, r"compute\[1\] of the network is 1e-300; a number"),
        ({"delay_s": [[0, 1, 2], [1, 0, float("inf")], [1, 2, 0]]}, r"delay_s\[1\]\[2\] of the network is Infinity"),
        (
            {"rates": [{"message_bytes": 1, "bits_per_second": [[0, True, 1]] * 3}]},
            r"\[0\]\[1\] of the network is true",
        ),
        (
            {"rates": [{"message_bytes": 1e-300, "bits_per_second": [[8] * 3] * 3}]},
            "message_bytes of the network is 1e-300",
        ),
        ({"step_seconds": [1, 0, 2], "compute": None}, r"step_seconds\[1\] of the network is 0"),
        ({"hosts": "abc"}, "hosts of the network is no list of names"),
        ({"hosts": ["a", 1, "c"]}, "hosts of the network is no list of names"),
        ({"hosts": ["a", "b c", "d"]}, "hosts of the network: 'b c' is no name"),
    ],
)
def test_a_wrong_network_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        drawn(0, 3, **given)


def test_a_network_needs_no_more_than_hosts_delays_and_rates() -> None:
    bare = {"format": 1, "hosts": ["a", "b"], "delay_s": [[None, 1], [2, None]]}
    network = Network.parse(bare | {"rates": [{"message_bytes": 1, "bits_per_second": [[None, 8], [16, None]]}]})
    assert network.transfer_s(4).tolist() == [[0, 5], [4, 0]]
    assert network.compute.tolist() == [1, 1] and np.isinf(network.memory_bytes).all() and not network.price.any()


def test_a_link_without_a_rate_is_missing_and_a_pipeline_says_which_it_needs() -> None:
    delay, rate = [[0.1] * 3 for _ in range(3)], [[8e6] * 3 for _ in range(3)]
    rate[2][0], delay[1][2] = None, None  # type: ignore[call-overload]
    network = drawn(0, 3, delay_s=delay, rates=[{"message_bytes": size, "bits_per_second": rate} for size in (1, 1000)])
    assert network.missing == ["h0 to h2", "h1 to h2"]
    assert np.isinf(network.delay_s[[2, 1], [0, 2]]).all() and np.isinf(network.sent_s(8e6)[[2, 1], [0, 2]]).all()
    assert np.isfinite(network.sent_s(8e6)).sum() == 7
    with pytest.raises(UsageError, match="lacks the links h0 to h2, h1 to h2: a pipeline needs all of them"):
        plan(network, job(3, 1))


def test_a_speed_that_nobody_knows_is_the_fastest_hosts() -> None:
    for given, compute in (
        ({"compute": [0.5, None, 1.0]}, [0.5, 1.0, 1.0]),
        ({"compute": None, "step_seconds": [0.2, None, 0.1]}, [0.5, 1.0, 1.0]),
        ({"compute": None}, [1.0] * 3),
    ):
        assert drawn(0, 3, **given).compute.tolist() == compute


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"layers": 2}, "2 layers are fewer than 3 stages"),
        ({"micro_batches": 0}, "1 or more"),
        ({"layer_s": -1.0}, "finite and 0 or more"),
    ],
)
def test_a_wrong_job_is_named(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        job(3, 2, **given)
