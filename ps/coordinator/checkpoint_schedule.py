"""Decides when a run starts, when its shards write checkpoints, when it goes back to one, and when it ends.

How it works
1. The run waits until `needed` workers are members and all shards have its first weights (`decide`). The weights are
   those of the longest-standing member, of a checkpoint, or of the parent's run. A worker that ends before the start
   lowers `needed` (`left`, `absent`).
2. `tick` asks for a checkpoint by its clock, in the ledger. Each shard writes it and reports its checkpoints.
3. A shard that was restarted begins a generation (`go_back`): every shard goes back to the newest checkpoint that all
   have (`shared`), and all workers join again. The run starts once they have, or after a lease.
4. The run ends when the last worker has left and at least one has finished (`deserted`, `end`). Every shard then writes
   a checkpoint of the present clock. `at_rest` is true once all shards have reported it.

Rules
- Shards write one checkpoint at a time: a shard keeps few, and the run can go back only to one that all shards have.
- Without --checkpoint-every the time between two checkpoints is long enough that writing them takes 2 % of it.
- With --checkpoint-clocks other runs have the other stages of the model. Then the run always waits for all its workers.
"""

from __future__ import annotations

from collections import Counter

from narrows.protocols import messages as m
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.timing import CHECKPOINT_COST_TIMES, CHECKPOINT_LEAST_NS
from narrows.protocols.effects import NS, Log
from narrows.ps.coordinator.clocks import Clocks
from narrows.ps.coordinator.parent_place import ParentPlace
from narrows.ps.coordinator.run import Decision, Key, Run, Seat


