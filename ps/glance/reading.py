"""Where a run is read from: the record of one, or the page of one that goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from narrows.protocols.errors import NarrowsError, UnreachableError, UsageError
from narrows.ps.glance.history import History

SILENT_S = 30.0  # without a word of the page: a frame comes each second
LINE_BYTES_MAX = 64 << 20  # one frame


class Record:
    """The lines of a record, as they come. `read` raises UsageError where it is none."""

    def __init__(self, path: str) -> None:
        self.path, self.history = path, History()
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
    silent."""
    url = address if address.startswith(("http://", "https://")) else f"http://{address.removeprefix('tcp://')}"
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/events", timeout=SILENT_S) as stream:
            while line := stream.readline(LINE_BYTES_MAX):
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except urllib.error.URLError as error:
        raise UnreachableError(
            f"no page of a run is at {address} ({error.reason}): start ps-serve with --dashboard"
        ) from None
    except (OSError, ValueError):
        raise NarrowsError(f"the page at {address} has fallen silent") from None
