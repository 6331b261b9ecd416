"""Launches of encodes and folds by the real launch code on the fake driver (fake_cuda.c); test_launches.py runs it.

    cd tests; LD_LIBRARY_PATH=FOLDER python -m kit.launch_checks FOLDER/libcuda.so.1

Kernels do not run there, so payloads are without meaning; what is launched, when and how often is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kit.fake_cuda import FakeCuda
from narrows.compression import ErrorFeedback, PayloadError, parse
from narrows.compression import device as on_device
from narrows.compression.cuda import jit
from narrows.compression.cuda.cubins import CubinStore
from narrows.compression.cuda.graphs import GRAPHS_MAX
from narrows.compression.cuda.jit import THREADS, Cubin
from narrows.compression.cuda.queue import Queue, driver_of
from narrows.compression.cuda.staging import PIECE_BYTES
from narrows.compression.device import DeviceErrorFeedback
from narrows.compression.device.home import DeviceHome
from narrows.compression.device.host import HostKernels

CAPTURED = (
    "topk:0.01+int8",
    "mstopk:0.05",
    "topk:64/4096+2bit",
    "cycle:0.15+sign",
    "cycle:0.3/0.2+sign",
    "randk:0.1+int8",
    "int4",
)
COUNT = 420_000
STREAM_CAPTURE_INVALIDATED, ILLEGAL_ADDRESS = 901, 700
fake: FakeCuda


def cubin_of(self: CubinStore, name: str) -> Cubin:
    return Cubin(name.encode() + b"\0", name, 32, 0, 0)


def kernels_on(stream: list[int]) -> Any:
    """Return kernels on the fake driver. Page-locked memory is zero: no kernel writes the record there."""
    from narrows.compression.cuda.kernels import CudaKernels

    queue = Queue(driver_of(0), current=lambda: stream[0])
    pinned = queue.driver.pinned

    def zeros(count: int) -> Any:
        memory = pinned(count)
        memory[:] = 0
        return memory

    queue.driver.pinned = zeros
    return CudaKernels(queue)


def update_of(kernels: Any, count: int) -> Any:
    with kernels.active():
        return kernels.zeros(count, np.float32)


def launched() -> list[tuple[str, int]]:
    """Return (kernel, blocks) of all launches since the last reset, the first one first."""
    found = [fake.launch(i) for i in reversed(range(fake.launches()))]
    assert all(launch.block == (THREADS, 1, 1) for launch in found)
    return [(launch.name, launch.grid[0]) for launch in found]


def encodes_are_captured_once_and_replayed() -> None:
    for spec in CAPTURED:
        kernels = kernels_on([0])
        feedback, update = DeviceErrorFeedback(kernels, parse(spec), COUNT), update_of(kernels, COUNT)
        seen, calls = [], []
        for _ in range(4):
            fake.reset()
            feedback.encode(update)
            seen.append(launched())
            names = ("cuLaunchKernel", "cuGraphLaunch", "cuStreamBeginCapture", "cuMemcpyHtoDAsync", "cuMemAlloc")
            calls.append([fake.calls(name) for name in names])
        if not spec.startswith("cycle"):  # a turn of another phase may have one value less
            assert seen[0] == seen[1] == seen[2] == seen[3], spec
        assert len(seen[0]) >= 1, spec
        graphs = calls[-1][1]
        assert graphs in (1, 2) and calls[-1][2] == 0, (spec, calls)  # before the payload's way to the host, and after
        assert calls[-1][0] == (spec.startswith(("topk", "mstopk")) or "/" in spec), (spec, calls)  # of `land`
        assert calls[-1][3] == 1 and calls[-1][4] == 0, (spec, calls)  # the inputs; nothing is allocated


def scratch_that_grows_between_two_replays_drops_the_graphs() -> None:
    kernels = kernels_on([0])
    small, large = (DeviceErrorFeedback(kernels, parse("topk:0.01+int8"), count) for count in (COUNT, 4 * COUNT))
    update, more = update_of(kernels, COUNT), update_of(kernels, 4 * COUNT)
    for _ in range(3):
        small.encode(update)
    fake.reset()
    small.encode(update)
    wanted = launched()
    assert fake.calls("cuGraphLaunch") == 2
    fake.reset()
    large.encode(more)
    assert fake.calls("cuGraphExecDestroy") == 2 and fake.calls("cuGraphLaunch") == 0
    for graphs in (0, 2, 2):  # launched, captured, replayed
        fake.reset()
        small.encode(update)
        assert launched() == wanted and fake.calls("cuGraphLaunch") == graphs
    assert kernels.counts["graphs"] == 3 * 2 + 2 * 2
    launches, replays, kept, scratch = DeviceHome(kernels, lambda count: None, "GPU").figures()
    assert (replays, kept) == (3 * 2 + 2 * 2, 2) and launches >= 8 * len(wanted) and scratch > 4 * COUNT // 8


def scratch_that_grows_while_it_is_captured_is_launched() -> None:
    kernels = kernels_on([0])
    asked: list[int] = [100]

    def launches() -> int:
        return int(kernels.scratch("any", asked[0], np.float32).size)

    with kernels.active():
        assert kernels.captured("key", launches) == 100
        asked[0] = 10_000
        assert kernels.captured("key", launches) == 10_000
        assert kernels.captured("key", launches) == 10_000
        assert kernels.captured("key", launches) == 10_000 and kernels.counts["graphs"] == 1


def graphs_are_bounded() -> None:
    kernels = kernels_on([0])
    record = update_of(kernels, 8)
    with kernels.active():
        fake.reset()
        for number in range(GRAPHS_MAX + 6):
            for _ in range(3):
                kernels.captured(number, lambda: kernels.zero(record))
        assert kernels.graphs_kept == GRAPHS_MAX
        assert fake.calls("cuGraphInstantiateWithFlags") == GRAPHS_MAX + 6 and fake.calls("cuGraphExecDestroy") == 6
        kernels.captured(10, lambda: kernels.zero(record))  # it was used just now, so another one goes
        kernels.captured(GRAPHS_MAX + 6, lambda: kernels.zero(record))
        fake.reset()
        kernels.captured(10, lambda: kernels.zero(record))
        assert fake.calls("cuGraphLaunch") == 1


def a_driver_that_captures_nothing_launches() -> None:
    for refuses in ("cuStreamBeginCapture", "cuGraphInstantiateWithFlags"):
        kernels = kernels_on([0])
        feedback, update = DeviceErrorFeedback(kernels, parse("topk:0.01+int8"), COUNT), update_of(kernels, COUNT)
        fake.reset()
        feedback.encode(update)
        wanted = launched()
        fake.fail(refuses, STREAM_CAPTURE_INVALIDATED)
        for _ in range(3):
            feedback.encode(update)
            assert launched()[-len(wanted) :] == wanted
        assert not fake.calls("cuGraphLaunch") and not kernels.counts["graphs"], refuses


def a_script_that_captures_its_step_meets_a_sentence() -> None:
    stream = [0]
    kernels = kernels_on(stream)
    driver = kernels.queue.driver
    feedback, update = DeviceErrorFeedback(kernels, parse("int8"), COUNT), update_of(kernels, COUNT)
    dense = DeviceErrorFeedback(kernels, parse("dense"), COUNT)
    with kernels.active():
        own = driver.own_stream()
    stream[0] = int(own)
    feedback.encode(update)
    driver.enter()
    driver.begin_capture(own)
    with pytest.raises(
        RuntimeError, match=r"the script captures its step as a CUDA graph.*call optimizer\.step\(\) after"
    ):
        feedback.encode(update)
    with pytest.raises(RuntimeError, match="the script captures its step as a CUDA graph"):
        dense.encode(update)
    driver.drop(driver.end_capture(own))
    driver.leave()
    feedback.encode(update)


def a_call_that_fails_is_named() -> None:
    kernels = kernels_on([0])
    feedback, update = DeviceErrorFeedback(kernels, parse("int8"), COUNT), update_of(kernels, COUNT)
    fake.fail("cuLaunchKernel", ILLEGAL_ADDRESS)
    with pytest.raises(RuntimeError, match="cuLaunchKernel of the CUDA driver: CUDA_ERROR_ILLEGAL_ADDRESS"):
        feedback.encode(update)
    with pytest.raises(RuntimeError, match="this machine has no GPU with the number 7"):
        driver_of(7)


def a_fold_is_one_copy_and_a_few_launches() -> None:
    kernels = kernels_on([0])
    out = update_of(kernels, COUNT)
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    for spec, launches in (("topk:0.01+int8", 5), ("cycle:0.15+sign", 1), ("int8", 1), ("dense", 1)):
        payload = bytes(ErrorFeedback(parse(spec), COUNT).encode(values))
        for _ in range(2):
            fake.reset()
            on_device.accumulate(kernels, payload, 0.5, out)
        assert fake.launches() == launches and fake.calls("cuMemcpyHtoDAsync") == 1, spec
        assert not fake.calls("cuStreamSynchronize") and not fake.calls("cuMemAlloc"), spec


def a_fold_aside_is_on_a_stream_of_its_own() -> None:
    """It waits for the queue's newest work, and the queue's next work waits for it; each once."""
    kernels = kernels_on([0])
    out, update = update_of(kernels, COUNT), update_of(kernels, COUNT)
    feedback = DeviceErrorFeedback(kernels, parse("topk:0.01+int8"), COUNT)
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    payload = bytes(ErrorFeedback(parse("topk:0.01+int8"), COUNT).encode(values))

    def fold() -> None:
        with kernels.aside():
            on_device.accumulate(kernels, payload, 0.5, out)

    for _ in range(3):
        feedback.encode(update)
        fold()
    fake.reset()
    fold()
    (aside,) = {fake.launch(i).stream for i in range(fake.launches())}
    assert aside and fake.calls("cuStreamWaitEvent") == 1 and not fake.calls("cuMemAlloc")
    fake.reset()
    feedback.encode(update)
    assert fake.calls("cuStreamWaitEvent") == 2  # for the fold, and the payload for its codes
    streams = {fake.launch(i).stream for i in range(fake.launches())}
    assert aside not in streams and len(streams) == 2  # the caller's, and that of payloads


def encodes_of_shards_are_launched_before_the_host_waits() -> None:
    kernels = kernels_on([0])
    shards, update = (
        [DeviceErrorFeedback(kernels, parse("topk:0.01+int8"), COUNT) for _ in range(2)],
        update_of(kernels, COUNT),
    )
    for _ in range(3):
        fake.reset()
        for feedback in shards:
            feedback.start_encode(update)
        launches = fake.launches()
        assert (
            fake.calls("cuStreamWaitEvent") == 3
        )  # each payload for its codes, the second encode for the first payload
        assert launches and not fake.calls("cuEventSynchronize") and not fake.calls("cuStreamSynchronize")
        for feedback in shards:
            feedback.encode(update)
        assert fake.launches() == launches and fake.calls("cuEventSynchronize") == 2


def an_own_update_is_one_launch_and_no_copy() -> None:
    kernels = kernels_on([0])
    out, update = update_of(kernels, COUNT), update_of(kernels, COUNT)
    for spec in CAPTURED:
        feedback = DeviceErrorFeedback(kernels, parse(spec), COUNT)
        for _ in range(3):  # the memory of the values is allocated once
            feedback.encode(update)
        fake.reset()
        feedback.encode(update)
        assert not fake.calls("cuMemAlloc") and fake.calls("cuMemcpyDtoDAsync") in (1, 2), spec
        assert feedback.coded is not None
        with kernels.active():
            feedback.coded.add(0.5, out)  # the first time of all, the record of zeros is allocated
            fake.reset()
            feedback.coded.add(0.5, out)
        assert fake.launches() == 1 and not fake.calls("cuMemcpyHtoDAsync") and not fake.calls("cuMemAlloc"), spec


def a_check_waits_for_no_copy() -> None:
    """Folds return while their payload goes up; the third one waits for the page-locked memory of the first."""
    kernels = kernels_on([0])
    out = update_of(kernels, COUNT)
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    payload = bytes(ErrorFeedback(parse("topk:0.3+int8"), COUNT).encode(values))
    for waits in (0, 0, 1, 1):
        fake.reset()
        on_device.accumulate(kernels, payload, 0.5, out)
        assert (fake.calls("cuEventSynchronize"), fake.calls("cuStreamSynchronize")) == (waits, 0)


def what_is_bad_at_its_end_is_refused_before_anything_goes_up() -> None:
    kernels = kernels_on([0])
    out = update_of(kernels, COUNT)
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    values[np.arange(COUNT) // 800 % 10 > 0] *= np.float32(0.05)
    for spec in ("topk:0.3+int8", "topk:0.01+int8", "topk:0.05+2bit", "cycle:0.3/0.2+sign"):
        payload = bytes(ErrorFeedback(parse(spec), COUNT).encode(values))
        on_device.accumulate(kernels, payload, 0.5, out)
        for last in (payload[-1] ^ 128, 0):
            fake.reset()
            with pytest.raises(PayloadError):
                on_device.accumulate(kernels, payload[:-1] + bytes([last]), 0.5, out)
            assert not fake.launches() and not fake.calls("cuMemcpyHtoDAsync"), spec


def what_goes_up_arrives() -> None:
    """The fake driver's memory is the host's. What decoders read as words has zeros after it."""
    from narrows.compression.device.stages import BitStream

    kernels = kernels_on([0])
    rng = np.random.default_rng(0)
    with kernels.active():
        for sizes in (
            (5, 70, 13),
            (1, 0, 3),
            (100, 3, 1),
            (200_000, 1, 30_000),
            (PIECE_BYTES, 3, 5 * PIECE_BYTES + 77),
        ):
            fake.reset()
            parts: list[Any] = [rng.integers(0, 255, size).astype(np.uint8) for size in sizes]
            parts = [parts[0], BitStream(parts[1]), parts[2].astype(np.uint16)]
            for there, want in zip(kernels.upload(parts), HostKernels().upload(parts), strict=True):
                assert there.dtype == want.dtype and there.address % 16 == 0
                assert kernels.read(there).tobytes() == want.tobytes()
            assert fake.calls("cuMemcpyHtoDAsync") == (12 if sizes[0] == PIECE_BYTES else 1)


PARTS: tuple[Callable[[], None], ...] = (
    encodes_are_captured_once_and_replayed,
    scratch_that_grows_between_two_replays_drops_the_graphs,
    scratch_that_grows_while_it_is_captured_is_launched,
    graphs_are_bounded,
    a_driver_that_captures_nothing_launches,
    a_script_that_captures_its_step_meets_a_sentence,
    a_call_that_fails_is_named,
    a_fold_is_one_copy_and_a_few_launches,
    a_fold_aside_is_on_a_stream_of_its_own,
    encodes_of_shards_are_launched_before_the_host_waits,
    an_own_update_is_one_launch_and_no_copy,
    a_check_waits_for_no_copy,
    what_is_bad_at_its_end_is_refused_before_anything_goes_up,
    what_goes_up_arrives,
)

if __name__ == "__main__":
    fake = FakeCuda(Path(sys.argv[1]))
    with mock.patch.object(CubinStore, "get", cubin_of):
        for part in PARTS:
            fake.reset()
            part()
            print(part.__name__, flush=True)
    assert jit.cuda is None, "a worker loads no compiler"
