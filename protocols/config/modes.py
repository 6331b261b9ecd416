"""The sync modes as data: each mode is a row of `MODES`.

`Settings.mode()` (settings.py) resolves a row with the flags. Machines read the resolved `Mode`, never a mode's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GAIN_MAX = 1e3  # of a mean of updates: enough for a mean of a million updates that have nothing in common
WINDOW = 4  # updates in flight in modes without a staleness bound (async)

# Classes of torch.optim that step each value by itself, so that a step of a piece equals that piece of a whole step.
# In neither list: LBFGS (needs a closure), Adafactor (its state has not the tensor's shape), SparseAdam (sparse gradients
# only).
ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"),
)
# Classes that step a tensor by what all of it says, its singular vectors or its norm: Muon of torch.optim, and ours
# (protocols/layerwise.py). A server steps them where no shard cuts a tensor, with --cut tensors.
WHOLE_TENSORS = ("Muon", "LAMB", "LARS")


# Rate and momentum of the outer optimizer, for rounds of at least LONG_ROUND inner steps. A round of few AdamW steps
# differs little from one step: outer momentum would double AdamW's own. Rounds of 8 and 10 steps end lower without, 20 and 100
# of them, with 2, 4 and 8 workers (docs/results.md, run_jobs); rounds of 20 and 50 with (docs/archive/results-0.1.md). So the
# length of a round decides, and not their number. DiLoCo (2311.08105) has momentum 0.9 for 500 steps and long runs.
LONG_ROUND = 16
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.6


# What a server does with the mean update of a round before momentum. ISO needs whole matrices; its rate and momentum are
# those of IsoLoCo, and won with 2, 4 and 8 workers (docs/results.md, run_jobs).
NESTEROV, ISO = OUTER_STEPS = ("nesterov", "iso")
ISO_LR, ISO_MOMENTUM = 1.8, 0.8


def outer_momentum(local_steps: int) -> float:
    """Return the default outer momentum for rounds of `local_steps` inner steps. 0 goes with rate 1: local SGD."""
    return OUTER_MOMENTUM if local_steps >= LONG_ROUND else 0.0


class FoldRule(Enum):
    """What a shard does with a push."""

    OPTIMIZER = "optimizer"  # a gradient: step the script's optimizer
    ADD = "add"  # an update: add it with a weight
    OUTER = "outer"  # an update: outer SGD with Nesterov momentum on its negative (DiLoCo, 2311.08105)
    MIX = "mix"  # gossip: workers mix with each other and push only their last model (BAGUA, 2107.01499)


@dataclass(frozen=True, slots=True)
class Mode:
    """A row of `MODES`, or a row resolved with the flags of a run.

    Update c carries fragment c mod `fragments` of each shard (key_ranges.fragment). A worker merges the fragment
    `merge_delay` inner steps after its push, as merge_alpha * local + (1 - merge_alpha) * global
    (Streaming DiLoCo, 2501.18512, alg. 2).
    """

    name: str
    local_steps: int  # inner steps of one clock
    bound: int | None  # staleness bound s, None: no bound; in gossip: rounds that may be computed while one is mixed
    barrier: bool  # True: fold once every live worker has pushed; False: fold each push at once
    push_choices: tuple[str, ...]  # what a worker may push, the default first
    update_rule: FoldRule  # for pushed updates; `rule` is the one that holds
    takes_staleness: bool  # --staleness may be given
    takes_local_steps: bool  # --local-steps may be given
    push: str = ""  # one of `push_choices`, once resolved
    fragments: int = 1
    merge_delay: int = 0  # inner steps
    merge_alpha: float = 0.0
    seconds: float = 0.0  # of one clock, which then ends by time, or after `local_steps`; 0: a clock has `local_steps`

    @property
    def merges(self) -> bool:
        """True if inner steps may go on during an exchange, and the new state is merged into the local weights."""
        return self.rule is FoldRule.OUTER and self.barrier

    @property
    def streams(self) -> bool:
        """True in streaming: a worker blends an older state into weights that it has trained further meanwhile."""
        return self.fragments > 1 or self.merge_delay > 0 or self.merge_alpha > 0

    def fragment(self, clock: int) -> int:
        """Return the number of the fragment that update `clock` carries."""
        return clock % self.fragments

    @property
    def rule(self) -> FoldRule:
        return FoldRule.OPTIMIZER if self.push == "gradient" else self.update_rule

    @property
    def rounds(self) -> bool:
        """True if the run has rounds, local steps between barriers. A quorum may close a round."""
        return self.barrier and self.rule is FoldRule.OUTER

    @property
    def window(self) -> int:
        """The largest number of updates of one worker in flight."""
        return WINDOW if self.bound is None else self.bound + 1

    def ahead(self, clock: int, settled: int) -> int:
        """Return the offset, 0 or 1, of the clock whose whole state a child asks for after a push.

        A shard answers once its min clock allows the clock that is asked for. If the child may compute `clock` on the
        state that it has, it asks for the state of the next clock: 1. Otherwise the child needs a state for `clock`
        itself: 0. A state for the next clock would come later.

        Args:
            clock: the child's clock after the push.
            settled: of the pulled state.
        """
        return int(self.bound != 0 and self.allows(clock, settled))

    def allows(self, clock: int, settled: int) -> bool:
        """True if a worker may compute `clock` on a state of `settled` (Ho et al. 2013, sec. 3: its min clock)."""
        return self.bound is None or clock <= settled + self.bound


def holds_apart(mode: Mode, quorum: int) -> bool:
    """True if members hold for a reshard at clocks of their own: the run has no clock that all of them come to.

    Args:
        mode: the mode of the run.
        quorum: `Settings.quorum`. A round that closes without a member has no update of its own.
    """
    return mode.bound is None or quorum > 0


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("bsp", 1, 0, True, ("gradient", "update"), FoldRule.ADD, False, False),
        Mode("ssp", 1, 1, False, ("update", "gradient"), FoldRule.ADD, True, False),
        Mode("async", 1, None, False, ("update", "gradient"), FoldRule.ADD, False, False),
        Mode("local", 10, 0, True, ("update",), FoldRule.OUTER, True, True),
        Mode("gossip", 1, 1, False, ("model",), FoldRule.MIX, True, True),
    )
}
