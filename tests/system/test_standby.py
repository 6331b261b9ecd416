"""A server whose machine is lost: its standby serves in its place, and nobody joins again."""

from __future__ import annotations

import time

import pytest
from kit.processes import Server, Worker, serving, trained_alone, until
from kit.scripts import distance, flat

RATE = 0.001


def stands_by(original: Server, standby: Server) -> None:
    until(lambda: "stands by: it has all" in original.command.out, f"{original.command}\n{standby.command}")


@pytest.mark.parametrize(("flags", "exact"), [
    ("--sync bsp --shards 2", True),
    ("--sync ssp --shards 2 --compress topk:0.2+int8", False),
])  # fmt: skip
def test_the_standby_goes_on_where_the_server_was(flags: str, exact: bool) -> None:
    with serving(*flags.split(), "--replicas", "1") as server, serving("--standby", server.address) as standby:
        worker = Worker(server.address, rate=RATE)
        worker.train(20)
        stands_by(server, standby)
        worker.train(20)
        server.kill()
        began, clock = time.monotonic(), worker.clock
        worker.train(3)
        took = time.monotonic() - began
        assert worker.clock == clock + 3
        worker.train(20)
        worker.close()
        assert standby.command.wait() == 0, standby.command
        print(took, standby.command)
        assert "serves in the place of" in standby.command.out and took < 11
        if exact:
            assert distance(flat(worker.model), trained_alone(worker.clock, RATE)) < 1e-5
