"""What a shard has lent: views of its arrays on their way, and in held effects; the bytes that a peer does not take."""

from __future__ import annotations

from contextlib import closing

import numpy as np
from kit.hostile_connections import frame, shaken
from kit.processes import until

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import Send, StopProcess
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.ps.process.buffer_loans import LENT_BYTES_MAX, LENT_TIMES, BufferLoans
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.runner import ServerRunner

PIECE = 4 << 20


def test_who_takes_nothing_is_lent_no_more_than_the_bound() -> None:
    """Each answer to a pull is a copy of the model, where the weights change from one to the next."""
    config = ServerConfig(0, Settings().validated(), "tcp://127.0.0.1:0", "", 1, "", False)
    values = memoryview(bytearray(PIECE))
    state = m.State(0, 0, 1, 0, 1, 0, 1, True, True, 0, 0, 0, (), 0, 0, values)
    with closing(Sockets()) as sockets:
        port = sockets.listen(config.bind)
        runner = ServerRunner(config, sockets, port)
        with shaken(port) as reader:
            reader.sendall(frame(b"here"))
            ((peer, _),) = sockets.receive(10_000)
            assert isinstance(peer, bytes)
            runner.apply([Send(peer, state)] * 200, 0)
            most = (LENT_BYTES_MAX + 3 * PIECE) // PIECE  # and some in the system's buffers
            assert 0 < 200 - runner.drops.counts["State"] <= most
            assert runner.lending.full(peer, values, int) and not runner.lending.full(b"another", values, int)
            assert not runner.lending.full(peer, values, lambda: LENT_BYTES_MAX), f"{LENT_TIMES} of a larger model"
            reader.setblocking(False)

            def taken() -> bool:
                try:
                    while reader.recv(1 << 20):
                        pass
                except BlockingIOError:
                    pass
                return not runner.lending.any()

            until(taken, "all to be taken")
            assert not runner.lending.full(peer, values, int)


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
