"""What a mailbox receives: the thread that looks into the box of a process, and the checks of each object.

How it works

    narrows-mailbox-poll     list ──> name, size, key ──> get ──> open ──> header, sequence ──> messages
                                        │ refused                   │ refused
                                        v                           v
                                     counted, and deleted

1. The thread looks often while messages come, and ever more rarely while none comes: `PollPace`.
2. An object is checked before it is read: its name, its size, the sender's key. Then it is got and opened, and its
   header must say the same.
3. Objects of one sender and epoch are taken in the order of their sequence, each once. A message of several objects is
   whole with its last one; if one of them is missing it is dropped, and the sender repeats it.
4. A member takes objects of the shards alone that it has written to, and those of an earlier life of a shard no more.
5. A shard takes objects of admitted keys alone. It drops what does not name its present epoch, and answers with it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from narrows.protocols.addresses import shard_name
from narrows.protocols.errors import RemoteProtocolError, ServerLostError
from narrows.protocols.messages import Buffer
from narrows.protocols.runtime.mailbox.outbox import Outbox
from narrows.protocols.runtime.mailbox.requests import StoreRequests
from narrows.protocols.runtime.mailbox.sealing import (
    MESSAGE_BYTES_MAX,
    OBJECT,
    OBJECT_BYTES_MAX,
    ObjectHeader,
    Sealer,
    after,
    messages_of,
    new_epoch,
    routing_id,
)
from narrows.protocols.runtime.mailbox.stores import MeteredStore
from narrows.protocols.runtime.network.curve_auth import KeyPair
from narrows.protocols.runtime.network.sockets import Peer

UNREAD_BYTES_MAX = 256 << 20  # got, and not handled yet: then nothing more is got
SENDERS_MAX = 1 << 16  # epochs of members whose sequences a shard keeps; a further one is refused
REFUSED_MAX = 64  # kinds of refused objects that are counted apart
POLL_GROWTH = 1.5  # of the wait, from one list without a message to the next
SERVES = "serves-"  # begins the name of the object by which a server says that it serves here


class PollPace:
    """How long a mailbox waits between two looks into its box. `least_s`, `most_s`: the bounds."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self.least_s, self.most_s = least_s, most_s
        self.wait_s = least_s

    def looked(self, found: bool) -> None:
        """Note a look. `found`: a message had come after which more are expected."""
        self.wait_s = self.least_s if found else min(self.most_s, self.wait_s * POLL_GROWTH)

    def hurry(self) -> None:
        """Look soon: this process has sent what will be answered."""
        self.wait_s = self.least_s


@dataclass(slots=True)
class SenderState:
    """What this process knows of one epoch of a sender."""

    taken: int = -1  # the sequence of the newest object
    parts: list[memoryview] = field(default_factory=list)  # of a message of several objects
    names: list[str] = field(default_factory=list)  # of these objects

    def drop(self) -> list[str]:
        """Drop the parts of a message. Return the names of their objects."""
        names, self.parts, self.names = self.names, [], []
        return names


@dataclass(slots=True)
class ReceivedMessage:
    """A message for the owner, and the objects that are deleted once it was handled."""

    peer: Peer
    frames: list[Buffer]
    names: list[str]

    @property
    def size(self) -> int:
        return sum(map(len, self.frames))


