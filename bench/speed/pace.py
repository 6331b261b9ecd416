"""How much of a GPU's time is left for compute? Workers at a GPU's pace on links of the lab: DDP, torchft's DiLoCo, Narrows.

    python bench/speed/pace.py                                    # all plans, links and counts of workers: 90 minutes
    python bench/speed/pace.py --rows 'ssp*' --links 50 --workers 2
    make bench-peers && python bench/speed/pace.py --rows 'torchft*'     # `make` does not install torchft
    python bench/speed/pace.py --coding                           # what coding takes on this CPU, measured alone
    python bench/speed/pace.py --join                             # with the losses of run_jobs.py, and docs/pace.svg

The task: 30.8 M parameters and 30 ms of compute a step in each worker. A link joins each worker's host to a switch, and a
round trip between two hosts takes 20 ms. Utilisation is compute over wall time, a mean over the workers. Two cores stand in
for two or four GPUs, so much is emulated:

- Compute is a sleep. AdamW made a few updates of the byte GPT beforehand. Workers send the codes of these updates again and
  again, so messages have the size and the values of real ones (pace_worker.py, pace_server.py, contenders/paced.py).
- Coding is a sleep too, in workers and servers. pace_coding.py measures how long it takes. Each line has two utilisations: with
  workers that code on a GPU, and with workers that code on this CPU. Servers code on this CPU in both. A worker with a GPU also
  sleeps for the other work of its main thread in a push, as long as that took on the host of an H200.
- A run is dilated so that this machine keeps up. Compute, coding, delay and the time of a byte on the link all take D times
  as long, where D is the dilation; to TCP that is the same network. The main thread of a worker sleeps until its CPU time in
  step() has taken D times as long too, and so does a server that takes a push. The CPU time of a worker's I/O thread, of
  ZeroMQ, torchft and gloo is not stretched, so it counts for less.
- The server is on the first worker's host. With four workers each host has one shard, as after `ps-serve --join`; otherwise one
  link would carry what three workers push. A worker reaches a shard on its own host without the link.
- The start and the end of a run do not count; start_and_end.py measures them.

Rules
- Once all processes have started, they and the links get a higher priority than all other work of this machine.
- One start of all processes serves all links, the fastest first. The processes wait while the links change, and the next phase
  begins. TCP learns at once that a link is slower, and takes hundreds of round trips to learn that it is faster. The first
  steps of a phase do not count, nor does the first round of a plan with rounds.
- The queue of a link holds what the link carries in 10 ms, half of a round trip. So bursts lose packets.
- "ps-plan's choice" in a note: ps-plan --encode gpu chooses this plan for the link and the step (until
  November 2026: without --encode gpu).
- Figures of Adnan082/diloco-measured stand beside ours: four L40S, 30.8 M parameters, links shaped by tc.
- --join takes the losses of a plan from run_jobs.jsonl: its job of STEPS steps with as many workers, at the best rate. The
  steps to the loss TARGET are interpolated between the quarters of that run. The seconds to TARGET are these steps times
  the step measured here.
"""

from __future__ import annotations

import fnmatch
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way
from lab.replay import Coding, Payloads, Phase, environment, told_path, updates_of
from speed import pace_coding, pace_plot, straggler

from narrows.protocols.config.key_ranges import split
from narrows.protocols.config.settings import Settings
from narrows.ps.planner.choose import choose
from narrows.ps.planner.codec_costs import coded, gpu_row
from narrows.ps.planner.network import Network
from narrows.ps.planner.step_prices import TrainingWork
from narrows.ps.process.config import ServerConfig

