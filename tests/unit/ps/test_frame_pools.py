"""The pools of peers that a journal names: they outlive the process, and go once nothing refers to them."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from narrows.protocols import messages as m
from narrows.protocols.errors import NarrowsError
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.shared_memory import (
    LEAST_BYTES,
    POOL_BYTES,
    FrameHold,
    FramePool,
    PeerBytes,
    PeerPool,
    available,
)
from narrows.protocols.wire import decode, encode
from narrows.ps.journal import event_file, frame_pools
from narrows.ps.journal.event_file import EventFile
from narrows.ps.journal.frame_pools import FramePools, sockets
from narrows.ps.replication.events import EventKind, MachineEvent

pytestmark = pytest.mark.skipif(not available(), reason="the system has no shared memory")

COUNT = LEAST_BYTES // 4


@pytest.fixture
def ends() -> Iterator[tuple[int, ...]]:
    made = sockets()
    yield made
    for each in made:
        os.close(each)


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("narrows-test")
    yield made
    os.close(made)


def sender(value: float) -> tuple[FramePool, int]:
    """A peer's pool, and the offset of a frame of this value."""
    pool = FramePool()
    found = pool.put(np.full(COUNT, value, np.float32).data.cast("B"), again=False)
    assert found is not None
    return pool, found.offset


def mapped() -> int:
    gc.collect()
    with open("/proc/self/maps") as maps:
        return sum("narrows-frames" in line and " r--s " in line for line in maps)


def test_a_frame_is_found_again_by_the_next_process(ends: tuple[int, ...]) -> None:
    of_peer, offset = sender(7)
    before = FramePools(ends)
    pool = PeerPool(of_peer.readable, 5)
    before.keep(pool, of_peer.readable)
    frame = pool.view(offset, LEAST_BYTES)
    assert before.place(frame) == (5, offset) and before.place(frame[8:16]) == (5, offset + 8)
    assert before.place(bytes(8)) is None and before.place(memoryview(b"elsewhere")) is None
    del before, pool, frame, of_peer  # all of them have ended
    for _ in range(2):
        after = FramePools(ends)
        assert set(np.frombuffer(after.view(5, offset, LEAST_BYTES), np.float32)) == {7}
    for place in ((6, 0, 8), (5, POOL_BYTES, 8), (5, -1, 8)):
        with pytest.raises(ValueError, match="not kept"):
            after.view(*place)


def test_pools_go_once_nothing_refers_to_them(ends: tuple[int, ...]) -> None:
    first = mapped()
    pools, (one, at), (other, _) = FramePools(ends), sender(1), sender(2)
    kept, left = PeerPool(one.readable, 1), PeerPool(other.readable, 2)
    pools.keep(left, other.readable)
    pools.keep(kept, one.readable)
    frame = kept.view(at, LEAST_BYTES)
    del left, kept
    pools.forget()
    assert pools.queued == [1] and pools.place(frame) == (1, at) and mapped() == first + 1
    del pools
    after = FramePools(ends)
    assert after.queued == [1] and mapped() == first + 2
    del frame
    after.forget()
    assert after.queued == [] and mapped() == first and FramePools(ends).queued == []


def test_a_full_queue_keeps_no_further_pool(ends: tuple[int, ...]) -> None:
    pools, (of_peer, at) = FramePools(ends), sender(1)
    pool = PeerPool(of_peer.readable, 1)
    while pools._put(1, of_peer.readable):
        assert len(pools.queued) < 10_000
    pools.keep(pool, of_peer.readable)
    assert pools.place(pool.view(at, 8)) is None
    pools.pools[1] = pool
    pools.forget()  # there is no room to put anything behind the others: all stay
    assert len(pools.queued) > 100
    pools.pools.clear()
    pools.forget()
    assert not pools.queued


@pytest.mark.parametrize("struck", range(8))  # three looks and takes, and two puts
def test_a_process_that_is_killed_as_it_forgets_loses_no_pool(struck: int, ends: tuple[int, ...]) -> None:
    pools, held = FramePools(ends), []
    for number in (1, 2, 3):
        of_peer, at = sender(number)
        pool = PeerPool(of_peer.readable, number)
        pools.keep(pool, of_peer.readable)
        if number != 2:
            held.append(pool.view(at, LEAST_BYTES))
    del pool

    class KilledError(Exception):
        pass

    class Strikes:
        """A socket that ends the process before one of its reads or writes."""

        def __init__(self, real: Any) -> None:
            self.real = real

        def __getattr__(self, name: str) -> Any:
            if name in ("recvmsg", "sendmsg") and next(steps) == struck:
                raise KilledError
            return getattr(self.real, name)

    steps = iter(range(100))
    pools.into, pools.out = Strikes(pools.into), Strikes(pools.out)  # type: ignore[assignment]
    with pytest.raises(KilledError):
        pools.forget()
    after = FramePools(ends)
    assert {1, 3} <= set(after.queued)
    for number in (1, 3):
        assert np.frombuffer(after.view(number, 0, 4), np.float32)[0] == number


