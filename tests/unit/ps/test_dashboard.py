"""A run at a glance: its history, its page, its metrics. No browser here: tests/system/test_dashboard.py has one."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import astuple, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from click.testing import CliRunner
from kit.record_events import BEAT_S, RUN, beats, history_of, summary
from prometheus_client.parser import text_string_to_metric_families

from narrows.protocols.errors import RemoteProtocolError, UnreachableError, UsageError
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow, unpacked
from narrows.protocols.runtime.cli.flags import DASHBOARD
from narrows.protocols.runtime.storage.record_file import open_record
from narrows.protocols.wire import pack
from narrows.ps.command.planning.plan import command as ps_plan
from narrows.ps.command.planning.probe import command as ps_probe
from narrows.ps.command.plot import command as ps_plot
from narrows.ps.command.top import command as ps_top
from narrows.ps.dashboard import history as bounds
from narrows.ps.dashboard import prometheus, record_reader, web
from narrows.ps.dashboard.history import RunHistory
from narrows.ps.dashboard.record_reader import RecordReader, frames
from narrows.ps.dashboard.run_watch import RunWatch, site_address
from narrows.ps.dashboard.screen import screen, strip
from narrows.ps.dashboard.time_buckets import CELLS, LEVELS
from narrows.ps.dashboard.web import FILES, VISITORS_MAX
from narrows.worker.command.cli import command as ps_worker
from narrows.worker.command.record import WorkerRecord

# The history.


def test_figures_are_those_of_the_summaries() -> None:
    frame = history_of(*beats(100, 0, 10), *beats(100, 1, 10)).frame()
    assert (frame["clock"], frame["bytes_up"], frame["bytes_down"]) == (1000, 200_000, 400_000)
    assert frame["loss"] == pytest.approx(1 / 1001) and frame["samples_rate"] == pytest.approx(200)
    assert frame["ratio"] == pytest.approx(4 * 50 * 2000 / 200_000)  # 50 values as fp32, by what was pushed
    worker = frame["members"][1]
    assert worker["step_seconds"] == pytest.approx([0.06, 0.02, 0.02]) and worker["busy"][0] == pytest.approx(0.25)
    assert worker["step_bytes"] == [100, 200] and worker["round_trip_seconds"] == 0.04


def test_steps_are_shown_where_no_script_says_how_many_samples_they_have() -> None:
    for samples, rate, told in ((200, 40.0, "40 samples/s"), (0, None, "10 steps/s")):
        frame = history_of(*(summary(5 * at, 0, 50 * at, samples=samples * at) for at in (1, 2))).frame()
        assert frame["samples_rate"] == rate and told in shown(frame)


def test_whom_a_run_waits_for_is_shown_while_it_does() -> None:
    waits: dict[str, Any] = {"event": "waits", "seconds": 1.0, "waits": "2 of 3 workers joined; waiting for 1"}
    frame = history_of(waits | {"text": "2 of 3 workers joined; waiting for 1, 10 s so far"}).frame()
    assert frame["waits"] == waits["waits"] and waits["waits"] in shown(frame)
    assert not frame["events"], "it is shown once"
    assert history_of(waits, waits | {"waits": ""}).frame()["waits"] == ""
    assert history_of(waits, {"event": "done", "seconds": 2.0}).frame()["waits"] == ""
    page = Path(web.__file__).parent / "page"
    assert all('"waits"' in (page / name).read_text() for name in ("index.html", "glance.js"))


def test_a_run_that_has_not_begun_has_a_frame() -> None:
    for history in (RunHistory(), history_of()):
        frame = history.frame(3.0)
        assert (frame["clock"], frame["loss"], frame["members"], frame["seconds"]) == (0, None, [], 3.0)


def test_counters_go_on_where_a_worker_begins_anew() -> None:
    first = beats(50, 0, 10)
    again = [
        summary(60 + at, 0, 500 + int(10 * at), life_s=at, steps=int(10 * at), bytes_up=int(1000 * at))
        for at in (5, 10)
    ]
    frame = history_of(*first, *again).frame()
    assert frame["bytes_up"] == 50_000 + 10_000 and frame["members"][0]["clock"] == 600


def test_a_lane_shows_outages_and_stragglers() -> None:
    """Worker 1 is slow, and worker 2 is gone for 20 s and comes again."""
    gone = [
        *beats(30, 2, 10),
        *(summary(50 + at, 2, 500 + 10 * at, life_s=at, steps=10 * at) for at in range(5, 51, 5)),
    ]
    events = sorted([*beats(100, 0, 10), *beats(100, 1, 2), *gone], key=lambda event: float(event["seconds"]))
    frame = history_of(*events).frame()
    fast, slow, away = ([LEVELS.index(level) for level in member["strip"]["steps"]] for member in frame["members"])
    assert frame["cell_seconds"] == 1.0 and min(fast[1:99]) >= 33
    assert max(slow[1:99]) <= 9 and min(slow[1:99]) > 0
    assert max(away[31:49]) == 0 and min(away[2:29]) >= 33 and min(away[52:99]) >= 33
    waits = frame["members"][0]["strip"]
    assert {*waits["compute"][1:99]} == {LEVELS[21]} and {*waits["encode"][1:99]} == {LEVELS[7]}
    assert strip(frame["members"][2]["strip"], frame["cells"])[-25:].strip()


def test_members_that_are_gone_are_known() -> None:
    left = {
        "event": "member",
        "seconds": 30.0,
        "worker": 9,
        "rank": 1,
        "host": "h",
        "how": "expired",
        "clock": 3,
        "live": 1,
    }
    history = history_of(*beats(20, 0, 10), *beats(20, 1, 10), left)
    assert [(member["live"], member["how"]) for member in history.frame()["members"]] == [
        (True, ""),
        (False, "expired"),
    ]
    assert history.frame()["events"][-1][2] == "worker 9 (rank 1, h) expired at clock 3; 1 live"
    history.take(summary(40.0, 1, 5, life_s=1.0))
    assert history.frame()["members"][1]["live"]


def test_below_a_cluster_who_is_not_named_any_more_is_gone() -> None:
    whole = summary(5.0, 0, 1)
    whole["rows"][0]["runs"] = "--sync bsp"
    whole["rows"] += [summary(5.0, 0, 1, path=(rank,))["rows"][0] for rank in range(3)]
    fewer = summary(7.5, 0, 2)
    fewer["rows"][0]["runs"] = "--sync bsp"
    fewer["rows"] += [summary(7.5, 0, 2, path=(1,))["rows"][0]]
    found = {tuple(each["path"]): each["live"] for each in history_of(whole, fewer).frame()["members"]}
    assert found == {(0,): True, (0, 0): False, (0, 1): True, (0, 2): False}


def test_the_death_of_a_worker_below_a_cluster_is_an_event_once() -> None:
    def beat(seconds: float, *ranks: int, **more: Any) -> dict[str, Any]:
        told = summary(seconds, 3, 1, **more)
        told["rows"][0]["runs"] = "--sync bsp"
        told["rows"] += [summary(seconds, 3, 1, path=(rank,))["rows"][0] for rank in ranks]
        return told

    history = history_of(beat(1.0, 0, 1, 2), beat(2.0, 0, 2), beat(3.0, 0, 1, 2), beat(4.0, 0), beat(5.0, 0))
    assert not history.events  # a server that was started again does not know all at once
    for seconds in (3.0 + bounds.GONE_S, 4.0 + bounds.GONE_S):
        history.take(beat(seconds, 0))
    assert [event[1:] for event in history.events] == [["gone", "rank 3.1 (host), rank 3.2 (host) left"]]
    history.take(beat(20.0, 0, 1))
    history.take(beat(30.0, 0, hidden=1))  # it may only have found no room
    history.take(beat(31.0, 0))
    assert history.events[-1][2] == "rank 3.1 (host) left" and len(history.events) == 2
    many = history_of(beat(1.0, *range(1000)), beat(2.0 + bounds.GONE_S, 0, lost=999))
    assert len(many.events) == 1 and many.events[0][2].endswith("and 991 more are lost")


def test_who_left_a_cluster_and_who_was_lost_are_told_apart() -> None:
    def beat(seconds: float, lost: int, *ranks: int) -> dict[str, Any]:
        told = summary(seconds, 3, 1, lost=lost)
        told["rows"][0]["runs"] = "--sync bsp"
        told["rows"] += [summary(seconds, 3, 1, path=(rank,))["rows"][0] for rank in ranks]
        return told

    history = history_of(beat(1.0, 7, 0, 1, 2, 3, 4), beat(2.0, 8, 0, 1, 2, 3), beat(3.0, 8, 0, 1, 2))
    for seconds, lost, *ranks in ((4.0, 8, 0, 1, 2), (9.0, 9, 0), (10.0, 9, 0), (15.0, 10), (20.0, 10)):
        history.take(beat(seconds, int(lost), *map(int, ranks)))
    found = {tuple(each["path"]): each["how"] for each in history.frame()["members"]}
    # Of ranks 1 and 2, which went at once, one was lost. After rank 0 no worker is left there.
    assert found == {(3,): "", (3, 0): "lost", (3, 1): "gone", (3, 2): "gone", (3, 3): "left", (3, 4): "lost"}
    assert {event[2] for event in history.events} == {
        "rank 3.4 (host) is lost", "rank 3.3 (host) left", "rank 3.1 (host), rank 3.2 (host) are gone",
        "rank 3.0 (host) is lost",
    }  # fmt: skip


def test_a_lag_below_a_cluster_is_that_behind_the_fastest_of_it() -> None:
    told = summary(5.0, 0, 3)
    told["rows"][0]["runs"] = "--sync bsp"
    told["rows"] += [summary(5.0, 0, clock, path=path)["rows"][0] for path, clock in
                     {(0,): 90, (1,): 97, (2,): 40, (2, 0): 7, (2, 1): 9}.items()]  # fmt: skip
    found = {tuple(each["path"]): each["lag"] for each in history_of(told).frame()["members"]}
    assert found == {(0,): 0, (0, 0): 7, (0, 1): 0, (0, 2): 57, (0, 2, 0): 2, (0, 2, 1): 0}


def test_a_loss_that_is_not_finite_is_an_event_and_no_figure(tmp_path: Path) -> None:
    """In a record of ps-worker, and where a heartbeat has none any more."""
    step = {"event": "step", "local_rank": 1, "wait_seconds": 0.1, "push_bytes": 1, "pull_bytes": 1, "staleness": 0}
    losses = [float("nan"), 2.0, float("inf"), float("nan"), 1.0]
    lines = [step | {"seconds": at, "clock": at, "loss": loss, "held_back": loss} for at, loss in enumerate(losses, 1)]
    (tmp_path / "record").write_text("".join(json.dumps(line) + "\n" for line in [RUN, *lines[:4]]))
    read = RecordReader(str(tmp_path / "record"))
    read.read()
    frame = read.history.frame()
    assert json.loads(json.dumps(frame, allow_nan=False))["loss"] is None and frame["members"][0]["held_back"] == 2.0
    odd = "the loss of rank 1 is not finite"
    assert [(event[0], event[2]) for event in frame["events"]] == [(1, odd), (3, odd)]
    assert frame["curve"]["loss"] == [2.0]
    with (tmp_path / "record").open("a") as file:
        file.write(json.dumps(lines[4]) + "\n")
    read.read()
    assert read.history.frame()["loss"] == 1.0 and len(read.history.events) == 2
    live = history_of(*beats(20, 0, 10), summary(25.0, 0, 250, loss=None), summary(30.0, 0, 300, loss=None))
    assert [event[1:] for event in live.events] == [["loss", "the loss of rank 0 (host) is not finite"]]
    live.take(summary(40.0, 0, 0, life_s=1.0, loss=None))  # another life, that has recorded none yet
    assert len(live.events) == 1


@pytest.mark.parametrize(
    "other",
    [{"host": "there"}, {"runs": "--sync bsp"}, {"samples": 5}, {"steps": 200}],
    ids=["elsewhere", "a cluster", "counts less", "takes no step"],
)
def test_the_death_of_a_city_is_not_told_as_a_loss_that_is_not_finite(other: dict[str, Any]) -> None:
    """Another member has the path of one that is gone, and has recorded no loss."""
    event = summary(25.0, 0, 250, loss=None)
    event["rows"][0] |= other
    live = history_of(*beats(20, 0, 10), event)
    assert [text for _, kind, text in live.events if kind == "loss"] == []


@pytest.mark.parametrize("name", [each.name for each in fields(Summary) if each.type in ("float", "float | None")])
@pytest.mark.parametrize("value", [1e308, 5e-324])
def test_figures_of_two_heartbeats_never_add_up_to_infinity(name: str, value: float) -> None:
    """A heartbeat is refused, or what is made of it is JSON, and the sums of a scrape are finite."""
    figures: dict[str, Any] = {"steps": 9, "samples": 9, "updates": 9, "bytes_up": 9, name: value}
    row = SummaryRow((), "", "", Summary(**figures))
    plain = [list(each) if type(each) is tuple else each for each in astuple(row.summary)]
    with contextlib.suppress(RemoteProtocolError):
        (heard,) = unpacked(pack([[[], "", "", *plain]]))
        events = [
            {"event": "summary", "seconds": at, "worker": rank, "clock": 1, "parameters": 7,
             "rows": [heard.below(rank, "here").told() | {"steps": 9 * at}]}
            for at in (1, 2) for rank in (0, 1)
        ]  # fmt: skip
        live = history_of(*events)
        assert json.loads(json.dumps(live.frame(), allow_nan=False))
        families = text_string_to_metric_families(prometheus.text(live, 0.0).decode())
        assert all(np.isfinite(sample.value) for family in families for sample in family.samples)


def test_a_record_has_null_for_a_number_that_is_not_finite(tmp_path: Path) -> None:
    watch, recording = RunWatch(), WorkerRecord(str(tmp_path / "of a worker"), print)
    watch.record = open_record(str(tmp_path / "of a server"), print)
    values: dict[str, Any] = {"loss": float("nan"), "all": [1.0, float("inf")]}
    watch.note("value", values)
    recording.note("value", **values)
    watch.close()
    recording.close()
    for file in tmp_path.iterdir():
        line = json.loads(file.read_text(), parse_constant=pytest.fail)
        assert (line["loss"], line["all"]) == (None, [1.0, None])


def test_skipped_steps_are_an_event_and_a_figure(tmp_path: Path) -> None:
    """Of a heartbeat, whose counter begins anew with another life, and in a record of ps-worker."""
    live = history_of(*beats(20, 0, 10), summary(25.0, 0, 250, skipped=2), summary(30.0, 0, 300, skipped=3))
    live.take(summary(40.0, 0, 10, life_s=1.0, skipped=1))
    (member,) = live.frame()["members"]
    assert member["skipped"] == 4
    assert [event[1:] for event in live.events] == [
        ["skipped", "rank 0 (host) skips steps whose gradient is not finite"]
    ]
    assert b'narrows_skipped_steps_total{level="1",peer="0"} 4.0' in prometheus.text(live, 0.0)
    step = {"event": "step", "local_rank": 1, "wait_seconds": 0.1, "push_bytes": 1, "pull_bytes": 1, "staleness": 0}
    skip = {"event": "skipped", "local_rank": 1, "rank": 5, "clock": 1, "tensor": "'0.bias'"}
    lines = [RUN, step | {"seconds": 1, "clock": 1}, skip | {"seconds": 2}, step | {"seconds": 2, "clock": 2}]
    (tmp_path / "record").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = RecordReader(str(tmp_path / "record"))
    read.read()
    assert read.history.frame()["members"][0]["skipped"] == 1


def test_what_a_gpu_did_is_shown_of_each_life_of_its_worker() -> None:
    """A worker without a GPU shows nothing. A row of an older record has no such figures."""
    gpu: dict[str, Any] = {"launches": 4000, "replays": 300, "graphs": 8, "scratch_bytes": 12_000_000}
    live = history_of(*beats(20, 0, 10), *beats(20, 1, 10), summary(25.0, 0, 250, **gpu))
    live.take(summary(40.0, 0, 10, life_s=1.0, **gpu | {"launches": 40, "replays": 3, "graphs": 2}))
    older = summary(41.0, 1, 260)
    for row in older["rows"]:
        for name in gpu:
            del row[name]
    live.take(older)
    assert [member["gpu"] for member in live.frame()["members"]] == [[4040, 303, 2, 12_000_000], [0, 0, 0, 0]]
    (line,) = [each for each in shown(live.frame()).splitlines() if "GPU" in each]
    assert line.strip() == "GPU of rank 0: 2 graphs kept, 303 replayed; 4040 kernels launched; scratch memory 12.00 MB"
    told = prometheus.text(live, 0.0).decode()
    for text in ("gpu_launches_total", "gpu_graph_replays_total", "gpu_graphs", "gpu_scratch_bytes"):
        assert f'narrows_{text}{{level="1",peer="0"}}' in told


def test_members_that_are_met_through_a_relay_are_named_with_its_bytes() -> None:
    """A row of an older record has no such figures."""
    met = summary(3.0, 1, 10, relayed=1, relay_bytes=3_200_000)
    live = history_of(summary(1.0, 0, 10), summary(2.0, 1, 10, relayed=1, relay_bytes=3_000_000), met)
    live.take(summary(9.0, 1, 1, life_s=1.0, relayed=1, relay_bytes=200_000))  # its next process
    older = summary(9.5, 0, 12)
    for row in older["rows"]:
        del row["relayed"], row["relay_bytes"]
    live.take(older)
    live.take({"event": "relay", "seconds": 9.6, "bytes": 3_400_000, "nodes": 1})
    live.take(
        {"event": "relay", "seconds": 9.7, "bytes": 3_400_001, "nodes": 0, "text": "3.40 MB went through the relay"}
    )
    frame = live.frame()
    assert [(each["relayed"], each["relay_bytes"]) for each in frame["members"]] == [(False, 0), (True, 3_400_000)]
    assert frame["relay_bytes"] == 3_400_000 and frame["events"][-1][1:] == ["relay", "3.40 MB went through the relay"]
    text = shown(frame)
    assert "through a relay 3.40 MB" in text and "(met through a relay, 3.40 MB)" in text
    assert text.count("met through a relay") == 1
    assert 'narrows_relay_bytes_total{level="1",peer="1"} 3.4e+06' in prometheus.text(live, 0.0).decode()
    assert "relay" not in shown(history_of(summary(1.0, 0, 10)).frame())


def test_what_workers_ask_of_teachers_and_get_is_shown() -> None:
    """Of each life of a worker, and of one below a cluster; one without a teacher, and an older record, show nothing."""
    first: dict[str, Any] = {"teacher_bytes_up": 200_000, "teacher_bytes_down": 11_000_000, "teacher_seconds": 2.0}
    live = history_of(summary(1.0, 0, 10), summary(2.0, 1, 10, **first), summary(3.0, 1, 20, **first, teacher_missed=3))
    live.take(summary(9.0, 1, 1, life_s=1.0, teacher_bytes_up=1_000, teacher_bytes_down=300_000, teacher_seconds=0.5))
    below = summary(9.0, 2, 7, path=(4,), teacher_missed=2)["rows"]
    live.take(summary(9.0, 2, 7) | {"rows": [summary(9.0, 2, 7)["rows"][0] | {"runs": "--sync bsp"}, *below]})
    older = summary(9.5, 0, 12)
    for row in older["rows"]:
        for name in ("teacher_bytes_up", "teacher_bytes_down", "teacher_missed", "teacher_seconds"):
            del row[name]
    live.take(older)
    frame = live.frame()
    of = {tuple(each["path"]): each["teacher"] for each in frame["members"]}
    assert of[1,] == {"bytes_up": 201_000, "bytes_down": 11_300_000, "missed": 3, "seconds": 2.5}
    assert of[0,] is None and of[2,] is None and of[2, 4] is not None and of[2, 4]["missed"] == 2
    assert (frame["teacher_bytes"], frame["teacher_missed"]) == ([201_000, 11_300_000], 5)
    text = shown(frame, 240)
    assert "teachers: up 0.20 MB, down 11.30 MB, 5 batches without" in text
    assert "teachers of rank 1: up 0.20 MB, down 11.30 MB; 3 batches without soft targets; waited 2.5 s" in text
    assert text.count("teachers of rank") == 2
    scraped = prometheus.text(live, 0.0).decode()
    for line in (
        'bytes_total{direction="down",level="1",peer="1"} 1.13e+07',
        'missed_batches_total{level="2",peer="2.4"} 2.0',
        'wait_seconds_total{level="1",peer="1"} 2.5',
    ):
        assert f"narrows_teacher_{line}" in scraped
    assert 'narrows_teacher_bytes_total{direction="up",level="1",peer="0"}' not in scraped
    alone = history_of(summary(1.0, 0, 10))
    assert "teacher" not in shown(alone.frame()) and "teacher" not in prometheus.text(alone, 0.0).decode()
    assert "teacher" in (Path(web.__file__).parent / "page" / "glance.js").read_text()


def test_a_wait_for_a_teacher_is_a_wait_in_a_record_of_ps_worker() -> None:
    step = {"event": "step", "local_rank": 0, "push_bytes": 1, "pull_bytes": 1, "staleness": 0, "step_seconds": 1.0}
    taught = {"teacher_seconds": 0.5, "teacher_bytes_up": 10, "teacher_bytes_down": 90, "teacher_missed": 1}
    history = history_of(*(step | taught | {"seconds": at, "clock": at, "wait_seconds": 0.2} for at in (1, 2)))
    (member,) = history.frame()["members"]
    assert member["step_seconds"] == pytest.approx([0.3, 0.0, 0.7])
    assert member["teacher"] == {"bytes_up": 20, "bytes_down": 180, "missed": 2, "seconds": 1.0}


def test_a_rate_does_not_jump_where_a_heartbeat_sees_one_step_or_two() -> None:
    """A step of 0.6 s, and a heartbeat once a second: a summary counts one step more than the one before, or two."""
    history, seen = history_of(), []
    for second in range(1, 60):
        history.take(summary(float(second), 0, int(second / 0.6), left_steps=300))
        seen.append(history.frame()["left_seconds"])
    assert all(left == pytest.approx(180.0, rel=0.2) for left in seen[10:])


def test_time_left_is_that_of_the_slowest() -> None:
    history = history_of(*beats(100, 0, 10), *beats(100, 1, 4))
    assert history.frame()["left_seconds"] is None
    for rank, rate in ((0, 10), (1, 4)):
        history.take(summary(102.5, rank, int(102.5 * rate), left_steps=100))
    assert history.frame()["left_seconds"] == pytest.approx(25, rel=0.1)


def test_a_long_run_stays_small_and_whole() -> None:
    history = RunHistory()
    for beat in range(20_000):
        history.take(summary(BEAT_S * (beat + 1), 0, beat + 1))
        history.take({"event": "above", "seconds": BEAT_S * (beat + 1), "text": f"{beat} {'x' * 1000}"})
    frame = history.frame()
    curve = frame["curve"]
    assert bounds.POINTS / 2 < len(curve["loss"]) <= bounds.POINTS + 1
    assert curve["seconds"][0] == BEAT_S and curve["seconds"][-1] > 0.98 * frame["seconds"]
    assert frame["cells"] <= CELLS and min(map(LEVELS.index, frame["members"][0]["strip"]["steps"])) > 0
    assert len(frame["events"]) == bounds.EVENTS and all(len(text) <= bounds.TEXT for _, _, text in frame["events"])


def test_members_beyond_the_limit_are_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "LANES_MAX", 3)
    frame = history_of(*(summary(2.5, rank, 1) for rank in range(5))).frame()
    assert len(frame["members"]) == 3 and frame["hidden"] == 2


def test_a_frame_of_a_thousand_members_is_made_in_time() -> None:
    history = history_of(*(summary(BEAT_S * beat, rank, 10 * beat) for beat in range(1, 4) for rank in range(1000)))
    began = time.process_time()
    frame = json.dumps(history.frame(), allow_nan=False)
    took = time.process_time() - began
    assert took < 1.0 and len(frame) < 2_000_000 and len(json.loads(frame)["members"]) == 1000


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "record.jsonl"
    for line in (
        "nonsense",
        "[]",
        '{"event": "summary", "seconds": 1}',
        '{"event": "step", "seconds": 1, "local_rank": 0}',
    ):
        file.write_text(json.dumps(RUN) + "\n" + line + "\n")
        with pytest.raises(UsageError, match=r"record\.jsonl: line 2 is not one of a record"):
            RecordReader(str(file)).read()
    with pytest.raises(UsageError, match="No such file"):
        RecordReader(str(tmp_path / "none")).read()


# The page, and metrics.


@pytest.fixture
def watch() -> Iterator[RunWatch]:
    watch = RunWatch()
    watch.open_sites("0", "127.0.0.1:0", False)
    for event in (RUN, *beats(20, 0, 10), *beats(20, 1, 10), summary(20.0, 1, 200, teacher_bytes_up=7)):
        watch.history.take(event)
    yield watch
    watch.close()


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_each_file_of_the_page_is_served_and_nothing_else(watch: RunWatch) -> None:
    page, metrics = (site.url for site in watch.sites)
    for path, (name, kind) in FILES.items():
        status, headers, body = get(page.rstrip("/") + path)
        assert status == 200 and headers["Content-Type"] == kind
        assert body == resources.files("narrows.ps.dashboard").joinpath("page", name).read_bytes()
        assert "default-src 'none'" in headers["Content-Security-Policy"]
    for url in (f"{page}../watch.py", f"{page}page/index.html", f"{page}metrics", metrics, f"{metrics}frame.json"):
        assert get(url)[0] == 404
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(page, data=b"x", timeout=10)


def test_the_console_says_who_may_look(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    for site in watch.sites:
        assert "no key" not in site.told
        monkeypatch.setattr(site, "server_address", ("0.0.0.0", site.server_address[1]))
        assert site.told.endswith("HTTP needs no key: anyone who reaches this address can read it")


def test_a_page_of_another_name_is_not_told(watch: RunWatch) -> None:
    assert get(watch.sites[0].url + "frame.json", Host="evil.example:80")[0] == 403
    assert get(watch.sites[0].url + "frame.json", Host="localhost:80")[0] == 200


def test_the_stream_has_the_frame_and_ends_with_the_run(watch: RunWatch) -> None:
    stream = frames(watch.sites[0].url)
    first = next(stream)
    assert first["clock"] == watch.history.frame()["clock"] and first["members"][1]["path"] == [1]
    with watch.lock:
        watch.history.take({"event": "done", "seconds": 21.0})
    watch.close()
    last = [*stream]
    assert last[-1]["over"]
    watch.sites.clear()


@pytest.mark.parametrize("asks", [b"", b"GET /events", b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_visitors_are_bounded_and_lock_nobody_out(asks: bytes, watch: RunWatch) -> None:
    """Who has asked for nothing makes room first, and then who came first."""
    host, port = watch.sites[0].server_address[:2]
    with contextlib.ExitStack() as stack:

        def visitor() -> socket.socket:
            return stack.enter_context(socket.create_connection((str(host), port), timeout=10))

        looks = visitor()
        looks.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert looks.recv(1)
        held = [visitor() for _ in range(VISITORS_MAX - 1)]
        for each in held:
            each.sendall(asks)
            assert not asks.endswith(b"\n") or each.recv(1)
        status, _, body = get(watch.sites[0].url + "frame.json")
        assert status == 200 and json.loads(body)["clock"] > 0
        gone = held[0] if not asks.endswith(b"\n") else looks
        with contextlib.suppress(ConnectionError):
            while gone.recv(1 << 16):
                pass


def test_an_error_in_an_answer_is_told_once(watch: RunWatch, capfd: pytest.CaptureFixture[str]) -> None:
    site = watch.sites[0]
    assert site.frames is not None

    def fails() -> dict[str, Any]:
        raise KeyError("figure")

    site.frames.make = fails
    for _ in range(5):
        with pytest.raises((ConnectionError, urllib.error.URLError, http.client.HTTPException)):
            get(site.url + "frame.json")
    assert capfd.readouterr().err.count("Traceback") == 1


def test_prometheus_reads_the_metrics(watch: RunWatch) -> None:
    status, headers, body = get(watch.sites[1].url + "metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for each in families.values()
        for sample in each.samples
    }
    assert samples["narrows_clock",] == 200 and samples["narrows_members",] == 2
    assert samples["narrows_link_bytes_total", "1", "1", "up"] == 20_000
    assert samples["narrows_step_seconds_sum", "0", "1", "compute"] == pytest.approx(12)
    assert samples["narrows_step_seconds_count", "0", "1", "compute"] == 200
    assert samples["narrows_staleness_count", "0", "1"] == 200
    assert samples["narrows_last_clock_timestamp_seconds",] == pytest.approx(watch.began_unix + 20)
    page = (Path(__file__).parents[3] / "docs/howto/dashboard.md").read_text()
    told = set(re.findall(r"^\| `(narrows_\w+)`", page, re.M))
    named = {name + "_total" if family.type == "counter" else name for name, family in families.items()}
    assert told == named
    asked = set(re.findall(r"narrows_\w+", (Path(__file__).parents[3] / "docs/grafana.json").read_text()))
    assert len(asked) > 10 and asked <= {sample[0] for sample in samples}


def test_the_page_asks_no_other_host_and_takes_no_text_as_markup() -> None:
    folder = resources.files("narrows.ps.dashboard").joinpath("page")
    for name, _ in FILES.values():
        text = folder.joinpath(name).read_text()
        text = text.removeprefix("/*! https://github.com/leeoniya/uPlot (v1.6.32) */")
        assert not re.search(r"""https?://|["'(]//\w|@import|\binnerHTML|insertAdjacentHTML|document\.write""", text), (
            name
        )
    own = sum(len(folder.joinpath(name).read_text()) for name in ("index.html", "glance.css", "glance.js"))
    assert own < 20_000


