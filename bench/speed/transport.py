"""Push and pull of dense models through a real ps-serve, beside a raw ZeroMQ echo of the same bytes and a memcpy.

    python bench/speed/transport.py                       1, 4, 25 and 100 MiB, 1 and 2 workers, under bsp
    python bench/speed/transport.py --sync ssp --sizes 25
    python bench/speed/transport.py --keys                with what keys cost (CURVE), in two more columns

Rules
- Times are of `optimizer.step()` whole: gradient out of p.grad, to the server, folded there (a step of SGD, or the
  addition of an update), the new state back and written into the parameters. Under bsp a step waits for all of that; under
  ssp and async the answer to the step before is on its way meanwhile.
- The echo is DEALER to ROUTER and back with no copy of ours at either end: the same bytes each way, in frames of 1, 2 and
  4 MiB, over TCP and over a Unix socket, by the same worker processes, each right after a step, so that all see the same
  noise. The best frame size counts. An echo has both directions under way at once; a push has to end before it is answered.
  "turn" is the echo over the Unix socket that waits for the last frame before it sends the first one back.
- A figure is the median over all rounds of the slowest worker; two workers send twice the bytes, so their MiB/s is the sum.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import zmq
from torch import nn

from narrows.protocols.runtime.network.key_files import add, make
from narrows.worker import DistributedOptimizer, rank

MIB = 1 << 20
ECHOES = [(kind, mib) for kind in ("tcp", "unix", "turn") for mib in (1, 2, 4)]
LIMIT_S = 300.0
HERE = Path(__file__).resolve()
BIN = Path(sys.executable).parent


def echo_address(kind: str, port: int) -> str:
    return f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"ipc://@narrows-echo-{port}"


def echo_once(socket: zmq.Socket[bytes], values: memoryview, frame: int, turn: bool) -> float:
    """Seconds to send `values` in frames and have all of them back; `turn`: an empty message before and after them."""
    begin = time.perf_counter()
    count = 0
    if turn:
        socket.send(b"")
    for at in range(0, len(values), frame):
        socket.send(values[at : at + frame], copy=False)
        count += 1
    if turn:
        socket.send(b"")
    for _ in range(count):
        if not socket.poll(10_000):
            raise SystemExit("the echo does not answer")
        socket.recv(copy=False)
    return time.perf_counter() - begin


@click.group(invoke_without_command=True)
@click.option("--sizes", default="1,4,25,100", help="MiB of float32 parameters [1,4,25,100]")
@click.option("--workers", default="1,2", help="how many at once [1,2]")
@click.option("--sync", default="bsp", help="mode of the server [bsp]")
@click.option("--shards", default=1, help="server processes [1]")
@click.option("--rounds", default=0, help="rounds of 9 steps and 9 echoes [so that each takes some seconds]")
@click.option("--keys", "keyed", is_flag=True, help="run each row once more with keys")
@click.option("--json", "json_file", default="bench/out/transport.json", help="where the figures go")
@click.pass_context
def main(
    context: click.Context, sizes: str, workers: str, sync: str, shards: int, rounds: int, keyed: bool, json_file: str
) -> None:
    """Time push + pull against a raw echo."""
    if context.invoked_subcommand:
        return
    rows = []
    columns = (
        "MiB",
        "workers",
        "step ms",
        "push+pull MiB/s",
        "echo ms (frame)",
        "of echo",
        "Unix echo",
        "of it",
        "turn",
        "of it",
        "memcpy ms",
        *(("keys: step ms", "of the step without") if keyed else ()),
    )
    click.echo("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for size in map(int, sizes.split(",")):
        for count in map(int, workers.split(",")):
            row = measure(size, count, sync, shards, rounds or max(4, min(30, 400 // size)))
            more = ""
            if keyed:
                row["keyed_ms"] = measure(size, count, sync, shards, row["rounds"], True)["step_ms"]
                more = f" {row['keyed_ms']:.2f} | {row['keyed_ms'] / row['step_ms']:.2f} |"
            rows.append(row)
            click.echo(
                f"| {size} | {count} | {row['step_ms']:.2f} | {row['mib_per_second']:.0f} | "
                f"{row['tcp_ms']:.2f} ({row['tcp_frame_mib']}) | {row['of_tcp']:.2f} | "
                f"{row['unix_ms']:.2f} ({row['unix_frame_mib']}) | {row['of_unix']:.2f} | "
                f"{row['turn_ms']:.2f} ({row['turn_frame_mib']}) | {row['of_turn']:.2f} | {row['memcpy_ms']:.2f} |{more}"
            )
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=HERE.parent)
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    Path(json_file).parent.mkdir(parents=True, exist_ok=True)
    facts = {"commit": commit.stdout.strip(), "sync": sync, **machine, "rows": rows}
    Path(json_file).write_text(json.dumps(facts, indent=1) + "\n")


def measure(size: int, count: int, sync: str, shards: int, rounds: int, keyed: bool = False) -> dict[str, Any]:
    """Run `count` workers of `size` MiB; one row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        keys = key = list[str]()
        if keyed:
            make(folder)
            keys, key = ["--keys", folder], ["--key", str(add(folder, "bench", "worker"))]
        ready = Path(folder) / "ready"
        serve: list[str] = [
            str(BIN / "ps-serve"),
            "--bind",
            "tcp://127.0.0.1:0",
            "--sync",
            sync,
            "--ready-file",
            str(ready),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(
            [*serve, *keys, "--workers", str(count), "--shards", str(shards)],
            stdout=subprocess.DEVNULL,
            env=environment,
            cwd=folder,
        )
        echo = subprocess.Popen(
            [sys.executable, str(HERE), "echo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert echo.stdout is not None
            port = echo.stdout.readline().strip()
            deadline = time.monotonic() + LIMIT_S
            while not (ready.exists() and ready.read_text()):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("ps-serve did not start")
                time.sleep(0.05)
            address = json.loads(ready.read_text())["address"]
            script = [
                str(HERE),
                "worker",
                "--echo",
                port,
                "--size",
                str(size),
                "--rounds",
                str(rounds),
                "--out",
                folder,
            ]
            worker = [str(BIN / "ps-worker"), "--server", address, *key, "-n", str(count), *script]
            subprocess.run(worker, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL, env=environment)
        finally:
            for process in (server, echo):
                process.terminate()
                process.wait(30)
        times = [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(count)]
    medians = {key: max(statistics.median(one[key]) for one in times) for key in times[0]}
    row = {
        "mib": size,
        "workers": count,
        "step_ms": 1e3 * medians["step"],
        "mib_per_second": 2 * size * count / medians["step"],
        "memcpy_ms": 1e3 * medians["memcpy"],
        "rounds": rounds,
    }
    for kind in dict(ECHOES):
        echo_s, frame = min((medians[f"{kind}{mib}"], mib) for k, mib in ECHOES if k == kind)
        row |= {f"{kind}_ms": 1e3 * echo_s, f"{kind}_frame_mib": frame, f"of_{kind}": echo_s / medians["step"]}
    return row


@main.command(hidden=True)
@click.option("--echo", "port", type=int)
@click.option("--size", type=int)
@click.option("--rounds", type=int)
@click.option("--out", type=Path)
def worker(port: int, size: int, rounds: int, out: Path) -> None:
    """One worker, under ps-worker."""
    count = size * MIB // 4 // 4
    model = nn.ParameterList([nn.Parameter(torch.zeros(count)) for _ in range(4)])
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    for parameter in model:
        parameter.grad = torch.ones(count)
    source, target = np.ones(4 * count, np.float32), np.zeros(4 * count, np.float32)
    times: dict[str, list[float]] = {name: [] for name in ("step", "memcpy", *(f"{k}{mib}" for k, mib in ECHOES))}
    with zmq.Context() as context, context.socket(zmq.DEALER) as tcp, context.socket(zmq.DEALER) as unix:
        sockets = {"tcp": tcp, "unix": unix, "turn": unix}
        for kind, socket in (("tcp", tcp), ("unix", unix)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(echo_address(kind, port))
        for turn in range(-1, rounds):
            for kind, mib in ECHOES:
                begin = time.perf_counter()
                optimizer.step()
                stepped = time.perf_counter() - begin
                echoed = echo_once(sockets[kind], source.view(np.uint8).data, mib * MIB, kind == "turn")
                if turn >= 0:
                    times["step"].append(stepped)
                    times[f"{kind}{mib}"].append(echoed)
            begin = time.perf_counter()
            np.copyto(target, source)
            times["memcpy"].append(time.perf_counter() - begin)
    # The fold was really done: lr * 1 off every weight for each step, whoever took part in it.
    steps = len(ECHOES) * (rounds + 1)
    with optimizer.shared(), torch.no_grad():
        off = max(float((p + 0.5 * steps).abs().max()) for p in model)
    if off > 1e-3 * steps:
        raise SystemExit(f"after {steps} steps the weights are {off} from where they should be")
    (out / f"{rank()}.json").write_text(json.dumps(times))


@main.command(hidden=True)
def echo() -> None:
    """Send every message back until stdin ends."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        socket.bind(echo_address("unix", port))
        print(port, flush=True)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        held: dict[bytes, list[zmq.Frame]] = {}  # of peers whose frames are to come back after the last of them
        while True:
            ready = dict(poller.poll())
            if sys.stdin.fileno() in ready:
                return
            peer, frame = socket.recv_multipart(copy=False)
            if not len(frame.buffer) and peer.bytes not in held:
                held[peer.bytes] = []
            elif not len(frame.buffer):
                for frame in held.pop(peer.bytes):
                    socket.send_multipart([peer.bytes, frame], copy=False)
            elif peer.bytes in held:
                held[peer.bytes].append(frame)
            else:
                socket.send_multipart([peer, frame], copy=False)


if __name__ == "__main__":
    main()
