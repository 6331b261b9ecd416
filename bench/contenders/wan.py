"""One worker in each of two cities trains the byte GPT across a narrow link. Measured: step, bytes at the interface, loss.

    python bench/contenders/wan.py  # every contender on the 20 Mbit/s link, 40 steps each, 3 rounds in turn
    python bench/contenders/wan.py --link 100mbit --rows 'ddp*' --steps 20
    python bench/contenders/wan.py --link 20mbit --rows 'ssp*' --steps 400 --rounds 1  # trained in full: loss and seconds to it
    make bench-peers && python bench/contenders/wan.py --rows 'torchft*' --steps 100  # `make` does not install torchft

Rules
- One worker in each city (`each`: more) trains tasks/bytelm.py on its share of the batch, one thread each. The root is in the
  first city.
- A round runs every row once, one after the other; step times are medians over rounds of a run's own median and mean, worst
  worker. Only the mean knows of a round every H steps.
- Bytes a step are the kernel's, at the second city's interface, between two steps of the run: headers, acks and heartbeats
  are in them, the first weights and the last flush are not. Payload is what `--record` says where there is one.
- Means and bytes are over whole periods of H steps; a run that holds none after its first SETTLE steps has neither.
- `loopback` is no link at all: both workers on one host.
- "time to 2.1" is when the training loss, a mean of the last CURVE_STEPS steps of both workers, first came to that. The link
  cannot change the losses of a synchronous contender: of one that was trained on loopback, "steps to 2.1" times its step on
  a link is its time there.
"""

from __future__ import annotations

import fnmatch
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, netns, record
from lab.launch import CommandFailed
from lab.link import Way

HERE = Path(__file__).parent
TASK = str(HERE.parent / "tasks" / "bytelm.py")
PORT = 25_000  # of the server above, on hosts that nobody else is on; clusters take the tens after it
SETTLE = 5  # first steps that no figure counts: connections, first states, the compiler
SAMPLE_S = 0.2
CURVE_STEPS = 20  # of one point of a loss curve, a mean
TARGET = 2.1  # loss that the contenders are timed to

Result = dict[str, Any]

# Flags of the task, by parameters.
SIZES: dict[str, tuple[str, ...]] = {"1.3M": (), "9.8M": ("--layers", "8", "--width", "320", "--heads", "8")}
LINKS: dict[str, Way | None] = {
    "loopback": None,
    "1gbit": Way(1e9, 0.001),
    "100mbit": Way(100e6, 0.02),
    "20mbit": Way(20e6, 0.06),
    "10mbit": Way(10e6, 0.06),
    "1mbit": Way(1e6, 0.1),
}


@dataclass(frozen=True)
class Row:
    """`above`: flags of the root. `below`: of a server in each city; none where workers dial the root themselves.
    `each`: workers in each city; `group`: they are one. `script`: a contender that is not Narrows, a file here and its first
    word; each rank is told of itself by variables, and brings what other processes it needs. `venv`: where its packages are, in
    the repository's folder; by default with ours."""

    name: str
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    venv: str = ""
    each: int = 1
    group: bool = False
    period: int = 1  # steps from one round to the next

    @property
    def python(self) -> str:
        return str(launch.ROOT / self.venv / "bin" / "python") if self.venv else sys.executable

    def lacks(self) -> str:
        """Empty, or why it cannot run here, in one sentence."""
        there = not self.venv or (launch.ROOT / self.venv / "installed").exists()
        return "" if there else f"there is no {self.venv}, which make bench-peers makes"


def flat(mode: str, compress: str, *more: str) -> Row:
    name = " ".join((mode, compress, *(word.removeprefix("--") for word in more)))
    return Row(name, ("--sync", mode, "--compress", compress, *more))


