"""The effects that machines ask of their runners, and the events that a `Member` gives its owner.

How it works
1. A runner hands a machine a message or a tick, with the time.
2. The machine changes its own state and returns a list of effects. It does nothing else.
3. The runner carries the effects out in their order: it sends messages, writes files, ends the process.

Which effect goes where
- Send, SendToPeer, Log, WriteCheckpoint, LoadCheckpoint, StartServing, StopProcess: a server machine or a standby asks
  its runner (`ServerEffect`, `CopyEffect`).
- "Member:" classes: a `Member` gives them to its owner, the engine of a worker or the server of a cluster
  (`MemberEffect`). Those of `OfRun` are about the place in the run, those of `OfShard` come from a `Session` and go to
  the `Exchange` with that shard, those of `OfPeers` come from `GossipPeers` and go to `GossipDriver`.
- "Driver:" classes: a `GossipDriver` asks `GossipPeers` (`PeerSay`).
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages import Buffer, Message, Offer, Roster, State

NS = 1_000_000_000  # one second, in the unit of every `now_ns`


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a child or to a shard of the parent."""

    peer: bytes | int  # bytes: the routing id of a child of this server; int: the number of a shard of the parent
    message: Message


@dataclass(frozen=True, slots=True)
class Log:
    """Write one event, a name and plain values, to the record and the console of a server."""

    event: str
    values: dict[str, object]


@dataclass(frozen=True, slots=True)
class WriteCheckpoint:
    """Write the store to disk now, as the state of `clock`."""

    clock: int


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """Go back to the checkpoint of `clock` before the next message is handled.

    The runner reads the checkpoint into the store and deletes all later ones, which are of an earlier generation.
    `clock` -1: there is none to read.
    """

    clock: int


@dataclass(frozen=True, slots=True)
class StopProcess:
    """End the process once all messages are sent: the run is over, or failed."""

    code: int = 0  # exit code; 0: the run is over
    text: str = ""  # the error in one sentence, if `code` > 0


@dataclass(frozen=True, slots=True)
class StartServing:
    """This server serves from now on. The runner reports it to the machine as an event."""

    view: int  # in which it serves
    standby: str  # address of its standby; "": none


@dataclass(frozen=True, slots=True)
class ServerChanged:
    """Member: the standby serves from now on. Its shards listen on `ports`, on the host of `address`."""

    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MemberWelcomed:
    """Member: the coordinator has answered Hello with a Welcome."""

    rank: int
    world_size: int  # number of workers of the run
    settings: bytes  # of the run, packed (`Settings`)
    ports: tuple[int, ...]  # of each shard
    hosts: tuple[str, ...] = ()  # as in Welcome


@dataclass(frozen=True, slots=True)
class MemberStarted:
    """Member: this member has a place in the run, and computes from `clock` on."""

    worker: int
    epoch: int
    clock: int
    ranges: tuple[tuple[int, int], ...]  # keys [begin, end) of each shard
    buffers: bytes  # newest module buffers of the run, packed, or b""
    again: bool  # the member has rejoined: begin anew
    settings: bytes = b""  # of the run now, as in MemberWelcomed


@dataclass(frozen=True, slots=True)
class PushesPaused:
    """Member: push no update from clock `at` on, or from its own on (`holds_apart`). Keys or plan change next."""

    at: int  # -1: the change is off, push as before
    number: int = 0  # of the Reshard


@dataclass(frozen=True, slots=True)
class MemberResharded:
    """Member: the keys are cut anew, or the run has another plan. The member goes on with these shards in a new epoch.

    The shards have all updates before `clock`. The residuals and the clock of the member stay.
    """

    worker: int
    epoch: int
    clock: int
    ranges: tuple[tuple[int, int], ...]  # keys [begin, end) of each shard
    ports: tuple[int, ...]
    hosts: tuple[str, ...]  # as in Welcome
    settings: bytes  # of the run from `clock` on, packed


@dataclass(frozen=True, slots=True)
class GiveWeights:
    """Member: send this member's weights to the shard. The run has no weights, and takes these or a mean with them."""

    shard: int
    round: int = -1  # of a model in a file here (gossip); -1: the weights that the worker computes on
    rank: int = -1  # of the worker that wrote that file


@dataclass(frozen=True, slots=True)
class StatePart:
    """Member: one part of a whole state, before the others are here. `StateArrived` has it again.

    It has no payload there if the owner asked for that (`Member.write_in_place`).
    """

    shard: int
    state: State


