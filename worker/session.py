"""The session of this process: its rank in the run, the clock of the run, and the record of its figures.

How it works
1. The first call that needs the session opens it: rank(), world_size(), clock(), DistributedOptimizer(...), and others.
   `current` returns it from then on.
2. There are three kinds of session:

       NARROWS_SERVER names a server           RunSession      this process is a worker of a run
       ... in a child process of a worker      WorkerOfChild   it reads the worker's counters, and is no member
       NARROWS_SERVER is empty                 LocalSession    the script trains without a server

3. RunSession.__init__ compiles kernels, dials the server and joins. `attach` makes the `Engine` once the script makes
   its DistributedOptimizer; the engine declares the model and waits until the run starts.
4. After each step DistributedOptimizer calls `stepped`: it writes the step's figures to the ps-worker that started this
   process, together with the values that the script gave to record().
5. At exit `close` finishes the run if the script has not. After an error the worker leaves at once, so that no other
   worker waits for it.
6. An uncaught NarrowsError ends the process with one sentence and the error's exit code, without a traceback.
7. If the ps-worker that started this process dies, `_watch_launcher` leaves the run and ends the process group.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.nn.parallel import DistributedDataParallel

from narrows import compression
from narrows.protocols.addresses import parse_addresses
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS
from narrows.protocols.errors import NarrowsError, ServerLostError, UsageError
from narrows.protocols.runtime.cli import output
from narrows.protocols.runtime.network.hosts import memory_bytes
from narrows.protocols.runtime.network.key_files import SecretKeyFile, member_key
from narrows.worker.check.script_watch import ScriptWatch
from narrows.worker.checkpoint.optimizer_state import OptimizerStateFile
from narrows.worker.command.managers import place
from narrows.worker.group.group import Group, GroupEndedError
from narrows.worker.group.group_link import GroupLink
from narrows.worker.group.group_link import joined as through_first
from narrows.worker.model import device_placement
from narrows.worker.model.privacy import UpdatePrivacy
from narrows.worker.runtime import child_process, launcher_pipe
from narrows.worker.runtime.child_process import LoaderFacts, NotAWorkerError, WorkerOfChild, only_here
from narrows.worker.runtime.config import WorkerConfig, told
from narrows.worker.runtime.launcher_pipe import say as _say
from narrows.worker.runtime.launcher_pipe import tell as _tell
from narrows.worker.runtime.logger_forwarding import LoggerForwarding
from narrows.worker.runtime.member_link import MemberLink, let_in, tell_left, tell_store
from narrows.worker.runtime.signals import goes_on, leave_when_told, told_to_end
from narrows.worker.sync.engine import Engine
from narrows.worker.sync.metrics import WorkerMetrics


def warm_up(say: Callable[[str], None]) -> None:
    """Compile kernels and import slow modules before the worker joins.

    Either holds the interpreter for seconds, in which a joined worker would send no heartbeats.

    Args:
        say: called with a sentence before the longest compilation.
    """
    compression.warm_up(say)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports seconds of torch
    device_placement.warm_up(say)


EPSILON_EVERY = 50  # pushes, from one row of the record with epsilon to the next

SECOND = (
    "a second DistributedOptimizer, and a run has one: give it all optimizers of the script, as a list, or start ps-worker "
    "once for each training"
)
SECOND_AFTER = (
    "a second DistributedOptimizer after finish(): this worker has left the run, which trains one model once; start ps-worker "
    "again for the next training, with the ps-serve of another run or with none"
)

DYING_S = 0.5  # a worker whose server was stopped waits so long for the end of its ps-worker, which may be the cause
LAST_S = 5.0  # a process that ends because another process of its group has ended lets that one end first, for so long


class LocalSession(LoaderFacts):
    """The session of a script that runs as plain python: one worker, no server. Each training has its own.

    In a process that such a script has started, `clock` reads the script's counters until that process trains itself.
    """

    rank = 0
    world_size = 1
    link: MemberLink | None = None
    engine: Engine | None = None

    def __init__(self, before: LocalSession | None = None) -> None:
        """Begin a training. `before`: the session of the training before it in this process, if there was one."""
        self.pid = os.getpid()
        self.parent = child_process.of_parent(child_process.ALONE) if before is None else None
        self.training: int = 0 if before is None else before.training + 1  # the number of this training, from 0
        self.trains = False  # a DistributedOptimizer was made for this session
        self.stepped_count = 0
        self.steps, self.batch = (0, 0) if before is None else (before.steps_told, before.batch)
        self.steps_told: int = 0  # `steps=` of loaders made since the newest step: they may belong to the next training
        self.taken = 0  # ranges of samples that loaders have taken

    @property
    def clock(self) -> int:
        return self.stepped_count if self.parent is None else self.parent.read("clock")

    @property
    def step_count(self) -> int:
        return self.clock

    def begin(self) -> LocalSession:
        """Return the session for a new DistributedOptimizer: this one, unless another training has begun in it."""
        if self.trains or self.parent is not None:
            return LocalSession(self).begin()
        self.trains = True
        return self

    def ends_after(self, steps: int) -> None:
        super().ends_after(steps)
        self.steps_told = max(self.steps_told, steps)

    def take_range(self, limit: int) -> int:
        """Return the number of the next range of samples; -1 if it is not below `limit`."""
        if self.taken >= limit:
            return -1
        self.taken += 1
        return self.taken - 1

    def stepped(self) -> None:
        """Count a step. From now on the script's calls of clock() and record() refer to this training."""
        global _session
        _session, self.pid, self.parent = self, os.getpid(), None
        self.stepped_count += 1
        self.steps_told = 0
        child_process.tell(self.rank, self.world_size, self.clock, self.step_count)

    def record(self, values: dict[str, float]) -> None:
        """Do nothing: without a run there is no record."""


