"""Equal singular values for the mean update of a matrix: the outer step of IsoLoCo (2607.03011). No I/O.

    u = U S V'   becomes   mean(S) U V'

The mean of the workers' updates has few large singular values, those of the directions on which the workers agree. With equal
ones every direction takes part in the outer step, and a large outer rate and momentum become stable.

U V' is U S^-1 U' u, where U and S^2 are the eigenvectors and eigenvalues of u u', in float64. That takes
O(rows columns min(rows, columns)) operations.
"""

from __future__ import annotations

import numpy as np

from narrows.ps.store.changes import FloatArray

# A singular value below this share of the largest one is a rounding error: float32 rounds to 6e-8, and the root of u u' in
# float64 to 1.5e-8. Its direction takes no part in the outer step. The mean of the singular values still counts it.
LEAST = 1e-6


def equal_spectrum(update: FloatArray) -> None:
    """Give a matrix equal singular values, in place.

    Args:
        update: float32[rows, columns]. One that is not finite stays as it is.
    """
    wide = update.T if update.shape[0] > update.shape[1] else update
    values = wide.astype(np.float64)
    if not np.isfinite(values).all():
        return
    squares, directions = np.linalg.eigh(values @ values.T)  # ascending
    lengths = np.sqrt(np.maximum(squares, 0.0))
    present = lengths > LEAST * lengths[-1]
    scales = np.where(present, lengths.mean() / np.where(present, lengths, 1.0), 0.0)
    wide[...] = ((directions * scales) @ directions.T) @ values
