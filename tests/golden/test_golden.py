"""The quick parts of the golden record: the wire, payloads, trained models and machines are what they were when it was made."""

from __future__ import annotations

import pytest

from golden.record import PARTS, differences, recorded, why_not

pytestmark = pytest.mark.usefixtures("one_thread")

# Of a part that takes long, the entries that the suite compares: those whose names end so.
QUICK = {
    "bsp": ("AdamW at the server, 3 shards", "SGD at the worker, 1 shards", "sign, 3 shards"),
    "checkpoint": ("in process",),
    "campaigns": (
        *("runs 7", "restarts 5", "kills 3", "trees 10", "felled 10", "gossips 3", "standbys 3", "pairs 3", "moves 3"),
    ),
}


def test_the_record_has_every_part() -> None:
    assert recorded()["parts"].keys() == PARTS.keys()


@pytest.mark.parametrize("part", [name for name, part in PARTS.items() if not part.slow])
def test_nothing_has_changed(part: str) -> None:
    """Where a change is meant, `python tests/golden/record.py --write PART` records it; its commit says why."""
    if why := why_not(part):
        pytest.skip(why)
    ends = QUICK.get(part, ("",))
    assert list(differences(part, lambda name: name.endswith(ends))) == []
