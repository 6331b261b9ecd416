"""ps-top: a run in the terminal, live from its dashboard or from its record; or a list of several runs.

How it works
1. With one address, or with the name of a run of this machine, ps-top shows the page there. With several it lists them.
2. Without an address it lists the runs of this machine, if there are several or the only one has no page. Else it
   shows the page of the only one, or what answers at DASHBOARD.
3. On a terminal the list is live, and a digit opens the run of that row.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, DASHBOARD, PLACE, Bare, dashboard_flag, run

if TYPE_CHECKING:
    from narrows.ps.dashboard.run_registry import RunFacts
    from narrows.ps.dashboard.run_table import RunRow

LIST_S = 2.0  # between two looks at the runs of a list
TURN_S = 1.0  # between two looks at the record
WIDTH = 180  # characters of a line, where the output is no terminal


@click.command(cls=Bare, context_settings=COMMAND)
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT | NAME]...")
@click.option(
    "--record",
    default="",
    type=PLACE,
    metavar="FILE",
    help="read this record of ps-serve or ps-worker instead, and follow it",
)
@dashboard_flag
@click.option("--insecure", is_flag=True, help="allow --dashboard on addresses beyond loopback")
@click.option("--once", is_flag=True, help="show the present state, and end; without a terminal this is the default")
@click.version_option(package_name="narrows", allow_from_autoenv=False)
def command(addresses: tuple[str, ...], record: str, dashboard: str, insecure: bool, once: bool) -> int:
    """Show the run whose page is at HOST:PORT (ps-serve --dashboard), or the run of a record. Ctrl-C ends ps-top.

    NAME is the --name of a run of this machine. Several addresses are listed, a line for each run; without any, the
    runs of this machine are. With --dashboard ps-top serves a page of the record, or of the list, instead.
    """
    if addresses and record:
        raise UsageError(f"{addresses[0]} and --record {record}: give one of the two")
    if dashboard and not record and len(addresses) < 2:
        raise UsageError(
            "--dashboard: ps-top serves the page of a record or of several addresses, ps-serve that of its run; give --record "
            "or addresses too"
        )
    try:
        if dashboard and record:
            return _page(record, dashboard, insecure)
        if record:
            return _terminal("", record, once)
        address, look = _chosen(addresses)
        if dashboard and look is not None:
            return _page_of_list(look, dashboard, insecure)
        return _terminal(address, "", once) if look is None else _list(look, once)
    except KeyboardInterrupt:
        return 130


def _chosen(addresses: tuple[str, ...]) -> tuple[str, Callable[[], list[RunRow]] | None]:
    """Return the address of the one page to show, or a function that looks at the runs to list."""
    from narrows.ps.dashboard import run_table
    from narrows.ps.dashboard.run_registry import RunFacts

    here = list[RunFacts]()
    if not all(":" in each for each in addresses) or not addresses:
        with contextlib.suppress(UsageError):  # the list cannot be used: ps-serve runs says why
            here = _here()
    named = {facts.name: facts for facts in here if facts.name}
    found = [named.get(each, RunFacts(page=each)) for each in addresses]
    if not addresses and (len(here) > 1 or any(not facts.page for facts in here)):
        return "", lambda: run_table.with_pages(_here())
    if len(found) > 1:
        return "", lambda: run_table.with_pages(found)
    for facts in (*found, *here)[:1]:
        if not facts.page:
            raise UsageError(f"{facts.name}: that run has no page; start its ps-serve with --dashboard")
        return facts.page, None
    return DASHBOARD, None


def _here() -> list[RunFacts]:
    from narrows.ps.dashboard.run_registry import runs

    return runs()


def _list(look: Callable[[], list[RunRow]], once: bool) -> int:
    """List runs, until a digit opens one of them or Ctrl-C ends ps-top."""
    from rich.console import Console
    from rich.live import Live

    from narrows.ps.dashboard.screen import run_list

    if once or not sys.stdout.isatty():
        Console(width=None if sys.stdout.isatty() else WIDTH).print(run_list(look()))
        return 0
    page = ""
    with Live(auto_refresh=False, screen=True) as live, single_keys() as key:
        while not page:
            rows = look()
            live.update(run_list(rows, numbered=True), refresh=True)
            pages = [row.facts.page for row in rows]
            digit = key(LIST_S)
            page = pages[int(digit) - 1] if digit.isdecimal() and 0 < int(digit) <= len(pages) else ""
    return _terminal(page, "", once)


@contextlib.contextmanager
def single_keys() -> Iterator[Callable[[float], str]]:
    """Take single keys from the terminal of stdin, without echo.

    Yields:
        A function that returns the key that was pressed within so many seconds, "" for none.
    """
    if sys.stdin is None or not sys.stdin.isatty():

        def none(limit_s: float) -> str:
            time.sleep(limit_s)
            return ""

        yield none
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def key(limit_s: float) -> str:
        ready = select.select([terminal], [], [], limit_s)[0]
        return os.read(terminal, 1).decode("ascii", "replace") if ready else ""

    tty.setcbreak(terminal)
    try:
        yield key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


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


def _page_of_list(look: Callable[[], list[RunRow]], dashboard: str, insecure: bool) -> int:
    """Serve a page that lists several runs, with links to their pages, until Ctrl-C."""
    from narrows.ps.dashboard.history import RunHistory
    from narrows.ps.dashboard.run_table import told
    from narrows.ps.dashboard.run_watch import site_address
    from narrows.ps.dashboard.web import DashboardServer, FrameStream

    look()  # an address that is none is said here
    empty = RunHistory().frame() | {"run": {"lists": True}}
    host, port = site_address("--dashboard", dashboard, insecure)
    site = DashboardServer(
        "--dashboard", host, port, FrameStream(lambda: empty), None, FrameStream(lambda: told(look()))
    )
    click.echo(f"ps-top: {site.told}; Ctrl-C ends it")
    try:
        while True:
            time.sleep(LIST_S)
    finally:
        site.close()


def main() -> None:
    run(command, "ps-top")


if __name__ == "__main__":
    main()
