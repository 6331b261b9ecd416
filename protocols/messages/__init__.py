"""Every message of Narrows: its class, its number on the wire, and the connection that carries it.

How it works
The classes stand in files by the conversation that they belong to. Sender and receiver use the same class.

    join.py       a child comes into a run: its place, its model, the first weights; it leaves, or a server refuses it
    push.py       a child sends an update to a shard, and the shard acknowledges the update
    state.py      a child takes the state of a shard: publications, the master copy, rows of tables, moments
    control.py    heartbeats, buffers, sample ranges, means between child and coordinator; Ledger and Report of shards
    gossip.py     workers or clusters exchange their models with each other
    failover.py   a standby copies a server and takes over from it
    reshard.py    keys move to other shards, also on another machine, or a run changes its plan
    pipeline.py   the stages of a pipeline send tensors to each other
    distillation.py   a student asks a teacher for soft targets
    base.py       Message, the base class of all; the types of fields and the checks of these

This file has the tables. `KINDS` gives each class its number, and protocols/wire.py makes frames of a message by it.
docs/protocol.md says when a machine sends which message.

Rules
- A message is a header (all fields but `payload`) and at most one payload frame. No transport looks into the payload.
  `codec` names the coding of the payload (narrows.compression, CODECS). The sender and the final receiver alone use it.
- A number of `KINDS` is never used twice. 32 to 47 are between peers (gossip).
- Every message of a member names the epoch in which the coordinator let that member in (docs/protocol.md).
- The replies in `TIMED` carry the server's send time. So a session always knows the round trip of its link.
"""

from __future__ import annotations

from narrows.protocols.messages.base import (
    CHECKS,
    CLOCK_MAX,
    INT_MAX,
    LIST_MAX,
    TEXT_MAX,
    Buffer,
    Ints,
    Message,
    Name,
    Pair,
    Pairs,
    PushStatus,
    Quads,
    RefuseCode,
    Sets,
    Texts,
    Triples,
    Weights,
)
from narrows.protocols.messages.control import (
    AgreeAnswer,
    AgreeRequest,
    Buffers,
    BuffersRequest,
    Heartbeat,
    HeartbeatAck,
    Ledger,
    RangeAnswer,
    RangeRequest,
    Report,
)
from narrows.protocols.messages.distillation import (
    TeacherAnswer,
    TeacherBeat,
    TeacherHello,
    TeacherRequest,
    TeacherWelcome,
)
from narrows.protocols.messages.failover import (
    FailoverNotice,
    FailoverVote,
    KeepServing,
    ReplicationBegin,
    ReplicationEntry,
    ReplicationFollow,
    ReplicationProgress,
)
from narrows.protocols.messages.gossip import GossipEnded, ModelRequest, Offer, OfferAck, Ping, Roster, pair_name
from narrows.protocols.messages.join import (
    MODELS_MAX,
    NAME_BYTES,
    WORKERS_MAX,
    Declare,
    FirstWeights,
    Hello,
    Leave,
    LeaveAck,
    NeedWeights,
    Ready,
    Refuse,
    Welcome,
    check_name,
    name_of,
)
from narrows.protocols.messages.pipeline import PipelineBeat, PipelineTensor
from narrows.protocols.messages.push import PARTS_MAX, HandOver, Push, PushAck
from narrows.protocols.messages.reshard import (
    FileAnswer,
    FileRequest,
    RemoteShardsGrant,
    RemoteShardsOffer,
    RemoteShardsWish,
    Reshard,
)
from narrows.protocols.messages.state import (
    CREDIT_MAX,
    Follow,
    MomentsAnswer,
    MomentsRequest,
    Pull,
    RowsAnswer,
    RowsRequest,
    State,
)

__all__ = [
    "CHECKS",
    "CLOCK_MAX",
    "CONTROL",
    "CREDIT_MAX",
    "INT_MAX",
    "KINDS",
    "KIND_OF",
    "LIST_MAX",
    "MODELS_MAX",
    "NAME_BYTES",
    "OF_COPIES",
    "PARTS_MAX",
    "TEXT_MAX",
    "TIMED",
    "WORKERS_MAX",
    "AgreeAnswer",
    "AgreeRequest",
    "Buffer",
    "Buffers",
    "BuffersRequest",
    "Declare",
    "FailoverNotice",
    "FailoverVote",
    "FileAnswer",
    "FileRequest",
    "FirstWeights",
    "Follow",
    "GossipEnded",
    "HandOver",
    "Heartbeat",
    "HeartbeatAck",
    "Hello",
    "Ints",
    "KeepServing",
    "Leave",
    "LeaveAck",
    "Ledger",
    "Message",
    "ModelRequest",
    "MomentsAnswer",
    "MomentsRequest",
    "Name",
    "NeedWeights",
    "Offer",
    "OfferAck",
    "Pair",
    "Pairs",
    "Ping",
    "PipelineBeat",
    "PipelineTensor",
    "Pull",
    "Push",
    "PushAck",
    "PushStatus",
    "Quads",
    "RangeAnswer",
    "RangeRequest",
    "Ready",
    "Refuse",
    "RefuseCode",
    "RemoteShardsGrant",
    "RemoteShardsOffer",
    "RemoteShardsWish",
    "ReplicationBegin",
    "ReplicationEntry",
    "ReplicationFollow",
    "ReplicationProgress",
    "Report",
    "Reshard",
    "Roster",
    "RowsAnswer",
    "RowsRequest",
    "Sets",
    "State",
    "TeacherAnswer",
    "TeacherBeat",
    "TeacherHello",
    "TeacherRequest",
    "TeacherWelcome",
    "Texts",
    "Triples",
    "Weights",
    "Welcome",
    "beside",
    "check_name",
    "name_of",
    "pair_name",
]

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
    20: RowsRequest,
    21: RowsAnswer,
    22: MomentsRequest,
    23: MomentsAnswer,
    11: Heartbeat,
    12: HeartbeatAck,
    13: Leave,
    14: LeaveAck,
    15: Refuse,
    16: Buffers,
    18: BuffersRequest,
    60: RangeRequest,
    61: RangeAnswer,
    62: AgreeRequest,
    63: AgreeAnswer,
    24: Ledger,
    25: Report,
    26: Roster,
    50: Reshard,
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
    66: TeacherHello,
    67: TeacherWelcome,
    68: TeacherRequest,
    69: TeacherAnswer,
    70: TeacherBeat,
}
# A member sends these messages over a connection of their own: behind a large push a heartbeat would arrive after the
# lease. They stay in order: the last buffers of a worker come before its Leave.
CONTROL = (Hello, Declare, Heartbeat, Buffers, Leave, FailoverVote, RangeRequest, AgreeRequest, PipelineBeat)
OF_COPIES = (
    ReplicationFollow,
    ReplicationProgress,
    FailoverNotice,
    FailoverVote,
)  # between a server, its standby, and the members that vote


def beside(message: Message) -> bool:
    """True if the runner handles the message itself: it is no event of the machine."""
    return isinstance(message, (*OF_COPIES, FileRequest)) or (
        isinstance(message, RemoteShardsOffer) and not message.token
    )


# A server's runner writes the send time into these: the machine made them earlier, before it folded and published.
TIMED = (PushAck, State, RowsAnswer, MomentsAnswer, HeartbeatAck)
KIND_OF = {message: number for number, message in KINDS.items()}
