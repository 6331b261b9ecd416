"""Teachers and students in one process, over loopback sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from narrows.compression.logits import parse_logits
from narrows.worker.distillation.student import Teachers
from narrows.worker.distillation.teacher import AnsweringModel, TeacherService
from narrows.worker.distillation.teacher_runner import TeacherRunner

CODING = "top:4+fp16"
INPUTS, CLASSES = 6, 10


class Teaching:
    """A teacher whose model answers in a thread.

    Args:
        model: as of narrows.worker.teacher.serve.
        dataset: its samples, by index.
        keys: the folder of its keys.
        port: 0: any free one.
        turns: False: nobody takes its requests.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        dataset: Sequence[Any] | None = None,
        keys: str = "",
        port: int = 0,
        turns: bool = True,
        **values: Any,
    ) -> None:
        self.said = list[str]()
        self.answering = AnsweringModel(model, dataset, **values)
        size = len(dataset) if dataset is not None else 0
        self.runner = TeacherRunner(f"tcp://127.0.0.1:{port}", size, parse_logits, self.said.append, keys)
        self.service = TeacherService(self.runner, self.answering, self.said.append)
        self.port, self.address = self.runner.port, f"tcp://127.0.0.1:{self.runner.port}"
        self.ends = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._main, daemon=True)
        if turns:
            self.thread.start()

    def _main(self) -> None:
        try:
            while not self.ends.is_set():
                self.service.turn()
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        self.ends.set()
        if self.thread.ident is not None:
            self.thread.join(10)
        self.runner.close()
        assert self.error is None, self.error


@contextmanager
def taught(model: Callable[..., Any], **values: Any) -> Iterator[Teaching]:
    made = Teaching(model, **values)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def asking(
    *addresses: str, keys: Any = None, coding: str = CODING, said: Any = None, **values: Any
) -> Iterator[Teachers]:
    tell = (said if said is not None else list[str]()).append
    made = Teachers(dict.fromkeys(addresses, keys), coding, tell=tell, **values)
    try:
        yield made
    finally:
        made.close()


def linear(classes: int = CLASSES, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(INPUTS, classes)


def inputs(count: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))


def top(logits: torch.Tensor, most: int, temperature: float = 1.0) -> tuple[Any, Any]:
    """The largest log-probabilities of each position by NumPy, and their classes, rising."""
    values = logits.detach().double().numpy() / temperature
    values = (
        values
        - np.log(np.exp(values - values.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - values.max(-1, keepdims=True)
    )
    ids = np.sort(np.argsort(-values, -1)[..., :most], -1)
    return np.take_along_axis(values, ids, -1), ids
