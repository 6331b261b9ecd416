"""The supervisor of one ps-serve: it starts the shard processes, restarts a dead one, and ends them.

The supervisor owns the processes; each process owns its shard.

How it works

1. `prepare` starts the fork server, which imports once what all shards need.
2. `start` starts shard 0 and waits for its port, then the other shards, which dial shard 0.

       ps-serve --- ServerConfig, a line on stdin -----> shard process
                <-- events as lines of JSON on stdout ------

3. `watch` takes one event after the other. "log" events go to the console, the dashboard and the record; "alive" moves
   the time by which the next sign of life must arrive. A shard whose sign of life is late is killed.
4. The event "exit" means that a process has ended. `RestartPolicy` says whether the shard starts again, from its
   journal or from a checkpoint. A restarted shard binds the port of its predecessor, so members find it at the same
   address.
5. On a signal `watch` sends "stop" to shard 0. Shard 0 writes a checkpoint and ends the run; the other shards follow
   it. A standby sends "stop" to each of its shards. After `end_s` seconds, or at a second signal, shards are killed.
6. `merge` writes the whole model of the last checkpoint; `kill` ends what is left.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrows.protocols.addresses import ANY_HOSTS, shard_address
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import LocalProtocolError, NarrowsError, NotSavedError, UsageError
from narrows.protocols.pipeline_channels import ON
from narrows.protocols.runtime.cli.flags import ALLOCATOR
from narrows.protocols.runtime.cli.output import STDERR, write_ready
from narrows.protocols.runtime.processes import signals
from narrows.protocols.runtime.processes.children import ChildProcesses, Event, StartedChild, signal_name
from narrows.ps.command.console import EMBEDDED, doing, say, show
from narrows.ps.command.one_port import RELAY, OnePort
from narrows.ps.command.reshard import ReshardRequest
from narrows.ps.command.restart_policy import Restart, RestartPolicy
from narrows.ps.dashboard.run_watch import RunWatch
from narrows.ps.process.config import JOURNAL, ServerConfig

LOOPBACK = "127.0.0.1"
ALONE_S = 5.0  # a standby that is started together with its server copies it within this time
NOBODY = "no standby yet: start ps-serve --standby {} on another machine"


class StandbyNotice:
    """The supervisor's knowledge of its server's standby."""

    def __init__(self) -> None:
        self.by = False  # the standby has a whole copy of this server
        self.deadline_s = math.inf  # when to print the notice, seconds of time.monotonic

    def expect(self) -> None:
        """Start the time within which a standby must have come."""
        self.deadline_s = time.monotonic() + ALONE_S

    def copied(self, whole: bool) -> None:
        """Note whether the standby has a whole copy of this server."""
        self.by = whole

    def missing(self, address: str) -> str:
        """Return the notice, once, if no standby has come in time; else ""."""
        if time.monotonic() < self.deadline_s:
            return ""
        self.deadline_s = math.inf
        return "" if self.by else NOBODY.format(address)


START_S = 120.0  # all shards must have bound within this; a cold machine compiles kernels first
ONE_STOPPED = "the model of a worker that was stopped"
PORT_END_S = 1.0  # limit of waiting for the last events of the process at the one port
END_S = 40.0  # seconds from "stop" to the kill of a shard; longer where a shard has said that one event takes longer
LIFE_EPOCHS = 1 << 32  # more epochs than one process of shard 0 counts
NEEDS = [("loading kernels ...", "narrows.compression:warm_up"), ("", "narrows.ps.process.runner")]
OPTIMIZERS = [("importing torch ...", "narrows.ps.store.torch_optimizer:warm_up")]  # where gradients are pushed


def environment(hash_seed: str) -> dict[str, str]:
    """Return the environment of a shard: one thread, and no imports from the folder in which ps-serve was started."""
    ones = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "PYTHONSAFEPATH"), "1")
    return ALLOCATOR | os.environ | ones | {"PYTHONHASHSEED": hash_seed}


class ShardSupervisor:
    """The shard processes of one ps-serve, and what the supervisor knows of them."""

    def __init__(self, settings: Settings, journal: bool = True, ready_file: str = "") -> None:
        """A supervisor before its first process.

        Args:
            settings: the settings of the run.
            journal: shards keep journals.
            ready_file: the value of --ready-file, "" for none.
        """
        self.settings = settings
        self.host, self.port = "", 0
        self.one_port: OnePort | None = None  # before all shards; None: each has a port of its own
        self.address = ""  # printed for workers; "" until all shards have bound
        self.ready_file = ready_file
        self.run_watch = RunWatch()
        self.config = ServerConfig(
            0, settings, "", "", 0, "", False
        )  # what every shard is told; `start_shard` adds its own
        self.children = ChildProcesses()
        self.hash_seed = self.children.hash_seed  # the same for all processes of a shard: a replay takes sets in order
        self.standby_notice = StandbyNotice()
        self.follows: dict[int, str] = {}  # by shard of a standby, the address of the primary's shard that it copies
        self.ready = False  # the fork server can start shards
        self.shards: dict[int, StartedChild] = {}  # by shard, its present process
        self.stopping = False  # "stop" has been sent
        self.ports: dict[int, int] = {}  # by shard that has bound, its port
        self.done: set[int] = set()  # shards that have sent "done"
        self.ended: set[int] = set()  # shards whose process has ended and is not restarted
        self.restart_policy = RestartPolicy(settings.shards, journal)
        self.errors: list[tuple[int, int, str]] = []  # shard, exit code, sentence
        self.checkpoint = -1  # clock of the newest checkpoint, -1 for none
        self.disk: dict[int, str] = {}  # by shard, why its newest checkpoint could not be written
        self.run_id = ""  # --run-id
        self.end: dict[str, Any] = {}  # {"steps": n} once the workers have finished the run
        self.handed: dict[str, Any] = {}  # under gossip, whose model the newest checkpoint has
        self.signals: list[int] = []  # SIGINT and SIGTERM received
        self.asked: list[int] = []  # SIGUSR1 received: the user asks for all levels of the run
        self.reshard_request = ReshardRequest(self)

    def follow(self, standby: str, original: dict[str, Any]) -> None:
        """Make the shards copy the primary at the address `standby`.

        `original` is the primary's answer to its standby.
        """
        self.follows = {shard: shard_address(standby, port, shard) for shard, port in enumerate(original["ports"])}
        self.config = self.config.of_standby(original)

    def behind(self, one_port: OnePort) -> None:
        """Have the shards listen on loopback alone, behind this port."""
        self.one_port, self.host, self.port = one_port, LOOPBACK, 0
        self.config = replace(self.config, one_port=one_port.address)

    def _lead(self) -> None:
        """Tell the process of the one port where the shards and the page listen now."""
        if self.one_port is not None:
            self.one_port.lead(self.ports, self.run_watch.behind)

    @property
    def reached_at(self) -> tuple[str, int]:
        """The host and the port at which workers join, once shard 0 has bound."""
        return (self.one_port.host, self.one_port.port) if self.one_port is not None else (self.host, self.ports[0])

    def serve_at(self, address: str) -> None:
        """Note the address at which workers join: all shards have bound."""
        self.address = address

    def recut(self, shards: int) -> None:
        """Note the number of shards over which the keys are cut now."""
        self.settings = replace(self.settings, shards=shards)

    def listen(self) -> None:
        """Listen to signals, and to the end of stdin where a ps-worker embeds this server."""
        signals.hear(self.signals, EMBEDDED)
        signal.signal(signal.SIGUSR1, lambda number, frame: self.asked.append(number))

    def prepare(self) -> None:
        """Start the fork server, which begins to import what shards need."""
        steps = self.settings.begun().mode().rule is FoldRule.OPTIMIZER
        needs = NEEDS + OPTIMIZERS if steps else NEEDS
        self.children.prepare(environment(self.hash_seed), needs)

    def start(self) -> None:
        """Start all shards. Return once all have bound, or once a signal arrives.

        Shard 0 starts first, because the others dial it.
        """
        deadline = time.monotonic() + START_S
        self._until(lambda: self.ready, deadline)
        for indices in (range(1), range(1, self.settings.shards)):
            for index in indices if not self.signals else ():
                self.start_shard(index)
            self._until(lambda: len(self.ports) == indices.stop, deadline)  # noqa: B023 - called at once
        if not self.signals:
            self.open_port()

    def open_port(self) -> None:
        """Start the process of the one port, if there is one."""
        if self.one_port is not None:
            self.one_port.start(self.children, environment(self.hash_seed))

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        while not done() and not self.signals:
            self._take(min(0.1, deadline - time.monotonic()))
            for _, code, text in self.errors:
                raise (UsageError if code == UsageError.exit_code else NarrowsError)(text)
            if self.ended:
                raise NarrowsError(f"shard {min(self.ended)} ended while it started; its message is above")
            if time.monotonic() > deadline:
                raise NarrowsError(f"a shard process did not start within {START_S:.0f} s")

    def first_port(self, index: int) -> int:
        """Return the port of the shard's first process, 0 for a free one. Later processes bind the same port."""
        return self.port + index if self.port else 0

    def process_0(self, index: int) -> str:
        """Return the address of shard 0 for the shard `index`; "" for shard 0 itself."""
        here = "127.0.0.1" if self.host in ANY_HOSTS else self.host
        return f"tcp://{here}:{self.ports[0]}" if index else ""

    def start_shard(self, index: int, replay: bool = False) -> None:
        """Start a shard, or restart it on the port that it had.

        Args:
            index: the number of the shard.
            replay: the shard replays its journal; else a restarted shard resumes from a checkpoint.
        """
        shards = self.reshard_request.target if self.reshard_request.strange(index) else self.settings.shards
        # A shard that starts while workers train reads its keys from a checkpoint.
        again = self.restart_policy.restarts > 0 or (self.address > "" and not self.reshard_request.strange(index))
        config = replace(
            self.config,
            index=index,
            settings=replace(self.settings, shards=shards),
            bind=f"tcp://{self.host}:{self.ports.get(index, self.first_port(index))}",
            coordinator=self.process_0(index),
            away=(*self.reshard_request.away.items(),),
            resume=self.config.resume or again,
            again=again,
            replay=replay,
            done=(*sorted(self.done),),
            follows=self.follows.get(index, ""),
            watched=self.run_watch.watched,
        )
        words, name = ["-m", "narrows.ps.process.main"], f"ps-shard-{index}"
        try:
            if not replay:
                self.restart_policy.begin(index)
        except OSError as error:
            say(f"no journals are kept ({error.strerror}): a shard that dies goes back to a checkpoint", error=True)
        passed = dict(zip(JOURNAL, self.restart_policy.files.get(index, ()), strict=False))
        self.shards[index] = self.children.start(
            index, words, environment(self.hash_seed), listens={1: "event"}, stdin=True, passed=passed, name=name
        )
        self.shards[index].write(config.encode())
        self.restart_policy.starts(index, START_S)

    def _exited(self, index: int, code: int) -> None:
        """Restart a dead shard, if the run goes on and the policy allows it.

        A shard that failed by itself is not restarted under gossip, where the workers hold the model and go on alone,
        nor where a standby takes its place.
        """
        if self.reshard_request.exited(index):
            return
        again = Restart.NOT if self.over(index) else self.restart_policy.ended(index, code, time.monotonic())
        others = (
            self.settings.mode().rule is FoldRule.MIX or self.standby_notice.by
        )  # workers or a standby go on without it
        if again is Restart.NOT or (again is Restart.CHECKPOINT and others):
            self.ended.add(index)
            return
        self.shards[index].close_stdin()
        how = signal_name(-code) if code < 0 else f"exit code {code}"
        say(text := f"shard {index} died ({how}) and is started again", error=True)
        self.run_watch.note("died", {"shard": index, "text": text})
        self.start_shard(index, again is Restart.JOURNAL)

    def _port_lost(self, one_port: OnePort) -> None:
        """Start the process of the one port again. The run ends if it dies again and again."""
        if one_port.died():
            self.errors.append((0, NarrowsError.exit_code, "the process of the one port dies as soon as it starts"))
            self.signals.append(signal.SIGINT)
            return
        say(text := "the process of the one port died and is started again", error=True)
        self.run_watch.note("died", {"shard": RELAY, "text": text})
        self.open_port()

    def over(self, index: int) -> bool:
        """Return True if a dead process of this shard needs no successor."""
        return bool(index in self.done or self.errors or self.signals or self.stopping)

    def forget(self, index: int) -> None:
        """Drop a shard that has no keys any more."""
        self.shards.pop(index).close_stdin()
        self.ports.pop(index, None)
        self._lead()  # another process of this machine may get the port
        self.done.discard(index)
        self.restart_policy.forget(index)
        self.restart_policy.serving.discard(index)

    def write_ready(self) -> None:
        """Write the address, the ports and the process ids of this server to --ready-file, if the user has given one.

        Raises:
            UsageError: the file cannot be written.
        """
        if self.ready_file:
            here = range(self.settings.shards)
            there = self.ports if self.one_port is None else dict.fromkeys(self.ports, self.one_port.port)
            ports, pids = ([which[index] for index in here if index in which] for which in (there, self.pids))
            values = {"address": self.address, "ports": ports, "pid": os.getpid(), "shard_pids": pids}
            write_ready(self.ready_file, values)

    @property
    def pids(self) -> dict[int, int]:
        return {index: shard.pid for index, shard in self.shards.items()}

    def watch(self) -> int:
        """Show events until every shard has ended. A shard that ends before the run is over is an error.

        Returns:
            The exit code of ps-serve: 0, that of the last error, or 1 where shards had to be killed.
        """
        deadline = float("inf")
        while len(self.ended) < self.reshard_request.here:
            if self.restart_policy.deserted.ends(time.monotonic()):
                say(f"the last worker of this stage is lost, and the run ends: {ON}", error=True)
                self.signals.append(signal.SIGINT)
            if self.signals and not self.stopping:
                self.stopping, deadline = True, time.monotonic() + self.end_s
                for index in self.follows or (0,):  # shard 0 writes a checkpoint and ends the run; the others follow
                    self.shards[index].write("stop")
                    self.shards[index].close_stdin()
            self.reshard_request.turn()
            if text := self.standby_notice.missing(self.address):
                say(text)
                self.run_watch.note("standby", {"there": False, "text": text})
            if self.asked:
                self.asked.clear()
                self.shards[0].write("")
            if time.monotonic() > deadline or len(self.signals) > 1:
                say("a shard did not end in time and was killed")
                return 1
            known = len(self.errors)
            self._take(0.1)
            for index, _, text in self.errors[known:]:
                say(f"shard {index}: {text}", error=True)
            for index in self.ended - self.done:
                if not self.errors:
                    kept = self.checkpoint >= 0 and self.config.keeps
                    go_on = f"; --checkpoint-dir {self.config.kept_at} --resume goes on from clock {self.checkpoint}"
                    say(f"shard {index} died and the run ends{go_on if kept else ''}", error=True)
                return self.code or 1
            if self.ended:
                deadline = min(deadline, time.monotonic() + self.end_s)
        return self.code

    @property
    def end_s(self) -> float:
        """Seconds that the shards have to end: END_S, or more if a shard said that its write to a disk takes longer."""
        least = max(END_S, *self.restart_policy.within.values()) if self.restart_policy.within else END_S
        if not self.config.store:
            return least
        from narrows.ps.checkpoints import store_checkpoints

        return least + store_checkpoints.send_s(Path(self.config.checkpoint_dir))

    @property
    def code(self) -> int:
        return self.errors[-1][1] if self.errors else 0

    def _take(self, timeout_s: float) -> None:
        if event := self.children.next(timeout_s):
            self._taken(event)
        for index in (
            () if event else self.restart_policy.silent()
        ):  # once no event is waiting: a sign of life may be queued
            say(f"shard {index} has given no sign of life for too long, and is killed", error=True)
            self.shards[index].kill()

    def _taken(self, event: Event) -> None:
        match event:
            case (_, "ready", {"why": why}):
                self.ready = True
                if why:
                    say(f"each shard starts in an interpreter of its own: {why}")
            case (_, "say", {"text": text}):
                doing(text)
            case (index, "bound", {"port": port, "epoch": epoch, "parent": parent}):
                self.ports[index] = port
                self._lead()
                self.restart_policy.serving.add(index)
                if not index:  # the epochs of shard 0's next process begin later, whatever its checkpoints say
                    self.config = replace(self.config, first_epoch=epoch + LIFE_EPOCHS, parent=parent)
                self.reshard_request.bound(index)
                if self.address:
                    try:
                        self.write_ready()  # the process id has changed
                    except UsageError as error:
                        say(f"{error}; it has the process ids of before", error=True)
            case (index, "alive", {"within": within, "clock": clock}):
                self.restart_policy.expect(index, within)
                self.run_watch.reach(clock)
            case (_, "log", {"name": "move", "values": values}):
                self.settings = Settings(**values["settings"] | {"shards": self.settings.shards})
                self.reshard_request.heard(values["shards"], values["target"], values["text"], values["away"])
                if values["text"]:
                    show("move", values)
            case (index, "log", {"name": name, "values": values}):
                if name == "member":
                    self.restart_policy.deserted.heard(values["live"], values["how"], time.monotonic())
                elif name == "checkpoint":
                    self.checkpoint = values["clock"] if index == 0 else self.checkpoint
                    self.disk.pop(index, None)
                elif name == "ended":
                    self.end = {"steps": values["steps"]}
                elif name == "handed over":
                    self.handed = values
                elif name == "journal":  # the shard has given its journal up
                    self.restart_policy.forget(index)
                elif name == "standby":
                    self.standby_notice.copied(values.get("there", False))
                elif name == "above":
                    parent = values.get("parent", self.config.parent)
                    self.config = replace(self.config, parent=parent)  # for the shard's next process
                elif name == "took over":
                    self.follows.pop(index, None)
                elif name == "disk":
                    self.disk[index] = values["why"]
                show(name, values)
                self.run_watch.note(name, values)
            case (_, "err", line):
                STDERR.line(line)
            case (index, "exit", _) if index == RELAY and self.one_port is not None:
                self._port_lost(self.one_port)
            case (index, "error", {"text": text}) if self.reshard_request.strange(index):
                say(f"shard {index}: {text}", error=True)
            case (index, "error", {"code": code, "text": text}):
                self.errors.append((index, code, text))
            case (index, "done", {"refused": refused}):
                self.done.add(index)
                for text, count in refused.items():
                    show("counted", {"text": f"shard {index} refused {count} times: {text}"})
                self.restart_policy.deadlines.pop(index, None)
            case (index, "exit", code):
                self._exited(index, code)
            case (index, kind, value):
                raise LocalProtocolError(f"shard {index} says {kind!r}: {value}")

    def merge(self) -> None:
        """Write the whole model of the last checkpoint as one file.

        Raises:
            NotSavedError: the disk refused a checkpoint or the file.
        """
        from narrows.protocols.runtime.storage.object_store import FileStore
        from narrows.ps.checkpoints import checkpoint_files, store_checkpoints, whole_model

        clock, folder, copy = self.checkpoint, Path(self.config.checkpoint_dir), self.config.copy()
        kept_at = self.config.kept_at
        model = f"{kept_at}/{whole_model.NAME}" if self.config.store else folder / whole_model.NAME
        if not self.config.keeps:
            return
        if self.disk:
            kept = checkpoint_files.newest(folder, self.settings.shards)
            back = (
                f"--checkpoint-dir {kept_at} --resume goes on from clock {kept}"
                if kept >= 0
                else "no checkpoint is left"
            )
            why = "; ".join(self.disk.values())
            raise NotSavedError(f"the run was trained, but {model} is missing: {why}; {back}")
        if clock < 0:  # this run has written no checkpoint: take the newest in the folder
            clock = checkpoint_files.newest(folder, self.settings.shards)
        if clock >= 0:
            try:
                end = {**self.end, "run_id": self.run_id} if self.end else None
                if self.config.store:
                    store_checkpoints.keep_foreign_model(FileStore(self.config.store), say)
                whole_model.merge(folder, clock, whole_model.buffers(folder, clock), say, end, copy)
            except OSError as error:
                why = f"{error.strerror or error}; --checkpoint-dir {kept_at} --resume has its checkpoints, of clock {clock}"
                raise NotSavedError(f"the run was trained, but {model} is missing: {why}") from None
            say(f"{self._whose(clock)} is in {model}")

    def _whose(self, clock: int) -> str:
        """Describe whose model the last checkpoint holds."""
        if self.settings.mode().rule is not FoldRule.MIX:
            return f"the model at clock {clock}"
        if self.handed.get("last"):
            return "the model that the workers ended with"
        stopped = self.handed.get("stopped", 0)
        if not stopped:
            return "no worker has sent its model: the one with which the run began"
        return f"the mean of the models of {stopped} workers that were stopped" if stopped > 1 else ONE_STOPPED

    def close_port(self) -> None:
        """End the process of the one port once the last bytes have left, and show what it says of them."""
        if self.one_port is not None:
            self.one_port.close()
            while (event := self.children.next(PORT_END_S)) is not None and event[:2] != (RELAY, "exit"):
                if event[:2] == (RELAY, "log"):
                    self._taken(event)

    def kill(self) -> None:
        """Kill the shards that are left, and close the dashboard and the record."""
        for shard in self.shards.values():
            if shard.code is None:
                shard.kill()
            shard.wait()
        self.run_watch.close()
        if self.one_port is not None:
            self.one_port.close()
        self.children.close()
