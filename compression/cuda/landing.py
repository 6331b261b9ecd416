"""Writes the sections of a payload, whose sizes only the device knows, one after the other to the host."""

from typing import Any

from narrows.compression.cuda.jit import I64, INT, THREADS, U8, U32, DeviceArray, Written, cuda, device, kernel, np
from narrows.compression.cuda.queue import Queue, QueueLanding
from narrows.compression.kernels.record import HEAD_BYTES, LOW_BITS, MISSING, TOLD, UNARY_BITS

BLOCKS = 32  # a few blocks saturate the link to the host, and the others are free for other kernels
HEADER_WORDS = 4  # room for the payload's header, which the host writes


@device
def section_bytes(kept: int, size: int, per: int) -> Any:
    """Return the bytes of a section with `size` bytes for every `per` values."""
    return size * ((kept + per - 1) // per)


@kernel(U8, (INT,) * 6, (INT,) * 6, INT, I64, U32)
def gather_sections(
    arena: DeviceArray, begins: Any, sizes: Any, room: int, record: DeviceArray, target: Written
) -> None:
    """Write the record, room for a header, and the sections to target, uint32.

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
    for i in range(cuda.grid(1), TOLD, cuda.gridsize(1)):
        target[2 * i] = np.uint32(record[i] & 0xFFFFFFFF)
        target[2 * i + 1] = np.uint32((record[i] >> 32) & 0xFFFFFFFF)
    for i in range(cuda.grid(1), (end5 + 3) >> 2, cuda.gridsize(1)):
        word = np.uint32(0)
        for j in range(4):
            place = 4 * i + j
            if place < end0:
                source = begins[0] + place
            elif place < end1:
                source = begins[1] + place - end0
            elif place < end2:
                source = begins[2] + place - end1
            elif place < end3:
                source = begins[3] + place - end2
            elif place < end4:
                source = begins[4] + place - end3
            else:
                source = begins[5] + min(place, end5 - 1) - end4
            word = np.uint32(word | (np.uint32(arena[source]) << np.uint32(8 * j)))
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
    return queue.launch_beside(gather_sections, count, arena, begins, sizes, room, record, queue.mapped(words))
