"""A relay: nodes of a gossip run that cannot dial each other meet there.

How it works

    peer ── CONNECT node-... ──> NodeRelay <── BIND node-..., proof ── node: spare connections (reverse_tunnel.py)
    peer <═══════ bytes, by splice ═══════> one of the spare connections

1. A node dials the relay a few times, and proves on each connection that it has the key of its name
   (relay_ticket.py). The connection is then a spare one of this name.
2. A peer asks for the name by CONNECT. It gets the newest spare connection, and the relay moves the bytes of both as
   they are. If there is none at the moment, the peer waits for the next.
3. The relay counts the bytes of each node, and tells it the number on its spare connections, one in BEAT_S.

Behind --one-port the same process leads to the shards and the page (`PortRelay`). `ps-serve relay` has no others.

Rules
- It leads to nodes that have proved their names, and nowhere else.
- A node's registration is its connections: it ends with them. Of a name at most SPARES_MAX are spare, the newest.
- At most WAITING_MAX peers wait for a node, and each for FIRST_S. At most NODES_MAX names are known.
- A spare connection is ended for lack of room after those of strangers (`known` of PortRelay).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from narrows.protocols.addresses import NODE
from narrows.protocols.gossip.relay_ticket import NONCE_BYTES, PROOF_BYTES, proves
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.reverse_tunnel import (
    BEAT_S,
    BIND,
    COUNT_AT,
    COUNTED,
    PROVES,
    stays,
)
from narrows.protocols.runtime.network.socks_dialler import ANSWER_BYTES, DONE, NAME, SOCKS
from narrows.protocols.runtime.processes import signals
from narrows.ps.process.main import first_line, may_open_more
from narrows.ps.process.port_relay import (
    LISTENER,
    NO_COMMAND,
    NOT_ALLOWED,
    REFUSED,
    TURN_S,
    PortRelay,
    RelayedConnection,
    answer,
    dropped,
    missing,
    most_connections,
)

SPARES_MAX = 8  # spare connections of one name
WAITING_MAX = 64  # peers that wait for a spare connection of one name
NODES_MAX = 1 << 12  # names with a connection
COUNT_MAX = (1 << 8 * (ANSWER_BYTES - COUNT_AT)) - 1
TOLD_S = BEAT_S  # between two counts of all bytes for ps-serve
SECRET = "secret"  # of the first line of stdin


@dataclass(eq=False)
class RelayedNode:
    """One registered name.

    Args:
        name: of the node.
        spares: its spare connections, the oldest first.
        waiting: peers that wait for the next, the oldest first.
        streams: peers' connections to it.
        number: of this count of its bytes, by which the node knows it.
        moved_bytes: of its streams that have ended, both ways.
        empty: it had no connection at the last beat.
    """

    name: str
    spares: OrderedDict[RelayedConnection, None] = field(default_factory=OrderedDict)
    waiting: OrderedDict[RelayedConnection, None] = field(default_factory=OrderedDict)
    streams: set[RelayedConnection] = field(default_factory=set)
    number: bytes = field(default_factory=lambda: os.urandom(ANSWER_BYTES - COUNT_AT))
    moved_bytes: int = 0
    empty: bool = False

    @property
    def there(self) -> bool:
        """True while the node has a connection to the relay."""
        return bool(self.spares or self.streams)

    @property
    def count(self) -> int:
        """The bytes of all its streams, both ways."""
        return self.moved_bytes + sum(map(moved, self.streams))

    def forget(self, connection: RelayedConnection) -> None:
        """Drop a connection that has ended."""
        self.spares.pop(connection, None)
        self.waiting.pop(connection, None)
        if connection in self.streams:
            self.streams.remove(connection)
            self.moved_bytes += moved(connection)

    def beat(self) -> bool:
        """Note a beat. True if the node had no connection at this one and at the one before."""
        gone, self.empty = self.empty and not self.there, not self.there
        return gone


def moved(stream: RelayedConnection) -> int:
    """Return the bytes of a stream so far, both ways."""
    return sum(flow.moved for flow in (stream.up, stream.down) if flow is not None)


class NodeRelay(PortRelay):
    """A `PortRelay` at which nodes of a gossip run meet.

    Args:
        listener: the port, bound and listening.
        most: connections at a time.
        secret: shared with the coordinators whose nodes meet here, in hex digits.
        tell: as `PortRelay`.
    """

    def __init__(self, listener: socket.socket, most: int, secret: str, tell: Callable[[str], None] = dropped) -> None:
        super().__init__(listener, most, tell)
        self.secret = secret
        self.nonces: dict[RelayedConnection, bytes] = {}  # of connections that are to prove a name
        self.nodes: dict[str, RelayedNode] = {}
        self.node_of: dict[RelayedConnection, RelayedNode] = {}
        self.past_bytes = 0  # of nodes that are no more
        self.beat_s = time.monotonic() + BEAT_S  # when the spare connections get the next answer

    @property
    def relayed_bytes(self) -> int:
        """The bytes of all nodes, both ways."""
        return self.past_bytes + sum(node.count for node in self.nodes.values())

    def close(self) -> None:
        super().close()
        for node in [*self.nodes.values()]:
            for spare in [*node.spares]:
                self._end(spare)

    def turn(self, limit_s: float) -> None:
        super().turn(limit_s)
        if (now_s := time.monotonic()) >= self.beat_s:
            self.beat_s = now_s + BEAT_S
            for node in [*self.nodes.values()]:
                self._beat(node)

    def _beat(self, node: RelayedNode) -> None:
        """Tell a node how many bytes were relayed for it."""
        told = answer(COUNTED)[:COUNT_AT] + min(node.count, COUNT_MAX).to_bytes(ANSWER_BYTES - COUNT_AT, "big")
        for spare in [*node.spares]:
            try:
                whole = spare.client.send(told) == len(told)
            except OSError:  # it is gone
                whole = False
            if not whole:  # it reads nothing
                self._end(spare)
        if node.beat():
            self.past_bytes += node.count
            del self.nodes[node.name]

    def _ready(self, connection: RelayedConnection, ready: socket.socket, events: int) -> None:
        node = self.node_of.get(connection)
        if node is not None and connection in node.spares:
            return self._end(connection)  # a node says nothing before a peer is there
        super()._ready(connection, ready, events)

    # A node registers.

    def _greeted(self, connection: RelayedConnection, methods: bytes) -> None:
        if PROVES not in methods:
            return super()._greeted(connection, methods)
        self.nonces[connection] = nonce = os.urandom(NONCE_BYTES)
        connection.client.send(bytes((SOCKS, PROVES)) + nonce)

    def _ask(self, connection: RelayedConnection) -> None:
        if (nonce := self.nonces.get(connection)) is None:
            return super()._ask(connection)
        said = connection.said
        if not (more := connection.client.recv(missing(said) or _whole(said) - len(said))):
            return self._end(connection)
        said = connection.hear(more)
        if missing(said):
            return None
        request = said[2 + said[1] :]
        if request[:2] != bytes((SOCKS, BIND)) or request[3] != NAME:
            return self._refuse(connection, NO_COMMAND)
        if len(said) == _whole(said):
            name = request[5 : 5 + request[4]].decode("ascii", "replace")
            sound = NODE.fullmatch(name) and proves(self.secret, name, nonce, request[-PROOF_BYTES:])
            return self._register(connection, name) if sound else self._refuse(connection, NOT_ALLOWED)

    def _register(self, connection: RelayedConnection, name: str) -> None:
        """Keep a connection for the next peer that asks for this name."""
        if name not in self.nodes and len(self.nodes) >= NODES_MAX:
            return self._refuse(connection, REFUSED)
        node = self.nodes.setdefault(name, RelayedNode(name))
        connection.client.send(answer(DONE)[:COUNT_AT] + node.number)
        stays(connection.client)
        if len(node.spares) >= SPARES_MAX:
            self._end(next(iter(node.spares)))
        del self.asked[connection], self.nonces[connection]
        self.known[connection] = None
        self.node_of[connection] = node
        node.spares[connection] = None
        if node.waiting:
            self._meet(next(iter(node.waiting)), node)

    # A peer asks for a node.

    def _named(self, connection: RelayedConnection, name: str) -> None:
        node = self.nodes.get(name)
        if node is None or not node.there:
            return super()._named(connection, name)
        if node.spares:
            return self._meet(connection, node)
        if len(node.waiting) >= WAITING_MAX:
            return self._refuse(connection, REFUSED)
        self.node_of[connection] = node
        node.waiting[connection] = None
        self._want(connection.client, 0)

    def _meet(self, connection: RelayedConnection, node: RelayedNode) -> None:
        """Lead a peer to the newest spare connection of a node. Raises OSError if the peer is gone."""
        while node.spares:
            spare = next(reversed(node.spares))
            try:
                spare.client.send(answer(DONE))
            except OSError:  # it is gone
                self._end(spare)
                continue
            del node.spares[spare], self.known[spare], self.node_of[spare]
            node.waiting.pop(connection, None)
            connection.lead(spare.client)
            self.of[spare.client] = connection
            self.node_of[connection] = node
            node.streams.add(connection)
            with contextlib.suppress(OSError):
                stays(connection.client)
            try:
                return self._begin(connection)
            except OSError:
                return self._end(connection)
        if connection not in node.waiting:
            self._refuse(connection, REFUSED)

    # Ends.

    def _finish(self, connection: RelayedConnection) -> None:
        self._leave(connection)
        super()._finish(connection)

    def _end(self, connection: RelayedConnection, why: str = "") -> None:
        self._leave(connection)
        super()._end(connection, why)

    def _leave(self, connection: RelayedConnection) -> None:
        self.nonces.pop(connection, None)
        if (node := self.node_of.pop(connection, None)) is not None:
            node.forget(connection)


class RelayedCount:
    """Tells how many bytes went through a relay, as they grow.

    Args:
        relay: counts them.
        tell: gets the values of an event.
        every_s: seconds between two counts.
    """

    def __init__(self, relay: NodeRelay, tell: Callable[[dict[str, Any]], None], every_s: float) -> None:
        self.relay, self.tell, self.every_s = relay, tell, every_s
        self.told = 0  # the newest count
        self.due_s = time.monotonic() + every_s

    @property
    def text(self) -> str:
        return f"{self.relay.relayed_bytes / 1e6:,.2f} MB went through the relay"

    @property
    def values(self) -> dict[str, Any]:
        """The bytes so far, and the nodes that are registered."""
        return {"bytes": self.relay.relayed_bytes, "nodes": sum(node.there for node in self.relay.nodes.values())}

    def turn(self) -> None:
        """Tell the count if it is due and has grown."""
        if time.monotonic() >= self.due_s:
            self.due_s = time.monotonic() + self.every_s
            values, before = self.values, self.told
            self.told = values["bytes"]
            if before != self.told:
                self.tell(values)

    def end(self) -> None:
        """Tell the last count, with a text."""
        if self.relay.relayed_bytes:
            self.tell(self.values | {"text": self.text})


def _whole(said: bytes) -> int:
    """Return the length of greeting, request and proof, once the request is there (`missing` is 0)."""
    begin = 2 + said[1]
    return begin + 5 + said[begin + 4] + 2 + PROOF_BYTES


def main() -> int:
    """Serve the one port of a gossip run. The first line of stdin has the secret, the others are those of PortRelay."""
    may_open_more()
    signals.leave_to_parent()
    if not (line := first_line(0)):
        return 0  # ps-serve was killed before it sent the secret
    listener = socket.socket(fileno=int(os.environ[LISTENER]))
    relay = NodeRelay(listener, most_connections(), json.loads(line)[SECRET])
    count = RelayedCount(relay, lambda values: emit("log", name="relay", values=values), TOLD_S)
    relay.hear(0)
    while not relay.closed:
        relay.turn(TURN_S)
        count.turn()
    relay.free()
    count.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
