"""The CUDA kernels under the names that every device shares: see cpu.py, whose contract and results they have.

Arguments are numba's device arrays (`view` makes one of anything with a __cuda_array_interface__); results that are
Python integers wait for the device. Decoders of indices take no cursor: a section is read whole. Beyond cpu.py's names:
what error feedback fuses, and what is done with values of any coding, by its name. Importing this needs numba-cuda.
"""

from functools import partial
from types import FunctionType
from typing import Any

from narrows.compression.cuda.grouped import group_parameters, grouped_decode, grouped_encode
from narrows.compression.cuda.levels import (
    SIGN,
    TWO_BIT,
    UINT8_MINMAX,
    decode_2bit,
    decode_sign,
    decode_uint8minmax,
    encode_2bit,
    encode_sign,
    encode_uint8minmax,
    pack_above,
)
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.random import random_words, strata, stretch, strided
from narrows.compression.cuda.rice import (
    fixed_decode,
    fixed_encode,
    fixed_last_index,
    largest_gap,
    rice_costs,
    rice_decode,
    rice_encode,
    rice_last_index,
)
from narrows.compression.cuda.select import (
    compact,
    compact_blocks,
    compact_sum,
    count_above,
    keep_top,
    kth_largest_key,
    masked,
    sample_keys,
    sample_sum_keys,
    sum_of,
    take,
)
from narrows.compression.cuda.values import (
    BF16,
    FP16,
    FP32,
    INT4,
    INT8,
    Decoders,
    add_fp32,
    add_with,
    decode_bf16,
    decode_fp16,
    decode_int4,
    decode_int8,
    decode_with,
    encode_bf16,
    encode_fp16,
    encode_int4,
    encode_int8,
    largest_key,
    scatter_add_fp32,
    scatter_add_with,
)

DECODERS: dict[str, Decoders] = {
    "fp32": FP32,
    "fp16": FP16,
    "bf16": BF16,
    "int8": INT8,
    "int4": INT4,
    "2bit": TWO_BIT,
    "sign": SIGN,
    "uint8minmax": UINT8_MINMAX,
}


def decode_as(queue: Queue, name: str, coded: Any, out: Any) -> None:
    """out = the values of coding `name`: that of the CPU's kernel that decodes, "decode_" left out."""
    decode_with(queue, DECODERS[name].decode, coded, out)


def add_as(queue: Queue, name: str, coded: Any, weight: Any, out: Any) -> None:
    """out += weight * values."""
    add_with(queue, DECODERS[name].add, coded, weight, out)


def scatter_add_as(queue: Queue, name: str, coded: Any, indices: Any, weight: Any, out: Any) -> None:
    """out[indices] += weight * values."""
    scatter_add_with(queue, DECODERS[name].scatter_add, coded, indices, weight, out)


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
    "DECODERS",
    "CudaKernels",
    "add_as",
    "add_fp32",
    "add_with",
    "compact",
    "compact_blocks",
    "compact_sum",
    "count_above",
    "decode_2bit",
    "decode_as",
    "decode_bf16",
    "decode_fp16",
    "decode_int4",
    "decode_int8",
    "decode_sign",
    "decode_uint8minmax",
    "decode_with",
    "encode_2bit",
    "encode_bf16",
    "encode_fp16",
    "encode_int4",
    "encode_int8",
    "encode_sign",
    "encode_uint8minmax",
    "fixed_decode",
    "fixed_encode",
    "fixed_last_index",
    "group_parameters",
    "grouped_decode",
    "grouped_encode",
    "keep_top",
    "kth_largest_key",
    "largest_gap",
    "largest_key",
    "masked",
    "pack_above",
    "random_words",
    "rice_costs",
    "rice_decode",
    "rice_encode",
    "rice_last_index",
    "sample_keys",
    "sample_sum_keys",
    "scatter_add_as",
    "scatter_add_fp32",
    "scatter_add_with",
    "strata",
    "stretch",
    "strided",
    "sum_of",
    "take",
]
