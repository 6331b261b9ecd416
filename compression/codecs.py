"""Pieces of a model as they travel: values of keys [begin, end), coded by one of CODECS.

How it works

    float32 values ──compressor (SPEC)──> payload bytes ──Piece(codec, begin, end, payload)──> Push or State on the wire
                                                                    │
                      check(piece)     decodes to exactly end - begin values; nothing is written before this
                      add(piece, w, x) x[begin:end] += w * values, in one pass, straight from the bytes
                      put(piece, w, x) x[begin:end]  = w * values

1. A codec says how a payload is read: RAW float32 as it lies in memory, CODED payloads that describe themselves
   (payload.py), ROWS of an embedding table (rows.py), VOID for a part whose values do not count.
2. A receiver checks a piece before it adds it. `check` returns the squared L2 norm of the values (RAW), or an upper bound
   of it from the payload's scales (CODED): --max-update-norm needs it.
3. Code that has pieces calls `check`, `add` and `put`, and needs the codec only to set rows and void parts aside. Arrays
   on a device have the same methods (compression/device/).
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from narrows.compression import payload as coded
from narrows.compression import rows
from narrows.compression.buffers import CodedCopy, FloatArray
from narrows.compression.errors import NonFinitePayloadError, PayloadError

Payload = bytes | bytearray | memoryview

RAW = 0  # little-endian float32, one for each key: what `dense` sends, so that nothing is copied
CODED = 1  # a payload that describes itself (payload.py)
ROWS = 2  # rows of a table (rows.py). They have no keys, and so add nothing to an array of keys
VOID = -1  # stands for values that count for nothing; it never travels
CUT = (RAW, VOID)  # codecs whose pieces `cut` can cut


class PieceLike(Protocol):
    """The attributes that every piece has; messages that carry values are pieces too."""

    @property
    def codec(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def payload(self) -> Payload: ...


class Piece(NamedTuple):
    """Values of keys [begin, end)."""

    codec: int  # a key of CODECS: how `payload` is read
    begin: int
    end: int
    payload: Payload
    on_device: CodedCopy | None = None  # an own update's values on the device of its arrays, which encoded it


class Codec(NamedTuple):
    """How the payloads of one codec are read. Only checked payloads go to `add` and `put`."""

    check: Callable[[Payload, int, bool], float]  # (payload, count, finite): as `check` below
    add: Callable[[Payload, float, FloatArray], None]  # (payload, weight, out): out += weight * values
    put: Callable[[Payload, float, FloatArray], None]  # (payload, weight, out): out = weight * values


def _check_raw(payload: Payload, count: int, finite: bool) -> float:
    if len(payload) != 4 * count:
        raise PayloadError(f"{count} raw values are {4 * count} bytes, not {len(payload)}")
    if not finite:
        return 0.0
    values = np.frombuffer(payload, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        # A third of the time of checking each value. Finite values may overflow here; the next lines handle that.
        squared = float(np.dot(values, values))
    if math.isfinite(squared):
        return squared
    if not np.isfinite(values).all():
        raise NonFinitePayloadError("it holds NaN or infinity")
    return float(np.square(values, dtype=np.float64).sum())


def _put_raw(payload: Payload, weight: float, out: FloatArray) -> None:
    values = np.frombuffer(payload, np.float32)
    if weight == 1.0:
        np.copyto(out, values)
    else:
        np.multiply(values, np.float32(weight), out=out)


def _check_coded(payload: Payload, count: int, finite: bool) -> float:
    return coded.check(payload, count, finite=finite)


def _put_coded(payload: Payload, weight: float, out: FloatArray) -> None:
    out.fill(0.0)
    coded.accumulate(payload, weight, out)


def _check_void(payload: Payload, count: int, finite: bool) -> float:
    raise PayloadError("codec VOID is internal: no peer may send it")


def _add_nothing(payload: Payload, weight: float, out: FloatArray) -> None:
    """Do nothing: the payload has no values of keys."""


def _put_nothing(payload: Payload, weight: float, out: FloatArray) -> None:
    out.fill(0.0)


CODECS: dict[int, Codec] = {
    RAW: Codec(_check_raw, coded.add_raw, _put_raw),
    CODED: Codec(_check_coded, coded.accumulate, _put_coded),
    ROWS: Codec(rows.check, _add_nothing, _put_nothing),
    VOID: Codec(_check_void, _add_nothing, _put_nothing),
}


def raw_pieces(values: FloatArray, origin: int, cuts: Iterable[tuple[int, int]]) -> list[Piece]:
    """Return a RAW piece for each cut, without a copy.

    Args:
        values: float32, contiguous; values[0] is key `origin`. The pieces are views: do not change it while they are
            in use.
        origin: the first key of `values`.
        cuts: the keys [begin, end) of each piece.
    """
    raw = values.view(np.uint8).data
    return [Piece(RAW, begin, end, raw[4 * (begin - origin) : 4 * (end - origin)]) for begin, end in cuts]


def cut(piece: PieceLike, begin: int, end: int) -> Piece:
    """Return the values of a piece at keys [begin, end), which it has all, without a copy.

    Args:
        piece: a checked piece whose codec is in CUT.
        begin: the first key.
        end: the key after the last.
    """
    raw = memoryview(piece.payload)
    return Piece(piece.codec, begin, end, raw[4 * (begin - piece.begin) : 4 * (end - piece.begin)])


def coded_piece(payload: Payload, begin: int, end: int, on_device: CodedCopy | None = None) -> Piece:
    """Return the piece of keys [begin, end) for a payload of a compressor, and for its values on a device if any."""
    return Piece(CODED, begin, end, payload, on_device)


def check(piece: PieceLike, *, finite: bool = False) -> float:
    """Check that the payload of a piece is valid for exactly the keys of the piece. Any bytes are safe to pass.

    Args:
        piece: a piece from a peer.
        finite: also refuse NaN and infinity, and measure the norm.

    Returns:
        With `finite` the squared L2 norm of the values (RAW), or an upper bound of it (CODED); else 0.0.

    Raises:
        PayloadError: the payload is not valid for these keys, in one sentence.
        NonFinitePayloadError: with `finite`, the payload holds NaN or infinity.
    """
    codec = CODECS.get(piece.codec)
    if codec is None:
        raise PayloadError(f"unknown codec {piece.codec}")
    return codec.check(piece.payload, piece.end - piece.begin, finite)


def add(piece: PieceLike, weight: float, out: FloatArray, origin: int) -> None:
    """Add weight * values to `out` at the keys of a checked piece: one pass, straight from the bytes.

    Args:
        piece: a piece that `check` has accepted.
        weight: the factor, rounded to float32.
        out: float32; out[0] is key `origin`.
        origin: the first key of `out`.
    """
    CODECS[piece.codec].add(piece.payload, weight, out[piece.begin - origin : piece.end - origin])


def put(piece: PieceLike, weight: float, out: FloatArray, origin: int) -> None:
    """Write weight * values to `out` at the keys of a checked piece. Arguments as in `add`."""
    CODECS[piece.codec].put(piece.payload, weight, out[piece.begin - origin : piece.end - origin])
