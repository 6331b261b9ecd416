"""A shard process that dies is started again, and where it has no journal the run goes on from its newest checkpoint."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from kit.fold_logs import whole_run
from kit.processes import (
    GONE_S,
    LIMIT_S,
    SCRIPT,
    Worker,
    alive,
    descendants,
    finished,
    free_ports,
    parent,
    serving,
    small_model,
    started,
    trained_alone,
    until,
)
from kit.scripts import distance, flat
from safetensors.torch import load_file

from narrows.protocols.addresses import local_endpoint
from narrows.ps.checkpoints import checkpoint_files, whole_model
from narrows.ps.checkpoints.checkpoint_writer import CheckpointWriter
from narrows.ps.command.restart_policy import RESTARTS_MAX
from narrows.ps.process.main import first_line

TRIES_MAX = 10  # of stopping a fork server before it forks again, 2 s each


def stepped(worker: Worker, done: Callable[[], bool]) -> Callable[[], bool]:
    """One more step, and then whether it is done."""

    def step() -> bool:
        worker.step()
        return done()

    return step


def written(folder: Path, shards: int = 2) -> int:
    """The newest clock that all shards have on disk."""
    return max(set.intersection(*(set(checkpoint_files.clocks(folder, shard)) for shard in range(shards))), default=-1)


@pytest.mark.parametrize("index", [0, 1])
def test_bsp_is_what_it_would_have_been(index: int, tmp_path: Path) -> None:
    """Killed twice, soon after it began: steps are done again, and nothing else is changed."""
    flags = ("--sync", "bsp", "--shards", "2", "--no-journal", "--checkpoint-dir", str(tmp_path))
    with serving(*flags) as server:
        worker = Worker(server.address)
        told = [f"shard {shard}: checkpoint of clock " for shard in range(2)]
        until(
            stepped(worker, lambda: all(line in server.command.out for line in told)),
            "the one with which the run began",
        )
        server.kill_shard(index)
        until(stepped(worker, lambda: server.command.out.count(" joined at clock ") > 1), "the second life")
        worker.train(5)
        server.kill_shard(index)
        until(stepped(worker, lambda: server.command.out.count(" joined at clock ") > 2), "the third life")
        worker.train(10)
        worker.close()
        assert server.command.wait() == 0, server.command
        said = server.command.err + server.command.out
    assert said.count(f"shard {index} died (signal 9 (SIGKILL)) and is started again") == 2
    whole_model = small_model()
    whole_model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert distance(flat(whole_model), trained_alone(worker.clock)) < 1e-5


def test_shard_0_may_die_again_before_a_new_checkpoint(tmp_path: Path) -> None:
    """Each life of its coordinator begins later than the one before, also from the same checkpoint."""
    where = ("--checkpoint-dir", str(tmp_path), "--checkpoint-every", "3")
    flags = ("--sync", "bsp", "--shards", "2", "--no-journal", *where)
    with serving(*flags) as server:
        worker = Worker(server.address)
        until(stepped(worker, lambda: written(tmp_path) >= 0), "a checkpoint")
        for lives in (2, 3):
            server.kill_shard(0)
            again = stepped(worker, lambda lives=lives: server.command.out.count(" joined at clock ") == lives)  # type: ignore[misc]
            until(again, "the next life")
            worker.train(30)  # less than the 3 s to the next checkpoint
        worker.close()
        assert server.command.wait() == 0, server.command
    whole_model = small_model()
    whole_model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert distance(flat(whole_model), trained_alone(worker.clock)) < 1e-5


@pytest.mark.parametrize(("flags", "index"), [
    ("--sync ssp --compress topk:0.2+int8", 1),
    ("--sync local --local-steps 4 --fragments 2 --compress 2bit", 1),
])  # fmt: skip
def test_every_mode_goes_on(flags: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no folder named: a shard that is started again goes on from a folder that the run removes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serving(*flags.split(), "--shards", "2", "--no-journal", "--checkpoint-every", "0.2") as server:
        (scratch,) = tmp_path.glob("narrows-*")
        worker = Worker(server.address)
        until(stepped(worker, lambda: written(scratch) > 0), "a checkpoint")
        server.kill_shard(index)
        until(stepped(worker, lambda: server.command.out.count(" joined at clock ") > 1), "the second life")
        reached = worker.clock
        worker.train(24)
        worker.close()
        assert server.command.wait() == 0, server.command
        assert worker.clock > reached
        assert not scratch.exists() and "the model" not in server.command.out


def test_two_levels_go_on() -> None:
    every, begun = ("--no-journal", "--checkpoint-every", "0.2"), threading.Event()
    below = ("--sync", "bsp", "--push", "update", *every)
    with (
        serving("--sync", "ssp", "--workers", "2", *every) as root,
        serving(*below, "--parent", root.address) as first,
        serving(*below, "--parent", root.address) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        logs = [pool.submit(whole_run, server.address, 300, begun) for server in (first, second)]
        assert begun.wait(LIMIT_S), f"{root.command}\n{first.command}\n{second.command}"
        for struck in (first, root):
            struck.kill_shard(0)
        for log in logs:
            log.result()
        for command in (first.command, second.command, root.command):
            assert command.wait() == 0, f"{root.command}\n{first.command}\n{second.command}"


def test_a_shard_that_is_killed_while_it_starts_is_started_again() -> None:
    with started("ps-serve", "--bind", "tcp://127.0.0.1:0", "--shards", "2", "--checkpoint-dir", "none") as command:

        def shard() -> list[int]:
            names = {pid: Path(f"/proc/{pid}/comm") for pid in descendants(command.pid)}
            return [pid for pid, name in names.items() if name.exists() and name.read_text() == "ps-shard-0\n"]

        (pid,) = until(shard, "shard 0")
        os.kill(pid, signal.SIGKILL)
        died = "shard 0 died (signal 9 (SIGKILL)) and is started again"  # it may have been ready
        until(lambda: died in command.err and "ps-worker --server" in command.out, command)
        command.process.send_signal(signal.SIGINT)
        assert command.wait(GONE_S) == 130, str(command)


def test_what_a_shard_is_told_while_it_starts_is_left_for_its_runner() -> None:
    """One that is started again may be told more before it has read what it is."""
    there, here = os.pipe()
    os.write(here, b'{"index": 0}\nstop\n')
    os.close(here)
    assert first_line(there) == b'{"index": 0}' and os.read(there, 100) == b"stop\n"
    assert first_line(there) == b""
    os.close(there)


def test_a_worker_that_waits_when_a_shard_is_killed_at_the_start_is_let_in() -> None:
    """The process that forks the others stands still, so shard 1 is not there yet, and shard 0 lets nobody in."""
    port = free_ports(2)
    where, address = ("--bind", f"tcp://127.0.0.1:{port}"), f"tcp://127.0.0.1:{port}"
    with (
        ThreadPoolExecutor(1) as pool,
        started("ps-serve", *where, "--shards", "2", "--checkpoint-dir", "none") as command,
    ):

        def shard() -> list[int]:
            names = {pid: Path(f"/proc/{pid}/comm") for pid in descendants(command.pid)}
            return [pid for pid, name in names.items() if name.exists() and name.read_text() == "ps-shard-0\n"]

        (pid,) = until(shard, "shard 0")
        forker = parent(pid)
        assert forker != command.pid
        try:
            stopped_once(forker, lambda: listens(port))
            joins = pool.submit(Worker, address)
            until(lambda: connected(port), "the worker to dial shard 0")
            assert not joins.done() and "shard 1" not in command.out
            os.kill(pid, signal.SIGKILL)
        finally:
            os.kill(forker, signal.SIGCONT)
        worker = joins.result(LIMIT_S)
        assert "shard 0 died (signal 9 (SIGKILL)) and is started again" in command.err
        worker.train(5)
        worker.close()
        assert command.wait() == 0, command


def stopped_once(forker: int, done: Callable[[], bool]) -> None:
    """Stop the fork server once it has told ps-serve of shard 0: until then, no config comes to that shard."""
    for _ in range(TRIES_MAX):
        os.kill(forker, signal.SIGSTOP)
        with suppress(AssertionError):
            until(done, "shard 0 to listen", 2.0)
            return
        os.kill(forker, signal.SIGCONT)  # for less time than shard 0 takes to listen and ps-serve to ask for shard 1
        time.sleep(0.002)
    raise AssertionError("shard 0 does not listen")


def connected(port: int) -> bool:
    """Somebody of this machine is connected to the shard that has this port."""
    path = local_endpoint(port).removeprefix("ipc://")
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return any(row[5] == "03" and row[-1] == path for row in rows)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_it_is_not_started_again_for_ever(tmp_path: Path) -> None:
    with serving("--checkpoint-every", "0.1", "--checkpoint-dir", str(tmp_path)) as server:
        worker = Worker(server.address)
        until(stepped(worker, lambda: "shard 0: checkpoint of clock " in server.command.out), "a checkpoint")
        for _ in range(RESTARTS_MAX):
            server.kill_shard(0)
        pids = server.pids
        os.kill(pids[1], signal.SIGKILL)
        assert server.command.wait(GONE_S) == 1, server.command
        (clock,) = re.findall(
            rf"ps-serve: shard 0 died and the run ends; --checkpoint-dir {tmp_path} --resume goes on from clock (\d+)\n",
            server.command.err,
        )
        assert int(clock) in checkpoint_files.clocks(tmp_path, 0)
        worker.session.link.close()
        until(lambda: not any(map(alive, pids)), "all processes to be gone", GONE_S)


# The disk.


def test_a_disk_that_refuses_ends_nothing(tmp_path: Path) -> None:
    """It is said once, and the next checkpoints are written when it takes them again."""
    folder = tmp_path / "here"
    flags = ("--sync", "bsp", "--checkpoint-every", "0.1", "--checkpoint-dir", str(folder))
    with serving(*flags) as server, Worker(server.address) as worker:
        until(stepped(worker, lambda: written(folder, 1) > 0), "a checkpoint")
        shutil.rmtree(folder)
        folder.write_text("no folder")
        until(stepped(worker, lambda: "cannot write" in server.command.out), "the trouble to be told")
        worker.train(30)
        folder.unlink()
        until(stepped(worker, lambda: written(folder, 1) > 0), "another checkpoint")
        assert len(re.findall(r"shard 0 cannot write a checkpoint and tries again: .*here: ", server.command.out)) == 1
        assert "Traceback" not in server.command.err


def test_a_full_disk_loses_what_was_not_written_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, values = CheckpointWriter(tmp_path, 0), np.arange(4, dtype=np.float32)
    facts = {"publication": 0, "shards": 1, "plan": b"", "buffers": b""}

    def write(clock: int) -> tuple[int, tuple[int, ...], str]:
        writer.write(clock, {"x": values, "p": values}, facts)
        writer.wait()
        written = writer.take()
        assert written is not None and written.took_ns > 0 and writer.take() is None
        return written.clock, written.kept, written.trouble

    assert write(3) == (3, (3,), "")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("narrows.ps.checkpoints.checkpoint_files.os.fsync", full)
        assert write(5) == (5, (3,), f"{tmp_path}: No space left on device")
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0.clock-3.safetensors"], "it needs the room"
    assert write(7) == (7, (3, 7), "")


def test_what_is_written_is_a_copy(tmp_path: Path) -> None:
    writer, values = CheckpointWriter(tmp_path, 0), np.zeros(1 << 20, np.float32)
    writer.write(1, {"x": values, "p": values}, {"publication": 0, "shards": 1, "plan": b"", "buffers": b""})
    values += 1
    writer.forget()
    arrays, _ = checkpoint_files.read(tmp_path, 0, 1)
    assert not arrays["x"].any() and not arrays["p"].any()


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path: Path) -> None:
    flags = ("--sync", "bsp", "--shards", "2", "--checkpoint-every", "0.1", "--checkpoint-dir", str(tmp_path))
    with serving(*flags) as server:
        worker = Worker(server.address)
        until(stepped(worker, lambda: len(checkpoint_files.clocks(tmp_path, 1)) >= 2), "two checkpoints")
        server.kill()
        worker.session.link.close()
    *_, before, newest = checkpoint_files.clocks(tmp_path, 1)
    path = checkpoint_files.path_of(tmp_path, 1, newest)
    path.write_bytes(path.read_bytes()[:-5])
    with serving(*flags, "--resume") as server, Worker(server.address) as again:
        assert f"{path} is damaged" in server.command.out
        assert f"ps-serve: goes on from the checkpoint of clock {before}\n" in server.command.out
        assert again.clock == before


def test_an_ended_run_is_not_resumed_but_under_its_name_or_for_more_steps(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "kept"
    script.write_text(SCRIPT % "pass")
    words = ("ps-worker", "--sync", "bsp", "--push", "update", "--checkpoint-dir", str(folder))
    assert finished(*words, "--run-id", "one", str(script), "5")[0] == 0
    first = (folder / "model.safetensors").read_bytes()
    for more in ((), ("--run-id", "two"), ("--steps", "5")):
        code, _, err = finished(*words, "--resume", *more, str(script), "5")
        assert code == 2 and f"the run in {folder} has ended, after 5 steps: name another" in err, (more, err)
        assert (folder / "model.safetensors").read_bytes() == first
    code, _, err = finished(*words, "--resume", "--run-id", "one", str(script), "5")  # a manager that starts it again
    assert code == 0 and "workers of run one that join again get its model" in err, err
    code, _, err = finished(*words, "--resume", "--steps", "8", str(script), "8")
    assert code == 0 and whole_model.end_of(folder) == {"clock": 8, "steps": 8, "run_id": ""}, err
    code, _, err = finished(*words, "--fresh-run", str(script), "3")
    assert code == 0 and whole_model.end_of(folder) == {"clock": 3, "steps": 3, "run_id": ""}, err
    assert whole_model.end_of(folder / "earlier-1") == {"clock": 8, "steps": 8, "run_id": ""}
