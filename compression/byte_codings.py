"""The last stage: a body's bytes made fewer. BYTE_CODINGS is the wire's table; 0 is kept for "as they are"."""

from typing import Protocol

import lz4.block
import numpy as np

from narrows.compression.buffers import ByteArray, read_only
from narrows.compression.errors import PayloadError

PLAIN_BYTES = 0


class ByteCoding(Protocol):
    """A member of the axis: stateless."""

    wire_id: int
    spec: str

    def encode(self, body: ByteArray) -> bytes | None:
        """Fewer bytes than body, or None where that does not work out; the payload then travels without this stage."""

    def decode(self, coded: ByteArray, raw_bytes_max: int) -> ByteArray:
        """The body, or PayloadError; never allocates more than raw_bytes_max."""


LZ4_RAW_BYTES_MAX = 0x7E000000  # the largest input of one LZ4 block
LZ4_RATIO_MAX = 255  # a length byte of an LZ4 block stands for at most 255 bytes of output


class Lz4:
    """u32 raw byte count, then one LZ4 block. Bodies above LZ4_RAW_BYTES_MAX (2 GB) are left as they are."""

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
