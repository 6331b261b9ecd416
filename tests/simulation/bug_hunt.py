"""A planted bug is looked for in runs by number, first in the one that found it when somebody last looked.

Rules
- FIRST is a hint. Where it is old, the others are searched as well, and the test only takes longer.
- `python -m pytest tests/simulation -k planted -s` with HUNT=1 prints the number that finds each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from simulation.mirror import Violation

FIRST: dict[str, int] = {
    "a checkpoint altered and not noticed": 6,
    "a cluster folds twice, in a tree": 1,
    "a cluster that says it holds before all shards do": 83,
    "a cluster whose shards do not hold": 1,
    "a cluster with a standby is taken for dead": 123,
    "a dead worker's range kept": 4,
    "a dead worker's weight kept": 1,
    "a dedupe entry dropped": 6,
    "a difference taken out of turn": 2,
    "a difference taken twice": 1,
    "a door left open": 5,
    "a fold weight scaled twice": 1,
    "a grace without end": 1,
    "a jump of a clock taken for silence": 2,
    "a late update dropped": 1,
    "a lease without end": 1,
    "a mean of others than the set": 1,
    "a place is taken again at the standby": 1,
    "a range done when its update is held": 5,
    "a shard closes over another set, in a tree": 1,
    "a standby that needs no votes": 1,
    "a state is sent too early, in a tree": 17,
    "an epoch reused by a new life of shard 0": 1,
    "an epoch unchecked": 3,
    "an event handled twice": 4,
    "an event left out": 3,
    "an update folded on both sides": 5,
    "checkpoints dropped by what is done again": 21,
    "members that were not told": 23,
    "more sent than a child takes": 2,
    "samples that count for nothing": 1,
    "shards are not told of the standby above": 1,
    "the gain applied twice after a retry": 1,
    "the windows of the gain are forgotten": 1,
    "tokens are forgotten": 11,
    "what was under way is forgotten": 1,
}


def hunt(bug: str, run: Callable[[int], object], count: int, complaint: str = "") -> None:
    """Raise the Violation, or the KeyError of a machine that a bug has broken, of the first run that complains so. Violations
    that only follow from the bug are passed over."""
    first = 0 if os.environ.get("HUNT") else FIRST.get(bug, 0)
    for number in sorted(range(count), key=lambda each: each != first):
        try:
            run(number)
        except Violation as violation:
            if re.search(complaint, str(violation)):
                _tell(bug, number)
                raise
        except KeyError:
            _tell(bug, number)
            raise


def _tell(bug: str, number: int) -> None:
    if os.environ.get("HUNT"):
        print(f"\n    {bug!r}: {number},")
