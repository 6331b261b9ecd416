"""Compiles CUDA kernels, and has the device functions that they share: loads of four values, scans of a block.

No other module names a CUDA compiler. A process that launches kernels does not load one: cubins.py keeps what a process of
its own has compiled, driver.py loads and launches it.

Rules
- Loops are grid-stride. Each block has THREADS threads.
- Arithmetic goes through `add` and `mul`, which no compiler contracts to a fused multiply-add. Denormals are kept, and
  divisions are rounded to nearest. So results equal those of the CPU bit for bit, except for the payload bits of a NaN.
- Under NUMBA_ENABLE_CUDASIM=1 a thread is a Python thread: blocks and grids are small, and NumPy computes the
  intrinsics.
"""

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast
from unittest import mock

import numpy

from narrows.compression.kernels.record import RESIDUAL, START, STARTED, SUMS, UPDATE

np: Any = numpy  # for mypy, which would type the arithmetic of kernels as NumPy's
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"
COMPILER_ENV = "NARROWS_CUDA_COMPILER"  # 1: this process may compile
# The variables of a process that compiles. It needs no GPU, and it colours no error.
COMPILER_ENVIRONMENT = {
    COMPILER_ENV: "1",
    "NUMBA_ENABLE_CUDASIM": "0",
    "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
COMPILES = not SIMULATED and os.environ.get(COMPILER_ENV) == "1"
THREADS = 8 if SIMULATED else 256

DeviceArray: TypeAlias = Any  # in a kernel: numba's array
# These annotations mark arguments that a kernel writes to, also in part; `LastWritten` is a `SumRef`, of which the sums
# are written. Tests check the marks, and derive from them which launches must not run at once.
Written: TypeAlias = Annotated[Any, "written"]
LastWritten: TypeAlias = Annotated[Any, "last written"]
Four: TypeAlias = tuple[Any, Any, Any, Any]
Function = TypeVar("Function", bound=Callable[..., Any])

cuda: Any = None
if SIMULATED or COMPILES:
    cuda = import_module("numba.cuda")


def simulated_array(values: Any) -> Any:
    """Return an array of the host as an argument of a kernel in the simulator."""
    return import_module("numba.cuda.simulator.cudadrv.devicearray").FakeCUDAArray(values)


class Argument(NamedTuple):
    """The type of an argument of a kernel: an array of this dtype, or one value."""

    dtype: Any
    array: bool = False


I8, U8, U16, U32, U64, I64, F32 = (
    Argument(np.dtype(name), array=True) for name in ("int8", "uint8", "uint16", "uint32", "uint64", "int64", "float32")
)
INT, FLOAT, BOOL = Argument(np.dtype("int64")), Argument(np.dtype("float32")), Argument(np.dtype("bool"))
Type: TypeAlias = Any  # an Argument, or a tuple of Types
SUM: Type = (I64, INT, FLOAT)  # of a `SumRef`
BITS_REF: Type = (U32, I64, INT, INT)  # of an `ArrayRef`
FLOATS_REF: Type = (F32, I64, INT, INT)
KERNELS: dict[str, "Kernel"] = {}  # all kernels whose modules are loaded


class Kernel:
    """A CUDA kernel and the types of its arguments. `Queue.launch` launches it."""

    def __init__(self, function: Callable[..., None], types: tuple[Type, ...], name: str) -> None:
        self.function, self.types, self.name = function, types, name
        self.simulated = cuda.jit(function, fastmath=False) if SIMULATED else None
        if name in KERNELS:
            raise ValueError(f"two kernels have the name {name}")
        KERNELS[name] = self


def kernel(*types: Type, name: str = "") -> Callable[[Callable[..., None]], Kernel]:
    """Make a CUDA kernel of a function.

    Args:
        types: of its arguments.
        name: of the kernel; "": that of the function.

    Raises:
        ValueError: another kernel has that name.
    """
    return lambda function: Kernel(function, types, name or function.__name__)


def device(function: Function) -> Function:
    """Make a function that kernels call."""
    return function if cuda is None else cast(Function, cuda.jit(function, device=True, fastmath=False))


def inlined(function: Function) -> Function:
    """Make a function that is inlined at each call in a kernel."""
    if cuda is None:
        return function
    return cast(Function, cuda.jit(function, device=True, fastmath=False, inline="always"))


def wide(*arrays: DeviceArray) -> bool:
    """Return whether all arrays are aligned so that four values can be loaded at once. A caller's slice may not be."""
    return not any(array.address % (4 * array.itemsize) for array in arrays)


# --- the compiler ---


class Cubin(NamedTuple):
    """The machine code of a kernel.

    Attributes:
        code: the file, for cuModuleLoadData.
        entry: the name of the kernel in it.
        registers: of a thread.
        local: bytes of local memory of a thread.
        shared: bytes of shared memory of a block.
    """

    code: bytes
    entry: str
    registers: int
    local: int
    shared: int


Arch: TypeAlias = tuple[int, int]  # a compute capability
LINK_LOG = re.compile(r"used (\d+) registers, .*?(\d+) stack, (?:(\d+) bytes smem, )?.*?(\d+) bytes lmem")


def _numba_type(of: Type) -> Any:
    types = import_module("numba.cuda.types")
    if not isinstance(of, Argument):
        return types.Tuple(tuple(map(_numba_type, of)))
    scalar = types.boolean if of.dtype == np.bool_ else getattr(types, of.dtype.name)
    return types.Array(scalar, 1, "C") if of.array else scalar


@cache
def _library(name: str, arch: Arch) -> Any:
    """Return the kernel as numba's library, whose PTX of each GPU is made of the same LLVM IR.

    numba-cuda asks the driver for the GPU of functions that a kernel calls; a process without one answers here.
    """
    gpu = SimpleNamespace(compute_capability=arch)
    with mock.patch("numba.cuda.dispatcher.get_current_device", return_value=gpu):
        compiler: Any = import_module("numba.cuda.compiler")
        return compiler._compile_pyfunc_with_fixup(
            KERNELS[name].function,
            tuple(map(_numba_type, KERNELS[name].types)),
            device=False,
            cc=arch,
            abi="numba",
        )[0]


def ptx_of(name: str, arch: Arch, like: Arch | None = None) -> str:
    """Return the PTX of a kernel.

    Args:
        name: of the kernel.
        arch: the GPU.
        like: a GPU for which the kernel was typed before, which saves most of the time; None: `arch`.
    """
    return str(_library(name, like or arch).get_asm_str(cc=arch))


def linked(ptx: str, arch: Arch) -> Cubin:
    """Return the machine code of PTX with one kernel.

    Raises:
        RuntimeError: the linker refuses it, or names no registers.
    """
    nvjitlink: Any = import_module("cuda.bindings.nvjitlink")
    entry = re.search(r"\.entry\s+(\w+)", ptx)
    handle = nvjitlink.create(3, [f"-arch=sm_{arch[0]}{arch[1]}", "-verbose", "-Xptxas=-v"])
    try:
        source = ptx.encode() + b"\0"
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, source, len(source), "kernel")
        nvjitlink.complete(handle)
        log, code = bytearray(nvjitlink.get_info_log_size(handle)), bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_info_log(handle, log)
        nvjitlink.get_linked_cubin(handle, code)
    finally:
        nvjitlink.destroy(handle)
    found = LINK_LOG.search(log.decode(errors="replace"))
    if found is None or entry is None:
        raise RuntimeError(f"the linker does not say what the kernel uses: {log.decode(errors='replace')}")
    registers, stack, shared, local = (int(number or 0) for number in found.groups())
    return Cubin(bytes(code), entry[1], registers, stack + local, shared)