@pytest.mark.parametrize(
    ("address", "trusted", "found"),
    [("5550", False, ("127.0.0.1", 5550)), ("localhost:1", False, ("localhost", 1)), ("[::1]:9", False, ("[::1]", 9)),
     ("0.0.0.0:80", True, ("0.0.0.0", 80)), ("0.0.0.0:80", False, "--keys or --insecure"), (":x", True, "give a port"),
     ("host", True, "give a port"), ("1:99999", True, "give a port"), ("example.org:80", False, "anyone who reaches it")],
)  # fmt: skip
def test_a_page_is_on_loopback_unless_it_may_be_elsewhere(address: str, trusted: bool, found: Any) -> None:
    if isinstance(found, tuple):
        assert site_address("--dashboard", address, trusted) == found
    else:
        with pytest.raises(UsageError, match=found):
            site_address("--dashboard", address, trusted)


@pytest.mark.parametrize(
    ("words", "dashboard", "rest"),
    [
        ("--dashboard task.py --dashboard 7", DASHBOARD, ("task.py", "--dashboard", "7")),
        ("--dashboard 7 task.py", "7", ("task.py",)),
        ("-n 2 --dashboard -m task", DASHBOARD, ("task",)),
        ("--dashboard [::1]:7 task.py", "[::1]:7", ("task.py",)),
        ("-n 2 task.py --dashboard", "", ("task.py", "--dashboard")),
    ],
)
def test_the_flag_may_stand_alone(words: str, dashboard: str, rest: tuple[str, ...]) -> None:
    found = ps_worker.make_context("ps-worker", words.split()).params
    assert (found["dashboard"], found["command"]) == (dashboard, rest)


