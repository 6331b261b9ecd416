"""plan.json: the host and the flags of each server and process. A model that is not cut is one stage; its server is the
root.

    {"version": 1,
     "hosts": {"leipzig": "10.0.0.1", "oslo": "10.0.0.2"},
     "stages": [{"host": "leipzig", "port": 5555, "flags": {"sync": "ssp", "compress": "topk:0.05+int8"}},
                {"host": "oslo", "port": 5555, "flags": {"sync": "ssp", "compress": "topk:0.05+int8"}}],
     "edges": [{"forward": "int8", "backward": "int8"}],
     "processes": [{"stage": 0, "replica": 0, "host": "leipzig", "port": 6000}, ...],
     "lease": 10.0, "checkpoint_clocks": 100, "insecure": false}

docs/planning.md describes the fields. All processes read the same file: stages compare its digest with each other, and
members of a run with their server (`settings.contradiction`).

How it works
1. `parse` reads the JSON text into a `Deployment` and checks it: fields, types, addresses, flags, keys.
2. `servers` lists each server to start, with its command line. ps-serve starts those of its host (`served`).
3. ps-worker starts the processes of its host (`on`); `server_of` and `key_of` tell where each joins.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from ipaddress import ip_address
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from narrows.protocols.addresses import ANY_HOST, LOCAL_HOSTS, parse_address
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.protocols.pipeline_channels import IN_FLIGHT_MAX

VERSION = 1
PROCESSES_MAX = 1 << 12
CODINGS = ("dense", "fp16", "int8")  # of tensors between stages
KEY = re.compile(r"|[0-9a-f]{64}")
OURS = (
    "workers",
    "quorum",
    "lease",
    "checkpoint_clocks",
    "start_steps",
    "start_compress",
    "name",
    "plan_number",
    "rest",
    "start_clock",
)  # flags that follow from the rest of a plan, or that no run of a plan can have


@dataclass(frozen=True)
class StageEdge:
    """How tensors are coded between a stage and the next: activations forward, their gradients backward.

    in_flight: for ScheduleEager1F1B, the micro-batches under way, there and back, while the stages compute.
    """

    forward: str = "dense"
    backward: str = "dense"
    in_flight: int = 0


@dataclass(frozen=True)
class StageServer:
    """The server of one stage.

    flags: of ps-serve, by their names in Settings. layers: number of the model's layers in this stage; if all stages
    have 0, the cut is even.
    """

    host: str
    port: int
    flags: dict[str, Any] = field(default_factory=dict)
    layers: int = 0


@dataclass(frozen=True)
class ClusterServer(StageServer):
    """The server of a cluster below the root. replicas: its workers."""

    replicas: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class ServerStart:
    """One ps-serve to start."""

    name: str  # such as "stage 0"
    place: StageServer
    above: str  # address of the server that must be there before; "": none
    children: list[tuple[str, str]]  # name and role of each key that the server admits
    keys: str  # folder of these keys; "": no keys
    flags: list[str]  # of the command line


@dataclass(frozen=True)
class WorkerProcess:
    """One process of a pipeline, or a worker. port: where the others dial it. key: its public key, "" without keys."""

    stage: int
    replica: int
    host: str
    port: int
    key: str = ""


@dataclass(frozen=True)
class Deployment:
    """A checked plan.

    hosts: name -> address. guests: servers with remote shards of the root. samples: of a step, by replica. keys: the
    folder of the root's keys, or of each stage's; beside it is a folder for each cluster.
    """

    hosts: dict[str, str]
    stages: list[StageServer]
    processes: list[WorkerProcess]
    edges: list[StageEdge] = field(default_factory=list)
    lease: float = 10.0
    checkpoint_clocks: int = 100
    insecure: bool = False
    clusters: list[ClusterServer] = field(default_factory=list)
    guests: list[StageServer] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    keys: str = ""
    version: int = VERSION

    @property
    def replicas(self) -> int:
        return len(self.processes) // len(self.stages)

    @property
    def digest(self) -> int:
        """A number of 56 bits, the same for equal plans."""
        return int(sha256(self.text().encode()).hexdigest()[:14], 16)

    def text(self) -> str:
        """Return the plan as JSON, without empty fields."""
        return (
            json.dumps({name: value for name, value in asdict(self).items() if value not in ([], "")}, indent=1) + "\n"
        )

    def pipeline(self, replica: int) -> list[WorkerProcess]:
        """Return the processes of one replica, by stage."""
        return sorted((p for p in self.processes if p.replica == replica), key=lambda p: p.stage)

    def layers(self, total: int) -> list[range]:
        """Return the layers of each stage, for a model of `total` layers. Raises UsageError if the plan does not fit."""
        depths = [stage.layers for stage in self.stages]
        cuts = pairwise([0, *accumulate(depths)]) if any(depths) else None
        found = even(total, len(depths)) if cuts is None else [range(*cut) for cut in cuts]
        if found[-1].stop != total or not all(found):
            shown = ", ".join(str(len(each)) for each in found)
            raise UsageError(f"--plan: its stages have {shown} layers, and the model has {total}; each stage needs one")
        return found

    def on(self, host: str) -> list[WorkerProcess]:
        """Return the processes of a host, by replica and stage. Raises UsageError if the plan has no such host."""
        self.known(host)
        return sorted((p for p in self.processes if p.host == host), key=lambda p: (p.replica, p.stage))

    def served(self, host: str) -> list[int]:
        """Return the stages whose servers are on this host. Raises UsageError if the plan has no such host."""
        self.known(host)
        return [index for index, stage in enumerate(self.stages) if stage.host == host]

    def known(self, host: str) -> None:
        if host not in self.hosts:
            raise UsageError(f"--host {host}: the plan has {', '.join(self.hosts)}; give one of these names")

    def address(self, place: StageServer | WorkerProcess) -> str:
        return f"tcp://{self.hosts[place.host]}:{place.port}"

    def server_of(self, process: WorkerProcess) -> StageServer:
        """Return the server of a process: that of its cluster, else that of its stage."""
        return next((c for c in self.clusters if process.replica in c.replicas), self.stages[process.stage])

    def key_of(self, process: WorkerProcess) -> str:
        """Return the key file of a process, in the folder of the server that admits it; "" without keys."""
        at = self.server_of(process)
        folder = self.keys_of(self.clusters.index(at), self.keys) if isinstance(at, ClusterServer) else self.keys
        return f"{folder}/{process.host}.key" if self.keys else ""

    def cluster_name(self, index: int) -> str:
        """Return the name of a cluster's key in the folder of the root, made of the host of its server."""
        host = self.clusters[index].host
        before = sum(cluster.host == host for cluster in self.clusters[:index])
        return f"{host}-cluster{before + 1 if before else ''}"

    def keys_of(self, index: int, keys: str) -> str:
        """Return the folder of a cluster's keys; `keys` is the root's. Each has its own: hosts may share a home."""
        return f"{keys}-{self.cluster_name(index)}"

    def handed_over(self) -> list[tuple[str, str, str]]:
        """Return (path, from host, to host) of the keys that a host needs and the host of their server has.

        A remote shard host needs the whole folder. Keys of a pipeline are made before the plan: from host "", and each
        server needs the folder.
        """
        found, cut, root = list[tuple[str, str, str]](), len(self.stages) > 1, self.stages[0]
        for server in self.servers() if self.keys else ():
            owner, here = ("", "") if cut else (server.place.host, root.host)
            if cut or not server.children:
                found.append((server.keys, here, server.place.host))
            homes = {name: name for name, _ in server.children}
            if server.place is root:
                homes |= {self.cluster_name(number): cluster.host for number, cluster in enumerate(self.clusters)}
            found += [(f"{server.keys}/{name}.key", owner, host) for name, host in homes.items()]
        whole = {(path, host) for path, _, host in found if not path.endswith(".key")}
        return [
            (path, owner, host)
            for path, owner, host in dict.fromkeys(found)
            if owner != host and not (path.endswith(".key") and (path.rpartition("/")[0], host) in whole)
        ]

    def with_flags(self, flags: dict[str, Any]) -> Deployment:
        """Return the plan with these flags added to every run. A remote shard host takes the root's."""
        stages = [replace(stage, flags=stage.flags | flags) for stage in self.stages]
        clusters = [replace(cluster, flags=cluster.flags | flags) for cluster in self.clusters]
        return replace(self, stages=stages, clusters=clusters)

    def settings(self, place: StageServer, children: int) -> dict[str, Any]:
        """Return the flags of the run of this server."""
        ours = {"workers": children, "lease": self.lease, "checkpoint_clocks": self.checkpoint_clocks}
        return place.flags | ours

    def servers(self, keys: str = "") -> Iterator[ServerStart]:
        """Yield all servers, parents first. `keys`: a folder in place of the plan's."""
        keys, root = keys or self.keys, self.address(self.stages[0])
        below = [(self.cluster_name(index), "cluster") for index in range(len(self.clusters))]
        for index, stage in enumerate(self.stages):
            workers = [(p.host, "worker") for p in self.processes if self.server_of(p) is stage]
            yield self._server(f"stage {index}", stage, [*workers, *below], keys)
        for index, (cluster, (name, _)) in enumerate(zip(self.clusters, below, strict=True)):
            workers = [(p.host, "worker") for p in self.processes if p.replica in cluster.replicas]
            more = ["--parent", root, *(["--parent-key", f"{keys}/{name}.key"] if keys else [])]
            own = self.keys_of(index, keys) if keys else ""
            yield self._server(f"cluster {index}", cluster, workers, own, more, root)
        for index, guest in enumerate(self.guests):
            yield self._server(f"guest {index}", guest, [], keys, ["--join", root], root)

    def _server(
        self,
        name: str,
        place: StageServer,
        children: list[tuple[str, str]],
        keys: str,
        more: Sequence[str] = (),
        above: str = "",
    ) -> ServerStart:
        host = self.hosts[place.host]
        everywhere = "[::]" if host.startswith("[") else ANY_HOST
        bind = f"tcp://{host if _is_loopback(host) else everywhere}:{place.port}"
        access = ["--keys", keys] if keys else ["--insecure"] * self.insecure
        flags = self.settings(place, len(children)) if children else {"shards": 1} | place.flags
        words = [word for flag, value in flags.items() for word in ("--" + flag.replace("_", "-"), str(value))]
        return ServerStart(name, place, above, children, keys, ["--bind", bind, *access, *more, *words])


