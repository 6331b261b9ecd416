"""Writes the tables of modes and capabilities in docs/modes.md: it asks the product's own checks about each cell.

The first has a column for each mode, the second one for each other kind of run: quorums, fragments, levels.

`python docs/capabilities.py` rewrites them. `python docs/capabilities.py --check` exits with 1, and one sentence, where the
page is stale. A cell is "yes", or the number of the sentence with which the product refuses. tests/test_docs.py checks that
each "yes" has a test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from marked_tables import MarkedTable

from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import why_not
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.ps.command.serve import checked
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.resharding import Resharding
from narrows.ps.server.parent_membership import ParentMembership
from narrows.worker.sync.engine import why_no_group, why_no_ranges

MODES: dict[str, dict[str, Any]] = {
    "`bsp`": {"sync": "bsp"},
    "`bsp --push update`": {"sync": "bsp", "push": "update"},
    "`ssp`": {"sync": "ssp"},
    "`async`": {"sync": "async"},
    "`local`": {"sync": "local"},
    "`gossip`": {"sync": "gossip"},
}
BSP, UPDATES, SSP, ASYNC, LOCAL, GOSSIP = MODES
WORKERS = 4  # --robust compares three or more

RUNS, SYSTEM, SIMULATION = "tests/runs", "tests/system", "tests/simulation"
EVERY_FAULT = f"{SIMULATION}/test_run_kinds.py: test_every_invariant_holds"


def accepted(settings: Settings) -> str:
    return ""


def standby(settings: Settings) -> str:
    checked(settings, "tcp://127.0.0.1:5555", "", open_to_all=False, replicas=1)
    return ""


def cluster(settings: Settings) -> str:
    checked(settings, "tcp://127.0.0.1:5560", "tcp://127.0.0.1:5555", open_to_all=False)
    return ""


def tables(settings: Settings) -> str:
    return why_not(settings, settings.mode(), levels=False)


def group(settings: Settings) -> str:
    return why_no_group(settings.mode(), private=settings.dp_clip > 0, overlap=0)


def ranges(settings: Settings) -> str:
    return why_no_ranges(settings.mode())


def asked(settings: Settings, name: str) -> str:
    """Ask a property of `Resharding` about a run of one level, with all shards on the server's machine."""
    run = SimpleNamespace(settings=settings, mode=settings.mode(), over=False)
    part: Any = SimpleNamespace(run=run, members=SimpleNamespace(plan=None), away={})
    part.never = Resharding.never.fget(part)  # type: ignore[attr-defined]
    return str(getattr(Resharding, name).fget(part))


def moves(settings: Settings) -> str:
    return asked(settings, "never")


def replans(settings: Settings) -> str:
    return asked(settings, "fixed")


