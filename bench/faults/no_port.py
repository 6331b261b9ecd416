"""Two cities that reach nothing but a bucket train through it, while each member is killed in turn: losses, bytes, requests.

    python bench/faults/no_port.py                      # workers that make 50 local steps, then clusters of two workers
    python bench/faults/no_port.py --levels 1 --calm    # one level, and nobody is killed: equal to the run over TCP

Rules
- The cities are network namespaces without a route to each other; moto's server of S3 stands in a third, across a link. The
  script tries the ways that must not lead anywhere before it trains.
- The same run over TCP on loopback, with the same kills, comes first: its loss is what the other is held against. With
  --calm nobody is killed, and both are equal.
- Members are killed in the first rounds, a round apart. A worker that is killed loses the steps of its round, as over TCP:
  how many these are differs from run to run. --repeats shows by how much losses over TCP differ.
- Who is killed, gets `kill -9`. A worker's process is started again by its ps-worker, a shard by its ps-serve. A server is
  killed with all its shards, and another ps-serve goes on with --resume.
- Meanwhile a thread reads every object of the bucket again and again. It searches them for the names of tensors, and for
  runs of values of the first and the last model as float32, bfloat16 and float16.
- Requests and bytes are those that the processes count; the bytes of the links are the kernel's.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "../tests", "tasks")]

from kit.processes import alive, descendants
from lab import launch
from lab.link import Way
from lab.netns import Host, Lab
from safetensors.numpy import load_file

BUCKET, PORT = "narrows", 5000
KEYS = {"AWS_ACCESS_KEY_ID": "lab", "AWS_SECRET_ACCESS_KEY": "lab", "AWS_DEFAULT_REGION": "us-east-1"}
TASK = ["--layers", "2", "--width", "64", "--heads", "4", "--batch", "16", "--lr", "0.004"]
NAMES = (b"blocks.0", b"qkv.weight", b"head.weight", b"Heartbeat", b"local_steps")
LIMIT_S = 500.0
ABOVE_MAX = 0.003  # of the loss beyond that of the run over TCP
RUN = 8  # values in a row that are looked for


@dataclass
class Started:
    """A command in a city, and what it says."""

    host: Host | None
    words: list[str]
    env: dict[str, str]
    folder: Path
    name: str
    process: subprocess.Popen[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / f"{self.name}.log"
        self.ready = self.folder / f"{self.name}.ready"
        self.start()

    def start(self, *more: str) -> None:
        with self.log.open("a") as out:
            options: dict[str, Any] = {
                "cwd": launch.ROOT,
                "env": launch.environment(**self.env),
                "stdout": out,
                "stderr": out,
            }
            words = [*self.words, *more]
            self.process = self.host.popen(words, **options) if self.host else subprocess.Popen(words, **options)

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def until(self, done: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline or self.process.poll() not in (None, 0):
                raise launch.CommandFailed(f"{self.name}: waited for too long, or it failed:\n{self.said[-3000:]}")
            time.sleep(0.1)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ready.read_text())
        return found

    # Who is killed.

    def kill_shard(self, index: int) -> None:
        os.kill(self.told()["shard_pids"][index], signal.SIGKILL)

    def kill_server(self) -> None:
        """Kill ps-serve and its shards at once, and start another one that goes on."""
        told = self.told()
        os.kill(told["pid"], signal.SIGSTOP)
        for pid in [*told["shard_pids"], told["pid"]]:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        while any(map(alive, told["shard_pids"])):
            time.sleep(0.05)
        self.ready.unlink()
        self.start("--resume")
        self.until(self.ready.exists)

    def kill_script(self) -> None:
        """Kill the first process of the script."""
        for pid in descendants(self.process.pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip().startswith("ps-worker-0"):
                    return os.kill(pid, signal.SIGKILL)
        raise launch.CommandFailed(f"{self.name} has no process of a script")


class Search(threading.Thread):
    """Reads the whole bucket again and again, from the city of its owner, and keeps what must not be in it."""

    def __init__(self, host: Host, url: str) -> None:
        super().__init__(daemon=True)
        self.host, self.url, self.over = host, url, threading.Event()
        self.objects: dict[str, bytes] = {}

    def run(self) -> None:
        import boto3

        with self.host.inside():  # this thread's sockets
            given = {"aws_access_key_id": "lab", "aws_secret_access_key": "lab", "region_name": "us-east-1"}
            client = boto3.client("s3", endpoint_url=self.url, **given)
            while not self.over.wait(0.05):
                for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
                    if (name := each["Key"]) not in self.objects:
                        with suppress(client.exceptions.NoSuchKey):
                            self.objects[name] = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()

    def found(self, models: list[np.ndarray[Any, Any]]) -> list[str]:
        """Names of the objects in which something can be read. Raises CommandFailed if the search itself finds nothing."""
        looked = {
            each[at : at + RUN].tobytes() for model in models for each in forms(model) for at in range(0, 4096, 64)
        }
        looked |= set(NAMES)
        looked = {each for each in looked if len(set(each)) > RUN // 2}  # not zeros
        plain = forms(models[0])[1].tobytes()
        if not any(each in plain for each in looked):
            raise launch.CommandFailed("the search does not find what is there")
        text = {name: name.encode() + content for name, content in self.objects.items()}
        return [name for name, content in text.items() if any(each in content for each in looked)]


def forms(model: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Values of a model as they may stand in a message."""
    model = model.astype(np.float32)
    return [model, (model.view(np.uint32) >> 16).astype(np.uint16), model.astype(np.float16)]


