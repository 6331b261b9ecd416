"""Addresses of object stores, and what is asked of a store: whole objects, limits of time, sentences."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import s3fs
from kit.s3 import Bucket

from narrows.protocols.addresses import is_stored, located
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.storage import object_store
from narrows.protocols.runtime.storage.object_store import FileStore, FileStoreError
from narrows.protocols.runtime.storage.store_copy import NO_COPY, StoreCopy, opened


@pytest.mark.parametrize(("value", "place"), [
    ("", ""), ("none", "none"), ("run", "run"), ("/a/b", "/a/b"), ("C:\\runs", "C:\\runs"), ("s3:/a", "s3:/a"),
    ("file:///a/b", "/a/b"), ("file://localhost/a/b", "/a/b"), ("file:///a%20b/%C3%A4", "/a b/ä"),
    ("s3://bucket", "s3://bucket"), ("s3://bucket/a/b/", "s3://bucket/a/b"), ("gs://bucket/run", "gs://bucket/run"),
])  # fmt: skip
def test_a_place_is_a_path_or_an_address(value: str, place: str) -> None:
    assert located("--record", value) == place
    assert is_stored(place) == place.startswith(("s3://", "gs://"))


@pytest.mark.parametrize(("value", "why"), [
    ("memory://run", "memory:// is no store that is known; give s3://BUCKET/NAME, gs://BUCKET/NAME, file:///FOLDER or a path"),
    ("http://host/run", "http:// is no store"),
    ("s3://", "name a bucket, as in s3://BUCKET/NAME"), ("s3:///run", "name a bucket"),
    ("file://run", "a folder of this machine is file:///FOLDER, with three slashes"),
])  # fmt: skip
def test_what_is_neither_is_refused_in_one_sentence(value: str, why: str) -> None:
    with pytest.raises(UsageError, match=rf"^--record {value}: {why}"):
        located("--record", value)


@pytest.mark.parametrize("missing", ["fsspec", "gcsfs"])
def test_the_package_that_is_missing_is_named_with_the_line_that_installs_it(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=rf": {missing} is missing here: pip install 'narrows\[via\]' gcsfs$"):
        FileStore("gs://bucket/run").check()


def test_objects_are_whole_and_come_back_bit_for_bit(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one request or in parts; the folder below is none of them."""
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)  # the least that S3 takes
    store, path = FileStore(f"{bucket}/run"), tmp_path / "file"
    store.check()
    assert store.objects() == {} and bucket.names() == [] and store.folders() == []
    for name, size in (("small", 7), ("empty", 0), ("parts", 11 << 20)):
        path.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
        store.put(path, name)
        assert bucket.read(f"run/{name}") == path.read_bytes()
        store.get(name, tmp_path / "again", size)
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
    store.below("one").put_bytes(b"0123456789", "part")
    found = store.objects()
    assert {name: each.size for name, each in found.items()} == {"small": 7, "empty": 0, "parts": 11 << 20}
    assert all(abs(each.modified_unix - time.time()) < 60 for each in found.values())
    assert store.folders() == ["one"] and store.below("one").read("part", 3, 5) == b"34"
    store.move("small", "kept/small")
    store.remove(["empty", "parts", "never there"])
    assert bucket.names() == ["run/kept/small", "run/one/part"]


