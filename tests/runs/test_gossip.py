"""Gossip: who mixes with whom, what a mix does, and what it survives."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
import zmq
from kit import in_process
from kit.gossip_reference import STEPS, TRAINS, adamw, ends, matrix, reference, sgd
from kit.in_process import store_of, together
from kit.processes import Worker, descendants, serving, started, until
from kit.scripts import Array, Run, alone, build, distance, flat, loss_of, run
from simulation.gossip_runs import COUNT, LEASE_NS, Campaign, Net, bad
from simulation.mirror import Violation

from narrows.compression import parse
from narrows.compression.codecs import CODED, RAW
from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import OFFER_RETRY
from narrows.protocols.config.topology import RANDOM, TOPOLOGIES, edges, partners
from narrows.protocols.effects import NS, ModelRequested, OfferArrived, PeerLost, RosterChanged, Send, SendToPeer
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.protocols.gossip.driver import GossipDriver
from narrows.protocols.gossip.exchanges import LAST, GossipExchanges
from narrows.protocols.gossip.gain import WINDOW, GossipGain
from narrows.protocols.gossip.peers import GossipPeers
from narrows.protocols.member.member import Member
from narrows.protocols.wire import VERSION, encode
from narrows.worker import DistributedOptimizer, clock, rank, world_size

COUNTS = [1, 2, 3, 4, 5, 7, 8, 12]
both = pytest.mark.parametrize("topology", TOPOLOGIES)
everyone = pytest.mark.parametrize("topology", [*TOPOLOGIES, RANDOM])


# Who mixes with whom.


@both
@pytest.mark.parametrize("count", COUNTS)
def test_every_round_is_symmetric_and_doubly_stochastic_and_all_are_joined(topology: str, count: int) -> None:
    product = np.eye(count)
    for number in range(60):
        w = matrix(topology, number, count)
        assert (w >= -1e-12).all() and np.array_equal(w, w.T)
        np.testing.assert_allclose(w.sum(0), 1.0)
        product = w @ product
        for worker in range(count):
            mine = partners(topology, number, range(count), worker)
            assert dict(mine) == {peer: w[worker, peer] for peer in range(count) if peer != worker and w[worker, peer]}
    assert np.abs(product - 1 / count).max() < 0.02, "information of each reaches all"


def test_peers_depend_on_the_members_and_not_on_their_numbers_being_dense() -> None:
    members = (3, 7, 8, 20, 41)
    for topology in TOPOLOGIES:
        for number in range(10):
            found = edges(topology, number, members)
            assert {a for edge in found for a in edge[:2]} <= set(members)
            assert found == edges(topology, number, members), "both sides find the same"
    rounds = [edges("matching", number, members) for number in range(20)]
    assert len({tuple(found) for found in rounds}) > 5
    assert edges("matching", 0, members, seed=1) != edges("matching", 0, members, seed=2)


def test_a_power_of_two_is_averaged_exactly_by_its_logarithm() -> None:
    product = np.eye(8)
    for number in range(3):
        product = matrix("exponential", number, 8) @ product
    np.testing.assert_array_equal(product, np.full((8, 8), 1 / 8))


# The effect of a mix.


def begun(net: Net, count: int, rounds: int, seed: int = 0, **kinds: Any) -> Array:
    """`count` nodes with a model of their own each; the models."""
    models: Array = np.random.default_rng(seed).standard_normal((count, COUNT)).astype(np.float32)
    for _ in range(count):
        net.add(rounds, **kinds)
    net.introduce()
    for worker, node in net.nodes.items():
        node.begin(np.zeros(COUNT, np.float32), models[worker])
    return models


def consensus(models: npt.NDArray[Any]) -> float:
    """L2 distance of all models to their mean."""
    wide = models.astype(np.float64)
    return float(np.linalg.norm(wide - wide.mean(0)))


@both
@pytest.mark.parametrize("count", [4, 7])
def test_the_mean_is_kept_over_a_thousand_rounds(topology: str, count: int) -> None:
    """Up to float32 rounding, in full and low precision, and the models come together. A thousand for four who are matched."""
    many = 1000 if (topology, count) == ("matching", 4) else 100
    for spec, rounds in (("dense", many), ("int8", 60), ("topk:0.1+int8", 60)):
        net = Net(topology, spec)
        models = begun(net, count, rounds)
        net.run()
        mean = models.astype(np.float64).mean(0)
        np.testing.assert_allclose(net.models().astype(np.float64).mean(0), mean, atol=2e-6)
        for model in net.models():
            assert np.array_equal(model, net.models()[0]), "the last round makes one model of all"


@both
@pytest.mark.parametrize("count", [4, 7])
@pytest.mark.parametrize("bound", [0, 1])
def test_the_models_are_those_of_the_mixing_matrices(topology: str, count: int, bound: int) -> None:
    """x(t+1) = W(t) x(t) + u(t+1), and with bound 1 the mix of a round is in one step later."""
    rounds = 12
    updates = np.random.default_rng(1).standard_normal((rounds, count, COUNT)).astype(np.float32)
    net = Net(topology, update=lambda worker, number: updates[number, worker])
    x = begun(net, count, rounds, bound=bound).astype(np.float64)
    late = np.zeros_like(x)
    for number in range(rounds):
        x = x + updates[number] + late
        mixed = matrix(topology, number, count) @ x - x
        x, late = (x + mixed, late) if bound == 0 else (x, mixed)
    net.run()
    np.testing.assert_allclose([node.reached for node in net.nodes.values()], x + late, atol=1e-5)


@both
def test_consensus_falls_as_the_spectral_gap_says(topology: str) -> None:
    """By the second largest singular value of the product of the rounds' matrices, for any models."""
    count, rounds = 8, 6
    product = np.eye(count) - 1 / count
    for number in range(rounds):
        product = matrix(topology, number, count) @ product
    net = Net(topology)
    before = consensus(begun(net, count, rounds, bound=0))
    net.run()
    after = consensus(np.stack([node.reached for node in net.nodes.values()]))
    assert after <= np.linalg.norm(product, 2) * before + 1e-4
    assert after < 0.3 * before


