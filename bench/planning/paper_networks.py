"""The five networks of 2206.01288 and its job, GPT3-XL: 24 layers, 8 stages of 8 replicas.

They are facts of the authors' repository (DS3Lab/DT-FM, cda948f, its scheduler's cases 0 to 4). We took no code. A stage has
0.65 GB of gradients, a replica 0.471 GB of activations. TARGETS are the seconds of an iteration that a search has to reach.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from narrows.ps.planner.network import Network, from_places
from narrows.ps.planner.pipelines.cost import Job

GPT3_XL = Job(stages=8, replicas=8, layers=24, layer_bytes=0.65e9 / 3, activation_bytes=0.47124922275543213e9)
TARGETS = {"on demand": 17.0, "spot": 49.5, "universities": 17.7, "regional": 39.3, "worldwide": 59.5}


def clusters(counts: list[int], gbps: list[float], between_gbps: float, delays_ms: tuple[float, float]) -> Network:
    """Clusters of so many hosts with rates of their own inside, one rate between all; delays inside and between."""
    one = np.eye(len(counts), dtype=bool)
    return from_places(
        {
            "order": [str(number) for number in range(len(counts))],
            "delay_ms": np.where(one, *delays_ms),
            "bandwidth_gbps": np.where(one, np.array(gbps), between_gbps),
        },
        counts,
    )


def cities(count: int, names: str, links: str) -> Network:
    """`count` hosts in each city, 5 ms and 2 Gbit/s inside. `links`: a row for each pair, "ms Gbit/s", in order."""
    order = names.split()
    delay, rate = np.full((2, len(order), len(order)), [[[5.0]], [[2.0]]])
    pairs = zip(*np.triu_indices(len(order), 1), strict=True)
    for (a, b), link in zip(pairs, links.split(","), strict=True):
        delay[[a, b], [b, a]], rate[[a, b], [b, a]] = (float(value) for value in link.split())
    return from_places({"order": order, "delay_ms": delay, "bandwidth_gbps": rate}, [count] * len(order))


def worldwide(count: int) -> Network:
    """`count` hosts in each of eight cities."""
    return cities(
        count,
        "Oregon Virginia Ohio Tokyo Seoul London Frankfurt Ireland",
        "67 0.79, 49 1.10, 96 0.523, 124 0.46, 136 0.42, 143 0.404, 124 0.482,"
        "11 1.12, 143 0.524, 172 0.5, 76 1.16, 90 1.02, 67 1.05,"
        "130 0.694, 159 0.529, 86 1.05, 99 0.799, 77 1.14,"
        "34 1.10, 210 0.366, 223 0.36, 199 0.465,"
        "238 0.342, 235 0.358, 228 0.335,"
        "14 1.14, 12 1.09,"
        "24 1.08",
    )


NETWORKS: dict[str, Network] = {
    "on demand": clusters([8] * 8, [100.0] * 8, 3.125, (0, 0)),
    "spot": clusters([4] * 8 + [1] * 32, [100.0] * 8 + [1.25] * 32, 1.25, (0, 0)),
    "universities": clusters([32, 32], [5.0, 5.0], 1.12, (1, 11)),
    "regional": cities(16, "Virginia Oregon California Ohio", "67 1.15, 59 1.05, 11 1.12, 12 1.25, 49 1.10, 52 1.02"),
    "worldwide": worldwide(8),
}


def half_slow(network: Network, slowness: float = 4.0) -> Network:
    """Every second host is so many times slower."""
    speed = np.where(np.arange(len(network.hosts)) % 2, 1 / slowness, 1.0)
    return replace(network, compute=speed)
