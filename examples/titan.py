"""A loop in the shape of torchtitan's trainer, with its containers of optimizers and of schedules. The model is our GPT. In a
group FSDP2 shards it.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/titan.py --steps 100
ps-worker -n 2 --group --sync ssp --compress topk:0.05+int8 examples/titan.py --steps 100
"""

import argparse
import os

import torch
from gpt import GPT
from text import Windows
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from narrows.worker import DistributedOptimizer, sampler  # 1


def parallelized(model: GPT) -> GPT:
    """Sharded over the process group, where the processes of this worker are one."""
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        for part in (*model.blocks, model):
            fully_shard(part)
    return model


class Trainer:
    def __init__(self, steps: int, batch: int, accumulate: int, lr: float) -> None:
        torch.manual_seed(0)
        self.accumulate = accumulate
        self.model_parts = [parallelized(GPT())]
        adamw = {"lr": lr, "betas": (0.9, 0.95)}
        plain = ParamGroupConfig(pattern=r"bias|norm", optimizer_name="Adam", optimizer_kwargs=adamw)
        decayed = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw | {"weight_decay": 0.1})
        config = OptimizersContainer.Config(param_groups=[plain, decayed], implementation="foreach")
        self.optimizers = OptimizersContainer(config, model_parts=self.model_parts)
        schedule = LRSchedulersContainer.Config(warmup_steps=steps // 10, decay_type="cosine", min_lr_factor=0.1)
        self.lr_schedulers = schedule.build(optimizers=self.optimizers, training_steps=steps)
        self.optimizers = DistributedOptimizer(self.optimizers, *self.model_parts, schedule=self.lr_schedulers)  # 2
        data = Windows()
        self.dataloader = DataLoader(data, batch, sampler=sampler(data, accumulate * batch, steps=steps))  # 3

    def forward_backward_step(self, tokens: torch.Tensor) -> None:
        loss = self.model_parts[0](tokens) / self.accumulate
        loss.backward()

    def train_step(self, batches) -> None:
        self.optimizers.zero_grad()
        for _ in range(self.accumulate):
            self.forward_backward_step(next(batches)["input_ids"])
        torch.nn.utils.clip_grad_norm_([p for part in self.model_parts for p in part.parameters()], 1.0, foreach=True)
        self.optimizers.step()
        self.lr_schedulers.step()

    def train(self) -> None:
        batches = iter(self.dataloader)
        for _ in range(len(self.dataloader) // self.accumulate):
            self.train_step(batches)

    def validate(self) -> float:
        with torch.no_grad():
            losses = [self.model_parts[0](each["input_ids"]).item() for each in DataLoader(Windows(held_out=True), 50)]
        return sum(losses) / len(losses)


def main(**arguments) -> None:
    trainer = Trainer(**arguments)
    trainer.train()
    print(f"loss {trainer.validate():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="of a process, in each of the backward passes of a step")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes of a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    main(**vars(parser.parse_args()))
