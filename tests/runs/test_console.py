"""The output of ps-worker: worker/command/console.py and recording.py, and the lines of a worker that waits."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from narrows.protocols.errors import NarrowsError
from narrows.worker import waiting
from narrows.worker.command import console
from narrows.worker.command.recording import Recording
from narrows.worker.runner import Link


def test_progress_goes_by_the_workers_that_are_there() -> None:
    recording = Recording("", print)
    recording.settings = {
        "sync": "ssp",
        "compress": "dense",
        "workers": 2,
        "shards": 1,
        "local_steps": 1,
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

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep))
    monkeypatch.setattr(waiting, "say", said.append)
    link: Any = SimpleNamespace(take=take)
    with pytest.raises(NarrowsError, match="waited 35 s for the others"):
        waiting.Waiting(cast(Link, link), None, print).until(lambda: False, 35.0, "the others")
    assert said == [f"waiting for the others, {seconds} s so far ..." for seconds in (10, 20, 30)]
