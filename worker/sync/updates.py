"""The step of a worker whose own optimizer steps, and which pushes the updates. The main thread owns it.

`ssp`, `async`, `bsp --push update` and `local --staleness S` take this step. Pushed gradients take `GradientStep`
(gradients.py), `local` at a barrier `StreamingStep` (streaming.py), gossip `GossipStep` (gossip.py).

How it works

    script       loss.backward()   step()                             step()
    UpdateStep                     optimize, push c, wait, compose    optimize, push c + 1, wait, compose
    shards                                  fold c, publish                    fold c + 1, publish

1. `step` waits until the window has room for one more update, if this step ends a clock (`RoundClock`).
2. If the worker had to rejoin, `resume` composes the replica anew, and a gradient of the old replica is dropped.
3. `inner_step` steps the script's optimizer on the parameters.
4. `push` sends the change of the parameters since the replica was composed. --dp-clip clips it, --dp-noise adds noise. A
   clock whose steps were all skipped is closed by an update of weight 0.
5. `ready` waits for the state that the next clock needs, and composes the replica: pulled state, residual, and own
   updates that are not in the state.
6. `flush` sends the residual too, finely coded, and pulls the model that all workers end with.

Rules
- Right after a push the worker waits for the state that the next clock needs. With s >= 1 that state has usually
  arrived during the steps before, so the wait is short.
- The replica is composed shard by shard (protocols/member/exchange.py), and is then written to the parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from narrows.compression import NonFiniteError
from narrows.compression.buffers import ChunkedUpdate
from narrows.protocols import effects as e
from narrows.protocols.config.key_ranges import CodedPiece, Keys
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError
from narrows.protocols.wire import pack
from narrows.worker.checkpoint.server_state import ServerOptimizerState
from narrows.worker.model.arrays import SharedWeights, WorkerArrays
from narrows.worker.model.flat import Array, FloatArray
from narrows.worker.model.not_finite import NotFiniteError
from narrows.worker.runtime.round_clock import RoundClock
from narrows.worker.sync.sample_client import SampleClient
from narrows.worker.sync.shard_exchanges import ShardExchanges
from narrows.worker.sync.sync_step import StepEngine

IDLE_S = 0.1  # between two requests for samples, if none are left and no worker waits for this one


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """Call the closure once, with gradients enabled, and return its loss; None without a closure."""
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
    """Step an optimizer along clipped gradients, and only along usable ones.

    Args:
        optimizer: the optimizer to step.
        parameters: the parameters whose gradients are clipped together.
        norm: the L2 norm to clip to; 0: no clipping.
        closure: as torch's closures. Each evaluation is checked and clipped.
        usable: returns False if the present gradients must not be stepped along; the step then ends.

    Returns:
        The result of the optimizer's step(); if the optimizer did not step, the closure's loss or None.
    """
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
    """See `SyncStep`. `StreamingStep` and `GradientStep` extend it, and share its `arrays` and `shards`.

    Args:
        engine: the engine of this worker.
        arrays: the worker's arrays.
        before: the step of another kind whose place this one takes, if any: its exchanges with the shards go on.
    """

    def __init__(self, engine: StepEngine, arrays: WorkerArrays, before: UpdateStep | None = None) -> None:
        self.engine, self.mode, self.arrays = engine, engine.mode, arrays
        self.shards: ShardExchanges = (
            before.shards
            if before is not None
            else ShardExchanges(engine.link, engine.mode, arrays, engine.tuning, engine.waiting.until, engine.group)
        )
        self.servers = ServerOptimizerState(engine, self.shards)
        self.round = RoundClock(engine.mode, bool if engine.group is None else engine.group.decided_by_first)
        self.local_step = 0
        self.taken = 0  # local steps since the last push that were not skipped
        self.samples = 0  # samples of those steps, if the script calls step_samples(); else 0
        self.weight = 0  # of the newest update of a round by the clock
        self.taking: SampleClient = before.taking if before is not None else SampleClient(engine, self)
        self.taking.serve(self)
        self.moved = before is not None  # a local step was taken since the whole replica was composed
        # The epoch in which the replica was composed; another one after each rejoin.
        self.composed: int = before.composed if before is not None else 0
        self.missed = 0  # rounds that closed without this worker, in this epoch
        self.ended_at = -1  # the run's clock of the final model; -1: not received yet
        self.server_gone = False  # always: a worker of this mode ends when its server is lost
        self._late = 0  # of the missed rounds, those not yet reported to ps-worker

    @property
    def clock(self) -> int:
        return self.shards.clock + self.missed

    @property
    def staleness(self) -> int:
        return self.shards.staleness

    @property
    def merging(self) -> dict[str, float]:
        rounds = {"round_steps": float(self.round.steps)} if self.round.steps else {}
        return self.shards.merging | rounds

    def weigh(self, samples: int) -> None:
        self.shards.weigh(self.shards.samples_pending + samples)

    def begin(self, event: e.MemberStarted) -> None:
        self.mode = self.engine.mode
        self.round.anew()
        self.shards.begin(event)

    def follows(self, before: UpdateStep) -> None:
        """Note that `before`, whose place this step took while it waited for a state, has composed the replica."""
        self.composed = before.composed

    def end_kind(self) -> None:
        """Drop the hooks that this step has set: another kind of step takes its place."""

    def handle(self, event: MemberEffect) -> None:
        self.mode = self.engine.mode
        self.shards.handle(event)
        if isinstance(event, e.MomentsArrived):
            self.servers.arrived(event)
        if isinstance(event, (e.RangeArrived, e.MemberResharded)):
            self.taking.handle(event)

    def ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait for the state that the present clock needs, and compose the replica."""
        with self.round.waiting():
            self.shards.wait_ready(limit_s)
        self.seen_missed()
        self.compose()

    def seen_missed(self) -> None:
        """Count the rounds that closed without this worker, as far as the received states show."""
        missed = self.shards.missed if self.engine.group is None else self.engine.waiting.missed
        if self.composed == self.shards.epoch:
            self._late += missed - self.missed
        self.missed = missed

    def take_late(self) -> int:
        late, self._late = self._late, 0
        return late

    def compose(self) -> None:
        """Compose the replica, and write it to the parameters."""
        if not self.arrays.direct:
            with self.engine.trace.compose:
                self.arrays.show(self.shards.exchanges)
        self.composed, self.moved = self.shards.epoch, False

    def resume(self) -> bool:
        """If this worker had to rejoin since its replica was composed, compose it anew at the run's clock.

        Local steps that were not pushed are dropped. Returns whether the worker had rejoined.
        """
        if self.composed == self.shards.epoch:
            return False
        self.local_step = self.taken = self.samples = 0
        self.shards.weigh(0)
        self.engine.tables.drop()
        self.ready()
        return True

    def drops(self, closure: Callable[[], Any] | None) -> bool:
        """Return whether to drop a step during which this worker rejoined.

        Without a closure the gradient is of the old replica. With `ranges()` the samples were handed to other workers.
        """
        return closure is None or self.taking.ask is not None

    @property
    def lazy(self) -> bool:
        """True if updates need no array of their own: a coder reads each once, and nothing clips them before."""
        return self.engine.privacy is None and not self.shards.tuning.compressor.lossless

    # Steps.

    def step(self, closure: Callable[[], Any] | None) -> Any:
        pushes = self.awaits_turn()
        if self.resume() and self.drops(closure):
            return None  # p.grad is of a replica before the rejoin: its staleness may exceed the bound
        loss = self.inner_step(closure)
        if pushes:
            self.push()
            self.ready()
        return loss

    def awaits_turn(self) -> bool:
        """Return whether the present step ends a clock, and wait until it may."""
        if not self.round.ends(self.local_step):
            self.engine.waiting.agree()
            return False
        with self.round.waiting():
            self.shards.wait_window()
        return True

    def idle(self) -> None:
        """Take part in the present clock without new samples: push the local steps so far, or an update of weight 0.

        Under async no other worker waits for this one, so it only sleeps for IDLE_S, unless keys are about to move.
        """
        if self.mode.bound is None and not self.shards.promised:
            time.sleep(IDLE_S)
            return
        self.shards.wait_window()
        if not self.resume():
            self.push() if self.local_step else self.skip()
            self.ready()

    def inner_step(self, closure: Callable[[], Any] | None) -> Any:
        self.local_step += 1
        self.moved = True
        loss = self.engine.optimize(closure)
        if self.engine.skips.newest:
            self.shards.weigh(self.samples)
        else:
            self.taken, self.samples = self.taken + 1, self.shards.samples_pending
        return loss

    def push(self, last: bool = False) -> None:
        """End the present clock: push what the keys of this clock's fragment have moved by.

        If all steps of the clock were skipped, the update has weight 0. With --dp-noise it is pushed all the same, with
        noise, so that the server cannot tell that steps were skipped.

        Args:
            last: send the residual too, as at the end of the run (`ShardExchanges.push`).
        """
        engine, hidden = self.engine, self.local_step and self.engine.hides
        moved = self.taken > 0 or self.mode.streams
        moved |= engine.group is None and engine.flat.overwritten() != ""  # the script has written to a parameter
        if not (moved or hidden or (last and self.owes)):
            self.skip()
            return
        self._end_round()
        clock, turn = self.shards.clock, self.shards.clock // self.mode.fragments
        keys = [exchange.turn(clock) for exchange in self.shards.exchanges]
        tables = self.engine.tables
        hyper = (
            pack([b"", [], rates]) if not last and (rates := tables.rates()) else b""
        )  # the last update steps no row
        with engine.trace.difference:
            values = [self.arrays.moved(each, turn, self.lazy) for each in keys]
        self.send("update", keys, values, last=last, hyper=hyper, rows=[] if last else tables.pieces())

    def skip(self) -> None:
        """End the present clock with an update of weight 0."""
        self._end_round()
        self.shards.skip()

    def _end_round(self) -> None:
        """Count the local steps of the clock whose update is about to be pushed, and begin the next.

        The update of a round by the clock weighs by its steps, or by the samples that the script has named. One that has a
        residual alone, at the end, weighs as the one before it.
        """
        if self.mode.seconds:
            self.round.begin(self.local_step, self.shards.tuning.exchange_s)
            self.shards.note_steps(self.local_step)
            self.weight = self.shards.samples_pending or self.taken * self.shards.samples or self.weight
            self.shards.weigh(self.weight)
        self.local_step = self.taken = self.samples = 0

    def send(
        self,
        what: str,
        keys: Sequence[Keys],
        values: Sequence[Array | ChunkedUpdate],
        last: bool = False,
        hyper: bytes = b"",
        rows: Sequence[Sequence[CodedPiece]] = (),
    ) -> None:
        """Push the values of each shard's keys, clipped and with noise if --dp-clip and --dp-noise ask for it.

        Args:
            what: "update" or "gradient", for the error.
            keys: for each shard of this process, the keys [begin, end) of its values.
            values: for each of these shards, float32[end - begin]. Clipping and noise change arrays in place.
            last: send the residual too; see `ShardExchanges.push`.
            hyper: packed hyper-parameters of the optimizers that the servers step; b"": none.
            rows: for each shard, coded pieces of embedding rows.

        Raises:
            NarrowsError: a value is not finite, and nothing was sent. The gradients were finite, so the weights or the
                optimizer's state are not.
        """
        clock, privacy = self.shards.clock, self.engine.privacy
        try:
            if privacy is not None:
                privacy.hide(cast(Sequence[FloatArray], values))  # none is lazy
            self.shards.push(values, last, hyper, rows)
        except NonFiniteError as error:
            tensors = [self.arrays.where_not_finite(each[0], ours) for each, ours in zip(keys, values, strict=True)]
            named = [tensor for tensor in tensors if tensor != "the residual"]
            where = (named or tensors)[0]
            raise NarrowsError(
                f"rank {self.engine.skips.rank}: the {what} of clock {clock} is not finite, first in {where} ({error}): it was "
                "not sent; lower the learning rate or clip"
            ) from None

    # The shared model and the end.

    def shared(self) -> SharedWeights:
        return self.shards.master(last=False, resume=self.shards.wait_ready)

    def flush(self, last: bool) -> SharedWeights:
        """Send the local steps and the residual that are left, and return the model to end with."""
        self.shards.wait_window()
        self.resume()
        if self.local_step or self.owes:
            self.push(last=True)
            if self.mode.barrier:
                self.shards.wait_ready()
                self.seen_missed()
        return self.end(last)

    def end(self, last: bool) -> Iterator[CodedPiece]:
        """Pull the shared model, after all pushes of this worker.

        Args:
            last: wait until all workers have done their last step. The module buffers then count as of the run's clock.
        """
        if last:
            self.engine.send_buffers()  # other workers may ask for them while this one waits
        yield from self.shards.master(last, resume=self.shards.wait_ready)
        if last:
            self.ended_at = self.shards.master_clock

    @property
    def unmoved(self) -> bool:
        if self.engine.slice is not None:  # these arrays have a part of the module only
            return False
        composed = self.composed == self.shards.epoch and not self.moved and not self.arrays.shared
        return composed and not self.mode.streams and not self.engine.flat.overwritten()

    @property
    def owes(self) -> bool:
        """True if error feedback holds a residual that is not zero."""
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
        if not self.local_step and not (self.mode.streams and self.moved):  # else the next merge shows it
            self.compose()
