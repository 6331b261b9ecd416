"""Frozen parameters do not travel: all workers have the same, and the file of the whole model has the trained ones alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.processes import serving
from safetensors.torch import load_file
from torch import nn

from narrows.protocols.errors import IncompatibleError
from narrows.worker.session import RunSession


def adapted(seed: int = 0) -> nn.Sequential:
    """A frozen base of this seed, and an adapter that begins alike."""
    torch.manual_seed(seed)
    base = nn.Linear(3, 4).requires_grad_(False)
    torch.manual_seed(1)
    return nn.Sequential(base, nn.Linear(4, 2))


def test_the_same_base_gives_the_same_model_and_another_one_is_refused(tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    with serving("--sync", "ssp", "--workers", "1", "--checkpoint-dir", str(tmp_path)) as server:
        session, model = RunSession(server.address), adapted()
        engine = session.attach(model, torch.optim.SGD(model[1].parameters(), lr=0.1), 0.0, 0)
        stranger, other = RunSession(server.address), adapted(seed=7)
        with pytest.raises(
            IncompatibleError, match=r"frozen parameter '0\.weight' is not the run's.*load the same weights"
        ):
            stranger.attach(other, torch.optim.SGD(other[1].parameters(), lr=0.1), 0.0, 0)
        stranger.link.close()
        for _ in range(3):
            model.zero_grad()
            torch.autograd.backward(model(x).square().mean())
            engine.step()
        session.close(failed=False)
        assert server.command.wait() == 0, server.command
    file, fresh = load_file(tmp_path / "model.safetensors"), adapted()
    assert file.keys() == {"1.weight", "1.bias"}
    assert not torch.equal(fresh(x), model(x))
    assert fresh.load_state_dict(file, strict=False).missing_keys == ["0.weight", "0.bias"]
    assert torch.equal(fresh(x), model(x))
