"""The lab runs the plan of ps-plan and ten plans made by hand. The bench compares each step with its prediction.

    python bench/planning/predicted_steps.py               # three networks, all plans; about 20 minutes of an idle machine
    python bench/planning/predicted_steps.py --networks cities --plans plan,1 --steps 20
    python bench/planning/predicted_steps.py --scale       # seconds of planning for 64 and 512 machines

Rules
- Each city is a host of the lab. Its machines are processes there, and a switch joins the cities. A link is alike both ways.
- ps-probe measures the machines, and its network.json is planned with. A step is `--step`, or what a worker's even share takes
  alone. Machines share the cores here, which no plan knows of. So a step is short work and a pause of `--pause` seconds, as a
  step on a GPU leaves the processor free.
- The printed commands are run as they are, by bash, but for `--record` in each ps-worker's. A measured step is that of the
  slowest worker; where nobody waits, the harmonic mean of the workers'. Updates in flight end in bunches, and local steps have
  periods: a step is the median over stretches of several, after the first ones.
- "over plan": how many more seconds to a loss a plan by hand takes: its measured step x the steps that its way takes to a loss.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from narrows.protocols.config.deployment import Deployment
from narrows.ps.planner.choose import Chooser, DeploymentChoice, choices, choose, simplest_first
from narrows.ps.planner.codec_costs import coded
from narrows.ps.planner.modes_and_specs import BELOW, WAYS, ModeAndSpec
from narrows.ps.planner.network import Network
from narrows.ps.planner.plan_writer import HostAddresses, clustered, long_commands
from narrows.ps.planner.step_prices import Groups, TrainingWork

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contenders import wan
from lab import launch, netns, record
from lab.launch import CommandFailed
from planning import probe_accuracy
from planning.paper_networks import worldwide
from planning.probe_accuracy import Access

PROBE_S = 10.0  # of a round
ALONE_STEPS = 20
BATCH = 8  # windows of a step, over all workers
BUNCHES = 4
RUN_S, STRETCHES = 25.0, 8  # a run is so long, and has at least so many stretches


@dataclass(frozen=True)
class City:
    machines: int
    access: Access  # between it and the switch


NETWORKS = {
    "cities": (City(2, Access(100e6, 100e6, 0.01)), City(2, Access(100e6, 100e6, 0.01))),
    "narrow": (City(1, Access(20e6, 20e6, 0.03)), City(1, Access(20e6, 20e6, 0.03))),
    "three": (City(2, Access(100e6, 100e6, 0.005)), City(1, Access(20e6, 20e6, 0.03)), City(1, Access(5e6, 5e6, 0.05))),
}
# Hand-made: a server for each city or none, rows of WAYS above and of BELOW inside.
PLANS = (
    (False, 0, 0), (False, 1, 0), (False, 3, 0), (False, 4, 0), (False, 6, 0), (False, 10, 0), (False, 11, 0),
    (True, 0, 0), (True, 3, 0), (True, 4, 1),
)  # fmt: skip


def network_of(cities: Sequence[City]) -> Network:
    """Run ps-probe on each machine, and return the network that it finds."""
    found, _, _ = probe_accuracy.probe([city.access for city in cities], PROBE_S, [city.machines for city in cities])
    network = Network.parse(found)
    names = sorted(network.hosts, key=lambda name: int(name.removeprefix("host-")))
    return network.of([network.hosts.index(name) for name in names])


def cities_of(network: Network, cities: Sequence[City]) -> dict[str, str]:
    """A name for the address of each machine: those of one city share one, so that their servers have ports apart."""
    homes = [f"city-{number}" for number, city in enumerate(cities) for _ in range(city.machines)]
    return dict(zip(network.hosts, homes, strict=True))


def by_hand(chooser: Chooser, cities: Sequence[City]) -> Iterator[DeploymentChoice]:
    """Plans by hand; the root stands where the plan's price says."""
    alone, begin = chooser.alone, 0
    groups: list[tuple[int, ...]] = []
    for city in cities:
        groups.append(tuple(range(begin, begin + city.machines)))
        begin += city.machines
    for clusters, above, below in PLANS:
        found: Groups = tuple(groups) if clusters else alone
        yield chooser.priced(found, WAYS[above], BELOW[below], chooser.prices.hosts)


def start(host: netns.Host, line: str, folder: Path, name: str) -> Any:
    words = shlex.split(line)
    more = ["--record", str(folder / name)] if words[0] == "ps-worker" else ["--checkpoint-dir", "none"]
    line = shlex.join([words[0], *more, *words[1:]])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / f"{name}.log").open("w") as log:
        return host.popen(
            ["bash", "-c", line], stdout=log, stderr=log, cwd=launch.ROOT, env=launch.environment(PATH=path)
        )


def stretch(way: ModeAndSpec) -> int:
    """Steps over which a measured step is a mean."""
    mode = way.mode
    return mode.local_steps if mode.local_steps > 1 else 1 if mode.window == 1 else BUNCHES * mode.window


def step_of(told: Path, steps: int = 1) -> float:
    """Median seconds of a step, each over so many."""
    ends = [step["seconds"] for step in wan.steps_of(told)[wan.SETTLE : -1]]
    if len(ends) <= steps:
        raise CommandFailed(
            f"a run of {len(ends) + wan.SETTLE + 1} steps is too short to be measured: leave out --steps"
        )
    return float(statistics.median((b - a) / steps for a, b in zip(ends, ends[steps:], strict=False)))


