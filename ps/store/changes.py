"""The changes that a store may take: each is a record, and `Store.apply` carries it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrows.compression.codecs import PieceLike
from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.messages import Push

FloatArray = npt.NDArray[np.float32]

OWED = "above.owed"  # in a cluster's last checkpoint: what the run above has not got of x
Update = Sequence[PieceLike]  # of one worker: its parts in order
Terms = tuple[tuple[float, Update], ...]  # weight and update, in the order in which they are added


class PushedUpdate(list[Push]):
    """The update of one worker: its parts in order.

    `length`: the L2 norm of the update, or a bound on it (codecs.check). `empty`: the update has no samples, and no values.
    """

    length = 0.0
    empty = False


@dataclass(frozen=True, slots=True)
class SetFirstWeights:
    """x = these pieces, and publication 0 is made of them; or under gossip the model that the run ends with."""

    pieces: Update


@dataclass(frozen=True, slots=True)
class MergeStoppedModels:
    """Under gossip: x = the mean of the models of `count` workers that were stopped, of which these pieces are the newest."""

    pieces: Update
    count: int


@dataclass(frozen=True, slots=True)
class Fold:
    """x += weight * update, of one after the other. `of`: of each, the worker (or gain.GONE) and its share of the mean. Rows of
    tables are stepped along the sum of share * gradient; `rates`: with these hyper-parameters, b"": not at all."""

    terms: Terms
    of: tuple[tuple[int, float], ...]
    rates: bytes = b""


@dataclass(frozen=True, slots=True)
class OuterStep:
    """Outer SGD with Nesterov momentum on the pseudo-gradient -mean (DiLoCo, 2311.08105, alg. 1) at `keys`, which are those of
    one fragment: what has not its turn keeps its momentum. mean: the sum of weight * update."""

    terms: Terms
    keys: Keys


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the script's optimizer along shrink * the sum of weight * gradient. `scale`: of its learning rate. Rows of
    tables are stepped along the sum of scale * weight * gradient; `rates` as in `Fold`."""

    terms: Terms
    hyper: bytes
    absent: tuple[int, ...]
    scale: float = 1.0
    shrink: float = 1.0
    rates: bytes = b""


@dataclass(frozen=True, slots=True)
class Rebase:
    """x = base + (x - before), float32[size] both: exactly `base`, where nothing was folded on top of `before`."""

    before: FloatArray
    base: FloatArray


@dataclass(frozen=True, slots=True)
class Publish:
    """p = x, through the downlink's compressor where it has one. keys: all that changed since the last publication; None: any
    may have. `spec`: what it is coded with from now on, "": as before."""

    keys: Keys | None = None
    spec: str = ""


@dataclass(frozen=True, slots=True)
class LoadArrays:
    """Begin from these arrays, of a checkpoint (as `Store.arrays` gives them) or from above; p is publication `publication`."""

    arrays: dict[str, FloatArray]
    publication: int


Change = SetFirstWeights | MergeStoppedModels | Fold | OuterStep | Step | Rebase | Publish | LoadArrays
