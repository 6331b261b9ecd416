"""ps-plan and the memory of hosts: the plan that fits is taken, and none that does not fit is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.planned_networks import cities, planned

from narrows.protocols.errors import UsageError
from narrows.ps.planner.host_memory import server_models, stage_models, worker_models
from narrows.ps.planner.modes_and_specs import WAYS


def test_the_needs_are_those_of_the_account() -> None:
    way = {str(way): way for way in WAYS}
    bsp, dense, coded = (way[name] for name in ("bsp, dense", "ssp, S = 1, dense", "ssp, S = 1, topk:0.11+sign"))
    assert [round(worker_models(each), 1) for each in (bsp, dense, coded)] == [3.3, 11.3, 7.6]
    assert [round(server_models(bsp, children), 3) for children in (2, 4)] == [5.2, 7.2], "a push of each child waits"
    assert round(server_models(bsp, 2, parent=coded), 3) == 8.2, "the parent's state, a base and a residual"
    assert round(stage_models(1), 3) == 3.3 + 4.2


def test_a_plan_that_fits_is_taken_before_a_faster_one(tmp_path: Path) -> None:
    """Of 2e6 parameters ssp with dense pushes takes 80 MB a worker, and bsp 16 MB."""
    network = cities([2], 1e4, 0)
    wide, _ = planned(tmp_path, network, "--insecure", "--all-hosts", memory_bytes=[1e9, 1e9])
    needed = float(re.search(r"^memory: \S+ needs (\S+) GB", wide, re.M)[1]) * 1e9  # type: ignore[index]
    output, plan = planned(tmp_path, network, "--insecure", "--all-hosts", memory_bytes=[0.99 * needed, 85e6])
    least = float(re.search(r"^memory: \S+ needs (\S+) GB", output, re.M)[1]) * 1e9  # type: ignore[index]
    assert plan and least < needed and "for a worker under" in output


def test_a_plan_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    network = cities([2], 100, 5)
    with pytest.raises(
        UsageError, match=r"needs .* GB for its arrays: .* it has 0.02 GB: leave the host out of the net"
    ):
        planned(tmp_path, network, "--insecure", "--all-hosts", memory_bytes=[20e6, 1e9])
    assert not (tmp_path / "plan.json").exists()
    planned(tmp_path, network, "--insecure", "--all-hosts", memory_bytes=[1e9, 1e9])
