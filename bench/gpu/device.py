"""A GPU codes, folds and composes updates, and trains. The bench compares what came with what was wanted.

    python bench/gpu/device.py                                       # all parts, the first GPU
    python bench/gpu/device.py codes kernels --count 100000000       # these parts, at this size
    python bench/gpu/device.py --device host                         # the CPU in the place of a GPU: to try this script

The parts, in the order in which they run:
- checks: each kernel beside the CPU's, byte for byte (tests/kit/cuda_checks.py).
- codes: an encode, a fold and a whole step at 1, 10 and 100 M values. Payloads must be equal to the CPU's byte for byte.
- steps, steps-100M: a step of the byte GPT with 9.8 M and 100 M parameters, in a worker and in the script alone.
- start: the first step of one worker and of four, with kernels on disk and without, beside --device cpu.
- losses: 50 steps of the byte GPT by two workers with --sync bsp, arrays on the device beside arrays on the host.
- users: scripts as users write them (user.py), and every sync mode; the loss must fall.
- kernels: torch.profiler's time of each kernel of an encode and of a fold, at 100 M values.
- memory: what a worker under ssp takes of the card, by bench/speed/memory.py, 100 M parameters.
- profile: cProfile's time of each Python function in 100 encodes and 100 folds, at 1 M values.
- memcheck, racecheck: compute-sanitizer over the checks.

Rules
- Several parts run in processes of their own, each with a limit. --within cuts the last ones, or leaves them out.
- Each result is a line: what came, what was wanted, and `held` or `missed`. The exit code is 1 where a part failed or missed.
- GB/s are bytes of the update (4 a value) over the median time, whatever a row really moves: a copy moves twice that.
- Rows of `codes` take turns, so that all see the same clocks; each ends with a wait for the device.
- "fold" starts from a payload in host memory: its check on the CPU and its way over PCIe are included. "whole step" is what a
  worker does between two optimizer steps: encode of the parameters less their start, fold of a state as large, and the replica
  composed.
- A step is the median of the script's own, one worker and a server of SHARDS shards on this machine. Its parts are
  medians of the columns of ps-worker's record (docs/howto/trace.md), of the host's time; "script" is all that is not ours.
- Without a GPU this exits with 2 and says what is missing.
"""

from __future__ import annotations

import cProfile
import io
import json
import os
import pstats
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch

from narrows.compression import ErrorFeedback, device, parse
from narrows.compression.buffers import DeviceDifference
from narrows.compression.codecs import coded_piece
from narrows.compression.device.home import DeviceHome
from narrows.compression.kernels.jit import own_folder
from narrows.compression.payload import open_payload
from narrows.compression.replica import ArrayReplica
from narrows.compression.sparsifiers import TopK
from narrows.protocols.config.key_ranges import parts as key_ranges
from narrows.worker.model.device_placement import device_home
from narrows.worker.runtime.trace import PARTS as STEP_PARTS

sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu import user
from lab import launch, record

