"""The link of one shard to its parent. `ParentLink` here is the link of a shard without a parent.

How it works

    ParentLink           no parent, or no seat in its run at present: every stage may go on at once
    SeatedParentLink     has a seat: a Session with the parent's shard, an Exchange, a replica
      ParentPush         pushes updates to the parent's shard with the same keys (parent_push.py)
      ParentGossip       mixes with the same shard of other clusters (parent_gossip.py)

ParentSlot (parent_slot.py) chooses between them. ModelShard calls the link in the stages of each clock:

1. `stepped` after the fold of a clock.
2. `send_up` pushes what this cluster owes. False: the push must wait, and the clock with it.
3. `may_publish`: True if the staleness bound of the parent's run allows the next clock to be computed.
4. `rebase` gives the change that moves the weights onto the parent's newest state: weights = base + what was folded
   since.
5. `finish` after the last clock pushes the rest; `last` gives the model that the parent's run ends with.

Rules
- A seat is taken between two clocks. Changes from the parent are applied there too.
- The shard publishes a clock after two events: the push to the parent for that clock has left, and the parent's
  staleness bound allows the next clock. Updates that the shard folds meanwhile stay in the model.
- All shards push at the same clocks of the cluster, counted from the clock at which their seat begins, and once more
  when all workers are done. So their clocks in the parent's run are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from narrows.compression import Codecs, ErrorFeedback
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

Asks = list[ServerEffect]  # effects toward the parent: messages to send, log lines


@dataclass(frozen=True, slots=True)
class ParentSeat:
    """A cluster's seat in its parent's run, as process 0 hands it to all shards in the ledger."""

    settings: Settings
    worker: int
    epoch: int
    clock: int  # of the first update that is pushed at this seat
    at: int  # the cluster's clock at which this seat begins
    ports: tuple[int, ...]  # of the parent's shards
    round: int = 0  # gossip: the first round at this seat
    server: str = ""  # address of the parent's process 0
    before: int = 0  # the epoch of the seat that this one continues under another plan; 0 if it begins anew
    hold: int = -1  # no update from this clock of the parent's run on may be pushed; -1 for no hold

    @property
    def codecs(self) -> Codecs:
        """The codecs of the parent's run. Under `auto` pushes begin on the sparsest rung, as those of a worker do."""
        return Codecs.of(self.settings.compress, self.settings.compress_down)

    def packed(self) -> bytes:
        numbers = [self.worker, self.epoch, self.clock, self.at]
        return pack(
            [self.settings.packed(), *numbers, list(self.ports), self.round, self.server, self.before, self.hold]
        )

    @staticmethod
    def unpacked(packed: bytes) -> ParentSeat:
        """Unpack a seat. Raises RemoteProtocolError if `packed` is none."""
        value: Any = unpack(packed)
        try:
            settings, worker, epoch, clock, at, ports, number, server, before, hold = value
            numbers = (int(worker), int(epoch), int(clock), int(at))
            where = (tuple(map(int, ports)), int(number), str(server))
            return ParentSeat(Settings.unpacked(settings), *numbers, *where, int(before), int(hold))
        except (TypeError, ValueError):
            raise RemoteProtocolError("a place in the parent's run is ten values") from None

    def turned(self, before: ParentSeat | None) -> bool:
        """True if this is the seat `before` with another server, or another hold."""
        return before is not None and self == replace(before, ports=self.ports, server=self.server, hold=self.hold)

    def follows(self, before: ParentSeat | None) -> bool:
        """True if this is the seat `before` under the next plan of the parent's run."""
        return before is not None and (self.worker, self.before) == (before.worker, before.epoch)


