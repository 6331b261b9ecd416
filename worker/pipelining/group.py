"""A torch.distributed process group over our sockets, so that torch.distributed.pipelining runs unmodified.

Rules
- It has what a pipeline needs: send, recv and barrier, between the stages of one replica. Rank i is stage i.
- A tensor that is sent to a later stage is an activation, one to an earlier stage a gradient. The edge says how it is coded.
- Every wait ends: with a tensor, after the group's timeout, or with a sentence once a stage is lost.
- Nothing is unpickled. torch sends a pickle where PipelineStage has no input_args and output_args: that is refused.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from narrows.compression.value_codings import EDGE_CODINGS, FP32, Key, ValueCoding
from narrows.protocols.errors import IncompatibleError, UsageError
from narrows.protocols.planning.layout import Edge
from narrows.protocols.runtime.peers import Peers
from narrows.worker.pipelining.coding import BACKWARD, FORWARD, decode, encode

NAME = "narrows"  # of the backend
BARRIER_TAG = 1 << 40  # no script has it
WAIT_LIMIT_S = 7200.0  # as in a group of one machine: longer than anything that one stage may wait for
PICKLED = (
    "PipelineStage needs input_args and output_args: without them torch sends pickles, and Narrows unpickles nothing"
)


class Done(dist.Work):
    """Work that has been done already."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class Receipt(Done):
    """A tensor that is to come. Those of one peer and tag are filled in the order in which they were asked for."""

    def __init__(self, group: PipelineGroup, tensor: torch.Tensor, peer: int, tag: int) -> None:
        super().__init__()
        self.group, self.tensor, self.peer, self.tag = group, tensor, peer, tag
        self.filled = False

    def is_completed(self) -> bool:
        while not self.filled and self.group.peers.has(self.peer, self.tag):
            self.group.fill_next(self.peer, self.tag, 0.0)
        return self.filled

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises StageLostError where the peer is lost or the time is over."""
        limit_s = timeout.total_seconds() if timeout else 0.0
        while not self.filled:
            self.group.fill_next(self.peer, self.tag, limit_s or self.group.limit_s)
        return True


class PipelineGroup(dist.ProcessGroup):
    """The stages of one replica. `edges`: how tensors between stage i and the next are coded. `step`: of the run, which must be
    the same at both ends of a tensor."""

    def __init__(
        self, peers: Peers, rank: int, size: int, edges: Sequence[Edge], step: Callable[[], int], limit_s: float
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch documents it
        self.peers, self.edges, self.step, self.limit_s = peers, list(edges), step, limit_s
        self.place = rank
        self._asked: dict[tuple[int, int], deque[Receipt]] = {}
        self._count = 0  # tensors that were sent: what is random follows from it

    def getBackendName(self) -> str:
        return NAME

    def _coding(self, of: int, to: int) -> ValueCoding:
        """Between stages that are no neighbours nothing is coded."""
        if abs(of - to) != 1 or not self.edges:
            return FP32
        edge = self.edges[min(of, to)]
        return EDGE_CODINGS[edge.forward][FORWARD] if to > of else EDGE_CODINGS[edge.backward][BACKWARD]

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """The tensor is copied: it may change as soon as this returns."""
        (tensor,) = tensors
        if tensor.dtype is torch.uint8 and tensor.ndim < 2:
            raise UsageError(PICKLED)
        self._count += 1
        key = Key(zlib.crc32(b"%d,%d" % (self.place, dst)), self._count & 0xFFFFFFFF)
        payload = encode(tensor, self._coding(self.place, dst), key)
        self.peers.send(dst, self.step(), tag, payload, self.limit_s)
        return Done()

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        (tensor,) = tensors
        if tensor.dtype is torch.uint8 and tensor.ndim < 2:
            raise UsageError(PICKLED)
        receipt = Receipt(self, tensor, src, tag)
        self._asked.setdefault((src, tag), deque()).append(receipt)
        return receipt

    def fill_next(self, peer: int, tag: int, limit_s: float) -> None:
        """Fill the tensor of this peer and tag that was asked for first."""
        came = self.peers.receive(peer, tag, limit_s)
        receipt = self._asked[peer, tag].popleft()
        if came.step != self.step():
            raise IncompatibleError(
                f"stage {peer} is at step {came.step} of the run, and stage {self.place} at step {self.step()}: start the "
                "servers of all stages with ps-serve --plan --resume"
            )
        decode(came.payload, self._coding(peer, self.place), receipt.tensor)
        receipt.filled = True

    def barrier(self, opts: Any = None) -> dist.Work:
        self.peers.barrier(BARRIER_TAG, self.limit_s)
        return Done()


def register(group: PipelineGroup) -> None:
    """Make it the default process group of torch."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return group

    dist.Backend.register_backend(NAME, create, devices=["cpu", "cuda"])
    # No store is needed: who takes part was settled before.
    nothing = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(NAME, store=nothing, rank=group.place, world_size=group.size())
