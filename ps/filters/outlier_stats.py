"""Compares what each worker sends with what the others send: for the console and the record, where a flag lets updates
be looked at. No I/O.

Rules
- An update is held against the newest of each other worker, scaled to length 1: each is one voice.
- All is taken at a sample of the keys. It changes nothing of the run.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.protocols.effects import Log
from narrows.ps.filters.update_sample import UpdateSample
from narrows.ps.store.changes import FloatArray

EVERY = 50  # updates of a worker that one row of the record is of


@dataclass(slots=True)
class OutlierRow:
    """The figures of one worker. `compared`: its updates that were held against others. `cosine`, `overlap`: means of
    the last EVERY of them; older ones fade."""

    unit: FloatArray  # its newest update, scaled
    kept: npt.NDArray[np.bool_]  # where that is not 0
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
        self.total = np.zeros(size, np.float64)  # of the newest updates of all
        self.holders = np.zeros(size, np.int32)  # of how many each position is kept
        self.logs: list[Log] = []

    def saw(self, looks: Sequence[UpdateSample], factors: Iterable[float]) -> None:
        """These are taken at these factors; at a barrier they are of one set, and held against each other."""
        for look in looks:
            self._newest(look)
        for look, factor in zip(looks, factors, strict=True):
            row = self.rows[look.worker]
            row.updates += 1
            row.left_out += not factor
            row.shortened += 0 < factor < 1
            if self._compare(row) and row.compared % EVERY == 0:
                self.logs.append(Log("worker", self._values(look.worker) | {"clock": look.clock}))

    def _newest(self, look: UpdateSample) -> None:
        row = self.rows.get(look.worker)
        if row is None:
            row = self.rows[look.worker] = OutlierRow(np.zeros_like(look.sample), np.zeros(look.sample.size, bool))
        length = float(np.linalg.norm(look.sample.astype(np.float64)))
        unit = look.sample / np.float32(length) if length else look.sample
        self.total += unit.astype(np.float64) - row.unit
        self.holders -= row.kept
        row.unit, row.kept = unit, look.sample != 0
        self.holders += row.kept

    def _compare(self, row: OutlierRow) -> bool:
        """Its newest update with the mean of the others' and with all that any of them keeps; False where that cannot be."""
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
        row = self.rows[worker]
        told: dict[str, object] = {"worker": worker, "shard": self.index, "updates": row.updates}
        told |= {"left_out": row.left_out, "shortened": row.shortened}
        return told | ({"cosine": round(row.cosine, 4), "overlap": round(row.overlap, 4)} if row.compared else {})

    def lines(self) -> list[str]:
        """One for each worker."""
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

    def members(self, live: Container[int]) -> None:
        """Tell of who left, and forget it."""
        for worker in [worker for worker in self.rows if worker not in live]:
            text = f"{self._line(worker)} (it has left)"
            self.logs.append(Log("worker", self._values(worker) | ({} if self.index else {"text": text})))
            row = self.rows.pop(worker)
            self.total -= row.unit
            self.holders -= row.kept
