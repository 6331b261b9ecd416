"""The cost of encryption: it is measured, and said where a run waits for it."""

from __future__ import annotations

from narrows.protocols.runtime.network import encryption_cost
from narrows.protocols.runtime.network.encryption_cost import NEAR, WINDOW_S, EncryptionCost


def test_a_core_seals_so_many_bytes_a_second() -> None:
    assert 10e6 < encryption_cost.rate() < 100e9


def test_it_is_said_once_where_it_takes_most_of_a_core() -> None:
    now = 0.0
    own = EncryptionCost(100e6, lambda: now)
    said = []
    for passed in (100e6 * NEAR * WINDOW_S - 1, 80e6 * WINDOW_S, 100e6 * WINDOW_S):
        own.passed += int(passed)
        now += WINDOW_S / 2
        assert not own.look()  # in the midst of a window
        now += WINDOW_S / 2
        said.append(own.look())
    assert said[0] == said[2] == "" and said[1].startswith(
        "encryption takes 80% of a core, and a core seals 100 MB/s here"
    )


def test_nothing_is_said_where_nothing_is_sealed() -> None:
    now = 0.0
    own = EncryptionCost(0.0, lambda: now)
    own.passed, now = 1 << 40, WINDOW_S
    assert not own.look()
