"""Coded answers by sample, in bounded memory: an answer that is here is neither computed nor sent again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

ENTRY_BYTES = 400  # of the entry itself: its key, its place in the order


@dataclass(frozen=True, slots=True)
class CachedAnswer:
    """The answer to one sample."""

    classes: int
    positions: tuple[int, ...]
    records: bytes  # of each position, as compression/logits codes them


class AnswerCache:
    """The newest answers; the ones that were not used for longest are dropped.

    Args:
        bytes_max: that the answers may take together; 0: nothing is kept.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max, self.nbytes, self.hits = bytes_max, 0, 0
        self._answers: OrderedDict[Hashable, CachedAnswer] = OrderedDict()

    def get(self, key: Hashable) -> CachedAnswer | None:
        found = self._answers.get(key)
        if found is not None:
            self.hits += 1
            self._answers.move_to_end(key)
        return found

    def put(self, key: Hashable, answer: CachedAnswer) -> None:
        if (before := self._answers.pop(key, None)) is not None:
            self.nbytes -= _size(before)
        if _size(answer) > self.bytes_max:
            return
        self._answers[key] = answer
        self.nbytes += _size(answer)
        while self.nbytes > self.bytes_max:
            self.nbytes -= _size(self._answers.popitem(last=False)[1])


def _size(answer: CachedAnswer) -> int:
    return len(answer.records) + ENTRY_BYTES
