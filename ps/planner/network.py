"""The links between hosts, and the speed and memory of each host. Delays are in seconds, rates in bytes a second.

How it works

1. `Network.parse` reads a network.json that ps-probe has written, `from_places` a table of cities. docs/planning.md has
   both formats. Each value is checked against its bounds, and an error names the row and the column.
2. A matrix has a row for each sender and a column for each receiver:

       delay_s     a     b           rates of 1 MiB    a     b
             a     -   0.010                     a     -   1e8
             b   0.012   -                       b   9e7    -

3. `sent_s` interpolates the rates of the measured message sizes. `transfer_s` adds the delay.
4. A direction that was not measured has the delay inf and the rate 0, so each plan that needs the link costs inf.
5. `of` cuts the network to some hosts, in a new order. Planners then number hosts from 0 again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from narrows.protocols.errors import UsageError

Array = npt.NDArray[np.float64]

FORMAT = 1
HOSTS_MAX = 4096  # a float64 matrix of all pairs then has 128 MiB
SIZES_MAX = 16  # message sizes with a rate each
NAMED_MAX = 8  # names in a sentence
# Least and largest value of each field of network.json. A value beyond is a slip, and arithmetic would overflow.
DELAY_S, RATE, SPEED = (0.0, 1e6), (1.0, 1e18), (1e-9, 1e9)
MEMORY, PRICE, SIZE = (0.0, 1e18), (0.0, 1e12), (1.0, 1e15)
STEP_S = (1e-9, 1e9)
NUMBERS = {int, float, np.float64, type(None)}  # the types of a number in JSON: neither true nor "5" is a number
Bounds = tuple[float, float]
NAME = re.compile(r"[^\s=/\-][^\s=/]*")  # the name of a host, which stands as a word in commands


@dataclass(frozen=True, eq=False, slots=True)
class Network:
    """n hosts and the links between them.

    Matrices have the sender's row and the receiver's column; the diagonal is never used. A direction that was not
    measured has the delay inf and the rate 0.
    """

    hosts: tuple[str, ...]  # names
    delay_s: Array  # (n, n), seconds one way
    rates: Array  # (m, n, n), bytes a second, of messages of sizes_bytes
    sizes_bytes: tuple[float, ...]  # (m,), ascending
    compute: Array  # (n,), speed; a layer takes Job.layer_s on a host of speed 1
    memory_bytes: Array  # (n,)
    price: Array  # (n, n), money a byte
    measured_unix_s: float | None = None  # when ps-probe measured, seconds since 1970
    # The hosts of each place that the user names; any two places are nested or disjoint. None: step_prices.py finds
    # places by the rates.
    places: tuple[tuple[int, ...], ...] | None = None
    wires: Array | None = None  # (n, n), bytes a second of the wire between the places of two hosts; inf: not known

    def sent_s(self, message_bytes: float) -> Array:
        """Return (n, n) seconds of one message's bytes, without delay; inf where the link is missing.

        Between two measured sizes the rate is linear in the logarithm of the size. Outside, the rate of the nearest
        size holds.
        """
        at = np.interp(math.log(max(message_bytes, 1.0)), np.log(self.sizes_bytes), range(len(self.sizes_bytes)))
        low = int(at)
        rate = self.rates[low]
        if at > low:
            rate = rate + (at - low) * (self.rates[low + 1] - rate)
        with np.errstate(divide="ignore"):
            return _off_diagonal(message_bytes / rate)

    def transfer_s(self, message_bytes: float) -> Array:
        """Return (n, n) seconds of one message: delay + bytes / rate (2206.01288, eq. 3).

        Raises:
            UsageError: a link is missing.
        """
        if pairs := self.missing:
            raise UsageError(
                f"network.json lacks the links {named(pairs)}: a pipeline needs all of them; measure these"
            )
        return _off_diagonal(self.delay_s + self.sent_s(message_bytes))

    @property
    def missing(self) -> list[str]:
        """The pairs of hosts with a direction that was not measured, each as "a to b"."""
        absent = np.isinf(self.delay_s) | np.isinf(self.delay_s.T)
        return [f"{self.hosts[a]} to {self.hosts[b]}" for a, b in zip(*np.nonzero(np.triu(absent, 1)), strict=True)]

    def of(self, hosts: Sequence[int]) -> Network:
        """Return the network of these hosts alone, in this order."""
        at, both = [*hosts], np.ix_(hosts, hosts)
        number = {host: index for index, host in enumerate(at)}
        places = [tuple(sorted(number[host] for host in place if host in number)) for place in self.places or ()]
        return replace(
            self,
            places=None if self.places is None else tuple(place for place in places if place),
            wires=None if self.wires is None else self.wires[both],
            hosts=tuple(self.hosts[host] for host in at),
            delay_s=self.delay_s[both],
            rates=self.rates[:, both[0], both[1]],
            compute=self.compute[at],
            memory_bytes=self.memory_bytes[at],
            price=self.price[both],
        )

    def alike(self) -> Network:
        """Return the same links between hosts that all have the mean speed, as for a planner that ignores speeds."""
        return replace(self, compute=np.full(len(self.hosts), self.compute.mean()))

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Network:
        """Build the network of a parsed network.json.

        Raises:
            UsageError: a field is missing, or has a wrong shape or value.
        """
        if document.get("format") != FORMAT:
            raise UsageError(f"network.json has format {document.get('format')!r}; this version reads {FORMAT}")
        hosts = _hosts(document.get("hosts"))
        n = len(hosts)
        try:
            rates = sorted(document["rates"], key=lambda row: float(row["message_bytes"]))
            sizes = tuple(float(_array(row["message_bytes"], "message_bytes", (), SIZE)) for row in rates)
            tables = [row["bits_per_second"] for row in rates]
            delay = document["delay_s"]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"network.json lacks a field or has a wrong one: {error}") from None
        if not 1 <= len(sizes) <= SIZES_MAX or len(set(sizes)) < len(sizes):
            raise UsageError(f"network.json has rates of sizes {sizes}; 1 to {SIZES_MAX} different ones are needed")
        measured = document.get("measured_unix_s")
        delay_s = _pairs(delay, "delay_s", n, DELAY_S, unknown=np.nan)
        each = np.stack([_pairs(table, "bits_per_second", n, RATE, unknown=np.nan) for table in tables])
        absent = np.isnan(delay_s) | np.isnan(each).any(0)
        places = _named_places(document.get("places"), hosts)
        return cls(
            hosts,
            np.where(absent, np.inf, delay_s),
            np.where(absent, 0.0, each / 8),
            sizes,
            _array(speeds(document, n), "compute", (n,), SPEED, unknown=1.0),
            _array(document.get("memory_bytes", [None] * n), "memory_bytes", (n,), MEMORY, unknown=np.inf),
            _off_diagonal(_pairs(document.get("price_per_byte", [[0.0] * n] * n), "price_per_byte", n, PRICE)),
            None if measured is None else float(_array(measured, "measured_unix_s", (), (-1e18, 1e18))),
            None if places is None else tuple(places.values()),
            _wires(document.get("wires"), places or {}, n),
        )


def _named_places(value: Any, hosts: Sequence[str]) -> dict[str, tuple[int, ...]] | None:
    """Return the hosts of each place that network.json names. Raise UsageError where the table is wrong."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(names, list) and names for names in value.values()):
        raise UsageError('places of the network is no table of hosts: write {"oslo": ["oslo-0", "oslo-1"]}')
    number = {name: host for host, name in enumerate(hosts)}
    for place, names in value.items():
        if unknown := [str(name) for name in names if not isinstance(name, str) or name not in number]:
            raise UsageError(f"places of the network: {place} has {unknown[0]}, and no host has that name")
    found = {str(place): tuple(sorted({number[name] for name in names})) for place, names in value.items()}
    for one, other in combinations(found, 2):
        both = {*found[one]} & {*found[other]}
        if both and both not in ({*found[one]}, {*found[other]}):
            name = hosts[min(both)]
            raise UsageError(f"places of the network: {one} and {other} overlap in {name}; places are nested or apart")
    return found


