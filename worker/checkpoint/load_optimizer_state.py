"""Reads the optimizer state that a run has left in a folder, for a script without Narrows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from narrows.protocols.addresses import located
from narrows.protocols.config.checkpoint_names import BYTES, OPTIMIZER, SHARD, STATE, shard_file
from narrows.protocols.config.key_ranges import VALUES
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.storage.store_copy import FolderCopy, opened
from narrows.worker.checkpoint.server_state import State, as_state_dict, put_together
from narrows.worker.model.flat import FloatArray, plain
from narrows.worker.model.optimizers import as_one


def saved_state(
    folder: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    model: torch.nn.Module,
) -> dict[str, Any]:
    """Return the optimizer state that a run has left in its --checkpoint-dir.

    If gradients were pushed, it is the servers' state of the newest checkpoint. If updates were pushed, it is the state
    of the worker with the newest file.

    Args:
        folder: the --checkpoint-dir of ps-serve or ps-worker, a path or an address.
        optimizer: the optimizer, or a list or container of several, that is to load the state.
        model: the module with the optimizer's parameters.

    Returns:
        A state_dict for `optimizer`, with the clock of the state under "narrows"; of several optimizers, their states
        as a list under "optimizers". Learning rates and all other entries of the groups are those of `optimizer`.

    Raises:
        UsageError: the folder has no state, or a state of other parameters.
        OSError: the store fails.
        SafetensorError: a file is damaged.
    """
    inner, names = as_one(optimizer, model), {plain(name): p for name, p in model.named_parameters()}
    here, copy = opened(located("saved_state:", os.fspath(folder)), flag="saved_state:")
    clock, states = _of_servers(here, copy) or _of_workers(here, copy) or (-1, {})
    if not states:
        raise UsageError(
            f"{os.fspath(folder)} has no state of an optimizer: name the --checkpoint-dir of ps-serve or ps-worker"
        )
    for name, state in states.items():
        shapes = [tuple(value.shape) for value in state.values() if value.dim()]
        if name not in names or any(shape != tuple(names[name].shape) for shape in shapes):
            raise UsageError(f"the state of {name!r} in {os.fspath(folder)} is of no parameter of this model")
    found = {id(names[name]): state for name, state in states.items()}
    return as_state_dict(inner, found) | {"narrows": {"clock": clock}}


def _of_servers(folder: Path, copy: FolderCopy) -> tuple[int, dict[str, State]] | None:
    """Return clock and states by tensor of the newest checkpoint of all shards; None if it has no optimizer state."""
    clocks = {int(match[2]) for name in copy.names(folder) if (match := SHARD.fullmatch(name))}
    for clock in sorted(clocks, reverse=True):
        copy.pull(folder, lambda name: (match := SHARD.fullmatch(name)) and int(match[2]) == clock)  # noqa: B023
        try:
            with ExitStack() as stack:
                return _of_clock(folder, clock, lambda path: stack.enter_context(safe_open(path, framework="numpy")))
        except FileNotFoundError:
            continue  # a shard was killed before it wrote its file
    return None


def _of_clock(folder: Path, clock: int, opened: Callable[[Path], Any]) -> tuple[int, dict[str, State]] | None:
    """Return the clock and the states by tensor from the shards' files of one clock; None without optimizer state.

    Args:
        folder: the folder of the checkpoints.
        clock: the clock of the files.
        opened: opens a safetensors file.

    Raises:
        FileNotFoundError: a shard's file is absent.
    """

    def file_of(shard: int) -> Any:
        return opened(folder / shard_file(shard, clock))

    first = file_of(0)
    plan = ModelSpec.unpacked(first.get_tensor(f"{BYTES}plan").tobytes())
    facts = json.loads(first.metadata()["narrows"])
    files = [first, *map(file_of, range(1, int(facts.get("shards", 1))))]
    ranges = plan.ranges(len(files), str(facts.get("cut", VALUES)))
    known, places = list[Any](), dict[tuple[int, str], list[tuple[Any, str, int, int]]]()
    for file, keys in zip(files, ranges, strict=True):
        pieces = plan.pieces(*keys)
        for key in file.keys():  # noqa: SIM118 - it is no mapping
            if key.startswith(OPTIMIZER):
                group, piece, name = key.removeprefix(OPTIMIZER).split(".", 2)
                tensor, begin, end = pieces[int(group)][int(piece)]
                scalar = not file.get_slice(key).get_shape()
                known.append([tensor, name, float(file.get_tensor(key)) if scalar else None])
                if not scalar:
                    places.setdefault((tensor, name), []).append((file, key, begin, end))
    offsets = plan.offsets()

    def read(tensor: int, name: str) -> FloatArray:
        values, first = np.zeros(plan.tensors[tensor].key_count, np.float32), offsets[tensor]
        for file, key, begin, end in places[tensor, name]:
            values[begin - first : end - first] = file.get_tensor(key)
        return values

    states = put_together(known, read, plan.tensors)
    return (clock, {plan.tensors[tensor].name: state for tensor, state in states.items()}) if states else None


def _of_workers(folder: Path, copy: FolderCopy) -> tuple[int, dict[str, State]] | None:
    """Return clock and states of the worker with the newest file (optimizer_state.py); None if there is no file."""
    copy.pull(folder, STATE.fullmatch)
    paths = [path for path in folder.glob("*") if STATE.fullmatch(path.name)]

    def clock(path: Path) -> int:
        return int(torch.load(path, map_location="cpu", mmap=True, weights_only=True)["clock"])

    newest = max(paths, key=clock, default=None)
    if newest is None:
        return None
    found = torch.load(newest, map_location="cpu", weights_only=True)
    return found["clock"], found["state"]
