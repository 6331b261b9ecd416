"""plan.json of a plan, and the commands that run it. docs/planning.md has the fields.

Rules
- A plan is one document, and commands are made of it alone.
- It has the fields of a pipeline: a model that is not cut is one stage, and its workers are the replicas of that. Fields that a
  pipeline has not (`clusters`, `guests`, `samples`) are there only where they say something.
- Shard i of a server takes the port i above it, so what stands at one address takes turns.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any

from narrows.protocols.addresses import LOCAL_HOSTS
from narrows.protocols.pipeline.channels import IN_FLIGHT_MAX
from narrows.protocols.planning.choose import Choice
from narrows.protocols.planning.levels import Indices, Work
from narrows.protocols.planning.network import Network
from narrows.protocols.planning.ways import Way

VERSION = 1
PORT = 5555  # of the first server at an address
PROCESS_PORT = 6000  # of the first process of a pipeline there
LEASE_S, CHECKPOINT_CLOCKS = 10.0, 100

Document = dict[str, Any]


@dataclass(slots=True)
class Ports:
    """The next port of each address, from `begin` on."""

    begin: int
    taken: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def take(self, address: str, count: int = 1) -> int:
        found = self.begin + self.taken[address]
        self.taken[address] += count
        return found


@dataclass(frozen=True, slots=True)
class Places:
    """Names and addresses of hosts; without one a host has its name."""

    network: Network
    given: Mapping[str, str]

    def of(self, host: int) -> str:
        name = self.network.hosts[host]
        return self.given.get(name, name)

    def document(self, insecure: bool, **rows: Any) -> Document:
        addresses = {name: self.of(host) for host, name in enumerate(self.network.hosts)}
        fixed = {"lease": LEASE_S, "checkpoint_clocks": CHECKPOINT_CLOCKS, "insecure": insecure, "version": VERSION}
        return {"hosts": addresses, **rows, **fixed}


def clustered(places: Places, plan: Choice, work: Work, shards: int, insecure: bool) -> Document:
    """A data parallel run; process r is host r's worker."""
    ports, peers, hosts = Ports(PORT), Ports(PROCESS_PORT), places.network.hosts

    def served(host: int, flags: Mapping[str, Any], count: int) -> Document:
        more = {"shards": count} if count > 1 else {}
        return {"host": hosts[host], "port": ports.take(places.of(host), count), "flags": {**flags, **more}}

    # Shards of one server are as many on each host that has some.
    root = served(plan.root, plan.above.flags(updates=bool(plan.clusters)), shards)
    rows: Document = {
        "stages": [root],
        "processes": [
            {"stage": 0, "replica": host, "host": name, "port": peers.take(places.of(host))}
            for host, name in enumerate(hosts)
        ],
        "edges": [],
    }
    if plan.clusters:
        rows["clusters"] = [
            served(server, plan.below.flags(), shards) | {"replicas": [*group]} for server, group in plan.clusters
        ]
    if plan.spread[1:]:
        rows["guests"] = [served(host, {}, shards) for host in plan.spread[1:]]
    if work.batch:
        rows["samples"] = work.samples(places.network)
    return places.document(insecure, **rows)


def in_flight(network: Network, grid: Indices, activation_bytes: float, micro_s: float) -> list[int]:
    """For each edge of `grid` (stages, replicas), the micro-batches that its slowest pair's round trip covers.

    activation_bytes: of one micro-batch, one way. micro_s: seconds between two micro-batches of the slowest stage.
    """
    way = network.transfer_s(activation_bytes)
    trip = [float((way[here, there] + way[there, here]).max()) for here, there in pairwise(grid)]
    return [min(IN_FLIGHT_MAX, ceil(each / micro_s)) for each in trip]


