"""DistributedOptimizer: a torch optimizer whose step is shared with the other workers of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrows.protocols.errors import UsageError
from narrows.worker import session
from narrows.worker.engine import Engine


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps `inner`, which steps the parameters of `model`.

    It shares param_groups, state and defaults with `inner` by reference, so schedulers, gradient accumulation, clipping and
    AMP work on it as on any optimizer. Run as plain python it does what `inner` does.

    overlap: let gradients leave during the last of the `accumulate` backward passes of a step (modes that push gradients;
    pushed updates hide the link behind the next forward and backward anyway). p.grad must then stay untouched until step().
    max_grad_norm: L2 norm to clip to: of the folded mean where gradients are pushed (as DDP clips), else of the worker's own
    gradient. Raises UsageError for what cannot be pushed, IncompatibleError where the model is not the run's.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        overlap: bool = False,
        accumulate: int = 1,
        max_grad_norm: float | None = None,
    ) -> None:
        if accumulate < 1:
            raise UsageError(f"accumulate={accumulate}: give the number of backward passes that make a step")
        self._engine: Engine | None = None
        self._building = True
        super().__init__(inner.param_groups, inner.defaults)
        self._building = False
        self.inner = inner
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self.max_grad_norm = max_grad_norm
        self._session = session.current()
        if isinstance(self._session, session.Connected):
            self._engine = self._session.attach(model, inner, max_grad_norm or 0.0, accumulate if overlap else 0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the run: returns the closure's loss, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._engine is None:
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], self.max_grad_norm)
            self.inner.step()
            assert isinstance(self._session, session.Alone)
            self._session.steps += 1
        else:
            self._engine.step()
            assert isinstance(self._session, session.Connected)
            self._session.stepped()
        return loss

    def step_samples(self, samples: int) -> None:
        """Weight of the next push among the workers': the samples it was computed on (default 1)."""
        if samples < 1:
            raise UsageError(f"step_samples({samples}): give a positive number")
        if self._engine is not None:
            self._engine.samples_pending += samples

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused in a run: every worker declared its parameters when it joined."""
        if self._engine is not None:
            raise UsageError(
                "add_param_group after the run has begun: pass every group to the optimizer before wrapping it"
            )
        super().add_param_group(param_group)
        if not self._building:
            self.inner.param_groups = self.param_groups

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under "narrows" the residual (float32) and the clock."""
        state = self.inner.state_dict()
        if self._engine is not None:
            residuals = [view.feedback.state_dict() for view in self._engine.views]
            state["narrows"] = {"clock": self._engine.clock, "residuals": residuals}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the inner state and the residual; the clock is the run's, not the file's."""
        state = dict(state_dict)
        ours = state.pop("narrows", None)
        self.inner.load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        if ours is not None and self._engine is not None:
            for view, residual in zip(self._engine.views, ours["residuals"], strict=True):
                view.feedback.load_state_dict(residual)

    def finish(self) -> None:
        """End this worker's part: send what is left, wait until it is folded, leave. At exit it is called for you."""
        if self._engine is not None:
            self._engine.finish()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Show the server's own state in the parameters: evaluate inside. Waits until own pushes are folded."""
        engine = self._engine
        if engine is None:
            yield
            return
        kept = engine.kept()
        engine.show_shared()
        try:
            yield
        finally:
            engine.hide_shared(kept)
