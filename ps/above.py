"""One shard toward the server above: nothing there (Root), or the shard there that has the same keys, its parent (Pushing).

Rules
- A cluster's server is a worker of the server above. Its inner step is one advance of its min_clock, its update what the
  shard's weights moved by since the last push, and it reads its own writes: base = replica (protocols/member/exchange.py).
- What comes from above is applied between two clocks: weights = base + what was folded since the last push.
- A clock is published once its update has left and the next may be computed; what is folded meanwhile is kept.
- All shards push at the same clocks of the cluster, counted from the one at which their place begins, and once more each time
  that all workers are done: so their clocks above are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from narrows.compression import ErrorFeedback, ladder, parse
from narrows.compression.codecs import coded_piece, raw_pieces
from narrows.compression.replica import HostReplica
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import Log, MemberEffect, Send, ServerEffect, Tell
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.keys import Keys, parts
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.member.member import Member
from narrows.protocols.member.meter import LinkMeter
from narrows.protocols.member.session import Session
from narrows.protocols.settings import Settings
from narrows.protocols.timing import Timing
from narrows.protocols.wire import pack, unpack
from narrows.ps.store import Change, FloatArray, Load, Rebase

Asks = list[ServerEffect]  # toward above: what is to be sent, told and logged
NOTHING = parse("threshold:1")  # codes zeros in 16 bytes


@dataclass(frozen=True, slots=True)
class Place:
    """A cluster's place in the run above, as process 0 tells the other shards."""

    settings: Settings
    worker: int
    epoch: int
    clock: int  # of the first update
    at: int  # the cluster's clock that this place begins at
    ports: tuple[int, ...]
    round: int = 0  # of gossip, the first here

    def packed(self) -> bytes:
        numbers = [self.worker, self.epoch, self.clock, self.at]
        return pack([self.settings.packed(), *numbers, list(self.ports), self.round])

    @staticmethod
    def unpacked(packed: bytes) -> Place:
        """Raises RemoteProtocolError where `packed` is none."""
        value: Any = unpack(packed)
        try:
            settings, worker, epoch, clock, at, ports, number = value
            numbers = (int(worker), int(epoch), int(clock), int(at))
            return Place(Settings.unpacked(settings), *numbers, tuple(map(int, ports)), int(number))
        except (TypeError, ValueError):
            raise RemoteProtocolError("a place in the run above is seven values") from None


@dataclass(frozen=True, slots=True)
class Kept:
    """What outlives a place. `start`: what the weights were at the last push, or the base that they were set to; `renewed`:
    nobody here has a state of before."""

    start: FloatArray | None = None
    feedback: ErrorFeedback | None = None
    model: FloatArray | None = None  # of clusters that gossip
    renewed: bool = False


