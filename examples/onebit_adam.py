"""1-bit Adam (2102.02888) and 0/1 Adam (2202.06009): the byte GPT of bench/tasks, trained by momentum of one bit a value.

ps-worker -n 4 --sync bsp examples/onebit_adam.py --dense 80 --state warm.pt
ps-worker -n 4 --sync bsp --compress sign --compress-down sign examples/onebit_adam.py --state warm.pt
ps-worker -n 4 --sync bsp --compress sign --compress-down sign examples/onebit_adam.py --zero-one --local-steps 4

The first command is the warm-up of 1-bit Adam: the servers step by Adam, and worker 0 reads their moments into a file. The
second goes on from that file with the variance v frozen. The third, 0/1 Adam, needs no warm-up. docs/howto/onebit-adam.md
has losses and bytes.

How it works

1. A worker puts its update u = rate m / sqrt(v) into the gradients, and pushes them. The servers' optimizer is SGD with rate 1.
2. `sign` with error feedback codes the update on the way up, and the servers' change of the model on the way down.
3. The change that arrives is the shared update, so (change / rate) sqrt(v) is the momentum that all workers go on with.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from narrows.worker import DistributedOptimizer, Embedding, rank, world_size

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench" / "tasks"))
from bytelm import ByteGPT, batch_rows, learning_rate, library, loss_sum, validation_loss

BETAS, EPS = (0.9, 0.95), 1e-8
ROW = 512  # values of a row of the table that gradients travel in


class OneBitAdam:
    """Adam of a worker whose momentum travels: the compression stage of 1-bit Adam, and 0/1 Adam with `refreshes`.

    Algorithm 1 of 2102.02888 and of 2202.06009, with these differences:
    - The compressor codes rate m / sqrt(v), an update of the weights, so that the servers' model is the run's model. The
      papers code m. `sign` gives 256 values one magnitude, so there values of a small v, as of rare bytes, step too far.
    - Errors are kept in units of weights, as in 2202.06009. At a constant rate both papers keep the same errors.
    - v and the rate are freed of their bias, as in torch's Adam.
    - A refresh of v updates the momentum by the mean gradient too, as the authors of 0/1 Adam do in DeepSpeed.

    Args:
        model: has its first weights already. All its parameters are trained, without weight decay.
        refreshes: give the model an embedding table, whose rows bring the gradients of a refresh. Under --compress sign
            they travel as float32; int8, fp16 and bf16 would code rows too, and their sums have no digit to spare.
    """

    def __init__(self, model: nn.Module, refreshes: bool = False) -> None:
        self.parameters = list(model.parameters())
        inner: list[torch.optim.Optimizer] = [torch.optim.SGD(self.parameters, lr=1.0)]
        if refreshes:
            rows = math.ceil(sum(p.numel() for p in self.parameters) / ROW)
            model.gradient_sums = self.table = Embedding(rows, ROW, std=0.0, seed=0)
            inner.append(torch.optim.SGD(self.table.parameters(), lr=1.0))
            self.rows = torch.arange(rows)
        self.optimizer = DistributedOptimizer(inner, model)
        self.momentum, self.variance, self.update = ([torch.zeros_like(p) for p in self.parameters] for _ in range(3))
        self.roots = [torch.full_like(p, math.inf) for p in self.parameters]  # sqrt(v) + eps; inf: no v yet
        self.shared = [p.detach().clone() for p in self.parameters]  # the model at the newest exchange
        self.steps = self.refreshed = 0  # steps so far, and those of the variance
        self.rates = 0.0  # sum of the rates since the newest exchange
        self.sums = self.table(self.rows) if refreshes else None  # of all mean gradients, [rows, ROW]

    def begin(self, step: int, momentum: Sequence[Tensor], variance: Sequence[Tensor]) -> None:
        """Go on with the moments that Adam has after `step` steps, each a tensor for each parameter."""
        torch._foreach_copy_(self.momentum, momentum)
        torch._foreach_copy_(self.variance, variance)
        self.steps = self.refreshed = step
        self._take_roots()

    @torch.no_grad()
    def step(self, rate: float, exchange: bool = True, refresh: bool = False) -> None:
        """Take one step along the gradients of this worker.

        Args:
            rate: the learning rate, above 0, the same on all workers.
            exchange: push the updates since the newest exchange, and take those of all. False: a local step.
            refresh: average the gradient in float32 too, and update the variance by it. Needs `exchange`, and no local
                steps since the newest one.
        """
        self.steps += 1
        self.rates += (rate := rate / (1 - BETAS[0] ** self.steps))
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        before = [BETAS[0] * m for m in self.momentum]
        for p, g, m, kept, u, root, x in zip(
            self.parameters, gradients, self.momentum, before, self.update, self.roots, self.shared, strict=True
        ):
            torch.add(kept, g, alpha=1 - BETAS[0], out=m)
            u.add_(m / root, alpha=rate)
            p.data.copy_(x if exchange else x - u)  # .data, as x is back before the servers' change is added to it
            p.grad = u
        if exchange and refresh:
            self._push(gradients)
            self._take_variance(before)
        elif exchange:
            self._push()
        self.optimizer.zero_grad()

    def _push(self, gradients: Sequence[Tensor] = ()) -> None:
        """Exchange the updates, and `gradients` beside them. The momentum of all follows from how the model changes."""
        if gradients:
            flat = torch.cat([g.flatten() for g in gradients])
            flat = nn.functional.pad(flat, (0, self.sums.numel() - flat.numel()))
            torch.autograd.backward(self.sums, flat.view_as(self.sums))
        self.optimizer.step()
        for p, m, u, root, x in zip(self.parameters, self.momentum, self.update, self.roots, self.shared, strict=True):
            torch.mul(x - p, root / self.rates, out=m)  # 0 inf without a v: the first refresh replaces it
            x.copy_(p)
            u.zero_()
        self.rates = 0.0

    def _take_variance(self, before: Sequence[Tensor]) -> None:
        """Update v and the momentum by the mean gradient of all workers. `before`: b1 times the momentum of the step before."""
        with torch.enable_grad():
            old, self.sums = self.sums, self.table(self.rows)
        flat, at = (old - self.sums).flatten(), 0  # the servers' SGD subtracts gradients
        for m, v, kept in zip(self.momentum, self.variance, before, strict=True):
            mean = flat[at : (at := at + v.numel())].view_as(v)
            torch.add(kept, mean, alpha=1 - BETAS[0], out=m)
            v.lerp_(mean.square(), 1 - BETAS[1])
        self.refreshed += 1
        self._take_roots()

    def _take_roots(self) -> None:
        for root, v in zip(self.roots, self.variance, strict=True):
            torch.add((v / (1 - BETAS[1] ** self.refreshed)).sqrt(), EPS, out=root)


def zero_one_policy(rates: Sequence[float], kappa: int, local_steps: int) -> Iterator[tuple[bool, bool]]:
    """Yield for each step whether workers exchange updates, and whether they refresh the variance.

    Section 6 of 2202.06009: the j-th wait for a refresh is 2^floor(j / kappa) steps. Exchanges come with every step, and
    half as often whenever the rate has halved, down to one in `local_steps`. Once local steps begin v is frozen, as in
    DeepSpeed.
    """
    since = due = refreshes = 0
    peak = 0.0
    for step, rate in enumerate(rates):
        since, peak = since + 1, max(peak, rate)
        interval = min(local_steps, 2 ** int(math.log2(peak / rate)))
        exchange = since >= interval or step == len(rates) - 1
        refresh = since == interval == 1 and step >= due
        if refresh:
            due, refreshes = step + 2 ** (refreshes // kappa), refreshes + 1
        since = 0 if exchange else since
        yield exchange, refresh


def backward(model: nn.Module, text: Tensor, step: int, args: argparse.Namespace) -> None:
    """The gradients of this worker's share of the batch, clipped."""
    rows = batch_rows(text, args.seed, step, args.batch, args.context, rank(), world_size())
    loss = loss_sum(model, rows) * world_size() / (args.batch * args.context)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train_dense(model: nn.Module, text: Tensor, rates: list[float], args: argparse.Namespace) -> DistributedOptimizer:
    """The warm-up: plain Adam, which the servers step under bsp. Worker 0 writes its moments and the model to the file."""
    optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=args.lr, betas=BETAS, eps=EPS), model)
    for step, rate in enumerate(rates[: args.dense]):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        backward(model, text, step, args)
        optimizer.step()
    if rank() == 0:
        state = optimizer.state_dict(servers=True)["state"]
        moments = {name: [state[i][name] for i in range(len(state))] for name in ("exp_avg", "exp_avg_sq")}
        torch.save({"step": args.dense, "model": model.state_dict()} | moments, new := args.state.with_suffix(".new"))
        os.replace(new, args.state)
    return optimizer


