"""ps-plan: the deployment of a run on a network: its clusters, the hosts of servers, the mode and SPEC of each level.

How it works

1. `_planner` takes clustered.py for a data parallel run, and staged.py with --pipeline, which needs SciPy.
2. `_taken` hands that planner its flags. A flag on the command line that the planner does not take is an error.
3. `_read` reads NETWORK.JSON: hosts with measured links, or places with numbers of machines.
4. The planner returns a `Deployment` and the lines that explain it.
5. The deployment is parsed again as a check, written to --out, and printed as commands for each host (plan_writer.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from narrows.protocols.addresses import bracketed, is_address
from narrows.protocols.config.deployment import CODINGS, Deployment, parse
from narrows.protocols.config.settings import REPLAN, SHARDS_MAX
from narrows.protocols.errors import UsageError
from narrows.protocols.runtime.cli.flags import COMMAND, run
from narrows.protocols.runtime.cli.output import replace_text
from narrows.ps.planner.network import STEP_S, Network, named, speeds
from narrows.ps.planner.network_places import placed
from narrows.ps.probe import measured_network

# Flags that both planners have in common.
FOR_ALL = (
    "network",
    "places",
    "machines",
    "parameters",
    "step_s",
    "addresses",
    "script",
    "form",
    "out",
    "replan",
    "replan_after",
)


MICRO_BATCHES_MAX = 4096  # the planner simulates each micro-batch on each host


class NumberOption(click.FloatRange):
    """A finite number within bounds."""

    name = "number"

    def __init__(self, least: float, most: float) -> None:
        super().__init__(least, most)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if math.isnan(found := float(super().convert(value, param, ctx))):
            self.fail(f"{value} is no number", param, ctx)
        return found


@click.command(context_settings=COMMAND)
@click.argument("network", metavar="NETWORK.JSON")
@click.option(
    "--places", metavar="NAME", default="", help="name of the network to plan on, if NETWORK.JSON describes places"
)
@click.option("--machines", metavar="COUNTS", default="",
              help="machines in these places: a total, shared evenly, or a number for each, as in 8x4,32x1 "
              "[those of the file]")  # fmt: skip
@click.option("--parameters", type=NumberOption(1, 1e15), required=True, help="parameters of the model, such as 1.3e6")
@click.option("--step", "step_s", type=NumberOption(*STEP_S),
              help="seconds of a step of one worker, with an even share of the samples, on a host of speed 1 "
              "[the smallest step_seconds of the network]")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=0), default=0,
              help="samples of a step, shared by speed; {samples} in the script is a worker's share [even shares]")  # fmt: skip
@click.option("--all-hosts", is_flag=True, help="use all hosts, though fewer may reach a loss sooner")
@click.option("--script", default="SCRIPT.py ARGS", show_default=True, help="command of each worker, as one word")
@click.option(
    "--shards", type=click.IntRange(1, SHARDS_MAX), default=1, show_default=True, help="shards of each server"
)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="HOST=ADDR",
    help="address at which others reach a host [that of the network, else its name]",
)
@click.option("--encode", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True,
              help="where workers code their updates: gpu, if the model is on one; servers code on a CPU")  # fmt: skip
@click.option("--insecure", is_flag=True, help="print commands without keys")
@click.option("--keys", default="KEYS", show_default=True, help="folder of each server's keys, in the commands")
@click.option("--pipeline", "stages", type=click.IntRange(min=1), help="cut the model into this many stages")
@click.option(
    "--replicas", type=click.IntRange(min=1), help="replicas of each stage [those with the most samples a second]"
)
@click.option("--layers", type=click.IntRange(min=1), help="equal layers of the model [--pipeline needs it]")
@click.option("--activation-bytes", type=NumberOption(0, 1e15),
              help="bytes of the float32 values of one micro-batch at a cut, before coding "
              "[--pipeline needs it]")  # fmt: skip
@click.option(
    "--micro-batches",
    type=click.IntRange(1, MICRO_BATCHES_MAX),
    default=8,
    show_default=True,
    help="micro-batches of a step of a pipeline",
)
@click.option("--coding", type=click.Choice(("auto", *CODINGS)), default="auto", show_default=True,
              help="coding of tensors between stages; auto: dense on each direction of an edge that is fast enough, "
              "else int8")  # fmt: skip
@click.option("--layer-memory", type=NumberOption(0, 1e18),
              help="memory of a host for one layer and its part of the stage's server, in bytes "
              "[by the account of memory, with AdamW]")  # fmt: skip
@click.option("--money", type=NumberOption(0, 1e18), default=0.0,
              help="seconds of a step that a unit of money is worth, by price_per_byte in the network "
              "[0: the cost is only shown]")  # fmt: skip
@click.option("--replan", type=click.Choice(REPLAN), help="if another mode or SPEC would be 20 % faster in the running run: "
              "off, say (print it), or change (switch to it) [say]")  # fmt: skip
@click.option(
    "--replan-after",
    type=click.FloatRange(1, 86400),
    help="seconds for which that gain must last without a break [300]",
)
@click.option("--commands", "form", type=click.Choice(["short", "long"]), default="short", show_default=True,
              help="short: commands with which each host reads the plan; long: a command for each process")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="seed of the search for a pipeline")
@click.option("--out", default="plan.json", show_default=True, help="file of the plan")
@click.version_option(package_name="narrows", allow_from_autoenv=False)
@click.pass_context
def command(context: click.Context, /, network: str, places: str, machines: str, parameters: float, step_s: float | None,
            addresses: tuple[str, ...], out: str, script: str, form: str, **flags: Any) -> None:  # fmt: skip
    """Find the plan that reaches a loss soonest, by prediction, on the hosts of NETWORK.JSON, which ps-probe writes.

    \b
    ps-plan network.json --parameters 1.3e6 --step 0.1 --script 'train.py --lr 0.002'
    ps-plan network.json --parameters 1.3e9 --step 2 --pipeline 4 --layers 24 --activation-bytes 5e7
    ps-plan cities.json --places europe --machines 64 --parameters 1e8 --step 1
    """
    from narrows.ps.planner import plan_writer

    planned = _planner(flags["stages"])
    taken = _taken(context, planned, flags)
    if flags["stages"] and form == "long":
        raise UsageError("--commands long: the stages of a pipeline find each other by the plan alone; leave it out")
    read, step, unknown, known = _read(network, places, machines)
    step_s = step_s or step
    if step_s is None:
        raise UsageError(f"{network} has no step_seconds: give --step, the seconds of a step of one worker")
    layout, lines = planned(
        plan_writer.HostAddresses(read, _addresses(read, addresses, known)), parameters, step_s, script, **taken
    )
    layout = layout.with_flags({name: flags[name] for name in ("replan", "replan_after") if flags[name] is not None})
    parse(layout.text())  # no plan is written that the commands would refuse to read
    long = form == "long"
    commands = plan_writer.long_commands(layout, script) if long else plan_writer.commands(layout, out, script)
    _write(out, layout.text())
    click.echo("\n".join([*lines, *([unknown] if unknown else []), ""]))
    for host, words in commands.items():
        if words:
            click.echo("\n".join([f"on {host}:", *(f"    {line}" for line in words)]))
    if keys := plan_writer.handing_over(layout):
        click.echo("\n".join(keys))
    click.echo(f"\n{out} has the plan{'' if long else '; each host needs a copy'}")


Planner = Callable[..., tuple[Deployment, list[str]]]  # the plan, and lines that explain it


def _planner(stages: int | None) -> Planner:
    """Return the planner. Raise UsageError for a pipeline if SciPy, which only pipelines need, is missing."""
    if not stages:
        from narrows.ps.command.planning import clustered

        return clustered.planned
    try:
        from narrows.ps.command.planning import staged
    except ImportError:
        raise UsageError("SciPy is missing here: pip install 'narrows[plan]'") from None
    return staged.planned


def _taken(context: click.Context, planned: Planner, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the flags that this planner takes.

    A flag that it does not take is an error on the command line. In the environment it may be meant for other commands.

    Raises:
        UsageError: the command line has such a flag.
    """
    takes = signature(planned).parameters
    for option in context.command.params:
        name = option.name or ""
        if name in takes or name in FOR_ALL or context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        which = "of a pipeline" if flags["stages"] else "without --pipeline"
        raise UsageError(f"{option.opts[0]}: a plan {which} has no use for it; leave it out")
    return {name: value for name, value in flags.items() if name in takes}


