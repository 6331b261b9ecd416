"""Compiles each CUDA kernel without a GPU, to PTX and to machine code, with its registers and shared memory, and checks both.

make ptx          for three generations of GPUs, with the table of bench/gpu/registers.md
"""

from __future__ import annotations

import operator
import re
import types as std
import warnings
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple
from unittest import mock

from narrows.compression.cuda import grouped, indices, landing, levels, random, rice, scans, select, sums, values

types = import_module("numba.cuda.types")
HOPPER = (9, 0)
ARCHS = ((8, 0), HOPPER, (10, 0))
THREADS = 256
RESIDENT_MIN = 2  # blocks of a multiprocessor, by registers

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

EXTRA = types.UniTuple(N, 3)
KEPT = types.Tuple((U32,))
SIGNATURES: dict[Any, dict[str, tuple[Any, ...]]] = {
    scans: {"scan_chunks": (U64, U64), "shift_chunks": (U64, U64)},
    random: {
        "draw_words": (N, N, N, U32),
        "draw_strata": (N, N, N, N, U32),
        "write_strided": (N, N, N, U32),
        "stretch_indices": (N, N, U32),
    },
    sums: {"sum_into": (SUMS, B), "sum_strided_into": (SUMS, N, N, F32, I64, B)},
    select: {
        "sample_bits": (KEPT, N, N, N, U32, I64, I64, B),
        "sample_sum": (SUMS, N, N, N, U32, I64, I64, B),
        "mark_bits": (KEPT, N, N, N, N, U32, U64, I64, I64, B),
        "mark_sum": (SUMS, N, N, N, N, U32, U64, I64, I64, B),
        "emit_candidates": (U32, N, N, U32, U64, U32, U32, I64, I64),
        "histogram": (U32, N, N, N, N, I64, I64, B),
        "mark_kept": (U32, N, N, U32, U64, I64, I64, B),
        "emit_kept": (U32, U32, N, N, U32, U64, I64, U32, U32),
        "gather": (U32, U32, U32),
        "search_for": (N, N, I64),
        "top_of_each": (SUMS, N, N, U32, U32, U64, N, I64, I64, B),
        "close_up": (U32, U32, N, U64, U32, U32),
    },
    indices: {
        "choose": (U32, N, B, U8, U64, U8, I64, I64),
        "write_lows": (U32, U8, U64, I64, U8, U32, U32, U64, I64),
        "write_ones": (U32, U8, U64, I64, U32),
    },
    landing: {"gather_sections": (U8, types.UniTuple(N, 6), types.UniTuple(N, 6), N, I64, U32)},
    rice: {
        "total_ones": (U32, U64),
        "emit_codes": (U32, N, U64, U32),
        "total_lows": (U32, N, N, U64),
        "add_lows": (U32, N, B, U64, U32),
    },
    grouped: {
        "count_low_words": (U8, U64),
        "total_gaps": (U8, U64, U32, U32, U64),
        "emit_groups": (U8, U64, U32, U32, U64, U32),
    },
    values: {"find_largest": (F32, I64, B)},
    levels: {},
}
for coding, arrays in CODED.items():
    module = values if hasattr(values, coding) else levels
    coded = types.Tuple(arrays)
    SIGNATURES[module] |= {
        f"{coding}.decode": (coded, F32, B),
        f"{coding}.add": (coded, W, F32, B),
        f"{coding}.scatter_add": (coded, U32, W, I64, F32, B),
        f"{coding}.encode": (F32, EXTRA, coded, I64, B),
        f"{coding}.encode_sum": (SUMS, EXTRA, coded, I64, B),
        f"{coding}.encode_strided": (SUMS, N, N, F32, EXTRA, coded, I64, B),
    }
CASES = [(module, name) for module, names in SIGNATURES.items() for name in names]


class Linked(NamedTuple):
    registers: int
    stack: int  # bytes of a thread, in local memory
    shared: int  # bytes of a block

    @property
    def resident(self) -> int:
        """Blocks of THREADS that the registers of a multiprocessor, 65,536 by eights a thread, have room for; at most 8."""
        return min(8, 65536 // (THREADS * -(-self.registers // 8) * 8))


@cache
def _library(module: Any, name: str) -> Any:
    """The kernel as LLVM's, from which each GPU's PTX is made. numba-cuda asks the driver for the target of functions that a
    kernel calls."""
    device, function = std.SimpleNamespace(compute_capability=ARCHS[0]), operator.attrgetter(name)(module).py_func
    with warnings.catch_warnings(), mock.patch("numba.cuda.dispatcher.get_current_device", return_value=device):
        warnings.simplefilter("ignore")
        compiler: Any = import_module("numba.cuda.compiler")
        made = compiler._compile_pyfunc_with_fixup(
            function, SIGNATURES[module][name], device=False, cc=ARCHS[0], abi="numba"
        )
    return made[0]


def ptx_of(module: Any, name: str, arch: tuple[int, int]) -> str:
    return str(_library(module, name).get_asm_str(cc=arch))


def linked(ptx: str, arch: tuple[int, int]) -> Linked:
    nvjitlink: Any = import_module("cuda.bindings.nvjitlink")
    handle = nvjitlink.create(3, [f"-arch=sm_{arch[0]}{arch[1]}", "-verbose", "-Xptxas=-v"])
    try:
        source = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "kernel")
        nvjitlink.complete(handle)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    finally:
        nvjitlink.destroy(handle)
    text = log.decode(errors="replace")
    found = re.search(r"used (\d+) registers, .*?(\d+) stack, (?:(\d+) bytes smem, )?.*?(\d+) bytes lmem", text)
    assert found is not None, text
    registers, stack, shared, local = (int(number or 0) for number in found.groups())
    return Linked(registers, stack + local, shared)


def checked(module: Any, name: str, arch: tuple[int, int]) -> Linked:
    """AssertionError: of what no kernel may have, or lacks."""
    ptx = ptx_of(module, name, arch)
    assert re.search(rf"^\.target sm_{arch[0]}{arch[1]}$", ptx, re.MULTILINE)
    assert ".entry" in ptx
    assert ".local" not in ptx  # a tuple that was indexed at run time would live there
    # An add or mul without .rn may still be contracted by the driver's compiler; .ftz would flush denormals.
    assert not re.search(r"\bfma\.|\b(add|sub|mul)\.f32|\.ftz|\.f64|div\.(full|approx)", ptx)
    assert "ld.global.nc" not in ptx  # a cache that no fence empties: the last block would read what was there before
    if name.endswith((".add", ".scatter_add", ".encode_sum", ".encode_strided")) or name in ("mark_sum", "top_of_each"):
        assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx
    if name in ("mark_bits", "mark_sum", "histogram", "find_largest", "FP32.add", "INT8.add"):
        assert re.search(r"ld\.global\.(v4|v2\.b64)", ptx)  # 128 bits at once
    machine = linked(ptx, arch)
    assert machine.stack == 0 and machine.resident >= RESIDENT_MIN, (name, arch, machine)
    return machine


def table() -> str:
    lines = [
        "| kernel | registers: sm_80 | sm_90 | sm_100 | shared, bytes | resident blocks |",
        "|---|---|---|---|---|---|",
    ]
    for module, name in CASES:
        each = [checked(module, name, arch) for arch in ARCHS]
        file = module.__name__.rpartition(".")[2]
        registers = " | ".join(str(one.registers) for one in each)
        lines.append(f"| {file}.`{name}` | {registers} | {each[1].shared} | {each[1].resident} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
