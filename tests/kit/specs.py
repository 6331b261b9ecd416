"""The SPECs of the conformance tests, and the properties that their payloads must have."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np

from kit import reference_payload
from kit.reference import Array
from narrows.compression import (
    indices,
)

# Arrays on a device and boxes are tried with these: each mode once, and the SPECs of README. Each mode has two of them: what is
# sent of an update does not depend on the mode, and tests/unit/compression/test_device.py compares each SPEC's bytes.
MODES: dict[str, dict[str, Any]] = {
    "bsp": {"sync": "bsp"},
    "bsp, updates": {"sync": "bsp", "push": "update"},
    "ssp": {"sync": "ssp", "staleness": 2},
    "async": {"sync": "async"},
    "local": {"sync": "local", "local_steps": 4},
    "fragments": {"sync": "local", "local_steps": 4, "fragments": 2, "merge_delay": 1, "merge_alpha": 0.5},
}
OF_README = ("dense", "topk:0.05+int8", "cycle:0.15+sign", "topk:64/4096+2bit", "mstopk:0.01")
MODES_WITH_SPECS = [
    (mode, spec)
    for mode, other in zip(MODES, cycle((OF_README[0], *OF_README[2:])), strict=False)
    for spec in (OF_README[1], other)
]

VALUE_STAGES = ("fp16", "bf16", "int8", "int8:stochastic", "int4", "int4:stochastic", "2bit", "sign", "uint8minmax")


SPECS = (
    "dense", "lz4", "topk:0.4", "topk:1.0", "topk:1e-05", "topk:0.05+int8+lz4", "topk:0.05+lz4", "int8+lz4",
    *(reducer + coding for reducer in ("", "topk:0.05+") for coding in VALUE_STAGES),
    *(reducer + coding for reducer in ("topk:8/512+", "mstopk:0.01+", "randk:0.03+", "threshold:0.7+")
      for coding in ("int8", "2bit")),
    *("topk:0.01", "topk:0.05", "topk:64/4096", "topk:3/100+fp16", "topk:1/1", "mstopk:0.01", "mstopk:0.3"),
    *("randk:0.01", "randk:1.0", "threshold:0.7", "threshold:1e-40", "threshold:3e38", "topk:0.01+2bit"),
    *("cycle:0.1+sign", "cycle:0.03", "cycle:1.0"),
    *("cycle:0.15/0.24+sign", "cycle:0.03/0.3", "cycle:1.0/0.01+int8+lz4", "cycle:0.5/1.0+2bit"),
)  # fmt: skip


# Largest |x| that a coding does not saturate, and whether the difference to what is decoded is exact in float32.
SATURATION = {"fp16": 65504.0, "int8": 3.36e38, "int4": 2.97e38} | dict.fromkeys(
    ("int8:stochastic", "int4:stochastic", "sign", "2bit", "uint8minmax"), 0.0
)


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def held(payload: memoryview, count: int) -> Array:
    """Return the indices of a sparse payload."""
    found = indices(payload, count)
    assert found is not None
    return found


def coding_of(spec: str) -> str:
    return next((stage for stage in spec.split("+") if stage.partition(":")[0] in reference_payload.CODINGS), "")
