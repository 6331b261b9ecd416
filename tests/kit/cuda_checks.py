"""Each CUDA kernel and DeviceErrorFeedback against the CPU's, bit for bit; test_cuda_simulator.py runs it.

    cd tests; NUMBA_ENABLE_CUDASIM=1 python -m kit.cuda_checks [PART ...]     in the simulator
    cd tests; python -m kit.cuda_checks [PART ...]                            on a GPU, with larger sizes as well

A simulated thread is a Python thread, so sizes are tiny there and a block has 8 threads: a tile of a selection is 256
values. The simulator finds races too, if they are likely; a GPU has the last word.
"""

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kit import cuda_simulator
from kit.reference import values_of
from kit.reference_payload import SECTIONS
from kit.specs import EACH_STAGE, VALUE_STAGES
from narrows.compression import ErrorFeedback, NonFiniteError, PayloadError, accumulate, decode, parse
from narrows.compression import device as device_compression
from narrows.compression import selection as top_selection
from narrows.compression.buffers import DeviceDifference, read_only
from narrows.compression.cuda import jit as cuda_jit
from narrows.compression.cuda.arrays import DeviceArray
from narrows.compression.cuda.kernels import CudaKernels
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.scans import scan
from narrows.compression.cuda.simulator import SimulatedDriver
from narrows.compression.device import DeviceErrorFeedback, kernels_for
from narrows.compression.device.host import HostArray, HostKernels
from narrows.compression.device.stages import INDEX_READERS
from narrows.compression.index_codings import RICE, STRIDED_RICE, bytes_of, encode_indices, stride_count
from narrows.compression.kernels.record import (
    HEAD_BYTES,
    INDEX_CODING,
    LOW_BITS,
    MISLED,
    MISSING,
    PARAMETER,
    TOLD,
    UNARY_BITS,
    Sum,
)
from narrows.compression.payload import Header
from narrows.compression.selection import SamplePlan

Array = npt.NDArray[Any]
device = kernels_for("cuda:0")
host: Any = HostKernels()
SIZES = (0, 1, 3, 255, 256, 257, 515) if cuda_jit.SIMULATED else (0, 1, 3, 255, 257, 8191, 8192, 8193, 300_001)
STREAM_COUNT = 321 if cuda_jit.SIMULATED else 300_001
SAMPLED_COUNT = 2053 if cuda_jit.SIMULATED else 3_000_001
KINDS = ("normal", "zeros", "equal", "denormal", "wide")


def on_device(array: Array, offset: int = 0) -> Any:
    """Return a copy on the device. With an offset it begins where four values cannot be loaded at once."""
    there = device.empty(array.size + offset, array.dtype)[offset:]
    device.load(np.ascontiguousarray(array), there)
    return there


def compare(name: str, inputs: tuple[Any, ...], outputs: tuple[Array, ...], offset: int = 0) -> Any:
    """Run the kernel `name` on host and device, with equal outputs, and compare outputs and results.

    Returns:
        The result of the kernel.
    """
    want = tuple(output.copy() for output in outputs)
    got = tuple(on_device(output, offset) for output in outputs)
    expected = getattr(host, name)(*inputs, *want)
    found = getattr(device, name)(*(on_device(x, offset) if isinstance(x, np.ndarray) else x for x in inputs), *got)
    assert found == expected, (name, inputs, found, expected)
    same(got, want, name)
    return expected


def same(got: Any, want: Any, name: Any, size: int | None = None) -> None:
    for mine, yours in zip(got, want, strict=True):
        mine, yours = device.read(mine)[:size], yours[:size]
        np.testing.assert_array_equal(mine.view(np.uint8), yours.view(np.uint8), err_msg=name)


def selected(name: str, source: Any, arguments: tuple[Any, ...], k: int, offset: int = 0) -> list[int]:
    """Run a selection of at most k values on host and device, and compare the kept values and the record.

    Returns:
        The first numbers of the record.
    """
    room = np.zeros(k, np.uint32)
    want, want_record = (room.copy(), room.copy()), host.record()
    got, record = (on_device(room), on_device(room)), device.record()
    if isinstance(source, Sum):
        sums = np.zeros(source.update.size, np.float32)
        theirs = source._replace(sums=sums.view(HostArray))
        there = (on_device(source.residual, offset), source.decay, on_device(source.update, offset))
        ours: Any = Sum(*there, on_device(sums, offset))
    else:
        theirs, ours = source.view(HostArray), on_device(source, offset)
    getattr(host, name)(theirs, *arguments, *want, want_record)
    getattr(device, name)(ours, *arguments, *got, record)
    told: list[int] = device.read(record[:TOLD]).tolist()
    wanted = want_record[:TOLD].tolist()
    assert told == wanted, (name, arguments, told, wanted)
    same(got, want, name, k - told[MISSING])
    if isinstance(source, Sum):
        same((ours.sums,), (theirs.sums,), name)
    return told


