"""A shard that hangs without ending: no sign of life comes, and another process takes its place."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from kit.processes import Worker, trained_alone
from kit.scripts import distance, flat

from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.connections import STRANGER_BYTES_MAX
from narrows.ps.command import console, shard_supervisor
from narrows.ps.command.restart_policy import RestartPolicy
from narrows.ps.command.shard_supervisor import ShardSupervisor
from narrows.ps.process.access_control import FLIGHT_TIMES, AccessControl
from narrows.ps.process.watchdog import BEAT_S, BYTES_PER_S, HANG_S, Watchdog

SOON_S = 3.0


def test_one_that_is_stopped_is_killed_and_another_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As after a kill: nothing is lost, and nothing is done twice."""
    said: list[str] = []
    heard = RestartPolicy.expect
    for where in (shard_supervisor, console):
        monkeypatch.setattr(where, "say", lambda text, **more: said.append(text))
    monkeypatch.setattr(RestartPolicy, "expect", lambda lives, shard, within_s: heard(lives, shard, SOON_S))
    ours = ShardSupervisor(Settings(sync="ssp", shards=2, workers=1).validated())
    ours.host = "127.0.0.1"
    ours.config = replace(ours.config, first_epoch=1, checkpoint_dir=str(tmp_path), keeps=False, secret="s" * 32)
    try:
        ours.prepare()
        ours.start()
        watching = threading.Thread(target=ours.watch, daemon=True)
        watching.start()
        worker = Worker(f"tcp://127.0.0.1:{ours.ports[0]}", rate=0.001)
        worker.train(5)
        os.kill(ours.pids[1], signal.SIGSTOP)
        worker.train(5)
        worker.close()
        watching.join(30)
        assert not watching.is_alive()
    finally:
        ours.kill()
    assert [text for text in said if text.startswith("shard 1 ") and "goes on" not in text] == [
        "shard 1 has given no sign of life for too long, and is killed",
        "shard 1 died (signal 9 (SIGKILL)) and is started again",
    ], said
    assert sum("goes on where it was" in text for text in said) == 1, said
    assert distance(flat(worker.model), trained_alone(worker.clock, 0.001)) < 1e-5


def test_time_in_which_all_were_stopped_does_not_count() -> None:
    at = [0]
    lives = RestartPolicy(2)
    lives.clock = AwakeClock(lambda: at[0])
    for shard in range(2):
        lives.expect(shard, HANG_S)
    at[0] += 3600 * NS
    assert not lives.silent()
    late: list[int] = []
    for _ in range(int(HANG_S / 0.1) + 5):
        at[0] += NS // 10
        lives.expect(0, HANG_S)
        late += lives.silent()
    assert late == [1], "it is named once"


def test_a_shard_says_how_long_it_may_take(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Longer where there is more to read, before its arrays are known, and in proportion to these then."""
    (tmp_path / "shard-0.clock-7.safetensors").write_bytes(bytes(1_000_000))
    gate = AccessControl("", "", "secret", "")
    for nbytes, folder in ((0, None), (0, tmp_path), (int(1e9), tmp_path)):
        pulse = Watchdog(gate, 0, folder)
        pulse.beat(lambda nbytes=nbytes: nbytes)  # type: ignore[misc]
        pulse.beat(lambda: pytest.fail("nothing is due"))  # all arrays would be looked at, twenty times a second
        assert gate.connections.bytes_most == STRANGER_BYTES_MAX + FLIGHT_TIMES * nbytes
    told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [each["within"] - HANG_S for each in told] == pytest.approx([0, 1e6 / BYTES_PER_S, 1e9 / BYTES_PER_S])
    assert BEAT_S < HANG_S < Timing().lost_ns / NS
