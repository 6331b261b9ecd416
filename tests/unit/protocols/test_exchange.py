"""A member takes a state from its shard and computes on it: the gain of a mean of updates, as states say it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from narrows.compression import ErrorFeedback, parse
from narrows.compression.buffers import FloatArray
from narrows.compression.codecs import RAW
from narrows.compression.replica import HostReplica
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import parts
from narrows.protocols.config.modes import GAIN_MAX
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import StateArrived
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.member.exchange import Exchange

KEYS = 1024
MODE = Settings(sync="ssp", staleness=2).validated().mode()
FIRST = np.arange(KEYS, dtype=np.float32)
UPDATE = np.where(np.arange(KEYS) % 8 == 7, 500 + FIRST, 1 + FIRST / KEYS).astype(np.float32)
GOOD = m.State(0, 1, 0, 0, 1, 0, KEYS, True, False, 0, 0, 0, (), 0, RAW, FIRST.tobytes())
NAN, INF = float("nan"), float("inf")


def exchange_of() -> Exchange[FloatArray]:
    """With a state, and an update in flight of which the eighth that is large was sent; the rest is the residual."""
    feedback = ErrorFeedback(parse("topk:0.125"), KEYS)
    made = Exchange(MODE, HostReplica(0, KEYS, [((0, KEYS), feedback)], parts), whole=False)
    made.begin(0, 1, 0)
    made.take(StateArrived(0, (GOOD,)))
    made.push(made.replica.encode(UPDATE.copy(), 0), 1)
    return made


def base(exchange: Exchange[FloatArray]) -> FloatArray:
    out = np.empty(KEYS, np.float32)
    exchange.base(0, KEYS, out)
    return out


def held(exchange: Exchange[FloatArray]) -> tuple[Any, ...]:
    """All that a state may change."""
    said = (exchange.gain, exchange.ahead, exchange.agreement, exchange.asked)
    where = (exchange.publication, exchange.min_clock, exchange.settled, dict(exchange.contains))
    return (*said, *where, sorted(exchange.in_flight), sorted(exchange.own), base(exchange).tobytes())


@pytest.mark.parametrize(("begin", "end"), [(0, KEYS), (1, KEYS - 1), (2, 3), (KEYS - 1, KEYS)])
def test_parts_of_a_fragment_have_their_parts_of_its_residual(begin: int, end: int) -> None:
    """As where keys have moved: what was a fragment when it was pushed is none any more."""
    exchange = exchange_of()
    exchange.own.clear()
    out = np.empty(end - begin, np.float32)
    exchange.base(begin, end, out)
    np.testing.assert_array_equal(out, base(exchange)[begin:end])
    ((_, _, residual),) = cast(HostReplica, exchange.replica).residuals
    assert residual[1:-1].any()


@pytest.mark.parametrize(("gain", "ahead"), [(1.0, 1.0), (1.25, 1.25), (1.25, 1.5), (0.5, 0.75), (GAIN_MAX, GAIN_MAX)])
def test_the_residual_stands_in_at_the_gain_and_what_is_in_flight_ahead_of_it(gain: float, ahead: float) -> None:
    exchange = exchange_of()
    ((_, _, residual),) = cast(HostReplica, exchange.replica).residuals
    sent = UPDATE - residual
    assert np.count_nonzero(residual) > KEYS / 2 and np.linalg.norm(sent) > np.linalg.norm(UPDATE) / 2
    np.testing.assert_allclose(base(exchange), FIRST + UPDATE)
    state = replace(GOOD, publication=1, gain=gain, ahead=ahead, agreement=0.8)
    exchange.take(StateArrived(0, (state,)))
    assert (exchange.gain, exchange.ahead, exchange.agreement) == (gain, ahead, 0.8)
    np.testing.assert_allclose(base(exchange), FIRST + gain * residual + ahead * sent, rtol=1e-5)
    exchange.take(StateArrived(0, (replace(state, publication=2, contains=((0, 0.5),)),)))
    np.testing.assert_allclose(base(exchange), FIRST + gain * residual + (ahead - 0.5) * sent, rtol=1e-5)
    exchange.take(StateArrived(0, (replace(state, publication=3, min_clock=1, settled=1),)))
    np.testing.assert_allclose(base(exchange), FIRST + gain * residual, rtol=1e-5)


@pytest.mark.parametrize("wrong", [0.0, -1.0, NAN, INF, -INF, GAIN_MAX * 1.001])
@pytest.mark.parametrize("name", ["gain", "ahead"])
def test_a_state_with_a_gain_that_is_none_is_refused_and_changes_nothing(name: str, wrong: float) -> None:
    _refused(**{name: wrong})


@pytest.mark.parametrize("wrong", [-0.1, 1.1, NAN, INF])
def test_a_state_with_an_agreement_that_is_none_is_refused_and_changes_nothing(wrong: float) -> None:
    _refused(agreement=wrong)


def _refused(**changes: Any) -> None:
    exchange = exchange_of()
    good = replace(GOOD, publication=1, min_clock=1, settled=1, gain=1.25, ahead=1.5, agreement=0.8)
    before = held(exchange)
    for values in (np.ones(KEYS, np.float32), FIRST):
        with pytest.raises(RemoteProtocolError, match="gains of"):
            exchange.take(StateArrived(0, (replace(good, payload=values.tobytes(), **changes),)))
        assert held(exchange) == before
    exchange.take(StateArrived(0, (good,)))
    assert (exchange.publication, exchange.gain) == (1, 1.25)
