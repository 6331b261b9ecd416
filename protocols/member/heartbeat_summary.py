"""The figures that a member sends with its heartbeat, for a user to see. One decision reads them,
ps/coordinator/replans.py. No I/O.

Rules
- A counter counts from the beginning of its member's life: a summary that is lost costs nothing. A gauge is the newest value.
- A cluster hands up its own summary and those of all below it, a row each, at most `ROWS_BYTES_MAX`.
- A row is checked whole before anything is made of it. Who sends one that is none is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import Any

from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages import CLOCK_MAX
from narrows.protocols.wire import pack, unpack

ROWS_BYTES_MAX = 32 << 10  # of one heartbeat: about 200 members below a cluster
LEVELS_MAX = 8  # of clusters below clusters
NAME_MAX = 255  # characters of a host, or of what a server runs
MEASURE_MAX = float(CLOCK_MAX)  # of a figure with a fraction: sums of them over all members of a run stay finite
LOSS_MAX = 1e300  # the greatest magnitude of a loss: a mean of losses stays finite
STALE = (0, 1, 2, 4, 8, 16, 64)  # upper ends of the counts of staleness; the last count has all above


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one member. Counters are since the beginning of its life, seconds are of its own clock."""

    seconds: float = 0.0  # that it has been a member
    clock: int = 0
    steps: int = 0  # counter: of its optimizer; of a cluster: updates pushed
    updates: int = 0  # counter: pushed
    samples: int = 0  # counter: of its steps, where the script or its loader has said how many
    compute_seconds: float = 0.0  # counter, as the next two: the time of all steps is their sum
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_up: int = 0  # counter: whole messages to its server, and to peers
    bytes_down: int = 0
    busy_up_seconds: float = 0.0  # counter: its payloads were on their way
    busy_down_seconds: float = 0.0
    rate_up: float = 0.0  # bytes a second while they were, 0: not measured
    rate_down: float = 0.0
    round_trip_seconds: float = 0.0
    staleness: int = 0
    stale: tuple[int, ...] = (0,) * (len(STALE) + 1)  # counters: steps by staleness
    held_back: float = 0.0  # length of the residual, in updates
    dropped: int = 0  # counter: messages that found no room
    loss: float | None = None  # as record() was given it last
    left_steps: int = (
        0  # until the script has taken as many as record() was told of; 0: it has not said, or they are over
    )
    skipped: int = 0  # counter: steps that were left out, since their gradient was not finite
    hidden: int = 0  # members below that found no room in the heartbeat
    lost: int = 0  # counter: of a cluster, members of its own that went before they were done

    def counted(self, staleness: int) -> tuple[int, ...]:
        """`stale`, with one more step of this staleness."""
        index = sum(staleness > end for end in STALE)
        return (*self.stale[:index], self.stale[index] + 1, *self.stale[index + 1 :])


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """A member in the tree below a server. `path`: its rank there, after those of the clusters that it is below of; () is whose
    heartbeat it is. `runs`: the settings of a cluster, "" of a worker."""

    path: tuple[int, ...]
    host: str
    runs: str
    summary: Summary

    def below(self, rank: int, host: str) -> SummaryRow:
        """As the server of its sender sees it, whose rank there this is."""
        return replace(self, path=(rank, *self.path), host=self.host if self.path else host[:NAME_MAX])

    def told(self) -> dict[str, Any]:
        """As a record has it."""
        return {"path": [*self.path], "host": self.host, "runs": self.runs, **asdict(self.summary)}


Rows = Callable[[], tuple[SummaryRow, ...]]
KINDS = tuple(str(f.type) for f in fields(Summary))


def packed(rows: Sequence[SummaryRow]) -> bytes:
    """For a heartbeat: at least one row. Those that find no room are counted in the first."""
    first, *others = rows
    size, kept = len(pack(_plain(first))) + 64, list[SummaryRow]()
    for row in others:
        size += len(pack(_plain(row)))
        if size > ROWS_BYTES_MAX:
            break
        kept.append(row)
    hidden = first.summary.hidden + len(others) - len(kept)
    first = replace(first, summary=replace(first.summary, hidden=hidden))
    return pack([_plain(row) for row in (first, *kept)])


def _plain(row: SummaryRow) -> list[Any]:
    return [[*row.path], row.host, row.runs, *map(_fits, astuple(row.summary), KINDS)]


def _fits(value: Any, kind: str) -> Any:
    """A figure as it is let in: a worker is not refused for a loss that is not finite."""
    if CHECKS[kind](value := list(value) if type(value) is tuple else value):
        return value
    if kind == "float | None":
        return None
    if kind == "float":
        return MEASURE_MAX if MEASURE_MAX < value < math.inf else 0.0
    return CLOCK_MAX if value > CLOCK_MAX else 0


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= CLOCK_MAX


def _is_measure(value: object) -> bool:
    return type(value) is float and 0 <= value <= MEASURE_MAX


def _is_name(value: object) -> bool:
    return type(value) is str and len(value) <= NAME_MAX and value.isprintable()


# One checker for each annotation of a Summary; it uses no other.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "int": _is_count,
    "float": _is_measure,
    "float | None": lambda v: v is None or (type(v) is float and abs(v) <= LOSS_MAX),
    "tuple[int, ...]": lambda v: type(v) is list and len(v) == len(STALE) + 1 and all(map(_is_count, v)),
}
COLUMNS: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    ("path", lambda v: type(v) is list and len(v) <= LEVELS_MAX and all(map(_is_count, v))),
    ("host", _is_name),
    ("runs", _is_name),
    *((f.name, CHECKS[str(f.type)]) for f in fields(Summary)),
)


def unpacked(packed: bytes) -> tuple[SummaryRow, ...]:
    """The rows of a heartbeat: () for b"". Raises RemoteProtocolError where they are none."""
    if not packed:
        return ()
    rows: Any = unpack(packed, ROWS_BYTES_MAX)
    if type(rows) is not list or not rows:
        raise RemoteProtocolError("a summary has no rows")
    found = tuple(map(_row, rows))
    if found[0].path or not all(row.path for row in found[1:]):
        raise RemoteProtocolError("a summary begins with its sender, and all others in it are below that")
    return found


def _row(values: Any) -> SummaryRow:
    if type(values) is not list or len(values) != len(COLUMNS):
        raise RemoteProtocolError(f"a row of a summary has {len(COLUMNS)} values")
    for (name, check), value in zip(COLUMNS, values, strict=True):
        if not check(value):
            raise RemoteProtocolError(f"a summary has {repr(value)[:60]} for {name}")
    path, host, runs, *rest = values
    figures: Any = [tuple(value) if type(value) is list else value for value in rest]
    return SummaryRow(tuple(path), host, runs, Summary(*figures))
