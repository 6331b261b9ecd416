"""ps-teach and its students as commands: every mode, keys, a teacher that is killed, wrong flags."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.processes import Command, finished, sentences, serving, started, until

from narrows.protocols.runtime.network import key_files

TEACHER = """
import torch
from narrows.worker import teacher

torch.manual_seed(3)
teacher.serve(torch.nn.Linear(4, 5))
"""
ALONE = """
import os, sys, time, torch
from narrows.worker import teacher

net, go, steps = torch.nn.Linear(4, 5), sys.argv[1], int(sys.argv[2])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
softs = 0
for step in range(steps):
    if step == 3:
        print("step 3", flush=True)
        while not os.path.exists(go):
            time.sleep(0.02)
    x = torch.randn(6, 4)
    soft = teacher.ask(x).take()
    softs += soft is not None
    loss = net(x).square().mean() if soft is None else soft.loss(net(x))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("softs", softs, flush=True)
"""
TRAINS = """
import torch
from narrows.worker import DistributedOptimizer, rank, step_count, teacher

net = torch.nn.Linear(4, 5)
optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), net)
losses = []
batches = [torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * rank() + step)) for step in range(30)]
for x, soft in teacher.ahead(batches):
    optimizer.zero_grad()
    loss = soft.loss(net(x))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print("learned", losses[0] > 2 * losses[-1], len(losses), flush=True)
"""


@contextmanager
def teaching(folder: Path, *flags: str, port: int = 0) -> Iterator[tuple[Command, str]]:
    """A ps-teach that answers, and its address."""
    script, ready = folder / "teacher.py", folder / f"ready-{len(os.listdir(folder))}"
    script.write_text(TEACHER)
    where = ("--bind", f"tcp://127.0.0.1:{port}", "--ready-file", str(ready))
    with started("ps-teach", *where, *flags, str(script)) as command:
        until(lambda: ready.exists() or command.process.poll() is not None, command)
        assert ready.exists(), command
        yield command, json.loads(ready.read_text())["address"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    key_files.make(str(tmp_path / "K"))
    key_files.add(str(tmp_path / "K"), "city", "worker")
    return tmp_path / "K"


def written(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def summary(command: Command) -> str:
    """End a ps-teach by SIGTERM, and return its last sentence."""
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 0, command
    return command.err.splitlines()[-1]


@pytest.mark.parametrize("flags", [("--sync", "bsp"), ("--sync", "gossip")])
def test_students_of_a_run_learn_from_a_teacher_with_keys(flags: tuple[str, ...], tmp_path: Path, keys: Path) -> None:
    with teaching(tmp_path, "--keys", str(keys)) as (teach, address), serving(*flags, "--workers", "2") as server:
        asks = ("--teacher", address, "--teacher-key", str(keys / "city.key"), "--teacher-coding", "top:5+fp16")
        words = ("--server", server.address, "-n", "2", *asks, written(tmp_path, TRAINS))
        code, out, err = finished("ps-worker", *words)
        assert code == 0, err
        assert out.count("learned True 30") == 2, out + err
        said = summary(teach)
        assert "480 samples computed" in said and "students: " in said, said


def test_a_teacher_is_killed_and_training_goes_on(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with teaching(tmp_path) as (teach, address):
        env = {"NARROWS_TEACHER": address, "NARROWS_TEACHER_LOST": "go-on"}
        with started(sys.executable, written(tmp_path, ALONE), str(go), "6", env=env) as student:
            until(lambda: "step 3" in student.out, student)
            os.kill(teach.pid, signal.SIGKILL)
            until(lambda: "goes on without" in student.err, student)
            go.touch()
            assert student.wait() == 0, student
            assert "softs 3" in student.out
            assert sum("hung up" in line for line in student.err.splitlines()) == 1


def test_a_teacher_is_killed_and_its_student_waits(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with (
        teaching(tmp_path) as (teach, address),
        started(sys.executable, written(tmp_path, ALONE), str(go), "6", env={"NARROWS_TEACHER": address}) as student,
    ):
        until(lambda: "step 3" in student.out, student)
        os.kill(teach.pid, signal.SIGKILL)
        until(lambda: "wait for it" in student.err, student)
        go.touch()
        with teaching(tmp_path, port=int(address.rpartition(":")[2])) as (again, _):
            assert student.wait() == 0, student
            assert "softs 6" in student.out and "is there: it is asked from now on" in student.err
            assert "18 samples computed" in summary(again)


def test_without_a_flag_a_script_trains_alone(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    code, out, err = finished(sys.executable, written(tmp_path, ALONE), str(tmp_path / "go"), "5")
    assert code == 0 and "softs 0" in out and err.count("trains without soft targets") == 1


def ended(words: tuple[str, ...], env: dict[str, str] | None = None) -> tuple[int, str]:
    """The exit code of a command, and its one sentence."""
    code, _, err = finished(*words, env=env)
    lines = sentences(err)
    assert len(lines) == 1, err
    return code, lines[0]


def test_wrong_flags_of_ps_teach(tmp_path: Path, keys: Path) -> None:
    script = written(tmp_path, TEACHER)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flags, says in (
            ((), "name the script"),
            ((str(tmp_path / "none.py"),), "no such script"),
            (("--bind", "here", script), "--bind"),
            (("--bind", "tcp://0.0.0.0:0", script), "anyone who reaches it"),
            (("--bind", f"tcp://127.0.0.1:{port}", script), "cannot listen"),
            (("--bind", "tcp://127.0.0.1:0", "--keys", str(tmp_path / "none"), script), "none"),
            (("--what", script), "--what"),
        ):
            code, said = ended(("ps-teach", *flags))
            assert code == 2 and says in said, (flags, code, said)


def test_wrong_flags_of_ps_worker(tmp_path: Path, keys: Path) -> None:
    script, key = written(tmp_path, ALONE), str(keys / "city.key")
    for flags, says in (
        (("--teacher-key", key), "--teacher"),
        (("--teacher", "nowhere"), "nowhere"),
        (("--teacher", "tcp://a:1", "--teacher-key", f"{key},{key},{key}"), "3 files for 1"),
        (("--teacher", "tcp://a:1", "--teacher-key", str(tmp_path / "none")), "none"),
        (("--teacher", "tcp://a:1", "--teacher-coding", "top:0+int9"), "top:0+int9"),
        (("--teacher", "tcp://a:1", "--teacher-lost", "never"), "never"),
    ):
        code, said = ended(("ps-worker", "--server", "tcp://127.0.0.1:9", *flags, script))
        assert code == 2 and says in said, (flags, code, said)


ASKS = """
import sys, torch
from narrows.protocols.errors import NarrowsError
from narrows.worker import teacher

