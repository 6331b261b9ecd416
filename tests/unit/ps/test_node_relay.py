"""The relay of a gossip run: who registers, where a peer is led, what is counted, and what it cannot take."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from kit.one_port import code, ended, heard
from kit.processes import until
from kit.relays import NAME, SECRET, NodeRelayThread, met, wish

from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.relay_ticket import NONCE_BYTES, checked, node_key, node_name, proof, proves
from narrows.protocols.runtime.network.reverse_tunnel import PROVES
from narrows.protocols.runtime.network.socks_dialler import SPLICES
from narrows.ps.process import port_relay
from narrows.ps.process.port_relay import NO_COMMAND, NOT_ALLOWED, REFUSED
from narrows.ps.relay import node_relay
from narrows.ps.relay.node_relay import RelayedCount

OTHER = node_name(SECRET, "another worker")
RESET = struct.pack("ii", 1, 0)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeRelayThread]:
    monkeypatch.setattr(port_relay, "LINGER_S", 0.5)
    made = NodeRelayThread()
    yield made
    made.close()


def test_a_ticket_proves_one_name_to_one_nonce() -> None:
    key, nonce = node_key(SECRET, NAME), bytes(NONCE_BYTES)
    given = proof(key, NAME, nonce)
    assert proves(SECRET, NAME, nonce, given)
    assert not proves(SECRET, OTHER, nonce, given)
    assert not proves(SECRET, OTHER, nonce, proof(key, OTHER, nonce))
    assert not proves(SECRET, NAME, bytes(NONCE_BYTES - 1) + b"\x01", given)
    assert not proves("5f" * 32, NAME, nonce, given)
    assert node_name("5f" * 32, "a worker") != NAME != OTHER


def test_a_ticket_that_is_none_is_refused() -> None:
    key = node_key(SECRET, NAME)
    for relay in ("", "tcp://10.0.0.1:5556", "tcp://[::1]:5556"):
        assert checked((NAME, key, relay)) == (NAME, key, relay)
    for ticket in ((NAME,), (NAME, key), (NAME, key, "", ""), ("node-x", key, ""), (NAME, "k", ""), (NAME, key + "0", ""),
                   (NAME, key, "there"), (NAME, key, "tcp://*:5"), (NAME, key, "tcp://there:0"), (NAME, key, NAME),
                   (NAME, key, f"socks5://10.0.0.1:1/{NAME}@10.0.0.1:1"), ("localhost", key, "")):  # fmt: skip
        with pytest.raises(RemoteProtocolError, match="the server sent a ticket"):
            checked(ticket)


@pytest.mark.parametrize("splices", [SPLICES, False])
def test_a_peer_is_led_to_the_node_and_bytes_go_both_ways_as_they_are(
    splices: bool, relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_relay, "SPLICES", splices)
    up, down = (random.Random(seed).randbytes(5_000_000) for seed in (1, 2))
    got: dict[str, bytes] = {}
    with relay.registered() as node, relay.registered(OTHER) as other, relay.peer() as peer:
        assert met(node) and code(peer) == 0

        def take(of: socket.socket, name: str) -> None:
            got[name] = heard(of, len(up))

        threads = [threading.Thread(target=each.sendall, args=(what,)) for each, what in ((peer, up), (node, down))]
        threads += [threading.Thread(target=take, args=(each, name)) for each, name in ((node, "up"), (peer, "down"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        until(lambda: relay.relay.relayed_bytes == len(up) + len(down), "the count")
        other.setblocking(False)
        with suppress(BlockingIOError):
            assert other.recv(1) == b"\x05"  # an answer that says that it waits
    assert got == {"up": up, "down": down}


def test_a_node_hears_how_many_bytes_went_to_it(relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_relay, "BEAT_S", 0.05)
    with relay.registered() as taken, relay.peer() as peer, relay.registered(OTHER) as other:
        assert met(taken) and code(peer) == 0
        with relay.registered() as spare:
            peer.sendall(b"x" * 1000)
            assert heard(taken, 1000) == b"x" * 1000
            taken.sendall(b"y" * 500)
            assert heard(peer, 500) == b"y" * 500
            for of, count in ((spare, 1500), (other, 0)):
                seen = -1
                while seen < count:
                    answer = heard(of, 10)
                    assert answer[:4] == b"\x05\x80\x00\x01"
                    seen = int.from_bytes(answer[4:], "big")
                assert seen == count
            peer.close()
            assert ended(taken)
            taken.close()
            until(lambda: int.from_bytes(heard(spare, 10)[4:], "big") == 1500, "the count of an ended stream")


@pytest.mark.parametrize("forged", [
    lambda nonce: bytes(32),
    lambda nonce: proof(node_key(SECRET, OTHER), NAME, nonce),  # a member's own key, for another's name
    lambda nonce: proof(node_key("5f" * 32, NAME), NAME, nonce),  # of another relay
    lambda nonce: proof(node_key(SECRET, NAME), NAME, bytes(NONCE_BYTES)),  # of an earlier connection
])  # fmt: skip
def test_nobody_takes_a_name_without_its_key(forged: object, relay: NodeRelayThread) -> None:
    with relay.registered() as node:
        stranger, answered = relay.node(prove=forged)  # type: ignore[arg-type]
        with stranger, relay.peer() as peer:
            assert answered == NOT_ALLOWED and ended(stranger)
            assert met(node) and code(peer) == 0
            peer.sendall(b"for the node")
            assert heard(node, 12) == b"for the node"


def test_the_proof_of_a_name_that_is_none_registers_nothing(relay: NodeRelayThread) -> None:
    for name in ("shard-0", "page", "localhost", "node-" + "g" * 32, NAME + "0", ""):
        stranger, answered = relay.node(name)
        with stranger:
            assert answered == NOT_ALLOWED and ended(stranger)
    assert not relay.relay.nodes


def test_it_leads_nowhere_but_to_registered_nodes(relay: NodeRelayThread) -> None:
    outside = socket.create_server(("127.0.0.1", 0))
    outside.setblocking(False)
    for name in (OTHER, "127.0.0.1", "localhost", "shard-0", "page", "", "x" * 255):
        with relay.registered(), relay.peer(name) as peer:
            assert code(peer) == NOT_ALLOWED and ended(peer)
    for first in (b"\xff" + bytes(8) + b"\x7f\x03", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"):
        with relay.dial(first) as stranger:
            assert ended(stranger)
    with relay.dial(bytes((5, 1, PROVES))) as node:  # CONNECT and UDP where only a registration may come
        heard(node, 2 + NONCE_BYTES)
        node.sendall(wish("127.0.0.1", 1))
        assert code(node) == NO_COMMAND and ended(node)
    with pytest.raises(BlockingIOError):
        outside.accept()
    outside.close()


def test_a_request_may_come_byte_by_byte(relay: NodeRelayThread) -> None:
    with relay.dial() as node:
        for byte in (5, 1, PROVES):
            node.sendall(bytes((byte,)))
        assert heard(node, 2) == bytes((5, PROVES))
        given = proof(node_key(SECRET, NAME), NAME, heard(node, NONCE_BYTES))
        for byte in wish(NAME, 2) + given:
            node.sendall(bytes((byte,)))
        assert code(node) == 0
        with relay.peer() as peer:
            assert met(node) and code(peer) == 0


def test_a_peer_waits_for_the_next_spare_connection(relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_relay, "WAITING_MAX", 2)
    with relay.registered() as first, relay.peer() as one, ExitStack() as stack:
        assert met(first) and code(one) == 0
        waiting = [stack.enter_context(relay.peer()) for _ in range(2)]
        until(lambda: len(relay.relay.nodes[NAME].waiting) == 2, "both to wait")
        with relay.peer() as third:
            assert code(third) == REFUSED and ended(third)
        for each in waiting:
            node = stack.enter_context(relay.registered())
            assert met(node) and code(each) == 0
            each.sendall(b"mine")
            assert heard(node, 4) == b"mine"


def test_a_peer_waits_only_so_long(relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with relay.registered() as first, relay.peer() as one:
        assert met(first) and code(one) == 0
        monkeypatch.setattr(port_relay, "FIRST_S", 0.2)
        with relay.peer() as late:
            assert ended(late)
        until(lambda: not relay.relay.nodes[NAME].waiting, "nobody to wait")
        one.sendall(b"still")
        assert heard(first, 5) == b"still"


def test_a_peer_that_hangs_up_while_it_waits_costs_one_spare_connection(relay: NodeRelayThread) -> None:
    with relay.registered() as first, relay.peer() as one:
        assert met(first) and code(one) == 0
        gone = relay.peer()
        until(lambda: relay.relay.nodes[NAME].waiting, "it to wait")
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        gone.close()
        with relay.registered() as lost, relay.registered() as node, relay.peer() as peer:
            assert ended(lost)
            assert met(node) and code(peer) == 0


def test_the_registration_of_a_dead_node_ends_with_its_connections(relay: NodeRelayThread) -> None:
    node = relay.registered()
    taken = relay.registered()
    with relay.peer() as peer:
        assert met(taken) and code(peer) == 0
        for each in (node, taken):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            each.close()
        assert ended(peer)
    until(lambda: not relay.relay.nodes[NAME].there, "its end")
    with relay.peer() as peer:
        assert code(peer) == NOT_ALLOWED
    with relay.registered() as again, relay.peer() as peer:  # and it may come back
        assert met(again) and code(peer) == 0


def test_names_without_connections_are_forgotten_and_their_bytes_stay_counted(
    relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with relay.registered() as node, relay.peer() as peer:
        assert met(node) and code(peer) == 0
        peer.sendall(b"x" * 10)
        assert heard(node, 10) == b"x" * 10
    monkeypatch.setattr(node_relay, "BEAT_S", 0.05)
    until(lambda: not relay.relay.nodes, "it to be forgotten")
    assert relay.relay.relayed_bytes == 10


def test_of_a_name_the_newest_spare_connections_are_kept(
    relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_relay, "SPARES_MAX", 3)
    with ExitStack() as stack:
        nodes = [stack.enter_context(relay.registered()) for _ in range(5)]
        assert ended(nodes[0]) and ended(nodes[1])
        peer = stack.enter_context(relay.peer())
        assert met(nodes[4]) and code(peer) == 0  # the newest: an old one may be forgotten by a NAT
        assert len(relay.relay.nodes[NAME].spares) == 2


def test_names_have_a_bound(relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_relay, "NODES_MAX", 2)
    with relay.registered(), relay.registered(OTHER), relay.registered():
        third, answered = relay.node(node_name(SECRET, "a third"))
        with third:
            assert answered == REFUSED and ended(third)


def test_a_node_that_speaks_before_a_peer_is_there_is_ended(relay: NodeRelayThread) -> None:
    with relay.registered() as node:
        node.sendall(b"x")
        assert ended(node)
    until(lambda: not relay.relay.count, "its end")


def test_half_a_registration_is_ended(relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_relay, "FIRST_S", 0.2)
    for more in (b"", wish(NAME, 2)[:-1], wish(NAME, 2) + bytes(31)):
        with relay.dial(bytes((5, 1, PROVES)) + more) as node:
            assert ended(node)
    until(lambda: not relay.relay.count, "their end")
    assert not relay.relay.nonces and relay.told == [
        "a connection to the one port was ended: 0.2 s without a whole request; more of them are only counted"
    ]


def test_strangers_end_before_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_relay, "LINGER_S", 0.5)
    relay = NodeRelayThread(most=6)
    try:
        with relay.registered() as node, ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(relay.dial())
            until(lambda: relay.relay.ended["too many connections"] >= 15, "their end")
            with relay.peer() as peer:
                assert met(node) and code(peer) == 0
    finally:
        relay.close()


def test_its_end_ends_all_connections() -> None:
    relay = NodeRelayThread()
    with relay.registered() as node, relay.registered() as spare, relay.peer() as peer:
        assert met(spare) and code(peer) == 0
        threading.Thread(target=relay.close).start()
        assert ended(node)
        peer.sendall(b"last")
        assert heard(spare, 4) == b"last"  # what is under way has its time
        assert ended(peer) and ended(spare)
    relay.close()


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_change_nothing_for_a_node(seed: int, relay: NodeRelayThread) -> None:
    draw = random.Random(seed)
    with relay.registered() as node:
        for _ in range(25):
            said = bytes((5, 1, draw.choice((PROVES, 0, 1))))
            request = bytearray(wish(NAME, 2) + draw.randbytes(32))
            for _ in range(draw.randrange(4)):
                request[draw.randrange(len(request))] = draw.randrange(256)
            with relay.dial(said) as stranger, suppress(ConnectionError):
                stranger.sendall(bytes(request[: draw.randrange(len(request))]) + draw.randbytes(draw.randrange(64)))
                if draw.random() < 0.5:
                    stranger.shutdown(socket.SHUT_WR)
                    assert ended(stranger)
        with relay.peer() as peer:
            assert met(node) and code(peer) == 0
    assert relay.thread.is_alive()


def test_the_count_of_all_bytes_is_told_as_it_grows_and_at_the_end(relay: NodeRelayThread) -> None:
    told: list[dict[str, object]] = []
    count = RelayedCount(relay.relay, told.append, 0.0)
    count.turn()
    count.end()
    assert not told
    with relay.registered() as node, relay.peer() as peer:
        assert met(node) and code(peer) == 0
        peer.sendall(b"x" * 20_000)
        assert len(heard(node, 20_000)) == 20_000
        until(lambda: relay.relay.relayed_bytes == 20_000, "the count")
        count.turn()
        count.turn()
        assert told == [{"bytes": 20_000, "nodes": 1}]
    until(lambda: not relay.relay.nodes[NAME].streams, "its end")
    count.end()
    assert told[1:] == [{"bytes": 20_000, "nodes": 0, "text": "0.02 MB went through the relay"}]
