"""Frames in shared memory: they arrive as they were sent, stay while somebody holds them, and no peer can end this process."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np
import pytest
import zmq

from narrows.protocols.addresses import local_endpoint, parse_address
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network import shared_memory
from narrows.protocols.runtime.network.shared_memory import (
    HELLO,
    LEAST_BYTES,
    MAGIC,
    POOL_BYTES,
    REFERENCE,
    TABLE_BYTES,
    TICKETS,
    FramePool,
    PeerBytes,
    SharedLink,
    available,
    door,
    owned,
)
from narrows.protocols.runtime.network.sockets import OPTIONS, SENT, Peer, Sockets
from narrows.worker.runtime.member_link import MemberLink

pytestmark = pytest.mark.skipif(not available(), reason="the system has no shared memory")

LIMIT_S = 10.0
NAME = b"12345678"
COUNT = LEAST_BYTES // 4  # float32 values of the smallest frame in shared memory
Message = tuple[Peer, list[Buffer]]


@pytest.fixture(autouse=True)
def _what_nobody_takes_need_not_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, zmq.LINGER, 0)


def dialler() -> Sockets:
    return Sockets(known_as=lambda address: NAME)


class Pair:
    """A listening port and one that has dialled it, in one process, with a link between them."""

    def __init__(self, server: Sockets, child: Sockets, address: str = "") -> None:
        self.server, self.child = server, child
        self.address = address or local_endpoint(server.listen("tcp://127.0.0.1:0"))
        child.send(self.address, [b"hello"])
        (self.peer, _), *_ = self.heard(server)
        self.meet()

    def meet(self) -> None:
        """Wait until both sides use their link."""
        memories = (self.server.memory, self.child.memory)
        deadline = time.monotonic() + LIMIT_S
        while not all(each.links and all(x.ready for x in each.links.values()) for each in memories):
            assert time.monotonic() < deadline
            for port in (self.server, self.child):
                assert not [*port.receive(5)]

    def heard(self, port: Sockets, limit_s: float = LIMIT_S) -> list[Message]:
        deadline, heard = time.monotonic() + limit_s, list[Message]()
        while not heard and time.monotonic() < deadline:
            for each in (self.server, self.child):
                messages = [*each.receive(2)]
                heard += messages if each is port else []
        return heard

    @property
    def up(self) -> SharedLink:
        """The child's side of the link."""
        return self.child.memory.links[self.address]

    @property
    def down(self) -> SharedLink:
        """The server's side."""
        return self.server.memory.links[self.peer]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Sockets(shares=True)) as server, closing(dialler()) as child:
        yield Pair(server, child)


def frame(value: float, count: int = COUNT) -> memoryview:
    return np.full(count, value, np.float32).data.cast("B")


def is_shared(buffer: Buffer) -> bool:
    return isinstance(buffer, memoryview) and isinstance(buffer.obj, PeerBytes)


def test_a_large_frame_arrives_by_reference_both_ways(pair: Pair) -> None:
    for port, to, there in ((pair.child, pair.address, pair.server), (pair.server, pair.peer, pair.child)):
        for size in (LEAST_BYTES - 1, LEAST_BYTES, 3 * LEAST_BYTES + 5):
            sent = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
            assert not port.send(to, [b"head", sent]).dropped
            ((_, (head, payload)),) = pair.heard(there)
            assert bytes(head) == b"head" and bytes(payload) == sent
            assert is_shared(payload) == (size >= LEAST_BYTES)


def test_a_frame_stays_while_somebody_holds_it(pair: Pair) -> None:
    pair.child.send(pair.address, [b"", frame(1)])
    ((_, (_, held)),) = pair.heard(pair.server)
    for value in range(2, 40):
        pair.child.send(pair.address, [b"", frame(value)])
        ((_, (_, payload)),) = pair.heard(pair.server)
        assert set(np.frombuffer(payload, np.float32)) == {value}
        del payload
    assert set(np.frombuffer(held, np.float32)) == {1}
    assert pair.up.pool.end <= 4 * LEAST_BYTES  # the others were given back, and took over each other's range
    pair.up.settle()
    assert len(pair.up.sent) >= 1
    del held
    gc.collect()
    pair.up.settle()
    assert not pair.up.sent and len(pair.up.tickets) == TICKETS


