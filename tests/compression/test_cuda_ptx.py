"""Every CUDA kernel compiles to PTX for sm_90, on machines without a GPU too, and rounds each product before it adds."""

import operator
import re
import types as std
import warnings
from importlib import import_module
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # numba-cuda's, of what this machine lacks
    cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
    types = import_module("numba.cuda.types")
    dispatcher = import_module("numba.cuda.dispatcher")

if import_module("numba.cuda.core.config").ENABLE_CUDASIM:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from narrows.compression.cuda import (
    grouped as cuda_grouped,
)
from narrows.compression.cuda import (
    jit as cuda_jit,
)
from narrows.compression.cuda import (
    levels as cuda_levels,
)
from narrows.compression.cuda import (
    random as cuda_random,
)
from narrows.compression.cuda import (
    rice as cuda_rice,
)
from narrows.compression.cuda import (
    select as cuda_select,
)
from narrows.compression.cuda import (
    values as cuda_values,
)

I8, U8, U16, U32, U64, I64, F32 = (
    types.Array(scalar, 1, "C")
    for scalar in (types.int8, types.uint8, types.uint16, types.uint32, types.uint64, types.int64, types.float32)
)
N, W, B = types.int64, types.float32, types.boolean
SUMS = types.Tuple((F32, W, F32, F32))
CODED = {
    "FP32": (F32,), "FP16": (U16,), "BF16": (U16,), "INT8": (U16, I8), "INT4": (U16, U8),
    "SIGN": (U16, U8), "TWO_BIT": (U8, U8, U8), "UINT8_MINMAX": (F32, U8),
}  # fmt: skip

SIGNATURES: dict[Any, dict[str, tuple[Any, ...]]] = {
    cuda_jit: {"scan_chunks": (U64, U64), "shift_chunks": (U64, U64)},
    cuda_random: {
        "draw_words": (N, N, N, U32),
        "draw_strata": (N, N, N, N, U32),
        "write_strided": (N, N, N, U32),
        "stretch_indices": (N, N, U32),
    },
    cuda_select: {
        "sample_bits": (types.Tuple((U32,)), N, U32, B),
        "sample_sum": (SUMS, N, U32, B),
        "mark_bits": (types.Tuple((U32,)), N, N, N, U32, U64, B),
        "mark_sum": (SUMS, N, N, N, U32, U64, B),
        "emit": (U32, N, N, U32, U64, U32, U32),
        "histogram": (U32, N, N, N, I64, I64, B),
        "pick": (I64, N, N, I64),
        "gather": (U32, U32, U32),
        "mask_keys": (U32, N, U32),
        "block_thresholds": (U32, N, N, U32, U32, U64),
        "emit_blocks": (U32, N, U32, U32, U64, U32, U32),
        "sum_into": (SUMS, B),
    },
    cuda_rice: {
        "cost_sums": (U32, N, I64),
        "pack_lows": (U32, N, N, U32),
        "total_highs": (U32, N, U64),
        "set_ones": (U32, N, U64, U32),
        "sum_codes": (U32, U32, N, N, I64),
        "total_ones": (U32, U64),
        "emit_codes": (U32, N, U64, U32),
        "total_lows": (U32, N, N, U64),
        "add_lows": (U32, N, B, U64, U32),
        "find_largest_gap": (U32, U32),
    },
    cuda_grouped: {
        "choose_parameters": (U32, U8, I64),
        "count_low_words": (U8, U64),
        "total_groups": (U32, U8, U64),
        "pack_groups": (U32, U8, U64, U64, U32, U32),
        "total_gaps": (U8, U64, U32, U32, U64),
        "emit_groups": (U8, U64, U32, U32, U64, U32),
    },
    cuda_values: {
        "find_largest": (F32, U32, B),
        "fp16_codes": (F32, U16, U32, B),
        "bf16_codes": (F32, U16, U32, B),
        "int8_codes": (F32, B, N, N, U16, I8, U32, B),
        "int4_codes": (F32, B, N, N, U16, U8, U32, B),
    },
    cuda_levels: {
        "pack_plane": (F32, N, B, U8),
        "sign_codes": (F32, U16, U8, U32),
        "two_bit_codes": (F32, U8, U8, U8, U32),
        "minmax_codes": (F32, F32, U8, U32),
    },
}
for coding, arrays in CODED.items():
    module = cuda_values if hasattr(cuda_values, coding) else cuda_levels
    coded = types.Tuple(arrays)
    SIGNATURES[module] |= {
        f"{coding}.decode": (coded, F32, B),
        f"{coding}.add": (coded, W, F32, B),
        f"{coding}.scatter_add": (coded, U32, W, F32, B),
    }
CASES = [(module, name) for module, names in SIGNATURES.items() for name in names]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba-cuda takes a kernel's target as an argument, but asks the driver for that of the functions it calls."""
    device = std.SimpleNamespace(compute_capability=(9, 0))
    monkeypatch.setattr("numba.cuda.dispatcher.get_current_device", lambda: device)


def ptx_of(module: Any, name: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ptx, _ = cuda.compile_ptx(operator.attrgetter(name)(module).py_func, SIGNATURES[module][name], cc=(9, 0))
    return str(ptx)


@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
def test_kernel_compiles(module: Any, name: str) -> None:
    ptx = ptx_of(module, name)
    assert re.search(r"^\.target sm_90$", ptx, re.MULTILINE)
    assert ".entry" in ptx
    assert ".local" not in ptx  # a tuple that was indexed at run time would live there
    # An add or mul without .rn may still be contracted by the driver's compiler; .ftz would flush denormals.
    assert not re.search(r"\bfma\.|\b(add|sub|mul)\.f32|\.ftz|\.f64|div\.(full|approx)", ptx)
    if name.endswith((".add", ".scatter_add")) or name == "mark_sum":
        assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx
    if name in ("mark_bits", "mark_sum", "histogram", "find_largest", "FP32.add", "INT8.add"):
        assert "ld.global.v4" in ptx


def test_every_kernel_is_listed() -> None:
    for module, names in SIGNATURES.items():
        own = {
            name
            for name, value in vars(module).items()
            if isinstance(value, dispatcher.CUDADispatcher)
            and value.__module__ == module.__name__
            and not value.targetoptions["device"]
        }
        assert own == {name for name in names if "." not in name}
