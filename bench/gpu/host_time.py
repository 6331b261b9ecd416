"""Times what the host does for an encode and a fold on a GPU, with a CUDA driver that does nothing (tests/kit/fake_cuda.c).

    python bench/gpu/host_time.py                   microseconds of this checkout
    python bench/gpu/host_time.py --beside FOLDER   and of another checkout, whose .venv runs it, turn about
    python bench/gpu/host_time.py --profile         where an encode's time goes

Kernels do not run, so an encode's payload is without meaning; a fold takes one that the CPU has made. Arrays are objects
with a __cuda_array_interface__.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPECS = ("topk:0.01+int8", "topk:0.05+int8", "cycle:0.15+sign")
COUNT = 1_000_000
PARTS = 4  # of a turn: two shards with two fragments each
CALLS = 200


class DeviceValues:
    """float32[count] on a device, by the interface that all libraries share."""

    def __init__(self, kernels: Any, count: int) -> None:
        with kernels.active():
            self.memory = kernels.zeros(count, "float32")
        self.__cuda_array_interface__ = self.memory.__cuda_array_interface__


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return the median of the time of a call."""
    for _ in range(5):
        call()
    found = []
    for _ in range(calls):
        begin = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - begin) / 1e3)
    return statistics.median(found)


def measured(spec: str, profile: bool = False) -> dict[str, float]:
    import numpy as np

    from narrows.compression import ErrorFeedback, parse
    from narrows.compression import device as on_device
    from narrows.compression.device import DeviceErrorFeedback, kernels_for
    from narrows.compression.payload import open_payload

    kernels = kernels_for("cuda:0")
    pinned = kernels.queue.pinned

    def zeros(count: int) -> Any:  # no kernel writes the record there
        memory = pinned(count)
        memory[:] = 0
        return memory

    kernels.queue.pinned = zeros
    values = np.random.default_rng(0).standard_normal(COUNT).astype(np.float32)
    update, out = DeviceValues(kernels, COUNT), DeviceValues(kernels, COUNT)
    feedback = DeviceErrorFeedback(kernels, parse(spec), COUNT)
    payload = bytes(ErrorFeedback(parse(spec), COUNT).encode(values))
    pieces = [DeviceErrorFeedback(kernels, parse(spec), COUNT // PARTS, seed=i) for i in range(PARTS)]
    parts = [DeviceValues(kernels, COUNT // PARTS) for _ in range(PARTS)]

    def turn() -> None:
        for each, part in zip(pieces, parts, strict=True):
            each.encode(part)

    if profile:
        import cProfile
        import pstats

        for call in (lambda: feedback.encode(update), lambda: on_device.accumulate(kernels, payload, 0.5, out)):
            microseconds(call, 5)
            profiler = cProfile.Profile()
            profiler.runcall(microseconds, call)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(18)

    def own() -> None:
        """Add the newest own update, as a replica does at each step. Checkouts before this one fold its payload."""
        coded = getattr(feedback, "coded", None)
        if coded is None:
            on_device.accumulate(kernels, payload, 0.5, out)
            return
        with kernels.active():
            coded.add(0.5, kernels.view(out))

    check = microseconds(lambda: open_payload(payload, COUNT))
    fold = microseconds(lambda: on_device.accumulate(kernels, payload, 0.5, out))
    return {
        "encode": microseconds(lambda: feedback.encode(update)),  # before "own update"
        "fold without check": fold - check,
        "check": check,
        "own update": microseconds(own),
        f"turn of {PARTS} encodes": microseconds(turn),
    }


def once(folder: Path, library: Path, spec: str) -> dict[str, float]:
    """Measure a checkout in a process of its own."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(library.parent), "OMP_NUM_THREADS": "1"}
    words = [str(folder / ".venv/bin/python"), str(Path(__file__)), "--measure", spec]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--beside", type=Path, help="another checkout with a .venv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.measure, given.profile)))
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from kit.fake_cuda import build

    folders = [ROOT, *([given.beside] if given.beside else [])]
    with tempfile.TemporaryDirectory() as temporary:
        library = build(Path(temporary))
        if given.profile:
            environment = os.environ | {"LD_LIBRARY_PATH": temporary}
            for spec in SPECS:
                subprocess.run([sys.executable, __file__, "--measure", spec, "--profile"], env=environment, check=True)
            return
        for spec in SPECS:
            found: dict[Path, list[dict[str, float]]] = {folder: [] for folder in folders}
            for _ in range(given.rounds):
                for folder in folders:
                    found[folder].append(once(folder, library, spec))
            for folder, rounds in found.items():
                medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
                where = "this checkout" if folder == ROOT else "beside it"
                print(f"{spec}, {where}: " + ", ".join(f"{name} {value:.0f} us" for name, value in medians.items()))


if __name__ == "__main__":
    main()
