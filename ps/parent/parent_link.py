"""What a shard does as a child of its parent's shard with the same keys: `ParentLink`, and the seat that a link has.

How it works

    ParentSlot      of each shard: empty, or with a link (parent_slot.py)
      ParentLink    the Protocol of a link: what ModelShard calls in the stages of each clock
        ParentPush     pushes updates to the parent's shard (parent_push.py)
        ParentGossip   mixes with the same shard of other clusters (parent_gossip.py)
      ParentSession what each link has: the seat, a Session with the parent's shard, an Exchange, the replica

The stages of a clock:

1. The seat's `stepped` after the fold of a clock.
2. `send_up` pushes what this cluster owes. False: the push must wait, and the clock with it.
3. `may_publish`: True if the staleness bound of the parent's run allows the next clock to be computed.
4. `rebase` gives the change that moves the weights onto the parent's newest state: weights = base + what was folded
   since.
5. `finish` after the last clock pushes the rest; the seat's `last` gives the model that the parent's run ends with.

Rules
- A seat is taken between two clocks. Changes from the parent are applied there too.
- The shard publishes a clock after two events: the push to the parent for that clock has left, and the parent's
  staleness bound allows the next clock. Updates that the shard folds meanwhile stay in the model.
- All shards push at the same clocks of the cluster, counted from the clock at which their seat begins, and once more
  when all workers are done. So their clocks in the parent's run are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from narrows.compression import Codecs, ErrorFeedback
from narrows.compression.codecs import raw_pieces
from narrows.compression.replica import HostReplica
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import parts
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import GiveWeights, Log, MemberEffect, Send, SendToPeer, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.gossip.gain import GossipGain
from narrows.protocols.gossip.outer_momentum import OuterMomentum
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


class ParentSession:
    """The seat of one shard in the parent's run: its session and its exchange with the parent's shard with the same keys.

    In all methods `x` is the shard's weights, float32[size], which the seat does not change.

    Attributes:
        kept: What outlives the seat.
        place: The seat.
        ready: True once the first state of this seat is here.
        asked: True if the parent wants its first weights from this cluster.
        master: The model that the parent's run ends with, once it contains all updates of this cluster; else None.
        inner: Clocks of the cluster since the last push, and `samples` of these clocks.
        due: True if something was pushed or has arrived since the base was made.
        finishing: True while the last model is requested, after the last push.
    """

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
        """A seat before its first message.

        Args:
            index: The number of this shard, here and at the parent.
            place: The seat.
            kept: What an earlier seat has left.
            member: In process 0: the cluster's member, whose first session is this seat's, and which repeats what is
                not acknowledged. None in the other processes: the seat has a session of its own.
            timing: The limits of every wait.
            replica: The arrays of the exchange with the parent's shard.
            whole: True if the parent's shard publishes whole states.
        """
        self.kept, self.index, self.own, self.member, self.timing = kept, index, member is None, member, timing
        self.replica = replica
        self.sit(place, whole)
        self.ready = self.asked = self.due = self.finishing = False
        self.master: FloatArray | None = None
        self.inner = self.samples = 0

    def sit(self, place: ParentSeat, whole: bool) -> None:
        """Make a session and an exchange for this seat; nothing is sent yet."""
        self.place, self.mode = place, place.settings.mode()
        ours = Session(self.index, place.epoch, self.mode, self.timing, LinkMeter())
        self.session = ours if self.member is None else self.member.sessions[0]
        self.exchange: Exchange[FloatArray] = Exchange(self.mode, self.replica, whole)

    def keep(self, **changes: Any) -> None:
        """Change fields of `kept`."""
        self.kept = replace(self.kept, **changes)

    # Messages, received and sent.

    def send(self, messages: list[m.Message], now_ns: int) -> Asks:
        """Send messages to the parent's shard through the session, which repeats them."""
        return asks(self.session.send(messages, now_ns))

    def begin(self, now_ns: int) -> Asks:
        """Return the first messages at this seat."""
        said = self.exchange.begin(self.place.worker, self.place.epoch, self.place.clock)
        self.exchange.hold(self.place.hold)
        return self.send(said, now_ns)

    def turn(self, place: ParentSeat) -> bool:
        """Keep the seat at another server, which has all that the earlier one acknowledged; or take another hold.

        Returns:
            True if the server is another.
        """
        before, self.place = self.place, place
        self.exchange.hold(place.hold)
        return (before.server, before.ports) != (place.server, place.ports)

    def take(self, event: MemberEffect, now_ns: int) -> Asks:
        """Take an event of the session: the exchange may have something to say to it. Raises RemoteProtocolError."""
        self.asked |= isinstance(event, GiveWeights)
        return [*asks([event]), *self.send(self.exchange.take(event), now_ns)]

    def tick(self, now_ns: int) -> Asks:
        """Repeat what is not acknowledged."""
        return asks(self.session.repeat(now_ns)) if self.own else []

    @property
    def wants_weights(self) -> bool:
        """True if the parent still has no weights and wants ours.

        Once its model is here the request is void: another cluster gave the weights, and to give ours now would lose
        what is owed.
        """
        return self.asked and not self.ready

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        """Give the parent x as its first weights."""
        self.asked = False
        begin, end = self.replica.begin, self.replica.end
        return self.send(self.exchange.give(raw_pieces(x.copy(), begin, parts(begin, end))), now_ns)

    # The clock and the weights.

    @property
    def clock(self) -> int:
        """Updates pushed, counted from the first of the parent's run; -1 before this seat has begun."""
        return self.exchange.clock if self.ready else -1

    def summary(self) -> Summary:
        """Return the figures of this shard as a member of the parent's run."""
        clock, settled = max(self.clock, 0), self.exchange.settled
        pushed = max(clock - self.place.clock, 0)
        ahead = max(clock - settled, 0) if settled >= 0 else 0
        return Summary(clock=clock, steps=pushed, updates=pushed, staleness=ahead, held_back=self.replica.held_back)

    @property
    def start(self) -> FloatArray:
        """The weights at the last push, or the base that they were moved onto since."""
        assert self.kept.start is not None  # the first state is here
        return self.kept.start

    def stepped(self, samples: int) -> None:
        """Take note that a clock of the cluster is folded, over this many samples."""
        self.inner += 1
        self.samples += samples
        self.moved()

    def moved(self) -> None:
        """Take note that the weights have changed: the last model that was asked for is void."""
        self.master, self.finishing = None, False

    def begin_round(self) -> int:
        """Count the clocks of the next push from here on. Returns the samples of the clocks since the push before."""
        samples, self.inner, self.samples, self.due = self.samples, 0, 0, True
        return samples

    def outdate_base(self) -> None:
        """Take note that something arrived from the parent or from a peer: a new base is due."""
        self.due = True

    def made_base(self) -> None:
        """Take note that the base is made, with all that has arrived."""
        self.due = False

    def await_last(self) -> None:
        """Take note that all of this cluster was pushed, or is in its last round: the last model is requested."""
        self.finishing, self.master = True, None

    def take_last(self, model: FloatArray | None) -> None:
        """Take the last model that was requested, float32[size]."""
        self.finishing, self.master = False, model

    def last(self) -> list[Change]:
        """Return the change that takes over the model that the parent's run ends with. Called after the last clock."""
        return self.move_onto(self.master) if self.master is not None and self.kept.start is not self.master else []

    def move_onto(self, base: FloatArray) -> list[Change]:
        """Return the change that moves the weights onto `base`."""
        before = self.start
        self.keep(start=base)
        return [Rebase(before, base)]

    def begin_with(self, base: Callable[[], FloatArray], x: FloatArray, publication: int) -> list[Change]:
        """Begin with the parent's model at this seat, as publication `publication`.

        Workers that compute on a state of their own keep it: then no change is returned. Otherwise the weights become
        that model plus what was folded here meanwhile.
        """
        self.ready, before = True, self.kept.start
        if before is not None and not self.kept.renewed:
            return []
        start = base()
        self.keep(start=start, renewed=False)
        weights = start if before is None else x - before + start
        return [LoadArrays({"x": weights, "p": weights}, publication)]