class RunSession(LoaderFacts):
    """The session of a worker of a run. The constructor joins the run, or raises NarrowsError."""

    training = 0

    def __init__(self, address: str) -> None:
        self.began_unix = time.time()
        self.pid = os.getpid()
        self.config = config = WorkerConfig.taken()
        self.group = Group.of(config)
        self.tells = self.group is None or self.group.leads  # this process writes the worker's record
        warm_up(lambda text: _tell("say", text=text))
        token = config.token or uuid.uuid4().hex
        key = member_key(config.key, "--key") if config.key else None
        _watch_launcher(address, token, key, config.parent_fd)

        def dial(one: str, limit_s: float) -> MemberLink:
            timing = Timing(connect_ns=int(limit_s * NS), lost_ns=int(config.server_timeout * NS))
            return (MemberLink if self.group is None else GroupLink)(
                one, token, socket.gethostname(), config.expect, timing, key
            )

        addresses = parse_addresses("--server", address)
        self.link: MemberLink
        if self.group is None:
            self.link, joined = let_in(addresses, dial, config.connect_timeout)
            self.rank, self.world_size = joined.rank, joined.world_size
        else:
            self.link, joined = through_first(self.group, lambda: let_in(addresses, dial, config.connect_timeout))
            # Each worker has a share of the samples, and each process of its group has a share of the worker's share.
            self.rank = joined.rank + joined.world_size * self.group.rank
            self.world_size = joined.world_size * self.group.size
        for name in config.sets:
            os.environ[name] = str(self.world_size if name == "WORLD_SIZE" else self.rank)
        self.settings = Settings.unpacked(joined.settings)
        self.engine: Engine | None = None
        self.moments: OptimizerStateFile | None = None  # the optimizer's state on disk, with --checkpoint-dir
        self._pending: dict[str, Any] = {}
        self._bytes = self._begun = (0, 0)  # bytes up and down: until the newest step, and until the first model
        self._told = 0  # rows with epsilon that the record has
        flagged = self.settings.flagged()
        _tell("hello", rank=self.rank, settings={f: getattr(flagged, f) for f in flagged.__slots__})

    @property
    def clock(self) -> int:
        return self.engine.sync.clock if self.engine is not None else 0

    @property
    def step_count(self) -> int:
        return self.engine.step_count if self.engine is not None else 0

    def attach(
        self, model: torch.nn.Module, inner: torch.optim.Optimizer, max_grad_norm: float, overlap: int
    ) -> Engine:
        if self.engine is not None:
            raise UsageError(SECOND_AFTER if self.engine.finished else SECOND)
        if self.config.relay:
            self.link.open_tunnel()
        elif self.settings.mode().rule is FoldRule.MIX and self.group is None:
            self.link.listen()
        self.engine = Engine(
            self.link, self.settings, model, inner, max_grad_norm, overlap, self.group, self.rank, self.config
        )
        self._swaps = self.engine.swaps
        self._keep_moments(self.engine)
        self.tell_children()
        self._begun = self.link.bytes_up, self.link.bytes_down
        if not self.tells:
            return self.engine
        self.figures = WorkerMetrics(self.engine, self.link, memory_bytes())
        self.link.member.figures.read_from(self.figures.rows)
        if self.engine.device_notice:
            _say(self.engine.device_notice)
        _tell("model", parameters=self.engine.flat.size, clock=self.engine.sync.clock)
        return self.engine

    def _keep_moments(self, engine: Engine) -> None:
        """Begin to keep the state of the script's optimizer, if it steps here."""
        taken, self._swaps = engine.swaps > self._swaps, engine.swaps
        where = (self.rank, self.config.checkpoint_dir, self.began_unix)
        self.moments = OptimizerStateFile.of(engine, engine.changes.owned, lambda: self.clock, *where, taken=taken)

    def stepped(self) -> None:
        """Note what a step has cost. The row is written before the next step, with the values of record() until then.

        Raises NarrowsError after too many skipped steps in a row.
        """
        self._flush()
        goes_on()
        self.tell_children()
        if self.moments is None and self.engine is not None and self.engine.swaps > self._swaps:
            self._keep_moments(self.engine)  # the start of the run is over
        if self.moments is not None:
            self.moments.stepped()
        if (engine := self.engine) is None:
            return
        skips = engine.skips
        if self.tells and skips.newest:
            _tell("skipped", rank=self.rank, clock=engine.sync.clock, tensor=skips.newest)
            if first := skips.first(self.step_count):
                _say(first)
        if ends := skips.too_many():
            raise NarrowsError(ends)
        if not self.tells:
            return
        sync, took = engine.sync, self.figures.stepped(self.batch)
        up, down = self.link.bytes_up, self.link.bytes_down
        self._pending = {
            "clock": sync.clock,
            "push_bytes": up - self._bytes[0],
            "pull_bytes": down - self._bytes[1],
            "staleness": sync.staleness,
            **took,
            **self.figures.merging,
        }
        if self.steps:
            self.record({"total_steps": self.steps})
        self._bytes = (up, down)
        if warning := self.figures.warning():
            _say(warning)
        if late := sync.take_late():
            _tell("late", clock=sync.clock, age=late)
        if engine.privacy is not None and engine.hides and sync.clock // EPSILON_EVERY > self._told:
            self._tell_privacy(sync.clock, engine.privacy)
        while engine.tuning.switches:
            clock, switch = engine.tuning.switches.pop(0)
            _tell("compress", clock=clock, **{"from": switch.before, "to": switch.after}, reason=switch.reason)

    def tell_children(self) -> None:
        child_process.tell(self.rank, self.world_size, self.clock, self.step_count)

    def _tell_privacy(self, clock: int, privacy: UpdatePrivacy) -> None:
        self._told = clock // EPSILON_EVERY
        _tell("privacy", clock=clock, **privacy.figures())

    def record(self, values: dict[str, float]) -> None:
        if self.tells:
            self._pending |= values
            if self.engine is not None:
                self.figures.record(values)
        if self.engine is not None and self.engine.finished:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            _tell("step" if "clock" in self._pending else "last", **self._pending)
            self._pending = {}

    def close(self, failed: bool, stopped: bool = False) -> None:
        """End the session at exit of the script.

        Args:
            failed: the script has raised an error, so the worker leaves without finishing.
            stopped: a signal has ended the script, so a gossip worker hands its model over before it leaves.
        """
        engine = self.engine
        try:
            if engine is not None and not engine.finished:
                if stopped:
                    engine.stopped()
                elif failed:
                    engine.leave(-1)
                else:
                    engine.finish()
            elif engine is None:
                self.link.leave(-1)
            self._flush()
            if engine is not None and engine.privacy is not None and engine.hides:
                self._tell_privacy(engine.sync.clock, engine.privacy)
            if self.tells:
                if engine is not None:
                    self.figures.end()
                up, down = self.link.bytes_up, self.link.bytes_down
                edges = [n - max(0, by - at) for n, by, at in zip((up, down), self._bytes, self._begun, strict=True)]
                _tell("bytes", up=up, down=down, edges=edges, dropped=self.link.drops.counts, ways=[*self.link.ways])
                tell_store(self.link, self.rank)
        finally:
            self.keep()
            self.link.close()
            if self.group is not None and not failed:
                self.group.close()

    def keep(self) -> None:
        """Write the optimizer's state to its file, however the session ends."""
        if self.moments is not None:
            self.moments.end()


