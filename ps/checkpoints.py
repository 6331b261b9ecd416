"""Checkpoints: one safetensors file per shard and clock, and the whole model by tensor names at the end of a run.

    DIR/shard-0.clock-120.safetensors     x, p, optimizer state; metadata: clock, publication, plan, settings
    DIR/model.safetensors                 every tensor of the model by name, float32, and the module's buffers

Every write goes to a temporary file first and is renamed, so a file is whole or absent. The newest two clocks are kept.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from narrows.protocols.errors import IncompatibleError
from narrows.protocols.keys import Plan, unpack_arrays

KEPT = 2
_NAME = re.compile(r"shard-(\d+)\.clock-(\d+)\.safetensors")


def _write(path: Path, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, temporary, metadata)
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def clocks(folder: Path, shard: int) -> tuple[int, ...]:
    """Clocks of which `folder` holds a checkpoint of this shard, ascending."""
    found = [_NAME.fullmatch(path.name) for path in folder.glob("shard-*.safetensors")] if folder.is_dir() else []
    return tuple(sorted(int(match[2]) for match in found if match and int(match[1]) == shard))


def path_of(folder: Path, shard: int, clock: int) -> Path:
    return folder / f"shard-{shard}.clock-{clock}.safetensors"


def write(
    folder: Path, shard: int, clock: int, arrays: dict[str, npt.NDArray[np.float32]], facts: dict[str, Any]
) -> tuple[int, ...]:
    """Write a shard's checkpoint, drop all but the newest KEPT, and return the clocks on disk."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(path_of(folder, shard, clock), arrays, {"narrows": json.dumps(facts | {"clock": clock})})
    for old in clocks(folder, shard)[:-KEPT]:
        path_of(folder, shard, old).unlink(missing_ok=True)
    return clocks(folder, shard)


def read(folder: Path, shard: int, clock: int) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, Any]]:
    """The arrays and facts of a shard's checkpoint. Raises IncompatibleError where the file is no checkpoint."""
    path = path_of(folder, shard, clock)
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {})["narrows"])
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise IncompatibleError(f"{path} is no checkpoint of Narrows: {error}") from None


def merge(folder: Path, shards: int, clock: int, buffers: dict[str, npt.NDArray[Any]]) -> Path:
    """Write model.safetensors from the shards' checkpoints of `clock`; return its path."""
    flat = []
    facts: dict[str, Any] = {}
    for shard in range(shards):
        arrays, facts = read(folder, shard, clock)
        flat.append(arrays["x"])
    whole = np.concatenate(flat)
    plan = Plan.unpacked(bytes.fromhex(facts["plan"]))
    offsets = plan.offsets()
    tensors: dict[str, npt.NDArray[Any]] = dict(buffers)
    for i, tensor in enumerate(plan.tensors):
        tensors[tensor.name] = whole[offsets[i] : offsets[i + 1]].reshape(tensor.shape)
    path = folder / "model.safetensors"
    _write(path, tensors, {"narrows": json.dumps({"clock": clock})})
    return path


def buffers(folder: Path, clock: int) -> dict[str, npt.NDArray[Any]]:
    """The module buffers that went along with the checkpoint of `clock`, by name."""
    _, facts = read(folder, 0, clock)
    packed = unpack_arrays(bytes.fromhex(facts.get("buffers", "")))
    return {name: np.frombuffer(raw, dtype).reshape(shape) for name, (dtype, shape, raw) in packed.items()}
