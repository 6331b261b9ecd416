"""The changes of a store. Each is a record; `Store.apply` carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.compression.codecs import PieceLike
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.messages import Push

FloatArray = npt.NDArray[np.float32]

OWED = "above.owed"  # name in a cluster's last checkpoint: the part of x that was never pushed to the parent
Update = Sequence[PieceLike]  # the update of one worker: its parts in order
Terms = tuple[tuple[float, Update], ...]  # (weight, update) in the order in which they are added


class PushedUpdate(list[Push]):
    """The update of one worker, as a list of its parts in order.

    Attributes:
        length: The L2 norm of the update, or an upper bound of it (`codecs.check`).
        empty: True if the update has no samples, and so no values.
    """

    length = 0.0
    empty = False


@dataclass(frozen=True, slots=True)
class SetFirstWeights:
    """Set x to these pieces and make publication 0 of it.

    Under gossip x also becomes the model that the run ends with in this way.
    """

    pieces: Update


@dataclass(frozen=True, slots=True)
class MergeStoppedModels:
    """Under gossip: make x the mean of the models of `count` stopped workers. `pieces`: the newest of these models."""

    pieces: Update
    count: int


@dataclass(frozen=True, slots=True)
class Fold:
    """Add weight * update to x, one update after another.

    Attributes:
        terms: The updates, each with its weight.
        of: (worker, share of the mean) of each update; GONE (update_gain.py) in place of a worker that has left.
        rates: The hyper-parameters with which embedding rows take a step along the sum of share * gradient; b"" for no
            step.
    """

    terms: Terms
    of: tuple[tuple[int, float], ...]
    rates: bytes = b""


@dataclass(frozen=True, slots=True)
class OuterStep:
    """One step of SGD with Nesterov momentum on the pseudo-gradient -mean (DiLoCo, 2311.08105, alg. 1).

    Attributes:
        terms: The mean is the sum of weight * update.
        keys: The range [begin, end) of one fragment. The other fragments keep x and their momentum until their turn.
    """

    terms: Terms
    keys: Keys


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the script's optimizer along shrink * the sum of weight * gradient.

    Attributes:
        terms: The gradients, each with its weight.
        hyper: The packed hyper-parameters of the keys.
        absent: Tensors without a gradient.
        scale: The factor on the learning rate.
        shrink: The factor that clips the mean.
        rates: The hyper-parameters with which embedding rows take a step along the sum of scale * weight * gradient;
            b"" for no step.
    """

    terms: Terms
    hyper: bytes
    absent: tuple[int, ...]
    scale: float = 1.0
    shrink: float = 1.0
    rates: bytes = b""


@dataclass(frozen=True, slots=True)
class Rebase:
    """Set x = base + (x - before): exactly `base` if nothing was folded on top of `before`. All are float32[size]."""

    before: FloatArray
    base: FloatArray


@dataclass(frozen=True, slots=True)
class Publish:
    """Set p = x, through the compressor of the downlink if there is one.

    Attributes:
        keys: The range [begin, end) that has changed since the publication before; None if any key may have.
        spec: The SPEC that codes this publication and later ones; "" for the same as before.
    """

    keys: Keys | None = None
    spec: str = ""


@dataclass(frozen=True, slots=True)
class RoundLast:
    """Set x to what the difference to p comes to as `LAST` codes it: the model that the run ends with.

    The store keeps the coded difference until its next change. A lossless downlink leaves x as it is.
    """


@dataclass(frozen=True, slots=True)
class LoadArrays:
    """Begin from the arrays of a checkpoint (`Store.arrays`) or of the parent; p is publication `publication`."""

    arrays: dict[str, FloatArray]
    publication: int


@dataclass(frozen=True, slots=True)
class DropHandover:
    """Drop the state of the optimizer that stepped the run's start: every worker has taken it over."""


Change = (
    SetFirstWeights
    | MergeStoppedModels
    | Fold
    | OuterStep
    | Step
    | Rebase
    | Publish
    | RoundLast
    | LoadArrays
    | DropHandover
)
