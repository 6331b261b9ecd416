"""Tells a copy of the script which GPU of its machine is its own, and hides ranks that mislead libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from narrows.worker.command.managers import ManagerPlace

GPUS = Path("/proc/driver/nvidia/gpus")  # a folder each: no CUDA context is made to count them
VISIBLE = "CUDA_VISIBLE_DEVICES"
ALONE = ManagerPlace()
# Accelerate, Lightning, MosaicML streaming and others start torch.distributed where they find a world of several, or wait for
# a MASTER_ADDR: workers of a run are no process group. --rank-variables lets the first three through.
MISLEADING = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GLOBAL_RANK", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
}


def gpus(env: Mapping[str, str], folder: Path = GPUS) -> list[str]:
    """The GPUs that are there for us, as CUDA_VISIBLE_DEVICES names them."""
    if VISIBLE in env:
        return [name for name in env[VISIBLE].split(",") if name.strip()]
    return [str(i) for i in range(len(list(folder.iterdir())))] if folder.is_dir() else []


def device(
    wanted: str, index: int, copies: int, group: bool, there: list[str], place: ManagerPlace = ALONE
) -> dict[str, str]:
    """`wanted`: --device. `there`: see `gpus`. Copies that are workers of their own see one GPU each, in turn, as cuda:0.
    Copies of a group see all, as torchrun's do. `place`: of this ps-worker
    among those of as many copies on its machine. They count together, and each group sees its own, where there are enough."""
    kind, _, number = wanted.partition(":")
    first, sharing = place.local_rank * copies, place.local_size * copies
    if group:
        own = there[first : first + copies] if place.local_size > 1 and len(there) >= sharing else []
        seen = {VISIBLE: ",".join(own)} if own and kind != "cpu" and not number else {}
        return {"NARROWS_DEVICE": f"cuda:{index}" if wanted == "cuda" else wanted} | seen
    if kind == "cpu":
        return {"NARROWS_DEVICE": "cpu", VISIBLE: ""}
    if number and int(number) < len(there):
        return {"NARROWS_DEVICE": "cuda", VISIBLE: there[int(number)]}
    if not number and sharing > 1 and there:
        return {"NARROWS_DEVICE": kind, VISIBLE: there[(first + index) % len(there)]}
    return {"NARROWS_DEVICE": wanted}


def debugger() -> dict[str, str]:
    """With a terminal breakpoint() talks to it, though the script's own stdin is empty and its stdout is ours."""
    if not (sys.platform == "linux" and sys.stdin is not None and sys.stdin.isatty()):
        return {}
    return {"PYTHONBREAKPOINT": "narrows.worker.runtime.debugging.enter", "NARROWS_TTY": os.ttyname(sys.stdin.fileno())}


def without_ranks(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in MISLEADING}
