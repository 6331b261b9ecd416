"""The shared model as a script sees it: parameters and module buffers alike, shown and hidden again."""

from __future__ import annotations

import math
import threading
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from kit.in_process import Cluster, store_of
from kit.reference import rounded_last
from kit.scripts import Run, alone, batch, flat, loss_of, run, seeded, tree
from kit.specs import MODES, NO_QUORUM
from torch import nn
from torch.utils.data import DataLoader

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker import DistributedOptimizer, rank, sampler, world_size
from narrows.worker.sync.gossip import GossipStep


def build() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(9, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5)))


def buffers(model: nn.Module) -> list[bytes]:
    return [buffer.numpy().tobytes() for buffer in model.buffers()]


def evaluated(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(batch(99)[0]), batch(99)[1]))
    model.train()
    return loss


def script(started: Run, steps: int = 7) -> tuple[nn.Module, DistributedOptimizer]:
    model = build()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, rank(), world_size()).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("mode", ["bsp", "local"])  # where all have one model after each clock
def test_every_worker_evaluates_the_same_model(mode: str) -> None:
    with run(Settings(**MODES[mode], workers=3)) as started:

        def work(worker: int) -> tuple[float, list[bytes], list[bytes]]:
            model, optimizer = script(started, 6)
            own = buffers(model)
            optimizer.eval()
            shown = evaluated(model), buffers(model), own
            optimizer.train()
            assert buffers(model) == own
            optimizer.finish()
            return shown

        (first, those, firsts), *others = started.together(work)
        assert those == firsts  # of the lowest rank
        for loss, same, own in others:
            assert loss == first and same == those and own != those


@pytest.mark.parametrize("mode", NO_QUORUM)
def test_all_end_with_one_model_and_its_buffers(mode: str) -> None:
    with run(Settings(**MODES[mode], workers=3)) as started:

        def work(worker: int) -> tuple[float, list[bytes]]:
            model, optimizer = script(started)
            optimizer.finish()  # parameters and buffers are the model that all end with: nothing is to be asked for
            return evaluated(model), buffers(model)

        first, *others = started.together(work)
        assert all(other == first for other in others)


