"""Each compressor codes 25 million normal values on one thread. The bench measures ratio, error and speed.

    python bench/speed/compressors.py  # 25 M normal values

Rules
- Figures are medians of interleaved runs: every round runs each row, once to warm up and once timed. GB/s count the
  float32 values, 4 bytes each.
- error = ||x - decode(encode(x))|| / ||x||, of one payload without error feedback.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch

from narrows.compression import accumulate, decode, indices, parse, warm_up

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

FloatArray = npt.NDArray[np.float32]
ROWS = (
    "dense", "fp16", "bf16", "int8", "int8:stochastic", "uint8minmax", "int4", "int4:stochastic", "2bit", "sign",
    "topk:0.05+int8", "topk:0.03+2bit", "topk:0.01", "topk:0.01+fp16", "topk:0.01+int8", "topk:0.01+2bit", "topk:0.001+int8",
    "mstopk:0.01", "cycle:0.15+sign", "cycle:0.15/0.24+sign", "topk:123/4096+2bit", "topk:64/4096+2bit", "topk:32/4096+2bit",
    "randk:0.01", "threshold:2.5+int8",
)  # fmt: skip


def medians(rows: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Milliseconds of each, all run once a round, each right after a run of its own that does not count.

    Cold, a row would pay for what the one before it left behind, and two threads for waking up a core.
    """
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, run in rows.items():
            run()
            begin = time.perf_counter()
            run()
            taken[name].append(1000 * (time.perf_counter() - begin))
    return {name: statistics.median(times) for name, times in taken.items()}


def encoded(spec: str, values: FloatArray) -> tuple[memoryview, float]:
    """(payload, relative error)"""
    payload = parse(spec).encode(values)
    out = np.empty_like(values)
    decode(payload, out)
    return payload, float(np.linalg.norm(values - out) / np.linalg.norm(values))


def kept_bits(payload: memoryview, count: int) -> float | None:
    """Bits a kept value, indices and scales included; None where none is kept."""
    kept = indices(payload, count)
    size = count if kept is None else kept.size
    return 8 * (len(payload) - 16) / size if size else None


def whole(recorder: record.Recorder, count: int, rounds: int) -> None:
    """Each compressor of ROWS."""
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    out, total = np.empty_like(values), np.zeros_like(values)
    for spec in ROWS:
        payload, error = encoded(spec, values)

        def encode(spec: str = spec) -> object:
            return parse(spec).encode(values)

        def read(payload: memoryview = payload) -> None:
            decode(payload, out)

        def fold(payload: memoryview = payload) -> None:
            accumulate(payload, 0.5, total)

        taken = medians({"encode": encode, "decode": read, "fold": fold}, rounds)
        figures: record.Figures = {
            "ratio": (values.nbytes / len(payload), ""),
            "bits": (kept_bits(payload, count), "a kept value"),
            "error": (error, ""),
        }
        figures |= {name: (4e-6 * count / ms, "GB/s") for name, ms in taken.items()}
        recorder.add(spec, figures, table="one thread", arguments={"values": count})


@click.command(context_settings={"show_default": True})
@click.option("--count", type=click.IntRange(min=100_000), default=25_000_000, help="float32 values")
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="of the table")
@record.out_option("speed/compressors")
def main(count: int, rounds: int, out: Path) -> None:
    """Measure the compressors of narrows.compression."""
    launch.one_thread()
    torch.set_num_threads(1)
    warm_up()
    with record.Recorder("speed/compressors", out) as recorder:
        whole(recorder, count, rounds)


if __name__ == "__main__":
    main()
