"""Checks what bench/speed/shard_streams.py reads off a link: bytes in order, first passages, the messages in them."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from lab.launch import CommandFailed
from speed.shard_streams import GREETING_BYTES, LONG, MORE, Segment, Stream, overlap, parsed

from narrows.compression.codecs import RAW
from narrows.protocols import messages as m
from narrows.protocols.wire import encode

OPENING = 2**32 - 30  # so that the numbers go round within the stream


def packet(at: float, begin: int, data: bytes, opens: bool = False) -> Segment:
    """Bytes of the stream from `begin` on, as they are heard."""
    tcp = struct.pack("!HHIIBBHHH", 5, 6, (OPENING + (not opens) + begin) % 2**32, 0, 5 << 4, 2 * opens, 0, 0, 0)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 40 + len(data), 0, 0, 64, 6, 0, bytes(4), bytes(4))
    segment = parsed(ip + tcp + data, at, True)
    assert segment is not None
    return segment


def framed(message: m.Message) -> bytes:
    frames = encode(message)
    more = [MORE] * (len(frames) - 1) + [0]
    return b"".join(
        struct.pack("!BQ", flag | LONG, len(frame)) + bytes(frame) for flag, frame in zip(more, frames, strict=True)
    )


def test_a_stream_is_put_together_from_packets_that_came_late_and_twice() -> None:
    pushes = [m.Push(0, 1, clock, 0, 1, 0, 50, 1, b"", RAW, bytes([clock]) * 200) for clock in (7, 8)]
    first, second = map(framed, pushes)
    whole = bytes(GREETING_BYTES) + first + second
    cuts = [0, 10, GREETING_BYTES + 100, len(whole) - 50, len(whole)]
    pieces = [packet(1.0 + i, a, whole[a:b]) for i, (a, b) in enumerate(pairwise(cuts))]
    heard = [
        packet(0.0, 0, b"", opens=True),
        *pieces[:1],
        pieces[2],
        pieces[1],
        packet(9.0, 40, whole[40:120]),
        pieces[3],
    ]
    stream = Stream(heard)
    assert stream.bytes == whole
    border = GREETING_BYTES + len(first)
    found = list(stream.messages())
    assert [(begin, end) for begin, end, _ in found] == [(GREETING_BYTES, border), (border, len(whole))]
    assert [message.clock for _, _, message in found if isinstance(message, m.Push)] == [7, 8]
    assert stream.passed(GREETING_BYTES, border) == (2.0, 3.0)  # not when it was sent again
    assert stream.passed(border, len(whole)) == (3.0, 4.0)
    with pytest.raises(CommandFailed, match="were not heard"):
        Stream([packet(0.0, 0, b"", opens=True), pieces[0], pieces[2]])


def test_an_overlap_is_a_share_of_both_intervals_and_of_the_shorter() -> None:
    assert overlap([(1.0, 3.0), (0.0, 2.0)]) == pytest.approx((1 / 3, 1 / 2))
    assert overlap([(0.0, 1.0), (1.0, 2.0)]) == overlap([(5.0, 6.0), (1.0, 2.0)]) == (0, 0)
    assert overlap([(0.0, 4.0), (1.0, 2.0)]) == (0.25, 1)
