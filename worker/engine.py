"""The engine: what a worker pushes, what it waits for, and the replica it computes on. The main thread owns it.

Rules
- One clock is one push to every shard. Before it computes with clock c the worker needs, from every shard, a state with
  min_clock >= c - s. Right after a push it asks for the state that the next clock needs, so that with s >= 1 the link's
  time lies under the next forward and backward.
- replica = pulled + residual + own writes (protocols/replica.py), composed here and nowhere else.
"""

from __future__ import annotations

import inspect
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from narrows.compression import ErrorFeedback, accumulate, parse
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError, RemoteProtocolError, UsageError
from narrows.protocols.keys import pack_arrays, parts, unpack_arrays
from narrows.protocols.modes import ELEMENTWISE, Rule, Settings
from narrows.protocols.replica import stand_in
from narrows.protocols.wire import pack
from narrows.worker.flat import FlatModel, FloatArray
from narrows.worker.overlap import Overlap
from narrows.worker.runner import Link

START_LIMIT_S = 600.0  # the other workers of a run come within this
WAIT_LIMIT_S = 3600.0  # no barrier is waited for longer; a dead worker costs a lease, a dead server is found sooner
PLAIN = (bool, int, float, str, type(None))


@dataclass(slots=True)
class ShardView:
    """What this worker holds of one shard: keys [begin, end)."""

    begin: int
    end: int
    feedback: ErrorFeedback
    publication: int = -1
    min_clock: int = -1
    contains: dict[int, float] = field(default_factory=dict)
    pulling: bool = False
    in_flight: set[int] = field(default_factory=set)
    master: FloatArray | None = None


