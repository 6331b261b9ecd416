"""Error feedback: what a lossy compressor leaves out of one update is added to the next (Seide et al. 2014;
Karimireddy et al. 2019, 1901.09847: with it, biased compressors converge as plain SGD does).

Rule (conservation): decode(payload) + residual after = fl(decay * residual before + update), elementwise. The difference
is exact in float32 for what a sparsifier leaves out and for fp16, bf16, int8 and int4 (but where they saturate), and
rounded to float32 once for 2bit, sign and uint8minmax.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import FloatArray, Parts, Payload, values_view
from narrows.compression.compressor import Compressor
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import accumulate
from narrows.compression.reducers import Memory
from narrows.compression.value_codings import non_finite

State = dict[str, npt.NDArray[Any]]


def checked_update(update: FloatArray, count: int, lossless: bool) -> FloatArray:
    """A read-only view of float32[count]; ValueError for another size, NonFiniteError (lossy) for NaN or infinity."""
    update = values_view(update, "update")
    if update.size != count:
        raise ValueError(f"update has {update.size} values; this stream has {count}")
    # Looked at first: once NaN is in the residual, nothing gets it out again.
    if not lossless and cpu.largest_key(update) >= INFINITY_KEY:
        raise non_finite(update)
    return update


def restored(state: State, name: str, count: int) -> FloatArray | None:
    """A copy of float32[count] in a state; ValueError for another type or size."""
    values = state.get(name)
    if values is None:
        return None
    if values.shape != (count,) or values.dtype != np.float32:
        raise ValueError(f"{name} is {values.dtype}{list(values.shape)}; this stream needs float32[{count}]")
    return values.copy()


def memory_state(memory: Memory) -> State:
    return {"step": np.array(memory.step, np.int64)}


def load_memory(memory: Memory, state: State) -> None:
    """A state that says nothing of steps leaves them as they are."""
    memory.step = int(state.get("step", np.array(memory.step)))


class ErrorFeedback:
    """Wraps any compressor with the residual of one stream of `count` values. Not for two threads at once.

    residual: float32[count], or None, which stands for zeros: a lossless compressor needs it only between a restored
    payload and the next encode. decay: what a residual is multiplied with before an update is added; 1 keeps all.
    seed: tells the random numbers of streams apart, 32 bits.
    """

    def __init__(self, compressor: Compressor, count: int, *, decay: float = 1.0, seed: int = 0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be from 0 to 1, not {decay}")
        self.compressor = compressor.contraction()
        self.count = count
        self.decay = np.float32(decay)
        self.memory = Memory(seed)
        self.residual: FloatArray | None = None if compressor.lossless else np.zeros(count, np.float32)

    def encode(self, update: FloatArray) -> memoryview:
        """Payload of decay * residual + update, float32[count]; what it does not carry becomes the residual.

        NonFiniteError (lossy compressors) for NaN or infinity in update leaves the residual as it was; update is never
        changed. Finite values that overflow once they are added or coded are the same error; the residual is their sum then.
        """
        parts = self.encode_parts(update)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def encode_parts(self, update: FloatArray) -> Parts:
        """As `encode`, in parts; for `dense` the second is `update` itself (see Compressor.encode_parts)."""
        update = checked_update(update, self.count, self.compressor.lossless)
        residual = self.residual
        if residual is None:
            return self.compressor.encode_parts(update, self.memory)
        if self.decay != 1.0:
            np.multiply(residual, self.decay, out=residual)
        np.add(residual, update, out=residual)
        if self.compressor.lossless:
            self.residual = None
            return self.compressor.encode_parts(residual, self.memory)
        payload = self.compressor.encode(residual, self.memory)
        accumulate(payload, -1.0, residual)
        return [payload]

    def change(self, compressor: Compressor) -> None:
        """Goes on with another compressor; the residual stays, and a lossless one sends it with its next update."""
        self.compressor = compressor.contraction()
        if self.residual is None and not compressor.lossless:
            self.residual = np.zeros(self.count, np.float32)

    def restore(self, payload: Payload, weight: float = 1.0) -> None:
        """Gives `weight` of a payload that was definitely refused back to the residual, to be sent with the next."""
        if self.residual is None:
            self.residual = np.zeros(self.count, np.float32)
        accumulate(payload, weight, self.residual)

    def state_dict(self) -> State:
        """Copies: "step", and "residual" where there is one. Good under any other compressor too."""
        residual = {} if self.residual is None else {"residual": self.residual.copy()}
        return memory_state(self.memory) | residual

    def load_state_dict(self, state: State) -> None:
        """Takes over a residual kept under any compressor; ValueError, with nothing changed, for one of another size."""
        residual = restored(state, "residual", self.count)
        if residual is None and not self.compressor.lossless:
            residual = np.zeros(self.count, np.float32)
        self.residual = residual
        load_memory(self.memory, state)
