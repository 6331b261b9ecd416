"""Page-locked host memory that payloads are copied to, and lie in until nobody holds them."""

import weakref
from typing import Any

from narrows.compression.buffers import ByteArray

FREE_MAX = 4  # buffers kept for the next payload; more are under way where more updates are in flight


class Staging:
    """Lends buffers. One is free again once no view of it is left: payloads are sent without a copy, sent again when they
    are lost, and added up while they stand in, so nobody else knows when that is."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.free: list[ByteArray] = []
        self.lent = 0  # so far; those that are back are in it

    def lend(self, size: int) -> memoryview:
        """uint8[size]. Slices of it hold it too; arrays made of it do where they are made by np.frombuffer."""
        fitting = [i for i, buffer in enumerate(self.free) if buffer.size >= size]
        if fitting:  # others only append meanwhile
            buffer = self.free.pop(min(fitting, key=lambda i: self.free[i].size))
        else:
            del self.free[:1]  # too small: what is lent now takes its place
            buffer = self.kernels.pinned(size + size // 8)
        self.lent += 1
        view = buffer[:size]
        weakref.finalize(view, self._back, buffer).atexit = False
        return view.data

    def _back(self, buffer: ByteArray) -> None:
        """From whichever thread held it last."""
        if len(self.free) < FREE_MAX:
            self.free.append(buffer)
