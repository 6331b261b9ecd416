"""Checkpoints: one safetensors file per shard and clock.

    DIR/shard-0.clock-120.safetensors     x, p, optimizer state, float32; tables; bytes such as the model spec
                                          metadata: clock, publication, number of shards, checksums, ...

How it works
1. `make_folder` makes the folder of a run, or refuses one that holds another run.
2. `begin` writes the arrays of a shard into a temporary file, and returns a `ComingCheckpoint`. Its `finish` reads the
   file for the checksums, writes the header, and `publish` gives the file its name. So a file is whole or absent. Then
   `tidy` drops later files, of an earlier run, and all but the newest KEPT. The arrays may change after `begin`.
3. `sound` reads the files of a shard again and returns the clocks whose files hold what was written. `newest` is the
   newest clock that is sound for all shards; the run goes back to it, or resumes from it.
4. `read_for` maps the file that a shard begins from. If another number of shards wrote the checkpoint, it maps the files
   that have keys of this shard, and copies its parts of their arrays.

Rules
- All files of a clock are of one number of shards, which each file names. Any other number of shards can begin from
  them.
- A file is written and checked BLOCK_BYTES at a time (array_files.py). The store copies arrays that are mapped into its
  own. So a shard that begins from a checkpoint has its arrays in memory once.
- The files of an address are in a temporary folder too (store_checkpoints.py); `copy` stands for the address. `publish`
  puts a file there before it renames it here, so a name in the folder stands for a whole object.
- A file that is damaged, or no checkpoint, is never an exception of a library but an IncompatibleError with a sentence.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.protocols.config.checkpoint_names import BYTES, COMING, MODEL, ROUND, SHARD, STATE, shard_file
from narrows.protocols.config.key_ranges import VALUES, Keys, overlaps
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError, UsageError
from narrows.protocols.runtime.storage.store_copy import NO_COPY, FolderCopy
from narrows.protocols.wire import unpack
from narrows.ps.checkpoints.array_files import (
    BLOCK_BYTES,
    copied,
    laid_out,
    named,
    packed_header,
    places_of,
    publish,
)
from narrows.ps.store import embedding_rows
from narrows.ps.store.changes import OWED, LoadArrays
from narrows.ps.store.reshard_arrays import recut

# The newest, which some shards may not have yet; the one that all shards have; one more, if that one is damaged.
KEPT = 3
CRC_MOST = (1 << 32) - 1  # the longest checksum, until the checksums are known
DEFAULT = "checkpoints"  # the folder in which a run makes its own folder, without --checkpoint-dir


def why_anew(folder: str, told: str = "") -> str:
    """Return a sentence if a run that should resume from `folder` begins anew; "" if the folder has a checkpoint.

    `told`: the name of the folder in the sentence, "" for its path.
    """
    if _has_any(Path(folder)):
        return ""
    below = sorted((each for each in Path(folder).iterdir() if each.is_dir()), key=lambda each: -each.stat().st_mtime)
    found = next(filter(_has_any, below), None)
    other = f"; {found} has one: name that folder to go on from there" if found else ""
    return f"{told or folder} has no checkpoint, so the run begins anew{other}"


def _has_any(folder: Path) -> bool:
    return any(SHARD.fullmatch(path.name) for path in folder.glob("shard-*.safetensors"))


def clocks(folder: Path, shard: int) -> tuple[int, ...]:
    """The clocks of this shard's files in `folder`, ascending."""
    found = [SHARD.fullmatch(path.name) for path in folder.glob("shard-*.safetensors")] if folder.is_dir() else []
    return tuple(sorted(int(match[2]) for match in found if match and int(match[1]) == shard))


def sound(folder: Path, shard: int, shards: int) -> tuple[tuple[int, ...], list[str]]:
    """The clocks that a shard can begin from: the files that it needs hold what was written.

    Args:
        folder: of the checkpoints.
        shard: the shard's number.
        shards: the number of shards of the run.

    Returns:
        The clocks, ascending, and a sentence for each clock of this shard whose file is damaged.
    """
    whole, sentences, own = [], [], clocks(folder, shard)
    for clock in sorted({*own, *clocks(folder, 0)}):
        try:
            count = int(check(folder, shard if clock in own else 0, clock).get("shards", shards))
            for index in range(count) if count != shards else ():
                check(folder, index, clock)
        except IncompatibleError as error:
            sentences += [str(error)] if clock in own else []
            continue
        if clock in own or count != shards:
            whole.append(clock)
    return tuple(whole), sentences