COMPILER_PACKAGES = (
    "numba-cuda", "numba", "llvmlite", "numpy", "cuda-bindings",
    "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12",
)  # fmt: skip


def compiler_versions() -> list[str]:
    """Return what decides how kernels are compiled: the packages and their versions. Loads none of them."""
    metadata = import_module("importlib.metadata")
    found = []
    for package in COMPILER_PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} none")
    return found


class ArrayRef(NamedTuple):
    """An array as an argument of a kernel: itself, or the place of its address among the inputs of an encode.

    Attributes:
        array: the array; empty if `slot` counts.
        inputs: int64[INPUTS] on the device (kernels/record.py).
        slot: the place of the address; -1: `array` counts.
        size: the number of values at that address.
    """

    array: Any
    inputs: Any
    slot: int
    size: int


class SumRef(NamedTuple):
    """A `Sum` as an argument of a kernel: its arrays have their addresses among the inputs of an encode.

    Attributes:
        inputs: int64[INPUTS] on the device.
        size: the number of values.
        decay: as in `Sum`.
    """

    inputs: Any
    size: int
    decay: Any


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

    def floats_at(address: int, size: int) -> DeviceArray:
        return np.frombuffer((ctypes.c_float * int(size)).from_address(int(address)), np.float32)

    def address_of(array: DeviceArray) -> int:
        return int(np.asarray(array._ary if hasattr(array, "_ary") else array).ctypes.data)

    def bits_at(address: int, size: int) -> DeviceArray:
        return np.frombuffer((ctypes.c_uint32 * int(size)).from_address(int(address)), np.uint32)

    def vector_load(array: DeviceArray, i: int) -> Four:
        return array[i], array[i + 1], array[i + 2], array[i + 3]

    def vector_store(array: DeviceArray, i: int, four: Four) -> None:
        for j in range(4):
            array[i + j] = four[j]

