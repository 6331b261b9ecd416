"""The findings of `ps-worker --check`: faults and notices about a script, and what a run of it would cost. Pure.

How it works

    worker 0: ScriptWatch ──  event "check"  ──┐
    worker 1: ScriptWatch ──  event "check"  ──┴─> CheckedEvents, one a worker ─> found, facts, times ─> console

1. The `ScriptWatch` of each worker sends facts: the model, each of the first STEPS steps, the end.
2. `CheckedEvents.take` collects the facts of one worker.
3. `found` applies each rule of `FAULTS` and `NOTICES` to all workers. Facts of different workers are compared: equal
   inputs, equal gradients and equal random states are faults of a data-parallel script.
4. `facts` describes the model and the size of a push. `times` predicts the seconds of a step on a link, from the
   measured compute time and the encoded sizes.

Rules
- A rule takes the facts of all workers. It returns one sentence that names the fault and the way out, or "" if there is
  no fault.
- A fault ends the check with the exit code of a usage error. A notice does not.
- A rule returns "" if an earlier rule already explains the symptom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrows.compression import ladder, predict
from narrows.compression.ladder import Codecs
from narrows.protocols.config.memory import (
    ArrayFacts,
    ShardFacts,
    device_arrays,
    shard_arrays,
    shared_arrays,
    worker_arrays,
)
from narrows.protocols.config.settings import Settings

STEPS = 2  # the steps that are watched; equal to STEPS of script_watch.py, which imports torch and so is not imported
TIMES = ("never", "once", "twice")  # the words for 0 to STEPS steps
SHOWN = 3  # the largest number of tensor names in a sentence
STALENESS = 8  # the highest staleness bound that `times` suggests
# Flags that `times` tries beside those of the user: the rows of README's table, from wide links to narrow ones. The
# staleness bound of ssp is chosen for the link.
SUGGESTED: tuple[dict[str, Any], ...] = (
    {"sync": "bsp"},
    {"sync": "ssp", "compress": "topk:0.11+sign"},
    {"sync": "ssp", "compress": "cycle:0.15+sign"},
    {"sync": "local", "local_steps": 50},
)


@dataclass
class CheckedEvents:
    """The facts of one worker, from its events."""

    model: dict[str, Any] = field(default_factory=dict)  # what DistributedOptimizer wrapped; empty: nothing yet
    steps: list[dict[str, Any]] = field(default_factory=list)  # the steps that the worker has begun, at most STEPS
    costs: list[dict[str, Any]] = field(default_factory=list)  # the figures of each finished step, as in --record
    beside: list[dict[str, Any]] = field(default_factory=list)  # steps of optimizers other than the wrapper
    shuffled: list[dict[str, Any]] = field(default_factory=list)  # datasets that a DataLoader itself shuffles
    broken: dict[str, Any] = field(default_factory=dict)  # the first gradient or loss that is not finite
    done: dict[str, Any] = field(default_factory=dict)  # the facts after STEPS steps; empty: not reached
    error: str = ""  # the sentence of a NarrowsError that ended the worker
    code: int = 0  # the exit code of the worker

    def take(self, what: str, event: dict[str, Any]) -> None:
        """Store one fact.

        Args:
            what: the kind of fact, as `ScriptWatch` names it.
            event: the values of the fact.
        """
        match what:
            case "model":
                self.model = event
            case "step":
                self.steps.append(event)
            case "gradients":  # of the newest step, whose closure has been called
                self.steps[-1].update(event)
            case "beside":
                self.beside.append(event)
            case "shuffled":
                self.shuffled.append(event)
            case "not finite":
                self.broken = event
            case "done":
                self.done = event

    def fail(self, error: str) -> None:
        """Store the sentence of the error that ended the worker."""
        self.error = error

    def end(self, code: int) -> None:
        """Store the worker's exit code."""
        self.code = code

    @property
    def compute_s(self) -> float | None:
        """Seconds that the last watched step computed: without encoding, waits and the work of the check.

        None if the worker has not finished STEPS steps. The first step does not count: it warms up.
        """
        if not self.done or len(self.costs) < STEPS:
            return None
        step = self.costs[STEPS - 1]
        others = step["encode_seconds"] + step["wait_seconds"] + self.done["lost_seconds"]
        return max(0.0, float(step["step_seconds"] - others))


