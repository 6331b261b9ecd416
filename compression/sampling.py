"""Positions at which an array is looked at where all of it would cost too much."""

import numpy as np
import numpy.typing as npt

SAMPLE = 4096  # positions: two norms of what lies there disagree by 2 %
TOLD = 8  # one of so many is looked at where the values travel


def sample_of(size: int) -> npt.NDArray[np.int64]:
    """Positions that lie evenly and in no step that a sparse update may have: int64[min(size, SAMPLE)], rising.

    One in each of SAMPLE ranges, and where in it is drawn: multiples of a number, golden or not, miss every 40th key or so
    of some sizes altogether.
    """
    if size <= SAMPLE:
        return np.arange(size)
    drawn = np.arange(1, SAMPLE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # SplitMix64
    drawn = (drawn ^ drawn >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ drawn >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    ends = np.arange(SAMPLE + 1) * size // SAMPLE
    return ends[:-1] + ((drawn >> np.uint64(33)).astype(np.int64) * np.diff(ends) >> 31)


def gossip_sample(size: int) -> npt.NDArray[np.int64]:
    """As sample_of, one position in eight: what lies there travels, once a window of rounds."""
    return sample_of(size)[::TOLD]
