"""Gradients leave during backward. The bench compares the step of bsp, dense and clipped, with that of DDP over gloo.

    python bench/speed/overlap.py        # in alternate blocks; claim: at most 1.10 times DDP's step
    python bench/speed/overlap.py --tcp  # over TCP, as DDP

Rules
- The byte GPT at its defaults, BSP dense, one server, 2 workers of one thread, the same global batches and clipping of the
  mean gradient on both sides (overlap_worker.py). Their losses must agree, or it is no comparison.
- Both sides are up all the time and take turns; who has no turn sleeps. The first steps of a block are left out.
- A block's figure is the median over its steps of the slower worker; the ratio is that of the medians over blocks.
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

from lab import launch, record

WORKERS = 2
TCP_ONLY = "127.0.0.3"  # Narrows keeps Unix sockets for 127.0.0.1
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
    worker = launch.ps_worker("--server")
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


def step_ms(block: Block) -> float:
    slower: list[float] = [max(step) for step in zip(*(worker["seconds"] for worker in block), strict=True)]
    return 1000 * statistics.median(slower[SETTLE_STEPS:])


def losses(block: Block) -> list[float]:
    """The loss of the global batch at each step: each worker told its share times the number of workers."""
    return [statistics.fmean(step) for step in zip(*(worker["losses"] for worker in block), strict=True)]


@click.command(context_settings={"show_default": True})
@click.option("--blocks", default=6, help="of each side")
@click.option("--steps", default=40, help="of each block")
@click.option("--tcp", is_flag=True, help="as DDP; else the Unix sockets that Narrows takes on one machine by itself")
@record.out_option("speed/overlap")
def main(blocks: int, steps: int, tcp: bool, out: Path) -> None:
    """Step time with overlap and clipping of the mean, against DDP over gloo."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children are then ended too
    host = TCP_ONLY if tcp else "127.0.0.1"
    apart = 0.0
    with (
        record.Recorder("speed/overlap", out) as recorder,
        narrows([host] * WORKERS, launch.free_ports(1), host) as ours,
        ddp() as theirs,
    ):
        for _ in range(blocks):
            pair = {"narrows": ours.block(steps), "ddp": theirs.block(steps)}
            for name, block in pair.items():
                arguments = {"steps": steps, "sockets": "tcp" if tcp or name == "ddp" else "unix"}
                recorder.add(
                    name, {"step": (step_ms(block), "ms")}, beside="ddp", table="ddp", seed=0, arguments=arguments
                )
            both = zip(losses(pair["narrows"]), losses(pair["ddp"]), strict=True)
            apart = max(apart, *(abs(a / b - 1) for a, b in both))
    if apart > LOSS_RTOL:
        raise click.ClickException(f"the two sides did not train the same model: their losses differ by {apart:.1e}")


if __name__ == "__main__":
    main()
