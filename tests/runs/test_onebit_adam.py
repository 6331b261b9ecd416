"""examples/onebit_adam.py beside the algorithms of its papers, written out in NumPy, and its commands as they stand in it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kit import reference
from kit.processes import finished
from kit.scripts import flat, run
from kit.tasks import load
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.worker.model import embedding

Array = npt.NDArray[Any]
Gradient = Callable[[int, int, Array], Array]  # of a step and a worker, at x
EXAMPLE = Path(__file__).parents[2] / "examples" / "onebit_adam.py"
WORKERS, STEPS = 4, 24
CODED = Settings(sync="bsp", compress="sign", compress_down="sign", workers=WORKERS, shards=2)
B1, B2, EPS = 0.9, 0.95, 1e-8
SMALL = ["--layers", "1", "--width", "32", "--heads", "2", "--steps", "60", "--rate-warm-up", "10"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("onebit_adam", EXAMPLE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Bowl(nn.Module):
    """1,024 values, each with a curvature of its own, a few with none. Each worker and step has another lowest point.

    Sums of coded updates often cancel, and then rounding would decide their signs. So nothing rounds them: first weights
    are small and short, and 4 workers divide by a power of two.
    """

    def __init__(self) -> None:
        super().__init__()
        draw = np.random.default_rng(5)
        first = torch.from_numpy((draw.normal(size=1024) / 64).astype("f2").astype("f4"))
        self.a, self.b = nn.Parameter(first[:640].view(16, 40).clone()), nn.Parameter(first[640:].clone())
        self.curvature = np.exp2(draw.integers(-8, 3, 1024)).astype("f4")
        self.curvature[::50] = 0
        self.lowest = draw.normal(size=(STEPS, WORKERS, 1024)).astype("f4")

    def gradient(self, step: int, worker: int, x: Array) -> Array:
        found: Array = self.curvature * (x - self.lowest[step, worker])
        return found

    def backward(self, step: int, worker: int) -> None:
        x = torch.cat([self.a.flatten(), self.b])
        distance = x - torch.from_numpy(self.lowest[step, worker])
        (torch.from_numpy(self.curvature) * distance.square()).sum().div(2).backward()


def sign(values: Array) -> Array:
    """Each value's sign, and the mean magnitude of its block of 256 in bf16."""
    values = (np.round(values, 12) + 0.0).astype("f4")  # what cancels is 0, not the rounding error of float64, nor -0
    scales, plane = np.zeros(-(-values.size // 256), np.uint16), np.zeros(-(-values.size // 8), np.uint8)
    reference.encode_sign(values, scales, plane)
    reference.decode_sign(scales, plane, out := np.zeros_like(values))
    return out.astype("f8")


def algorithm_1(x: Array, m: Array, v: Array, gradient: Gradient, rate: float, feedback: bool = True) -> list[Array]:
    """1-bit Adam: lines 6 to 13 of algorithm 1 of 2102.02888, with a compressor that codes in units of sqrt(v)."""
    root = np.sqrt(v) + EPS
    delta, of_server, found = np.zeros((WORKERS, x.size)), np.zeros(x.size), []
    for t in range(STEPS):
        mean = np.zeros(x.size)
        for i in range(WORKERS):
            own = B1 * m + (1 - B1) * gradient(t, i, x) + delta[i]
            sent = root * sign(own / root)
            delta[i] = (own - sent) * feedback
            mean += sent / WORKERS
        m = -root * sign(-(mean + of_server) / root)  # a server codes the change of weights: the sign of 0 is its
        of_server = (mean + of_server - m) * feedback
        x = x - rate * m / root
        found.append(x)
    return found


def zero_one_algorithm(x: Array, gradient: Gradient, rates: Sequence[float], policy: Any) -> list[list[Array]]:
    """0/1 Adam: algorithm 1 of 2202.06009, as OneBitAdam says that it differs; each worker's model after each step."""
    ours, shared, m, u = [x] * WORKERS, x, [np.zeros(x.size)] * WORKERS, [np.zeros(x.size)] * WORKERS
    known = m[0]  # the momentum that all have
    v, root, updates, since = np.zeros(x.size), np.full(x.size, np.inf), 0, 0.0
    left, of_server, found = np.zeros((WORKERS, x.size)), np.zeros(x.size), []
    for t, (exchange, refresh) in enumerate(policy):
        rate = rates[t] / (1 - B1 ** (t + 1))
        g = [gradient(t, i, ours[i]) for i in range(WORKERS)]
        m = [B1 * m[i] + (1 - B1) * g[i] for i in range(WORKERS)]
        u = [u[i] + rate * m[i] / root for i in range(WORKERS)]
        ours, since = [shared - u[i] for i in range(WORKERS)], since + rate
        if exchange:
            sent = [sign(u[i] + left[i]) for i in range(WORKERS)]
            left = np.array([u[i] + left[i] - sent[i] for i in range(WORKERS)])
            mean = sum(sent) / WORKERS + of_server
            told = -sign(-mean)
            of_server, shared = mean - told, shared - told
            known = B1 * known + (1 - B1) * np.mean(g, 0) if refresh else told * root / since
            m = [known] * WORKERS
            ours, u, since = [shared] * WORKERS, [np.zeros(x.size)] * WORKERS, 0.0
        if refresh:
            v, updates = B2 * v + (1 - B2) * np.mean(g, 0) ** 2, updates + 1
            root = np.sqrt(v / (1 - B2**updates)) + EPS
        found.append(ours)
    return found


def far(a: Array, b: Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_the_frozen_stage_is_algorithm_1_with_error_feedback_on_both_sides(example: ModuleType) -> None:
    bowl, draw, rate = Bowl(), np.random.default_rng(6), 2.0**-7  # a power of two: `sign` rounds magnitudes to bf16
    v = (bowl.curvature * draw.uniform(0.5, 2, 1024)) ** 2
    m = bowl.curvature * draw.normal(size=1024) * 0.1
    moments = [torch.from_numpy(each.astype("f4")) for each in (m, v)]

    def script(worker: int) -> list[Array]:
        model = Bowl()
        adam = example.OneBitAdam(model)
        adam.begin(10_000, *([a[:640].view(16, 40), a[640:]] for a in moments))  # so late that no bias is left
        found = []
        for step in range(STEPS):
            model.backward(step, worker)
            adam.step(rate)
            found.append(flat(model))
        return found

    with run(CODED) as started:
        ends = started.together(script)
    wanted = algorithm_1(flat(bowl), m, v, bowl.gradient, rate)
    without = algorithm_1(flat(bowl), m, v, bowl.gradient, rate, feedback=False)
    for step in range(STEPS):
        assert all(np.array_equal(end[step], ends[0][step]) for end in ends)
        assert far(ends[0][step] - flat(bowl), wanted[step] - flat(bowl)) < 1e-6
    assert far(without[-1] - flat(bowl), wanted[-1] - flat(bowl)) > 0.05


def test_zero_one_adam_is_its_algorithm_with_local_steps(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "of_run", lambda: True)
    bowl = Bowl()
    rates = [0.01 * 0.9**step for step in range(STEPS)]
    policy = list(example.zero_one_policy(rates, kappa=2, local_steps=3))
    assert [refresh for _, refresh in policy].count(True) == 5 and [each for each, _ in policy].count(False) > 6

    def script(worker: int) -> list[Array]:
        model = Bowl()
        adam = example.OneBitAdam(model, refreshes=True)
        found = []
        for step, (exchange, refresh) in enumerate(policy):
            model.backward(step, worker)
            adam.step(rates[step], exchange, refresh)
            found.append(np.concatenate([p.detach().flatten().numpy() for p in adam.parameters]))
        return found

    with run(CODED) as started:
        ends = started.together(script)
    wanted = zero_one_algorithm(flat(bowl), bowl.gradient, rates, policy)
    for step in range(1, STEPS):
        for worker in range(WORKERS):
            moved = wanted[step][worker] - flat(bowl)
            assert far(ends[worker][step] - flat(bowl), moved) < 1e-6, (step, worker)


def test_refreshes_and_exchanges_become_rarer(example: ModuleType) -> None:
    policy = list(example.zero_one_policy([1.0] * 30, kappa=2, local_steps=4))
    assert [step for step, (_, refresh) in enumerate(policy) if refresh] == [0, 1, 2, 4, 6, 10, 14, 22]
    assert all(exchange for exchange, _ in policy)
    rates = [0.5, 1.0, 0.9, 0.5, 0.5, 0.5, 0.5, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.1]
    policy = list(example.zero_one_policy(rates, kappa=100, local_steps=4))
    assert [step for step, (exchange, _) in enumerate(policy) if exchange] == [0, 1, 2, 4, 6, 10, 14, 15]
    assert [step for step, (_, refresh) in enumerate(policy) if refresh] == [0, 1, 2]


def test_the_warm_up_writes_the_moments_that_the_servers_have(example: ModuleType, tmp_path: Path) -> None:
    """They are those of Adam in one process, along the mean of what each worker has clipped."""
    task, steps, state = load("bytelm"), 6, tmp_path / "warm.pt"
    args = example.arguments([*SMALL, "--dense", str(steps), "--state", str(state)])
    text, rates = task.library()[0], [0.001 * (step + 1) for step in range(steps)]

    def model() -> nn.Module:
        torch.manual_seed(1)
        made: nn.Module = task.ByteGPT(args.layers, args.width, args.heads, args.context)
        return made

    models = [model(), model()]

    def script(worker: int) -> None:
        example.train_dense(models[worker], text, rates, args).finish()

    with run(Settings(sync="bsp", workers=2, shards=2)) as started:
        started.together(script)
    one = model()
    adam = torch.optim.Adam(one.parameters(), betas=(B1, B2), eps=EPS)
    for step, rate in enumerate(rates):
        adam.param_groups[0]["lr"] = rate
        mean = [torch.zeros_like(p) for p in one.parameters()]
        for worker in range(2):
            adam.zero_grad()
            rows = task.batch_rows(text, args.seed, step, args.batch, args.context, worker, 2)
            (task.loss_sum(one, rows) * 2 / (args.batch * args.context)).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            torch._foreach_add_(mean, [p.grad / 2 for p in one.parameters() if p.grad is not None])
        for p, value in zip(one.parameters(), mean, strict=True):
            p.grad = value
        adam.step()
    warm = torch.load(state)
    assert warm["step"] == steps
    for at, p in enumerate(one.parameters()):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(warm[name][at], adam.state[p][name], rtol=1e-3, atol=1e-9), (name, at)
    other = task.ByteGPT(args.layers, args.width, args.heads, args.context)
    other.load_state_dict(warm["model"])
    assert far(flat(other), flat(one)) < 1e-5


@pytest.mark.timeout(360)
def test_its_commands_train_and_send_what_they_should(example: ModuleType, tmp_path: Path) -> None:
    """The three commands of its docstring, on a small model: losses, and the bytes that a worker sends."""
    commands = re.findall(r"^ps-worker (.*)$", EXAMPLE.read_text("utf-8"), re.M)
    assert len(commands) == 3
    losses, up = [], []
    for command in commands:
        words = command.replace("-n 4", "-n 2").replace("--dense 80", "--dense 15").split()
        words[words.index("examples/onebit_adam.py")] = str(EXAMPLE)
        code, out, err = finished("ps-worker", *words, *SMALL, cwd=tmp_path)
        told = re.findall(r"^loss ([0-9.]+) \(rank \d, ([0-9,]+) bytes up", out, re.M)
        assert code == 0 and len(told) == 2, err
        assert "was changed" not in err and told[0][0] == told[1][0]
        losses.append(float(told[0][0]))
        up.append(min(int(sent.replace(",", "")) for _, sent in told))  # the other worker sends the first weights too
    args = example.arguments(SMALL)
    model = load("bytelm").ByteGPT(args.layers, args.width, args.heads, args.context)
    count = sum(p.numel() for p in model.parameters())
    rates = [example.learning_rate(step, args.steps, args.lr, args.rate_warm_up) for step in range(args.steps)]
    policy = list(example.zero_one_policy(rates, args.kappa, local_steps=4))
    exchanges, refreshes = (sum(column) for column in zip(*policy, strict=True))
    coded = count / 8 + 2 * count / 256
    assert 1 < up[0] / (15 * 4 * count) < 1.05
    assert 1 < up[1] / (45 * coded) < 1.1
    assert exchanges < args.steps - 8 and 1 < up[2] / (exchanges * coded + refreshes * 4 * count) < 1.1
    assert losses[0] > 4 and losses[1] < 3.45 and losses[2] < 3.55  # 15 steps of the 60; Adam with all of them: 3.12
