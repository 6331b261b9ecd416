"""Steps whose gradient is not finite: a worker skips them, counts them, and ends after too many in a row.

The main thread owns it.

How it works
1. `Engine.looked` checks the gradients of a step before the script's optimizer steps, or before they are pushed. So no
   NaN reaches weights, the optimizer's state, a residual, a peer or a server, in any mode and with any SPEC.
2. `first_not_finite` computes one norm over all gradients, fused by torch, and the host waits for it once. The norm of
   finite values beyond 1e19 overflows too; so if the norm is not finite, each tensor is checked. A GradScaler has
   checked the gradients already, and its result is used.
3. All ranks of a group skip the same steps (`ModelSlice.tallied`).
4. The mode's `SyncStep` closes the clock with an update of weight 0 (`ShardExchanges.skip`). A clock of several local
   steps still pushes the other steps.
5. `Engine.step` counts skipped steps. The session tells ps-worker, and raises the sentence of `too_many`.

If gradients leave during the backward pass, the parts that have left have no effect: the first part of the update
leaves at step(), and says that the update has no samples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from narrows.protocols.errors import UsageError

LIMIT = "NARROWS_SKIP_LIMIT"  # the variable of ps-worker --skip-limit
LIMIT_DEFAULT = 50  # steps in a row; a GradScaler that begins at 2**16 skips some 20 before a float16 model trains

FLOAT_BYTES = 4
Named = Sequence[tuple[str, torch.Tensor]]


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values in this process: stored values of a sparse one, the local part of a DTensor."""
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return (local._values() if local.is_sparse else local).detach()


@torch.no_grad()
def first_not_finite(gradients: Named) -> str:
    """Name the first gradient that has a NaN or an infinity; "" if all are finite.

    The host waits for the device once if all are finite.
    """
    values = [each for _, gradient in gradients if (each := plain(gradient)).numel()]
    half = [each for each in values if each.element_size() < FLOAT_BYTES]  # their norms would overflow early
    full = [each for each in values if each.element_size() >= FLOAT_BYTES]
    norms = [*(torch._foreach_norm(half, 2, dtype=torch.float32) if half else ())]
    norms += torch._foreach_norm(full, 2) if full else ()
    if not norms or bool(torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().all()):
        return ""
    return next((name for name, each in gradients if not torch.isfinite(plain(each)).all()), "")


@torch.no_grad()
def unscale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Divide gradients in place by a GradScaler's scale, as its unscale_() does, without waiting for the device."""
    inverse = scale.double().reciprocal().float()
    for gradient in gradients:
        plain(gradient).mul_(inverse.to(gradient.device))


class NotFiniteError(Exception):
    """Ends a step of the script's optimizer whose closure has made a gradient that is not finite.

    `loss` is what the closure returned.
    """

    def __init__(self, loss: object) -> None:
        super().__init__("the gradient is not finite")
        self.loss = loss


class SkippedSteps:
    """Counts the skipped steps of one worker.

    Args:
        limit: skipped steps in a row after which the worker ends.
        rank: the rank of this process in the run, for messages.

    Attributes:
        newest: the tensor whose gradient was not finite in the newest step; "" if the step was not skipped.
        quiet: a GradScaler has found the overflow, which it needs to find its scale; the user is not told.
    """

    def __init__(self, limit: int, rank: int) -> None:
        self.limit, self.rank = limit, rank
        self.scale: torch.Tensor | None = None  # scale of this step's gradients (torch.amp.GradScaler)
        self.overflow: torch.Tensor | None = None  # not 0 if these gradients have overflowed
        self.steps = self.row = 0  # skipped steps so far, and in a row until now
        self.newest, self.quiet, self.said = "", False, False

    @staticmethod
    def of_environment(rank: int) -> SkippedSteps:
        """Make it with the limit of ps-worker --skip-limit. Raises UsageError if the limit is no positive number."""
        given = os.environ.get(LIMIT, "") or str(LIMIT_DEFAULT)
        if not given.isdecimal() or int(given) < 1:
            raise UsageError(f"--skip-limit {given}: give the number of steps, at least 1")
        return SkippedSteps(int(given), rank)

    def scaled(self, scale: torch.Tensor | None, overflow: torch.Tensor | None) -> None:
        """Take what a GradScaler says of this step's gradients.

        Args:
            scale: the factor on the gradients; None without a GradScaler, or if it has unscaled them.
            overflow: not 0 if the gradients have overflowed; None without a GradScaler.
        """
        self.scale, self.overflow = scale, overflow

    def told(self) -> tuple[bool, float]:
        """Return whether a GradScaler has found an overflow, and its scale. The host waits for the device once."""
        if self.overflow is None:
            return False, 1.0
        scale = torch.ones_like(self.overflow) if self.scale is None else self.scale
        overflow, value = torch.cat([self.overflow.reshape(1), scale.reshape(1)]).tolist()
        return bool(overflow), value

    def begin(self) -> None:
        """Begin a step."""
        self.newest, self.quiet = "", False

    def stepped(self) -> None:
        """End a step, and count it if it was skipped."""
        self.steps += bool(self.newest)
        self.row = self.row + 1 if self.newest else 0

    def first(self, step: int) -> str:
        """Return the sentence for the console about the first skipped step; "" if none was skipped, or after that."""
        if not self.newest or self.quiet or self.said:
            return ""
        self.said = True
        return (
            f"rank {self.rank}: the gradient of step {step} is not finite, first in {self.newest}: the step is skipped; "
            "more of them are only counted"
        )

    def too_many(self) -> str:
        """Return the sentence with which this worker ends; "" below the limit."""
        if self.row < self.limit:
            return ""
        return (
            f"rank {self.rank}: the gradients of {self.row} steps in a row were not finite, the newest first in {self.newest}: "
            "look at the data and the loss, lower the learning rate or clip; --skip-limit says how many may be skipped"
        )
