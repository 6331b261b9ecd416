"""Switches the module of a worker between its own parameters and the shared model. The main thread owns it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import torch

from narrows.protocols.config.modes import FoldRule
from narrows.worker.model.arrays import SharedWeights
from narrows.worker.runtime.launcher_pipe import say_here
from narrows.worker.sync.sync_step import RunEngine

BUFFERS_LIMIT_S = 10  # after this wait for the run's module buffers a worker shows its own
ASK_S = 1.0  # between two requests for them: this worker may be the one with the lowest rank by now
HEARD_LIMIT_S = 60.0  # all processes of a group have made a request within this


class SharedModel:
    """The shared model in the module of one worker.

    Attributes:
        kept: this worker's own parameters and buffers while the shared model is shown; else None. No parameters: the
            worker's arrays have them.
        asks: a request for the run's module buffers is open.
        told: the answer to the request has arrived.
    """

    def __init__(self, engine: RunEngine) -> None:
        self.engine = engine
        self.kept: tuple[list[torch.Tensor] | None, dict[str, torch.Tensor]] | None = None
        self.asks = self.answered = False

    def show(self) -> None:
        """Show the shared model until `put_back`. After the run the module holds it anyway."""
        engine = self.engine
        if engine.finished or self.kept is not None:
            return
        engine.waiting.calls("eval() or shared()")
        engine.changes.look()
        self.kept = None if engine.sync.unmoved else engine.flat.kept(), engine.buffers.kept()
        try:
            self._set(engine.sync.shared(), own=engine.mode.rule is FoldRule.MIX)
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Put back the parameters and buffers that the module had before `show`."""
        if self.kept is None:
            return
        (parameters, buffers), self.kept = self.kept, None
        if parameters is None:
            self.engine.sync.arrays.show(())
        else:
            self.engine.flat.put_back(parameters)
        self.engine.buffers.put_back(buffers)
        if self.engine.slice is not None:
            self.engine.slice.refresh()
        self.engine.flat.written()

    def end(self, model: SharedWeights, own: bool) -> None:
        """Write the model that this worker ends with to the module; `own` as in `_set`."""
        self.put_back()
        self._set(model, own)

    def heard(self, packed: bytes) -> None:
        """Load the run's module buffers from the coordinator; b"" if this worker's own are the run's."""
        if self.asks or self.kept is not None:  # else the answer is late: this worker computes on its own buffers again
            self.engine.buffers.load(packed)
            self.answered = True

    def _set(self, model: SharedWeights, own: bool = False) -> None:
        """Write a model to the parameters of the module.

        Args:
            model: the values of this process's keys.
            own: the model is this worker's own, so the module keeps this worker's buffers.
        """
        arrays, cut = self.engine.sync.arrays, self.engine.slice
        if cut is not None:
            cut.spread(arrays.joined(model) if isinstance(model, Iterator) else model)
        elif isinstance(model, Iterator):
            arrays.write(model)
        else:
            self.engine.flat.write(model)
        if self.engine.buffers.any and not own and not self.engine.hides:
            self._take_buffers()

    def _take_buffers(self) -> None:
        engine, group = self.engine, self.engine.group
        self.asks, self.answered = True, False
        for _ in range(BUFFERS_LIMIT_S):
            if group is None or group.leads:
                engine.link.ask_buffers(engine.sync.buffers_clock)
            here = partial(self._here, time.monotonic() + ASK_S)
            engine.waiting.until(here, HEARD_LIMIT_S, "the module's buffers")
            if self.answered if group is None else group.least(self.answered)[0]:
                self.asks = False
                return
        self.asks = False
        say_here(f"the run's module buffers did not come within {BUFFERS_LIMIT_S} s: this worker shows its own")

    def _here(self, by_s: float) -> bool:
        """Return whether the buffers have arrived, or the request is to be made again."""
        return self.answered or time.monotonic() > by_s
