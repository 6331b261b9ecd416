"""Compiles CUDA kernels, and has the device functions that they share: loads of four values, scans of a block.

queue.py launches the kernels.

Rules
- Loops are grid-stride. Each block has THREADS threads.
- Arithmetic goes through `add` and `mul`, which no compiler contracts to a fused multiply-add. Denormals are kept, and
  divisions are rounded to nearest. So results equal those of the CPU bit for bit, except for the payload bits of a NaN.
- Under NUMBA_ENABLE_CUDASIM=1 a thread is a Python thread: blocks and grids are small, and NumPy computes the
  intrinsics.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any, TypeAlias, TypeVar, cast

import numpy
from llvmlite import ir

# Numba types the kernels. numba.cuda and NumPy are `Any` for mypy, which would type their arithmetic as NumPy's.
cuda, types, cgutils, driver, devicearray, extending = (
    import_module(f"numba.cuda{name}")
    for name in ("", ".types", ".cgutils", ".cudadrv.driver", ".cudadrv.devicearray", ".extending")
)
config: Any = import_module("numba.cuda.core.config")
np: Any = numpy
DeviceArray: TypeAlias = Any  # numba's device array; in the simulator a wrapper around an ndarray
# These annotations mark arguments that a kernel writes to, also in part; `LastWritten` is a tuple of four arrays of
# which the last is written. Tests check the marks, and derive from them which launches must not run at once.
Written: TypeAlias = Annotated[Any, "written"]
LastWritten: TypeAlias = Annotated[Any, "last written"]
Four: TypeAlias = tuple[Any, Any, Any, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

SIMULATED = bool(config.ENABLE_CUDASIM)
THREADS = 8 if SIMULATED else 256

# A grid of one block is right for small arrays. numba warns of each, and warnings are errors here.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0


def kernel(function: Function) -> Any:
    """Make a CUDA kernel. Its first launch with a set of types compiles it; `Queue.launch` launches it.

    Kernels are not cached on disk: a cache would not notice that a device function of another file has changed.
    """
    return cuda.jit(function, fastmath=False)


def device(function: Function) -> Function:
    """Make a function that kernels call."""
    return cast(Function, cuda.jit(function, device=True, fastmath=False))


def wide(*arrays: DeviceArray) -> bool:
    """Return whether all arrays are aligned so that four values can be loaded at once. A caller's slice may not be."""
    return all(_address(array) % (4 * array.dtype.itemsize) == 0 for array in arrays)


def _address(array: DeviceArray) -> int:
    return int(array.ctypes.data if SIMULATED else array.device_ctypes_pointer.value or 0)


# --- intrinsics; in the simulator, the same in NumPy ---

if SIMULATED:

    def bits_of(value: Any) -> Any:
        return np.float32(value).view(np.uint32)

    def float_of(bits: Any) -> Any:
        return np.uint32(bits).view(np.float32)

    def add(a: Any, b: Any) -> Any:
        return np.float32(a) + np.float32(b)

    def mul(a: Any, b: Any) -> Any:
        return np.float32(a) * np.float32(b)

    def vector_load(array: DeviceArray, i: int) -> Four:
        return array[i], array[i + 1], array[i + 2], array[i + 3]

    def vector_store(array: DeviceArray, i: int, four: Four) -> None:
        for j in range(4):
            array[i + j] = four[j]

