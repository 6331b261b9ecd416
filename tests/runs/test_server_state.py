"""The state of the servers' optimizer, as a script without Narrows loads it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.groups import groups
from kit.in_process import store_of
from kit.on_disk import OnDisk
from kit.scripts import Each, Run, build, distance, flat, loss_of, run
from torch import nn

from narrows.protocols import messages as m
from narrows.protocols.config import key_ranges
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.wire import FRAME_VALUES, pack
from narrows.worker import DistributedOptimizer, saved_state
from narrows.worker.checkpoint import server_state
from narrows.worker.sync import gradients

pytestmark = pytest.mark.usefixtures("one_thread")

Optimizers = Sequence[torch.optim.Optimizer]
Make = Callable[[nn.Module], Optimizers]
STEPS = 6
BSP = Settings(sync="bsp", workers=2, shards=2)


def _two(net: nn.Module) -> Optimizers:
    first, *others = net.parameters()
    return [torch.optim.Adam(others, lr=0.003), torch.optim.Adam([{"params": [first], "lr": 0.01}], amsgrad=True)]


MAKES: dict[str, Make] = {
    "adamw": lambda net: [torch.optim.AdamW(net.parameters(), lr=0.01)],
    "momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)],
    "adagrad": lambda net: [torch.optim.Adagrad(net.parameters(), lr=0.02, initial_accumulator_value=0.1)],
    "two": _two,
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More asks than may be under way at a time."""
    monkeypatch.setattr(server_state, "parts", lambda begin, end: key_ranges.parts(begin, end, 11))


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def step(net: nn.Module, stepped: Any, number: int, worker: int = 0, of: int = 1) -> None:
    stepped.zero_grad()
    loss_of(net, number, worker, of).backward()
    stepped.step()


def next_step_alone(make: Make, weights: Any, state: Any) -> Any:
    """Return the weights after one step of a plain script that loads both."""
    net = build()
    nn.utils.vector_to_parameters(torch.from_numpy(weights.copy()), net.parameters())
    optimizers, loaded = make(net), through_a_file(state)
    for each, its in zip(optimizers, loaded.get("optimizers", [loaded]), strict=True):
        each.load_state_dict(its)
    step(net, Each(optimizers), STEPS)
    return flat(net)


@pytest.mark.parametrize("name", MAKES)
def test_a_plain_script_goes_on_as_the_run_does(name: str) -> None:
    def script(worker: int) -> Any:
        net = build()
        wrapped = DistributedOptimizer(MAKES[name](net), net)
        assert not wrapped.state_dict(servers=True).get("state"), "nothing is kept yet"
        for number in range(STEPS):
            step(net, wrapped, number, worker, 2)
        weights, state = flat(net), wrapped.state_dict(servers=True) if worker else None
        step(net, wrapped, STEPS, worker, 2)
        return weights, state, flat(net)

    with run(BSP) as started:
        (weights, _, after), (_, state, _) = started.together(script)
    assert state["narrows"] == {"clock": STEPS}
    assert distance(next_step_alone(MAKES[name], weights, state), after) < 1e-6
    assert distance(weights, after) > 1e-4


def test_processes_of_a_group_have_it_whole() -> None:
    def script(member: int, rank: int) -> Any:
        net = build()
        wrapped = DistributedOptimizer(MAKES["adamw"](net), net)
        for number in range(STEPS):
            step(net, wrapped, number, rank, 2)
        weights, state = flat(net), wrapped.state_dict(servers=True)
        step(net, wrapped, STEPS, rank, 2)
        return weights, state, flat(net)

    with groups(Settings(sync="bsp", shards=2), [2]) as here:
        found = here.together(script)
    for weights, state, after in found.values():
        assert distance(next_step_alone(MAKES["adamw"], weights, state), after) < 1e-6


@pytest.mark.parametrize("settings", [BSP, Settings(sync="async", push="gradient", shards=2)])
def test_it_is_in_the_checkpoints_too(settings: Settings, tmp_path: Path) -> None:
    def script(worker: int) -> Any:
        net = build()
        wrapped = DistributedOptimizer(MAKES["adamw"](net), net)
        for number in range(STEPS):
            step(net, wrapped, number, worker, settings.workers)
        state = wrapped.state_dict(servers=True)
        wrapped.finish()
        with pytest.raises(UsageError, match="after finish"):
            wrapped.state_dict(servers=True)
        return state

    cluster = OnDisk(settings.validated(), tmp_path)
    with run(settings, cluster) as started:
        state = started.together(script)[0]
        cluster.interrupt()
    net = build()
    assert repr(saved_state(tmp_path, MAKES["adamw"](net), net)) == repr(state)
    assert len(state["state"]) == len(list(net.parameters()))
    other = nn.Sequential(nn.Linear(9, 18))
    with pytest.raises(UsageError, match=r"the state of '0.weight' in .* is of no parameter of this model"):
        saved_state(tmp_path, MAKES["adamw"](other), other)
    (tmp_path / f"shard-1.clock-{state['narrows']['clock']}.safetensors").unlink()
    with pytest.raises(UsageError, match="has no state of an optimizer"):
        saved_state(tmp_path, MAKES["adamw"](net), net)


