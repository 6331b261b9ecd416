"""--dp-clip and --dp-noise: what leaves a worker is clipped and has noise, and what it told of its data is counted."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import store_of
from kit.scripts import Array, build, flat, loss_of, run
from kit.specs import WITH_SERVER, steps_on_worker
from torch import nn

from narrows.compression import NonFiniteError
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer
from narrows.worker.command.record import WorkerRecord
from narrows.worker.model.privacy import CHUNK, DELTA, ORDERS, UpdatePrivacy

CLIP, SIGMA, RATE = 0.02, 0.5, 0.1
PLAIN: dict[str, Any] = {"update_gain": 1.0, "look_ahead": 0.0}


@pytest.mark.parametrize("length", [0.0, 0.5, 3.0, 1e19])
def test_an_update_is_clipped_over_all_shards_and_gets_noise(length: float) -> None:
    rng = np.random.default_rng(0)
    whole = rng.standard_normal(3 * CHUNK + 5).astype(np.float32)
    whole *= np.float32(length / np.linalg.norm(whole.astype(np.float64)))
    cuts = [whole[:100].copy(), whole[100 : CHUNK + 300].copy(), whole[CHUNK + 300 :].copy()]
    UpdatePrivacy(1.0, 0.0).hide(cuts)
    clipped = np.concatenate(cuts)
    expected = whole * min(1.0, 1.0 / length) if length else whole
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)
    assert np.linalg.norm(clipped.astype(np.float64)) <= 1 + 1e-6

    hidden = UpdatePrivacy(1.0, 0.25, np.random.default_rng(1))
    again = [whole[:CHUNK].copy(), whole[CHUNK:].copy()]
    hidden.hide(again)
    noise = np.concatenate(again) - clipped
    drawn = np.random.default_rng(1)
    sizes = [CHUNK, CHUNK, CHUNK, 5]
    np.testing.assert_allclose(
        noise, 0.25 * np.concatenate([drawn.standard_normal(n, np.float32) for n in sizes]), atol=1e-6
    )
    assert noise.std() == pytest.approx(0.25, rel=0.01) and abs(noise.mean()) < 0.005
    assert hidden.pushes == 1


def test_two_workers_have_two_sources() -> None:
    one, other = (np.zeros(100, np.float32) for _ in range(2))
    UpdatePrivacy(1.0, 1.0).hide([one])
    UpdatePrivacy(1.0, 1.0).hide([other])
    assert not np.isclose(one, other).any()


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_has_no_length_is_not_sent(wrong: float) -> None:
    hidden, values = UpdatePrivacy(1.0, 1.0), np.array([1, wrong, 2], np.float32)
    with pytest.raises(NonFiniteError, match="its length is not finite"):
        hidden.hide([values])
    assert values[0] == 1 and values[2] == 2 and hidden.pushes == 0


def exact(sigma: float, pushes: int) -> float:
    """The least epsilon of such a mechanism at DELTA (Balle and Wang 2018, theorem 8): any accountant tells more."""
    mu = 2 * math.sqrt(pushes) / sigma

    def delta(epsilon: float) -> float:
        upper, lower = (0.5 * math.erfc(x / math.sqrt(2)) for x in (epsilon / mu - mu / 2, epsilon / mu + mu / 2))
        return upper - (math.exp(epsilon) * lower if lower else 0.0)

    low, high = 0.0, 1.0
    while delta(high) > DELTA:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > DELTA else (low, middle)
    return high


@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.parametrize(("sigma", "pushes"), [(2.0, 40), (100.0, 10)])
def test_epsilon_is_that_of_opacus(sigma: float, pushes: int) -> None:
    accountants = pytest.importorskip("opacus.accountants")
    hidden, theirs = UpdatePrivacy(1.0, sigma), accountants.RDPAccountant()
    assert hidden.epsilon() == 0.0
    for _ in range(pushes):
        hidden.hide([np.zeros(3, np.float32)])
        theirs.step(noise_multiplier=sigma / 2, sample_rate=1.0)
    assert hidden.epsilon() == theirs.get_epsilon(DELTA, alphas=ORDERS) <= theirs.get_epsilon(DELTA) + 1e-12
    assert exact(sigma, pushes) <= hidden.epsilon() <= 1.3 * exact(sigma, pushes)


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> list[list[Array]]:
    """The updates that leave `UpdatePrivacy.hide`, in their order."""
    seen: list[list[Array]] = []
    hide = UpdatePrivacy.hide

    def seeing(self: UpdatePrivacy, update: list[Array]) -> None:
        hide(self, update)
        seen.append([values.copy() for values in update])

    monkeypatch.setattr(UpdatePrivacy, "hide", seeing)
    return seen


def trained(settings: Settings, steps: int, net: nn.Module | None = None) -> tuple[Array, Array, DistributedOptimizer]:
    """The model before and after a run of one worker, which has not left."""
    with run(settings) as started:
        net = net or build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=RATE), net)
        before = flat(net)
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
        with optimizer.shared():
            pass
        stores = [store_of(server) for server in started.cluster.servers]
        return before, np.concatenate([store.x for store in stores if store is not None]), optimizer


def residual_of(optimizer: DistributedOptimizer) -> Array:
    assert optimizer._engine is not None
    residual = optimizer._engine.sync.residual()
    assert residual is not None
    return residual


def test_error_feedback_sees_the_noise(hidden: list[list[Array]]) -> None:
    """The server's change and the residual are the noised updates together, and nothing else."""
    pytest.importorskip("opacus")
    settings = Settings(sync="ssp", shards=2, compress="topk:0.25", dp_clip=CLIP, dp_noise=SIGMA, **PLAIN)
    before, after, optimizer = trained(settings, 3)
    told = sum(np.concatenate(update) for update in hidden)
    assert len(hidden) == 3 and np.linalg.norm(told) > CLIP
    np.testing.assert_allclose(after - before + residual_of(optimizer), told, atol=1e-6)


