"""The sum of error feedback, decay * residual + update: the kernel that first reads a value of it also writes it."""

from typing import Any

from narrows.compression.cuda.jit import (
    BOOL,
    F32,
    I64,
    INT,
    SUM,
    THREADS,
    DeviceArray,
    Four,
    LastWritten,
    Written,
    add,
    arrays_in,
    bits_of,
    cuda,
    device,
    kernel,
    last_block,
    load4,
    mul,
    np,
    raise_to,
    store4,
    vector_load,
    vector_store,
    wide,
)
from narrows.compression.cuda.queue import Queue
from narrows.compression.kernels.record import LARGEST, PHASE, RESIDUAL, START, STARTED, UPDATE, Sum
from narrows.compression.kernels.values import INFINITY_KEY


def wide_sum(addends: Sum) -> bool:
    """Return whether four values of the sum can be read and written at once (`wide`)."""
    return wide(addends.residual, addends.update, addends.sums, *([] if addends.start is None else [addends.start]))


@device
def key_of(value: float) -> Any:
    return bits_of(value) & np.uint32(0x7FFFFFFF)


@device
def largest_of(four: Four, largest: Any) -> Any:
    top = max(max(key_of(four[0]), key_of(four[1])), max(key_of(four[2]), key_of(four[3])))
    return np.uint32(max(largest, top))


@device
def _sum4(a: Four, decay: float, b: Four) -> Four:
    return (
        add(mul(a[0], decay), b[0]),
        add(mul(a[1], decay), b[1]),
        add(mul(a[2], decay), b[2]),
        add(mul(a[3], decay), b[3]),
    )


@device
def four_bits(four: Four) -> Four:
    return bits_of(four[0]), bits_of(four[1]), bits_of(four[2]), bits_of(four[3])


@device
def sum4_of(arrays: Any, i: int, wide: bool) -> Four:
    """Return four sums of `arrays_in`. i and wide as in load4."""
    update = _sum4(load4(arrays[4], i, wide), arrays[5], load4(arrays[2], i, wide))
    return _sum4(load4(arrays[0], i, wide), arrays[1], update)


@device
def sum4_at(arrays: Any, i: int, wide: bool) -> Four:
    """Write four sums, and return them. Arguments as in `sum4_of`."""
    four = sum4_of(arrays, i, wide)
    store4(arrays[3], i, four, wide)
    return four


@device
def sum4_inside(arrays: Any, i: int) -> Four:
    """Do sum4_at for four values that can be loaded at once."""
    update = _sum4(vector_load(arrays[4], i), arrays[5], vector_load(arrays[2], i))
    four = _sum4(vector_load(arrays[0], i), arrays[1], update)
    vector_store(arrays[3], i, four)
    return four


@device
def sum_at(arrays: Any, i: int) -> Any:
    update = add(mul(arrays[4][i], arrays[5]), arrays[2][i])
    value = add(mul(arrays[0][i], arrays[1]), update)
    arrays[3][i] = value
    return value


@device
def take(four: Four, i: int, phase: int, stride: int, first: int, kept: int, chosen: DeviceArray) -> None:
    """Set chosen[m] = value phase + (first + m) * stride, m < kept, for those that `four`, values i to i + 3, holds."""
    m = np.int64(np.uint32(i) // np.uint32(stride))
    ahead = phase + m * stride - i  # of the next value of the turn
    m -= first
    if ahead < 0:
        m, ahead = m + 1, ahead + stride
    for j in range(4):
        if j == ahead:
            if m < kept:
                chosen[m] = four[j]
            m, ahead = m + 1, ahead + stride


@kernel(SUM, BOOL)
def sum_into(addends: LastWritten, wide: bool) -> None:
    arrays = arrays_in(addends)
    for i in range(4 * cuda.grid(1), arrays[3].size, 4 * cuda.gridsize(1)):
        sum4_at(arrays, i, wide)


@kernel(SUM, INT, F32, I64, BOOL)
def sum_strided_into(addends: LastWritten, stride: int, chosen: Written, record: Written, wide: bool) -> None:
    arrays, phase = arrays_in(addends), addends[0][PHASE]
    own = np.uint32(0)
    for i in range(4 * cuda.grid(1), arrays[3].size, 4 * cuda.gridsize(1)):
        four = sum4_at(arrays, i, wide)
        take(four, i, phase, stride, 0, chosen.size, chosen)
        own = largest_of(four, own)
    raise_to(record, LARGEST, own)


@kernel(SUM, I64, I64, I64, BOOL)
def guard_sum(addends: Any, inputs: Written, record: Written, done: Written, wide: bool) -> None:
    arrays = arrays_in(addends)
    own = np.uint32(0)
    for i in range(4 * cuda.grid(1), arrays[3].size, 4 * cuda.gridsize(1)):
        own = largest_of(sum4_of(arrays, i, wide), own)
    raise_to(record, LARGEST, own)
    if last_block(done) and cuda.threadIdx.x == 0 and record[LARGEST] >= INFINITY_KEY:
        inputs[UPDATE] = inputs[RESIDUAL]
        inputs[START] = inputs[RESIDUAL]
        inputs[STARTED] = 1


def guarded(queue: Queue, addends: Sum, record: DeviceArray) -> Sum:
    """Raise record[LARGEST] to the largest key of a sum that has begun; if that is not finite, no later kernel adds anything.

    The later kernels of the encode then get `residual` as the update and as its start, so that the residual, whose
    memory may be that of the sums, stays as it was. Decay is 1, or the residual does not count.

    Returns:
        The sum for these kernels.
    """
    ref = queue.sum_ref(addends)
    queue.launch(
        guard_sum, addends.sums.size, 4 * THREADS, ref, queue.inputs.array, record, queue.done, wide_sum(addends)
    )
    return addends


def sum_of(queue: Queue, addends: Sum) -> None:
    """Set sums[i] = decay * residual[i] + (update[i] - start[i])."""
    queue.launch(sum_into, addends.sums.size, 4 * THREADS, queue.sum_ref(addends), wide_sum(addends))


def sum_strided(queue: Queue, addends: Sum, phase: int, stride: int, chosen: DeviceArray, record: DeviceArray) -> None:
    """Do `sum_of`, set chosen[i] = sums[phase + i * stride], and raise record[LARGEST] to the largest key of a sum."""
    ref = queue.sum_ref(addends, phase)
    queue.launch(sum_strided_into, addends.sums.size, 4 * THREADS, ref, stride, chosen, record, wide_sum(addends))
