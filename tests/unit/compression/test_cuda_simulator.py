"""The CUDA kernels and DeviceErrorFeedback, in processes of their own: in numba-cuda's simulator, and on a GPU if there is one.

cuda_checks.py says what they do.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from narrows.compression.device import kernels_for

HERE = Path(__file__).resolve().parent


def run_checks(simulated: str) -> None:
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": simulated}
    done = subprocess.run(
        [sys.executable, "-m", "kit.cuda_checks"],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(300)  # its threads poll: seconds on an idle machine, minutes on a busy one
@pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed")
def test_kernels_equal_the_cpu_in_the_simulator() -> None:
    run_checks("1")


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_kernels_equal_the_cpu_on_a_gpu() -> None:
    run_checks("0")


def test_importing_needs_no_gpu() -> None:
    script = "import sys, narrows.compression, narrows.compression.device; sys.exit('numba.cuda' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(number: int) -> None:
        raise RuntimeError("no libcuda here")

    monkeypatch.setattr("narrows.compression.cuda.queue.driver_of", no_driver)
    with pytest.raises(
        RuntimeError, match=r"needs an NVIDIA GPU with its driver, and numba-cuda: .*\(no libcuda here\)"
    ):
        kernels_for("cuda:0")
