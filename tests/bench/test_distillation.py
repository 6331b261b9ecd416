"""bench/loss/distillation.py and the student of bench/tasks/bytelm.py: flags, soft losses, what is read from logs, lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from kit.tasks import load
from lab import netns, record
from lab.launch import CommandFailed
from loss import distillation
from loss.distillation import CACHED, LINK, NONE, OWN, TOKENS, Plan, bytes_a_token, main, ratios, told

SAID = """median step 0.0512 s over 60 steps
teacher {"missed": 3, "waited_s": 0.6, "longest_s": 5.5, "bytes_up": 4096, "bytes_down": 409600, "hits": 0}
validation loss 2.0517 nats a byte
"""


@pytest.fixture(scope="module")
def bytelm() -> Any:
    return load("bytelm")


def test_the_words_of_a_plan_are_flags_of_the_task(bytelm: Any) -> None:
    args = bytelm.arguments(Plan(3, 0.008, 0.9, 2.0, 50, 0.01).words)
    assert (args.layers, args.width, args.heads, args.seed, args.steps) == (3, 96, 3, 3, 50)
    assert (args.lr, args.teacher_weight, args.temperature, args.pause) == (0.008, 0.9, 2.0, 0.01)
    model = bytelm.ByteGPT(args.layers, args.width, args.heads, args.context)
    assert sum(p.numel() for p in model.parameters()) == 388_416
    assert args.batch * args.context == TOKENS


def test_a_plan_without_a_teacher_has_no_temperature() -> None:
    assert Plan().arguments()["temperature"] is None and Plan(weight=0.5).arguments()["temperature"] == 1
    assert "seed" not in Plan().arguments()


def test_what_a_student_prints_is_read() -> None:
    assert told(SAID) == {"loss": 2.0517, "step": 51.2, "missed": 3, "waited_s": 0.6, "longest_s": 5.5, "bytes_up": 4096,
                          "bytes_down": 409600, "hits": 0}  # fmt: skip
    assert told("rank 1: median step 0.1000 s over 4 steps\nrank 1: validation loss 3.0 nats a byte") == {
        "loss": 3.0,
        "step": 100,
    }
    with pytest.raises(CommandFailed, match="told no loss:\nError: boom"):
        told("Error: boom")


def test_bytes_are_divided_by_tokens() -> None:
    facts = {"bytes_up": 2.0 * TOKENS, "bytes_down": 110.0 * TOKENS}
    assert bytes_a_token(facts, 120 * TOKENS, 2) == {
        "in messages, up": (1, "bytes a token"),
        "in messages, down": (55, "bytes a token"),
        "on the wire": (60, "bytes a token"),
    }
    assert "on the wire" not in bytes_a_token(facts, 0, 2)  # the teacher is on the student's machine


def test_a_ratio_is_the_median_of_its_rounds_and_a_missed_target_is_said() -> None:
    steps = {NONE: [50.0, 100.0, 50.0], LINK: [52.0, 110.0, 51.0], OWN: [53.0, 106.0, 90.0]}
    assert ratios(steps) == [
        f"{LINK}: 1.0400 (rounds: 1.040, 1.100, 1.020): held",
        f"{OWN}: 1.0600 (rounds: 1.060, 1.060, 1.800): missed, over 1.05",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--contenders", "nobody"], "--contenders nobody: there is none"),
        (["--rates", "0.1;0.2"], "give numbers with commas between them"),
        (["--only", "killed", "--teacher", "/none"], "/none: there is no teacher yet; --only teacher trains one"),
    ],
)
def test_wrong_flags_are_named(words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "available", lambda: "")
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code != 0 and text in done.output


class FakePlace:
    """A lab in which each student ends at once with a loss that its plan gives, and its step."""

    here, there = "here", "there"

    def __init__(self, *ignored: object) -> None:
        self.bytes, self.ran = 0, list[tuple[Plan, Any]]()

    def teacher(self, host: str) -> Any:
        return type("Teacher", (), {"host": host, "process": type("P", (), {"pid": 1}), "end": lambda self: (9, 4)})()

    def crossed(self) -> int:
        return self.bytes

    def run(self, plan: Plan, teacher: Any, *more: str, number: int = 0, workers: int = 1) -> list[Any]:
        self.ran.append((plan, teacher))
        asked = plan.steps * TOKENS * (teacher is not None)
        self.bytes += 60 * asked * (teacher is not None and teacher.host == "there")
        facts = {"loss": 2 + abs(plan.rate - 0.008) - plan.weight / 10, "step": 50.0 + (teacher is not None)}
        facts |= {"missed": 0, "waited_s": 0.0, "longest_s": 0.1, "bytes_up": asked, "bytes_down": 55 * asked}
        return [type("Student", (), {"end": lambda self: facts})()] * workers


def test_each_contender_has_its_best_rate_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns, "available", lambda: "")
    monkeypatch.setattr(distillation, "Place", FakePlace)
    (tmp_path / "teacher").touch()
    words = ["--only", "losses", "--rates", "0.004,0.008", "--weights", "0.5", "--seeds", "0,1"]
    done = CliRunner().invoke(main, [*words, "--teacher", str(tmp_path / "teacher"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    lines = record.read(tmp_path / "out")
    assert len(lines) == 4 * 2 * 2 and {line.table for line in lines} == {"loss"}
    assert {line.run for line in lines if "on the wire" in line.figures} == {LINK}
    assert {line.run for line in lines if line.link} == {LINK}
    table = record.markdown(lines)
    assert table.count("| 0.008 |") + ("rate 0.008" in table) >= 1 and "0.004" not in table
    assert f"over {NONE}" in table and "-2.5 %" in table


def test_a_round_of_seconds_has_new_samples_but_for_the_cached_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = FakePlace()
    monkeypatch.setattr(netns, "available", lambda: "")
    monkeypatch.setattr(distillation, "Place", lambda *ignored: place)
    monkeypatch.setattr(distillation, "cpu_s", lambda pid: 0.0)
    monkeypatch.setattr(distillation, "ROUNDS", 2)
    (tmp_path / "teacher").touch()
    words = ["--only", "seconds", "--teacher", str(tmp_path / "teacher"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert [line.run for line in record.read(tmp_path / "out")] == [NONE, LINK, CACHED, OWN] * 2
    assert f"{LINK}: 1.0200 (rounds: 1.020, 1.020): held" in done.output
    assert len({plan.seed for plan, _ in place.ran}) == 2
    assert [plan.weight for plan, _ in place.ran] == [0, 0.5, 0.5, 0.5] * 2


def test_a_saved_model_teaches(bytelm: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"layers": 1, "width": 32, "heads": 2, "context": 16}
    model, x = bytelm.ByteGPT(**shape), torch.arange(32).reshape(2, 16)
    torch.save({"shape": shape, "model": model.state_dict()}, tmp_path / "t.pt")
    args = bytelm.arguments(["--teacher-weight", "0.5", "--temperature", "2", "--teacher-file", str(tmp_path / "t.pt")])
    soft = bytelm.Taught(torch.zeros(100), args).take(0, torch.cat([x, x[:, :1]], 1))
    want = torch.log_softmax(model(x) / 2, -1)
    torch.testing.assert_close(soft.log_probs, want)
    assert soft.loss(model(x)).item() == pytest.approx(0, abs=1e-5)


def test_the_taught_loss_is_the_weighted_sum_of_both(bytelm: Any) -> None:
    """Against plain NumPy: cross-entropy and Kullback-Leibler divergence, summed over tokens."""
    torch.manual_seed(1)
    shape = {"layers": 1, "width": 32, "heads": 2, "context": 8}
    student, model = bytelm.ByteGPT(**shape), bytelm.ByteGPT(**shape)
    rows = torch.randint(0, 256, (3, 9))

    def log_probs(of: Any) -> Any:
        logits = of(rows[:, :-1]).detach().double().numpy()
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    p, q = log_probs(model), log_probs(student)
    hard = -np.take_along_axis(q, rows[:, 1:, None].numpy(), -1).sum()
    divergence = (np.exp(p) * (p - q)).sum()
    soft = load("bytelm").teacher.SoftTargets(torch.arange(256).expand(p.shape), torch.from_numpy(p).float(), 256)
    loss = bytelm.taught_loss_sum(student, rows, soft, 0.3).item()
    assert loss == pytest.approx(0.7 * hard + 0.3 * divergence, rel=1e-5)
    assert bytelm.loss_sum(student, rows).item() == pytest.approx(hard, rel=1e-5)


def test_soft_targets_are_asked_for_ahead_and_each_batch_once(bytelm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[torch.Tensor]()

    class Answer:
        def __init__(self, inputs: torch.Tensor) -> None:
            asked.append(inputs)
            self.inputs = inputs

        def take(self) -> Any:
            return None if len(asked) == 6 else self.inputs

    monkeypatch.setattr(bytelm.teacher, "connect", lambda temperature: None)
    monkeypatch.setattr(bytelm.teacher, "ask", Answer)
    text = torch.arange(200, dtype=torch.uint8)
    args = bytelm.arguments(["--teacher-weight", "0.5", "--steps", "8", "--batch", "2", "--context", "16"])
    taught = bytelm.Taught(text, args)
    for step in range(8):
        rows = bytelm.batch_rows(text, 0, step, 2, 16)
        soft = taught.take(step, rows)
        assert soft is None or torch.equal(soft, rows[:, :-1])
        assert len(asked) == min(8, step + bytelm.AHEAD + 1)
    assert taught.missed == 1 and not taught.asked


def test_rows_that_the_run_hands_out_are_not_known_ahead(bytelm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bytelm.arguments(["--teacher-weight", "0.5", "--ranges"])
    assert "leave one out" in capsys.readouterr().err


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_the_iteration_of_muon_in_float32_is_that_of_torch(bytelm: Any, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gradient, coefficients = torch.randn(shape), (3.4445, -4.7750, 2.0315)
    from torch.optim import _muon

    want = _muon._zeropower_via_newtonschulz(gradient, coefficients, 5, 1e-7).float()
    torch.testing.assert_close(bytelm.orthogonal(gradient, coefficients, 5, 1e-7), want, rtol=0.05, atol=0.03)
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    found = torch.linalg.svdvals(u.T @ bytelm.orthogonal(gradient, coefficients, 5, 1e-7) @ v.T)
    assert found.min() > 0.6 and found.max() < 1.3  # near the orthogonal matrix of its singular vectors


def test_plans_of_rounds_differ_in_the_seed_alone() -> None:
    assert replace(Plan(weight=0.5), seed=101).words.count("101") == 1
