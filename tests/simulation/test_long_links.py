"""A member whose road to the server is long, or varies: it is not expired while it lives, and costs no more than its lease."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import RECONNECT_LEAST_NS, RECONNECT_ROUND_TRIPS, ROUND_TRIP_MAX_NS
from narrows.protocols.effects import NS
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.run import Seat
from simulation.actors import peer_of
from simulation.campaigns import LEASE_S, TICK_NS, Run, case_of
from simulation.simulator import MS, Faults, Random, Wire

FAR = 1  # who is behind the road
HEARD_NS = 30 * NS  # by then the road is known
LONG, VARYING = (2000, 2000), (0, 4000)  # ms, each way


@dataclass(slots=True)
class Road(Wire):
    """Each message takes between `delay_ns` and `most_ns`; none overtakes another."""

    most_ns: int = 0
    random: Random = field(default_factory=partial(Random, 1))

    def arrival_ns(self, now_ns: int, size: int) -> int:
        self.free_ns = max(self.free_ns, now_ns + self.random.between(self.delay_ns, self.most_ns))
        return self.free_ns


class Far(Run):
    """All workers but one have a short road, and nothing else goes wrong. `expired`: what the server said of who was."""

    hurried = False

    def __init__(self, sync: str, ways: tuple[int, int]) -> None:
        self.expired: list[str] = []
        least, most = (way * MS for way in ways)
        settings = Settings(
            sync=sync, workers=3, shards=2, lease=LEASE_S, push="update", compress_down="dense"
        ).validated()
        case = replace(case_of(0), settings=settings, faults=Faults(), crash=None, cut=None, stop=None, stranger=False,
                       step_ns=(20 * MS,) * 3, max_grad_norm=0.0, slow_ns=0)  # fmt: skip
        super().__init__(case, trace=self._hear)
        for shard in range(settings.shards):
            far, there = f"w{FAR}.0", f"s{shard}"
            self.sim.lay(far, there, Road(least, 1, most_ns=most, random=Random(shard)))
            self.sim.lay(there, far, Road(least, 1, most_ns=most, random=Random(~shard)))

    def _hear(self, now_ns: int, text: str, message: m.Message | None) -> None:
        if "how=expired" in text:
            self.expired.append(text)

    def until(self, time_ns: int) -> tuple[Coordinator, Seat]:
        """Go on until then; the coordinator, and the seat of who is far."""
        while self.sim.now_ns < time_ns:
            assert self.sim.step() and not self._ended()
        coordinator = self.servers[0].coordinator
        assert coordinator is not None
        return coordinator, coordinator.seats[self.workers[FAR].worker]


@pytest.mark.parametrize("sync", ["bsp", "ssp"])
@pytest.mark.parametrize("ways", [LONG, VARYING], ids=["long", "varying"])
def test_who_lives_behind_a_road_is_not_expired(sync: str, ways: tuple[int, int]) -> None:
    """Also where one word comes later than the one before it by more than a lease."""
    run = Far(sync, ways)
    run.run()
    assert run.expired == []


@pytest.mark.parametrize("ways", [LONG, VARYING], ids=["long", "varying"])
def test_one_that_dies_costs_the_others_the_lease_that_is_shown(ways: tuple[int, int]) -> None:
    run = Far("bsp", ways)
    coordinator, seat = run.until(HEARD_NS)
    run.sim.crash(f"w{FAR}.0")
    while seat.worker in coordinator.seats:
        lease_ns, seen_ns = coordinator.members.lease_ns(seat), seat.seen_ns
        assert f"lease {lease_ns / NS:.0f} s" in coordinator.tree()
        assert run.sim.step()
    assert 0 < run.servers[0].now_ns - seen_ns - lease_ns <= TICK_NS
    assert (LEASE_S + 2) * NS < lease_ns <= (LEASE_S + 3 * 2 * 4 + 2 * 4) * NS  # three steps of it, each a round trip
    assert len(run.expired) == 1
    run.run()
    assert len(run.expired) == 1


def test_one_whose_connection_ends_has_time_to_connect_anew() -> None:
    run = Far("bsp", LONG)
    coordinator, seat = run.until(HEARD_NS)
    assert 4 * NS <= seat.road_ns < 5 * NS and coordinator.members.lease_ns(seat) >= LEASE_S * NS + seat.road_ns
    now_ns = run.servers[0].now_ns
    seat.seen_ns = now_ns + 100 * NS  # for the rest of this test nothing but the end of the connection counts
    coordinator.members.unreached(peer_of(f"w{FAR}.0"), now_ns)
    limit_ns = min(coordinator.members.lease_ns(seat), RECONNECT_LEAST_NS + RECONNECT_ROUND_TRIPS * seat.road_ns)
    assert limit_ns > 2 * RECONNECT_LEAST_NS
    assert seat not in coordinator.members.expired(now_ns + limit_ns)
    assert seat in coordinator.members.expired(now_ns + limit_ns + 1)


def test_nobody_has_a_longer_lease_by_saying_so() -> None:
    """Than a road may lengthen it."""
    run = Far("bsp", (1, 1))
    coordinator, seat = run.until(NS)
    before_ns = coordinator.members.lease_ns(seat) - seat.road_ns
    for said, counts in ((1 << 60, ROUND_TRIP_MAX_NS), (-1, 0)):
        beat = m.Heartbeat(seat.worker, seat.epoch, 1, road_ns=said)
        coordinator.handle(peer_of(f"w{FAR}.0"), beat, run.servers[0].now_ns)
        assert coordinator.members.lease_ns(seat) == before_ns + counts
