"""Coded log-probabilities of a teacher: bit for bit as the reference, bounds, sizes, refusals; and bytes of a hostile teacher.

Run as a script (test_under_bounds_checks does) it prints its seed and replays the loop under whatever Numba settings.
"""

import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import reference_logits as reference
from kit.reference import Array

from narrows.compression import NonFiniteError, PayloadError, SpecError
from narrows.compression.logits import LogitCoding, parse_logits

CODINGS = ("int8", "int4", "fp16")
# (top, classes): all kept, one of many, odd counts, id sections with and without low bits, the largest K and V.
SHAPES = (
    *((1, 1), (32, 1), (1, 2), (2, 2), (5, 2), (7, 10), (10, 10), (32, 256), (128, 256), (255, 256), (256, 256)),
    *((1, 50257), (8, 50257), (32, 50257), (33, 152_000), (1, 2**20 + 7), (32, 2**20 + 7), (1024, 1024), (1024, 5000)),
    *((1, 2**32 - 1), (3, 2**32 - 1), (1024, 2**32 - 1)),
)
KINDS = ("heavy", "normal", "equal", "sure", "deep", "summed")
MUTATIONS = 6000  # of a test; `python tests/unit/compression/test_logits.py N` makes any number


def answers(kind: str, tokens: int, top: int, classes: int) -> tuple[Array, Array]:
    """The log-probabilities of some answers and their ids, in any order."""
    rng = np.random.default_rng([tokens, top, classes % 2**31, KINDS.index(kind)])
    top = min(top, classes)
    logits: Array
    match kind:
        case "heavy":
            logits = 2 * rng.standard_t(3, (tokens, top))
        case "equal":
            logits = np.zeros((tokens, top))
        case "sure":
            logits = np.where(np.arange(top) == top // 2, 0.0, rng.uniform(-30, -20, (tokens, top)))
        case "deep":
            logits = -(10.0 ** rng.uniform(-3, 38, (tokens, top)))
        case _:
            logits = 3 * rng.standard_normal((tokens, top))
    rest = 0.0 if top == classes or kind == "summed" else rng.uniform(0, 1, (tokens, 1))  # the share of other classes
    peak = logits.max(1, keepdims=True)
    given = logits - peak - np.log(np.exp(logits - peak).sum(1, keepdims=True)) + np.log1p(-rest)
    if kind == "summed":  # the rounding of a softmax in bf16
        given += 0.04 * rng.uniform(0, 1, (tokens, 1)) * (given < -0.04)
    ids = np.stack([rng.choice(min(classes, 2**20), top, replace=False) for _ in range(tokens)])
    ids[tokens // 2 :] += classes - min(classes, 2**20)  # the last classes too
    return given.astype(np.float32), ids


def in_order(log_probs: Array, ids: Array) -> tuple[Array, Array]:
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(log_probs, order, 1), np.take_along_axis(ids, order, 1)


def sums(log_probs: Array) -> Array:
    total: Array = np.exp(log_probs.astype(np.float64)).sum(1)
    return total


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize(("top", "classes"), SHAPES)
def test_records_are_those_of_the_reference(coding: str, top: int, classes: int) -> None:
    made, kept = parse_logits(f"top:{top}+{coding}"), min(top, classes)
    for kind in KINDS:
        given, ids = answers(kind, 2 if top > 200 else 6, top, classes)
        records = made.encode(given, ids, classes)
        assert records.shape == (len(ids), made.record_bytes(classes))
        assert made.record_bytes(classes) == reference.bytes_of_record(coding, kept, classes)
        assert records.tobytes() == reference.encode(coding, given, ids, classes).tobytes(), kind
        payload = made.pack(records, classes)
        assert payload == reference.payload(coding, records, kept, classes)
        opened = made.open(payload, classes, len(ids))
        assert np.shares_memory(opened, np.frombuffer(payload, np.uint8)) and not opened.flags.writeable
        log_probs, named = made.decode(opened, classes)
        wanted, wanted_ids = reference.decode(coding, records, kept, classes)
        assert log_probs.tobytes() == wanted.tobytes() and np.array_equal(named, wanted_ids), kind
        assert log_probs.dtype == np.float32 and named.dtype == np.int64
        given, ids = in_order(given, ids)
        assert np.array_equal(named, ids)
        hold(coding, given, log_probs)


def hold(coding: str, given: Array, decoded: Array) -> None:
    """The bounds that docs/logits.md gives."""
    assert np.isfinite(decoded).all() and (decoded <= 0).all() and not np.signbit(decoded[decoded == 0]).any()
    total, coded = sums(given), sums(decoded)
    assert (coded <= 1 + 2e-6).all()
    assert np.allclose(coded, np.clip(total, 2.0**-24, 1), rtol=5e-4, atol=0)
    share, wanted = 1 - coded, 1 - total  # of the other classes: as exact where it is small
    assert (np.abs(share - wanted)[wanted > 0] <= 0.005 * wanted[wanted > 0] + 3e-6).all()
    peak = given.max(1, keepdims=True)
    found = decoded.max(1, keepdims=True) - decoded
    if coding == "fp16":
        depth = np.minimum(peak - given, 65504)
        assert (np.abs(found - depth) <= np.maximum(depth * 2.0**-11, 2.0**-25) + 2e-6).all()
        return
    deepest, step = (16, 1 / 255) if coding == "int8" else (12, 2 / 22.5)  # the longest step, as a share of the span
    depth = np.minimum(peak - given, deepest)
    span = depth.max(1, keepdims=True)
    assert (np.abs(found - depth) <= span * (step / 2 + 2.0**-10) + 2e-6).all()
    order = np.argsort(depth, axis=1, kind="stable")  # what was less probable is not more probable
    assert (np.diff(np.take_along_axis(found, order, 1), axis=1) >= 0).all()


def test_known_sizes() -> None:
    sizes = {
        (spec, classes): parse_logits(spec).record_bytes(classes)
        for spec in ("top:32+int8", "top:32+int4", "top:32+fp16")
        for classes in (50257, 256)
    }
    assert list(sizes.values()) == [51 + 36, 19 + 36, 51 + 20, 19 + 20, 51 + 66, 19 + 66]
    assert parse_logits("top:10+int4").record_bytes(10) == 4 + 5, "all classes need no ids"
    assert parse_logits("top:128+int8").record_bytes(256) == 4 + 128 + 32, "as a bitmap"


def test_records_can_be_cut_and_joined() -> None:
    coding, classes = parse_logits("top:16+int4"), 1000
    given, ids = answers("heavy", 20, 16, classes)
    records = coding.encode(given, ids, classes)
    whole = coding.decode(records, classes)
    for part in (records[3:7], records[::3], records[[5, 1, 1]], np.asfortranarray(records)[:9]):
        rows = {record.tobytes(): i for i, record in enumerate(records)}
        at = [rows[record.tobytes()] for record in part]
        log_probs, named = coding.decode(part, classes)
        assert np.array_equal(log_probs, whole[0][at]) and np.array_equal(named, whole[1][at])
        assert coding.open(coding.pack(part, classes), classes, len(part)).tobytes() == records[at].tobytes()
    twice = np.concatenate((coding.encode(given[:4], ids[:4], classes), coding.encode(given[4:], ids[4:], classes)))
    assert twice.tobytes() == records.tobytes()


@pytest.mark.parametrize("coding", CODINGS)
def test_no_tokens(coding: str) -> None:
    made = parse_logits(f"top:4+{coding}")
    records = made.encode(np.empty((0, 4), np.float32), np.empty((0, 4), np.int64), 10)
    opened = made.open(made.pack(records, 10), 10, 0)
    log_probs, ids = made.decode(opened, 10)
    assert log_probs.shape == ids.shape == (0, 4)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64, np.uint8, np.uint64])