Session = LocalSession | RunSession | WorkerOfChild

_session: Session | None = None
_forwarding = LoggerForwarding()
shares_asked = 0  # calls of rank() and world_size() so far, also by datasets that cut themselves
watch = ScriptWatch.of_environment(_tell)  # None unless ps-worker --check runs this script
_failed = _stopped = False
_launcher_fd = -1  # a pipe that ends with the ps-worker that started this process; -1: none did


def current() -> Session:
    """Return the session of this process, opened at the first call. A forked process gets a session of its own."""
    global _session
    if _session is None or _session.pid != os.getpid():
        _session = _opened()
    return _session


def _opened() -> Session:
    address: str = told("server")
    if child_process.is_child():
        return WorkerOfChild()
    if not address:
        alone = LocalSession()
        if alone.parent is None:
            child_process.announce(child_process.ALONE)
        return alone
    launcher_pipe.find()
    _install_hook()
    leave_when_told()
    child_process.announce(child_process.RUN)
    connected = RunSession(address)
    connected.tell_children()
    atexit.register(only_here(_at_exit))
    return connected


def of_new_training() -> Session:
    """Return the session for a new DistributedOptimizer.

    A script without a run may train several times, one after the other. Each training then has a session of its own,
    which counts its steps from 0.
    """
    global _session
    ours = current()
    if not isinstance(ours, LocalSession):
        return ours
    if (begun := ours.begin()) is not ours:
        child_process.announce(child_process.ALONE)
        _session = begun
    return begun


