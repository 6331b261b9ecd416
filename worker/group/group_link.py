"""The link of a group: all ranks send and receive through the session of rank 0. To the servers they are one member.

How it works

    shards ── ZeroMQ ── GroupLink (rank 0) ── Unix socket ── GroupMemberLink (rank 1)
                                           ── Unix socket ── GroupMemberLink (rank 2)

1. Rank 0 joins the run (`joined`), opens a Unix socket, and shares its address and a random key with the other ranks.
2. Each other rank dials the socket, proves by the key that it is of the group, and sends its rank. `admit` waits for
   all.
3. A rank's messages to a shard go over the socket to rank 0, which sends them to the shard.
4. `GroupLink._deliver` passes an event of a shard to the rank that has the shard's keys, and an event of the run to
   all.
5. A rank that has finished sends BYE. If a connection ends without BYE, the session fails with GroupEndedError.

Rules
- All ranks receive the events of the whole run in the same order.
- The socket is in a folder that no other user can open.
- If a rank ends without BYE, the session ends. If rank 0 ends, the other ranks end.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, cast

from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.effects import MemberEffect, MemberFailed, MemberWelcomed
from narrows.protocols.errors import BY_EXIT_CODE, NarrowsError
from narrows.protocols.runtime.network.sockets import Drops
from narrows.protocols.wire import HEADER_BYTES_MAX, PAYLOAD_BYTES_MAX, decode, encode, pack, unpack
from narrows.worker.group.group import Group, GroupEndedError, shares
from narrows.worker.runtime.launcher_pipe import say_here
from narrows.worker.runtime.member_link import Command, LinkCommands, LinkEvents, MemberLink

# Events that rank 0 passes on. Their fields travel as one frame; messages among them follow as frames of their own.
EVENTS: tuple[type[Any], ...] = (
    *(
        e.MemberStarted,
        e.MemberResharded,
        e.PushesPaused,
        e.BuffersRequested,
        e.BuffersArrived,
        e.RangeArrived,
        e.AgreementArrived,
        e.ServerStops,
        e.MemberLeft,
        e.LinkMeasured,
        e.MemberFailed,
    ),
    *(e.GiveWeights, e.StatePart, e.StateArrived, e.MasterArrived, e.PushSettled, e.MomentsArrived),
)
OF_SHARD = (e.GiveWeights, e.StatePart, e.StateArrived, e.MasterArrived, e.PushSettled, e.MomentsArrived)
MESSAGES = ("state", "parts")  # fields of events that are messages
BYE = -1  # in place of a shard's number: this rank has finished
LIMIT_S = 60.0  # all ranks dial within this


def owner(shard: int, shards: int, ranks: int) -> int:
    """Return the rank that has this shard's keys."""
    return next(rank for rank, (begin, end) in enumerate(shares(shards, ranks)) if begin <= shard < end)


def _send(to: Connection, head: Sequence[Any], messages: Sequence[m.Message]) -> None:
    frames = [encode(message) for message in messages]
    to.send_bytes(pack([*head, [len(each) for each in frames]]))
    for each in frames:
        for frame in each:
            to.send_bytes(frame)


