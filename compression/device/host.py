"""The CPU as a device: the kernels of the CPU under the names of a GPU's kernels (cuda/kernels.py).

With this device all code that a worker runs on a GPU, except the GPU's own kernels, runs at real sizes on machines
without a GPU. Arrays are NumPy's, or views of torch's CPU tensors. Fresh memory holds NaN, since that of a GPU may hold
anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import read_only, words_of
from narrows.compression.device.stages import BitStream, UploadPart
from narrows.compression.home import LandedPayload
from narrows.compression.index_codings import STRIDED_RICE, bytes_of, encode_indices
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.record import (
    HEAD_BYTES,
    INDEX_CODING,
    LARGEST,
    LOW_BITS,
    MISLED,
    MISSING,
    PARAMETER,
    RECORD,
    TOLD,
    UNARY_BITS,
    Sum,
)
from narrows.compression.kernels.select import COUNTS
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import HEADER_BYTES
from narrows.compression.value_codings import VALUE_CODINGS, Sectioned

Coded = tuple[Any, ...]
Result = TypeVar("Result")
POISON = 0x7FC5  # each 16 bits of fresh memory: read as float32, a NaN

# The number of arguments, at the end, that a kernel writes to.
OUTPUTS = {"count_above": 0, "largest_key": 0, "stretch": 1, "random_words": 1}
LOSSY = [coding for coding in VALUE_CODINGS.values() if isinstance(coding, Sectioned)]
CODINGS = {coding.decode_kernel.__name__.removeprefix("decode_"): coding for coding in LOSSY}


class HostArray(np.ndarray[Any, np.dtype[Any]]):
    """A NumPy array with the methods of a `DeviceArray` (cuda/arrays.py) that this package calls."""

    def is_c_contiguous(self) -> bool:
        return self.flags.c_contiguous


def _plain(array: Any) -> Any:
    """Return the array as a plain NumPy array, which the CPU's kernels take."""
    return array.view(np.ndarray) if isinstance(array, np.ndarray) else array


def _given(array: Any) -> Any:
    """Return the array as a read-only plain NumPy array: an input of the CPU's kernels."""
    return read_only(_plain(array)) if isinstance(array, np.ndarray) else array


def _cut(name: str, coded: Coded, kept: int) -> Coded:
    """Return the part of each section that `kept` values use; the sections may have room for more."""
    sizes = [part.size(kept) for part in CODINGS[name].sections] if name in CODINGS else [kept]
    return tuple(part[:size] for part, size in zip(coded, sizes, strict=True))


