"""ps-plan --pipeline: its virtual time against closed forms, the codings that it chooses, memory, money, and what it prints."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.planned_networks import cities, drawn, planned

from narrows.compression.value_codings import EDGE_CODINGS
from narrows.protocols.config import deployment
from narrows.protocols.config.deployment import StageEdge, parse
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.network.key_files import add, make
from narrows.ps.command.planning.staged import candidates, decides
from narrows.ps.planner.codec_costs import coded
from narrows.ps.planner.modes_and_specs import WAYS, ModeAndSpec
from narrows.ps.planner.network import Network
from narrows.ps.planner.pipelines.cost import Layout
from narrows.ps.planner.pipelines.simulation import SimulatedPipeline, StagePart, Stream
from narrows.ps.planner.pipelines.staged_planner import LOSS_COST, StagedPlanner
from narrows.ps.planner.pipelines.stages import (
    BACKWARD,
    FORWARD,
    PipelineModel,
    carried,
    contiguous,
    covered,
    edges_money,
    exchanges_money,
    order,
    soonest_alone,
)
from narrows.ps.planner.step_prices import StepPrices, TrainingWork
from narrows.ps.planner.timeline import Timeline, Wire

CARRIED, CODED = carried(), coded()
PIPELINE = ["--pipeline", "2", "--layers", "6", "--activation-bytes", "1e6", "--insecure"]


def model(**given: Any) -> PipelineModel:
    sizes: dict[str, Any] = {"parameters": 1e6, "layers": 8, "step_s": 1.6, "micro_batches": 16, "cut_bytes": 1e5}
    return PipelineModel(**(sizes | {"layer_memory_bytes": 0.0, "carried": CARRIED, "coded": CODED} | given))


def even(network: Network, stages: int, replicas: int, what: PipelineModel) -> Layout:
    return contiguous(network, what.job(stages, replicas, "dense"))


def stager(network: Network, stages: int, replicas: int, what: PipelineModel, coding: str = "auto") -> StagedPlanner:
    return StagedPlanner(network, what, what.job(stages, replicas, coding), coding)


def run(network: Network, layout: Layout, what: PipelineModel, edges: list[StageEdge]) -> SimulatedPipeline:
    return SimulatedPipeline(
        StepPrices(network, TrainingWork(what.parameters, what.step_s, CODED)), layout, what, edges
    )


# Virtual time.


def test_stages_without_links_take_what_1f1b_takes() -> None:
    """M + S - 1 micro-batches of the time of one: each of S stages has a quarter of the layers."""
    network, what = cities([4], 1000, 0), model(cut_bytes=0.0)
    network = replace(network, delay_s=np.zeros((4, 4)))
    found = run(network, even(network, 4, 1, what), what, [StageEdge()] * 3)
    assert (alone_s := found.alone()) == pytest.approx((16 + 3) * 0.025)
    assert sum(found.critical().values()) == pytest.approx(alone_s)


@pytest.mark.parametrize("coding", ["dense", "int8"])
def test_a_covered_link_adds_its_round_trip_once_and_an_uncovered_one_more(coding: str) -> None:
    """Two stages: (M + 1) micro-batches, and what the first activation and the last gradient take."""
    network, what = cities([1, 1], 100, 20), model()
    layout = even(network, 2, 1, what)
    edges = covered(network, layout, what, [StageEdge(coding, coding)])
    tensor_s = 1e5 * CARRIED[coding][0].bytes / 12.5e6
    trip_s = 2 * (0.02 + tensor_s)
    assert edges[0].in_flight == np.ceil(trip_s / 0.05) == 1 + (coding == "dense") * (trip_s > 0.05)
    found = run(network, layout, what, edges)
    coding_s = 17 * 1e5 * sum(each.encode_s + each.decode_s for each in CARRIED[coding])
    assert (alone_s := found.alone()) == pytest.approx(17 * 0.05 + trip_s + coding_s, rel=2e-3)
    critical = found.critical()
    assert sum(critical.values()) == pytest.approx(alone_s)
    assert critical[StagePart(-1, 0, 1)] == pytest.approx(trip_s, rel=0.01)
    slow = run(network, layout, what, [replace(edges[0], in_flight=0)])
    assert slow.alone() > 1.2 * alone_s


def test_a_link_that_is_full_decides() -> None:
    """Sixteen tensors pass it one after the other: 1e6 bytes take 0.8 s at 10 Mbit/s."""
    network, what = cities([1, 1], 10, 1), model(cut_bytes=1e6)
    layout = even(network, 2, 1, what)
    found = run(network, layout, what, covered(network, layout, what, [StageEdge()]))
    assert (alone_s := found.alone()) == pytest.approx(17 * 0.8, rel=0.02)
    part, taken_s = max(found.critical().items(), key=lambda item: item[1])
    assert part == StagePart(-1, 0, 1) and taken_s > 0.9 * alone_s


def test_replicas_share_the_wire_between_two_places() -> None:
    network, what = cities([2, 2], 10, 1), model(cut_bytes=1e6)
    layout = even(network, 2, 2, what)
    found = run(network, layout, what, covered(network, layout, what, [StageEdge()]))
    assert found.alone() == pytest.approx(2 * 17 * 0.8, rel=0.05)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_wire_between_cities_carries_tensors_and_the_updates_of_all_stages(way: ModeAndSpec) -> None:
    """Three stages in both cities exchange over one wire, and their tensors stay inside. The other layout sends both across."""
    network, what = cities([3, 3], 20, 10), model(layers=6, micro_batches=4, parameters=1e8)
    inside, across = (
        Layout(np.array(grid), np.array([2, 2, 2])) for grid in ([[0, 3], [1, 4], [2, 5]], [[0, 3], [4, 1], [2, 5]])
    )
    size = max(CODED[spec].bytes for spec in (way.compress, way.down))
    update_s = size * 1e8 / 2.5e6 / way.mode.local_steps  # of all stages, one way
    for layout, tensors_s in ((inside, 0.0), (across, 4 * 2 * 2 * 1e5 / 2.5e6)):
        planner, edges = stager(network, 3, 2, what), [StageEdge(in_flight=1)] * 2
        servers = tuple(min(hosts) for hosts in layout.grid.tolist())
        busy_s = planner.prices.busiest(planner.flows(layout, edges, servers, (way,) * 3)).seconds
        assert busy_s == pytest.approx(update_s + tensors_s, rel=0.01)


def test_a_step_is_no_shorter_than_the_busiest_wire_takes() -> None:
    network, what = cities([3, 3], 20, 60), model(layers=12, cut_bytes=4e6, step_s=1.0, parameters=1e8)
    layout = Layout(np.array([[0, 3], [1, 4], [2, 5]]), np.array([4, 4, 4]))
    found = stager(network, 3, 2, what).stand(layout)
    assert found.alone_s < max(found.stages_s) < found.busiest.seconds == found.step_s
    assert re.match(
        r"the wire from (a-\d to b-\d|b-\d to a-\d), which stages share, decides with ", decides(network, found)
    )


def test_one_replica_exchanges_with_the_server_beside_it_alone() -> None:
    network, what = cities([1, 1], 100, 20), model()
    layout = even(network, 2, 1, what)
    found = stager(network, 2, 1, what, "int8").stand(layout)
    assert found.step_s == found.alone_s and found.steps == 1.0


def test_who_waits_for_a_slow_wire_does_not_hold_up_a_fast_one_that_others_share() -> None:
    """Ten messages a second pass the shared wire, and one of them each second is of who has a slow wire before it."""
    time, shared, slow = Timeline(), Wire(0, 10_000), Wire(0, 1_000)
    passed: list[str] = []
    near, far = Stream(time, [shared], 1000), Stream(time, [slow, shared], 1000)
    for _ in range(20):
        near.send(partial(passed.append, "near"))
        far.send(partial(passed.append, "far"))
    while time.now_ns < NS and time.step():
        pass
    assert passed.count("far") == 1 and passed.count("near") >= 8
    assert shared.passed == pytest.approx(10_000, abs=shared.bytes_per_second // 8)


def test_a_stage_makes_its_passes_in_order() -> None:
    assert order(1, 3, [0]) == [FORWARD, BACKWARD, FORWARD, BACKWARD, FORWARD, BACKWARD]
    assert order(0, 3, [0]) == [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD, BACKWARD]
    assert order(0, 3, [9]) == [FORWARD] * 3 + [BACKWARD] * 3


# Codings.


def test_codings_are_those_that_a_plan_may_name() -> None:
    assert deployment.CODINGS == tuple(EDGE_CODINGS) == tuple(CARRIED)
    assert [CARRIED[name][BACKWARD].bytes for name in deployment.CODINGS] == [1, 0.5, 258 / 1024]


def test_a_coding_enters_the_price_and_what_is_in_flight() -> None:
    network, what = cities([1, 1], 20, 1), model(cut_bytes=1e6, micro_batches=32, step_s=3.2)
    layout = even(network, 2, 1, what)
    dense, int8 = (what.job(2, 1, coding).activation_bytes for coding in ("dense", "int8"))
    assert (dense, int8) == (32e6, 32e6 * 258 / 1024) and what.job(2, 1, "auto").activation_bytes == int8
    flying = [
        covered(network, layout, what, [StageEdge(*pair)])[0].in_flight for pair in (("dense",) * 2, ("int8", "dense"))
    ]
    assert flying == [np.ceil(0.802 / 0.05), np.ceil((0.402 + 0.1 + 0.0008) / 0.05)]


@pytest.mark.parametrize(("mbits", "back_mbits", "expected"), [
    (1000, 1000, ("dense", "dense")), (10, 10, ("int8", "int8")), (10, 1000, ("int8", "dense")),
    (1000, 10, ("dense", "int8")),
])  # fmt: skip
def test_auto_codes_each_way_of_an_edge_that_is_slow(
    mbits: float, back_mbits: float, expected: tuple[str, str]
) -> None:
    network, what = cities([2, 1], mbits, 1), model(layers=3)
    network.rates[:, 2, :2] = back_mbits * 1e6 / 8
    inside, across = stager(network, 3, 1, what).edges(even(network, 3, 1, what))
    assert (inside.forward, inside.backward) == ("dense", "dense")
    assert (across.forward, across.backward) == expected


def test_auto_codes_no_more_than_the_cost_of_int8_allows() -> None:
    """As many ways are dense as cost at most LOSS_COST, the fastest first: one more costs more."""
    random = np.random.default_rng(3)
    for seed in range(4):
        network, what = cities([1] * 5, 100, 5), model(layers=5)
        network.rates[:] *= random.uniform(0.2, 5, network.rates.shape)
        layout, told = even(network, 5, 1, what), stager(network, 5, 1, what)
        ways = told.fastest(layout)
        costs = [told.cost(layout, told.exact(layout, ways[:count])) for count in range(len(ways) + 1)]
        dense = [edge.forward for edge in told.edges(layout)] + [edge.backward for edge in told.edges(layout)]
        count = dense.count("dense")
        assert 0 < count < len(ways), seed
        assert costs[count] <= LOSS_COST * costs[0] < costs[count + 1]


def test_bytes_that_cost_money_are_coded() -> None:
    network, free = cities([1, 1], 1000, 1), model()
    network.price[:] = 1e-9
    priced = replace(free, money_s=1e3)
    assert [stager(network, 2, 1, each).edges(even(network, 2, 1, free))[0].forward for each in (free, priced)] == [
        "dense", "int8"
    ]  # fmt: skip


def test_money_is_bytes_by_price() -> None:
    network, what = cities([2, 2], 100, 5), model()
    network.price[:] = np.random.default_rng(0).uniform(0, 1e-9, (4, 4))
    layout, edges = even(network, 2, 2, what), [StageEdge("int8", "dense", 1)]
    expected = 0.0
    for a, b in zip(*layout.grid, strict=True):
        expected += 16 * 1e5 * (network.price[a, b] * 258 / 1024 + network.price[b, a])
    assert edges_money(network, layout, what, edges) == [pytest.approx(expected)]
    np.fill_diagonal(network.price, 0.0)
    local = next(way for way in WAYS if way.sync == "local")
    found = exchanges_money(network, layout, what, (0, 2), (WAYS[0], local))
    assert found[0] == pytest.approx(4 * 5e5 * (network.price[0, 1] + network.price[1, 0]))
    assert found[1] == pytest.approx(4 * 5e5 * (network.price[2, 3] + network.price[3, 2]) / 50)


def test_the_fastest_host_with_enough_memory_is_the_one_alone() -> None:
    network = replace(cities([3], 100, 5), compute=np.array([1.0, 4.0, 2.0]), memory_bytes=np.array([9e9, 1e9, 9e9]))
    assert soonest_alone(network, model(layer_memory_bytes=1e9), 3) == (2, 3 * 1.6 / 2)
    assert soonest_alone(network, model(layer_memory_bytes=1e8), 3) == (1, 3 * 1.6 / 4)
    assert soonest_alone(network, model(layer_memory_bytes=2e9), 3) is None


# The command.


@pytest.mark.parametrize("keyed", [False, True])
def test_a_pipeline_is_laid_out_with_a_server_for_each_stage(tmp_path: Path, keyed: bool) -> None:
    network, keys = cities([2, 2], 20, 60), str(tmp_path / "KEYS")
    words = [*PIPELINE[:-1], "--coding", "int8"]
    if keyed:
        with pytest.raises(UsageError, match=r"--keys .*: it has no key of a.*or go without keys by --insecure"):
            planned(tmp_path, network, *words, "--keys", keys)
        make(keys)
        for name in network.hosts:
            add(keys, name, "worker")
    output, plan = planned(tmp_path, network, *words, *(["--keys", keys] if keyed else ["--insecure"]))
    layout = parse(json.dumps(plan))
    assert len({process.key for process in layout.processes}) == (4 if keyed else 1)
    assert layout.keys == (keys if keyed else "")
    assert [(row["stage"], row["replica"]) for row in plan["processes"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    (edge,) = plan["edges"]
    assert (edge["forward"], edge["backward"]) == ("int8", "int8")
    assert [stage["layers"] for stage in plan["stages"]] == [3, 3]
    assert f"int8, back int8, {edge['in_flight']} in flight" in output
    for stage in plan["stages"]:
        Settings(**stage["flags"]).validated()
    assert output.count("ps-worker --plan") == 4 and output.count("ps-serve --plan") == 2


def test_a_plan_is_explained_beside_one_machine_and_hosts_in_their_order(tmp_path: Path) -> None:
    output, _ = planned(tmp_path, cities([2, 2], 20, 60), *PIPELINE)
    found, plain = (
        float(re.search(rf"{label}: predicted ([\d.]+) (?:ms|s)", output)[1])  # type: ignore[index]
        * (1 if re.search(rf"{label}: predicted [\d.]+ s", output) else 1e-3)
        for label in ("what the search has found", "next: hosts in the order of the network and layers even")
    )
    assert 5 * found < plain, output  # whose activations cross the slow link
    assert re.search(r"(computing of stage|the link|the exchange of stage) .* decides with", output), output
    assert "one machine alone, a-0: 200 ms a step" in output and "money" not in output, output


def test_all_of_a_plan_follows_from_its_arguments(tmp_path: Path) -> None:
    one, two = (planned(tmp_path, cities([3, 3], 50, 30), *PIPELINE, "--seed", "3") for _ in range(2))
    assert one == two


def test_the_cheapest_in_virtual_time_is_the_plan() -> None:
    """The search takes computing and links for one after the other: moves of hosts, or hosts in their order, may be better."""
    best = []
    for seed in range(5):
        network, what = drawn(seed, 4), model(layers=6, cut_bytes=4e6, step_s=2.0, micro_batches=8)
        job = what.job(4, 1, "auto")
        tried = candidates(network, what, job, "auto", 0)
        told = stager(network, 4, 1, what)
        prices = [told.price(plan) for _, plan in tried]
        assert prices == sorted(prices) and any("the search" in names for names, _ in tried)
        best.append(tried[0][0])
        depths = [int(depth) for depth in tried[0][1].layout.depths]
        assert sum(depths) == 6 and min(depths) > 0
        assert told.descended(tried[0][1]) is tried[0][1], seed
    assert len(set(best)) > 1, best


def test_memory_limits_the_layers_of_a_host(tmp_path: Path) -> None:
    """7.5 models of float32, of a worker under bsp and its server, are 10 MB a layer: 2e6 parameters in 6 layers."""
    small: dict[str, Any] = {"memory_bytes": [18e6, 90e6]}
    output, plan = planned(tmp_path, cities([1, 1], 20, 60), *PIPELINE, **small)
    assert {stage["layers"] for stage in plan["stages"]} == {1, 5}
    assert "one machine alone, b-0" in output
    assert (
        "memory: a-0 needs 0.01 GB for its arrays: 0.0044 GB for a worker under bsp, dense and 0.0056 GB for" in output
    )
    assert "hosts in the order of the network and layers even: a host has no memory for its stage" in output
    _, plan = planned(tmp_path, cities([1, 1], 20, 60), *PIPELINE, "--layer-memory", "1e6", **small)
    assert {stage["layers"] for stage in plan["stages"]} == {3}
    (tmp_path / "plan.json").unlink()
    with pytest.raises(UsageError, match="6 of 6 layers have no host with memory for them"):
        planned(tmp_path, cities([1, 1], 20, 60), *PIPELINE, "--parameters", "1e9", memory_bytes=[1e6] * 2)
    assert not (tmp_path / "plan.json").exists()


def test_money_has_a_column_and_weighs_what_is_asked_for(tmp_path: Path) -> None:
    """Between the cities a byte costs: the plan of least seconds exchanges there, the one of least money does not."""
    network = cities([2, 2], 1000, 1)
    city = np.array([0, 0, 1, 1])
    price = np.where(city[:, None] == city, 0.0, 1e-6).tolist()
    spent = []
    for words in ((), ("--money", "1e6")):
        output, _ = planned(
            tmp_path, network, *PIPELINE, "--activation-bytes", "1e3", *words, "--coding", "dense", price_per_byte=price
        )
        assert re.search(r"^stage .* money a step$", output, re.M), output
        told = [float(each) for each in re.findall(r"^\d  .*  (\S+)$", output, re.M)]
        total = re.search(r"predicted [\d.]+ m?s a step, ([\d.e-]+) of money", output)
        spent.append(float(total[1]) if total else 0.0)
        assert len(told) == 2 and sum(told) == pytest.approx(spent[-1], rel=0.01, abs=1e-12)
    assert spent[1] <= spent[0] and spent[1] < 0.05


@pytest.mark.parametrize(("words", "why"), [
    (["--batch", "8"], "--batch: a plan of a pipeline has no use for it"),
    (["--shards", "2"], "--shards: a plan of a pipeline has no use for it"),
    (["--commands", "long"], "--commands long: the stages"),
    (["--money", "3"], "--money: the network has no price_per_byte"),
    (["--micro-batches", "1"], "2 stages need as many micro-batches, and there are 1"),
    (["--script", "train.py {samples}"], "--script: replicas of a pipeline have even shares"),
    (["--script", "train.py 'x"], "--script train.py 'x: close each quote"),
    (["--layers", "1"], "1 layers are fewer than 2 stages"),
    (["--replicas", "9"], "2 stages of 9 replicas need 18 hosts"),
])  # fmt: skip
def test_a_pipeline_that_cannot_be_planned_is_refused_in_a_sentence(tmp_path: Path, words: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        planned(tmp_path, cities([2, 2], 20, 60), *PIPELINE, *words)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("flag", ["--layers", "--activation-bytes"])
def test_a_pipeline_needs_its_sizes(tmp_path: Path, flag: str) -> None:
    at = PIPELINE.index(flag)
    with pytest.raises(UsageError, match=f"--pipeline: give {flag}"):
        planned(tmp_path, cities([2], 20, 60), *PIPELINE[:at], *PIPELINE[at + 2 :])


def test_a_variable_of_the_environment_may_be_meant_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWS_SHARDS", "2")
    planned(tmp_path, cities([1, 1], 20, 60), *PIPELINE)


def test_in_flight_covers_the_round_trip_of_the_slowest_pair() -> None:
    """20 ms each way and 1e5 bytes at 20 Mbit/s each way are 120 ms: 3 micro-batches of 50 ms."""
    network, what = cities([2, 2], 20, 20), model()
    across, inside = np.array([[0, 1], [2, 3]]), np.array([[0, 2], [1, 3]])
    flying = [
        covered(network, Layout(grid, np.array([4, 4])), what, [StageEdge()])[0].in_flight for grid in (across, inside)
    ]
    assert flying == [3, 1]
    for micro_batches, most in ((16, 16), (1000, 256)):
        quick = replace(what, step_s=1e-9, micro_batches=micro_batches)
        assert covered(network, Layout(across, np.array([4, 4])), quick, [StageEdge()])[0].in_flight == most


def test_fewer_replicas_are_planned_where_these_make_more_samples_a_second(tmp_path: Path) -> None:
    """Of six hosts two are a hundred times as slow, so a replica of theirs would hold up the others."""
    words = ("--pipeline", "2", "--layers", "4", "--activation-bytes", "1e4", "--step", "1", "--insecure")
    slow: dict[str, Any] = {"compute": [1.0, 1.0, 1.0, 1.0, 0.01, 0.01]}
    output, document = planned(tmp_path, cities([6], 100, 5), *words, **slow)
    assert len(document["processes"]) == 4 and {each["host"] for each in document["processes"]} == {
        f"a-{i}" for i in range(4)
    }
    assert re.search(
        r"2 replicas make \d[\d.]* times as many samples a second as the 3 that there are hosts for", output
    ), output
    output, document = planned(tmp_path, cities([6], 100, 5), *words, "--replicas", "3", **slow)
    assert len(document["processes"]) == 6 and "times as many samples" not in output
    assert len(planned(tmp_path, cities([6], 100, 5), *words)[1]["processes"]) == 6