def first_model() -> np.ndarray[Any, Any]:
    import torch
    from bytelm import ByteGPT

    torch.manual_seed(0)
    model = ByteGPT(layers=2, width=64, heads=4)
    return np.concatenate([each.detach().numpy().ravel() for each in model.parameters()])


def no_way(first: Host, second: Host) -> bool:
    """True if neither city reaches the other."""
    for here, there in (first, second), (second, first):
        with here.inside(), socket.socket() as line:
            line.settimeout(2)
            if line.connect_ex((there.address, PORT)) in (0, errno.ECONNREFUSED):  # either is an answer
                return False
    return True


def trained(levels: int, steps: int, local: int, cities: list[Host | None], via: str, env: dict[str, str], strikes: bool,
            folder: Path) -> dict[str, Any]:  # fmt: skip
    """Train once. `via`: the mailbox, "": over TCP. Returns losses, requests and the folder of the last model."""
    keys = folder / "keys"
    serve, work = [sys.executable, "-m", "narrows.ps.command.cli"], launch.ps_worker()
    launch.run([*serve, "keys", "init", str(keys)], 60)
    role = "worker" if levels == 1 else "cluster"
    for name in ("one", "other"):
        launch.run([*serve, "keys", "add", name, "--role", role, "--keys", str(keys)], 60)
        if not (keys / f"{name}.key").exists():
            raise launch.CommandFailed(f"no key of {name}")
    mode = ["--sync", "local", "--local-steps", str(local), "--compress", "int8"]
    shards = 2 if levels == 1 else 1

    def server(host: Host | None, name: str, *words: str) -> Started:
        own = ["--checkpoint-dir", str(folder / name), "--checkpoint-clocks", "1" if name == "root" else str(local)]
        own += ["--ready-file", str(folder / f"{name}.ready"), "--record", str(folder / f"{name}.jsonl")]
        made = Started(host, [*serve, *own, "--shards", str(shards), "--workers", "2", *words], env, folder, name)
        made.until(made.ready.exists)
        return made

    bind = f"tcp://127.0.0.1:{launch.free_ports(shards)[0]}"
    root = server(cities[0], "root", *(["--via", via] if via else ["--bind", bind]), "--keys", str(keys), *mode)
    above = via or root.told()["address"]
    script = [str(launch.ROOT / "bench/tasks/bytelm.py"), "--steps", str(steps), *TASK]
    servers, workers = [root], list[Started]()
    for host, name in zip(cities, ("one", "other"), strict=True):
        more = ["--restarts", "2", "--server-timeout", "200", "--checkpoint-dir", str(folder / f"{name}-states")]
        if levels == 2:
            up = ["--parent", above, "--parent-key", str(keys / f"{name}.key"), "--parent-timeout", "200"]
            port = launch.free_ports(1)[0]
            city = server(host, name, "--bind", f"tcp://127.0.0.1:{port}", "--sync", "bsp", *up)
            servers.append(city)
            words = ["--server", f"tcp://127.0.0.1:{port}", "-n", "2"]
        else:
            words = ["--server", above, "--key", str(keys / f"{name}.key")]
        workers.append(Started(host, [*work, *words, *more, *script], env, folder, f"{name}-workers"))
    if strikes:
        struck(levels, servers, workers)
    for each in [*workers, *servers]:
        each.until(each.ended)
        if each.process.returncode:
            raise launch.CommandFailed(f"{each.name} ended with {each.process.returncode}:\n{each.said[-3000:]}")
    losses = [float(loss) for each in workers for loss in re.findall(r"validation loss (\d+\.\d+)", each.said)]
    asked = Counter[str]()
    for each in [*servers, *workers]:
        for put, get, there, gone, up, down in re.findall(COUNTS, each.said):
            asked.update(PUT=int(put), GET=int(get), LIST=int(there), DELETE=int(gone))
            asked.update(up=int(1e6 * float(up)), down=int(1e6 * float(down)))
    return {"loss": losses, "asked": asked, "model": folder / "root" / "model.safetensors"}


