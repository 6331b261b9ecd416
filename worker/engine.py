"""The engine: what a worker pushes, what it waits for, and the replica it computes on. The main thread owns it.

Rules
- One clock is one push to every shard. Before it computes with clock c the worker needs, from every shard, a state that is
  settled to c - s: all are in of which it says so, and with a quorum, which goes on without who is late, its own. Right
  after a push it asks for the state that the next clock needs, so that with s >= 1 the link's time lies under the next
  forward and backward.
- The replica is composed shard by shard (protocols/view.py), and then is what the parameters show.
- Where the mode merges (local steps at a barrier), inner steps go on after a push. `merge_delay` of them later the worker
  waits for the state with that clock in it, and takes global values G = the replica of that fragment into its local ones L:
  L = a L + (1 - a) G. The next update of the fragment is L - G (Streaming DiLoCo, 2501.18512, alg. 2).
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import narrows.compression
from narrows.compression import ErrorFeedback, NonFiniteError
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.protocols.keys import fragment, parts
from narrows.protocols.member.view import Coded, ShardView, raw_values
from narrows.protocols.modes import ELEMENTWISE, Rule, Settings
from narrows.protocols.wire import pack
from narrows.worker.flat import FlatModel, FloatArray, load_buffers, pack_buffers
from narrows.worker.overlap import Overlap
from narrows.worker.runner import Link
from narrows.worker.tuning import Tuning

START_LIMIT_S = 600.0  # the other workers of a run come within this
WAIT_LIMIT_S = 3600.0  # no barrier is waited for longer; a dead worker costs a lease, a dead server is found sooner
PLAIN = (bool, int, float, str, type(None))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def hyper_of(optimizer: torch.optim.Optimizer) -> bytes:
    """Plain hyper-parameters of each group. Raises UsageError naming one that is not plain."""
    groups = []
    known = inspect.signature(type(optimizer).__init__).parameters
    for group in optimizer.param_groups:
        values: dict[str, Any] = {}
        for name, value in group.items():
            if name == "params" or name not in known:
                continue
            value = [_plain(v) for v in value] if isinstance(value, (tuple, list)) else _plain(value)
            if not all(isinstance(v, PLAIN) for v in (value if isinstance(value, list) else [value])):
                raise UsageError(f"hyper-parameter {name!r} is no plain value: use --push update")
            values[name] = value
        groups.append(values)
    return pack(groups)


def clipped_step(
    optimizer: torch.optim.Optimizer,
    parameters: list[torch.nn.Parameter],
    norm: float,
    closure: Callable[[], Any] | None,
) -> Any:
    """`optimizer.step(closure)`; each gradient that it steps along is clipped to the L2 norm `norm`, 0: not at all."""
    if closure is None:
        if norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        return optimizer.step()

    def clipped() -> Any:
        loss = closure()
        if norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        return loss

    return optimizer.step(clipped)


class Engine:
    """One worker's part of a run, from the declared model to the last update."""

    def __init__(
        self,
        link: Link,
        settings: Settings,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        max_grad_norm: float,
        overlap: int = 0,
    ) -> None:
        """`overlap`: backward passes of a step whose gradients leave during the last one; 0: they leave at step()."""
        self.link, self.settings, self.mode = link, settings, settings.mode()
        self.model, self.inner, self.max_grad_norm = model, inner, max_grad_norm
        self.pulls = settings.pulls
        self.flat = FlatModel(model, inner)
        self.tuning = Tuning(settings, -(-self.flat.size // self.mode.fragments))
        self.gradients = self.mode.rule is Rule.OPTIMIZER
        self.worker, self.epoch, self.clock = -1, 0, 0
        self.missed = 0  # rounds that closed without an update of ours, in this life (--quorum)
        self.late = 0  # those of them that are not in the record yet
        self.composed = 0  # the epoch of the life that the replica is of
        self.local_step = 0
        self.unmerged: deque[int] = deque()  # own clocks whose state is not in the parameters yet
        self.moved = False  # a step was taken since all of the replica was composed
        self.samples = 1
        self.samples_pending = 0
        self.views: list[ShardView[ErrorFeedback]] = []
        self.pulled: FloatArray = np.zeros(self.flat.size, np.float32)
        self.replica: FloatArray = self.pulled if self.gradients else np.zeros(self.flat.size, np.float32)
        # What an update is measured from: the replica as the parameters' dtype rounds it, or the rounding of a bf16 worker
        # would be pushed into the fp32 master.
        exact = all(p.dtype == torch.float32 for p in self.flat.parameters) or self.gradients
        self.start: FloatArray = self.replica if exact else np.zeros(self.flat.size, np.float32)
        # Pushed gradients at bound 0: the parameters are the pulled state, nothing changes them but a state that step()
        # waits for, and gradients stay as they are until their push is folded. So neither needs a copy of ours.
        self.direct = self.gradients and self.mode.bound == 0 and self.flat.plain and self.tuning.down_lossless
        self.wait_s = 0.0
        self.staleness = 0
        self.finished = self.left = False
        self.final: FloatArray | None = None
        self._started = False
        name = type(inner).__name__ if self.gradients else ""
        if self.gradients and type(inner).__module__.split(".")[:2] != ["torch", "optim"]:
            raise UsageError(self._cannot_rebuild(f"{type(inner).__module__}.{name} is not in torch.optim"))
        if self.gradients and name not in ELEMENTWISE:
            raise UsageError(self._cannot_rebuild(f"{name} is not elementwise, and shards cut tensors"))
        plan = self.flat.plan(name, max_grad_norm if self.gradients else 0.0)
        packed = plan.packed()
        self.first = np.empty(self.flat.size, np.float32)
        self.flat.read(self.first)
        self.link.call(lambda member, now: member.declare(packed, now))
        self._wait(lambda: self._started, START_LIMIT_S, "the server to admit this worker")
        self._wait_ready(START_LIMIT_S)
        # Buffers of pushes: one is free again once its push is settled and no longer stands in the replica.
        # A fragment is merged before it is pushed again, so of one there is never more than one update. Under gossip the
        # mixing has arrays of its own.
        rounds = 1 if self.mode.merges else self.mode.window
        arrays = 0 if self.mode.rule is Rule.MIX else rounds + 2
        self.ring = [np.zeros(self.flat.size, np.float32) for _ in range(arrays)]
        self.overlap: Overlap | None = None
        if overlap and self.gradients:
            if not self.tuning.up_raw:
                raise UsageError(
                    f"overlap=True sends gradients part by part, --compress {self.settings.compress} codes all of them "
                    "at once: use --compress dense, or leave out overlap=True"
                )
            self.overlap = Overlap(self.flat, [(v.begin, v.end) for v in self.views], overlap, self._send_gradient)
        self._compose()
        self._open_overlap()

    @property
    def run_clock(self) -> int:
        """Of the run: our own clock, and what closed without us."""
        return self.clock + self.missed

    def _buffer(self) -> FloatArray:
        return self.ring[self.clock // self.mode.fragments % len(self.ring)]

    def _cannot_rebuild(self, why: str) -> str:
        return f"--push gradient needs an optimizer that the server can rebuild, but {why}: use --push update"

    # Events.

    def _wait(self, done: Any, limit_s: float, what: str) -> None:
        began = time.monotonic()
        while not done():
            left = began + limit_s - time.monotonic()
            if left <= 0:
                raise NarrowsError(f"waited {limit_s:.0f} s for {what}")
            event = self.link.take(min(left, 1.0))
            if event is not None:
                self._handle(event)
        self.tuning.waited_s += time.monotonic() - began

    def poll(self) -> None:
        """Handle what has arrived, without waiting."""
        while (event := self.link.take(0.0)) is not None:
            self._handle(event)

    def _handle(self, event: MemberEffect) -> None:
        if isinstance(event, e.Started):
            self._start(event)
        elif isinstance(event, e.GiveWeights):
            self._give_weights(event.shard)
        elif isinstance(event, e.StatePart):
            if self.direct:
                self.flat.write_keys(event.state.begin, raw_values(event.state))
        elif isinstance(event, e.StateArrived):
            self.views[event.shard].arrived(event)
        elif isinstance(event, e.PushSettled):
            self.views[event.shard].in_flight.discard(event.clock)
        elif isinstance(event, e.LinkSeen):
            self.tuning.seen.append(event)
        elif isinstance(event, e.BuffersWanted):
            self._send_buffers()
        elif isinstance(event, e.Left):
            self.left = True

    def _start(self, event: e.Started) -> None:
        if event.again:
            residuals = [[feedback for _, feedback in view.fragments] for view in self.views]
        else:
            residuals = [
                self._feedbacks(begin, end, event.worker << 16 | shard)
                for shard, (begin, end) in enumerate(event.ranges)
            ]
        self.views = []
        for (begin, end), feedbacks in zip(event.ranges, residuals, strict=True):
            pulled = None if self.direct else self.pulled[begin:end]
            self.views.append(ShardView(begin, end, feedbacks, self.mode, pulled, narrows.compression))
        self.worker, self.epoch, self.clock, self.missed = event.worker, event.epoch, event.clock, 0
        self._started = True
        if event.buffers:
            load_buffers(self.model, event.buffers)
        for shard in range(len(self.views)):
            self._pull(shard, self.clock)

    def _feedbacks(self, begin: int, end: int, seed: int) -> list[ErrorFeedback]:
        """One for each fragment. They may share a seed: the clocks that they encode at differ."""
        cuts = [fragment(begin, end, self.mode.fragments, index) for index in range(self.mode.fragments)]
        return [ErrorFeedback(self.tuning.compressor, high - low, seed=seed) for low, high in cuts]

    def _pull(self, shard: int, clock: int, master: bool = False, follow: bool = False) -> None:
        """Ask for a state, in the place of what was asked for; `follow`: after that."""
        view, coding = self.views[shard], self.tuning.coding
        view.pulls = view.pulls + 1 if follow else 1
        self.link.call(lambda member, now: member.pull(shard, clock, master, now, coding, follow))

    def _give_weights(self, shard: int) -> None:
        view = self.views[shard]
        cuts = list(parts(view.begin, view.end))
        whole = self.first.view(np.uint8).data
        messages = [
            m.FirstWeights(self.worker, self.epoch, i, len(cuts), b, end, m.RAW_FLOAT32, whole[4 * b : 4 * end])
            for i, (b, end) in enumerate(cuts)
        ]
        self.link.call(lambda member, now: member.first_weights(shard, messages))
        # Others may still be missing; the shard answers this pull once the run has started.
        self._pull(shard, self.clock)

    def _wait_ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Until every shard's state may be computed on with the present clock."""
        before = time.monotonic()

        def ready() -> bool:
            ok = True
            for shard, view in enumerate(self.views):
                if view.settled < 0 or not self.mode.allows(self.clock, view.settled):
                    ok = False
                    if not view.pulls:
                        self._pull(shard, self.clock)
            return ok and bool(self.views)

        self._wait(ready, limit_s, f"a state for clock {self.clock}")
        self.wait_s = time.monotonic() - before
        self._seen_settled()

    def _seen_settled(self) -> None:
        """Count what closed without us up to the states that are here."""
        self.staleness = self.clock - min(view.settled for view in self.views)
        missed = min(view.min_clock - view.settled for view in self.views)
        if self.composed == self.epoch:
            self.late += missed - self.missed
        self.missed = missed

    def _compose(self) -> None:
        """The replica, into the parameters."""
        if not self.gradients:
            for view in self.views:
                view.compose(self.clock, view.begin, view.end, self.replica[view.begin : view.end])
        if not self.direct:
            self.flat.write(self.replica)
        if self.start is not self.replica:
            self.flat.read(self.start)
        self.composed, self.moved = self.epoch, False

    # Merging.

    def _wait_folded(self, clock: int) -> None:
        """Until every shard's state has all updates before `clock`, or this worker had to join again."""
        before, epoch = time.monotonic(), self.epoch

        def folded() -> bool:
            self._ask(clock)
            return self.epoch != epoch or all(view.settled >= clock for view in self.views)

        self._wait(folded, WAIT_LIMIT_S, f"the updates before clock {clock}")
        self.wait_s += time.monotonic() - before

    def _ask(self, clock: int) -> None:
        """Ask every shard whose state lacks updates before `clock` for its next one, as soon as there is one."""
        assert self.mode.bound is not None
        for shard, view in enumerate(self.views):
            if not view.pulls and 0 <= view.settled < clock:
                self._pull(shard, view.settled + 1 + self.mode.bound)

    def _exchange(self, pushes: bool) -> None:
        """After an inner step: merge what is due, push where it is time, and merge that at once where there is no delay."""
        self.wait_s = 0.0
        if self._merge_due() and pushes:
            self._push(self._update())
            self.unmerged.append(self.clock - 1)
            self._merge_due()
        self._seen_settled()

    def _merge_due(self) -> bool:
        """Merge the clocks whose delay is over. False where this worker had to join again."""
        steps, delay = self.mode.local_steps, self.mode.merge_delay
        while self.unmerged and self.clock * steps + self.local_step >= (self.unmerged[0] + 1) * steps + delay:
            if not self._merge():
                return False
        return True

    def _merge(self) -> bool:
        """Merge the fragment of the oldest clock, once its round is folded. False where this worker had to join again."""
        self._wait_folded(self.unmerged[0] + 1)
        if self._resume():
            return False
        clock, alpha = self.unmerged.popleft(), np.float32(self.mode.merge_alpha)
        for view in self.views:
            (begin, end), _ = view.turn(clock)
            base, ours = self.replica[begin:end], np.empty(end - begin, np.float32)
            view.compose(self.clock, begin, end, base)
            if alpha:
                self.flat.read_keys(begin, ours)
                ours -= base
                ours *= alpha
            self.flat.write_keys(begin, base + ours if alpha else base)
            if self.start is not self.replica:
                self.flat.read_keys(begin, self.start[begin:end])
                if alpha:
                    self.start[begin:end] -= ours
        return True

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """After backward: one optimizer step of this run. Returns the loss of `closure`, which does the backward."""
        if self.finished:
            raise UsageError("step() after finish(): the run is over for this worker")
        self.poll()
        if self.unmerged:
            self._ask(self.unmerged[-1] + 1)  # so that it comes under this step too
        pushes = self.local_step + 1 >= self.mode.local_steps
        if pushes and self.overlap is None:
            self._wait_window()
        if self._resume() and closure is None:
            return None  # what p.grad holds was computed on a replica of the life before: it would break the bound
        self.local_step += 1
        if self.gradients:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._push_gradients()
            self._next()
            return loss
        loss = clipped_step(self.inner, self.flat.parameters, self.max_grad_norm, closure)
        self.moved = True
        if self.mode.merges:
            self._exchange(pushes)
        elif pushes:
            self._push(self._update())
            self._next()
        return loss

    def _resume(self) -> bool:
        """Whether this worker had to join again since its replica was composed; then begin anew from the run's clock."""
        if self.composed == self.epoch:
            return False
        self.local_step = self.samples_pending = 0
        self.unmerged.clear()
        if self.overlap is not None:
            self.overlap.drop()
        self._next()
        return True

    def _push_gradients(self) -> None:
        if self.overlap is None:
            self._push(self._gradient, pack([hyper_of(self.inner), self.flat.absent()]))
            return
        gradient, absent = self.overlap.close()
        hyper = pack([hyper_of(self.inner), absent])
        for shard, cuts in enumerate(self.overlap.cuts):
            begin, end = cuts[0]
            raw = (m.RAW_FLOAT32, begin, end, gradient[begin:end].view(np.uint8).data)
            self._send_part(shard, 0, len(cuts), raw, hyper)
        self._pushed()

    def _send_part(self, shard: int, part: int, count: int, coded: Coded, hyper: bytes = b"") -> None:
        """One part of the update of the present clock; under overlap from autograd's threads."""
        (codec, begin, end, payload), clock = coded, self.clock
        samples = self.samples_pending or self.samples
        head = b"" if part else hyper
        push = m.Push(self.worker, self.epoch, clock, part, count, begin, end, samples, head, codec, payload)
        self.views[shard].in_flight.add(clock)
        self.link.call(lambda member, now: member.push(shard, [push], now))

    def _send_gradient(self, shard: int, part: int, count: int, begin: int, end: int, flat: FloatArray) -> None:
        self._send_part(shard, part, count, (m.RAW_FLOAT32, begin, end, flat[begin:end].view(np.uint8).data))

    def _wait_window(self) -> None:
        """Until one more update may be in flight to every shard."""
        window = self.mode.window
        self._wait(lambda: all(len(v.in_flight) < window for v in self.views), WAIT_LIMIT_S, "updates in flight")

    def _open_overlap(self) -> None:
        """Backward may begin: its parts need a free place in the window."""
        if self.overlap is not None:
            self._wait_window()
            self.overlap.open(self._buffer())

    def _update(self) -> Callable[[int, int], FloatArray]:
        """What the fragment of this clock moved by."""
        update = self._buffer()
        for view in self.views:
            (begin, end), _ = view.turn(self.clock)
            self.flat.read_keys(begin, update[begin:end])
            update[begin:end] -= self.start[begin:end]
        return lambda begin, end: update[begin:end]

    def _gradient(self, begin: int, end: int) -> FloatArray:
        """Keys [begin, end) of the gradients, as they lie in p.grad where that will stay as it is until they are folded."""
        lent = self.flat.lend_gradient(begin, end) if self.direct else None
        if lent is None:
            lent = self._buffer()[begin:end]
            self.flat.read_gradients(begin, lent)
        return lent

    def _push(self, piece: Callable[[int, int], FloatArray], hyper: bytes = b"", dense: bool = False) -> None:
        """Send update `clock` to every shard, which has room for it; `piece` gives its values of keys [begin, end)."""
        began = time.monotonic()
        sent: list[list[Coded]] = [[] for _ in self.views]
        turns = [view.turn(self.clock) for view in self.views]
        if not dense and turns[0][1].compressor.spec != "dense":
            try:
                for shard, (keys, feedback) in enumerate(turns):  # all before the first leaves
                    sent[shard] = [(m.CODED, *keys, self._encode(keys[0], feedback, piece(*keys)))]
            except NarrowsError:  # a value that is not finite: nothing was sent, so nothing may be gone from a residual
                for (_, feedback), own in zip(turns, sent, strict=True):
                    for _, _, _, payload in own:
                        feedback.restore(payload)
                raise
            for shard, (coded,) in enumerate(sent):
                self._send_part(shard, 0, 1, coded, hyper)
        else:
            for shard, (keys, feedback) in enumerate(turns):
                cuts, residual = list(parts(*keys)), feedback.residual
                for part, (begin, end) in enumerate(cuts):
                    values = piece(begin, end)
                    if residual is not None:
                        values = values + residual[begin - keys[0] : end - keys[0]]
                    raw = (m.RAW_FLOAT32, begin, end, values.view(np.uint8).data)
                    sent[shard].append(raw)
                    self._send_part(shard, part, len(cuts), raw, hyper)
                feedback.load_state_dict({})
        if not self.gradients:
            for view, own in zip(self.views, sent, strict=True):
                view.own[self.clock] = own
        self.tuning.encode_s = time.monotonic() - began
        self._pushed()

    def _encode(self, begin: int, feedback: ErrorFeedback, values: FloatArray) -> m.Buffer:
        try:
            feedback.memory.step = self.clock  # alike on all workers, whenever they joined
            return feedback.encode(values)
        except NonFiniteError as error:
            wrong = ~np.isfinite(values)
            name = self.flat.name_of(begin + int(np.argmax(wrong))) if wrong.any() else "the residual"
            what = "gradient" if self.gradients else "update"
            raise NarrowsError(
                f"the {what} of clock {self.clock} is not finite, first in {name!r} ({error}): it was not sent; lower the "
                f"learning rate or clip, --compress {self.settings.compress} can only send finite values"
            ) from None

    def _pushed(self) -> None:
        """The update of this clock is on its way: ask for the state of the next."""
        self.clock += 1
        self.local_step = self.samples_pending = 0
        if self.tuning.pushed(self.clock):
            for view in self.views:
                for _, feedback in view.fragments:
                    feedback.change(self.tuning.compressor)
        if self.tuning.chooses:
            self.link.call(lambda member, now: member.look_at_link())
        if self.mode.merges:
            self._ask(self.clock)
            return
        for shard, view in enumerate(self.views):
            if view.pulls < self.pulls:
                self._pull(shard, self.clock + self.mode.ahead(self.clock, view.settled, self.pulls), follow=True)

    def _next(self) -> None:
        self._wait_ready()
        self._compose()
        self._open_overlap()

    # The shared model and the end.

    def _master(self, flushed: bool) -> FloatArray:
        """The server's own state, whole; `flushed`: once all that live workers pushed before this clock is in it."""
        while True:
            epoch = self.epoch

            def here(done: Callable[[ShardView[ErrorFeedback]], bool], epoch: int = epoch) -> Callable[[], bool]:
                return lambda: self.epoch != epoch or all(done(view) for view in self.views)

            if not self.mode.barrier:
                self._wait(here(lambda view: not view.in_flight), WAIT_LIMIT_S, "own updates")
            if self.mode.merges:
                self._wait_folded(self.clock)
            elif self.mode.bound == 0:
                self._wait(here(lambda view: not view.pulls), WAIT_LIMIT_S, "states")
            if self.epoch == epoch:
                for shard, view in enumerate(self.views):
                    view.master = None
                    self._pull(shard, self.clock if flushed else 0, master=True)
                self._wait(here(lambda view: view.master is not None), WAIT_LIMIT_S, "the shared model")
            if self.epoch == epoch:
                return np.concatenate([view.master for view in self.views if view.master is not None])
            self._wait_ready()  # it had to join again

    def show_shared(self) -> None:
        """Put the server's state into the parameters."""
        self.flat.write(self.final if self.final is not None else self._master(flushed=False))

    def hide_shared(self, kept: FloatArray) -> None:
        """Put the parameters back to what they were."""
        self.flat.write(kept)

    def kept(self) -> FloatArray:
        """The parameters as they are now."""
        now = np.empty(self.flat.size, np.float32)
        self.flat.read(now)
        return now

    def finish(self) -> None:
        """Send what is left (local steps, residual), wait until it is folded, take the shared model and leave."""
        if self.finished:
            return
        self.poll()
        if self.mode.merges:
            self._flush()
        else:
            self._wait_window()
            self._resume()
            if not self.gradients and (
                self.local_step or any(values.any() for view in self.views for *_, values in view.residuals)
            ):
                self._push(self._update(), dense=True)
                if self.mode.barrier:
                    self._wait_ready()
        self.final = self._master(flushed=True)  # what the others flush included: all end with one model
        self._send_buffers()
        self.finished = True
        self.leave(self.clock)

    def _flush(self) -> None:
        """Merge what is in flight; then what is left of each fragment goes in its turn, dense, one clock after the other.

        How many turns that are follows from the settings and the clock, where fragments are exchanged: each worker must take
        part in the same ones. Nothing is left of the one pushed last, unless some of it was kept back or mixed.
        """
        self._resume()
        while self.unmerged and self._merge():
            pass
        turns = self.mode.fragments
        kept = not self.tuning.up_lossless or self.mode.merge_alpha > 0 if self.mode.streams else self._has_residual()
        for _ in range(turns if self.local_step or kept else turns - 1):
            self._push(self._update(), dense=True)
            self._wait_folded(self.clock)
            self._resume()  # what was in flight is given up, as ever; the residuals are not

    def _has_residual(self) -> bool:
        return any(values.any() for view in self.views for *_, values in view.residuals)

    def leave(self, clock: int) -> None:
        """Tell the coordinator, and wait a little for its answer."""
        self.finished = True
        self.left = False
        self.link.call(lambda member, now: member.leave(clock, now))
        try:
            self._wait(lambda: self.left, 5.0, "the server to take leave")
        except NarrowsError:
            return  # its lease will tell

    # The residual, for state_dict.

    def residual(self) -> FloatArray | None:
        """A copy of what is still to be sent, float32[size], or None where nothing ever is."""
        kept = [residual for view in self.views for residual in view.residuals]
        if not kept:
            return None
        whole = np.zeros(self.flat.size, np.float32)
        for begin, end, values in kept:
            whole[begin:end] = values
        return whole

    def load_residual(self, whole: FloatArray) -> None:
        """Take over a residual of any number of shards, and show it in the replica."""
        if whole.shape != (self.flat.size,) or whole.dtype != np.float32:
            raise UsageError(
                f"the residual in this state_dict is {whole.dtype}{list(whole.shape)}, this model needs "
                f"float32[{self.flat.size}]"
            )
        if self.gradients and self.tuning.up_lossless:
            return  # of another mode: an update is no gradient
        for view in self.views:
            for (begin, end), feedback in view.fragments:
                feedback.load_state_dict({"residual": whole[begin:end]})
        if not self.local_step and not (self.mode.streams and self.moved):  # else it shows with the next merge
            self._compose()

    # Module buffers (BatchNorm).

    def _send_buffers(self) -> None:
        packed = pack_buffers(self.model)
        if packed:
            self.link.call(lambda member, now: member.buffers(packed))
