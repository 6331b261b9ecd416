"""The runners of ps-probe: that of the director and that of a machine that measures. `ProbeDirector` decides.

How it works

1. `ProbeDirectorRunner` receives messages on one socket, hands them to `ProbeDirector`, and carries out its effects: it
   sends messages and prints lines. Until the first round begins it also drops machines that do not come.
2. `ProbeMachineRunner` sends ProbeJoin and a heartbeat each BEAT_NS. A thread times the steps of the script. For
   ProbeListen and ProbeDial another thread goes through the visit (pairwise.py), and reports its figures.
3. `SshCommands` starts ps-probe --join on other machines. A machine gets its key over the stdin of ssh.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from narrows.protocols.addresses import ANY_HOSTS, bracketed, parse_address
from narrows.protocols.effects import NS
from narrows.protocols.errors import (
    AuthenticationError,
    NarrowsError,
    RemoteProtocolError,
    ServerLostError,
    UnreachableError,
    UsageError,
)
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network import key_files
from narrows.protocols.runtime.network.curve_auth import CurveKeys, HandshakeFailure, KeyPair
from narrows.protocols.runtime.network.hosts import own_host
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import Peer, Sockets
from narrows.protocols.wire import pack
from narrows.ps.command.planning import step_time
from narrows.ps.probe import pairwise
from narrows.ps.probe.director import BEAT_NS, Effects, PrintLine, ProbeDirector
from narrows.ps.probe.messages import (
    ProbeBeat,
    ProbeDial,
    ProbeEnd,
    ProbeJoin,
    ProbeListen,
    ProbeListening,
    ProbeReport,
    ProbeStepTime,
    decode,
    encode,
)

TURN_MS = 100
SILENT_S = 30.0  # a director that has answered and then sends nothing for so long is dead
ENDS_S = 5.0  # time to end for a started machine, once the probe is over
SCRIPT_ENDS_S = 2 * step_time.ENDS_S + 5  # time to end for its script, which is killed if it does not end
BY_SSH = "ssh:"  # stands before the director's port in the place of its address
SSH = "ssh -o BatchMode=yes {host} {command}"  # starts a command on a host; the command reads the stdin of ssh


@dataclass(slots=True)
class ProbeMachineRunner:
    """The runner of a machine that measures as its director says."""

    address: str  # of the director
    join: ProbeJoin
    steps: Callable[[threading.Event], float]  # times the steps of the script until the event is set; returns seconds
    port: int  # of this machine's streams, 0 for any
    own: tuple[KeyPair, str] | None  # this machine's keys and the director's public key; None: without encryption
    connect_s: float  # the director must answer within this
    refusal: Callable[[HandshakeFailure], str] = lambda why: ""  # explains a failed handshake
    refused: str = ""  # why the director refuses this machine's key
    stop: threading.Event = field(default_factory=threading.Event)  # ends the present visit
    worker: threading.Thread | None = None  # goes through the present visit
    finished: threading.Event = field(default_factory=threading.Event)  # ends this runner
    failed: list[NarrowsError] = field(default_factory=list)  # errors of the thread that times steps
    heard_s: float = 0.0  # when the newest message of the director came, or the start
    met: bool = False  # the director has answered

    def run(self) -> None:
        """Measure until the director ends the probe. Raise NarrowsError where it cannot go on."""
        own = self.own
        curve = CurveKeys(None, lambda address: own, lambda public: False) if own is not None else None
        with closing(Sockets(curve=curve, failed=self._failed)) as sockets:
            loop = Loop(
                sockets,
                lambda peer, frames: self._hear(frames, loop),
                lambda now_ns: sockets.send(self.address, encode(ProbeBeat(0))),
                self._check,
                TURN_MS,
                BEAT_NS * 1000 // NS,
            )
            sockets.send(self.address, encode(self.join))
            timer = threading.Thread(target=self._time, args=(loop,), name="steps", daemon=True)
            timer.start()
            self.heard_s = time.monotonic()
            loop.tick_soon()
            try:
                loop.run(time.monotonic_ns, lambda: not self.finished.is_set())
            finally:
                self.stop.set()
                self.finished.set()
                timer.join(SCRIPT_ENDS_S)

    def _send(self, message: ProbeStepTime | ProbeListening | ProbeReport, loop: Loop) -> None:
        """Send a message by the loop's thread. Any thread may call this."""
        loop.call(lambda: loop.port.send(self.address, encode(message)))

    def _time(self, loop: Loop) -> None:
        try:
            self._send(ProbeStepTime(float(self.steps(self.finished))), loop)
        except NarrowsError as error:
            failed = error
            loop.call(lambda: self.failed.append(failed))

    def _failed(self, address: str, why: HandshakeFailure, key: str) -> None:
        self.refused = self.refused or self.refusal(why)

    def _check(self) -> None:
        """Raise NarrowsError where waiting for the director is of no use."""
        if self.finished.is_set():
            return
        silent_s = time.monotonic() - self.heard_s
        if self.failed:
            raise self.failed[0]
        if self.refused:
            raise AuthenticationError(self.refused)
        if not self.met and silent_s > self.connect_s:
            raise UnreachableError(f"no ps-probe answers at {self.address} within {self.connect_s:g} s")
        if self.met and silent_s > SILENT_S:
            raise ServerLostError(f"the ps-probe at {self.address} has said nothing for {SILENT_S:g} s")

    def _hear(self, frames: Sequence[Buffer], loop: Loop) -> None:
        self.heard_s, self.met = time.monotonic(), True
        if self.finished.is_set():
            return
        message = decode(frames)
        if isinstance(message, ProbeEnd):
            if message.why:
                raise UsageError(f"the director at {self.address} says: {message.why}")
            self.finished.set()
        if isinstance(message, ProbeListen | ProbeDial):
            self.stop.set()  # the director has given the try before up
            before, self.stop = self.worker, threading.Event()
            work = (message, self.stop, before, loop)
            self.worker = threading.Thread(target=self._measure, args=work, name="measure", daemon=True)
            self.worker.start()

    def _measure(
        self,
        asked: ProbeListen | ProbeDial,
        stop: threading.Event,
        before: threading.Thread | None,
        loop: Loop,
    ) -> None:
        if before is not None:
            before.join(pairwise.CONNECT_S)
        try:
            if isinstance(asked, ProbeListen):
                with pairwise.open_port("", self.port) as listener:
                    self._send(ProbeListening(asked.token, listener.getsockname()[1]), loop)
                    found = pairwise.listen(listener, asked.token, asked.seconds, asked.first, stop)
            else:
                host = asked.host or parse_address("--join", self.address)[0]
                found = pairwise.dial(host, asked, stop)
            report = ProbeReport(asked.token, "", pack([flow.plain() for flow in found]))
        except NarrowsError as error:
            report = ProbeReport(asked.token, str(error), pack([]))
        if not stop.is_set():
            self._send(report, loop)


