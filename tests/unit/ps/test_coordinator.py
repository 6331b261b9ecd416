"""The decisions of the coordinator, each alone, on a run that a test has put together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.in_process import Cluster, Link

from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import TableSpec
from narrows.protocols.config.model_spec import BUFFERS_BYTES_MAX, ModelSpec, TensorSpec, pack_arrays
from narrows.protocols.config.settings import SHARDS_MAX, Settings
from narrows.protocols.config.timing import CHECKPOINT_LEAST_NS
from narrows.protocols.effects import NS, Log, Send, ServerEffect, StopProcess
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.relay_ticket import node_key, node_name
from narrows.protocols.messages import RemoteShardsWish
from narrows.protocols.wire import HEADER_BYTES_MAX, encode, pack
from narrows.ps.coordinator import coordinator
from narrows.ps.coordinator.agreements import Agreements
from narrows.ps.coordinator.attendance import FRESH_NS, StartNotice
from narrows.ps.coordinator.checkpoint_schedule import CheckpointSchedule
from narrows.ps.coordinator.clocks import FIRST_STEP_NS, Clocks
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.coordinator.gossip_directory import GossipDirectory
from narrows.ps.coordinator.members import EXPECT_BYTES_MAX, Members
from narrows.ps.coordinator.parent_place import NoNews, ParentPlace
from narrows.ps.coordinator.resharding import MOVE_LIFE, Resharding, ReshardPhase
from narrows.ps.coordinator.run import NO_KEY, RUN_LIFE, SEAT_LIFE, Run, RunPhase, Seat, SeatPhase


def run_of(**flags: Any) -> Run:
    return Run(Settings(**{"workers": 2, "shards": 2} | flags).validated(), 1, -1)


def member(run: Run, rounds: Clocks | None = None) -> Seat:
    seat = run.sit(m.Hello(f"{len(run.seats)}", "here"), b"", 0)
    seat.declare(run.changed(), 0, "")
    if rounds is not None:
        rounds.enter(seat, 0)
    return seat


def report(run: Run, shard: int, **said: Any) -> m.Report:
    """Take down what a shard says, as the coordinator does."""
    before = run.reports.get(shard)
    known: dict[str, Any] = dict.fromkeys(("port", "version", "ledger_seen", "epoch", "min_clock"), 0)
    known |= {"incarnation": 1, "planned": True, "weights_from": 0} | dict.fromkeys(
        ("arrived", "norms", "checkpoints"), ()
    )
    if before is not None:
        known = {name: getattr(before, name) for name in m.Report.__slots__}
    run.reports[shard] = m.Report(**known | said | {"shard": shard, "generation": run.generation})
    return run.reports[shard]


def push(rounds: Clocks, seat: Seat, clock: int, shards: int = 2, **said: Any) -> None:
    for shard in range(shards):
        rounds.heard(report(rounds.run, shard, arrived=((seat.worker, clock),), **said), 0)


# Phases.


@pytest.mark.parametrize(("phases", "life"), [(RunPhase, RUN_LIFE), (SeatPhase, SEAT_LIFE), (ReshardPhase, MOVE_LIFE)])
def test_every_phase_is_reached_from_the_first(phases: Any, life: dict[Any, dict[str, Any]]) -> None:
    reached = {next(iter(phases))}
    for _ in phases:
        reached |= {to for phase in reached for to in life[phase].values()}
    assert reached == set(phases) == set(life)


def test_a_run_that_is_over_stays_so() -> None:
    for phase in (RunPhase.OVER, RunPhase.CALLED_OFF):
        assert set(RUN_LIFE[phase].values()) <= {RunPhase.OVER, RunPhase.CALLED_OFF}
    assert "start" not in RUN_LIFE[RunPhase.STARTED] and "start" not in RUN_LIFE[RunPhase.OVER]


# Rounds.


def test_a_clock_closes_once_every_shard_has_the_update_of_every_member() -> None:
    rounds = Clocks(run_of(sync="bsp"))
    first, second = member(rounds.run, rounds), member(rounds.run, rounds)
    rounds.run.move("start")
    rounds.open(0)
    push(rounds, first, 1)
    push(rounds, second, 1, shards=1)
    assert not rounds.decide(1) and rounds.min_clock == 0
    push(rounds, second, 1)
    assert rounds.decide(1) and not rounds.decide(1)
    assert (rounds.min_clock, rounds.sets) == (1, {0: ((0, 0), (1, 0))})


def test_the_update_of_who_left_is_in_the_next_set_if_all_shards_have_it() -> None:
    for shards, inside in ((2, ((0, 0), (1, 0))), (1, ((0, 0),))):
        rounds = Clocks(run_of(sync="bsp"))
        first, second = member(rounds.run, rounds), member(rounds.run, rounds)
        rounds.run.move("start")
        rounds.open(0)
        push(rounds, second, 1, shards=shards)
        rounds.left(second, "expired")
        del rounds.run.seats[second.worker]
        push(rounds, first, 1)
        assert rounds.decide(1) and rounds.sets[0] == inside


def test_no_clock_closes_before_all_shards_have_published_the_one_before_nor_after_the_end() -> None:
    rounds = Clocks(run_of(sync="bsp"))
    seat = member(rounds.run, rounds)
    rounds.run.move("start")
    rounds.open(0)
    push(rounds, seat, 2)
    assert rounds.decide(1) and not rounds.decide(1)
    report(rounds.run, 0, min_clock=1)
    assert not rounds.decide(1)
    report(rounds.run, 1, min_clock=1)
    rounds.run.move("end")
    assert not rounds.decide(1) and rounds.min_clock == 1


@pytest.mark.parametrize(
    ("flags", "pushed"), [({"sync": "ssp", "staleness": 1}, 2), ({"sync": "bsp"}, 1), ({"sync": "async"}, 4)]
)
def test_who_keeps_a_clock_open_while_others_wait_is_named_once(flags: dict[str, Any], pushed: int) -> None:
    """A worker whose script hangs goes on to send heartbeats, so its lease does not run out."""
    rounds = Clocks(run_of(**flags))
    first, second = member(rounds.run, rounds), member(rounds.run, rounds)
    rounds.run.move("start")
    rounds.open(0)
    push(rounds, first, pushed)
    assert not rounds.stalls(FIRST_STEP_NS - 1), "a first step compiles"
    said = rounds.stalls(FIRST_STEP_NS)
    if flags["sync"] == "async":  # nobody waits
        assert not said
        return
    assert [log.values["workers"] for log in said] == [[second.worker]]
    assert said[0].values["text"] == (
        f"worker {second.worker} (rank 1, here) has pushed no update for 30 s; 1 other waits for it at clock 0"
    )
    assert not rounds.stalls(9 * FIRST_STEP_NS), "once in a clock"
    push(rounds, second, 1)
    assert rounds.decide(9 * FIRST_STEP_NS)
    assert not rounds.stalls(10 * FIRST_STEP_NS), "nobody waits for the next clock"


def test_nobody_is_named_where_nobody_waits() -> None:
    rounds = Clocks(run_of(sync="ssp", staleness=1))
    first, _ = member(rounds.run, rounds), member(rounds.run, rounds)
    rounds.run.move("start")
    rounds.open(0)
    push(rounds, first, 1)
    assert not rounds.stalls(9 * FIRST_STEP_NS), "it may make another step"


def test_a_norm_is_that_of_all_shards() -> None:
    rounds = Clocks(run_of(sync="bsp"))
    rounds.heard(report(rounds.run, 0, norms=((0, 9.0),)), 0)
    assert not rounds.decide(0)
    rounds.heard(report(rounds.run, 1, norms=((0, 16.0),)), 0)
    assert rounds.decide(0) and rounds.norms == {0: 5.0}


# Generations.


def generations(run: Run, child: bool = False) -> CheckpointSchedule:
    rounds = Clocks(run)
    return CheckpointSchedule(run, rounds, ParentPlace(run, rounds, child))


def test_a_run_starts_with_workers_enough_and_the_first_weights_on_all_shards() -> None:
    run = run_of()
    decision = generations(run)
    first, _ = member(run), report(run, 0)
    report(run, 1, weights_from=-1)
    assert not decision.decide(0), "a worker is missing"
    member(run)
    assert decision.initialiser == first.worker and not decision.decide(0), "so are weights"
    report(run, 1, weights_from=0)
    assert decision.decide(0) and run.started and decision.initialiser == -1


def test_the_first_weights_are_those_of_the_member_that_declared_first_whoever_said_hello_first() -> None:
    """Its weights are on their way when the other declares; they would travel twice."""
    run = run_of()
    decision = generations(run)
    early, late = (run.sit(m.Hello(token, "here"), b"", 0) for token in ("early", "late"))
    for each in (late, early):
        each.declare(run.changed(), 0, "")
        assert decision.initialiser == late.worker
    del run.seats[late.worker]
    assert decision.initialiser == early.worker


def test_who_is_gone_before_the_start_is_not_waited_for_but_for_one_who_was_refused() -> None:
    for how, needed in (("left", 1), ("expired", 1), ("refused", 2)):
        decision = generations(run_of())
        decision.left(member(decision.run), how)
        assert decision.needed == needed


def test_who_is_said_to_have_failed_takes_no_place_of_those_who_are_here() -> None:
    """Without keys anybody may say so."""
    decision = generations(run_of(workers=4))
    for _ in range(2):
        decision.run.sit(m.Hello(f"{len(decision.run.seats)}", "here"), b"", 0)
    told = [decision.absent(False, NO_KEY) for _ in range(5)]
    assert told[:2] == [f"a worker failed before it joined: the run waits for {needed}" for needed in (3, 2)]
    assert not any(told[2:]) and decision.needed == 2


@pytest.mark.parametrize("joins", [False, True])
def test_a_key_takes_away_no_place_that_another_key_is_to_have(joins: bool) -> None:
    decision = generations(run_of(workers=4))
    run, key, other = decision.run, ("a", 3), ("b", 3)
    told = []
    for number in range(5):
        if joins:
            decision.left(run.sit(m.Hello(f"{number}", "here"), b"", 0, key), "left")
            run.seats.clear()
        else:
            told.append(decision.absent(False, key))
        assert decision.needed == 3, "there are four keys, and four workers"
    assert joins or told == ["a worker with the key of a failed before it joined: the run waits for 3"] * 2 + [""] * 3
    assert "with the key of b" in decision.absent(False, other) and decision.needed == 2


def test_nobody_is_done_with_a_run_that_has_not_begun() -> None:
    """Else it would end with the first worker that fails."""
    decision = generations(run_of(workers=4))
    decision.absent(True, NO_KEY)
    assert not decision.deserted
    decision.run.move("start")
    decision.absent(True, NO_KEY)
    assert decision.deserted, "its lease had expired while it was leaving"


def test_it_goes_back_to_the_newest_checkpoint_that_all_shards_have() -> None:
    run = run_of()
    decision = generations(run)
    member(run)
    for shard, checkpoints in enumerate(((2, 4), (2, 4, 6))):
        report(run, shard, checkpoints=checkpoints)
    decision.clocks.min_clock = 7
    assert decision.go_back(1, NS).values == {"shard": 1, "from_clock": 4, "to_clock": 7}
    assert (run.restart_clock, run.generation, decision.needed, run.seats) == (4, run.epoch, 1, {})


@pytest.mark.parametrize("resumed", [False, True])
def test_a_resumed_run_waits_for_its_workers_and_one_whose_shard_began_anew_for_a_lease(resumed: bool) -> None:
    run = Run(Settings(workers=2, shards=1).validated(), 1, restart_clock=4)
    decision = generations(run)
    if resumed:
        decision.resumed()
    decision.wake(NS)
    member(run)
    report(run, 0)
    assert not decision.decide(NS), "the other one may come"
    assert decision.decide(NS + int(3 * run.settings.lease * NS)) != resumed
    if resumed:
        member(run)
        report(run, 0)
        assert decision.decide(100 * NS)


def test_one_checkpoint_at_a_time() -> None:
    run = run_of(checkpoint_every=1.0)
    decision = generations(run)
    run.move("start")
    decision.wake(0)
    report(run, 0), report(run, 1)
    assert not decision.tick(NS - 1) and decision.tick(NS) and decision.checkpoint == 1
    report(run, 0, checkpoints=(1,), tried=1)
    assert not decision.tick(5 * NS), "shard 1 has yet to write it"
    report(run, 1, tried=1)  # it could not write it: the next one is asked for all the same
    assert decision.tick(5 * NS)


def test_so_long_is_left_between_checkpoints_that_writing_them_takes_2_percent() -> None:
    run = run_of()
    decision = generations(run)
    report(run, 0), report(run, 1)
    decision.wake(0)
    assert not decision.tick(100 * NS), "the run has not begun"
    run.move("start")
    assert decision.tick(100 * NS), "what it began with"
    for took_ns, waits_ns in ((0, CHECKPOINT_LEAST_NS), (NS, 50 * NS)):
        before_ns = decision.checkpoint_ns
        report(run, 0, tried=1, wrote_ns=took_ns // 2), report(run, 1, tried=1, wrote_ns=took_ns)
        assert not decision.tick(before_ns + waits_ns - 1) and decision.tick(before_ns + waits_ns)


def test_a_stage_has_checkpoints_at_clocks_that_other_stages_have_too() -> None:
    run = run_of(checkpoint_clocks=5)
    decision = generations(run)
    run.move("start")
    decision.wake(0)
    report(run, 0), report(run, 1)
    decision.clocks.min_clock = 7  # as after --resume
    assert decision.tick(0) and decision.checkpoint == 10
    decision.clocks.min_clock = 10
    report(run, 0, tried=10)
    assert not decision.tick(100 * NS), "shard 1 has yet to write it"
    report(run, 1, tried=10)
    assert decision.tick(100 * NS) and decision.checkpoint == 15


def test_a_stage_begins_again_with_all_its_workers_and_others_after_a_lease() -> None:
    for clocks, begins in ((-1, True), (5, False)):
        run = run_of(checkpoint_clocks=clocks, workers=2)
        run.restart_clock = 5
        decision = generations(run)
        decision.wake(1)
        member(run)
        report(run, 0), report(run, 1)
        assert not decision.decide(NS)
        assert decision.decide(int(run.settings.lease * NS) + 2) is begins
        member(run)
        assert decision.decide(int(run.settings.lease * NS) + 3) is not begins


# Above.


def test_a_finish_is_of_all_and_once_at_each_place() -> None:
    run = run_of()
    rounds = Clocks(run)
    above = ParentPlace(run, rounds, True)
    above.take(b"place", 9)
    first, cluster = member(run, rounds), member(run, rounds)
    first.name, cluster.name, cluster.below = b"first", b"cluster", "bsp"
    for finishing, finishes in (((0,), False), ((0, 1), True), ((0, 1), False)):
        for shard in range(2):
            report(run, shard, finishing=finishing, from_above=9)
        assert above.decide(0) == finishes, finishing
        assert above.closed == above.waited(b"first") == (finishing == (0, 1))
        assert not above.waited(b"cluster"), "it may have new workers"
    above.take(b"another", 10)
    above.anew()
    assert not above.closed and not above.waited(b"first")
    rounds.min_clock = 1
    assert not above.decide(0), "shards are at the place before"
    for shard in range(2):
        report(run, shard, from_above=10, finishes=0)
    rounds.progress[0].arrived = rounds.progress[1].arrived = [1, 1]
    assert above.decide(0) and (above.finishes, above.finish_at) == (1, 1)


def test_a_worker_waits_for_a_place_above() -> None:
    run = run_of()
    seat, declare = run.sit(m.Hello("0", "here"), b"", 0), m.Declare(0, 1, b"")
    assert not ParentPlace(run, Clocks(run), False).holds(seat, declare), "a root has no place to wait for"
    above = ParentPlace(run, Clocks(run), True)
    assert above.holds(seat, declare) and seat.phase is SeatPhase.WAITING and not above.released()
    above.take(b"place", 9)
    assert above.released() == {0: declare} and not above.released() and not above.holds(seat, declare)


# Meeting.


def test_a_meeting_is_closed_once_all_have_done_their_last_step() -> None:
    run = run_of(sync="gossip", shards=1)
    meeting, first, second = GossipDirectory(run), member(run), member(run)
    assert meeting.epoch == 0
    run.move("start")
    assert meeting.epoch == run.epoch and meeting.end(first) and not meeting.end(first)
    assert not meeting.decide(0)
    second.finish(0, 0)
    before = run.epoch
    assert meeting.decide(0) and meeting.closed and meeting.epoch == before + 1 and not meeting.decide(0)


def test_a_roster_goes_to_who_knows_what_to_do_with_it_once() -> None:
    run = run_of(sync="gossip", shards=1)
    meeting, first = GossipDirectory(run), member(run)
    member(run)
    run.move("start")
    first.ready_sent = True
    (sent,) = meeting.introductions()
    assert isinstance(sent.message, m.Roster) and (sent.message.worker, len(sent.message.members)) == (0, 2)
    assert not meeting.introductions()
    run.changed()
    assert meeting.introductions()


# Each owns its fields.


def test_decisions_share_out_the_fields_of_a_ledger() -> None:
    decisions = coordinator.Coordinator(Settings().validated(), 1).decisions
    named = [name for decision in decisions for name in decision.fields(0)]
    assert sorted([*named, "version", "report_seen"]) == sorted(m.Ledger.__slots__)


# The door.


def door(**flags: Any) -> Coordinator:
    """One whose only shard has reported."""
    ours = Coordinator(Settings(workers=1, shards=1).validated(), 1, **flags)
    ours.handle(b"", replace(report(ours.run, 0), version=1), 0)
    return ours


def said(effects: list[ServerEffect]) -> list[m.Message]:
    """The messages to those who dialled."""
    return [each.message for each in effects if isinstance(each, Send) and each.peer != b""]


@pytest.mark.parametrize("rows", [0, 4])
def test_a_model_that_the_server_has_no_memory_for_is_refused_by_its_size(rows: int) -> None:
    """It holds two values of a parameter, and one of a row and one of its optimizer's state."""
    ours = door(keys_max=5)
    tables = (TableSpec("t", rows, 1, 0, 1.0, "Adagrad"),) if rows else ()
    for worker, size in enumerate((6, 5)):
        ours.handle(b"peer", m.Hello(f"{worker}", "here"), 0)
        plan = ModelSpec((TensorSpec("w", (size - rows,), "float32"),), "", ((0,),), tables=tables)
        answers = said(ours.handle(b"peer", m.Declare(worker, ours.run.epoch, plan.packed()), 0))
        assert (len(ours.declared) == 1) == (size == 5)
        if size == 6:
            (refuse,) = [each for each in answers if isinstance(each, m.Refuse)]
            assert refuse.code == m.RefuseCode.INCOMPATIBLE
            assert refuse.text == "the model has 6 parameters, and the server's memory holds 5 at most"