TASK, USER = (str(launch.ROOT / "bench" / path) for path in ("tasks/bytelm.py", "gpu/user.py"))
SIZES = {
    "1.3M": (),
    "9.8M": ("--layers", "8", "--width", "320", "--heads", "8"),
    "100M": ("--layers", "12", "--width", "832", "--heads", "13"),
}
SHARDS = {"100M": 8}  # else 2, each a core: a shard's share of 100 M values would take longer than a step
COUNTS = (1_000_000, 10_000_000, 100_000_000)
# The most milliseconds of a call, at 1, 10 and 100 M values.
CODE_LIMITS = {
    "topk:0.01+int8": {"encode": (0.25, 0.4, 1.2)},
    "topk:0.05+int8": {"encode": (0.25, 0.45, 1.8)},
    "cycle:0.15+sign": {"encode": (0.12, 0.25, 0.8)},
}
ANY_SPEC_LIMITS = {"fold": (0.25, 0.4, 1.5), "whole step": (0.6, 1.0, 4.0)}
# The most of a step over the script alone.
STEP_LIMITS = {
    "9.8M": {"cycle:0.15+sign": 1.10, "topk:0.05+int8": 1.15},
    "100M": {"cycle:0.15+sign": 1.03, "topk:0.05+int8": 1.05},
}
MEMORY, MEMORY_ROW = str(launch.ROOT / "bench" / "speed" / "memory.py"), "ssp s=1, on a device"
CARD_MODELS = 3.5  # the most that a worker takes over the arrays of its script, in models
PROFILED = ("topk:0.05+int8", "cycle:0.15+sign")
START_LIMITS_S = {"kernels on disk": 4.0, "no kernels on disk": 15.0}  # of the first step over that of --device cpu
LOSSES_APART = 1e-6
LOSS_SHARE = 0.5  # of the first loss of a user's script: its last is below
MODES = ("bsp", "async", "local", "gossip")  # beside ssp, which each kind of script has
CHECKS = (
    "scans", "selection", "top_of_blocks", "index_codes", "randoms", "value_codings", "streams", "odd_streams", "sampled",
)  # fmt: skip
SIMULATED_CHECKS = ("scans", "randoms")  # in the simulator each of the others takes many seconds
WARM_STEPS = 10  # steps at the start of a run, which no median counts
COMMAND_LIMIT_S = 240.0
WARM_UPS, CALLS, TRACED = 3, 100, 4
END_S = 20.0  # in which a part that was interrupted ends its processes
Rows = dict[str, Callable[[], Any]]


class NotHereError(Exception):
    """A part cannot run on this machine. The text says why."""


@dataclass
class Bench:
    """What the parts share.

    Attributes:
        recorder: of the results.
        name: cuda:N, or host.
        counts: sizes of arrays; none: those of the part.
        specs: of codes.
        steps: of a run; None: those of the part.
        rounds: of codes; a fifth as many of steps.
        missed: results that were not as wanted.
    """

    recorder: record.Recorder
    name: str
    counts: tuple[int, ...]
    specs: tuple[str, ...]
    steps: int | None
    rounds: int
    missed: list[str] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        return self.name == "host"

    @property
    def gpu(self) -> str:
        """The --device of a worker."""
        return "cpu" if self.simulated else self.name

    def home(self) -> DeviceHome[torch.Tensor]:
        return device_home(torch.device(self.gpu))

    def environment(self, arrays: str = "device", **more: str) -> dict[str, str]:
        """The variables of a script. arrays: device or host."""
        return launch.environment(NARROWS_DEVICE=self.gpu, NARROWS_ARRAYS=arrays, **more)

    def tell(
        self, table: str, run: str, figures: record.Figures, wanted: str = "", held: bool = True, **more: Any
    ) -> None:
        """Record and print a result. wanted: the end of a sentence; "": nothing was."""
        outcome = f"{'held' if held else 'missed'}: {wanted}" if wanted else ""
        if not held:
            self.missed.append(f"{table}, {run}: {wanted}")
        self.recorder.add(run, figures, table=table, note=outcome, **more)
        told = ", ".join(f"{name} {record.shown(value, unit)} {unit}".rstrip()
                         for name, (value, unit) in figures.items() if value is not None)  # fmt: skip
        click.echo(f"  {run}: {told}{'; ' * bool(outcome)}{outcome}")

    def failed(self, table: str, run: str, error: object) -> None:
        click.echo(f"  {run}: failed: {error}")
        self.missed.append(f"{table}, {run}: failed")


Outcome = tuple[str, float] | launch.CommandFailed  # what a command said and its seconds, or its error


def at_once(commands: Mapping[str, tuple[list[str], dict[str, str]]]) -> dict[str, Outcome]:
    """Run commands beside each other, each with its variables."""

    def outcome(one: tuple[list[str], dict[str, str]]) -> Outcome:
        try:
            return launch.run(one[0], COMMAND_LIMIT_S, one[1])
        except launch.CommandFailed as error:
            return error

    with ThreadPoolExecutor(len(commands)) as pool:
        return dict(zip(commands, pool.map(outcome, commands.values()), strict=True))


# Checks.


def checks(bench: Bench) -> None:
    told_by(bench, "checks", SIMULATED_CHECKS if bench.simulated else CHECKS, [], "equal to the CPU's byte for byte")