class ProbeDirectorRunner:
    """The runner of the director.

    Args:
        probe: the director.
        bind: the address to bind.
        keys_folder: the folder of keys whose machines may take part; "": every machine may.
        say: prints a line.
    """

    def __init__(self, probe: ProbeDirector, bind: str, keys_folder: str, say: Callable[[str], None]) -> None:
        self.probe, self.say = probe, say
        self.guard = guard = key_files.AdmittedKeys(keys_folder) if keys_folder else None
        curve = None
        if guard is not None:
            curve = CurveKeys(guard.own.pair, lambda address: None, lambda public: guard.who(public) is not None)
        self.sockets = Sockets(curve=curve)
        self.host, _ = parse_address("--bind", bind, any_port=True)
        self.port = self.sockets.listen(bind)

    @property
    def address(self) -> str:
        """The address at which this machine itself dials the director."""
        return f"tcp://{'127.0.0.1' if self.host in ANY_HOSTS else self.host}:{self.port}"

    def run(self, wait_s: float, ended: Callable[[], Iterable[tuple[str, str]]]) -> None:
        """Direct until the probe is over.

        Args:
            wait_s: seconds in which the machines must have joined.
            ended: returns (name, sentence) of machines that have ended since the last call.

        Raises:
            UnreachableError: fewer than two machines have joined.
        """
        probe, deadline = self.probe, time.monotonic() + wait_s

        def tick(now_ns: int) -> None:
            self._do(probe.tick(now_ns))
            if probe.began_ns is None:
                for name, why in ended():
                    self._do(probe.without(why, now_ns, name))
                if time.monotonic() > deadline and len(probe.machines) < probe.count:
                    self._do(probe.without(f"{probe.missing()} in {wait_s:g} s", now_ns))
                if probe.count < 2:
                    raise UnreachableError(f"{probe.missing()}; two are needed: {'; '.join(probe.failed)}")

        turns = Loop(self.sockets, self._heard, tick, wait_ms=TURN_MS, tick_ms=0)
        turns.run(time.monotonic_ns, lambda: not probe.finished)

    def _heard(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        assert isinstance(peer, bytes)
        try:
            self._do(self.probe.hear(peer, decode(frames), time.monotonic_ns()))
        except RemoteProtocolError as error:
            self.say(f"a message was left out: {error}")
            self.sockets.send(peer, encode(ProbeEnd(str(error))))

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, PrintLine):
                self.say(effect.text)
            else:
                self.sockets.send(effect.peer, encode(effect.message))

    def close(self) -> None:
        self.sockets.close()


