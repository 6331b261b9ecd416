"""The worker's end of the one port: all bytes as they are, with `splice` and without, and both ends of a connection."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from kit.one_port import one_port
from kit.processes import until

from narrows.protocols.runtime.network import socks_dialler
from narrows.protocols.runtime.network.socks_dialler import SPLICES, SocksDialler
from narrows.ps.process import port_relay

LIMIT_S = 30.0


class Line:
    """A shard behind one port, and a dialler of it."""

    def __init__(self) -> None:
        self.shard = socket.create_server(("127.0.0.1", 0))
        self.shard.settimeout(LIMIT_S)
        self.relay = one_port({"shard-1": self.shard.getsockname()[1]})
        self.dialler = SocksDialler(f"127.0.0.1:{self.relay.port}", "shard-1")

    def dial(self, dialler: SocksDialler | None = None) -> socket.socket:
        """Connect as ZeroMQ does."""
        endpoint = (dialler or self.dialler).endpoint
        if endpoint.startswith("ipc://@"):
            made = socket.socket(socket.AF_UNIX)
            made.connect("\0" + endpoint.removeprefix("ipc://@"))
        else:
            made = socket.create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        made.settimeout(LIMIT_S)
        return made

    def accepted(self) -> socket.socket:
        made, _ = self.shard.accept()
        made.settimeout(LIMIT_S)
        return made

    def close(self) -> None:
        self.dialler.close()
        self.relay.close()
        self.shard.close()


# As on a system without splice, and on one without Unix sockets that have no file.
@pytest.fixture(params=[("linux", SPLICES), ("linux", False), ("darwin", False)], ids=str)
def line(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    platform, splices = request.param
    monkeypatch.setattr(socks_dialler, "SPLICES", splices)
    if not splices:
        monkeypatch.setattr(port_relay, "SPLICES", False)
        monkeypatch.delattr(os, "splice", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "platform", platform)
        made = Line()
    assert made.dialler.local == (platform == "linux")
    with closing(made):
        yield made


def heard(of: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (piece := of.recv(min(1 << 16, size - len(found)))):
        found += piece
    return found


def ended(of: socket.socket) -> bool:
    try:
        return not of.recv(1)
    except ConnectionError:
        return True


def test_bytes_go_both_ways_at_once_as_they_are(line: Line) -> None:
    up, down = (random.Random(seed).randbytes(5_000_000) for seed in (1, 2))
    got: dict[str, bytes] = {}
    with line.dial() as client, line.accepted() as server:

        def take(of: socket.socket, name: str, size: int) -> None:
            got[name] = heard(of, size)

        threads = [threading.Thread(target=each.sendall, args=(what,)) for each, what in ((client, up), (server, down))]
        threads += [
            threading.Thread(target=take, args=each) for each in ((server, "up", len(up)), (client, "down", len(down)))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert got["up"] == up and got["down"] == down


def test_the_last_bytes_leave_before_the_end(line: Line) -> None:
    last = random.Random(3).randbytes(500_000)
    for turn in range(2):
        ends = (line.dial(), line.accepted())
        with ends[turn] as first, ends[1 - turn] as second, ThreadPoolExecutor(1) as pool:

            def send(first: socket.socket = first) -> None:
                first.sendall(last)
                first.close()

            sent = pool.submit(send)
            assert heard(second, len(last)) == last and ended(second)
            sent.result(LIMIT_S)


def test_no_thread_and_no_descriptor_is_left(line: Line) -> None:
    rounds, before = 30, len(os.listdir("/proc/self/fd"))

    def gone() -> bool:  # the relay keeps some empty pipes for later
        alive = [each for each in line.dialler.threads[1:] if each.is_alive()]
        return not alive and len(os.listdir("/proc/self/fd")) < before + rounds

    for _ in range(rounds):
        with line.dial() as client, line.accepted() as server:
            client.sendall(b"x")
            assert heard(server, 1) == b"x"
    until(gone, "all threads and descriptors to be gone")


def test_what_the_port_refuses_is_ended(line: Line) -> None:
    other = SocksDialler(f"127.0.0.1:{line.relay.port}", "shard-7")
    with closing(other), line.dial(other) as client:
        assert ended(client)
