"""Ranges of samples that simulated workers take, and what must be so of them:

none is lost      when a worker is told that all are done, each shard has an update with each of them
twice is counted  as often as the coordinator says some shard has two updates with one range; where the run went back to a
                  checkpoint of updates that were folded at once, not more often
one holder        a range is with one live member, or to be done again, or done
an end            all workers are told that all are done, and leave
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from narrows.protocols import messages as m
from narrows.protocols.effects import NS, Log, Send, ServerEffect
from simulation.mirror import PushId, Violation

if TYPE_CHECKING:
    from simulation.actors import Process
    from simulation.campaigns import Run

EPOCHS, SIZE = 2, 3
IDLE_NS = NS // 10  # from one ask to the next, of a worker that nobody waits for
RANGES = 10  # of an epoch, for each worker


class Work:
    """The work ranges of one run."""

    def __init__(self, run: Run, epochs: int, workers: int) -> None:
        self.run = run
        self.samples = SIZE * RANGES * workers - 1  # the last range is shorter
        self.each = RANGES * workers
        self.ranges = epochs * self.each
        self.of: dict[PushId, tuple[int, ...]] = {}  # which are in an update

    def a_step(self, index: int) -> int:
        """How many this worker has in one update."""
        return 1 + index % 2

    def pushed(self, push: PushId, ranges: tuple[int, ...]) -> None:
        self.of[push] = ranges

    def server_event(self, process: Process, effects: Sequence[ServerEffect]) -> None:
        if process.coordinator is None:
            return
        for effect in effects:
            if isinstance(effect, Log) and effect.event == "epoch":
                self._epoch(process, effect.values)
            elif isinstance(effect, Send) and isinstance(effect.message, m.RangeAnswer):
                self._told(process, effect.message)

    def _folded(self, process: Process, whole: bool = False) -> dict[int, Counter[int]]:
        """By shard: how many updates with each range are in its model; `whole`: in all of its keys."""
        assert process.coordinator is not None
        generation, mirrors = process.coordinator.run.generation, self.run.checker.mirrors
        current = {index: each for index, each in mirrors.items() if each.process.shard.ledger.generation == generation}
        return {
            index: Counter(
                row for push in held.folded.keys() - (held.torn if whole else ()) for row in self.of.get(push, ())
            )
            for index, held in ((index, mirror.held) for index, mirror in current.items())
        }

    def _told(self, process: Process, told: m.RangeAnswer) -> None:
        if told.over:
            self.run.sim.struck["all ranges done"] += 1
            for shard, found in self._folded(process, whole=True).items():
                if lost := sorted({*range(self.ranges)} - found.keys()):
                    raise Violation(
                        f"worker {told.worker} is told that all ranges are done, and shard {shard} lacks {lost}"
                    )
        if told.index >= 0 and process.coordinator is not None:
            ranges = process.coordinator.ranges
            held = [index for bounds in ranges.held.values() for _, index in bounds] + ranges.work.back
            held += [index for gone in ranges.gone.values() for _, index in gone.held]
            twice = [index for index, times in Counter(held).items() if times > 1]
            if twice or max(held, default=-1) >= ranges.work.next:
                raise Violation(f"ranges {twice} of {held} are with two, of {ranges.work.next} that were handed out")

    def _epoch(self, process: Process, values: dict[str, object]) -> None:
        epoch, said, run = values["epoch"], values["twice"], self.run
        assert isinstance(epoch, int) and isinstance(said, int)
        of_epoch = range(epoch * self.each, (epoch + 1) * self.each)
        found = {row for counts in self._folded(process).values() for row in of_epoch if counts[row] > 1}
        back = sum(run.sim.struck[fault] for fault in ("shard restarted", "shard failed", "machine lost"))
        exact = run.settings.mode().barrier or not back
        if said != len(found) if exact else said < len(found):
            raise Violation(f"epoch {epoch} is over with {said} ranges done twice, and {sorted(found)} are")
        run.sim.struck["ranges done twice"] += said
