"""The sync modes as data: a mode is a row of `MODES`.

`Settings.mode()` (settings.py) resolves the row with the flags; machines read the resolved `Mode` and never a mode's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GAIN_MAX = 1e3  # of a mean of updates: one of a million that have nothing in common needs no more
WINDOW = 4  # updates in flight where no bound limits them (async); own updates that stand in for a mean

# Classes of torch.optim that step each value by itself, so that a piece of a tensor is stepped as the whole would be. Not
# here: LBFGS (needs a closure), Adafactor and Muon (statistics of a matrix), SparseAdam (sparse gradients only).
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)


# The outer optimizer's, by the inner steps of a round. Few steps of AdamW differ little from one: momentum on top of
# its own doubles it. docs/results.md has 4 to 50 steps at five settings; DiLoCo (2311.08105) has 0.9 for 500 steps and
# long runs.
LONG_ROUND = 8
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.6


def outer_momentum(local_steps: int) -> float:
    """The default for rounds of so many inner steps; without momentum the outer rate is 1, which is local SGD."""
    return OUTER_MOMENTUM if local_steps >= LONG_ROUND else 0.0


class Rule(Enum):
    """How a shard uses what is pushed."""

    OPTIMIZER = "optimizer"  # gradients: a step of the script's optimizer
    ADD = "add"  # updates: weighted addition
    OUTER = "outer"  # updates: outer SGD with Nesterov momentum on their negative (DiLoCo, 2311.08105)
    MIX = "mix"  # nothing but the last model: workers mix with each other (BAGUA, 2107.01499)


@dataclass(frozen=True, slots=True)
class Mode:
    """One resolved row of the table.

    local_steps: inner steps of one clock. bound: staleness bound s; None: no bound. In gossip: rounds that may be
    computed while one is mixed. barrier: folded when every live worker has pushed, else at once. push_choices: what may
    be pushed, the default first. fragments: update c carries fragment c mod `fragments` of each shard (keys.fragment),
    which is merged `merge_delay` inner steps after it was pushed, as merge_alpha * local + (1 - merge_alpha) * global
    (Streaming DiLoCo, 2501.18512, alg. 2).
    """

    name: str
    local_steps: int
    bound: int | None
    barrier: bool
    push_choices: tuple[str, ...]
    update_rule: Rule
    takes_staleness: bool
    takes_local_steps: bool
    push: str = ""
    fragments: int = 1
    merge_delay: int = 0
    merge_alpha: float = 0.0

    @property
    def merges(self) -> bool:
        """Inner steps may go on while an update is exchanged; what came is merged into them."""
        return self.rule is Rule.OUTER and self.barrier

    @property
    def streams(self) -> bool:
        """Between two clocks a worker computes on more than the last state and its inner steps since."""
        return self.fragments > 1 or self.merge_delay > 0 or self.merge_alpha > 0

    def fragment(self, clock: int) -> int:
        """The fragment whose turn it is."""
        return clock % self.fragments

    @property
    def rule(self) -> Rule:
        return Rule.OPTIMIZER if self.push == "gradient" else self.update_rule

    @property
    def rounds(self) -> bool:
        """Local steps between barriers: what a quorum may close."""
        return self.barrier and self.rule is Rule.OUTER

    @property
    def window(self) -> int:
        """Updates of one worker that may be in flight."""
        return WINDOW if self.bound is None else self.bound + 1

    def ahead(self, clock: int, settled: int) -> int:
        """How many clocks after `clock` the whole state is for that is asked for after a push. It is worth to wait for the
        next clock's where this one is served; else it would wait for a min_clock that only the next one needs."""
        return int(self.bound != 0 and self.allows(clock, settled))

    def allows(self, clock: int, settled: int) -> bool:
        """Whether a worker may compute with `clock` on a state of `settled` (Ho et al. 2013, sec. 3: its min_clock)."""
        return self.bound is None or clock <= settled + self.bound


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("bsp", 1, 0, True, ("gradient", "update"), Rule.ADD, False, False),
        Mode("ssp", 1, 1, False, ("update", "gradient"), Rule.ADD, True, False),
        Mode("async", 1, None, False, ("update", "gradient"), Rule.ADD, False, False),
        Mode("local", 10, 0, True, ("update",), Rule.OUTER, True, True),
        Mode("gossip", 1, 1, False, ("model",), Rule.MIX, True, True),
    )
}
