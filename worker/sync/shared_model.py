"""Sets what the module of a worker holds: what the worker computes on, or the shared model. The main thread owns it."""

from __future__ import annotations

import time

import torch

from narrows.protocols.config.modes import Rule
from narrows.worker.model.flat import Array
from narrows.worker.model.weight_edit_check import WeightEditCheck
from narrows.worker.runtime.launcher_pipe import complain as say
from narrows.worker.sync.step import RunEngine

BUFFERS_LIMIT_S = 10  # a worker shows its own module buffers where the run's have not come within this
ASK_S = 1.0  # they are asked for again after this: who asked may lead by now
HEARD_LIMIT_S = 60.0  # and all processes of a group have asked as often within this


class SharedModel:
    """kept: own parameters and buffers, while the shared model is shown."""

    def __init__(self, engine: RunEngine) -> None:
        self.engine = engine
        self.changes = WeightEditCheck(engine.flat, engine.tables.weights, engine.settings)  # that the script makes
        self.kept: tuple[list[torch.Tensor], dict[str, torch.Tensor]] | None = None
        self.asks = self.told = False  # the run's module buffers are asked for; they are here

    def show(self) -> None:
        """The shared model, until `put_back`. After the run it is there for good."""
        engine = self.engine
        if engine.finished or self.kept is not None:
            return
        engine.waiting.calls("eval() or shared()")
        self.changes.look()
        kept = engine.flat.kept(), engine.buffers.kept()
        self._set(engine.sync.shared(), own=engine.mode.rule is Rule.MIX)
        self.kept = kept

    def put_back(self) -> None:
        """Parameters and buffers are what they were before `show`."""
        if self.kept is None:
            return
        (parameters, buffers), self.kept = self.kept, None
        self.engine.flat.put_back(parameters)
        self.engine.buffers.put_back(buffers)
        if self.engine.slice is not None:
            self.engine.slice.refresh()
        self.changes.ours()

    def end(self, model: Array, own: bool) -> None:
        """The model that this worker ends with; `own` as in `_set`."""
        self.put_back()
        self._set(model, own)

    def heard(self, packed: bytes) -> None:
        """These are the run's module buffers; b"": this worker's own are."""
        if self.asks or self.kept is not None:  # else they come late: this worker computes on its own again
            self.engine.buffers.load(packed)
            self.told = True

    def _set(self, model: Array, own: bool = False) -> None:
        """`own`: this is a model of this worker alone, whose own buffers go with it."""
        if self.engine.slice is not None:
            self.engine.slice.spread(model)
        else:
            self.engine.flat.write(model)
        if self.engine.buffers.any and not own and not self.engine.hides:
            self._take_buffers()

    def _take_buffers(self) -> None:
        engine, group = self.engine, self.engine.group
        self.asks, self.told = True, False
        for _ in range(BUFFERS_LIMIT_S):
            if group is None or group.leads:
                engine.link.ask_buffers(engine.sync.buffers_clock)
            by = time.monotonic() + ASK_S
            engine.wait(lambda by=by: self.told or time.monotonic() > by, HEARD_LIMIT_S, "the module's buffers")  # type: ignore[misc]
            if self.told if group is None else group.least(self.told)[0]:
                self.asks = False
                return
        self.asks = False
        say(f"the run's module buffers did not come within {BUFFERS_LIMIT_S} s: this worker shows its own")
