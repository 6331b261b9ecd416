"""The parts of a step: their seconds, and their ranges in a trace of torch.profiler."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from kit.scripts import build, loss_of, run
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from narrows.protocols.config.settings import Settings
from narrows.worker import DistributedOptimizer
from narrows.worker.runtime import trace
from narrows.worker.runtime.trace import PARTS, StepTrace

STEPS = 4
MODES: dict[str, dict[str, Any]] = {
    "bsp": {"sync": "bsp", "compress": "dense"},
    "bsp, updates": {"sync": "bsp", "push": "update"},
    "ssp": {"sync": "ssp"},
    "async": {"sync": "async"},
    "local": {"sync": "local", "local_steps": 2},
    "local, fragments": {"sync": "local", "local_steps": 2, "fragments": 2},
    "gossip": {"sync": "gossip"},
}
WITHOUT = {"bsp": {"compose"}}  # its parameters are the pulled state
ORDER = [
    "script",
    "difference",
    "encode",
]  # of their first ranges in a step; a state may come and be folded at any time


def made(mode: str) -> Settings:
    flags: dict[str, Any] = {"workers": 2, "compress": "topk:0.5+int8"} | MODES[mode]
    return Settings(**flags).validated()


def trained(mode: str) -> tuple[list[FunctionEvent], dict[str, float], float]:
    """Train with two workers; profile the last STEPS of the first.

    Returns:
        The ranges of Narrows in the order in which they began, the seconds of each part by the worker's own count, and
        the seconds that passed.
    """
    traced: list[tuple[list[FunctionEvent], dict[str, float], float]] = []
    with run(made(mode)) as cluster:

        def script(worker: int) -> None:
            model = build()
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            engine = cluster.sessions[worker].engine
            assert engine is not None

            def steps(count: int) -> None:
                for step in range(count):
                    optimizer.zero_grad()
                    optimizer.step(partial(backward, step))

            def backward(step: int) -> torch.Tensor:
                loss = loss_of(model, step, worker, 2)
                loss.backward()
                return loss

            steps(STEPS)
            if worker:
                steps(STEPS)
            else:
                before, began_s = dict(engine.trace.seconds), time.monotonic()
                with profile(activities=[ProfilerActivity.CPU]) as profiler:
                    steps(STEPS)
                    passed_s = time.monotonic() - began_s
                spent = {name: seconds - before[name] for name, seconds in engine.trace.seconds.items()}
                ours = [event for event in profiler.events() or [] if event.name.startswith("narrows: ")]
                traced.append(
                    (sorted(ours, key=lambda event: (event.time_range.start, -event.time_range.end)), spent, passed_s)
                )
            optimizer.finish()

        cluster.together(script)
    return traced[0]


def within(inner: FunctionEvent, outer: FunctionEvent) -> bool:
    whole, part = outer.time_range, inner.time_range
    return bool(whole.start <= part.start and part.end <= whole.end)


@pytest.mark.parametrize("mode", MODES)
def test_each_part_of_a_step_is_a_range_of_a_trace_and_has_its_seconds(mode: str) -> None:
    ranges, spent, passed_s = trained(mode)
    parts = {*PARTS} - WITHOUT.get(mode, set())
    assert {event.name for event in ranges} == {f"narrows: {name}" for name in ("step", *parts)}
    assert len({event.thread for event in ranges}) == 1
    steps = [event for event in ranges if event.name == "narrows: step"]
    assert len(steps) == STEPS
    rule, pushes = made(mode).mode(), 0
    for step in steps:
        inside = [event.name.removeprefix("narrows: ") for event in ranges if event is not step and within(event, step)]
        began = [name for name in dict.fromkeys(inside) if name in ORDER]
        assert began == ORDER[: len(began)]
        pushes += began == ORDER
        if began == ORDER and "compose" in parts and not rule.streams:
            assert inside[-1] == "compose"
            assert mode == "gossip" or "wait" in inside[inside.index("encode") :]
    assert pushes == STEPS // rule.local_steps
    for event in ranges:
        assert event in steps or any(within(event, step) for step in steps), f"{event.name} is outside of all steps"
        others = [other.name for other in ranges if other is not event and within(other, event)]
        assert event in steps or event.name == "narrows: wait" or {*others} <= {event.name}, (event.name, others)
    assert {name for name in PARTS if spent[name] > 0} == parts
    whole_s = 1e-6 * sum(step.time_range.elapsed_us() for step in steps)
    assert 0.9 * whole_s <= sum(spent.values()) <= passed_s, "parts and rest are the steps"


class Refused:
    """Stands in for record_function where none may be made."""

    def __init__(self, name: str) -> None:
        raise AssertionError(f"a range {name} without a profiler")


def test_no_range_is_made_while_no_profiler_records(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = StepTrace()
    monkeypatch.setattr(trace, "record_function", Refused)
    with spans.step, spans.wait, spans.wait:
        pass
    assert not spans.opened and not spans.ranges
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(AssertionError, match="a range narrows: encode"):
        spans.encode.__enter__()


def test_a_torch_that_does_not_say_whether_it_profiles_gets_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.autograd.profiler._is_profiler_enabled")
    monkeypatch.setattr(trace, "record_function", Refused)
    test_a_second_counts_for_the_innermost_span(monkeypatch)


def test_a_second_counts_for_the_innermost_span(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    monkeypatch.setattr(trace, "monotonic", lambda: next(now))
    spans = StepTrace()
    with spans.step, spans.wait:  # 0 to 28, 1 to 21
        with spans.fold:  # 3 to 6
            pass
        with suppress(ValueError), spans.wait:  # 10 to 15
            raise ValueError
    assert {name: seconds for name, seconds in spans.seconds.items() if seconds} == {"wait": 17, "fold": 3, "step": 8}


def test_rows_of_spans_are_kept_while_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(trace, "monotonic", lambda: next(now))
    spans = StepTrace()
    with spans.step:  # 0 to 2
        assert not spans.keep(True)  # 1
    with spans.encode:  # 3, 4: the gradient leaves early
        pass
    with spans.step, spans.wait, spans.fold:  # 5 to 10
        pass
    with spans.step:  # 11 to 13
        kept = [["encode", 3, 4], ["compute", 1, 5], ["step", 5, 10], ["wait", 6, 9], ["fold", 7, 8], ["step", 11, 11]]
        assert spans.keep(False) == kept  # without a time
    with spans.step:
        pass
    assert not spans.keep(True) and not spans.kept


def test_rows_of_spans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "ROWS_MAX", 3)
    spans = StepTrace()
    spans.keep(True)
    for _ in range(3):
        with spans.step, spans.wait:
            pass
    assert [name for name, *_ in spans.keep(False)] == ["compute", "step", "wait"] and spans.lost == 4


def test_a_profiler_may_begin_and_end_within_a_span() -> None:
    spans = StepTrace()
    profiler = profile(activities=[ProfilerActivity.CPU])
    with spans.step:
        with spans.script:
            profiler.__enter__()
            with spans.wait:
                pass
        with spans.encode:
            pass
        with spans.fold:
            profiler.__exit__(None, None, None)
    assert not spans.ranges
    assert [event.name for event in profiler.events() or []][:2] == ["narrows: wait", "narrows: encode"]
