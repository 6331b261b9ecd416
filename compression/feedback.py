"""Error feedback: the sender adds what compression left out of one update, the residual, to the next update.

The method is that of Seide et al. 2014. With error feedback biased compressors converge as plain SGD does
(Karimireddy et al. 2019, 1901.09847).

Rule (conservation): decode(payload) + residual after = fl(decay * residual before + update), for each value. The
difference is exact in float32 for values that a sparsifier leaves out, and for fp16, bf16, int8 and int4 unless a value
saturates. For 2bit, sign and uint8minmax it is rounded to float32 once.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import (
    ChunkedUpdate,
    CodedCopy,
    FloatArray,
    Parts,
    Payload,
    chunks_of,
    values_view,
)
from narrows.compression.compressor import LAST, Compressor
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import accumulate
from narrows.compression.reducers import Memory
from narrows.compression.value_codings import non_finite

State = dict[str, npt.NDArray[Any]]


def checked_update(update: FloatArray | ChunkedUpdate, count: int, lossless: bool) -> FloatArray | ChunkedUpdate:
    """Check an update before it is added to a residual.

    Args:
        update: float32[count], contiguous, or in chunks.
        count: the number of values of the stream.
        lossless: the compressor is lossless, so NaN and infinity may pass.

    Returns:
        The update, of an array a read-only view.

    Raises:
        TypeError: another dtype or shape.
        ValueError: another size.
        NonFiniteError: the compressor is lossy and a value is NaN or infinite.
    """
    if isinstance(update, np.ndarray):
        update = values_view(update, "update")
    if update.size != count:
        raise ValueError(f"update has {update.size} values; this stream has {count}")
    # Checked first: a NaN in the residual would stay there for ever.
    if not lossless and any(cpu.largest_key(values) >= INFINITY_KEY for _, values in chunks_of(update)):
        raise non_finite(update)
    return update


def restored(state: State, name: str, count: int) -> FloatArray | None:
    """Return a copy of an array float32[count] of a saved state; None if the state has no such entry.

    Raises:
        ValueError: the entry has another dtype or size.
    """
    values = state.get(name)
    if values is None:
        return None
    if values.shape != (count,) or values.dtype != np.float32:
        raise ValueError(f"{name} is {values.dtype}{list(values.shape)}; this stream needs float32[{count}]")
    return values.copy()


def memory_state(memory: Memory) -> State:
    """Return the saved form of a memory: its step."""
    return {"step": np.array(memory.step, np.int64)}


def load_memory(memory: Memory, state: State) -> None:
    """Load the step of a saved state; without such an entry the memory stays as it is."""
    memory.go_to(int(state.get("step", np.array(memory.step))))


class ErrorFeedback:
    """A compressor and the residual of one stream of updates. One thread at a time may use it.

    Attributes:
        compressor: the compressor, as a contraction.
        residual: float32[count], or None, which stands for zeros. With a lossless compressor there is a residual only
            between `restore` and the next encode.
        memory: the memory of the stream.
        coded: None; see `Piece.on_device`.
    """

    coded: CodedCopy | None = None

    def __init__(self, compressor: Compressor, count: int, *, decay: float = 1.0, seed: int = 0) -> None:
        """Begin a stream with a residual of zeros.

        Args:
            compressor: any compressor; its `contraction` is used.
            count: the number of values of each update.
            decay: the factor on the residual before an update is added, from 0 to 1; 1 keeps all of it.
            seed: 32 bits; streams with different seeds draw different random numbers.

        Raises:
            ValueError: `decay` is not from 0 to 1.
        """
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be from 0 to 1, not {decay}")
        self.compressor = compressor.contraction()
        self.count = count
        self.decay = np.float32(decay)
        self.memory = Memory(seed)
        self.residual: FloatArray | None = None if compressor.lossless else np.zeros(count, np.float32)

    def start_encode(self, update: FloatArray | ChunkedUpdate) -> None:
        """Do nothing. On a device this launches the encode of the update that `encode` gets next."""

    def drop_encode(self) -> None:
        """Do nothing. On a device this gives up an encode that `start_encode` has launched."""

    def encode(self, update: FloatArray | ChunkedUpdate) -> memoryview:
        """Encode decay * residual + update. What the payload leaves out becomes the residual.

        Args:
            update: float32[count], contiguous, or in chunks. It is not changed.

        Returns:
            The payload.

        Raises:
            NonFiniteError: the compressor is lossy, and the update holds NaN or infinity: the residual stays as it was.
                Or finite values overflow when they are added or coded: then the residual is decay * residual + update.
            TypeError, ValueError: the update has another dtype, shape or size.
        """
        parts = self.encode_parts(update)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def encode_parts(self, update: FloatArray | ChunkedUpdate) -> Parts:
        """Encode in parts (`Compressor.encode_parts`). For `dense` without residual the second is `update` itself."""
        values = self._sum(update)
        if self.compressor.lossless:
            self.residual = None
            return self.compressor.encode_parts(values, self.memory)
        payload = self.compressor.encode(values, self.memory)
        accumulate(payload, -1.0, values)
        return [payload]

    def take(self, update: FloatArray | ChunkedUpdate) -> FloatArray:
        """Return decay * residual + update, to be sent uncoded. The residual is zero then.

        Raises:
            NonFiniteError, TypeError, ValueError: as `encode`; then nothing has changed.
        """
        values = self._sum(update)
        self.forget()
        return values

    def encode_last(self, update: FloatArray | ChunkedUpdate, cuts: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Encode decay * residual + update with `LAST`, as the last update of the stream.

        The residual is that sum until `forget`, whether the call ends or raises.

        Args:
            update: as in `encode`.
            cuts: the values [begin, end) of each payload.

        Raises:
            NonFiniteError, TypeError, ValueError: as `encode`.
        """
        values = self._sum(update)
        return [LAST.encode(values[begin:end]) for begin, end in cuts]

    def forget(self) -> None:
        """Set the residual to zero: `encode_last` has sent it."""
        self.residual = None if self.compressor.lossless else np.zeros(self.count, np.float32)

    def _sum(self, update: FloatArray | ChunkedUpdate) -> FloatArray:
        """Return decay * residual + update: in the memory of the residual, or the update itself without a residual."""
        update = checked_update(update, self.count, self.compressor.lossless)
        if self.residual is None:
            if isinstance(update, np.ndarray):
                return update
            self.residual = np.zeros(self.count, np.float32)
        elif self.decay != 1.0:
            np.multiply(self.residual, self.decay, out=self.residual)
        for begin, values in chunks_of(update):
            part = self.residual[begin : begin + values.size]
            np.add(part, values, out=part)
        return self.residual

    def change(self, compressor: Compressor) -> None:
        """Change to another compressor. The residual stays; a lossless compressor sends it with the next update."""
        self.compressor = compressor.contraction()
        if self.residual is None and not compressor.lossless:
            self.residual = np.zeros(self.count, np.float32)

    def restore(self, payload: Payload, weight: float = 1.0) -> None:
        """Add weight * payload to the residual, so that it is sent with the next update.

        Args:
            payload: a payload of this stream that was not sent, or that the receiver has definitely refused.
            weight: the share of the payload that was refused.

        Raises:
            PayloadError: the payload is not one of `count` values.
        """
        if self.residual is None:
            self.residual = np.zeros(self.count, np.float32)
        accumulate(payload, weight, self.residual)

    def state_dict(self) -> State:
        """Return copies of "step", and of "residual" if there is one. Any compressor can load the state."""
        residual = {} if self.residual is None else {"residual": self.residual.copy()}
        return memory_state(self.memory) | residual

    def load_state_dict(self, state: State) -> None:
        """Load the step and the residual of a saved state, whatever the compressor was that kept it.

        Args:
            state: as `state_dict` returns it. Without "residual" the residual is zero, without "step" the step stays.

        Raises:
            ValueError: the residual has another dtype or size; then nothing has changed.
        """
        residual = restored(state, "residual", self.count)
        if residual is None and not self.compressor.lossless:
            residual = np.zeros(self.count, np.float32)
        self.residual = residual
        load_memory(self.memory, state)
