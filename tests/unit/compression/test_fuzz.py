"""Bytes from hostile peers: a named error or a valid decode, and nothing written outside or before the checks.

Run as a script (test_under_bounds_checks does) it prints its seed and replays the loop under whatever Numba settings.
"""

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.reference import Array, values_of
from kit.specs import EACH_STAGE

from narrows.compression import PayloadError, accumulate, check, decode, indices, parse
from narrows.compression import device as on_device
from narrows.compression.compressor import LAST, Chain
from narrows.compression.device import kernels_for
from narrows.compression.index_codings import EVERY_INDEX, INDEX_CODINGS
from narrows.compression.value_codings import INT12, VALUE_CODINGS

SPECS = (*EACH_STAGE, "topk:1/16", "topk:0.05+2bit", "cycle:0.1/0.5")
COUNTS = (0, 1, 7, 65, 256, 700, 3000)
MUTATIONS = 10_000  # of a test; `python tests/unit/compression/test_fuzz.py N` makes any number
GUARD = 4096
DEVICE = kernels_for("host")


def survive(payload: bytes, count: int) -> bool:
    """Feeds one payload to all readers, and to the fold of a device, which uploads what it has checked.

    True if it is valid. Fails on a stray write or on readers that differ.
    """
    try:
        check(payload, count)
        valid = True
    except PayloadError:
        valid = False
    whole = np.full(count + 2 * GUARD, 0.25, np.float32)
    out, summed = whole[GUARD : GUARD + count], np.full(count, 0.25, np.float32)

    def fold_on_device() -> None:
        on_device.accumulate(DEVICE, payload, 0.5, summed)
        assert summed.tobytes() == out.tobytes()

    readers: tuple[Callable[[], object], ...] = (
        lambda: indices(payload, count),
        lambda: accumulate(payload, 0.5, out),
        fold_on_device,
        lambda: decode(payload, out),
    )
    for reader in readers:
        try:
            reader()
            assert valid
        except PayloadError:
            assert not valid
            assert np.all(out == 0.25) and np.all(summed == 0.25)
    assert np.all(whole[:GUARD] == 0.25)
    assert np.all(whole[GUARD + count :] == 0.25)
    return valid


def mutated(rng: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 5))):
        size = len(data)
        match rng.randrange(8):
            case 0 | 1 if size:
                data[rng.randrange(size)] ^= 1 << rng.randrange(8)
            case 2 if size:
                data[rng.randrange(min(16, size))] = rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 127, 128, 255))
            case 3 if size >= 16:
                value = rng.choice((0, 1, 2, 31, 32, 63, 64, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(5000)))
                struct.pack_into("<I", data, rng.choice((8, 8, 12, 12, 4)), value)
            case 4:
                del data[rng.randrange(size + 1) :]
            case 5:
                data += rng.randbytes(rng.randrange(1, 20))
            case 6 if size > 16:
                begin = rng.randrange(16, size)
                data[begin : begin + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))
            case 7 if size > 16 and not data[3]:
                # Valid lz4 around a bad body; at times with a false raw size.
                body = bytearray(lz4.block.compress(bytes(data[16:]), store_size=True))
                if rng.random() < 0.3:
                    struct.pack_into("<I", body, 0, rng.choice((0, 1, 2**31, 2**32 - 1, rng.randrange(20_000))))
                data[3] = 1
                data[16:] = body
    return bytes(data)


