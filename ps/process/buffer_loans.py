"""Views of a shard's arrays that are on their way, by who is to get them, or held back until a standby has their cause.

A view is read until the last of it has left. Until then the array must not change, and is copied where it would. So each view
of an old array that somebody does not take holds memory, and there is a bound on that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from narrows.protocols.effects import Send, SendToPeer, Stop
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.sockets import Peer, Receipt

LENT_BYTES_MAX = 1 << 26  # to one peer, or as long as
LENT_TIMES = 4  # that of the machine is more: a state, the master copy, and both once more


class BufferLoans:
    """The views and the held effects of one process."""

    def __init__(self) -> None:
        self.views: dict[Peer, deque[tuple[Receipt, int]]] = {}
        self.held: deque[tuple[int, Send | SendToPeer | Stop]] = deque()  # with the event that they follow from

    def add(self, peer: Peer, receipt: Receipt, view: Buffer) -> None:
        """The last frame of a message is on its way. Bytes never change, and copies are nobody else's."""
        if receipt.lent and not isinstance(view, bytes):
            self.views.setdefault(peer, deque()).append((receipt, len(view)))

    def any(self) -> bool:
        """Something is lent to somebody."""
        for peer in [*self.views]:
            self._settle(peer)
        return bool(self.views or self.held)

    def full(self, peer: Peer, view: Buffer, nbytes: Callable[[], int]) -> bool:
        """This peer has not taken what it was sent, and must not be sent one more. `nbytes`: of the machine, asked for where
        more is lent than is ever little."""
        if peer not in self.views or isinstance(view, bytes):
            return False
        self._settle(peer)
        lent = sum(size for _, size in self.views.get(peer, ()))
        return lent > LENT_BYTES_MAX and lent > LENT_TIMES * nbytes()

    def _settle(self, peer: Peer) -> None:
        """Forget what has left: what was lent first leaves first."""
        views = self.views[peer]
        while views and not views[0][0].lent:
            views.popleft()
        if not views:
            del self.views[peer]
