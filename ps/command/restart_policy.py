"""The policy by which one ps-serve restarts dead shard processes: which shards, and from what.

Rules
- A shard that was killed by a signal replays its journal and goes on where it was. A shard that failed by itself would
  fail again in a replay, so it goes back to a checkpoint.
- The run ends after RESTARTS_MAX deaths a shard, counted over all shards together, within KILLED_S or FAILED_S.
- This process keeps the files of each journal open, so that they outlive the shard that writes them.
- Each sign of life of a shard names the time by which the next one comes. Time in which this process was stopped does
  not count.
- The server of a pipeline stage ends once its last worker is lost, because the other stages go on only with new
  servers.
"""

from __future__ import annotations

import os
from collections import deque
from enum import Enum

from narrows.protocols.effects import NS
from narrows.protocols.runtime.network.awake_clock import AwakeClock

RESTARTS_MAX = 5  # allowed deaths: this number times the shards, over all shards, within KILLED_S or FAILED_S
DESERTED = "NARROWS_DESERTED_S"  # environment variable that ps-serve --plan sets for its stage servers: grace_s below
KILLED_S, FAILED_S = 60.0, 600.0  # seconds in which deaths are counted: by a signal, and by an error of the shard

Files = tuple[int, ...]


class Restart(Enum):
    """The source from which a dead shard begins again, if it does."""

    NOT = "not"
    JOURNAL = "journal"
    CHECKPOINT = "checkpoint"


class LeftWithoutServer:
    """Detects that a pipeline stage has lost its last worker.

    Args:
        grace_s: seconds in which another worker may join; 0 for a server that is no stage, and then nothing is
            detected.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s, self.came, self.since_s = grace_s, False, -1.0
        self.finished = False

    def heard(self, live: int, how: str, now_s: float) -> None:
        """Note a change of the members.

        Args:
            live: the number of live workers after the change.
            how: the reason of the change. "left" is a worker that has finished, so its leave does not count as a loss.
            now_s: the time of the change, seconds.
        """
        self.came = self.came or live > 0
        self.since_s = now_s if self.came and not live and how != "left" else -1.0

    def ends(self, now_s: float) -> bool:
        """Return True, once, when the grace after the last worker's loss is over and the run must end."""
        if self.finished or self.since_s < 0 or not 0 < self.grace_s <= now_s - self.since_s:
            return False
        self.finished = True
        return True


class RestartPolicy:
    """Decides for each dead shard whether it begins again, and from its journal or from a checkpoint."""

    def __init__(self, shards: int, journals: bool = True) -> None:
        self.keeps = journals  # journals are kept
        self.files: dict[int, Files] = {}  # by shard, the file descriptors of its journal
        self.serving: set[int] = set()  # shards whose present process has bound its port
        self.restarts = 0  # of all shards together
        self.clock = AwakeClock()
        self.deadlines: dict[
            int, float
        ] = {}  # by shard, when the next sign of life must have arrived: seconds of `clock`
        self.within: dict[int, float] = {}  # by shard, seconds to the next sign of life, as the last one said
        self.deaths: dict[bool, deque[float]] = {True: deque(), False: deque()}  # by "was killed", times in seconds
        self.deserted = LeftWithoutServer(float(os.environ.get(DESERTED, 0)))
        self.finished(shards)

    def finished(self, shards: int) -> None:
        """Allow deaths for this number of shards from now on."""
        most = RESTARTS_MAX * shards
        self.deaths = {killed: deque(deaths, maxlen=most) for killed, deaths in self.deaths.items()}

    def begin(self, shard: int) -> None:
        """Give a shard's new process an empty journal.

        Raises:
            OSError: the system has no memory for the journal. No journals are kept from then on.
        """
        if not self.keeps:
            return
        from narrows.ps.journal.journal import files

        self.forget(shard)
        try:
            self.files[shard] = files()
        except OSError:
            self.keeps = False
            raise

    def forget(self, shard: int) -> None:
        """Close the files of the shard's journal."""
        for file in self.files.pop(shard, ()):
            os.close(file)

    def expect(self, shard: int, within_s: float) -> None:
        """Note a sign of life of this shard; the next one comes within `within_s` seconds."""
        self.within[shard] = within_s
        self.deadlines[shard] = self.clock.now() / NS + within_s

    def starts(self, shard: int, within_s: float) -> None:
        """Set the time by which a started shard must serve.

        The limit is `within_s` plus the time that the shard last named for one event, because a replay may repeat that
        event.
        """
        self.deadlines[shard] = self.clock.now() / NS + within_s + self.within.get(shard, 0.0)

    def silent(self) -> list[int]:
        """Return the shards whose sign of life is late. Each is returned once."""
        now = self.clock.turn() / NS
        late = [shard for shard, due in self.deadlines.items() if now > due]
        for shard in late:
            del self.deadlines[shard]
        return late

    def ended(self, shard: int, code: int, now: float) -> Restart:
        """Decide what happens to a shard whose process has ended.

        Args:
            code: the exit code of the process, or minus the signal that killed it.
            now: the time of its end, seconds.
        """
        self.deadlines.pop(shard, None)
        killed = code < 0 and shard in self.serving and shard in self.files
        self.serving.discard(shard)
        deaths = self.deaths[killed]
        if len(deaths) == deaths.maxlen and now - deaths[0] < (KILLED_S if killed else FAILED_S):
            return Restart.NOT
        deaths.append(now)
        self.restarts += 1
        return Restart.JOURNAL if killed else Restart.CHECKPOINT
