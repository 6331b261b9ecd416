"""Channels: tensors between the processes of one pipeline, numbered, in order, each delivered once. No I/O.

How it works

    sender                                        receiver
    send: kept, number n  --PipelineTensor n-->   number as expected: TensorArrived; a gap: ask again (`missed`)
                                                  the script takes the tensor: `took`
    drop all below `taken` <--PipelineBeat------  `taken`, `missed`: after UNTOLD_MAX tensors, UNTOLD_BYTES, or when due
    TensorTaken

1. Each process dials each other one, and sends its tensors and beats over that connection.
2. The sender keeps a tensor until the receiver's script has taken it. On a new connection (`linked`) the sender sends
   all kept tensors again.
3. `tick` sends a PipelineBeat to each process at least BEATS times in a lease.

Rules
- A process that is silent for a lease is lost, and this pipeline ends with it. The same holds for a process that was
  started again: it has another `life`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from narrows.protocols import messages as m
from narrows.protocols.effects import NS, MemberFailed
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError, StageLostError, UnreachableError

IN_FLIGHT_MAX = 256  # tensors to one peer that its script has not taken: neither end keeps more
UNTOLD_MAX = 16  # tensors taken here before a beat says so: a beat for each would cost both ends a wake-up
UNTOLD_BYTES = 1 << 20  # the same in bytes; a beat follows a larger tensor at once
BEATS = 5  # heartbeats in a lease, at least
BEAT_NS_MAX = NS  # the longest interval of heartbeats
ON = (
    "once the servers of the plan have ended, ps-serve --plan --resume and then ps-worker --plan go on from the newest "
    "checkpoint that all stages have"
)
FAILED = 2  # `PipelineBeat.left` of a process that failed is this plus its exit code
CODE_MAX = 255
START_NS = 600 * NS  # time for all processes of a pipeline to start


@dataclass(frozen=True, slots=True)
class SendOnChannel:
    """Send `message` to the process of this rank."""

    peer: int
    message: m.PipelineTensor | m.PipelineBeat


@dataclass(frozen=True, slots=True)
class TensorArrived:
    """The next tensor of this peer, in order."""

    peer: int
    tensor: m.PipelineTensor


@dataclass(frozen=True, slots=True)
class TensorTaken:
    """The script of this peer has taken `count` more tensors of this process."""

    peer: int
    count: int


Effect = SendOnChannel | TensorArrived | TensorTaken | MemberFailed


@dataclass(slots=True)
class ChannelPeer:
    """One other process. told <= taken <= received <= taken + IN_FLIGHT_MAX."""

    heard_ns: int = -1  # when its last message came; -1: none has
    life: int = -1  # its random number; -1: not known
    left: int = 0  # as PipelineBeat.left
    number: int = 0  # of the next tensor to it
    kept: deque[m.PipelineTensor] = field(default_factory=deque)  # tensors to it that its script has not taken
    received: int = 0  # count of its tensors received, in order
    taken: int = 0  # count of those that this process's script has taken
    told: int = 0  # `taken` in the newest beat to it
    untold_bytes: int = 0  # bytes of the tensors taken since that beat
    missed: int = -1  # number from which this process last asked for tensors again


class Channels:
    """The channels of one process to all others of its pipeline.

    Args:
        rank: of this process.
        names: how a sentence for the user names each process, by rank.
        plan: a number that all processes of one plan share.
        life: a random number of this process.
        lease_ns: silence after which a process is lost.
        now_ns: the time.
    """

    def __init__(self, rank: int, names: list[str], plan: int, life: int, lease_ns: int, now_ns: int) -> None:
        self.rank, self.names, self.plan, self.life = rank, names, plan, life
        self.lease_ns, self.began_ns, self.beat_ns = lease_ns, now_ns, now_ns
        self.peers = {peer: ChannelPeer() for peer in range(len(names)) if peer != rank}
        self.left = 0

    # Commands.

    def send(self, to: int, step: int, tag: int, payload: m.Buffer) -> list[Effect]:
        """Send a tensor. The caller keeps at most IN_FLIGHT_MAX under way, and must not change the payload."""
        peer = self.peers[to]
        tensor = m.PipelineTensor(self.plan, self.rank, self.life, peer.number, step, tag, payload)
        peer.number += 1
        peer.kept.append(tensor)
        return [SendOnChannel(to, tensor)]

    def took(self, of: int, size: int) -> list[Effect]:
        """Note that this process's script has taken the next tensor of peer `of`, of `size` bytes."""
        peer = self.peers[of]
        peer.taken += 1
        peer.untold_bytes += size
        much = peer.taken - peer.told >= UNTOLD_MAX or peer.untold_bytes >= UNTOLD_BYTES
        return [self._beat(of)] if much else []

    def tell(self) -> list[Effect]:
        """Tell each peer at once what this script has taken: the script ends, and its peers wait for that."""
        return [self._beat(to) for to, peer in self.peers.items() if peer.taken > peer.told]

    def linked(self, to: int) -> list[Effect]:
        """Send all kept tensors to this peer again: the connection is a new one, and tensors under way may be lost."""
        return [SendOnChannel(to, tensor) for tensor in self.peers[to].kept]

    def leave(self, failed: bool, code: int = StageLostError.exit_code) -> list[Effect]:
        """Tell all peers that this process ends. `code`: its exit code, if it has failed."""
        self.left = FAILED + min(code, CODE_MAX) if failed else 1
        return self._beats()

    @property
    def started(self) -> bool:
        return all(peer.heard_ns >= 0 for peer in self.peers.values())

    # Messages that come.

    def receive(self, message: m.Message, now_ns: int) -> list[Effect]:
        """Handle a message of another process.

        Raises:
            RemoteProtocolError: no process of this pipeline sends such a message.
        """
        if not isinstance(message, (m.PipelineTensor, m.PipelineBeat)) or message.worker not in self.peers:
            raise RemoteProtocolError(f"{type(message).__name__} is not of a process of this pipeline")
        who, peer = message.worker, self.peers[message.worker]
        if message.plan != self.plan:
            return [
                MemberFailed(
                    IncompatibleError.exit_code,
                    f"{self.names[who]} was started with another plan: give all hosts the same file",
                )
            ]
        if peer.life not in (-1, message.life):
            return [self._lost(who, "was started again")]
        peer.heard_ns, peer.life = now_ns, message.life
        return (
            self._tensor(who, peer, message)
            if isinstance(message, m.PipelineTensor)
            else self._heard(who, peer, message)
        )

    def _tensor(self, who: int, peer: ChannelPeer, tensor: m.PipelineTensor) -> list[Effect]:
        if tensor.number == peer.received:
            if peer.received - peer.taken >= IN_FLIGHT_MAX:
                raise RemoteProtocolError(
                    f"{self.names[who]} sends more than {IN_FLIGHT_MAX} tensors that the script has not received"
                )
            peer.received += 1
            return [TensorArrived(who, tensor)]
        if tensor.number > peer.received != peer.missed:  # a gap that was not asked for yet; smaller: a second copy
            peer.missed = peer.received
            return [self._beat(who)]
        return []

    def _heard(self, who: int, peer: ChannelPeer, beat: m.PipelineBeat) -> list[Effect]:
        count = 0
        while peer.kept and peer.kept[0].number < beat.taken:
            peer.kept.popleft()
            count += 1
        peer.left = beat.left
        if peer.left >= FAILED:
            return [self._failed(who, peer.left - FAILED)]
        again = [t for t in peer.kept if t.number >= beat.missed] if beat.missed >= 0 else []
        return [*([TensorTaken(who, count)] if count else []), *(SendOnChannel(who, tensor) for tensor in again)]

    def tick(self, now_ns: int) -> list[Effect]:
        if not self.started and now_ns - self.began_ns > START_NS:
            late = next(
                name for rank, name in enumerate(self.names) if rank in self.peers and self.peers[rank].life < 0
            )
            return [
                MemberFailed(
                    UnreachableError.exit_code,
                    f"{late} did not connect within {START_NS // NS} s: start ps-worker --plan on its host",
                )
            ]
        for who, peer in self.peers.items():
            if peer.heard_ns >= 0 and not peer.left and now_ns - peer.heard_ns > self.lease_ns:
                return [self._lost(who, f"was not heard for {self.lease_ns / NS:g} s")]
        if now_ns - self.beat_ns < min(BEAT_NS_MAX, self.lease_ns // BEATS):
            return []
        self.beat_ns = now_ns
        return self._beats()

    def _beats(self) -> list[Effect]:
        """Return a beat to each process that has not ended."""
        return [self._beat(to) for to, peer in self.peers.items() if not peer.left]

    def _beat(self, to: int) -> SendOnChannel:
        peer = self.peers[to]
        peer.told, peer.untold_bytes = peer.taken, 0
        missed = peer.missed if peer.missed == peer.received else -1
        return SendOnChannel(to, m.PipelineBeat(self.plan, self.rank, self.life, peer.taken, missed, self.left))

    def _failed(self, who: int, code: int) -> MemberFailed:
        """End the pipeline with the exit code of a process that failed by its own fault.

        Code 0, or that of a lost stage, is no fault of the process itself: then the text tells the user how to go on.
        """
        if code in (0, StageLostError.exit_code):
            return self._lost(who, "has failed")
        text = f"{self.names[who]} has failed with exit code {code}, and its pipeline ends with it: its host says what to mend"
        return MemberFailed(code, text)

    def _lost(self, who: int, how: str) -> MemberFailed:
        return MemberFailed(StageLostError.exit_code, f"{self.names[who]} {how}, and its pipeline ends with it: {ON}")
