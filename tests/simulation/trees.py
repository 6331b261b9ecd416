"""A tree of clusters in virtual time: real servers with uplinks, real members, links with a rate and a delay, faults by a seed.

    Tree(case).run()        raises Violation where an invariant does not hold (tests/simulation/tree_invariants.py)

`TreeCase` says all of a run. `clusters` of `workers` each stand below one root; with no cluster the workers are the root's.
The few keys of the model stand for `model_bytes`. tests/simulation/closed_forms.py says how long a round takes on
links without faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from narrows.compression.codecs import RAW
from narrows.protocols import effects as e
from narrows.protocols import messages as m
from narrows.protocols.config.modes import MODES
from narrows.protocols.config.settings import Settings
from narrows.protocols.effects import NS
from narrows.protocols.errors import NarrowsError
from narrows.protocols.wire import decode, encode
from simulation.actors import KEYS, PLANS, SCALED, Disk, Kit, Process, Worker
from simulation.campaigns import Case
from simulation.mirror import FloatArray, Violation
from simulation.shard_kills import Kill, killed
from simulation.simulator import MS, Faults, Random, Simulator, Wire
from simulation.tree_invariants import Level

Trace = Callable[[int, str, m.Message | None], None]

SYNCS = tuple(name for name in MODES if name != "gossip")  # modes of a server: among peers no round closes anywhere
HEADER_BYTES = 64  # of every message: about what its header is coded in
WHOLE_EVERY = 1000  # events between two full counts
TICK_NS = 200 * MS
SLACK_NS = 2 * NS  # beginning, ticks, and a few steps of the protocol
COST_NS = 2 * NS  # what a lost message costs: its repeat on each level
CLOCKS = 12  # of each worker of a small tree
STILL = Faults(delay_ns=(0, 0))
MIB = 1 << 20

ABOVE: dict[str, dict[str, Any]] = {
    "bsp": {"sync": "bsp", "push": "update"},
    "ssp": {"sync": "ssp"},
    "ssp, sparse": {"sync": "ssp", "staleness": 3, "compress": "topk:0.5", "compress_down": "topk:0.5"},
    "async": {"sync": "async"},
    "local": {"sync": "local", "local_steps": 3},
    "local, late": {"sync": "local", "local_steps": 2, "staleness": 1},
}
BELOW: dict[str, dict[str, Any]] = {
    "bsp": {"sync": "bsp"},
    "ssp": {"sync": "ssp", "staleness": 2},
    "async": {"sync": "async"},
    "local": {"sync": "local", "local_steps": 2},
    "local, late": {"sync": "local", "local_steps": 2, "staleness": 1},
}


@dataclass(frozen=True, slots=True)
class Road:
    """The link between a child and its server: the same both ways."""

    delay_ns: int
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class Crash:
    """Worker `who` falls silent so long after it has come to a clock; `lasts_ns` later another begins in its place."""

    who: int
    clock: int
    later_ns: int
    lasts_ns: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Cluster `who` loses its road to the root for `lasts_ns`, once it has pushed so many updates."""

    who: int
    updates: int
    lasts_ns: int


