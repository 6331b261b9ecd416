"""NaN of one member costs a run its own share, in every mode and without a flag; its worker is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import pytest
from kit.liars import LIAR, NOISY, ended

from narrows.compression import PayloadError, codecs
from narrows.compression.codecs import VOID, Piece, raw_pieces
from narrows.protocols.effects import Log
from narrows.protocols.settings import Settings
from narrows.ps.looks import Look, Looks
from narrows.ps.screen import Check, Screen

WORKERS, STEPS = 4, 8
MODES: list[dict[str, Any]] = [
    {"sync": "bsp", "shards": 2},
    {"sync": "bsp", "push": "update"},
    {"sync": "ssp"},
    {"sync": "ssp", "push": "gradient", "compress_down": "int8"},
    {"sync": "async"},
    {"sync": "local", "local_steps": 2},
    {"sync": "local", "local_steps": 2, "quorum": 3, "grace": 5.0},
    {"sync": "local", "local_steps": 2, "fragments": 2},
    {"sync": "local", "local_steps": 2, "staleness": 1},
]


@pytest.mark.parametrize("flags", MODES, ids=str)
def test_it_costs_its_own_share(flags: dict[str, Any]) -> None:
    settings = Settings(workers=WORKERS, **flags)
    x, struck = ended(settings, NOISY, float("nan"), STEPS)
    assert np.isfinite(x).all() and NOISY.loss(x) < NOISY.begun
    assert set(struck) == {LIAR}


def test_it_is_named_once_and_counts_for_nothing() -> None:
    good, long = np.ones(10, np.float32), np.full(10, 1e30, np.float32)
    parts = [raw_pieces(good, 0, [(0, 5), (5, 10)]), [Piece(VOID, 0, 5, b""), *raw_pieces(good[5:], 5, [(5, 10)])]]
    cases: list[tuple[bool, list[Check]]] = [(False, []), (True, [Everything()])]
    for look, checks in cases:
        screen = Screen(0, Looks(0, 10), checks)
        found = [screen.factors([(w, clock, parts[w]) for w in range(2)]) for clock in range(3)]
        assert found == [[1.0, 0.0]] * 3 and screen.out == {1} and screen.void == {1: 3}
        (told,) = screen.take()
        assert "update 0 of worker 1 is not finite" in str(told.values["text"]) and not screen.take()
        assert screen.factors([(1, 3, parts[0])]) == [1.0] and not screen.out
        assert screen.factors([(1, 4, raw_pieces(long, 0, [(0, 10)]))]) == [0.0 if look else 1.0]


class Everything:
    """A check that lets pass what it sees."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.struck: Counter[int] = Counter()

    def factors(self, looks: Sequence[Look]) -> list[float]:
        return [1.0] * len(looks)

    def members(self, live: Container[int]) -> None:
        """It knows nobody."""


def test_what_counts_for_nothing_has_no_values() -> None:
    out = np.ones(4, np.float32)
    codecs.add(Piece(VOID, 0, 4, b""), 2.0, out, 0)
    assert (out == 1).all()
    codecs.put(Piece(VOID, 0, 4, b""), 2.0, out, 0)
    assert not out.any()
    with pytest.raises(PayloadError, match="nothing travels as nothing"):
        codecs.check(Piece(VOID, 0, 4, b""))
