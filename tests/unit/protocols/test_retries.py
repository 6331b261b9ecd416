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
from narrows.protocols.config.retry import LONG_AGO_NS, NumberedStream, Retry
from narrows.protocols.config.timing import OFFER_RETRY, Timing
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


def test_through_a_mailbox_all_waits_follow_its_round_trip_and_the_lease_sets_the_heartbeats() -> None:
    plain = Timing(lost_ns=120 * NS)
    slow = plain.through_mailbox(4.0)
    assert slow.join.wait_ns() == slow.request.wait_ns() == 8 * NS > plain.request.wait_ns()
    assert slow.request.bytes_per_second == plain.request.bytes_per_second and slow.request.most == plain.request.most
    assert plain.beat_ns(60) == NS and slow.beat_ns(60) == 15 * NS and slow.beat_ns(600) == 30 * NS
    quick = plain.through_mailbox(0.1)
    assert (quick.join, quick.request) == (plain.join, plain.request)


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
    """Tests with virtual times and protocols/config/timing.py say the same."""
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


# Streams.


def transfer(seed: int, window: int | None, count: int) -> tuple[list[int], int, int]:
    """Messages over a link that loses a third of all, in turns of a second: those that the receiver took, the most that were
    under way, and the turns that it took. The sender goes back after three turns without progress."""
    rng, retry = random.Random(seed), Retry(3 * NS)
    stream, there, taken, most, progress_ns = NumberedStream(window), 0, list[int](), 0, 0
    for turn in range(10_000):
        there = min(count, there + rng.randrange(3))
        if rng.random() < 0.67:  # what the receiver has is told, too
            if stream.acknowledge(len(taken)):
                progress_ns = turn * NS
            elif retry.due(progress_ns, turn * NS):
                stream.go_back()
                progress_ns = turn * NS
        for number in stream.take(there):
            if rng.random() < 0.67 and number == len(taken):  # else it is lost, out of turn, or there already
                taken.append(number)
        most = max(most, stream.sent - stream.acked)
        if stream.acked == count:
            return taken, most, turn
    raise AssertionError(f"{len(taken)} of {count} messages have come")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("window", [1, 4, None])
def test_all_messages_of_a_stream_come_in_turn_over_a_lossy_link(seed: int, window: int | None) -> None:
    taken, most, turns = transfer(seed, window, 60)
    assert taken == list(range(60)) and turns
    assert most <= window if window is not None else most > 4


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_says_of_each_number_what_a_list_of_them_says(seed: int) -> None:
    """The reference has a row for each message: acknowledged, under way, or neither."""
    rng = random.Random(seed)
    window = rng.choice((1, 5, None))
    stream, acked, sent, there = NumberedStream(window), [False] * 200, [False] * 200, 0
    for _ in range(300):
        match rng.randrange(4):
            case 0:
                there = min(200, there + rng.randrange(4))
            case 1:
                count = rng.randrange(sent.count(True) + 1)  # less than before: the receiver has begun anew
                assert stream.acknowledge(count) == (count > acked.count(True))
                acked = [number < count for number in range(200)]
            case 2:
                stream.go_back()
                sent = list(acked)
            case 3:
                last = there if window is None else acked.count(True) + window
                due = [number for number in range(there) if number < last and not sent[number]]
                assert list(stream.take(there)) == due
                sent = [was or number in due for number, was in enumerate(sent)]
        assert (stream.acked, stream.sent) == (acked.count(True), sent.count(True))
