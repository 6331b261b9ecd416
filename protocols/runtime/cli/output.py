"""The output of a process: lines of the console, events for its parent, the record file, and files that replace others.

A file that is replaced is kept under another name.

Rules
- Neither a full disk nor a reader that has ended stops a run. A stream that refuses a line is reported once, on stderr,
  and again once it takes lines. Until then each line is tried, so the stream goes on when the disk has room.
- Text that a console's encoding lacks is shown by escapes. Bytes that a script wrote pass unchanged.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from narrows.protocols.errors import UsageError, printable

KEPT_MAX = 1000  # kept earlier files of one name


class LineStream(Protocol):
    """What lines are written to: a text file, or the parts of a record in a store."""

    @property
    def encoding(self) -> str: ...
    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def close(self) -> object: ...


class Output:
    """Lines to one text stream.

    Args:
        name: What a user calls the stream, e.g. "stdout".
        stream: Returns the stream as it is now, None where the descriptor was closed before the command began.
        tell: Gets a sentence where the stream begins to refuse lines, and where it takes them again.
    """

    def __init__(self, name: str, stream: Callable[[], LineStream | None], tell: Callable[[str], None]) -> None:
        self.name, self.stream, self.tell = name, stream, tell
        self.lost = 0  # lines since the stream refused one

    def line(self, text: str) -> None:
        """Write a line at once, or count it as lost."""
        if (stream := self.stream()) is None:
            return
        try:
            _write(stream, text + "\n")
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                why = error.strerror or str(error)
                self.tell(f"{self.name}: {why}; the run goes on, and lines are lost until it can be written again")
        else:
            lost, self.lost = self.lost, 0
            if lost:
                self.tell(f"{self.name} can be written again; {lost:,} lines are missing")

    def close(self) -> None:
        """Close the stream; what a full disk does not take is lost."""
        if (stream := self.stream()) is not None:
            with contextlib.suppress(OSError):
                stream.close()
        if self.lost:
            self.tell(f"{self.name}: the last {self.lost:,} lines are missing")


def _write(stream: LineStream, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.flush()
        encoding, raw = stream.encoding, getattr(stream, "buffer", None)
        try:
            encoded = text.encode(encoding, "surrogateescape")  # as text_of has decoded it
        except UnicodeEncodeError:
            encoded = text.encode(encoding, "backslashreplace")
        if raw is not None:
            raw.write(encoded)
        else:
            stream.write(encoded.decode(encoding, "backslashreplace"))
    stream.flush()


def as_json(value: Any) -> str:
    """Return a value as one line of JSON. A number that is not finite is null there: JSON has no other word for it."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), allow_nan=False)


def finite(value: Any) -> Any:
    """Return dicts, lists and numbers with None in the place of each float that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return value


def text_of(raw: bytes) -> str:
    """Return the text of bytes that a child wrote for our console: `Output` writes the same bytes."""
    return raw.decode(getattr(sys.stdout, "encoding", None) or "utf-8", "surrogateescape")


STDERR = Output("stderr", lambda: sys.stderr, lambda text: None)  # no stream is left to report its failure on


def stdout(tell: Callable[[str], None]) -> Output:
    """Return the lines of stdout; `tell` as in Output."""
    return Output("stdout", lambda: sys.stdout, tell)


class CommandConsole:
    """The lines that one command prints for its user, each after the name of the command.

    Args:
        name: the command, such as "ps-serve".
        plain: gets the lines that are no errors. Errors go to stderr.
        relay: sends a line that is no error to the command that started this process, which prints it; returns False if
            there is none. By default this process prints all lines itself.
    """

    def __init__(self, name: str, plain: Output = STDERR, relay: Callable[[str], bool] = lambda text: False) -> None:
        self.name, self.plain, self.relay = name, plain, relay

    def say(self, text: str, error: bool = False) -> None:
        """Print a line. Characters that could control the terminal are shown as escapes."""
        if error or not self.relay(text):
            (STDERR if error else self.plain).line(f"{self.name}: {printable(text)}")


def emit(event: str, **values: Any) -> None:
    """Write an event to stdout for the parent process: one line of JSON. A parent that has ended gets nothing."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps({"event": event, **values}).encode() + b"\n")


def open_standard_descriptors() -> None:
    """Open the null device as each of stdin, stdout and stderr that was closed before the command began.

    Else a socket or a pipe gets that number, and the processes that the command starts take it for their stdin or stdout.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            os.set_inheritable(number, True)


def end() -> None:
    """Flush stdout and stderr. Text that a stream refuses is lost, so that the interpreter does not fail at its end."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, number)
            os.close(nothing)


def set_aside(path: str | os.PathLike[str], flag: str = "") -> str:
    """Rename the file at `path` to PATH.1, or to the next number that is free.

    Args:
        path: a file that something else is about to be written to.
        flag: that named it, for an error.

    Returns:
        The new name; "" where `path` is no file, or an empty one.

    Raises:
        UsageError: KEPT_MAX files are beside it.
        OSError: the folder refuses.
    """
    name = os.fspath(path)
    if not os.path.isfile(name) or not os.path.getsize(name):
        return ""
    free = (each for n in range(KEPT_MAX) if not os.path.lexists(each := f"{name}.{n + 1}"))
    if (kept := next(free, None)) is None:
        named = f"{flag} {name}".strip()
        raise UsageError(
            f"{named}: {KEPT_MAX} older files of this name are beside it; move some away, or name another file"
        )
    os.rename(name, kept)
    return kept


def replace_text(path: str, text: str, flag: str) -> str:
    """Write a file whole or not at all. A file of that name with another text is set aside first.

    Returns:
        The name under which the earlier file is kept; "" where there was none.

    Raises:
        UsageError: it cannot be written.
    """
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        same = os.path.isfile(path) and Path(path).read_bytes() == temporary.read_bytes()
        kept = "" if same else set_aside(path, flag)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return kept


def write_ready(path: str, values: Mapping[str, Any]) -> None:
    """Write what a command serves, and where, to its --ready-file, whole or not at all.

    Args:
        path: the value of the flag; "": no file.
        values: plain values.

    Raises:
        UsageError: the file cannot be written.
    """
    if not path:
        return
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(values))
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"--ready-file {path}: {error.strerror}") from None


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines; each column is as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def seconds(value_s: float) -> str:
    """Return a time in seconds, or in milliseconds below 1 s."""
    return f"{value_s:.3g} s" if value_s >= 1 else f"{1e3 * value_s:.3g} ms"
