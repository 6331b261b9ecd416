"""The kit of these tests ends what it started, and leaves out no mode and no stage of a SPEC."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from kit import scripts
from kit.scripts import run, train
from kit.specs import EACH_STAGE, MODES, SPECS

from narrows.compression.spec import STAGES
from narrows.protocols.config import modes
from narrows.protocols.config.settings import Settings


def sgd(model: torch.nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_worker_that_waits_for_one_that_never_steps_ends_with_its_run() -> None:
    said: list[str] = []

    def waits() -> None:
        try:
            train(1, sgd)
        except RuntimeError as error:
            said.append(str(error))

    with run(Settings(sync="bsp", workers=2)) as started:  # the other one does nothing
        thread = started.aside(waits)
    assert not thread.is_alive()
    assert said == ["the run of this test is over"]


def test_a_thread_that_outlives_its_run_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts, "ENDS_S", 0.1)
    over = threading.Event()

    def lasts() -> None:
        over.wait(30.0)

    with pytest.raises(AssertionError, match="a thread goes on"), run(Settings(sync="bsp")) as started:
        thread = started.aside(lasts)
    over.set()
    thread.join(30.0)
    assert not thread.is_alive()


def test_every_mode_and_every_stage_is_tried() -> None:
    assert {flags["sync"] for flags in MODES.values()} == modes.MODES.keys()
    for specs in (SPECS, EACH_STAGE):
        assert {stage.partition(":")[0] for spec in specs for stage in spec.split("+")} == STAGES.keys()
