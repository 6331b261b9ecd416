"""The tables of docs/modes.md that sum up bench/results/: each figure is that of a line there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
MODES = (ROOT / "docs" / "modes.md").read_text("utf-8")


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "bench" / "results" / f"{name}.jsonl").read_text("utf-8").splitlines()]


def losses(found: list[dict[str, Any]]) -> list[float]:
    return [line["figures"]["loss"]["value"] for line in found if "loss" in line["figures"]]


def table(after: str) -> list[list[str]]:
    """The cells of the first table after this text, without its head."""
    rows = MODES.partition(after)[2].partition("\n|")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def quarters(line: dict[str, Any]) -> list[float]:
    """The losses of a run after a quarter, a half, three quarters and all of its steps."""
    return [line["figures"][name]["value"] for name in ("at a quarter", "at a half", "at three quarters", "loss")]


def test_the_gaps_of_weak_scaling_are_those_of_the_best_rates() -> None:
    jobs, found = [line for line in lines("run_jobs") if "loss" in line["figures"]], 0
    for windows, *cells in table("**Weak scaling.**"):
        for workers, cell in zip((2, 4, 8, 16), cells, strict=True):
            heading = f"weak scaling: the small model, {windows} windows a worker, {workers} workers"
            ours = [line for line in jobs if line.get("table") == heading]
            bsp, late = (
                quarters(
                    min(
                        (line for line in ours if line["arguments"]["mode"] == mode),
                        key=lambda line: quarters(line)[-1],
                    )
                )
                for mode in ("bsp", "updates")
            )
            gap, steps = re.fullmatch(r"([\d.]+) \(([\d.]+)\)", cell).groups()  # type: ignore[union-attr]
            assert float(gap) == pytest.approx(100 * (late[-1] / bsp[-1] - 1), abs=0.06), heading
            reached = np.interp(-late[-1], [-loss for loss in bsp], (0.25, 0.5, 0.75, 1.0))
            assert float(steps) == pytest.approx(1 / reached, abs=0.006), heading
            found += 1
    assert found == 12


@pytest.mark.parametrize(
    ("after", "name"),
    [("Loss, and in % over `bsp`, with .8 for each", "run_jobs"), ("Real runs with .8", "convergence")],
)
def test_the_losses_of_many_workers_are_those_of_lines(after: str, name: str) -> None:
    known, rows, found = lines(name), table(after), 0
    assert rows[0][0] == "`bsp`, `dense`"
    dense, counts = [float(cell) for cell in rows[0] if re.fullmatch(r"\d\.\d{3}", cell)], (2, 4, 8, 16)
    for _, *cells in rows:
        for workers, cell, least in zip(counts[-len(dense) :], cells[-len(dense) :], dense, strict=True):
            if cell == "-":
                continue
            loss, over = re.fullmatch(r"(\d\.\d{3})(?: \(\+([\d.]+)\))?", cell).groups()  # type: ignore[union-attr]
            heading = f"many: bytelm, {workers} workers, each at its best rate"
            ours = [
                line
                for line in known
                if line["arguments"].get("workers") == workers or line.get("table", "").startswith(heading)
            ]
            found += 1
            assert any(abs(float(loss) - value) < 6e-4 for value in losses(ours)), (workers, cell)
            assert float(over or 0) == pytest.approx(100 * (float(loss) / least - 1), abs=0.08), (workers, cell)
    assert found >= 9
