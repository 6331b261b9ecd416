"""The processes of one machine that are one worker: what they do together. torch.distributed carries it, NCCL between GPUs and
gloo between CPUs.

Rules
- All ranks call the same methods in the same order. An event that one of them hears alone it brings to `agree` first.
- A rank that ends ends its group: whatever the others call next raises. One that hangs is named (group_liveness.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker.group import group_liveness
from narrows.worker.runtime.child_process import NotAWorkerError
from narrows.worker.runtime.launcher_pipe import complain as say

GROUP = "NARROWS_GROUP"  # "1": the processes of this machine are one worker
START_LIMIT_S = 600.0  # all ranks have begun within this
WAIT_LIMIT_S = 7200.0  # a rank waits for the others: longer than anything that one of them may wait for
GLOO = "gloo"
WHY_MAX = 500  # characters of what torch has to say


class GroupEndedError(NarrowsError):
    """Another process of this group has ended, which says why where it can; or torch cannot do what they do together."""


class Group:
    """All ranks of the default process group. rank: of this process in it; the first one speaks with the server."""

    _presence: group_liveness.GroupLiveness | None = None  # once all have it

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        # Small agreements never wait for a GPU, and may wait for a slow link.
        self._control = dist.new_group(backend=GLOO, timeout=timedelta(seconds=WAIT_LIMIT_S))
        self._made = False
        hosts = {each.decode() for each in self.told(socket.gethostname().encode())}
        if len(hosts) > 1:
            raise UsageError(
                f"the processes of a group are on {len(hosts)} machines, and a group is one worker of one machine: start "
                "torchrun --standalone on each machine"
            )
        memory = self.share(group_liveness.GroupLiveness.make(self.size) if self.leads else b"")
        ours = group_liveness.GroupLiveness(memory, self.rank)
        self.told(b"")
        self._presence = ours
        if self.leads:
            os.unlink(memory)

    @staticmethod
    def of_environment() -> Group | None:
        """The group that this process is one rank of: of ps-worker --group, or of the process group that the script has made
        before. None: it is a worker of its own."""
        wanted = os.environ.get(GROUP, "0") not in ("", "0")
        made = dist.is_available() and dist.is_initialized()
        if not wanted and (not made or "NARROWS_PARENT_FD" in os.environ):
            return None  # copies of ps-worker without --group are workers, whatever group they make for themselves
        if (dist.get_world_size() if made else int(os.environ.get("WORLD_SIZE", "1"))) == 1:
            return None
        if not made:
            _make_group()
        group = Group()
        group._made = not made
        return group

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def close(self) -> None:
        """Where the script has no process group of its own, ours ends."""
        if self._made and dist.is_initialized():
            dist.destroy_process_group()

    # Agreements, on the CPU.

    def least(self, *values: int) -> list[int]:
        """The least of what the ranks have given, of each value."""
        return self._together(values, dist.ReduceOp.MIN)

    def sums(self, values: Sequence[int]) -> list[int]:
        return self._together(values, dist.ReduceOp.SUM)

    def _together(self, values: Sequence[int], how: Any) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        self._all_reduce(tensor, how)
        found: list[int] = tensor.tolist()
        return found

    def of_first(self, *values: int) -> list[int]:
        """The values that the first rank has given."""
        return self.sums(values if self.leads else [0] * len(values))

    def sum(self, value: float) -> float:
        """In float64, alike on all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        self._all_reduce(tensor)
        return tensor.item()

    def assemble(self, parts: torch.Tensor) -> None:
        """In memory of the host: each rank's part of it, zeros elsewhere, becomes all of it."""
        self._all_reduce(parts)

    def share(self, data: bytes) -> bytes:
        """The bytes that the first rank has given."""
        return self._from(0, data)

    def told(self, data: bytes) -> list[bytes]:
        """The bytes that each rank has given."""
        return [self._from(rank, data) for rank in range(self.size)]

    def _from(self, rank: int, data: bytes) -> bytes:
        mine = data if rank == self.rank else b""
        size = torch.tensor([len(mine)])
        self._broadcast(size, rank)
        found = (
            torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.zeros(int(size), dtype=torch.uint8)
        )
        if found.numel():
            self._broadcast(found, rank)
        return found.numpy().tobytes()

    def _all_reduce(self, tensor: torch.Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        self._only_here()
        with _others():
            self._wait(dist.all_reduce(tensor, how, self._control, async_op=True))

    def _broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        self._only_here()
        with _others():
            self._wait(dist.broadcast(tensor, rank, self._control, async_op=True))

    def _only_here(self) -> None:
        """A child process of a rank is none: what it sent would be taken for the rank's."""
        if os.getpid() != self._pid:
            raise NotAWorkerError("what all processes of a group do together")

    def _wait(self, work: Any) -> None:
        """Until all ranks have done it; after TOLD_S say which have not come."""
        if self._presence is not None:
            self._presence.come()
        try:
            work.wait(timedelta(seconds=group_liveness.TOLD_S))
        except RuntimeError:
            if work.is_completed():
                raise
            if self._presence is not None and (late := self._presence.missing()):
                say(late)
            work.wait()

    def waits(self) -> None:
        """This rank waits for a server, not for another rank."""
        if self._presence is not None:
            self._presence.wait()

    # Arrays, where they are. `slices`: the keys of each rank, as they lie in `whole`.

    def reduce(self, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        """The slice of this rank becomes the sum of all ranks'; the rest of `whole` may be anything afterwards."""
        self._only_here()
        with _others():
            if dist.get_backend() == GLOO or whole.device.type == "cpu":
                dist.all_reduce(whole)  # gloo's is twice as fast as its reduce to each owner
            else:
                self._all(dist.reduce, whole, slices)

    def spread(self, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        """Each rank's slice of `whole`, to all."""
        self._only_here()
        with _others():
            self._all(dist.broadcast, whole, slices)

    def _all(self, carry: Any, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        """Slices differ in length by a key or a shard, which no gather or scatter of NCCL allows."""
        works = [
            carry(whole[begin:end], rank, async_op=True) for rank, (begin, end) in enumerate(slices) if begin < end
        ]
        for work in works:
            work.wait()


def _make_group() -> None:
    """Make the process group of torch from the variables of torchrun, which ps-worker --group sets too.

    torchrun keeps one store for all lives of a group (torch 2.13, DynamicRendezvousHandler.next_rendezvous). gloo would find
    addresses of the life before there and wait for processes that have ended, so each life has keys of its own.
    """
    limit = timedelta(seconds=START_LIMIT_S)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store = PrefixStore(f"narrows-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else GLOO
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


@contextmanager
def _others() -> Iterator[None]:
    """Make one sentence of what torch raises where a rank has ended. It raises the same for all else that goes wrong between
    them, such as two ranks on one GPU."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = " ".join(str(error).partition("Exception raised from")[0].split())[:WHY_MAX]
        raise GroupEndedError(
            f"another process of this group has ended, or they cannot do together what they are to ({text})"
        ) from error
