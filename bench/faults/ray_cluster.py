"""The byte GPT on a Ray of three nodes on this machine: undisturbed, with an actor and a node killed, and from 2 to 4 workers.

    make .venv-ray/installed && .venv-ray/bin/python bench/faults/ray_cluster.py  # three runs, 15 minutes on two cores
    .venv-ray/bin/python bench/faults/ray_cluster.py --only killed --steps 100

Rules
- The run hands out the rows (`ranges`), so each run learns from the same ones. With --own-rows each worker has a fixed share
  of each step: those of a worker that is away are left out.
- Undisturbed and killed have 4 workers from the beginning, as the bytes of a step are divided by their number.
- Killed: a worker's actor at a third of the steps, at two thirds a node with workers and without the server.
- Grown: the run starts with 2 workers, which have no room for more, and at a third of the steps a node comes that has it.
- A loss is of the held-out bytes, by the model that all end with.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

# Else ray.init turns 127.0.0.1 into the machine's own address, where this cluster does not listen.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from pathlib import Path

import click
import ray
from ray.cluster_utils import Cluster

from narrows.worker.ray import Progress, Result, train

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch

TASK = str(launch.ROOT / "bench" / "tasks" / "bytelm.py")
HERE = {"include_dashboard": False, "node_ip_address": "127.0.0.1"}
SHARDS = 2


class Case:
    """One run: its nodes, its workers, and what is done to it at each progress."""

    def __init__(self, steps: int, rooms: tuple[int, ...], workers: tuple[int, int]) -> None:
        self.steps, self.workers, self.did = steps, workers, ""
        self.script = ["--steps", str(steps)]
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **HERE})
        self.nodes = [self.cluster.add_node(num_cpus=room, **HERE) for room in rooms]
        self.most = 0

    def seen(self, progress: Progress) -> None:
        self.most = max(self.most, sum(bool(facts.process) for facts in progress.workers.values()))
        self.disturb(progress)
        print(progress, self.did, file=sys.stderr, flush=True)

    def disturb(self, progress: Progress) -> None:
        """Nothing is done to this one."""

    def run(self) -> Result:
        ray.init(address=self.cluster.address, log_to_driver=False)
        try:
            with tempfile.TemporaryDirectory() as folder:
                return train(
                    TASK, self.script, workers=self.workers, shards=SHARDS, sync="ssp",
                    strategy="SPREAD", staleness=2, compress="topk:0.11+sign", checkpoint_dir=folder, host="127.0.0.1",
                    checkpoint_every=5, report=self.seen,
                )  # fmt: skip
        finally:
            ray.shutdown()
            self.cluster.shutdown()


class Killed(Case):
    def disturb(self, progress: Progress) -> None:
        third = self.steps // 3
        if not self.did and progress.clock >= third and 1 in progress.workers:
            os.kill(progress.workers[1].pid, signal.SIGKILL)
            self.did = "an actor is killed"
        elif self.did == "an actor is killed" and progress.clock >= 2 * third and progress.workers:
            places = {facts.node for facts in progress.workers.values()} - {f.node for f in progress.servers.values()}
            for node in [node for node in self.nodes if node.node_id in places][:1]:
                self.cluster.remove_node(node, allow_graceful=False)
                self.did = "an actor and a node are killed"


class Grown(Case):
    def disturb(self, progress: Progress) -> None:
        if not self.did and progress.clock >= self.steps // 3:
            self.cluster.add_node(num_cpus=2, **HERE)
            self.did = "a node has come"


CASES: dict[str, Callable[[int], Case]] = {
    "undisturbed": lambda steps: Case(steps, (4, 4), (4, 4)),
    "killed": lambda steps: Killed(steps, (4, 4), (4, 4)),  # one alone has room for all of them
    "grown": lambda steps: Grown(steps, (1, 1), (2, 4)),
}


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=400, help="of each run")
@click.option(
    "--own-rows", is_flag=True, help="each worker has its own share of the rows; by default the run hands them out"
)
@click.option("--only", type=click.Choice([*CASES]), help="this run alone; all by default")
def main(steps: int, own_rows: bool, only: str | None) -> None:
    """Print the table of the runs as Markdown."""
    facts: dict[str, Any] = launch.facts()
    click.echo("| run | what was done | most workers at once | clock | loss |\n|---|---|---|---|---|")
    for name in [only] if only else CASES:
        case = CASES[name](steps)
        case.script += [] if own_rows else ["--ranges"]
        result = case.run()
        done = case.did or "nothing"
        click.echo(f"| {name} | {done} | {case.most} | {result.clock} | {result.values['loss']:.4f} |")
    click.echo(f"\nCommit {facts['commit']}; {facts['machine']}, load {facts['load']}; Ray {ray.__version__}.")


if __name__ == "__main__":
    main()
