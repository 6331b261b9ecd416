"""Wires between the hosts of a network, in virtual time. No I/O.

A host has a card each way, a place a wire to each other one, and a pair of hosts a link. All messages share them.
"""

from __future__ import annotations

import numpy as np

from narrows.protocols.effects import NS
from narrows.ps.planner.step_prices import StepPrices
from narrows.ps.planner.timeline import Wire, delay_ns

FAST = 1 << 50  # bytes a second of what takes no time
Wires = dict[tuple[object, ...], Wire]


class NetworkWires:
    """Between hosts, for messages of one size."""

    def __init__(self, prices: StepPrices, wires: Wires, size: float) -> None:
        self.prices, self.wires, self.size = prices, wires, size
        self.delays_ns: dict[tuple[int, int], int] = {}
        with np.errstate(divide="ignore"):
            self.rates = size / prices.sent_s(size)

    def delay_ns(self, source: int, target: int) -> int:
        """From host to host."""
        if (source, target) not in self.delays_ns:
            self.delays_ns[source, target] = delay_ns(self.path(source, target))
        return self.delays_ns[source, target]

    def path(self, source: int, target: int) -> list[Wire]:
        """From host to host."""
        if source == target:
            return []
        prices = self.prices
        hops = [self._wire(("out", source), prices.port_out[source])]
        for level, (here, there) in enumerate(prices.place[:, [source, target]]):
            if here != there:
                hops.append(self.wires.get(("places", level, here, there)) or self._between(level, here, there))
                break
        far_ns = int(prices.network.delay_s[source, target] * NS)
        hops.append(self._wire(("pair", self.size, source, target), self.rates[source, target], far_ns))
        return [*hops, self._wire(("in", target), prices.port_in[target])]

    def _between(self, level: int, here: int, there: int) -> Wire:
        """The wire from place to place: as fast as its fastest link, or as network.json says."""
        place, named = self.prices.place[level], self.prices.network.wires
        both = np.ix_(place == here, place == there)
        known = np.inf if named is None else float(named[both].max())
        return self._wire(("places", level, here, there), self.rates[both].max() if np.isinf(known) else known)

    def _wire(self, key: tuple[object, ...], rate: float, far_ns: int = 0) -> Wire:
        if key not in self.wires:
            self.wires[key] = Wire(far_ns, max(1, int(min(rate, FAST))))
        return self.wires[key]
