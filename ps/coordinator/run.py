"""The state of a run that all decisions share, and `Decision`, the base class of the coordinator's decisions.

How it works
1. A worker's Hello gives it a `Seat` (`Run.sit`): a worker number, and the lowest free rank.
2. Its Declare makes it a member: the run has a new epoch, and the seat notes this epoch and the worker's first clock.
3. `Run.start` starts the run once enough workers are members and the shards have the first weights.
4. Shards report. `Run.reports` keeps the newest Report of each shard; decisions read from it what is on all shards.
5. `Run.restart` begins a generation without members: a shard was restarted or lost, so all workers join again.
   `Run.shift` begins a generation whose members stay: the run was resharded or replanned.

Rules
- The phase of a run changes by `RUN_LIFE` alone, the phase of a seat by `SEAT_LIFE`. A seat can end in each phase: its
  worker leaves, expires or is refused, or a generation begins.
- The epoch grows with each change of the members. A coordinator gives each worker number once in its life.
- Each report replaces the one before. A report of an earlier generation shows where a shard was, not where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import ROUND_TRIP_MAX_NS
from narrows.protocols.effects import Log
from narrows.protocols.member.heartbeat_summary import SummaryRow


class RunPhase(Enum):
    """How far a run has come; `RUN_LIFE` has the transitions."""

    GATHERING = "gathering"  # the run waits for its workers and for its first weights
    STARTED = "started"
    OVER = "over"
    CALLED_OFF = "called off"  # over, and not started in this generation


class SeatPhase(Enum):
    """How far a worker's seat has come; `SEAT_LIFE` has the transitions."""

    WELCOMED = "welcomed"  # the worker has a rank
    WAITING = "waiting"  # the worker has declared its model, and this cluster has no place in its parent's run yet
    DECLARED = "declared"  # the worker is a member: clocks wait for it
    LEAVING = "leaving"  # the worker is done; it stays a member until every shard has its last update


RUN_LIFE: dict[RunPhase, dict[str, RunPhase]] = {
    RunPhase.GATHERING: {"start": RunPhase.STARTED, "restart": RunPhase.GATHERING, "end": RunPhase.CALLED_OFF},
    RunPhase.STARTED: {"restart": RunPhase.GATHERING, "end": RunPhase.OVER},
    RunPhase.OVER: {"restart": RunPhase.CALLED_OFF, "end": RunPhase.OVER},
    # The report that the start waits for may arrive after the end.
    RunPhase.CALLED_OFF: {"start": RunPhase.OVER, "restart": RunPhase.CALLED_OFF, "end": RunPhase.CALLED_OFF},
}
SEAT_LIFE: dict[SeatPhase, dict[str, SeatPhase]] = {
    SeatPhase.WELCOMED: {"wait": SeatPhase.WAITING, "declare": SeatPhase.DECLARED},
    SeatPhase.WAITING: {"wait": SeatPhase.WAITING, "declare": SeatPhase.DECLARED},
    SeatPhase.DECLARED: {"finish": SeatPhase.LEAVING},
    SeatPhase.LEAVING: {"finish": SeatPhase.LEAVING},
}


Key = tuple[str, int]  # the key that a worker connected with: its name, and the number of other keys in the folder
NO_KEY: Key = ("", 0)


