"""The figures that a member sends with its heartbeat, for the user. One decision reads them: ps/coordinator/replans.py.

No I/O.

Rules
- A counter counts from the start of its member's process, so a lost summary costs nothing. A gauge is the newest value.
- A cluster sends its parent its own summary and those of all members below it, a row each, at most `ROWS_BYTES_MAX`.
- A receiver checks all rows of a heartbeat before it uses any. A sender of a row that is not valid is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from typing import Any

from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.messages import CLOCK_MAX
from narrows.protocols.wire import pack, unpack

ROWS_BYTES_MAX = 32 << 10  # of the rows of one heartbeat: enough for about 200 members below a cluster
LEVELS_MAX = 8  # of clusters below clusters
NAME_MAX = 255  # characters of a host, or of a summary of settings
MEASURE_MAX = float(CLOCK_MAX)  # of a float figure: the sum over all members of a run stays finite
LOSS_MAX = 1e300  # the greatest magnitude of a loss: a mean of losses stays finite
# How large messages go between a member and a shard; "": not known.
UNKNOWN, TCP, UNIX_SOCKET, SHARED_MEMORY, MAILBOX = WAYS = ("", "TCP", "Unix socket", "shared memory", "mailbox")
STALE = (0, 1, 2, 4, 8, 16, 64)  # upper ends of the staleness buckets, in clocks; one more bucket has all beyond 64


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one member. Counters run from the start of its process; seconds are of its own system clock."""

    seconds: float = 0.0  # since the first summary of this member
    clock: int = 0
    steps: int = 0  # counter: steps of the worker's optimizer; of a cluster: updates pushed
    updates: int = 0  # counter: updates pushed
    samples: int = 0  # counter: samples of all steps, if the script or its data loader says how many; else 0
    compute_seconds: float = 0.0  # counter, as the next two; the time of all steps is the sum of the three
    encode_seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes_up: int = 0  # counter: whole messages sent to the server, and to peers
    bytes_down: int = 0  # counter: whole messages received
    busy_up_seconds: float = 0.0  # counter: time in which payloads were on their way up
    busy_down_seconds: float = 0.0
    rate_up: float = 0.0  # bytes a second in such time; 0: not measured
    rate_down: float = 0.0
    round_trip_seconds: float = 0.0
    staleness: int = 0  # in clocks, of the newest step
    stale: tuple[int, ...] = (0,) * (len(STALE) + 1)  # counters: steps in each bucket of STALE
    held_back: float = 0.0  # length of the residual, in updates
    dropped: int = 0  # counter: messages dropped for lack of room in a queue
    loss: float | None = None  # the newest loss that the script gave record()
    left_steps: int = 0  # steps still to take of those that record() announced; 0: not announced, or all taken
    skipped: int = 0  # counter: steps left out because their gradient was not finite
    hidden: int = 0  # members below this one whose rows had no room in the heartbeat
    lost: int = 0  # counter: of a cluster, its own members that left before they were done
    launches: int = 0  # counter: kernels launched on the worker's GPU, those of replayed graphs too; 0 without one
    replays: int = 0  # counter: CUDA graphs replayed there
    graphs: int = 0  # CUDA graphs that the worker keeps
    scratch_bytes: int = 0  # scratch memory of kernels on the GPU
    # Of the member's host; of a cluster: what its server leaves of it for what its parent's mode needs. 0: not known.
    memory_bytes: int = 0
    way: int = 0  # index in WAYS, of the slowest of the member's links to shards
    relayed: int = 0  # 1: peers reach the member through a relay (gossip)
    relay_bytes: int = 0  # counter: bytes of these peers, both ways, as the relay counts them
    # Of the worker's teachers (distillation); 0 without any.
    teacher_bytes_up: int = 0  # counter: whole messages sent to them
    teacher_bytes_down: int = 0  # counter: whole messages received from them
    teacher_missed: int = 0  # counter: batches without soft targets
    teacher_seconds: float = 0.0  # counter: of `wait_seconds`, those for answers of a teacher

    def counted(self, staleness: int) -> tuple[int, ...]:
        """Return `stale` with one more step of this staleness."""
        index = sum(staleness > end for end in STALE)
        return (*self.stale[:index], self.stale[index] + 1, *self.stale[index + 1 :])


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One member of the tree below a server, with its figures."""

    path: tuple[int, ...]  # ranks of the clusters from the sender down, then the member's own; (): the sender itself
    host: str
    runs: str  # the settings of a cluster as flags; "" for a worker
    summary: Summary

    def below(self, rank: int, host: str) -> SummaryRow:
        """Return the row as the sender's server sees it.

        Args:
            rank: of the sender at that server.
            host: of the sender.
        """
        return replace(self, path=(rank, *self.path), host=self.host if self.path else host[:NAME_MAX])

    def told(self) -> dict[str, Any]:
        """Return the row as a value of a record."""
        return {"path": [*self.path], "host": self.host, "runs": self.runs, **asdict(self.summary)}


Rows = Callable[[], tuple[SummaryRow, ...]]
KINDS = tuple(str(f.type) for f in fields(Summary))
_values = attrgetter(*(f.name for f in fields(Summary)))


def packed(rows: Sequence[SummaryRow]) -> bytes:
    """Pack rows for a heartbeat; `rows[0]` is the sender's. `hidden` of that row counts the rows that have no room."""
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
    return [[*row.path], row.host, row.runs, *map(_fits, _values(row.summary), KINDS)]


def _fits(value: Any, kind: str) -> Any:
    """Return a figure that passes its check, so that no server refuses a worker for a loss that is not finite."""
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


# One check for each annotation of a field of Summary.
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
    """Return the rows of a heartbeat; () for b"".

    Raises:
        RemoteProtocolError: a row is not valid, or the first row is not the only one with an empty path.
    """
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
