"""How messages go between a worker and a shard of one process (kit/in_process.py): copied, in shared memory, in a mailbox.

`SharedPorts` has real sockets and real links: a `Sockets` for each shard and each worker, as in their processes. Every
payload of a byte or more lies in its sender's pool. The receiver gets a view of it, which lasts as long as it holds it.
`MailboxPorts` has a `Mailbox` for each shard and each worker, over one folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from kit.mailboxes import of_member, of_shard
from narrows.protocols.addresses import behind, local_endpoint
from narrows.protocols.messages import NAME_BYTES, Buffer
from narrows.protocols.runtime.mailbox import mailbox, outbox
from narrows.protocols.runtime.mailbox.mailbox import Mailbox
from narrows.protocols.runtime.network import shared_memory
from narrows.protocols.runtime.network.shared_memory import SharedLink, of_peer
from narrows.protocols.runtime.network.sockets import OPTIONS, Peer, Port, Sockets

LIMIT_S = 10.0
Bytes = npt.NDArray[np.uint8]


class Ports:
    """The plain way: each message is copied."""

    def up(self, worker: Hashable, shard: Hashable, frames: Sequence[Buffer]) -> list[Buffer]:
        """Carry a worker's message; return the frames that the shard gets."""
        return [bytes(frame) for frame in frames]

    def down(self, shard: Hashable, worker: Hashable, frames: Sequence[Buffer]) -> list[Buffer]:
        """Carry a shard's message; return the frames that the worker gets."""
        return [bytes(frame) for frame in frames]

    def taken(self, worker: Hashable, shard: Hashable, frames: Sequence[Buffer]) -> None:
        """Note that the shard has read these frames of a worker's message, or has copied them."""

    def close(self) -> None:
        """Close all sockets."""


class SharedPorts(Ports):
    """Payloads go through shared memory.

    Args:
        spoil: gets a worker and a payload in its memory, and may write to it. A shard has copied it, or has handled its
            message.
    """

    def __init__(self, spoil: Callable[[Any, Bytes], None] | None = None) -> None:
        self.spoil, self.carried = spoil, 0
        self.opened: dict[Hashable, Sockets] = {}
        self.addresses: dict[Hashable, str] = {}  # of the shards
        self.peers: dict[tuple[Hashable, Hashable], bytes] = {}  # (worker, shard) -> routing id
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(shared_memory, "LEAST_BYTES", 1)
        self.patch.setitem(OPTIONS, zmq.LINGER, 0)

    def up(self, worker: Hashable, shard: Hashable, frames: Sequence[Buffer]) -> list[Buffer]:
        self._meet(worker, shard)
        return self._carry(self.opened[worker], self.addresses[shard], self.opened[shard], frames)

    def down(self, shard: Hashable, worker: Hashable, frames: Sequence[Buffer]) -> list[Buffer]:
        return self._carry(self.opened[shard], self.peers[worker, shard], self.opened[worker], frames)

    def taken(self, worker: Hashable, shard: Hashable, frames: Sequence[Buffer]) -> None:
        if self.spoil is None:
            return
        for frame in frames:
            if (found := of_peer(frame)) is not None:
                begin = found.pool.offset(frame)
                self.spoil(worker, self.link(worker, shard).pool.values[begin : begin + len(frame)])

    def link(self, worker: Hashable, shard: Hashable) -> SharedLink:
        """Return the worker's side of a link."""
        return self.opened[worker].memory.links[self.addresses[shard]]

    def close(self) -> None:
        for each in self.opened.values():
            each.close()
        self.patch.undo()

    def _carry(self, sender: Sockets, to: Peer, receiver: Sockets, frames: Sequence[Buffer]) -> list[Buffer]:
        _, got = carried(sender, to, receiver, frames)
        for frame in got[1:]:
            self.carried += 1
            assert of_peer(frame) is not None or not len(frame)
        return got

    def _meet(self, worker: Hashable, shard: Hashable) -> None:
        if (worker, shard) in self.peers:
            return
        if shard not in self.opened:
            listens = self.opened[shard] = Sockets(shares=True)
            self.addresses[shard] = local_endpoint(listens.listen("tcp://127.0.0.1:0"))
        if worker not in self.opened:
            name = len(self.opened).to_bytes(NAME_BYTES, "big")
            self.opened[worker] = Sockets(known_as=lambda address: name)
        here, there, address = self.opened[worker], self.opened[shard], self.addresses[shard]
        here.send(address, [b"hello"])
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline
            for peer, _ in there.receive(2):
                assert isinstance(peer, bytes)
                self.peers[worker, shard] = peer
            assert not [*here.receive(0)]
            with suppress(KeyError):
                if there.memory.links[self.peers[worker, shard]].ready and self.link(worker, shard).ready:
                    return


def carried(sender: Port, to: Peer, receiver: Port, frames: Sequence[Buffer]) -> tuple[Peer, list[Buffer]]:
    """Send a message and take it: there is one on its way at a time. Return the sender, and what came."""
    assert not sender.send(to, frames).dropped
    got, deadline = list[tuple[Peer, list[Buffer]]](), time.monotonic() + LIMIT_S
    while not got:
        assert time.monotonic() < deadline
        got = [*receiver.receive(5)]
    assert len(got) == 1
    return got[0]


class MailboxPorts(Ports):
    """Each message is an object of a mailbox. `address`: file:///FOLDER."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.shards: dict[Hashable, Mailbox] = {}
        self.workers: dict[Hashable, Mailbox] = {}
        self.peers: dict[tuple[Hashable, Hashable], Peer] = {}  # (worker, shard) -> routing id
        self.patch = pytest.MonkeyPatch()
        self.patch.setitem(mailbox.POLL_S, "file", (0.001, 0.02))
        self.patch.setattr(outbox, "GATHER_S", 0.0)

    def up(self, worker: Hashable, shard: Hashable, frames: Sequence[Buffer]) -> list[Buffer]:
        if shard not in self.shards:
            self.shards[shard] = of_shard(self.address, len(self.shards))
        if worker not in self.workers:
            self.workers[worker] = of_member(self.address)
        to = behind(self.address, [*self.shards].index(shard))
        self.peers[worker, shard], got = carried(self.workers[worker], to, self.shards[shard], frames)
        return got

    def down(self, shard: Hashable, worker: Hashable, frames: Sequence[Buffer]) -> list[Buffer]:
        sender, got = carried(self.shards[shard], self.peers[worker, shard], self.workers[worker], frames)
        assert sender == behind(self.address, [*self.shards].index(shard))
        return got

    def close(self) -> None:
        for each in (*self.workers.values(), *self.shards.values()):
            each.close()
        self.patch.undo()
