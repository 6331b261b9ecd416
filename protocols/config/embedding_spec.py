"""Embedding tables that live on the servers: their declaration, the shard of each row, and the optimizers of rows.

Rules
- Shard i of n has the rows r with r % n == i, as its rows r // n. So a vocabulary sorted by frequency loads all shards
  alike.
- Rows are not keys. No worker holds a whole table, and no publication carries one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from narrows.protocols.config.modes import FoldRule, Mode
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import FRAME_VALUES, unpack

TABLES_MAX = 1 << 10  # of one model
ROWS_MAX = 1 << 32  # of one table: the index of a row on its shard has 32 bits
DIM_MAX = 1 << 14  # values of a row: a frame then has room for at least 32 rows
ASKS_MAX = 64  # unanswered RowsRequest of one worker that a shard keeps


@dataclass(frozen=True, slots=True)
class RowwiseOptimizer:
    """How a class of torch.optim steps rows."""

    sent: tuple[str, ...]  # hyper-parameters that travel with a push
    off: tuple[str, ...]  # hyper-parameters that must be 0: they move rows without a gradient, or torch refuses them
    state: tuple[str, ...]  # names of the optimizer's arrays, each of the table's shape


ROWWISE = {
    "SGD": RowwiseOptimizer(("lr",), ("momentum", "weight_decay", "maximize"), ()),
    "Adagrad": RowwiseOptimizer(
        ("lr", "eps", "initial_accumulator_value"), ("lr_decay", "weight_decay", "maximize"), ("sum",)
    ),
    "SparseAdam": RowwiseOptimizer(("lr", "betas", "eps"), ("maximize",), ("exp_avg", "exp_avg_sq")),
}


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table, float32[rows, dim]."""

    name: str
    rows: int
    dim: int
    seed: int  # with the number of a row it gives the row's first values (compression/rows.py)
    std: float  # of the first values, which are normal
    optimizer: str  # a key of ROWWISE

    @property
    def size(self) -> int:
        """The largest number of values that a server may hold for this table, optimizer state included."""
        return self.rows * self.dim * (1 + len(ROWWISE[self.optimizer].state))

    @property
    def ask_rows_max(self) -> int:
        """The largest number of rows in one RowsRequest or one part of a push: their values fill a frame."""
        return FRAME_VALUES // self.dim

    def check(self) -> None:
        """Raise RemoteProtocolError if a field is out of its range."""
        if not 0 < self.rows <= ROWS_MAX or not 0 < self.dim <= DIM_MAX:
            raise RemoteProtocolError(
                f"table {self.name!r} has {self.rows} rows of {self.dim} values: give 1 to {ROWS_MAX} rows of 1 to {DIM_MAX}"
            )
        if self.optimizer not in ROWWISE or not 0 <= self.std < math.inf:
            raise RemoteProtocolError(
                f"table {self.name!r} has optimizer {self.optimizer[:60]!r} and deviation {self.std}: give one of "
                f"{', '.join(ROWWISE)} and a deviation from 0 on"
            )


def rows_of(rows: int, shard: int, shards: int) -> int:
    """Return how many of a table's `rows` shard number `shard` of `shards` has."""
    return (rows - shard + shards - 1) // shards


def why_not(settings: Settings, mode: Mode, levels: bool) -> str:
    """Return why a run of these settings cannot have tables, one sentence; "" if it can.

    Args:
        settings: of the run.
        mode: the resolved mode.
        levels: the server has a parent.
    """
    reasons = (
        (
            mode.rule in (FoldRule.MIX, FoldRule.OUTER),
            f"--sync {mode.name} pushes no gradient, and rows are pushed as gradients",
        ),
        (levels, "a parent takes updates of keys, not of rows: leave out --parent"),
        (bool(settings.robust), "--robust compares updates key by key, and rows are no keys"),
        (settings.max_update_norm > 0, "--max-update-norm looks at keys alone, and rows are no keys"),
        (settings.dp_clip > 0, "--dp-clip hides updates of keys alone, and which rows are touched shows the data"),
    )
    return next((f"the model has an embedding table on the servers, but {why}" for found, why in reasons if found), "")


def unpack_rates(packed: bytes, tables: tuple[TableSpec, ...]) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each table's optimizer.

    Raises:
        RemoteProtocolError: a value is missing, unknown, or out of range.
    """
    said = unpack(packed)
    if not isinstance(said, list) or len(said) != len(tables):
        raise RemoteProtocolError(f"hyper-parameters of rows are a list with one map for each of {len(tables)} tables")
    for spec, values in zip(tables, said, strict=True):
        if not isinstance(values, dict) or set(values) != {*ROWWISE[spec.optimizer].sent}:
            raise RemoteProtocolError(
                f"hyper-parameters of table {spec.name!r} are {', '.join(ROWWISE[spec.optimizer].sent)}"
            )
        for name, value in values.items():
            if not RANGES[name](value):
                raise RemoteProtocolError(
                    f"{name}={str(value)[:60]} of table {spec.name!r} is no value that a step can have"
                )
    return said


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _betas(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_number(beta) and beta < 1 for beta in value)


RANGES = {"lr": _number, "eps": _number, "initial_accumulator_value": _number, "betas": _betas}
