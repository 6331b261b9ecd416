"""plan.json: which server and which process stands on which host, and with which flags. A model that is not cut is one
stage, and its server is the root.

    {"version": 1,
     "hosts": {"leipzig": "10.0.0.1", "oslo": "10.0.0.2"},
     "stages": [{"host": "leipzig", "port": 5555, "flags": {"sync": "ssp", "compress": "topk:0.05+int8"}},
                {"host": "oslo", "port": 5555, "flags": {"sync": "ssp", "compress": "topk:0.05+int8"}}],
     "edges": [{"forward": "int8", "backward": "int8"}],
     "processes": [{"stage": 0, "replica": 0, "host": "leipzig", "port": 6000}, ...],
     "lease": 10.0, "checkpoint_clocks": 100, "insecure": false}

docs/planning.md has the fields. Everybody reads the same file: stages compare its digest with each other, members of a run with
their server (`settings.contradiction`).
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
CODINGS = ("dense", "fp16", "int8")  # of what travels between stages
KEY = re.compile(r"|[0-9a-f]{64}")
OURS = (
    "workers",
    "quorum",
    "lease",
    "checkpoint_clocks",
    "plan_number",
)  # flags that follow from the rest of a plan, or that no run of one can have


@dataclass(frozen=True)
class StageEdge:
    """How tensors are coded between a stage and the next: activations forward, their gradients backward.

    in_flight: of ScheduleEager1F1B, micro-batches that are on their way there and back while the stages compute.
    """

    forward: str = "dense"
    backward: str = "dense"
    in_flight: int = 0


@dataclass(frozen=True)
class StageServer:
    """The server of one stage.

    flags: of ps-serve, as they are named in Settings. layers: how many of the model the stage has; where all stages have 0, the
    cut is even.
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
    """One ps-serve, as `flags` start it. name: "stage 0". above: the address of who must be there before it, "" for none.
    children: the name and the role of each key that it lets in. keys: the folder of these, "" without."""

    name: str
    place: StageServer
    above: str
    children: list[tuple[str, str]]
    keys: str
    flags: list[str]


@dataclass(frozen=True)
class WorkerProcess:
    """One process of one pipeline, or a worker. port: where the others dial it. key: its public key, "" without keys."""

    stage: int
    replica: int
    host: str
    port: int
    key: str = ""


@dataclass(frozen=True)
class Deployment:
    """A plan, checked. hosts: name -> address. guests: servers that have shards of the root. samples: of a step, by replica.
    keys: the folder of the root's keys, or of each stage's. Beside it is a folder for each cluster."""

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
        """Alike where plans are: 56 bits."""
        return int(sha256(self.text().encode()).hexdigest()[:14], 16)

    def text(self) -> str:
        """As JSON. Fields that say nothing are left out."""
        return (
            json.dumps({name: value for name, value in asdict(self).items() if value not in ([], "")}, indent=1) + "\n"
        )

    def pipeline(self, replica: int) -> list[WorkerProcess]:
        """By stage."""
        return sorted((p for p in self.processes if p.replica == replica), key=lambda p: p.stage)

    def layers(self, total: int) -> list[range]:
        """Which layers of a model of `total` each stage has. Raises UsageError where they are not the plan's."""
        depths = [stage.layers for stage in self.stages]
        cuts = pairwise([0, *accumulate(depths)]) if any(depths) else None
        found = even(total, len(depths)) if cuts is None else [range(*cut) for cut in cuts]
        if found[-1].stop != total or not all(found):
            shown = ", ".join(str(len(each)) for each in found)
            raise UsageError(f"--plan: its stages have {shown} layers, and the model has {total}; each stage needs one")
        return found

    def on(self, host: str) -> list[WorkerProcess]:
        """The processes of a host, by replica and stage. Raises UsageError for one that the plan does not name."""
        self.known(host)
        return sorted((p for p in self.processes if p.host == host), key=lambda p: (p.replica, p.stage))

    def served(self, host: str) -> list[int]:
        """The stages whose servers are on this host. Raises UsageError for one that the plan does not name."""
        self.known(host)
        return [index for index, stage in enumerate(self.stages) if stage.host == host]

    def known(self, host: str) -> None:
        if host not in self.hosts:
            raise UsageError(f"--host {host}: the plan has {', '.join(self.hosts)}; give one of these names")

    def address(self, place: StageServer | WorkerProcess) -> str:
        return f"tcp://{self.hosts[place.host]}:{place.port}"

    def server_of(self, process: WorkerProcess) -> StageServer:
        """That of its cluster, else of its stage."""
        return next((c for c in self.clusters if process.replica in c.replicas), self.stages[process.stage])

    def key_of(self, process: WorkerProcess) -> str:
        """The file of the key of a process, in the folder of the server that lets it in; "" without keys."""
        at = self.server_of(process)
        folder = self.keys_of(self.clusters.index(at), self.keys) if isinstance(at, ClusterServer) else self.keys
        return f"{folder}/{process.host}.key" if self.keys else ""

    def cluster_name(self, index: int) -> str:
        """The name of a cluster's key in the folder of the root, by the host of its server."""
        host = self.clusters[index].host
        before = sum(cluster.host == host for cluster in self.clusters[:index])
        return f"{host}-cluster{before + 1 if before else ''}"

    def keys_of(self, index: int, keys: str) -> str:
        """The folder of a cluster's keys, where `keys` is the root's. Each cluster has its own: hosts may share a home."""
        return f"{keys}-{self.cluster_name(index)}"

    def handed_over(self) -> list[tuple[str, str, str]]:
        """Return (path, from host, to host) of the keys that are needed on another host than that of their server. A guest
        needs the whole folder. Keys of a pipeline are made before the plan: by "", and each server needs the folder."""
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
        """The plan in which every run has these flags, too; a guest takes the root's."""
        stages = [replace(stage, flags=stage.flags | flags) for stage in self.stages]
        clusters = [replace(cluster, flags=cluster.flags | flags) for cluster in self.clusters]
        return replace(self, stages=stages, clusters=clusters)

    def settings(self, place: StageServer, children: int) -> dict[str, Any]:
        """The flags of the run of this server."""
        ours = {"workers": children, "lease": self.lease, "checkpoint_clocks": self.checkpoint_clocks}
        return place.flags | ours

    def servers(self, keys: str = "") -> Iterator[ServerStart]:
        """All, those above first. `keys`: in place of the plan's own."""
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
    """`total` layers in `count` stages, as even as they go."""
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
    """One dataclass of a JSON object. Raises UsageError."""
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
    """Raises UsageError, one sentence that names what is wrong."""
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
        raise UsageError(f"--plan: port {twice[0]} is given twice; shard i of a server takes the port i above it")
    if not 0 < plan.lease < 86400 or plan.checkpoint_clocks < 1:
        raise UsageError("--plan: lease is a number of seconds above 0, and checkpoint_clocks at least 1")
    for server in plan.servers():
        kind, index = server.name.split()
        where, flags = f"{kind}s[{index}]", server.place.flags
        known = set(Settings.__slots__) - set(OURS) if server.children else {"shards"}
        if unknown := set(flags) - known:
            raise UsageError(f"--plan: {where} has the flag {min(unknown)}, which is none of such a server")
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
    """Clusters, guests and samples."""
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
