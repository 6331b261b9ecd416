"""Hides a worker's data in what it sends (--dp-clip, --dp-noise): its updates are clipped, and noise is added. It owns
the random source and the count of what was sent.

Rules
- An update, or a gradient where those are pushed, is clipped over all shards to L2 norm C. Each value then gets Gaussian noise
  of standard deviation SIGMA * C. Both happen here, before anything leaves: nobody has to trust the server.
- All that comes after is made of noised values alone: error feedback keeps what the coder left of them, and the worker
  computes on its own updates as they were sent. So coding, residuals and repeats cost no privacy (post-processing;
  Dwork and Roth 2014, prop. 2.1).
- Each push counts. Any two updates are at most 2 C apart, so epsilon is that of a Gaussian mechanism with noise SIGMA / 2,
  composed over the pushes (Mironov 2017). It holds against everybody, whichever data this worker has. Neither the others' noise
  nor sampling makes it less, for every worker takes part in every clock, and the server sees who sent what.
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

DELTA = 1e-5  # at which epsilon is told
CHUNK = 1 << 16  # values that are looked at and changed at once
# Renyi orders that the least epsilon is sought among: those of opacus, and some beyond both ends, for few and for many pushes.
ORDERS = [1.001, 1.01, 1.03, 1.05, *(1 + x / 10 for x in range(1, 100)), *range(12, 64), 128, 256, 512, 1024, 4096]


class UpdatePrivacy:
    """`clip`: C. `sigma`: SIGMA, 0: no noise. `random`: where noise comes from, by default seeded by the system."""

    def __init__(self, clip: float, sigma: float, random: np.random.Generator | None = None) -> None:
        self.clip, self.sigma = clip, sigma
        self.random = random or np.random.default_rng()
        self.pushes = 0

    @staticmethod
    def of(settings: Settings) -> UpdatePrivacy | None:
        """None where nothing is asked for. Raises UsageError where epsilon could not be told."""
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
        """There is noise, and so a promise."""
        return self.sigma > 0

    def hide(self, update: Sequence[FloatArray]) -> None:
        """Change an update, the values of each shard, in place. NonFiniteError changes nothing."""
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
            warnings.simplefilter("ignore")  # that a wider range of orders would show less
            return float(accountant.get_epsilon(DELTA, alphas=ORDERS))

    def figures(self) -> dict[str, float]:
        """For the record."""
        return {"pushes": self.pushes, "epsilon": round(self.epsilon(), 4), "delta": DELTA}

    def check(self, model: torch.nn.Module) -> None:
        """Raise UsageError where buffers of the model would tell what is hidden."""
        for name, module in model.named_modules():
            if self.hides and getattr(module, "track_running_stats", False):
                raise UsageError(
                    f"--dp-noise: the running statistics of {name!r} are of this worker's data, and get no noise: use a "
                    "layer without them (GroupNorm, LayerNorm), or track_running_stats=False"
                )