def _wires(value: Any, places: Mapping[str, tuple[int, ...]], n: int) -> Array | None:
    """Return (n, n) bytes a second of the wires that network.json names, inf elsewhere.

    Raise UsageError for a wrong row.
    """
    if value is None:
        return None
    found = np.full((n, n), np.inf)
    for row in value if isinstance(value, list) else [value]:
        ends, rate = (row.get("places"), row.get("bits_per_second")) if isinstance(row, Mapping) else (None, None)
        if not isinstance(ends, list) or len(ends) != 2 or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise UsageError(
                'wires of the network: write {"places": ["leipzig", "oslo"], "bits_per_second": 1e8} for each wire'
            )
        if unknown := [str(end) for end in ends if end not in places]:
            raise UsageError(f"wires of the network: {unknown[0]} is not one of its places; write it into places too")
        one, other = (places[end] for end in ends)
        if {*one} & {*other}:
            raise UsageError(f"wires of the network: {ends[0]} and {ends[1]} are not apart, so no wire joins them")
        found[np.ix_(one, other)] = rate / 8
        found[np.ix_(other, one)] = rate / 8
    return found


def from_places(places: Mapping[str, Any], hosts_each: Sequence[int]) -> Network:
    """Build a network of hosts in cities. The hosts are named CITY-0, CITY-1 and so on, and each city is a place.

    Args:
        places: `order` has the names of the c cities. `delay_ms` and `bandwidth_gbps`, (c, c), have the links between
            cities, and on their diagonals the links inside a city.
        hosts_each: the number of hosts of each city, in that order.

    Raises:
        UsageError: the table has a wrong shape or value.
    """
    order = places["order"]
    if len(order) != len(hosts_each):
        raise UsageError(f"{len(order)} places and {len(hosts_each)} counts of hosts; give one count for each place")
    at = np.repeat(np.arange(len(order)), hosts_each)
    shape = (len(order), len(order))
    rate = (
        _array(places["bandwidth_gbps"], "bandwidth_gbps", shape, (RATE[0] / 1e9, RATE[1] / 1e9))[np.ix_(at, at)] * 1e9
    )
    names = [[f"{name}-{k}" for k in range(count)] for name, count in zip(order, hosts_each, strict=True)]
    return Network.parse(
        {
            "format": FORMAT,
            "hosts": [name for city in names for name in city],
            "places": {name: city for name, city in zip(order, names, strict=True) if city},
            "delay_s": _array(places["delay_ms"], "delay_ms", shape, (0.0, 1e3 * DELAY_S[1]))[np.ix_(at, at)] / 1e3,
            "rates": [{"message_bytes": 1, "bits_per_second": rate}],
        }
    )


