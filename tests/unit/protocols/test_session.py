"""A member talks with a shard: publications in their order, whatever is lost, late or comes twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.in_process import store_of
from kit.scripts import Link, build, flat, loss_of, run

from narrows.compression.codecs import CODED
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.retry import RETRY_FACTOR_MAX, RetryTimer
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import REQUEST_RETRY, Timing
from narrows.protocols.effects import NS, Send
from narrows.protocols.errors import LocalProtocolError, RemoteProtocolError
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.session import Session
from narrows.protocols.messages import CREDIT_MAX
from narrows.protocols.wire import FRAME_BYTES
from narrows.worker import DistributedOptimizer

LOSSY = Settings(sync="ssp", staleness=3, compress="topk:0.5").validated()
RETRY_NS = REQUEST_RETRY.first_ns


def session(credit: int = CREDIT_MAX, clock: int = 0) -> Session:
    """That follows."""
    ours = Session(0, 1, LOSSY.mode(), Timing(), LinkMeter())
    assert follows(ours.send([m.Follow(0, 1, clock, -1, credit)], 0)) == [(clock, -1)]
    return ours


def state(publication: int, request: int = 0, whole: bool = False, **changes: Any) -> m.State:
    values: dict[str, Any] = {"worker": 0, "epoch": 1, "request": request, "part": 0, "parts": 1, "begin": 0, "end": 4,
                              "whole": whole, "add": not whole, "publication": publication, "min_clock": publication,
                              "settled": publication, "contains": (), "sent_ns": 0, "codec": CODED,
                              "payload": b""}  # fmt: skip
    return m.State(**(values | changes))


def follows(effects: list[Any]) -> list[tuple[int, int]]:
    said = [effect.message for effect in effects if isinstance(effect, Send)]
    return [(message.clock, message.have) for message in said if isinstance(message, m.Follow)]


def publications(effects: list[Any]) -> list[int]:
    return [effect.parts[-1].publication for effect in effects if isinstance(effect, e.StateArrived)]


def test_differences_are_taken_in_their_order_once_and_acknowledged() -> None:
    ours = session()
    effects = ours.receive(state(4, whole=True), 0)
    assert publications(effects) == [4] and follows(effects) == [(0, 4)]
    assert ours.receive(state(7), 0) == []
    assert ours.receive(state(6, parts=2), 0) == []
    assert publications(ours.receive(state(5), 0)) == [5]
    effects = ours.receive(state(6, parts=2, part=1), 0)
    assert publications(effects) == [6, 7] and follows(effects) == [(0, 7)], "one word for all that came"
    for copy in (4, 5, 6, 7):
        assert ours.receive(state(copy), 0) == []
    assert not ours.coming


def test_a_whole_state_overtakes_all_before_it() -> None:
    ours = session()
    ours.receive(state(0, whole=True), 0)
    assert ours.receive(state(2), 0) == []
    assert publications(ours.receive(state(9, whole=True), 0)) == [9]
    assert ours.receive(state(3, whole=True), 0) == [] and not ours.coming
    assert publications(ours.receive(state(10), 0)) == [10]


def test_parts_of_two_whole_states_are_not_put_together() -> None:
    """The one under way was made again: the newer one is told part by part, and is the only one that is waited for."""
    ours = session(credit=1)
    for part in range(2):
        (told,) = ours.receive(state(1, whole=True, part=part, parts=3), 0)
        assert isinstance(told, e.StatePart)
    assert publications(ours.receive(state(2, whole=True, part=2, parts=3), 0)) == []
    assert ours.receive(state(1, whole=True, part=2, parts=3), 0) == []
    for part in range(2):
        effects = ours.receive(state(2, whole=True, part=part, parts=3), 0)
    assert publications(effects) == [2]


def test_a_state_that_is_written_in_place_is_not_kept() -> None:
    """The session keeps the payloads of a difference, and passes them on once the publication before it is here."""
    ours = session(credit=1)
    ours.in_place = True
    first = ours.receive(state(1, whole=True, parts=2, payload=b"abcd"), 0)
    assert [each.state.payload for each in first if isinstance(each, e.StatePart)] == [b"abcd"]
    assert not any(part.payload for parts in ours.coming.values() for part in parts.values())
    told, arrived = ours.receive(state(1, whole=True, part=1, parts=2, payload=b"efgh"), 0)
    assert isinstance(told, e.StatePart) and told.state.payload == b"efgh"
    assert isinstance(arrived, e.StateArrived) and [part.payload for part in arrived.parts] == [b"", b""]
    (later,) = ours.receive(state(2, payload=b"abcd"), 0)
    assert isinstance(later, e.StateArrived) and later.parts[0].payload == b"abcd"


def test_what_comes_early_is_kept_within_bounds() -> None:
    ours = session()
    ours.receive(state(0, whole=True), 0)
    for number in range(2, 10 * CREDIT_MAX):
        assert ours.receive(state(number), 0) == []
    assert len(ours.coming) == CREDIT_MAX - 1
    assert publications(ours.receive(state(1), 0)) == [*range(1, CREDIT_MAX + 1)]


def test_whole_states_are_waited_for_only_where_one_was_asked_for() -> None:
    ours = session(credit=1)
    assert follows(ours.repeat(RETRY_NS)) == [(0, -1)]
    assert follows(ours.receive(state(3, whole=True), RETRY_NS)) == [], "the next word says what is here"
    assert ours.repeat(100 * RETRY_NS) == []
    assert follows(ours.send([m.Follow(0, 1, 5, -1, 1)], 0)) == [(5, 3)]


def test_it_is_asked_again_where_nothing_comes_and_not_while_parts_come() -> None:
    ours = session()
    ours.receive(state(0, whole=True), 0)
    for turn in range(1, 5):
        assert ours.repeat(turn * (RETRY_NS - 1)) == []
        ours.receive(state(1, part=turn, parts=9), turn * (RETRY_NS - 1))
    assert follows(ours.repeat(5 * RETRY_NS)) == [(0, 0)]


def test_the_master_copy_comes_whole_under_any_of_its_requests() -> None:
    ours = session()
    (asked,) = ours.send([m.Pull(0, 1, 0, 3)], 0)
    assert isinstance(asked, Send) and isinstance(asked.message, m.Pull) and asked.message.request == 1
    ours.receive(state(1, request=1, whole=True, part=0, parts=2), 0)
    (again,) = (each for each in ours.repeat(100 * NS) if isinstance(each.message, m.Pull))  # type: ignore[union-attr]
    assert again.message.request == 2  # type: ignore[union-attr]
    assert ours.receive(state(2, request=2, whole=True, part=1, parts=2), 0) == []
    (arrived,) = ours.receive(state(1, request=1, whole=True, part=1, parts=2), 0)
    assert isinstance(arrived, e.MasterArrived) and arrived.clock == 3
    assert [part.publication for part in arrived.parts] == [1, 1] and ours.have == -1
    for late in (1, 2):
        assert ours.receive(state(2, request=late, whole=True), 0) == []
    (anew,) = ours.send([m.Pull(0, 1, 0, 4)], 0)
    assert anew.message.request == 3  # type: ignore[union-attr]


def test_a_difference_to_a_publication_is_taken_while_that_is_the_newest_here() -> None:
    ours = session()
    ours.receive(state(0, whole=True), 0)
    ours.send([m.Pull(0, 1, 0, 3)], 0)
    assert ours.receive(state(1, request=1), 0) == [], "publication 1 is still on its way"
    arrived = [type(effect) for effect in ours.receive(state(1), 0) if not isinstance(effect, Send)]
    assert arrived == [e.StateArrived, e.MasterArrived] and ours.pull is None


def test_all_values_are_asked_for_once_a_newer_publication_has_overtaken_a_difference() -> None:
    ours = session()
    ours.receive(state(0, whole=True), 0)
    ours.send([m.Pull(0, 1, 0, 3)], 0)
    ours.receive(state(1), 0)
    (asked,) = ours.receive(state(0, request=1), 0)
    assert isinstance(asked, Send) and isinstance(asked.message, m.Pull)
    assert asked.message.whole and asked.message.request == 2
    assert ours.receive(state(1, request=1), 0) == [], "answers to the first request are void"
    (arrived,) = ours.receive(state(1, request=2, whole=True), 0)
    assert isinstance(arrived, e.MasterArrived)


def test_a_push_beyond_the_window_is_our_own_fault() -> None:
    ours = session()
    for clock in range(4):
        ours.send([m.Push(0, 1, clock, 0, 1, 0, 4, 1, b"", CODED, b"")], 0)
    with pytest.raises(LocalProtocolError, match="4 pushes in flight"):
        ours.send([m.Push(0, 1, 4, 0, 1, 0, 4, 1, b"", CODED, b"")], 0)


def test_patience_grows_with_what_a_link_takes_and_no_further() -> None:
    patience = RetryTimer(REQUEST_RETRY)
    size = 1_250_000  # 10 s at the slowest
    assert not patience.due(0, 15 * NS - 1, size) and patience.due(0, 15 * NS, size)
    patience.answered(0, 31 * NS, size)
    assert not patience.due(0, 45 * NS - 1, size) and patience.due(0, 45 * NS, size)
    patience.answered(0, 16 * NS, size)
    assert patience.factor == 3, "an answer that came sooner proves nothing"
    patience.answered(0, 10_000 * NS, size)
    assert patience.factor == RETRY_FACTOR_MAX


# With the shard that publishes.


def trained(model: torch.nn.Module, optimizer: DistributedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_a_server_sends_each_difference_as_it_is_made() -> None:
    """The states of a worker come late, so several are under way. Together they say what one whole state says."""
    with run(replace(LOSSY, workers=1)) as started:
        started.become(0)
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        trained(model, optimizer, range(3))
        link, store = cast(Link, started.sessions[0].link), store_of(started.cluster.servers[0])
        real, late = link.member.receive, list[m.Message]()

        def held(shard: int, message: m.Message, now_ns: int) -> list[e.MemberEffect]:
            if isinstance(message, m.State):
                late.append(message)
                return []
            return real(shard, message, now_ns)

        link.member.receive = held  # type: ignore[method-assign]
        trained(model, optimizer, range(3, 6))
        assert [state.publication for state in late if isinstance(state, m.State)] == [4, 5, 6]
        link.member.receive = real  # type: ignore[method-assign]
        with started.cluster.changed:
            for message in reversed(late):
                link.deliver(real(0, message, 0))
        engine: Any = optimizer._engine
        engine.waiting.poll()
        (exchange,) = engine.sync.shards.exchanges
        assert exchange.publication == store.publication
        np.testing.assert_array_equal(exchange.replica.pulled, store.p)
        optimizer.finish()
        with optimizer.shared():
            np.testing.assert_array_equal(flat(model), store.x)


def test_what_is_lost_is_sent_again_and_what_is_only_late_is_not() -> None:
    """Publications 2 and 3 are lost. The child asks again; the shard sends them again once they should have come."""
    with run(replace(LOSSY, workers=1)) as started:
        started.become(0)
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        trained(model, optimizer, range(1))
        link, server = cast(Link, started.sessions[0].link), started.cluster.servers[0]
        worker, epoch = link.member.worker, link.member.epoch
        link.deliver = lambda effects: None  # type: ignore[method-assign]  # nothing that it is sent arrives any more
        planned, service = server.shard.model_shard, server.shard.service
        assert planned is not None and service is not None
        (seat,) = server.shard.assembler.seats.values()
        began = started.cluster.now()
        for _ in range(2):
            planned.min_clock += 1
            planned.publish()
            service.serve(seat, server.shard.ledger, began)
        child = planned.publications.child(seat)
        assert [*child.sent] == [2, 3]
        asks = replace(child.follow, have=1)

        def again(now_ns: int) -> list[int]:
            effects = server.handle(seat.peer, asks, now_ns)
            states = [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, m.State)]
            assert all((state.worker, state.epoch) == (worker, epoch) for state in states)
            return [state.publication for state in states]

        assert again(began) == [] and again(began + RETRY_NS // 2) == []
        assert again(began + 2 * RETRY_NS) == [2, 3]
        assert again(began + 2 * RETRY_NS + 1) == []
        server.handle(seat.peer, replace(asks, have=3), began + 4 * RETRY_NS)
        assert not child.sent and child.patience.factor == 4, "they took so long"


@pytest.mark.parametrize("wrong", [{"credit": 0}, {"credit": CREDIT_MAX + 1}, {"have": 99}, {"clock": -1}], ids=str)
def test_a_word_that_no_child_says_is_refused(wrong: dict[str, Any]) -> None:
    with run(replace(LOSSY, workers=1)) as started:
        started.become(0)
        model = build()
        trained(model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), range(2))
        member, server = started.sessions[0].link.member, started.cluster.servers[0]
        follow = replace(m.Follow(0, member.epoch, 0, 0, 1), **wrong)
        with pytest.raises(RemoteProtocolError, match="none has come so far"):
            server.handle(server.shard.assembler.seats[0].peer, follow, 0)


def test_over_another_connection_it_says_once_that_what_was_sent_does_not_come() -> None:
    ours = session()

    def lost(effects: list[Any]) -> list[bool]:
        return [effect.message.lost for effect in effects if isinstance(effect.message, m.Follow)]

    assert lost(ours.repeat(RETRY_NS)) == [False]
    ours.repeat_soon()
    assert lost(ours.repeat(RETRY_NS + 1)) == [True] and lost(ours.repeat(RETRY_NS + 2)) == []
    assert lost(ours.repeat(2 * RETRY_NS + 1)) == [False]


def test_an_ask_for_moments_is_said_again_until_one_answer_is_here() -> None:
    """An ask for rows may have the same number."""
    ours, ask = session(), m.MomentsRequest(0, 1, 7, 0, 4, "exp_avg")
    rows = m.RowsRequest(0, 1, 7, 0, b"")
    wait_ns = REQUEST_RETRY.wait_ns(FRAME_BYTES)
    ours.send([ask, rows], 0)

    def asked(now_ns: int) -> list[m.Message]:
        said = [effect.message for effect in ours.repeat(now_ns) if isinstance(effect, Send)]
        return [message for message in said if not isinstance(message, m.Follow)]

    assert asked(wait_ns - 1) == [] and asked(wait_ns) == [ask, rows]
    assert ours.receive(m.MomentsAnswer(0, 1, 8, 3, 0, b"else"), wait_ns) == []
    assert ours.receive(m.MomentsAnswer(0, 1, 7, 3, 0, b"them"), wait_ns) == [e.MomentsArrived(0, 7, 3, b"them")]
    assert ours.receive(m.MomentsAnswer(0, 1, 7, 4, 0, b"late"), wait_ns) == []
    assert asked(4 * wait_ns) == [rows]
    ours.repeat_soon()
    assert asked(4 * wait_ns + 1) == [rows]