def _receive(of: Connection) -> tuple[list[Any], list[m.Message]]:
    head: Any = unpack(of.recv_bytes(HEADER_BYTES_MAX), HEADER_BYTES_MAX)
    counts = head.pop()
    return head, [decode([of.recv_bytes(PAYLOAD_BYTES_MAX) for _ in range(count)]) for count in counts]


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _hang_up(connection: Connection) -> None:
    """Shut the connection down, so that the thread that reads from it ends and closes it."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as there:
        there.shutdown(socket.SHUT_RDWR)


def send_event(to: Connection, event: Any) -> None:
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    found = [values.pop(name) for name in MESSAGES if name in values]
    messages = found[0] if found and isinstance(found[0], tuple) else found
    _send(to, [EVENTS.index(type(event)), values], messages)


def receive_event(of: Connection) -> Any:
    (kind, values), messages = _receive(of)
    names = {each.name for each in fields(EVENTS[kind])}
    values = {name: _as_tuples(value) for name, value in values.items()}
    if "state" in names:
        values["state"] = messages[0]
    elif "parts" in names:
        values["parts"] = tuple(messages)
    return EVENTS[kind](**values)


class GroupLink(MemberLink):
    """The link of rank 0, which has the session."""

    ranks: Sequence[Connection] = ()  # connections of the other ranks, from rank 1 on
    shards = 1  # number of shards of the run

    def open(self, group: Group) -> bytes:
        """Open the socket for the other ranks. Returns its packed address and key."""
        self.folder = tempfile.mkdtemp(prefix="narrows-")
        key = os.urandom(32)
        self.listener = Listener(os.path.join(self.folder, "group"), "AF_UNIX", backlog=group.size, authkey=key)
        return pack([self.listener.address, key])

    def admit(self, group: Group) -> None:
        """Wait until all other ranks have dialled. Raises NarrowsError after LIMIT_S."""
        found: dict[int, Connection] = {}
        over = threading.Event()

        def accept() -> None:
            while len(found) < group.size - 1 and not over.is_set():
                with suppress(AuthenticationError, EOFError, OSError):  # a process that is not of this group
                    one = self.listener.accept()
                    found[int.from_bytes(one.recv_bytes(8), "big")] = one

        thread = threading.Thread(target=accept, name="narrows-group", daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        over.set()
        self.listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        missing = group.size - 1 - len(found)
        if missing:
            raise NarrowsError(f"processes of this group that did not dial within {LIMIT_S:.0f} s: {missing}")
        self.ranks = [found[rank] for rank in sorted(found)]
        for rank, one in enumerate(self.ranks, 1):
            threading.Thread(target=self._hear_rank, args=(rank, one), name=f"narrows-rank-{rank}", daemon=True).start()

    def _hear_rank(self, rank: int, one: Connection) -> None:
        try:
            while True:
                (shard,), messages = _receive(one)
                if shard == BYE:
                    return
                self.send(shard, messages)
        except (EOFError, OSError):
            self._fail(GroupEndedError(f"process {rank} of this group has ended"))

    def _deliver(self, event: MemberEffect) -> None:
        if isinstance(event, (MemberWelcomed, e.MemberResharded)):
            self.shards = len(event.ports)
        if isinstance(event, OF_SHARD):
            rank = owner(event.shard, self.shards, len(self.ranks) + 1)
            if rank:
                self._tell(rank, event)
            else:
                super()._deliver(event)
            return
        for rank in range(1, len(self.ranks) + 1):
            self._tell(rank, event)
        super()._deliver(event)

    def close(self) -> None:
        super().close()
        for one in self.ranks if os.getpid() == self._pid else ():
            _hang_up(one)

    def _tell(self, rank: int, event: MemberEffect) -> None:
        with suppress(OSError):  # the rank has ended, which the thread that reads from it reports
            send_event(self.ranks[rank - 1], event)

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if isinstance(error, NarrowsError) and not isinstance(error, GroupEndedError):
            for rank in range(1, len(self.ranks) + 1):
                self._tell(rank, MemberFailed(error.exit_code, str(error)))


class GroupMemberLink(LinkEvents, LinkCommands):
    """The link of any other rank, through the session of rank 0."""

    bytes_up = bytes_down = 0  # rank 0 counts the bytes of all ranks

    def __init__(self, address: str, key: bytes, rank: int) -> None:
        super().__init__()
        self.address, self.drops = address, Drops(say_here)
        self._hub = Client(address, "AF_UNIX", authkey=key)
        self._hub.send_bytes(rank.to_bytes(8, "big"))
        threading.Thread(target=self._hear, name="narrows-group", daemon=True).start()

    def _hear(self) -> None:
        error: NarrowsError = GroupEndedError("the first process of this group has ended")
        with suppress(EOFError, OSError):
            while not isinstance(event := receive_event(self._hub), MemberFailed):
                self._deliver(event)
            error = BY_EXIT_CODE.get(event.code, NarrowsError)(event.text)
        self._fail(error)

    def send(self, shard: int, messages: Sequence[m.Message]) -> None:
        if messages:
            self._tell(shard, messages)

    def _tell(self, shard: int, messages: Sequence[m.Message]) -> None:
        self._only_here()
        with suppress(OSError):  # rank 0 has ended, which `take` reports
            _send(self._hub, [shard], messages)

    def call(self, command: Command) -> None:
        """Do nothing: rank 0 gives the same command for all ranks."""

    def leave(self, clock: int) -> None:
        if clock >= 0:  # after a failure no BYE is sent, so that rank 0 ends too
            self._tell(BYE, [])

    def close(self) -> None:
        if os.getpid() == self._pid:
            _hang_up(self._hub)


def joined(group: Group, let_in: Callable[[], tuple[MemberLink, MemberWelcomed]]) -> tuple[MemberLink, MemberWelcomed]:
    """Join the run with all ranks of a group.

    Args:
        group: the group.
        let_in: joins the run; called in rank 0 only.

    Returns:
        The link of this rank, and the place of the group in the run.

    Raises:
        NarrowsError: the run refused rank 0. All ranks raise the same error.
    """
    if not group.leads:
        answer: Any = unpack(group.share(b""), HEADER_BYTES_MAX)
        code, text, place, values = answer
        if text:
            raise BY_EXIT_CODE.get(code, NarrowsError)(text)
        where: Any = unpack(place)
        # GroupMemberLink has all methods that an engine calls.
        return cast(MemberLink, GroupMemberLink(where[0], where[1], group.rank)), MemberWelcomed(
            **{name: _as_tuples(v) for name, v in values.items()}
        )
    group.waits()
    try:
        hub, found = let_in()
        assert isinstance(hub, GroupLink)
    except NarrowsError as error:
        group.share(pack([error.exit_code, str(error), b"", {}]))
        raise
    group.share(pack([0, "", hub.open(group), {each.name: getattr(found, each.name) for each in fields(found)}]))
    hub.admit(group)
    return hub, found