Workers = Sequence[CheckedEvents]
Rule = Callable[[Workers], str]


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _alike(values: Sequence[Any]) -> bool:
    """Return whether at least two workers sent a value, the same one, and it is not empty."""
    return len(values) > 1 and bool(values[0]) and all(value == values[0] for value in values)


def _first(workers: Workers, name: str) -> list[Any]:
    """Return the value of this name in the first step of each worker; None for a worker without a step or a value."""
    return [worker.steps[0].get(name) if worker.steps else None for worker in workers]


def errors(workers: Workers) -> str:
    return next((worker.error for worker in workers if worker.error), "")


def failed(workers: Workers) -> str:
    found = [f"local rank {i}" for i, worker in enumerate(workers) if worker.code and not worker.error]
    return f"{' and '.join(found)} failed before step {STEPS} was over: the traceback is above" if found else ""


def not_distributed(workers: Workers) -> str:
    if any(worker.model or worker.error or worker.code for worker in workers):
        return ""
    kind = next((each["optimizer"] for worker in workers for each in worker.beside), "...")
    return (
        "no DistributedOptimizer was made, so each worker trains alone and nothing is shared: write optimizer = "
        f"DistributedOptimizer({kind}(...), model)"
    )


def _beside(workers: Workers, wrapped: bool) -> str:
    """Return the class name of an optimizer that the script steps itself; "" if there is none.

    Args:
        wrapped: True: look for an optimizer that DistributedOptimizer wraps. False: for any other.
    """
    steps = [each for worker in workers if worker.model for each in worker.beside]
    return next((str(each["optimizer"]) for each in steps if each["wrapped"] is wrapped), "")


def wrapped_steps(workers: Workers) -> str:
    kind = _beside(workers, wrapped=True)
    return kind and (
        f"the script calls step() of the {kind} that DistributedOptimizer wraps, and that step is not shared: call step() of "
        "what DistributedOptimizer(...) returned"
    )


def beside(workers: Workers) -> str:
    kind = _beside(workers, wrapped=False)
    return kind and (
        f"{kind} steps outside of DistributedOptimizer, and its parameters are not shared: give DistributedOptimizer a list of "
        "all optimizers, and a model with all their parameters"
    )


def unowned(workers: Workers) -> str:
    names = _names(next((worker.model["unowned"] for worker in workers if worker.model and not worker.error), []))
    return names and (
        f"no optimizer has {names}, which the model has as trainable: give them to the optimizer, or set requires_grad=False"
    )


def late(workers: Workers) -> str:
    names = _names(next((worker.done["late"] for worker in workers if worker.done.get("late")), []))
    return names and (
        f"{names} came into the model after DistributedOptimizer was made, and no optimizer steps its parameters: add and "
        "replace modules before that"
    )


def not_finite(workers: Workers) -> str:
    for i, worker in enumerate(workers):
        if worker.broken:
            loss, number = worker.broken["loss"], worker.broken["number"]
            if not worker.broken["gradient"]:
                return (
                    f"local rank {i}: the loss of step {number} is {loss:g}: look at what it divides by and takes the log of, "
                    "and for values of another scale in the data"
                )
            shown = "" if loss is None else f" (the loss is {loss:g})"
            return (
                f"local rank {i}: the gradient of {worker.broken['gradient']} is not finite in step {number}{shown}: look for "
                "a division by zero, a log of zero or values of another scale in the loss and the data"
            )
        for step in worker.costs:
            if not math.isfinite(step.get("loss", 0.0)):
                return (
                    f"local rank {i} recorded a loss of {step['loss']}: look at what it divides by and takes the log of"
                )
    return ""


