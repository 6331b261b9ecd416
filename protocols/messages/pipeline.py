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
    """Stage to stage: the next tensor of this sender to this receiver. Both ends know the shape: it does not travel."""

    plan: int  # a number that all processes of one plan share
    worker: int  # rank of the sender
    life: int  # random number of the sender's process
    number: int  # of the tensor, counted for this pair from 0 on
    step: int  # of the sender's script; -1: of no step
    tag: int  # the receiver asks for tensors by tag
    payload: Buffer


@dataclass(frozen=True, slots=True)
class PipelineBeat(Message):
    """Stage to stage: the sender is live. It acknowledges the tensors of the receiver."""

    plan: int
    worker: int
    life: int
    taken: int  # count of the receiver's tensors that the sender's script has taken
    missed: int  # send tensors again from this number on; -1: none
    left: int  # 0: the sender runs; 1: it has finished; 2 + exit code: it has failed (2: unknown code)
