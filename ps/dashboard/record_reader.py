"""Readers of a run: of its record, or of the frames of its dashboard."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from narrows.protocols.errors import NarrowsError, UnreachableError, UsageError
from narrows.protocols.runtime.storage.record_file import tail_of, told
from narrows.ps.dashboard.history import RunHistory

FIRST_S = 3.0  # limit for the first answer
SILENT_S = 30.0  # a page that sends nothing for so long is dead: it sends a line each second
LINE_BYTES_MAX = 64 << 20  # bytes of a frame


class RecordReader:
    """Follows a record, at a path or an address: each `read` takes the lines that were added."""

    def __init__(self, path: str) -> None:
        self.path, self.history, self.tail = path, RunHistory(), tail_of(path)
        self.number = 0  # lines taken so far

    def read(self) -> bool:
        """Take the new lines. Return False if there were none.

        Raises:
            UsageError: the file cannot be read, or a line is not one of a record.
        """
        try:
            lines = [*self.tail.lines()]
        except OSError as error:
            raise UsageError(f"--record {told(self.path, error)}") from None
        for line in lines:
            self.number += 1
            try:
                self.history.take(json.loads(line, parse_constant=_absent))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UsageError(f"--record {self.path}: line {self.number} is not one of a record ({error})") from None
        return bool(lines)


def events(path: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a whole record. Raises UsageError: the file cannot be read, or a line is not one of a record."""
    try:
        for number, line in enumerate(tail_of(path).lines(), 1):
            try:
                event = json.loads(line, parse_constant=_absent)
                yield event | {"event": event["event"]}
            except (ValueError, TypeError, KeyError) as error:
                raise UsageError(f"{path}: line {number} is not one of a record ({error})") from None
    except OSError as error:
        raise UsageError(told(path, error)) from None


def _absent(name: str) -> None:
    """Return None for NaN and Infinity, which a page could not show."""


def page_url(address: str) -> str:
    """Return the URL of the page at HOST:PORT, or at a URL, without its last slash."""
    url = address if address.startswith(("http://", "https://")) else f"http://{address.removeprefix('tcp://')}"
    return url.rstrip("/")


def newest_frame(address: str) -> dict[str, Any]:
    """Return the newest frame of the dashboard at HOST:PORT.

    Raises:
        UsageError: this is no address.
        UnreachableError: no dashboard answers there.
    """
    frame, found = _asked(page_url(address))
    if found:
        raise UnreachableError(f"no page of a run is at {address}: {found}; start ps-serve with --dashboard")
    return frame


def frames(address: str) -> Iterator[dict[str, Any]]:
    """Yield the frames of the dashboard at HOST:PORT, as they come.

    Raises:
        UsageError: this is no address.
        UnreachableError: no dashboard answers there.
        NarrowsError: the dashboard has fallen silent.
    """
    newest_frame(address)
    url = page_url(address)
    silent = NarrowsError(f"the page at {address} has fallen silent")
    frame = None
    try:
        with urllib.request.urlopen(url + "/events", timeout=SILENT_S) as stream:
            while line := stream.readline(LINE_BYTES_MAX):
                if line.startswith(b"data: "):
                    yield (frame := json.loads(line[6:]))
    except (OSError, ValueError, http.client.HTTPException):
        raise silent from None
    if frame is None:
        raise silent


def _asked(url: str) -> tuple[dict[str, Any], str]:
    """Return the frame of the dashboard at this address; or {}, and what answers there instead."""
    try:
        with urllib.request.urlopen(url + "/frame.json", timeout=FIRST_S) as answer:
            kind = answer.headers.get_content_type()
            frame = json.loads(answer.read(LINE_BYTES_MAX)) if kind == "application/json" else None
            if isinstance(frame, dict) and "members" in frame:
                return frame, ""
            return {}, f"an HTTP server answers with {kind}"
    except urllib.error.HTTPError as error:
        with error:
            return {}, f"an HTTP server answers with {error.code} {error.reason}"
    except http.client.InvalidURL:
        raise UsageError(f"{url.partition('//')[2]}: give HOST:PORT of the page") from None
    except urllib.error.URLError as error:
        return {}, str(getattr(error.reason, "strerror", None) or error.reason)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if _is_of_zeromq(url):
            return {}, "that is where workers join a run, and the page has an address of its own"
        return {}, f"no answer within {FIRST_S:.0f} s" if isinstance(error, TimeoutError) else "that is no HTTP server"


def _is_of_zeromq(url: str) -> bool:
    """Return True if a ZeroMQ socket is at this address: it sends its greeting first (rfc.zeromq.org/spec/23)."""
    there = urllib.parse.urlsplit(url)
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((there.hostname or "", there.port or 80), FIRST_S) as connection,
    ):
        said = connection.recv(10, socket.MSG_WAITALL)
        return said[:1] == b"\xff" and said[9:] == b"\x7f"
    return False
