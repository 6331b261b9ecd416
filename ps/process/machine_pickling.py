"""A server's machine as bytes, and back, without code: the journal writes them, and a standby gets them over the network.

How it works
The machine is one graph of objects that refer to each other. pickle writes such a graph; this module narrows pickle to it.
- Classes: those of the packages in `OURS`, which do no I/O (tests/test_layout.py), and those in `STANDARD`.
- Functions: those in `FUNCTIONS`, by name. A value coding, whose kernels are compiled functions, is found by its SPEC.
- Arrays: dtype, shape and bytes. So none of NumPy's own reconstructors is admitted.
- Bound methods: object and name of the method, of an object whose class is admitted.
- Anything else cannot be written. The same table is asked on both sides: what was written can be read.

So whoever sends a machine decides which values its objects have, and nothing else: no module is imported, and nothing outside
this table is called. Values that its arrays and sizes contradict are found by `Store.check`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from enum import Enum
from functools import cache
from importlib import import_module
from types import FunctionType, MethodType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from narrows.compression.replica import HostReplica
from narrows.compression.value_codings import Sectioned, by_spec
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.server.server import Server

LENT = "lent"  # in the place of the one function that is the runner's
ALIAS, ALIASED = "alias", type(HostReplica)  # the type arguments that Python notes in an instance; nobody asks for them
OURS: tuple[str, ...] = ("narrows.protocols.", "narrows.compression.", "narrows.ps.")
IMPURE = (
    "narrows.protocols.runtime.",
    "narrows.compression.cuda.",
    "narrows.compression.device.",
    "narrows.compression.kernels.",
    "narrows.ps.command.",
    "narrows.ps.dashboard.",
    "narrows.ps.process.",
)
STANDARD = {
    ("builtins", name) for name in ("bytearray", "bytes", "complex", "frozenset", "range", "set", "slice", "str")
} | {("collections", name) for name in ("Counter", "OrderedDict", "defaultdict", "deque")}
STANDARD |= {("functools", "partial")}  # of what is admitted itself
FUNCTIONS = {
    (__name__, "_array"),
    (__name__, "_bound"),
    (__name__, "_value"),
    ("narrows.compression.predict", "clock_s"),
    ("narrows.compression.predict", "cluster_clock_s"),
    ("narrows.compression.predict", "whole_clock_s"),
    ("narrows.compression.value_codings", "by_spec"),
    ("narrows.protocols.config.key_ranges", "parts"),
    ("narrows.ps.store.store", "assume_lent"),
}
KINDS = "biuf"  # of numbers that an array may have: bool, int, unsigned, float


def _is_ours(module: str) -> bool:
    return f"{module}.".startswith(OURS) and not f"{module}.".startswith(IMPURE)


@cache
def _admitted(module: str, name: str) -> Any:
    """Returns the class or function of this name. Raises pickle.PicklingError where the table has none."""
    named = (module, name)
    if named in STANDARD or named in FUNCTIONS:
        return getattr(import_module(module), name)
    loaded = sys.modules.get(module) if _is_ours(module) else None
    if loaded is None and _is_ours(module):
        loaded = import_module(module)  # a module of ours without I/O
    found: Any = loaded
    for part in name.split(".") if found is not None else ():
        found = vars(found).get(part) if isinstance(found, type) or found is loaded else None
    if isinstance(found, type) and (found.__module__, found.__qualname__) == named:
        return found
    raise pickle.PicklingError(f"{module}.{name} is no part of a machine")


def _array(kind: str, shape: tuple[int, ...], values: Any) -> npt.NDArray[Any]:
    """An array of numbers over `values`, bytes or a bytearray."""
    dtype = np.dtype(kind)
    if dtype.kind not in KINDS:
        raise pickle.UnpicklingError(f"an array of a machine cannot have dtype {kind}")
    return np.frombuffer(values, dtype).reshape(shape)


def _value(kind: str, values: bytes) -> np.generic:
    found: Any = _array(kind, (), values)[()]
    return cast(np.generic, found)


def _bound(owner: Any, name: str) -> Any:
    """The method `name` of an object of ours."""
    found = getattr(type(owner), name, None)
    if not _is_ours(type(owner).__module__) or name.startswith("__") or not isinstance(found, FunctionType):
        raise pickle.UnpicklingError(f"{name} is no method of a part of a machine")
    return MethodType(found, owner)


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, lent: Callable[[], bool]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.lent = lent

    def persistent_id(self, found: Any) -> str | None:
        if type(found) is ALIASED:
            return ALIAS
        return LENT if callable(found) and found == self.lent else None

    def reducer_override(self, found: Any) -> Any:
        """A payload is a view of a message. A peer may be known by more than its bytes."""
        if isinstance(found, np.ndarray):
            if found.dtype.kind not in KINDS:
                raise pickle.PicklingError(f"an array of a machine cannot have dtype {found.dtype}")
            values: Any = np.ascontiguousarray(found)  # one of no axis gets one
            return _array, (found.dtype.str, found.shape, pickle.PickleBuffer(values))
        if isinstance(found, np.generic):
            return _value, (found.dtype.str, found.tobytes())
        if isinstance(found, memoryview) or (isinstance(found, bytes) and type(found) is not bytes):
            return bytes, (bytes(found),)
        if isinstance(found, Sectioned):
            return by_spec, (found.spec,)
        if isinstance(found, MethodType):
            _bound(found.__self__, found.__name__)
            return _bound, (found.__self__, found.__name__)
        if isinstance(found, (type, FunctionType)):
            _admitted(found.__module__, found.__qualname__)
        elif not isinstance(found, Enum):
            _admitted(type(found).__module__, type(found).__qualname__)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, lent: Callable[[], bool]) -> None:
        super().__init__(file)
        self.lent = lent

    def persistent_load(self, name: Any) -> Any:
        if name not in (LENT, ALIAS):
            raise pickle.UnpicklingError(f"{name!r} is nothing that a runner lends")
        return self.lent if name == LENT else None

    def find_class(self, module: str, name: str) -> Any:
        return _admitted(module, name)


def freeze(server: Server, file: Any, lent: Callable[[], bool]) -> None:
    """Write a machine between two events.

    Args:
        server: the machine.
        file: a binary file, which the bytes are appended to.
        lent: the function that the machine's runner gave it; it is not written.

    Raises:
        pickle.PicklingError: an object of the machine has a class that the table does not admit.
    """
    _Pickler(file, lent).dump(server)


def frozen(server: Server, lent: Callable[[], bool]) -> bytes:
    """A machine as bytes."""
    file = io.BytesIO()
    freeze(server, file, lent)
    return file.getvalue()


def thaw(file: Any, lent: Callable[[], bool]) -> Server:
    """Read a machine that `freeze` wrote.

    Raises:
        RemoteProtocolError: the bytes are no machine, or name something that the table does not admit.
    """
    try:
        server = _Unpickler(file, lent).load()
        if not isinstance(server, Server):
            raise TypeError(f"a {type(server).__name__}")
        if (planned := server.shard.planned) is not None:
            planned.store.check()
    except Exception as error:  # whatever pickle and the constructors of ours say to bytes of any kind
        raise RemoteProtocolError(f"the bytes that should be a server's machine are none: {error}") from None
    return server
