"""Constants of time of the machines, and the arithmetic of what a sender repeats. No clock: the time is an argument.

How it works
- A sender repeats a message until the receiver acknowledges it. Each such rule is a row, a `Retry`: the wait before the first
  repeat, the slowest link, and how far the wait grows. The machine keeps the time of the last sending and asks `Retry.due`.
- The wait grows in one of two ways. Where a sender asks for the same again, the caller passes the count of its requests as
  `factor`. Where a late answer shows that a link is slow, `RetryTimer` keeps the factor that it took.
- A new connection makes everything due: the machine sets its times to `LONG_AGO_NS`, and the next tick repeats.
- A `NumberedStream` counts messages that the receiver acknowledges together, all before a number:

      0 ...              acked ...         sent ...                          there
      the receiver's   | under way       | to be sent, as the window lets it

  Where nothing moves for as long as a `Retry` says, the sender goes back to `acked`, and sends the same numbers again.
- `Timing` has the limits of one member's waits. A run changes some of them by flags, the simulator all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.effects import NS

SLOW_LINK_BYTES_PER_SECOND = 125_000  # of the slowest link: n bytes get n / this on top of every wait
RETRY_FACTOR_MAX = 8  # a wait grows to so many times its first length: a lost message is not waited for longer
LONG_AGO_NS = -(1 << 62)  # in the place of the time of a sending: the next tick repeats the message


def transfer_ns(size: int, bytes_per_second: int = SLOW_LINK_BYTES_PER_SECOND) -> int:
    """Return the time that `size` bytes take on a link of this rate."""
    return size * NS // bytes_per_second


@dataclass(frozen=True, slots=True)
class Retry:
    """When a sender repeats a message that is not acknowledged.

    Args:
        first_ns: the wait for the answer to a message without payload.
        bytes_per_second: of the slowest link; the wait for n bytes is longer by n / this. 0: the size does not count.
        most: the factor by which the wait grows at most.
    """

    first_ns: int
    bytes_per_second: int = 0
    most: int = 1

    def wait_ns(self, size: int = 0, factor: int = 1) -> int:
        """Return the wait for the answer to `size` bytes, `factor` times as long as at first."""
        more_ns = transfer_ns(size, self.bytes_per_second) if self.bytes_per_second else 0
        return min(factor, self.most) * (self.first_ns + more_ns)

    def due(self, sent_ns: int, now_ns: int, size: int = 0, factor: int = 1) -> bool:
        """True if `size` bytes that were last sent at `sent_ns` are to be sent again."""
        return now_ns - sent_ns >= self.wait_ns(size, factor)


@dataclass(slots=True)
class RetryTimer:
    """When bytes are sent again on one link. A link slower than the limit would carry nothing but copies: where the answer to
    bytes that were sent twice shows how long one takes there, the next ones are waited for as long."""

    retry: Retry
    factor: int = 1

    def due(self, sent_ns: int, now_ns: int, size: int) -> bool:
        """True if `size` bytes that were last sent at `sent_ns` are to be sent again."""
        return self.retry.due(sent_ns, now_ns, size, self.factor)

    def answered(self, sent_ns: int, now_ns: int, size: int) -> None:
        """Learn from the answer to `size` bytes that were sent first at `sent_ns`, and once more since."""
        took = -(-(now_ns - sent_ns) // self.retry.wait_ns(size))
        self.factor = min(max(self.factor, took), self.retry.most)


@dataclass(slots=True)
class NumberedStream:
    """Counts of the messages from one sender to one receiver, which acknowledges all before a number (go-back-n). The sender
    keeps the messages. Numbers begin with 0.

    Args:
        window: so many messages may be under way; None: any count.
        acked: the receiver has all messages before this number.
        sent: the sender has sent all messages before this number.
    """

    window: int | None = None
    acked: int = 0
    sent: int = 0

    def acknowledge(self, count: int) -> bool:
        """Take the receiver's word that it has all before `count`; True if it has more than before. Less: it has begun anew."""
        more, self.acked = count > self.acked, count
        return more

    def go_back(self) -> None:
        """Count all that is under way as lost."""
        self.sent = self.acked

    def take(self, there: int) -> range:
        """Return the numbers to send now, of messages before `there`, and count them as sent."""
        end = there if self.window is None else min(there, self.acked + self.window)
        first, self.sent = self.sent, max(self.sent, end)
        return range(first, self.sent)


# Rules of repeats.

