"""A node's tunnel to its relay: peers reach its socket, and the relay may be lost, absent, or another."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from kit.one_port import ended, heard, one_port
from kit.processes import until
from kit.relays import NAME, SECRET, NodeRelayThread, wish

from narrows.protocols.addresses import at_relay, by_proxy, is_address, parted, reached_by
from narrows.protocols.errors import AuthenticationError, NarrowsError, UnreachableError
from narrows.protocols.gossip.relay_ticket import node_key
from narrows.protocols.runtime.network import reverse_tunnel, socks_dialler
from narrows.protocols.runtime.network.reverse_tunnel import PROVES, SPARES, ReverseTunnel
from narrows.protocols.runtime.network.socks_dialler import SocksDialler
from narrows.ps.process import port_relay
from narrows.ps.relay import node_relay

KEY = node_key(SECRET, NAME)
PUBLIC = "a" * 64


class Node:
    """A socket that echoes, behind a tunnel. `relay`: the address of the relay."""

    def __init__(self, relay: str, key: str = KEY, limit_s: float = 10.0) -> None:
        self.echo = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        self.told: list[str] = []
        self.failed: list[NarrowsError] = []
        port = self.echo.getsockname()[1]
        self.tunnel = ReverseTunnel(relay, "127.0.0.1", NAME, key, port, limit_s, self.told.append, self.failed.append)

    def _accept(self) -> None:
        try:
            while True:
                line, _ = self.echo.accept()
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()
        except OSError:
            pass

    def _answer(self, line: socket.socket) -> None:
        with line:
            while piece := line.recv(1 << 16):
                line.sendall(piece)

    def close(self) -> None:
        self.tunnel.close()
        self.echo.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reverse_tunnel, "RETRY_S", 0.05)
    monkeypatch.setattr(node_relay, "BEAT_S", 0.05)
    monkeypatch.setattr(port_relay, "LINGER_S", 0.2)


@pytest.fixture
def relay() -> Iterator[NodeRelayThread]:
    made = NodeRelayThread()
    yield made
    made.close()


def echoed(relay: NodeRelayThread, said: bytes) -> bytes:
    with relay.peer() as peer:
        assert heard(peer, 2) == b"\x05\x00"
        heard(peer, 8)
        peer.sendall(said)
        return heard(peer, len(said))


def registered(relay: NodeRelayThread) -> bool:
    node = relay.relay.nodes.get(NAME)
    return node is not None and len(node.spares) == SPARES


def test_peers_reach_the_socket_of_a_node_and_it_knows_their_bytes(relay: NodeRelayThread) -> None:
    with closing(Node(relay.address)) as node:
        until(lambda: registered(relay), "the node to register")
        for number in range(5):  # more than there are spare connections
            assert echoed(relay, b"%d" % number * 1000) == b"%d" % number * 1000
        until(lambda: node.tunnel.peer_bytes.total == 2 * 5 * 1000, "the count")
        until(lambda: registered(relay), "spare connections")
        assert not node.told and not node.failed
    until(lambda: not relay.relay.nodes or not relay.relay.nodes[NAME].there, "the end of its registration")


def test_a_relay_that_is_lost_is_dialled_until_it_is_back(relay: NodeRelayThread) -> None:
    with closing(Node(relay.address)) as node:
        until(lambda: registered(relay), "the node to register")
        assert echoed(relay, b"x" * 100) == b"x" * 100
        until(lambda: node.tunnel.peer_bytes.total == 200, "the count")
        relay.close()
        until(lambda: node.told, "the loss to be told")
        again = NodeRelayThread(port=relay.port)
        try:
            until(lambda: registered(again), "the node to register again")
            assert echoed(again, b"y" * 30) == b"y" * 30
            until(lambda: node.tunnel.peer_bytes.total == 260, "both counts together")
        finally:
            again.close()
        assert node.told[:2] == [
            f"the relay at {relay.address} does not answer; this worker dials it again and again",
            f"the relay at {relay.address} answers again",
        ]
        assert not node.failed


def registers(listener: socket.socket, number: bytes) -> socket.socket:
    """Take a registration in the place of a relay."""
    line, _ = listener.accept()
    assert heard(line, 3) == bytes((5, 1, PROVES))
    line.sendall(bytes((5, PROVES)) + bytes(16))
    heard(line, len(wish(NAME, 2)) + 32)
    line.sendall(bytes((5, 0, 0, 1)) + number)
    return line


def test_counts_that_come_late_are_no_new_ones() -> None:
    """As after a node was stopped for a while: two connections have all that the relay has sent since."""

    def counted(size: int) -> bytes:
        return bytes((5, 0x80, 0, 1)) + size.to_bytes(6, "big")

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        node = stack.enter_context(closing(Node(f"tcp://127.0.0.1:{listener.getsockname()[1]}")))
        first, second = (registers(listener, b"number") for _ in range(2))
        first.sendall(counted(100) + counted(110))
        until(lambda: node.tunnel.peer_bytes.total == 110, "the count")
        second.sendall(counted(100) + counted(105))
        first.close()  # the other thread has read what came before its next registration
        with registers(listener, b"number") as third:
            third.sendall(counted(111))
            until(lambda: node.tunnel.peer_bytes.total == 111, "the count")
        second.close()
        with registers(listener, b"second") as fourth, registers(listener, b"second"):
            fourth.sendall(counted(5))
            until(lambda: node.tunnel.peer_bytes.total == 116, "both counts")


def test_a_silent_relay_is_dialled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a NAT has forgotten the connection: no end of it arrives."""
    monkeypatch.setattr(reverse_tunnel, "SILENT_S", 0.3)
    monkeypatch.setattr(node_relay, "BEAT_S", 1e9)
    relay = NodeRelayThread()
    try:
        with closing(Node(relay.address)):
            until(lambda: registered(relay), "the node to register")
            first = set(relay.relay.nodes[NAME].spares)
            until(lambda: registered(relay) and not first & set(relay.relay.nodes[NAME].spares), "other connections")
    finally:
        relay.close()


