"""Questions that a script may ask of its machine, and what the first of its processes tells the others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from narrows.protocols.config.checkpoint_names import MACHINE_DIR

CUDA = "cuda"
TOLD_LIMIT_S = 60.0  # the first process tells the others within this, once they ask
LOOK_S = 0.05  # from one look for it to the next


def local_rank() -> int:
    """Number of this process on its machine, from 0."""
    return int(os.environ.get("NARROWS_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or 0)


def from_first(name: str, text: str) -> str | None:
    """Hand a text from the first process of this machine to the others. Each calls it once for a name.

    Args:
        name: A file name, the same in all processes.
        text: What the first process tells; that of the others does not count.

    Returns:
        The text of the first process. None in another one where it has not come within TOLD_LIMIT_S, or where no ps-worker has
        started both.
    """
    folder = os.environ.get(MACHINE_DIR, "")
    if not local_rank():
        if folder:
            new = Path(folder, f"{name}.{os.getpid()}.new")
            new.write_text(text)
            new.replace(Path(folder, name))  # whole or absent
        return text
    stop_by = time.monotonic() + TOLD_LIMIT_S
    while folder and time.monotonic() < stop_by:
        try:
            return Path(folder, name).read_text()
        except FileNotFoundError:
            time.sleep(LOOK_S)
    return None


def device() -> torch.device:
    """Where this process computes: what --device says, and with `auto` a GPU if it sees one. It has the GPU
    with the number of its local rank, where there are several."""
    kind, _, number = os.environ.get("NARROWS_DEVICE", "auto").partition(":")
    if kind == "auto":
        kind = CUDA if torch.cuda.is_available() else "cpu"
    if kind == CUDA and not number:
        number = str(local_rank() % max(torch.cuda.device_count(), 1))
    return torch.device(f"{kind}:{number}" if number else kind)
