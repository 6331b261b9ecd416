"""bench/loss/: each mode trains a tiny net, parts are those of bytelm.py, torch and the product, and a queue is run once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import bytelm
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from kit.gain_reference import TrueGain
from kit.scripts import flat
from lab import record
from loss import run_jobs
from loss.bf16_replicas import FLAGS, SAMPLED, AdamWs, ByteTask, Coder
from loss.job import Job
from loss.rounds import OuterStep, local, matrices
from loss.update_push import GainWindow
from torch import nn

from narrows.compression import decode, parse
from narrows.compression.buffers import FloatArray
from narrows.ps.store.update_gain import WINDOW

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


def net_of(task: ByteTask, values: FloatArray) -> bytelm.ByteGPT:
    net = bytelm.ByteGPT(**task.model)
    nn.utils.vector_to_parameters(torch.from_numpy(values), net.parameters())
    return net


def backward(task: ByteTask, net: bytelm.ByteGPT, rows: torch.Tensor) -> FloatArray:
    """The gradient of the mean loss of some rows, which is left in the parameters too."""
    net.zero_grad()
    (bytelm.loss_sum(net, rows) / (len(rows) * task.context)).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).numpy()


def step_by(optimizers: list[torch.optim.Optimizer], net: bytelm.ByteGPT, rate: float) -> None:
    nn.utils.clip_grad_norm_(net.parameters(), FLAGS.clip)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()


def test_gradients_and_losses_are_those_of_bytelm_to_a_percent(task: ByteTask) -> None:
    x = 0.3 * np.random.default_rng(1).standard_normal((2, task.size)).astype(np.float32)
    found, rows = np.zeros_like(x), task.rows(3, 5, 2)
    task.gradients(x, rows, found)
    nets = [net_of(task, values) for values in x]
    wanted = np.stack([backward(task, *each) for each in zip(nets, rows, strict=True)])
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)
    assert task.loss(x[0]) == pytest.approx(bytelm.validation_loss(nets[0], task.held_out, task.context), rel=0.01)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_optimizers_are_torchs(task: ByteTask, inner: str) -> None:
    """Three steps of two workers, whose gradients are longer than FLAGS.clip."""
    nets = [net_of(task, task.initial(seed)) for seed in range(2)]
    theirs = [bytelm.optimizers(net, bytelm.arguments(["--optimizer", inner])) for net in nets]
    x = np.stack([flat(net) for net in nets])
    begun, ours, out = x.copy(), AdamWs(task, 2, inner, 0.9, 0.95), np.zeros_like(x)
    for step in range(3):
        g = 0.05 * np.random.default_rng(step).standard_normal(x.shape).astype(np.float32)
        for net, optimizers, gradient in zip(nets, theirs, g, strict=True):
            for p, part in zip(net.parameters(), torch.from_numpy(gradient).split(task.sizes), strict=True):
                p.grad = part.view_as(p).clone()
            step_by(optimizers, net, 0.003)
        ours.updates(g, x, 0.003, out)
        x += out
    wanted = np.stack([flat(net) for net in nets])
    assert np.linalg.norm(x - wanted) < (1e-4 if inner == "adamw" else 5e-3) * np.linalg.norm(wanted - begun)


def looped(values: FloatArray, density: float, coding: str) -> FloatArray:
    """What is sent of some values, by loops. A sample decides the threshold."""
    sample = np.sort(np.abs(values[::SAMPLED]))
    rank = min(len(sample), max(1, round((1 - density) * len(sample)))) - 1
    threshold = sample[rank] if density < 1 else -1.0
    out, block = np.zeros_like(values), round(256 / density)
    for begin in range(0, len(values), block):
        at = [i for i in range(begin, min(begin + block, len(values))) if abs(values[i]) > threshold]
        sizes = [abs(values[i]) for i in at]
        for i in at:
            if coding == "sign":
                out[i] = np.sign(values[i]) * np.mean(sizes)
            elif coding:
                step = max(sizes) / {"int8": 127, "int4": 7}[coding]
                out[i] = np.round(values[i] / step) * step
            else:
                out[i] = values[i]
    return out


@pytest.mark.parametrize(
    "spec", ["dense", "int8", "int4", "sign", "topk:0.25", "topk:0.1+int8", "topk:0.11+sign", "cycle:0.15+sign"]
)
def test_a_code_sends_what_the_loops_send(spec: str) -> None:
    name, _, coding = spec.partition("+")
    name, _, density = name.partition(":")
    values = np.random.default_rng(2).standard_normal(7000).astype(np.float32)
    residual, mean, sent, code = values.copy(), np.ones_like(values), np.zeros_like(values), Coder(spec)
    for clock in range(7 if name == "cycle" else 1):
        before, wanted = residual.copy(), np.zeros_like(values)
        mean[:] = 1
        code(residual, 0.5, mean, sent)
        code.advance()
        if name == "cycle":
            wanted[clock::7] = looped(before[clock::7], 1, coding)
        else:
            wanted = looped(before, float(density or 1), coding or (name if name in ("int8", "int4", "sign") else ""))
        np.testing.assert_allclose(sent, wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(residual + sent, before, atol=1e-6)
        np.testing.assert_allclose(mean, 1 + 0.5 * sent, atol=1e-6)


def test_int4_has_fifteen_values_of_a_block() -> None:
    values = np.random.default_rng(3).standard_normal(256).astype(np.float32)
    sent = np.zeros_like(values)
    Coder("int4")(values, 1, np.zeros_like(values), sent)
    assert 10 < len(np.unique(sent)) <= 15


def test_2bit_is_the_products() -> None:
    values = np.random.default_rng(4).standard_normal(1300).astype(np.float32)
    residual, mean, sent = values.copy(), np.ones_like(values), np.zeros_like(values)
    Coder("2bit")(residual, 0.5, mean, sent)
    wanted = np.empty_like(values)
    decode(parse("2bit").encode(values), wanted)
    np.testing.assert_array_equal(sent, wanted)
    np.testing.assert_array_equal(residual, values - wanted)
    np.testing.assert_array_equal(mean, 1 + 0.5 * wanted)


def test_the_window_gain_is_the_products() -> None:
    """Three workers, whose updates agree more and more."""
    window, true = GainWindow(500), TrueGain(0.0)
    common = np.random.default_rng(1000).standard_normal(500)
    for clock in range(4 * WINDOW + 3):
        noise = np.random.default_rng(clock).standard_normal((3, 500))
        sent = (noise + 0.1 * clock * common).astype(np.float32)
        window.saw(sent)
        for worker, update in enumerate(sent):
            true.saw(worker, (0, 1, 2), 1.0, update)
        assert window.factor == pytest.approx(true.factor, rel=1e-5)
    assert 1.01 < window.factor < 3**0.5


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_rounds_end_as_those_of_torchs_optimizers(task: ByteTask, momentum: float) -> None:
    """torch's gradients are float32. They differ by the rounding of bfloat16, so the model does by a part of its way."""
    job = Job(mode="local", workers=2, steps=12, warm_up=40, local_steps=3, outer_lr=0.7, up="dense", rate=0.02)
    found, _ = local(task, replace(job, outer_momentum=momentum), lambda done, x: False)
    x, velocity = task.initial(0), task.zeros()
    first, nets = x.copy(), [net_of(task, x.copy()) for _ in range(2)]
    optimizers = [bytelm.optimizers(net, FLAGS) for net in nets]
    for step in range(12):
        for net, own, rows in zip(nets, optimizers, task.rows(0, step, 2), strict=True):
            backward(task, net, rows)
            step_by(own, net, job.rate_at(step))
        if step % 3 == 2:
            update = np.mean([flat(net) for net in nets], 0) - x
            velocity = momentum * velocity + update
            x = x + 0.7 * (update + momentum * velocity)
            for net in nets:
                nn.utils.vector_to_parameters(torch.from_numpy(x.copy()), net.parameters())
    assert np.linalg.norm(found - x) < 0.1 * np.linalg.norm(x - first)


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
