"""The watch over a run in the process of ps-serve: the record, the dashboard, the metrics, and the list of runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from narrows.protocols.addresses import is_loopback
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli import output
from narrows.protocols.runtime.storage.record_file import open_record
from narrows.ps.dashboard import run_registry
from narrows.ps.dashboard.history import RunHistory
from narrows.ps.dashboard.run_registry import RunEntry, RunFacts
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


def _runs() -> dict[str, Any]:
    """Return the runs of this user on this machine, as values of JSON."""
    now = time.time()
    with contextlib.suppress(UsageError):
        return {"runs": [facts.told(now) for facts in run_registry.runs()], "pid": os.getpid()}
    return {"runs": [], "pid": os.getpid()}


class RunWatch:
    """The record, the dashboard and the metrics of a run, and its entry among the runs of this machine."""

    def __init__(self) -> None:
        self.began, self.began_unix = time.monotonic(), time.time()
        self.history = RunHistory()
        self.lock = threading.Lock()  # guards the history, which threads of the dashboard read
        self.record: output.Output | None = None
        self.sites: list[DashboardServer] = []
        self.entry: RunEntry | None = None  # for ps-serve runs

    @property
    def watched(self) -> bool:
        return self.record is not None or bool(self.sites)

    def open_record(self, path: str, say: Callable[[str], None]) -> None:
        """Write each event of the run to a file, or to an address of a store. Raises UsageError."""
        self.record = open_record(path, say)

    @property
    def behind(self) -> int:
        """The loopback port of the page that visitors reach at the one port; 0: there is none."""
        return next((site.server_address[1] for site in self.sites if site.front is not None), 0)

    def open_sites(
        self, dashboard: str, metrics: str, trusted: bool, asked: object = None, front: tuple[str, int] | None = None
    ) -> None:
        """Serve the dashboard and the metrics, on one port if both have the same address; "" for none.

        Args:
            dashboard: the value of --dashboard.
            metrics: the value of --metrics.
            trusted: as in `site_address`.
            asked: the host and the port of --bind, with --one-port. A site of this address is behind the one port.
            front: the host and the port that are bound there.

        Raises:
            UsageError: an address is none, or is taken.
        """
        page = site_address("--dashboard", dashboard, trusted) if dashboard else None
        scraped = site_address("--metrics", metrics, trusted) if metrics else None
        source = self._metrics if scraped is not None else None
        both = page is not None and page == scraped and (page[1] > 0 or page == asked)
        if page is not None:
            # The other runs are not of whoever reads a page that other machines reach.
            runs = FrameStream(_runs) if is_loopback(page[0]) else None
            fronted, frames = front if page == asked else None, FrameStream(self._frame)
            self.sites.append(DashboardServer("--dashboard", *page, frames, source if both else None, runs, fronted))
        if scraped is not None and not both:
            fronted = front if scraped == asked else None
            self.sites.append(DashboardServer("--metrics", *scraped, None, source, front=fronted))
        if source is not None:
            from narrows.ps.dashboard import prometheus as _  # noqa: F401 - else the first scrape waits for it

    def enter(self, facts: RunFacts) -> str:
        """List the run among those of this machine. Return why it is not listed, else ""."""
        page = next((site.url for site in self.sites if site.frames is not None), "")
        try:
            self.entry = RunEntry(replace(facts, began=self.began_unix, pid=os.getpid(), page=page))
        except UsageError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or run_registry.folder()}: {error.strerror}"
        return ""

    def reach(self, clock: int) -> None:
        """Note that the run has reached this clock, and write what is due. -1: this shard knows none."""
        if self.entry is not None:
            self.entry.note(**({"clock": clock} if clock >= 0 else {}))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def note(self, name: str, values: dict[str, Any]) -> None:
        """Add an event to the record and to the history, and note it in the list of runs."""
        if self.entry is not None:
            if name == "member":
                self.entry.note(workers=values["live"])
            elif name == "took over":
                self.entry.note(copies="")
            elif name == "replan" and "summary" in values:
                self.entry.note(mode=values["mode"], summary=values["summary"])
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
        if self.entry is not None:
            self.entry.close()
            self.entry = None
        for site in self.sites:
            site.close()
        if self.record is not None:
            self.record.close()
