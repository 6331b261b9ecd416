"""A teacher and its students in one process, over loopback: soft targets equal the model's, and cross the link once."""

from __future__ import annotations

import gc
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.processes import until
from kit.teaching import CLASSES, INPUTS, asking, inputs, linear, taught, top

from narrows.protocols.distillation import limits
from narrows.protocols.errors import IncompatibleError, ServerLostError, UsageError
from narrows.worker.distillation import student, student_runner
from narrows.worker.distillation.batches import opened, samples_of, tensors
from narrows.worker.distillation.soft_targets import SoftTargets

LIMIT_S = 30.0


def check(soft: SoftTargets | None, logits: torch.Tensor, most: int = 4, temperature: float = 1.0) -> None:
    """The answer is the top K of these logits, within half precision."""
    assert soft is not None
    values, ids = top(logits, most, temperature)
    assert (soft.ids.numpy() == ids).all()
    assert np.abs(soft.log_probs.numpy() - values).max() < 0.01
    assert soft.classes == logits.shape[-1] and soft.temperature == temperature


def test_answers_are_those_of_the_model_and_are_kept() -> None:
    net, x = linear(), inputs()
    with taught(net) as teaching, asking(teaching.address) as teachers:
        asked = teachers.ask(x)
        check(asked.take(LIMIT_S), net(x))
        assert asked.take() is asked.take() and asked.ready
        up = teachers.meter.totals.bytes_up
        again = teachers.ask(x.flip(0))
        assert again.ready
        check(again.take(), net(x.flip(0)))
        check(teachers.ask(x, ids=[*range(5)]).take(LIMIT_S), net(x))
        check(teachers.ask(x, ids=torch.arange(5)).take(), net(x))
        assert teaching.answering.samples == 5 and teaching.answering.cache.hits == 5, (
            "asked by id once, known by digest"
        )
        assert teachers.meter.totals.bytes_up - up < 4 * 5 * INPUTS * 4, "what is here is not sent for"
        assert teachers.cache.hits == 10


def test_a_sample_twice_in_a_batch_is_sent_once() -> None:
    net, x = linear(), inputs(3)
    with taught(net) as teaching, asking(teaching.address) as teachers:
        check(teachers.ask(x[[0, 1, 0, 2, 2, 0]]).take(LIMIT_S), net(x[[0, 1, 0, 2, 2, 0]]))
        assert teaching.answering.samples == 3


def test_a_token_sample_is_known_in_whatever_batch() -> None:
    """Numbers travel in one byte or two, as those of their batch need: the digest is of the sample alone."""
    table = torch.nn.Embedding(1000, 7)
    small, large = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[900, 2], [1, 2]])
    with taught(table) as teaching, asking(teaching.address) as teachers:
        check(teachers.ask(small).take(LIMIT_S), table(small))
        check(teachers.ask(large).take(LIMIT_S), table(large))
        assert teaching.answering.samples == 3 and teachers.cache.hits == 1
        assert samples_of(small).sample_bytes == 2 and samples_of(large).sample_bytes == 4


def test_a_dataset_by_index() -> None:
    net, x = linear(), inputs(8)
    data = [(row, index) for index, row in enumerate(x)]
    with taught(net, dataset=data, inputs=lambda batch: batch[0]) as teaching, asking(teaching.address) as teachers:
        check(teachers.ask(ids=[7, 0, 3]).take(LIMIT_S), net(x[[7, 0, 3]]))
        assert teachers.meter.totals.bytes_up < 1000
        for wrong in (8, -1):
            with pytest.raises(IncompatibleError, match="has 8 samples"):
                teachers.ask(ids=[0, wrong]).take(LIMIT_S)
    with (
        taught(net) as teaching,
        asking(teaching.address) as teachers,
        pytest.raises(IncompatibleError, match="no dataset"),
    ):
        teachers.ask(ids=[0]).take(LIMIT_S)


