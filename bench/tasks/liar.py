"""bytelm.py, one of whose workers lies.

ps-worker -n 4 --sync ssp --robust cosine bench/tasks/liar.py --lie negative --steps 400
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

import bytelm
import numpy as np
import torch
from torch import Tensor

from narrows.compression import codecs
from narrows.protocols import messages as m
from narrows.worker import rank, world_size
from narrows.worker.sync.shards import ShardExchanges

LONG = "million"  # times as long; the others are as long as usual


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


def exaggerate() -> None:
    """Let what leaves be a million times as long. The liar itself goes on from what it would have sent, so its updates stay
    updates. A longer gradient would not do: an update of AdamW is as long as ever."""
    said = ShardExchanges.say

    def say(self: ShardExchanges, shard: int, messages: Sequence[m.Message]) -> None:
        said(self, shard, [_longer(each) if isinstance(each, m.Push) else each for each in messages])

    ShardExchanges.say = say  # type: ignore[method-assign]


def _longer(push: m.Push) -> m.Push:
    values = np.zeros(push.end - push.begin, np.float32)
    codecs.put(push, 1e6, values, push.begin)
    return replace(push, codec=codecs.RAW, payload=values.tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--lie", choices=[*LIES, LONG], required=True)
    chosen, rest = parser.parse_known_args()
    honest = bytelm.optimizers

    def lying(model: bytelm.ByteGPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
        made = honest(model, args)
        if rank() != world_size() - 1:
            return made
        if chosen.lie == LONG:
            exaggerate()
        for optimizer in made if chosen.lie in LIES else ():
            lie_of(chosen.lie, optimizer)
        return made

    bytelm.optimizers = lying
    bytelm.main(bytelm.arguments(rest))


if __name__ == "__main__":
    main()
