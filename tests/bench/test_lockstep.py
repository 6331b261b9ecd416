"""bench/loss/lockstep.py steps what it simulates as the real parts do: model, optimizers, codes, the product's gain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import bytelm
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from kit.gain_reference import TrueGain
from lab import record
from loss import lockstep, replicas
from loss.lockstep import Case, Runs
from loss.replicas import Task
from torch import Tensor

from narrows.ps.store.update_gain import WINDOW

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = {"layers": 2, "width": 16, "heads": 2, "context": 8}
RUNS = [(0.1, 0), (0.2, 0), (0.1, 3)]  # large ones: they warm up over 40 steps


@pytest.fixture(scope="module")
def task() -> Task:
    text = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8))
    return Task(text[:2000], text[2000:], "cpu", MODEL)


def losses(task: Task, case: Case) -> Tensor:
    return Runs(case, task, RUNS).train()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_batched_model_is_bytelms(task: Task) -> None:
    flat = 0.3 * random(3, task.size)
    rows = task.rows(5, 7, 1)
    nets = [bytelm.ByteGPT(**MODEL) for _ in flat]
    replicas = flat.clone().requires_grad_()
    found = task.loss_sum(replicas, rows.expand(3, -1, -1, -1).flatten(0, 1))
    (gradients,) = torch.autograd.grad(found.sum(), replicas)
    for net, values, loss, gradient in zip(nets, flat, found, gradients, strict=True):
        torch.nn.utils.vector_to_parameters(values, net.parameters())
        wanted = bytelm.loss_sum(net, rows[0])
        torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0)
        wanted.backward()
        own = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
        torch.testing.assert_close(gradient, own, rtol=1e-4, atol=1e-4)
    each = [bytelm.validation_loss(net, task.held_out, 8) for net in nets]
    torch.testing.assert_close(task.validation_loss(flat), torch.tensor(each), rtol=1e-5, atol=0)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_rows_are_dealt_as_bytelm_deals_them(task: Task, workers: int) -> None:
    for worker, rows in enumerate(task.rows(3, 5, workers)):
        assert torch.equal(rows, bytelm.batch_rows(task.training, 3, 5, 32, 8, worker, workers))


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_optimizers_are_torchs(task: Task, inner: str) -> None:
    """Three steps of two replicas at rates of their own; Muon's five bfloat16 steps are the same products in a batch."""
    args = bytelm.arguments(["--optimizer", inner])
    nets = [bytelm.ByteGPT(**MODEL) for _ in range(2)]
    x = torch.stack([torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets])
    begun = x.clone()
    rates = torch.tensor([[0.003], [0.02]])
    runs = Runs(Case(inner=inner), task, RUNS[:2])
    ours, theirs = runs.optimizer(x), [bytelm.optimizers(net, args) for net in nets]
    for step in range(3):
        g = 0.01 * random(*x.shape, seed=step)
        ours.take(g)
        x += ours.update(x, rates)
        for net, inners, gradient, rate in zip(nets, theirs, g, rates, strict=True):
            sizes = [p.numel() for p in net.parameters()]
            for p, part in zip(net.parameters(), gradient.split(sizes), strict=True):
                p.grad = part.view_as(p).clone()
            for optimizer in inners:
                optimizer.param_groups[0]["lr"] = rate.item()
                optimizer.step()
    wanted = torch.stack([torch.cat([p.detach().flatten() for p in net.parameters()]) for net in nets])
    error = (x - wanted).norm() / (wanted - begun).norm()
    assert error < (1e-5 if inner == "adamw" else 5e-3)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_one_worker_that_pushes_updates_is_one_process(task: Task, inner: str) -> None:
    one = losses(task, Case(mode="mean", inner=inner, steps=6))
    torch.testing.assert_close(losses(task, Case(inner=inner, steps=6)), one, rtol=1e-5, atol=0)
    assert one.unique().numel() == len(RUNS)


