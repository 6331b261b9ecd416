"""Networks of cities, and the plans of ps-plan for them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from narrows.ps.command.planning.plan import command as ps_plan
from narrows.ps.planner.network import Network, from_places


def cities(hosts: list[int], mbits: float, ms: float) -> Network:
    """Return a network of cities with 1 Gbit/s and 0.1 ms inside, and this link between any two."""
    one = np.eye(len(hosts), dtype=bool)
    return from_places(
        {
            "order": [chr(97 + number) for number in range(len(hosts))],
            "delay_ms": np.where(one, 0.1, ms),
            "bandwidth_gbps": np.where(one, 1.0, mbits / 1000),
        },
        hosts,
    )


def drawn_cities(seed: int, hosts: int) -> Network:
    """Draw hosts of other speeds in up to three cities, whose links differ a little."""
    random = np.random.default_rng(seed)
    city = random.integers(0, 3, hosts)
    far = city[:, None] != city
    rate = np.where(far, 3e7, 1e9) * random.uniform(0.5, 2, (hosts, hosts))
    delay_s = np.where(far, 0.03, 0.0002) * random.uniform(0.5, 2, (hosts, hosts))
    return Network.parse(
        {
            "format": 1,
            "hosts": [f"h{number}" for number in range(hosts)],
            "delay_s": delay_s.tolist(),
            "rates": [{"message_bytes": 1e6, "bits_per_second": rate.tolist()}],
            "compute": random.choice([0.5, 1.0, 1.5], hosts).tolist(),
        }
    )


def drawn(seed: int, hosts: int, /, **given: Any) -> Network:
    """Draw a network of hosts that differ in everything. Rates are of two sizes, and differ by direction."""
    random = np.random.default_rng(seed)
    document = {
        "format": 1,
        "hosts": [f"h{number}" for number in range(hosts)],
        "delay_s": random.uniform(0.001, 0.2, (hosts, hosts)).tolist(),
        "rates": [
            {"message_bytes": size, "bits_per_second": (8e6 * random.uniform(1, 30, (hosts, hosts))).tolist()}
            for size in (10_000, 10_000_000)
        ],
        "compute": random.choice([0.5, 1.0, 2.0], hosts).tolist(),
        "memory_bytes": random.choice([4e9, 8e9], hosts).tolist(),
        "price_per_byte": random.uniform(0, 1e-8, (hosts, hosts)).tolist(),
    }
    return Network.parse(document | given)


def planned(
    folder: Path, network: Network, *words: str, document: dict[str, Any] | None = None, **given: Any
) -> tuple[str, dict[str, Any]]:
    """Return the output and the plan. `given`: further fields of network.json; `document`: another one in its place."""
    n = len(network.hosts)
    (folder / "network.json").write_text(
        json.dumps(
            document
            or {
                "format": 1,
                "hosts": network.hosts,
                "delay_s": network.delay_s.tolist(),
                "rates": [{"message_bytes": 1, "bits_per_second": (8 * network.rates[0]).tolist()}],
                "compute": network.compute.tolist(),
                "step_seconds": [0.1] * n,
            }
            | given
        )
    )
    out = folder / "plan.json"
    said = CliRunner().invoke(
        ps_plan, [str(folder / "network.json"), "--parameters", "2e6", "--out", str(out), *words], catch_exceptions=False,
        standalone_mode=False,
    )  # fmt: skip
    return said.output, json.loads(out.read_text())


def told(output: str) -> list[list[str]]:
    return [shlex.split(line) for line in output.splitlines() if line.startswith("    ps-")]