def ends(started: Run, steps: int, scaler: torch.amp.GradScaler | None = None, more: int = 0) -> list[bool]:
    """Train on what a sampler gives; say after each step whether the module shows the shared model."""
    model = build()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
    data: Any = list(range(40))
    loader: Any = DataLoader(data, 4, sampler=sampler(data, 4, steps=steps))
    shown: list[bool] = []
    for step, _ in enumerate(chain(loader, range(more))):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss * (math.inf if step in (2, 3) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        stores = [store_of(server) for server in started.cluster.servers]
        wanted = np.concatenate([store.p + rounded_last(store.x - store.p) for store in stores])
        shown.append(np.array_equal(flat(model), wanted))
    optimizer.train()
    assert not np.array_equal(flat(model), wanted), "this worker's own is back"
    return shown


SPARSE = Settings(sync="ssp", staleness=2, compress="topk:0.2+int8")


def test_after_the_last_step_of_a_loader_the_module_shows_the_shared_model() -> None:
    with run(SPARSE) as started:
        assert ends(started, 7) == [False] * 6 + [True]
    with run(SPARSE) as started:  # a loop that goes on trains, and each further step may be its last
        assert ends(started, 5, more=2) == [False] * 4 + [True] * 3
    with run(SPARSE) as started:  # the scaler leaves out two steps, and the loader ends two before its steps
        assert ends(started, 8, torch.amp.GradScaler("cpu")) == [False] * 7 + [True]


def test_in_mid_run_who_gossips_shows_its_own_buffers_and_waits_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    shown = threading.Barrier(2, timeout=30.0)
    with run(Settings(**MODES["gossip"], workers=2)) as started:

        def work(worker: int) -> tuple[list[bytes], list[bytes]]:
            model, optimizer = script(started)
            own = buffers(model)
            if worker:
                optimizer.eval()
            seen = buffers(model)
            shown.wait()  # until then, the lowest rank answers nobody
            optimizer.train()
            optimizer.finish()
            return own, seen

        (first, _), (own, seen) = started.together(work)
    assert own == seen != first
    assert "did not come" not in capsys.readouterr().err


def test_who_ends_gossip_last_ends_with_the_buffers_of_who_ended_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1. Worker 1 leaves the hand-over to worker 0. 2. Worker 0 hands over, and leaves. 3. Worker 1 leaves.
    # 4. Worker 2 has seen both leave, hands over as well, and asks for the buffers.
    passed, *ended = (threading.Event() for _ in range(3))
    hand_over = GossipStep._hand_over

    def in_order(sync: GossipStep) -> None:
        worker = rank()
        if worker != 1:
            assert (passed if worker == 0 else ended[1]).wait(30.0)
            sync.engine.waiting.poll()
        hand_over(sync)
        if worker == 1:
            passed.set()
            assert ended[0].wait(30.0)

    monkeypatch.setattr(GossipStep, "_hand_over", in_order)
    with run(Settings(**MODES["gossip"], workers=3)) as started:

        def work(worker: int) -> list[bytes]:
            model, optimizer = script(started)
            optimizer.finish()
            if worker < len(ended):
                ended[worker].set()
            return buffers(model)

        first, *others = started.together(work)
        assert all(other == first for other in others)


def test_a_cluster_shows_the_buffers_of_its_lowest_rank() -> None:
    root = Cluster(Settings(sync="ssp", workers=1))
    with tree(root, Cluster(Settings(sync="bsp", workers=2), root, "cluster0")) as started:

        def work(worker: int) -> list[bytes]:
            model, optimizer = script(started)
            with optimizer.shared():
                shown = buffers(model)
            optimizer.finish()
            return shown

        first, other = started.together(work)
        assert first == other


def test_it_is_shown_and_hidden_as_often_as_one_likes() -> None:
    with run(SPARSE) as started:
        model, optimizer = script(started)
        own = flat(model).tobytes()
        optimizer.train()
        assert flat(model).tobytes() == own
        optimizer.eval()
        shared = flat(model).tobytes()
        optimizer.eval()
        with optimizer.shared():
            assert flat(model).tobytes() == shared != own
        assert flat(model).tobytes() == shared  # it was shown before
        with pytest.raises(UsageError, match=r"call optimizer\.train\(\) first"):
            optimizer.step()
        optimizer.train()
        assert flat(model).tobytes() == own
        optimizer.step()
        optimizer.eval()
        optimizer.finish()
        end = flat(model).tobytes()
        optimizer.train()
        with optimizer.shared():
            assert flat(model).tobytes() == end


def test_alone_it_is_the_own_model() -> None:
    with alone():
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
        before = flat(model).tobytes()
        optimizer.eval()
        optimizer.step()
        optimizer.train()
        assert flat(model).tobytes() == before


def test_weights_that_a_script_changes_where_gradients_are_pushed_are_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with run(Settings(sync="bsp")) as started:
        model, optimizer = script(started)
        with optimizer.shared():
            pass
        optimizer.step()
        assert "was changed" not in capsys.readouterr().err
        before = flat(model)
        model.load_state_dict(build().state_dict())
        optimizer.zero_grad()
        optimizer.step()
        optimizer.step()
        assert (flat(model) == before).all()  # what the server has
        assert capsys.readouterr().err.count("'0.weight' was changed between two steps") == 1


MOMENTUM = {"sync": "local", "local_steps": 2, "outer_momentum": 0.9}
CHANGED: dict[
    str, tuple[dict[str, Any], float, str]
] = {  # by how much the model ends off, where each of two workers adds 1
    "bsp": ({"sync": "bsp"}, 0.0, "that change is lost"),
    "bsp, updates": ({"sync": "bsp", "push": "update"}, 1.0, ""),
    "ssp": ({"sync": "ssp"}, 1.0, ""),
    "async": ({"sync": "async"}, 1.0, ""),
    "gossip": ({"sync": "gossip"}, 1.0, ""),
    "local": ({"sync": "local", "local_steps": 2}, 1.0, ""),
    "local, merged later": (
        {"sync": "local", "local_steps": 2, "merge_delay": 1},
        0.5,
        "with --merge-delay it keeps a part",
    ),
    "local, with momentum": (MOMENTUM, 1.897, "with --outer-momentum the model goes on"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_weights_that_all_workers_change_are_changed_or_it_is_told(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/script.md has the same table."""
    settings, off, told = CHANGED[name]

    def work(worker: int) -> float:
        model = build()
        begun = flat(model).copy()  # before it joins: under async the other worker may have pushed its change by then
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
        for step in range(6):
            if step == 2:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(1.0)
            optimizer.zero_grad()
            loss_of(model, step, rank(), world_size()).backward()
            with optimizer.shared():
                pass
            optimizer.step()
        optimizer.finish()
        return float((flat(model) - begun).mean())

    with run(Settings(**settings, workers=2)) as started:
        assert started.together(work) == pytest.approx([off] * 2, abs=2e-3)
    err = capsys.readouterr().err
    assert err.count("was changed between two steps") == (2 if told else 0) and told in err


def test_weights_that_a_script_changes_are_part_of_its_update() -> None:
    with run(Settings(sync="ssp")) as started:
        model, optimizer = script(started)
        with torch.no_grad():
            model[0].weight.fill_(0.25)  # type: ignore[index]
        optimizer.zero_grad()
        optimizer.step()
        with optimizer.shared():
            assert abs(flat(model)[: 9 * 12] - 0.25).max() < 1e-6
