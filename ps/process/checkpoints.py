"""Checkpoints: one safetensors file per shard and clock, and the whole model by tensor names at the end of a run.

    DIR/shard-0.clock-120.safetensors     x, p, optimizer state, float32; metadata: clock, publication, checksums, ...
    DIR/model.safetensors                 what a plain model loads: its parameters by every name they have, in the dtype
                                          of the workers, and its buffers. Not what no worker trains: frozen parameters

Every write goes to a temporary file first and is renamed, so a file is whole or absent. The newest KEPT clocks are kept.
All files of a clock are of one number of shards, which each names; any other number of shards can begin from them.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from narrows.compression.rows import first_values
from narrows.protocols.errors import IncompatibleError, UsageError
from narrows.protocols.keys import overlaps, split
from narrows.protocols.plan import DTYPES, NamedArray, Plan, unpack_arrays
from narrows.protocols.tables import TableSpec
from narrows.ps import tables
from narrows.ps.changes import Load
from narrows.ps.recut import recut

KEPT = (
    3  # the newest, which some shards may not have yet; the one that all share; the one before it, if that is damaged
)
DEFAULT = "checkpoints"  # a run's folder is made in it where none is named
NamedBlocks = tuple[str, tuple[int, ...], "Blocks"]  # as NamedArray
_NAME = re.compile(r"shard-(\d+)\.clock-(\d+)\.safetensors")
_BYTES = "bytes."  # facts that are bytes are arrays of this name: a header is no place for megabytes


class Blocks:
    """The values of table `number` out of the checkpoints of all shards, float32[rows, dim]: a block at a time, so that nobody
    holds the table. Raises IncompatibleError at the end, where a file is not what was written."""

    def __init__(self, folder: Path, clock: int, shards: int, number: int, spec: TableSpec) -> None:
        self.paths = [path_of(folder, shard, clock) for shard in range(shards)]
        self.prefix, self.spec = f"{tables.PREFIX}{number}.", spec

    def __len__(self) -> int:
        return 4 * self.spec.rows * self.spec.dim

    def __iter__(self) -> Iterator[memoryview]:
        spec, shards, name = self.spec, len(self.paths), f"{self.prefix}values"
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="numpy")) for path in self.paths]
            held = [file.get_tensor(f"{self.prefix}rows").astype(np.int64) * shards + i for i, file in enumerate(files)]
            values, read_to, sums = [file.get_slice(name) for file in files], [0] * shards, [0] * shards
            for begin in range(0, spec.rows, spec.ask_rows_max):
                numbers = np.arange(begin, min(begin + spec.ask_rows_max, spec.rows), dtype=np.uint64)
                block, fresh = np.empty((numbers.size, spec.dim), np.float32), np.ones(numbers.size, np.bool_)
                for i, rows in enumerate(held):
                    first, read_to[i] = read_to[i], int(np.searchsorted(rows, begin + numbers.size))
                    at, part = rows[first : read_to[i]] - begin, np.ascontiguousarray(values[i][first : read_to[i]])
                    block[at], fresh[at], sums[i] = part, False, zlib.crc32(_named(part)[2], sums[i])
                block[fresh] = first_values(numbers[fresh], spec.dim, spec.seed, spec.std)
                yield block.reshape(-1).view(np.uint8).data
            for path, file, found in zip(self.paths, files, sums, strict=True):
                if json.loads(file.metadata()["narrows"])["crc32"][name] != found:
                    raise IncompatibleError(f"{path} is damaged: table {spec.name!r} is not what was written")


def _write(path: Path, tensors: Mapping[str, NamedArray | NamedBlocks], metadata: dict[str, str]) -> None:
    """Write a safetensors file. By hand: its own writer knows NumPy's dtypes only, and bfloat16 is none of them."""
    header: dict[str, Any] = {"__metadata__": metadata}
    ordered = sorted(tensors.items(), key=lambda item: (-DTYPES[item[1][0]][0], item[0]))  # so that all are aligned
    end = 0
    for name, (dtype, shape, raw) in ordered:
        header[name] = {"dtype": DTYPES[dtype][1], "shape": list(shape), "data_offsets": [end, end + len(raw)]}
        end += len(raw)
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(packed)) + packed)
            for _, (_, _, raw) in ordered:
                for part in raw if isinstance(raw, Blocks) else (raw,):
                    file.write(part)
            size = file.tell()
        publish(temporary, path, size)
    except (OSError, IncompatibleError):
        temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise


