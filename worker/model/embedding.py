"""Embedding: torch.nn.Embedding(sparse=True) whose table lives on the servers of a run."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from narrows.compression.rows import first_values
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import FRAME_VALUES
from narrows.worker.runtime.child_process import NotAWorkerError, is_child
from narrows.worker.runtime.config import told


def of_run() -> bool:
    """True in a worker of a run and in its child processes."""
    return bool(told("server"))


class TableHolder(Protocol):
    """Gives an `Embedding` its rows, and takes their gradients (worker/sync/embedding_tables.py).

    In all methods `number` is the number of the table, and `numbers` are rows of it: int64[n], rising and distinct.
    look_up waits for the rows and returns float32[n, dim]. prefetch asks for rows of the next step and returns at once.
    collect keeps the gradient of the rows, [n, dim], until the next push; autograd's threads may call it.
    """

    def look_up(self, number: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]: ...

    def prefetch(self, number: int, numbers: npt.NDArray[np.int64]) -> None: ...

    def collect(self, number: int, numbers: npt.NDArray[np.int64], gradient: torch.Tensor) -> None: ...


class Embedding(torch.nn.Embedding):
    """An embedding table whose rows the servers of the run hold.

    In a script that is run as plain python it is torch.nn.Embedding(..., sparse=True). In a run this process holds no
    table, and `weight` has no row. A forward pass asks the shards for the rows of its indices, and waits for them.
    step() pushes the gradients of these rows only. The server steps the rows by the class and the hyper-parameters of
    the optimizer that has `weight`: SGD without momentum, Adagrad or SparseAdam.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: values of a row.
        sparse: must be True, as the gradients are of single rows.
        std: the standard deviation of the first values, which are normal with mean 0.
        seed: the seed of the first values, which are the same in a run and without one. None takes a seed from torch's
            generator. In a run the first worker's seed counts.
        device: the device of the rows that a forward pass returns.
        dtype: their dtype. The servers hold float32.

    Raises:
        UsageError: sparse=False, or a forward pass before DistributedOptimizer is made or after the run.
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
        """A copy of the module has no holder, and so no part in the run."""
        return self.__dict__ | {"_holder": None}

    def held_by(self, holder: TableHolder, number: int) -> None:
        """From now on take the rows from table `number` of `holder`."""
        self._holder, self._number = holder, number

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of these indices, [*input.shape, embedding_dim]. In a run the call waits for the shards."""
        if not self.of_run:
            return super().forward(input)
        holder, numbers, inverse = self._rows_of(input)
        rows = torch.from_numpy(holder.look_up(self._number, numbers)).to(self.weight)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            rows.requires_grad_()
            rows.register_hook(lambda gradient: holder.collect(self._number, numbers, gradient.detach()))
        return torch.nn.functional.embedding(inverse, rows)

    def prefetch(self, input: torch.Tensor) -> None:
        """Ask for the rows of the next step's batch while this step is computed. Call it before step().

        Args:
            input: indices of the next batch, as forward() takes them.
        """
        if self.of_run:
            holder, numbers, _ = self._rows_of(input)
            holder.prefetch(self._number, numbers)

    def _rows_of(self, input: torch.Tensor) -> tuple[TableHolder, npt.NDArray[np.int64], torch.Tensor]:
        """Return the holder, the distinct rows of `input` (int64[n], rising), and each index's position in them."""
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
