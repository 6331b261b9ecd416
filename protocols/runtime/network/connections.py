"""The connections to a listening socket: limits on the number and the bytes of strangers.

A stranger is a connection from which no message was admitted yet. ZeroMQ alone would keep every connection for ever,
and every incomplete message, however large.

Rules
- If there are too many strangers, the oldest is ended. A stranger that has sent too many bytes is ended too.
- ZeroMQ owns the descriptors. This module shuts a descriptor down, and only if it still belongs to the connection that
  was accepted (the same inode).
- One thread sees connections come and end (`ListenerMonitor` in curve_auth.py), another reads messages. Both may end a
  connection.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass

BACKLOG = 4096  # connections that wait to be accepted: strangers must not take the place of all others
STRANGERS_MAX = 1024  # of one listening socket; each takes some 30 KB
STRANGER_BYTES_MAX = 1 << 20  # bytes that one stranger may send: a first message has some hundred
ALL_BYTES_TIMES = 16  # all strangers together may send this many times as much
TCP_RECEIVED = 128  # offset of the received bytes in struct tcp_info, since Linux 4.1
TCP_INFO_BYTES = TCP_RECEIVED + 8
SHARE = 8  # strangers get one in this many of the process's descriptors
REFUSED_MAX = 64  # refused messages in a row, after which a connection is ended without further answers
OVER_MAX = 4096  # remembered names of ended connections, whose last messages may still come


@dataclass(slots=True)
class Connection:
    """One accepted connection."""

    descriptor: int
    inode: int  # of its socket: unique while the socket is open
    name: bytes = b""  # its routing id, once it has sent a message
    refused: int = 0  # refused messages since the last admitted one


def most_strangers() -> int:
    """Return how many strangers leave enough descriptors for all other connections and files."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return STRANGERS_MAX if soft == resource.RLIM_INFINITY else min(STRANGERS_MAX, soft // SHARE)
    return STRANGERS_MAX


class Connections:
    """The connections of one listening socket."""

    def __init__(self) -> None:
        self.most, self.bytes_most = most_strangers(), STRANGER_BYTES_MAX  # strangers; bytes of one stranger
        self.ended: Counter[str] = Counter()  # reason -> number of connections ended for it
        self.accepted: dict[int, Connection] = {}  # by descriptor
        self.strangers: OrderedDict[int, Connection] = OrderedDict()  # by descriptor, of `accepted`, the oldest first
        self.named: dict[bytes, Connection] = {}  # by routing id: connections that have sent a message
        self.ended_ids: OrderedDict[bytes, None] = OrderedDict()  # routing ids of ended connections
        self.lock = threading.Lock()

    def allow(self, bytes_most: int) -> None:
        """Let a stranger send this number of bytes."""
        self.bytes_most = bytes_most

    # Called by the thread of the socket's monitor.

    def accept(self, descriptor: int) -> None:
        with self.lock:
            self._take(descriptor)
            while len(self.strangers) > self.most:
                self._end(next(iter(self.strangers.values())), "too many connections without an accepted message")

    def gone(self, descriptor: int) -> bytes:
        """Note that a connection has ended.

        Returns:
            Its routing id, if it was admitted and the peer has no newer connection; else b"".
        """
        with self.lock:
            connection = self.accepted.get(descriptor)
            stranger = descriptor in self.strangers
            last = connection is not None and self.named.get(connection.name) is connection
            self._forget(descriptor)
        return connection.name if connection is not None and last and not stranger else b""

    def look(self) -> None:
        """End the strangers that have sent too much. Only Linux tells how much, and only for TCP."""
        with self.lock:
            sizes = sorted(((self._received(each), each.descriptor) for each in self.strangers.values()), reverse=True)
            total = sum(size for size, _ in sizes)
            for size, descriptor in sizes:
                if size <= self.bytes_most and total <= ALL_BYTES_TIMES * self.bytes_most:
                    break
                total -= size
                self._end(self.strangers[descriptor], "too many bytes without an accepted message")

    # Called by the thread that reads messages.

    def said(self, name: bytes, descriptor: int) -> bool:
        """Note a message of routing id `name` on this connection. True if the message is to be read."""
        known = self.named.get(name)
        if known is not None and known.descriptor == descriptor:
            return True
        with self.lock:
            connection = self.accepted.get(descriptor)
            if connection is None and name not in self.ended_ids:  # the monitor's thread has not reported it yet
                connection = self._take(descriptor)
            if connection is not None:
                self.named.pop(connection.name, None)
                connection.name, self.named[name] = name, connection
                self.ended_ids.pop(name, None)
            return name not in self.ended_ids

    def let_in(self, name: bytes) -> None:
        """Note an admitted message of routing id `name`: its connection is no longer a stranger."""
        connection = self.named.get(name)
        if connection is None:
            return
        connection.refused = 0
        if self.strangers.get(connection.descriptor) is connection:
            with self.lock:
                self.strangers.pop(connection.descriptor, None)

    def refused(self, name: bytes) -> None:
        """Note a refused message of routing id `name`. REFUSED_MAX in a row end the connection."""
        with self.lock:
            if connection := self.named.get(name):
                connection.refused += 1
                if connection.refused >= REFUSED_MAX:
                    self._end(connection, "too many messages that were refused")

    def end(self, name: bytes, why: str) -> None:
        """End the connection of routing id `name`; `why` is counted."""
        with self.lock:
            if connection := self.named.get(name):
                self._end(connection, why)

    # Called with the lock held.

    def _take(self, descriptor: int) -> Connection | None:
        """Return the connection of this descriptor, a new one as a stranger; None if it has ended meanwhile.

        The monitor's event and the first message of a connection come on two threads, in any order. The second one
        finds the entry of the first by the inode.
        """
        known = self.accepted.get(descriptor)
        try:
            status = os.fstat(descriptor)
        except OSError:  # closed: the monitor is about to report the end
            return known
        if known is not None and known.inode == status.st_ino:
            return known
        self._forget(descriptor)
        if not stat.S_ISSOCK(status.st_mode):
            return None
        connection = self.accepted[descriptor] = self.strangers[descriptor] = Connection(descriptor, status.st_ino)
        return connection

    def _forget(self, descriptor: int) -> None:
        self.strangers.pop(descriptor, None)
        connection = self.accepted.pop(descriptor, None)
        if connection is not None and self.named.get(connection.name) is connection:
            del self.named[connection.name]

    def _end(self, connection: Connection, why: str) -> None:
        self._forget(connection.descriptor)
        self.ended[why] += 1
        if connection.name:
            self.ended_ids[connection.name] = None
            while len(self.ended_ids) > OVER_MAX:
                self.ended_ids.popitem(last=False)
        with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as ours:
            if os.fstat(ours.fileno()).st_ino == connection.inode:
                ours.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _received(connection: Connection) -> int:
        """Return the bytes that the connection has sent; 0 if the system does not tell."""
        with suppress(OSError, AttributeError, struct.error):
            ours = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=connection.descriptor)
            try:
                info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                return int(struct.unpack_from("Q", info, TCP_RECEIVED)[0])
            finally:
                ours.detach()
        return 0
