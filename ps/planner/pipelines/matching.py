"""Matchings between two groups, and the order of groups: the two inner problems of 2206.01288, sec. 3.3."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from narrows.ps.planner.network import Array

Indices = npt.NDArray[np.intp]

EXACT_MAX = 10  # groups whose order is exact: the table of subsets has 2^10 * 10 entries
TIE = 1e-9  # weight of links among matchings of equal cost: faster links win, and totals stay exact to 1e-9


def matched(links: Array, tolls: Array) -> tuple[float, Indices]:
    """Find the perfect matching with the least cost: its slowest link plus the sum of its tolls. The result is exact.

    Without tolls this is the bottleneck matching. With tolls a slower link is tried as long as the tolls that it saves
    may outweigh it.

    Args:
        links: (k, k) seconds, 0 or more.
        tolls: (k, k) money in seconds, 0 or more.

    Returns:
        The cost, and (k,) the column of each row.
    """
    second = tolls + TIE * links
    least = tolls[linear_sum_assignment(tolls)].sum() if tolls.any() else 0.0
    best, columns = np.inf, np.arange(len(links))
    for limit in np.unique(links[links >= bottleneck(links)]):
        if limit + least >= best:
            break
        rows, found = linear_sum_assignment(np.where(links <= limit, second, np.inf))
        cost = float(links[rows, found].max() + tolls[rows, found].sum())
        if cost < best:
            best, columns = cost, found
    return float(best), columns


def bottleneck(links: Array) -> float:
    """Return the least slowest link of a perfect matching of `links`, (k, k), by bisection over their values."""
    values = np.unique(links)
    low = int(np.searchsorted(values, max(links.min(0).max(), links.min(1).max())))  # each host needs one link
    high = len(values) - 1
    middle = low  # in most networks the lower bound is the result
    while low < high:
        over = np.where(links > values[middle], links, 0.0)
        rows, columns = linear_sum_assignment(over)
        high = min(high, int(np.searchsorted(values, links[rows, columns].max())))
        if over[rows, columns].any():
            low = middle + 1
        middle = (low + high) // 2
    return float(values[high])


def shortest_path(between: Array) -> list[int]:
    """Return the order of the indices of `between`, (k, k) and symmetric, with the least cost of neighbours in sum.

    This is an open travelling salesman problem. The order is exact up to EXACT_MAX (Held and Karp 1962). Beyond, it is
    the best nearest-neighbour path, with parts of it reversed (2-opt) as long as that gains.
    """
    return _exact(between) if len(between) <= EXACT_MAX else _two_opt(between)


@lru_cache(maxsize=EXACT_MAX)
def _subsets(count: int) -> list[tuple[Indices, Indices]]:
    """Return, for each size from 2 on, the subsets of `count` as sums of bits with each member, and that member."""
    subsets, members = np.nonzero((np.arange(1 << count)[:, None] >> np.arange(count)) & 1)
    sizes = np.bincount(subsets)[subsets]
    return [(subsets[sizes == size], members[sizes == size]) for size in range(2, count + 1)]


def _exact(between: Array) -> list[int]:
    count = len(between)
    cost = np.full((1 << count, count), np.inf)  # [subset, member] of the best path through a subset up to a member
    before = np.zeros((1 << count, count), np.intp)
    alone = np.arange(count)
    cost[1 << alone, alone] = 0.0
    for subsets, last in _subsets(count):
        through = cost[subsets ^ (1 << last)] + between[last]
        before[subsets, last] = found = through.argmin(1)
        cost[subsets, last] = through[np.arange(len(found)), found]
    subset = (1 << count) - 1
    end = int(cost[subset].argmin())
    order: list[int] = []
    while subset:
        order.append(end)
        subset, end = subset ^ (1 << end), int(before[subset, end])
    return order


def _two_opt(between: Array) -> list[int]:
    count = len(between)
    orders = np.zeros((count, count), np.intp)  # each row: the nearest-neighbour path from one index
    orders[:, 0] = here = every = np.arange(count)
    far = np.full((count, count), np.inf)
    free = np.where(np.eye(count, dtype=bool), far, 0.0)  # inf: the path has visited this index
    for step in range(1, count):
        here = (between[here] + free).argmin(1)
        free[every, here] = np.inf
        orders[:, step] = here
    order = orders[between[orders[:, :-1], orders[:, 1:]].sum(1).argmin()]
    for _ in range(4 * count):  # a bound; the loop ends at the first reversal that gains nothing
        # Reversing a part of `order` changes two neighbours. Both ends of the path have a neighbour of cost 0.
        left = np.vstack([np.zeros(count), between[order[:-1]][:, order]])  # [i, j]: order[i - 1] to order[j]
        right = np.hstack([between[order][:, order[1:]], np.zeros((count, 1))])  # [i, j]: order[i] to order[j + 1]
        old_left, old_right = np.diag(left), np.diag(right)
        gain = np.triu(left + right - old_left[:, None] - old_right[None, :], 1)
        i, j = divmod(int(gain.argmin()), count)
        if gain[i, j] >= -TIE * between.max():
            break
        order[i : j + 1] = order[i : j + 1][::-1].copy()
    return [int(index) for index in order]
