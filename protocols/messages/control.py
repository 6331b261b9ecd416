"""The coordinator with each child while the run goes on, and with each shard of its server.

How it works, between child and coordinator
- `Heartbeat` shows that a child lives. The coordinator answers `HeartbeatAck`. A child that is silent for a lease
  expires.
- `BuffersAsk` asks for the module's buffers of the run (BatchNorm); the coordinator answers `Buffers`. The live child
  of the lowest rank sends its own `Buffers` to the coordinator when a `PushAck` (push.py) asks for them.
- `RangeAsk` asks for the next samples of the script; the coordinator answers `Range`.
- `AgreeAsk` hands over a number of the script; the coordinator answers `Agreed`, the mean over all workers.

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
    worker: int
    epoch: int
    sent_ns: int
    roster: int = 0  # epoch of the newest Roster that is here; a newer one is the answer (gossip)
    below: str = ""  # of a cluster: itself and all below it, a line each
    ended: bool = False  # this worker has done its last step, and answers its peers until all have (gossip)
    move: int = 0  # number of the newest Move that is here; a newer one is the answer
    copied: bool = False  # a standby has all that is here: where this connection ends, that one goes on (clusters)
    road_ns: int = 0  # the longest round trip of a heartbeat of late
    summary: bytes = b""  # figures of this member, and of all below it (protocols/member/heartbeat_summary.py), packed


@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    worker: int
    epoch: int
    echo_ns: int  # the `sent_ns` that is answered
    received_ns: int
    sent_ns: int
    tree: str = ""  # for a cluster: all levels, from the root down, a line each
    clock: int = 0  # of the run
    waits: Name = ""  # for which members the run waits, a clause; "": for none
    stops: bool = False  # the server is being stopped: hand over your model (gossip)


@dataclass(frozen=True, slots=True)
class Buffers(Message):
    """Lowest live rank to coordinator: the module's buffers, packed, as they are after `clock` updates of it. Coordinator to a
    worker that asked: those of the run. `clock` -1 there: its own are those of the run, and it sends them."""

    worker: int
    epoch: int
    clock: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class BuffersAsk(Message):
    """Worker to coordinator: it shows the shared model after `clock` updates of its own, and needs its buffers."""

    worker: int
    epoch: int
    clock: int


@dataclass(frozen=True, slots=True)
class RangeAsk(Message):
    """Worker to coordinator: which samples may I compute on for my update `clock`? The ranges of all epochs are counted
    through: each epoch of `samples` has ceil(samples / size), the last one shorter. `holds`: so many of those that were handed
    out for this clock will be in it; the others go back. Asked again under the same number, it has the same answer."""

    worker: int
    epoch: int
    number: int  # of this ask, from 1 on
    clock: int
    holds: int
    samples: int
    size: int
    limit: int  # only ranges before this one


@dataclass(frozen=True, slots=True)
class Range(Message):
    """Coordinator to worker: the answer to that ask. `over`: all ranges before its limit are done."""

    worker: int
    epoch: int
    number: int
    index: int  # of the range, -1: there is none now
    over: bool


@dataclass(frozen=True, slots=True)
class AgreeAsk(Message):
    """Worker to coordinator: my script calls agree(value) at its step `at`. Asked again under the same number, it has the same
    answer."""

    worker: int
    epoch: int
    number: int  # of this ask, from 1 on
    at: int
    call: int  # which of the calls at that step this is, from 0 on
    clock: int  # of the next update of this worker
    value: float
    weight: int  # workers that are behind it: more than one of a cluster


@dataclass(frozen=True, slots=True)
class Agreed(Message):
    """Coordinator to worker: the answer to that ask, the mean of all values."""

    worker: int
    epoch: int
    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Ledger(Message):
    """Coordinator to shard: all that the coordinator has decided. The newest replaces all before it."""

    version: int
    generation: int
    restart_clock: int  # the checkpoint that this generation starts from, -1: none
    epoch: int
    started: bool
    initialiser: int  # the worker whose weights are the first, -1: nobody yet
    members: Triples  # worker, epoch joined, clock joined
    min_clock: int
    sets: Sets  # of closed clocks that this shard may lack: clock, worker, its update, worker, its update, ...
    departed: Pairs  # worker, update: of those who left, for the next set
    norms: Weights  # clock, L2 norm of the folded mean over all shards (max_grad_norm)
    checkpoint: int  # write one when this clock is published, -1: none asked for
    over: bool
    report_seen: int
    plan: bytes  # empty once the shard has it
    sources: Pairs = ()  # worker, rank: who gives the model of which rank to the mean that the first weights are (gossip)
    source_round: int = -1  # and of which round of the run before
    finishes: int = 0  # 1 once all workers were done, at clock `finish_at`; of a cluster, since it has its place above
    finish_at: int = 0
    # In a cluster with a server above:
    above: bytes = b""  # its place in that run (ps/parent/parent_link.py), empty while it has none
    weights: int = -1  # the worker whose first weights are on every shard, to be handed up
    roster: bytes = b""  # the newest Roster of that run, encoded (gossip among clusters)
    alone: bool = False  # the server above is gone, and the run goes on without it (gossip)
    shared: int = -1  # the newest checkpoint that all shards have, -1: none
    names: bytes = b""  # of each member, NAME_BYTES: who speaks for it has this name
    settings: bytes = b""  # of this generation, packed; empty once the shard is in it

    def decides_as(self, other: Ledger) -> bool:
        """Only the numbers of the messages differ."""
        return DECISIONS(self) == DECISIONS(other)


DECISIONS = attrgetter(*(f.name for f in fields(Ledger) if f.name not in ("version", "report_seen")))


@dataclass(frozen=True, slots=True)
class Report(Message):
    """Shard to coordinator: all that it has seen and done. The newest replaces all before it, but for `arrived`, which has
    what is not in a report that the coordinator has shown to have."""

    shard: int
    port: int
    version: int
    incarnation: int  # of this process: a new one means that it was restarted
    generation: int
    ledger_seen: int
    epoch: int
    planned: bool
    weights_from: int
    min_clock: int  # published
    arrived: Pairs  # worker, clock: updates of it that are here whole
    norms: Weights  # clock, squared L2 norm of the folded mean on this shard
    checkpoints: Ints  # clocks of the checkpoints on disk
    finishing: Ints = ()  # workers that wait for the last model
    finishes: int = 0  # of the ledger's, that are done here
    # In a cluster with a server above:
    from_above: int = 0  # epoch of the place whose first state is here
    at_rest: bool = True  # the server above has all that this shard has for it
    ended: bool = False  # it has done its last round with other clusters, but for that of all (gossip)
    trouble: str = ""  # what ended the session of this shard
    # Checkpoints:
    tried: int = -1  # the clock of the newest that it has tried to write
    wrote_ns: int = 0  # how long that took
    bytes_up: int = 0  # to above, and from there
    bytes_down: int = 0
    host: Name = ""  # where members find a shard that is on another machine than shard 0
    saved: Pairs = ()  # worker, clock: what of it is in the checkpoint of `saved_at` (where updates are folded at once)
    saved_at: int = -1