@pytest.mark.parametrize(("address", "variable", "value", "why"), [
    ("s3://no-such-bucket/run", "AWS_REGION", "us-east-1", "bucket"),
    ("{}", "AWS_ENDPOINT_URL", "http://127.0.0.1:1", "Could not connect to the endpoint"),
])  # fmt: skip
def test_a_store_that_takes_nothing_is_named_at_once(
    address: str, variable: str, value: str, why: str, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()  # whose endpoint is that of its first request
    address = address.format(f"{bucket}/run")
    with pytest.raises(UsageError, match=rf"^--checkpoint-dir {address}: .*{why}") as caught:
        FileStore(address).check()
    assert "\n" not in str(caught.value)
    s3fs.S3FileSystem.clear_instance_cache()


class Flaky:
    """A file system that fails so often, and then takes an object. `slow`: it does not answer before this is set."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.asked, self.slow = [*errors], 0, threading.Event()
        self.slow.set()

    def pipe_file(self, path: str, content: bytes) -> None:
        self.asked += 1
        self.slow.wait(30)
        if self.errors:
            raise self.errors.pop(0)


def test_a_request_is_tried_again_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0, 0.0))
    system = Flaky(OSError("reset"), RuntimeError("reset"))
    FileStore("s3://b/run", system=system).put_bytes(b"", "x")
    assert system.asked == 3
    with pytest.raises(FileStoreError, match=r"^s3://b/run: an object was not written: the third$"):
        FileStore("s3://b/run", system=Flaky(OSError("a"), OSError("b"), OSError("the\nthird"))).put_bytes(b"", "x")
    refuses = Flaky(PermissionError("Access Denied"))
    with pytest.raises(FileStoreError, match="an object was not written: Access Denied"):
        FileStore("s3://b/run", system=refuses).put_bytes(b"", "x")
    assert refuses.asked == 1


def test_a_store_that_does_not_answer_is_given_up_and_its_caller_gives_signs_of_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"PAUSES_S": (0.0, 0.0), "ALIVE_S": 0.02, "REQUEST_S": 0.1}.items():
        monkeypatch.setattr(object_store, name, value)
    system, beats = Flaky(), list[int]()
    system.slow.clear()
    store = FileStore("s3://b/run", alive=lambda: beats.append(1), system=system)
    with pytest.raises(FileStoreError, match=r"an object was not written: no answer came within 0 s"):
        store.put_bytes(b"", "x")
    system.slow.set()
    assert system.asked == 3 and len(beats) >= 9


def test_a_folder_and_its_copy(bucket: Bucket, tmp_path: Path) -> None:
    """What is pulled has the time of its object; what is set aside keeps its bytes, under the next free name."""
    folder, copy = tmp_path / "here", StoreCopy(FileStore(f"{bucket}/run"))
    for name in ("a.pt", "a.pt.1", "b.pt", "c"):
        bucket.put(f"run/{name}", name.encode())
    copy.pull(folder, lambda name: name.endswith(".pt"))
    assert sorted(path.name for path in folder.iterdir()) == ["a.pt", "b.pt"] and {*copy.names(folder)} > {"c"}
    assert (folder / "a.pt").stat().st_mtime == copy.store.objects()["a.pt"].modified_unix
    assert copy.set_aside(folder, "a.pt".__eq__, 1.0) == [], "it is newer"
    assert copy.set_aside(folder, "a.pt".__eq__, time.time() + 60) == [f"{bucket}/run/a.pt.2"]
    assert bucket.read("run/a.pt.2") == b"a.pt" and not (folder / "a.pt").exists()
    copy.remove(lambda names: [name for name in names if name.startswith("a")])
    assert bucket.names("run/") == ["b.pt", "c"]


def test_a_folder_of_this_machine_has_no_copy(tmp_path: Path) -> None:
    assert opened(str(tmp_path)) == (tmp_path, NO_COPY) and opened(located("", f"file://{tmp_path}"))[1] is NO_COPY
    (tmp_path / "a").write_text("x")
    assert NO_COPY.set_aside(tmp_path, "a".__eq__, time.time() + 60) == [str(tmp_path / "a.1")]


def test_the_folder_of_an_address_is_removed(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(atexit, "register", made.append)
    folder, copy = opened(f"{bucket}/run")
    assert folder.parent == tmp_path and isinstance(copy, StoreCopy)
    for close in made:
        close()
    assert not folder.exists()


def test_parts_of_a_killed_upload_are_removed(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("run/shard-0.clock-7.safetensors", "run/shard-10.x", "other/shard-0.x"):
        bucket.begin_upload(name, b"part")
    (tmp_path / "file").write_bytes(b"new")
    StoreCopy(FileStore(f"{bucket}/run"), "shard-0.").put(tmp_path / "file", "shard-0.clock-9.safetensors")
    assert sorted(bucket.uploads()) == ["other/shard-0.x", "run/shard-10.x"]
