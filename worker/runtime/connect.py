"""How a worker is let in: by the one of several servers that serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from narrows.protocols.effects import Joined
from narrows.protocols.errors import NarrowsError, UnreachableError
from narrows.worker.runtime.member_link import MemberLink

TRY_S = 5.0  # that one of several servers is waited for, then it is the next one's turn


def let_in(
    addresses: Sequence[str], dial: Callable[[str, float], MemberLink], connect_s: float
) -> tuple[MemberLink, Joined]:
    """The link to the one of these that serves; its standbys refuse. Raises what the first has said, where all have."""
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


def _joined(link: MemberLink, limit_s: float) -> Joined:
    deadline = time.monotonic() + limit_s + 1
    while not isinstance(joined := link.take(0.5), Joined):
        if time.monotonic() > deadline:
            raise UnreachableError(f"{link.address}: the server did not let this worker in within {limit_s:.0f} s")
    return joined
