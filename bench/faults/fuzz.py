"""libFuzzer feeds each decoder of bytes that a peer sends, guided by coverage (atheris). The bench counts findings.

    make fuzz                                          # all targets, 60 s each; installs atheris
    python bench/faults/fuzz.py --seconds 900 payload  # one target for a while
    python bench/faults/fuzz.py --without-atheris      # seeds and random mutations of them, with nothing installed

Rules
- A target takes bytes and returns, or raises an error that names what is wrong with them. Anything else is a finding: another
  exception, a crash, more than LIMIT_S for one input, more than MEMORY_MB.
- Accepted input must be usable: a message is encoded again, a payload is added into an array.
- Each target runs in a process of its own. Its findings lie in bench/out/fuzz/TARGET, and so does its corpus.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from narrows.compression import PayloadError, SpecError, codecs, ladder, parse, rows
from narrows.compression import device as on_device
from narrows.compression.device import kernels_for
from narrows.compression.logits import parse_logits
from narrows.compression.value_codings import INT8
from narrows.protocols import messages as m
from narrows.protocols.addresses import parse_address
from narrows.protocols.config.embedding_spec import TableSpec
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec, pack_arrays, unpack_arrays
from narrows.protocols.config.settings import Robust, Settings, contradiction
from narrows.protocols.errors import NarrowsError
from narrows.protocols.member import heartbeat_summary
from narrows.protocols.wire import decode, encode, pack, unpack
from narrows.ps.shard.folding import unpack_hyper
from narrows.worker.checkpoint.server_state import unpack_rows
from narrows.worker.distillation import batches

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

LIMIT_S = 10  # for one input
MEMORY_MB = 2048
MUTATIONS = 2000  # of a target without atheris
LENGTH_MAX = 1 << 16  # bytes of an input
INSTRUMENTED = ("narrows.compression", "narrows.protocols", "narrows.ps", "narrows.worker.distillation")

SPECS = (
    *("dense", "lz4", "fp16", "bf16", "int8", "int4", "2bit", "sign", "uint8minmax", "int8+lz4", "topk:0.05+int8+lz4"),
    *("topk:0.02", "topk:0.11+sign", "topk:8/64+2bit", "randk:0.1+int4", "threshold:1+uint8minmax", "mstopk:0.05+bf16"),
    *("cycle:0.15+sign", "cycle:0.15/0.24+sign", "cycle:0.3/0.2"),
)
COUNTS = (0, 1, 65, 700, 3000)
DEVICE = kernels_for("host")


class Refused(Exception):
    """The bytes were refused as they should be."""


def _values(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


# A value for each annotation of messages.CHECKS.
SAMPLES: dict[str, Any] = {
    "int": 3,
    "float": 0.5,
    "bool": True,
    "str": "text",
    "Name": "name",
    "bytes": b"bytes",
    "Buffer": b"payload",
    "Ints": (1, 2),
    "Pairs": ((1, 2),),
    "Triples": ((1, 2, 3),),
    "Quads": ((1, 2, 3, 4),),
    "Weights": ((1, 0.5),),
    "Sets": ((1, 2, 3),),
    "Texts": ("one", "two"),
}


def frame_seeds() -> Iterator[bytes]:
    """The header of one message of each kind."""
    for kind in m.KINDS.values():
        header, *more = encode(kind(**{name: SAMPLES[type_] for name, type_ in kind.__annotations__.items()}))
        yield bytes([len(more)]) + bytes(header)


def frames(data: bytes) -> None:
    """A message of one frame, or of as many as one byte says."""
    try:
        message = decode([data[1:], b"payload", b"more"][: 1 + data[0] % 3])
    except NarrowsError as error:
        raise Refused from error
    again = decode(encode(message))
    assert repr(again) == repr(message), f"{message} came back as {again}"


def payload_seeds() -> Iterator[bytes]:
    for spec in SPECS:
        for count in COUNTS:
            yield count.to_bytes(2, "little") + bytes(parse(spec).encode(_values(count)))


def payload(data: bytes) -> None:
    """A payload of as many values as the first two bytes say."""
    count = int.from_bytes(data[:2], "little") % 4096
    piece = codecs.coded_piece(data[2:], 10, 10 + count)
    try:
        squared = codecs.check(piece, finite=bool(data[1] & 0x80))
    except PayloadError as error:
        raise Refused from error
    guard = 64
    out = np.full(count + 2 * guard, 0.25, np.float32)
    with np.errstate(all="ignore"):
        codecs.put(piece, 1.0, out[guard : guard + count], 10)
        length = np.linalg.norm(out[guard : guard + count].astype(np.float64))
        assert not squared or length <= 1.000001 * squared**0.5, "longer than it was said to be"
        summed = out[guard : guard + count].copy()
        codecs.add(piece, 0.5, out[guard : guard + count], 10)
        on_device.accumulate(DEVICE, data[2:], 0.5, summed)
    assert summed.tobytes() == out[guard : guard + count].tobytes(), "folded otherwise than on a device"
    assert (out[:guard] == 0.25).all() and (out[guard + count :] == 0.25).all(), "written outside"


def row_seeds() -> Iterator[bytes]:
    for count, kept in ((1, 1), (700, 3), (700, 700), ((1 << 32) - 1, 64)):
        at = np.linspace(0, count - 1, kept).astype(np.uint32)
        for dim in (0, 1, 3):
            for coding in rows.CODINGS:
                yield rows.encode(2, count, at, _values(kept * dim).reshape(kept, dim) if dim else None, coding)


def of_rows(data: bytes) -> None:
    """Rows of a table, or an ask for them."""
    try:
        found = rows.decode(data)
        codecs.check(codecs.Piece(codecs.ROWS, 7, 7, data), finite=True)
    except PayloadError as error:
        raise Refused from error
    at = found.indices.astype(np.int64)
    assert (np.diff(at) > 0).all() and 0 <= at[0] <= at[-1] < found.count, "these are not rising rows of the table"
    again = rows.decode(
        rows.encode(found.table, found.count, found.indices, found.values if found.values.size else None, found.coding)
    )
    same = (again.values == found.values).all() or found.coding == INT8.wire_id  # whose scales are made anew
    assert same and (again.indices == found.indices).all()


# (SPEC, classes, tokens) of answers of a teacher; the first byte of an input says which.
ANSWERS = (
    *(("top:3+int8", 20, 2), ("top:5+int4", 5, 1), ("top:7+fp16", 100, 3), ("top:32+int4", 50257, 4)),
    *(("top:64+int8", 100, 1), ("top:2+fp16", (1 << 32) - 1, 2), ("top:1+int8", 1, 1)),
)


def answer_seeds() -> Iterator[bytes]:
    for which, (spec, classes, tokens) in enumerate(ANSWERS):
        coding = parse_logits(spec)
        kept = coding.kept(classes)
        ids = np.tile(np.linspace(0, classes - 1, kept).astype(np.int64), (tokens, 1))
        for spread in (0, 3):
            given = spread * _values(tokens * kept, which).reshape(tokens, kept).astype(np.float64)
            given -= np.log(np.exp(given).sum(1, keepdims=True)) + 0.1
            yield bytes([which]) + coding.pack(coding.encode(given.astype(np.float32), ids, classes), classes)


def answer(data: bytes) -> None:
    """A teacher's answer to what a student has asked for."""
    spec, classes, tokens = ANSWERS[data[0] % len(ANSWERS)]
    coding = parse_logits(spec)
    try:
        records = coding.open(data[1:], classes, tokens)
    except PayloadError as error:
        raise Refused from error
    log_probs, ids = coding.decode(records, classes)
    assert np.isfinite(log_probs).all() and (log_probs <= 0).all(), "these are no log-probabilities"
    assert (np.exp(log_probs.astype(np.float64)).sum(1) < 1.00001).all(), "they sum above 1"
    assert (np.diff(ids, axis=1) > 0).all() and 0 <= ids.min() <= ids.max() < classes, "these are not rising classes"
    assert coding.pack(records, classes) == data[1:], "the payload has another form"
    again = coding.encode(log_probs, ids, classes)
    size = coding.values.byte_count(ids.shape[1])
    assert (again[:, size:] == records[:, size:]).all(), "the ids have another form"


