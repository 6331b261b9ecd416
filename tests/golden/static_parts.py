"""Parts of the golden record that start no run: the layout of the wire, and the payloads of compression.

A message kind is known by its number, a field by its position. The record has one example of each kind, and for each field
which values of other types it admits. The names of classes and fields are not on the wire, so they are not in the record.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import partial
from typing import Any

import msgpack
import numpy as np

from golden.digests import Entries, array_bytes, body, digest
from narrows.compression import ErrorFeedback, decode, parse
from narrows.protocols import wire
from narrows.protocols.config.embedding_spec import TableSpec
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec, pack_arrays
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError
from narrows.protocols.member.heartbeat_summary import Summary, SummaryRow
from narrows.protocols.member.heartbeat_summary import packed as pack_summaries
from narrows.protocols.messages import CHECKS, KINDS, TEXT_MAX, Message
from narrows.protocols.wire import pack
from narrows.ps.parent.parent_link import ParentSeat
from narrows.ps.probe import messages as probe
from narrows.ps.replication.events import EventKind, MachineEvent

# One value of each type that msgpack has, and of each shape that a field may ask for.
VALUES: tuple[Any, ...] = (
    *(None, True, 7, 1 << 40, -1, -2, 1 << 63, 0.5, "text", "two\nlines", "x" * (TEXT_MAX + 1), b"raw", {"a": 1}, ()),
    *(
        (1, 300),
        (True,),
        ("one", ""),
        ("1\r",),
        ((1,), ()),
        ((1, 2), (3, 4)),
        ((1, 0.5),),
        ((1, 2, 3),),
        ((1, 2, 3, 4),),
    ),
    *(((1, 2, 3, 4, 5),), ((1, "2"),), ((1, -2),)),
)
# What a field of an example has: the first of these that its check admits.
EXAMPLES: tuple[Any, ...] = (
    *(True, 7, 0.5, "text", b"raw", (1, 300), ("one", ""), ((1, 0.5),), ((1, 2, 3),), ((1, 2, 3, 4),)),
    *(((1, 2), (3, 4)), ((1, 2), (), (3,))),
)
SIZES = (0, 1, 1000, 100_003)
STAGES = ("fp16", "bf16", "int8", "int8:stochastic", "int4", "int4:stochastic", "2bit", "sign", "uint8minmax")
RECORDED_SPECS = (
    *("dense", "lz4", "int8+lz4", "topk:0.05+lz4", "topk:0.05+int8+lz4", "cycle:1.0/0.01+int8+lz4", "topk:1.0"),
    *STAGES,
    *(f"topk:0.05+{stage}" for stage in STAGES),
    *(
        "topk:0.05",
        "topk:8/512",
        "topk:64/4096+2bit",
        "mstopk:0.01",
        "mstopk:0.01+int8",
        "randk:0.03",
        "randk:0.03+2bit",
    ),
    *("threshold:0.7", "threshold:0.7+int8", "cycle:0.1", "cycle:0.1+sign", "cycle:0.15/0.24+sign"),
)
ROUNDS = 3  # payloads of one ErrorFeedback


def example(kind: Any) -> Message:
    """Return a message of this kind, of plain values alone."""
    checks = [CHECKS[str(field.type)] for field in fields(kind)]
    found: Message = kind(*(next(value for value in EXAMPLES if check(value)) for check in checks))
    return found


def wire_part() -> Entries:
    return {name: partial(str, text) for name, text in _wire().items()}


def _wire() -> dict[str, str]:
    found = {"version": str(wire.VERSION), "magic": wire.MAGIC.hex(), "kinds": " ".join(map(str, sorted(KINDS)))}
    kind: Any
    for number, kind in sorted(KINDS.items()):
        message = example(kind)
        found[f"{number} example"] = body(message).hex()
        found[f"{number} frames"] = str(len(wire.encode(message)))
        found[f"{number} fields"] = _fields(message)
        # A field that may be left out has a value that the sender writes: it is on the wire.
        found[f"{number} defaults"] = repr([_default(field) for field in fields(kind)])
    for name, packed in _packed().items():
        found[name] = packed.hex()
    return found


def _packed() -> dict[str, bytes]:
    """What travels packed inside of a field. Settings are a map by the names of flags: these are on the wire."""
    settings = Settings(sync="local", local_steps=4, workers=3, shards=2).validated()
    plan = ModelSpec(
        (TensorSpec("a", (2, 3), "float32"), TensorSpec("half", (5,), "bfloat16")),
        "SGD",
        ((0, 1),),
        0.5,
        (("tied", 0),),
        tables=(TableSpec("table", 12, 4, 7, 0.25, "SGD"),),
    )
    summary = Summary(1.5, 2, 3, 4, 5, 6.5, 7.5, 8.5, 9, 10, loss=0.25)
    event = MachineEvent(EventKind.WROTE, 9, b"peer", None, (4, (1, 4), 17))
    return {
        "packed settings": settings.packed(),
        "packed plan": plan.packed(),
        "packed place": ParentSeat(settings, 1, 2, 3, 4, (5, 6), 7, "tcp://parent:1", 8, 9).packed(),
        "packed arrays": pack_arrays({"mean": ("uint8", (1,), b"1")}),
        "packed summaries": pack_summaries(
            [SummaryRow((), "here", "", summary), SummaryRow((1, 2), "there", "bsp", Summary())]
        ),
        "packed event": event.described(),
        "event kinds": pack([int(kind) for kind in EventKind]),
        # Messages of ps-probe name their kinds: these class names are on the wire.
        **{f"probe {name}": probe.encode(example(kind))[0] for name, kind in probe.KINDS.items()},
    }


def _default(field: Any) -> Any:
    """Of an optional field its default value, else the text "-"."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "-"
    return field.default if field.default_factory is MISSING else field.default_factory()


