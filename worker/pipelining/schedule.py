"""1F1B whose warm-up covers the links between stages.

This is eager 1F1B ("On Optimizing the Communication of Model Parallelism", 2211.05322) with a number for each edge.
Torch's 1F1B keeps S - s micro-batches of stage s of S in flight. Across a link each of them comes back a round trip
later, and the stage waits. This schedule keeps `in_flight` more for each later edge: a round trip over the time of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from narrows.protocols.errors import UsageError
from narrows.worker.pipelining import in_flight as planned


class ScheduleEager1F1B(Schedule1F1B):
    """Torch's 1F1B with a longer warm-up. It takes the same arguments, and with `in_flight` 0 it is the same schedule.

    Stage s holds the activations of at most `warm_up` micro-batches: S - s plus what edge s and later edges have in
    flight, but no more than n_microbatches.

    Args:
        stage: the stage of this process.
        n_microbatches: micro-batches of a step.
        in_flight: for each edge the micro-batches in flight, there and back; None: as the plan says.

    Raises:
        UsageError: there is not one number, 0 or more, for each edge.
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
        # Torch's warm-up is `_num_stages` minus the stage's index. It uses the number for nothing else from here on.
        self._num_stages += sum(in_flight[stage.stage_index :])
        self.warm_up = min(n_microbatches, self._num_stages - stage.stage_index)
