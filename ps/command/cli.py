"""ps-serve: one command that starts the shard processes of a cluster, shows what happens, and ends them.

It owns the processes and the console; each process owns its shard. Exit codes: docs/architecture.md.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from narrows.protocols.errors import NarrowsError, UsageError
from narrows.protocols.modes import Rule
from narrows.protocols.runtime.flags import ALLOCATOR, COMMAND, given, parse_address, run, run_flags
from narrows.protocols.settings import Settings

START_S = 120.0  # a cold machine compiles kernels first
END_S = 40.0  # a shard that does not end within this after the stop is killed
CHECKPOINTS = "checkpoints"
EMBEDDED = os.environ.get("NARROWS_EMBEDDED") == "1"  # in a ps-worker, which ends us by closing our stdin


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Cluster:
    """The shard processes of one ps-serve, and their events in one bounded queue."""

    def __init__(
        self,
        settings: Settings,
        host: str,
        port: int,
        checkpoint_dir: str,
        resume: bool,
        parent: str,
        parent_timeout: float,
    ) -> None:
        self.settings, self.host, self.port = settings, host, port
        self.parent, self.parent_timeout = parent, parent_timeout
        self.checkpoint_dir, self.resume = checkpoint_dir, resume
        self.processes: list[subprocess.Popen[str]] = []
        self.ports: list[int] = []
        self.events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue(10_000)
        self.early: list[dict[str, Any]] = []  # what was logged before all were bound
        self.first_epoch = time.time_ns() // 1_000_000 << 10  # greater than in any earlier life of this run

    def start(self) -> None:
        for index in range(self.settings.shards):
            port = self.port + index if self.port else 0
            upward = (
                f"tcp://{'127.0.0.1' if self.host in ('0.0.0.0', '*') else self.host}:{self.ports[0]}" if index else ""
            )
            told = {
                "index": index,
                "settings": asdict(self.settings),
                "bind": f"tcp://{self.host}:{port}",
                "coordinator": upward,
                "first_epoch": self.first_epoch,
                "checkpoint_dir": self.checkpoint_dir,
                "resume": self.resume,
                "parent": self.parent,
                "parent_timeout": self.parent_timeout,
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "narrows.ps.process.main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=ALLOCATOR | os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
            )
            self.processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            threading.Thread(target=self._read, args=(index, process), daemon=True).start()
            if index == 0:
                self._await_bound(1)
        self._await_bound(self.settings.shards)

    def _read(self, index: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                self.events.put((index, json.loads(line)))
            except ValueError:
                print(line, end="", file=sys.stderr)
        self.events.put((index, None))

    def _await_bound(self, count: int) -> None:
        deadline = time.monotonic() + START_S
        bound: dict[int, int] = dict(enumerate(self.ports))
        while len(bound) < count:
            try:
                index, event = self.events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise NarrowsError(f"a shard process did not start within {START_S:.0f} s") from None
            if event is None:
                raise NarrowsError(f"shard {index} ended while it started; its message is above")
            if event["event"] == "error":
                error = UsageError(event["text"]) if event["code"] == 2 else NarrowsError(event["text"])
                raise error
            if event["event"] == "bound":
                bound[index] = event["port"]
            elif event["event"] == "log":
                self.early.append(event)
        self.ports = [bound[i] for i in sorted(bound)]

    def stop(self) -> None:
        """Ask process 0 to checkpoint and end the run; the others follow."""
        stdin = self.processes[0].stdin
        if stdin is not None and not stdin.closed:
            stdin.close()

    def show_tree(self) -> None:
        """Ask process 0 for all levels of the run; they come as an event."""
        stdin = self.processes[0].stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):  # it has ended
                stdin.write("\n")
                stdin.flush()

    def kill(self) -> None:
        """End what is left, by pid."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def say(text: str, error: bool = False) -> None:
    """One line for the console. That of an embedded server is ps-worker's, whose stdout is the script's."""
    click.echo(f"{'ps-worker' if EMBEDDED else 'ps-serve'}: {text}", err=error or EMBEDDED)


