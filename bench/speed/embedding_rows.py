"""An embedding table that no worker holds: a worker's memory, bytes a step beside those of the rows touched, and step time.

    python bench/speed/embedding_rows.py  # 10 million rows x 32, 2 workers, 2 shards; bsp and ssp
    python bench/speed/embedding_rows.py --rows 1000 --steps 20

Rules
- Bytes of rows are 4 * dim for each row that a step touched, once up and once down. All else that travels counts as overhead:
  the indices, the head of the model, headers, heartbeats.
- A run with a table of SMALL rows is the measure of memory: what a worker has more with the large one is the table's.
- Bytes are sums over all steps after SETTLE. A step's time counts on a machine that does nothing else.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch

SMALL = 1000
SETTLE = 5
OVERHEAD_MAX = 1.05
MODES = {"bsp": ("--sync", "bsp"), "ssp": ("--sync", "ssp", "--compress", "topk:0.05+int8")}


def measure(mode: str, rows: int, dim: int, steps: int, workers: int, shards: int, limit_s: float) -> dict[str, Any]:
    """Measure one run: peak, own and private memory and PSS of the worker that has most, MB; bytes up and down, and of the
    rows that were touched, a step; and its seconds. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", str(workers), "--shards", str(shards)]
        task = ["bench/tasks/bags.py", "--rows", str(rows), "--dim", str(dim), "--steps", str(steps)]
        launch.run([*command, *MODES[mode], "--checkpoint-dir", "none", "--record", str(record), *task], limit_s)
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    found = [line for line in lines if line["event"] == "step" and "touched" in line]
    late = [line for line in found if line["clock"] > SETTLE]
    each = [
        [line["seconds"] for line in late if line["local_rank"] == worker] for worker in {x["local_rank"] for x in late}
    ]
    return {
        **{name: max(line[name] for line in found) for name in ("peak_mb", "own_mb", "pss_mb", "private_mb")},
        "rows": statistics.mean(line["touched"] for line in late),
        "row_bytes": 4 * dim * statistics.mean(line["touched"] for line in late),
        "up": statistics.mean(line["push_bytes"] for line in late),
        "down": statistics.mean(line["pull_bytes"] for line in late),
        "step_s": max(statistics.median(b - a for a, b in pairwise(at)) for at in each),
    }


@click.command(context_settings={"show_default": True})
@click.option("--rows", default=10_000_000)
@click.option("--dim", default=32)
@click.option("--steps", default=60)
@click.option("--workers", default=2)
@click.option("--shards", default=2)
@click.option("--limit", "limit_s", default=300.0, help="seconds after which a run counts as failed")
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "rows.json")
def main(rows: int, dim: int, steps: int, workers: int, shards: int, limit_s: float, out: Path) -> None:
    """Train with a large table and with a small one."""
    told = {"rows": rows, "dim": dim, "steps": steps, "workers": workers, "shards": shards} | launch.facts()
    small = measure("bsp", SMALL, dim, steps, workers, shards, limit_s)
    click.echo(f"{SMALL} rows: a worker has {small['peak_mb']:.0f} MB at most, {small['own_mb']:.0f} MB of its own")
    found = {}
    for mode in MODES:
        found[mode] = run = measure(mode, rows, dim, steps, workers, shards, limit_s)
        click.echo(
            f"{mode}, {rows} rows x {dim}, a table of {4e-6 * rows * dim:.0f} MB: a worker has {run['peak_mb']:.0f} MB at "
            f"most, {run['own_mb']:.0f} MB of its own, PSS {run['pss_mb']:.0f} MB, {run['private_mb']:.0f} MB not shared; "
            f"{run['rows']:.0f} rows a step are {run['row_bytes'] / 1e3:.1f} kB, up {run['up'] / 1e3:.1f} kB, "
            f"down {run['down'] / 1e3:.1f} kB; a step {1e3 * run['step_s']:.1f} ms"
        )
        most = max(run["up"], run["down"]) / run["row_bytes"]
        click.echo(
            f"bytes / those of the rows: {most:.3f}; at most {OVERHEAD_MAX} {'holds' if most <= OVERHEAD_MAX else 'fails'}"
        )
    launch.save(out, [told | {"small": small} | found])
    click.echo(f"commit {told['commit']}, {told['machine']}, load {told['load']}")


if __name__ == "__main__":
    main()