def test_ids_of_any_integer_and_arrays_of_any_layout(dtype: Any) -> None:
    coding = parse_logits("top:8+int8")
    given, ids = answers("normal", 5, 8, 100)
    wanted = coding.encode(given, ids, 100)
    assert np.array_equal(coding.encode(np.asfortranarray(given), ids.astype(dtype), 100), wanted)
    assert np.array_equal(coding.encode(given[::-1], ids[::-1].astype(dtype), 100), wanted[::-1])


def test_the_sum_is_kept() -> None:
    """Rounded values alone would sum to another probability: all of it would be an error of the classes that are left out."""
    given, ids = answers("heavy", 200, 32, 5000)
    coding = parse_logits("top:32+int4")
    decoded, _ = coding.decode(coding.encode(given, ids, 5000), 5000)
    assert np.abs(sums(decoded) / sums(given) - 1).max() < 5e-4


def refused(error: type[Exception], sentence: str, given: Array, ids: Array, classes: int = 10) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        parse_logits("top:3+int8").encode(given, ids, classes)


def test_what_a_caller_gives_wrong() -> None:
    given, ids = np.full((2, 3), -2.0, np.float32), np.tile(np.arange(3), (2, 1))

    def patched(array: Array, value: float) -> Array:
        made = array.copy()
        made[1, 2] = value
        return made

    refused(TypeError, "log_probs must be float32[tokens, 3], not float64[2, 3]", given.astype(np.float64), ids)
    refused(TypeError, "log_probs must be float32[tokens, 3], not float32[3]", given[0], ids[0])
    refused(TypeError, "log_probs must be float32[tokens, 2], not float32[2, 3]", given, ids, 2)
    refused(TypeError, "ids must be integers [2, 3] as log_probs, not float32[2, 3]", given, ids.astype(np.float32))
    refused(TypeError, "ids must be integers [2, 3] as log_probs, not int64[1, 3]", given, ids[:1])
    refused(NonFiniteError, "log-probability nan of token 1 is NaN or infinite", patched(given, np.nan), ids)
    refused(NonFiniteError, "log-probability -inf of token 1 is NaN or infinite", patched(given, -np.inf), ids)
    refused(ValueError, "a log-probability is 0.5, above 0: give log_softmax", patched(given, 0.5), ids)
    refused(ValueError, "the probabilities of token 1 sum above 1.05", patched(given, -0.1), ids)
    refused(ValueError, "class id -1 is not below 10", given, patched(ids, -1))
    refused(ValueError, "class id 10 is not below 10", given, patched(ids, 10))
    refused(ValueError, "class id 1 comes twice in token 1", given, patched(ids, 1))
    refused(ValueError, "over 1 to 4294967295 classes, not 0", given, ids, 0)
    refused(ValueError, "over 1 to 4294967295 classes, not 4294967296", given, ids, 2**32)
    for coding in CODINGS:
        with pytest.raises(ValueError, match="token 0 sum above"):
            parse_logits(f"top:3+{coding}").encode(given + np.float32(1.9), ids, 10)


