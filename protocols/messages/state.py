"""Taking the model from a shard. A child asks; the shard answers.

How it works
1. The child sends `Follow` to each shard: the newest publication that it has, and how many more may be under way
   (`credit`).
2. The shard sends each later publication as soon as it makes it, in parts: `State` with the number of the publication.
   It stops once `credit` publications are not acknowledged. A child that is too far behind, or new, gets the whole
   state instead.
3. The next `Follow` acknowledges what has come. The newest `Follow` replaces all before it, so a lost one does no harm.

A child may ask for three things besides. Each answer repeats the number of the request.
- `Pull` asks for the master copy of the weights; the shard answers `State` with that request: a difference to the
  newest publication if the child has that one, else all values.
- `RowsRequest` asks for rows of an embedding table; the shard answers `RowsAnswer`.
- `MomentsRequest` asks for the state of the shard's optimizer; the shard answers `MomentsAnswer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages.base import Buffer, Message, Name, Weights

CREDIT_MAX = 16  # publications sent to a child and not yet acknowledged, at most: a shard keeps this many


@dataclass(frozen=True, slots=True)
class Follow(Message):
    """Child to shard: the publication that the child has, and what may come next. Replaces every Follow before it.

    The shard sends each publication after `have` as it makes it, until `credit` of them are not acknowledged by a
    Follow. It sends a whole state alone: the newest one, and only once the child may compute `clock` on it. A Follow
    with the same values as the one before asks again for what has not come.
    """

    worker: int
    epoch: int
    clock: int  # that the child computes on the next whole state
    have: int  # number of the newest publication that the child has, and with it all before; -1: none
    credit: int
    coding: Name = ""  # if states are coded with `auto`: the SPEC that suits this child's link
    lost: bool = False  # messages after `have` are lost on the way: send them again at once


@dataclass(frozen=True, slots=True)
class Pull(Message):
    """Child to shard: the request for the master copy."""

    worker: int
    epoch: int
    request: int  # number, from 1 on; the answer repeats it
    clock: int  # answer once all updates of this child before `clock` are folded
    last: bool = False  # the child has done its last step, and asks for the model that all children end with
    whole: bool = False  # the child takes all values, and no difference to a publication


@dataclass(frozen=True, slots=True)
class State(Message):
    """Shard to child: one part of a publication, or of the answer to a Pull, keys [begin, end).

    `settled`: the state contains all own updates of this child below this clock, and all updates that were folded with
    them. It is the min clock, and smaller for a child that was late (--quorum).
    """

    worker: int
    epoch: int
    request: int  # number of the Pull that this answers; 0: a publication
    part: int  # number of this part, from 0 on
    parts: int  # number of all parts
    begin: int
    end: int
    whole: bool  # the parts have all keys, and replace the child's pulled state; False: they are a difference
    add: bool  # of a difference: True: add the values; False: the values replace those of their keys
    publication: int  # of an answer that is a difference: the publication to which it is one
    min_clock: int
    settled: int
    contains: Weights  # clock, weight: own updates >= `settled` in this state, and the weight of each fold
    sent_ns: int  # by the shard's system clock
    codec: int
    payload: Buffer
    gain: float = 1.0  # sum of the weights of a mean of updates: the weight of the residual in the replica
    ahead: float = 1.0  # weight of an own update in flight in the replica
    agreement: float = 0.0  # length of such a mean over that of one update; 0: not measured
    steps: int = 0  # the run's steps before `min_clock`: of each round the most of one worker (--local-seconds); else 0


@dataclass(frozen=True, slots=True)
class RowsRequest(Message):
    """Worker to shard: the request for rows of an embedding table. A read: the shard answers each copy of it."""

    worker: int
    epoch: int
    request: int  # the answer repeats it
    clock: int  # answer once the rows may be computed on with this clock, and all own updates before it are folded
    payload: Buffer  # the table and the numbers of the rows, without values (compression/rows.py)


@dataclass(frozen=True, slots=True)
class RowsAnswer(Message):
    """Shard to worker: the answer to a RowsRequest: [rows, dim] in the order asked, coded as the last byte says.

    compression/rows.py has the codings.
    """

    worker: int
    epoch: int
    request: int
    sent_ns: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class MomentsRequest(Message):
    """Worker to shard: the request for state of the shard's optimizer as it is now. A read, as RowsRequest."""

    worker: int
    epoch: int
    request: int  # the answer repeats it
    begin: int
    end: int
    name: Name  # of one array of the state, such as exp_avg; "": the list of all arrays


@dataclass(frozen=True, slots=True)
class MomentsAnswer(Message):
    """Shard to worker: the answer to a MomentsRequest.

    With a name: float32[end - begin], 0 for keys without a value. Without a name: rows [tensor, name, value] (msgpack);
    value None means one value for each key.
    """

    worker: int
    epoch: int
    request: int
    clock: int  # min clock of the state
    sent_ns: int
    payload: Buffer
