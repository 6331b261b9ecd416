"""A relay in a thread of the test, the node's end of a connection to it, and a peer's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from narrows.protocols.gossip.relay_ticket import NONCE_BYTES, node_key, node_name, proof
from narrows.protocols.runtime.network.reverse_tunnel import PROVES
from narrows.ps.relay.node_relay import NodeRelay

SECRET = "5e" * 32
NAME = node_name(SECRET, "a worker")


class RelayThread:
    """A relay, and what it says of connections that it ends. `port`: 0 takes a free one."""

    def __init__(self, most: int = 200, port: int = 0, secret: str = SECRET) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self.listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.told: list[str] = []
        self.relay = NodeRelay(self.listener, most, secret, self.told.append)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.over.is_set():
            self.relay.turn(0.02)
        self.relay.close()
        while not self.relay.closed:
            self.relay.turn(0.02)
        self.relay.free()

    def dial(self, said: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), 10)
        made.sendall(said)
        return made

    def close(self) -> None:
        """End the relay, and all its connections. Does nothing a second time."""
        self.over.set()
        self.thread.join(10)
        assert not self.thread.is_alive()

    def node(
        self, name: str = NAME, key: str = "", prove: Callable[[bytes], bytes] | None = None
    ) -> tuple[socket.socket, int]:
        """Register. Returns the connection, and the code of the answer. prove: makes the proof of the nonce."""
        made = self.dial(bytes((5, 1, PROVES)))
        assert heard(made, 2) == bytes((5, PROVES))
        nonce = heard(made, NONCE_BYTES)
        given = prove(nonce) if prove is not None else proof(key or node_key(SECRET, name), name, nonce)
        made.sendall(wish(name, 2) + given)
        return made, code(made)

    def registered(self, name: str = NAME) -> socket.socket:
        made, answered = self.node(name)
        assert answered == 0
        return made

    def peer(self, name: str = NAME) -> socket.socket:
        """Ask for a node, and do not wait for the answer."""
        made = self.dial(b"\x05\x01\x00")
        assert heard(made, 2) == b"\x05\x00"
        made.sendall(wish(name))
        return made


def wish(name: str, command: int = 1) -> bytes:
    return bytes((5, command, 0, 3, len(name))) + name.encode() + bytes(2)


def heard(of: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (piece := of.recv(size - len(found))):
        found += piece
    return found


def code(of: socket.socket) -> int:
    """Return the code of the next answer; -1: the connection has ended."""
    answer = heard(of, 10)
    return answer[1] if len(answer) == 10 else -1


def met(node: socket.socket) -> bool:
    """Read the answers to a node that waits. True once a peer is there, False if the connection has ended."""
    while (found := code(node)) == 0x80:
        pass
    return found == 0


def ended(of: socket.socket) -> bool:
    """True once the other end has closed or reset the connection."""
    try:
        while of.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
