"""The CUDA kernels under the names that every device shares (device/host.py has the CPU's under them), with the CPU's results.

Arguments are numba's device arrays (`view` makes one of anything with a __cuda_array_interface__); results that are
Python integers wait for the device. All else stays in the record of an encode (kernels/record.py). Decoders of indices take no
cursor: a section is read whole. Importing this needs numba-cuda.
"""

from functools import partial
from types import FunctionType
from typing import Any

from narrows.compression.cuda.grouped import grouped_decode
from narrows.compression.cuda.indices import code_indices
from narrows.compression.cuda.landing import land
from narrows.compression.cuda.levels import SIGN, TWO_BIT, UINT8_MINMAX
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.random import random_words, strata, stretch, strided
from narrows.compression.cuda.rice import fixed_decode, rice_decode
from narrows.compression.cuda.select import compact_above, count_above, take, top, top_of_blocks, top_sampled
from narrows.compression.cuda.sums import sum_of, sum_strided
from narrows.compression.cuda.values import (
    BF16,
    FP16,
    FP32,
    INT4,
    INT8,
    Coding,
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
    """rest: extra, coded, record; see values.py. name: that of the CPU's kernel that decodes, "decode_" left out."""
    encode_with(queue, CODINGS[name], values, *rest)


def encode_sum_as(queue: Queue, name: str, addends: Any, *rest: Any) -> None:
    encode_sum_with(queue, CODINGS[name], addends, *rest)


def encode_strided_as(queue: Queue, name: str, addends: Any, *rest: Any) -> None:
    encode_strided_with(queue, CODINGS[name], addends, *rest)


def decode_as(queue: Queue, name: str, coded: Any, out: Any) -> None:
    """out = the values."""
    decode_with(queue, CODINGS[name], coded, out)


def add_as(queue: Queue, name: str, coded: Any, weight: Any, out: Any) -> None:
    """out += weight * values."""
    add_with(queue, CODINGS[name], coded, weight, out)


def scatter_add_as(
    queue: Queue, name: str, coded: Any, indices: Any, weight: Any, out: Any, record: Any = None
) -> None:
    """out[indices] += weight * values; record: of an encode, which may have kept fewer."""
    scatter_add_with(queue, CODINGS[name], coded, indices, weight, out, queue.complete if record is None else record)


class CudaKernels:
    """All of these on one queue, which they do not take as an argument here; and what the queue itself offers."""

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
    "code_indices",
    "compact_above",
    "count_above",
    "decode_as",
    "encode_as",
    "encode_strided_as",
    "encode_sum_as",
    "fixed_decode",
    "grouped_decode",
    "land",
    "largest_key",
    "random_words",
    "rice_decode",
    "scatter_add_as",
    "strata",
    "stretch",
    "strided",
    "sum_of",
    "sum_strided",
    "take",
    "top",
    "top_of_blocks",
    "top_sampled",
]
