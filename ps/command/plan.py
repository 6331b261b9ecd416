"""ps-plan: how a run stands on a network: who is in which cluster, where servers are, which mode and SPEC each level has."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from narrows.protocols.errors import UsageError
from narrows.protocols.planning.layout import Layout
from narrows.protocols.planning.network import Network, named, speeds
from narrows.protocols.planning.places import placed
from narrows.protocols.runtime.flags import COMMAND, run
from narrows.protocols.settings import SHARDS_MAX

CODINGS = ("dense", "fp16", "int8")  # of an edge between two stages


@click.command(context_settings=COMMAND)
@click.argument("network", metavar="NETWORK.JSON")
@click.option("--places", metavar="NAME", default="", help="NETWORK.JSON describes places: which of its networks")
@click.option("--machines", metavar="COUNTS", default="",
              help="in these places: in all, shared evenly, or of each, as in 8x4,32x1 [as many as it says]")  # fmt: skip
@click.option("--parameters", type=click.FloatRange(min=1), required=True, help="of the model: a number such as 1.3e6")
@click.option("--step", "step_s", type=click.FloatRange(min=0, min_open=True),
              help="seconds of a step of one worker, its even share, on a host of speed 1 "
              "[the least of step_seconds in the network]")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=0), default=0,
              help="samples of a step, shared by speed; {samples} in the script is a worker's [shared evenly]")  # fmt: skip
@click.option("--script", default="SCRIPT.py ARGS", show_default=True, help="what each worker runs, as one word")
@click.option(
    "--shards", type=click.IntRange(1, SHARDS_MAX), default=1, show_default=True, help="of each server, on its host"
)
@click.option("--address", "addresses", multiple=True, metavar="HOST=ADDR", help="where others reach a host [its name]")
@click.option("--insecure", is_flag=True, help="the commands go without keys")
@click.option("--keys", default="KEYS", show_default=True, help="folder of each server's keys, in the commands")
@click.option("--pipeline", "stages", type=click.IntRange(min=1), help="cut the model into so many stages")
@click.option("--replicas", type=click.IntRange(min=1), help="of each stage [as many as there are hosts for]")
@click.option("--layers", type=click.IntRange(min=1), help="of the model, alike [--pipeline]")
@click.option("--activation-bytes", type=click.FloatRange(min=0), default=0.0,
              help="what one replica sends across one boundary in a step, one way")  # fmt: skip
@click.option(
    "--micro-batches", type=click.IntRange(min=1), default=8, show_default=True, help="of a step of a pipeline"
)
@click.option(
    "--coding", type=click.Choice(CODINGS), default="dense", show_default=True, help="of tensors between stages"
)
@click.option("--commands", "form", type=click.Choice(["short", "long"]), default="short", show_default=True,
              help="short: each host reads the plan; long: what that does, in commands of their own")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="of the search for a pipeline")
@click.option("--out", default="plan.json", show_default=True, help="where the plan is written")
@click.version_option(package_name="narrows", allow_from_autoenv=False)
def command(network: str, places: str, machines: str, parameters: float, step_s: float | None, addresses: tuple[str, ...],
            out: str, stages: int | None, **flags: Any) -> None:  # fmt: skip
    """Plan a run on the hosts of NETWORK.JSON, as ps-probe writes it: the plan of least predicted seconds to a loss.

    \b
    ps-plan network.json --parameters 1.3e6 --step 0.1 --script 'train.py --lr 0.002'
    ps-plan network.json --parameters 1.3e9 --step 2 --pipeline 4 --layers 24 --activation-bytes 4e8
    ps-plan cities.json --places europe --machines 64 --parameters 1e8 --step 1
    """
    from narrows.protocols.planning import written

    if stages and flags["form"] == "long":
        raise UsageError("--commands long: the stages of a pipeline find each other by the plan alone; leave it out")
    read, step, unknown = _read(network, places, machines)
    step_s = step_s or step
    if step_s is None:
        raise UsageError(f"{network} has no step_seconds: give --step, the seconds of a step of one worker")
    hosts = written.Places(read, _addresses(read, addresses))
    flags |= {"out": out, "stages": stages}
    layout, lines = (_pipeline if stages else _run)(hosts, parameters, step_s, **flags)
    _write(out, layout.text())
    click.echo("\n".join([*lines, *([unknown] if unknown else []), ""]))
    long = flags["form"] == "long"
    script = flags["script"]
    commands = written.long_commands(layout, script) if long else written.commands(layout, out, script)
    for host, words in commands.items():
        if words:
            click.echo("\n".join([f"on {host}:", *(f"    {line}" for line in words)]))
    click.echo(f"\n{out} has the plan{'' if long else '; each host needs a copy'}")


def _read(path: str, places: str = "", machines: str = "") -> tuple[Network, float | None, str]:
    """The network, the step of its fastest host, and a sentence about hosts whose speed nobody knows."""
    try:
        document = dict(json.loads(Path(path).read_text("utf-8")))
        steps = [float(seconds) for seconds in document.get("step_seconds") or [] if seconds]
        if "hosts" in document and (places or machines):
            raise UsageError("--places and --machines are for a file that describes places; this one has hosts")
        network = Network.parse(document) if "hosts" in document else placed(document, places, machines)
        known = speeds(document, len(network.hosts))
        unknown = [name for name, speed in zip(network.hosts, known, strict=True) if speed is None]
        return network, min(steps, default=None), _taken_for(unknown, len(network.hosts))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{path}: it is no network ({error})") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _taken_for(unknown: Sequence[str], hosts: int) -> str:
    if not unknown:
        return ""
    if len(unknown) == hosts:
        return "nobody measured how fast the hosts are: all are taken for equally fast; ps-probe --script measures it"
    return f"taken for as fast as the fastest host, for nobody measured it: {named(unknown)}; ps-probe --script measures it"


def _addresses(network: Network, given: Sequence[str]) -> dict[str, str]:
    found = dict(each.partition("=")[::2] for each in given)
    for name, address in found.items():
        if name not in network.hosts or not address:
            raise UsageError(f"--address {name}={address}: give HOST=ADDR with one of {', '.join(network.hosts)}")
    return found


def _write(out: str, text: str) -> None:
    """At once or not at all."""
    temporary = Path(f"{out}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, out)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None


Planned = tuple[Layout, list[str]]  # and the table


def _run(places: Any, parameters: float, step_s: float, *, batch: int, script: str, shards: int, insecure: bool, keys: str,
         **_: Any) -> Planned:  # fmt: skip
    from narrows.protocols.planning import written
    from narrows.protocols.planning.choose import Chooser, choices, decides
    from narrows.protocols.planning.levels import Work
    from narrows.ps.coded import coded
    from narrows.ps.trial import tried  # and the machines of a run

    if ("{samples}" in script) != bool(batch):
        raise UsageError("--batch: give it together with {samples} in --script, where a worker finds its share")
    network, work = places.network, Work(parameters, step_s, coded(), batch, shards)
    chooser = Chooser(network, work)
    (plan, simulated_s), *others = tried(chooser.prices, choices(network, work))
    layout = written.clustered(places, plan, work, shards, insecure, keys)
    names = network.hosts
    children = len(plan.groups)
    rows = [("level", "server on", "children", "mode", "ms a step", "steps beside bsp")]
    spread = f", shards on {', '.join(names[host] for host in plan.spread[1:])}" if plan.spread else ""
    rows.append(
        ("root", names[plan.root] + spread, str(children), str(plan.above), f"{1e3 * plan.step_s:.3g}",
         f"{plan.above.steps(children):.2f}")
    )  # fmt: skip
    own = chooser.own_s(plan.below, plan.groups)
    for server, group in plan.clusters:
        rows.append(
            (f"cluster of {', '.join(names[host] for host in group)}", names[server], str(len(group)), str(plan.below),
             f"{1e3 * float(own[server]):.3g}", f"{plan.below.steps(len(group)):.2f}")
        )  # fmt: skip
    ring_s = chooser.prices.ring_s()
    ddp = f"DDP {_seconds(ring_s)} a step at least" if math.isfinite(ring_s) else "DDP finds no ring of links"
    lines = [
        *table(rows),
        "",
        f"predicted {1e3 * plan.step_s:.3g} ms a step, {_simulated(simulated_s)}, and {plan.cost / plan.step_s:.2f} times "
        f"bsp's steps to a loss; {ddp}; {decides(chooser, plan)}",
    ]
    for other, other_s in others:
        clusters = "1 cluster" if len(other.clusters) == 1 else f"{len(other.clusters)} clusters"
        inside = f" over {clusters} with {other.below}" if other.clusters else ""
        lines.append(
            f"next: {other.above}{inside}, predicted {1e3 * other.step_s:.3g} ms a step, {_simulated(other_s)}, and "
            f"{other.cost / other.step_s:.2f} times bsp's steps"
        )
    if batch:
        shared = zip(names, work.samples(network), strict=True)
        lines.append(f"samples of a step: {', '.join(f'{name} {count}' for name, count in shared)}")
    return layout, lines


def _pipeline(places: Any, parameters: float, step_s: float, *, stages: int, replicas: int | None, layers: int | None,
              activation_bytes: float, micro_batches: int, coding: str, seed: int, insecure: bool, keys: str,
              **_: Any) -> Planned:  # fmt: skip
    from narrows.protocols.planning import written
    from narrows.protocols.planning.choose import for_stage
    from narrows.protocols.runtime.keys import public_key
    from narrows.ps.coded import coded

    try:
        from narrows.protocols.planning.cost import Job
        from narrows.protocols.planning.search import plan
    except ImportError:
        raise UsageError("SciPy is missing here: pip install 'narrows[plan]'") from None
    network = places.network
    if layers is None:
        raise UsageError("--pipeline: give --layers, how many the model has")
    replicas = replicas or max(1, len(network.hosts) // stages)
    job = Job(stages, replicas, layers, 4 * parameters / layers, activation_bytes, step_s / layers, 0.0, micro_batches)
    found = plan(network, job, seed)
    predicted, grid, depths = found.prediction, found.layout.grid, found.layout.depths
    own_s = predicted.pipeline_s + predicted.compute_s
    chosen = [
        for_stage(network, [int(host) for host in group], parameters * int(depth) / layers, own_s, coded())
        for group, depth in zip(grid, depths, strict=True)
    ]
    servers, ways, step = [c[0] for c in chosen], [c[1] for c in chosen], max(c[2] for c in chosen)
    slowest_s = max(
        job.layer_s * int(depth) / float(network.compute[group].min())
        for group, depth in zip(grid, depths, strict=True)
    )
    flying = written.in_flight(network, grid, activation_bytes / micro_batches, slowest_s / micro_batches)
    publics = {} if insecure else {network.hosts[host]: public_key(keys, network.hosts[host]) for host in grid.flat}
    layout = written.staged(places, grid, depths, servers, ways, coding, flying, publics, keys)
    rows = [("stage", "layers", "hosts", "server on", "mode")]
    first = 0
    for number, (names, depth) in enumerate(zip(found.layout.names(network), depths, strict=True)):
        last = first + int(depth) - 1
        rows.append(
            (str(number), f"{first} to {last}", ", ".join(names), network.hosts[servers[number]], str(ways[number]))
        )
        first = last + 1
    spare = f"; without a part: {', '.join(network.hosts[host] for host in found.spare)}" if found.spare else ""
    lines = [
        *table(rows),
        "",
        f"predicted {_seconds(step)} a step: {_seconds(predicted.compute_s)} of computing, {_seconds(predicted.pipeline_s)} "
        f"between stages; {_seconds(predicted.seconds)} with a dense exchange in every step{spare}",
        f"micro-batches on their way between stages: {', '.join(map(str, flying)) or 'none'}",
    ]
    return layout, lines


def _simulated(seconds: float | None) -> str:
    return "not simulated" if seconds is None else f"simulated {1e3 * seconds:.3g} ms"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def main() -> None:
    run(command, "ps-plan")


if __name__ == "__main__":
    main()
