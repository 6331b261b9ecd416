"""Compressors: values to payload. A Chain is (reducer or none) + value coding + (byte coding or none).

The axes do not know each other; what a payload says of them is in payload.py. Compressors keep no state between calls:
what a stream of updates keeps is in its Memory, and its residual is ErrorFeedback's.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrows.compression.buffers import ByteArray, FloatArray, Parts, values_view
from narrows.compression.byte_codings import PLAIN_BYTES, ByteCoding
from narrows.compression.index_codings import EVERY_INDEX, CodedIndices
from narrows.compression.kernels import cpu
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import COUNT_MAX, HEADER_BYTES, Header
from narrows.compression.reducers import DENSE_COUNT_MAX, Memory, ReducedValues, Reducer
from narrows.compression.value_codings import FP32, ValueCoding, non_finite


class Compressor(Protocol):
    """One compressor, as `parse` returns it. Safe to share between threads; a Memory is not."""

    @property
    def spec(self) -> str:
        """Canonical: parse(spec).spec == spec."""

    @property
    def lossless(self) -> bool:
        """decode(encode(x)) is x bit for bit, so error feedback has nothing to keep."""

    @property
    def sparse(self) -> bool:
        """Payloads of more than DENSE_COUNT_MAX values hold some of them, by index."""

    @property
    def unbiased(self) -> bool:
        """The mean of decode(encode(x)) over the keys of a Memory is x, but for values that saturate."""

    def contraction(self) -> "Compressor":
        """The compressor as error feedback needs it: itself, but for one that scales values up to be unbiased."""

    def encode(self, values: FloatArray, memory: Memory | None = None) -> memoryview:
        """values: float32[count], 1-D and contiguous, not changed. A self-describing payload that the caller owns.

        memory: the stream's, taken one step further; None: a fresh one. NonFiniteError for NaN or infinity, unless
        lossless; TypeError for another dtype or shape.
        """

    def encode_parts(self, values: FloatArray, memory: Memory | None = None) -> Parts:
        """The payload as buffers to be sent one after the other; their concatenation is encode(values).

        For `dense` these are a header and `values` itself: the caller must not write to it until both are sent.
        """

    def payload_bytes_max(self, count: int) -> int:
        """A bound on the payload of any `count` values."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Reducer, value coding and byte coding, one after the other; None leaves a stage out."""

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

    def encode(self, values: FloatArray, memory: Memory | None = None) -> memoryview:
        parts = self.encode_parts(values, memory)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def encode_parts(self, values: FloatArray, memory: Memory | None = None) -> Parts:
        values = values_view(values, "values")
        if values.size > COUNT_MAX:
            raise ValueError(f"{values.size} values do not fit one payload; at most {COUNT_MAX} do")
        memory = memory or Memory()
        if self.reducer is None and self.value_coding is FP32 and self.byte_coding is None:
            memory.step += 1
            # An empty memoryview cannot be cast, and an empty part would be an empty frame to a transport.
            body: Parts = [values.data.cast("B")] if values.size else []
            return [self._header(values.size, values.size, ALL, PLAIN_BYTES).pack(), *body]
        reduced = ReducedValues(values, ALL)
        if self.reducer is not None:
            if values.size > DENSE_COUNT_MAX:
                reduced = self.reducer.reduce(values, memory)
            elif cpu.largest_key(values) >= INFINITY_KEY:
                raise non_finite(values)
        payload = self._payload(values.size, reduced, memory)
        memory.step += 1
        if self.byte_coding is not None:
            coded = self.byte_coding.encode(payload[HEADER_BYTES:])
            if coded is not None:
                header = self._header(values.size, reduced.values.size, reduced.indices, self.byte_coding.wire_id)
                return [header.pack(), coded]
        return [payload.data]

    def payload_bytes_max(self, count: int) -> int:
        kept, index_bytes = count, 0
        if self.reducer is not None and count > DENSE_COUNT_MAX:
            kept, index_bytes = self.reducer.kept_max(count), self.reducer.index_bytes_max(count)
        # lz4 is left out where it does not pay, so it adds nothing.
        return HEADER_BYTES + self.value_coding.byte_count(kept) + index_bytes

    def _header(self, count: int, kept: int, indices: CodedIndices, byte_coding: int) -> Header:
        return Header(indices.wire_id, self.value_coding.wire_id, byte_coding, count, kept, indices.parameter)

    def _payload(self, count: int, reduced: ReducedValues, memory: Memory) -> ByteArray:
        """The whole payload, the byte coding aside."""
        values, indices = reduced
        value_end = HEADER_BYTES + self.value_coding.byte_count(values.size)
        payload: ByteArray = np.empty(value_end + indices.section.size, np.uint8)
        header = self._header(count, values.size, indices, PLAIN_BYTES)
        payload[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        self.value_coding.encode(values, memory.key, payload[HEADER_BYTES:value_end])
        payload[value_end:] = indices.section
        return payload


ALL = CodedIndices(EVERY_INDEX, 0, np.empty(0, np.uint8))
