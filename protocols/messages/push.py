"""Sending updates. A child sends `Push` to each shard; the shard answers `PushAck`.

How it works
1. The child cuts its update at the borders of the shards, and each piece into parts. It sends the parts of a piece to
   its shard: `Push` 0 to parts - 1, all with the clock of the update.
2. The shard keeps the parts until all are there. Where the sync mode folds at once, the shard folds the update into the
   model and answers `PushAck` FOLDED, with the weight of the update.
3. Where the sync mode has a barrier, the shard answers `PushAck` HELD: the child need not send again. Once the
   coordinator closes the clock, the shard folds all updates of the clock and sends each child a second `PushAck`:
   FOLDED, with the weight.
4. A child without an answer sends the same parts again, under the same clock. A shard folds the update of a worker and
   a clock once.

Only FOLDED is a promise. A shard drops a held update if its worker dies before every shard has its piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from narrows.protocols.messages.base import Buffer, Message

PARTS_MAX = 1 << 14  # messages of one push or state: 32 GiB of fp32 in frames of 2 MiB


class HandOver(IntEnum):
    """Under gossip, the `samples` of a push: whose model it is."""

    STOPPED = 1  # of a worker that is stopped before its last step, or whose server is
    LAST = 2  # the mean of all, which they end with


@dataclass(frozen=True, slots=True)
class Push(Message):
    """Worker to shard: one part of update `clock`, keys [begin, end). Part 0 carries `hyper`. Rows of tables are parts without
    keys, after all others. `samples` 0: there is no update, and no payload; its worker takes part in the clock all the same."""

    worker: int
    epoch: int
    clock: int
    part: int
    parts: int
    begin: int
    end: int
    samples: int
    hyper: bytes  # msgpack of the plain hyper-parameters (pushed gradients, and rows of tables), or empty
    codec: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class PushAck(Message):
    """Shard to worker: the whole of update `clock` is here. `weight` is final once FOLDED (0.0 before)."""

    worker: int
    epoch: int
    clock: int
    status: int
    weight: float
    want_buffers: bool
    received_ns: int
    sent_ns: int
