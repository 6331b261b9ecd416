"""The measured losses: what a code without a row loses, steps to a loss, and that the pages have the same figures."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from narrows.compression import losses
from narrows.compression.ladder import LADDER, bytes_of
from narrows.compression.losses import (
    DENSE_UPDATES,
    LOSSES,
    MeasuredLoss,
    by_size,
    steps_by_codes,
    steps_of,
)

DOCS = Path(__file__).parents[3] / "docs"
ROWS = (*LOSSES, DENSE_UPDATES)
INT4, SPARSE = 0.531, 0.0786  # bytes a parameter of int4 and of topk:0.11+sign


@pytest.mark.parametrize("row", [row for row in ROWS if row.own_optimizers and row.sync != "local"], ids=str)
def test_a_code_with_a_row_loses_as_its_row(row: MeasuredLoss) -> None:
    assert by_size(row.delay, bytes_of(row.compress)) == pytest.approx(row.losses)


def test_a_code_between_two_rows_is_linear_in_the_logarithm_of_its_bytes() -> None:
    """Half way between int4 and topk:0.11+sign, a clock late, and without delay between int4 and topk:0.5+sign."""
    half = math.sqrt(INT4 * SPARSE)
    assert by_size(1, half) == pytest.approx((0.012, (0.02 + 0.042) / 2, (0.047 + 0.094) / 2, (0.116 + 0.175) / 2))
    near = math.sqrt(INT4 * bytes_of("topk:0.5+sign"))
    assert by_size(0, near) == pytest.approx((0.0125, (0.01 + 0.025) / 2, (0.029 + 0.031) / 2, (0.042 + 0.058) / 2))


def test_a_code_beyond_all_rows_of_its_delay_differs_as_with_a_clock_of_delay() -> None:
    """Without delay nobody measured a cycle: one loses more than topk:0.11+sign by as much as it does a clock late."""
    cycle = bytes_of("cycle:0.15+sign")
    assert by_size(0, cycle) == pytest.approx((0.055, 0.073, 0.112, 0.177))
    # Two clocks late nobody measured dense, nor more than two workers.
    assert by_size(2, 4.0) == pytest.approx((0.01, 0.022 + 0.002, 0.022 + 0.029, 0.022 + 0.087))
    # Without a bound there is one row; and no row is later than four clocks.
    assert by_size(None, cycle) == pytest.approx((0.132, 0.166, 0.218, 0.299))
    assert by_size(9, cycle) == by_size(4, cycle)
    assert by_size(1, 1e-3) == by_size(1, bytes_of("cycle:0.03+sign"))


def test_a_sparser_rung_never_loses_less() -> None:
    for delay in (0, 1, 2, 3, 4, None):
        table = [by_size(delay, rung.bytes) for rung in LADDER]
        for column in zip(*table, strict=True):
            assert list(column) == pytest.approx(sorted(column)), delay


def test_steps_are_a_power_of_the_loss_and_none_are_saved_below_bsp() -> None:
    assert steps_of(0.145) == pytest.approx(1.145**4.7) == pytest.approx(1.89, rel=1e-2)
    assert steps_of(-0.05) == steps_of(0.0) == 1
    late = next(row for row in LOSSES if (row.compress, row.staleness) == ("topk:0.11+sign", 1))
    assert [late.steps(count) for count in (1, 2, 16)] == pytest.approx([1, 1.018**4.7, 1.175**4.7])
    assert late.steps(11) == pytest.approx((1 + 0.094 + (math.log2(11) - 3) * 0.081) ** 4.7)
    assert LOSSES[0].steps(512) == 1, "one optimizer"


def test_a_code_one_way_costs_two_thirds_of_both() -> None:
    steps = steps_by_codes(0, 16)
    assert steps(INT4, INT4) == pytest.approx(1.042**4.7) and steps(SPARSE, SPARSE) == pytest.approx(1.137**4.7)
    assert steps(SPARSE, 4.0) == steps(4.0, SPARSE) == pytest.approx((1.042 + 2 / 3 * 0.095) ** 4.7)
    assert steps_by_codes(0, 1)(SPARSE, SPARSE) == losses.alike(SPARSE, 4.0) == 1


def name_of(row: MeasuredLoss) -> str:
    """As docs/planning.md writes it."""
    flags = f" --push {row.push}" * bool(row.push) + f" --outer {row.outer}" * bool(row.outer)
    bound = f", S = {row.staleness}" if row.staleness > 0 else ""
    steps = f", H = {row.local_steps}" if row.local_steps > 0 else ""
    both = " both ways" if row.push and row.compress != "dense" else ""
    both = f", `{row.compress_down}` down" if row.compress_down else both
    return f"`{row.sync}{flags}`{bound}{steps}" + (f", `{row.compress}`{both}" if row.own_optimizers else "")


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_page_of_plans_has_each_row(row: MeasuredLoss) -> None:
    shown = row.over if row.own_optimizers else row.over * 4
    figures = ", ".join(f"{100 * loss:.3g}" for loss in shown)
    assert f"\n| {name_of(row)} | {figures} | " in (DOCS / "planning.md").read_text("utf-8")


def test_the_table_of_modes_has_the_same_figures() -> None:
    """Of each row there whose delay and code have a row here. "-" stands where nobody has measured."""
    page = (DOCS / "modes.md").read_text("utf-8").partition("## What more workers cost\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (\d)(: [^|]*)? \| `(\S+)` \|[^|]*\|((?: [^|]+ \|){4})", page, re.M)
    found = 0
    for delay, name, spec, cells in lines:
        one = "one optimizer" in name
        row = next(
            row for row in ROWS if (row.delay, row.compress, row.own_optimizers) == (int(delay), spec, not one)
            and row.sync != "local"
        )  # fmt: skip
        for cell, loss in zip(cells.split("|"), row.losses, strict=False):
            if (text := cell.strip()) != "-":
                found += 1
                assert float(text) == pytest.approx(0 if one else 100 * loss, abs=0.05), (delay, spec)
    assert found >= 15