def _undisturbed(workers: Workers) -> bool:
    """Return whether each worker's script made an optimizer and ended by itself, without an error or another fault."""
    return all(
        worker.model and not (worker.error or worker.code or worker.broken or worker.beside) for worker in workers
    )


def uneven(workers: Workers) -> str:
    counts = [len(worker.steps) for worker in workers]
    few, many = counts.index(min(counts)), counts.index(max(counts))
    if counts[few] == counts[many] or not _undisturbed(workers):
        return ""
    return (
        f"local rank {few} called step() {TIMES[counts[few]]}, local rank {many} {TIMES[counts[many]]}: leave no step to one "
        "rank (if rank() == 0), and give each worker as many"
    )


def never(workers: Workers) -> str:
    if any(worker.steps for worker in workers) or not _undisturbed(workers):
        return ""
    return "no worker called step() of what DistributedOptimizer(...) returned: call it after backward(), once a batch"


def same_samples(workers: Workers) -> str:
    inputs, gradients = _first(workers, "inputs"), _first(workers, "gradients")
    seen = any(inputs)
    if (_alike(inputs) and any(inputs[0])) if seen else _alike(gradients):
        return (
            "all workers read the same samples in step 1: give the DataLoader sampler=sampler(dataset, batch), or cut the data "
            "by rank() and world_size()"
        )
    return ""


def whole_datasets(workers: Workers) -> str:
    """Find a DataLoader that shuffles the whole dataset, the same one in all workers.

    Two datasets count as the same if their first samples are equal. Random augmentation makes two reads of a sample
    differ; then the rule finds nothing.
    """
    of = [worker.shuffled[0] if worker.shuffled else {} for worker in workers]
    if not _alike(of) or not of[0]["first"] or same_samples(workers):
        return ""
    return (
        f"each worker shuffles the whole dataset of {of[0]['samples']:,} samples in an order of its own, so they repeat each "
        "other's within an epoch: give the DataLoader sampler=sampler(dataset, batch) instead of shuffle=True"
    )


def same_gradients(workers: Workers) -> str:
    if not _alike(_first(workers, "gradients")) or same_samples(workers):
        return ""
    return (
        "all workers have the same gradients of other samples: something sums them before DistributedOptimizer does, such as "
        "DistributedDataParallel: leave it out"
    )


def same_randomness(workers: Workers) -> str:
    if not _alike(_first(workers, "random")):
        return ""
    return (
        "all workers draw the same random numbers in the forward pass (dropout), so their noise does not average out: call "
        "torch.manual_seed(SEED + rank()) once the model is made"
    )


def without_gradient(workers: Workers) -> str:
    names = _names(sorted({name for worker in workers for name in worker.done.get("without", ())}))
    return names and (
        f"{names} had no gradient in {STEPS} steps: the loss does not depend on it; set requires_grad=False where that is meant"
    )


def counts_itself(workers: Workers) -> str:
    """Find a loop that counts steps or epochs without the run.

    The check sees the first steps alone. So the rule goes by the calls of the script: none of them followed the run's
    step or its end (`session.follows`).
    """
    if not any(worker.done and not {"step", "end"} & {*worker.done["follows"]} for worker in workers):
        return ""
    return (
        "the loop counts by itself, so after --resume, and in a worker that comes late, it begins at 0 and makes all its steps "
        "again: end it by sampler(dataset, batch, steps=N), or go over epochs by share.epochs(N) of share = sampler(dataset, "
        "batch) in place of range(N)"
    )


