"""One shard's stream to the server above: what it pushes there, what it waits for, and the base that it computes on. No I/O.

Rules
- A cluster's server is a worker of the server above. Its inner step is one advance of its min_clock, its update what the
  shard's weights moved by since the last push, and it reads its own writes:
  base = pulled state + residual + own updates that this state lacks (protocols/view.py).
- What comes from above is applied between two clocks: weights = base + what was folded since the last push.
- A clock is published once its update has left and the next may be computed; what is folded meanwhile is kept.
- All shards push at the same clocks of the cluster, counted from the one at which their place begins, and once more each time
  that all workers are done: so their clocks above are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import narrows.compression
from narrows.compression import ErrorFeedback, NonFiniteError, ladder, parse
from narrows.protocols import messages as m
from narrows.protocols.effects import Log, MemberEffect, StateArrived
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.keys import parts
from narrows.protocols.member.member import Session
from narrows.protocols.member.view import Coded, ShardView
from narrows.protocols.modes import Settings
from narrows.protocols.wire import pack, unpack

FloatArray = npt.NDArray[np.float32]
Seen = MemberEffect | Log
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
    ranges: tuple[tuple[int, int], ...]
    round: int = 0  # of gossip, the first here

    def packed(self) -> bytes:
        ranges = [list(keys) for keys in self.ranges]
        numbers = [self.worker, self.epoch, self.clock, self.at]
        return pack([self.settings.packed(), *numbers, list(self.ports), ranges, self.round])

    @staticmethod
    def unpacked(packed: bytes) -> Place:
        """Raises RemoteProtocolError where `packed` is none."""
        value: Any = unpack(packed)
        try:
            settings, worker, epoch, clock, at, ports, ranges, number = value
            keys = tuple((int(begin), int(end)) for begin, end in ranges)
            numbers = (int(worker), int(epoch), int(clock), int(at))
            return Place(Settings.unpacked(settings), *numbers, tuple(map(int, ports)), keys, int(number))
        except (TypeError, ValueError):
            raise RemoteProtocolError("a place in the run above is eight values") from None


class Uplink:
    """Keys [begin, end) of one shard, toward the shard above that has the same."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.place: Place | None = None
        self.session: Session | None = None
        self.view: ShardView[ErrorFeedback] | None = None
        self.clock = 0  # of the next update
        self.inner = 0  # clocks of the cluster since the last push
        self.samples = 0
        self.start: FloatArray | None = (
            None  # what the weights were at the last push, or the base that they were set to
        )
        self.due = False  # something was pushed or has come since the base was made
        self.ready = False  # the first state of this place is here
        self.wants_weights = False
        self.finishing = False  # the model of the run above was asked for, now that all is pushed
        self.master: FloatArray | None = None  # that model
        self.trouble = ""  # what ends this stream, and the cluster with it

    @property
    def at_rest(self) -> bool:
        """The server above has all that was pushed."""
        return self.session is None or all(record.held for record in self.session.pushes.values())

    @property
    def ended(self) -> bool:
        """The last round is done, and other clusters are only answered until all have done theirs (gossip)."""
        return False

    def adopt(
        self, place: Place, keys: tuple[int, int], session: Session, renewed: bool, now_ns: int
    ) -> list[MemberEffect]:
        """Begin, or begin anew after a rejoin: what was in flight is given up, the residual is not. `renewed`: no worker here
        has a state of before."""
        if len(place.ranges) <= self.index or place.ranges[self.index] != keys:
            raise RemoteProtocolError(f"the server above cuts the model elsewhere than at {keys}")
        feedback = self.view.turn(0)[1] if self.view is not None else None
        if feedback is None:
            # The link up is not measured yet: under `auto` the sparsest rung, which is what a worker begins with too.
            spec = ladder(place.settings.compress)[-1].spec
            feedback = ErrorFeedback(parse(spec), keys[1] - keys[0], seed=place.worker << 16 | self.index)
        pulled = np.zeros(keys[1] - keys[0], np.float32)
        self.view = ShardView(*keys, [feedback], place.settings.mode(), pulled, narrows.compression)
        self.place, self.session, self.clock = place, session, place.clock
        self.inner = self.samples = 0
        self.due = self.ready = self.wants_weights = self.finishing = False
        self.master = None
        return self._take_up(renewed, now_ns)

    def _take_up(self, renewed: bool, now_ns: int) -> list[MemberEffect]:
        return self._pull(now_ns)

    def _pull(self, now_ns: int, ahead: int = 0, master: bool = False, follow: bool = False) -> list[MemberEffect]:
        assert self.session is not None
        return self.session.pull(self.clock + ahead, master, now_ns, follow=follow)

    def tick(self, now_ns: int, repeats: bool) -> list[Seen]:
        """What the shard above does not answer, once more, where nobody else `repeats` it."""
        return [*self.session.repeat(now_ns)] if self.session is not None and repeats else []

    # Other clusters: only those that gossip hear of each other.

    def introduce(self, roster: bytes, alone: bool, now_ns: int) -> list[Seen]:
        return []

    @property
    def addresses(self) -> set[str]:
        """Where they are reached."""
        return set()

    def hear(self, message: m.Message, now_ns: int) -> list[Seen]:
        raise RemoteProtocolError(f"a shard takes no {type(message).__name__} here: its cluster does not gossip")

    # Own updates.

    def give_weights(self, weights: FloatArray, now_ns: int) -> list[MemberEffect]:
        """The run above has no weights yet and these are to be the first."""
        assert self.session is not None and self.view is not None and self.place is not None
        self.wants_weights = False
        begin = self.view.begin
        cuts = list(parts(begin, self.view.end))
        raw = weights.copy().view(np.uint8).data
        messages = [
            m.FirstWeights(self.place.worker, self.place.epoch, i, len(cuts), b, e, m.RAW_FLOAT32,
                           raw[4 * (b - begin) : 4 * (e - begin)])
            for i, (b, e) in enumerate(cuts)
        ]  # fmt: skip
        return [*self.session.send(messages), *self._pull(now_ns)]

    def stepped(self, samples: int) -> None:
        """A clock of the cluster is complete."""
        self.inner += 1
        self.samples += samples
        self.moved()

    def moved(self) -> None:
        """The weights are on their way again: the last model was none."""
        self.master, self.finishing = None, False

    @property
    def owes(self) -> bool:
        """The mode above wants an update now."""
        return self.view is not None and self.inner >= self.view.mode.local_steps

    @property
    def has_room(self) -> bool:
        return self.ready and self.view is not None and len(self.view.in_flight) < self.view.mode.window

    def make_room(self, now_ns: int) -> list[Seen]:
        """What comes before an update that is owed."""
        return []

    def push(self, weights: FloatArray, now_ns: int) -> list[Seen]:
        """Push what the weights have moved by; there is room."""
        assert self.start is not None
        return [*self._push(weights, weights - self.start, now_ns)]

    def _push(self, weights: FloatArray, update: FloatArray, now_ns: int, dense: bool = False) -> list[MemberEffect]:
        view, session, place, start = self.view, self.session, self.place, self.start
        assert view is not None and session is not None and place is not None and start is not None
        feedback = view.turn(self.clock)[1]
        coded: list[Coded] = []
        if not update.any() and (feedback.residual is None or not feedback.residual.any()):
            coded = [(m.CODED, view.begin, view.end, NOTHING.encode(update))]
        elif not dense and feedback.compressor.spec != "dense":
            try:
                feedback.memory.step = self.clock
                coded = [(m.CODED, view.begin, view.end, feedback.encode(update))]
            except NonFiniteError:
                pass  # sent as it is: the server above names it, or whoever trains there sees it
        if not coded:
            if feedback.residual is not None:
                update = update + feedback.residual
            feedback.load_state_dict({})
            raw = update.view(np.uint8).data
            coded = [
                (m.RAW_FLOAT32, begin, end, raw[4 * (begin - view.begin) : 4 * (end - view.begin)])
                for begin, end in parts(view.begin, view.end)
            ]
        samples = min(max(1, self.samples), m.CLOCK_MAX)
        messages = [
            m.Push(place.worker, place.epoch, self.clock, part, len(coded), begin, end, samples, b"", codec, payload)
            for part, (codec, begin, end, payload) in enumerate(coded)
        ]
        view.own[self.clock] = coded
        view.in_flight.add(self.clock)
        np.copyto(start, weights)
        self.clock += 1
        self.inner = self.samples = 0
        self.due = True
        effects = session.push(messages, now_ns)
        pulls = place.settings.pulls
        if len(session.pulls) < pulls:
            effects += self._pull(now_ns, view.mode.ahead(self.clock, view.settled, pulls), follow=True)
        return effects

    def base(self) -> FloatArray | None:
        """What the weights are to be based on from now on, where that is new and may be computed on; else None."""
        view = self.view
        if view is None or not self.due or not self.may_go:
            return None
        base = np.empty(view.end - view.begin, np.float32)
        view.compose(self.clock, view.begin, view.end, base)
        self.due = False
        return base

    @property
    def may_go(self) -> bool:
        """Whether the next clock may be computed on what is here."""
        view = self.view
        return view is not None and view.settled >= 0 and view.mode.allows(self.clock, view.settled)

    def arrived(self, event: StateArrived, now_ns: int) -> list[MemberEffect]:
        """Take over a state from above. Raises RemoteProtocolError; then nothing has changed."""
        view, session = self.view, self.session
        assert view is not None and session is not None
        view.arrived(event)
        if not event.master:
            self.due = True
        elif self.finishing and event.clock == self.clock:
            self.master, self.finishing = view.master, False
        view.master = None
        return self._pull(now_ns) if not self.may_go and not session.pulls else []

    def settled(self, clock: int) -> None:
        if self.view is not None:
            self.view.in_flight.discard(clock)

    # The end.

    def finish(self, weights: FloatArray, now_ns: int) -> list[Seen]:
        """Push all that is left, dense, and ask for the model of the run once all clusters have come as far; there is room.

        Nothing too is an update: every cluster's last clock is one after its steps, or one would not wait for another.
        """
        assert self.start is not None
        self.finishing, self.master = True, None
        pushed = self._push(weights, weights - self.start, now_ns, dense=True)
        return [*pushed, *self._pull(now_ns, master=True)]