def publish(temporary: Path, path: Path, size: int) -> None:
    """Give a file that is written its name, once it is on the disk. Raises OSError where it has another size."""
    with open(temporary, "rb+") as file:
        if file.seek(0, os.SEEK_END) != size:
            raise OSError(f"{path.name} is not whole")
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)


def _named(array: npt.NDArray[Any]) -> NamedArray:
    return str(array.dtype), array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def clocks(folder: Path, shard: int) -> tuple[int, ...]:
    """Clocks of which `folder` holds a checkpoint of this shard, ascending."""
    found = [_NAME.fullmatch(path.name) for path in folder.glob("shard-*.safetensors")] if folder.is_dir() else []
    return tuple(sorted(int(match[2]) for match in found if match and int(match[1]) == shard))


def sound(folder: Path, shard: int, shards: int) -> tuple[tuple[int, ...], list[str]]:
    """Clocks that this shard, one of so many, can begin from, for the files of it hold what was written; and a sentence for
    each other one."""
    whole, sentences, own = [], [], clocks(folder, shard)
    for clock in sorted({*own, *clocks(folder, 0)}):
        try:
            count = int(read(folder, shard if clock in own else 0, clock)[1].get("shards", shards))
            for index in range(count) if count != shards else ():
                read(folder, index, clock)
        except IncompatibleError as error:
            sentences += [str(error)] if clock in own else []
            continue
        if clock in own or count != shards:
            whole.append(clock)
    return tuple(whole), sentences


def shards_of(folder: Path, clock: int) -> int:
    """How many shards wrote the checkpoint of this clock. Raises IncompatibleError as `read`."""
    return int(facts_of(folder, clock).get("shards", 1))


def newest(folder: Path, shards: int) -> int:
    """The newest clock that all of so many shards can begin from, -1: there is none.

    Raises IncompatibleError where there would be one, were its files not damaged.
    """
    found = [sound(folder, shard, shards) for shard in range(shards)]
    shared = max(set.intersection(*(set(whole) for whole, _ in found)), default=-1)
    if shared < 0 and set.intersection(*(set(clocks(folder, shard)) for shard in range(shards))):
        raise IncompatibleError(next(text for _, sentences in found for text in sentences))
    return shared


def make_folder(told: str, resume: bool) -> str:
    """Make and return the folder of --checkpoint-dir; "" for none. UsageError for one that holds another run."""
    if told == "none" or (not told and resume):
        if resume:
            raise UsageError("--resume: name the folder with --checkpoint-dir")
        return ""
    try:
        if told:
            folder = Path(told)
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and any(folder.glob("*.safetensors")):
                raise UsageError(
                    f"--checkpoint-dir {told} holds the model of a run: go on with it by --resume, or name another folder"
                )
            return told
        Path(DEFAULT).mkdir(exist_ok=True)
        now = time.strftime("%Y-%m-%d-%H%M%S")
        for name in (now, *(f"{now}-{again}" for again in range(2, 100))):
            with suppress(FileExistsError):
                Path(DEFAULT, name).mkdir()
                return f"{DEFAULT}/{name}"
        raise UsageError(f"--checkpoint-dir: {DEFAULT}/{now} and all its like are taken, name another folder")
    except OSError as error:
        raise UsageError(
            f"--checkpoint-dir {told or DEFAULT}: {error.strerror}; name another folder, or none"
        ) from None


def path_of(folder: Path, shard: int, clock: int) -> Path:
    return folder / f"shard-{shard}.clock-{clock}.safetensors"


