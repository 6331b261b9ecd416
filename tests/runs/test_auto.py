"""`auto`: the choice for a link, when it changes, and that a run loses nothing when it does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.in_process import store_of
from kit.processes import SCRIPT, finished
from kit.scripts import flat, run

from narrows.compression import ErrorFeedback, SpecError, accumulate, ladder, losses, parse
from narrows.compression.auto import NEAR, PATIENCE, PATIENCE_MAX, WINDOW, Auto, Clock, Switch
from narrows.compression.ladder import LADDER
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.member.link_meter import WINDOW_NS, LinkMeter
from narrows.ps.store.changes import LoadArrays, Publish
from narrows.ps.store.store import Store
from narrows.worker import DistributedOptimizer
from narrows.worker.runtime.trace import StepTrace
from narrows.worker.session import RunSession
from narrows.worker.sync.tuning import CodecTuning

MBIT = 125e3  # bytes a second
SPARSEST = ladder("auto").specs[-1]


class Link:
    """The costs of a worker's clocks on a link of `rate` bytes a second, as `Auto` is told."""

    def __init__(
        self,
        rate: float,
        *,
        spec: str = "auto",
        down: str = "",
        compute_s: float = 0.125,
        round_trip_s: float = 0.06,
        window: int = 2,
        count: int = 1_320_000,
        noise: float = 0.0,
        seed: int = 0,
        workers: int = 1,
    ) -> None:
        steps = losses.steps_by_codes(window - 1, workers)
        self.auto = Auto(ladder(spec).rungs, ladder(down or spec).rungs, count, window, steps)
        self.rate, self.compute_s, self.round_trip_s, self.noise = rate, compute_s, round_trip_s, noise
        self.random = random.Random(seed)
        self.clock = 0
        self.switches: list[tuple[int, Switch]] = []

    def noisy(self, value: float) -> float:
        return value * (1 + self.noise * self.random.uniform(-1, 1))

    def train(self, clocks: int) -> Link:
        for _ in range(clocks):
            up, down = (int(rung.bytes * self.auto.count) for rung in self.auto.choices[self.auto.at])
            up_s, down_s = self.noisy(up / self.rate), self.noisy(down / self.rate)
            compute_s, round_trip_s = self.noisy(self.compute_s), self.noisy(self.round_trip_s)
            switch = self.auto.clock(Clock(compute_s, 0.001, up, up_s, down, down_s, round_trip_s))
            if switch is not None:
                self.switches.append((self.clock, switch))
            self.clock += 1
        return self


# The ladder.


def test_the_ladder_is_what_its_payloads_are() -> None:
    values = np.random.default_rng(0).standard_normal(1 << 18, dtype=np.float32)
    for rung in LADDER:
        compressor = parse(rung.spec)
        assert compressor.spec == rung.spec
        assert len(compressor.encode(values)) / values.size == pytest.approx(rung.bytes, rel=0.03), rung
    for denser, sparser in pairwise(LADDER):
        assert denser.bytes > sparser.bytes


@pytest.mark.parametrize(("spec", "last"), [
    ("auto", "cycle:0.15+sign"),
    ("auto:0.0047", "cycle:0.15+sign"),
    ("auto:.01", "topk:0.11+sign"),  # the floor is never gone below
    ("auto:0.05", "topk:0.5+2bit"),
    ("auto:1", "dense"),
    ("auto:1e-3", "cycle:0.03+sign"),
])  # fmt: skip
def test_a_floor_cuts_the_ladder(spec: str, last: str) -> None:
    rungs = ladder(spec).rungs
    assert rungs == LADDER[: len(rungs)] and rungs[-1].spec == last
    assert ladder(spec, sparse=False).rungs == rungs[:3] and LADDER[2].spec == "int8"


def test_any_other_spec_is_a_ladder_of_one() -> None:
    (rung,) = ladder("dense+int8").rungs
    assert rung.spec == "int8" and rung.bytes == pytest.approx(1.008, rel=0.01)
    assert not Link(1.0, spec="topk:0.5").train(50).switches


@pytest.mark.parametrize("spec", ["auto:0", "auto:2", "auto:x", "auto:", "auto+int8", "auto:0.1+lz4", "auto:0.0001"])
def test_a_wrong_auto_is_one_sentence(spec: str) -> None:
    with pytest.raises(SpecError, match="write auto or auto:FLOOR") as caught:
        ladder(spec)
    assert repr(spec) in str(caught.value) and "\n" not in str(caught.value)