def shards_of(folder: Path, clock: int) -> int:
    """The number of shards that wrote the checkpoint of this clock. Raises IncompatibleError as `read`."""
    return int(facts_of(folder, clock).get("shards", 1))


def newest(folder: Path, shards: int) -> int:
    """The newest clock that all shards, `shards` of them, can begin from; -1: there is none.

    Raises:
        IncompatibleError: damaged files are the only reason that there is none.
    """
    found = [sound(folder, shard, shards) for shard in range(shards)]
    shared = max(set.intersection(*(set(whole) for whole, _ in found)), default=-1)
    if shared < 0 and set.intersection(*(set(clocks(folder, shard)) for shard in range(shards))):
        raise IncompatibleError(next(text for _, sentences in found for text in sentences))
    return shared


def make_folder(told: str, resume: bool) -> str:
    """Make the folder of a run's checkpoints, and return its path; "" for --checkpoint-dir none.

    Args:
        told: the value of --checkpoint-dir, "" without the flag.
        resume: --resume is given.

    Raises:
        UsageError: the folder holds another run, cannot be made, or --resume has no folder.
    """
    if told == "none" or (not told and resume):
        if resume:
            raise UsageError("--resume: name the folder with --checkpoint-dir")
        return ""
    try:
        if told:
            folder = Path(told)
            folder.mkdir(parents=True, exist_ok=True)
            if not resume and any(folder.glob("*.safetensors")):
                raise UsageError(taken(told))
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


def taken(told: str) -> str:
    """Return the sentence for a --checkpoint-dir that holds another run."""
    return f"--checkpoint-dir {told} holds the model of a run: go on with it by --resume, or name another folder"


def move_aside(folder: Path) -> str:
    """Move files of earlier runs in `folder` to a new folder in it. Return its path, "" without such files.

    Raises:
        OSError: the disk refused it.
    """
    left = [path for path in folder.iterdir() if of_run(path.name)]
    if not left:
        return ""
    kept = next(kept for number in count(1) if not (kept := folder / f"earlier-{number}").exists())
    kept.mkdir()
    for path in left:
        os.replace(path, kept / path.name)
    return str(kept)


def of_run(name: str) -> bool:
    """True if a run leaves a file of this name."""
    return name == MODEL or any(each.fullmatch(name) for each in (SHARD, COMING, STATE, ROUND))


def path_of(folder: Path, shard: int, clock: int) -> Path:
    """The path of a shard's file of a clock."""
    return folder / shard_file(shard, clock)