class HostKernels:
    """The kernels and the queue of the CPU, with the interface of CudaKernels (cuda/kernels.py)."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._scratch: dict[tuple[str, np.dtype[Any]], HostArray] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in OUTPUTS:
            raise AttributeError(f"there is no kernel {name}")
        kernel, outputs = getattr(cpu, name), OUTPUTS[name]

        def run(*arguments: Any) -> Any:
            split = len(arguments) - outputs
            return kernel(*map(_given, arguments[:split]), *map(_plain, arguments[split:]))

        setattr(self, name, run)
        return run

    # The interface of cuda/queue.py.

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def after_landings(self) -> None: ...

    def view(self, array: Any) -> HostArray:
        """Return a NumPy array, or a torch tensor on the CPU, as a HostArray, without a copy."""
        if not isinstance(array, np.ndarray):
            if not hasattr(array, "numpy"):
                raise TypeError(f"{type(array).__name__} is no array of this device")
            array = array.detach().numpy()
        return cast(HostArray, array.view(HostArray))

    def empty(self, count: int, dtype: type[np.generic]) -> HostArray:
        kind = np.dtype(dtype)
        words = np.full(-(-count * kind.itemsize // 2), POISON, np.uint16)
        return cast(HostArray, words.view(np.uint8)[: count * kind.itemsize].view(kind).view(HostArray))

    def zeros(self, count: int, dtype: type[np.generic]) -> HostArray:
        return np.zeros(count, dtype).view(HostArray)

    def scratch(self, name: str, count: int, dtype: type[np.generic]) -> HostArray:
        key = name, np.dtype(dtype)
        array = self._scratch.get(key)
        if array is None or array.size < count:
            array = self._scratch[key] = self.empty(max(count + count // 8, 64), dtype)
        return cast(HostArray, array[:count])

    @property
    def scratch_bytes(self) -> int:
        return sum(array.nbytes for array in self._scratch.values())

    @property
    def graphs_kept(self) -> int:
        return 0

    def begin(self, addends: Sum, phase: int = 0, seed: int = 0, key: tuple[int, int] = (0, 0)) -> Sum:
        """Return the arrays. Kernels of the host take the numbers as arguments."""
        return addends

    def forget_inputs(self) -> None: ...

    def captured(self, key: Hashable, launches: Callable[[], Result]) -> Result:
        return launches()

    def prepare(self, say: Callable[[str], None]) -> None: ...

    def record(self) -> HostArray:
        return self.zeros(RECORD, np.int64)

    def zero(self, array: HostArray) -> None:
        array.fill(0)

    def copy(self, source: HostArray, target: HostArray) -> None:
        np.copyto(target, source)

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        return np.empty(count, np.uint8)

    def read(self, array: HostArray) -> npt.NDArray[Any]:
        self.counts["reads"] += 1
        self.counts["bytes down"] += array.nbytes
        return np.array(array)

    def upload(self, parts: Sequence[UploadPart]) -> list[HostArray]:
        found = [words_of(part.part) if isinstance(part, BitStream) else np.array(part) for part in parts]
        self.counts["bytes up"] += sum(each.nbytes for each in found)
        return [cast(HostArray, each.view(HostArray)) for each in found]

    def load(self, host: npt.NDArray[Any], target: HostArray) -> None:
        self.counts["bytes up"] += host.nbytes
        np.copyto(target, host)

    def fetch(self, sources: Sequence[HostArray], targets: Sequence[npt.NDArray[np.uint8]]) -> LandedPayload:
        for source, target in zip(sources, targets, strict=True):
            self.counts["bytes down"] += source.nbytes
            np.copyto(target, source)
        return LandedPayload()

    # Kernels whose arguments differ from those of the CPU's: scratch memory and cursors are inside.

    def guarded(self, addends: Sum, record: HostArray) -> Sum:
        found = HostArray(addends.sums.size, np.float32)
        self.sum_of(addends._replace(sums=found))
        record[LARGEST] = max(int(record[LARGEST]), int(self.largest_key(found)))
        if record[LARGEST] < INFINITY_KEY:
            return addends
        return addends._replace(update=addends.residual, start=addends.residual)

    def sum_of(self, addends: Sum) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            update = addends.update if addends.start is None else np.subtract(addends.update, addends.start)
            if addends.decay == 1.0:
                np.add(addends.residual, update, out=addends.sums)
            else:
                np.add(np.multiply(addends.residual, addends.decay), update, out=addends.sums)

    def sum_strided(self, addends: Sum, phase: int, stride: int, chosen: HostArray, record: HostArray) -> None:
        self.sum_of(addends)
        chosen[:] = addends.sums[phase : phase + stride * chosen.size : stride]
        record[LARGEST] = max(int(record[LARGEST]), self.largest_key(addends.sums))

    def top_sampled(
        self, source: Any, plan: Any, k: int, key_mask: int, indices: HostArray, kept: HostArray, record: HostArray
    ) -> None:
        if isinstance(source, Sum):
            self.sum_of(source)
            source = source.sums.view(np.uint32)
        keys, counts = np.empty(plan.keys, np.uint32), np.empty(COUNTS, np.int64)
        cpu.sample_keys(_given(source), plan.group_lines, keys)
        smallest = key_mask & -key_mask
        threshold = max(cpu.kth_largest_key(read_only(keys), plan.rank, counts)[0] >> 10 << 10 & key_mask, smallest)
        places, bits = np.empty((2, plan.room), np.uint32)
        found = cpu.compact(_given(source), threshold - 1, 0, places, bits)
        if found > plan.room or (found < k and threshold > smallest):
            record[MISLED], record[MISSING] = 1, k
            return
        if found > k:
            last, above = cpu.kth_largest_key(read_only(bits[:found] & np.uint32(key_mask)), k, counts)
            found = cpu.keep_top(key_mask, last, k - above, places[:found], bits[:found])
        indices[:found], kept[:found] = places[:found], bits[:found]
        record[MISSING] = k - found

    def top(
        self, bits: HostArray, k: int, key_mask: int, indices: HostArray, kept: HostArray, record: HostArray
    ) -> None:
        keys = read_only(_plain(bits) & np.uint32(key_mask))
        threshold, above = cpu.kth_largest_key(keys, k, np.empty(COUNTS, np.int64))
        found = cpu.compact(keys, threshold, k - above if threshold else 0, _plain(indices), _plain(kept))
        kept[:found] = bits[indices[:found]]
        record[MISSING] = k - found

    def compact_above(
        self, bits: HostArray, above: int, indices: HostArray, kept: HostArray, record: HostArray
    ) -> None:
        record[MISSING] = indices.size - cpu.compact(_given(bits), above, 0, _plain(indices), _plain(kept))

    def top_of_blocks(
        self, addends: Sum, k: int, block: int, indices: HostArray, kept: HostArray, record: HostArray
    ) -> None:
        self.sum_of(addends)
        places, keys = np.empty((2, block), np.uint32)
        bits = _given(addends.sums.view(np.uint32))
        found = cpu.compact_blocks(bits, k, block, places, keys, _plain(indices), _plain(kept))
        record[MISSING] = indices.size - found

    def code_indices(
        self, indices: HostArray, count: int, strided: bool,
        head: HostArray, lows: HostArray, unary: HostArray, record: HostArray,
    ) -> None:  # fmt: skip
        """Code indices. The whole section goes to `lows`; `head` and `unary` stay empty."""
        kept = _given(indices[: indices.size - int(record[MISSING])])
        if not kept.size:
            return
        coded = STRIDED_RICE.encode(kept, 0, 1, count) if strided else encode_indices(kept, count)
        lows[: coded.section.size] = coded.section
        record[INDEX_CODING], record[PARAMETER] = coded.wire_id, coded.parameter
        record[LOW_BITS] = 8 * coded.section.size

    def land(
        self, arena: HostArray, begins: Any, sizes: Any, room: int, record: HostArray, target: npt.NDArray[np.uint8]
    ) -> LandedPayload:
        told = [int(number) for number in record[:TOLD]]
        kept = room - told[MISSING]
        lengths = [size * -(-kept // per) for size, per in zip(sizes[::2], sizes[1::2], strict=True)]
        lengths += [told[HEAD_BYTES], bytes_of(told[LOW_BITS]), bytes_of(told[UNARY_BITS])]
        target[: 8 * TOLD] = record[:TOLD].view(np.uint8)
        end = 8 * TOLD + HEADER_BYTES
        for begin, length in zip(begins, lengths, strict=True):
            target[end : end + length] = arena[begin : begin + length]
            end += length
        return LandedPayload()

    def take(self, source: HostArray, places: HostArray, out: HostArray) -> None:
        out[: places.size] = source[places]

    def rice_decode(self, lows: HostArray, unary: HostArray, r: int, indices: HostArray) -> None:
        cpu.rice_decode(_given(lows), _given(unary), r, np.zeros(4, np.uint64), _plain(indices))

    def fixed_decode(self, words: HostArray, width: int, indices: HostArray) -> None:
        cpu.fixed_decode(_given(words), width, np.zeros(2, np.uint64), _plain(indices))

    def grouped_decode(
        self, parameters: HostArray, lows: HostArray, unary: HostArray, count: int, indices: HostArray
    ) -> int:
        sections, cursor = (_given(parameters), _given(lows), _given(unary)), np.zeros(6, np.uint64)
        return int(cpu.grouped_decode(*sections, count, cursor, _plain(indices)))

    def strata(self, key: int, begin: int, kept: int, count: int, words: Any, indices: HostArray) -> None:
        cpu.strata(key, begin, kept, count, np.empty(RANDOM_BLOCK, np.uint32), _plain(indices))

    # Value codings, by name.

    def encode_as(self, name: str, values: HostArray, extra: Any, coded: Coded, record: HostArray) -> None:
        values = cast(HostArray, values[: values.size - int(record[MISSING])])
        coded = _cut(name, coded, values.size)
        if name == "fp32":
            coded[0][:] = values
            largest = self.largest_key(values)
        else:
            random = (bool(extra[0]), *extra[1:], 0, np.empty(RANDOM_BLOCK, np.uint32)) if CODINGS[name].random else ()
            largest = CODINGS[name].encode_kernel(_given(values), *random, *map(_plain, coded))
        record[LARGEST] = max(int(record[LARGEST]), int(largest))

    def encode_sum_as(self, name: str, addends: Sum, extra: Any, coded: Coded, record: HostArray) -> None:
        self.sum_of(addends)
        self.encode_as(name, addends.sums, extra, coded, record)
        self.add_as(name, coded, np.float32(-1.0), addends.sums)

    def encode_strided_as(
        self,
        name: str,
        addends: Sum,
        phase: int,
        stride: int,
        kept: int,
        extra: Any,
        coded: Coded,
        record: HostArray,
    ) -> None:
        chosen = np.empty(kept, np.float32).view(HostArray)
        self.sum_strided(addends, phase, stride, chosen, record)
        if kept:
            self.encode_as(name, chosen, extra, coded, record)
            self.add_as(name, coded, np.float32(-1.0), chosen)
            addends.sums[phase : phase + stride * kept : stride] = chosen

    def decode_as(self, name: str, coded: Coded, out: HostArray) -> None:
        if name == "fp32":
            np.copyto(out, coded[0])
        else:
            getattr(cpu, f"decode_{name}")(*map(_given, coded), _plain(out))

    def add_as(self, name: str, coded: Coded, weight: Any, out: HostArray) -> None:
        values = np.empty(out.size, np.float32)
        self.decode_as(name, coded, values)  # type: ignore[arg-type]
        cpu.add_fp32(read_only(values), np.float32(weight), _plain(out))

    def add_strided_as(
        self, name: str, coded: Coded, phase: int, stride: int, kept: int, weight: Any, out: HostArray
    ) -> None:
        chosen = cast(HostArray, np.ascontiguousarray(out[phase::stride][:kept]).view(HostArray))
        self.add_as(name, coded, weight, chosen)
        out[phase : phase + stride * kept : stride] = chosen

    def scatter_add_as(
        self, name: str, coded: Coded, indices: HostArray, weight: Any, out: HostArray, record: HostArray | None = None
    ) -> None:
        indices = cast(HostArray, indices[: indices.size - (0 if record is None else int(record[MISSING]))])
        values = np.empty(indices.size, np.float32)
        self.decode_as(name, _cut(name, coded, indices.size), values)  # type: ignore[arg-type]
        cpu.scatter_add_fp32(read_only(values), _given(indices), np.float32(weight), _plain(out))
