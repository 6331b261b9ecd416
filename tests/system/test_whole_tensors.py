"""Servers with --cut tensors step Muon and AdamW, through all that may happen to them: real processes, some of them killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.processes import Server, Worker, finished, serving, started, trained_alone, until
from kit.scripts import distance, flat
from torch import nn

from narrows.protocols.errors import NarrowsError
from narrows.worker.model.optimizers import as_one

EQUAL = 1e-5
BOUND = ("--sync", "bsp", "--cut", "tensors", "--shards", "2")


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == such] for such in (True, False))
    return as_one([torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)], model)


def ended(server: Server, worker: Worker) -> None:
    worker.close()
    assert server.command.wait() == 0, server.command
    assert "Traceback" not in server.command.err, server.command
    expected = trained_alone(worker.clock, make=muon)
    assert distance(flat(worker.model), expected) < EQUAL
    assert distance(flat(worker.model), trained_alone(0, make=muon)) > 100 * EQUAL, "it does train"


def test_killed_shards_go_on_and_keys_move(tmp_path: Path) -> None:
    with serving(*BOUND, "--checkpoint-dir", str(tmp_path)) as server:
        worker = Worker(server.address, make=muon)
        worker.train(5)
        for shard in (1, 0):
            server.kill_shard(shard)
            worker.train(5)
        code, out, err = _moved(server, worker, 4)
        assert code == 0 and "the keys of 2 shards are those of 4" in out + err
        code, out, err = _moved(server, worker, 5)
        assert code != 0 and "has 4 tensors, too few for 5 shards" in out + err
        worker.train(5)
        ended(server, worker)
        assert server.command.out.count("goes on where it was") == 2, server.command


def _moved(server: Server, worker: Worker, shards: int) -> Any:
    with started("ps-serve", "shards", str(shards), "--at", server.address) as command:
        while command.process.poll() is None:
            worker.step()
        return command.process.returncode, command.out, command.err


def test_a_run_is_resumed_with_another_number_of_shards(tmp_path: Path) -> None:
    with serving(*BOUND, "--checkpoint-dir", str(tmp_path)) as server:
        worker = Worker(server.address, make=muon)
        worker.train(7)
        server.command.process.send_signal(signal.SIGINT)
        with pytest.raises(NarrowsError):
            worker.train(10_000)
        worker.close(failed=True)
        assert server.command.wait() == 130, server.command
    code, _, err = finished("ps-serve", "--sync", "bsp", "--shards", "2", "--checkpoint-dir", str(tmp_path), "--resume")
    assert code != 0 and "Muon steps whole tensors, and shards cut tensors" in err, err
    with serving(*BOUND[:-1], "3", "--checkpoint-dir", str(tmp_path), "--resume") as server:
        worker = Worker(server.address, make=muon)
        assert worker.clock >= 7
        worker.train(8)
        ended(server, worker)


def test_a_standby_goes_on_in_the_place_of_the_server(tmp_path: Path) -> None:
    with (
        serving(*BOUND, "--replicas", "1") as server,
        serving("--standby", server.address) as standby,
    ):
        worker = Worker(server.address, make=muon)
        worker.train(5)
        until(lambda: f"{standby.address} stands by: it has all" in server.command.out, server.command)
        worker.train(5)
        server.kill()
        worker.train(10)
        ended(standby, worker)
        assert "serves in the place of" in standby.command.out
