"""The journal of a machine: it is written, and read again after anything that may have stopped the writing."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import pytest

from narrows.protocols import messages as m
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import encode, pack
from narrows.ps.coordinator.coordinator import Coordinator
from narrows.ps.journal.journal import BYTES_MIN, COPY_TIMES, REPLAY_NS, Journal, files
from narrows.ps.replication.events import EventKind, MachineEvent
from narrows.ps.server.server import Server
from narrows.ps.shard.model_shard import ShardResources
from narrows.ps.shard.shard import Shard
from narrows.ps.store.store import assume_lent

HELLO = m.Hello("a token", "here", b"")


def server() -> Server:
    settings = Settings().validated()
    means = ShardResources(coordinator=Coordinator(settings, 7))
    return Server(Shard(0, settings, 1, 5, (), means), means.coordinator)


@pytest.fixture
def both() -> Iterator[tuple[int, ...]]:
    made = files()
    yield made
    for file in made:
        os.close(file)


def again(both: tuple[int, ...]) -> tuple[Journal, list[MachineEvent]]:
    journal = Journal(both, assume_lent)
    return journal, list(journal.events())


def event(count: int) -> MachineEvent:
    return MachineEvent(EventKind.BELOW, count, b"a" * m.NAME_BYTES + b"x", HELLO)


def filled(both: tuple[int, ...], events: int) -> Journal:
    journal = Journal(both, assume_lent)
    assert not journal.whole
    journal.begin(server())
    for count in range(events):
        journal.note(event(count), encode(HELLO))
    return journal


def test_what_was_written_is_read(both: tuple[int, ...]) -> None:
    journal = filled(both, 3)
    journal.note(MachineEvent(EventKind.WROTE, 9, values=(4, [1, 4], 17)), [])
    found, events = again(both)
    assert events == [event(0), event(1), event(2), MachineEvent(EventKind.WROTE, 9, values=(4, [1, 4], 17))]
    assert found.machine().shard.ledger == server().shard.ledger and found.event_file.end == journal.event_file.end


@pytest.mark.parametrize("about", [[99, 0, b"", []], ["x", 0, b"", []], [1, 0, b"", None], [1, 0, b""], None])
def test_an_event_that_is_none_is_what_a_peer_may_send(about: object) -> None:
    """A standby gets events over the network."""
    with pytest.raises(RemoteProtocolError, match="an event has a kind"):
        MachineEvent.of(pack(about), [])


class Killed(BaseException):
    """The process is killed here."""


def killed(*args: object) -> int:
    raise Killed


@pytest.mark.parametrize("call", ["pwritev", "pwrite"])
def test_an_event_that_is_not_whole_has_not_happened(
    call: str, both: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal also ignores the bytes of older events behind the last one."""
    journal = filled(both, 9)
    journal.begin(server())
    for count in range(2):
        journal.note(event(count), encode(HELLO))
    with monkeypatch.context() as patch:
        patch.setattr(f"narrows.ps.journal.event_file.os.{call}", killed)
        with pytest.raises(Killed):
            journal.note(event(2), encode(HELLO))
    found, events = again(both)
    assert events == [event(0), event(1)]
    found.note(event(5), encode(HELLO))
    assert again(both)[1] == [event(0), event(1), event(5)]


@pytest.mark.parametrize("when", ["freeze", "os.pwrite", "Journal._settle"])
def test_killed_while_it_begins_anew(when: str, both: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    journal = filled(both, 2)
    with monkeypatch.context() as patch:
        patch.setattr(f"narrows.ps.journal.journal.{when}", killed)
        with pytest.raises(Killed):
            journal.begin(server())
    found, events = again(both)
    assert found.whole
    assert events == ([] if when == "Journal._settle" else [event(0), event(1)]), "or they are in the machine"


def test_where_memory_is_full_nothing_counts(both: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    journal = filled(both, 2)
    with monkeypatch.context() as patch:
        patch.setattr("narrows.ps.journal.event_file.os.pwritev", full)
        journal.note(event(2), encode(HELLO))
    assert journal.failure == "No space left on device" and not journal.due(3)
    journal.note(event(3), encode(HELLO))
    journal.begin(server())
    assert not Journal(both, assume_lent).whole
    assert sum(os.fstat(file).st_blocks for file in both) == 0, "others need the room"


def test_what_cannot_be_written_ends_no_run(both: tuple[int, ...]) -> None:
    machine = server()
    machine.shard.trouble = lambda: None  # type: ignore[assignment]
    journal = Journal(both, assume_lent)
    journal.begin(machine)
    assert "<lambda>" in journal.failure and not Journal(both, assume_lent).whole


def test_a_machine_that_is_too_large_has_none(both: tuple[int, ...]) -> None:
    class Large(Shard):
        nbytes = 1_000_001

    settings = Settings().validated()
    large = Server(Large(0, settings, 1, 5, (), ShardResources()), Coordinator(settings, 7))
    journal = Journal(both, assume_lent, 1_000_000)
    journal.begin(large)
    assert journal.failure == "it would take 1,000,001 bytes, and may take 1,000,000"
    assert not Journal(both, assume_lent).whole


def test_it_begins_anew_in_time(both: tuple[int, ...]) -> None:
    clocks = iter(range(100))
    journal = filled(both, 1)
    assert not journal.due(next(clocks))
    journal.spent_ns, journal.copy_ns = REPLAY_NS, 2 * REPLAY_NS // COPY_TIMES
    assert not journal.due(next(clocks)), "a copy would take more than its share"
    journal.copy_ns //= 2
    assert journal.due(next(clocks))
    journal.begin(server())
    assert not journal.due(next(clocks))
    journal.spent_ns = 2 * REPLAY_NS - 1
    assert journal.due(99) and not journal.due(99), "in the midst of a clock pushes wait, and a machine has them"
    journal.spent_ns += 1
    assert journal.due(99)
    journal.begin(server())
    payload = bytes(BYTES_MIN)
    journal.note(MachineEvent(EventKind.BELOW, 1, b"x", HELLO), [*encode(HELLO), payload])
    assert journal.due(next(clocks))
    journal.begin(server())
    assert not journal.due(next(clocks)) and again(both)[1] == []
