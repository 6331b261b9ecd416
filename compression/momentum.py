"""Deep Gradient Compression (Lin et al. 2018, 1712.01887): sparse gradients with momentum correction."""

import numpy as np

from narrows.compression.buffers import FloatArray
from narrows.compression.compressor import Compressor
from narrows.compression.feedback import State, checked_update, load_memory, memory_state, restored
from narrows.compression.payload import accumulate, indices
from narrows.compression.reducers import Memory

# Densities of the warm-up, one for each quarter of it (sec. 3.4).
WARM_UP_DENSITIES = (0.25, 0.0625, 0.015625, 0.004)


class MomentumCorrection:
    """The second wrapper beside ErrorFeedback: what is kept back is gathered with momentum. Not for two threads at once.

    velocity = momentum * velocity + gradient; residual = residual + velocity; what `compressor` takes of the residual is
    sent. A value that was sent leaves its velocity at zero, so that old momentum does not carry it on ("masking", sec. 3.3;
    a compressor that sends all values masks none). The receiver applies plain SGD, without momentum of its own. For the
    first `warm_up_steps` at least 25, 6.25, 1.5625 and 0.4 % of all values are kept, a quarter of these steps each.
    """

    def __init__(
        self, compressor: Compressor, count: int, *, momentum: float = 0.9, warm_up_steps: int = 0, seed: int = 0
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
        self.compressor = compressor.contraction()
        self.count = count
        self.momentum = np.float32(momentum)
        self.warm_up_steps = warm_up_steps
        self.memory = Memory(seed)
        self.velocity: FloatArray = np.zeros(count, np.float32)
        self.residual: FloatArray = np.zeros(count, np.float32)

    def encode(self, gradient: FloatArray) -> memoryview:
        """Payload of what is sent of float32[count]; NonFiniteError for NaN or infinity in it changes nothing.

        Finite values that overflow once they are added or coded are the same error; they are in velocity and residual then.
        """
        gradient = checked_update(gradient, self.count, lossless=False)
        np.multiply(self.velocity, self.momentum, out=self.velocity)
        np.add(self.velocity, gradient, out=self.velocity)
        np.add(self.residual, self.velocity, out=self.residual)
        compressor = self.compressor
        if self.memory.step < self.warm_up_steps:
            quarter = 4 * self.memory.step // self.warm_up_steps
            compressor = compressor.at_density(WARM_UP_DENSITIES[quarter])
        payload = compressor.encode(self.residual, self.memory)
        accumulate(payload, -1.0, self.residual)
        sent = indices(payload, self.count)
        if sent is not None:
            self.velocity[sent] = 0.0
        return payload

    def change(self, compressor: Compressor) -> None:
        """Goes on with another compressor; residual and velocity stay."""
        self.compressor = compressor.contraction()

    def state_dict(self) -> State:
        """Copies: "step", "residual" and "velocity". Good under any other compressor too."""
        return memory_state(self.memory) | {"residual": self.residual.copy(), "velocity": self.velocity.copy()}

    def load_state_dict(self, state: State) -> None:
        """Takes over a state kept under any compressor, or ErrorFeedback's, whose velocity is zero; ValueError."""
        residual, velocity = (restored(state, name, self.count) for name in ("residual", "velocity"))
        self.residual = np.zeros(self.count, np.float32) if residual is None else residual
        self.velocity = np.zeros(self.count, np.float32) if velocity is None else velocity
        load_memory(self.memory, state)
