"""Processes that a worker starts: those of loaders, forks and programs. None of them is a member of the run."""

from __future__ import annotations

import sys
from pathlib import Path

from kit.processes import finished, serving

# Two epochs of a loader whose processes live on between them, as often as multiprocessing can start them.
LOADS = """
import torch
from torch.utils.data import DataLoader, IterableDataset
from narrows.worker import DistributedOptimizer, rank, record, step_count, world_size


class Share(IterableDataset):
    def __iter__(self):
        refused = False
        try:
            record(loss=1.0)
        except Exception as error:
            refused = "only the worker itself is a member of the run" in str(error)
        yield rank(), world_size(), step_count(), refused


def main():
    model = torch.nn.Linear(1, 1)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    loaders = {
        method: DataLoader(Share(), None, num_workers=1, multiprocessing_context=method, persistent_workers=True)
        for method in ("spawn", "forkserver", "fork")
    }
    for _ in range(2):
        for method, loader in loaders.items():
            print(method, *list(loader)[0], flush=True)
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    optimizer.finish()


if __name__ == "__main__":
    main()
"""


def test_processes_of_a_loader_know_rank_and_step_of_their_worker_and_do_not_join(tmp_path: Path) -> None:
    """However multiprocessing starts them, and whatever started the worker."""
    (tmp_path / "script.py").write_text(LOADS)
    with serving("--workers", "1", "--shards", "1", "--sync", "bsp") as server:
        words = (sys.executable, str(tmp_path / "script.py"))
        code, out, err = finished(*words, env={"NARROWS_SERVER": server.address})
        assert code == 0, f"{out}\n{err}"
        assert server.command.wait() == 0, server.command
        assert server.command.out.count("joined at clock") == 1, server.command
    methods = ("spawn", "forkserver", "fork") * 2
    assert out.splitlines() == [f"{method} 0 1 {step} True" for step, method in enumerate(methods)]


def test_alone_they_know_its_step_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LOADS.replace('("spawn", "forkserver", "fork")', '("fork",)'))
    code, out, err = finished(sys.executable, str(tmp_path / "script.py"))
    assert (code, out.splitlines()) == (0, ["fork 0 1 0 False", "fork 0 1 1 False"]), err


# What each fork does, after three steps of the worker; then the worker makes three more.
FORKS = """
import os, subprocess, sys, torch
from narrows.worker import DistributedOptimizer, rank, record, step_count

asks = [sys.executable, "-c", "from narrows.worker import rank; rank()"]
early = subprocess.run(asks, capture_output=True, text=True)  # a program that is older than the session
print("early", early.returncode, "before it joined the run" in early.stderr, flush=True)
model = torch.nn.Linear(4, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model)


def step():
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()


def late():
    print("late", subprocess.run(asks).returncode, flush=True)


FORKS = {
    "exits": lambda: sys.exit(0),
    "saves": lambda: torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "saved.pt"),
    "asks": lambda: sys.exit([rank(), step_count()] != [0, 3]),
    "starts": late,
    "fails": lambda: 1 / 0,
    "steps": step,
    "shows": optimizer.eval,
    "finishes": optimizer.finish,
    "records": lambda: record(loss=1.0),
}
for _ in range(3):
    step()
for name, work in FORKS.items():
    if not (child := os.fork()):
        work()
        sys.exit(0)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
for _ in range(3):
    step()
optimizer.finish()
print("made", step_count(), flush=True)
"""
ENDS = [
    "early 1 True", "exits 0", "saves 0", "asks 0", "late 0", "starts 0",
    "fails 1", "steps 1", "shows 1", "finishes 1", "records 1", "made 6",
]  # fmt: skip


def test_a_fork_of_a_worker_ends_as_any_other_process_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FORKS)
    words = ("ps-worker", "--sync", "bsp", "--push", "update", str(tmp_path / "script.py"))
    code, out, err = finished(*words, cwd=tmp_path)
    assert code == 0 and out.splitlines() == ENDS, f"{out}\n{err}"
    assert err.count("only the worker itself is a member of the run") == 4, err
    assert "1 of 1 workers done" in err and (tmp_path / "saved.pt").exists()
