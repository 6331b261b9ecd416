"""The engine of a gossip run: local steps, and between two of them the exchanges with peers. The main thread owns it.

Rules
- The server gives the first weights and introduces the peers. From then on it is not needed, but for who joins later.
- After the steps of round t the model is offered to the partners of t, and the next steps begin at once; all mixes up to
  round t - s are in by then (s = 0: D_FP_S of BAGUA 2107.01499 as it is written; s = 1: the link's time lies under the next
  forward and backward).
- Mixes are applied between two steps only, in the order of rounds and ids: two runs are the same, bit for bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import narrows.compression
from narrows.compression import Memory, NonFiniteError, parse
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import MemberEffect
from narrows.protocols.errors import NarrowsError, RemoteProtocolError, UsageError
from narrows.protocols.gossip.exchanges import LAST, Gossip
from narrows.protocols.gossip.mixing import Mixing
from narrows.protocols.gossip.peers import Peers
from narrows.protocols.member.view import Coded
from narrows.protocols.modes import Settings
from narrows.worker.engine import START_LIMIT_S, WAIT_LIMIT_S, Engine, clipped_step
from narrows.worker.flat import FloatArray
from narrows.worker.runner import Link

HAND_OVER_LIMIT_S = 60.0  # the last model is on the server within this, where there is one


class GossipEngine(Engine):
    """One worker's part of a run without a server on the data path."""

    def __init__(
        self,
        link: Link,
        settings: Settings,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        max_grad_norm: float,
        overlap: int = 0,
    ) -> None:
        """Raises UsageError where gradients are to leave early: under gossip none leave."""
        if overlap:
            raise UsageError("overlap=True: under --sync gossip no gradient leaves a worker; leave it out")
        self.mixing = Mixing(0, 0, None, narrows.compression, Memory)
        self.gossip = Gossip(settings.topology, -1, self.mixing)
        self.adopted = self.server_gone = self.settled = False
        self.without: set[int] = set()  # peers that have no model either
        self.ended = False  # the last step is done
        self.base = 0  # the clock that the server knows us by
        super().__init__(link, settings, model, inner, max_grad_norm)
        self._wait(lambda: self.gossip.started, START_LIMIT_S, "the other workers")

    # Events.

    def _handle(self, event: MemberEffect) -> None:
        if isinstance(event, e.RosterNews):
            self.gossip.admit(event.roster)
        elif isinstance(event, e.OfferArrived):
            if event.parts[0].number < 0:
                self._adopt(event)
            else:
                self.gossip.arrived(event)
        elif isinstance(event, e.AdoptAsked):
            if self.adopted:
                self._offer(self.gossip.whole(event.peer, self.clock))
            else:
                self.without.add(event.peer)  # it asks again, and is not asked
        elif isinstance(event, e.PeerEnded):
            self.gossip.peer_ended(event.peer)
        elif isinstance(event, e.PeerLost):
            self._tell(f"worker {event.peer} is no longer mixed with: {event.why}")
            self.gossip.lose(event.peer)
        elif isinstance(event, e.ServerGone):
            self._tell("the server is gone; the workers go on among themselves")
            self.server_gone = self.gossip.alone = True
        elif isinstance(event, e.PeersSettled):
            self.settled = True
        else:
            super()._handle(event)
        while self.gossip.refused:
            self._lose(*self.gossip.refused.pop())

    def _lose(self, peer: int, why: str) -> None:
        self._tell(f"worker {peer} is no longer mixed with: {why}")
        self._tell_peers(lambda peers, now: peers.lose(peer))

    def _tell_peers(self, command: Callable[[Peers, int], list[MemberEffect]]) -> None:
        self.link.call(lambda member, now: command(member.peers, now) if member.peers is not None else [])

    def _tell(self, text: str) -> None:
        print(f"ps-worker: {text}", file=sys.stderr)

    def _start(self, event: e.Started) -> None:
        """Our place in the run, or another one: then all pairs begin anew, and the model stays."""
        lossless = self.settings.compress == "dense"
        compressor = None if lossless else parse(self.settings.compress).contraction()
        begin, end = 0, self.flat.size
        mixing = Mixing(begin, end, compressor, narrows.compression, lambda: Memory(seed=event.worker))
        if event.again:
            mixing.start(self.mixing.model)
        self.gossip, self.mixing = Gossip(self.settings.topology, event.worker, mixing), mixing
        self.base = event.clock
        self.without.clear()
        at = self.clock
        super()._start(event)
        self.clock = at

    def _pull(self, shard: int, clock: int, master: bool = False, follow: bool = False) -> None:
        """Only the first weights are the server's to give."""
        if self.base == 0:
            super()._pull(shard, 0, master)

    def _wait_ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Until this worker has the model that it begins with, and what it shares with its peers."""
        while self.composed != self.epoch:
            epoch = self.epoch
            if self.base == 0:
                self._wait_or_rejoin(
                    lambda: all(view.min_clock >= 0 for view in self.views), limit_s, "the first weights"
                )
                if self.epoch == epoch:
                    self.mixing.first = self.pulled.copy()
                    if not self.adopted:
                        self.mixing.start(self.pulled)
            elif not self.adopted:
                self._ask_for_model(limit_s)
            if self.epoch == epoch:
                self.adopted, self.composed = True, epoch

    def _ask_for_model(self, limit_s: float) -> None:
        """Take over the model of the one that is here longest, or where it dies, of the next; or return after a rejoin."""
        epoch = self.epoch
        self._wait_or_rejoin(lambda: self.gossip.started, limit_s, "the others")
        while not self.adopted and self.epoch == epoch:
            # Whoever has it may be about to join again; three leases are a death and a return.
            self._wait_or_rejoin(
                lambda: self.adopted or bool(self.gossip.pairs.keys() - self.without),
                3 * self.settings.lease,
                "a worker that has the model: the run has begun, and none is left; start it again",
            )
            if not self.adopted and self.epoch == epoch:
                self._ask_of(min(self.gossip.pairs.keys() - self.without), limit_s)

    def _ask_of(self, elder: int, limit_s: float) -> None:
        self._tell_peers(lambda peers, now: peers.adopt(elder, now))
        self._wait_or_rejoin(
            lambda: self.adopted or elder not in self.gossip.pairs or elder in self.without,
            limit_s,
            f"the model of worker {elder}",
        )

    def _wait_or_rejoin(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Until `done`, or this worker had to join again."""
        epoch = self.epoch
        self._wait(lambda: self.epoch != epoch or done(), limit_s, what)

    def _adopt(self, event: e.OfferArrived) -> None:
        if not self.adopted:
            try:
                self.mixing.take(event.parts)
            except RemoteProtocolError as error:
                self.gossip.lose(event.peer)
                self._lose(event.peer, str(error))
                return
            self.clock, self.adopted = event.parts[0].round, True

    def _compose(self) -> None:
        """The model, into the parameters."""
        np.copyto(self.replica, self.mixing.model)
        self.flat.write(self.replica)
        if self.start is not self.replica:
            self.flat.read(self.start)

    # Exchanges.

    def _offer(self, offers: list[m.Offer]) -> None:
        self._tell_peers(lambda peers, now: peers.offer(offers, now))

    def _mix(self, number: int, done: Callable[[], bool], what: str) -> None:
        """Exchange with peers, and mix rounds up to `number`, until `done`."""

        def exchanged() -> bool:
            self._resume()
            try:
                for offers in self.gossip.exchange(number):
                    self._offer(offers)
            except NonFiniteError as error:
                raise NarrowsError(
                    f"the model is not finite after clock {self.clock} ({error}); lower the learning rate or clip, "
                    f"--compress {self.settings.compress} can only send finite values"
                ) from None
            return done()

        self._wait(exchanged, WAIT_LIMIT_S, what)

    # Steps.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """After backward: one optimizer step of this worker, and at the end of a round the exchanges."""
        if self.finished:
            raise UsageError("step() after finish(): the run is over for this worker")
        self.poll()
        self._resume()
        loss = clipped_step(self.inner, self.flat.parameters, self.max_grad_norm, closure)
        self.local_step += 1
        if self.local_step >= self.mode.local_steps:
            self._round()
        return loss

    def _resume(self) -> bool:
        """After a rejoin: our steps stay, only the pairs are new."""
        if self.composed == self.epoch:
            return False
        while self.composed != self.epoch:
            self._wait_ready()
            self._wait_or_rejoin(lambda: self.gossip.started, START_LIMIT_S, "the other workers")
        if self.ended:
            self._end()
        return True

    def _end(self) -> None:
        """Say that the last step is done: from here on peers are only answered, until all have done theirs."""
        self.ended = True
        self.gossip.end()
        self.link.call(lambda member, now: member.end(now))

    def _absorb(self) -> None:
        """What the parameters have moved by is the model's. Raises NarrowsError where that is not finite: peers refuse it."""
        update = np.empty(self.flat.size, np.float32)
        self.flat.read(update)
        update -= self.start
        self.mixing.model = self.mixing.model + update
        if not np.isfinite(self.mixing.model).all():
            raise NarrowsError(f"the model is not finite after clock {self.clock}; lower the learning rate or clip")

    def _round(self) -> None:
        before, number = time.monotonic(), self.clock
        self._absorb()
        # Before it computes on, all up to `due` is mixed. With s >= 1 the offers of this round hold the mixes before it.
        behind = self.mode.bound if self.mode.bound is not None else 0
        due, waits = number - behind, self.gossip.waits
        if behind:
            self._mix(due, lambda: not self.gossip.waiting(due), "a peer's model")
        self.gossip.begin(number)
        self._mix(due, lambda: not waits or not self.gossip.waiting(due), "a peer's model")
        self.wait_s = time.monotonic() - before
        under_way = [at for at in self.gossip.needed if self.gossip.needed[at]]
        self.staleness = number + 1 - min(under_way, default=number + 1)
        self.clock += 1
        self.local_step = self.samples_pending = 0
        self._compose()

    # The shared model and the end.

    def show_shared(self) -> None:
        """Under gossip each worker has a model of its own: put it, as last mixed, into the parameters."""
        self.flat.write(self.final if self.final is not None else self.mixing.model)

    def finish(self) -> None:
        """Mix with whoever asks until all are done, then take the mean of all models, and leave."""
        if self.finished:
            return
        self.poll()
        self._resume()
        self._absorb()
        self._mix(self.clock, lambda: not self.gossip.waiting(self.clock), "a peer's model")
        self._end()
        self._mix(LAST, lambda: self.gossip.over, "the other workers to finish")
        self._compose()
        self.final = self.mixing.model
        self._tell_peers(lambda peers, now: peers.over())
        self._wait_or_rejoin(lambda: self.settled, WAIT_LIMIT_S, "the peers to have it")
        self._hand_over()
        self._send_buffers()
        self.finished = True
        self.leave(self.base + self.handed_over)

    handed_over = False

    def _hand_over(self) -> None:
        """The last model, to the server: by the one with the lowest id, for all."""
        if self.server_gone or any(peer < self.worker for peer in self.gossip.pairs):
            return
        at, epoch, self.clock = self.clock, self.epoch, self.base
        whole = self.mixing.whole()
        for shard, view in enumerate(self.views):
            cuts = [cut for cut in whole if view.begin < cut[2] and cut[1] < view.end]
            pieces = [self._within(view.begin, view.end, cut) for cut in cuts]
            for part, piece in enumerate(pieces):
                self._send_part(shard, part, len(pieces), piece)
        self.clock = at
        try:
            self._wait_or_rejoin(lambda: self.server_gone or not any(view.in_flight for view in self.views),
                                 HAND_OVER_LIMIT_S, "the server to take the last model")  # fmt: skip
            self.handed_over = not self.server_gone and self.epoch == epoch
        except NarrowsError as error:
            self._tell(f"{error}; it is here only")

    @staticmethod
    def _within(begin: int, end: int, cut: Coded) -> Coded:
        codec, first, last, raw = cut
        low, high = max(begin, first), min(end, last)
        return codec, low, high, memoryview(raw)[4 * (low - first) : 4 * (high - first)]

    def residual(self) -> FloatArray | None:
        """Nothing is kept back: what a compressor left out is in the model, and comes later."""
        return None

    def load_residual(self, whole: FloatArray) -> None:
        """Of another mode: here it has no place."""
