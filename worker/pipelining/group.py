"""A torch.distributed process group over channels (protocols/pipeline_channels.py).

On it torch.distributed.pipelining runs unmodified.

Rules
- The group has what a pipeline needs: send, recv and barrier, between the stages of one replica. Rank i is stage i.
- A tensor that a schedule of torch.distributed.pipelining sends to a later stage is an activation; to an earlier stage,
  a gradient. The edge says how it is coded. Tensors that the script sends itself are not coded, and have tags of their
  own.
- If two stages begin with the same parameter, the group refuses it (ties.py), unless the script keeps both equal.
- Every wait ends: with a tensor, after the group's timeout, or with an error once a stage is lost.
- Nothing is unpickled. Torch sends a pickle if PipelineStage has no input_args and output_args; the group refuses it.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from narrows.compression.value_codings import EDGE_CODINGS, FP32, Key, ValueCoding
from narrows.protocols.config.deployment import StageEdge
from narrows.protocols.errors import IncompatibleError, UsageError
from narrows.protocols.runtime.network.channel_runner import NO_STEP, ChannelRunner
from narrows.worker.pipelining import ties
from narrows.worker.pipelining.coding import BACKWARD, FORWARD, framed, opened

NAME = "narrows"  # the name under which torch knows this backend
BARRIER_TAG = 1 << 40  # above any tag of a script
SCHEDULE_TAG = 1 << 41  # tensors of a schedule have tags from here on
SCHEDULES = "torch.distributed.pipelining"  # the package whose calls count as those of a schedule
WAIT_LIMIT_S = 7200.0  # as in a group of one machine: longer than any other wait of a stage
PICKLED = (
    "PipelineStage needs input_args and output_args: without them torch sends pickles, and Narrows unpickles nothing"
)


class CompletedWork(dist.Work):
    """Work that is complete when the call that started it returns."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


def by_schedule() -> bool:
    """Return whether the call comes from a schedule of torch, rather than from the script."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith(SCHEDULES) or not name.startswith(("torch.", __name__, "contextlib")):
            return name.startswith(SCHEDULES)
        frame = frame.f_back
    return False


class ReceiveWork(CompletedWork):
    """The receipt of one tensor. Tensors of one peer and tag are filled in the order of their recv calls."""

    filled: bool

    def __init__(self, group: PipelineGroup, tensor: torch.Tensor, peer: int, tag: int) -> None:
        super().__init__()
        self.group, self.tensor, self.peer, self.tag = group, tensor, peer, tag
        self.filled = False

    def is_completed(self) -> bool:
        while not self.filled and self.group.peers.has(self.peer, self.tag):
            self.group.fill_next(self.peer, self.tag, 0.0)
        return self.filled

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the tensor.

        Args:
            timeout: the longest wait; None: the group's limit.

        Raises:
            StageLostError: the peer is lost, or the wait took too long.
            IncompatibleError: the peer sent another shape or dtype, or is at another step.
        """
        limit_s = timeout.total_seconds() if timeout else 0.0
        while not self.filled:
            self.group.fill_next(self.peer, self.tag, limit_s or self.group.limit_s)
        return True


