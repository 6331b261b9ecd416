"""What ps-worker does: it launches N copies of a script against a server, its own embedded one when none is named.

It owns the child processes. Exit codes: docs/architecture.md. Rules
- Nothing outlives us, however we end: the embedded server ends with its stdin, a worker with NARROWS_PARENT_FD.
- A child that ended well may leave behind what it likes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrows.protocols.addresses import parse_address
from narrows.protocols.errors import (
    AuthenticationError,
    IncompatibleError,
    ServerLostError,
    UnreachableError,
    UsageError,
)
from narrows.protocols.modes import MODES, Settings
from narrows.protocols.runtime.children import Child, Children, signal_name
from narrows.protocols.runtime.flags import ALLOCATOR, given
from narrows.protocols.wire import pack
from narrows.worker.command.console import Console
from narrows.worker.command.recording import Recording

SERVER_START_S = 150.0
CHILD_END_S = 15.0  # after Ctrl-C
SERVER_END_S = 60.0
TELL_S = 5.0
RANKS = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
SERVER = -1  # in place of a worker's index
SWITCHED = "worker {} codes with {to}, not {from}, from clock {clock} on: {reason}"
FATAL = (AuthenticationError.exit_code, IncompatibleError.exit_code)


@dataclass(frozen=True)
class Options:
    """The flags of one ps-worker, checked. `words`: what follows `python`. `run`: those of the run that were given."""

    server: str
    nproc: int
    device: str
    record: str
    connect_timeout: float
    server_timeout: float
    checkpoint_dir: str
    resume: bool
    words: list[str]
    run: dict[str, Any]


def checked(command: tuple[str, ...], module: bool, **flags: Any) -> Options:
    """Raises UsageError, one sentence that names the flag."""
    run = given(flags)
    options = Options(
        words=["-m", *command] if module else [*command],
        run=run,
        **{name: value for name, value in flags.items() if name in Options.__annotations__},
    )
    if options.nproc < 1:
        raise UsageError(f"-n {options.nproc}: give at least 1")
    for name in ("connect_timeout", "server_timeout"):
        if not 0 < getattr(options, name) < 1e6:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} {getattr(options, name):g}: give a positive number of seconds")
    if options.device.split(":")[0] not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device {options.device}: auto, cpu or cuda[:i]")
    if not command:
        raise UsageError("name the script to run: ps-worker [flags] SCRIPT.py ARGS...")
    if not module and not Path(command[0]).is_file():
        raise UsageError(f"{command[0]}: there is no such script")
    for name, default in RANKS.items():
        _above(name, default)
    if options.server:
        parse_address("--server", options.server)
        if run.get("sync", "ssp") not in MODES:
            Settings(sync=run["sync"]).validated()
        if options.checkpoint_dir or options.resume:
            name = "--resume" if options.resume else "--checkpoint-dir"
            raise UsageError(f"{name} is for the embedded server: give it to the ps-serve at {options.server}")
        return options
    settings = Settings(**{"workers": options.nproc} | run).validated()
    if settings.workers > options.nproc:
        raise UsageError(
            f"--workers {settings.workers}: the embedded server has the -n {options.nproc} of this command alone; for more "
            "start ps-serve and name it with --server"
        )
    run["workers"] = settings.workers
    return options


def _above(name: str, default: int) -> int:
    value = os.environ.get(name) or str(default)
    if not value.isdigit():
        raise UsageError(f"the variable {name} is {value!r}, which is no number: unset it")
    return int(value)


class Launcher:
    """One ps-worker: its children, and what they tell."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.server = options.server  # its address, once it is known
        self.children = Children()
        self.embedded: Child | None = None
        self.workers: list[Child] = []
        self.tokens: list[str] = []
        self.codes: dict[int, int] = {}  # of children that have ended
        self.errors: dict[int, tuple[int, str]] = {}  # of ours, that ended a worker: exit code, sentence
        self.broken = False  # the run cannot go on
        self.telling: list[threading.Thread] = []
        self.signals: list[int] = []
        self.recording = Recording(options.record)
        self.console = Console()

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: self.signals.append(number))
        parent_fd, our_fd = os.pipe()  # its end tells the workers that we ended, however that was
        try:
            code = 0 if self.server else self._embed()
            if not code and not self.signals:
                for index in range(self.options.nproc):
                    self._spawn(index, parent_fd)
                code = self._watch()
            return 128 + self.signals[0] if self.signals else code
        finally:
            self._end()
            os.close(parent_fd)
            os.close(our_fd)

    # Starting.

    def _embed(self) -> int:
        """Start the embedded server; returns its exit code if it has already ended, with its message on the console."""
        words = ["-m", "narrows.ps.command.cli", "--bind", "tcp://127.0.0.1:0"]
        for name, value in self.options.run.items():
            words += ["--" + name.replace("_", "-"), str(value)]
        words += ["--checkpoint-dir", self.options.checkpoint_dir or "none", *["--resume"] * self.options.resume]
        env = os.environ | {"NARROWS_EMBEDDED": "1"}
        self.embedded = self.children.start(SERVER, words, env, listens={1: "event", 2: "err"}, stdin=True)
        deadline = time.monotonic() + SERVER_START_S
        while not self.server and not self.signals:
            self._take(0.1)
            if SERVER in self.codes:
                return self.codes[SERVER] or 1
            if time.monotonic() > deadline:
                raise UnreachableError(f"the embedded server did not start within {SERVER_START_S:.0f} s")
        return 0

    def _environment(self, index: int) -> dict[str, str]:
        options, threads = self.options, str(max(1, (os.cpu_count() or 1) // self.options.nproc))
        # A launcher above us (torchrun, Slurm, Ray) numbers its tasks, of which each is one ps-worker. Without one the
        # session sets what only the server knows.
        rank, local_rank, world_size = (_above(name, default) for name, default in RANKS.items())
        return (
            ALLOCATOR
            | dict.fromkeys(THREADS, threads)
            | os.environ
            | {
                "RANK": str(rank * options.nproc + index),
                "LOCAL_RANK": str(local_rank * options.nproc + index),
                "WORLD_SIZE": str(world_size * options.nproc),
                "NARROWS_SERVER": self.server,
                "NARROWS_EXPECT": pack(options.run).hex() if options.run else "",
                "NARROWS_CONNECT_TIMEOUT": str(options.connect_timeout),
                "NARROWS_SERVER_TIMEOUT": str(options.server_timeout),
                "NARROWS_DEVICE": options.device,
                "NARROWS_SETS": " ".join(name for name in ("RANK", "WORLD_SIZE") if name not in os.environ),
                "PYTHONUNBUFFERED": "1",
            }
        )

    def _spawn(self, index: int, parent_fd: int) -> None:
        self.tokens.append(uuid.uuid4().hex)
        env = self._environment(index) | {"NARROWS_TOKEN": self.tokens[index]}
        listens: dict[int | str, str] = {1: "out", 2: "err", "NARROWS_RECORD_FD": "event"}
        passed = {"NARROWS_PARENT_FD": parent_fd}
        self.workers.append(self.children.start(index, self.options.words, env, listens=listens, passed=passed))

    # The run.

    def _watch(self) -> int:
        stop_by = float("inf")
        while self._running and len(self.signals) < 2 and time.monotonic() < stop_by:
            if self.signals and stop_by == float("inf"):
                stop_by = time.monotonic() + CHILD_END_S
                for worker in self.workers:
                    worker.signal(signal.SIGINT)
            self._take(0.2)
            if self.broken:
                break
            if self.recording.steps:
                self.console.progress(self.recording.progress())
        return self._summary()

    @property
    def _running(self) -> bool:
        """Some worker has not ended."""
        return len(self.codes.keys() - {SERVER}) < self.options.nproc

    def _take(self, timeout_s: float) -> None:
        """Handle the next event, if one comes in time."""
        event = self.children.next(timeout_s)
        if event is not None:
            index, kind, value = event
            TAKEN[kind](self, index, value)

    def _out(self, index: int, line: str) -> None:
        self.console.out(line)

    def _err(self, index: int, line: str) -> None:
        self.console.err(line if index == SERVER or self.options.nproc == 1 else f"worker {index}: {line}")

    def _event(self, index: int, event: dict[str, Any]) -> None:
        if index == SERVER:
            self.server = event["address"]
        elif event["event"] == "error":
            self._failed(index, event["code"], event["text"])
            # An embedded server's run cannot start without this worker.
            self.broken |= self.embedded is not None and event["code"] in FATAL and not self.recording.steps
        else:
            if event["event"] == "compress":
                self.console.say(SWITCHED.format(index, **event))
            self.recording.take(index, event)

    def _failed(self, index: int, code: int, text: str) -> None:
        """A session ended with an error of ours; what all workers tell is said once."""
        if (code, text) not in self.errors.values():
            self.console.say(text)
        self.errors[index] = (code, text)

    def _exited(self, index: int, code: int) -> None:
        if index in self.codes:
            return  # it was killed, and waited for
        self.codes[index] = code
        if index == SERVER:
            if code and self.server and not self.signals:
                text = f"the embedded server ended with exit code {code}; what it said is above"
                self._failed(SERVER, ServerLostError.exit_code, text)
                self.broken = True
            return
        self.recording.ended(index, code)
        if not code:
            return
        if not self.signals and index not in self.errors:
            how = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
            others = "; the others go on" if self._running else ""
            self.console.say(f"worker {index} {how}{others}")
        thread = threading.Thread(target=self._tell_left, args=(self.tokens[index],), daemon=True)
        thread.start()
        self.telling.append(thread)

    def _tell_left(self, token: str) -> None:
        """Tell the coordinator that a child died, so that nobody waits for its lease."""
        from narrows.worker.runner import tell_left

        tell_left(self.server, token)

    # The end.

    def _summary(self) -> int:
        for index, worker in enumerate(self.workers):
            if index not in self.codes:
                worker.kill()
                self.codes[index] = worker.wait() or 0
                self.recording.ended(index, self.codes[index])
        codes = [self.codes[index] for index in range(self.options.nproc)]
        done = self.recording.done(codes)
        self.console.close()
        self.console.err(done)
        ours = [code for code, _ in self.errors.values()]
        return ours[0] if ours else int(any(codes))

    def _end(self) -> None:
        for worker in self.workers:
            if worker.code != 0:
                worker.kill()
            worker.wait()
        for thread in self.telling if self.embedded is None else ():
            thread.join(TELL_S)
        if self.embedded is not None:
            self.embedded.close_stdin()  # it writes a checkpoint and ends, if it has not already
            deadline = time.monotonic() + (CHILD_END_S if self.signals else SERVER_END_S)
            while SERVER not in self.codes and time.monotonic() < deadline and len(self.signals) < 2:
                self._take(0.1)
            if self.embedded.code is None:
                self.embedded.kill()  # its shards end with it
                self.embedded.wait()
        self.recording.close()
        self.console.close()


TAKEN: dict[str, Callable[[Launcher, int, Any], None]] = {
    "out": Launcher._out,
    "err": Launcher._err,
    "event": Launcher._event,
    "exit": Launcher._exited,
}
