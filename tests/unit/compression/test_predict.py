"""compression/predict.py: its closed forms, and what docs/archive/results-0.1.md measured."""

from __future__ import annotations

import pytest

from narrows.compression.predict import Cost, Link, clock_s, staleness, step_s


@pytest.mark.parametrize(("text", "rate", "delay_s"), [
    ("100mbit,20ms", 12.5e6, 0.02), ("1.5Gbit/s,500us", 187.5e6, 5e-4), ("64kbit,1s", 8e3, 1.0),
])  # fmt: skip
def test_a_link_is_read(text: str, rate: float, delay_s: float) -> None:
    assert Link.parse(text) == Link(rate, delay_s)


@pytest.mark.parametrize(
    "text", ["", "100mbit", "100,20ms", "0mbit,20ms", "100mbit,20", "-1mbit,20ms", "100mbit,20ms,"]
)
def test_what_is_no_link(text: str) -> None:
    with pytest.raises(ValueError, match="give its rate and one way's delay"):
        Link.parse(text)


def test_a_clock_is_the_sum_or_the_longest_part() -> None:
    assert clock_s(0.1, 0.2, 0.3, 0.4, window=1) == pytest.approx(1.0)
    assert clock_s(0.1, 0.2, 0.3, 0.4, window=2) == pytest.approx(0.5)
    assert clock_s(0.1, 0.2, 0.3, 0.4, window=10) == 0.3


@pytest.mark.parametrize("compute_s", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.2])
def test_the_bound_that_hides_a_link(compute_s: float, delay_s: float) -> None:
    """docs/modes.md: nobody waits once S t >= 2 (d + b / r), where b / r < t. One less, and a step is longer."""
    link, size = Link(12.5e6, delay_s), 100e3
    cost = Cost(compute_s, 0.0, size, size)
    bound = staleness(link, cost, 1000)
    assert bound * compute_s >= 2 * (delay_s + size / link.rate) - 1e-9
    assert step_s(link, cost, bound + 1) == pytest.approx(compute_s)
    assert bound == 1 or step_s(link, cost, bound) > compute_s * (1 + 1e-9)
    assert staleness(link, cost, 1) == 1


OWN_S = 0.110  # of a step with its encoding, where the link is 1 Gbit/s


# docs/archive/results-0.1.md, the byte GPT of 1.32 M parameters at 20 Mbit/s and 60 ms: kB a step each way, updates in
# flight, local steps, ms a step.
@pytest.mark.parametrize(("kilobytes", "window", "local_steps", "ms"), [
    (5594, 1, 1, 5455),  # bsp, dense
    (120, 2, 1, 185),  # ssp, s = 1, topk:0.05+int8
    (120, 3, 1, 117),
    (27, 2, 1, 132),  # ssp, s = 1, cycle:0.15+sign
    (27, 3, 1, 113),
    (119, 4, 1, 117),  # async
    (112 * 50, 1, 50, 221),  # local, the mean (README.md)
])  # fmt: skip
def test_what_was_measured(kilobytes: float, window: int, local_steps: int, ms: float) -> None:
    """The prediction is within 15 %."""
    link, size = Link.parse("20mbit,60ms"), 1e3 * kilobytes
    assert step_s(link, Cost(OWN_S, 0.0, size, size), window, local_steps) * 1e3 == pytest.approx(ms, rel=0.15)