try:
    teacher.ask(torch.randn(2, int(sys.argv[1]))).take()
except NarrowsError as error:
    print(error.exit_code, error, flush=True)
"""


def test_what_a_student_is_told(tmp_path: Path, keys: Path) -> None:
    """3: nobody is there; 4: the key; 5: the model cannot."""
    key_files.make(str(tmp_path / "other"))
    key_files.add(str(tmp_path / "other"), "city", "worker")
    script = written(tmp_path, ASKS)

    def told(size: int = 4, **env: str) -> str:
        code, out, err = finished(sys.executable, script, str(size), env=env)
        assert code == 0, err
        return out

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nobody = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
        said = told(NARROWS_TEACHER=nobody, NARROWS_CONNECT_TIMEOUT="1")
        assert said.startswith("3 no teacher answered") and "start ps-teach" in said
    with teaching(tmp_path, "--keys", str(keys)) as (teach, address):
        assert told(NARROWS_TEACHER=address).startswith("4 ")
        assert told(NARROWS_TEACHER=address, NARROWS_TEACHER_KEY=str(tmp_path / "other" / "city.key")).startswith("4 ")
        mine: dict[str, Any] = {"NARROWS_TEACHER": address, "NARROWS_TEACHER_KEY": str(keys / "city.key")}
        said = told(size=7, **mine)
        assert said.startswith("5 ") and "cannot compute" in said
        assert told(**mine) == ""
        assert "2 samples computed" in summary(teach)
