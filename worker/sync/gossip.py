"""The step of a worker of a gossip run: local steps, and after each round of them exchanges with peers.

The main thread owns it.

How it works

    main thread   GossipStep ── step, finish ──> GossipDriver        decides: phases, rounds, mixes
                       │  <── messages to send ──    ▲
                       ▼                             │ events
    I/O thread    GossipPeers ── sends to peers, receives from peers ──> events

1. `ready` waits for a model to begin with (from the server, or in a run under way from a peer) and for the first peers.
2. `step` takes a local step. After `Mode.local_steps` of them `_round` gives the driver what the parameters have moved
   by, waits until the driver lets the next steps begin, and writes the mixed model to the parameters.
3. `flush` mixes with peers until all workers are done. Then each has the mean of all models, and the worker with the
   lowest id gives it to the server.
4. A worker that is stopped earlier gives its own model to the server, if the server has none yet.

Rules
- The server gives the first weights and introduces the peers. After that only workers that join later need it.
- `GossipDriver` (protocols/gossip/driver.py) decides. `GossipPeers`, on the I/O thread, sends what the driver returns.
- After a rejoin this worker's steps stay in its model; only the pairs begin anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from narrows.compression import Memory
from narrows.compression.codecs import raw_pieces
from narrows.compression.home import HOST
from narrows.compression.sampling import gossip_sample
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import CodedPiece, parts
from narrows.protocols.config.timing import START_LIMIT_S, WAIT_LIMIT_S
from narrows.protocols.effects import NS, Log, MemberEffect, PeerSay
from narrows.protocols.errors import NarrowsError
from narrows.protocols.gossip.driver import GossipDriver, GossipPhase, Says
from narrows.protocols.gossip.gain import GossipGain
from narrows.protocols.gossip.mixing import Mixing
from narrows.protocols.gossip.outer_momentum import outer
from narrows.protocols.member.member import Member
from narrows.worker.checkpoint.gossip_checkpoints import GossipCheckpoints
from narrows.worker.model.arrays import SharedWeights, WorkerArrays
from narrows.worker.model.flat import Array, FloatArray
from narrows.worker.model.optimizer_scaling import degree_of
from narrows.worker.runtime.launcher_pipe import say_here
from narrows.worker.runtime.trace import StepTrace
from narrows.worker.sync.shard_exchanges import ShardExchanges
from narrows.worker.sync.sync_step import StepEngine

HAND_OVER_LIMIT_S = 60.0  # wait for the server to take the last model
STOPPED_LIMIT_S = 8.0  # the same for a worker that is stopped: ps-worker kills it after twice this time


class TracedMixing(Mixing):
    """Mixing whose parts of a step are spans."""

    def __init__(self, trace: StepTrace, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.trace = trace

    def absorb(self, *arguments: Any) -> None:
        with self.trace.fold:
            super().absorb(*arguments)

    def offer(self, *arguments: Any) -> tuple[bool, Sequence[CodedPiece]]:
        with self.trace.encode:
            return super().offer(*arguments)

    def mix(self, *arguments: Any) -> None:
        with self.trace.fold:
            super().mix(*arguments)

    def average(self, *arguments: Any) -> None:
        with self.trace.fold:
            super().average(*arguments)


class GossipStep:
    """See `SyncStep`."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine, self.mode = engine, engine.mode
        self.arrays = WorkerArrays(engine.flat, shared=False, direct=False, rounds=0, home=engine.home)
        self.shards = ShardExchanges(engine.link, engine.mode, self.arrays, engine.tuning, engine.waiting.until)
        self.gain, self.outer = self._gain(), outer(engine.settings)
        self.driver = self._driver(-1, 0)
        self.local_step = 0
        self.taken = 0  # local steps of this round that were not skipped
        self.staleness = 0
        self.kept: Array | None = None  # this worker's model, while it receives the first weights again
        self.finishing = self.server_gone = False
        self.checkpoints: GossipCheckpoints | None = None  # this worker's files, once `plan` was called

    def _gain(self) -> GossipGain | None:
        """Make the gain for rounds of one step; None for rounds of several, which are averaged as under `local`."""
        if self.mode.local_steps > 1:
            return None
        return GossipGain(
            gossip_sample(self.engine.flat.size),
            degree_of(self.engine.inner),
            max(self.engine.settings.update_gain, 0.0),
        )

    def _driver(self, worker: int, round: int) -> GossipDriver:
        settings = self.engine.settings
        compressor = self.engine.tuning.codecs.up.mixer()
        size, home, trace = self.engine.flat.size, self.engine.home, self.engine.trace
        memory = lambda: Memory(seed=worker)  # noqa: E731
        mixing = TracedMixing(trace, 0, size, compressor, home, memory, self.gain, self.outer)
        lease_ns = int(settings.lease * NS)
        return GossipDriver(settings.topology, worker, self.mode.bound or 0, lease_ns, mixing, round)

    @property
    def clock(self) -> int:
        """The round that this worker computes."""
        return self.driver.round

    @property
    def final_clock(self) -> int:
        return self.shards.clock

    @property
    def buffers_clock(self) -> int:
        """1 once all workers have done their last step, else 0.

        No server counts steps under gossip, and only one worker gives the model to the server.
        """
        return int(self.driver.phase is GossipPhase.OVER)

    @property
    def merging(self) -> dict[str, float]:
        if self.gain is None or not self.gain.agreement:
            return {}
        return {"gain": round(self.gain.factor, 4), "agreement": round(self.gain.agreement, 4)}

    def weigh(self, samples: int) -> None:
        """Do nothing: a mix has no weights by samples."""

    def take_late(self) -> int:
        """Return 0: no round closes without this worker."""
        return 0

    # Events.

    def begin(self, event: e.MemberStarted) -> None:
        """Take a place in the run. After a rejoin all pairs begin anew, and the model stays."""
        before, self.driver = self.driver, self._driver(event.worker, self.driver.round)
        self.shards.begin(event, follow=event.clock == 0)
        kept = (
            before.mixing.copied(before.mixing.model) if before.has_model else None
        )  # a push may still read the model
        if event.clock == 0:
            self.kept = kept
        elif kept is not None:
            self.driver.keep(kept)
        else:
            self._carry_out(self.driver.late(self._now()))

    def _now(self) -> int:
        return self.engine.link.clock.now()

    def handle(self, event: MemberEffect) -> None:
        if isinstance(event, e.ServerGone):
            self.server_gone = True
            self._tell("the server is lost; the workers go on without it")
        if isinstance(event, e.ServerStops) and self._going():
            self._push(self._with_steps(), m.HandOver.STOPPED)
        if isinstance(event, e.GiveWeights) and event.round >= 0:
            self._give_weights(event)
        elif not (
            self.driver.has_model and isinstance(event, (e.StatePart, e.StateArrived))
        ):  # pulled is Mixing's then
            self.shards.handle(event)
        here = all(exchange.settled >= 0 for exchange in self.shards.exchanges)
        if isinstance(event, e.StateArrived) and self.driver.phase is GossipPhase.EMPTY and here:
            self.driver.begin_as_founder(self.arrays.pulled, self.kept)
            self.kept = None
        self._carry_out(self.driver.hear(event, self._now()))

    def _tell(self, text: str) -> None:
        say_here(text)

    def _carry_out(self, says: Says) -> None:
        for say in says:
            if isinstance(say, Log):
                self._tell(f"worker {say.values['peer']} is no longer mixed with: {say.values['why']}")
            elif isinstance(say, e.AnnounceEnd):
                self.engine.link.call(lambda member, now: member.end(now))
            else:
                self.engine.link.call(partial(_to_peers, say))

    def _wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Wait until `done()`, and tick the driver meanwhile.

        Raises NarrowsError after `limit_s` seconds, or if the driver has a fault.
        """

        def now() -> bool:
            self._carry_out(self.driver.go_on(self._now()))
            if self.finishing and self.driver.may_step:  # after a rejoin
                self._carry_out(self.driver.finish(self.engine.home.zeros(self.engine.flat.size), self._now()))
            if self.driver.trouble:
                raise NarrowsError(f"rank {self.engine.skips.rank}: {self.driver.trouble}")
            return done()

        self.engine.waiting.until(now, limit_s, what)

    # Steps.

    def ready(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait for the model that this worker begins with, and for the other workers."""
        self._wait(lambda: self.driver.has_model, limit_s, "a model to begin with")
        self._wait(lambda: self.driver.phase is not GossipPhase.READY, START_LIMIT_S, "the other workers")
        self._compose()
        if self.checkpoints is not None:
            self.checkpoints.begin(self.driver.round)

    # Checkpoints.

    def plan(self, packed: bytes) -> None:
        """Look for models of an earlier run in this worker's files, and offer their rounds to the server.

        Args:
            packed: the packed `ModelSpec` of this worker; only files of the same model count.
        """
        member = getattr(self.engine.link, "member", None)
        if member is not None and member.welcome is not None:
            self.checkpoints = GossipCheckpoints(
                self.engine.settings, self.engine.config.checkpoint_dir, member.welcome.rank, packed
            )
            member.offer(self.checkpoints.models())

    def _give_weights(self, event: e.GiveWeights) -> None:
        """Send a shard its keys of the model that this worker has in a file, of a round of the earlier run or a newer one."""
        model = self.checkpoints.reached(event.rank, event.round) if self.checkpoints is not None else None
        if model is None:
            raise NarrowsError(f"the model of round {event.round} cannot be read any more: start this worker again")
        exchange = self.shards.exchanges[event.shard]
        begin, end = exchange.replica.begin, exchange.replica.end
        pieces = raw_pieces(model[begin:end].copy(), begin, parts(begin, end))
        self.engine.link.send(event.shard, exchange.give(pieces, only=False))

    def _keep(self, last: bool = False) -> None:
        """Write the model to a file if a checkpoint is due after this round, or if this worker ends (`last`)."""
        checkpoints = self.checkpoints
        if checkpoints is not None and (last or checkpoints.due(self.driver.round)):
            home, model = self.engine.home, self._with_steps()
            checkpoints.write(self.driver.round, model if home is HOST else home.host(model))
        if checkpoints is not None and last:
            checkpoints.end()

    def _compose(self) -> None:
        """Write the mixed model to the parameters."""
        with self.engine.trace.compose:
            self.engine.home.copy(self.driver.mixing.model, self.arrays.base)
            self.arrays.show(())

    def _moved(self) -> Array:
        """Return what the parameters have moved by since they were composed, float32[size]."""
        with self.engine.trace.difference:
            moved = self.engine.home.empty(self.engine.flat.size)
            self.engine.flat.read_keys(0, moved, self.arrays.start)
            return moved

    def _going(self) -> bool:
        return self.driver.has_model and self.driver.phase is not GossipPhase.READY

    def step(self, closure: Callable[[], Any] | None) -> Any:
        engine = self.engine
        self._wait(self._going, START_LIMIT_S, "the other workers")
        loss = engine.optimize(closure)
        self.local_step += 1
        self.taken += not engine.skips.newest
        if self.local_step >= self.mode.local_steps:
            self._round()
        return loss

    def _round(self) -> None:
        number = self.driver.round
        moves = self.taken or self.engine.flat.overwritten()  # or the script has written
        self._carry_out(self.driver.step(self._moved() if moves else None, self._now()))
        self._wait(lambda: self.driver.may_step, WAIT_LIMIT_S, "a peer's model")
        self.staleness = number + 1 - min(self.driver.exchanges.under_way, default=number + 1)
        self.local_step = self.taken = 0
        self._compose()
        self._keep()

    # The shared model and the end.

    @property
    def unmoved(self) -> bool:
        return False

    def shared(self) -> SharedWeights:
        """This worker's own model as last mixed: under gossip there is no other shared model."""
        return self.driver.mixing.model

    def flush(self, last: bool) -> SharedWeights:
        """Mix with each peer that asks until all workers are done, and return the mean of all models.

        Args:
            last: False returns this worker's own model, and waits for no other worker to end.
        """
        if not last:
            self._wait(self._going, START_LIMIT_S, "the other workers")
            return self._with_steps()
        self._wait(self._going, START_LIMIT_S, "the other workers")
        self._carry_out(self.driver.finish(self._moved(), self._now()))
        self.finishing = True
        self._wait(lambda: self.driver.phase is GossipPhase.OVER, WAIT_LIMIT_S, "the other workers to finish")
        self._compose()
        self._wait(lambda: self.driver.delivered, WAIT_LIMIT_S, "the peers to have it")
        self._hand_over()
        self._keep(last=True)
        return self.driver.mixing.model

    def _with_steps(self) -> Array:
        """Return a copy of this worker's model, with the local steps since the last round."""
        mixing = self.driver.mixing
        if not self.driver.may_step or self.finishing:  # the model has these steps already
            return mixing.copied(mixing.model)
        moved = self._moved()
        moved += mixing.model
        return moved

    def stopped(self) -> None:
        """Send the server the model of a worker that a signal stops before its last step. No other process has it."""
        self._keep(last=self._going())
        if self._going() and not self.shards.clock:  # with a clock, the server has asked for the model already
            self._give(self._with_steps(), m.HandOver.STOPPED, STOPPED_LIMIT_S)

    def _hand_over(self) -> None:
        """Send the server the final model if this worker has the lowest id. All workers have the same final model."""
        if not any(peer < self.shards.worker for peer in self.driver.exchanges.pairs):
            self._give(self.driver.mixing.model, m.HandOver.LAST, HAND_OVER_LIMIT_S)

    def _push(self, model: Array, kind: m.HandOver) -> None:
        """Send the server this model, unless the server is gone.

        Args:
            model: float32[size], where the worker's arrays live.
            kind: why the model is sent; it travels in the field for samples.
        """
        if self.server_gone or any(not exchange.may_push for exchange in self.shards.exchanges):
            return
        self.shards.weigh(kind)
        for shard, replica in enumerate(self.shards.replicas):
            pieces = self.engine.home.raw_pieces(
                model[replica.begin : replica.end], replica.begin, parts(replica.begin, replica.end)
            )
            for part, piece in enumerate(pieces):
                self.shards.send_part(shard, part, len(pieces), piece)
        self.shards.handed_over()

    def _give(self, model: Array, kind: m.HandOver, limit_s: float) -> None:
        """Send the server this model, and wait until the server has it; after `limit_s` print that it has not."""
        epoch = self.shards.epoch
        self._push(model, kind)

        def taken() -> bool:
            gone = self.server_gone or self.shards.epoch != epoch
            return gone or not any(exchange.in_flight for exchange in self.shards.exchanges)

        try:
            self._wait(taken, limit_s, "the server to take the model")
        except NarrowsError as error:
            self._tell(f"{error}; it is here only")

    def residual(self) -> FloatArray | None:
        """None: what a compressor leaves out of a mix stays in the model, and later mixes carry it."""
        return None

    def load_residual(self, whole: FloatArray) -> None:
        """Ignore a residual, which is of another mode."""


def _to_peers(say: PeerSay, member: Member, now_ns: int) -> list[MemberEffect]:
    return member.peers.carry_out(say, now_ns) if member.peers is not None else []
