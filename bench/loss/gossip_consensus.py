"""How fast gossip brings models together: measured over the real machines, beside what the mixing matrices predict.

    python bench/loss/gossip_consensus.py  # 3, 4, 7 and 8 workers, every topology, as Markdown
    python bench/loss/gossip_consensus.py --plot docs/consensus.png

Rules
- Models begin as normal values of their own and take no steps; nothing but mixing moves them. The network is that of
  tests/simulation/gossip_runs.py.
- "Measured" is the L2 distance of all models to their mean after so many rounds, of what it was at first. "Predicted" is the
  same for the product of the rounds' matrices, on the same models, in float64. "Gap" is that product's second largest
  singular value to the power 1/rounds: what a round leaves of any distance at most, over ROUNDS.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from narrows.protocols.config.topology import TOPOLOGIES, edges

sys.path.append(str(Path(__file__).resolve().parents[1] / "../tests"))

from simulation.gossip_runs import COUNT, Net

ROUNDS = 16
COUNTS = (3, 4, 7, 8)
SPECS = ("dense", "int8")

Values = npt.NDArray[np.float64]


def matrix(topology: str, number: int, count: int) -> Values:
    mixing = np.eye(count)
    for a, b, weight in edges(topology, number, range(count)):
        mixing[[a, b], [a, b]] -= weight
        mixing[[a, b], [b, a]] += weight
    return mixing


def distance(models: npt.NDArray[np.float32] | Values) -> float:
    wide = models.astype(np.float64)
    return float(np.linalg.norm(wide - wide.mean(0)))


def first(count: int) -> npt.NDArray[np.float32]:
    models: npt.NDArray[np.float32] = np.random.default_rng(count).standard_normal((count, COUNT)).astype(np.float32)
    return models


def measured(topology: str, spec: str, count: int, rounds: int) -> float:
    """The share of the models' first distance that is left after `rounds`."""
    net = Net(topology, spec)
    for _ in range(count):
        net.add(rounds, bound=0)
    net.introduce()
    models = first(count)
    for worker, node in net.nodes.items():
        node.begin(np.zeros(COUNT, np.float32), models[worker])
    net.run()
    return distance(np.stack([node.reached for node in net.nodes.values()])) / distance(models)


def predicted(topology: str, count: int, rounds: int) -> float:
    models: Values = first(count).astype(np.float64)
    before = distance(models)
    for number in range(rounds):
        models = matrix(topology, number, count) @ models
    return distance(models) / before


def gap(topology: str, count: int) -> float:
    product = np.eye(count) - 1 / count
    for number in range(ROUNDS):
        product = matrix(topology, number, count) @ product
    return float(np.linalg.norm(product, 2) ** (1 / ROUNDS))


def plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(COUNTS), figsize=(15, 4), sharey=True, layout="constrained")
    rounds = list(range(1, ROUNDS + 1))
    for axis, count in zip(axes, COUNTS, strict=True):
        for index, topology in enumerate(TOPOLOGIES):
            color = f"C{index}"
            axis.plot(rounds, [max(predicted(topology, count, r), 1e-9) for r in rounds], color=color, label=topology)
            for spec, marker in zip(SPECS, "ox", strict=True):
                points = [measured(topology, spec, count, r) for r in rounds]
                axis.plot(rounds, points, marker, color=color, markersize=4, label=f"{topology}, {spec}, measured")
        axis.set(title=f"{count} workers", xlabel="rounds", yscale="log", ylim=(1e-8, 2))
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="distance to the mean, of the first")
    axes[0].legend(fontsize=6)
    figure.savefig(path, dpi=110)


@click.command()
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="draw every round instead of the table")
def main(picture: Path | None) -> None:
    """Consensus of every topology."""
    if picture is not None:
        plot(picture)
        return
    click.echo(f"| topology | workers | gap | predicted, {ROUNDS} rounds | measured, dense | measured, int8 |")
    click.echo("|---|---|---|---|---|---|")
    for topology in TOPOLOGIES:
        for count in COUNTS:
            found = [measured(topology, spec, count, ROUNDS) for spec in SPECS]
            click.echo(
                f"| {topology} | {count} | {gap(topology, count):.3f} | {predicted(topology, count, ROUNDS):.1e} "
                f"| {found[0]:.1e} | {found[1]:.1e} |"
            )


if __name__ == "__main__":
    main()
