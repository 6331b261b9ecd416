"""Writes the whole model by tensor names, from the checkpoints of all shards, at the end of a run.

DIR/model.safetensors     what a plain model loads: its parameters under each of their names, in the dtype of the
                          workers, and its buffers. Frozen parameters, which no worker trains, are not in it.

The model is copied block by block, and is never in memory as a whole.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from narrows.compression.rows import first_values
from narrows.protocols.config.checkpoint_names import MODEL
from narrows.protocols.config.embedding_spec import TableSpec
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.model_spec import DTYPES, ModelSpec, NamedArray, unpack_arrays
from narrows.protocols.errors import IncompatibleError
from narrows.protocols.runtime.cli.output import set_aside
from narrows.protocols.runtime.storage.store_copy import NO_COPY, FolderCopy
from narrows.ps.checkpoints.array_files import NamedBlocks, named, write_file
from narrows.ps.checkpoints.checkpoint_files import clocks, path_of, read, shards_of, weights_at
from narrows.ps.store import embedding_rows

NAME = MODEL
BLOCK = 1 << 20  # values that are in memory at a time
HEADER_MAX = 100_000_000  # bytes of a header, the limit of safetensors


class CheckpointBlocks:
    """The values of one embedding table from the checkpoints of all shards, float32[rows, dim], block by block.

    So the table is never in memory as a whole. Rows that no worker has looked up get their first values.

    Args:
        folder: of the checkpoints.
        clock: of the checkpoint.
        shards: the number of shards that wrote it.
        number: of the table in the model spec.
        spec: of the table.

    Raises:
        IncompatibleError: after the last block, if a file does not hold what was written.
    """

    def __init__(self, folder: Path, clock: int, shards: int, number: int, spec: TableSpec) -> None:
        self.paths = [path_of(folder, shard, clock) for shard in range(shards)]
        self.prefix, self.spec = f"{embedding_rows.PREFIX}{number}.", spec

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
                    block[at], fresh[at], sums[i] = part, False, zlib.crc32(named(part)[2], sums[i])
                block[fresh] = first_values(numbers[fresh], spec.dim, spec.seed, spec.std)
                yield block.reshape(-1).view(np.uint8).data
            for path, file, found in zip(self.paths, files, sums, strict=True):
                if json.loads(file.metadata()["narrows"])["crc32"][name] != found:
                    raise IncompatibleError(f"{path} is damaged: table {spec.name!r} differs from what was written")


class ShardValues:
    """The weights x in one shard's checkpoint, float32[size], read block by block.

    Args:
        path: of the file, which is read until `close`.

    Raises:
        IncompatibleError: the file is missing, damaged or no checkpoint, or the weights are not what was written.
    """

    def __init__(self, path: Path) -> None:
        begin, end, crc = weights_at(path)
        self.path, self.begin, self.size = path, begin, (end - begin) // 4
        self.file = open(path, "rb")  # noqa: SIM115  `close` closes it
        found = 0
        for block in self.blocks(0, self.size):
            found = zlib.crc32(block.view(np.uint8).data, found)
        if found != crc:
            self.close()
            raise IncompatibleError(f"{path} is damaged: x differs from what was written")

    def close(self) -> None:
        self.file.close()

    def blocks(self, begin: int, end: int) -> Iterator[npt.NDArray[np.float32]]:
        """Yield values [begin, end), float32[at most BLOCK] each, valid until the next."""
        block = np.empty(min(BLOCK, end - begin), np.float32)
        self.file.seek(self.begin + 4 * begin)
        for low in range(begin, end, BLOCK):
            values = block[: end - low]
            if self.file.readinto(values.view(np.uint8).data) != values.nbytes:
                raise IncompatibleError(f"{self.path} is damaged: it ends within x")
            yield values


class TensorBlocks:
    """The bytes of one tensor of the model, from the files of all shards, in the dtype of the workers.

    Args:
        shards: the weights of each shard, and their keys [begin, end).
        keys: of the tensor, [begin, end).
        dtype: of the tensor on the workers.
    """

    def __init__(self, shards: Sequence[tuple[ShardValues, Keys]], keys: Keys, dtype: str) -> None:
        self.shards, self.keys, self.dtype = shards, keys, dtype

    def __len__(self) -> int:
        return (self.keys[1] - self.keys[0]) * len(_as_on_workers(np.zeros(1, np.float32), self.dtype))

    def __iter__(self) -> Iterator[memoryview]:
        for values, (begin, end) in self.shards:
            low, high = max(self.keys[0], begin), min(self.keys[1], end)
            for block in values.blocks(low - begin, high - begin) if low < high else ():
                yield memoryview(_as_on_workers(block, self.dtype))


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper 16 bits of each float32, rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _as_on_workers(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Return values of the model in the dtype of the workers. A complex number is two values."""
    if dtype == "bfloat16":
        return _bfloat16(values).tobytes()
    if dtype in ("float16", "float64"):
        with np.errstate(over="ignore"):
            return values.astype(dtype).tobytes()
    return values.tobytes()


