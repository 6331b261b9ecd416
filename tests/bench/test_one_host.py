"""bench/speed/one_host.py: contenders train on the same samples, and a run fails where they do not end alike."""

import math

import click
import numpy as np
import pytest
import torch
from speed import one_host

TOLD = np.array([[4.0, 2.0, 1.0], [4.0, 3.0, 2.0]])  # of two workers


def test_a_contender_that_tells_the_same_has_no_difference_and_the_greatest_is_returned() -> None:
    near = TOLD.copy()
    near[1, 1] *= 1 + 5e-6
    found = one_host.differences({"journal": TOLD, "ddp": TOLD.copy(), "gloo": near}, None)
    assert found["ddp"] == 0 and found["gloo"] == pytest.approx(5e-6, rel=1e-6)


@pytest.mark.parametrize("wrong", [2.0 * (1 + 2e-5), math.nan, math.inf])
def test_a_value_that_differs_fails_the_run_unless_it_comes_after_those_that_are_compared(wrong: float) -> None:
    other = TOLD.copy()
    other[1, 2] = wrong
    with pytest.raises(click.ClickException, match="number 2 of what worker 1 tells: ddp has"):
        one_host.differences({"journal": TOLD, "ddp": other}, None)
    if math.isfinite(wrong):
        assert one_host.differences({"journal": TOLD, "ddp": other}, 2)["ddp"] > one_host.EQUAL


def test_the_loss_of_a_step_is_the_mean_over_the_ranks_rows_of_one_batch() -> None:
    model, whole = one_host.byte_gpt("1.3M", 0, 1)
    again, _ = one_host.byte_gpt("1.3M", 1, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with torch.no_grad():
        parts = [one_host.byte_gpt("1.3M", rank, 2)[1](model, 3).item() for rank in range(2)]
        assert parts[0] != parts[1]
        assert sum(parts) / 2 == pytest.approx(whole(model, 3).item(), rel=1e-6)


@pytest.mark.usefixtures("forked_commands")
def test_the_byte_gpt_has_the_same_losses_through_a_server_and_in_ddp() -> None:
    flags = ["--optimizer", "adamw", "--steps", "2", "--rounds", "1", *one_host.gpt_task("1.3M").flags]
    times, told = one_host.measure(["journal", "overlap", "ddp"], flags, workers=2, shards=1, rounds=1)
    assert all(len(each) == 1 and each[0] > 0 for each in times.values())
    losses = told["journal"]
    assert losses.shape == (2, one_host.WARM_UP + 2) and (losses[:, -1] < losses[:, 0] - 0.5).all()
    assert max(one_host.differences(told, None).values()) <= one_host.EQUAL
