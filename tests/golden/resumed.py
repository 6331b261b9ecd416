"""Part of the golden record: a checkpoint that a real ps-serve wrote, and the last model of a run that goes on from it."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from kit.in_process import together
from kit.on_disk import OnDisk
from kit.processes import Worker, loss_of, serving, small_model
from kit.scripts import Array, flat, run, seeded

from golden.digests import Entries, arrays_digest
from narrows.protocols.config.settings import Settings
from narrows.ps.checkpoints.checkpoint_files import clocks
from narrows.worker import DistributedOptimizer, clock

FOLDER = Path(__file__).resolve().parent / "checkpoint"
WORKERS, SHARDS, STEPS, MORE = 2, 2, 5, 4
FLAGS = f"--sync bsp --workers {WORKERS} --shards {SHARDS} --checkpoint-every 0".split()
SETTINGS = Settings(sync="bsp", workers=WORKERS, shards=SHARDS, checkpoint_every=0.0)


def write_checkpoint() -> None:
    """Train some steps over a real ps-serve, and interrupt it: it writes a checkpoint."""
    with TemporaryDirectory() as folder, serving(*FLAGS, "--checkpoint-dir", folder) as server:
        together(lambda _: _train(Worker(server.address), STEPS), WORKERS)
        os.kill(server.pids[0], signal.SIGINT)
        server.command.wait()
        assert clocks(Path(folder), 0) == clocks(Path(folder), 1) == (STEPS,), server.command
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        for path in Path(folder).glob("shard-*"):
            shutil.copy(path, FOLDER)


def _train(worker: Worker, steps: int) -> None:
    torch.set_num_threads(1)
    for _ in range(steps):
        worker.model.zero_grad()
        loss_of(worker.model, WORKERS * worker.clock + worker.session.rank).backward()
        worker.engine.step()


def checkpoint_part() -> Entries:
    return {"resumed in process": _in_process, "resumed by ps-serve": _by_commands}


def _in_process() -> str:
    with TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        with run(SETTINGS, OnDisk(SETTINGS, Path(folder), resume=True)) as started:
            return arrays_digest(started.together(_script))


def _script(worker: int) -> Array:
    model = seeded(small_model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model)
    assert clock() == STEPS
    for _ in range(MORE):
        optimizer.zero_grad()
        loss_of(model, WORKERS * clock() + worker).backward()
        optimizer.step()
    optimizer.finish()
    return flat(model)


def _by_commands() -> str:
    with TemporaryDirectory() as folder:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        with serving(*FLAGS, "--checkpoint-dir", folder, "--resume") as server:

            def work(_: int) -> Array:
                with Worker(server.address) as worker:
                    assert worker.clock == STEPS
                    _train(worker, MORE)
                return flat(worker.model)

            return arrays_digest(together(work, WORKERS))
