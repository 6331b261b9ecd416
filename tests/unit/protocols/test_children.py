"""Child processes, forked and not: what they say, in order, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.processes import GONE_S, alive, environment, until

from narrows.protocols.runtime.processes.children import (
    FORKER,
    ChildProcesses,
    Event,
    StartedChild,
    signal_name,
)

ENV = environment()
Start = Callable[..., tuple[ChildProcesses, StartedChild]]


@pytest.fixture(scope="module", params=["fresh", "forked"])
def children(request: pytest.FixtureRequest) -> Iterator[ChildProcesses]:
    made = ChildProcesses()
    if request.param == "forked":
        made.prepare(ENV, [])
        assert made.next(GONE_S) == (FORKER, "ready", {"why": ""})
    yield made
    assert made.forks == (request.param == "forked")
    made.close()


@pytest.fixture
def start(children: ChildProcesses, tmp_path: Path) -> Start:
    def started(script: str, **more: Any) -> tuple[ChildProcesses, StartedChild]:
        path = tmp_path / "script.py"
        path.write_text(script)
        listens = {1: "out", 2: "err", "TOLD": "event"}
        return children, children.start(7, [str(path)], ENV, **{"listens": listens} | more)

    return started


def everything(children: ChildProcesses) -> list[Event]:
    """The events of one child, to its end."""
    events: list[Event] = []
    while not events or events[-1][1] != "exit":
        event = children.next(GONE_S)
        assert event is not None, events
        events.append(event)
    return events


def test_what_a_child_says_comes_as_events_and_its_end_is_the_last(start: Start) -> None:
    children, child = start(
        "import os, sys\n"
        "print('said')\nprint('warned', file=sys.stderr)\n"
        "told = os.fdopen(int(os.environ['TOLD']), 'w')\n"
        'told.write(\'{"event": "one"}\\nno json\\n{"cut":\')\n'
        "told.close()\n"
        "sys.exit(3)"
    )
    *events, last = everything(children)
    assert last == (7, "exit", 3) and child.code == 3 and child.wait() == 3
    assert {(kind, str(value)) for _, kind, value in events} == {
        ("out", "said"), ("err", "warned"), ("one", "{'event': 'one'}"), ("err", "no json"),
    }  # fmt: skip


def test_a_child_has_its_stdin_and_what_it_is_passed(start: Start) -> None:
    ours, theirs = os.pipe()
    script = (
        "import os, sys\nos.write(int(os.environ['FD']), sys.stdin.readline().encode() + sys.stdin.read().encode())"
    )
    children, child = start(script, stdin=True, passed={"FD": theirs})
    child.write("a line")
    child.close_stdin()
    child.close_stdin()
    assert everything(children) == [(7, "exit", 0)] and os.read(ours, 99) == b"a line\n"
    child.write("to nobody")
    for fd in (ours, theirs):
        os.close(fd)


def test_a_child_that_is_gone_is_written_to_in_vain(start: Start) -> None:
    children, child = start("pass", stdin=True)
    everything(children)
    child.write("too late")
    child.signal(signal.SIGTERM)
    child.kill()
    child.close_stdin()


def test_a_child_leads_a_group_that_is_ended_with_it(start: Start) -> None:
    children, child = start(
        "import subprocess, time\nprint(subprocess.Popen(['sleep', '600'], stdout=2).pid, flush=True)\ntime.sleep(600)"
    )
    event = children.next(GONE_S)
    assert event is not None and os.getpgid(child.pid) == child.pid == os.getsid(child.pid)
    grandchild = int(event[2])
    assert alive(grandchild)
    child.kill()
    assert everything(children)[-1] == (7, "exit", -signal.SIGKILL)
    until(lambda: not alive(grandchild), "what it started to be gone", GONE_S)


def test_who_keeps_the_pipes_of_a_child_holds_up_its_end_for_a_while_only(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrows.protocols.runtime.processes.children.PIPES_END_S", 0.5)
    began = time.monotonic()
    children, child = start("import subprocess\nsubprocess.Popen(['sleep', '600'])")
    try:
        assert everything(children) == [(7, "exit", 0)]
        assert 0.5 <= time.monotonic() - began < 0.5 + GONE_S
    finally:
        child.kill()


def writers(pipe: str) -> set[int]:
    """The processes that can write to a pipe, by the text of its links in /proc/PID/fd."""
    found = set[int]()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link) == pipe:
                flags = (link.parents[1] / "fdinfo" / link.name).read_text().split("flags:")[1].split()[0]
                found |= {int(link.parts[2])} if int(flags, 8) & os.O_WRONLY else set()
    return found


def test_no_child_has_the_pipes_of_a_sibling(children: ChildProcesses, tmp_path: Path) -> None:
    """Else the end of a killed shard would be known only PIPES_END_S later, and its successor would start late."""
    (tmp_path / "script.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    both = [children.start(index, [str(tmp_path / "script.py")], ENV, listens={1: "event"}) for index in range(2)]
    try:
        for _ in both:
            event = children.next(GONE_S)
            assert event is not None and event[2] == "begun"
        assert [writers(os.readlink(f"/proc/{child.pid}/fd/1")) for child in both] == [{child.pid} for child in both]
    finally:
        for child in both:
            child.kill()
            assert everything(children)[-1][1:] == ("exit", -signal.SIGKILL)


def test_a_child_forked_too_late_has_nothing_of_the_one_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrows.protocols.runtime.processes.children.FORK_S", 0.1)
    (tmp_path / "script.py").write_text("import sys\nif line := sys.stdin.readline():\n    print(line)")
    children = ChildProcesses()
    children.prepare(ENV, [])
    assert children.next(GONE_S) == (FORKER, "ready", {"why": ""})
    forker = children.forker
    assert forker is not None
    os.kill(forker.pid, signal.SIGSTOP)  # the request waits in its socket, with the descriptors of the first try
    try:
        child = children.start(7, [str(tmp_path / "script.py")], ENV, listens={1: "out"}, stdin=True)
        assert children.next(GONE_S) == (FORKER, "ready", {"why": "no answer came within 0 s"})
        child.write("for one reader")
        assert everything(children) == [(7, "out", "for one reader"), (7, "out", ""), (7, "exit", 0)]
        with pytest.raises(BrokenPipeError):
            os.write(child.stdin, b"for nobody\n")
    finally:
        os.kill(forker.pid, signal.SIGCONT)
    late = children.answers.get(timeout=GONE_S)
    assert isinstance(late, StartedChild)
    assert late.wait(GONE_S) in {0, -signal.SIGKILL}, "it is killed, or has read the end of its stdin before"
    children.close()


def test_nothing_comes_where_nothing_is_said() -> None:
    children = ChildProcesses()
    assert children.next(0.01) is None and children.next(-1.0) is None
    assert StartedChild(os.getpid()).wait(0.01) is None
    children.close()


@pytest.mark.parametrize(("number", "name"), [(9, "signal 9 (SIGKILL)"), (99, "signal 99")])
def test_signals_have_names(number: int, name: str) -> None:
    assert signal_name(number) == name


# A command among the children, with a child of its own. argv: the hash seed that its child is to have, or "".
COMMAND = """
import json, sys
from narrows.protocols.runtime.processes.children import ChildProcesses