@dataclass(slots=True)
class Seat:
    """The coordinator's entry for one worker or cluster, from its Hello on."""

    worker: int  # its number, given once in the life of a coordinator
    token: str  # the worker's own random name, by which a repeated Hello finds this seat
    host: str
    rank: int  # the lowest free one at its Hello; another worker may get it later
    peer: bytes  # routing id of its newest connection
    seen_ns: int  # when its newest message arrived: its lease runs from here
    cut_ns: int = 0  # since when no connection has its name; 0: there may be one
    asked_ns: int = 0  # when the coordinator last sent a message to find out whether it is connected
    phase: SeatPhase = SeatPhase.WELCOMED
    epoch: int = 0  # the epoch in which it became a member; 0 before
    start: int = 0  # its clock at that time
    address: str = ""  # where its peers reach it (gossip)
    models: m.Pairs = ()  # (rank, round) of the models of an earlier run that it has in files (gossip)
    below: str = ""  # of a cluster: a line for the cluster and for each member below it
    rows: tuple[SummaryRow, ...] = ()  # its summary and those of all members below it, with their paths from here
    ready_sent: bool = False
    last: int = -1  # its final clock, while it is leaving
    name: bytes = b""  # prefix of its routing ids: the coordinator takes its messages under this name alone
    move: int = 0  # number of the newest Reshard that it has acknowledged
    hold: int = -1  # the clock that it holds at by that Reshard, where members hold at clocks of their own
    before: int = 0  # its epoch before the newest resharding, until it acknowledges that resharding; then 0
    key: Key = NO_KEY
    copied: bool = False  # it has a standby, which would go on over another connection
    road_ns: int = 0  # the longest recent round trip that it measured

    @property
    def skipped(self) -> int:
        """Number of steps that the worker skipped because their gradients were not finite."""
        return self.rows[0].summary.skipped if self.rows else 0

    @property
    def leaving(self) -> bool:
        return self.phase is SeatPhase.LEAVING

    def wait(self) -> None:
        """The worker has declared its model, and waits for this cluster's place in its parent's run."""
        self.phase = SEAT_LIFE[self.phase]["wait"]

    def declare(self, epoch: int, start: int, address: str, models: m.Pairs = ()) -> None:
        """The worker becomes a member.

        Args:
            epoch: the epoch in which it becomes one.
            start: its first clock.
            address: where its peers reach it (gossip).
            models: (rank, round) of the models of an earlier run that it has in files (gossip).
        """
        self.phase = SEAT_LIFE[self.phase]["declare"]
        self.epoch, self.start, self.address, self.models = epoch, start, address, models

    def finish(self, clock: int, now_ns: int) -> None:
        """The worker leaves after its last step; `clock` is its final clock."""
        self.phase = SEAT_LIFE[self.phase]["finish"]
        self.last, self.seen_ns = clock, now_ns

    def readied(self) -> None:
        """Its Ready is on the way."""
        self.ready_sent = True

    def heard(self, now_ns: int, peer: bytes = b"") -> None:
        """A message of the worker renews its lease. `peer`: the routing id of a message to the coordinator."""
        self.peer, self.seen_ns, self.cut_ns = peer or self.peer, now_ns, 0

    def beat(self, heartbeat: m.Heartbeat) -> None:
        """Take what a heartbeat says of the worker's machine: the members below it, its standby, its round trip."""
        self.below, self.copied = heartbeat.below, heartbeat.copied
        self.road_ns = min(max(0, heartbeat.road_ns), ROUND_TRIP_MAX_NS)

    def show(self, rows: tuple[SummaryRow, ...]) -> None:
        """Take the newest summaries of the worker and of the members below it."""
        self.rows = rows

    def unreached(self, now_ns: int) -> None:
        """No connection has the worker's name."""
        self.cut_ns = self.cut_ns or now_ns

    def probed(self, now_ns: int) -> None:
        """A message to find out whether the worker is connected is on the way."""
        self.asked_ns = now_ns

    def follow(self, number: int, done: bool, hold: int = -1) -> bool:
        """The worker has the Reshard of this number. `done`: it is the newest, and the keys have moved. `hold`: the clock
        that the worker holds at.

        Returns:
            False if that was known.
        """
        news, self.move, self.hold = self.move != number, number, hold
        if done:
            self.before = 0
        return news


def skips(seat: Seat, clock: int) -> Log:
    """Log event: the number of steps that a member has skipped by this clock, as their gradients were not finite."""
    values: dict[str, object] = {"worker": seat.worker, "rank": seat.rank, "host": seat.host, "clock": clock}
    return Log("skipped", values | {"steps": seat.skipped})