class PipelineGroup(dist.ProcessGroup):
    """The process group of the stages of one replica.

    Args:
        peers: the channels to the other stages.
        rank: the number of this stage.
        size: the number of stages.
        edges: for each stage but the last, how tensors between it and the next stage are coded.
        step: returns the step of the run. Sender and receiver of a tensor must be at the same step.
        limit_s: the longest wait for a tensor, in seconds.
        parameters: returns the named parameters of this stage, which are compared with those of other stages.
    """

    def __init__(
        self,
        peers: ChannelRunner,
        rank: int,
        size: int,
        edges: Sequence[StageEdge],
        step: Callable[[], int],
        limit_s: float,
        parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]] = tuple,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch documents it
        self.parameters, self._keeps_ties = parameters, False  # True: the script keeps tied parameters equal
        self._digests: dict[str, str] | None = None  # digests of the parameters, from the first tensor of a schedule on
        self.peers, self.edges, self.step, self.limit_s = peers, list(edges), step, limit_s
        self.place = rank
        self._asked: dict[tuple[int, int], deque[ReceiveWork]] = {}  # open recv calls by peer and tag, oldest first
        self._count = 0  # tensors sent so far; part of the seed of random rounding

    def allow_ties(self) -> None:
        """Take the script's word that it keeps tied parameters equal."""
        self._keeps_ties = True

    def getBackendName(self) -> str:
        return NAME

    def _coding(self, of: int, to: int, tag: int) -> ValueCoding:
        """Return the coding of a tensor: fp32 for tensors of the script, and between stages that are no neighbours."""
        if abs(of - to) != 1 or not self.edges or tag < SCHEDULE_TAG:
            return FP32
        edge = self.edges[min(of, to)]
        return EDGE_CODINGS[edge.forward][FORWARD] if to > of else EDGE_CODINGS[edge.backward][BACKWARD]

    def _tag(self, tag: int) -> int:
        """Return the tag under which a tensor travels.

        The first tensor of a schedule first sends digests of this stage's parameters to all other stages.
        """
        if not by_schedule():
            return tag
        if self._digests is None:
            self._digests = {} if self._keeps_ties else ties.digests(self.parameters())
            for other in range(self.size()):
                if other != self.place:
                    self.peers.send(other, NO_STEP, ties.TAG, ties.packed(self._digests), self.limit_s)
        return tag + SCHEDULE_TAG

    def _compare(self) -> None:
        """Compare this stage's parameters with the digests that have arrived. Raises UsageError for a tie."""
        for other in range(self.size()):
            while self._digests is not None and other != self.place and self.peers.has(other, ties.TAG):
                ties.compare(self._digests, self.place, self.peers.receive(other, ties.TAG, 0.0).payload, other)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send one tensor to a stage.

        Args:
            tensors: one tensor. It is copied, and may change as soon as the call returns.
            dst: the number of the receiving stage.
            tag: the tag of the matching recv.

        Raises:
            UsageError: torch sends a pickle, or two stages share a parameter.
            NarrowsError: the edge's coding is lossy and a value is not finite.
            StageLostError: a stage is lost.
        """
        (tensor,) = tensors
        if tensor.dtype is torch.uint8 and tensor.ndim < 2:
            raise UsageError(PICKLED)
        tag = self._tag(tag)
        self._count += 1
        key = Key(zlib.crc32(b"%d,%d" % (self.place, dst)), self._count & 0xFFFFFFFF)
        payload = framed(tensor, self._coding(self.place, dst, tag), key)
        self.peers.send(dst, self.step(), tag, payload, self.limit_s)
        self._compare()
        return CompletedWork()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Begin to receive one tensor. The tensor is filled by the time `wait` of the result returns.

        Args:
            tensors: one tensor, of the shape and dtype that the sender sends.
            src: the number of the sending stage.
            tag: the tag of the matching send.
        """
        (tensor,) = tensors
        if tensor.dtype is torch.uint8 and tensor.ndim < 2:
            raise UsageError(PICKLED)
        tag = self._tag(tag)
        receipt = ReceiveWork(self, tensor, src, tag)
        self._asked.setdefault((src, tag), deque()).append(receipt)
        return receipt

    def fill_next(self, peer: int, tag: int, limit_s: float) -> None:
        """Receive one tensor into the oldest open recv of this peer and tag. Raises as `ReceiveWork.wait` does."""
        came = self.peers.receive(peer, tag, limit_s)
        self._compare()
        receipt = self._asked[peer, tag].popleft()
        if came.step != self.step():
            raise IncompatibleError(
                f"stage {peer} is at step {came.step} of the run, and stage {self.place} at step {self.step()}: each stage "
                "makes one step() of its DistributedOptimizer after each of its schedule, so each needs a parameter; after a "
                "restart, start the servers of all stages with ps-serve --plan --resume"
            )
        opened(came.payload, self._coding(peer, self.place, tag), receipt.tensor, f"stage {peer}")
        receipt.filled = True

    def barrier(self, opts: Any = None) -> dist.Work:
        self.peers.barrier(BARRIER_TAG, self.limit_s)
        self._compare()
        return CompletedWork()


def register(group: PipelineGroup) -> None:
    """Make `group` the default process group of torch."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return group

    dist.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])
    # torch wants a store to find the processes. Here they are connected already, so the store stays empty.
    nothing = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(NAME, store=nothing, rank=group.place, world_size=group.size())
