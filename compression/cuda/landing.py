"""Writes the sections of a payload, whose sizes only the device knows, one after the other to the host."""

from typing import Any

from narrows.compression.cuda.jit import I64, INT, THREADS, U32, DeviceArray, Written, cuda, device, kernel, np
from narrows.compression.cuda.queue import Queue
from narrows.compression.cuda.streams import QueueLanding
from narrows.compression.kernels.record import HEAD_BYTES, LOW_BITS, MISSING, TOLD, UNARY_BITS

BLOCKS = 128  # with 32 each thread waited for its own loads: 14 GB/s of the 50 of PCIe 5
HEADER_WORDS = 4  # room for the payload's header, which the host writes


@device
def section_bytes(kept: int, size: int, per: int) -> Any:
    """Return the bytes of a section with `size` bytes for every `per` values."""
    return size * ((kept + per - 1) // per)


@device
def source_of(place: int, begins: Any, ends: Any) -> Any:
    """Return the byte of the arena that is byte `place` of the sections one after the other."""
    if place < ends[0]:
        return begins[0] + place
    if place < ends[1]:
        return begins[1] + place - ends[0]
    if place < ends[2]:
        return begins[2] + place - ends[1]
    if place < ends[3]:
        return begins[3] + place - ends[2]
    if place < ends[4]:
        return begins[4] + place - ends[3]
    return begins[5] + min(place, ends[5] - 1) - ends[4]


@kernel(U32, (INT,) * 6, (INT,) * 6, INT, I64, U32)
def gather_sections(
    arena: DeviceArray, begins: Any, sizes: Any, room: int, record: DeviceArray, target: Written
) -> None:
    """Write the record, room for a header, and the sections to target, uint32.

    A word inside a section is made of two words of the arena, one at the end of a section byte by byte.

    begins: byte offsets of six sections in the arena, three of values and three of indices.
    sizes: (bytes, values) for each of the first three: so many bytes for every so many values.
    room: the largest number of kept values.
    """
    kept = room - record[MISSING]
    end0 = section_bytes(kept, sizes[0], sizes[1])
    end1 = end0 + section_bytes(kept, sizes[2], sizes[3])
    end2 = end1 + section_bytes(kept, sizes[4], sizes[5])
    end3 = end2 + record[HEAD_BYTES]
    end4 = end3 + ((record[LOW_BITS] + 7) >> 3)
    end5 = end4 + ((record[UNARY_BITS] + 7) >> 3)
    ends = (end0, end1, end2, end3, end4, end5)
    for i in range(cuda.grid(1), TOLD, cuda.gridsize(1)):
        target[2 * i] = np.uint32(record[i] & 0xFFFFFFFF)
        target[2 * i + 1] = np.uint32((record[i] >> 32) & 0xFFFFFFFF)
    for i in range(cuda.grid(1), (end5 + 3) >> 2, cuda.gridsize(1)):
        place = 4 * i
        first = source_of(place, begins, ends)
        word = np.uint32(0)
        if source_of(place + 3, begins, ends) == first + 3:  # sections do not touch in the arena
            shift = np.uint32(8 * (first & 3))
            word = arena[first >> 2]
            if shift:
                word = np.uint32(word >> shift | arena[(first >> 2) + 1] << (np.uint32(32) - shift))
        else:
            for j in range(4):
                source = source_of(place + j, begins, ends)
                byte = arena[source >> 2] >> np.uint32(8 * (source & 3)) & np.uint32(255)
                word = np.uint32(word | byte << np.uint32(8 * j))
        target[2 * TOLD + HEADER_WORDS + i] = word


def land(
    queue: Queue, arena: DeviceArray, begins: Any, sizes: Any, room: int, record: DeviceArray, target: Any
) -> QueueLanding:
    """Begin to write a payload to the host. Arguments as in `gather_sections`.

    target: page-locked uint8, its size a multiple of 4, with room for the record, a header of 16 bytes, all sections
    and a word.
    """
    words = target.view(np.uint32)
    count = min(words.size, BLOCKS * THREADS)
    return queue.launch_beside(
        gather_sections, count, arena.view(np.uint32), begins, sizes, room, record, queue.mapped(words)
    )
