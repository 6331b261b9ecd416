"""Payloads on their way to the device, from page-locked memory that two payloads take in turn.

The driver reads page-locked memory while the host goes on. So the host waits for the last copy from it before it writes
there again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import SPARE_WORDS, words_of
from narrows.compression.cuda.arrays import DeviceArray
from narrows.compression.cuda.inputs import WIDE_BYTES
from narrows.compression.cuda.scratch import DeviceMemory
from narrows.compression.cuda.streams import Streams
from narrows.compression.device.stages import BitStream, UploadPart

STAGED_MAX = 64 << 20  # bytes of a payload that goes to the device by page-locked memory of ours
PIECE_BYTES = 2 << 20  # of it that are copied while the host writes the next ones


class StagingMemory:
    """Page-locked memory for payloads on their way to the device, and the event after the last copy from it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.memory, self.event = np.empty(0, np.uint8), None

    def room(self, size: int) -> npt.NDArray[np.uint8]:
        """Return uint8[size], once the last copy from it has ended."""
        if self.event is not None:
            self.driver.wait(self.event)
        if self.memory.size < size:
            self.memory = self.driver.pinned(size + size // 8)
        return self.memory[:size]

    def copied(self, stream: Any) -> None:
        """Note that the stream copies from it."""
        if self.event is None:
            self.event = self.driver.event()
        self.driver.record(self.event, stream)


class Uploads:
    """Copies of a queue to the device.

    Args:
        driver: the driver of the device.
        streams, memory, counts: of the queue.
    """

    def __init__(self, driver: Any, streams: Streams, memory: DeviceMemory, counts: Counter[str]) -> None:
        self.driver, self.streams, self.memory, self.counts = driver, streams, memory, counts
        self._staging = StagingMemory(driver), StagingMemory(driver)
        self._turn = 0

    def send(self, parts: Sequence[UploadPart]) -> list[DeviceArray]:
        """Copy the parts of a payload to scratch memory; see `Queue.upload`."""
        places, end = [], 0
        for part in parts:
            size = (part.part.size + 7) // 8 * 8 + 8 * SPARE_WORDS if isinstance(part, BitStream) else part.nbytes
            places.append((end, size))
            end += -(-size // WIDE_BYTES) * WIDE_BYTES
        there = self.memory.scratch("received", end, np.uint8)
        if end > STAGED_MAX:
            for part, (begin, _) in zip(parts, places, strict=True):
                host = words_of(part.part) if isinstance(part, BitStream) else part
                self.copy(host.view(np.uint8), there[begin : begin + host.nbytes])
        elif end:
            self._staged(parts, places, there)
        kinds = [np.dtype(np.uint64) if isinstance(part, BitStream) else part.dtype for part in parts]
        return [there[begin : begin + size].view(kind) for (begin, size), kind in zip(places, kinds, strict=True)]

    def _staged(self, parts: Sequence[UploadPart], places: list[tuple[int, int]], there: DeviceArray) -> None:
        """Copy by page-locked memory: two arrays take turns, so that one fills while the other one is copied."""
        self._turn ^= 1
        staging = self._staging[self._turn]
        memory = staging.room(there.size)
        for begin, end in self.fill(memory, parts, places):
            self.copy(memory[begin:end], there[begin:end])
        staging.copied(self.streams.present)

    def fill(
        self, memory: npt.NDArray[np.uint8], parts: Sequence[UploadPart], places: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int]]:
        """Write the parts to page-locked memory, each at its place, with zeros after it.

        Yields:
            The bounds of a piece of it that is written, PIECE_BYTES or more, or the last one.
        """
        sent = 0
        for part, (begin, size) in zip(parts, places, strict=True):
            host = part.part if isinstance(part, BitStream) else part.view(np.uint8)
            for at in range(0, host.size, PIECE_BYTES):
                piece = host[at : at + PIECE_BYTES]
                end = begin + at + piece.size
                memory[end - piece.size : end] = piece
                if end - sent >= PIECE_BYTES:
                    yield sent, end
                    sent = end
            memory[begin + host.size : begin + size] = 0
        if sent < memory.size:
            yield sent, memory.size

    def copy(self, host: npt.NDArray[Any], target: DeviceArray) -> int:
        """Begin to copy an array, and return its size."""
        if host.size:
            self.counts["copies up"] += 1
            self.counts["bytes up"] += host.nbytes
            self.driver.copy_up(host, target, self.streams.present)
        return host.size