def test_a_round_of_local_sgd_is_as_many_steps(task: Task) -> None:
    torch.testing.assert_close(
        losses(task, Case(local_steps=3, steps=6)), losses(task, Case(steps=6)), rtol=1e-5, atol=0
    )
    assert not torch.equal(losses(task, Case(local_steps=3, outer_momentum=0.6, steps=6)), losses(task, Case(steps=6)))


def test_workers_whose_gradients_are_not_clipped_are_the_whole_batch(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep, "clipped", lambda g: g)
    one = losses(task, Case(mode="mean", steps=6))
    for workers in (2, 4):
        torch.testing.assert_close(losses(task, Case(workers, "gradients", steps=6)), one, rtol=1e-5, atol=0)


def test_one_worker_with_its_own_updates_in_flight_sees_all_of_them(task: Task) -> None:
    """Read my writes: what is late, rounded or left out is in its replica all the same."""
    one = losses(task, Case(steps=6))
    for case in (Case(staleness=2, steps=6), Case(staleness=1, up="topk:0.1+int8", down="dense", steps=6)):
        torch.testing.assert_close(losses(task, case), one, rtol=2e-5, atol=0)
    assert not torch.allclose(losses(task, Case(staleness=1, stand="0", steps=6)), one, rtol=1e-4, atol=0)
    assert not torch.allclose(losses(task, Case(up="topk:0.1", kept="0", steps=6)), one, rtol=1e-4, atol=0)


@pytest.mark.parametrize("gain", ["power:0.5", "window"])
def test_a_gain_is_1_of_one_worker_and_something_else_of_four(task: Task, gain: str) -> None:
    case = Case(staleness=1, gain=gain, stand="g*1.5", kept="g", steps=18)
    alone = [Runs(replace(case, gain=name, stand="1"), task, RUNS).train() for name in ("1", gain)]
    torch.testing.assert_close(*alone, rtol=1e-5, atol=0)
    plain, other = (Runs(replace(case, workers=4, gain=name), task, RUNS).train() for name in ("1", gain))
    assert not torch.allclose(plain, other, rtol=1e-5, atol=0)


# Codes, by loops.


def rounded(values: np.ndarray, kept: np.ndarray, coding: str, block: int) -> np.ndarray:
    out = np.zeros_like(values)
    for begin in range(0, len(values), block):
        at = [i for i in range(begin, min(begin + block, len(values))) if kept[i]]
        sizes = [abs(values[i]) for i in at]
        for i in at:
            if coding == "":
                out[i] = values[i]
            elif coding == "sign":
                out[i] = np.sign(values[i]) * np.mean(sizes)
            else:
                out[i] = np.round(values[i] / (max(sizes) / 127)) * (max(sizes) / 127)
    return out


def largest(values: np.ndarray, density: float) -> np.ndarray:
    """All but the round((1 - density) n) smallest."""
    kept = np.ones(len(values), bool)
    kept[np.argsort(np.abs(values))[: round((1 - density) * len(values))]] = False
    return kept


def topk(density: float, coding: str) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda x, clock: rounded(x, largest(x, density), coding, round(256 / density))


def cycle(stride: int, share: float, coding: str) -> Callable[[np.ndarray, int], np.ndarray]:
    def send(x: np.ndarray, clock: int) -> np.ndarray:
        out, part = np.zeros_like(x), x[clock % stride :: stride]
        kept = largest(part, share) if share < 1 else np.ones(len(part), bool)
        out[clock % stride :: stride] = rounded(part, kept, coding, round(256 / share))
        return out

    return send


def whole(coding: str) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda x, clock: rounded(x, np.ones(len(x), bool), coding, 256)


CODES = {
    "dense": whole(""),
    "int8": whole("int8"),
    "sign": whole("sign"),
    "topk:0.05": topk(0.05, ""),
    "topk:0.05+int8": topk(0.05, "int8"),
    "topk:0.11+sign": topk(0.11, "sign"),
    "cycle:0.15+sign": cycle(7, 1, "sign"),
    "cycle:0.15/0.24+sign": cycle(7, 0.24, "sign"),
}


