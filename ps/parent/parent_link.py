"""The side of a shard toward the run above it: here there is none; see parent_push.py (the shard there that has the same
keys) and parent_gossip.py (the same shard of other clusters). ParentSlot (parent_slot.py) says when it is which.

Rules
- A place is taken between two clocks. Changes from above are applied there too: weights = base + what was folded since.
- A clock is published once what is owed for it has left and the next may be computed; what is folded meanwhile is kept.
- All shards go up at the same clocks of the cluster, counted from the one at which their place begins, and once more when all
  workers are done: so their clocks above are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from narrows.compression import ErrorFeedback
from narrows.compression.codecs import raw_pieces
from narrows.compression.replica import HostReplica
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import parts
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import Log, MemberEffect, Send, SendToPeer, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.gain import GossipGain
from narrows.protocols.gossip.outer_momentum import OuterMomentum
from narrows.protocols.gossip.peers import GossipPeer
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.heartbeat_summary import Summary
from narrows.protocols.member.link_meter import LinkMeter
from narrows.protocols.member.member import Member
from narrows.protocols.member.session import Session
from narrows.protocols.wire import pack, unpack
from narrows.ps.store.changes import Change, FloatArray, LoadArrays, Rebase

Asks = list[ServerEffect]  # toward above: what is to be sent, told and logged


@dataclass(frozen=True, slots=True)
class ParentSeat:
    """A cluster's place in the run above, as process 0 tells the other shards."""

    settings: Settings
    worker: int
    epoch: int
    clock: int  # of the first update
    at: int  # the cluster's clock that this place begins at
    ports: tuple[int, ...]
    round: int = 0  # of gossip, the first here
    server: str = ""  # address of process 0 there
    before: int = 0  # the epoch there that this one goes on from, under another plan; 0: it begins anew
    hold: int = -1  # no update from this clock there on is pushed, -1: all may be

    def packed(self) -> bytes:
        numbers = [self.worker, self.epoch, self.clock, self.at]
        return pack(
            [self.settings.packed(), *numbers, list(self.ports), self.round, self.server, self.before, self.hold]
        )

    @staticmethod
    def unpacked(packed: bytes) -> ParentSeat:
        """Raises RemoteProtocolError where `packed` is none."""
        value: Any = unpack(packed)
        try:
            settings, worker, epoch, clock, at, ports, number, server, before, hold = value
            numbers = (int(worker), int(epoch), int(clock), int(at))
            where = (tuple(map(int, ports)), int(number), str(server))
            return ParentSeat(Settings.unpacked(settings), *numbers, *where, int(before), int(hold))
        except (TypeError, ValueError):
            raise RemoteProtocolError("a place in the run above is ten values") from None

    def turned(self, before: ParentSeat | None) -> bool:
        """It is this one, at another server, or with another clock to hold at."""
        return before is not None and self == replace(before, ports=self.ports, server=self.server, hold=self.hold)

    def follows(self, before: ParentSeat | None) -> bool:
        """It is this one under the next plan of the run above."""
        return before is not None and (self.worker, self.before) == (before.worker, before.epoch)


@dataclass(frozen=True, slots=True)
class ParentState:
    """The part that outlives a place. `start`: weights at the last push, or the base that they were set to; `renewed`:
    nobody here has a state of before; `degree`: of the optimizer here, see `ModelSpec`; `owed`: to the run above by a
    life before this one, float32[size], until a place there takes it over."""

    start: FloatArray | None = None
    feedback: ErrorFeedback | None = None
    owed: FloatArray | None = None
    model: FloatArray | None = None  # of clusters that gossip
    gain: GossipGain | None = None  # the same
    outer: OuterMomentum | None = None  # the same
    degree: float = 1.0
    renewed: bool = False

    @property
    def residual(self) -> FloatArray | None:
        """All that compression has left out of what was pushed. None: nothing."""
        return self.feedback.residual if self.feedback is not None else self.owed

    def owes(self, x: FloatArray) -> FloatArray:
        """Return the part of weights x that was never pushed: the residual, and what was folded since the
        last push. float32[size]."""
        since = np.zeros_like(x) if self.start is None else x - self.start
        return since if self.residual is None else since + self.residual


