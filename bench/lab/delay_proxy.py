"""A slow road between workers and servers: a TCP forwarder that holds every chunk of bytes for a fixed time.

Both directions are held alike, order is kept, bandwidth is not limited; the end of a stream is held too. One way of one
connection holds HELD_BYTES_MAX at most, then reading pauses and TCP slows the sender down.

A run of several shards tells its workers ports, and they dial those on the host that they dialled first. So the proxy
listens on another loopback address with the same ports:

    ps-serve --bind tcp://127.0.0.1:5555 --shards 2 ...
    python bench/lab/delay_proxy.py --hold-ms 30 --ports 5555,5556
    ps-worker --server tcp://127.0.0.2:5555 ...

In a test or a benchmark: `with Proxy([5555, 5556], hold_ms=30): ...`. Its loop runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

import click

LISTEN = "127.0.0.2"
TARGET = "127.0.0.1"
HELD_BYTES_MAX = 256 << 20  # 2.5 GB/s at 100 ms: no link that is worth simulating on loopback is that wide
START_S = 10.0


class Side(asyncio.Protocol):
    """One socket of a connection, and what came from it and is held before `other` may have it."""

    def __init__(self, proxy: Proxy, port: int = 0) -> None:
        """`port`: of the server to dial once this socket is accepted; 0: this is the socket that was dialled."""
        self.proxy, self.port = proxy, port
        self.other: Side | None = None
        self.held: deque[tuple[float, bytes]] = deque()  # (when it may go on, bytes); b"": the end of the stream
        self.held_bytes = 0
        self.timer: asyncio.TimerHandle | None = None
        self.full = self.reads = False  # whether this socket takes no more just now; whether it is read
        self.ended = self.passed_end = False  # nothing more comes from it; `other` has been told so

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.proxy.sides.add(self)
        transport.pause_reading()
        if self.port:
            self.proxy.connections += 1
            self.dialling = asyncio.ensure_future(self._dial())

    async def _dial(self) -> None:
        try:
            _, other = await asyncio.get_running_loop().create_connection(
                lambda: Side(self.proxy), self.proxy.target, self.port
            )
        except OSError:
            self.transport.abort()  # the worker sees a lost connection and dials again, as without the proxy
            return
        self.other, other.other = other, self
        self._read_on()
        other._read_on()

    def _read_on(self) -> None:
        room = self.held_bytes < HELD_BYTES_MAX
        if room != self.reads and not self.transport.is_closing():
            self.reads = room
            self.transport.resume_reading() if room else self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self.port:
            self.proxy.bytes_up += len(data)
            self.proxy.seen_up((time.monotonic(), len(data)))
        else:
            self.proxy.bytes_down += len(data)
        self._hold(data)
        self._read_on()

    def eof_received(self) -> bool:
        self._end()
        return True  # the other way stays open until it ends too

    def connection_lost(self, error: Exception | None) -> None:
        self.proxy.sides.discard(self)
        self._end()

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self._hold(b"")

    def _hold(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + self.proxy.hold_s
        self.held.append((due, data))
        self.held_bytes += len(data)
        if self.timer is None:
            self.timer = loop.call_at(due, self._release)

    def _release(self) -> None:
        """Pass on all that is due, and come back for the next."""
        self.timer = None
        other, loop = self.other, asyncio.get_running_loop()
        while self.held and other is not None and not other.full:
            due, data = self.held[0]
            if due > loop.time():
                self.timer = loop.call_at(due, self._release)
                break
            self.held.popleft()
            self.held_bytes -= len(data)
            if data:
                other.transport.write(data)
            else:
                self._pass_end(other)
        self._read_on()

    def _pass_end(self, other: Side) -> None:
        self.passed_end = True
        if other.passed_end or self.transport.is_closing():
            self.transport.close()
            other.transport.close()
        elif not other.transport.is_closing():
            other.transport.write_eof()

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self.other is not None and self.other.timer is None:
            self.other._release()


class Proxy:
    """Forwards listen:port to target:port for each port while the `with` block lasts. Raises OSError if one is taken."""

    def __init__(
        self,
        ports: Sequence[int],
        hold_ms: float,
        listen: str = LISTEN,
        target: str = TARGET,
        seen_up: Callable[[tuple[float, int]], object] = lambda chunk: None,
    ) -> None:
        """`seen_up` gets (time.monotonic(), size) of each chunk that begins to be held on its way up."""
        self.ports, self.hold_s, self.listen, self.target = list(ports), hold_ms / 1000, listen, target
        self.seen_up = seen_up
        self.sides: set[Side] = set()
        self.connections = self.bytes_up = self.bytes_down = 0  # up: from who dialled
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="proxy", daemon=True)
        self._started = threading.Event()
        self._error: OSError | None = None

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._started.wait(START_S)
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        servers: list[asyncio.Server] = []
        try:
            for port in self.ports:
                servers.append(
                    await self._loop.create_server(lambda port=port: Side(self, port), self.listen, port)  # type: ignore[misc]
                )
        except OSError as error:
            self._error = error
            self._stop.set()
        self._started.set()
        await self._stop.wait()
        for server in servers:
            server.close()
        for side in list(self.sides):
            side.transport.abort()


@click.command(context_settings={"show_default": True})
@click.option("--hold-ms", type=float, required=True, help="how long each chunk is held, each way")
@click.option("--ports", default="5555", help="comma-separated; one per shard")
@click.option("--listen", default=LISTEN, help="address that the workers dial")
@click.option("--target", default=TARGET, help="address that the servers listen on")
def main(hold_ms: float, ports: str, listen: str, target: str) -> None:
    """Hold every chunk of bytes between workers and servers for a fixed time."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Proxy([int(port) for port in ports.split(",")], hold_ms, listen, target) as proxy:
            click.echo(f"{listen} -> {target}, ports {ports}, {hold_ms:g} ms each way; Ctrl-C ends this", err=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        click.echo(f"{proxy.connections} connections, {proxy.bytes_up:,} B up, {proxy.bytes_down:,} B down", err=True)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {listen}, ports {ports}: {error.strerror}") from None


if __name__ == "__main__":
    main()
