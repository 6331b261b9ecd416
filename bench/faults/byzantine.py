"""How much one worker that lies costs a run, with and without the defence that docs/guarantees.md recommends.

    python bench/faults/byzantine.py                         # byte GPT, one of 4 workers lies, bsp and ssp
    python bench/faults/byzantine.py --steps 60 --workers 3  # a quick look

Rules
- A liar sends the negative of its gradient, or noise as long as it, or what it has to send a million times as long.
- Beside it stand two runs without it: of the other workers with their own rows, and of the same who share the liar's rows too.
  No defence can bring those back.
- Runs are real commands on this machine, one after the other.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch
from loss.convergence import cluster
from loss.presets import Row, Task

LIES = ("negative", "noise", "million")
HONEST, LIAR = Task("bytelm", "loss", 400), Task("liar", "loss", 400)
DEFENCE = ("--robust", "cosine", "--max-update-norm", "5")
MODES: dict[str, tuple[str, ...]] = {
    "bsp": ("--sync", "bsp"),
    "ssp": ("--sync", "ssp"),
    "ssp, `topk:0.11+sign`": ("--sync", "ssp", "--compress", "topk:0.11+sign"),
}
LIMIT_S = 1800.0
BATCH = 32  # rows of a step, of all workers


@click.command(context_settings={"show_default": True})
@click.option("--workers", default=4)
@click.option("--steps", default=400)
@click.option("--seeds", default="0", help="comma-separated")
@click.option("--modes", default=";".join(MODES), help="names, separated by ;")
@click.option("--lies", default=",".join(LIES), help="comma-separated")
@click.option(
    "--beside", "known", default="", help="losses without the liar that are known, comma-separated: not run again"
)
@click.option("--bare/--no-bare", default=True, help="also without the defence")
def main(workers: int, steps: int, seeds: str, modes: str, lies: str, known: str, bare: bool) -> None:
    """Train with a worker that lies, and print what it costs."""
    wanted = [name for name in MODES if name in modes.split(";")]

    def loss(task: Task, flags: tuple[str, ...], script: tuple[str, ...], count: int) -> float:
        row = Row("", flags, script=script)
        found = [cluster(task, row, count, steps, int(seed), 0.0, LIMIT_S)["metric"] for seed in seeds.split(",")]
        return statistics.fmean(found)

    click.echo(
        "| mode | lie | without the liar: its rows shared, missing | undefended | defended | over these |\n"
        + "|---" * 6
        + "|"
    )
    for name in wanted:
        fewer = ("--batch", str(BATCH * (workers - 1) // workers))
        without = [float(each) for each in known.split(",") if each]
        without = without or [loss(HONEST, MODES[name], rows, workers - 1) for rows in ((), fewer)]
        for lie in [lie for lie in LIES if lie in lies.split(",")]:
            script = ("--lie", lie)
            taken_in = "-"
            if bare:
                try:
                    taken_in = f"{loss(LIAR, MODES[name], script, workers):.3f}"
                except launch.CommandFailed:
                    taken_in = "the run ends"
            defended = loss(LIAR, MODES[name] + DEFENCE, script, workers)
            beside = ", ".join(f"{each:.3f}" for each in without)
            over = ", ".join(f"{100 * (defended / each - 1):+.1f} %" for each in without)
            click.echo(f"| {name} | {lie} | {beside} | {taken_in} | {defended:.3f} | {over} |")
    facts = launch.facts()
    click.echo(
        f"\n{workers} workers, one lies, {steps} steps, seeds {seeds}; commit {facts['commit']}; {facts['machine']}"
    )


if __name__ == "__main__":
    main()
