"""A relay in a thread of the test, the node's end of a connection to it, and a peer's."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kit.one_port import RelayThread, code, heard
from narrows.protocols.gossip.relay_ticket import NONCE_BYTES, node_key, node_name, proof
from narrows.protocols.runtime.network.reverse_tunnel import PROVES
from narrows.ps.relay.node_relay import NodeRelay

SECRET = "5e" * 32
NAME = node_name(SECRET, "a worker")


class NodeRelayThread(RelayThread[NodeRelay]):
    """A relay of gossip, and what it says of connections that it ends. `port`: 0 takes a free one."""

    def __init__(self, most: int = 200, port: int = 0, secret: str = SECRET) -> None:
        self.told: list[str] = []
        super().__init__(NodeRelay(socket.create_server(("127.0.0.1", port)), most, secret, self.told.append))
        self.address = f"tcp://127.0.0.1:{self.port}"

    def dial(self, said: bytes = b"") -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), 10)
        made.sendall(said)
        return made

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


def met(node: socket.socket) -> bool:
    """Read the answers to a node that waits. True once a peer is there, False if the connection has ended."""
    while (found := code(node)) == 0x80:
        pass
    return found == 0
