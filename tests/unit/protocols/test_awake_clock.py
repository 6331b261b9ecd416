"""Time for machines: what a process did not live through does not count."""

from __future__ import annotations

import random

from narrows.protocols.effects import NS
from narrows.protocols.runtime.network.awake_clock import TURN_NS, AwakeClock


class Wall:
    now = 5 * NS

    def __call__(self) -> int:
        return self.now


def test_turns_that_come_in_time_count_whole() -> None:
    wall = Wall()
    awake = AwakeClock(wall)
    for _ in range(100):
        wall.now += NS // 50
        assert awake.now() == awake.turn() == wall.now


def test_a_pause_counts_as_one_turn_and_time_goes_on_after_it() -> None:
    wall = Wall()
    awake = AwakeClock(wall)
    before = awake.turn()
    wall.now += 3600 * NS
    assert awake.now() == before + TURN_NS, "whoever asks before the loop is back"
    assert awake.turn() == before + TURN_NS
    wall.now += NS // 10
    assert awake.turn() == before + TURN_NS + NS // 10


def test_a_clock_that_jumps_back_stands_still_for_a_turn_at_most() -> None:
    wall = Wall()
    awake = AwakeClock(wall)
    wall.now += NS // 10
    before = awake.now()
    wall.now -= 3600 * NS
    assert awake.now() == awake.turn() == before
    for _ in range(10):
        wall.now += NS // 10
        awake.turn()
    assert before + NS - TURN_NS <= awake.now() <= before + NS


def test_it_never_goes_back() -> None:
    wall, rng = Wall(), random.Random(0)
    awake, last = AwakeClock(wall), 0
    for _ in range(1000):
        wall.now += rng.choice([0, 1, NS // 100, NS, 100 * NS, -NS, -3600 * NS])
        told = awake.turn() if rng.random() < 0.5 else awake.now()
        assert told >= last
        last = told
