"""bytelm.py, one of whose workers lies. What it sends is as long as usual.

ps-worker -n 4 --sync ssp --robust cosine bench/tasks/liar.py --lie negative --steps 400
"""

import argparse
from collections.abc import Callable

import bytelm
import torch
from torch import Tensor

from narrows.worker import rank, world_size


def negative(gradient: Tensor) -> None:
    gradient.neg_()


def noise(gradient: Tensor) -> None:
    gradient.copy_(torch.randn_like(gradient) * (gradient.norm() / gradient.numel() ** 0.5))


LIES: dict[str, Callable[[Tensor], None]] = {each.__name__: each for each in (negative, noise)}


def lie_of(kind: str, optimizer: torch.optim.Optimizer) -> None:
    """Let the gradients of what `optimizer` steps be a lie of this kind."""

    def lie(parameter: Tensor) -> None:
        if parameter.grad is not None:
            LIES[kind](parameter.grad)

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.register_post_accumulate_grad_hook(lie)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--lie", choices=list(LIES), required=True)
    chosen, rest = parser.parse_known_args()
    honest = bytelm.optimizers

    def lying(model: bytelm.ByteGPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
        made = honest(model, args)
        for optimizer in made if rank() == world_size() - 1 else ():
            lie_of(chosen.lie, optimizer)
        return made

    bytelm.optimizers = lying
    bytelm.main(bytelm.arguments(rest))


if __name__ == "__main__":
    main()
