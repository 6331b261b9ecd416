"""The one port of a server: where a connection leads, that its bytes are moved as they are, and what it cannot take."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from kit.one_port import code, dialled, ended, heard, one_port
from kit.processes import until

from narrows.protocols.runtime.network import curve_auth
from narrows.protocols.runtime.network.sockets import Sockets
from narrows.protocols.runtime.network.socks_dialler import DONE, SPLICES
from narrows.ps.process import port_relay
from narrows.ps.process.port_relay import NO_COMMAND, NO_TYPE, NOT_ALLOWED, PAGE, REFUSED, missing

GREETED = b"\x05\x00"
RESET = struct.pack("ii", 1, 0)


class Place:
    """A relay in a thread, and the servers behind it."""

    def __init__(self, most: int = 100) -> None:
        self.servers = {name: socket.create_server(("127.0.0.1", 0)) for name in ("shard-0", "shard-1", PAGE)}
        for server in self.servers.values():
            server.settimeout(10)
        self.thread = one_port({name: server.getsockname()[1] for name, server in self.servers.items()}, most)
        self.port, self.relay = self.thread.port, self.thread.relay

    def dial(self, said: bytes = b"") -> socket.socket:
        made = dialled(self.port)
        made.sendall(said)
        return made

    def accepted(self, name: str) -> socket.socket:
        made, _ = self.servers[name].accept()
        made.settimeout(10)
        return made

    def close(self) -> None:
        self.thread.close()
        for server in self.servers.values():
            server.close()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(port_relay, "LINGER_S", 0.5)
    made = Place()
    yield made
    made.close()


def wish(name: bytes, command: int = 1, kind: int = 3) -> bytes:
    address = bytes((len(name),)) + name if kind == 3 else name
    return bytes((5, command, 0, kind)) + address + b"\x12\x34"


@pytest.mark.parametrize(("first", "name"), [
    (b"\xff" + bytes(8) + b"\x7f\x03", "shard-0"),  # ZMTP
    (b"\x01\x00\x02\x00x", "shard-0"),  # its version 1
    (b"\x16\x03\x01", "shard-0"),  # anything else is for the shard to refuse
    (b"GET /metrics HTTP/1.1\r\n\r\n", PAGE),
    (b"HEAD / HTTP/1.1\r\n\r\n", PAGE),
])  # fmt: skip
def test_the_first_byte_tells_where_a_connection_leads(first: bytes, name: str, place: Place) -> None:
    with place.dial(first) as client, place.accepted(name) as server:
        assert heard(server, len(first)) == first
        server.sendall(b"answer")
        assert heard(client, 6) == b"answer"


def test_http_without_a_page_is_for_shard_0_to_refuse(place: Place) -> None:
    place.relay.lead({name: port for name, port in place.relay.doors.items() if name != PAGE})
    with place.dial(b"GET / HTTP/1.1\r\n\r\n"), place.accepted("shard-0") as server:
        assert heard(server, 3) == b"GET"


@pytest.mark.parametrize("pieces", [False, True])
def test_connect_names_a_shard(pieces: bool, place: Place) -> None:
    with place.dial() as client:
        for part, answer in ((b"\x05\x02\x01\x00", GREETED), (wish(b"shard-1"), bytes((5, DONE, 0, 1)) + bytes(6))):
            for piece in [bytes((byte,)) for byte in part] if pieces else [part]:
                client.sendall(piece)
            assert heard(client, len(answer)) == answer
        client.sendall(b"\xff and so on")
        with place.accepted("shard-1") as server:
            assert heard(server, 11) == b"\xff and so on"


def test_it_leads_nowhere_else(place: Place) -> None:
    outside = socket.create_server(("127.0.0.1", 0))
    outside.setblocking(False)
    port = outside.getsockname()[1]
    for asked, expected in (
        (wish(b"shard-2"), NOT_ALLOWED),
        (wish(b"127.0.0.1"), NOT_ALLOWED),
        (wish(b"localhost"), NOT_ALLOWED),
        (wish(b""), NOT_ALLOWED),
        (wish(b"\xff" * 255), NOT_ALLOWED),
        (b"\x05\x01\x00\x01\x7f\x00\x00\x01" + port.to_bytes(2, "big"), NO_TYPE),
        (wish(bytes(15) + b"\x01", kind=4), NO_TYPE),
        (wish(b"x", kind=9), NO_TYPE),
        (wish(b"shard-1", command=2), NO_COMMAND),  # BIND
        (wish(b"shard-1", command=3), NO_COMMAND),  # UDP ASSOCIATE
    ):
        with place.dial(b"\x05\x01\x00") as client:
            assert heard(client, 2) == GREETED
            client.sendall(asked)
            assert code(client) == expected, asked
            assert ended(client)
    with place.dial(b"\x05\x01\x02") as client:  # a password alone
        assert heard(client, 2) == b"\x05\xff" and ended(client)
    with pytest.raises(BlockingIOError):
        outside.accept()
    outside.close()


def test_a_shard_that_is_dead_is_refused_and_may_come_back(place: Place) -> None:
    port = place.servers.pop("shard-1")
    address = port.getsockname()
    port.close()
    with place.dial(b"\x05\x01\x00") as client:
        client.sendall(wish(b"shard-1"))
        assert heard(client, 2) == GREETED and code(client) == REFUSED and ended(client)
    place.servers["shard-1"] = socket.create_server(address)
    with place.dial(b"\x05\x01\x00") as client:
        client.sendall(wish(b"shard-1"))
        assert heard(client, 2) == GREETED and code(client) == DONE


def test_a_shard_that_is_dead_is_not_taken_for_one_with_another_key(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 0, which is alive, does not greet in its place."""
    monkeypatch.setattr(curve_auth, "STRANGE_MAX", 2)
    monkeypatch.setattr(curve_auth, "STRANGE_S", 0.1)
    gone = place.servers.pop("shard-1")
    port = gone.getsockname()[1]
    gone.close()
    failed = list[object]()
    with (
        closing(Sockets()) as alive,
        closing(Sockets(failed=lambda *why: failed.append(why))) as dialling,
    ):
        place.relay.lead({"shard-0": alive.listen("tcp://127.0.0.1:0"), "shard-1": port})
        dialling.send(f"socks5://127.0.0.1:{place.port}/shard-1", [b"x"])
        for _ in range(8):
            assert not [*dialling.receive(100)]
    assert not failed


