"""record() goes on to the loggers that a script has open, and to no other."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from narrows.worker.runtime.logger_forwarding import LoggerForwarding


class SummaryWriter:
    """As TensorBoard's: `all_writers` is None once it is closed."""

    def __init__(self) -> None:
        self.all_writers: dict[str, str] | None = {"here": "there"}
        self.rows: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))


class Run:
    """As W&B's: one counter of rows, and values for an earlier one are dropped."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: dict[int, dict[str, float]] = {}
        self.axes: dict[str, str] = {}

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float], commit: bool = True, step: int | None = None) -> None:
        if step is not None and step < self.step:
            return
        self.step = self.step if step is None else step
        self.rows.setdefault(self.step, {}).update(values)
        self.step += commit and step is None


def module(monkeypatch: pytest.MonkeyPatch, name: str, **values: Any) -> Any:
    made = ModuleType(name)
    made.__dict__.update(values)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_each_logger_that_is_open_gets_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    run, logged = Run(), list[Any]()
    wandb = module(monkeypatch, "wandb", run=run)
    mlflow = module(
        monkeypatch, "mlflow", active_run=lambda: 1, log_metrics=lambda values, step: logged.append((values, step))
    )
    module(monkeypatch, "torch.utils.tensorboard", SummaryWriter=SummaryWriter)
    closed, writer = SummaryWriter(), SummaryWriter()
    closed.all_writers = None
    forwarding = LoggerForwarding()
    forwarding.forward({"loss": 0.5, "accuracy": 0.75}, 3)
    assert writer.rows == [("loss", 0.5, 3), ("accuracy", 0.75, 3)] and not closed.rows
    assert logged == [({"loss": 0.5, "accuracy": 0.75}, 3)]
    assert run.rows == {0: {"loss": 0.5, "accuracy": 0.75, "step_count": 3}}
    assert run.axes == dict.fromkeys(("loss", "accuracy"), "step_count")
    wandb.run, mlflow.active_run, writer.all_writers = None, lambda: None, None
    forwarding.forward({"loss": 0.25}, 4)
    assert len(writer.rows) == 2 and len(run.rows) == len(logged) == 1


def test_what_is_recorded_joins_the_row_of_wandb_that_the_script_has_open(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    module(monkeypatch, "wandb", run=run)
    forwarding = LoggerForwarding()
    for step in (7, 8):
        forwarding.forward({"loss": step / 10}, step)  # row 0, and as nobody closed it, row 1
    assert run.rows == {0: {"loss": 0.7, "step_count": 7}, 1: {"loss": 0.8, "step_count": 8}}
    run.log({"mine": 1.0})
    forwarding.forward({"loss": 0.9}, 9)
    run.log({"mine": 2.0}, step=2)
    assert run.rows[1]["mine"] == 1.0 and run.rows[2] == {"loss": 0.9, "step_count": 9, "mine": 2.0}


def test_where_none_is_imported_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    LoggerForwarding().forward({"loss": 0.5}, 1)
    assert set(sys.modules) == before
