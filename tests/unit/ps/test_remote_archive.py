"""Checkpoints of a shard on another machine, which are in the folder of shard 0: over a line that loses and repeats."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import split
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.retry import Retry
from narrows.protocols.errors import NarrowsError
from narrows.protocols.messages import Buffer
from narrows.protocols.wire import decode, encode
from narrows.ps.checkpoints import checkpoint_files, remote_archive
from narrows.ps.checkpoints.checkpoint_writer import CheckpointWriter
from narrows.ps.checkpoints.remote_archive import ArchiveClient, ArchiveJob, RemoteArchive

SIZE, CLOCK = 3000, 7
PLAN = ModelSpec((TensorSpec("w", (SIZE,), "float32"),), "", ((0,),))
VALUES = np.arange(SIZE, dtype=np.float32)


class Lossy:
    """In the place of `Sockets`: what is asked is answered by an archive, some of it never, some twice, in any order."""

    def __init__(self, there: RemoteArchive, rng: random.Random, answers: list[m.FileAnswer]) -> None:
        self.there, self.rng, self.answers = there, rng, answers  # of all connections: some come late

    def send(self, to: str, frames: Sequence[Buffer]) -> None:
        ask = decode([bytes(frame) for frame in frames])
        assert isinstance(ask, m.FileRequest) and to == "tcp://there:1"
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            self.answers.append(self.there.answer(ask))

    def receive(self, limit_ms: int) -> Iterator[tuple[str, list[Buffer]]]:
        self.rng.shuffle(self.answers)
        while self.answers:
            yield "tcp://there:1", [*encode(self.answers.pop())]

    def close(self) -> None:
        """Answers that are still under way reach nobody."""
        self.answers.clear()


@pytest.fixture
def there(tmp_path: Path) -> RemoteArchive:
    return RemoteArchive(tmp_path / "there")


@pytest.fixture
def away(there: RemoteArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArchiveClient:
    """The `ArchiveClient` of shard 2."""
    monkeypatch.setattr(remote_archive, "ARCHIVE_RETRY", Retry(0))
    monkeypatch.setattr(remote_archive, "PART_BYTES", 1000)
    (tmp_path / "here").mkdir()
    dial: Callable[[], Any] = lambda: Lossy(there, random.Random(1), [])  # noqa: E731
    return ArchiveClient(tmp_path / "here", 2, "tcp://there:1", dial)


def facts(shards: int, clock: int) -> dict[str, Any]:
    return {"publication": clock, "shards": shards, "plan": PLAN.packed(), "steps": 11 * clock}


def write(folder: Path, shards: int, clock: int, which: Sequence[int]) -> None:
    """The files of these shards of so many."""
    for shard in which:
        begin, end = split(SIZE, shards)[shard]
        x = VALUES[begin:end] + clock
        checkpoint_files.write(folder, shard, clock, {"x": x, "p": x}, facts(shards, clock))


@pytest.mark.parametrize("shards", [2, 3, 4])
def test_a_shard_elsewhere_begins_from_the_files_of_any_number_of_shards(
    shards: int, there: RemoteArchive, away: ArchiveClient
) -> None:
    write(there.folder, shards, CLOCK, range(shards))
    begin, end = split(SIZE, 3)[2]
    load, recut, steps = away.load(3, "values", CLOCK)
    assert np.array_equal(load.arrays["x"], VALUES[begin:end] + CLOCK)
    assert (load.publication, recut, steps) == (CLOCK, shards != 3, 11 * CLOCK)
    assert not list(away.folder.iterdir()), "nothing is left here"


@pytest.mark.parametrize(("written", "wanted"), [("tensors", "values"), ("values", "tensors"), ("tensors", "tensors")])
@pytest.mark.parametrize("shards", [2, 3])
def test_it_begins_from_files_that_are_cut_elsewhere(
    shards: int, written: str, wanted: str, there: RemoteArchive, away: ArchiveClient
) -> None:
    sizes = (100, 2000, 500, 400)
    specs = tuple(TensorSpec(f"t{i}", (size,), "float32") for i, size in enumerate(sizes))
    plan = ModelSpec(specs, "", (tuple(range(len(sizes))),))
    assert plan.size == SIZE
    told = facts(shards, CLOCK) | {"plan": plan.packed()} | ({"cut": written} if written != "values" else {})
    for shard, (begin, end) in enumerate(plan.ranges(shards, written)):
        x = VALUES[begin:end]
        checkpoint_files.write(there.folder, shard, CLOCK, {"x": x, "p": x}, told)
    begin, end = plan.ranges(3, wanted)[2]
    load, recut, _ = away.load(3, wanted, CLOCK)
    assert np.array_equal(load.arrays["x"], VALUES[begin:end]) and recut == ((shards, written) != (3, wanted))


def test_two_shards_of_one_machine_may_fetch_the_same_file_at_once(
    there: RemoteArchive, away: ArchiveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each deletes its copy when it has read it: the other may be about to read."""
    write(there.folder, 2, CLOCK, range(2))
    other, fetch = ArchiveClient(away.folder, 1, away.there, away.dial), ArchiveClient._fetch
    loaded: dict[int, Any] = {}

    def fetch_beside(client: ArchiveClient, shard: int, clock: int, path: Path) -> None:
        fetch(client, shard, clock, path)
        if client is away and not loaded:
            loaded[1] = other.load(3, "values", CLOCK)[0].arrays["x"]

    monkeypatch.setattr(ArchiveClient, "_fetch", fetch_beside)
    loaded[2] = away.load(3, "values", CLOCK)[0].arrays["x"]
    for shard, found in loaded.items():
        begin, end = split(SIZE, 3)[shard]
        assert np.array_equal(found, VALUES[begin:end] + CLOCK)
    assert not list(away.folder.iterdir()), "nothing is left here"


