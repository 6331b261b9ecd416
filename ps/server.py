"""The machine of one server process: a shard, and in process 0 the coordinator beside it. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from narrows.protocols import messages as m
from narrows.protocols.coordinator import Coordinator
from narrows.protocols.effects import Send, ServerEffect
from narrows.protocols.errors import RemoteProtocolError
from narrows.ps.shard import COORDINATOR, Shard

FOR_COORDINATOR = (m.Hello, m.Declare, m.Heartbeat, m.Leave, m.Buffers, m.Report)


class Server:
    """Routes messages to the two machines; what they tell each other in one process never leaves it."""

    def __init__(self, shard: Shard, coordinator: Coordinator | None) -> None:
        self.shard, self.coordinator = shard, coordinator
        if coordinator is not None:
            shard.wants_buffers = coordinator.wants_buffers

    def start(self, now_ns: int) -> Iterator[ServerEffect]:
        """The first report of this shard."""
        return self._local([Send(COORDINATOR, self.shard.report())], now_ns)

    def handle(self, peer: bytes, message: m.Message, now_ns: int) -> Iterator[ServerEffect]:
        """Return the effects of a message, all to be taken. Raises RemoteProtocolError; then nothing has changed."""
        coordinator = self.coordinator
        if isinstance(message, FOR_COORDINATOR):
            if coordinator is None:
                raise RemoteProtocolError("this is not the coordinator: dial the address of ps-serve, shard 0")
            return self._local(coordinator.handle(peer, message, now_ns), now_ns)
        if isinstance(message, m.Ledger):
            if peer != COORDINATOR:
                raise RemoteProtocolError("a ledger comes from the coordinator alone")
            return self._local(self.shard.handle_ledger(message, now_ns), now_ns)
        if coordinator is not None and isinstance(message, (m.Push, m.Pull, m.FirstWeights)):
            coordinator.heard(message.worker, now_ns)
        return self._local(self.shard.handle(peer, message, now_ns), now_ns)

    def tick(self, now_ns: int) -> Iterator[ServerEffect]:
        effects = self.shard.tick(now_ns)
        if self.coordinator is not None:
            effects = effects + self.coordinator.tick(now_ns)
        return self._local(effects, now_ns)

    def stop(self, now_ns: int) -> Iterator[ServerEffect]:
        """Ctrl-C, told to the coordinator."""
        return self._local(self.coordinator.stop(now_ns) if self.coordinator is not None else [], now_ns)

    def _local(self, effects: list[ServerEffect], now_ns: int) -> Iterator[ServerEffect]:
        """The effects for the runner; what shard 0 and the coordinator send each other is carried out here.

        Made as they are taken: a ledger that closes a clock is on its way to the other shards before this one folds, so
        that all shards fold at the same time.
        """
        inner = [effect for effect in effects if self._is_local(effect)]
        yield from (effect for effect in effects if not self._is_local(effect))
        for effect in inner:
            yield from self._local(self._take(effect, now_ns), now_ns)

    def _is_local(self, effect: ServerEffect) -> bool:
        return self.coordinator is not None and isinstance(effect, Send) and effect.peer == COORDINATOR

    def _take(self, effect: ServerEffect, now_ns: int) -> list[ServerEffect]:
        assert isinstance(effect, Send) and self.coordinator is not None
        if isinstance(effect.message, m.Ledger):
            return self.shard.handle_ledger(effect.message, now_ns)
        effects = self.coordinator.handle(COORDINATOR, effect.message, now_ns)
        if isinstance(effect.message, m.Report):
            self.shard.seen(effect.message.version)
        return effects
