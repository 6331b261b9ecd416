"""Writes a server's machine as bytes, without code, and reads it back: for the journal, and for a standby.

How it works
The machine is one graph of objects that refer to each other. pickle writes such a graph; this module restricts pickle
to a table of what a machine may contain.
- Classes: those of the packages in `OURS`, which do no I/O (tests/test_layout.py), and those in `STANDARD`.
- Functions: those in `FUNCTIONS`, by name. A value coding, whose kernels are compiled functions, is found by its SPEC.
- Arrays: dtype, shape and bytes. So none of NumPy's own reconstructors is admitted. The journal writes the offset of an
  array in its segment in the place of the bytes, and where a payload of its events is.
- What belongs to the runner is not written, but a call in its place: the machine gets the allocator of its arrays, and `lent`,
  from the process that reads it.
- Bound methods: the object and the name of the method, if the class of the object is admitted.
- Nothing else can be written. Writer and reader use the same table: what was written can be read.

So the sender of a machine decides the values of its objects, and nothing else: no module outside the table is imported,
and nothing outside the table is called. `Store.check` finds values that contradict the arrays and sizes.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from narrows.compression.replica import HostReplica
from narrows.compression.value_codings import Sectioned, by_spec
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.journal.array_segment import ArraySegment
from narrows.ps.journal.event_file import EventFile
from narrows.ps.server.server import Server
from narrows.ps.store.store import HEAP, ArrayAllocator, HeapArrays

ALIASED = type(HostReplica)  # Python keeps the type arguments in each instance of a generic class; no code reads them
OURS: tuple[str, ...] = ("narrows.protocols.", "narrows.compression.", "narrows.ps.")
IMPURE = (
    "narrows.protocols.runtime.",
    "narrows.compression.cuda.",
    "narrows.compression.device.",
    "narrows.compression.kernels.",
    "narrows.ps.command.",
    "narrows.ps.dashboard.",
    "narrows.ps.journal.",
    "narrows.ps.process.",
)
STANDARD = {
    ("builtins", name) for name in ("bytearray", "bytes", "complex", "frozenset", "range", "set", "slice", "str")
} | {("collections", name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")}
STANDARD |= {("functools", "partial")}  # its function has to be admitted too
FUNCTIONS = {
    (__name__, "_alias"),
    (__name__, "_array"),
    (__name__, "_arrays"),
    (__name__, "_bound"),
    (__name__, "_lent"),
    (__name__, "_logged"),
    (__name__, "_placed"),
    (__name__, "_value"),
    ("narrows.compression.predict", "clock_s"),
    ("narrows.compression.predict", "cluster_clock_s"),
    ("narrows.compression.predict", "whole_clock_s"),
    ("narrows.compression.value_codings", "by_spec"),
    ("narrows.protocols.config.key_ranges", "parts"),
    ("narrows.ps.store.store", "assume_lent"),
}
KINDS = "biuf"  # NumPy kinds that an array may have: bool, int, unsigned, float


def _is_ours(module: str) -> bool:
    return f"{module}.".startswith(OURS) and not f"{module}.".startswith(IMPURE)


@cache
def _admitted(module: str, name: str) -> Any:
    """Return the class or function of this name. Raises pickle.PicklingError if the table has none."""
    named = (module, name)
    if named in STANDARD or named in FUNCTIONS:
        return getattr(import_module(module), name)
    loaded = sys.modules.get(module) if _is_ours(module) else None
    if loaded is None and _is_ours(module):
        loaded = import_module(module)  # a module of Narrows without I/O
    found: Any = loaded
    for part in name.split(".") if found is not None else ():
        found = vars(found).get(part) if isinstance(found, type) or found is loaded else None
    if isinstance(found, type) and (found.__module__, found.__qualname__) == named:
        return found
    raise pickle.PicklingError(f"{module}.{name} is no part of a machine")


def _array(kind: str, shape: tuple[int, ...], values: Any) -> npt.NDArray[Any]:
    """Make an array over `values`, bytes or a bytearray."""
    dtype = np.dtype(kind)
    if dtype.kind not in KINDS:
        raise pickle.UnpicklingError(f"an array of a machine cannot have dtype {kind}")
    return np.frombuffer(values, dtype).reshape(shape)


def _housed(arrays: ArrayAllocator, kind: str, shape: tuple[int, ...], values: Any) -> npt.NDArray[Any]:
    """As `_array`, and a flat float32 array that can be changed comes from the allocator."""
    found = _array(kind, shape, values)
    if found.dtype != np.float32 or found.ndim != 1 or isinstance(values, bytes):
        return found
    made = arrays.empty(found.size)
    np.copyto(made, found)
    del found
    values.clear()  # else the unpickler keeps the bytes of all arrays until the last one is read
    return made


def _placed(offset: int, count: int) -> npt.NDArray[Any]:
    """Stands for `ArraySegment.at`: the reader puts that in its place."""
    raise pickle.UnpicklingError("only a journal has arrays by their place")


def _logged(pool: int, offset: int, length: int) -> memoryview:
    """Stands for `EventFile.view`, as `_placed` for `ArraySegment.at`."""
    raise pickle.UnpicklingError("only a journal has payloads by their place")


def _lent() -> Callable[[], bool]:
    """Stands for `lent`, the one function of a machine that belongs to its runner: the reader puts its own in its place."""
    raise pickle.UnpicklingError("only a runner lends")


def _arrays() -> ArrayAllocator:
    """Stands for the allocator of the machine's arrays, as `_lent` for `lent`."""
    raise pickle.UnpicklingError("only a runner has arrays")


