"""Pulls the state of the servers' optimizers, such as the moments of Adam, and returns it in torch's form.

Rules
- Where gradients are pushed, each shard steps pieces of tensors, and keeps a state for each piece. This module joins
  them.
- A request asks a shard for some keys of one name. AHEAD requests are in flight at a time, and the session repeats
  those without an answer (protocols/member/session.py).
- With a barrier no clock closes before this worker has pushed, so all answers are of one clock. With a quorum a clock
  may close; then everything is asked for again. In modes that fold at once, this worker's updates are in the state, and
  each part is as it was when the shard read it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from narrows.protocols import messages as m
from narrows.protocols.config.key_ranges import parts
from narrows.protocols.config.model_spec import TensorSpec
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import MomentsArrived
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.member.exchange import Exchange
from narrows.protocols.wire import pack, unpack
from narrows.worker.checkpoint.optimizer_state import StatefulWorker
from narrows.worker.model.flat import Array, FloatArray, as_parameter
from narrows.worker.model.model_slices import ModelCut, placed
from narrows.worker.model.optimizers import each_of
from narrows.worker.runtime.launcher_pipe import say

AHEAD = 16  # requests in flight: 64 MiB of answers at most
TRIES = 3  # attempts to get all parts of one clock

State = dict[str, torch.Tensor]  # the state of one tensor, by name
Ask = tuple[int, int, int, str]  # shard, begin, end, name


class ServerMoments(Mapping[Any, Mapping[str, Any]]):
    """`optimizer.state` in modes in which the servers hold it: empty for each parameter, and read-only."""

    def __getitem__(self, parameter: Any) -> Mapping[str, Any]:
        return MappingProxyType({})

    def __setitem__(self, parameter: Any, value: Any) -> None:
        raise UsageError(
            "optimizer.state[...] = ...: where gradients are pushed the servers have the optimizer's state; use --push update"
        )

    def __contains__(self, parameter: object) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0


ON_SERVERS = ServerMoments()


class ShardsAsked(Protocol):
    """The part of a worker's `ShardExchanges` through which `ServerOptimizerState` sends its requests."""

    ours: range  # the shards that this process exchanges with
    exchanges: list[Exchange[Array]]  # one for each of `ours`
    worker: int  # the worker's number in the run
    place: int  # the worker's epoch: changes when it rejoins or keys move; older answers do not count then


class ServerOptimizerState:
    """Pulls the state for one worker, together with all processes of its group."""

    def __init__(self, engine: StatefulWorker, shards: ShardsAsked) -> None:
        self.engine, self.shards, self.requests = engine, shards, 0  # requests: the number of the newest one
        self.asked: dict[tuple[int, int], Ask] = {}  # requests without an answer, by shard and number
        self.answers: dict[Ask, bytes] = {}  # answers that `_all` has not taken yet
        self.clocks: set[int] = set()  # the clocks of the answers so far

    def arrived(self, event: MomentsArrived) -> None:
        """Take an answer of a shard. An answer to an earlier or unknown request is dropped."""
        ask = self.asked.pop((event.shard, event.request), None)
        if ask is not None:
            self.answers[ask] = event.payload
            self.clocks.add(event.clock)

    def read(self) -> tuple[int, dict[int, State]]:
        """Pull the whole state.

        Returns:
            The clock of the state, and by the id of each parameter its state as torch keeps it: float32 tensors on the
            host, in the shape of the parameter.

        Raises:
            UsageError: the run is over for this worker, or a process of the group has no whole tensors (FSDP).
            NarrowsError: no answer within WAIT_LIMIT_S.
        """
        engine, group = self.engine, self.engine.group
        if engine.finished:
            raise UsageError("state_dict(servers=True) after finish(): call it before, or read saved_state(DIR, ...)")
        if engine.slice is not None and not isinstance(engine.slice, ModelCut):
            raise UsageError(
                "state_dict(servers=True): FSDP has cut the model, and no process has a slice of whole tensors"
            )
        for last in (*[False] * (TRIES - 1), True):
            self.clocks.clear()
            found = self.once()
            low, high = min(self.clocks, default=m.CLOCK_MAX), max(self.clocks, default=-1)
            if group is not None:
                low, high = (sign * value for sign, value in zip((1, -1), group.least(low, -high), strict=True))
            if found is not None and (low == high or last or not engine.mode.barrier):
                break
        if found is None:
            raise UsageError("state_dict(servers=True): keys moved while it was read: call it again")
        if low != high and engine.mode.barrier:
            say(f"the servers' optimizer went from clock {low} to {high} while its state was read")
        return low, found

    def once(self) -> dict[int, State] | None:
        """Pull the state once, as `read` returns it. Returns None if this worker has another place in the run by now."""
        shards = self.shards
        if not self.engine.mode.barrier:  # with a barrier the state of this clock has arrived already
            folded = lambda: not any(x.in_flight for x in shards.exchanges)  # noqa: E731
            self.engine.waiting.until(folded, WAIT_LIMIT_S, "own updates")
        ranges = [
            (shard, x.replica.begin, x.replica.end) for shard, x in zip(shards.ours, shards.exchanges, strict=True)
        ]
        answers = self._all([(shard, begin, end, "") for shard, begin, end in ranges])
        if answers is None:
            return None
        tensors = len(self.engine.flat.parameters)
        rows = {ask[0]: unpack_rows(payload, tensors) for ask, payload in answers.items()}
        asks = [
            (shard, *cut, name)
            for shard, begin, end in ranges
            for name in sorted({name for _, name, value in rows[shard] if value is None})
            for cut in parts(begin, end)
        ]
        flat = self.engine.slice or self.engine.flat
        values: dict[str, FloatArray] = {name: np.zeros(flat.size, np.float32) for *_, name in asks}
        if self._all(asks, values, flat.begin) is None:
            return None
        known = [row for each in rows.values() for row in each]
        if self.engine.group is not None:
            known = [row for each in self.engine.group.told(pack(known)) for row in unpack_rows(each, tensors)]
        names = sorted({name for _, name, value in known if value is None})
        whole = {
            name: flat.whole(values.pop(name) if name in values else np.zeros(flat.size, np.float32)) for name in names
        }
        specs = self.engine.flat.specs
        offsets = [0, *accumulate(spec.key_count for spec in specs)]
        states = put_together(known, lambda tensor, name: whole[name][offsets[tensor] : offsets[tensor + 1]], specs)
        return {id(self.engine.flat.parameters[tensor]): state for tensor, state in states.items()}

    def _all(
        self, asks: Iterable[Ask], out: Mapping[str, FloatArray] | None = None, first: int = 0
    ) -> dict[Ask, bytes] | None:
        """Send all requests, and collect the answers; values go to `out`, whose keys begin at `first`.

        Returns None if this worker has another place in the run by now.
        """
        shards, todo = self.shards, deque(asks)
        place, found = shards.place, dict[Ask, bytes]()
        self.asked.clear()
        self.answers.clear()

        def done() -> bool:
            while self.answers:
                ask, payload = self.answers.popitem()
                if out is None:
                    found[ask] = payload
                elif len(payload) != 4 * (ask[2] - ask[1]):
                    raise RemoteProtocolError(f"shard {ask[0]} sent {len(payload)} bytes of its optimizer's state")
                else:
                    out[ask[3]][ask[1] - first : ask[2] - first] = np.frombuffer(payload, np.float32)
            if shards.place != place:
                return True
            while todo and len(self.asked) < AHEAD:
                shard, begin, end, name = todo.popleft()
                self.requests += 1
                self.asked[shard, self.requests] = (shard, begin, end, name)
                self.engine.link.send(shard, [m.MomentsRequest(shards.worker, place, self.requests, begin, end, name)])
            return not self.asked

        self.engine.waiting.until(done, WAIT_LIMIT_S, "the state of the servers' optimizer")
        return found if shards.place == place else None


