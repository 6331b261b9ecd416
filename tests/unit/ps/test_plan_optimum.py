"""The plan that ps-plan prints beside the best of all plans over hosts left out, clusters, servers and ways, by another model.

The model is written from docs/planning.md, for networks whose wires are known. All flows of a level send at once, and each
takes as long as the busiest card, wire or link on its way. A step takes at least as long as each of these is busy with all
levels. No code of the planner is used. network.json does not say where wires are, but for the networks that name places.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, reduce
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from narrows.ps.command.planning.plan import command as ps_plan

NETWORKS = Path(__file__).parent / "networks"
BEST = 1.15
Array = npt.NDArray[np.float64]
Groups = tuple[tuple[int, ...], ...]

# Mode, S, SPEC, H, updates in flight, bytes a parameter, loss over bsp with 2, 4, 8, 16 children. "iso": local, outer iso.
GROWS = (0.0, 0.028, 0.077, 0.145)
# Of bsp whose children push updates: dense, with int4 both ways, with topk:0.5+sign both ways.
UPDATES, INT4, HALF = (0.0, 0.002, 0.017, 0.019), (0.0, 0.011, 0.017, 0.019), (0.0, 0.03, 0.038, 0.048)
ISO = {20: (-0.051, 0.031, 0.129), 50: (0.06, 0.18, 0.24)}
ISO_2BIT = {20: (-0.005, 0.068, 0.141), 50: (0.086, 0.18, 0.243)}  # states in int4
ROWS: tuple[tuple[str, int, str, int, int, float, tuple[float, ...]], ...] = (
    ("bsp", 0, "dense", 1, 1, 4.0, (0.0,)),
    ("ssp", 1, "dense", 1, 2, 4.0, (0.0, 0.002, 0.031, 0.077)),
    ("ssp", 1, "int4", 1, 2, 0.531, (0.0, 0.002, 0.031, 0.088)),
    ("ssp", 1, "topk:0.11+sign", 1, 2, 0.0786, GROWS),
    ("ssp", 2, "topk:0.11+sign", 1, 3, 0.0786, (0.004,)),
    ("ssp", 1, "cycle:0.25/0.24+sign", 1, 2, 0.0333, (0.018,)),
    ("ssp", 2, "cycle:0.15+sign", 1, 3, 0.019, (0.041,)),
    ("ssp", 4, "cycle:0.09+sign", 1, 5, 0.01209, (0.068,)),
    ("ssp", 3, "cycle:0.06+sign", 1, 4, 0.00783, (0.079,)),
    ("ssp", 2, "cycle:0.03+sign", 1, 3, 0.00404, (0.099,)),
    ("async", 0, "topk:0.11+sign", 1, 4, 0.0786, (0.072, 0.111)),
    ("local", 0, "dense", 50, 1, 4.0, (0.083, 0.177, 0.26)),
    ("bsp", 0, "int4", 1, 1, 0.531, INT4),
    ("bsp", 0, "topk:0.5+sign", 1, 1, 0.1914, HALF),
    ("bsp", 0, "topk:0.11+sign", 1, 1, 0.0786, (0.0, 0.03, 0.07, 0.12)),
    ("iso", 0, "dense", 20, 1, 4.0, ISO[20]),
    ("iso", 0, "dense", 50, 1, 4.0, ISO[50]),
    ("iso", 0, "2bit", 20, 1, 0.2559, ISO_2BIT[20]),
    ("iso", 0, "2bit", 50, 1, 0.2559, ISO_2BIT[50]),
)
SHARED = np.array([row[0] == "bsp" and row[2] == "dense" for row in ROWS])  # one optimizer, on the server
BELOW = np.array([row[0] in ("bsp", "ssp") for row in ROWS])
DENSE, FREE, OUTER = (
    np.array([row[at] == word for row in ROWS]) for at, word in ((2, "dense"), (0, "async"), (0, "iso"))
)
LOCAL, WINDOW, BYTES = (np.array([float(row[at]) for row in ROWS]) for at in (3, 4, 5))  # type: ignore[arg-type]
DOWN = np.where(BYTES == 0.2559, 0.531, BYTES)  # of 2bit up states are int4
ENCODE_S, SERVE_S = np.where(DENSE, 0.0, 2e-9), np.where(DENSE, 1.6e-9, 0.65e-9)
INSIDE = np.where(DENSE, 1.0, WINDOW)


@cache
def steps(children: int, clusters: bool = False) -> Array:
    """By row, steps to a loss beside those of bsp. Clusters push updates under bsp too."""
    found = []
    for shared, (*_, over) in zip(SHARED, ROWS, strict=True):
        over = UPDATES if shared and clusters else over
        losses = [*over, *(over[-1] + more - GROWS[len(over) - 1] for more in GROWS[len(over) :])]
        loss = float(np.interp(np.log2(max(children, 2)), (1, 2, 3, 4), losses))
        found.append(1.0 if (shared and not clusters) or children < 2 else (1 + max(0.0, loss)) ** 4.7)
    return np.array(found)


class World:
    """Hosts, links both ways, and places: `tree` has the place of each host, the widest places first."""

    def __init__(
        self, document: dict[str, Any], tree: Sequence[Sequence[int]], parameters: float, step_s: float
    ) -> None:
        self.document, self.parameters, self.step_s = document, parameters, step_s
        self.n = n = len(document["hosts"])
        none = [[np.nan if each is None else each for each in row] for row in document["delay_s"]]
        self.delay_s = np.array(none, np.float64)
        rate = [[0.0 if each is None else each / 8 for each in row] for row in document["rates"][0]["bits_per_second"]]
        self.rate = np.array(rate)
        np.fill_diagonal(self.rate, 0.0)
        self.speed = np.array(document.get("compute") or np.ones(n), np.float64)
        self.tree = [np.array(row) for row in tree]
        self.rates = {("out", i): float(self.rate[i].max()) for i in range(n)}
        self.rates |= {("in", i): float(self.rate[:, i].max()) for i in range(n)}
        self.paths = {(i, j): self.path(i, j) for i in range(n) for j in range(n) if i != j and self.rate[i, j]}

    def path(self, i: int, j: int) -> list[tuple[Any, ...]]:
        """What a message from i to j passes, and its rate in `rates`."""
        link: tuple[Any, ...] = ("link", i, j)
        self.rates[link] = float(self.rate[i, j])
        found: list[tuple[Any, ...]] = [("out", i), link, ("in", j)]
        for level, row in enumerate(self.tree):
            if row[i] != row[j]:
                wire: tuple[Any, ...] = ("wire", level, row[i], row[j])
                self.rates[wire] = float(self.rate[np.ix_(row == row[i], row == row[j])].max())
                return [*found, wire]
        return found

    def slowest_s(self, flows: list[tuple[int, int, float]], busy: Counter[tuple[Any, ...]]) -> list[float]:
        """Seconds a byte of each flow, while all are under way: (from, to, part). `busy` has what passes each thing then."""
        load = Counter[tuple[Any, ...]]()
        for i, j, part in flows:
            for thing in self.paths.get((i, j), ()):
                load[thing] += part  # type: ignore[assignment]
        busy.update(load)
        return [
            max((load[thing] / self.rates[thing] for thing in self.paths[i, j]), default=0.0)
            if (i, j) in self.paths
            else np.inf
            for i, j, _ in flows
        ]

    def level(
        self,
        own: Array,
        at: Sequence[int],
        servers: Sequence[int],
        more: Array,
        busy: tuple[Counter[Any], Counter[Any]],
    ) -> Array:
        """(children, ..., rows) clocks of the children that speak from the hosts `at`; own has a row of seconds of each clock.
        more: (children, ...) updates in flight inside."""
        parts, children = [(c, h) for c in range(len(at)) for h in servers if h != at[c]], len(at)
        share, trip = 1 / len(servers), np.zeros(children)
        ways = [self.slowest_s([(at[c], h, share) for c, h in parts], busy[0]),
                self.slowest_s([(h, at[c], share) for c, h in parts], busy[1])]  # fmt: skip
        slow = np.zeros((2, children))
        for number, (c, h) in enumerate(parts):
            slow[:, c] = np.maximum(slow[:, c], [way[number] for way in ways])
            trip[c] = max(trip[c], self.delay_s[at[c], h] + self.delay_s[h, at[c]])
        shape = (children, *[1] * (own.ndim - 2), 1)
        outer = OUTER * share * 1.8e-10 * self.parameters * (5 * self.parameters) ** (1 / 3)
        encode = ENCODE_S * self.parameters + outer
        up, down = (slow[way].reshape(shape) * size * self.parameters for way, size in enumerate((BYTES, DOWN)))
        up = np.maximum(up, children * SERVE_S * self.parameters * share)
        road = trip.reshape(shape) + up + down
        coded = longest(own + encode, up, down, (own + encode + road) / WINDOW)
        found = np.where(DENSE, longest(up, down, own + outer + road / WINDOW), coded)
        if (more > 1).any():
            road = encode + road
            deep = longest(own, encode, up, down, road / WINDOW, (more * own + road) / (WINDOW + more - 1))
            found = np.where((more > 1) & ~DENSE & (LOCAL == 1), deep, found)
        return found

    def costs(self, groups: Groups, servers: Sequence[int], roots: Sequence[int]) -> Array:
        """(rows inside, rows above) seconds of a step x steps to a loss. Groups of one host are workers of the root."""
        kept = [host for group in groups for host in group]
        own_s = self.step_s * self.n / len(kept) / self.speed
        below, above = (Counter[Any](), Counter[Any]()), (Counter[Any](), Counter[Any]())
        inside = np.empty((len(groups), len(ROWS)))
        for number, (group, server) in enumerate(zip(groups, servers, strict=True)):
            own = own_s[[*group]][:, None] + np.zeros(len(ROWS))
            alone = len(group) < 2
            inside[number] = (
                own[0] if alone else self.level(own, group, [server], np.ones((len(group), 1)), below).max(0)
            )
        deep = np.array([[INSIDE if len(group) > 1 else np.ones(len(ROWS))] for group in groups])[:, 0, :, None]
        own = inside[:, :, None] * LOCAL
        clocks = self.level(own, servers, roots, deep, above)
        samples = np.array([float(len(group)) for group in groups])[:, None, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            folded = np.where(np.isinf(clocks).any(0), 0.0, (samples / clocks).sum(0))
            step = np.where(FREE, len(kept) / folded, clocks.max(0)) / LOCAL
        for way in (0, 1):
            for thing in below[way] | above[way]:
                size = (BYTES, DOWN)[way]
                sent = below[way][thing] * size[:, None] + above[way][thing] * size / LOCAL
                step = np.maximum(step, sent * self.parameters / self.rates[thing])
        n, clusters = len(kept), len(groups) < len(kept)
        one, two, all_ = (steps(count, clusters) for count in (len(groups), 2, n))
        many = np.maximum(all_[None] * steps(2)[:, None], two[None] * steps(n)[:, None])
        times = np.where(SHARED[:, None] | (not clusters), one[None], many)
        return np.where(BELOW[:, None], step * times, np.inf)

    def alike(self) -> list[int]:
        """Of each host, the first one that may change places with it."""

        def swapped(i: int, j: int) -> bool:
            order = np.arange(self.n)
            order[[i, j]] = j, i
            tables = [self.rate, np.where(self.rate > 0, self.delay_s, 0.0)]
            rows = [row[:, None] == row for row in self.tree]
            return bool(self.speed[i] == self.speed[j]) and all(
                (table == table[np.ix_(order, order)]).all() for table in [*tables, *rows]
            )

        return [next(i for i in range(j + 1) if swapped(i, j)) for j in range(self.n)]

    def best(self) -> float:
        """The cost of the best of all plans. Plans of hosts that may change places are priced once."""
        found, kind, seen = np.inf, self.alike(), set[str]()
        for count in range(1, self.n + 1):
            for kept in combinations(range(self.n), count):
                own_s = self.step_s * self.n / count / self.speed[[*kept]]
                if min(own_s.max(), count / (1 / own_s).sum() * float(steps(count)[FREE][0])) >= found:
                    continue
                for groups in partitions([*kept]):
                    for servers in product(*groups) if len(groups) > 1 or count == 1 else ():
                        for root in kept:
                            parts = zip(groups, servers, strict=True)
                            key = repr((kind[root], sorted((sorted(kind[h] for h in group), kind[server], root in group,
                                                            root == server) for group, server in parts)))  # fmt: skip
                            if key not in seen:
                                seen.add(key)
                                found = min(found, float(self.costs(groups, servers, (root,)).min()))
        return found

    def printed(self, folder: Path, *words: str) -> float:
        """The cost of the plan that ps-plan prints."""
        (folder / "network.json").write_text(json.dumps(self.document))
        command = [str(folder / "network.json"), "--parameters", str(self.parameters), "--step", str(self.step_s)]
        out = folder / "plan.json"
        CliRunner().invoke(ps_plan, [*command, "--insecure", "--out", str(out), *words], catch_exceptions=False,
                           standalone_mode=False)  # fmt: skip
        plan = json.loads(out.read_text())
        number = {name: host for host, name in enumerate(self.document["hosts"])}
        home = {process["replica"]: number[process["host"]] for process in plan["processes"]}
        clusters = plan.get("clusters", [])
        groups = [tuple(home[replica] for replica in cluster["replicas"]) for cluster in clusters]
        servers = [number[cluster["host"]] for cluster in clusters]
        alone = [host for host in home.values() if not any(host in group for group in groups)]
        roots = [number[each["host"]] for each in [plan["stages"][0], *plan.get("guests", [])]]
        costs = self.costs((*groups, *((host,) for host in alone)), (*servers, *alone), roots)
        return float(costs[row_of(clusters[0]["flags"]) if clusters else 0, row_of(plan["stages"][0]["flags"])])


def longest(*parts: Array) -> Array:
    return reduce(np.maximum, parts)


def row_of(flags: dict[str, Any]) -> int:
    mode = flags.get("outer", flags["sync"])
    told = (mode, flags.get("staleness", 0), flags.get("compress", "dense"), flags.get("local_steps", 1))
    return [row[:4] for row in ROWS].index(told)


def partitions(hosts: list[int]) -> Iterator[Groups]:
    if not hosts:
        yield ()
        return
    for rest in partitions(hosts[1:]):
        yield ((hosts[0],), *rest)
        for at, group in enumerate(rest):
            yield (*rest[:at], (hosts[0], *group), *rest[at + 1 :])


@pytest.mark.parametrize(("name", "tree", "parameters", "step_s"), [
    ("satellite", [[0, 0, 1, 1]], 2e6, 0.1),
    ("star-of-3", [[0, 1, 2]], 4e6, 0.2),
    ("uneven-lans", [[0, 0, 1, 1, 1, 1]], 3e7, 0.15),
])  # fmt: skip
def test_the_plan_of_a_network_that_was_found_hard_is_near_the_best(
    tmp_path: Path, name: str, tree: list[list[int]], parameters: float, step_s: float
) -> None:
    world = World(json.loads((NETWORKS / f"{name}.json").read_text()), tree, parameters, step_s)
    assert world.printed(tmp_path) <= BEST * world.best()


def drawn(seed: int) -> World:
    """Cities that differ: in their links, in how fast the links inside are, in speed; some with racks, a modem, a satellite, or
    without some links; some are named, as their wires are as fast as their links."""
    random = np.random.default_rng(seed)
    kind = ("uneven", "racks", "straggler", "modem", "missing", "near", "named")[seed % 7]
    city = np.array(([0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 2], [0, 0, 1, 2])[random.integers(4)])
    if kind == "racks":
        city = np.array([0, 0, 0, 0, 1])
    n, rack = len(city), np.array([0, 0, 1, 1, 2]) if kind == "racks" else city
    fast = np.array([10.0 ** random.uniform(8.9, 10) for _ in range(3)])
    wan = 10 ** random.uniform(7, 8.5, (3, 3))
    if kind == "near":
        wan = np.full((3, 3), fast.min() / random.uniform(1.1, 1.9))
    elif kind == "named":
        wan, fast = np.full((3, 3), 3e8), np.full(3, 3e8)
    wan = np.minimum(wan, wan.T)
    rate, delay = wan[np.ix_(city, city)], random.uniform(0.005, 0.05) * np.ones((n, n))
    for i, j in product(range(n), range(n)):
        if city[i] == city[j]:
            rate[i, j], delay[i, j] = fast[city[i]], 0.0002
            if rack[i] != rack[j]:
                rate[i, j] = rate[j, i] = fast[city[i]] / 5
    noise = random.uniform(0.98, 1.0, (n, n))
    rate = rate * np.minimum(noise, noise.T)
    if kind == "modem":
        rate[-1], rate[:, -1], delay[-1], delay[:, -1] = 1e5, 1e5, 0.3, 0.3
        city = np.where(np.arange(n) == n - 1, 9, city)
    speed = random.choice([0.5, 1.0, 1.0], n)
    if kind == "straggler":
        speed[-1] = 0.05
    absent = np.zeros((n, n), bool)
    if kind == "missing":
        # Not inside a city: nothing else shows that its hosts share a wire.
        i, j = random.choice(np.argwhere(city[:, None] != city))
        absent[i, j] = absent[j, i] = True
    rates, delays = ([[None if gone else each for each, gone in zip(row, none, strict=True)]
                      for row, none in zip(table.tolist(), absent, strict=True)] for table in (rate, delay))  # fmt: skip
    document: dict[str, Any] = {
        "format": 1, "hosts": [f"h{number}" for number in range(n)], "delay_s": delays,
        "rates": [{"message_bytes": 1, "bits_per_second": rates}], "compute": speed.tolist(),
    }  # fmt: skip
    if kind == "named":
        document["places"] = {
            f"city-{number}": [f"h{h}" for h in range(n) if city[h] == number] for number in {*city.tolist()}
        }
    tree = [city, np.where(city == 0, rack, 10 + np.arange(n))] if kind == "racks" else [city]
    work = 10 ** random.uniform(5.5, 7.5), 10 ** random.uniform(-1.5, 0)
    return World(document, [row.tolist() for row in tree], *work)


@pytest.mark.parametrize("seed", range(14))  # each kind twice
def test_the_plan_of_a_drawn_network_is_near_the_best(tmp_path: Path, seed: int) -> None:
    world = drawn(seed)
    assert world.printed(tmp_path) <= BEST * world.best()
