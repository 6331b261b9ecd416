"""Each compressor codes 25 million normal values on one thread. The bench measures ratio, error and speed.

    python bench/speed/compressors.py                              # a table of all, 25 M normal values
    python bench/speed/compressors.py --targets                    # selection, fold, coding beside torch.topk and one read pass

Rules
- Figures are medians of interleaved runs: every round runs each row, once to warm up and once timed. GB/s count the
  float32 values, 4 bytes each.
- error = ||x - decode(encode(x))|| / ||x||, of one payload without error feedback.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch

from narrows.compression import accumulate, decode, indices, parse, warm_up
from narrows.compression.buffers import read_only
from narrows.compression.index_codings import RICE
from narrows.compression.selection import select_top

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

FloatArray = npt.NDArray[np.float32]
ROWS = (
    "dense", "fp16", "bf16", "int8", "int8:stochastic", "uint8minmax", "int4", "int4:stochastic", "2bit", "sign",
    "topk:0.05+int8", "topk:0.03+2bit", "topk:0.01", "topk:0.01+fp16", "topk:0.01+int8", "topk:0.01+2bit", "topk:0.001+int8",
    "mstopk:0.01", "cycle:0.15+sign", "cycle:0.15/0.24+sign", "topk:123/4096+2bit", "topk:64/4096+2bit", "topk:32/4096+2bit",
    "randk:0.01", "threshold:2.5+int8",
)  # fmt: skip
TARGET_ROUNDS = 9
PARTS = "parts of mstopk:0.01, beside passes over the memory"


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


def targets(recorder: record.Recorder, count: int) -> None:
    """The speeds of selection, fold and codings beside passes over the memory, from one run."""
    rng = np.random.default_rng(0)
    values, other = rng.standard_normal(count, dtype=np.float32), np.empty(count, np.float32)
    tensor, k = torch.from_numpy(values), round(0.01 * count)
    mstopk, int8 = parse("mstopk:0.01"), parse("int8")
    payload, total = mstopk.encode(values), np.zeros(count, np.float32)
    chosen = indices(payload, count)
    assert chosen is not None and chosen.size == k
    rice = RICE.encode(chosen, *RICE.cheapest(chosen, count)[1:])
    found, half = np.empty(k, np.uint32), count // 2
    halves = [read_only(values[:half]), read_only(values[half:])]

    def decode_indices() -> None:
        RICE.check(rice.section, rice.parameter, k, count)
        RICE.reader(rice.section, rice.parameter, k, count)(0, found)

    cores = iter(sorted(os.sched_getaffinity(0)))

    def settle() -> None:
        """Each thread on a core of its own: for tasks of 3 ms the scheduler at times leaves both on one."""
        core = next(cores, None)
        if core is not None:
            os.sched_setaffinity(0, {core})  # 0: this thread

    with ThreadPoolExecutor(2, initializer=settle) as pool:
        taken = medians(
            {
                "read": lambda: np.dot(values, values),
                "copy": lambda: np.copyto(other, values),
                "torch.topk": lambda: torch.topk(tensor.abs(), k),
                "mstopk": lambda: select_top(values, k, 13),
                "topk": lambda: select_top(values, k),
                "two": lambda: list(pool.map(lambda part: select_top(part, k // 2, 13), halves)),
                "encode": lambda: mstopk.encode(values),
                "fold": lambda: accumulate(payload, 0.5, total),
                "int8": lambda: int8.encode(values),
                "rice": decode_indices,
            },
            TARGET_ROUNDS,
        )
    names = {
        "read": "one read pass (numpy.dot)",
        "copy": "one read-and-write pass (numpy.copyto)",
        "torch.topk": "torch.topk of the magnitudes",
        "mstopk": "mstopk:0.01 select",
        "topk": "topk:0.01 select, exact",
        "two": "mstopk of two halves by two threads, a core each",
        "encode": "mstopk:0.01 encode, indices coded",
        "fold": "fold of that payload",
        "int8": "int8 encode",
        "rice": "Rice decode of its indices, checked",
    }
    for name, what in names.items():
        recorder.add(
            what, {"time": (taken[name], "ms")}, table=PARTS, beside=names["read"], arguments={"values": count}
        )


def ratios(recorder: record.Recorder, count: int) -> None:
    """End-to-end ratios and index bits beside their entropy, log2 C(n, k) / k."""
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    for spec in ("topk:64/4096+2bit", "topk:32/4096+2bit", "topk:0.001+int8", "topk:0.01+int8", "topk:0.05+int8"):
        payload = parse(spec).encode(values)
        chosen = indices(payload, count)
        assert chosen is not None
        k = chosen.size
        value_bytes = k + 2 * -(-k // 256) if "int8" in spec else 3 * -(-k // 512) + 2 * -(-k // 8)
        n, per = (4096, int(spec[5:7])) if "/" in spec else (count, k)
        entropy = (math.lgamma(n + 1) - math.lgamma(per + 1) - math.lgamma(n - per + 1)) / math.log(2) / per
        bits = 8 * (len(payload) - 16 - value_bytes) / k
        figures: record.Figures = {"ratio": (values.nbytes / len(payload), ""), "bits": (bits, "an index")}
        figures |= {"entropy": (entropy, "bits an index")}
        recorder.add(spec, figures, table="bits of an index", arguments={"values": count})


@click.command(context_settings={"show_default": True})
@click.option("--count", type=click.IntRange(min=100_000), default=25_000_000, help="float32 values")
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="of the table")
@click.option("--targets", "show_targets", is_flag=True, help="speeds beside torch.topk and memory passes, and ratios")
@record.out_option("speed/compressors")
def main(count: int, rounds: int, show_targets: bool, out: Path) -> None:
    """Measure the compressors of narrows.compression."""
    launch.one_thread()
    torch.set_num_threads(1)
    warm_up()
    with record.Recorder("speed/compressors", out) as recorder:
        if show_targets:
            targets(recorder, count)
            ratios(recorder, count)
        else:
            whole(recorder, count, rounds)


if __name__ == "__main__":
    main()