@dataclass(frozen=True, slots=True)
class TreeCase:
    """All of one run."""

    seed: int
    above: Settings  # of the root
    below: Settings  # of each cluster
    clusters: int
    workers: int  # of each
    clocks: int  # of each worker
    step_ns: tuple[int, ...]  # of each worker: how long it computes, for one inner step
    roads: tuple[Road, ...]  # of each worker, to its server
    roads_up: tuple[Road, ...]  # of each cluster, to the root
    faults: Faults = STILL
    crash: Crash | None = None
    cut: Cut | None = None
    kills: tuple[tuple[str, Kill], ...] = ()  # of a server process of this cluster, or of the root
    model_bytes: int = 1 << 20
    wire: bool = False  # sends bytes, not objects

    @property
    def wait_ns(self) -> int:
        """Longer than any round with no fault in it: all that a round consists of, one after the other."""
        above, below = self.above, self.below
        steps = above.local_steps * (below.local_steps * max(self.step_ns))
        copies = [2 * (road.delay_ns + self.model_bytes * NS // road.bytes_per_second) for road in self.roads]
        up = [2 * (road.delay_ns + self.model_bytes * NS // road.bytes_per_second) for road in self.roads_up]
        return 2 * (steps + above.local_steps * max(copies) + max(up, default=0))


def tree_of(
    seed: int,
    above: dict[str, Any],
    below: dict[str, Any],
    clusters: int,
    workers: int,
    clocks: int,
    *,
    shards: int = 1,
    faulty: bool = False,
) -> TreeCase:
    """A case by its seed. `above` and `below` are fields of Settings; `faulty`: every fault a link has, and a crash."""
    random = Random(seed)
    between = random.between
    count = max(1, clusters) * workers
    lease = 2.0 if faulty else 10.0

    def settings(flags: dict[str, Any], children: int) -> Settings:
        rates = {"outer_lr": 0.5, "outer_momentum": 0.5} if flags["sync"] == "local" else {}
        return Settings(**rates | flags, workers=children, shards=shards, lease=lease).validated()

    def road(delay_ns: tuple[int, int], megabytes: tuple[int, int]) -> Road:
        return Road(between(*delay_ns), between(*megabytes) * 1_000_000)

    roads = tuple(road((MS // 10, 2 * MS), (100, 1000)) for _ in range(count))
    roads_up = tuple(road((5 * MS, 80 * MS), (10, 50)) for _ in range(clusters))
    step_ns = tuple(between(50 * MS, 200 * MS) for _ in range(count))
    root = settings(above, clusters or workers)
    faults, crash = STILL, None
    if faulty:
        faults = Faults(
            loss=between(5, 40) / 1000,
            duplication=between(10, 60) / 1000,
            reordering=between(10, 100) / 1000,
            delay_ns=(0, between(1, 30) * MS),
            late_ns=between(50, 1000) * MS,
        )
        unbound = None in (root.mode().bound, settings(below, workers).mode().bound)
        crash = Crash(
            between(0, count - 1),
            between(1, clocks // 2),
            between(0, 60 * MS),
            # With no bound the others do not wait, and would have ended before it is back.
            between(20 * MS, 300 * MS) if unbound or random.chance(0.5) else between(NS, 4 * NS),
        )
    # Some are longer than the lease: the run above goes on without the cluster, which comes back.
    rounds = clocks // root.local_steps
    cut = None
    if faulty and clusters and random.chance(0.5):
        cut = Cut(between(0, clusters - 1), between(1, max(1, rounds - 2)), between(NS, 5 * NS))
    return TreeCase(
        *(
            seed,
            root,
            settings(below, workers) if clusters else root,
            clusters,
            workers,
            clocks,
            step_ns,
            roads,
            roads_up,
        ),
        faults=faults,
        crash=crash,
        cut=cut,
        wire=faulty and seed % 8 == 7,
    )


def fault_case(seed: int, kills: bool = False) -> TreeCase:
    """A small tree with every fault: the pairs of modes in turn, all else from the seed. `kills`: of server processes too."""
    random = Random(seed)
    above, below = [*ABOVE.values()][seed % len(ABOVE)], [*BELOW.values()][seed // len(ABOVE) % len(BELOW)]
    clusters, workers, shards = random.between(2, 4), random.between(1, 4), random.between(1, 3)
    case = tree_of(seed, above, below, clusters, workers, CLOCKS, shards=shards, faulty=True)
    names = ["root", *(f"c{index}" for index in range(clusters))]
    struck = [
        (names[random.between(0, clusters)], killed(random, random.between(0, shards - 1)))
        for _ in range(random.between(2, 6) if kills else 0)
    ]
    return replace(case, kills=tuple(struck))


class Node:
    """One cluster of the tree, or its root: the host of its server processes and of its workers."""

    ranges = None
    hurried = False  # the root's progress alone is looked at, by the tree
    part_keys = KEYS  # a push is one message for each shard
    level: type[Level] = Level

    def __init__(self, tree: Tree, name: str, settings: Settings, parent: Node | None, road: Road | None) -> None:
        self.tree, self.name, self.settings, self.parent, self.road = tree, name, settings, parent, road
        self.prefix = f"{name}." if parent is not None else ""
        self.sim, self.kit, self.clocks, self.plan = tree.sim, tree.kit, tree.case.clocks, tree.plan
        case = tree.case
        quiet = (0.0, case.step_ns, None, None, None)  # faults strike the tree, and not one cluster
        self.case = Case(case.seed, settings, case.faults, *quiet, case.wire, scaled=tree.plan is SCALED)
        self.disk = Disk()
        self.checker = self.level(self)
        self.over = False
        self.servers: dict[int, Process] = {}
        self.workers: dict[int, Worker] = {}
        self.pushes_ns: list[int] = []  # when this cluster's updates left
        for index in range(settings.shards):
            self.sim.at(self.sim.random.between(0, 50 * MS), self._serve, index)
        if parent is not None and road is not None:
            self._join([f"{self.prefix}s{i}" for i in range(settings.shards)], parent, road)

    def _join(self, addresses: list[str], server: Node, road: Road) -> None:
        """All that these addresses and the shards of a server say to each other passes one road."""
        up, down = (Wire(road.delay_ns, road.bytes_per_second) for _ in range(2))
        for address in addresses:
            for shard in range(server.settings.shards):
                self.sim.lay(address, f"{server.prefix}s{shard}", up)
                self.sim.lay(f"{server.prefix}s{shard}", address, down)

    def _serve(self, index: int) -> None:
        self.servers[index] = Process(self, index, 0)

    def work(self, index: int, life: int) -> None:
        self._join([f"{self.prefix}w{index}.{life}"], self, self.tree.case.roads[index])
        self.workers[index] = Worker(self, index, life)

    def end_if_over(self) -> None:
        if self.over:
            for process in self.servers.values():
                if self.sim.alive(process.port):
                    self.sim.crash(process.port, process.up)

    # Actors call these to ask their host, and to tell it.

    def send(self, source: str, target: str, message: m.Message) -> None:
        tree = self.tree
        if tree.case.wire:
            message = decode([bytes(frame) for frame in encode(message)])
        self.sim.send(source, target, message, HEADER_BYTES + tree.size_of(message))

    def compute_ns(self, index: int) -> int:
        return self.tree.case.step_ns[index] * self.settings.local_steps

    def worker_pushed(self, worker: Worker) -> None:
        self.tree.worker_pushed(self, worker)

    def worker_failed(self, worker: Worker, failed: e.MemberFailed) -> None:
        self.sim.note(f"{worker.name} failed: {failed.text}")
        if failed.code != m.RefuseCode.OVER:
            raise Violation(f"{worker.name} fails, though links come back: {failed.text}")

    def server_event(self, process: Process) -> None:
        pass

    def gives(self, worker: Worker, values: FloatArray) -> FloatArray:
        return values

    def kills_of(self, index: int) -> list[Kill]:
        kills = [kill for name, kill in self.tree.case.kills if (name, kill.who) == (self.name, index)]
        return sorted(kills, key=lambda kill: -kill.event)

    def replayed(self, process: Process) -> None:
        """Its workers connect anew, and the shards of clusters below it."""
        between = self.sim.random.between
        for worker in self.workers.values():
            self.sim.at(self.sim.now_ns + between(1, NS // 2), worker.linked, process.index)
        for node in self.tree.clusters if self.parent is None else ():
            if process.index in node.servers:
                self.sim.at(self.sim.now_ns + between(1, NS // 2), node.servers[process.index].linked)

    def failed(self, process: Process) -> None:
        raise AssertionError("no checkpoint of a tree is read")

    def pushed_up(self, shard: int) -> None:
        if shard == 0:
            self.pushes_ns.append(self.sim.now_ns)
            self.tree.cluster_pushed(self)

    def cut_off(self, until_ns: int) -> None:
        """Lose all that is said to the server above and back, until then."""
        assert self.parent is not None
        self.sim.struck["cuts"] += 1
        for shard in range(self.settings.shards):
            self.sim.cut(f"{self.prefix}s{shard}", f"{self.parent.prefix}s{shard}", until_ns)


class Tree:
    """One case, from the first start to the end of everyone."""

    node: type[Node] = Node

    def __init__(self, case: TreeCase, kit: Kit | None = None, trace: Trace | None = None) -> None:
        self.case, self.kit = case, kit or Kit()
        self.sim: Simulator[m.Message] = Simulator(case.seed, case.faults, TICK_NS, trace)
        self.plan = PLANS[0.0] if case.seed % 2 else SCALED
        self.byte_stands_for = case.model_bytes // (4 * KEYS)
        self.events = 0
        self.rounds_ns: list[int] = []  # when the root's min_clock came to 1, 2, ...
        self.moved_ns, self.moved_struck = 0, self.sim.struck.copy()
        self.pushes_ns: dict[int, list[int]] = {}  # of each worker
        self.crash, self.cut = case.crash, case.cut
        self.root = self.node(self, "root", case.above, None, None)
        self.clusters = [
            self.node(self, f"c{index}", case.below, self.root, road) for index, road in enumerate(case.roads_up)
        ]
        self.nodes = [self.root, *self.clusters]
        for index in range(len(case.step_ns)):
            self.sim.at(self.sim.random.between(0, 100 * MS), self.home(index).work, index, 0)

    def size_of(self, message: m.Message) -> int:
        """Bytes of its payload: raw values stand for a model of the case's size, what is coded is what it is."""
        if not isinstance(message, (m.Push, m.State, m.FirstWeights)):
            return 0
        size = len(message.payload)
        return size * self.byte_stands_for if message.codec == RAW else size

    def home(self, index: int) -> Node:
        """The cluster of a worker."""
        return self.clusters[index // self.case.workers] if self.clusters else self.root

    def run(self) -> Tree:
        """Run to the end. Raises Violation with the seed in it."""
        limit_ns = (self.case.clocks + 10) * (self.case.wait_ns + 60 * NS)
        try:
            while not self.root.over:
                if not self.sim.step() or self.sim.now_ns > limit_ns:
                    raise Violation(f"the run has not ended; {self.whereabouts()}")
                self.events += 1
                if self.events % WHOLE_EVERY == 0:
                    self.whole()
            self.whole()
        except (AssertionError, NarrowsError, KeyError) as error:
            text = f"seed {self.case.seed} at {self.sim.now_ns / NS:.4f} s: {type(error).__name__}: {error}"
            raise Violation(text) from error
        return self

    def whole(self) -> None:
        """Count everything anew."""
        for node in self.nodes:
            node.end_if_over()
            node.checker.whole()

    def moved(self, node: Node) -> None:
        """A min_clock has advanced. The root's does not later than leases, a round and what the faults in between cost."""
        if node is not self.root:
            return
        now_ns, struck, case = self.sim.now_ns, self.sim.struck.copy(), self.case
        strikes = struck - self.moved_struck
        allowed = self.allowed_ns(strikes)
        if now_ns - self.moved_ns > allowed:
            waited = (now_ns - self.moved_ns) / NS
            raise Violation(
                f"progress: {waited:.2f} s before clock {node.checker.min_clock}, allowed are {allowed / NS:.2f}: "
                f"{dict(strikes)}"
            )
        if node.checker.min_clock > 3 * case.clocks:  # and each worker does so many: finishes are but a few more
            raise Violation(f"the root is at clock {node.checker.min_clock}, and nobody has more to push")
        self.moved_ns, self.moved_struck = now_ns, struck
        while len(self.rounds_ns) < node.checker.min_clock:
            self.rounds_ns.append(now_ns)

    def allowed_ns(self, strikes: Counter[str]) -> int:
        """How long a clock of the root may take in which these faults struck."""
        case = self.case
        allowed = 2 * int(case.below.lease * NS) + case.wait_ns + SLACK_NS
        allowed += (strikes["lost"] + strikes["reordered"] + strikes["duplicated"]) * (COST_NS + case.faults.late_ns)
        allowed += strikes["shard killed"] * (COST_NS + max((kill.lasts_ns for _, kill in case.kills), default=0))
        if case.cut is not None and strikes["cut off"]:
            allowed += case.cut.lasts_ns
        return allowed

    def worker_pushed(self, node: Node, worker: Worker) -> None:
        self.pushes_ns.setdefault(worker.index, []).append(self.sim.now_ns)
        crash = self.crash
        if crash is not None and worker.index == crash.who and worker.clock >= crash.clock:
            self.crash = None
            self.sim.at(self.sim.now_ns + crash.later_ns, self._worker_crashes, node, crash)

    def cluster_pushed(self, node: Node) -> None:
        cut = self.cut
        if cut is not None and node is self.clusters[cut.who] and len(node.pushes_ns) >= cut.updates:
            self.cut = None
            node.cut_off(self.sim.now_ns + cut.lasts_ns)

    def _worker_crashes(self, node: Node, crash: Crash) -> None:
        worker = node.workers[crash.who]
        if worker.ended:
            return
        self.sim.crash(worker.name)
        self.sim.struck["worker crashed"] += 1
        self.sim.at(self.sim.now_ns + crash.lasts_ns, self._worker_returns, node, crash)

    def _worker_returns(self, node: Node, crash: Crash) -> None:
        if not node.over:
            self.sim.struck["worker restarted"] += 1
            node.work(crash.who, 1)

    def whereabouts(self) -> str:
        """Where each cluster is, and who in it is furthest behind."""
        lines = []
        for node in self.nodes:
            workers = [w for w in node.workers.values() if not w.ended]
            slow = min(workers, key=lambda w: w.clock, default=None)
            behind = "" if slow is None else f", {slow.name} {slow.member.phase} clock {slow.clock}"
            lines.append(f"{node.name} min_clock {node.checker.min_clock}{behind}")
        return "; ".join(lines[:10])