# The choice.


@pytest.mark.parametrize(("mbit", "specs"), [
    # of 1.32 M parameters, 125 ms of computing, 60 ms of round trip; 1, 2 and 3 updates in flight
    (1, ("cycle:0.15+sign", "cycle:0.15+sign", "cycle:0.15+sign")),
    (15, ("cycle:0.15+sign", "cycle:0.25/0.24+sign", "topk:0.27+sign")),
    (150, ("cycle:0.25/0.24+sign", "int4", "int8")),
    (1_000, ("topk:0.5+2bit", "fp16", "dense")),
    (100_000, ("dense", "dense", "dense")),
])  # fmt: skip
def test_the_link_decides(mbit: float, specs: Sequence[str]) -> None:
    for window, spec in enumerate(specs, 1):
        assert Link(mbit * MBIT, window=window).train(20).auto.up == spec


@pytest.mark.parametrize(("mbit", "specs"), [
    (1, ("cycle:0.15+sign", "cycle:0.15+sign", "cycle:0.15+sign")),
    (15, ("cycle:0.25/0.24+sign", "cycle:0.25/0.24+sign", "topk:0.27+sign")),
    (150, ("topk:0.27+sign", "int4", "int8")),
    (1_000, ("int4", "fp16", "dense")),
    (100_000, ("dense", "dense", "dense")),
])  # fmt: skip
def test_two_workers_choose_denser_rungs_on_some_links(mbit: float, specs: Sequence[str]) -> None:
    """The same links. With two workers the rungs lose 0.6 to 5.8 %, so without delay a denser one costs less on three."""
    for window, spec in enumerate(specs, 1):
        assert Link(mbit * MBIT, window=window, workers=2).train(20).auto.up == spec


# The densest rung within 5 % of the least seconds x steps: without delay, and with a clock of it.
@pytest.mark.parametrize(("mbit", "workers", "specs"), [
    (60, 1, ("cycle:0.25/0.24+sign", "topk:0.27+sign")),
    (40, 4, ("topk:0.11+sign", "topk:0.27+sign")),
    (80, 8, ("topk:0.27+sign", "topk:0.5+2bit")),
    (60, 16, ("topk:0.5+2bit", "topk:0.5+2bit")),
    (300, 4, ("int4", "int8")),
    (300, 16, ("int4", "int8")),
    (1_000, 16, ("int4", "dense")),
    (1, 16, ("cycle:0.15+sign", "cycle:0.15+sign")),
    (100_000, 16, ("dense", "dense")),
])  # fmt: skip
def test_many_workers_choose_denser_rungs_where_the_link_is_in_the_middle(
    mbit: float, workers: int, specs: Sequence[str]
) -> None:
    for window, spec in enumerate(specs, 1):
        assert Link(mbit * MBIT, window=window, workers=workers).train(20).auto.up == spec


@pytest.mark.parametrize(("flags", "steps"), [
    ({"sync": "ssp"}, 1.175**4.7),
    ({"sync": "bsp", "push": "update", "compress_down": "auto"}, 1.137**4.7),
    ({"sync": "bsp", "push": "update"}, (1.042 + 2 / 3 * 0.095) ** 4.7),  # states are dense
    ({"sync": "bsp"}, None),
    ({"sync": "ssp", "push": "gradient"}, None),
    ({"sync": "local"}, None),
], ids=str)  # fmt: skip
def test_a_run_of_sixteen_weighs_the_losses_of_its_mode(flags: dict[str, Any], steps: float | None) -> None:
    """Of pushed gradients and of rounds no loss by code is known."""
    settings = Settings(compress="auto", workers=16, **flags).validated()
    auto = CodecTuning(settings, 1000, StepTrace()).auto
    if steps is None:
        assert set(auto.steps) == {1}
    else:
        at = [up.spec for up, _ in auto.choices].index("topk:0.11+sign")
        assert auto.steps[at] == pytest.approx(steps)


def test_a_switch_says_the_steps_to_a_loss_where_they_differ() -> None:
    link = Link(60 * MBIT, window=2, workers=16).train(20)
    assert link.switches[-1][1].reason.endswith(
        "a clock takes 138 ms with topk:0.5+2bit, 126 ms with cycle:0.15+sign, and a loss 1.84 and 2.5 times bsp's steps, "
        "as measured"
    )
    assert "times bsp's steps" not in Link(60 * MBIT, window=2).train(20).switches[-1][1].reason


