"""record() goes on to the loggers that a script has open, and to no other."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from narrows.worker.forwarding import Forwarding


class SummaryWriter:
    """As TensorBoard's: `all_writers` is None once it is closed."""

    def __init__(self) -> None:
        self.all_writers: dict[str, str] | None = {"here": "there"}
        self.rows: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))


class Run:
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((values, step))


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
    forwarding = Forwarding()
    forwarding.forward({"loss": 0.5, "accuracy": 0.75}, 3)
    assert writer.rows == [("loss", 0.5, 3), ("accuracy", 0.75, 3)] and not closed.rows
    assert run.rows == logged == [({"loss": 0.5, "accuracy": 0.75}, 3)]
    wandb.run, mlflow.active_run, writer.all_writers = None, lambda: None, None
    forwarding.forward({"loss": 0.25}, 4)
    assert len(writer.rows) == 2 and len(run.rows) == len(logged) == 1


def test_where_none_is_imported_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "torch.utils.tensorboard"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = set(sys.modules)
    Forwarding().forward({"loss": 0.5}, 1)
    assert set(sys.modules) == before
