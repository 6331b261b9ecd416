"""python -m narrows.compression: compiles all kernels into Numba's cache, so that no run has to (`make install`)."""

from __future__ import annotations

import sys

from narrows.compression import logits, warm_up

if __name__ == "__main__":
    for each in (warm_up, logits.warm_up):
        each(lambda text: print(text, file=sys.stderr))
