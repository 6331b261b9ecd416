"""Which arrays of a shard must not change: those that a message on its way, or a held one, reads."""

from __future__ import annotations

import numpy as np

from narrows.protocols import messages as m
from narrows.protocols.effects import Send, StopProcess
from narrows.ps.process.buffer_loans import BufferLoans


def push(payload: m.Buffer) -> m.Push:
    return m.Push(0, 0, 0, 0, 1, 0, 4, 1, b"", 0, payload)


def test_a_held_effect_lends_an_array_only_if_it_has_a_view() -> None:
    loans = BufferLoans()
    assert not loans.any()
    loans.held.append((1, Send(b"peer", push(b"coded"))))
    loans.held.append((2, Send(b"peer", m.PushAck(0, 0, 0, 0, 1.0, False, 0, 0))))
    loans.held.append((3, StopProcess()))
    assert not loans.any(), "with a standby each answer is held: a publication would copy its array every time"
    loans.held.append((4, Send(b"peer", push(np.zeros(4, np.float32).data.cast("B")))))
    assert loans.any()
    loans.held.pop()
    assert not loans.any()


class Way:
    """The receipt of a message: `lent` until it has left."""

    lent = True


def test_a_view_is_on_loan_until_it_has_left() -> None:
    loans, way = BufferLoans(), Way()
    loans.add(b"peer", way, b"coded")  # type: ignore[arg-type]
    assert not loans.any()
    loans.add(b"peer", way, memoryview(bytearray(4)))  # type: ignore[arg-type]
    assert loans.any()
    way.lent = False
    assert not loans.any() and not loans.views
