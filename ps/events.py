"""What happens to the machine of a server process, each a record: from its state before and the event the same state follows
always. So a machine whose process was killed can be made again (ps/process/journal.py). No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from narrows.protocols import messages as m


class Kind(IntEnum):
    """START: the process is there; it may have a machine that had begun. LINKED: the connection to the shard above is another
    one. BELOW: a message of a peer that dialled us. COORDINATOR, ABOVE: one of shard 0, of the shard
    above. FAILED_ABOVE (text, code): the session with it is over. TICK. WROTE (clock, kept, took_ns): a checkpoint was written,
    or could not be. STOP: Ctrl-C. UNREACHED: nobody is connected under the name of this peer, which had dialled us."""

    START = 0
    BELOW = 1
    COORDINATOR = 2
    ABOVE = 3
    FAILED_ABOVE = 4
    TICK = 5
    WROTE = 6
    STOP = 7
    LINKED = 8
    UNREACHED = 9


@dataclass(frozen=True, slots=True)
class Event:
    """`values`: as its kind says."""

    kind: Kind
    now_ns: int
    peer: bytes = b""
    message: m.Message | None = None
    values: tuple[Any, ...] = ()
