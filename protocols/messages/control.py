"""The coordinator with each child while the run goes on, and with each shard of its server.

How it works, between child and coordinator
- `Heartbeat` shows that a child lives. The coordinator answers `HeartbeatAck`. A child that is silent for a lease
  expires.
- `BuffersRequest` asks for the module's buffers of the run (BatchNorm); the coordinator answers `Buffers`. The live child
  of the lowest rank sends its own `Buffers` to the coordinator when a `PushAck` (push.py) asks for them.
- `RangeRequest` asks for the next samples of the script; the coordinator answers `RangeAnswer`.
- `AgreeRequest` hands over a number of the script; the coordinator answers `AgreeAnswer`, the mean over all workers.

How it works, between coordinator and shard
1. A shard sees something: a whole update, a new state, a finished checkpoint. It sends `Report` to the coordinator.
2. The coordinator decides: members, the clock that closes and its set of updates, the next checkpoint. It sends
   `Ledger` to every shard, with the newest report that it has seen (`report_seen`).
3. The shard obeys, and sends `Report` with the newest ledger that it has seen (`ledger_seen`).

Each `Ledger` and each `Report` replaces all before it. So a message that is lost, repeated or late costs time and
nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter

from narrows.protocols.messages.base import Buffer, Ints, Message, Name, Pairs, Sets, Triples, Weights


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """Child to coordinator: the child is live."""

    worker: int
    epoch: int
    sent_ns: int  # by the child's system clock
    roster: int = 0  # epoch of the newest Roster that the child has; the coordinator answers with a newer one (gossip)
    below: str = ""  # of a cluster: a line for itself and one for each member below it
    ended: bool = False  # the worker has done its last step, and answers its peers until all have (gossip)
    move: int = (
        0  # number of the newest Reshard that the child has carried out; the coordinator answers with a newer one
    )
    copied: bool = False  # of a cluster: its standby has a copy of all, and goes on if this connection ends
    road_ns: int = 0  # the longest recent round trip of a heartbeat
    summary: bytes = b""  # figures of the child and of all below it (protocols/member/heartbeat_summary.py), packed
    hold: int = -1  # the clock from which on the child pushes no update, as `move` asks; -1: that of the Reshard


@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    """Coordinator to child: the answer to a Heartbeat, or a probe of the connection."""

    worker: int
    epoch: int
    echo_ns: int  # `sent_ns` of the Heartbeat; 0: a probe, which answers none
    received_ns: int  # when the Heartbeat came, by the server's system clock
    sent_ns: int  # by the same clock
    tree: str = ""  # for a cluster: all levels of the tree, from the root down, a line each
    clock: int = 0  # of the run
    waits: Name = ""  # the members that the run waits for, a clause; "": none
    stops: bool = False  # the user stops the server: hand over your model (gossip)


@dataclass(frozen=True, slots=True)
class Buffers(Message):
    """The module's buffers: from the live worker of the lowest rank to the coordinator, or in answer to BuffersRequest."""

    worker: int
    epoch: int
    clock: int  # updates of the sender; -1 in an answer: the worker's own buffers are the run's, so it sends them
    payload: Buffer  # the buffers, packed


@dataclass(frozen=True, slots=True)
class BuffersRequest(Message):
    """Worker to coordinator: a request for the run's buffers, to show the shared model after `clock` own updates."""

    worker: int
    epoch: int
    clock: int


@dataclass(frozen=True, slots=True)
class RangeRequest(Message):
    """Worker to coordinator: the request for a range of samples to compute on.

    Ranges are numbered through all epochs: each epoch of `samples` samples has ceil(samples / size) ranges, the last
    one shorter. The coordinator gives the same answer to each copy of a request.
    """

    worker: int
    epoch: int
    number: int  # of this request, from 1 on
    clock: int  # of the update that the samples are for
    holds: int  # of the ranges given for `clock`, the number that the update will hold; the others go back
    samples: int  # of one epoch
    size: int  # samples of a range
    limit: int  # give only ranges with smaller numbers


@dataclass(frozen=True, slots=True)
class RangeAnswer(Message):
    """Coordinator to worker: the answer to a RangeRequest."""

    worker: int
    epoch: int
    number: int  # of the RangeRequest
    index: int  # number of the range; -1: none is free now
    over: bool  # all ranges before the limit are done


