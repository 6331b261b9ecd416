"""Measurements, link by link, and the network.json that is made of them. docs/probing.md has the fields.

How it works

    flows of a pair (of_pair)       --+ figures of a run's members (of_run) --> MeasuredLink, MeasuredHost -->
    MeasuredNetwork.add_... --> document(): network.json another network.json (parse)    --+

Rules
- A link is directed, and has its own time. Of two measurements of a link or a host, the newer holds.
- Prices, speeds, places and wires that a user has written by hand have no time, and no measurement replaces them. Of
  prices, places and wires the last added hold. A speed counts as written by hand if it does not follow from the step
  seconds of its file.
- Matrices are made of links. An entry that is not known is null, and network.Network.parse treats it as a missing link.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from narrows.protocols.addresses import bracketed, parted
from narrows.protocols.errors import UsageError
from narrows.ps.planner.network import FORMAT
from narrows.ps.probe.flows import FIRST, PHASES, PINGED, SIZES, STREAM_BYTES, Flow, rates, stream_rate

Way = tuple[str, str]  # sender, receiver


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """One direction of a link."""

    delay_s: float  # one way
    rates: dict[int, float]  # by bytes of a message, bit/s
    unix_s: float  # when it was measured
    raw: dict[str, Any] = field(default_factory=dict)  # further figures, which only people read

    def rate(self, message_bytes: int) -> float:
        """Return the bit/s of a message, linear in the logarithm of its size, as in network.Network."""
        sizes = sorted(self.rates)
        return float(np.interp(math.log(message_bytes), np.log(sizes), [self.rates[size] for size in sizes]))


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """The figures of a host. None: not known."""

    unix_s: float  # when it was measured
    memory_bytes: int | None = None
    step_s: float | None = None  # seconds of one step of the script, without waiting
    speed: float | None = None  # as a user has written it by hand
    address: str = ""  # at which other hosts reach it; "": its name


@dataclass(slots=True)
class MeasuredNetwork:
    """All measurements of hosts and links, and what users have written beside them."""

    hosts: dict[str, MeasuredHost] = field(default_factory=dict)  # by name
    links: dict[Way, MeasuredLink] = field(default_factory=dict)
    prices: dict[Way, float] = field(default_factory=dict)  # money of a byte, written by hand
    shared: dict[str, Any] = field(default_factory=dict)  # `places` and `wires`, written by hand

    def add_host(self, name: str, host: MeasuredHost) -> None:
        """Add a host. The newer of two entries holds; the older fills in figures that the newer lacks."""
        old, new = sorted((self.hosts.get(name, host), host), key=lambda each: each.unix_s)
        memory, step_s = new.memory_bytes or old.memory_bytes, new.step_s or old.step_s
        speed, address = new.speed or old.speed, new.address or old.address
        self.hosts[name] = replace(new, memory_bytes=memory, step_s=step_s, speed=speed, address=address)

    def add_link(self, way: Way, link: MeasuredLink) -> None:
        if (known := self.links.get(way)) is None or known.unix_s <= link.unix_s:
            self.links[way] = link
        for name in way:
            self.add_host(name, MeasuredHost(link.unix_s))

    def add(self, other: MeasuredNetwork) -> None:
        for name, host in other.hosts.items():
            self.add_host(name, host)
        for way, link in other.links.items():
            self.add_link(way, link)
        self.prices |= other.prices
        self.shared |= other.shared

    @property
    def pairs(self) -> frozenset[frozenset[str]]:
        """The pairs of hosts with both directions known."""
        return frozenset(frozenset(way) for way in self.links if way[::-1] in self.links)

    def matrix(self, value: Any) -> list[list[float | None]]:
        """Return (n, n) values of `value(link)`, in the order of `hosts`; None where no link is known."""
        names = list(self.hosts)
        return [[value(self.links[a, b]) if (a, b) in self.links else None for b in names] for a in names]

    def document(self) -> dict[str, Any]:
        """Return the content of network.json."""
        sizes = sorted({size for link in self.links.values() for size in link.rates})
        steps = [host.step_s for host in self.hosts.values()]
        given = [host.speed for host in self.hosts.values()]
        made: dict[str, Any] = {
            "format": FORMAT,
            "hosts": [*self.hosts],
            "measured_unix_s": max((host.unix_s for host in self.hosts.values()), default=None),
            "delay_s": self.matrix(lambda link: link.delay_s),
            "rates": [
                {"message_bytes": size, "bits_per_second": self.matrix(lambda link, size=size: link.rate(size))}
                for size in sizes
            ],
            "memory_bytes": [host.memory_bytes for host in self.hosts.values()],
            "step_seconds": steps,
            "addresses": {name: host.address for name, host in self.hosts.items() if host.address},
            "hosts_measured_unix_s": [host.unix_s for host in self.hosts.values()],
            "links": [
                {
                    "from": way[0],
                    "to": way[1],
                    "measured_unix_s": link.unix_s,
                    "delay_s": link.delay_s,
                    "bits_per_second": {str(size): link.rates[size] for size in sorted(link.rates)},
                    **link.raw,
                }
                for way, link in sorted(self.links.items())
            ],
        }
        speeds = [speed or found for speed, found in zip(given, _speeds(steps), strict=True)]
        if any(speeds):
            made["compute"] = speeds
        if self.prices:
            made["price_per_byte"] = [[self.prices.get((a, b)) for b in self.hosts] for a in self.hosts]
        return made | self.shared


def _speeds(steps: Sequence[float | None]) -> list[float | None]:
    """Return speeds by the seconds of a step; the fastest host has 1. If one step is not known, all speeds are None."""
    known = [step_s for step_s in steps if step_s]
    return [min(known) / step_s for step_s in known] if len(known) == len(steps) else [None] * len(steps)


def addresses(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the addresses of a parsed network.json by host. A host that is not in it is reached by its name.

    Raises:
        UsageError: "addresses" is no table of texts.
    """
    found = document.get("addresses") or {}
    if not isinstance(found, dict) or not all(isinstance(each, str) and each for each in found.values()):
        raise UsageError('network.json: "addresses" has a text for each host that it names')
    return {str(name): bracketed(address) for name, address in found.items()}