class ParentLink:
    """Nothing above: for good, or of a cluster (`kept`) that has no place there at present. `x`: the weights, float32[size].

    kept: what outlives the place. asked: ours are to be the first weights of the run above. master: the model that it ends
    with, once all that is here is in it. ready: the first state of this place is here.
    """

    def __init__(self, kept: ParentState | None = None, place: ParentSeat | None = None) -> None:
        self.kept, self.place = kept or ParentState(), place
        self.ready = self.asked = False
        self.master: FloatArray | None = None

    @property
    def wants_weights(self) -> bool:
        """Whether the run above has no weights yet. Once its model is here the ask is void: another cluster gave, and to give
        now would drop what is owed there."""
        return self.asked and not self.ready

    @property
    def trouble(self) -> str:
        """The reason to end this stream, and the cluster with it; "" for none."""
        return ""

    def repeat_soon(self, peer: str = "") -> None:
        """The connection to the shard above is another one, or that to this peer."""

    def turn(self, place: ParentSeat) -> None:
        """The same place is at another server now, which has all that this one was told of; or it holds at another clock."""
        before, self.place = self.place, place
        if before is None or (before.server, before.ports) != (place.server, place.ports):
            self.repeat_soon()

    def go_on(self, place: ParentSeat, now_ns: int) -> Asks:
        """The same place under another plan. All that was pushed is in, and nothing that is owed is lost."""
        raise RemoteProtocolError("nothing above has a plan that changes")

    def owe(self, owed: FloatArray) -> None:
        """Keep what a life before this one owes to the run above. float32[size]."""
        self.kept = replace(self.kept, owed=owed)

    @property
    def clock(self) -> int:
        """Updates pushed, counted from the first of the run above; -1: it has not begun here."""
        return -1

    def summary(self) -> Summary:
        """Return the figures of this shard as a member there."""
        return Summary()

    @property
    def at_rest(self) -> bool:
        """The server above has all that was pushed."""
        return True

    @property
    def ended(self) -> bool:
        """The last round is done, and other clusters are only answered until all have done theirs (gossip)."""
        return False

    @property
    def addresses(self) -> set[str]:
        """Where other clusters are reached."""
        return set()

    @property
    def others(self) -> Mapping[int, GossipPeer]:
        """Other clusters, by their numbers in the run above."""
        return {}

    # Messages that come.

    def begin(self, now_ns: int) -> Asks:
        """Its first words at this place."""
        return []

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """Return the events that the session toward above sees in a message of the shard there."""
        return []

    def take(self, events: Iterable[MemberEffect], now_ns: int) -> Asks:
        """Take the events that this session has seen. Raises RemoteProtocolError."""
        return []

    def hear(self, message: m.Message, now_ns: int) -> Asks:
        """Take a message of another cluster. Raises RemoteProtocolError for one that none sends us."""
        raise RemoteProtocolError(f"a shard takes no {type(message).__name__}: this cluster has no server above")

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> Asks:
        """Who the other clusters are; `alone`: no server above will say more."""
        return []

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        """These are the first weights of the run above."""
        return []

    def tick(self, now_ns: int) -> Asks:
        return []

    # The stages of a clock.

    def stepped(self, samples: int) -> None:
        """A clock of the cluster is folded."""

    def moved(self) -> None:
        """The weights are on their way again: the last model was none."""

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push what is owed; whether all of that has left."""
        return [], True

    def may_publish(self) -> bool:
        """The next clock may be computed on what is here."""
        return True

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        """Once the first state of this place is here: who has nothing of ours yet is shown it at once, as `publication`."""
        return []

    def rebase(self) -> list[Change]:
        """Between two clocks: let the weights stand on what has come."""
        return []

    def last(self) -> list[Change]:
        """After the last clock: let them be the model that the run above ends with."""
        return []

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """All workers are done: push all that is left; false where that must wait."""
        return [], True


class SeatedParentLink(ParentLink):
    """At a place above, toward the shard there with the same keys. `member`: in process 0, whose session is ours too, and which
    says again what is not answered. `whole`: the shard there publishes whole states."""

    def __init__(
        self,
        index: int,
        place: ParentSeat,
        kept: ParentState,
        member: Member | None,
        timing: Timing,
        replica: HostReplica,
        whole: bool,
    ) -> None:
        super().__init__(kept, place)
        self.index, self.own, self.member, self.timing, self.replica = index, member is None, member, timing, replica
        self._sit(place, whole)
        self.inner = 0  # clocks of the cluster since something was pushed
        self.due = False  # something was pushed or has come since the base was made
        self.finishing = False  # the last model is asked for, now that all is pushed

    def _sit(self, place: ParentSeat, whole: bool) -> None:
        """With a session and an exchange of this place, of which nothing is said yet."""
        self.place, self.here, self.mode = place, place, place.settings.mode()
        ours = Session(self.index, place.epoch, self.mode, self.timing, LinkMeter())
        self.session = ours if self.member is None else self.member.sessions[0]
        self.exchange: Exchange[FloatArray] = Exchange(self.mode, self.replica, whole)

    def _say(self, messages: list[m.Message], now_ns: int) -> Asks:
        return asks(self.session.say(messages, now_ns))

    def begin(self, now_ns: int) -> Asks:
        said = self.exchange.begin(self.here.worker, self.here.epoch, self.here.clock)
        self.exchange.held_at = self.here.hold
        return self._say(said, now_ns)

    def turn(self, place: ParentSeat) -> None:
        super().turn(place)
        self.exchange.held_at = place.hold

    def tick(self, now_ns: int) -> Asks:
        return asks(self.session.repeat(now_ns)) if self.own else []

    def repeat_soon(self, peer: str = "") -> None:
        if not peer:
            self.session.repeat_soon()

    @property
    def start(self) -> FloatArray:
        assert self.kept.start is not None  # once the first state is here
        return self.kept.start

    @property
    def clock(self) -> int:
        return self.exchange.clock if self.ready else -1

    def summary(self) -> Summary:
        clock, settled = max(self.clock, 0), self.exchange.settled
        pushed = max(clock - self.here.clock, 0)
        ahead = max(clock - settled, 0) if settled >= 0 else 0
        return Summary(clock=clock, steps=pushed, updates=pushed, staleness=ahead, held_back=self.replica.held_back)

    @property
    def at_rest(self) -> bool:
        return self.session.at_rest

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        return self.session.receive(message, now_ns)

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        self.asked = False
        begin, end = self.replica.begin, self.replica.end
        return self._say(self.exchange.give(raw_pieces(x.copy(), begin, parts(begin, end))), now_ns)

    def moved(self) -> None:
        self.master, self.finishing = None, False

    def last(self) -> list[Change]:
        return self._on(self.master) if self.master is not None and self.kept.start is not self.master else []

    def _on(self, base: FloatArray) -> list[Change]:
        before, self.kept = self.start, replace(self.kept, start=base)
        return [Rebase(before, base)]

    def _begin_with(self, base: Callable[[], FloatArray], x: FloatArray, publication: int) -> list[Change]:
        """The model of this place is here. Who has nothing of ours yet begins with it, and what was folded here meanwhile."""
        self.ready, before = True, self.kept.start
        if before is not None and not self.kept.renewed:
            return []
        start = base()
        self.kept = replace(self.kept, start=start, renewed=False)
        weights = start if before is None else x - before + start
        return [LoadArrays({"x": weights, "p": weights}, publication)]


def asks(effects: Iterable[MemberEffect | Log]) -> Asks:
    """Return the effects for a runner: send to the shard above, whose number is the peer, tell another cluster, log."""
    return [effect for effect in effects if isinstance(effect, (Send, SendToPeer, Log))]
