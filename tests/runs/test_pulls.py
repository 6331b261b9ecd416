"""Several pulls of one worker under way: each state adds to the one before it, whatever is lost, late or asked for again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit.scripts import Link, build, flat, loss_of, run

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, Send
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.member import Session, Timing
from narrows.protocols.member.meter import LinkMeter
from narrows.protocols.modes import PULLS_MAX, Settings
from narrows.worker import DistributedOptimizer

CODED = Settings(sync="ssp", staleness=3, compress="topk:0.5").validated()


def session() -> Session:
    return Session(0, 0, 1, CODED.mode(), Timing(), LinkMeter())


def state(request: int, publication: int, **changes: Any) -> m.State:
    values: dict[str, Any] = {"worker": 0, "epoch": 1, "request": request, "part": 0, "parts": 1, "begin": 0, "end": 4,
                              "delta": True, "publication": publication, "min_clock": publication, "contains": (),
                              "settled": publication, "received_ns": 0, "sent_ns": 0, "codec": m.CODED,
                              "payload": b""}  # fmt: skip
    return m.State(**(values | changes))


def pulls(effects: list[Any]) -> list[m.Pull]:
    found = [effect.message for effect in effects if isinstance(effect, Send)]
    assert all(isinstance(message, m.Pull) for message in found)
    return found  # type: ignore[return-value]


def publications(effects: list[Any]) -> list[int]:
    return [effect.parts[-1].publication for effect in effects if isinstance(effect, e.StateArrived)]


def test_a_pull_that_follows_names_the_one_before_it() -> None:
    ours = session()
    (first,) = pulls(ours.pull(0, False, 0))
    assert (first.after, first.have) == (0, -1)
    (second,) = pulls(ours.pull(1, False, 0, follow=True))
    assert second.after == first.request
    assert publications(ours.receive(state(first.request, 7), 0)) == [7]
    assert publications(ours.receive(state(second.request, 8), 0)) == [8]
    (third,) = pulls(ours.pull(2, False, 0, follow=True))
    assert (third.after, third.have) == (0, 8), "nothing is under way: it says itself what is here"


def test_states_are_taken_in_the_order_of_their_pulls() -> None:
    ours = session()
    first, second, third = (pulls(ours.pull(clock, False, 0, follow=True))[0].request for clock in range(3))
    assert ours.receive(state(third, 3), 0) == []
    assert ours.receive(state(second, 2, parts=2), 0) == []
    assert publications(ours.receive(state(first, 1), 0)) == [1]
    assert publications(ours.receive(state(second, 2, parts=2, part=1), 0)) == [2, 3]
    assert not ours.pulls


def test_what_is_asked_for_again_has_new_numbers() -> None:
    """The answer to the first is late, and adds to what is here whichever of its pulls it is of. All other answers, old and
    new, add to a state that this worker will never have."""
    ours = session()
    old = [pulls(ours.pull(clock, False, 0, follow=True))[0] for clock in range(3)]
    ours.receive(state(old[0].request, 4), 0)
    again = pulls(ours.repeat(100 * NS))
    assert [(pull.clock, pull.have, pull.after) for pull in again] == [(1, 4, 0), (2, 4, again[0].request)]
    assert ours.receive(state(old[2].request, 6), 0) == []
    *arrived, send = ours.receive(state(old[1].request, 5), 0)
    assert publications(arrived) == [5]
    (anew,) = pulls([send])
    assert (anew.clock, anew.have, anew.after) == (2, 5, 0)
    for pull in (*old, *again):
        assert ours.receive(state(pull.request, 7), 0) == []
    assert publications(ours.receive(state(anew.request, 6), 0)) == [6]


def test_a_late_answer_is_taken_whole() -> None:
    """Its parts begin before it is asked for again, and those of the new answer must not be put among them."""
    ours = session()
    (old,) = pulls(ours.pull(0, False, 0))
    for part in range(2):
        ours.receive(state(old.request, 1, delta=False, part=part, parts=3), 0)
    (again,) = pulls(ours.repeat(100 * NS))
    assert publications(ours.receive(state(again.request, 2, delta=False, part=0, parts=3), 0)) == []
    effects = ours.receive(state(old.request, 1, delta=False, part=2, parts=3), 0)
    assert publications(effects) == [1] and not ours.pulls
    assert [effect.state.publication for effect in effects if isinstance(effect, e.StatePart)] == [1, 1, 1]


@pytest.mark.parametrize("takes_s", [10, 40, 300])
def test_states_come_however_long_the_link_takes(takes_s: int) -> None:
    """One state at a time is on the link. Where that takes longer than the wait, each is asked for again while it is under
    way; it is taken nevertheless, and later ones are waited for."""
    ours, waits, asked = session(), list[int](), 0
    road: list[tuple[int, m.State]] = []  # when it is here
    for turn in range(12):
        began = now = turn * 10_000
        made = ours.pull(turn, False, now * NS)
        while not publications(here := [each for each in made if isinstance(each, e.StateArrived)]):
            for pull in pulls([each for each in made if isinstance(each, Send)]):
                asked += 1
                free = max([now, *(at for at, _ in road)])
                road.append((free + takes_s, state(pull.request, turn + 1)))
            now += 1
            assert now < began + 5_000, "it never comes"
            made = [each for at, answer in road if at == now for each in ours.receive(answer, now * NS)]
            made += ours.repeat(now * NS)
            road = [(at, answer) for at, answer in road if at > now]
        assert len(here) == 1
        waits.append(now - began)
        road = [(at + 10_000 - (now - began), answer) for at, answer in road]  # what is on the link is so still
    assert waits[0] == takes_s and waits[-1] == takes_s
    assert asked <= 12 + 300 // 21, "asked for again only until its link is known"


def test_a_pull_in_the_place_of_others_gives_them_up() -> None:
    ours = session()
    given_up = [pulls(ours.pull(clock, False, 0, follow=True))[0].request for clock in range(3)]
    (master,) = pulls(ours.pull(3, True, 0))
    assert master.after == 0 and all(ours.receive(state(request, 1), 0) == [] for request in given_up)
    assert len(publications(ours.receive(state(master.request, 9, delta=False), 0))) == 1
    assert ours.have == -1, "the master copy is no publication"


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        (Settings(sync="ssp", staleness=3), 1),  # of whole states only the newest is worth its bytes
        (Settings(sync="ssp", staleness=3, compress="int8"), 4),
        (Settings(sync="ssp", staleness=1000, compress="int8"), PULLS_MAX),
        (Settings(sync="ssp", staleness=3, compress="int8", compress_down="dense"), 1),
        (Settings(sync="ssp", staleness=3, compress="lz4"), 1),  # nothing is left out, so they are published whole
        (Settings(sync="ssp", staleness=3, compress="int8+lz4"), 4),
        (Settings(sync="bsp", push="update", compress="int8", compress_down="int8"), 1),
    ],
)
def test_how_many_are_under_way(settings: Settings, count: int) -> None:
    assert settings.validated().pulls == count


def trained(model: torch.nn.Module, optimizer: DistributedOptimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def test_a_server_answers_each_with_what_the_one_before_it_did_not_bring() -> None:
    """The states of a worker come late, so four pulls are under way. What they come to is what one whole state says."""
    with run(replace(CODED, workers=1)) as started:
        started.become(0)
        model = build()
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        trained(model, optimizer, range(3))
        link, shard = cast(Link, started.sessions[0].link), started.cluster.servers[0].shard
        real, late = link.member.receive, list[m.Message]()

        def held(shard: int, message: m.Message, now_ns: int) -> list[e.MemberEffect]:
            if isinstance(message, m.State):
                late.append(message)
                return []
            return real(shard, message, now_ns)

        link.member.receive = held  # type: ignore[method-assign]
        trained(model, optimizer, range(3, 6))
        held_back = [message for message in late if isinstance(message, m.State)]
        assert [state.publication for state in held_back] == [4, 5, 6]
        assert len({state.request for state in held_back}) == 3
        link.member.receive = real  # type: ignore[method-assign]
        with started.cluster.changed:
            for message in late:
                link.deliver(real(0, message, 0))
        engine = optimizer._engine
        assert engine is not None
        engine.poll()
        assert shard.store is not None and engine.views[0].publication == shard.store.publication
        np.testing.assert_array_equal(engine.pulled, shard.store.p)
        optimizer.finish()
        with optimizer.shared():
            np.testing.assert_array_equal(flat(model), shard.store.x)


def test_a_worker_that_asks_without_end_is_told() -> None:
    with run(replace(CODED, workers=1)) as started:
        started.become(0)
        model = build()
        trained(model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model), range(2))
        member, server = started.sessions[0].link.member, started.cluster.servers[0]
        assert member.worker == 0
        ahead = [
            m.Pull(0, member.epoch, 1000 + n, 50, -1, False, "", 999 + n if n else 0) for n in range(2 * PULLS_MAX + 1)
        ]
        for pull in ahead[:-1]:
            assert server.handle(b"peer", pull, 0) == []
        with pytest.raises(RemoteProtocolError, match="pulls under way"):
            server.handle(b"peer", ahead[-1], 0)