FIELDS = ("from", "to", "measured_unix_s", "delay_s", "bits_per_second")


def parse(document: Mapping[str, Any]) -> MeasuredNetwork:
    """Return the links and hosts of a parsed network.json; without "links", those of its matrices.

    Raises:
        UsageError: a field is missing or wrong.
    """
    made = MeasuredNetwork()
    if document.get("format") != FORMAT:
        raise UsageError(f"network.json has format {document.get('format')!r}; this version reads {FORMAT}")
    try:
        names = [str(name) for name in document["hosts"]]
        unix_s = float(document.get("measured_unix_s") or 0.0)
        nothing = [None] * len(names)
        columns = [
            document.get(key, nothing) for key in ("hosts_measured_unix_s", "memory_bytes", "step_seconds", "compute")
        ]
        said = _speeds(columns[2])
        there = addresses(document)
        for name, at, memory, step_s, speed, found in zip(names, *columns, said, strict=True):
            by_hand = speed is not None and not (found and math.isclose(speed, found))
            at = unix_s if at is None else float(at)
            given = float(speed) if by_hand else None
            made.add_host(
                name, MeasuredHost(at, memory and int(memory), step_s and float(step_s), given, there.get(name, ""))
            )
        if "price_per_byte" in document:
            rows = zip(names, document["price_per_byte"], strict=True)
            priced = [(a, b, price) for a, row in rows for b, price in zip(names, row, strict=True)]
            made.prices = {(a, b): float(price) for a, b, price in priced if a != b and price is not None}
        made.shared = {key: document[key] for key in ("places", "wires") if document.get(key) is not None}
        for row in document["links"] if "links" in document else _rows(document, names, unix_s):
            rates = {int(size): float(rate) for size, rate in row["bits_per_second"].items()}
            if not rates or not all(size > 0 and 0 < rate < math.inf for size, rate in rates.items()):
                raise ValueError(f"the link from {row['from']} to {row['to']} has no rate")
            raw = {key: value for key, value in row.items() if key not in FIELDS}
            link = MeasuredLink(float(row["delay_s"]), rates, float(row["measured_unix_s"]), raw)
            made.add_link((str(row["from"]), str(row["to"])), link)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(f"network.json lacks a field or has a wrong one: {error}") from None
    return made


