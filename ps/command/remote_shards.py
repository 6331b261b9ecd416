"""ps-serve --join ADDR: this machine has shards of the server at ADDR.

How it works

    this machine                                  shard 0 of the server
      JoinLine  -- RemoteShardsOffer, each second --> |   how many shards, stay or go
                <-- RemoteShardsGrant --------------- |   which shards, how many there are and will be
      RemoteShardOffer.follow: starts and ends shard processes by the newest grant

1. `join` asks the server for its settings, and checks the flags of this machine.
2. `JoinLine`, a thread, sends the offer of this machine once a second, and hands each answer to the supervisor.
3. Shard 0 of the server decides (ps/coordinator/remote_shards.py). The supervisor starts the shards that a grant names.
   Keys move to them while workers train.
4. On Ctrl-C the offer says GO: the keys move back, and the supervisor ends when all its shards have. If this machine
   ends before that, the offer says GONE: its keys are lost.

Rules
- A dead shard replays its journal here, as on any machine. Its checkpoints are with the server.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from narrows.protocols import messages as m
from narrows.protocols.addresses import parse_address
from narrows.protocols.config.run_name import check_run_name, other_run
from narrows.protocols.config.settings import SHARDS_MAX, Settings, contradiction
from narrows.protocols.effects import NS
from narrows.protocols.errors import BY_EXIT_CODE, IncompatibleError, NarrowsError, ServerLostError, UsageError
from narrows.protocols.messages import RefuseCode, RemoteShardsWish
from narrows.protocols.runtime.network import encryption_cost
from narrows.protocols.runtime.network.awake_clock import AwakeClock
from narrows.protocols.runtime.network.hosts import reached
from narrows.protocols.runtime.network.loop import Loop
from narrows.protocols.runtime.network.sockets import LINGER_MS, Peer, Sockets
from narrows.protocols.runtime.processes.children import Event
from narrows.protocols.runtime.processes.scratch import ScratchFolder
from narrows.protocols.wire import decode, encode
from narrows.ps.command.console import say
from narrows.ps.command.one_port import OnePort
from narrows.ps.command.reshard import ReshardRequest, ShardProcesses
from narrows.ps.command.shard_supervisor import START_S, ShardSupervisor

SAY_MS = 1000  # from one offer to the next
LOST_S = 60.0  # a server that is silent for so long is lost; a dead shard 0 restarts long before
LEAVE_S = 600.0  # the keys must have moved back within this: a checkpoint of them travels twice
LINE = -8  # stands for the JoinLine in the place of a shard's index in events


class JoinLine:
    """A thread that repeats this machine's offer to the server, and receives the answers.

    Args:
        there: the address of the server.
        keys: the folder of the keys, "" for none.
        secret: the server's secret, which its processes share.
        join: the offer.
        hear: called with each answer, in this thread.
    """

    def __init__(
        self, there: str, keys: str, secret: str, join: m.RemoteShardsOffer, hear: Callable[[m.Message], None]
    ) -> None:
        from narrows.ps.process.access_control import AccessControl

        self.there, self.join, self.hear = there, join, hear
        gate = AccessControl(keys, "", secret, there)
        self.sockets = Sockets(known_as=gate.name_at, curve=gate.curve)
        self.loop = Loop(self.sockets, self._receive, lambda now_ns: self._send(), tick_ms=SAY_MS)
        self.thread = threading.Thread(target=self._main, name="narrows-line", daemon=True)
        self.thread.start()
        self.offer(join)

    def offer(self, join: m.RemoteShardsOffer) -> None:
        """Send this offer now, and repeat it from now on."""
        self.join = join
        self.loop.call(self._send)

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(1 + LINGER_MS / 1000)

    # The thread of the line.

    def _main(self) -> None:
        with contextlib.closing(self.sockets):
            self.loop.run(time.monotonic_ns)

    def _send(self) -> None:
        self.sockets.send(self.there, encode(self.join))

    def _receive(self, peer: Peer, frames: list[m.Buffer]) -> None:
        with contextlib.suppress(NarrowsError):
            self.hear(decode(frames))


class RemoteShardOffer(ReshardRequest):
    """The resharding of a `RemoteShardSupervisor`: shard processes start and end as `RemoteShardsGrant` says."""

    def __init__(self, cluster: ShardProcesses) -> None:
        super().__init__(cluster)
        self.left: set[int] = set()  # shards that have ended as the server wanted
        self.had: set[int] = set()  # shards that have had keys

    def strange(self, index: int) -> bool:
        """Return False: `follow` has already counted the shards that are to come in the settings."""
        return False

    def bound(self, index: int) -> None:
        """Do nothing: shard 0 is on another machine, so no request of a user is pending here."""

    def exited(self, index: int) -> bool:
        if index not in self.going and index not in self.cluster.done:
            return False
        self.going.discard(index)
        self.cluster.forget(index)
        self.left.add(index)
        if self.cluster.address:
            self.cluster.write_ready()
        return True

    def follow(self, room: m.RemoteShardsGrant) -> None:
        """Start the shards that a grant names, and end the others."""
        cluster, most = self.cluster, max(room.shards, room.target)
        mine = range(room.first, min(room.first + room.count, most)) if room.first >= 0 else range(0)
        cluster.recut(max(1, most))
        self.had |= {index for index in mine if index < room.shards}
        for index in [index for index in cluster.shards if index not in mine and index not in self.going]:
            self._let_go(index, killed=index not in self.had or room.code not in (0, RefuseCode.NOT_A_MEMBER))
        for index in mine:
            if index not in cluster.shards and index not in self.left:
                cluster.start_shard(index)


class RemoteShardSupervisor(ShardSupervisor):
    """The supervisor of the shards that this machine has of another server.

    Args:
        there: the address of the server.
        told: the server's answer: its settings and its secret.
        keys: the folder of the keys, "" for none.
        host: the host at which others reach this machine.
        wanted: the number of shards that this machine offers to have.
        journal: shards keep journals.
        ready_file: the value of --ready-file, "" for none.
    """

    def __init__(
        self, there: str, told: dict[str, Any], keys: str, host: str, wanted: int, journal: bool, ready_file: str
    ) -> None:
        super().__init__(Settings(**told["settings"]), journal, ready_file)
        self.there, self.secret, self.keys, self.known_as, self.wanted = there, told["secret"], keys, host, wanted
        self.restart_policy.finished(wanted)
        self.reshard_request: RemoteShardOffer = RemoteShardOffer(self)
        self.room: m.RemoteShardsGrant | None = None  # the newest grant
        self.clock = AwakeClock()
        self.heard_ns = self.clock.now()
        self.line: JoinLine | None = None
        self.run_over = False

    def first_port(self, index: int) -> int:
        return self.port + index - self.room.first if self.port and self.room is not None else 0

    def process_0(self, index: int) -> str:
        return self.there

    def behind(self, one_port: OnePort) -> None:
        super().behind(one_port)
        self.known_as += f":{one_port.port}"

    def over(self, index: int) -> bool:
        """Return True if a dead shard needs no successor. While keys move back, every shard is needed."""
        return bool(self.errors or len(self.signals) > 1)

    def _join(self) -> None:
        """Offer shards to the server, as a new machine."""
        self.room, self.address = None, ""
        self.reshard_request.left.clear()
        self.reshard_request.had.clear()
        join = m.RemoteShardsOffer(os.urandom(16).hex(), self.known_as, self.wanted, -1, RemoteShardsWish.STAY)
        if self.line is not None:
            self.line.offer(join)
        else:
            hear: Callable[[m.Message], None] = lambda message: self.children.events.put((LINE, "heard", message))  # noqa: E731
            self.line = JoinLine(self.there, self.keys, self.secret, join, hear)

    def _taken(self, event: Event) -> None:
        match event:
            case (_, "heard", m.RemoteShardsGrant() as room):
                self._told(room)
            case (_, "heard", m.Refuse(_, _, _, text)):
                self.errors.append((LINE, ServerLostError.exit_code, f"another server is at {self.there}: {text}"))
            case (_, "heard", _):
                pass
            case _:
                if event[1] == "done":
                    self.run_over |= bool(event[2].get("over"))
                super()._taken(event)
                if event[1] == "ready":
                    self.open_port()
                if event[1] == "ready" and self.room is not None:
                    self.reshard_request.follow(self.room)

    def _told(self, room: m.RemoteShardsGrant) -> None:
        assert self.line is not None
        before = self.room
        if room.token != self.line.join.token or (before is not None and before.over):
            return
        self.heard_ns = self.clock.now()
        if before is not None and (room.epoch, room.version) < (before.epoch, before.version):
            return
        self.room = room
        if self.ready:
            self.reshard_request.follow(room)
        mine = range(room.first, room.first + room.count)
        if room.first >= 0 and self.line.join.first != room.first:
            self.line.offer(replace(self.line.join, first=room.first))
            if room.shards <= room.first:
                say(f"{_shards(mine)} of the server at {self.there} will be here: keys move while workers train")
        if not self.address and room.first >= 0 and mine.stop <= room.shards:
            self.address = self.there
            say(f"has {_shards(mine)} of the server at {self.there}; Ctrl-C moves the keys back")
            self.write_ready()

    def watch(self) -> int:
        """Show events until this machine has no shard left.

        Returns:
            The exit code.

        Raises:
            NarrowsError: the server is lost or refuses this machine, or a shard has failed.
        """
        self._join()  # the offer goes out before shards can start here: the run may end meanwhile
        assert self.line is not None
        start_by, leave_by = time.monotonic() + START_S, float("inf")
        while True:
            if not self.ready and time.monotonic() > start_by:
                raise NarrowsError(f"a shard process did not start within {START_S:.0f} s")
            if len(self.signals) > 1:
                say("ends at once: the keys here are lost, and the run goes back to its newest checkpoint", error=True)
                return 128 + self.signals[1]
            if self.signals and not self.stopping:
                self.stopping, leave_by = True, time.monotonic() + LEAVE_S
                self.line.offer(replace(self.line.join, wish=RemoteShardsWish.GO))
                say(f"the keys here move back to the server at {self.there}, while workers train; Ctrl-C ends at once")
            self._take(0.1)
            self._check(leave_by)
            if self.shards or not (self.run_over or (self.room is not None and self.room.over)):
                continue
            room = self.room
            again = room is not None and room.code == RefuseCode.NOT_A_MEMBER
            if self.run_over or room is None or room.code == 0 or (again and self.stopping):
                had = (
                    "the keys that were here are with other shards" if self.reshard_request.had else "no keys were here"
                )
                say("the run is over" if self.run_over else had)
                return 0
            if not again:
                raise BY_EXIT_CODE.get(room.code, NarrowsError)(f"{self.there}: {room.text}")
            say(f"{room.text}: joins again")
            self._join()

    def _check(self, leave_by: float) -> None:
        """Raise NarrowsError where this machine cannot go on."""
        self.clock.turn()
        for index, code, text in self.errors:
            where = "" if index == LINE else f"shard {index}: "
            raise BY_EXIT_CODE.get(code, NarrowsError)(f"{where}{text}")
        if self.ended:
            raise NarrowsError(
                f"shard {min(self.ended)} died; the run goes back to its newest checkpoint without this machine"
            )
        if self.clock.now() - self.heard_ns > LOST_S * NS:
            raise ServerLostError(f"the server at {self.there} has not answered for {LOST_S:.0f} s")
        if time.monotonic() > leave_by:
            raise NarrowsError(
                f"the keys have not moved back within {LEAVE_S:.0f} s; the run goes back to its newest checkpoint"
            )

    def leave(self) -> None:
        """Tell the server that the keys here are lost, if shards are left, and close the line."""
        if self.line is not None:
            if self.shards:
                self.line.offer(replace(self.line.join, wish=RemoteShardsWish.GONE))
            self.line.close()


def _shards(which: range) -> str:
    return f"shard {which.start}" if len(which) == 1 else f"shards {which.start} to {which.stop - 1}"


def join(
    there: str,
    bind: str,
    one_port: bool,
    keys: str,
    flags: dict[str, Any],
    more: list[str],
    journal: bool,
    shared_memory: bool,
    ready_file: str,
    local: Callable[[str], bool],
    digest: int,
) -> int:
    """Run shards of another server on this machine.

    Args:
        there: the address of the server.
        bind: the value of --bind.
        one_port: the value of --one-port.
        keys: the folder of the keys, "" for none.
        flags: the flags of a run that the user has given; only `shards` and `name` are allowed.
        more: names of further flags that the user has given and that are not allowed.
        journal: shards keep journals.
        shared_memory: the value of --shared-memory.
        ready_file: the value of --ready-file, "" for none.
        local: returns True for a loopback host.
        digest: the digest of the plan.json that started this command, 0 without.

    Returns:
        The exit code.

    Raises:
        UsageError: a flag does not go with --join, or workers could not dial this machine.
        IncompatibleError: the server runs another plan, or its run has another name.
    """
    from narrows.ps.process.bootstrap_client import JOIN, ask

    wanted, (host, port) = flags.pop("shards", 1), parse_address("--bind", bind, any_port=True)
    check_run_name("--name", name := flags.pop("name", ""))
    if more := [*(f"--{name.replace('_', '-')}" for name in flags), *more]:
        raise UsageError(f"--join: the flags of the run come from the server at {there}; leave out {more[0]}")
    if not 1 <= wanted <= SHARDS_MAX:
        raise UsageError(f"--shards {wanted}: give a number from 1 to {SHARDS_MAX}")
    if not one_port and port + wanted - 1 >= 65536:
        raise UsageError(f"--bind {bind}: --shards {wanted} take the ports from there on, and 65535 is the last")
    answer = ask("--join", there, keys, JOIN)
    settings = Settings(**answer["settings"])
    text = other_run(name or settings.name, settings.name) or contradiction({"plan_digest": digest}, settings)
    if text:
        raise IncompatibleError(f"{there}: {text}")
    if local(host) and not local(parse_address("--bind", answer["bind"], any_port=True)[0]):
        raise UsageError(f"--bind {bind}: workers elsewhere could not dial this machine; give --bind tcp://HOST:PORT")
    guest = RemoteShardSupervisor(there, answer, keys, reached(bind, there), wanted, journal, ready_file)
    scratch = None
    try:
        guest.prepare()
        guest.host, guest.port = host, port
        if one_port:
            guest.behind(OnePort(host, port))
        scratch = ScratchFolder()  # holds a checkpoint on its way to the server
        guest.config = replace(
            guest.config,
            checkpoint_dir=scratch.path,
            keeps=answer["keeps"],
            secret=answer["secret"],
            keys=os.path.abspath(keys) if keys else "",
            host=guest.known_as,
            seals=encryption_cost.rate() if keys else 0.0,
            shared_memory=shared_memory,
        )
        guest.listen()
        return guest.watch()
    finally:
        guest.leave()
        guest.kill()
        if scratch:
            scratch.close()
