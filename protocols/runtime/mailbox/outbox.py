"""What a mailbox sends: a queue for each receiver, the threads that make objects of it, and the window of each box.

How it works

    queue ──> narrows-mailbox-send-N: one object of all that waits, short messages of `control` first ──> the receiver's box

1. `send` queues a message, unless the window of its receiver is full: FLYING_BYTES_MAX, FLYING_OBJECTS_MAX.
2. A sending thread takes one receiver at a time, so that the objects of a box appear in the order of their sequence.
3. An object that the receiver has deleted was taken. The thread looks for that only when half of the window is in use.
4. A member asks a shard for its epoch before it sends it anything: each message is for one life of the shard.
5. The box of a member with which nothing was exchanged for PEER_SILENT_S is emptied: the member is dead, and nobody
   writes to it any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from narrows.protocols.addresses import behind, shard_name
from narrows.protocols.messages import PARTS_MAX
from narrows.protocols.runtime.mailbox.requests import StoreRequests
from narrows.protocols.runtime.mailbox.sealing import (
    OBJECT_BYTES,
    ObjectHeader,
    Sealer,
    after,
    box_of,
    new_epoch,
    of_routing_id,
)
from narrows.protocols.runtime.network.sockets import FULL, NOBODY, NOWHERE, SENT, Peer, Receipt

QUEUE_MESSAGES_MAX = 4 * PARTS_MAX  # to one receiver, not sent yet, as of a socket
FLYING_BYTES_MAX = 1 << 30  # to one receiver, sent or not, that it has not deleted; one longer message may go
FLYING_OBJECTS_MAX = 256  # objects in one receiver's box
LANES = 4  # threads that send; each has one receiver at a time
GATHER_S = 0.01  # wait for further messages of a burst, before an object is made of them
ASK_S = 5.0  # a shard that does not answer is asked for its epoch again after this time
FULL_S = 0.5  # interval of looking into a box that is full
PEER_SILENT_S = 600.0  # the box of a member with which nothing was exchanged for so long is emptied


@dataclass(slots=True)
class MailboxPeer:
    """A receiver: what waits for it, and what lies in its box.

    Args:
        to: as the owner knows it.
        box: the name of its box.
        public: its public key.
        epoch: of its process; "": not known yet.
    """

    to: Peer
    box: str
    public: str
    epoch: str = ""
    control: deque[bytes] = field(default_factory=deque)
    data: deque[bytes] = field(default_factory=deque)
    waiting_bytes: int = 0
    flying: dict[str, int] = field(default_factory=dict)  # by name, the bytes of an object in its box
    flying_bytes: int = 0
    sequence: int = 0  # of the next object
    busy: bool = False  # a thread sends to it
    greets: bool = False  # it wrote to an earlier life of this process, and does not know the present one
    not_before_s: float = 0.0
    met_s: float = 0.0  # when a message of it was taken, or one to it was put, the later

    @property
    def wants(self) -> bool:
        return bool(self.control or self.data or self.greets)

    def fits(self, size: int) -> bool:
        """True if a message of this size may be queued."""
        held, count = self.waiting_bytes + self.flying_bytes, len(self.control) + len(self.data)
        return count < QUEUE_MESSAGES_MAX and (not held or held + size <= FLYING_BYTES_MAX)

    @property
    def tight(self) -> bool:
        """True if the window is half full, as far as this process knows."""
        return 2 * len(self.flying) >= FLYING_OBJECTS_MAX or 2 * self.flying_bytes >= FLYING_BYTES_MAX

    def queue(self, message: bytes, control: bool) -> None:
        (self.control if control else self.data).append(message)
        self.waiting_bytes += len(message)

    def take(self) -> tuple[bytes, bool]:
        """Take what goes into the next object, or the next message if it is longer than one. Return it, and if it hurries."""
        taken, size, hurries = list[bytes](), 0, False
        for queue in (self.control, self.data):
            while queue and (not taken or size + len(queue[0]) <= OBJECT_BYTES):
                hurries |= queue is self.data
                taken.append(queue.popleft())
                size += len(taken[-1])
        self.waiting_bytes -= size
        self.greets = False
        return b"".join(taken), hurries

    def fly(self, name: str, size: int) -> None:
        """Note an object that is put into its box."""
        self.sequence += 1
        self.met_s = time.monotonic()
        self.flying[name] = size
        self.flying_bytes += size

    def lies(self, there: dict[str, int]) -> None:
        """Note which objects lie in its box: it has taken the others."""
        self.flying = {name: size for name, size in self.flying.items() if name in there}
        self.flying_bytes = sum(self.flying.values())

    def forget(self) -> None:
        """Drop what waits for it."""
        self.control.clear()
        self.data.clear()
        self.waiting_bytes = 0


class Outbox:
    """What one process sends through a mailbox.

    Args:
        requests: to the store.
        sealer: with the keys of this process.
        shard: the number of the shard that this process is; None: it is a member.
        server: of a member: the public key of the shards.
        name: of a member: the name by which the shards know it.
    """

    def __init__(
        self, requests: StoreRequests, sealer: Sealer, shard: int | None, server: str = "", name: bytes = b""
    ) -> None:
        self.requests, self.sealer, self.shard, self.server, self.name = requests, sealer, shard, server, name
        self.epoch = new_epoch()
        self.sender = sealer.own.public if shard is None else shard_name(shard)
        self.changed = threading.Condition()  # guards the receivers
        self.peers: dict[str, MailboxPeer] = {}  # by box
        self._lanes = 0
        self._closing = False
        self._cleaned_s = time.monotonic()

    # Receivers.

    def shard_at(self, address: str) -> int | None:
        """Return the number of the shard at an address in this mailbox; None: it leads elsewhere."""
        base = self.requests.address
        number = address.removeprefix(f"{base}/{shard_name(0)[:-1]}")
        if number.isdecimal() and address == behind(base, int(number)):
            return int(number)
        return 0 if address == base else None

    def peer(self, to: Peer) -> MailboxPeer | None:
        """Return a receiver, a new one if it is not known; None: no mailbox leads to it. `changed` is held."""
        if isinstance(to, bytes):
            if self.shard is None or (found := of_routing_id(to)) is None:
                return None
            made = MailboxPeer(to, box_of(*found), *found)
        else:
            if self.shard is not None or (shard := self.shard_at(to)) is None:
                return None
            made = MailboxPeer(to, shard_name(shard), self.server)
        made.met_s = time.monotonic()
        return self.peers.setdefault(made.box, made)

    def heard(self, box: Peer, epoch: str) -> tuple[Peer, bool]:
        """Note that a receiver was heard. Return how the owner knows it, and True if its process is a new one."""
        with self.changed:
            peer = self.peers[box] if isinstance(box, str) else self.peer(box)
            assert peer is not None
            anew = "" != peer.epoch < epoch
            if not peer.epoch:
                peer.not_before_s = 0.0
                self.changed.notify_all()
            peer.met_s, peer.epoch = time.monotonic(), epoch
            return peer.to, anew

    def greet(self, to: Peer, known: str) -> None:
        """Tell a member the epoch of this process. `known`: the one that it has written to."""
        with self.changed:
            if known > self.epoch:  # the clock of this machine was set back
                self.epoch = after(known)
                for each in self.peers.values():
                    each.sequence = 0
            if (peer := self.peer(to)) is not None:
                peer.greets = True
                self._more_lanes()

    # The owner's thread.

    def send(self, to: Peer, message: bytes, control: bool) -> Receipt:
        """Queue a message; as `Port.send`."""
        with self.changed:
            peer = self.peer(to)
            if peer is None or self._closing:
                return NOBODY if isinstance(to, bytes) else NOWHERE
            if not peer.fits(len(message)):
                return FULL
            peer.queue(message, control)
            self._more_lanes()
        return SENT

    def forget(self, address: str) -> None:
        """Drop what waits for the shard at this address."""
        with self.changed:
            if (shard := self.shard_at(address)) is not None and (peer := self.peers.get(shard_name(shard))):
                peer.forget()

    def close(self, limit_s: float) -> None:
        """Give the receivers this time to take all that was sent. The owner then closes the requests."""
        taken = threading.Event()
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self.requests.begin("linger", lambda: self._linger(taken))
        taken.wait(limit_s)
        self.requests.over.set()
        with self.changed:
            self.changed.notify_all()

    # The threads.

    def _more_lanes(self) -> None:
        """Wake a sending thread, and start one if all are busy. `changed` is held."""
        if self._lanes < LANES and self._lanes <= sum(peer.busy for peer in self.peers.values()):
            self._lanes += 1
            self.requests.begin(f"send-{self._lanes}", self._send)
        self.changed.notify_all()

    def _send(self) -> None:
        """A sending thread."""
        while (peer := self._next()) is not None:
            try:
                self._carry(peer)
            finally:
                with self.changed:
                    peer.busy = False
                    self.changed.notify_all()

    def _next(self) -> MailboxPeer | None:
        """Wait for a receiver with messages that no thread sends to; None: the mailbox is closed."""
        with self.changed:
            while not self.requests.over.is_set():
                now = time.monotonic()
                idle = [peer for peer in self.peers.values() if peer.wants and not peer.busy]
                for peer in idle:
                    if peer.not_before_s <= now:
                        peer.busy = True
                        return peer
                self.changed.wait(min(peer.not_before_s for peer in idle) - now if idle else None)
        return None

    def _carry(self, peer: MailboxPeer) -> None:
        """Put the next object, or all objects of the next message, into the box of its receiver."""
        if not peer.epoch:
            return self._ask(peer)
        if peer.tight:
            self._look(peer)
            if len(peer.flying) >= FLYING_OBJECTS_MAX:
                peer.not_before_s = time.monotonic() + FULL_S
                return
        self.requests.over.wait(GATHER_S)
        with self.changed:
            body, hurries = peer.take()
            epoch, heard = self.epoch, peer.epoch
        view = memoryview(body)
        pieces = [view[at : at + OBJECT_BYTES] for at in range(0, len(body), OBJECT_BYTES)] or [view]
        for number, piece in enumerate(pieces):
            place = number, len(pieces) - 1 - number
            header = ObjectHeader(peer.box, self.sender, epoch, peer.sequence, heard, self.name, *place, hurries)
            name, content = f"{peer.box}/{header.object}", self.sealer.seal(peer.public, header, piece)
            with self.changed:
                peer.fly(name, len(content))
            if not self.requests.put(name, content):
                return

    def _ask(self, peer: MailboxPeer) -> None:
        """Ask a shard for its epoch, by an empty object. What waits for the shard waits for its answer."""
        with self.changed:
            peer.not_before_s = time.monotonic() + ASK_S
            if self._closing and peer.sequence:  # else it might be put after this box was emptied
                return
            header = ObjectHeader(peer.box, self.sender, self.epoch, peer.sequence, name=self.name)
            peer.fly(f"{peer.box}/{header.object}", 0)
        self.requests.put(f"{peer.box}/{header.object}", self.sealer.seal(peer.public, header, b""))

    def _look(self, peer: MailboxPeer) -> None:
        """Look into the box of a receiver: what lies there no more was taken."""
        if (there := self.requests.list(peer.box)) is not None:
            with self.changed:
                peer.lies(there)

    def _linger(self, taken: threading.Event) -> None:
        """A thread of `close`: set the event once all has left, and the receivers have taken it."""
        wait_s, over = GATHER_S, self.requests.over
        with self.changed:
            while any(peer.wants or peer.busy for peer in self.peers.values()) and not over.is_set():
                self.changed.wait(0.1)
        while not over.is_set() and (left := [peer for peer in self.peers.values() if peer.flying]):
            for peer in left:
                self._look(peer)
            over.wait(wait_s)
            wait_s = min(FULL_S, 2 * wait_s)
        taken.set()

    def clean(self) -> None:
        """Empty the boxes of members with which nothing was exchanged for long. The polling thread calls this."""
        now = time.monotonic()
        if self.shard is None or now - self._cleaned_s < PEER_SILENT_S / 10:
            return
        self._cleaned_s = now
        with self.changed:
            for peer in [*self.peers.values()]:
                if now - peer.met_s > PEER_SILENT_S and not peer.busy and not peer.wants:
                    self.requests.delete([*peer.flying])
                    del self.peers[peer.box]

    @property
    def unheard(self) -> list[str]:
        """The objects that lie in the boxes of shards that never answered."""
        with self.changed:
            return [name for peer in self.peers.values() if not peer.epoch for name in peer.flying]