def test_a_dataset_that_raises_ends_no_teacher() -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 1:
                raise OSError("the disk is gone")
            return inputs(4)[index]

    net = linear()
    with taught(net, dataset=Broken()) as teaching, asking(teaching.address) as teachers:
        with pytest.raises(IncompatibleError, match="the disk is gone"):
            teachers.ask(ids=[1]).take(LIMIT_S)
        check(teachers.ask(ids=[2]).take(LIMIT_S), net(inputs(4)[2:3]))


DTYPES = {
    "bool": torch.tensor([[True, False]] * 2),
    "uint8": torch.tensor([[0, 255]] * 2, dtype=torch.uint8),
    "int8": torch.tensor([[-128, 127]] * 2, dtype=torch.int8),
    "int16": torch.tensor([[-5, 300]] * 2, dtype=torch.int16),
    "int32": torch.tensor([[0, 70_000]] * 2, dtype=torch.int32),
    "int64": torch.tensor([[-1, 1 << 40], [0, 3]]),
    "small int64": torch.tensor([[0, 65_535], [0, 3]]),
    "float16": torch.tensor([[0.5, -2.0]] * 2, dtype=torch.float16),
    "bfloat16": torch.tensor([[0.5, -3.0]] * 2, dtype=torch.bfloat16),
    "float32": torch.tensor([[0.1, float("nan")]] * 2),
    "float64": torch.tensor([[0.1, 1e300]] * 2, dtype=torch.float64),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_are_restored(name: str) -> None:
    given = {"a": DTYPES[name], "b": torch.tensor([1, 2])}
    there = samples_of(given)
    back = opened(there.packed_fields, there.payload(np.arange(2)), 2)
    assert back.digests() == there.digests()
    for key, tensor in tensors(back, np.array([1, 0]), torch.device("cpu")).items():
        assert tensor.dtype == given[key].dtype
        assert torch.equal(tensor.nan_to_num(), given[key][[1, 0]].nan_to_num())


def test_tensors_by_name_and_tokens() -> None:
    table = torch.nn.Embedding(50, 6)
    head = linear(12, 3)

    def model(input_ids: torch.Tensor, scale: torch.Tensor) -> Any:
        return SimpleNamespace(logits=head(table(input_ids) * scale[:, None, None]))

    batch = {"input_ids": torch.arange(12).reshape(3, 4), "scale": torch.tensor([1.0, 2.0, 3.0])}
    with taught(model) as teaching, asking(teaching.address, coding="top:5+fp16") as teachers:
        soft = teachers.ask(batch).take(LIMIT_S)
        check(soft, model(**batch).logits, 5)
        assert soft is not None and soft.ids.shape == (3, 4, 5)


def test_a_large_batch_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student, "REQUEST_BYTES_MAX", 10 * INPUTS * 4)
    net, x, sizes = linear(), inputs(205), list[int]()

    def model(batch: torch.Tensor) -> Any:
        sizes.append(len(batch))
        return net(batch)

    with taught(model) as teaching, asking(teaching.address) as teachers:
        check(teachers.ask(x).take(LIMIT_S), net(x))
    monkeypatch.undo()
    assert sum(sizes) == 205 and max(sizes) <= 64
    sizes.clear()
    with taught(model) as teaching, asking(teaching.address) as teachers:
        check(teachers.ask(x).take(LIMIT_S), net(x))
    assert sum(sizes) == 205 and max(sizes) <= 64, "one request, several calls of the model"


def test_ahead_asks_before_the_use(monkeypatch: pytest.MonkeyPatch) -> None:
    net, seen = linear(), list[int]()
    batches = [(inputs(2, seed), torch.zeros(2)) for seed in range(9)]

    def read() -> Any:
        for at, batch in enumerate(batches):
            seen.append(at)
            yield batch

    with taught(net) as teaching, asking(teaching.address) as teachers:
        monkeypatch.setattr(student, "_teachers", teachers)
        for at, (batch, soft) in enumerate(student.ahead(read(), depth=3)):
            check(soft, net(batch[0]))
            assert seen[-1] == min(at + 3, 8)
        for _ in student.ahead(read()):
            break
        with pytest.raises(UsageError, match="depth"):
            student.ahead(read(), depth=0)
    monkeypatch.setattr(student, "_teachers", None)
    monkeypatch.setattr(student, "_told_alone", True)
    assert [soft for _, soft in student.ahead(read())] == [None] * 9, "without --teacher"