@pytest.mark.parametrize("flags", [{}, {"push": "update", "update_gain": 1.0}, {"compress": "topk:0.5"}], ids=str)
def test_a_barrier_gets_it_too_and_gradients_of_the_script_stay(
    flags: dict[str, Any], hidden: list[list[Array]]
) -> None:
    pytest.importorskip("opacus")
    settings = Settings(sync="bsp", shards=2, dp_clip=CLIP, dp_noise=SIGMA, **flags)
    before, after, optimizer = trained(settings, 1)
    (told,) = (np.concatenate(update) for update in hidden)
    kept = residual_of(optimizer) if "compress" in flags else 0.0
    np.testing.assert_allclose((after - before) / (1.0 if "push" in flags else -RATE), told - kept, atol=1e-5)
    assert optimizer._engine is not None and optimizer._engine.hides
    gradients = np.concatenate(
        [p.grad.numpy().ravel() for p in optimizer._engine.flat.parameters if p.grad is not None]
    )
    assert np.linalg.norm(gradients) > 2 * CLIP and not np.isclose(gradients, told).any()


@pytest.mark.parametrize("mode", WITH_SERVER)
def test_no_push_is_longer_in_any_mode(mode: str, hidden: list[list[Array]]) -> None:
    """Without noise, a run of one worker goes exactly where its clipped updates lead."""
    settings = Settings(dp_clip=CLIP, **WITH_SERVER[mode]).validated()
    before, after, _ = trained(settings, 12)
    pushes = 12 * settings.fragments // settings.local_steps
    assert len(hidden) == pushes
    for update in hidden:
        assert np.linalg.norm(np.concatenate(update)) == pytest.approx(CLIP, rel=1e-5)
    rate = 1.0 if steps_on_worker(settings) else RATE
    assert 0 < np.linalg.norm(after - before) <= rate * CLIP * pushes * 1.001


