"""Shared by the benchmarks: real ps-serve and ps-worker commands as child processes.

Rules
- Every process gets one thread for its arithmetic, and no NARROWS_ or rank variable of ours.
- Each process that is started here is ended here, by its own id.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "bench" / "out"
SERVER_START_S = 150.0
SERVER_END_S = 60.0  # after the last worker left
TERMINATE_S = 30.0
TAIL_LINES = 15
POLL_S = 0.1
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
FIRST_PORT, LAST_PORT = 20_000, 32_000  # below the ports that Linux gives away by itself


class CommandFailed(Exception):
    """A command ended with an error or ran too long; the text ends with the tail of what it said."""


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Inside, this thread runs on these cores, and each process that it starts does, with its threads and children."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def environment(**extra: str) -> dict[str, str]:
    foreign = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if not name.startswith("NARROWS_") and name not in foreign}
    return env | dict.fromkeys(THREADS, "1") | {"PYTHONUNBUFFERED": "1"} | extra


def one_thread() -> None:
    """Begin this script anew where NumPy, which reads these variables as it is imported, was given more threads."""
    if any(os.environ.get(name) != "1" for name in THREADS):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | dict.fromkeys(THREADS, "1"))


def free_ports(count: int, hosts: Sequence[str] = ("127.0.0.1", "127.0.0.2", "127.0.0.3")) -> list[int]:
    """`count` ports in a row that nobody listens on at any of the hosts."""
    for _ in range(100):
        ports = list(range(first := random.randrange(FIRST_PORT, LAST_PORT), first + count))
        sockets = [socket.socket() for _ in hosts for _ in ports]
        try:
            for taken, address in zip(sockets, ((host, port) for host in hosts for port in ports), strict=True):
                taken.bind(address)
            return ports
        except OSError:
            continue
        finally:
            for taken in sockets:
                taken.close()
    raise OSError(f"no {count} free ports in a row from {FIRST_PORT} to {LAST_PORT}")


def ps_serve(bind: str, *words: str) -> list[str]:
    """The command of a ps-serve that keeps no checkpoint."""
    return [
        sys.executable,
        "-m",
        "narrows.ps.command.cli",
        "--bind",
        f"tcp://{bind}",
        "--checkpoint-dir",
        "none",
        *words,
    ]


def ps_worker(*words: str) -> list[str]:
    return [sys.executable, "-m", "narrows.worker.command.cli", *words]


def until(done: Callable[[], Any], what: str, limit_s: float = SERVER_START_S) -> None:
    """Wait for it. Raises TimeoutError, which `started` turns into CommandFailed."""
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took longer than {limit_s:.0f} s")
        time.sleep(POLL_S)


def tail(stream: IO[str]) -> str:
    stream.seek(0)
    return "\n".join(stream.read().splitlines()[-TAIL_LINES:])


def end(process: subprocess.Popen[Any]) -> None:
    """Ask it to end, and see to it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(TERMINATE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def run(command: Sequence[str], limit_s: float, env: dict[str, str] | None = None) -> tuple[str, float]:
    """Its stdout, and the seconds it took. Raises CommandFailed."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        before = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=env or environment(), stdout=said, stderr=errors)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"ended after {limit_s:.0f} s"
        finally:
            end(process)
        seconds = time.perf_counter() - before
        if code != 0:
            raise CommandFailed(f"{' '.join(command)}\nexit code {code}; its last words:\n{tail(errors)}")
        said.seek(0)
        return said.read(), seconds


@contextmanager
def serving(flags: Sequence[str], ports: Sequence[int], host: str = "127.0.0.1") -> Iterator[subprocess.Popen[Any]]:
    """ps-serve, one shard a port, which are its children. It ends by itself after its workers. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
        ready = Path(folder) / "ready"
        command = ps_serve(f"{host}:{ports[0]}", *flags, "--shards", str(len(ports)), "--ready-file", str(ready))
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + SERVER_START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise CommandFailed(f"{' '.join(command)}\ndid not start; its last words:\n{tail(said)}")
                time.sleep(0.02)
            try:
                yield process
            except CommandFailed as error:
                raise CommandFailed(f"{error}\nand those of ps-serve:\n{tail(said)}") from None
            if (code := process.wait(SERVER_END_S)) != 0:
                raise CommandFailed(f"{' '.join(command)}\nexit code {code}; its last words:\n{tail(said)}")
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"{' '.join(command)}\ndid not end by itself; its last words:\n{tail(said)}") from None
        finally:
            end(process)


@contextmanager
def started(command: Sequence[str], env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[Any]]:
    """A command that runs while the block does, and is to end well at its end. Raises CommandFailed."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=env or environment(), stdout=said, stderr=said)
        try:
            yield process
            code = process.wait(TERMINATE_S)
        except (ConnectionError, TimeoutError, subprocess.TimeoutExpired) as error:
            raise CommandFailed(f"{' '.join(command)}\n{error}; its last words:\n{tail(said)}") from None
        finally:
            end(process)
        if code != 0:
            raise CommandFailed(f"{' '.join(command)}\nexit code {code}; its last words:\n{tail(said)}")