def test_what_ask_refuses() -> None:
    with taught(linear()) as teaching, asking(teaching.address) as teachers:
        for given, ids in (
            (None, None),
            (None, []),
            (inputs(), [1]),
            (torch.zeros(0, 3), None),
            (torch.zeros(2, 0), None),
            (torch.tensor(1.0), None),
            ({}, None),
            ({"a b": torch.zeros(2)}, None),
            ({"a": torch.zeros(2), "b": torch.zeros(3)}, None),
            (torch.zeros(2, dtype=torch.complex64), None),
            ([1, 2], None),
        ):
            with pytest.raises((UsageError, TypeError)):
                teachers.ask(given, ids)  # type: ignore[arg-type]
    for wrong in (0.0, float("nan"), 1e3):
        with pytest.raises(UsageError, match="temperature"):
            next(iter([student.Teachers({}, "top:4+int8", wrong)]))


# The loss.


def reference(logits: Any, ids: Any, log_probs: Any, temperature: float, mask: Any = None) -> tuple[float, Any]:
    """The loss and its gradient by float64, position by position."""
    rows = logits.reshape(-1, logits.shape[-1]) / temperature
    losses, grads = [], []
    for row, own, given in zip(rows, ids.reshape(len(rows), -1), log_probs.reshape(len(rows), -1), strict=True):
        q = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        p = np.exp(given)
        loss = sum(a * (np.log(a) - np.log(q[at])) for a, at in zip(p, own, strict=True) if a > 0)
        target, left = np.zeros_like(q), max(0.0, 1 - p.sum())
        target[own] = p
        others = np.setdiff1d(np.arange(len(q)), own)
        if len(others) and left > 0:
            rest = q[others].sum()
            loss += left * (np.log(left) - np.log(rest))
            target[others] = left * q[others] / rest
        losses.append(loss * temperature**2)
        grads.append((target.sum() * q - target) * temperature)
    counted = np.ones(len(rows)) if mask is None else mask.reshape(-1).astype(float)
    count = max(1.0, counted.sum())
    grad = (np.array(grads) * counted[:, None] / count).reshape(logits.shape)
    return float((np.array(losses) * counted).sum() / count), grad


@pytest.mark.parametrize("most", [1, 4, 9, 10])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_divergence(most: int, temperature: float, masked: bool) -> None:
    torch.manual_seed(most)
    theirs, ours = torch.randn(3, 4, 10) * 3, torch.randn(3, 4, 10, requires_grad=True)
    values, ids = top(theirs, most, temperature)
    soft = SoftTargets(torch.from_numpy(ids), torch.from_numpy(values).float(), 10, temperature)
    mask = torch.rand(3, 4) > 0.4 if masked else None
    loss = soft.loss(ours, mask)
    loss.backward()
    wanted, grad = reference(
        ours.detach().double().numpy(), ids, values, temperature, None if mask is None else mask.numpy()
    )
    assert loss.item() == pytest.approx(wanted, rel=1e-4)
    assert ours.grad is not None and np.abs(ours.grad.numpy() - grad).max() < 1e-5
    own_log_probs, own_ids = map(torch.from_numpy, top(ours, most, temperature))
    own = SoftTargets(own_ids, own_log_probs, 10, temperature)
    assert abs(own.loss(ours).item()) < 1e-5, "0 for equal models"
    if most == 10 and not masked:
        full = torch.nn.functional.kl_div(
            (ours / temperature).log_softmax(-1),
            (theirs / temperature).log_softmax(-1),
            reduction="none",
            log_target=True,
        )
        assert loss.item() == pytest.approx(full.sum(-1).mean().item() * temperature**2, rel=1e-4)


