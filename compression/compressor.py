"""The interface of a compressor, and `Chain`: a reducer or none, a value coding, and a byte coding or none.

The stages do not know each other; the header of a payload names them (payload.py). A compressor keeps no state between
calls. The state of a stream of updates is its `Memory` and the residual of its `ErrorFeedback`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrows.compression.buffers import (
    ByteArray,
    ChunkedUpdate,
    Parts,
    Values,
    bytes_view,
    chunks_of,
    values_view,
    written,
)
from narrows.compression.byte_codings import LZ4, PLAIN_BYTES, ByteCoding
from narrows.compression.index_codings import EVERY_INDEX, CodedIndices
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import COUNT_MAX, HEADER_BYTES, Header
from narrows.compression.reducers import DENSE_COUNT_MAX, Memory, ReducedValues, Reducer
from narrows.compression.value_codings import FP32, INT12, ValueCoding, non_finite


class Compressor(Protocol):
    """A compressor, as `parse` returns it. Several threads may share it, but not a `Memory`."""

    @property
    def spec(self) -> str:
        """The SPEC in canonical form: parse(spec).spec == spec."""

    @property
    def lossless(self) -> bool:
        """True if decode(encode(x)) is x, bit for bit. Then error feedback has nothing to keep."""

    @property
    def sparse(self) -> bool:
        """True if a payload of more than DENSE_COUNT_MAX values holds some of them, with their indices."""

    @property
    def unbiased(self) -> bool:
        """True if the mean of decode(encode(x)) over the keys of a Memory is x, except for values that saturate."""

    def contraction(self) -> "Compressor":
        """Return the compressor that error feedback needs.

        It is this compressor, unless this one scales values up to be unbiased: then it is the same one without scaling.
        """

    def encode(self, values: Values, memory: Memory | None = None) -> memoryview:
        """Encode values as a payload that describes itself.

        Args:
            values: float32[count], contiguous, or in chunks. It is not changed.
            memory: the memory of the stream, which takes one step; None: a fresh memory.

        Returns:
            The payload, of bytes that never change.

        Raises:
            NonFiniteError: the compressor is lossy, and a value is NaN or infinite or overflows when it is coded.
            TypeError: `values` has another dtype or shape.
            ValueError: there are more values than a payload holds, 2**32 - 1.
        """

    def encode_parts(self, values: Values, memory: Memory | None = None) -> Parts:
        """Encode values as buffers that are sent one after the other. Their concatenation is encode(values).

        For `dense` the buffers are a header and `values` itself: the caller must not write to `values` until both are
        sent. Arguments and errors as in `encode`.
        """

    def payload_bytes_max(self, count: int) -> int:
        """Return the largest size in bytes of a payload of `count` values, whatever the values."""

    def scratch_bytes_max(self, count: int) -> int:
        """Return the most memory that an encode of `count` values takes beside the values and their payload, in bytes."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Reducer, value coding and byte coding, one after the other. None: the chain has no such stage."""

    reducer: Reducer | None
    value_coding: ValueCoding
    byte_coding: ByteCoding | None

    @property
    def spec(self) -> str:
        stages = (self.reducer, self.value_coding, self.byte_coding)
        return "+".join(stage.spec for stage in stages if stage and stage.spec) or "dense"

    @property
    def lossless(self) -> bool:
        return self.reducer is None and self.value_coding.lossless

    @property
    def sparse(self) -> bool:
        return self.reducer is not None

    @property
    def unbiased(self) -> bool:
        return (self.reducer is None or self.reducer.unbiased) and self.value_coding.unbiased

    def contraction(self) -> "Chain":
        return Chain(self.reducer.contraction(), self.value_coding, self.byte_coding) if self.reducer else self

    def encode(self, values: Values, memory: Memory | None = None) -> memoryview:
        parts = self.encode_parts(values, memory)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def encode_parts(self, values: Values, memory: Memory | None = None) -> Parts:
        if isinstance(values, ChunkedUpdate) and values.small:
            _, values = next(chunks_of(values))
        if isinstance(values, np.ndarray):
            values = values_view(values, "values")
        if values.size > COUNT_MAX:
            raise ValueError(f"{values.size} values do not fit one payload; at most {COUNT_MAX} do")
        memory = memory or Memory()
        if (
            isinstance(values, np.ndarray)
            and self.reducer is None
            and self.value_coding is FP32
            and not self.byte_coding
        ):
            memory.advance()
            # An empty memoryview cannot be cast, and an empty part would be an empty frame to a transport.
            body: Parts = [values.data.cast("B")] if values.size else []
            return [self._header(values.size, values.size, ALL, PLAIN_BYTES).pack(), *body]
        reduced = ReducedValues(values, ALL)
        if self.reducer is not None:
            if values.size > DENSE_COUNT_MAX:
                reduced = self.reducer.reduce(values, memory)
            elif any(cpu.largest_key(part) >= INFINITY_KEY for _, part in chunks_of(values)):
                raise non_finite(values)
        payload = self._payload(values.size, reduced, memory)
        memory.advance()
        if self.byte_coding is not None:
            coded = self.byte_coding.encode(bytes_view(payload)[HEADER_BYTES:])
            if coded is not None:
                header = self._header(values.size, reduced.values.size, reduced.indices, self.byte_coding.wire_id)
                return [header.pack(), coded]
        return [payload]

    def payload_bytes_max(self, count: int) -> int:
        kept, index_bytes = count, 0
        if self.reducer is not None and count > DENSE_COUNT_MAX:
            kept, index_bytes = self.reducer.kept_max(count), self.reducer.index_bytes_max(count)
        # A payload that lz4 does not shorten travels without lz4, so the byte coding adds nothing.
        return HEADER_BYTES + self.value_coding.byte_count(kept) + index_bytes

    def scratch_bytes_max(self, count: int) -> int:
        reducing = self.reducer.scratch_bytes_max(count) if self.reducer is not None and count > DENSE_COUNT_MAX else 0
        packing = 2 * self.payload_bytes_max(count) if self.byte_coding is not None else 0  # LZ4's buffer, and its copy
        return reducing + packing

    def _header(self, count: int, kept: int, indices: CodedIndices, byte_coding: int) -> Header:
        return Header(indices.wire_id, self.value_coding.wire_id, byte_coding, count, kept, indices.parameter)

    def _payload(self, count: int, reduced: ReducedValues, memory: Memory) -> bytes:
        """Return the whole payload, before byte coding."""
        values, indices = reduced
        value_end = HEADER_BYTES + self.value_coding.byte_count(values.size)
        header = self._header(count, values.size, indices, PLAIN_BYTES)

        def write(payload: ByteArray) -> None:
            payload[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
            self.value_coding.encode(values, memory.key, payload[HEADER_BYTES:value_end])
            payload[value_end:] = indices.section

        return written(value_end + indices.section.size, write)


ALL = CodedIndices(EVERY_INDEX, 0, np.empty(0, np.uint8))

# The compressor of the last update of a stream, which nothing follows: what it leaves out of a value is lost, at most
# 1/4062 of the largest of the value's block of 256. So two workers push 0.75 models. lz4 shortens zeros.
LAST = Chain(None, INT12, LZ4)
