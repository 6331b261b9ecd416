"""The connections of those who dial us: of strangers only so many are kept, and with so many bytes.

A stranger is who has said nothing that was let in. ZeroMQ keeps every connection for ever, and what has come of a message until
all of it is here, however much that is.

Rules
- Where there are too many strangers, the one that came first is ended. One that has sent too much is ended, too.
- ZeroMQ owns the descriptors. Here one is shut down, and only while it still leads to whom it led to when it was accepted.
- One thread hears of connections (`ListenerMonitor` in curve_auth.py), another reads messages. Either may end one.
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

STRANGERS_MAX = 1024  # of one listening socket; each takes some 30 KB
STRANGER_BYTES_MAX = 1 << 20  # that one may send: a first word has some hundred bytes
ALL_BYTES_TIMES = 16  # that all together may, in those of one
TCP_RECEIVED = 128  # where struct tcp_info has the bytes that came, since Linux 4.1
TCP_INFO_BYTES = TCP_RECEIVED + 8
SHARE = 8  # of its descriptors a process gives one to strangers
REFUSED_MAX = (
    64  # messages that are refused, one after the other: who sends more is not ours, and hears no more answers
)
OVER_MAX = 4096  # names whose last messages may still come, after they were hung up on


@dataclass(slots=True)
class Connection:
    descriptor: int
    inode: int  # of its socket: no other has it while this one is open
    name: bytes = b""  # its routing id, once it has sent a message
    refused: int = 0  # messages since one was let in


def most_strangers() -> int:
    """So many that there are descriptors left for everybody else, and for files."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return STRANGERS_MAX if soft == resource.RLIM_INFINITY else min(STRANGERS_MAX, soft // SHARE)
    return STRANGERS_MAX


class Connections:
    """The connections of one listening socket. `most`: strangers; `bytes_most`: that one may send. `ended`: why some
    were ended, and how many."""

    def __init__(self) -> None:
        self.most, self.bytes_most = most_strangers(), STRANGER_BYTES_MAX
        self.ended: Counter[str] = Counter()
        self.accepted: dict[int, Connection] = {}  # by descriptor
        self.strangers: OrderedDict[int, Connection] = OrderedDict()  # those of them that were not let in, as they came
        self.named: dict[bytes, Connection] = {}  # those that have sent a message
        self.over: OrderedDict[bytes, None] = OrderedDict()  # names that were hung up on
        self.lock = threading.Lock()

    # Told by the monitor of the socket.

    def accept(self, descriptor: int) -> None:
        with self.lock:
            self._take(descriptor)
            while len(self.strangers) > self.most:
                self._end(next(iter(self.strangers.values())), "too many connections from which nothing was let in")

    def gone(self, descriptor: int) -> bytes:
        """It has ended. Return the routing id of who was let in by it and has no newer one, b"" where there is none."""
        with self.lock:
            connection = self.accepted.get(descriptor)
            stranger = descriptor in self.strangers
            last = connection is not None and self.named.get(connection.name) is connection
            self._forget(descriptor)
        return connection.name if connection is not None and last and not stranger else b""

    def look(self) -> None:
        """End the strangers that have sent too much. Linux alone says how much that is, of TCP alone."""
        with self.lock:
            sizes = sorted(((self._received(each), each.descriptor) for each in self.strangers.values()), reverse=True)
            total = sum(size for size, _ in sizes)
            for size, descriptor in sizes:
                if size <= self.bytes_most and total <= ALL_BYTES_TIMES * self.bytes_most:
                    break
                total -= size
                self._end(self.strangers[descriptor], "too many bytes without a word that was let in")

    # Told by whoever reads.

    def said(self, name: bytes, descriptor: int) -> bool:
        """A message of this routing id came by this connection. Whether it is to be read."""
        known = self.named.get(name)
        if known is not None and known.descriptor == descriptor:
            return True
        with self.lock:
            connection = self.accepted.get(descriptor)
            if connection is None and name not in self.over:  # the monitor's thread has not told of this connection yet
                connection = self._take(descriptor)
            if connection is not None:
                self.named.pop(connection.name, None)
                connection.name, self.named[name] = name, connection
                self.over.pop(name, None)
            return name not in self.over

    def let_in(self, name: bytes) -> None:
        """Who sent that is no stranger."""
        connection = self.named.get(name)
        if connection is None:
            return
        connection.refused = 0
        if self.strangers.get(connection.descriptor) is connection:
            with self.lock:
                self.strangers.pop(connection.descriptor, None)

    def refused(self, name: bytes) -> None:
        """A message was not let in."""
        with self.lock:
            if connection := self.named.get(name):
                connection.refused += 1
                if connection.refused >= REFUSED_MAX:
                    self._end(connection, "too many messages that were refused")

    def end(self, name: bytes, why: str) -> None:
        """Hang up."""
        with self.lock:
            if connection := self.named.get(name):
                self._end(connection, why)

    # With the lock.

    def _take(self, descriptor: int) -> Connection | None:
        """Return the connection of this descriptor, a stranger where it is new; None where it has ended meanwhile.

        The monitor and the first message of a connection come by two threads, in any order: the second finds what
        the first has made, by the inode.
        """
        known = self.accepted.get(descriptor)
        try:
            status = os.fstat(descriptor)
        except OSError:  # the monitor is about to tell its end
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
            self.over[connection.name] = None
            while len(self.over) > OVER_MAX:
                self.over.popitem(last=False)
        with suppress(OSError), socket.socket(fileno=os.dup(connection.descriptor)) as ours:
            if os.fstat(ours.fileno()).st_ino == connection.inode:
                ours.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _received(connection: Connection) -> int:
        """Bytes that it has sent; 0 where nobody says."""
        with suppress(OSError, AttributeError, struct.error):
            ours = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=connection.descriptor)
            try:
                info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
                return int(struct.unpack_from("Q", info, TCP_RECEIVED)[0])
            finally:
                ours.detach()
        return 0
