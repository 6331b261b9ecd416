"""The engine: one worker's part of a run, from the declared model to the last update. The main thread owns it.

How it works

    DistributedOptimizer.step()
      Engine.step ── SyncStep.step            by the mode's rule: UpdateStep, GradientStep, StreamingStep, GossipStep
                       Engine.optimize        the script's optimizer; none where the server steps
                       ShardExchanges.push    one Exchange a shard, over the MemberLink's I/O thread
                       SyncStep.ready         wait until the parameters hold what the next clock computes on
      EventWait.poll ── Engine._handle        events of that thread: MemberStarted, StateArrived, PushSettled, ...

1. The constructor lays the model out as one flat float32 space, declares it to the server, and waits until the run
   starts.
2. `step` first handles the events that have arrived, then takes the step of this mode. A step whose gradient is not
   finite is skipped.
3. Every wait is a call of `EventWait.until` with a limit. The engine handles events while it waits.
4. `finish` sends the local steps and the residual that are left, and waits for the model that all workers end with.

The engine does what is the same in all modes: joining, waiting, module buffers, the shared model, skipped steps,
leaving. Each kind of step is a `SyncStep` in a file of its own: updates.py, gradients.py, streaming.py, gossip.py.

A run with --start-steps has a start in bsp, and then another plan. When the new plan arrives, `_swap` makes the
`SyncStep` of that plan, over the same arrays and exchanges. `change_over` waits for it between two steps, and takes the
state of the servers' optimizer over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from narrows.compression.home import HOST, Home
from narrows.protocols import effects as e
from narrows.protocols.config.key_ranges import VALUES
from narrows.protocols.config.memory import in_place, update_buffers
from narrows.protocols.config.modes import FoldRule, Mode
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import START_LIMIT_S, WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker.checkpoint.server_state import take_over
from narrows.worker.group.event_wait import EventWait
from narrows.worker.group.group import Group
from narrows.worker.model.arrays import WorkerArrays
from narrows.worker.model.device_placement import home_of
from narrows.worker.model.flat import Array, FlatModel, FloatArray
from narrows.worker.model.model_slices import ModelCut, ModelSlice
from narrows.worker.model.module_buffers import BufferState
from narrows.worker.model.not_finite import SkippedSteps
from narrows.worker.model.optimizer_scaling import degree_of
from narrows.worker.model.optimizers import needs_closure
from narrows.worker.model.privacy import UpdatePrivacy
from narrows.worker.model.weight_edit_check import WeightEditCheck
from narrows.worker.runtime.config import WorkerConfig
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.runtime.trace import StepTrace
from narrows.worker.sync.agreement import Agreement
from narrows.worker.sync.embedding_tables import EmbeddingTables, dense_of
from narrows.worker.sync.gossip import GossipStep
from narrows.worker.sync.gradients import GradientStep, rebuilt_by
from narrows.worker.sync.shared_model import SharedModel
from narrows.worker.sync.streaming import StreamingStep
from narrows.worker.sync.sync_step import SyncStep
from narrows.worker.sync.tuning import CodecTuning
from narrows.worker.sync.updates import UpdateStep, clipped_step, evaluated

LEAVE_LIMIT_S = 5.0
ROUNDED = (
    "{!r}{} has 64-bit values, which a run carries as float32: it is rounded to 24 bits from the first step on; keep what "
    "needs more out of the optimizer"
)


def why_no_group(mode: Mode, private: bool, overlap: int) -> str:
    """Return why a group of processes cannot be a worker in this mode; "" if it can.

    Args:
        mode: the resolved mode.
        private: `--dp-clip` is given.
        overlap: backward passes of a step whose gradients leave early; 0: none.
    """
    reasons = (
        (overlap > 0, "with overlap=True gradients leave before the group has summed them"),
        (private, "--dp-clip needs the length of whole updates"),
        (mode.rule is FoldRule.MIX, "under --sync gossip whole models are mixed"),
    )
    return next((why for found, why in reasons if found), "")


def why_no_ranges(mode: Mode) -> str:
    """Return why the run cannot hand out ranges of samples in this mode; "" if it can."""
    if mode.rule is FoldRule.MIX:
        return "under --sync gossip no server knows which updates are in the model: use sampler()"
    if mode.streams:
        return (
            "with --fragments, --merge-delay or --merge-alpha a step is in several updates; use sampler(), or leave out "
            "the flag"
        )
    return ""


ALONE = WorkerConfig()


class Engine:
    """One worker's part of a run. The constructor returns once the run has started and the parameters hold its model.

    Raises:
        UsageError: this mode cannot push these parameters, or cannot use this optimizer.
        IncompatibleError: the model is not the model of the run.
    """

    def __init__(
        self,
        link: MemberLink,
        settings: Settings,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        max_grad_norm: float,
        overlap: int = 0,
        group: Group | None = None,
        rank: int = 0,
        config: WorkerConfig = ALONE,
    ) -> None:
        """Join the run with this model.

        Args:
            link: the session with the server, which has joined.
            settings: the settings of the run, from the server.
            model: the module that is trained.
            inner: the script's optimizer; several as a `CombinedOptimizer`.
            max_grad_norm: the L2 norm to which gradients are clipped; 0: gradients are not clipped.
            overlap: backward passes of a step, if gradients leave during the last of them; 0: gradients leave at
                step().
            group: the group in which this process is one rank, if any.
            rank: the rank of this process in the run, for messages to the user.
            config: what this process was told.
        """
        self.config = config
        self.link, self.settings, self.mode, self.group = link, settings, settings.mode(), group
        self.model, self.inner, self.max_grad_norm = model, inner, max_grad_norm
        self.tables = EmbeddingTables(model, inner)
        self.tables.check(group is not None, bool(overlap), max_grad_norm)
        self.dense = dense_of(inner, model, self.tables)
        self.flat = FlatModel(model, self.dense, self.tables.weights)
        if rounded := [*self.flat.rounded, *self.tables.rounded]:
            say(ROUNDED.format(rounded[0], f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""))
        self.privacy = UpdatePrivacy.of(settings)
        if self.privacy is not None:
            self.privacy.check(model)
        self.hides = self.privacy is not None and self.privacy.hides
        self.buffers = BufferState(model, self.hides)
        self.home: Home[Array]
        self.home, self.device_notice = home_of(self.flat, self._why_host())
        if self.home is not HOST:
            self.device_notice = f"device {self.home.name}: --compress {settings.compress} is computed there"
        self.skips = SkippedSteps(config.skip_limit, rank, self.flat, self.tables, self.hides)
        self.slice = self._slice(inner, overlap)
        self.trace = StepTrace()
        self.tuning = CodecTuning(settings, self.flat.size, self.trace)
        self.waiting = EventWait(link, group, self._handle, lambda: self.sync.shards.standing, self.trace)
        self.finished = self.left = self._started = False
        self.steps = self.swaps = 0  # steps that the script has taken; changes of `sync`
        self.overlap = overlap
        # The step of another plan awaits its first state; this worker is to take over the state of the servers' optimizer.
        self._swapped = self._takes = False
        self._in_place = False  # as `Member.in_place`
        self.before_step: list[Callable[[], object]] = []  # called before the script's optimizer changes its state
        self.agreeing = Agreement(self)
        self.changes = WeightEditCheck(self.flat, self.tables.weights, settings)
        self.shared = SharedModel(self)
        gradients = self.mode.rule is FoldRule.OPTIMIZER or settings.start_steps > 0
        if settings.start_steps > 0 and self.slice is not None and not isinstance(self.slice, ModelCut):
            raise UsageError(
                f"--start-steps {settings.start_steps}: FSDP has cut the model, and no process could take over the state of "
                "the servers' optimizer; start the server without a start"
            )
        if settings.start_steps > 0 and self.tables.specs:
            raise UsageError(
                f"--start-steps {settings.start_steps}: the rows of an embedding table stay with one mode; start the server "
                "without a start"
            )
        kinds = rebuilt_by(self.dense, settings.cut, settings.start_steps > 0) if gradients else ""
        declared = kinds, max_grad_norm if gradients else 0.0
        # The optimizer's degree (0 AdamW, 1 SGD) holds for a cluster too: its parent receives the cluster's steps as updates.
        plan = (self.slice or self.flat).plan(*declared, degree_of(self.dense))
        self.sync: SyncStep = self._sync()
        packed = replace(plan, tables=tuple(self.tables.specs)).packed()
        if isinstance(self.sync, GossipStep):
            self.sync.plan(packed)
        link.declare(packed)
        others = (
            "the server" if settings.workers == 1 else f"all of {settings.workers} workers, which the run begins with"
        )
        self.waiting.until(lambda: self._started, START_LIMIT_S, others)
        self.sync.ready(START_LIMIT_S)
        self._spread()
        self.tables.begin(self.sync.shards)

    def _why_host(self) -> str:
        """Return the reason why this worker's arrays must stay on the host in this mode; "" if there is none."""
        return "--dp-clip looks at updates there" if self.privacy is not None else ""

    def _slice(self, inner: torch.optim.Optimizer, overlap: int) -> ModelSlice | None:
        """Make this process's slice of the model, if it is one rank of a group; else return None.

        Raises UsageError for a mode, flag or sharded model that a group, or a worker without one, cannot have.
        """
        sharded = any(hasattr(parameter, "placements") for parameter in self.flat.parameters)
        if sharded:  # the file imports FSDP, which most scripts do not use
            from narrows.worker.model.fsdp_slices import FsdpSlices, check_alone
        if self.group is None:
            if sharded:
                check_alone(self.flat, overlap)
            return None
        if why := why_no_group(self.mode, self.privacy is not None, overlap):
            raise UsageError(f"{why}, and each process of a group has a slice: leave out one of the two")
        if sharded and self.settings.cut != VALUES:
            raise UsageError(
                f"--cut {self.settings.cut}: FSDP has cut the tensors over its processes; start the server with --cut {VALUES}"
            )
        if not sharded:
            return ModelCut(self.flat, inner, self.group, self.skips.check)
        return FsdpSlices(self.flat, inner, self.group, self.skips.check)

    def _sync(self, before: UpdateStep | None = None) -> SyncStep:
        """Make the `SyncStep` of this mode. `before`: the step of another kind, whose place it takes."""
        mode, rule, flat = self.mode, self.mode.rule, self.slice or self.flat
        rounds = update_buffers(mode, self.settings.quorum)
        if rule is FoldRule.MIX:
            if self.overlap:
                raise UsageError("overlap=True: under --sync gossip no gradient leaves a worker; leave it out")
            return GossipStep(self)
        gradients, direct, lends = rule is FoldRule.OPTIMIZER, False, True
        if gradients:
            direct = in_place(mode, self.tuning.down_lossless, not self.flat.plain)
            direct = direct and self.home is HOST and self.slice is None and (before is None or self._in_place)
            lends = self.privacy is None and self.slice is None  # else gradients change where they lie
            if direct and before is None:
                self._in_place = True
                self.link.write_in_place()
        if before is None:
            arrays = WorkerArrays(flat, gradients, direct, rounds, lends, self.home)
        else:
            arrays = before.arrays
            arrays.become(gradients, direct, rounds, lends)
        if gradients:
            return GradientStep(self, arrays, self.overlap, before)
        return (StreamingStep if mode.merges else UpdateStep)(self, arrays, before)

    @property
    def overlaps(self) -> bool:
        """True if gradients leave before step()."""
        return isinstance(self.sync, GradientStep) and self.sync.passes > 0

    @property
    def step_count(self) -> int:
        """The optimizer steps of the run so far: the clock times the local steps, plus those since.

        In rounds by the clock a round counts as many steps as the worker that made the most.
        """
        if not self.mode.seconds:
            return self.settings.steps_at(self.sync.clock) + self.sync.local_step
        before = self.sync.shards.run_steps if self.group is None else self.waiting.steps
        return before + self.sync.local_step

    # Events.

    def _handle(self, event: MemberEffect) -> None:
        if isinstance(event, (e.MemberStarted, e.MemberResharded)):
            self._change(Settings.unpacked(event.settings), event)
        if isinstance(event, e.MemberStarted):
            self._started = True
            self.buffers.load(event.buffers)
            self.sync.begin(event)
        elif isinstance(event, e.BuffersRequested):
            self.send_buffers()
        elif isinstance(event, e.BuffersArrived):
            self.shared.heard(event.packed)
        elif isinstance(event, e.RowsArrived):
            self.tables.arrived(event)
        elif isinstance(event, e.MemberLeft):
            self.left = True
        else:
            if isinstance(event, (e.AgreementArrived, e.MemberResharded)):
                self.agreeing.handle(event)
            self.sync.handle(event)

    def _change(self, settings: Settings, event: e.MemberStarted | e.MemberResharded) -> None:
        """Take over the settings of the run. A new plan changes how this worker codes updates and waits for them."""
        before, self.settings = self.settings, settings
        self._takes = settings.hands_over(event.clock)
        if settings.plan_number == before.plan_number:
            return
        self.mode = settings.mode()
        self.tuning.change(settings)
        if settings.starting == before.starting:
            return
        self._swap()
        self._swapped = isinstance(event, e.MemberResharded)  # after a rejoin `UpdateStep.resume` waits for the state
        if not (settings.starting or self._takes) and isinstance(event, e.MemberStarted) and event.again:
            say(f"the start of the run has ended without this worker: its optimizer begins anew at clock {event.clock}")

    def _swap(self) -> None:
        """Take the steps of the present plan from now on: it pushes updates where the one before pushed gradients."""
        before = self.sync
        assert isinstance(before, UpdateStep)
        before.shards.drop()
        self.sync = self._sync(before)
        before.end_kind()
        self.changes.change(self.settings)
        self.swaps += 1

    def change_over(self, last: bool = False) -> None:
        """Between two steps: wait for the plan after the start, if this clock is its first, and begin to take its steps.

        Where the start has ended at this clock, this worker takes over the state of the servers' optimizer.

        Args:
            last: no step follows, so that this worker needs no state.
        """
        if self.finished:
            return
        if self.settings.starting:
            self.waiting.until(lambda: not self.sync.shards.held, WAIT_LIMIT_S, "the end of the start")
        if self._swapped:
            self._swapped = False
            self.sync.ready()
        while self._takes and not last:
            self._takes, sync = False, self.sync  # a rejoin meanwhile may be at the same clock
            assert isinstance(sync, UpdateStep)
            states = sync.servers.once()
            if states is not None:
                self.settle()
                take_over(self, states)

    def send_buffers(self) -> None:
        """Send the module buffers to the coordinator, which uses those of the live worker with the lowest rank."""
        if packed := self.buffers.packed():
            self.link.buffers(packed, self.sync.buffers_clock)

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.finished:
            raise UsageError("step() after finish(): the run is over for this worker")
        if self.shared.kept is not None:
            raise UsageError("step() while the shared model is shown: call optimizer.train() first, or leave shared()")
        with self.trace.step:
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self.waiting.calls("step()")
        self.waiting.poll()
        self.change_over()
        self.changes.look()
        self.skips.begin()
        sync = self.sync
        loss = sync.step(closure)
        if self.sync is not sync and isinstance(sync, UpdateStep) and isinstance(self.sync, UpdateStep):
            self.sync.follows(sync)  # the start of the run has ended while that step waited for its state
        self.steps += 1
        self.skips.stepped()
        self.buffers.statistics.stepped(bool(self.skips.newest))
        self.changes.owned.look(self.steps)
        self._spread()
        return loss

    def optimize(self, closure: Callable[[], Any] | None) -> Any:
        """Step the script's optimizer along the gradients, in a group along their mean over the ranks.

        If a gradient is not finite, the optimizer takes no step and the parameters stay.

        Args:
            closure: as torch's closures, or None if the script has done the backward pass.

        Returns:
            The closure's loss; None without a closure.
        """
        self.settle()
        with self.trace.script:
            return self._optimize(closure)

    def settle(self) -> None:
        """Wait until no other thread reads the state of the script's optimizer."""
        for each in self.before_step:
            each()

    def _optimize(self, closure: Callable[[], Any] | None) -> Any:
        if self.slice is not None:
            loss = evaluated(closure)
            if self.reduce():
                self.slice.step(self.max_grad_norm)
            return loss
        again = closure is not None and needs_closure(
            self.inner
        )  # LBFGS calls the closure again after it has moved the parameters
        before = self.flat.kept() if again else None
        loss = clipped_step(self.inner, self.flat.parameters, self.max_grad_norm, closure, self.skips.usable)
        if before is not None and self.skips.newest:
            self.flat.put_back(before)
            self.flat.written()
        return loss

    def reduce(self) -> bool:
        """Reduce the gradients over the ranks of a group. Returns False if a gradient of any rank is not finite."""
        if self.slice is None:
            return self.skips.usable()
        if self.slice.reduce():
            if self.slice.counted:  # the next push is weighted by the samples of all ranks
                self.sync.weigh(self.slice.counted)
            return True
        names = [name.decode() for name in self.slice.group.told(self.skips.newest.encode())]
        self.skips.skip(next(f"{name} of process {rank}" for rank, name in enumerate(names) if name))
        return False

    def take(self, samples: int, size: int, limit: int) -> tuple[int, int]:
        """Take a range of samples, as `SampleClient.take` does.

        Args:
            samples: samples of an epoch.
            size: samples of a range; the last range of an epoch may be shorter.
            limit: a range has a number below this one. Ranges are numbered through all epochs.

        Returns:
            The number of the range, or -1, and the number of ranges that are taken for the next step.

        Raises:
            UsageError: in this mode an update does not say which samples it was computed on.
        """
        if why := why_no_ranges(self.settings.flagged().mode() if self.settings.starting else self.mode):
            raise UsageError(f"ranges(): {why}")
        assert isinstance(self.sync, UpdateStep)
        index = self.sync.taking.take(samples, size, limit)
        self._spread()
        return index, self.sync.taking.fresh

    def weigh(self, samples: int) -> None:
        """Weight this step by the number of samples that its gradient was computed on. Calls add up."""
        if self.slice is not None:
            self.slice.weigh(samples)
        else:
            self.sync.weigh(samples)

    def meet(self, call: str) -> None:
        """Check that all ranks of a group have called `call`, a name of `event_wait.CALLS`."""
        self.waiting.calls(call)
        self.waiting.agree()
        if call in ("state_dict()", "load_state_dict()", "finish()", "leave()"):
            self.change_over(last=call in ("finish()", "leave()"))

    def load_residual(self, whole: FloatArray) -> None:
        self.sync.load_residual(whole)
        self._spread()

    def _spread(self) -> None:
        if self.slice is not None:
            self.slice.spread()
        self.flat.written()

    # The shared model and the end.

    def finish(self, last: bool = True) -> None:
        """Send the residual, take the model that all workers end with, and leave.

        Args:
            last: False takes the shared model as it is now, and waits for no other worker.
        """
        if self.finished:
            return
        self.waiting.poll()
        self.meet("finish()" if last else "leave()")
        if isinstance(self.sync, UpdateStep):
            self.sync.taking.give_back()
        self.shared.end(self.sync.flush(last), own=self.mode.rule is FoldRule.MIX and not last)
        self.send_buffers()
        self.leave(self.sync.final_clock)

    def stopped(self) -> None:
        """Leave, because this worker was stopped before its last step. Under gossip it hands over its model first."""
        if isinstance(self.sync, GossipStep):
            self.sync.stopped()
        self.leave(-1)

    def leave(self, clock: int) -> None:
        """Tell the coordinator that this worker leaves, and wait up to LEAVE_LIMIT_S for the answer.

        Args:
            clock: the final clock of this worker; -1: it ends before its last step.
        """
        self.finished, self.left = True, False
        self.tables.end()
        leads = self.group is None or self.group.leads
        self.group = None
        self.waiting.alone()
        self.link.leave(clock)
        if not leads:
            return
        try:
            self.waiting.until(lambda: self.left, LEAVE_LIMIT_S, "the server to take leave")
        except NarrowsError:
            return  # the coordinator learns it when this worker's lease expires