@pytest.mark.parametrize("spec", ["top:1+int8", "top:1024+int4", "top:32+fp16"])
def test_a_spec_is_parsed(spec: str) -> None:
    assert parse_logits(spec).spec == spec
    assert parse_logits(spec) == parse_logits(spec)
    assert parse_logits(spec.replace(":", ":0", 1) if len(spec) < 12 else spec).spec == spec


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("", "'' does not say how many classes"),
        ("top", "'top' does not say how many classes"),
        ("topk:0.1+int8", "'topk:0.1' does not say how many classes"),
        ("int8", "'int8' does not say how many classes"),
        ("top:+int8", "K is '', and must be a whole number from 1 to 1024"),
        ("top:0+int8", "K is '0', and"),
        ("top:1025+int8", "K is '1025', and"),
        ("top:-1+int8", "K is '-1', and"),
        ("top:٣+int8", "K is '٣', and"),
        ("top:32", "no value coding follows 'top:32'"),
        ("top:32+int8+lz4", "more than one value coding follows 'top:32'"),
        ("top:32+", "value coding '' is not known"),
        ("top:32+int8:stochastic", "value coding 'int8:stochastic' is not known"),
    ],
)
def test_a_wrong_spec_has_its_sentence(spec: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=re.escape(sentence)) as raised:
        parse_logits(spec)
    assert "write top:K+CODING, with K from 1 to 1024 and CODING one of int8, int4, fp16" in str(raised.value)


def test_the_example_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/logits.md").read_text("utf-8")
    (written,) = re.findall(r"^    ((?:[0-9a-f]{2} ?){20})$", page, re.M)
    coding, given = parse_logits("top:3+int4"), np.log(np.array([[0.5, 0.25, 0.125]], np.float32))
    payload = coding.pack(coding.encode(given, np.array([[9, 4, 19]]), 20), 20)
    assert payload == bytes.fromhex(written)
    log_probs, ids = coding.decode(coding.open(payload, 20, 1), 20)
    assert ids.tolist() == [[4, 9, 19]] and np.allclose(np.exp(log_probs), [[0.246, 0.503, 0.126]], atol=5e-4)


def test_the_sizes_of_the_page() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/logits.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| [\d.]+ \| (\d+) \| \S+ \| (\d+) \| \S+ \| (\d+) \|", page, re.M)
    assert len(rows) == 9
    for classes, top, *sizes in rows:
        found = [parse_logits(f"top:{top}+{coding}").record_bytes(int(classes)) for coding in ("int4", "int8", "fp16")]
        assert found == [int(size) for size in sizes]


# --- hostile bytes ---


