"""The wires that messages of a plan that is tried pass: hosts have a card each way, places a wire to each other one, and pairs
of hosts a link. No I/O."""

from __future__ import annotations

import numpy as np

from narrows.protocols.effects import NS
from narrows.protocols.planning.levels import Prices
from narrows.protocols.timeline import Wire

FAST = 1 << 50  # bytes a second of what takes no time


class Ways:
    """Between hosts, for messages of one size."""

    def __init__(self, prices: Prices, wires: dict[tuple[object, ...], Wire], size: float) -> None:
        self.prices, self.wires, self.size = prices, wires, size
        with np.errstate(divide="ignore"):
            self.rates = size / prices.sent_s(size)

    def path(self, source: int, target: int) -> list[Wire]:
        """From host to host."""
        if source == target:
            return []
        prices, here, there = self.prices, int(self.prices.place[source]), int(self.prices.place[target])
        hops = [self._wire(("out", source), prices.port_out[source])]
        if here != there:
            between = self.rates[np.ix_(prices.place == here, prices.place == there)]
            hops.append(self._wire(("places", here, there), between.max()))
        far_ns = int(prices.network.delay_s[source, target] * NS)
        hops.append(self._wire(("pair", self.size, source, target), self.rates[source, target], far_ns))
        return [*hops, self._wire(("in", target), prices.port_in[target])]

    def _wire(self, key: tuple[object, ...], rate: float, far_ns: int = 0) -> Wire:
        if key not in self.wires:
            self.wires[key] = Wire(far_ns, max(1, int(min(rate, FAST))))
        return self.wires[key]