class ParentLink(Protocol):
    """What a shard with a seat does in the stages of each clock. In all methods `x` is the shard's weights, float32[size].

    Attributes:
        seat: The seat.
    """

    seat: ParentSession

    @property
    def kept(self) -> ParentState:
        """What outlives the seat."""

    def begin(self, now_ns: int) -> Asks:
        """Return the first messages at this seat."""

    def take(self, events: Iterable[MemberEffect], now_ns: int) -> Asks:
        """Take events of the session with the parent's shard. Raises RemoteProtocolError."""

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        """Give the parent x as its first weights."""

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push what is owed.

        Returns:
            The effects, and False if the push must wait.
        """

    def may_publish(self) -> bool:
        """True if the next clock may be computed on the state that is here."""

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        """Return the change that begins with the first state of this seat, as publication `publication`.

        The list is empty if that state is not here, or the workers here compute on a state of their own already.
        """

    def rebase(self) -> list[Change]:
        """Return the change that moves the weights onto the parent's newest state. Called between two clocks."""

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push the rest, now that all workers are done.

        Returns:
            The effects, and False if that must wait.
        """


def asks(effects: Iterable[MemberEffect | Log]) -> Asks:
    """Return the effects that are for a runner.

    They send to the parent's shard, whose number stands in place of the peer, send to another cluster, or log.
    """
    return [effect for effect in effects if isinstance(effect, (Send, SendToPeer, Log))]
