"""overlap=True: gradients leave during the backward pass, and the run is the same."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.one_process import (
    BSP,
    BSP1,
    EQUAL,
    SGD,
    STEPS,
    plain,
    trained,
)
from kit.scripts import alone, build, distance, flat, loss_of, run, seeded
from torch import nn

from narrows.protocols import effects as e
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer
from narrows.worker.sync import gradients

pytestmark = pytest.mark.usefixtures("one_thread", "nothing_is_compiled")


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have compiled in this process: step() would wait then."""
    monkeypatch.setattr(gradients, "compiled", lambda: False)


def wide() -> nn.Module:
    """Three parts of 1 MiB on one shard, so that two of them can leave while backward still runs."""
    return seeded(
        lambda: nn.Sequential(nn.Linear(9, 300), nn.Tanh(), nn.Linear(300, 1500), nn.Tanh(), nn.Linear(1500, 200))
    )


def overlapped(net: nn.Module, optimizer: Any, worker: int, of: int, passes: int = 1) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for part in range(passes):
            (loss_of(net, passes * step + part, worker, of) / passes).backward()
        optimizer.step()
        engine = getattr(optimizer, "_engine", None)
        if engine is not None:
            assert engine.sync.overlap.sent_early > 0, "something left before step()"
            assert engine.sync.awaited.pending, "step() returns before the state is here"


@pytest.mark.parametrize("passes", [1, 2])
def test_overlap_is_the_same_run(passes: int) -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        overlapped(net, optimizer, worker, of, passes)

    ours = trained(BSP, SGD, loop, wide, overlap=True, accumulate=passes)
    assert distance(ours, plain(SGD, loop, wide)) < EQUAL


def test_overlap_clips_the_folded_mean_where_the_script_cannot() -> None:
    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step, worker, of).backward()
            if of == 1:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()

    ours = trained(BSP, SGD, loop, overlap=True, max_grad_norm=0.1)
    assert distance(ours, plain(SGD, loop)) < EQUAL


def stepped(misuse: Callable[[nn.Module, Any], None], net: nn.Module, optimizer: Any) -> None:
    misuse(net, optimizer)
    optimizer.step()