HERE = Path(__file__).parent
PACED = HERE.parent / "contenders" / "paced.py"
PEERS = ".venv-torchft"
PORT = 25_000
LINKS = (50, 200, 1000, 5000)  # Mbit/s
ROUND_TRIP_S, COMPUTE_S = 0.02, 0.03
SHARDS, SPREAD = 4, 2  # with more workers than SPREAD the shards are spread evenly over the hosts
OPEN = Way(2e9, 0.0)  # a link while processes start
LEASE_S = 3600.0  # in a dilated run a live member is silent for longer than a lease
STEP_S, ROUND_STEP_S = 0.75, 0.3  # wall seconds that a dilated step should take, and a step within a round
DILATION_MOST = 25.0
LAB_RATE = 2e8  # bit/s of a lab link, the most that this machine carries for four hosts
SETTLE = 8  # steps of a phase that do not count
LEAST, MOST, COUNTED_S = 4, 60, 14.0  # steps that count, at least and at most, and their wall seconds in between
START_S, PHASE_S = 500.0, 420.0
PUBLIC = "https://github.com/Adnan082/diloco-measured, four L40S"
MEASURED: dict[str, dict[int, float]] = {  # its README, medians of three repeats; DDP one
    "torchft DiLoCo, H = 8": {50: 0.55, 200: 2.48, 1000: 12.35, 5000: 40.24},
    "torchft DiLoCo, H = 32": {50: 2.41, 200: 10.01, 1000: 36.01, 5000: 68.10},
    "torchft DiLoCo, H = 128": {50: 11.55, 200: 36.09, 1000: 71.52, 5000: 87.00},
    "DDP": {50: 0.04},
}
GPU, CPU = "utilisation", "coding on this CPU"
CODING, PARTS = "coding, alone, for each value", ("encode", "fold", "compose", "add", "publish")


@dataclass(frozen=True)
class Plan:
    """A way to train: flags of Narrows, or the arguments of paced.py for a contender.

    Attributes:
        period: steps from one push to the next.
        job: the fields of loss/job.py that describe its loss.
        always: False: it is measured only on the links for which ps-plan chooses it.
    """

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    contender: tuple[str, ...] = ()
    period: int = 1
    job: dict[str, Any] = field(default_factory=dict)
    always: bool = True

    @property
    def spec(self) -> str:
        return str(self.flags.get("compress", "dense"))

    @property
    def outer(self) -> tuple[float, float] | None:
        settings = Settings(**self.flags).validated() if self.flags else None
        return (settings.outer_lr, settings.outer_momentum) if settings and settings.sync == "local" else None


def ssp(staleness: int, compress: str, always: bool = True) -> Plan:
    flags = {"sync": "ssp", "staleness": staleness, "compress": compress}
    job = {"mode": "updates", "staleness": staleness, "up": compress}
    return Plan(f"ssp, s = {staleness}, {compress}", flags, job=job, always=always)


