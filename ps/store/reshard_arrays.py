"""Makes the arrays of one shard from those of shards that split the same keys elsewhere. Pure.

Rules
- `x`, `p`, `outer.momentum` and what a cluster owes its parent have one value for each key: the ranges that two shards
  have in common are copied.
- `optimizer.GROUP.PIECE.NAME` belongs to one piece of a tensor, the PIECE-th of its group on that shard. It has a value
  for each key, or one value for all pieces of the tensor, such as a count of steps.
- `gain` is a measurement of each shard: the new shard gets the mean, weighted by the number of keys from each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from narrows.protocols.config.checkpoint_names import OPTIMIZER
from narrows.protocols.config.key_ranges import Keys, overlaps
from narrows.protocols.config.model_spec import ModelSpec
from narrows.ps.store.changes import OWED, FloatArray

Arrays = Mapping[str, FloatArray]  # as from Store.arrays


def recut(plan: ModelSpec, before: Sequence[tuple[Keys, Arrays]], keys: Keys) -> dict[str, FloatArray]:
    """Make the arrays of a shard of `keys`.

    Args:
        plan: The model spec.
        before: The key range of each shard of the earlier split, and its arrays. The arrays of a shard without a key in
            common with `keys` are not read.
        keys: The range [begin, end) of the new shard.

    Returns:
        The arrays of the new shard, named as in `Store.arrays`.
    """
    common = overlaps([each for each, _ in before], *keys)
    sources = [(*before[index], low, high) for index, low, high in common]
    made: dict[str, FloatArray] = {}
    for name in ("x", "p", "outer.momentum", OWED):
        found = [
            arrays[name][low - begin : high - begin] for (begin, _), arrays, low, high in sources if name in arrays
        ]
        if found:
            made[name] = np.concatenate(found)
    gains = [(float(arrays["gain"][0]), high - low) for _, arrays, low, high in sources if "gain" in arrays]
    if gains:
        made["gain"] = np.array(
            [sum(each * share for each, share in gains) / sum(share for _, share in gains)], np.float32
        )
    for g, group in enumerate(plan.pieces(*keys)):
        for i, (tensor, begin, end) in enumerate(group):
            states = [_of_tensor(plan, *source[:2], g, tensor, (begin, end)) for source in sources]
            for name in dict.fromkeys(name for state in states for name in state):
                values = [state[name] for state in states if name in state]
                made[f"{OPTIMIZER}{g}.{i}.{name}"] = values[0] if not values[0].ndim else np.concatenate(values)
    return made


def _of_tensor(
    plan: ModelSpec, had: Keys, arrays: Arrays, group: int, tensor: int, keys: Keys
) -> dict[str, FloatArray]:
    """Return a shard's optimizer state of one tensor at `keys`, by name; {} if it has no such key."""
    for i, (which, begin, end) in enumerate(plan.pieces(*had)[group]):
        if which == tensor and begin < keys[1] and keys[0] < end:
            prefix, at = f"{OPTIMIZER}{group}.{i}.", slice(max(keys[0], begin) - begin, min(keys[1], end) - begin)
            found = {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
            return {name: values[at] if values.ndim else values for name, values in found.items()}
    return {}
