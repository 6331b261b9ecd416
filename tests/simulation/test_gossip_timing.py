"""Gossip on narrow links in virtual time: bytes and rounds against closed forms, and faults of the machines planted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.config.topology import TOPOLOGIES
from narrows.protocols.effects import NS
from narrows.protocols.gossip.driver import GossipDriver
from narrows.protocols.gossip.mixing import Mixing
from simulation import gossip_runs as gossiping
from simulation.gossip_runs import COUNT, Node
from simulation.gossip_timing import OF_ONE_SIZE, Rounds, bytes_of, drawn, explained, round_s, size_of
from simulation.simulator import MS
from simulation.trees import Road

WORKERS, ROUNDS = 30, 10


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_bytes_and_rounds_are_those_of_the_closed_form(name: str, bound: int) -> None:
    """The bytes of each worker to the byte; the seconds to what acks may hold up."""
    sums = {}
    for spec in OF_ONE_SIZE:
        run = Rounds(drawn(3 + bound, name, spec, bound, ROUNDS, WORKERS + bound))
        run.run()
        assert run.passed == bytes_of(run.case)
        assert explained(round_s(run.case), run.round_s), (round_s(run.case), run.round_s)
        assert not run.books.open and not run.books.asked, "both sides of each exchange have mixed"
        sums[spec] = sum(run.passed)
    assert sums["int8"] < sums["dense"] / 3


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize(("name", "partners"), [("matching", 1), ("exponential", 1), ("ring", 2)])
@pytest.mark.parametrize("step_ns", [20 * MS, 200 * MS])
def test_a_round_on_like_links(name: str, partners: int, bound: int, step_ns: int) -> None:
    """step + u, or with staleness 1 max(step, v); u: the offers on the way, v: and the ack of the last that came."""
    road = Road(10 * MS, 20_000)
    case = replace(drawn(0, name, "dense", bound, 40, 8), roads=(road,) * 8, step_ns=(step_ns,) * 8)
    run = Rounds(case)
    run.run()
    offer = m.Offer(0, 1, 1, 0, 0, 0, 1, 0, COUNT, 0.5, True, RAW, bytes(4 * COUNT))
    u = partners * size_of(offer) / road.bytes_per_second + road.delay_ns / NS
    v = u + size_of(m.OfferAck(0, 1, 0)) / road.bytes_per_second
    step, rounds = step_ns / NS, case.rounds
    whole = step + (rounds - 1) * max(step, v) + u if bound else rounds * (step + u)  # no step hides the last offers
    assert run.round_s * rounds == pytest.approx(whole, rel=2e-4)
    assert explained(round_s(case), run.round_s)


# Planted bugs.


def twice(mix: Callable[..., None]) -> Callable[..., None]:
    def mixes(mixing: Mixing, worker: int, peer: int, weight: float, offers: tuple[m.Offer, ...]) -> None:
        sent = mixing.sent[peer]
        mix(mixing, worker, peer, weight, offers)
        if worker == 5 and offers[0].round == 4:
            mixing.sent[peer] = sent
            mix(mixing, worker, peer, weight, offers)

    return mixes


def one_sided(partners: Callable[..., Any]) -> Callable[..., Any]:
    def found(name: str, number: int, members: Any, worker: int) -> Any:
        mine = partners(name, number, members, worker)
        return [(peer, weight / 2) for peer, weight in mine] if worker == 5 and number == 4 else mine

    return found


def heavier(mix: Callable[..., None]) -> Callable[..., None]:
    def mixes(mixing: Mixing, worker: int, peer: int, weight: float, offers: tuple[m.Offer, ...]) -> None:
        mix(mixing, worker, peer, weight + 0.01 * (worker == 5), offers)

    return mixes


def impatient(waits: Callable[..., bool]) -> Callable[..., bool]:
    def never(driver: GossipDriver, number: int) -> bool:
        return waits(driver, number) and driver.exchanges.worker != 5

    return never


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "an exchange is mixed twice": (Mixing, "mix", twice, "moves the sum of its two|mean has moved"),
    "one side takes more": (Mixing, "mix", heavier, "moves the sum of its two|mean has moved"),
    "the two of a pair have other weights": (gossiping, "partners", one_sided, "in round 4 at"),
    "a node goes on without its peers": (GossipDriver, "_waits", impatient, "computes round .* has not mixed"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong, complaint = PLANTED[bug]
    monkeypatch.setattr(where, name, wrong(getattr(where, name)))
    with pytest.raises(AssertionError, match=complaint):
        Rounds(drawn(3, "ring", "dense", 0, ROUNDS, 8)).run()


def test_a_model_that_moves_beside_its_mixes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the full count: no event tells of it."""
    monkeypatch.setattr("simulation.gossip_runs.WHOLE_EVERY", 50)
    run = Rounds(drawn(3, "ring", "dense", 0, ROUNDS, 8))

    def moves() -> None:
        run.nodes[5].mixing.model = run.nodes[5].mixing.model + np.float32(1e-3)

    run.at(NS, moves)
    with pytest.raises(AssertionError, match="beside mixes and updates"):
        run.run()


def test_one_byte_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offer is acked twice."""
    handle = Node.handle
    said: list[m.Message] = []

    def handles(node: Node, source: str, message: m.Message, now_ns: int) -> None:
        handle(node, source, message, now_ns)
        if node.worker == 5 and isinstance(message, m.Offer) and not said:
            said.append(message)
            handle(node, source, message, now_ns)

    monkeypatch.setattr(Node, "handle", handles)
    run = Rounds(drawn(3, "ring", "dense", 0, ROUNDS, 8))
    run.run()
    wrong = [
        worker
        for worker, (ours, theirs) in enumerate(zip(run.passed, bytes_of(run.case), strict=True))
        if ours != theirs
    ]
    assert wrong == [5]
