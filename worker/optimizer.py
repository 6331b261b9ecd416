"""DistributedOptimizer: a torch optimizer whose step is shared with other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrows.worker import session


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `inner`; shares its param_groups, state and defaults by reference. Alone it does what `inner` does."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        overlap: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.model = inner, model
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.max_grad_norm = max_grad_norm

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure is not None else None
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.max_grad_norm)
        self.inner.step()
        session.current().steps += 1
        return loss

    def finish(self) -> None:
        """Flush what is in flight; alone there is nothing."""

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Show the shared model in the parameters; alone they are it."""
        yield
