"""A run with a start, in processes: shards are killed, a server is lost, a run is resumed; one worker trains as one process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from kit.processes import SCRIPT, Worker, finished, serving, trained_alone
from kit.scripts import distance, flat
from system.test_shard_kills import Killer, undisturbed
from system.test_standby import ends_with, goes_on, stands_by

RATE = 0.001
START = 30
FLAGS = ("--sync", "ssp", "--shards", "2", "--start-steps", str(START))
OVER = f"plan 2 from clock {START} on: --sync ssp"


def like_one_process(worker: Worker) -> None:
    """The momentum went from the servers to the worker, else the model would be another one."""
    assert worker.clock > START
    assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-5


def test_shards_that_are_killed_about_its_end_lose_nothing() -> None:
    with serving(*FLAGS) as server:
        worker = Worker(server.address, rate=RATE)
        worker.train(START - 10)
        killer = Killer(server, (1, 0, 1, 0), seed=3)
        while killer.is_alive() or worker.clock < START + 10:
            clock = worker.clock
            worker.step()
            assert worker.clock in (clock, clock + 1), "steps are not done again"
            time.sleep(0.02)
        killer.end()
        worker.close()
        undisturbed(server, 4)
        assert server.command.out.count(OVER) == 1, server.command
    like_one_process(worker)


@pytest.mark.parametrize("lost_at", [START - 10, START, START + 10])
def test_a_standby_goes_on_with_it(lost_at: int) -> None:
    with serving(*FLAGS, "--replicas", "1") as server, serving("--standby", server.address) as standby:
        worker = Worker(server.address, rate=RATE)
        worker.train(5)
        stands_by(standby, server)
        while worker.clock < lost_at:
            worker.step()
            time.sleep(0.01)
        server.kill()
        goes_on(worker, START + 15 - lost_at)
        ends_with(standby, worker)
        assert worker.engine.settings.start_clock in (START, START + 1), "a change that was under way is made anew"
    like_one_process(worker)


@pytest.mark.parametrize("stopped_at", [START - 10, START + 10])
def test_a_server_that_is_resumed_goes_on_with_it(stopped_at: int, tmp_path: Path) -> None:
    folder = ("--checkpoint-dir", str(tmp_path / "run"))
    with serving(*FLAGS, *folder) as server:
        worker = Worker(server.address, rate=RATE)
        worker.train(stopped_at)
        os.kill(server.command.pid, signal.SIGINT)
        server.command.wait()
        worker.session.link.close()
    with serving(*FLAGS, *folder, "--resume") as server:
        again = Worker(server.address, rate=RATE)
        assert again.engine.settings.starting == (stopped_at < START)
        while again.clock < START + 15:
            again.step()
        again.close()
        assert server.command.wait() == 0, server.command
        assert server.command.out.count(OVER) == (stopped_at < START), server.command
    if stopped_at < START:
        like_one_process(again)


def test_one_command_has_it_too(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT % "pass")
    words = ("ps-worker", "-n", "2", "--sync", "local", "--local-steps", "4", "--start-steps", "8", str(path), "24")
    code, out, err = finished(*words, cwd=tmp_path)
    assert code == 0 and "plan 2 from clock 8 on: --sync local" in out + err, out + err
    code, out, err = finished(*words[:-4], "--start-steps", "0", str(path), cwd=tmp_path)
    assert code == 2 and "--start-steps 0: give a value from 1 to" in err


def test_a_cluster_has_none(tmp_path: Path) -> None:
    code, _, err = finished("ps-serve", "--parent", "tcp://127.0.0.1:1", "--start-steps", "8", "--sync", "ssp")
    assert code == 2 and "--start-steps 8: the first steps of a cluster may be late ones of its parent's run" in err
    with serving(*FLAGS[:2], "--start-steps", "8") as root:
        code, out, err = finished("ps-serve", "--bind", "tcp://127.0.0.1:0", "--parent", root.address, "--sync", "bsp")
        assert (
            code != 0 and "it begins with pushed gradients (--start-steps), and a cluster pushes updates" in out + err
        )