@pytest.mark.parametrize("spec", CODES)
@pytest.mark.parametrize("size", [300, 12_345])
def test_a_code_sends_what_the_loops_send(spec: str, size: int) -> None:
    x = random(2, size)
    for clock in (0, 3, 8) if size < 1000 else (3,):
        wanted = np.stack([CODES[spec](row, clock) for row in x.numpy().astype(np.float64)])
        np.testing.assert_allclose(replicas.code(spec)(x, clock).numpy(), wanted, rtol=1e-4, atol=1e-6)


def test_a_threshold_by_sample_keeps_about_the_density() -> None:
    kept = replicas.above(random(1, replicas.LARGE + 50), 0.05)
    assert kept.float().mean().item() == pytest.approx(0.05, rel=0.05)


def test_the_window_gain_is_the_products() -> None:
    """Two runs of three workers are compared; their updates agree more and more."""
    gain = lockstep.Windows(500, "cpu")
    true = [TrueGain(0.0) for _ in range(2)]
    for clock in range(4 * WINDOW + 3):
        noise = random(2, 3, 500, seed=clock)
        sent = noise + 0.1 * clock * random(2, 1, 500, seed=1000)
        factor = gain(noise, sent).expand(2, 1).flatten().tolist()
        assert factor == pytest.approx([each.factor for each in true], rel=1e-5)  # that of the windows before
        for each, updates in zip(true, sent.numpy(), strict=True):
            for worker, update in enumerate(updates):
                each.saw(worker, (0, 1, 2), 1.0, update)
    assert gain.factor.flatten().tolist() == pytest.approx([each.factor for each in true], rel=1e-5)
    assert all(1.01 < each.factor < 3**0.5 for each in true)


def test_a_case_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for case, said in (
        ({"workers": 3}, "3 workers cannot share 32 rows evenly"),
        ({"local_steps": 7}, "400 steps are no whole rounds of 7"),
    ):
        path = tmp_path / "cases.json"
        path.write_text(json.dumps([case]))
        done = CliRunner().invoke(lockstep.main, ["--cases", str(path)])
        assert done.exit_code == 2 and said in done.output


def test_presets_say_what_they_are_for() -> None:
    gain, local = lockstep.PRESETS["gain"], lockstep.PRESETS["local"]
    assert len(set(gain)) == len(gain) == 5 + 4 * 9
    assert len(set(local)) == len(local) == 2 + 2 * 4 * 3
    for case in (*gain, *local):
        replicas.code(case.up)
        assert case.gain == "1" or case.workers > 1


def test_runs_that_are_there_are_not_run_again(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "Task", lambda *words: task)
    monkeypatch.setattr(bytelm, "library", lambda: (task.training, task.held_out, "0123456789abcdef"))
    cases, out = tmp_path / "cases.json", tmp_path / "out.jsonl"
    cases.write_text('[{"mode": "mean"}, {"workers": 2, "staleness": 1, "gain": "window", "stand": "g*1.5"}]')
    words = ["--cases", str(cases), "--steps", "10", "--out", str(out), "--device", "cpu", "--seeds", "0,1"]
    one = CliRunner().invoke(lockstep.main, [*words, "--rates", "0.002"])
    assert one.exit_code == 0, one.output
    two = CliRunner().invoke(lockstep.main, [*words, "--rates", "0.002,0.004"])
    assert two.output.count("of 2 runs") == 2
    lines = record.read(out)
    assert sorted((str(line.arguments["workers"]), line.arguments["rate"], line.seed) for line in lines) == sorted(
        (workers, rate, seed) for workers in "12" for rate in (0.002, 0.004) for seed in (0, 1)
    )
    assert {line.run for line in lines[2:4]} == {"workers 2, staleness 1, gain window, stand g*1.5, steps 10"}
    assert all(set(line.figures) >= {"loss"} for line in lines)
    assert CliRunner().invoke(lockstep.main, [*words, "--rates", "0.002,0.004"]).output == ""