def describe(name: str, values: dict[str, Any]) -> str | None:
    """One line for the console, or None for events that only a record wants."""
    if name == "member":
        return f"worker {values['worker']} (rank {values['rank']}, {values['host']}) {values['how']} at clock {values['clock']}; {values['live']} live"  # fmt: skip  # noqa: E501
    if name == "discarded":
        return f"update {values['clock']} of worker {values['worker']} was discarded on shard {values['shard']}: {values['why']}"  # fmt: skip  # noqa: E501
    if name == "restart":
        return f"shard {values['shard']} was restarted: clocks {values['from_clock']} to {values['to_clock']} are lost"
    if name == "checkpoint":
        return f"shard {values['shard']}: checkpoint of clock {values['clock']}"
    return str(values.get("text", values))


@click.command(context_settings=COMMAND)
@click.option("--bind", default="tcp://127.0.0.1:5555", show_default=True,
              help="address of shard 0; shard i takes the port i above it")  # fmt: skip
@run_flags
@click.option(
    "--parent", default="", help="address of a ps-serve above: this cluster is one worker of it, and pushes updates"
)
@click.option("--parent-timeout", type=click.FloatRange(0.1), default=30.0, show_default=True,
              help="seconds of silence after which the server above is lost")  # fmt: skip
@click.option("--insecure", is_flag=True, help="allow other than loopback addresses without authentication")
@click.option("--checkpoint-dir", default="", help="where checkpoints and the final model.safetensors go; none: nowhere "
              "[checkpoints/DATE-TIME]")  # fmt: skip
@click.option("--resume", is_flag=True, help="go on from the newest checkpoint in --checkpoint-dir, if it has one")
@click.option("--ready-file", default="", help="written, as JSON, once workers can join")
def command(**flags: Any) -> int:
    """Serve one cluster's model: N shards in N processes, one sync mode.

    Each flag has a variable, NARROWS_<FLAG>, for example NARROWS_BIND; the flag wins. It ends with its last worker; Ctrl-C
    writes a checkpoint and ends it; SIGUSR1 prints all levels of the run.
    """
    return serve(**flags)


def main() -> None:
    run(command, "ps-worker" if EMBEDDED else "ps-serve")


def checkpoint_folder(told: str, resume: bool) -> str:
    """Make and return the folder of --checkpoint-dir; "" for none. UsageError for one that holds another run."""
    if told == "none" or (not told and resume):
        if resume:
            raise UsageError("--resume: name the folder with --checkpoint-dir")
        return ""
    try:
        if told:
            folder = Path(told)
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and any(folder.glob("*.safetensors")):
                raise UsageError(
                    f"--checkpoint-dir {told} holds the model of a run: go on with it by --resume, or name another folder"
                )
            return told
        Path(CHECKPOINTS).mkdir(exist_ok=True)
        now = time.strftime("%Y-%m-%d-%H%M%S")
        for name in (now, *(f"{now}-{again}" for again in range(2, 100))):
            with contextlib.suppress(FileExistsError):
                Path(CHECKPOINTS, name).mkdir()
                return f"{CHECKPOINTS}/{name}"
        raise UsageError(f"--checkpoint-dir: {CHECKPOINTS}/{now} and all its like are taken, name another folder")
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {told or CHECKPOINTS}: {error.strerror}; name another folder, or none"
        ) from None


