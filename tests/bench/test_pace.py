"""bench/speed/pace.py: plans and a contender at a GPU's pace, tiny; replayed payloads are real ones; the picture."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from lab import netns, record
from lab.replay import Coding, Payloads, Phase, PhaseFile, updates_of
from speed import pace, pace_coding, pace_plot

from narrows.compression import decode
from narrows.compression.codecs import check, coded_piece
from narrows.ps.planner.codec_costs import GPU_MS, gpu_row

needs_lab = pytest.mark.skipif(bool(netns.available()), reason=netns.available() or "available")


@needs_lab
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked_commands")
@pytest.mark.parametrize("row", ["ssp, s = 2, cycle:0.15+sign", "DDP"])
def test_a_plan_has_a_pace(row: str, tmp_path: Path) -> None:
    out = tmp_path / "pace.jsonl"
    arguments = [
        "--rows",
        row,
        "--links",
        "1000",
        "--workers",
        "2",
        "--size",
        "tiny",
        "--compute",
        "0.02",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(pace.main, arguments)
    assert done.exit_code == 0, done.output
    (line,) = (line for line in record.read(out) if line.table == pace.table_of(2))
    found = {name: figure.value for name, figure in line.figures.items()}
    assert line.run == row and line.link == {"mbit_per_s": 1000, "delay_ms": 10}
    assert 1 < found["utilisation"] <= 100 and found["step"] >= 20
    assert found["utilisation"] == pytest.approx(100 * 20 / found["step"], rel=0.1)  # the workers' steps are alike
    if row != "DDP":
        assert found["sent"] > 0 and 1 < found[pace.CPU] <= 100 and found["thread"] > 0


@pytest.mark.parametrize("spec", ["topk:0.11+sign", "cycle:0.15+sign", "2bit"])
def test_payloads_are_those_of_real_updates(spec: str) -> None:
    """Every turn decodes to the values of its keys, and is like the update that it is of."""
    payloads, out = Payloads(spec, updates_of("tiny")), np.empty(20_000, np.float32)
    for turn in range(8):
        payload = payloads.of(1000, 21_000, turn)
        check(coded_piece(payload, 1000, 21_000), finite=True)
        decode(payload, out)
        sent = out != 0
        assert np.corrcoef(out[sent], payloads.values(1000, 21_000, turn)[sent])[0, 1] > 0.3
    assert payloads.of(1000, 21_000, 0) == payloads.of(1000, 21_000, 4)


def test_a_phase_stretches_sleeps_and_cpu_time(tmp_path: Path) -> None:
    file = PhaseFile(tmp_path / "phase")
    Phase(1, 4, dilation=5.0, coding=Coding(encode=1e-9)).write(file.path)
    assert file.now().coding.encode == 1e-9
    began = time.monotonic()
    file.sleep(0.01)
    assert time.monotonic() - began >= 0.05
    began, until = time.monotonic(), time.thread_time() + 0.02
    with file.stretched():
        while time.thread_time() < until:
            pass
    assert time.monotonic() - began >= 0.1
    Phase(2, 0).write(file.path)
    assert file.now().number == 2


def test_the_seconds_of_a_gpu_are_between_those_of_two_sizes() -> None:
    found = pace_coding.on_a_gpu("cycle:0.03+sign", 55_000_000, Coding(add=1e-9, publish=2e-9))
    row = GPU_MS["cycle:0.15+sign"]
    whole, encode, fold = (1e-3 * sum(row[name][1:]) / 2 / 55e6 for name in ("whole step", "encode", "fold"))
    wanted = {"encode": encode, "fold": fold, "compose": whole - encode - fold, "add": 1e-9, "publish": 2e-9}
    wanted["host"] = pace_coding.GPU_HOST_S
    assert vars(found) == pytest.approx(wanted)
    rows = {"topk:0.003+sign": "topk:0.01+int8", "topk:0.11+sign": "topk:0.05+int8", "2bit": "topk:0.05+int8"}
    assert {spec: gpu_row(spec) for spec in rows} == rows


def test_coding_on_this_cpu_is_measured_for_each_part() -> None:
    for spec, outer in (("cycle:0.15+sign", None), ("2bit", (0.7, 0.6)), ("dense", (0.7, 0.6))):
        found = vars(pace_coding.on_this_cpu(spec, "tiny", 2, outer))
        assert all(seconds > 0 for part, seconds in found.items() if part != "host")


def test_steps_to_a_loss_lie_between_the_quarters() -> None:
    losses = [2.4, 2.2, 2.0, 1.9]
    assert pace_plot.curve_steps(losses, 400, 2.1) == pytest.approx(250)
    assert pace_plot.curve_steps(losses, 400, 1.8) is None
    assert pace_plot.curve_steps(losses, 400, 2.5) == 100


def test_losses_and_paces_are_joined_and_drawn(tmp_path: Path) -> None:
    plan, dense = pace.PLANS[5], pace.PLANS[0]
    losses = record.Recorder("loss/run_jobs", tmp_path / "run_jobs.jsonl")
    for job, ends in ((plan.job, (2.1, 2.05)), (dense.job, (2.0,))):
        for rate, end in enumerate(ends):
            told: record.Figures = {
                name: (end + 0.3 - 0.1 * i, "nats a byte") for i, name in enumerate(pace_plot.QUARTERS[:3])
            }
            arguments = job | {"workers": 2, "steps": pace_plot.STEPS, "rate": rate}
            losses.add("run", told | {"loss": (end, "nats a byte")}, arguments=arguments)
    recorder = record.Recorder("speed/pace", tmp_path / "pace.jsonl")
    for mbit, ms in ((50, 90.0), (1000, 40.0)):
        link = {"mbit_per_s": float(mbit), "delay_ms": 10.0}
        pace_told: record.Figures = {"utilisation": (3000 / ms, "% of the card"), "step": (ms, "ms")}
        recorder.add(plan.name, pace_told, table=pace.table_of(2), link=link, arguments={"parameters": "30.8M"})
    picture = tmp_path / "pace.svg"
    pace_plot.join(recorder, pace.PLANS, losses.path, picture)
    added = [line for line in recorder.lines if line.table == pace_plot.TABLE.format(pace_plot.TARGET, 2)]
    assert [line.figures["over dense"].value for line in added] == [pytest.approx(2.5)] * 2
    steps = pace_plot.STEPS * (0.75 + 0.25 * 0.5)  # 2.15 at three quarters, 2.05 at the end
    assert [line.figures["time to 2.1"].value for line in added] == [pytest.approx(steps * ms / 1e3) for ms in (90, 40)]
    text = picture.read_text()
    assert text.count("<circle") == 2 and text.count("<polyline") == 1 and plan.name in text


def test_a_contender_without_its_packages_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PEERS", ".venv-nobody-has-this")
    monkeypatch.setattr(netns, "available", str)
    out = tmp_path / "pace.jsonl"
    done = CliRunner().invoke(pace.main, ["--rows", "torchft*8", "--size", "tiny", "--out", str(out)])
    assert done.exit_code == 0 and "make bench-peers" in done.output
    others = [line for line in record.read(out) if line.table == "figures of others"]
    assert len(others) == 13 and all(line.source == "archive" for line in others)
