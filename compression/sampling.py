"""Positions at which an array is looked at where all of it would cost too much."""

import numpy as np
import numpy.typing as npt

SAMPLE = 4096  # positions: two norms of what lies there disagree by 2 %


def sample_of(size: int) -> npt.NDArray[np.int64]:
    """Positions that lie evenly and in no step that a sparse update may have: int64[at most SAMPLE], rising."""
    if size <= SAMPLE:
        return np.arange(size)
    golden = np.arange(SAMPLE, dtype=np.uint64) * np.uint64(0x9E3779B1) % np.uint64(1 << 32)
    return np.unique((golden * np.uint64(size) >> np.uint64(32)).astype(np.int64))
