"""The actor of Ray that keeps ps-serve or ps-worker running on its node. ray.py makes one for each command.

How it works
1. `run` asks the server's actor for the present address, if the command needs a server, and starts the command.
2. The command reports events over a pipe: the address of a server, the steps of a worker. `facts` answers questions of
   `train` from them.
3. If the command dies by a signal, or exits because its server was lost or unreachable, step 1 repeats. Any other exit
   is the end.

The command's stdin is a pipe from the actor. It closes when the actor ends, however that happens, and ends the command.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import ray
from ray.util.metrics import Gauge

from narrows.protocols.errors import NarrowsError, ServerLostError, UnreachableError
from narrows.protocols.runtime.cli.output import STDERR
from narrows.protocols.runtime.processes.children import event_of

AGAIN = (UnreachableError.exit_code, ServerLostError.exit_code)  # restart: Ray moves the server or starts it again
STARTS_MAX = 1000  # starts of one command by one process of its actor
PAUSE_S = 1.0  # wait before a command is started again
SERVES_S = 300.0  # how long a server may take to start; its node may have to be created first
LOCK_S = 120.0  # how long a server waits for the folder: the server of a killed actor first writes its last checkpoint
END_S = 60.0  # how long a command may take to end
THREADS = 4  # threads of an actor: run, facts and stop have one each
WAITERS = {"address": 16}  # threads that answer `address`; apart, so that workers that wait for it do not block `run`
LINES_MAX = 20  # the newest lines of stderr that an error shows


@dataclass(frozen=True)
class NodeFacts:
    """The present state of one actor.

    Attributes:
        pid: the pid of the actor.
        process: the pid of its command; 0: no command runs.
        node: the id of its node in Ray.
        starts: starts of the command by this actor.
        last: the values that a worker recorded last.
        waits: of a server, a clause that says for which members its run waits.
        shares: the folder is on the same disk as the caller of train().
    """

    pid: int
    process: int
    node: str
    starts: int
    last: Mapping[str, float] = field(default_factory=dict)
    waits: str = ""
    shares: bool = True


class CommandActor:
    """An actor that keeps one command running on its node until the command ends for good.

    Ray runs its methods in threads of their own.
    """

    def __init__(
        self,
        words: Sequence[str],
        flag: str,
        follows: Any,
        label: str,
        folder: str = "",
        host: str | None = None,
        alone_s: float = math.inf,
        mark: str = "",
    ) -> None:
        """Make the actor; `run` starts the command.

        Args:
            words: "serve" or "work", and the command's flags and arguments.
            flag: the flag for the address of the server of actor `follows`.
            follows: the actor of the server, if this command needs one.
            label: the tag of this actor's metrics.
            folder: the folder of a server's checkpoints.
            host: the address on which a server listens; "": that of the node.
            alone_s: seconds after which the actor ends if its facts are not asked for.
            mark: a file that exists if the folder is on the same disk as the caller of train().
        """
        self.words, self.flag, self.follows, self.folder = [*words], flag, follows, folder
        self.host = ray.util.get_node_ip_address() if host == "" else host
        self.shares = not mark or Path(mark).exists()
        self.starts = 0
        # joined: this start of a worker has joined the run. needless: the server ended for good before that.
        self.joined = self.needless = False
        self.process: subprocess.Popen[str] | None = None  # the newest start of the command
        self.last: dict[str, float] = {}  # NodeFacts.last
        self.said: deque[str] = deque(maxlen=LINES_MAX)  # the newest lines of the command's stderr
        self.state = threading.Condition()  # notified when `serves` or `over` changes
        self.serves = ""  # the address of the server; "": it does not serve now
        self.waits = ""  # NodeFacts.waits
        self.finished = False  # the command is not started again
        self.gauges = {
            name: Gauge(f"narrows_{name}", description=text, tag_keys=("actor",))
            for name, text in (("clock", "updates that a worker has completed"), ("push_bytes", "of its newest step"))
        }
        self.tags = {"actor": label}
        self.heard_s = time.monotonic()  # the time of the last call of `facts`
        if alone_s < math.inf:
            threading.Thread(target=self._until_alone, args=(alone_s,), daemon=True).start()

    def _until_alone(self, alone_s: float) -> None:
        """End after the caller of train() has died. Ray ends the workers with the caller, but not detached actors."""
        while (left_s := self.heard_s + alone_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self.stop()
        ray.kill(ray.get_runtime_context().current_actor)

    def facts(self) -> NodeFacts:
        self.heard_s = time.monotonic()
        running = self.process is not None and self.process.poll() is None
        process = self.process.pid if running and self.process is not None else 0
        node = ray.get_runtime_context().get_node_id()
        return NodeFacts(os.getpid(), process, node, self.starts, dict(self.last), self.waits, self.shares)

    def address(self) -> str:
        """Return the address of this actor's server; "" once the server has ended for good. Wait until it serves.

        Raises:
            UnreachableError: the server has not started within SERVES_S.
        """
        with self.state:
            if not self.state.wait_for(lambda: self.serves or self.finished, SERVES_S):
                raise UnreachableError(
                    f"the server did not start within {SERVES_S:.0f} s; its last lines: {self._tail()}"
                )
            return "" if self.finished else self.serves

    def stop(self) -> None:
        """End the command; a server writes a checkpoint."""
        self._end()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)

    def _end(self) -> None:
        """Close the command's stdin, so that it ends, and start no other."""
        self.finished = True
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()

    def without_server(self) -> None:
        """End a worker that has not joined: its server has ended for good, and it would dial until its limit."""
        if not self.joined:
            self.needless = True
            self._end()

    def part(self, name: str, offset: int, size: int) -> bytes:
        """Return `size` bytes of a file in the folder from `offset` on; fewer at its end, none without such a file."""
        try:
            with open(Path(self.folder) / name, "rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            return b""

    def run(self) -> tuple[int, str]:
        """Run the command until it has ended for good.

        Returns:
            The exit code, 0 if the run does not need the command any more, and the last lines of its stderr.
        """
        try:
            code, said = self._until_it_ends(), self._tail()
        except NarrowsError as error:  # Ray wraps the error of another actor, and adds the traceback
            code, said = error.exit_code, str(getattr(error, "cause", error))
        with self.state:
            self.finished = True
            self.state.notify_all()
        return code, said

    def _until_it_ends(self) -> int:
        code = 0
        for _ in range(STARTS_MAX):
            server = ""
            if self.follows is not None:
                server = ray.get(self.follows.address.options(concurrency_group="address").remote())
            if self.finished or (self.follows is not None and not server):
                return 0  # the run is over
            code = self._once(server)
            if self.needless:
                return 0
            if code >= 0 and code not in AGAIN:
                break
            time.sleep(PAUSE_S)
        return code

    def _tail(self) -> str:
        return "; ".join(self.said)

    def _once(self, server: str) -> int:
        told, tells = os.pipe()
        serves = self.words[0] == "serve"
        module = f"narrows.{'ps' if serves else 'worker'}.command.cli"
        own = ["--bind", f"tcp://{self.host}:0"] if serves else ["--record", f"/dev/fd/{tells}"]
        handed = self._locked() if serves else tells
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *([self.flag, server] if server else []), *own, *self.words[1:]],
                env=os.environ | {"NARROWS_EMBEDDED": "1"},
                stdin=subprocess.PIPE,
                stdout=tells if serves else None,
                stderr=subprocess.PIPE,
                pass_fds=[handed],
                text=True,
                start_new_session=True,
            )
        finally:
            for fd in {handed, tells}:
                os.close(fd)
        self.starts, self.joined = self.starts + 1, False
        if self.needless:  # `without_server` was called while the command started
            self._end()
        assert self.process.stderr is not None
        heard = threading.Thread(target=self._hear_errors, args=(self.process.stderr,), daemon=True)
        heard.start()
        with open(told) as lines:
            self._hear(lines)
        code = self.process.wait()
        heard.join(PAUSE_S)
        with self.state:
            self.serves = self.waits = ""
        return code

    def _locked(self) -> int:
        """Lock the folder of checkpoints for this server, and return the descriptor of the lock."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        lock = os.open(Path(self.folder) / ".lock", os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NarrowsError(f"{self.folder} is another server's: name another checkpoint_dir") from None
                time.sleep(0.1)
            else:
                return lock

    def _hear(self, lines: Iterable[str]) -> None:
        """Take the events of a ps-serve, or the record of a ps-worker, until the command closes the pipe."""
        for line in lines:
            kind, event = event_of(line.rstrip("\n"))
            if kind == "serves":
                with self.state:
                    self.serves = event["address"]
                    self.state.notify_all()
            elif kind == "member":
                self.joined = True
            elif kind == "step":
                self.last = {name: value for name, value in event.items() if isinstance(value, (int, float))}
                for name, gauge in self.gauges.items():
                    if name in self.last:
                        gauge.set(self.last[name], tags=self.tags)
            elif kind == "done":
                self.last |= event["last"]  # including the values that the script recorded after the last step
            elif kind == "noted" and event["what"] == "waits":
                self.waits = event["values"]["waits"]
            elif kind == "err":
                self._show(event)

    def _hear_errors(self, lines: TextIO) -> None:
        for line in lines:
            self._show(line.rstrip("\n"))

    def _show(self, line: str) -> None:
        self.said.append(line)
        STDERR.line(line)
