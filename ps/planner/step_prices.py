"""The cost of a step of a data parallel run on a network, with one server or with clusters below it: `StepPrices`.

A child of a server is a worker, or a cluster. `own` are its seconds of computing and encoding, `up` and `down` those of its
bytes. How long its clock takes of them say the closed forms of `CodecCost`, from compression/predict.py. A run with a
bound waits for the slowest child. Without one children make sum(samples / clock) samples a second, and a step has the
samples of all. A cluster computes H clocks of its own, H the local steps above. tests/unit/ps/test_planner_choose.py holds
these forms to simulated runs.

Rules of links
- A port carries what all children of its host's server send: it is as fast as the host's fastest link.
- A place is a set of hosts whose links are faster than the link that joins them to the others: single linkage, cut where one
  branch has a gap (`Places`). Places may lie in places. All links between two places that lie side by side are one wire, which
  children in one of them share. Every other link is a wire of its own. network.json may name places and the rates of wires.
- A child on its server's host sends nothing.
- Messages of both levels share cards, links and wires: a step takes at least as long as the busiest of them (`busiest`).
- A server handles what all its children send, as a port does: so long takes `up` at least. Its shards share that.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from narrows.protocols.errors import UsageError
from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Array, Network

Indices = npt.NDArray[np.intp]
Groups = tuple[tuple[int, ...], ...]  # hosts
WireKey = tuple[str | int, ...]

ALONE: Indices = np.ones(1, np.intp)  # see Groupings.inside
PLACES = 1.5  # links inside a place are so many times as fast as the link out of it
NEAR = 2.0  # and where the delay of the link out is so many times as long, SAME is enough
DEPTH_MAX = 3  # levels of places
SHORTEST_S = 1e-12  # of a message on a link, which may take no time
SLOWEST = 1e-9  # bytes a second, of the port of a host that has no link
SAME = 1.05  # and such a gap is noise of a measurement


@dataclass(frozen=True, slots=True)
class CodecCost:
    """The costs of a SPEC for a parameter. serve_s: the server's, for each child. clock_s: takes (own, up, down, round
    trip, window). cluster_s: the same of a cluster whose workers go on while it waits, (own, encode, up, down, round trip,
    window, inside); None: they wait, too."""

    bytes: float
    encode_s: float
    clock_s: Callable[[Array, Array, Array, Array, int], Array]
    serve_s: float = 0.0
    cluster_s: Callable[[Array, float, Array, Array, Array, int, Indices], Array] | None = None


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """A model to train. step_s: seconds of an even share of a step, on a host of speed 1.

    `batch`: samples of a step that workers share by their speed; 0: evenly. `shards`: of each server."""

    parameters: float
    step_s: float
    coded: Mapping[str, CodecCost] = field(default_factory=dict)
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


@dataclass(frozen=True, slots=True)
class MessageFlow:
    """The messages of one size that a host sends to another host. messages: of a step."""

    sender: int
    receiver: int
    message_bytes: float
    messages: float


@dataclass(frozen=True, slots=True)
class BusyWire:
    """A card, link or wire between places. seconds: of a step that it is busy. sender, receiver: hosts that send over it."""

    seconds: float
    sender: int
    receiver: int


Merge = tuple[float, int, int]


def merges(network: Network) -> list[Merge]:
    """Single linkage: (rate, host, host) of the fastest links that join all hosts, fastest first. A link is as fast as its
    slower way; a missing one has the rate 0."""
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
    """Groups of hosts that these links join."""
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
    """Groups at the widest gaps of the rates, at most so many, the widest first; none has all hosts in one, or each alone."""
    found = merges(network)
    gaps = [(ratio(fast, slow), at) for at, (fast, slow) in enumerate(pairwise(found), 1)]
    widest = sorted((gap for gap in gaps if gap[0] > SAME), key=lambda gap: (-gap[0], gap[1]))[:most]
    return [joined(len(network.hosts), found[:at]) for _, at in widest]


def tight(network: Network) -> list[tuple[int, ...]]:
    """Return the hosts of each place. A branch of single linkage is a place if its slowest link is PLACES times as fast as the
    link that joins the branch to another one. Nearer hosts than that link's ends need only be SAME times as fast."""
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
    """(levels, n) the place of each host, the widest places first. A host that is in no place of a level is a place itself."""
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
    """b groupings of the same hosts, as arrays: in each row of `order`, (b, n), the hosts stand group after group."""

    order: Indices
    first: npt.NDArray[np.bool_]  # (b, n) here begins a group
    share: Indices  # (levels, b, n) children that share the wire out of a host's place of each level; 1: none
    inside: (
        Indices  # (b, n) updates in flight inside the group of each host, as ModeAndSpec.inside; 1: those of one host
    )

    @classmethod
    def of(cls, groupings: Sequence[Groups], place: Indices) -> HostGroupings:
        """`place`: (levels, n) of each host. Children share a wire if each lies wholly in the place."""
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
        rows = len(groupings), -1
        return cls(order.reshape(rows), first.reshape(rows), np.stack(share), np.ones_like(order).reshape(rows))

    @property
    def children(self) -> Indices:
        """(b,) groups of each."""
        found: Indices = self.first.sum(1)
        return found

    def rows(self, at: Indices) -> HostGroupings:
        return HostGroupings(self.order[at], self.first[at], self.share[:, at], self.inside[at])

    def below(self, inside: Indices) -> HostGroupings:
        """The same, where the groups of several hosts have so many updates in flight inside, (b,)."""
        alone = self.first & np.append(self.first[:, 1:], np.ones((len(self.first), 1), bool), 1)
        return replace(self, inside=np.where(alone, 1, inside[:, None]))


