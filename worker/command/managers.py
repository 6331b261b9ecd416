"""Who has started this ps-worker among others, and what it says: the first row of MANAGERS that is there wins.

Each manager counts ps-workers. The names are from its documentation:
- torchrun: docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables"
- Open MPI: docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
- Slurm: the manual page srun(1), "OUTPUT ENVIRONMENT VARIABLES". A batch script has SLURM_PROCID too, and is no task of a step:
  SLURM_STEP_ID tells them apart. SLURM_STEP_NUM_TASKS counts a heterogeneous step whole, SLURM_NTASKS does not.
  SLURM_STEP_TASKS_PER_NODE is a list of all its nodes, as in "4(x2),3".
- Kubernetes: kubernetes.io/docs/tasks/job/indexed-parallel-processing-static; nothing says how many pods the job has.
- SkyPilot: docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html
- dstack: dstack.ai/docs/concepts/tasks, "System environment variables"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from narrows.protocols.errors import UsageError

PORT = 5555  # of ps-serve, where nothing else is said


@dataclass(frozen=True)
class Manager:
    """The variables of one; "" is one that it has not."""

    name: str
    there: str  # set where it has started us
    rank: str
    local_rank: str = ""  # without: one ps-worker a machine
    world_size: str = ""
    hosts: str = ""  # addresses of the machines, one a line, that of rank 0 first
    local_size: str = ""  # ps-workers on this machine


# One that starts tasks inside those of another comes before it: mpirun passes on what Slurm has told its own daemons.
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
    """Which of its ps-workers a manager says that this one is; None, "": it does not say."""

    manager: str = ""
    rank: int | None = None
    local_rank: int = 0
    world_size: int | None = None
    server: str = ""  # where ps-serve is, if it is on the machine of rank 0
    local_size: int = 1  # ps-workers that share this machine, at most

    def __str__(self) -> str:
        told = {"rank": self.rank, "local rank": self.local_rank, "world size": self.world_size, "server": self.server}
        return f"{self.manager} says: " + ", ".join(
            f"{name} {value}" for name, value in told.items() if value not in (None, "")
        )


def place(env: Mapping[str, str]) -> ManagerPlace:
    """Return the place that the manager gives this process. Raises UsageError where a number is none."""
    for manager in MANAGERS:
        if env.get(manager.there):
            break
    else:
        return ManagerPlace()
    world_size, hosts = _number(env, manager.world_size), env.get(manager.hosts, "").split()
    # With one machine the server is an embedded one.
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