class Run:
    """The state of a run.

    Args:
        settings: of the run.
        first_epoch: the first epoch, greater than any of an earlier life of the coordinator.
        restart_clock: clock of the checkpoint that this generation starts from; -1: none.
    """

    def __init__(self, settings: Settings, first_epoch: int, restart_clock: int) -> None:
        self.settings, self.mode, self.shards = settings, settings.mode(), settings.shards
        self.phase = RunPhase.GATHERING
        # The first epoch of this life of the coordinator, the present one, and the first one of this generation.
        self.first_epoch = self.epoch = self.generation = first_epoch
        self.restart_clock = restart_clock
        self.seats: dict[int, Seat] = {}  # by worker, in the order of their Hellos
        self.next_worker = 0  # number of the next worker that says Hello
        self.reports: dict[int, m.Report] = {}  # by shard, its newest report
        self.first_round = 0  # the round that a gossip run begins with

    @property
    def started(self) -> bool:
        """True from the start of this generation on, also after its end."""
        return self.phase in (RunPhase.STARTED, RunPhase.OVER)

    @property
    def over(self) -> bool:
        """True after the end of the run."""
        return self.phase in (RunPhase.OVER, RunPhase.CALLED_OFF)

    def move(self, step: str) -> None:
        """Change the phase by a step of `RUN_LIFE`: "start", "restart" or "end"."""
        self.phase = RUN_LIFE[self.phase][step]

    def start(self, first_round: int) -> None:
        """Start the run. `first_round`: under gossip, the round that all workers begin with."""
        self.first_round = first_round
        self.move("start")

    def restart(self, clock: int, shards: int) -> None:
        """Begin a generation without members, over `shards` shards, from the checkpoint of `clock`."""
        self.move("restart")
        self.generation, self.restart_clock = self.changed(), clock
        self.seats.clear()
        self._adopt(replace(self.settings.back_at(clock), shards=shards))

    def shift(self, settings: Settings, clock: int, starts: Mapping[int, int]) -> None:
        """Begin a generation with these settings at `clock`, the present clock. The members keep their seats.

        Args:
            settings: of the generation.
            clock: of the checkpoint that it begins from.
            starts: by worker, the clock at which the member goes on.
        """
        self.generation, self.restart_clock = self.changed(), clock
        for seat in [seat for seat in self.seats.values() if not seat.epoch]:
            del self.seats[seat.worker]  # its Welcome named the shards of the generation before: it joins again
        for seat in self.seats.values():
            seat.before, seat.epoch, seat.start = seat.epoch, self.epoch, starts[seat.worker]
        self._adopt(settings)

    def _adopt(self, settings: Settings) -> None:
        self.settings, self.mode, self.shards = settings, settings.mode(), settings.shards
        shards = self.shards
        for shard in [shard for shard in self.reports if shard >= shards]:
            del self.reports[shard]

    def changed(self) -> int:
        """Begin an epoch, and return its number."""
        self.epoch += 1
        return self.epoch

    @property
    def declared(self) -> list[Seat]:
        """The seats of the members, in the order of their Hellos."""
        return [seat for seat in self.seats.values() if seat.epoch]

    def leads(self, seat: Seat) -> bool:
        """True for the live worker of the lowest rank, whose module buffers are those of the run."""
        return seat.epoch > 0 and all(seat.rank <= other.rank for other in self.declared)

    def named(self, token: str) -> Seat | None:
        """The seat of the worker with this token, None: it has none."""
        return next((seat for seat in self.seats.values() if seat.token == token), None)

    def sit(self, hello: m.Hello, peer: bytes, now_ns: int, key: Key = NO_KEY) -> Seat:
        """Make a seat for the sender of a Hello, at the lowest free rank."""
        taken = {seat.rank for seat in self.seats.values()}
        rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        seat = Seat(self.next_worker, hello.token, hello.host, rank, peer, now_ns, name=m.name_of(peer), key=key)
        self.seats[self.next_worker] = seat
        self.next_worker += 1
        return seat

    @property
    def where(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Ports and hosts of the shards, as Welcome has them. Call it once all shards have reported."""
        reports = [self.reports[shard] for shard in range(self.shards)]
        hosts = tuple(report.host for report in reports)
        return tuple(report.port for report in reports), hosts if any(hosts) else ()

    @property
    def complete(self) -> bool:
        """True if all shards have reported."""
        return len(self.reports) == self.shards

    def planned(self, shard: int) -> bool:
        """True if this shard has the model spec and is in the present generation."""
        report = self.reports.get(shard)
        return report is not None and report.planned and report.generation == self.generation

    @property
    def current(self) -> list[m.Report]:
        """The reports of the shards that have the model spec and are in the present generation."""
        return [report for shard, report in self.reports.items() if self.planned(shard)]


class Decision:
    """One matter that the coordinator decides in a run. A decision is the only owner of its fields.

    The coordinator calls `decide` of all decisions in their order, from the first again after each True, until all
    return False. Then it builds a ledger of their `fields`.
    """

    def decide(self, now_ns: int) -> bool:
        """Take one decision. Return False if there is none to take."""
        return False

    def left(self, seat: Seat, how: str) -> None:
        """A worker is gone. `how`: "left" after its last step, "stopped" before it, "expired" or "refused"."""

    def anew(self) -> None:
        """A generation without members has begun: forget the state of the one before."""

    def tell(self) -> list[Log]:
        """Return the log events that go out with the next ledgers; each is returned once."""
        return []

    def fields(self, shard: int) -> dict[str, object]:
        """Return this decision's fields of the ledger for this shard, by the names of `Ledger`."""
        return {}