def test_flags_of_a_hello_have_a_bound_before_they_are_kept() -> None:
    ours = Coordinator(Settings(workers=1, shards=1).validated(), 1)
    ours.handle(b"peer", m.Hello("0", "here", pack({"x": "y" * (EXPECT_BYTES_MAX - 9)})), 0)
    assert [*ours.members.waiting] == ["0"], "its shard has not reported"
    with pytest.raises(RemoteProtocolError, match=f"more than {EXPECT_BYTES_MAX}"):
        ours.handle(b"peer", m.Hello("1", "here", bytes(EXPECT_BYTES_MAX + 1)), 0)
    assert [*ours.members.waiting] == ["0"]


def test_module_buffers_are_those_of_the_lowest_live_rank_and_nothing_else() -> None:
    """They are loaded by each joiner, and are part of model.safetensors."""
    ours = door()
    lowest, other = (ours.run.sit(m.Hello(name, "here"), name.encode() * m.NAME_BYTES, 0) for name in "ab")
    seated = ours.run.sit(m.Hello("c", "here"), b"c" * m.NAME_BYTES, 0)
    for seat in (lowest, other):
        seat.declare(ours.run.changed(), 0, "")
        ours.clocks.enter(seat, 0)

    def send(seat: Seat, payload: bytes) -> None:
        assert said(ours.handle(seat.peer, m.Buffers(seat.worker, seat.epoch or ours.run.epoch, 0, payload), 0)) == []

    good, better = (pack_arrays({"mean": ("uint8", (1,), value)}) for value in (b"1", b"2"))
    send(lowest, good)
    for junk in (b"none", pack({"mean": ["uint8", [2], b"1"]}), bytes(BUFFERS_BYTES_MAX + 1)):
        with pytest.raises(RemoteProtocolError):
            send(lowest, junk)
    send(other, better)
    send(seated, better)
    assert ours.buffers.packed == good
    ours.handle(lowest.peer, m.Leave(lowest.token, -1), 0)
    send(other, better)
    assert ours.buffers.packed == better
    room = m.Ready(1, 1, 1, ((0, 1),) * SHARDS_MAX, bytes(BUFFERS_BYTES_MAX))
    assert len(encode(room)[0]) <= HEADER_BYTES_MAX, "nobody could join"


