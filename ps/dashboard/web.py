"""The dashboard over HTTP: the page, its stream of frames, and the metrics.

How it works

1. `DashboardServer` listens in a thread of the supervisor's process, never in a shard's, and takes a thread for each
   connection.
2. `process_request` counts connections. Beyond VISITORS_MAX it hangs up on the oldest connection without a whole
   request, else on the oldest one. A page connects again by itself, so no visitor locks others out.
3. `DashboardRequest` answers:

       /            the files of page/
       /events      a stream of frames, as server-sent events
       /frame.json  the newest frame
       /metrics     the figures for Prometheus
       /runs.json   the runs of this user on this machine, where the page is for this machine alone

4. `FrameStream` makes a frame once for all visitors, at most once in FRAME_S, and in at most 1/SHARE of a core.
5. `close` lets visitors have the last frame, and ends.

Rules
- The server is read-only: it answers GET and HEAD of a few paths, and refuses all else.
- A visitor must send its request within IDLE_S.
- An error in an answer is printed once for each kind, and costs that answer alone.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from narrows.protocols.addresses import ANY_HOSTS, is_loopback
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.output import as_json
from narrows.protocols.runtime.network.hosts import is_ipv6

FRAME_S = 0.9  # from one frame to the next: with SHOWN_NS of a heartbeat, a figure is shown within two seconds
LOOK_S = 0.05  # least wait of a stream for the next frame
SHARE = 20  # frames take at most 1/20 of a core
VISITORS_MAX = 32  # connections
ENDING_MAX = 96  # closed connections, beyond the open ones, whose threads have not ended
IDLE_S = 10.0  # a visitor that sends or takes nothing for so long is disconnected
CLOSE_S = 1.0  # wait for the last frame to leave
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/glance.css": ("glance.css", "text/css; charset=utf-8"),
    "/glance.js": ("glance.js", "text/javascript; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/uPlot.LICENSE": ("uPlot.LICENSE", "text/plain; charset=utf-8"),
}
# The page loads nothing from other hosts, and no name that a member has chosen becomes code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
)


class FrameStream:
    """The newest frame, as JSON, for all visitors.

    Args:
        make: returns the present frame.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self.make = make
        self.lock = threading.Lock()
        self.closing = threading.Event()
        self.newest, self.number, self.due = b"", 0, 0.0

    def get(self) -> tuple[int, bytes]:
        """Return the number and the JSON of the newest frame. Equal frames have one number."""
        with self.lock:
            began, cpu_s = time.monotonic(), time.thread_time()
            if began >= self.due or self.closing.is_set():
                frame = as_json(self.make()).encode()
                took = time.thread_time() - cpu_s
                self.number += frame != self.newest
                self.newest, self.due = frame, began + max(FRAME_S, SHARE * took)
            return self.number, self.newest


