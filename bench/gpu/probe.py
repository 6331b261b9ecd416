"""Where the time of an encode and a fold on a GPU goes: Python, launches, kernels.

    python bench/gpu/probe.py                                      # all parts, in about two minutes
    python bench/gpu/probe.py launch graph                         # those parts
    python bench/gpu/probe.py --device host --count 10000 profile  # the CPU in the place of a GPU: to try this script

- launch: microseconds of one launch with six arrays, by numba-cuda, cuda.bindings, CuPy, torch, Triton, and as a CUDA graph.
  A way whose package is not installed is reported and left out.
- graph: the device's part of an encode launched as it is, and captured as one CUDA graph: the time that is left when Python
  launches nothing. At 1, 10 and 100 M values, or --count.
- kernels: torch.profiler's time of each kernel of an encode and of a fold, at 100 M values, or --count.
- profile: cProfile's time of each Python function in 100 encodes and 100 folds, at 1 M values, or --count.

A part that fails is reported, the others go on, and the exit code is then 1. Without a GPU it is 2, but for `profile`
with --device host.
"""

from __future__ import annotations

import cProfile
import ctypes
import io
import pstats
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from narrows.compression import device, parse
from narrows.compression.device.home import DeviceHome
from narrows.compression.device.stages import select_top
from narrows.compression.kernels.record import Sum
from narrows.compression.payload import open_payload
from narrows.worker.model.device_placement import device_home

Home = DeviceHome[Tensor]
SPECS = ("topk:0.05+int8", "cycle:0.15+sign")
WARM_UPS, CALLS, LAUNCHES, ENCODES, TRACED = 3, 30, 500, 100, 4
RAW_KERNEL = r"""extern "C" __global__ void nothing(const float* a, const float* b, const float* c, const float* d,
    const float* e, float* out, int n, int x) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n && x > 3) out[i] = a[i] + b[i] + c[i] + d[i] + e[i];
}"""


def median_ms(run: Callable[[], object]) -> float:
    """Each call ends with a wait for the GPU."""
    for _ in range(WARM_UPS):
        run()
    seconds = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds) * 1e3


def launch_us(run: Callable[[], object]) -> float:
    """The host's mean time of a call; nothing waits for the GPU meanwhile."""
    for _ in range(20):
        run()
    torch.cuda.synchronize()
    before = time.perf_counter()
    for _ in range(LAUNCHES):
        run()
    taken = time.perf_counter() - before
    torch.cuda.synchronize()
    return taken / LAUNCHES * 1e6


def updates(home: Home, count: int) -> list[Tensor]:
    """Three float32[count] on the device."""
    where = home.zeros(0).device
    generator = torch.Generator(device=where).manual_seed(1)
    return [torch.randn(count, device=where, generator=generator) for _ in range(3)]


def feedback_of(home: Home, spec: str, count: int) -> device.DeviceErrorFeedback:
    return device.DeviceErrorFeedback(home.kernels, parse(spec), count)


def warm_calls(home: Home, spec: str, count: int) -> tuple[Callable[[int], object], Callable[[int], object], bytes]:
    """An encode of two updates in turn, a fold of one payload, and that payload; each has run before."""
    first, second, out = updates(home, count)
    feedback = feedback_of(home, spec, count)
    for _ in range(WARM_UPS):
        feedback.encode(first)
    payload = bytes(feedback.encode(second))
    device.accumulate(home.kernels, payload, 0.5, out)
    return (
        lambda turn: feedback.encode((first, second)[turn % 2]),
        lambda turn: device.accumulate(home.kernels, payload, 0.5, out),
        payload,
    )


# profile


