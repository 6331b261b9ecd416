"""A device whose memory is the host's: the kernels of the CPU under the names of a GPU's (cuda/kernels.py).

With it everything that a worker does on a GPU, but for the GPU's own kernels, runs at real sizes on machines without one. Its
arrays are NumPy's, and views of torch's on the CPU. Fresh memory holds NaN, for a device's holds anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import read_only
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.select import COUNTS
from narrows.compression.kernels.sums import Sum

Coded = tuple[Any, ...]
POISON = 0x7FC5  # of each 16 bits: as float32 a NaN

# How many of the last arguments of a kernel are written to.
OUTPUTS = {
    "sample_keys": 1, "count_above": 0, "largest_key": 0,
    "group_parameters": 1, "largest_gap": 0, "rice_encode": 2, "fixed_encode": 1, "grouped_encode": 2,
    "strided": 1, "stretch": 1, "random_words": 1,
    "encode_fp16": 1, "encode_bf16": 1, "encode_sign": 2, "encode_2bit": 3, "encode_uint8minmax": 2,
    "decode_fp16": 1, "decode_bf16": 1, "decode_int8": 1, "decode_int4": 1,
    "decode_2bit": 1, "decode_sign": 1, "decode_uint8minmax": 1,
    "add_fp32": 1, "scatter_add_fp32": 1,
}  # fmt: skip


class HostArray(np.ndarray[Any, np.dtype[Any]]):
    """What is used of numba's device arrays."""

    def copy_to_host(self) -> npt.NDArray[Any]:
        return np.array(self)

    def copy_to_device(self, source: npt.NDArray[Any]) -> None:
        np.copyto(self, source)

    def is_c_contiguous(self) -> bool:
        return self.flags.c_contiguous


class Landed:
    """A copy to the host that is over when it begins."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """It is there."""


def _plain(array: Any) -> Any:
    """As the CPU's kernels know arrays."""
    return array.view(np.ndarray) if isinstance(array, np.ndarray) else array


def _given(array: Any) -> Any:
    return read_only(_plain(array)) if isinstance(array, np.ndarray) else array


class HostKernels:
    """See cuda/kernels.py, CudaKernels."""

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

    # As Queue.

    @contextmanager
    def active(self) -> Iterator[None]:
        yield

    def view(self, array: Any) -> HostArray:
        """Of a NumPy array, or of a torch tensor on the CPU: no copy."""
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

    def zero(self, array: HostArray) -> None:
        array.fill(0)

    def copy(self, source: HostArray, target: HostArray) -> None:
        np.copyto(target, source)

    def pinned(self, count: int) -> npt.NDArray[np.uint8]:
        return np.empty(count, np.uint8)

    def read(self, array: HostArray) -> npt.NDArray[Any]:
        return np.array(array)

    def upload(self, name: str, host: npt.NDArray[Any]) -> HostArray:
        self.counts["bytes up"] += host.nbytes
        there = self.scratch(f"received {name}", host.size, host.dtype.type)
        np.copyto(there, host)
        return there

    def load(self, host: npt.NDArray[Any], target: HostArray) -> None:
        self.counts["bytes up"] += host.nbytes
        np.copyto(target, host)

    def fetch(self, sources: Sequence[HostArray], targets: Sequence[npt.NDArray[np.uint8]]) -> Landed:
        for source, target in zip(sources, targets, strict=True):
            self.counts["bytes down"] += source.nbytes
            np.copyto(target, source)
        return Landed()

    # Kernels whose scratch or cursors are the device's own affair.

    def sum_of(self, addends: Sum) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            if addends.decay == 1.0:
                np.add(addends.residual, addends.update, out=addends.sums)
            else:
                np.add(np.multiply(addends.residual, addends.decay), addends.update, out=addends.sums)

    def kth_largest_key(self, bits: HostArray, k: int) -> tuple[int, int]:
        threshold, above = cpu.kth_largest_key(_given(bits), k, np.empty(COUNTS, np.int64))
        return int(threshold), int(above)

    def forget(self) -> None:
        """Results are known at once."""

    def keep_top(self, mask: int, above: int, ties: int, found: int, indices: HostArray, kept: HostArray) -> None:
        cpu.keep_top(mask, above, ties, _plain(indices), _plain(kept))

    def compact(
        self, bits: HostArray, above: int, ties: int, indices: HostArray, kept: HostArray, found: int | None = None
    ) -> int:
        return int(cpu.compact(_given(bits), above, ties, _plain(indices), _plain(kept)))

    def rice_costs(self, indices: HostArray, first: int) -> list[int]:
        costs = np.empty(4, np.int64)
        cpu.rice_costs(_given(indices), first, costs)
        return [int(cost) for cost in costs]

    def sample_sum_keys(self, addends: Sum, group_lines: int, keys: HostArray) -> None:
        self.sum_of(addends)
        self.sample_keys(addends.sums.view(np.uint32), group_lines, keys)

    def compact_sum(self, addends: Sum, above: int, indices: HostArray, kept: HostArray) -> int:
        self.sum_of(addends)
        return int(self.compact(addends.sums.view(np.uint32), above, 0, indices, kept))

    def compact_blocks(
        self, bits: HostArray, k: int, block: int, places: Any, keys: Any, indices: HostArray, kept: HostArray
    ) -> int:
        places, keys = np.empty((2, block), np.uint32)
        return int(cpu.compact_blocks(_given(bits), k, block, places, keys, _plain(indices), _plain(kept)))

    def masked(self, bits: HostArray, mask: int, keys: HostArray) -> None:
        np.bitwise_and(bits, np.uint32(mask), out=keys)

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

    def encode_int8(self, values: HostArray, *rest: Any) -> int:
        return self._encode_random("encode_int8", values, *rest)

    def encode_int4(self, values: HostArray, *rest: Any) -> int:
        return self._encode_random("encode_int4", values, *rest)

    def _encode_random(
        self, name: str, values: HostArray, stochastic: bool, key_low: int, key_high: int, words: Any, *coded: HostArray
    ) -> int:
        words = np.empty(RANDOM_BLOCK, np.uint32)
        kernel = getattr(cpu, name)
        return int(kernel(_given(values), stochastic, key_low, key_high, words, *map(_plain, coded)))

    # Values of any coding, by its name.

    def decode_as(self, name: str, coded: Coded, out: HostArray) -> None:
        if name == "fp32":
            np.copyto(out, coded[0])
        else:
            getattr(cpu, f"decode_{name}")(*map(_given, coded), _plain(out))

    def add_as(self, name: str, coded: Coded, weight: Any, out: HostArray) -> None:
        values = np.empty(out.size, np.float32)
        self.decode_as(name, coded, values)  # type: ignore[arg-type]
        cpu.add_fp32(read_only(values), np.float32(weight), _plain(out))

    def scatter_add_as(self, name: str, coded: Coded, indices: HostArray, weight: Any, out: HostArray) -> None:
        values = np.empty(indices.size, np.float32)
        self.decode_as(name, coded, values)  # type: ignore[arg-type]
        cpu.scatter_add_fp32(read_only(values), _given(indices), np.float32(weight), _plain(out))
