"""Each CUDA kernel and DeviceErrorFeedback against the CPU's, bit for bit; test_cuda_simulator.py runs it.

    cd tests; NUMBA_ENABLE_CUDASIM=1 python -m kit.cuda_checks [PART ...]     in the simulator
    cd tests; python -m kit.cuda_checks [PART ...]                            on a GPU, with larger sizes as well

A simulated thread is a Python thread, so sizes are tiny there and a block has 8 threads: a tile of a selection is 256
values. The simulator finds races too, if they are likely; a GPU has the last word.
"""

import sys
import threading
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from numba import cuda

from kit.reference import gaps_of, values_of
from kit.reference_payload import SECTIONS
from narrows.compression import ErrorFeedback, NonFiniteError, PayloadError, accumulate, decode, parse
from narrows.compression import device as device_compression
from narrows.compression import selection as top_selection
from narrows.compression.buffers import read_only
from narrows.compression.cuda import jit as cuda_jit
from narrows.compression.cuda.scans import scan
from narrows.compression.device import DeviceErrorFeedback, kernels_for
from narrows.compression.kernels import cpu
from narrows.compression.kernels.select import COUNTS
from narrows.compression.kernels.sums import Sum

Array = npt.NDArray[Any]
device = kernels_for("cuda:0")
WORDS, KEYS = np.zeros((2, 256), np.uint32)  # scratch of CPU kernels
SIZES = (0, 1, 3, 255, 256, 257, 515) if cuda_jit.SIMULATED else (0, 1, 3, 255, 257, 8191, 8192, 8193, 300_001)
STREAM_COUNT = 321 if cuda_jit.SIMULATED else 300_001
SAMPLED_COUNT = 2053 if cuda_jit.SIMULATED else 3_000_001
KINDS = ("normal", "zeros", "equal", "denormal", "wide")


SHARED_LOCK = threading.Lock()
BARRIER_S = 60.0  # in which the threads of a block meet, on a busy machine too


def shared_array(self: Any, shape: Any, dtype: Any) -> Any:
    """In place of the simulator's, in which two threads that are first at once get two arrays; this one holds garbage."""
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    with SHARED_LOCK:
        if place not in self._allocations:
            self._allocations[place] = (
                np.frombuffer(np.random.bytes(np.empty(shape, dtype).nbytes), dtype).reshape(shape).copy()
            )
        return self._allocations[place]


class Block:
    """In place of the simulator's manager of a block, which polls: the threads of a block wait for each other at a barrier,
    and one that has ended is waited for no more."""

    def __init__(self, f: Callable[..., None], grid: Any, block: tuple[int, ...], debug: bool) -> None:
        self._f, self._grid_dim, self._block_dim, self._debug = f, grid, block, debug
        self.block_state = np.zeros(block, np.bool_)

    def run(self, where: Any, *args: Any) -> None:
        def target() -> None:
            try:
                self._f(*args)
            finally:
                self._end()

        points = np.ndindex(*self._block_dim)
        threads = [simulator.BlockThread(target, self, where, point, self._debug) for point in points]
        self.turn, self.waiting, self.left, self.condition = 0, 0, len(threads), threading.Condition()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for kind, trace in [thread.exception for thread in threads if thread.exception]:
            raise kind.with_traceback(trace)

    def meet(self) -> None:
        with self.condition:
            turn = self.turn
            self.waiting += 1
            self._pass()
            if not self.condition.wait_for(lambda: self.turn != turn, BARRIER_S):
                raise RuntimeError(f"threads of a block did not meet within {BARRIER_S} s")

    def _end(self) -> None:
        with self.condition:
            self.left -= 1
            self._pass()

    def _pass(self) -> None:
        if self.waiting == self.left:
            self.turn, self.waiting = self.turn + 1, 0
            self.condition.notify_all()


def on_device(array: Array, offset: int = 0) -> Any:
    """A copy on the device; one with an offset starts where four values cannot be loaded at once."""
    room = np.zeros(array.size + offset, array.dtype)
    room[offset:] = array
    if not array.size:
        return cuda.to_device(room)[:0]  # an empty slice at the end of an array is refused on a device
    return cuda.to_device(room)[offset:]


