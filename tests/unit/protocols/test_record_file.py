"""Records at an address: parts of whole lines, a store that fails, and readers that follow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.s3 import Bucket

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.storage import object_store, record_file
from narrows.protocols.runtime.storage.object_store import FileStore, FileStoreError
from narrows.protocols.runtime.storage.record_file import open_record, part_name, tail_of
from narrows.ps.command.planning.step_time import of_record
from narrows.ps.dashboard.record_reader import RecordReader, events

LIMIT_S = 20.0


def soon(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lines(place: str) -> list[str]:
    return [line.decode() for line in tail_of(place).lines()]


def test_a_record_is_parts_of_whole_lines_and_each_run_has_its_own(bucket: Bucket) -> None:
    address, said = f"{bucket}/run.jsonl", list[str]()
    for run in (1, 2):
        record = open_record(address, said.append)
        assert bucket.names(f"run.jsonl/{run}/") == [part_name(0)], "it is tried before the run begins"
        for number in range(5):
            record.line(f"run {run}, line {number}")
        record.close()
        assert bucket.names(f"run.jsonl/{run}/") == [part_name(0), part_name(1)]
        assert lines(address) == [f"run {run}, line {number}" for number in range(5)]
    assert lines(f"{address}/1") == [f"run 1, line {number}" for number in range(5)]
    assert said == [f"the record of an earlier run is kept as {address}/1"]


def test_a_part_is_put_after_its_time_or_once_it_is_large(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """So kill -9 loses the lines of the last PART_S: a record that is not closed is what such a process leaves."""
    address = f"{bucket}/run.jsonl"
    monkeypatch.setattr(record_file, "PART_S", 3600.0)
    monkeypatch.setattr(record_file, "PART_BYTES", 1000)
    record = open_record(address, print)
    for number in range(10):
        record.line(f"{number:099}")
    soon(lambda: len(lines(address)) == 10)
    record.line("one more")
    record.close()
    parts = bucket.names("run.jsonl/1/")
    assert len(parts) == 3 and bucket.read(f"run.jsonl/1/{parts[-1]}") == b"one more\n", "the last line has waited"
    monkeypatch.setattr(record_file, "PART_S", 0.05)
    other = open_record(f"{bucket}/other.jsonl", print)
    other.line("a line alone")
    soon(lambda: lines(f"{bucket}/other.jsonl") == ["a line alone"])
    other.close()


def test_a_store_that_fails_keeps_lines_waiting_and_then_loses_and_counts_them(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, said = f"{bucket}/run.jsonl", list[str]()
    for name, value in {"PART_S": 0.01, "AGAIN_S": 0.01, "WAITING_MAX": 1000}.items():
        monkeypatch.setattr(record_file, name, value)
    record, put = open_record(address, said.append), FileStore.put_bytes

    def fails(store: FileStore, content: bytes, name: str) -> None:
        raise FileStoreError(f"{address}/1: {name} was not written: it rains")

    with monkeypatch.context() as patch:
        patch.setattr(FileStore, "put_bytes", fails)
        record.line("first")
        soon(lambda: said)
        assert (
            said.pop()
            == f"--record {address}/1: 00000001 was not written: it rains; the run goes on, and lines wait in memory"
        )
        for _ in range(20):
            record.line("x" * 99)
        (lost,) = said
        assert lost.startswith(f"--record {address}: ") and "it rains" in lost and "lines are lost until" in lost
    soon(lambda: len(lines(address)) == 10)
    assert FileStore.put_bytes is put and said[1] == f"--record {address}/1 can be written again"
    record.line("last")
    assert said[2:] == [f"--record {address} can be written again; 11 lines are missing"]
    record.close()
    assert lines(address) == ["first", *["x" * 99] * 9, "last"]


def test_what_the_store_does_not_take_at_the_end_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    record = open_record(f"{bucket}/run.jsonl", said.append)
    for name, value in {"END_S": 5.0, "AGAIN_S": 0.01}.items():
        monkeypatch.setattr(record_file, name, value)
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0, 0.0))

    def fails(store: FileStore, content: bytes, name: str) -> None:
        raise FileStoreError("s3://b: full")

    monkeypatch.setattr(FileStore, "put_bytes", fails)
    record.line("one")
    record.line("two")
    record.close()
    assert said[-1] == f"--record {bucket}/run.jsonl/1: the last 2 lines are missing"


def test_a_store_without_room_or_leave_is_refused_before_the_run(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"^--record s3://no-such-bucket/a: .*bucket"):
        open_record("s3://no-such-bucket/a", print)


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "seconds": number, "local_rank": 0, "clock": number, "step_seconds": 0.5,
            "wait_seconds": 0.1, "push_bytes": 1, "pull_bytes": 1, "staleness": 0, "loss": 1.0}  # fmt: skip


def test_readers_take_an_address_for_a_file(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that follows gets each line once. An object that a user has copied there is a record too."""
    monkeypatch.setattr(record_file, "PART_BYTES", 200)
    monkeypatch.setattr(record_file, "LOOK_S", 0.0)
    address, path = f"{bucket}/run.jsonl", tmp_path / "run.jsonl"
    records = [open_record(place, print) for place in (address, str(path))]
    readers = [RecordReader(place) for place in (address, str(path))]
    for number in range(1, 8):
        for record in records:
            record.line(json.dumps(step(number)))
    soon(lambda: readers[0].read())
    for record in records:
        record.close()
    for reader in readers:
        reader.read()
        assert not reader.read() and reader.number == 7
    assert readers[0].history.frame(9.0) == readers[1].history.frame(9.0)
    bucket.put("copied.jsonl", path.read_bytes() + b'{"incomplete')
    for place in (address, f"{bucket}/copied.jsonl", str(path)):
        assert [*events(place)] == [step(number) for number in range(1, 8)]
        assert of_record(place) == [0.4] * 7
    for place in (f"{bucket}/none.jsonl", str(tmp_path / "none.jsonl")):
        with pytest.raises(UsageError, match=f"{tmp_path.name if 'tmp' in place else bucket}"):
            [*events(place)]
