"""Sets the environment of each copy of the script: its GPU, and no rank variables that mislead libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrows.worker.command.managers import ManagerPlace
from narrows.worker.runtime.config import told
from narrows.worker.runtime.launcher_pipe import tell

GPUS = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU: counting them needs no CUDA context
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALONE = ManagerPlace()  # the place of a ps-worker that no manager started
# Accelerate, Lightning, MosaicML streaming and others start torch.distributed if these variables name a world of
# several processes, or wait for a MASTER_ADDR. But workers of a run are no process group. So the variables are removed;
# --rank-variables sets the first three.
MISLEADING = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GLOBAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}

_debugger: Any = None  # the pdb.Pdb of this script, once it has reached a breakpoint()


def gpus(env: Mapping[str, str], folder: Path = GPUS) -> list[str]:
    """Return the GPUs that this ps-worker may use, as CUDA_VISIBLE_DEVICES names them.

    Args:
        env: the environment; its CUDA_VISIBLE_DEVICES counts, if set.
        folder: a folder with an entry for each GPU of the machine.
    """
    if VISIBLE in env:
        return [name for name in env[VISIBLE].split(",") if name.strip()]
    return [str(i) for i in range(len(list(folder.iterdir())))] if folder.is_dir() else []


def device(
    wanted: str, index: int, copies: int, group: bool, there: list[str], place: ManagerPlace = ALONE
) -> tuple[str, dict[str, str]]:
    """Return the device of one copy, and its CUDA_VISIBLE_DEVICES if it sees some of the GPUs alone.

    A copy that is a worker of its own sees one GPU as cuda:0; the GPUs are given out in turn. The copies of a group see
    all GPUs, as under torchrun, and share them if there are fewer. If several ps-workers share the machine and it has
    enough GPUs, each group sees its own ones.

    Args:
        wanted: --device: auto, cpu or cuda[:i].
        index: the number of the copy in this ps-worker.
        copies: the number of copies; each ps-worker of the machine has as many.
        group: the copies are one worker.
        there: the GPUs of the machine, from `gpus`.
        place: the place of this ps-worker in its manager's job.
    """
    kind, _, number = wanted.partition(":")
    first, sharing = place.local_rank * copies, place.local_size * copies
    if group:
        own = there[first : first + copies] if place.local_size > 1 and len(there) >= sharing else []
        seen = {VISIBLE: ",".join(own)} if own and kind != "cpu" and not number else {}
        return f"cuda:{index % len(there) if there else index}" if wanted == "cuda" else wanted, seen
    if kind == "cpu":
        return "cpu", {VISIBLE: ""}
    if number and int(number) < len(there):
        return "cuda", {VISIBLE: there[int(number)]}
    if not number and sharing > 1 and there:
        return kind, {VISIBLE: there[(first + index) % len(there)]}
    return wanted, {}


def terminal() -> str:
    """Return the terminal that breakpoint() is to open, "" without one.

    The stdin of a copy is empty, and its stdout goes to ps-worker. So a debugger has to open the terminal itself.
    """
    if not (sys.platform == "linux" and sys.stdin is not None and sys.stdin.isatty()):
        return ""
    return os.ttyname(sys.stdin.fileno())


def enter_debugger(*args: Any, **values: Any) -> None:
    """Stop in the line of breakpoint(), in a script. Heartbeats go on, so the other workers wait for this one."""
    import pdb  # which a worker without a breakpoint() does not need

    global _debugger
    if _debugger is None:
        tell("say", text="a worker is in the debugger: no further progress is shown", quiet=True)
        # ps-worker keeps the terminal, and receives Ctrl-C.
        terminal = os.open(told("tty"), os.O_RDWR | os.O_NOCTTY)
        stdin, stdout = open(terminal), open(os.dup(terminal), "w")  # noqa: SIM115 - as long as the process
        _debugger = pdb.Pdb(stdin=stdin, stdout=stdout, nosigint=True)
    _debugger.set_trace(sys._getframe(1))


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the rank variables of `MISLEADING`."""
    return {name: value for name, value in env.items() if name not in MISLEADING}
