"""Finds the manager that started this ps-worker by its environment variables, and reads rank and server from them.

A manager starts one ps-worker for each of its tasks, and numbers the tasks. The first row of MANAGERS whose variable is
set counts. The names of the variables are from the manager's documentation:
- torchrun: docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
- Open MPI: docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
- Slurm: the manual page srun(1), "OUTPUT ENVIRONMENT VARIABLES". A batch script has SLURM_PROCID too, but is no task of
  a step: only a task has SLURM_STEP_ID. SLURM_STEP_NUM_TASKS counts all tasks of a heterogeneous step, SLURM_NTASKS
  does not. SLURM_STEP_TASKS_PER_NODE is a list of all nodes of the step, as in "4(x2),3".
- Kubernetes: kubernetes.io/docs/tasks/job/indexed-parallel-processing-static; no variable has the number of pods.
- SkyPilot: docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
- dstack: dstack.ai/docs/concepts/tasks, "System environment variables"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from narrows.protocols.errors import UsageError

PORT = 5555  # the default port of ps-serve


@dataclass(frozen=True)
class Manager:
    """The environment variables of one manager. A variable that the manager does not have is ""."""

    name: str  # the manager's name, for messages
    there: str  # a variable that is set in each task of the manager
    rank: str  # the task's number in the job
    local_rank: str = ""  # the task's number on its machine; "": one task a machine
    world_size: str = ""  # the number of tasks
    hosts: str = ""  # addresses of the machines, one a line, that of rank 0 first
    local_size: str = ""  # the number of tasks on this machine


# The inner manager stands before the outer one. Under Slurm, for example, the tasks of mpirun also have Slurm's variables,
# which describe a daemon of mpirun and not the task.
MANAGERS = (
    Manager("torchrun", "RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE", local_size="LOCAL_WORLD_SIZE"),
    Manager(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Manager(
        "Slurm",
        "SLURM_STEP_ID",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_STEP_NUM_TASKS",
        local_size="SLURM_STEP_TASKS_PER_NODE",
    ),
    Manager("Kubernetes", "JOB_COMPLETION_INDEX", "JOB_COMPLETION_INDEX"),
    Manager(
        "SkyPilot",
        "SKYPILOT_NODE_RANK",
        "SKYPILOT_NODE_RANK",
        world_size="SKYPILOT_NUM_NODES",
        hosts="SKYPILOT_NODE_IPS",
    ),
    Manager(
        "dstack", "DSTACK_NODE_RANK", "DSTACK_NODE_RANK", world_size="DSTACK_NODES_NUM", hosts="DSTACK_MASTER_NODE_IP"
    ),
)


@dataclass(frozen=True)
class ManagerPlace:
    """The place of this ps-worker in its manager's job. None or "": the manager does not say."""

    manager: str = ""  # the manager's name; "": no manager
    rank: int | None = None  # the number of this ps-worker in the job
    local_rank: int = 0  # its number on its machine
    world_size: int | None = None  # the number of ps-workers in the job
    server: str = ""  # the address of ps-serve, if the manager lists its machines: port 5555 on that of rank 0
    local_size: int = 1  # the largest number of ps-workers on a machine of the job

    def __str__(self) -> str:
        values = {
            "rank": self.rank,
            "local rank": self.local_rank,
            "world size": self.world_size,
            "server": self.server,
        }
        return f"{self.manager} says: " + ", ".join(
            f"{name} {value}" for name, value in values.items() if value not in (None, "")
        )


def place(env: Mapping[str, str]) -> ManagerPlace:
    """Return the place that the manager gives this process.

    Args:
        env: the environment.

    Raises:
        UsageError: a variable that counts tasks is no number.
    """
    for manager in MANAGERS:
        if env.get(manager.there):
            break
    else:
        return ManagerPlace()
    world_size, hosts = _number(env, manager.world_size), env.get(manager.hosts, "").split()
    # On a single machine ps-worker embeds the server.
    server = f"tcp://{hosts[0]}:{PORT}" if hosts and (world_size or len(hosts)) > 1 else ""
    local_rank = _number(env, manager.local_rank) or 0
    counts = re.findall(r"(?:^|,)(\d+)", env.get(manager.local_size, ""))
    local_size = max([1, *map(int, counts)])
    return ManagerPlace(manager.name, _number(env, manager.rank), local_rank, world_size, server, local_size)


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "")
    if value and not value.isdigit():
        raise UsageError(f"the variable {name} is {value!r}, which is no number: unset it")
    return int(value) if value else None