def test_a_code_that_was_not_timed_takes_little_on_a_gpu() -> None:
    """30.8 M values take 62 ms on a CPU, and the rung that was timed 0.4 ms: the others are not held to take 62 ms."""
    auto = Auto(ladder("auto").rungs, ladder("auto").rungs, 30_800_000, 3)
    for _ in range(3):
        size = int(auto.choices[auto.at][0].bytes * auto.count)
        auto.clock(Clock(0.03, 0.0004, size, size / 6.25e8, size, size / 6.25e8, 0.02))
    assert auto.up == "topk:0.5+2bit"


@given(
    rate=st.floats(1e3, 1e10),
    compute_s=st.floats(1e-4, 100.0),
    round_trip_s=st.floats(0.0, 1.0),
    window=st.integers(1, 5),
    count=st.integers(1, 10**9),
)
def test_it_is_the_densest_of_those_that_are_near_the_best_and_monotone_in_the_rate(
    rate: float, compute_s: float, round_trip_s: float, window: int, count: int
) -> None:
    chosen = []
    for factor in (1.0, 1.5, 10.0):
        link = Link(rate * factor, compute_s=compute_s, round_trip_s=round_trip_s, window=window, count=count)
        # Bytes that are timed exactly, whatever is sent.
        cost = Clock(compute_s, 2e-9 * count, 10**9, 1e9 / rate / factor, 10**9, 1e9 / rate / factor, round_trip_s)
        for _ in range(3):
            link.auto.clock(cost)
        chosen.append(link.auto.at)
        steps = []
        for up, _ in link.auto.choices:
            own, there = compute_s + 2e-9 * count, up.bytes * count / rate / factor
            # window - 1 other clocks run while this one's bytes travel.
            steps.append(max(own, there, (own + round_trip_s + 2 * there) / window))
        near = [choice for choice, step in enumerate(steps) if step <= min(steps) * (1 + NEAR * 1.000001)]
        assert link.auto.at == near[0] or steps[near[0]] == pytest.approx(min(steps) * (1 + NEAR))
    assert chosen == sorted(chosen, reverse=True)


def test_encoding_counts_once_it_was_timed() -> None:
    """A machine that takes 0.5 s to select sends all values on a link that would rather have few."""
    auto = Auto(ladder("auto").rungs, ladder("auto").rungs, 1_000_000, 1)
    for _ in range(10 * PATIENCE):
        encode_s = 0.5 if auto.up.startswith(("topk", "cycle")) else 0.002
        size = int(auto.choices[auto.at][0].bytes * 1e6)
        auto.clock(Clock(0.1, encode_s, size, size / 12.5e6, size, size / 12.5e6, 0.01))
    assert auto.up == "int4"


@pytest.mark.parametrize(("up", "down", "ends"), [
    ("auto", "auto", ("cycle:0.15+sign", "cycle:0.15+sign")),
    ("auto", "auto:0.02", ("cycle:0.15+sign", "topk:0.27+sign")),
    ("auto", "dense", ("topk:0.27+sign", "dense")),  # beside dense states nothing sparser saves more than NEAR
    ("fp16", "auto:0.05", ("fp16", "topk:0.5+2bit")),
])  # fmt: skip
def test_each_direction_keeps_to_its_own_ladder(up: str, down: str, ends: tuple[str, str]) -> None:
    auto = Link(1 * MBIT, spec=up, down=down, window=1).train(30).auto
    assert (auto.up, auto.down) == ends
    wide = Link(1e12, spec=up, down=down, window=1).train(20)
    assert (wide.auto.up, wide.auto.down) == ("fp16" if up == "fp16" else "dense", "dense")
    assert wide.switches[0][1].before == ("cycle:0.15+sign" if up == "auto" else "topk:0.5+2bit")


def test_what_a_fixed_coding_takes_is_measured() -> None:
    """A threshold may send everything or nothing: beside states of nearly no bytes a push is what a clock takes."""
    choices = []
    for size in (5_000_000, 100):
        auto = Auto(ladder("auto").rungs, ladder("threshold:0.01").rungs, 1_320_000, 1)
        for _ in range(10):
            up = int(auto.choices[auto.at][0].bytes * auto.count)
            auto.clock(Clock(0.01, 0.001, up, up / MBIT, size, size / MBIT, 0.001))
        choices.append(auto.step_s(auto.at) - auto.choices[auto.at][0].bytes * auto.count / MBIT)
    assert choices[0] > 39 and choices[1] < 1