COUNTS = r"asked \S+: (\d+) PUT, (\d+) GET, (\d+) LIST, (\d+) DELETE[^;]*; ([\d.]+) MB up, ([\d.]+) MB down"


def struck(levels: int, servers: list[Started], workers: list[Started]) -> None:
    """Kill each member in turn, a round of the run's between two of them."""
    one, other = workers
    turns: list[tuple[str, Callable[[], None]]] = [
        ("a worker's process in the one city", one.kill_script),
        ("one in the other city", other.kill_script),
        ("shard 0", lambda: servers[0].kill_shard(0)),
    ]
    if levels == 1:
        turns.append(("shard 1", lambda: servers[0].kill_shard(1)))
    else:
        turns.append(("the shard of the one cluster", lambda: servers[1].kill_shard(0)))
        turns.append(("the server of the other cluster, with its shard", servers[2].kill_server))
    turns.append(("the server that all meet, with its shards", servers[0].kill_server))
    for at, (who, strike) in enumerate(turns, 1):
        servers[0].until(partial(reached, servers[0], at))
        strike()
        print(f"  kill -9 at clock {at}: {who}", flush=True)


def reached(root: Started, clock: int) -> bool:
    """True if the root has written a checkpoint of this clock, or of a later one."""
    return max(map(int, re.findall(r"shard 0: checkpoint of clock (\d+)", root.said)), default=0) >= clock


@click.command(context_settings={"show_default": True})
@click.option("--levels", type=click.Choice(["1", "2", "both"]), default="both")
@click.option("--steps", default=1200, help="of the training")
@click.option("--local-steps", "local", default=50, help="between two exchanges")
@click.option("--repeats", default=1, help="runs over TCP: with kills their losses differ, and their largest counts")
@click.option("--calm", is_flag=True, help="kill nobody")
@click.option("--rate", default=100.0, help="Mbit/s of the link between a city and the bucket")
@click.option("--delay", default=20.0, help="ms one way")
def main(levels: str, steps: int, local: int, repeats: int, calm: bool, rate: float, delay: float) -> None:
    """Train over TCP and through a bucket, and compare. Exit code 1: the loss is too far above, or something can be read."""
    wrong = 0
    for level in (1, 2) if levels == "both" else (int(levels),):
        what = "one level" if level == 1 else "clusters of two workers"
        with tempfile.TemporaryDirectory() as folder, Lab() as lab:
            (Path(folder) / "via").mkdir()
            by_tcp = list[float]()
            for number in range(repeats):
                (own := Path(folder) / f"tcp-{number}").mkdir()
                print(f"{what}: over TCP on loopback", flush=True)
                by_tcp.append(max(trained(level, steps, local, [None, None], "", {}, not calm, own)["loss"]))
            cities, store = [lab.host(), lab.host()], lab.host()
            way = Way(rate=rate * 1e6, delay_s=delay / 1000)
            for city in cities:
                lab.join(city, store, way)
            with store.inside():
                Path("/proc/sys/net/ipv4/ip_forward").write_text("0")
            url = f"http://{store.address}:{PORT}"
            store.popen([sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(PORT)], stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL)  # fmt: skip
            made(store, url)
            print(f"{what}: neither city reaches the other: {no_way(*cities)}", flush=True)
            search = Search(store, url)
            search.start()
            began = [host.bytes() for host in cities]
            env = KEYS | {"AWS_ENDPOINT_URL": url}
            via = trained(
                level, steps, local, [*cities], f"s3://{BUCKET}/run-{level}", env, not calm, Path(folder) / "via"
            )
            moved = [tuple(now - before for now, before in zip(host.bytes(), was, strict=True))
                     for host, was in zip(cities, began, strict=True)]  # fmt: skip
            search.over.set()
            search.join(10)
            last = np.concatenate([each.ravel() for each in load_file(via["model"]).values()])
            readable = search.found([first_model(), last])
        loss, before = max(via["loss"]), ", ".join(f"{each:.4f}" for each in sorted(by_tcp))
        above = loss / max(by_tcp) - 1
        print(f"{what}: loss {loss:.4f}, over TCP {before}: {100 * above:+.2f} % of the largest", flush=True)
        print(f"{what}: {dict(via['asked'])}; (received, sent) of each city by the kernel: {moved}", flush=True)
        print(
            f"{what}: {len(search.objects)} objects searched, {len(readable)} in which something can be read",
            flush=True,
        )
        wrong += above > ABOVE_MAX or bool(readable)
    sys.exit(bool(wrong))


def made(store: Host, url: str) -> None:
    """Make the bucket, once the server is there."""
    with store.inside():
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT"), timeout=5)
                return
            if time.monotonic() > deadline:
                raise launch.CommandFailed("moto's server did not start")
            time.sleep(0.2)


if __name__ == "__main__":
    launch.one_thread()
    main()
