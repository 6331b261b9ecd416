"""When a run starts, which checkpoints it has, when it goes back to one, and when it ends.

Rules
- It starts once so many workers have declared and all shards have the weights that it begins with: those of the
  longest-standing member, of a checkpoint, or of the run above.
- Where checkpoints are of told clocks, other runs have the other stages of the model: then it waits for all its workers.
- A restarted shard begins a generation: every shard goes back to the newest checkpoint they share, all workers join again.
- One checkpoint at a time: a shard keeps few, and the run can only go back to one that all shards have. Unless a time is
  told, so long is left between two that writing them takes 2 % of it.
- It ends when the last worker has left and one has finished. Every shard then writes a checkpoint of the clock reached.
"""

from __future__ import annotations

from collections import Counter

from narrows.protocols import messages as m
from narrows.protocols.config.modes import Rule
from narrows.protocols.config.timing import CHECKPOINT_COST_TIMES, CHECKPOINT_LEAST_NS
from narrows.protocols.effects import NS, Log
from narrows.ps.coordinator.clock_quorum import Clocks
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Decision, Key, Run, Seat


class CheckpointSchedule(Decision):
    def __init__(self, run: Run, rounds: Clocks, above: ParentPlace) -> None:
        self.run, self.rounds, self.above = run, rounds, above
        self.needed = run.settings.workers
        self.weights = -1  # the worker whose first weights are on all shards, to be handed up
        self.checkpoint, self.checkpoint_ns = -1, -1  # the newest asked for, and when; no tick has come: -1
        self.taken: Counter[str] = Counter()  # workers that are not waited for, by the key that said so
        self.rejoin_ns = 0  # when members were last told to join again, 0: never
        self.waits_for_all = False
        self.resumes = False  # a run of gossip that goes on with the models of its workers
        self.said: list[Log] = []
        self.finished_once = False
        self.over_version = 0  # of the first ledger that says so

    @property
    def initialiser(self) -> int:
        """The worker that gives the first weights: the longest-standing member, while the run has none; else -1. Of several
        sources it is the first, and a run of gossip that is resumed knows none before all workers are there."""
        if self.run.started or self.run.restart_clock >= 0:
            return -1
        if self.resumes:
            if len(self.run.declared) < self.needed:
                return -1
            if sources := self.sources[1]:
                return min(sources)[0]
        return self.weights if self.weights >= 0 else min((seat.worker for seat in self.run.declared), default=-1)

    @property
    def sources(self) -> tuple[int, m.Pairs]:
        """The newest round of which there are models of a majority of the workers, -1: none; and which worker gives the
        model of which rank. Workers with one folder have the same files, and each gives one at most."""
        seats = self.run.declared
        if not self.resumes or self.run.started or len(seats) < self.needed:
            return -1, ()
        for number in sorted({number for seat in seats for _, number in seat.models}, reverse=True):
            given = dict[int, int]()  # worker -> rank
            for rank in sorted({rank for seat in seats for rank, of in seat.models if of == number}):
                able = [seat for seat in seats if (rank, number) in seat.models and seat.worker not in given]
                if able:
                    given[min(able, key=lambda seat: (seat.rank != rank, seat.rank)).worker] = rank
            if 2 * len(given) > len(seats):
                return number, tuple(sorted(given.items()))
        return -1, ()

    def tell(self) -> list[Log]:
        said, self.said = self.said, []
        return said

    def _begin(self, now_ns: int) -> None:
        """Start the run, one of gossip at the round of its first weights."""
        shared, sources = self.sources
        if self.resumes:
            text = (
                f"the run goes on from round {shared}, with the mean of the models of {len(sources)} workers"
                if shared >= 0
                else "no round is with a majority of the workers, so the run begins anew"
            )
            self.said.append(Log("resumed", {"round": shared, "text": text}))
        self.run.start(max(shared, 0))
        self.rounds.open(now_ns)

    @property
    def may_declare(self) -> bool:
        """There are workers enough to take part in the run above."""
        return len(self.above.undeclared) >= (1 if self.run.started else self.needed)

    def decide(self, now_ns: int) -> bool:
        """Start, or choose the weights that are handed up."""
        if self.run.started:
            return False
        current, first = self.run.current, self.initialiser
        if len(current) < self.run.shards:
            return False
        if self._gathered(now_ns) and all(map(self._ready, current)):
            self._begin(now_ns)
        elif self.above.child and self.weights < 0 <= first and all(r.weights_from == first for r in current):
            self.weights = first
        else:
            return False
        return True

    def _gathered(self, now_ns: int) -> bool:
        declared = self.run.declared
        # A stage that began without a worker would give it another clock than the other stages of its pipeline have.
        early = self._waited(now_ns) and self.run.settings.checkpoint_clocks < 0
        return bool(declared) and (len(declared) >= self.needed or early)

    def resumed(self) -> None:
        """A user goes on with this run: it starts with as many workers as a new one, whoever was there before."""
        self.waits_for_all = True

    def _waited(self, now_ns: int) -> bool:
        """Who has to join again has had a lease for it."""
        return self.rejoin_ns > 0 and now_ns - self.rejoin_ns > self.run.settings.lease * NS

    def _ready(self, report: m.Report) -> bool:
        """This shard has the weights that the run begins with."""
        if self.above.child:
            return self.above.shown(report)
        return self.run.restart_clock >= 0 or report.weights_from == self.initialiser

    def left(self, seat: Seat, how: str) -> None:
        self.finished_once |= seat.leaving
        if how != "refused":  # then another is to come
            self._gone(seat.key, len(self.run.seats) - 1)

    def absent(self, done: bool, key: Key) -> str:
        """Somebody says that a worker without a seat is gone: a sentence where fewer are waited for. Before a run has
        begun nobody can be done."""
        self.finished_once |= done and (self.run.started or self.rejoin_ns > 0)
        news = self._gone(key, len(self.run.seats))
        failed = f"a worker{f' with the key of {key[0]}' if key[0] else ''} failed before it joined"
        return f"{failed}: the run waits for {self.needed}" if news and not done else ""

    def _gone(self, key: Key, here: int) -> bool:
        """One worker less is waited for at the start. Those who are here are, and with keys one of each other key. Whether that
        is news: anybody may say so without end."""
        if self.run.started:
            return False
        (name, others), before = key, self.needed
        most = max(0, self.run.settings.workers - others)
        self.taken[name] += 1
        if not name or self.taken[name] <= most:
            self.needed = min(self.needed, max(1, here, self.needed - 1))
        return self.needed != before or (name != "" and self.taken[name] == most + 1)

    # Checkpoints, and going back to one.

    def go_back(self, shard: int, now_ns: int, shards: int = 0) -> Log:
        """Begin a generation: this shard was restarted. `shards`: this one is lost with all after it, and so many are left."""
        reached, clock = self.rounds.min_clock, self.shared()
        self.needed = max(1, len(self.run.declared))
        self.finished_once |= any(seat.leaving for seat in self.run.declared)
        self.rejoin_ns = now_ns
        self.run.restart(clock, shards or self.run.shards)
        return Log("restart", {"shard": shard, "from_clock": max(clock, 0), "to_clock": reached})

    def shared(self) -> int:
        """The newest checkpoint that all shards have, -1: none."""
        return max(set.intersection(*(set(r.checkpoints) for r in self.run.reports.values())), default=-1)

    def anew(self) -> None:
        self.checkpoint = -1

    def wake(self, now_ns: int) -> None:
        """Begin to count, with the first tick."""
        if self.checkpoint_ns < 0:
            self.checkpoint_ns = now_ns
            self.rejoin_ns = now_ns if self.run.restart_clock >= 0 and not self.waits_for_all else self.rejoin_ns

    def lapsed(self, now_ns: int) -> bool:
        """Whether all had finished when a shard was restarted, and nobody has come back."""
        return self.deserted and self._waited(now_ns) and not self.run.over

    def tick(self, now_ns: int) -> bool:
        """Ask for a checkpoint, where it is time for that. Under gossip the workers write their models themselves."""
        if self.run.mode.rule is Rule.MIX:
            return False
        clocks, open_ = self.run.settings.checkpoint_clocks, self.run.started and not self.run.over
        if clocks > 0:
            if not (self.tried(self.checkpoint) and open_):
                return False
            self.checkpoint = (self.rounds.min_clock // clocks + 1) * clocks
            return True
        every = self._every_ns
        if not (every and self.tried(self.checkpoint) and open_) or now_ns - self.checkpoint_ns < every:
            return False
        self.checkpoint, self.checkpoint_ns = self.rounds.min_clock + 1, now_ns
        return True

    def tried(self, clock: int) -> bool:
        """All shards have written the checkpoint of this clock, or could not; -1: there is none."""
        return all(clock in (-1, report.tried) for report in self.run.reports.values())

    def ask(self, clock: int) -> bool:
        """Ask for a checkpoint of the clock that is reached. False: another one is being written."""
        if self.checkpoint <= clock and not self.tried(self.checkpoint):
            return False
        self.checkpoint = clock
        return True

    @property
    def _every_ns(self) -> int:
        """From one checkpoint to the next, 0: none but the last. The first is due at once: it has what the run began with."""
        told = self.run.settings.checkpoint_every
        if told >= 0 or self.checkpoint < 0:
            return int(told * NS) if told >= 0 else 1
        slowest = max((report.wrote_ns for report in self.run.reports.values()), default=0)
        return max(CHECKPOINT_LEAST_NS, slowest * CHECKPOINT_COST_TIMES)

    # The end.

    @property
    def deserted(self) -> bool:
        return self.finished_once and not self.run.seats

    def end(self, version: int) -> None:
        self.run.move("end")
        self.checkpoint, self.over_version = self.rounds.min_clock, version

    @property
    def at_rest(self) -> bool:
        """The run is over, and all shards have seen that and done what comes before it."""
        return self.run.over and sum(map(self.rests, self.run.reports.values())) == self.run.shards

    def rests(self, report: m.Report) -> bool:
        """This shard has, where the run is over."""
        done = report.at_rest and report.min_clock >= self.rounds.min_clock
        return done and report.ledger_seen >= self.over_version

    def fields(self, shard: int) -> dict[str, object]:
        return {
            "generation": self.run.generation,
            "restart_clock": self.run.restart_clock,
            "started": self.run.started,
            "initialiser": self.initialiser,
            "sources": self.sources[1],
            "source_round": self.sources[0],
            "checkpoint": self.checkpoint,
            "shared": self.shared() if self.run.complete else -1,
            "over": self.run.over,
            "weights": self.weights,
        }
