"""Every CUDA kernel compiles for sm_90, on machines without a GPU, and rounds each product before it adds. `make ptx` does the
same for three generations of GPUs."""

from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")

from narrows.compression.cuda import jit

if jit.SIMULATED:
    pytest.skip("the simulator compiles nothing", allow_module_level=True)

from kit.cuda_linked import CASES, HOPPER, checked, file_of


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles(name: str, no_collection: None) -> None:
    checked(name, HOPPER)


def test_the_table_has_every_kernel() -> None:
    page = (Path(__file__).resolve().parents[3] / "bench" / "gpu" / "registers.md").read_text()
    assert len(CASES) == 80
    for name in CASES:
        assert f"| {file_of(name)}.`{name}` |" in page
