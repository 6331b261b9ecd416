"""ps-top: a run in the terminal, live from its dashboard or from its record."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, DASHBOARD, Bare, dashboard_flag, run

TURN_S = 1.0  # between two looks at the record
WIDTH = 180  # characters of a line, where the output is no terminal


@click.command(cls=Bare, context_settings=COMMAND)
@click.argument("address", required=False, metavar="[HOST:PORT]")
@click.option("--record", default="", help="read this record of ps-serve or ps-worker instead, and follow it")
@dashboard_flag
@click.option("--insecure", is_flag=True, help="allow --dashboard on addresses beyond loopback")
@click.option("--once", is_flag=True, help="show the present state, and end; without a terminal this is the default")
@click.version_option(package_name="narrows", allow_from_autoenv=False)
def command(address: str | None, record: str, dashboard: str, insecure: bool, once: bool) -> int:
    """Show the run whose page is at HOST:PORT (ps-serve --dashboard), or the run of a record. Ctrl-C ends ps-top.

    With --dashboard ps-top serves a page of the record instead.
    """
    if bool(address) and bool(record):
        raise UsageError(f"{address} and --record {record}: give one of the two")
    if dashboard and not record:
        raise UsageError("--dashboard: ps-top serves the page of a record, ps-serve that of its run; give --record too")
    try:
        return _page(record, dashboard, insecure) if dashboard else _terminal(address or DASHBOARD, record, once)
    except KeyboardInterrupt:
        return 130


def _frames(address: str, record: str) -> Iterator[dict[str, Any]]:
    from narrows.ps.dashboard import record_reader

    if not record:
        yield from record_reader.frames(address)
        return
    read = record_reader.RecordReader(record)
    read.read()
    yield read.history.frame()
    while not read.history.finished:
        time.sleep(TURN_S)
        if read.read():
            yield read.history.frame()


def _terminal(address: str, record: str, once: bool) -> int:
    from rich.console import Console
    from rich.live import Live

    from narrows.ps.dashboard.screen import screen

    found = _frames(address, record)
    if once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else WIDTH).print(screen(next(found)))
        return 0
    with Live(auto_refresh=False, screen=True) as live:
        for frame in found:
            live.update(screen(frame), refresh=True)
    Console().print(screen(frame))
    return 0


def _page(record: str, dashboard: str, insecure: bool) -> int:
    """Serve a record as a page until Ctrl-C."""
    from narrows.ps.dashboard.record_reader import RecordReader
    from narrows.ps.dashboard.run_watch import site_address
    from narrows.ps.dashboard.web import DashboardServer, FrameStream

    host, port = site_address("--dashboard", dashboard, insecure)
    read = RecordReader(record)
    read.read()
    frames = FrameStream(read.history.frame)
    site = DashboardServer("--dashboard", host, port, frames, None)
    click.echo(f"ps-top: {site.told}; Ctrl-C ends it")
    try:
        while True:
            time.sleep(TURN_S)
            with frames.lock:
                read.read()
    finally:
        site.close()


def main() -> None:
    run(command, "ps-top")


if __name__ == "__main__":
    main()
