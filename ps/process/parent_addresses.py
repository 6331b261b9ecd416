"""The addresses that one server process dials in the run above: of the shard there, its standby, and other clusters."""

from __future__ import annotations

from collections.abc import Set

from narrows.protocols.addresses import is_address
from narrows.protocols.runtime.network.sockets import Port


class ParentAddresses:
    """Over `port`. An address that leads nowhere any more is hung up on: what waits there would be told once more."""

    def __init__(self, port: Port) -> None:
        self.port = port
        self.above = self.beside = ""
        self.clusters: set[str] = set()

    def turn(self, above: str) -> str:
        """The shard above is here, and nowhere else."""
        if above != self.above:
            self._forget(self.above)
            self.above, self.beside = above, "" if above == self.beside else self.beside
        return above

    def ask(self, beside: str) -> bool:
        """Whether something may be sent to its standby, which is here."""
        if beside != self.beside and is_address(beside):
            self._forget(self.beside)
            self.beside = beside
        return beside == self.beside

    def _forget(self, address: str) -> None:
        if address:  # "" is the way by which others dial us
            self.port.hang_up(address)

    def tell(self, address: str, known: Set[str]) -> bool:
        """Whether something may be sent to the cluster at `address`, where there are none but those `known`. If it is no
        address, its owner will count as silent."""
        if address not in self.clusters and is_address(address):
            for gone in self.clusters - known:
                self.lose(gone)
            self.clusters.add(address)
        return address in self.clusters

    def lose(self, address: str) -> bool:
        """Let the next message to this cluster, or to that standby, dial anew; whether it was one."""
        ours = address in self.clusters or address == self.beside != ""
        if ours:
            self.port.hang_up(address)
            self.clusters.discard(address)
        return ours