def staged(
    places: Places,
    grid: Indices,
    depths: Indices,
    servers: Sequence[int],
    ways: Sequence[Way],
    coding: str,
    flying: Sequence[int],
    keys: Mapping[str, str],
) -> Document:
    """A pipeline. `grid` (stages, replicas) has hosts, `depths` (stages,) the layers of each stage.

    servers, ways: the host and the flags of each stage's server; `coding`: of each edge, both ways; `flying`: its `in_flight`.
    keys: the public key of each host; none: the plan is insecure.
    """
    ports, peers, hosts = Ports(PORT), Ports(PROCESS_PORT), places.network.hosts
    return places.document(
        not keys,
        stages=[
            {"host": hosts[host], "port": ports.take(places.of(host)), "flags": way.flags(), "layers": int(depth)}
            for host, way, depth in zip(servers, ways, depths, strict=True)
        ],
        processes=[
            {"stage": stage, "replica": replica, "host": hosts[host], "port": peers.take(places.of(int(host)))}
            | ({"key": keys[hosts[host]]} if keys else {})
            for stage, group in enumerate(grid)
            for replica, host in enumerate(group)
        ],
        edges=[{"forward": coding, "backward": coding, "in_flight": count} for count in flying],
    )


def commands(plan: Document, script: str, keys: str) -> dict[str, list[str]]:
    """Lines for each host of a data parallel plan, servers first. `script` may have {samples}.

    `keys`: the folder of each server's keys, where the plan is not insecure."""
    found: dict[str, list[str]] = {name: [] for name in plan["hosts"]}
    (root,), clusters = plan["stages"], plan.get("clusters", [])
    inside = {replica: cluster for cluster in clusters for replica in cluster["replicas"]}

    def address(server: Document) -> str:
        return f"tcp://{plan['hosts'][server['host']]}:{server['port']}"

    def access(server: Document) -> list[str]:
        return ["--insecure"] if plan["insecure"] else ["--keys", keys if server is root else f"{keys}-cluster"]

    def key(flag: str, name: str) -> list[str]:
        return [] if plan["insecure"] else [flag, f"{name}.key"]

    def bind(server: Document) -> list[str]:
        host = plan["hosts"][server["host"]]
        return ["--bind", f"tcp://{host if host in LOCAL_HOSTS else '0.0.0.0'}:{server['port']}"]

    def serve(server: Document, children: Mapping[str, str], *more: str) -> None:
        """`children`: their roles by name."""
        words = []
        if not plan["insecure"]:
            folder = access(server)[1]
            words = [["ps-serve", "keys", "init", folder]]
            for name, role in children.items():
                words.append(["ps-serve", "keys", "add", name, *access(server), *(["--role", role] if role else [])])
        flags = [
            word for name, value in server["flags"].items() for word in ("--" + name.replace("_", "-"), str(value))
        ]
        words.append(["ps-serve", *bind(server), *access(server), *more, "--workers", str(len(children)), *flags])
        found[server["host"]] += map(shlex.join, words)

    direct = {row["host"]: "" for row in plan["processes"] if row["replica"] not in inside}
    serve(root, direct | {f"{cluster['host']}-cluster": "cluster" for cluster in clusters})
    for cluster in clusters:
        members = {plan["processes"][replica]["host"]: "" for replica in cluster["replicas"]}
        serve(cluster, members, "--parent", address(root), *key("--parent-key", f"{cluster['host']}-cluster"))
    for guest in plan.get("guests", []):
        shards = ["--shards", str(guest["flags"].get("shards", 1))]
        words = ["ps-serve", "--join", address(root), *bind(guest), *access(root), *shards]
        found[guest["host"]].append(shlex.join(words))
    for row in plan["processes"]:
        server = inside.get(row["replica"], root)
        samples = str(plan["samples"][row["replica"]]) if "samples" in plan else ""
        words = [word.replace("{samples}", samples) for word in shlex.split(script)]
        found[row["host"]].append(
            shlex.join(["ps-worker", "--server", address(server), *key("--key", row["host"]), *words])
        )
    return found


def pipeline_commands(plan: Document, file: str, script: str, keys: str) -> dict[str, list[str]]:
    """The same of a pipeline: every host reads the plan, in `file`."""
    access = [] if plan["insecure"] else ["--keys", keys]
    found: dict[str, list[str]] = {name: [] for name in plan["hosts"]}
    for name in {stage["host"] for stage in plan["stages"]}:
        found[name].append(shlex.join(["ps-serve", "--plan", file, "--host", name, *access]))
    for name in {row["host"] for row in plan["processes"]}:
        key = [] if plan["insecure"] else ["--key", f"{name}.key"]
        found[name].append(shlex.join(["ps-worker", "--plan", file, "--host", name, *key, *shlex.split(script)]))
    return found
