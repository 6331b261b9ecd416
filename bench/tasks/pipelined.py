"""The byte GPT of bytelm.py in stages, each a process; or, under plain python, the same stages one after the other in one.

    ps-serve --plan plan.json & ps-worker --plan plan.json bench/tasks/pipelined.py
    python bench/tasks/pipelined.py --of 4      # the unsplit model: 4 parts, clipped each on its own, as stages are
    python bench/tasks/pipelined.py --gloo ...  # under torchrun: the same stages over torch's own gloo, without Narrows

The first step compares gradients with those of the unsplit model (--check).
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import bytelm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bytelm import Block, ByteGPT, batch_rows, learning_rate, library
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from narrows.protocols.config.deployment import even
from narrows.worker import (
    DistributedOptimizer,
    ScheduleEager1F1B,
    Subspace,
    Writer,
    pipeline,
    record,
    replica,
    replicas,
    stage,
    stage_layers,
    stages,
    step_count,
)

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "eager": ScheduleEager1F1B}


class Rest(torch.autograd.Function):
    """Takes so many seconds forward, twice as many backward, and no core: stages stand as on machines of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Part(nn.Module):
    """One stage of the model. With a subspace, (coefficients, ids) travel in the place of the residual stream."""

    def __init__(
        self, model: ByteGPT, blocks: Sequence[Block], first: bool, last: bool, subspace: Subspace | None
    ) -> None:
        super().__init__()
        self.first, self.last, self.subspace = first, last, subspace
        self.blocks = nn.Sequential(*blocks)
        self.rest_s = 0.0
        if first:
            self.bytes, self.positions = model.bytes, model.positions
        if last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Any:
        space = self.subspace
        if self.first:
            ids = x.to(torch.uint8)
            x = self.bytes(x) + self.positions.weight[: x.shape[1]]
            x = x if space is None else space.enter(x, ids)
        elif space is not None:
            assert ids is not None
            x = space.enter(x, ids)
        x = self.blocks(x)
        x = Rest.apply(x, self.rest_s) if self.rest_s else x  # type: ignore[no-untyped-call]
        if self.last:
            return self.head(self.norm(x))
        return x if space is None or ids is None else (space.leave(x, ids), ids)


def parts(args: argparse.Namespace, depths: Sequence[range]) -> list[Part]:
    """The model from its seed, in stages of these layers."""
    torch.manual_seed(args.seed)
    model = ByteGPT(args.layers, args.width, args.heads, args.context)
    blocks = [b for b in model.blocks if isinstance(b, Block)]
    subspace = Subspace(256, args.width, args.subspace) if args.subspace else None
    if subspace is not None:
        std = 0.02 / (2 * args.layers) ** 0.5
        for block in blocks[: depths[-1].start]:  # nobody sends on what the last stage has written
            block.attention_out = Writer(args.width, subspace, std)  # type: ignore[assignment]
            block.mlp_out = Writer(4 * args.width, subspace, std)  # type: ignore[assignment]
        model.bytes, model.positions = nn.Embedding(256, args.subspace), nn.Embedding(args.context, args.subspace)
        for table in (model.bytes, model.positions):
            nn.init.normal_(table.weight)  # as large as the fixed vectors
    return [Part(model, [blocks[i] for i in own], own.start == 0, own.stop == args.layers, subspace) for own in depths]


def whole(pieces: Sequence[Part], x: Tensor) -> Tensor:
    """The logits of the stages one after the other."""
    told: Any = (x,)
    for piece in pieces:
        out = piece(*told)
        told = out if isinstance(out, tuple) else (out,)
    return told[0]  # type: ignore[no-any-return]


def mean_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def examples(args: argparse.Namespace, rows: int, place: int, count: int) -> dict[str, Any]:
    """Shapes of what a stage takes and gives for one micro-batch, so that nothing about them has to travel."""
    ids = torch.zeros(rows, args.context, dtype=torch.uint8)
    passed = torch.zeros(rows, args.context, args.subspace or args.width, requires_grad=True)
    between = (passed, ids) if args.subspace else (passed,)
    logits = torch.zeros(rows, args.context, 256, requires_grad=True)
    return {
        "input_args": between if place else (ids.long(),),
        "output_args": between if place < count - 1 else (logits,),
    }


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    flags = {"layers": 4, "width": 160, "heads": 5, "context": 64, "steps": 400, "warm-up": 40, "seed": 0, "batch": 32}
    for flag, default in (flags | {"micro": 8, "of": 4, "subspace": 0}).items():
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--rest", type=float, default=0.0, help="ms that a stage sleeps in a micro-batch, and twice on its way back"
    )
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--gloo", action="store_true")
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(argv)


