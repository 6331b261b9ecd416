"""The CPU kernels under the names that all devices share.

The contract of all: inputs are read-only C-contiguous arrays. Outputs are the last arguments, and callers in this
package give them enough room. A kernel allocates at most one block and does not hold the GIL. Arithmetic is float32, in
index order.
"""

from narrows.compression.kernels.gaps import (
    fixed_decode,
    fixed_encode,
    fixed_last_index,
    largest_gap,
    stretch,
    strided,
)
from narrows.compression.kernels.levels import (
    decode_2bit,
    decode_sign,
    decode_uint8minmax,
    encode_2bit,
    encode_sign,
    encode_uint8minmax,
)
from narrows.compression.kernels.random import random_words, strata
from narrows.compression.kernels.rice import (
    group_parameters,
    grouped_decode,
    grouped_encode,
    grouped_last_index,
    rice_costs,
    rice_decode,
    rice_encode,
    rice_last_index,
)
from narrows.compression.kernels.select import (
    compact,
    compact_blocks,
    count_above,
    count_digit,
    find_digit,
    keep_top,
    kth_largest_key,
    sample_keys,
)
from narrows.compression.kernels.values import (
    add_fp32,
    decode_bf16,
    decode_fp16,
    decode_int4,
    decode_int8,
    decode_int12,
    encode_bf16,
    encode_fp16,
    encode_int4,
    encode_int8,
    encode_int12,
    largest_key,
    scatter_add_fp32,
)

__all__ = [
    "add_fp32",
    "compact",
    "compact_blocks",
    "count_above",
    "count_digit",
    "decode_2bit",
    "decode_bf16",
    "decode_fp16",
    "decode_int4",
    "decode_int8",
    "decode_int12",
    "decode_sign",
    "decode_uint8minmax",
    "encode_2bit",
    "encode_bf16",
    "encode_fp16",
    "encode_int4",
    "encode_int8",
    "encode_int12",
    "encode_sign",
    "encode_uint8minmax",
    "find_digit",
    "fixed_decode",
    "fixed_encode",
    "fixed_last_index",
    "group_parameters",
    "grouped_decode",
    "grouped_encode",
    "grouped_last_index",
    "keep_top",
    "kth_largest_key",
    "largest_gap",
    "largest_key",
    "random_words",
    "rice_costs",
    "rice_decode",
    "rice_encode",
    "rice_last_index",
    "sample_keys",
    "scatter_add_fp32",
    "strata",
    "stretch",
    "strided",
]
