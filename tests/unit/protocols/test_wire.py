"""The bytes on the link: what is said comes back as it was said, and nothing else comes in.

Random runs print their seed; NARROWS_TEST_SEED replays one.
"""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.seed import SEED

from narrows.protocols import messages as m
from narrows.protocols.config import key_ranges
from narrows.protocols.config.key_ranges import covers, parts, split
from narrows.protocols.config.model_spec import (
    EXTENTS_MAX,
    ModelSpec,
    NamedArray,
    TensorSpec,
    pack_arrays,
    unpack_arrays,
)
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.wire import (
    FIELDS_BYTES_MAX,
    FRAME_BYTES,
    FRAME_VALUES,
    HEADER_BYTES_MAX,
    MAGIC,
    PAYLOAD_BYTES_MAX,
    VERSION,
    decode,
    encode,
    pack,
    unpack,
)

MUTATIONS = 20_000
NAMED = (RemoteProtocolError, IncompatibleError)

INT = st.integers(-1, (1 << 63) - 1)
FLOAT = st.floats(allow_nan=False)
INTS = st.lists(INT, max_size=4).map(tuple)
NAME = st.text(max_size=20).filter(str.isprintable)


def rows(*columns: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(*columns), max_size=4).map(tuple)


# One strategy for each annotation of messages.CHECKS.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": INT,
    "float": FLOAT,
    "bool": st.booleans(),
    "str": st.text(max_size=20),
    "Name": NAME,
    "bytes": st.binary(max_size=20),
    "Buffer": st.binary(max_size=20),
    "Ints": INTS,
    "Pairs": rows(INT, INT),
    "Triples": rows(INT, INT, INT),
    "Quads": rows(INT, INT, INT, INT),
    "Weights": rows(INT, FLOAT),
    "Sets": st.lists(INTS, max_size=4).map(tuple),
    "Texts": st.lists(NAME, max_size=4).map(tuple),
}

# Values of every type that msgpack knows, and which annotations each is right for.
INTRUDERS: tuple[tuple[object, frozenset[str]], ...] = (
    (None, frozenset()),
    (True, frozenset({"bool"})),
    (7, frozenset({"int"})),
    (-2, frozenset()),
    (1 << 63, frozenset()),
    (0.5, frozenset({"float"})),
    ("text", frozenset({"str", "Name"})),
    ("two\nlines", frozenset({"str"})),
    ("\x1b[2Jgone", frozenset({"str"})),
    ("x" * (m.TEXT_MAX + 1), frozenset()),
    (b"raw", frozenset({"bytes", "Buffer"})),
    ({"a": 1}, frozenset()),
    ((1, 2), frozenset({"Ints"})),
    ((True,), frozenset()),
    (("1",), frozenset({"Texts"})),
    (("1\r",), frozenset()),
    (((1,),), frozenset({"Sets"})),
    (((1, 2),), frozenset({"Pairs", "Sets"})),
    (((1, 0.5),), frozenset({"Weights"})),
    (((1, 2, 3),), frozenset({"Triples", "Sets"})),
    (((1, 2, 3, 4),), frozenset({"Quads", "Sets"})),
    (((1, 2), (3,)), frozenset({"Sets"})),
    (((1, "2"),), frozenset()),
    (((1, -2),), frozenset()),
)
EMPTY_ROWS = frozenset(
    {"Ints", "Pairs", "Triples", "Quads", "Weights", "Sets", "Texts"}
)  # () is right for each of these


def annotations_of(kind: type[m.Message]) -> dict[str, str]:
    return {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]


def messages(kind: type[m.Message]) -> st.SearchStrategy[m.Message]:
    return st.builds(kind, **{name: VALUES[annotation] for name, annotation in annotations_of(kind).items()})


PLAIN: dict[str, object] = {
    "int": 7,
    "float": 0.5,
    "bool": True,
    "str": "text",
    "Name": "text",
    "bytes": b"raw",
    "Buffer": b"payload!",
    "Ints": (1, 300),
    "Pairs": ((1, 2), (3, 4)),
    "Triples": ((1, 2, 3), (4, 5, 6)),
    "Quads": ((1, 2, 3, 4),),
    "Weights": ((1, 0.5),),
    "Sets": ((1, 2), (), (3,)),
    "Texts": ("one", ""),
}


