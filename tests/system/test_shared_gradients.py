"""The sums of a group of processes on CPUs, beside their NumPy reference."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from kit.processes import free_ports, started

from narrows.worker.group import shared_gradients

RANKS = 3
COUNT = 3 * shared_gradients.PART_VALUES + 5
SLICES = [(0, 7), (7, COUNT - shared_gradients.PART_VALUES // 2), (COUNT - shared_gradients.PART_VALUES // 2, COUNT)]
CALLS = 5

# Takes the folder of its results, and a word: "refused": the system has no memory for gradients.
SCRIPT = f"""
import os, sys, time
import numpy as np, torch
import torch.distributed as dist
from narrows.worker.group import group as groups, shared_gradients

def refuse(ranks, count):
    raise OSError("No space left on device")

if sys.argv[2] == "refused":
    shared_gradients.make = refuse
torch.set_num_threads(1)
dist.init_process_group("gloo")
group = groups.Group()
whole = group.gradients({COUNT}, torch.device("cpu"))
assert not whole.any()
print("shared", group._shared is not None, flush=True)
slices, found = {SLICES}, []
begin, end = slices[group.rank]
values = np.random.default_rng(group.rank)
for call in range({CALLS}):
    group.meet()
    whole.copy_(torch.from_numpy(values.standard_normal({COUNT}, np.float32)))
    if group.rank == call % {RANKS}:
        time.sleep(0.02)  # each is the last one once
    group.reduce(whole, slices)
    held = torch.full(({COUNT},), -1.0)
    held[begin:end] = whole[begin:end]
    group.spread(held, slices)
    if group.rank == (call + 1) % {RANKS}:
        time.sleep(0.02)
    group.spread(held.mul_(2), slices)
    found.append(held.numpy().copy())
np.save(f"{{sys.argv[1]}}/{{group.rank}}.npy", np.stack(found))
dist.barrier()
os._exit(0)  # gloo's threads may abort a process that ends by itself
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no memfd_create(2)")
@pytest.mark.parametrize("word", ["shared", "refused"])
def test_each_rank_gets_the_sum_of_all_ranks_to_the_bit(tmp_path: Path, word: str) -> None:
    env = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1))}
    with ExitStack() as stack:
        commands = [
            stack.enter_context(
                started(sys.executable, "-c", SCRIPT, str(tmp_path), word, env=env | {"RANK": str(rank)})
            )
            for rank in range(RANKS)
        ]
        for command in commands:
            assert command.wait() == 0, command
            assert f"shared {word == 'shared'}\n" in command.out, command
        told = [command.err.count("share no memory (No space left on device): gloo sums") for command in commands]
        assert told == [int(word == "refused"), 0, 0], "the first rank says it"
    values = [np.random.default_rng(rank) for rank in range(RANKS)]
    for call in range(CALLS):
        total = np.zeros(COUNT, np.float32)
        for rank in range(RANKS):
            total += values[rank].standard_normal(COUNT, np.float32)
        for rank in range(RANKS):
            found = np.load(tmp_path / f"{rank}.npy")[call]
            if word == "shared":
                assert found.tobytes() == (2 * total).tobytes()
            else:
                np.testing.assert_allclose(found, 2 * total, rtol=1e-5, atol=1e-5)
