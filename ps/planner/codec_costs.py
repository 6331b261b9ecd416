"""The bytes and the time that each SPEC of a plan costs for a parameter."""

from __future__ import annotations

from narrows.compression import ladder
from narrows.compression.auto import ENCODE_NS
from narrows.compression.ladder import LADDER
from narrows.compression.predict import clock_s, cluster_clock_s, whole_clock_s
from narrows.ps.planner.modes_and_specs import WAYS
from narrows.ps.planner.step_prices import CodecCost

# Nanoseconds a parameter that a server spends on one child: it receives and folds an update, and sends a state
# (docs/archive/results-0.1.md). Dense: what a second worker adds to a step of 100 MiB, 102.0 ms instead of 60.3
# (bench/speed/transport.py). Other SPECs: the fold of int4, the slowest of them, 6.2 GB/s (bench/speed/compressors.py).
SERVE_DENSE_NS, SERVE_NS = 1.6, 0.65


def coded(*more: str) -> dict[str, CodecCost]:
    """Return the cost of each SPEC of WAYS and of `more`.

    The bytes are those measured for `auto`'s ladder, where it has the SPEC, else an upper bound.

    Raises:
        SpecError: one of `more` is no SPEC.
    """
    rungs = {rung.spec: rung.bytes for rung in LADDER}
    made = {}
    for spec in sorted({*more, *(way.compress for way in WAYS)}):
        codec = ladder(spec)
        size, whole = rungs.get(spec) or codec.rungs[0].bytes, codec.raw
        encode_s, serve_s = (0.0, SERVE_DENSE_NS / 1e9) if whole else (ENCODE_NS / 1e9, SERVE_NS / 1e9)
        forms = (whole_clock_s, None) if whole else (clock_s, cluster_clock_s)
        made[spec] = CodecCost(size, encode_s, forms[0], serve_s, forms[1])
    return made