def test_a_part_of_a_view_holds_the_frame(pair: Pair) -> None:
    pair.child.send(pair.address, [b"", frame(1)])
    ((_, (_, payload)),) = pair.heard(pair.server)
    part = np.frombuffer(payload[4:8], np.float32)
    del payload
    gc.collect()
    pair.up.settle()
    assert len(pair.up.sent) == 1 and part[0] == 1
    del part
    pair.up.settle()
    assert not pair.up.sent


def test_no_receiver_can_write_to_a_frame(pair: Pair) -> None:
    pair.child.send(pair.address, [b"", frame(1)])
    ((_, (_, payload)),) = pair.heard(pair.server)
    with pytest.raises((TypeError, ValueError)):
        memoryview(payload)[0] = 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(pair.up.pool.readable, b"x", 0)


def test_a_buffer_that_goes_to_several_peers_in_one_turn_is_copied_once() -> None:
    with closing(Sockets(shares=True)) as server, closing(dialler()) as one, closing(dialler()) as other:
        first = Pair(server, one)
        other.send(first.address, [b"hello"])
        second, deadline = b"", time.monotonic() + LIMIT_S
        while not second or len([x for x in server.memory.links.values() if x.ready]) < 2:
            assert time.monotonic() < deadline
            for peer, _ in [*server.receive(5), *other.receive(5)]:
                second = peer if isinstance(peer, bytes) else second
        values = np.full(COUNT, 1, np.float32)
        receipts = [server.send(peer, [b"", values.data.cast("B")]) for peer in (first.peer, second)]
        pool = server.memory.pool
        assert pool.end == LEAST_BYTES and all(each.lent for each in receipts)
        [*server.receive(0)]
        assert not any(each.lent for each in receipts)  # from now on its owner may change it
        values[:] = 2
        got = []
        for port in (one, other):
            deadline = time.monotonic() + LIMIT_S
            while not (messages := [*port.receive(5)]):
                assert time.monotonic() < deadline
            got += [np.frombuffer(messages[0][1][1], np.float32).copy()]
        assert all(set(each) == {1} for each in got)


def test_without_room_a_frame_goes_through_zeromq(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "POOL_BYTES", 2 * LEAST_BYTES)
    for value in range(4):
        pair.child.send(pair.address, [b"", frame(value)])
    got = list[Message]()
    while len(got) < 4:
        got += pair.heard(pair.server)
    assert [np.frombuffer(payload, np.float32)[0] for _, (_, payload) in got] == [0, 1, 2, 3]
    assert [is_shared(payload) for _, (_, payload) in got] == [True, True, False, False]


def test_without_a_ticket_a_frame_goes_through_zeromq(pair: Pair) -> None:
    pair.up.tickets.clear()
    pair.child.send(pair.address, [b"", frame(1)])
    ((_, (_, payload)),) = pair.heard(pair.server)
    assert not is_shared(payload) and np.frombuffer(payload, np.float32)[0] == 1


