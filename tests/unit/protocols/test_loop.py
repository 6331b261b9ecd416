"""The loop over a port: what runs when in a turn, and what ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from narrows.protocols.effects import NS
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.loop import TICK_MS, WAIT_MS, Loop
from narrows.protocols.runtime.network.sockets import SENT, Peer, Receipt, Sockets

TICK_NS = TICK_MS * NS // 1000


class Script:
    """In place of sockets: the messages of each turn. What happens is in `trace`."""

    def __init__(self, *turns: Sequence[bytes]) -> None:
        self.turns, self.trace, self.now_ns, self.woken = [*turns], list[object](), 0, 0
        self.arrives: Callable[[bytes], object] = lambda frame: None  # runs as a message leaves the queue

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        return SENT

    def receive(self, limit_ms: int) -> Iterator[tuple[Peer, list[Buffer]]]:
        self.trace.append(limit_ms)
        for frame in self.turns.pop(0):
            self.arrives(frame)
            yield "peer", [frame]

    def wake(self) -> None:
        self.woken += 1

    def hang_up(self, address: str) -> None: ...

    def close(self) -> None: ...

    def loop(self, tick_ms: int = TICK_MS) -> Loop:
        return Loop(
            self,
            lambda peer, frames: self.trace.append(bytes(frames[0])),
            lambda now_ns: self.trace.append(("tick", now_ns)),
            lambda: self.trace.append("turn"),
            tick_ms=tick_ms,
        )

    def time(self) -> int:
        """Half a tick later each time."""
        self.now_ns += TICK_NS // 2
        return self.now_ns

    def left(self) -> bool:
        return bool(self.turns)


def test_a_turn_runs_commands_before_each_message_and_after_the_last_one() -> None:
    script = Script([b"a", b"b"], [])
    loop = script.loop()
    script.arrives = lambda frame: loop.call_later(lambda: script.trace.append(b"before " + frame))
    loop.call(lambda: loop.call_later(lambda: script.trace.append("of a command")))
    loop.run(script.time, script.left)
    first = [WAIT_MS, b"before a", "of a command", b"a", b"before b", b"b", "turn"]
    assert script.trace == [*first, WAIT_MS, "turn", ("tick", 3 * TICK_NS // 2)]
    assert script.woken == 1, "nobody waits for a command that may run later"


@pytest.mark.parametrize(("tick_ms", "ticks"), [(TICK_MS, [3, 5]), (TICK_MS // 2, [2, 3, 4, 5]), (0, [2, 3, 4, 5])])
def test_a_tick_is_as_far_from_the_one_before_as_it_is_to_be(tick_ms: int, ticks: list[int]) -> None:
    script = Script([], [], [], [])
    script.loop(tick_ms).run(script.time, script.left)
    assert [each[1] for each in script.trace if isinstance(each, tuple)] == [n * TICK_NS // 2 for n in ticks]


def test_a_tick_that_is_wanted_soon_is_in_this_turn() -> None:
    script = Script([b"a"], [], [b"b"], [])
    loop = script.loop()
    loop.tick_soon()
    script.arrives = lambda frame: loop.tick_soon() if frame == b"b" else None
    loop.run(script.time, script.left)
    assert [each[1] for each in script.trace if isinstance(each, tuple)] == [n * TICK_NS // 2 for n in (1, 3)]


def test_a_loop_that_is_over_before_it_begins_receives_nothing() -> None:
    script = Script()
    script.loop().run(script.time, script.left)
    assert script.trace == []


def test_commands_that_were_given_before_the_stop_still_run() -> None:
    script = Script([], [])
    loop = script.loop()
    loop.call(loop.stop)
    loop.call_later(lambda: script.trace.append("last"))
    loop.run(script.time)
    assert script.trace == [WAIT_MS, "last", "turn"] and script.woken == 2


def test_an_error_of_a_callback_ends_the_loop() -> None:
    script = Script([b"a"], [])
    loop = Loop(script, lambda peer, frames: 1 // 0, script.trace.append)
    with pytest.raises(ZeroDivisionError):
        loop.run(script.time)
    assert script.trace == [WAIT_MS]


def test_calls_before_the_loop_looks_wake_it_once() -> None:
    script = Script([], [])
    loop, ran = script.loop(), list[int]()
    for number in range(5):
        loop.call(lambda number=number: ran.append(number))  # type: ignore[misc]
    assert script.woken == 1
    loop.run(script.time, script.left)
    assert ran == [0, 1, 2, 3, 4]
    loop.call(loop.stop)
    assert script.woken == 2  # the loop may wait again


def test_no_call_of_another_thread_is_left_behind() -> None:
    sockets, count, ran = Sockets(), 3000, list[int]()
    loop = Loop(sockets, lambda peer, frames: None, lambda now_ns: None, wait_ms=60_000)
    thread = threading.Thread(target=loop.run, args=(lambda: 0,), daemon=True)
    try:
        thread.start()
        for number in range(count):
            loop.call(lambda number=number: ran.append(number))  # type: ignore[misc]
            if number % 100 == 0:
                until = time.monotonic() + 10
                while len(ran) <= number:
                    assert time.monotonic() < until, "a command waits for the next message"
        loop.stop()
        thread.join(10)
        assert ran == list(range(count))
    finally:
        sockets.close()


def test_another_thread_ends_the_wait() -> None:
    sockets, ran = Sockets(), threading.Event()
    loop = Loop(sockets, lambda peer, frames: None, lambda now_ns: None, wait_ms=60_000)
    thread = threading.Thread(target=loop.run, args=(lambda: 0,), daemon=True)
    try:
        thread.start()
        loop.call(ran.set)
        assert ran.wait(10)
        loop.stop()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        sockets.close()
