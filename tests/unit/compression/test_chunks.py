"""An update that is computed in chunks is coded as its array is, to the byte."""

import numpy as np
import pytest
from kit.reference import KINDS, values_of
from kit.specs import SPECS

from narrows.compression import Memory, NonFiniteError, buffers, parse
from narrows.compression.buffers import ChunkedUpdate, FloatArray, Values, chunks_of
from narrows.compression.compressor import LAST
from narrows.compression.selection import SAMPLE_COUNT_MIN

COUNT = SAMPLE_COUNT_MIN + 70_003  # the chunks are shorter, and the last one is no whole block
MORE = (
    "topk:0.9",
    "mstopk:0.3",
    "topk:70000/70001",
    "topk:30/1000+2bit",
    "randk:0.3",
    "cycle:0.001/0.5",
    "threshold:1.5",
)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "CHUNK", 1 << 12)
    monkeypatch.setattr(buffers, "READ_ONCE", 0)


def updates_of(values: FloatArray) -> list[ChunkedUpdate]:
    """Return `values` as the difference of two arrays, and as values that a function reads."""

    def read(begin: int, out: FloatArray) -> None:
        out[:] = values[begin - 7 :][: out.size]

    return [ChunkedUpdate((7, 7 + values.size), each, np.zeros_like(values)) for each in (values, read)]


def test_chunks_are_whole_multiples() -> None:
    for update in updates_of(np.arange(COUNT, dtype=np.float32)):
        for multiple in (1, 1000, 70_000):
            found = list(chunks_of(update, multiple))
            assert all(begin % multiple == 0 and not part.flags.writeable for begin, part in found)
            assert sum(part.size for _, part in found) == COUNT
            assert max(part.size for _, part in found) == max(4096 // multiple, 1) * multiple


@pytest.mark.parametrize("spec", [*SPECS, *MORE])
def test_chunks_are_coded_as_their_array(spec: str) -> None:
    compressor = parse(spec).contraction()
    for kind in KINDS if spec.startswith(("topk", "mstopk", "cycle")) else ("normal", "rows"):
        values = values_of(kind, COUNT)
        whole = bytes(compressor.encode(values, Memory(5, 3)))
        for update in updates_of(values):
            memory = Memory(5, 3)
            assert bytes(compressor.encode(update, memory)) == whole, kind
            assert memory.step == 4


def test_a_last_update_in_chunks_is_coded_as_its_array() -> None:
    values = values_of("rows", COUNT)
    assert all(LAST.encode(update) == LAST.encode(values) for update in updates_of(values))


@pytest.mark.parametrize("spec", SPECS)
def test_chunks_that_are_not_finite_are_refused_as_their_array_is(spec: str) -> None:
    compressor, values = parse(spec), values_of("normal", COUNT)
    if compressor.lossless:
        return
    values[9000::7001] = [np.nan, *[np.inf] * (len(values[9000::7001]) - 1)]
    said, each = set[str](), list[Values]([values, *updates_of(values)])
    for update in each:
        with pytest.raises(NonFiniteError) as error:
            compressor.encode(update)
        said.add(str(error.value))
    assert len(said) == 1
