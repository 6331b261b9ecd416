"""Gradients that leave during backward: the step against DDP over gloo, and where a slow link's time goes.

    python bench/speed/overlap.py ddp    # step time of both, in alternate blocks; claim: at most 1.10 times DDP's
    python bench/speed/overlap.py trace  # 30 ms each way; claim: at least 60 % of the hold of what is sent lies in backward

Rules
- The byte GPT at its defaults, BSP dense, one server, 2 workers of one thread, the same global batches and clipping of the
  mean gradient on both sides (overlap_worker.py). Their losses must agree, or it is no comparison.
- Both sides are up all the time and take turns; who has no turn sleeps. The first steps of a block are left out.
- A block's figure is the median over its steps of the slower worker; the ratio is that of the medians over blocks.
- The share: of every byte sent up, the part of its hold in the proxy that lies in its worker's backward of that step.
  Each worker has a proxy of its own, which sees when bytes have really left. A short backward covers less of the same
  hold, and a busy machine lengthens backward: read the share beside the milliseconds that are printed with it.
"""

from __future__ import annotations

import json
import signal
import socket
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch
from lab.delay_proxy import Proxy

WORKERS = 2
TCP_ONLY = "127.0.0.3"  # Narrows keeps Unix sockets for 127.0.0.1
RATIO_MAX, SHARE_MIN = 1.10, 0.60  # the claims
SETTLE_STEPS = 3  # of each block: caches, woken processes
BLOCK_S = 600.0  # a block that takes longer has failed
LOSS_RTOL = 1e-3  # float32 summed in another order drifts apart over some hundred steps
WORKER = str(Path(__file__).with_name("overlap_worker.py"))

Block = list[dict[str, Any]]  # what each worker tells


class Team:
    """The workers of one side, through their control connections."""

    def __init__(self, listener: socket.socket) -> None:
        self.lines = []
        listener.settimeout(BLOCK_S)
        for _ in range(WORKERS):
            connection, _ = listener.accept()
            connection.settimeout(BLOCK_S)
            self.lines.append(connection.makefile("rw"))
            connection.close()  # the file keeps it open
        self.lines.sort(key=lambda lines: int(self._told(lines)["index"]))

    @staticmethod
    def _told(lines: Any) -> dict[str, Any]:
        line = lines.readline()
        if not line:
            raise ConnectionError("a worker is gone")
        told: dict[str, Any] = json.loads(line)
        return told

    def block(self, steps: int) -> Block:
        for lines in self.lines:
            print(steps, file=lines, flush=True)
        return [self._told(lines) for lines in self.lines]

    def end(self) -> None:
        for lines in self.lines:
            lines.close()


@contextmanager
def team(commands: Callable[[str], Sequence[tuple[list[str], dict[str, str]]]]) -> Iterator[Team]:
    """The processes of `commands`, which get the address to report to."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        for command, env in commands(f"127.0.0.1:{listener.getsockname()[1]}"):
            stack.enter_context(launch.started(command, env))
        side = Team(listener)
        try:
            yield side
        finally:
            side.end()


@contextmanager
def narrows(hosts: Sequence[str], ports: Sequence[int], server: str = "127.0.0.1") -> Iterator[Team]:
    """A server, and a ps-worker of one worker for each host at which it dials the server."""
    flags = ["--sync", "bsp", "--workers", str(len(hosts))]
    worker = [sys.executable, "-m", "narrows.worker.command.cli", "--server"]
    with (
        launch.serving(flags, ports, server),
        team(
            lambda control: [
                ([*worker, f"tcp://{host}:{ports[0]}", WORKER, "narrows", control, str(index)], launch.environment())
                for index, host in enumerate(hosts)
            ]
        ) as side,
    ):
        yield side


@contextmanager
def ddp() -> Iterator[Team]:
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launch.free_ports(1)[0]), "WORLD_SIZE": str(WORKERS)}
    command = [sys.executable, WORKER, "ddp"]
    with team(
        lambda control: [
            ([*command, control, str(rank)], launch.environment(RANK=str(rank), GLOO_SOCKET_IFNAME="lo", **told))
            for rank in range(WORKERS)
        ]
    ) as side:
        yield side


# The step against DDP's.


def step_ms(block: Block) -> float:
    slower: list[float] = [max(step) for step in zip(*(worker["seconds"] for worker in block), strict=True)]
    return 1000 * statistics.median(slower[SETTLE_STEPS:])


def losses(block: Block) -> list[float]:
    """The loss of the global batch at each step: each worker told its share times the number of workers."""
    return [statistics.fmean(step) for step in zip(*(worker["losses"] for worker in block), strict=True)]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def verdict(holds: bool) -> str:
    return "holds" if holds else "MISSED"


def signature(facts: dict[str, Any]) -> str:
    return "commit {commit}; {machine}, load {load}; torch {torch}; {date}".format(**facts)


@click.group()
def main() -> None:
    """Measure what leaves during backward."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too


