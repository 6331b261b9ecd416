"""A member does this at once where the other end is another process: it says things again, and measures anew."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import pytest

from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.config import timing
from narrows.protocols.config.timing import LONG_AGO_NS, OFFER_RETRY, Retry
from narrows.protocols.effects import NS, SendToPeer
from narrows.protocols.gossip.peers import GossipPeers
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.member import Member

MS = NS // 1000
HOUR = 3600 * NS
RETRIES = {name: retry for name, retry in vars(timing).items() if isinstance(retry, Retry)}


def pings(meter: LinkMeter, there_ns: int) -> int:
    """A link of 10 ms each way, to a server whose clock is ahead by so much: the round trip that is seen."""
    for now in range(NS, 2 * NS, NS // 4):
        meter.up.passed(now, now + 10 * MS + there_ns)
        meter.down.passed(now + there_ns, now + 10 * MS)
    return meter.read().round_trip_ns


def test_the_clock_of_another_process_is_no_delay() -> None:
    """It stood still while nobody ran it. With two clocks the least delays are 20 ms less than an hour, or none."""
    kept, anew = Member("token", "here"), Member("token", "here")
    assert pings(kept.meter, HOUR) == pings(anew.meter, HOUR) == 20 * MS
    anew.repeat_soon(0)
    assert pings(anew.meter, HOUR - 5 * NS) == 20 * MS != pings(kept.meter, HOUR - 5 * NS)
    assert anew.meter.read().up_bytes == 0


def test_where_a_clock_stood_still_the_shortest_heartbeat_is_the_round_trip() -> None:
    """The server had no core for a second: its answers seem to have been sent before they were asked for."""
    meter = LinkMeter()
    for behind, road_ms in ((0, 25), (NS, 22)):
        for now in range(NS, 2 * NS, NS // 4):
            meter.beat(now, now + 10 * MS - behind, now + 10 * MS, now + road_ms * MS)
    assert meter.round_trip_ns == 22 * MS


def offer(peer: int) -> m.Offer:
    return m.Offer(0, peer, 1, 0, 0, 0, 1, 0, 1, 0.5, False, RAW, bytes(4))


def told(peers: GossipPeers, now_ns: int) -> list[tuple[str, str]]:
    return [(each.address, type(each.message).__name__) for each in peers.tick(now_ns) if isinstance(each, SendToPeer)]


def test_a_peer_that_is_linked_anew_is_told_again_with_the_next_tick_and_no_other() -> None:
    peers = GossipPeers(0, 10 * NS)
    members = tuple((worker, 1, worker, 0) for worker in range(3))
    peers.roster(m.Roster(0, 1, True, members, ("tcp://a:1", "tcp://b:1", "tcp://c:1")), NS)
    for peer in (1, 2):
        peers.offer([offer(peer)], NS)
    peers.adopt(2, NS)
    assert told(peers, NS + 1) == []
    peers.repeat_soon("tcp://b:1")
    assert told(peers, NS + 2) == [("tcp://b:1", "Offer")] and told(peers, NS + 3) == []
    peers.repeat_soon()
    assert told(peers, NS + 4) == [("tcp://b:1", "Offer"), ("tcp://c:1", "Offer"), ("tcp://c:1", "ModelRequest")]
    assert told(peers, NS + 5 + 2 * OFFER_RETRY.first_ns)


# Rows of repeats, against a sender that writes down each time at which it sends.


def sendings(retry: Retry, size: int, ticks_ns: Sequence[int]) -> list[int]:
    """The ticks at which a machine sends `size` bytes that nobody acknowledges, and counts what it has sent."""
    sent = [ticks_ns[0]]
    for now_ns in ticks_ns[1:]:
        if retry.due(sent[-1], now_ns, size, len(sent)):
            sent.append(now_ns)
    return sent


def expected(retry: Retry, size: int, ticks_ns: Sequence[int]) -> list[int]:
    """The same by exact fractions: each wait is the first one, times the count of sendings, up to `most` times."""
    first = Fraction(retry.first_ns)
    if retry.bytes_per_second:
        first += Fraction(size * NS, retry.bytes_per_second) // 1
    sent = [ticks_ns[0]]
    while later := [tick for tick in ticks_ns if tick - sent[-1] >= first * min(len(sent), retry.most)]:
        sent.append(later[0])
    return sent


@pytest.mark.parametrize("seed", range(20))
def test_a_message_is_repeated_at_the_first_tick_after_each_wait(seed: int) -> None:
    rng = random.Random(seed)
    retry = Retry(rng.randrange(1, 3 * NS), rng.choice((0, 1000, 125_000, 1 << 30)), rng.randrange(1, 9))
    ticks_ns = list(accumulate(rng.randrange(1, NS) for _ in range(400)))
    size = rng.choice((0, 1, rng.randrange(1 << 20)))
    assert sendings(retry, size, ticks_ns) == expected(retry, size, ticks_ns)


def test_a_message_whose_connection_is_another_one_is_due_with_any_tick() -> None:
    for retry in RETRIES.values():
        assert retry.due(LONG_AGO_NS, 0, 1 << 30, 1 << 30) and not retry.due(0, 0)


def test_each_rule_has_its_numbers() -> None:
    """Tests with virtual times and docs/reference.md say the same."""
    seconds = {name: (retry.first_ns / NS, retry.bytes_per_second, retry.most) for name, retry in RETRIES.items()}
    assert seconds == {
        "JOIN_RETRY": (0.5, 0, 1),
        "REQUEST_RETRY": (5.0, 125_000, 8),
        "OFFER_RETRY": (5.0, 125_000, 1),
        "REPORT_RETRY": (0.2, 0, 1),
        "LEDGER_RETRY": (0.2, 0, 1),
        "REPLICATION_RETRY": (1.0, 1_250_000, 1),
        "VOTE_RETRY": (0.5, 0, 1),
        "ARCHIVE_RETRY": (5.0, 0, 1),
    }
