"""The modes and SPECs that tests are tried with.

A new mode is one row of `MODES`, a new stage some SPECs of `SPECS` and a row of `EACH_STAGE`.
tests/runs/test_kit.py checks that no mode of narrows.protocols and no stage of narrows.compression is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np

from kit import reference_payload
from kit.reference import Array
from narrows.compression import indices
from narrows.compression.spec import STAGES
from narrows.protocols.config.settings import Settings

# The flags of each mode, and of those variants of it that a worker or a server treats in another way.
MODES: dict[str, dict[str, Any]] = {
    "bsp": {"sync": "bsp"},
    "bsp, updates": {"sync": "bsp", "push": "update"},
    "ssp": {"sync": "ssp", "staleness": 2},
    "ssp, gradients": {"sync": "ssp", "push": "gradient"},
    "async": {"sync": "async"},
    "async, gradients": {"sync": "async", "push": "gradient"},
    "local": {"sync": "local", "local_steps": 2},
    "local, stale": {"sync": "local", "local_steps": 3, "staleness": 1},
    "local, quorum": {"sync": "local", "local_steps": 2, "quorum": 1},
    "local, fragments": {"sync": "local", "local_steps": 4, "fragments": 2, "merge_delay": 1, "merge_alpha": 0.5},
    "gossip": {"sync": "gossip"},
}


def modes(such: Callable[[Settings], object]) -> dict[str, dict[str, Any]]:
    """The rows of `MODES` whose settings are such."""
    return {name: flags for name, flags in MODES.items() if such(Settings(**flags).validated())}


def steps_on_worker(settings: Settings) -> bool:
    """True if the optimizer of the script steps on the worker."""
    return settings.mode().push != "gradient"


def like_one_process(settings: Settings) -> bool:
    """True if one worker takes the steps that its script takes alone: no gradient is late, and no fragment is merged."""
    return not settings.mode().streams and (steps_on_worker(settings) or settings.mode().bound == 0)


LIKE_ONE_PROCESS = modes(like_one_process)
LIKE_ONE_PROCESS["ssp, gradients in time"] = {"sync": "ssp", "push": "gradient", "staleness": 0}
WITH_SERVER = modes(lambda settings: settings.sync != "gossip")
# With a quorum the steps of workers depend on which of them is late.
NO_QUORUM = modes(lambda settings: settings.quorum < 0)
WITH_SERVER_NO_QUORUM = {name: flags for name, flags in WITH_SERVER.items() if name in NO_QUORUM}


def _forms(axis: int) -> tuple[str, ...]:
    """The stages of this axis without arguments."""
    found = [(name, stage.written) for name, stage in STAGES.items() if stage.axis == axis]
    return tuple(name + end for name, written in found for end in ("", ":stochastic") if end in written)


VALUE_STAGES = _forms(1)

# Payloads are compared byte for byte with these, in arrays of all sizes.
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

# Each stage in one or two of them, where a test of all of SPECS would take too long.
EACH_STAGE = (
    *("dense", *VALUE_STAGES, "lz4", "sign+lz4", "topk:0.02", "topk:0.02+int8", "topk:0.05+int8:stochastic+lz4"),
    *("mstopk:0.02+int4", "topk:4/100+2bit", "topk:0.5+fp16", "randk:0.05+bf16", "threshold:1.5+int8"),
    *("cycle:0.15+sign", "cycle:0.3/0.2+sign"),
)

# For models of a few hundred values, which train with them.
SMALL_MODEL_SPECS = ("dense", "int8", "topk:0.2+int8", "cycle:0.25+sign", "topk:8/64+2bit", "cycle:0.5/0.3+sign")

# Arrays on a device and groups are tried with each mode, and the SPECs of the README. Each mode has two of them: the payload
# of an update does not depend on the mode, and tests/unit/compression/test_device.py compares each SPEC's bytes.
OF_README = ("dense", "topk:0.05+int8", "cycle:0.15+sign", "topk:64/4096+2bit", "mstopk:0.01")
MODES_WITH_SPECS = [
    (mode, spec)
    for mode, other in zip(WITH_SERVER_NO_QUORUM, cycle((OF_README[0], *OF_README[2:])), strict=False)
    for spec in (OF_README[1], other)
]


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
