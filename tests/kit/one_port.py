"""A `PortRelay` in a thread of this process, and connections that a peer makes to it by hand."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping

from narrows.protocols.addresses import shard_name
from narrows.protocols.runtime.network.socks_dialler import asked
from narrows.ps.process.port_relay import PortRelay

DIRECTLY = -1  # no CONNECT: a shard's own port, or shard 0 at the one port
DIAL_S = 10.0


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


class RelayThread:
    """A relay in a thread.

    Args:
        doors: by name, the port on loopback.
        most: connections at a time.
    """

    def __init__(self, doors: Mapping[str, int], most: int = 100) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=most)
        self.port: int = listener.getsockname()[1]
        self.relay = PortRelay(listener, most)
        self.relay.lead(dict(doors))
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
        self.over.set()
        self.thread.join(10)
        assert not self.thread.is_alive()
