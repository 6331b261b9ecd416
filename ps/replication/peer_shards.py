"""What shard 0 of a primary or of a standby knows of the other shards of its server. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols import messages as m
from narrows.protocols.effects import Send


@dataclass(slots=True)
class PeerShard:
    """What shard 0 knows of another shard of its server."""

    peer: bytes
    said: m.ReplicationProgress  # its newest
    heard_ns: int  # when that arrived


class PeerShards:
    """The other shards of shard 0's server. `lost_ns`: progress that is older than this counts no more."""

    def __init__(self, shards: int, lost_ns: int) -> None:
        self.shards, self.lost_ns = shards, lost_ns
        self.known: dict[int, PeerShard] = {}

    def hear(self, peer: bytes, said: m.ReplicationProgress, now_ns: int) -> None:
        """Take the progress that another shard reports."""
        if 0 < said.shard < self.shards:
            self.known[said.shard] = PeerShard(peer, said, now_ns)

    def whole(self, now_ns: int, standby: str) -> bool:
        """True if each other shard has lately reported that `standby` has a whole copy of it.

        While one standby takes the place of another, different shards may have different standbys.
        """
        heard = [sibling for sibling in self.known.values() if now_ns - sibling.heard_ns <= self.lost_ns]
        return len(heard) == self.shards - 1 and all(sibling.said.standby == standby for sibling in heard)

    def at(self, view: int) -> bool:
        """True if all other shards are in this view."""
        return len(self.known) == self.shards - 1 and all(s.said.view == view for s in self.known.values())

    @property
    def newest(self) -> int:
        """The newest view that another shard is in."""
        return max((sibling.said.view for sibling in self.known.values()), default=0)

    def behind(self, view: m.FailoverNotice) -> list[Send]:
        """The notice of this view, for each shard that is in an older one."""
        return [Send(sibling.peer, view) for sibling in self.known.values() if sibling.said.view < view.view]

    def ports(self, own: int) -> tuple[int, ...]:
        """The ports of all shards, in their order. `own`: the port of shard 0."""
        return (own, *(self.known[shard].said.port for shard in sorted(self.known)))
