"""Groups whose ranks are threads of this process. Each rank has a session, and all use the link of the first rank."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit import scripts
from kit.in_process import Cluster, together
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import MemberEffect, MemberResharded, MemberStarted, MemberWelcomed
from narrows.worker import session
from narrows.worker.group.group import Group
from narrows.worker.group.group_link import OF_SHARD, owner
from narrows.worker.runtime.member_link import Command, LinkCommands

LIMIT_S = 60.0
_here = scripts._here


class Table:
    """The meeting point of the ranks of one group, for collective operations."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=LIMIT_S)
        self.slots: list[Any] = [None] * ranks
        self.link: Any = None  # of the first rank
        self.met = 0

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        self.met += rank == 0
        return found


class ThreadGroup(Group):
    """A group of threads. A `Table` replaces torch.distributed."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank, self.size = table, rank, len(table.slots)

    def close(self) -> None:
        """Do nothing: there is no process group."""

    def _all_reduce(self, tensor: torch.Tensor, how: Any = dist.ReduceOp.SUM) -> None:
        first, *others = self.table.exchange(self.rank, tensor.clone())
        found = first.clone()
        for each in others:
            found = torch.minimum(found, each) if how == dist.ReduceOp.MIN else found + each
        tensor.copy_(found)

    def _broadcast(self, tensor: torch.Tensor, rank: int) -> None:
        tensor.copy_(self.table.exchange(self.rank, tensor.clone())[rank])

    def gradients(self, count: int, on: torch.device) -> torch.Tensor:
        return torch.zeros(count)

    def reduce(self, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        begin, end = slices[self.rank]
        before = whole.clone()
        self._all_reduce(whole)
        before[begin:end] = whole[begin:end]
        whole.copy_(torch.full_like(whole, float("nan")))  # what is not ours may be anything
        whole[begin:end] = before[begin:end]

    def spread(self, whole: torch.Tensor, slices: Sequence[Keys]) -> None:
        for rank, (begin, end) in enumerate(slices):
            if begin < end:
                self._broadcast(whole[begin:end], rank)


class Routed(deque[MemberEffect]):
    """The events of the first rank's link. An event of a shard goes to the rank that has its keys."""

    def __init__(self, ranks: Sequence[deque[MemberEffect]], shards: int) -> None:
        super().__init__()
        self.ranks, self.shards = ranks, shards

    def append(self, event: MemberEffect) -> None:
        if isinstance(event, (MemberStarted, MemberResharded)):
            self.shards = len(event.ranges)
        if isinstance(event, OF_SHARD):
            rank = owner(event.shard, self.shards, len(self.ranks) + 1)
            deque.append(self.ranks[rank - 1] if rank else self, event)
            return
        for one in self.ranks:
            one.append(event)
        super().append(event)


class RankLink(LinkCommands):
    """The link of a rank other than the first."""

    bytes_up = bytes_down = 0

    def __init__(self, first: scripts.Link, events: deque[MemberEffect]) -> None:
        self.first, self.events, self.drops = first, events, first.drops

    def send(self, shard: int, messages: Any) -> None:
        self.first.send(shard, messages)

    def call(self, command: Command) -> None:
        """Do nothing: the link of the first rank sends the command for all ranks."""

    def take(self, timeout_s: float) -> MemberEffect | None:
        return self.first.next_of(self.events, timeout_s)

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


def _joined(group: ThreadGroup, let_in: Callable[[], tuple[Any, MemberWelcomed]]) -> tuple[Any, MemberWelcomed]:
    table = group.table
    if group.leads:
        link, _ = let_in()
        queues = [deque[MemberEffect]() for _ in range(group.size - 1)]
        link.events = Routed(queues, len(link.joined.ports))
        table.link = link, queues
    group.share(b"")
    first, queues = table.link
    return first if group.leads else RankLink(first, queues[group.rank - 1]), first.joined


class Groups:
    """One cluster whose members are groups of these sizes."""

    def __init__(self, cluster: Cluster, sizes: Sequence[int]) -> None:
        self.cluster, self.sizes = cluster, sizes
        self.ranks = [(member, rank) for member, size in enumerate(sizes) for rank in range(size)]
        self.sessions: dict[tuple[int, int], session.RunSession] = {}
        self.tables: list[Table] = []
        for member in range(len(sizes)):
            self.join(member)

    def join(self, member: int) -> None:
        """Let the ranks of this member join, one after the other. Its group meets at its own table."""
        size = self.sizes[member]
        self.tables.append(Table(size))

        def open_session(rank: int) -> None:
            _here.group = ThreadGroup(self.tables[-1], rank) if size > 1 else None
            self.sessions[member, rank] = session.RunSession("tcp://in-process:1")

        together(open_session, size)

    @property
    def here(self) -> tuple[int, int]:
        """Return member and rank of the calling thread."""
        return next(key for key, each in self.sessions.items() if each is _here.session)

    def together(self, script: Callable[[int, int], Any]) -> dict[tuple[int, int], Any]:
        """Run script(member, rank) for each rank, each in its own thread."""

        def work(index: int) -> Any:
            torch.set_num_threads(1)
            _here.session = self.sessions[self.ranks[index]]
            return script(*self.ranks[index])

        return dict(zip(self.ranks, together(work, len(self.ranks)), strict=True))


@contextmanager
def groups(settings: Settings, sizes: Sequence[int], cluster: Cluster | None = None) -> Iterator[Groups]:
    cluster = cluster or Cluster(settings)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MemberLink", "GroupLink"):
            patch.setattr(session, name, lambda address, token, *rest: scripts.Link(cluster, token))
        patch.setattr(session, "current", lambda: _here.session)
        patch.setattr(session, "through_first", _joined)
        patch.setattr(Group, "of", staticmethod(lambda config: getattr(_here, "group", None)))
        yield Groups(cluster, sizes)
