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
from loss import bf16_replicas, replicas, run_jobs
from loss.bf16_replicas import ByteTask
from loss.job import Job

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


def test_int4_has_fifteen_values_of_a_block() -> None:
    values = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    sent = np.zeros_like(values)
    bf16_replicas.Coder("int4")(values, 1, np.zeros_like(values), sent)
    assert 10 < len(np.unique(sent)) <= 15


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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"mode": "ssp"}, "'ssp' is no mode"),
        ({"steps": 3}, "at least 4 steps"),
    ],
)
def test_a_job_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Job(**fields)