def test_a_push_beside_states_that_take_as_long_is_free() -> None:
    """The link is as wide one way as the other, and with two updates in flight both are busy at once."""
    assert Link(1 * MBIT, spec="auto", down="dense", window=2).train(20).auto.up == "dense"


# When it changes.


def test_a_link_that_changes_is_followed_both_ways_and_each_switch_says_why() -> None:
    link = Link(1_000 * MBIT).train(20)
    assert [s.after for _, s in link.switches] == ["fp16"]
    link.rate = 15 * MBIT
    link.train(WINDOW // 2 + PATIENCE)
    assert [s.after for _, s in link.switches[1:]] == ["cycle:0.25/0.24+sign"], (
        "as soon as most of a window and patience say"
    )
    reason = link.switches[-1][1].reason
    assert "1.88 MB/s up, 1.88 MB/s down, a round trip of 60 ms and 125 ms of computing" in reason
    assert "128 ms with cycle:0.25/0.24+sign, 1.5 s with fp16" in reason and "\n" not in reason
    link.rate = 1_000 * MBIT
    link.train(100)
    assert link.auto.up == "fp16"
    assert all(before.after == after.before for (_, before), (_, after) in pairwise(link.switches))


def test_a_hiccup_changes_nothing() -> None:
    link = Link(100 * MBIT).train(20)
    for _ in range(5):
        link.rate = 1 * MBIT
        link.train(WINDOW // 2)
        link.rate = 100 * MBIT
        link.train(2 * WINDOW)
    assert len(link.switches) == 1


def test_noise_of_a_fifth_does_not_make_it_flap() -> None:
    """On links of every rate, on the edges between two rungs too: 20 % more or less in all that is measured."""
    late = []
    for number, (step, window) in enumerate(islice(product(range(30), (1, 2, 3)), 0, None, 2)):
        workers = (1, 16)[number % 2]
        link = Link(1e5 * 10 ** (step / 7.5), window=window, noise=0.2, seed=step, workers=workers).train(1_000)
        late.append(sum(clock > 50 for clock, _ in link.switches))
    assert max(late) <= 3 and sum(late) <= 0.2 * len(late)


def test_each_way_back_takes_longer() -> None:
    link = Link(1_000 * MBIT).train(20)
    for _ in range(8):
        for rate in (10, 1_000):
            link.rate = rate * MBIT
            link.train(3 * PATIENCE_MAX)
    assert link.auto.patience == PATIENCE_MAX


def test_it_is_deterministic() -> None:
    once, again = (Link(20 * MBIT, noise=0.3, seed=5).train(500).switches for _ in range(2))
    assert once == again and once


# Values that are left out are not lost.


def test_a_residual_outlives_a_change_of_compressor() -> None:
    """Sent + residual = updates after every step, through every rung and back to dense, which sends all."""
    random_values = np.random.default_rng(3)
    feedback = ErrorFeedback(parse("dense"), 5_000)
    sent, made = np.zeros(5_000, np.float32), np.zeros(5_000, np.float32)
    for rung in (*LADDER, *reversed(LADDER)):
        feedback.change(parse(rung.spec))
        update = random_values.integers(-512, 512, 5_000).astype(np.float32) / np.float32(
            512
        )  # sums of these are exact
        made += update
        accumulate(feedback.encode(update), 1.0, sent)
        left = feedback.residual if feedback.residual is not None else np.zeros(5_000, np.float32)
        np.testing.assert_allclose(sent + left, made, atol=1e-5)
    assert feedback.compressor.lossless and feedback.residual is None
    np.testing.assert_allclose(sent, made, atol=1e-5)


def test_publications_of_any_coding_lead_to_the_same_state() -> None:
    """A child that follows them has p bit for bit, and one that lacks a dense one gets the whole state."""
    store = Store(0, 2_000, barrier=True, codings=ladder("auto"))
    store.apply(LoadArrays({"x": np.zeros(2_000, np.float32), "p": np.zeros(2_000, np.float32)}, 0))
    followed = store.p.copy()
    values = np.random.default_rng(4)
    for spec in ("topk:0.11+sign", "int8", "dense", "cycle:0.15+sign", "fp16", "dense"):
        store.x += values.standard_normal(2_000, dtype=np.float32)
        store.apply(Publish(spec=spec))
        news = store.since(store.publication - 1)
        if spec == "dense":
            assert not news
            followed = store.p.copy()
            np.testing.assert_array_equal(store.p, store.x)
        else:
            assert news
            for _, keys, delta in news:
                assert keys == (0, 2_000) and delta is not None
                accumulate(delta, 1.0, followed)
        np.testing.assert_array_equal(followed, store.p)
    assert not store.since(store.publication - 2)


# The measurements of a link.


@pytest.mark.parametrize("clocks_differ_s", [0.0, 1e6, -1e6])
@pytest.mark.parametrize("every_s", [0.02, 0.2], ids=["saturated", "idle between"])
def test_a_meter_finds_rate_and_round_trip_whatever_the_clocks(clocks_differ_s: float, every_s: float) -> None:
    """Pushes of 50 kB at 1 MB/s, 30 ms there and 20 back, and a heartbeat now and then, all through one queue."""
    meter, differ_ns = LinkMeter(), int(clocks_differ_s * NS) + 10**16
    free = 0.0  # when the link has sent what it was given
    for turn in range(60):
        now = 10**7 + turn * every_s
        for size in (0, 50_000) if turn % 10 == 0 else (50_000,):
            free = max(free, now) + size / 1e6
            sent, there = int(now * NS), int((free + 0.03) * NS)
            meter.up.passed(sent, there + differ_ns, size)
            meter.down.passed(there + differ_ns, there + 20_000_000)
    seen = meter.read()
    assert seen.up_bytes == 60 * 50_000 and seen.round_trip_ns == pytest.approx(50_000_000, rel=0.01)
    assert seen.up_bytes / (seen.up_ns / NS) == pytest.approx(1e6, rel=0.01)
    assert (meter.read().up_bytes, seen.down_bytes, seen.down_ns) == (0, 0, 0)


def test_a_meter_believes_in_a_longer_route_after_a_while() -> None:
    meter = LinkMeter()
    for second in range(120):
        way_ns = 10_000_000 if second < 40 else 50_000_000
        meter.up.passed(second * NS, second * NS + way_ns)
        meter.down.passed(second * NS, second * NS + 10_000_000)
        if second in (39, 39 + 2 * WINDOW_NS // NS):
            assert meter.read().round_trip_ns == way_ns + 10_000_000


# In a run.


def constant(model: torch.nn.Module) -> torch.Tensor:
    """A loss whose gradient is the same everywhere: what the updates amount to does not hang on the replica."""
    total = torch.zeros(())
    for parameter in model.parameters():
        total = total + (parameter * torch.linspace(-1.0, 1.0, parameter.numel()).view(parameter.shape)).sum()
    return total


class Trainer:
    """One worker whose clocks each compute for a second, by its own account."""

    def __init__(self, joined: RunSession, rate: float) -> None:
        self.session, self.link = joined, joined.link
        torch.manual_seed(1)
        self.model = torch.nn.Linear(300, 100, bias=False)
        self.first = flat(self.model)
        self.optimizer = DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.5), self.model)
        assert joined.engine is not None
        self.tuning = joined.engine.tuning
        self.tuning.now_s = self.seconds
        self.steps = 0
        self.limit(rate)

    def seconds(self) -> float:
        return float(self.steps) + self.tuning.trace.seconds["wait"] + self.tuning.trace.seconds["encode"]

    def limit(self, rate: float) -> None:
        self.link.rate = rate  # type: ignore[attr-defined]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            self.link.call(lambda member, now: member.tick(now))  # nothing else makes heartbeats here
            self.optimizer.zero_grad()
            constant(self.model).backward()
            self.optimizer.step()


@pytest.mark.parametrize("flags", [
    {"sync": "ssp", "shards": 2},
    {"sync": "async"},
    {"sync": "ssp", "staleness": 0, "compress_down": "topk:0.05+int8"},
    {"sync": "bsp", "push": "update", "compress_down": "auto"},
], ids=str)  # fmt: skip
def test_a_run_follows_its_link_and_loses_nothing(flags: dict[str, object]) -> None:
    settings = Settings(compress="auto", **flags).validated()  # type: ignore[arg-type]
    told: list[tuple[str, dict[str, object]]] = []
    with run(settings) as started, pytest.MonkeyPatch.context() as patch:
        patch.setattr("narrows.worker.session._tell", lambda event, **values: told.append((event, values)))
        started.become(0)
        worker = Trainer(started.sessions[0], rate=300.0)
        for rate, spec in ((300.0, SPARSEST), (1e9, "dense"), (300.0, SPARSEST)):
            worker.limit(rate)
            worker.train(60)
            assert worker.tuning.auto.up == spec
            for server in started.cluster.servers:
                down = spec if settings.compress_down == "auto" else settings.compress_down
                assert store_of(server).down.spec == down
        worker.optimizer.finish()
        with worker.optimizer.shared():
            updates = flat(worker.model) - worker.first
    gradient = np.linspace(-1.0, 1.0, updates.size, dtype=np.float32)
    np.testing.assert_allclose(updates, -0.5 * 180 * gradient, rtol=1e-4, atol=1e-3)
    switches = [values for event, values in told if event == "compress"]
    assert len(switches) >= 2 and switches[0]["from"] == SPARSEST == switches[-1]["to"]
    assert [set(values) for values in switches] == [{"clock", "from", "to", "reason"}] * len(switches)
    assert all(before["to"] == after["from"] for before, after in pairwise(switches))


def test_states_are_coded_for_the_slowest_link() -> None:
    with run(Settings(sync="ssp", staleness=1, workers=2, compress="auto")) as started:

        def script(worker: int) -> tuple[str, str]:
            trainer = Trainer(started.sessions[worker], rate=float("inf"))
            trainer.train(1)  # the first state is whole: slow, it would take minutes of the clock that both share
            trainer.limit((1_000.0, 1e9)[worker])
            trainer.train(30)
            store = store_of(started.cluster.servers[0])
            assert store is not None
            chosen = trainer.tuning.auto.up, store.down.spec
            trainer.limit(float("inf"))  # as would the last push
            trainer.optimizer.finish()
            return chosen

        assert started.together(script) == [(SPARSEST, SPARSEST), ("dense", SPARSEST)]


def test_a_coding_that_the_downlink_does_not_have_is_refused() -> None:
    with run(Settings(sync="ssp", compress="auto", compress_down="auto:0.05")) as started:
        started.become(0)
        worker = Trainer(started.sessions[0], rate=1e9)
        worker.train(2)
        engine = worker.session.engine
        assert engine is not None
        shards = engine.sync.shards
        follow = m.Follow(shards.worker, shards.epoch, 2, 0, 1, "topk:0.01+int8")
        with pytest.raises(RemoteProtocolError, match=r"asks for states coded with 'topk:0.01\+int8'"):
            started.cluster.servers[0].handle(started.cluster.servers[0].shard.assembler.seats[0].peer, follow, 0)


@pytest.mark.parametrize(("flags", "specs"), [
    ({"sync": "bsp"}, ["dense", "fp16", "int8"]),
    ({"sync": "ssp", "push": "gradient"}, ["dense", "fp16", "int8"]),
    *(({"sync": "bsp", "push": "update"} if mode == "bsp" else {"sync": mode}, ladder("auto").specs)
      for mode in ("local", "bsp", "ssp", "async")),
], ids=str)  # fmt: skip
def test_gradients_are_sent_whole(flags: dict[str, str], specs: list[str]) -> None:
    with run(Settings(compress="auto", **flags)) as started:  # type: ignore[arg-type]
        started.become(0)
        worker = Trainer(started.sessions[0], rate=1e5)
        assert [up.spec for up, _ in worker.tuning.auto.choices] == specs
        worker.train(15)
        worker.optimizer.finish()


def test_overlap_sends_parts_as_they_are() -> None:
    with run(Settings(sync="bsp", compress="auto")) as started:
        started.become(0)
        model = torch.nn.Linear(3, 2)
        with pytest.raises(UsageError, match="--compress auto codes all of them at once: use --compress dense"):
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)


def test_a_switch_is_on_the_console_and_in_the_record(tmp_path: Path) -> None:
    """On loopback every rung takes as long as any other, so the first choice is denser than the start."""
    (tmp_path / "script.py").write_text(
        SCRIPT % "sum(range(300_000))"
    )  # some milliseconds, beside which bytes are nothing
    words = ("--sync", "ssp", "--compress", "auto", "--record", "run.jsonl", "script.py", "30")
    code, _, err = finished("ps-worker", *words, cwd=tmp_path)
    assert code == 0, err
    events = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    switches = [event for event in events if event["event"] == "compress"]
    assert switches, err
    first = switches[0]
    assert set(first) == {"event", "seconds", "local_rank", "clock", "from", "to", "reason"}
    assert (first["local_rank"], first["from"]) == (0, SPARSEST) and first["clock"] >= 3
    said = "ps-worker: local rank 0 codes with {to}, not {from}, from clock {clock} on: {reason}"
    assert err.count(said.format(**first)) == 1
