"""Measures what the clocks of one engine cost; from these costs `auto` chooses a SPEC. The engine's thread owns it.

Rules
- A clock ends when its update is pushed. The worker waits, encodes and computes in it; computing has the time that the
  other two do not take.
- In a run without `auto` each ladder has one rung, so there is no choice. The link is then measured only for rounds by
  the clock (`exchange_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from narrows.compression import Codecs, Compressor, losses
from narrows.compression.auto import Auto, Clock, Switch
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS, LinkMeasured
from narrows.worker.group.group import Group
from narrows.worker.runtime.trace import StepTrace


class CodecTuning:
    """The present compressor of an engine, and the switches of `auto` that are not yet reported.

    Attributes:
        coding: the SPEC for published states; "" if this worker does not choose it, or has not chosen yet.

    Args:
        settings: the settings of the run.
        size: values of the model; an update has those of one fragment.
        trace: has the seconds that this worker waited and encoded.
        now_s: the time in seconds.
    """

    def __init__(
        self, settings: Settings, size: int, trace: StepTrace, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.size, self.trace, self.now_s = size, trace, now_s
        self.spent_s = (0.0, 0.0)  # seconds of waiting and of encoding, until the newest clock ended
        self.encode_s = 0.0  # seconds of the newest clock that encoded
        self.sampled = 0  # samples of all pushes, as step_samples() gave them
        self.ended_s: float | None = None  # when the newest clock ended; None: before the first push
        self.seen: list[LinkMeasured] = []  # measurements of the link in this clock
        self.exchange_s = 0.0  # that the link took for the update and the state of a clock; 0: not measured
        self.switches: list[tuple[int, Switch]] = []  # and the first clock of each; the session takes them out
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """Begin anew with the compressors of the plan that the run has from the present clock on."""
        self.plan, self.mode, self.quorum = settings.plan_number, settings.mode(), settings.quorum
        self.cut = settings.cut
        mode = self.mode
        # A sparse or late gradient costs far more loss than an update (README.md, "Results"): `auto` chooses none.
        sparse = mode.rule is not FoldRule.OPTIMIZER
        self.codecs = Codecs.of(settings.compress, settings.compress_down, sparse)
        up, down = self.codecs.up, self.codecs.down
        # Losses by code were measured where servers add the updates of one step. Of pushed gradients and of rounds none is
        # known: there the clock decides.
        adds = mode.rule is FoldRule.ADD
        steps = losses.steps_by_codes(mode.bound, settings.workers) if adds else losses.alike
        self.auto = Auto(up.rungs, down.rungs, -(-self.size // mode.fragments), mode.window, steps)
        self.chooses, self.chooses_down = len(self.auto.choices) > 1, len(down.rungs) > 1
        self.up_raw, self.up_lossless, self.down_lossless = up.raw, up.lossless, down.lossless
        self.compressor: Compressor = self.auto.compressor
        self.coding = ""

    def measured(self, event: LinkMeasured) -> None:
        """Take a measurement of the link, which is asked for once a clock."""
        self.exchange_s = (event.round_trip_ns + event.up_ns + event.down_ns) / NS
        if self.chooses:
            self.seen.append(event)

    def pushed(self, clock: int, group: Group | None = None, samples: int = 0) -> bool:
        """Note that the update of the clock before `clock` was pushed, and let `auto` choose.

        In a group the first rank chooses for all ranks.

        Args:
            clock: the next clock.
            group: the group in which this process is one rank, if any.
            samples: samples of the update, as step_samples() gave them; 0: unknown.

        Returns:
            True if `compressor` or `coding` has changed.
        """
        self.sampled += samples
        now_s, before_s, seen = self.now_s(), self.ended_s, self.seen
        spent = self.trace.seconds["wait"], self.trace.seconds["encode"]
        waited_s, encode_s = spent[0] - self.spent_s[0], spent[1] - self.spent_s[1]
        self.spent_s, self.encode_s = spent, encode_s or self.encode_s
        cost = Clock(
            compute_s=0.0 if before_s is None else max(0.0, now_s - before_s - waited_s - encode_s),
            encode_s=self.encode_s,
            up_bytes=sum(each.up_bytes for each in seen),
            up_s=sum(each.up_ns for each in seen) / NS,
            down_bytes=sum(each.down_bytes for each in seen),
            down_s=sum(each.down_ns for each in seen) / NS,
            round_trip_s=seen[-1].round_trip_ns / NS if seen else 0.0,
        )
        self.ended_s = now_s
        if before_s is None or not self.chooses:
            return False  # the time before the first push is no clock: imports, data, first weights
        self.seen = []
        switch = self.auto.clock(cost) if group is None or group.leads else None
        before = self.auto.at, self.auto.chosen
        if group is not None:
            self.auto.follow(*group.of_first(*before))
        self.coding = self.auto.down if self.chooses_down and self.auto.chosen else ""
        if switch is None and before == (self.auto.at, self.auto.chosen):
            return False
        self.compressor = self.auto.compressor
        if switch is not None:
            self.switches.append((clock, switch))
        return True
