"""Names of the files in a run's --checkpoint-dir.

Writers and readers of these files take the names from here.
"""

from __future__ import annotations

import re

SHARD = re.compile(
    r"shard-(\d+)\.clock-(\d+)\.safetensors"
)  # a shard's checkpoint, see ps/checkpoints/checkpoint_files.py
MODEL = "model.safetensors"  # of a run, in its folder of checkpoints
COMING = re.compile(rf"{SHARD.pattern}\.[0-9a-f]+\.tmp")  # a checkpoint in writing, or left by a killed process
STATE = re.compile(
    r"narrows-optimizer-(\d+)\.pt"
)  # the state of a worker's optimizer by rank, see worker/checkpoint/optimizer_state.py
ROUND = re.compile(
    r"narrows-model-(\d+)\.round-(\d+)\.pt"
)  # the model of a worker of gossip, see worker/checkpoint/gossip_checkpoints.py
BYTES = "bytes."  # prefix of arrays that hold facts of type bytes: megabytes do not belong into a file's header
OPTIMIZER = "optimizer."  # arrays of the servers' optimizer: GROUP.PIECE.NAME


def state_file(rank: int) -> str:
    return f"narrows-optimizer-{rank}.pt"


def round_file(rank: int, number: int) -> str:
    return f"narrows-model-{rank}.round-{number}.pt"


def shard_file(shard: int, clock: int) -> str:
    return f"shard-{shard}.clock-{clock}.safetensors"
