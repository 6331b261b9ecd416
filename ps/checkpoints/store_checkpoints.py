"""The checkpoints of a run whose --checkpoint-dir is an address in an object store.

    s3://BUCKET/RUN/shard-0.clock-120.safetensors      as in a folder: an object for each shard and clock
    s3://BUCKET/RUN/model.safetensors

How it works
1. `begin` prepares a temporary folder for a run of this machine. With --resume it fetches the newest checkpoint of which
   the store has the files of all shards, and checks them. If one is damaged, it takes the checkpoint before.
2. Shards write into that folder, and each file is put into the store before it gets its name there (store_copy.py). So
   the commit of a shard's checkpoint is the end of its upload, and the commit of a run's is that of its last shard: the
   store has no clock of which all shards have files and one of these is torn.
3. `drop_after` removes what is later than the checkpoint from which the run goes on.

Rules
- No shard waits for the store: a thread sends its files (checkpoint_writer.py). A restarted shard reads the temporary folder.
- The store is read at the start alone. Another machine can be the next to resume.
- Nothing keeps two servers with one address apart, as nothing does on a disk that two machines share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from narrows.protocols.config.checkpoint_names import MODEL, SHARD, shard_file
from narrows.protocols.errors import IncompatibleError, UsageError
from narrows.protocols.runtime.storage.object_store import FileStore, FileStoreError, put_limit_s
from narrows.ps.checkpoints import checkpoint_files, whole_model

Say = Callable[[str], object]


def begin(store: FileStore, folder: Path, resume: bool, fresh_run: bool, say: Say) -> None:
    """Prepare the folder of a run.

    Args:
        store: of the run.
        folder: a temporary folder, empty.
        resume: fetch the newest checkpoint, if there is one.
        fresh_run: move files of an earlier run to a folder in the store first.
        say: gets a sentence for the user.

    Raises:
        UsageError: the store fails, or holds another run and neither flag is given.
        IncompatibleError: damaged files are the only reason that no checkpoint is taken.
    """
    try:
        with suppress(FileStoreError):  # a user who may put objects need not be allowed to list uploads
            for prefix in ("shard-", MODEL):
                store.abort(prefix)
        if fresh_run and (kept := _move_aside(store)):
            say(f"files of an earlier run in {store.address} are now in {kept}")
        if not resume:
            if any(name.endswith(".safetensors") for name in store.objects()):
                raise UsageError(checkpoint_files.taken(store.address))
            return
        _fetch(store, folder, say)
    except FileStoreError as error:
        raise UsageError(f"--checkpoint-dir {error}") from None


def _fetch(store: FileStore, folder: Path, say: Say) -> None:
    found = store.objects()
    damaged = ""
    for clock in sorted(_clocks(found), reverse=True):
        try:
            shards = _fetch_clock(store, folder, clock)
        except IncompatibleError as error:
            damaged = damaged or str(error).replace(f"{folder}/", f"{store.address}/")
            say(damaged)
            shards = 0
        if shards:
            break
        for name in [path.name for path in folder.glob("shard-*.safetensors")]:
            (folder / name).unlink()
    else:
        if damaged:
            raise IncompatibleError(damaged)
    if MODEL in found and whole_model.ours(whole_model.metadata_of(begun := _head(store))):
        (folder / MODEL).write_bytes(begun)  # `end_of` needs no more of it


def _fetch_clock(store: FileStore, folder: Path, clock: int) -> int:
    """Fetch and check the files of a clock. Return the number of its shards; 0 if the store lacks one.

    Raises:
        IncompatibleError: a file is damaged.
    """
    found, first = store.objects(), shard_file(0, clock)
    if first not in found:
        return 0
    store.get(first, folder / first, found[first].size)
    shards = checkpoint_files.shards_of(folder, clock)
    names = [shard_file(shard, clock) for shard in range(1, shards)]
    if not found.keys() >= {*names}:
        return 0
    for name in names:
        store.get(name, folder / name, found[name].size)
    for shard in range(shards):
        checkpoint_files.check(folder, shard, clock)
    return shards


def _clocks(names: Iterable[str]) -> set[int]:
    return {int(match[2]) for name in names if (match := SHARD.fullmatch(name))}


def whole(store: FileStore) -> list[int]:
    """The clocks of which the store has the files of all shards, and these hold what was written.

    Each clock is fetched to a temporary folder in turn. Raises UsageError if the store fails.
    """
    clocks = list[int]()
    try:
        for clock in sorted(_clocks(store.objects())):
            with TemporaryDirectory(prefix="narrows-") as folder, suppress(IncompatibleError):
                clocks += [clock] * (_fetch_clock(store, Path(folder), clock) > 0)
    except FileStoreError as error:
        raise UsageError(f"--checkpoint-dir {error}") from None
    return clocks


def drop_after(store: FileStore, clock: int) -> None:
    """Remove the checkpoints of all shards that are later than `clock`. Raises UsageError if the store fails."""
    try:
        found = [(name, match) for name in store.objects() if (match := SHARD.fullmatch(name))]
        store.remove([name for name, match in found if int(match[2]) > clock])
    except FileStoreError as error:
        raise UsageError(f"--checkpoint-dir {error}") from None


def _move_aside(store: FileStore) -> str:
    """Move files of earlier runs to a new folder in the store. Return its address, "" without such files."""
    left = [name for name in store.objects() if checkpoint_files.of_run(name)]
    if not left:
        return ""
    taken = {*store.folders()}
    kept = next(kept for number in count(1) if (kept := f"earlier-{number}") not in taken)
    for name in left:
        store.move(name, f"{kept}/{name}")
    return f"{store.address}/{kept}"


def keep_foreign_model(store: FileStore, say: Say) -> None:
    """Give a model.safetensors that no run has written another name. Raises FileStoreError."""
    found = store.objects()
    if MODEL in found and not whole_model.ours(whole_model.metadata_of(_head(store))):
        new = next(new for number in count(1) if (new := f"{MODEL}.{number}") not in found)
        store.move(MODEL, new)
        say(f"{store.address}/{MODEL} was not written by narrows, and is kept as {store.address}/{new}")


def _head(store: FileStore) -> bytes:
    """Return the bytes of model.safetensors up to the end of its header."""
    first = store.read(MODEL, 0, 8)
    return first + store.read(MODEL, 8, 8 + whole_model.header_bytes(first)) if len(first) == 8 else first


def send_s(folder: Path) -> float:
    """Return the seconds within which a file like the largest of this folder is sent."""
    with suppress(OSError):
        return put_limit_s(max((path.stat().st_size for path in folder.iterdir()), default=0))
    return put_limit_s(0)