def packed_seeds() -> Iterator[bytes]:
    tables = (TableSpec("c", 10, 3, 1, 0.5, "SparseAdam"),)
    plan = ModelSpec(
        (TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (5,), "bfloat16")), "", ((0, 1),), tables=tables
    )
    hyper = pack([pack([{"lr": 0.1}]), [1], pack([{"lr": 0.1}])])
    rows = [
        heartbeat_summary.SummaryRow((), "", "", heartbeat_summary.Summary()),
        heartbeat_summary.SummaryRow((0, 1), "a", "", heartbeat_summary.Summary(loss=1.0)),
    ]
    seeds = (
        *(Settings().validated().packed(), plan.packed(), pack_arrays({}), hyper),
        *(
            pack({"a": [1, b"x", None, 0.5]}),
            heartbeat_summary.packed(rows),
            pack([[0, "step", 3.0], [1, "exp_avg", None]]),
        ),
        pack({"plan_digest": 7, "sync": "bsp"}),
    )
    for which, seed in enumerate(seeds):
        yield bytes([which]) + seed


def expected(data: bytes) -> None:
    """The flags of a Hello, beside those of a server that a plan.json has started."""
    flags = unpack(data)
    if isinstance(flags, dict):
        contradiction(flags, Settings(plan_digest=8).validated())


