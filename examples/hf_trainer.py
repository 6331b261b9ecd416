"""Hugging Face's Trainer: a small GPT-2 from a config.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/hf_trainer.py --steps 100
"""

import argparse
import tempfile

from text import CONTEXT, Windows
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from narrows.worker.transformers import distributed  # 1


def main(steps: int, batch: int, lr: float) -> None:
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=lr, logging_steps=10,
            save_steps=steps // 2, use_cpu=True, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = distributed(Trainer)(model, args, train_dataset=Windows(), eval_dataset=Windows(held_out=True))  # 2
        trainer.train()
        print(f"loss {trainer.evaluate()['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="of a worker")
    parser.add_argument("--lr", type=float, default=2e-3)
    main(**vars(parser.parse_args()))
