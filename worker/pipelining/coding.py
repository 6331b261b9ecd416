"""Codes tensors to bytes for the channel between two stages, and back.

    payload = head | coded values
    head    = one byte with the number of blocks of HEAD_BYTES, then "float32 (8, 128)" in ASCII, padded with spaces

Dtype and shape must be the same at both ends. The receiver compares the head with the head of the tensor that it fills.

Rules
- A row of EDGE_CODINGS has one coding for activations and one for their gradients. int8 rounds activations to the
  nearest value. It rounds gradients at random, so that their rounding errors have mean zero.
- A tensor that is not of floating point is not coded.
"""

from __future__ import annotations

import numpy as np
import torch

from narrows.compression import NonFiniteError, PayloadError
from narrows.compression.buffers import bytes_view
from narrows.compression.value_codings import Key, ValueCoding
from narrows.protocols.errors import IncompatibleError, NarrowsError
from narrows.protocols.messages import Buffer

FORWARD, BACKWARD = 0, 1  # the columns of EDGE_CODINGS: activations, gradients
HEAD_BYTES = 64  # the head is a multiple of this, so the values after it are aligned


def head(tensor: torch.Tensor) -> bytes:
    """Return the head of a tensor: the number of blocks of HEAD_BYTES, dtype and shape."""
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}".encode()
    blocks = len(kind) // HEAD_BYTES + 1
    return bytes([blocks]) + kind.ljust(blocks * HEAD_BYTES - 1)


def framed(tensor: torch.Tensor, coding: ValueCoding, key: Key) -> Buffer:
    """Return the payload of a tensor: its head and its coded values.

    Args:
        tensor: any shape, dtype and device.
        coding: how the values are coded; a tensor that is not of floating point is sent as it is.
        key: the seed of random rounding, another one for each payload.

    Raises:
        NarrowsError: the coding is lossy and a value is not finite.
    """
    return encode(tensor, coding, key, head(tensor))


def opened(payload: Buffer, coding: ValueCoding, into: torch.Tensor, sender: str) -> None:
    """Decode a payload of `framed` into a tensor.

    Args:
        payload: the bytes from the sender, not trusted.
        coding: the coding that the sender used.
        into: the tensor that is filled; any device and strides.
        sender: the name of the sender, for the error.

    Raises:
        IncompatibleError: the payload has another dtype, shape or length, or is damaged.
    """
    view, expected = bytes_view(payload), head(into)
    length = HEAD_BYTES * int(view[0]) if len(view) else 0
    if (came := bytes(view[:length])) != expected:
        name = came[1:].decode("ascii", "replace").strip() or "nothing"
        wanted = expected[1:].decode().strip()
        raise IncompatibleError(
            f"{sender} has sent {name}, and {wanted} is expected: micro-batches of every step have the shape that "
            "PipelineStage was made with. Leave out a smaller last batch, as DataLoader(drop_last=True) does, or fill it up"
        )
    decode(view[length:].data, coding, into)


def encode(tensor: torch.Tensor, coding: ValueCoding, key: Key, before: bytes = b"") -> Buffer:
    """Return `before` and the coded values of a tensor, as a copy. Arguments as in `framed`.

    Raises:
        NarrowsError: the coding is lossy and a value is not finite.
    """
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
    """Decode the bytes of `encode` into a tensor of the same shape and dtype.

    Raises:
        IncompatibleError: the payload has another length, or is damaged.
    """
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
