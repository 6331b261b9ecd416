"""The errors of Narrows. Each has one sentence for the user, and the exit code with which it ends a command."""

from __future__ import annotations


class NarrowsError(Exception):
    """Base of all errors that a user may see. docs/exit-codes.md lists each `exit_code`."""

    exit_code = 1


class UsageError(NarrowsError):
    """A flag or an argument is wrong."""

    exit_code = 2


class UnreachableError(NarrowsError):
    """No server answered in time."""

    exit_code = 3


class AuthenticationError(NarrowsError):
    """The server refused the identity."""

    exit_code = 4


class IncompatibleError(NarrowsError):
    """Protocol version, model signature, optimizer or mode do not fit the run."""

    exit_code = 5


class ServerLostError(NarrowsError):
    """The server has answered before, and is lost."""

    exit_code = 6


class StageLostError(NarrowsError):
    """Another stage of this pipeline has answered before, and is lost."""

    exit_code = 6


class NotSavedError(NarrowsError):
    """The run has ended, and its model or last checkpoint could not be written."""

    exit_code = 7


class LocalProtocolError(NarrowsError):
    """Narrows itself broke the protocol: a bug in this process."""


class RemoteProtocolError(NarrowsError):
    """The peer broke the protocol: its session ends, and no state changes."""

    exit_code = 5


BY_EXIT_CODE: dict[int, type[NarrowsError]] = {
    error.exit_code: error
    for error in (UsageError, UnreachableError, AuthenticationError, IncompatibleError, ServerLostError)
}


def printable(text: str) -> str:
    """Escape characters that are not printable, except newlines, so that a host's name cannot control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
