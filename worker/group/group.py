"""Collective operations of the processes of one machine that are one worker.

torch.distributed carries them, by NCCL between GPUs, and by gloo between processes that share a GPU. Between CPUs gradients
and parameters go through memory that the processes share (shared_gradients.py), and gloo carries agreements.

Rules
- All ranks call the same methods in the same order. If one rank alone receives an event, it first brings the event to
  `EventWait.agree`.
- A rank that ends ends its group: the next call of the other ranks raises. A rank that hangs is named
  (group_liveness.py).
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

from narrows.protocols.config.key_ranges import Keys, split
from narrows.protocols.errors import NarrowsError, UsageError
from narrows.worker.group import group_liveness, shared_gradients
from narrows.worker.group.shared_gradients import SharedGradients
from narrows.worker.runtime.child_process import NotAWorkerError
from narrows.worker.runtime.config import WorkerConfig
from narrows.worker.runtime.device import CUDA, device, local_rank
from narrows.worker.runtime.launcher_pipe import say_here

START_LIMIT_S = 600.0  # all ranks have started within this
WAIT_LIMIT_S = 7200.0  # a rank's wait for the others: longer than any wait of one of them
GLOO = "gloo"
CPU = "cpu"  # in place of the name of a GPU
DUPLICATE = "Duplicate GPU"  # in NCCL's error
WHY_MAX = 500  # characters of torch's error in ours


def shares(shards: int, ranks: int) -> list[Keys]:
    """Return for each rank its first shard and the one after its last.

    Each has consecutive shards, as many as any other or one more. The first ranks have one more: what rank 0 exchanges
    with a shard need not go through another process.
    """
    return [(shards - after, shards - first) for first, after in reversed(split(shards, ranks))]


class GroupEndedError(NarrowsError):
    """Another process of this group has ended, and reports why if it can; or torch cannot do a collective operation."""


class Group:
    """All ranks of torch's default process group.

    Raises UsageError if the processes are on several machines.

    Attributes:
        rank: the rank of this process. Rank 0 speaks with the server.
        size: the number of processes.
    """

    _presence: group_liveness.GroupLiveness | None = None  # None until all ranks have opened its memory
    _shared: SharedGradients | None = None  # None on GPUs, and where the system has no memory for them

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
    def of(config: WorkerConfig) -> Group | None:
        """Return the group of the process with this config; None if the process is a worker of its own.

        It is the group of ps-worker --group, or the process group that the script has made before.
        """
        made = dist.is_available() and dist.is_initialized()
        if not config.group and (not made or config.parent_fd >= 0):
            return None  # copies that ps-worker starts without --group are workers, also if the script makes a group
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
        """Destroy the process group, unless the script has made it."""
        if self._made and dist.is_initialized():
            dist.destroy_process_group()

    # Agreements, on the CPU.

    def least(self, *values: int) -> list[int]:
        """Return, for each value, the smallest of all ranks' values."""
        return self._together(values, dist.ReduceOp.MIN)

    def sums(self, values: Sequence[int]) -> list[int]:
        """Return, for each value, the sum of all ranks' values."""
        return self._together(values, dist.ReduceOp.SUM)

    def _together(self, values: Sequence[int], how: Any) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        self._all_reduce(tensor, how)
        found: list[int] = tensor.tolist()
        return found

    def of_first(self, *values: int) -> list[int]:
        """Return the values of rank 0."""
        return self.sums(values if self.leads else [0] * len(values))

    def decided_by_first(self, value: bool) -> bool:
        """Return the value of rank 0."""
        return bool(self.of_first(value)[0])

    def sum(self, value: float) -> float:
        """Return the sum of all ranks' values, in float64 and the same on all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64)
        self._all_reduce(tensor)
        return tensor.item()

    def assemble(self, parts: torch.Tensor) -> None:
        """Sum `parts`, on the host, over the ranks in place: each rank fills its part, and zeros elsewhere."""
        self._all_reduce(parts)

    def share(self, data: bytes) -> bytes:
        """Return the bytes of rank 0."""
        return self._from(0, data)

    def told(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, by rank."""
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

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self.least(0)

    def _all_reduce(self, tensor: torch.Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        self._only_here()
        with _others():
            self._wait(dist.all_reduce(tensor, how, self._control, async_op=True))

    def _broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        self._only_here()
        with _others():
            self._wait(dist.broadcast(tensor, rank, self._control, async_op=True))

    def _only_here(self) -> None:
        """Raise NotAWorkerError in a child process of a rank, whose messages would be taken for the rank's."""
        if os.getpid() != self._pid:
            raise NotAWorkerError("what all processes of a group do together")

    def _wait(self, work: Any) -> None:
        """Wait for a collective operation. After TOLD_S print which ranks have not reached it."""
        if self._presence is not None:
            self._presence.come()
        try:
            work.wait(timedelta(seconds=group_liveness.TOLD_S))
        except RuntimeError:
            if work.is_completed():
                raise
            if self._presence is not None and (late := self._presence.missing()):
                say_here(late)
            work.wait()

    def waits(self) -> None:
        """Note that this rank waits for a server, so that the others do not report it as hung."""
        if self._presence is not None:
            self._presence.wait()

    # Collective operations on arrays, on their device. `slices`: the keys [begin, end) of each rank in `whole`.

    def gradients(self, count: int, on: torch.device) -> torch.Tensor:
        """Return zeros, float32[count], in which this rank puts its gradients for `reduce`.

        On CPUs the other ranks read them there. So after `reduce` all ranks meet before one of them writes to it again.
        """
        if on.type != CPU:
            return torch.zeros(count, device=on)
        file, why = -1, ""
        try:
            file = shared_gradients.make(self.size, count) if self.leads else -1
        except OSError as error:
            why = str(error)
        path = self.share(b"/proc/%d/fd/%d" % (os.getpid(), file) if file >= 0 else b"")
        try:
            file = os.open(path, os.O_RDWR) if not self.leads and path else file
            self._shared = SharedGradients(file, self.rank, self.size, count) if path else None
        except (OSError, ValueError) as error:
            why = str(error)
        everywhere = self.least(int(self._shared is not None))[0]
        if file >= 0:
            os.close(file)
        if everywhere and self._shared is not None:
            return self._shared.own
        if why:
            say_here(f"the processes of the group share no memory ({why}): gloo sums")
        self._shared = None
        return torch.zeros(count)

    def reduce(self, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        """Sum this rank's slice of `whole` over all ranks, in place. The rest of `whole` is undefined afterwards.

        Args:
            whole: as `gradients` returned it.
            slices: of all ranks.
        """
        if self._shared is not None:
            self.meet()
            return self._shared.sum(*slices[self.rank])
        self._only_here()
        with _others():
            if dist.get_backend() == GLOO or whole.device.type == CPU:
                dist.all_reduce(whole)  # gloo's is twice as fast as its reduce to each owner
            else:
                self._all(dist.reduce, whole, slices)

    def spread(self, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        """Copy each rank's slice of `whole`, float32[count], to all ranks, in place."""
        if self._shared is not None:
            self._shared.show(slices, whole)
            self.meet()
            return self._shared.take(slices, whole)
        self._only_here()
        with _others():
            self._all(dist.broadcast, whole, slices)

    def _all(self, carry: Any, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        """Start one operation for each slice: their lengths differ, which NCCL's gather and scatter do not allow."""
        works = [
            carry(whole[begin:end], rank, async_op=True) for rank, (begin, end) in enumerate(slices) if begin < end
        ]
        for work in works:
            work.wait()


def _make_group() -> None:
    """Make the process group of torch from the variables of torchrun, which ps-worker --group sets too.

    torchrun keeps one store for all restarts of a group (torch 2.13, DynamicRendezvousHandler.next_rendezvous). gloo
    would find addresses from before the restart in it, and wait for processes that have ended. So each restart has keys
    of its own.
    """
    limit = timedelta(seconds=START_LIMIT_S)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    store = PrefixStore(f"narrows-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    store.set(f"device {rank}", _own_gpu())
    devices = [store.get(f"device {each}").decode() for each in range(size)]
    dist.init_process_group(backend_of(devices), store=store, rank=rank, world_size=size, timeout=limit)


def _own_gpu() -> str:
    """Return a name of the GPU of this process that all processes of the machine agree on; CPU without one.

    Raises UsageError if there is no such GPU.
    """
    here = device()
    if here.type != CUDA or not torch.cuda.is_available():
        return CPU
    number, there = here.index or 0, torch.cuda.device_count()
    if number >= there:
        raise UsageError(
            f"process {local_rank()} of the group has the device {here}, and it sees {there} GPU{'s' * (there > 1)}: leave out "
            "--device, and the processes share them"
        )
    return str(torch.cuda.get_device_properties(number).uuid)


def backend_of(devices: Sequence[str]) -> str:
    """Return the backend of torch.distributed for a group of this machine.

    gloo carries sums between GPUs through the host's memory, and the console says why NCCL does not: it refuses two
    processes on one GPU ("Duplicate GPU detected").

    Args:
        devices: for each rank the name of its GPU, or CPU.
    """
    size, gpus = len(devices), {*devices} - {CPU}
    if not gpus:
        return GLOO
    without, shared = devices.count(CPU), f"{size} processes of the group share {len(gpus)} GPU{'s' * (len(gpus) > 1)}"
    reasons = (
        (not dist.is_nccl_available(), "this build of torch has no NCCL"),
        (without, f"{without} of the {size} processes of the group have no GPU"),
        (size > len(gpus), shared),
    )
    why = next((why for found, why in reasons if found), "")
    if why and not local_rank():
        say_here(f"{why}: gloo sums through the host")
    return GLOO if why else "cpu:gloo,cuda:nccl"


@contextmanager
def _others() -> Iterator[None]:
    """Turn torch's error after the end of another rank into GroupEndedError, one sentence.

    Torch raises the same error for other failures between ranks, so the sentence quotes it.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        text = " ".join(str(error).partition("Exception raised from")[0].split())[:WHY_MAX]
        if DUPLICATE in text:
            raise GroupEndedError(
                f"NCCL refuses two processes of a group on one GPU ({text}): give each its own, or leave the process group to "
                "Narrows, which then makes it with gloo"
            ) from error
        raise GroupEndedError(
            f"another process of this group has ended, or a collective operation failed ({text})"
        ) from error
