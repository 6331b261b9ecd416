"""The way of sampled updates between a child and the shards of its server, in times. No I/O.

How it works

    child                               shard
      Push, each part     sent, left ---> received      all parts are there: the ack says when
      PushAck             acked <-------- folded        by the same ack, where the mode folds at once
      State               arrived <------ published     the first state that contains the update

1. The runner of a child hands over each message to a shard and each message of one, with the time.
2. The update of a clock is traced if N (`every`) divides the clock. Its times are one row of FIELDS, made once a state
   contains the update.
3. The three times at the shard come with the messages of the protocol, by the shard's clock. So nothing is sent for a
   trace, and a shard does nothing for it.
4. `offset` is what the link meter knows of the two clocks.

Rules
- Everything is bounded: PENDING_MAX updates without a state, ROWS_MAX rows until they are taken. What has no room is
  counted in `dropped`.
- One thread calls `sent` and `heard`; any one may call `take`.
"""

from __future__ import annotations

from collections import deque

from narrows.protocols import messages as m
from narrows.protocols.member.link_meter import LinkMeter

PENDING_MAX = 1024  # traced updates that no state contains yet; beyond, the oldest ones end without a state
ROWS_MAX = 4096  # rows until `take`
# `shard`, `worker` (the child's number at its server), `epoch` (of its place), `clock`, `bytes` of all payloads, and
# times in ns: those of the shard by the shard's clock, the others by the child's; 0: not known.
FIELDS = (
    *("shard", "worker", "epoch", "clock", "bytes"),
    *("sent", "left", "received", "folded", "acked", "published", "arrived"),
)
BYTES, SENT, LEFT, RECEIVED, FOLDED, ACKED, PUBLISHED, ARRIVED = range(4, len(FIELDS))


class PushTrace:
    """The rows of one child.

    Args:
        every: the update of each clock that this number divides is traced.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.dropped = 0  # rows that had no room
        self.pending: dict[tuple[int, int, int], list[int]] = {}  # by shard, epoch and clock
        self.rows = deque[list[int]]()

    def sent(self, shard: int, message: m.Message, now_ns: int) -> None:
        """Note a message to a shard. A part that is sent again counts as the first time."""
        if not isinstance(message, m.Push) or message.clock % self.every:
            return
        key = (shard, message.epoch, message.clock)
        if (row := self.pending.get(key)) is None:
            if len(self.pending) >= PENDING_MAX:
                self._done(next(iter(self.pending)))
            row = self.pending[key] = [shard, message.worker, message.epoch, message.clock, 0, now_ns] + [0] * 6
        if not row[RECEIVED] and not row[LEFT]:
            row[BYTES] += len(message.payload)
            row[LEFT] = now_ns if message.part == message.parts - 1 else 0

    def heard(self, shard: int, message: m.Message, now_ns: int) -> None:
        """Note a message of a shard."""
        if not self.pending:
            return
        if isinstance(message, m.PushAck):
            row = self.pending.get((shard, message.epoch, message.clock))
            if row is not None and not row[ACKED]:
                row[RECEIVED], row[ACKED] = message.received_ns, now_ns
                row[FOLDED] = message.sent_ns if message.status == m.PushStatus.FOLDED else 0
        elif isinstance(message, m.State):
            for key in [key for key in self.pending if key[:2] == (shard, message.epoch)]:
                row = self.pending[key]
                if key[2] < message.settled or any(clock == key[2] for clock, _ in message.contains):
                    row[PUBLISHED] = row[PUBLISHED] or message.sent_ns
                    if message.part == message.parts - 1:
                        row[ARRIVED] = now_ns
                        self._done(key)

    def _done(self, key: tuple[int, int, int]) -> None:
        row = self.pending.pop(key)
        if len(self.rows) < ROWS_MAX:
            self.rows.append(row)
        else:
            self.dropped += 1

    def take(self, last: bool = False) -> list[list[int]]:
        """Return the rows since the last call. `last`: also those of updates that no state contains."""
        taken = [self.rows.popleft() for _ in range(len(self.rows))]
        return [*taken, *map(list, self.pending.copy().values())] if last else taken


def offset(meter: LinkMeter) -> list[int] | None:
    """Return what to add to a child's time to have the shard's, and the greatest error of that, in ns.

    A delay from child to shard contains the difference of the clocks, one from shard to child contains it with the other
    sign. So half the difference of the least delays is the difference of the clocks if both ways take equally long, and
    wrong by at most half the round trip if one of them takes no time (RFC 5905, section 8: theta and delta / 2).

    Returns:
        None while no message has been timed in both directions.
    """
    up, down = meter.up.delays, meter.down.delays
    if not up.rows or not down.rows:
        return None
    return [(up.least - down.least) // 2, max(0, up.least + down.least + 1) // 2]