class CheckpointSchedule(Decision):
    """Decides when the run starts, takes a checkpoint, goes back to one, and ends."""

    def __init__(self, run: Run, clocks: Clocks, above: ParentPlace) -> None:
        self.run, self.clocks, self.above = run, clocks, above
        self.needed = run.settings.workers  # number of members that the start waits for
        self.weights = -1  # in a cluster: the worker whose first weights all shards have, for the parent; -1: none yet
        self.checkpoint, self.checkpoint_ns = -1, -1  # clock of the newest one asked for, and when; -1 before a tick
        self.taken: Counter[str] = Counter()  # by key, workers that ended before the start
        self.rejoin_ns = 0  # since when the members of an earlier generation have to join again, 0: there are none
        self.waits_for_all = False  # a user resumed the run: it starts with as many workers as a new one
        self.resumes = False  # a gossip run that goes on with the models of its workers
        self.said: list[Log] = []
        self.finished_once = False  # a worker has done its last step
        self.over_version = 0  # version of the first ledger that says that the run is over

    @property
    def initialiser(self) -> int:
        """The worker that gives the run its first weights: the longest-standing member. -1: none, or it has weights.

        A worker that says Hello first may declare its model last: its number is the lower one, yet another worker's
        weights are on their way by then. A gossip run that is resumed takes the first of its `sources`, and none before
        all workers are members.
        """
        if self.run.started or self.run.restart_clock >= 0:
            return -1
        if self.resumes:
            if len(self.run.declared) < self.needed:
                return -1
            if sources := self.sources[1]:
                return min(sources)[0]
        if self.weights >= 0:
            return self.weights
        return min(((seat.epoch, seat.worker) for seat in self.run.declared), default=(0, -1))[1]

    @property
    def sources(self) -> tuple[int, m.Pairs]:
        """The round that a resumed gossip run goes on from, and which workers give the models of it.

        Returns:
            The newest round that a majority of the workers have reached, -1: none; and pairs (worker, rank): the worker
            gives the oldest model of this rank that is of this round or a newer one. Workers that are stopped write
            models of different rounds, so a round of which all have a model may be old or missing. Workers that share a
            folder have the same files; each gives one at most.
        """
        seats = self.run.declared
        if not self.resumes or self.run.started or len(seats) < self.needed:
            return -1, ()
        for number in sorted({number for seat in seats for _, number in seat.models}, reverse=True):
            given = dict[int, int]()  # worker -> rank
            for rank in sorted({rank for seat in seats for rank, of in seat.models if of >= number}):
                able = [
                    s for s in seats if s.worker not in given and any(r == rank and of >= number for r, of in s.models)
                ]
                if able:
                    given[min(able, key=lambda seat: (seat.rank != rank, seat.rank)).worker] = rank
            if 2 * len(given) > len(seats):
                return number, tuple(sorted(given.items()))
        return -1, ()

    def tell(self) -> list[Log]:
        said, self.said = self.said, []
        return said

    def _begin(self, now_ns: int) -> None:
        """Start the run; a gossip run begins at the round of its first weights."""
        shared, sources = self.sources
        if self.resumes:
            text = (
                f"the run goes on from round {shared}, with the mean of the models of {len(sources)} workers"
                if shared >= 0
                else "no round is with a majority of the workers, so the run begins anew"
            )
            self.said.append(Log("resumed", {"round": shared, "text": text}))
        self.run.start(max(shared, 0))
        self.clocks.open(now_ns)

    @property
    def may_declare(self) -> bool:
        """True if this cluster has enough workers to take part in its parent's run."""
        return len(self.above.undeclared) >= (1 if self.run.started else self.needed)

    def decide(self, now_ns: int) -> bool:
        """Start the run, or choose the first weights that a cluster pushes to its parent."""
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
        # A stage that started without one of its workers would come to another clock than the other stages of the
        # pipeline.
        early = self._waited(now_ns) and self.run.settings.checkpoint_clocks < 0
        return bool(declared) and (len(declared) >= self.needed or early)

    def resumed(self, from_workers: bool = False) -> None:
        """Note that a user resumes this run: it starts with as many workers as a new one.

        Args:
            from_workers: True for a gossip run, which goes on with the models of its workers.
        """
        self.waits_for_all, self.resumes = True, from_workers

    def _waited(self, now_ns: int) -> bool:
        """True if the workers that have to join again have had a lease's time for it."""
        return self.rejoin_ns > 0 and now_ns - self.rejoin_ns > self.run.settings.lease * NS

    def _ready(self, report: m.Report) -> bool:
        """True if this shard has the first weights of the run."""
        if self.above.child:
            return self.above.shown(report)
        return self.run.restart_clock >= 0 or report.weights_from == self.initialiser

    def left(self, seat: Seat, how: str) -> None:
        self.finished_once |= seat.leaving
        if how != "refused":  # another worker will come instead of a refused one
            self._gone(seat.key, len(self.run.seats) - 1)

    def absent(self, done: bool, key: Key) -> str:
        """Take a Leave of a worker that has no seat.

        Args:
            done: the worker did its last step. Before the first start of the run this does not count.
            key: the key that the sender connected with.

        Returns:
            A sentence for the log if the start now waits for fewer workers, else "".
        """
        self.finished_once |= done and (self.run.started or self.rejoin_ns > 0)
        news = self._gone(key, len(self.run.seats))
        failed = f"a worker{f' with the key of {key[0]}' if key[0] else ''} failed before it joined"
        return f"{failed}: the run waits for {self.needed}" if news and not done else ""

    def _gone(self, key: Key, here: int) -> bool:
        """Wait for one worker fewer at the start.

        The start still waits for the `here` workers that have a seat and, with keys, for one worker of each other key.

        Returns:
            True if this changed something, so that a peer that repeats itself cannot fill the log.
        """
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
        """Begin a generation at the newest shared checkpoint, because `shard` was restarted or lost.

        Args:
            shard: the shard.
            now_ns: the time.
            shards: if not 0, this shard and all after it are lost, and this number of shards is left.
        """
        reached, clock = self.clocks.min_clock, self.shared()
        self.needed = max(1, len(self.run.declared))
        self.finished_once |= any(seat.leaving for seat in self.run.declared)
        self.rejoin_ns = now_ns
        self.run.restart(clock, shards or self.run.shards)
        return Log("restart", {"shard": shard, "from_clock": max(clock, 0), "to_clock": reached})

    def shared(self) -> int:
        """Clock of the newest checkpoint that all shards have, -1: none."""
        return max(set.intersection(*(set(r.checkpoints) for r in self.run.reports.values())), default=-1)

    def anew(self) -> None:
        self.checkpoint = -1

    def wake(self, now_ns: int) -> None:
        """Begin to measure time, at the first tick."""
        if self.checkpoint_ns < 0:
            self.checkpoint_ns = now_ns
            self.rejoin_ns = now_ns if self.run.restart_clock >= 0 and not self.waits_for_all else self.rejoin_ns

    def lapsed(self, now_ns: int) -> bool:
        """True if all workers had finished when a shard was restarted, and none has joined again within a lease."""
        return self.deserted and self._waited(now_ns) and not self.run.over

    def tick(self, now_ns: int) -> bool:
        """Ask for a checkpoint if one is due. Under gossip the workers write their models themselves."""
        if self.run.mode.rule is FoldRule.MIX:
            return False
        clocks, open_ = self.run.settings.checkpoint_clocks, self.run.started and not self.run.over
        if clocks > 0:
            if not (self.tried(self.checkpoint) and open_):
                return False
            self.checkpoint = (self.clocks.min_clock // clocks + 1) * clocks
            return True
        every = self._every_ns
        if not (every and self.tried(self.checkpoint) and open_) or now_ns - self.checkpoint_ns < every:
            return False
        self.checkpoint, self.checkpoint_ns = self.clocks.min_clock + 1, now_ns
        return True

    def tried(self, clock: int) -> bool:
        """True if each shard has written the checkpoint of this clock or has failed to. -1 stands for no checkpoint."""
        return all(clock in (-1, report.tried) for report in self.run.reports.values())

    def ask(self, clock: int) -> bool:
        """Ask for a checkpoint of the present clock. Return False while another one is being written."""
        if self.checkpoint <= clock and not self.tried(self.checkpoint):
            return False
        self.checkpoint = clock
        return True

    @property
    def _every_ns(self) -> int:
        """Time from one checkpoint to the next, 0: only at the end. The first one, of first weights, is due at once."""
        given = self.run.settings.checkpoint_every
        if given >= 0 or self.checkpoint < 0:
            return int(given * NS) if given >= 0 else 1
        slowest = max((report.wrote_ns for report in self.run.reports.values()), default=0)
        return max(CHECKPOINT_LEAST_NS, slowest * CHECKPOINT_COST_TIMES)

    # The end.

    @property
    def deserted(self) -> bool:
        """True if no worker has a seat any more and at least one has finished."""
        return self.finished_once and not self.run.seats

    def end(self, version: int) -> None:
        """End the run with a checkpoint of the present clock. `version`: of the first ledger that says so."""
        self.run.move("end")
        self.checkpoint, self.over_version = self.clocks.min_clock, version

    @property
    def at_rest(self) -> bool:
        """True if the run is over and all shards have done all that it asks of them (`rests`)."""
        return self.run.over and sum(map(self.rests, self.run.reports.values())) == self.run.shards

    def rests(self, report: m.Report) -> bool:
        """True if the shard of this report has seen the end of the run and has done everything before it."""
        done = report.at_rest and report.min_clock >= self.clocks.min_clock
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
