"""narrows.compression: codes float32 arrays as payloads of few bytes, and reads them. Pure numerics on NumPy and Numba.

    compressor = parse("topk:0.01+int8+lz4")
    feedback = ErrorFeedback(compressor, count)
    payload = feedback.encode(update)            # the worker
    accumulate(payload, weight, state)           # the server

How it works

    float32[count] ──reducer──> values + indices ──value coding──> bytes ──byte coding──> payload
                    topk:0.01                      int8                    lz4

1. `parse` makes a `Compressor` of a SPEC. The three stages are independent of each other; a stage may be absent.
2. `ErrorFeedback` adds what compression left out of one update to the next.
3. A payload describes itself (payload.py has the byte layout). So a receiver needs no SPEC to read it.

Rules
- Payloads are not trusted: `check`, `decode` and `accumulate` raise PayloadError for bytes that are no payload, before
  they write anything.
- A compressor never sends anything.
"""

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np

from narrows.compression.buffers import FloatArray
from narrows.compression.compressor import LAST, Compressor
from narrows.compression.errors import NonFiniteError, PayloadError, SpecError
from narrows.compression.feedback import ErrorFeedback
from narrows.compression.kernels.jit import compilations
from narrows.compression.ladder import Codecs, Ladder, ladder
from narrows.compression.payload import accumulate, add_raw, check, decode, indices
from narrows.compression.reducers import Memory
from narrows.compression.spec import parse

__all__ = [
    "Codecs",
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
    """Compile each kernel, or load it from the cache on disk. Call this before joining a run, whatever the SPEC.

    The first compilation of an installation takes some twenty seconds, in which no heartbeat thread runs. Loading the
    cache takes a fraction of a second. The call returns at once if this process, or the process that forked it, has
    loaded the kernels.

    Args:
        say: called with one line before a compilation begins, and one after the last has ended.
    """
    with compilations(say):
        _load_kernels()


@cache
def _load_kernels() -> None:
    """Call each kernel once."""
    out = np.zeros(1 << 16, np.float32)
    for spec, update in warm_up_updates(out.size):
        for payload in (ErrorFeedback(parse(spec), out.size).encode(update), LAST.encode(update)):
            decode(payload, out)
            accumulate(payload, 0.5, out)
    add_raw(update.data, 0.5, out)


def warm_up_updates(count: int) -> Iterator[tuple[str, FloatArray]]:
    """Yield pairs of a SPEC and an update, float32[count], that together reach each kernel."""
    values = np.linspace(-1.0, 1.0, count, dtype=np.float32)
    clustered = np.where(np.arange(count) // 64 % 32 == 0, values, np.float32(0.0))
    regular = np.where(np.arange(count) % 64 == 0, values, np.float32(0.0))
    for update in (values, clustered, regular):
        for spec in WARM_UP_SPECS:
            yield spec, update
