"""A Triton kernel of six arrays that does next to nothing: `probe.py launch` times its launch.

It has a file of its own, because Triton reads the source of a kernel, and its names `tl` are those of a module.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def nothing(a: Any, b: Any, c: Any, d: Any, e: Any, out: Any, n: Any, x: Any, block: tl.constexpr) -> None:
    i = tl.program_id(0) * block + tl.arange(0, block)
    mask = (i < n) & (x > 3)
    total = tl.load(a + i, mask) + tl.load(b + i, mask) + tl.load(c + i, mask) + tl.load(d + i, mask)
    tl.store(out + i, total + tl.load(e + i, mask), mask)


launch: Any = triton.jit(nothing)
