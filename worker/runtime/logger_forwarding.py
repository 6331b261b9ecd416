"""Forwards what record() is given to the loggers that the script has open. None of them is imported here."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, float]


STEP = "step_count"  # the name of the run's step at W&B, which is no name of a value (telling.FIGURES)


class LoggerForwarding:
    """writer: the SummaryWriter that was found last. run: of W&B, which has got values in row `row`,
    under the names `defined`."""

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
        """The newest SummaryWriter that is open. TensorBoard keeps no list of them, and a look among all objects takes up to
        0.1 s: we look at the first call, the second, the fourth, and so on."""
        kind = module.SummaryWriter
        if (self.writer is None or not self.writer.all_writers) and self.calls & (self.calls - 1) == 0:
            found = [each for each in gc.get_referrers(kind) if type(each) is kind and each.all_writers]
            self.writer = found[-1] if found else None
        if self.writer is not None and self.writer.all_writers:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def _wandb(self, module: Any, values: Values, step: int) -> None:
        """W&B has one counter of rows, and drops what comes for an earlier one. Scripts move it as they log, so our values join
        the row that is open, beside the run's step. Nobody has closed it since our last ones: then we do."""
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


# A module that the script may have imported, and what logs with it.
LOGGERS: tuple[tuple[str, Callable[[LoggerForwarding, Any, Values, int], None]], ...] = (
    ("torch.utils.tensorboard", LoggerForwarding._tensorboard),
    ("wandb", LoggerForwarding._wandb),
    ("mlflow", LoggerForwarding._mlflow),
)
