"""Which state should a worker train on, when its own updates are sparse, late, and folded before or after the others'?

One process and virtual time, no sockets: W workers train bench/tasks/bytelm.py under `ssp` or `async`. Each has its
own replica and its own AdamW; it pushes the top-k of its update and residual, which the server adds at weight 1/W after
that worker's delay. Only the rule that turns a pulled state into a replica differs between rows: `RULES`, and "A worker
reads its own writes" in docs/design/read-my-writes.md. The loss is that of the shared model at the end, with all that was in
flight and every residual folded.

    python bench/loss/read_my_writes.py --steps 400 --out read_my_writes.json
"""

import argparse
import copy
import heapq
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

sys.path.append(str(Path(__file__).resolve().parents[1] / "tasks"))

import bytelm

VALUES_PER_SCALE = 256  # values that share an int8 scale
IN_FLIGHT_MAX = 4  # of `async`


@dataclass(frozen=True)
class Case:
    """One run. Times are in steps of a worker of ordinary speed; entry i of `delays` and `step_times` is worker i's."""

    name: str
    rule: str
    delays: tuple[float, ...] = (0, 0)
    step_times: tuple[float, ...] = ()  # () is 1 for everyone
    jitter: float = 0.0  # each push is up to this much later, by seed
    staleness: int | None = 1  # None is `async`
    window: int | None = None  # only this many of its own clocks, the newest, stand in
    density: float = 0.05
    int8: bool = False
    seed: int = 0

    @property
    def workers(self) -> int:
        return len(self.delays)


@dataclass
class Worker:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    residual: Tensor
    step_time: float
    delay: float
    clock: int = 0  # updates it has computed
    folded: int = 0  # of those, in the server's state: always the first ones, a link keeps their order
    last_arrival: float = 0.0
    sent: dict[int, Tensor] = field(default_factory=dict)  # by clock, until no rule can need it


def pulled(worker: Worker, min_clock: int, weight: float, window: int | None) -> Tensor | float:
    return 0.0


def pulled_and_residual(worker: Worker, min_clock: int, weight: float, window: int | None) -> Tensor | float:
    return worker.residual


def in_flight_at_share(worker: Worker, min_clock: int, weight: float, window: int | None) -> Tensor | float:
    """The state as if the link were instant: updates in flight at the weight that they will be folded at."""
    return worker.residual + weight * sum(u for c, u in worker.sent.items() if c >= worker.folded)


def in_flight_in_full(worker: Worker, min_clock: int, weight: float, window: int | None) -> Tensor | float:
    """Full weight in flight, back to 1/W once the server has it, even while the others' of that clock are missing."""
    return worker.residual + sum(u for c, u in worker.sent.items() if c >= worker.folded)


def own_until_complete(worker: Worker, min_clock: int, weight: float, window: int | None) -> Tensor | float:
    """The design's rule: an own update stands in for the mean of its clock until that mean is complete."""
    first = first_own(worker, min_clock, window)
    return worker.residual + sum((1 - weight * (c < worker.folded)) * u for c, u in worker.sent.items() if c >= first)


def first_own(worker: Worker, min_clock: int, window: int | None) -> int:
    """The oldest of its own clocks that may stand in."""
    return min_clock if window is None else max(min_clock, worker.clock - window)


# Each rule returns what is added to the pulled state. `weight` is 1/W; own clocks are 0..clock-1.
RULES: dict[str, Callable[[Worker, int, float, int | None], Tensor | float]] = {
    "pulled": pulled,
    "pulled + residual": pulled_and_residual,
    "+ in flight at 1/W": in_flight_at_share,
    "+ in flight at 1": in_flight_in_full,
    "+ own until complete": own_until_complete,
}


def compress(x: Tensor, density: float, int8: bool) -> Tensor:
    """The decoded top-k of x by magnitude; with `int8`, its values rounded to 8 bits of a scale per block."""
    flat = x.numpy()
    first_kept = len(flat) - max(1, round(density * len(flat)))
    kept = np.sort(np.argpartition(np.abs(flat), first_kept)[first_kept:]) if first_kept else np.arange(len(flat))
    values = flat[kept]
    if int8:
        for block in np.split(values, range(VALUES_PER_SCALE, len(values), VALUES_PER_SCALE)):
            scale = float(np.abs(block).max()) / 127 or 1.0
            block[:] = np.round(block / scale) * scale  # a view of `values`
    out = np.zeros_like(flat)
    out[kept] = values
    return torch.from_numpy(out)


@dataclass(frozen=True)
class Job:
    """The training that is simulated: given as functions, so that the simulation below knows no task."""

    build: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    learning_rate: Callable[[int], float]
    loss: Callable[[nn.Module, int, int, int], Tensor]  # model, step, worker, of
    evaluate: Callable[[nn.Module], float]
    clip: float
    steps: int


