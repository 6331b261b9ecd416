"""Embedding: torch.nn.Embedding(sparse=True) whose table lives on the servers of a run."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from narrows.compression.rows import first_values
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import FRAME_VALUES
from narrows.worker.runtime.child_process import SERVER, NotAWorkerError, is_child


def of_run() -> bool:
    """This process is a worker of a run, or a child process of one: session.py looks at the same variable."""
    return bool(os.environ.get(SERVER))


class TableHolder(Protocol):
    """The owner of a table's rows in this process (worker/sync/embedding_tables.py)."""

    def look_up(self, number: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]: ...

    def prefetch(self, number: int, numbers: npt.NDArray[np.int64]) -> None: ...

    def collect(self, number: int, numbers: npt.NDArray[np.int64], gradient: torch.Tensor) -> None: ...


class Embedding(torch.nn.Embedding):
    """A table of num_embeddings rows, float32[embedding_dim] each, that begin normal with deviation `std`.

    Run as plain python it is torch.nn.Embedding(..., sparse=True). In a run this process holds no table: `weight` has no row.
    A forward pass asks the shards for the rows of its indices, and waits for them; step() pushes gradients of these rows alone.
    The server steps them, by the class and the hyper-parameters of the optimizer that has `weight`: SGD without momentum,
    Adagrad or SparseAdam. `seed`: the first values of all rows follow from it, in a run and alone; None: torch's generator
    gives one. In a run that of the first worker counts.

    Raises UsageError for sparse=False, and for a forward pass before DistributedOptimizer was made or after the run.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        sparse: bool = True,
        std: float = 1.0,
        seed: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not sparse:
            raise UsageError(
                "Embedding(sparse=False): rows travel as rows; use torch.nn.Embedding for a dense gradient"
            )
        self.of_run = of_run()
        rows = 0 if self.of_run else num_embeddings
        seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        weight = torch.empty(rows, embedding_dim)
        for begin in range(0, rows, block := max(1, FRAME_VALUES // embedding_dim)):
            numbers = np.arange(begin, min(begin + block, rows), dtype=np.uint64)
            weight[begin : begin + block] = torch.from_numpy(first_values(numbers, embedding_dim, seed, std))
        super().__init__(rows, embedding_dim, sparse=True, _weight=weight.to(device=device, dtype=dtype))
        self.num_embeddings, self.std, self.seed = num_embeddings, float(std), seed
        self._holder: TableHolder | None = None
        self._number = -1

    def __getstate__(self) -> dict[str, Any]:
        """A copy is of no run."""
        return self.__dict__ | {"_holder": None}

    def held_by(self, holder: TableHolder, number: int) -> None:
        """From now on its rows are those of table `number` there."""
        self._holder, self._number = holder, number

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of these indices, [*input.shape, embedding_dim]."""
        if not self.of_run:
            return super().forward(input)
        holder, numbers, inverse = self._rows_of(input)
        rows = torch.from_numpy(holder.look_up(self._number, numbers)).to(self.weight)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            rows.requires_grad_()
            rows.register_hook(lambda gradient: holder.collect(self._number, numbers, gradient.detach()))
        return torch.nn.functional.embedding(inverse, rows)

    def prefetch(self, input: torch.Tensor) -> None:
        """Ask for the rows of the next step while this one is computed: call it before step()."""
        if self.of_run:
            holder, numbers, _ = self._rows_of(input)
            holder.prefetch(self._number, numbers)

    def _rows_of(self, input: torch.Tensor) -> tuple[TableHolder, npt.NDArray[np.int64], torch.Tensor]:
        """Who has the rows; which differ, rising; and the place of each index among these."""
        if is_child():
            raise NotAWorkerError("a forward pass of an Embedding, whose table is on the servers,")
        if self._holder is None:
            raise UsageError(
                "Embedding: its table is on the servers, and this process has no part in the run yet: make "
                "DistributedOptimizer before the first forward pass"
            )
        found, inverse = torch.unique(input, return_inverse=True)
        numbers = found.to("cpu", torch.int64).numpy()
        if numbers.size and not 0 <= numbers[0] <= numbers[-1] < self.num_embeddings:
            wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
            raise IndexError(f"index {wrong} of an embedding table of {self.num_embeddings} rows")
        return self._holder, numbers, inverse