def scale_gradients(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def replace_gradient(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    p = next(net.parameters())
    assert p.grad is not None
    p.grad = p.grad * 2


def drop_gradient(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    next(net.parameters()).grad = None


def change_data(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    for p in net.parameters():
        assert p.grad is not None
        p.grad.data.clamp_(-1e-3, 1e-3)


def unscale(net: nn.Module, optimizer: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(net, 0)).backward()
    scaler.step(optimizer)


def backward_twice(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    loss_of(net, 1).backward()


def skip_a_step(net: nn.Module, optimizer: Any) -> None:
    loss_of(net, 0).backward()
    optimizer.zero_grad()
    loss_of(net, 1).backward()


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (scale_gradients, "changed between backward.*overlap=True"),
        (replace_gradient, "changed between backward.*overlap=True"),
        (drop_gradient, "changed between backward.*overlap=True"),
        (change_data, "changed between backward.*overlap=True"),
        (unscale, "GradScaler.*overlap=True"),
        (backward_twice, "2 gradients this step, not 1.*accumulate="),
        (skip_a_step, "2 gradients this step, not 1.*accumulate="),
    ],
)
def test_what_overlap_cannot_do_is_an_error_that_names_it(misuse: Any, words: str) -> None:
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        with pytest.raises(UsageError, match=words):
            stepped(misuse, net, optimizer)
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net)
        stepped(misuse, net, optimizer)  # without it, all of these are the script's own business


def test_overlap_wants_all_backward_passes_and_a_lossless_compressor() -> None:
    with run(BSP1):
        net = build()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True, accumulate=2)
        loss_of(net, 0).backward()
        with pytest.raises(UsageError, match="1 gradients this step, not 2"):
            optimizer.step()
    with run(Settings(sync="bsp", compress="topk:0.1")):
        net = build()
        with pytest.raises(UsageError, match=r"overlap=True.*--compress topk:0\.1"):
            DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
    with alone(), pytest.raises(UsageError, match="accumulate=0"):
        DistributedOptimizer(SGD(build().parameters()), build(), accumulate=0)


# The next forward begins with the parameters that are here.


def awaiting(net: nn.Module) -> list[bool]:
    """Whether each parameter waits at its next use."""
    return [type(p) is not nn.Parameter for p in net.parameters()]


def one_step(net: nn.Module, optimizer: Any, step: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(net, step).backward()
    optimizer.step()


def test_the_first_layer_does_not_wait_for_the_last() -> None:
    with run(Settings(sync="bsp", shards=2)) as started:
        net = wide()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        one_step(net, optimizer)
        assert awaiting(net) == [True] * 6 and optimizer.staleness == 0
        link = cast(Any, started.sessions[0].link)
        link.events = deque(sorted(link.events, key=lambda event: getattr(event, "shard", -1)))
        optimizer.zero_grad()
        assert awaiting(net) == [True] * 6, "the gradients are no values of the parameters"
        net[0](torch.zeros(1, 9))  # type: ignore[index]
        assert awaiting(net) == [False] * 2 + [True] * 4, "the border of the shards is in the second layer"
        loss_of(net, 1).backward()
        assert awaiting(net) == [False] * 6
        optimizer.step()


READS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "state_dict": lambda net, optimizer: [*net.state_dict().values()],
    "a deep copy": lambda net, optimizer: [*copy.deepcopy(net).parameters()],
    "a moving average": lambda net, optimizer: torch._foreach_mul([*net.parameters()], 0.5),
    "numpy": lambda net, optimizer: [torch.from_numpy(flat(net))],
    "an evaluation": lambda net, optimizer: [net.eval()(torch.ones(2, 9))],
    "the shared model": lambda net, optimizer: [optimizer.eval(), *(p.clone() for p in net.parameters())][1:],
    "the end": lambda net, optimizer: [optimizer.finish(), *net.parameters()][1:],
}


@pytest.mark.parametrize("name", READS)
def test_what_a_script_reads_after_step_is_the_whole_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for whole in (False, True):
        if whole:
            monkeypatch.setattr(gradients, "why_not", lambda flat: "step() is to wait")
        with run(BSP1):
            net = wide()
            optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
            one_step(net, optimizer)
            assert any(awaiting(net)) is not whole
            with torch.no_grad():
                found.append([each.clone() for each in READS[name](net, optimizer)])
            if name in ("the shared model", "the end"):
                assert whole or not optimizer._engine.sync.awaited.pending  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_write_between_two_steps_is_noticed_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    with run(BSP1):
        net = wide()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        one_step(net, optimizer)
        one_step(net, optimizer, 1)
        assert "was changed between two steps" not in "".join(capfd.readouterr())
        with torch.no_grad():
            net[4].bias.mul_(0.5)  # type: ignore[index]
        one_step(net, optimizer, 2)
        assert "'4.bias' was changed between two steps" in "".join(capfd.readouterr())


def test_the_end_of_a_session_comes_out_of_the_forward_pass() -> None:
    with run(BSP1) as started:
        net = wide()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        one_step(net, optimizer)
        link = cast(Any, started.sessions[0].link)
        link.events.clear()
        link.end("the server is gone")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the server is gone"):
                net(torch.ones(1, 9))


def test_a_gradient_of_two_states_is_dropped() -> None:
    """A worker rejoins in the midst of its forward pass: the run has that step of it again, on a whole state."""
    with run(Settings(sync="bsp", shards=2)) as started:
        net = wide()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        one_step(net, optimizer)
        link = cast(Any, started.sessions[0].link)
        link.events = deque([each for each in link.events if isinstance(each, e.StatePart) and each.shard == 0])
        first = net[0](torch.ones(16, 9))  # type: ignore[index]
        started.expire(0)
        link.call(lambda member, now: member.tick(now + 10 * NS))
        assert any(isinstance(each, e.MemberStarted) for each in link.events), "it has another place"
        assert any(awaiting(net))
        loss = net[1:](first).sum()  # type: ignore[index]
        assert not any(awaiting(net))
        loss.backward()
        before = flat(net)
        optimizer.step()
        assert np.array_equal(flat(net), before), "no gradient of this pass has left"
        one_step(net, optimizer, 1)
        optimizer.finish()
        ours = flat(net)

    def loop(net: nn.Module, optimizer: Any, worker: int, of: int) -> None:
        for step in range(2):
            one_step(net, optimizer, step)

    assert distance(ours, plain(SGD, loop, wide)) < EQUAL


def test_with_code_that_torch_has_compiled_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with run(BSP1):
        net = wide()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        monkeypatch.setattr(gradients, "compiled", lambda: True)
        one_step(net, optimizer)
        assert not any(awaiting(net))


def test_without_a_barrier_step_waits_as_far_as_it_must() -> None:
    with run(Settings(sync="async", push="gradient")):
        net = wide()
        optimizer = DistributedOptimizer(SGD(net.parameters()), net, overlap=True)
        one_step(net, optimizer)
        assert not any(awaiting(net))