def sample(kind: type[m.Message]) -> m.Message:
    return kind(**{name: PLAIN[annotation] for name, annotation in annotations_of(kind).items()})


SAMPLES = {kind: sample(kind) for kind in m.KIND_OF}
by_kind = pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)


def raw(message: m.Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def header(body: object, version: int = VERSION) -> bytes:
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return MAGIC + bytes((version,)) + packed


def body_of(frame: bytes) -> list[Any]:
    return list(msgpack.unpackb(frame[len(MAGIC) + 1 :], use_list=False))


def test_every_annotation_of_a_message_has_a_check_and_a_strategy() -> None:
    used = {annotation for kind in m.KIND_OF for annotation in annotations_of(kind).values()}
    assert used <= set(m.CHECKS) and set(m.CHECKS) == set(VALUES) == set(PLAIN)
    assert len(set(m.KINDS.values())) == len(m.KINDS), "a number of its own for each kind"
    between_peers = {m.Offer, m.OfferAck, m.GossipEnded, m.ModelRequest, m.Ping}
    assert {kind for kind, number in m.KIND_OF.items() if 32 <= number < 48} == between_peers


@given(st.data())
@settings(max_examples=600)
def test_every_message_comes_back_as_it_was_sent(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(m.KIND_OF, key=lambda k: k.__name__)))
    message = data.draw(messages(kind))
    assert decode(encode(message)) == message
    frames = [memoryview(frame) for frame in raw(message)]  # as ZeroMQ hands them over
    assert decode(frames) == message


@by_kind
def test_a_payload_is_not_copied(kind: type[m.Message]) -> None:
    message = SAMPLES[kind]
    if not hasattr(message, "payload"):
        assert len(encode(message)) == 1
        return
    assert encode(message)[1] is message.payload
    frames = raw(message)
    again: Any = decode(frames)
    assert again.payload is frames[1]


@by_kind
def test_every_truncation_is_refused(kind: type[m.Message]) -> None:
    head, *payload = raw(SAMPLES[kind])
    for length in range(len(head)):
        with pytest.raises(RemoteProtocolError):
            decode([head[:length], *payload])
    with pytest.raises(RemoteProtocolError, match="not msgpack"):
        decode([head + b"\0", *payload])


@by_kind
def test_every_wrong_number_of_fields_is_refused_by_name(kind: type[m.Message]) -> None:
    head, *payload = raw(SAMPLES[kind])
    body = body_of(head)
    for wrong in (body[:-1], [*body, 7], [*body, None], body[:1]):
        with pytest.raises(RemoteProtocolError, match=f"{kind.__name__} has {len(body) - 1} fields"):
            decode([header(wrong), *payload])


@by_kind
def test_every_wrong_number_of_frames_is_refused(kind: type[m.Message]) -> None:
    frames = raw(SAMPLES[kind])
    for wrong in ([], [*frames, b""] if len(frames) == 1 else frames[:1], [*frames, b"", b""]):
        with pytest.raises(RemoteProtocolError, match="frames"):
            decode(wrong)


@by_kind
def test_every_wrong_type_is_refused_by_the_name_of_its_field(kind: type[m.Message]) -> None:
    message = SAMPLES[kind]
    head, *payload = raw(message)
    names = [name for name in annotations_of(kind) if name != "payload"]
    for position, name in enumerate(names):
        annotation = annotations_of(kind)[name]
        for value, right_for in (*INTRUDERS, ((), EMPTY_ROWS)):
            body = body_of(head)
            body[position + 1] = value
            values = {f: getattr(message, f) for f in annotations_of(kind)} | {name: value}
            if annotation in right_for:
                assert getattr(decode([header(body), *payload]), name) == value == getattr(kind(**values), name)
                continue
            with pytest.raises(RemoteProtocolError, match=rf"{kind.__name__}\.{name} is .*, not {annotation}"):
                decode([header(body), *payload])
            with pytest.raises(RemoteProtocolError, match=rf"{kind.__name__}\.{name}"):
                kind(**values)  # ours are checked as theirs are


