"""Compiles kernels: nogil, cached on disk, no parallel=True, and IEEE float32 exactly as in NumPy.

The cache is beside the source, and `make install` fills it. If that folder cannot be written, as in a container with
read-only packages, the cache is in a folder of the user, which begins as a copy of the cache beside the source. If no
folder can be written there is no cache, and each command compiles.
"""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import caching
from numba.core.event import Listener, install_listener
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile `function` on its first call, and cache it on disk.

    No fastmath: without it LLVM neither reorders nor contracts a multiply and an add, so results equal those of NumPy
    bit for bit. error_model="numpy": a division that may raise cannot be vectorised. No parallel=True: two Python
    threads may call the same kernel, and Numba's workqueue layer would abort the process.
    """
    compiled = numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)
    with suppress(RuntimeError):  # no folder can be written
        compiled._cache = Cache(function)  # type: ignore[no-untyped-call, attr-defined]
    return cast(Callable[P, R], compiled)


@cache
def own_folder() -> Path | None:
    """Return a folder of this user for compiled kernels; None if none can be made.

    A cache is code, so a folder that another user made, or can write to, is not used.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    places = [Path(place) for place in (os.environ.get("TMPDIR", ""), "/tmp", "/var/tmp", "/dev/shm") if place]
    for folder in (home / "narrows", *(place / f"narrows-kernels-{os.getuid()}" for place in places)):
        with suppress(OSError):
            if not folder.is_absolute():
                continue  # this user has no home folder
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
                tempfile.TemporaryFile(dir=folder).close()
                return folder
    return None


class OwnFolder(caching._SourceFileBackedLocatorMixin, caching._CacheLocator):
    """The place of one function's cache in `own_folder`."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._py_file, self._lineno = source, function.__code__.co_firstlineno
        folder = own_folder()
        self.folder = folder and folder / self.get_suitable_cache_subpath(source)  # type: ignore[no-untyped-call]
        self.name = f"{Path(source).stem}.{function.__qualname__}-{self._lineno}"

    def get_cache_path(self) -> str:
        return str(self.folder)

    def ensure_cache_path(self) -> None:
        """Make the folder, and copy this function's compiled code from beside the source: it is of this installation.

        Raises:
            OSError: there is no folder.
        """
        if self.folder is None:
            raise FileNotFoundError
        super().ensure_cache_path()  # type: ignore[no-untyped-call]
        for compiled in sorted(
            Path(self._py_file).parent.glob(f"__pycache__/{self.name}.*.nb[ci]")
        ):  # code before index
            ours = self.folder / compiled.name
            if not ours.exists() or ours.stat().st_mtime < compiled.stat().st_mtime:
                new = self.folder / f"{compiled.name}.{os.getpid()}.tmp"
                shutil.copy2(compiled, new)
                os.replace(new, ours)


class KernelCacheLocator(caching.CompileResultCacheImpl):
    """The places of caches: NUMBA_CACHE_DIR, beside the source, or `own_folder`."""

    _locator_classes = [*caching.CacheImpl._locator_classes[:2], OwnFolder]  # noqa: RUF012


class Cache(caching.FunctionCache):
    """The cache of one kernel."""

    _impl_class = KernelCacheLocator


class Compilations(Listener):
    """Calls `say` when the first kernel that the cache lacks is compiled, and with the seconds of all at the end."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.began_s = 0.0

    def on_start(self, event: Any) -> None:
        if not self.began_s:
            self.began_s = time.monotonic()
            self.say("compiling kernels, once per installation ...")

    def on_end(self, event: Any) -> None:
        """Do nothing: `over` reports the end."""

    def over(self) -> None:
        """Report the seconds, if a kernel was compiled."""
        if self.began_s:
            self.say(f"compiled kernels, once per installation: {time.monotonic() - self.began_s:.0f} s")


@contextmanager
def compilations(say: Callable[[str], None]) -> Iterator[None]:
    """Report compilations inside this context to `say`."""
    listener = Compilations(say)
    with install_listener("numba:compile", listener):
        yield
    listener.over()


