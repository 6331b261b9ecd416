"""Compressors: values to payload. A Chain is (sparsifier or none) + value coding + (byte coding or none).

The axes do not know each other; what a payload says of them is in payload.py. Compressors keep no state between calls:
the residual is ErrorFeedback's.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from narrows.compression.buffers import ByteArray, FloatArray, Parts, values_view
from narrows.compression.byte_codings import PLAIN_BYTES, ByteCoding
from narrows.compression.index_codings import EVERY_INDEX
from narrows.compression.payload import COUNT_MAX, HEADER_BYTES, Header
from narrows.compression.sparsifiers import Sparsifier
from narrows.compression.value_codings import FP32, ValueCoding


class Compressor(Protocol):
    """What `parse` returns. Safe to share between threads."""

    @property
    def spec(self) -> str:
        """Canonical: parse(spec).spec == spec."""

    @property
    def lossless(self) -> bool:
        """decode(encode(x)) is x bit for bit, so error feedback has nothing to keep."""

    @property
    def sparse(self) -> bool:
        """Payloads hold some of the values, by index."""

    def encode(self, values: FloatArray) -> memoryview:
        """values: float32[count], 1-D and contiguous, not changed. A self-describing payload that the caller owns.

        NonFiniteError for NaN or infinity, unless lossless; TypeError for another dtype or shape.
        """

    def encode_parts(self, values: FloatArray) -> Parts:
        """The payload as buffers to be sent one after the other; their concatenation is encode(values).

        For `dense` these are a header and `values` itself: the caller must not write to it until both are sent.
        """

    def payload_bytes_max(self, count: int) -> int:
        """A bound on the payload of any `count` values; reached by some."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Sparsifier, value coding and byte coding, one after the other; None leaves a stage out."""

    spec: str
    sparsifier: Sparsifier | None
    value_coding: ValueCoding
    byte_coding: ByteCoding | None

    @property
    def lossless(self) -> bool:
        return self.sparsifier is None and self.value_coding.lossless

    @property
    def sparse(self) -> bool:
        return self.sparsifier is not None

    def encode(self, values: FloatArray) -> memoryview:
        parts = self.encode_parts(values)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    def encode_parts(self, values: FloatArray) -> Parts:
        values = values_view(values, "values")
        if values.size > COUNT_MAX:
            raise ValueError(f"{values.size} values do not fit one payload; at most {COUNT_MAX} do")
        if self.sparsifier is None and self.value_coding is FP32 and self.byte_coding is None:
            # An empty memoryview cannot be cast, and an empty part would be an empty frame to a transport.
            body: Parts = [values.data.cast("B")] if values.size else []
            return [self._header(values.size, values.size, 0).pack(), *body]
        header, payload = self._encode(values)
        if self.byte_coding is not None:
            coded = self.byte_coding.encode(payload[HEADER_BYTES:])
            if coded is not None:
                return [
                    self._header(header.count, header.kept, header.parameter, self.byte_coding.wire_id).pack(),
                    coded,
                ]
        return [payload.data]

    def payload_bytes_max(self, count: int) -> int:
        kept, index_bytes = count, 0
        if self.sparsifier is not None:
            kept = self.sparsifier.kept_max(count)
            index_bytes = self.sparsifier.index_coding.bytes_max(kept, count) if kept else 0
        # lz4 is left out where it does not pay, so it adds nothing.
        return HEADER_BYTES + self.value_coding.byte_count(kept) + index_bytes

    def _header(self, count: int, kept: int, parameter: int, byte_coding: int = PLAIN_BYTES) -> Header:
        index_coding = EVERY_INDEX if self.sparsifier is None else self.sparsifier.index_coding.wire_id
        return Header(index_coding, self.value_coding.wire_id, byte_coding, count, kept, parameter)

    def _encode(self, values: FloatArray) -> tuple[Header, ByteArray]:
        """Header and whole payload, the byte coding aside."""
        count, parameter, index_part = values.size, 0, np.empty(0, np.uint8)
        if self.sparsifier is not None:
            indices, values = self.sparsifier.select(values)
            if indices.size:
                parameter, index_part = self.sparsifier.index_coding.encode(indices, count)
        value_end = HEADER_BYTES + self.value_coding.byte_count(values.size)
        payload: ByteArray = np.empty(value_end + index_part.size, np.uint8)
        header = self._header(count, values.size, parameter)
        payload[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        self.value_coding.encode(values, payload[HEADER_BYTES:value_end])
        payload[value_end:] = index_part
        return header, payload