@by_kind
def test_another_version_is_incompatible_and_another_protocol_is_none(kind: type[m.Message]) -> None:
    head, *payload = raw(SAMPLES[kind])
    for version in (0, VERSION + 1, 255):
        with pytest.raises(IncompatibleError, match=f"version {version}, this one speaks {VERSION}"):
            decode([MAGIC + bytes((version,)) + head[len(MAGIC) + 1 :], *payload])
    for foreign in (b"", b"GET / HTTP/1.1\r\n", b"nrws" + head[4:], b"\x16\x03\x01\x02\x00\x01"):
        with pytest.raises(RemoteProtocolError, match="does not speak"):
            decode([foreign, *payload])


@pytest.mark.parametrize(
    "body",
    [
        None,
        7,
        "x",
        [],
        {},
        {"a": 1},
        [None],
        [True],
        [1.0],
        ["1"],
        [-1],
        [0],
        [19],
        [40],
        [99],
        [1 << 63],
        [[1]],
        [b"\1"],
    ],
    ids=repr,
)
def test_what_names_no_kind_is_refused(body: object) -> None:
    with pytest.raises(RemoteProtocolError, match="no known kind"):
        decode([header(body)])


def test_oversized_messages_are_refused_before_they_are_read() -> None:
    with pytest.raises(RemoteProtocolError, match=f"more than {HEADER_BYTES_MAX}"):
        decode([MAGIC + bytes((VERSION,)) + bytes(HEADER_BYTES_MAX)])
    push = raw(SAMPLES[m.Push])
    with pytest.raises(RemoteProtocolError, match=f"more than {PAYLOAD_BYTES_MAX}"):
        decode([push[0], bytes(PAYLOAD_BYTES_MAX + 1)])  # never touched: no memory behind it
    long = (0,) * (m.LIST_MAX + 1)
    for name, value in (
        ("Ints", long),
        ("Sets", (long,)),
        ("Sets", ((),) * len(long)),
        ("Pairs", ((0, 0),) * len(long)),
    ):
        assert not m.CHECKS[name](value)


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        (b"\x01", "more than 4194304"),
        (b"\x91\x01", "more than 4194304"),
        (b"\xa1a", "more than 4194304"),
        (b"\x81\xa1a\x01", "more than 4194304"),
        (b"\xc4\x00", "more than 64"),
    ],
    ids=["ints", "rows", "texts", "maps", "fields"],
)
def test_a_header_of_many_small_values_is_refused_before_they_are_made(unit: bytes, why: str) -> None:
    """Five million of them: made, they would take 160 MiB and more."""
    count = 5_000_000
    head = b"" if "64" in why[-2:] else b"\x92\x01"
    frame = MAGIC + bytes((VERSION,)) + head + b"\xdd" + count.to_bytes(4, "big") + unit * count
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=why):
            decode([frame])
        assert tracemalloc.get_traced_memory()[1] < 4 * len(frame)
    finally:
        tracemalloc.stop()


def test_a_header_may_hold_many_bytes() -> None:
    ready = m.Ready(1, 1, 1, (), bytes(FIELDS_BYTES_MAX + 1))
    assert decode(encode(ready)) == ready


@pytest.mark.parametrize(
    "length",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 5000,
    ],
    ids=["array", "map", "bytes", "str", "depth"],
)
def test_a_length_that_a_peer_states_allocates_nothing(length: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="not msgpack"):
        decode([MAGIC + bytes((VERSION,)) + length])
    with pytest.raises(RemoteProtocolError, match="not msgpack"):
        unpack(length)


def test_errors_are_short_whatever_was_sent() -> None:
    body = body_of(raw(SAMPLES[m.Leave])[0])
    body[1] = b"x" * 1_000_000
    with pytest.raises(RemoteProtocolError) as caught:
        decode([header(body)])
    assert len(str(caught.value)) < 200


# Values that are packed inside a field.

