"""The settings of a run: a field for each flag of a run, and two that no flag sets. Every child gets them on joining.

How it works
1. ps-serve makes `Settings` from its flags. -1, "" and 0 mean "not given".
2. `validated` checks each flag, and each pair of flags that exclude each other. A wrong flag raises UsageError, one
   sentence that names the flag. Then the mode's defaults fill in what was not given.
3. The coordinator sends the settings `packed`, in Welcome. A child checks them again (`unpacked`).
4. `mode` resolves the row of `MODES` with the flags. Machines read the resolved `Mode`, never the name of a mode.
5. A worker may be started with flags of a run too. It sends them in Hello; `contradiction` compares them with the
   server's.
6. A replan makes the next settings with `changed`. A member accepts new settings only if they `follow` the old ones.
7. With --start-steps a run has two sets of settings: `begun` makes those of its first steps, which keep the user's flags in
   `rest`; `relaxed` makes those of the steps after, the next plan.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from narrows.protocols.config.key_ranges import CUTS, TENSORS, VALUES
from narrows.protocols.config.modes import (
    GAIN_MAX,
    ISO,
    ISO_LR,
    ISO_MOMENTUM,
    MODES,
    NESTEROV,
    OUTER_LR,
    OUTER_STEPS,
    FoldRule,
    Mode,
    outer_momentum,
)
from narrows.protocols.config.run_name import check_run_name
from narrows.protocols.config.topology import RANDOM, TOPOLOGIES, TOPOLOGY
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import INT_MAX, WORKERS_MAX
from narrows.protocols.wire import pack, unpack

LEAST = 3  # workers of a run: with two, no rule can find the one that lies
COSINE, MEDIAN = "cosine", "median"
_TRIM = re.compile(r"trim:(0?\.\d+)", re.ASCII)


class Robust(NamedTuple):
    """The parsed flag --robust: the rule that keeps the updates of a lying worker out of the model."""

    cut: float = 0.0  # share of the workers' values left out at either end, for each key; 0: no trimming; 0.5: median
    cosine: bool = False  # drop the updates of a worker that oppose those of the others

    @staticmethod
    def parse(text: str) -> Robust:
        """Parse the flag's text; "" is no rule. Raises UsageError, one sentence."""
        if not text:
            return Robust()
        if text == COSINE:
            return Robust(cosine=True)
        if text == MEDIAN:
            return Robust(cut=0.5)
        written = _TRIM.fullmatch(text)
        if written is None or not 0 < float(written[1]) < 0.5:
            raise UsageError(f"--robust {text}: give cosine, median or trim:SHARE, with a share between 0 and 0.5")
        return Robust(cut=float(written[1]))

    def __bool__(self) -> bool:
        return self.cosine or self.cut > 0


