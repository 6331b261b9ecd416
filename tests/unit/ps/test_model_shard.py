"""The clock of a shard: its stages, in their order, and what each of them waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulation.actors import PLANS, PlainSGD

from narrows.compression.codecs import raw_pieces
from narrows.protocols import messages as m
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.retry import RetryTimer
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import REQUEST_RETRY
from narrows.protocols.effects import NS, Send, WriteCheckpoint
from narrows.protocols.wire import pack
from narrows.ps.shard.model_shard import NEXT, STAGES, ClockStage, ModelShard, ShardResources
from narrows.ps.shard.publications import PublicationChild, SentPublication
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence
from narrows.ps.shard.shard import UNDECIDED
from narrows.ps.shard.shard_requests import ShardRequests
from narrows.ps.store.changes import OuterStep, SetFirstWeights

HYPER = pack([pack([{"lr": 0.5}]), []])


def planned_of(**flags: Any) -> ModelShard:
    """One shard with the weights that the run begins with, and one member."""
    settings = Settings(**flags).validated()
    inbox = PushAssembler(0, settings.mode())
    ledger = replace(UNDECIDED, epoch=5, members=((0, 5, 0),), started=True)
    inbox.members(ledger, 0, -1, 1)
    means = ShardResources(optimizer=PlainSGD)
    planned = ModelShard(0, settings, ModelSpec.unpacked(PLANS[0.0]), inbox, 0, means)
    planned.apply([SetFirstWeights(raw_pieces(np.zeros(7, np.float32), 0, [(0, 7)]))])
    return planned


def push(planned: ModelShard, clock: int) -> None:
    seat = planned.assembler.seats[0]
    begin, end = planned.turn(clock)
    (piece,) = raw_pieces(np.ones(end - begin, np.float32), begin, [(begin, end)])
    message = m.Push(0, 5, clock, 0, 1, begin, end, 1, HYPER, piece.codec, piece.payload)
    planned.assembler.add(seat, message, (begin, end))
    update = planned.assembler.next(seat)
    assert update is not None
    planned.accept(seat, update)


def ledger_of(min_clock: int, **changes: Any) -> m.Ledger:
    sets = tuple((clock, 0, clock) for clock in range(min_clock))
    return replace(UNDECIDED, epoch=5, members=((0, 5, 0),), started=True, min_clock=min_clock, sets=sets, **changes)


def test_every_stage_has_its_turn() -> None:
    assert set(STAGES) == set(ClockStage) == set(NEXT)
    at, seen = ClockStage.FOLD, []
    for _ in ClockStage:
        seen.append(at)
        at = NEXT[at]
    assert seen == [*ClockStage] and at is ClockStage.FOLD


def test_a_checkpoint_is_written_before_the_clock_after_it_is_folded() -> None:
    planned = planned_of(sync="local", local_steps=2, fragments=2, merge_delay=1)
    for clock in range(2):
        push(planned, clock)
    ledger = ledger_of(2, checkpoint=1)
    assert planned.run(ledger, 0) == [WriteCheckpoint(1)]
    assert (planned.min_clock, planned.stage, planned.store.publication) == (1, ClockStage.CHECKPOINT, 1)
    assert planned.run(ledger, 0) == [] and planned.min_clock == 1, "whatever comes meanwhile"
    planned.has_written()
    assert planned.run(ledger, 0) == []
    assert (planned.min_clock, planned.stage, planned.store.publication) == (2, ClockStage.FOLD, 2)


def test_a_clock_waits_for_the_norm_over_all_shards() -> None:
    planned = planned_of(sync="bsp", shards=1)
    planned.plan = ModelSpec.unpacked(PLANS[1.5])
    push(planned, 0)
    assert planned.run(ledger_of(1), 0) == [] and planned.stage is ClockStage.FOLD
    assert planned.norms == {0: 7.0}
    planned.run(ledger_of(1, norms=((0, 3.0),)), 0)
    assert planned.min_clock == 1 and not planned.norms
    np.testing.assert_allclose(planned.store.x, -0.5 * 1.5 / 3.0, rtol=1e-5)


def test_what_may_not_have_left_is_sent_with_the_next_word_of_a_child() -> None:
    now_ns, follow = NS, m.Follow(0, 1, 0, 3, 16)
    child = PublicationChild(follow, RetryTimer(REQUEST_RETRY), sent={4: SentPublication(10, now_ns, now_ns)})
    child.said(replace(follow, clock=1), now_ns)
    assert 4 in child.sent, "it is on its way"
    child.repeat_soon()
    child.said(replace(follow, clock=2), now_ns)
    assert not child.sent and 4 in child.again


def test_what_a_child_calls_lost_is_sent_again_at_once() -> None:
    now_ns, follow = NS, m.Follow(0, 1, 0, 3, 16)
    child = PublicationChild(follow, RetryTimer(REQUEST_RETRY), sent={4: SentPublication(10, now_ns, now_ns)})
    child.said(follow, now_ns)
    assert 4 in child.sent, "it is on its way"
    child.said(replace(follow, lost=True), now_ns)
    assert not child.sent and 4 in child.again
    child.sent[4] = SentPublication(10, now_ns, now_ns)
    child.said(follow, now_ns)
    assert 4 in child.sent, "it was said of what had been sent before"


def test_a_child_gets_no_weights_between_a_fold_and_its_publication() -> None:
    planned = planned_of(sync="local", local_steps=2)
    planned.publish()
    seat = planned.assembler.seats[0]
    planned.publications.follow(seat, m.Follow(0, 5, 0, -1, 4), 0)
    planned.apply([OuterStep(((1.0, raw_pieces(np.ones(7, np.float32), 0, [(0, 7)])),), (0, 7))])
    assert planned.publications.serve(seat, 0) == [], "x is p: the weights are newer than publication 1"
    planned.publish()
    (sent,) = planned.publications.serve(seat, 0)
    assert isinstance(sent, Send) and isinstance(sent.message, m.State) and sent.message.publication == 2


def test_a_push_before_the_run_has_begun_lets_no_rows_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that was accepted before: a shard answers it with its ack alone."""
    planned = planned_of(sync="bsp")
    service, seat, answered = ShardRequests(planned), planned.assembler.seats[0], list[int]()

    def rows(seat: PushSequence, now_ns: int) -> list[Send]:
        answered.append(now_ns)
        return []

    monkeypatch.setattr(service, "_rows", rows)
    (piece,) = raw_pieces(np.ones(7, np.float32), 0, [(0, 7)])
    early = m.Push(0, 5, 0, 0, 1, 0, 7, 1, HYPER, piece.codec, piece.payload)
    assert service.handle(seat, early, replace(ledger_of(0), started=False), 1) == ([], False)
    assert not answered and not seat.partial
    effects, news = service.handle(seat, early, ledger_of(0), 2)
    assert news and answered == [2] and len(effects) == 1
    effects, news = service.handle(seat, early, ledger_of(0), 3)
    assert not news and answered == [2] and len(effects) == 1
