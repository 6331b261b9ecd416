"""narrows.compression: float32 arrays to payloads of few bytes and back. Pure numerics on NumPy and Numba.

    compressor = parse("topk:0.01+int8+lz4")
    feedback = ErrorFeedback(compressor, count)
    payload = feedback.encode(update)            # the worker
    accumulate(payload, weight, state)           # the server

Payloads describe themselves (payload.py has the byte layout) and come from anyone: `check`, `decode` and `accumulate`
raise PayloadError for bytes that are none, before anything is written. A compressor never sends anything.
"""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from narrows.compression.auto import Ladder, ladder
from narrows.compression.buffers import FloatArray
from narrows.compression.compressor import Compressor
from narrows.compression.errors import NonFiniteError, PayloadError, SpecError
from narrows.compression.feedback import ErrorFeedback
from narrows.compression.kernels.jit import compilations
from narrows.compression.payload import accumulate, add_raw, check, decode, indices
from narrows.compression.reducers import Memory
from narrows.compression.spec import parse

__all__ = [
    "Compressor",
    "ErrorFeedback",
    "Ladder",
    "Memory",
    "NonFiniteError",
    "PayloadError",
    "SpecError",
    "accumulate",
    "add_raw",
    "check",
    "decode",
    "indices",
    "ladder",
    "parse",
    "warm_up",
    "warm_up_updates",
]


WARM_UP_SPECS = (
    "dense", "fp16", "bf16", "int8", "int4", "2bit", "sign", "uint8minmax",
    "topk:0.01", "topk:0.01+int8", "topk:8/512+2bit", "topk:1.0", "mstopk:0.01", "randk:0.01", "threshold:0.9",
    "cycle:0.1", "cycle:0.1+sign", "cycle:0.1/0.2+sign",
)  # fmt: skip


def warm_up(say: Callable[[str], None] = lambda text: None) -> None:
    """Compiles every kernel, or loads it from the cache on disk; call it before joining, whatever the SPEC.

    A first compilation takes some twenty seconds in all, in which a heartbeat thread gets no turn: `say` is told of it. From
    the cache it is a fraction of one. Where this process has its kernels, or was forked from one that has, it takes no time.
    """
    with compilations(say):
        _load_kernels()


@cache
def _load_kernels() -> None:
    out = np.zeros(1 << 16, np.float32)
    for spec, update in warm_up_updates(out.size):
        payload = ErrorFeedback(parse(spec), out.size).encode(update)
        decode(payload, out)
        accumulate(payload, 0.5, out)
    add_raw(update.data, 0.5, out)


def warm_up_updates(count: int) -> Iterator[tuple[str, FloatArray]]:
    """SPECs and updates that between them reach every kernel."""
    values = np.linspace(-1.0, 1.0, count, dtype=np.float32)
    clustered = np.where(np.arange(count) // 64 % 32 == 0, values, np.float32(0.0))
    regular = np.where(np.arange(count) % 64 == 0, values, np.float32(0.0))
    for update in (values, clustered, regular):
        for spec in WARM_UP_SPECS:
            yield spec, update
