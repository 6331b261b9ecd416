"""The launcher of ps-worker: starts N copies of a script, and an embedded server if no server is named.

It owns the child processes. docs/exit-codes.md lists the exit codes.

How it works

    ps-worker (Launcher) ── ChildProcesses ──> fork server ──> worker 0 .. N-1   stdout, stderr, events
                                         └───> embedded ps-serve                 events; its shards are its children

1. `_prepare` starts a fork server that imports what the children need, and embeds a ps-serve if there is no --server.
   It returns once both are ready.
2. `_spawn` starts the processes of each group. Without --group each worker is a group of one process.
3. `_watch` takes the events of all children until each worker has ended. Lines go to the console, figures to the
   record.
4. If a worker fails, `_exited` sends the coordinator a message about its death, and kills the rest of its group. The
   group is started again while it has restarts left.
5. A signal is passed on to the workers; after CHILD_END_S, or a second signal, they are killed.
6. `_end` closes the stdin of the embedded server, which then writes a checkpoint, and waits for its end.

Rules
- No child outlives ps-worker, however ps-worker ends: the embedded server ends with its stdin, a worker with the pipe
  of NARROWS_PARENT_FD.
- A worker that ended without error may leave processes of its own running.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from narrows.protocols.addresses import is_stored
from narrows.protocols.errors import (
    AuthenticationError,
    IncompatibleError,
    NotSavedError,
    ServerLostError,
    UnreachableError,
    UsageError,
)
from narrows.protocols.runtime.cli import flags
from narrows.protocols.runtime.cli.flags import ALLOCATOR
from narrows.protocols.runtime.processes import signals
from narrows.protocols.runtime.processes.children import ChildProcesses, StartedChild, signal_name
from narrows.protocols.runtime.processes.scratch import ScratchFolder
from narrows.protocols.runtime.storage.object_store import put_limit_s
from narrows.worker.command import script_variables
from narrows.worker.command.console import Console
from narrows.worker.command.options import WorkerOptions
from narrows.worker.command.record import WorkerRecord
from narrows.worker.runtime.config import VARIABLES, WorkerConfig

SERVER_START_S = 150.0  # how long the embedded server and the fork server may take to start
CHILD_END_S = 15.0  # how long children may take to end after a signal
SERVER_END_S = 60.0  # how long the embedded server may take to end without one
STATE_BYTES = 20  # at most, of a parameter in the last checkpoint and the model that go to an address
TELL_S = 5.0  # how long the messages about dead workers may take
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
# The imports of the fork server, in order, each with a line for the console. A server needs the first row alone, unless
# it steps the script's optimizer: then it starts while torch is imported.
NEEDS = (
    [("loading kernels ...", "narrows.compression:warm_up")],
    [("importing torch ...", "torch"), ("", "narrows.worker.session:warm_up"), ("", "narrows.worker.optimizer")],
)
SERVER = -1  # in place of a worker's index
WORLD = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
SWITCHED = "local rank {} codes with {to}, not {from}, from clock {clock} on: {reason}"
FATAL = (AuthenticationError.exit_code, IncompatibleError.exit_code)


def _cores(sharing: int) -> int:
    """Return the number of cores for this ps-worker, if `sharing` ps-workers share the machine.

    If the manager binds each ps-worker to cores, the bound cores count as they are.
    """
    whole = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else whole
    return min(bound, whole // sharing)


@dataclass
class LaunchedGroup:
    """The processes of one worker of the run. They start and end together."""

    members: range  # the numbers of the processes
    lives: int  # restarts that are left; -1: the worker has ended for good
    token: str = ""  # names this start of the worker to the coordinator
    port: int = 0  # the port of torch.distributed's rendezvous, with --group


class Launcher:
    """One ps-worker: its children and their events."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.server = options.server  # its address, once it is known
        self.children = ChildProcesses()
        self.embedded: StartedChild | None = None
        self.workers: dict[int, StartedChild] = {}
        count, lives = options.nproc, options.restarts
        self.groups = (
            [LaunchedGroup(range(count), lives)]
            if options.group
            else [LaunchedGroup(range(i, i + 1), lives) for i in range(count)]
        )
        self.codes: dict[int, int] = {}  # exit codes of children that have ended
        self.felled: set[int] = set()  # children that were killed because another process of their group had failed
        self.errors: dict[int, tuple[int, str]] = {}  # exit code and sentence of each NarrowsError of a child
        self.joined: set[int] = set()  # workers that have joined the run
        self.needs = [] if options.fresh else [*NEEDS]  # rows of NEEDS that the fork server has not imported yet
        self.broken = False  # the run cannot go on
        self.telling: list[threading.Thread] = []  # threads of `_tell_left`
        self.signals: list[int] = []  # signals that arrived, oldest first
        self.console = Console()
        self.scratch: ScratchFolder | None = None  # a folder that all workers of this ps-worker share
        self.recording = WorkerRecord(options.record, self.console.say)

    def run(self) -> int:
        signals.hear(self.signals, os.environ.pop("NARROWS_EMBEDDED", "") == "1")
        # Slurm sends SIGUSR1 as a warning. Scripts inherit that it is ignored, and may handle it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if self.options.place.manager:
            self.console.say(str(self.options.place))
        parent_fd, our_fd = os.pipe()  # it closes when ps-worker ends, however that happens, and ends the workers
        try:
            code = self._prepare()
            if not code and not self.signals:
                self.console.doing(f"starting {self._workers} ...")
                self.parent_fd = parent_fd
                if self.options.nproc > 1 and not self.options.place.local_rank:
                    with suppress(UsageError):  # no disk: the workers then do without a common folder
                        self.scratch = ScratchFolder()
                for group in self.groups:
                    self._spawn(group)
                code = self._watch()
        finally:
            self._end()
            if self.scratch is not None:
                self.scratch.close()
            os.close(parent_fd)
            os.close(our_fd)
        if self.signals:
            return 128 + self.signals[0]
        return (
            code or self.errors.get(SERVER, (0, ""))[0]
        )  # an embedded server writes the model after the workers have ended, and may fail then

    # Starting.

    def _prepare(self) -> int:
        """Start the server and the fork server, and wait until both are ready.

        Returns:
            0, or the exit code of a server that has ended; the console has its error.

        Raises:
            UnreachableError: one of them did not start within SERVER_START_S.
        """
        if self.needs:
            self.children.prepare(self._environment(), self.needs[0])
        else:
            self._go_on()
        deadline = time.monotonic() + SERVER_START_S
        while (self.needs or not self.server) and not self.signals:
            self._take(0.1)
            if SERVER in self.codes:
                return self.codes[SERVER] or 1
            if time.monotonic() > deadline:
                what = "the process that forks workers" if self.needs else "the embedded server"
                raise UnreachableError(f"{what} did not start within {SERVER_START_S:.0f} s")
        return 0

    def _go_on(self) -> None:
        """Embed a server as soon as its imports are done, and have the fork server import the next row."""
        if not self.server and len(self.needs) <= (not self.options.server_steps) and self.embedded is None:
            self._embed()
        if self.needs:
            self.children.need(self.needs[0])

    def _embed(self) -> None:
        self.console.doing("starting the server ...")
        words = ["-m", "narrows.ps.command.cli", "--bind", "tcp://127.0.0.1:0", "--record", ""]
        words += flags.words(self.options.run)
        words += ["--checkpoint-dir", self.options.checkpoint_dir or "none", *["--resume"] * self.options.resume]
        words += [f"--run-id={self.options.run_id}", f"--steps={self.options.steps}"]
        words += ["--fresh-run"] * self.options.fresh_run
        words += [f"--trace={self.options.trace}"]
        # An empty value is given too: else ps-serve would read the variable of the environment, meant for ps-worker.
        words += ["--dashboard=" + self.options.dashboard, "--metrics=" + self.options.metrics]
        env = os.environ | {"NARROWS_EMBEDDED": "1", "PYTHONSAFEPATH": "1"}
        self.embedded = self.children.start(
            SERVER, words, env, listens={1: "event", 2: "err"}, stdin=True, name="ps-serve", nests=True
        )

    @property
    def _workers(self) -> str:
        if self.options.group:
            return f"one worker of {self.options.nproc} processes"
        return f"{self.options.nproc} worker{'s' if self.options.nproc > 1 else ''}"

    def _environment(self) -> dict[str, str]:
        """Return the part of the environment that all workers share. Variables of the user win."""
        threads = _cores(self.options.place.local_size) // self.options.nproc
        own = dict.fromkeys(THREADS, str(max(1, threads)))
        if script_variables.terminal():
            own["PYTHONBREAKPOINT"] = "narrows.worker.command.script_variables.enter_debugger"
        return ALLOCATOR | own | os.environ | {"PYTHONUNBUFFERED": "1"}

    def _config(self, index: int, device: str) -> WorkerConfig:
        """Return what one process is told; `device` is where it computes."""
        config = self.options.config(index)
        return replace(
            config,
            server=config.server or self.server,
            token=self._group(index).token,
            machine_dir=self.scratch.path if self.scratch is not None else "",
            device=device,
            tty=script_variables.terminal(),
        )

    def _own_environment(self, index: int) -> dict[str, str]:
        """Return the whole environment of one process."""
        options, there = self.options, script_variables.gpus(os.environ)
        device, seen = script_variables.device(
            options.device, index, options.nproc, options.group, there, options.place
        )
        env = self._config(index, device).into(script_variables.without_ranks(self._environment()))
        return env | seen | (self._in_group(index) if options.group else options.ranks(index))

    def _in_group(self, index: int) -> dict[str, str]:
        """Return the variables of torch.distributed for one process of the group, as torchrun sets them."""
        count, port = str(self.options.nproc), str(self._group(index).port)
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return meeting | dict.fromkeys(("RANK", "LOCAL_RANK"), str(index)) | dict.fromkeys(WORLD, count)

    def _group(self, index: int) -> LaunchedGroup:
        """Return the group of this process."""
        return self.groups[0 if self.options.group else index]

    def _spawn(self, group: LaunchedGroup) -> None:
        """Start a worker, or start it again."""
        group.token = uuid.uuid4().hex
        if self.options.group:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                group.port = free.getsockname()[1]
        for index in group.members:
            listens: dict[int | str, str] = {1: "out", 2: "err", VARIABLES["record_fd"].name: "event"}
            passed, name = {VARIABLES["parent_fd"].name: self.parent_fd}, f"ps-worker-{index}"
            words, environment = self.options.words_of(index), self._own_environment(index)
            self.codes.pop(index, None)
            self.errors.pop(index, None)
            self.felled.discard(index)
            self.workers[index] = self.children.start(
                *(index, words, environment), listens=listens, passed=passed, name=name
            )

    # The run.

    def _watch(self) -> int:
        stop_by = float("inf")
        while self._running and len(self.signals) < 2 and time.monotonic() < stop_by:
            if self.signals and stop_by == float("inf"):
                stop_by = time.monotonic() + CHILD_END_S
                for worker in self.workers.values():
                    worker.pass_on(self.signals[0])
            self._take(0.2)
            if self.broken:
                break
            if self.recording.steps:
                self.console.progress(self.recording.progress())
        return self._summary()

    @property
    def _running(self) -> bool:
        """True while a worker has not ended."""
        return len(self.codes.keys() - {SERVER}) < self.options.nproc

    def _take(self, timeout_s: float) -> None:
        match self.children.next(timeout_s):
            case (_, "ready", {"why": why}):
                self.needs = [] if why else self.needs[1:]
                if why:
                    self.console.say(f"each worker starts in an interpreter of its own: {why}")
                self._go_on()
            case (_, "serves", {"address": address}):
                self.server = address
            case (_, "say", said):
                self.console.doing(said["text"], "quiet" in said)
            case (_, "noted", {"what": what, "values": values}):
                self.recording.note("server", what=what, **values)
            case (index, "out" | "err" as kind, line):
                of = f"local rank {index}: " if index >= 0 and self.options.nproc > 1 else ""
                self.console.out(line, of) if kind == "out" else self.console.err(of + line)
            case (index, "error", {"code": code, "text": text}):
                self._failed(index, code, text)
                # An embedded server's run cannot start without this worker.
                self.broken |= self.embedded is not None and code in FATAL and not self.recording.steps
            case (index, "exit", code):
                self._exited(index, code)
            case (index, kind, event):
                self._recorded(index, kind, event)

    def _recorded(self, index: int, kind: str, event: dict[str, Any]) -> None:
        if kind == "hello":
            self.joined.add(index)
            if len(self.joined) in (1, self.options.nproc):
                self.console.doing(f"{len(self.joined)} of {self._workers.removeprefix('one worker of ')} joined ...")
        elif kind == "compress":
            self.console.say(SWITCHED.format(index, **event))
        self.recording.take(index, event)

    def _failed(self, index: int, code: int, text: str) -> None:
        """Note that a NarrowsError ended a child's session. A sentence that several workers send is printed once."""
        if (code, text) not in self.errors.values():
            self.console.say(text)
        self.errors[index] = (code, text)

    def _exited(self, index: int, code: int) -> None:
        """Take the exit of a child: report it, end its group, and start the group again if it has restarts left."""
        if index in self.codes:
            return  # `_summary` has killed the worker, and has its code
        self.codes[index] = code
        if index == SERVER:
            if code == NotSavedError.exit_code:
                self.errors[SERVER] = (code, "")  # the server has printed what is missing
            elif code and self.server and not self.signals:
                text = f"the embedded server ended with exit code {code}; its message is above"
                self._failed(SERVER, ServerLostError.exit_code, text)
                self.broken = True
            return
        self.recording.ended(index, code)
        if not code:
            return
        group = self._group(index)
        if index not in self.felled:  # else another process of its group has failed, and was handled
            self.telling.append(threading.Thread(target=self._tell_left, args=(index, group.token), daemon=True))
            self.telling[-1].start()
            fatal = self.errors.get(index, (1, ""))[0] != 1  # a restarted worker would fail in the same way
            group.lives -= 1 if group.lives and not fatal and not self.signals else group.lives + 1
            self._say_ended(index, code, group)
            for other in set(group.members) - self.codes.keys():
                self.felled.add(other)
                self.workers[other].kill()
        if self.codes.keys() >= set(group.members) and group.lives >= 0 and not self.signals:
            self._spawn(group)

    def _say_ended(self, index: int, code: int, group: LaunchedGroup) -> None:
        if self.signals:
            return
        how = f"was ended by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        sentence = f"{'process' if self.options.group else 'local rank'} {index} {how}"
        if group.lives >= 0:
            what = "its group is" if self.options.group else "it is"
            sentence += f"; {what} started again ({self.options.restarts - group.lives} of {self.options.restarts})"
        elif index in self.errors:
            return  # the worker's error has been printed
        elif self.options.group:
            sentence += "; its group ends"
        elif self._running:
            stages = {part.stage for part in self.options.parts}
            sentence += "; its pipeline ends" if len(stages) > 1 else "; the others go on"
        self.console.say(sentence)

    def _tell_left(self, index: int, token: str) -> None:
        """Tell the coordinator that a child died, so that no worker waits for its lease to expire."""
        from narrows.protocols.runtime.network.key_files import member_key
        from narrows.worker.runtime.member_link import tell_left

        server = self.options.parts[index].server if self.options.parts else self.server
        tell_left(server, token, member_key(self.options.key, "--key") if self.options.key else None)

    # The end.

    def _summary(self) -> int:
        for index, worker in self.workers.items():
            if index not in self.codes:
                worker.kill()
                self.codes[index] = worker.wait() or 0
                self.recording.ended(index, self.codes[index])
        codes = [next((self.codes[i] for i in group.members if self.codes[i]), 0) for group in self.groups]
        if not any(codes) and not self.recording.parameters:
            self.console.say(
                "no copy of the script made a DistributedOptimizer: each ran alone, and nothing was shared"
            )
        done = self.recording.done(codes)
        self.console.close()
        self.console.err(done)
        ours = [code for code, _ in self.errors.values()]
        return ours[0] if ours else int(any(codes))

    def _end(self) -> None:
        for worker in self.workers.values():
            if worker.code != 0:
                worker.kill()
            worker.wait()
        for thread in self.telling if self.embedded is None else ():
            thread.join(TELL_S)
        if self.embedded is not None:
            self.embedded.close_stdin()  # the server writes a checkpoint and ends, if it has not already
            deadline = time.monotonic() + (CHILD_END_S if self.signals else SERVER_END_S)
            if is_stored(self.options.checkpoint_dir):
                deadline += put_limit_s(STATE_BYTES * self.recording.parameters)
            while SERVER not in self.codes and time.monotonic() < deadline and len(self.signals) < 2:
                self._take(0.1)
            if self.embedded.code is None:
                self.embedded.kill()  # its shards end with it
                self.embedded.wait()
        self.children.close()
        self.recording.close()
        self.console.close()
