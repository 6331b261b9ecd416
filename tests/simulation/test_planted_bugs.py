"""Bugs that are planted in a campaign: each is found by that one of its first thousand runs which docs/simulation.md names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simulation.planted_bugs import WITHIN, says
from simulation.run_kinds import mixed, shares

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
ROWS = re.findall(r"^\| (.+) \| (\d+) \| (\d+) of (\w+) \|$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("bug", "run", "seed", "kind"), ROWS, ids=[row[0] for row in ROWS])
def test_a_campaign_finds_it(bug: str, run: str, seed: str, kind: str) -> None:
    assert mixed(shares(WITHIN))[int(run) - 1][:2] == (kind, int(seed))
    assert says(bug, kind, int(seed))


def test_there_are_as_many_as_is_said() -> None:
    assert len(ROWS) == 25