@dataclass(frozen=True, slots=True)
class StateArrived:
    """Member: all parts of one publication: a difference to the one before it, or a whole state."""

    shard: int
    parts: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class MasterArrived:
    """Member: all parts of the master copy that a Pull asked for at `clock`."""

    shard: int
    clock: int
    parts: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class RowsArrived:
    """Member: the rows that RowsRequest `request` asked for, float32[rows, dim] as bytes."""

    shard: int
    request: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class MomentsArrived:
    """Member: the answer to MomentsRequest `request`. `clock` and `payload` as in `MomentsAnswer`."""

    shard: int
    request: int
    clock: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class PushSettled:
    """Member: the shard has folded update `clock` into its model."""

    shard: int
    clock: int


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """Member: what its messages show of the link since the last reading. 0 bytes: no message was timed that way."""

    round_trip_ns: int
    up_bytes: int
    up_ns: int  # time that `up_bytes` took
    down_bytes: int
    down_ns: int


@dataclass(frozen=True, slots=True)
class BuffersRequested:
    """Member: the coordinator asks for the module's buffers."""


@dataclass(frozen=True, slots=True)
class BuffersArrived:
    """Member: the module's buffers of the run, packed; b"": this worker's own are those of the run."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class RangeArrived:
    """Member: the answer to RangeRequest `number`. `index` and `over` as in `RangeAnswer`."""

    number: int
    index: int
    over: bool


@dataclass(frozen=True, slots=True)
class ServerStops:
    """Member: the user stops the server, and the server takes the workers' models before it ends (gossip)."""


@dataclass(frozen=True, slots=True)
class AgreementArrived:
    """Member: the answer to AgreeRequest `number`: the value that all workers get."""

    number: int
    value: float


@dataclass(frozen=True, slots=True)
class MemberFailed:
    """Member: the session is over, with an error."""

    code: int  # a `RefuseCode`
    text: str  # one sentence for the user


@dataclass(frozen=True, slots=True)
class MemberLeft:
    """Member: this member has left the run. The coordinator has acknowledged its Leave, if there is a server."""


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send `message` to the peer at `address`."""

    address: str
    message: Message


@dataclass(frozen=True, slots=True)
class RosterChanged:
    """Member: a new roster: the peers that may mix from now on."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class OfferArrived:
    """Member: all parts of a peer's side of an exchange."""

    peer: int
    parts: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class ModelRequested:
    """Member: a new peer asks for the whole model."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """Member: this peer has done its last step."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Member: this peer is lost. It was awaited and silent for a lease, or it sent a message that is not valid."""

    peer: int
    why: str  # a clause for the log


@dataclass(frozen=True, slots=True)
class PeersSettled:
    """Member: at the end, every peer has acknowledged all offers of this node."""


@dataclass(frozen=True, slots=True)
class ServerGone:
    """Member: the server does not answer, and the run goes on without it (gossip)."""


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Driver: send all parts of this node's side of one exchange to the peer that they name."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class RequestModel:
    """Driver: ask this peer for its whole model."""

    peer: int


@dataclass(frozen=True, slots=True)
class AnnounceEnd:
    """Driver: the last step is done. Tell all peers, again and again, until EndAnnouncement."""


@dataclass(frozen=True, slots=True)
class EndAnnouncement:
    """Driver: the last round is mixed. Await no peer any more."""


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Driver: drop all further messages of this peer."""

    peer: int


ServerEffect = Send | SendToPeer | Log | WriteCheckpoint | LoadCheckpoint | StopProcess
CopyEffect = Send | SendToPeer | Log | StartServing | StopProcess
OfRun = (
    MemberWelcomed
    | MemberStarted
    | ServerChanged
    | PushesPaused
    | MemberResharded
    | BuffersRequested
    | BuffersArrived
    | RangeArrived
    | AgreementArrived
    | ServerStops
    | LinkMeasured
    | ServerGone
    | MemberFailed
    | MemberLeft
)
OfShard = GiveWeights | StatePart | StateArrived | MasterArrived | RowsArrived | MomentsArrived | PushSettled
OfPeers = RosterChanged | OfferArrived | ModelRequested | PeerEnded | PeerLost | PeersSettled
MemberEffect = Send | SendToPeer | OfRun | OfShard | OfPeers
PeerSay = SendOffer | RequestModel | AnnounceEnd | EndAnnouncement | DropPeer