def test_pages_that_the_system_lacks_are_no_error(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    pair.child.send(pair.address, [b"", frame(1)])
    ((_, (_, payload)),) = pair.heard(pair.server)
    assert not is_shared(payload) and np.frombuffer(payload, np.float32)[0] == 1


def test_the_end_of_a_peer_is_the_end_of_its_link(pair: Pair) -> None:
    pair.child.send(pair.address, [b"", frame(1)])
    ((_, (_, held)),) = pair.heard(pair.server)
    pair.child.hang_up(pair.address)
    deadline = time.monotonic() + LIMIT_S
    while pair.server.memory.links:
        assert time.monotonic() < deadline
        [*pair.server.receive(5)]
    assert set(np.frombuffer(held, np.float32)) == {1}  # its pages are here as long as somebody reads them
    assert not pair.server.memory.lines


def test_a_reference_to_a_link_that_has_ended_here_is_dropped(pair: Pair) -> None:
    """The peer does not know of the end yet: it dialled anew, or a new link is on its way."""
    pair.child.memory.drop(pair.address)
    pair.server.send(pair.peer, [b"", frame(1)])
    pair.server.send(pair.peer, [b"small"])
    assert [frames for _, frames in pair.heard(pair.child)] == [[b"small"]]


def test_a_server_that_starts_again_has_a_link_again() -> None:
    with closing(dialler()) as child:
        server = Sockets(shares=True)
        pair = Pair(server, child)
        pair.child.send(pair.address, [b"", frame(1)])
        pair.heard(server)
        server.close()
        deadline = time.monotonic() + LIMIT_S
        while pair.child.memory.links:
            assert time.monotonic() < deadline
            [*child.receive(5)]
        number = int(pair.address.rsplit("-", 1)[1])
        with closing(Sockets(shares=True)) as again:
            again.listen(f"tcp://127.0.0.1:{number}")
            pair.server = again
            pair.meet()
            child.send(pair.address, [b"", frame(2)])
            ((_, (_, payload)),) = pair.heard(again)
            assert is_shared(payload) and np.frombuffer(payload, np.float32)[0] == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda n, t, s, o, b: (n + 1, t, s, o, b),
        lambda n, t, s, o, b: (n, TICKETS, s, o, b),
        lambda n, t, s, o, b: (n, t, s, POOL_BYTES - b + 1, b),
        lambda n, t, s, o, b: (n, t, s, 0, POOL_BYTES + 1),
        lambda n, t, s, o, b: (n, t, s, (1 << 64) - 1, b),
        lambda n, t, s, o, b: (n, t, s, o, 0),
    ],
    ids=["another link", "a ticket beyond", "a place beyond", "too long", "an overflow", "empty"],
)
def test_a_reference_to_nothing_is_dropped(pair: Pair, change: Callable[..., tuple[int, ...]]) -> None:
    reference = pair.up.put(frame(1), again=False)
    assert reference is not None
    numbers = REFERENCE.unpack(reference)
    assert pair.down.open(reference) is not None
    assert pair.down.open(REFERENCE.pack(*change(*numbers))) is None
    for wrong in (b"", reference[:-1], reference + b"x"):
        assert pair.down.open(wrong) is None
    pair.child._opened[pair.address, False].send_multipart([b"head", b"", b"nothing"])
    pair.child.send(pair.address, [b"next"])
    ((_, frames),) = pair.heard(pair.server)
    assert bytes(frames[0]) == b"next"


def test_three_frames_without_a_link_reach_the_decoder(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.server.memory, "links", {})
    for third in (b"", b"x" * (REFERENCE.size - 1), b"x" * REFERENCE.size):
        pair.child._opened[pair.address, False].send_multipart([b"head", b"full" if len(third) > 39 else b"", third])
        ((_, frames),) = pair.heard(pair.server)
        assert len(frames) == 3  # wire.decode refuses it


def files(seals: int = shared_memory.SEALS, sizes: tuple[int, int] = (POOL_BYTES, TABLE_BYTES)) -> list[int]:
    made = [os.memfd_create("test", os.MFD_ALLOW_SEALING) for _ in sizes]
    for file, size in zip(made, sizes, strict=True):
        os.ftruncate(file, size)
        fcntl.fcntl(file, shared_memory.ADD_SEALS, seals)
    return made


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        (HELLO.pack(MAGIC, 1) + NAME, lambda: files(seals=0)),
        (HELLO.pack(MAGIC, 1) + NAME, lambda: files(sizes=(4096, TABLE_BYTES))),
        (HELLO.pack(MAGIC, 1) + NAME, lambda: files(sizes=(POOL_BYTES, 8))),
        (HELLO.pack(MAGIC, 1) + NAME, lambda: files()[:1]),
        (HELLO.pack(MAGIC, 1) + NAME, list),
        (HELLO.pack(MAGIC, 1) + NAME, lambda: [*os.pipe()]),
        (HELLO.pack(MAGIC, 1), files),
        (HELLO.pack(b"NRWSMEM0", 1) + NAME, files),
        (b"x", files),
    ],
    ids=[
        "can change",
        "small pool",
        "small table",
        "one file",
        "no file",
        "pipes",
        "no name",
        "another version",
        "short",
    ],
)
def test_a_peer_that_does_not_say_what_it_should_gets_no_link(said: bytes, sent: Callable[[], list[int]]) -> None:
    with closing(Sockets(shares=True)) as server, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(door(local_endpoint(server.listen("tcp://127.0.0.1:0"))))
        line.settimeout(LIMIT_S)
        assert server.memory.pool.end == 0
        given = sent()
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(line, [said], given)
        deadline = time.monotonic() + LIMIT_S
        while not server.memory.lines:
            [*server.receive(5)]
        while server.memory.lines:
            assert time.monotonic() < deadline
            [*server.receive(5)]
        assert line.recv(100) == b"" and not server.memory.links
        assert len(os.listdir("/proc/self/fd")) <= before  # what it has sent is closed
        for file in given:
            os.close(file)


