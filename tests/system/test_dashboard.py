"""The page of a run in Chromium; figures of a real run, in its records and on its page."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from kit.browser import browser, missing
from kit.processes import SCRIPT, started, until
from kit.record_events import BEAT_S, RUN, beats, figures, summary

from narrows.ps.dashboard.history import RunHistory
from narrows.ps.dashboard.record_reader import RecordReader, frames
from narrows.ps.dashboard.run_watch import RunWatch

EVIL = "<img src=x onerror=document.body.dataset.evil=1>"


@pytest.mark.skipif(bool(missing()), reason=missing() or "it is here")
def test_the_page_in_chromium() -> None:
    watch = RunWatch()
    watch.open_sites("0", "", False)
    events = [RUN, *beats(100, 0, 10), *beats(100, 1, 4), {"event": "above", "seconds": 99.0, "text": EVIL}]
    events += [summary(2.5 * beat, rank, 25 * beat) for beat in (1, 2) for rank in range(2, 1000)]
    events[1]["rows"][0]["host"] = events[-1]["rows"][0]["host"] = EVIL
    for event in events:
        watch.history.take(event)
    try:
        with browser() as page:
            page.scheme("light")
            page.open(watch.sites[0].url)
            page.until("return document.body.dataset.frameMs")
            tiles = page.run("return [...document.querySelectorAll('#tiles div')].map((each) => each.textContent)")
            assert f"clock{watch.history.clock:,}" in tiles and "workers1000" in tiles
            assert any(tile.startswith("samples/s") for tile in tiles)
            assert page.run("return document.querySelectorAll('#members tr').length") == 1000
            assert page.run("return document.querySelectorAll('.uplot canvas').length") == 3
            assert page.run("return document.querySelector('#events').textContent").find(EVIL) >= 0
            assert page.run("return document.querySelector('#members tr:last-child').textContent").find(EVIL) >= 0
            assert page.run("return document.images.length") == 0
            assert not page.run("return document.body.dataset.evil")
            hosts = (
                "return [...new Set(performance.getEntriesByType('resource').map((each) => new URL(each.name).host))]"
            )
            assert page.run(hosts) == [watch.sites[0].url.split("/")[2]]
            ink = "const c = document.querySelector('canvas'); const d = c.getContext('2d')"
            painted = f"{ink}.getImageData(0, 0, c.width, c.height).data; return d.some((each) => each > 0)"
            page.until(painted)
            light = page.run("return getComputedStyle(document.body).backgroundColor")
            page.scheme("dark")
            assert page.run("return getComputedStyle(document.body).backgroundColor") != light
            before = page.run("return document.querySelector('#tiles b').textContent")
            for beat in range(1, 9):
                with watch.lock:
                    for rank in range(1000):
                        watch.history.take(summary(100 + BEAT_S * beat, rank, 2000 + beat))
                page.until(f"return document.querySelector('#tiles b').textContent !== '{before}'")
                before = page.run("return document.querySelector('#tiles b').textContent")
                # A busy machine holds up one frame, not eight.
                if float(page.run("return document.body.dataset.frameMs")) < 1000:
                    break
            else:
                raise AssertionError("none of eight frames of 1,000 members took less than a second")
            assert page.complaints() == []
    finally:
        watch.close()


def test_figures_are_the_same_in_both_records_and_on_the_page(tmp_path: Path) -> None:
    script = tmp_path / "task.py"
    script.write_text(SCRIPT % "pass")
    serve = ("ps-serve", "--bind", "tcp://127.0.0.1:0", "--checkpoint-dir", "none", "--lease", "2", "--sync", "ssp")
    looks = ("--ready-file", str(tmp_path / "ready"), "--record", str(tmp_path / "server"), "--dashboard", "0")
    with started(*serve, *looks) as server:
        until((tmp_path / "ready").exists, "the server")
        url = until(lambda: [line for line in server.out.splitlines() if "at a glance" in line], "the page")[0].split()[
            -1
        ]
        seen: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: seen.extend(frames(url)), daemon=True)
        thread.start()
        address = json.loads((tmp_path / "ready").read_text())["address"]
        with started(
            "ps-worker", "--server", address, "--record", str(tmp_path / "worker"), str(script), "40"
        ) as worker:
            assert worker.wait() == 0, str(worker)
        assert server.wait() == 0, str(server)
        thread.join(10)
    of_server = RecordReader(str(tmp_path / "server"))
    of_server.read()
    assert figures(seen[-1]) == figures(of_server.history.frame())
    steps = [json.loads(line) for line in (tmp_path / "worker").read_text().splitlines()]
    done = steps[-1]
    steps = [step for step in steps if step["event"] == "step"]
    last = [json.loads(line) for line in (tmp_path / "server").read_text().splitlines()]
    (row,) = [line for line in last if line["event"] == "summary"][-1]["rows"]
    assert row["steps"] == len(steps) == 40 and row["clock"] == steps[-1]["clock"] and row["loss"] == steps[-1]["loss"]
    assert sum(row["stale"]) == 40 and row["staleness"] == steps[-1]["staleness"]
    assert sum(step["push_bytes"] for step in steps) <= row["bytes_up"] <= done["bytes_up"]
    spent = row["compute_seconds"] + row["encode_seconds"] + row["wait_seconds"]
    assert spent == pytest.approx(sum(step["step_seconds"] for step in steps), abs=1e-3)
    assert row["encode_seconds"] == pytest.approx(sum(step["encode_seconds"] for step in steps), abs=1e-3)
    of_worker = RunHistory()
    for line in (tmp_path / "worker").read_text().splitlines():
        of_worker.take(json.loads(line))
    assert of_worker.clock == of_server.history.clock and of_worker.loss == of_server.history.loss