def _alias() -> None:
    """Stands for the type arguments in an instance."""


def _value(kind: str, values: bytes) -> np.generic:
    found: Any = _array(kind, (), values)[()]
    return cast(np.generic, found)


def _bound(owner: Any, name: str) -> Any:
    """Return the method `name` of an object whose class is one of Narrows."""
    found = getattr(type(owner), name, None)
    if not _is_ours(type(owner).__module__) or name.startswith("__") or not isinstance(found, FunctionType):
        raise pickle.UnpicklingError(f"{name} is no method of a part of a machine")
    return MethodType(found, owner)


class _Pickler(pickle.Pickler):
    def __init__(
        self, file: Any, lent: Callable[[], bool], segment: ArraySegment | None, events: EventFile | None = None
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.lent, self.segment, self.events = lent, segment, events

    def reducer_override(self, found: Any) -> Any:
        """Write what pickle alone would write with code of NumPy, or not at all.

        pickle calls this for each object but those of its own types, such as int, str, bytes, list and dict. A memoryview,
        as of a payload, and a subclass of bytes, as a routing id with its key, become plain bytes.
        """
        if isinstance(found, np.ndarray):
            if found.dtype.kind not in KINDS:
                raise pickle.PicklingError(f"an array of a machine cannot have dtype {found.dtype}")
            if self.segment is not None and (offset := self.segment.place(found)) >= 0:
                return _placed, (offset, found.size)
            values: Any = np.ascontiguousarray(found)  # gives a 0-d array an axis; `shape` below is the original
            return _array, (found.dtype.str, found.shape, pickle.PickleBuffer(values))
        if isinstance(found, np.generic):
            return _value, (found.dtype.str, found.tobytes())
        if (
            isinstance(found, memoryview)
            and self.events is not None
            and (place := self.events.place(found)) is not None
        ):
            return _logged, (*place, found.nbytes)
        if isinstance(found, memoryview) or (isinstance(found, bytes) and type(found) is not bytes):
            return bytes, (bytes(found),)
        if isinstance(found, Sectioned):
            return by_spec, (found.spec,)
        if isinstance(found, (MethodType, FunctionType)) and found == self.lent:
            return _lent, ()
        if isinstance(found, (HeapArrays, ArraySegment)):
            return _arrays, ()
        if type(found) is ALIASED:
            return _alias, ()
        if isinstance(found, MethodType):
            _bound(found.__self__, found.__name__)
            return _bound, (found.__self__, found.__name__)
        if isinstance(found, (type, FunctionType)):
            _admitted(found.__module__, found.__qualname__)
        elif not isinstance(found, Enum):
            _admitted(type(found).__module__, type(found).__qualname__)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: Any,
        lent: Callable[[], bool],
        arrays: ArrayAllocator,
        back: bool | None,
        events: EventFile | None = None,
    ) -> None:
        super().__init__(file)
        self.own: dict[tuple[str, str], Any] = {
            (__name__, "_array"): partial(_housed, arrays),
            (__name__, "_arrays"): lambda: arrays,
            (__name__, "_lent"): lambda: lent,
        }
        if isinstance(arrays, ArraySegment) and back is not None:
            self.own[__name__, "_placed"] = partial(arrays.at, back=back)
        if events is not None:
            self.own[__name__, "_logged"] = events.view

    def find_class(self, module: str, name: str) -> Any:
        return self.own.get((module, name)) or _admitted(module, name)


def freeze(
    server: Server,
    file: Any,
    lent: Callable[[], bool],
    segment: ArraySegment | None = None,
    events: EventFile | None = None,
) -> None:
    """Write a machine. Call it between two events.

    Args:
        server: the machine.
        file: a binary file; the bytes are appended to it.
        lent: the function that the runner gave its machine; it is not written.
        segment: of arrays that are not written; None: all are.
        events: of payloads that are not written; None: all are.

    Raises:
        pickle.PicklingError: an object of the machine has a class that the table does not admit.
    """
    _Pickler(file, lent, segment, events).dump(server)


def frozen(server: Server, lent: Callable[[], bool]) -> bytes:
    """Return a machine as bytes, as `freeze` writes them."""
    file = io.BytesIO()
    freeze(server, file, lent)
    return file.getvalue()


def thaw(
    file: Any,
    lent: Callable[[], bool],
    arrays: ArrayAllocator = HEAP,
    back: bool | None = None,
    events: EventFile | None = None,
) -> Server:
    """Read a machine that `freeze` wrote.

    Args:
        file: a binary file, at the first byte of the machine.
        lent: the function that the reader's runner gives the machine.
        arrays: the allocator of the reader's runner. Of a journal, the segment that it was written with.
        back: of a journal: True if arrays of the segment come from its copy. None: the bytes name no places in it.
        events: of a journal, its events. None: the bytes name no places in them.

    Raises:
        RemoteProtocolError: the bytes are no machine, or name something that the table does not admit.
    """
    try:
        server = _Unpickler(file, lent, arrays, back, events).load()
        if not isinstance(server, Server):
            raise TypeError(f"a {type(server).__name__}")
        if (planned := server.shard.model_shard) is not None:
            planned.store.check()
    except Exception as error:  # pickle and our constructors may raise anything on arbitrary bytes
        raise RemoteProtocolError(f"the bytes that should be a server's machine are none: {error}") from None
    return server
