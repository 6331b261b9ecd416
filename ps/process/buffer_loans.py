"""Loans: views of a shard's arrays that are on their way to a peer, or in effects that wait for a standby.

ZeroMQ reads a view until its last byte has left. Until then the array must not change: a change of it goes to a fresh
array. So each view of an old array that a slow peer has not taken holds memory, and `full` bounds this memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from narrows.protocols.effects import Send, SendToPeer, StopProcess
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.network.sockets import Peer, Receipt

LENT_BYTES_MAX = 1 << 26  # bytes that one peer may have on loan, whatever the size of the machine
LENT_TIMES = 4  # or so many times the machine, if that is more: a state, the master copy, and both once more


class BufferLoans:
    """The views and the held effects of one process."""

    def __init__(self) -> None:
        self.views: dict[Peer, deque[tuple[Receipt, int]]] = {}  # by peer: receipt and bytes of each view, oldest first
        # (event, effect): effects that wait until the standby has acknowledged their event.
        self.held: deque[tuple[int, Send | SendToPeer | StopProcess]] = deque()

    def add(self, peer: Peer, receipt: Receipt, view: Buffer) -> None:
        """Note the last frame of a message that was sent. A bytes object never changes, so it is no loan."""
        if receipt.lent and not isinstance(view, bytes):
            self.views.setdefault(peer, deque()).append((receipt, len(view)))

    def any(self) -> bool:
        """True if a view of an array is on loan, or an effect with one is held."""
        for peer in [*self.views]:
            self._settle(peer)
        return bool(self.views) or any(_has_view(effect) for _, effect in self.held)

    def full(self, peer: Peer, view: Buffer, nbytes: Callable[[], int]) -> bool:
        """True if this peer has too much on loan to be sent one more view.

        Args:
            peer: the peer.
            view: the view to send.
            nbytes: returns the bytes of the machine; called only if more than LENT_BYTES_MAX is on loan.
        """
        if peer not in self.views or isinstance(view, bytes):
            return False
        self._settle(peer)
        lent = sum(size for _, size in self.views.get(peer, ()))
        return lent > LENT_BYTES_MAX and lent > LENT_TIMES * nbytes()

    def _settle(self, peer: Peer) -> None:
        """Forget the views that have left. They leave in the order in which they were lent."""
        views = self.views[peer]
        while views and not views[0][0].lent:
            views.popleft()
        if not views:
            del self.views[peer]


def _has_view(effect: Send | SendToPeer | StopProcess) -> bool:
    """True if the message of an effect has a payload that may change: a bytes object never does."""
    if isinstance(effect, StopProcess):
        return False
    return not isinstance(getattr(effect.message, "payload", b""), bytes)
