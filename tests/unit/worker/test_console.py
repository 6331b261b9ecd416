"""The output of ps-worker: worker/command/console.py and worker/command/record.py, and the lines of a worker that waits."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kit.scripts import alone, build, loss_of, run

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.protocols.runtime.cli.output import CommandConsole, stdout
from narrows.worker import DistributedOptimizer, record, session
from narrows.worker.command import console
from narrows.worker.command.record import WorkerRecord
from narrows.worker.group import event_wait
from narrows.worker.runtime.launcher_pipe import FIGURES
from narrows.worker.runtime.member_link import MemberLink


def test_progress_goes_by_the_workers_that_are_there() -> None:
    recording = WorkerRecord("", print)
    recording.settings = {
        "sync": "ssp",
        "compress": "dense",
        "workers": 2,
        "shards": 1,
        "local_steps": 1,
        "local_seconds": -1.0,
        "fragments": 1,
    }
    for worker in (0, 1):
        recording.take(worker, {"event": "model", "parameters": 10, "clock": 0})
        recording.take(worker, {"event": "step", "clock": 3 + 4 * worker, "push_bytes": 1, "pull_bytes": 1})
    assert "clock 3" in recording.progress()
    recording.ended(0, 1)
    assert "clock 7" in recording.progress()
    recording.ended(1, 0)
    assert "clock 3" in recording.progress(), "of a run that is over, that of its slowest"
    recording.take(0, {"event": "model", "parameters": 10, "clock": 8})  # started again
    assert "clock 8" in recording.progress()


def test_the_last_line_counts_skipped_steps_by_rank() -> None:
    recording = WorkerRecord("", print)
    for local_rank, rank in ((0, 4), (1, 5), (1, 5)):
        recording.take(local_rank, {"event": "skipped", "rank": rank, "clock": 3, "tensor": "'0.bias'"})
    said = recording.done([0, 0])
    assert said.endswith("; 3 steps skipped, for a gradient that was not finite: 1 by rank 4, 2 by rank 5")
    assert "skipped" not in WorkerRecord("", print).done([0])


def test_the_last_line_says_what_start_and_end_cost() -> None:
    recording = WorkerRecord("", print)
    recording.settings = {
        "sync": "ssp",
        "compress": "topk:0.01",
        "workers": 2,
        "shards": 1,
        "local_steps": 1,
        "local_seconds": -1.0,
        "fragments": 1,
    }
    for worker, (up, down) in enumerate(((8_100_000, 8_200_000), (4_100_000, 8_200_000))):
        recording.take(worker, {"event": "model", "parameters": 1_000_000, "clock": 0})
        recording.take(worker, {"event": "step", "clock": 1, "push_bytes": 100_000, "pull_bytes": 200_000})
        edges = [up - 100_000, down - 200_000]
        recording.take(worker, {"event": "bytes", "up": up, "down": down, "edges": edges, "dropped": {}, "ways": []})
    line = recording.done([0, 0])
    assert line.endswith("up 12.20 MB, down 16.40 MB, of which start and end 12.00 and 16.00 (3.0 and 4.0 models)")


def test_the_last_line_says_what_teachers_were_asked_and_gave() -> None:
    """Of two workers, one of which was killed and started again: its first start has only what its steps said."""
    recording = WorkerRecord("", print)
    recording.settings = {"sync": "ssp"} | dict.fromkeys(("compress", "workers", "shards"), 1)
    recording.settings |= {"local_steps": 1, "local_seconds": -1.0, "fragments": 1}
    step = {"event": "step", "clock": 1, "push_bytes": 1, "pull_bytes": 1, "teacher_seconds": 0.5}
    taught = {"teacher_bytes_up": 100_000, "teacher_bytes_down": 5_000_000, "teacher_missed": 1}
    for worker in (0, 1, 0):
        recording.take(worker, {"event": "model", "parameters": 10, "clock": 0})
        recording.take(worker, step | taught)
    line = recording.done([0, 0])
    assert line.endswith("; teachers: up 0.3 MB, down 15.0 MB, 3 batches without"), "no worker has said its predictions"
    ended = {"event": "teachers", "bytes_up": 100_000, "bytes_down": 5_700_000, "samples": 64, "cached": 0}
    recording.take(0, ended | {"predictions": 100_000, "missed": 0, "seconds": 0.5})
    line = recording.done([0, 0])
    assert line.endswith("; teachers: up 0.3 MB, down 15.7 MB (157 bytes a prediction), 2 batches without")
    assert "teachers" not in WorkerRecord("", print).done([0])


def test_what_several_workers_say_is_said_once_and_again_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now_s))
    shown = console.Console()
    for _ in range(2):
        shown.doing("waiting ...")
    now_s += console.AGAIN_S
    shown.doing("waiting ...")
    assert capsys.readouterr().err == "ps-worker: waiting ...\n" * 2
    shown.progress("[ 1.0 s] clock 1")
    shown.doing("a worker is in the debugger", quiet=True)
    now_s += console.PLAIN_S
    shown.progress("[ 2.0 s] clock 2")
    assert "clock 2" not in capsys.readouterr().err


def test_who_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every SAY_S, with what it waits for; then the wait ends with an error."""
    now_s, said = 0.0, list[str]()

    def take(timeout_s: float) -> None:
        nonlocal now_s
        now_s += timeout_s

    monkeypatch.setattr(event_wait, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep))
    monkeypatch.setattr(event_wait, "say", said.append)
    link: Any = SimpleNamespace(take=take, run_clock=0, waits="")
    with pytest.raises(NarrowsError, match="waited 35 s for the others"):
        event_wait.EventWait(cast(MemberLink, link), None, print).until(lambda: False, 35.0, "the others")
    assert said == [f"waiting for the others, {seconds} s so far ..." for seconds in (10, 20, 30)]
    now_s, link.waits = 0.0, "2 of 3 workers joined; waiting for 1"
    with pytest.raises(NarrowsError, match="waited 15 s for the others: 2 of 3 workers joined; waiting for 1"):
        event_wait.EventWait(cast(MemberLink, link), None, print).until(lambda: False, 15.0, "the others")
    assert said[3:] == ["2 of 3 workers joined; waiting for 1, 10 s so far ..."]


