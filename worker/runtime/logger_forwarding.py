"""Forwards the values of record() to the loggers that the script has open. It imports none of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, float]


STEP = "step_count"  # the run's step at W&B; record() takes no such name (launcher_pipe.FIGURES)


class LoggerForwarding:
    """Finds the script's open loggers, and logs values with them.

    Attributes:
        calls: calls of `forward` so far.
        writer: the SummaryWriter that was found last, if any.
        run: the W&B run that got values last, in its row `row`, under the names `defined`.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.writer: Any = None
        self.run: Any = None
        self.row = -1
        self.defined: set[str] = set()

    def forward(self, values: Values, step: int) -> None:
        self.calls += 1
        for name, log in LOGGERS:
            if (module := sys.modules.get(name)) is not None:
                log(self, module, values, step)

    def _tensorboard(self, module: Any, values: Values, step: int) -> None:
        """Log with the newest open SummaryWriter.

        TensorBoard keeps no list of its writers, and a search among all objects takes up to 0.1 s. So without a writer
        only calls 1, 2, 4, 8, ... search.
        """
        kind = module.SummaryWriter
        if (self.writer is None or not self.writer.all_writers) and self.calls & (self.calls - 1) == 0:
            found = [each for each in gc.get_referrers(kind) if type(each) is kind and each.all_writers]
            self.writer = found[-1] if found else None
        if self.writer is not None and self.writer.all_writers:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def _wandb(self, module: Any, values: Values, step: int) -> None:
        """Log with W&B, in the row that is open, together with the run's step.

        W&B has one counter of rows, and drops values for an earlier row. Scripts advance the counter when they log. If
        the script has not closed the row since the last values, this method closes it first.
        """
        run = module.run
        if run is None:
            return
        if run is not self.run:
            self.run, self.row, self.defined = run, -1, set()
        for name in values.keys() - self.defined:
            run.define_metric(name, step_metric=STEP)
            self.defined.add(name)
        if run.step == self.row:
            run.log({}, commit=True)
        run.log({**values, STEP: step}, commit=False)
        self.row = run.step

    def _mlflow(self, module: Any, values: Values, step: int) -> None:
        if module.active_run() is not None:
            module.log_metrics(dict(values), step=step)


# The module of a logger, which the script may have imported, and the method that logs with it.
LOGGERS: tuple[tuple[str, Callable[[LoggerForwarding, Any, Values, int], None]], ...] = (
    ("torch.utils.tensorboard", LoggerForwarding._tensorboard),
    ("wandb", LoggerForwarding._wandb),
    ("mlflow", LoggerForwarding._mlflow),
)