class Run:
    """Virtual time: a heap of arrivals and starts. A push that arrives at the very time of a start is folded first."""

    ARRIVAL, START = 0, 1

    def __init__(self, case: Case, job: Job) -> None:
        self.case, self.job, self.weight = case, job, 1 / case.workers
        torch.manual_seed(case.seed)
        model = job.build()
        self.state = parameters_to_vector(model.parameters()).detach().clone()
        self.workers = []
        for delay, step_time in zip(case.delays, case.step_times or (1.0,) * case.workers, strict=True):
            own = copy.deepcopy(model)
            self.workers.append(Worker(own, job.optimizer(own), torch.zeros_like(self.state), step_time, delay))
        self.random = random.Random(case.seed)
        self.events: list[tuple[float, int, int]] = [(0.0, self.START, i) for i in range(case.workers)]
        self.waiting: list[int] = []
        self.staleness: list[int] = []  # at each start: own clock minus min_clock

    @property
    def min_clock(self) -> int:
        return min(worker.folded for worker in self.workers)

    def may_start(self, worker: Worker) -> bool:
        if self.case.staleness is None:
            return worker.clock - worker.folded < IN_FLIGHT_MAX
        return self.min_clock >= worker.clock - self.case.staleness

    def finished(self, worker: Worker) -> bool:
        """`async` counts updates, whoever makes them; under a bound everyone makes as many."""
        if self.case.staleness is None:
            return sum(w.clock for w in self.workers) >= self.job.steps * len(self.workers)
        return worker.clock >= self.job.steps

    def train(self) -> None:
        while self.events:
            now, kind, i = heapq.heappop(self.events)
            worker = self.workers[i]
            if kind == self.ARRIVAL:
                self.state += self.weight * worker.sent[worker.folded]
                worker.folded += 1
                self.forget()
                ready = [j for j in self.waiting if self.may_start(self.workers[j])]
                self.waiting = [j for j in self.waiting if j not in ready]
                for j in ready:
                    heapq.heappush(self.events, (now, self.START, j))
            elif not self.finished(worker):
                if self.may_start(worker):
                    self.step(i, now)
                else:
                    self.waiting.append(i)

    def step(self, i: int, now: float) -> None:
        """One step on the replica as of now. Its push leaves when the step ends, and a link keeps its order."""
        worker, case = self.workers[i], self.case
        self.staleness.append(worker.clock - self.min_clock)
        replica = self.state + RULES[case.rule](worker, self.min_clock, self.weight, case.window)
        parameters = list(worker.model.parameters())
        vector_to_parameters(replica.clone(), parameters)  # a copy: the parameters become views of it
        for group in worker.optimizer.param_groups:
            group["lr"] = self.job.learning_rate(sum(w.clock for w in self.workers) // case.workers)
        worker.optimizer.zero_grad()
        self.job.loss(worker.model, worker.clock, i, case.workers).backward()
        nn.utils.clip_grad_norm_(parameters, self.job.clip)
        worker.optimizer.step()
        update = parameters_to_vector(parameters).detach() - replica + worker.residual
        worker.sent[worker.clock] = compress(update, case.density, case.int8)
        worker.residual = update - worker.sent[worker.clock]
        worker.clock += 1
        end = now + worker.step_time
        worker.last_arrival = max(worker.last_arrival, end + worker.delay + case.jitter * self.random.random())
        heapq.heappush(self.events, (worker.last_arrival, self.ARRIVAL, i))
        heapq.heappush(self.events, (end, self.START, i))

    def forget(self) -> None:
        for worker in self.workers:
            oldest = min(worker.folded, first_own(worker, self.min_clock, self.case.window))
            for clock in [c for c in worker.sent if c < oldest]:
                del worker.sent[clock]

    def shared_loss(self) -> float:
        """As at the end of a run: all that was in flight has arrived, and each residual is folded as a last update."""
        model = self.workers[0].model
        final = self.state + self.weight * sum(worker.residual for worker in self.workers)
        vector_to_parameters(final, list(model.parameters()))
        return self.job.evaluate(model)


def bytelm_job(text: Tensor, held_out: Tensor, steps: int, seed: int) -> Job:
    flags = bytelm.arguments([])

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=flags.lr, betas=(0.9, 0.95), weight_decay=flags.weight_decay)

    def loss(model: nn.Module, step: int, worker: int, of: int) -> Tensor:
        rows = bytelm.batch_rows(text, seed, step, flags.batch, flags.context, worker, of)
        share: float = of / (flags.batch * flags.context)
        return bytelm.loss_sum(model, rows) * share

    return Job(
        build=bytelm.ByteGPT,
        optimizer=adamw,
        learning_rate=lambda step: float(bytelm.learning_rate(step, steps, flags.lr, flags.warm_up)),
        loss=loss,
        evaluate=lambda model: float(bytelm.validation_loss(model, held_out, flags.context)),
        clip=flags.clip,
        steps=steps,
    )


