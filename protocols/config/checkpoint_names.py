"""Names of what a run leaves in its --checkpoint-dir, and of the variables that tell a worker of folders: who writes there and
who reads there have them from here."""

from __future__ import annotations

import re

FOLDER = "NARROWS_CHECKPOINT_DIR"  # the variable that tells a worker of it
MACHINE_DIR = (
    "NARROWS_MACHINE_DIR"  # and of a folder that all workers of one ps-worker have, see worker/runtime/device.py
)
SHARD = re.compile(
    r"shard-(\d+)\.clock-(\d+)\.safetensors"
)  # a shard's checkpoint, see ps/checkpoints/checkpoint_files.py
MODEL = "model.safetensors"  # of a run, in its folder of checkpoints
COMING = re.compile(rf"{SHARD.pattern}\.[0-9a-f]+\.tmp")  # one that is being written, or that a killed process has left
STATE = re.compile(
    r"narrows-optimizer-(\d+)\.pt"
)  # the state of a worker's optimizer by rank, see worker/checkpoint/optimizer_state.py
ROUND = re.compile(
    r"narrows-model-(\d+)\.round-(\d+)\.pt"
)  # the model of a worker of gossip, see worker/checkpoint/gossip_checkpoints.py
BYTES = "bytes."  # facts that are bytes are arrays of this name: a header is no place for megabytes
OPTIMIZER = "optimizer."  # arrays of the servers' optimizer: GROUP.PIECE.NAME


def state_file(rank: int) -> str:
    return f"narrows-optimizer-{rank}.pt"


def round_file(rank: int, number: int) -> str:
    return f"narrows-model-{rank}.round-{number}.pt"


def shard_file(shard: int, clock: int) -> str:
    return f"shard-{shard}.clock-{clock}.safetensors"
