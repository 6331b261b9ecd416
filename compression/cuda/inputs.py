"""The inputs of an encode: what differs from the last one, in one small array on the device (kernels/record.py).

Captured launches fix their arguments (graphs.py). So addresses, phase, seed and key are not arguments of kernels but
numbers in this array, which the host writes in one copy before the launches.
"""

from typing import Any

import numpy as np

from narrows.compression.cuda.arrays import DeviceArray, InputArray
from narrows.compression.cuda.graphs import GraphCache
from narrows.compression.cuda.streams import Streams
from narrows.compression.kernels.record import INPUTS, RESIDUAL, START, SUMS, UPDATE, Sum

WIDE_BYTES = 16  # of four values that are loaded at once


class EncodeInputs:
    """The inputs of the encodes of a queue.

    Args:
        array: int64[INPUTS] on the device.
        streams, graphs: of the queue.
        counts: of the queue; each copy counts as "inputs".

    Attributes:
        aligned: four values of each array of the present encode can be loaded at once.
    """

    def __init__(self, array: DeviceArray, streams: Streams, graphs: GraphCache, counts: Any) -> None:
        self.array, self.streams, self.graphs, self.counts = array, streams, graphs, counts
        self.aligned = True
        self._told = [0] * INPUTS
        self._host = np.zeros(INPUTS, np.int64)
        self._copy()

    def begin(self, addends: Sum, phase: int, seed: int, key: tuple[int, int]) -> Sum:
        """Tell the numbers of an encode; see `Queue.begin`."""
        residual, decay, update, sums, start = addends
        places = residual.address, update.address, sums.address
        begin = (update if start is None else start).address
        self.aligned = not (places[0] | places[1] | places[2] | begin) % WIDE_BYTES
        numbers = [*places, phase, seed, *key, begin, int(start is not None)]  # in the order of the slots
        if numbers != self._told:
            self._told = numbers
            self._copy()
        inputs = InputArray(residual, RESIDUAL), InputArray(update, UPDATE), InputArray(sums, SUMS)
        return Sum(inputs[0], decay, *inputs[1:], None if start is None else InputArray(start, START))

    def forget(self) -> None:
        """Forget what was told: a kernel has changed it (`guard`, sums.py)."""
        self._told = [-1] * INPUTS

    def tell(self, numbers: dict[int, int]) -> DeviceArray:
        """Write numbers to their slots, if they are not there yet. Returns the array."""
        told = self._told
        if any(told[slot] != number for slot, number in numbers.items()):
            for slot, number in numbers.items():
                told[slot] = number
            self._copy()
        return self.array

    def _copy(self) -> None:
        assert not self.graphs.capturing, "the inputs of an encode are told before its launches are captured"
        self.counts["inputs"] += 1
        self._host[:] = self._told
        self.streams.driver.copy_up(self._host, self.array, self.streams.present)