class ComingCheckpoint:
    """A shard's checkpoint that is being written. The constructor writes the arrays: they may change after it.

    Args:
        folder, shard, clock, arrays, facts: as in `write`.
        direct_s: for how long the arrays are written. What a slow disk has not taken by then is copied.
        copy: where else the files of the folder are kept.

    Raises:
        OSError: the disk refused the file. Nothing is left of it.
    """

    def __init__(
        self,
        folder: Path,
        shard: int,
        clock: int,
        arrays: Mapping[str, npt.NDArray[Any]],
        facts: dict[str, Any],
        direct_s: float = math.inf,
        copy: FolderCopy = NO_COPY,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        drop_coming(folder, shard)
        self.folder, self.shard, self.clock, self.shards = folder, shard, clock, int(facts.get("shards", 1))
        self.copy = copy
        tensors = {name: named(array) for name, array in arrays.items()}
        tensors |= {BYTES + name: ("uint8", (len(f),), f) for name, f in facts.items() if isinstance(f, bytes)}
        self._facts = {name: fact for name, fact in facts.items() if not isinstance(fact, bytes)} | {"clock": clock}
        self._path = path_of(folder, shard, clock)
        self._temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        self._places = laid_out(tensors)
        self._head = len(self._header(dict.fromkeys(tensors, CRC_MOST), 0))  # bytes before the tensors
        self._size = self._head + sum(place.end - place.begin for place in self._places.values())
        self._rest = deque[tuple[int, bytes]]()  # copied blocks, and where they go
        stop_s, self._file = time.monotonic() + direct_s, open(self._temporary, "wb+", buffering=0)  # noqa: SIM115
        try:
            for name, place in self._places.items():
                at, raw = self._head + place.begin, tensors[name][2]
                for low in range(0, len(raw), BLOCK_BYTES):
                    block = raw[low : low + BLOCK_BYTES]
                    if time.monotonic() < stop_s:
                        self._write(at + low, block)
                    else:
                        self._rest.append((at + low, bytes(block)))
        except OSError:
            self._drop()
            raise

    def _header(self, sums: dict[str, int], least: int) -> bytes:
        return packed_header(self._places, {"narrows": json.dumps(self._facts | {"crc32": sums})}, least)

    def _write(self, at: int, block: bytes | memoryview) -> None:
        left = memoryview(block)
        while left:
            written = os.pwrite(self._file.fileno(), left, at)
            left, at = left[written:], at + written

    def _drop(self) -> None:
        """Leave nothing on the disk: a full one needs the space."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def finish(self, shared: int = -1) -> tuple[int, ...]:
        """Write what is left, and give the file its name. Call it once.

        Args:
            shared: as in `write`.

        Returns:
            The clocks of this shard on disk, ascending.

        Raises:
            OSError: the disk refused the file. Nothing is left of it.
        """
        try:
            while self._rest:
                self._write(*self._rest.popleft())
            sums = {name: copied(self._file, place, None, self._head) for name, place in self._places.items()}
            self._write(0, self._header(sums, self._head))
            self._file.close()
            publish(self._temporary, self._path, self._size, self.copy)
        except (OSError, IncompatibleError):
            self._drop()
            raise
        except ValueError:  # it is shorter than what was written
            self._drop()
            raise OSError(f"{self._path.name} is not whole") from None
        return tidy(self.folder, self.shard, self.clock, self.shards, shared, self.copy)


def write(
    folder: Path,
    shard: int,
    clock: int,
    arrays: Mapping[str, npt.NDArray[Any]],
    facts: dict[str, Any],
    shared: int = -1,
    copy: FolderCopy = NO_COPY,
) -> tuple[int, ...]:
    """Write a shard's checkpoint, and drop its later ones and all but the newest KEPT.

    Args:
        folder: is made if it does not exist.
        shard: the shard's number.
        clock: of the checkpoint.
        arrays: float32 arrays by name; "x" and "p" with one value per key of the shard.
        facts: what the file says of itself, JSON values or bytes: "publication", "plan", "shards" and others.
        shared: the newest clock that all shards are known to have. Its file stays: another shard's disk may refuse
            for long.
        copy: where else the files of the folder are kept.

    Returns:
        The clocks of this shard on disk, ascending.

    Raises:
        OSError: the disk refused the file.
    """
    return ComingCheckpoint(folder, shard, clock, arrays, facts, copy=copy).finish(shared)


def drop_coming(folder: Path, shard: int) -> None:
    """Drop the unfinished files of this shard: a process was killed while it wrote or sent them."""
    for left in folder.glob(f"shard-{shard}.clock-*.tmp"):
        if COMING.fullmatch(left.name):
            left.unlink(missing_ok=True)


def tidy(folder: Path, shard: int, clock: int, shards: int, shared: int, copy: FolderCopy = NO_COPY) -> tuple[int, ...]:
    """Drop the files that a new file of `clock` makes obsolete: later ones, and old ones. Return the clocks on disk.

    Args:
        folder: of the checkpoints.
        shard: the shard that has written.
        clock: of its new file.
        shards: the number of shards of the run. Shard 0 drops files of shards that are no more.
        shared: as in `write`.
        copy: where else the files are kept. If it fails, the next write drops them there.
    """
    gone = partial(obsolete, shard=shard, clock=clock, shards=shards, shared=shared)
    for name in gone([path.name for path in folder.glob("shard-*.safetensors")]):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        copy.remove(gone)
    return clocks(folder, shard)


def obsolete(names: Collection[str], shard: int, clock: int, shards: int, shared: int) -> list[str]:
    """Return the files of `names` that a shard drops after it has written that of `clock`; arguments as in `tidy`.

    Later ones are of an earlier run: as newer ones they would make the new file obsolete.
    """
    found = {name: (int(match[1]), int(match[2])) for name in names if (match := SHARD.fullmatch(name))}
    own = sorted(of for index, of in found.values() if index == shard and of <= clock)
    kept = {*own[-KEPT:], *(of for of in own if of == shared)}
    ours = {name for name, (index, of) in found.items() if index == shard and of not in kept}
    left = {name for name, (index, of) in found.items() if not shard and index >= shards and of not in kept}
    return sorted(ours | left)


def drop_after(folder: Path, shard: int, clock: int, copy: FolderCopy = NO_COPY) -> None:
    """Drop the checkpoints of this shard that are later than `clock`: they belong to a generation that is over.

    A copy that fails keeps them until the next write (`tidy`).
    """

    def late(names: Collection[str]) -> list[str]:
        found = ((name, SHARD.fullmatch(name)) for name in names)
        return [name for name, match in found if match and int(match[1]) == shard and int(match[2]) > clock]

    for name in late([path.name for path in folder.glob("shard-*.safetensors")]):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        copy.remove(late)


def whole(folder: Path) -> list[int]:
    """The clocks of this folder whose checkpoints are whole: all their files hold what was written."""
    found = []
    for clock in clocks(folder, 0):
        with suppress(IncompatibleError):
            for shard in range(shards_of(folder, clock)):
                check(folder, shard, clock)
            found.append(clock)
    return found


def drop_all_after(folder: Path, clock: int) -> None:
    """Drop the checkpoints of all shards that are later than `clock`."""
    for path in folder.glob("shard-*.safetensors"):
        if (match := SHARD.fullmatch(path.name)) and int(match[2]) > clock:
            path.unlink(missing_ok=True)


def _read(
    folder: Path, shard: int, clock: int, wanted: Callable[[str], bool], keep: bool
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, Any]]:
    """Read and check the wanted arrays of a shard's checkpoint, and all facts. Keep the arrays, or none of them."""
    path = path_of(folder, shard, clock)
    arrays: dict[str, npt.NDArray[np.float32]] = {}
    try:
        with open(path, "rb", buffering=0) as file:
            facts, places = places_of(file)
            sums = facts.pop("crc32")
            for name in sums:
                place, fact = places[name], name.startswith(BYTES)
                if not (fact or wanted(name)):
                    continue
                into = np.empty(place.shape, place.dtype) if keep or fact else None
                if copied(file, place, into) != sums[name]:
                    raise ValueError(f"{name} differs from what was written")
                if fact and into is not None:
                    facts[name.removeprefix(BYTES)] = into.tobytes()
                elif place.dtype != embedding_rows.dtype_of(name) or (name in ("x", "p") and len(place.shape) != 1):
                    raise ValueError(f"{name} is {place.dtype} with {len(place.shape)} dimensions")
                elif into is not None:
                    arrays[name] = into
            missing = {"clock", "publication", "plan"} - set(facts) or {"x", "p"} - set(sums)
            if missing or facts["clock"] != clock:
                raise ValueError(f"it lacks {', '.join(sorted(missing)) or f'clock {clock}'}")
    except FileNotFoundError:
        raise IncompatibleError(f"{path} is missing: the other shards have a checkpoint of clock {clock}") from None
    except (OSError, struct.error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise IncompatibleError(
            f"{path} is damaged or no checkpoint of Narrows ({error}): only one before it can be gone on from"
        ) from None
    return arrays, facts


def read(
    folder: Path, shard: int, clock: int, only: tuple[str, ...] | None = None
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, Any]]:
    """Read a shard's checkpoint, and check each array that it reads.

    Args:
        folder: of the checkpoints.
        shard: the shard's number.
        clock: of the checkpoint.
        only: names of the arrays to read; None: all.

    Returns:
        The arrays by name, and the facts.

    Raises:
        IncompatibleError: the file is missing, damaged or no checkpoint.
    """
    return _read(folder, shard, clock, lambda name: only is None or name in only, keep=True)


def check(folder: Path, shard: int, clock: int) -> dict[str, Any]:
    """Check all of a shard's checkpoint, and return its facts. Raises IncompatibleError as `read`."""
    return _read(folder, shard, clock, lambda name: True, keep=False)[1]


def _mapped(folder: Path, shard: int, clock: int) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, Any]]:
    """Check a shard's checkpoint, and return its arrays, mapped from the file, and its facts.

    The arrays cannot be changed. OWED is a copy, since a cluster keeps it as it is.
    """
    facts = check(folder, shard, clock)
    with open(path_of(folder, shard, clock), "rb", buffering=0) as file:
        _, places = places_of(file)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    arrays = {
        name: np.frombuffer(data, place.dtype, prod(place.shape), place.begin).reshape(place.shape)
        for name, place in places.items()
        if not name.startswith(BYTES)
    }
    return arrays | {name: array.copy() for name, array in arrays.items() if name == OWED}, facts


