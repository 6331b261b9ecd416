"""The record of one encode on a device: what its kernels find out, for each other and for the host, which waits for it once.

int64[RECORD], zeros at first: TOLD numbers that the host reads, then those of kernels alone, then the counts of STAGES digits.
"""

# The largest key of all that is coded or summed; pairs kept fewer than asked for; whether the sample misled (then nothing is
# kept). How the indices are coded: wire id, the header's parameter, bytes before the lows, bits of these, of the unary stream.
LARGEST, MISSING, MISLED, INDEX_CODING, PARAMETER, HEAD_BYTES, LOW_BITS, UNARY_BITS = range(8)
TOLD = 8
# A search for a key, by digits from the first on: the digits so far, and the keys above them. Candidates fewer than there is
# room for. Costs of four Rice parameters; bits of the lows and of the unary stream of grouped Rice; the largest gap.
SAMPLE, LAST, SHORT, COSTS, GROUPED_LOWS, GROUPED_UNARY, GAP = 8, 10, 12, 13, 17, 18, 19
COUNTS = 24
BINS = 2048  # of the first digit, which has 11 bits; the two others have 10
DIGITS = 3
STAGES = 2 * DIGITS  # SAMPLE's, then LAST's
RECORD = COUNTS + STAGES * BINS