def test_who_asks_for_module_buffers_gets_those_of_the_newest_updates() -> None:
    ours = door()
    lowest, other = (ours.run.sit(m.Hello(name, "here"), name.encode() * m.NAME_BYTES, 0) for name in "ab")
    for seat in (lowest, other):
        seat.declare(ours.run.changed(), 0, "")
        ours.clocks.enter(seat, 0)
    packed = [pack_arrays({"mean": ("uint8", (1,), value)}) for value in (b"1", b"2")]

    def ask(seat: Seat, clock: int) -> list[tuple[Any, int, bytes]]:
        return told(ours.handle(seat.peer, m.BuffersRequest(seat.worker, seat.epoch, clock), 0))

    def send(seat: Seat, clock: int, payload: bytes) -> list[tuple[Any, int, bytes]]:
        return told(ours.handle(seat.peer, m.Buffers(seat.worker, seat.epoch, clock, payload), 0))

    def told(effects: list[ServerEffect]) -> list[tuple[Any, int, bytes]]:
        said = [(each.peer, each.message) for each in effects if isinstance(each, Send)]
        return [(to, word.clock, bytes(word.payload)) for to, word in said if isinstance(word, m.Buffers)]

    assert ask(other, 3) == [] and ours.buffers.wanted(lowest.worker, 0) and not ours.buffers.wanted(other.worker, 0)
    assert ask(lowest, 3) == [(lowest.peer, -1, b"")]  # its own are those of the run
    assert send(lowest, 3, packed[0]) == [(other.peer, 3, packed[0])]  # who had waited
    assert ask(other, 3) == [(other.peer, 3, packed[0])]
    assert send(lowest, 3, packed[0]) == []
    ours.buffers.heard_ns = NS
    assert not ours.buffers.wanted(lowest.worker, 2 * NS), (
        "each half of a lease is enough where checkpoints are adaptive"
    )
    assert ours.buffers.wanted(lowest.worker, 6 * NS)
    ours.clocks.progress[lowest.worker].arrived = [5] * ours.run.shards
    assert ask(other, 3) == [(other.peer, 3, packed[0])]  # as new as its own updates
    assert ask(other, 9) == []  # the lowest rank is at 5 by now
    assert send(lowest, 5, packed[1]) == [(other.peer, 5, packed[1])]
    assert ask(other, 9) == [(other.peer, 5, packed[1])]  # the newest that there are
    ours.handle(lowest.peer, m.Leave(lowest.token, -1), 0)
    assert ask(other, 5) == [(other.peer, 5, packed[1])]  # who has left has left them
    ours.clocks.progress[other.worker].arrived = [9] * ours.run.shards
    assert ask(other, 9) == [(other.peer, -1, b"")]