def survive(coding: LogitCoding, payload: bytes, classes: int, tokens: int) -> bool:
    """Open one payload. True if it is valid. Fails if what is valid decodes to anything that could spoil a loss."""
    try:
        records = coding.open(payload, classes, tokens)
    except PayloadError:
        return False
    log_probs, ids = coding.decode(records, classes)
    assert log_probs.shape == ids.shape == (tokens, coding.kept(classes))
    assert np.isfinite(log_probs).all() and (log_probs <= 0).all() and (sums(log_probs) <= 1 + 1e-5).all()
    assert (ids >= 0).all() and (ids < classes).all() and (np.diff(ids, axis=1) > 0).all()
    size = coding.values.byte_count(ids.shape[1])
    for record, named in zip(records, ids.tolist(), strict=True):
        assert record[size:].tobytes() == reference.id_part(named, classes), "ids have one form"
    return True


def mutated(rng: random.Random, payload: bytes) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 5))):
        size = len(data)
        match rng.randrange(6):
            case 0 | 1 if size:
                data[rng.randrange(size)] ^= 1 << rng.randrange(8)
            case 2 if size:
                data[rng.randrange(min(12, size))] = rng.choice((0, 1, 2, 3, 4, 127, 128, 255))
            case 3:
                del data[rng.randrange(size + 1) :]
            case 4:
                data += rng.randbytes(rng.randrange(1, 20))
            case 5 if size > 12:
                begin = rng.randrange(12, size)
                part = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))[: size - begin]
                data[begin : begin + len(part)] = part
    return bytes(data)


FUZZED = ((1, 1), (3, 3), (1, 2), (5, 9), (7, 70), (32, 256), (32, 50257), (64, 100), (3, 2**32 - 1))


def run(seed: int, rounds: int) -> int:
    """Open `rounds` mutated payloads; how many were still valid."""
    rng = random.Random(seed)
    payloads = []
    for coding in CODINGS:
        for top, classes in FUZZED:
            made, kinds = parse_logits(f"top:{top}+{coding}"), ("heavy", "equal", "sure")
            for kind, tokens in zip(kinds, (1, 3, 10), strict=True):
                given, ids = answers(kind, tokens, top, classes)
                payloads.append((made, made.pack(made.encode(given, ids, classes), classes), classes, tokens))
    valid = 0
    for i in range(rounds):
        made, payload, classes, tokens = rng.choice(payloads)
        try:
            valid += survive(made, mutated(rng, payload), classes, tokens)
        except BaseException:
            print(f"mutation {i} of seed {seed}")
            raise
    return valid