@dataclass(frozen=True)
class Capability:
    """A row. `tests` has for each mode, or for all others under "", the test that runs it."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Settings], str] = accepted
    tests: dict[str, str] = field(default_factory=dict)


END_WITH_ONE = f"{RUNS}/test_run_end.py: test_workers_with_fewer_steps_wait_and_all_end_with_one_model"
AUTO = f"{RUNS}/test_auto.py: test_gradients_are_sent_whole"
STANDBY = f"{SYSTEM}/test_standby.py: "
KILLS = f"{SYSTEM}/test_shard_kills.py: "

ROWS: tuple[Capability, ...] = (
    Capability(
        "lossy `--compress`",
        {"compress": "topk:0.11+sign"},
        tests={"": f"{RUNS}/test_matrix.py: test_one_level", UPDATES: END_WITH_ONE},
    ),
    Capability("`--compress auto`", {"compress": "auto"}, tests={"": AUTO}),
    Capability(
        "`--staleness` above 0",
        {"staleness": 2},
        tests={
            SSP: END_WITH_ONE,
            LOCAL: f"{RUNS}/test_sample_ranges.py: test_each_sample_is_taken_once",
            GOSSIP: f"{RUNS}/test_gossip.py: test_the_engine_is_decentralized_sgd",
        },
    ),
    Capability(
        "`--local-steps`",
        {"local_steps": 4},
        tests={LOCAL: END_WITH_ONE, GOSSIP: f"{RUNS}/test_gossip.py: test_gossip_trains"},
    ),
    Capability(
        "`--local-seconds`",
        {"local_seconds": 5.0},
        tests={"": f"{RUNS}/test_local_seconds.py: test_a_run_weighs_each_update_by_its_steps"},
    ),
    Capability(
        "`--weigh equal`",
        {"weigh": "equal"},
        tests={
            "": f"{RUNS}/test_local_seconds.py: test_equal_weights_are_a_plain_mean_in_every_mode",
        },
    ),
    Capability(
        "pushed gradients",
        {"push": "gradient"},
        tests={
            BSP: f"{RUNS}/test_matrix.py: test_one_level",
            ASYNC: END_WITH_ONE,
            SSP: f"{RUNS}/test_sample_ranges.py: test_each_sample_is_taken_once",
        },
    ),
    Capability(
        "`--cut tensors`",
        {"cut": "tensors"},
        tests={
            "": f"{RUNS}/test_cut.py: test_the_cut_changes_no_step_of_any_mode",
            BSP: f"{RUNS}/test_cut.py: test_servers_step_whole_tensors_as_one_process_does",
            LOCAL: f"{RUNS}/test_cut.py: test_fragments_begin_at_tensors_too",
        },
    ),
    Capability(
        "`--outer iso`",
        {"cut": "tensors", "outer": "iso"},
        tests={LOCAL: f"{RUNS}/test_equal_spectrum.py: test_rounds_end_as_the_simulation"},
    ),
    Capability("`--fragments`, `--merge-delay`", {"fragments": 2, "merge_delay": 1}, tests={LOCAL: END_WITH_ONE}),
    Capability(
        "`--quorum`",
        {"quorum": 2},
        tests={LOCAL: f"{RUNS}/test_quorum.py: test_one_ten_times_slower_costs_the_others_a_grace_and_is_in_the_model"},
    ),
    Capability(
        "`--start-steps`",
        {"start_steps": 40},
        tests={"": f"{RUNS}/test_start.py: test_first_steps_are_bsp_and_workers_take_the_moments_over"},
    ),
    Capability(
        "`--update-gain`",
        {"update_gain": 1.25},
        tests={
            UPDATES: f"{RUNS}/test_privacy.py: test_a_barrier_gets_it_too_and_gradients_of_the_script_stay",
            SSP: f"{RUNS}/test_update_gain.py: test_a_gain_that_was_given_is_the_gain",
            ASYNC: f"{RUNS}/test_privacy.py: test_no_push_is_longer_in_any_mode",
            GOSSIP: f"{RUNS}/test_gossip.py: test_a_gain_that_was_given_is_that_of_gossip_and_rounds_of_steps_have_none",
        },
    ),
    Capability(
        "`--max-update-norm`",
        {"max_update_norm": 5.0},
        tests={"": f"{RUNS}/test_norm_clip.py: test_a_liar_costs_its_own_share_and_no_more"},
    ),
    Capability(
        "`--robust cosine`",
        {"robust": "cosine"},
        tests={"": f"{RUNS}/test_robust.py: test_who_sends_the_negative_is_kept_out"},
    ),
    Capability(
        "`--robust trim`, `median`",
        {"robust": "median"},
        tests={"": f"{RUNS}/test_robust.py: test_who_sends_the_negative_is_kept_out"},
    ),
    Capability(
        "`--dp-clip`, `--dp-noise`",
        {"dp_clip": 1.0, "dp_noise": 1.0},
        tests={
            "": f"{RUNS}/test_privacy.py: test_no_push_is_longer_in_any_mode",
            UPDATES: f"{RUNS}/test_privacy.py: test_a_barrier_gets_it_too_and_gradients_of_the_script_stay",
        },
    ),
    Capability(
        "embedding tables",
        check=tables,
        tests={
            "": f"{RUNS}/test_embedding_tables.py: test_bsp_is_one_process_on_the_whole_batch",
            SSP: f"{SYSTEM}/test_embedding_tables.py: test_rows_outlive_killed_shards_and_another_cut",
            ASYNC: EVERY_FAULT,
        },
    ),
    Capability(
        "`--group`",
        check=group,
        tests={"": f"{RUNS}/test_groups.py: test_a_group_of_two_is_one_worker_that_has_both_halves_of_each_batch"},
    ),
    Capability(
        "`ranges()` of samples",
        check=ranges,
        tests={"": f"{RUNS}/test_sample_ranges.py: test_each_sample_is_taken_once"},
    ),
    Capability(
        "keys that move: `ps-serve shards N`, `--join`",
        check=moves,
        tests={
            "": f"{SIMULATION}/test_resharding.py: test_every_invariant_holds_while_keys_move",
            BSP: f"{SYSTEM}/test_resharding.py: test_two_shards_become_three_and_two_again",
        },
    ),
    Capability(
        "`--replan change` in the running run",
        check=replans,
        tests={"": f"{SIMULATION}/test_replans.py: test_every_invariant_holds_while_plans_change"},
    ),
    Capability(
        "a standby: `--replicas 1`",
        check=standby,
        tests={
            "": STANDBY + "test_the_standby_goes_on_where_the_server_was",
            UPDATES: STANDBY + "test_a_cluster_turns_to_the_standby_of_the_server_above",
            SSP: STANDBY + "test_a_standby_that_is_lost_is_done_without_and_another_takes_its_place",
        },
    ),
    Capability(
        "inside a cluster (`--parent`)",
        check=cluster,
        tests={
            "": f"{RUNS}/test_matrix.py: test_two_levels",
            UPDATES: f"{SYSTEM}/test_restarts.py: test_two_levels_go_on",
        },
    ),
    Capability(
        "a killed shard goes on",
        tests={
            "": KILLS + "test_nothing_is_lost_in_any_mode",
            UPDATES: KILLS + "test_two_levels_see_nothing_of_it",
            GOSSIP: KILLS + "test_the_server_of_gossip_too",
        },
    ),
    Capability(
        "a run goes on from its checkpoint",
        tests={
            "": EVERY_FAULT,
            GOSSIP: f"{RUNS}/test_run_end.py: test_a_run_of_gossip_that_ended_or_was_stopped_goes_on_from_there",
        },
    ),
    Capability("a worker joins late, another dies", tests={"": EVERY_FAULT}),
    Capability("`agree()`", tests={"": f"{RUNS}/test_run_end.py: test_all_workers_stop_at_the_same_step"}),
)


def refusal(row: Capability, mode: str) -> str:
    """Return the sentence with which the product refuses this capability in this mode; "" if it accepts it."""
    try:
        return row.check(Settings(workers=WORKERS, **MODES[mode] | row.flags).validated())
    except UsageError as error:
        return str(error)


def conflict(row: Capability, mode: str) -> bool:
    """True if the row sets what the column has already another way."""
    return any(MODES[mode].get(name, value) != value for name, value in row.flags.items())


def table() -> str:
    sentences: dict[str, int] = {}
    lines = [f"| | {' | '.join(MODES)} |", f"|---{'|---' * len(MODES)}|"]
    for row in ROWS:
        cells = []
        for mode in MODES:
            if conflict(row, mode):
                cells.append("-")
                continue
            said = refusal(row, mode).replace(f"--sync {MODES[mode]['sync']}", "--sync MODE")
            cells.append(f"no {sentences.setdefault(said, len(sentences) + 1)}" if said else "yes")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {said.replace('|', '/')}" for said, number in sentences.items())])


@dataclass(frozen=True)
class Kind:
    """A column of the second table.

    Attributes:
        flags: of the server.
        above: flags of its parent; None: it has none.
        clusters: its members are clusters.
    """

    flags: dict[str, Any]
    above: dict[str, Any] | None = None
    clusters: bool = False

    def decisions(self) -> Resharding:
        """The decisions of a server of this kind that has a member."""
        coordinator = Coordinator(Settings(workers=WORKERS, **self.flags).validated(), 1, child=self.above is not None)
        seat = coordinator.run.sit(m.Hello("member", "here"), b"", 0)
        seat.declare(coordinator.run.changed(), 0, "")
        seat.beat(m.Heartbeat(seat.worker, seat.epoch, 0, below="a cluster" if self.clusters else ""))
        return coordinator.resharding

    def stands(self) -> str:
        """Return why this server can have no standby; "" if it can."""
        settings, parent = Settings(workers=WORKERS, **self.flags).validated(), "tcp://10.0.0.1:5555"
        try:
            checked(settings, "tcp://10.0.0.2:5560", parent if self.above else "", open_to_all=False, replicas=1)
        except UsageError as error:
            return str(error)
        if self.above is None:
            return ""
        above = Settings(workers=WORKERS, **self.above).validated()
        part: Any = SimpleNamespace(stands=True, _unreachable=False)
        return ParentMembership._cannot_join(part, above, settings, settings.shards, elsewhere=False)


KINDS: dict[str, Kind] = {
    "`local --quorum`": Kind({"sync": "local", "quorum": 2}),
    "`local --fragments`": Kind({"sync": "local", "fragments": 2, "merge_delay": 1}),
    "above clusters": Kind({"sync": "ssp"}, clusters=True),
    "a cluster": Kind({"sync": "bsp", "push": "update"}, above={"sync": "ssp"}),
    "above clusters that gossip": Kind({"sync": "gossip"}, clusters=True),
    "a cluster that gossips": Kind({"sync": "bsp", "push": "update"}, above={"sync": "gossip"}),
}
QUORUM, FRAGMENTS, ABOVE, CLUSTER, ABOVE_GOSSIP, GOSSIPS = KINDS
EACH_KIND = f"{SIMULATION}/test_resharding.py: test_every_invariant_holds_while_keys_move_in_each_kind_of_run"
PLANS_OF_TREES = f"{SIMULATION}/test_replanned_trees.py: test_every_invariant_holds_while_a_level_changes_its_plan"
OWN_PLAN = f"{RUNS}/test_gossip_clusters.py: test_a_cluster_changes_its_own_plan_and_mixes_on"
PAIRS = f"{SIMULATION}/test_standby_trees.py: test_nothing_is_lost_on_either_level"


@dataclass(frozen=True)
class KindRow:
    """A row of the second table. `tests`: by kind, the test that runs it."""

    name: str
    check: Callable[[Kind], str]
    tests: dict[str, str]


KIND_ROWS: tuple[KindRow, ...] = (
    KindRow(
        "keys that move: `ps-serve shards N`",
        lambda kind: kind.decisions().unfit(2),
        {QUORUM: EACH_KIND, FRAGMENTS: EACH_KIND},
    ),
    KindRow(
        "shards on other machines: `--join`",
        lambda kind: kind.decisions().unfit(2, "10.0.0.3"),
        {QUORUM: EACH_KIND, FRAGMENTS: EACH_KIND},
    ),
    KindRow(
        "`--replan change` in the running run",
        lambda kind: kind.decisions().fixed,
        {ABOVE: PLANS_OF_TREES, CLUSTER: PLANS_OF_TREES, GOSSIPS: OWN_PLAN},
    ),
    KindRow(
        "a standby: `--replicas 1`",
        lambda kind: kind.stands(),
        {
            QUORUM: STANDBY + "test_the_standby_goes_on_where_the_server_was",
            FRAGMENTS: STANDBY + "test_the_standby_goes_on_where_the_server_was",
            ABOVE: PAIRS,
            CLUSTER: PAIRS,
        },
    ),
)


def table_of_kinds() -> str:
    sentences: dict[str, int] = {}
    lines = [f"| | {' | '.join(KINDS)} |", f"|---{'|---' * len(KINDS)}|"]
    for row in KIND_ROWS:
        said = [row.check(kind) for kind in KINDS.values()]
        cells = [f"no {sentences.setdefault(why, len(sentences) + 1)}" if why else "yes" for why in said]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{number}. {said.replace('|', '/')}" for said, number in sentences.items())])


PAGE = Path(__file__).parent / "modes.md"
TABLE = MarkedTable("capabilities", PAGE, table)
OF_KINDS = MarkedTable("kinds", PAGE, table_of_kinds, script="capabilities")

if __name__ == "__main__":
    sys.exit(max(each.main(sys.argv[1:]) for each in (TABLE, OF_KINDS)))