PLAN = ModelSpec(
    (
        TensorSpec("a.weight", (3, 5), "float32"),
        TensorSpec("a.bias", (), "bfloat16"),
        TensorSpec("b", (0, 4), "float16"),
    ),
    "SGD",
    ((0, 2), (1,)),
    0.5,
    degree=0.25,
    frozen=(("base", "1f"), ("head", "2f")),
)
PACKED: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "pack": (unpack, pack([None, True, 1, -3, 0.5, "x", b"y", [1, [2]], {"k": [1]}])),
    "plan": (ModelSpec.unpacked, PLAN.packed()),
    "settings": (Settings.unpacked, Settings(sync="ssp", staleness=2, compress="topk:0.01").validated().packed()),
    "arrays": (unpack_arrays, pack_arrays({"n": ("int64", (), b"12345678"), "mean": ("float32", (2,), b"12345678")})),
}


def test_packed_fields_come_back() -> None:
    assert unpack(PACKED["pack"][1]) == [None, True, 1, -3, 0.5, "x", b"y", [1, [2]], {"k": [1]}]
    assert ModelSpec.unpacked(PLAN.packed()) == PLAN
    for degree in (0.0, 0.25, 1.0):
        assert ModelSpec.unpacked(replace(PLAN, degree=degree).packed()).degree == degree
    assert (
        Settings.unpacked(PACKED["settings"][1]) == Settings(sync="ssp", staleness=2, compress="topk:0.01").validated()
    )
    assert unpack_arrays(b"") == {}


@pytest.mark.parametrize(
    "unit", [b"\x80", b"\x90", b"\xa1a", b"\x81\xa1a\x80"], ids=["maps", "lists", "texts", "maps in maps"]
)
@pytest.mark.parametrize("what", ["pack", "plan", "arrays", "row"])
def test_a_packed_field_of_many_small_values_is_refused_before_they_are_made(what: str, unit: bytes) -> None:
    """Five million of them: made, they would take 320 MiB and more. A field of bytes may be as long."""
    count = 5_000_000
    many = b"\xdd" + count.to_bytes(4, "big") + unit * count
    if what == "arrays":
        many = b"\xdf" + (count // 2).to_bytes(4, "big") + unit * count
    read = PACKED["arrays" if what == "row" else what][0]
    packed = b"\x81\xa1n\x93\xa1x\x90" + many if what == "row" else many
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=r"more than (4194304|65536)"):
            read(packed)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(packed)
    finally:
        tracemalloc.stop()


def test_buffers_may_hold_many_raw_bytes_and_tensors_few_dimensions() -> None:
    arrays: dict[str, NamedArray] = {"n": ("uint8", (FIELDS_BYTES_MAX + 1,), bytes(FIELDS_BYTES_MAX + 1))}
    assert unpack_arrays(pack_arrays(arrays)) == arrays
    long = replace(PLAN, tensors=(TensorSpec("a", (1,) * (EXTENTS_MAX + 1), "float32"),), groups=((0,),))
    with pytest.raises(RemoteProtocolError, match="a plan is a list of tensors"):
        ModelSpec.unpacked(long.packed())  # a million of them are multiplied for minutes