def test_mutated_payloads() -> None:
    seed = int(os.environ.get("NARROWS_FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    print(f"NARROWS_FUZZ_SEED={seed}")
    assert 0 < run(seed, MUTATIONS) < MUTATIONS


def test_each_truncation_and_each_flipped_bit() -> None:
    coding, classes, tokens = parse_logits("top:5+int4"), 300, 2
    given, ids = answers("heavy", tokens, 5, classes)
    payload = coding.pack(coding.encode(given, ids, classes), classes)
    assert survive(coding, payload, classes, tokens)
    for size in range(len(payload)):
        assert not survive(coding, payload[:size], classes, tokens)
    flipped = []
    for bit in range(8 * len(payload)):
        data = bytearray(payload)
        data[bit // 8] ^= 1 << bit % 8
        flipped.append(survive(coding, bytes(data), classes, tokens))
    assert not any(flipped[: 8 * 12]), "each bit of the header counts"
    assert any(flipped[8 * 12 :]) and not all(flipped[8 * 12 :])


def test_each_check_has_its_sentence() -> None:
    coding, classes = parse_logits("top:3+int4"), 20
    given = np.log(np.array([[0.5, 0.25, 0.125]] * 2, np.float32))
    ids = np.array([[4, 9, 19]] * 2)
    payload = coding.pack(coding.encode(given, ids, classes), classes)
    # Record: share, span, 2 bytes of codes, 3 * 2 low bits, 3 + 4 unary bits, 3 spare bits.
    size = coding.record_bytes(classes)
    assert size == 8 and len(payload) == 12 + 2 * size
    second = 12 + size

    def patched(at: int, part: bytes) -> bytes:
        return payload[:at] + part + payload[at + len(part) :]

    def of_ids(lows: int, unary: int) -> bytes:
        """With other ids of the second record."""
        return patched(second + 6, (lows | unary << 6).to_bytes(2, "little"))

    lows, own = 0b010000, 0b1001010  # ids minus 0, 1, 2 are 4, 8, 17: highs 1, 2, 4 and lows 0, 0, 1
    assert of_ids(lows, own) == payload
    nothing_sure = parse_logits("top:3+fp16")
    halves = nothing_sure.pack(nothing_sure.encode(given, ids, classes), classes)
    of_head = "token 1 has a share of the other classes or a span that is out of range"
    no_largest = "token 1 has a value that is not finite, or none that is the largest"
    not_rising = "token 1 has ids that are not 3 rising classes below 20"
    for bad, sentence in (
        (b"", "0 bytes are fewer than a header's 12"),
        (payload[:11], "11 bytes are fewer than a header's 12"),
        (patched(0, b"\2"), "layout version 2 where 1 is expected, for top:3+int4"),
        (patched(1, b"\1"), "value coding 1 where 2 is expected"),
        (patched(2, b"\4"), "top 4 where 3 is expected"),
        (patched(4, b"\x15"), "classes 21 where 20 is expected"),
        (patched(8, b"\xff\xff\xff\xff"), "tokens 4294967295 where 2 is expected"),
        (payload[:-1], "27 bytes, where 2 tokens of 8 bytes each take 28"),
        (payload + b"\0", "29 bytes, where 2 tokens of 8 bytes each take 28"),
        (halves, "value coding 3 where 2 is expected"),
        *((patched(second, struct.pack("<e", share)), of_head) for share in (np.inf, np.nan, -1.0, 0.0, -0.0, 64.1)),
        *((patched(second, struct.pack("<e", share)), None) for share in (2.0**-24, 64.0)),
        *((patched(second + 2, struct.pack("<e", span)), of_head) for span in (np.inf, np.nan, -1.0, -0.0)),
        *((patched(second + 2, struct.pack("<e", span)), None) for span in (0.0, 65504.0)),
        (patched(second + 4, b"\x77"), no_largest),
        (patched(second + 5, bytes([payload[second + 5] | 0x10])), "token 1 has bits set after its last value"),
        (of_ids(lows, own | 1), not_rising),  # four ones
        (of_ids(lows, own & own - 1), not_rising),  # two
        (of_ids(lows, own | 1 << 7), not_rising),  # a spare bit
        (of_ids(0b100000, own), not_rising),  # the last is 20
        (of_ids(0b110000, own), not_rising),
        (of_ids(0b000001, 0b1000110), not_rising),  # 5, then 5 again
        (of_ids(0b000101, 0b1000110), None),  # 5, then 6
    ):
        assert survive(coding, bad, classes, 2) is (sentence is None), sentence
        if sentence is not None:
            with pytest.raises(PayloadError, match=re.escape(sentence)):
                coding.open(bad, classes, 2)
    for at, half, token in ((12, 0, 0), (14, 0x7C00, 0), (16, 0x8000, 0), (len(halves) - 4, 0xFFFF, 1)):
        bad = halves[:at] + struct.pack("<H", half) + halves[at + 2 :]
        with pytest.raises(PayloadError, match=f"the record of token {token} has a"):
            nothing_sure.open(bad, classes, 2)
    for expected in ((20, 1), (20, 3), (19, 2), (2, 2)):
        with pytest.raises(PayloadError, match="is expected"):
            coding.open(payload, *expected)


def test_records_of_another_size_or_from_a_bad_file_are_refused() -> None:
    coding = parse_logits("top:3+int8")
    records = coding.encode(np.full((4, 3), -3.0, np.float32), np.tile(np.arange(3), (4, 1)), 50)
    others: tuple[Array, ...] = (records[:, :-1], records[0], records.astype(np.int16))
    for wrong in others:
        for reader in (coding.check, coding.decode, coding.pack):
            with pytest.raises(
                PayloadError, match=r"records of top:3\+int8 over 50 classes are uint8\[tokens, 10\], not"
            ):
                reader(wrong, 50)
    bad = records.copy()
    bad[2] = 0xFF
    for reader in (coding.check, coding.decode):
        with pytest.raises(PayloadError, match="the record of token 2 has"):
            reader(bad, 50)


def test_a_claim_of_many_tokens_allocates_nothing() -> None:
    """The sizes that a receiver uses are its own: a header of 12 bytes cannot make it take 2**32 records' memory."""
    coding = parse_logits("top:1024+fp16")
    header = struct.pack("<BBHII", 1, 3, 1024, 2**32 - 1, 2**32 - 1)
    with pytest.raises(PayloadError, match="truncated or too long: 12 bytes"):
        coding.open(header, 2**32 - 1, 2**32 - 1)


def test_under_bounds_checks(kept_for_kernels: Path) -> None:
    """The same loop with every array access checked by Numba: reads too, which no guard can see."""
    tests = str(Path(__file__).resolve().parents[2])
    folder = str(kept_for_kernels / "bounds-checked-logits")
    environment = dict(os.environ, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=folder, PYTHONPATH=tests)
    command = [sys.executable, __file__, "2000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    start = random.SystemRandom().randrange(2**32)
    print(f"seed {start}: {run(start, int(sys.argv[1]))} valid")