class Counting(nn.Module):
    """It keeps something of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("seen").add_(x.sum())
        out: torch.Tensor = self.net(x)
        return out


def test_buffers_are_those_of_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    for noise, told in ((SIGMA, False), (-1.0, True)):
        net = Counting()
        _, _, optimizer = trained(Settings(sync="bsp", dp_clip=CLIP, dp_noise=noise), 2, net)
        engine = optimizer._engine
        assert engine is not None and float(net.get_buffer("seen")) != 0
        member = Catching()
        monkeypatch.setattr(engine.link, "call", lambda say, member=member: say(member, 0))
        engine.send_buffers()
        (packed,) = member.sent
        assert (np.frombuffer(packed[-4:], np.float32)[0] != 0) == told


def test_a_residual_that_came_without_noise_is_not_sent() -> None:
    pytest.importorskip("opacus")
    for noise, kept in ((SIGMA, False), (-1.0, True)):
        settings = Settings(sync="ssp", compress="topk:0.25", dp_clip=CLIP, dp_noise=noise, **PLAIN)
        _, _, optimizer = trained(settings, 1)
        state = optimizer.state_dict(residual=True)
        state["narrows"]["residual"] = torch.full_like(state["narrows"]["residual"], 7.0)
        optimizer.load_state_dict(state)
        assert bool((residual_of(optimizer) == 7).all()) == kept


@pytest.mark.parametrize("flags", [{"sync": "ssp"}, {"sync": "local", "local_steps": 4}], ids=str)
def test_who_is_asked_for_the_first_weights_again_gives_no_step_of_its_own(flags: dict[str, Any]) -> None:
    """A server may ask at any time."""
    net = build()
    _, _, optimizer = trained(Settings(dp_clip=CLIP, **flags), 5, net)
    assert optimizer._engine is not None
    sync: Any = optimizer._engine.sync
    with torch.no_grad():
        next(net.parameters()).add_(1.0)  # as a step does that is not pushed yet
    given = np.concatenate(
        [np.frombuffer(piece.payload, np.float32) for piece in sync.arrays.first(0, sync.arrays.flat.size)]
    )
    np.testing.assert_array_equal(given, sync.arrays.base)
    assert np.abs(given - flat(net)).max() > 0.9


class Catching:
    """In the place of a member."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def buffers(self, packed: bytes, clock: int) -> list[Any]:
        self.sent.append(packed)
        return []


def test_what_would_not_hide_is_refused() -> None:
    wrongly: list[tuple[dict[str, Any], str]] = [
        ({"dp_noise": 1.0}, "--dp-noise 1.0: it counts in lengths of --dp-clip"),
        ({"dp_noise": 0.0, "dp_clip": 1.0}, "--dp-noise 0.0: give a value above 0"),
        ({"dp_clip": 0.0}, "--dp-clip 0.0: give a length above 0"),
        ({"dp_clip": math.nan}, "--dp-clip nan: give a length above 0"),
        ({"dp_clip": 1.0, "sync": "gossip"}, "--dp-clip: under --sync gossip a worker sends its model"),
    ]
    for flags, text in wrongly:
        with pytest.raises(UsageError, match=text):
            Settings(**flags).validated()


@pytest.mark.parametrize(("noise", "net", "overlap", "text"), [
    (-1.0, build, True, "overlap=True sends gradients part by part"),
    (1.0, lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), False, "--dp-noise: the running statistics of '1' are of"),
    (1.0, None, False, r"--dp-noise: opacus, .* is not installed: pip install 'narrows\[dp\]'"),
], ids=["overlap", "statistics", "not installed"])  # fmt: skip
def test_a_script_that_would_not_hide_is_refused(
    noise: float, net: Callable[[], nn.Module] | None, overlap: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if net is None:
        monkeypatch.setitem(sys.modules, "opacus", None)
        monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    elif noise > 0:
        pytest.importorskip("opacus")
    model = (net or build)()
    with run(Settings(sync="bsp", dp_clip=1.0, dp_noise=noise)), pytest.raises(UsageError, match=text):
        DistributedOptimizer(torch.optim.SGD(model.parameters()), model, overlap=overlap)


def test_epsilon_is_in_the_record_and_said_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opacus")
    from narrows.worker import session

    recording, told = WorkerRecord("", print), list[dict[str, Any]]()
    noted: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(recording, "note", lambda event, **values: noted.append((event, values)))
    monkeypatch.setattr(session, "_tell", lambda event, **values: told.append({"event": event, **values}))
    monkeypatch.setattr(session, "EPSILON_EVERY", 2)
    with run(Settings(sync="bsp", dp_clip=CLIP, dp_noise=SIGMA)) as started:
        net = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=RATE), net)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
        optimizer.finish()
        started.sessions[0].close(False)
    for each in told:
        recording.take(0, dict(each))
    rows = [values for event, values in noted if event == "privacy"]
    assert [row["pushes"] for row in rows] == [2, 4, 5] and rows[0]["delta"] == DELTA
    assert rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"]
    said = recording.done([0])
    assert said.endswith(f"epsilon {rows[2]['epsilon']:.4g} at delta 1e-05")
    assert noted[-1][1]["epsilon"] == rows[2]["epsilon"]