def test_a_name_that_a_file_of_tensors_cannot_hold_is_refused() -> None:
    tensor = TensorSpec("__metadata__", (1,), "float32")
    for plan in (ModelSpec((tensor,), "", ((0,),)), replace(PLAN, aliases=(("__metadata__", 0),))):
        with pytest.raises(RemoteProtocolError, match="a plan is a list of tensors"):
            ModelSpec.unpacked(plan.packed())
    with pytest.raises(RemoteProtocolError, match="module buffers"):
        unpack_arrays(pack_arrays({"__metadata__": ("uint8", (1,), b"1")}))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pack", b"\x81\x90\x00"),  # a map whose key is a list
        ("pack", b"\x81\x80\x00"),
        ("plan", None),
        ("plan", [[["w", [INF], "float32"]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[["w", [NAN], "float32"]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[["w", [-1], "float32"]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[["w", [-2, -3], "float32"]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[["w", [1 << 41], "float32"]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[["w", [1.5], "float32"]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[["w", [3], 7]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[[None, [3], "float32"]], "SGD", [[0]], 0.0, [], 1.0]),
        ("plan", [[["w", [3], "float32"]], "SGD", [[1]], 0.0, [], 1.0]),
        ("plan", [[["w", [3], "float32"]], "SGD", [[-1]], 0.0, [], 1.0]),
        ("plan", [[["w", [3], "float32"]], "SGD", [[INF]], 0.0, [], 1.0]),
        ("plan", [[["w", [3], "float32"]], "SGD", [[0], [0]], 0.0, [], 1.0]),  # one tensor, two groups: stepped twice
        ("plan", [[["w", [3], "float32"]], "SGD", [[0]], NAN, [], 1.0]),
        (
            "plan",
            [[["w", [3], "float32"], ["w", [3], "float32"]], "SGD", [[0, 1]], 0.0, [], 1.0],
        ),  # one name, two tensors
        ("plan", [[], "SGD", [], 0.0, [], 1.0]),
        *(("plan", [[["w", [3], "float32"]], "SGD", [[0]], 0.0, [], degree]) for degree in (-0.1, 1.1, NAN, INF, -INF)),
        ("plan", [[["w", [3], "float32"]], "SGD", [[0]], 0.0, [], None]),
        ("plan", [[["w", [3], "float32"]], "SGD", [[0]], 0.0, []]),
        ("settings", []),
        ("settings", {}),
        ("settings", asdict(Settings().validated()) | {"shards": 1.5}),
        ("settings", asdict(Settings().validated()) | {"shards": True}),
        ("settings", asdict(Settings().validated()) | {"sync": ["ssp"]}),
        ("settings", asdict(Settings().validated()) | {"compress": 3}),
        ("settings", asdict(Settings().validated()) | {"lease": NAN}),
        ("settings", asdict(Settings().validated()) | {"more": 1}),
        ("arrays", [1]),
        ("arrays", {"n": ["float32", [2]]}),
        ("arrays", {"n": ["float32", [2], 1 << 40]}),  # bytes(1 << 40) would be a tebibyte
        ("arrays", {"n": ["float32", [INF], b""]}),
        ("arrays", {"n": ["float32", [2], b"1234"]}),  # 4 bytes are not 2 float32
        ("arrays", {"n": ["float32", [-1], b"1234"]}),
        ("arrays", {"n": ["object", [1], b"12345678"]}),
        ("arrays", {"n": ["float32", [1 << 40, 0, 1 << 40], "text"]}),
    ],
    ids=repr,
)
def test_packed_fields_that_are_none_of_ours_are_refused(name: str, value: object) -> None:
    with pytest.raises(NAMED) as caught:
        PACKED[name][0](value if isinstance(value, bytes) else pack(value))
    assert len(str(caught.value)) < 400


# Fuzz.


def mutations(rng: random.Random, seeds: list[bytes]) -> Iterator[bytes]:
    """Copies of `seeds` with bytes changed, put in, taken out, repeated, or taken from another."""
    interesting = (
        b"\x00",
        b"\xff",
        b"\x90",
        b"\x80",
        b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xcb\x7f\xf0" + bytes(6),
        b"\xa1a",
    )
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
            at = rng.randrange(len(data) + 1)
            match rng.randrange(6):
                case 0 if data:
                    data[at % len(data)] ^= 1 << rng.randrange(8)
                case 1 if data:
                    data[at % len(data)] = rng.randrange(256)
                case 2:
                    data[at:at] = rng.choice(interesting)
                case 3:
                    del data[at : at + rng.choice((1, 1, 2, 9))]
                case 4:
                    data[at:at] = data[at : at + rng.randrange(1, 12)]
                case _:
                    other = rng.choice(seeds)
                    cut = rng.randrange(len(other) + 1)
                    data[at : at + rng.randrange(8)] = other[cut : cut + rng.randrange(1, 12)]
        yield bytes(data)


def test_mutated_messages_are_refused_or_are_messages() -> None:
    print(f"NARROWS_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    heads = [raw(message)[0] for message in SAMPLES.values()]
    refused = accepted = longest = 0
    for _, data in zip(range(MUTATIONS), mutations(rng, heads), strict=False):
        for frames in ([data], [data, b"payload"]):
            try:
                message = decode(frames)
            except NAMED as error:
                refused += 1
                longest = max(longest, len(str(error)))
                continue
            accepted += 1
            assert raw(decode(encode(message))) == raw(message)  # as bytes: NaN is not equal to itself
    assert longest < 400
    assert refused > MUTATIONS and accepted > MUTATIONS // 20, "most are refused, but not all die at the first byte"


def flips(data: bytes) -> Iterator[bytes]:
    """Each copy of `data` with one bit changed."""
    for at in range(len(data)):
        for bit in range(8):
            yield data[:at] + bytes((data[at] ^ 1 << bit,)) + data[at + 1 :]


@pytest.mark.parametrize("name", PACKED)
def test_mutated_fields_are_refused_or_are_fields(name: str) -> None:
    print(f"NARROWS_TEST_SEED={SEED}", file=sys.stdout)
    rng = random.Random(f"{SEED} {name}")
    read, good = PACKED[name]

    def reads(data: bytes) -> bool:
        try:
            read(data)
        except NAMED:
            return False
        return True

    for _, data in zip(range(MUTATIONS // 4), mutations(rng, [good, PACKED["pack"][1]]), strict=False):
        reads(data)
    # Flips are the same whatever the seed, and so are those that are accepted.
    outcome = Counter(map(reads, flips(good)))
    assert min(outcome[True], outcome[False]) > 8 * 5, "some bytes are values, some say what they are"


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=300)
def test_arbitrary_bytes_are_refused(data: bytes, ours: bool) -> None:
    with pytest.raises(NAMED):
        decode([MAGIC + bytes((VERSION,)) + data if ours else data])


# Keys.

SIZES = st.one_of(st.sampled_from([0, 1, 2, 3, 7]), st.integers(0, 5000))


def times_covered(pieces: list[tuple[int, int]], begin: int, end: int) -> list[int]:
    """How often each key of [begin, end) is covered, the slow way; -1 marks a piece that reaches outside."""
    count = np.zeros(end - begin, int)
    for low, high in pieces:
        if low < begin or high > end:
            return [-1]
        for key in range(low, high):
            count[key - begin] += 1
    return [int(c) for c in count]


@given(SIZES, st.integers(1, 40))
def test_split_cuts_into_consecutive_ranges_of_nearly_one_size(size: int, shards: int) -> None:
    ranges = split(size, shards)
    assert len(ranges) == shards
    assert times_covered(ranges, 0, size) == [1] * size
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert max(end - begin for begin, end in ranges) - min(end - begin for begin, end in ranges) <= 1


@given(SIZES, SIZES, st.integers(1, 900))
def test_parts_cover_a_range_in_order_and_none_is_larger_than_asked(begin: int, size: int, values_max: int) -> None:
    cuts = list(parts(begin, begin + size, values_max))
    assert times_covered(cuts, begin, begin + size) == [1] * size
    assert cuts == sorted(cuts) and all(high - low <= values_max for low, high in cuts)
    assert len(cuts) == max(1, -(-size // values_max)), "an empty range is one empty part: it still carries a header"
    assert covers(cuts, begin, begin + size)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.data())
def test_parts_of_tensors_are_within_large_tensors(sizes: list[int], data: st.DataObject) -> None:
    """With frames of 8 values: a part of 2 to 8 values does not cross the border of a tensor of 2 or more."""
    offsets = [3, *(3 + end for end in accumulate(sizes))]
    begin = data.draw(st.integers(3, offsets[-1]))
    end = data.draw(st.integers(begin, offsets[-1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_ranges, "FRAME_VALUES", 8)
        cuts = list(key_ranges.parts_of_tensors(begin, end, offsets))
    assert covers(cuts, begin, end) and cuts == sorted(cuts) and all(high - low <= 8 for low, high in cuts)
    assert (begin, end) == (cuts[0][0], cuts[-1][1])
    for low, high in cuts:
        for border in (each for each in offsets if low < each < high):
            before = max([low, *(each for each in offsets if each < border)])
            assert border - before < 2, "a part crosses the border behind a tensor that would fill a part"


def test_a_frame_holds_what_it_is_named_for() -> None:
    assert FRAME_VALUES * 4 == FRAME_BYTES
    assert [high - low for low, high in parts(0, FRAME_VALUES + 1)] == [FRAME_VALUES, 1]


@given(st.integers(0, 6), st.integers(0, 6), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=5))
@settings(max_examples=200)
def test_covers_is_the_slow_count(begin: int, size: int, pieces: list[tuple[int, int]]) -> None:
    ranges = [(low, low + length) for low, length in pieces]
    assert covers(ranges, begin, begin + size) == (times_covered(ranges, begin, begin + size) == [1] * size)


@given(SIZES, st.integers(1, 9), st.randoms())
def test_covers_knows_every_missing_doubled_or_shifted_piece(size: int, shards: int, rng: random.Random) -> None:
    pieces = [piece for piece in split(size, shards) if piece[0] < piece[1]]
    rng.shuffle(pieces)
    assert covers(pieces, 0, size)
    for i, (low, high) in enumerate(pieces):
        others = pieces[:i] + pieces[i + 1 :]
        assert not covers(others, 0, size)
        assert not covers([*pieces, (low, high)], 0, size)
        assert not covers([*others, (low + 1, high)], 0, size)
        assert not covers([*others, (low, high + 1)], 0, size)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=9),
        st.tuples(st.sampled_from(["float32", "int64", "bool", "bfloat16"]), st.lists(st.integers(0, 3), max_size=3)),
        max_size=4,
    )
)
@settings(max_examples=40)
def test_named_arrays_come_back(shapes: dict[str, tuple[str, list[int]]]) -> None:
    width = {"float32": 4, "int64": 8, "bool": 1, "bfloat16": 2}
    arrays: dict[str, NamedArray] = {
        name: (dtype, tuple(shape), bytes(width[dtype] * int(np.prod(shape, dtype=int))))
        for name, (dtype, shape) in shapes.items()
    }
    assert unpack_arrays(pack_arrays(arrays)) == arrays


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6))
def test_a_plan_lays_tensors_end_to_end(shapes: list[list[int]]) -> None:
    specs = tuple(TensorSpec(f"t{i}", tuple(shape), "float32") for i, shape in enumerate(shapes))
    plan = ModelSpec(specs, "", (tuple(range(len(specs))),))
    sizes = [int(np.prod(shape, dtype=int)) for shape in shapes]
    assert plan.offsets() == [0, *np.cumsum(sizes).tolist()] and plan.size == sum(sizes)
    if plan.size:
        assert ModelSpec.unpacked(plan.packed()) == plan


OTHER = (TensorSpec("a.weight", (3, 6), "float32"), *PLAN.tensors[1:])


@pytest.mark.parametrize(
    ("joiner", "names"),
    [
        (ModelSpec(OTHER, "SGD", PLAN.groups, 0.5), ["a.weight", "[3, 6]", "[3, 5]"]),
        (ModelSpec(PLAN.tensors[:2], "SGD", PLAN.groups, 0.5), ["2 tensors", "'b'"]),
        (ModelSpec((*PLAN.tensors, TensorSpec("c", (1,), "float32")), "SGD", PLAN.groups, 0.5), ["4 tensors", "'c'"]),
        (ModelSpec(PLAN.tensors, "Adam", PLAN.groups, 0.5), ["optimizer", "Adam", "SGD"]),
        (ModelSpec(PLAN.tensors, "SGD", ((0, 1, 2),), 0.5), ["parameter groups"]),
        (ModelSpec(PLAN.tensors, "SGD", PLAN.groups, 0.0), ["max_grad_norm", "0.5"]),
        (ModelSpec((*PLAN.tensors[:1], TensorSpec("a.bias", (), "float32"), PLAN.tensors[2]), "SGD", PLAN.groups, 0.5),
         ["a.bias", "bfloat16", "float32"]),
        (replace(PLAN, frozen=(("base", "1f"), ("head", "3f"))), ["frozen parameter 'head'", "not sent"]),
        (replace(PLAN, frozen=PLAN.frozen[1:]), ["frozen parameter 'base'"]),
    ],
    ids=["shape", "fewer", "more", "optimizer", "groups", "norm", "dtype", "frozen", "unfrozen"],
)  # fmt: skip
def test_a_joiner_with_another_model_is_told_the_first_difference(joiner: ModelSpec, names: list[str]) -> None:
    PLAN.check_same(PLAN)
    with pytest.raises(IncompatibleError) as caught:
        PLAN.check_same(joiner)
    assert all(name in str(caught.value) for name in names), caught.value
