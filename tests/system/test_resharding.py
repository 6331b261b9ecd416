"""ps-serve shards N and ps-serve --join, against a ps-serve whose worker goes on training: real processes, and some of them
killed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.processes import Command, Server, Worker, finished, kill_relay, serving, started, trained_alone, until
from kit.scripts import distance, flat
from safetensors import safe_open

UPDATES = ("--sync", "bsp", "--push", "update")  # a server that imports no torch
ONE_PORT = ("--one-port",)
RATE = 0.001  # of hundreds of steps, which must not end in noise


def moved(server: Server, worker: Worker, shards: int, kill: int = -1) -> str:
    """Train until the command has ended, and return what it said. `kill`: a shard that dies meanwhile."""
    with started("ps-serve", "shards", str(shards), "--at", server.address) as command:
        while command.process.poll() is None:
            worker.step()
            if kill >= 0 and f"become {shards}" in server.command.out:
                os.kill(server.pids[1 + kill], signal.SIGKILL)
                kill = -1
        assert kill < 0, f"no shard was killed: {server.command}"
        return command.out + command.err


def test_two_shards_become_three_and_two_again(tmp_path: Path) -> None:
    """Trace: 2 to 3; 3 to 2, in which shard 1 is killed; 2, where they are 2; numbers that are none."""
    with serving("--sync", "bsp", "--shards", "2", "--checkpoint-dir", str(tmp_path)) as server:
        worker = Worker(server.address, rate=RATE)
        worker.train(5)
        assert "the keys of 2 shards are those of 3" in moved(server, worker, 3), server.command
        assert len(server.pids) == 4
        said = moved(server, worker, 2, kill=1)
        assert "the keys of 3 shards are those of 2" in said, f"{said}\n{server.command}"
        assert len(server.pids) == 3
        for words, text in (("2", "2 shards"), ("0", "not in the range"), ("500", "not in the range")):
            assert text in "".join(map(str, finished("ps-serve", "shards", words, "--at", server.address))), words
        worker.train(5)
        worker.close()
        assert server.command.wait() == 0, server.command
        out = server.command.out
        assert out.count(" joined at clock ") == 1 and "lost" not in out and "goes back" not in out, server.command
    alone = trained_alone(worker.clock, RATE)
    assert distance(flat(worker.model), alone) < 1e-6
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert sum(file.get_tensor(name).size for name in file.keys()) == alone.size  # noqa: SIM118 - it is no dict


OTHER = """
import pathlib, sys, time
import torch
from torch import nn
from narrows.worker import DistributedOptimizer

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # as kit.processes has it
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
while not pathlib.Path(sys.argv[1]).exists():
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    time.sleep(0.02)
"""


def test_keys_move_where_no_worker_waits_for_another(tmp_path: Path) -> None:
    """Trace: 2 to 3, in which shard 0 is killed; a machine joins, and goes. Of the two workers one is slower."""
    script, enough = tmp_path / "script.py", tmp_path / "enough"
    script.write_text(OTHER)
    flags = ("--sync", "async", "--workers", "2", "--shards", "2", "--checkpoint-dir", str(tmp_path / "kept"))
    with serving(*flags) as server:
        with started("ps-worker", "--server", server.address, str(script), str(enough)) as other:
            worker = Worker(server.address, rate=RATE)
            worker.train(5)
            assert "the keys of 2 shards are those of 3" in moved(server, worker, 3, kill=0), server.command
            with joined(server, tmp_path) as guest:
                trains(worker, lambda: guest.pids, guest.command)
                worker.train(5)
                guest.command.process.send_signal(signal.SIGINT)
                trains(worker, lambda: guest.command.process.poll() is not None, guest.command)
                assert guest.command.wait() == 0, guest.command
            enough.touch()
            worker.close()
            assert other.wait() == 0, other
        assert server.command.wait() == 0, server.command
        out = server.command.out
        assert "the keys of 3 shards are those of 4" in out and "the keys of 4 shards are those of 3" in out
        assert out.count(" joined at clock ") == 2 and "lost" not in out and "goes back" not in out, server.command


def test_nobody_is_there_to_be_asked() -> None:
    code, _, err = finished("ps-serve", "shards", "3", "--at", "tcp://127.0.0.1:1")
    assert code == 3 and "no ps-serve serves port 1 on this machine" in err


class Guest:
    """A ps-serve that joins a server, at another address of this machine."""

    def __init__(self, command: Command, ready: Path) -> None:
        self.command, self.ready = command, ready

    @property
    def pids(self) -> list[int]:
        """The pids of its shards, once it has their keys."""
        return list(json.loads(self.ready.read_text())["shard_pids"]) if self.ready.exists() else []

    def kill(self) -> None:
        """All of it at once, as when its machine loses power."""
        pids = self.pids
        os.kill(self.command.pid, signal.SIGSTOP)  # it would start them again
        for pid in (*pids, self.command.pid):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def joined(server: Server, folder: Path, *flags: str, host: str = "127.0.0.2") -> Iterator[Guest]:
    ready = folder / f"ready-{host}"
    words = ("ps-serve", "--join", server.address, "--bind", f"tcp://{host}:0", "--ready-file", str(ready), *flags)
    with started(*words, cwd=folder) as command:
        yield Guest(command, ready)


def trains(worker: Worker, done: Callable[[], Any], what: object) -> None:
    """Train until something is done: keys move while somebody does."""

    def stepped() -> Any:
        worker.step()
        return done()

    until(stepped, what)


@pytest.mark.parametrize(("here", "there"), [((), ()), (ONE_PORT, ()), (ONE_PORT, ONE_PORT), ((), ONE_PORT)])
def test_a_machine_that_joins_has_keys_until_it_goes(
    here: tuple[str, ...], there: tuple[str, ...], tmp_path: Path
) -> None:
    """Trace: a shard on another address; it is killed there, and goes on; its machine gets Ctrl-C."""
    flags = ("--sync", "bsp", "--shards", "2", "--checkpoint-dir", str(tmp_path / "kept"))
    with serving(*flags, *here, host="127.0.0.3" if here else "127.0.0.1") as server:
        worker = Worker(server.address, rate=RATE)
        worker.train(5)
        with joined(server, tmp_path, *there) as guest:
            trains(worker, lambda: guest.pids, guest.command)
            *_, last = worker.session.link._shards
            assert "127.0.0.2" in last and last.endswith("/shard-2") == bool(there), "it is dialled there"
            (old,) = guest.pids
            os.kill(old, signal.SIGKILL)
            trains(worker, lambda: guest.pids not in ([], [old]), guest.command)
            worker.train(5)
            if there:
                kill_relay(guest.command.pid)
                worker.train(5)
            assert len(server.pids) == 3, "ps-serve, and its own two"
            guest.command.process.send_signal(signal.SIGINT)
            trains(worker, lambda: guest.command.process.poll() is not None, guest.command)
            assert guest.command.wait() == 0, guest.command
            assert "goes on where it was" in guest.command.out, guest.command
        worker.train(5)
        worker.close()
        assert server.command.wait() == 0, server.command
        out = server.command.out
        assert "the keys of 2 shards are those of 3" in out and "the keys of 3 shards are those of 2" in out
        assert out.count(" joined at clock ") == 1 and "lost" not in out and "goes back" not in out, server.command
    assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-6


def test_a_machine_that_joined_ends_with_the_run_and_resume_finds_its_keys(tmp_path: Path) -> None:
    """Also with keys, of which it has a copy."""
    assert finished("ps-serve", "keys", "init", str(tmp_path / "keys"))[0] == 0
    code, _, err = finished("ps-serve", "keys", "add", "one", "--keys", str(tmp_path / "keys"))
    assert code == 0, err
    shutil.copytree(tmp_path / "keys", tmp_path / "copy")
    kept = ("--checkpoint-dir", str(tmp_path / "kept"))
    with serving(*UPDATES, "--keys", str(tmp_path / "keys"), *kept) as server:
        with joined(server, tmp_path) as stranger:
            assert stranger.command.wait() == 4 and "give --keys" in stranger.command.err, stranger.command
        worker = Worker(server.address, str(tmp_path / "keys" / "one.key"), RATE)
        worker.train(5)
        with joined(server, tmp_path, "--shards", "2", "--keys", str(tmp_path / "copy")) as guest:
            trains(worker, lambda: len(guest.pids) == 2, guest.command)
            worker.train(5)
            worker.close()
            assert server.command.wait() == guest.command.wait() == 0, f"{server.command}\n{guest.command}"
    clock = worker.clock
    with safe_open(tmp_path / "kept" / "model.safetensors", framework="numpy") as file:
        assert sum(file.get_tensor(name).size for name in file.keys()) == flat(worker.model).size  # noqa: SIM118
    with (
        serving(*UPDATES, "--resume", "--steps", "100000", *kept) as server,
        Worker(server.address, rate=RATE) as again,
    ):
        assert again.clock == clock
        again.train(5)


def test_where_a_machine_that_joined_is_lost_the_run_goes_back_without_it(tmp_path: Path) -> None:
    """Two are lost, of which the second is told so and joins again."""
    with serving("--sync", "bsp", "--lease", "1") as server:
        worker = Worker(server.address, rate=RATE)
        worker.train(5)
        with joined(server, tmp_path) as first, joined(server, tmp_path, host="127.0.0.3") as second:
            trains(worker, lambda: first.pids and second.pids, f"{first.command}\n{second.command}")
            lost, stays = (first, second) if "has shard 1 of" in first.command.out else (second, first)
            lost.kill()
            trains(worker, lambda: stays.command.out.count("has shard 1 of") == 1, stays.command)
            worker.train(5)
            worker.close()
            assert server.command.wait() == stays.command.wait() == 0, f"{server.command}\n{stays.command}"
            assert "is lost: the keys of 3 shards are with 1" in server.command.out, server.command
    assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-6


@pytest.mark.parametrize(("server_flags", "flags", "code", "sentence"), [
    (("--sync", "gossip"), (), 5, "the workers hold the model"),
    ((*UPDATES, "--replicas", "1"), (), 5, "a server with a standby keeps its shards"),
    (UPDATES, ("--sync", "ssp"), 2, "leave out --sync"),
    (UPDATES, ("--checkpoint-dir", "here"), 2, "leave out --checkpoint-dir"),
    (UPDATES, ("--shards", "500"), 2, "from 1 to 256"),
])  # fmt: skip
def test_who_cannot_join_is_told_why(
    server_flags: tuple[str, ...], flags: tuple[str, ...], code: int, sentence: str, tmp_path: Path
) -> None:
    with serving(*server_flags) as server, joined(server, tmp_path, *flags) as guest:
        assert guest.command.wait() == code and sentence in guest.command.err, guest.command


def test_a_machine_joins_over_a_network_with_keys_alone() -> None:
    code, _, err = finished("ps-serve", "--join", "tcp://10.0.0.1:5555", "--bind", "tcp://10.0.0.2:5555")
    assert code == 2 and "give --keys with a copy of its folder, or --insecure" in err
    code, _, err = finished("ps-serve", "--join", "tcp://10.0.0.1:5555", "--insecure")
    assert code == 2 and "workers elsewhere could not dial this machine" in err
