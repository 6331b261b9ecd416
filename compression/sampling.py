"""Positions of a sample of an array, for checks that would cost too much on all values."""

import numpy as np
import numpy.typing as npt

SAMPLE = 4096  # positions of a sample: the norm of a sample is off by about 2 %
TOLD = 8  # `gossip_sample` takes one position of so many, because its values travel


def sample_of(size: int) -> npt.NDArray[np.int64]:
    """Return sampled positions of an array of `size` values: int64[min(size, SAMPLE)], rising, the same on each call.

    Each of SAMPLE equal ranges has one position, and its place in the range is pseudo-random. Multiples of a number,
    golden ratio or not, would miss about every 40th key of some sizes altogether, and a sparse update may consist of
    just these keys.
    """
    if size <= SAMPLE:
        return np.arange(size)
    drawn = np.arange(1, SAMPLE + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # SplitMix64
    drawn = (drawn ^ drawn >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ drawn >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    ends = np.arange(SAMPLE + 1) * size // SAMPLE
    return ends[:-1] + ((drawn >> np.uint64(33)).astype(np.int64) * np.diff(ends) >> 31)


def gossip_sample(size: int) -> npt.NDArray[np.int64]:
    """Return every TOLD-th position of `sample_of(size)`. The values there travel once in a window of rounds."""
    return sample_of(size)[::TOLD]
