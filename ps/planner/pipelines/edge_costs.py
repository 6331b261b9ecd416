"""The bytes and the time that each coding of an edge costs for a byte of float32."""

from __future__ import annotations

import math

from narrows.compression.value_codings import EDGE_CODINGS, ValueCoding
from narrows.ps.planner.pipelines.stages import EdgeCost

BLOCK = 1 << 16  # values; a multiple of every coding's block of values with one scale
# GB/s of float32 that one thread encodes and decodes (docs/archive/results-0.1.md, bench/speed/compressors.py).
# Others only copy.
GBPS = {"fp16": (12.4, 23.3), "int8": (17.7, 24.9), "int8:stochastic": (9.9, 25.3)}


def carried() -> dict[str, tuple[EdgeCost, EdgeCost]]:
    """Return the costs of each coding of an edge: (activations, their gradients)."""
    return {name: (_of(forth), _of(back)) for name, (forth, back) in EDGE_CODINGS.items()}


def _of(coding: ValueCoding) -> EdgeCost:
    encode_s, decode_s = (1e-9 / rate for rate in GBPS.get(coding.spec, (math.inf, math.inf)))
    return EdgeCost(coding.byte_count(BLOCK) / (4 * BLOCK), encode_s, decode_s)
