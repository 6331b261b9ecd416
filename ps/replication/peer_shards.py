"""The other shards of a server that has a standby, or that stands by, as its shard 0 has heard of them. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols import messages as m
from narrows.protocols.effects import Send


@dataclass(slots=True)
class PeerShard:
    """Another shard of the same side, as shard 0 has heard of it."""

    peer: bytes
    said: m.ReplicationProgress
    heard_ns: int


class PeerShards:
    """The siblings of shard 0."""

    def __init__(self, shards: int, lost_ns: int) -> None:
        self.shards, self.lost_ns = shards, lost_ns
        self.known: dict[int, PeerShard] = {}

    def hear(self, peer: bytes, said: m.ReplicationProgress, now_ns: int) -> None:
        if 0 < said.shard < self.shards:
            self.known[said.shard] = PeerShard(peer, said, now_ns)

    def whole(self, now_ns: int, standby: str) -> bool:
        """All have been copied there, a moment ago. When a standby is lost and another comes, shards may have one each."""
        heard = [sibling for sibling in self.known.values() if now_ns - sibling.heard_ns <= self.lost_ns]
        return len(heard) == self.shards - 1 and all(sibling.said.standby == standby for sibling in heard)

    def at(self, view: int) -> bool:
        """All of them have come to this view."""
        return len(self.known) == self.shards - 1 and all(s.said.view == view for s in self.known.values())

    @property
    def newest(self) -> int:
        """The newest view that any of them has come to."""
        return max((sibling.said.view for sibling in self.known.values()), default=0)

    def behind(self, view: m.FailoverNotice) -> list[Send]:
        """For those that have not come to it."""
        return [Send(sibling.peer, view) for sibling in self.known.values() if sibling.said.view < view.view]

    def ports(self, own: int) -> tuple[int, ...]:
        return (own, *(self.known[shard].said.port for shard in sorted(self.known)))
