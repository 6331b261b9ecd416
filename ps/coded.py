"""What the SPECs that a plan may give cost a parameter."""

from __future__ import annotations

from narrows.compression import ladder
from narrows.compression.auto import ENCODE_NS, LADDER
from narrows.protocols.planning.levels import Coded
from narrows.protocols.planning.ways import WAYS


def coded(*more: str) -> dict[str, Coded]:
    """By SPEC, those of WAYS and `more`: bytes as measured where `auto` has it, else at most. Raises SpecError."""
    rungs = {rung.spec: rung.bytes for rung in LADDER}
    return {
        spec: Coded(
            rungs.get(spec) or ladder(spec)[0].bytes, 0.0 if spec == "dense" else ENCODE_NS / 1e9, spec == "dense"
        )
        for spec in sorted({*more, *(way.compress for way in WAYS)})
    }