def test_a_wait_for_workers_that_train_has_no_end_while_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    link: Any = SimpleNamespace(run_clock=0, waits="")

    def take(timeout_s: float) -> None:
        nonlocal now_s
        now_s += timeout_s
        link.run_clock = int(min(now_s, 1000.0) // 20)  # a clock in 20 s, and none after a while

    link.take = take
    monkeypatch.setattr(event_wait, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep))
    monkeypatch.setattr(event_wait, "say", lambda text: None)
    with pytest.raises(NarrowsError, match="waited 35 s"):
        event_wait.EventWait(cast(MemberLink, link), None, print).until(lambda: False, 35.0, "the others", others=True)
    assert now_s == 1035.0


ODD = ("self", "kind", "what", "text", "values", "name", "index", "loss", "total_steps", "my/metric", "from", "class")


@pytest.mark.parametrize("compress", ["dense", "topk:0.1"])
def test_what_a_script_records_has_any_name_but_those_of_the_run(
    compress: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = WorkerRecord(str(tmp_path / "record"), print)

    def hear(event: str, /, **values: Any) -> None:
        recording.take(0, json.loads(json.dumps({"event": event, **values})))

    monkeypatch.setattr(session, "_tell", hear)
    with run(Settings(sync="ssp", compress=compress, workers=1)):
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            record(**dict.fromkeys(ODD, 1.5))
            for name in FIGURES:
                with pytest.raises(UsageError, match=f"{name!r} is .* give the value another name"):
                    record(**{name: 7.0})
        optimizer.finish()
        record(loss=1.5)  # with the newest step
    recording.close()
    steps = [
        line for line in map(json.loads, (tmp_path / "record").read_text().splitlines()) if line["event"] == "step"
    ]
    assert [line["clock"] for line in steps] == [1, 2, 3, 4], "no figure of the run is replaced"
    for line in steps:
        assert {name: line[name] for name in ODD} == dict.fromkeys(ODD, 1.5)
        assert {*line} - {*ODD} <= {*FIGURES}, "the run has no name that a script may take"
        assert 7.0 not in line.values()
    assert recording.averages() == dict.fromkeys({*ODD} - {"total_steps"}, 1.5)


def test_a_script_alone_is_told_of_such_a_name_too() -> None:
    with alone(), pytest.raises(UsageError, match=r"record\(clock=...\): 'clock' is the worker's clock"):
        record(clock=1)


def test_the_docs_name_each() -> None:
    text = (Path(__file__).parents[3] / "docs/script.md").read_text()
    (told,) = re.findall(r"takes any name but those that a line of .*? has itself: (.*?)\.\s", text, re.S)
    assert {*re.findall(r"`(\w+)`", told)} == {*FIGURES}


def test_a_line_has_the_name_of_its_command_and_goes_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    relayed: list[str] = []
    plain = CommandConsole("ps-serve", stdout(lambda text: None))
    above = CommandConsole("ps-worker", relay=lambda text: bool(relayed.append(text) or True))  # type: ignore[func-returns-value]
    for each in (plain, above, CommandConsole("ps-probe")):
        each.say("host \x1b[31m\nhere")
        each.say("lost", error=True)
    out, err = capsys.readouterr()
    assert out == "ps-serve: host \\x1b[31m\nhere\n", "characters that could control the terminal are escapes"
    assert err == "ps-serve: lost\nps-worker: lost\nps-probe: host \\x1b[31m\nhere\nps-probe: lost\n"
    assert relayed == ["host \x1b[31m\nhere"], "an error is not sent on"
