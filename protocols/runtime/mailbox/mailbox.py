"""A mailbox: a `Port` whose messages are sealed objects in a store that both ends dial. Nobody listens.

How it works

    owner's thread   send ──> Outbox ── threads ── seal, put ──> RUN/receiver's box/sender-epoch-sequence
                                                                      │
                     receive <── messages <── Inbox ── list, get, open, check
                         └─ the next turn: it was handled ──> delete: the acknowledgement

1. `send` copies a message into the queue of its receiver; threads make objects of what waits (outbox.py).
2. A thread looks into the box of this process, and checks what lies there (inbox.py).
3. `receive` hands the messages to the owner. The next call of its iterator means that the message was handled: then the
   object is deleted. A process that is killed before leaves it.
4. Each life of a shard has an epoch, which each object for it names. A member asks for it first. A member that hears
   another epoch calls `linked`, as over a new connection; a shard answers an object for its life before by an empty one.
5. `close` sends what waits and gives the receivers LINGER_S to take it.

Rules
- The owner's thread never waits for the store.
- What others put into the box costs a request and a count: no object raises an exception.
- A request that fails is repeated with a growing wait (requests.py). If none has passed for STORE_LOST_S, `receive` raises
  UnreachableError.
- There is no connection, so none ends: leases alone tell who is lost.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from narrows.protocols.addresses import shard_name
from narrows.protocols.member.heartbeat_summary import MAILBOX
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.mailbox.inbox import Inbox, PollPace
from narrows.protocols.runtime.mailbox.outbox import Outbox
from narrows.protocols.runtime.mailbox.requests import StoreRequests
from narrows.protocols.runtime.mailbox.sealing import Sealer, box_of, of_routing_id, packed_message
from narrows.protocols.runtime.mailbox.stores import MeteredStore
from narrows.protocols.runtime.network.curve_auth import KeyPair
from narrows.protocols.runtime.network.sockets import BURST, SENT, Peer, Receipt

POLL_S = {"file": (0.01, 0.25)}  # least and most wait between two lists of a box; a list of a folder costs nothing
BUCKET_POLL_S = (0.1, 2.0)  # the same of a bucket, where 1,000 lists cost half a cent
LINGER_S = 5.0  # time for the last objects to be taken; two waits of a receiver that has heard nothing
CLOSE_S = 3.0  # the threads end within this time after it


def pace_of(address: str) -> PollPace:
    """Return how often a process looks into its box in this mailbox."""
    return PollPace(*POLL_S.get(address.partition(":")[0], BUCKET_POLL_S))


def round_trip_s(store: MeteredStore, pace: PollPace) -> float:
    """Return the longest time from a message to its answer, by what requests to the store took last."""
    return 2 * (store.passage_s() + pace.most_s)


class Mailbox:
    """A `Port` over a store.

    Args:
        address: of the mailbox: where its server is reached.
        store: of this address.
        own: the keys of this process.
        shard: the number of the shard that this process is; None: it is a member.
        server: of a member: the public key of the shards.
        admits: of a shard: True if the owner of a public key is a member. The polling thread calls it.
        name: of a member: the name by which the shards know it.
        claim: the epoch of this server; an object with a later one in the box of shard 0 ends this process.
        linked: gets the address of a shard whose process is a new one: what was sent to it may be lost.
        refused: gets a sentence about the first refused object of each kind.
        notify: is called from any thread when `receive` has something to return.
    """

    def __init__(
        self,
        address: str,
        store: MeteredStore,
        own: KeyPair,
        shard: int | None = None,
        server: str = "",
        admits: Callable[[str], bool] = lambda public: False,
        name: bytes = b"",
        claim: str = "",
        linked: Callable[[str], None] = lambda address: None,
        refused: Callable[[str], None] = lambda text: None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.address, self.store, self.shard = address, store, shard
        self.linked, self.refused, self.notify = linked, refused, notify
        sealer = Sealer(own)
        self._ready = threading.Event()
        self._calls: deque[Callable[[], object]] = deque()  # of the owner's callbacks, for its thread
        self.requests = StoreRequests(address, store, self._tell)
        self.outbox = Outbox(self.requests, sealer, shard, server, name)
        box = box_of(own.public, self.outbox.epoch) if shard is None else shard_name(shard)
        callbacks = self._tell_refused, self._tell_linked, self._tell
        self.inbox = Inbox(self.requests, sealer, self.outbox, box, pace_of(address), admits, claim, *callbacks)

    @property
    def trouble(self) -> str:
        """Why requests to the store fail now; "": they do not."""
        return self.requests.trouble

    @property
    def round_trip_s(self) -> float:
        return round_trip_s(self.store, self.inbox.pace)

    # The threads.

    def _tell(self) -> None:
        self._ready.set()
        self.notify()

    def _tell_refused(self, text: str) -> None:
        self._calls.append(lambda: self.refused(text))
        self._tell()

    def _tell_linked(self, address: str) -> None:
        self._calls.append(lambda: self.linked(address))
        self._tell()

    # The owner's thread.

    def report_to(self, linked: Callable[[str], None]) -> None:
        """Report shards that were started again to this from now on."""
        self.linked = linked

    def leads_to(self, to: Peer) -> bool:
        """True if this mailbox, and no socket, leads to this peer."""
        if isinstance(to, bytes):
            return self.shard is not None and of_routing_id(to) is not None
        return self.outbox.shard_at(to) is not None

    def send(self, to: Peer, frames: Sequence[Buffer], *, control: bool = False) -> Receipt:
        receipt = self.outbox.send(to, packed_message(frames), control)
        if receipt is SENT and not control:
            self.inbox.hurry()
        return receipt

    def receive(self, limit_ms: int) -> Iterator[tuple[Peer, list[Buffer]]]:
        if not self.inbox.messages and not self._calls and self.requests.lost is None:
            self._ready.wait(limit_ms / 1000)
        self._ready.clear()
        while self._calls:
            self._calls.popleft()()
        if self.requests.lost is not None:
            raise self.requests.lost
        for _ in range(BURST):
            if not self.inbox.messages:
                return
            message = self.inbox.messages.popleft()
            yield message.peer, message.frames
            self.inbox.handled(message)
        if self.inbox.messages:
            self._tell()

    def wake(self) -> None:
        self._ready.set()

    def hang_up(self, address: str) -> None:
        """Forget what waits for the shard at this address."""
        self.outbox.forget(address)

    def way(self, address: str) -> str:
        """Return how messages to an address go, one of WAYS."""
        return MAILBOX

    def close(self) -> None:
        """Send what waits, and give the receivers LINGER_S to take it. A member empties its own box."""
        self.outbox.close(LINGER_S)
        self.inbox.poke.set()
        self.requests.close(CLOSE_S)
