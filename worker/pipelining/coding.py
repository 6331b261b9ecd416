"""Tensors to the bytes between two stages and back. A head of HEAD_BYTES, or of several, says dtype and shape: both ends must
have the same ones.

Rules
- A row of EDGE_CODINGS has how activations are coded, and how their gradients are. int8 rounds activations to the nearest
  value. It rounds gradients at random, so that what is lost of them has a mean of zero.
- A tensor of another type than floating point travels as it is.
"""

from __future__ import annotations

import numpy as np
import torch

from narrows.compression import NonFiniteError, PayloadError
from narrows.compression.buffers import bytes_view
from narrows.compression.value_codings import Key, ValueCoding
from narrows.protocols.errors import IncompatibleError, NarrowsError
from narrows.protocols.messages import Buffer

FORWARD, BACKWARD = 0, 1
HEAD_BYTES = 64  # values behind it are aligned


def head(tensor: torch.Tensor) -> bytes:
    """The number of its blocks of HEAD_BYTES, dtype and shape."""
    told = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}".encode()
    blocks = len(told) // HEAD_BYTES + 1
    return bytes([blocks]) + told.ljust(blocks * HEAD_BYTES - 1)


def framed(tensor: torch.Tensor, coding: ValueCoding, key: Key) -> Buffer:
    """A head, and the bytes of the tensor. Raises as `encode` does."""
    return encode(tensor, coding, key, head(tensor))


def opened(payload: Buffer, coding: ValueCoding, into: torch.Tensor, sender: str) -> None:
    """Fill a tensor with what `framed` has made. Raises IncompatibleError where dtype, shape or bytes are others."""
    view, expected = bytes_view(payload), head(into)
    length = HEAD_BYTES * int(view[0]) if len(view) else 0
    if (came := bytes(view[:length])) != expected:
        told = came[1:].decode("ascii", "replace").strip() or "nothing"
        wanted = expected[1:].decode().strip()
        raise IncompatibleError(
            f"{sender} has sent {told}, and {wanted} is expected: micro-batches of every step have the shape that "
            "PipelineStage was made with. Leave out a smaller last batch, as DataLoader(drop_last=True) does, or fill it up"
        )
    decode(view[length:].data, coding, into)


def encode(tensor: torch.Tensor, coding: ValueCoding, key: Key, before: bytes = b"") -> Buffer:
    """`before`, and the bytes of a tensor, a copy. Raises NarrowsError for a value that is not finite, where the coding is
    lossy."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    if coding.lossless or not tensor.is_floating_point():
        return memoryview(bytearray(before) + flat.view(torch.uint8).numpy().data)
    values = flat.to(torch.float32).numpy()
    out = np.empty(len(before) + coding.byte_count(values.size), np.uint8)
    out[: len(before)] = np.frombuffer(before, np.uint8)
    try:
        coding.encode(values, key, out[len(before) :])
    except NonFiniteError as error:
        raise NarrowsError(f"a tensor to the next stage has {error}; dense sends it as it is") from None
    return out.data


def decode(payload: Buffer, coding: ValueCoding, into: torch.Tensor) -> None:
    """Fill a tensor with what `encode` has made of one of its shape and dtype. Raises IncompatibleError for other bytes."""
    plain = coding.lossless or not into.is_floating_point()
    expected = into.numel() * into.element_size() if plain else coding.byte_count(into.numel())
    if len(payload) != expected:
        raise IncompatibleError(
            f"a tensor of {expected} bytes is expected, and one of {len(payload)} came: the stages differ in shape or dtype"
        )
    if not expected:
        return
    body, dtype, values = bytes_view(payload), into.dtype if plain else torch.float32, into.detach()
    if values.device.type != "cpu" or values.dtype is not dtype or not values.is_contiguous():
        values = torch.empty(into.shape, dtype=dtype)
    flat = values.view(-1)
    if plain:
        flat.view(torch.uint8).numpy()[:] = body
    else:
        array = flat.numpy()
        try:
            coding.open(body, array.size).part(0, array)
        except PayloadError as error:
            raise IncompatibleError(f"a tensor of another stage is damaged: {error}") from None
    if values.data_ptr() != into.data_ptr():
        with torch.no_grad():
            into.copy_(values)