@dataclass(frozen=True, slots=True)
class ParentState:
    """The state of a link that outlives a seat.

    Attributes:
        start: The weights at the last push, or the base that they were moved onto; float32[size].
        feedback: The error feedback of pushes.
        owed: What an earlier process owed the parent, float32[size], until a seat takes it over.
        model: This cluster's model (gossip).
        gain: The gain of mixing (gossip).
        outer: The outer momentum (gossip).
        degree: How updates of the optimizer here scale, as in `ModelSpec`.
        renewed: True if no worker here has a state of an earlier seat.
    """

    start: FloatArray | None = None
    feedback: ErrorFeedback | None = None
    owed: FloatArray | None = None
    model: FloatArray | None = None
    gain: GossipGain | None = None
    outer: OuterMomentum | None = None
    degree: float = 1.0
    renewed: bool = False

    @property
    def residual(self) -> FloatArray | None:
        """What compression has left out of all pushes, float32[size]; None for nothing."""
        return self.feedback.residual if self.feedback is not None else self.owed

    def owes(self, x: FloatArray) -> FloatArray:
        """Return the part of weights x that was never pushed, float32[size].

        It is the residual, and what was folded since the last push.
        """
        since = np.zeros_like(x) if self.start is None else x - self.start
        return since if self.residual is None else since + self.residual


