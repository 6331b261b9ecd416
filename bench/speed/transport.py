"""Workers push and pull dense models through ps-serve. The bench compares a step with a raw ZeroMQ echo and a memcpy.

    python bench/speed/transport.py                        # 1, 4, 25 and 100 MiB, 1 and 2 workers, under bsp
    python bench/speed/transport.py --sync ssp --sizes 25
    python bench/speed/transport.py --way tcp              # as between two machines: no shared memory, no Unix socket
    python bench/speed/transport.py --way one-port --shards 2    # the same through one port: what its copies cost
    python bench/speed/transport.py --keys                 # with what keys cost (CURVE), in a second table

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
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import torch
import zmq
from torch import nn

from narrows.protocols.runtime.network.key_files import add, make
from narrows.worker import DistributedOptimizer, rank

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

MIB = 1 << 20
ECHOES = [(kind, mib) for kind in ("tcp", "unix", "turn") for mib in (1, 2, 4)]
LIMIT_S = 300.0
HERE = Path(__file__).resolve()
# By the way that messages take: the host of the server, and its flags. Only 127.0.0.1 and localhost have a Unix socket.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "memory": ("127.0.0.1", ()),
    "unix": ("127.0.0.1", ("--no-shared-memory",)),
    "tcp": ("127.0.0.2", ()),
    "one-port": ("127.0.0.2", ("--one-port",)),
}


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
@click.option("--way", default="memory", type=click.Choice([*WAYS]), show_default=True, help="of large messages")
@click.option("--keys", "keyed", is_flag=True, help="run each row once more with keys")
@record.out_option("speed/transport")
@click.pass_context
def main(
    context: click.Context,
    sizes: str,
    workers: str,
    sync: str,
    shards: int,
    rounds: int,
    way: str,
    keyed: bool,
    out: Path,
) -> None:
    """Time push + pull against a raw echo."""
    if context.invoked_subcommand:
        return
    with record.Recorder("speed/transport", out) as recorder:
        for size in map(int, sizes.split(",")):
            for count in map(int, workers.split(",")):
                turns = rounds or max(4, min(30, 400 // size))
                arguments: dict[str, record.Scalar] = {"workers": count, "sync": sync, "shards": shards}
                arguments |= {"way": way} if way != "memory" else {}
                figures = measure(size, count, sync, shards, turns, way)
                recorder.add(f"{size} MiB", figures, arguments=arguments)
                if keyed:
                    for name, told in (
                        ("without", figures),
                        ("with", measure(size, count, sync, shards, turns, way, True)),
                    ):
                        step: record.Figures = {"step": told["step"]}
                        recorder.add(f"{size} MiB, {name} keys", step, table="keys", arguments=arguments)


def measure(
    size: int, count: int, sync: str, shards: int, rounds: int, way: str, keyed: bool = False
) -> record.Figures:
    """Run `count` workers of `size` MiB."""
    host, flags = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        keys = key = list[str]()
        if keyed:
            make(folder)
            keys, key = ["--keys", folder], ["--key", str(add(folder, "bench", "worker"))]
        ports = launch.free_ports(shards)
        script = [str(HERE), "worker", "--size", str(size), "--rounds", str(rounds), "--out", folder]
        worker = launch.ps_worker("--server", f"tcp://{host}:{ports[0]}", *key, "-n", str(count), *script)
        echo = subprocess.Popen(
            [sys.executable, str(HERE), "echo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert echo.stdout is not None
            port = echo.stdout.readline().strip()
            with launch.serving(["--sync", sync, "--workers", str(count), *flags, *keys], ports, host):
                launch.run([*worker, "--echo", port], LIMIT_S)
        finally:
            launch.end(echo)
        times = [json.loads((Path(folder) / f"{i}.json").read_text()) for i in range(count)]
    medians = {key: max(statistics.median(one[key]) for one in times) for key in times[0]}
    step_s = medians["step"]
    found: record.Figures = {"step": (1e3 * step_s, "ms"), "push and pull": (2 * size * count / step_s, "MiB/s")}
    for kind, name in (("tcp", "of the TCP echo"), ("unix", "of the Unix echo"), ("turn", "of the turn")):
        found[name] = (min(medians[f"{kind}{mib}"] for k, mib in ECHOES if k == kind) / step_s, "")
    return found | {"memcpy": (1e3 * medians["memcpy"], "ms")}


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