def test_the_end_of_gossip_is_shown_with_no_module_buffers_of_before_it() -> None:
    ours = Coordinator(Settings(sync="gossip", workers=2).validated(), 1)
    lowest, other = (ours.run.sit(m.Hello(name, "here"), name.encode() * m.NAME_BYTES, 0) for name in "ab")
    for seat in (lowest, other):
        seat.declare(ours.run.changed(), 0, "")
        ours.clocks.enter(seat, 0)
    early, last = (pack_arrays({"mean": ("uint8", (1,), value)}) for value in (b"1", b"2"))
    ours.handle(lowest.peer, m.Buffers(lowest.worker, lowest.epoch, 0, early), 0)  # it has evaluated in mid-run
    assert ours.handle(other.peer, m.BuffersRequest(other.worker, other.epoch, 1), 0) == []
    told = ours.handle(lowest.peer, m.Buffers(lowest.worker, lowest.epoch, 1, last), 0)
    assert told == [Send(other.peer, m.Buffers(other.worker, other.epoch, 1, last))]


# Those who are gone.


def test_a_member_that_comes_through_a_mailbox_is_not_probed() -> None:
    """It has no connection that could be found to be broken, and a probe would cost a request."""
    for connected in (True, False):
        run = run_of()
        rounds = Clocks(run)
        above, gossip = ParentPlace(run, rounds, False), GossipDirectory(run)
        roster = Members(run, rounds, above, gossip, 1 << 30, connected)
        seat = run.sit(m.Hello("a", "here"), b"a" * m.NAME_BYTES, 0)
        seat.declare(run.changed(), 0, "")
        assert len(roster.probes(100 * NS)) == connected


