"""The device and local rank of this process, and a text from the first process of a machine to the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from narrows.worker.runtime.config import told

CUDA = "cuda"
TOLD_LIMIT_S = 60.0  # a process waits so long for the text of the first one
LOOK_S = 0.05  # between two attempts to read it


def local_rank() -> int:
    """Return the number of this process on its machine, from 0."""
    rank: int | None = told("local_rank")
    return int(os.environ.get("LOCAL_RANK") or 0) if rank is None else rank


def from_first(name: str, text: str) -> str | None:
    """Hand a text from the first process of this machine to the others. Each calls it once for a name.

    Args:
        name: A file name, the same in all processes.
        text: The text of the first process. The text of the others is ignored.

    Returns:
        The text of the first process. None in another process if the text has not come within TOLD_LIMIT_S, or if no
        ps-worker has started both.
    """
    folder = told("machine_dir")
    if not local_rank():
        if folder:
            new = Path(folder, f"{name}.{os.getpid()}.new")
            new.write_text(text)
            new.replace(Path(folder, name))  # a reader finds the whole file or none
        return text
    stop_by = time.monotonic() + TOLD_LIMIT_S
    while folder and time.monotonic() < stop_by:
        try:
            return Path(folder, name).read_text()
        except FileNotFoundError:
            time.sleep(LOOK_S)
    return None


def device() -> torch.device:
    """Return the device of this process: that of --device; with `auto` a GPU if there is one, else the CPU.

    Of several GPUs the process has the one with the number of its local rank.
    """
    kind, _, number = (told("device") or "auto").partition(":")
    if kind == "auto":
        kind = CUDA if torch.cuda.is_available() else "cpu"
    if kind == CUDA and not number:
        number = str(local_rank() % max(torch.cuda.device_count(), 1))
    return torch.device(f"{kind}:{number}" if number else kind)
