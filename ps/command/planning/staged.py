"""ps-plan of a pipeline: the plan, and the table that explains it.

How it works

1. `planned` builds the model of the pipeline from the flags.
2. `fastest` tries numbers of replicas, unless --replicas gives one: a replica on a slow host or behind a slow link
   holds up all others.
3. `candidates` searches a layout of hosts (pipelines/search.py), tries the hosts in the order of the network with it,
   chooses servers, modes and codings for each layout (pipelines/staged_planner.py), and moves hosts from the best, in virtual
   time.
4. The cheapest layout becomes the plan. `rows`, `steps`, `decides` and `alone` explain it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from narrows.protocols.config.deployment import Deployment
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.output import seconds, table
from narrows.protocols.runtime.network.key_files import public_key
from narrows.ps.planner import plan_writer
from narrows.ps.planner.choose import SMALL
from narrows.ps.planner.codec_costs import coded
from narrows.ps.planner.host_memory import ALONE_MODELS, MemoryNeed, check, of_level
from narrows.ps.planner.network import Network
from narrows.ps.planner.pipelines.cost import Job
from narrows.ps.planner.pipelines.cost import Layout as Arrangement
from narrows.ps.planner.pipelines.search import plan
from narrows.ps.planner.pipelines.staged_planner import StagedPlan, StagedPlanner
from narrows.ps.planner.pipelines.stages import (
    PipelineModel,
    carried,
    contiguous,
    fits,
    soonest_alone,
)

PARTS = 8  # up to SMALL hosts, so many even parts of the largest number of replicas are tried; halves are tried anyway
MANY = 256  # with more hosts only the largest number of replicas is tried, because a search takes seconds
MORE = 1.05  # fewer replicas are taken if they make this many times as many samples a second
FOUND, PLAIN = "what the search has found", "hosts in the order of the network and layers even"
MOVED = "the best of these after moves of hosts"


def planned(
    places: plan_writer.HostAddresses,
    parameters: float,
    step_s: float,
    script: str,
    *,
    stages: int,
    replicas: int | None,
    layers: int | None,
    activation_bytes: float | None,
    micro_batches: int,
    coding: str,
    layer_memory: float | None,
    money: float,
    seed: int,
    insecure: bool,
    keys: str,
    encode: str = "cpu",
) -> tuple[Deployment, list[str]]:
    """Plan a pipeline.

    Args:
        places: the network, and the addresses of its hosts.
        parameters: the number of the model's parameters.
        step_s: seconds of a step of one worker on a host of speed 1.
        script: the value of --script.
        stages: the number of stages.
        replicas: the number of replicas of each stage; None: as many as make the most samples a second.
        layers: the number of the model's layers; None is an error.
        activation_bytes: bytes of one micro-batch's float32 values at a cut; None is an error with several stages.
        micro_batches: the number of micro-batches of a step.
        coding: the coding of tensors between stages, or "auto".
        layer_memory: bytes that a layer needs where it is trained; None: as the account of memory has it.
        money: seconds of a step that a unit of money is worth.
        seed: the seed of the search.
        insecure: the commands go without keys.
        keys: the folder of each server's keys.
        encode: where workers code their updates, "cpu" or "gpu".

    Returns:
        The plan, and the lines that explain it.

    Raises:
        UsageError: a flag is missing or does not go with a pipeline, or no layout fits.
    """
    network = places.network
    if layers is None:
        raise UsageError("--pipeline: give --layers, how many the model has")
    if activation_bytes is None and stages > 1:
        raise UsageError(
            "--pipeline: give --activation-bytes, the float32 values of one micro-batch at a cut, in bytes"
        )
    if plan_writer.SAMPLES in script:
        raise UsageError("--script: replicas of a pipeline have even shares of a step; leave {samples} out")
    if money and not network.price.any():
        raise UsageError(
            "--money: the network has no price_per_byte, so no byte costs any; write it there, or leave this out"
        )
    cut = activation_bytes or 0.0
    model = PipelineModel(
        parameters, layers, step_s, micro_batches, cut, layer_memory, carried(), coded(gpu=encode == "gpu"), money
    )
    most = max(1, len(network.hosts) // stages)
    count, gain = (replicas, 1.0) if replicas else fastest(network, model, stages, most, coding, seed)
    job = model.job(stages, count, coding)
    tried = candidates(network, model, job, coding, seed)
    best = tried[0][1]
    names = [network.hosts[int(host)] for host in best.layout.grid.flat]
    publics = {} if insecure else {name: public_key(keys, name) for name in names}
    layout = plan_writer.staged(
        places, best.layout.grid, best.layout.depths, best.servers, best.ways, best.edges, publics, keys
    )
    lines = [
        *table(rows(network, best)),
        "",
        f"{tried[0][0]}: {steps(best)}; {decides(network, best)}",
        alone(network, model, job.replicas),
        *([check(network, needs(model, best))] if layer_memory is None else []),
        *(f"next: {label}: {steps(other)}" for label, other in tried[1:]),
    ]
    if not fits(network, model, contiguous(network, job)):
        lines.append(f"{PLAIN}: a host has no memory for its stage")
    if gain > 1:
        lines.append(
            f"{count} replicas make {gain:.2f} times as many samples a second as the {most} that there are hosts for; "
            "--replicas gives another number"
        )
    spare = [name for name in network.hosts if name not in names]
    if spare:
        lines.append(f"without a part: {', '.join(spare)}")
    return layout, lines


def fastest(
    network: Network, model: PipelineModel, stages: int, most: int, coding: str, seed: int
) -> tuple[int, float]:
    """Choose the number of replicas that makes the most samples a second, by steps to a loss and money.

    A replica on a slow host or behind a slow link holds up all others.

    Args:
        network: the hosts.
        model: the model of the pipeline.
        stages: the number of stages.
        most: the number of replicas that there are hosts for.
        coding: the coding of tensors between stages, or "auto".
        seed: the seed of the search.

    Returns:
        The number of replicas, and its samples a second as a multiple of those with `most` replicas.

    Raises:
        UsageError: no layout fits.
    """
    known = dict[int, float]()
    failed = list[UsageError]()

    def cost(count: int) -> float:
        """Return the price of a step, over the number of replicas, in the layout that a search finds; inf for none."""
        if count not in known:
            try:
                job = model.job(stages, count, coding)
                stager = StagedPlanner(network, model, job, coding)
                known[count] = stager.price(stager.stand(plan(network, job, seed).layout)) / count
            except UsageError as error:
                failed.append(error)
                known[count] = math.inf
        return known[count]

    parts = range(1, PARTS + 1) if len(network.hosts) <= SMALL else ()
    halvings = most.bit_length() if len(network.hosts) <= MANY else 1
    counts = {most * part // PARTS for part in parts} | {most >> turn for turn in range(halvings)}
    best = min(sorted(counts - {0}, reverse=True), key=cost)
    if math.isinf(cost(best)):
        raise failed[0]
    gain = cost(most) / cost(best)
    return (best, gain) if gain > MORE else (most, 1.0)


def candidates(
    network: Network, model: PipelineModel, job: Job, coding: str, seed: int
) -> list[tuple[str, StagedPlan]]:
    """Try several layouts, and return them with their labels, the cheapest first. Raise UsageError if none fits.

    The search prices computing and links as if one followed the other, so moves in virtual time follow the search. The
    search also prices exchanges as dense ones, which cost more money than others, so a second search looks at seconds
    alone.
    """
    stager, plain = StagedPlanner(network, model, job, coding), contiguous(network, job)
    tried = dict[bytes, tuple[str, StagedPlan]]()

    def stand(label: str, layout: Arrangement) -> None:
        known = tried.get(layout.key)
        names = label if known is None or known[0] == label else f"{known[0]}, {label}"
        tried[layout.key] = names, known[1] if known else stager.stand(layout)

    for each in [job, *([replace(job, money_s=0.0)] if job.money_s else [])]:
        stand(FOUND, plan(network, each, seed).layout)
    if fits(network, model, plain):
        stand(PLAIN, plain)
    best = min((staged for _, staged in tried.values()), key=stager.price)
    if (moved := stager.descended(best)) is not best:
        tried[moved.layout.key] = MOVED, moved
    return sorted(tried.values(), key=lambda each: stager.price(each[1]))


def rows(network: Network, plan: StagedPlan) -> list[list[str]]:
    """Return the rows of the table: its head, and a row for each stage."""
    priced = bool(network.price.any())
    found = [["stage", "layers", "hosts", "server on", "mode", "to the next stage", *["money a step"] * priced]]
    first = 0
    for stage, (names, depth) in enumerate(zip(plan.layout.names(network), plan.layout.depths, strict=True)):
        last = first + int(depth) - 1
        edge = plan.edges[stage] if stage < len(plan.edges) else None
        found.append(
            [
                str(stage),
                f"{first} to {last}",
                ", ".join(names),
                network.hosts[plan.servers[stage]],
                str(plan.ways[stage]),
                f"{edge.forward}, back {edge.backward}, {edge.in_flight} in flight" if edge else "-",
                *[f"{plan.money[stage]:.3g}"] * priced,
            ]
        )
        first = last + 1
    return found


def steps(plan: StagedPlan) -> str:
    """Describe the seconds of a step, its money, and the steps to a loss that the modes of the stages cost."""
    spent = f", {sum(plan.money):.3g} of money" if any(plan.money) else ""
    return f"predicted {seconds(plan.step_s)} a step{spent}, and {plan.steps:.2f} times bsp's steps to a loss"


def decides(network: Network, plan: StagedPlan) -> str:
    """Return a sentence on what the step of a plan waits for, and how long."""
    exchanges_s = max(0.0, plan.step_s - plan.alone_s)
    computing_s = sum(taken_s for part, taken_s in plan.critical.items() if part.other < 0)
    links_s = sum(taken_s for part, taken_s in plan.critical.items() if part.other >= 0)
    part, part_s = max(plan.critical.items(), key=lambda item: item[1])
    what = f"computing of stage {part.stage} on {network.hosts[part.host]}"
    if part.other >= 0:
        what = f"the link {network.hosts[part.host]}-{network.hosts[part.other]}"
    if exchanges_s > part_s:
        stage = max(range(len(plan.stages_s)), key=lambda stage: plan.stages_s[stage])
        what, part_s = f"the exchange of stage {stage} on {network.hosts[plan.servers[stage]]}", exchanges_s
        if plan.busiest.seconds > plan.stages_s[stage]:
            sender, receiver = (network.hosts[host] for host in (plan.busiest.sender, plan.busiest.receiver))
            what = f"the wire from {sender} to {receiver}, which stages share,"
    return (
        f"{what} decides with {seconds(part_s)}: a step waits {seconds(computing_s)} for computing, {seconds(links_s)} for "
        f"links between stages, {seconds(exchanges_s)} for exchanges of stages"
    )


def needs(model: PipelineModel, plan: StagedPlan) -> list[MemoryNeed]:
    """Return what the workers and the server of each stage need."""
    found = []
    for stage, (hosts, server, way) in enumerate(zip(plan.layout.grid.tolist(), plan.servers, plan.ways, strict=True)):
        parameters = model.stage_parameters(plan.layout, stage)
        found += of_level(way, parameters, hosts, [server], f"the server of stage {stage}", len(hosts))
    return found


def alone(network: Network, model: PipelineModel, replicas: int) -> str:
    """Describe the fastest single machine that would compute a whole step."""
    found = soonest_alone(network, model, replicas)
    if found is None:
        needed = model.layers * model.memory_bytes(ALONE_MODELS)
        return f"one machine alone: none has the {needed / 1e9:.3g} GB that all layers need"
    return f"one machine alone, {network.hosts[found[0]]}: {seconds(found[1])} a step"
