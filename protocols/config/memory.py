"""The arrays of a worker that have the size of the model: which there are, by mode and flags. Pure.

An array of one model holds each trained value as float32. `ps-worker --check` prints these arrays for the user's script.
Activations, PyTorch itself and payloads on their way are not among them. Under gossip other arrays take their place
(protocols/gossip/mixing.py), of which there is no account yet.
"""

from __future__ import annotations

from typing import NamedTuple

from narrows.protocols.config.modes import FoldRule, Mode

SPARE = 2  # buffers beyond updates in flight: one to fill, and one that the link may still read


class ModelArray(NamedTuple):
    """An array, or several alike.

    Attributes:
        name: what is in it.
        models: its bytes over those of the model as float32.
        why: what needs it.
    """

    name: str
    models: float
    why: str


class ArrayFacts(NamedTuple):
    """What the arrays of a worker depend on, beside the mode.

    Attributes:
        lossless: the SPEC of updates leaves nothing out, as dense.
        down_lossless: the SPEC of states leaves nothing out.
        quorum: of the run; -1: none.
        private: --dp-clip is given.
        rounded: a parameter is not float32.
        moments: values that the script's optimizer keeps for each parameter, such as 2 for AdamW.
    """

    lossless: bool
    down_lossless: bool
    quorum: int = -1
    private: bool = False
    rounded: bool = False
    moments: float = 0.0


def update_buffers(mode: Mode, quorum: int) -> int:
    """Return the number of buffers that raw updates need.

    Args:
        mode: of the run. At a barrier, and where fragments are merged, an update is folded before this worker has the
            next one of its keys: one buffer is enough.
        quorum: of the run; -1: none. With one a round may close while the link still reads this worker's late update.
    """
    one = mode.merges or (mode.barrier and mode.window == 1)
    return 1 if one and quorum < 0 else mode.window + SPARE


def in_place(mode: Mode, down_lossless: bool, rounded: bool) -> bool:
    """Return whether the parameters are the pulled state, so that a state needs no array."""
    return mode.rule is FoldRule.OPTIMIZER and mode.bound == 0 and down_lossless and not rounded


def worker_arrays(mode: Mode, facts: ArrayFacts) -> list[ModelArray]:
    """Return the arrays that a worker holds while it trains, on the host; none under gossip.

    Args:
        mode: the resolved mode.
        facts: the flags and the script's part.
    """
    if mode.rule is FoldRule.MIX:
        return []
    steps_here, direct = mode.rule is not FoldRule.OPTIMIZER, in_place(mode, facts.down_lossless, facts.rounded)
    raw = facts.lossless or facts.private
    rows = (
        (True, ModelArray("parameters", 1, "the script's")),
        (True, ModelArray("gradients", 1, "the script's")),
        (steps_here, ModelArray("optimizer's state", facts.moments, "the script's: the worker's optimizer steps")),
        (not direct, ModelArray("pulled state", 1, "the newest state of the shards")),
        (steps_here, ModelArray("replica", 1, "updates are measured from it")),
        (steps_here and facts.rounded, ModelArray("rounded replica", 1, "as the parameters' dtype holds it")),
        (not facts.lossless, ModelArray("residual", 1, "what the SPEC leaves out")),
        (
            raw,
            ModelArray("raw updates", update_buffers(mode, facts.quorum), "in flight, to be filled, or with the link"),
        ),
    )
    return [row for there, row in rows if there and row.models]
