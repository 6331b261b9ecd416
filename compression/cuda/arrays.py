"""`DeviceArray`: an array in the memory of a device, as an address, a size and a dtype. A slice of it is arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np


class DeviceArray:
    """A contiguous 1-D array on a device.

    Attributes:
        address: of its first value.
        size: the number of values.
        dtype: their dtype.
        owner: an object that keeps the memory alive.
    """

    __slots__ = ("address", "dtype", "itemsize", "owner", "size")
    ndim = 1

    def __init__(self, address: int, size: int, dtype: np.dtype[Any], owner: Any) -> None:
        self.address, self.size, self.dtype, self.itemsize, self.owner = address, size, dtype, dtype.itemsize, owner

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = self.address if self.size else 0
        return {"shape": (self.size,), "typestr": self.dtype.str, "data": (place, False), "version": 3}

    def is_c_contiguous(self) -> bool:
        return True

    def __getitem__(self, part: slice) -> DeviceArray:
        """Return a view of array[begin:end]."""
        begin, end = part.start or 0, self.size if part.stop is None else part.stop
        if begin < 0 or end < 0 or end > self.size:
            begin, end, _ = part.indices(self.size)
        return DeviceArray(
            self.address + begin * self.itemsize, end - begin if end > begin else 0, self.dtype, self.owner
        )

    def view(self, dtype: Any) -> DeviceArray:
        """Return a view of the same bytes with another dtype. A rest that fills no value is left out."""
        kind = np.dtype(dtype)
        return DeviceArray(self.address, self.size * self.itemsize // kind.itemsize, kind, self.owner)


class InputArray(DeviceArray):
    """An array of an encode, whose address kernels read from the inputs of that encode (kernels/record.py).

    Attributes:
        slot: the place of the address among the inputs.
    """

    __slots__ = ("slot",)

    def __init__(self, array: DeviceArray, slot: int, dtype: Any = None) -> None:
        kind = np.dtype(dtype or array.dtype)
        super().__init__(array.address, array.nbytes // kind.itemsize, kind, array.owner)
        self.slot = slot

    def view(self, dtype: Any) -> InputArray:
        return InputArray(self, self.slot, dtype)


def device_array_of(array: Any) -> DeviceArray:
    """Return a view of an array with a __cuda_array_interface__, such as a torch tensor on a GPU, without a copy.

    Raises:
        TypeError: it is no such array, or it is not one of contiguous values in one dimension.
    """
    if isinstance(array, DeviceArray):
        return array
    if getattr(array, "is_cuda", False) and array.dtype in _DTYPES and array.dim() == 1 and array.is_contiguous():
        # torch takes 10 us for the interface, which says the same.
        return DeviceArray(array.data_ptr(), array.numel(), _DTYPES[array.dtype], array)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise TypeError(f"{type(array).__name__} is no array of this device")
    kind, shape, strides = np.dtype(interface["typestr"]), interface["shape"], interface.get("strides")
    if len(shape) != 1 or strides not in (None, (kind.itemsize,)):
        raise TypeError(f"an array on the device must be contiguous and 1-D, not {len(shape)}-D {kind}")
    if hasattr(array, "data_ptr"):
        _DTYPES[array.dtype] = kind
    return DeviceArray(int(interface["data"][0]), int(shape[0]), kind, array)


_DTYPES: dict[Any, np.dtype[Any]] = {}  # of torch's dtypes that have come here