@pytest.mark.parametrize("splices", [SPLICES, False])
def test_bytes_go_both_ways_at_once_as_they_are(splices: bool, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_relay, "SPLICES", splices)
    up, down = (random.Random(seed).randbytes(20_000_000) for seed in (1, 2))
    got: dict[str, bytes] = {}
    with place.dial(b"\xff") as client, place.accepted("shard-0") as server:

        def take(of: socket.socket, name: str, size: int) -> None:
            got[name] = heard(of, size)

        sizes = {"up": 1 + len(up), "down": len(down)}
        threads = [threading.Thread(target=each.sendall, args=(what,)) for each, what in ((client, up), (server, down))]
        threads += [
            threading.Thread(target=take, args=(each, name, sizes[name]))
            for each, name in ((server, "up"), (client, "down"))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert got["up"] == b"\xff" + up and got["down"] == down


def test_a_client_that_has_sent_its_last_byte_still_gets_the_answer(place: Place) -> None:
    with place.dial(b"GET / HTTP/1.0\r\n\r\n") as client, place.accepted(PAGE) as server:
        client.shutdown(socket.SHUT_WR)
        assert ended(server)
        server.sendall(b"late")
        assert heard(client, 4) == b"late"


def test_the_last_bytes_of_a_shard_arrive_though_its_member_goes_on_sending(place: Place) -> None:
    with place.dial(b"\xff") as client, place.accepted("shard-0") as server:
        last = random.Random(3).randbytes(300_000)
        server.sendall(last)
        client.sendall(b"x" * 100_000)  # which nobody reads: the close of the shard is a reset
        until(
            lambda: [each for each in [*place.relay.known] if each.down and each.down.moved == len(last)], "all moved"
        )
        server.close()
        with suppress(ConnectionError):
            client.sendall(b"x" * 100_000)
        assert heard(client, len(last)) == last and ended(client)


def test_a_reset_of_one_end_ends_the_other(place: Place) -> None:
    for one in (0, 1):
        with place.dial(b"\xff") as client, place.accepted("shard-0") as server:
            assert heard(server, 1) == b"\xff"
            first, second = (client, server) if one else (server, client)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            first.close()
            assert ended(second)


def test_who_says_nothing_or_half_a_request_is_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_relay, "FIRST_S", 0.2)
    for said in (b"", b"\x05", b"\x05\x01\x00", b"\x05\x01\x00" + wish(b"shard-1")[:-1]):
        with place.dial(said) as client:
            assert ended(client)
    until(lambda: place.relay.ended == {"0.2 s without a whole request": 4} and not place.relay.count, "their end")


def test_strangers_end_before_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest silent one goes first, then the oldest that has got little. A member, which has got much, stays."""
    monkeypatch.setattr(port_relay, "LINGER_S", 0.5)
    place = Place(most=6)
    try:
        with place.dial(b"\xff") as member, place.accepted("shard-0") as server:
            server.sendall(bytes(port_relay.LITTLE_BYTES))
            assert len(heard(member, port_relay.LITTLE_BYTES)) == port_relay.LITTLE_BYTES
            silent = [place.dial() for _ in range(8)]
            assert all(ended(each) for each in silent[:3])
            speaking = []
            for _ in range(12):
                speaking.append(place.dial(b"\xff"))
                speaking.append(place.accepted("shard-0"))
            assert all(ended(each) for each in (*silent, *speaking[:14]))
            server.sendall(b"still")
            assert heard(member, 5) == b"still"
            for each in (*silent, *speaking):
                each.close()
        until(lambda: place.relay.ended["too many connections"] == 8 - 5 + 5 + 7, "their count")
    finally:
        place.close()


def test_missing_never_reads_into_what_the_shard_is_to_get() -> None:
    whole = b"\x05\x02\x00\x01" + wish(b"shard-1")
    at = 0
    while more := missing(whole[:at]):
        at += more
        assert at <= len(whole)
    assert at == len(whole)