def local(steps: int, compress: str, fragments: int, always: bool = True) -> Plan:
    flags: dict[str, Any] = {"sync": "local", "local_steps": steps, "compress": compress}
    if fragments > 1:
        flags |= {"fragments": fragments, "merge_delay": steps // fragments - 1}
    cut = f", {fragments} fragments" if fragments > 1 else ""
    job = {"mode": "local", "local_steps": steps, "up": compress, "outer_lr": 0.7, "outer_momentum": 0.6}
    return Plan(f"local, H = {steps}{cut}, {compress}", flags, period=steps, job=job, always=always)


def diloco(steps: int) -> Plan:
    job = {"mode": "local", "local_steps": steps, "up": "dense", "outer_lr": 0.7, "outer_momentum": 0.9}
    return Plan(f"torchft DiLoCo, H = {steps}", contender=("diloco", str(steps)), period=steps, job=job)


PLANS = (
    Plan("DDP", contender=("ddp", "0"), job={"mode": "bsp"}),
    diloco(8), diloco(32), diloco(128),
    ssp(2, "topk:0.11+sign"), ssp(2, "cycle:0.15+sign"), ssp(2, "cycle:0.03+sign"), local(48, "2bit", 4), local(128, "2bit", 4),
    ssp(1, "topk:0.11+sign", always=False), ssp(4, "cycle:0.09+sign", always=False), local(50, "dense", 1, always=False),
)  # fmt: skip


def chosen(mbit: int, workers: int, count: int) -> str:
    """Return the name of the plan that ps-plan chooses for workers on such links, and a model of `count` parameters."""
    each, square = np.ones(workers), (workers, workers)
    rate, delay = np.full((1, *square), mbit * 1e6 / 8), np.full(square, ROUND_TRIP_S / 2)
    hosts = tuple(f"host-{i}" for i in range(workers))
    network = Network(hosts, delay, rate, (1e6,), each, 64e9 * each, np.zeros(square))
    way = choose(network, TrainingWork(count, COMPUTE_S, coded(gpu=True), shards=SHARDS)).above
    return str(way).replace("S = ", "s = ")


# Runs.


class Team:
    """The processes of one plan on hosts of the lab, through their phases."""

    def __init__(self, lab: netns.Lab, folder: Path, workers: int) -> None:
        self.lab, self.folder, self.workers, self.number = lab, folder, workers, 0
        self.running: list[tuple[subprocess.Popen[Any], Path]] = []
        self.servers: list[int] = []  # their pids

    def start(self, host: netns.Host, command: Sequence[str], env: dict[str, str], stdin: str = "") -> Path:
        log = self.folder / f"log{len(self.running)}"
        with log.open("w") as said:
            pipe = subprocess.PIPE if stdin else subprocess.DEVNULL
            process = host.popen(command, stdin=pipe, stdout=said, stderr=said, cwd=launch.ROOT, env=env, text=True)
        if process.stdin is not None:
            process.stdin.write(f"{stdin}\n")
            process.stdin.flush()
        self.running.append((process, log))
        return log

    def until(self, done: Any, what: str, limit_s: float) -> None:
        """Wait until `done()`. Raises CommandFailed if a process ends before that, and after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while not done():
            ended = next((log for process, log in self.running if process.poll() is not None), None)
            if ended or time.monotonic() > deadline:
                log = ended or self.running[-1][1]
                raise CommandFailed(f"{what} did not come within {limit_s:g} s; last words: {log.read_text()[-1500:]}")
            time.sleep(0.05)

    def phase(
        self, steps: int, settle: int, compute_s: float, dilation: float, coding: Coding, limit_s: float
    ) -> list[Any]:
        """Begin a phase, and return what each worker reports at its end. `limit_s`: as in `until`."""
        Phase(self.number, steps, settle, compute_s, dilation, coding).write(self.folder / "phase")
        paths = [told_path(self.folder / "phase", self.number, rank) for rank in range(self.workers)]
        self.number += 1
        self.until(lambda: all(path.exists() for path in paths), f"the end of phase {self.number}", limit_s)
        return [json.loads(path.read_text()) for path in paths]


def hasten(team: Team) -> None:
    """Raise the priority of all processes that this one has started, with the links. They mostly sleep."""
    left = [os.getpid(), *(process.pid for process, _ in team.running)]
    while left:
        pid = left.pop()
        for thread in (Path("/proc") / str(pid) / "task").iterdir():
            with suppress(OSError):  # a thread may have ended
                left += map(int, (thread / "children").read_text().split())
                if pid != os.getpid():
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), netns.PRIORITY)


def servers(team: Team, plan: Plan, env: dict[str, str]) -> str:
    """Start the processes of a server, and return the address of process 0."""
    hosts = team.lab.hosts[: team.workers]
    home = [hosts[shard * len(hosts) // SHARDS if len(hosts) > SPREAD else 0] for shard in range(SHARDS)]
    settings = Settings(workers=team.workers, shards=SHARDS, lease=LEASE_S, **plan.flags).validated()
    away = tuple((shard, host.address) for shard, host in enumerate(home) if host is not hosts[0])
    root, secret = f"tcp://{hosts[0].address}:{PORT}", secrets.token_hex(16)
    for shard, host in enumerate(home):
        config = ServerConfig(
            shard, settings, f"tcp://{host.address}:{PORT + shard}", root if shard else "", time.time_ns() // 1_000_000 << 10,
            "", False, secret=secret, host="" if host is hosts[0] else host.address, away=() if shard else away,
        )  # fmt: skip
        team.start(host, [sys.executable, str(HERE / "pace_server.py")], env, config.encode())
    logs = [log for _, log in team.running]
    team.servers = [process.pid for process, _ in team.running]
    team.until(lambda: all('"bound"' in log.read_text() for log in logs), "a shard", START_S)
    return root


@contextmanager
def started(plan: Plan, workers: int, size: str) -> Iterator[Team]:
    """Start the processes of a plan, and run a first phase on open links."""
    ways = [OPEN] * workers
    with tempfile.TemporaryDirectory() as name, netns.star(ways) as lab:
        folder = Path(name)
        team = Team(lab, folder, workers)
        Phase(0, 0).write(folder / "phase")
        env = launch.environment(**environment(folder, size, plan.spec))
        if plan.contender:
            python = sys.executable if plan.contender[0] == "ddp" else str(launch.ROOT / PEERS / "bin" / "python")
            of = {"WORLD_SIZE": str(workers), "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": str(PORT)}
            for rank, host in enumerate(lab.hosts[:workers]):
                own = {"RANK": str(rank), "LAB_ADDRESS": host.address, "GLOO_SOCKET_IFNAME": f"wan{rank}"}
                team.start(host, [python, str(PACED), *plan.contender], env | of | own)
        else:
            root = servers(team, plan, env)
            for host in lab.hosts[:workers]:
                command = launch.ps_worker("--server", root, "--server-timeout", "600", str(HERE / "pace_worker.py"))
                team.start(host, command, env)
        try:
            team.number = 1
            team.phase(max(2, plan.period), 0, 0.0, 1.0, Coding(), START_S)
            hasten(team)
            yield team
            Phase(-1, 0).write(folder / "phase")
        finally:
            for process, _ in team.running:
                process.kill()
                process.communicate()  # closes its stdin too


def own_seconds(plan: Plan, coding: Coding, count: int) -> float:
    """Return the seconds of a step in which a worker computes and codes."""
    return COMPUTE_S + (coding.encode + coding.fold + coding.compose) * count / plan.period


def dilation_of(plan: Plan, mbit: int, own_s: float, link_s: float) -> float:
    """Return a dilation with which the lab carries the link, and a step is long beside the delays of a busy machine.

    Args:
        own_s: seconds of a step in which a worker computes and codes.
        link_s: seconds of a step in which the link carries its updates.
    """
    least = mbit * 1e6 / LAB_RATE
    if plan.contender:  # they send for nearly all of the time
        return {50: 1.0, 200: 2.0, 1000: 10.0}.get(mbit, max(1.0, least))
    if own_s > 2 * COMPUTE_S:  # the link is idle for most of a step
        least /= 5
    return min(DILATION_MOST, max(1.0, least, (STEP_S if plan.period == 1 else ROUND_STEP_S) / max(own_s, link_s)))


def steps_of(plan: Plan, step_s: float) -> tuple[int, int]:
    """Return the steps of a phase that count, and the steps before them. `step_s`: about what a step takes in the lab."""
    if plan.contender:
        return plan.period * max(1, min(8, round(COUNTED_S / 2 / (step_s * plan.period)))), int(plan.period == 1)
    if plan.period > 1:
        return plan.period * max(1, round(COUNTED_S / 2 / (step_s * plan.period))), plan.period
    counted = max(LEAST, min(MOST, round(COUNTED_S / step_s)))
    return counted, min(SETTLE, counted)


def measure(
    team: Team, plan: Plan, mbit: int, coding: Coding, clock_bytes: float, count: int, compute_s: float
) -> dict[str, float]:
    """Run one phase, and return its figures. Times are those of the task, without the dilation."""
    own_s = own_seconds(plan, coding, count)
    link_s = 2 * (team.workers - 1) / team.workers * clock_bytes * 8 / (mbit * 1e6) / plan.period
    dilation = dilation_of(plan, mbit, own_s, link_s)
    counted, settle = steps_of(plan, dilation * (own_s + link_s if plan.contender else max(own_s, link_s)))
    for link in team.lab.links:
        link.change(rate=mbit * 1e6 / dilation, delay_s=ROUND_TRIP_S / 4 * dilation)
    before = [host.bytes()[1] for host in team.lab.hosts[: team.workers]]
    used = [straggler.processor_s(pid) for pid in team.servers]
    told = team.phase(counted + settle, settle, compute_s, dilation, coding, PHASE_S)
    used = [straggler.processor_s(pid) - one for pid, one in zip(team.servers, used, strict=True)]
    sent = sum(host.bytes()[1] - one for host, one in zip(team.lab.hosts, before, strict=False)) / team.workers
    walls = [(each["ends"][-1] - each["ends"][settle]) / dilation for each in told]
    step_s = statistics.fmean(walls) / counted
    return {
        "utilisation": 100 * statistics.fmean(counted * compute_s / wall for wall in walls),
        "step_s": step_s,
        "sent": sent / (counted + settle) / 1e3,
        "cpu_ms": 1e3 * max(each["cpu_s"] for each in told),
        "server_ms": 1e3 * max(used, default=0.0) / (counted + settle),
        "dilation": dilation,
    }


def clock_bytes_of(plan: Plan, size: str) -> tuple[float, int]:
    """Return the payload bytes of one clock's update, and the number of parameters."""
    count = int(np.load(updates_of(size), mmap_mode="r").shape[1])
    payloads = Payloads(plan.spec, updates_of(size))
    if payloads.raw:
        return 4.0 * count, count
    return float(sum(len(payloads.of(*keys, 0)) for keys in split(count, SHARDS))), count


def lacks(plan: Plan) -> str:
    """Return what the environment lacks for a plan; "" if it lacks nothing."""
    there = plan.contender[:1] != ("diloco",) or (launch.ROOT / PEERS / "installed").exists()
    return "" if there else f"there is no {PEERS}, which make bench-peers makes"


def run(recorder: record.Recorder, plan: Plan, workers: int, links: Sequence[int], size: str, compute_s: float) -> None:
    """Measure a plan on each link, and record a line for each. Raises CommandFailed."""
    clock_bytes, count = clock_bytes_of(plan, size)
    codings = [(GPU, Coding())]
    if not plan.contender:
        own = coding_of(recorder, plan, size)
        codings = [(GPU, pace_coding.on_a_gpu(plan.spec, count, own)), (CPU, own)]
    with started(plan, workers, size) as team:
        for mbit in sorted(links, reverse=True):  # TCP learns of a slower link at once
            found = {name: measure(team, plan, mbit, coding, clock_bytes, count, compute_s) for name, coding in codings}
            told: record.Figures = {name: (each["utilisation"], "% of the card") for name, each in found.items()}
            first = found[GPU]
            told |= {"step": (1e3 * first["step_s"], "ms"), "sent": (first["sent"], "kB a step and host")}
            told |= {
                "ratio": (4 * count * plan.period / clock_bytes, ""),
                "thread": (first["cpu_ms"], "ms of CPU a step"),
            }
            told |= {"a shard": (first["server_ms"], "ms of CPU a step")}
            told |= {"dilation": (first["dilation"], "")}
            note = "ps-plan's choice" if chosen(mbit, workers, count) == plan.name else ""
            link = {"mbit_per_s": float(mbit), "delay_ms": 1e3 * ROUND_TRIP_S / 2}
            recorder.add(
                plan.name, told, table=table_of(workers), link=link, seed=0, note=note, arguments={"parameters": size}
            )
            click.echo(f"{plan.name}, {workers} workers, {mbit} Mbit/s: " + json.dumps(found))


def table_of(workers: int) -> str:
    return f"{workers} workers at a GPU's pace"


def coding_of(recorder: record.Recorder, plan: Plan, size: str) -> Coding:
    """Return the seconds of coding on this CPU, from the newest line that has them, or measured now."""
    wanted = {"parameters": size, "outer": plan.outer is not None}
    lines = [
        line for line in recorder.lines if (line.run, line.table) == (plan.spec, CODING) and line.arguments == wanted
    ]
    if not lines:
        measure_coding(recorder, plan, size)
        return coding_of(recorder, plan, size)
    return Coding(**{name: lines[-1].figures[name].value / 1e9 for name in PARTS})


def measure_coding(recorder: record.Recorder, plan: Plan, size: str) -> None:
    """Record what the coding of a plan takes on this CPU, and in a worker's whole step on a GPU."""
    found = pace_coding.on_this_cpu(plan.spec, size, SHARDS, plan.outer)
    _, count = clock_bytes_of(plan, size)
    gpu = pace_coding.on_a_gpu(plan.spec, count, found)
    told: record.Figures = {name: (1e9 * getattr(found, name), "ns") for name in PARTS}
    for name, each in (("a worker's step", found), ("on a GPU", gpu)):
        told[name] = (1e3 * count * (each.encode + each.fold + each.compose) + 1e3 * SHARDS * each.host, "ms")
    note = f"on a GPU: {gpu_row(plan.spec)}"
    recorder.add(
        plan.spec,
        told,
        table=CODING,
        seed=0,
        note=note,
        arguments={"parameters": size, "outer": plan.outer is not None},
    )


def public(recorder: record.Recorder) -> None:
    """Record the figures of MEASURED, unless lines have them."""
    table = "figures of others"
    if any(line.table == table for line in recorder.lines):
        return
    nothing: dict[str, Any] = {"commit": None, "date": None, "machine": {"gpu": "L40S"}, "load": None, "busy": None}
    nothing |= {"python": None, "torch": None, "source": "archive", "seed": None, "note": PUBLIC}
    for name, by_link in MEASURED.items():
        for mbit, share in by_link.items():
            link = {"mbit_per_s": float(mbit), "delay_ms": 0.0}
            recorder.add(
                name, {GPU: (share, "% of the card")}, table=table, link=link, arguments={"workers": 4}, **nothing
            )


@click.command(context_settings={"show_default": True})
@record.rows_option(plan.name for plan in PLANS)
@click.option("--links", default=",".join(map(str, LINKS)), help="Mbit/s, comma-separated")
@click.option("--workers", default="2,4", help="comma-separated")
@click.option(
    "--size", type=click.Choice(["30.8M", "tiny"]), default="30.8M", help="parameters; tiny: to try this script"
)
@click.option("--compute", "compute_s", default=COMPUTE_S, help="seconds of a step")
@click.option("--coding", "only_coding", is_flag=True, help="measure what coding takes on this CPU, and end")
@click.option("--join", is_flag=True, help="put losses and paces together, and draw docs/pace.svg")
@record.out_option("speed/pace")
def main(
    pattern: str, links: str, workers: str, size: str, compute_s: float, only_coding: bool, join: bool, out: Path
) -> None:
    """Utilisation of a card by plan and link."""
    if missing := "" if only_coding or join else netns.available():
        raise click.ClickException(missing)
    recorder, failed = record.Recorder("speed/pace", out), False
    if join:
        return pace_plot.join(recorder, PLANS)
    plans = [plan for plan in PLANS if fnmatch.fnmatchcase(plan.name, pattern)]
    if not plans:
        raise click.UsageError(f"--rows {pattern}: there is none; rows: {', '.join(plan.name for plan in PLANS)}")
    os.environ["PYTHONUNBUFFERED"] = "1"
    public(recorder)
    for plan in [plan for plan in plans if lacks(plan)]:
        click.echo(f"SKIPPED {plan.name}: {lacks(plan)}", err=True)
    plans = [plan for plan in plans if not lacks(plan)]
    if only_coding:
        for plan in plans:
            if plan.flags:
                measure_coding(recorder, plan, size)
        return
    _, count = clock_bytes_of(PLANS[0], size)
    for number, plan in product(map(int, workers.split(",")), plans):
        own = [mbit for mbit in map(int, links.split(",")) if plan.always or chosen(mbit, number, count) == plan.name]
        try:
            if own:
                run(recorder, plan, number, own, size, compute_s)
        except (CommandFailed, OSError) as error:
            failed = True
            click.echo(f"FAILED {plan.name}, {number} workers: {error}", err=True)
    recorder.show()
    sys.exit(failed)


if __name__ == "__main__":
    main()