def _hosts(value: Any) -> tuple[str, ...]:
    """Return the names of the hosts. Raise UsageError where one is no name or the number of hosts is out of bounds."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(name, str) for name in value):
        raise UsageError('hosts of the network is no list of names: write ["leipzig", "oslo"]')
    n = len(value)
    if not 2 <= n <= HOSTS_MAX or len(set(value)) < n:
        raise UsageError(f"network.json has {n} hosts; 2 to {HOSTS_MAX} with different names are needed")
    for name in value:
        if not NAME.fullmatch(name):
            raise UsageError(
                f"hosts of the network: {name!r} is no name; give letters and digits, without spaces, = and /"
            )
    return tuple(value)


def speeds(document: Mapping[str, Any], n: int) -> Sequence[float | None]:
    """Return the speed of each of n hosts: its `compute`, or the fastest host's `step_seconds` over its own.

    None stands for a host whose speed was not measured. Raise UsageError for a wrong table.
    """
    if (given := document.get("compute")) is not None:
        return cast(Sequence[float | None], given)
    table = document.get("step_seconds")
    steps = np.full(n, np.nan) if table is None else _array(table, "step_seconds", (n,), STEP_S, unknown=np.nan)
    return [None if np.isnan(seconds) else float(np.nanmin(steps) / seconds) for seconds in steps]


def named(names: Sequence[str]) -> str:
    """Return the first NAMED_MAX names as a list in words, and the number of the others."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _array(value: Any, name: str, shape: tuple[int, ...], bounds: Bounds, unknown: float | None = None) -> Array:
    """Return `value` as float64 of `shape`, with `unknown` in the place of null.

    Raises:
        UsageError: a value is out of `bounds`, no number, or null while `unknown` is None. The error names the row and
            the column.
    """
    table = np.asarray(value, np.float64 if _numbers(value) else object)
    if table.shape != shape:
        raise UsageError(f"{name} of the network has shape {table.shape}; {shape} is needed")
    plain = _numbers(table) or {*map(type, table.flat)} <= NUMBERS
    may = unknown is not None and not _numbers(table)
    absent = np.array([each is None for each in table.flat], bool).reshape(shape) if may else np.zeros(shape, bool)
    if plain:
        found = np.where(absent, bounds[0] if unknown is None else unknown, table).astype(np.float64)
        wrong = ~(absent | ((found >= bounds[0]) & (found <= bounds[1])))  # NaN is wrong
    if not plain or wrong.any():
        at, each = next(
            (at, each) for at, each in np.ndenumerate(table) if not _fits(each, bounds, unknown is not None)
        )
        where = "".join(f"[{index}]" for index in at)
        shown = "null" if each is None else json.dumps(each, default=str)[:40]
        raise UsageError(
            f"{name}{where} of the network is {shown}; a number from {bounds[0]:g} to {bounds[1]:g} is needed"
        )
    return found


def _numbers(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiu"


def _fits(value: Any, bounds: Bounds, null: bool) -> bool:
    if value is None:
        return null
    known = type(value) in NUMBERS or isinstance(value, np.number)
    return known and bounds[0] <= value <= bounds[1]


def _pairs(value: Any, name: str, n: int, bounds: Bounds, unknown: float | None = None) -> Array:
    """Return `value` as float64 (n, n). Any value is allowed on the diagonal, and becomes 1 within `bounds`."""
    table = np.array(value, np.float64 if _numbers(value) else object)
    if table.shape == (n, n):
        np.fill_diagonal(table, min(max(bounds[0], 1.0), bounds[1]))
    return _array(table if _numbers(table) else table.tolist(), name, (n, n), bounds, unknown)


def _off_diagonal(matrix: Array) -> Array:
    np.fill_diagonal(matrix, 0.0)
    return matrix
