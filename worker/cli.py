"""ps-worker: launches N copies of a script against a server, its own embedded one when none is named.

It owns the child processes, the record and the console. Exit codes: docs/architecture.md.
"""

from __future__ import annotations

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
from collections import deque
from pathlib import Path
from typing import Any, TextIO

import click

from narrows.protocols.errors import NarrowsError, UnreachableError, UsageError
from narrows.protocols.flags import ALLOCATOR, given, run_flags
from narrows.protocols.modes import Settings
from narrows.protocols.wire import pack

EVENTS_MAX = 100_000
TRACEBACK_LINES = 60
SERVER_START_S = 150.0
CHILD_END_S = 15.0  # after Ctrl-C
SERVER_END_S = 60.0
PROGRESS_S = 2.0


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--server", default="", envvar="NARROWS_SERVER", help="tcp://HOST:PORT as ps-serve printed it [embedded]")
@click.option("-n", "--nproc", "count", type=int, default=1, help="copies of the script on this machine [1]")
@click.option("--device", default="auto", help="auto, cpu or cuda[:i], set for the script as NARROWS_DEVICE [auto]")
@click.option("--record", "record_file", default="", help="write one JSON object a line to this file")
@click.option("--connect-timeout", type=float, default=30.0, envvar="NARROWS_CONNECT_TIMEOUT", help="seconds [30]")
@click.option("--checkpoint-dir", default="", help="of the embedded server")
@click.option("--resume", is_flag=True, help="of the embedded server")
@click.option("-m", "module", default="", help="run a module instead of a script")
@run_flags()
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def main(**flags: Any) -> None:
    """Train SCRIPT.py ARGS... with N workers of a run."""
    try:
        code = Launcher(**flags).run()
    except NarrowsError as error:
        click.echo(f"ps-worker: {error}", err=True)
        code = error.exit_code
    sys.exit(code)


