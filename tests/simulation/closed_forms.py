"""How long a round of a tree takes on links without faults, in closed form, and how long it took.

For child i of a server: c is its compute for one clock (inner steps times the time of one), u and d are what its update
and the state take on the road, delay + bytes / rate. A round is one advance of the root's min_clock; in `async`, as
many updates as there are children.

    bound 0 (bsp, local)  the slowest child is waited for, and its road both ways: T = max_i (c_i + u_i + d_i)
    no bound (async)      a child waits for its road and its window of W updates alone (s + 1 for a bound s):
                          p_i = max(c_i, bytes / rate_i, (c_i + u_i + d_i) / W)
                          min_clock goes with the slowest, max_i p_i; a round is n / sum_i (1 / p_i)
    bound s (ssp, local)  no slower than bound 0, no faster than max_i p_i

A cluster k is a child whose compute is H clocks of its own, H the inner steps of the mode above. B is one such clock: T of
its workers for bound 0, max_i p_i for no bound. U and D are its road:

    above 0,  below 0          its workers wait for the state from above:  max_k (H B_k + U_k + D_k)
    above 0,  below no bound   they do not; the road lies under compute:   max_k max(H B_k, U_k + D_k)
    above no bound             nobody waits:                               p_k = max(H B_k, bytes / rate_k, (U_k + D_k) / W)

This is for one shard. With more, parts of one round are under way on both levels and both ways at once: it is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from narrows.protocols.config.modes import Mode
from narrows.protocols.effects import NS
from simulation.trees import HEADER_BYTES, Road, Tree, TreeCase

SKIPPED = 1 / 3  # of all rounds, at the beginning: windows fill, and who was ahead at the start is caught up with


@dataclass(frozen=True, slots=True)
class Form:
    """Seconds per round, at least and at most; the same where no level has a bound but 0."""

    low: float
    high: float


class Forms:
    """The closed forms of one case."""

    def __init__(self, case: TreeCase) -> None:
        self.case = case
        self.above, self.below = case.above.mode(), case.below.mode()
        self.compute_s = [step / NS * self.below.local_steps for step in case.step_ns]

    def bytes_s(self, road: Road) -> float:
        """Seconds that the bytes of one copy of the model take to pass."""
        return (self.case.model_bytes + HEADER_BYTES) / road.bytes_per_second

    def road_s(self, road: Road) -> float:
        """One copy of the model, one way."""
        return road.delay_ns / NS + self.bytes_s(road)

    def own_s(self, index: int) -> float:
        """A worker's own clock, with no bound."""
        compute, road = self.compute_s[index], self.case.roads[index]
        return max(compute, self.bytes_s(road), (compute + 2 * self.road_s(road)) / self.below.window)

    def together_s(self, index: int) -> float:
        """A worker's clock in a barrier that waits for it alone."""
        return self.compute_s[index] + 2 * self.road_s(self.case.roads[index])

    def clock_s(self, workers: Sequence[int], bounded: bool) -> float:
        """One clock of a cluster of these workers."""
        return max(map(self.together_s if bounded else self.own_s, workers))

    def cluster_s(self, cluster: int, bounded: bool) -> float:
        """One update of a cluster where nobody above is waited for."""
        road = self.case.roads_up[cluster]
        compute = self.above.local_steps * self.clock_s(self.workers_of(cluster), bounded)
        return max(compute, self.bytes_s(road), 2 * self.road_s(road) / self.above.window)

    def workers_of(self, cluster: int) -> range:
        return range(cluster * self.case.workers, (cluster + 1) * self.case.workers)

    def round_s(self) -> Form:
        """One round of the root."""
        low, high = (
            self._round(*(_is_bounded(mode, slow) for mode in (self.above, self.below))) for slow in (False, True)
        )
        return Form(low, high)

    def _round(self, above: bool, below: bool) -> float:
        """With every bound above 0 taken as bound 0 or as none."""
        case, steps = self.case, self.above.local_steps
        harmonic = self.above.bound is None
        if not case.clusters:
            workers = range(case.workers)
            if harmonic:
                return len(workers) / sum(1 / self.own_s(worker) for worker in workers)
            return self.clock_s(workers, above)
        clusters = range(case.clusters)
        if harmonic:
            return len(clusters) / sum(1 / self.cluster_s(cluster, below) for cluster in clusters)
        if not above:
            return max(self.cluster_s(cluster, below) for cluster in clusters)
        rounds = []
        for cluster in clusters:
            compute = steps * self.clock_s(self.workers_of(cluster), below)
            road = 2 * self.road_s(case.roads_up[cluster])
            rounds.append(compute + road if below else max(compute, road))
        return max(rounds)


def _is_bounded(mode: Mode, slow: bool) -> bool:
    return mode.bound == 0 or (mode.bound is not None and slow)


def measured_s(tree: Tree) -> float:
    """Seconds per round of a tree that has run, as `Forms.round_s` counts them.

    Where workers were ahead, clocks without updates go up after their last: counted is while all clusters computed.
    """
    if tree.case.above.mode().bound is not None:
        homes: dict[str, int] = {}
        for worker, times in tree.pushes_ns.items():
            name = tree.home(worker).name
            homes[name] = max(homes.get(name, 0), times[-1])
        until_ns = min(homes.values())
        rounds = [time for time in tree.rounds_ns if time <= until_ns]
        return _mean_s(rounds[int(len(rounds) * SKIPPED) :])
    rates = [1 / period for period in (cluster_periods_s(tree) if tree.clusters else worker_periods_s(tree))]
    return len(rates) / sum(rates)


def explained(form: Form, seconds: float, rounds: int) -> bool:
    """Whether the form allows for what was measured in a run of so many rounds, to 10 % where the form is one value.

    Between two values: who was a clock ahead when the measure began may have used that up when it ended.
    """
    if form.low == form.high:
        return abs(seconds - form.low) <= 0.1 * form.low
    return form.low * (1 - 1 / (rounds * (1 - SKIPPED))) <= seconds <= form.high


def worker_periods_s(tree: Tree) -> list[float]:
    """Seconds between two updates of each worker."""
    return [_mean_s(times) for _, times in sorted(tree.pushes_ns.items())]


def cluster_periods_s(tree: Tree) -> list[float]:
    """Seconds between two updates of each cluster."""
    return [_mean_s(node.pushes_ns[:-1]) for node in tree.clusters]


def _mean_s(times_ns: Sequence[int]) -> float:
    return (times_ns[-1] - times_ns[0]) / (len(times_ns) - 1) / NS