def measure(
    cities: Sequence[City], layout: Deployment, names: Sequence[str], args: str, over: int, limit_s: float
) -> float:
    """Seconds of a step, of the slowest worker where one waits for it. Raises CommandFailed."""
    with tempfile.TemporaryDirectory() as temporary, netns.star([city.access.ways[0] for city in cities]) as net:
        folder = Path(temporary)
        homes = [host for host, city in zip(net.hosts, cities, strict=False) for _ in range(city.machines)]
        layout = replace(layout, hosts={name: home.address for name, home in zip(names, homes, strict=True)})
        lines = long_commands(layout, f"{wan.TASK} {args}")
        told = [(home, line) for name, home in zip(names, homes, strict=True) for line in lines[name]]
        servers = [each for each in told if each[1].startswith("ps-serve")]
        servers.sort(key=lambda each: "--parent" in each[1])  # the root first
        for number, (home, line) in enumerate(servers):
            start(home, line, folder, f"server{number}")
        bounded = layout.stages[0].flags["sync"] != "async"
        running = [
            start(home, line, folder, f"worker{number}")
            for number, (home, line) in enumerate(each for each in told if each not in servers)
        ]
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in running):
            if time.monotonic() > deadline or any(process.poll() for process in running):
                break
            time.sleep(wan.SAMPLE_S)
        for number, process in enumerate(running):
            if process.poll() != 0:
                said = [(folder / f"{name}.log").read_text()[-400:] for name in (f"worker{number}", "server0")]
                raise CommandFailed(f"worker {number} did not end well within {limit_s:g} s: {' | '.join(said)}")
        medians = [step_of(folder / f"worker{number}", over) for number in range(len(running))]
        return max(medians) if bounded else statistics.harmonic_mean(medians)


def alone_s(args: str) -> float:
    """Seconds of a step of the task without a server that is waited for: one worker on loopback."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "record"
        command = launch.ps_worker("--record", str(told), "--checkpoint-dir", "none")
        launch.run([*command, wan.TASK, *shlex.split(args), "--steps", str(ALONE_STEPS)], 300, launch.environment())
        return step_of(told)


def scale(recorder: record.Recorder) -> None:
    """CPU seconds of this process for choosing a plan."""
    for count in (64, 512):
        network = worldwide(count // 8)
        began, work = time.process_time(), TrainingWork(1e8, 1.0, coded())
        plan, *_ = simplest_first(choices(network, work))
        figures: record.Figures = {"CPU": (time.process_time() - began, "s"), "clusters": (len(plan.clusters), "")}
        recorder.add(f"{len(network.hosts)} machines", figures, table="time of planning")


@click.command(context_settings={"show_default": True})
@click.option("--networks", default=",".join(NETWORKS), help=f"of {', '.join(NETWORKS)}")
@click.option("--plans", default=",".join(["plan", *map(str, range(len(PLANS)))]), help="plan, and numbers of PLANS")
@click.option("--steps", type=int, help=f"of each run [as many as take {RUN_S:g} s]")
@click.option("--pause", default=0.3, help="seconds of a step besides its work")
@click.option("--args", default="", help="more flags of tasks/bytelm.py")
@click.option("--parameters", default=1.32e6, help="of that model")
@click.option("--step", "step_s", type=float, help="seconds of a step alone [measured]")
@click.option("--limit", default=300.0, help="seconds of a run")
@click.option("--scale", "sized", is_flag=True, help="how long planning takes")
@record.out_option("planning/predicted_steps")
def main(networks: str, plans: str, steps: int | None, pause: float, args: str, parameters: float, step_s: float | None,
         limit: float, sized: bool, out: Path) -> None:  # fmt: skip
    """Predicted and measured steps of plans in the lab."""
    with record.Recorder("planning/predicted_steps", out) as recorder:
        if sized:
            return scale(recorder)
        if missing := netns.available():
            raise click.ClickException(missing)
        for name in networks.split(","):
            network_plans(recorder, name, plans.split(","), f"{args} --pause {pause}", step_s, parameters, steps, limit)


def levels_of(plan: DeploymentChoice) -> str:
    return f"{plan.above}" + (f"; inside {len(plan.clusters)} clusters {plan.below}" if plan.clusters else "")


def network_plans(
    recorder: record.Recorder,
    name: str,
    plans: Sequence[str],
    args: str,
    step_s: float | None,
    parameters: float,
    steps: int | None,
    limit: float,
) -> None:
    """A line for each plan of one network. A plan that fails is told, and the others go on."""
    cities = NETWORKS[name]
    network = network_of(cities)
    share_s = step_s or alone_s(f"{args} --batch {BATCH // len(network.hosts)}")
    work = TrainingWork(parameters, share_s, coded())
    chooser = Chooser(network, work)
    all_plans = {"plan": choose(network, work)} | {str(k): plan for k, plan in enumerate(by_hand(chooser, cities))}
    beside = levels_of(all_plans["plan"])
    for which in plans:
        plan, levels = all_plans[which], levels_of(all_plans[which])
        layout = clustered(HostAddresses(network, cities_of(network, cities)), plan, work, 1, insecure=True, keys="")
        over = stretch(plan.above)
        count = steps or wan.SETTLE + over + max(STRETCHES, round(RUN_S / plan.step_s))
        try:
            found = measure(cities, layout, network.hosts, f"{args} --batch {BATCH} --steps {count}", over, limit)
        except CommandFailed as error:
            click.echo(f"FAILED {name}, {which}, {levels}: {error}", err=True)
            continue
        figures: record.Figures = {"to a loss": (found * plan.cost / plan.step_s, "s of its plan's steps")}
        figures |= {"measured": (1e3 * found, "ms"), "predicted": (1e3 * plan.step_s, "ms")}
        figures |= {"over predicted": (found / plan.step_s, ""), "step alone": (1e3 * share_s, "ms")}
        told = "the plan" if which == "plan" else f"by hand, {which}"
        recorder.add(levels, figures, table=name, beside=beside if "plan" in plans else "", note=told)


if __name__ == "__main__":
    main()
