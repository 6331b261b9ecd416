"""Tensors between the stages of a pipeline. Every process of a pipeline sends to every other one.

How it works
1. A stage sends each activation or gradient to the next stage as a `PipelineTensor`, numbered from the first one on,
   and keeps it.
2. The receiver hands the tensors to its script in that order. It sends `PipelineBeat`: how many tensors its script has
   (`taken`), and the first one that is missing (`missed`). The sender drops the tensors that were taken, and sends
   those again that are missing.
3. A stage sends `PipelineBeat` a few times in a lease even if no tensor came. A stage that is silent for a lease is
   lost.
4. The last `PipelineBeat` of a stage says how it ended (`left`).
"""

from __future__ import annotations

from dataclasses import dataclass

from narrows.protocols.messages.base import Buffer, Message


@dataclass(frozen=True, slots=True)
class PipelineTensor(Message):
    """Stage to stage: the next tensor of this sender to this receiver. `step`: of the sender's run, -1: of no step.
    Both ends know the shape: it does not travel."""

    plan: int
    worker: int
    life: int
    number: int
    step: int
    tag: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class PipelineBeat(Message):
    """Stage to stage: I live. `taken`: tensors of yours that my script has. `missed`: send again from this number on, -1:
    nothing. `left`: 0, 1 where I have finished, 2 + my exit code where I have failed (2 alone: nobody knows)."""

    plan: int
    worker: int
    life: int
    taken: int
    missed: int
    left: int
