"""The gate of one server process: by which key and name it is known where it dials, and who may say what to it.

Rules
- A key in the list of `--keys` is let in. One that was taken off is refused with its next message.
- A key has a role: shards report, members train, clusters hand updates up; other clusters of a run above mix and do no more.
- The first refusal of each kind is told, and all are counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from narrows.protocols import messages as m
from narrows.protocols.addresses import parted
from narrows.protocols.errors import AuthenticationError, RemoteProtocolError
from narrows.protocols.gossip.peers import GossipPeer
from narrows.protocols.runtime.cli.output import emit
from narrows.protocols.runtime.network.connections import STRANGER_BYTES_MAX, Connections
from narrows.protocols.runtime.network.curve_auth import NOBODY, CurveKeys, DiallerId, HandshakeFailure, KeyPair
from narrows.protocols.runtime.network.key_files import SERVER, Guard, Identity, member_key
from narrows.ps.server.server import OF_CLUSTERS

OF_SHARDS = (m.Report, m.ReplicationFollow, m.ReplicationProgress, m.FailoverNotice, m.RemoteShardsOffer, m.FileRequest)
REFUSED_MAX = 64  # kinds of refusals that are told
OTHERS = "others"
FLIGHT_TIMES = 5  # the updates that a member may have in flight, over the machine that folds them
PEER = "cluster of the run above"  # the role of a key that the server above has told us of


class KnownPeer(Protocol):
    """The part of its process's machine that the gate asks for."""

    @property
    def above(self) -> str: ...

    @property
    def beside(self) -> str: ...

    @property
    def others(self) -> Mapping[int, GossipPeer]:
        """Other clusters of the run above, by their numbers there."""