else:

    def _bitcast(result: Any, argument: Any) -> Any:
        def typed(_context: Any, _value: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                return builder.bitcast(arguments[0], context.get_value_type(result))

            return result(argument), generate

        return extending.intrinsic(typed)

    def _rounded(name: str) -> Any:
        def typed(_context: Any, _a: Any, _b: Any) -> Any:
            def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), ir.FloatType()])
                return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

            return types.float32(types.float32, types.float32), generate

        return extending.intrinsic(typed)

    def _vector(context: Any, builder: Any, array_type: Any, array: Any, i: Any) -> tuple[Any, int]:
        """Return (pointer to four elements, its alignment)."""
        element = context.get_data_type(array_type.dtype)
        data = context.make_array(array_type)(context, builder, array).data
        pointer = builder.bitcast(builder.gep(data, [i]), ir.PointerType(ir.VectorType(element, 4)))
        return pointer, 4 * context.get_abi_sizeof(element)

    def _vector_load(_context: Any, array: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, align = _vector(context, builder, signature.args[0], *arguments)
            loaded = builder.load(pointer, align=align)
            four = [builder.extract_element(loaded, ir.Constant(ir.IntType(32), j)) for j in range(4)]
            return context.make_tuple(builder, signature.return_type, four)

        return types.UniTuple(array.dtype, 4)(array, types.int64), generate

    def _vector_store(_context: Any, array: Any, i: Any, four: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, align = _vector(context, builder, signature.args[0], *arguments[:2])
            vector = ir.Constant(ir.VectorType(context.get_data_type(array.dtype), 4), ir.Undefined)
            for j in range(4):
                place = ir.Constant(ir.IntType(32), j)
                vector = builder.insert_element(vector, builder.extract_value(arguments[2], j), place)
            builder.store(vector, pointer, align=align)
            return context.get_dummy_value()

        return types.void(array, types.int64, types.UniTuple(array.dtype, 4)), generate

    bits_of = _bitcast(types.uint32, types.float32)
    float_of = _bitcast(types.float32, types.uint32)
    add = _rounded("llvm.nvvm.add.rn.f")
    mul = _rounded("llvm.nvvm.mul.rn.f")
    vector_load = extending.intrinsic(_vector_load)
    vector_store = extending.intrinsic(_vector_store)


# --- device functions ---


@device
def load4(array: DeviceArray, i: int, wide: bool) -> Four:
    """Return array[i : i + 4] for i < array.size. Beyond the end the last value is repeated.

    wide: `wide(array)`, and i is a multiple of 4.
    """
    last = array.size - 1
    if wide and i + 3 <= last:
        return vector_load(array, i)
    return array[i], array[min(i + 1, last)], array[min(i + 2, last)], array[min(i + 3, last)]


@device
def store4(array: DeviceArray, i: int, four: Four, wide: bool) -> None:
    """Set array[i : i + 4] = four for i < array.size. Values beyond the end are dropped."""
    if wide and i + 4 <= array.size:
        vector_store(array, i, four)
        return
    array[i] = four[0]
    if i + 1 < array.size:
        array[i + 1] = four[1]
    if i + 2 < array.size:
        array[i + 2] = four[2]
    if i + 3 < array.size:
        array[i + 3] = four[3]


# Inlined at each call: shared memory has a name, and a kernel may also call functions that call this one.
@partial(cuda.jit, device=True, fastmath=False, inline="always")
def block_scan(own: Any) -> tuple[Any, Any]:
    """Return (sum of the uint64 `own` of all threads before this one, sum over the block). Each thread must call it."""
    sums = cuda.shared.array((2, THREADS), np.uint64)
    t = cuda.threadIdx.x
    sums[0, t] = own
    cuda.syncthreads()
    here = 0
    step = 1
    while step < THREADS:
        total = sums[here, t]
        if t >= step:
            total += sums[here, t - step]
        sums[1 - here, t] = total
        here = 1 - here
        step *= 2
        cuda.syncthreads()
    before, total = sums[here, t] - own, sums[here, THREADS - 1]
    cuda.syncthreads()  # before the next call writes to sums
    return before, total


@device
def raise_to(record: DeviceArray, slot: int, own: Any) -> None:
    """Raise record[slot] to the maximum of the uint32 `own` of all threads. Each thread of a block calls it, once."""
    top = cuda.shared.array(1, np.uint32)
    if cuda.threadIdx.x == 0:
        top[0] = 0
    cuda.syncthreads()
    if own > top[0]:
        cuda.atomic.max(top, 0, own)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.max(record, slot, np.int64(top[0]))


@device
def last_block(done: DeviceArray) -> Any:
    """Return whether this block is the last of its grid to call this. Each thread calls it, once.

    The last block then sees all earlier writes of the other blocks (the fences of CUDA's threadFenceReduction).
    done: int64[1], zero between launches.
    """
    last = cuda.shared.array(1, np.int32)
    cuda.threadfence()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        last[0] = 0
        if cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:
            last[0] = 1
            done[0] = 0
    cuda.syncthreads()
    cuda.threadfence()
    return last[0] != 0
