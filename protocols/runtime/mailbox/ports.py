"""One `Port` of several: the sockets of a server process, and the mailboxes in which it meets members or its parent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.mailbox.mailbox import Mailbox
from narrows.protocols.runtime.network.sockets import Peer, Receipt, Sockets

TOLD_S = 10.0  # interval of the counts of requests in the record


class JoinedPorts:
    """A `Port` over sockets and mailboxes. A message goes by the mailbox that leads to its receiver, else by a socket.

    Args:
        sockets: their `receive` waits for all; a mailbox wakes it.
        mailboxes: of other addresses each.
        tell: gets each mailbox every TOLD_S, in the owner's thread: its counts are due.
    """

    def __init__(
        self, sockets: Sockets, mailboxes: Sequence[Mailbox], tell: Callable[[Mailbox], object] = lambda mailbox: None
    ) -> None:
        self.sockets, self.mailboxes, self.tell = sockets, mailboxes, tell
        self._told_s = time.monotonic()

    def _to(self, peer: Peer) -> Mailbox | Sockets:
        return next((mailbox for mailbox in self.mailboxes if mailbox.leads_to(peer)), self.sockets)

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        return self._to(to).send(to, frames, control=control)

    def receive(self, limit_ms: int) -> Iterator[tuple[Peer, list[Buffer]]]:
        yield from self.sockets.receive(limit_ms)
        for mailbox in self.mailboxes:
            yield from mailbox.receive(0)
        if time.monotonic() - self._told_s >= TOLD_S:
            self._told_s = time.monotonic()
            for mailbox in self.mailboxes:
                self.tell(mailbox)

    def wake(self) -> None:
        self.sockets.wake()

    def hang_up(self, address: str) -> None:
        self._to(address).hang_up(address)

    def close(self) -> None:
        """Close the mailboxes, and then the sockets."""
        for mailbox in self.mailboxes:
            mailbox.close()
        self.sockets.close()
