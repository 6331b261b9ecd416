"""How the golden record writes down what a run did, so that no name of Python is in it: bytes of messages and arrays alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from narrows.protocols.messages import Message
from narrows.protocols.wire import MAGIC, PREFIX_BYTES, encode

Entries = dict[str, Callable[[], str]]  # of a part: by name, what makes the text that is recorded
SENTENCE = "a sentence"  # stands for each text that has a space in it: prose may change
HEX = 16  # of a digest that are kept: 64 bits


def digest(*parts: bytes) -> str:
    """Return a digest of these parts, in which it shows where each ends."""
    found = hashlib.sha256()
    for part in parts:
        found.update(b"%d:" % len(part))
        found.update(part)
    return found.hexdigest()[:HEX]


def array_bytes(array: npt.ArrayLike) -> bytes:
    """Return dtype, shape and values of an array."""
    values = np.ascontiguousarray(array)
    return f"{values.dtype.str}{np.shape(array)}".encode() + values.tobytes()


def arrays_digest(arrays: Iterable[npt.ArrayLike]) -> str:
    """Return one digest of arrays, in their order."""
    return digest(*map(array_bytes, arrays))


def body(message: Message) -> bytes:
    """Return the header of a message without magic and version of the wire: the version may rise while the fields stay."""
    return bytes(encode(message)[0])[PREFIX_BYTES:]


def said(message: Message) -> list[bytes]:
    """Return what the frames of a message say: without the version of the wire, without prose, and without the keys of maps,
    which are names of flags and of Python both."""
    return [msgpack.packb(plain(msgpack.unpackb(body(message)))), *(bytes(frame) for frame in encode(message)[1:])]


def plain(value: Any) -> Any:
    """Return a value of msgpack with the values of maps in the place of the maps, also inside of bytes that are packed."""
    match value:
        case str():
            return SENTENCE if " " in value else value
        case dict():
            return [plain(each) for each in value.values()]
        case list():
            return [plain(each) for each in value]
        case bytes() if value:
            try:
                found = msgpack.unpackb(value[PREFIX_BYTES:] if value.startswith(MAGIC) else value)
            except (ValueError, msgpack.exceptions.UnpackException, RecursionError):
                return value
            return plain(found) if isinstance(found, (dict, list)) else value
    return value
