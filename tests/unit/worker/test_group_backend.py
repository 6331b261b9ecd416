"""Which backend of torch.distributed carries a group's sums. No GPU is needed: torch is asked how many there are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from narrows.worker.group import group


@pytest.mark.parametrize(("gpus", "size", "backend", "told"), [
    (0, 2, "gloo", []),
    (2, 2, "cpu:gloo,cuda:nccl", []),
    (1, 2, "gloo", ["2 processes of the group share 1 GPU: gloo sums through the host"]),
    (2, 5, "gloo", ["5 processes of the group share 2 GPUs: gloo sums through the host"]),
])  # fmt: skip
def test_processes_that_share_a_gpu_sum_by_gloo(
    monkeypatch: pytest.MonkeyPatch, gpus: int, size: int, backend: str, told: list[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(group, "say_here", said.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert group.backend_of(size) == backend and said == told
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert group.backend_of(size) == backend and said == told
