"""`ps-worker --check`: what it finds in scripts, in real processes; each rule of worker/check/findings.py by itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.embedding_model import Bags
from kit.processes import finished

from narrows.compression.predict import Link
from narrows.protocols.errors import UsageError
from narrows.worker.check import findings, script_watch
from narrows.worker.check.findings import FAULTS, NOTICES, STEPS, CheckedEvents, found
from narrows.worker.command.cli import command
from narrows.worker.model import embedding

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from narrows.worker import DistributedOptimizer, rank, sampler

torch.manual_seed(3)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
inner = torch.optim.{kind}({parameters}, lr=0.1)
optimizer = DistributedOptimizer(inner, model)
torch.manual_seed(rank())
try:
    for step, (x, y) in enumerate(DataLoader(data, 4, {sampler})):
        optimizer.zero_grad()
        loss = {loss}
        loss.backward()
        try:
            {step}
        except Exception:
            print("swallowed")
finally:
    print("finally")
"""
GOOD = {
    "kind": "AdamW",
    "parameters": "model.parameters()",
    "sampler": "sampler=sampler(data, 4)",
    "loss": "(model(x) - y).square().mean()",
    "step": "optimizer.step()",
}


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., tuple[int, list[str], str]]:
    """Exit code, lines of stdout and stderr of a check of SCRIPT with something else in it."""

    def run(*flags: str, **other: str) -> tuple[int, list[str], str]:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT.format(**GOOD | other))
        code, out, err = finished("ps-worker", "--check", *flags, str(path))
        return code, out.splitlines(), err

    return run


def told(lines: list[str], kind: str) -> list[str]:
    return [line.removeprefix(kind).strip() for line in lines if line.startswith(kind)]


