"""Every CUDA kernel compiles for sm_90, on machines without a GPU, and rounds each product before it adds. `make ptx` does the
same for three generations of GPUs."""

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

from kit.cuda_linked import CASES, HOPPER, SIGNATURES, checked


@pytest.mark.parametrize(("module", "name"), CASES, ids=[name for _, name in CASES])
def test_kernel_compiles(module: Any, name: str, no_collection: None) -> None:
    checked(module, name, HOPPER)


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
    page = (Path(__file__).resolve().parents[3] / "bench" / "gpu" / "registers.md").read_text()
    for module, name in CASES:
        assert f"| {module.__name__.rpartition('.')[2]}.`{name}` |" in page
