"""Every constant of time of the machines. No clock: the time is an argument.

- Each rule of retries is a row, a `Retry` (retry.py).
- `Timing` has the limits of one member's waits. Flags of a run change some of them, the simulator all.
- The last word of a name is the unit: `_NS` nanoseconds, `_S` seconds, `_LEASES` leases of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from narrows.protocols.config.retry import RETRY_FACTOR_MAX, SLOW_LINK_BYTES_PER_SECOND, Retry, transfer_ns
from narrows.protocols.effects import NS

# Retries.

JOIN_RETRY = Retry(
    NS // 2
)  # Hello, Declare, Leave; RangeRequest, AgreeRequest: small, and the coordinator answers at once
REQUEST_RETRY = Retry(5 * NS, SLOW_LINK_BYTES_PER_SECOND, RETRY_FACTOR_MAX)  # pushes, and requests to a shard
OFFER_RETRY = Retry(5 * NS, SLOW_LINK_BYTES_PER_SECOND)  # gossip: offers; ModelRequest, since its newest answer part
REPORT_RETRY = Retry(NS // 5)  # a shard's report that no ledger has acknowledged (`Ledger.report_seen`)
LEDGER_RETRY = Retry(NS // 5)  # a ledger that no report has acknowledged (`Report.ledger_seen`)
REPLICATION_RETRY = Retry(NS, 1_250_000)  # events and parts of a machine, since the last progress: standbys are near
VOTE_RETRY = Retry(NS // 2)  # a vote that the standby has not answered
ARCHIVE_RETRY = Retry(5 * NS)  # a part of a checkpoint: the disk of shard 0 may be slow

# Coordinator and shards.

REPORT_REFRESH_NS = NS  # a shard sends its newest report this often: a coordinator that was restarted knows no shard
MODEL_HAND_OVER_NS = 12 * NS  # gossip: time for the workers to hand over their models when the user stops the server
RESHARD_HOLD_LEASES = 2  # time for a live member to acknowledge a Reshard; no clock closes until then
REMOTE_HOST_LOST_LEASES = 3  # silence after which a remote host is lost: going back costs work, and a link may be down

# Leases of members, and connections that have ended.

LEASE_STEPS = 3  # a lease is never under three measured steps
ROUND_TRIP_MAX_NS = 30 * NS  # a round trip lengthens a lease by at most this; a member gives a server up after as long
RECONNECT_LEASES, RECONNECT_LEAST_NS = 0.25, 2 * NS  # time for a live member to connect again
RECONNECT_ROUND_TRIPS = 5  # round trips of a new connection: TCP 1, ZMTP 1.5, CURVE 2, and the first message
MEMBER_PROBE_NS = NS  # silence after which the coordinator sends to a member, to find a broken connection

# Failover.

REPLICATION_BEAT_NS = NS // 2  # interval of the heartbeats between server and standby, either way
STANDBY_LOST_LEASES, STANDBY_LOST_LEAST_NS = 0.25, NS  # silence after which each counts the other as lost
REPLICATION_CUT_NS = NS // 2  # the same after the end of the connection: time for a live process to connect again
STANDBY_MISSED_NS = NS  # a standby is missing for this long before the members vote to go on without it
ELECTION_TIMEOUT_NS = 60 * NS  # a server or standby that lacks its votes after this time ends
DEPOSE_NS = 600 * NS  # for this long a standby that serves tells the earlier server so
FAILOVER_SILENCE_NS = 5 * NS // 2  # silence of the server after which a member turns to the standby: five heartbeats
FAILOVER_CUT_NS = NS  # the same after the end of all connections: later than the standby, which must agree
FAILOVER_STAY_NS = NS  # after KeepServing a member does not turn for this long: the standby heard the server later

# Gossip.

MODEL_WAIT_LEASES = 3  # a new node waits for a peer that has a model: such a peer may be about to join again
ENDED_NS = NS  # a node that is done sends GossipEnded to each peer this often, until all are done

# Heartbeats and summaries.

BEATS = 4  # heartbeats in a lease, at least
SILENT_BEATS = 2  # heartbeat intervals without a message of the server, after which sent messages may be lost
SHOWN_NS = NS  # age of the figures that the user sees, if summaries are small: each heartbeat carries a summary
SUMMARY_BYTES_PER_SECOND = 13_000  # of summaries, as far as the lease allows: those of 80 members below a cluster

# Mailboxes, where a message takes seconds and costs a request.

MAILBOX_LEASE_S = 60.0  # --lease through a mailbox, if the user gives none: four heartbeats in it
MAILBOX_ROUND_TRIPS = 2  # wait before a repeat, in round trips of the mailbox

# Checkpoints.

CHECKPOINT_COST_TIMES = 50  # interval of checkpoints, in times that one takes to write: 2 % of the run
CHECKPOINT_LEAST_NS = 5 * NS  # shortest interval: so little work may be lost

# Waits of a worker.

START_LIMIT_S = 600.0  # a worker waits this long for the other workers of a run to join
WAIT_LIMIT_S = 3600.0  # a worker waits this long at a barrier; a dead worker costs a lease only, a dead server less


def standby_lost_ns(lease: float) -> int:
    """Return the silence after which server and standby count each other as lost. `lease`: in seconds."""
    return max(STANDBY_LOST_LEAST_NS, int(STANDBY_LOST_LEASES * lease * NS))


@dataclass(frozen=True, slots=True)
class Timing:
    """Limits of every wait of one member.

    Args:
        join: when a member repeats a request to the coordinator.
        request: when a member repeats a request to a shard, and a shard a message to a child.
        lost_ns: silence of the server after which it counts as lost.
        connect_ns: time without a first answer after which the server counts as unreachable.
        shown_ns: the longest interval of heartbeats, so that the figures that the user sees are not older.
    """

    join: Retry = JOIN_RETRY
    request: Retry = REQUEST_RETRY
    lost_ns: int = 30 * NS
    connect_ns: int = 30 * NS
    shown_ns: int = SHOWN_NS

    def through_mailbox(self, round_trip_s: float) -> Timing:
        """Return the limits of a member that meets its server in a mailbox. `round_trip_s`: as the mailbox has measured it.

        There a heartbeat costs two requests, so that the lease alone sets their interval.
        """
        least_ns = int(MAILBOX_ROUND_TRIPS * round_trip_s * NS)
        join = replace(self.join, first_ns=max(self.join.first_ns, least_ns))
        request = replace(self.request, first_ns=max(self.request.first_ns, least_ns))
        return replace(self, join=join, request=request, shown_ns=self.lost_ns)

    def beat_ns(self, lease: float, size: int = 0) -> int:
        """Return the interval of heartbeats. `lease`: in seconds; `size`: bytes of the newest summary."""
        return min(self.lease_ns(lease) // BEATS, max(self.shown_ns, transfer_ns(size, SUMMARY_BYTES_PER_SECOND)))

    def silent_ns(self, lease: float) -> int:
        """Return the silence of the server after which sent messages may have been lost. `lease`: in seconds."""
        return SILENT_BEATS * self.lease_ns(lease) // BEATS

    def lease_ns(self, lease: float) -> int:
        return min(int(lease * NS), self.lost_ns)
