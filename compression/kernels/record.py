"""The record of one encode on a device: the findings of its kernels, for each other and for the host.

The host waits once for the record. It is int64[RECORD], zeros at first: TOLD numbers that the host reads, then numbers
of kernels alone, then the counts of STAGES digits.
"""

from typing import Any, NamedTuple

# LARGEST: the largest key of all values that are coded or summed. MISSING: kept values fewer than requested. MISLED:
# the sample misled, and no value is kept. The index coding: its wire id, the header's parameter, bytes before the lows,
# bits of the lows, bits of the unary stream.
LARGEST, MISSING, MISLED, INDEX_CODING, PARAMETER, HEAD_BYTES, LOW_BITS, UNARY_BITS = range(8)
TOLD = 8
# SAMPLE, LAST: a search for a key by digits, from the first on; each has the digits so far, and the number of keys
# above.
# SHORT: candidates fewer than there is room for. COSTS: of four Rice parameters. GROUPED_*: bits of the lows and of the
# unary stream of grouped Rice. GAP: the largest gap.
SAMPLE, LAST, SHORT, COSTS, GROUPED_LOWS, GROUPED_UNARY, GAP = 8, 10, 12, 13, 17, 18, 19
COUNTS = 24
BINS = 2048  # counts of the first digit, which has 11 bits; the two others have 10
DIGITS = 3
STAGES = 2 * DIGITS  # the digits of SAMPLE, then those of LAST
RECORD = COUNTS + STAGES * BINS


# What the host tells the kernels of one encode, int64[INPUTS] on the device: addresses of the arrays of a Sum, the phase of
# a turn, the seed of RandomK, the key of random codes. The host writes it in one copy; all other arguments of an encode's
# kernels are those of the last one. STARTED is 1 if a Sum has a start; else it is 0, and START is the address of the update.
# The kernel `guard_sum` may write to UPDATE, START and STARTED.
RESIDUAL, UPDATE, SUMS, PHASE, SEED, KEY_LOW, KEY_HIGH, START, STARTED = range(9)
INPUTS = 9


class Sum(NamedTuple):
    """sums[i] = decay * residual[i] + (update[i] - start[i]), float32, each of the three results rounded.

    `sums` may be `residual`. `start` is None if nothing is subtracted.
    """

    residual: Any
    decay: Any  # float32
    update: Any
    sums: Any
    start: Any = None

    def unchanged(self) -> "Sum":
        """Return the sum that leaves the residual, of finite values, as it is."""
        return self._replace(decay=self.decay.dtype.type(1), update=self.residual, start=self.residual)
