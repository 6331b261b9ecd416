"""Publishes the model of a shard to its children as numbered states: which state goes to which child, and when. No I/O.

How it works

    store:  p0 ──d1──> p1 ──d2──> p2 ──d3──> p3        a publication is the difference to the one before it
    child:  Follow have 1, credit 16   <── State 2, State 3, ...   until 16 are not acknowledged
    child:  Follow have 3, credit 16   <── State 4, ...

1. `make` publishes the store's state when a clock is folded. The store keeps the last differences, coded once for all
   children.
2. A child says which publication it has and how many more it takes (`Follow`). The shard sends it each later difference
   when the difference is made.
3. A child that lacks a difference which is no longer kept gets only the newest state, whole, as soon as the staleness
   bound lets the child compute its clock on that state.
4. `have` in a Follow acknowledges all publications up to that number. The same Follow again asks for what has not
   arrived; the shard repeats those publications, but not before the link had time for their bytes (`RetryTimer`).
5. A `Pull` asks for the master copy x in place of the published p. The pull of a worker that has done its last step
   (`last`) is answered once all workers have done theirs, so that all workers end with one model. A child that has the
   newest publication gets x - p (`Store.beyond`), any other all values.

Rules
- `settled` of a state is its min_clock: the state has the updates of all members below that clock. With --quorum a clock
  closes without late members. For a child whose own updates came late `settled` is lower: the state has all of its own
  updates below `settled`. Without a barrier the state also lists the weight of each later update of the child that it
  contains (`contains`).
- One residual serves all children, so one SPEC codes the downlink: the one that the slowest child asks for.
- A new child follows no publication until its first Follow.
- At a barrier whose downlink has one SPEC, a lossless one, p is x itself (`Store.shared`). There the shard sends no
  publication from a fold to the publication of its clock, which in a cluster waits for the parent: it would have newer
  values than its number says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from narrows.compression import codecs
from narrows.compression.payload import no_values
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import Keys, parts
from narrows.protocols.config.modes import Mode
from narrows.protocols.config.retry import LONG_AGO_NS, RetryTimer
from narrows.protocols.config.timing import Timing
from narrows.protocols.effects import Log, Send
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.shard.folding import Folding
from narrows.ps.shard.push_assembler import PushAssembler, PushSequence
from narrows.ps.store.changes import FloatArray, Publish
from narrows.ps.store.store import Store
from narrows.ps.store.update_gain import PLAIN, MergeFactors


@dataclass(slots=True)
class SentPublication:
    """A publication that was sent to a child and is not yet acknowledged."""

    bytes: int
    first_ns: int  # when it was sent first
    sent_ns: int  # when it was sent last


@dataclass(slots=True)
class PublicationChild:
    """One child: its newest Follow, and the publications that the shard has sent it."""

    follow: m.Follow
    patience: RetryTimer
    sent: dict[int, SentPublication] = field(default_factory=dict)  # publications sent and not yet acknowledged
    again: dict[int, SentPublication] = field(default_factory=dict)  # publications to send once more
    # requests for rows that are not yet answered, by request number
    asks: dict[int, m.RowsRequest] = field(default_factory=dict)
    pull: m.Pull | None = None  # request for the master copy that is not yet answered
    request: int = 0  # number of the newest Pull
    doubt: bool = False  # True if what was sent may be lost: the next Follow counts as a repeated one
    peer: bytes = b""  # routing id of its newest Follow
    asked: bool = False  # True if the shard has asked this child for the first weights since its newest Follow

    @property
    def newest(self) -> int:
        """Number of the newest publication that the child has or was sent."""
        return max(self.sent, default=self.follow.have)

    def ask_weights(self) -> None:
        """Note that the shard asks this child for the first weights."""
        self.asked = True

    def repeat_soon(self) -> None:
        """Treat all that was sent to this child as lost: its next Follow makes the shard send it again."""
        self.doubt = True
        for sent in self.sent.values():
            sent.sent_ns = LONG_AGO_NS

    def said(self, follow: m.Follow, now_ns: int) -> None:
        """Take the newest Follow of this child. The same Follow again asks for what has not arrived."""
        if follow.lost:
            self.repeat_soon()
            follow = replace(follow, lost=False)
        again, self.follow, self.doubt = self.doubt or follow == self.follow, follow, False
        for number in [number for number in self.sent if number <= follow.have]:
            sent = self.sent.pop(number)
            if sent.sent_ns > sent.first_ns:
                self.patience.answered(sent.first_ns, now_ns, sent.bytes)
        if again and self.sent:
            size, oldest_ns = sum(sent.bytes for sent in self.sent.values()), min(s.sent_ns for s in self.sent.values())
            if self.patience.due(oldest_ns, now_ns, size):
                self.again, self.sent = self.sent, {}


@dataclass(frozen=True, slots=True)
class PublicationRecord:
    """What the shard keeps of one publication.

    Attributes:
        min_clock: The min clock of the published state.
        late: worker -> settled clock, of workers whose updates below min_clock are not all in this state (barrier).
        merging: How a child merges its own updates into this state.
        steps: The run's steps before min_clock, as in `State`.
    """

    min_clock: int
    late: dict[int, int]
    merging: MergeFactors = PLAIN
    steps: int = 0


@dataclass(frozen=True, slots=True)
class StateHeader:
    """The fields that all parts of one state share; each has the meaning that it has in `State`."""

    request: int
    whole: bool
    add: bool
    publication: int
    min_clock: int
    settled: int
    contains: m.Weights
    merging: MergeFactors = PLAIN
    steps: int = 0


class Publications:
    """The publications of one store and the children that follow them."""

    def __init__(
        self,
        index: int,
        mode: Mode,
        store: Store,
        assembler: PushAssembler,
        folding: Folding,
        codings: Sequence[str],
        timing: Timing,
    ) -> None:
        """No publications and no children.

        Args:
            index: The number of the shard.
            mode: The mode of the run.
            store: The store whose state is published.
            assembler: The assembler, which knows the members.
            folding: The folding, which knows the updates that each publication contains.
            codings: The SPECs that the downlink may be coded with, densest first.
            timing: The limits of every wait.
        """
        self.index, self.mode, self.store, self.assembler, self.folding = index, mode, store, assembler, folding
        self.codings, self.timing = codings, timing
        self.children: dict[tuple[int, int], PublicationChild] = {}  # by (worker, epoch)
        self.lasts: set[int] = set()  # workers that wait for the last model
        # by number: the newest publication and up to CREDIT_MAX before it
        self.made: dict[int, PublicationRecord] = {}
        self.founder = (-1, -1)  # worker and epoch of the child whose own weights the store's first publication is

    def begin(self, min_clock: int, steps: int = 0) -> None:
        """Begin anew at this clock, with the store's first publication, that of a checkpoint, or none yet."""
        self.founder = (-1, -1)
        record = PublicationRecord(min_clock, self._late(min_clock), self._merging(), steps)
        self.made = {self.store.publication: record}

    def members(self) -> None:
        """Forget the children that are no member any more."""
        live = {(seat.worker, seat.epoch) for seat in self.assembler.seats.values()}
        self.children = {who: child for who, child in self.children.items() if who in live}
        self.lasts &= {worker for (worker, _), child in self.children.items() if child.pull is not None}

    def make(self, keys: Keys | None, min_clock: int, steps: int = 0) -> list[Log]:
        """Publish the state of `min_clock`.

        Args:
            keys: The range [begin, end) that has changed since the publication before; None if any key may have.
            min_clock: The min clock of the state.
            steps: The run's steps before it, as in `State`.

        Returns:
            A log line if the coding of the downlink changes.
        """
        before, worker, after = self._asked_for()
        self.store.apply(Publish(keys, after if after != before else ""))
        self.made[self.store.publication] = PublicationRecord(min_clock, self._late(min_clock), self._merging(), steps)
        for number in [number for number in self.made if number < self.store.publication - m.CREDIT_MAX]:
            del self.made[number]
        if after == before:
            return []
        where = {"shard": self.index, "clock": min_clock, "from": before, "to": after}
        text = f"shard {self.index} codes states with {after}, not {before}: worker {worker} asks for it"
        return [Log("compress", where | {"text": text})]

    def _late(self, min_clock: int) -> dict[int, int]:
        """`PublicationRecord.late` of a state of this clock."""
        seats = self.assembler.seats.items() if self.mode.barrier else ()
        return {worker: seat.settled for worker, seat in seats if seat.settled < min_clock}

    def _merging(self) -> MergeFactors:
        return self.store.gain.merging(len(self.assembler.seats))

    def _asked_for(self) -> tuple[str, int, str]:
        """Return the present coding, the worker whose wish decides, and the coding for the next publication.

        All children share one residual, so one coding serves all: the sparsest that a child asks for, which is the wish
        of the child with the slowest link. A child that has not measured its link yet is content with the present
        coding.
        """
        before = self.store.down.spec
        asked = [
            (self.codings.index(child.follow.coding), worker)
            for (worker, _), child in self.children.items()
            if child.follow.coding
        ]
        undecided = len(asked) < len(self.assembler.seats)
        rung, worker = max([*asked, *([(self.codings.index(before), -1)] if undecided else [])], default=(-1, -1))
        return before, worker, self.codings[rung] if rung >= 0 else before

    # Messages of children.

    def child(self, seat: PushSequence) -> PublicationChild:
        """Return the entry of this member. A new entry follows no publication until the first Follow."""
        who = (seat.worker, seat.epoch)
        if who not in self.children:
            self.children[who] = PublicationChild(m.Follow(*who, -1, -1, 0), RetryTimer(self.timing.request))
        return self.children[who]

    def check(self, seat: PushSequence, follow: m.Follow) -> None:
        """Raise RemoteProtocolError if the numbers of a Follow cannot be right."""
        if follow.coding and follow.coding not in self.codings:
            raise RemoteProtocolError(
                f"worker {seat.worker} asks for states coded with {follow.coding[:60]!r}; --compress-down is "
                f"{', '.join(self.codings)}"
            )
        if not 0 < follow.credit <= m.CREDIT_MAX or follow.have > self.store.publication or follow.clock < 0:
            raise RemoteProtocolError(
                f"worker {seat.worker} has publication {follow.have} and takes {follow.credit} more: none has come so far"
            )

    def follow(self, seat: PushSequence, follow: m.Follow, now_ns: int) -> None:
        """Take a Follow that `check` has passed."""
        child = self.child(seat)
        # another process has the seat now, without what the earlier one was sent
        if child.peer not in (b"", seat.peer):
            child.repeat_soon()
        child.peer, child.asked = seat.peer, False
        # else a newer Follow has overtaken this one
        if follow.clock >= child.follow.clock and follow.have >= child.follow.have:
            child.said(follow, now_ns)

    def founded(self, seat: PushSequence) -> None:
        """Note that this child has given all first weights: it need not get them back."""
        self.founder = seat.worker, seat.epoch

    def pull(self, seat: PushSequence, pull: m.Pull) -> None:
        """Take a Pull of the master copy, unless a newer one has arrived before."""
        child = self.child(seat)
        if pull.request > child.request:
            child.pull, child.request = pull, pull.request
            (self.lasts.add if pull.last else self.lasts.discard)(seat.worker)

    def repeat_soon(self) -> None:
        """Treat publications on their way as lost: each child gets its own again after its next Follow."""
        for child in self.children.values():
            child.repeat_soon()

    def unreached(self, peer: bytes) -> None:
        """Treat what was sent to this peer as lost: no connection has its name."""
        for seat in self.assembler.seats.values():
            if seat.name == m.name_of(peer):
                self.child(seat).repeat_soon()

    # Messages to children.

    def serve(self, seat: PushSequence, now_ns: int) -> list[Send]:
        """Return all publications that this child may be sent now."""
        child, effects = self.child(seat), list[Send]()
        if not child.follow.credit or self.store.publication < 0 or self.store.unpublished:
            return effects
        for number, keys, payload in self.store.since(child.newest) or self._whole(seat, child):
            if child.newest - child.follow.have >= child.follow.credit:
                break
            states = self._publication(seat, number, keys, payload, now_ns)
            size = sum(len(state.payload) for state in states)
            child.sent[number] = SentPublication(
                size, child.again.pop(number, SentPublication(0, now_ns, 0)).first_ns, now_ns
            )
            effects += [Send(seat.peer, state) for state in states]
        return effects

    def _whole(self, seat: PushSequence, child: PublicationChild) -> list[tuple[int, Keys | None, bytes | None]]:
        """Return the newest state as the only publication to send, if the child needs it and may compute on it.

        The child that gave the first weights gets a difference without values to them.
        """
        number, follow = self.store.publication, child.follow
        if child.sent or number <= follow.have or not self.mode.allows(follow.clock, self._settled(seat, number)):
            return []
        if number == 0 and follow.have < 0 and self.founder == (seat.worker, seat.epoch):
            return [(number, self.store.whole, no_values(self.store.size))]
        return [(number, None, None)]

    def _settled(self, seat: PushSequence, number: int) -> int:
        """Return the clock below which publication `number` has all updates of this member."""
        made = self.made[number]
        return made.late.get(seat.worker, made.min_clock)

    def _publication(
        self, seat: PushSequence, number: int, keys: Keys | None, payload: bytes | None, now_ns: int
    ) -> list[m.State]:
        """Return the parts of one publication for this child.

        Args:
            seat: The child.
            number: The number of the publication.
            keys: The range that the publication changed; None to send the whole state.
            payload: The coded difference; None to send the values of these keys in p.
            now_ns: The time now.
        """
        store, settled = self.store, self._settled(seat, number)
        begin, end = keys or store.whole
        if payload is not None:
            pieces = [codecs.coded_piece(payload, begin, end)]
        else:
            pieces = codecs.raw_pieces(store.p[begin - store.begin : end - store.begin], begin, parts(begin, end))
        contains = self.folding.contains(seat, settled, number)
        made = self.made[number]
        whole = (0, keys is None, payload is not None, number)
        header = StateHeader(*whole, made.min_clock, settled, contains, made.merging, made.steps)
        return _states(seat, pieces, header, now_ns)

    def follows(self, seat: PushSequence) -> bool:
        """True if this child has the newest publication, or was sent all that it lacks, and takes a difference to it."""
        child = self.child(seat)
        return child.newest == self.store.publication and child.pull is not None and not child.pull.whole

    def catches_up(self, seat: PushSequence) -> bool:
        """True if this child will get the newest publication, and takes a difference to it."""
        child = self.child(seat)
        coming = child.follow.credit > 0 and bool(self.store.since(child.newest))
        return coming and child.pull is not None and not child.pull.whole

    def master(
        self, seat: PushSequence, array: FloatArray, beyond: Sequence[bytes] | None, min_clock: int, now_ns: int
    ) -> list[Send]:
        """Answer this child's Pull.

        Args:
            seat: The child.
            array: The values, float32[size]; they are sent if `beyond` is None.
            beyond: For each part of the keys, the coded difference to the newest publication.
            min_clock: The min clock of the values.
            now_ns: The time now.
        """
        child, cuts = self.child(seat), list(parts(*self.store.whole))
        if beyond is None:
            pieces = codecs.raw_pieces(array, self.store.begin, cuts)
        else:
            pieces = [codecs.coded_piece(payload, *keys) for payload, keys in zip(beyond, cuts, strict=True)]
        settled = seat.settled if self.mode.barrier else min_clock
        whole = beyond is None
        header = StateHeader(child.request, whole, not whole, self.store.publication, min_clock, settled, ())
        child.pull = None
        self.lasts.discard(seat.worker)
        return [Send(seat.peer, state) for state in _states(seat, pieces, header, now_ns)]


def _states(seat: PushSequence, pieces: Sequence[codecs.Piece], header: StateHeader, now_ns: int) -> list[m.State]:
    return [
        m.State(
            worker=seat.worker,
            epoch=seat.epoch,
            request=header.request,
            part=part,
            parts=len(pieces),
            begin=piece.begin,
            end=piece.end,
            whole=header.whole,
            add=header.add,
            publication=header.publication,
            min_clock=header.min_clock,
            settled=header.settled,
            contains=header.contains,
            gain=header.merging.gain,
            ahead=header.merging.ahead,
            agreement=header.merging.agreement,
            steps=header.steps,
            sent_ns=now_ns,
            codec=piece.codec,
            payload=piece.payload,
        )
        for part, piece in enumerate(pieces)
    ]
