"""Page-locked host memory for payloads that come from a device."""

import weakref
from typing import Any

from narrows.compression.buffers import ByteArray

FREE_MAX = 4  # the most free buffers; with more updates in flight more buffers are lent


class Staging:
    """Lends buffers, and takes each back once no view of it is left.

    A payload is sent without a copy, sent again if it is lost, and added to the replica while it stands in. So only the
    garbage collector knows when it is no longer used.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.free: list[ByteArray] = []
        self.lent = 0  # buffers lent so far, including those that are back

    def lend(self, size: int) -> memoryview:
        """Return uint8[size]. Its slices keep it lent, and so do arrays that np.frombuffer makes of it."""
        fitting = [i for i, buffer in enumerate(self.free) if buffer.size >= size]
        if fitting:  # other threads only append to the list
            buffer = self.free.pop(min(fitting, key=lambda i: self.free[i].size))
        else:
            del self.free[:1]  # this buffer is too small: the new one takes its place
            buffer = self.kernels.pinned(size + size // 8)
        self.lent += 1
        view = buffer[:size]
        weakref.finalize(view, self._back, buffer).atexit = False
        return view.data

    def _back(self, buffer: ByteArray) -> None:
        """Take a buffer back. The thread that drops the last view calls this."""
        if len(self.free) < FREE_MAX:
            self.free.append(buffer)
