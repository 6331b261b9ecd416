"""Hides a worker's data in its pushes (--dp-clip, --dp-noise): clips each update, and adds noise to it.

It owns the source of randomness and the count of pushes.

Rules
- An update (or a gradient, in modes that push gradients) is clipped over all shards together to L2 norm C. Then each
  value gets Gaussian noise of standard deviation SIGMA * C. Both happen in the worker before it sends, so the worker
  need not trust the server.
- All later computation uses noised values only: error feedback keeps what the coder left of them, and the worker
  computes on its own updates as it sent them. So coding, residuals and retries cost no privacy (post-processing; Dwork
  and Roth 2014, prop. 2.1).
- Each push counts. Any two updates are at most 2 C apart, so epsilon is that of a Gaussian mechanism with noise SIGMA /
  2, composed over the pushes (Mironov 2017). It holds against any observer, whatever this worker's data. Other workers'
  noise and sampling do not lower it, because every worker takes part in every clock, and the server sees each worker's
  pushes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch

from narrows.compression import NonFiniteError
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker.model.flat import FloatArray

DELTA = 1e-5  # delta of the epsilon that is reported
CHUNK = 1 << 16  # values that are clipped and noised at a time
# Renyi orders, of which the least epsilon counts: those of opacus, and some beyond both ends for few and many pushes.
ORDERS = [1.001, 1.01, 1.03, 1.05, *(1 + x / 10 for x in range(1, 100)), *range(12, 64), 128, 256, 512, 1024, 4096]


class UpdatePrivacy:
    """Clips and noises the pushes of one worker, and counts them.

    Args:
        clip: C, the L2 norm to which an update is clipped.
        sigma: SIGMA, the standard deviation of the noise over C; 0: no noise.
        random: the source of the noise; by default a generator that the system seeds.
    """

    def __init__(self, clip: float, sigma: float, random: np.random.Generator | None = None) -> None:
        self.clip, self.sigma = clip, sigma
        self.random = random or np.random.default_rng()
        self.pushes = 0

    @staticmethod
    def of(settings: Settings) -> UpdatePrivacy | None:
        """Make it from the flags of the run; None without --dp-clip.

        Raises UsageError if --dp-noise is set and opacus, which computes epsilon, is not installed.
        """
        if settings.dp_clip < 0:
            return None
        if settings.dp_noise > 0:
            try:
                import opacus.accountants  # noqa: F401 - it takes a second, and at exit it could not be imported
            except ImportError:
                raise UsageError(
                    "--dp-noise: opacus, which counts epsilon, is not installed: pip install 'narrows[dp]'"
                ) from None
        return UpdatePrivacy(settings.dp_clip, max(settings.dp_noise, 0.0))

    @property
    def hides(self) -> bool:
        """True with noise, which is what makes epsilon finite."""
        return self.sigma > 0

    def hide(self, update: Sequence[FloatArray]) -> None:
        """Clip an update and add noise, in place.

        Args:
            update: the values for each shard, float32[n] each. They are clipped together.

        Raises:
            NonFiniteError: the length of the update is not finite; nothing was changed.
        """
        pieces = [values[at : at + CHUNK] for values in update for at in range(0, values.size, CHUNK)]
        with np.errstate(over="ignore", invalid="ignore"):
            length = math.sqrt(math.fsum(float(np.square(piece, dtype=np.float64).sum()) for piece in pieces))
        if not math.isfinite(length):
            raise NonFiniteError("its length is not finite, and it cannot be clipped")
        self.pushes += 1
        scale, noise = np.float32(min(1.0, self.clip / length) if length else 1.0), np.float32(self.sigma * self.clip)
        drawn = np.empty(CHUNK, np.float32)
        for piece in pieces:
            piece *= scale
            if noise:
                own = self.random.standard_normal(dtype=np.float32, out=drawn[: piece.size])
                own *= noise
                piece += own

    def epsilon(self) -> float:
        """Return the epsilon of all pushes so far, at DELTA."""
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        accountant.history = [(self.sigma / 2, 1.0, self.pushes)] if self.pushes else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # opacus warns that other orders may give less
            return float(accountant.get_epsilon(DELTA, alphas=ORDERS))

    def figures(self) -> dict[str, float]:
        """The values of a "privacy" row of the record."""
        return {"pushes": self.pushes, "epsilon": round(self.epsilon(), 4), "delta": DELTA}

    def check(self, model: torch.nn.Module) -> None:
        """Raise UsageError if the model has running statistics, which would tell of the data without noise."""
        for name, module in model.named_modules():
            if self.hides and getattr(module, "track_running_stats", False):
                raise UsageError(
                    f"--dp-noise: the running statistics of {name!r} are of this worker's data, and get no noise: use a "
                    "layer without them (GroupNorm, LayerNorm), or track_running_stats=False"
                )
