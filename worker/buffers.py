"""Module buffers (BatchNorm): those that a checkpoint of the model itself would have, and what a worker sends of them."""

from __future__ import annotations

import torch

from narrows.protocols.plan import BUFFERS_BYTES_MAX, DTYPES, NamedArray, pack_arrays, unpack_arrays
from narrows.worker.flat import dtype_of, plain, raw_bytes
from narrows.worker.telling import say

LONG_BUFFERS = (
    "the module buffers take {:.0f} MB, more than {:.0f} MB: each worker keeps its own, and no checkpoint has them"
)
NOT_CARRIED = "the module buffer {!r} is {}, which is not sent: each worker keeps its own, and no checkpoint has it"


class Buffers:
    """The buffers of `model`. hidden: they are sent as they were before any data."""

    def __init__(self, model: torch.nn.Module, hidden: bool) -> None:
        self.model, self.hidden = model, hidden
        self._before = pack_buffers(model) if hidden else b""
        self._told = False  # that they are too long to be sent
        for name, buffer in _persistent(model).items():
            if not _travels(buffer):
                say(NOT_CARRIED.format(name, _kind(buffer)))

    @property
    def any(self) -> bool:
        """Whether the model has some that are sent."""
        return bool(self.packed())

    def kept(self) -> list[torch.Tensor]:
        """Copies, for `put_back`."""
        return [buffer.detach().clone() for buffer in self.model.buffers()]

    @torch.no_grad()
    def put_back(self, kept: list[torch.Tensor]) -> None:
        for buffer, values in zip(self.model.buffers(), kept, strict=True):
            buffer.copy_(values)

    def packed(self) -> bytes:
        """Pack the buffers that are sent; b"" where they are too long."""
        packed = self._before if self.hidden else pack_buffers(self.model)
        if len(packed) <= BUFFERS_BYTES_MAX:
            return packed
        if not self._told:
            say(LONG_BUFFERS.format(len(packed) / 1e6, BUFFERS_BYTES_MAX / 1e6))
        self._told = True
        return b""

    def load(self, packed: bytes) -> None:
        if packed:
            load_buffers(self.model, packed)


def pack_buffers(model: torch.nn.Module) -> bytes:
    """The persistent buffers of `model` by name, or b"" where it has none."""
    arrays: dict[str, NamedArray] = {
        name: (dtype_of(buffer), tuple(buffer.shape), raw_bytes(buffer).tobytes())
        for name, buffer in _persistent(model).items()
        if _travels(buffer)
    }
    return pack_arrays(arrays) if arrays else b""


def _persistent(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint of the model itself would have, by name."""
    kept = model.state_dict(keep_vars=True)
    return {plain(name): each for name, each in model.named_buffers(remove_duplicate=False) if name in kept}


def _travels(buffer: torch.Tensor) -> bool:
    return _kind(buffer) in DTYPES and bool(DTYPES[_kind(buffer)].file)


def _kind(buffer: torch.Tensor) -> str:
    """Its dtype, or its layout where it is not strided."""
    return dtype_of(buffer) if buffer.layout == torch.strided else str(buffer.layout).removeprefix("torch.")


def load_buffers(model: torch.nn.Module, packed: bytes) -> None:
    """Set the buffers of `model` that `packed` has under the same name and shape. Raises RemoteProtocolError."""
    mine = {plain(name): buffer for name, buffer in model.named_buffers(remove_duplicate=False)}
    with torch.no_grad():
        for name, (dtype, shape, raw) in unpack_arrays(packed).items():
            if name in mine and tuple(mine[name].shape) == shape and raw:
                flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))
                mine[name].copy_(flat.reshape(shape))
