"""Every message of Narrows, and nothing else: frozen, checked when made, the same type for sender and receiver.

Rules
- A message is a header (all fields but `payload`) and at most one payload frame, which no transport looks into. `codec`
  says how the payload is coded (narrows.compression, CODECS); only the two ends look at it.
- `KINDS` is the table of kinds. A number is never used twice; 32 to 47 are between peers (gossip).
- Every message that comes from a member names the epoch in which that member joined (docs/protocol.md).
- Each reply carries the server's receive and send times, so that a session always knows the round trip of its link.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from operator import attrgetter
from typing import Any

from narrows.protocols.errors import RemoteProtocolError

Buffer = bytes | bytearray | memoryview

TEXT_MAX = 4096  # characters of one string: longer ones are no message of ours
LIST_MAX = 1 << 20  # items of one list: a million tensors or members is beyond any run
MODELS_MAX = 1 << 10  # models in files that a worker of gossip offers a run which is resumed
WORKERS_MAX = 1 << 16  # a rank fits 16 bits; the table of members is sent whole
PARTS_MAX = 1 << 14  # messages of one push or state: 32 GiB of fp32 in frames of 2 MiB
CLOCK_MAX = 1 << 53  # exact in every language that reads a record
NAME_BYTES = 8  # of a routing id: a secret of who dials, by which a server knows it again


class RefuseCode(IntEnum):
    """Why a server refuses. The value is the exit code of the design where there is one."""

    UNREACHABLE = 3
    AUTHENTICATION = 4
    INCOMPATIBLE = 5
    SERVER_LOST = 6
    NOT_A_MEMBER = 64  # expired, or from before a restart: join again
    OVER = 65  # the run has ended
    TAKEN = 66  # another standby has this place; it may be lost soon


class PushStatus(IntEnum):
    """The promise of an ack. HELD: all buckets are here, send no more; FOLDED: it is in the model, for good."""

    HELD = 1
    FOLDED = 2


class HandOver(IntEnum):
    """Under gossip, the `samples` of a push: whose model it is."""

    STOPPED = 1  # of a worker that is stopped before its last step, or whose server is
    LAST = 2  # the mean of all, which they end with


class Wish(IntEnum):
    """The wish of a guest, which is a ps-serve on another machine with shards of this server."""

    STAY = 1
    GO = 2  # once its keys have moved back
    GONE = 3  # at once, and its keys are lost


CREDIT_MAX = 16  # publications that a child may have been sent and has not acknowledged: those that a shard keeps

Pair = tuple[int, int]
Pairs = tuple[Pair, ...]
Weights = tuple[tuple[int, float], ...]
Ints = tuple[int, ...]


INT_MAX = (1 << 63) - 1
INTS = frozenset({int, RefuseCode, PushStatus})  # types of a whole number; bool is none
PLAIN = {"float": float, "bool": bool, "bytes": bytes}  # of these annotations the type says all


def _is_int(value: object) -> bool:
    return isinstance(value, int) and -1 <= value <= INT_MAX and type(value) is not bool


def _is_rows(value: object, width: int, last: type) -> bool:
    if type(value) is not tuple or len(value) > LIST_MAX:
        return False
    if not value:
        return True
    if {*map(type, value)} != {tuple} or {*map(len, value)} != {width}:
        return False
    # By column: a ledger names every member, and is made each time that one joins.
    *columns, final = zip(*value, strict=True)
    if last is float:
        return {*map(type, final)} == {float} and all(map(_are_ints, columns))
    return all(map(_are_ints, (*columns, final)))


def _are_ints(values: tuple[Any, ...]) -> bool:
    return INTS.issuperset(map(type, values)) and min(values, default=0) >= -1 and max(values, default=0) <= INT_MAX


def _is_ints(value: object) -> bool:
    return type(value) is tuple and len(value) <= LIST_MAX and _are_ints(value)


# One checker for each annotation that a message may use; the messages below use no other.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": lambda v: type(v) is float,
    "bool": lambda v: type(v) is bool,
    "str": lambda v: type(v) is str and len(v) <= TEXT_MAX,
    "Name": lambda v: type(v) is str and len(v) <= TEXT_MAX and v.isprintable(),
    "bytes": lambda v: type(v) is bytes,
    "Buffer": lambda v: isinstance(v, (bytes, bytearray, memoryview)),
    "Ints": _is_ints,
    "Pairs": lambda v: _is_rows(v, 2, int),
    "Triples": lambda v: _is_rows(v, 3, int),
    "Quads": lambda v: _is_rows(v, 4, int),
    "Weights": lambda v: _is_rows(v, 2, float),
    "Sets": lambda v: type(v) is tuple and len(v) <= LIST_MAX and all(map(_is_ints, v)),
    "Texts": lambda v: type(v) is tuple and len(v) <= LIST_MAX and all(map(CHECKS["Name"], v)),
}
Name = str  # of one line, which may be shown as it is
Texts = tuple[str, ...]
Triples = tuple[tuple[int, int, int], ...]
Quads = tuple[tuple[int, int, int, int], ...]
Sets = tuple[Ints, ...]


def name_of(peer: bytes) -> bytes:
    """bytes[NAME_BYTES]: how the routing id of a peer begins."""
    return peer[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


def pair_name(one: bytes, other: bytes) -> str:
    """Return how the routing ids of two members begin by which they dial each other. It follows from the names of both, which
    the coordinator alone knows together.

    Args:
        one, other: bytes[NAME_BYTES], how the routing ids of each begin at its server.
    """
    low, high = sorted((one, other))
    return hashlib.sha256(low + high).hexdigest()[: 2 * NAME_BYTES]


def check_name(peer: bytes, name: bytes, worker: int) -> None:
    """Raise RemoteProtocolError unless `peer` has the name of this worker."""
    if name_of(peer) != name:
        raise RemoteProtocolError(f"it is not from worker {worker}, whose number it has")


class Message:
    """Base of all messages: checks its fields by their annotations when made. Raises RemoteProtocolError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        plain, count, types, rest, whole = _checks(kind)
        found = plain(self)  # most fields are looked at together, the whole numbers first
        numbers = found[:count]
        right = INTS.issuperset(map(type, numbers)) and tuple(map(type, found[count:])) == types
        right = right and min(numbers, default=0) >= -1 and max(numbers, default=0) <= INT_MAX
        for name, check, annotation in rest if right else whole:
            if not check(getattr(self, name)):
                raise RemoteProtocolError(
                    f"{type(self).__name__}.{name} is {_short(getattr(self, name))}, not {annotation}"
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


Checks = list[tuple[str, Callable[[Any], bool], str]]  # field, check, annotation


@cache
def _checks(kind: Any) -> tuple[Callable[[Any], tuple[Any, ...]], int, tuple[type, ...], Checks, Checks]:
    """Return a reader of the plain fields; how many of them are whole numbers, and the types of the others; the checks
    of the fields that are not plain; those of all."""
    whole = [(f.name, CHECKS[str(f.type)], str(f.type)) for f in fields(kind)]
    numbers = [name for name, _, annotation in whole if annotation == "int"]
    others = {name: PLAIN[annotation] for name, _, annotation in whole if annotation in PLAIN}
    if len(numbers) + len(others) < 2:
        return (lambda message: ()), 0, (), whole, whole
    rest = [row for row in whole if row[0] not in {*numbers, *others}]
    return attrgetter(*numbers, *others), len(numbers), tuple(others.values()), rest, whole


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Worker to coordinator: I want to join. `expect` is a msgpack map of the flags it was started with."""

    token: Name  # names this process and this attempt to join; a retry repeats it
    host: Name
    expect: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Coordinator to worker: your id, your rank, and the settings of the run (a msgpack map)."""

    token: str
    worker: int
    rank: int
    world_size: int
    epoch: int
    settings: bytes
    ports: Ints  # of each shard
    hosts: Texts = ()  # where each is, "" and (): on the host that the worker dialled


@dataclass(frozen=True, slots=True)
class Declare(Message):
    """Worker to coordinator: my model and optimizer (`ModelSpec`, packed). From here on it counts as a member."""

    worker: int
    epoch: int
    plan: bytes
    address: Name = ""  # where its peers reach it (gossip); of a cluster one for each shard, with spaces between them
    models: Pairs = ()  # rank, round: models of a run before that it has in files (gossip), at most MODELS_MAX


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """Coordinator to worker: the key ranges of each shard, and the clock to start from."""

    worker: int
    epoch: int
    clock: int
    ranges: Sets  # per shard: begin, end, begin, end, ...
    buffers: bytes  # newest module buffers of the run (BatchNorm), or empty


@dataclass(frozen=True, slots=True)
class NeedWeights(Message):
    """Shard to worker: the run has no weights yet and yours are to be the first, or in their mean."""

    worker: int
    epoch: int
    round: int = -1  # those of the model of this round, which you have in a file (gossip); -1: those that you have now
    rank: int = -1  # of the worker that wrote it


@dataclass(frozen=True, slots=True)
class FirstWeights(Message):
    """Worker to shard: one part of the first weights."""

    worker: int
    epoch: int
    part: int
    parts: int
    begin: int
    end: int
    codec: int
    payload: Buffer


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
    summary: bytes = b""  # figures of this member, and of all below it (protocols/member/summary.py), packed


@dataclass(frozen=True, slots=True)
class Move(Message):
    """Coordinator to worker: the keys are cut anew, or the run has another plan. The newest number replaces all before it.

    at >= 0, place 0: push no update from this clock on, until the next Move. place > 0: all updates before clock `at` are in
    the shards that are named here; go on with them at that clock, in the epoch `place`. at -1: go on as before.
    """

    worker: int
    epoch: int  # in which it joined, or came to the shards that it has
    number: int
    at: int
    place: int = 0
    ports: Ints = ()
    ranges: Sets = ()
    hosts: Texts = ()  # as in Welcome
    settings: bytes = b""  # of the run from that clock on, as in Welcome, with place > 0


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
class Leave(Message):
    """Worker (or the launcher, for a child that died) to coordinator. `clock`: its clock when it is done, else -1."""

    token: Name
    clock: int


@dataclass(frozen=True, slots=True)
class LeaveAck(Message):
    token: str


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
class Refuse(Message):
    """Server to worker, one sentence. `epoch` is the one refused (0: none), so that a late refusal is known as such."""

    code: int
    worker: int
    epoch: int
    text: str


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
    finishes: int = (
        0  # times that all workers were done since it has its place above, the last at clock `finish_at`; a root: 1
    )
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


@dataclass(frozen=True, slots=True)
class Roster(Message):
    """Coordinator to worker: who may mix with whom from now on (gossip)."""

    worker: int  # that it is for
    epoch: int
    started: bool
    members: Quads  # worker, epoch joined, rank, 0 for one that began with the run
    addresses: Texts  # of each member
    closed: bool = False  # all of them have done their last step, and nobody joins any more
    names: Texts = ()  # for each member: how the routing ids begin by which it and this worker dial each other
    round: int = 0  # that the run begins with


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """Peer to peer: one part of the sender's side of exchange `number` of this pair, keys [begin, end).

    `whole`: the model itself; else its difference to what the two share. `sample`: float32, what the sender's updates of
    its newest window sum up to at a sample of the keys, in part 0 of the first offer after that; else empty.
    """

    worker: int
    peer: int  # that it is for
    epoch: int  # of the sender's roster
    round: int
    number: int
    part: int
    parts: int
    begin: int
    end: int
    weight: float
    whole: bool
    codec: int
    payload: Buffer
    sample: bytes = b""


@dataclass(frozen=True, slots=True)
class OfferAck(Message):
    """Peer to peer: all parts of your side of exchange `number` are here."""

    worker: int
    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class GossipEnded(Message):
    """Peer to peer: I have done my last step, and mix with whoever asks until all have."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class ModelRequest(Message):
    """Peer to peer: I am new; the answer to this is an Offer of number -1, your whole model."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Peer to peer: are you there? Answered with the newest OfferAck."""

    worker: int
    peer: int


@dataclass(frozen=True, slots=True)
class ReplicationFollow(Message):
    """Standby to the shard that it copies: what is here of it. It acknowledges, and said again it is a sign of life."""

    shard: int  # -1: what must a server be told to stand by for you?
    have: int  # events up to this one, and what follows from them; -1: no machine
    life: int = -1  # of the shard, of which that is: an incarnation
    machine: int = -1  # of the machine as it was after this event ...
    parts: int = 0  # ... so many parts are here
    address: Name = ""  # where members find the standby (shard 0)


@dataclass(frozen=True, slots=True)
class ReplicationBegin(Message):
    """Shard 0 to a standby: what it must be told, a msgpack map."""

    told: bytes


@dataclass(frozen=True, slots=True)
class ReplicationEntry(Message):
    """Shard to its standby: event `number`, or where `parts` is not 0, a part of the machine as it was after that event."""

    life: int  # of the shard: its incarnation; events are counted anew in each
    number: int
    part: int
    parts: int
    about: bytes  # of an event: its kind, time, peer and values (ps/replication/events.py)
    frames: int  # of its message, 0: it has none
    header: bytes  # the first of them
    payload: Buffer  # the second; of a machine: this part of it


@dataclass(frozen=True, slots=True)
class ReplicationProgress(Message):
    """Shard to shard 0 of the same server, and the same between two that stand by: how far copying is."""

    shard: int
    view: int
    standby: Name  # which has all of this shard, or had it a moment ago: where members find it; "": none has
    port: int  # where this shard listens


@dataclass(frozen=True, slots=True)
class FailoverNotice(Message):
    """Who serves: shard 0 to members and to the other shards. Each change of who does has a number of its own.

    From the server that members know: it serves, and `standby` stands by, "": nobody does; not `decided`: it asks for votes.
    From the standby: it serves now, and its shards listen on `ports`, on the host where it was dialled.
    """

    view: int
    standby: Name
    decided: bool
    ports: Ints = ()


@dataclass(frozen=True, slots=True)
class FailoverVote(Message):
    """Member to the server, or to its standby: in view `view` I take you for the server, and nobody else."""

    worker: int
    epoch: int
    view: int
    attempt: int


@dataclass(frozen=True, slots=True)
class KeepServing(Message):
    """Standby to member: the server lives, and your vote does not count any more."""

    view: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RemoteShardsOffer(Message):
    """Guest to shard 0: it has room for shards of this server. Said again, it is a sign of life."""

    token: Name  # names it, and this attempt to join; "": what must its shards be told? ReplicationBegin answers
    host: Name  # where members find its shards
    shards: int  # that it has room for
    first: int  # the first of those that it has, -1: it knows of none
    wish: int  # a `Wish`


@dataclass(frozen=True, slots=True)
class RemoteShardsGrant(Message):
    """Shard 0 to a guest: which shards are its. The newest epoch and version replaces all before it."""

    token: Name
    epoch: int
    version: int
    first: int  # -1: none so far
    count: int
    shards: int  # that there are of this server
    target: int  # that there are to be
    over: bool  # none are its any more:
    code: int  # with this it ends, 0: done; NOT_A_MEMBER: join again
    text: str


@dataclass(frozen=True, slots=True)
class FileRequest(Message):
    """Shard of a guest to shard 0, which has the checkpoints of all: about the file of `shard` and `clock`."""

    number: int  # which the answer repeats
    what: int  # a `ArchiveJob` (ps/checkpoints/remote_archive.py)
    shard: int
    shards: int
    clock: int
    offset: int
    shared: int  # the newest clock that all shards have
    name: Name  # of a file that is coming, while it is not whole
    payload: Buffer


@dataclass(frozen=True, slots=True)
class FileAnswer(Message):
    """Shard 0 to a shard of a guest."""

    number: int
    size: int  # of the file
    clocks: Ints
    text: str  # why there is no answer, "" where there is one
    payload: Buffer


@dataclass(frozen=True, slots=True)
class PipelineTensor(Message):
    """Stage to stage: the next tensor of this sender to this receiver. `step`: of the sender's run, -1: of no step.
    Both ends know the shape: it does not travel."""

    plan: int
    worker: int
    life: int
    number: int
    step: int
    tag: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class PipelineBeat(Message):
    """Stage to stage: I live. `taken`: tensors of yours that my script has. `missed`: send again from this number on, -1:
    nothing. `left`: 0, 1 where I have finished, 2 + my exit code where I have failed (2 alone: nobody knows)."""

    plan: int
    worker: int
    life: int
    taken: int
    missed: int
    left: int


KINDS: dict[int, type[Message]] = {
    1: Hello,
    2: Welcome,
    3: Declare,
    4: Ready,
    5: NeedWeights,
    6: FirstWeights,
    7: Push,
    8: PushAck,
    9: Pull,
    10: State,
    17: Follow,
    20: RowsAsk,
    21: Rows,
    22: MomentsAsk,
    23: Moments,
    11: Heartbeat,
    12: HeartbeatAck,
    13: Leave,
    14: LeaveAck,
    15: Refuse,
    16: Buffers,
    18: BuffersAsk,
    60: RangeAsk,
    61: Range,
    62: AgreeAsk,
    63: Agreed,
    24: Ledger,
    25: Report,
    26: Roster,
    50: Move,
    27: ReplicationFollow,
    28: ReplicationBegin,
    29: ReplicationEntry,
    30: ReplicationProgress,
    31: FailoverNotice,
    48: FailoverVote,
    49: KeepServing,
    56: RemoteShardsOffer,
    57: RemoteShardsGrant,
    58: FileRequest,
    59: FileAnswer,
    32: Offer,
    33: OfferAck,
    34: GossipEnded,
    35: ModelRequest,
    36: Ping,
    64: PipelineTensor,
    65: PipelineBeat,
}
# These messages of a member go over a connection of their own: behind a large push a heartbeat would come after its
# lease. They keep one order: the last buffers of a worker come before its Leave.
CONTROL = (Hello, Declare, Heartbeat, Buffers, Leave, FailoverVote, RangeAsk, AgreeAsk, PipelineBeat)
OF_COPIES = (
    ReplicationFollow,
    ReplicationProgress,
    FailoverNotice,
    FailoverVote,
)  # between a server, its standby, and the members that choose


def beside(message: Message) -> bool:
    """It is no event of the machine that it comes to."""
    return isinstance(message, (*OF_COPIES, FileRequest)) or (
        isinstance(message, RemoteShardsOffer) and not message.token
    )


# A server's runner puts the send time into these: the machine made them before it folded and published.
TIMED = (PushAck, State, Rows, Moments, HeartbeatAck)
KIND_OF = {message: number for number, message in KINDS.items()}
