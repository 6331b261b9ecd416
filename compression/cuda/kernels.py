"""The CUDA kernels under the names that all devices share. Their results equal those of the CPU (device/host.py).

Arguments are `DeviceArray`s; `view` makes one of anything with a __cuda_array_interface__. A function that
returns a Python integer waits for the device. All other results stay in the record of an encode (kernels/record.py).
Decoders of indices have no cursor: they read a whole section.
"""

from functools import partial
from types import FunctionType
from typing import Any

from narrows.compression.cuda.grouped import grouped_decode
from narrows.compression.cuda.indices import code_indices
from narrows.compression.cuda.landing import land
from narrows.compression.cuda.levels import SIGN, TWO_BIT, UINT8_MINMAX
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.random import random_words, strata, stretch
from narrows.compression.cuda.rice import fixed_decode, rice_decode
from narrows.compression.cuda.select import compact_above, count_above, take, top, top_of_blocks, top_sampled
from narrows.compression.cuda.sums import guarded, sum_of, sum_strided
from narrows.compression.cuda.values import (
    BF16,
    FP16,
    FP32,
    INT4,
    INT8,
    Coding,
    add_strided_with,
    add_with,
    decode_with,
    encode_strided_with,
    encode_sum_with,
    encode_with,
    largest_key,
    scatter_add_with,
)

CODINGS: dict[str, Coding] = {
    "fp32": FP32,
    "fp16": FP16,
    "bf16": BF16,
    "int8": INT8,
    "int4": INT4,
    "2bit": TWO_BIT,
    "sign": SIGN,
    "uint8minmax": UINT8_MINMAX,
}


def encode_as(queue: Queue, name: str, values: Any, *rest: Any) -> None:
    """Encode values with the coding `name`, the name of the CPU's decode kernel without "decode_".

    rest: extra, coded, record, as in values.py.
    """
    encode_with(queue, CODINGS[name], values, *rest)


def encode_sum_as(queue: Queue, name: str, addends: Any, *rest: Any) -> None:
    """Make a Sum, encode it, and subtract the decoded values from it."""
    encode_sum_with(queue, CODINGS[name], addends, *rest)


def encode_strided_as(queue: Queue, name: str, addends: Any, *rest: Any) -> None:
    """Make a Sum, encode every stride-th value of it, and subtract the decoded values from it."""
    encode_strided_with(queue, CODINGS[name], addends, *rest)


def decode_as(queue: Queue, name: str, coded: Any, out: Any) -> None:
    """Set out = the decoded values."""
    decode_with(queue, CODINGS[name], coded, out)


def add_as(queue: Queue, name: str, coded: Any, weight: Any, out: Any) -> None:
    """Set out += weight * decoded values."""
    add_with(queue, CODINGS[name], coded, weight, out)


def scatter_add_as(
    queue: Queue, name: str, coded: Any, indices: Any, weight: Any, out: Any, record: Any = None
) -> None:
    """Set out[indices] += weight * decoded values.

    record: the record of an encode, whose last record[MISSING] values are unused; None: all are used.
    """
    scatter_add_with(queue, CODINGS[name], coded, indices, weight, out, queue.complete if record is None else record)


def add_strided_as(
    queue: Queue, name: str, coded: Any, phase: int, stride: int, kept: int, weight: Any, out: Any
) -> None:
    """Set out[phase + i * stride] += weight * decoded value i, for i < kept."""
    add_strided_with(queue, CODINGS[name], coded, phase, stride, kept, weight, out)


class CudaKernels:
    """All kernels of this file, bound to one queue, and the methods of the queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.counts = queue, queue.counts

    def __getattr__(self, name: str) -> Any:
        if hasattr(Queue, name):
            return getattr(self.queue, name)
        value = globals().get(name)
        if value is None:
            raise AttributeError(f"there is no kernel {name}")
        bound = partial(value, self.queue) if isinstance(value, FunctionType) else value
        setattr(self, name, bound)
        return bound


__all__ = [
    "CODINGS",
    "CudaKernels",
    "add_as",
    "add_strided_as",
    "code_indices",
    "compact_above",
    "count_above",
    "decode_as",
    "encode_as",
    "encode_strided_as",
    "encode_sum_as",
    "fixed_decode",
    "grouped_decode",
    "guarded",
    "land",
    "largest_key",
    "random_words",
    "rice_decode",
    "scatter_add_as",
    "strata",
    "stretch",
    "sum_of",
    "sum_strided",
    "take",
    "top",
    "top_of_blocks",
    "top_sampled",
]
