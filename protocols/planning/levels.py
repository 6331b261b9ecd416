"""The cost of a step of a data parallel run on a network, with one server or with clusters below it: `Prices`.

A child of a server is a worker, or a cluster. `own` are its seconds of computing and encoding, `up` and `down` those of its
bytes. How long its clock takes of them says `Coded.clock_s`: a closed form of compression/predict.py. A run with a bound waits
for the slowest child. Without one n children make n / sum(1 / clock) updates a second. A cluster computes H clocks of its own,
H the local steps above. tests/protocols/test_choosing.py holds these forms to simulated runs.

Rules of links
- A port carries what all children of its host's server send: it is as fast as the host's fastest link.
- Places are hosts between which no slow link lies: single linkage at the widest gap of the rates, if that is PLACES wide. All
  links of one place to another are one wire. Without places each link is a wire of its own.
- A child on its server's host sends nothing.
- A server handles what all its children send, as a port does: so long takes `up` at least. Its shards share that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from narrows.protocols.errors import UsageError
from narrows.protocols.planning.network import Array, Network
from narrows.protocols.planning.ways import Way

Indices = npt.NDArray[np.intp]
Groups = tuple[tuple[int, ...], ...]  # hosts

PLACES = 2.0  # rates that differ less are those of one kind of link
SAME = 1.05  # and such a gap is noise of a measurement


@dataclass(frozen=True, slots=True)
class Coded:
    """The costs of a SPEC for a parameter. serve_s: the server's, for each child. clock_s: takes (own, up, down, round
    trip, window)."""

    bytes: float
    encode_s: float
    clock_s: Callable[[Array, Array, Array, Array, int], Array]
    serve_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """A model to train. step_s: seconds of an even share of a step, on a host of speed 1.

    `batch`: samples of a step that workers share by their speed; 0: evenly. `shards`: of each server."""

    parameters: float
    step_s: float
    coded: Mapping[str, Coded] = field(default_factory=dict)
    batch: int = 0
    shards: int = 1

    def samples(self, network: Network) -> list[int]:
        """Return the samples of each host, at least one: what is left over goes where the largest part of a sample is
        missing. Raises UsageError where there are fewer samples than hosts."""
        if self.batch < len(network.hosts):
            raise UsageError(f"--batch {self.batch}: {len(network.hosts)} workers need a sample each")
        exact = self.batch * network.compute / network.compute.sum()
        given = np.maximum(exact.astype(int), 1)
        while (missing := self.batch - int(given.sum())) != 0:
            at = int((exact - given).argmax() if missing > 0 else np.where(given > 1, exact - given, np.inf).argmin())
            given[at] += np.sign(missing)
        return [int(count) for count in given]

    def compute_s(self, network: Network) -> Array:
        """(n,) seconds of a step of each host."""
        share = np.array(self.samples(network)) / self.batch * len(network.hosts) if self.batch else 1.0
        found: Array = self.step_s * share / network.compute
        return found


def merges(network: Network) -> list[tuple[float, int, int]]:
    """Single linkage: (rate, host, host) of the fastest links that join all hosts, fastest first. A link is as fast as its
    slower way."""
    rate = np.minimum(network.rates[-1], network.rates[-1].T)
    n = len(rate)
    near, nearest, left = rate[0].copy(), np.zeros(n, np.intp), np.ones(n, bool)
    left[0], found = False, []
    for _ in range(n - 1):
        host = int(np.where(left, near, -np.inf).argmax())
        found.append((float(near[host]), int(nearest[host]), host))
        left[host] = False
        closer = left & (rate[host] > near)
        near[closer], nearest[closer] = rate[host][closer], host
    return sorted(found, key=lambda merge: -merge[0])


def joined(n: int, found: Sequence[tuple[float, int, int]]) -> Groups:
    """Groups of hosts that these links join."""
    label = np.arange(n)
    for _, one, other in found:
        label[label == label[other]] = label[one]
    groups: dict[int, list[int]] = {}
    for host in range(n):
        groups.setdefault(int(label[host]), []).append(host)
    return tuple(tuple(group) for group in groups.values())


def cuts(network: Network, most: int) -> list[Groups]:
    """Groups at the widest gaps of the rates, at most so many, the widest first; none has all hosts in one, or each alone."""
    found = merges(network)
    gaps = [(fast[0] / slow[0], at) for at, (fast, slow) in enumerate(pairwise(found), 1)]
    widest = sorted((gap for gap in gaps if gap[0] > SAME), key=lambda gap: (-gap[0], gap[1]))[:most]
    return [joined(len(network.hosts), found[:at]) for _, at in widest]


def places(network: Network) -> Indices:
    """(n,) the place of each host."""
    found = merges(network)
    ratios = [fast[0] / slow[0] for fast, slow in pairwise(found)]
    widest = int(np.argmax(ratios)) if ratios else -1
    groups = joined(len(network.hosts), found[: widest + 1] if ratios and ratios[widest] >= PLACES else [])
    place = np.zeros(len(network.hosts), np.intp)
    for number, group in enumerate(groups):
        place[[*group]] = number
    return place


class Prices:
    """Prices plans of `work` on `network`. Matrices have the child's row and the server's column."""

    def __init__(self, network: Network, work: Work) -> None:
        self.network, self.work = network, work
        self.hosts = np.arange(len(network.hosts))
        self.compute_s = work.compute_s(network)
        self.round_trip_s: Array = network.delay_s + network.delay_s.T
        fastest = network.rates.max(0)
        np.fill_diagonal(fastest, 0.0)
        self.port_out, self.port_in = fastest.max(1), fastest.max(0)
        self.place = places(network)
        self._sent_s: dict[float, Array] = {}
        self._sharing: dict[Groups, Array] = {}

    def sent_s(self, message_bytes: float) -> Array:
        """(n, n) seconds of the bytes alone, the sender's row."""
        if message_bytes not in self._sent_s:
            self._sent_s[message_bytes] = self.network.transfer_s(message_bytes) - self.network.delay_s
        return self._sent_s[message_bytes]

    def sharing(self, children: Groups) -> Array:
        """(n,) children that share the wire of a host that crosses to another place: those which are wholly of its own place.
        0: the host is of no such child."""
        if children not in self._sharing:
            homes = {group: int(self.place[group[0]]) for group in children if len({*self.place[[*group]]}) == 1}
            crossing = np.bincount(np.array([*homes.values()], np.intp), minlength=len(self.hosts))
            found = self._sharing[children] = np.zeros(len(self.hosts))
            for group, home in homes.items():
                found[[*group]] = crossing[home]
        return self._sharing[children]

    def roads(self, way: Way, children: Groups, rows: Indices, servers: Indices, count: int = 1) -> list[Array]:
        """Seconds up, down, and of a round trip, from the hosts `rows` to the hosts `servers`.

        `children`: the hosts that each child may speak from. `count`: hosts that the server is cut over."""
        at, back, coded = np.ix_(rows, servers), np.ix_(servers, rows), self.work.coded[way.compress]
        message = coded.bytes * self.work.parameters / count
        serve_s = len(children) * coded.serve_s * self.work.parameters / (count * self.work.shards)
        sent, others = self.sent_s(message), len(children) - 1
        share = np.maximum(self.sharing(children) * count, 1.0)
        wire = np.where(self.place[rows][:, None] == self.place[servers], 1.0, share[rows][:, None])
        up = np.maximum(sent[at] * wire, others * message / self.port_in[servers])
        down = np.maximum(sent[back].T * wire, others * message / self.port_out[servers])
        up = np.maximum(up, count * message / self.port_out[rows][:, None])
        down = np.maximum(down, count * message / self.port_in[rows][:, None])
        away = rows[:, None] != servers
        return [np.maximum(up * away, serve_s), down * away, self.round_trip_s[at] * away]

    def clocks(self, way: Way, own_s: Array, up: Array, down: Array, round_trip_s: Array) -> Array:
        """Clocks of children whose step takes `own_s`, a row for each."""
        mode, coded = way.mode, self.work.coded[way.compress]
        own = (mode.local_steps * own_s + coded.encode_s * self.work.parameters)[:, None]
        return coded.clock_s(own, up, down, round_trip_s, mode.window)

    def step_s(self, way: Way, clocks: Array) -> Array:
        """(servers,) seconds of a step, of the clocks (children, servers)."""
        mode = way.mode
        together: Array = clocks.max(0) if mode.bound is not None else len(clocks) / (1 / clocks).sum(0)
        return together / mode.local_steps

    def below_s(self, way: Way, cluster: Sequence[int]) -> Array:
        """(m,) seconds of a step inside a cluster, by the host of its server."""
        members = np.array(cluster)
        roads = self.roads(way, tuple((host,) for host in cluster), members, members)
        return self.step_s(way, self.clocks(way, self.compute_s[members], *roads))

    def above_s(self, way: Way, own_s: Array, groups: Groups, roots: Indices) -> tuple[float, int, tuple[int, ...]]:
        """(seconds of a step, the root, each group's server) of the cheapest of `roots`. A group whose server is on a host
        takes own_s[host] for a step. Servers are chosen exactly: each alone, for its root."""
        order = np.concatenate([np.array(group) for group in groups])
        begins = np.cumsum([0, *(len(group) for group in groups[:-1])])
        clocks = self.clocks(way, own_s[order], *self.roads(way, groups, order, roots))
        step_s = self.step_s(way, np.minimum.reduceat(clocks, begins))
        best = int(step_s.argmin())
        ends = [*begins[1:], len(order)]
        servers = [int(order[b + clocks[b:e, best].argmin()]) for b, e in zip(begins, ends, strict=True)]
        return float(step_s[best]), int(roots[best]), tuple(servers)

    def spread_s(self, way: Way, servers: Sequence[int]) -> float:
        """Seconds of a step of one server with a shard on each of these hosts."""
        roads = self.roads(way, tuple((int(host),) for host in self.hosts), self.hosts, np.array(servers), len(servers))
        slowest = [part.max(1)[:, None] for part in roads]
        return float(self.step_s(way, self.clocks(way, self.compute_s, *slowest))[0])

    def ring_s(self) -> float:
        """Seconds of a step of DDP, at least: the slowest host's even share, and a ring all-reduce in the order of `merges`."""
        order = [0]
        for _, one, other in merges(self.network):
            order += [host for host in (one, other) if host not in order]
        n, ring = len(order), list(zip(order, [*order[1:], order[0]], strict=True))
        sent_s = self.sent_s(4 * self.work.parameters / n) + self.network.delay_s
        slowest = max(float(sent_s[a, b]) for a, b in ring)
        return float((self.work.step_s / self.network.compute).max()) + 2 * (n - 1) * slowest
