"""The sum that error feedback makes: kernels of a device fuse it with a selection."""

from typing import Any, NamedTuple


class Sum(NamedTuple):
    """sums[i] = decay * residual[i] + update[i], float32, product and sum rounded one after the other."""

    residual: Any
    decay: Any  # float32
    update: Any
    sums: Any