class DashboardServer(ThreadingHTTPServer):
    """The HTTP server of a run.

    Args:
        flag: the flag that names the address, for errors.
        host: the address to bind.
        port: the port to bind, 0 for a free one.
        frames: the frames of the page; None: there is no page.
        metrics: returns the content type and the text of a scrape; None: there are no metrics.
        runs: the list of the runs of this machine; None: the page shows none.
        front: the host and the port at which visitors come: the one port of the server, with this site on loopback
            behind it. None: they come to the address that is bound.

    Raises:
        UsageError: the address cannot be bound.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        flag: str,
        host: str,
        port: int,
        frames: FrameStream | None,
        metrics: Callable[[], tuple[str, bytes]] | None,
        runs: FrameStream | None = None,
        front: tuple[str, int] | None = None,
    ) -> None:
        self.frames, self.metrics, self.runs = frames, metrics, runs
        self.closing = frames.closing if frames is not None else threading.Event()
        self.visitors: OrderedDict[Any, bool] = OrderedDict()  # by connection, oldest first: it has sent a request
        self.threads, self.lock = 0, threading.Lock()  # `lock` guards `threads` and `visitors`
        self.named: set[str] = set()  # kinds of errors that were printed
        self.front = front
        bound = (host.strip("[]"), port) if front is None else ("127.0.0.1", 0)
        self.address_family = socket.AF_INET6 if is_ipv6(bound[0]) else socket.AF_INET
        self.files = {path: (_read(name), kind) for path, (name, kind) in FILES.items()} if frames is not None else {}
        try:
            super().__init__(bound, DashboardRequest)
        except OSError as error:
            raise UsageError(f"{flag} {host}:{port}: {error.strerror or error}; name another port") from None
        # DNS rebinding: a page of another site, whose name resolves to this address, must not read this one.
        self.known = {"localhost", "127.0.0.1", "[::1]", host} if host not in ANY_HOSTS else None
        threading.Thread(target=self.serve_forever, name="narrows-site", daemon=True).start()

    @property
    def _shown(self) -> tuple[str, int]:
        """The host, without brackets, and the port at which visitors come."""
        host, port = self.front or self.server_address[:2]
        return str(host).strip("[]"), int(port)

    @property
    def url(self) -> str:
        host, port = self._shown
        name = socket.gethostname() if host in ("0.0.0.0", "::") else host
        return f"http://{f'[{name}]' if ':' in name else name}:{port}/"

    @property
    def told(self) -> str:
        """The line for the console: the address, and a warning where other machines can read it."""
        where = f"the run at a glance: {self.url}" if self.frames is not None else f"metrics: {self.url}metrics"
        open_ = not is_loopback(self._shown[0])
        return where + ("; HTTP needs no key: anyone who reaches this address can read it" if open_ else "")

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            if self.threads >= VISITORS_MAX + ENDING_MAX:
                return self.shutdown_request(request)
            if len(self.visitors) >= VISITORS_MAX:
                waiting = (each for each, asked in self.visitors.items() if not asked)
                oldest = next(waiting, None) or next(iter(self.visitors))
                del self.visitors[oldest]
                with contextlib.suppress(OSError):  # the connection's thread ends with it
                    oldest.shutdown(socket.SHUT_RDWR)
            self.visitors[request] = False
            self.threads += 1
        super().process_request(request, client_address)

    def asked(self, request: Any) -> None:
        """Note that this visitor has sent a whole request."""
        with self.lock:
            if request in self.visitors:
                self.visitors[request] = True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self.lock:
                self.visitors.pop(request, None)
                self.threads -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error once for each kind. Errors of a connection are ignored: its visitor has hung up."""
        error = sys.exc_info()[1]
        kind = type(error).__name__
        if not isinstance(error, OSError) and kind not in self.named:
            self.named.add(kind)
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Send the last frame to visitors with a stream, and end."""
        self.closing.set()
        deadline = time.monotonic() + CLOSE_S
        while self.threads and time.monotonic() < deadline:
            time.sleep(0.02)
        self.shutdown()
        self.server_close()


def _read(name: str) -> bytes:
    return resources.files("narrows.ps.dashboard").joinpath("page", name).read_bytes()


class DashboardRequest(BaseHTTPRequestHandler):
    """One connection."""

    server: DashboardServer
    timeout = IDLE_S
    server_version, sys_version = "narrows", ""

    def log_message(self, format: str, *values: Any) -> None:
        """Print no line for a request: the console belongs to the run."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, site = self.path.partition("?")[0], self.server
        site.asked(self.connection)
        host = self.headers.get("Host", "").rsplit(":", 1)[0] if self.headers.get("Host") else "localhost"
        if site.known is not None and host not in site.known:
            self._answer(b"this page is for this machine alone\n", status=HTTPStatus.FORBIDDEN)
        elif path == "/events" and site.frames is not None:
            self._stream(site.frames)
        elif path == "/frame.json" and site.frames is not None:
            self._answer(site.frames.get()[1], "application/json")
        elif path == "/runs.json" and site.runs is not None:
            self._answer(site.runs.get()[1], "application/json")
        elif path == "/metrics" and site.metrics is not None:
            kind, text = site.metrics()
            self._answer(text, kind)
        elif path in site.files:
            self._answer(*site.files[path])
        else:
            self._answer(b"there is nothing here\n", status=HTTPStatus.NOT_FOUND)

    def _head(self, kind: str, status: HTTPStatus = HTTPStatus.OK, size: int | None = None) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Cache-Control": "no-store", "Content-Security-Policy": POLICY}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        headers |= {"Content-Length": str(size)} if size is not None else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _answer(self, body: bytes, kind: str = "text/plain; charset=utf-8", status: HTTPStatus = HTTPStatus.OK) -> None:
        self._head(kind, status, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def _stream(self, frames: FrameStream) -> None:
        """Send each new frame as a server-sent event, until the visitor hangs up or the run has ended."""
        self._head("text/event-stream")
        sent = 0
        with contextlib.suppress(OSError):
            while self.command != "HEAD":
                last = frames.closing.is_set()
                number, frame = frames.get()
                # Without a new frame a comment is sent: writing finds out that the visitor has hung up.
                self.wfile.write(b"data: " + frame + b"\n\n" if number != sent else b":\n\n")
                self.wfile.flush()
                sent = number
                if last:
                    break
                frames.closing.wait(max(LOOK_S, frames.due - time.monotonic()))
