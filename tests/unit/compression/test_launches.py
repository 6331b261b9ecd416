"""Encodes and folds on the fake CUDA driver, in a process of its own: kit/launch_checks.py says what they do."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit.fake_cuda import build, environment

TESTS = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("cuda") is None, reason="cuda-bindings is not installed")
def test_what_is_launched_is_captured_replayed_and_bounded(tmp_path: Path) -> None:
    try:
        library = build(tmp_path)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    words = [sys.executable, "-m", "kit.launch_checks", str(library)]
    env = os.environ | environment(tmp_path) | {"NARROWS_CUDA_COMPILER": "0"}
    done = subprocess.run(words, cwd=TESTS, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
