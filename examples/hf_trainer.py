"""Hugging Face's Trainer: a small GPT-2 from a config.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/hf_trainer.py --steps 100
"""

import argparse
import tempfile

import torch
from text import CONTEXT, Windows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from narrows.worker import DistributedOptimizer, rank, world_size  # 1


class SharedModel(TrainerCallback):
    """Trainer saves and evaluates the shared model. It calls eval() itself before it evaluates, not before it saves."""

    def on_step_end(self, args, state, control, optimizer=None, **rest):
        if control.should_save or control.should_evaluate:
            optimizer.eval()


def main(steps: int, batch: int, lr: float) -> None:
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    optimizer = DistributedOptimizer(optimizer, model)  # 2
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, logging_steps=10, save_steps=steps // 2, use_cpu=True,
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        data = torch.utils.data.Subset(data := Windows(), range(rank(), len(data), world_size()))  # 3
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=Windows(held_out=True),
                          optimizers=(optimizer, schedule), callbacks=[SharedModel()])  # fmt: skip
        trainer.train()
        print(f"loss {trainer.evaluate()['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="of a worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    main(**vars(parser.parse_args()))
