"""Resharding on request of the user: `ps-serve shards N` cuts the keys of a running ps-serve on this machine anew.

How it works

    ps-serve shards N --Unix socket--> ReshardRequest --"N" on stdin--> shard 0
                                              ^                            |
                      starts and ends shards  +---- shards, target, away --+

Rules
- A request arrives on a Unix socket. Its sender must be a process of the same user, or of root, because the request
  starts processes here.
- Shard 0 decides (ps/coordinator/resharding.py). It reports the number of shards with keys and the target; the
  supervisor starts the shards that are missing and ends the ones that are too many. So shard 0 may repeat its report,
  or begin again in between.
- A new shard that fails does not end the run: the resharding is called off.
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
from typing import Protocol

from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import NarrowsError, UnreachableError, UsageError
from narrows.protocols.runtime.network.hosts import peer_uid
from narrows.protocols.runtime.processes.children import StartedChild
from narrows.ps.command.restart_policy import RestartPolicy
from narrows.ps.process.config import ServerConfig

LINE_MAX = 4096  # bytes of a request or an answer
ASK_S = 5.0  # a client must send its request within this time of connecting
PAUSE_S = 0.1  # wait after a connection could not be accepted
STAY = "0"  # sent to shard 0 in the place of a number of shards: call the resharding off


def _door(port: int) -> str:
    """Return the abstract Unix address of the ps-serve at this port. The address vanishes with its process."""
    return f"\0narrows-shards-{port}"


def ask(port: int, shards: int) -> str:
    """Ask the ps-serve at this port to reshard, and wait until it has.

    Args:
        port: the port of shard 0.
        shards: the number of shards to cut the keys over.

    Returns:
        The server's sentence for the user.

    Raises:
        NarrowsError: no such server, or the resharding was refused or called off.
    """
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
    """The part of a `ShardSupervisor` by which resharding starts and ends processes."""

    settings: Settings
    address: str  # printed for workers
    config: ServerConfig  # what every shard is told
    follows: dict[int, str]  # by shard of a standby, the address of the shard that it copies
    shards: dict[int, StartedChild]
    done: set[int]  # shards that have sent "done"
    restart_policy: RestartPolicy

    def recut(self, shards: int) -> None: ...
    def start_shard(self, index: int) -> None: ...
    def forget(self, index: int) -> None: ...
    def write_ready(self) -> None: ...


class ReshardRequest:
    """The resharding of one ps-serve: requests of the user, and the shard processes that come and go."""

    def __init__(self, cluster: ShardProcesses) -> None:
        self.cluster = cluster
        self.target = cluster.settings.shards  # number of shards after the resharding; else the present number
        self.requests: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()  # (shards, client)
        self.client: socket.socket | None = None  # the client whose request is under way
        self.wanted = 0  # the number of shards that this client asked for
        self.going: set[int] = set()  # shards that were told to end and have not ended
        self.away: dict[int, str] = {}  # by shard on another machine, or about to start there, its host

    @property
    def here(self) -> int:
        """The number of shards with keys that are processes of this ps-serve."""
        shards = self.cluster.settings.shards
        return shards - sum(shard < shards for shard in self.away)

    # Requests.

    def listen(self, port: int) -> None:
        """Accept requests from now on, on Linux, which alone has abstract Unix sockets."""
        if sys.platform != "linux":
            return
        door = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # of two servers with one port on two addresses, the first gets the requests
            door.bind(_door(port))
            door.listen()
            threading.Thread(target=self._hear, args=(door,), daemon=True).start()

    def _hear(self, door: socket.socket) -> None:
        while True:
            try:
                line, _ = door.accept()
            except OSError:  # the client has hung up, or this process has no file descriptor left
                time.sleep(PAUSE_S)
                continue
            try:
                line.settimeout(ASK_S)
                request = json.loads(line.recv(LINE_MAX)) if peer_uid(line) in (0, os.getuid()) else {}
                self.requests.put((max(1, int(request["shards"])), line))
            except (OSError, ValueError, KeyError, TypeError):
                line.close()

    def turn(self) -> None:
        """Pass the next request on to shard 0, once the one before is answered."""
        if self.client is None and not self.requests.empty():
            self.wanted, self.client = self.requests.get()
            if self.cluster.config.replicas or self.cluster.follows:
                return self._answer("a server with a standby keeps its shards: its standby has a process for each", 2)
            self._send(str(self.wanted))

    def _send(self, line: str) -> None:
        self.cluster.shards[0].write(line)

    def _answer(self, text: str, code: int) -> None:
        if self.client is not None:
            with contextlib.suppress(OSError), self.client:
                self.client.sendall(json.dumps({"text": text, "code": code}).encode() + b"\n")
            self.client = None

    # Events of processes.

    def bound(self, index: int) -> None:
        """Repeat the request to a restarted shard 0: it may have been lost with the process before."""
        if not index and self.client is not None:
            self._send(str(self.wanted))

    def heard(self, shards: int, target: int, text: str, away: dict[str, str]) -> None:
        """Start and end shards by a report of shard 0.

        Args:
            shards: the number of shards with keys.
            target: the number that there shall be; equal to `shards` once the resharding is over.
            text: why a resharding was refused or called off, "" otherwise.
            away: by the number of a shard on another machine, its host.
        """
        cluster, self.target = self.cluster, target
        self.away = {int(shard): host for shard, host in away.items()}
        moved = shards != cluster.settings.shards
        cluster.recut(shards)
        for index in [index for index in cluster.shards if index >= max(shards, target)]:
            if index not in self.going:
                self._let_go(index, killed=not moved)
        for index in range(max(shards, target)):
            if index not in cluster.shards and index not in self.away:
                cluster.start_shard(index)
        if moved:
            cluster.restart_policy.finished(shards)
            cluster.write_ready()
        if target == shards and (text or shards == self.wanted):
            self._answer(text or f"{shards} shards", int(shards != self.wanted))

    def _let_go(self, index: int, killed: bool) -> None:
        """End a shard. A shard that had keys ends by itself; a shard that never had any is killed."""
        self.going.add(index)
        shard = self.cluster.shards[index]
        shard.kill() if killed else shard.close_stdin()

    def strange(self, index: int) -> bool:
        """Return True if this shard has no keys: it has not got them yet, or has given them up."""
        return index >= self.cluster.settings.shards

    def exited(self, index: int) -> bool:
        """Note the end of a shard's process. Return True if the run goes on without the shard."""
        if not self.strange(index) and index not in self.going:
            return False
        self.cluster.forget(index)
        if index in self.going:
            self.going.remove(index)
            if index < max(self.target, self.cluster.settings.shards):
                self.cluster.start_shard(index)
        else:
            self._send(STAY)
        return True