def test_who_has_no_connection_is_waited_for_a_quarter_of_a_lease() -> None:
    run = run_of(lease=20.0)
    rounds = Clocks(run)
    roster = Members(run, rounds, ParentPlace(run, rounds, False), GossipDirectory(run), 1 << 30)
    here, gone = (run.sit(m.Hello(name, "here"), name.encode() * m.NAME_BYTES + b"x", 0) for name in "ab")
    for seat in (here, gone):
        seat.declare(run.changed(), 0, "")
        rounds.enter(seat, 0)
    assert roster.probes(NS // 2) == []
    assert {probe.peer for probe in roster.probes(NS)} == {here.peer, gone.peer} and roster.probes(NS) == []
    roster.unreached(gone.name + b"another of its connections", NS)
    roster.heard(here.worker, 5 * NS)
    assert roster.expired(6 * NS) == [] and roster.expired(6 * NS + 1) == [gone]
    roster.heard(gone.worker, 6 * NS)
    assert roster.expired(24 * NS) == [], "it has connected anew"
    assert roster.expired(27 * NS) == [here, gone], "and a silence is a lease long"


def test_shard_0_does_not_wait_for_shards_that_have_ended() -> None:
    """Where it was killed while it wrote the last checkpoint: the others had said all, to the process before."""
    ours = Coordinator(Settings(shards=2).validated(), 1)
    for shard in range(2):
        said = report(ours.run, shard)
        ours.handle(b"" if not shard else b"shard 1", replace(said, version=1, at_rest=False), 0)
    ours.ended([1])
    assert not ours.reports[1].at_rest, "the run is not over"
    ours.stop(0)
    ours.handle(b"", replace(ours.reports[0], version=2, ledger_seen=ours.version, at_rest=True), 0)
    assert not ours.checkpoint_schedule.at_rest
    ours.ended([1])
    assert ours.checkpoint_schedule.at_rest


# Keys that move.


def moving(members: int, sync: str = "bsp") -> tuple[Resharding, list[Seat]]:
    """A run of two shards whose members have been told to hold at clock 1, for a third shard."""
    ours = Coordinator(Settings(sync=sync, workers=members, shards=2).validated(), 1)
    run, rounds, moves = ours.run, ours.clocks, ours.resharding
    seats = [member(run, rounds) for _ in range(members)]
    run.move("start")
    reports = [report(run, shard) for shard in range(2)]
    moves.ask(3)
    assert not moves.decide(0) and not moves.holds, "the third shard is not there"
    moves.offer(b"third", replace(reports[1], shard=2))
    assert moves.decide(0) and (moves.at, rounds.stop) == (1, 0)
    return moves, seats


def test_no_clock_closes_until_all_know_that_they_are_to_hold() -> None:
    moves, (first, second) = moving(2)
    for seat in (first, second):
        push(moves.clocks, seat, 1)
    moves.knows(first, moves.number)
    assert not moves.decide(0) and not moves.clocks.decide(0), "the second might push update 1"
    moves.knows(second, moves.number)
    assert moves.decide(0) and moves.phase is ReshardPhase.HELD
    assert moves.clocks.decide(0) and moves.clocks.min_clock == 1
    assert not moves.clocks.decide(0) and not moves.decide(0), "the shards have not published it"


def test_the_last_clock_of_a_start_closes_once_all_hold_after_it() -> None:
    ours = Coordinator(Settings(sync="ssp", workers=2, start_steps=2).validated().begun(), 1)
    run, clocks, moves = ours.run, ours.clocks, ours.resharding
    first, second = (member(run, clocks) for _ in range(2))
    run.move("start")
    report(run, 0)
    for seat in (first, second):
        seat.readied()
        push(clocks, seat, 2, shards=1)
    assert not moves.decide(0) and clocks.decide(0) and clocks.min_clock == 1
    report(run, 0, min_clock=1)
    assert not clocks.decide(0), "the members might push for clock 2"
    assert moves.decide(0) and (moves.at, moves.next.start_clock, moves.next.sync) == (2, 2, "ssp")
    for seat in (first, second):
        assert not clocks.decide(0)
        moves.knows(seat, moves.number)
    assert moves.decide(0) and clocks.decide(0) and clocks.min_clock == 2 and not clocks.decide(0)
    run.shift(moves.next, 2, clocks.starts(2))
    assert run.settings.push == "update" and not run.settings.starting
    run.restart(1, 1)
    assert run.settings.starting and run.settings.plan_number == 3, "it goes back into its start"
    run.restart(3, 1)
    assert run.settings.starting, "only the end of the start ends it"


@pytest.mark.parametrize("phase", [ReshardPhase.TOLD, ReshardPhase.HELD])
def test_keys_stay_where_nobody_trains_any_more(phase: ReshardPhase) -> None:
    """Else the run would let nobody in, and wait for ever."""
    moves, (seat,) = moving(1)
    if phase is ReshardPhase.HELD:
        moves.knows(seat, moves.number)
        moves.decide(0)
    assert moves.phase is phase and moves.holds
    moves.members.left(seat, "expired")
    assert moves.decide(0) and not moves.holds and moves.clocks.stop == -1
    (log,) = moves.tell()
    assert log.values["target"] == 2 and "no worker trains" in str(log.values["text"])


def test_who_does_not_say_that_it_holds_is_waited_for_no_longer_than_two_leases() -> None:
    moves, (first, second) = moving(2)
    moves.knows(first, moves.number)
    assert not moves.decide(20 * NS) and moves.holds
    assert moves.decide(20 * NS + 1) and not moves.holds
    (log,) = moves.tell()
    assert f"worker {second.worker} does not say" in str(log.values["text"])


def test_where_no_clock_is_one_that_all_come_to_each_member_names_its_own() -> None:
    """Keys move once each shard has all that a member had pushed by then. One that is behind names the clock asked for."""
    moves, (fast, slow) = moving(2, sync="async")
    clocks = moves.clocks
    push(clocks, fast, 5)
    moves.knows(fast, moves.number, 7)
    moves.knows(slow, moves.number, moves.at)
    push(clocks, slow, 1)
    assert not moves.decide(0) and not clocks.decide(0), "update 6 of the fast one is under way"
    clocks.heard(report(moves.run, 0, arrived=((fast.worker, 7),)), 0)
    assert not moves.decide(0), "shard 1 lacks it"
    clocks.heard(report(moves.run, 1, arrived=((fast.worker, 7),)), 0)
    assert moves.decide(0) and moves.phase is ReshardPhase.HELD
    assert clocks.decide(0) and clocks.min_clock == moves.at == 1 and not clocks.decide(0)
    assert clocks.starts(1) == {fast.worker: 7, slow.worker: 1}


def test_who_does_not_push_what_it_named_is_waited_for_no_longer_than_two_leases() -> None:
    moves, (first, second) = moving(2, sync="async")
    for seat in (first, second):
        moves.knows(seat, moves.number, 1)
    push(moves.clocks, first, 1)
    assert not moves.decide(20 * NS) and moves.decide(20 * NS + 1) and not moves.holds
    (log,) = moves.tell()
    assert f"worker {second.worker} does not push the updates before" in str(log.values["text"])


def test_a_shard_that_cannot_write_keeps_the_keys_where_they_are() -> None:
    moves, (seat,) = moving(1)
    moves.knows(seat, moves.number)
    push(moves.clocks, seat, 1)
    assert moves.decide(0) and moves.clocks.decide(0)
    for shard, kept in enumerate(((1,), ())):
        report(moves.run, shard, min_clock=1)
        assert moves.decide(0) == bool(shard)
        report(moves.run, shard, tried=1, checkpoints=kept)
    report(moves.run, 0, tried=1)
    assert moves.phase is ReshardPhase.WRITING and moves.decide(0) and not moves.holds
    (log,) = moves.tell()
    assert "shard 1 could not write" in str(log.values["text"]) and moves.run.shards == 2
    assert [word.message for word in moves.word(seat)] == []  # it is not ready
    seat.ready_sent, moves.members.plan = True, ModelSpec((TensorSpec("w", (4,), "float32"),), "", ((0,),))
    assert [word.message for word in moves.word(seat)] == [m.Reshard(seat.worker, seat.epoch, 2, -1)]


# Machines that join.


def says(
    ours: Coordinator,
    token: str,
    shards: int = 1,
    first: int = -1,
    wish: RemoteShardsWish = RemoteShardsWish.STAY,
    now_ns: int = 0,
) -> m.RemoteShardsGrant:
    """Join as a machine does, and return the answer."""
    effects = ours.handle(b"guest", m.RemoteShardsOffer(token, f"host-{token}", shards, first, wish), now_ns)
    rooms = [
        each.message for each in effects if isinstance(each, Send) and isinstance(each.message, m.RemoteShardsGrant)
    ]
    room = rooms[-1]  # who is no guest any more is told so, and answered
    assert {each.token for each in rooms} == {token}
    return room


class House:
    """A run of two shards and one member that trains, and machines that join it."""

    def __init__(self, **flags: Any) -> None:
        known: dict[str, Any] = {"sync": "bsp", "workers": 1, "shards": 2}
        self.ours = ours = Coordinator(Settings(**known | flags).validated(), 1)
        self.now_ns, self.seat = 0, member(ours.run, ours.clocks)
        ours.run.move("start")
        for shard in range(2):
            report(ours.run, shard, checkpoints=(0,))
            ours.lines[shard] = coordinator.ShardLine(b"old")

    def says(
        self, token: str, shards: int = 1, first: int = -1, wish: RemoteShardsWish = RemoteShardsWish.STAY
    ) -> m.RemoteShardsGrant:
        return says(self.ours, token, shards, first, wish, self.now_ns)

    def moves(self) -> None:
        """Carry out a move that is under way, to its end."""
        run, moves = self.ours.run, self.ours.resharding
        assert moves.may_stay
        for shard in range(run.shards, moves.target):
            here = replace(run.reports[0], shard=shard, host=moves.away.get(shard, ""))
            moves.offer(b"new", here)
        for _ in ReshardPhase:
            moves.knows(self.seat, moves.number)
            if moves.phase is ReshardPhase.HELD:
                push(self.ours.clocks, self.seat, moves.at, run.shards)
            at = self.ours.min_clock
            rows: dict[str, Any] = {"min_clock": at, "tried": at, "checkpoints": (at,), "epoch": run.epoch}
            for shard in range(run.shards):
                report(run, shard, host=moves.away.get(shard, ""), **rows)
            self.ours._settle(self.now_ns)
        assert moves.phase in (ReshardPhase.STILL, ReshardPhase.ASKED), "done, or the next one is due"

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.ours.run.where[1]


def test_a_machine_that_joins_gets_the_shards_after_the_last_and_gives_them_back() -> None:
    house = House()
    room = house.says("a", 2)
    assert (room.first, room.count, room.shards, room.target, room.over) == (2, 2, 2, 4, False)
    house.moves()
    assert house.says("a", 2, 2).shards == 4 and house.hosts == ("", "", "host-a", "host-a")
    assert house.says("a", 2, 2, RemoteShardsWish.GO).target == 2
    house.moves()
    room = house.says("a", 2, 2, RemoteShardsWish.GO)
    assert (
        (room.over, room.code, room.shards) == (True, 0, 2) and not any(house.hosts) and not house.ours.resharding.away
    )


def test_a_machine_that_comes_as_the_run_ends_is_told_so_before_the_server_ends() -> None:
    """It would ask again in a second, and wait a minute for an answer."""
    house = House()
    assert not house.says("a").over and not house.says("b").over
    effects = [*house.ours.stop(0), *house.ours._settle(0)]
    rooms = [
        each.message for each in effects if isinstance(each, Send) and isinstance(each.message, m.RemoteShardsGrant)
    ]
    assert {room.token for room in rooms} == {"a", "b"}
    assert all(room.over and "the run is over" in room.text for room in rooms)


def test_one_machine_comes_after_the_other_and_goes_before_it() -> None:
    house = House()
    assert house.says("a").first == 2 and house.says("b").first == -1, "one move at a time"
    house.moves()
    assert house.says("b").first == 3
    house.moves()
    assert house.says("a", 1, 2, RemoteShardsWish.GO).target == 2
    house.moves()
    assert house.says("a", 1, 2).code == 0 and house.says("b", 1, 3).code == m.RefuseCode.NOT_A_MEMBER
    assert house.says("b again").first == 2


def test_a_move_to_a_machine_that_goes_is_called_off() -> None:
    house = House()
    house.says("a")
    room = house.says("a", wish=RemoteShardsWish.GO)
    assert (
        room.over
        and room.code == 0
        and house.ours.resharding.phase is ReshardPhase.STILL
        and not house.ours.resharding.away
    )


def test_a_machine_hears_why_the_keys_stay_where_they_are() -> None:
    house = House()
    house.says("a")
    house.ours.reshard(0, 0)
    room = house.says("a")
    assert (room.over, room.code) == (True, 1) and "a new shard did not start" in room.text
    room = House(sync="gossip").says("a")
    assert (room.over, room.code) == (True, m.RefuseCode.INCOMPATIBLE) and "the workers hold the model" in room.text
    room = house.says("b", SHARDS_MAX)
    assert (room.over, room.code) == (True, 1) and "from 1 to" in room.text
    house, table = House(), TableSpec("t", 9, 1, 0, 1.0, "SGD")
    house.ours.members.adopt(ModelSpec((TensorSpec("w", (9,), "float32"),), "", ((0,),), tables=(table,)).packed())
    room = house.says("a")
    assert (room.over, room.code) == (True, m.RefuseCode.INCOMPATIBLE) and "rows stay on their shards" in room.text


def test_a_user_takes_shards_of_machines_away_and_adds_none_beyond_them() -> None:
    house = House()
    house.says("a", 2)
    house.moves()
    (log,) = house.ours.reshard(5, 0)
    assert isinstance(log, Log) and "on other machines" in str(log.values["text"])
    house.ours.reshard(3, 0)
    house.moves()
    room = house.says("a", 2, 2)
    assert (room.first, room.count, room.over) == (2, 1, False)
    house.ours.reshard(2, 0)
    house.moves()
    assert house.says("a", 2, 2).over and house.says("a", 2, 2).code == 0


@pytest.mark.parametrize("says_so", [True, False])
def test_a_machine_that_is_lost_is_done_without(says_so: bool) -> None:
    house, run = House(), None
    for token, first in (("a", 2), ("b", 3)):
        house.says(token)
        house.moves()
        house.says(token, 1, first)
    run = house.ours.run
    clock, epoch = house.ours.min_clock, run.epoch
    if says_so:
        house.says("a", 1, 2, RemoteShardsWish.GONE)
    else:
        house.now_ns = 30 * NS
        house.says("b", 1, 3)
        assert run.shards == 4, "three leases are not over"
        house.now_ns += 1
        house.seat.seen_ns = house.now_ns
    told = house.ours.tick(house.now_ns)
    (log,) = (each for each in told if isinstance(each, Log) and each.event == "move")
    assert "host-a is lost" in str(log.values["text"]) and (log.values["shards"], log.values["away"]) == (2, {})
    assert (run.shards, run.restart_clock, [*run.reports]) == (2, clock, [0, 1]) and run.generation > epoch
    assert not run.seats, "all join again"
    assert house.says("a", 1, 2).code == m.RefuseCode.SERVER_LOST
    assert house.says("b", 1, 3).code == m.RefuseCode.NOT_A_MEMBER


def test_where_no_checkpoint_is_left_a_lost_machine_ends_the_run() -> None:
    house = House()
    house.says("a")
    house.moves()
    report(house.ours.run, 0, checkpoints=())
    house.says("a", 1, 2, RemoteShardsWish.GONE)
    (stop,) = (each for each in house.ours.tick(0) if isinstance(each, StopProcess))
    assert stop.code == m.RefuseCode.SERVER_LOST and "no checkpoint is on all shards" in stop.text


def test_a_coordinator_that_begins_anew_waits_for_the_machines_that_had_joined() -> None:
    away = {2: "host-a", 3: "host-a", 4: "host-b"}
    for said in (True, False):
        ours = Coordinator(Settings(sync="bsp", shards=5).validated(), 1, away=away)
        for shard in range(5):
            report(ours.run, shard, checkpoints=(4,), host=away.get(shard, ""))
            ours.lines[shard] = coordinator.ShardLine(b"old")
        ours.tick(0)
        for token, first, shards in (("a", 2, 2), ("b", 4, 1)) if said else ():
            room = says(ours, token, shards, first, now_ns=20 * NS)
            assert (room.first, room.count, room.over) == (first, shards, False)
        ours.tick(30 * NS + 1)
        assert ours.run.shards == (5 if said else 2)
    room = says(ours, "a", 2, 2, now_ns=31 * NS)
    assert room.over and room.code == m.RefuseCode.SERVER_LOST


def test_a_report_of_a_machine_that_has_lost_its_shards_counts_no_more() -> None:
    """Its clock may be ahead of that of the machine which has them now."""
    house = House()
    house.says("a")
    house.moves()
    ours = house.ours
    before = ours.reports[2]
    ours.handle(b"old", replace(before, host="elsewhere", incarnation=before.incarnation + 9), 0)
    assert ours.reports[2] is before and ours.run.shards == 3


# Whom a run waits for.


def attendance(child: bool = False, **flags: Any) -> StartNotice:
    run = run_of(**flags)
    rounds = Clocks(run)
    above = ParentPlace(run, rounds, child)
    return StartNotice(run, rounds, above, CheckpointSchedule(run, rounds, above), GossipDirectory(run))


def test_a_run_says_how_many_workers_have_joined_and_how_many_are_missing() -> None:
    for needed, joined, says in (
        (1, 0, "0 of 1 worker joined; waiting for 1"),
        (3, 2, "2 of 3 workers joined; waiting for 1"),
        (3, 3, ""),
    ):
        waits = attendance(workers=needed)
        for _ in range(joined):
            member(waits.run, waits.clocks)
        assert waits.clause(0) == says
    waits.run.sit(m.Hello("late", "here"), b"", 0)
    waits = attendance(workers=2)
    member(waits.run, waits.clocks)
    waits.run.sit(m.Hello("no model", "here"), b"", 0)
    assert waits.clause(0) == "2 of 2 workers joined; waiting for the model of 1"


def test_a_run_that_is_resumed_waits_for_as_many_and_says_so() -> None:
    waits = attendance(workers=3)
    waits.run.restart_clock = 40
    waits.checkpoint_schedule.resumed()
    waits.checkpoint_schedule.wake(0)
    member(waits.run, waits.clocks)
    assert waits.clause(0) == "1 of 3 workers joined; waiting for 2"


def test_a_cluster_whose_workers_are_there_says_what_the_server_above_waits_for() -> None:
    waits = attendance(child=True, workers=1)
    waits.above.listen(NoNews(waits="1 of 2 clusters joined; waiting for 1"))
    assert waits.clause(0) == "0 of 1 worker joined; waiting for 1"
    waits.above.undeclared[0] = m.Declare(waits.run.sit(m.Hello("one", "here"), b"", 0).worker, 1, b"")
    assert waits.clause(FRESH_NS) == "in the parent's run: 1 of 2 clusters joined; waiting for 1"


def test_a_run_names_who_is_late_and_counts_who_is_done() -> None:
    waits = attendance(sync="bsp", workers=3)
    first, second, third = (member(waits.run, waits.clocks) for _ in range(3))
    waits.run.move("start")
    waits.clocks.open(0)
    push(waits.clocks, first, 1)
    push(waits.clocks, second, 1)
    assert waits.clause(0) == "waiting for rank 2 (here), at clock 0"
    push(waits.clocks, third, 1)
    assert waits.clocks.decide(0) and waits.clause(FRESH_NS) == ""
    for shard in range(2):
        report(waits.run, shard, finishing=(first.worker,), min_clock=1)
    assert waits.clause(2 * FRESH_NS) == "1 of 3 workers has done its last step; waiting for 2, at clock 1"


def test_a_console_has_it_after_a_while_and_then_less_often_and_a_page_at_each_change() -> None:
    waits, told = attendance(workers=2), list[tuple[int, dict[str, Any]]]()
    for second in range(100):
        if second == 45:
            member(waits.run, waits.clocks)
        told += [(second, log.values) for log in waits.tick(second * NS)]
    none, one = "0 of 2 workers joined; waiting for 2", "1 of 2 workers joined; waiting for 1"
    assert told == [
        (0, {"waits": none}),
        (10, {"waits": none, "text": f"{none}, 10 s so far"}),
        (30, {"waits": none, "text": f"{none}, 30 s so far"}),
        (45, {"waits": one}),
        (70, {"waits": one, "text": f"{one}, 70 s so far"}),
    ]
    member(waits.run, waits.clocks)
    assert [log.values for log in waits.tick(200 * NS)] == [{"waits": ""}]


def test_each_member_is_told_with_its_heartbeats() -> None:
    cluster = Cluster(Settings(workers=3))
    link = Link(cluster, "one")
    link.declare(ModelSpec((TensorSpec("w", (4,), "float32"),), "", ((0,),)).packed())
    link.call(lambda each, now: [each.beat(now)])
    assert link.member.waits == "1 of 3 workers joined; waiting for 2"


def test_a_run_of_gossip_goes_on_with_the_newest_round_that_a_majority_has_reached() -> None:
    every = ((0, 8), (1, 8), (2, 8))
    for models, found in (
        ([((0, 8), (0, 12)), ((1, 8),), ((2, 12), (2, 8))], (12, ((0, 0), (2, 2)))),
        ([((0, 12),), ((1, 8),), ((2, 8),)], (8, ((0, 0), (1, 1), (2, 2)))),
        ([((0, 13),), ((1, 12), (1, 4)), ((2, 9),)], (12, ((0, 0), (1, 1)))),  # stopped in different rounds
        ([((2, 8),), (), ((0, 8),)], (8, ((0, 2), (2, 0)))),  # ranks are other ones now
        ([every, every, every], (8, ((0, 0), (1, 1), (2, 2)))),  # one folder
        ([((2, 8),), ((2, 8),), ((2, 8),)], (-1, ())),  # the same file three times
        ([((0, 8),), (), ()], (-1, ())),
    ):
        run = run_of(sync="gossip", workers=3)
        rounds = Clocks(run)
        decision = CheckpointSchedule(run, rounds, ParentPlace(run, rounds, False))
        decision.resumed(from_workers=True)
        for each in models[:2]:
            member(run, rounds).models = each
        assert decision.sources == (-1, ()) and decision.initialiser == -1, "one is to come"
        member(run, rounds).models = models[2]
        assert decision.sources == found and decision.initialiser == (found[1][0][0] if found[1] else 0)


def test_calls_at_two_steps_do_not_wait_for_each_other() -> None:
    """As with a quorum, where a late worker's step counts the rounds that closed without it."""
    run = run_of(sync="local", workers=2, quorum=1)
    rounds = Clocks(run)
    above, first, second = ParentPlace(run, rounds, False), member(run, rounds), member(run, rounds)
    agreements = Agreements(run, rounds, above, GossipDirectory(run))
    agreements.hear(first, m.AgreeRequest(first.worker, first.epoch, 1, 20, 0, 2, 4.0, 1))
    assert not agreements.decide(0) and not agreements.answers(), "the other may come to that step"
    agreements.hear(second, m.AgreeRequest(second.worker, second.epoch, 1, 30, 0, 3, 8.0, 1))
    assert agreements.decide(0)
    ((answer,),) = [[effect.message for effect in agreements.answers()]]
    assert isinstance(answer, m.AgreeAnswer) and (answer.worker, answer.value) == (first.worker, 4.0)


def test_a_worker_of_gossip_gets_a_ticket_of_the_relay_and_others_get_none() -> None:
    """Each start of a worker has a name of its own, and its key is what the relay makes of the name."""
    secret = "5e" * 32
    directory = GossipDirectory(run_of(sync="gossip"))
    assert directory.ticket("a") == ()
    directory.meet_at("tcp://relay:1", secret)
    name, key, address = directory.ticket("a")
    assert (name, key, address) == (node_name(secret, "a"), node_key(secret, name), "tcp://relay:1")
    assert directory.ticket("a") == (name, key, address) != directory.ticket("a.1")
    of_ssp = GossipDirectory(run_of(sync="ssp"))
    of_ssp.meet_at("", secret)
    assert of_ssp.ticket("a") == ()