def _read(path: str, places: str = "", machines: str = "") -> tuple[Network, float | None, str, dict[str, str]]:
    """Read NETWORK.JSON.

    Returns: The network; the step seconds of its fastest host, None if no host has timed its steps; a sentence about
        hosts whose speed is not known, "" for none; and the addresses of hosts by their names.

    Raises:
        UsageError: the file cannot be read, or is no network.
    """
    try:
        document = dict(json.loads(Path(path).read_text("utf-8"), parse_constant=_no_number))
        if "hosts" in document and (places or machines):
            raise UsageError("--places and --machines are for a file that describes places; this one has hosts")
        network = Network.parse(document) if "hosts" in document else placed(document, places, machines)
        known, steps = speeds(document, len(network.hosts)), [s for s in document.get("step_seconds") or [] if s]
        unknown = [name for name, speed in zip(network.hosts, known, strict=True) if speed is None]
        taken = _taken_for(unknown, len(network.hosts))
        return network, min(steps, default=None), taken, measured_network.addresses(document)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise UsageError(f"{path}: it is no network (its brackets are nested too deeply)") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{path}: it is no network ({error})") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON")


def _taken_for(unknown: Sequence[str], hosts: int) -> str:
    if not unknown:
        return ""
    if len(unknown) == hosts:
        return "the speeds of the hosts are not measured: all count as equally fast; ps-probe --script measures them"
    return (
        f"no speed is measured, so these count as fast as the fastest: {named(unknown)}; ps-probe --script measures it"
    )


def _addresses(network: Network, given: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the address of each host: the network's (`known`), unless --address (`given`) names another one."""
    found = dict[str, str]()
    for each in given:
        name, _, address = each.partition("=")
        if name not in network.hosts or not address:
            raise UsageError(f"--address {name}={address}: give HOST=ADDR with one of {named(network.hosts)}")
        if not is_address(f"tcp://{bracketed(address)}:1") or (":" in address and not _is_ip(address)):
            raise UsageError(f"--address {each}: give a host name or an IP address alone; ps-plan gives the ports")
        if found.setdefault(name, address) != address:
            raise UsageError(
                f"--address {name}={address}: it has {found[name]} already; give one address for each host"
            )
    known = {name: address for name, address in known.items() if name in network.hosts}
    return known | {name: bracketed(address) for name, address in found.items()}


def _is_ip(address: str) -> bool:
    try:
        return bool(ip_address(address.strip("[]")))
    except ValueError:
        return False


def _write(out: str, text: str) -> None:
    if kept := replace_text(out, text, "--out"):
        click.echo(f"the plan that was there is kept as {kept}", err=True)


def main() -> None:
    run(command, "ps-plan")


if __name__ == "__main__":
    main()
