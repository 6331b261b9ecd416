"""The parameter space: one flat index space per model, cut into half-open key ranges [begin, end).

model      [0, size)           split    -> ranges of the shards
shard      [begin, end)        fragment -> fragments, exchanged in turn
any range                      parts    -> parts, one for each message
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from narrows.protocols.messages import Buffer
from narrows.protocols.wire import FRAME_VALUES

Keys = tuple[int, int]  # [begin, end)


class CodedPiece(Protocol):
    """Coded values of keys [begin, end), as a message carries them. `codec`: see narrows.compression, CODECS."""

    @property
    def codec(self) -> int: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def payload(self) -> Buffer: ...


def split(size: int, shards: int) -> list[tuple[int, int]]:
    """Cut [0, size) into `shards` consecutive ranges whose sizes differ by at most one."""
    return [fragment(0, size, shards, index) for index in range(shards)]


def fragment(begin: int, end: int, fragments: int, index: int) -> tuple[int, int]:
    """Return fragment `index` of [begin, end). The `fragments` are consecutive; their sizes differ by at most 1."""
    size = end - begin
    return begin + size * index // fragments, begin + size * (index + 1) // fragments


def overlaps(before: Sequence[Keys], begin: int, end: int) -> list[tuple[int, int, int]]:
    """Return what ranges have in common with [begin, end): (index of the range, begin, end), in order."""
    found = [(index, max(low, begin), min(high, end)) for index, (low, high) in enumerate(before)]
    return [(index, low, high) for index, low, high in found if low < high]


def parts(begin: int, end: int, values_max: int = FRAME_VALUES) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into parts of at most `values_max` keys. An empty range gives one empty part."""
    if begin == end:
        yield begin, end
    for start in range(begin, end, values_max):
        yield start, min(end, start + values_max)


def covers(pieces: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """True if `pieces`, (begin, end) each, in any order, cover [begin, end) exactly once."""
    at = begin
    for piece_begin, piece_end in sorted(pieces):
        if piece_begin != at:
            return False
        at = piece_end
    return at == end
