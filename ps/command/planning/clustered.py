"""ps-plan of a data parallel run: the plan, and the table that explains it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from narrows.protocols.config.deployment import Deployment
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.output import seconds, table
from narrows.ps.planner import plan_writer
from narrows.ps.planner.bottleneck import decides
from narrows.ps.planner.choose import NEAR_MAX, Chooser, DeploymentChoice, simplest_first
from narrows.ps.planner.codec_costs import coded
from narrows.ps.planner.host_memory import MemoryNeed, check, of_level
from narrows.ps.planner.host_subsets import ChosenHosts, keep, restricted
from narrows.ps.planner.network import Network, named
from narrows.ps.planner.step_prices import TrainingWork

ASYNC_RANGE = 0.8, 1.15  # simulated steps of `async` on random networks lay within these multiples of the closed form


def planned(
    places: plan_writer.HostAddresses,
    parameters: float,
    step_s: float,
    script: str,
    *,
    batch: int,
    shards: int,
    insecure: bool,
    keys: str,
    encode: str = "cpu",
    all_hosts: bool = False,
) -> tuple[Deployment, list[str]]:
    """Plan a data parallel run.

    Args:
        places: the network, and the addresses of its hosts.
        parameters: the number of the model's parameters.
        step_s: seconds of an even share of a step on a host of speed 1.
        script: the value of --script.
        batch: samples of a step, which workers share by speed; 0 for even shares.
        shards: the number of shards of each server.
        insecure: the commands go without keys.
        keys: the folder of each server's keys.
        encode: where workers code their updates, "cpu" or "gpu".
        all_hosts: leave no host out.

    Returns:
        The plan, and the lines that explain it.

    Raises:
        UsageError: the flags do not go together, or no plan exists on this network.
    """
    if (plan_writer.SAMPLES in script) != bool(batch):
        raise UsageError("--batch: give it together with {samples} in --script, where a worker finds its share")
    everybody, whole = places.network, TrainingWork(parameters, step_s, coded(gpu=encode == "gpu"), batch, shards)
    kept = keep(everybody, whole, all_hosts)
    network, work = restricted(everybody, whole, kept.hosts)
    places = replace(places, network=network)
    chooser = Chooser(network, work)
    fitting, notes, refused = fits(network, kept.plans, parameters)
    if not fitting:
        raise refused[0]
    plan, *others = simplest_first(fitting)
    layout = plan_writer.clustered(places, plan, work, shards, insecure, keys)
    names = network.hosts
    children = len(plan.groups)
    rows = [("level", "server on", "children", "mode", "ms a step", "steps beside bsp")]
    spread = f", shards on {', '.join(names[host] for host in plan.spread[1:])}" if plan.spread else ""
    rows.append(
        ("root", names[plan.root] + spread, str(children), str(plan.above), step_ms(plan),
         f"{plan.cost / plan.step_s:.2f}")
    )  # fmt: skip
    own = chooser.own_s(plan.below, plan.groups)
    for server, group in plan.clusters:
        rows.append(
            (f"cluster of {', '.join(names[host] for host in group)}", names[server], str(len(group)), str(plan.below),
             f"{1e3 * float(own[server]):.3g}", "")
        )  # fmt: skip
    ring_s = chooser.prices.ring_s()
    ddp = f"DDP {seconds(ring_s)} a step at least" if math.isfinite(ring_s) else "DDP finds no ring of links"
    lines = [
        *table(rows),
        "",
        f"predicted {step_ms(plan)} ms a step, and {plan.cost / plan.step_s:.2f} times bsp's steps to a loss; {ddp}; "
        f"{decides(chooser, plan)}",
    ]
    near = others[:NEAR_MAX]
    for other in near:
        text = described(names, other)
        if alike := [each for each in [plan, *near] if each is not other and described(names, each) == text]:
            text += differing(names, other, alike[0])
        lines.append(
            f"next: {text}, predicted {step_ms(other)} ms a step, and {other.cost / other.step_s:.2f} times bsp's steps"
        )
    lines += [notes[plan], *left_out(everybody, kept, bool(batch))]
    if batch:
        shared = zip(names, work.samples(network), strict=True)
        lines.append(f"samples of a step: {', '.join(f'{name} {count}' for name, count in shared)}")
    return layout, lines


def fits(
    network: Network, plans: Sequence[DeploymentChoice], parameters: float
) -> tuple[list[DeploymentChoice], dict[DeploymentChoice, str], list[UsageError]]:
    """Return the plans for which each host has memory, a sentence on each of them, and why the others have too little."""
    fitting, notes, refused = [], {}, []
    for plan in plans:
        try:
            notes[plan] = check(network, needs(plan, parameters))
            fitting.append(plan)
        except UsageError as error:
            refused.append(error)
    return fitting, notes, refused


def needs(plan: DeploymentChoice, parameters: float) -> list[MemoryNeed]:
    """Return what the workers and the servers of each level need."""
    workers = [group[0] for group in plan.groups if len(group) == 1]
    servers, clusters = plan.spread or (plan.root,), plan.clusters
    found = of_level(
        plan.above, parameters, workers, servers, "the root's server", len(plan.groups), updates=bool(clusters)
    )
    for server, group in clusters:
        found += of_level(plan.below, parameters, group, [server], "a cluster's server", len(group), parent=plan.above)
    return found


def described(names: Sequence[str], plan: DeploymentChoice) -> str:
    """Describe a plan by the modes and SPECs of its levels and its number of clusters."""
    clusters = "1 cluster" if len(plan.clusters) == 1 else f"{len(plan.clusters)} clusters"
    spread = f" with shards on {', '.join(names[host] for host in plan.spread)}" if plan.spread else ""
    return f"{plan.above}{spread}" + (f" over {clusters} with {plan.below}" if plan.clusters else "")


def differing(names: Sequence[str], plan: DeploymentChoice, other: DeploymentChoice) -> str:
    """Describe how `plan` differs from `other` of the same description: by its clusters, or by its servers' hosts."""
    groups = [group for _, group in plan.clusters]
    if groups != [group for _, group in other.clusters]:
        return f" ({'; '.join(', '.join(names[host] for host in group) for group in groups)})"
    servers = [plan.root, *(server for server, _ in plan.clusters)]
    return f" (servers on {', '.join(names[host] for host in servers)})"


