"""python -m narrows.compression: compiles all kernels into Numba's cache, as `make install` does; a run need not."""

from __future__ import annotations

import sys

from narrows.compression import warm_up

if __name__ == "__main__":
    warm_up(lambda text: print(text, file=sys.stderr))