def train_coded(model: nn.Module, text: Tensor, rates: list[float], args: argparse.Namespace) -> DistributedOptimizer:
    """1-bit Adam from the file of the warm-up on, or 0/1 Adam from the first step on."""
    if args.zero_one:
        adam = OneBitAdam(model, refreshes=True)
        policy = list(zero_one_policy(rates, args.kappa, args.local_steps))
    else:
        warm = torch.load(args.state)
        model.load_state_dict(warm["model"])
        adam = OneBitAdam(model)
        adam.begin(warm["step"], warm["exp_avg"], warm["exp_avg_sq"])
        policy = [(True, False)] * len(rates)
    for step in range(adam.steps, len(rates)):  # not step_count(), which counts exchanges
        backward(model, text, step, args)
        adam.step(rates[step], *policy[step])
    return adam.optimizer


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    training, held_out, _ = library()
    model = ByteGPT(args.layers, args.width, args.heads, args.context)
    rates = [learning_rate(step, args.steps, args.lr, args.rate_warm_up) for step in range(args.steps)]
    optimizer = (train_dense if args.dense else train_coded)(model, training, rates, args)
    optimizer.finish()
    loss = validation_loss(model, held_out, args.context)
    sent, received = optimizer.bytes_up, optimizer.bytes_down
    print(f"loss {loss:.4f} (rank {rank()}, {sent:,} bytes up, {received:,} down)", flush=True)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dense", type=int, default=0, help="make this many steps by Adam, and write --state")
    parser.add_argument("--state", type=Path, default=Path("warm.pt"), help="joins the two runs of 1-bit Adam")
    parser.add_argument("--zero-one", action="store_true", help="0/1 Adam: no warm-up, the variance is refreshed")
    parser.add_argument("--kappa", type=int, default=16, help="0/1 Adam: refreshes until their interval doubles")
    parser.add_argument("--local-steps", type=int, default=1, help="0/1 Adam: the longest interval of exchanges")
    parser.add_argument("--steps", type=int, default=400, help="of the whole schedule, with the warm-up")
    parser.add_argument("--rate-warm-up", type=int, default=40, help="steps over which the rate rises")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--batch", type=int, default=32, help="windows a step, over all workers")
    for name, value in {"layers": 4, "width": 160, "heads": 5, "context": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(arguments())