def check(args: argparse.Namespace, module: Part, pieces: list[Part], rows: Tensor, place: int) -> None:
    """Print how far the gradients of this stage are from those of the unsplit model, beside the largest of them.

    The unsplit model computes in float64: in float32 its own rounding over a whole batch is eight times that of micro-batches.
    """
    for each in pieces:
        each.double()
    mean_loss(whole(pieces, rows[:, :-1]), rows[:, 1:]).backward()
    pairs = list(zip(module.parameters(), pieces[place].parameters(), strict=True))
    far = max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)
    size = max(float(b.grad.abs().max()) for _, b in pairs if b.grad is not None)
    print(f"stage {place}: gradients differ by {far:.2e}, the largest is {size:.2e}", flush=True)


def alone(args: argparse.Namespace) -> None:
    """The unsplit model, on the same batches, in one process."""
    text, held_out, _ = library()
    pieces = parts(args, even(args.layers, args.of))
    optimizers = [torch.optim.AdamW(p.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1) for p in pieces]
    seconds, before = [], time.perf_counter()
    for step in range(args.steps):
        rows = batch_rows(text, args.seed, step, args.batch, args.context)
        for piece, optimizer in zip(pieces, optimizers, strict=True):
            piece.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr, args.warm_up)
        loss = mean_loss(whole(pieces, rows[:, :-1]), rows[:, 1:])
        loss.backward()
        for piece, optimizer in zip(pieces, optimizers, strict=True):
            nn.utils.clip_grad_norm_(piece.parameters(), args.clip)
            optimizer.step()
        seconds.append(time.perf_counter() - before)
        before = time.perf_counter()
    print(f"median step {1e3 * statistics.median(seconds):.1f} ms over {len(seconds)} steps")
    print(f"training loss {loss.item():.6f}")
    print(f"validation loss {validation(pieces, held_out, args.context):.6f}", flush=True)


def validation(pieces: Sequence[Part], text: Tensor, context: int) -> float:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pieces = nn.ModuleList(pieces)

        def forward(self, x: Tensor) -> Tensor:
            return whole(pieces, x)

    return bytelm.validation_loss(Whole(), text, context)


def main(args: argparse.Namespace) -> None:
    text, _, _ = library()
    if args.gloo:
        dist.init_process_group("gloo")
        group, place, count, here, of = None, dist.get_rank(), dist.get_world_size(), 0, 1
    else:
        group, place, count, here, of = pipeline(), stage(), stages(), replica(), replicas()
    depths = even(args.layers, count) if args.gloo else [stage_layers(args.layers, i) for i in range(count)]
    module = parts(args, depths)[place]
    module.rest_s = args.rest / 1000
    inner = torch.optim.AdamW(module.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer: Any = inner if args.gloo else DistributedOptimizer(inner, module)
    micro_rows = args.batch // of // args.micro
    shapes = examples(args, micro_rows, place, count)
    piece = PipelineStage(module, place, count, torch.device("cpu"), group=group, **shapes)
    schedule = SCHEDULES[args.schedule](piece, args.micro, loss_fn=mean_loss)
    seconds, done, before, losses = [], 0, time.perf_counter(), list[Tensor]()
    while (step := done if args.gloo else step_count()) < args.steps:
        for each in optimizer.param_groups:
            each["lr"] = learning_rate(step, args.steps, args.lr, args.warm_up)
        rows = batch_rows(text, args.seed, step, args.batch, args.context, here, of)
        optimizer.zero_grad()
        losses = []
        told: dict[str, Any] = {"target": rows[:, 1:], "losses": losses} if piece.is_last else {}
        schedule.step(*([rows[:, :-1]] if piece.is_first else []), **told)
        if args.check and not done:
            check(args, module, parts(args, depths), rows, place)
        nn.utils.clip_grad_norm_(module.parameters(), args.clip)
        optimizer.step()
        if losses and not args.gloo:
            record(loss=sum(loss.item() for loss in losses) / args.micro)
        done += 1
        seconds.append(time.perf_counter() - before)
        before = time.perf_counter()
    if losses:  # of the last stage
        print(f"training loss {sum(loss.item() for loss in losses) / args.micro:.6f}")
    if seconds:
        print(
            f"stage {place}: median step {1e3 * statistics.median(seconds):.1f} ms over {len(seconds)} steps",
            flush=True,
        )
    if args.gloo:
        dist.destroy_process_group()
    else:
        optimizer.finish()


if __name__ == "__main__":
    told = arguments()
    if stages() == 1 and not told.gloo:
        alone(told)
    else:
        main(told)
