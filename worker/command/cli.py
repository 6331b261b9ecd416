"""ps-worker: launches N copies of a script against a server, its own embedded one when none is named.

It owns the child processes. Exit codes: docs/architecture.md. Rules
- A child leads a process group, so that Ctrl-C reaches it through us, once, and what it started can be ended with it.
- Nothing outlives us, however we end: the embedded server ends with its stdin, a worker with NARROWS_PARENT_FD.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import click

from narrows.protocols.errors import (
    AuthenticationError,
    IncompatibleError,
    ServerLostError,
    UnreachableError,
    UsageError,
)
from narrows.protocols.modes import MODES
from narrows.protocols.runtime.flags import ALLOCATOR, COMMAND, given, parse_address, run, run_flags
from narrows.protocols.settings import Settings
from narrows.protocols.wire import pack
from narrows.worker.command.console import Console
from narrows.worker.command.recording import Recording

EVENTS_MAX = 100_000
SERVER_START_S = 150.0
CHILD_END_S = 15.0  # after Ctrl-C
SERVER_END_S = 60.0
PIPES_END_S = 2.0  # a process that a child left behind may keep its pipes open for ever
TELL_S = 5.0
RANKS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
SERVER = -1  # in place of a worker's index
SWITCHED = "worker {} codes with {to}, not {from}, from clock {clock} on: {reason}"
FATAL = (AuthenticationError.exit_code, IncompatibleError.exit_code)


@click.command(context_settings=COMMAND | {"allow_interspersed_args": False})
@click.option("--server", default="", help="tcp://HOST:PORT as ps-serve printed it [embedded]")
@click.option("-n", "--nproc", type=int, default=1, help="copies of the script on this machine [1]")
@click.option("--device", default="auto", help="auto, cpu or cuda[:i], set for the script as NARROWS_DEVICE [auto]")
@click.option("--record", default="", help="write one JSON object a line to this file")
@click.option("--connect-timeout", type=float, default=30.0, help="seconds until a server must have answered [30]")
@click.option("--server-timeout", type=float, default=30.0, help="seconds of silence until a server is lost [30]")
@click.option("--checkpoint-dir", default="", help="of the embedded server [none]")
@click.option("--resume", is_flag=True, help="of the embedded server")
@click.option("-m", "module", is_flag=True, help="run a module instead of a script: -m MODULE ARGS...")
@run_flags
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py|MODULE ARGS...")
def command(**flags: Any) -> int:
    """Train SCRIPT.py ARGS... with N workers of a run.

    Each flag has a variable, NARROWS_<FLAG>, for example NARROWS_SERVER; the flag wins.
    """
    return Launcher(**flags).run()


def main() -> None:
    run(command, "ps-worker")


class Launcher:
    """One ps-worker: its flags, its children, and what they tell."""

    def __init__(
        self,
        server: str,
        nproc: int,
        device: str,
        record: str,
        connect_timeout: float,
        server_timeout: float,
        checkpoint_dir: str,
        resume: bool,
        module: bool,
        command: tuple[str, ...],
        **flags: Any,
    ) -> None:
        self.flags = given(flags)
        if nproc < 1:
            raise UsageError(f"-n {nproc}: give at least 1")
        for name, value in (("--connect-timeout", connect_timeout), ("--server-timeout", server_timeout)):
            if not 0 < value < 1e6:
                raise UsageError(f"{name} {value:g}: give a positive number of seconds")
        if device.split(":")[0] not in ("auto", "cpu", "cuda"):
            raise UsageError(f"--device {device}: auto, cpu or cuda[:i]")
        if not command:
            raise UsageError("name the script to run: ps-worker [flags] SCRIPT.py ARGS...")
        if not module and not Path(command[0]).is_file():
            raise UsageError(f"{command[0]}: there is no such script")
        if server:
            parse_address("--server", server)
            if self.flags.get("sync", "ssp") not in MODES:
                Settings(sync=self.flags["sync"]).validated()
            if checkpoint_dir or resume:
                name = "--resume" if resume else "--checkpoint-dir"
                raise UsageError(f"{name} is for the embedded server: give it to the ps-serve at {server}")
        else:
            settings = Settings(**{"workers": nproc} | self.flags).validated()
            if settings.workers > nproc:
                raise UsageError(
                    f"--workers {settings.workers}: the embedded server has the -n {nproc} of this command alone; for more "
                    "start ps-serve and name it with --server"
                )
            self.flags["workers"] = settings.workers
        self.server, self.nproc, self.device = server, nproc, device
        self.connect_timeout, self.server_timeout = connect_timeout, server_timeout
        self.checkpoint_dir, self.resume = checkpoint_dir, resume
        self.command = ["-m", *command] if module else list(command)
        self.embedded: subprocess.Popen[bytes] | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.tokens: list[str] = []
        self.events: queue.Queue[tuple[int, str, Any]] = queue.Queue(EVENTS_MAX)
        self.codes: dict[int, int] = {}
        self.errors: dict[int, tuple[int, str]] = {}  # of ours, that ended a worker: exit code, sentence
        self.telling: list[threading.Thread] = []
        self.signals: list[int] = []
        self.recording = Recording(record)
        self.console = Console()

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        parent_fd, our_fd = os.pipe()  # its end tells the children that we ended, however that was
        try:
            code = 0 if self.server else self._embed()
            for index in range(self.nproc):
                if not code and not self.signals:
                    self._spawn(index, parent_fd)
            if not code and not self.signals:
                code = self._watch()
            return 128 + self.signals[0] if self.signals else code
        finally:
            self._end()
            os.close(parent_fd)
            os.close(our_fd)

    # Starting.

    def _embed(self) -> int:
        """Start the embedded server; returns its exit code if it has already ended, with its message on the console."""
        with tempfile.TemporaryDirectory(prefix="narrows-") as folder:
            ready = Path(folder) / "ready"
            words = [
                sys.executable,
                "-m",
                "narrows.ps.command.cli",
                "--bind",
                "tcp://127.0.0.1:0",
                "--ready-file",
                str(ready),
            ]
            for name, value in self.flags.items():
                words += ["--" + name.replace("_", "-"), str(value)]
            words += ["--checkpoint-dir", self.checkpoint_dir or "none", *(["--resume"] if self.resume else [])]
            env = os.environ | {"NARROWS_EMBEDDED": "1"}
            self.embedded = subprocess.Popen(words, stdin=subprocess.PIPE, env=env, start_new_session=True)
            deadline = time.monotonic() + SERVER_START_S
            while not ready.exists() and not self.signals:
                if self.embedded.poll() is not None:
                    return self.embedded.returncode or 1
                if time.monotonic() > deadline:
                    raise UnreachableError(f"the embedded server did not start within {SERVER_START_S:.0f} s")
                time.sleep(0.02)
            if not self.signals:
                self.server = json.loads(ready.read_text())["address"]
        threading.Thread(target=self._wait_server, args=(self.embedded,), daemon=True).start()
        return 0

    def _environment(self, index: int) -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 1) // self.nproc))
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
        # A launcher above us (torchrun, Slurm, Ray) numbers its tasks, of which each is one ps-worker. Without one the
        # session sets what only the server knows.
        rank, local_rank, world_size = (_above(name, default) for name, default in RANKS.items())
        return (
            ALLOCATOR
            | dict.fromkeys(names, threads)
            | os.environ
            | {
                "RANK": str(rank * self.nproc + index),
                "LOCAL_RANK": str(local_rank * self.nproc + index),
                "WORLD_SIZE": str(world_size * self.nproc),
                "NARROWS_SERVER": self.server,
                "NARROWS_EXPECT": pack(self.flags).hex() if self.flags else "",
                "NARROWS_CONNECT_TIMEOUT": str(self.connect_timeout),
                "NARROWS_SERVER_TIMEOUT": str(self.server_timeout),
                "NARROWS_DEVICE": self.device,
                "NARROWS_SETS": " ".join(name for name in ("RANK", "WORLD_SIZE") if name not in os.environ),
                "PYTHONUNBUFFERED": "1",
            }
        )

    def _spawn(self, index: int, parent_fd: int) -> None:
        token = uuid.uuid4().hex
        read_fd, write_fd = os.pipe()
        told = {"NARROWS_TOKEN": token, "NARROWS_RECORD_FD": str(write_fd), "NARROWS_PARENT_FD": str(parent_fd)}
        child = subprocess.Popen(
            [sys.executable, *self.command],
            env=self._environment(index) | told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write_fd, parent_fd),
            start_new_session=True,
        )
        os.close(write_fd)
        self.children.append(child)
        self.tokens.append(token)
        pipes = (("out", child.stdout), ("err", child.stderr), ("event", os.fdopen(read_fd, "rb")))
        readers = [threading.Thread(target=self._read, args=(index, *pipe), daemon=True) for pipe in pipes]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait_child, args=(index, child, readers), daemon=True).start()

    # Threads that wait for others, and put what they see in the queue.

    def _read(self, index: int, kind: str, stream: Any) -> None:
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            if kind != "event":
                self.events.put((index, kind, text))
                continue
            with contextlib.suppress(ValueError):  # the last line of a worker that was killed while it wrote it
                self.events.put((index, kind, json.loads(text)))

    def _wait_child(self, index: int, child: subprocess.Popen[bytes], readers: list[threading.Thread]) -> None:
        code = child.wait()
        for reader in readers:
            reader.join(PIPES_END_S)
        self.events.put((index, "exit", code))

    def _wait_server(self, server: subprocess.Popen[bytes]) -> None:
        self.events.put((SERVER, "server", server.wait()))

    # The run.

    def _watch(self) -> int:
        stop_by = float("inf")
        while len(self.codes) < self.nproc and len(self.signals) < 2 and time.monotonic() < stop_by:
            if self.signals and stop_by == float("inf"):
                stop_by = time.monotonic() + CHILD_END_S
                for child in self.children:
                    if child.poll() is None:
                        child.send_signal(signal.SIGINT)
            try:
                index, kind, value = self.events.get(timeout=0.2)
            except queue.Empty:
                continue
            if kind == "out":
                self.console.out(value)
            elif kind == "err":
                self.console.err(value if self.nproc == 1 else f"worker {index}: {value}")
            elif kind == "event" and value["event"] == "error":
                self._failed(index, value["code"], value["text"])
                if self.embedded is not None and value["code"] in FATAL and not self.recording.steps:
                    break  # the run cannot start without this worker
            elif kind == "event":
                if value["event"] == "compress":
                    self.console.say(SWITCHED.format(index, **value))
                self.recording.take(index, value)
            elif kind == "exit":
                self._exited(index, value)
            elif value and not self.signals:
                text = f"the embedded server ended with exit code {value}; what it said is above"
                self._failed(SERVER, ServerLostError.exit_code, text)
                break
            if self.recording.steps:
                self.console.progress(self.recording.progress())
        return self._summary()

    def _failed(self, index: int, code: int, text: str) -> None:
        """A session ended with an error of ours; what all workers tell is said once."""
        if (code, text) not in self.errors.values():
            self.console.say(text)
        self.errors[index] = (code, text)

    def _exited(self, index: int, code: int) -> None:
        self.codes[index] = code
        self.recording.ended(index, code)
        if not code:
            return
        if not self.signals and index not in self.errors:
            how = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
            others = "; the others go on" if len(self.codes) < self.nproc else ""
            self.console.say(f"worker {index} {how}{others}")
        thread = threading.Thread(target=self._tell_left, args=(self.tokens[index],), daemon=True)
        thread.start()
        self.telling.append(thread)

    def _tell_left(self, token: str) -> None:
        """Tell the coordinator that a child died, so that nobody waits for its lease."""
        from narrows.worker.runner import tell_left

        tell_left(self.server, token)

    def _summary(self) -> int:
        for index, child in enumerate(self.children):
            if index not in self.codes:
                self._kill(child)
                self.codes[index] = child.wait()
                self.recording.ended(index, self.codes[index])
        codes = [self.codes[index] for index in range(self.nproc)]
        done = self.recording.done(codes)
        self.console.close()
        self.console.err(done)
        ours = [code for code, _ in self.errors.values()]
        return ours[0] if ours else int(any(codes))

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        """The child and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)

    def _end(self) -> None:
        self.console.close()
        self.recording.close()
        for child in self.children:
            if child.poll() != 0:  # one that ended well may leave behind what it likes
                self._kill(child)
            child.wait()
        if self.embedded is None:
            for thread in self.telling:
                thread.join(TELL_S)
            return
        assert self.embedded.stdin is not None
        self.embedded.stdin.close()  # checkpoint and end, if it has not already
        deadline = time.monotonic() + (CHILD_END_S if self.signals else SERVER_END_S)
        while self.embedded.poll() is None and time.monotonic() < deadline and len(self.signals) < 2:
            time.sleep(0.02)
        if self.embedded.poll() is None:
            self.embedded.kill()  # its shards end with it
            self.embedded.wait()


def _above(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.isdigit():
        raise UsageError(f"the variable {name} is {value!r}, which is no number: unset it")
    return int(value)


def signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    main()
