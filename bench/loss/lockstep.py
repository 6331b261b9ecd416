"""How are the updates of many workers merged best? Whole runs in lockstep, many of them at once, as one batch of arrays.

    python bench/loss/lockstep.py --preset gain  # a mean of updates, with and without a gain
    python bench/loss/lockstep.py --preset local  # rounds of 4 to 50 steps, and what the outer optimizer adds
    python bench/loss/lockstep.py --cases cases.json --out my.jsonl  # a list of objects, each with fields of Case
    python bench/loss/lockstep.py --write-text text.npz  # the library's text, for --text on another machine

Rules
- A run is bytelm.py: its weights, rows, rates, clipping and held-out loss. All workers step at once; nothing is timed.
- Arrays are [runs, workers, values]. The runs of a case differ in their rate and seed alone.
- An update of clock c is folded with those of all workers, and is seen `staleness` clocks later.
- A run that --out has for this commit is not run again. Agreement, factor and held back are means of the second half.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

from narrows.compression.sampling import sample_of
from narrows.ps.store.update_gain import SMOOTHING, WINDOW

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
from lab import record
from loss.replicas import FLAGS, AdamW, Muon, Task, clipped, code

RATES = "0.0014,0.002,0.0028,0.004,0.0056"


@dataclass(frozen=True)
class Case:
    """One way to train. Fields that are texts are explained by code() in replicas.py, gain_of() and weight()."""

    workers: int = 1
    mode: str = "updates"  # mean: one process; gradients: bsp; updates: each worker's own optimizer makes them
    staleness: int = 0
    up: str = "dense"
    down: str = ""  # as up
    gain: str = "1"
    stand: str = "1"  # weight of own updates in flight in the worker's replica
    kept: str = "1"  # weight of the residual there
    inner: str = "adamw"
    local_steps: int = 1
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    steps: int = 400

    def __post_init__(self) -> None:
        if FLAGS.batch % self.workers:
            raise ValueError(f"{self.workers} workers cannot share {FLAGS.batch} rows evenly")
        if self.steps % self.local_steps:
            raise ValueError(f"{self.steps} steps are no whole rounds of {self.local_steps}")

    def __str__(self) -> str:
        """Where it differs from the defaults."""
        told = [f"{f.name} {value}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return ", ".join(told) or "one worker"


# Gains: the factor of the mean update.


class Gain:
    """One number. `factor`: [runs, 1] or [runs, size], the newest."""

    def __init__(self, factor: float, device: str) -> None:
        self.factor = torch.full((1, 1), factor, device=device)

    def __call__(self, made: Tensor, sent: Tensor) -> Tensor:
        """The factor for this clock's mean. made, sent: the updates before and after their code."""
        return self.factor


class Windows(Gain):
    """ps/store/update_gain.py, of one shard whose workers are all as fast: at a sample, sums of what was sent in a window of
    clocks."""

    def __init__(self, size: int, device: str) -> None:
        super().__init__(1.0, device)
        self.at = torch.from_numpy(sample_of(size)).to(device)
        self.window: list[Tensor] = []
        self.agreement: Tensor | None = None

    def __call__(self, made: Tensor, sent: Tensor) -> Tensor:
        before = self.factor  # a window changes the gain of what is folded after it
        self.window.append(sent[..., self.at])
        if len(self.window) == WINDOW:
            sums = torch.stack(self.window).sum(0)
            share = sums.mean(1).square().sum(1) / sums.square().sum(2).mean(1).clamp_min(1e-30)
            measured = share.clamp_min(1 / sums.shape[1]).sqrt()
            old = measured if self.agreement is None else self.agreement
            self.agreement = old**SMOOTHING * measured ** (1 - SMOOTHING)
            self.factor, self.window = 1 / self.agreement[:, None], []
        return before


def gain_of(case: Case, task: Task) -> Gain:
    """1; power:A, workers ** A; window, the product's."""
    name, _, argument = case.gain.partition(":")
    made: dict[str, Callable[[], Gain]] = {
        "1": lambda: Gain(1.0, task.device),
        "power": lambda: Gain(case.workers ** float(argument), task.device),
        "window": lambda: Windows(task.size, task.device),
    }
    return made[name]()


def weight(text: str, factor: Tensor) -> Tensor | float:
    """A number; g, the gain; g*1.5, half as much again."""
    name, _, times = text.partition("*")
    return factor[:, None] * float(times or 1) if name == "g" else float(text)


