"""The door to the network: frames go and come, nothing waits, and what is dropped is counted."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import zmq
from kit.processes import until

from narrows.protocols import messages as m
from narrows.protocols.addresses import is_address, parse_address
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import NS, MemberEffect, Send
from narrows.protocols.errors import UnreachableError, UsageError
from narrows.protocols.runtime.network import curve_auth
from narrows.protocols.runtime.network.hosts import endpoint, own_host, reached, unknown
from narrows.protocols.runtime.network.sockets import (
    BURST,
    FULL,
    NOBODY,
    OPTIONS,
    QUEUE_MESSAGES_MAX,
    SENT,
    ZERO_COPY_BYTES,
    Drops,
    Peer,
    Sockets,
)
from narrows.ps.probe import pairwise
from narrows.ps.probe.messages import ProbeDial
from narrows.ps.probe.tcp_streams import MeasurementError
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.process_lifecycle import totals
from narrows.ps.process.runner import ServerRunner
from narrows.worker.runtime.member_link import MemberLink

LONG_MS = 10_000
CLOSED = "tcp://127.0.0.1:1"
Heard = list[tuple[Peer, list[bytes]]]


@pytest.fixture(autouse=True)
def _what_nobody_takes_need_not_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIONS, zmq.LINGER, 0)


def _hangs_up_once(port: socket.socket, held: list[socket.socket]) -> None:
    """End the first connection in the middle of its handshake; keep the others, and greet nobody."""
    first, _ = port.accept()
    assert first.recv(11)
    first.close()
    with contextlib.suppress(OSError):
        while True:
            held.append(port.accept()[0])


@pytest.fixture
def server() -> Iterator[Sockets]:
    with closing(Sockets()) as made:
        yield made


@pytest.fixture
def child() -> Iterator[Sockets]:
    with closing(Sockets()) as made:
        yield made


def hear(port: Sockets, count: int) -> Heard:
    """The next `count` messages."""
    heard: Heard = []
    deadline = time.monotonic() + LONG_MS / 1000
    while len(heard) < count:
        assert time.monotonic() < deadline, heard
        heard += [(peer, [bytes(frame) for frame in frames]) for peer, frames in port.receive(100)]
    return heard


def test_frames_go_there_and_back(server: Sockets, child: Sockets) -> None:
    address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"
    messages: list[list[bytes]] = [[b"head"], [b"head", b""], [b"head", b"x" * ZERO_COPY_BYTES], [b"", b"x"]]
    for frames in messages:
        assert not child.send(address, frames).dropped
    heard = hear(server, len(messages))
    assert [frames for _, frames in heard] == messages
    ((peer, _), *_) = heard
    for frames in messages:
        assert not server.send(peer, frames).dropped
    assert hear(child, len(messages)) == [(address, frames) for frames in messages]


IPV6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this system has no IPv6")


@IPV6
@pytest.mark.parametrize(("bound", "dialled"), [
    ("[::1]", ["[::1]"]),
    ("[::]", ["[::1]", "127.0.0.1", "localhost"]),  # all of a machine, IPv4 too
    ("0.0.0.0", ["127.0.0.1", "localhost"]),
])  # fmt: skip
def test_frames_go_over_ipv6(bound: str, dialled: list[str], server: Sockets, child: Sockets) -> None:
    port = server.listen(f"tcp://{bound}:0")
    for host in dialled:
        address = f"tcp://{host}:{port}"
        assert not child.send(address, [b"there"]).dropped
        ((peer, frames),) = hear(server, 1)
        assert frames == [b"there"] and not server.send(peer, [b"back"]).dropped
        assert hear(child, 1) == [(address, [b"back"])]


@IPV6
def test_an_address_of_ipv6_has_brackets_wherever_it_goes() -> None:
    assert own_host("[::1]", 1) == own_host("::1", 1) == "[::1]" and own_host("127.0.0.1", 1) == "127.0.0.1"
    assert reached("tcp://[::]:1", "tcp://[::1]:2") == "[::1]"
    with pairwise.open_port("", 0) as listener:  # of ps-probe
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listener.getsockname()[1]), 5.0).close()
    with pytest.raises(MeasurementError, match="Connection refused"):
        pairwise.dial("[::1]", ProbeDial("0" * 32, "", 1, 5.0, True, 0, 1, 1.0), threading.Event())


def test_a_name_that_leads_nowhere_is_named_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Not after the time that a server may take to answer, and not as ports that are closed."""
    assert not unknown("127.0.0.1") and not unknown("[::1]") and not unknown("localhost")
    link = MemberLink("tcp://no.such.host.invalid:5555", "token", "here", b"", Timing(connect_ns=NS // 5))
    why = "this machine knows no host no.such.host.invalid"
    with closing(link), pytest.raises(UnreachableError, match=rf"{why} .*; check the name"):
        until(lambda: link.take(0.1), "the end")
    first, *_ = capfd.readouterr().err.splitlines()
    assert first.startswith(f"ps-worker: tcp://no.such.host.invalid:5555: {why}")


def test_control_has_a_connection_of_its_own(server: Sockets, child: Sockets) -> None:
    address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"
    for control in (False, True, False):
        child.send(address, [b"x"], control=control)
    peers = {peer for peer, _ in hear(server, 3)}
    assert len(peers) == 2
    for peer in peers:
        server.send(peer, [b"y"])
    assert hear(child, 2) == [(address, [b"y"])] * 2
    child.hang_up(address)
    until(lambda: all(server.send(peer, [b"z"]) is NOBODY for peer in peers), "both to be gone")


def test_a_receipt_says_how_long_frames_are_lent(server: Sockets, child: Sockets) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    large = memoryview(bytearray(ZERO_COPY_BYTES))
    receipt = child.send(f"tcp://127.0.0.1:{port}", [b"head", large])  # nobody listens there yet
    assert receipt.lent and not child.send(CLOSED, [b"head", large[:-1]]).lent
    server.listen(f"tcp://127.0.0.1:{port}")
    hear(server, 1)
    until(lambda: not receipt.lent, "the frames to be given back")


def test_what_finds_no_room_is_dropped_and_counted(child: Sockets) -> None:
    told: list[str] = []
    drops = Drops(told.append)
    for _ in range(QUEUE_MESSAGES_MAX):
        drops.note("Push", child.send(CLOSED, [b"x"]))
    assert not told and not drops.counts
    for _ in range(3):
        drops.note("Push", child.send(CLOSED, [b"x"]))
    drops.note("Pull", child.send(CLOSED, [b"head", bytes(ZERO_COPY_BYTES)]))
    assert child.send(CLOSED, [b"x"]) is FULL and child.send(CLOSED, [b"x"], control=True) is SENT
    assert drops.counts == {"Push": 3, "Pull": 1}
    assert [(text.count("(Push)"), text.count("(Pull)"), text.count(FULL.dropped)) for text in told] == [
        (1, 0, 1),
        (0, 1, 1),
    ]


def test_what_is_for_nobody_is_dropped(server: Sockets) -> None:
    server.listen("tcp://127.0.0.1:0")
    assert server.send(b"stranger", [b"x"]) is NOBODY
    assert server.send(b"stranger", [b"x", bytes(ZERO_COPY_BYTES)]) is NOBODY
    told: list[str] = []
    drops = Drops(told.append)
    drops.note("LeaveAck", server.send(b"who has left", [b"x"]))
    assert not told and not drops.counts, "an orderly end drops nothing"


def test_no_peer_has_more_than_its_turn(server: Sockets, child: Sockets) -> None:
    address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"
    for _ in range(BURST + 5):
        child.send(address, [b"x"])
    ((peer, _), *rest) = hear(server, BURST + 5)
    assert len(rest) == BURST + 4
    for _ in range(BURST + 5):
        server.send(peer, [b"y"])
        server.send(peer, [b"y"])
    until(lambda: len(list(child.receive(100))) == BURST, "one turn")


def test_who_stops_listening_loses_nothing(server: Sockets, child: Sockets) -> None:
    address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"
    for number in range(3):
        child.send(address, [b"%d" % number])
    heard = [next(iter(server.receive(LONG_MS)))[1] for _ in range(3)]
    assert [bytes(frames[0]) for frames in heard] == [b"0", b"1", b"2"]


def test_another_thread_may_end_the_wait() -> None:
    with closing(Sockets()) as waits:
        for _ in range(100_000):  # more than any buffer holds
            waits.wake()
        began = time.monotonic()
        thread = threading.Timer(0.1, waits.wake)
        while time.monotonic() < began + 0.05:
            list(waits.receive(0))
        thread.start()
        assert list(waits.receive(LONG_MS)) == [] and time.monotonic() < began + LONG_MS / 2000
        thread.join()
    waits.wake()


def test_a_watched_descriptor_is_heard_until_it_is_not(server: Sockets) -> None:
    ours, theirs = socket.socketpair()
    heard: list[bytes] = []
    with ours, theirs:
        server.watch(ours.fileno(), lambda: heard.append(ours.recv(9)))
        theirs.send(b"a")
        list(server.receive(LONG_MS))
        server.unwatch(ours.fileno())
        theirs.send(b"b")
        list(server.receive(10))
    assert heard == [b"a"]


def test_a_port_in_use_is_named(server: Sockets, child: Sockets) -> None:
    address = f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}"
    with pytest.raises(UsageError, match=f"cannot listen on {address}: .*; is another ps-serve running there"):
        child.listen(address)


# Addresses.


def test_a_server_of_this_machine_is_dialled_by_its_unix_socket(server: Sockets, child: Sockets) -> None:
    port = server.listen("tcp://127.0.0.1:0")
    address = endpoint("127.0.0.1", port)
    assert address.startswith("ipc://") and endpoint("127.0.0.2", port) == f"tcp://127.0.0.2:{port}"
    child.send(address, [b"x"])
    hear(server, 1)
    assert endpoint("localhost", 1) == "tcp://localhost:1"  # nobody is there


def test_a_unix_socket_that_is_taken_costs_no_server(server: Sockets, child: Sockets) -> None:
    """Its name belongs to nobody: any process of this machine may listen there first."""
    told: list[str] = []
    with (
        socket.socket() as free,
        socket.socket(socket.AF_UNIX) as taken,
        closing(Sockets(faulted=told.append)) as other,
    ):
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        taken.bind(f"\0narrows-{port}")
        taken.listen()
        free.close()
        assert other.listen(f"tcp://127.0.0.1:{port}") == port
        assert told == [
            f"the Unix socket beside port {port} is taken (Address already in use): workers here come over TCP"
        ]
        child.send(f"tcp://127.0.0.1:{port}", [b"hello"])
        ((_, frames),) = other.receive(LONG_MS)
        assert [bytes(frame) for frame in frames] == [b"hello"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to listen as another user")
def test_a_unix_socket_of_another_user_is_not_dialled() -> None:
    """The server at the TCP port may be root's, and whoever has the name beside it anybody."""
    source = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.bind('\\0narrows-' + sys.argv[1]);"
        "s.listen(); print('listens', flush=True); sys.stdin.read()"
    )
    port = "1"
    with subprocess.Popen(
        [sys.executable, "-c", source, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "listens\n"
        assert endpoint("127.0.0.1", int(port)) == f"tcp://127.0.0.1:{port}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.getuid", lambda: 65534)
            assert endpoint("127.0.0.1", int(port)) == f"ipc://@narrows-{port}", "that user itself may dial it"
        other.communicate()


@pytest.mark.parametrize(("bound", "host"), [
    ("tcp://10.0.0.7:0", "10.0.0.7"),
    ("tcp://*:5555", "127.0.0.1"),
    ("tcp://0.0.0.0:5555", "127.0.0.1"),
])  # fmt: skip
def test_the_host_by_which_others_reach_this_machine(bound: str, host: str) -> None:
    assert reached(bound, "tcp://127.0.0.1:1") == host
    assert own_host("127.0.0.1", 1) == "127.0.0.1"
    assert reached("tcp://*:1", "tcp://no.such.host.invalid:1") == socket.gethostname()


@pytest.mark.parametrize(
    "address", ["", "here", "tcp://here", "tcp://here:0", "tcp://here:x", "ipc://@here:1", "tcp://:1"]
)
def test_what_is_no_address(address: str) -> None:
    assert not is_address(address) and is_address("tcp://here:1")
    with pytest.raises(UsageError, match="write it as tcp://HOST:PORT"):
        parse_address("--server", address)


# Runners, with a real queue that is full.


def test_a_worker_says_what_it_drops_once(capfd: pytest.CaptureFixture[str]) -> None:
    link = MemberLink(CLOSED, "token", "here", b"")
    some: list[MemberEffect] = [Send(0, m.LeaveAck("x"))] * (QUEUE_MESSAGES_MAX + 7)
    link.call(lambda member, now: some)
    until(lambda: link.drops.counts, "a message to be dropped")
    link.close()
    assert link.drops.counts == {"LeaveAck": 7}
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and said.startswith("ps-worker: a message to a peer was dropped (LeaveAck)")


def test_a_server_says_what_it_drops_once_and_how_much_at_the_end(capfd: pytest.CaptureFixture[str]) -> None:
    config = ServerConfig(0, Settings().validated(), "tcp://127.0.0.1:0", "", 1, "", False, parent=CLOSED)
    with closing(Sockets()) as sockets:
        runner = ServerRunner(config, sockets, sockets.listen(config.bind))
        runner.apply([Send(b"a stranger", m.LeaveAck("x"))] * 2, 0)
        runner.apply([Send(0, m.LeaveAck("x"))] * (QUEUE_MESSAGES_MAX + 3), 0)
        totals(runner)
    first, above, done = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert first["name"] == "dropped" and "(LeaveAck)" in first["values"]["text"] and first["values"]["shard"] == 0
    assert above["name"] == "above" and above["values"]["dropped"] == {"LeaveAck": 3}
    assert done == {"event": "done", "dropped": {"LeaveAck": 3}, "refused": {}, "over": False}


def test_a_peer_that_does_not_greet_delays_no_message_of_another(server: Sockets, child: Sockets) -> None:
    """A killed process has a port as soon as it begins again, and greets later."""
    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as port:
        threading.Thread(target=_hangs_up_once, args=(port, held), daemon=True).start()
        well, silent = (
            f"tcp://127.0.0.1:{server.listen('tcp://127.0.0.1:0')}",
            f"tcp://127.0.0.1:{port.getsockname()[1]}",
        )
        child.send(well, [b"first"])
        child.send(silent, [b"nobody reads this"])
        longest, ends = 0.0, time.monotonic() + 1.5 * curve_auth.PROBE_S
        while (began := time.monotonic()) < ends:
            child.send(well, [b"more"])
            assert [*server.receive(LONG_MS)]
            [*child.receive(10)]
            longest = max(longest, time.monotonic() - began)
        port.shutdown(socket.SHUT_RDWR)
    assert len(held) >= 2, "the greeting was asked for, beside the connection that dialled again"
    for each in held:
        each.close()
    assert longest < curve_auth.PROBE_S / 2


def test_only_views_of_the_store_are_lent(server: Sockets) -> None:
    """Bytes that nobody can change need not be watched until they have left."""

    def state(payload: m.Buffer) -> m.State:
        return m.State(0, 0, 1, 0, 1, 0, 1, True, True, 0, 0, 0, (), 0, 0, payload)

    config = ServerConfig(0, Settings().validated(), "tcp://127.0.0.1:0", "", 1, "", False, parent=CLOSED)
    runner = ServerRunner(config, server, server.listen(config.bind))
    runner.apply([Send(0, state(bytes(ZERO_COPY_BYTES)))], 0)
    assert not runner.lending.any()
    runner.apply([Send(0, state(memoryview(bytearray(ZERO_COPY_BYTES))))], 0)
    assert runner.lending.any()


@pytest.mark.parametrize("name", [b"xxx", b"\xff\xfe", b"~~~~~", b"a" * 40])
def test_a_peer_in_the_open_may_call_itself_what_it_likes(name: bytes, server: Sockets) -> None:
    """ZeroMQ hands on what a peer says of its user as if it had been proved."""
    port = server.listen("tcp://127.0.0.1:0")

    def of(key: bytes, value: bytes) -> bytes:
        return bytes([len(key)]) + key + len(value).to_bytes(4, "big") + value

    said = b"\x05READY" + of(b"Socket-Type", b"DEALER") + of(b"Identity", b"") + of(b"User-Id", name)
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.settimeout(10)
        raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(52, b"\0"))
        greeting = b""
        while len(greeting) < 64:
            greeting += raw.recv(64 - len(greeting))
        raw.sendall(b"\x04" + bytes([len(said)]) + said)
        assert raw.recv(256)
        raw.sendall(b"\x00\x02hi")
        heard = until(lambda: [frames for _, frames in server.receive(50)], "the message", 10)
    assert bytes(heard[0][0]) == b"hi"


@pytest.mark.parametrize("address", [
    *("tcp://h:²", "tcp://*:5", "tcp://a(b:5", "tcp://%:5", "tcp://é:5", "tcp://h:٣", "tcp://h:99999999999", "tcp://-h:5"),
    *("tcp://h:5/", "tcp://h:5/zz", "tcp:// h:5", "tcp://h:5;tcp://i:6", "ipc://x"),
])  # fmt: skip
def test_what_is_no_address_is_known_as_none_and_dialled_by_nobody(address: str, child: Sockets) -> None:
    assert not is_address(address)
    if not address.startswith("ipc"):
        child.send(address, [b"x"])  # dropped or not: it raises nothing


def test_an_address_may_have_a_key() -> None:
    assert is_address(f"tcp://h:5/{'a' * 64}") and is_address("tcp://[::1]:5") and is_address("tcp://a-b.example:65535")
