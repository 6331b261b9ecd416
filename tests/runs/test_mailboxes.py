"""Whole runs whose messages are objects of a mailbox: each ends with the models of the run whose messages are copied."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kit.in_process import Cluster
from kit.ports import MailboxPorts, Ports
from kit.scripts import run, train
from kit.specs import same_bits
from kit.two_levels import sgd

from narrows.protocols.config.settings import Settings

STEPS = 6
RUNS: tuple[dict[str, Any], ...] = (
    {"compress": "dense"},
    {"compress": "int8", "compress_down": "topk:0.2+int8"},
    {"compress": "topk:0.2+sign", "cut": "tensors"},
    {"compress": "2bit", "fragments": 2, "merge_delay": 1},
)


@pytest.mark.parametrize("flags", RUNS, ids=str)
def test_local_steps_through_a_mailbox(flags: dict[str, Any], tmp_path: Path) -> None:
    settings, models = Settings(sync="local", local_steps=2, workers=2, shards=2, **flags), list[Any]()
    for ports in (Ports(), MailboxPorts(f"file://{tmp_path}/mailbox")):
        with closing(ports), run(settings, Cluster(settings, ports=ports)) as started:
            models += started.together(lambda worker: train(STEPS, sgd))
    assert all(same_bits(model, models[0]) for model in models)
