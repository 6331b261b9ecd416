"""The parameter space: one flat index space per model, cut into half-open key ranges [begin, end).

model      [0, size)           split, split_at -> ranges of the shards
shard      [begin, end)        fragments       -> fragments, exchanged in turn
any range                      parts           -> parts, one for each message

`split` cuts anywhere (`--cut values`), `split_at` at borders of tensors alone (`--cut tensors`); so do fragments.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

from narrows.protocols.messages import Buffer
from narrows.protocols.wire import FRAME_VALUES

Keys = tuple[int, int]  # [begin, end)
VALUES, TENSORS = CUTS = ("values", "tensors")  # where a border of a shard or of a fragment may lie


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


def fragments(begin: int, end: int, count: int, cut: str, offsets: Iterable[int]) -> list[Keys]:
    """Cut [begin, end), the keys of a shard, into fragments. Cut at tensors the last of them may be empty.

    Args:
        begin, end: the keys of the shard.
        count: number of fragments.
        cut: one of CUTS.
        offsets: first keys of tensors, in any order, also beyond the shard.
    """
    if cut != TENSORS or begin == end:
        return [fragment(begin, end, count, index) for index in range(count)]
    return split_at(borders_of(begin, end, offsets), count)


def borders_of(begin: int, end: int, offsets: Iterable[int]) -> list[int]:
    """Return `begin`, the offsets between, and `end`: ascending, none twice."""
    return [begin, *sorted({offset for offset in offsets if begin < offset < end}), end]


def split_at(borders: Sequence[int], count: int) -> list[Keys]:
    """Cut [borders[0], borders[-1]) into `count` consecutive ranges that begin and end at borders.

    The largest range is as small as any such cut allows. Among these cuts each border, from the first on, is the one
    nearest to an even cut of what is left. With fewer ranges between borders than `count` the last ones are empty.

    Args:
        borders: ascending, at least two, none twice.
        count: number of ranges, at least 1.
    """
    ranges = len(borders) - 1
    filled, end = min(count, ranges), borders[-1]
    largest = _smallest_maximum(borders, filled)
    # least[i]: the fewest ranges of at most `largest` keys that hold all from borders[i] on
    least = [0] * (ranges + 1)
    for at in reversed(range(ranges)):
        least[at] = 1 + least[_reach(borders, at, largest)]
    found, at = list[Keys](), 0
    for left in range(filled, 1, -1):
        # `least` falls with the border, so the borders at which this range may end are consecutive.
        high = min(_reach(borders, at, largest), ranges - left + 1)
        low = max(at + 1, bisect_left(least, 1 - left, key=lambda needed: -needed))
        even = borders[at] + (end - borders[at]) / left
        to = min(range(low, high + 1), key=lambda border: (abs(borders[border] - even), border))
        found.append((borders[at], borders[to]))
        at = to
    return [*found, (borders[at], end), *[(end, end)] * (count - filled)]


def _reach(borders: Sequence[int], at: int, largest: int) -> int:
    """Return the last border to which a range of at most `largest` keys reaches from border `at`."""
    return bisect_right(borders, borders[at] + largest) - 1


def _smallest_maximum(borders: Sequence[int], count: int) -> int:
    """Return the size of the largest range in the cut into `count` ranges that makes it smallest."""

    def fits(largest: int) -> bool:
        at = 0
        for _ in range(count):
            at = _reach(borders, at, largest)
        return at == len(borders) - 1

    low = max(after - before for before, after in pairwise(borders))
    return low + bisect_left(range(low, borders[-1] - borders[0] + 1), True, key=fits)


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


def parts_of_tensors(begin: int, end: int, offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) as `parts` does, but within large tensors, so that each such part is in one tensor's memory.

    Args:
        begin, end: the range.
        offsets: the first key of each tensor, and the end of the last.
    """
    cut = begin
    for border in (*offsets[bisect_right(offsets, begin) : bisect_left(offsets, end)], end):
        while border - cut > FRAME_VALUES:
            yield cut, cut + FRAME_VALUES
            cut += FRAME_VALUES
        if border - cut >= FRAME_VALUES // 4 or border == end:  # smaller tensors go together
            yield cut, border
            cut = border


def covers(pieces: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """True if `pieces`, (begin, end) each, in any order, cover [begin, end) exactly once."""
    at = begin
    for piece_begin, piece_end in sorted(pieces):
        if piece_begin != at:
            return False
        at = piece_end
    return at == end
