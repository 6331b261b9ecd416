"""The messages between the director of ps-probe and its machines, and their bytes: a name and fields, in msgpack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages import Buffer, Message, Name
from narrows.protocols.wire import pack, unpack

MESSAGE_BYTES_MAX = 64 << 10


@dataclass(frozen=True, slots=True)
class ProbeJoin(Message):
    """Machine to director: I am here. `host`: where others reach me, "": where this director is dialled. 0: not known."""

    name: Name
    host: Name
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ProbeStepTime(Message):
    """Machine to director: so long a step of the script takes here, 0: not known. From now on it measures."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ProbeBeat(Message):
    """A sign of life, and its answer."""

    number: int


@dataclass(frozen=True, slots=True)
class ProbeListen(Message):
    """Director to machine: open a port for whoever shows the token. `first`: for the first visit of this pair."""

    token: Name
    seconds: float
    first: bool


@dataclass(frozen=True, slots=True)
class ProbeListening(Message):
    """Its answer."""

    token: Name
    port: int


@dataclass(frozen=True, slots=True)
class ProbeDial(Message):
    """Director to machine: dial that port, and measure for so long and so much. `host` "": where you dial the director.

    most_0, most_1: bytes a second that may go from listener to dialler, and back; of a first visit, bytes in all.
    """

    token: Name
    host: Name
    port: int
    seconds: float
    first: bool
    most_0: int
    most_1: int
    round_trip_s: float


@dataclass(frozen=True, slots=True)
class ProbeReport(Message):
    """Machine to director: what it has seen of a try. `why` "": all went well. `flows`: packed rows of `flows.Flow`."""

    token: Name
    why: Name
    flows: bytes


@dataclass(frozen=True, slots=True)
class ProbeEnd(Message):
    """Director to machine: all is over, or `why` you cannot take part."""

    why: Name


KINDS: dict[str, type[Message]] = {
    "Join": ProbeJoin,
    "Steps": ProbeStepTime,
    "Beat": ProbeBeat,
    "Listen": ProbeListen,
    "Opened": ProbeListening,
    "Dial": ProbeDial,
    "Report": ProbeReport,
    "End": ProbeEnd,
}  # by the name on the wire
NAMES = {kind: name for name, kind in KINDS.items()}


def encode(message: Message) -> list[bytes]:
    return [pack([NAMES[type(message)], *astuple(message)])]  # type: ignore[call-overload]


def decode(frames: Sequence[Buffer]) -> Any:
    """Raises RemoteProtocolError."""
    if len(frames) != 1:
        raise RemoteProtocolError(f"a message of ps-probe has one frame, this one has {len(frames)}")
    body = unpack(bytes(frames[0]), MESSAGE_BYTES_MAX)
    if type(body) is not list or not body or type(body[0]) is not str or body[0] not in KINDS:
        raise RemoteProtocolError("the peer does not speak the protocol of ps-probe")
    try:
        return KINDS[body[0]](*body[1:])
    except TypeError:
        raise RemoteProtocolError(f"{body[0]} has another number of fields") from None