class AccessControl:
    """`keys`: the folder of this ps-serve, "": all is in the open. `parent_key`: a file. `secret`: of the shards of this
    server, at `coordinator`, and of those that it copies, one at `follows`. Raises UsageError for keys that are none."""

    def __init__(self, keys: str, parent_key: str, secret: str, coordinator: str, follows: str = "") -> None:
        self.guard = Guard(keys) if keys else None
        self.parent_key = member_key(parent_key, "--parent-key") if parent_key else None
        self.secret, self.ours = secret.encode(), {coordinator, follows} - {""}
        self.known: KnownPeer | None = None  # the machine, once there is one
        self.clusters = frozenset[str]()  # keys of other clusters; read by the thread of the door
        self.names: dict[str, str] = {}  # of keys that were let in
        self.connections = Connections()
        self.refused: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()  # bytes of each name

    @property
    def curve(self) -> CurveKeys | None:
        if self.guard is None and self.parent_key is None:
            return None
        own = self.guard.own.pair if self.guard is not None else None
        return CurveKeys(own, self._keys_at, lambda public: self._who(public) is not None)

    def _is_above(self, address: str) -> bool:
        """It is that of the shard above, or of its standby."""
        return self.known is not None and address in (self.known.above, self.known.beside)

    def name_at(self, address: str) -> bytes:
        """How our routing ids begin at an address: for the shards of this server, and of the one that it copies, by their
        secret, for the servers above by one name of all shards, which a standby of ours has too, for another cluster by that of
        the pair."""
        if address in self.ours:
            return self.secret
        if self._is_above(address):
            return hashlib.sha256(self.secret).digest()[: m.NAME_BYTES]
        others = self.known.others.values() if self.known is not None else ()
        return next((other.name for other in others if other.address == address), b"")

    def _keys_at(self, address: str) -> tuple[KeyPair, str] | None:
        if self._is_above(address):
            return (self.parent_key.pair, self.parent_key.server) if self.parent_key is not None else None
        own = self.guard.own if self.guard is not None else self.parent_key
        assert own is not None
        if address in self.ours:
            return (own.pair, own.public) if self.guard is not None else None
        return own.pair, parted(address)[1] or NOBODY

    def _who(self, public: str) -> Identity | None:
        assert self.guard is not None
        who = self.guard.who(public)
        return Identity(PEER, PEER) if who is None and public in self.clusters else who

    def key_of(self, peer: bytes, message: m.Message) -> tuple[str, int] | tuple[()]:
        """Who joins or leaves: the name of its key, and how many other keys are on the list. Nothing without keys."""
        if self.guard is None or not isinstance(peer, DiallerId) or not isinstance(message, (m.Hello, m.Leave)):
            return ()
        return self.names[peer.key], len(self.guard.members) - 1

    def tick(self) -> None:
        """Who mixes with us may have changed."""
        if self.guard is not None and self.known is not None:
            self.clusters = frozenset(parted(other.address)[1] for other in self.known.others.values())

    def check(self, peer: bytes, message: m.Message, size: int) -> None:
        """Whether who sent a message of so many bytes may say that. Raises AuthenticationError and RemoteProtocolError."""
        reports = isinstance(message, OF_SHARDS)
        # Who asks first is told the secret.
        asks = (isinstance(message, m.ReplicationFollow) and message.shard < 0) or (
            isinstance(message, m.RemoteShardsOffer) and not message.token
        )
        if reports and not asks and not peer.startswith(self.secret):
            raise RemoteProtocolError(f"a {type(message).__name__} comes from the shards of this server alone")
        mixes = isinstance(message, OF_CLUSTERS)
        theirs = self.known.others.get(getattr(message, "worker", -1)) if mixes and self.known is not None else None
        # A peer that our roster does not have yet says it again.
        if mixes and not isinstance(peer, DiallerId) and (theirs is None or not peer.startswith(theirs.name)):
            raise RemoteProtocolError("its number is not that of the cluster which dials by that name")
        if self.guard is None:
            return
        who = self._who(peer.key) if isinstance(peer, DiallerId) else None
        if who is None:
            name = self.names.get(getattr(peer, "key", ""), "nobody")
            raise AuthenticationError(f"the key of {name} was taken off the list of the server")
        if isinstance(peer, DiallerId):
            self.names[peer.key] = who.name
        self.sent[who.name] += size
        if reports != (who.role == SERVER):
            raise AuthenticationError(f"the key of a {who.role} cannot send a {type(message).__name__}")
        if mixes != (who.role == PEER):
            raise AuthenticationError(f"the key of a {who.role} cannot send a {type(message).__name__}")
        if isinstance(message, m.Heartbeat) and message.below and who.role != "cluster":
            raise AuthenticationError(
                f"the key of {who.name} is that of a {who.role}: a cluster needs one with --role cluster"
            )
        if mixes and isinstance(peer, DiallerId) and (theirs is None or parted(theirs.address)[1] != peer.key):
            raise RemoteProtocolError("its number is not that of the cluster whose key it has")

    def totals(self) -> dict[str, int]:
        """How often each refusal was made."""
        return {**self.refused, **self.connections.ended}

    def stranger(self, why: HandshakeFailure, public: str) -> None:
        """Somebody who dialled us was not let in."""
        if self.guard is None and why is not HandshakeFailure.KEYLESS:
            return
        if why is HandshakeFailure.REFUSED:
            text = f"a key that is not on the list was refused ({public[:16]}...)"
        elif self.guard is not None:
            text = "a connection without the keys of this run was refused"
        else:
            text = "a connection with a key, where this server has none, was refused"
        if self.counted(text):
            self._tell(text)

    def faulted(self, text: str) -> None:
        """A library raised an error while this process read what others sent."""
        if self.counted(text):
            self._tell(text)

    def look(self, nbytes: int) -> None:
        """Count those who were hung up on. `nbytes`: of the machine. A member that was cut off says again what was in flight,
        and is a stranger until that is read."""
        self.connections.bytes_most = STRANGER_BYTES_MAX + FLIGHT_TIMES * nbytes
        for why, count in [*self.connections.ended.items()]:
            if why not in self.refused:
                self._tell(f"connections are ended: {why}")
            self.refused[why] = count

    def _tell(self, text: str) -> None:
        emit("log", name="stranger", values={"text": f"{text}; more of them are only counted"})

    def counted(self, text: str, peer: bytes = b"") -> bool:
        """Count a refusal, of a message of `peer` where it was one; whether it is the first of its kind, and is to be told.
        Others may say what they like, and often."""
        self.connections.refused(peer)
        known = text in self.refused or len(self.refused) >= REFUSED_MAX
        self.refused[text if text in self.refused or not known else OTHERS] += 1
        return not known
