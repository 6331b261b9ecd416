"""The script's optimizer on a shard: any elementwise class of torch.optim, rebuilt by name from plain values.

The piece of each tensor that lies on the shard is one torch parameter, a view of the shard's flat weights. So an
elementwise optimizer does to the piece what it would do to the whole tensor. A piece without a gradient in this step is
skipped, as in one process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import ELEMENTWISE
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.wire import unpack
from narrows.ps.store.changes import FloatArray
from narrows.ps.store.hyperparameter_vote import IMPLEMENTATION
from narrows.ps.store.store import HEAP, ArrayAllocator

FIRST_PARTS = 16  # of the first step, which makes the state


def warm_up(say: Callable[[str], None] = lambda text: None) -> None:
    """Make one optimizer, so that torch's imports, which take seconds without a heartbeat, are done before joining."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


def _kinds(values: dict[str, Any]) -> dict[str, object]:
    """Return what decides which state an optimizer keeps: its flags, and whether each number is 0."""
    return {name: bool(value) if isinstance(value, (bool, int, float)) else value for name, value in values.items()}


class TorchOptimizer:
    """Steps the tensor pieces of one shard. Raises RemoteProtocolError for hyper-parameters that torch refuses."""

    def __init__(self, plan: ModelSpec, begin: int, end: int, *, arrays: ArrayAllocator = HEAP) -> None:
        """An optimizer without state; torch's own object is built at the first step.

        Args:
            plan: The model spec, which names the optimizer's class and the parameter groups.
            begin: The first key of the shard.
            end: The key after its last.
            arrays: The allocator of the state's arrays.

        Raises:
            RemoteProtocolError: The class is not elementwise, so it cannot be rebuilt on a part of the keys.
        """
        if plan.optimizer not in ELEMENTWISE:
            raise RemoteProtocolError(f"the server cannot rebuild optimizer {plan.optimizer!r}; use --push update")
        self.made_of, self.arrays = (plan, begin, end), arrays
        self.kind: Any = getattr(torch.optim, plan.optimizer)
        self.known = set(inspect.signature(self.kind.__init__).parameters) - {"self", "params"}
        self.checked: bytes | None = None  # the newest hyper-parameters that `check` has accepted
        self.first: list[dict[str, Any]] | None = None  # the first that it has accepted
        offsets = plan.offsets()
        self.pieces: list[list[tuple[int, int, int, torch.nn.Parameter]]] = []  # per group: tensor, low, high, view
        for group in plan.groups:
            pieces = []
            for tensor in group:
                low, high = max(offsets[tensor], begin), min(offsets[tensor + 1], end)
                if low < high:
                    empty = torch.nn.Parameter(torch.empty(high - low), requires_grad=False)
                    pieces.append((tensor, low - begin, high - begin, empty))
            self.pieces.append(pieces)
        self.optimizer: torch.optim.Optimizer | None = None
        self.base: FloatArray | None = None
        self.pending: dict[str, FloatArray] = {}
        self.housed = -1  # entries of torch's state whose arrays are the allocator's; -1 before the first step

    def __getstate__(self) -> tuple[Any, ...]:
        """Return plain values: torch's state and parameters are views of the weights, and pickle would copy them."""
        return (*self.made_of, self.arrays, self.state(), self.checked, self.first)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        plan, begin, end, arrays, values, checked, first = state
        self.__init__(plan, begin, end, arrays=arrays)  # type: ignore[misc]
        self.pending = values
        self.checked, self.first = checked, first

    def step(
        self, weights: FloatArray, gradient: FloatArray, hyper: bytes, absent: Sequence[int], scale: float
    ) -> None:
        """Take one step; see ServerOptimizer."""
        groups = self._groups(hyper)
        whole = torch.from_numpy(weights)
        if weights is not self.base:
            for pieces in self.pieces:
                for _, low, high, parameter in pieces:
                    parameter.data = whole[low:high]
            self.base = weights
        if self.optimizer is None:
            self.optimizer = self._build(groups)
        grad = torch.from_numpy(gradient)
        missing = set(absent)
        for target, values in zip(self.optimizer.param_groups, groups, strict=True):
            target.update(values)
            target["lr"] = float(values.get("lr", target["lr"])) * scale
        for pieces in self.pieces:
            for tensor, low, high, parameter in pieces:
                parameter.grad = None if tensor in missing else grad[low:high]
        with torch.no_grad():
            if self.housed < 0:
                self._first(self.optimizer)
            else:
                self.optimizer.step()
        if self.housed != (count := sum(map(len, self.optimizer.state.values()))):
            self._house(self.optimizer.state)
            self.housed = count

    def _first(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the first step, for a part of the tensors at a time: so the new state is never twice in memory."""
        whole = {each: each.grad for pieces in self.pieces for *_, each in pieces if each.grad is not None}
        share, part, size = sum(each.numel() for each in whole) / FIRST_PARTS, list[torch.nn.Parameter](), 0
        for each in whole:
            each.grad = None
        for each in whole:
            part.append(each)
            size += each.numel()
            if size >= share:
                self._take(optimizer, part, whole)
                size = 0
        self._take(optimizer, part, whole)

    def _take(
        self,
        optimizer: torch.optim.Optimizer,
        part: list[torch.nn.Parameter],
        whole: Mapping[torch.nn.Parameter, torch.Tensor],
    ) -> None:
        """Take the first step of these parameters alone, and empty the list."""
        for each in part:
            each.grad = whole[each]
        optimizer.step()
        for each in part:
            each.grad = None
        self._house({each: optimizer.state[each] for each in part if each in optimizer.state})
        part.clear()

    def _house(self, states: Mapping[Any, dict[str, Any]]) -> None:
        """Move the state that torch has made to arrays of the allocator."""
        for state in states.values():
            for name, value in state.items():
                if torch.is_tensor(value) and value.ndim and value.dtype is torch.float32:
                    state[name] = self._housed(value.numpy()).reshape(value.shape)

    def _housed(self, values: FloatArray) -> torch.Tensor:
        array = self.arrays.empty(values.size)
        np.copyto(array, values.reshape(-1))
        return torch.from_numpy(array)

    def check(self, hyper: bytes) -> None:
        """Raise RemoteProtocolError for hyper-parameters that torch refuses. Called before anything is folded."""
        if hyper == self.checked:
            return
        groups = self._groups(hyper)
        first = self.first or groups
        try:
            for before, values in zip(first, groups, strict=True):
                self._try(values)
                if _kinds(values) != _kinds(before):  # then one may need state that the other lacks, as with amsgrad
                    self._try(before, values)
                    self._try(values, before)
        except Exception as error:  # torch may raise anything for values of any type
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RemoteProtocolError(f"{self.kind.__name__} refuses its hyper-parameters: {text[:200]}") from None
        self.checked, self.first = hyper, first

    def _try(self, made: dict[str, Any], then: dict[str, Any] | None = None) -> None:
        """Take a step with the values `made`, then one with `then`, to which the group may change later."""
        stand_in = torch.zeros(1, requires_grad=True)
        stand_in.grad = torch.ones(1)
        optimizer = self.kind([stand_in], **made)  # as arguments: torch checks no value of a group
        for update in (None, then) if then is not None else (None,):
            optimizer.param_groups[0].update(update or {})
            optimizer.step()  # some values are checked only in a step, and a rate of NaN is checked nowhere
            if not stand_in.isfinite().all():
                raise ValueError("with them a step leads to no number")

    def _groups(self, hyper: bytes) -> list[dict[str, Any]]:
        """Unpack and check the hyper-parameters: one map of known names for each parameter group."""
        value = unpack(hyper) if hyper else None
        if not isinstance(value, list) or len(value) != len(self.pieces):
            raise RemoteProtocolError("hyper-parameters are a list with one map for each parameter group")
        groups = []
        for group in value:
            if not isinstance(group, dict) or not set(group) <= self.known:
                raise RemoteProtocolError(f"hyper-parameters that {self.kind.__name__} does not know")
            plain = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}
            groups.append({k: v for k, v in plain.items() if k not in IMPLEMENTATION})
        return groups

    def _build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build torch's optimizer over the pieces, with the state that `load` has left."""
        lists = []
        for pieces, values in zip(self.pieces, groups, strict=True):
            lists.append({"params": [piece[3] for piece in pieces], **values})
        # The first group's values are the defaults too: Adagrad fills its sums from the argument, not from the group.
        built: torch.optim.Optimizer = self.kind(lists, **groups[0])
        if self.pending:
            self._restore(built)
        return built

    def _values(self) -> Iterator[tuple[int, int, str, FloatArray]]:
        """Yield (group, piece, name, value) of all state, without copies."""
        if self.optimizer is None:
            for key, values in self.pending.items():
                group, index, name = key.split(".", 2)
                yield int(group), int(index), name, values
            return
        for g, pieces in enumerate(self.pieces):
            for i, piece in enumerate(pieces):
                for name, value in self.optimizer.state.get(piece[3], {}).items():
                    if value is not None:
                        yield g, i, name, torch.as_tensor(value, dtype=torch.float32).detach().numpy()

    def state(self) -> dict[str, FloatArray]:
        """Return the state as "group.piece.name" -> float32 array; a view if torch's own array is float32."""
        return {f"{g}.{i}.{name}": values for g, i, name, values in self._values()}

    def kept(self) -> list[list[Any]]:
        """See ServerOptimizer."""
        return [[self.pieces[g][i][0], n, None if v.ndim else float(v)] for g, i, n, v in self._values()]

    def read(self, name: str, begin: int, end: int) -> FloatArray:
        """See ServerOptimizer."""
        found = np.zeros(end - begin, np.float32)
        for g, i, which, values in self._values():
            _, low, high, _ = self.pieces[g][i]
            first, last = max(low, begin), min(high, end)
            if which == name and values.ndim and first < last:
                found[first - begin : last - begin] = values[first - low : last - low]
        return found

    def load(self, state: dict[str, FloatArray]) -> None:
        """Take over the state of an earlier process; the next step uses it."""
        self.optimizer, self.base, self.housed = None, None, -1
        self.pending = {name: self._housed(values).numpy().reshape(values.shape) for name, values in state.items()}

    def _restore(self, built: torch.optim.Optimizer) -> None:
        """Put the loaded state into torch's optimizer."""
        for key, value in self.pending.items():
            g, i, name = key.split(".", 2)
            parameter = self.pieces[int(g)][int(i)][3]
            built.state[parameter][name] = torch.from_numpy(value)
        self.pending, self.housed = {}, sum(map(len, built.state.values()))
