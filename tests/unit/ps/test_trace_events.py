"""A trace is made of the events of records: clocks are aligned, and nothing arrives before it was sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner
from kit.trace_format import checked, flows

from narrows.protocols.errors import UsageError
from narrows.protocols.member.push_trace import FIELDS
from narrows.ps.command.cli import command as ps_serve
from narrows.ps.command.plot import command as ps_plot
from narrows.ps.dashboard import trace_events
from narrows.ps.dashboard.trace_events import TraceSources
from narrows.ps.process import shard_trace
from narrows.ps.process.shard_trace import ShardTrace
from narrows.ps.shard.model_shard import ClockStage
from narrows.worker.command.cli import command as ps_worker

MS = 1_000_000
CITY, ROOT = (
    5_000 * MS,
    70_000 * MS,
)  # by how much the clock of the city is ahead of the worker's, the root's of the city's


def update(epoch: int, base: int, there: int, **more: int) -> list[int]:
    """An update of clock 0 that leaves at `base`, is there 2 ms later and back after 6: by a clock ahead by `there`."""
    row = {
        "shard": 0, "worker": 1, "epoch": epoch, "clock": 0, "bytes": 9, "sent": base, "left": base, "acked": base + 3 * MS,
        "received": base + there + 2 * MS, "folded": 0, "published": base + there + 5 * MS, "arrived": base + 6 * MS,
    }  # fmt: skip
    return [(row | more)[name] for name in FIELDS]


def of_worker(**more: Any) -> dict[str, Any]:
    own = {"local_rank": 0, "every": 1, "server": "tcp://city:1", "worker": 1, "epoch": 11, "at": 10 * MS, "dropped": 0}
    spans = [["compute", 0, 4 * MS], ["step", 4 * MS, 9 * MS], ["encode", 5 * MS, 6 * MS]]
    known = {"offsets": {"0": [CITY, MS]}, "spans": spans, "pushes": [update(11, 6 * MS, CITY)]}
    return {"event": "trace", "seconds": 1.0, **own, **known, **more}


def of_server(epochs: list[int], **more: Any) -> dict[str, Any]:
    own = {"shard": 0, "every": 1, "epochs": epochs, "parent": "", "at": 10 * MS + CITY, "offsets": {}}
    return {"event": "trace", "seconds": 1.0, **own, "folds": [], "pushes": [], "dropped": 0, **more}


def made(**records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    sources = TraceSources()
    for file, events in records.items():
        for event in events:
            sources.take(file, json.loads(json.dumps(event)))
    whole = sources.events()
    return checked(json.dumps(whole)), whole["otherData"]


def times(events: list[dict[str, Any]], began: int = 0) -> list[list[int]]:
    """The points of each flow, in ms since the first event."""
    return [[round(point["ts"] / 1000) - began for point in points] for points in flows(events)]


def names(events: list[dict[str, Any]]) -> dict[str, int]:
    return {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}


def test_one_record_of_workers_has_the_shard_too() -> None:
    events, about = made(w=[of_worker()])
    assert {*names(events)} == {"worker 1, w", "shard 0 of city:1"}
    assert times(events) == [[6, 8, 11]]
    assert about == {"clock_error_us": {"worker 1, w": 1000.0}, "flows": 1, "moved": 0, "dropped": 0}
    assert [event["name"] for event in events if event["ph"] == "X" and event["cat"] in ("step", "compute")] == [
        "compute",
        "narrows: step",
        "narrows: encode",
    ]


def test_offsets_and_their_errors_add_up_on_the_way_to_the_root() -> None:
    fold = [[0, 9 * MS + CITY, 11 * MS + CITY]]
    pushes = [update(21, 10 * MS + CITY, ROOT)]
    city = of_server([11], parent="tcp://root:1", offsets={"0": [ROOT, 4 * MS]}, folds=fold, pushes=pushes)
    events, about = made(w=[of_worker()], c=[city], r=[of_server([21])])
    assert {*names(events)} == {"worker 1, w", "shard 0 of c", "shard 0 of r"}
    assert about["clock_error_us"] == {"worker 1, w": 5000.0, "shard 0 of c": 4000.0, "shard 0 of r": 0.0}
    assert sorted(times(events)) == [[6, 8, 9, 11], [10, 12, 15]] and about["moved"] == 0
    (up,) = flows(events, "up")
    assert [round(point["ts"] / 1000) for point in up] == [9, 10]


def test_a_time_that_the_error_of_the_clocks_turns_around_is_moved() -> None:
    events, about = made(w=[of_worker(offsets={"0": [CITY + 3 * MS, 4 * MS]})])
    assert times(events) == [[6, 6, 8]] and about["moved"] == 1


def test_clocks_without_an_offset_are_said_to_be_not_aligned() -> None:
    events, about = made(w=[of_worker(offsets={})])
    assert about["clock_error_us"] == {"worker 1, w": None}
    assert [event["args"]["labels"] for event in events if event["name"] == "process_labels"] == ["clock not aligned"]


def test_the_offset_of_a_window_is_that_with_the_least_error() -> None:
    late = of_worker(at=20 * MS, offsets={"0": [CITY + 50 * MS, 60 * MS]}, spans=[], pushes=[])
    assert times(made(w=[late, of_worker()])[0]) == times(made(w=[of_worker(), late])[0]) == [[6, 8, 11]]


def test_an_update_without_a_state_or_an_answer_has_what_is_known() -> None:
    lost = update(11, 6 * MS, CITY, received=0, acked=0, published=0, arrived=0)
    held = update(11, 7 * MS, CITY, published=0, arrived=0, clock=1)
    events, _ = made(w=[of_worker(pushes=[lost, held], dropped=3)])
    assert times(events) == [[7, 9]]
    assert [event["args"]["answered"] for event in events if event["ph"] == "X" and event["cat"] == "push"] == [
        False,
        True,
    ]


def test_updates_that_overlap_have_rows_of_their_own() -> None:
    two = [update(11, 6 * MS, CITY), update(11, 7 * MS, CITY, clock=1)]
    events, _ = made(w=[of_worker(pushes=two)])
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"to shard 0", "to shard 0 (2)", "from worker 1", "from worker 1 (2)"} <= rows


def test_too_many_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (3, 8):  # rows of the record, and events of the trace
        monkeypatch.setattr(trace_events, "EVENTS_MAX", most)
        with pytest.raises(UsageError, match="record with a greater --trace N"):
            made(w=[of_worker()])


class Folding:
    """Stands in for a server, of which a trace reads how far its shard is."""

    def __init__(self) -> None:
        self.shard = self.model_shard = self.mode = self.assembler = self
        self.barrier, self.min_clock, self.stage = True, 0, ClockStage.FOLD
        self.seats: dict[int, Any] = {}
        self.membership, self.above = None, ""


def test_a_shard_notes_when_each_nth_clock_was_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_trace, "FOLDS_MAX", 2)
    server, trace = cast(Any, Folding()), ShardTrace(2, 1)
    events = [(0, ClockStage.FOLD), (0, ClockStage.SEND_UP), (1, ClockStage.CHECKPOINT), (3, ClockStage.FOLD)]
    events += [(3, ClockStage.REBASE), (4, ClockStage.FOLD), (1, ClockStage.FOLD), (3, ClockStage.FOLD)]
    for at, (server.min_clock, server.stage) in enumerate(events):
        trace.handled(server, 10 * at, 10 * at + 5)
    assert trace.folds == [[0, 10, 15], [2, 30, 35]], "at its fold, before it was published"
    assert trace.dropped == 1, "after going back to clock 1, clock 2 once more"
    told = trace.take(server, shard_trace.TELL_NS)
    assert told["folds"] == [[0, 10, 15], [2, 30, 35]] and told["dropped"] == 1 and not trace.folds
    trace.folds.append([8, 1, 2])
    assert not trace.take(server, shard_trace.TELL_NS + 1), "the last event was just now"
    assert trace.take(server, shard_trace.TELL_NS + 1, last=True)["folds"] == [[8, 1, 2]]
    server.barrier, server.min_clock = False, 9
    trace.handled(server, 0, 1)
    assert not trace.folds, "acknowledgements say when"


def test_a_trace_needs_a_record(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    for command, words in ((ps_worker, [str(tmp_path / "script.py")]), (ps_serve, [])):
        error = CliRunner().invoke(command, ["--trace", "2", *words]).exception
        assert isinstance(error, UsageError) and "give --record FILE too" in str(error)


def test_ps_plot_says_what_is_missing(tmp_path: Path) -> None:
    record, out = tmp_path / "run.jsonl", tmp_path / "out.json"

    def error(*words: str) -> str:
        return str(CliRunner().invoke(ps_plot, ["--trace", *words]).exception)

    record.write_text('{"event": "step", "seconds": 1.0}\n')
    assert "give ps-worker and ps-serve --trace N" in error(str(record), str(out))
    assert "name the records first" in error(str(record)) and "name the records first" in error(
        str(record), str(record)
    )
    assert "No such file" in error(str(tmp_path / "none.jsonl"), str(out))
    record.write_text('{"event": "trace"}\n')
    assert "line 1 is not one of a record" in error(str(record), str(out))
    record.write_text(json.dumps(of_worker()) + "\n" + '{"event"')  # a run that goes on
    assert not error(str(record), str(out)).startswith("--") and checked(out.read_text())
    assert "No such file" in error(str(record), str(tmp_path / "no" / "out.json"))
