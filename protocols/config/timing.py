"""Every constant of time of the machines. No clock: the time is an argument.

- A rule of repeats is a row, a `Retry` (retry.py).
- `Timing` has the limits of one member's waits. A run changes some of them by flags, the simulator all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.config.retry import RETRY_FACTOR_MAX, SLOW_LINK_BYTES_PER_SECOND, Retry, transfer_ns
from narrows.protocols.effects import NS

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