def frozen(x: Array) -> Array:
    """Read-only as kernels take it; but for what is scratch to them."""
    return x if x is WORDS or x is KEYS else read_only(x)


def compare(name: str, inputs: tuple[Any, ...], outputs: tuple[Array, ...], offset: int = 0) -> Any:
    """Runs the kernel `name` on both, on equal outputs; they and what is returned must be equal. Returns that.

    Of outputs that are compacted in place only what was found has a meaning.
    """
    want = tuple(output.copy() for output in outputs)
    got = tuple(on_device(output, offset) for output in outputs)
    arguments = [on_device(x, offset) if isinstance(x, np.ndarray) else x for x in inputs]
    expected = getattr(cpu, name)(*(frozen(x) if isinstance(x, np.ndarray) else x for x in inputs), *want)
    known = (expected,) if name == "keep_top" else ()
    found = told(getattr(device, name)(*arguments, *known, *got))
    assert found in (expected, None), (name, inputs, found, expected)
    size = expected if name == "keep_top" else None
    for mine, yours in zip(got, want, strict=True):
        mine, yours = mine[:size], yours[:size]
        np.testing.assert_array_equal(mine.copy_to_host().view(np.uint8), yours.view(np.uint8), err_msg=name)
    return expected


def told(found: Any) -> Any:
    """What the host learns of it: None where a device leaves out what the caller knows."""
    if isinstance(found, list):
        return tuple(map(int, found))
    return found if found is None or isinstance(found, tuple) else int(found)


def scans() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 255, 256, 257, 700):
        values = rng.integers(0, 2**40, size).astype(np.uint64)
        totals = on_device(values)
        scan(device.queue, totals)
        np.testing.assert_array_equal(totals.copy_to_host(), np.cumsum(values) - values)


