"""Module buffers, such as BatchNorm's statistics: a worker sends those that the model's state_dict() has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from narrows.protocols.config.model_spec import BUFFERS_BYTES_MAX, DTYPES, NamedArray, pack_arrays, unpack_arrays
from narrows.worker.model.flat import dtype_of, plain, raw_bytes
from narrows.worker.runtime.launcher_pipe import say

LONG_BUFFERS = (
    "the module buffers take {:.0f} MB, more than {:.0f} MB: each worker keeps its own, and no checkpoint has them"
)
MISFIT = (
    "the module buffer {!r} of another worker is {}, and here it is {}: it is left out; register the same buffers in each "
    "worker, before DistributedOptimizer is made"
)
NOT_CARRIED = "the module buffer {!r} is {}, which is not sent: each worker keeps its own, and no checkpoint has it"


class BufferState:
    """The persistent buffers of one model.

    Args:
        model: the module.
        hidden: send the buffers as they were before training, because later ones tell of the worker's data
            (--dp-noise).
    """

    def __init__(self, model: torch.nn.Module, hidden: bool) -> None:
        self.model, self.hidden = model, hidden
        self._before = pack_buffers(model) if hidden else b""
        self._told = False  # the user was told that the buffers are too long
        self._misfits: set[str] = set()  # names of misfitting buffers that the user was told of
        for name, buffer in _persistent(model).items():
            if not _travels(buffer):
                say(NOT_CARRIED.format(name, _kind(buffer)))
        self.statistics = FirstStatistics(model)

    @property
    def any(self) -> bool:
        """True if the model has buffers that are sent."""
        return bool(self.packed())

    def kept(self) -> dict[str, torch.Tensor]:
        """Return copies, by name, of the buffers that `load` may set, for `put_back`.

        Buffers that are not persistent, such as caches, are left out.
        """
        return {name: each.detach().clone() for name, each in _persistent(self.model).items() if _travels(each)}

    @torch.no_grad()
    def put_back(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Set the buffers to the values of `kept`.

        Buffers that the script has added, deleted or resized meanwhile stay as they are.
        """
        for name, buffer in _persistent(self.model).items():
            if name in kept and _shape(buffer) == _shape(kept[name]):
                buffer.copy_(kept[name])

    def packed(self) -> bytes:
        """Pack the buffers that are sent; b"" if they are longer than BUFFERS_BYTES_MAX."""
        packed = self._before if self.hidden else pack_buffers(self.model)
        if len(packed) <= BUFFERS_BYTES_MAX:
            return packed
        if not self._told:
            say(LONG_BUFFERS.format(len(packed) / 1e6, BUFFERS_BYTES_MAX / 1e6))
        self._told = True
        return b""

    def load(self, packed: bytes) -> None:
        """Set the buffers that `packed` has. The user is told once of each buffer that does not fit.

        Raises RemoteProtocolError for bytes that are no packed buffers.
        """
        for name, text in load_buffers(self.model, packed).items() if packed else ():
            if name not in self._misfits:
                self._misfits.add(name)
                say(text)
        self.statistics.stepped(skipped=False)


class FirstStatistics:
    """A copy of a model's running statistics, as they were after the last step that was not skipped.

    Torch does not count changes of these buffers, so they are copied after each step. They are small: one value for
    each channel.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.modules = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
        self.kept = self._copies()

    def _now(self) -> list[torch.Tensor]:
        return [
            each for m in self.modules for each in m._buffers.values() if each is not None and each.is_floating_point()
        ]

    def _copies(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in self._now()]

    @torch.no_grad()
    def stepped(self, skipped: bool) -> None:
        """Copy the statistics after a step; after a skipped step put back those that are not finite.

        A running mean that a forward pass has made NaN or infinite would stay so.
        """
        now = self._now()
        if [each.shape for each in now] != [each.shape for each in self.kept]:  # the script has replaced some
            self.kept = self._copies()
            return
        for each, copy in zip(now, self.kept, strict=True):
            if not skipped:
                copy.copy_(each)
            elif not torch.isfinite(each).all():
                each.copy_(copy)


def pack_buffers(model: torch.nn.Module) -> bytes:
    """Pack the persistent buffers of `model` by name; b"" if it has none."""
    arrays: dict[str, NamedArray] = {
        name: (dtype_of(buffer), tuple(buffer.shape), raw_bytes(buffer).tobytes())
        for name, buffer in _persistent(model).items()
        if _travels(buffer)
    }
    return pack_arrays(arrays) if arrays else b""


def _persistent(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The buffers, by name, that the model's state_dict() has."""
    buffers = [*model.named_buffers(remove_duplicate=False)]
    kept = model.state_dict(keep_vars=True) if buffers else {}  # most models have none, and this is of each step
    return {plain(name): each for name, each in buffers if name in kept}


def _shape(buffer: torch.Tensor) -> str:
    return f"{_kind(buffer)}{list(buffer.shape)}"


def _travels(buffer: torch.Tensor) -> bool:
    return _kind(buffer) in DTYPES and bool(DTYPES[_kind(buffer)].file)


def _kind(buffer: torch.Tensor) -> str:
    """The buffer's dtype, or its layout if it is not strided."""
    return dtype_of(buffer) if buffer.layout == torch.strided else str(buffer.layout).removeprefix("torch.")


def load_buffers(model: torch.nn.Module, packed: bytes) -> dict[str, str]:
    """Set the buffers of `model` that `packed` has under the same name, shape and dtype. Raises RemoteProtocolError.

    Returns:
        By name, a sentence about each buffer that does not fit.
    """
    mine, misfits = _persistent(model), dict[str, str]()
    with torch.no_grad():
        for name, (dtype, shape, raw) in unpack_arrays(packed).items():
            theirs = f"{dtype}{list(shape)}"
            if name not in mine:
                misfits[name] = MISFIT.format(name, theirs, "not there")
            elif (here := _shape(mine[name])) != theirs:
                misfits[name] = MISFIT.format(name, theirs, here)
            elif raw:
                flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))
                mine[name].copy_(flat.reshape(shape))
    return misfits
