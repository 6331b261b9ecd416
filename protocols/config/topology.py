"""Who mixes with whom in a round of gossip: a pure function of (seed, round, members), so both sides agree unasked.

Every round is a set of edges (a, b, weight) of workers: with x_a += weight * (x_b - x_a) and the same for b, the mixing matrix
is symmetric and doubly stochastic, for odd counts too, where one worker may be left out of a round.
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
    """A random perfect matching (MATCHA, 1905.09435, draws matchings too); of an odd count one worker rests."""
    order = sorted(members, key=lambda worker: (_draw(seed, number, worker), worker))
    return [(a, b, HALF) for a, b in zip(order[::2], order[1::2], strict=False)]


def _shift_one(seed: int, number: int, members: Sequence[int]) -> list[Edge]:
    """BAGUA's shift-one (2107.01499): the halves of the ranks pass each other, one further in each round."""
    half = (len(members) + 1) // 2
    left, right = members[:half], members[half:]
    pairs = ((a, (i + number) % half) for i, a in enumerate(left))
    return [(a, right[j], HALF) for a, j in pairs if j < len(right)]


def _ring(seed: int, number: int, members: Sequence[int]) -> list[Edge]:
    """Both neighbours in every round, a third of each (BAGUA, 2107.01499, ring)."""
    count = len(members)
    if count == 2:
        return [(members[0], members[1], HALF)]
    return [(a, members[(i + 1) % count], 1 / 3) for i, a in enumerate(members)] if count > 2 else []


def _exponential(seed: int, number: int, members: Sequence[int]) -> list[Edge]:
    """One-peer hypercube (Ying et al., 2110.13363): the exact mean after log2(n) rounds where n is a power of two.

    With another count, a worker whose partner is not there rests; its other partners join it to all.
    """
    bit = 1 << number % max(1, (len(members) - 1).bit_length())
    return [(a, members[i ^ bit], HALF) for i, a in enumerate(members) if i < i ^ bit < len(members)]


TOPOLOGIES: dict[str, Callable[[int, int, Sequence[int]], list[Edge]]] = {
    "matching": _matching,
    "shift-one": _shift_one,
    "ring": _ring,
    "exponential": _exponential,
}
# Few partners, met often: what is coded for a pair has come up since it last met. The random matching has n - 1.
TOPOLOGY = "exponential"
RANDOM = "random"  # each asks whom it likes, and waits for nobody


@lru_cache(maxsize=8)  # all shards of a process, and all workers of a simulated run, ask for the same
def edges(topology: str, number: int, members: Sequence[int], seed: int = 0) -> list[Edge]:
    """The edges of round `number` among `members`, sorted worker ids; each pair at most once."""
    return TOPOLOGIES[topology](seed, number, members)


def partners(topology: str, number: int, members: Sequence[int], worker: int, seed: int = 0) -> list[tuple[int, float]]:
    """(partner, weight) of `worker` in round `number`. Under `random` those that it asks itself."""
    if topology == RANDOM:
        others = [other for other in members if other != worker]
        return [(others[_draw(seed, number, worker) % len(others)], HALF)] if others else []
    found = edges(topology, number, members, seed)
    return [(b if a == worker else a, weight) for a, b, weight in found if worker in (a, b)]