class StepPrices:
    """Prices plans of `work` on `network`. Matrices have the child's row and the server's column. What takes a link that is
    missing costs inf."""

    def __init__(self, network: Network, work: TrainingWork) -> None:
        self.network, self.work = network, work
        self.hosts = np.arange(len(network.hosts))
        self.compute_s = work.compute_s(network)
        # Updates are weighted by the samples that they are of.
        self.samples = np.array(work.samples(network) if work.batch else np.ones(len(self.hosts)), np.float64)
        self.round_trip_s: Array = network.delay_s + network.delay_s.T
        fastest = network.rates.max(0)
        np.fill_diagonal(fastest, 0.0)
        self.port_out, self.port_in = (np.maximum(fastest.max(axis), SLOWEST) for axis in (1, 0))
        self.place = places(network)  # (levels, n)
        self._sent_s: dict[float, Array] = {}
        self._between: dict[tuple[int, int, int, float], float] = {}

    def sent_s(self, message_bytes: float) -> Array:
        """(n, n) seconds of the bytes alone, the sender's row."""
        if message_bytes not in self._sent_s:
            self._sent_s[message_bytes] = self.network.sent_s(message_bytes)
        return self._sent_s[message_bytes]

    def path(self, sender: int, receiver: int, message_bytes: float) -> list[tuple[WireKey, float]]:
        """Return the wires that a message of this size passes from host to host, each with its bytes a second.

        A host has a card each way, a place a wire to each other place, and a pair of hosts a link."""
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
        """Return the bytes a second of the wire between two places: those of its fastest link, or as network.json says."""
        key = level, sender, receiver, message_bytes
        if key not in self._between:
            place, wires = self.place[level], self.network.wires
            both = np.ix_(place == sender, place == receiver)
            named = math.inf if wires is None else float(wires[both].max())
            fastest = message_bytes / max(float(self.sent_s(message_bytes)[both].min()), SHORTEST_S)
            self._between[key] = fastest if math.isinf(named) else named
        return self._between[key]

    def busiest(self, flows: Iterable[MessageFlow]) -> BusyWire:
        """Return the wire that takes the longest for all of these flows together."""
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
        """Yield the flows between the children of a level and the hosts that its server is cut over."""
        size, each = self.work.coded[way.compress].bytes * parameters / len(servers), 1 / way.mode.local_steps
        for child in children:
            for server in servers:
                yield MessageFlow(child, server, size, each)
                yield MessageFlow(server, child, size, each)

    def roads(
        self,
        way: ModeAndSpec,
        rows: Indices,
        servers: Indices,
        children: Indices | int,
        share: Sequence[Indices],
        count: int = 1,
    ) -> list[Array]:
        """Seconds up, down, and of a round trip, from the hosts `rows` to the hosts `servers`, which are broadcast.

        `children`: of the server. `share`: as Groupings has it, of each row, a level after the other. `count`: hosts that the
        server is cut over."""
        coded = self.work.coded[way.compress]
        message = coded.bytes * self.work.parameters / count
        serve_s = children * coded.serve_s * self.work.parameters / (count * self.work.shards)
        sent, busy = self.sent_s(message), (children - 1) * message
        sharing: Indices | float = 1.0
        for place, others in zip(
            self.place[::-1], share[::-1], strict=True
        ):  # the widest places that differ have the last word
            sharing = np.where(place[rows] == place[servers], sharing, others * count)
        up = np.maximum(self.wire_s(sent, message, sharing, rows, servers), busy / self.port_in[servers])
        down = np.maximum(self.wire_s(sent, message, sharing, servers, rows), busy / self.port_out[servers])
        up = np.maximum(up, count * message / self.port_out[rows])
        down = np.maximum(down, count * message / self.port_in[rows])
        away = rows != servers
        trip_s = self.round_trip_s[rows, servers]
        return [np.maximum(np.where(away, up, 0.0), serve_s), np.where(away, down, 0.0), np.where(away, trip_s, 0.0)]

    def wire_s(
        self, sent: Array, message: float, sharing: Indices | float, sender: Indices, receiver: Indices
    ) -> Array:
        """Seconds of a message on a wire that `sharing` children use at once. A named wire may be faster than each link."""
        alone: Array = sent[sender, receiver]
        if self.network.wires is None:
            return alone * sharing
        rate = self.network.wires[sender, receiver]
        return np.where(np.isinf(rate), alone * sharing, np.maximum(alone, sharing * message / rate))

    def clocks(
        self, way: ModeAndSpec, own_s: Array, up: Array, down: Array, round_trip_s: Array, inside: Indices = ALONE
    ) -> Array:
        """Clocks of children whose step takes `own_s`, which is broadcast. `inside`: as Groupings has it."""
        mode, coded = way.mode, self.work.coded[way.compress]
        own, encode_s = mode.local_steps * own_s, coded.encode_s * self.work.parameters
        found = coded.clock_s(own + encode_s, up, down, round_trip_s, mode.window)
        if coded.cluster_s is None or inside.max() == 1:
            return found
        return np.where(inside > 1, coded.cluster_s(own, encode_s, up, down, round_trip_s, mode.window, inside), found)

    def inside_s(self, way: ModeAndSpec, clusters: Indices) -> Array:
        """(g, m) seconds of a step inside g clusters of m hosts, by the host of the server. `way` has a bound."""
        rows, servers = clusters[:, :, None], clusters[:, None, :]
        share = [(place[rows] == place[servers]).sum(2)[:, :, None] for place in self.place]
        up, down, trip = self.roads(way, rows, servers, clusters.shape[1], share)
        found: Array = self.clocks(way, self.compute_s[rows], up, down, trip).max(1) / way.mode.local_steps
        return found

    def children_s(self, way: ModeAndSpec, own_s: Array, groupings: HostGroupings, roots: Indices) -> Array:
        """(b n, r) clocks of each group, if it had its server at the host of the row. A group whose server is on a host takes
        own_s, (b, n), for a step."""
        n, order = len(self.hosts), groupings.order.ravel()
        # Few pairs of children and share occur: their roads are looked up.
        code = groupings.children[:, None]
        for row in groupings.share:
            code = code * (n + 1) + row
        kinds, at = np.unique(code, return_inverse=True)
        share = list[Indices]()
        for _ in groupings.share:
            kinds, others = divmod(kinds, n + 1)
            share.insert(0, others[:, None, None])
        children = kinds[:, None, None]
        up, down, trip = self.roads(way, self.hosts[:, None], roots, children, share)
        row = at.ravel() * n + order
        up, down = (part.reshape(-1, len(roots)).take(row, 0) for part in (up, down))
        return self.clocks(way, own_s.reshape(-1, 1), up, down, trip.take(order, 0), groupings.inside.reshape(-1, 1))

    def steps_s(self, way: ModeAndSpec, own_s: Array, groupings: HostGroupings, roots: Indices) -> Array:
        """(b, r) seconds of a step with each of `roots`. Servers are chosen exactly: each alone, for its root."""
        begins = np.flatnonzero(groupings.first)
        clocks = np.minimum.reduceat(self.children_s(way, own_s, groupings, roots), begins)
        samples = np.add.reduceat(self.samples[groupings.order.ravel()], begins)
        return self.together_s(way, clocks, samples, groupings.children)

    def least_s(self, way: ModeAndSpec, own_s: Array, groupings: HostGroupings) -> Array:
        """(b,) seconds of a step, if nothing but the groups' own steps and encoding took time."""
        begins, nothing = np.flatnonzero(groupings.first), np.zeros(1)
        own_s = np.minimum.reduceat(own_s.ravel(), begins)[:, None]
        clocks = self.clocks(way, own_s, nothing, nothing, nothing, groupings.inside.ravel()[begins][:, None])
        samples = np.add.reduceat(self.samples[groupings.order.ravel()], begins)
        return self.together_s(way, clocks, samples, groupings.children)[:, 0]

    def together_s(self, way: ModeAndSpec, clocks: Array, samples: Array, children: Indices) -> Array:
        """(b, r) seconds of a step, of the clocks (children, r), where so many of them are each one's. Without a bound a step
        is over when as many samples are folded as all have in a clock."""
        begins = np.cumsum(children) - children
        found: Array = np.maximum.reduceat(clocks, begins)
        if way.mode.bound is None:
            folded = np.add.reduceat(samples[:, None] / clocks, begins) / np.add.reduceat(samples, begins)[:, None]
            never = np.isinf(found)  # somebody's updates do not come
            found = np.where(never, np.inf, 1 / np.where(never, 1.0, folded))
        return found / way.mode.local_steps

    def above_s(
        self, way: ModeAndSpec, own_s: Array, groups: Groups, roots: Indices, inside: int = 1
    ) -> tuple[float, int, tuple[int, ...]]:
        """(seconds of a step, the root, each group's server) of the cheapest of `roots`. A group whose server is on a host
        takes own_s[host] for a step, and has `inside` updates in flight."""
        groupings = HostGroupings.of([groups], self.place).below(np.array([inside]))
        own_s = own_s[groupings.order]
        step_s = self.steps_s(way, own_s, groupings, roots)[0]
        best = int(step_s.argmin())
        clocks = self.children_s(way, own_s, groupings, roots[[best]]).ravel()
        sizes = np.cumsum([0, *map(len, groups)])
        servers = [group[int(clocks[b:e].argmin())] for group, b, e in zip(groups, sizes, sizes[1:], strict=False)]
        return float(step_s[best]), int(roots[best]), tuple(servers)

    def spread_s(self, way: ModeAndSpec, servers: Sequence[int]) -> float:
        """Seconds of a step of one server with a shard on each of these hosts."""
        n, at = len(self.hosts), np.array(servers)
        share = [np.bincount(place)[place][:, None] for place in self.place]
        slowest = [part.max(1)[:, None] for part in self.roads(way, self.hosts[:, None], at, n, share, len(at))]
        clocks = self.clocks(way, self.compute_s[:, None], *slowest)
        return float(self.together_s(way, clocks, self.samples, np.array([n]))[0, 0])

    def ring_s(self) -> float:
        """Seconds of a step of DDP, at least: the slowest host's even share, and a ring all-reduce in the order of `merges`."""
        order = [0]
        for _, one, other in merges(self.network):
            order += [host for host in (one, other) if host not in order]
        n, ring = len(order), list(zip(order, [*order[1:], order[0]], strict=True))
        sent_s = self.sent_s(4 * self.work.parameters / n) + self.network.delay_s
        slowest = max(float(sent_s[a, b]) for a, b in ring)
        return float((self.work.step_s / self.network.compute).max()) + 2 * (n - 1) * slowest
