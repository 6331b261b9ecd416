"""The engine: one worker's part of a run, from the declared model to the last update. The main thread owns it.

How it works

    DistributedOptimizer.step()
      Engine.step ── SyncStep.step            by the mode's rule: UpdateStep, GradientStep, StreamingStep, GossipStep
                       ready()                wait until the parameters hold what this clock computes on
                       optimize()             the script's optimizer, or none where the server steps
                       ShardExchanges.push    one Exchange a shard, over the MemberLink's I/O thread
      EventWait.poll ── Engine._handle        events of that thread: Started, Moved, StateArrived, PushSettled, ...

1. The constructor reads the model into one flat float32 space, declares it, and waits until the run starts.
2. `step` first handles the events that have come, then takes the step of this mode. A step whose gradient is not
   finite is skipped.
3. Whatever waits, waits in `EventWait.until` with a limit. Events are handled while it waits.
4. `finish` sends what is left (the residual too) and waits for the model that all workers end with.

The engine has what is the same for all modes: joining, waiting, module buffers, the shared model, skipped steps,
leaving. Each kind of step is a `SyncStep` of its own file: updates.py, gradients.py, streaming.py, gossip.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from narrows.compression.home import HOST, Home
from narrows.protocols import effects as e
from narrows.protocols.config.modes import Rule
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import START_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker.group.event_wait import EventWait
from narrows.worker.group.group import Group
from narrows.worker.model.arrays import SPARE, WorkerArrays
from narrows.worker.model.device_placement import home_of
from narrows.worker.model.flat import Array, FlatModel, FloatArray
from narrows.worker.model.model_slices import ModelCut, ModelSlice
from narrows.worker.model.module_buffers import BufferState
from narrows.worker.model.not_finite import Named, SkippedSteps, first_not_finite, unscale
from narrows.worker.model.optimizer_scaling import degree_of
from narrows.worker.model.optimizers import needs_closure
from narrows.worker.model.privacy import UpdatePrivacy
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.sync.agreement import Agreement
from narrows.worker.sync.embedding_tables import EmbeddingTables, dense_of
from narrows.worker.sync.gossip import GossipStep
from narrows.worker.sync.gradients import GradientStep, rebuilt_by
from narrows.worker.sync.shared_model import SharedModel
from narrows.worker.sync.step import SyncStep
from narrows.worker.sync.streaming import StreamingStep
from narrows.worker.sync.tuning import CodecTuning
from narrows.worker.sync.updates import UpdateStep, clipped_step, evaluated

LEAVE_LIMIT_S = 5.0
ROUNDED = (
    "{!r}{} has 64-bit values, which a run carries as float32: it is rounded to 24 bits from the first step on; keep what "
    "needs more out of the optimizer"
)


class Engine:
    """Raises UsageError for what cannot be pushed, IncompatibleError where the model is not the run's."""

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
    ) -> None:
        """`overlap`: backward passes of a step whose gradients leave during the last one; 0: they leave at step(). `group`: of
        which this process is one rank. `rank`: of this process in the run, for what it says."""
        self.link, self.settings, self.mode = link, settings, settings.mode()
        self.waiting = EventWait(link, group, self._handle)
        self.model, self.inner, self.max_grad_norm = model, inner, max_grad_norm
        self.tables = EmbeddingTables(model, inner)
        self.tables.check(group is not None, bool(overlap), max_grad_norm)
        self.flat = FlatModel(model, self.dense, self.tables.weights)
        if rounded := [*self.flat.rounded, *self.tables.rounded]:
            say(ROUNDED.format(rounded[0], f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""))
        self.privacy = UpdatePrivacy.of(settings)
        if self.privacy is not None:
            self.privacy.check(model)
        self.buffers = BufferState(model, self.hides)
        self.home: Home[Array]
        self.home, self.told = home_of(self.flat, self._why_host())
        if self.home is not HOST:
            self.told = f"device {self.home.name}: --compress {settings.compress} is computed there"
        self.slice = self._slice(inner, overlap)
        if self.slice is not None:
            self.slice.finite = self._finite
        self.tuning = CodecTuning(settings, -(-self.flat.size // self.mode.fragments))
        self.finished = self.left = self._started = False
        self.agreeing = Agreement(self)
        self.skips = SkippedSteps.of_environment(rank)
        self.shared = SharedModel(self)
        gradients = self.mode.rule is Rule.OPTIMIZER
        declared = (rebuilt_by(self.dense), max_grad_norm) if gradients else ("", 0.0)
        # The degree is of a cluster's steps too, which are updates to a server above.
        plan = (self.slice or self.flat).plan(*declared, degree_of(self.dense))
        self.sync = self._sync(overlap)
        packed = replace(plan, tables=tuple(self.tables.specs)).packed()
        if isinstance(self.sync, GossipStep):
            self.sync.plan(packed)
        link.declare(packed)
        others = (
            "the server" if settings.workers == 1 else f"all of {settings.workers} workers, which the run begins with"
        )
        self.wait(lambda: self._started, START_LIMIT_S, others)
        self.sync.ready(START_LIMIT_S)
        self._spread()
        self.tables.begin(self.sync.shards, self.wait, self.settings)

    def _why_host(self) -> str:
        """Why the arrays of this worker stay on the host in this mode, "": they need not."""
        return "--dp-clip looks at updates there" if self.privacy is not None else ""

    def _slice(self, inner: torch.optim.Optimizer, overlap: int) -> ModelSlice | None:
        """Make this process's slice of the model, where it is one of several. Raises UsageError where these cannot."""
        if self.group is None:
            return None
        why = "under --sync gossip whole models are mixed" if self.mode.rule is Rule.MIX else ""
        why = "--dp-clip needs the length of whole updates" if self.privacy is not None else why
        why = "with overlap=True gradients leave before the group has summed them" if overlap else why
        if why:
            raise UsageError(f"{why}, and each process of a group has a slice: leave out one of the two")
        if not any(hasattr(parameter, "placements") for parameter in self.flat.parameters):
            return ModelCut(self.flat, inner, self.group)
        from narrows.worker.model.fsdp_slices import FsdpSlices  # and FSDP, which most scripts do without

        return FsdpSlices(self.flat, inner, self.group)

    def _sync(self, overlap: int) -> SyncStep:
        """Make the kind of step of this mode."""
        mode, rule, flat = self.mode, self.mode.rule, self.slice or self.flat
        if rule is Rule.MIX:
            if overlap:
                raise UsageError("overlap=True: under --sync gossip no gradient leaves a worker; leave it out")
            return GossipStep(self)
        if rule is Rule.OPTIMIZER:
            direct, rounds = mode.bound == 0 and self.flat.plain and self.tuning.down_lossless, mode.window + 2
            direct = direct and self.home is HOST and self.slice is None
            lends = self.privacy is None and self.slice is None  # else the next step writes where they lie
            arrays = WorkerArrays(flat, shared=True, direct=direct, rounds=rounds, lends=lends, home=self.home)
            return GradientStep(self, arrays, overlap)
        # A fragment is merged before it is pushed again, so it never has more than one update.
        rounds = 3 if mode.merges else mode.window + SPARE
        arrays = WorkerArrays(flat, shared=False, direct=False, rounds=rounds, home=self.home)
        return (StreamingStep if mode.merges else UpdateStep)(self, arrays)

    @property
    def dense(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters, without those of tables alone."""
        return dense_of(self.inner, self.model, self.tables)

    @property
    def group(self) -> Group | None:
        """The group in which this process is one rank, if any."""
        return self.waiting.group

    @property
    def hides(self) -> bool:
        """Whether noise is added to all that leaves this worker; nothing else leaves it."""
        return self.privacy is not None and self.privacy.hides

    @property
    def overlaps(self) -> bool:
        """Gradients leave before step()."""
        return isinstance(self.sync, GradientStep) and self.sync.passes > 0

    # Events.

    def wait(self, done: Callable[[], bool], limit_s: float, what: str, others: bool = False) -> None:
        """See Waiting.until."""
        began = time.monotonic()
        self.waiting.until(done, limit_s, what, others)
        self.tuning.waited(time.monotonic() - began)

    def _handle(self, event: MemberEffect) -> None:
        if isinstance(event, (e.Started, e.Moved)):
            self._change(Settings.unpacked(event.settings))
        if isinstance(event, e.Started):
            self._started = True
            self.buffers.load(event.buffers)
            self.sync.begin(event)
        elif isinstance(event, e.BuffersWanted):
            self.send_buffers()
        elif isinstance(event, e.BuffersTold):
            self.shared.heard(event.packed)
        elif isinstance(event, e.RowsArrived):
            self.tables.arrived(event)
        elif isinstance(event, e.Left):
            self.left = True
        else:
            self.agreeing.handle(event)
            self.sync.handle(event)

    def _change(self, settings: Settings) -> None:
        """The run may have another plan, which says how updates of ours are coded and waited for from now on."""
        if settings.plan_number != self.settings.plan_number:
            self.mode = settings.mode()
            self.tuning.change(settings)
        self.settings = settings

    def send_buffers(self) -> None:
        """To the coordinator, which hears those of the live worker with the lowest rank."""
        if packed := self.buffers.packed():
            self.link.buffers(packed, self.sync.buffers_clock)

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if self.finished:
            raise UsageError("step() after finish(): the run is over for this worker")
        if self.shared.kept is not None:
            raise UsageError("step() while the shared model is shown: call optimizer.train() first, or leave shared()")
        self.waiting.calls("step()")
        self.waiting.poll()
        self.shared.changes.look()
        self.skips.begin()
        loss = self.sync.step(closure)
        self.sync.steps += 1
        self.skips.stepped()
        self.buffers.statistics.stepped(bool(self.skips.newest))
        self.shared.changes.owned.look(self.sync.steps)
        self._spread()
        return loss

    def optimize(self, closure: Callable[[], Any] | None) -> Any:
        """One step of the script's optimizer, along the gradients of all ranks of a group; none where one is not finite."""
        if self.slice is not None:
            loss = evaluated(closure)
            if self.reduce():
                self.slice.step(self.max_grad_norm)
            return loss
        again = closure is not None and needs_closure(
            self.inner
        )  # it may call it again, once it has moved the parameters
        before = self.flat.kept() if again else None
        loss = clipped_step(self.inner, self.flat.parameters, self.max_grad_norm, closure, self._finite)
        if before is not None and self.skips.newest:
            self.flat.put_back(before)
            self.flat.written()
        return loss

    def reduce(self) -> bool:
        """The gradients are those of all ranks of a group. False: one is not finite, and there is none."""
        if self.slice is None:
            return self._finite()
        if self.slice.reduce():
            if self.slice.counted:  # the next push weighs as the samples of all ranks
                self.sync.weigh(self.slice.counted)
            return True
        names = [name.decode() for name in self.slice.group.told(self.skips.newest.encode())]
        self.skips.newest = next(f"{name} of process {rank}" for rank, name in enumerate(names) if name)
        return False

    # Gradients that are not finite.

    def _finite(self) -> bool:
        """Whether the gradients of this process are. Those that a GradScaler has scaled are unscaled then."""
        gradients = [(repr(n), p.grad) for n, p in zip(self.flat.names, self.flat.parameters, strict=True)]
        named = [(name, gradient) for name, gradient in gradients if gradient is not None]
        self.skips.quiet, scale = self.skips.told()
        if self.slice is not None:
            self.slice.scale = scale
        elif self.skips.scale is not None and not self.skips.quiet:
            unscale([gradient for _, gradient in named], self.skips.scale)
        if self.skips.overflow is not None and not self.skips.quiet:
            return True
        return self.looked([*named, *self.tables.gradients()], "some tensor" if self.skips.quiet else "")

    def looked(self, gradients: Named, unless: str = "") -> bool:
        """Whether these gradients of a step are finite; else nothing is left of them. `unless`: that is so where all are."""
        self.skips.newest = first_not_finite(gradients) or unless
        if self.skips.newest:
            self.tables.drop()
            for _, gradient in gradients if self.hides else ():
                gradient.zero_()
        return not self.skips.newest

    def take(self, samples: int, size: int, limit: int) -> tuple[int, int]:
        """See Taking.take; and how many the next step has now. Raises UsageError for a mode whose updates do not say which
        samples are in them."""
        if not isinstance(self.sync, UpdateStep):
            raise UsageError(
                "ranges(): under --sync gossip no server knows which updates are in the model: use sampler()"
            )
        if self.mode.streams:
            raise UsageError(
                "ranges(): with --fragments, --merge-delay or --merge-alpha a step is in several updates; use sampler(), or "
                "leave out the flag"
            )
        index = self.sync.taking.take(samples, size, limit)
        self._spread()
        return index, self.sync.taking.fresh

    def weigh(self, samples: int) -> None:
        """The gradient of this step was computed on so many samples."""
        if self.slice is not None:
            self.slice.samples += samples
        else:
            self.sync.weigh(samples)

    def meet(self, call: str) -> None:
        """The script has called this, on all ranks of a group."""
        self.waiting.calls(call)
        self.waiting.agree()

    def load_residual(self, whole: FloatArray) -> None:
        self.sync.load_residual(whole)
        self._spread()

    def _spread(self) -> None:
        if self.slice is not None:
            self.slice.spread()
        self.shared.changes.ours()

    # The shared model and the end.

    def finish(self, last: bool = True) -> None:
        """Send what is left, take the model that all end with, and leave. Not `last`: take the shared model as it is, and wait
        for no other worker."""
        if self.finished:
            return
        self.waiting.poll()
        self.meet("finish()" if last else "leave()")
        if isinstance(self.sync, UpdateStep):
            self.sync.taking.give_back()
        self.shared.end(self.sync.flush(last), own=self.mode.rule is Rule.MIX and not last)
        self.send_buffers()
        self.leave(self.sync.final_clock)

    def stopped(self) -> None:
        """This worker was told to stop before its last step: leave."""
        if isinstance(self.sync, GossipStep):
            self.sync.stopped()
        self.leave(-1)

    def leave(self, clock: int) -> None:
        """Tell the coordinator, and wait a little for its answer."""
        self.finished, self.left = True, False
        self.tables.end()
        leads = self.group is None or self.group.leads
        self.waiting.alone()
        self.link.leave(clock)
        if not leads:
            return
        try:
            self.wait(lambda: self.left, LEAVE_LIMIT_S, "the server to take leave")
        except NarrowsError:
            return  # its lease will tell
