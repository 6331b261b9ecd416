"""The list of the runs of a machine, and of addresses: who is in it, and that forged and left files harm nobody."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import stat
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kit.record_events import RUN, beats, history_of

from narrows.protocols.errors import UsageError
from narrows.ps.command.cli import command as ps_serve
from narrows.ps.command.top import command as ps_top
from narrows.ps.dashboard.run_registry import BYTES_MAX, TEXT_MAX, RunEntry, RunFacts, runs
from narrows.ps.dashboard.run_table import row_of, table
from narrows.ps.dashboard.run_watch import RunWatch

OSLO = RunFacts("oslo", "tcp://127.0.0.1:5555", "ssp", "--sync ssp", 1, 2, 7, 1000.0, 42, "http://127.0.0.1:5550/")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWS_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def entry() -> Iterator[RunEntry]:
    entry = RunEntry(OSLO)
    yield entry
    entry.close()


def test_a_run_is_listed_while_it_has_its_entry_and_no_longer(folder: Path) -> None:
    assert runs() == []
    entry, other = RunEntry(OSLO), RunEntry(replace(OSLO, name="", began=900.0))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and stat.S_IMODE(entry.path.stat().st_mode) == 0o600
    assert runs() == [other.facts, OSLO], "the oldest first"
    entry.close()
    assert runs() == [other.facts]
    other.close()
    assert runs() == [] and not [*folder.iterdir()]


def test_news_are_written_in_place_once_they_are_due(entry: RunEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    entry.note(clock=8)
    assert runs()[0].clock == 7
    entry.due_s = 0.0
    entry.note(clock=123456, workers=2)
    (found,) = runs()
    assert (found.clock, found.workers) == (123456, 2)
    entry.due_s = 0.0
    entry.note(clock=1, summary="ü" * 9999)  # in six bytes each
    (found,) = runs()
    assert (found.clock, found.summary) == (1, "ü" * TEXT_MAX)


def test_a_longest_entry_can_be_read() -> None:
    wide = "\U0001f600" * TEXT_MAX  # twelve bytes each
    entry = RunEntry(replace(OSLO, address=wide, mode=wide, summary=wide, page=wide, parent=wide, copies=wide))
    assert entry.path.stat().st_size <= BYTES_MAX and runs() == [entry.facts]
    entry.close()


LEFT = """
import os, signal, sys
from narrows.ps.dashboard.run_registry import RunEntry, RunFacts
entry = RunEntry(RunFacts("left"))
print("here", flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_server_left_is_not_listed_and_is_removed(folder: Path, entry: RunEntry) -> None:
    process = subprocess.Popen([sys.executable, "-c", LEFT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process:
        process.stdout.readline()
        assert {each.name for each in runs()} == {"left", "oslo"}
        process.stdin.close()
        process.wait()
        assert len([*folder.iterdir()]) == 2
    assert runs() == [OSLO] and [*folder.iterdir()] == [entry.path]


def test_readers_take_no_run_for_dead_whatever_the_moment(entry: RunEntry) -> None:
    """Two threads read the entry while its server writes it."""
    over, seen = threading.Event(), list[list[RunFacts]]()

    def read() -> None:
        while not over.is_set():
            seen.append(runs())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for each in readers:
        each.start()
    clock, deadline = 0, time.monotonic() + 20
    while clock < 300 or (len(seen) <= 10 and time.monotonic() < deadline):
        entry.due_s = 0.0
        entry.note(clock=clock, summary="x" * (clock % 200))
        clock += 1
    over.set()
    for each in readers:
        each.join()
    assert len(seen) > 10 and all([facts.name for facts in found] == ["oslo"] for found in seen)


def forged(values: object) -> bytes:
    data = json.dumps(values).encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


@pytest.mark.parametrize("data", [
    b"", b"\x00" * 100, b"00000000 {}", b"x" * (BYTES_MAX + 1),
    forged([]), forged({"new": 1}), forged({"name": "a\x1b[2J"}), forged({"name": "x" * 65}), forged({"clock": "7"}),
    forged({"clock": True}), forged({"page": "x" * 300}), forged({"began": float("inf")}), forged({"address": None}),
    b"%08x %s" % (zlib.crc32(b"[" * 9999), b"[" * 9999),
])  # fmt: skip
def test_a_locked_file_that_is_no_entry_is_passed_over(data: bytes, folder: Path, entry: RunEntry) -> None:
    path = folder / f"{'0' * 32}.run"
    path.write_bytes(data)
    file = os.open(path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        assert runs() == [OSLO] and path.exists()
    finally:
        os.close(file)


def test_links_pipes_and_other_names_are_left_alone(folder: Path, entry: RunEntry, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    (folder / f"{'1' * 32}.run").symlink_to(tmp_path / "mine")
    os.mkfifo(folder / f"{'2' * 32}.run")
    (folder / f"{'3' * 32}.run").mkdir()
    (folder / "notes.txt").write_text("kept")
    before = sorted(folder.iterdir())
    assert runs() == [OSLO] and sorted(folder.iterdir()) == before and (tmp_path / "mine").read_text() == "kept"


@pytest.mark.parametrize("fault", ["others write", "a link", "a file", "another user"])
def test_a_folder_that_is_not_the_users_alone_is_not_used(
    fault: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "a link":
        (tmp_path / "there").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "there")
    elif fault == "a file":
        folder.touch()
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o777 if fault == "others write" else 0o700)
    if fault == "another user":
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UsageError, match=r"another( folder)? by NARROWS_RUNS"):
        runs()
    watch = RunWatch()
    assert "another" in watch.enter(OSLO) and watch.entry is None, "the run goes on, and a sentence says why"
    watch.note("member", {"live": 1})
    watch.reach(5)
    watch.close()


def test_a_run_is_listed_by_its_events() -> None:
    watch = RunWatch()
    assert watch.enter(replace(OSLO, copies="tcp://h:1")) == "" and watch.entry is not None
    for name, values in (("member", {"live": 2}), ("took over", {}),
                         ("replan", {"mode": "async", "compress": "int8", "summary": "--sync async", "plan": 2})):  # fmt: skip
        watch.note(name, values)
    watch.reach(9)
    assert (runs()[0].workers, runs()[0].clock) == (1, 7), "nothing is due"
    watch.entry.due_s = 0.0
    watch.reach(-1)  # of another shard, or under gossip
    (found,) = runs()
    assert (found.workers, found.copies, found.mode, found.clock, found.pid) == (2, "", "async", 9, os.getpid())
    watch.close()
    assert runs() == []


def test_ps_serve_runs_prints_a_table_or_lines_of_json(entry: RunEntry) -> None:
    entry.note(began=time.time() - 3725)
    entry.due_s = 0.0
    entry.note(workers=1)
    said = CliRunner().invoke(ps_serve, ["runs"]).output
    head, row = said.splitlines()
    assert head.split() == ["name", "address", "mode", "workers", "clock", "running", "page"]
    assert row.split() == [
        "oslo",
        "tcp://127.0.0.1:5555",
        "ssp",
        "1",
        "of",
        "2",
        "7",
        "1:02:05",
        "http://127.0.0.1:5550/",
    ]
    (line,) = CliRunner().invoke(ps_serve, ["runs", "--json"]).output.splitlines()
    told = json.loads(line)
    assert told["name"] == "oslo" and told["workers"] == 1 and told["seconds"] == pytest.approx(3725, abs=30)
    entry.note(page="\x1b[2J")
    entry.due_s = 0.0
    entry.note(clock=8)
    assert "\x1b" not in CliRunner().invoke(ps_serve, ["runs"]).output
    assert table([]) == ["no run of this user on this machine"]


def test_a_row_has_what_the_frame_of_a_page_shows() -> None:
    frame = history_of(*beats(100, 0, 10), *beats(100, 1, 10)).frame()
    frame["run"] = frame["run"] | {"name": "jena", "address": "tcp://h:1", "began": 5.0}
    row = row_of(RunFacts(page="h:5550"), json.loads(json.dumps(frame)))
    assert (row.facts.name, row.facts.address, row.facts.mode) == ("jena", "tcp://h:1", RUN["mode"])
    assert (row.facts.workers, row.facts.clock, row.facts.page) == (2, 1000, "h:5550")
    assert row.loss == pytest.approx(1 / 1001) and row.rate.endswith("samples/s") and row.state == ""


@pytest.mark.parametrize("value", [None, [], {}, "x" * 9999, 1e400, -1e400, float("nan"), True, 10**4000])
def test_no_figure_of_a_frame_that_is_none_ends_the_list(value: Any) -> None:
    names = ("clock", "live", "loss", "samples_rate", "steps_rate", "waits", "over")
    run = dict.fromkeys(("name", "address", "mode", "summary", "workers", "began"), value)
    for frame in ({"members": [], "run": value}, {"members": [], "run": run, **dict.fromkeys(names, value)}):
        assert all(len(text) <= 9999 for text in row_of(OSLO, frame).facts.told(0.0).values() if isinstance(text, str))
        assert len(table([row_of(OSLO, frame).facts])) == 2


# ps-top, and the page.


def watched(name: str, **facts: Any) -> RunWatch:
    """A run with a page at a free port of loopback."""
    watch = RunWatch()
    watch.open_sites("0", "", False)
    watch.note("run", RUN | {"seconds": 0.0, "name": name, "workers": 2})
    for event in beats(7, 0, 10):
        watch.note("summary", event)
    assert watch.enter(replace(OSLO, name=name, **facts)) == ""
    return watch


@pytest.fixture
def two() -> Iterator[list[RunWatch]]:
    found = [watched("oslo"), watched("jena")]
    yield found
    with ThreadPoolExecutor() as pool:  # each waits for its server's next look at its sockets
        list(pool.map(RunWatch.close, found))


def asked(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def shown(*words: str) -> str:
    done = CliRunner().invoke(ps_top, words)
    assert done.exit_code == 0, done.exception or done.output
    return done.output


def test_ps_top_lists_the_runs_of_the_machine_and_those_of_addresses(two: list[RunWatch]) -> None:
    here = shown()
    pages = [each.sites[0].url for each in two]
    for page, name in zip(pages, ("oslo", "jena"), strict=True):
        (line,) = [line for line in here.splitlines() if page in line]
        assert line.split()[0] == name and "samples/s" in line
        assert "1 of 2" in line and " 50 " in line, "of its frame"
    listed = shown(pages[1], "127.0.0.1:9")
    assert (
        "jena" in listed and "oslo" not in listed and "no page of a run is at 127.0.0.1:9" in " ".join(listed.split())
    )
    assert "oslo" in shown("oslo", "jena") and "jena" in shown("oslo", "jena")


def test_a_word_that_is_no_address_is_said_before_a_page_is_served() -> None:
    error = CliRunner().invoke(ps_top, ["host:page", "127.0.0.1:9", "--dashboard", "0"]).exception
    assert isinstance(error, UsageError) and str(error) == "host:page: give HOST:PORT of the page"


def test_ps_top_shows_one_run_as_before(two: list[RunWatch]) -> None:
    for words in (
        ("jena",),
        (two[1].sites[0].url,),
        ("--once", two[1].sites[0].url.removeprefix("http://").rstrip("/")),
    ):
        assert shown(*words).startswith("jena: ") and "clock 50" in shown(*words), words
    two[0].close()
    assert shown().startswith("jena: "), "the only one of this machine"


def test_ps_top_lists_a_run_without_a_page_too(entry: RunEntry) -> None:
    entry.facts = replace(OSLO, page="")
    entry._write()
    assert "no page: ps-serve --dashboard serves one" in " ".join(shown().split())
    error = CliRunner().invoke(ps_top, ["oslo"]).exception
    assert (
        isinstance(error, UsageError)
        and str(error) == "oslo: that run has no page; start its ps-serve with --dashboard"
    )


def test_a_page_lists_the_runs_of_its_machine_on_loopback_alone(two: list[RunWatch]) -> None:
    found = asked(two[0].sites[0].url + "runs.json")
    assert [each["name"] for each in found["runs"]] == ["oslo", "jena"] and found["pid"] == os.getpid()
    assert found["runs"][1]["page"] == two[1].sites[0].url
    watch = RunWatch()
    watch.open_sites("0.0.0.0:0", "", True)
    port = watch.sites[0].server_address[1]
    with pytest.raises(urllib.error.HTTPError, match="404") as refused:
        asked(f"http://127.0.0.1:{port}/runs.json")
    refused.value.close()
    watch.close()


def test_ps_top_serves_a_page_of_several_addresses(two: list[RunWatch]) -> None:
    pages = [each.sites[0].url for each in two]
    words = [sys.executable, "-m", "narrows.ps.command.top", *pages, "--dashboard", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().partition("glance: ")[2].partition(";")[0]
            listed = asked(url + "runs.json")
            found = listed["runs"]
            assert all([*each["cells"]] == listed["columns"] for each in found)
            assert [each["cells"]["clock"] for each in found] == ["50", "50"]
            assert [(each["name"], each["page"], each["clock"]) for each in found] == [
                (name, page, 50) for name, page in zip(("oslo", "jena"), pages, strict=True)
            ]
            assert asked(url + "frame.json")["run"] == {"lists": True}
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_digit_opens_a_run_of_the_list_on_a_terminal(two: list[RunWatch]) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "narrows.ps.command.top"]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                               env=os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"})  # fmt: skip
    os.close(theirs)
    said, deadline, pressed = b"", time.monotonic() + 60, False
    try:
        while b"jena: " not in said and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.1)[0]:
                said += os.read(ours, 1 << 16)
            if b"a digit opens" in said and not pressed:
                os.write(ours, b"x92")  # two that open nothing
                pressed = True
        assert b"jena: " in said and b"oslo: " not in said, said
    finally:
        process.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 10)[0]:
            try:
                os.read(ours, 1 << 16)
            except OSError:
                break
        process.wait(30)
        os.close(ours)
