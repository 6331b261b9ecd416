"""The messages between the director of ps-probe and its machines. A message is its name and its fields, in msgpack."""

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
    """Machine to director: take part."""

    name: Name
    host: Name  # address at which others reach this machine; "": the address at which they dial the director
    memory_bytes: int  # 0: not known


@dataclass(frozen=True, slots=True)
class ProbeStepTime(Message):
    """Machine to director: the step time of the script. From now on the machine can measure."""

    seconds: float  # 0: not known


@dataclass(frozen=True, slots=True)
class ProbeBeat(Message):
    """A heartbeat of a machine, and the director's answer."""

    number: int


@dataclass(frozen=True, slots=True)
class ProbeListen(Message):
    """Director to machine: open a port for the connections that show the token."""

    token: Name
    seconds: float  # the longest time of the visit
    first: bool  # the visit is the pair's first


@dataclass(frozen=True, slots=True)
class ProbeListening(Message):
    """Machine to director: the port is open."""

    token: Name
    port: int


@dataclass(frozen=True, slots=True)
class ProbeDial(Message):
    """Director to machine: dial the listener's port, and measure."""

    token: Name
    host: Name  # the listener's address; "": the host at which this machine dials the director
    port: int
    seconds: float  # the longest time of the visit
    first: bool  # the visit is the pair's first
    most_0: int  # bytes a second from listener to dialler; in a first visit, bytes in all
    most_1: int  # the same from dialler to listener
    round_trip_s: float  # as the first visit has measured it; 0 in a first visit


@dataclass(frozen=True, slots=True)
class ProbeReport(Message):
    """Machine to director: the figures of one end of a try."""

    token: Name
    why: Name  # why the try failed; "": it succeeded
    flows: bytes  # packed rows of `flows.Flow`


@dataclass(frozen=True, slots=True)
class ProbeEnd(Message):
    """Director to machine: the probe is over, or this machine cannot take part."""

    why: Name  # why it cannot; "": the probe is over


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
    """Return the frames of a message."""
    return [pack([NAMES[type(message)], *astuple(message)])]  # type: ignore[call-overload]


def decode(frames: Sequence[Buffer]) -> Any:
    """Return the message in these frames. Raise RemoteProtocolError where they hold none."""
    if len(frames) != 1:
        raise RemoteProtocolError(f"a message of ps-probe has one frame, this one has {len(frames)}")
    body = unpack(bytes(frames[0]), MESSAGE_BYTES_MAX)
    if type(body) is not list or not body or type(body[0]) is not str or body[0] not in KINDS:
        raise RemoteProtocolError("the peer does not speak the protocol of ps-probe")
    try:
        return KINDS[body[0]](*body[1:])
    except TypeError:
        raise RemoteProtocolError(f"{body[0]} has another number of fields") from None