elif COMPILES:
    from llvmlite import ir

    types, cgutils, extending, arrayobj = (
        import_module(f"numba.cuda.{name}") for name in ("types", "cgutils", "extending", "np.arrayobj")
    )
    # A grid of one block is right for small arrays. numba warns of each, and warnings are errors here.
    config: Any = import_module("numba.cuda.core.config")
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

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

    def _array_at(dtype: Any) -> Any:
        """Make the intrinsic (address, size) -> array of global memory, which loads of 128 bits need."""
        made = types.Array(dtype, 1, "C")

        def typed(_context: Any, _address: Any, _size: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                element = context.get_data_type(dtype)
                there = builder.inttoptr(arguments[0], ir.PointerType(element, addrspace=1))
                array = context.make_array(made)(context, builder)
                bytes_each = ir.Constant(ir.IntType(64), context.get_abi_sizeof(element))
                arrayobj.populate_array(
                    array,
                    data=builder.addrspacecast(there, ir.PointerType(element)),
                    shape=(arguments[1],),
                    strides=(bytes_each,),
                    itemsize=bytes_each,
                    meminfo=None,
                )
                return array._getvalue()

            return made(types.int64, types.int64), generate

        return extending.intrinsic(typed)

    def _address_of(_context: Any, array: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            return builder.ptrtoint(data, ir.IntType(64))

        return types.int64(array), generate

    address_of = extending.intrinsic(_address_of)
    floats_at, bits_at = _array_at(types.float32), _array_at(types.uint32)
    bits_of = _bitcast(types.uint32, types.float32)
    float_of = _bitcast(types.float32, types.uint32)
    add = _rounded("llvm.nvvm.add.rn.f")
    mul = _rounded("llvm.nvvm.mul.rn.f")
    vector_load = extending.intrinsic(_vector_load)
    vector_store = extending.intrinsic(_vector_store)

else:
    address_of = floats_at = bits_at = bits_of = float_of = add = mul = vector_load = vector_store = cast(Any, None)


# --- device functions ---


@device
def address_in(ref: Any) -> Any:
    """Return the address of the array of an `ArrayRef`."""
    return ref[1][ref[2]] if ref[2] >= 0 else address_of(ref[0])


@device
def size_in(ref: Any) -> Any:
    return ref[3] if ref[2] >= 0 else ref[0].size


@device
def arrays_in(addends: Any) -> Any:
    """Return (residual, decay, update, sums, start, factor) of a `SumRef`. What is added is update + factor * start."""
    inputs, size, decay = addends
    residual, update, sums = (
        floats_at(inputs[RESIDUAL], size),
        floats_at(inputs[UPDATE], size),
        floats_at(inputs[SUMS], size),
    )
    # No branch: with another one in each read of four values, NVVM's optimizer does not come to an end.
    return residual, decay, update, sums, floats_at(inputs[START], size), np.float32(-inputs[STARTED])


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
@inlined
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
