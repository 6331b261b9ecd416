"""Introduces the workers of a gossip run to each other.

Rules
- Each member gets a new roster at each change of the members. A member whose heartbeat names an older roster gets it
  again.
- A worker that its peers cannot dial registers at a relay. `ticket` is what the relay takes from it as a proof.
- Once all members have done their last step no worker joins any more. So all end with the mean of the same models.
"""

from __future__ import annotations

from collections.abc import Iterable

from narrows.protocols import messages as m
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.effects import Send
from narrows.protocols.gossip.relay_ticket import node_key, node_name
from narrows.ps.coordinator.run import Decision, Run, Seat


class GossipDirectory(Decision):
    """Decides who is on the roster of a gossip run. In other modes it does nothing."""

    def __init__(self, run: Run) -> None:
        self.run, self.mixes = run, run.mode.rule is FoldRule.MIX
        self.ended: set[int] = set()  # workers that have done their last step
        self.closed = False  # all members have done their last step
        self.introduced = 0  # epoch of the newest roster that all members were sent
        self.relay = ("", "")  # address of the relay where workers may meet, and its secret; no secret: there is none

    @property
    def begun(self) -> bool:
        """True if this is a gossip run that has started."""
        return self.mixes and self.run.started

    @property
    def epoch(self) -> int:
        """Epoch of the newest roster; 0: there is none."""
        return self.run.epoch if self.begun else 0

    def mismatch(self, address: str) -> str:
        """Return why the owner of this address cannot gossip with the members; "" if it can.

        An address has a part for each shard. Each shard mixes with the same shard of the others.
        """
        ours = {len(other.address.split(" ")) for other in self.run.declared} if self.mixes else set()
        if not ours or len(address.split(" ")) in ours:
            return ""
        return (
            "workers and clusters of more than one shard do not gossip with each other: let each of them join what the "
            "others join"
        )

    def meet_at(self, address: str, secret: str) -> None:
        """Let workers register at a relay from now on.

        Args:
            address: tcp://host:port of the relay; "": it is where workers reach this server.
            secret: shared with the relay, in hex digits.
        """
        self.relay = address, secret

    def ticket(self, token: str) -> tuple[str, ...]:
        """Return what a worker needs to register at the relay: its name, its key, the relay's address; () without one.

        Args:
            token: of its Hello.
        """
        address, secret = self.relay
        if not (secret and self.mixes):
            return ()
        name = node_name(secret, token)
        return name, node_key(secret, name), address

    def end(self, seat: Seat) -> bool:
        """Note that a member has done its last step. Return False if that was known."""
        news = seat.worker not in self.ended
        self.ended.add(seat.worker)
        return news

    def rosters(self, seats: Iterable[Seat]) -> list[Send]:
        """The roster, for each of `seats` that was sent Ready."""
        if not self.begun:
            return []
        members = self.run.declared
        rows = tuple((seat.worker, seat.epoch, seat.rank, seat.start) for seat in members)
        roster = (self.epoch, True, rows, tuple(seat.address for seat in members), self.closed)
        first = self.run.first_round

        def names(seat: Seat) -> tuple[str, ...]:
            return tuple(m.pair_name(seat.name, each.name) for each in members)

        return [
            Send(seat.peer, m.Roster(seat.worker, *roster, names(seat), first)) for seat in seats if seat.ready_sent
        ]

    def introductions(self) -> list[Send]:
        """The roster for all members, if it has changed since the last call."""
        before, self.introduced = self.introduced, self.epoch
        return self.rosters(self.run.declared) if before != self.introduced else []

    def decide(self, now_ns: int) -> bool:
        """Close."""
        members = self.run.declared if self.begun and not self.closed else []
        if not members or not all(seat.worker in self.ended or seat.leaving for seat in members):
            return False
        self.closed = True
        self.run.changed()
        return True

    def left(self, seat: Seat, how: str) -> None:
        self.ended.discard(seat.worker)

    def anew(self) -> None:
        self.ended.clear()
        self.closed = False
