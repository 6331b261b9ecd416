"""The fake CUDA driver keeps those rules of the real one on which launch code relies. One subprocess runs all checks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from kit.fake_cuda import FakeCuda, build, environment

PTX = b".version 8.0\n.target sm_90\n.entry scale(.param .u64 a) { ret; }\n.entry shift() { ret; }\n"
BLOCKING, NON_BLOCKING = 0, 1
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
CHECKS: list[Callable[[Any], None]] = []


def check(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CHECKS.append(function)
    return function


class DriverCalls:
    """The functions of cuda.bindings.driver. They return no error code: they raise RuntimeError with its number."""

    def __init__(self, fake: FakeCuda) -> None:
        from cuda.bindings import driver

        self.fake, self.api = fake, driver
        self.refused(3, self.cuDeviceGetCount)  # NOT_INITIALIZED
        self.cuInit(0)
        self.refused(201, self.cuMemAlloc, 8)  # INVALID_CONTEXT: none is current
        self.cuCtxSetCurrent(self.cuDevicePrimaryCtxRetain(0))
        self.stream = self.cuStreamCreate(NON_BLOCKING)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.api, name)

        def call(*arguments: Any) -> Any:
            code, *values = function(*arguments)
            if code:
                raise RuntimeError(int(code))
            return values[0] if len(values) == 1 else values

        return call

    def refused(self, code: int, function: Callable[..., Any], *arguments: Any) -> None:
        with pytest.raises(RuntimeError) as told:
            function(*arguments)
        assert told.value.args == (code,), (code, function, arguments)

    def mode(self, number: int) -> Any:
        return self.api.CUstreamCaptureMode(number)

    @contextmanager
    def capture(self, stream: Any, mode: int = GLOBAL, code: int = 0) -> Iterator[list[Any]]:
        """Capture a stream. The list takes the graph. code: what the end of the capture must return."""
        graphs: list[Any] = []
        self.cuStreamBeginCapture(stream, self.mode(mode))
        yield graphs
        if code:
            self.refused(code, self.cuStreamEndCapture, stream)
        else:
            graphs.append(self.cuStreamEndCapture(stream))

    def function(self, name: bytes) -> Any:
        return self.cuModuleGetFunction(self.cuModuleLoadData(PTX), name)

    def launch(self, function: Any, stream: Any, grid: int = 1, block: int = 256, arguments: int = 0) -> None:
        self.cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, arguments, 0)

    def read(self, address: Any, size: int) -> bytes:
        host = bytearray(size)
        self.cuMemcpyDtoH(ctypes.addressof((ctypes.c_char * size).from_buffer(host)), address, size)
        return bytes(host)


@check
def the_device_is_a_hopper(cu: Any) -> None:
    assert cu.cuDriverGetVersion() == 13000
    assert cu.cuDeviceGetCount() == 1
    cu.refused(101, cu.cuDeviceGet, 1)
    assert cu.cuDeviceGetName(32, 0).split(b"\0")[0] == b"Fake H100"
    attributes = cu.api.CUdevice_attribute
    wanted = {"MULTIPROCESSOR_COUNT": 132, "COMPUTE_CAPABILITY_MAJOR": 9, "UNIFIED_ADDRESSING": 1, "WARP_SIZE": 32}
    assert {n: cu.cuDeviceGetAttribute(getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{n}"), 0) for n in wanted} == wanted


@check
def contexts_are_a_stack(cu: Any) -> None:
    context = cu.cuCtxGetCurrent()
    cu.cuCtxPushCurrent(context)
    assert int(cu.cuCtxPopCurrent()) == int(cu.cuCtxPopCurrent()) == int(context)
    cu.refused(201, cu.cuCtxPopCurrent)
    cu.refused(201, cu.cuStreamSynchronize, 0)
    cu.cuCtxPushCurrent(context)
    assert int(cu.cuCtxGetDevice()) == 0


@check
def memory_holds_what_is_copied_and_set(cu: Any) -> None:
    left, total = cu.cuMemGetInfo()
    room = int(cu.cuMemAlloc(1000))
    assert room % 256 == 0 and total - cu.cuMemGetInfo()[0] == total - left + 1000
    assert cu.read(room, 1000) == b"\xa5" * 1000  # not zeros
    cu.cuMemcpyHtoD(room, bytes(range(250)), 250)
    cu.cuMemcpyDtoD(room + 250, room, 250)
    cu.cuMemsetD8Async(room + 1, 7, 2, cu.stream)
    cu.cuMemsetD32(room + 8, 0x01020304, 2)
    assert cu.read(room, 18) == bytes([0, 7, 7, 3, 4, 5, 6, 7, *(4, 3, 2, 1) * 2, 16, 17])
    assert cu.read(room + 250, 250) == bytes(range(250))
    cu.cuMemsetD8(room + 999, 0, 1)
    cu.refused(1, cu.cuMemsetD8, room + 999, 0, 2)  # beyond the end
    cu.refused(1, cu.cuMemFree, room + 256)
    cu.cuMemFree(room)
    cu.refused(1, cu.cuMemFree, room)  # twice
    cu.refused(2, cu.cuMemAlloc, total + 1)


@check
def page_locked_memory_has_a_device_pointer(cu: Any) -> None:
    pinned = cu.cuMemHostAlloc(64, 0)
    assert int(cu.cuMemHostGetDevicePointer(pinned, 0)) == int(pinned)
    kind = cu.api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert int(cu.cuPointerGetAttribute(kind, int(pinned))) == 1
    cu.cuMemFreeHost(pinned)
    cu.refused(1, cu.cuPointerGetAttribute, kind, int(pinned))
    own = ctypes.create_string_buffer(64)
    cu.cuMemHostRegister(ctypes.addressof(own), 64, 0)
    cu.refused(712, cu.cuMemHostRegister, ctypes.addressof(own), 64, 0)
    cu.cuMemHostUnregister(ctypes.addressof(own))
    cu.refused(713, cu.cuMemHostUnregister, ctypes.addressof(own))


@check
def launches_are_counted(cu: Any) -> None:
    function, fake = cu.function(b"scale"), cu.fake
    cu.refused(500, cu.function, b"absent")
    cu.refused(200, cu.cuModuleLoadData, b"")
    assert cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 256, 0) == 8
    pointers = (ctypes.c_void_p * 1)(5)
    fake.reset()
    cu.launch(function, cu.stream, 3, 64, ctypes.addressof(pointers))
    cu.launch(cu.function(b"shift"), 0)
    assert fake.calls("cuLaunchKernel") == fake.launches() == 2
    assert fake.launch(1) == ("scale", (3, 1, 1), (64, 1, 1), int(cu.stream), ctypes.addressof(pointers))
    assert fake.launch().name == "shift"
    with pytest.raises(IndexError, match="knows no launch 2"):
        fake.launch(2)
    for grid, block in ((0, 256), (1, 0), (1, 1025)):
        cu.refused(1, cu.launch, function, cu.stream, grid, block)
    cu.refused(400, cu.launch, 0, cu.stream)
    assert fake.launches() == 2
    config = cu.api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY, config.blockDimZ = (
        9,
        1,
        1,
        8,
        4,
        2,
    )
    config.hStream = cu.stream
    cu.cuLaunchKernelEx(config, function, 0, 0)
    assert fake.launch()[:4] == ("scale", (9, 1, 1), (8, 4, 2), int(cu.stream))


@check
def a_library_has_kernels(cu: Any) -> None:
    library = cu.cuLibraryLoadData(PTX, [], [], 0, [], [], 0)
    function = cu.cuKernelGetFunction(cu.cuLibraryGetKernel(library, b"shift"))
    cu.launch(function, cu.stream)
    attribute = cu.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    cu.cuFuncSetAttribute(function, attribute, 100_000)
    assert cu.cuFuncGetAttribute(attribute, function) == 100_000
    cu.cuLibraryUnload(library)
    cu.refused(400, cu.launch, function, cu.stream)


@check
def events_are_complete_at_once(cu: Any) -> None:
    first, last = cu.cuEventCreate(0), cu.cuEventCreate(0)
    cu.refused(400, cu.cuEventElapsedTime, first, last)  # not recorded
    cu.cuEventRecord(first, cu.stream)
    cu.cuEventRecord(last, cu.stream)
    cu.cuStreamWaitEvent(0, last, 0)
    cu.cuEventSynchronize(first)
    assert 0 <= cu.cuEventElapsedTime(first, last) < 1000
    cu.fake.fail("cuEventQuery", 600, 2)
    cu.refused(600, cu.cuEventQuery, last)
    cu.refused(600, cu.cuEventQuery, last)
    cu.cuEventQuery(last)
    cu.cuEventDestroy(last)
    cu.refused(400, cu.cuEventQuery, last)
    with pytest.raises(KeyError, match="has no cuNothing"):
        cu.fake.fail("cuNothing", 1)


@check
def a_graph_does_its_work_at_each_launch(cu: Any) -> None:
    source, target, function = int(cu.cuMemAlloc(16)), int(cu.cuMemAlloc(16)), cu.function(b"scale")
    cu.cuMemsetD8(target, 1, 16)
    cu.cuMemsetD8(source, 2, 16)
    cu.fake.reset()
    with cu.capture(cu.stream) as graphs:
        assert int(cu.cuStreamIsCapturing(cu.stream)) == 1 and int(cu.cuStreamGetCaptureInfo(cu.stream)[0]) == 1
        cu.cuMemsetD8Async(source, 3, 8, cu.stream)
        cu.launch(function, cu.stream, 5)
        cu.cuMemcpyDtoDAsync(target, source, 16, cu.stream)
    assert cu.read(source, 16) + cu.read(target, 16) == b"\2" * 16 + b"\1" * 16 and cu.fake.launches() == 0
    _, count = cu.cuGraphGetNodes(graphs[0])
    nodes, _ = cu.cuGraphGetNodes(graphs[0], count)
    assert count == 3 and [int(cu.cuGraphNodeGetType(node)) for node in nodes] == [2, 0, 1]
    graph = cu.cuGraphInstantiate(graphs[0], 0)
    for round_ in range(2):
        cu.cuMemsetD8(source, 4 + round_, 16)
        cu.cuGraphLaunch(graph, 0)
        assert cu.read(target, 16) == b"\3" * 8 + bytes([4 + round_] * 8)
    assert cu.fake.calls("cuLaunchKernel") == 1 and cu.fake.launches() == 2
    assert cu.fake.launch()[:4] == ("scale", (5, 1, 1), (256, 1, 1), 0)
    parameters = cu.api.CUDA_KERNEL_NODE_PARAMS()
    parameters.func, parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = function, 7, 1, 1
    parameters.blockDimX = parameters.blockDimY = parameters.blockDimZ = 1
    cu.cuGraphExecKernelNodeSetParams(graph, nodes[1], parameters)
    cu.refused(1, cu.cuGraphExecKernelNodeSetParams, graph, nodes[0], parameters)
    cu.cuGraphLaunch(graph, cu.stream)
    assert cu.fake.launch()[:4] == ("scale", (7, 1, 1), (1, 1, 1), int(cu.stream))
    cu.cuGraphDestroy(graphs[0])
    cu.cuGraphLaunch(graph, cu.stream)
    cu.cuGraphExecDestroy(graph)
    cu.refused(1, cu.cuGraphLaunch, graph, cu.stream)


@check
def a_capture_forbids_what_may_wait(cu: Any) -> None:
    recorded, room = cu.cuEventCreate(2), int(cu.cuMemAlloc(8))
    cu.cuEventRecord(recorded, cu.stream)
    forbidden: list[tuple[Any, ...]] = [
        (900, cu.cuMemAlloc, 8),
        (900, cu.cuMemFree, room),
        (900, cu.cuMemsetD8, room, 0, 8),
        (900, cu.cuStreamSynchronize, cu.stream),
        (900, cu.cuStreamQuery, cu.stream),
        (900, cu.cuCtxSynchronize),
        (900, cu.cuEventQuery, recorded),
        (905, cu.cuStreamWaitEvent, cu.stream, recorded, 0),
    ]
    for code, function, *arguments in forbidden:
        with cu.capture(cu.stream, code=901):
            cu.refused(code, function, *arguments)
            cu.refused(901, cu.cuMemsetD8Async, room, 0, 8, cu.stream)
    with cu.capture(cu.stream, RELAXED):
        cu.cuMemFree(cu.cuMemAlloc(8))
        cu.cuEventQuery(recorded)
    with cu.capture(cu.stream):
        before = cu.cuThreadExchangeStreamCaptureMode(cu.mode(RELAXED))
        cu.cuMemFree(cu.cuMemAlloc(8))
        cu.cuThreadExchangeStreamCaptureMode(before)
    captured = cu.cuEventCreate(2)
    with cu.capture(cu.stream, code=901):
        cu.cuEventRecord(captured, cu.stream)
        cu.refused(907, cu.cuEventQuery, captured)
    cu.cuEventRecord(captured, cu.stream)
    cu.cuEventQuery(captured)
    cu.refused(401, cu.cuStreamEndCapture, cu.stream)
    cu.refused(900, cu.cuStreamBeginCapture, 0, cu.mode(GLOBAL))


@check
def the_legacy_stream_takes_no_work_beside_a_captured_blocking_stream(cu: Any) -> None:
    blocking, room = cu.cuStreamCreate(BLOCKING), int(cu.cuMemAlloc(8))
    with cu.capture(cu.stream):
        cu.cuMemsetD8Async(room, 0, 8, 0)  # not for a stream of CU_STREAM_NON_BLOCKING
    with cu.capture(blocking, THREAD_LOCAL):
        cu.refused(906, cu.cuStreamIsCapturing, 0)  # this does not end the capture
        cu.cuMemsetD8Async(room, 0, 8, cu.stream)
    for function, *arguments in (
        (cu.cuMemsetD8Async, room, 0, 8, 0),
        (cu.cuStreamSynchronize, 0),
        (cu.cuMemsetD8, room, 0, 8),
    ):
        with cu.capture(blocking, RELAXED, code=901):
            cu.refused(906, function, *arguments)


@check
def a_captured_stream_forks_and_joins(cu: Any) -> None:
    side, fork, joined, room = cu.cuStreamCreate(1), cu.cuEventCreate(2), cu.cuEventCreate(2), int(cu.cuMemAlloc(8))
    for joins in (True, False):
        with cu.capture(cu.stream, code=0 if joins else 904) as graphs:
            cu.cuMemsetD8Async(room, 0, 8, cu.stream)
            cu.cuEventRecord(fork, cu.stream)
            cu.cuStreamWaitEvent(side, fork, 0)
            cu.cuMemsetD8Async(room, 1, 8, side)
            cu.cuEventRecord(joined, side)
            if joins:
                cu.cuStreamWaitEvent(cu.stream, joined, 0)
        assert not joins or cu.cuGraphGetNodes(graphs[0])[1] == 2
        assert int(cu.cuStreamIsCapturing(side)) == 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("fake_cuda"))
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_the_fake_driver_does_what_the_real_one_would(library: Path) -> None:
    variables = {**os.environ, **environment(library.parent), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, __file__, str(library)], env=variables, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [function.__name__ for function in CHECKS]


if __name__ == "__main__":
    calls = DriverCalls(FakeCuda(Path(sys.argv[1])))
    for each in CHECKS:
        each(calls)
        print(each.__name__)