def test_a_proof_that_is_refused_ends_the_node(relay: NodeRelayThread) -> None:
    with closing(Node(relay.address, node_key("5f" * 32, NAME))) as node:
        until(lambda: node.failed, "the refusal")
        assert isinstance(node.failed[0], AuthenticationError) and len(node.failed) == 1
        assert "its --key is not the --relay-key of the server" in str(node.failed[0])
        time.sleep(0.2)
        assert not relay.relay.count and len(node.failed) == 1


def test_a_refusal_of_a_relay_that_had_taken_the_node_does_not_end_it(relay: NodeRelayThread) -> None:
    with closing(Node(relay.address)) as node:
        until(lambda: registered(relay), "the node to register")
        relay.close()
        other = NodeRelayThread(port=relay.port, secret="5f" * 32)
        time.sleep(0.3)
        other.close()
        assert not node.failed
        third = NodeRelayThread(port=relay.port)
        try:
            until(lambda: registered(third), "the node to register")
        finally:
            third.close()


def test_an_absent_relay_is_named_within_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with closing(Node(address, limit_s=0.2)) as node:
        until(lambda: node.failed, "the error")
        assert isinstance(node.failed[0], UnreachableError) and len(node.failed) == 1
        assert str(node.failed[0]).startswith(f"{address}: no relay answers there (Connection refused): start")


def test_what_is_no_relay_is_named() -> None:
    """The one port of a server speaks SOCKS too. Only under gossip it is a relay."""
    with closing(one_port({})) as other, closing(Node(f"tcp://127.0.0.1:{other.port}", limit_s=0.2)) as node:
        until(lambda: node.failed, "the error")
        assert isinstance(node.failed[0], UnreachableError) and "this is no relay" in str(node.failed[0])


def test_peers_of_its_own_network_need_no_relay(relay: NodeRelayThread) -> None:
    with closing(Node(relay.address)) as node:
        until(lambda: registered(relay), "the node to register")
        host, _, port = node.tunnel.near.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as peer:
            peer.sendall(b"\x05\x01\x00" + wish(NAME) + b"hello")
            assert heard(peer, 12)[:4] == b"\x05\x00\x05\x00" and heard(peer, 5) == b"hello"
        for said in (b"\xff" + bytes(8), b"\x05\x01\x00" + wish("node-" + "0" * 32), b"\x05\x02\x00\x01" + wish(NAME)):
            with socket.create_connection((host, int(port)), 10) as stranger:
                stranger.sendall(said)
                assert ended(stranger)
        assert relay.relay.relayed_bytes == 0