@contextmanager
def beside(measurer: ProbeMachineRunner, tell: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Run a measuring machine in a thread of the director's process.

    The context's value is a function that raises the NarrowsError with which the machine has ended, if it has.
    """
    failed: list[NarrowsError] = []

    def measure() -> None:
        try:
            measurer.run()
        except NarrowsError as error:
            failed.append(error)

    def check() -> None:
        if failed:
            raise failed.pop()

    thread = threading.Thread(target=measure, name="machine", daemon=True)
    thread.start()
    try:
        yield check
        thread.join(ENDS_S)  # the director has sent it ProbeEnd
    finally:
        measurer.finished.set()
        thread.join(SCRIPT_ENDS_S)
        for error in failed:
            tell(str(error))


def words_there(there: str, bound: str, port: int, more: Sequence[str]) -> list[str]:
    """Return the ps-probe command with which the machine `there` joins the director at `bound` and `port`.

    A name that does not resolve here may be one of ssh's config. Other machines cannot dial such a name either, so the
    machine finds its address by itself.
    """
    try:
        towards = own_host(there, 22)
    except OSError:
        towards = ""
    here = bound if bound not in ANY_HOSTS else towards
    join = f"tcp://{here}:{port}" if here else f"{BY_SSH}{port}"
    return ["ps-probe", "--join", join, "--name", there, *(["--host", bracketed(there)] if towards else []), *more]


def by_ssh(address: str) -> str:
    """Return the address of the director; ssh:PORT stands for the machine from which ssh has started this command.

    Raises:
        UsageError: ssh has not started this command.
    """
    if not address.startswith(BY_SSH):
        return address
    client = os.environ.get("SSH_CONNECTION", "").partition(" ")[0]
    if not client:
        raise UsageError(f"--join {address}: SSH_CONNECTION is not set; give tcp://HOST:PORT")
    return f"tcp://{bracketed(client)}:{address.removeprefix(BY_SSH)}"


class SshCommands:
    """The ps-probe commands that --ssh has started on other machines.

    Args:
        hosts: the machines, as ssh knows them.
        ssh: the template of --ssh.
        director: the director that they join.
        keys_folder: the folder in which each gets a key, "" for none.
        more: flags that they get from the director's command line.

    Raises:
        UsageError: a command cannot be started.
    """

    def __init__(
        self, hosts: Sequence[str], ssh: str, director: ProbeDirectorRunner, keys_folder: str, more: Sequence[str]
    ) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        access = ["--key", "-"] if keys_folder else ["--insecure"]
        for host in hosts:
            there = host.rpartition("@")[2]
            words = words_there(there, director.host, director.port, [*access, *more])
            try:
                line = [word.format(host=host, command=shlex.join(words)) for word in shlex.split(ssh)]
                made = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
            except (OSError, ValueError, KeyError, IndexError) as error:
                raise UsageError(f"--ssh {ssh}: {error}") from None
            self.running[host] = made
            assert made.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                if keys_folder:
                    made.stdin.write(key_files.add(keys_folder, _key_name(there), "worker").read_bytes())
                made.stdin.close()

    def ended(self) -> list[tuple[str, str]]:
        """Return (name, sentence) of each command that has ended since the last call."""
        found = {host: code for host, made in self.running.items() if (code := made.poll()) is not None}
        for host in found:
            del self.running[host]
        text = "{}: ps-probe did not start there, or has ended with code {}"
        return [(host.rpartition("@")[2], text.format(host, code)) for host, code in found.items()]

    def close(self) -> None:
        deadline = time.monotonic() + ENDS_S
        for made in self.running.values():
            try:
                made.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                made.terminate()
                made.wait(ENDS_S)


def _key_name(host: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in host)[:60]


@contextmanager
def own_keys() -> Iterator[str]:
    """Make a folder of keys that is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        key_files.make(folder)
        yield folder


def key_of(path: str) -> key_files.SecretKeyFile:
    """Read a machine's key from a file, or from stdin for "-". Raise UsageError where there is none."""
    if path != "-":
        return key_files.member_key(path, "--key")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "stdin"
        with (
            os.fdopen(os.open(copy, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file,
            open(0, "rb", closefd=False) as given,
        ):
            file.write(given.read(1 << 16))
        return key_files.member_key(str(copy), "--key")


def secret() -> str:
    return secrets.token_hex(16)
