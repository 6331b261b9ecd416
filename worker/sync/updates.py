"""A worker that pushes updates of its own optimizer, and computes on what comes of them: every mode but those that push
gradients, merge, or gossip. The main thread owns it.

Rules
- Right after a push it waits for what the next clock needs; with s >= 1 that has come under the steps before.
- The replica is composed shard by shard (protocols/member/exchange.py), and then is what the parameters show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrows.compression import NonFiniteError
from narrows.protocols import effects as e
from narrows.protocols.config.key_ranges import CodedPiece, Keys
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.wire import pack
from narrows.worker.model.arrays import WorkerArrays
from narrows.worker.model.flat import Array, FloatArray
from narrows.worker.model.not_finite import NotFiniteError
from narrows.worker.sync.sample_client import SampleClient
from narrows.worker.sync.shards import ShardExchanges
from narrows.worker.sync.step import StepEngine

IDLE_S = 0.1  # from one ask for samples to the next, where none are left and nobody waits


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss of a closure that is called once, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def clipped_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    norm: float,
    closure: Callable[[], Any] | None,
    usable: Callable[[], bool] = lambda: True,
) -> Any:
    """`optimizer.step(closure)`; each gradient that it steps along is clipped to the L2 norm `norm`, 0: not at all. Where a
    gradient is not `usable` the optimizer does not step along it."""
    if closure is None:
        if not usable():
            return None
        if norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        return optimizer.step()

    def clipped() -> Any:
        loss = closure()
        if not usable():
            raise NotFiniteError(loss)
        if norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, norm)
        return loss

    try:
        return optimizer.step(clipped)
    except NotFiniteError as error:
        return error.loss


class UpdateStep:
    """See `SyncStep`. `arrays` and `shards` are what merging and pushed gradients have in common with it."""

    def __init__(self, engine: StepEngine, arrays: WorkerArrays) -> None:
        self.engine, self.mode, self.arrays = engine, engine.mode, arrays
        self.shards = ShardExchanges(engine.link, engine.mode, arrays, engine.tuning, engine.wait, engine.group)
        engine.waiting.missing = lambda: self.shards.missed
        self.local_step = self.steps = 0
        self.taken = 0  # of the local steps since the last clock, those that were not left out
        self.samples = 0  # that those were computed on, where the script has said so
        self.taking = SampleClient(engine, self)
        self.moved = False  # a step was taken since all of the replica was composed
        self.composed = 0  # the epoch of the life that the replica is of
        self.missed = 0  # rounds that closed without us, in this life
        self.ended_at = -1  # the run's clock of the last model, once it is here
        self.server_gone = False  # who trains with a server ends with it
        self.late = 0  # and those that nobody was told of yet

    @property
    def clock(self) -> int:
        return self.shards.clock + self.missed

    @property
    def wait_s(self) -> float:
        return self.shards.wait_s

    @property
    def staleness(self) -> int:
        return self.shards.staleness

    @property
    def merging(self) -> dict[str, float]:
        return self.shards.merging

    def weigh(self, samples: int) -> None:
        self.shards.samples_pending += samples

    def begin(self, event: e.Started) -> None:
        self.mode = self.engine.mode
        self.shards.begin(event)

    def handle(self, event: MemberEffect) -> None:
        self.mode = self.engine.mode
        self.shards.handle(event)
        self.taking.handle(event)

    def ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait for what the present clock needs, and compose."""
        self.shards.wait_ready(limit_s)
        self.seen_missed()
        self.compose()

    def seen_missed(self) -> None:
        """Count what closed without us up to the states that are here."""
        missed = self.shards.missed if self.engine.group is None else self.engine.waiting.missed
        if self.composed == self.shards.epoch:
            self.late += missed - self.missed
        self.missed = missed

    def compose(self) -> None:
        """The replica, into the parameters."""
        self.arrays.show(self.shards.exchanges)
        self.composed, self.moved = self.shards.epoch, False

    def resume(self) -> bool:
        """Whether this worker had to join again since its replica was composed; then begin anew from the run's clock."""
        if self.composed == self.shards.epoch:
            return False
        self.local_step = self.taken = self.samples = self.shards.samples_pending = 0
        self.engine.tables.drop()
        self.ready()
        return True

    def drops(self, closure: Callable[[], Any] | None) -> bool:
        """A step in which this worker joined again is left out: it has a gradient already, or samples that others have now."""
        return closure is None or self.taking.ask is not None

    # Steps.

    def step(self, closure: Callable[[], Any] | None) -> Any:
        pushes = self.local_step + 1 >= self.mode.local_steps
        self.shards.wait_window() if pushes else self.engine.waiting.agree()
        if self.resume() and self.drops(closure):
            return None  # what p.grad holds was computed on a replica of the life before: it would break the bound
        loss = self.inner_step(closure)
        if pushes:
            self.push()
            self.ready()
        return loss

    def idle(self) -> None:
        """Take part in the present clock with what there is: local steps so far, or nothing. Where nobody waits for this
        worker, it waits a little."""
        if self.mode.bound is None:
            time.sleep(IDLE_S)
            return
        self.shards.wait_window()
        if not self.resume():
            self.push() if self.local_step else self.shards.skip()
            self.ready()

    def inner_step(self, closure: Callable[[], Any] | None) -> Any:
        self.local_step += 1
        self.moved = True
        loss = self.engine.optimize(closure)
        if self.engine.skips.newest:
            self.shards.samples_pending = self.samples
        else:
            self.taken, self.samples = self.taken + 1, self.shards.samples_pending
        return loss

    def push(self, dense: bool = False) -> None:
        """End the present clock: push what the keys whose turn it is have moved by, or an update of weight 0 where all steps
        were left out. Where noise hides what is pushed, it hides that too."""
        engine, hidden = self.engine, self.local_step and self.engine.hides
        moved = self.taken > 0 or self.mode.streams
        moved |= engine.group is None and engine.flat.overwritten() != ""  # by the script
        self.local_step = self.taken = self.samples = 0
        if not (moved or hidden or (dense and self.owes)):
            self.shards.skip()
            return
        clock, turn = self.shards.clock, self.shards.clock // self.mode.fragments
        keys = [exchange.turn(clock) for exchange in self.shards.exchanges]
        tables = self.engine.tables
        hyper = pack([b"", [], rates]) if not dense and (rates := tables.rates()) else b""  # the last update is no step
        values = [self.arrays.moved(each, turn) for each in keys]
        self.send("update", keys, values, dense=dense, hyper=hyper, rows=[] if dense else tables.pieces())

    def send(
        self,
        what: str,
        keys: Sequence[Keys],
        values: Sequence[Array],
        dense: bool = False,
        hyper: bytes = b"",
        rows: Sequence[Sequence[CodedPiece]] = (),
    ) -> None:
        """Push these values of the keys of each shard, clipped and with noise where that is asked for. Raises NarrowsError
        where one is not finite: its gradients were, so it is the weights or the optimizer's state that are lost."""
        clock, privacy = self.shards.clock, self.engine.privacy
        try:
            if privacy is not None:
                privacy.hide(values)
            self.shards.push(values, dense, hyper, rows)
        except NonFiniteError as error:
            tensors = [self.arrays.where_not_finite(each[0], ours) for each, ours in zip(keys, values, strict=True)]
            named = [tensor for tensor in tensors if tensor != "the residual"]
            where = (named or tensors)[0]
            raise NarrowsError(
                f"rank {self.engine.skips.rank}: the {what} of clock {clock} is not finite, first in {where} ({error}): it was "
                "not sent; lower the learning rate or clip"
            ) from None

    # The shared model and the end.

    def shared(self) -> Array:
        return self.shards.master(last=False, resume=self.shards.wait_ready)

    def flush(self, last: bool) -> Array:
        """Send what is left: local steps and residual."""
        self.shards.wait_window()
        self.resume()
        if self.local_step or self.owes:
            self.push(dense=True)
            if self.mode.barrier:
                self.shards.wait_ready()
                self.seen_missed()
        return self.end(last)

    def end(self, last: bool) -> Array:
        """All is sent: take the shared model. `last`: once all workers have done their last step; the buffers are then of the
        run's clock."""
        if not last:
            return self.shared()
        self.engine.send_buffers()  # other workers may ask for them while this one waits
        model = self.shards.master(last=True, resume=self.shards.wait_ready)
        self.ended_at = self.shards.master_clock
        return model

    @property
    def owes(self) -> bool:
        """Something is kept back."""
        return self.arrays.owes(self.shards.replicas)

    @property
    def final_clock(self) -> int:
        return self.shards.clock

    @property
    def buffers_clock(self) -> int:
        return max(self.final_clock, self.ended_at)

    def residual(self) -> FloatArray | None:
        return self.arrays.residual(self.shards.replicas)

    def load_residual(self, whole: FloatArray) -> None:
        self.arrays.load_residual(self.shards.replicas, whole)
        if not self.local_step and not (self.mode.streams and self.moved):  # else it shows with the next merge
            self.compose()
