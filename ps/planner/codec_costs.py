"""The costs of SPECs: bytes, the seconds of coding on a CPU and on a GPU, and the closed forms of a clock. No I/O.

Rules
- A worker codes where its parameters are, on a CPU or on a GPU. A server, that of a cluster too, codes on a CPU.
- On a GPU the figures are of a worker's whole step: difference, encode, fold and compose. All of them take the host's time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression import ladder
from narrows.compression.auto import ENCODE_NS
from narrows.compression.ladder import bytes_of
from narrows.compression.losses import LOSSES
from narrows.compression.predict import clock_s, cluster_clock_s, whole_clock_s
from narrows.ps.planner.network import Array

# Nanoseconds a parameter that a server spends on one child: it receives and folds an update, and sends a state
# (docs/archive/results-0.1.md). Dense: what a second worker adds to a step of 100 MiB, 102.0 ms instead of 60.3
# (bench/speed/transport.py). Other SPECs: the fold of int4, the slowest of them, 6.2 GB/s (bench/speed/compressors.py).
SERVE_DENSE_NS, SERVE_NS = 1.6, 0.65
# Milliseconds of a worker on an H200, for so many values (bench/gpu/h200.md, "Codes").
GPU_VALUES = (1e6, 1e7, 1e8)
GPU_MS = {
    "topk:0.01+int8": {"encode": (0.41, 0.45, 1.00), "fold": (0.40, 0.42, 0.75), "whole step": (1.48, 1.56, 2.72)},
    "topk:0.05+int8": {"encode": (0.41, 0.39, 1.70), "fold": (0.41, 0.38, 2.70), "whole step": (1.43, 1.21, 5.83)},
    "cycle:0.15+sign": {"encode": (0.30, 0.20, 0.91), "fold": (0.23, 0.16, 0.73), "whole step": (1.10, 0.72, 2.70)},
}


@dataclass(frozen=True, slots=True)
class CodecCost:
    """The costs of a SPEC for one parameter, and the closed forms of a clock."""

    bytes: float  # sent for a parameter
    encode_s: float  # seconds a parameter, of a sender on a CPU
    clock_s: Callable[[Array, Array, Array, Array, int], Array]  # (own, up, down, round trip, window) -> seconds
    serve_s: float = 0.0  # seconds a parameter, of the server for each child
    # (own, encode, up, down, round trip, window, inside) -> seconds of a clock of a cluster whose workers go on while
    # the cluster waits for its parent. None: its workers wait too.
    cluster_s: Callable[[Array, float, Array, Array, Array, int, npt.NDArray[np.intp]], Array] | None = None
    gpu: str = ""  # the SPEC of GPU_MS by which workers code on a GPU; "": they code on a CPU

    def worker_s(self, parameters: float) -> float:
        """Return the seconds that a worker takes to code an update.

        Between two of GPU_VALUES they are linear, beyond the last one as between the last two.
        """
        if not self.gpu:
            return self.encode_s * parameters
        (*_, many, most), (*_, less, more) = GPU_VALUES, GPU_MS[self.gpu]["whole step"]
        beyond = max(0.0, parameters - most) * (more - less) / (most - many)
        return 1e-3 * (float(np.interp(parameters, GPU_VALUES, GPU_MS[self.gpu]["whole step"])) + beyond)


def gpu_row(spec: str) -> str:
    """Return the SPEC of GPU_MS that stands for a SPEC: it codes in the same way, and keeps no fewer values if it can."""
    name, _, density = spec.partition("+")[0].partition(":")
    if name == "cycle":
        return "cycle:0.15+sign"
    return "topk:0.01+int8" if name == "topk" and float(density) <= 0.01 else "topk:0.05+int8"


def coded(*more: str, gpu: bool = False) -> dict[str, CodecCost]:
    """Return the cost of each SPEC of the measured losses, and of `more`.

    The bytes are those measured for `auto`'s ladder, where it has the SPEC, else an upper bound.

    Args:
        more: further SPECs.
        gpu: workers code on a GPU.

    Raises:
        SpecError: one of `more` is no SPEC.
    """
    made = {}
    for spec in sorted({*more, *(spec for row in LOSSES for spec in (row.compress, row.down))}):
        whole = ladder(spec).raw
        costs: tuple[Any, ...] = (0.0, whole_clock_s, SERVE_DENSE_NS / 1e9, None)
        if not whole:
            costs = (ENCODE_NS / 1e9, clock_s, SERVE_NS / 1e9, cluster_clock_s, gpu_row(spec) if gpu else "")
        made[spec] = CodecCost(bytes_of(spec), *costs)
    return made