def python_time(title: str, lines: int, run: Callable[[int], object]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for turn in range(ENCODES):
        run(turn)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(lines)
    click.echo(f"--- {title}, {ENCODES} times")
    click.echo("\n".join(line[-150:] for line in text.getvalue().splitlines()[4 : lines + 12]))


def profile(home: Home, count: int | None) -> None:
    size = count or 1_000_000
    for spec in SPECS:
        encode, fold, _ = warm_calls(home, spec, size)
        python_time(f"encode {spec}, {size:,} values", 22, encode)
        python_time(f"fold {spec}", 14, fold)


# graph


def encode_calls(home: Home, spec: str, count: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """The device's part of an encode: add and select, and both of them with the codes. For a cycle all is one kernel."""
    kernels = home.kernels
    update, residual, spare = updates(home, count)
    feedback = feedback_of(home, spec, count)
    reducer: Any = feedback.compressor.reducer
    addends = Sum(kernels.view(residual), np.float32(1.0), kernels.view(update), kernels.view(spare))
    if not spec.startswith("topk"):
        kept = -(-count // reducer.stride)
        chosen = kernels.scratch("strided", kept, np.float32)
        parts = feedback._arena(kept).parts

        def strided() -> None:
            kernels.encode_strided_as(
                feedback._name, addends, 0, reducer.stride, chosen[:], feedback._extra, parts, kernels.record()
            )

        return strided, strided
    most, dropped_bits = reducer.kept_max(count), reducer.dropped_bits
    there = kernels.empty(most, np.uint32), kernels.empty(most, np.uint32)

    def select() -> Any:
        record = kernels.record()
        select_top(kernels, addends, most, dropped_bits, True, *there, record)
        return record

    return select, lambda: feedback.code(*there, count, False, select())


def captured(home: Home, run: Callable[[], object], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), home.kernels.active():
        run()
    return graph


def graph(home: Home, count: int | None) -> None:
    for spec in ("topk:0.01+int8", *SPECS):
        for size in [count] if count else [1_000_000, 10_000_000, 100_000_000]:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), home.kernels.active():
                select, both = encode_calls(home, spec, size)
                for _ in range(WARM_UPS):  # scratch has its size before it is captured
                    both()
            torch.cuda.synchronize()
            once = [median_ms(captured(home, run, stream).replay) for run in (select, both)]
            with torch.cuda.stream(stream), home.kernels.active():
                launched = [median_ms(run) for run in (select, both)]
            click.echo(
                f"graph {spec:18} {size:>11,}: select {once[0]:.3f} ms, select and code {once[1]:.3f} ms; "
                f"launched by Python {launched[0]:.3f}, {launched[1]:.3f}"
            )


# kernels


def kernel_time(title: str, lines: int, run: Callable[[int], object]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as tracer

    with tracer(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        for turn in range(TRACED):
            run(turn)
        torch.cuda.synchronize()
    click.echo(f"--- kernels of {title}, {TRACED} times")
    events: list[Any] = sorted(trace.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:lines]:
        if event.device_time_total:
            each_us = event.device_time_total / TRACED
            click.echo(f"  {event.key[:70]:70} n {event.count:4} {each_us:9.1f} us each time")


def kernels(home: Home, count: int | None) -> None:
    size = count or 100_000_000
    for spec in SPECS:
        encode, fold, payload = warm_calls(home, spec, size)
        kernel_time(f"encode {spec}, {size:,} values", 14, encode)
        kernel_time(f"fold {spec}", 8, fold)
        seconds = []
        for _ in range(7):
            before = time.perf_counter()
            open_payload(payload, size)
            seconds.append(time.perf_counter() - before)
        click.echo(f"  fold: the check on the host {statistics.median(seconds) * 1e3:.2f} ms of {len(payload):,} bytes")


# launch


def launch(home: Home, count: int | None) -> None:
    import numba.cuda

    cuda: Any = numba.cuda  # it declares no types that fit
    size = count or 4096

    def nothing(a: Any, b: Any, c: Any, d: Any, e: Any, out: Any, x: int) -> None:
        i = cuda.grid(1)
        if i < a.size and x > 3:
            out[i] = a[i] + b[i] + c[i] + d[i] + e[i]

    kernel = cuda.jit(nothing)
    arrays = [torch.zeros(size, device="cuda") for _ in range(6)]
    views = [cuda.as_cuda_array(each, sync=False) for each in arrays]
    blocks = -(-size // 256)
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    configured = kernel[blocks, 256, stream]
    ways: dict[str, Callable[[], object]] = {
        "numba-cuda launch": lambda: kernel[blocks, 256, stream](*views, 1),
        "numba-cuda launch, configured": lambda: configured(*views, 1),
        "as_cuda_array of a tensor": lambda: cuda.as_cuda_array(arrays[0], sync=False),
        "slice of a device array": lambda: views[0][:100],
        "view of a device array": lambda: views[0].view(np.uint32),
        "event made and recorded": lambda: cuda.event().record(stream),
        "torch add_": lambda: arrays[0].add_(1),
    }
    for name, run in ways.items():
        click.echo(f"{name:32} {launch_us(run):8.2f} us")
    for name, make in (("cuLaunchKernel, packed once", packed), ("CuPy RawKernel", cupy_raw), ("Triton", triton_jit)):
        try:
            click.echo(f"{name:32} {launch_us(make(kernel, arrays)):8.2f} us")
        except Exception as error:  # of a package that is not here, or another version of it
            click.echo(f"{name:32} not timed: {type(error).__name__}: {error}")
    side = torch.cuda.Stream()
    apart = kernel[blocks, 256, cuda.external_stream(side.cuda_stream)]

    def fifteen() -> None:
        for _ in range(15):
            apart(*views, 1)

    with torch.cuda.stream(side):
        fifteen()
    torch.cuda.synchronize()
    replay = captured(home, fifteen, side).replay
    name = "graph of 15 numba-cuda launches"
    click.echo(f"{name:32} {launch_us(replay):8.2f} us; {median_ms(replay) * 1e3:.1f} us until it has run")


def packed(kernel: Any, arrays: list[Tensor]) -> Callable[[], object]:
    """The driver's launch of the kernel that numba-cuda has compiled: an array is seven words of arguments."""
    from cuda.bindings import driver

    compiled = next(iter(kernel.overloads.values()))
    function = compiled._codelibrary.get_cufunc()
    handle = getattr(function, "handle", function)
    handle = driver.CUfunction(int(getattr(handle, "value", handle)))
    words: list[Any] = []
    for each in arrays:
        n, there = each.numel(), ctypes.c_void_p(each.data_ptr())
        words += [ctypes.c_void_p(0), ctypes.c_void_p(0), ctypes.c_longlong(n), ctypes.c_longlong(4), there]
        words += [ctypes.c_longlong(n), ctypes.c_longlong(4)]
    words.append(ctypes.c_longlong(1))
    table = (ctypes.c_void_p * len(words))(*[ctypes.addressof(word) for word in words])
    stream, blocks = driver.CUstream(0), -(-arrays[0].numel() // 256)

    def run(kept: object = (words, table)) -> object:  # the driver reads both at each launch
        return driver.cuLaunchKernel(handle, blocks, 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(table), 0)

    (status,) = driver.cuLaunchKernel(handle, blocks, 1, 1, 256, 1, 1, 0, stream, ctypes.addressof(table), 0)
    if int(status):
        raise RuntimeError(f"cuLaunchKernel returned {status}")
    return run


def cupy_raw(kernel: Any, arrays: list[Tensor]) -> Callable[[], object]:
    import cupy

    raw, theirs, n = cupy.RawKernel(RAW_KERNEL, "nothing"), [cupy.asarray(each) for each in arrays], arrays[0].numel()
    return lambda: raw((-(-n // 256),), (256,), (*theirs, np.int32(n), np.int32(1)))


def triton_jit(kernel: Any, arrays: list[Tensor]) -> Callable[[], object]:
    from gpu import triton_launch

    n = arrays[0].numel()
    return lambda: triton_launch.launch[(-(-n // 256),)](*arrays, n, 1, block=256)


PARTS: dict[str, Callable[[Home, int | None], None]] = {
    "launch": launch,
    "graph": graph,
    "kernels": kernels,
    "profile": profile,
}


@click.command(help=__doc__, context_settings={"max_content_width": 120, "show_default": True})
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--device", "name", default="cuda:0", help="cuda:N, or host")
@click.option("--count", type=click.IntRange(min=1), help="values of an array, in the place of a part's own sizes")
def main(parts: tuple[str, ...], name: str, count: int | None) -> None:
    parts = parts or tuple(PARTS)
    if name == "host" and parts != ("profile",):
        raise click.UsageError("--device host runs `profile` alone: the other parts are about a GPU")
    if name != "host" and not torch.cuda.is_available():
        click.echo(
            f"{name}: this torch ({torch.__version__}) sees no GPU; `--device host profile` tries the script", err=True
        )
        sys.exit(2)
    before = time.perf_counter()
    home = device_home(torch.device("cpu" if name == "host" else name))
    click.echo(f"home and warm-up {time.perf_counter() - before:.1f} s")
    failed = False
    for part in parts:
        click.echo(f"=== {part}")
        try:
            PARTS[part](home, count)
        except Exception:
            traceback.print_exc(limit=4, file=sys.stdout)
            failed = True
    sys.exit(failed)


if __name__ == "__main__":
    main()
