"""A GPU codes, folds and composes updates, and trains. The bench compares these times with those of the script alone.

    python bench/gpu/device.py                                            # the first GPU: 1, 10 and 100 M values, then steps
    python bench/gpu/device.py --part codes --count 100000000 --spec topk:0.01
    python bench/gpu/device.py --device host --part codes --count 100000  # the CPU in the place of a device: to try this script

Rules
- GB/s are bytes of the update (4 a value) over the median time, whatever a row really moves: a copy moves twice that.
- Rows take turns, so that all see the same clocks; each ends with a wait for the device. Before them two updates are encoded on
  the CPU too, and the payloads must be equal byte for byte.
- "fold" starts from a payload in host memory: its check on the CPU and its way over PCIe are included. "whole step" is what a
  worker does between two optimizer steps: difference, encode, fold of a state as large, and the replica composed.
- A step is the median of the script's own, one worker and a server of two shards on this machine: the script alone, with its
  arrays on the host, and with them on the device. The cost not hidden is the step minus that of the script alone. Its parts are
  medians of the columns of ps-worker's record (docs/howto/trace.md), of the host's time.
- Without a GPU this exits with 2 and says what is missing.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from narrows.compression import ErrorFeedback, device, parse
from narrows.compression.codecs import coded_piece
from narrows.compression.device.home import DeviceHome
from narrows.compression.device.stages import select_top
from narrows.compression.kernels.record import Sum
from narrows.compression.replica import ArrayReplica
from narrows.compression.sparsifiers import TopK
from narrows.protocols.config.key_ranges import parts
from narrows.worker.model.device_placement import device_home
from narrows.worker.runtime.trace import PARTS

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab import launch, record

TASK = str(launch.ROOT / "bench" / "tasks" / "bytelm.py")
SIZES = {
    "1.3M": (),
    "9.8M": ("--layers", "8", "--width", "320", "--heads", "8"),
    "100M": ("--layers", "12", "--width", "832", "--heads", "13"),
}
STEP_SPECS = ("dense", "topk:0.05+int8", "cycle:0.15+sign")
STEP_LIMIT_S = 540.0
WARM_STEPS = 10  # steps at the start of a run, which no median counts
Rows = dict[str, Callable[[], Any]]


def rows_of(home: DeviceHome[torch.Tensor], spec: str, updates: list[torch.Tensor]) -> Rows:
    """The calls that are timed, by name."""
    kernels, update, count = home.kernels, updates[0], updates[0].numel()
    spare, residual = home.zeros(count), updates[1].clone()
    feedback = device.DeviceErrorFeedback(kernels, parse(spec), count)
    payload = bytes(feedback.encode(update))
    chain = feedback.compressor
    view = kernels.view
    rows: Rows = {
        "device-to-device copy": lambda: spare.copy_(update),
        "one read (largest key)": lambda: kernels.largest_key(view(update)),
    }
    if isinstance(chain.reducer, TopK):
        k, dropped_bits = chain.reducer.kept_max(count), chain.reducer.dropped_bits
        addends = Sum(view(residual), np.float32(1.0), view(update), view(spare))
        there = kernels.empty(k, np.uint32), kernels.empty(k, np.uint32)

        def select() -> None:
            select_top(kernels, addends, k, dropped_bits, True, *there, kernels.record())

        select()
        rows["add + select + compact"] = select
        rows["quantize + pack indices"] = lambda: feedback.code(*there, count, False, kernels.record())
        rows["torch.topk of |x|"] = lambda: torch.topk(update.abs(), k, sorted=False)
    rows["encode"] = lambda: feedback.encode(update)
    rows["fold"] = lambda: device.accumulate(kernels, payload, 0.5, residual)
    rows["whole step"] = whole_step(home, spec, updates, payload)
    return rows


def whole_step(
    home: DeviceHome[torch.Tensor], spec: str, updates: list[torch.Tensor], payload: bytes
) -> Callable[[], Any]:
    """A replica's, of one shard with all keys."""
    count = updates[0].numel()
    replica = ArrayReplica(0, count, [((0, count), home.feedback(parse(spec), count, 0))], parts, home=home)
    before, update, clock = home.zeros(count), home.zeros(count), 0
    state = coded_piece(payload, 0, count)

    def step() -> None:
        nonlocal clock
        torch.sub(updates[clock % 2], before, out=update)
        pieces = replica.encode(update, clock)
        replica.absorb([state], add=True)
        replica.base([(0.5, piece) for piece in pieces], 0, count, before)
        clock += 1

    return step


def compared(home: DeviceHome[torch.Tensor], spec: str, hosts: list[Any], updates: list[torch.Tensor]) -> int:
    """Runs both sides over the updates; the last payload's size. Exits with 1 where they differ."""
    ours = device.DeviceErrorFeedback(home.kernels, parse(spec), hosts[0].size)
    theirs = ErrorFeedback(parse(spec), hosts[0].size)
    for step, (host, update) in enumerate(zip(hosts, updates, strict=True)):
        payload = ours.encode(update)
        if payload != theirs.encode(host):
            sys.exit(f"{spec}: the payload of step {step} differs from the CPU's")
    return payload.nbytes