def counts_rates(workers: Workers) -> str:
    """Find a learning-rate scheduler that the run does not move on."""
    alone = [
        worker.done["scheduled"] and not {"step", "schedule"} & {*worker.done["follows"]}
        for worker in workers
        if worker.done
    ]
    if not any(alone):
        return ""
    return (
        "the scheduler begins anew after --resume, and in a worker that comes late: give it to DistributedOptimizer(..., "
        "schedule=schedule) if it steps once a step, to share.epochs(N, schedule) if once an epoch"
    )


def ended_early(workers: Workers) -> str:
    counts = {len(worker.steps) for worker in workers}
    if counts in ({0}, {STEPS}) or len(counts) > 1 or not _undisturbed(workers):
        return ""
    return (
        f"the script ended after {max(counts)} of the {STEPS} steps that are looked at: give it more samples or steps"
    )


FAULTS: tuple[Rule, ...] = (
    *(errors, failed, not_distributed, wrapped_steps, beside, unowned, late, not_finite, uneven, never),
    *(same_samples, same_gradients),
)
NOTICES: tuple[Rule, ...] = (
    *(whole_datasets, same_randomness, without_gradient, counts_itself, counts_rates),
    ended_early,
)


def found(rules: Sequence[Rule], workers: Workers) -> list[str]:
    """Return the sentences of the rules that found something, in the order of the rules."""
    return [sentence for rule in rules if (sentence := rule(workers))]


# The costs of a run.


def facts(workers: Workers, run: dict[str, Any]) -> list[str]:
    """Describe the model and the traffic of a run.

    Args:
        workers: the facts of all workers.
        run: the flags of the run, by name.

    Returns:
        Lines about the first worker's model, its optimizers, tables and buffers, the bytes of a push, and the compute
        seconds of a step; none if no worker made a DistributedOptimizer.
    """
    model = next((worker.model for worker in workers if worker.model), None)
    if model is None:
        return []
    kinds = ", ".join(f"{kind} of {size:,}" for kind, size in model["optimizers"])
    frozen = f", {model['frozen_values']:,} frozen, which are not sent" if model["frozen_values"] else ""
    lines = [
        f"parameters   {model['trainable']:,} trainable in {model['tensors']} tensors{frozen}",
        f"optimizer    {kinds}",
    ]
    if model["tables"][0]:
        touched = next((worker.done["touched"] for worker in workers if worker.done), 0)
        seen = f"; step {STEPS} touched {touched:,}, which travel with its push and back" if touched else ""
        lines.append("tables       {} on the servers, {:,} rows in all".format(*model["tables"]) + seen)
    count, size = model["buffers"]
    if count:
        lines.append(f"buffers      {count} of the module, {_bytes(size)}: those of the lowest rank hold for all")
    coded, settings = _coded(workers), Settings(**run).validated()
    ways = [(coded[spec][0], way, spec) for way, spec in
            (("up", settings.compress), ("down", settings.compress_down)) if spec in coded]  # fmt: skip
    if ways:
        parts = ", ".join(f"{_bytes(size / settings.fragments)} {way} as {spec}" for size, way, spec in ways)
        lines.append(f"a push       {parts}; {_bytes(coded['dense'][0])} as fp32")
    if links := sorted({way for worker in workers for way in worker.done.get("ways", ()) if way}):
        lines.append(f"the link     {', '.join(links)}, to a server on this machine")
    lines += _memory(workers, model["trainable"], settings)
    seconds = _compute_s(workers)
    if seconds is not None:
        lines.append(f"computing    {_ms(seconds)} a step, of the slower of {len(workers)} workers on this machine")
    return lines