JOIN_RETRY = Retry(NS // 2)  # Hello, Declare, Leave; RangeAsk, AgreeAsk: small, and the coordinator answers at once
REQUEST_RETRY = Retry(5 * NS, SLOW_LINK_BYTES_PER_SECOND, RETRY_FACTOR_MAX)  # pushes, and what a shard is asked for
OFFER_RETRY = Retry(5 * NS, SLOW_LINK_BYTES_PER_SECOND)  # of gossip: offers; the ask for a model, from its newest part
REPORT_RETRY = Retry(NS // 5)  # a report of a shard that no ledger has shown to be with the coordinator
LEDGER_RETRY = Retry(NS // 5)  # a ledger that no report has shown to be with its shard
REPLICATION_RETRY = Retry(NS, 1_250_000)  # events and parts of a machine, from the last progress: standbys are near
VOTE_RETRY = Retry(NS // 2)  # a vote that the standby has not answered
ARCHIVE_RETRY = Retry(5 * NS)  # a part of a checkpoint: the disk of process 0 may be slow

# Coordinator and shards.

REPORT_REFRESH_NS = NS  # a shard sends its newest report this often: a coordinator that was restarted knows no shard
MODEL_HAND_OVER_NS = 12 * NS  # workers of gossip hand over their models within this, where the server is stopped
RESHARD_HOLD_LEASES = 2  # within these a live member says that it holds; no clock closes until then
REMOTE_HOST_LOST_LEASES = 3  # silence of a machine that joined: to go back costs work, and its link may be down

# Leases of members, and connections that have ended.

LEASE_STEPS = 3  # a lease is never under three measured steps
ROUND_TRIP_MAX_NS = 30 * NS  # a round trip lengthens a lease by at most this: a server is lost after as long
RECONNECT_LEASES, RECONNECT_LEAST_NS = 0.25, 2 * NS  # a live member has connected again by then
RECONNECT_ROUND_TRIPS = 5  # that connecting again takes: TCP 1, ZMTP 1.5, CURVE 2, and its first message
MEMBER_PROBE_NS = NS  # silence after which the coordinator sends a member something: a broken connection shows

# Failover.

REPLICATION_BEAT_NS = NS // 2  # between two heartbeats of server and standby, either way
STANDBY_LOST_LEASES, STANDBY_LOST_LEAST_NS = 0.25, NS  # silence after which either takes the other for lost
REPLICATION_CUT_NS = NS // 2  # the same after the end of the connection: a live process has connected again by then
STANDBY_MISSED_NS = NS  # a standby is missing for so long before the members vote on going on without it
ELECTION_TIMEOUT_NS = 60 * NS  # a server or standby that has not got its votes by then ends
DEPOSE_NS = 600 * NS  # a standby that serves tells the server before it so for this long
FAILOVER_SILENCE_NS = 5 * NS // 2  # of a server with a standby, then a member turns: five heartbeats
FAILOVER_CUT_NS = NS  # the same after the end of all connections: later than the standby, which must agree
FAILOVER_STAY_NS = NS  # after a vote that was given back: the standby heard the server a little longer

# Gossip.

MODEL_WAIT_LEASES = 3  # a joiner waits for a peer that has a model: one may be about to join again
ENDED_NS = NS  # a worker that is done says so to each peer this often, until all are done

# Heartbeats and summaries.

BEATS = 4  # heartbeats in a lease, at least
SILENT_BEATS = 2  # of these without a message of the server: what was sent to it may be lost
SHOWN_NS = NS  # who looks at a run sees no figure that is much older: a summary goes with each heartbeat
SUMMARY_BYTES_PER_SECOND = 13_000  # of summaries, where a lease allows it: those of 80 members below a cluster

# Checkpoints.

CHECKPOINT_COST_TIMES = 50  # the time that a checkpoint takes, from one to the next: 2 % of the run
CHECKPOINT_LEAST_NS = 5 * NS  # so much work is lost gladly

# Waits of a worker.

START_LIMIT_S = 600.0  # a worker waits so long for the other workers of a run to join
WAIT_LIMIT_S = 3600.0  # a worker waits for no barrier longer; a dead worker costs a lease, a dead server less


def standby_lost_ns(lease: float) -> int:
    """Return the silence after which server and standby take each other for lost. `lease`: in seconds."""
    return max(STANDBY_LOST_LEAST_NS, int(STANDBY_LOST_LEASES * lease * NS))


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of every wait of one member.

    Args:
        join: when a member repeats what it asks the coordinator.
        request: when a member repeats what it asks a shard; when a shard repeats what it sends a child.
        lost_ns: silence after which the server is lost.
        connect_ns: time without a first answer after which the server cannot be reached.
    """

    join: Retry = JOIN_RETRY
    request: Retry = REQUEST_RETRY
    lost_ns: int = 30 * NS
    connect_ns: int = 30 * NS

    def beat_ns(self, lease: float, size: int = 0) -> int:
        """From one heartbeat, whose summary has so many bytes, to the next. `lease`: in seconds."""
        return min(self.lease_ns(lease) // BEATS, max(SHOWN_NS, transfer_ns(size, SUMMARY_BYTES_PER_SECOND)))

    def silent_ns(self, lease: float) -> int:
        """Without a word of the server for so long, what was said may have been lost."""
        return SILENT_BEATS * self.lease_ns(lease) // BEATS

    def lease_ns(self, lease: float) -> int:
        return min(int(lease * NS), self.lost_ns)
