"""The runner of `Channels` over `Sockets`: between the processes of a pipeline, or between the servers of its stages.

How it works

    script's thread                 thread of the sockets                        other process
    send(tensor)  --command-->  Channels.send  --PipelineTensor-->  Sockets  -->
    receive(tag)  <--queue----  TensorArrived  <--Channels.receive  Sockets  <--
    wait, close   --command-->  Channels.tell, leave; tick --PipelineBeat-->

1. The constructor listens, and starts the thread of the sockets. That thread owns `Channels` and `Sockets`.
2. One other thread, the script's, calls `send`, `receive`, `barrier` and `close`. Each call that waits has a limit.
3. An error of the channels is kept in `_error`. The next call of the script's thread raises it.
4. `close` waits until the peers have taken all tensors, or for a lease, then sends the last PipelineBeat.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from narrows.protocols.addresses import parse_address
from narrows.protocols.effects import NS, MemberFailed
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
NO_STEP = -1  # `step` of a tensor that belongs to no step of the script
ERRORS = BY_EXIT_CODE | {StageLostError.exit_code: StageLostError}

Command = Callable[[Channels, int], Sequence[Effect]]


class ChannelRunner:
    """Channels from this process to all others of a plan.

    Args:
        rank: of this process.
        addresses: of all processes, by rank.
        names: how a sentence for the user names each process, by rank.
        plan: a number that all processes of one plan share.
        lease_s: silence after which a process is lost.
        say: gets a sentence about messages that are dropped or refused.
        pair: the keys of this process; None: nothing is encrypted.
        keys: the public key of each process, by rank.

    Raises:
        UsageError: the address of this process is taken.
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
        self._came: dict[tuple[int, int], deque[PipelineTensor]] = {}  # (peer, tag) -> tensors not taken yet
        self._flying = dict.fromkeys(self._channels.peers, 0)  # peer -> tensors that its script has not taken
        self._changed = threading.Condition()  # guards `_came`, `_flying` and `_error`
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
        """Wait until all processes are there.

        Raises:
            NarrowsError: the error that ended the channels, or StageLostError after `limit_s`.
        """
        self._until(lambda: self._channels.started, limit_s, "the other processes")

    def send(self, to: int, step: int, tag: int, payload: Buffer, limit_s: float) -> None:
        """Send a tensor. Waits while IN_FLIGHT_MAX tensors to this peer are not taken.

        Args:
            to: rank of the receiver.
            step: of the script, or NO_STEP.
            tag: by which the receiver asks for the tensor.
            payload: lent: must not change from now on.
            limit_s: of the wait.

        Raises:
            NarrowsError: as `wait`.
        """
        self._until(
            lambda: self._flying[to] < IN_FLIGHT_MAX, limit_s, f"room for a tensor to {self._channels.names[to]}", to
        )
        with self._changed:
            self._flying[to] += 1
        self._call(lambda channels, now: channels.send(to, step, tag, payload))

    def has(self, of: int, tag: int) -> bool:
        """True if there is a tensor of this peer and tag to take."""
        return bool(self._came.get((of, tag)))

    def receive(self, of: int, tag: int, limit_s: float) -> PipelineTensor:
        """Wait for the next tensor of this peer and tag.

        Raises:
            NarrowsError: as `wait`, once no tensor is left to take.
        """
        self._until(lambda: self.has(of, tag), limit_s, f"a tensor of {self._channels.names[of]}", of)
        with self._changed:
            tensor = self._came[of, tag].popleft()
        size = len(tensor.payload)
        self._loop.call_later(lambda: self._run(lambda channels, now: channels.took(of, size)))
        return tensor

    def barrier(self, tag: int, limit_s: float) -> None:
        """Wait until all processes have called `barrier` with this tag."""
        for peer in self._flying:
            self.send(peer, NO_STEP, tag, b"", limit_s)
        for peer in self._flying:
            self.receive(peer, tag, limit_s)

    def close(self, failed: bool = False, code: int = StageLostError.exit_code) -> None:
        """Tell the other processes that this one ends, and end the thread.

        Args:
            failed: end at once: this process has failed. False: wait until the others have taken all tensors, or a
                lease.
            code: the exit code of a process that has failed.
        """
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
        """True if every process that has not ended has taken all tensors sent to it."""
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
        except (NarrowsError, IndexError) as error:  # a stranger that dials must not end this pipeline
            self._drops.refuse(f"a peer's message was refused: {error}")
        else:
            self._apply(effects)
            with self._changed:
                self._changed.notify_all()  # for `wait`: the first message of a peer; for `close`: the last

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
                case MemberFailed(code, text):
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
