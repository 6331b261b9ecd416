"""Messages to frames and back: the bytes on the link.

A message is one ZeroMQ multipart message of one or two frames:

    frame 0   b"NRWS", protocol version (1 byte), msgpack array [kind, field, field, ...]
    frame 1   the payload, raw (only kinds that have one)

Rules: nothing here allocates by a length that a peer states; every bad byte is a RemoteProtocolError that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgpack

from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.messages import KIND_OF, KINDS, Buffer, Message

MAGIC = b"NRWS"
VERSION = 18
PREFIX_BYTES = len(MAGIC) + 1
HEADER_BYTES_MAX = 64 << 20  # a plan names every tensor, and a Ready holds the buffers of a model, as bytes both
FIELDS_BYTES_MAX = 4 << 20  # of a header or a packed field, raw bytes aside: unpacked they are up to 64 times as much
FIELDS_MAX = 64  # no message has more
ROWS_MAX = 1 << 16  # no model has as many module buffers
BYTES = (0xC4, 0xC5, 0xC6)  # how a field of bytes begins
NOT_MSGPACK = (ValueError, msgpack.exceptions.UnpackException, RecursionError)
PAYLOAD_BYTES_MAX = 1 << 30  # one compressed push of a shard is one frame; dense ones are cut into FRAME_BYTES
FRAME_BYTES = 2 << 20  # dense parts: on loopback ZeroMQ moves 1-2 MiB frames 3-4 times faster than 64 MiB ones
FRAME_VALUES = FRAME_BYTES // 4

_FIELDS = {
    kind: tuple(f.name for f in fields(kind) if f.name != "payload")  # type: ignore[arg-type]
    for kind in KIND_OF
}
_HAS_PAYLOAD = {kind: any(f.name == "payload" for f in fields(kind)) for kind in KIND_OF}  # type: ignore[arg-type]


def encode(message: Message) -> list[Buffer]:
    """Return the frames of `message`. The payload frame is the message's own buffer, not a copy."""
    kind = type(message)
    body = [KIND_OF[kind], *(getattr(message, name) for name in _FIELDS[kind])]
    header: bytes = MAGIC + bytes((VERSION,)) + msgpack.packb(body, use_bin_type=True)
    if _HAS_PAYLOAD[kind]:
        return [header, message.payload]  # type: ignore[attr-defined]
    return [header]


def decode(frames: Sequence[Buffer]) -> Message:
    """Return the message of `frames`. The payload is the frame given, not a copy.

    Raises IncompatibleError for another protocol version, RemoteProtocolError for anything else that is not ours.
    """
    if not 1 <= len(frames) <= 2:
        raise RemoteProtocolError(f"a message has 1 or 2 frames, this one has {'more' if frames else 'none'}")
    header = frames[0]
    if len(header) > HEADER_BYTES_MAX:
        raise RemoteProtocolError(f"the header has {len(header)} bytes, more than {HEADER_BYTES_MAX}")
    if len(header) <= PREFIX_BYTES or bytes(header[: len(MAGIC)]) != MAGIC:
        raise RemoteProtocolError("the peer does not speak the Narrows protocol")
    if header[len(MAGIC)] != VERSION:
        raise IncompatibleError(
            f"the peer speaks Narrows protocol version {header[len(MAGIC)]}, this one speaks {VERSION}: "
            "install the same release of narrows on both machines"
        )
    packed = memoryview(header)[PREFIX_BYTES:]
    try:
        if len(packed) > FIELDS_BYTES_MAX and (size := _fields_bytes(packed)) > FIELDS_BYTES_MAX:
            raise RemoteProtocolError(f"the fields of the header have {size} bytes, more than {FIELDS_BYTES_MAX}")
        body = msgpack.unpackb(packed, use_list=False, raw=False, strict_map_key=True, max_ext_len=0)
    except NOT_MSGPACK as error:
        raise RemoteProtocolError(f"the header is not msgpack: {type(error).__name__}") from None
    if type(body) is not tuple or not body or type(body[0]) is not int or body[0] not in KINDS:
        raise RemoteProtocolError("the header names no known kind of message")
    kind = KINDS[body[0]]
    names = _FIELDS[kind]
    if len(body) != len(names) + 1:
        raise RemoteProtocolError(f"{kind.__name__} has {len(names)} fields, this one has {len(body) - 1}")
    if _HAS_PAYLOAD[kind] != (len(frames) == 2):
        raise RemoteProtocolError(f"{kind.__name__} has {2 if _HAS_PAYLOAD[kind] else 1} frames")
    values: dict[str, object] = dict(zip(names, body[1:], strict=True))
    if len(frames) == 2:
        if len(frames[1]) > PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"the payload has {len(frames[1])} bytes, more than {PAYLOAD_BYTES_MAX}")
        values["payload"] = frames[1]
    return kind(**values)


def _fields_bytes(packed: Buffer) -> int:
    """Count how much of a header is no raw bytes. Nothing is made of it yet."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEADER_BYTES_MAX)
    unpacker.feed(packed)
    return _row_bytes(unpacker, packed, "the header")


def _row_bytes(unpacker: msgpack.Unpacker, packed: Buffer, what: str) -> int:
    """Count how much of the array that comes next is no raw bytes."""
    size, count = 0, unpacker.read_array_header()
    if count > FIELDS_MAX:
        raise RemoteProtocolError(f"{what} has {count} fields, more than {FIELDS_MAX}")
    for _ in range(count):
        begin = unpacker.tell()
        unpacker.skip()
        size += 0 if packed[begin] in BYTES else unpacker.tell() - begin
    return size


def pack(value: object) -> bytes:
    """Pack plain values (None, bool, int, float, str, bytes, list, dict with str keys) for a `bytes` field."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(packed: bytes, most: int = FIELDS_BYTES_MAX, rows: bool = False) -> object:
    """The inverse of `pack`; lists come back as lists. `rows`: it is a map of lists, in which raw bytes do not count. Raises
    RemoteProtocolError, for more than `most` bytes before anything is made of them."""
    try:
        size = _rows_bytes(packed) if rows and len(packed) > most else len(packed)
        if size > most:
            raise RemoteProtocolError(f"a packed field has {size} bytes, more than {most}")
        return msgpack.unpackb(packed, raw=False, strict_map_key=True, max_ext_len=0)
    except NOT_MSGPACK as error:
        raise RemoteProtocolError(f"a packed field is not msgpack: {type(error).__name__}") from None


def _rows_bytes(packed: Buffer) -> int:
    """Count how much of a map of lists is no raw bytes."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEADER_BYTES_MAX)
    unpacker.feed(packed)
    size, count = 0, unpacker.read_map_header()
    if count > ROWS_MAX:
        raise RemoteProtocolError(f"a packed field has {count} rows, more than {ROWS_MAX}")
    for _ in range(count):
        begin = unpacker.tell()
        unpacker.skip()
        size += unpacker.tell() - begin + _row_bytes(unpacker, packed, "a row")
    return size
