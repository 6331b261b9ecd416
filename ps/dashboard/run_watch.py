"""The watch over a run in the process of ps-serve: it writes the record, and serves the dashboard and the metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from narrows.protocols.addresses import is_loopback
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli import output
from narrows.ps.dashboard.history import RunHistory
from narrows.ps.dashboard.web import DashboardServer, FrameStream

LOOPBACK = "127.0.0.1"


def site_address(flag: str, address: str, trusted: bool) -> tuple[str, int]:
    """Parse the address of a page or of metrics.

    Args:
        flag: the flag with this value, for errors.
        address: HOST:PORT, or a port on loopback.
        trusted: the user has given --keys or --insecure, so other machines may read the figures.

    Raises:
        UsageError: this is no such address, or it is beyond loopback and not trusted.
    """
    host, _, port = address.rpartition(":")
    host = host or LOOPBACK
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise UsageError(f"{flag} {address}: give a port, or HOST:PORT")
    if not is_loopback(host) and not trusted:
        raise UsageError(
            f"{flag} {address}: anyone who reaches it could read the figures of the run; leave out the host, or give --keys or "
            "--insecure"
        )
    return host, int(port)


class RunWatch:
    """The record, the dashboard and the metrics of a run. Without any of them, events are dropped."""

    def __init__(self) -> None:
        self.began, self.began_unix = time.monotonic(), time.time()
        self.history = RunHistory()
        self.lock = threading.Lock()  # guards the history, which threads of the dashboard read
        self.record: output.Output | None = None
        self.sites: list[DashboardServer] = []

    @property
    def watched(self) -> bool:
        return self.record is not None or bool(self.sites)

    def open_record(self, path: str, say: Callable[[str], None]) -> None:
        """Write each event of the run to a file. Raises UsageError."""
        self.record = output.open_record(path, say)

    def open_sites(self, dashboard: str, metrics: str, trusted: bool) -> None:
        """Serve the dashboard and the metrics, on one port if both have the same address; "" for none.

        Raises:
            UsageError: an address is none, or is taken.
        """
        page = site_address("--dashboard", dashboard, trusted) if dashboard else None
        scraped = site_address("--metrics", metrics, trusted) if metrics else None
        source = self._metrics if scraped is not None else None
        both = page is not None and page == scraped and page[1] > 0
        if page is not None:
            self.sites.append(DashboardServer("--dashboard", *page, FrameStream(self._frame), source if both else None))
        if scraped is not None and not both:
            self.sites.append(DashboardServer("--metrics", *scraped, None, source))
        if source is not None:
            from narrows.ps.dashboard import prometheus as _  # noqa: F401 - else the first scrape waits for it

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def note(self, name: str, values: dict[str, Any]) -> None:
        """Add an event to the record and to the history."""
        if not self.watched:
            return
        line = {"event": name, "seconds": round(self.seconds, 6), **values}
        if self.record is not None:
            self.record.line(output.as_json(line))
        if self.sites:
            with self.lock:
                self.history.take(line)

    def _frame(self) -> dict[str, Any]:
        with self.lock:
            return self.history.frame(self.seconds)

    def _metrics(self) -> tuple[str, bytes]:
        from narrows.ps.dashboard import prometheus

        with self.lock:
            return prometheus.CONTENT_TYPE, prometheus.text(self.history, self.began_unix)

    def close(self) -> None:
        for site in self.sites:
            site.close()
        if self.record is not None:
            self.record.close()
