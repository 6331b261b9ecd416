"""The cost of a step of a data parallel run on a network, with one server or with clusters below it: `StepPrices`.

A child of a server is a worker or a cluster. A way is the mode and SPEC of one level (`ModeAndSpec`).

How it works

    inside_s     seconds of a step inside each cluster, for each host that may have the cluster's server
        |
    children_s   seconds of a clock of each child of the root, for each root and each host of the child's server
        |        roads: seconds of the bytes up, of the bytes down, and of a round trip
        |        clocks: the closed form of the SPEC over own, up, down and the round trip
        |
    steps_s      the fastest server of each child, then all children together (together_s)
        |
    busiest      the busiest wire of both levels together: no step is shorter

1. `own` is a child's seconds of computing and encoding, `up` and `down` are those of its bytes. The closed forms of
   `CodecCost`, from compression/predict.py, give the seconds of a clock.
2. A run with a bound on staleness waits for the slowest child. Without a bound the children make sum(samples / clock)
   samples a second, and a step has the samples of all.
3. A cluster computes H clocks of its own for one clock of its parent; H is the number of local steps of the parent's
   mode.

tests/unit/ps/test_planner_choose.py holds these forms to simulated runs.

Rules of links
- A port carries what all children of its host's server send. A port is as fast as the host's fastest link.
- A place is a set of hosts whose links are faster than the link that joins them to the others: single linkage, cut
  where one branch has a gap (`places`). Places may lie in places. All links between two places that lie side by side
  are one wire, which children in one of them share. Every other link is a wire of its own. network.json may name places
  and the rates of wires.
- A child on its server's host sends nothing.
- Messages of both levels share cards, links and wires: a step takes at least as long as the busiest of them
  (`busiest`).
- A server handles what all its children send, one after the other, as a port does. `up` is at least that time. The
  shards of a server share this work.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from narrows.protocols.errors import UsageError
from narrows.ps.planner.codec_costs import CodecCost
from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Array, Network

Indices = npt.NDArray[np.intp]
# The hosts of each child of the root: one host for a worker, several for a cluster.
Groups = tuple[tuple[int, ...], ...]
WireKey = tuple[str | int, ...]

ALONE: Indices = np.zeros(1, np.intp)  # HostGroupings.inside of a child that is a worker
PLACES = 1.5  # least ratio of the rates inside a place to the rate of the link out of the place
NEAR = 2.0  # where the delay of the link out is this many times the delay inside, the ratio SAME suffices
DEPTH_MAX = 3  # levels of places
SHORTEST_S = 1e-12  # least seconds of a message on a link, where the network gives 0
ROADS_KEPT, ROADS_MAX = 8, 1 << 20  # results of `roads` that are kept for other modes; values of each of its arrays
SLOWEST = 1e-9  # bytes a second of the port of a host that has no link
SAME = 1.05  # two rates with a smaller ratio differ by the noise of a measurement


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """A model to train, and how its workers share a step."""

    parameters: float  # number of the model's parameters
    step_s: float  # seconds of an even share of a step on a host of speed 1
    coded: Mapping[str, CodecCost] = field(default_factory=dict)  # by SPEC
    batch: int = 0  # samples of a step, which workers share by their speed; 0: workers share a step evenly
    shards: int = 1  # of each server

    def samples(self, network: Network) -> list[int]:
        """Return the samples of each host, in proportion to its speed and at least one.

        A remainder goes to the hosts whose share lost the largest fraction of a sample by rounding.

        Raises:
            UsageError: there are fewer samples than hosts.
        """
        if self.batch < len(network.hosts):
            raise UsageError(f"--batch {self.batch}: {len(network.hosts)} workers need a sample each")
        exact = self.batch * network.compute / network.compute.sum()
        given = np.maximum(exact.astype(int), 1)
        while (missing := self.batch - int(given.sum())) != 0:
            at = int((exact - given).argmax() if missing > 0 else np.where(given > 1, exact - given, np.inf).argmin())
            given[at] += np.sign(missing)
        return [int(count) for count in given]

    def compute_s(self, network: Network) -> Array:
        """Return (n,) seconds that each host computes in a step."""
        share = np.array(self.samples(network)) / self.batch * len(network.hosts) if self.batch else 1.0
        found: Array = self.step_s * share / network.compute
        return found


@dataclass(frozen=True, slots=True)
class MessageFlow:
    """The messages of one size that a host sends to another host in a step."""

    sender: int
    receiver: int
    message_bytes: float
    messages: float  # in a step; below 1 where a round has several local steps


@dataclass(frozen=True, slots=True)
class BusyWire:
    """A network card, a link, or a wire between places."""

    seconds: float  # of a step in which the wire is busy
    sender: int  # a host that sends over the wire
    receiver: int


Merge = tuple[float, int, int]


def merges(network: Network) -> list[Merge]:
    """Return the links of single linkage: (rate, host, host) of the fastest links that join all hosts, the fastest
    first.

    A link is as fast as its slower direction. A missing link has the rate 0.
    """
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


def joined(n: int, found: Sequence[Merge]) -> Groups:
    """Return the groups of hosts that these links join. `n` is the number of hosts."""
    label = np.arange(n)
    for _, one, other in found:
        label[label == label[other]] = label[one]
    groups: dict[int, list[int]] = {}
    for host in range(n):
        groups.setdefault(int(label[host]), []).append(host)
    return tuple(tuple(group) for group in groups.values())


def ratio(fast: Merge, slow: Merge) -> float:
    return fast[0] / slow[0] if slow[0] else math.inf


def cuts(network: Network, most: int) -> list[Groups]:
    """Return the groupings at the widest gaps between rates, the widest first, `most` at most.

    No grouping has all hosts in one group, or each host alone.
    """
    found = merges(network)
    gaps = [(ratio(fast, slow), at) for at, (fast, slow) in enumerate(pairwise(found), 1)]
    widest = sorted((gap for gap in gaps if gap[0] > SAME), key=lambda gap: (-gap[0], gap[1]))[:most]
    return [joined(len(network.hosts), found[:at]) for _, at in widest]


def tight(network: Network) -> list[tuple[int, ...]]:
    """Return the hosts of each place.

    A branch of single linkage is a place if its slowest link is PLACES times as fast as the link that joins the branch
    to another branch. The ratio SAME suffices if the delay of the joining link is NEAR times the delay inside the
    branch.
    """
    delay_s = np.maximum(network.delay_s, network.delay_s.T)
    # Rate, delay and hosts of each branch, by its first host.
    branch: dict[int, tuple[float, float, tuple[int, ...]]]
    branch = {host: (math.inf, 0.0, (host,)) for host in range(len(network.hosts))}
    home, found = list(branch), list[tuple[int, ...]]()
    for rate, one, other in merges(network):
        out_s, ends = float(delay_s[one, other]), [branch.pop(home[one]), branch.pop(home[other])]
        for fast, in_s, hosts in ends:
            gap = fast / rate if rate else math.inf
            if len(hosts) > 1 and (gap >= PLACES or (gap >= SAME and out_s >= NEAR * in_s)):
                found.append(hosts)
        both = tuple(sorted(ends[0][2] + ends[1][2]))
        branch[both[0]] = rate, max(out_s, ends[0][1], ends[1][1]), both
        for host in both:
            home[host] = both[0]
    return found


def places(network: Network) -> Indices:
    """Return (levels, n) the number of each host's place, the widest places first.

    A host that lies in no place of a level is a place of its own there.
    """
    n, sets = len(network.hosts), tight(network) if network.places is None else [*network.places]
    depth, rows = np.zeros(n, np.intp), np.tile(np.arange(n), (DEPTH_MAX, 1))
    for number, hosts in enumerate(sorted(sets, key=len, reverse=True)):
        level = int(depth[[*hosts]].max())
        if 1 < len(hosts) < n and level < DEPTH_MAX:
            rows[level, [*hosts]] = n + number
            depth[[*hosts]] = level + 1
    kept = rows[: max(1, int(depth.max()))]
    return np.stack([np.unique(row, return_inverse=True)[1].ravel() for row in kept])


@dataclass(frozen=True, slots=True)
class HostGroupings:
    """b groupings of the same n hosts, as arrays."""

    order: Indices  # (b, n) hosts, group after group
    first: npt.NDArray[np.bool_]  # (b, n) true where a group begins
    share: Indices  # (levels, b, n) children that share the wire out of the host's place; 1: the wire is not shared
    inside: (
        Indices  # (b, n) updates in flight inside the host's group, as ModeAndSpec.inside; 0 for a group of one host
    )
    kinds: tuple[tuple[int, ...], ...]  # the few rows (children, share of each level) that occur
    kind: Indices  # (b, n) the row of `kinds` of each host

    @classmethod
    def of(cls, groupings: Sequence[Groups], place: Indices) -> HostGroupings:
        """Build the arrays from groupings.

        Args:
            groupings: b groupings of all hosts.
            place: (levels, n) the place of each host, as `places` returns it. Children share the wire out of a place if
                each of them lies wholly in the place.
        """
        sizes = np.array([len(group) for groups in groupings for group in groups])
        hosts = (host for groups in groupings for group in groups for host in group)
        order, begins = np.fromiter(hosts, np.intp, sizes.sum()), np.cumsum(sizes) - sizes
        at = np.repeat(np.arange(len(groupings)), [len(groups) for groups in groupings])  # of each group
        share = []
        for row in place:
            low, high = (of.reduceat(row[order], begins) for of in (np.minimum, np.maximum))
            home = at * (row.max() + 1) + low
            crossing = np.bincount(home[low == high], minlength=home.max() + 1)
            share.append(np.repeat(np.where(low == high, crossing[home], 1), sizes).reshape(len(groupings), -1))
        first = np.zeros(len(order), bool)
        first[begins] = True
        rows, n = (len(groupings), -1), len(place[0])
        order, first = order.reshape(rows), first.reshape(rows)
        code = first.sum(1)[:, None]
        for each in share:
            code = code * (n + 1) + each
        codes, kind = np.unique(code, return_inverse=True)
        found = list[Indices]()
        for _ in share:
            codes, others = divmod(codes, n + 1)
            found.insert(0, others)
        kinds = tuple(zip(codes.tolist(), *(others.tolist() for others in found), strict=True))
        return cls(order, first, np.stack(share), np.zeros_like(order), kinds, kind.reshape(rows))

    @property
    def children(self) -> Indices:
        """(b,) number of groups of each grouping."""
        found: Indices = self.first.sum(1)
        return found

    def rows(self, at: Indices) -> HostGroupings:
        return HostGroupings(
            self.order[at], self.first[at], self.share[:, at], self.inside[at], self.kinds, self.kind[at]
        )

    def below(self, inside: Indices) -> HostGroupings:
        """Return the same groupings with `inside`, (b,), updates in flight inside each group of several hosts."""
        alone = self.first & np.append(self.first[:, 1:], np.ones((len(self.first), 1), bool), 1)
        return replace(self, inside=np.where(alone, 0, inside[:, None]))


class StepPrices:
    """Prices plans of `work` on `network`.

    Matrices have the child's row and the server's column. A plan that needs a missing link costs inf.
    """

    def __init__(self, network: Network, work: TrainingWork) -> None:
        self.network, self.work = network, work
        self.hosts = np.arange(len(network.hosts))
        self.compute_s = work.compute_s(network)
        # A server weights each update by the number of its samples.
        self.samples = np.array(work.samples(network) if work.batch else np.ones(len(self.hosts)), np.float64)
        self.round_trip_s: Array = network.delay_s + network.delay_s.T
        fastest = network.rates.max(0)
        np.fill_diagonal(fastest, 0.0)
        self.port_out, self.port_in = (np.maximum(fastest.max(axis), SLOWEST) for axis in (1, 0))
        self.place = places(network)  # (levels, n)
        self._sent_s: dict[float, Array] = {}
        self._between: dict[tuple[int, int, int, float], float] = {}
        self._roads: dict[tuple[str, str, tuple[tuple[int, ...], ...], bytes], list[Array]] = {}

    def sent_s(self, message_bytes: float) -> Array:
        """Return (n, n) seconds of a message's bytes without delay; the row is the sender."""
        if message_bytes not in self._sent_s:
            self._sent_s[message_bytes] = self.network.sent_s(message_bytes)
        return self._sent_s[message_bytes]

    def path(self, sender: int, receiver: int, message_bytes: float) -> list[tuple[WireKey, float]]:
        """Return the wires that a message of this size passes between two hosts, each with its bytes a second.

        A host has a card for each direction, two places have a wire, and two hosts have a link.
        """
        if sender == receiver:
            return []
        link = message_bytes / max(float(self.sent_s(message_bytes)[sender, receiver]), SHORTEST_S)
        hops: list[tuple[WireKey, float]] = [
            (("out", sender), float(self.port_out[sender])),
            (("link", sender, receiver), link),
            (("in", receiver), float(self.port_in[receiver])),
        ]
        for level, place in enumerate(self.place):
            if place[sender] != place[receiver]:
                key = level, int(place[sender]), int(place[receiver])
                return [*hops, (("places", *key), self._place_rate(*key, message_bytes))]
        return hops

    def _place_rate(self, level: int, sender: int, receiver: int, message_bytes: float) -> float:
        """Return the bytes a second of the wire between two places: as network.json says, else of its fastest link."""
        key = level, sender, receiver, message_bytes
        if key not in self._between:
            place, wires = self.place[level], self.network.wires
            both = np.ix_(place == sender, place == receiver)
            named = math.inf if wires is None else float(wires[both].max())
            fastest = message_bytes / max(float(self.sent_s(message_bytes)[both].min()), SHORTEST_S)
            self._between[key] = fastest if math.isinf(named) else named
        return self._between[key]

    def busiest(self, flows: Iterable[MessageFlow]) -> BusyWire:
        """Return the wire that these flows together keep busy for the longest time."""
        busy_s: defaultdict[WireKey, float] = defaultdict(float)
        ends: dict[WireKey, tuple[int, int]] = {}
        for flow in flows:
            for wire, rate in self.path(flow.sender, flow.receiver, flow.message_bytes):
                busy_s[wire] += flow.messages * flow.message_bytes / rate
                ends[wire] = flow.sender, flow.receiver
        if not busy_s:
            return BusyWire(0.0, 0, 0)
        wire = max(busy_s, key=lambda each: busy_s[each])
        return BusyWire(busy_s[wire], *ends[wire])

    def exchange_flows(
        self, way: ModeAndSpec, parameters: float, children: Iterable[int], servers: Sequence[int]
    ) -> Iterator[MessageFlow]:
        """Yield the flows between the children of a level and the hosts that have the shards of its server."""
        part, each = parameters / len(servers), 1 / way.mode.local_steps
        up, down = (self.work.coded[spec].bytes * part for spec in (way.compress, way.down))
        for child in children:
            for server in servers:
                yield MessageFlow(child, server, up, each)
                yield MessageFlow(server, child, down, each)

    def roads(
        self,
        way: ModeAndSpec,
        rows: Indices,
        servers: Indices,
        children: Indices | int,
        share: Sequence[Indices],
        count: int = 1,
    ) -> list[Array]:
        """Return the seconds of the bytes up, of the bytes down, and of a round trip.

        Args:
            way: the mode and SPEC of the level.
            rows: the hosts of the children.
            servers: the hosts of the servers, broadcast against `rows`.
            children: the number of children of a server.
            share: for each level of places, as `HostGroupings.share`, broadcast against `rows`.
            count: the number of hosts that have the server's shards.
        """
        codes = self.work.coded[way.compress], self.work.coded[way.down]
        there, back = (coded.bytes * self.work.parameters / count for coded in codes)
        serve_s = children * max(coded.serve_s for coded in codes) * self.work.parameters / (count * self.work.shards)
        sharing: Indices | float = 1.0
        for place, others in zip(
            self.place[::-1], share[::-1], strict=True
        ):  # the widest level on which the two places differ overwrites the narrower levels
            sharing = np.where(place[rows] == place[servers], sharing, others * count)
        up = np.maximum(self.wire_s(there, sharing, rows, servers), (children - 1) * there / self.port_in[servers])
        down = np.maximum(self.wire_s(back, sharing, servers, rows), (children - 1) * back / self.port_out[servers])
        up = np.maximum(up, count * there / self.port_out[rows])
        down = np.maximum(down, count * back / self.port_in[rows])
        away = rows != servers
        trip_s = self.round_trip_s[rows, servers]
        return [np.maximum(np.where(away, up, 0.0), serve_s), np.where(away, down, 0.0), np.where(away, trip_s, 0.0)]

    def wire_s(self, message: float, sharing: Indices | float, sender: Indices, receiver: Indices) -> Array:
        """Return the seconds of a message on a wire that `sharing` children use at once.

        A wire that network.json names may be faster than each single link.
        """
        alone: Array = self.sent_s(message)[sender, receiver]
        if self.network.wires is None:
            return alone * sharing
        rate = self.network.wires[sender, receiver]
        return np.where(np.isinf(rate), alone * sharing, np.maximum(alone, sharing * message / rate))

    def clocks(
        self,
        way: ModeAndSpec,
        own_s: Array,
        up: Array,
        down: Array,
        round_trip_s: Array,
        inside: Indices = ALONE,
        count: int = 1,
    ) -> Array:
        """Return the seconds of a clock of children whose step takes `own_s`. All arrays are broadcast.

        `inside` is that of `HostGroupings`, `count` the number of hosts that have the server's shards.
        """
        mode, coded, states = way.mode, self.work.coded[way.compress], self.work.coded[way.down]
        own, encode_s = mode.local_steps * own_s, coded.encode_s * self.work.parameters
        coding_s: Array | float = encode_s
        if coded.gpu:  # of a cluster its server codes, on a CPU
            coding_s = np.where(inside > 0, encode_s, coded.worker_s(self.work.parameters))
        outer_s = self.outer_s(way, count)
        found = states.clock_s(own + coding_s + outer_s, up, down, round_trip_s, mode.window)
        if states.cluster_s is None or inside.max() <= 1 or mode.local_steps > 1:  # a round waits for all of its steps
            return found
        deep = states.cluster_s(own, encode_s, up, down, round_trip_s, mode.window, np.maximum(inside, 1))
        return np.where(inside > 1, deep, found)

    def outer_s(self, way: ModeAndSpec, count: int = 1) -> float:
        """Return the seconds of a clock in which workers wait for the outer step of the shards on `count` hosts."""
        return way.outer_s(self.work.parameters) / (count * self.work.shards)

    def inside_s(self, way: ModeAndSpec, clusters: Indices) -> Array:
        """Return (g, m) seconds of a step inside g clusters of m hosts, for each host as the server's.

        `way` has a bound.
        """
        rows, servers = clusters[:, :, None], clusters[:, None, :]
        share = [(place[rows] == place[servers]).sum(2)[:, :, None] for place in self.place]
        up, down, trip = self.roads(way, rows, servers, clusters.shape[1], share)
        found: Array = self.clocks(way, self.compute_s[rows], up, down, trip).max(1) / way.mode.local_steps
        return found

    def children_s(self, way: ModeAndSpec, own_s: Array, groupings: HostGroupings, roots: Indices) -> Array:
        """Return (b n, r) seconds of a clock of each child, for each host of the child's server and each root.

        Args:
            way: the mode and SPEC of the root's level.
            own_s: (b, n) seconds of a step of a host's group, if the group's server stands on that host.
            groupings: b groupings of n hosts. A row of the result is one host of one grouping, in their order.
            roots: (r,) hosts that may have the root.
        """
        n, order = len(self.hosts), groupings.order.ravel()
        up, down, trip = self._roads_of(way, groupings.kinds, roots)
        row = groupings.kind.ravel() * n + order
        up, down = (part.reshape(-1, len(roots)).take(row, 0) for part in (up, down))
        return self.clocks(way, own_s.reshape(-1, 1), up, down, trip.take(order, 0), groupings.inside.reshape(-1, 1))

    def _roads_of(self, way: ModeAndSpec, kinds: tuple[tuple[int, ...], ...], roots: Indices) -> list[Array]:
        """Return `roads` of each host to each root, for each of `HostGroupings.kinds`. Ways of the same SPECs share it."""
        key = way.compress, way.down, kinds, roots.tobytes()
        found = self._roads.get(key)
        if found is None:
            children, *share = np.array(kinds).T[:, :, None, None]
            found = self.roads(way, self.hosts[:, None], roots, children, share)
            if found[0].size <= ROADS_MAX:
                if len(self._roads) == ROADS_KEPT:
                    self._roads.clear()
                self._roads[key] = found
        return found

    def steps_s(self, way: ModeAndSpec, own_s: Array, groupings: HostGroupings, roots: Indices) -> Array:
        """Return (b, r) seconds of a step with each of `roots`.

        The choice of servers is exact: for a given root, each child's server is chosen without regard to the others.
        """
        return self._steps_s(way, self.children_s(way, own_s, groupings, roots), groupings)

    def _steps_s(self, way: ModeAndSpec, children_s: Array, groupings: HostGroupings) -> Array:
        begins = np.flatnonzero(groupings.first)
        clocks = np.minimum.reduceat(children_s, begins)
        samples = np.add.reduceat(self.samples[groupings.order.ravel()], begins)
        return self.together_s(way, clocks, samples, groupings.children)

    def least_s(self, way: ModeAndSpec, own_s: Array, groupings: HostGroupings) -> Array:
        """Return (b,) seconds of a step if only the groups' own steps and encoding took time: a lower bound."""
        begins, nothing = np.flatnonzero(groupings.first), np.zeros(1)
        own_s = np.minimum.reduceat(own_s.ravel(), begins)[:, None]
        clocks = self.clocks(way, own_s, nothing, nothing, nothing, groupings.inside.ravel()[begins][:, None])
        samples = np.add.reduceat(self.samples[groupings.order.ravel()], begins)
        return self.together_s(way, clocks, samples, groupings.children)[:, 0]

    def together_s(self, way: ModeAndSpec, clocks: Array, samples: Array, children: Indices) -> Array:
        """Return (b, r) seconds of a step of b groupings.

        Without a bound on staleness a step is over when as many samples are folded as all children have in a clock.

        Args:
            way: the mode and SPEC of the root's level.
            clocks: (children of all groupings, r) seconds of a clock, grouping after grouping.
            samples: (children of all groupings,) samples of each child in a clock.
            children: (b,) number of children of each grouping.
        """
        begins = np.cumsum(children) - children
        found: Array = np.maximum.reduceat(clocks, begins)
        if way.mode.bound is None:
            folded = np.add.reduceat(samples[:, None] / clocks, begins) / np.add.reduceat(samples, begins)[:, None]
            never = np.isinf(found)  # a child has no link to the root
            found = np.where(never, np.inf, 1 / np.where(never, 1.0, folded))
        return found / way.mode.local_steps

    def above_s(
        self, way: ModeAndSpec, own_s: Array, groups: Groups, roots: Indices, inside: int = 1
    ) -> tuple[float, int, tuple[int, ...]]:
        """Choose the cheapest of `roots`, and the server of each group for that root.

        Args:
            way: the mode and SPEC of the root's level.
            own_s: (n,) seconds of a step of a host's group, if the group's server stands on that host.
            groups: the children of the root.
            roots: hosts that may have the root.
            inside: updates in flight inside each group of several hosts.

        Returns:
            The seconds of a step, the host of the root, and the host of each group's server.
        """
        groupings = HostGroupings.of([groups], self.place).below(np.array([inside]))
        children_s = self.children_s(way, own_s[groupings.order], groupings, roots)
        step_s = self._steps_s(way, children_s, groupings)[0]
        best = int(step_s.argmin())
        clocks = children_s[:, best]
        sizes = np.cumsum([0, *map(len, groups)])
        servers = [group[int(clocks[b:e].argmin())] for group, b, e in zip(groups, sizes, sizes[1:], strict=False)]
        return float(step_s[best]), int(roots[best]), tuple(servers)

    def spread_s(self, way: ModeAndSpec, servers: Sequence[int]) -> float:
        """Return the seconds of a step where a server has shards on each of these hosts and every host is a worker."""
        n, at = len(self.hosts), np.array(servers)
        share = [np.bincount(place)[place][:, None] for place in self.place]
        roads = self.roads(way, self.hosts[:, None], at, n, share, len(at))
        up, down, trip = (part.max(1)[:, None] for part in roads)
        clocks = self.clocks(way, self.compute_s[:, None], up, down, trip, count=len(at))
        return float(self.together_s(way, clocks, self.samples, np.array([n]))[0, 0])

    def ring_s(self) -> float:
        """Return a lower bound on the seconds of a step of DDP.

        The bound is the slowest host's even share, and a ring all-reduce in the order of `merges`.
        """
        order = [0]
        for _, one, other in merges(self.network):
            order += [host for host in (one, other) if host not in order]
        n, ring = len(order), list(zip(order, [*order[1:], order[0]], strict=True))
        sent_s = self.sent_s(4 * self.work.parameters / n) + self.network.delay_s
        slowest = max(float(sent_s[a, b]) for a, b in ring)
        return float((self.work.step_s / self.network.compute).max()) + 2 * (n - 1) * slowest
