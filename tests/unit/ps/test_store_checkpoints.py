"""Checkpoints at an address: whole or absent at each step of their writing, and a run that goes on from one elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.s3 import Bucket
from kit.scripts import Array
from safetensors.numpy import load_file, save

from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.errors import IncompatibleError, UsageError
from narrows.protocols.runtime.storage import object_store
from narrows.protocols.runtime.storage.object_store import FileStore
from narrows.protocols.runtime.storage.store_copy import StoreCopy
from narrows.ps.checkpoints import checkpoint_files, store_checkpoints, whole_model
from narrows.ps.checkpoints.checkpoint_files import KEPT, clocks, read, tidy, write
from narrows.ps.checkpoints.checkpoint_writer import CheckpointWriter
from narrows.ps.command.stage_servers import go_back

SHARDS = 2
PLAN = ModelSpec((TensorSpec("a", (6,), "float32"),), "", ((0,),), 0.0, ())
FACTS: dict[str, Any] = {"publication": 3, "shards": SHARDS, "plan": PLAN.packed(), "buffers": b""}


def arrays(shard: int, clock: int) -> dict[str, Array]:
    x = np.arange(3, dtype=np.float32) + 10 * shard + 100 * clock
    return {"x": x, "p": x + 1}


def written(folder: Path, address: str, shard: int, clock: int, shared: int = -1) -> tuple[int, ...]:
    copy = StoreCopy(FileStore(f"{address}"), f"shard-{shard}.")
    return write(folder, shard, clock, arrays(shard, clock), FACTS, shared, copy)


def checkpoint(folder: Path, address: str, clock: int) -> None:
    for shard in range(SHARDS):
        written(folder, address, shard, clock)


def resumed(folder: Path, address: str, said: Callable[[str], object] = str) -> int:
    """Fetch the newest checkpoint as another machine does, compare it with what was written, and return its clock."""
    folder.mkdir()
    store_checkpoints.begin(FileStore(address), folder, True, False, said)
    if not (found := clocks(folder, 0)):
        return -1
    (clock,) = found
    for shard in range(SHARDS):
        there, facts = read(folder, shard, clock)
        assert all(np.array_equal(there[name], array) for name, array in arrays(shard, clock).items())
        assert facts["clock"] == clock
    return clock


class KilledError(BaseException):
    """Stands for kill -9."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Kill this process at its call number `step` of those that change the store or the folder. Yields their names."""
    done = list[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            if len(done) == step:
                raise KilledError(name)
            done.append(name)
            return call(*args, **kwargs)

        return called

    with monkeypatch.context() as patch:
        for name in ("put", "objects", "remove", "abort"):
            patch.setattr(FileStore, name, counted(name, getattr(FileStore, name)))
        for name in ("fsync", "replace"):
            patch.setattr(os, name, counted(name, getattr(os, name)))
        patch.setattr(Path, "unlink", counted("unlink", Path.unlink))
        try:
            yield done
        except KilledError:
            return


def test_a_run_that_is_killed_at_any_step_of_a_checkpoint_goes_on_from_a_whole_one(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four checkpoints, so that the last one drops the first. Two shards write it, one after the other."""
    reached, steps = list[int](), 0
    while True:
        address, here = f"{bucket}/run-{steps}", tmp_path / f"here-{steps}"
        for clock in (10, 20, 30):
            checkpoint(here, address, clock)
        with killed_at(steps, monkeypatch) as done:
            checkpoint(here, address, 40)
        reached.append(resumed(tmp_path / f"there-{steps}", address))
        for shard in range(SHARDS):
            name = "shard-{}.clock-{}.safetensors"
            assert all(name.format(shard, c) in bucket.names(f"run-{steps}/") for c in clocks(here, shard)[-2:])
        if len(done) < steps:
            break
        steps += 1
    assert reached == sorted(reached) and {*reached} == {30, 40}, "from one step on it is the new one"
    put = [index for index, name in enumerate(done) if name == "put"]
    assert len(put) == SHARDS and reached.index(40) == put[-1] + 1, "its commit is the last shard's object"


def test_a_killed_upload_in_parts_is_no_checkpoint_and_its_parts_are_removed(bucket: Bucket, tmp_path: Path) -> None:
    address = f"{bucket}/run"
    checkpoint(tmp_path / "here", address, 10)
    written(tmp_path / "here", address, 0, 20)
    bucket.begin_upload("run/shard-1.clock-20.safetensors", b"x" * 100)
    bucket.begin_upload("run/model.safetensors", b"x" * 100)
    bucket.begin_upload("run/of-the-user.bin", b"x" * 100)
    assert resumed(tmp_path / "there", address) == 10
    assert bucket.uploads() == ["run/of-the-user.bin"]


def test_what_is_later_than_the_checkpoint_that_was_taken_is_dropped(bucket: Bucket, tmp_path: Path) -> None:
    """Else a later file of one shard and one of the run that goes on would count as one checkpoint."""
    address = f"{bucket}/run"
    checkpoint(tmp_path / "here", address, 10)
    written(tmp_path / "here", address, 1, 20)
    assert resumed(tmp_path / "there", address) == 10
    store_checkpoints.drop_after(FileStore(address), 10)
    assert bucket.names("run/") == [f"shard-{shard}.clock-10.safetensors" for shard in range(SHARDS)]


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(bucket: Bucket, tmp_path: Path) -> None:
    address, said = f"{bucket}/run", list[str]()
    for clock in (10, 20):
        checkpoint(tmp_path / "here", address, clock)
    name = "run/shard-1.clock-20.safetensors"
    bucket.put(name, bucket.read(name)[:-5])
    assert resumed(tmp_path / "there", address, said.append) == 10
    (sentence,) = said
    assert sentence.startswith(f"{address}/shard-1.clock-20.safetensors is damaged") and str(tmp_path) not in sentence
    assert store_checkpoints.whole(FileStore(address)) == [10]
    name = "run/shard-0.clock-10.safetensors"
    bucket.put(name, b"no checkpoint")
    with pytest.raises(IncompatibleError, match=f"^{address}/shard-1.clock-20.safetensors is damaged"):
        resumed(tmp_path / "nowhere", address)


def test_a_bounded_number_of_checkpoints_is_kept_here_and_there(bucket: Bucket, tmp_path: Path) -> None:
    """And the newest one that all shards have, for as long as another shard lacks those after it."""
    address, here = f"{bucket}/run", tmp_path / "here"
    for clock in range(10, 70, 10):
        kept = written(here, address, 0, clock, shared=20)
    assert kept == clocks(here, 0) == (20, 40, 50, 60) and len(kept) == KEPT + 1
    assert bucket.names("run/") == [f"shard-0.clock-{clock}.safetensors" for clock in kept]
    bucket.put("run/shard-5.clock-1.safetensors", b"of a shard that is no more")
    bucket.put("run/mine.safetensors", b"of the user")
    tidy(here, 0, 60, SHARDS, 20, StoreCopy(FileStore(address)))
    assert len(bucket.names("run/")) == len(kept) + 1 and "mine.safetensors" in bucket.names("run/")


def test_a_store_that_fails_is_a_full_disk(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, with the address. The writer's files are those of the store; later ones are written."""
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0, 0.0))
    store = FileStore(f"{bucket}/run")
    writer = CheckpointWriter(tmp_path, 0, None, StoreCopy(store))

    def write(clock: int) -> tuple[int, tuple[int, ...], str]:
        writer.write(clock, arrays(0, clock), FACTS)
        writer.wait()
        written = writer.take()
        assert written is not None
        return written.clock, written.kept, written.trouble

    assert write(3) == (3, (3,), "")
    with monkeypatch.context() as patch:

        def put_file(*args: Any, **kwargs: Any) -> None:
            raise OSError("the bucket is over its quota")

        patch.setattr(store.system, "put_file", put_file, raising=False)
        clock, kept, trouble = write(5)
    assert (clock, kept) == (5, (3,))
    assert trouble == f"{bucket}/run: an object was not written: the bucket is over its quota"
    assert [path.name for path in tmp_path.iterdir()] == bucket.names("run/") == ["shard-0.clock-3.safetensors"]
    assert write(7) == (7, (3, 7), "")


