"""Networks described by places: the number of machines in each place, and the link between each two. No I/O.

docs/planning.md has examples. A file is one description, or has several by name. A description has one of two forms:

- `order` has the names of places; `delay_ms` and `bandwidth_gbps` have a row for each place. The diagonals have the
  links inside a place.
- `intra_group` and `inter_group` have a `delay_ms` and a `bandwidth_gbps` each, the same for all places. A description
  without the two has these numbers itself, the same for all links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from narrows.protocols.errors import UsageError
from narrows.ps.planner.network import HOSTS_MAX, Network, from_places, named

LINK = ("delay_ms", "bandwidth_gbps")
_COUNT = re.compile(r"(?:(\d+)x)?(\d+)", re.ASCII)
_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)


def placed(document: Mapping[str, Any], name: str = "", machines: str = "") -> Network:
    """Build the network that one description of a parsed file describes.

    Args:
        document: the parsed file.
        name: the name of the description, "" where the file is one.
        machines: the number of machines in all, shared evenly, or in each place, as in 8x4,32x1; "": as the description
            says.

    Raises:
        UsageError: there is no such description, or it lacks a field, or `machines` has another number of places.
    """
    # A file may also name single links. Descriptions with more fields than those of a link come first.
    found = dict(sorted(_described(document), key=lambda each: {*each[1]} == {*LINK}))
    if name not in found:
        given = f"--places {name}: it has no such network" if name else "it has several networks: name one by --places"
        raise UsageError(
            f"{given}; there are {named([*filter(None, found)])}" if any(found) else "it describes no network"
        )
    place = found[name]
    try:
        counts = _counts(place, machines)
        between = place.get("inter_group", place)
        if "order" in place:
            order, tables = [str(each) for each in place["order"]], {key: place[key] for key in LINK}
        else:
            groups = place.get("groups")
            order = [*groups] if isinstance(groups, Mapping) else [f"place{k}" for k in range(len(counts))]
            inside, one = place.get("intra_group", between), np.eye(len(order), dtype=bool)
            tables = {key: np.where(one, float(inside[key]), float(between[key])) for key in LINK}
        network = from_places({"order": order} | tables, counts)
        return network if "order" in place or "intra_group" in place else replace(network, places=None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{name or 'its network'} lacks a field or has a wrong one: {error}") from None


def _described(document: Mapping[str, Any], name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the description of each network in the file."""
    if "inter_group" in document or document.keys() >= {*LINK}:
        yield name, document
        return
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _described(value, str(key))


def _counts(place: Mapping[str, Any], machines: str) -> list[int]:
    """Return the number of machines of each place."""
    groups, order = place.get("groups"), place.get("order")
    ranges = [_RANGE.fullmatch(str(each)) for each in groups.values()] if isinstance(groups, Mapping) else []
    places = len(order) if order is not None else len(ranges)
    if not machines and ranges and all(ranges):
        return [int(found[2]) - int(found[1]) + 1 for found in ranges if found]
    words = (machines or str(place.get("machines", place.get("nodes", "")))).split(",")
    counts = [_COUNT.fullmatch(word.strip()) for word in words]
    if not all(counts):
        raise UsageError(
            f"--machines {machines or 'is missing'}: give how many in all, or in each place, as in 8x4,32x1"
        )
    each = [(int(found[1] or 1), int(found[2])) for found in counts if found]
    if sum(times * count for times, count in each) > HOSTS_MAX:
        raise UsageError(f"--machines {machines}: at most {HOSTS_MAX} can be planned for")
    if len(words) == 1 and "x" not in words[0]:
        return _shared(each[0][1], places)
    return [count for times, count in each for _ in range(times)]


def _shared(total: int, places: int) -> list[int]:
    """Share machines evenly over places; the first places get one more where a remainder is left."""
    if not places:
        raise UsageError("--machines: it does not say how many places there are; give machines of each, as in 8x4,32x1")
    return [total // places + (number < total % places) for number in range(places)]