def test_where_updates_are_pushed_it_is_that_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWS_CHECKPOINT_DIR", str(tmp_path))
    net = build()
    with pytest.raises(UsageError, match="has no state of an optimizer"):
        saved_state(tmp_path, MAKES["two"](net), net)
    with run(Settings(sync="async")) as started:
        wrapped = DistributedOptimizer(MAKES["two"](net), net)
        step(net, wrapped, 0)
        state = wrapped.state_dict(servers=True)
        started.sessions[0].keep()
    saved = saved_state(tmp_path, MAKES["two"](net), net)
    assert saved.pop("narrows") == {"clock": 1} and repr(saved) == repr(state) and state["optimizers"][1]["state"]


def test_what_is_loaded_into_a_worker_is_not_used_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(gradients, "say_here", said.append)
    net = build()
    with run(Settings(sync="bsp")):
        wrapped = DistributedOptimizer(MAKES["adamw"](net), net)
        wrapped.load_state_dict(wrapped.state_dict(servers=True))
        assert not said
        step(net, wrapped, 0)
        wrapped.load_state_dict(wrapped.state_dict(servers=True))
    assert said == [gradients.UNUSED]


def test_where_a_clock_closes_meanwhile_all_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a quorum: the other worker's update closes the clock."""
    said: list[str] = []
    monkeypatch.setattr(server_state, "say", said.append)
    arrived, lies, asked = server_state.ServerOptimizerState.arrived, [1], [0]

    def later(self: Any, event: Any) -> None:
        arrived(self, event)
        asked[0] += 1
        if lies[0]:
            lies[0] -= 1
            self.clocks.add(event.clock + 1)

    net = build()
    with run(Settings(sync="bsp")):
        wrapped = DistributedOptimizer(MAKES["momentum"](net), net)
        step(net, wrapped, 0)
        monkeypatch.setattr(server_state.ServerOptimizerState, "arrived", later)
        assert wrapped.state_dict(servers=True)["narrows"] == {"clock": 1}
        twice, lies[0] = asked[0], 10**6
        assert not said and twice > 2 * server_state.AHEAD
        assert wrapped.state_dict(servers=True)["narrows"] == {"clock": 1}
        assert asked[0] - twice == server_state.TRIES * twice // 2
        assert said == ["the servers' optimizer went from clock 1 to 2 while its state was read"]


def bad_asks(low: int, high: int) -> Iterator[tuple[int, int]]:
    yield from ((low - 1, low + 1), (low, low), (high, high + 1), (low + 2, low + 1), (0, 1 << 50))


def test_a_shard_refuses_what_is_none_of_its_keys() -> None:
    def refused(started: Run, begin: int, end: int, text: str) -> None:
        shards: Any = optimizer_of.sync.shards
        server = started.cluster.servers[1]
        ask = m.MomentsRequest(shards.worker, shards.place, 1, begin, end, "exp_avg")
        peer = next(peer for peer, (_, shard) in started.cluster.links.items() if shard == 1)
        with pytest.raises(RemoteProtocolError, match=text):
            server.shard.handle(peer, ask, started.cluster.now())

    net = build()
    for settings in (Settings(sync="bsp", shards=2), Settings(sync="ssp", shards=2)):
        with run(settings) as started:
            wrapped = DistributedOptimizer(MAKES["adamw"](net), net)
            optimizer_of: Any = wrapped._engine
            step(net, wrapped, 0)
            low, high = store_of(started.cluster.servers[1]).whole
            if settings.sync == "ssp":
                refused(started, low, high, "workers push updates")
            else:
                for begin, end in bad_asks(low, high):
                    refused(started, begin, end, f"are not {FRAME_VALUES} of this shard")


@pytest.mark.parametrize(
    "rows", [3, [3], [[0, "step"]], [[2, "step", None]], [[-1, "step", None]], [[0, 1, 2.0]], [[0, "step", "x"]]]
)
def test_a_shard_that_says_nonsense_is_named(rows: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="did not say what its optimizer keeps"):
        server_state.unpack_rows(pack(rows), 2)
