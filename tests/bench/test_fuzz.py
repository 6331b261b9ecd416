"""The fuzzing targets: each accepts its seeds, survives mutations of them, and finds a bug that is planted."""

from __future__ import annotations

import numpy as np
import pytest
from faults import fuzz

from narrows.compression import PayloadError, codecs

MUTATIONS = 3000


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_a_target_survives(name: str) -> None:
    accepted = fuzz.by_mutation(fuzz.TARGETS[name], MUTATIONS, seed=1)
    assert 0 < accepted < MUTATIONS, "mutations reach both the refusals and what lies behind them"


def test_a_decoder_that_does_not_look_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(piece: codecs.PieceLike, *, finite: bool = False) -> None:
        if len(piece.payload) < 8:
            raise PayloadError("too short")

    monkeypatch.setattr(codecs, "check", unchecked)
    monkeypatch.setattr(codecs, "put", lambda piece, weight, out, origin: np.frombuffer(piece.payload[8:], np.float32))
    with pytest.raises(ValueError, match="buffer"):
        fuzz.by_mutation(fuzz.TARGETS["payload"], MUTATIONS)
