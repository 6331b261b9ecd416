"""plan.json: which process of a pipeline stands on which host, what codes the tensors between stages, and each stage's server.

    {"version": 1,
     "hosts": {"leipzig": "10.0.0.1", "oslo": "10.0.0.2"},
     "stages": [{"host": "leipzig", "port": 5555, "flags": {"sync": "ssp", "compress": "topk:0.05+int8"}},
                {"host": "oslo", "port": 5555, "flags": {"sync": "ssp", "compress": "topk:0.05+int8"}}],
     "edges": [{"forward": "int8", "backward": "int8"}],
     "processes": [{"stage": 0, "replica": 0, "host": "leipzig", "port": 6000}, ...],
     "lease": 10.0, "checkpoint_clocks": 100, "insecure": false}

docs/reference.md has the fields. Everybody reads the same file: its digest says so.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, fields
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, TypeVar

from narrows.protocols.addresses import LOCAL_HOSTS, parse_address
from narrows.protocols.errors import UsageError
from narrows.protocols.settings import Settings

VERSION = 1
PROCESSES_MAX = 1 << 12
CODINGS = ("dense", "fp16", "int8")  # of what travels between stages
KEY = re.compile(r"|[0-9a-f]{64}")
OURS = (
    "workers",
    "quorum",
    "lease",
    "checkpoint_clocks",
)  # flags that follow from the rest of a plan, or that no pipeline can have


@dataclass(frozen=True)
class Edge:
    """How tensors are coded between a stage and the next: activations forward, their gradients backward."""

    forward: str = "dense"
    backward: str = "dense"


@dataclass(frozen=True)
class Stage:
    """The server of one stage. flags: of ps-serve, as they are named in Settings."""

    host: str
    port: int
    flags: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Process:
    """One process of one pipeline. port: where the others dial it. key: its public key, "" without keys."""

    stage: int
    replica: int
    host: str
    port: int
    key: str = ""


@dataclass(frozen=True)
class Layout:
    """A plan, checked. hosts: name -> address."""

    hosts: dict[str, str]
    stages: list[Stage]
    processes: list[Process]
    edges: list[Edge] = field(default_factory=list)
    lease: float = 10.0
    checkpoint_clocks: int = 100
    insecure: bool = False
    version: int = VERSION

    @property
    def replicas(self) -> int:
        return len(self.processes) // len(self.stages)

    @property
    def digest(self) -> int:
        """Alike where plans are: 56 bits."""
        return int(sha256(self.text().encode()).hexdigest()[:14], 16)

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def pipeline(self, replica: int) -> list[Process]:
        """By stage."""
        return sorted((p for p in self.processes if p.replica == replica), key=lambda p: p.stage)

    def on(self, host: str) -> list[Process]:
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

    def address(self, place: Stage | Process) -> str:
        return f"tcp://{self.hosts[place.host]}:{place.port}"

    def settings(self, stage: int) -> dict[str, Any]:
        """The flags of the run of this stage."""
        ours = {"workers": self.replicas, "lease": self.lease, "checkpoint_clocks": self.checkpoint_clocks}
        return self.stages[stage].flags | ours


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


def parse(text: str) -> Layout:
    """Raises UsageError, one sentence that names what is wrong."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--plan: it is no JSON ({error})") from None
    if isinstance(value, dict) and value.get("version") != VERSION:
        raise UsageError(f"--plan: it has version {value.get('version')}, and this release reads {VERSION}")
    for name, kind in (("stages", Stage), ("edges", Edge), ("processes", Process)):
        if isinstance(value, dict) and isinstance(rows := value.get(name, []), list):
            value[name] = [_row(kind, f"{name}[{i}]", row) for i, row in enumerate(rows[:PROCESSES_MAX])]
    layout = _row(Layout, "the plan", value)
    _check(layout)
    return layout


def _check(plan: Layout) -> None:
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
    places: list[Stage | Process] = [*plan.stages, *plan.processes]
    for place in places:
        if place.host not in plan.hosts:
            raise UsageError(f"--plan: host {place.host} has no address in hosts")
        parse_address("--plan:", plan.address(place))
    taken = [(place.host, place.port + i) for place in places for i in range(_ports(place))]
    if twice := [f"{host}:{port}" for host, port in taken if taken.count((host, port)) > 1]:
        raise UsageError(f"--plan: port {twice[0]} is given twice; shard i of a server takes the port i above it")
    if not 0 < plan.lease < 86400 or plan.checkpoint_clocks < 1:
        raise UsageError("--plan: lease is a number of seconds above 0, and checkpoint_clocks at least 1")
    for index, stage in enumerate(plan.stages):
        unknown = set(stage.flags) & set(OURS) | set(stage.flags) - (set(Settings.__slots__) - {"plan"})
        if unknown:
            raise UsageError(f"--plan: stages[{index}] has the flag {min(unknown)}, which is none of a stage's server")
        try:
            Settings(**plan.settings(index)).validated()
        except TypeError as error:
            raise UsageError(f"--plan: a flag of stages[{index}] has the wrong type ({error})") from None
    keyed = {bool(p.key) for p in plan.processes}
    if len(keyed) > 1 or not all(KEY.fullmatch(p.key) for p in plan.processes):
        raise UsageError("--plan: key is the public key of each process, 64 hex digits, or none has one")
    if not (plan.insecure or True in keyed or all(map(_is_loopback, {plan.hosts[place.host] for place in places}))):
        raise UsageError(
            "--plan: anyone who reaches these hosts could join; give each process its key, or say insecure: true"
        )


def _ports(place: Stage | Process) -> int:
    return int(place.flags.get("shards", 1)) if isinstance(place, Stage) else 1


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in LOCAL_HOSTS
