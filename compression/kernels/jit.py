"""How kernels are compiled: nogil, cached on disk, no parallel=True, and IEEE float32 exactly as NumPy does it."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` on its first call and caches it beside the source.

    No fastmath: without it LLVM neither reorders nor contracts a multiply and an add, so results are NumPy's, bit for
    bit. error_model="numpy": a division that may raise cannot be vectorised. No parallel=True: two Python threads may
    call the same kernel, and Numba's workqueue layer aborts the process then.
    """
    compiled = numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(function)
    return cast(Callable[P, R], compiled)


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


# Trap: a cached kernel is compiled anew when its own file changes, not when this one does; delete __pycache__ then.
# One machine instruction or none, which Numba does not offer as such; callable in kernels only.
trailing_zeros = cast(Callable[[np.uint64], np.uint64], intrinsic(_trailing_zeros))
one_bits = cast(Callable[[np.uint64], np.uint64], intrinsic(_one_bits))
bits_of = cast(Callable[[np.float32], np.uint32], intrinsic(_bits_of))
float_of = cast(Callable[[np.uint32], np.float32], intrinsic(_float_of))
