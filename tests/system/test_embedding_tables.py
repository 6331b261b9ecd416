"""An embedding table on real servers: shards that are killed, a run that is resumed over another number of them, its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.embedding_model import OPTIMIZERS, Bags, alone, loss_of
from kit.processes import Server, serving
from safetensors.torch import load_file

from narrows.worker.model import embedding
from narrows.worker.model.optimizers import as_one
from narrows.worker.session import RunSession


def train(server: Server, steps: int, kills: tuple[int, ...] = ()) -> None:
    """One worker up to this step; a shard is killed before each of the last steps."""
    session, model = RunSession(server.address), Bags()
    engine = session.attach(model, as_one(OPTIMIZERS["Adagrad"](model), model), 0.0, 0)
    while (step := engine.sync.clock) < steps:
        if steps - step <= len(kills):
            server.kill_shard(kills[steps - step - 1])
        model.zero_grad()
        torch.autograd.backward(loss_of(model, step))
        engine.step()
    session.close(failed=False)
    assert server.command.wait() == 0, server.command
    assert server.command.out.count("goes on where it was") == len(kills), server.command


def test_rows_outlive_killed_shards_and_another_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the whole table of one process, also where the last shards are not those that began."""
    monkeypatch.setattr(embedding, "of_run", lambda: True)
    flags = ("--sync", "bsp", "--push", "update", "--checkpoint-dir", str(tmp_path))
    with serving(*flags, "--shards", "2") as server:
        train(server, 8, kills=(1, 0))
    check(tmp_path, 8)
    with serving(*flags, "--shards", "1", "--resume", "--steps", "14") as server:
        train(server, 14)
    check(tmp_path, 14)


def check(folder: Path, steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding, "of_run", lambda: False)
        wanted = alone("Adagrad", steps, scheduled=False)
        found, model = load_file(folder / "model.safetensors"), Bags()
        model.load_state_dict(found)
    for name, values in wanted.state_dict().items():
        assert torch.allclose(found[name], values, atol=2e-6), name
