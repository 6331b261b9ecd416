"""The events of a journal: large frames are read in the file, and stay there while the machine holds them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from narrows.protocols import messages as m
from narrows.protocols.wire import decode, encode
from narrows.ps.journal.event_file import ALIGNMENT, HEAD, OWN, PAGE, EventFile
from narrows.ps.replication.events import EventKind, MachineEvent

LARGE = 1 << 18  # bytes of a frame that is read in the file


@pytest.fixture
def file() -> Iterator[int]:
    made = os.memfd_create("narrows-test")
    yield made
    os.close(made)


def event(number: int) -> MachineEvent:
    return MachineEvent(EventKind.BELOW, number, b"a" * m.NAME_BYTES + b"x")


def frames(number: int, size: int = LARGE) -> list[m.Buffer]:
    message = m.Push(0, 0, number, 0, 1, 0, size, 1, b"", 0, bytes([number % 256]) * size)
    return list(encode(message))


def placed(events: EventFile, frame: m.Buffer) -> tuple[int, int]:
    place = events.place(frame)
    assert place is not None
    return place


def kept_pages(file: int) -> int:
    return os.fstat(file).st_blocks * 512


def test_a_large_frame_is_a_view_of_the_file(file: int) -> None:
    events = EventFile(file)
    noted = events.append(event(1), frames(1))
    assert isinstance(noted[1], memoryview) and noted[1].readonly and noted[1] == frames(1)[1]
    assert noted[0] == frames(1)[0] and events.place(memoryview(b"elsewhere")) is None
    assert bytes(events.view(*placed(events, noted[1][100:200]), 100)) == bytes([1]) * 100, (
        "a part of it has a place too"
    )
    small = frames(2, LARGE - 1)
    assert events.append(event(2), small) is small
    with pytest.raises(ValueError, match="beyond the events"):
        events.view(OWN, os.fstat(file).st_size, 1)


def test_without_maps_no_frame_is_read_in_the_file(file: int) -> None:
    events, sent = EventFile(file, maps=False), frames(1)
    assert events.append(event(1), sent) is sent and not events.windows


def test_a_frame_that_is_held_outlives_new_beginnings(file: int) -> None:
    events = EventFile(file)
    held = events.append(event(1), frames(1))[1]
    values = np.frombuffer(held, np.uint8)[5:]  # the machine keeps a part, by another object
    del held
    for turn in range(2, 9):
        events.restart(turn)
        events.append(event(turn), frames(turn))
        events.append(event(turn + 100), frames(turn))
        assert (values == 1).all() and values.size == LARGE - 5
    assert kept_pages(file) <= 3 * LARGE + 8 * PAGE, "the held frame, and the events since the last beginning"
    del values
    gc.collect()
    events.restart(9)
    assert events.begin == HEAD.size, "nothing is held: events begin at the first byte again"
    assert [*EventFile(file).events()] == []


class TornMapping:
    """A mapped file in which the process is killed before it has written so many parts."""

    def __init__(self, mapped: mmap.mmap, parts: int) -> None:
        self.mapped, self.left = mapped, parts

    def __setitem__(self, where: slice, part: m.Buffer) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        self.mapped[where] = part


@pytest.mark.parametrize("parts", range(7))
def test_an_event_with_a_large_frame_counts_once_all_of_it_is_there(file: int, parts: int) -> None:
    events = EventFile(file)
    for number in range(3):
        events.append(event(number), frames(number))
    gc.collect()
    events.restart(1)  # bytes of the older events stay behind the first one
    events.append(event(5), frames(5))
    first, size, mapped, address = events.windows[0]
    events.windows[0] = (first, size, TornMapping(mapped, parts), address)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        events.append(event(6), frames(6))
    again = EventFile(file)
    assert [each.now_ns for each in again.events()] == [5]
    again.append(event(7), frames(7))
    assert [each.now_ns for each in EventFile(file).events()] == [5, 7]


def test_a_large_frame_begins_at_a_cache_line(file: int) -> None:
    events = EventFile(file)
    events.restart(1)
    for number, size in enumerate((3, LARGE, 5, LARGE + 4, LARGE)):
        for frame in events.append(event(number), frames(number, size)):
            assert len(frame) < LARGE or placed(events, frame)[1] % ALIGNMENT == 0
    found = [each.message for each in EventFile(file).events()]
    assert [len(message.payload) for message in found if isinstance(message, m.Push)] == [3, LARGE, 5, LARGE + 4, LARGE]


def test_memory_that_the_system_lacks_is_an_error_and_no_signal(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    events = EventFile(file)
    events.restart(1)
    events.append(event(1), frames(1))
    monkeypatch.setattr("narrows.ps.journal.event_file.os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        events.append(event(2), frames(2))
    assert [each.now_ns for each in EventFile(file).events()] == [1]


def test_pages_stay_for_new_events_if_two_beginnings_needed_them(file: int) -> None:
    events = EventFile(file)
    for serial, (count, kept) in enumerate(((9, 0), (2, 2), (2, 2), (5, 2), (9, 5))):
        for number in range(count):
            events.append(event(number), frames(number))
        gc.collect()
        events.restart(serial + 1)
        assert kept * LARGE <= kept_pages(file) <= kept * LARGE + 4 * PAGE, (serial, kept)


def test_the_next_process_reads_events_behind_held_frames(file: int) -> None:
    events = EventFile(file)
    held = events.append(event(1), frames(1))[1]
    events.restart(2)
    events.append(event(2), frames(2))
    events.append(event(3), frames(3, 10))
    again = EventFile(file)
    found = list(again.events())
    assert again.serial == 2 and [each.now_ns for each in found] == [2, 3] and again.end == events.end
    assert [each.message for each in found] == [decode(frames(2)), decode(frames(3, 10))]
    assert again.view(*placed(events, held), LARGE) == held, "a machine that names the frame finds it"
    del found
    gc.collect()
    still = again.view(*placed(events, held), LARGE)
    EventFile(file)
    again.end = again.begin  # as of a process that was killed before it read the events
    again.restart(3)
    assert still == held


def test_a_file_of_dropped_events_is_empty_once_nothing_is_held(file: int) -> None:
    events = EventFile(file)
    first, second = (events.append(event(number), frames(number))[1] for number in (1, 2))
    events.drop()
    assert LARGE <= kept_pages(file) <= 2 * LARGE + 4 * PAGE and EventFile(file).serial == 0
    del first
    gc.collect()
    assert second == frames(2)[1] and kept_pages(file) <= LARGE + 2 * PAGE
    del second
    gc.collect()
    assert kept_pages(file) == 0 and not events.held


def test_a_window_that_has_no_held_frame_is_unmapped(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("narrows.ps.journal.event_file.WINDOW_BYTES", 2 * LARGE)
    events = EventFile(file)
    held = [events.append(event(number), frames(number))[1] for number in range(9)]
    assert len(events.windows) > 3 and all(each == frames(number)[1] for number, each in enumerate(held))
    del held[:8]
    gc.collect()
    events.restart(1)
    assert len(events.windows) <= 2 and held[0] == frames(8)[1], "windows may overlap"


def test_frames_that_wait_are_no_past(file: int) -> None:
    events = EventFile(file)
    held = [events.append(event(number), frames(number))[1] for number in range(3)]
    assert 0 < events.past_bytes < LARGE
    del held[1:]
    gc.collect()
    assert 2 * LARGE < events.past_bytes < 3 * LARGE
    events.restart(1)
    assert events.past_bytes == 0, "the machine has what waits"
    more = events.append(event(4), frames(4))[1]
    del held[:]
    gc.collect()
    assert 0 < events.past_bytes < LARGE and more[0] == 4
