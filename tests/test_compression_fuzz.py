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

from narrows.compression import PayloadError, accumulate, check, decode, parse

SPECS = (
    "dense",
    "fp16",
    "int8",
    "lz4",
    "topk:0.02",
    "topk:0.1+fp16",
    "topk:0.05+int8",
    "topk:0.3+int8",
    "topk:0.1+lz4",
)
COUNTS = (0, 1, 7, 256, 700, 3000)
GUARD = 4096


def survive(payload: bytes, count: int) -> bool:
    """Feeds one payload to all three readers; True if it is valid. Fails on a stray write or on readers that differ."""
    try:
        check(payload, count)
        valid = True
    except PayloadError:
        valid = False
    whole = np.full(count + 2 * GUARD, 0.25, np.float32)
    out = whole[GUARD : GUARD + count]
    readers: tuple[Callable[[], None], ...] = (lambda: accumulate(payload, 0.5, out), lambda: decode(payload, out))
    for reader in readers:
        try:
            reader()
            assert valid
        except PayloadError:
            assert not valid
            assert np.all(out == 0.25)
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
                data[rng.randrange(min(16, size))] = rng.choice((0, 1, 2, 3, 127, 128, 255))
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
            values[: count // 2] = 0.0 if "lz4" in spec else values[: count // 2]
            payloads.append((bytes(parse(spec).encode(values)), count))
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
    valid = run(seed, 6000)
    assert 0 < valid < 6000


@given(
    index=st.integers(0, 2), value=st.integers(0, 3), packed=st.sampled_from((0, 0, 0, 1, 2)),
    kept=st.integers(0, 40), parameter=st.integers(0, 33), body=st.binary(max_size=120),
)  # fmt: skip
@settings(max_examples=1500, deadline=None)
def test_random_bodies(index: int, value: int, packed: int, kept: int, parameter: int, body: bytes) -> None:
    survive(struct.pack("<BBBBIII", 1, index, value, packed, 40, kept, parameter) + body, 40)


@pytest.mark.parametrize("size", range(17))
def test_short_payloads(size: int) -> None:
    assert not survive(bytes(parse("topk:0.5").encode(np.ones(9, np.float32)))[:size], 9)


def test_an_lz4_bomb_is_refused_before_it_is_unpacked() -> None:
    """Ten bytes that claim 2 GB: the claim is compared with what `count` values can take, and with LZ4's own ratio."""
    header = struct.pack("<BBBBIII", 1, 0, 0, 1, 2**29, 2**29, 0)
    with pytest.raises(PayloadError, match="cannot be the"):
        check(header + struct.pack("<I", 2**31) + b"\x1f" * 6, 2**29)


def test_each_check_has_its_sentence() -> None:
    """The layout has one form for each content; what deviates is refused by name, also where it could be read."""
    payload = bytes(parse("topk:0.5+int8").encode(np.arange(9, dtype=np.float32)))  # kept 4, r 0: all at the end
    sparse = bytes(parse("topk:0.3").encode(np.tile(np.array((1, 0, 0, 0), np.float32), 25)))
    kept, r = struct.unpack("<8xII", sparse[:16])
    assert kept * r % 8
    last_low = 16 + 4 * kept + kept * r // 8

    def patched(data: bytes, offset: int, part: bytes) -> bytes:
        return data[:offset] + part + data[offset + len(part) :]

    padding = patched(sparse, last_low, bytes([sparse[last_low] | 0x80]))
    raw = struct.pack("<I", len(sparse) - 16 + 1) + lz4.block.compress(sparse[16:], store_size=False)
    for count, bad, sentence in (
        (9, patched(payload, 0, b"\x02"), "layout version 2; this side reads 1"),
        (9, patched(payload, 1, b"\x09"), "index coding 9, which"),
        (9, patched(payload, 2, b"\x09"), "value coding 9, which"),
        (9, patched(payload, 3, b"\x09"), "byte coding 9, which"),
        (9, patched(payload, 8, b"\x0a"), "claims to hold 10 of 9 values"),
        (9, patched(payload, 12, b"\x20"), "Rice parameter 32 is above 31"),
        (9, patched(payload, 16, b"\x80\x7f"), "int8 scale is negative, not finite or too large"),
        (9, patched(payload, 16, b"\x00\x80"), "int8 scale is negative, not finite or too large"),
        (9, payload + b"\x01", "truncated or too long"),
        (100, padding, "bits are set after the last index"),
        (100, patched(sparse, 3, b"\x01")[:16] + raw, f"holds {len(sparse) - 16} bytes and claims {len(sparse) - 15}"),
    ):
        assert survive(bad, count) is False
        with pytest.raises(PayloadError, match=sentence):
            check(bad, count)


def test_under_bounds_checks(tmp_path: Path) -> None:
    """The same loop with every array access checked by Numba: reads too, which no guard can see."""
    environment = dict(os.environ, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(tmp_path))
    command = [sys.executable, __file__, "2000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    start = random.SystemRandom().randrange(2**32)
    print(f"seed {start}: {run(start, int(sys.argv[1]))} valid")
