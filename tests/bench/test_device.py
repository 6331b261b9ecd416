"""bench/gpu/device.py, with the CPU in the place of a GPU."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner
from gpu import device
from lab import record

from narrows.worker.runtime.trace import PARTS


def test_codes_and_a_step_are_timed(tmp_path: Path) -> None:
    flags = ["--device", "host", "--part", "codes", "--count", "70000", "--spec", "topk:0.01+int8", "--rounds", "1"]
    done = CliRunner().invoke(device.main, [*flags, "--out", str(tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    lines = {line.run.removeprefix("topk:0.01+int8: "): line for line in record.read(tmp_path / "out.json")}
    assert {"encode", "fold", "whole step"} <= lines.keys()
    assert all(line.figures["time"].value > 0 and line.arguments["values"] == 70_000 for line in lines.values())
    assert "equal to the CPU's" in done.output
    step = device.step_of("1.3M", 12, "device", "topk:0.05+int8", "cpu", str(tmp_path))
    assert {*step} == {"step", *PARTS} and all(unit == "ms" for _, unit in step.values())
    assert all(0 < (value or 0.0) < 60e3 for value, _ in step.values())


def test_without_a_gpu_it_says_so() -> None:
    done = CliRunner().invoke(device.main, [])
    assert done.exit_code == 2 and "sees no GPU" in done.output