def tell_alone(model: torch.nn.Module) -> None:
    """Warn if a manager, such as torchrun, has started several processes that each train without a server.

    The first process prints the warning. Processes that the script itself joins, by DDP or DTensor, get none.
    """
    with contextlib.suppress(UsageError):  # a manager's variable that is not a number
        here = place(os.environ)
        joined = isinstance(model, DistributedDataParallel) or any(hasattr(p, "placements") for p in model.parameters())
        if not joined and (here.world_size or 1) > 1 and not here.rank and not current().training:
            _say(
                f"{here.manager} has started {here.world_size} processes, and NARROWS_SERVER names no server: each of them "
                "trains alone, unless the script itself joins them, as DDP does. Start ps-serve and set NARROWS_SERVER, with "
                f"NARROWS_GROUP=1 where they are one worker; or start ps-worker -n {here.world_size}"
            )


def _watch_launcher(address: str, token: str, key: SecretKeyFile | None, parent_fd: int) -> None:
    """Start a thread that waits for the end of the ps-worker that started this process.

    Then it tells the coordinator that the worker has left, and ends this process group, which has only processes of
    this script.
    """

    global _launcher_fd

    def watch() -> None:
        os.read(parent_fd, 1)  # ps-worker writes nothing: the read returns when ps-worker ends
        tell_left(address, token, key)
        _end_group()

    if parent_fd >= 0:
        _launcher_fd = parent_fd
        atexit.register(only_here(_end_group))  # the script may end before the thread sees it
        threading.Thread(target=watch, name="narrows-launcher", daemon=True).start()


def _end_group(within_s: float = 0.0) -> None:
    """Kill the process group if its ps-worker has died: no other process ends what this script has started.

    Args:
        within_s: ps-worker may be dying, and counts as dead if it is within this time.
    """
    ended = select.poll()
    if _launcher_fd >= 0:
        ended.register(_launcher_fd, select.POLLIN)
        if ended.poll(1000 * within_s):
            os.killpg(os.getpid(), signal.SIGKILL)


def _end(error: NarrowsError) -> NoReturn:
    """Print `error`, which is one sentence and needs no traceback, and end this process with its exit code."""
    if told("debug"):
        traceback.print_exception(error)
    if isinstance(error, GroupEndedError):
        time.sleep(LAST_S)  # the process that failed first ends first; ps-worker reports it, and ends this one
    if not launcher_pipe.find():
        launcher_pipe.say_here(str(error))
    _tell("error", code=error.exit_code, text=str(error))
    output.end()
    # A ps-worker that is killed lets go of its server's stdin first, and of this process a moment later: the server
    # may stop this process in between.
    _end_group(DYING_S if isinstance(error, ServerLostError) else 0.0)
    os._exit(error.exit_code)