@main.command("ddp", context_settings={"show_default": True})
@click.option("--blocks", default=6, help="of each side")
@click.option("--steps", default=40, help="of each block")
@click.option("--tcp", is_flag=True, help="as DDP; else the Unix sockets that Narrows takes on one machine by itself")
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "overlap_ddp.json")
def against_ddp(blocks: int, steps: int, tcp: bool, out: Path) -> None:
    """Step time with overlap and clipping of the mean, against DDP over gloo."""
    host = TCP_ONLY if tcp else "127.0.0.1"
    times: dict[str, list[float]] = {"narrows": [], "ddp": []}
    apart = 0.0
    with narrows([host] * WORKERS, launch.free_ports(1), host) as ours, ddp() as theirs:
        for index in range(blocks):
            pair = {"narrows": ours.block(steps), "ddp": theirs.block(steps)}
            for name, block in pair.items():
                times[name].append(step_ms(block))
            both = zip(losses(pair["narrows"]), losses(pair["ddp"]), strict=True)
            apart = max(apart, *(abs(a / b - 1) for a, b in both))
            click.echo(f"block {index}: " + ", ".join(f"{name} {values[-1]:.1f} ms" for name, values in times.items()))
    ratio = statistics.median(times["narrows"]) / statistics.median(times["ddp"])
    ratios = [a / b for a, b in zip(times["narrows"], times["ddp"], strict=True)]
    link = "TCP" if tcp else "Unix sockets"
    facts = launch.facts() | {"link": link, "steps": steps, "blocks_ms": times, "ratio": ratio, "losses_apart": apart}
    launch.save(out, facts)
    click.echo(
        f"narrows over {link} {spread(times['narrows'])} ms, DDP {spread(times['ddp'])} ms a step\n"
        f"ratio {ratio:.3f}, by pair of blocks {min(ratios):.3f} to {max(ratios):.3f}; "
        f"claim, at most {RATIO_MAX}: {verdict(ratio <= RATIO_MAX)}\n"
        f"losses of the two sides differ by at most {apart:.1e}\n"
        f"{blocks} blocks of {steps} steps each; {signature(facts)}"
    )
    if apart > LOSS_RTOL:
        raise click.ClickException("the two sides did not train the same model")


# The trace.


def covered(begin: float, end: float, spans: list[tuple[float, float]]) -> float:
    """How much of [begin, end) lies in the spans, which do not overlap."""
    return sum(max(0.0, min(end, b) - max(begin, a)) for a, b in spans)


def chrome(workers: Block, chunks: list[list[tuple[float, int]]], hold_s: float) -> list[dict[str, Any]]:
    """Events of chrome://tracing and ui.perfetto.dev: a process per worker; what it did, and what was on its way."""
    events: list[dict[str, Any]] = []
    for rank, worker in enumerate(workers):
        lanes = {"compute": 0, "parts": 1, "held on the way up": 2}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"worker {rank}"}})
        events += [
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": lane}}
            for lane, tid in lanes.items()
        ]
        for name, begin, end in worker["spans"]:
            at = {"name": name, "pid": rank, "ts": 1e6 * begin}
            if name.startswith("part"):
                events.append(at | {"ph": "i", "s": "t", "tid": lanes["parts"]})
            else:
                events.append(at | {"ph": "X", "dur": 1e6 * (end - begin), "tid": lanes["compute"]})
        for index, (begin, size) in enumerate(chunks[rank]):
            at = {"name": f"{size:,} B", "cat": "held", "pid": rank, "tid": lanes["held on the way up"]}
            at |= {"id": f"{rank}.{index}"}
            events += [at | {"ph": "b", "ts": 1e6 * begin}, at | {"ph": "e", "ts": 1e6 * (begin + hold_s)}]
    return events


@main.command(context_settings={"show_default": True})
@click.option("--hold-ms", default=30.0, help="how long the proxy holds every chunk, each way")
@click.option("--steps", default=30)
@click.option("--out", type=click.Path(path_type=Path), default=launch.OUT / "overlap_trace.json")
def trace(hold_ms: float, steps: int, out: Path) -> None:
    """Write a Chrome trace behind the proxy, and tell which share of the hold lies in backward."""
    hosts, ports = [f"127.0.0.{2 + i}" for i in range(WORKERS)], launch.free_ports(1)
    chunks: list[list[tuple[float, int]]] = [[] for _ in hosts]
    hold_s = hold_ms / 1000
    with ExitStack() as stack:
        for host, seen in zip(hosts, chunks, strict=True):
            stack.enter_context(Proxy(ports, hold_ms, host, seen_up=seen.append))
        side = stack.enter_context(narrows(hosts, ports))
        side.block(SETTLE_STEPS)
        for seen in chunks:
            seen.clear()
        workers = side.block(steps)
        kept = [list(seen) for seen in chunks]
    launch.save(out, {"traceEvents": chrome(workers, kept, hold_s)})
    by_bytes, by_part = [], []
    for worker, seen in zip(workers, kept, strict=True):
        backward = [(begin, end) for name, begin, end in worker["spans"] if name == "backward"]
        left = [end for name, _, end in worker["spans"] if name.startswith("part")]
        by_bytes.append(
            sum(size * covered(t, t + hold_s, backward) for t, size in seen) / sum(size for _, size in seen)
        )
        by_part.append(statistics.fmean(covered(t, t + hold_s, backward) for t in left))
    share = statistics.fmean(by_bytes) / hold_s
    named = {name: [1000 * (e - b) for w in workers for n, b, e in w["spans"] if n == name] for name in
             ("forward", "backward", "wait for state")}  # fmt: skip
    parts = [sum(name.startswith("part") for name, *_ in worker["spans"]) / steps for worker in workers]
    click.echo(
        f"of {hold_ms:g} ms that each byte sent up is held, {100 * share:.0f} % lie in backward as the proxy sees it "
        f"({', '.join(f'{100 * value / hold_s:.0f}' for value in by_bytes)} by worker); "
        f"{100 * statistics.fmean(by_part) / hold_s:.0f} % of a part's, from when it was handed over\n"
        f"claim, at least {100 * SHARE_MIN:.0f} %: {verdict(share >= SHARE_MIN)}\n"
        + ", ".join(f"{name} {spread(values)} ms" for name, values in named.items())
        + f"; {statistics.fmean(parts):.0f} parts a step\n{out}: open it in chrome://tracing or ui.perfetto.dev\n"
        f"{steps} steps; {signature(launch.facts())}"
    )


if __name__ == "__main__":
    main()
