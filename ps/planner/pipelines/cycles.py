"""Cyclic moves of hosts between groups, by the gain of 2206.01288, sec. 3.4. They bring fast links between groups.

From each group the host with the fastest link inside it leaves. It goes to the group with the largest gain: the mean
link from the host to that group, minus its fastest link inside its own group. A cycle ends in the group where it began,
so groups keep their sizes. The best beginning of the cycle is kept, and its last host closes it. A host that has moved
stays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from narrows.ps.planner.network import Array
from narrows.ps.planner.pipelines.cost import Indices


def cycled(labels: Indices, links: Array, count: int) -> Indices:
    """Move hosts in at most `count` cycles, one for each group.

    Args:
        labels: (n,) the group of each host. Hosts of the group `count` have no stage, and stay.
        links: (n, n) seconds of a link.
        count: the number of groups.

    Returns:
        The new labels.
    """
    labels, locked = labels.copy(), labels == count
    visited = np.zeros(count, bool)
    for _ in range(count):
        gain, leaves = _gains(labels, locked, links, count)
        start = here = int(gain.max(1).argmax())
        before, moves = labels.copy(), list[tuple[int, int]]()  # a host, and the group that it leaves
        total, best, last = 0.0, 0.0, 0
        while leaves[here] >= 0:
            if moves and total + gain[here, start] > best:
                best, last = total + gain[here, start], len(moves)
            to = int(gain[here].argmax())
            moves.append((int(leaves[here]), here))
            total += gain[here, to]
            labels[leaves[here]], locked[leaves[here]], visited[to] = to, True, True
            here = to
            if here == start:
                break
            gain, leaves = _gains(labels, locked, links, count)
        if not best:
            return before
        for host, group in moves[last:]:
            labels[host] = group
        labels[moves[last][0]] = start
        if visited.all():
            break
    return labels


def _gains(labels: Indices, locked: npt.NDArray[np.bool_], links: Array, count: int) -> tuple[Array, Indices]:
    """Return (count, count) gains of a move between two groups, and (count,) the host that leaves each group, or -1."""
    members = labels == np.arange(count)[:, None]
    inside = np.where(labels[:, None] == labels, links, np.inf)
    np.fill_diagonal(inside, np.inf)
    fastest = np.where(members & ~locked, inside.min(1), np.inf)
    leaves = fastest.argmin(1)
    least = fastest.min(1)
    mean = members @ links / np.maximum(members.sum(1), 1)[:, None]
    gain = np.where(
        np.isfinite(least)[:, None], mean[:, leaves].T - np.where(np.isfinite(least), least, 0.0)[:, None], -np.inf
    )
    np.fill_diagonal(gain, -np.inf)
    return gain, np.where(np.isfinite(least), leaves, -1)
