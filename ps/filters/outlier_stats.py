"""Compares the updates of each worker with those of the others, for the console and the record. No I/O.

Rules
- An update is compared with the newest update of each other worker, scaled to length 1: each worker has one vote.
- All figures are taken at a sample of the keys. They change nothing in the run.
- Updates are compared only if a flag (--max-update-norm, --robust) has the shard look at them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.protocols.effects import Log
from narrows.ps.filters.update_sample import UpdateSample
from narrows.ps.store.changes import FloatArray

EVERY = 50  # updates of a worker that one row of the record covers


@dataclass(slots=True)
class OutlierRow:
    """The figures of one worker.

    Attributes:
        unit: Its newest update at the sample, scaled to length 1.
        kept: The positions of the sample where that update is not 0.
        updates: Its updates so far.
        left_out: Those that a filter left out.
        shortened: Those that a filter shortened.
        compared: Those that were compared with others' updates.
        cosine: Mean cosine with the sum of the others' updates over the last EVERY; older ones fade.
        overlap: Mean share of its keys that another worker's update has too, in the same way.
    """

    unit: FloatArray
    kept: npt.NDArray[np.bool_]
    updates: int = 0
    left_out: int = 0
    shortened: int = 0
    compared: int = 0
    cosine: float = 0.0
    overlap: float = 0.0


class OutlierStats:
    """Compares the workers' updates on shard `index`, at the `size` positions of its sample."""

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.rows: dict[int, OutlierRow] = {}  # by worker
        self.total = np.zeros(size, np.float64)  # sum of all workers' newest updates, each scaled to length 1
        self.holders = np.zeros(size, np.int32)  # for each position: how many workers' newest updates are not 0 there
        self.logs: list[Log] = []

    def saw(self, sampled: Sequence[UpdateSample], factors: Iterable[float]) -> None:
        """Take updates and their filter factors. Updates of one set (barrier) are compared with each other."""
        for update in sampled:
            self._newest(update)
        for update, factor in zip(sampled, factors, strict=True):
            row = self.rows[update.worker]
            row.updates += 1
            row.left_out += not factor
            row.shortened += 0 < factor < 1
            if self._compare(row) and row.compared % EVERY == 0:
                self.logs.append(Log("worker", self._values(update.worker) | {"clock": update.clock}))

    def _newest(self, update: UpdateSample) -> None:
        """Make this the newest update of its worker."""
        row = self.rows.get(update.worker)
        if row is None:
            row = self.rows[update.worker] = OutlierRow(
                np.zeros_like(update.sample), np.zeros(update.sample.size, bool)
            )
        length = float(np.linalg.norm(update.sample.astype(np.float64)))
        unit = update.sample / np.float32(length) if length else update.sample
        self.total += unit.astype(np.float64) - row.unit
        self.holders -= row.kept
        row.unit, row.kept = unit, update.sample != 0
        self.holders += row.kept

    def _compare(self, row: OutlierRow) -> bool:
        """Compare this worker's newest update with the others': its cosine with their sum, the share of keys in common.

        False if there is nothing to compare.
        """
        if len(self.rows) < 2 or not row.kept.any():
            return False
        others = self.total - row.unit
        length = float(np.linalg.norm(others))
        row.compared += 1
        fades = min(row.compared, EVERY)
        row.cosine += ((float(others @ row.unit) / length if length > 1e-9 else 0.0) - row.cosine) / fades
        row.overlap += (float(np.mean(self.holders[row.kept] > 1)) - row.overlap) / fades
        return True

    def _values(self, worker: int) -> dict[str, object]:
        """Return the figures of a worker as the record has them."""
        row = self.rows[worker]
        values: dict[str, object] = {"worker": worker, "shard": self.index, "updates": row.updates}
        values |= {"left_out": row.left_out, "shortened": row.shortened}
        return values | ({"cosine": round(row.cosine, 4), "overlap": round(row.overlap, 4)} if row.compared else {})

    def lines(self) -> list[str]:
        """Return one line of text for each worker."""
        return [self._line(worker) for worker in sorted(self.rows)]

    def _line(self, worker: int) -> str:
        row = self.rows[worker]
        text = f"worker {worker}: "
        if row.compared:
            text += (
                f"its updates have a cosine of {row.cosine:.2f} with the mean of the others', and {row.overlap:.0%} of "
            )
            text += "its keys are theirs too; "
        return text + f"of {row.updates} {row.left_out} were left out and {row.shortened} shortened"

    def take(self) -> list[Log]:
        """Return the log lines since the last call."""
        found, self.logs = self.logs, []
        return found

    def members(self, live: Container[int]) -> None:
        """Log the figures of workers that have left, and forget them."""
        for worker in [worker for worker in self.rows if worker not in live]:
            text = f"{self._line(worker)} (it has left)"
            self.logs.append(Log("worker", self._values(worker) | ({} if self.index else {"text": text})))
            row = self.rows.pop(worker)
            self.total -= row.unit
            self.holders -= row.kept
