"""python -m narrows.compression: compiles all kernels into Numba's cache, so that no run has to (`make install`)."""

from __future__ import annotations

import sys

from narrows.compression import warm_up

if __name__ == "__main__":
    warm_up(lambda text: print(text, file=sys.stderr))
