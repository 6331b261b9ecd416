"""A run as all decisions see it: how far it has come, who has a seat in it, what its shards have said. And what a decision is.

Rules
- A run moves by `RUN_LIFE` alone, a seat by `SEAT_LIFE`. A seat can end in each phase: its worker leaves, expires or is
  refused, or a generation begins.
- The epoch grows with each change of the members. A worker number is given once in the life of a coordinator.
- A report replaces the one before it. One of an earlier generation says where a shard was, not where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Log
from narrows.protocols.member.heartbeat_summary import SummaryRow


class RunPhase(Enum):
    GATHERING = "gathering"  # workers, and the weights that it begins with
    STARTED = "started"
    OVER = "over"
    CALLED_OFF = "called off"  # over, and not started in this generation


class SeatPhase(Enum):
    WELCOMED = "welcomed"  # it has a rank
    WAITING = "waiting"  # it has declared its model, and this cluster has no place above yet
    DECLARED = "declared"  # it is a member: clocks wait for it
    LEAVING = "leaving"  # it is done, and a member until every shard has its last update


RUN_LIFE: dict[RunPhase, dict[str, RunPhase]] = {
    RunPhase.GATHERING: {"start": RunPhase.STARTED, "restart": RunPhase.GATHERING, "end": RunPhase.CALLED_OFF},
    RunPhase.STARTED: {"restart": RunPhase.GATHERING, "end": RunPhase.OVER},
    RunPhase.OVER: {"restart": RunPhase.CALLED_OFF, "end": RunPhase.OVER},
    # The report that a start waits for may come after the end.
    RunPhase.CALLED_OFF: {"start": RunPhase.OVER, "restart": RunPhase.CALLED_OFF, "end": RunPhase.CALLED_OFF},
}
SEAT_LIFE: dict[SeatPhase, dict[str, SeatPhase]] = {
    SeatPhase.WELCOMED: {"wait": SeatPhase.WAITING, "declare": SeatPhase.DECLARED},
    SeatPhase.WAITING: {"wait": SeatPhase.WAITING, "declare": SeatPhase.DECLARED},
    SeatPhase.DECLARED: {"finish": SeatPhase.LEAVING},
    SeatPhase.LEAVING: {"finish": SeatPhase.LEAVING},
}


Key = tuple[str, int]  # by which a worker was let in: its name, and how many others there are
NO_KEY: Key = ("", 0)


@dataclass(slots=True)
class Seat:
    """One worker, from its Hello on."""

    worker: int
    token: str
    host: str
    rank: int
    peer: bytes
    seen_ns: int
    cut_ns: int = 0  # since when nobody is connected under its name, 0: somebody may be
    asked_ns: int = 0  # when it was last sent something to find that out
    phase: SeatPhase = SeatPhase.WELCOMED
    epoch: int = 0  # in which it declared, 0 before
    start: int = 0  # its clock then
    address: str = ""  # where its peers reach it (gossip)
    models: m.Pairs = ()  # rank, round: of a run before, in files there (gossip)
    below: str = ""  # of a cluster: itself and all below it, a line each
    rows: tuple[SummaryRow, ...] = ()  # its summary, and those of all below it, as seen from here
    ready_sent: bool = False
    last: int = -1  # its final clock, while it is leaving
    name: bytes = b""  # of its routing ids: nobody else speaks for it
    move: int = 0  # number of the newest Move that it has
    before: int = 0  # its epoch before the keys were cut anew, while it does not know, else 0
    key: Key = NO_KEY
    copied: bool = False  # it has a standby, which goes on with another connection
    road_ns: int = 0  # the longest round trip to it of late, as it says

    @property
    def skipped(self) -> int:
        """Steps that it has left out, since their gradients were not finite."""
        return self.rows[0].summary.skipped if self.rows else 0

    @property
    def leaving(self) -> bool:
        return self.phase is SeatPhase.LEAVING

    def wait(self) -> None:
        self.phase = SEAT_LIFE[self.phase]["wait"]

    def declare(self, epoch: int, start: int, address: str) -> None:
        self.phase = SEAT_LIFE[self.phase]["declare"]
        self.epoch, self.start, self.address = epoch, start, address

    def finish(self, clock: int, now_ns: int) -> None:
        self.phase = SEAT_LIFE[self.phase]["finish"]
        self.last, self.seen_ns = clock, now_ns


def skips(seat: Seat, clock: int) -> Log:
    """Tell the steps that a member has left out by this clock of the run, since their gradients were not finite."""
    told: dict[str, object] = {"worker": seat.worker, "rank": seat.rank, "host": seat.host, "clock": clock}
    return Log("skipped", told | {"steps": seat.skipped})


class Run:
    """`restart_clock`: the checkpoint that this generation starts from, -1: none."""

    def __init__(self, settings: Settings, first_epoch: int, restart_clock: int) -> None:
        self.settings, self.mode, self.shards = settings, settings.mode(), settings.shards
        self.phase = RunPhase.GATHERING
        self.first_epoch = self.epoch = self.generation = first_epoch
        self.restart_clock = restart_clock
        self.seats: dict[int, Seat] = {}  # by worker, in the order of their Hellos
        self.next_worker = 0
        self.reports: dict[int, m.Report] = {}  # the newest of each shard
        self.first_round = 0  # that a run of gossip begins with

    @property
    def started(self) -> bool:
        return self.phase in (RunPhase.STARTED, RunPhase.OVER)

    @property
    def over(self) -> bool:
        return self.phase in (RunPhase.OVER, RunPhase.CALLED_OFF)

    def move(self, step: str) -> None:
        self.phase = RUN_LIFE[self.phase][step]

    def start(self, first_round: int) -> None:
        """All workers are there. `first_round`: that they begin with under gossip."""
        self.first_round = first_round
        self.move("start")

    def restart(self, clock: int, shards: int) -> None:
        """A generation without members, over so many shards."""
        self.move("restart")
        self.generation, self.restart_clock = self.changed(), clock
        self.seats.clear()
        self._adopt(replace(self.settings, shards=shards))

    def shift(self, settings: Settings, clock: int) -> None:
        """A generation with these settings, which begins where the one before has come to: its members stay."""
        self.generation, self.restart_clock = self.changed(), clock
        for seat in [seat for seat in self.seats.values() if not seat.epoch]:
            del self.seats[seat.worker]  # it was told of the shards before, and joins again
        for seat in self.seats.values():
            seat.before, seat.epoch, seat.start = seat.epoch, self.epoch, clock
        self._adopt(settings)

    def _adopt(self, settings: Settings) -> None:
        self.settings, self.mode, self.shards = settings, settings.mode(), settings.shards
        shards = self.shards
        for shard in [shard for shard in self.reports if shard >= shards]:
            del self.reports[shard]

    def changed(self) -> int:
        """A new epoch."""
        self.epoch += 1
        return self.epoch

    @property
    def declared(self) -> list[Seat]:
        """The members."""
        return [seat for seat in self.seats.values() if seat.epoch]

    def leads(self, seat: Seat) -> bool:
        """Whether it is the live worker with the lowest rank, whose module buffers are those of the run."""
        return seat.epoch > 0 and all(seat.rank <= other.rank for other in self.declared)

    def named(self, token: str) -> Seat | None:
        return next((seat for seat in self.seats.values() if seat.token == token), None)

    def sit(self, hello: m.Hello, peer: bytes, now_ns: int, key: Key = NO_KEY) -> Seat:
        """A seat at the lowest free rank."""
        taken = {seat.rank for seat in self.seats.values()}
        rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        seat = Seat(self.next_worker, hello.token, hello.host, rank, peer, now_ns, name=m.name_of(peer), key=key)
        self.seats[self.next_worker] = seat
        self.next_worker += 1
        return seat

    @property
    def where(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Port and host of each shard, as in Welcome; all have reported."""
        reports = [self.reports[shard] for shard in range(self.shards)]
        hosts = tuple(report.host for report in reports)
        return tuple(report.port for report in reports), hosts if any(hosts) else ()

    @property
    def complete(self) -> bool:
        """All shards have reported."""
        return len(self.reports) == self.shards

    def planned(self, shard: int) -> bool:
        """This shard is in the present generation and has the plan."""
        report = self.reports.get(shard)
        return report is not None and report.planned and report.generation == self.generation

    @property
    def current(self) -> list[m.Report]:
        return [report for shard, report in self.reports.items() if self.planned(shard)]


class Decision:
    """One matter that is decided of a run, and the only owner of its fields. The coordinator asks all in turn, from the first
    again after each decision that was taken, until there is none to take."""

    def decide(self, now_ns: int) -> bool:
        """Take one decision, if there is one to take."""
        return False

    def left(self, seat: Seat, how: str) -> None:
        """A worker is gone: "left", "stopped" before it was done, "expired" or "refused"."""

    def anew(self) -> None:
        """A generation has begun: forget what counted in the one before."""

    def tell(self) -> list[Log]:
        """Return what is to be said with the next ledgers, once."""
        return []

    def fields(self, shard: int) -> dict[str, object]:
        """Its part of a ledger for this shard."""
        return {}