def left_out(network: Network, kept: ChosenHosts, batch: bool) -> list[str]:
    """Return lines about the hosts that are left out, the cost without one host more, and the gain of --batch."""
    names, lines = network.hosts, []
    if absent := [name for host, name in enumerate(names) if host not in kept.hosts]:
        larger = f"{len(names) / len(kept.hosts):.3g} times"
        gains = (
            f"with all hosts a loss takes {kept.whole / kept.cost:.2f} times as long; --all-hosts keeps them"
            if math.isfinite(kept.whole)
            else f"with all hosts there is {kept.lacking}"
        )
        share = (
            "" if batch else f"; each other host computes {larger} its even share: give the script {larger} its batch"
        )
        lines.append(f"left out: {named(absent)}; {gains}{share}")
    if len(kept.hosts) == 1:
        lines.append(f"{names[kept.hosts[0]]} alone is fastest: python SCRIPT.py trains there without a server, too")
    if kept.missed and math.isfinite(kept.missed[1]):
        host, cost = kept.missed
        lines.append(
            f"without {names[host]}, the host that is missed least, a loss takes {cost / kept.cost:.2f} times as long"
        )
    if kept.by_speed and kept.by_speed < kept.cost:
        part = kept.by_speed / kept.cost
        lines.append(
            f"--batch, with {plan_writer.SAMPLES} in --script, shares a step by speed: a loss takes {part:.2f} times as long"
        )
    return lines


def step_ms(plan: DeploymentChoice) -> str:
    """Return the milliseconds of a step. A root without a bound has a range, because updates then arrive in bunches."""
    if plan.above.mode.bound is not None:
        return f"{1e3 * plan.step_s:.3g}"
    least, most = (1e3 * plan.step_s * factor for factor in ASYNC_RANGE)
    return f"{least:.3g} to {most:.3g}"
