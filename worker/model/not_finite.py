"""Steps whose gradient is not finite: a worker leaves them out, counts them, and ends after too many in a row. The main thread
owns it.

How it works
1. `Engine` asks `usable` for the gradients of a step before the script's optimizer steps, or before they are pushed. So no NaN
   reaches weights, the optimizer's state, a residual, a peer or a server, whatever the mode and the SPEC.
2. The look is one norm over all gradients, fused by torch, and the host waits for it once. The norm of finite values beyond
   1e19 overflows as well, so each tensor is looked at where it is not finite. A GradScaler has looked already, and is believed.
3. All ranks of a group leave out the same steps (`ModelSlice.tallied`).
4. The mode's `SyncStep` closes the clock with an update of weight 0 (`ShardExchanges.skip`). A clock of several local
steps has the others. 5. `Engine.step` counts; session.py tells ps-worker, and raises `too_many`.

Where gradients leave during the backward pass, what has left stays without effect: the first part follows at step(), and it
says that the update has no samples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from narrows.protocols.errors import UsageError

LIMIT = "NARROWS_SKIP_LIMIT"  # the variable of ps-worker --skip-limit
LIMIT_DEFAULT = 50  # a GradScaler that begins at 2**16 leaves out some 20 before a model that float16 can hold trains

FLOAT_BYTES = 4
Named = Sequence[tuple[str, torch.Tensor]]


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """The values that this process has of a gradient: those that are stored of a sparse one, its part of a DTensor."""
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return (local._values() if local.is_sparse else local).detach()


@torch.no_grad()
def first_not_finite(gradients: Named) -> str:
    """The name of the first gradient that has a NaN or an infinity, "": all are finite. The host waits for a device once
    where they are."""
    values = [each for _, gradient in gradients if (each := plain(gradient)).numel()]
    half = [each for each in values if each.element_size() < FLOAT_BYTES]  # whose norms would overflow soon
    full = [each for each in values if each.element_size() >= FLOAT_BYTES]
    norms = [*(torch._foreach_norm(half, 2, dtype=torch.float32) if half else ())]
    norms += torch._foreach_norm(full, 2) if full else ()
    if not norms or bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all()):
        return ""
    return next((name for name, each in gradients if not torch.isfinite(plain(each)).all()), "")


@torch.no_grad()
def unscale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Divide in place by the scale of a GradScaler, as its unscale_() does; nothing waits for a device."""
    inverse = scale.double().reciprocal().float()
    for gradient in gradients:
        plain(gradient).mul_(inverse.to(gradient.device))


class NotFiniteError(Exception):
    """Ends a step of the script's optimizer after its closure has made a gradient that is not finite. loss: the closure's."""

    def __init__(self, loss: object) -> None:
        super().__init__("the gradient is not finite")
        self.loss = loss


class SkippedSteps:
    """The steps of one worker that were left out. newest: in which tensor the gradient of the newest step is not finite, "": it
    was not left out. quiet: a GradScaler has found that, which is how it finds its scale. rank: of this process in the run."""

    def __init__(self, limit: int, rank: int) -> None:
        self.limit, self.rank = limit, rank
        self.scale: torch.Tensor | None = None  # of the gradients of this step (torch.amp.GradScaler)
        self.overflow: torch.Tensor | None = None  # whether they have overflowed
        self.steps = self.row = 0  # left out so far; those of them since the last one that was not
        self.newest, self.quiet, self.said = "", False, False

    @staticmethod
    def of_environment(rank: int) -> SkippedSteps:
        """Raises UsageError for a limit that is none."""
        given = os.environ.get(LIMIT, "") or str(LIMIT_DEFAULT)
        if not given.isdecimal() or int(given) < 1:
            raise UsageError(f"--skip-limit {given}: give the number of steps, at least 1")
        return SkippedSteps(int(given), rank)

    def scaled(self, scale: torch.Tensor | None, overflow: torch.Tensor | None) -> None:
        """What a GradScaler has multiplied the gradients of this step by, and whether they have overflowed; None: there is no
        GradScaler, or it has unscaled them."""
        self.scale, self.overflow = scale, overflow

    def told(self) -> tuple[bool, float]:
        """What a GradScaler has said: the gradients of this step have overflowed, and their scale. The host waits once."""
        if self.overflow is None:
            return False, 1.0
        scale = torch.ones_like(self.overflow) if self.scale is None else self.scale
        overflow, value = torch.cat([self.overflow.reshape(1), scale.reshape(1)]).tolist()
        return bool(overflow), value

    def begin(self) -> None:
        """A step begins."""
        self.newest, self.quiet = "", False

    def stepped(self) -> None:
        """The step is over: count it where it was left out."""
        self.steps += bool(self.newest)
        self.row = self.row + 1 if self.newest else 0

    def first(self, step: int) -> str:
        """The sentence for the console about the first step that was left out; "": it was said, or none was."""
        if not self.newest or self.quiet or self.said:
            return ""
        self.said = True
        return (
            f"rank {self.rank}: the gradient of step {step} is not finite, first in {self.newest}: the step is skipped; "
            "more of them are only counted"
        )

    def too_many(self) -> str:
        """The sentence that this worker ends with; "": it goes on."""
        if self.row < self.limit:
            return ""
        return (
            f"rank {self.rank}: the gradients of {self.row} steps in a row were not finite, the newest first in {self.newest}: "
            "look at the data and the loss, lower the learning rate or clip; --skip-limit says how many may be skipped"
        )
