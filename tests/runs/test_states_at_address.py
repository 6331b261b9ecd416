"""States of loaders, of optimizers and of gossip workers at an address in an object store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.on_disk import OnDisk
from kit.s3 import Bucket
from kit.scripts import build, loss_of, run

from narrows.protocols.config.settings import Settings
from narrows.protocols.runtime.storage.object_store import FileStore, FileStoreError
from narrows.worker import DistributedOptimizer, resumable, saved_state
from narrows.worker.checkpoint.gossip_checkpoints import KEPT, GossipCheckpoints

pytestmark = pytest.mark.usefixtures("one_thread")


class Stream:
    """A loader without an end, which can go on."""

    def __init__(self) -> None:
        self.place = self.fetched = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            self.fetched += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def streamed(steps: int, place: str) -> tuple[list[int], int]:
    """The rows that this worker trained on in so many steps, and how many it has fetched."""
    model, stream = build(), Stream()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    rows, seen = resumable(stream, place, every=5), list[int]()
    for step in range(steps):
        optimizer.zero_grad()
        seen.append(next(rows))
        loss_of(model, step).backward()
        optimizer.step()
    return seen, stream.fetched


def test_a_loader_goes_on_on_another_machine(bucket: Bucket, capfd: pytest.CaptureFixture[str]) -> None:
    """Each worker has a temporary folder of its own. A run that begins anew keeps the states of the one before."""
    for number in range(2):
        with run(Settings(sync="async", workers=1)) as started:
            assert streamed(17, f"{bucket}/states")[0] == [*range(17)]
            names = bucket.names("states/narrows-loader-0-of-1.step-")
            assert names[-1] == "5.pt" and "15.pt" in names
            assert len([name for name in names if name.endswith(".pt.1")]) == 3 * number
            started.expire(0)
            started.join()
            seen, fetched = streamed(4, f"{bucket}/states")
            assert seen == [*range(17, 21)] and fetched == 17 - 15 + 4
    assert f"are kept, the newest as {bucket}/states/narrows-loader-0-of-1.step-20.pt.1" in capfd.readouterr().err


def test_models_of_gossip_are_offered_by_workers_elsewhere(bucket: Bucket) -> None:
    settings, place = Settings(sync="gossip", checkpoint_every=0.1), f"{bucket}/run"
    plan, rounds = b"plan", range(1, 9)
    for rank in (0, 1):
        files = GossipCheckpoints(settings, place, rank, plan)
        for number in rounds:
            files.write(number, np.full(3, number + rank, np.float32))
            files.end()
        assert not files.failed
    assert len(bucket.names("run/narrows-model-0.")) in (KEPT, KEPT + 1), "old ones are dropped there"
    elsewhere = GossipCheckpoints(settings, place, 0, plan)
    assert {*elsewhere.models()} >= {(rank, number) for rank in (0, 1) for number in rounds[-KEPT:]}
    model = elsewhere.reached(1, rounds[-1])
    assert model is not None and np.array_equal(model, np.full(3, rounds[-1] + 1, np.float32))
    assert GossipCheckpoints(settings, place, 0, b"another model").models() == ()
    elsewhere.made_unix = time.time() + 60
    elsewhere.begin(0)
    assert all(name.endswith(".pt.1") for name in bucket.names("run/")) and elsewhere.models() == ()


def test_a_gossip_worker_without_a_folder_leaves_that_of_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "narrows-model-0.round-8.pt"
    path.write_bytes(b"of another run")
    for folder in ("", "none"):
        files = GossipCheckpoints(Settings(sync="gossip"), folder, 0, b"plan")
        files.made_unix = time.time() + 60
        files.begin(0)
    assert [*tmp_path.iterdir()] == [path]


def test_a_store_that_fails_costs_a_gossip_worker_its_offer_and_nothing_else(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise FileStoreError("s3://b: it rains")

    files = GossipCheckpoints(Settings(sync="gossip"), f"{bucket}/run", 0, b"plan")
    for name in ("objects", "put"):
        monkeypatch.setattr(FileStore, name, fails)
    assert files.models() == ()
    for number in (1, 2):
        files.write(number, np.zeros(3, np.float32))
        files.end()
    said = capfd.readouterr().err
    assert said.count("s3://b: it rains; this worker offers no model") == 1
    assert said.count(f"{bucket}/run: the model of round 1 could not be written (s3://b: it rains)") == 1
    assert "round 2" not in said, "it is said once"


@pytest.mark.parametrize("sync", ["bsp", "ssp"])
def test_a_script_without_narrows_reads_the_state_of_an_optimizer(sync: str, bucket: Bucket, tmp_path: Path) -> None:
    """That of the servers, or of a worker; from the newest checkpoint of all shards."""
    settings = Settings(sync=sync, shards=2, checkpoint_every=0.0)
    cluster = OnDisk(settings, tmp_path)
    model = build()
    with run(settings, cluster):
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), model)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        state = {"clock": 5, "state": {name: {"exp_avg": torch.ones_like(p)} for name, p in model.named_parameters()}}
        optimizer.finish()
        cluster.interrupt()
    if sync == "ssp":
        torch.save(state, tmp_path / "narrows-optimizer-0.pt")
    for path in (path for path in tmp_path.iterdir() if path.is_file()):
        bucket.put(f"run/{path.name}", path.read_bytes())
    other = torch.optim.Adam(model.parameters(), lr=0.01)
    here, there = saved_state(tmp_path, other, model), saved_state(f"{bucket}/run", other, model)
    assert here["narrows"] == there["narrows"] == {"clock": 5} and len(here["state"]) == len(there["state"]) > 0
    for ours, theirs in zip(here["state"].values(), there["state"].values(), strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])