def test_all_stages_of_a_pipeline_go_back_to_a_clock_that_all_have(bucket: Bucket, tmp_path: Path) -> None:
    """A damaged or later checkpoint of one stage counts for none."""
    here: Any = SimpleNamespace(host="here")
    layout: Any = SimpleNamespace(served=lambda host: [0, 1], stages=[here, here])
    for stage, checkpoints in enumerate([(10, 20, 30), (10, 20)]):
        for clock in checkpoints:
            checkpoint(tmp_path / f"{stage}", f"{bucket}/run/stage-{stage}", clock)
    name = "run/stage-1/shard-1.clock-20.safetensors"
    bucket.put(name, bucket.read(name)[:-5])
    assert go_back(layout, "here", f"{bucket}/run", "") == 10
    left = {f"stage-{stage}/shard-{shard}.clock-10.safetensors" for stage in range(2) for shard in range(SHARDS)}
    assert {*bucket.names("run/")} == left


# Beginning.


def test_an_address_that_holds_a_run_is_not_begun_in_but_by_the_flags_for_it(bucket: Bucket, tmp_path: Path) -> None:
    address, said = f"{bucket}/run", list[str]()
    store = FileStore(address)
    store_checkpoints.begin(store, tmp_path / "none", False, False, said.append)
    checkpoint(tmp_path / "here", address, 10)
    bucket.put("run/narrows-optimizer-0.pt", b"state")
    bucket.put("run/of-the-user.txt", b"text")
    with pytest.raises(
        UsageError, match=f"^--checkpoint-dir {address} holds the model of a run: go on with it by --resume"
    ):
        store_checkpoints.begin(store, tmp_path / "none", False, False, said.append)
    for number in (1, 2):
        store_checkpoints.begin(store, tmp_path / "none", False, True, said.append)
        assert said.pop() == f"files of an earlier run in {address} are now in {address}/earlier-{number}"
        assert bucket.names("run/of") == ["-the-user.txt"] and resumed(tmp_path / f"there-{number}", address) == -1
        checkpoint(tmp_path / f"here-{number}", address, 20)
    assert len(bucket.names("run/earlier-1/")) == 3 and len(bucket.names("run/earlier-2/")) == 2