def _rows(document: Mapping[str, Any], names: Sequence[str], unix_s: float) -> Iterable[dict[str, Any]]:
    for i, sender in enumerate(names):
        for j, receiver in enumerate(names):
            if i == j or document["delay_s"][i][j] is None:
                continue
            rates = {int(row["message_bytes"]): row["bits_per_second"][i][j] for row in document["rates"]}
            yield dict(zip(FIELDS, (sender, receiver, unix_s, document["delay_s"][i][j], rates), strict=True))


def of_pair(names: Way, flows: Sequence[Flow], unix_s: float) -> dict[Way, MeasuredLink]:
    """Return both directions of a measured pair.

    If a lone stream was measured twice, the faster measurement counts, because nothing makes a stream faster than its
    link.

    Args:
        names: the pair. Direction 0 is from the first to the second.
        flows: the rows of both visits.
        unix_s: when the pair was measured.
    """
    trip = next(flow.figures for flow in flows if flow.phase == PINGED)
    found = {}
    for way in (0, 1):
        here = [flow for flow in flows if flow.way == way and flow.phase not in (PINGED, *FIRST)]
        single = [flow.figures for flow in here if PHASES[flow.phase].streams == len(PHASES[flow.phase].ways) == 1]
        alone = max(single, key=stream_rate)
        rows = [_raw(flow) for flow in here]
        raw = {
            "round_trip": trip,
            "retransmitted": alone["retransmits"] / alone["segments"] if alone["segments"] else 0.0,
            "flows": rows,
        }
        found[names if way == 0 else names[::-1]] = MeasuredLink(trip["min_rtt"] / 2, rates(alone), unix_s, raw)
    return found


def _raw(flow: Flow) -> dict[str, Any]:
    phase = PHASES[flow.phase]
    return {"streams": phase.streams, "both_ways": len(phase.ways) > 1, **flow.figures}


def of_run(frame: Mapping[str, Any], server: str, unix_s: float) -> MeasuredNetwork:
    """Return the links between the members of a run and their servers, as the members have measured them.

    Members on one host share its links: their highest rate and their shortest round trip hold.

    Args:
        frame: a frame of the run's dashboard.
        server: the name of the root's host, "" for that of its address.
        unix_s: the present time.
    """
    made = MeasuredNetwork()
    address = parted(str(frame["run"].get("address", "")))[0]
    root = server or address.removeprefix("tcp://").rpartition(":")[0]
    hosts = {(): root} | {tuple(row["path"]): row["host"] for row in frame["members"]}
    known = (*SIZES, STREAM_BYTES)
    for row in frame["members"]:
        path = tuple(row["path"])
        member, above = hosts[path], hosts.get(path[:-1], "")
        if not row["live"] or not member or not above or member == above:
            continue
        if not row["runs"] and row["step_seconds"][0]:
            made.add_host(member, MeasuredHost(unix_s, step_s=row["step_seconds"][0]))
        for way, rate, size in zip(((member, above), (above, member)), row["rate"], row["step_bytes"], strict=True):
            if not rate or not row["round_trip_seconds"]:
                continue
            nearest = min((abs(math.log(each / max(size, 1))), each) for each in known)[1]
            old = made.links.get(way)
            best = max(8 * rate, *old.rates.values()) if old else 8 * rate
            delay_s = min(row["round_trip_seconds"] / 2, old.delay_s if old else math.inf)
            made.add_link(way, MeasuredLink(delay_s, {nearest: best}, unix_s, {"measured_by": "run"}))
    return made


def table(found: MeasuredNetwork) -> list[str]:
    """Return the rates of one stream in Mbit/s and the delays in ms as lines; a row is a sender."""
    names = list(found.hosts)
    rates = found.matrix(lambda link: link.rates[max(link.rates)] / 1e6)
    delays = found.matrix(lambda link: link.delay_s * 1e3)
    width = max(7, *map(len, names))
    lines = []
    for title, rows, form in (("Mbit/s, row sends", rates, ".4g"), ("delay one way, ms", delays, ".1f")):
        lines += ["", title, " " * width + "".join(f" {name:>{width}}" for name in names)]
        for name, row in zip(names, rows, strict=True):
            cells = (f"{'-' if value is None else format(value, form):>{width}}" for value in row)
            lines.append(f"{name:>{width}} " + " ".join(cells))
    return lines
