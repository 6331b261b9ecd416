"""The sum of error feedback, which kernels of a device fuse with a selection."""

from typing import Any, NamedTuple


class Sum(NamedTuple):
    """sums[i] = decay * residual[i] + update[i], float32, with product and sum each rounded."""

    residual: Any
    decay: Any  # float32
    update: Any
    sums: Any
