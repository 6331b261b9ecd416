"""The plan.json of a plan, and the commands that run it. docs/planning.md has the fields.

Rules
- The commands follow from plan.json alone. Short commands read plan.json on each host; long commands need no file.
- A model that is not cut is one stage, and its workers are the replicas of this stage.
- Shard i of a server takes the server's port plus i, so servers at one address take consecutive ranges of ports.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrows.protocols.config.deployment import ClusterServer, Deployment, StageEdge, StageServer, WorkerProcess
from narrows.protocols.errors import UsageError
from narrows.ps.planner.choose import DeploymentChoice
from narrows.ps.planner.modes_and_specs import DEFAULTS, ModeAndSpec
from narrows.ps.planner.network import Network
from narrows.ps.planner.step_prices import Indices, TrainingWork

PORT = 5555  # the first server at an address
PROCESS_PORT = 6000  # the first process of a pipeline at an address
SAMPLES = "{samples}"  # stands in a script's arguments for the samples of its worker


@dataclass(slots=True)
class PortNumbers:
    """The next free port of each address, from `begin` on."""

    begin: int
    taken: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by address, ports given away

    def take(self, address: str, count: int = 1) -> int:
        """Take `count` consecutive ports of an address; return the first."""
        found = self.begin + self.taken[address]
        self.taken[address] += count
        return found


@dataclass(frozen=True, slots=True)
class HostAddresses:
    """Names and addresses of hosts. A host without an address in `given` is reached by its name."""

    network: Network
    given: Mapping[str, str]

    def of(self, host: int) -> str:
        name = self.network.hosts[host]
        return self.given.get(name, name)

    @property
    def addresses(self) -> dict[str, str]:
        return {name: self.of(host) for host, name in enumerate(self.network.hosts)}


def clustered(
    places: HostAddresses, plan: DeploymentChoice, work: TrainingWork, shards: int, insecure: bool, keys: str
) -> Deployment:
    """Build the deployment of a data parallel run. Process r is the worker of host r.

    Args:
        places: the network, and the addresses of its hosts.
        plan: the chosen plan.
        work: the model and its step.
        shards: the number of shards of each server, on each host that has some.
        insecure: the run goes without keys.
        keys: the folder of the root's keys.
    """
    ports, peers, hosts = PortNumbers(PORT), PortNumbers(PROCESS_PORT), places.network.hosts
    below = {**plan.below.flags(), **({"cut": plan.above.cut} if plan.above.cut != DEFAULTS["cut"] else {})}

    def served(host: int, flags: Mapping[str, Any]) -> tuple[str, int, dict[str, Any]]:
        # Each host with shards of a server has the same number of them.
        return hosts[host], ports.take(places.of(host), shards), {**flags, **({"shards": shards} if shards > 1 else {})}

    return Deployment(
        places.addresses,
        [StageServer(*served(plan.root, plan.above.flags(updates=bool(plan.clusters))))],
        [WorkerProcess(0, host, name, peers.take(places.of(host))) for host, name in enumerate(hosts)],
        clusters=[ClusterServer(*served(server, below), replicas=[*group]) for server, group in plan.clusters],
        guests=[StageServer(*served(host, {})) for host in plan.spread[1:]],
        samples=work.samples(places.network) if work.batch else [],
        insecure=insecure,
        keys="" if insecure else keys,
    )


def staged(
    places: HostAddresses,
    grid: Indices,
    depths: Indices,
    servers: Sequence[int],
    ways: Sequence[ModeAndSpec],
    edges: Sequence[StageEdge],
    publics: Mapping[str, str],
    keys: str,
) -> Deployment:
    """Build the deployment of a pipeline.

    Args:
        places: the network, and the addresses of its hosts.
        grid: (stages, replicas) the host of each process.
        depths: (stages,) the number of layers of each stage.
        servers: the host of each stage's server.
        ways: the mode and SPEC of each stage's server.
        edges: the coding of each edge between two stages.
        publics: the public key of each host by its name, from the folder `keys`; empty for an insecure plan.
        keys: the folder of the keys.
    """
    ports, peers, hosts = PortNumbers(PORT), PortNumbers(PROCESS_PORT), places.network.hosts
    return Deployment(
        places.addresses,
        [
            StageServer(hosts[host], ports.take(places.of(host)), way.flags(), int(depth))
            for host, way, depth in zip(servers, ways, depths, strict=True)
        ],
        [
            WorkerProcess(stage, replica, hosts[host], peers.take(places.of(int(host))), publics.get(hosts[host], ""))
            for stage, group in enumerate(grid)
            for replica, host in enumerate(group)
        ],
        [*edges],
        insecure=not publics,
        keys=keys if publics else "",
    )


Lines = dict[str, list[str]]  # by host, its commands, those of servers first


def words_of(script: str) -> list[str]:
    """Split `--script` into words as a shell does. Raise UsageError for a quote that is not closed."""
    try:
        return shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--script {script}: close each quote, and write \\ twice at the end ({error})") from None


def commands(plan: Deployment, file: str, script: str) -> Lines:
    """Return the short commands of each host, which read the plan in `file`. Raise UsageError as `words_of` does."""
    found, words = making_keys(plan), words_of(script)
    for name, lines in found.items():
        here = ["--plan", file, "--host", name]
        if any(server.place.host == name for server in plan.servers()):
            lines.append(shlex.join(["ps-serve", *here]))
        if plan.on(name):
            lines.append(shlex.join(["ps-worker", *here, *words]))
    return found


def long_commands(plan: Deployment, script: str) -> Lines:
    """Return the long commands of each host, for a run without a pipeline. Raise UsageError as `words_of` does."""
    found, split = making_keys(plan), words_of(script)
    for server in plan.servers():
        found[server.place.host].append(shlex.join(["ps-serve", *server.flags]))
    for process in plan.processes:
        samples = str(plan.samples[process.replica]) if plan.samples else ""
        words = [word.replace(SAMPLES, samples) for word in split]
        key = ["--key", plan.key_of(process)] if plan.keys else []
        found[process.host].append(
            shlex.join(["ps-worker", "--server", plan.address(plan.server_of(process)), *key, *words])
        )
    return found


def handing_over(plan: Deployment) -> list[str]:
    """Return lines that name the key files which the user hands to each host before the run."""
    found = [f"    {path} {f'from {owner} ' if owner else ''}to {host}" for path, owner, host in plan.handed_over()]
    return ["hand over, each to the same path where the commands of its host are started (one folder for all needs nothing):",
            *found] if found else []  # fmt: skip


def making_keys(plan: Deployment) -> Lines:
    """Return the commands of each host that make the keys of a plan.

    A pipeline has none: its user makes the keys of its processes before the plan.
    """
    found: Lines = {name: [] for name in plan.hosts}
    for server in plan.servers() if len(plan.stages) == 1 else ():
        if server.keys and server.children:
            lines = [["init", server.keys]]
            for name, role in dict(server.children).items():
                lines.append(["add", name, "--keys", server.keys, *(["--role", role] if role != "worker" else [])])
            found[server.place.host] += [shlex.join(["ps-serve", "keys", *words]) for words in lines]
    return found