def take_over(engine: StatefulWorker, states: Mapping[int, State]) -> None:
    """Make these the states of the script's optimizers, as if they had taken the steps that the servers took.

    Args:
        engine: the worker's engine.
        states: by the id of each parameter, as `ServerOptimizerState.read` returned them.
    """
    inner = engine.inner
    for group in inner.param_groups:
        for parameter in group["params"]:
            if id(parameter) in states:
                inner.state[parameter] = {
                    name: placed(name, value.to(parameter.dtype) if value.dim() else value, parameter, group)
                    for name, value in states[id(parameter)].items()
                }
    if engine.slice is not None:
        engine.slice.take_state()


def unpack_rows(payload: bytes, tensors: int) -> list[list[Any]]:
    """Unpack the rows of a `MomentsAnswer` message.

    Args:
        payload: the packed rows.
        tensors: the number of tensors of the model.

    Returns:
        Rows [tensor, name, value]; a value of None stands for an array, which the caller asks for by name.

    Raises:
        RemoteProtocolError: the rows are malformed.
    """
    rows: Any = unpack(payload)

    def sound(tensor: Any, name: Any, value: Any) -> bool:
        known = type(tensor) is int and 0 <= tensor < tensors and type(name) is str
        return known and (value is None or type(value) is float)

    if not (isinstance(rows, list) and all(isinstance(row, list) and len(row) == 3 and sound(*row) for row in rows)):
        raise RemoteProtocolError("a shard did not say what its optimizer keeps")
    return rows


def put_together(
    known: Iterable[Any], read: Callable[[int, str], FloatArray], specs: Sequence[TensorSpec]
) -> dict[int, State]:
    """Join the states of pieces to the state of each tensor.

    Args:
        known: rows [tensor, name, value], as in a `MomentsAnswer` message.
        read: returns the values of a tensor and a name, float32[keys of the tensor]. The state has their memory.
        specs: the tensors of the model.

    Returns:
        The state by the number of the tensor.
    """
    states: dict[int, State] = {}
    for tensor, name, value in sorted(known, key=lambda row: row[:2]):
        state = states.setdefault(tensor, {})
        if value is not None:
            state[name] = torch.tensor(value)
        elif name not in state:
            state[name] = as_parameter(torch.from_numpy(read(tensor, name)), specs[tensor])
    return states


def as_state_dict(inner: torch.optim.Optimizer, states: Mapping[int, State]) -> dict[str, Any]:
    """Return the state_dict of `inner` with these states, given by the id of each parameter.

    Several optimizers get it in the form of `CombinedOptimizer`.
    """
    made = []
    for each in each_of(inner):
        numbered = enumerate(p for group in each.param_groups for p in group["params"])
        made.append(each.state_dict() | {"state": {i: states[id(p)] for i, p in numbered if id(p) in states}})
    return made[0] if len(made) == 1 else {"optimizers": made}