def test_a_port_that_is_taken_is_named(watch: RunWatch) -> None:
    port = watch.sites[0].server_address[1]
    with pytest.raises(UsageError, match=rf"--dashboard 127\.0\.0\.1:{port}: .*; name another port"):
        RunWatch().open_sites(str(port), "", False)


def test_commands_show_a_record(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    events = [
        RUN,
        *sorted(beats(20, 0, 10) + beats(20, 1, 4), key=lambda each: float(each["seconds"])),
        {"event": "done", "seconds": 21.0, "text": "the run is over"},
    ]
    file.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "not whole')
    told = CliRunner().invoke(ps_top, ["--record", str(file)])
    assert told.exit_code == 0 and "clock 80" in told.output and "the run is over" in told.output
    drawn = CliRunner().invoke(ps_plot, [str(file)])
    assert drawn.exit_code == 0 and (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "other.jsonl"
    other.write_bytes(file.read_bytes())
    compared = CliRunner().invoke(ps_plot, [str(file), str(other), "--out", str(tmp_path / "both.png")])
    assert compared.exit_code == 0 and (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    for words in (["--record", str(file), "127.0.0.1:1"], ["--dashboard=1"], ["--record", str(tmp_path / "none")]):
        error = CliRunner().invoke(ps_top, words).exception
        assert isinstance(error, UsageError) and "--" in str(error)


def test_nobody_at_an_address_is_said() -> None:
    with pytest.raises(UnreachableError, match="start ps-serve with --dashboard"):
        next(frames("127.0.0.1:9"))
    with pytest.raises(UsageError, match="host:page: give HOST:PORT"):
        next(frames("host:page"))


OTHERS = {
    b"HTTP/1.0 404 Not Found\r\n\r\n": "an HTTP server answers with 404 Not Found",
    b"HTTP/1.0 200 OK\r\nContent-Type: text/html\r\n\r\n<html>": "an HTTP server answers with text/html",
    b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{}": "an HTTP server answers with application/json",
    b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{": "that is no HTTP server",
    b"SSH-2.0-OpenSSH_9.2\r\n": "that is no HTTP server",
    b"\xff\0\0\0\0\0\0\0\1\x7f": "that is where workers join a run",
    b"": "that is no HTTP server",  # it hangs up
    None: "no answer within",
}


@pytest.mark.parametrize("says", OTHERS, ids=lambda says: (says or b"silence")[:8].hex())
def test_somebody_else_at_an_address_is_said(says: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_reader, "FIRST_S", 1.0 if says and says[0] == 0xFF else 5.0 if says is not None else 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    visitor, _ = listener.accept()
                except OSError:
                    return
                visitors.append(visitor)
                if says and says[:1] == b"\xff":  # it greets whoever comes
                    visitor.sendall(says)
                elif says is not None:
                    with contextlib.suppress(OSError):
                        visitor.sendall(says if visitor.recv(1 << 16) else b"")
                        visitor.shutdown(socket.SHUT_RDWR)
                    listener.close()

        visitors: list[socket.socket] = []
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        error = CliRunner().invoke(ps_top, ["--once", address]).exception
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        for visitor in visitors:
            visitor.close()
    assert isinstance(error, UnreachableError)
    assert str(error).startswith(f"no page of a run is at {address}: {OTHERS[says]}")


def test_where_workers_join_is_told_from_a_page() -> None:
    """ZeroMQ's own greeting."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        assert record_reader._is_of_zeromq(f"http://127.0.0.1:{port}")


def test_each_command_has_a_version() -> None:
    for name, command in {"ps-top": ps_top, "ps-plot": ps_plot, "ps-probe": ps_probe, "ps-plan": ps_plan}.items():
        assert CliRunner().invoke(command, ["--version"], prog_name=name).output.startswith(f"{name}, version ")


def test_several_records_are_compared_on_logarithmic_axes() -> None:
    """The mode of each run is in the legend; seconds count from the first step, since starting takes what it takes."""
    from narrows.ps.dashboard.plot import compared, plot

    early, late = (history_of({**RUN, "seconds": at}, *beats(at + 20, 0, 10)) for at in (0.0, 50.0))
    figure = compared({"runs/a.jsonl": early, "runs/b.jsonl": late})
    assert [axes.get_yscale() for axes in figure.axes] == ["log"] * 3
    steps, seconds, _ = figure.axes
    assert len(steps.lines) == 2 and [np.asarray(line.get_xdata())[0] for line in seconds.lines] == [0, 0]
    (legend,) = figure.legends
    assert [text.get_text().partition(":")[0] for text in legend.get_texts()] == ["a.jsonl", "b.jsonl"]
    alone = plot(early, "runs/a.jsonl")
    assert alone.axes[0].get_yscale() == "log" and alone.get_suptitle().startswith("a.jsonl: --sync ")


def test_an_event_that_comes_again_and_again_is_one_line() -> None:
    void = [
        {"event": "void", "seconds": 5.0 * n, "worker": n % 2, "text": f"update {n} of {n % 2}"} for n in range(1, 100)
    ]
    joined = [
        {
            "event": "member",
            "seconds": 1.0,
            "worker": n,
            "rank": n,
            "live": n,
            "how": "joined",
            "text": f"worker {n} joined",
        }
        for n in range(3)
    ]
    texts = [text for _, _, text in history_of(RUN, *joined, *void).frame()["events"]]
    assert texts[-2:] == ["update 98 of 0 (49 times)", "update 99 of 1 (50 times)"]
    assert texts[-5:-2] == ["worker 0 joined", "worker 1 joined", "worker 2 joined"]


def test_the_page_has_the_newest_count_of_requests_of_each_shard() -> None:
    asked = {"address": "s3://b/run", "puts": 5, "gets": 4, "lists": 1000, "deletes": 4, "bytes_up": 1, "bytes_down": 1}
    rows = [
        {"event": "mailbox", "seconds": float(n), "shard": n % 2, **asked, "puts": 5 * n, "failed": 0}
        for n in range(1, 9)
    ]
    texts = [text for _, _, text in history_of(RUN, *rows).frame()["events"]]
    assert texts[-2:] == [
        "shard 1 asked s3://b/run: 35 PUT, 4 GET, 1,000 LIST, 4 DELETE",
        "shard 0 asked s3://b/run: 40 PUT, 4 GET, 1,000 LIST, 4 DELETE",
    ]
    assert sum("asked" in text for text in texts) == 2


@pytest.mark.parametrize("width", [70, 80, 100, 120])
def test_no_head_of_the_table_is_cut_on_a_narrow_terminal(width: int) -> None:
    text = shown(history_of(*beats(20, 0, 10), *beats(20, 1, 10)).frame(), width)
    assert "…" not in text and "member" in text and "step" in text and max(map(len, text.splitlines())) <= width
    assert ("busy" in text) == (width >= 120)


def shown(frame: dict[str, Any], width: int = 180) -> str:
    """The text of this frame in a terminal."""
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(frame))
    return console.export_text()


def test_a_terminal_shows_what_the_page_does() -> None:
    odd = summary(20.0, 2, 5)
    odd["rows"][0]["host"] = "\x1b[2Jgone"  # no coordinator lets that in; a record may have been written by anybody
    text = shown(history_of(*beats(20, 0, 10), *beats(20, 1, 10), odd).frame())
    assert "clock 200" in text and "rank 1 host" in text and "100 ms" in text and "\x1b" not in text
