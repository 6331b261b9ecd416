"""The errors of Narrows: each is one sentence for a person, and the exit code of the design it ends a command with."""

from __future__ import annotations


class NarrowsError(Exception):
    """Base of all errors that a user may meet. `exit_code` as in docs/reference.md, "Exit codes"."""

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
    """The server was there and is no more."""

    exit_code = 6


class StageLostError(NarrowsError):
    """Another stage of this pipeline was there and is no more."""

    exit_code = 6


class NotSavedError(NarrowsError):
    """The run was trained, and its model or a checkpoint of its end could not be written."""

    exit_code = 7


class LocalProtocolError(NarrowsError):
    """Our own code broke the protocol: a bug here."""


class RemoteProtocolError(NarrowsError):
    """The peer broke the protocol: its session ends, no state changes."""

    exit_code = 5


BY_EXIT_CODE: dict[int, type[NarrowsError]] = {
    error.exit_code: error
    for error in (UsageError, UnreachableError, AuthenticationError, IncompatibleError, ServerLostError)
}