def test_the_loss_where_classes_cannot_be() -> None:
    """Both rule a class out; nothing is masked in; other shapes are refused."""
    ours = torch.tensor([[0.0, 1.0, float("-inf")]], requires_grad=True)
    soft = SoftTargets(torch.tensor([[0, 1, 2]]), torch.tensor([[-0.7, -0.69, -1e4]]), 3)
    loss = soft.loss(ours)
    loss.backward()
    assert loss.isfinite() and ours.grad is not None and ours.grad.isfinite().all()
    assert soft.loss(ours, torch.tensor([False])).item() == 0
    broken = torch.full((2, 3), float("nan"))
    broken[0] = 0
    two = SoftTargets(soft.ids.repeat(2, 1), soft.log_probs.repeat(2, 1), 3)
    assert two.loss(broken, torch.tensor([1, 0])).isfinite(), "what is masked out does not count, NaN or not"
    with pytest.raises(UsageError, match="mask"):
        soft.loss(ours, torch.ones(1, 3))
    for shape in ((1, 4), (2, 3), (1, 1, 3)):
        with pytest.raises(IncompatibleError, match="same classes"):
            soft.loss(torch.zeros(shape))


# What goes wrong.


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    "error", [RuntimeError("out of\nmemory"), AssertionError("no"), Odd("x"), ZeroDivisionError(), MemoryError()]
)
def test_a_model_that_raises_answers_the_next(error: Exception) -> None:
    net = linear()

    def model(batch: torch.Tensor) -> Any:
        if batch.sum() == 0:
            raise error
        return net(batch)

    x = inputs()
    with taught(model) as teaching, asking(teaching.address) as teachers:
        asked = teachers.ask(torch.zeros(2, INPUTS))
        for _ in range(2):
            with pytest.raises(IncompatibleError, match=type(error).__name__) as caught:
                asked.take(LIMIT_S)
            assert str(caught.value).isprintable()
        check(teachers.ask(x).take(LIMIT_S), net(x))
        assert not teachers.runner._came
        assert any("has no answer" in text for text in teaching.said)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda x: x.sum(), "no logits"),
        (lambda x: x[:1], "no logits"),
        (lambda x: x[:, 0], "no logits"),
        (lambda x: "text", "no logits"),
        (lambda x: x * float("nan"), "NaN"),
        (lambda x: x.reshape(-1, *[1] * 9, INPUTS), "dimensions"),
    ],
)
def test_a_model_of_the_wrong_kind(model: Any, says: str) -> None:
    with taught(model) as teaching, asking(teaching.address) as teachers, pytest.raises(IncompatibleError, match=says):
        teachers.ask(inputs()).take(LIMIT_S)


def test_shapes_that_differ() -> None:
    with (
        taught(lambda x: x.reshape(len(x), -1, 2)) as teaching,
        asking(teaching.address, coding="top:2+fp16") as teachers,
    ):
        teachers.ask(torch.zeros(1, 4), ids=[0]).take(LIMIT_S)
        teachers.ask(torch.zeros(1, 8), ids=[1]).take(LIMIT_S)
        with pytest.raises(IncompatibleError, match="different shapes"):
            teachers.ask(torch.zeros(2, 4), ids=[0, 1]).take(LIMIT_S)


def test_two_teachers_of_different_classes() -> None:
    with taught(linear()) as one, taught(linear(CLASSES + 1)) as other, asking(one.address, other.address) as teachers:
        until(lambda: all(link.there for link in teachers.runner._student.links.values()), "both teachers")

        def asks() -> None:
            for seed in range(50):
                asked = [teachers.ask(inputs(1, 100 * seed + each)) for each in range(8)]
                for each in asked:
                    each.take(LIMIT_S)

        with pytest.raises(IncompatibleError, match="one teacher has 1"):
            asks()


def test_two_students_at_different_temperatures() -> None:
    net, x = linear(), inputs()
    with taught(net) as teaching, asking(teaching.address) as one, asking(teaching.address, temperature=3.0) as other:
        asked = one.ask(x), other.ask(x)
        check(asked[0].take(LIMIT_S), net(x))
        check(asked[1].take(LIMIT_S), net(x), temperature=3.0)
        assert teaching.runner.students == 2


