"""1F1B whose warm-up covers the links between stages.

This is eager 1F1B ("On Optimizing the Communication of Model Parallelism", 2211.05322) with a number for each edge.
Torch's 1F1B keeps S - s micro-batches of stage s of S in flight. Across a link each of them comes back a round trip later, and
the stage waits. We keep `in_flight` more for each edge that follows: a round trip over the time of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from narrows.protocols.errors import UsageError
from narrows.worker.pipelining import in_flight as planned


class ScheduleEager1F1B(Schedule1F1B):
    """Torch's 1F1B with a longer warm-up. It takes the same arguments, and with `in_flight` 0 it is the same schedule.

    in_flight: by edge, how many micro-batches are on their way there and back. None: what the plan says.
    Stage s then holds the activations of at most `warm_up` micro-batches: min(S - s + what edges s and later have in flight,
    n_microbatches). Raises UsageError where edges and numbers do not match.
    """

    def __init__(
        self, stage: PipelineStage, n_microbatches: int, *args: Any, in_flight: Sequence[int] | None = None, **more: Any
    ) -> None:
        super().__init__(stage, n_microbatches, *args, **more)
        in_flight = planned() if in_flight is None else in_flight
        edges = stage.num_stages - 1
        if len(in_flight) != edges or any(count < 0 for count in in_flight):
            raise UsageError(
                f"in_flight: {stage.num_stages} stages have {edges} edges, each with 0 or more micro-batches"
            )
        # Torch warms up with `_num_stages` less the index of the stage, and reads the number for nothing else from here on.
        self._num_stages += sum(in_flight[stage.stage_index :])
        self.warm_up = min(n_microbatches, self._num_stages - stage.stage_index)
