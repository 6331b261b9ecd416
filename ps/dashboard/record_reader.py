"""Where a run is read from: the record of one, or the page of one that goes on."""

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
from narrows.ps.dashboard.history import RunHistory

FIRST_S = 3.0  # until there is a first answer
SILENT_S = 30.0  # without a word of the page: a frame comes each second
LINE_BYTES_MAX = 64 << 20  # one frame


class RecordReader:
    """The lines of a record, as they come. `read` raises UsageError where it is none."""

    def __init__(self, path: str) -> None:
        self.path, self.history = path, RunHistory()
        self.offset = self.number = 0  # bytes, and lines, that were taken

    def read(self) -> bool:
        """Take what is there of it by now; whether that was anything."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError as error:
            raise UsageError(f"--record {self.path}: {error.strerror}") from None
        *lines, left = data.split(b"\n")  # not all of the last one may be written
        self.offset += len(data) - len(left)
        for line in lines:
            self.number += 1
            try:
                self.history.take(json.loads(line, parse_constant=_absent))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise UsageError(f"--record {self.path}: line {self.number} is none of a record ({error})") from None
        return bool(lines)


def _absent(name: str) -> None:
    """What NaN and Infinity are taken for: a page could not show them."""


def frames(address: str) -> Iterator[dict[str, Any]]:
    """Those of the page at HOST:PORT, as they come. Raises UnreachableError where there is none, NarrowsError where it falls
    silent, UsageError for an address that is none."""
    url = address if address.startswith(("http://", "https://")) else f"http://{address.removeprefix('tcp://')}"
    url = url.rstrip("/")
    if found := _instead(url):
        raise UnreachableError(f"no page of a run is at {address}: {found}; start ps-serve with --dashboard")
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


def _instead(url: str) -> str:
    """What is there instead of the page of a run, "": that is there."""
    try:
        with urllib.request.urlopen(url + "/frame.json", timeout=FIRST_S) as answer:
            kind = answer.headers.get_content_type()
            frame = json.loads(answer.read(LINE_BYTES_MAX)) if kind == "application/json" else None
            return "" if isinstance(frame, dict) and "members" in frame else f"an HTTP server answers with {kind}"
    except urllib.error.HTTPError as error:
        with error:
            return f"an HTTP server answers with {error.code} {error.reason}"
    except http.client.InvalidURL:
        raise UsageError(f"{url.partition('//')[2]}: give HOST:PORT of the page") from None
    except urllib.error.URLError as error:
        return str(error.reason)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if _is_of_zeromq(url):
            return "that is where workers join a run, and the page has an address of its own"
        return (
            f"nobody answered within {FIRST_S:.0f} s" if isinstance(error, TimeoutError) else "that is no HTTP server"
        )


def _is_of_zeromq(url: str) -> bool:
    """Whether the one at this address greets as ZeroMQ does (rfc.zeromq.org/spec/23): it speaks first."""
    there = urllib.parse.urlsplit(url)
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((there.hostname or "", there.port or 80), FIRST_S) as connection,
    ):
        said = connection.recv(10, socket.MSG_WAITALL)
        return said[:1] == b"\xff" and said[9:] == b"\x7f"
    return False