class Above(Protocol):
    """What a shard asks of whatever is above it. `x`: its weights, float32[size]."""

    kept: Kept

    @property
    def place(self) -> Place | None: ...
    @property
    def ready(self) -> bool:
        """The first state of this place is here."""

    @property
    def wants_weights(self) -> bool:
        """The run above has no weights yet, and ours are to be the first."""

    @property
    def master(self) -> FloatArray | None:
        """The model that the run above ends with, once all that is here is in it."""

    @property
    def trouble(self) -> str:
        """What ends this stream, and the cluster with it."""

    def begin(self, now_ns: int) -> Asks:
        """Its first words at this place."""

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        """What the session toward above sees in a message of the shard there."""

    def take(self, events: Iterable[MemberEffect], x: FloatArray, now_ns: int) -> Asks:
        """What that session has seen. Raises RemoteProtocolError."""

    def hear(self, message: m.Message, now_ns: int) -> Asks:
        """What another cluster says. Raises RemoteProtocolError for what none says to us."""

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> Asks:
        """Who the other clusters are; `alone`: no server above will say more."""

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        """These are the first weights of the run above."""

    def stepped(self, samples: int) -> None:
        """A clock of the cluster is folded."""

    def moved(self) -> None:
        """The weights are on their way again: the last model was none."""

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push what is owed; whether all of that has left."""

    def may_publish(self) -> bool:
        """The next clock may be computed on what is here."""

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        """Once the first state of this place is here: who has nothing of ours yet is shown it at once, as `publication`."""

    def rebase(self) -> list[Change]:
        """Between two clocks: let the weights stand on what has come."""

    def last(self) -> list[Change]:
        """After the last clock: let them be the model that the run above ends with."""

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """All workers are done: push all that is left; false where that must wait."""

    def tick(self, now_ns: int) -> Asks: ...

    @property
    def clock(self) -> int:
        """Updates pushed, counted from the first of the run above; -1: it has not begun here."""

    @property
    def at_rest(self) -> bool:
        """The server above has all that was pushed."""

    @property
    def ended(self) -> bool:
        """The last round is done, and other clusters are only answered until all have done theirs (gossip)."""

    @property
    def addresses(self) -> set[str]:
        """Where other clusters are reached."""


class Root:
    """Nothing above: for good, or of a cluster (`kept`) that has no place there at present."""

    def __init__(self, kept: Kept | None = None, place: Place | None = None) -> None:
        self.kept, self.place = kept or Kept(), place
        self.ready = self.wants_weights = False
        self.master: FloatArray | None = None

    @property
    def trouble(self) -> str:
        return ""

    @property
    def clock(self) -> int:
        return -1

    @property
    def at_rest(self) -> bool:
        return True

    @property
    def ended(self) -> bool:
        return False

    def begin(self, now_ns: int) -> Asks:
        return []

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        return []

    def take(self, events: Iterable[MemberEffect], x: FloatArray, now_ns: int) -> Asks:
        return []

    def hear(self, message: m.Message, now_ns: int) -> Asks:
        raise RemoteProtocolError(f"a shard takes no {type(message).__name__}: this cluster has no server above")

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> Asks:
        return []

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        return []

    def stepped(self, samples: int) -> None:
        """There is nobody to push to."""

    def moved(self) -> None:
        """Nor to end with."""

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        return [], True

    def may_publish(self) -> bool:
        return True

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        return []

    def rebase(self) -> list[Change]:
        return []

    def last(self) -> list[Change]:
        return []

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        return [], True

    def tick(self, now_ns: int) -> Asks:
        return []

    @property
    def addresses(self) -> set[str]:
        return set()


class Pushing(Root):
    """A child of the shard above that has the same keys. `member`: in process 0, whose session is ours too."""

    def __init__(self, index: int, place: Place, keys: Keys, kept: Kept, member: Member | None, timing: Timing) -> None:
        super().__init__(kept, place)
        self.session, self.repeats = session_of(index, place, member, timing), member is None
        self.index, self.keys, self.here = index, keys, place
        settings, mode = place.settings, place.settings.mode()
        # The link up is not measured yet: under `auto` the sparsest rung, which is what a worker begins with too.
        up = parse(ladder(settings.compress)[-1].spec)
        self.feedback = kept.feedback or ErrorFeedback(up, keys[1] - keys[0], seed=place.worker << 16 | index)
        self.replica = HostReplica(*keys, [(keys, self.feedback)], parts)
        self.exchange: Exchange[FloatArray] = Exchange(
            index, mode, self.replica, whole=ladder(settings.compress_down).lossless
        )
        self.inner = self.samples = 0  # clocks of the cluster since the last push, and what they were computed on
        self.due = False  # something was pushed or has come since the base was made
        self.finishing = False  # the model of the run above was asked for, now that all is pushed

    def begin(self, now_ns: int) -> Asks:
        place = self.here
        return self._say(self.exchange.begin(place.worker, place.epoch, place.clock), now_ns)

    def _say(self, messages: list[m.Message], now_ns: int) -> Asks:
        return asks(self.session.say(messages, now_ns))

    def receive(self, message: m.Message, now_ns: int) -> list[MemberEffect]:
        return self.session.receive(message, now_ns)

    @property
    def clock(self) -> int:
        return self.exchange.clock if self.ready else -1

    @property
    def at_rest(self) -> bool:
        return self.session.at_rest

    @property
    def start(self) -> FloatArray:
        assert self.kept.start is not None  # once the first state is here
        return self.kept.start

    def take(self, events: Iterable[MemberEffect], x: FloatArray, now_ns: int) -> Asks:
        effects: Asks = []
        for event in events:
            effects += asks([event])
            if isinstance(event, e.GiveWeights):
                self.wants_weights = True
            effects += self._say(self.exchange.take(event), now_ns)
            self.due |= isinstance(event, e.StateArrived)
            if isinstance(event, e.MasterArrived) and self.finishing and event.clock == self.exchange.clock:
                self.master, self.finishing = self.exchange.shared, False
        return effects

    def give_weights(self, x: FloatArray, now_ns: int) -> Asks:
        self.wants_weights = False
        return self._say(self.exchange.give(raw_pieces(x.copy(), self.keys[0], parts(*self.keys))), now_ns)

    def stepped(self, samples: int) -> None:
        self.inner += 1
        self.samples += samples
        self.moved()

    def moved(self) -> None:
        self.master, self.finishing = None, False

    def send_up(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        if self.inner < self.exchange.mode.local_steps:
            return [], True
        if not self.ready or not self.exchange.may_push:
            return [], False
        return self._push(x, now_ns), True

    def _push(self, x: FloatArray, now_ns: int, dense: bool = False) -> Asks:
        update, feedback, clock = x - self.start, self.feedback, self.exchange.clock
        if not update.any() and (feedback.residual is None or not feedback.residual.any()):
            pieces = [coded_piece(NOTHING.encode(update), *self.keys)]
        else:
            try:
                pieces = self.replica.encode(update, clock, dense)
            except (
                ValueError
            ):  # not finite: sent as it is, and the server above names it, or whoever trains there sees it
                pieces = self.replica.encode(update, clock, dense=True)
        self.kept = replace(self.kept, start=x.copy(), feedback=feedback)
        samples = min(max(1, self.samples), m.CLOCK_MAX)
        self.inner = self.samples = 0
        self.due = True
        return self._say(self.exchange.push(pieces, samples), now_ns)

    def may_publish(self) -> bool:
        return self.ready and self.exchange.may_compute

    def first(self, x: FloatArray, publication: int) -> list[Change]:
        if self.ready or self.exchange.settled < 0:
            return []
        self.ready, before, renewed = True, self.kept.start, self.kept.renewed
        if before is not None and not renewed:
            return []
        base = self._base()
        self.kept = replace(self.kept, start=base, renewed=False)
        weights = base if before is None else x - before + base
        return [Load({"x": weights, "p": weights}, publication)]

    def _base(self) -> FloatArray:
        base = np.empty(self.keys[1] - self.keys[0], np.float32)
        self.exchange.base(*self.keys, base)
        self.due = False
        return base

    def rebase(self) -> list[Change]:
        return self._on(self._base()) if self.due and self.exchange.may_compute else []

    def last(self) -> list[Change]:
        return self._on(self.master) if self.master is not None and self.start is not self.master else []

    def _on(self, base: FloatArray) -> list[Change]:
        before, self.kept = self.start, replace(self.kept, start=base)
        return [Rebase(before, base)]

    def finish(self, x: FloatArray, now_ns: int) -> tuple[Asks, bool]:
        """Push all that is left, dense, and ask for the model of the run once all clusters have come as far.

        Nothing too is an update: every cluster's last clock is one after its steps, or one would not wait for another.
        """
        if not self.may_publish() or not self.exchange.may_push:
            return [], False
        self.finishing, self.master = True, None
        pushed = self._push(x, now_ns, dense=True)
        return [*pushed, *self._say(self.exchange.ask_shared(flushed=True), now_ns)], True

    def tick(self, now_ns: int) -> Asks:
        return asks(self.session.repeat(now_ns)) if self.repeats else []


def session_of(index: int, place: Place, member: Member | None, timing: Timing) -> Session:
    """Toward the shard above: that of the member beside us, which says again what is not answered, or one of our own."""
    if member is not None:
        return member.sessions[0]
    return Session(index, place.worker, place.epoch, place.settings.mode(), timing, LinkMeter())


def asks(effects: Iterable[MemberEffect | Log]) -> Asks:
    """What a session asks of a runner: send to the shard above, whose number is the peer, or tell another cluster."""
    return [effect for effect in effects if isinstance(effect, (Send, Tell, Log))]
