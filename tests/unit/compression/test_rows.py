"""Values of rows: each is coded by itself, as tests/kit/reference.py codes it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from kit import reference

from narrows.compression import PayloadError, rows
from narrows.compression.value_codings import BF16, FP16, FP32, INT8

Row = npt.NDArray[np.float32]


def _halves(encode: Callable[..., int], decode: Callable[..., None]) -> Callable[[Row], Row]:
    def coded(row: Row) -> Row:
        halves, out = np.empty(row.size, np.uint16), np.empty_like(row)
        encode(row, halves)
        decode(halves, out)
        return out

    return coded


def _int8(row: Row) -> Row:
    scales, codes, out = np.empty(-(-row.size // 256), np.uint16), np.empty(row.size, np.int8), np.empty_like(row)
    reference.encode_int8(row, False, 0, 0, 0, np.empty(256, np.uint32), scales, codes)
    reference.decode_int8(scales, codes, out)
    return out


CODED: dict[int, tuple[Callable[[Row], Row], float]] = {  # and bytes of a row of 257 values
    FP32.wire_id: (lambda row: row, 1028),
    FP16.wire_id: (_halves(reference.encode_fp16, reference.decode_fp16), 514),
    BF16.wire_id: (_halves(reference.encode_bf16, reference.decode_bf16), 514),
    INT8.wire_id: (_int8, 261),
}


@pytest.mark.parametrize("coding", CODED)
@pytest.mark.parametrize(("kept", "dim"), [(1, 1), (300, 5), (3, 255), (3, 256), (9, 257), (9, 16384)])
def test_each_row_is_coded_as_if_it_were_alone(coding: int, kept: int, dim: int) -> None:
    random = np.random.default_rng(kept * dim)
    values = random.standard_normal((kept, dim), np.float32) * (10.0 ** random.integers(-3, 4, (kept, 1))).astype(
        np.float32
    )
    at = np.arange(0, 2 * kept, 2, dtype=np.uint32)
    found = rows.decode(rows.encode(7, 2 * kept, at, values, coding))
    assert (found.table, found.count, found.coding) == (7, 2 * kept, coding) and np.array_equal(found.indices, at)
    code, size = CODED[coding]
    assert np.array_equal(found.values, np.stack([code(row) for row in values]))
    assert rows.row_bytes(257, coding) == size


def test_what_a_coding_cannot_have_travels_as_it_is() -> None:
    values = np.array([[1.0, np.nan], [np.inf, 2.0]], np.float32)
    body, coding = rows.encode_values(values, INT8.wire_id)
    assert coding == FP32.wire_id and np.array_equal(rows.decode_values(body, 2, 2, coding), values, equal_nan=True)


def test_bodies_that_are_none_are_refused() -> None:
    body, coding = rows.encode_values(np.ones((2, 3), np.float32), INT8.wire_id)
    scales = np.frombuffer(body, np.uint16, 2)
    assert len(body) == 2 * (2 + 3) and scales[0] == scales[1]
    with pytest.raises(PayloadError, match="cannot be 3 rows"):
        rows.decode_values(body, 3, 3, coding)
    with pytest.raises(PayloadError, match="value coding 4 cannot be"):
        rows.decode_values(body, 2, 3, 4)
    with pytest.raises(PayloadError, match="scale is out of range"):
        rows.decode_values(b"\xff\xff" + body[2:], 2, 3, coding)
    whole = rows.encode(0, 9, np.arange(2, dtype=np.uint32), np.ones((2, 3), np.float32), coding)
    for place in (10, 11):
        with pytest.raises(PayloadError, match="side does not read"):
            rows.decode(whole[:place] + b"\x09" + whole[place + 1 :])


# In an interpreter of its own: here another test may have compiled a kernel for such arrays.
COMPILED = """
import numpy as np
from numba.core.dispatcher import Dispatcher
from narrows.compression import rows, warm_up
from narrows.compression.kernels import cpu

def compiled():
    return {(name, each) for name, k in vars(cpu).items() if isinstance(k, Dispatcher) for each in k.signatures}

warm_up()
before = compiled()
for every in (1, 7, 64):
    for kept in (10, 5000):
        at = np.arange(0, kept * every, every, dtype=np.uint32)
        for coding in rows.CODINGS:
            rows.decode(rows.encode(0, kept * every, at, np.ones((kept, 32), np.float32), coding))
print(len(before), sorted(compiled() - before))
"""


def test_a_run_compiles_no_kernel_for_its_rows() -> None:
    """Else a worker stands still for seconds in its first step, and holds each kernel twice."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=100)
    count, new = done.stdout.split(maxsplit=1)
    assert int(count) > 20 and new.strip() == "[]", done.stderr