def weights_at(path: Path) -> tuple[int, int, int]:
    """Return where a checkpoint has the weights x: the first byte, the end, and the CRC-32 of the bytes.

    Raises:
        IncompatibleError: the file is missing, damaged or no checkpoint.
    """
    try:
        with open(path, "rb") as file:
            facts, places = places_of(file)
        return places["x"].begin, places["x"].end, int(facts["crc32"]["x"])
    except (OSError, struct.error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise IncompatibleError(f"{path} is damaged or no checkpoint of Narrows ({error})") from None


def _check_sizes(
    folder: Path, shard: int, clock: int, found: tuple[dict[str, npt.NDArray[np.float32]], dict[str, Any]]
) -> dict[str, npt.NDArray[np.float32]]:
    """Return the arrays of a file. Raises IncompatibleError if x or p has not the size of the shard."""
    arrays, facts = found
    begin, end = ranges_of(facts)[shard]
    for name in ("x", "p"):
        if (size := arrays[name].size) != end - begin:
            raise IncompatibleError(
                f"{path_of(folder, shard, clock)} has {size} values of {name}, and by its plan its shard has {end - begin}: "
                "only one before it can be gone on from"
            )
    return arrays


def facts_of(folder: Path, clock: int) -> dict[str, Any]:
    """The facts of the checkpoint of a clock, from the file of shard 0. Raises IncompatibleError as `read`."""
    return read(folder, 0, clock, only=())[1]


def run_name(folder: Path) -> str:
    """The name of the run that wrote the newest readable checkpoint in `folder`; "" for none, or without a name."""
    for clock in reversed(clocks(folder, 0)):
        with suppress(IncompatibleError, RemoteProtocolError):
            settings = unpack(facts_of(folder, clock).get("settings") or b"\x80")  # of any release
            return str(settings.get("name", "")) if isinstance(settings, dict) else ""
    return ""


def ranges_of(facts: dict[str, Any]) -> list[Keys]:
    """Return the keys of each shard that has written a checkpoint with these facts."""
    plan = ModelSpec.unpacked(facts["plan"])
    return plan.ranges(int(facts.get("shards", 1)), str(facts.get("cut", VALUES)))


def read_for(
    folder: Path,
    shard: int,
    shards: int,
    cut: str,
    clock: int,
    facts: dict[str, Any],
    fetch: Callable[[int], object] = int,
) -> tuple[LoadArrays, bool, int]:
    """Read what a shard begins from at a checkpoint, which any number of shards may have written, cut in any way.

    Args:
        folder: of the checkpoints.
        shard: the shard's number.
        shards: the number of shards of the run.
        cut: where the run cuts the model, one of CUTS.
        clock: of the checkpoint.
        facts: of the checkpoint, as from `facts_of`.
        fetch: is called with the number of each shard whose file is about to be read.

    Returns:
        The arguments of `ModelShard.begin`: the arrays of the shard's keys, True if the shards that wrote the
        checkpoint had other keys, and the run's steps before its clock.

    Raises:
        IncompatibleError: as `read`. Errors of `fetch` pass through.
    """
    count, steps = int(facts.get("shards", 1)), int(facts.get("steps", 0))
    if (count, facts.get("cut", VALUES)) == (shards, cut):
        fetch(shard)
        arrays, facts = _mapped(folder, shard, clock)
        load = LoadArrays(_check_sizes(folder, shard, clock, (arrays, facts)), int(facts["publication"]))
        return load, False, steps
    plan = ModelSpec.unpacked(facts["plan"])
    ranges, (begin, end) = ranges_of(facts), plan.ranges(shards, cut)[shard]
    # Rows of tables go to the shards in turn, so a shard needs rows from the file of every other shard.
    needed = {*range(count)} if plan.tables else {index for index, *_ in overlaps(ranges, begin, end)}
    for index in needed:
        fetch(index)
    before = [
        (keys, _check_sizes(folder, index, clock, _mapped(folder, index, clock)) if index in needed else {})
        for index, keys in enumerate(ranges)
    ]
    arrays = recut(plan, before, (begin, end))
    if plan.tables:
        arrays |= embedding_rows.recut([each for _, each in before], len(plan.tables), shard, shards)
    return LoadArrays(arrays, int(facts["publication"])), True, steps