def test_what_it_writes_is_with_the_others_and_nowhere_else(there: RemoteArchive, away: ArchiveClient) -> None:
    writer = CheckpointWriter(away.folder, 2, away)
    begin, end = split(SIZE, 3)[2]
    kept: m.Ints = ()
    for clock in range(5):
        write(there.folder, 3, clock, range(2))
        x = VALUES[begin:end] + 100 * clock
        writer.write(clock, {"x": x, "p": x}, facts(3, clock), shared=0)
        writer.wait()
        written = writer.take()
        assert written is not None and not written.trouble and clock in written.kept
        kept = written.kept
        assert kept == away.held() == checkpoint_files.clocks(there.folder, 2)
        assert np.array_equal(checkpoint_files.read(there.folder, 2, clock)[0]["x"], x)
    assert kept == (0, 2, 3, 4), "the newest three, and that which all shards have"
    assert not list(away.folder.iterdir()) and not list(there.folder.glob("*.tmp"))
    assert away.sound(3) == (0, 2, 3, 4) and checkpoint_files.newest(there.folder, 3) == 4


def test_a_disk_that_refuses_there_is_named_here(there: RemoteArchive, away: ArchiveClient) -> None:
    there.folder.write_text("no folder")
    writer = CheckpointWriter(away.folder, 2, away)
    writer.write(CLOCK, {"x": VALUES, "p": VALUES}, facts(3, CLOCK))
    writer.wait()
    written = writer.take()
    assert written is not None and written.kept == () and str(there.folder) in written.trouble
    assert not list(away.folder.iterdir())


def test_a_checkpoint_that_is_not_there_is_an_error_of_one_sentence(away: ArchiveClient) -> None:
    with pytest.raises(NarrowsError, match="is missing"):
        away.load(3, "values", CLOCK)


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_that(
    away: ArchiveClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_archive, "QUIET_S", 0.0)
    monkeypatch.setattr(Lossy, "send", lambda *words: None)
    with pytest.raises(NarrowsError, match="no answer came within 0 s"):
        away.held()


@pytest.mark.parametrize("name", ["", "../../x", "0123456789abcde/", "0123456789abcdef0"])
def test_a_file_that_is_coming_has_no_name_but_its_own(name: str, there: RemoteArchive) -> None:
    answer = there.answer(m.FileRequest(1, ArchiveJob.WRITE, 2, 3, CLOCK, 0, -1, name, b"x"))
    assert "16 hex digits" in answer.text and not list(there.folder.iterdir())


def test_a_file_that_is_not_whole_is_kept_under_no_name(there: RemoteArchive) -> None:
    for offset in (0, 2):
        assert not there.answer(m.FileRequest(1, ArchiveJob.WRITE, 2, 3, CLOCK, offset, -1, "0" * 16, b"x")).text
    assert "is not whole" in there.answer(m.FileRequest(2, ArchiveJob.KEEP, 2, 3, CLOCK, 4, -1, "0" * 16, b"")).text
    assert checkpoint_files.clocks(there.folder, 2) == ()