def run(seed: int, rounds: int) -> int:
    """Mutates `rounds` payloads; how many were still valid."""
    rng = random.Random(seed)
    payloads = []
    for spec in SPECS:
        for count in COUNTS:
            values = np.random.default_rng(count).standard_normal(count, dtype=np.float32)
            if "lz4" in spec:
                values[: count // 2] = 0.0
            if spec == "topk:1/16":  # at regular distances: gaps of fixed width
                values = np.where(np.arange(count) % 16 == 3, values, np.float32(0.0))
            if spec == "topk:0.05+2bit":  # in clusters: grouped Rice
                values[np.arange(count) // 50 % 6 > 0] *= np.float32(0.1)
            payloads += [(bytes(chain.encode(values)), count) for chain in (parse(spec), LAST)]
    assert {payload[1] for payload, _ in payloads} == {EVERY_INDEX, *INDEX_CODINGS}
    assert {payload[2] for payload, _ in payloads} == set(VALUE_CODINGS)
    valid = 0
    for i in range(rounds):
        payload, count = rng.choice(payloads)
        try:
            valid += survive(mutated(rng, payload), count)
        except BaseException:
            print(f"mutation {i} of seed {seed}")
            raise
    return valid


def test_mutated_payloads() -> None:
    seed = int(os.environ.get("NARROWS_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    print(f"NARROWS_FUZZ_SEED={seed}")
    valid = run(seed, MUTATIONS)
    assert 0 < valid < MUTATIONS


@given(
    index=st.integers(0, 8), value=st.integers(0, 8), packed=st.sampled_from((0, 0, 0, 1, 2)),
    kept=st.integers(0, 100), parameter=st.integers(0, 70) | st.sampled_from((0x30007, 0x70007, 0x630064)),
    body=st.binary(max_size=200),
)  # fmt: skip
@settings(max_examples=400)
def test_random_bodies(index: int, value: int, packed: int, kept: int, parameter: int, body: bytes) -> None:
    survive(struct.pack("<BBBBIII", 1, index, value, packed, 100, kept, parameter) + body, 100)


@pytest.mark.parametrize("size", range(17))
def test_short_payloads(size: int) -> None:
    assert not survive(bytes(parse("topk:0.5").encode(np.ones(99, np.float32)))[:size], 99)


def test_an_lz4_bomb_is_refused_before_it_is_unpacked() -> None:
    """Ten bytes that claim 2 GB: the claim is compared with what `count` values can take, and with LZ4's own ratio."""
    header = struct.pack("<BBBBIII", 1, 0, 0, 1, 2**29, 2**29, 0)
    with pytest.raises(PayloadError, match="cannot be the"):
        check(header + struct.pack("<I", 2**31) + b"\x1f" * 6, 2**29)


def test_each_check_has_its_sentence() -> None:
    """The layout has one form for each content; what deviates is refused by name, also where it could be read."""
    payload = bytes(parse("topk:0.04+int8").encode(np.arange(100, dtype=np.float32) ** 2))
    sparse = bytes(parse("topk:0.1").encode(values_of("normal", 100)))
    kept, r = struct.unpack("<8xII", sparse[:16])
    assert (payload[1], payload[2], sparse[1]) == (1, 2, 1)
    assert kept * r % 8
    last_low = 16 + 4 * kept + kept * r // 8

    def patched(data: bytes, offset: int, part: bytes) -> bytes:
        return data[:offset] + part + data[offset + len(part) :]

    def of(spec: str, values: Array | None = None) -> bytes:
        return bytes(parse(spec).encode(np.arange(100, dtype=np.float32) if values is None else values))

    regular = np.where(np.arange(100) % 8 == 1, np.float32(1), np.float32(0))
    clustered = np.where(np.isin(np.arange(3000) // 150, (3, 4, 17)), np.float32(1), np.float32(0))
    clustered[::500] = 1.0
    fixed, grouped = of("topk:1.0", regular), of("topk:1.0+sign", clustered)
    assert (fixed[1], grouped[1]) == (2, 3)
    bits = {spec: of(spec, np.arange(99, dtype=np.float32)) for spec in ("int4", "sign", "2bit")}
    plain = Chain(None, INT12, None)
    last = bytes(plain.encode(np.arange(100, dtype=np.float32)))
    strided = of("cycle:0.1/0.5")
    assert (strided[1], strided[36:]) == (7, b"\x00\xe0\x03")
    padding = patched(sparse, last_low, bytes([sparse[last_low] | 0x80]))
    raw = struct.pack("<I", len(sparse) - 16 + 1) + lz4.block.compress(sparse[16:], store_size=False)
    for count, bad, sentence in (
        (100, patched(payload, 0, b"\x02"), "layout version 2; this side reads 1"),
        (100, patched(payload, 1, b"\x09"), "index coding 9, which"),
        (100, patched(payload, 2, b"\x09"), "value coding 9, which"),
        (100, patched(payload, 3, b"\x09"), "byte coding 9, which"),
        (100, patched(payload, 8, b"\x65"), "claims to hold 101 of 100 values"),
        (100, patched(payload, 12, b"\x20"), "Rice parameter 32 is above 31"),
        (100, patched(payload, 16, b"\x80\x7f"), "an int8 scale is out of range"),
        (100, patched(payload, 16, b"\x00\x80"), "an int8 scale is out of range"),
        (100, patched(of("int4"), 16, b"\x00\x7e"), "an int4 scale is out of range"),
        (100, patched(last, 16, b"\x00\x7a"), "an int12 scale is out of range"),
        (
            99,
            patched(bytes(plain.encode(np.arange(99, dtype=np.float32))), 16 + 2 + 149, b"\x10"),
            "bits are set after",
        ),
        (100, patched(of("sign"), 16, b"\x80\x7f"), "a sign scale is out of range"),
        (100, patched(of("2bit"), 16, b"\xf0\x0f\x00"), "a 2bit scale is out of range"),
        (100, patched(of("2bit"), 16, b"\x00\x00\xff"), "a 2bit scale is out of range"),
        (99, patched(bits["int4"], 16 + 2 * 2 + 49, b"\x10"), "bits are set after the last value"),
        (99, patched(bits["sign"], 16 + 2 + 12, b"\x08"), "bits are set after the last value"),
        (99, patched(bits["2bit"], 16 + 3 + 12, b"\x08"), "bits are set after the last value"),
        (99, patched(bits["2bit"], 16 + 3 + 13 + 12, b"\x80"), "bits are set after the last value"),
        (99, patched(bits["2bit"], 16 + 3 + 13 + 12, b"\x07"), None),
        (100, patched(of("uint8minmax"), 20, struct.pack("<f", -1.0)), "a uint8minmax scale is out of range"),
        (100, patched(of("uint8minmax"), 16, struct.pack("<f", 3.4e38)), None),
        (100, patched(of("uint8minmax"), 16, struct.pack("<ff", 3.4e38, 1e37)), "a uint8minmax scale is out of range"),
        (100, patched(payload, 1, b"\x06"), "index coding 6, which"),
        (100, payload + b"\x01", "truncated or too long"),
        (100, padding, "bits are set after the last index"),
        (100, patched(sparse, 3, b"\x01")[:16] + raw, f"holds {len(sparse) - 16} bytes and claims {len(sparse) - 15}"),
        (100, patched(fixed, 12, b"\x21"), "cannot be the indices of 13 of 100 values"),
        (100, patched(fixed, len(fixed) - 1, b"\xff"), "bits are set after the last index"),
        (100, patched(fixed, 16 + 52, b"\xff\xff\xff\xff"), "its indices are not 13 below 100"),
        (100, patched(of("cycle:0.1"), 14, b"\x0a"), "10 of 100 values are not every 10th from 10 on"),
        (100, patched(of("cycle:0.1"), 12, b"\x0c"), "10 of 100 values are not every 12th from 0 on"),
        (100, patched(of("cycle:0.1"), 12, b"\x00"), "10 of 100 values are not every 0th from 0 on"),
        (100, patched(strided, 14, b"\x0a"), "5 of 100 values are not among every 10th from 10 on"),
        (100, patched(strided, 12, b"\x00"), "5 of 100 values are not among every 0th from 0 on"),
        (100, patched(strided, 12, b"\x1a"), "5 of 100 values are not among every 26th from 0 on"),
        (100, patched(strided, 12, b"\x0c"), "its indices are not 5 below 9"),
        (100, patched(strided, 12, b"\x0b"), None),
        (100, patched(strided, 36, b"\x20"), "Rice parameter 32 is above 31"),
        (100, patched(strided, 36, b"\x03"), "cannot be the indices of 5 of 10 values"),
        (100, strided[:-3], "cannot be the indices of 5 of 100 values"),
        (100, strided[:-2], "cannot be the indices of 5 of 10 values"),
        (100, strided[:-1], "its indices are not 5 below 10"),
        (100, strided + b"\x01", "cannot be the indices of 5 of 10 values"),
        (100, strided[:-1] + b"\x00", "cannot be the indices of 5 of 10 values"),
        (100, strided[:-1] + b"\x3e", "its indices are not 5 below 10"),
        (100, strided[:8] + bytes(8), None),
        (100, strided[:8] + bytes(4) + b"\x0a" + bytes(3), "index parameter 10 without indices"),
        (3000, patched(grouped, 12, b"\x01"), "cannot be the indices of"),
        (3000, grouped[:-1] + bytes([grouped[-1] ^ 3]), "its indices are not"),
    ):
        assert survive(bad, count) is (sentence is None), sentence
        if sentence is not None:
            with pytest.raises(PayloadError, match=sentence):
                check(bad, count)


def test_under_bounds_checks(kept_for_kernels: Path) -> None:
    """The same loop with every array access checked by Numba: reads too, which no guard can see."""
    tests = str(Path(__file__).resolve().parents[2])
    folder = str(kept_for_kernels / "bounds-checked")
    environment = dict(os.environ, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=folder, PYTHONPATH=tests)
    command = [sys.executable, __file__, "2000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    start = random.SystemRandom().randrange(2**32)
    print(f"seed {start}: {run(start, int(sys.argv[1]))} valid")
