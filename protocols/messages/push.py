"""Sending updates. A child sends `Push` to each shard; the shard answers `PushAck`.

How it works
1. The child cuts its update at the borders of the shards, and each piece into parts. It sends the parts of a piece to
   its shard: `Push` 0 to parts - 1, all with the clock of the update.
2. The shard keeps the parts until all are there. Where the sync mode folds at once, the shard folds the update into the
   model and answers `PushAck` FOLDED, with the weight of the update.
3. Where the sync mode has a barrier, the shard answers `PushAck` HELD: the child need not send again. Once the
   coordinator closes the clock, the shard folds all updates of the clock and sends each child a second `PushAck`:
   FOLDED, with the weight.
4. At a barrier, a child that asks for a state right after a push says so in the push's last part (`follow`).
5. A child without an answer sends the same parts again, under the same clock. A shard folds the update of a worker and
   a clock once.

Only FOLDED is a promise. A shard drops a held update if its worker dies before every shard has its piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages.base import Buffer, Ints, Message
from narrows.protocols.messages.state import Follow

PARTS_MAX = 1 << 14  # messages of one push or state: 64 GiB of fp32 in frames of 4 MiB


class HandOver(IntEnum):
    """In gossip, the field `samples` of a Push: which model is handed over."""

    STOPPED = 1  # the model of one worker: the user stopped the worker or its server before the last step
    LAST = 2  # the mean of all models, with which the run ends


@dataclass(frozen=True, slots=True)
class Push(Message):
    """Child to shard: one part of update `clock`, keys [begin, end).

    Rows of embedding tables are parts without keys, after all other parts.
    """

    worker: int
    epoch: int
    clock: int
    part: int  # number of this part, from 0 on
    parts: int  # number of all parts of the update
    begin: int
    end: int
    samples: int  # that the update was computed on; 0: an empty update, which counts for the clock; gossip: a HandOver
    hyper: bytes  # hyper-parameters, msgpack (part 0 of pushed gradients, and of rows of tables), else b""
    codec: int
    payload: Buffer
    steps: int = 0  # local steps of the update, also those that were skipped (--local-seconds); else 0
    follow: Ints = ()  # in the last part, clock, have and credit of a `Follow` that would come next; (): none would

    def asks(self) -> Follow | None:
        """Return the `Follow` that this push stands for, if any. Raises RemoteProtocolError: `follow` is none."""
        if not self.follow:
            return None
        if len(self.follow) != 3:
            raise RemoteProtocolError(f"a push with {len(self.follow)} numbers in place of a Follow's three")
        return Follow(self.worker, self.epoch, *self.follow)


@dataclass(frozen=True, slots=True)
class PushAck(Message):
    """Shard to child: all parts of update `clock` are here."""

    worker: int
    epoch: int
    clock: int
    status: int  # a `PushStatus`
    weight: float  # with which the update was folded; 0.0 while HELD
    want_buffers: bool  # the child is to send its module buffers
    received_ns: int  # when the last part came, by the shard's system clock
    sent_ns: int  # when this ack was sent, by the same clock
