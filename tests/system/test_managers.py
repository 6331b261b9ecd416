"""A manager's facts about its ps-workers: one table, and the one line that ps-worker prints of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kit.processes import finished

from narrows.protocols.errors import UsageError
from narrows.worker.command.managers import ManagerPlace, place

CLOSED = "tcp://127.0.0.1:1"
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "4"}
TASK = SLURM | {"SLURM_STEP_ID": "0"}
SKY = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8"}


@pytest.mark.parametrize(("env", "expected"), [
    ({}, ManagerPlace()),
    ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, ManagerPlace("torchrun", 5, 1, 8)),
    ({"RANK": "5"}, ManagerPlace("torchrun", 5)),
    ({"LOCAL_RANK": "1", "WORLD_SIZE": "8"}, ManagerPlace()),  # of nobody who counts
    (TASK, ManagerPlace("Slurm", 3, 1, 4)),
    (TASK | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),16,1(x2)"}, ManagerPlace("Slurm", 3, 1, 4, local_size=16)),
    ({"RANK": "5", "LOCAL_WORLD_SIZE": "4"}, ManagerPlace("torchrun", 5, local_size=4)),
    (SLURM, ManagerPlace()),  # a batch script, which is no task
    (TASK | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ManagerPlace("torchrun", 0, 0, 2)),
    (TASK | {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_SIZE": "9"},
     ManagerPlace("Open MPI", 6, 2, 9)),
    ({"JOB_COMPLETION_INDEX": "2"}, ManagerPlace("Kubernetes", 2)),
    (SKY, ManagerPlace("SkyPilot", 1, 0, 2, "tcp://10.0.0.7:5555")),
    ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.7"},
     ManagerPlace("SkyPilot", 0, 0, 1)),
    ({"DSTACK_NODE_RANK": "1", "DSTACK_NODES_NUM": "3", "DSTACK_MASTER_NODE_IP": "10.0.0.7"},
     ManagerPlace("dstack", 1, 0, 3, "tcp://10.0.0.7:5555")),
    ({"DSTACK_NODE_RANK": "0", "DSTACK_NODES_NUM": "1", "DSTACK_MASTER_NODE_IP": ""}, ManagerPlace("dstack", 0, 0, 1)),
])  # fmt: skip
def test_the_first_manager_that_is_there_is_heard(env: dict[str, str], expected: ManagerPlace) -> None:
    assert place(env) == expected


def test_ps_workers_of_one_machine_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads in each as there are cores are many times slower."""
    (tmp_path / "script.py").write_text("import os; print(os.environ['MKL_NUM_THREADS'])")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for beside, threads in (("1", cores), (str(os.cpu_count()), 1), ("4096", 1)):
        env = TASK | {"SLURM_STEP_TASKS_PER_NODE": beside}
        code, out, err = finished("ps-worker", "--fresh", "--server", CLOSED, str(tmp_path / "script.py"), env=env)
        assert (code, out) == (0, f"{threads}\n"), err


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(UsageError, match="the variable SLURM_LOCALID is 'x', which is no number: unset it"):
        place(TASK | {"SLURM_LOCALID": "x"})


SAYS = "import os\nprint(*(os.environ.get(name, 'none') for name in ('RANK', 'WORLD_SIZE', 'NARROWS_SERVER', 'NARROWS_SETS')))"


@pytest.mark.parametrize(("env", "flags", "said", "told"), [
    (SKY, [], "SkyPilot says: rank 1, local rank 0, world size 2, server tcp://10.0.0.7:5555", "1 2 tcp://10.0.0.7:5555 none"),
    (SKY, ["--server", CLOSED], "SkyPilot says: rank 1,", f"1 2 {CLOSED} none"),
    ({"JOB_COMPLETION_INDEX": "2"}, ["--server", CLOSED], "Kubernetes says: rank 2, local rank 0\n",
     f"2 1 {CLOSED} WORLD_SIZE"),
])  # fmt: skip
def test_ps_worker_prints_what_a_manager_says_and_a_flag_wins(
    env: dict[str, str], flags: list[str], said: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SAYS)
    code, out, err = finished("ps-worker", "--fresh", "--rank-variables", *flags, str(tmp_path / "script.py"), env=env)
    assert code == 0 and out == told + "\n"
    assert err.count(" says: ") == 1 and f"ps-worker: {said}" in err
