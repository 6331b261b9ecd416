"""A `PortRelay` in a thread of this process, and connections that a peer makes to it by hand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Generic, TypeVar

from narrows.protocols.addresses import shard_name
from narrows.protocols.runtime.network.socks_dialler import asked
from narrows.ps.process.port_relay import PortRelay

DIRECTLY = -1  # no CONNECT: a shard's own port, or shard 0 at the one port
DIAL_S = 10.0

R = TypeVar("R", bound=PortRelay)


def dialled(port: int, shard: int = DIRECTLY) -> socket.socket:
    """Connect to a port of this machine. `shard`: what to ask the one port for."""
    made = socket.create_connection(("127.0.0.1", port), DIAL_S)
    if shard != DIRECTLY:
        try:
            asked(made, shard_name(shard))
        except BaseException:
            made.close()
            raise
    return made


class RelayThread(Generic[R]):
    """A relay in a thread, from the start until `close`."""

    def __init__(self, relay: R) -> None:
        self.relay = relay
        self.port: int = relay.listener.getsockname()[1]
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

    def close(self) -> None:
        """End the relay, and all its connections. Does nothing a second time."""
        self.over.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


def one_port(doors: Mapping[str, int], most: int = 100) -> RelayThread[PortRelay]:
    """Start the relay of a server with one port.

    Args:
        doors: by name, the port on loopback.
        most: connections at a time.
    """
    relay = PortRelay(socket.create_server(("127.0.0.1", 0), backlog=most), most)
    relay.lead(dict(doors))
    return RelayThread(relay)


def heard(of: socket.socket, size: int) -> bytes:
    """Return the next bytes; fewer than `size` if the connection has ended."""
    found = b""
    while len(found) < size and (piece := of.recv(size - len(found))):
        found += piece
    return found


def code(of: socket.socket) -> int:
    """Return the code of the next answer of SOCKS5; -1: the connection has ended."""
    answer = heard(of, 10)
    return answer[1] if len(answer) == 10 else -1


def ended(of: socket.socket) -> bool:
    """True once the other end has closed or reset the connection."""
    try:
        while of.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