LOCAL_SGD = ("--outer-lr", "1", "--outer-momentum", "0")
ROWS = (
    Row("ddp", script=("ddp.py", "none")),
    Row("ddp fp16", script=("ddp.py", "fp16")),
    Row("ddp powersgd-4", script=("ddp.py", "powersgd")),
    Row("bsp", ("--sync", "bsp")),
    flat("ssp", "topk:0.05+int8"),
    flat("ssp", "topk:0.05+int8", "--staleness", "2"),
    flat("ssp", "topk:0.05+int8", "--staleness", "3"),
    flat("ssp", "topk:0.11+sign", "--staleness", "2"),
    flat("ssp", "cycle:0.15+sign"),
    flat("ssp", "cycle:0.15+sign", "--staleness", "2"),
    flat("ssp", "cycle:0.06+sign"),
    flat("ssp", "cycle:0.03+sign", "--staleness", "2"),
    flat("ssp", "cycle:0.06+sign", "--staleness", "3"),
    flat("ssp", "cycle:0.06+sign", "--staleness", "4"),
    flat("ssp", "cycle:0.09+sign", "--staleness", "4"),
    flat("async", "topk:0.05+int8"),
    Row("ssp auto", ("--sync", "ssp", "--compress", "auto")),
    Row("gossip int8", ("--sync", "gossip", "--compress", "int8")),
    Row("gossip cycle:0.15+sign", ("--sync", "gossip", "--compress", "cycle:0.15+sign")),
    Row("gossip topk:0.05+int8", ("--sync", "gossip", "--compress", "topk:0.05+int8")),
    Row("local H=4 topk:123/4096+2bit",
        ("--sync", "local", "--local-steps", "4", "--staleness", "1", "--compress", "topk:123/4096+2bit", *LOCAL_SGD),
        period=4),
    Row("tree: ssp topk:0.05+int8 over bsp", ("--sync", "ssp", "--compress", "topk:0.05+int8"), ("--sync", "bsp")),
    Row("two cities (README), 2 workers each", ("--shards", "2", "--sync", "ssp", "--compress", "topk:0.11+sign"),
        ("--shards", "2", "--workers", "2", "--sync", "bsp"), each=2),
    # A group of two processes in each city is to the root what a single worker is.
    Row("ssp topk:0.05+int8 --shards 2", ("--shards", "2", "--sync", "ssp", "--compress", "topk:0.05+int8")),
    Row("ssp topk:0.05+int8 --shards 2, a group of 2 each", ("--shards", "2", "--sync", "ssp", "--compress", "topk:0.05+int8"),
        each=2, group=True),
    Row("ssp topk:0.05+int8 --shards 2 over bsp, 2 workers each", ("--shards", "2", "--sync", "ssp", "--compress",
        "topk:0.05+int8"), ("--shards", "2", "--workers", "2", "--sync", "bsp"), each=2),
    Row("diloco H=50", ("--sync", "local", "--local-steps", "50"), period=50),
    Row("local H=20 iso int8",
        ("--sync", "local", "--local-steps", "20", "--cut", "tensors", "--outer", "iso", "--compress", "int8"), period=20),
    Row("streaming H=50 F=5", ("--sync", "local", "--local-steps", "50", "--fragments", "5", "--merge-delay", "8"), period=50),
    Row("streaming H=50 F=5 int8",
        ("--sync", "local", "--local-steps", "50", "--fragments", "5", "--merge-delay", "8", "--compress", "int8"), period=50),
    Row("torchft diloco H=50", script=("torchft_diloco.py", "50"), venv=".venv-torchft", period=50),
)  # fmt: skip


@contextmanager
def cities(way: Way | None) -> Iterator[tuple[netns.Host, netns.Host]]:
    """Two hosts; on `loopback` both are one."""
    with ExitStack() as stack:
        if way is None:
            only = stack.enter_context(netns.Lab()).host()
            only.address = "127.0.0.1"
            yield only, only
        else:
            first, second = stack.enter_context(netns.pair(way)).hosts
            yield first, second


def serve(host: netns.Host, port: int, flags: Sequence[str], folder: Path, name: str) -> None:
    """A ps-serve that is ready, or CommandFailed. It ends by itself, or with the lab."""
    ready, said = folder / f"{name}.ready", folder / f"{name}.log"
    command = launch.ps_serve(f"{host.address}:{port}", "--insecure", "--ready-file", str(ready), *flags)
    with said.open("w") as log:
        process = host.popen(command, stdout=log, stderr=log, cwd=launch.ROOT)
    deadline = time.monotonic() + launch.SERVER_START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise CommandFailed(f"{name} did not start: {said.read_text()[-500:]}")
        time.sleep(0.02)


