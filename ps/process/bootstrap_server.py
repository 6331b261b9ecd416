"""Answers messages that are no event of the machine: first questions, and in process 0 the files of remote shards."""

from __future__ import annotations

from narrows.protocols import messages as m
from narrows.protocols.addresses import is_mailbox
from narrows.protocols.effects import Send
from narrows.ps.checkpoints.remote_archive import RemoteArchive
from narrows.ps.process.config import ServerConfig
from narrows.ps.process.machine_factory import introduction
from narrows.ps.server.server import Server

ALONE = "this server has no standby: start it with --replicas 1, and name the address of its shard 0"


class BootstrapServer:
    """Answers for one server process. `config`: its config."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        serves = config.folder is not None and not config.index
        self.archive = RemoteArchive(config.folder, config.copy()) if config.folder is not None and serves else None

    def hear(self, peer: bytes, message: m.Message, server: Server) -> list[Send] | None:
        """Answer the first question of a standby or of a remote host, or a file request of a remote shard.

        Returns:
            The answers; an archive answers later, by `take`. None: the message is none of these.
        """
        asks = isinstance(message, m.ReplicationFollow) and (message.shard < 0 or not self.config.replicas)
        if not asks and not isinstance(message, (m.RemoteShardsOffer, m.FileRequest)):
            return None
        if isinstance(message, m.FileRequest):
            self._ask(peer, message, server)
            return []
        if isinstance(message, m.RemoteShardsOffer):
            why = self._no_room(server)
            return [Send(peer, _refuse(why) if why else introduction(self.config, server, "keeps"))]
        first = self.config.replicas and not self.config.index
        return [Send(peer, introduction(self.config, server) if first else _refuse(ALONE))]

    def _ask(self, peer: bytes, ask: m.FileRequest, server: Server) -> None:
        """Answer a file request, if there are remote shards: all other shards share this machine's folder."""
        away = server.coordinator.resharding.away if server.coordinator is not None else {}
        if self.archive is not None and away:
            self.archive.ask(peer, ask)

    def _no_room(self, server: Server) -> str:
        """Return why this server takes no remote shards; "" if it does."""
        if server.coordinator is None:
            return "name the address of its shard 0, as ps-serve printed it there"
        if self.config.replicas:
            return "a server with a standby keeps its shards: its standby has a process for each"
        if self.config.via or is_mailbox(self.config.parent):
            return "it meets others in a mailbox, which the shards of this machine alone dial"
        if self.config.folder is None:
            return "it has no folder for checkpoints, by which keys move"
        return server.coordinator.resharding.never

    def take(self) -> list[Send]:
        """Return the answers that are ready."""
        return [Send(*answer) for answer in self.archive.take()] if self.archive is not None else []


def _refuse(text: str) -> m.Refuse:
    return m.Refuse(m.RefuseCode.INCOMPATIBLE, -1, 0, text)
