"""The data that the examples train on: the text of Python's own standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

CONTEXT = 64  # bytes of a window


class Windows(Dataset):
    """Windows of CONTEXT bytes, as a language model of Hugging Face takes them. Every tenth is held out."""

    def __init__(self, held_out: bool = False) -> None:
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = torch.tensor(list(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
        windows = text[: len(text) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        places = torch.arange(len(windows)) % 10 == 9
        self.windows = windows[places][:500] if held_out else windows[~places]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}
