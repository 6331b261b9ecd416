"""protocols/runtime/cli/output.py."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TextIO

import pytest

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli import output
from narrows.protocols.runtime.storage.record_file import open_record


def test_the_record_of_an_earlier_run_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "run.jsonl", list[str]()
    for run in range(3):
        file = open_record(str(path), said.append)
        file.line(f"run {run}")
        file.close()
    assert [(tmp_path / f"run.jsonl{end}").read_text() for end in (".1", ".2", "")] == ["run 0\n", "run 1\n", "run 2\n"]
    assert said == [f"the record of an earlier run is kept as {path}.{n}" for n in (1, 2)]
    monkeypatch.setattr(output, "KEPT_MAX", 2)
    with pytest.raises(UsageError, match="2 older files of this name are beside it"):
        open_record(str(path), said.append)
    assert path.read_text() == "run 2\n"


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    said = list[str]()
    open_record("/dev/null", said.append).close()
    (tmp_path / "empty").touch()
    open_record(str(tmp_path / "empty"), said.append).close()
    assert not said


@pytest.mark.parametrize("full", ["disk", "pipe"])
def test_a_stream_that_refuses_lines_is_named_once_and_its_command_goes_on(full: str) -> None:
    """/dev/full is a full disk, and a pipe that nobody reads has lost its reader."""
    if full == "disk":
        stream: TextIO = open("/dev/full", "w")  # noqa: SIM115 - closed by Output.close
    else:
        reads, writes = os.pipe()
        os.close(reads)
        stream = os.fdopen(writes, "w")
    said = list[str]()
    out = output.Output("stdout", lambda: stream, said.append)
    for _ in range(3):
        out.line("a line")
    why = "No space left on device" if full == "disk" else "Broken pipe"
    assert said == [f"stdout: {why}; the run goes on, and lines are lost until it can be written again"]
    out.close()
    assert said[1:] == ["stdout: the last 3 lines are missing"]


class Disk(io.StringIO):
    """A file on a disk that is full at times."""

    full = False

    def flush(self) -> None:
        if self.full:
            raise OSError(28, "No space left on device")


def test_a_disk_that_gets_room_goes_on_and_is_said_to() -> None:
    disk, said = Disk(), list[str]()
    out = output.Output("--record FILE", lambda: disk, said.append)
    for disk.full in (False, True, True, False, False):
        out.line("a line")
    assert said[1:] == ["--record FILE can be written again; 2 lines are missing"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_console_of_another_encoding_gets_the_bytes_of_a_script_and_escapes_of_ours(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))
    out = output.stdout(pytest.fail)
    for told in (b"caf\xe9", "caf\xe9 \u2192".encode()):  # of a script, in Latin-1 and in UTF-8
        out.line(output.text_of(told))
    out.line("\u2192")
    ours = "\u2192".encode(encoding, "backslashreplace")
    assert raw.getvalue() == b"caf\xe9\n" + "caf\xe9 \u2192\n".encode() + ours + b"\n"


def test_a_record_on_a_full_disk_ends_nothing() -> None:
    said = list[str]()
    record = open_record("/dev/full", said.append)
    record.line("{}")
    record.close()
    assert [text.partition(";")[0] for text in said] == [
        "--record /dev/full: No space left on device",
        "--record /dev/full: the last 1 lines are missing",
    ]