def even(total: int, count: int) -> list[range]:
    """Cut `total` layers into `count` stages whose sizes differ by at most one."""
    return [range(total * index // count, total * (index + 1) // count) for index in range(count)]


ROWS: dict[str, type[Any]] = {
    "stages": StageServer,
    "edges": StageEdge,
    "processes": WorkerProcess,
    "clusters": ClusterServer,
    "guests": StageServer,
}
Row = TypeVar("Row")


def _row(kind: type[Row], what: str, value: Any) -> Row:
    """Make a dataclass of a JSON object. Raises UsageError."""
    known = {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(value, dict) or not value.keys() <= known.keys():
        raise UsageError(f"--plan: {what} has the fields {', '.join(known)}, and no others")
    for name, found in value.items():
        wanted, kinds = known[name].partition("[")[0], (type(found).__name__,)
        if wanted not in kinds and not (wanted == "float" and type(found) is int):
            raise UsageError(f"--plan: {name} of {what} is {json.dumps(found)[:60]}, and no {wanted}")
    try:
        return kind(**value)
    except TypeError as error:
        raise UsageError(f"--plan: {what} lacks a field ({str(error).rpartition(': ')[2]})") from None


def parse(text: str) -> Deployment:
    """Read and check the text of a plan. Raises UsageError, one sentence that names the fault."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--plan: it is no JSON ({error})") from None
    if isinstance(value, dict) and value.get("version") != VERSION:
        raise UsageError(f"--plan: it has version {value.get('version')}, and this release reads {VERSION}")
    for name, kind in ROWS.items():
        if isinstance(value, dict) and isinstance(rows := value.get(name, []), list):
            value[name] = [_row(kind, f"{name}[{i}]", row) for i, row in enumerate(rows[:PROCESSES_MAX])]
    layout = _row(Deployment, "the plan", value)
    _check(layout)
    return layout


def _check(plan: Deployment) -> None:
    stages, replicas = len(plan.stages), plan.replicas if plan.stages else 0
    grid = [(replica, stage) for replica in range(replicas) for stage in range(stages)]
    if not grid or sorted((p.replica, p.stage) for p in plan.processes) != grid:
        raise UsageError("--plan: each replica has one process for each stage, and both are counted from 0")
    if len(plan.edges) not in (0, stages - 1):
        raise UsageError(
            f"--plan: {stages} stages have {stages - 1} edges between them, and the plan has {len(plan.edges)}"
        )
    for edge in plan.edges:
        for coding in (edge.forward, edge.backward):
            if coding not in CODINGS:
                raise UsageError(f"--plan: {coding} codes no edge; there are {', '.join(CODINGS)}")
        if not 0 <= edge.in_flight <= IN_FLIGHT_MAX:
            raise UsageError(
                f"--plan: in_flight of an edge is from 0 to {IN_FLIGHT_MAX} micro-batches, not {edge.in_flight}"
            )
    if len({stage.layers > 0 for stage in plan.stages}) > 1 or min(stage.layers for stage in plan.stages) < 0:
        raise UsageError("--plan: layers is the number of layers of each stage, 1 or more, or no stage has it")
    _check_tree(plan)
    servers = [*plan.stages, *plan.clusters, *plan.guests]
    places: list[StageServer | WorkerProcess] = [*servers, *plan.processes]
    for place in places:
        if place.host not in plan.hosts:
            raise UsageError(f"--plan: host {place.host} has no address in hosts")
        parse_address("--plan:", plan.address(place))
    taken = [(place.host, place.port + i) for place in places for i in range(_ports(place))]
    if twice := [f"{host}:{port}" for (host, port), count in Counter(taken).items() if count > 1]:
        raise UsageError(f"--plan: port {twice[0]} is given twice; the port of shard i of a server is i higher")
    if not 0 < plan.lease < 86400 or plan.checkpoint_clocks < 1:
        raise UsageError("--plan: lease is a number of seconds above 0, and checkpoint_clocks at least 1")
    for server in plan.servers():
        kind, index = server.name.split()
        where, flags = f"{kind}s[{index}]", server.place.flags
        known = set(Settings.__slots__) - set(OURS) if server.children else {"shards"}
        if unknown := set(flags) - known:
            raise UsageError(f"--plan: {where} has the flag {min(unknown)}, which such a server does not take")
        try:
            Settings(**plan.settings(server.place, max(1, len(server.children)))).validated()
        except TypeError as error:
            raise UsageError(f"--plan: a flag of {where} has the wrong type ({error})") from None
    keyed = {bool(p.key) for p in plan.processes}
    if len(keyed) > 1 or not all(KEY.fullmatch(p.key) for p in plan.processes):
        raise UsageError("--plan: key is the public key of each process, 64 hex digits, or none has one")
    # Stages of one pipeline dial each other too, and know each other by these keys.
    has_keys = True in keyed or bool(plan.keys and stages == 1)
    if not (plan.insecure or has_keys or all(map(_is_loopback, {plan.hosts[place.host] for place in places}))):
        raise UsageError(
            "--plan: anyone who reaches these hosts could join; give each process its key, or say insecure: true"
        )


def _check_tree(plan: Deployment) -> None:
    """Check clusters, remote shard hosts and samples."""
    inside = [replica for cluster in plan.clusters for replica in cluster.replicas]
    if (plan.clusters or plan.guests) and len(plan.stages) > 1:
        raise UsageError("--plan: a model that is cut into stages has no clusters and no guests; leave them out")
    known = all(type(replica) is int and replica in range(plan.replicas) for replica in inside)
    if not known or len(set(inside)) < len(inside):
        raise UsageError(f"--plan: each of the replicas 0 to {plan.replicas - 1} is in one cluster, or in none")
    if not all(cluster.replicas for cluster in plan.clusters):
        raise UsageError("--plan: a cluster without replicas has nothing to do; leave it out")
    if plan.clusters and plan.guests:
        raise UsageError("--plan: keys of a run with clusters do not move to guests; leave one of both out")
    counted = all(type(count) is int and count > 0 for count in plan.samples)
    if plan.samples and (len(plan.samples) != plan.replicas or not counted):
        raise UsageError(f"--plan: samples has a number above 0 for each of {plan.replicas} replicas")


def _ports(place: StageServer | WorkerProcess) -> int:
    return int(place.flags.get("shards", 1)) if isinstance(place, StageServer) else 1


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in LOCAL_HOSTS