# Runs.


class Runs:
    """One case at several rates and seeds: run r is (rates[r], seeds[r])."""

    def __init__(self, case: Case, task: Task, runs: list[tuple[float, int]]) -> None:
        self.case, self.task, self.runs = case, task, runs
        self.seeds = sorted({seed for _, seed in runs})
        self.x = self.per_run({seed: task.weights(seed) for seed in self.seeds})
        self.noted: dict[str, list[Tensor]] = {}

    def per_run(self, by_seed: dict[int, Tensor]) -> Tensor:
        return torch.stack([by_seed[seed] for _, seed in self.runs])

    def note(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.noted.setdefault(name, []).append(value)

    def facts(self) -> list[dict[str, float]]:
        """Means of what was noted, for each run."""
        means = {name: torch.stack(values).mean(0).tolist() for name, values in self.noted.items()}
        return [{name: round(values[run], 4) for name, values in means.items()} for run in range(len(self.runs))]

    def rate(self, step: int) -> Tensor:
        peaks = [bytelm.learning_rate(step, self.case.steps, peak, FLAGS.warm_up) for peak, _ in self.runs]
        return torch.tensor(peaks, device=self.task.device)[:, None]

    def gradients(self, replicas: Tensor, step: int) -> Tensor:
        """At [runs, workers, size], of each worker's rows, so that their mean is that of the whole batch."""
        rows = self.per_run({seed: self.task.rows(seed, step, self.case.workers) for seed in self.seeds})
        flat = replicas.detach().flatten(0, 1).requires_grad_()
        loss = self.task.loss_sum(flat, rows.flatten(0, 1)) * (self.case.workers / (FLAGS.batch * self.task.context))
        return torch.autograd.grad(loss.sum(), flat)[0].view_as(replicas)

    def optimizer(self, like: Tensor) -> AdamW:
        return Muon(like, self.task.shapes) if self.case.inner == "muon" else AdamW(like)

    def train(self) -> Tensor:
        """Held-out losses [runs]."""
        mode = {"mean": self.one_optimizer, "gradients": self.one_optimizer, "updates": self.own_optimizers}
        mode[self.case.mode]()
        return self.task.validation_loss(self.x)

    def one_optimizer(self) -> None:
        """`mean`: the mean gradient is clipped; `gradients`: each worker clips its own."""
        optimizer = self.optimizer(self.x)
        for step in range(self.case.steps):
            g = self.gradients(self.x[:, None].expand(-1, self.case.workers, -1), step)
            optimizer.take(clipped(g.mean(1)) if self.case.mode == "mean" else clipped(g).mean(1))
            self.x += optimizer.update(self.x, self.rate(step))

    def own_optimizers(self) -> None:
        case, x = self.case, self.x
        up, down = code(case.up), code(case.down or case.up)
        gain = gain_of(case, self.task)
        published, momentum = x.clone(), torch.zeros_like(x)
        residual = torch.zeros(len(x), case.workers, self.task.size, device=x.device)
        inner = self.optimizer(residual)
        seen = [published.clone() for _ in range(case.staleness + 1)]  # the oldest is what workers have now
        flying: list[Tensor] = []  # the updates that it lacks
        clocks = case.steps // case.local_steps
        for clock in range(clocks):
            replica = seen[0][:, None] + weight(case.kept, gain.factor) * residual
            if flying:
                replica += weight(case.stand, gain.factor) * torch.stack(flying).sum(0)
            made = self.round(replica, clock * case.local_steps, inner)
            residual += made
            sent = up(residual.flatten(0, 1), clock).view_as(residual)
            residual -= sent
            merged = gain(made, sent) * sent.mean(1)
            momentum.mul_(case.outer_momentum).add_(merged)
            x += case.outer_lr * (merged + case.outer_momentum * momentum)
            published += down(x - published, clock)
            seen = [*seen[1:], published.clone()]
            flying = [*flying, sent][-case.staleness :] if case.staleness else []
            if 2 * clock >= clocks:
                self.note(
                    agreement=made.mean(1).norm(dim=1) / made.norm(dim=2).mean(1),
                    factor=merged.norm(dim=1) / sent.mean(1).norm(dim=1),
                    held_back=residual.norm(dim=2).mean(1) / made.norm(dim=2).mean(1),
                )
        x += gain.factor * residual.mean(1)  # finish() pushes what was left out

    def round(self, replica: Tensor, first: int, inner: AdamW) -> Tensor:
        """The updates of local steps, `first` and on. Overwrites `replica`."""
        begun = replica.clone()
        for step in range(first, first + self.case.local_steps):
            g = clipped(self.gradients(replica, step))
            inner.take(g)
            replica += inner.update(replica, self.rate(step)[:, None])
        return replica.sub_(begun)


# Presets.

MERGED = (("1", "1", "1"), ("window", "g", "g"), ("window", "g*1.5", "g"))  # gain, stand, kept
PRESETS = {
    "gain": [
        Case(mode="mean"),
        *(Case(workers, "gradients") for workers in (2, 4, 8, 16)),
        *(
            Case(workers, staleness=1, up=up, gain=gain, stand=stand, kept=kept)
            for workers in (2, 4, 8, 16)
            for up in ("dense", "topk:0.05+int8", "topk:0.11+sign")
            for gain, stand, kept in MERGED
        ),
    ],
    "local": [
        *(Case(mode="mean", inner=inner) for inner in ("adamw", "muon")),
        *(
            Case(2, inner=inner, local_steps=steps, outer_lr=rate, outer_momentum=momentum)
            for inner in ("adamw", "muon")
            for steps in (4, 10, 20, 50)
            for rate, momentum in ((1.0, 0.0), (0.7, 0.6), (0.7, 0.8))
        ),
    ],
}


def library(path: Path | None) -> tuple[Tensor, Tensor, str]:
    """As bytelm.library, or what --write-text wrote."""
    if path is None:
        return bytelm.library()
    with np.load(path) as held:
        return torch.from_numpy(held["training"]), torch.from_numpy(held["held_out"]), str(held["sha256"])


@click.command(context_settings={"show_default": True})
@click.option("--preset", type=click.Choice(list(PRESETS)), default="gain")
@click.option("--cases", "cases_path", type=click.Path(exists=True, path_type=Path), help="JSON, instead of a preset")
@click.option("--rates", default=RATES, help="peak rates, comma-separated")
@click.option("--seeds", default="0,1,2", help="comma-separated")
@click.option("--steps", type=int, help="of every case, for quick looks")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="of another machine; the library by default")
@click.option("--write-text", type=click.Path(path_type=Path), help="write the library's text there, and end")
@record.out_option("loss/lockstep")
def main(
    preset: str,
    cases_path: Path | None,
    rates: str,
    seeds: str,
    steps: int | None,
    device: str,
    text: Path | None,
    write_text: Path | None,
    out: Path,
) -> None:
    """Simulate whole runs of many workers in lockstep, and compare how their updates are merged."""
    if write_text:
        training, held_out, sha256 = bytelm.library()
        np.savez(write_text, training=training.numpy(), held_out=held_out.numpy(), sha256=sha256)
        return
    try:
        cases = [Case(**row) for row in json.loads(cases_path.read_text())] if cases_path else PRESETS[preset]
        cases = [replace(case, steps=steps or case.steps) for case in cases]
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    torch.set_float32_matmul_precision("high")
    training, held_out, sha256 = library(text)
    task = Task(training, held_out, device)
    told: dict[str, record.Scalar] = {"text": sha256[:12]}
    told["device"] = torch.cuda.get_device_name() if device.startswith("cuda") else device
    grid = [(rate, seed) for rate in map(float, rates.split(",")) for seed in map(int, seeds.split(","))]
    with record.Recorder("loss/lockstep", out) as recorder:
        for case in cases:
            found = recorder.found(**asdict(case), **told)
            done = {(line.arguments["rate"], line.seed) for line in found}
            if todo := [each for each in grid if each not in done]:
                runs = Runs(case, task, todo)
                losses = runs.train().tolist()
                for (rate, seed), loss, noted in zip(todo, losses, runs.facts(), strict=True):
                    figures: record.Figures = {"loss": (loss, "nats a byte")}
                    figures |= {name: (value, "") for name, value in noted.items()}
                    own = asdict(case) | told | {"rate": rate}
                    table = cases_path.stem if cases_path else preset
                    recorder.add(str(case), figures, table=table, best_of="rate", seed=seed, arguments=own)
                click.echo(f"{case}: best {min(losses):.4f} of {len(todo)} runs")


if __name__ == "__main__":
    main()