PACKED: tuple[Callable[[bytes], object], ...] = (
    *(Settings.unpacked, ModelSpec.unpacked, unpack_arrays, unpack_hyper),
    *(unpack, heartbeat_summary.unpacked, lambda data: unpack_rows(data, 2), expected),
)


def packed(data: bytes) -> None:
    """Decodes bytes that travel packed in a field: the first byte says which kind."""
    try:
        PACKED[data[0] % len(PACKED)](data[1:])
    except NarrowsError as error:
        raise Refused from error


def text_seeds() -> Iterator[bytes]:
    for spec in (*SPECS, "auto:0.01"):
        yield b"\0" + spec.encode()
    for address in ("tcp://host:5555", "tcp://[::1]:5555", "tcp://0.0.0.0:0"):
        yield b"\1" + address.encode()
    for rule in ("cosine", "trim:0.25"):
        yield b"\2" + rule.encode()


TEXTS: tuple[Callable[[str], object], ...] = (
    ladder,
    lambda text: parse_address("--bind", text, any_port=True),
    Robust.parse,
)


def text(data: bytes) -> None:
    """A SPEC, an address or a rule, as a flag has it or a peer's settings."""
    try:
        TEXTS[data[0] % len(TEXTS)](data[1:].decode("utf-8", "surrogateescape"))
    except (NarrowsError, SpecError) as error:
        raise Refused from error


def request_seeds() -> Iterator[bytes]:
    """Fields and payload of a student's request: the length of the fields, the number of samples, both."""
    ids = torch.tensor([[1, 2, 3], [4, 5, 60000]])
    for inputs in (
        ids,
        {"input_ids": ids, "attention_mask": ids > 2},
        {"x": torch.zeros(2, 1, 2, dtype=torch.bfloat16), "y": torch.tensor([1.5, 2.5]).double()},
    ):
        there = batches.samples_of(inputs)
        fields = there.packed_fields
        yield bytes((len(fields), len(there))) + fields + there.payload(np.arange(len(there)))


def request(data: bytes) -> None:
    """A request of a student, as its teacher opens it."""
    fields, rest = data[2 : 2 + data[0]], data[2 + data[0] :]
    try:
        found = batches.opened(fields, rest, max(1, data[1]))
    except NarrowsError as error:
        raise Refused from error
    rows = np.arange(len(found))
    there = batches.tensors(found, rows, torch.device("cpu"))
    assert all(len(each) == len(found) for each in there.values()) and len(found.digests()) == len(found)
    again = batches.opened(found.packed_fields, found.payload(rows), len(found))
    assert again.digests() == found.digests() and found.payload(rows) == rest


class Target(NamedTuple):
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]


TARGETS = {
    "frames": Target(frames, frame_seeds),
    "payload": Target(payload, payload_seeds),
    "rows": Target(of_rows, row_seeds),
    "answer": Target(answer, answer_seeds),
    "packed": Target(packed, packed_seeds),
    "text": Target(text, text_seeds),
    "request": Target(request, request_seeds),
}


