"""The gradient of SoftTargets.loss that is written down is the one that autograd finds for the same loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrows.worker.teacher import SoftTargets

CLASSES = 50


def reference(logits: Tensor, soft: SoftTargets, mask: Tensor | None) -> Tensor:
    """The divergence over the top K and, as one more class, all others: in the plainest operations."""
    student, p = (logits.double() / soft.temperature).softmax(-1), soft.log_probs.double().exp()
    q = student.gather(-1, soft.ids)
    found = (p * (p / q).log()).sum(-1)
    if soft.ids.shape[-1] < soft.classes:
        rest, others = 1 - p.sum(-1), 1 - q.sum(-1)
        found = found + rest * (rest / others).log()
    found = found * soft.temperature**2
    return found.mean() if mask is None else found[mask].mean()


def targets(top: int, temperature: float) -> SoftTargets:
    log_probs, ids = (3 * torch.randn(4, 7, CLASSES) / temperature).log_softmax(-1).topk(top, -1)
    ids, order = ids.sort(-1)
    return SoftTargets(ids, log_probs.gather(-1, order), CLASSES, temperature)


@pytest.mark.parametrize("top", [1, 8, CLASSES])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradient_are_those_of_the_reference(top: int, temperature: float, masked: bool) -> None:
    torch.manual_seed(top)
    soft, logits = targets(top, temperature), 2 * torch.randn(4, 7, CLASSES)
    mask = torch.rand(4, 7) > 0.5 if masked else None
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, want = soft.loss(ours, mask), reference(theirs, soft, mask)
    (3 * loss).backward()
    (3 * want).backward()
    assert loss.item() == pytest.approx(want.item(), rel=1e-4)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)
    with torch.no_grad():
        assert soft.loss(logits, mask).item() == pytest.approx(loss.item())


def test_logits_of_bfloat16_have_a_gradient_of_bfloat16() -> None:
    torch.manual_seed(0)
    soft, logits = targets(8, 1.0), torch.randn(4, 7, CLASSES).bfloat16().requires_grad_()
    soft.loss(logits).backward()
    same = logits.detach().float().requires_grad_()
    soft.loss(same).backward()
    assert logits.grad is not None and same.grad is not None and logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(logits.grad.float(), same.grad, rtol=2e-2, atol=1e-6)


def test_a_student_that_gives_other_classes_nothing_has_a_finite_loss_and_gradient() -> None:
    logits = torch.zeros(1, CLASSES)
    logits[0, 3] = 300
    logits.requires_grad_()
    loss = SoftTargets(torch.tensor([[3]]), torch.tensor([[-0.5]]), CLASSES).loss(logits)
    loss.backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all() and torch.isfinite(loss)
    assert logits.grad[0, 3].item() == pytest.approx(1 - torch.tensor(-0.5).exp().item())