def _install_hook() -> None:
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        global _failed, _stopped
        if os.getpid() != pid:
            before(kind, error, trace)
            return
        _failed, _stopped = True, isinstance(error, KeyboardInterrupt)
        if isinstance(error, NarrowsError):
            if isinstance(_session, RunSession):
                _session.link.close()
                _session.keep()
            _end(error)
        if not launcher_pipe.find() or not isinstance(error, KeyboardInterrupt):
            before(kind, error, trace)

    sys.excepthook = hook


def _at_exit() -> None:
    if isinstance(_session, RunSession):
        try:
            _session.close(_failed or told_to_end(), _stopped or told_to_end())
        except NarrowsError as error:
            _end(error)


def rank() -> int:
    """Return the rank of this worker, from 0: the lowest that was free when it joined. It opens the session.

    In a group each process has a rank of its own, below world_size().
    """
    global shares_asked
    shares_asked += 1
    return current().rank


def world_size() -> int:
    """Return the number of workers that the run was started for, times the processes of this group.

    The call opens the session.
    So rank() and world_size() cut data into disjoint shares, also if groups have different numbers of processes.
    """
    global shares_asked
    shares_asked += 1
    return current().world_size


def clock() -> int:
    """Return the run's clock, from which a script may set its epoch and its schedule.

    The clock is the number of updates that this worker has completed. With a quorum, rounds that closed without this
    worker count too.
    """
    follows("step")
    return current().clock


def follows(what: str) -> None:
    """Note for ps-worker --check that a part of the script follows the run: "step", "end" or "schedule"."""
    if watch is not None:
        watch.follows.add(what)


def makes(steps: int) -> None:
    """Note the `steps=` of a loader: the loader ends once the run has taken so many steps.

    Of several loaders the largest number counts. Raises UsageError for a negative number.
    """
    if steps < 0:
        raise UsageError(f"steps={steps}: give the steps of the whole run")
    follows("end")
    current().ends_after(steps)


def step_count() -> int:
    """Return the optimizer steps of this run so far: the clock times the local steps, plus those since.

    With --local-seconds a round counts as many steps as the worker that made the most. So the count of a slower worker
    grows by more than its own steps.
    """
    follows("step")
    return current().step_count


def agree(value: float) -> float:
    """Return one number to all workers that call agree() at the same step: the mean of their values.

    With it all workers can stop at the same step: `if agree(worse > patience) > 0.5: break`. The call waits for each
    live worker that is not past this step, also under ssp, async and gossip. It does not wait for a worker that dies. A
    worker that joins later begins after this step. In a group each process calls agree(). With --local-seconds steps are
    not alike: there each call of a round goes with the call of the same number of the others. Call once a round, as
    clock() tells: a worker that calls less often has gone past the calls that it does not make.

    Args:
        value: this worker's value, such as a loss or a bool.

    Returns:
        The mean of the values of all workers in all clusters. In a script without a run, after finish(), and under
        gossip once the server is gone: `value` itself.

    Raises:
        UsageError: in a run before DistributedOptimizer is made, or in a child process of a worker.
    """
    session = current()
    if isinstance(session, LocalSession):
        return float(value)
    if isinstance(session, WorkerOfChild):
        raise NotAWorkerError("agree()")
    if session.engine is None:
        raise UsageError("agree() before DistributedOptimizer is made: this worker has no place in the run yet")
    if session.engine.finished:
        return float(value)
    timed = session.engine.mode.seconds > 0
    return session.engine.agreeing.agree(float(value), session.clock if timed else session.step_count)


def record(**values: float) -> None:
    """Record named figures, such as loss=... or accuracy=..., for the newest step.

    They go to the record of the run, its progress line and its dashboard, and to the SummaryWriter, W&B run or MLflow
    run that the script has open.

    Args:
        values: figures by name. `total_steps` is the number of steps that the script will take.

    Raises:
        UsageError: a name is that of a figure that the run records itself (`FIGURES` in runtime/launcher_pipe.py).
    """
    launcher_pipe.check_names(values)
    session, plain = current(), {name: float(value) for name, value in values.items()}
    session.record(plain)
    _forwarding.forward(plain, session.step_count)
