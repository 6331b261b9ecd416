"""Error feedback: what a lossy compressor leaves out of one update is added to the next (Seide et al. 2014;
Karimireddy et al. 2019, 1901.09847: with it, biased compressors converge as plain SGD does).

Rule (conservation): decode(payload) + residual after = fl(residual before + update), elementwise. For every member that
exists today the difference is exact in float32, except fp16 values beyond 65504 and int8 blocks beyond 3.36e38.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import FloatArray, Parts, Payload, values_view
from narrows.compression.compressor import Compressor
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import accumulate
from narrows.compression.value_codings import non_finite


class ErrorFeedback:
    """Wraps any compressor with the residual of one stream of `count` values. Not for two threads at once.

    residual: float32[count], or None, which stands for zeros: a lossless compressor needs it only between a restored
    payload and the next encode.
    """

    def __init__(self, compressor: Compressor, count: int) -> None:
        self.compressor = compressor
        self.count = count
        self.residual: FloatArray | None = None if compressor.lossless else np.zeros(count, np.float32)

    def encode(self, update: FloatArray) -> memoryview:
        """Payload of residual + update, float32[count]; what it does not carry becomes the residual.

        NonFiniteError (lossy compressors) for NaN or infinity in update leaves the residual as it was; update is never
        changed. (A sum that overflows float32 is the same error, but the stream is beyond repair then.)
        """
        parts = self.encode_parts(update)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def encode_parts(self, update: FloatArray) -> Parts:
        """As `encode`, in parts; for `dense` the second is `update` itself (see Compressor.encode_parts)."""
        update = values_view(update, "update")
        if update.size != self.count:
            raise ValueError(f"update has {update.size} values; this stream has {self.count}")
        residual = self.residual
        if residual is None:
            return self.compressor.encode_parts(update)
        if self.compressor.lossless:
            self.residual = None
            np.add(residual, update, out=residual)
            return self.compressor.encode_parts(residual)
        # Looked at first: once NaN is in the residual, nothing gets it out again.
        if cpu.largest_key(update) >= INFINITY_KEY:
            raise non_finite(update)
        np.add(residual, update, out=residual)
        payload = self.compressor.encode(residual)
        accumulate(payload, -1.0, residual)
        return [payload]

    def restore(self, payload: Payload, weight: float = 1.0) -> None:
        """Gives `weight` of a payload that was definitely refused back to the residual, to be sent with the next."""
        if self.residual is None:
            self.residual = np.zeros(self.count, np.float32)
        accumulate(payload, weight, self.residual)

    def state_dict(self) -> dict[str, npt.NDArray[Any]]:
        """{"residual": a copy}, or {} while there is none."""
        return {} if self.residual is None else {"residual": self.residual.copy()}

    def load_state_dict(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Takes over a residual kept under any compressor; a lossless one sends it with its next update."""
        residual = state.get("residual")
        if residual is None:
            self.residual = None if self.compressor.lossless else np.zeros(self.count, np.float32)
            return
        if residual.shape != (self.count,) or residual.dtype != np.float32:
            raise ValueError(
                f"residual is {residual.dtype}{list(residual.shape)}; this stream needs float32[{self.count}]"
            )
        self.residual = residual.copy()