def test_another_user_gets_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "peer_uid", lambda line: os.getuid() + 1)
    with closing(Sockets(shares=True)) as server, closing(dialler()) as child:
        address = local_endpoint(server.listen("tcp://127.0.0.1:0"))
        child.send(address, [b"", bytes(LEAST_BYTES)])
        deadline, heard = time.monotonic() + LIMIT_S, list[Message]()
        while not heard:
            assert time.monotonic() < deadline
            heard = [*server.receive(5)]
            [*child.receive(5)]
        assert not is_shared(heard[0][1][1])
        assert not child.memory.lines and not server.memory.lines


def test_a_port_that_shares_nothing_has_no_door() -> None:
    with closing(Sockets()) as server, closing(dialler()) as child:
        address = local_endpoint(server.listen("tcp://127.0.0.1:0"))
        assert child.send(address, [b"", bytes(LEAST_BYTES)]).dropped == SENT.dropped
        assert not child.memory.lines


def test_a_forked_process_returns_no_frame(pair: Pair) -> None:
    """Its views are copies of the parent's, which may read the frame still."""
    pair.child.send(pair.address, [b"", frame(1)])
    ((_, (_, payload)),) = pair.heard(pair.server)
    forked = os.fork()
    if not forked:
        del payload
        gc.collect()
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0
    pair.up.settle()
    assert len(pair.up.sent) == 1 and np.frombuffer(payload, np.float32)[0] == 1


def test_ranges_that_no_frame_takes_give_their_pages_back() -> None:
    pool = FramePool()

    def taken() -> int:
        return os.fstat(pool.file).st_blocks * 512

    ranges = [pool.put(frame(value), again=False) for value in range(8)]
    assert taken() == 8 * LEAST_BYTES
    for each in ranges:
        assert each is not None
        pool.give_back(each)
    pool.trim()
    assert taken() == 8 * LEAST_BYTES  # they were in use a moment ago
    kept = pool.put(frame(1), again=False)
    assert taken() == 8 * LEAST_BYTES
    pool.trim()
    assert taken() == LEAST_BYTES and kept is not None
    assert set(pool.values[kept.offset : kept.offset + LEAST_BYTES].view(np.float32)) == {1}
    again = [pool.put(frame(value), again=False) for value in range(7)]
    assert all(each is not None for each in again) and taken() == 8 * LEAST_BYTES and pool.end == 8 * LEAST_BYTES


def test_what_a_peer_can_change_is_copied(pair: Pair) -> None:
    pair.child.send(pair.address, [b"head", frame(1)])
    ((_, frames),) = pair.heard(pair.server)
    kept = owned(frames)
    pair.up.pool.values[: 4 * COUNT] = 0  # the peer scribbles
    assert np.frombuffer(frames[1], np.float32)[0] == 0 and set(np.frombuffer(kept[1], np.float32)) == {1}
    assert owned(kept) is kept


