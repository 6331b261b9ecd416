"""The addresses that one server process dials in its parent's run: the parent's shard, its standby, other clusters."""

from __future__ import annotations

from collections.abc import Set

from narrows.protocols.addresses import is_address
from narrows.protocols.runtime.network.sockets import Port


class ParentAddresses:
    """Decides which addresses are dialled over `port`.

    It hangs up on an address that is no longer used: else the messages that wait there would be sent after all if the
    address came back.
    """

    def __init__(self, port: Port) -> None:
        self.port = port
        self.above = self.beside = ""  # addresses of the parent's shard and of its standby; "": none was dialled
        self.clusters: set[str] = set()  # addresses of the other clusters that were dialled

    def turn(self, above: str) -> str:
        """Use `above` as the address of the parent's shard, and hang up on the one before. Return `above`."""
        if above != self.above:
            self._forget(self.above)
            self.above, self.beside = above, "" if above == self.beside else self.beside
        return above

    def ask(self, beside: str) -> bool:
        """Use `beside` as the address of the parent's standby. Return False if it is no address."""
        if beside != self.beside and is_address(beside):
            self._forget(self.beside)
            self.beside = beside
        return beside == self.beside

    def _forget(self, address: str) -> None:
        if address:  # "" stands for peers that dial this process
            self.port.hang_up(address)

    def tell(self, address: str, known: Set[str]) -> bool:
        """Use `address` for another cluster, and hang up on the clusters that are not in `known`.

        Return False if it is no address; then its owner will count as silent.
        """
        if address not in self.clusters and is_address(address):
            for gone in self.clusters - known:
                self.lose(gone)
            self.clusters.add(address)
        return address in self.clusters

    def lose(self, address: str) -> bool:
        """Hang up on a cluster or the parent's standby, so that the next message dials anew. False if it is neither."""
        ours = address in self.clusters or address == self.beside != ""
        if ours:
            self.port.hang_up(address)
            self.clusters.discard(address)
        return ours
