"""The wire: messages to frames and back.

A message is one ZeroMQ multipart message of one or two frames:

    frame 0   b"NRWS", protocol version (1 byte), msgpack array [kind, field, field, ...]
    frame 1   the payload, raw (only kinds that have one)

Rules
- No code here allocates memory by a length that a peer states.
- Bytes that are not valid raise a RemoteProtocolError that names the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgpack

from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.messages import KIND_OF, KINDS, Buffer, Message

MAGIC = b"NRWS"
VERSION = 27
PREFIX_BYTES = len(MAGIC) + 1
HEADER_BYTES_MAX = 64 << 20  # large, because a ModelSpec names every tensor and a Ready holds the module buffers
FIELDS_BYTES_MAX = 4 << 20  # of a header or packed field, without raw bytes: as Python objects up to 64 times as much
FIELDS_MAX = 64  # fields of a message
ROWS_MAX = 1 << 16  # module buffers of a model
BYTES = (0xC4, 0xC5, 0xC6)  # first bytes of a msgpack value of type bytes
NOT_MSGPACK = (ValueError, msgpack.exceptions.UnpackException, RecursionError)
PAYLOAD_BYTES_MAX = 1 << 30  # a compressed push to a shard is one frame; a dense one is cut into parts of FRAME_BYTES
FRAME_BYTES = 4 << 20  # dense parts: on one host ZeroMQ moves frames of 2 to 4 MiB 3 to 4 times faster than of 64 MiB
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
    """Return the message of `frames`. The payload is the given frame, not a copy.

    Raises:
        IncompatibleError: the peer has another protocol version.
        RemoteProtocolError: the frames are no valid message.
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
    """Return the size of a header without its raw bytes, before any object is made of it."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEADER_BYTES_MAX)
    unpacker.feed(packed)
    return _row_bytes(unpacker, packed, "the header")


def _row_bytes(unpacker: msgpack.Unpacker, packed: Buffer, what: str) -> int:
    """Return the size of the next array without its raw bytes."""
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
    """Return the value of a `bytes` field that `pack` made. Lists come back as lists.

    Args:
        packed: the field.
        most: bytes that it may have.
        rows: the value is a map of lists; raw bytes in it do not count for `most`.

    Raises:
        RemoteProtocolError: the field is too large (found before any object is made of it), or is not msgpack.
    """
    try:
        size = _rows_bytes(packed) if rows and len(packed) > most else len(packed)
        if size > most:
            raise RemoteProtocolError(f"a packed field has {size} bytes, more than {most}")
        return msgpack.unpackb(packed, raw=False, strict_map_key=True, max_ext_len=0)
    except NOT_MSGPACK as error:
        raise RemoteProtocolError(f"a packed field is not msgpack: {type(error).__name__}") from None


def _rows_bytes(packed: Buffer) -> int:
    """Return the size of a map of lists without its raw bytes."""
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