class ParentLink:
    """The link of a shard without a parent, or of a cluster that has no seat in its parent's run at present.

    In all methods `x` is the shard's weights, float32[size], which the link does not change.

    Attributes:
        kept: What outlives the seat.
        place: The seat, None for none.
        ready: True once the first state of this seat is here.
        asked: True if the parent wants its first weights from this cluster.
        master: The model that the parent's run ends with, once it contains all updates of this cluster; else None.
    """

    def __init__(self, kept: ParentState | None = None, place: ParentSeat | None = None) -> None:
        self.kept, self.place = kept or ParentState(), place
        self.ready = self.asked = False
        self.master: FloatArray | None = None

    @property
    def wants_weights(self) -> bool:
        """True if the parent still has no weights and wants ours.

        Once its model is here the request is void: another cluster gave the weights, and to give ours now would lose
        what is owed.
        """
        return self.asked and not self.ready

    @property
    def trouble(self) -> str:
        """The reason to end this link, and the cluster with it; "" for none."""
        return ""

    def repeat_soon(self, peer: str = "") -> None:
        """Have the next tick repeat what is not acknowledged.

        Args:
            peer: The address of another cluster whose connection is new; "" for the parent's shard.
        """

    def turn(self, place: ParentSeat) -> None:
        """Keep the seat at another server, which has all that the earlier one acknowledged; or take another hold."""
        before, self.place = self.place, place
        if before is None or (before.server, before.ports) != (place.server, place.ports):
            self.repeat_soon()

    def go_on(self, place: ParentSeat, now_ns: int) -> Asks:
        """Keep the seat under another plan of the parent's run: all pushes count, and the residual stays."""
        raise RemoteProtocolError("no parent has a plan that changes")

    def owe(self, owed: FloatArray) -> None:
        """Keep what an earlier process owes the parent, float32[size]."""
        self.kept = replace(self.kept, owed=owed)

    @property
    def clock(self) -> int:
        """Updates pushed, counted from the first of the parent's run; -1 before this seat has begun."""
        return -1

    def summary(self) -> Summary:
        """Return the figures of this shard as a member of the parent's run."""
        return Summary()

    @property
    def at_rest(self) -> bool:
        """True if the parent has acknowledged all that was pushed."""
        return True

    @property
    def ended(self) -> bool:
        """True if the last round is done here, and peers are only answered until all have done theirs (gossip)."""
        return False

    @property
    def addresses(self) -> set[str]:
        """The addresses of the other clusters."""
        return set()

    @property
    def others(self) -> Mapping[int, GossipPeer]:
        """The other clusters, by their numbers in the parent's run."""
        return {}

    # Messages, received and sent.

    def begin(self, now_ns: int) -> Asks:
        """Return the first messages at this seat."""
        return []

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """Return the events of the session with the parent's shard that a message of that shard causes."""
        return []

    def take(self, events: Iterable[MemberEffect], now_ns: int) -> Asks:
        """Take events of that session. Raises RemoteProtocolError."""
        return []

    def hear(self, message: m.Message, now_ns: int) -> Asks:
        """Take a message of another cluster. Raises RemoteProtocolError for one that no cluster may send."""
        raise RemoteProtocolError(f"a shard takes no {type(message).__name__}: this cluster has no parent")

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> Asks:
        """Take the packed roster of the other clusters. `alone`: the parent is lost and will send no newer one."""
        return []

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        """Give the parent x as its first weights."""
        return []

    def tick(self, now_ns: int) -> Asks:
        """Repeat what is not acknowledged."""
        return []

    # The stages of a clock.

    def stepped(self, samples: int) -> None:
        """Take note that a clock of the cluster is folded, over this many samples."""

    def moved(self) -> None:
        """Take note that the weights have changed: the last model that was asked for is void."""

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push what is owed.

        Returns:
            The effects, and False if the push must wait.
        """
        return [], True

    def may_publish(self) -> bool:
        """True if the next clock may be computed on the state that is here."""
        return True

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        """Return the change that begins with the first state of this seat, as publication `publication`.

        The list is empty if that state is not here, or the workers here compute on a state of their own already.
        """
        return []

    def rebase(self) -> list[Change]:
        """Return the change that moves the weights onto the parent's newest state. Called between two clocks."""
        return []

    def last(self) -> list[Change]:
        """Return the change that takes over the model that the parent's run ends with. Called after the last clock."""
        return []

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push the rest, now that all workers are done.

        Returns:
            The effects, and False if that must wait.
        """
        return [], True


class SeatedParentLink(ParentLink):
    """A shard with a seat in the parent's run: the link to the parent's shard with the same keys."""

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
        """A link before its first message.

        Args:
            index: The number of this shard, here and at the parent.
            place: The seat.
            kept: What an earlier seat has left.
            member: In process 0: the cluster's member, whose first session is this link's, and which repeats what is
                not acknowledged. None in the other processes: the link has a session of its own.
            timing: The limits of every wait.
            replica: The arrays of the exchange with the parent's shard.
            whole: True if the parent's shard publishes whole states.
        """
        super().__init__(kept, place)
        self.index, self.own, self.member, self.timing, self.replica = index, member is None, member, timing, replica
        self._sit(place, whole)
        self.inner = 0  # clocks of the cluster since the last push
        self.due = False  # True if something was pushed or has arrived since the base was made
        self.finishing = False  # True while the last model is requested, after the last push

    def _sit(self, place: ParentSeat, whole: bool) -> None:
        """Make a session and an exchange for this seat; nothing is sent yet."""
        self.place, self.here, self.mode = place, place, place.settings.mode()
        ours = Session(self.index, place.epoch, self.mode, self.timing, LinkMeter())
        self.session = ours if self.member is None else self.member.sessions[0]
        self.exchange: Exchange[FloatArray] = Exchange(self.mode, self.replica, whole)

    def _say(self, messages: list[m.Message], now_ns: int) -> Asks:
        """Send messages to the parent's shard through the session, which repeats them."""
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
        """The weights at the last push, or the base that they were moved onto since."""
        assert self.kept.start is not None  # the first state is here
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
        """Return the change that moves the weights onto `base`."""
        before, self.kept = self.start, replace(self.kept, start=base)
        return [Rebase(before, base)]

    def _begin_with(self, base: Callable[[], FloatArray], x: FloatArray, publication: int) -> list[Change]:
        """Begin with the parent's model at this seat.

        Workers that compute on a state of their own keep it: then no change is returned. Otherwise the weights become
        that model plus what was folded here meanwhile.
        """
        self.ready, before = True, self.kept.start
        if before is not None and not self.kept.renewed:
            return []
        start = base()
        self.kept = replace(self.kept, start=start, renewed=False)
        weights = start if before is None else x - before + start
        return [LoadArrays({"x": weights, "p": weights}, publication)]


def asks(effects: Iterable[MemberEffect | Log]) -> Asks:
    """Return the effects that are for a runner.

    They send to the parent's shard, whose number stands in place of the peer, send to another cluster, or log.
    """
    return [effect for effect in effects if isinstance(effect, (Send, SendToPeer, Log))]