def scans() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 255, 256, 257, 700):
        values = rng.integers(0, 2**40, size).astype(np.uint64)
        totals = on_device(values)
        scan(device.queue, totals)
        np.testing.assert_array_equal(device.read(totals), np.cumsum(values) - values)


ALL_KEYS = 0x7FFFFFFF


def selection() -> None:
    for kind in KINDS:
        for size in SIZES[1:] if kind == "normal" else (515,):
            bits = values_of(kind, size).view(np.uint32)
            every = {1, max(1, size // 100), size}
            for k in every if kind == "normal" or not cuda_jit.SIMULATED else {max(1, size // 100)}:
                for key_mask in (ALL_KEYS, ALL_KEYS >> 13 << 13)[: 2 if k == max(1, size // 100) else 1]:
                    selected("top", bits, (k, key_mask), k, size % 2)
            above = int(np.sort(bits & ALL_KEYS)[size // 2])
            found = compare("count_above", (bits, above), ())
            if found:
                selected("compact_above", bits, (above,), found, size % 2)
    many = values_of("equal", 1301).view(np.uint32)
    selected("top", many, (600, ALL_KEYS), 600)
    residual, update = values_of("normal", 1301), values_of("wide", 1301)
    for size in (1301, 1280):
        for offset in (int(size == 1280),) if cuda_jit.SIMULATED else (0, 1):
            addends = Sum(residual[:size], np.float32(0.9), update[:size], None)
            for source in (addends, update[:size].view(np.uint32), many):
                told = selected("top_sampled", source, (SamplePlan(16, 80, 8, 400), 40, ALL_KEYS), 40, offset)
                assert told[MISLED] == (source is many)
            selected("top_sampled", addends, (SamplePlan(16, 80, 8, 400), 60, ALL_KEYS >> 13 << 13), 60, offset)
            assert selected("top_sampled", addends, (SamplePlan(16, 80, 1, 400), 200, ALL_KEYS), 200)[MISLED]
            assert selected("top_sampled", addends, (SamplePlan(16, 80, 8, 5), 5, ALL_KEYS), 5)[MISLED]
            for phase, stride in ((0, 1), (6, 7), (400, 500)):
                chosen = np.zeros(stride_count(phase, stride, size), np.float32)
                got, sums = on_device(chosen), on_device(np.zeros(size, np.float32), offset)
                record, want_record = device.record(), host.record()
                there = Sum(on_device(residual[:size], offset), addends.decay, on_device(update[:size], offset), sums)
                theirs = addends._replace(sums=np.zeros(size, np.float32).view(HostArray))
                device.sum_strided(there, phase, stride, got, record)
                host.sum_strided(theirs, phase, stride, chosen, want_record)
                same((got, sums, record[:1]), (chosen, theirs.sums, want_record[:1]), "sum_strided")
                device.zero(sums)
                device.sum_of(there)
                same((sums,), (theirs.sums,), "sum_of")
    few = np.where(np.arange(1301) % 100 == 3, residual, np.float32(0.0)).view(np.uint32)
    assert selected("top_sampled", few, (SamplePlan(16, 80, 30, 400), 40, ALL_KEYS), 40)[MISSING] == 27


def top_of_blocks() -> None:
    for kind in ("normal", "zeros", "ties"):
        for size, k, block in ((1, 1, 100), (257, 3, 100), (500, 2, 33), (300, 200, 200)):
            values = values_of(kind, size)
            room = size // block * k + -(-k * (size % block) // block)
            for offset in (0, 1) if kind == "normal" or not cuda_jit.SIMULATED else (size % 2,):
                addends = Sum(values, np.float32(1.0), np.zeros(size, np.float32), None)
                selected("top_of_blocks", addends, (k, block), room, offset)


def section_of(kernels: Any, indices: Array, count: int, strided: bool, room: int) -> tuple[list[int], bytes]:
    """Return the record and the section of coded indices, in arrays with room for more."""
    record, size = kernels.record(), RICE.bytes_max(room, count) // 8 * 8 + 16
    there = kernels.scratch("coded", room, np.uint32)
    kernels.load(np.append(indices, np.zeros(room - indices.size, np.uint32)), there)
    kernels.load(np.full(1, room - indices.size, np.int64), record[MISSING : MISSING + 1])
    parts = [kernels.scratch(f"part {i}", size, np.uint8) for i in range(3)]
    for part in parts:
        kernels.load(np.full(size, 0xA5, np.uint8), part)
    kernels.code_indices(there, count, strided, *parts, record)
    told = kernels.read(record[:TOLD]).tolist()
    sizes = told[HEAD_BYTES], bytes_of(told[LOW_BITS]), bytes_of(told[UNARY_BITS])
    return told, b"".join(kernels.read(part)[:n].tobytes() for part, n in zip(parts, sizes, strict=True))


def index_codes() -> None:
    """The device chooses and writes the coding that the CPU does, and decodes its section to the same indices."""
    rng, chosen = np.random.default_rng(1), set()
    for count, kept in (
        (1, 1),
        (257, 257),
        (3000, 255),
        (9000, 65),
        (2**32 - 1, 300),
        (3000, 129),
        (6400, 64),
        (70000, 700),
    ):
        indices = np.sort(rng.choice(count, kept, replace=False)).astype(np.uint32)
        if kept == 129:
            indices[:64] = np.arange(5, 69)  # clustered, then far apart
        elif kept == 64:
            indices = np.arange(99, 6400, 100, dtype=np.uint32)  # at regular distances
        elif kept == 700:
            indices = np.sort(rng.choice(3000, kept, replace=False)).astype(np.uint32)
            indices[350:] += 60000
        for strided in (False, True):
            for room in (kept, kept + 70) if kept < count // 2 else (kept,):
                told, section = section_of(device, indices, count, strided, room)
                wanted = (
                    STRIDED_RICE.encode(indices, 0, 1, count) if strided else encode_indices(read_only(indices), count)
                )
                assert section == wanted.section.tobytes(), (count, kept, strided, told)
                assert strided or (told[INDEX_CODING], told[PARAMETER]) == (wanted.wire_id, wanted.parameter)
                chosen.add(told[INDEX_CODING])
            part = np.frombuffer(section, np.uint8)
            header = Header(told[INDEX_CODING], 0, 0, count, kept, 1 if strided else told[PARAMETER])
            decoded = device.scratch("decoded", kept, np.uint32)
            reader = INDEX_READERS[told[INDEX_CODING]](part, header)
            reader.read(device, device.upload(reader.parts), decoded)
            np.testing.assert_array_equal(device.read(decoded), indices)
    assert chosen == set(INDEX_READERS) - {4}
    assert section_of(device, np.zeros(0, np.uint32), 100, False, 7)[0][INDEX_CODING:] == [1, 0, 0, 0, 0]


def randoms() -> None:
    for key, step, block in ((0, 0, 0), (0xFFFFFFFF, 7, 3), (5, 0x80000000, 2**26 - 1)):
        compare("random_words", (np.uint32(key), np.uint32(step), block), (np.zeros(256, np.uint32),))
    for begin, kept, count in ((0, 300, 1000), (256, 300, 2**32 - 1), (0, 5, 5)):
        compare("strata", (7, begin, kept, count, None), (np.zeros(kept - begin, np.uint32),))
    compare("stretch", (11, 65535), (np.arange(0, 65536, 256, dtype=np.uint32),))


CODINGS = {name: parts for name, parts in SECTIONS.items() if name != "int12"}  # which the host codes


def coded_as(
    name: str, values: Array, offset: int, stochastic: bool = False, missing: bool = False
) -> tuple[Array, ...]:
    coded = tuple(np.zeros(items * -(-values.size // per), dtype) for dtype, items, per in CODINGS[name])
    extra = (int(stochastic), 3, 0xFFFFFFFE) if name in ("int8", "int4") else (0, 0, 0)
    got, record, want_record = tuple(on_device(part, offset) for part in coded), device.record(), host.record()
    host.encode_as(name, values, extra, coded, want_record)
    device.encode_as(name, on_device(values, offset), extra, got, record)
    same((*got, record[:1]), (*coded, want_record[:1]), (name, values))
    if missing:  # the last values, which are not looked at
        longer, record = np.append(values, np.full(9, np.inf, np.float32)), device.record()
        device.load(np.full(1, 9, np.int64), record[MISSING : MISSING + 1])
        got = tuple(on_device(np.zeros(items * -(-longer.size // per), dtype)) for dtype, items, per in CODINGS[name])
        device.encode_as(name, on_device(longer), extra, got, record)
        same(
            (*(mine[: part.size] for mine, part in zip(got, coded, strict=True)), record[:1]),
            (*coded, want_record[:1]),
            name,
        )
    return coded


def coded_sums(name: str, size: int, offset: int) -> None:
    """Values are coded in the kernel that sums them: all, every seventh, or every second."""
    residual, update, decay = values_of("normal", size), values_of("normal", size)[::-1].copy(), np.float32(0.9)
    for phase, stride in ((0, 1), (5, 7), (1, 2)):
        kept = stride_count(phase, stride, size)
        coded = tuple(np.zeros(items * -(-kept // per), dtype) for dtype, items, per in CODINGS[name])
        got, record, want_record = tuple(on_device(part, offset) for part in coded), device.record(), host.record()
        theirs = Sum(residual, decay, update, np.zeros(size, np.float32).view(HostArray))
        ours = Sum(
            on_device(residual, offset), decay, on_device(update, offset), on_device(np.zeros(size, np.float32), offset)
        )
        if stride == 1:
            host.encode_sum_as(name, theirs, (1, 3, 4), coded, want_record)
            device.encode_sum_as(name, ours, (1, 3, 4), got, record)
        else:
            host.encode_strided_as(name, theirs, phase, stride, kept, (1, 3, 4), coded, want_record)
            device.encode_strided_as(name, ours, phase, stride, kept, (1, 3, 4), got, record)
        same((*got, ours.sums, record[:1]), (*coded, theirs.sums, want_record[:1]), (name, size, stride))


def value_codings() -> None:
    weight = np.float32(0.3)
    for kind in KINDS:
        for size in SIZES if kind == "normal" else (258,):
            offset = size % 4 // 3
            values = values_of(kind, size)
            rng = np.random.default_rng(size)
            indices = np.sort(rng.permutation(2 * size)[:size]).astype(np.uint32)
            base = rng.standard_normal(2 * size, dtype=np.float32)
            compare("largest_key", (values,), (), offset)
            for name in CODINGS:
                coded = coded_as(name, values, offset, missing=kind == "normal" and size == 257)
                if size and (kind == "wide" or size > 256):
                    fused(name, coded, values.size, indices, weight, base, offset)
            for name in ("int8", "int4"):
                coded_as(name, values, offset, stochastic=True)
    for name in CODINGS:
        tiles = () if cuda_jit.SIMULATED and name not in ("int8", "sign") else (6300,)  # four, of a turn too
        for size in (1, 515, *tiles):
            coded_sums(name, size, size % 2)
    odd = np.array([np.inf, -np.inf, np.nan, 65519.0, 65520.0, 3.4e38, 2.0**-25, 2.0**-24 * 1.5, -0.0], np.float32)
    for begin in (0, 3):  # with what is not finite, and without
        for name in ("fp16", "bf16", "int8", "int4", "2bit", "uint8minmax"):
            coded_as(name, odd[begin:], 0)
    halves, got = np.array([0x7C00, 0xFC00, 0x7E01, 1, 0x8001], np.uint16), on_device(np.zeros(5, np.float32))
    want = np.zeros(5, np.float32)
    host.decode_as("fp16", (halves,), want)
    device.decode_as("fp16", (on_device(halves),), got)
    same((got,), (want,), "decode_fp16")


def fused(
    name: str, coded: tuple[Array, ...], size: int, indices: Array, weight: np.float32, base: Array, offset: int
) -> None:
    """Values are decoded, and decoded and added in one kernel."""
    parts = tuple(on_device(part, offset) for part in coded)
    for way, extra, count in (
        ("decode_as", (), size),
        ("add_as", (weight,), size),
        ("scatter_add_as", (weight,), base.size),
        ("add_strided_as", (0, base.size // max(size, 1), size, weight), base.size),
    ):
        want, got = base[:count].copy(), on_device(base[:count], offset)
        where = (indices,) if way == "scatter_add_as" else ()
        there = tuple(on_device(each, offset) for each in where)
        getattr(host, way)(name, coded, *where, *extra, want)
        getattr(device, way)(name, parts, *there, *extra, got)
        same((got,), (want,), (way, name))


def updates_of(count: int, kind: str) -> list[Array]:
    """Make the updates of three steps. The last has few values other than zero, so its indices are clustered."""
    first, second = values_of(kind, count), values_of("normal", count)
    return [first, second, np.where(np.arange(count) // 64 % 7 == 3, second, np.float32(0.0)).astype(np.float32)]


def same_stream(spec: str, count: int, kind: str, decay: float = 1.0, first_step: int = 0) -> None:
    """Compare payloads and residuals over three steps, then decoded and accumulated values."""
    ours = DeviceErrorFeedback(device, parse(spec), count, decay=decay, seed=5)
    theirs = ErrorFeedback(parse(spec), count, decay=decay, seed=5)
    ours.memory.step = theirs.memory.step = first_step
    for step, update in enumerate(updates_of(count, kind)):
        if step == 1 and not ours.compressor.lossless:  # as a worker gives it: the parameters, and their start
            start = np.roll(update, 1)
            moved = update + start
            payload = ours.encode(DeviceDifference(on_device(moved), on_device(start)))
            update = moved - start
        else:
            payload = ours.encode(on_device(update))
        assert payload == theirs.encode(update), (spec, count, kind)
        for mine, yours in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
            assert mine[0] == yours[0] and mine[1].tobytes() == yours[1].tobytes(), (spec, count, kind, mine[0])
    base = values_of("normal", count)
    got, own, want = on_device(base), on_device(base), base.copy()
    device_compression.accumulate(device, payload, 0.3, got)
    accumulate(payload, 0.3, want)
    assert device.read(got).tobytes() == want.tobytes(), (spec, count, kind)
    if ours.coded is not None:
        ours.coded.add(0.3, own)
        assert device.read(own).tobytes() == want.tobytes(), (spec, count, kind)
    device_compression.decode(device, payload, got)
    decode(payload, want)
    assert device.read(got).tobytes() == want.tobytes(), (spec, count, kind)


def streams() -> None:
    for spec in EACH_STAGE:
        same_stream(spec, STREAM_COUNT, "normal")
    for count in (0, 1, 64, 65):
        for spec in ("dense", "topk:0.02", "topk:0.02+int8"):
            same_stream(spec, count, "normal")
    for kind in ("zeros", "equal", "denormal"):
        for spec in ("topk:0.02+int8", "cycle:0.2/0.1", "cycle:0.005/1.0+int8"):
            same_stream(spec, 257, kind, decay=0.75)
    same_stream("cycle:0.01/0.5", 65, "normal", first_step=64)  # after which no value has the phase


def sampled() -> None:
    """Check the selection with a sample, which arrays of this size would not use."""
    top_selection.SAMPLE_COUNT_MIN = 2000
    same_stream("topk:0.02+int8", SAMPLED_COUNT, "normal")
    before = device.counts["misled"]
    same_stream("mstopk:0.02", SAMPLED_COUNT, "equal")
    assert device.counts["misled"] - before == 1  # of three steps
    same_stream("topk:0.03", SAMPLED_COUNT, "rows")
    same_stream("cycle:1.0/0.02+int8", SAMPLED_COUNT, "normal")


# An encode of 2,053 values by the path that samples: launches, memsets; the fold of its payload: launches.
# docs/archive/design-figures.md has the table.
COUNTS_OF = {
    "topk:0.02+int8": (15, 1, 5), "mstopk:0.02": (15, 1, 5), "topk:64/4096+2bit": (9, 1, 5),
    "cycle:0.15+sign": (2, 1, 1), "cycle:0.3/0.2+sign": (14, 1, 6), "int8": (2, 1, 1), "sign": (2, 1, 1), "dense": (0, 0, 1),
}  # fmt: skip
BESIDE_MAX = 1024  # bytes that cross PCIe beside the payload itself


def launches() -> None:
    """Count launches and bytes: the host waits once for each encode, and reads nothing else."""
    if not cuda_jit.SIMULATED:
        return  # where sizes are others
    top_selection.SAMPLE_COUNT_MIN = 2000
    for spec, wanted in COUNTS_OF.items():
        feedback, update = DeviceErrorFeedback(device, parse(spec), 2053), on_device(values_of("normal", 2053))
        for _ in range(2):
            before = device.counts.copy()
            payload = feedback.encode(update)
        encoded = device.counts.copy()
        device_compression.accumulate(device, payload, 0.5, on_device(np.zeros(2053, np.float32)))
        found = encoded - before
        assert (found["waits"], found["reads"], found["bytes up"], found["misled"]) == (1, 0, 0, 0), spec
        assert -16 <= found["bytes down"] - payload.nbytes <= BESIDE_MAX, spec  # the host writes the header
        folded = (device.counts - encoded)["launches"]
        assert (found["launches"], found["memsets"], folded) == wanted, (spec, found, folded)


class RecordingDriver(SimulatedDriver):
    """The simulated driver, which notes each launch with its arguments, but for that of a payload's way to the host."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def launch(self, kernel: Any, blocks: int, stream: Any, arguments: tuple[Any, ...]) -> None:
        if kernel.name != "gather_sections":  # it is not captured
            self.launches.append((kernel.name, blocks, _plain(arguments)))
        super().launch(kernel, blocks, stream, arguments)


def _plain(argument: Any) -> Any:
    if isinstance(argument, DeviceArray):
        return argument.address, argument.size, argument.dtype
    return tuple(map(_plain, argument)) if isinstance(argument, tuple) else argument


def repeats() -> None:
    """Two steps ask for the same launches with the same arguments, whatever the update's address: a graph may hold them.

    The inputs of the encode hold what differs. Payloads equal the CPU's.
    """
    if not cuda_jit.SIMULATED:
        return  # launches are noted there
    top_selection.SAMPLE_COUNT_MIN = 2000
    for spec in EACH_STAGE:
        if parse(spec).lossless or spec.startswith("threshold") or spec in VALUE_STAGES[1:]:
            continue  # these launch nothing, or wait in the midst, or are launched as another one
        driver = RecordingDriver()
        kernels = CudaKernels(Queue(driver))
        ours = DeviceErrorFeedback(kernels, parse(spec), 2100, seed=3)
        theirs = ErrorFeedback(parse(spec), 2100, seed=3)
        noted = []
        for step in range(4):
            values = np.roll(values_of("normal", 2100), 100 * step)
            update = kernels.empty(2100, np.float32)
            kernels.load(values, update)
            driver.launches.clear()
            assert ours.encode(update) == theirs.encode(values), (spec, step)
            noted.append(driver.launches.copy())
        assert noted[2] and noted[2] == noted[3], spec


def odd_streams() -> None:
    feedback = DeviceErrorFeedback(device, parse("topk:0.1+int8"), 200)
    update = values_of("normal", 200)
    payload = bytes(feedback.encode(on_device(update)))
    before = feedback.state_dict()
    for value, text in ((np.nan, "1 of 200 values are NaN"), (np.inf, "1 of 200")):
        bad = update.copy()
        bad[7] = value
        with pytest.raises(NonFiniteError, match=text):
            feedback.encode(on_device(bad))
        for name, kept in feedback.state_dict().items():
            assert kept.tobytes() == before[name].tobytes()
    out = on_device(np.ones(200, np.float32))
    for spoiled in (payload[:-1], b"", payload[:40] + b"\xff" * 4 + payload[44:] + b"\0"):
        with pytest.raises(PayloadError):
            device_compression.accumulate(device, spoiled, 1.0, out)
        assert (device.read(out) == 1.0).all()
    feedback.restore(payload)
    reference = ErrorFeedback(parse("topk:0.1+int8"), 200)
    reference.load_state_dict({"residual": before["residual"], "step": before["step"]})
    reference.restore(payload)
    assert feedback.state_dict()["residual"].tobytes() == reference.state_dict()["residual"].tobytes()
    feedback.load_state_dict(reference.state_dict())
    assert feedback.encode(on_device(update)) == reference.encode(update)


def simulated_orders() -> None:
    """No two launches, copies or accesses of the host may use the same memory at once."""
    if cuda_jit.SIMULATED:
        from kit.device_orders import orders

        orders()


# Simulated threads of these parts switch as often as Python's own do: their subject is what the host does.
CALM = ("repeats", "streams", "odd_streams", "simulated_orders", "sampled", "launches")

PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        scans, selection, top_of_blocks, index_codes, randoms, value_codings, streams, odd_streams, simulated_orders,
        sampled, launches, repeats,
    )
}  # fmt: skip

if __name__ == "__main__":
    if cuda_jit.SIMULATED:
        cuda_simulator.install()
    warnings.simplefilter("ignore")  # NumPy's, of overflow in the intrinsics' stand-ins
    for part in sys.argv[1:] or PARTS:
        begin = time.perf_counter()
        if cuda_jit.SIMULATED:
            sys.setswitchinterval(cuda_simulator.CALM_S if part in CALM else cuda_simulator.SWITCH_S)
        with device.active():
            PARTS[part]()
        print(f"{part}: {time.perf_counter() - begin:.1f} s", flush=True)
