"""The figures of a plan as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def seconds(value_s: float) -> str:
    """Return a time in seconds, or in milliseconds below 1 s."""
    return f"{value_s:.3g} s" if value_s >= 1 else f"{1e3 * value_s:.3g} ms"
