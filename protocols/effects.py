"""The effects that a machine asks of its runner. A machine returns lists of these; it does nothing itself."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages import Buffer, Message, Offer, Roster, State

NS = 1_000_000_000  # one second, in the unit of every `now_ns`


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `peer`: a routing id (bytes) is one of a server's children, a number a shard of the server above."""

    peer: bytes | int
    message: Message


@dataclass(frozen=True, slots=True)
class Log:
    """One event for the record and the console of a server: a name and plain values."""

    event: str
    values: dict[str, object]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Write the store to disk now, as the state of `clock`."""

    clock: int


@dataclass(frozen=True, slots=True)
class Load:
    """Go back to the checkpoint of `clock` before the next message is handled: read it into the store, and drop every
    later one, which is of a life that is over. -1: there is none to read."""

    clock: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is over: end the process once what was sent is out. `code` > 0: with this error, one sentence in `text`."""

    code: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Serve:
    """This server serves from now on, in this view; `standby`: the address of who stands by, "": nobody does. The machine is
    told by an event."""

    view: int
    standby: str


@dataclass(frozen=True, slots=True)
class Turned:
    """Member: the server is another one from now on: its shards listen on `ports`, on the host of `address`."""

    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Member: the coordinator knows us."""

    rank: int
    world_size: int
    settings: bytes
    ports: tuple[int, ...]
    hosts: tuple[str, ...] = ()  # as in Welcome


@dataclass(frozen=True, slots=True)
class Started:
    """Member: our place in the run. Comes again, with `again` set, when we had to rejoin: begin anew from `clock`."""

    worker: int
    epoch: int
    clock: int
    ranges: tuple[tuple[int, int], ...]
    buffers: bytes
    again: bool
    settings: bytes = b""  # of the run by now, as in Joined


@dataclass(frozen=True, slots=True)
class Held:
    """Member: push no update from clock `at` on, -1: push as before. Keys or plan change next. `number`: of the Move."""

    at: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """Member: the keys are cut anew, or the run has another plan (`settings`), and our place is with these shards, in another
    epoch. All that was pushed before `clock` is in; residuals and the clock stay."""

    worker: int
    epoch: int
    clock: int
    ranges: tuple[tuple[int, int], ...]
    ports: tuple[int, ...]
    hosts: tuple[str, ...]  # as in Welcome
    settings: bytes  # the same


@dataclass(frozen=True, slots=True)
class GiveWeights:
    """Member: the run has no weights yet, and ours are the first, or in their mean: send them to this shard.

    round: of the model that is meant, which is in a file here (gossip); -1: that which is computed on. rank: of its writer.
    """

    shard: int
    round: int = -1
    rank: int = -1


@dataclass(frozen=True, slots=True)
class StatePart:
    """Member: one part of a whole state that is still arriving, for who can use it at once."""

    shard: int
    state: State


@dataclass(frozen=True, slots=True)
class StateArrived:
    """Member: all parts of one publication, which adds to the one before it or is a whole state."""

    shard: int
    parts: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class MasterArrived:
    """Member: all parts of the master copy that was asked for at `clock`."""

    shard: int
    clock: int
    parts: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class RowsArrived:
    """Member: the rows that were asked for, float32[rows, dim] as bytes."""

    shard: int
    request: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class MomentsArrived:
    """Member: the answer to an ask for what the optimizer of a shard keeps; as in `Moments`."""

    shard: int
    request: int
    clock: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class PushSettled:
    """Member: update `clock` is in the shard's model."""

    shard: int
    clock: int


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """Member: what its messages told of the link since it was last asked. 0 bytes: nothing was timed that way."""

    round_trip_ns: int
    up_bytes: int
    up_ns: int
    down_bytes: int
    down_ns: int


@dataclass(frozen=True, slots=True)
class BuffersWanted:
    """Member: the coordinator asks for the module's buffers."""


@dataclass(frozen=True, slots=True)
class BuffersTold:
    """Member: the module's buffers of the run, packed, or b"" where this worker's own are those."""

    packed: bytes


@dataclass(frozen=True, slots=True)
class RangeTold:
    """Member: the answer to ask `number` for a range; as in `Range`."""

    number: int
    index: int
    over: bool


@dataclass(frozen=True, slots=True)
class ServerStops:
    """Member: the server is being stopped, and takes the models of its workers until then (gossip)."""


@dataclass(frozen=True, slots=True)
class AgreedTold:
    """Member: the answer to ask `number` for a value that all agree on."""

    number: int
    value: float


@dataclass(frozen=True, slots=True)
class Failed:
    """Member: the session is over. `code` is a `RefuseCode`."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Left:
    """Member: the coordinator knows that we are done."""


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send `message` to the peer at `address`."""

    address: str
    message: Message


@dataclass(frozen=True, slots=True)
class RosterNews:
    """Member: who may mix with whom from now on."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class OfferArrived:
    """Member: the whole of a peer's side of an exchange."""

    peer: int
    parts: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class AdoptAsked:
    """Member: a new peer asks for the whole model."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """Member: this peer has done its last step."""

    peer: int


@dataclass(frozen=True, slots=True)
class PeerLost:
    """Member: this peer is given up: it was awaited and has been silent for a lease, or what it says is nonsense."""

    peer: int
    why: str


@dataclass(frozen=True, slots=True)
class PeersSettled:
    """Member: at the end, every peer has all that was sent to it."""


@dataclass(frozen=True, slots=True)
class ServerGone:
    """Member: the server does not answer, and the run goes on without it (gossip)."""


@dataclass(frozen=True, slots=True)
class SendOffer:
    """Driver: send these, all parts of our side of one exchange, to the peer that they are for."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True)
class AskModel:
    """Driver: ask this peer for its whole model."""

    peer: int


@dataclass(frozen=True, slots=True)
class SayEnded:
    """Driver: the last step is done; say so until all have done theirs."""


@dataclass(frozen=True, slots=True)
class SayOver:
    """Driver: the last round is mixed; nobody is awaited any more."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Driver: this peer is not listened to any more."""

    peer: int


ServerEffect = Send | SendToPeer | Log | Checkpoint | Load | Stop
CopyEffect = Send | SendToPeer | Log | Serve | Stop
OfRun = (
    Joined
    | Started
    | Turned
    | Held
    | Moved
    | BuffersWanted
    | BuffersTold
    | RangeTold
    | AgreedTold
    | ServerStops
    | LinkSeen
    | ServerGone
    | Failed
    | Left
)
OfShard = GiveWeights | StatePart | StateArrived | MasterArrived | RowsArrived | MomentsArrived | PushSettled
OfPeers = RosterNews | OfferArrived | AdoptAsked | PeerEnded | PeerLost | PeersSettled
MemberEffect = Send | SendToPeer | OfRun | OfShard | OfPeers
PeerSay = SendOffer | AskModel | SayEnded | SayOver | Drop
