"""Two workers train a model of 5 M parameters. The bench counts the bytes of start and end.

    python bench/speed/start_and_end.py               # every row
    python bench/speed/start_and_end.py --rows 'ssp*'

Rules
- The bench counts the messages with first weights, last updates and whole models. Figures are in models: bytes of all
  workers over those of the parameters as float32, with frames and heartbeats.
- "beyond": without the first weights, of which one worker sends 1 model and the other takes 1.
- The states of the last clocks arrive after the last step and count too: at most 1 model of "ssp int8" down, 0.06 of
  "ssp topk:0.05+int8", and 2 of "bsp, updates", whose states are whole.
- "at 20 Mbit/s": seconds that all of it takes a model of 100 M parameters on one link at the server, by its bytes alone.
- "sampler": the script asks `sampler(steps=...)` for its samples, so that the last step shows the shared model too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

SPARSE = "topk:0.05+int8"
ROWS: dict[str, tuple[str, ...]] = {
    "bsp": ("--sync", "bsp"),
    f"bsp, updates, {SPARSE}": ("--sync", "bsp", "--push", "update", "--compress", SPARSE),
    "ssp dense": ("--sync", "ssp"),
    "ssp int8": ("--sync", "ssp", "--compress", "int8"),
    f"ssp {SPARSE}": ("--sync", "ssp", "--compress", SPARSE),
    f"ssp {SPARSE}, sampler": ("--sync", "ssp", "--compress", SPARSE),
    "local dense": ("--sync", "local", "--local-steps", "4"),
    f"local {SPARSE}": ("--sync", "local", "--local-steps", "4", "--compress", SPARSE),
    **{
        f"ssp {spec}": ("--sync", "ssp", "--staleness", "2", "--compress", spec)
        for spec in ("topk:0.11+sign", "cycle:0.15+sign")  # of README's table
    },
}
SHARDS, WORKERS, WIDTH, STEPS = 4, 2, 1024, 12
LIMIT_S = 300.0
OF_PARAMETERS, BITS_PER_S = 100e6, 20e6  # of the seconds


def worker(millions: int, sampled: bool) -> None:
    """Train as one worker."""
    import torch
    from torch.utils.data import DataLoader

    from narrows.worker import DistributedOptimizer, sampler

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions)))
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4), model)
    data: Any = [*range(64)]
    batches: Any = DataLoader(data, 4, sampler=sampler(data, 4, steps=STEPS)) if sampled else range(STEPS)
    for _ in batches:
        x = torch.randn(4, WIDTH)
        optimizer.zero_grad()
        (model(x) - x).pow(2).mean().backward()
        optimizer.step()


def measure(name: str, flags: Sequence[str], millions: int) -> record.Figures:
    """Run a row. Raises CommandFailed."""
    own = [str(Path(__file__).resolve()), "worker", str(millions), *(["sampler"] if "sampler" in name else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record.jsonl"
        command = ("-n", str(WORKERS), *flags, "--shards", str(SHARDS), "--record", str(path), *own)
        launch.run(launch.ps_worker(*command), LIMIT_S)
        events = [json.loads(line) for line in path.read_text().splitlines()]
    done = next(event for event in events if event["event"] == "done")
    size = 4 * next(event for event in events if event["event"] == "start")["parameters"]
    up, down = done["edge_bytes_up"] / size, done["edge_bytes_down"] / size
    return {
        "up": (up, "models"),
        "down": (down, "models"),
        "up beyond": (up - 1, "models"),
        "down beyond": (down - (WORKERS - 1), "models"),
        "at 20 Mbit/s": ((up + down) * OF_PARAMETERS * 32 / BITS_PER_S, "seconds"),
    }


@click.command(context_settings={"show_default": True})
@record.rows_option(ROWS)
@click.option("--millions", default=5, help="parameters of the model")
@record.out_option("speed/start_and_end")
def main(pattern: str, millions: int, out: Path) -> None:
    """Count the bytes of start and end."""
    recorder = record.Recorder("speed/start_and_end", out)

    def row(name: str) -> None:
        recorder.add(name, measure(name, ROWS[name], millions), arguments={"millions": millions})

    record.measure_rows(recorder, ROWS, pattern, row)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(int(sys.argv[2]), "sampler" in sys.argv[3:])
    else:
        main()