def workers(row: Row, hosts: Sequence[netns.Host], args: Sequence[str], folder: Path) -> list[Any]:
    """The training processes, started: a ps-worker in each city, or the ranks of a script, which alternate between the cities.
    Each writes a record to folder."""
    started, ranks = [], len(hosts) * (row.each if row.script else 1)
    for rank in range(ranks):
        host, record = hosts[rank % len(hosts)], folder / f"record{rank}"
        env = launch.environment()
        if row.script:
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
            }
            env |= {"LAB_ADDRESS": host.address, "GLOO_SOCKET_IFNAME": "lo" if hosts[0] is hosts[1] else "wan0"}
            command = [row.python, str(HERE / row.script[0]), *row.script[1:], str(record), *args]
        else:
            above, port = (host, PORT + 10 * (1 + rank)) if row.below else (hosts[0], PORT)
            command = launch.ps_worker("--server", f"tcp://{above.address}:{port}", "--record", str(record))
            command += ["-n", str(row.each), *["--group"] * row.group, TASK, *args]
        with (folder / f"worker{rank}.log").open("w") as log:
            started.append(host.popen(command, stdout=log, stderr=log, cwd=launch.ROOT, env=env))
    return started


def steps_of(record: Path) -> list[Result]:
    lines = record.read_text().splitlines() if record.exists() else []
    return [event for line in lines if '"step"' in line and (event := json.loads(line))["event"] == "step"]