SENDS = """
import sys, time
import numpy as np
from narrows.protocols.runtime.network.sockets import Sockets
child = Sockets(known_as=lambda address: b"87654321")
child.send(sys.argv[1], [b"hello"])
while not any(link.ready for link in child.memory.links.values()):
    [*child.receive(5)]
child.send(sys.argv[1], [b"", np.full(1 << 18, 7, np.float32).data.cast("B")])
while True:
    [*child.receive(100)]
"""


def mapped() -> int:
    """Pools that this process maps."""
    with open("/proc/self/maps") as maps:
        return sum("narrows-frames" in line for line in maps)


def test_a_killed_sender_leaves_its_frames_and_nothing_else() -> None:
    with closing(Sockets(shares=True)) as server:
        address = local_endpoint(server.listen("tcp://127.0.0.1:0"))
        assert server.memory.pool.end == 0  # its own is mapped
        before = mapped()
        sender = subprocess.Popen([sys.executable, "-c", SENDS, address])
        try:
            heard, deadline = list[Message](), time.monotonic() + 6 * LIMIT_S
            while not any(len(frames) == 2 for _, frames in heard):
                assert time.monotonic() < deadline
                heard += [*server.receive(50)]
            payload = heard[-1][1][1]
            assert is_shared(payload)
        finally:
            sender.send_signal(signal.SIGKILL)
            sender.wait()
        while server.memory.links:
            assert time.monotonic() < deadline
            [*server.receive(50)]
        assert set(np.frombuffer(payload, np.float32)) == {7}
        del payload, heard
        gc.collect()
        assert mapped() <= before


def test_nobody_shares_memory_with_a_worker_that_peers_dial() -> None:
    """Peers of gossip go over TCP. A stranger could change an offer there after it was checked: a worker copies none."""
    link = MemberLink("tcp://127.0.0.1:1", "token", "here", b"")
    try:
        link.listen()
        deadline = time.monotonic() + LIMIT_S
        while not link.member.address:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        _, port = parse_address("", link.member.address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, pytest.raises(ConnectionRefusedError):
            line.connect(door(local_endpoint(port)))
    finally:
        link.close()


@pytest.mark.parametrize("returned", ["nothing", "before it was read", "the sequence of another frame", "any number"])
def test_what_a_peer_says_of_its_frames_frees_none_of_another_peer(returned: str) -> None:
    """One of two peers writes into its table what it likes. The frames of the other one, in the same pool, arrive and stay."""
    with closing(Sockets(shares=True)) as server, closing(dialler()) as one, closing(dialler()) as other:
        first = Pair(server, one)
        second = Pair(server, other, first.address)
        down, hostile = first.down, first.up.own
        held = list[Buffer]()
        for turn in range(40):
            for peer in (first.peer, second.peer):
                server.send(peer, [b"", values := frame(turn)])
            sequence = down.sequence
            if returned != "nothing":
                hostile[:] = {"before it was read": sequence, "any number": turn}.get(returned, sequence - 1)
            ((_, (_, payload)),) = second.heard(other)
            assert bytes(payload) == bytes(values)
            held = [*held, payload][-3:]
            assert [int(np.frombuffer(each, np.float32)[-1]) for each in held] == [*range(max(0, turn - 2), turn + 1)]
        assert returned != "nothing" or (len(down.sent) == 40 and len(second.down.sent) < 8)


def test_a_reference_that_comes_again_is_another_view_of_the_same_bytes(pair: Pair) -> None:
    """A sender that uses a ticket again, or names bytes twice, loses count of its own frames alone."""
    reference = pair.up.put(frame(1), again=False)
    assert reference is not None
    number, ticket, sequence, offset, size = REFERENCE.unpack(reference)
    views = [
        pair.down.open(reference),
        pair.down.open(REFERENCE.pack(number, ticket, sequence + 9, offset + 4, size - 4)),
    ]
    assert [bytes(each) for each in views if each is not None] == [bytes(frame(1)), bytes(frame(1))[4:]]
    del views
    gc.collect()
    pair.up.settle()
    assert int(pair.down.own[ticket]) in (sequence, sequence + 9)
    pair.child.send(pair.address, [b"", frame(2)])
    ((_, (_, payload)),) = pair.heard(pair.server)
    assert set(np.frombuffer(payload, np.float32)) == {2}
