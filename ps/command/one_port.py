"""The one port of ps-serve --one-port: ps-serve binds it, and a process of its own serves it (ps/process/port_relay.py).

ps-serve keeps the port open while it lives. If the process dies, another one takes the connections that wait; members
dial anew, as after any end of a connection.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping

from narrows.protocols.addresses import ANY_HOSTS, bracketed, shard_name
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.network.connections import BACKLOG
from narrows.protocols.runtime.network.hosts import is_ipv6
from narrows.protocols.runtime.processes.children import ChildProcesses, StartedChild
from narrows.ps.process.port_relay import LINGER_S, LISTENER, PAGE
from narrows.ps.relay.node_relay import SECRET

RELAY = -2  # index of the process, in place of a shard's
SOON_S = 1.0  # a process that lives for less has died at once
SOON_MAX = 5  # of these in a row: the next would die too
END_S = LINGER_S + 3.0  # the process ends within this time


class OnePort:
    """The listener of --one-port, and the process that relays its connections.

    Args:
        host: the host to bind.
        port: the port to bind, 0 for a free one.
        secret: by which nodes of a gossip run may meet here too (node_relay.py), in hex digits; "": none may.

    Raises:
        UsageError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, secret: str = "") -> None:
        self.host, self.secret = host, secret
        family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
        name = "::" if host == "[::]" else "0.0.0.0" if host in ANY_HOSTS else host.strip("[]")
        try:
            where = socket.getaddrinfo(name, port, family, socket.SOCK_STREAM)[0][4]
            self.listener = socket.create_server(where, family=family, backlog=BACKLOG)
            if host == "[::]":  # IPv4 too, as without --one-port
                self.listener.close()
                self.listener = socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=True)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"cannot listen on tcp://{bracketed(name)}:{port}: {why}; is another ps-serve running there?"
            ) from None
        self.port: int = self.listener.getsockname()[1]
        self.doors: dict[str, int] = {}  # by name, the port on loopback
        self.process: StartedChild | None = None
        self.began_s, self.soon = 0.0, 0  # when the process began; processes in a row that have died at once

    @property
    def address(self) -> str:
        return f"tcp://{self.host}:{self.port}"

    def start(self, children: ChildProcesses, env: Mapping[str, str]) -> None:
        """Start the process."""
        module = "narrows.ps.relay.node_relay" if self.secret else "narrows.ps.process.port_relay"
        words, passed = ["-m", module], {LISTENER: self.listener.fileno()}
        self.process = children.start(
            RELAY, words, env, listens={1: "event"}, stdin=True, passed=passed, name="ps-one-port"
        )
        self.began_s = time.monotonic()
        if self.secret:
            self.process.write(json.dumps({SECRET: self.secret}))
        self._tell()

    def lead(self, ports: Mapping[int, int], page: int) -> None:
        """Lead to the shards at these ports on loopback, and to the page at its port; 0: there is none."""
        self.doors = {shard_name(shard): port for shard, port in ports.items()} | ({PAGE: page} if page else {})
        self._tell()

    def _tell(self) -> None:
        if self.process is not None:
            self.process.write(json.dumps(self.doors))

    def died(self) -> bool:
        """Note that the process has ended. True if the next one would die as well."""
        assert self.process is not None
        self.process.close_stdin()
        self.soon = self.soon + 1 if time.monotonic() - self.began_s < SOON_S else 0
        return self.soon >= SOON_MAX

    def close(self) -> None:
        """End the process, once the last bytes have left. Does nothing a second time."""
        self.listener.close()
        if self.process is not None:
            self.process.close_stdin()
            if self.process.wait(END_S) is None:
                self.process.kill()
                self.process.wait()
            self.process = None