def test_a_pool_that_cannot_be_mapped_is_left_out(ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    of_peer, _ = sender(7)
    before = FramePools(ends)
    pool = PeerPool(of_peer.readable, 5)
    before.keep(pool, of_peer.readable)

    def full(*words: object) -> None:
        raise OSError("no addresses left")

    monkeypatch.setattr(frame_pools, "PeerPool", full)
    after = FramePools(ends)
    assert after.queued == [5]
    with pytest.raises(ValueError, match="not kept"):
        after.view(5, 0, 8)
    after.forget()
    assert after.queued == []


def test_without_descriptors_nothing_is_lost(ends: tuple[int, ...]) -> None:
    of_peer, _ = sender(7)
    before = FramePools(ends)
    for number in (5, 6):
        before.keep(PeerPool(of_peer.readable, number), of_peer.readable)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    after = FramePools(ends)
    last = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, limits[1]))
    try:
        after.forget()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.close(last)
    assert after.queued == [5, 6] and len(FramePools(ends).queued) == 2
    after.forget()
    assert after.queued == []


def event(number: int) -> MachineEvent:
    return MachineEvent(EventKind.BELOW, number, b"a" * m.NAME_BYTES + b"x")


@pytest.mark.parametrize("least", [event_file.LEAST_BYTES, 1, sys.maxsize], ids=["small", "large", "no map"])
def test_the_machine_handles_the_bytes_that_the_journal_has(
    file: int, monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    """Else a peer that changes its frame meanwhile has a shard that is killed come back with another update."""
    of_peer, at = sender(3)
    frame = PeerPool(of_peer.readable, 9).view(at, LEAST_BYTES, FrameHold())
    events = EventFile(file)
    events.least = least
    events.restart(1)
    noted = events.append(event(1), [*encode(m.Push(0, 0, 1, 0, 1, 0, COUNT, 1, b"", 0, frame))])
    of_peer.values[at : at + LEAST_BYTES] = 0xFF
    (kept,) = EventFile(file).events()
    assert isinstance(kept.message, m.Push)
    assert bytes(noted[1]) == bytes(kept.message.payload) == b"\0\0\x40\x40" * COUNT


def test_an_event_names_the_frame_that_stays_in_place(file: int, ends: tuple[int, ...]) -> None:
    of_peer, at = sender(3)
    pools, returned = FramePools(ends), list[int]()
    pool = PeerPool(of_peer.readable, 9)
    pools.keep(pool, of_peer.readable)

    class Hold(FrameHold):
        def __del__(self) -> None:
            returned.append(1)

    frame: Buffer = pool.view(at, LEAST_BYTES, Hold())
    sent = [*encode(m.Push(0, 0, 1, 0, 1, 0, COUNT, 1, b"", 0, frame))]
    events = EventFile(file, pools=pools)
    events.restart(1)
    copied = events.append(event(1), sent)
    assert events.past_peer_bytes == 0 and events.past_bytes > LEAST_BYTES  # nobody said that it may stay
    noted = events.append(event(2), sent, in_place=True)
    assert noted[1] is sent[1] and isinstance(memoryview(noted[1]).obj, PeerBytes)
    assert events.past_peer_bytes == 0 and events.end < 2 * LEAST_BYTES  # the machine holds it
    del sent, copied, noted, frame
    assert events.past_peer_bytes == LEAST_BYTES and not returned
    again = [each.message for each in EventFile(file, pools=FramePools(ends)).events()]
    assert [bytes(each.payload) for each in again if isinstance(each, m.Push)] == [b"\0\0\x40\x40" * COUNT] * 2
    del again
    others = sockets()
    with pytest.raises(NarrowsError, match="the journal cannot be read"):
        [*EventFile(file, pools=FramePools(others)).events()]
    for each in others:
        os.close(each)
    with pytest.raises(NarrowsError, match="the journal cannot be read"):
        [*EventFile(file).events()]
    events.restart(2)
    assert returned == [1] and events.past_peer_bytes == 0


def test_the_events_hold_so_much_of_a_pool_and_no_more(
    file: int, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_file, "PEER_BYTES_MAX", 2 * LEAST_BYTES)
    of_peer, at = sender(3)
    pools = FramePools(ends)
    pool = PeerPool(of_peer.readable, 9)
    pools.keep(pool, of_peer.readable)
    events = EventFile(file, pools=pools)
    for turn in range(4):
        frames = [*encode(m.Push(0, 0, turn, 0, 1, 0, COUNT, 1, b"", 0, pool.view(at, LEAST_BYTES, FrameHold())))]
        noted = events.append(event(turn), frames, in_place=True)
        assert decode(noted) == decode(frames)
    assert events.past_peer_bytes == 2 * LEAST_BYTES and 2 * LEAST_BYTES < events.past_bytes < 3 * LEAST_BYTES
