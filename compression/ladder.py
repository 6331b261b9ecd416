"""What a SPEC leaves open: a ladder of compressors, densest first. `Codecs` has those of both directions of a run.

How it works
1. A flag has a text: --compress and --compress-down. `Codecs.of` reads both, once for each plan of a run.
2. A SPEC that names its stages is a ladder of one rung. `auto` is a ladder down to its floor (auto.py chooses).
3. All other code asks the ladder for what it needs (`lossless`, `raw`, `compressor`), and never compares texts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from narrows.compression import rows
from narrows.compression.compressor import Chain, Compressor
from narrows.compression.errors import SpecError
from narrows.compression.spec import parse

FLOOR = 0.004  # the default FLOOR, as a share of fp32's bytes: docs/archive/results-0.1.md has the loss at 1/210
LEAST = 0.001  # the lowest FLOOR
WHOLE = 0.25  # the lowest share for pushed gradients, of which each value must travel: int8


@dataclass(frozen=True, slots=True)
class Rung:
    """A SPEC of a ladder, and its size."""

    spec: str  # the canonical SPEC
    bytes: float  # bytes of a payload, per parameter

    @property
    def share(self) -> float:
        """The payload's bytes as a share of fp32's."""
        return self.bytes / 4

    @property
    def kept(self) -> float:
        """The most values that a payload has, as a share of all."""
        chain = parse(self.spec).contraction()
        reducer = chain.reducer if isinstance(chain, Chain) else None
        return 1.0 if reducer is None else reducer.kept_max(_COUNT) / _COUNT

    @property
    def scratch(self) -> float:
        """The most memory that an encode takes beside values and payload, as a share of fp32's bytes."""
        return parse(self.spec).contraction().scratch_bytes_max(_COUNT) / _COUNT / 4


# Sorted by bytes, densest first, which is the order of loss too. tests/runs/test_auto.py measures the bytes. Sparse
# rungs have codings of 1 or 2 bits, since updates lose less with many values of few bits. The script
# bench/loss/residual_by_spec.py ranks SPECs of equal bytes.
LADDER: tuple[Rung, ...] = (
    Rung("dense", 4.0),
    Rung("fp16", 2.0),
    Rung("int8", 1.008),
    Rung("int4", 0.531),
    Rung("topk:0.5+2bit", 0.253),
    Rung("topk:0.27+sign", 0.142),
    Rung("topk:0.11+sign", 0.0786),
    Rung("cycle:0.25/0.24+sign", 0.0333),
    Rung("cycle:0.15+sign", 0.0190),
    Rung("cycle:0.06+sign", 0.00783),
    Rung("cycle:0.03+sign", 0.00404),
)


@dataclass(frozen=True, slots=True)
class Ladder:
    """The compressors that one SPEC leaves open.

    Attributes:
        rungs: Densest first; one, where the SPEC names a compressor.
        auto: True if `auto` chooses among them.
    """

    rungs: tuple[Rung, ...]
    auto: bool = False

    @property
    def specs(self) -> list[str]:
        """The canonical SPEC of each rung."""
        return [rung.spec for rung in self.rungs]

    @property
    def lossless(self) -> bool:
        """True if no rung loses anything. Then a publication is a whole state, not a difference."""
        return all(parse(spec).lossless for spec in self.specs)

    @property
    def raw(self) -> bool:
        """True if values always travel as float32."""
        return all(spec == "dense" for spec in self.specs)

    @property
    def sparse(self) -> bool:
        """True if a rung sends only some of the values."""
        return any(parse(spec).sparse for spec in self.specs)

    def compressor(self, spec: str = "") -> Compressor:
        """Return the compressor of the rung `spec`; "" for the sparsest, with which a link begins.

        Raises:
            SpecError: `spec` is no SPEC.
        """
        return parse(spec or self.rungs[-1].spec)

    def mixer(self) -> Compressor | None:
        """Return the compressor of models that peers mix; None if values travel as they are."""
        return None if self.raw else self.compressor().contraction()

    @property
    def row_coding(self) -> int:
        """The coding of embedding rows, a key of rows.CODINGS.

        It is the SPEC's value coding, rounded to the nearest, if the SPEC keeps every value; else float32.
        """
        chain = None if self.auto else self.compressor()
        if not isinstance(chain, Chain) or chain.reducer is not None:
            return 0
        return chain.value_coding.wire_id if chain.value_coding.wire_id in rows.CODINGS else 0


def bytes_of(spec: str) -> float:
    """Return the bytes per parameter of a payload: as measured where the SPEC is a rung of LADDER, else an upper bound.

    Raises:
        SpecError: `spec` is no SPEC.
    """
    known = {rung.spec: rung.bytes for rung in LADDER}
    return known.get(spec) or ladder(spec).rungs[0].bytes


_AUTO = re.compile(r"auto(?::((?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?))?", re.ASCII)
_COUNT = 1 << 20  # parameters of the payload by which the bytes of a fixed SPEC are estimated, until measured


def ladder(spec: str, sparse: bool = True) -> Ladder:
    """Return the ladder of `spec`: that of `auto` down to its floor, or one rung, `spec` itself.

    Args:
        spec: The text of a flag.
        sparse: False for only those rungs of `auto` that send every value.

    Raises:
        SpecError: `spec` is no SPEC; one sentence.
    """
    if re.split("[:+]", spec, maxsplit=1)[0] != "auto":
        fixed = parse(spec)
        return Ladder((Rung(fixed.spec, fixed.payload_bytes_max(_COUNT) / _COUNT),))
    written = _AUTO.fullmatch(spec)
    floor = FLOOR if written is None or written[1] is None else float(written[1])
    if written is None or not LEAST <= floor <= 1.0:
        raise SpecError(
            f"SPEC {spec!r}: auto chains with no stage and takes a FLOOR from {LEAST:g} to 1, the least share of the bytes of "
            "fp32; write auto or auto:FLOOR"
        )
    lowest = floor if sparse else max(floor, WHOLE)
    return Ladder(tuple(rung for rung in LADDER if rung.share >= lowest), auto=True)


@dataclass(frozen=True, slots=True)
class Codecs:
    """The ladders of a run: of what its children push (`up`), and of what they get (`down`)."""

    up: Ladder
    down: Ladder

    @staticmethod
    def of(up: str, down: str, sparse: bool = True) -> Codecs:
        """Read the SPECs of both directions, as `ladder` does. Raises SpecError."""
        return Codecs(ladder(up, sparse), ladder(down, sparse))