def test_strangers_in_its_own_network_have_a_bound(relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reverse_tunnel, "NEAR_MAX", 2)
    monkeypatch.setattr(reverse_tunnel, "NEAR_S", 0.3)
    with closing(Node(relay.address)) as node, ExitStack() as stack:
        host, _, port = node.tunnel.near.rpartition(":")
        lines = [stack.enter_context(socket.create_connection((host, int(port)), 10)) for _ in range(5)]
        assert [line.recv(1) for line in lines[2:]] == [b""] * 3  # at once
        assert [line.recv(1) for line in lines[:2]] == [b""] * 2  # after NEAR_S
        until(lambda: echoed(relay, b"x") == b"x", "the relay to lead to the node")


def test_a_dialler_asks_in_the_nodes_network_first_and_then_the_relay(
    relay: NodeRelayThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socks_dialler, "NEAR_S", 0.2)
    with closing(Node(relay.address)) as node, socket.create_server(("127.0.0.1", 0)) as other:
        until(lambda: registered(relay), "the node to register")
        said: list[bytes] = []

        def echo_at(near: str) -> bytes:
            with closing(SocksDialler(f"127.0.0.1:{relay.port}", NAME, near)) as dialler:
                line = dialler._reached()
                with line:
                    line.sendall(b"hello")
                    said.append(heard(line, 5))
                    return said[-1]

        assert echo_at(node.tunnel.near) == b"hello" and relay.relay.relayed_bytes == 0
        # Another host, which has the same private address here: it takes the connection, and says nothing.
        assert echo_at(f"127.0.0.1:{other.getsockname()[1]}") == b"hello"
        until(lambda: relay.relay.relayed_bytes == 10, "the count")
        began = time.monotonic()
        dialler = SocksDialler(f"127.0.0.1:{relay.port}", NAME, f"127.0.0.1:{other.getsockname()[1]}")
        with closing(dialler):
            dialler._reached().close()
            assert time.monotonic() - began >= 0.2
            began = time.monotonic()
            dialler._reached().close()  # it does not ask there again so soon
            assert time.monotonic() - began < 0.2


@pytest.mark.parametrize(("address", "valid"), [
    (f"socks5://10.0.0.1:5555/{NAME}@192.168.0.2:4000", True),
    (f"socks5://10.0.0.1:5555/{NAME}@192.168.0.2:4000/{PUBLIC}", True),
    (f"socks5://[::1]:5555/{NAME}@[fe80::1%eth0]:4000/{PUBLIC}", True),
    (f"socks5://10.0.0.1:5555/{NAME}", False),
    (f"socks5:///{NAME}@192.168.0.2:4000", False),  # its relay is at the server: not before `reached_by`
    (f"socks5://10.0.0.1:0/{NAME}@192.168.0.2:4000", False),
    (f"socks5://10.0.0.1:5555/{NAME}@192.168.0.2:99999", False),
    (f"socks5://10.0.0.1:5555/{NAME}@*:4000", False),
    (f"socks5://10.0.0.1:5555/{NAME}x@192.168.0.2:4000", False),
    ("socks5://10.0.0.1:5555/shard-1", False),
    ("socks5://10.0.0.1:5555/localhost@192.168.0.2:4000", False),
])  # fmt: skip
def test_addresses_of_nodes(address: str, valid: bool) -> None:
    assert is_address(address) == valid


def test_parts_of_an_address() -> None:
    made = at_relay("", NAME, "192.168.0.2:4000")
    found = reached_by(f"{made}/{PUBLIC}", "10.0.0.1:5555")
    assert parted(found) == (f"socks5://10.0.0.1:5555/{NAME}@192.168.0.2:4000", PUBLIC)
    assert by_proxy(parted(found)[0]) == ("10.0.0.1:5555", NAME, "192.168.0.2:4000")
    alone = at_relay("tcp://10.0.0.9:5556", NAME, "192.168.0.2:4000")
    assert reached_by(alone, "10.0.0.1:5555") == alone
    assert reached_by(f"tcp://10.0.0.1:4000/{PUBLIC}", "10.0.0.1:5555") == f"tcp://10.0.0.1:4000/{PUBLIC}"
    assert by_proxy("socks5://10.0.0.1:5555/shard-1") == ("10.0.0.1:5555", "shard-1", "")
