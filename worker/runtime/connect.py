"""Joins a worker to a run: dials the given addresses until one of them serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from narrows.protocols.effects import MemberWelcomed
from narrows.protocols.errors import NarrowsError, UnreachableError
from narrows.worker.runtime.member_link import MemberLink

TRY_S = 5.0  # wait for one of several servers before the next one is dialled


def let_in(
    addresses: Sequence[str], dial: Callable[[str, float], MemberLink], connect_s: float
) -> tuple[MemberLink, MemberWelcomed]:
    """Dial each address in turn until a server admits this worker.

    Args:
        addresses: the server and its standbys; a standby refuses while it does not serve.
        dial: opens a link to one address, with a limit in seconds.
        connect_s: the limit for all attempts together, in seconds.

    Returns:
        The link to the server, and this worker's place in the run.

    Raises:
        UnreachableError: no server has answered in time.
        NarrowsError: the first server's refusal, if all have refused.
    """
    deadline = time.monotonic() + connect_s
    try_s = connect_s if len(addresses) == 1 else min(TRY_S, connect_s)
    while True:
        errors = list[NarrowsError]()
        for address in addresses:
            link = dial(address, try_s)
            try:
                return link, _joined(link, try_s)
            except NarrowsError as error:
                link.close()
                errors.append(error)
        if not any(isinstance(error, UnreachableError) for error in errors) or len(addresses) == 1:
            raise errors[0]
        if time.monotonic() > deadline:
            raise UnreachableError(f"none of {', '.join(addresses)} let this worker in within {connect_s:.0f} s")


def _joined(link: MemberLink, limit_s: float) -> MemberWelcomed:
    deadline = time.monotonic() + limit_s + 1
    while not isinstance(joined := link.take(0.5), MemberWelcomed):
        if time.monotonic() > deadline:
            raise UnreachableError(f"{link.address}: the server did not let this worker in within {limit_s:.0f} s")
    return joined