children = ChildProcesses()
env = {"PYTHONHASHSEED": sys.argv[1]} if sys.argv[1] else {}
children.prepare(env, [("", "colorsys")])
said = [children.next(10.0)]
children.need([("", "tabnanny")])
said.append(children.next(10.0))
child = children.start(0, [sys.argv[2]], env, listens={1: "out"})
print(json.dumps([said, children.next(10.0), children.next(10.0), children.hash_seed]))
children.close()
"""
CHILD = "import sys\nprint(len({'colorsys', 'tabnanny', 'fractions'} & {*sys.modules}), hash('narrows'))"


@pytest.mark.parametrize("told", ["", "5"])
def test_a_command_among_them_has_a_nursery_that_knows_what_ours_has_imported(told: str, tmp_path: Path) -> None:
    """If its children are to have another hash seed, it has an interpreter of its own."""
    for name, text in (("command.py", COMMAND), ("child.py", CHILD)):
        (tmp_path / name).write_text(text)
    children = ChildProcesses()
    children.prepare(ENV, [("", "fractions")])
    assert children.next(GONE_S) == (FORKER, "ready", {"why": ""})
    hashes = []
    for _ in range(2):
        words = [str(tmp_path / "command.py"), told, str(tmp_path / "child.py")]
        children.start(1, words, ENV, listens={1: "out", 2: "err"}, nests=True)
        (_, kind, line), last = everything(children)
        assert kind == "out" and last == (1, "exit", 0), line
        said, (_, _, found), end, seed = json.loads(line)
        assert said == [[FORKER, "ready", {"why": ""}]] * 2 and end == [0, "exit", 0]
        count, value = map(int, found.split())
        assert count == (2 if told else 3) and seed == children.hash_seed
        hashes.append(value)
    assert len({*hashes}) == 1  # every life of it has that seed
    children.close()