def test_two_teachers_of_whom_one_is_closed() -> None:
    net, said = linear(), list[str]()
    with taught(net) as one, asking(one.address, said=said) as teachers:
        x = inputs()
        check(teachers.ask(x).take(LIMIT_S), net(x))
        one.close()
        until(lambda: any("has ended" in text for text in said), "the end of the teacher")
        asked = teachers.ask(inputs(4, 9))
        assert asked.take(0.05) is None and not asked.ready, "it can be taken later"
        with taught(net, port=one.port):
            check(asked.take(LIMIT_S), net(inputs(4, 9)))
        assert any("is there" in text for text in said)
    said.clear()
    with (
        taught(net) as one,
        taught(net) as other,
        asking(one.address, other.address, said=said, waits=False) as teachers,
    ):
        until(lambda: all(link.there for link in teachers.runner._student.links.values()), "both teachers")
        for seed in range(30):
            x = inputs(3, 50 + seed)
            check(teachers.ask(x).take(LIMIT_S), net(x))
            if seed == 10:
                other.close()
        other.close()
        one.close()
        until(lambda: sum("has ended" in text for text in said) == 2, "the end of both")
        assert teachers.ask(inputs(2, 999)).take(LIMIT_S) is None and teachers.meter.totals.missed == 1


def test_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student, "WAIT_LIMIT_S", 0.3)
    with taught(linear(), turns=False) as teaching, asking(teaching.address) as teachers:
        asked = teachers.ask(inputs())
        assert asked.take(0.01) is None
        with pytest.raises(ServerLostError, match="no teacher answered"):
            asked.take(0.3)


def test_answers_that_nobody_takes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_runner, "UNTAKEN_BYTES_MAX", 2000)
    with taught(linear()) as teaching, asking(teaching.address) as teachers:
        runner = teachers.runner
        for seed in range(20):
            teachers.ask(inputs(2, seed))
        gc.collect()
        until(lambda: not runner._open, "the answers")
        assert not runner._came and not runner._unwanted and not runner._came_bytes and not runner._open_bytes
        held = list[Any]()

        def holds() -> None:
            for seed in range(200):
                held.append(teachers.ask(inputs(2, 1000 + seed)))
                until(lambda: held[-1].ready, "an answer")

        with pytest.raises(UsageError, match="has not taken"):
            holds()
        held[0].take()
        held.clear()
        gc.collect()
        assert teachers.ask(inputs()).take(LIMIT_S) is not None


def test_ask_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(student_runner, "AHEAD_MAX", 3)
    with taught(linear(), turns=False) as teaching, asking(teaching.address) as teachers:
        held = [teachers.ask(inputs(1, seed)) for seed in range(3)]
        done = threading.Event()

        def more() -> None:
            held.append(teachers.ask(inputs(1, 9)))
            done.set()

        thread = threading.Thread(target=more)
        thread.start()
        assert not done.wait(0.2)
        teaching.thread.start()
        thread.join(LIMIT_S)
        assert done.is_set() and all(each.take(LIMIT_S) for each in held)
    assert limits.AHEAD_MAX == 256


def test_after_close_and_in_a_fork() -> None:
    x = inputs()
    with taught(linear()) as teaching, asking(teaching.address) as teachers:
        here = teachers.ask(x)
        assert here.take(LIMIT_S) is not None
        later = teachers.ask(inputs(2, 5))
        pid = os.fork()
        if not pid:  # a child process, such as one of a DataLoader
            code = 1
            try:
                teachers.ask(inputs(3, 6))
            except UsageError:
                del later
                gc.collect()
                teachers.close()
                code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + LIMIT_S
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ended[1] == 0
        assert later.take(LIMIT_S) is not None, "the child has ended nothing here"
        missing = teachers.ask(inputs(2, 7))
        missing.take(LIMIT_S)
        began = time.monotonic()
        teachers.close()
        teachers.close()
        with pytest.raises(UsageError, match="closed"):
            teachers.ask(inputs(2, 8))
        assert here.take() is not None and time.monotonic() - began < 10
