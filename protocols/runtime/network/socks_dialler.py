"""Dials a shard behind the one port of its server, or a node through a relay: a SOCKS5 client (RFC 1928) in threads.

How it works

    ZeroMQ ── Unix socket, else loopback ──> SocksDialler ── TCP: CONNECT shard-1, then all bytes ──> one port

1. `SocksDialler` listens for ZeroMQ of this process, at `endpoint`.
2. A thread takes each connection, dials the port, and asks for the shard. Then two threads move the bytes, one each
   way, as they are. They wait in system calls, without the GIL.
3. A node that is met through a relay listens in its own network too (reverse_tunnel.py). The dialler asks it there
   first. Where nobody answers to its name within NEAR_S, the relay is asked, for the next NEAR_AGAIN_S at once.
4. Where that fails, the connection of ZeroMQ is ended, and ZeroMQ dials anew as it does elsewhere.

ZeroMQ speaks SOCKS5 itself (SOCKS_PROXY). But libzmq 4.3.5 aborts the process if a socket is closed while it waits to dial
a proxy anew, as it does whenever the server is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from narrows.protocols.runtime.network.hosts import peer_uid

SOCKS, CONNECT, NAME, NO_AUTHENTICATION, DONE = 5, 1, 3, 0, 0
ANSWER_BYTES = 10  # of an answer with an IPv4 address, as the one port gives it
DIAL_S = 10.0  # limit of connecting, and of the answers
NEAR_S = 1.0  # the same in the network of a node that has a relay
NEAR_AGAIN_S = 60.0  # between two tries to meet it there
SILENT_MS = 60_000  # a peer that takes nothing of what it is sent for this time is cut off
CHUNK_BYTES = 1 << 18  # moved at a time
SPLICES = hasattr(os, "splice")


def asked(line: socket.socket, name: str) -> None:
    """Ask the SOCKS5 server at the other end for the host `name`. Raises OSError if it refuses."""
    request = bytes((SOCKS, CONNECT, 0, NAME, len(name))) + name.encode() + bytes(2)
    for said, size in ((bytes((SOCKS, 1, NO_AUTHENTICATION)), 2), (request, ANSWER_BYTES)):
        line.sendall(said)
        heard = b""
        while len(heard) < size:
            heard += (piece := line.recv(size - len(heard)))
            if not piece or heard[0] != SOCKS or (len(heard) > 1 and heard[1] != DONE):
                raise ConnectionError("the port refuses it")


def moved(source: socket.socket, sink: socket.socket) -> None:
    """Move all bytes of `source` to `sink`, and then its end. Returns once either has ended."""
    pipe = os.pipe() if SPLICES else (-1, -1)
    try:
        if not SPLICES:
            while piece := source.recv(CHUNK_BYTES):
                sink.sendall(piece)
        while SPLICES and (held := os.splice(source.fileno(), pipe[1], CHUNK_BYTES)):
            while held:
                held -= os.splice(pipe[0], sink.fileno(), held)
    except (OSError, ValueError):  # either end was reset, or closed here
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)
    finally:
        for end in pipe if SPLICES else ():
            os.close(end)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


class SocksDialler:
    """Dials one shard, or one node, for the ZeroMQ of this process.

    Args:
        proxy: the one port or the relay, host:port.
        name: the host to ask it for.
        near: host:port where peers of the node's own network ask for it; "": none.
    """

    def __init__(self, proxy: str, name: str, near: str = "") -> None:
        self.where, self.name, self.near, self.near_s = _place(proxy), name, near, 0.0
        self.local = sys.platform == "linux"
        if self.local:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(path := f"\0narrows-dial-{os.urandom(16).hex()}")
            self.listener.listen()
            self.endpoint = f"ipc://@{path[1:]}"
        else:
            self.listener = socket.create_server(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name="narrows-dial", daemon=True)
        self.threads = [each for each in self.threads if each.is_alive()]
        thread.start()
        self.threads.append(thread)
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                line, _ = self.listener.accept()
                if self.local and peer_uid(line) != os.getuid():
                    line.close()
                else:
                    self._start(self._lead, line)

    def _reached(self) -> socket.socket:
        """Return a connection to the host. Raises OSError."""
        if self.near and time.monotonic() >= self.near_s:
            try:
                return self._asked(_place(self.near), NEAR_S)
            except OSError:  # another network, or another host that has this address here
                self.near_s = time.monotonic() + NEAR_AGAIN_S
        return self._asked(self.where, DIAL_S)

    def _asked(self, where: tuple[str, int], limit_s: float) -> socket.socket:
        there = socket.create_connection(where, limit_s)
        try:
            asked(there, self.name)
        except BaseException:
            there.close()
            raise
        return there

    def _lead(self, line: socket.socket) -> None:
        with line, contextlib.suppress(OSError), self._reached() as there:
            there.settimeout(None)
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                there.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
            up = self._start(moved, line, there)
            moved(there, line)
            with contextlib.suppress(OSError):  # the server has ended: what is still to go up would go nowhere
                line.shutdown(socket.SHUT_RDWR)
            up.join()

    def close(self) -> None:
        """Take no more connections. Those of closed ZeroMQ sockets end by themselves, once their bytes have left."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def join(self, deadline_s: float) -> None:
        """Wait until all connections have ended, at most until `deadline_s` of time.monotonic."""
        for thread in self.threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