def codes(recorder: record.Recorder, home: DeviceHome[torch.Tensor], count: int, spec: str, rounds: int) -> None:
    """A line for each call of one SPEC."""
    hosts = [np.random.default_rng(seed).standard_normal(count, dtype=np.float32) for seed in (0, 1)]
    updates = [home.zeros(count) for _ in hosts]
    for host, update in zip(hosts, updates, strict=True):
        home.load(host, update)
    payload_bytes = compared(home, spec, hosts, updates)
    click.echo(f"{count:,} values, {spec}: {payload_bytes:,} bytes, equal to the CPU's")
    with home.kernels.active():
        rows = rows_of(home, spec, updates)
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        for round_number in range(rounds + 2):  # two to compile and to settle
            for name, run in rows.items():
                settle(updates[0])
                begin = time.perf_counter()
                run()
                settle(updates[0])
                if round_number >= 2:
                    seconds[name].append(time.perf_counter() - begin)
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        figures: record.Figures = {"time": (1e3 * middle, "ms"), "rate": (4e-9 * count / middle, "GB/s")}
        recorder.add(f"{spec}: {name}", figures, table="codes", arguments={"values": count, "rounds": rounds})


def settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def step_of(size: str, steps: int, where: str, spec: str, gpu: str, folder: str) -> record.Figures:
    """Times of a step and of its parts. where: alone, or where the arrays are. folder: for the record of the run."""
    flags = [*SIZES[size], "--steps", str(steps), "--batch", "16"]
    env = launch.environment(NARROWS_DEVICE=gpu, NARROWS_ARRAYS="device" if where == "device" else "host")
    command = [sys.executable, TASK, *flags]
    if where != "alone":
        run = ["--sync", "ssp", "--staleness", "1", "--compress", spec, "--shards", "2", "--device", gpu]
        run += ["--record", f"{folder}/record.jsonl"]
        command = launch.ps_worker("-n", "1", *run, TASK, *flags)
    said, _ = launch.run(command, STEP_LIMIT_S, env)
    found = re.search(r"median step ([0-9.]+) s", said)
    if found is None:
        raise launch.CommandFailed(f"{' '.join(command)}\nsaid nothing of its steps:\n{said}")
    figures: record.Figures = {"step": (1e3 * float(found[1]), "ms")}
    if where != "alone":
        events = map(json.loads, Path(folder, "record.jsonl").read_text("utf-8").splitlines())
        rows = [event for event in events if event["event"] == "step"][WARM_STEPS:]
        figures |= {part: (1e3 * statistics.median(row[f"{part}_seconds"] for row in rows), "ms") for part in PARTS}
    return figures


def steps_of(recorder: record.Recorder, size: str, steps: int, rounds: int, gpu: str) -> None:
    """A line for each round of the script alone, and of each SPEC with the arrays on the host and on the device."""
    for _ in range(rounds):
        for where, spec in (("alone", ""), *((where, spec) for spec in STEP_SPECS for where in ("host", "device"))):
            with tempfile.TemporaryDirectory() as folder:
                figures = step_of(size, steps, where, spec, gpu, folder)
            name = f"{spec}, arrays on the {where}" if spec else where
            recorder.add(name, figures, table=f"steps of {size}", beside="alone", arguments={"steps": steps})


@click.command(help=__doc__, context_settings={"max_content_width": 120, "show_default": True})
@click.option("--device", "name", default="cuda:0", help="cuda:N, or host")
@click.option("--part", type=click.Choice(["codes", "steps", "all"]), default="all")
@click.option("--count", "counts", multiple=True, type=int, default=(1_000_000, 10_000_000, 100_000_000))
@click.option(
    "--spec", "specs", multiple=True, default=("topk:0.01+int8", "topk:0.05+int8", "cycle:0.15+sign"), help="of codes"
)
@click.option("--size", "sizes", multiple=True, type=click.Choice([*SIZES]), default=("9.8M", "100M"))
@click.option("--steps", default=40)
@click.option("--rounds", default=15, help="of codes; a fifth as many of steps")
@record.out_option("gpu/device")
def main(
    name: str,
    part: str,
    counts: tuple[int, ...],
    specs: tuple[str, ...],
    sizes: tuple[str, ...],
    steps: int,
    rounds: int,
    out: Path,
) -> None:
    if name != "host" and not torch.cuda.is_available():
        click.echo(f"{name}: this torch ({torch.__version__}) sees no GPU; --device host tries the script", err=True)
        sys.exit(2)
    try:
        home = device_home(torch.device("cpu" if name == "host" else name))
    except RuntimeError as error:
        click.echo(error, err=True)
        sys.exit(2)
    what = "the CPU in the place of a device" if name == "host" else torch.cuda.get_device_name(name)
    gpu = "cpu" if name == "host" else name
    try:
        with record.Recorder("gpu/device", out) as recorder:
            recorder.facts["machine"]["gpu"] = what
            for count in counts if part != "steps" else ():
                for spec in specs:
                    codes(recorder, home, count, spec, rounds)
            for size in sizes if part != "codes" else ():
                steps_of(recorder, size, steps, max(1, rounds // 5), gpu)
    except launch.CommandFailed as error:
        click.echo(error, err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