@dataclass(frozen=True, slots=True)
class AgreeRequest(Message):
    """Worker to coordinator: the script calls agree(value). The coordinator gives the same answer to each copy."""

    worker: int
    epoch: int
    number: int  # of this request, from 1 on
    at: int  # step of the script
    call: int  # number of the call within that step, from 0 on
    clock: int  # of the next update of this worker
    value: float
    weight: int  # number of workers that the value stands for; a cluster's is their mean


@dataclass(frozen=True, slots=True)
class AgreeAnswer(Message):
    """Coordinator to worker: the answer to an AgreeRequest: the mean of all values."""

    worker: int
    epoch: int
    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Ledger(Message):
    """Coordinator to shard: all that the coordinator has decided. The newest replaces all before it."""

    version: int  # number of this ledger
    generation: int
    restart_clock: int  # of the checkpoint that this generation starts from; -1: none
    epoch: int
    started: bool
    initialiser: int  # the worker whose weights are the first; -1: none chosen yet
    members: Triples  # worker, epoch joined, clock joined
    min_clock: int
    sets: Sets  # closed clocks that this shard may lack, each as: clock, worker, its update, worker, its update, ...
    departed: Pairs  # worker, update: of members that left, for the next set
    norms: Weights  # clock, L2 norm of the folded mean over all shards (max_grad_norm)
    checkpoint: int  # write a checkpoint when this clock is published; -1: none is due
    over: bool  # the run has ended
    report_seen: int  # version of the newest report of this shard that the coordinator has
    plan: bytes  # `ModelSpec`, packed; b"" once the shard has it
    sources: Pairs = ()  # worker, rank: the worker gives that rank's model; the first weights are their mean (gossip)
    source_round: int = -1  # round of the earlier run that these models are of
    finishes: int = 0  # 1 once all workers are done, at clock `finish_at`; of a cluster, since it has its place
    finish_at: int = 0
    # In a cluster with a parent:
    above: bytes = b""  # the cluster's place in the parent's run (ps/parent/parent_link.py); b"": none
    weights: int = -1  # the worker whose first weights are on every shard, to be sent to the parent
    roster: bytes = b""  # the newest Roster of the parent's run, encoded (gossip among clusters)
    alone: bool = False  # the parent is lost, and the run goes on without it (gossip)
    shared: int = -1  # clock of the newest checkpoint that all shards have; -1: none
    names: bytes = b""  # NAME_BYTES of each member: a routing id that begins so may send its messages
    settings: bytes = b""  # of this generation, packed; b"" once the shard is in it

    def decides_as(self, other: Ledger) -> bool:
        """True if the two differ at most in `version` and `report_seen`."""
        return DECISIONS(self) == DECISIONS(other)


DECISIONS = attrgetter(*(f.name for f in fields(Ledger) if f.name not in ("version", "report_seen")))


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Shard to coordinator: all that the shard has seen and done. The newest replaces all before it, but for `arrived`.

    `arrived` has what no report has that the coordinator has acknowledged.
    """

    shard: int
    port: int  # by which members reach the shard, 0 behind one port
    version: int  # number of this report
    incarnation: int  # of the shard's process; a new one means that the shard was restarted
    generation: int
    ledger_seen: int  # version of the newest ledger that the shard has
    epoch: int
    planned: bool  # the shard has the plan of the model
    weights_from: int  # the worker whose first weights are here; -1: none
    min_clock: int  # of the newest publication
    arrived: Pairs  # worker, clock: updates whose parts are all here
    norms: Weights  # clock, squared L2 norm of the folded mean on this shard
    checkpoints: Ints  # clocks of the checkpoints on disk
    finishing: Ints = ()  # workers that wait for the last model
    finishes: int = 0  # the ledger's `finishes`, as far as the shard has carried it out
    # In a cluster with a parent:
    from_above: int = 0  # epoch of the place whose first state of the parent is here
    at_rest: bool = True  # the parent has all that this shard has for it
    ended: bool = False  # the shard has done its last round with other clusters, but for the last of all (gossip)
    trouble: str = ""  # the error that ended this shard's session with the parent
    # Checkpoints:
    tried: int = -1  # clock of the newest checkpoint that the shard has tried to write
    wrote_ns: int = 0  # time that this took
    bytes_up: int = 0  # sent to the parent
    bytes_down: int = 0  # received from the parent
    host: Name = ""  # where members find a shard on another machine than shard 0; behind one port HOST:PORT
    saved: Pairs = ()  # worker, clock: updates in the checkpoint of `saved_at` (if updates are folded at once)
    saved_at: int = -1
    steps: int = 0  # the run's steps before `min_clock`, as in `State`
