"""What kernels of a device fuse with a selection: the sum that error feedback makes."""

from typing import Any, NamedTuple


class Sum(NamedTuple):
    """sums[i] = decay * residual[i] + update[i], float32, product and sum rounded one after the other."""

    residual: Any
    decay: Any  # float32
    update: Any
    sums: Any