def hyper_of(optimizer: torch.optim.Optimizer) -> bytes:
    """Plain hyper-parameters of each group. Raises UsageError naming one that is not plain."""
    groups = []
    known = inspect.signature(type(optimizer).__init__).parameters
    for group in optimizer.param_groups:
        values: dict[str, Any] = {}
        for name, value in group.items():
            if name == "params" or name not in known:
                continue
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if isinstance(value, tuple):
                value = list(value)
            if not isinstance(value, (*PLAIN, list)):
                raise UsageError(f"hyper-parameter {name!r} is no plain value: use --push update")
            values[name] = value
        groups.append(values)
    return pack(groups)


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
        self.flat = FlatModel(model, inner)
        self.gradients = self.mode.rule is Rule.OPTIMIZER
        self.worker, self.epoch, self.clock = -1, 0, 0
        self.local_step = 0
        self.samples = 1
        self.samples_pending = 0
        self.views: list[ShardView] = []
        self.pulled: FloatArray = np.zeros(self.flat.size, np.float32)
        self.replica: FloatArray = self.pulled if self.gradients else np.zeros(self.flat.size, np.float32)
        # What the parameters were set to: the replica as their dtype rounds it. An update is measured from there, or the
        # rounding of a bf16 worker would be pushed into the fp32 master.
        exact = all(p.dtype == torch.float32 for p in self.flat.parameters) or self.gradients
        self.start: FloatArray = self.replica if exact else np.zeros(self.flat.size, np.float32)
        self.own: OrderedDict[int, list[list[tuple[int, int, int, m.Buffer]]]] = OrderedDict()
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
        self.ring = [np.zeros(self.flat.size, np.float32) for _ in range(self.mode.window + 2)]
        self.overlap: Overlap | None = None
        self.opened_epoch = 0
        if overlap and self.gradients:
            if not parse(self.settings.compress).lossless:
                raise UsageError(
                    f"overlap=True sends gradients part by part, --compress {self.settings.compress} selects over all of "
                    "them: use --compress dense, or leave out overlap=True"
                )
            self.overlap = Overlap(self.flat, [(v.begin, v.end) for v in self.views], overlap, self._send_part)
        self._compose()
        self._open_overlap()

    def _buffer(self) -> FloatArray:
        return self.ring[self.clock % len(self.ring)]

    def _cannot_rebuild(self, why: str) -> str:
        return f"--push gradient needs an optimizer that the server can rebuild, but {why}: use --push update"

    # Events.

    def _wait(self, done: Any, limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                raise NarrowsError(f"waited {limit_s:.0f} s for {what}")
            event = self.link.take(min(left, 1.0))
            if event is not None:
                self._handle(event)

    def poll(self) -> None:
        """Handle what has arrived, without waiting."""
        while (event := self.link.take(0.0)) is not None:
            self._handle(event)

    def _handle(self, event: MemberEffect) -> None:
        if isinstance(event, e.Started):
            self._start(event)
        elif isinstance(event, e.GiveWeights):
            self._give_weights(event.shard)
        elif isinstance(event, e.StateArrived):
            self._state(event)
        elif isinstance(event, e.PushSettled):
            self._settled(event)
        elif isinstance(event, e.BuffersWanted):
            self._send_buffers()
        elif isinstance(event, e.Left):
            self.left = True

    def _start(self, event: e.Started) -> None:
        if event.again:
            residuals = [view.feedback for view in self.views]
        else:
            compressor = parse(self.settings.compress)
            residuals = [ErrorFeedback(compressor, end - begin) for begin, end in event.ranges]
        self.views = [
            ShardView(begin, end, feedback) for (begin, end), feedback in zip(event.ranges, residuals, strict=True)
        ]
        self.own.clear()
        self.worker, self.epoch, self.clock = event.worker, event.epoch, event.clock
        self._started = True
        if event.buffers:
            self._load_buffers(event.buffers)
        for shard in range(len(self.views)):
            self._pull(shard, self.clock)

    def _pull(self, shard: int, clock: int, master: bool = False) -> None:
        view = self.views[shard]
        view.pulling = True
        have = view.publication
        self.link.call(lambda member, now: member.pull(shard, clock, have, master, now))

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

    def _state(self, event: e.StateArrived) -> None:
        view = self.views[event.shard]
        view.pulling = False
        last = event.parts[-1]
        if event.master:
            view.master = np.empty(view.end - view.begin, np.float32)
        for state in event.parts:
            if not view.begin <= state.begin <= state.end <= view.end:
                raise RemoteProtocolError(
                    f"shard {event.shard} sent keys [{state.begin}, {state.end}), which it does not own"
                )
            if event.master:
                assert view.master is not None
                target = view.master[state.begin - view.begin : state.end - view.begin]
            else:
                target = self.pulled[state.begin : state.end]
            if state.delta:
                if len(state.payload):
                    accumulate(state.payload, 1.0, target)
            else:
                np.copyto(target, np.frombuffer(state.payload, np.float32))
        if not event.master:
            view.publication, view.min_clock = last.publication, last.min_clock
            view.contains = dict(last.contains)

    def _settled(self, event: e.PushSettled) -> None:
        view = self.views[event.shard]
        view.in_flight.discard(event.clock)
        if not event.folded and not self.gradients:
            for codec, _, _, payload in self.own.get(event.clock, [[]] * len(self.views))[event.shard]:
                if codec == m.RAW_FLOAT32 or not len(payload):
                    continue  # lossless: there is no residual to give it back to
                view.feedback.restore(payload)

    def _wait_ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Until every shard's state may be computed on with the present clock."""
        before = time.monotonic()

        def ready() -> bool:
            ok = True
            for shard, view in enumerate(self.views):
                if view.min_clock < 0 or not self.mode.allows(self.clock, view.min_clock):
                    ok = False
                    if not view.pulling:
                        self._pull(shard, self.clock)
            return ok and bool(self.views)

        self._wait(ready, limit_s, f"a state for clock {self.clock}")
        self.wait_s = time.monotonic() - before
        self.staleness = self.clock - min(view.min_clock for view in self.views)

    def _compose(self) -> None:
        """The replica, into the parameters."""
        if not self.gradients:
            np.copyto(self.replica, self.pulled)
            for shard, view in enumerate(self.views):
                target = self.replica[view.begin : view.end]
                if view.feedback.residual is not None:
                    target += view.feedback.residual
                for clock, payloads in self.own.items():
                    weight = stand_in(self.mode, clock, self.clock, view.min_clock, view.contains.get(clock))
                    if weight:
                        for codec, begin, end, payload in payloads[shard]:
                            self._add(codec, payload, weight, self.replica[begin:end])
            oldest = min(view.min_clock for view in self.views)
            keep = self.clock - self.mode.window
            for clock in [c for c in self.own if c < oldest or (self.mode.bound is None and c < keep)]:
                if not any(clock in view.in_flight for view in self.views):
                    del self.own[clock]
        self.flat.write(self.replica)
        if self.start is not self.replica:
            self.flat.read(self.start)

    @staticmethod
    def _add(codec: int, payload: m.Buffer, weight: float, target: FloatArray) -> None:
        if codec == m.CODED:
            accumulate(payload, weight, target)
        else:
            target += np.frombuffer(payload, np.float32) * np.float32(weight)

    # Steps.

    def step(self) -> None:
        """After backward: one optimizer step of this run."""
        if self.finished:
            raise UsageError("step() after finish(): the run is over for this worker")
        self.poll()
        self.local_step += 1
        if self.gradients:
            self._push_gradients()
            self._next()
            return
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.flat.parameters, self.max_grad_norm)
        self.inner.step()
        if self.local_step >= self.mode.local_steps:
            self._push(self._update(), b"")
            self._next()

    def _push_gradients(self) -> None:
        if self.overlap is None:
            gradient = self._buffer()
            absent = self.flat.read_gradients(gradient)
            self._push(gradient, pack([hyper_of(self.inner), absent]))
            return
        gradient, absent = self.overlap.close()
        hyper = pack([hyper_of(self.inner), absent])
        rejoined = self.opened_epoch != self.epoch  # what has left was for another life: send all of it again
        for shard, cuts in enumerate(self.overlap.cuts):
            for part, (begin, end) in enumerate(cuts if rejoined else cuts[:1]):
                self._send_part(shard, part, len(cuts), begin, end, gradient, hyper)
        self._pushed()

    def _send_part(
        self, shard: int, part: int, count: int, begin: int, end: int, flat: FloatArray, hyper: bytes = b""
    ) -> None:
        """One part of the gradients of the present clock; from autograd's threads too."""
        clock, samples = self.clock, self.samples_pending or self.samples
        payload = flat[begin:end].view(np.uint8).data
        push = m.Push(self.worker, self.epoch, clock, part, count, begin, end, samples, hyper, m.RAW_FLOAT32, payload)
        self.views[shard].in_flight.add(clock)
        self.link.call(lambda member, now: member.push(shard, [push], now))

    def _open_overlap(self) -> None:
        """Backward may begin: its parts need a free place in the window."""
        if self.overlap is not None:
            window = self.mode.window
            self._wait(lambda: all(len(v.in_flight) < window for v in self.views), WAIT_LIMIT_S, "updates in flight")
            self.opened_epoch = self.epoch
            self.overlap.open(self._buffer())

    def _update(self) -> FloatArray:
        update = self._buffer()
        self.flat.read(update)
        update -= self.start
        return update

    def _push(self, values: FloatArray, hyper: bytes, dense: bool = False) -> None:
        """Send update `clock` to every shard."""
        window = self.mode.window
        self._wait(lambda: all(len(v.in_flight) < window for v in self.views), WAIT_LIMIT_S, "updates in flight")
        clock = self.clock
        samples = self.samples_pending or self.samples
        sent: list[list[tuple[int, int, int, m.Buffer]]] = []
        for view in self.views:
            piece = values[view.begin : view.end]
            if dense or view.feedback.compressor.lossless:
                if view.feedback.residual is not None:
                    piece = piece + view.feedback.residual
                    view.feedback.residual.fill(0)
                raw = piece.view(np.uint8).data
                sent.append(
                    [
                        (m.RAW_FLOAT32, b, end, raw[4 * (b - view.begin) : 4 * (end - view.begin)])
                        for b, end in parts(view.begin, view.end)
                    ]
                )
            else:
                sent.append([(m.CODED, view.begin, view.end, view.feedback.encode(piece))])
        self.own[clock] = sent
        for shard, (view, payloads) in enumerate(zip(self.views, sent, strict=True)):
            messages = [
                m.Push(self.worker, self.epoch, clock, i, len(payloads), b, end, samples, hyper, codec, payload)
                for i, (codec, b, end, payload) in enumerate(payloads)
            ]
            view.in_flight.add(clock)
            self.link.call(lambda member, now, shard=shard, messages=messages: member.push(shard, messages, now))  # type: ignore[misc]
        self._pushed()

    def _pushed(self) -> None:
        """The update of this clock is on its way: ask for the state of the next."""
        self.clock += 1
        self.local_step = self.samples_pending = 0
        ahead = 0 if self.mode.bound == 0 else 1
        for shard, view in enumerate(self.views):
            if not view.pulling:
                self._pull(shard, self.clock + ahead)

    def _next(self) -> None:
        self._wait_ready()
        self._compose()
        self._open_overlap()

    # The shared model and the end.

    def _master(self) -> FloatArray:
        """The server's own state, whole."""
        self._wait(lambda: not any(v.in_flight for v in self.views) or self.mode.barrier, WAIT_LIMIT_S, "own updates")
        self._wait(lambda: not any(v.pulling for v in self.views) or self.mode.bound != 0, WAIT_LIMIT_S, "states")
        for shard, view in enumerate(self.views):
            view.master = None
            self._pull(shard, self.clock, master=True)
        self._wait(lambda: all(v.master is not None for v in self.views), WAIT_LIMIT_S, "the shared model")
        return np.concatenate([v.master for v in self.views if v.master is not None])

    def show_shared(self) -> None:
        """Put the server's state into the parameters."""
        self.flat.write(self.final if self.final is not None else self._master())

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
        left = [v.feedback.residual for v in self.views if v.feedback.residual is not None]
        if not self.gradients and (self.local_step or any(r.any() for r in left)):
            self._push(self._update(), b"", dense=True)
            if self.mode.barrier:
                self._wait_ready()
        self.final = self._master()
        self._send_buffers()
        self.finished = True
        self.leave(self.clock)

    def leave(self, clock: int) -> None:
        """Tell the coordinator, and wait a little for its answer."""
        self.finished = True
        self.left = False
        self.link.call(lambda member, now: member.leave(clock, now))
        try:
            self._wait(lambda: self.left, 5.0, "the server to take leave")
        except NarrowsError:
            return  # its lease will tell

    # Module buffers (BatchNorm).

    def _send_buffers(self) -> None:
        arrays = {}
        for name, buffer in self.model.named_buffers():
            if buffer is not None and buffer.dtype != torch.bfloat16:
                array = buffer.detach().cpu().numpy()
                arrays[name] = (str(array.dtype), tuple(array.shape), array.tobytes())
        if arrays:
            packed = pack_arrays(arrays)
            self.link.call(lambda member, now: member.buffers(packed))

    def _load_buffers(self, packed: bytes) -> None:
        mine = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, (dtype, shape, raw) in unpack_arrays(packed).items():
                if name in mine and tuple(mine[name].shape) == shape:
                    mine[name].copy_(torch.from_numpy(np.frombuffer(raw, dtype).reshape(shape).copy()))
