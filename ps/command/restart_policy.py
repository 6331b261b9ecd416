"""The lives of the shard processes of one ps-serve: which of those that died may begin again, and with what.

Rules
- One that was killed goes on by its journal, where it was. One that failed by itself would fail again: it goes back to its
  checkpoints.
- More deaths than RESTARTS_MAX a shard in a while are no accident: then the run ends.
- A journal's files are kept here, so that they outlive the process that writes them.
- A shard says with each sign of life by when the next one comes. The time in which this process was stopped does not count.
- The server of a stage ends once its last worker is lost: a pipeline that has lost a stage comes back with new servers alone.
"""

from __future__ import annotations

import os
from collections import deque
from enum import Enum

from narrows.protocols.effects import NS
from narrows.protocols.runtime.network.awake_clock import AwakeClock

RESTARTS_MAX = 5  # deaths a shard, of all shards together, in a while
DESERTED = "NARROWS_DESERTED_S"  # of ps-serve --plan, for the servers of stages that it starts
KILLED_S, FAILED_S = 60.0, 600.0  # that while, for shards that were killed, and for those that ended by themselves

Files = tuple[int, int]


class Restart(Enum):
    """With what a shard that died begins again."""

    NOT = "not"
    JOURNAL = "journal"
    CHECKPOINT = "checkpoint"


class LeftWithoutServer:
    """Whether a stage has lost its last worker. grace_s: so long another one may be there again; 0: this is no stage."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s, self.came, self.since_s = grace_s, False, -1.0
        self.over = False

    def heard(self, live: int, how: str, now_s: float) -> None:
        """A worker has come or gone, and so many are there. One that is done leaves."""
        self.came = self.came or live > 0
        self.since_s = now_s if self.came and not live and how != "left" else -1.0

    def ends(self, now_s: float) -> bool:
        """True once: the run ends now."""
        if self.over or self.since_s < 0 or not 0 < self.grace_s <= now_s - self.since_s:
            return False
        self.over = True
        return True


class RestartPolicy:
    """The lives of so many shards. `keeps`: their journals are kept. `restarts`: how often one began again."""

    def __init__(self, shards: int) -> None:
        self.keeps = True
        self.files: dict[int, Files] = {}  # by shard, the descriptors of its journal
        self.serving: set[int] = set()  # shards whose present process has come to serve
        self.restarts = 0
        self.clock = AwakeClock()
        self.due: dict[int, float] = {}  # by shard, when the next sign of life is to be here, by that clock, seconds
        self.within: dict[int, float] = {}  # how long that may take, as it said last
        self.deaths: dict[bool, deque[float]] = {True: deque(), False: deque()}
        self.deserted = LeftWithoutServer(float(os.environ.get(DESERTED, 0)))
        self.over(shards)

    def over(self, shards: int) -> None:
        """There are so many shards from now on."""
        most = RESTARTS_MAX * shards
        self.deaths = {killed: deque(deaths, maxlen=most) for killed, deaths in self.deaths.items()}

    def begin(self, shard: int) -> None:
        """A new life: with an empty journal. Raises OSError where the system has no memory for it; then none is kept."""
        if not self.keeps:
            return
        from narrows.ps.process.journal import files

        self.forget(shard)
        try:
            self.files[shard] = files()
        except OSError:
            self.keeps = False
            raise

    def forget(self, shard: int) -> None:
        """Its journal is of no use any more."""
        for file in self.files.pop(shard, ()):
            os.close(file)

    def expect(self, shard: int, within_s: float) -> None:
        """A sign of life of this shard, and how long the next one may take."""
        self.within[shard] = within_s
        self.due[shard] = self.clock.now() / NS + within_s

    def starts(self, shard: int, within_s: float) -> None:
        """It is to serve within this time, and what one event may take: it may do the longest again."""
        self.due[shard] = self.clock.now() / NS + within_s + self.within.get(shard, 0.0)

    def silent(self) -> list[int]:
        """Shards whose sign of life has not come. Each is named once."""
        now = self.clock.turn() / NS
        late = [shard for shard, due in self.due.items() if now > due]
        for shard in late:
            del self.due[shard]
        return late

    def ended(self, shard: int, code: int, now: float) -> Restart:
        """Its process ended with `code`, or with signal -code, at `now`, seconds."""
        self.due.pop(shard, None)
        killed = code < 0 and shard in self.serving and shard in self.files
        self.serving.discard(shard)
        deaths = self.deaths[killed]
        if len(deaths) == deaths.maxlen and now - deaths[0] < (KILLED_S if killed else FAILED_S):
            return Restart.NOT
        deaths.append(now)
        self.restarts += 1
        return Restart.JOURNAL if killed else Restart.CHECKPOINT