def write(
    folder: Path,
    shard: int,
    clock: int,
    arrays: dict[str, npt.NDArray[np.float32]],
    facts: dict[str, Any],
    shared: int = -1,
) -> tuple[int, ...]:
    """Write a shard's checkpoint, drop later ones and all but the newest KEPT, and return the clocks on disk.

    `shared`: the newest that all shards are known to have, which is not dropped: another shard's disk may refuse for long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"shard-{shard}.clock-*.tmp"):
        left.unlink(missing_ok=True)  # of a process that was killed while it wrote
    tensors = {name: _named(array) for name, array in arrays.items()}
    tensors |= {_BYTES + name: ("uint8", (len(f),), f) for name, f in facts.items() if isinstance(f, bytes)}
    plain = {name: fact for name, fact in facts.items() if not isinstance(fact, bytes)}
    sums = {name: zlib.crc32(raw) for name, (_, _, raw) in tensors.items()}
    _write(path_of(folder, shard, clock), tensors, {"narrows": json.dumps(plain | {"clock": clock, "crc32": sums})})
    return tidy(folder, shard, clock, int(facts.get("shards", 1)), shared)


def tidy(folder: Path, shard: int, clock: int, shards: int, shared: int) -> tuple[int, ...]:
    """After one of `clock` was written, by one of so many shards: drop later ones and those too old; the clocks on disk."""
    drop_after(folder, shard, clock)  # of an earlier run: they would count as newer, and this one be dropped for them
    for old in clocks(folder, shard)[:-KEPT]:
        if old != shared:
            path_of(folder, shard, old).unlink(missing_ok=True)
    kept = clocks(folder, shard)
    for left in folder.glob("shard-*.safetensors") if not shard else ():
        match = _NAME.fullmatch(left.name)  # of shards that are no more
        if match and int(match[1]) >= shards and int(match[2]) not in kept:
            left.unlink(missing_ok=True)
    return kept


def drop_after(folder: Path, shard: int, clock: int) -> None:
    """Drop the checkpoints of this shard that are later than `clock`: they are of a life that is over."""
    for late in clocks(folder, shard):
        if late > clock:
            path_of(folder, shard, late).unlink(missing_ok=True)


def whole(folder: Path) -> list[int]:
    """Clocks of which this folder has a checkpoint that a run can begin from."""
    found = []
    for clock in clocks(folder, 0):
        with suppress(IncompatibleError):
            for shard in range(shards_of(folder, clock)):
                read(folder, shard, clock)
            found.append(clock)
    return found


def drop_all_after(folder: Path, clock: int) -> None:
    """Drop the checkpoints of all shards that are later than `clock`."""
    for path in folder.glob("shard-*.safetensors"):
        if (match := _NAME.fullmatch(path.name)) and int(match[2]) > clock:
            path.unlink(missing_ok=True)


def read(
    folder: Path, shard: int, clock: int, only: tuple[str, ...] | None = None
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, Any]]:
    """The arrays (all, or `only` these) and facts of a shard's checkpoint. IncompatibleError for a file that is none."""
    path = path_of(folder, shard, clock)
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {})["narrows"])
            sums = facts.pop("crc32")
            for name in sums:
                if only is None or name in only or name.startswith(_BYTES):
                    array = file.get_tensor(name)
                    if zlib.crc32(_named(array)[2]) != sums[name]:
                        raise ValueError(f"{name} is not what was written")
                    if name.startswith(_BYTES):
                        facts[name.removeprefix(_BYTES)] = array.tobytes()
                    else:
                        arrays[name] = array
            missing = {"clock", "publication", "plan"} - set(facts) or {"x", "p"} - set(sums)
            if missing or facts["clock"] != clock:
                raise ValueError(f"it lacks {', '.join(sorted(missing)) or f'clock {clock}'}")
    except FileNotFoundError:
        raise IncompatibleError(f"{path} is missing: the other shards have a checkpoint of clock {clock}") from None
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise IncompatibleError(
            f"{path} is damaged or no checkpoint of Narrows ({error}): only one before it can be gone on from"
        ) from None
    return arrays, facts


