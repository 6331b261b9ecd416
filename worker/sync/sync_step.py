"""The two sides of a step: what the engine asks of a kind of step, and what that step asks of its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from narrows.compression.home import Home
from narrows.protocols import effects as e
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import MemberEffect
from narrows.worker.group.event_wait import EventWait
from narrows.worker.group.group import Group
from narrows.worker.model.arrays import SharedWeights, WorkerArrays
from narrows.worker.model.flat import Array, FlatModel, FloatArray
from narrows.worker.model.model_slices import ModelSlice
from narrows.worker.model.module_buffers import BufferState
from narrows.worker.model.not_finite import SkippedSteps
from narrows.worker.model.privacy import UpdatePrivacy
from narrows.worker.model.weight_edit_check import WeightEditCheck
from narrows.worker.runtime.config import WorkerConfig
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.runtime.trace import StepTrace
from narrows.worker.sync.embedding_tables import EmbeddingTables
from narrows.worker.sync.shard_exchanges import ShardExchanges
from narrows.worker.sync.tuning import CodecTuning


class SyncStep(Protocol):
    """The step of one mode: `UpdateStep`, `GradientStep`, `StreamingStep` or `GossipStep`.

    The engine calls all methods on the main thread. While it waits, it hands the step each event by `begin` or
    `handle`.
    """

    local_step: int  # local steps since the last push; below `Mode.local_steps`
    arrays: WorkerArrays
    shards: ShardExchanges
    server_gone: bool  # the server is lost and the workers go on without it; only under gossip

    @property
    def clock(self) -> int:
        """The clock of this worker in the run."""

    @property
    def final_clock(self) -> int:
        """The clock that this worker sends with its Leave, as the server counts it."""

    @property
    def buffers_clock(self) -> int:
        """The clock of the module's buffers: how many updates they have seen, counted alike by all workers."""

    @property
    def staleness(self) -> int:
        """Clocks between this worker and the state that its newest step was computed on."""

    @property
    def merging(self) -> dict[str, float]:
        """Figures for the record, each left out until it is known.

        "gain" and "agreement" are those of the mean update. "held_back" is the length of the residual in updates.
        """

    def begin(self, event: e.MemberStarted) -> None:
        """Take a place in the run: at the start, and again after each rejoin. Updates in flight are given up then."""

    def handle(self, event: MemberEffect) -> None:
        """Handle any other event of the member."""

    def ready(self, limit_s: float = ...) -> None:
        """Wait until the parameters hold what the present clock computes on.

        Raises NarrowsError after `limit_s` seconds.
        """

    def take_late(self) -> int:
        """Return the rounds that closed without this worker since the last call (--quorum)."""

    def weigh(self, samples: int) -> None:
        """Add `samples` to the weight of the next push."""

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """Take one optimizer step of the run, and push at the end of a clock.

        Args:
            closure: evaluates the model and does the backward pass. None: the script has done the backward pass.

        Returns:
            The closure's loss; None without a closure, or if the worker rejoined and the step was dropped.
        """

    @property
    def unmoved(self) -> bool:
        """True if the parameters are what the worker has composed: `arrays.show(())` writes them again."""

    def shared(self) -> SharedWeights:
        """Pull the shared model as it is now."""

    def flush(self, last: bool) -> SharedWeights:
        """Send the local steps and the residual that are left, and return the model to end with.

        Args:
            last: True waits until all workers have done their last step, and returns the model that all end with. False
                returns the shared model as it is after this worker's last push.
        """

    def residual(self) -> FloatArray | None:
        """A copy of the residual of the whole model, float32[total] on the host; None in a mode without residuals."""

    def load_residual(self, whole: FloatArray) -> None:
        """Replace the residual, and show it in the parameters.

        Args:
            whole: float32[total], as `residual` returned it. The number of shards may have changed since.

        Raises:
            UsageError: the residual is of a model of another size.
        """


class StepEngine(Protocol):
    """The part of the engine that a step uses. `settings` and `mode` change when the run changes its plan."""

    link: MemberLink
    config: WorkerConfig
    settings: Settings
    mode: Mode
    waiting: EventWait
    group: Group | None  # the group in which this process is one rank, if any
    inner: torch.optim.Optimizer
    dense: torch.optim.Optimizer  # `inner`, without the optimizers that step embedding tables only
    flat: FlatModel
    slice: ModelSlice | None
    home: Home[Array]
    tables: EmbeddingTables
    tuning: CodecTuning
    trace: StepTrace
    privacy: UpdatePrivacy | None
    hides: bool  # all values that leave this worker get noise (--dp-noise): none without it may leave
    skips: SkippedSteps
    steps: int  # steps that the script has taken
    finished: bool

    def optimize(self, closure: Callable[[], Any] | None) -> Any:
        """Step the script's optimizer along the gradients, in a group along their mean over the ranks.

        If a gradient is not finite, the optimizer takes no step. Returns the closure's loss, or None.
        """

    def reduce(self) -> bool:
        """Reduce the gradients over the ranks of a group. Returns False if a gradient of any rank is not finite."""

    def send_buffers(self) -> None:
        """Send the module buffers to the coordinator, which uses those of the live worker with the lowest rank."""

    def change_over(self) -> None:
        """Wait for the step of the plan that the run has now, if the run is at the end of its start (--start-steps)."""


class RunEngine(StepEngine, Protocol):
    """The part of the engine that `SharedModel` and `Agreement` use."""

    buffers: BufferState
    sync: SyncStep
    changes: WeightEditCheck

    def meet(self, call: str) -> None:
        """Check that all ranks of a group have called `call`, a name of `event_wait.CALLS`."""