def test_sparse_differences_need_no_consensus_step_size() -> None:
    """One value in fifty, on a ring: CHOCO-SGD (1902.00340) needs a step size far below 1 for this not to diverge."""
    net = Net("ring", "topk:0.02")
    begun(net, 6, 200)
    before = consensus(net.models())
    net.run()
    assert consensus(np.stack([node.reached for node in net.nodes.values()])) < 0.02 * before


# Faults that it survives.


@pytest.mark.parametrize(("topology", "seed"), [*zip(cycle([*TOPOLOGIES, RANDOM]), range(12), strict=False)])
def test_the_mean_is_kept_on_a_bad_network(topology: str, seed: int) -> None:
    """Messages lost, late and twice, workers of different speeds, rosters that come when they come."""
    spec = ("dense", "int8", "topk:0.05+int8")[seed % 3]
    net = Net(topology, spec, bad(1 / 20, 1 / 7, NS // 50), seed)
    count = 3 + seed % 6
    models = begun(net, count, 25)
    for worker, node in net.nodes.items():
        node.step_ns = NS // 200 * (1 + worker)
    for again in range(4):
        net.at(NS // 4 * (1 + again), net.introduce)
    net.run()
    assert not any(node.lost for node in net.nodes.values())
    mean = models.astype(np.float64).mean(0)
    np.testing.assert_allclose(net.models().astype(np.float64).mean(0), mean, atol=3e-6)
    assert all(np.array_equal(model, net.models()[0]) for model in net.models())


@pytest.mark.parametrize(
    ("topology", "told"), [*zip([*TOPOLOGIES, RANDOM] * 2, [True, False, True, False, True, False], strict=False)]
)
def test_the_death_of_one_delays_the_rest_by_at_most_a_lease(topology: str, told: bool) -> None:
    net = Net(topology)
    begun(net, 5, 200)

    net.at(NS, net.nodes[2].die)
    if told:
        net.at(NS + LEASE_NS // 2, net.introduce)
    net.run(limit_s=(LEASE_NS / NS) * (0.6 if told else 1.5) + 60)
    assert all(np.array_equal(model, net.models()[0]) for model in net.models())
    assert all(node.number == 200 for node in net.nodes.values() if node.alive)


@everyone
def test_a_joiner_begins_with_a_peers_model_and_round(topology: str) -> None:
    net = Net(topology)
    begun(net, 3, 150)

    def join() -> None:
        node = net.add(150, joins=True)
        net.introduce()
        node.ask()

    net.at(NS, join)
    net.run()
    assert net.nodes[3].number == 150
    assert all(np.array_equal(model, net.models()[0]) for model in net.models())
    assert consensus(net.models()) == 0.0


def test_whatever_comes_it_ends_with_one_model_and_the_right_mean() -> None:
    """Workers that join, die, are taken for dead, are done early; a server that dies; rosters, loss and delay at random."""
    runs = [Campaign(seed) for seed in range(24, 48)]  # tests/simulation/test_run_kinds.py has those before
    for run_ in runs:
        run_.run()
    for fault in ("lost", "duplicated", "reordered", "worker crashed", "worker expired", "server crashed"):
        assert sum(run_.sim.struck[fault] > 0 for run_ in runs) > 0.1 * len(runs), fault


def test_a_gain_that_is_applied_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    once = GossipGain.scaled

    def twice(gain: GossipGain, moved: Array, members: int, sample: Any) -> Any:
        return once(gain, moved, members, sample) * np.float32(gain.factor)

    def some_runs() -> None:
        for seed in range(20):
            Campaign(seed).run()

    monkeypatch.setattr(GossipGain, "scaled", twice)
    with pytest.raises(Violation, match=r"mean has moved|moves beside mixes"):
        some_runs()


DEADLOCKS: dict[str, tuple[int, type, str, Callable[..., Any]]] = {
    "three on a ring, each of which keeps back a complete exchange of another round for one that the next keeps back": (
        337, GossipExchanges, "_in_step", lambda exchanges, peer: True),
    "two that have no model, and ask each other: who has one is back under a later number": (
        349, GossipDriver, "peer_without_model", lambda driver, peer: None),
    "the same, and who has one is done": (866, GossipDriver, "peer_without_model", lambda driver, peer: None),
}  # fmt: skip


@pytest.mark.parametrize("waits", DEADLOCKS)
def test_nobody_waits_in_a_circle(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that end, and without the one rule that lets them do not."""
    seed, where, rule, off = DEADLOCKS[waits]
    Campaign(seed).run()
    monkeypatch.setattr(where, rule, off)
    with pytest.raises(Violation, match="has not ended"):
        Campaign(seed).run(limit_s=300)


def test_who_is_done_does_not_wait_for_one_whose_last_exchange_was_kept() -> None:
    """It died, was in the roster no more, and its exchange was complete on our side."""
    net = Net("ring")
    begun(net, 3, 1)
    gossip = net.nodes[0].exchanges
    rows = tuple((worker, 1, worker, 0) for worker in range(3))
    gossip.admit(m.Roster(0, 1, True, rows, ("0", "1", "2")))
    gossip.begin(0)
    assert {offers[0].peer for offers in gossip.exchange(0)} == {1, 2}
    gossip.arrived(OfferArrived(1, (offer(),)))
    gossip.exchange(0)
    assert gossip.pairs[1].ready, "the round is not whole: nothing has come from 2"
    gossip.admit(m.Roster(0, 2, True, rows[::2], ("0", "2")))
    assert 1 in gossip.pairs
    gossip.arrived(OfferArrived(2, (offer(worker=2),)))
    gossip.exchange(0)
    assert set(gossip.pairs) == {2} and not gossip.waiting(0)


def offer(**wrong: Any) -> m.Offer:
    values: dict[str, Any] = {"worker": 1, "peer": 0, "epoch": 1, "round": 0, "number": 0, "part": 0, "parts": 1}
    values |= {
        "begin": 0,
        "end": COUNT,
        "weight": 0.5,
        "whole": True,
        "codec": RAW,
        "payload": bytes(4 * COUNT),
    }
    return m.Offer(**values | wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"part": 1}, {"weight": 0.9}, {"weight": float("nan")}, {"round": m.CLOCK_MAX + 1}, {"parts": m.PARTS_MAX + 1}],
)
@pytest.mark.parametrize("early", [False, True])
def test_what_no_peer_says_ends_that_pair_alone(wrong: dict[str, Any], early: bool) -> None:
    """Also where it comes before the roster that names its sender: that must not end the session with the server."""
    peers = GossipPeers(0, LEASE_NS)
    roster = m.Roster(0, 1, True, tuple((worker, 1, worker, 0) for worker in range(3)), ("0", "1", "2"))
    if early:
        assert peers.receive(offer(**wrong), 0) == []
        news, *effects = peers.roster(roster, 0)
        assert news == RosterChanged(roster)
    else:
        peers.roster(roster, 0)
        effects = peers.receive(offer(**wrong), 0)
    assert [effect.peer for effect in effects if isinstance(effect, PeerLost)] == [1]
    assert set(peers.peers) == {2} and peers.receive(offer(), 0) == []
    assert any(isinstance(effect, OfferArrived) for effect in peers.receive(offer(worker=2), 0))


def test_a_peer_that_runs_ahead_of_its_exchanges_fills_no_queue() -> None:
    net = Net("matching")
    begun(net, 2, 3)
    node = net.nodes[0]
    node.take(node.peers.roster(m.Roster(0, 1, True, ((0, 1, 0, 0), (1, 1, 1, 0)), ("0", "1")), 0))
    for number in range(2):
        node.take(node.peers.receive(offer(number=number, round=50 + number), 0))
        assert node.exchanges.pairs
    node.take(node.peers.receive(offer(number=2, round=52), 0))
    assert not node.exchanges.pairs and not node.peers.peers


def test_the_last_offer_is_a_model() -> None:
    """A difference in its place must end that pair, not be averaged, nor end the session."""
    net = Net("matching", "int8")
    begun(net, 2, 3)
    node = net.nodes[0]
    node.take(node.peers.roster(m.Roster(0, 1, True, ((0, 1, 0, 0), (1, 1, 1, 0)), ("0", "1")), 0))
    before = node.mixing.model.copy()
    node.exchanges.end()
    coded = bytes(parse("int8").encode(np.ones(COUNT, np.float32)))
    node.exchanges.arrived(OfferArrived(1, (offer(whole=False, codec=CODED, payload=coded, round=LAST),)))
    node.exchanges.exchange(LAST)
    node.exchanges.exchange(LAST)
    assert [peer for peer, _ in node.exchanges.refused] == [1] and node.exchanges.over
    assert np.array_equal(node.mixing.model, before)


def test_offers_made_before_a_rejoin_are_not_sent_after_it() -> None:
    """They would be in the way of the end: nobody acks what a worker says that is no more."""
    peers = GossipPeers(5, LEASE_NS)
    peers.roster(m.Roster(5, 1, True, ((1, 1, 0, 0), (5, 1, 1, 1)), ("1", "5")), 0)
    assert peers.offer([offer(worker=0, peer=1)], 0) == [] and not peers.peers[1].sent


def test_a_joiner_hears_from_a_peer_whose_owner_is_busy() -> None:
    peers = GossipPeers(0, LEASE_NS)
    peers.roster(m.Roster(0, 1, True, ((0, 1, 0, 0), (1, 1, 1, 0)), ("0", "1")), 0)
    told, asked = peers.receive(m.ModelRequest(1, 0), 0)
    assert isinstance(told, SendToPeer) and isinstance(told.message, m.OfferAck) and asked == ModelRequested(1)


def test_a_model_is_asked_for_again_of_a_peer_that_says_other_things() -> None:
    """The peer is done, and says so every second."""
    peers, asked = GossipPeers(0, LEASE_NS), 0
    peers.roster(m.Roster(0, 1, True, ((0, 2, 0, 1), (1, 1, 1, 0)), ("0", "1")), 0)
    peers.adopt(1, 0)
    for second in range(100):
        peers.receive(m.GossipEnded(1, 0), second * NS)
        asked += sum(
            isinstance(effect, SendToPeer) and isinstance(effect.message, m.ModelRequest)
            for effect in peers.tick(second * NS)
        )
    assert asked == 2


def test_bad_offers_end_that_pair_and_change_nothing() -> None:
    raw = bytes(4 * COUNT)
    good: dict[str, Any] = {"worker": 1, "peer": 0, "epoch": 1, "round": 0, "number": 0, "part": 0, "parts": 1}
    good |= {"begin": 0, "end": COUNT, "weight": 0.5, "whole": True, "codec": RAW, "payload": raw}
    for wrong in (
        {"payload": raw[4:]},
        {"end": COUNT - 1},
        {"payload": np.full(COUNT, np.nan, np.float32).tobytes()},
        {"whole": False},
        {"codec": 9},
        {"whole": False, "codec": CODED},
    ):
        fresh = Net("matching")
        begun(fresh, 2, 3)
        node = fresh.nodes[0]
        node.take(node.peers.roster(m.Roster(0, 1, True, ((0, 1, 0, 0), (1, 1, 1, 0)), ("0", "1")), 0))
        before = node.mixing.model.copy()
        node.take(node.peers.receive(m.Offer(**good | wrong), 0))
        assert not node.exchanges.pairs and not node.peers.peers
        assert np.array_equal(node.mixing.model, before)


# The engine, whole.


def script(worker: int, after: Any = None, steps: int = STEPS, make: Any = sgd) -> Array:
    net = build()
    optimizer = DistributedOptimizer(make(net), net)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step, rank(), world_size()).backward()
        optimizer.step()
        if after is not None:
            after(worker, step)
    optimizer.finish()
    return flat(net)


@pytest.mark.parametrize(
    ("topology", "bound", "count"),
    [
        *((topology, index % 2, 2 + index % 2) for index, topology in enumerate(TOPOLOGIES)),
        *((topology, index % 2, 3 - index % 2) for index, topology in enumerate(TOPOLOGIES, 1)),
    ],
)
def test_the_engine_is_decentralized_sgd(topology: str, bound: int, count: int) -> None:
    settings = Settings(sync="gossip", topology=topology, workers=count, staleness=bound)
    ends = []
    for _ in range(2):
        with run(settings) as started_:
            models = started_.together(script)
            server = store_of(started_.cluster.servers[0])
        assert all(np.array_equal(model, models[0]) for model in models)
        assert server is not None and np.array_equal(server.x, models[0]), "the server has the last model"
        ends.append(models[0])
    assert np.array_equal(ends[0], ends[1]), "two runs are the same, bit for bit"
    assert distance(models[0], reference(topology, count, bound)) < 1e-5


@pytest.mark.parametrize(
    ("topology", "count", "bound"), [("exponential", 4, 0), ("matching", 3, 1), ("matching", 3, 0), ("ring", 4, 1)]
)
def test_updates_that_are_too_short_are_scaled_by_what_partners_tell(topology: str, count: int, bound: int) -> None:
    settings = Settings(sync="gossip", topology=topology, workers=count, staleness=bound)
    steps = 4 * WINDOW + 2
    with run(settings) as started_:
        models = started_.together(partial(script, steps=steps, make=adamw))
        gains = [cast(Any, joined.engine).sync.merging["gain"] for joined in started_.sessions]
    assert all(np.array_equal(model, models[0]) for model in models)
    assert all(1 < gain <= count**0.5 for gain in gains)
    expected = reference(topology, count, bound, adamw, 0.0, steps)
    plain = reference(topology, count, bound, adamw, 1.0, steps)
    assert distance(models[0], expected) < 1e-4 < distance(plain, expected) / 10


@pytest.mark.parametrize("bound", [0, 1])
def test_rounds_make_an_outer_step_of_what_they_moved_by(bound: int) -> None:
    flags: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.6}
    with run(Settings(sync="gossip", workers=4, staleness=bound, **flags)) as started_:
        models = started_.together(script)
    assert all(np.array_equal(model, models[0]) for model in models)
    expected = reference("exponential", 4, bound, outer=(0.7, 0.6))
    assert distance(models[0], expected) < 1e-5 < distance(reference("exponential", 4, bound), expected) / 100


def test_steps_that_make_no_whole_round_are_added_as_they_are() -> None:
    """One round of 16 steps: its outer step would add 0.7 * 1.6 times as much."""
    ends = []
    plain = Settings(sync="gossip", workers=2, local_steps=STEPS + 4, outer_lr=1.0, outer_momentum=0.0)
    for settings in (plain, replace(plain, outer_lr=0.7, outer_momentum=0.6)):
        with run(settings) as started_:
            ends.append(started_.together(script)[0])
    assert np.array_equal(*ends)


def test_a_gain_that_was_given_is_that_of_gossip_and_rounds_of_steps_have_none() -> None:
    for flags, merging in (({"update_gain": 1.25}, {"gain": 1.25}), ({"local_steps": 2}, {})):
        with run(Settings(sync="gossip", workers=2, **flags)) as started_:
            started_.together(partial(script, steps=2 * WINDOW, make=adamw))
            for joined in started_.sessions:
                found = cast(Any, joined.engine).sync.merging
                assert {name: found[name] for name in merging} == merging and bool(found) == bool(merging)


@pytest.mark.parametrize("degree", [0.0, 0.5, 1.0])
def test_the_gain_of_a_pair_is_that_of_all_their_updates(degree: float) -> None:
    """All updates share a known part."""
    random, workers, size = np.random.default_rng(0), 6, 4000
    at = np.arange(size)
    for shared in (0.0, 0.3, 1.0):
        signal = shared**0.5 * random.standard_normal(size)
        updates = [
            (signal + (1 - shared) ** 0.5 * random.standard_normal(size)).astype(np.float32) for _ in range(workers)
        ]
        gains = [GossipGain(at, degree) for _ in updates]
        for _ in range(WINDOW):
            scaled = [
                gain.scaled(update, workers, update[gain.at].astype(np.float64))
                for gain, update in zip(gains, updates, strict=True)
            ]
            assert all(np.array_equal(a, b) for a, b in zip(scaled, updates, strict=True)), "not measured yet"
        told = [gain.tell(0) for gain in gains]
        assert all(gain.tell(0) == b"" for gain in gains), "once"
        for worker, gain in enumerate(gains):
            gain.heard(told[worker - 1])
        length = float(np.mean([np.linalg.norm(update) for update in updates]))
        agreement = float(np.linalg.norm(np.mean(updates, 0))) / length
        for gain in gains:
            assert gain.agreement == pytest.approx(agreement, abs=0.03)
            assert gain.factor == gain.agreement ** -(1 - degree)
        if degree == 1:
            assert np.array_equal(
                gains[0].scaled(updates[0], workers, updates[0][gains[0].at].astype(np.float64)), updates[0]
            )


def test_updates_that_oppose_each_other_count_as_having_nothing_in_common() -> None:
    one, other = GossipGain(np.arange(8), 0.0), GossipGain(np.arange(8), 0.0)
    for _ in range(WINDOW):
        one.scaled(np.ones(8, np.float32), 4, np.ones(8, np.float64))
        other.scaled(-np.ones(8, np.float32), 4, -np.ones(8, np.float64))
    one.heard(other.tell(0))
    assert one.common == -1 and one.agreement == 0.5 and one.factor == 2
    still = GossipGain(np.arange(8), 0.0)
    for _ in range(WINDOW):
        still.scaled(np.zeros(8, np.float32), 4, np.zeros(8, np.float64))
    still.heard(still.tell(0))
    assert still.common is None and still.factor == 1, "nobody moved"


@pytest.mark.parametrize("sample", [bytes(4), np.full(COUNT, np.nan, np.float32).tobytes(), bytes(4 * COUNT + 1)])
def test_a_sample_that_is_none_ends_that_pair_alone(sample: bytes) -> None:
    net = Net("matching", degree=0.0)
    begun(net, 2, 3)
    node = net.nodes[0]
    node.take(node.peers.roster(m.Roster(0, 1, True, ((0, 1, 0, 0), (1, 1, 1, 0)), ("0", "1")), 0))
    node.take(node.peers.receive(offer(sample=sample), 0))
    assert not node.exchanges.pairs and not node.peers.peers


@pytest.mark.parametrize(
    ("topology", "compress", "local_steps"),
    [
        *zip([*TOPOLOGIES, RANDOM], cycle(["dense", "topk:0.1+int8"]), cycle([1, 3, 3, 1]), strict=False),
        *zip([*TOPOLOGIES, RANDOM], cycle(["topk:0.1+int8", "dense"]), cycle([1, 3, 3, 1]), strict=False),
    ],
)
def test_gossip_trains(topology: str, compress: str, local_steps: int) -> None:
    def mean_loss(weights: Array) -> float:
        net = build()
        torch.nn.utils.vector_to_parameters(torch.from_numpy(weights), net.parameters())
        with torch.no_grad():
            return float(np.mean([loss_of(net, step) for step in range(STEPS)]))

    settings = Settings(
        sync="gossip", topology=topology, workers=3, compress=compress, local_steps=local_steps, shards=2
    )
    with run(settings) as started_:
        models = started_.together(script)
        for joined in started_.sessions:
            joined.close(failed=False)
        coordinator = started_.cluster.servers[0].coordinator
        assert coordinator is not None and coordinator.over and not coordinator.seats
    with alone():
        net = build()
        optimizer = sgd(net)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
    first = mean_loss(flat(build()))
    assert mean_loss(models[0]) < first - 0.5 * (first - mean_loss(flat(net)))


def test_a_late_worker_joins_the_run_where_it_is() -> None:
    with run(Settings(sync="gossip", workers=2)) as started_:
        seen: list[tuple[int, Array]] = []
        threads: list[threading.Thread] = []

        def late() -> None:
            net = build(seed=99)  # not the run's weights
            optimizer = DistributedOptimizer(sgd(net), net)
            seen.append((clock(), flat(net)))
            for step in range(clock(), STEPS):
                optimizer.zero_grad()
                loss_of(net, step).backward()
                optimizer.step()
            optimizer.finish()
            seen.append((clock(), flat(net)))

        def after(worker: int, step: int) -> None:
            if worker == 0 and step == 5:
                started_.join()
                threads.append(started_.aside(late))
                started_.become(0)
                coordinator = started_.cluster.servers[0].coordinator
                assert coordinator is not None
                until(lambda: len(coordinator.declared) == 3, "the late one to be a member before all are done")

        models = together(lambda worker: _as(started_, worker, after), 2)
        threads[0].join(60)
    (began, first), (ended, last) = seen
    assert 0 < began < STEPS and ended == STEPS
    assert distance(first, flat(build(seed=99))) > 0.5
    assert np.array_equal(last, models[0]) and np.array_equal(models[0], models[1])


def _as(started_: Run, worker: int, after: Any) -> Array:
    torch.set_num_threads(1)
    started_.become(worker)
    return script(worker, after)


def beat(member: Member, now_ns: int, ended: bool = False) -> Send:
    return Send(0, m.Heartbeat(member.worker, member.epoch, now_ns, 1 << 40, ended=ended))


@pytest.mark.parametrize("compress", ["dense", "int8"])
def test_who_has_to_join_again_while_it_waits_for_the_others_ends_with_them(compress: str) -> None:
    """Worker 1 is done early; its lease expires while it answers the others."""
    with run(Settings(sync="gossip", workers=2, compress=compress)) as started_:

        def after(worker: int, step: int) -> None:
            if worker == 0 and step == 8:
                link = started_.sessions[1].link
                until(lambda: link.member.ended, "worker 1 to be done")
                with started_.cluster.changed:
                    started_.expire(1)
                    link.call(lambda member, now: [beat(member, now)])
                    assert link.member.attempt == 1

        def work(worker: int) -> Array:
            torch.set_num_threads(1)
            started_.become(worker)
            return script(worker, after, STEPS if worker == 0 else 6)

        models = together(work, 2)
    assert np.array_equal(models[0], models[1])


@pytest.mark.parametrize("shards", [1, 2])
def test_nobody_joins_once_all_have_done_their_last_step(shards: int) -> None:
    """Or it would be in the last round of some and not of others, whose models would differ."""
    with run(Settings(sync="gossip", workers=2, shards=shards)) as started_:
        coordinator = started_.cluster.servers[0].coordinator
        assert coordinator is not None
        members = []

        def begin(worker: int) -> None:
            net = build()
            DistributedOptimizer(sgd(net), net)
            members.append(started_.sessions[worker].link.member)

        started_.together(begin)
        waits = started_.join()  # let in, and without a model yet
        rosters: list[m.Roster] = []
        for member in members:
            assert not coordinator.gossip_directory.closed
            link = next(joined.link for joined in started_.sessions if joined.link.member is member)
            link.call(lambda member, now: [beat(member, now, ended=True)])
        for joined in started_.sessions[:2]:
            events = cast(in_process.Link, joined.link).events
            rosters += [event.roster for event in events if isinstance(event, RosterChanged)][-1:]
        assert coordinator.gossip_directory.closed and [roster.closed for roster in rosters] == [True, True]
        assert {len(roster.members) for roster in rosters} == {2} and rosters[0].members == rosters[1].members
        waits.link.call(lambda member, now: member.declare(coordinator.members.plan_packed, now))
        assert "about to end" in cast(in_process.Link, waits.link).error and len(coordinator.declared) == 2
        with pytest.raises((AssertionError, RuntimeError)):
            started_.join()


def test_a_model_that_is_not_finite_ends_its_worker_by_name() -> None:
    with run(Settings(sync="gossip")):
        net = build()
        optimizer = DistributedOptimizer(sgd(net), net)
        with torch.no_grad():
            net.get_parameter("0.weight")[0] = float("nan")
        with pytest.raises(NarrowsError, match="rank 0: the model is not finite after round 0"):
            optimizer.step()


def test_the_server_is_not_needed_once_the_workers_know_each_other() -> None:
    """Killed in the middle: all steps and the end are the same, bit for bit."""
    settings = Settings(sync="gossip", workers=3)
    with run(settings) as started_:
        expected = started_.together(script)
    begun_all = threading.Barrier(3)
    with run(settings) as started_:

        def kill(worker: int, step: int) -> None:
            if step == 2:
                begun_all.wait(30)
            if worker == 0 and step == 2:
                cluster = started_.cluster
                with cluster.changed:
                    cluster.links.clear()
                    cluster.send = lambda *told: None  # type: ignore[method-assign]
                    for joined in started_.sessions:
                        link = cast(in_process.Link, joined.link)
                        link.deliver(link.member.leave_server())

        models = together(lambda worker: _as(started_, worker, kill), 3)
    assert all(np.array_equal(a, b) for a, b in zip(models, expected, strict=True))


def test_lost_offers_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.protocols.gossip.peers.OFFER_RETRY", replace(OFFER_RETRY, first_ns=NS // 20))
    settings = Settings(sync="gossip", workers=2)
    with run(settings) as started_:
        expected = started_.together(script)
    with run(settings) as started_:
        count = [0]

        def lost(tell: SendToPeer) -> bool:
            count[0] += 1
            return isinstance(tell.message, (m.Offer, m.OfferAck)) and count[0] % 3 == 0

        started_.cluster.lost = lost

        with ticker(started_):
            models = started_.together(script)
    assert all(np.array_equal(a, b) for a, b in zip(models, expected, strict=True))


@contextmanager
def ticker(started_: Run) -> Iterator[None]:
    """Ticks of the members, as their runners make them."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.02):
            for joined in started_.sessions:
                joined.link.call(lambda member, now: member.tick(now))

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join(10)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"sync": "ssp", "topology": "ring"}, "--topology"),
        ({"sync": "gossip", "topology": "star"}, "--topology star"),
        ({"sync": "gossip", "compress": "auto"}, "--compress auto"),
        ({"sync": "gossip", "compress": "auto:0.05"}, "--compress auto:0.05"),
        ({"sync": "gossip", "compress": "int8", "compress_down": "int8"}, "--compress-down"),
        ({"sync": "gossip", "topology": "random", "staleness": 2}, "--staleness"),
        ({"sync": "gossip", "push": "update"}, "--push"),
        ({"sync": "gossip", "local_steps": 4, "fragments": 2}, "--fragments: under --sync gossip whole models"),
        ({"sync": "gossip", "local_steps": 4, "merge_delay": 1, "staleness": 0}, "--merge-delay: under --sync gossip"),
    ],
)
def test_flags_that_gossip_does_not_have_are_named(flags: dict[str, Any], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        Settings(**flags).validated()


def test_overlap_has_nothing_to_overlap() -> None:
    with run(Settings(sync="gossip")) as started_:
        started_.become(0)
        net = build()
        with pytest.raises(UsageError, match="overlap"):
            DistributedOptimizer(sgd(net), net, overlap=True)


# Processes.


def test_workers_go_on_when_their_server_is_killed(tmp_path: Path) -> None:
    """They say that it is gone, end with one model and exit with 0. That it is the same model is tested above."""
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    with serving("--sync", "gossip", "--workers", "2", cwd=tmp_path) as server:
        words = ("--server", server.address, "--server-timeout", "3", "-n", "2", str(script))
        with started("ps-worker", *words) as both_of_them:
            until(lambda: both_of_them.out.count("trains") == 2, both_of_them)
            server.kill()
            assert both_of_them.wait() == 0, str(both_of_them)
            assert len(ends(both_of_them.out)) == 1
            assert "the server is lost; the workers go on without it" in both_of_them.err


def test_the_server_keeps_the_model_that_the_workers_end_with(tmp_path: Path) -> None:
    with serving("--sync", "gossip", "--workers", "1", cwd=tmp_path) as server:
        with Worker(server.address) as worker:
            worker.train(2)
        assert server.command.wait() == 0, str(server.command)
        assert "the model that the workers ended with is in" in server.command.out


def test_a_worker_that_is_killed_is_mixed_with_no_more(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TRAINS)
    with (
        serving("--sync", "gossip", "--workers", "3", "--lease", "2", cwd=tmp_path) as server,
        started("ps-worker", "--server", server.address, "-n", "2", str(script)) as both,
        started("ps-worker", "--server", server.address, str(script)) as third,
    ):
        until(lambda: (both.out + third.out).count("trains") == 3, f"{both}\n{third}")
        for pid in [*descendants(third.pid), third.pid]:
            os.kill(pid, signal.SIGKILL)
        assert both.wait() == 0, both
        assert len(ends(both.out)) == 1


def test_bytes_of_strangers_change_nothing(tmp_path: Path) -> None:
    """A peer's port refuses by name what others send it, and the run goes on."""
    with serving("--sync", "gossip", "--workers", "1") as server, Worker(server.address) as worker:
        worker.train(2)
        address = worker.session.link.member.address
        before = flat(worker.model)
        host, port = address.removeprefix("tcp://").split(":")
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 1000)
            stranger.connect(address)
            ours = [[bytes(frame) for frame in encode(message)] for message in forged(worker)]
            newer = [ours[0][0][:4] + bytes((VERSION + 1,)) + ours[0][0][5:], *ours[0][1:]]
            for frames in ([b"junk"], [ours[0][0][:5] + b"\xc1"], newer, *ours):
                stranger.send_multipart(frames)
            with socket.create_connection((host, int(port)), 5) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        assert np.array_equal(flat(worker.model), before)
        worker.train(3)


def test_nobody_speaks_for_a_peer_without_keys() -> None:
    """A stranger knows all numbers, and offers a model to one of two workers under the number of the other one."""
    with (
        serving("--sync", "gossip", "--workers", "2") as server,
        ExitStack() as stack,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        both = [stack.enter_context(each) for each in together(lambda index: Worker(server.address), 2)]
        first = both[0]
        together(lambda index: both[index].train(2), 2)
        members = [each.session.link.member for each in both]
        count = first.engine.flat.size
        payload = np.full(count, 1e9, np.float32).tobytes()
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(members[0].address)
        peers = members[0].peers
        assert peers is not None
        here, there = members[0].worker, members[1].worker
        number = peers.peers[there].expected
        begun = cast(Any, first.engine.sync).driver.round
        offer = m.Offer(there, here, peers.epoch, begun, number, 0, 1, 0, count, 0.5, True, RAW, payload)
        stranger.send_multipart(encode(offer))
        until(lambda: getattr(first.session.link.drops, "refused", True), "the refusal")
        together(lambda index: both[index].train(3), 2)
        assert there in peers.peers and all(np.abs(flat(each.model)).max() < 100 for each in both)
        together(lambda index: both[index].engine.finish(), 2)


def test_what_is_kept_of_workers_that_no_roster_names_has_a_bound_in_bytes() -> None:
    peers = GossipPeers(0, LEASE_NS)
    for worker in range(1, 65):
        assert peers.receive(offer(worker=worker, payload=bytes(1 << 19)), 0) == []
    kept = [each if isinstance(each, m.Offer) else each[0] for each in peers.early]
    assert 0 < sum(len(each.payload) for each in kept if isinstance(each, m.Offer)) <= 1 << 20
    for number in range(1000):
        peers.receive(m.Ping(number, 0), 0)
    assert len(peers.early) == 64


def test_what_came_early_is_taken_from_its_peer_alone() -> None:
    """Of two messages under one number, before the roster: that of the pair counts."""
    peers, name = GossipPeers(0, LEASE_NS), m.pair_name(b"first", b"second")
    peers.receive(offer(payload=bytes(8)), 0, b"stranger-of-any-name")
    peers.receive(offer(), 0, name.encode() + b"12345678")
    _, *effects = peers.roster(m.Roster(0, 1, True, ((0, 1, 0, 0), (1, 1, 1, 0)), ("0", "1"), False, ("", name)), 0)
    (arrived,) = [effect for effect in effects if isinstance(effect, OfferArrived)]
    assert len(arrived.parts[0].payload) == 4 * COUNT
    with pytest.raises(NarrowsError, match="whose number it has"):
        peers.receive(offer(number=1), 0, b"stranger-of-any-name")


def forged(worker: Worker) -> list[m.Message]:
    """Messages of a worker that no roster names, and messages that no peer sends."""
    mine, count = worker.session.link.member.worker, worker.engine.flat.size
    payload = np.full(count, 1e9, np.float32).tobytes()
    offer = m.Offer(99, mine, 1, 0, 0, 0, 1, 0, count, 0.5, True, RAW, payload)
    return [offer, m.ModelRequest(99, mine), m.GossipEnded(99, mine), m.LeaveAck("x"), m.Refuse(6, mine, 0, "the end")]