SHARDS_MAX = 256
PRIVACY_MAX = 1e6  # of --dp-clip and --dp-noise: beyond it float32 cannot hold both an update and its noise
NOT_GIVEN = -1  # value of a numeric flag that the user did not give: the mode decides
STALENESS_MAX = 1 << 20  # clocks
FRAGMENTS_MAX = 1024  # more than models have layers; a shard keeps a list of its fragments
WEIGH = ("samples", "equal")  # how the updates of a mean are weighted: by their samples, or alike
REPLAN = ("off", "say", "change")  # what the coordinator does with a plan that would gain (ps/coordinator/replans.py)
OF_PLAN = ("sync", "staleness", "compress", "compress_down", "plan_number")  # the fields that a replan may change
# What the steps of a start have instead of the user's flags. What a mode has by default follows from "bsp" (`validated`).
START: dict[str, Any] = {
    "sync": "bsp",
    "push": "gradient",
    "staleness": -1,
    "local_steps": -1,
    "local_seconds": -1.0,
    "compress": "dense",
    "compress_down": "dense",
    "outer": "",
    "outer_lr": -1.0,
    "outer_momentum": -1.0,
    "update_gain": -1.0,
    "look_ahead": -1.0,
    "quorum": -1,
    "grace": -1.0,
    "fragments": 1,
    "merge_delay": -1,
    "merge_alpha": -1.0,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags of a run (`RUN_FLAGS`, protocols/runtime/cli/flags.py). -1, "" and 0 mean "not given": the mode decides."""

    sync: str = "ssp"  # the mode, a key of MODES
    staleness: int = -1  # bound s, in clocks
    local_steps: int = -1  # inner steps of a round; with `local_seconds` at most so many
    local_seconds: float = -1.0  # of a round; -1: a round has `local_steps`
    weigh: str = ""  # one of WEIGH
    push: str = ""  # "gradient", "update" or "model"
    compress: str = "dense"  # SPEC of pushes
    compress_down: str = ""  # SPEC of states
    topology: str = ""  # of gossip
    shards: int = 1
    cut: str = VALUES  # one of CUTS: where the borders of shards and fragments lie
    workers: int = 1  # with which the run starts
    outer: str = ""  # one of OUTER_STEPS
    outer_lr: float = -1.0
    outer_momentum: float = -1.0
    update_gain: float = -1.0  # of a mean of updates; -1: measured
    look_ahead: float = -1.0  # clocks
    max_update_norm: float = -1.0  # times the median norm of recent updates; -1: no limit
    robust: str = ""  # see `Robust`
    dp_clip: float = -1.0  # largest L2 norm of an update that a worker pushes; -1: not clipped
    dp_noise: float = -1.0  # standard deviation of the noise, times dp_clip; -1: no noise
    quorum: int = -1  # updates with which a round may close; -1: those of all live members
    grace: float = -1.0  # seconds from the quorum to the close of the round; -1: adaptive
    fragments: int = 1
    merge_delay: int = -1  # inner steps
    merge_alpha: float = -1.0  # share of the local values in a merge
    lease: float = 10.0  # seconds
    checkpoint_every: float = -1.0  # seconds; 0: at the end and on Ctrl-C only; -1: adaptive
    checkpoint_clocks: int = -1  # clocks, in place of a time, for a run that is one stage of a pipeline; -1: no stage
    replan: str = "say"  # one of REPLAN
    replan_after: float = 300.0  # seconds
    start_steps: int = -1  # first steps that are bsp with pushed gradients, whatever the mode; -1: none
    start_compress: str = ""  # SPEC of these gradients
    name: str = ""  # of the run
    plan_number: int = 1  # no flag: version of mode and SPEC; each change in the running run adds 1 (--replan change)
    rest: str = ""  # no flag: while the run is in its start, the fields of START as the user set them, in JSON; else ""
    start_clock: int = -1  # no flag: clock at which the start has ended; -1: it has not, or there is none
    plan_digest: int = 0  # no flag: Layout.digest of the plan.json that started the server; 0: none did

    def validated(self) -> Settings:
        """Return the settings with every default filled in.

        Raises:
            UsageError: a flag is wrong; one sentence that names the flag.
        """
        if self.sync not in MODES:
            raise UsageError(f"--sync {self.sync}: unknown mode; the modes are {', '.join(MODES)}")
        check_run_name("--name", self.name)
        row = MODES[self.sync]
        for name, low, high in (
            ("shards", 1, SHARDS_MAX),
            ("workers", 1, WORKERS_MAX),
            ("staleness", -1, STALENESS_MAX),
            ("local_steps", -1, STALENESS_MAX),
            ("fragments", 1, FRAGMENTS_MAX),
            ("merge_delay", -1, STALENESS_MAX),
            ("lease", 0.1, 86400.0),
            ("checkpoint_every", -1.0, 1e9),
            ("checkpoint_clocks", -1, STALENESS_MAX),
            ("outer_lr", -1.0, 1e6),
            ("look_ahead", -1.0, 1e3),
            ("quorum", -1, WORKERS_MAX),
            ("grace", -1.0, 86400.0),
            ("replan_after", 1.0, 86400.0),
            ("start_steps", -1, STALENESS_MAX),
            ("start_clock", -1, INT_MAX),
            ("plan_number", 1, INT_MAX),
            ("plan_digest", 0, INT_MAX),
        ):
            value = getattr(self, name)
            least = 1 if name in ("local_steps", "quorum", "checkpoint_clocks", "start_steps") else max(low, 0)
            if not (value == low or least <= value <= high):
                raise UsageError(f"{_flag(name)} {value}: give a value from {least} to {high}")
        if self.outer_momentum != -1 and not 0 <= self.outer_momentum < 1:
            raise UsageError(f"--outer-momentum {self.outer_momentum}: give a value from 0 up to, not including, 1")
        for name, plain in (("outer_lr", 1.0), ("outer_momentum", 0.0)):
            if getattr(self, name) not in (-1, plain) and row.update_rule is FoldRule.ADD:
                raise UsageError(f"{_flag(name)}: --sync {self.sync} has no outer step; local and gossip have one")
        if self.staleness not in (-1, row.bound) and not row.takes_staleness:
            have = ", ".join(m.name for m in MODES.values() if m.takes_staleness)
            raise UsageError(f"--staleness: --sync {self.sync} has no staleness bound to set; {have} have one")
        if self.local_steps not in (-1, row.local_steps) and not row.takes_local_steps:
            raise UsageError(f"--local-steps: --sync {self.sync} pushes every step; --sync local takes local steps")
        self._check_seconds(row)
        self._check_outer(row)
        if self.cut not in CUTS:
            raise UsageError(f"--cut {self.cut}: give one of {', '.join(CUTS)}")
        if self.weigh not in ("", *WEIGH):
            raise UsageError(f"--weigh {self.weigh}: give one of {', '.join(WEIGH)}")
        if self.weigh == "equal" and row.update_rule is FoldRule.MIX:
            raise UsageError(
                "--weigh equal: under --sync gossip models are mixed, and no update is weighed; leave it out"
            )
        if self.max_update_norm != -1 and not 1 <= self.max_update_norm <= GAIN_MAX:
            raise UsageError(f"--max-update-norm {self.max_update_norm}: give a value from 1 to {GAIN_MAX:g}")
        filters = [_flag(name) for name, given in
                   (("max_update_norm", self.max_update_norm != -1), ("robust", self.robust)) if given]  # fmt: skip
        if filters and row.update_rule is FoldRule.MIX:
            raise UsageError(f"{filters[0]}: under --sync gossip no update goes through the server")
        if filters and self.fragments > 1:
            raise UsageError(f"{filters[0]}: fragments differ, and are not compared; leave out one of the two")
        self._check_privacy(row)
        self._check_merging(row)
        self._check_gain(row)
        mixes = row.update_rule is FoldRule.MIX
        if self.topology and not mixes:
            raise UsageError(f"--topology: --sync {self.sync} goes through the server; --sync gossip has a topology")
        if self.topology and self.topology not in (*TOPOLOGIES, RANDOM):
            raise UsageError(f"--topology {self.topology}: unknown; there are {', '.join(TOPOLOGIES)} and {RANDOM}")
        if self.topology == RANDOM and self.staleness not in (-1, row.bound):
            raise UsageError(f"--staleness: under --topology {RANDOM} no worker waits, so there is no bound to set")
        if mixes and self.compress.startswith("auto"):
            raise UsageError(
                f"--compress {self.compress}: --sync gossip has no server that measures the link; name a SPEC"
            )
        if mixes and self.compress_down not in ("", "dense"):
            raise UsageError("--compress-down: --sync gossip has no downlink; --compress codes both ways")
        if self.replan not in REPLAN:
            raise UsageError(f"--replan {self.replan}: give one of {', '.join(REPLAN)}")
        if self.replan == "change" and self.compress.startswith("auto"):
            raise UsageError(
                f"--replan change: --compress {self.compress} chooses the SPEC already; leave out one of the two"
            )
        if self.start_compress.startswith("auto"):
            raise UsageError(
                f"--start-compress {self.start_compress}: the start is too short for a choice; name a SPEC"
            )
        if self.push and self.push not in row.push_choices:
            choices = " or ".join(row.push_choices)
            raise UsageError(f"--push {self.push}: --sync {self.sync} pushes {choices}")
        if self.quorum > self.workers:
            raise UsageError(
                f"--quorum {self.quorum}: a run of --workers {self.workers} has fewer pushes a round; "
                f"give a value from 1 to {self.workers}"
            )
        if self.grace >= 0 and self.quorum < 0:
            raise UsageError(f"--grace {self.grace}: it begins when a quorum has pushed; give --quorum too")
        # A merge delay of one inner step is the least that hides the link's time. With a delay, merge_alpha is 0.5, as in
        # Streaming DiLoCo (2501.18512): the worker keeps half of what it computed meanwhile. Without a delay the worker
        # computes nothing meanwhile.
        delay = self.merge_delay if self.merge_delay >= 0 else int(self.fragments > 1)
        steps = self._round_steps(row)
        iso = self.outer == ISO
        known = ISO_MOMENTUM if iso else outer_momentum(steps)
        momentum = self.outer_momentum if self.outer_momentum >= 0 else known
        rate = ISO_LR if iso else OUTER_LR if momentum else 1.0
        filled = replace(
            self,
            outer=self.outer or (NESTEROV if row.update_rule is FoldRule.OUTER else ""),
            outer_momentum=momentum,
            outer_lr=self.outer_lr if self.outer_lr >= 0 else rate,
            merge_delay=delay,
            merge_alpha=self.merge_alpha if self.merge_alpha >= 0 else 0.5 if delay else 0.0,
            staleness=self.staleness if self.staleness >= 0 or row.bound is None else row.bound,
            local_steps=steps,
            weigh=self.weigh or WEIGH[0],
            push=self.push or row.push_choices[0],
            compress_down=self.compress_down or ("dense" if row.name == "bsp" or mixes else self.compress),
            topology=self.topology or (TOPOLOGY if mixes else ""),
            start_compress=self.start_compress or ("dense" if self.start_steps > 0 else ""),
        )
        if self.quorum > 0 and filled.mode().streams:
            raise UsageError(
                f"--quorum {self.quorum}: a late update would be of another fragment than its round; leave out --fragments, "
                "--merge-delay and --merge-alpha, or the quorum"
            )
        if self.quorum > 0 and not filled.mode().rounds:
            bound = f" --staleness {self.staleness}" if row.takes_staleness and self.staleness > 0 else ""
            raise UsageError(
                f"--quorum {self.quorum}: --sync {self.sync}{bound} has no barrier of local rounds that a quorum could "
                "close; --sync local with --staleness 0 has"
            )
        filled._check_robust()
        self._check_start(filled.mode().rule)
        return filled

    def _round_steps(self, row: Mode) -> int:
        """Return the local steps of a round; of a round by the clock the most that it may have."""
        if self.local_steps > 0:
            return self.local_steps
        return row.local_steps if self.local_seconds < 0 else STALENESS_MAX

    def _check_seconds(self, row: Mode) -> None:
        """Raise UsageError if the mode has no rounds that could end by the clock."""
        if self.local_seconds == -1:
            return
        if not 0 < self.local_seconds <= 86400:
            raise UsageError(f"--local-seconds {self.local_seconds:g}: give seconds above 0, at most 86400")
        if row.update_rule is FoldRule.MIX:
            raise UsageError(
                "--local-seconds: under --sync gossip whole models are mixed, and no update is weighed by its steps; "
                "--sync local has rounds by the clock"
            )
        if not row.takes_local_steps:
            raise UsageError(
                f"--local-seconds: --sync {self.sync} pushes every step; --sync local has rounds by the clock"
            )

    def _check_outer(self, row: Mode) -> None:
        """Raise UsageError if servers cannot take this outer step."""
        if self.outer not in ("", *OUTER_STEPS):
            raise UsageError(f"--outer {self.outer}: give one of {', '.join(OUTER_STEPS)}")
        if self.outer and row.update_rule is not FoldRule.OUTER:
            raise UsageError(f"--outer: --sync {self.sync} has no outer step on a server; --sync local has one")
        if self.outer == ISO and self.cut != TENSORS:
            raise UsageError("--outer iso: shards cut matrices, and it steps whole ones; give --cut tensors too")
        if self.outer == ISO and self.staleness > 0:
            raise UsageError(
                f"--outer iso: with --staleness {self.staleness} each update is folded alone, and this step is along the "
                "mean of a round; leave out one of the two"
            )

    def _check_start(self, rule: FoldRule) -> None:
        """Raise UsageError if the run cannot begin with a start, or go on from it. `rule`: of the filled settings."""
        if self.start_steps < 0:
            if self.start_compress:
                raise UsageError(
                    f"--start-compress {self.start_compress}: it codes the gradients of --start-steps; give both"
                )
            return
        if self.dp_clip != -1:
            raise UsageError(
                f"--start-steps {self.start_steps}: --dp-clip {self.dp_clip:g} is the length of an update, and gradients have "
                "other lengths; leave out one of the two"
            )
        if self.rest:
            self.flagged()
        elif rule is FoldRule.MIX:
            raise UsageError(
                f"--start-steps {self.start_steps}: under --sync gossip workers hold the model, and no server could step it; "
                "leave it out"
            )
        elif rule is FoldRule.OPTIMIZER:
            raise UsageError(
                f"--start-steps {self.start_steps}: --sync {self.sync} pushes gradients in all steps here; name the mode of "
                "the steps after the start, such as --sync ssp or --push update"
            )

    def _unpacked_rest(self) -> dict[str, Any]:
        """Return `rest` as the fields of START. Raises UsageError if it holds others."""
        try:
            fields_of = json.loads(self.rest)
            kinds = {name: type(getattr(Settings(), name)) for name in START}
            sound = {name: kinds[name](value) for name, value in fields_of.items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            sound = {}
        if sound.keys() != START.keys():
            raise UsageError("the settings of a start do not say how the run goes on after it")
        return sound

    def _check_robust(self) -> None:
        """Raise UsageError if the rule cannot find a lying worker: too few workers, no barrier. Call on filled settings."""
        robust, mode = Robust.parse(self.robust), self.mode()
        if robust and self.workers < LEAST:
            raise UsageError(
                f"--robust {self.robust}: {self.workers} workers are too few to tell which one lies; give at least {LEAST}"
            )
        if robust.cut and not (mode.barrier and mode.rule in (FoldRule.OPTIMIZER, FoldRule.OUTER)):
            raise UsageError(
                f"--robust {self.robust}: only a barrier has all updates of a clock at once; --sync bsp with pushed gradients "
                "and --sync local have one, and --robust cosine serves every mode with a server"
            )

    def _check_privacy(self, row: Mode) -> None:
        """Raise UsageError if updates cannot be clipped, or if the noise would hide nothing."""
        if self.dp_clip != -1 and not 0 < self.dp_clip <= PRIVACY_MAX:
            raise UsageError(f"--dp-clip {self.dp_clip}: give a length above 0, at most {PRIVACY_MAX:g}")
        if self.dp_noise != -1 and not 0 < self.dp_noise <= PRIVACY_MAX:
            raise UsageError(f"--dp-noise {self.dp_noise}: give a value above 0, at most {PRIVACY_MAX:g}")
        if self.dp_noise != -1 and self.dp_clip == -1:
            raise UsageError(
                f"--dp-noise {self.dp_noise}: it counts in lengths of --dp-clip, without which no noise hides an update"
            )
        if self.dp_clip != -1 and row.update_rule is FoldRule.MIX:
            raise UsageError("--dp-clip: under --sync gossip a worker sends its model, and no update of its own")

    def _check_merging(self, row: Mode) -> None:
        """Raise UsageError if the mode has no fragments, or cannot merge them so."""
        if self.merge_alpha != -1 and not 0 <= self.merge_alpha < 1:
            raise UsageError(f"--merge-alpha {self.merge_alpha}: give a value from 0 up to, not including, 1")
        given = [name for name, least in (("fragments", 1), ("merge_delay", 0), ("merge_alpha", 0))
                 if getattr(self, name) > least]  # fmt: skip
        if given and not row.takes_local_steps:
            raise UsageError(
                f"{_flag(given[0])}: --sync {self.sync} pushes every step; --sync local has local steps to merge"
            )
        if given and row.update_rule is FoldRule.MIX:
            raise UsageError(
                f"{_flag(given[0])}: under --sync gossip whole models are mixed; --sync local has fragments"
            )
        if given and self.staleness > 0:
            raise UsageError(
                f"{_flag(given[0])}: with --staleness {self.staleness} updates are folded at once, and the link's time lies "
                "under inner steps already: leave out one of the two"
            )
        steps = self._round_steps(row)
        if steps % self.fragments and steps != STALENESS_MAX:
            raise UsageError(
                f"--fragments {self.fragments}: --local-steps {steps} is no multiple of it, and each fragment has its turn "
                f"once in so many steps: give --local-steps {steps - steps % self.fragments + self.fragments}"
            )
        if self.merge_delay >= steps:
            raise UsageError(
                f"--merge-delay {self.merge_delay}: a fragment is pushed again after --local-steps {steps} inner steps, and "
                f"must be merged before: give at most {steps - 1}"
            )

    def _check_gain(self, row: Mode) -> None:
        """Raise UsageError if shards add no updates in this mode, so that there is no mean to scale."""
        if self.update_gain != -1 and not 0 < self.update_gain <= GAIN_MAX:
            raise UsageError(f"--update-gain {self.update_gain}: give a value above 0, at most {GAIN_MAX:g}")
        given = [name for name in ("update_gain", "look_ahead") if getattr(self, name) != -1]
        if given == ["update_gain"] and row.update_rule is FoldRule.MIX:
            if self.local_steps > 1:
                raise UsageError("--update-gain: gossip scales updates of one step; leave it out, or --local-steps")
            return
        if given and (row.update_rule is not FoldRule.ADD or (self.push or row.push_choices[0]) != "update"):
            adding = ", ".join(m.name for m in MODES.values() if m.update_rule is FoldRule.ADD)
            raise UsageError(
                f"{_flag(given[0])}: here no updates of workers are added; {adding} add them, with --push update"
            )

    def mode(self) -> Mode:
        """Return the resolved mode. Call on validated settings. `local` with a staleness bound folds at once.

        With h inner steps in a clock, clock c is pushed after inner step (c + 1) h and merged `merge_delay` steps later.
        So a worker that begins clock c has merged all clocks up to c - 1 - ceil(merge_delay / h). Its staleness bound is
        ceil(merge_delay / h). A clock that ends by time has merged the one before it, whatever its steps: the bound is 1.
        """
        row = MODES[self.sync]
        barrier = row.barrier and self.staleness == 0
        steps = self.local_steps // self.fragments
        unbounded = row.bound is None or self.topology == RANDOM
        behind = -(-self.merge_delay // steps) if self.local_seconds < 0 else min(self.merge_delay, 1)
        bound = None if unbounded else self.staleness + behind
        return replace(
            row,
            local_steps=steps,
            bound=bound,
            barrier=barrier,
            push=self.push,
            fragments=self.fragments,
            merge_delay=self.merge_delay,
            merge_alpha=self.merge_alpha,
            seconds=max(self.local_seconds, 0.0) / self.fragments,
        )

    def summary(self) -> str:
        """Return validated settings in a few words, as flags."""
        mode = self.mode()
        flags = [f"--sync {self.sync}", "no bound" if mode.bound is None else f"staleness {mode.bound}"]
        flags += [f"--local-seconds {self.local_seconds:g}"] if self.local_seconds > 0 else []
        flags += [f"--local-steps {self.local_steps}"] if 1 < self.local_steps < STALENESS_MAX else []
        flags += [f"--fragments {self.fragments}"] if self.fragments > 1 else []
        flags += [f"--cut {self.cut}"] if self.cut == TENSORS else []
        flags += [f"--outer {self.outer}"] if self.outer == ISO else []
        flags += [f"--topology {self.topology}"] if self.topology else []
        flags += [f"--quorum {self.quorum}"] if self.quorum > 0 else []
        flags += [f"--weigh {self.weigh}"] if self.weigh == "equal" else []
        flags += [f"until step {self.start_steps}"] if self.starting else []
        waits = self.start_steps > 0 and self.start_clock < 0 and not self.starting
        flags += [f"after {self.start_steps} steps of bsp ({self.start_compress})"] if waits else []
        return ", ".join([*flags, f"--compress {self.compress}", f"--compress-down {self.compress_down}"])

    @property
    def starting(self) -> bool:
        """True in the plan of a start: these steps are bsp with pushed gradients, and another mode follows."""
        return self.rest != ""

    def begun(self) -> Settings:
        """Return the settings with which a run of these flags begins: those of its start, if it has one."""
        if self.start_steps < 0 or self.starting or self.start_clock >= 0:
            return self
        rest = json.dumps({name: getattr(self, name) for name in START})
        return replace(self, **START | {"compress": self.start_compress}, rest=rest).validated()

    def flagged(self) -> Settings:
        """Return the settings of the steps after the start, also while the run is in its start."""
        return replace(self, **self._unpacked_rest(), rest="").validated() if self.starting else self

    def relaxed(self, clock: int) -> Settings:
        """Return the settings of the plan that follows a start, which has ended at `clock`."""
        return replace(self.flagged(), start_clock=clock, plan_number=self.plan_number + 1)

    def back_at(self, clock: int) -> Settings:
        """Return the settings of a run that goes back to `clock`: a start that had ended later begins again."""
        if clock >= self.start_clock:
            return self
        return replace(self, start_clock=-1, plan_number=self.plan_number + 1).begun()

    def hands_over(self, clock: int) -> bool:
        """True if workers that begin at `clock` take the state of the servers' optimizer over."""
        return 0 <= self.start_clock == clock

    def steps_at(self, clock: int) -> int:
        """Return the steps of the run before `clock`, where rounds do not end by time. A clock of a start is one step."""
        start = min(max(self.start_clock, 0), clock)
        return start + (clock - start) * self.mode().local_steps

    def changed(self, **way: Any) -> Settings:
        """Return the settings of the next plan of this run.

        Args:
            way: new values of fields of OF_PLAN. Fields that are not given go back to the mode's default.
        """
        given: dict[str, Any] = {"staleness": -1, "compress": "dense", "compress_down": ""} | way
        return replace(self, **given, plan_number=self.plan_number + 1).validated()

    def follows(self, before: Settings) -> bool:
        """True if these are settings of the same run as `before`, with another number of shards or another plan."""
        ours, theirs = self.flagged(), before.flagged()
        return replace(ours, **{name: getattr(theirs, name) for name in (*OF_PLAN, "shards", "start_clock")}) == theirs

    def told(self, clock: int) -> dict[str, Any]:
        """Return the values of an event for record and dashboard: the run has this plan from `clock` on."""
        summary = self.summary()
        values = {
            "plan": self.plan_number,
            "clock": clock,
            "mode": self.sync,
            "compress": self.compress,
            "summary": summary,
        }
        return values | {"text": f"plan {self.plan_number} from clock {clock} on: {summary}"}

    def packed(self) -> bytes:
        return pack({f.name: getattr(self, f.name) for f in fields(self)})

    @staticmethod
    def unpacked(packed: bytes) -> Settings:
        """Read and validate packed settings.

        Raises:
            RemoteProtocolError: `packed` holds no valid settings of this release.
        """
        value = unpack(packed)
        known = {f.name: str(f.type) for f in fields(Settings)}
        if not isinstance(value, dict) or set(value) != set(known):
            raise RemoteProtocolError("the server's settings are not those of this release of narrows")
        for name, kind in known.items():
            if type(value[name]).__name__ != kind and not (kind == "float" and type(value[name]) is int):
                raise RemoteProtocolError(f"the server's settings are not valid: {_flag(name)} is no {kind}")
        try:
            return Settings(**value).validated()
        except UsageError as error:
            raise RemoteProtocolError(f"the server's settings are not valid: {error}") from None


def contradiction(expected: dict[str, object], actual: Settings) -> str | None:
    """Compare the flags that a worker was started with against the server's settings.

    Copies of plan.json are compared if both sides were started by one. Fields that a replan has changed are not compared.

    Args:
        expected: name of a setting -> value, for the flags that the user gave the worker.
        actual: the server's settings.

    Returns:
        One sentence that names the flag, or None if all agree.
    """
    actual = actual.flagged()
    ours, theirs = expected.get("plan_digest", 0), actual.plan_digest
    if ours and theirs and ours != theirs:
        shown = f"{ours:014x}" if type(ours) is int else "no number"
        return (
            f"plan.json differs from the server's: its digest here is {shown}, and there {theirs:014x}; give all hosts a copy "
            "of one file"
        )
    for name in Settings.__slots__:
        if name in ("plan_digest", "name"):  # names: run_name.py
            continue
        if actual.plan_number > 1 + (actual.start_clock >= 0) and name in OF_PLAN:
            continue  # a replan has changed it
        has = getattr(actual, name)
        if name in expected and expected[name] != has:
            runs = (
                f"runs {_flag(name)} {has}"
                if has not in (-1, "", STALENESS_MAX)  # STALENESS_MAX: a round by the clock has no most steps
                else f"has no {_flag(name)} under --sync {actual.sync}"
            )
            return (
                f"{_flag(name)} {expected[name]} contradicts the server, which {runs}: "
                "leave the flag out, or start the server with it"
            )
    return None
