"""Sealed objects of a mailbox: their names, what stands in them, and who can open them.

How it works

    RUN / receiver's box / sender - epoch - sequence

    shard-0/4f…e1-0193f2c0a1b2c3d4e5f6-000000000007      from the member with the public key 4f…e1 to shard 0
    4f…e1-0193f2c0a1b2c3d4e5f6/shard-0-0193…-000000000003  from shard 0 to that process of that member

1. `Sealer.seal` writes an `ObjectHeader` and a body, and seals both with the sender's secret and the receiver's public
   key (PyNaCl Box: Curve25519, XSalsa20, Poly1305). The keys are those of the key files: a listed key, and no other,
   is a member.
2. The header names the receiver, the sender, the sender's epoch and the sequence. So an object under another name, in
   another box or of another time cannot be opened there: the store's owner can delay and delete, and no more.
3. An epoch is one life of a process: its start time in ms and a random number. The receiver counts the sequence of each
   epoch upward, so it takes each object once.
4. `heard` is the receiver's epoch. A member asks a shard for it by an empty object before it sends anything. A shard that
   was started again drops what was sent to its life before; the sender repeats it, as over a new connection.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import NAME_BYTES, Buffer
from narrows.protocols.runtime.network.curve_auth import DiallerId, KeyPair
from narrows.protocols.wire import HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX, pack, unpack

if TYPE_CHECKING:
    from nacl.public import Box

OBJECT_BYTES = 16 << 20  # of the body of an object: more messages, or a longer one, are several objects
ENVELOPE_BYTES_MAX = 4096  # of all else in an object: its header, and what sealing adds
OBJECT_BYTES_MAX = OBJECT_BYTES + ENVELOPE_BYTES_MAX  # a larger object is not read
MESSAGE_BYTES_MAX = PAYLOAD_BYTES_MAX + HEADER_BYTES_MAX + 64  # of a message, which may be several objects
FRAMES_MAX = 3  # of a message
EPOCH_BYTES, KEY_BYTES = 10, 32
ROUTING_BYTES = NAME_BYTES + KEY_BYTES + EPOCH_BYTES  # of a member's routing id at a shard
OBJECT = re.compile(r"(shard-[0-9]{1,5}|[0-9a-f]{64})-([0-9a-f]{20})-([0-9]{12})")
LENGTH = struct.Struct("<I")
SIZE = struct.Struct("<Q")
EXTRA = "pip install 'narrows[via]'"


def new_epoch() -> str:
    """Return the epoch of a process that starts now. A later one is greater, as text too."""
    return (time.time_ns() // 1_000_000).to_bytes(6, "big").hex() + secrets.token_hex(4)


def after(epoch: str) -> str:
    """Return an epoch later than `epoch`: the clock of this machine was set back."""
    return (int(epoch[:12], 16) + 1).to_bytes(6, "big").hex() + secrets.token_hex(4)


def box_of(public: str, epoch: str) -> str:
    """Return the box of one process of a member."""
    return f"{public}-{epoch}"


def routing_id(name: bytes, public: str, epoch: str) -> DiallerId:
    """Return the routing id of a member at a shard. It holds all that an answer needs: the key and the box."""
    made = DiallerId(name[:NAME_BYTES].ljust(NAME_BYTES, b"\0") + bytes.fromhex(public) + bytes.fromhex(epoch))
    made.key = public
    return made


def of_routing_id(peer: bytes) -> tuple[str, str] | None:
    """Return the public key and the epoch of a member by its routing id; None if it did not come through a mailbox."""
    if len(peer) != ROUTING_BYTES:
        return None
    return peer[NAME_BYTES : NAME_BYTES + KEY_BYTES].hex(), peer[-EPOCH_BYTES:].hex()


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """What an object says of itself, sealed.

    Args:
        receiver: the box that it lies in.
        sender: "shard-N", or the public key of a member in hex.
        epoch: of the sender.
        sequence: of the object, among those of this sender and epoch in this box.
        heard: the receiver's epoch; "": the sender asks for it.
        name: the name by which the sender is known there, up to NAME_BYTES; b"" of a shard.
        part: the number of this object among those of a long message.
        left: objects that follow with the rest of that message; part and left 0: the body is whole messages.
        hurries: an answer is expected soon.
    """

    receiver: str
    sender: str
    epoch: str
    sequence: int
    heard: str = ""
    name: bytes = b""
    part: int = 0
    left: int = 0
    hurries: bool = False

    @property
    def object(self) -> str:
        """The name of the object, without that of the box."""
        return f"{self.sender}-{self.epoch}-{self.sequence:012d}"

    def packed(self) -> bytes:
        return pack([getattr(self, each.name) for each in fields(self)])

    @staticmethod
    def unpacked(packed: bytes) -> ObjectHeader:
        """Raises RemoteProtocolError if `packed` is none."""
        value = unpack(packed)
        kinds = (str, str, str, int, str, bytes, int, int, bool)
        if (
            not isinstance(value, list | tuple)
            or len(value) != len(kinds)
            or any(type(each) is not kind for each, kind in zip(value, kinds, strict=True))
        ):
            raise RemoteProtocolError("the header of an object is nine values")
        return ObjectHeader(*value)


class Sealer:
    """Seals and opens the objects of one process. `own`: its keys. Raises UsageError without PyNaCl."""

    def __init__(self, own: KeyPair) -> None:
        try:
            from nacl.public import Box, PrivateKey, PublicKey
        except ImportError:
            raise UsageError(f"a mailbox is sealed by PyNaCl, which is not installed; {EXTRA} brings it") from None
        self.own = own
        secret = PrivateKey(bytes.fromhex(own.secret))
        self._made: Callable[[str], Box] = lambda public: Box(secret, PublicKey(bytes.fromhex(public)))
        self._boxes: dict[str, Box] = {}  # by public key; making one takes longer than a small object

    def _box(self, public: str) -> Box:
        if public not in self._boxes:
            self._boxes[public] = self._made(public)
        return self._boxes[public]

    def seal(self, public: str, header: ObjectHeader, body: Buffer) -> bytes:
        """Seal an object for the owner of a public key (hex)."""
        packed = header.packed()
        return bytes(self._box(public).encrypt(b"".join((LENGTH.pack(len(packed)), packed, body))))

    def open(self, public: str, content: bytes) -> tuple[ObjectHeader, memoryview]:
        """Open an object of the owner of a public key (hex).

        Raises:
            RemoteProtocolError: another sealed it, for another, or it was changed; or it holds no object.
        """
        from nacl.exceptions import CryptoError

        try:
            text = self._box(public).decrypt(content)
        except (CryptoError, ValueError, TypeError):
            raise RemoteProtocolError("it is not sealed with the key of its sender") from None
        if len(text) < LENGTH.size or not 0 < (size := LENGTH.unpack_from(text)[0]) <= len(text) - LENGTH.size:
            raise RemoteProtocolError("it has no header")
        header = ObjectHeader.unpacked(text[LENGTH.size : LENGTH.size + size])
        return header, memoryview(text)[LENGTH.size + size :]


def packed_message(frames: Sequence[Buffer]) -> bytes:
    """Return one message as a part of a body: the number of frames, their sizes, and the frames."""
    sizes = [len(frame) for frame in frames]
    return b"".join((LENGTH.pack(len(sizes)), *(SIZE.pack(size) for size in sizes), *frames))


def messages_of(body: memoryview) -> Iterable[list[Buffer]]:
    """Return the frames of each message of a body. Raises RemoteProtocolError."""
    found, at = list[list[Buffer]](), 0
    while at < len(body):
        if len(body) - at < LENGTH.size or not 0 < (count := LENGTH.unpack_from(body, at)[0]) <= FRAMES_MAX:
            raise RemoteProtocolError("a message has no frames, or too many")
        at += LENGTH.size
        if len(body) - at < count * SIZE.size:
            raise RemoteProtocolError("a message ends within its sizes")
        sizes = [SIZE.unpack_from(body, at + place * SIZE.size)[0] for place in range(count)]
        at += count * SIZE.size
        if sum(sizes) > len(body) - at:
            raise RemoteProtocolError("a message ends within a frame")
        frames = list[Buffer]()
        for size in sizes:
            frames.append(body[at : at + size])
            at += size
        found.append(frames)
    return found
