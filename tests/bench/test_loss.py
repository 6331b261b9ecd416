"""bench/loss/: each mode and rule trains a tiny net, codes are those of bench/loss/replicas.py, and a queue is run once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import bytelm
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from lab import record
from loss import bf16_replicas, lockstep, replicas, run_jobs
from loss.bf16_replicas import AdamWs, ByteTask
from loss.job import Job
from loss.rounds import OuterStep, local, matrices

from narrows.compression import decode, parse
from narrows.compression.buffers import FloatArray

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def task() -> ByteTask:
    """Bytes of few values, so that some steps suffice to learn which."""
    text = torch.from_numpy(np.random.default_rng(0).integers(60, 70, 3000, dtype=np.uint8))
    return ByteTask(text[:2000], text[2000:], layers=1, width=32, heads=1, context=8)


JOBS = [
    Job(mode="bsp", inner="muon"),
    Job(gain_power=0.5, start=0.5, start_up="int4"),
    Job(inner="muon", staleness=2, stand=0.5),
    Job(staleness=2, up="cycle:0.25+sign"),
    Job(mode="local", local_steps=4, outer_lr=0.7, outer_momentum=0.6, up="2bit", down="int4"),
    Job(mode="local", local_steps=2, inner="muon", outer="iso-ema", outer_momentum=0.5, moments_every=3, up="dense"),
]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_each_mode_learns(task: ByteTask, job: Job) -> None:
    told = run_jobs.train(task, replace(job, workers=2, steps=12, warm_up=2, rate=0.02))
    (loss, _), before = told["loss"], task.loss(task.initial(0))
    assert loss is not None and loss < before - 0.3 and "at three quarters" in told


def test_gradients_are_those_of_float32_to_a_percent(task: ByteTask) -> None:
    x = 0.3 * np.random.default_rng(1).standard_normal((2, task.size)).astype(np.float32)
    found, rows = np.zeros_like(x), task.rows(3, 5, 2)
    task.gradients(x, rows, found)
    flat = torch.from_numpy(x).requires_grad_()
    (wanted,) = torch.autograd.grad(task.loss_sum(flat, rows).sum() / (rows.shape[1] * task.context), flat)
    assert np.linalg.norm(found - wanted.numpy()) < 0.02 * wanted.norm()


@pytest.mark.parametrize("spec", ["dense", "int8", "sign", "topk:0.25", "topk:0.1+int8", "topk:0.11+sign"])
def test_a_code_is_that_of_the_batched_replicas(spec: str) -> None:
    """300,000 values: both take a sample for the threshold."""
    values = np.random.default_rng(2).standard_normal(300_000).astype(np.float32)
    residual, mean, sent = values.copy(), np.ones_like(values), np.zeros_like(values)
    bf16_replicas.Coder(spec)(residual, 0.5, mean, sent)
    wanted = replicas.code(spec)(torch.from_numpy(values)[None], 0)[0].numpy()
    np.testing.assert_allclose(sent, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(residual + sent, values, atol=1e-6)
    np.testing.assert_allclose(mean, 1 + 0.5 * sent, atol=1e-6)


def test_a_cycle_sends_its_turns_alone_and_is_that_of_the_batched_replicas() -> None:
    values = np.random.default_rng(5).standard_normal(7000).astype(np.float32)
    residual, mean, sent, code = (
        values.copy(),
        np.ones_like(values),
        np.zeros_like(values),
        bf16_replicas.Coder("cycle:0.15+sign"),
    )
    for clock in range(7):
        before = residual.copy()
        mean[:] = 1
        code(residual, 0.5, mean, sent)
        code.advance()
        wanted = replicas.code("cycle:0.15+sign")(torch.from_numpy(before)[None], clock)[0].numpy()
        assert set(np.flatnonzero(sent) % 7) == {clock}
        np.testing.assert_allclose(sent, wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(residual + sent, before, atol=1e-6)
        np.testing.assert_allclose(mean, 1 + 0.5 * sent, atol=1e-6)


def test_int4_has_fifteen_values_of_a_block() -> None:
    values = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    sent = np.zeros_like(values)
    bf16_replicas.Coder("int4")(values, 1, np.zeros_like(values), sent)
    assert 10 < len(np.unique(sent)) <= 15


def test_2bit_is_the_products() -> None:
    values = np.random.default_rng(4).standard_normal(1300).astype(np.float32)
    residual, mean, sent = values.copy(), np.ones_like(values), np.zeros_like(values)
    bf16_replicas.Coder("2bit")(residual, 0.5, mean, sent)
    wanted = np.empty_like(values)
    decode(parse("2bit").encode(values), wanted)
    np.testing.assert_array_equal(sent, wanted)
    np.testing.assert_array_equal(residual, values - wanted)
    np.testing.assert_array_equal(mean, 1 + 0.5 * wanted)


def lockstep_case(task: ByteTask, case: lockstep.Case, rate: float) -> FloatArray:
    """The weights that bench/loss/lockstep.py ends with, at seed 0."""
    runs = lockstep.Runs(case, task, [(rate, 0)])
    runs.own_optimizers()
    return runs.x[0].numpy()


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_rounds_end_as_those_of_lockstep(task: ByteTask, momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """lockstep.py has float32 and its own warm-up: gradients differ by bfloat16, so the model to a part of its way."""
    job = Job(mode="local", workers=2, steps=12, warm_up=40, local_steps=3, outer_lr=0.7, up="dense", rate=0.02)
    found, _ = local(task, replace(job, outer_momentum=momentum), lambda done, x: False)
    case = lockstep.Case(2, local_steps=3, outer_lr=0.7, outer_momentum=momentum, steps=12)
    wanted, first = lockstep_case(task, case, 0.02), task.initial(0)
    assert np.linalg.norm(found - wanted) < 0.1 * np.linalg.norm(wanted - first)


def test_an_outer_step_of_equal_spectrum(task: ByteTask) -> None:
    """Each matrix of a block, and nothing else, gets the mean of its singular values for each of them (2607.03011)."""
    update = np.random.default_rng(5).standard_normal(task.size).astype(np.float32)
    x, wanted = task.zeros(), update.copy()
    for begin, end, shape in task.matrices:
        u, s, v = np.linalg.svd(update[begin:end].reshape(shape), full_matrices=False)
        wanted[begin:end] = (s.mean() * u @ v).ravel()
    OuterStep(task, Job(mode="local", outer="iso", outer_lr=1.8, outer_momentum=0.8))(update.copy(), x)
    np.testing.assert_allclose(x, 1.8 * (1 + 0.8) * wanted, rtol=1e-3, atol=1e-4)
    x = task.zeros()
    OuterStep(task, Job(mode="local", outer="iso-ema", outer_lr=1.8, outer_momentum=0.8))(update.copy(), x)
    np.testing.assert_allclose(x, 1.8 * (1 + 0.8) * 0.2 * wanted, rtol=1e-3, atol=1e-4)


def test_all_matrices_of_a_model_are_those_of_its_blocks_and_three_more(task: ByteTask) -> None:
    found = matrices(task, every=True)
    assert [each for each in found if each not in task.matrices] == [
        (a, b, shape)
        for (a, b), (name, shape) in zip(task.ranges, task.shapes.items(), strict=True)
        if name in ("bytes.weight", "positions.weight", "head.weight")
    ]


def test_workers_share_their_moments(task: ByteTask) -> None:
    optimizers = AdamWs(task, 2, "muon", 0.9, 0.95)
    assert optimizers.momentum is not None
    for number, moments in enumerate((optimizers.m, optimizers.v, optimizers.momentum)):
        moments[0], moments[1] = number, number + 2
    optimizers.share_moments()
    for number, moments in enumerate((optimizers.m, optimizers.v, optimizers.momentum)):
        assert (moments == number + 1).all()


def test_a_queue_is_run_once_and_what_is_no_job_is_said(
    task: ByteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytelm, "library", lambda: (task.training, task.held_out, "0123456789abcdef"))
    queue, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    good = ['{"mode": "bsp", "workers": 2}', '{"mode": "bsp", "workers": 4, "give_up": "4:0.1"}']
    queue.write_text("\n".join(["# a comment", *good]))
    words = [str(queue), "--model", "1,32,1", "--steps", "8", "--out", str(out)]
    assert CliRunner().invoke(run_jobs.main, words).exit_code == 0
    queue.write_text("\n".join([*good, '{"workers": 3}', '{"momentum": 1}']))
    again = CliRunner().invoke(run_jobs.main, words)
    assert again.exit_code == 1
    assert "3 workers cannot share 32 windows evenly" in again.output and "unexpected keyword" in again.output
    whole, ended = record.read(out)
    assert whole.figures["loss"].value > 0 and "at three quarters" in whole.figures
    assert "loss" not in ended.figures and "at a half" in ended.figures and "at three quarters" not in ended.figures


def test_a_climb_runs_the_neighbours_of_the_best_rate_under_a_heading(
    task: ByteTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytelm, "library", lambda: (task.training, task.held_out, "0123456789abcdef"))
    monkeypatch.setattr(run_jobs, "train", lambda task, job: {"loss": (abs(job.rate - 0.005) + job.workers, "")})
    queue, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    good = ['{"mode": "bsp", "rate": 0.0028}', '{"mode": "local", "rate": 0.0056, "seed": 1}']
    queue.write_text("\n".join([*good, '{"rate": 0.003}']))
    words = [str(queue), "--model", "1,32,1", "--climb", "--table", "rounds", "--out", str(out)]
    done = CliRunner().invoke(run_jobs.main, words)
    assert done.exit_code == 1 and "rate 0.003: a climb begins at one of 0.00035, " in done.output
    lines = record.read(out)
    rates = [line.arguments["rate"] for line in lines]
    assert rates == [0.0028, 0.002, 0.004, 0.0056, 0.008, 0.0056, 0.004, 0.008]
    assert {(line.table, line.beside, line.best_of) for line in lines} == {("rounds", "mode bsp", "rate")}
    assert {line.run for line in lines} == {"mode bsp", "mode local"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "ssp"}, "'ssp' is no mode"),
        ({"steps": 3}, "at least 4 steps"),
        ({"outer": "adam"}, "'adam' is no outer step"),
        ({"local_steps": 30}, "200 steps are no whole rounds of 30"),
    ],
)
def test_a_job_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Job(**fields)