class Launcher:
    """One ps-worker: its flags, its children, its record."""

    def __init__(
        self,
        server: str,
        count: int,
        device: str,
        record_file: str,
        connect_timeout: float,
        checkpoint_dir: str,
        resume: bool,
        module: str,
        command: tuple[str, ...],
        **flags: Any,
    ) -> None:
        if count < 1:
            raise UsageError(f"-n {count}: give at least 1")
        if not module and not command:
            raise UsageError("name the script to run: ps-worker [flags] SCRIPT.py ARGS...")
        if not module and not Path(command[0]).is_file():
            raise UsageError(f"{command[0]}: there is no such script")
        if device.split(":")[0] not in ("auto", "cpu", "cuda"):
            raise UsageError(f"--device {device}: auto, cpu or cuda[:i]")
        self.server, self.count, self.device = server, count, device
        self.connect_timeout, self.checkpoint_dir, self.resume = connect_timeout, checkpoint_dir, resume
        self.command = ["-m", module, *command] if module else list(command)
        self.flags = given(flags)
        self.embedded: subprocess.Popen[bytes] | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.tokens: list[str] = []
        self.events: queue.Queue[tuple[int, str, Any]] = queue.Queue(EVENTS_MAX)
        self.record: TextIO | None = open(record_file, "w") if record_file else None  # noqa: SIM115 - closed in run
        self.began = time.monotonic()
        self.codes: dict[int, int] = {}
        self.last: dict[int, dict[str, float]] = {}
        self.clocks: dict[int, int] = {}
        self.bytes = {"up": 0, "down": 0}
        self.steps = 0
        self.parameters = 0
        self.failures: dict[int, deque[str]] = {}
        self.interrupted = 0

    def run(self) -> int:
        if not self.server:
            self.flags.setdefault("workers", self.count)
            Settings(**self.flags).validated()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            if not self.server:
                self._embed()
            self._spawn()
            return self._watch()
        finally:
            self._end()

    def _on_signal(self, number: int, frame: object) -> None:
        self.interrupted = number

    def _embed(self) -> None:
        folder = tempfile.mkdtemp(prefix="narrows-")
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "narrows.ps.cli", "--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready)]
        for name, value in self.flags.items():
            command += ["--" + name.replace("_", "-"), str(value)]
        if self.checkpoint_dir:
            command += ["--checkpoint-dir", self.checkpoint_dir]
        if self.resume:
            command += ["--resume"]
        # Its own session: Ctrl-C reaches it through us, once, and the end of its stdin ends it if we die.
        self.embedded = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=os.environ | {"NARROWS_EMBEDDED": "1"}, start_new_session=True
        )
        deadline = time.monotonic() + SERVER_START_S
        while not ready.exists():
            code = self.embedded.poll()
            if code is not None:
                error = UsageError("the flags of the embedded server are wrong; its message is above")
                error.exit_code = code or 1
                raise error
            if time.monotonic() > deadline or self.interrupted:
                raise UnreachableError("the embedded server did not start")
            time.sleep(0.02)
        self.server = json.loads(ready.read_text())["address"]
        ready.unlink()
        os.rmdir(folder)

    def _spawn(self) -> None:
        threads = str(max(1, (os.cpu_count() or 1) // self.count))
        expect = pack(self.flags) if self.flags else b""
        for index in range(self.count):
            token = uuid.uuid4().hex
            read_fd, write_fd = os.pipe()
            env = os.environ | {
                "NARROWS_SERVER": self.server,
                "NARROWS_TOKEN": token,
                "NARROWS_RECORD_FD": str(write_fd),
                "NARROWS_EXPECT": expect.hex(),
                "NARROWS_CONNECT_TIMEOUT": str(self.connect_timeout),
                "NARROWS_DEVICE": self.device,
                "RANK": os.environ.get("RANK", str(index)),
                "LOCAL_RANK": os.environ.get("LOCAL_RANK", str(index)),
                "WORLD_SIZE": os.environ.get("WORLD_SIZE", str(self.count)),
                "PYTHONUNBUFFERED": "1",
            }
            for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"):
                env.setdefault(name, threads)
            child = subprocess.Popen(
                [sys.executable, *self.command],
                env=ALLOCATOR | env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
            os.close(write_fd)
            self.children.append(child)
            self.tokens.append(token)
            self.failures[index] = deque(maxlen=TRACEBACK_LINES)
            assert child.stdout is not None and child.stderr is not None
            for kind, stream in (("out", child.stdout), ("err", child.stderr), ("event", os.fdopen(read_fd, "rb"))):
                threading.Thread(target=self._read, args=(index, kind, stream), daemon=True).start()
            threading.Thread(target=self._wait_child, args=(index, child), daemon=True).start()

    def _read(self, index: int, kind: str, stream: Any) -> None:
        for line in stream:
            self.events.put((index, kind, line.decode(errors="replace").rstrip("\n")))

    def _wait_child(self, index: int, child: subprocess.Popen[bytes]) -> None:
        code = child.wait()
        time.sleep(0.05)  # its last lines are still in the pipes
        self.events.put((index, "exit", code))

    def _note(self, event: str, **values: Any) -> None:
        if self.record is not None:
            seconds = round(time.monotonic() - self.began, 6)
            self.record.write(json.dumps({"event": event, "seconds": seconds, **values}) + "\n")
            self.record.flush()

    def _watch(self) -> int:
        shown = time.monotonic()
        stop_by = float("inf")
        asked = False
        while len(self.codes) < self.count:
            if self.interrupted and not asked:
                asked, stop_by = True, time.monotonic() + CHILD_END_S
                for child in self.children:
                    if child.poll() is None:
                        child.send_signal(signal.SIGINT)
            if time.monotonic() > stop_by:
                break
            try:
                index, kind, value = self.events.get(timeout=0.2)
            except queue.Empty:
                continue
            if kind == "out":
                click.echo(value)
            elif kind == "err":
                self.failures[index].append(value)
                click.echo(value, err=True)
            elif kind == "event":
                self._event(index, json.loads(value))
            else:
                self._exited(index, value)
            if time.monotonic() - shown >= PROGRESS_S and self.clocks:
                shown = time.monotonic()
                self._progress()
        return self._summary()

    def _event(self, index: int, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "hello" and not hasattr(self, "settings"):
            self.settings = event["settings"]
        elif kind == "model":
            if not self.parameters:
                self.parameters = event["parameters"]
                told = {name: self.settings[name] for name in ("sync", "compress", "workers", "shards")}
                self._note(
                    "start", mode=told.pop("sync"), **told, parameters=self.parameters, versions=self._versions()
                )
            self._note("member", worker=index, how="joined")
        elif kind in ("step", "last"):
            if kind == "step":
                self.steps += 1
                self.clocks[index] = event["clock"]
                self._note("step", worker=index, **event)
            names = ("clock", "push_bytes", "pull_bytes", "wait_seconds", "staleness")
            self.last.setdefault(index, {}).update({k: v for k, v in event.items() if k not in names})
        elif kind == "bytes":
            self.bytes["up"] += event["up"]
            self.bytes["down"] += event["down"]

    def _versions(self) -> dict[str, str]:
        from importlib.metadata import version

        return {"python": sys.version.split()[0]} | {
            name: version(name) for name in ("narrows", "torch", "pyzmq", "numpy")
        }

    def _exited(self, index: int, code: int) -> None:
        self.codes[index] = code
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
            click.echo(f"ps-worker: worker {index} {how}; the others go on", err=True)
            threading.Thread(target=self._tell_left, args=(self.tokens[index],), daemon=True).start()
        self._note("member", worker=index, how="left" if code == 0 else "expired")

    def _tell_left(self, token: str) -> None:
        """Tell the coordinator that a child died, so that nobody waits for its lease."""
        from narrows.worker.runner import tell_left

        tell_left(self.server, token)

    def _averages(self) -> dict[str, float]:
        names = {name for values in self.last.values() for name in values}
        return {
            name: sum(v[name] for v in self.last.values() if name in v) / sum(name in v for v in self.last.values())
            for name in sorted(names)
        }

    def _progress(self) -> None:
        figures = "  ".join(f"{name} {value:.4f}" for name, value in self._averages().items())
        click.echo(f"[{time.monotonic() - self.began:6.1f} s] clock {min(self.clocks.values())}  {figures}", err=True)

    def _summary(self) -> int:
        seconds = time.monotonic() - self.began
        # Every update carries each parameter once; a state likewise.
        pushes = sum(self.clocks.values())
        raw = 4 * self.parameters * pushes
        codes = [self.codes.get(i, -9) for i in range(self.count)]
        self._note(
            "done",
            steps=self.steps,
            bytes_up=self.bytes["up"],
            bytes_down=self.bytes["down"],
            raw_bytes_up=raw,
            raw_bytes_down=raw,
            exit_codes=codes,
            last=self._averages(),
        )
        figures = ", ".join(f"{name} {value:.4f}" for name, value in self._averages().items())
        ratio = f" ({raw / self.bytes['up']:.0f}x less than fp32)" if self.bytes["up"] else ""
        click.echo(
            f"{sum(c == 0 for c in codes)} of {self.count} workers done in {seconds:.1f} s; {figures}; "
            f"up {self.bytes['up'] / 1e6:.2f} MB{ratio}, down {self.bytes['down'] / 1e6:.2f} MB",
            err=True,
        )
        if self.interrupted:
            return 128 + self.interrupted
        ours = [code for code in codes if code in (3, 4, 5, 6)]
        if ours and all(codes):
            return ours[0]
        return 1 if any(codes) else 0

    def _end(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()
        if self.embedded is not None:
            if self.embedded.stdin is not None and any(self.codes.get(i, 1) for i in range(self.count)):
                self.embedded.stdin.close()
            try:
                self.embedded.wait(SERVER_END_S if not self.interrupted else CHILD_END_S)
            except subprocess.TimeoutExpired:
                self.embedded.terminate()
                self.embedded.wait()
        if self.record is not None:
            self.record.close()


if __name__ == "__main__":
    main()