class Inbox:
    """The box of one process.

    Args:
        requests: to the store.
        sealer: with the keys of this process.
        outbox: knows the receivers of this process, and its epoch.
        box: the name of this box.
        pace: how often the thread looks.
        admits: of a shard: True if the owner of a public key is a member. The polling thread calls it.
        claim: the epoch of this server; an object with a later one in the box of shard 0 ends this process.
        refused: gets a sentence about the first refused object of each kind, in the polling thread.
        linked: gets the address of a shard whose process is a new one, in the polling thread.
        tell: is called in the polling thread when there is a message.
    """

    def __init__(
        self,
        requests: StoreRequests,
        sealer: Sealer,
        outbox: Outbox,
        box: str,
        pace: PollPace,
        admits: Callable[[str], bool],
        claim: str,
        refused: Callable[[str], None],
        linked: Callable[[str], None],
        tell: Callable[[], object],
    ) -> None:
        self.requests, self.sealer, self.outbox, self.box, self.pace = requests, sealer, outbox, box, pace
        self.admits, self.claim, self.refused, self.linked, self.tell = admits, claim, refused, linked, tell
        self.kinds: Counter[str] = Counter()  # refused objects, by kind
        self.poke = threading.Event()  # set: look sooner than was planned
        self.messages: deque[ReceivedMessage] = deque()
        self._unread = threading.Condition()  # guards the number of bytes
        self._unread_bytes = 0
        self._senders: dict[tuple[str, str], SenderState] = {}  # by sender and epoch
        requests.begin("poll", self._poll)

    def handled(self, message: ReceivedMessage) -> None:
        """Delete the objects of a message that the owner has handled."""
        with self._unread:
            self._unread_bytes -= message.size
            self._unread.notify_all()
        self.requests.delete(message.names)

    def hurry(self) -> None:
        """Look soon: this process has sent what will be answered. Any thread may call this."""
        self.pace.hurry()
        self.poke.set()

    # The polling thread.

    def _poll(self) -> None:
        over = self.requests.over
        while not over.is_set():
            self.poke.clear()
            with self._unread:
                while self._unread_bytes > UNREAD_BYTES_MAX and not over.is_set():
                    self._unread.wait(0.1)
            doomed = self.requests.doomed  # before the list: what is deleted meanwhile may still be in it
            if (listed := self.requests.list(self.box)) is None:
                break
            self.pace.looked(self._taken_in(listed, doomed))
            self.outbox.clean()
            if self.poke.wait(self.pace.wait_s):
                over.wait(self.pace.least_s)
        if self.outbox.shard is None:
            self._empty()

    def _empty(self) -> None:
        """Delete what lies in the box of this member, and what it wrote to a server that never answered."""
        store = self.requests.store
        try:
            for name in [*store.list(f"{self.box}/"), *self.outbox.unheard]:
                store.delete(name)
        except OSError:
            return  # the server removes the whole run when it ends

    def _taken_in(self, listed: dict[str, int], doomed: set[str]) -> bool:
        """Take the objects of a list, each sender's in order. True if more is expected soon."""
        soon = False
        for name in sorted(listed.keys() - doomed):
            if self.requests.over.is_set():
                break
            try:
                soon |= self._taken(name, listed[name])
            except RemoteProtocolError as error:
                self._refuse(str(error))
                self.requests.delete([name])
        return soon

    def _refuse(self, text: str) -> None:
        """Count an object that was refused, and tell the owner of the first of its kind."""
        if text not in self.kinds and len(self.kinds) < REFUSED_MAX:
            self.refused(f"{self.requests.address}: an object was refused: {text}")
        self.kinds[text if text in self.kinds or len(self.kinds) < REFUSED_MAX else "others"] += 1

    def _taken(self, name: str, size: int) -> bool:
        """Take one object; True if it hurries. Raises RemoteProtocolError if it is refused, and is to be deleted."""
        stem = name.rpartition("/")[2]
        if self.outbox.shard == 0 and stem.startswith(SERVES):
            return self._heard_claim(name, stem.removeprefix(SERVES))
        match = OBJECT.fullmatch(stem)
        if match is None:
            raise RemoteProtocolError("its name is no name of an object")
        if size > OBJECT_BYTES_MAX:
            raise RemoteProtocolError(f"it is larger than {OBJECT_BYTES_MAX} bytes")
        sender, epoch, sequence = match[1], match[2], int(match[3])
        public = self._key_of(sender)
        if self.outbox.shard is None and epoch < self.outbox.peers[sender].epoch:
            self.requests.delete([name])  # of an earlier process of this shard
            return False
        state = self._senders.get((sender, epoch), SenderState())
        if sequence <= state.taken:
            raise RemoteProtocolError("it was taken before")
        if not (content := self.requests.get(name)):
            return False
        header, body = self.sealer.open(public, content)
        if (header.receiver, header.sender, header.epoch, header.sequence) != (self.box, sender, epoch, sequence):
            raise RemoteProtocolError("it belongs elsewhere, or to another time")
        if self.outbox.shard is not None and header.heard != self.outbox.epoch:  # it asks, or is for an earlier life
            self.requests.delete([name])
            self.outbox.greet(routing_id(header.name, sender, epoch), header.heard)
            return True
        if len(self._senders) >= SENDERS_MAX and (sender, epoch) not in self._senders:
            raise RemoteProtocolError("too many processes of members have come")
        self._senders[sender, epoch] = state
        state.taken = sequence
        return self._read(name, header, body, state)

    def _key_of(self, sender: str) -> str:
        """Return the public key of a sender that may write to this box."""
        if self.outbox.shard is None:
            if sender not in self.outbox.peers:
                raise RemoteProtocolError("its sender is no shard that this member has written to")
            return self.outbox.server
        if sender.startswith("shard-") or not self.admits(sender):
            raise RemoteProtocolError("its sender has no key on the list")
        return sender

    def _read(self, name: str, header: ObjectHeader, body: memoryview, state: SenderState) -> bool:
        """Take the body of an object: whole messages, or a part of one."""
        if header.part != len(state.parts):  # an object between was lost
            self.requests.delete(state.drop())
        if header.part != len(state.parts):
            self.requests.delete([name])
            return True
        state.parts.append(body)
        state.names.append(name)
        self.requests.hold(name)
        if sum(map(len, state.parts)) > MESSAGE_BYTES_MAX:
            self.requests.delete(state.drop()[:-1])
            raise RemoteProtocolError(f"its message is longer than {MESSAGE_BYTES_MAX} bytes")
        if header.left:
            return True
        whole = state.parts[0] if len(state.parts) == 1 else memoryview(b"".join(state.parts))
        names = state.drop()
        try:
            messages = [*messages_of(whole)]
        except RemoteProtocolError:
            self.requests.delete(names[:-1])
            raise
        self._deliver(header, messages, names)
        return header.hurries

    def _deliver(self, header: ObjectHeader, messages: list[list[Buffer]], names: list[str]) -> None:
        """Hand messages to the owner. Their objects are deleted once the last of them was handled."""
        shard = self.outbox.shard is None
        box: Peer = header.sender if shard else routing_id(header.name, header.sender, header.epoch)
        peer, anew = self.outbox.heard(box, header.epoch)
        if anew:
            self._senders = {
                key: state for key, state in self._senders.items() if key[1] >= header.epoch or key[0] != box
            }
            self.linked(str(peer))
        found = [ReceivedMessage(peer, frames, []) for frames in messages]
        if not found:
            self.requests.delete(names)
            return
        found[-1].names.extend(names)
        with self._unread:
            self._unread_bytes += sum(each.size for each in found)
        self.messages.extend(found)
        self.tell()

    def _heard_claim(self, name: str, claim: str) -> bool:
        """Look at the object by which a server says that it serves here. A later one of these keys ends this process."""
        if claim == self.claim or not (content := self.requests.get(name)):
            return False
        header, _ = self.sealer.open(self.sealer.own.public, content)
        if header.object != claim_header(claim).object or claim <= self.claim:
            raise RemoteProtocolError("it is the word of a server that serves no more")
        text = f"{self.requests.address}: another ps-serve with these keys has begun to serve there"
        self.requests.lose(ServerLostError(text))
        return False


def claim_header(claim: str) -> ObjectHeader:
    """Return the header of the object by which the server of this epoch says that it serves."""
    return ObjectHeader(shard_name(0), shard_name(0), claim, 0)


def claimed(store: MeteredStore, own: KeyPair) -> str:
    """Say that a server serves here from now on. A server that did before ends. Return the epoch of the new one."""
    begins = f"{shard_name(0)}/{SERVES}"
    before = [name.removeprefix(begins) for name in store.list(begins)]
    mine = new_epoch()
    claim = max([mine, *(after(epoch) for epoch in before if len(epoch) == len(mine) and epoch.isalnum())])
    store.put(f"{begins}{claim}", Sealer(own).seal(own.public, claim_header(claim), b""))
    for epoch in before:
        store.delete(f"{begins}{epoch}")
    return claim