def facts_of(folder: Path, clock: int) -> dict[str, Any]:
    """Of the checkpoint of a clock, by the file of shard 0. Raises IncompatibleError as `read`."""
    return read(folder, 0, clock, only=())[1]


def read_for(
    folder: Path,
    shard: int,
    shards: int,
    clock: int,
    facts: dict[str, Any],
    fetch: Callable[[int], object] = int,
) -> tuple[Load, bool]:
    """What one of so many shards begins from at the checkpoint of `clock`, and whether its files are of another number of
    shards. `facts`: of that checkpoint; `fetch`: brings the file of a shard, before it is read. Raises IncompatibleError as
    `read`, and what `fetch` raises."""
    count = int(facts.get("shards", 1))
    if count == shards:
        fetch(shard)
        arrays, facts = read(folder, shard, clock)
        return Load(arrays, int(facts["publication"])), False
    plan = Plan.unpacked(facts["plan"])
    ranges, (begin, end) = split(plan.size, count), split(plan.size, shards)[shard]
    # Rows of tables are dealt out one by one, so each shard has some of those of every other.
    needed = {*range(count)} if plan.tables else {index for index, *_ in overlaps(ranges, begin, end)}
    for index in needed:
        fetch(index)
    before = [(keys, read(folder, index, clock)[0] if index in needed else {}) for index, keys in enumerate(ranges)]
    arrays = recut(plan, before, (begin, end))
    if plan.tables:
        arrays |= tables.recut([each for _, each in before], len(plan.tables), shard, shards)
    return Load(arrays, int(facts["publication"])), True


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper half of each float32, rounded to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _as_on_workers(values: npt.NDArray[np.float32], shape: tuple[int, ...], dtype: str) -> NamedArray:
    """A tensor of the model in the dtype that the workers hold it in; float32 for one that NumPy cannot round to."""
    if dtype == "bfloat16":
        return dtype, shape, _bfloat16(values).tobytes()
    if dtype in ("float16", "float64"):
        with np.errstate(over="ignore"):
            return dtype, shape, values.astype(dtype).tobytes()
    return "float32", shape, values.tobytes()


def merge(folder: Path, clock: int, buffers: dict[str, NamedArray]) -> Path:
    """Write model.safetensors from the shards' checkpoints of `clock`; return its path."""
    flat = []
    facts: dict[str, Any] = {}
    shards = shards_of(folder, clock)
    for shard in range(shards):
        arrays, facts = read(folder, shard, clock, only=("x",))
        flat.append(arrays["x"])
    whole = np.concatenate(flat)
    plan = Plan.unpacked(facts["plan"])
    if whole.size != plan.size:
        raise IncompatibleError(f"the checkpoints of clock {clock} in {folder} have {whole.size} keys, not {plan.size}")
    offsets = plan.offsets()
    tensors: dict[str, NamedArray | NamedBlocks] = dict(buffers)
    for i, tensor in enumerate(plan.tensors):
        tensors[tensor.name] = _as_on_workers(whole[offsets[i] : offsets[i + 1]], tensor.shape, tensor.dtype)
    tensors |= {name: tensors[plan.tensors[i].name] for name, i in plan.aliases}
    for number, spec in enumerate(plan.tables):
        blocks = Blocks(folder, clock, shards, number, spec)
        tensors[spec.name] = "float32", (spec.rows, spec.dim), blocks
    path = folder / "model.safetensors"
    _write(path, tensors, {"format": "pt", "narrows": json.dumps({"clock": clock})})
    return path


def buffers(folder: Path, clock: int) -> dict[str, NamedArray]:
    """The module buffers that went along with the checkpoint of `clock`, by name."""
    _, facts = read(folder, 0, clock, only=())
    return unpack_arrays(facts.get("buffers", b""))
