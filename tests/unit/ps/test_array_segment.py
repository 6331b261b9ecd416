"""The segment of a machine's arrays: what a process that is killed leaves in it, and which pages it takes."""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.journal.array_segment import LEAST_BYTES, PAGE, ArraySegment
from narrows.ps.journal.journal import COPY, LIVE, files
from narrows.ps.journal.machine_pickling import freeze, thaw
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ShardResources
from narrows.ps.shard.shard import Shard
from narrows.ps.store.changes import FloatArray
from narrows.ps.store.store import assume_lent

COUNT = LEAST_BYTES // 4 + 1


@pytest.fixture
def both() -> Iterator[tuple[int, int]]:
    made = files()
    yield made[LIVE], made[COPY]
    for file in made:
        os.close(file)


def filled(segment: ArraySegment, value: float, count: int = COUNT) -> FloatArray:
    array = segment.empty(count)
    array.fill(value)
    return array


def pages(file: int) -> int:
    return os.fstat(file).st_blocks * 512 // PAGE


def test_the_next_process_has_the_arrays_of_the_last_copy(both: tuple[int, int]) -> None:
    segment = ArraySegment(*both)
    ones, twos = filled(segment, 1.0), filled(segment, 2.0, 3 * COUNT)
    segment.keep()
    ones.fill(9.0)  # an event in whose midst the process is killed
    places = [segment.place(each) for each in (ones, twos)]
    after = ArraySegment(*both)
    found = [after.at(place, len(each), back=True) for place, each in zip(places, (ones, twos), strict=True)]
    assert_array_equal(found[0], np.full(COUNT, 1.0, np.float32))
    assert_array_equal(found[1], np.full(3 * COUNT, 2.0, np.float32))
    after.begun()
    assert after.at(places[0], COUNT, back=True) is found[0], "two references to an array stay one array"
    del found[0]
    found.insert(0, after.at(places[0], COUNT, back=True))  # of a range whose array is gone, and not yet free
    more = filled(after, 3.0)
    assert after.place(more) not in places
    assert_array_equal(found[0], np.full(COUNT, 1.0, np.float32))


def test_arrays_without_a_copy_are_taken_as_they_are(both: tuple[int, int]) -> None:
    segment = ArraySegment(*both)
    ones = filled(segment, 1.0)
    after = ArraySegment(*both)
    assert_array_equal(after.at(segment.place(ones), COUNT, back=False), np.full(COUNT, 1.0, np.float32))


def test_a_range_is_taken_over_once_nothing_refers_to_its_array(both: tuple[int, int]) -> None:
    segment = ArraySegment(*both)
    array = filled(segment, 1.0)
    place, references = segment.place(array), [array, array[5:], torch.from_numpy(array[:7]), memoryview(array.data)]
    del array
    while references:
        gc.collect()
        assert segment.place(segment.empty(COUNT)) != place
        references.pop(0)
    gc.collect()
    there = [segment.empty(COUNT) for _ in range(2)]
    assert place in map(segment.place, there) and segment.nbytes <= 2 * (4 * COUNT + PAGE)


def test_only_whole_arrays_of_the_segment_have_a_place(both: tuple[int, int]) -> None:
    segment = ArraySegment(*both)
    array = segment.empty(COUNT)
    assert segment.place(array) == segment.place(array[:]) == segment.place(torch.from_numpy(array).numpy()) >= 0
    others = [array[:-1], array[1:], array[::2], array.copy(), segment.empty(3)]
    assert segment.place(array.view(np.int32)) == segment.place(np.zeros(0)) == -1
    assert [segment.place(each) for each in others] == [-1] * len(others)


def test_pages_of_arrays_that_are_gone_are_given_back(both: tuple[int, int]) -> None:
    """But those that the next array may take over stay until a second copy."""
    segment, kept = ArraySegment(*both), 1
    own = -(-4 * COUNT // PAGE)
    array = filled(segment, 1.0)
    for _ in range(20):
        array = filled(segment, 2.0)  # as a state of which a message is on its way
    assert pages(both[0]) <= 2 * own
    for _ in range(2):
        segment.keep()
    assert pages(both[0]) == pages(both[1]) == kept * own
    segment.drop_copy()
    assert pages(both[1]) == 0 and pages(both[0]) == own
    place = segment.place(array)
    segment.keep()
    after = ArraySegment(*both)
    here = after.at(place, COUNT, back=True)
    del segment, array
    gc.collect()
    after.begun()
    assert pages(both[0]) == own
    assert_array_equal(here, np.full(COUNT, 2.0, np.float32))


@pytest.mark.parametrize("place", [(-PAGE, 5), (1, 5), (0, 1 << 62), (1 << 50, 5)])
def test_a_place_that_the_files_do_not_have(place: tuple[int, int], both: tuple[int, int]) -> None:
    filled(segment := ArraySegment(*both), 1.0)
    with pytest.raises(ValueError, match="beyond the arrays' file"):
        ArraySegment(*both).at(*place, back=True)
    assert segment.slabs


def test_without_memory_an_array_is_none_of_the_segment(both: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("narrows.ps.journal.array_segment.os.posix_fallocate", full)
    segment = ArraySegment(*both)
    assert segment.place(filled(segment, 1.0)) == -1 and not segment.nbytes


def test_a_standby_cannot_name_a_place(both: tuple[int, int]) -> None:
    """The machine that it gets over the network has all bytes."""
    segment = ArraySegment(*both)
    settings = Settings().validated()
    means = ShardResources(coordinator=Coordinator(settings, 7))
    server = Server(Shard(0, settings, 1, 5, (), means), means.coordinator)
    server.shard.parent_residual = filled(segment, 4.0)
    placed, whole = io.BytesIO(), io.BytesIO()
    freeze(server, placed, assume_lent, segment)
    freeze(server, whole, assume_lent)
    assert len(whole.getvalue()) - len(placed.getvalue()) > 4 * COUNT - 200
    with pytest.raises(RemoteProtocolError, match="only a journal has arrays by their place"):
        thaw(io.BytesIO(placed.getvalue()), assume_lent, segment)
    for here, least in ((ArraySegment(*both), COUNT), (ArraySegment(*both), 9 * COUNT)):
        here.least = least
        found = thaw(io.BytesIO(whole.getvalue()), assume_lent, here).shard.parent_residual
        assert found is not None
        assert_array_equal(found, np.full(COUNT, 4.0, np.float32))
        assert (here.place(found) >= 0) == (here.least < 4 * COUNT)