def _file_dtype(dtype: str) -> str:
    """Return the dtype in the file: complex128 becomes complex64, since no file has complex128."""
    if dtype in ("bfloat16", "float16", "float64"):
        return dtype
    return "complex64" if DTYPES[dtype].keys > 1 else "float32"


def metadata_of(begin: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file from its first bytes, its header at least; {} if that is none."""
    with suppress(ValueError, KeyError, TypeError, struct.error):
        metadata = json.loads(begin[8 : 8 + header_bytes(begin)])["__metadata__"]
        return {str(name): str(value) for name, value in metadata.items()} if isinstance(metadata, dict) else {}
    return {}


def header_bytes(begin: bytes) -> int:
    """Return the length of a header by the first 8 bytes of its file, at most HEADER_MAX. Raises struct.error."""
    return min(int(struct.unpack_from("<Q", begin)[0]), HEADER_MAX)


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file; {} if it cannot be read."""
    with suppress(OSError, struct.error), open(path, "rb") as file:
        first = file.read(8)
        return metadata_of(first + file.read(header_bytes(first)))
    return {}


def ours(metadata: Mapping[str, str]) -> bool:
    """True if a run has written a file with this metadata. A script, or a user, may have a model of the same name."""
    return "narrows" in metadata


def end_of(folder: Path) -> dict[str, Any] | None:
    """The facts of the end of the run in `folder`: its "clock", number of "steps" and "run_id".

    Returns:
        None if no run has ended there, or if the run has gone on since.
    """
    with suppress(KeyError, TypeError, ValueError):
        facts: dict[str, Any] = json.loads(_metadata(folder / NAME)["narrows"])
        if "steps" in facts and max(clocks(folder, 0), default=-1) <= facts["clock"]:
            return facts
    return None


def merge(
    folder: Path,
    clock: int,
    buffers: dict[str, NamedArray],
    said: Callable[[str], object] = str,
    end: Mapping[str, Any] | None = None,
    copy: FolderCopy = NO_COPY,
) -> Path:
    """Write model.safetensors from the shards' checkpoints of `clock`.

    Args:
        folder: of the checkpoints and of the model.
        clock: of the checkpoints.
        buffers: the module buffers, by name.
        said: gets a sentence if the folder had a model that no run wrote. That file is kept under another name.
        end: facts of a run that has ended, for `end_of`.
        copy: where else the files of the folder are kept.

    Returns:
        The path of the file.

    Raises:
        IncompatibleError: a checkpoint is damaged, or not of this model.
    """
    shards = shards_of(folder, clock)
    for shard in range(shards):
        facts = read(folder, shard, clock, only=())[1]
    plan = ModelSpec.unpacked(facts["plan"])
    tensors: dict[str, NamedArray | NamedBlocks] = dict(buffers)
    path = folder / NAME
    with ExitStack() as stack:
        found = [stack.enter_context(closing(ShardValues(path_of(folder, shard, clock)))) for shard in range(shards)]
        ends = [*accumulate((values.size for values in found), initial=0)]
        if ends[-1] != plan.size:
            raise IncompatibleError(
                f"the checkpoints of clock {clock} in {folder} have {ends[-1]} keys, not {plan.size}"
            )
        each = list(zip(found, pairwise(ends), strict=True))
        for tensor, keys in zip(plan.tensors, pairwise(plan.offsets()), strict=True):
            tensors[tensor.name] = _file_dtype(tensor.dtype), tensor.shape, TensorBlocks(each, keys, tensor.dtype)
        tensors |= {name: tensors[plan.tensors[i].name] for name, i in plan.aliases}
        for number, spec in enumerate(plan.tables):
            rows = CheckpointBlocks(folder, clock, shards, number, spec)
            tensors[spec.name] = "float32", (spec.rows, spec.dim), rows
        if not ours(_metadata(path)) and (kept := set_aside(path)):
            said(f"{path} was not written by narrows, and is kept as {kept}")
        write_file(path, tensors, {"format": "pt", "narrows": json.dumps({**(end or {}), "clock": clock})}, copy)
    return path


def buffers(folder: Path, clock: int) -> dict[str, NamedArray]:
    """The module buffers in the checkpoint of `clock`, by name."""
    _, facts = read(folder, 0, clock, only=())
    return unpack_arrays(facts.get("buffers", b""))
