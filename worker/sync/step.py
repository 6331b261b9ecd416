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
from narrows.worker.model.flat import Array, FlatModel, FloatArray
from narrows.worker.model.model_slices import ModelSlice
from narrows.worker.model.module_buffers import BufferState
from narrows.worker.model.not_finite import Named, SkippedSteps
from narrows.worker.model.privacy import UpdatePrivacy
from narrows.worker.runtime.member_link import MemberLink
from narrows.worker.sync.embedding_tables import EmbeddingTables
from narrows.worker.sync.shards import ShardExchanges
from narrows.worker.sync.tuning import CodecTuning


class SyncStep(Protocol):
    """The kind of step that a mode has. Its owner hands it events while it waits for something."""

    local_step: int  # since the last clock
    shards: ShardExchanges
    server_gone: bool  # the workers go on among themselves (gossip)
    steps: int  # that the script has taken
    late: int  # rounds that closed without us and that nobody was told of yet (--quorum)

    @property
    def clock(self) -> int:
        """The clock of this worker in the run."""

    @property
    def final_clock(self) -> int:
        """As the server counts it, when this worker is done."""

    @property
    def buffers_clock(self) -> int:
        """So many updates are in the module's buffers; all workers count alike."""

    @property
    def wait_s(self) -> float:
        """Waited in the newest step."""

    @property
    def staleness(self) -> int:
        """Clocks that the newest step was computed ahead of the state that it was computed on."""

    @property
    def merging(self) -> dict[str, float]:
        """For the record: gain and agreement of the updates, once the server knows them, and what is held back of them."""

    def begin(self, event: e.Started) -> None:
        """A place in the run, or another one."""

    def handle(self, event: MemberEffect) -> None: ...

    def ready(self, limit_s: float = ...) -> None:
        """Wait until the parameters hold what is to be computed on."""

    def weigh(self, samples: int) -> None:
        """The next push was computed on so many samples more."""

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """After backward: one optimizer step of this run. Returns the loss of `closure`, which does the backward."""

    def shared(self) -> Array:
        """The shared model as it is now."""

    def flush(self, last: bool) -> Array:
        """Send what is left. `last`: wait until all workers have done their last step, and return the model that all end with;
        else return the shared model as it is then."""

    def residual(self) -> FloatArray | None:
        """A copy of what is still to be sent, float32[size], or None where nothing ever is."""

    def load_residual(self, whole: FloatArray) -> None:
        """Take over a residual of any number of shards, and show it in the replica."""


class StepEngine(Protocol):
    """The part of the engine that a step is given. Settings and mode change with the plan of the run."""

    link: MemberLink
    settings: Settings
    mode: Mode
    waiting: EventWait
    inner: torch.optim.Optimizer
    flat: FlatModel
    slice: ModelSlice | None
    home: Home[Array]
    tables: EmbeddingTables
    tuning: CodecTuning
    privacy: UpdatePrivacy | None
    skips: SkippedSteps
    finished: bool

    @property
    def dense(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters, without those of tables alone."""

    @property
    def group(self) -> Group | None:
        """The group in which this process is one rank, if any."""

    @property
    def hides(self) -> bool:
        """Whether noise is added to all that leaves this worker; nothing else leaves it."""

    def wait(self, done: Callable[[], bool], limit_s: float, what: str, others: bool = False) -> None:
        """As `EventWait.until`."""

    def optimize(self, closure: Callable[[], Any] | None) -> Any:
        """One step of the script's optimizer, along the gradients of all ranks of a group; none where one is not finite."""

    def reduce(self) -> bool:
        """The gradients are those of all ranks of a group. False: one is not finite, and there is none."""

    def looked(self, gradients: Named, unless: str = "") -> bool:
        """Whether these gradients of a step are finite; else nothing is left of them. `unless`: that is so where all are."""

    def send_buffers(self) -> None:
        """To the coordinator, which hears those of the live worker with the lowest rank."""


class RunEngine(StepEngine, Protocol):
    """The part of the engine that the shared model and agreements are given."""

    buffers: BufferState
    sync: SyncStep

    def meet(self, call: str) -> None:
        """The script has called this, on all ranks of a group."""
