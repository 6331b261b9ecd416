"""Sums gradients over the processes of a group, and hands out parameters, in memory that all of them map. CPUs only.

How it works

    memory: | gradients of rank 0 | gradients of rank 1 | ... | parameters, even calls | parameters, odd calls |

1. Each rank has a part of the memory for its gradients. After a meeting it sums its slice over all parts, into its own.
2. To hand out parameters each rank copies its slice to the same place. After a meeting it copies the others' slices.

Rules
- Nobody but rank r reads slice r of a part: so r may write the sum there.
- The ranks meet in between (`Group.meet`), and also between a sum and the next gradients.
- Parameters take turns between two places: a rank that copies the last ones is at most one call behind.
- The sum is in the order of ranks, in float32. It does not depend on the slices.
- The memory is a memfd. It has no name, and is gone with the last process of the group.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from narrows.compression.buffers import FloatArray
from narrows.protocols.config.key_ranges import Keys

FLOAT_BYTES = 4
PLACES = 2  # of parameters
PART_VALUES = 1 << 18  # summed at once: 1 MiB, which a core's cache holds


class SharedGradients:
    """The memory, as one rank sees it.

    Args:
        file: descriptor of the memory, as `make` returned it; the caller closes it.
        rank: the rank of this process.
        ranks: the number of processes.
        count: gradients of each rank.

    Raises:
        OSError, ValueError: it cannot be mapped.
    """

    def __init__(self, file: int, rank: int, ranks: int, count: int) -> None:
        memory = mmap.mmap(file, nbytes(ranks, count))
        parts = np.frombuffer(memory, np.float32).reshape(ranks + PLACES, count)
        self.rank, self.parts, self.places, self.calls = rank, parts[:ranks], parts[ranks:], 0
        self.own = torch.from_numpy(self.parts[rank])

    def sum(self, low: int, high: int) -> None:
        """Sum the gradients [low, high) of all ranks into this rank's."""
        first, *others = self.parts
        for begin in range(low, high, PART_VALUES):
            at = slice(begin, min(high, begin + PART_VALUES))
            total = first[at].copy()  # this rank's gradients may be one of the next terms
            for each in others:
                total += each[at]
            self.parts[self.rank][at] = total

    def show(self, slices: Sequence[Keys], whole: torch.Tensor) -> None:
        """Show the other ranks this rank's slice of `whole`."""
        self.calls += 1
        begin, end = slices[self.rank]
        self._place[begin:end] = whole[begin:end].numpy()

    def take(self, slices: Sequence[Keys], whole: torch.Tensor) -> None:
        """Copy the other ranks' slices, which they show, to `whole`."""
        for rank, (begin, end) in enumerate(slices):
            if rank != self.rank:
                whole[begin:end].numpy()[:] = self._place[begin:end]

    @property
    def _place(self) -> FloatArray:
        place: FloatArray = self.places[self.calls % PLACES]
        return place


def nbytes(ranks: int, count: int) -> int:
    """Return the bytes of the memory of `ranks` processes with `count` gradients each."""
    return FLOAT_BYTES * (ranks + PLACES) * count


def make(ranks: int, count: int) -> int:
    """Make the memory, and return its descriptor. Raises OSError: the system has none."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd_create(2)")
    file = os.memfd_create("narrows-gradients", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, nbytes(ranks, count))  # else a page that the system lacks ends a process
    except OSError:
        os.close(file)
        raise
    return file
