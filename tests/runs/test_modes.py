"""The table of sync modes, the settings of a run, and the rule that a worker reads its own writes (replica.py)."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.scripts import build, flat, loss_of, run

from narrows.protocols.config.modes import ELEMENTWISE, MODES, WINDOW, FoldRule
from narrows.protocols.config.settings import SHARDS_MAX, STALENESS_MAX, Settings, contradiction
from narrows.protocols.errors import UsageError
from narrows.protocols.member.replica import STANDS_IN_UNBOUNDED, stand_in
from narrows.worker import DistributedOptimizer

# The table of docs/modes.md: flags -> H, bound, folded at a barrier, pushed, server rule, window.
TABLE: list[tuple[dict[str, Any], tuple[int, int | None, bool, str, FoldRule, int]]] = [
    ({"sync": "bsp"}, (1, 0, True, "gradient", FoldRule.OPTIMIZER, 1)),
    ({"sync": "bsp", "push": "update"}, (1, 0, True, "update", FoldRule.ADD, 1)),
    ({"sync": "ssp"}, (1, 1, False, "update", FoldRule.ADD, 2)),
    ({"sync": "ssp", "staleness": 0}, (1, 0, False, "update", FoldRule.ADD, 1)),
    ({"sync": "ssp", "staleness": 3}, (1, 3, False, "update", FoldRule.ADD, 4)),
    ({"sync": "ssp", "push": "gradient"}, (1, 1, False, "gradient", FoldRule.OPTIMIZER, 2)),
    ({"sync": "async"}, (1, None, False, "update", FoldRule.ADD, WINDOW)),
    ({"sync": "async", "push": "gradient"}, (1, None, False, "gradient", FoldRule.OPTIMIZER, WINDOW)),
    ({"sync": "local"}, (10, 0, True, "update", FoldRule.OUTER, 1)),
    ({"sync": "local", "local_steps": 500}, (500, 0, True, "update", FoldRule.OUTER, 1)),
    ({"sync": "local", "local_steps": 1}, (1, 0, True, "update", FoldRule.OUTER, 1)),
    # A push of clock c, after its inner steps, is merged merge_delay steps later: so many clocks may be begun before.
    ({"sync": "local", "fragments": 5, "merge_delay": 0}, (2, 0, True, "update", FoldRule.OUTER, 1)),
    ({"sync": "local", "fragments": 5}, (2, 1, True, "update", FoldRule.OUTER, 2)),
    ({"sync": "local", "fragments": 5, "merge_delay": 2}, (2, 1, True, "update", FoldRule.OUTER, 2)),
    ({"sync": "local", "fragments": 5, "merge_delay": 3}, (2, 2, True, "update", FoldRule.OUTER, 3)),
    ({"sync": "local", "merge_delay": 9}, (10, 1, True, "update", FoldRule.OUTER, 2)),
    ({"sync": "local", "staleness": 2}, (10, 2, False, "update", FoldRule.OUTER, 3)),
    ({"sync": "gossip"}, (1, 1, False, "model", FoldRule.MIX, 2)),
    ({"sync": "gossip", "local_steps": 5, "staleness": 0}, (5, 0, False, "model", FoldRule.MIX, 1)),
    ({"sync": "gossip", "topology": "random"}, (1, None, False, "model", FoldRule.MIX, WINDOW)),
]


@pytest.mark.parametrize(("flags", "row"), TABLE, ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "")  # fmt: skip  # noqa: E501
def test_the_table_of_modes(flags: dict[str, Any], row: tuple[int, int | None, bool, str, FoldRule, int]) -> None:
    settings = Settings(**flags).validated()
    mode = settings.mode()
    assert (mode.local_steps, mode.bound, mode.barrier, mode.push, mode.rule, mode.window) == row
    assert settings.validated() == settings, "validating twice changes nothing: workers do it again"
    assert Settings.unpacked(settings.packed()) == settings


def test_every_mode_is_in_the_table_above() -> None:
    assert {flags["sync"] for flags, _ in TABLE} == set(MODES)


@pytest.mark.parametrize(
    ("flags", "down"),
    [
        ({"sync": "bsp", "compress": "int8"}, "dense"),
        ({"sync": "ssp", "compress": "int8"}, "int8"),
        ({"sync": "local"}, "dense"),
        ({"sync": "async", "compress": "int8", "compress_down": "fp16"}, "fp16"),
        ({"sync": "gossip", "compress": "int8"}, "dense"),
    ],
)
def test_the_downlink_is_coded_as_the_uplink_except_at_a_barrier_of_gradients(flags: dict[str, Any], down: str) -> None:
    assert Settings(**flags).validated().compress_down == down


NAN = float("nan")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"sync": "gossup"}, "--sync gossup: unknown mode; the modes are bsp, ssp, async, local"),
        ({"sync": ""}, "--sync : unknown mode"),
        (
            {"sync": "bsp", "staleness": 2},
            "--staleness: --sync bsp has no staleness bound to set; ssp, local, gossip have one",
        ),
        (
            {"sync": "async", "staleness": 2},
            "--staleness: --sync async has no staleness bound to set; ssp, local, gossip have one",
        ),
        ({"sync": "ssp", "staleness": -2}, "--staleness -2: give a value from 0 to"),
        ({"sync": "ssp", "staleness": STALENESS_MAX + 1}, "--staleness 1048577: give a value from 0 to 1048576"),
        (
            {"sync": "ssp", "local_steps": 4},
            "--local-steps: --sync ssp pushes every step; --sync local takes local steps",
        ),
        ({"sync": "bsp", "local_steps": 10}, "--local-steps: --sync bsp pushes every step"),
        ({"sync": "local", "local_steps": 0}, "--local-steps 0: give a value from 1 to"),
        ({"sync": "local", "local_steps": -3}, "--local-steps -3: give a value from 1 to"),
        ({"sync": "local", "fragments": 0}, "--fragments 0: give a value from 1 to 1024"),
        ({"sync": "local", "fragments": 4}, "--fragments 4: --local-steps 10 is no multiple of it"),
        ({"sync": "local", "fragments": 4}, "give --local-steps 12"),
        ({"sync": "local", "fragments": 20}, "give --local-steps 20"),
        ({"sync": "ssp", "fragments": 2}, "--fragments: --sync ssp pushes every step"),
        ({"sync": "bsp", "merge_delay": 1}, "--merge-delay: --sync bsp pushes every step"),
        ({"sync": "async", "merge_alpha": 0.5}, "--merge-alpha: --sync async pushes every step"),
        ({"sync": "local", "merge_delay": 10}, "--merge-delay 10: a fragment is pushed again after --local-steps 10"),
        ({"sync": "local", "merge_delay": 10}, "give at most 9"),
        ({"sync": "local", "merge_delay": -2}, "--merge-delay -2: give a value from 0 to"),
        ({"sync": "local", "merge_alpha": 1.0}, "--merge-alpha 1.0: give a value from 0 up to, not including, 1"),
        ({"sync": "local", "merge_alpha": -0.5}, "--merge-alpha -0.5: give a value from 0 up to, not including, 1"),
        ({"sync": "local", "merge_alpha": NAN}, "--merge-alpha nan: give a value from 0 up to, not including, 1"),
        (
            {"sync": "local", "staleness": 1, "fragments": 2},
            "--fragments: with --staleness 1 updates are folded at once",
        ),
        ({"sync": "local", "staleness": 2, "merge_delay": 1}, "--merge-delay: with --staleness 2 updates are folded"),
        ({"sync": "local", "push": "gradient"}, "--push gradient: --sync local pushes update"),
        ({"sync": "ssp", "push": "model"}, "--push model: --sync ssp pushes update or gradient"),
        ({"sync": "bsp", "push": "weights"}, "--push weights: --sync bsp pushes gradient or update"),
        ({"sync": "bsp", "quorum": 1}, "--quorum 1: --sync bsp has no barrier of local rounds"),
        ({"sync": "bsp", "push": "update", "quorum": 1}, "--quorum 1: --sync bsp has no barrier of local rounds"),
        (
            {"sync": "ssp", "quorum": 1},
            "--quorum 1: --sync ssp has no barrier of local rounds that a quorum could close",
        ),
        ({"sync": "ssp", "staleness": 0, "quorum": 1}, "--sync local with --staleness 0 has"),
        ({"sync": "async", "quorum": 1}, "--quorum 1: --sync async has no barrier of local rounds"),
        ({"sync": "local", "staleness": 1, "quorum": 1}, "--quorum 1: --sync local --staleness 1 has no barrier"),
        (
            {"sync": "local", "workers": 3, "quorum": 4},
            "--quorum 4: a run of --workers 3 has fewer pushes a round; give",
        ),
        ({"sync": "local", "quorum": 0}, "--quorum 0: give a value from 1 to 65536"),
        ({"sync": "local", "quorum": -2}, "--quorum -2: give a value from 1 to 65536"),
        ({"sync": "local", "grace": 1.0}, "--grace 1.0: it begins when a quorum has pushed; give --quorum too"),
        ({"sync": "local", "quorum": 1, "grace": -0.5}, "--grace -0.5: give a value from 0 to 86400"),
        ({"sync": "local", "quorum": 1, "grace": NAN}, "--grace nan: give a value from 0 to 86400"),
        ({"shards": 0}, "--shards 0: give a value from 1 to 256"),
        ({"shards": SHARDS_MAX + 1}, "--shards 257: give a value from 1 to 256"),
        ({"workers": 0}, "--workers 0: give a value from 1 to 65536"),
        ({"workers": -1}, "--workers -1: give a value from 1 to 65536"),
        ({"lease": 0.0}, "--lease 0.0: give a value from 0.1 to 86400"),
        ({"lease": NAN}, "--lease nan: give a value from 0.1 to 86400"),
        ({"checkpoint_every": -2.0}, "--checkpoint-every -2.0: give a value from 0"),
        ({"checkpoint_every": float("inf")}, "--checkpoint-every inf: give a value from 0"),
        ({"outer_lr": -0.1}, "--outer-lr -0.1: give a value from 0"),
        ({"outer_lr": NAN}, "--outer-lr nan: give a value from 0"),
        ({"outer_lr": 0.5}, "--outer-lr: --sync ssp has no outer step; local and gossip have one"),
        ({"sync": "bsp", "outer_momentum": 0.5}, "--outer-momentum: --sync bsp has no outer step"),
        ({"sync": "ssp", "update_gain": 0.0}, "--update-gain 0.0: give a value above 0, at most 1000"),
        ({"sync": "ssp", "update_gain": -2.0}, "--update-gain -2.0: give a value above 0"),
        ({"sync": "ssp", "update_gain": 1001.0}, "--update-gain 1001.0: give a value above 0, at most 1000"),
        ({"sync": "ssp", "update_gain": NAN}, "--update-gain nan: give a value above 0"),
        ({"sync": "ssp", "look_ahead": -0.5}, "--look-ahead -0.5: give a value from 0"),
        ({"sync": "ssp", "look_ahead": NAN}, "--look-ahead nan: give a value from 0"),
        ({"sync": "bsp", "update_gain": 1.5}, "--update-gain: here no updates of workers are added; bsp, ssp, async"),
        ({"sync": "local", "look_ahead": 0.5}, "--look-ahead: here no updates of workers are added"),
        (
            {"sync": "ssp", "push": "gradient", "update_gain": 1.5},
            "--update-gain: here no updates of workers are added",
        ),
        (
            {"sync": "gossip", "update_gain": 1.5, "local_steps": 2},
            "--update-gain: gossip scales updates of one step; leave it out, or --local-steps",
        ),
        ({"sync": "gossip", "look_ahead": 1.5}, "--look-ahead: here no updates of workers are added"),
        ({"outer_momentum": 1.0}, "--outer-momentum 1.0: give a value from 0 up to, not including, 1"),
        ({"outer_momentum": -0.1}, "--outer-momentum -0.1: give a value from 0 up to, not including, 1"),
        ({"outer_momentum": NAN}, "--outer-momentum nan: give a value from 0 up to, not including, 1"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_sentence_that_names_its_flag(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings(**flags).validated()
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "flags",
    [{"sync": "bsp", "staleness": 0}, {"sync": "bsp", "local_steps": 1}, {"sync": "ssp", "local_steps": 1}],
    ids=str,
)
def test_a_flag_that_says_what_the_mode_does_anyway_is_no_error(flags: dict[str, Any]) -> None:
    Settings(**flags).validated()


def test_what_is_mixed_in_a_merge_follows_from_its_delay() -> None:
    """With a delay half of the local values are kept (2501.18512); without one there is nothing to keep."""
    for flags, expected in (
        ({}, (1, 0, 0.0)),
        ({"fragments": 5}, (5, 1, 0.5)),
        ({"fragments": 5, "merge_delay": 0}, (5, 0, 0.0)),
        ({"merge_delay": 3}, (1, 3, 0.5)),
        ({"merge_delay": 3, "merge_alpha": 0.0}, (1, 3, 0.0)),
        ({"merge_alpha": 0.25}, (1, 0, 0.25)),
    ):
        settings = Settings(sync="local", **flags).validated()
        mode = settings.mode()
        assert (mode.fragments, mode.merge_delay, mode.merge_alpha) == expected
        assert settings.validated() == settings and Settings.unpacked(settings.packed()) == settings
        assert mode.merges and mode.streams == bool(flags)
    for sync in ("bsp", "ssp", "async"):
        assert not Settings(sync=sync).validated().mode().merges and not Settings(sync=sync).validated().mode().streams


def test_a_contradiction_names_both_sides_and_agreement_is_silent() -> None:
    actual = Settings(sync="ssp", staleness=2, compress="topk:0.01").validated()
    assert contradiction({}, actual) is None
    assert contradiction(asdict(actual), actual) is None
    assert contradiction({"of_another_release": 1}, actual) is None
    others: dict[str, Any] = {
        "sync": "bsp",
        "staleness": 1,
        "local_steps": 4,
        "local_seconds": 5.0,
        "weigh": "equal",
        "push": "gradient",
        "compress": "dense",
        "shards": 2,
        "cut": "tensors",
        "compress_down": "dense",
        "workers": 9,
        "outer": "iso",
        "outer_lr": 0.25,
        "outer_momentum": 0.5,
        "update_gain": 1.0,
        "look_ahead": 0.0,
        "max_update_norm": 5.0,
        "robust": "median",
        "dp_clip": 1.0,
        "dp_noise": 2.0,
        "quorum": 2,
        "grace": 1.0,
        "fragments": 5,
        "merge_delay": 3,
        "merge_alpha": 0.25,
        "lease": 3.0,
        "topology": "ring",
        "checkpoint_every": 5.0,
        "checkpoint_clocks": 50,
        "replan": "off",
        "replan_after": 9.0,
        "start_steps": 40,
        "start_compress": "int8",
    }
    unset = {
        "name",
        "plan_number",
        "plan_digest",
        "rest",
        "start_clock",
    }  # names: tests/unit/protocols/test_run_names.py
    assert set(others) == set(asdict(actual)) - unset, "every flag of a run"
    for name, value in others.items():
        flag = "--" + name.replace("_", "-")
        text = contradiction({name: value}, actual) or ""
        has = getattr(actual, name)
        theirs = f"has no {flag} under --sync ssp" if has == -1 else f"{flag} {has}"
        assert f"{flag} {value} contradicts" in text and theirs in text
    changed = Settings(sync="bsp", push="update").validated().changed(sync="ssp", staleness=2, compress="int4")
    assert contradiction({"sync": "bsp", "staleness": 0, "compress": "dense"}, changed) is None, "it began so"
    none = contradiction({"staleness": 4}, Settings(sync="async").validated())
    assert none is not None and "has no --staleness under --sync async" in none


def test_copies_of_a_plan_are_compared_where_both_sides_have_one() -> None:
    planned, other = Settings(plan_digest=0xABC), Settings()
    text = contradiction({"plan_digest": 0xDEF}, planned) or ""
    assert "here is 00000000000def, and there 00000000000abc; give all hosts a copy" in text
    none: dict[str, object] = {}
    for expected, actual in (
        (none, planned),
        (none | {"plan_digest": 0}, planned),
        (none | {"plan_digest": 0xDEF}, other),
    ):
        assert contradiction(expected, actual) is None
    assert contradiction({"plan_digest": 0xABC}, planned) is None
    for strange in ("x", 1.5, b"x", [1], -1):  # anybody may send a Hello
        assert "there 00000000000abc" in (contradiction({"plan_digest": strange}, planned) or "")


def test_elementwise_optimizers_are_classes_of_torch() -> None:
    import torch

    for name in ELEMENTWISE:
        assert issubclass(getattr(torch.optim, name), torch.optim.Optimizer)


# Waiting.


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 6))
def test_a_worker_may_compute_up_to_s_clocks_ahead(clock: int, min_clock: int, bound: int) -> None:
    mode = Settings(sync="ssp", staleness=bound).validated().mode()
    assert mode.allows(clock, min_clock) == (clock - min_clock <= bound)
    assert Settings(sync="async").validated().mode().allows(clock, min_clock)


# The replica. Reference: Replica = pulled + gain residual + sum over own clocks c >= min_clock of (ahead - w_c) u_c, w_c = 0
# while c is not in the state; gain and ahead are 1 where no updates are added. Three columns of the table depart from it:
# pushed gradients have no own writes; an outer step is no mean, so what is in the state stands in at full weight until its
# round is folded; with no bound only the newest STANDS_IN_UNBOUNDED own clocks stand in.


def own_writes(flags: dict[str, Any], updates: dict[int, float], own_clock: int, min_clock: int,
               folded: dict[int, float], ahead: float) -> float:  # fmt: skip
    total = 0.0
    for clock, update in updates.items():
        if clock < min_clock:
            continue  # every live worker's update of that clock is in
        w = folded.get(clock, 0.0)
        if flags.get("push") == "gradient" or (flags["sync"] == "bsp" and "push" not in flags):
            continue
        if (flags["sync"] == "async" or flags.get("topology") == "random") and own_clock - clock > 1:
            continue
        total += (1.0 if flags["sync"] == "local" else ahead - w) * update
    return total


@given(st.data())
def test_own_writes_stand_in_as_the_rule_says(data: st.DataObject) -> None:
    flags, _ = data.draw(
        st.sampled_from([row for row in TABLE if row[0]["sync"] != "gossip"])
    )  # nothing is pushed there
    own_clock = data.draw(st.integers(0, 12))
    min_clock = data.draw(st.integers(0, own_clock))
    updates = {clock: data.draw(st.sampled_from([-1.0, 0.5, 3.0])) for clock in range(own_clock)}
    folded = {clock: data.draw(st.sampled_from([0.25, 0.5, 1.0])) for clock in updates if data.draw(st.booleans())}
    mode = Settings(**flags).validated().mode()
    ahead = data.draw(st.sampled_from([1.0, 1.25, 1.5, 2.1])) if mode.rule is FoldRule.ADD else 1.0
    ours = sum(stand_in(mode, c, own_clock, min_clock, folded.get(c), ahead) * u for c, u in updates.items())
    assert STANDS_IN_UNBOUNDED == 1
    assert ours == pytest.approx(own_writes(flags, updates, own_clock, min_clock, folded, ahead), abs=1e-12)


@pytest.mark.parametrize(("gain", "ahead"), [(1.0, 1.0), (1.25, 1.25), (1.0, 1.5), (1.5, 1.875)])
def test_an_own_update_never_falls_back_on_its_way_into_the_mean(gain: float, ahead: float) -> None:
    """Pulled + own writes hold one own update at `ahead` until its clock is complete, then at its weight; the others'
    of that clock have come by then, and all together sum to the gain."""
    mode, workers = Settings(sync="ssp", staleness=2, workers=4).validated().mode(), 4
    clock, weight = 5, gain / workers
    for own_clock in (6, 7):
        in_flight = 0.0 + stand_in(mode, clock, own_clock, 5, None, ahead)
        folded_early = weight + stand_in(mode, clock, own_clock, 5, weight, ahead)
        complete = weight + stand_in(mode, clock, own_clock, 6, None, ahead)
        late = weight + stand_in(mode, clock, own_clock, 6, weight, ahead)
        assert (in_flight, folded_early, complete, late) == (ahead, ahead, weight, weight)
        assert workers * complete == gain <= ahead


@given(st.floats(0.1, 2.0), st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.integers(1, 4))
def test_what_a_worker_sees_of_its_own_update_is_the_same_whenever_it_is_folded(
    gain: float, more: float, share: float, bound: int
) -> None:
    mode, ahead = Settings(sync="ssp", staleness=bound).validated().mode(), gain * (1 + more)
    for own_clock in range(6, 6 + mode.window):
        folded = gain * share + stand_in(mode, 5, own_clock, 5, gain * share, ahead)
        assert stand_in(mode, 5, own_clock, 5, None, ahead) == ahead
        assert folded == pytest.approx(ahead, rel=1e-12)


def test_nobody_looks_ahead_where_no_updates_are_added() -> None:
    """An outer step is no mean and stands in whole, folded or not; gradients never do."""
    outer = Settings(sync="local", staleness=1).validated().mode()
    gradient = Settings(sync="ssp", push="gradient").validated().mode()
    for weight in (None, 0.25, 1.0):
        assert stand_in(outer, 5, 6, 5, weight) == 1.0
        assert stand_in(gradient, 5, 6, 5, weight, 1.5) == 0.0
        assert stand_in(outer, 5, 7, 6, weight) == 0.0


def test_one_worker_with_the_whole_weight_has_nothing_left_to_stand_in() -> None:
    for sync in ("ssp", "async"):
        assert stand_in(Settings(sync=sync).validated().mode(), 3, 4, 3, 1.0) == 0.0


def test_a_mode_is_a_row_and_is_not_changed_by_a_run() -> None:
    before = dict(MODES)
    assert Settings(sync="local", local_steps=3, staleness=1).validated().mode() != MODES["local"]
    assert before == MODES
    with pytest.raises(AttributeError):
        MODES["bsp"].bound = 3  # type: ignore[misc]
    assert replace(MODES["bsp"], bound=3).bound == 3


def test_with_no_bound_an_own_update_stands_in_until_it_is_published() -> None:
    """1. Worker 0 pushes twice: publication 1. 2. Worker 1 pushes: clock 0 is complete, and its update is in no publication.
    3. It takes publication 1."""
    with run(Settings(sync="async")) as started:
        engines = []
        for worker in range(2):
            if worker:
                started.join()
            net = build()
            engines.append((net, DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)))
        for worker in (0, 0, 1):
            net, optimizer = engines[worker]
            before = flat(net)
            optimizer.zero_grad()
            loss_of(net, 0).backward()
            optimizer.step()
        update, engine = flat(net) - before, optimizer._engine
        assert engine is not None and started.cluster.servers[0].shard.min_clock == 1
        engine.waiting.poll()
        sync: Any = engine.sync
        sync.compose()
        (exchange,) = sync.shards.exchanges
        assert (exchange.publication, exchange.min_clock, exchange.settled) == (1, 0, 0)
        np.testing.assert_allclose(flat(net), exchange.replica.pulled + update, atol=1e-6)
        assert np.abs(update).max() > 1e-3
