"""Compiles each CUDA kernel without a GPU, to PTX and to machine code, with its registers and shared memory, and checks both.

make ptx          for three generations of GPUs, with the table of bench/gpu/registers.md
"""

from __future__ import annotations

import re
from typing import Any

from narrows.compression.cuda import jit
from narrows.compression.cuda.cubins import load_kernels

HOPPER = (9, 0)
ARCHS = ((8, 0), HOPPER, (10, 0))
THREADS = 256
RESIDENT_MIN = 2  # blocks of a multiprocessor, by registers

load_kernels()
CASES = sorted(jit.KERNELS)


def file_of(name: str) -> str:
    """Return the file in which a kernel is made; those of a value coding are made in values.py."""
    return jit.KERNELS[name].function.__module__.rpartition(".")[2]


def resident(machine: jit.Cubin) -> int:
    """Return the blocks of THREADS that the registers of a multiprocessor, 65,536 by eights a thread,
    have room for, at most 8."""
    return min(8, 65536 // (THREADS * -(-machine.registers // 8) * 8))


def parameters_of(ptx: str) -> list[int]:
    """Return the bytes of each parameter of the kernel."""
    head = ptx[ptx.index(".entry") :]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", head[: head.index(")")])]


def layout_of(types: tuple[Any, ...]) -> list[int]:
    """Return the bytes of each value that `PackedArguments` packs: seven of eight bytes for an array."""
    found: list[int] = []
    for each in types:
        if not isinstance(each, jit.Argument):
            found += layout_of(each)
        else:
            found += [8] * 7 if each.array else [each.dtype.itemsize]
    return found


def checked(name: str, arch: jit.Arch) -> jit.Cubin:
    """AssertionError: of what no kernel may have, or lacks."""
    ptx = jit.ptx_of(name, arch, like=ARCHS[0])
    assert re.search(rf"^\.target sm_{arch[0]}{arch[1]}$", ptx, re.MULTILINE)
    assert ".entry" in ptx
    assert ".local" not in ptx  # a tuple that was indexed at run time would live there
    # An add or mul without .rn may still be contracted by the driver's compiler; .ftz would flush denormals.
    assert not re.search(r"\bfma\.|\b(add|sub|mul)\.f32|\.ftz|\.f64|div\.(full|approx)", ptx)
    assert "ld.global.nc" not in ptx  # a cache that no fence empties: the last block would read what was there before
    if name.endswith((".add", ".scatter_add", ".encode_sum", ".encode_strided")) or name in ("mark_sum", "top_of_each"):
        assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx
    if name in ("mark_bits", "mark_sum", "histogram", "find_largest", "fp32.add", "int8.add"):
        assert re.search(r"ld\.global\.(v4|v2\.b64)", ptx)  # 128 bits at once
    if name.endswith(".scatter_add"):  # a thread has its four reads under way before it waits for one to write it
        assert ptx[: ptx.index("st.global")].count("ld.global.f32") >= 4
    assert parameters_of(ptx) == layout_of(jit.KERNELS[name].types), name
    machine = jit.linked(ptx, arch)
    assert machine.local == 0 and resident(machine) >= RESIDENT_MIN, (name, arch, machine._replace(code=b""))
    return machine


def table() -> str:
    lines = [
        "| kernel | registers: sm_80 | sm_90 | sm_100 | shared, bytes | resident blocks |",
        "|---|---|---|---|---|---|",
    ]
    for name in CASES:
        each = [checked(name, arch) for arch in ARCHS]
        registers = " | ".join(str(one.registers) for one in each)
        lines.append(f"| {file_of(name)}.`{name}` | {registers} | {each[1].shared} | {resident(each[1])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
