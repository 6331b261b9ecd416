"""bench/tasks/pipelined.py cuts the byte GPT into stages that are the model, also in a subspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.tasks import load

from narrows.protocols.config.deployment import even

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = ["--layers", "4", "--width", "16", "--heads", "2", "--context", "8"]


def test_the_stages_are_the_model_in_one_piece() -> None:
    task: Any = load("pipelined")
    args = task.arguments(SMALL)
    torch.manual_seed(args.seed)
    model = task.ByteGPT(args.layers, args.width, args.heads, args.context)
    ids = torch.randint(0, 256, (3, 8))
    assert torch.equal(task.whole(task.parts(args, even(4, 4)), ids), model(ids))
    assert torch.equal(task.whole(task.parts(args, even(4, 1)), ids), model(ids))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stage_takes_and_gives_what_its_examples_say(count: int) -> None:
    task: Any = load("pipelined")
    for flags in (SMALL, [*SMALL, "--subspace", "3"]):
        args, told = task.arguments(flags), (torch.randint(0, 256, (3, 8)),)
        for place, part in enumerate(task.parts(args, even(4, count))):
            shapes = task.examples(args, 3, place, count)
            assert [(x.shape, x.dtype) for x in told] == [(x.shape, x.dtype) for x in shapes["input_args"]]
            out = part(*told)
            told = out if isinstance(out, tuple) else (out,)
            assert [(x.shape, x.dtype) for x in told] == [(x.shape, x.dtype) for x in shapes["output_args"]]


def test_in_a_subspace_few_numbers_pass_and_where_it_is_cut_changes_nothing() -> None:
    task: Any = load("pipelined")
    args = task.arguments([*SMALL, "--subspace", "3"])
    ids = torch.randint(0, 256, (3, 8))
    cuts = [range(3), range(3, 4)], even(4, 4)  # the last stage's layers write anywhere, and it is the same
    few, cut = (task.whole(task.parts(args, depths), ids).detach() for depths in cuts)
    assert float((few - cut).abs().max()) < 1e-5 < float(few.std())
    passed, named = task.parts(args, even(4, 4))[0](ids)
    assert passed.shape == (3, 8, 3) and named.dtype is torch.uint8
