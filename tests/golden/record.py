"""The golden record: what the product did at one commit, for steps that may change names and files and nothing else.

    python tests/golden/record.py --compare               all parts but the slow one; exit code 1 where something differs
    python tests/golden/record.py --compare wire bsp      these parts; cities is the slow one
    python tests/golden/record.py --write [PART ...]      record what the product does now, in the place of what there was

golden.json has a text for each name of each part: a digest, or the bytes of a message as hex. It has no name of a module, class
or field, and no prose, so these may change. docs/simulation.md says what each part holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numba
import torch

from golden import cities, interface, machines, resumed, static_parts, trained
from golden.digests import Entries

HERE = Path(__file__).resolve().parent
RECORD = HERE / "golden.json"


class Part(NamedTuple):
    """`entries`: what is recorded of it; `floats`: it holds only where torch rounds as it did; `slow`: only where asked for."""

    entries: Callable[[], Entries]
    floats: bool = True
    slow: bool = False
    prepare: Callable[[], None] = lambda: None  # before it is recorded anew
    same: Callable[[str, str, str], bool] = lambda name, then, now: then == now


PARTS = {
    "wire": Part(static_parts.wire_part, floats=False),
    "interface": Part(interface.interface_part, floats=False),
    "payloads": Part(static_parts.payloads_part, floats=False),
    "bsp": Part(trained.bsp_part),
    "events": Part(machines.events_part, prepare=machines.record_events),
    "checkpoint": Part(resumed.checkpoint_part, prepare=resumed.write_checkpoint),
    "campaigns": Part(machines.campaigns_part),
    "cities": Part(cities.cities_part, slow=True, same=cities.same),
}


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {"about": {}, "parts": {}}
    return found


def about() -> dict[str, str]:
    """Where a part is recorded: the commit and the versions, and what torch alone makes of a model here."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True, timeout=60
    )
    versions = {"torch": torch.__version__, "numba": numba.__version__}
    return {"commit": commit.stdout.strip(), **versions, "machine": trained.machine_digest()}


def why_not(part: str) -> str:
    """Why what is recorded of this part cannot hold here, "" where it can."""
    then = recorded()["about"][part]
    if not PARTS[part].floats or then["machine"] == trained.machine_digest():
        return ""
    versions = f"torch {torch.__version__}, recorded with {then['torch']}"
    return f"torch alone trains another model here than where the record was made ({versions})"


def differences(part: str, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[str]:
    """Compare the names of a part that are `wanted`; say of each what differs."""
    then: dict[str, str] = recorded()["parts"].get(part, {})
    entries = PARTS[part].entries()
    for name in sorted({*then, *entries}):
        if not wanted(name):
            continue
        if name not in then or name not in entries:
            yield f"{part}: {name}: {'it was not there' if name in entries else 'it is gone'}"
        elif not PARTS[part].same(name, then[name], now := entries[name]()):
            yield f"{part}: {name}: {then[name]}, now {now}"
    if part == "wire":
        for name, text in then.items():
            frames = then.get(name.replace("example", "frames"), "")
            if name.endswith("example") and (now := static_parts.read_again(text, int(frames))) != text:
                yield f"{part}: {name}: {text}, read and written again it is {now}"


def write(parts: list[str]) -> None:
    found = recorded()
    for part in parts:
        PARTS[part].prepare()
        found["about"][part] = about()
        found["parts"][part] = {name: make() for name, make in PARTS[part].entries().items()}
        print(f"{part}: {len(found['parts'][part])} recorded", flush=True)
    RECORD.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record these parts anew")
    parser.add_argument("--compare", action="store_true", help="compare these parts with the record")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all but slow ones")
    asked = parser.parse_args()
    if unknown := {*asked.parts} - {*PARTS}:
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if asked.write == asked.compare:
        parser.error("give one of --write and --compare")
    parts = asked.parts or [name for name, part in PARTS.items() if not part.slow]
    if asked.write:
        write(parts)
        return 0
    count = 0
    for part in parts:
        if why := why_not(part):
            print(f"{part}: not compared: {why}")
            continue
        found = list(differences(part))
        count += len(found)
        print("\n".join(found) or f"{part}: the same", flush=True)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
