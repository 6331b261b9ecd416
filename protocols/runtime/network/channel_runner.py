"""Runs `Channels` over a `Sockets`, in a thread of its own: between the processes of a pipeline, or the servers of its stages.
The thread owns both; `send` and `receive` are for one other thread."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from narrows.protocols.addresses import parse_address
from narrows.protocols.effects import NS, Failed
from narrows.protocols.errors import (
    BY_EXIT_CODE,
    AuthenticationError,
    NarrowsError,
    RemoteProtocolError,
    StageLostError,
)
from narrows.protocols.messages import Buffer, PipelineTensor
from narrows.protocols.pipeline_channels import (
    IN_FLIGHT_MAX,
    Channels,
    Effect,
    SendOnChannel,
    TensorArrived,
    TensorTaken,
)
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.curve_auth import CurveKeys, DiallerId, HandshakeFailure, KeyPair
from narrows.protocols.runtime.network.loop import TICK_MS, Loop
from narrows.protocols.runtime.network.sockets import Drops, Peer, Sockets
from narrows.protocols.wire import decode, encode

CLOSE_S = 10.0  # the thread ends within a tick, and its sockets within LINGER_MS
NO_STEP = -1  # of what belongs to no step of a run
ERRORS = BY_EXIT_CODE | {StageLostError.exit_code: StageLostError}

Command = Callable[[Channels, int], Sequence[Effect]]


class ChannelRunner:
    """Channels to the processes at `addresses`, of which `rank` is this one.

    `names`: what each is called in a sentence. `plan`: a number that all share. `pair`: our keys; `keys`: the public key of
    each. None: all is in the open. `say` is told of messages that are dropped. Raises UsageError where our address is taken.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        names: Sequence[str],
        plan: int,
        lease_s: float,
        say: Callable[[str], None],
        pair: KeyPair | None = None,
        keys: Sequence[str] = (),
    ) -> None:
        self.rank, self.addresses, self.keys = rank, list(addresses), list(keys)
        self.lease_s = lease_s
        self.bytes_up = self.bytes_down = 0
        self.clock = AwakeClock()
        life = secrets.randbits(62)
        self._channels = Channels(rank, list(names), plan, life, int(lease_s * NS), self.clock.now())
        self._came: dict[tuple[int, int], deque[PipelineTensor]] = {}  # by peer and tag
        self._flying = dict.fromkeys(self._channels.peers, 0)  # tensors to each that its script has not taken
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closed = False
        self._drops = Drops(say)
        curve = None
        if pair is not None:
            own, admitted = pair, frozenset(self.keys)
            there = dict(zip(self.addresses, self.keys, strict=True))
            curve = CurveKeys(own, lambda address: (own, there[address]), admitted.__contains__)
        self._sockets = Sockets(curve=curve, failed=self._shut_out, linked=self._linked, faulted=self._drops.refuse)
        self._loop = Loop(self._sockets, self._hear, self._tick)
        try:
            self._sockets.listen(f"tcp://{_bound(self.addresses[rank])}")
        except BaseException:
            self._sockets.close()
            raise
        self._thread = threading.Thread(target=self._main, name="narrows-peers", daemon=True)
        self._thread.start()

    # The script's thread.

    def wait(self, limit_s: float) -> None:
        """Until all are there. Raises what ended the channels."""
        self._until(lambda: self._channels.started, limit_s, "the other processes")

    def send(self, to: int, step: int, tag: int, payload: Buffer, limit_s: float) -> None:
        """The payload stays as it is from now on. Waits while IN_FLIGHT_MAX are on their way."""
        self._until(
            lambda: self._flying[to] < IN_FLIGHT_MAX, limit_s, f"room for a tensor to {self._channels.names[to]}", to
        )
        with self._changed:
            self._flying[to] += 1
        self._call(lambda channels, now: channels.send(to, step, tag, payload))

    def has(self, of: int, tag: int) -> bool:
        """There is a tensor of this peer to take."""
        return bool(self._came.get((of, tag)))

    def receive(self, of: int, tag: int, limit_s: float) -> PipelineTensor:
        """The next tensor of this peer with this tag. Raises what ended the channels, once nothing is left to take."""
        self._until(lambda: self.has(of, tag), limit_s, f"a tensor of {self._channels.names[of]}", of)
        with self._changed:
            tensor = self._came[of, tag].popleft()
        size = len(tensor.payload)
        self._loop.call_later(lambda: self._run(lambda channels, now: channels.took(of, size)))
        return tensor

    def barrier(self, tag: int, limit_s: float) -> None:
        """Until all have come here."""
        for peer in self._flying:
            self.send(peer, NO_STEP, tag, b"", limit_s)
        for peer in self._flying:
            self.receive(peer, tag, limit_s)

    def close(self, failed: bool = False, code: int = StageLostError.exit_code) -> None:
        """Say so to the others and end; where nothing has failed, once they have taken what was sent, or after a lease. `code`:
        the exit code of a process that has failed."""
        if self._closed:
            return
        deadline = time.monotonic() + (0 if failed else self.lease_s)
        self._call(lambda channels, now: channels.tell())
        with self._changed:
            while time.monotonic() < deadline and self._error is None and not self._flushed:
                self._changed.wait(TICK_MS / 1000)
        self._call(lambda channels, now: channels.leave(failed, code))
        self._closed = True
        self._loop.stop()
        self._thread.join(CLOSE_S)

    @property
    def _flushed(self) -> bool:
        """Everybody who is still there has taken all that was sent."""
        return all(count == 0 or self._channels.peers[peer].left for peer, count in self._flying.items())

    def _until(self, there: Callable[[], bool], limit_s: float, what: str, peer: int = -1) -> None:
        def gone() -> bool:
            return peer >= 0 and self._channels.peers[peer].left > 0

        with self._changed:
            if self._changed.wait_for(lambda: there() or self._error is not None or gone(), limit_s) and there():
                return
            if self._error is not None:
                raise self._error
            if gone():
                raise StageLostError(f"{self._channels.names[peer]} has ended, and this process waits for {what}")
        raise StageLostError(f"{what} did not come within {limit_s:.0f} s: a stage of this pipeline hangs")

    def _call(self, command: Command) -> None:
        self._loop.call(lambda: self._run(command))

    # The thread of the sockets.

    def _main(self) -> None:
        try:
            self._loop.run(self.clock.turn)
        except BaseException as error:
            self._fail(error)
        finally:
            self._sockets.close()

    def _run(self, command: Command) -> None:
        self._apply(command(self._channels, self.clock.now()))

    def _tick(self, now_ns: int) -> None:
        self._apply(self._channels.tick(now_ns))

    def _hear(self, peer: Peer, frames: list[Buffer]) -> None:
        self.bytes_down += sum(map(len, frames))
        try:
            message = decode(frames)
            if isinstance(peer, DiallerId) and self.keys[getattr(message, "worker", self.rank)] != peer.key:
                raise RemoteProtocolError("it has the rank of a process with another key")
            effects = self._channels.receive(message, self.clock.now())
        except (NarrowsError, IndexError) as error:  # who dials must not end what others began
            self._drops.refuse(f"a peer's message was refused: {error}")
        else:
            self._apply(effects)
            with self._changed:
                self._changed.notify_all()  # it may have been the first of its sender, or the last

    def _apply(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendOnChannel(peer, message):
                    frames = encode(message)
                    self.bytes_up += sum(map(len, frames))
                    receipt = self._sockets.send(
                        self.addresses[peer], frames, control=not isinstance(message, PipelineTensor)
                    )
                    self._drops.note(type(message).__name__, receipt)
                case TensorArrived(peer, tensor):
                    with self._changed:
                        self._came.setdefault((peer, tensor.tag), deque()).append(tensor)
                        self._changed.notify_all()
                case TensorTaken(peer, count):
                    with self._changed:
                        self._flying[peer] -= count
                        self._changed.notify_all()
                case Failed(code, text):
                    self._fail(ERRORS.get(code, NarrowsError)(text))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _linked(self, address: str) -> None:
        self._apply(self._channels.linked(self.addresses.index(address)))

    def _shut_out(self, address: str, why: HandshakeFailure, public: str) -> None:
        if address:
            name = self._channels.names[self.addresses.index(address)]
            self._fail(
                AuthenticationError(
                    f"{name} at {address}: {why.value}; give each process of the plan the key that it names"
                )
            )


def _bound(address: str) -> str:
    host, port = parse_address("--plan:", address)
    return f"{host}:{port}"