PULLED, RESIDUAL, SHARE, FULL, DESIGN = RULES
DENSE = Case("one process, dense", PULLED, delays=(0,), density=1)
MAIN_CASES = (  # of --steps
    DENSE,
    *(Case("2 in step, delay 0", rule) for rule in (PULLED, DESIGN)),
    *(Case("2 in step, delay 1", rule, (1, 1)) for rule in (PULLED, RESIDUAL, SHARE, DESIGN)),
    *(Case("2, delays 0 and 1", rule, (0, 1)) for rule in (RESIDUAL, SHARE, FULL, DESIGN)),
)
_SPARSER: dict[str, Any] = {"delays": (0, 2), "staleness": 2, "density": 0.01, "int8": True}
_ASYNC: dict[str, dict[str, Any]] = {
    "async, one of 2 four times slower": {"delays": (1, 1), "step_times": (1, 4)},
    "async, one of 4 four times slower": {"delays": (1, 1, 1, 1), "step_times": (1, 1, 1, 4)},
    "async, one of 2 four times slower, delay 3": {"delays": (3, 3), "step_times": (1, 4)},
    "async, one of 2 a third slower": {"delays": (1, 1), "step_times": (1, 1.33)},
}
_WINDOWS: tuple[tuple[str, int | None], ...] = ((FULL, None), *((DESIGN, window) for window in (1, 2, 4, 8, None)))
MINOR_CASES = (  # of half the steps
    DENSE,
    *(Case("2, delays 0 and 2, s = 2, 1 % int8", rule, **_SPARSER) for rule in (SHARE, FULL, DESIGN)),
    *(Case("4, delays 0 0 1 2, s = 2", rule, (0, 0, 1, 2), staleness=2) for rule in (RESIDUAL, SHARE, FULL, DESIGN)),
    *(
        Case(name, rule, window=window, staleness=None, **link)
        for (name, link), chosen in zip(_ASYNC.items(), (range(6), (1, 3, 5), (0, 1, 3), (0, 1, 3)), strict=True)
        for rule, window in (_WINDOWS[i] for i in chosen)
    ),
)


def machine() -> str:
    processor = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    return f"{processor.split(':')[-1].strip()}, Python {platform.python_version()}, torch {torch.__version__}"


def named(name: str, rule: str, window: int | None) -> str:
    return f"{name} | {rule}" + (f", window {window}" if window else "")


def markdown(results: list[dict[str, Any]]) -> str:
    """One row a case and rule, its loss the mean over seeds, beside the dense process of as many steps."""
    rows: dict[tuple[str, str, int | None, int], list[float]] = {}
    for result in results:
        rows.setdefault((result["name"], result["rule"], result["window"], result["steps"]), []).append(result["loss"])
    lines = ["| workers and link | rule | steps | loss | over dense |", "|---|---|---|---|---|"]
    for (name, rule, window, steps), losses in rows.items():
        dense = statistics.fmean(rows[DENSE.name, DENSE.rule, DENSE.window, steps])
        loss = statistics.fmean(losses)
        lines.append(f"| {named(name, rule, window)} | {steps} | {loss:.3f} | {100 * (loss / dense - 1):+.1f} % |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of the main rows, others half of it (default 400)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", choices=("main", "minor", "all"), default="all")
    parser.add_argument("--out", type=Path, help="write every run here as JSON, after each one")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    text, held_out, sha256 = bytelm.library()
    chosen = [(case, flags.steps) for case in MAIN_CASES if flags.rows != "minor"]
    chosen += [(case, flags.steps // 2) for case in MINOR_CASES if flags.rows != "main"]
    results: list[dict[str, Any]] = []
    for case, steps in chosen:
        for seed in range(flags.seeds):
            before = time.perf_counter()
            run = Run(replace(case, seed=seed), bytelm_job(text, held_out, steps, seed))
            run.train()
            seconds = time.perf_counter() - before
            stale = {str(n): run.staleness.count(n) for n in sorted(set(run.staleness))}
            results.append(
                asdict(run.case)
                | {"steps": steps, "loss": run.shared_loss(), "seconds": seconds}
                | {"clocks": [worker.clock for worker in run.workers], "staleness": stale}
            )
            shown = f"{named(case.name, case.rule, case.window)}, {steps} steps, seed {seed}"
            print(f"{shown}: {results[-1]['loss']:.4f} in {seconds:.0f} s", flush=True)
            if flags.out:
                report = {"machine": machine(), "text_sha256": sha256, "results": results}
                flags.out.write_text(json.dumps(report, indent=1))
    print(f"\n{machine()}\n{markdown(results)}")


if __name__ == "__main__":
    main()
