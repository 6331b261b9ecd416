"""The SPEC parser: `topk:0.01+int8+lz4` to a Compressor. STAGES is the one list of what a stage may be called.

Grammar: [sparsifier] + [value coding] + [byte coding], at least one of them, in this order, each at most once. `dense`
is the sparsifier that keeps everything, so `dense+int8` is `int8`; the canonical form leaves it out unless it is all.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from narrows.compression.byte_codings import LZ4, ByteCoding
from narrows.compression.compressor import Chain, Compressor
from narrows.compression.errors import SpecError
from narrows.compression.sparsifiers import Sparsifier, TopK
from narrows.compression.value_codings import FP16, FP32, INT8, ValueCoding


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What the stages read so far amount to."""

    sparsifier: Sparsifier | None = None
    value_coding: ValueCoding = FP32
    byte_coding: ByteCoding | None = None


@dataclass(frozen=True, slots=True)
class _Stage:
    written: str  # as in the sentence that explains it
    axis: int  # position in AXES
    add: Callable[[_Chosen, str], _Chosen]  # takes the text after the colon; ValueError says what is wrong with it
    has_argument: bool = False


AXES = ("selects values", "codes values", "packs bytes")

_DENSITY = re.compile(r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def _top_k(chosen: _Chosen, argument: str) -> _Chosen:
    if not _DENSITY.fullmatch(argument) or not 0.0 < float(argument) <= 1.0:
        raise ValueError("DENSITY must be a number above 0 and at most 1")
    return _Chosen(TopK(float(argument)), chosen.value_coding, chosen.byte_coding)


STAGES: dict[str, _Stage] = {
    "dense": _Stage("dense", 0, lambda chosen, _: chosen),
    "topk": _Stage("topk:DENSITY", 0, _top_k, has_argument=True),
    "fp16": _Stage("fp16", 1, lambda chosen, _: _Chosen(chosen.sparsifier, FP16, chosen.byte_coding)),
    "int8": _Stage("int8", 1, lambda chosen, _: _Chosen(chosen.sparsifier, INT8, chosen.byte_coding)),
    "lz4": _Stage("lz4", 2, lambda chosen, _: _Chosen(chosen.sparsifier, chosen.value_coding, LZ4)),
}

_GRAMMAR = " + ".join(
    f"[{' | '.join(s.written for s in STAGES.values() if s.axis == axis)}]" for axis in range(len(AXES))
)


def parse(spec: str) -> Compressor:
    """The compressor that `spec` describes, for example "dense", "int8", "topk:0.01+int8+lz4".

    Raises SpecError, one sentence that points at the stage and says what is known or how it is written.
    """
    chosen = _Chosen()
    canonical: list[str] = []
    previous_axis, previous_text = -1, ""
    for number, text in enumerate(spec.split("+"), 1):
        where = f"SPEC {spec!r}: stage {number}, {text!r},"
        name, colon, argument = text.partition(":")
        stage = STAGES.get(name)
        if stage is None:
            known = ", ".join(stage.written for stage in STAGES.values())
            raise SpecError(f"{where} is not known; known are {known}, chained with '+'")
        if bool(colon) != stage.has_argument:
            raise SpecError(f"{where} {'takes no argument' if colon else 'lacks its argument'}; write {stage.written}")
        if stage.axis <= previous_axis:
            problem = "also" if stage.axis == previous_axis else "comes too late: it"
            raise SpecError(f"{where} {problem} {AXES[stage.axis]}, after {previous_text!r}; the order is {_GRAMMAR}")
        try:
            chosen = stage.add(chosen, argument)
        except ValueError as error:
            raise SpecError(f"{where} is wrong: {error}; write {stage.written}") from error
        previous_axis, previous_text = stage.axis, text
        if name != "dense":
            canonical.append(name if stage.axis else chosen.sparsifier.spec if chosen.sparsifier else name)
    return Chain("+".join(canonical) or "dense", chosen.sparsifier, chosen.value_coding, chosen.byte_coding)
