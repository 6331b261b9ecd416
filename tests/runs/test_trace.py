"""ps-worker --trace and ps-plot --trace: a trace of whole runs, and what a script can tell from it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from kit.in_process import Cluster
from kit.scripts import Link, Run, build, loss_of, run, seeded, tree
from kit.trace_format import Reading, checked, flows
from kit.two_levels import family
from torch import nn

from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.ps.command.plot import command as ps_plot
from narrows.ps.process.shard_trace import ShardTrace
from narrows.worker import DistributedOptimizer
from narrows.worker.runtime import launcher_pipe, trace, worker_trace

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6
WORKERS = 3
SHARDS = 2


class KitClock(AwakeClock):
    """The time of a cluster in one process, with the time that bytes take."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.now = cluster.now  # type: ignore[method-assign]


class Recorded:
    """The records that the commands would have written, as files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, dict[str, list[dict[str, Any]]]()

    def tell(self, event: str, **values: Any) -> None:
        """Take an event of a worker, as ps-worker does: the first cluster's workers have a record, and so on."""
        if event == "trace":
            file, rank = f"workers-{values['server'][-1:]}.jsonl", values["worker"]
            self.add(file, {"event": "trace", "seconds": 0.0, "local_rank": rank, **values})

    def add(self, file: str, event: dict[str, Any]) -> None:
        self.lines.setdefault(file, []).append(json.loads(json.dumps(event)))

    def plotted(self) -> list[dict[str, Any]]:
        """Run ps-plot --trace, check what it wrote, and return the events."""
        for file, lines in self.lines.items():
            (self.folder / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = [str(self.folder / file) for file in self.lines]
        result = CliRunner().invoke(ps_plot, ["--trace", *files, str(self.folder / "out.json")], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return checked((self.folder / "out.json").read_text())


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    record = Recorded(tmp_path)
    monkeypatch.setattr(launcher_pipe, "tell", record.tell)
    monkeypatch.setenv("NARROWS_TRACE", "1")
    return record


def train(
    started: Run,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], nn.Module] = build,
    overlap: bool = False,
    slow: int = -1,
) -> None:
    """Train with all workers. `slow`: this one takes 50 ms more for each step."""
    clock = KitClock(started.cluster)
    for module in (trace, worker_trace):
        monkeypatch.setattr(module, "monotonic", lambda: clock.now() / NS)
    for each in started.sessions:
        cast(Link, each.link).clock = clock

    def script(worker: int) -> None:
        model = make()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model, overlap=overlap)
        link = started.sessions[worker].link
        link.call(lambda member, now: [member.beat(now)])  # the I/O thread's heartbeats measure the clocks
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step, worker, len(started.sessions)).backward()
            if worker == slow:
                time.sleep(0.05)
            optimizer.step()
        optimizer.finish()
        started.sessions[worker].close(failed=False)

    started.together(script)


def settings(**more: Any) -> Settings:
    return Settings(**{"workers": WORKERS, "shards": SHARDS, "compress": "dense", **more}).validated()


def test_a_straggler_is_told_from_the_trace(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(settings(sync="bsp")) as started:
        train(started, monkeypatch, slow=1)
    reading = Reading(recorded.plotted())
    assert reading.slowest(reading.spent("compute")) == [1]
    waits = reading.total("narrows: wait")
    assert waits[1] < 0.5 * min(waits[0], waits[2]), "the others wait for it"
    assert len(flows(reading.events)) == WORKERS * SHARDS * STEPS
    assert not [points for points in flows(reading.events) if points[-1]["pid"] != points[0]["pid"]]
    assert reading.early() == dict.fromkeys(range(WORKERS), 0.0)
    parts = {e["name"] for e in reading.events if e["ph"] == "X" and e["cat"] == "step"}
    as_profiled = {f"narrows: {name}" for name in ("step", *trace.PARTS)}
    assert parts == as_profiled - {"narrows: compose"}, "bsp composes nothing"


def test_a_slow_link_is_told_from_the_trace(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    with run(settings(sync="ssp", staleness=1)) as started:
        cast(Link, started.sessions[2].link).rate = 20_000.0
        train(started, monkeypatch)
    reading = Reading(recorded.plotted())
    assert reading.slowest(reading.transfer(), 2.0) == [2]
    pushed = [e["args"]["bytes"] for e in reading.events if e["ph"] == "X" and e["name"].startswith("push ")]
    assert reading.transfer()[2] == pytest.approx(1e6 * sum(pushed) / len(pushed) / 20_000.0, rel=0.5)


def wide() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(9, 300), nn.Tanh(), nn.Linear(300, 1500), nn.Tanh(), nn.Linear(1500, 200))
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_overlap_is_told_from_the_trace(recorded: Recorded, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    with run(settings(sync="bsp", workers=2, shards=1)) as started:
        train(started, monkeypatch, wide, overlap)
    reading = Reading(recorded.plotted())
    assert reading.early() == dict.fromkeys(range(2), float(overlap))
    assert len(flows(reading.events)) == 2 * STEPS


def test_updates_are_followed_over_two_levels(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    root, clusters = family(
        settings(sync="ssp", workers=2, compress="topk:0.5+int8"), settings(sync="bsp", workers=2), 2
    )
    for cluster in clusters:
        cluster.traces.update({shard: ShardTrace(1, shard) for shard in range(SHARDS)})
    with tree(root, *clusters) as started:
        train(started, monkeypatch)
        for index, cluster in enumerate(clusters):
            for shard, its in cluster.traces.items():
                told = its.take(cluster.servers[shard], cluster.now(), last=True)
                recorded.add(f"server-{index}.jsonl", {"event": "trace", "seconds": 0.0, **told})
    events = recorded.plotted()
    up, updates = flows(events, "up"), flows(events)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    workers = [points for points in updates if names[points[0]["pid"]].startswith("worker")]
    above = [points for points in updates if points not in workers]
    assert len(workers) == 2 * 2 * SHARDS * STEPS
    assert len(above) == 2 * SHARDS * (STEPS + 1), "one update a clock, and the last one with all that is owed"
    assert len(up) == 2 * SHARDS * STEPS, "each fold of a clock below leads to a push above"


def test_one_of_n_clocks_is_traced(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWS_TRACE", "3")
    with run(settings(sync="local", local_steps=2)) as started:
        train(started, monkeypatch)
    events = recorded.plotted()
    clocks = {e["args"]["clock"] for e in events if e["ph"] == "X" and e["cat"] == "push"}
    assert clocks == {0} and len(flows(events)) == WORKERS * SHARDS
    steps = [e for e in events if e["name"] == "narrows: step"]
    assert len(steps) == WORKERS * 2, "both steps of the one round"


def test_nothing_is_kept_without_the_flag(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NARROWS_TRACE")
    monkeypatch.setattr(trace.StepTrace, "_keep", partial(pytest.fail, "a span is kept"))
    with run(settings(sync="bsp")) as started:
        train(started, monkeypatch)
        for each in started.sessions:
            assert cast(Link, each.link).pushes is None
    assert not recorded.lines