def _trailing_zeros(_context: Any, _word: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return numba.types.uint64(numba.types.uint64), generate


def _one_bits(_context: Any, _word: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return numba.types.uint64(numba.types.uint64), generate


def _bits_of(_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return numba.types.uint32(numba.types.float32), generate


def _float_of(_context: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.types.float32(numba.types.uint32), generate


def _fma(_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType()
        return builder.call(
            builder.module.declare_intrinsic("llvm.fma", [kind], ir.FunctionType(kind, [kind] * 3)), arguments
        )

    float32 = numba.types.float32
    return float32(float32, float32, float32), generate


def _unaligned_word(_context: Any, data: Any, _begin: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, value=arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(place, align=1)

    return numba.types.uint64(data, numba.types.int64), generate


PREFETCH = 2048  # values ahead: a loop that only compares is faster than the hardware's prefetcher


def _prefetch(context: Any, builder: Any, data: Any, begin: Any) -> None:
    """Prefetch the four cache lines that a loop over 64 values at a time reads PREFETCH values later. Never faults."""
    byte = ir.IntType(8).as_pointer()
    i32 = ir.IntType(32)
    function = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, i32, i32, i32])
    )
    for line in range(4):
        ahead = builder.add(begin, ir.Constant(ir.IntType(64), PREFETCH + 16 * line))
        place = builder.bitcast(builder.gep(data, [ahead]), byte)
        builder.call(function, [place, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])


def _at_least(_context: Any, bits: Any, _begin: Any, _mask: Any, _threshold: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes, word = ir.VectorType(ir.IntType(32), 64), ir.IntType(64)
        array = context.make_array(signature.args[0])(context, builder, value=arguments[0])
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), lanes.as_pointer())
        _prefetch(context, builder, array.data, arguments[1])
        values = builder.load(place, align=4)

        def all_lanes(value: Any) -> Any:
            first = builder.insert_element(ir.Constant(lanes, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            zeros = ir.Constant(ir.VectorType(ir.IntType(32), 64), [0] * 64)
            return builder.shuffle_vector(first, ir.Constant(lanes, ir.Undefined), zeros)

        masked = builder.and_(values, all_lanes(arguments[2]))
        return builder.bitcast(builder.icmp_unsigned(">=", masked, all_lanes(arguments[3])), word)

    uint32, int64 = numba.types.uint32, numba.types.int64
    return numba.types.uint64(bits, int64, uint32, uint32), generate


# Trap: a cached kernel is compiled anew if its own file changes, but not if this file does; then delete __pycache__.
# The functions below are one machine instruction or none, which Numba does not offer; only kernels can call them.
trailing_zeros = cast(Callable[[np.uint64], np.uint64], intrinsic(_trailing_zeros))
one_bits = cast(Callable[[np.uint64], np.uint64], intrinsic(_one_bits))
bits_of = cast(Callable[[np.float32], np.uint32], intrinsic(_bits_of))
float_of = cast(Callable[[np.uint32], np.float32], intrinsic(_float_of))
# fma(a, b, c): a * b + c, rounded once.
fma = cast(Callable[[np.float32, np.float32, np.float32], np.float32], intrinsic(_fma))
# unaligned_word(data, begin): the eight bytes of uint8 data from `begin` on, at any address. This is not checked: call
# `word_at` (kernels/gaps.py), which is where Numba checks bounds.
unaligned_word = cast(Callable[[Any, int], np.uint64], intrinsic(_unaligned_word))
# at_least(bits, begin, mask, threshold): bit j of the word is (bits[begin + j] & mask) >= threshold, for j < 64. All 64
# values must be in the array; this is not checked. From a loop, LLVM would build the word in 64 lanes of 64 bits each,
# which is 5x slower.
at_least = cast(Callable[[Any, int, np.uint32, np.uint32], np.uint64], intrinsic(_at_least))
