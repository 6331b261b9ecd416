"""Figures of a plan for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def seconds(value_s: float) -> str:
    return f"{value_s:.3g} s" if value_s >= 1 else f"{1e3 * value_s:.3g} ms"
