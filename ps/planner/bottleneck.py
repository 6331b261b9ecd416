"""The bottleneck of a plan: the link or host that its step waits for. No I/O."""

from __future__ import annotations

import numpy as np

from narrows.ps.planner.choose import Chooser, DeploymentChoice
from narrows.ps.planner.modes_and_specs import ModeAndSpec
from narrows.ps.planner.network import Array
from narrows.ps.planner.step_prices import Groups, HostGroupings, Indices, StepPrices

SHARED = 1 - 1e-9  # share of a step: a wire that is busy for longer is the bottleneck


def decides(chooser: Chooser, plan: DeploymentChoice) -> str:
    """Return a sentence that names the link or host that the plan's step waits for."""
    prices, network = chooser.prices, chooser.prices.network
    own, to = chooser.own_s(plan.below, plan.groups), plan.spread or (plan.root,)
    busiest = chooser.busiest(plan.groups, plan.servers, plan.root, plan.above, plan.below)
    if plan.clusters and busiest.seconds >= SHARED * plan.step_s:
        sender, receiver = (network.hosts[host] for host in (busiest.sender, busiest.receiver))
        return f"the wire from {sender} to {receiver} decides: {1e3 * busiest.seconds:.3g} ms of bytes"
    child = np.array(plan.servers)
    outer_s = prices.outer_s(plan.above, len(to))
    if 2 * outer_s > plan.step_s * plan.above.mode.local_steps:
        return f"the outer step on {network.hosts[plan.root]} decides: {1e3 * outer_s:.3g} ms of a round"
    inside = np.where([len(group) > 1 for group in plan.groups], plan.below.inside, 0)
    found = _slowest(prices, plan.above, own[child], child, plan.groups, np.array(to), inside)
    group = plan.groups[found[0]]
    within = ""
    if found[1] < 0 and len(group) > 1:  # the root waits for a cluster: find what the cluster waits for
        members, server = np.array(group), np.array([plan.servers[found[0]]])
        within = f" in the cluster of {network.hosts[int(server[0])]}"
        found = _slowest(
            prices, plan.below, prices.compute_s[members], members, tuple((host,) for host in group), server,
            np.zeros_like(members),
        )  # fmt: skip
        child, to = members, (int(server[0]),)
    host = network.hosts[int(child[found[0]])]
    if found[1] < 0:
        return f"computing on {host}{within} decides"
    server_host = network.hosts[to[found[1]]]
    if host == server_host:
        return f"what the server on {host}{within} handles decides: {found[2]}"
    return f"the link {host}-{server_host}{within} decides: {found[2]}"


def _slowest(
    prices: StepPrices,
    way: ModeAndSpec,
    own_s: Array,
    rows: Indices,
    children: Groups,
    servers: Indices,
    inside: Indices,
) -> tuple[int, int, str]:
    """Find the slowest child of a level.

    Args:
        prices: the prices of the network.
        way: the mode and SPEC of the level.
        own_s: (rows,) seconds of a step of each child.
        rows: the host of each child, or of its server.
        children: the hosts of each child.
        servers: the hosts of the level's server.
        inside: (rows,) updates in flight inside each child, as `HostGroupings.inside`.

    Returns: The row of the slowest child; the column of the server's host that the child waits for, or -1 where it
        waits for its own computing and coding; and the reason in words, "" for -1.
    """
    table = HostGroupings.of([children], prices.place)
    share, count = [*table.share[:, table.first][..., None]], len(servers)
    up, down, round_trip = prices.roads(way, rows[:, None], servers, len(children), share, count)
    clocks = prices.clocks(way, own_s[:, None], up, down, round_trip, inside[:, None], count)
    row, column = (int(at) for at in np.unravel_index(clocks.argmax(), clocks.shape))
    road_s = float(up[row, column] + down[row, column])
    coded = prices.work.coded[way.compress]
    encode_s, worker_s = coded.encode_s * prices.work.parameters, coded.worker_s(prices.work.parameters)
    coding_s = encode_s if inside[row] else worker_s
    computing_s = float(own_s[row]) * way.mode.local_steps + coding_s
    if computing_s >= max(float(clocks[row, column]) / 1.05, road_s + float(round_trip[row, column])):
        return row, -1, ""
    return row, column, f"{1e3 * float(round_trip[row, column]):.3g} ms of round trip, {1e3 * road_s:.3g} ms of bytes"