def selection() -> None:
    for kind in KINDS:
        for size in SIZES[1:] if kind == "normal" else (1, 515):
            bits = values_of(kind, size).view(np.uint32)
            k = max(1, size // 100)
            counts = np.zeros(COUNTS, np.int64)
            threshold, above = device.kth_largest_key(on_device(bits), k)
            assert (threshold, above) == cpu.kth_largest_key(read_only(bits), k, counts.copy())
            for ties in (0, k - above):
                room = np.zeros(above + ties, np.uint32)
                assert compare("compact", (bits, threshold, ties), (room, room), size % 2) == room.size
            if above + ties > 1:
                short = on_device(room[1:])
                assert device.compact(on_device(bits), threshold, ties, short, short) == room.size
    bits = values_of("equal", 1200).view(np.uint32)
    room = np.zeros(600, np.uint32)
    compare("compact", (bits, int(bits[0] & 0x7FFFFFFF), 600), (room, room))
    bits = values_of("normal", 4096).view(np.uint32)
    compare("sample_keys", (bits, 16), (np.zeros(4096 // 256 * 16, np.uint32),), 1)
    residual, update, decay = values_of("normal", 1301), values_of("wide", 1301), np.float32(0.9)
    for offset in (0, 1):
        sums, room = on_device(np.zeros(1301, np.float32), offset), np.zeros(1000, np.uint32)
        addends = Sum(on_device(residual, offset), decay, on_device(update, offset), sums)
        keys = on_device(np.zeros(1301 // 256 * 16, np.uint32))
        device.sample_sum_keys(addends, 16, keys)
        indices, kept = on_device(room), on_device(room)
        found = device.compact_sum(addends, 0x3F800000, indices, kept)
        want = decay * residual + update
        want_keys, want_indices, want_kept = np.empty(keys.size, np.uint32), room, room.copy()
        bits = read_only(want.view(np.uint32))
        cpu.sample_keys(bits, 16, want_keys)
        assert found == cpu.compact(bits, 0x3F800000, 0, want_indices, want_kept)
        for mine, yours in ((sums, want), (keys, want_keys), (indices, want_indices), (kept, want_kept)):
            np.testing.assert_array_equal(mine.copy_to_host().view(np.uint32), yours.view(np.uint32))
        device.zero(sums)
        device.sum_of(addends)
        np.testing.assert_array_equal(sums.copy_to_host(), want)


def top_of_blocks() -> None:
    for kind in ("normal", "zeros", "ties"):
        for size, k, block in ((1, 1, 100), (257, 3, 100), (500, 2, 33), (300, 200, 200)):
            bits = values_of(kind, size).view(np.uint32)
            room = np.zeros(size // block * k + -(-k * (size % block) // block), np.uint32)
            compare("compact_blocks", (bits, k, block, WORDS, KEYS), (room, room))
    for mask in (0x7FFFFFFF, 0x7FFFE000):
        kept = values_of("ties", 300).view(np.uint32)
        compare("keep_top", (mask, 0x3E000000, 20), (np.arange(300, dtype=np.uint32), kept))
    compare("count_above", (kept, 0x3E000000), ())


def rice() -> None:
    rng = np.random.default_rng(1)
    for count, kept in ((1, 1), (257, 257), (3000, 255), (9000, 65), (2**32 - 1, 300)):
        indices = np.sort(rng.choice(count, kept, replace=False)).astype(np.uint32)
        highest = int(indices[-1])
        for r in (0, 3, 31) if count < 2**20 else (22,):
            unary_bits = kept + int((gaps_of(indices) >> r).sum())
            lows, unary = words_for(kept * r), words_for(unary_bits)
            assert compare("rice_encode", (indices, r), (lows, unary)) == unary_bits
            cpu.rice_encode(read_only(indices), r, lows, unary)
            for limit in (count, highest):
                compare("rice_last_index", (lows, unary, kept, r, limit), ())
            assert compare("rice_last_index", (lows, unary, kept + 1, r, count), ()) == -1
            decoded = on_device(np.zeros(kept, np.uint32))
            device.rice_decode(on_device(lows), on_device(unary), r, decoded)
            np.testing.assert_array_equal(decoded.copy_to_host(), indices)
        costs = np.empty(4, np.int64)
        cpu.rice_costs(read_only(indices), 5, costs)
        assert [int(cost) for cost in device.rice_costs(on_device(indices), 5)] == costs.tolist()


def other_indices() -> None:
    rng = np.random.default_rng(2)
    for count, kept in ((1, 1), (257, 257), (3000, 129), (2**32 - 1, 70)):
        indices = np.sort(rng.choice(count, kept, replace=False)).astype(np.uint32)
        if kept == 129:
            indices[:64] = np.arange(5, 69)  # clustered, then far apart
        parameters = np.zeros(-(-kept // 64), np.uint8)
        low_bits, unary_bits = compare("group_parameters", (indices,), (parameters,))
        cpu.group_parameters(read_only(indices), parameters)
        width = compare("largest_gap", (indices,), ()).bit_length()
        decoded = on_device(np.zeros(kept, np.uint32))
        if unary_bits < 2**20:
            lows, unary = words_for(low_bits), words_for(unary_bits)
            compare("grouped_encode", (indices, parameters), (lows, unary))
            cpu.grouped_encode(read_only(indices), read_only(parameters), lows, unary)
            arguments = on_device(parameters), on_device(lows), on_device(unary), count, decoded
            assert int(device.grouped_decode(*arguments)) - 1 == indices[-1]
            np.testing.assert_array_equal(decoded.copy_to_host(), indices)
        words = words_for(kept * width)
        compare("fixed_encode", (indices, width), (words,))
        cpu.fixed_encode(read_only(indices), width, words)
        assert compare("fixed_last_index", (words, width, kept), ()) == indices[-1]
        device.fixed_decode(on_device(words), width, decoded)
        np.testing.assert_array_equal(decoded.copy_to_host(), indices)


def randoms() -> None:
    for key, step, block in ((0, 0, 0), (0xFFFFFFFF, 7, 3), (5, 0x80000000, 2**26 - 1)):
        compare("random_words", (np.uint32(key), np.uint32(step), block), (np.zeros(256, np.uint32),))
    for begin, kept, count in ((0, 300, 1000), (256, 300, 2**32 - 1), (0, 5, 5)):
        compare("strata", (7, begin, kept, count, WORDS), (np.zeros(kept - begin, np.uint32),))
        compare("strided", (3, 20, begin), (np.zeros(kept - begin, np.uint32),))
    compare("stretch", (11, 65535), (np.arange(0, 65536, 256, dtype=np.uint32),))


def words_for(bits: int) -> Array:
    return np.zeros((bits + 63) // 64 + 2, np.uint64)


CODINGS = {name: sections for name, sections in SECTIONS.items() if name != "fp32"}


def coded_as(name: str, values: Array, offset: int, stochastic: bool = False) -> tuple[Array, ...]:
    coded = tuple(np.zeros(items * -(-values.size // per), dtype) for dtype, items, per in CODINGS[name])
    extra = (stochastic, 3, 0xFFFFFFFE, WORDS) if name in ("int8", "int4") else ()
    compare(f"encode_{name}", (values, *extra), coded, offset)
    getattr(cpu, f"encode_{name}")(read_only(values), *extra, *coded)
    return coded


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
            compare("add_fp32", (values, weight), (base[:size],), offset)
            compare("scatter_add_fp32", (values, indices, weight), (base,), offset)
            for name in CODINGS:
                coded = coded_as(name, values, offset)
                out = base[:size].copy()
                compare(f"decode_{name}", coded, (out,), offset)
                getattr(cpu, f"decode_{name}")(*(read_only(part) for part in coded), out)
                if kind == "wide" or size > 256:
                    fused(name, coded, out, indices, weight, base, offset)
            for name in ("int8", "int4"):
                coded_as(name, values, offset, stochastic=True)
    odd = np.array([np.inf, -np.inf, np.nan, 65519.0, 65520.0, 3.4e38, 2.0**-25, 2.0**-24 * 1.5, -0.0], np.float32)
    for begin in (0, 3):  # with what is not finite, and without
        for name in ("fp16", "bf16", "int8", "int4", "2bit", "uint8minmax"):
            coded_as(name, odd[begin:], 0)
    compare("decode_fp16", (np.array([0x7C00, 0xFC00, 0x7E01, 1, 0x8001], np.uint16),), (np.zeros(5, np.float32),))
    for signs in (True, False):
        compare("pack_above", (values, 0x3F000000, signs), (np.zeros(-(-values.size // 8), np.uint8),))


def fused(
    name: str, coded: tuple[Array, ...], decoded: Array, indices: Array, weight: np.float32, base: Array, offset: int
) -> None:
    """What is decoded and added at once is what is decoded and then added."""
    parts = tuple(on_device(part, offset) for part in coded)
    want, got = base[: decoded.size].copy(), on_device(base[: decoded.size], offset)
    cpu.add_fp32(read_only(decoded), weight, want)
    device.add_as(name, parts, weight, got)
    np.testing.assert_array_equal(got.copy_to_host().view(np.uint32), want.view(np.uint32))
    want, got = base.copy(), on_device(base, offset)
    cpu.scatter_add_fp32(read_only(decoded), read_only(indices), weight, want)
    device.scatter_add_as(name, parts, on_device(indices, offset), weight, got)
    np.testing.assert_array_equal(got.copy_to_host().view(np.uint32), want.view(np.uint32))


SPECS = (
    "dense", "int8", "int4:stochastic", "2bit", "sign+lz4", "uint8minmax", "topk:0.01+int8", "topk:4/100+2bit",
    "topk:0.02+int8:stochastic+lz4", "mstopk:0.02+int4", "randk:0.05+bf16", "cycle:0.1+sign", "threshold:1.5", "topk:0.5+fp16",
    "cycle:0.3/0.2+sign",
)  # fmt: skip


def updates_of(count: int, kind: str) -> list[Array]:
    """Three steps; with few values that are not zero in the last, so that indices are clustered."""
    first, second = values_of(kind, count), values_of("normal", count)
    return [first, second, np.where(np.arange(count) // 64 % 7 == 3, second, np.float32(0.0)).astype(np.float32)]


def same_stream(spec: str, count: int, kind: str, decay: float = 1.0, first_step: int = 0) -> None:
    """Payloads and residuals equal over three steps; then what is decoded and accumulated."""
    ours = DeviceErrorFeedback(device, parse(spec), count, decay=decay, seed=5)
    theirs = ErrorFeedback(parse(spec), count, decay=decay, seed=5)
    ours.memory.step = theirs.memory.step = first_step
    for update in updates_of(count, kind):
        payload = ours.encode(on_device(update))
        assert payload == theirs.encode(update), (spec, count, kind)
        for mine, yours in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
            assert mine[0] == yours[0] and mine[1].tobytes() == yours[1].tobytes(), (spec, count, kind, mine[0])
    base = values_of("normal", count)
    got, want = on_device(base), base.copy()
    device_compression.accumulate(device, payload, 0.3, got)
    accumulate(payload, 0.3, want)
    assert got.copy_to_host().tobytes() == want.tobytes(), (spec, count, kind)
    device_compression.decode(device, payload, got)
    decode(payload, want)
    assert got.copy_to_host().tobytes() == want.tobytes(), (spec, count, kind)


def streams() -> None:
    for spec in SPECS:
        same_stream(spec, STREAM_COUNT, "normal")
    for count in (0, 1, 64, 65):
        for spec in ("dense", "topk:0.02", "topk:0.02+int8"):
            same_stream(spec, count, "normal")
    for kind in ("zeros", "equal", "denormal"):
        for spec in ("topk:0.02+int8", "cycle:0.2/0.1", "cycle:0.005/1.0+int8"):
            same_stream(spec, 257, kind, decay=0.75)
    same_stream("cycle:0.01/0.5", 65, "normal", first_step=64)  # after which no value has the phase


def sampled() -> None:
    """The selection that samples, which arrays of this size would not be."""
    top_selection.SAMPLE_COUNT_MIN = 2000
    same_stream("topk:0.02+int8", SAMPLED_COUNT, "normal")
    same_stream("mstopk:0.02", SAMPLED_COUNT, "equal")
    same_stream("topk:0.03", SAMPLED_COUNT, "rows")
    same_stream("cycle:1.0/0.02+int8", SAMPLED_COUNT, "normal")


# Of an encode of 2,053 values by the path that samples, beside the one wait for the payload: launches, memsets, reads. Of the
# fold of its payload: launches. docs/compression.md has the table.
COUNTS_OF = {
    "topk:0.02+int8": (31, 8, 4, 7), "mstopk:0.02": (32, 8, 4, 7), "topk:64/4096+2bit": (13, 5, 2, 7),
    "cycle:0.15+sign": (6, 1, 1, 2), "int8": (3, 1, 1, 1), "dense": (0, 0, 0, 1),
}  # fmt: skip


def launches() -> None:
    """How much the host asks of a device."""
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
        found = [encoded[what] - before[what] for what in ("launches", "memsets", "reads")]
        assert (*found, device.counts["launches"] - encoded["launches"]) == wanted, (spec, found)


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
        assert (out.copy_to_host() == 1.0).all()
    feedback.restore(payload)
    reference = ErrorFeedback(parse("topk:0.1+int8"), 200)
    reference.load_state_dict({"residual": before["residual"], "step": before["step"]})
    reference.restore(payload)
    assert feedback.state_dict()["residual"].tobytes() == reference.state_dict()["residual"].tobytes()
    feedback.load_state_dict(reference.state_dict())
    assert feedback.encode(on_device(update)) == reference.encode(update)


def simulated_orders() -> None:
    """Nothing that launches, copies and the host do with the same memory may happen at once."""
    if cuda_jit.SIMULATED:
        from kit.orders import orders

        orders()


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        scans, selection, top_of_blocks, rice, other_indices, randoms, value_codings, streams, odd_streams, simulated_orders,
        sampled, launches,
    )
}  # fmt: skip

if __name__ == "__main__":
    if cuda_jit.SIMULATED:
        shared: Any = import_module("numba.cuda.simulator.kernelapi").FakeCUDAShared
        simulator: Any = import_module("numba.cuda.simulator.kernel")
        shared.array = shared_array
        simulator.BlockManager = Block
        simulator.BlockThread.syncthreads = lambda thread: thread._manager.meet()
        sys.setswitchinterval(1e-5)  # more interleavings are seen
    warnings.simplefilter("ignore")  # NumPy's, of overflow in the intrinsics' stand-ins
    for part in sys.argv[1:] or PARTS:
        begin = time.perf_counter()
        PARTS[part]()
        print(f"{part}: {time.perf_counter() - begin:.1f} s", flush=True)
