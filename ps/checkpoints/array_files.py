"""The format of the files that a run leaves, safetensors: written and read block by block, without a copy of a tensor.

    bytes of the header | header: JSON, dtype, shape and place of each tensor, metadata | the tensors, aligned

Written by hand: the writer of safetensors takes NumPy's dtypes only, and whole tensors. Its reader maps the file and
copies from there, so a tensor takes its memory twice.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from narrows.protocols.config.model_spec import DTYPES, NamedArray
from narrows.protocols.errors import IncompatibleError
from narrows.protocols.runtime.storage.store_copy import NO_COPY, FolderCopy

BLOCK_BYTES = 1 << 22  # bytes of a file that are written, or read and checked, at a time
FILE_DTYPES = {dtype.file: name for name, dtype in DTYPES.items() if dtype.file}


class StreamedFile(Protocol):
    """The bytes of a tensor that is never in memory as a whole."""

    def __len__(self) -> int:
        """The number of bytes of the tensor."""
        ...

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the bytes, block by block. A block is written before the next one is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a file has a tensor, and its form. The bytes [begin, end) count from the file's begin, or from its header's end."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


NamedBlocks = tuple[str, tuple[int, ...], StreamedFile]  # dtype, shape and bytes, as in NamedArray


def write_file(
    path: Path,
    tensors: Mapping[str, NamedArray | NamedBlocks],
    metadata: dict[str, str],
    copy: FolderCopy = NO_COPY,
) -> None:
    """Write a safetensors file whole, or not at all.

    Args:
        path: of the file.
        tensors: (dtype, shape, bytes) by name.
        metadata: of the file.
        copy: where else the file is kept.

    Raises:
        OSError: the disk refused the file. Nothing is left of it.
    """
    places = laid_out(tensors)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(packed_header(places, metadata))
            for raw in (tensors[name][2] for name in places):
                for part in (raw,) if isinstance(raw, (bytes, memoryview)) else raw:
                    file.write(part)
            size = file.tell()
        publish(temporary, path, size, copy)
    except (OSError, IncompatibleError):
        temporary.unlink(missing_ok=True)  # a full disk needs the space
        raise


def laid_out(tensors: Mapping[str, NamedArray | NamedBlocks]) -> dict[str, TensorPlace]:
    """Return the places of the tensors, in the order of a file: every one is aligned."""
    places, end = dict[str, TensorPlace](), 0
    for name, (dtype, shape, raw) in sorted(tensors.items(), key=lambda item: (-DTYPES[item[1][0]].bytes, item[0])):
        places[name] = TensorPlace(dtype, shape, end, end + len(raw))
        end += len(raw)
    return places


def packed_header(places: Mapping[str, TensorPlace], metadata: dict[str, str], least: int = 0) -> bytes:
    """Return what a file has before its tensors, at least `least` bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    for name, at in places.items():
        header[name] = {"dtype": DTYPES[at.dtype].file, "shape": list(at.shape), "data_offsets": [at.begin, at.end]}
    packed = json.dumps(header).encode()
    packed += b" " * max(-len(packed) % 8, least - 8 - len(packed))
    return struct.pack("<Q", len(packed)) + packed


def publish(temporary: Path, path: Path, size: int, copy: FolderCopy = NO_COPY) -> None:
    """Flush a temporary file to the disk, copy it to `copy`, and give it its name.

    Raises:
        OSError: it has not `size` bytes, or the other place does not take it. Then it has no name here either.
    """
    with open(temporary, "rb+") as file:
        if file.seek(0, os.SEEK_END) != size:
            raise OSError(f"{path.name} is not whole")
        os.fsync(file.fileno())
    copy.put(temporary, path.name)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)


def named(array: npt.NDArray[Any]) -> NamedArray:
    """Dtype, shape and bytes of an array."""
    return str(array.dtype), array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def places_of(file: BinaryIO) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """Read the header of a checkpoint: what it says of itself, and the place of each tensor.

    Raises what Python raises on a header that is none: ValueError, TypeError, KeyError or struct.error.
    """
    whole = os.fstat(file.fileno()).st_size
    (size,) = struct.unpack("<Q", file.read(8))
    if size > whole - 8:
        raise ValueError("its header is longer than the file")
    header = json.loads(file.read(size))
    facts = json.loads(header.pop("__metadata__")["narrows"])
    at, places = 8 + size, dict[str, TensorPlace]()
    for name, told in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = FILE_DTYPES[told["dtype"]], tuple(told["shape"]), told["data_offsets"]
        if 8 + size + begin != at or end - begin != prod(shape) * DTYPES[dtype].bytes or min(shape, default=0) < 0:
            raise ValueError(f"{name} has another place than its header says")
        at += end - begin
        places[name] = TensorPlace(dtype, shape, at - (end - begin), at)
    if at != whole:
        raise ValueError(f"it has {whole} bytes, and by its header {at}")
    return facts, places


def copied(file: BinaryIO, place: TensorPlace, into: npt.NDArray[Any] | None, head: int = 0) -> int:
    """Read the bytes of a tensor into an array of its form, or nowhere. Returns their CRC-32.

    `head`: the bytes before those from which the place counts.
    """
    found, left = 0, place.end - place.begin
    room = np.empty(min(BLOCK_BYTES, left), np.uint8) if into is None else into.reshape(-1).view(np.uint8)
    file.seek(head + place.begin)
    while left:
        block = room[:BLOCK_BYTES] if into is None else room[len(room) - left :][:BLOCK_BYTES]
        read = file.readinto(block[:left].data)  # type: ignore[attr-defined]  # BinaryIO lacks it
        if not read:
            raise ValueError("it ends within a tensor")
        found, left = zlib.crc32(block[:read].data, found), left - read
    return found
