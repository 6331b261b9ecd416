"""The CPU kernels under the names that every device shares: selection, Rice coding, and the value codings.

Contract of all: inputs are read-only C-contiguous arrays, outputs are the last arguments and hold enough room (the
callers in this package see to it), nothing is allocated, the GIL is not held. Arithmetic is float32, in index order.
"""

from narrows.compression.kernels.rice import rice_costs, rice_decode, rice_encode, rice_last_index
from narrows.compression.kernels.select import compact, kth_largest_key, sample_keys
from narrows.compression.kernels.values import (
    add_fp16,
    add_fp32,
    add_int8,
    decode_fp16,
    decode_int8,
    encode_fp16,
    encode_int8,
    largest_key,
    scatter_add_fp16,
    scatter_add_fp32,
    scatter_add_int8,
)

__all__ = [
    "add_fp16",
    "add_fp32",
    "add_int8",
    "compact",
    "decode_fp16",
    "decode_int8",
    "encode_fp16",
    "encode_int8",
    "kth_largest_key",
    "largest_key",
    "rice_costs",
    "rice_decode",
    "rice_encode",
    "rice_last_index",
    "sample_keys",
    "scatter_add_fp16",
    "scatter_add_fp32",
    "scatter_add_int8",
]
