"""Taking the model from a shard. A child asks; the shard answers.

How it works
1. The child sends `Follow` to each shard: the newest publication that it has, and how many more may be under way
   (`credit`).
2. The shard sends each later publication as soon as it makes it, in parts: `State` with the number of the publication.
   It stops once `credit` publications are not acknowledged. A child that is too far behind, or new, gets the whole
   state instead.
3. The next `Follow` acknowledges what has come. The newest `Follow` replaces all before it, so a lost one does no harm.

A child may ask for three things besides. Each answer repeats the number of the request.
- `Pull` asks for the master copy of the weights; the shard answers `State` with that request.
- `RowsAsk` asks for rows of an embedding table; the shard answers `Rows`.
- `MomentsAsk` asks for the state of the shard's optimizer; the shard answers `Moments`.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages.base import Buffer, Message, Name, Weights

CREDIT_MAX = 16  # publications that a child may have been sent and has not acknowledged: those that a shard keeps


@dataclass(frozen=True, slots=True)
class Follow(Message):
    """Worker to shard: what I have of the published state, and what may come next. The newest replaces all before it.

    The shard sends each publication after `have` as it is made, at most `credit` that are not acknowledged by a Follow. A
    whole state is sent alone, the newest only, and once it is one that `clock` may be computed on. One that says the same
    again asks for what has not come.
    """

    worker: int
    epoch: int
    clock: int  # that the next whole state is for
    have: int  # the publication that is here, and with it all before, -1: none
    credit: int
    coding: Name = ""  # SPEC that suits this worker's link, where published states are coded with `auto`
    lost: bool = False  # what was sent after `have` does not come any more: send it again at once


@dataclass(frozen=True, slots=True)
class Pull(Message):
    """Worker to shard: the master copy itself, whole, as soon as all my updates before `clock` are in. `last`: this worker has
    done its last step, and waits for the model that all workers end with."""

    worker: int
    epoch: int
    request: int  # from 1 on
    clock: int
    last: bool = False


@dataclass(frozen=True, slots=True)
class State(Message):
    """Shard to worker: one part of publication `publication`, or where `request` is one, of the answer to that Pull.

    `whole`: the parts are all keys, and replace what is here. Else they are what this publication changed: payloads to be
    added (`add`), or values of their keys.
    `settled`: own updates below it are all in this state, and what else was folded with them: min_clock, and behind it for
    a worker that was late (--quorum).
    `contains`: own clocks >= settled that are in this state, each with the weight it was folded at.
    `gain`: what all weights of a mean of updates sum up to, and so the weight of a residual in the replica; `ahead`: that of an
    own update in flight. `agreement`: how long such a mean is beside its updates, 0: not measured.
    """

    worker: int
    epoch: int
    request: int  # 0: a publication
    part: int
    parts: int
    begin: int
    end: int
    whole: bool
    add: bool
    publication: int
    min_clock: int
    settled: int
    contains: Weights
    sent_ns: int
    codec: int
    payload: Buffer
    gain: float = 1.0
    ahead: float = 1.0
    agreement: float = 0.0


@dataclass(frozen=True, slots=True)
class RowsAsk(Message):
    """Worker to shard: rows of a table, as soon as they may be computed on with `clock` and all my updates before it are in.
    An ask is a read: said again, it is answered again."""

    worker: int
    epoch: int
    request: int  # the answer repeats it
    clock: int
    payload: Buffer  # the table and its rows (compression/rows.py), without values


@dataclass(frozen=True, slots=True)
class Rows(Message):
    """Shard to worker: the answer to that ask, [rows, dim] in its order, coded as its last byte says (compression/rows.py)."""

    worker: int
    epoch: int
    request: int
    sent_ns: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class MomentsAsk(Message):
    """Worker to shard: values [begin, end) of what its optimizer keeps under this name, as they are now. Without a name: of
    which tensors it keeps what. An ask is a read, as that for rows."""

    worker: int
    epoch: int
    request: int  # the answer repeats it
    begin: int
    end: int
    name: Name


@dataclass(frozen=True, slots=True)
class Moments(Message):
    """Shard to worker: the answer to that ask, float32[end - begin], zeros where nothing is kept; or rows [tensor, name, value]
    (msgpack), value None where there is one for each key. `clock`: the min_clock that it is of."""

    worker: int
    epoch: int
    request: int
    clock: int
    sent_ns: int
    payload: Buffer