def survives(target: Target, data: bytes) -> bool:
    """Whether these bytes were accepted. Raises whatever the target should not."""
    try:
        if len(data) >= 2:
            target.run(data)
            return True
    except Refused:
        pass
    return False


def mutated(data: bytes, draw: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(4):
            case 0:
                found[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del found[at : at + draw.randint(1, 8)]
            case 2:
                found[at:at] = draw.randbytes(draw.randint(1, 8))
            case _:
                found[at : at + 4] = draw.choice((b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\1\0\0\0"))
    return bytes(found)


def by_mutation(target: Target, count: int, seed: int = 0) -> int:
    """Run a target on its seeds, all of which must be accepted, and on so many mutations; how many of those were accepted."""
    draw, seeds = random.Random(seed), list(target.seeds())
    for data in seeds:
        if len(data) >= 2 and not survives(target, data):
            raise AssertionError(f"the seed {data!r} was refused")
    return sum(survives(target, mutated(draw.choice(seeds), draw)) for _ in range(count))


def instrument(owner: Any, module: str, by: Callable[[Any], Any]) -> None:
    """Its functions, and those of its classes, in place: what they decide is coverage from now on."""
    for each in list(vars(owner).values()):
        each = getattr(each, "__func__", getattr(each, "fget", None) or each)  # of static methods and properties
        if getattr(each, "__module__", "") != module:
            continue
        if isinstance(each, FunctionType):
            by(each)
        elif isinstance(each, type) and each is not owner:
            instrument(each, module, by)


def fuzz(name: str, seconds: int, folder: Path) -> None:
    """In this process, and for good: libFuzzer ends it."""
    import atheris

    for owner in list(sys.modules.values()):
        if getattr(owner, "__name__", "").startswith(INSTRUMENTED):
            instrument(owner, owner.__name__, atheris.instrument_func)
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    flags = [
        *(f"-max_total_time={seconds}", f"-rss_limit_mb={MEMORY_MB}", f"-timeout={LIMIT_S}", f"-max_len={LENGTH_MAX}"),
        *(f"-artifact_prefix={folder}/", "-print_final_stats=1", "-use_value_profile=1"),
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], lambda data: bool(survives(TARGETS[name], data)) and None)
    atheris.Fuzz()


@click.command(context_settings={"show_default": True})
@click.argument("names", nargs=-1, type=click.Choice(list(TARGETS)))
@click.option("--seconds", default=60, help="of each target")
@click.option("--without-atheris", is_flag=True, help="random mutations of the seeds alone")
@click.option("--inside", is_flag=True, hidden=True)
@record.out_option("faults/fuzz")
def main(names: tuple[str, ...], seconds: int, without_atheris: bool, inside: bool, out: Path) -> None:
    """Fuzz decoders: frames, payload, rows, answer, packed, text, request; all by default."""
    if inside:
        fuzz(names[0], seconds, launch.OUT / "fuzz" / names[0])
    failed, recorder = [], record.Recorder("faults/fuzz", out)
    for name in names or TARGETS:
        began = time.monotonic()
        if without_atheris:
            accepted = by_mutation(TARGETS[name], MUTATIONS)
            click.echo(f"{name}: {MUTATIONS} mutations, {accepted} accepted, {time.monotonic() - began:.0f} s")
            continue
        command = [sys.executable, __file__, "--inside", "--seconds", str(seconds), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        told = {key: int(value) for key, value in re.findall(r"stat::(\w+):\s+(\d+)", done.stderr)}
        coverage = re.findall(r"cov: (\d+)", done.stderr)
        figures: record.Figures = {"findings": (int(done.returncode != 0), "")}
        figures["inputs"] = (told.get("number_of_executed_units"), "")
        figures["coverage"] = (float(coverage[-1]) if coverage else None, "edges")
        recorder.add(name, figures | {"memory": (told.get("peak_rss_mb"), "MB")}, arguments={"seconds": seconds})
        if done.returncode:
            failed.append(name)
            click.echo(done.stderr[-3000:], err=True)
    recorder.show()
    if failed:
        raise click.ClickException(f"{', '.join(failed)}: see {launch.OUT / 'fuzz'}")


if __name__ == "__main__":
    main()
