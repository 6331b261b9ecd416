"""The parser of SPECs, such as `topk:0.01+int8+lz4`. The table STAGES has each stage that a SPEC may name.

Grammar: [reducer] + [value coding] + [byte coding], at least one of them, in this order, each at most once. `dense` is
the reducer that keeps every value, so `dense+int8` is `int8`. The canonical form has `dense` only if it stands alone.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from narrows.compression.byte_codings import LZ4
from narrows.compression.compressor import Chain, Compressor
from narrows.compression.errors import SpecError
from narrows.compression.index_codings import STRIDE_MAX
from narrows.compression.sparsifiers import MSTOPK_DROPPED_BITS, BlockTopK, Cycle, CycleTop, RandomK, Threshold, TopK
from narrows.compression.value_codings import (
    BF16,
    FP16,
    FP32,
    INT4,
    INT4_STOCHASTIC,
    INT8,
    INT8_STOCHASTIC,
    SIGN,
    TWO_BIT,
    UINT8_MINMAX,
)

BLOCK_MAX = 1 << 20  # the largest top-k block, in values: the keys of a larger one would not fit the cache


@dataclass(frozen=True, slots=True)
class _Stage:
    """One row of STAGES."""

    written: str  # the syntax, for error messages
    axis: int  # the index of the stage's axis in AXES
    make: Callable[[str], Any]  # makes the stage of the text after the colon, or of ""; raises ValueError


AXES = ("selects values", "codes values", "packs bytes")

_NUMBER = re.compile(r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_BLOCKS = re.compile(r"(\d{1,7})/(\d{1,7})", re.ASCII)


def _density(argument: str, name: str = "DENSITY") -> float:
    if not _NUMBER.fullmatch(argument) or not 0.0 < float(argument) <= 1.0:
        raise ValueError(f"{name} must be a number above 0 and at most 1")
    return float(argument)


def _top_k(argument: str) -> TopK | BlockTopK:
    if "/" not in argument:
        return TopK(_density(argument))
    blocks = _BLOCKS.fullmatch(argument)
    if not blocks or not 1 <= int(blocks[1]) <= int(blocks[2]) <= BLOCK_MAX:
        raise ValueError(f"K/BLOCK must be whole numbers, 1 <= K <= BLOCK <= {BLOCK_MAX}")
    return BlockTopK(int(blocks[1]), int(blocks[2]))


def _cycle(argument: str) -> Cycle:
    density, slash, share = argument.partition("/")
    cycle = Cycle(_density(density))
    if cycle.stride > STRIDE_MAX:
        raise ValueError(f"DENSITY must be at least 1/{STRIDE_MAX}")
    return CycleTop(cycle.density, _density(share, "SHARE")) if slash else cycle


def _threshold(argument: str) -> Threshold:
    if not _NUMBER.fullmatch(argument) or not 2.0**-149 <= float(argument) <= 3.4e38:
        raise ValueError("T must be a number from 1.5e-45 to 3.4e38")
    return Threshold(float(argument))


def _one(member: Any) -> Callable[[str], Any]:
    return lambda _: member


def _rounded(nearest: Any, stochastic: Any) -> Callable[[str], Any]:
    def make(argument: str) -> Any:
        if argument not in ("", "stochastic"):
            raise ValueError("the only other rounding is 'stochastic'")
        return stochastic if argument else nearest

    return make


STAGES: dict[str, _Stage] = {
    "dense": _Stage("dense", 0, _one(None)),
    "topk": _Stage("topk:DENSITY|K/BLOCK", 0, _top_k),
    "mstopk": _Stage("mstopk:DENSITY", 0, lambda text: TopK(_density(text), MSTOPK_DROPPED_BITS)),
    "randk": _Stage("randk:DENSITY", 0, lambda text: RandomK(_density(text))),
    "cycle": _Stage("cycle:DENSITY[/SHARE]", 0, _cycle),
    "threshold": _Stage("threshold:T", 0, _threshold),
    "fp16": _Stage("fp16", 1, _one(FP16)),
    "bf16": _Stage("bf16", 1, _one(BF16)),
    "int8": _Stage("int8[:stochastic]", 1, _rounded(INT8, INT8_STOCHASTIC)),
    "int4": _Stage("int4[:stochastic]", 1, _rounded(INT4, INT4_STOCHASTIC)),
    "2bit": _Stage("2bit", 1, _one(TWO_BIT)),
    "sign": _Stage("sign", 1, _one(SIGN)),
    "uint8minmax": _Stage("uint8minmax", 1, _one(UINT8_MINMAX)),
    "lz4": _Stage("lz4", 2, _one(LZ4)),
}

_GRAMMAR = " + ".join(
    f"[{' | '.join(s.written for s in STAGES.values() if s.axis == axis)}]" for axis in range(len(AXES))
)


def parse(spec: str) -> Compressor:
    """Return the compressor of a SPEC.

    Args:
        spec: the SPEC, for example "dense", "int8" or "topk:64/4096+2bit+lz4".

    Raises:
        SpecError: the SPEC is wrong. The sentence names the stage, and the known stages or the stage's syntax.
    """
    chosen: list[Any] = [None, FP32, None]
    previous_axis, previous_text = -1, ""
    for number, text in enumerate(spec.split("+"), 1):
        where = f"SPEC {spec!r}: stage {number}, {text!r},"
        name, colon, argument = text.partition(":")
        stage = STAGES.get(name)
        if stage is None:
            known = ", ".join(stage.written for stage in STAGES.values())
            raise SpecError(f"{where} is not known; known are {known}, chained with '+'")
        takes, needs = ":" in stage.written, ":" in stage.written.partition("[")[0]
        if (colon and not takes) or (needs and not colon):
            raise SpecError(f"{where} {'takes no argument' if colon else 'lacks its argument'}; write {stage.written}")
        if stage.axis <= previous_axis:
            problem = "also" if stage.axis == previous_axis else "comes too late: it"
            raise SpecError(f"{where} {problem} {AXES[stage.axis]}, after {previous_text!r}; the order is {_GRAMMAR}")
        try:
            if colon and not argument:
                raise ValueError("nothing follows its colon")
            chosen[stage.axis] = stage.make(argument)
        except ValueError as error:
            raise SpecError(f"{where} is wrong: {error}; write {stage.written}") from error
        previous_axis, previous_text = stage.axis, text
    return Chain(*chosen)
