"""Every compressor on this machine: ratio, error, speed; one thread, BLAS and torch pinned to it.

    python bench/speed/compressors.py                              # a table of all, 25 M normal values
    python bench/speed/compressors.py --targets                    # selection, fold, coding beside torch.topk and one read pass
    python bench/speed/compressors.py --plot docs/compression.png  # ratio against error, of noise and of a GPT's gradients

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
from typing import Any

import click
import numpy as np
import numpy.typing as npt
import torch

from narrows.compression import accumulate, decode, indices, parse, warm_up
from narrows.compression.buffers import read_only
from narrows.compression.index_codings import RICE
from narrows.compression.selection import select_top

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

from lab import launch

FloatArray = npt.NDArray[np.float32]
ROWS = (
    "dense", "fp16", "bf16", "int8", "int8:stochastic", "uint8minmax", "int4", "int4:stochastic", "2bit", "sign",
    "topk:0.05+int8", "topk:0.03+2bit", "topk:0.01", "topk:0.01+fp16", "topk:0.01+int8", "topk:0.01+2bit", "topk:0.001+int8",
    "mstopk:0.01", "cycle:0.15+sign", "cycle:0.15/0.24+sign", "topk:123/4096+2bit", "topk:64/4096+2bit", "topk:32/4096+2bit",
    "randk:0.01", "threshold:2.5+int8",
)  # fmt: skip
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
TARGET_ROUNDS = 9


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


def kept_bits(spec: str, payload: memoryview, count: int) -> str:
    """Bits a kept value, indices and scales included."""
    kept = indices(payload, count)
    size = count if kept is None else kept.size
    return "-" if not size else f"{8 * (len(payload) - 16) / size:.2f}"


def table(count: int, rounds: int) -> list[str]:
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    out, total = np.empty_like(values), np.zeros_like(values)
    lines = [
        "| SPEC | ratio | bits a kept value | unbiased | state | error | encode, GB/s | decode | fold |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    gigabytes = 4e-9 * count
    for spec in ROWS:
        compressor = parse(spec)
        payload, error = encoded(spec, values)
        state = "none" if compressor.lossless else "residual"

        def encode(spec: str = spec) -> object:
            return parse(spec).encode(values)

        def read(payload: memoryview = payload) -> None:
            decode(payload, out)

        def fold(payload: memoryview = payload) -> None:
            accumulate(payload, 0.5, total)

        taken = medians({"encode": encode, "decode": read, "fold": fold}, rounds)
        speeds = " | ".join(f"{gigabytes / (taken[name] / 1000):.1f}" for name in ("encode", "decode", "fold"))
        lines.append(
            f"| `{spec}` | {values.nbytes / len(payload):.1f} | {kept_bits(spec, payload, count)} | "
            f"{'yes' if compressor.unbiased else 'no'} | {state} | {error:.3f} | {speeds} |"
        )
    return lines


def targets(count: int) -> list[str]:
    """The speeds of selection, fold and codings beside their aims, from one run."""
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
        RICE.open(rice.section, rice.parameter, k, count)(0, found)

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
    t = taken
    rows = [
        ("one read pass (numpy.dot)", "read", ""),
        ("one read-and-write pass (numpy.copyto)", "copy", ""),
        ("`torch.topk` of the magnitudes", "torch.topk", ""),
        ("mstopk:0.01 select", "mstopk", f"{t['torch.topk'] / t['mstopk']:.0f}x torch.topk (20), "
         f"{t['mstopk'] / t['read']:.1f} read passes (6; 3)"),
        ("topk:0.01 select, exact", "topk", f"{t['torch.topk'] / t['topk']:.0f}x, {t['topk'] / t['read']:.1f} read passes"),
        ("mstopk of two halves by two threads, a core each", "two", f"{t['mstopk'] / t['two']:.2f}x one thread (1)"),
        ("mstopk:0.01 encode, indices coded", "encode", ""),
        ("fold of that payload", "fold", "(2 ms)"),
        ("int8 encode", "int8", f"{t['int8'] / t['copy']:.1f} read-and-write passes (3)"),
        ("Rice decode of its indices, checked", "rice", f"{k / t['rice'] / 1000:.0f} M indices/s (200)"),
    ]  # fmt: skip
    lines = ["| what | ms | beside (aim) |", "|---|---|---|"]
    return [*lines, *(f"| {what} | {t[name]:.2f} | {beside} |" for what, name, beside in rows)]


def ratios(count: int) -> list[str]:
    """End-to-end ratios and index bits beside their entropy."""
    values = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    lines = ["| SPEC | ratio | index bits | entropy, log2 C(n, k) / k |", "|---|---|---|---|"]
    for spec in ("topk:64/4096+2bit", "topk:32/4096+2bit", "topk:0.001+int8", "topk:0.01+int8", "topk:0.05+int8"):
        payload = parse(spec).encode(values)
        chosen = indices(payload, count)
        assert chosen is not None
        k = chosen.size
        value_bytes = k + 2 * -(-k // 256) if "int8" in spec else 3 * -(-k // 512) + 2 * -(-k // 8)
        n, per = (4096, int(spec[5:7])) if "/" in spec else (count, k)
        entropy = (math.lgamma(n + 1) - math.lgamma(per + 1) - math.lgamma(n - per + 1)) / math.log(2) / per
        bits = 8 * (len(payload) - 16 - value_bytes) / k
        lines.append(f"| `{spec}` | {values.nbytes / len(payload):.1f} | {bits:.3f} | {entropy:.3f} |")
    return lines


def gpt_gradients() -> FloatArray:
    """The gradients of the byte GPT after a few steps."""
    import bytelm

    torch.manual_seed(0)
    model = bytelm.ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = bytelm.library()[0]
    for step in range(20):
        optimizer.zero_grad()
        bytelm.loss_sum(model, bytelm.batch_rows(text, 0, step, 16, 64)).backward()
        optimizer.step()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])


FAMILIES: dict[str, tuple[str, ...]] = {
    "casts and quantizers": ("fp16", "int8", "uint8minmax", "int4", "2bit", "sign"),
    "topk + fp32": ("topk:0.2", "topk:0.1", "topk:0.05", "topk:0.02", "topk:0.01", "topk:0.005", "topk:0.001"),
    "topk + int8": tuple(f"topk:{d}+int8" for d in (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)),
    "topk + 2bit": tuple(f"topk:{d}+2bit" for d in (0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001)),
    "topk K/4096 + 2bit": tuple(f"topk:{k}/4096+2bit" for k in (512, 246, 123, 64, 32, 16)),
    "cycle + sign": tuple(f"cycle:{d}+sign" for d in (1.0, 0.5, 0.25, 0.15, 0.06, 0.03, 0.01)),
    "cycle, a fifth of it, + sign": tuple(f"cycle:{d}/0.2+sign" for d in (1.0, 0.5, 0.25, 0.15, 0.06, 0.03, 0.01)),
    "randk + fp32, unscaled": ("randk:0.2", "randk:0.05", "randk:0.01", "randk:0.001"),
}


def plot(path: Path) -> None:
    """One panel for noise, one for gradients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    noise = np.random.default_rng(0).standard_normal(1 << 21, dtype=np.float32)
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for axis, (name, values) in zip(
        axes, (("normal values", noise), ("gradients of the byte GPT", gpt_gradients())), strict=True
    ):
        for family, specs in FAMILIES.items():
            points = []
            for spec in specs:
                payload = parse(spec).contraction().encode(values)
                out = np.empty_like(values)
                decode(payload, out)
                points.append((values.nbytes / len(payload), np.linalg.norm(values - out) / np.linalg.norm(values)))
            axis.plot(*zip(*points, strict=True), marker="o", markersize=4, linewidth=1.2, label=family)
        axis.set(xscale="log", xlabel="ratio: raw bytes / payload bytes", title=name, ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative error of one payload")
    axes[1].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


@click.command(context_settings={"show_default": True})
@click.option("--count", type=click.IntRange(min=100_000), help="float32 values; 25 million by default")
@click.option("--rounds", type=click.IntRange(min=1), default=5, help="of the table")
@click.option("--targets", "show_targets", is_flag=True, help="speeds beside torch.topk and memory passes, and ratios")
@click.option(
    "--plot", "plot_path", type=click.Path(path_type=Path, dir_okay=False), help="write the plot, a PNG, there"
)
def main(count: int | None, rounds: int, show_targets: bool, plot_path: Path | None) -> None:
    """Measure the compressors of narrows.compression."""
    if any(os.environ.get(name) != "1" for name in THREADS):  # read when NumPy is imported: begin anew
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | dict.fromkeys(THREADS, "1"))
    torch.set_num_threads(1)
    warm_up()
    if plot_path:
        plot(plot_path)
        click.echo(f"wrote {plot_path}")
        return
    count = count or 25_000_000
    facts: dict[str, Any] = launch.facts()
    lines = [*targets(count), "", *ratios(count)] if show_targets else table(count, rounds)
    click.echo("\n".join(lines))
    click.echo(
        f"\n{count:,} normal float32 values, one thread; commit {facts['commit']}; {facts['machine']}, load {facts['load']}; "
        f"numpy {np.__version__}, torch {facts['torch']}"
    )


if __name__ == "__main__":
    main()
