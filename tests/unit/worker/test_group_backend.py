"""Which backend of torch.distributed carries a group's sums. No GPU is needed: torch's answers are the test's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

from narrows.protocols.errors import UsageError
from narrows.worker import local_rank
from narrows.worker.group import group

NCCL = "cpu:gloo,cuda:nccl"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(group, "say_here", lines.append)
    return lines


@pytest.mark.parametrize(("devices", "nccl", "backend", "told"), [
    ("cpu cpu", True, "gloo", ""),
    ("a b", True, NCCL, ""),
    ("a", True, NCCL, ""),
    ("a a", True, "gloo", "2 processes of the group share 1 GPU"),
    ("a b a b a", True, "gloo", "5 processes of the group share 2 GPUs"),
    ("a cpu b", True, "gloo", "1 of the 3 processes of the group have no GPU"),
    ("a b", False, "gloo", "this build of torch has no NCCL"),
])  # fmt: skip
def test_nccl_carries_sums_where_each_process_has_a_gpu_and_gloo_elsewhere(
    monkeypatch: pytest.MonkeyPatch, said: list[str], devices: str, nccl: bool, backend: str, told: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    for own in "01":  # the first process says it
        monkeypatch.setenv("LOCAL_RANK", own)
        assert group.backend_of(devices.split()) == backend
    assert said == [f"{told}: gloo sums through the host"] * bool(told)


def machine(monkeypatch: pytest.MonkeyPatch, uuids: Sequence[str]) -> None:
    """Let torch see GPUs with these names."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(uuids))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=uuids[number]))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(("device", "seen", "backend"), [
    ("auto", ["ab", "ab"], NCCL),
    ("cuda", ["ab", "ab"], NCCL),
    ("cuda:1", ["ab", "ab"], "gloo"),
    ("auto", ["a", "b"], NCCL),  # as under Slurm's --gpus-per-task: each sees its own as cuda:0
    ("auto", ["a", "a"], "gloo"),
    ("cpu", ["ab", "ab"], "gloo"),
    ("auto", ["", ""], "gloo"),
])  # fmt: skip
def test_each_rank_tells_its_gpu_and_all_make_the_same_process_group(
    monkeypatch: pytest.MonkeyPatch, said: list[str], device: str, seen: list[str], backend: str
) -> None:
    store, made = HashStore(), list[dict[str, Any]]()
    store.set_timeout(timedelta(seconds=5))
    monkeypatch.setenv("NARROWS_DEVICE", device)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **given: made.append({"backend": backend, **given}))
    for own, uuids in enumerate(seen):  # what the other rank tells
        machine(monkeypatch, uuids)
        monkeypatch.setenv("LOCAL_RANK", str(own))
        assert local_rank() == own
        PrefixStore("narrows-0", store).set(f"device {own}", group._own_gpu())
    for own, uuids in enumerate(seen):
        machine(monkeypatch, uuids)
        monkeypatch.setenv("LOCAL_RANK", str(own))
        monkeypatch.setattr(group, "rendezvous", lambda url, timeout, own=own: iter([(store, own, 2)]))
        group._make_group()
    assert [(each["backend"], each["rank"], each["world_size"]) for each in made] == [(backend, 0, 2), (backend, 1, 2)]
    assert all(each["timeout"].total_seconds() == group.START_LIMIT_S and "device_id" not in each for each in made)
    shared = ["2 processes of the group share 1 GPU: gloo sums through the host"]
    assert said == shared * (backend == "gloo" and device != "cpu" and any(seen))


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "a")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("NARROWS_DEVICE", "cuda:1")
    with pytest.raises(
        UsageError, match=r"process 1 of the group has the device cuda:1, and it sees 1 GPU: .* share them"
    ):
        group._own_gpu()