def _fields(message: Message) -> str:
    """Return for each field of the header which of VALUES it admits, as a bit mask in hex: so what a peer may send."""
    kind, *values = msgpack.unpackb(body(message), use_list=False)
    payload = [bytes(frame) for frame in wire.encode(message)[1:]]
    masks = []
    for position in range(len(values)):
        mask = 0
        for bit, value in enumerate(VALUES):
            changed = [kind, *values[:position], value, *values[position + 1 :]]
            mask |= _admitted(changed, payload) << bit
        masks.append(f"{mask:x}")
    return " ".join(masks)


def _admitted(fields_: list[Any], payload: list[bytes]) -> bool:
    head = wire.MAGIC + bytes((wire.VERSION,)) + msgpack.packb(fields_, use_bin_type=True)
    try:
        wire.decode([head, *payload])
    except NarrowsError:
        return False
    return True


def read_again(packed: str, frames: int) -> str:
    """Return as hex what a recorded example says when it is read and written again: the same, where the layout is the same."""
    head = wire.MAGIC + bytes((wire.VERSION,)) + bytes.fromhex(packed)
    try:
        return body(wire.decode([head, *[b"raw"] * (frames - 1)])).hex()
    except NarrowsError as error:
        return f"refused: {error}"


def values_of(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32[count] by whole numbers alone, so that each machine has the same: of many sizes, some of them zero."""
    random = np.random.default_rng(seed)
    whole = random.integers(-(1 << 20), 1 << 20, count).astype(np.float32)
    scale = random.integers(-12, 3, count).astype(np.float32)
    kept = random.integers(0, 16, count) > 0
    values: np.ndarray[Any, np.dtype[np.float32]] = np.ldexp(whole, scale.astype(np.int32) - 20) * kept
    return values.astype(np.float32)


def payloads_part() -> Entries:
    return {f"{spec} {count}": partial(_payloads, spec, count) for spec in RECORDED_SPECS for count in SIZES}


def _payloads(spec: str, count: int) -> str:
    """The payload of one array, those that an error feedback makes of three, and what each decodes to."""
    compressor = parse(spec)
    feedback = ErrorFeedback(compressor, count)
    made = [compressor.encode(values_of(count, 1)), *(feedback.encode(values_of(count, 2 + i)) for i in range(ROUNDS))]
    out = np.zeros(count, np.float32)
    parts = []
    for payload in made:
        decode(payload, out)
        parts += [bytes(payload), array_bytes(out)]
    return digest(*parts)
