"""Access control of one server process: which keys may connect, and which messages each key may send.

How it works
1. A peer dials this process. With --keys the authenticator's thread asks `curve` whether the peer's key may connect
   (`_who`): the folder has it, or the parent's roster names it as that of another cluster.
2. The connection counts as a stranger's until a first message has passed. `connections` limits how many strangers there
   are and how much they may send.
3. `check` looks at each message: whether the folder still has the key, whether the key's role allows the type of
   message, and whether the routing id begins with the right name. A message between shards needs the secret of the
   server as this name.
4. This process dials other processes. `name_at` and `curve` give the name and the keys that it uses at an address.

Rules
- A key in the folder of --keys may connect. If the file of a key is removed, its next message is refused.
- A key has a role, and the role decides which messages are allowed. Shards report. Members train. Clusters push updates
  to their parent, and only they may send the lines of members below them. Other clusters of the parent's run mix.
- The first refusal of each kind is logged, and all are counted.
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
from narrows.protocols.runtime.network.key_files import SERVER, AdmittedKeys, Identity, member_key
from narrows.ps.server.server import OF_CLUSTERS

OF_SHARDS = (m.Report, m.ReplicationFollow, m.ReplicationProgress, m.FailoverNotice, m.RemoteShardsOffer, m.FileRequest)
REFUSED_MAX = 64  # kinds of refusals that are logged and counted apart
OTHERS = "others"  # the kind that counts all further ones
FLIGHT_TIMES = 5  # size of all updates that a member may have in flight, in sizes of the machine that folds them
PEER = "cluster of the parent's run"  # role of a key that the parent's roster names


class OwnMachine(Protocol):
    """What access control reads of the process's machine."""

    @property
    def above(self) -> str:
        """Address of the parent's shard, "": there is none."""

    @property
    def beside(self) -> str:
        """Address of the standby of the parent's shard, "": there is none."""

    @property
    def others(self) -> Mapping[int, GossipPeer]:
        """Other clusters of the parent's run, by their worker numbers there."""


class AccessControl:
    """Checks the messages of one server process.

    Args:
        keys: folder of --keys, "": connections are not encrypted.
        parent_key: file of --parent-key, "": none.
        secret: known to the shards of this server and to those of its primary or standby alone.
        coordinator: address of shard 0 of this server, "" in shard 0.
        follows: address of the primary's shard that this one follows, "": it is no standby.

    Raises:
        UsageError: a file is no key.
    """

    def __init__(self, keys: str, parent_key: str, secret: str, coordinator: str, follows: str = "") -> None:
        self.guard = AdmittedKeys(keys) if keys else None
        self.parent_key = member_key(parent_key, "--parent-key") if parent_key else None
        self.secret, self.ours = secret.encode(), {coordinator, follows} - {""}
        self.machine: OwnMachine | None = None  # the machine, once there is one
        self.clusters = frozenset[str]()  # keys of the other clusters; the authenticator's thread reads it
        self.names: dict[str, str] = {}  # by key that was admitted, its name
        self.connections = Connections()
        self.refused: Counter[str] = Counter()  # number of refusals, by kind
        self.sent: Counter[str] = Counter()  # bytes received, by the sender's name

    @property
    def curve(self) -> CurveKeys | None:
        """The keys for this process's sockets; None: no connection is encrypted."""
        if self.guard is None and self.parent_key is None:
            return None
        own = self.guard.own.pair if self.guard is not None else None
        return CurveKeys(own, self._keys_at, lambda public: self._who(public) is not None)

    def _is_above(self, address: str) -> bool:
        """True for the address of the parent's shard or of its standby."""
        return self.machine is not None and address in (self.machine.above, self.machine.beside)

    def name_at(self, address: str) -> bytes:
        """The name with which this process's routing ids begin when it dials `address`.

        Shards of this server and of its primary: the secret. Shards of the parent: a hash of the secret, so that all
        shards of this server and its standby have one name there. Another cluster: the name of the pair.
        """
        if address in self.ours:
            return self.secret
        if self._is_above(address):
            return self.name_above
        others = self.machine.others.values() if self.machine is not None else ()
        return next((other.name for other in others if other.address == address), b"")

    @property
    def name_above(self) -> bytes:
        """The name of all shards of this server, and of its standby, at the shards of the parent."""
        return hashlib.sha256(self.secret).digest()[: m.NAME_BYTES]

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
        """For a Hello or Leave: the name of the sender's key, and the number of other keys. () without keys."""
        if self.guard is None or not isinstance(peer, DiallerId) or not isinstance(message, (m.Hello, m.Leave)):
            return ()
        return self.names[peer.key], len(self.guard.members) - 1

    def serve(self, machine: OwnMachine) -> None:
        """Take the parent and the other clusters that this process dials from its machine."""
        self.machine = machine

    def tick(self) -> None:
        """Read the keys of the other clusters again: the parent's roster may have changed."""
        if self.guard is not None and self.machine is not None:
            self.clusters = frozenset(parted(other.address)[1] for other in self.machine.others.values())

    def check(self, peer: bytes, message: m.Message, size: int) -> None:
        """Check that the sender may send this message, and count its bytes.

        Args:
            peer: routing id of the sender, a `DiallerId` with its key if connections are encrypted.
            message: the message.
            size: its size in bytes.

        Raises:
            AuthenticationError: the key was removed, or its role does not allow this message.
            RemoteProtocolError: the routing id of the sender is not the one that goes with the message.
        """
        reports = isinstance(message, OF_SHARDS)
        # The first request of a standby or of a remote host needs no secret: the answer contains the secret.
        asks = (isinstance(message, m.ReplicationFollow) and message.shard < 0) or (
            isinstance(message, m.RemoteShardsOffer) and not message.token
        )
        if reports and not asks and not peer.startswith(self.secret):
            raise RemoteProtocolError(f"a {type(message).__name__} comes from the shards of this server alone")
        mixes = isinstance(message, OF_CLUSTERS)
        theirs = self.machine.others.get(getattr(message, "worker", -1)) if mixes and self.machine is not None else None
        # A cluster that is not on this server's roster yet repeats its message.
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
        """Number of refusals and of ended connections, by kind."""
        return {**self.refused, **self.connections.ended}

    def stranger(self, why: HandshakeFailure, public: str) -> None:
        """Count a failed handshake of a peer that dialled us, and log the first of a kind. `public`: the peer's key."""
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
        """Count an error that a library raised while it read what a peer had sent, and log the first of a kind."""
        if self.counted(text):
            self._tell(text)

    def look(self, nbytes: int) -> None:
        """Count the connections that were ended, and set how many bytes a stranger may send.

        A member that connects again repeats all that was in flight, and counts as a stranger until one message is read.

        Args:
            nbytes: bytes of the machine.
        """
        self.connections.allow(STRANGER_BYTES_MAX + FLIGHT_TIMES * nbytes)
        for why, count in [*self.connections.ended.items()]:
            if why not in self.refused:
                self._tell(f"connections are ended: {why}")
            self.refused[why] = count

    def _tell(self, text: str) -> None:
        emit("log", name="stranger", values={"text": f"{text}; more of them are only counted"})

    def counted(self, text: str, peer: bytes = b"") -> bool:
        """Count a refusal.

        Args:
            text: its kind.
            peer: routing id of the sender, if a message was refused.

        Returns:
            True if it is the first of its kind and has to be logged. So a peer that repeats itself cannot fill the log.
        """
        self.connections.refused(peer)
        known = text in self.refused or len(self.refused) >= REFUSED_MAX
        self.refused[text if text in self.refused or not known else OTHERS] += 1
        return not known
