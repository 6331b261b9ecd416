"""Signals as managers send them: to every process of a job at once, twice, or by the end of a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kit.processes import BIN, GONE_S, SCRIPT, Worker, alive, descendants, environment, serving, started, until
from safetensors import safe_open

from narrows.protocols.errors import ServerLostError


def to_all(pid: int, number: int) -> list[int]:
    """As Slurm does with the processes of a step, and systemd with those of a service."""
    pids = [pid, *descendants(pid)]
    for each in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)
    return pids


def test_ps_serve_decides_alone_what_a_signal_to_all_its_processes_means(tmp_path: Path) -> None:
    with serving("--shards", "2", "--checkpoint-dir", str(tmp_path)) as server:
        worker = Worker(server.address)
        worker.train(5)
        to_all(server.command.pid, signal.SIGUSR1)  # which shows the run, and ends nothing
        until(lambda: "the run:" in server.command.out, server.command)
        worker.train(2)
        pids = to_all(server.command.pid, signal.SIGTERM)
        os.kill(server.command.pid, signal.SIGTERM)  # again, from the shell of a batch script: it is the same one
        with pytest.raises(ServerLostError, match="the server was stopped at clock "):
            worker.train(100_000)
        worker.session.link.close()
        assert server.command.wait(GONE_S) == 128 + signal.SIGTERM, server.command
        until(lambda: not any(map(alive, pids)), "all processes to be gone", GONE_S)
        assert "was killed" not in server.command.out
    assert (tmp_path / "model.safetensors").exists(), server.command


def test_a_ps_worker_that_is_embedded_ends_with_its_stdin(tmp_path: Path) -> None:
    """Its script is interrupted, and has the signals of any other."""
    (tmp_path / "script.py").write_text(
        "import signal, time\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL\n"
        "try:\n    print('begins', flush=True)\n    for _ in range(600): time.sleep(0.1)\n"
        "except KeyboardInterrupt: print('told', flush=True)\n"
    )
    words = [str(BIN / "ps-worker"), "--fresh", "--server", "tcp://127.0.0.1:1", str(tmp_path / "script.py")]
    env = environment({"NARROWS_EMBEDDED": "1"})
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as command:
        try:
            assert command.stdout is not None and command.stdin is not None
            assert command.stdout.readline() == "begins\n"
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                command.send_signal(number)  # which it leaves to the process that it is embedded in
            command.stdin.close()
            assert command.wait(GONE_S) == 128 + signal.SIGTERM
            assert command.stdout.read() == "told\n"
        finally:
            command.kill()


def test_a_terminal_that_is_closed_ends_ps_serve_with_a_checkpoint(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    ready, folder = tmp_path / "ready", tmp_path / "checkpoints"
    words = ("--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready), "--checkpoint-dir", str(folder))
    command = subprocess.Popen(
        ["setsid", "--ctty", str(BIN / "ps-serve"), *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment()
    )  # fmt: skip
    os.close(theirs)
    try:
        until(ready.exists, "ps-serve")
        worker = Worker(json.loads(ready.read_text())["address"])
        worker.train(5)
        os.close(ours)
        with pytest.raises(ServerLostError, match="the server was stopped at clock "):
            worker.train(100_000)
        worker.session.link.close()
        assert command.wait(GONE_S) == 128 + signal.SIGHUP
    finally:
        for pid in descendants(command.pid) if command.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        command.kill()
        command.wait()
    assert (folder / "model.safetensors").exists()


HANDLES = """
import signal, torch
from narrows.worker import DistributedOptimizer
told = []
if BEFORE:
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
if not BEFORE:
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    if step == 5:
        print("trains", flush=True)
    if told:
        print("saves at", *told, flush=True)
        break
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_handler_of_the_script_is_called(before: bool, tmp_path: Path) -> None:
    """As under plain python, whether it was set before the session was there or after that."""
    script = tmp_path / "script.py"
    script.write_text(HANDLES.replace("BEFORE", str(before)))
    with started("ps-worker", str(script)) as command:
        until(lambda: command.out == "trains\n" or command.process.poll() is not None, command)
        os.kill(command.pid, signal.SIGTERM)
        assert command.wait(GONE_S) == 128 + signal.SIGTERM, command
        assert command.out == f"trains\nsaves at {signal.SIGTERM:d}\n" and "Traceback" not in command.err, command


CAUGHT = """
import sys, torch
from narrows.worker import DistributedOptimizer
model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
try:
    for step in range(100_000):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        if step == 5:
            print("trains", flush=True)
except KeyboardInterrupt:
    sys.exit(1)
"""


def test_a_script_that_catches_the_interrupt_and_exits_has_stopped_and_not_finished(tmp_path: Path) -> None:
    """As Lightning's Trainer does. A run whose workers have finished is over, and is not resumed."""
    script = tmp_path / "script.py"
    script.write_text(CAUGHT)
    with serving("--workers", "1", "--checkpoint-dir", str(tmp_path / "kept")) as server:
        with started("ps-worker", "--server", server.address, str(script)) as command:
            until(lambda: command.out == "trains\n" or command.process.poll() is not None, command)
            os.kill(command.pid, signal.SIGINT)
            assert command.wait(GONE_S) == 128 + signal.SIGINT, command
        until(lambda: "; 0 live" in server.command.out, server.command)
        assert " stopped at clock " in server.command.out and " left at clock " not in server.command.out, (
            server.command
        )


LEAVES = """
import os, time, torch
from narrows.worker import DistributedOptimizer

model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
child = 0
try:
    for step in range(6000):
        if step == 3 and not (child := os.fork()):
            time.sleep(60)
            os._exit(0)
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        if step == 5:
            print("trains", flush=True)
        time.sleep(0.01)
except KeyboardInterrupt:
    print("told", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    raise
"""


def test_a_worker_that_is_told_to_end_with_all_others_leaves_the_run(tmp_path: Path) -> None:
    """And what it has forked ends as it would without us."""
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(LEAVES)
    with started("ps-worker", "--checkpoint-dir", str(folder), str(script)) as command:
        until(lambda: command.out == "trains\n" or command.process.poll() is not None, command)
        to_all(command.pid, signal.SIGUSR1)  # a warning of Slurm, that the script does not handle
        pids = to_all(command.pid, signal.SIGTERM)
        assert command.wait(GONE_S) == 128 + signal.SIGTERM, command
        until(lambda: not any(map(alive, pids)), "all processes to be gone", GONE_S)
        assert command.out == f"trains\ntold {-signal.SIGTERM}\n" and "Traceback" not in command.err, command
    assert (folder / "model.safetensors").exists(), command


def test_a_run_of_gossip_that_is_stopped_ends_with_the_models_of_its_workers(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "kept"
    script.write_text(SCRIPT % "if step_count() > 20: print('trains', flush=True)")
    words = ("-n", "2", "--sync", "gossip", "--checkpoint-every", "0.1", "--checkpoint-dir", str(folder), str(script))
    with started("ps-worker", *words, cwd=tmp_path) as command:
        until(lambda: command.out.count("trains") > 20, command)
        os.kill(command.pid, signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        assert "the mean of the models of 2 workers that were stopped is in" in command.err, command
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        loss = np.square(file.get_tensor("weight").sum(1) + file.get_tensor("bias")).sum()
    assert loss < 0.1, "these are the weights that the run began with"
    with started("ps-worker", "--resume", *words, "1", cwd=tmp_path) as command:
        assert command.wait() == 0, command
        assert re.search(r"the run goes on from round \d+, with the mean of the models of 2 workers", command.err), (
            command
        )
