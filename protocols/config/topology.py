"""The pairs of workers that mix in a round of gossip.

A pure function of (seed, round, members): both sides of a pair compute the same, without a message. A round is a set of
edges (a, b, weight) of workers. Each edge does x_a += weight * (x_b - x_a), and the same for b. So the mixing matrix is
symmetric and doubly stochastic. This holds for an odd number of workers too: one may be left out of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

Edge = tuple[int, int, float]
HALF = 0.5  # two workers meet in the middle


def _draw(seed: int, number: int, worker: int) -> int:
    digest = blake2b(b"%d %d %d" % (seed, number, worker), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _matching(seed: int, number: int, members: Sequence[int]) -> list[Edge]:
    """A random perfect matching (MATCHA, 1905.09435, draws matchings too). One worker of an odd number rests."""
    order = sorted(members, key=lambda worker: (_draw(seed, number, worker), worker))
    return [(a, b, HALF) for a, b in zip(order[::2], order[1::2], strict=False)]


def _shift_one(seed: int, number: int, members: Sequence[int]) -> list[Edge]:
    """BAGUA's shift-one (2107.01499): the two halves of the ranks pass each other, by one more in each round."""
    half = (len(members) + 1) // 2
    left, right = members[:half], members[half:]
    pairs = ((a, (i + number) % half) for i, a in enumerate(left))
    return [(a, right[j], HALF) for a, j in pairs if j < len(right)]


def _ring(seed: int, number: int, members: Sequence[int]) -> list[Edge]:
    """A ring: both neighbours in every round, with weight 1/3 each (BAGUA, 2107.01499, ring)."""
    count = len(members)
    if count == 2:
        return [(members[0], members[1], HALF)]
    return [(a, members[(i + 1) % count], 1 / 3) for i, a in enumerate(members)] if count > 2 else []


def _exponential(seed: int, number: int, members: Sequence[int]) -> list[Edge]:
    """One-peer hypercube (Ying et al., 2110.13363): the exact mean after log2(n) rounds if n is a power of two.

    With another n, a worker without a partner rests in that round; its partners of other rounds join it to all.
    """
    bit = 1 << number % max(1, (len(members) - 1).bit_length())
    return [(a, members[i ^ bit], HALF) for i, a in enumerate(members) if i < i ^ bit < len(members)]


TOPOLOGIES: dict[str, Callable[[int, int, Sequence[int]], list[Edge]]] = {
    "matching": _matching,
    "shift-one": _shift_one,
    "ring": _ring,
    "exponential": _exponential,
}
# The default. A worker has few partners and meets each often, so the difference that is coded for a pair stays small. A
# random matching has n - 1 partners.
TOPOLOGY = "exponential"
RANDOM = "random"  # each worker asks a random partner, and no worker waits


@lru_cache(maxsize=8)  # all shards of a process, and all workers of a simulated run, ask for the same edges
def edges(topology: str, number: int, members: Sequence[int], seed: int = 0) -> list[Edge]:
    """Return the edges of a round; each pair at most once.

    Args:
        topology: a key of TOPOLOGIES.
        number: of the round.
        members: sorted worker ids, as a tuple.
        seed: of random topologies.
    """
    return TOPOLOGIES[topology](seed, number, members)


def partners(topology: str, number: int, members: Sequence[int], worker: int, seed: int = 0) -> list[tuple[int, float]]:
    """Return (partner, weight) for each partner of `worker` in round `number`; under `random`, the one that it asks."""
    if topology == RANDOM:
        others = [other for other in members if other != worker]
        return [(others[_draw(seed, number, worker) % len(others)], HALF)] if others else []
    found = edges(topology, number, members, seed)
    return [(b if a == worker else a, weight) for a, b, weight in found if worker in (a, b)]
