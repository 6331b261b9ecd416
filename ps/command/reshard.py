"""How a user has the keys of a running ps-serve cut over another number of shards: `ps-serve shards N`, on the same machine.

Rules
- A request comes by a Unix socket, whose other end must be a process of the same user: it starts processes here.
- Process 0 decides (ps/coordinator/resharding.py). It says how many shards there are and are to be; who is missing is started,
  who is too many is let go. So it may say that twice, or begin again in between.
- A process that is to come and fails is no reason to end a run: the move is called off.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from dataclasses import replace
from typing import Any, Protocol

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError, UnreachableError, UsageError
from narrows.protocols.runtime.network.hosts import peer_uid
from narrows.protocols.runtime.processes.children import StartedChild
from narrows.ps.command.restart_policy import RestartPolicy

LINE_MAX = 4096  # bytes of a request or an answer
ASK_S = 5.0  # who has connected says what it wants within this
PAUSE_S = 0.1  # after a request could not be accepted
STAY = "0"  # in the place of a number of shards: the keys stay where they are


def _door(port: int) -> str:
    """An address that ends with its process, and is nobody else's on this machine."""
    return f"\0narrows-shards-{port}"


def ask(port: int, shards: int) -> str:
    """Have the ps-serve at this port move; return its sentence once that is done. Raises NarrowsError where it is not."""
    if sys.platform != "linux":
        raise UsageError("shards: a running ps-serve is asked by a Unix socket without a name, which Linux alone has")
    with socket.socket(socket.AF_UNIX) as line:
        try:
            line.connect(_door(port))
            if os.getuid() not in (0, uid := peer_uid(line)):
                raise UsageError(f"shards: user {uid} has the ps-serve at port {port}: ask as that user, or as root")
            line.sendall(json.dumps({"shards": shards}).encode() + b"\n")
            with line.makefile("rb") as stream:
                answer = json.loads(stream.readline(LINE_MAX) or b"{}")
        except OSError:
            text = f"no ps-serve serves port {port} on this machine: name its address with --at"
            raise UnreachableError(text) from None
    if not answer:
        raise NarrowsError("ps-serve has ended, or takes no request of another user")
    if answer["code"]:
        raise NarrowsError(answer["text"])
    return str(answer["text"])


class ShardProcesses(Protocol):
    """The part of a `ShardSupervisor` that moves of keys start and end processes by."""

    settings: Settings
    address: str  # that workers were told
    told: dict[str, Any]  # what every shard is told
    follows: dict[int, str]  # shards that copy others
    shards: dict[int, StartedChild]
    done: set[int]
    lives: RestartPolicy

    def start_shard(self, index: int) -> None: ...
    def forget(self, index: int) -> None: ...
    def write_ready(self) -> None: ...


class ReshardRequest:
    """The moves of one ps-serve. `target`: how many shards there are to be."""

    def __init__(self, cluster: ShardProcesses) -> None:
        self.cluster = cluster
        self.target = cluster.settings.shards
        self.requests: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self.client: socket.socket | None = None  # that waits for `wanted`
        self.wanted = 0
        self.going: set[int] = set()  # shards that are let go, and have not ended
        self.away: dict[int, str] = {}  # shards that are on other machines, or to come there, with their hosts

    @property
    def here(self) -> int:
        """How many shards with keys are processes of this ps-serve."""
        shards = self.cluster.settings.shards
        return shards - sum(shard < shards for shard in self.away)

    # Requests.

    def listen(self, port: int) -> None:
        """Take requests from now on, where the system has such sockets."""
        if sys.platform != "linux":
            return
        door = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # two that bind one port on two addresses: the first is asked
            door.bind(_door(port))
            door.listen()
            threading.Thread(target=self._hear, args=(door,), daemon=True).start()

    def _hear(self, door: socket.socket) -> None:
        while True:
            try:
                line, _ = door.accept()
            except OSError:  # whoever dialled has gone, or this process has no descriptor left
                time.sleep(PAUSE_S)
                continue
            try:
                line.settimeout(ASK_S)
                request = json.loads(line.recv(LINE_MAX)) if peer_uid(line) in (0, os.getuid()) else {}
                self.requests.put((max(1, int(request["shards"])), line))
            except (OSError, ValueError, KeyError, TypeError):
                line.close()

    def turn(self) -> None:
        """Take up the next request."""
        if self.client is None and not self.requests.empty():
            self.wanted, self.client = self.requests.get()
            if self.cluster.told["replicas"] or self.cluster.follows:
                return self._answer("a server with a standby keeps its shards: its standby has a process for each", 2)
            self._say(str(self.wanted))

    def _say(self, line: str) -> None:
        self.cluster.shards[0].write(line)

    def _answer(self, text: str, code: int) -> None:
        if self.client is not None:
            with contextlib.suppress(OSError), self.client:
                self.client.sendall(json.dumps({"text": text, "code": code}).encode() + b"\n")
            self.client = None

    # Events of processes.

    def bound(self, index: int) -> None:
        """Process 0 is another one; a request may have been lost with the one before."""
        if not index and self.client is not None:
            self._say(str(self.wanted))

    def heard(self, shards: int, target: int, text: str, away: dict[str, str]) -> None:
        """Process 0 has this many shards and is to have so many; some are `away`, by their numbers."""
        cluster, self.target = self.cluster, target
        self.away = {int(shard): host for shard, host in away.items()}
        moved = shards != cluster.settings.shards
        cluster.settings = replace(cluster.settings, shards=shards)
        for index in [index for index in cluster.shards if index >= max(shards, target)]:
            if index not in self.going:
                self._let_go(index, killed=not moved)
        for index in range(max(shards, target)):
            if index not in cluster.shards and index not in self.away:
                cluster.start_shard(index)
        if moved:
            cluster.lives.over(shards)
            cluster.write_ready()
        if target == shards and (text or shards == self.wanted):
            self._answer(text or f"{shards} shards", int(shards != self.wanted))

    def _let_go(self, index: int, killed: bool) -> None:
        """One that had keys ends by itself once it knows; one that never had any knows nothing of it."""
        self.going.add(index)
        shard = self.cluster.shards[index]
        shard.kill() if killed else shard.close_stdin()

    def strange(self, index: int) -> bool:
        """This shard has no keys: it is to come, or is let go."""
        return index >= self.cluster.settings.shards

    def exited(self, index: int) -> bool:
        """Whether the run goes on without this shard, which has ended."""
        if not self.strange(index) and index not in self.going:
            return False
        self.cluster.forget(index)
        if index in self.going:
            self.going.remove(index)
            if index < max(self.target, self.cluster.settings.shards):
                self.cluster.start_shard(index)
        else:
            self._say(STAY)
        return True