def test_the_end_of_a_run_and_a_model_of_the_user_are_told_apart(bucket: Bucket, tmp_path: Path) -> None:
    address, here, said = f"{bucket}/run", tmp_path / "here", list[str]()
    store = FileStore(address)
    checkpoint(here, address, 10)
    bucket.put("run/model.safetensors", theirs := save({"mine": np.zeros(3, np.float32)}))
    store_checkpoints.keep_foreign_model(store, said.append)
    assert bucket.read("run/model.safetensors.1") == theirs and "was not written by narrows" in said[0]
    whole_model.merge(here, 10, {}, end={"steps": 10, "run_id": ""}, copy=StoreCopy(store))
    store_checkpoints.keep_foreign_model(store, said.append)
    (tmp_path / "model").write_bytes(bucket.read("run/model.safetensors"))
    model = load_file(tmp_path / "model")["a"]
    assert np.array_equal(model, np.concatenate([arrays(shard, 10)["x"] for shard in range(SHARDS)])) and len(said) == 1
    assert resumed(tmp_path / "there", address) == 10
    assert whole_model.end_of(tmp_path / "there") == {"steps": 10, "run_id": "", "clock": 10}


def test_the_files_of_a_remote_shard_are_put_there_too(bucket: Bucket, tmp_path: Path) -> None:
    from narrows.protocols import messages as m
    from narrows.ps.checkpoints.remote_archive import ArchiveJob, RemoteArchive

    checkpoint_files.write(tmp_path / "guest", 1, 10, arrays(1, 10), FACTS)
    content = (tmp_path / "guest" / "shard-1.clock-10.safetensors").read_bytes()
    archive = RemoteArchive(tmp_path / "here", StoreCopy(FileStore(f"{bucket}/run")))
    known: dict[str, Any] = {"number": 0, "shard": 1, "clock": 10, "shared": -1, "name": "0" * 16}
    archive.answer(m.FileRequest(what=ArchiveJob.WRITE, shards=0, offset=0, payload=content, **known))
    answer = archive.answer(m.FileRequest(what=ArchiveJob.KEEP, shards=2, offset=len(content), payload=b"", **known))
    assert (*answer.clocks,) == (10,) and not answer.text
    assert bucket.read("run/shard-1.clock-10.safetensors") == content
