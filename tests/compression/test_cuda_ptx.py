"""Every CUDA kernel compiles for three generations of GPUs, on machines without one, and rounds each product before it adds."""

import re
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # numba-cuda's, of what this machine lacks
    cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")
    dispatcher = import_module("numba.cuda.dispatcher")

if import_module("numba.cuda.core.config").ENABLE_CUDASIM:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from kit.cuda_linked import ARCHS, CASES, SIGNATURES, linked, ptx_of

RESIDENT_MIN = 2  # blocks of a multiprocessor, by registers: docs/design/kernels.md has those of each kernel


@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
def test_kernel_compiles(module: Any, name: str) -> None:
    for arch in ARCHS:
        ptx = ptx_of(module, name, arch)
        assert re.search(rf"^\.target sm_{arch[0]}{arch[1]}$", ptx, re.MULTILINE)
        assert ".entry" in ptx
        assert ".local" not in ptx  # a tuple that was indexed at run time would live there
        # An add or mul without .rn may still be contracted by the driver's compiler; .ftz would flush denormals.
        assert not re.search(r"\bfma\.|\b(add|sub|mul)\.f32|\.ftz|\.f64|div\.(full|approx)", ptx)
        assert (
            "ld.global.nc" not in ptx
        )  # a cache that no fence empties: the last block would read what was there before
        if name.endswith((".add", ".scatter_add", ".encode_sum", ".encode_strided")) or name in (
            "mark_sum",
            "top_of_each",
        ):
            assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx
        if name in ("mark_bits", "mark_sum", "histogram", "find_largest", "FP32.add", "INT8.add"):
            assert re.search(r"ld\.global\.(v4|v2\.b64)", ptx)  # 128 bits at once
        machine = linked(ptx, arch)
        assert machine.stack == 0 and machine.resident >= RESIDENT_MIN, machine


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


def test_the_table_has_every_kernel() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "design" / "kernels.md").read_text()
    for module, name in CASES:
        assert f"| {module.__name__.rpartition('.')[2]}.`{name}` |" in page