def test_a_good_script_is_fine(
    check: Callable[..., tuple[int, list[str], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends after two steps of 16, its `finally` runs, and nothing else saw how it ended.

    Here ps-worker is an interpreter of its own, and its fork server installs the hooks.
    """
    monkeypatch.setattr("kit.processes.FORKED", {})
    flags = ("--sync", "ssp", "--compress", "topk:0.5+int8", "--link", "100mbit,20ms", "-n", "4")
    code, lines, err = check(*flags)
    assert code == 0, err
    assert told(lines, "fine") == ["2 workers made 2 steps each"] and not told(lines, "broken")
    assert told(lines, "parameters") == ["74 trainable in 6 tensors"] and told(lines, "optimizer") == ["AdamW of 74"]
    assert told(lines, "buffers") == ["3 of the module, 72 B: those of the lowest rank hold for all"]
    assert [line.count(" as ") for line in told(lines, "a push")] == [3]
    rows = [line.split("  ")[0] for line in lines if line.startswith("--sync")]
    assert rows[0] == "--sync ssp --compress topk:0.5+int8" and rows[1] == "--sync bsp" and len(rows) == 5
    assert lines.count("finally") == 2 and "swallowed" not in lines


@pytest.mark.parametrize(("kind", "kept"), [("AdamW", 2), ("RMSprop", 1), ("SGD", 0)])
def test_the_optimizers_state_counts_where_the_servers_step(
    kind: str, kept: int, check: Callable[..., tuple[int, list[str], str]]
) -> None:
    """The worker's own optimizer has none then."""
    code, lines, err = check("--sync", "bsp", kind=kind)
    (servers,) = told(lines, "servers")
    assert code == 0, err
    assert (f"optimizer's state {kept}," in servers) == (kept > 0) and ("optimizer's state" in servers) == (kept > 0)
    assert not any("optimizer's state" in line for line in told(lines, "memory"))


def test_a_broken_script_is_told_why(check: Callable[..., tuple[int, list[str], str]]) -> None:
    code, lines, err = check(sampler="", loss="model(x).sum() / (1 - step)")
    gradient, samples = told(lines, "broken")
    assert code == 2, (lines, err)
    assert gradient.startswith("local rank 0: the gradient of 0.weight is not finite in step 2")
    assert samples.startswith(
        "all workers read the same samples in step 1: give the DataLoader sampler=sampler(dataset, batch)"
    )


def test_a_whole_dataset_in_another_order_is_noticed(check: Callable[..., tuple[int, list[str], str]]) -> None:
    """Each worker has its own seed. An evaluation is no matter. A server that steps the script's optimizer is not watched: its
    shards are forked from the process that has imported torch, as the workers are."""
    code, lines, err = check("--sync", "bsp", sampler="shuffle=True")
    notices = told(lines, "notice")
    assert code == 0 and notices[0].startswith("each worker shuffles the whole dataset of 64 samples"), (lines, err)
    assert len(notices) == 2 and notices[1].startswith("the loop counts by itself")
    assert told(lines, "fine") == ["2 workers made 2 steps each"]
    assert "died" not in err and "started again" not in err


EPOCHS = """
import torch
from torch.utils.data import DataLoader
from narrows.worker import DistributedOptimizer, sampler

data = torch.randn(64, 4)
model = torch.nn.Linear(4, 2)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(inner, 1)
optimizer = DistributedOptimizer(inner, model)
share = sampler(data, 4)
for epoch in share.epochs(9, schedule):
    for x in DataLoader(data, 4, sampler=share):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    schedule.step()
"""


def test_a_loop_that_follows_the_run_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(EPOCHS)
    code, out, err = finished("ps-worker", "--check", str(path))
    assert code == 0 and not told(out.splitlines(), "notice"), (out, err)


@pytest.mark.parametrize(("words", "why"), [
    ("--check --server tcp://127.0.0.1:1", "leave out --server"),
    ("--check --group", "leave out --group"),
    ("--check --plan plan.json", "leave out --plan"),
    ("--check --link wide", "--link 'wide' is no link: give its rate and one way's delay, as in 100mbit,20ms"),
    ("--link 1mbit,1ms", "give --check too"),
])  # fmt: skip
def test_flags_that_make_no_sense(words: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        command.main([*words.split(), __file__], standalone_mode=False)


def test_hooks_pass_through_every_process_but_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is forked from a process that has the hooks is looked at where its environment says so."""
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    adam, here = torch.optim.Adam([p]), os.getpid()
    for looks in ("", "dense"):
        events = list[dict[str, Any]]()
        seen = script_watch.ScriptWatch([], lambda event, to=events, **values: to.append(values))
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: here + 1)
            forked.setenv("NARROWS_WATCH", looks)
            for _ in range(STEPS):
                adam.step()
            with pytest.raises(script_watch.CheckedScript) if looks else nullcontext():
                adam.step()
            assert "NARROWS_WATCH" not in os.environ, "its own children are not looked at"
        seen.close()
        assert [each["what"] for each in events] == ["beside"] * (STEPS + 1) * bool(looks)


def test_a_script_without_a_wrapped_optimizer_ends() -> None:
    """Hooks of torch see it step."""
    events = list[tuple[str, dict[str, Any]]]()
    seen = script_watch.ScriptWatch([], lambda event, **values: events.append((event, values)))
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    adam = torch.optim.Adam([p])
    for _ in range(STEPS):
        adam.step()
    with pytest.raises(script_watch.CheckedScript):
        adam.step()
    seen.close()
    adam.step()
    worker = CheckedEvents()
    for _, event in events:
        worker.take(event.pop("what"), event)
    assert found(FAULTS, [worker, worker]) == [
        "no DistributedOptimizer was made, so each worker trains alone and nothing is shared: write optimizer = "
        "DistributedOptimizer(Adam(...), model)"
    ]


def test_a_loss_that_is_not_finite_ends_the_check_though_its_gradients_are() -> None:
    events, model = list[dict[str, Any]](), torch.nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = script_watch.ScriptWatch([], lambda event, **values: events.append(values))
    seen.begins(inner, inner, model)
    (model(torch.ones(3, 4)).square().mean() + float("inf")).backward()
    with pytest.raises(script_watch.CheckedScript):
        inner.step()
    seen.close()
    assert events[-1] == {"what": "not finite", "number": 1, "gradient": "", "loss": float("inf")}


# The rules.


DONE: dict[str, Any] = {"without": [], "follows": ["end"], "scheduled": False}


def worker(**other: Any) -> CheckedEvents:
    model: dict[str, Any] = {"unowned": []}
    steps = [{"number": 1 + i, "inputs": ["a"], "random": "", "gradients": "g"} for i in range(STEPS)]
    return CheckedEvents(**{"model": model, "steps": steps, "done": DONE} | other)


def first(**other: Any) -> list[dict[str, Any]]:
    return [worker().steps[0] | other, *worker().steps[1:]]


OTHER = worker(steps=first(inputs=["b"], gradients="h"))
RULES: list[tuple[list[CheckedEvents], str]] = [
    ([worker(), worker()], "the same samples"),
    ([worker(steps=first(inputs=[])), worker(steps=first(inputs=[]))], "the same samples"),
    ([worker(), worker(steps=first(inputs=["b"]))], "the same gradients of other samples"),
    (
        [worker(), worker(steps=OTHER.steps[:1])],
        "local rank 1 called step() once, local rank 0 twice: leave no step to one rank",
    ),
    ([worker(steps=first()[:1]), worker(steps=OTHER.steps[:1])], "the script ended after 1 of the 2 steps"),
    ([worker(steps=[]), worker(steps=[])], "no worker called step()"),
    ([worker(steps=[]), OTHER], "local rank 0 called step() never, local rank 1 twice"),
    ([worker(steps=first(random="r")), worker(steps=first(inputs=["b"], gradients="h", random="r"))], "(dropout)"),
    ([worker(model={"unowned": ["a", "b", "c", "d"]}), OTHER], "no optimizer has a, b, c and 1 more"),
    ([worker(beside=[{"optimizer": "SGD", "wrapped": False}]), OTHER], "SGD steps outside of DistributedOptimizer"),
    (
        [worker(beside=[{"optimizer": "SGD", "wrapped": True}]), OTHER],
        "step() of the SGD that DistributedOptimizer wraps",
    ),
    (
        [worker(broken={"gradient": "", "loss": float("inf"), "number": 2}), OTHER],
        "local rank 0: the loss of step 2 is inf",
    ),
    (
        [
            worker(shuffled=[{"samples": 9, "first": "f"}]),
            worker(steps=OTHER.steps, shuffled=[{"samples": 9, "first": "f"}]),
        ],
        "each worker shuffles the whole dataset of 9 samples",
    ),
    ([worker(costs=[{"loss": float("nan")}]), OTHER], "local rank 0 recorded a loss of nan"),
    ([worker(done=DONE | {"without": ["head"]}), OTHER], "head had no gradient in 2 steps"),
    ([worker(done=DONE | {"follows": []}), OTHER], "the loop counts by itself, so after --resume"),
    ([worker(done=DONE | {"scheduled": True}), OTHER], "the scheduler begins anew after --resume"),
    ([worker(done=DONE | {"late": ["head.weight"]}), OTHER], "head.weight came into the model after"),
    ([worker(code=1), OTHER], "local rank 0 failed before step 2 was over"),
    ([worker(error="no such key"), OTHER], "no such key"),
]


def test_all_is_well() -> None:
    """Where each shuffles what is cut for it, too, and where nobody can say whether it is."""
    assert not found(FAULTS + NOTICES, [worker(), OTHER]) and STEPS == script_watch.STEPS
    for follows in (["schedule", "step"], ["end", "schedule"], ["step"]):
        assert not found(NOTICES, [worker(done=DONE | {"follows": follows, "scheduled": True}), OTHER])
    for firsts in (("e", "f"), ("", "")):
        cut = [
            worker(steps=each.steps, shuffled=[{"samples": 9, "first": one}])
            for each, one in zip((worker(), OTHER), firsts, strict=True)
        ]
        assert not found(FAULTS + NOTICES, cut)


@pytest.mark.parametrize(("workers", "part"), RULES)
def test_each_rule(workers: list[CheckedEvents], part: str) -> None:
    """And none says what another one does."""
    (sentence,) = found(FAULTS + NOTICES, workers)
    assert part in sentence


def test_the_specs_that_are_encoded() -> None:
    assert findings.specs([{"sync": "ssp", "compress": "auto"}, {"sync": "ssp", "compress": "int8"}]) == [
        "dense",
        "int8",
    ]


def test_flags_of_which_no_time_is_known_are_named() -> None:
    """Those that choose while the run goes on. The table of other ways is there all the same."""
    cost = {"encode_seconds": 0.01, "wait_seconds": 0.01, "step_seconds": 0.1}
    done = {
        "lost_seconds": 0.0,
        "encoded": {spec: [1000.0, 0.001] for spec in findings.specs([{}, *findings.SUGGESTED])},
    }
    model = {"tables": [0, 0]}
    told = [CheckedEvents(model=model, done=done, costs=[cost] * STEPS) for _ in range(2)]
    link = Link.parse("100mbit,20ms")
    head, *rows, last = findings.times(told, link, "100mbit,20ms", {"sync": "ssp", "compress": "auto"})
    assert head.startswith("a step on 100mbit,20ms") and len(rows) == len(findings.SUGGESTED)
    assert last == "--compress auto: the run chooses while it goes on, so no time is known for the flags that you gave"
    assert not any("auto" in line for line in findings.times(told, link, "100mbit,20ms", {"sync": "bsp"}))


def test_rows_of_a_table_are_no_parameters_that_lack_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding, "of_run", lambda: True)
    model, events = Bags(), list[dict[str, Any]]()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = script_watch.ScriptWatch([], lambda event, **values: events.append(values))
    seen.begins(inner, inner, model)
    seen.forward.close()
    seen.close()
    assert seen.absent == {"head.weight", "head.bias"} and events[0]["unowned"] == []
    told = CheckedEvents(model=events[0])
    assert "tables       1 on the servers, 61 rows in all" in findings.facts([told, told], {})
