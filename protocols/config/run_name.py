"""The name of a run (--name): its server refuses members that name another run, or none.

A member sends the name among its flags, in Hello. "" is a run without a name. So a server without a name has members
without a name alone, and the workers of a run that has ended cannot join the next one at the same address.
"""

from __future__ import annotations

import re

from narrows.protocols.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # of a run, and of a machine that has a key


def check_run_name(flag: str, name: str) -> None:
    """Raise UsageError if `name`, the value of `flag`, is neither a name nor "" for none."""
    if name and not NAME.fullmatch(name):
        raise UsageError(
            f"{flag} {name[:64]!r}: a name has at most 64 letters, digits and . _ - and begins with a letter or digit"
        )


def other_run(expected: object, actual: str) -> str:
    """Compare the name that a member was given with that of the server's run.

    Args:
        expected: the member's, as it came in Hello.
        actual: the server's; "" for none.

    Returns:
        One sentence that names both and the way out; "" if they are equal.
    """
    if expected == actual:
        return ""
    if not isinstance(expected, str) or not (expected == "" or NAME.fullmatch(expected)):
        return "the flags have a --name that is no name of a run"
    if not expected:
        return (
            f"the run of this server has the name {actual}, and no --name was given here: give --name {actual} to join it, or "
            "the address of the other run's server"
        )
    if not actual:
        return (
            f"--name {expected}: the run of this server has no name: leave --name out to join it, or start its server with "
            f"--name {expected}"
        )
    return (
        f"--name {expected}: the run of this server has the name {actual}: give --name {actual} to join it, or the address of "
        f"the server of {expected}"
    )
