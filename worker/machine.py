"""Questions that a script may ask of its machine."""

from __future__ import annotations

import os

import torch

CUDA = "cuda"


def local_rank() -> int:
    """Number of this process on its machine, from 0."""
    return int(os.environ.get("NARROWS_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or 0)


def device() -> torch.device:
    """Where this process computes: what --device says, and with `auto` a GPU if it sees one. It has the GPU
    with the number of its local rank, where there are several."""
    kind, _, number = os.environ.get("NARROWS_DEVICE", "auto").partition(":")
    if kind == "auto":
        kind = CUDA if torch.cuda.is_available() else "cpu"
    if kind == CUDA and not number:
        number = str(local_rank() % max(torch.cuda.device_count(), 1))
    return torch.device(f"{kind}:{number}" if number else kind)