def measure(row: Row, way: Way | None, args: Sequence[str], limit_s: float) -> Result:
    """One run; `args` are the task's. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as name, cities(way) as hosts:
        folder, samples = Path(name), list[tuple[int, int, int]]()
        if row.above:
            serve(hosts[0], PORT, ["--workers", "2", *row.above], folder, "root")
        for rank, host in enumerate(hosts if row.below else ()):
            parent = ["--parent", f"tcp://{hosts[0].address}:{PORT}", *row.below]
            serve(host, PORT + 10 * (1 + rank), parent, folder, f"cluster{rank}")
        began = time.monotonic()
        processes = workers(row, hosts, args, folder)
        while any(process.poll() is None for process in processes):
            if time.monotonic() - began > limit_s:
                said = (folder / "worker1.log").read_text()[-800:]
                raise CommandFailed(f"{row.name} ran longer than {limit_s:.0f} s; the last words of worker 1: {said}")
            done = steps_of(folder / "record1")
            received, sent = hosts[1].bytes()
            mine = [event for event in done if event.get("local_rank") == done[0].get("local_rank")]
            samples.append((len(mine), received, sent))
            time.sleep(SAMPLE_S)
        seconds = time.monotonic() - began
        for rank, process in enumerate(processes):
            if process.returncode != 0:
                raise CommandFailed(f"worker {rank} of {row.name}: {(folder / f'worker{rank}.log').read_text()[-800:]}")
        records = [(folder / f"record{rank}").read_text() for rank in range(2)]
        events = [[json.loads(line) for line in text.splitlines()] for text in records]
        return figures(events, samples, seconds, row.period, crosses=not row.below)


def figures(
    records: list[list[Result]], samples: list[tuple[int, int, int]], seconds: float, period: int, crosses: bool
) -> Result:
    """`crosses`: what the records count is what crosses the link."""
    steps = [[event for event in record if event["event"] == "step"] for record in records]
    steps = [
        [event for event in own if event.get("local_rank") == own[0].get("local_rank")] for own in steps
    ]  # one of each city
    # Without the last, which a worker of ours writes down after the last flush.
    between = [[b["seconds"] - a["seconds"] for a, b in pairwise(own[SETTLE:-1])] for own in steps]
    last = len(steps[1])
    losses = [
        statistics.fmean(both) for both in zip(*([event["loss"] for event in own] for own in steps), strict=False)
    ]
    times = [event["seconds"] - steps[1][0]["seconds"] for event in steps[1]]
    inside = [sample for sample in samples if SETTLE <= sample[0] <= last - SETTLE]
    result: Result = {
        "step_s": max(statistics.median(own) for own in between),
        "steps": last,
        "loss": statistics.fmean(record[-1]["last"]["loss"] for record in records),
        "seconds": seconds,
        "train_s": max(own[-1]["seconds"] - own[0]["seconds"] for own in steps),
        "curve": [
            (round(times[end - 1], 3), round(statistics.fmean(losses[end - CURVE_STEPS : end]), 4))
            for end in range(CURVE_STEPS, min(len(losses), len(times)))
        ],
    }
    whole = [own[: len(own) // period * period] for own in between]
    if all(whole):
        result["mean_s"] = max(statistics.fmean(own) for own in whole)
    if inside and (clocks := (inside[-1][0] - inside[0][0]) // period * period):
        end = next(sample for sample in inside if sample[0] >= inside[0][0] + clocks)
        clocks = end[0] - inside[0][0]
        result |= {"down": (end[1] - inside[0][1]) / clocks, "up": (end[2] - inside[0][2]) / clocks}
    payload = [event for event in steps[1][SETTLE:] if crosses and "push_bytes" in event]
    if payload:
        result["push"] = statistics.fmean(event["push_bytes"] for event in payload)
        result["pull"] = statistics.fmean(event["pull_bytes"] for event in payload)
    return result


@click.command(context_settings={"show_default": True})
@click.option("--link", "links", default="20mbit", help=f"comma-separated: {', '.join(LINKS)}")
@click.option("--rows", "pattern", default="*", help="only rows whose name matches")
@click.option("--steps", default=40)
@click.option("--rounds", default=3)
@click.option("--seed", default=0)
@click.option("--rate", default=0.002, help="the script's peak learning rate")
@click.option("--beta1", default=0.9, help="of the script's AdamW")
@click.option("--optimizer", type=click.Choice(["adamw", "muon"]), default="adamw", help="the script's inner optimizer")
@click.option("--size", type=click.Choice([*SIZES]), default="1.3M", help="parameters of the model")
@record.out_option("contenders/wan")
@click.option("--limit", "limit_s", default=1800.0, help="seconds after which a run counts as failed")
def main(
    links: str,
    pattern: str,
    steps: int,
    rounds: int,
    seed: int,
    rate: float,
    beta1: float,
    optimizer: str,
    size: str,
    out: Path,
    limit_s: float,
) -> None:
    """Train across a narrow link, by every contender."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if missing := netns.available():
        raise click.ClickException(missing)
    chosen = [row for row in ROWS if fnmatch.fnmatchcase(row.name, pattern)]
    unknown = [link for link in links.split(",") if link not in LINKS]
    if unknown or not chosen:
        raise click.UsageError(
            f"no such link or row; links: {', '.join(LINKS)}; rows: {', '.join(r.name for r in ROWS)}"
        )
    lacks = {
        row: row.lacks() or ("it trains with AdamW" if row.script and optimizer != "adamw" else "") for row in chosen
    }
    for row, lack in lacks.items():
        if lack:
            click.echo(f"SKIPPED {row.name}: {lack}", err=True)
    chosen = [row for row, lack in lacks.items() if not lack]
    args = [
        "--steps",
        str(steps),
        "--seed",
        str(seed),
        "--lr",
        str(rate),
        "--beta1",
        str(beta1),
        "--optimizer",
        optimizer,
    ]
    args += SIZES[size]
    failed = False
    arguments = {"steps": steps, "rate": rate, "optimizer": optimizer, "size": size}
    arguments |= {} if beta1 == 0.9 else {"beta1": beta1}
    with record.Recorder("contenders/wan", out) as recorder:
        for _ in range(rounds):
            for link in links.split(","):
                for row in chosen:
                    try:
                        told = measure(row, LINKS[link], args, limit_s)
                    except (CommandFailed, OSError) as error:
                        failed = True
                        click.echo(f"FAILED {row.name} on {link}: {error}", err=True)
                        continue
                    where = {"link": record.link_of(LINKS[link]), "table": f"the byte GPT of {size} parameters"}
                    recorder.add(row.name, told_of(told), beside="ddp", seed=seed, arguments=arguments, **where)
    sys.exit(failed)


def told_of(found: Result) -> record.Figures:
    """The figures of one run, as a line has them."""
    curve = [(CURVE_STEPS + i, seconds) for i, (seconds, loss) in enumerate(found["curve"]) if loss <= TARGET]
    steps, seconds = curve[0] if curve else (None, None)
    told: record.Figures = {"loss": (found["loss"], "nats a byte"), "step": (1e3 * found["step_s"], "ms")}
    told["mean step"] = (1e3 * found["mean_s"] if "mean_s" in found else None, "ms")
    names = {"up": "up", "down": "down", "push": "messages up", "pull": "messages down"}
    told |= {name: (found[key] / 1e3 if key in found else None, "kB a step") for key, name in names.items()}
    return told | {f"time to {TARGET}": (seconds, "s"), f"steps to {TARGET}": (steps, "")}


if __name__ == "__main__":
    main()
