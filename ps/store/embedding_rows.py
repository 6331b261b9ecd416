"""The embedding rows of one shard: their values, and the state of the optimizer that steps them. No I/O.

How it works

    row r of a table   is on shard r % shards, there at place r // shards
    TableRows          values float32[places, dim], optimizer state of the same shape, held bool[places]

1. A worker asks for the rows that a batch looks up (`read`). A row that no gradient has touched is not
   held: its first values are computed from the table's seed and the row number when it is read.
2. A change of the store carries gradients of rows beside those of keys (`fold`). The shard sums the gradients of each
   row, and takes one step of the table's optimizer (`STEPS`) at these rows alone. A row is held from its first step on.
3. A checkpoint has the held rows of each table (`arrays`), and a resharding deals them out again (`recut`).

Rules
- Rows are stepped one by one and lazily: a row without a gradient stays as it is, as in torch.optim with sparse
  gradients.
- Each update counts as one step of every table, even if it has no row of this shard: all shards count alike.
- Gradients of a row that come from several updates of one change are summed first, in the order of the updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression import PayloadError, rows
from narrows.compression.codecs import PieceLike
from narrows.protocols.config.embedding_spec import ROWWISE, TableSpec, rows_of, unpack_rates
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages import Buffer
from narrows.ps.store.changes import FloatArray

PREFIX = "table."  # names of a checkpoint's arrays: table.NUMBER.NAME
# arrays that are not float32
COUNTS: dict[str, np.dtype[Any]] = {"rows": np.dtype(np.uint32), "steps": np.dtype(np.int64)}
Arrays = dict[str, npt.NDArray[Any]]


class TableRows:
    """The rows of one table on shard `shard` of `shards`.

    The arrays are as long as the shard's part of the table. The operating system gives memory to a page only when it is
    first written.
    """

    def __init__(self, spec: TableSpec, shard: int, shards: int) -> None:
        self.spec, self.shard, self.shards = spec, shard, shards
        self.count = rows_of(spec.rows, shard, shards)
        shape = (self.count, spec.dim)
        self.values: FloatArray = np.zeros(shape, np.float32)
        self.state = {name: np.zeros(shape, np.float32) for name in ROWWISE[spec.optimizer].state}
        self.held = np.zeros(self.count, np.bool_)
        self.touched = self.steps = 0  # number of held rows; number of updates so far

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the held rows alone: a copy of the rest would be memory that is all zero."""
        return self.spec, self.shard, self.shards, self.arrays()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        spec, shard, shards, arrays = state
        self.__init__(spec, shard, shards)  # type: ignore[misc]
        self.load(arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the held rows and their optimizer state."""
        return 4 * self.touched * self.spec.dim * (1 + len(self.state))

    def read(self, at: npt.NDArray[Any]) -> FloatArray:
        """Return the rows at these places, float32[n, dim]. The places are distinct."""
        found: FloatArray = self.values[at]
        fresh = ~self.held[at]
        if fresh.any():
            found[fresh] = self._first(at[fresh])
        return found

    def _first(self, at: npt.NDArray[Any]) -> FloatArray:
        """Return the values that rows at these places begin with."""
        numbers = at.astype(np.uint64) * np.uint64(self.shards) + np.uint64(self.shard)
        return rows.first_values(numbers, self.spec.dim, self.spec.seed, self.spec.std)

    def count_step(self) -> None:
        """Count one update. It is an update of the table too if it has no gradient of the table's rows."""
        self.steps += 1

    def step(self, at: npt.NDArray[Any], gradient: FloatArray, rates: Mapping[str, Any]) -> None:
        """Take one step of the rows at distinct places `at` along `gradient`, float32[n, dim]."""
        fresh = at[~self.held[at]]
        self.values[fresh], self.held[fresh] = self._first(fresh), True
        self.touched += fresh.size
        if "initial_accumulator_value" in rates:
            self.state["sum"][fresh] = rates["initial_accumulator_value"]
        self.values[at] += STEPS[self.spec.optimizer](self, at, gradient, rates)

    def arrays(self) -> Arrays:
        """Return copies of the held rows: places (uint32, ascending), and the values and optimizer state there."""
        at = np.flatnonzero(self.held).astype(COUNTS["rows"])
        state = {name: array[at] for name, array in self.state.items()}
        return {"rows": at, "values": self.values[at], "steps": np.array([self.steps], COUNTS["steps"]), **state}

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take over these arrays in a table that holds nothing yet."""
        at = arrays["rows"]
        self.values[at], self.held[at], self.touched = arrays["values"], True, at.size
        self.steps = int(arrays["steps"][0])
        for name, array in self.state.items():
            array[at] = arrays[name]


def _sgd(table: TableRows, at: npt.NDArray[Any], gradient: FloatArray, rates: Mapping[str, Any]) -> FloatArray:
    return np.float32(-rates["lr"]) * gradient


def _adagrad(table: TableRows, at: npt.NDArray[Any], gradient: FloatArray, rates: Mapping[str, Any]) -> FloatArray:
    total = table.state["sum"][at] + gradient * gradient
    table.state["sum"][at] = total
    moved: FloatArray = np.float32(-rates["lr"]) * (gradient / (np.sqrt(total) + np.float32(rates["eps"])))
    return moved


def _sparse_adam(table: TableRows, at: npt.NDArray[Any], gradient: FloatArray, rates: Mapping[str, Any]) -> FloatArray:
    beta1, beta2 = rates["betas"]
    mean, square = table.state["exp_avg"][at], table.state["exp_avg_sq"][at]
    mean += np.float32(1 - beta1) * (gradient - mean)
    square += np.float32(1 - beta2) * (gradient * gradient - square)
    table.state["exp_avg"][at], table.state["exp_avg_sq"][at] = mean, square
    rate = rates["lr"] * math.sqrt(1 - beta2**table.steps) / (1 - beta1**table.steps)
    moved: FloatArray = np.float32(-rate) * (mean / (np.sqrt(square) + np.float32(rates["eps"])))
    return moved


# The change of rows, float32[n, dim], for each class in ROWWISE, as torch.optim computes it with sparse gradients.
STEPS: dict[str, Callable[[TableRows, npt.NDArray[Any], FloatArray, Mapping[str, Any]], FloatArray]] = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "SparseAdam": _sparse_adam,
}


class EmbeddingRows:
    """All embedding rows of one shard. Raises RemoteProtocolError for a message that names no row of this shard."""

    def __init__(self, specs: Sequence[TableSpec] = (), shard: int = 0, shards: int = 1) -> None:
        """Tables that hold no row yet.

        Args:
            specs: The tables of the model.
            shard: The number of this shard.
            shards: The number of shards.
        """
        self.specs = tuple(specs)
        self.tables = [TableRows(spec, shard, shards) for spec in self.specs]

    @property
    def nbytes(self) -> int:
        """Bytes of all held rows and their optimizer state."""
        return sum(table.nbytes for table in self.tables)

    def opened(self, payload: Buffer, *, asks: bool = False) -> rows.CodedRows:
        """Decode and check rows of one of these tables.

        Args:
            payload: The payload of a push of rows, or of a request for rows.
            asks: True for a request: it has row numbers and no values.

        Raises:
            RemoteProtocolError: The payload does not decode, or does not fit the table.
        """
        try:
            found = rows.decode(payload)
        except PayloadError as error:
            raise RemoteProtocolError(f"an invalid payload: {error}") from None
        if found.table >= len(self.tables):
            raise RemoteProtocolError(f"rows of table {found.table}: the model has {len(self.tables)} tables")
        table = self.tables[found.table]
        given, wanted = (found.count, found.values.shape[1]), (table.count, 0 if asks else table.spec.dim)
        if given != wanted or found.indices.size > table.spec.ask_rows_max:
            raise RemoteProtocolError(
                f"{found.indices.size} of {given[0]} rows of {given[1]} values: this shard has {wanted[0]} of {wanted[1]} of "
                f"table {table.spec.name!r}, and takes {table.spec.ask_rows_max} at once"
            )
        return found

    def check_rates(self, packed: bytes) -> None:
        """Raise RemoteProtocolError for hyper-parameters that a step would refuse."""
        unpack_rates(packed, self.specs)

    def read(self, payload: Buffer) -> bytes:
        """Return the rows that a request names, [n, dim], in the coding that it names.

        The last byte names the coding that the values really have.
        """
        found = self.opened(payload, asks=True)
        body, coding = rows.encode_values(self.tables[found.table].read(found.indices), found.coding)
        return body + bytes((coding,))

    def fold(self, pieces: Sequence[tuple[float, PieceLike]], packed: bytes) -> None:
        """Take one step of each table.

        Args:
            pieces: (weight, coded gradient of rows); the step goes along the sum of weight * gradient.
            packed: The hyper-parameters of the tables. b"": no worker has named any, and no row is stepped.
        """
        if not packed:
            return
        by_table: dict[int, list[tuple[float, rows.CodedRows]]] = {}
        for weight, piece in pieces:
            found = rows.decode(piece.payload)
            by_table.setdefault(found.table, []).append((weight, found))
        for number, (table, rates) in enumerate(zip(self.tables, unpack_rates(packed, self.specs), strict=True)):
            table.count_step()
            if number in by_table:
                # As in torch, an overflow is no error here: it shows where the values are used.
                with np.errstate(over="ignore", invalid="ignore"):
                    table.step(*_summed(by_table[number]), rates)

    def arrays(self) -> Arrays:
        """Return all tables as a checkpoint holds them."""
        return {
            f"{PREFIX}{number}.{name}": array
            for number, table in enumerate(self.tables)
            for name, array in table.arrays().items()
        }

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Begin from the arrays of a checkpoint; a table that the checkpoint lacks begins empty."""
        for number, table in enumerate(self.tables):
            table.__init__(table.spec, table.shard, table.shards)  # type: ignore[misc]
            if f"{PREFIX}{number}.rows" in arrays:
                table.load(_of(arrays, number))


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a checkpoint's array by its name: float32, except for the rows and steps of tables."""
    floats = np.dtype(np.float32)
    return COUNTS.get(name.rpartition(".")[2], floats) if name.startswith(PREFIX) else floats


def _summed(terms: Sequence[tuple[float, rows.CodedRows]]) -> tuple[npt.NDArray[Any], FloatArray]:
    """Return distinct places, and the sum of weight * values at each."""
    at = np.unique(np.concatenate([found.indices for _, found in terms]))
    total = np.zeros((at.size, terms[0][1].values.shape[1]), np.float32)
    for weight, found in terms:
        total[np.searchsorted(at, found.indices)] += np.float32(weight) * found.values
    return at, total


def _of(arrays: Mapping[str, npt.NDArray[Any]], number: int) -> Arrays:
    prefix = f"{PREFIX}{number}."
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def recut(before: Sequence[Mapping[str, npt.NDArray[Any]]], tables: int, shard: int, shards: int) -> Arrays:
    """Make the tables of one shard from those of all shards of another split.

    Args:
        before: The arrays of each shard of the earlier split, in the order of the shards.
        tables: The number of tables.
        shard: The number of the new shard.
        shards: The number of new shards.

    Returns:
        The arrays of the new shard, as `EmbeddingRows.arrays` gives them.
    """
    made: Arrays = {}
    for number in range(tables):
        parts = []
        for index, arrays in enumerate(before):
            part = _of(arrays, number)
            whole = part["rows"].astype(np.uint64) * np.uint64(len(before)) + np.uint64(index)
            ours, steps = whole % np.uint64(shards) == shard, part.pop("steps")
            parts.append({name: array[ours] for name, array in (part | {"rows": whole // np.uint64(shards)}).items()})
        order = np.argsort(np.concatenate([part["rows"] for part in parts]))
        for name in parts[0]:
            made[f"{PREFIX}{number}.{name}"] = np.concatenate([part[name] for part in parts])[order]
        made[f"{PREFIX}{number}.rows"] = made[f"{PREFIX}{number}.rows"].astype(COUNTS["rows"])
        made[f"{PREFIX}{number}.steps"] = steps
    return made
