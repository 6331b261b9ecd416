"""Losses of rules that merge the work of many workers: runs a queue of jobs, each in one process and one thread.

    echo '{"workers": 4, "staleness": 0, "up": "sign"}' >jobs.jsonl  # a line a job: fields of Job in job.py
    python bench/loss/run_jobs.py jobs.jsonl                           # the byte GPT
    python bench/loss/run_jobs.py jobs.jsonl --model 3,96,3            # the small one of README.md
    python bench/loss/run_jobs.py jobs.jsonl --climb --table gossip    # each job at its best rate, under a heading
    python bench/loss/run_jobs.py jobs.jsonl --model 1,32,1 --steps 8  # seconds: to try this script

Rules
- A run trains as bytelm.py does, with its weights, rows, rates, clipping and held-out loss. All workers step at once. Losses
  count, seconds do not.
- A line has the job's loss at the end, its losses at a quarter, a half and three quarters of the steps, and facts of the run.
  The three losses in between are of an eighth of the held-out windows.
- A job that --out has for this commit, model and text is not run again.
- With --climb each job runs at several rates. It begins at its own rate and goes up and down the ladder of presets.py, where
  neighbours are a factor of sqrt(2) apart, until the best rate has a worse one on either side.
- With --table the first job of the queue is the row that all others are compared with.
- A run ends early and has no loss if it diverges, or if its loss is above a limit of the job's `give_up`.
- A line of the queue that describes no job is reported and skipped; the exit code is then 1.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch

from narrows.compression.buffers import FloatArray

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
from lab import record
from loss.bf16_replicas import ByteTask
from loss.job import Job, Outcome, Progress
from loss.presets import RATES, climb
from loss.rounds import local
from loss.update_push import bsp, updates

MODES = {"bsp": bsp, "updates": updates, "local": local}
QUICK_WINDOWS = 128  # of the held-out loss during a run


class Progressed:
    """The losses of a run at a quarter, a half and three quarters of its steps, and whether it ended early."""

    def __init__(self, task: ByteTask, job: Job) -> None:
        self.task, self.job, self.curve, self.ended = task, job, list[float](), False
        self.quarters = {job.steps * part // 4 for part in (1, 2, 3)}

    def __call__(self, done: int, x: FloatArray) -> bool:
        if done in self.quarters:
            self.curve.append(round(self.task.loss(x, QUICK_WINDOWS), 4))
            self.ended = not self.curve[-1] < self.job.limit(done)  # nor is NaN
        return self.ended


def train(task: ByteTask, job: Job) -> record.Figures:
    """Run a job, and return its losses and facts. The loss at the end is None if the run ended early."""
    progress: Progress
    progress = progressed = Progressed(task, job)
    before_s = time.process_time()
    outcome: Outcome = MODES[job.mode](task, job, progress)
    x, facts = outcome
    told: record.Figures = {"loss": (None if progressed.ended else round(task.loss(x), 4), "nats a byte")}
    quarters = zip(("a quarter", "a half", "three quarters"), progressed.curve, strict=False)
    told |= {f"at {quarter}": (loss, "nats a byte") for quarter, loss in quarters}
    told |= {name: (round(value, 4), "") for name, value in facts.items()}
    return told | {"CPU": (round(time.process_time() - before_s), "s")}


def queued(lines: list[str], steps: int | None) -> Iterator[Job | str]:
    """Yield the jobs of a queue, and a sentence for each line that describes none. Skips blank lines and comments (#)."""
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        try:
            job = Job(**json.loads(line))
            yield replace(job, steps=steps or job.steps)
        except (TypeError, ValueError) as error:
            yield f"{line.strip()}: {error}"


@click.command(help=__doc__, context_settings={"max_content_width": 120, "show_default": True})
@click.argument("queue", type=click.Path(exists=True, path_type=Path))
@click.option("--model", default="4,160,5", help="layers,width,heads")
@click.option("--climb", "climbs", is_flag=True, help="run each job at the rates around its own, up to its best one")
@click.option("--table", default="", help="the heading of its lines on the page")
@click.option("--steps", type=int, help="of every job, for quick looks")
@click.option("--seconds", default=float("inf"), help="no job begins after so many seconds")
@record.out_option("loss/run_jobs")
def main(queue: Path, model: str, climbs: bool, table: str, steps: int | None, seconds: float, out: Path) -> None:
    torch.set_num_threads(1)
    training, held_out, sha256 = bytelm.library()
    try:
        layers, width, heads = map(int, model.split(","))
        task = ByteTask(training, held_out, layers, width, heads)
    except ValueError as error:
        raise click.UsageError(f"--model {model}: {error}") from error
    recorder = record.Recorder("loss/run_jobs", out)
    told: dict[str, record.Scalar] = {"model": model, "text": sha256[:12]}
    found, until = list(queued(queue.read_text().splitlines(), steps)), time.monotonic() + seconds
    if climbs:
        off = f"a climb begins at one of {', '.join(RATES)}"
        found = [job if isinstance(job, str) or str(job.rate) in RATES else f"rate {job.rate}: {off}" for job in found]
    jobs = [job for job in found if isinstance(job, Job)]

    def loss_at(job: Job, rate: str | float) -> float | None:
        """Return the loss of a run, from --out or of a run now; None if the run ended early, or --seconds are over."""
        job = replace(job, rate=float(rate))
        if not recorder.found(seed=job.seed, **job.arguments(), **told) and time.monotonic() < until:
            figures, beside = train(task, job), str(jobs[0]) if table else ""
            recorder.add(str(job), figures, table=table, beside=beside, best_of="rate", seed=job.seed,
                         arguments=job.arguments() | told)  # fmt: skip
            said = ", ".join(f"{name} {value}" for name, (value, _) in figures.items())
            click.echo(f"{job}, rate {job.rate}, seed {job.seed}: {said}")
        lines = recorder.found(seed=job.seed, **job.arguments(), **told)
        return lines[-1].figures["loss"].value if lines and "loss" in lines[-1].figures else None

    for job in found:
        if isinstance(job, str):
            click.echo(job, err=True)
        elif climbs:
            climb(str(job.rate), partial(loss_at, job))
        else:
            loss_at(job, job.rate)
    sys.exit(any(isinstance(job, str) for job in found))


if __name__ == "__main__":
    main()
