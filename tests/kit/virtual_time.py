"""Runs scripts in threads under virtual time: `pump` advances the clock of all machines, and so their timers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kit.in_process import Cluster, member_of
from kit.scripts import Array, Link, Run, train
from narrows.protocols import messages as m
from narrows.protocols.effects import NS, ServerEffect

TICK_S = 0.25  # of virtual time
REAL_S = 40.0  # after which a run counts as stuck


def steps(count: int, seed: int = 7, finish: bool = True, at: Callable[[int], None] = lambda step: None) -> Array:
    return train(count, lambda net: torch.optim.SGD(net.parameters(), lr=0.05), seed, at, finish)


def waits(go: threading.Event, now: bool) -> None:
    if now:
        go.wait(REAL_S)


class Script(threading.Thread):
    """A script in a thread, with one session; `result` or `error` once it has ended."""

    def __init__(self, run: Run, session: int, script: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.started_run, self.session, self.script = run, session, script
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        torch.set_num_threads(1)
        self.started_run.become(self.session)
        try:
            self.result = self.script()
        except BaseException as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self.is_alive()


def pump(
    run: Run,
    clusters: Sequence[Cluster],
    done: Callable[[], Any],
    virtual_s: float = 1e9,
    real_s: float = REAL_S,
) -> bool:
    """Advance virtual time until done(), at most `virtual_s`. Return False if it did not become true."""
    deadline = time.monotonic() + real_s
    while not done():
        if virtual_s <= 0 or time.monotonic() > deadline:
            return False
        with clusters[0].changed:
            for cluster in clusters:
                cluster.held_ns += int(TICK_S * NS)
            for cluster in clusters:
                for index, server in enumerate(cluster.servers):
                    cluster._apply(index, server.tick(cluster.now()))
            for session in run.sessions:
                link = cast(Link, session.link)
                link.deliver(link.member.tick(link.cluster.now()))
        virtual_s -= TICK_S
        time.sleep(0.005)
    return True


def finished(run: Run, clusters: Sequence[Cluster], *scripts: Script, real_s: float = REAL_S) -> list[Array]:
    """Run until all scripts have ended well, and return their results."""
    assert pump(run, clusters, lambda: all(script.ended for script in scripts), real_s=real_s), "stuck"
    assert [script.error for script in scripts] == [None] * len(scripts)
    return [script.result for script in scripts]


class Held:
    """Holds messages of the parent to one shard, and delivers them in order once `release` is called."""

    def __init__(
        self, cluster: Cluster, shard: int, kinds: tuple[type, ...], those: Callable[[Any], bool] = lambda message: True
    ) -> None:
        self.cluster, self.shard, self.kinds, self.those = cluster, shard, kinds, those
        self.real = cluster.heard_above.get(shard, cluster.servers[shard].handle_above)
        self.late, self.on = list[m.Message](), True
        cluster.heard_above[shard] = self.handle

    def handle(self, message: m.Message, now_ns: int) -> list[ServerEffect]:
        if not self.on or not isinstance(message, self.kinds) or not self.those(message):
            return self.real(message, now_ns)
        self.late.append(message)
        return []

    def release(self) -> None:
        with self.cluster.changed:
            self.on = False
            for message in self.late:
                self.cluster._apply(self.shard, self.real(message, self.cluster.now()))


def expire(cluster: Cluster) -> None:
    """Let the lease of a cluster expire at its parent."""
    assert cluster.parent is not None
    expire_member(cluster.parent, member_of(cluster).worker)


def expire_member(cluster: Cluster, worker: int) -> None:
    """Let the lease of this one member of a cluster expire."""
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None
    with cluster.changed:
        now_ns = cluster.now()
        effects = coordinator._remove(coordinator.seats[worker], "expired", now_ns)
        cluster._apply(0, cluster.servers[0]._route(effects, now_ns))


def clock_of(cluster: Cluster) -> int:
    coordinator = cluster.servers[0].coordinator
    assert coordinator is not None
    return coordinator.min_clock


class Faults:
    """Faults between two levels, both ways: messages are lost, doubled, or delivered late and out of order."""

    def __init__(self, rng: random.Random, share: float) -> None:
        self.rng, self.share = rng, share
        self.late: list[Callable[[], None]] = []

    def between(self, child: Cluster) -> None:
        parent = child.parent
        assert parent is not None
        for index, (below, above) in enumerate(zip(child.servers, parent.servers, strict=True)):
            down = child.heard_above.get(index, below.handle_above)
            up, name = parent.heard.get(index, above.handle), child.name.encode().ljust(m.NAME_BYTES) + b"."

            def handle_above(message: m.Message, now_ns: int, index: int = index, real: Any = down) -> Any:
                later = lambda: child._apply(index, real(message, child.now()))  # noqa: E731
                return self.pass_on(lambda: real(message, now_ns), later)

            def handle(
                peer: bytes,
                message: m.Message,
                now_ns: int,
                index: int = index,
                real: Any = up,
                name: bytes = name,
            ) -> Any:
                if not peer.startswith(name):
                    return real(peer, message, now_ns)
                later = lambda: parent._apply(index, real(peer, message, parent.now()))  # noqa: E731
                return self.pass_on(lambda: real(peer, message, now_ns), later)

            child.heard_above[index], parent.heard[index] = handle_above, handle

    def pass_on(self, now: Callable[[], Any], later: Callable[[], None]) -> Any:
        fate = self.rng.random() / self.share
        if fate < 1:
            return []
        if fate < 3:
            self.late.append(later)
        return [] if fate < 2 else now()

    def some(self) -> None:
        self.rng.shuffle(self.late)
        for _ in range(self.rng.randint(0, len(self.late))):
            self.late.pop()()
