"""Compression on a GPU, beside what the memory allows: a device-to-device copy, one read of the array, and torch.topk.

    python bench/compressors_cuda.py                              100 M float32, topk:0.01+int8
    python bench/compressors_cuda.py --count 10000000 --spec 2bit

Rules
- GB/s are bytes of the update (4 a value) over the median time, whatever a row really moves: a copy moves twice that.
- Rows take turns, so that all see the same clocks; each ends with a wait for the device. Before them two steps are run on
  the CPU too, and the payloads must be equal byte for byte.
- "unpack + scatter-add" starts from a payload in host memory: its check on the CPU and its way over PCIe are included.
- Without a GPU this exits with 2 and says what is missing.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click
import numpy as np
import torch

from narrows.compression import ErrorFeedback, cuda, parse
from narrows.compression.cuda.stages import encode_indices, load_kernels, select_top
from narrows.compression.sparsifiers import TopK


def rows_of(spec: str, updates: list[Any], spare: list[Any]) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    kernels, feedback = load_kernels(), cuda.CudaErrorFeedback(parse(spec), updates[0].size)
    update, (residual, sums) = updates[0], spare
    payload = bytes(feedback.encode(update))
    chain = feedback.compressor
    rows: dict[str, Callable[[], Any]] = {
        "device-to-device copy": lambda: sums.copy_to_device(update),
        "one read (largest key)": lambda: kernels.largest_key(update),
    }
    if isinstance(chain.reducer, TopK):
        k, dropped_bits = chain.reducer.kept_max(update.size), chain.reducer.dropped_bits
        addends = kernels.Sum(residual, np.float32(1.0), update, sums)
        places, kept = (part.copy_to_host() for part in select_top(kernels, addends, k, dropped_bits))
        places, values = (import_module("numba.cuda").to_device(part) for part in (places, kept.view(np.float32)))

        def pack() -> None:
            feedback._encode_values(values, update, sums)
            encode_indices(kernels, places, update.size)

        rows["add + select + compact"] = lambda: select_top(kernels, addends, k, dropped_bits)
        rows["quantize + pack indices"] = pack
        if torch.cuda.is_available():
            tensor = torch.as_tensor(update, device="cuda")
            rows["torch.topk of |x|"] = lambda: torch.topk(tensor.abs(), k, sorted=False)
    else:
        rows["quantize"] = lambda: feedback._encode_values(update, update, sums)
    rows["unpack + scatter-add"] = lambda: cuda.accumulate(payload, 0.5, residual)
    rows["whole encode"] = lambda: feedback.encode(update)
    return rows


def compared(spec: str, hosts: list[Any], updates: list[Any]) -> int:
    """Runs both sides over the updates; the last payload's size. Exits with 1 where they differ."""
    ours = cuda.CudaErrorFeedback(parse(spec), hosts[0].size)
    theirs = ErrorFeedback(parse(spec), hosts[0].size)
    for step, (host, update) in enumerate(zip(hosts, updates, strict=True)):
        payload = ours.encode(update)
        if payload != theirs.encode(host):
            sys.exit(f"{spec}: the payload of step {step} differs from the CPU's")
    return payload.nbytes


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--count", default=100_000_000, show_default=True, help="float32 values of an update")
@click.option("--spec", "specs", multiple=True, default=("topk:0.01+int8", "int8", "2bit"), show_default=True)
@click.option("--rounds", default=15, show_default=True)
def main(count: int, specs: tuple[str, ...], rounds: int) -> None:
    try:
        load_kernels()
    except RuntimeError as error:
        click.echo(error, err=True)
        sys.exit(2)
    numba_cuda = import_module("numba.cuda")
    device = numba_cuda.get_current_device()
    click.echo(f"{device.name}, {platform.node()}, {count:,} float32, median of {rounds} interleaved rounds")
    hosts = [np.random.default_rng(seed).standard_normal(count, dtype=np.float32) for seed in (0, 1)]
    updates = [numba_cuda.to_device(host) for host in hosts]
    spare = [numba_cuda.to_device(hosts[1]), numba_cuda.device_array(count, np.float32)]
    for spec in specs:
        payload_bytes = compared(spec, hosts, updates)
        click.echo(f"\n{spec}: {payload_bytes:,} bytes, equal to the CPU's")
        rows = rows_of(spec, updates, spare)
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        for round_number in range(rounds + 2):  # two to compile and to settle
            for name, run in rows.items():
                numba_cuda.synchronize()
                begin = time.perf_counter()
                run()
                numba_cuda.synchronize()
                if round_number >= 2:
                    seconds[name].append(time.perf_counter() - begin)
        for name, taken in seconds.items():
            middle = statistics.median(taken)
            click.echo(
                f"  {name:26} {4 * count / middle / 1e9:8.0f} GB/s   {middle * 1e3:8.3f} ms   "
                f"({min(taken) * 1e3:.3f} to {max(taken) * 1e3:.3f})"
            )


if __name__ == "__main__":
    main()
