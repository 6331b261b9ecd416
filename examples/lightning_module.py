"""Lightning: a convolutional network with batch norm under OneCycleLR, on scikit-learn's digits.

ps-worker -n 2 --sync ssp --compress topk:0.05+int8 examples/lightning_module.py --steps 100
"""

import argparse
import tempfile
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from narrows.worker.lightning import NarrowsCallback, sampler  # 1

warnings.filterwarnings("ignore", module="lightning")


class Digits(lightning.LightningModule):
    def __init__(self, steps: int, lr: float) -> None:
        super().__init__()
        self.steps, self.lr = steps, lr
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.lr, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(steps: int, batch: int, lr: float) -> None:
    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images).float().view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    data, held_out = TensorDataset(images[300:], labels[300:]), TensorDataset(images[:300], labels[:300])
    loader = DataLoader(data, batch, sampler=sampler(data, batch))  # 2
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
            val_check_interval=steps, check_val_every_n_epoch=None, default_root_dir=folder,
            callbacks=[NarrowsCallback()],  # 3
        )  # fmt: skip
        trainer.fit(Digits(steps, lr), loader, DataLoader(held_out, 300))
        print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="of a worker")
    parser.add_argument("--lr", type=float, default=0.05)
    main(**vars(parser.parse_args()))
