"""bench/gpu/device.py, with the CPU in the place of a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from gpu import device


def test_codes_and_a_step_are_timed(tmp_path: Path) -> None:
    flags = ["--device", "host", "--part", "codes", "--count", "70000", "--spec", "topk:0.01+int8", "--rounds", "1"]
    done = CliRunner().invoke(device.main, [*flags, "--out", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    (told,) = json.loads((tmp_path / "out.json").read_text())["codes"]
    assert told["bytes"] > 0 and {"encode", "fold", "whole step"} <= told["seconds"].keys()
    assert "equal to the CPU's" in done.output
    assert 0 < device.step_of("1.3M", 3, "device", "topk:0.05+int8", "cpu") < 60


def test_without_a_gpu_it_says_so() -> None:
    done = CliRunner().invoke(device.main, [])
    assert done.exit_code == 2 and "sees no GPU" in done.output
