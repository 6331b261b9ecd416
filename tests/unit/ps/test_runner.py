"""The runner of one server process: what becomes of a checkpoint whose process is killed, when the next one goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.sockets import Peer, Receipt
from narrows.protocols.wire import decode, encode
from narrows.ps.checkpoints import checkpoint_files
from narrows.ps.journal.journal import Journal, JournalReplay, files
from narrows.ps.process import runner as runner_module
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.runner import ServerRunner
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.shard.model_shard import ClockStage

WORKER = b"a" * m.NAME_BYTES + b"x"
TEMPORARY = "shard 0: checkpoint of clock 2, in a temporary folder while the run lasts"
PLAN = ModelSpec((TensorSpec("w", (4,), "float32"),), "", ((0,),)).packed()


class Nowhere:
    """A port that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        self.sent.append(decode(frames))
        return Receipt()

    def receive(self, limit_ms: int) -> list[tuple[Peer, list[Buffer]]]:
        return []

    def wake(self) -> None: ...

    def hang_up(self, address: str) -> None: ...

    def close(self) -> None: ...


class Life:
    """The server process of a run of one worker, which is asked for a checkpoint of clock 2."""

    def __init__(self, folder: Path, both: tuple[int, ...]) -> None:
        settings = Settings(sync="bsp", push="update", checkpoint_every=0.001).validated()
        self.config = ServerConfig(0, settings, "", "", 1 << 20, str(folder), False, journal=both)
        self.both, self.port, self.clock = both, Nowhere(), 0
        self.runner = ServerRunner(self.config, self.port, 5)
        self.happens(EventKind.START)
        self.says(m.Hello("token", "here"))
        welcome = next(each for each in self.port.sent if isinstance(each, m.Welcome))
        self.says(m.Declare(0, welcome.epoch, PLAN))
        self.epoch = next(each.epoch for each in self.port.sent if isinstance(each, m.Ready))
        self.says(m.Follow(0, self.epoch, 0, -1, 1))
        self.says(m.FirstWeights(0, self.epoch, 0, 1, 0, 4, RAW, bytes(16)))
        self.push()
        for later in (NS, 2 * NS):
            self.happens(EventKind.TICK, later)

    def happens(self, kind: EventKind, later_ns: int = 0) -> None:
        self.runner.happen(MachineEvent(kind, self.runner.clock.now() + later_ns))

    def says(self, message: m.Message) -> None:
        self.runner.receive(WORKER, encode(message))

    def push(self) -> None:
        self.says(m.Push(0, self.epoch, self.clock, 0, 1, 0, 4, 1, b"", RAW, bytes(16)))
        self.clock += 1

    def next(self) -> ServerRunner:
        return ServerRunner(replace(self.config, replay=True), Nowhere(), 5)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    both = files()
    yield Life(tmp_path, both)
    for file in both:
        os.close(file)


def written(runner: ServerRunner) -> None:
    assert runner.disk.writer is not None
    runner.disk.writer.wait()
    runner.wrote()


def said(capfd: pytest.CaptureFixture[str], name: str) -> list[Any]:
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    return [row["values"] for row in rows if row.get("name") == name]


def test_a_resumed_run_begins_after_the_one_before_though_the_clock_was_set_back(life: Life) -> None:
    """By a day: epochs begin with the time. Messages of the run before must count for nothing."""
    life.push()
    written(life.runner)
    before = life.runner.server.coordinator
    assert before is not None and checkpoint_files.clocks(Path(life.config.checkpoint_dir), 0)
    day = 24 * 60 * 60 * 1000 << 10
    earlier = replace(life.config, first_epoch=max(1, life.config.first_epoch - day), resume=True)
    after = ServerRunner(earlier, Nowhere(), 5).server.coordinator
    assert after is not None and after.run.first_epoch > before.run.epoch + day


@pytest.mark.parametrize("stage", ClockStage)
def test_a_checkpoint_that_was_lost_is_written_again_while_the_arrays_are_those_of_its_clock(
    stage: ClockStage, life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between FOLD and PUBLISH they have what belongs to the next one."""
    monkeypatch.setattr(life.runner.disk.writer, "write", lambda *words: None)  # killed before it was on disk
    life.push()

    def staged(journal: Journal, server: Any, load: Any, note: Any, plain: Any = Journal.replay) -> JournalReplay:
        done: JournalReplay = plain(journal, server, load, note)
        server.shard.model_shard.stage = stage
        return done

    monkeypatch.setattr(Journal, "replay", staged)
    after = life.next()
    written(after)
    again = stage in (ClockStage.FOLD, ClockStage.CHECKPOINT)
    assert checkpoint_files.clocks(tmp_path, 0) == ((2,) if again else ())
    assert (after.server.shard.checkpoint_tried, after.server.shard.checkpoints) == (2, [2] if again else [])


def test_one_is_known_to_be_lost_though_the_journal_has_begun_anew_since_it_was_asked_for(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the coordinator would wait for it, and never ask for another."""
    monkeypatch.setattr(life.runner.disk.writer, "write", lambda *words: None)
    life.push()
    life.runner.anew = True
    life.happens(EventKind.TICK)
    after = life.next()
    written(after)
    assert after.server.shard.checkpoint_tried == 2 and checkpoint_files.clocks(tmp_path, 0) == (2,)


@pytest.mark.parametrize("on_disk", [True, False])
def test_one_that_nobody_was_told_of_is_announced_if_it_is_there(
    on_disk: bool, life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next clock has come since, so it cannot be written again; the coordinator may ask for another."""
    assert life.runner.disk.writer is not None
    if not on_disk:
        monkeypatch.setattr(life.runner.disk.writer, "write", lambda *words: None)
    life.push()
    life.push()
    life.runner.disk.writer.wait()  # and killed before the loop looks
    assert not said(capfd, "checkpoint")
    shard = life.next().server.shard
    assert (shard.checkpoint_tried, shard.checkpoints) == (2, [2] if on_disk else [])
    assert [row["clock"] for row in said(capfd, "checkpoint")] == ([2] if on_disk else [])


@pytest.mark.parametrize(("keeps", "text"), [(True, None), (False, TEMPORARY)])
def test_one_that_goes_with_the_run_is_announced_as_such(
    keeps: bool, text: str | None, life: Life, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under --checkpoint-dir none nobody finds a file of it."""
    life.runner.disk.config = replace(life.config, keeps=keeps)
    life.push()
    written(life.runner)
    (row,) = said(capfd, "checkpoint")
    assert row == {"shard": 0, "clock": 2} | ({"text": text} if text else {})


def test_the_last_one_is_announced_once_more(life: Life, capfd: pytest.CaptureFixture[str]) -> None:
    """Who waits for it may have lost the word with the process."""
    life.says(m.Leave("token", 1))
    written(life.runner)
    assert life.runner.server.over and [row["clock"] for row in said(capfd, "checkpoint")] == [1]
    after = life.next()
    assert not after.running and [row["clock"] for row in said(capfd, "checkpoint")] == [1]


def test_memory_is_given_back_once_the_first_weights_are_here(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(runner_module, "give_back", lambda: given.append(life.clock))
    for _ in range(3):
        life.runner._turn()
    life.push()
    life.runner._turn()
    assert given == [1]
    monkeypatch.undo()
    runner_module.give_back()


def test_no_memory_is_given_back_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "give_back", lambda: pytest.fail("there are no weights"))
    config = ServerConfig(0, Settings().validated(), "", "", 1 << 20, str(tmp_path), False)
    ServerRunner(config, Nowhere(), 5)._turn()
