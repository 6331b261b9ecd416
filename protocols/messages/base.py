"""Message, the base class of all messages; the types that a field may have; and the checks of these types.

How it works
1. A message class is a frozen dataclass. The annotation of each field is a string such as "int" or "Pairs".
2. `CHECKS` has one check for each annotation. A string has at most TEXT_MAX characters, a list at most LIST_MAX items.
3. A sender makes a message. `Message.__post_init__` runs the checks of all its fields. A field that is wrong raises
   RemoteProtocolError.
4. A receiver decodes the frames (protocols/wire.py) and makes the same class of them. The same checks run again. So no
   machine ever sees a field of another type, whatever a peer sends.

A machine checks the meaning of a field itself: a known worker, a possible clock, keys inside its range.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from enum import IntEnum
from functools import cache
from operator import attrgetter
from typing import Any

from narrows.protocols.errors import RemoteProtocolError

Buffer = bytes | bytearray | memoryview

TEXT_MAX = 4096  # characters of one string: no message of Narrows has a longer one
LIST_MAX = 1 << 20  # items of one list: no run has a million tensors or members
CLOCK_MAX = 1 << 53  # float64 holds all integers up to this: exact in every language that reads a record
INT_MAX = (1 << 63) - 1

Pair = tuple[int, int]
Pairs = tuple[Pair, ...]
Triples = tuple[tuple[int, int, int], ...]
Quads = tuple[tuple[int, int, int, int], ...]
Weights = tuple[tuple[int, float], ...]
Ints = tuple[int, ...]
Sets = tuple[Ints, ...]
Name = str  # one line of printable characters, safe to show as it is
Texts = tuple[str, ...]


class RefuseCode(IntEnum):
    """Why a server refuses. The value is the exit code of the command, if there is one for it (docs/exit-codes.md)."""

    UNREACHABLE = 3
    AUTHENTICATION = 4
    INCOMPATIBLE = 5
    SERVER_LOST = 6
    NOT_A_MEMBER = 64  # the member's lease has expired, or the server has restarted: join again
    OVER = 65  # the run has ended
    TAKEN = 66  # the server has another standby; ask again, that one may be lost soon


class PushStatus(IntEnum):
    """What a PushAck promises."""

    HELD = 1  # the shard has all parts of the update: the child need not repeat them
    FOLDED = 2  # the update is in the shard's model, for good


INTS = frozenset({int, RefuseCode, PushStatus})  # types that count as a whole number; bool does not
PLAIN = {"float": float, "bool": bool, "bytes": bytes}  # annotations whose check is the type alone


def _is_int(value: object) -> bool:
    return isinstance(value, int) and -1 <= value <= INT_MAX and type(value) is not bool


def _is_rows(value: object, width: int, last: type) -> bool:
    if type(value) is not tuple or len(value) > LIST_MAX:
        return False
    if not value:
        return True
    if {*map(type, value)} != {tuple} or {*map(len, value)} != {width}:
        return False
    # Check by column, for speed: a ledger names every member, and is made each time that a member joins.
    *columns, final = zip(*value, strict=True)
    if last is float:
        return {*map(type, final)} == {float} and all(map(_are_ints, columns))
    return all(map(_are_ints, (*columns, final)))


def _are_ints(values: tuple[Any, ...]) -> bool:
    return INTS.issuperset(map(type, values)) and min(values, default=0) >= -1 and max(values, default=0) <= INT_MAX


def _is_ints(value: object) -> bool:
    return type(value) is tuple and len(value) <= LIST_MAX and _are_ints(value)


# One check for each annotation that a field of a message may have.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": lambda v: type(v) is float,
    "bool": lambda v: type(v) is bool,
    "str": lambda v: type(v) is str and len(v) <= TEXT_MAX,
    "Name": lambda v: type(v) is str and len(v) <= TEXT_MAX and v.isprintable(),
    "bytes": lambda v: type(v) is bytes,
    "Buffer": lambda v: isinstance(v, (bytes, bytearray, memoryview)),
    "Ints": _is_ints,
    "Pairs": lambda v: _is_rows(v, 2, int),
    "Triples": lambda v: _is_rows(v, 3, int),
    "Quads": lambda v: _is_rows(v, 4, int),
    "Weights": lambda v: _is_rows(v, 2, float),
    "Sets": lambda v: type(v) is tuple and len(v) <= LIST_MAX and all(map(_is_ints, v)),
    "Texts": lambda v: type(v) is tuple and len(v) <= LIST_MAX and all(map(CHECKS["Name"], v)),
}

Checks = list[tuple[str, Callable[[Any], bool], str]]  # field, check, annotation


class Message:
    """Base of all messages. Checks its fields by their annotations when made; raises RemoteProtocolError."""

    __slots__ = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        plain, count, types, rest, whole = _checks(kind)
        found = plain(self)  # the plain fields, the whole numbers first: checked together, for speed
        numbers = found[:count]
        right = INTS.issuperset(map(type, numbers)) and tuple(map(type, found[count:])) == types
        right = right and min(numbers, default=0) >= -1 and max(numbers, default=0) <= INT_MAX
        for name, check, annotation in rest if right else whole:
            if not check(getattr(self, name)):
                raise RemoteProtocolError(
                    f"{type(self).__name__}.{name} is {_short(getattr(self, name))}, not {annotation}"
                )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@cache
def _checks(kind: Any) -> tuple[Callable[[Any], tuple[Any, ...]], int, tuple[type, ...], Checks, Checks]:
    """Return the checks of one message class, prepared.

    Returns:
        A reader of the plain fields; the number of whole numbers among them; the types of the other plain fields; the
        checks of the fields that are not plain; the checks of all fields.
    """
    whole = [(f.name, CHECKS[str(f.type)], str(f.type)) for f in fields(kind)]
    numbers = [name for name, _, annotation in whole if annotation == "int"]
    others = {name: PLAIN[annotation] for name, _, annotation in whole if annotation in PLAIN}
    if len(numbers) + len(others) < 2:
        return (lambda message: ()), 0, (), whole, whole
    rest = [row for row in whole if row[0] not in {*numbers, *others}]
    return attrgetter(*numbers, *others), len(numbers), tuple(others.values()), rest, whole
