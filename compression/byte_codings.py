"""Byte codings, the last stage of a chain: they shorten the bytes of a body.

BYTE_CODINGS has the wire ids; 0 stands for a body without byte coding.
"""

from typing import Protocol

import lz4.block
import numpy as np

from narrows.compression.buffers import ByteArray, read_only
from narrows.compression.errors import PayloadError

PLAIN_BYTES = 0  # the wire id of a body without byte coding


class ByteCoding(Protocol):
    """Shortens bytes without loss. It has no state."""

    wire_id: int
    spec: str  # the stage in a SPEC, as parse() reads it

    def encode(self, body: ByteArray) -> bytes | None:
        """Return fewer bytes than `body` has, or None if that is not possible. Then the payload has no byte coding."""

    def decode(self, coded: ByteArray, raw_bytes_max: int) -> ByteArray:
        """Return the body of coded bytes.

        Args:
            coded: the bytes, not trusted.
            raw_bytes_max: the largest size of the body; no more memory is allocated.

        Raises:
            PayloadError: the bytes are damaged, or their body would be larger.
        """


LZ4_RAW_BYTES_MAX = 0x7E000000  # the largest input of one LZ4 block
LZ4_RATIO_MAX = 255  # a length byte of an LZ4 block stands for at most 255 bytes of output


class Lz4:
    """u32 raw byte count, then one LZ4 block. Bodies above LZ4_RAW_BYTES_MAX (2 GB) are not coded."""

    wire_id = 1
    spec = "lz4"

    def encode(self, body: ByteArray) -> bytes | None:
        if not 0 < body.size <= LZ4_RAW_BYTES_MAX:
            return None
        coded: bytes = lz4.block.compress(body, store_size=True)
        return coded if len(coded) < body.size else None

    def decode(self, coded: ByteArray, raw_bytes_max: int) -> ByteArray:
        raw_bytes = int.from_bytes(coded[:4].tobytes(), "little")
        if coded.size <= 4 or raw_bytes > min(raw_bytes_max, LZ4_RATIO_MAX * coded.size):
            raise PayloadError(f"payload is corrupt: {coded.size} bytes of lz4 cannot be the {raw_bytes} they claim")
        try:
            raw: bytes = lz4.block.decompress(coded[4:], uncompressed_size=raw_bytes)
        except lz4.block.LZ4BlockError as error:
            raise PayloadError("payload is corrupt: its lz4 block does not decompress") from error
        if len(raw) != raw_bytes:
            raise PayloadError(f"payload is corrupt: its lz4 block holds {len(raw)} bytes and claims {raw_bytes}")
        return read_only(np.frombuffer(raw, np.uint8))


LZ4 = Lz4()
BYTE_CODINGS: dict[int, ByteCoding] = {LZ4.wire_id: LZ4}