def _memory(workers: Workers, trained: int, settings: Settings) -> list[str]:
    """Return lines on the arrays of a worker and of the servers that have the size of the model.

    There are none if no worker came to its end.
    """
    done = next((worker.done for worker in workers if worker.done), None)
    if done is None or not trained:
        return []
    codecs, moments = Codecs.of(settings.compress, settings.compress_down), done["kept_values"] / trained
    mode, moments = settings.mode(), round(moments, 2)
    facts, shards = (
        ArrayFacts.of(settings, codecs, moments, done["rounded"]),
        ShardFacts.of(settings, codecs, moments),
    )
    lines = []
    for whose, arrays, more in (
        ("memory       of a worker", worker_arrays(mode, facts), "; and activations"),
        (
            "one host     of a worker in shared memory at most",
            shared_arrays(mode, shards, facts.shards, 4 * trained),
            "",
        ),
        ("on a GPU     over the script's own arrays", device_arrays(mode, facts), ""),
        ("servers      together at most", shard_arrays(mode, shards), ""),
    ):
        if not arrays:
            continue
        each = ", ".join(f"{array.name} {array.models:.3g}" for array in arrays)
        lines.append(f"{whose} {sum(array.models for array in arrays):.3g} times {_bytes(4 * trained)}: {each}{more}")
    return lines


def times(workers: Workers, link: predict.Link, name: str, given: dict[str, Any]) -> list[str]:
    """Predict how long a step takes on a link.

    Args:
        workers: the facts of all workers.
        link: the speed and latency of the link.
        name: the link as the user wrote it.
        given: the flags of the run that the user gave, by name; may be empty.

    Returns:
        The lines of a table with a row for `given`, if there are any, and a row for each of `SUGGESTED`. `--compress
        auto` has no row but a line below, because the SPEC is not known before the run.
    """
    coded, compute_s = _coded(workers), _compute_s(workers)
    if not coded or compute_s is None:
        return [f"link {name}: no time is known, for the workers did not make {STEPS} steps"]
    rows, left, tables = [], list[str](), any(worker.model["tables"][0] for worker in workers if worker.model)
    suggested = [flags for flags in SUGGESTED if flags != given and not (tables and flags["sync"] == "local")]
    for flags in [*([given] if given else []), *suggested]:
        settings = Settings(**flags | {"workers": len(workers)}).validated()
        costs = [coded.get(spec) for spec in (settings.compress, settings.compress_down)]
        if costs[0] is None or costs[1] is None:
            flag = "compress" if costs[0] is None else "compress-down"
            left = [f"--{flag} auto: the run chooses while it goes on, so no time is known for the flags that you gave"]
            continue
        mode = settings.mode()
        size = [each[0] / mode.fragments for each in (costs[0], costs[1])]
        cost = predict.Cost(compute_s, costs[0][1], *size)
        shown, window = flags, mode.window
        if flags is not given and settings.sync == "ssp":
            bound = predict.staleness(link, cost, STALENESS)
            shown, window = flags | {"staleness": bound}, bound + 1
        words = " ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in shown.items())
        second = predict.step_s(link, cost, window, mode.local_steps)
        rows.append((words, *(_bytes(each / mode.local_steps) for each in size), _ms(second)))
    head = (f"a step on {name}", "up", "down", "takes")
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(4)]
    table = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]
    return [*table, *left]


def specs(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the SPECs with which `ScriptWatch` encodes an update: `dense`, and those of these sets of flags.

    `auto` is left out, since the run chooses its SPEC later.
    """
    each = [Settings(**flags).validated() for flags in runs]
    named = ["dense", *(spec for settings in each for spec in (settings.compress, settings.compress_down))]
    return [spec for spec in dict.fromkeys(named) if not ladder(spec).auto]


def _coded(workers: Workers) -> dict[str, list[float]]:
    """Return [bytes, seconds] of an encoded update, by SPEC, from the first worker that measured them."""
    return next((worker.done["encoded"] for worker in workers if worker.done.get("encoded")), {})


def _compute_s(workers: Workers) -> float | None:
    """Return the compute seconds of a step on the slowest worker; None if no worker has finished."""
    known = [seconds for worker in workers if (seconds := worker.compute_s) is not None]
    return max(known) if known else None


def _bytes(count: float) -> str:
    if count < 1e3:
        return f"{count:,.0f} B"
    return f"{count / 1e6:,.2f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