def serve(
    bind: str,
    parent: str,
    parent_timeout: float,
    insecure: bool,
    checkpoint_dir: str,
    resume: bool,
    ready_file: str,
    **flags: Any,
) -> int:
    settings = Settings(**given(flags)).validated()
    from narrows.compression import SpecError, ladder

    for name in ("compress", "compress_down"):
        try:
            ladder(getattr(settings, name))
        except SpecError as error:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(settings, name)}: {error}") from None
    host, port = parse_address("--bind", bind, any_port=True)
    if not is_loopback(host) and not insecure:
        raise UsageError(f"--bind {bind}: anyone who reaches it could join; keep to loopback or say --insecure")
    if resume and settings.mode().rule is Rule.MIX:
        raise UsageError(
            "--resume: under --sync gossip the model is with the workers, and a run begins with theirs; load model.safetensors "
            "of --checkpoint-dir in the script"
        )
    if parent:
        parse_address("--parent", parent)
        if settings.mode().rule is Rule.MIX:
            raise UsageError(
                "--parent: under --sync gossip no update goes through this server; choose another mode here"
            )
    if port + settings.shards - 1 >= 65536:
        raise UsageError(
            f"--bind {bind}: --shards {settings.shards} take the ports from there on, and 65535 is the last"
        )
    folder = checkpoint_folder(checkpoint_dir, resume)
    cluster = Cluster(settings, host, port, folder, resume, parent, parent_timeout)
    signals: list[int] = []
    asked: list[int] = []  # to show the tree
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
    if EMBEDDED:
        threading.Thread(target=_until_stdin_ends, daemon=True).start()
    try:
        cluster.start()
        shown = socket.gethostname() if host in ("0.0.0.0", "*") else host
        address = f"tcp://{shown}:{cluster.ports[0]}"
        if ready_file:
            pids = [process.pid for process in cluster.processes]
            told = {"address": address, "ports": cluster.ports, "pid": os.getpid(), "shard_pids": pids}
            temporary = Path(f"{ready_file}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(told))
            os.replace(temporary, ready_file)
        if not EMBEDDED:
            noun = "shard" if settings.shards == 1 else "shards"
            say(f"serves {settings.shards} {noun}, --sync {settings.sync}; on a worker machine:")
            click.echo(f"    ps-worker --server {address} SCRIPT.py")
        return _watch(cluster, signals, asked)
    finally:
        cluster.kill()
        if not checkpoint_dir and folder:
            for empty in (folder, CHECKPOINTS):
                with contextlib.suppress(OSError):
                    os.rmdir(empty)


def _until_stdin_ends() -> None:
    while sys.stdin.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _show(event: dict[str, Any]) -> None:
    """A log event on the console; of an embedded server only what a user of ps-worker must know."""
    line = describe(event["name"], event["values"])
    told = event["name"] in ("discarded", "restart", "lost", "refused", "hyper")
    if line and (not EMBEDDED or told or event["values"].get("how") == "expired"):
        say(line)


def _watch(cluster: Cluster, signals: list[int], asked: list[int]) -> int:
    """Show events until every process has ended; a shard that ends before the others is an error."""
    ended: set[int] = set()
    done: set[int] = set()
    code, stopping, deadline, last = 0, False, float("inf"), -1
    for early in cluster.early:
        _show(early)
    while len(ended) < cluster.settings.shards:
        if signals and not stopping:
            stopping, deadline = True, time.monotonic() + END_S
            cluster.stop()
        if asked:
            asked.clear()
            cluster.show_tree()
        if time.monotonic() > deadline or len(signals) > 1:
            say("a shard did not end in time and was killed")
            return 1
        try:
            index, event = cluster.events.get(timeout=0.1)
        except queue.Empty:
            continue
        if event is None:
            ended.add(index)
            if index not in done:
                if code == 0:
                    go_on = f"; --checkpoint-dir {cluster.checkpoint_dir} --resume goes on from clock {last}"
                    say(f"shard {index} died and the run ends{go_on if last >= 0 else ''}", error=True)
                return code or 1
            deadline = min(deadline, time.monotonic() + END_S)
        elif event["event"] == "done":
            done.add(index)
        elif event["event"] == "error":
            say(f"shard {index}: {event['text']}", error=True)
            code = event["code"]
        elif event["event"] == "log":
            if event["name"] == "checkpoint" and event["values"]["shard"] == 0:
                last = event["values"]["clock"]
            _show(event)
    if last >= 0 and cluster.checkpoint_dir:
        from narrows.ps.process import checkpoints

        folder = Path(cluster.checkpoint_dir)
        path = checkpoints.merge(folder, cluster.settings.shards, last, checkpoints.buffers(folder, last))
        at = "that the workers ended with" if cluster.settings.mode().rule is Rule.MIX else f"at clock {last}"
        say(f"the model {at} is in {path}")
    return 128 + signals[0] if signals and not EMBEDDED else code


if __name__ == "__main__":
    main()
