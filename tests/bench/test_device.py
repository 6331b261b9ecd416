"""bench/gpu/device.py, with the CPU in the place of a GPU; and scripts as users write them, on a GPU if there is one."""

from __future__ import annotations

import ast
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from gpu import device, user
from lab import launch, record

from narrows.worker.runtime.trace import PARTS

STEPS = 30


def invoked(tmp_path: Path, *flags: str) -> tuple[str, list[record.Line]]:
    done = CliRunner().invoke(device.main, ["--device", "host", *flags, "--out", str(tmp_path / "out.jsonl")])
    assert done.exit_code == 0, done.output
    return done.output, record.read(tmp_path / "out.jsonl")


def test_codes_are_timed(tmp_path: Path) -> None:
    said, lines = invoked(tmp_path, "codes", "--count", "70000", "--spec", "topk:0.01+int8", "--rounds", "1")
    of = {line.run.removeprefix("topk:0.01+int8: "): line for line in lines}
    assert {"encode", "fold", "whole step"} <= of.keys()
    assert all(line.figures["time"].value > 0 and line.arguments["values"] == 70_000 for line in of.values())
    assert "equal to the CPU's" in said


@pytest.mark.usefixtures("forked_commands")
def test_a_step_and_its_parts_are_timed(tmp_path: Path) -> None:
    bench = device.Bench(record.Recorder("gpu/device", tmp_path / "out.jsonl"), "host", (), (), 4, 1)
    step = device.step_of(bench, "1.3M", "topk:0.05+int8", str(tmp_path))
    assert {*step} == {"step", *PARTS} and all(unit == "ms" for _, unit in step.values())
    assert all(0 < (value or 0.0) < 60e3 for value, _ in step.values())


def test_losses_that_differ_are_missed(tmp_path: Path) -> None:
    bench = device.Bench(record.Recorder("gpu/device", tmp_path / "out.jsonl"), "host", (), (), 3, 1)
    said = "rank 0: losses [2.0, 1.5]\nrank 1: losses [2.0, 1.25]\n"
    device.tell_apart(bench, "same", {"device": (said, 1.0), "host": (said, 1.0)}, 1e-6)
    assert not bench.missed
    device.tell_apart(bench, "other", {"device": (said, 1.0), "host": (said.replace("1.25", "1.26"), 1.0)}, 1e-6)
    device.tell_apart(bench, "none", {"device": ("", 1.0), "host": ("", 1.0)}, 1e-6)
    device.tell_apart(bench, "error", {"device": (said, 1.0), "host": launch.CommandFailed("exit code 1")}, 1e-6)
    assert [each.split(":")[0] for each in bench.missed] == ["losses, other", "losses, none", "losses, error"]


def test_a_part_that_runs_too_long_is_ended_and_the_rest_is_left_out(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(device.PARTS, "profile", device.Part(device.profile, 0.2))
    monkeypatch.setattr(device, "LEAST_S", 25.0)
    flags = ["--device", "host", "--count", "20000", "--out", str(tmp_path / "out.jsonl")]
    assert device.each_apart(("profile",), flags, 60.0) == ["profile"]
    assert device.each_apart(("codes",), flags, 1.0) == ["codes"]
    said = capfd.readouterr().out
    assert "=== profile: ended after 0 s" in said and "=== codes: not run" in said


def test_without_a_gpu_it_says_so() -> None:
    done = CliRunner().invoke(device.main, [])
    assert done.exit_code == 2 and "sees no GPU" in done.output


def test_each_check_that_needs_no_simulator_is_a_part() -> None:
    tree = ast.parse((launch.ROOT / "tests" / "kit" / "cuda_checks.py").read_text("utf-8"))
    (table,) = (node for node in tree.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "PARTS")
    names = {node.id for node in ast.walk(table) if isinstance(node, ast.Name)}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert names & functions - {*device.CHECKS} == {"simulated_orders", "launches", "repeats"}
    assert {*device.CHECKS} <= names


def trained(kind: str, gpu: str, steps: int, workers: int) -> None:
    env = launch.environment(NARROWS_DEVICE=gpu, NARROWS_ARRAYS="device")
    began = time.time()
    said, _ = launch.run(device.user_command(kind, gpu, steps, workers=workers), 100.0, env)
    found = device.user_run(said, began)
    assert found.fell, found
    assert 0 < found.first_step_s < time.time() - began


@pytest.mark.usefixtures("forked_commands")
def test_the_loss_of_a_users_script_falls() -> None:
    trained("two", "cpu", 16, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", user.KINDS)
def test_the_loss_of_a_users_script_falls_on_a_gpu(kind: str) -> None:
    trained(kind, "cuda:0", STEPS, 2)