def told_by(bench: Bench, table: str, names: tuple[str, ...], before: list[str], wanted: str) -> None:
    """Run the named checks at the same time. `before`: the command that starts each, such as compute-sanitizer."""
    env = bench.environment() | {"PYTHONPATH": str(launch.ROOT / "tests")}
    if bench.simulated:
        env["NUMBA_ENABLE_CUDASIM"] = "1"
    command = [*before, sys.executable, "-m", "kit.cuda_checks"]
    for name, found in at_once({name: ([*command, name], env) for name in names}).items():
        if isinstance(found, launch.CommandFailed):
            bench.failed(table, name, found)
        else:
            bench.tell(table, name, {"time": (found[1], "s")}, wanted)


def sanitized(tool: str) -> Callable[[Bench], None]:
    def part(bench: Bench) -> None:
        if bench.simulated or shutil.which("compute-sanitizer") is None:
            raise NotHereError("compute-sanitizer and a GPU are not both here")
        told_by(bench, tool, CHECKS, ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"], "no error found")

    return part


# Codes.


def codes(bench: Bench) -> None:
    home = bench.home()
    for count in bench.counts or (COUNTS if not bench.simulated else (100_000,)):
        for spec in bench.specs:
            coded(bench, home, count, spec)


def rows_of(home: DeviceHome[torch.Tensor], spec: str, updates: list[torch.Tensor]) -> Rows:
    """The calls that are timed, by name."""
    kernels, update, count = home.kernels, updates[0], updates[0].numel()
    spare, residual = home.zeros(count), updates[1].clone()
    feedback = device.DeviceErrorFeedback(kernels, parse(spec), count)
    payload = bytes(feedback.encode(update))
    rows: Rows = {"device-to-device copy": lambda: spare.copy_(update)}
    reducer = feedback.compressor.reducer
    if isinstance(reducer, TopK):
        k = reducer.kept_max(count)
        rows["torch.topk of |x|"] = lambda: torch.topk(update.abs(), k, sorted=False)
    rows["encode"] = lambda: feedback.encode(update)
    rows["fold"] = lambda: device.accumulate(kernels, payload, 0.5, residual)
    rows["check of the payload"] = lambda: open_payload(payload, count)
    rows["whole step"] = whole_step(home, spec, updates, payload)
    return rows


def whole_step(
    home: DeviceHome[torch.Tensor], spec: str, updates: list[torch.Tensor], payload: bytes
) -> Callable[[], Any]:
    """A replica's, of one shard with all keys."""
    count = updates[0].numel()
    replica: ArrayReplica[Any] = ArrayReplica(
        0, count, [((0, count), home.feedback(parse(spec), count, 0))], key_ranges, home=home
    )
    before, clock = home.zeros(count), 0
    state = coded_piece(payload, 0, count)

    def step() -> None:
        nonlocal clock
        pieces = replica.encode(DeviceDifference(updates[clock % 2], before), clock)
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


def coded(bench: Bench, home: DeviceHome[torch.Tensor], count: int, spec: str) -> None:
    """A line for each call of one SPEC."""
    hosts = [np.random.default_rng(seed).standard_normal(count, dtype=np.float32) for seed in (0, 1)]
    hosts *= 2  # an encode is captured at its second call, and replayed from the third on
    updates = [home.zeros(count) for _ in hosts[:2]]
    for host, update in zip(hosts, updates, strict=False):
        home.load(host, update)
    payload_bytes = compared(home, spec, hosts, updates * 2)
    click.echo(f"{count:,} values, {spec}: {payload_bytes:,} bytes, equal to the CPU's")
    with home.kernels.active():
        rows = rows_of(home, spec, updates)
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        for round_number in range(bench.rounds + WARM_UPS):
            for name, run in rows.items():
                settle(updates[0])
                begin = time.perf_counter()
                run()
                settle(updates[0])
                if round_number >= WARM_UPS:
                    seconds[name].append(time.perf_counter() - begin)
    limits = CODE_LIMITS.get(spec, {}) | ANY_SPEC_LIMITS if count in COUNTS and not bench.simulated else {}
    for name, taken in seconds.items():
        ms = 1e3 * statistics.median(taken)
        figures: record.Figures = {"time": (ms, "ms"), "rate": (4e-6 * count / ms, "GB/s")}
        limit = limits[name][COUNTS.index(count)] if name in limits else None
        wanted, held = (f"at most {limit} ms", ms <= limit) if limit else ("", True)
        arguments = {"values": count, "rounds": bench.rounds}
        bench.tell("codes", f"{spec}: {name}", figures, wanted, held, arguments=arguments)


def settle(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


# Where the time of an encode and a fold goes.


def warm_calls(
    home: DeviceHome[torch.Tensor], spec: str, count: int
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """An encode of two updates in turn, and a fold of one payload; each has run before."""
    where = home.zeros(0).device
    generator = torch.Generator(device=where).manual_seed(1)
    first, second, out = (torch.randn(count, device=where, generator=generator) for _ in range(3))
    feedback = device.DeviceErrorFeedback(home.kernels, parse(spec), count)
    payload = b""
    for _ in range(WARM_UPS):
        feedback.encode(first)
        payload = bytes(feedback.encode(second))
        device.accumulate(home.kernels, payload, 0.5, out)
    return (
        lambda turn: feedback.encode((first, second)[turn % 2]),
        lambda turn: device.accumulate(home.kernels, payload, 0.5, out),
    )


def profile(bench: Bench) -> None:
    size, home = bench.counts[0] if bench.counts else 1_000_000, bench.home()
    for spec in PROFILED:
        for title, run, lines in zip(("encode", "fold"), warm_calls(home, spec, size), (22, 14), strict=True):
            profiler = cProfile.Profile()
            profiler.enable()
            for turn in range(CALLS):
                run(turn)
            profiler.disable()
            text = io.StringIO()
            stats: Any = pstats.Stats(profiler, stream=text)
            stats.sort_stats("tottime").print_stats(lines)
            click.echo("\n".join(line[-150:] for line in text.getvalue().splitlines()[4 : lines + 12]))
            each_us = 1e6 * stats.total_tt / CALLS
            bench.tell("profile", f"{title} {spec}", {"Python": (each_us, "us")}, arguments={"values": size})


def kernels(bench: Bench) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as tracer

    if bench.simulated:
        raise NotHereError("a CPU has no CUDA kernels")
    home = bench.home()
    size = bench.counts[0] if bench.counts else COUNTS[-1]
    for spec in PROFILED:
        for title, run in zip(("encode", "fold"), warm_calls(home, spec, size), strict=True):
            with tracer(activities=[ProfilerActivity.CUDA]) as trace:
                for turn in range(TRACED):
                    run(turn)
                torch.cuda.synchronize()
            events: list[Any] = sorted(trace.key_averages(), key=lambda event: -event.device_time_total)
            for event in [event for event in events if event.device_time_total][:14]:
                figures: record.Figures = {"each time": (event.device_time_total / TRACED, "us")}
                figures["launches"] = (event.count / TRACED, "")
                run_name = f"{title} {spec}: {event.key[:60]}"
                bench.tell("kernels", run_name, figures, arguments={"values": size})


# Runs.


def step_of(bench: Bench, size: str, spec: str, folder: str) -> record.Figures:
    """Times of a step and of its parts. spec: "": of the script alone. folder: for the record of the run."""
    steps = bench.steps or 40
    flags = [*SIZES[size], "--steps", str(steps), "--batch", "16"]
    command = [sys.executable, TASK, *flags]
    if spec:
        run = ["--sync", "ssp", "--staleness", "1", "--compress", spec, "--device", bench.gpu]
        run += ["--shards", str(SHARDS.get(size, 2))]
        command = launch.ps_worker("-n", "1", *run, "--record", f"{folder}/record.jsonl", TASK, *flags)
    said, _ = launch.run(command, COMMAND_LIMIT_S, bench.environment())
    found = re.search(r"median step ([0-9.]+) s", said)
    if found is None:
        raise launch.CommandFailed(f"{' '.join(command)}\nsaid nothing of its steps:\n{said}")
    figures: record.Figures = {"step": (1e3 * float(found[1]), "ms")}
    if spec:
        events = map(json.loads, Path(folder, "record.jsonl").read_text("utf-8").splitlines())
        rows = [event for event in events if event["event"] == "step"][min(WARM_STEPS, steps // 2) :]
        figures |= {
            part: (1e3 * statistics.median(row[f"{part}_seconds"] for row in rows), "ms") for part in STEP_PARTS
        }
    return figures


def steps_of(size: str) -> Callable[[Bench], None]:
    def part(bench: Bench) -> None:
        """A line for each round of the script alone, and of each SPEC."""
        if bench.simulated and size != "1.3M":
            return steps_of("1.3M")(bench)
        limits = STEP_LIMITS.get(size, STEP_LIMITS["9.8M"])
        alone: list[float] = []
        taken: dict[str, list[float]] = {spec: [] for spec in limits}
        for _ in range(max(1, bench.rounds // 5)):
            for spec in ("", *limits):
                with tempfile.TemporaryDirectory() as folder:
                    figures = step_of(bench, size, spec, folder)
                ms = figures["step"][0] or 0.0
                taken.get(spec, alone).append(ms)
                limit = limits.get(spec, 1.0) * statistics.median(alone)
                wanted = f"at most {limits[spec]} of the script alone" if spec and not bench.simulated else ""
                held = not wanted or statistics.median(taken[spec]) <= limit
                bench.tell(
                    f"steps of {size}, {bench.recorder.facts['machine']['gpu'].removeprefix('NVIDIA ')}",
                    f"{spec}, arrays on the device" if spec else "alone",
                    figures | {"of the script": (ms / alone[-1], "")},
                    *(wanted, held),
                    beside="alone",
                    arguments={"steps": bench.steps or 40},
                )

    return part


def memory(bench: Bench) -> None:
    millions = 1 if bench.simulated else 100
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines.jsonl")
        command = [sys.executable, MEMORY, "--rows", MEMORY_ROW, "--millions", str(millions), "--out", str(lines)]
        launch.run(command, COMMAND_LIMIT_S, bench.environment())
        (line,) = map(json.loads, lines.read_text("utf-8").splitlines())
    found = {name: figure["value"] for name, figure in line["figures"].items() if name.startswith("worker")}
    most = max(found[f"worker, {phase}"] for phase in ("join", "steps", "shared", "finish"))
    figures: record.Figures = {name: (value, "models") for name, value in found.items()}
    wanted = "" if bench.simulated else f"at most {CARD_MODELS} models"
    held = not wanted or most <= CARD_MODELS
    bench.tell("memory", MEMORY_ROW, figures, wanted, held, arguments={"millions": millions})


class UserRun(NamedTuple):
    """What the workers of a user's script said: the first rank's losses, and the latest first step of all ranks."""

    first_loss: float
    last_loss: float
    step_ms: float
    first_step_s: float

    @property
    def fell(self) -> bool:
        return self.last_loss < LOSS_SHARE * self.first_loss


def user_command(kind: str, gpu: str, steps: int, sync: str = "ssp", workers: int = 2) -> list[str]:
    run = ["--device", gpu, "--sync", sync, "--compress", "topk:0.05+int8"]
    return launch.ps_worker("-n", str(workers), *run, USER, kind, str(steps))


def user_run(said: str, began: float) -> UserRun:
    """began: the time.time() at which the command was started."""
    found = [json.loads(line) for line in re.findall(r"\{.*\}", said)]
    first = min(found, key=lambda each: each["rank"])
    latest = max(each["first step at"] for each in found)
    return UserRun(first["first loss"], first["last loss"], first["median step ms"], latest - began)


def users(bench: Bench) -> None:
    kinds = [kind for kind in user.KINDS if not (bench.simulated and kind == "stream")]
    steps = bench.steps or (10 if bench.simulated else 40)
    runs = {kind: user_command(kind, bench.gpu, steps) for kind in kinds}
    runs |= {f"channels, {mode}": user_command("channels", bench.gpu, steps, mode) for mode in MODES}
    began, env = time.time(), bench.environment()
    group = 2 if bench.simulated else 5
    names = list(runs)
    for some in (names[at : at + group] for at in range(0, len(names), group)):
        for name, found in at_once({name: (runs[name], env) for name in some}).items():
            if isinstance(found, launch.CommandFailed):
                bench.failed("users", name, found)
                continue
            told = user_run(found[0], began)
            losses: record.Figures = {"first loss": (told.first_loss, ""), "last loss": (told.last_loss, "")}
            more: record.Figures = {"step": (told.step_ms, "ms")}
            bench.tell("users", name, losses | more, f"a last loss below {LOSS_SHARE} of the first", told.fell)


def start(bench: Bench) -> None:
    """The first step of a worker comes after the start of its command, beside that of the same run on the CPU."""
    for workers in (1, 4) if not bench.simulated else (1,):
        on_cpu = first_step(bench, "cpu", workers, bench.environment("host"))
        bench.tell("start", f"{workers} workers, --device cpu", {"first step": (on_cpu, "s")})
        if workers == 1:
            bench.home()  # whose kernels are on disk from now on
        for name, limit_s in START_LIMITS_S.items():
            with tempfile.TemporaryDirectory() as folder:
                env = bench.environment()
                if name.startswith("no "):
                    env["XDG_CACHE_HOME"] = without_cubins(Path(folder))
                seconds = first_step(bench, bench.gpu, workers, env)
            wanted = f"at most {limit_s} s after that of --device cpu" if not bench.simulated else ""
            figures: record.Figures = {"first step": (seconds, "s"), "after the CPU's": (seconds - on_cpu, "s")}
            held = not wanted or seconds - on_cpu <= limit_s
            bench.tell("start", f"{workers} workers, {name}", figures, wanted, held)


def first_step(bench: Bench, gpu: str, workers: int, env: dict[str, str]) -> float:
    began = time.time()
    said, _ = launch.run(user_command("channels", gpu, 2, workers=workers), COMMAND_LIMIT_S, env)
    return user_run(said, began).first_step_s


def without_cubins(folder: Path) -> str:
    """Copy the user's compiled kernels to another home of caches, but for those of GPUs."""
    if (own := own_folder()) is not None:
        shutil.copytree(own, folder / "narrows", ignore=shutil.ignore_patterns("cuda-*"))
    return str(folder)


def losses(bench: Bench) -> None:
    flags = [TASK, "--deterministic", "--batch", "16", "--steps", str(bench.steps or (4 if bench.simulated else 50))]
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    places = {arrays: bench.environment(arrays, **env) for arrays in ("device", "host")}
    alone = at_once({name: ([sys.executable, *flags], places["host"]) for name in ("alone", "alone again")})
    tell_apart(bench, "the script alone, twice", alone, 0.0)
    for spec in bench.specs:
        run = ["--device", bench.gpu, "--sync", "bsp", "--shards", "2", "--compress", spec]
        command = launch.ps_worker("-n", "2", *run, *flags)
        both = at_once({arrays: (command, env) for arrays, env in places.items()})
        tell_apart(bench, f"{spec}, arrays on the device and on the host", both, LOSSES_APART)


def tell_apart(bench: Bench, run: str, outcomes: Mapping[str, Outcome], limit: float) -> None:
    """Compare the losses of two runs."""
    said = []
    for found in outcomes.values():
        if isinstance(found, launch.CommandFailed):
            return bench.failed("losses", run, found)
        said.append(losses_of(found[0]))
    one, other = said
    if not one or {who: len(each) for who, each in one.items()} != {who: len(each) for who, each in other.items()}:
        return bench.failed("losses", run, "the runs did not say the same number of losses")
    apart = max(abs(mine - yours) for who in one for mine, yours in zip(one[who], other[who], strict=True))
    steps = min(len(each) for each in one.values())
    figures: record.Figures = {"most apart": (apart, "")}
    bench.tell("losses", run, figures, f"at most {limit:g} apart", apart <= limit, arguments={"steps": steps})


def losses_of(said: str) -> dict[str, list[float]]:
    """The losses of each rank's steps, as bytelm.py --deterministic prints them."""
    return {who: json.loads(told) for who, told in re.findall(r"^(.*)losses (\[.*\])$", said, re.MULTILINE)}


class Part(NamedTuple):
    run: Callable[[Bench], None]
    limit_s: float


PARTS = {
    "checks": Part(checks, 250),
    "codes": Part(codes, 200),
    "steps": Part(steps_of("9.8M"), 240),
    "start": Part(start, 200),
    "losses": Part(losses, 200),
    "users": Part(users, 200),
    "kernels": Part(kernels, 90),
    "memory": Part(memory, 120),
    "profile": Part(profile, 60),
    "memcheck": Part(sanitized("memcheck"), 250),
    "racecheck": Part(sanitized("racecheck"), 250),
    "steps-100M": Part(steps_of("100M"), 300),
}
LEAST_S = 20.0  # with less time left a part is left out


def each_apart(parts: tuple[str, ...], flags: list[str], within_s: float) -> list[str]:
    """Run each part in a process of its own; return those that failed or missed. A GPU's fault ends a process for good."""
    deadline, wrong = time.monotonic() + within_s, []
    for part in parts:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            click.echo(f"=== {part}: not run: --within leaves {max(left, 0):.0f} s")
            wrong.append(part)
            continue
        command = [sys.executable, str(Path(__file__).resolve()), part, *flags]
        process = subprocess.Popen(command, cwd=launch.ROOT, start_new_session=True)
        limit_s = min(PARTS[part].limit_s, left)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"ended after {limit_s:.0f} s"
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code:
            click.echo(f"=== {part}: {code if isinstance(code, str) else f'exit code {code}'}")
            wrong.append(part)
    return wrong


@click.command(help=__doc__, context_settings={"max_content_width": 120, "show_default": True})
@click.argument("parts", nargs=-1, type=click.Choice([*PARTS]))
@click.option("--device", "name", default="cuda:0", help="cuda:N, or host")
@click.option("--count", "counts", multiple=True, type=click.IntRange(min=1), help="values of an array  [of the part]")
@click.option("--spec", "specs", multiple=True, default=tuple(CODE_LIMITS), help="of codes and losses")
@click.option("--steps", type=click.IntRange(min=1), help="of a run  [of the part]")
@click.option("--rounds", default=10, help="of codes; a fifth as many of steps")
@click.option("--within", type=float, default=3600.0, help="seconds for all parts")
@record.out_option("gpu/device")
def main(
    parts: tuple[str, ...],
    name: str,
    counts: tuple[int, ...],
    specs: tuple[str, ...],
    steps: int | None,
    rounds: int,
    within: float,
    out: Path,
) -> None:
    if name != "host" and not torch.cuda.is_available():
        click.echo(f"{name}: this torch ({torch.__version__}) sees no GPU; --device host tries the script", err=True)
        sys.exit(2)
    if len(parts) != 1:
        flags = ["--device", name, "--rounds", str(rounds), "--out", str(out.absolute())]
        flags += [word for count in counts for word in ("--count", str(count))]
        flags += [word for spec in specs for word in ("--spec", spec)]
        wrong = each_apart(parts or tuple(PARTS), flags + (["--steps", str(steps)] if steps else []), within)
        click.echo(f"all parts done; failed or missed: {', '.join(wrong) or 'none'}")
        sys.exit(bool(wrong))
    (part,) = parts
    click.echo(f"=== {part}")
    recorder = record.Recorder("gpu/device", out)
    kit = launch.ROOT / ".gpu" / "commit"
    if recorder.facts["commit"] == "unknown" and kit.exists():  # the kit was carried there without its repository
        recorder.facts["commit"] = kit.read_text().split()[0]
    what = "the CPU in the place of a device" if name == "host" else torch.cuda.get_device_name(name)
    recorder.facts["machine"]["gpu"] = what
    bench = Bench(recorder, name, counts, specs, steps, rounds)
    try:
        PARTS[part].run(bench)
    except NotHereError as reason:
        click.echo(f"  {part}: not run: {reason}")
    except (launch.CommandFailed, RuntimeError) as error:
        bench.failed(part, "all of it", error)
    click.echo(f"  {part}: {len(recorder.added)} results in {out}; {len(bench.missed)} failed or missed")
    sys.exit(bool(bench.missed))


if __name__ == "__main__":
    main()
