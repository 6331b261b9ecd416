"""Loaders that keep their place, each as docs/data.md has it: shares are apart, and a run that resumes goes on with the next
sample. `make examples` installs their imports."""

from __future__ import annotations

import functools
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for library in ("datasets", "litdata", "torchdata"):
    pytest.importorskip(library, reason="make examples installs it, apart")

pytestmark = pytest.mark.timeout(300)
STEPS, SAMPLES, BATCH = 40, 400, 4
BEHIND = 2  # clocks: the staleness bound, 1, and the step that was not pushed
LIMIT_S = 120.0

COMMON = f"""
import json, sys, time, torch
from narrows.worker import DistributedOptimizer, rank, resumable, step_count, world_size
BATCH, STEPS = {BATCH}, {STEPS}
"""
NUMBERS = """
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(rank(), 400, world_size()))
def loader():
    return StatefulDataLoader(Numbers(), BATCH, num_workers=PROCESSES)
"""
MAKERS = {
    "torchdata": NUMBERS.replace("PROCESSES", "0"),
    "torchdata with a process": NUMBERS.replace("PROCESSES", "1"),
    "datasets": """
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader
def loader():
    numbers = Dataset.from_dict({"x": list(range(400))}).to_iterable_dataset(num_shards=4)  # no shuffle(): see docs/data.md
    rows = split_dataset_by_node(numbers, rank(), world_size())
    return StatefulDataLoader(rows, BATCH, collate_fn=lambda rows: torch.tensor([row["x"] for row in rows]))
""",
    "litdata": """
from litdata import StreamingDataLoader, StreamingDataset
def loader():
    return StreamingDataLoader(StreamingDataset("numbers", shuffle=True), batch_size=BATCH)
""",
}
LOOP = """
model = torch.nn.Linear(1, 1)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
rows = resumable(loader(), "states", every=5)
while (step := step_count()) < STEPS:
    batch = next(rows)
    print("samples", json.dumps([rank(), step, batch.tolist()]), flush=True)
    model(batch.float()[:, None]).sum().backward()
    optimizer.step()
    time.sleep(0.03)
print("whole", json.dumps([rank(), [batch.tolist() for _, batch in zip(range(STEPS), loader())]]), flush=True)
"""


def lines(word: str, text: str) -> list[list[Any]]:
    return [json.loads(found) for found in re.findall(rf"^{word} (.*)$", text, re.M)]


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_that_resumes_goes_on_with_the_next_sample(name: str, tmp_path: Path) -> None:
    if name == "litdata":
        import litdata

        litdata.optimize(int, list(range(SAMPLES)), str(tmp_path / "numbers"), num_workers=1, chunk_size=10)
    (tmp_path / "script.py").write_text(COMMON + MAKERS[name] + LOOP)
    command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "2", "--rank-variables", "--sync", "ssp",
               "--checkpoint-dir", "checkpoints", "--resume", "script.py"]  # fmt: skip
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        out = ""
        for line in first.stdout:
            out += line
            if line.startswith(f"samples [0, {STEPS // 2},"):
                first.send_signal(signal.SIGINT)
        assert first.wait(LIMIT_S) == 128 + signal.SIGINT
    begun = {(rank, step): batch for rank, step, batch in lines("samples", out)}
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    again = {(rank, step): batch for rank, step, batch in lines("samples", done.stdout)}
    whole = dict(lines("whole", done.stdout))
    resumed_at = min(step for _, step in again)
    print(name, "resumed at", resumed_at)  # with pytest -s
    assert 10 <= resumed_at <= STEPS // 2 + 2, "it was resumed, and did not begin anew"
    for rank in range(2):
        both = {step: batch for life in (begun, again) for (other, step), batch in life.items() if other == rank}
        assert {step: whole[rank][step] for step in both} == both
        left_out = {*range(STEPS)} - {*both}  # who leaves first may be behind the clock at which the last one leaves
        assert left_out <= {*range(resumed_at - BEHIND, resumed_at)}
        assert all(again[key] == begun[key] for key in again.keys() & begun.keys())
    used = [sample for batches in whole.values() for batch in batches for sample in batch]
    assert len(used) == len({*used}) == 2 * STEPS * BATCH, "shares have nothing in common"


LIMIT, CHUNK = 200_000, 40_000  # bytes: of the cache of a worker, and of a chunk
LEVELS = f"""
import json, litdata, pathlib, torch
from narrows.worker import DistributedOptimizer, local_rank, rank
model = torch.nn.Linear(1, 1)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model)
cache = pathlib.Path(f"cache-{{local_rank()}}")
data = litdata.StreamingDataset("local:remote", cache_dir=str(cache), max_cache_size="{LIMIT // 1000}KB", shuffle=True)
seen, chunks, most = [], set(), 0
for rows in litdata.StreamingDataLoader(data, batch_size={BATCH}):
    seen += rows[:, 0].tolist()
    sizes = {{}}
    for path in cache.rglob("*.bin"):
        try:
            sizes[path.name] = path.stat().st_size
        except FileNotFoundError:  # it was evicted meanwhile
            pass
    chunks, most = chunks | sizes.keys(), max(most, sum(sizes.values()))
print("read", json.dumps([rank(), seen, sorted(chunks), most]), flush=True)
"""


def test_litdata_reads_through_a_cache_that_stays_below_its_limit(tmp_path: Path) -> None:
    """A folder stands for the cloud. Each worker has a cache of its own, and fetches the chunks of its own part."""
    import litdata
    import torch

    row = functools.partial(torch.full, (1024,), dtype=torch.int32)
    litdata.optimize(
        row, list(range(SAMPLES)), str(tmp_path / "remote"), num_workers=1, chunk_bytes=f"{CHUNK // 1000}KB"
    )
    (tmp_path / "script.py").write_text(LEVELS)
    command = [
        sys.executable,
        "-m",
        "narrows.worker.command.cli",
        "-n",
        "2",
        "--rank-variables",
        "--sync",
        "bsp",
        "script.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    read = lines("read", done.stdout)
    assert sorted(sample for _, seen, _, _ in read for sample in seen) == list(range(SAMPLES)), "each sample once"
    (_, _, first, _), (_, _, second, _) = read
    remote = [path.name for path in (tmp_path / "remote").glob("*.bin")]
    assert {*first, *second} == {*remote} and len({*first} & {*second}) <= 1, "who shares a chunk shares the border"
    for _, _, chunks, most in read:
        print("chunks", len(chunks), "most bytes", most)  # with pytest -s
        assert 0 < most <= LIMIT + CHUNK < len(chunks) * CHUNK / 2  # one chunk may come while another one is evicted
