"""The script's optimizers on a shard, rebuilt by the names of their classes from plain values.

How it works

    keys of the shard  | tensor 0 | tensor 1 ........................ | 2 | 3 | 4 ...
    chunks             | ........ | ........ | ........ | ....        | . | . | . ...   of at most PART_VALUES
    parts              | ........ | ........ | ........ | ................... | ...     an optimizer of torch for each

1. The piece of each tensor that lies on the shard is cut into chunks. A chunk is one torch parameter, a view of the
   shard's flat weights. So an elementwise optimizer does to the chunks what it would do to the whole tensor. For an
   optimizer of WHOLE_TENSORS a chunk is the whole tensor, in its shape.
2. A step goes from part to part. The mean of a part is summed, then its chunks step: so torch's passes over weights,
   gradient and state find them in the CPU's cache. Classes in RULES step in one pass, without torch (optimizer_kernels.py).
3. The state of a piece is one array for each name that torch gives it, such as "exp_avg". The chunks' states are views
   of it. torch makes the state of a chunk in its first step, and it moves to that array at once.
4. A piece without a gradient in this step is skipped, as in one process.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.config.modes import ELEMENTWISE, WHOLE_TENSORS
from narrows.protocols.errors import RemoteProtocolError
from narrows.protocols.layerwise import LAMB, LARS
from narrows.protocols.wire import unpack
from narrows.ps.store import optimizer_kernels
from narrows.ps.store.changes import FloatArray
from narrows.ps.store.hyperparameter_vote import IMPLEMENTATION
from narrows.ps.store.optimizer_kernels import RULES, StepRule
from narrows.ps.store.reduction import PART_VALUES, Mean
from narrows.ps.store.store import HEAP, ArrayAllocator

LAYERWISE = {"LAMB": LAMB, "LARS": LARS}  # the other classes are in torch.optim
# A part of so many chunks steps all of them in one call of torch for each operation (foreach), to the same bits. These classes
# round otherwise there.
MANY, ROUND_OTHERWISE = 64, ("ASGD", "NAdam", "RAdam")
MADE_MAX = 16  # parts whose state is made before their freed memory goes back to the system


def warm_up(say: Callable[[str], None] = lambda text: None) -> None:
    """Make one optimizer, so that torch's imports, which take seconds without a heartbeat, are done before joining."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer_kernels.warm_up()


def _give_back() -> None:
    """Give pages of freed memory back to the system: torch's state of chunks, now moved, has left a hole for each."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)


def _kinds(values: dict[str, Any]) -> dict[str, object]:
    """Return what decides which state an optimizer keeps: its flags, and whether each number is 0."""
    return {name: bool(value) if isinstance(value, (bool, int, float)) else value for name, value in values.items()}


def _try(kind: Any, made: dict[str, Any], then: dict[str, Any] | None = None) -> None:
    """Take a step of this class with the values `made`, then one with `then`, to which the group may change later.

    Raises:
        Exception: torch refuses the values, or a step with them leads to no number.
    """
    shape = (2, 2) if kind.__name__ in WHOLE_TENSORS else (1,)
    stand_in = torch.zeros(shape, requires_grad=True)
    stand_in.grad = torch.ones(shape)
    optimizer = kind([stand_in], **made)  # as arguments: torch checks no value of a group
    for update in (None, then) if then is not None else (None,):
        optimizer.param_groups[0].update(update or {})
        optimizer.step()  # some values are checked only in a step, and a rate of NaN is checked nowhere
        if not stand_in.isfinite().all():
            raise ValueError("with them a step leads to no number")


@dataclass(slots=True)
class TensorPiece:
    """The piece of one tensor that lies on the shard.

    Attributes:
        group: its parameter group.
        tensor: its index in the model spec.
        low, high: its keys, counted from the shard's first key.
        state: its state by name, float32[high - low]; a number that holds for all keys has no axis.
        loaded: the state that its chunks begin with, {} if torch makes it.
        live: torch's state of its first chunk, {} before the first step: there the numbers are the newest.
        begun: a step with a class of RULES has used the state before.
    """

    group: int
    tensor: int
    low: int
    high: int
    state: dict[str, FloatArray] = field(default_factory=dict)
    loaded: dict[str, FloatArray] = field(default_factory=dict)
    live: dict[str, Any] = field(default_factory=dict)
    begun: bool = False

    def prepare(self, rule: StepRule, arrays: ArrayAllocator) -> None:
        """Make the state that a step by this rule needs and the piece lacks."""
        self.begun = all(name in self.state for name in rule.names)
        for name in rule.names if not self.begun else ():
            if name not in self.state:
                self.state[name] = arrays.empty(self.high - self.low)
                self.state[name].fill(0)
        if rule.counts and "step" not in self.state:
            self.state["step"] = np.zeros((), np.float32)

    def count(self, rule: StepRule) -> None:
        """Note that a step by this rule is done."""
        if rule.counts:
            self.state["step"] += 1

    def values(self) -> Iterator[tuple[str, FloatArray]]:
        """Yield the name and value of each state, without copies."""
        for name, value in self.state.items():
            newest = value if value.ndim else self.live.get(name, value)
            yield name, newest.detach().float().numpy() if torch.is_tensor(newest) else newest


@dataclass(slots=True)
class Chunk:
    """Keys [low, high) of one piece, and the torch parameter of this shape that is their view."""

    piece: TensorPiece
    low: int
    high: int
    shape: tuple[int, ...]
    parameter: torch.nn.Parameter


class OptimizerPart:
    """Neighbouring chunks, which step together.

    Args:
        chunks: in the order of keys.
        arrays: the allocator of their state.
        ruled: the parameter groups that step by a rule of RULES.
    """

    def __init__(self, chunks: list[Chunk], arrays: ArrayAllocator, ruled: Collection[int]) -> None:
        self.arrays = arrays
        self.low, self.high = chunks[0].low, chunks[-1].high
        self.ruled = [chunk for chunk in chunks if chunk.piece.group in ruled]
        self.chunks = [chunk for chunk in chunks if chunk.piece.group not in ruled]  # those that torch steps
        self.groups = sorted({chunk.piece.group for chunk in self.chunks})
        self.drop()

    def drop(self) -> None:
        """Drop torch's optimizers: the next step builds them anew."""
        self.optimizers: dict[Any, torch.optim.Optimizer] = {}  # by class
        self.entries = 0  # of torch's state, when it was last moved to the pieces' arrays

    def show(self, weights: torch.Tensor) -> None:
        """Make the parameters views of these weights."""
        for chunk in self.chunks:
            chunk.parameter.data = weights[chunk.low : chunk.high].view(chunk.shape)

    def _build(self, kinds: list[Any], groups: list[dict[str, Any]]) -> None:
        """Build torch's optimizers, with the state that was loaded."""
        for kind in dict.fromkeys(kinds[group] for group in self.groups):
            lists = [
                {"params": [chunk.parameter for chunk in self.chunks if chunk.piece.group == group], **groups[group]}
                for group in self.groups
                if kinds[group] is kind
            ]
            # The first group's values are the defaults too: Adagrad fills its sums from the argument, not from the group.
            self.optimizers[kind] = kind(lists, **groups[kinds.index(kind)])
        for chunk in self.chunks:
            piece, state = chunk.piece, self.optimizers[kinds[chunk.piece.group]].state[chunk.parameter]
            for name, value in piece.loaded.items():
                at = value[chunk.low - piece.low : chunk.high - piece.low] if value.ndim else value.copy()
                state[name] = torch.from_numpy(at).view(chunk.shape if value.ndim else ())
            if chunk.low == piece.low:
                piece.live = state

    def step(
        self,
        kinds: list[Any],
        rules: dict[int, StepRule],
        weights: FloatArray,
        gradient: Mean,
        groups: list[dict[str, Any]],
        absent: set[int],
    ) -> bool:
        """Step the chunks of all tensors but the absent ones.

        Args:
            kinds: the class of each group.
            rules: the rule of each group that has one.
            weights: of the shard.
            gradient: the mean.
            groups: the hyper-parameters of each group.
            absent: the tensors without a gradient.

        Returns:
            True if torch has made new state.
        """
        if (
            self.chunks and not self.optimizers
        ):  # of absent tensors too: Adagrad makes their state here, on all shards alike
            self._build(kinds, groups)
        for kind, optimizer in self.optimizers.items():
            ours = [group for group in self.groups if kinds[group] is kind]
            for target, group in zip(optimizer.param_groups, ours, strict=True):
                target.update(groups[group])
                if len(self.chunks) >= MANY and "foreach" in target and kind.__name__ not in ROUND_OTHERWISE:
                    target["foreach"] = True
        ruled, stepped = (
            [chunk for chunk in chunks if chunk.piece.tensor not in absent] if absent else chunks
            for chunks in (self.ruled, self.chunks)
        )
        if ruled or stepped:
            values = gradient(self.low, self.high)
            self._step_ruled(ruled, rules, weights, values)
            whole = torch.from_numpy(values)
            for chunk in stepped:
                chunk.parameter.grad = whole[chunk.low - self.low : chunk.high - self.low].view(chunk.shape)
            for optimizer in self.optimizers.values() if stepped else ():
                optimizer.step()
            for chunk in stepped:
                chunk.parameter.grad = None
        states = [state for optimizer in self.optimizers.values() for state in optimizer.state.values()]
        if self.entries == (entries := sum(map(len, states))):
            return False
        for chunk in self.chunks:
            self._move(chunk, self.optimizers[kinds[chunk.piece.group]].state[chunk.parameter])
        self.entries = entries
        return True

    def _step_ruled(
        self, chunks: list[Chunk], rules: dict[int, StepRule], weights: FloatArray, gradient: FloatArray
    ) -> None:
        """Step chunks by the rules of their groups. Neighbours of one group step together where they have no state."""
        turn = 0
        while turn < len(chunks):
            piece, low, high = chunks[turn].piece, chunks[turn].low, chunks[turn].high
            rule, turn = rules[piece.group], turn + 1
            while not rule.names and turn < len(chunks):
                if chunks[turn].low != high or chunks[turn].piece.group != piece.group:
                    break
                high, turn = chunks[turn].high, turn + 1
            at = slice(low - piece.low, high - piece.low)
            rule.run(piece.state, piece.begun, at, gradient[low - self.low : high - self.low], weights[low:high])

    def _move(self, chunk: Chunk, state: dict[str, Any]) -> None:
        """Move the state that torch has made to the arrays of the piece."""
        piece = chunk.piece
        for name, value in state.items():
            if not torch.is_tensor(value):
                continue
            if not value.ndim:
                piece.state.setdefault(name, value.numpy())
                continue
            if name not in piece.state:
                piece.state[name] = self.arrays.empty(piece.high - piece.low)
            own = torch.from_numpy(piece.state[name][chunk.low - piece.low : chunk.high - piece.low]).view(chunk.shape)
            if own.data_ptr() != value.data_ptr():
                state[name] = own.copy_(value)


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
            RemoteProtocolError: The server knows no such class, or the class steps whole tensors and the shard has a
                part of one.
        """
        for name in plan.kinds:
            if name not in (*ELEMENTWISE, *WHOLE_TENSORS):
                raise RemoteProtocolError(f"the server cannot rebuild optimizer {name!r}; use --push update")
        self.made_of, self.arrays = (plan, begin, end), arrays
        self.kinds: list[Any] = [LAYERWISE.get(name) or getattr(torch.optim, name) for name in plan.kinds]
        self.ruled = {group for group, name in enumerate(plan.kinds) if name in RULES}
        self.parameters = [inspect.signature(kind.__init__).parameters for kind in self.kinds]
        self.checked: bytes | None = None  # the newest hyper-parameters that `check` has accepted
        self.first: list[dict[str, Any]] | None = None  # the first that it has accepted
        self.pieces = [
            [TensorPiece(group, tensor, low - begin, high - begin) for tensor, low, high in pieces]
            for group, pieces in enumerate(plan.pieces(begin, end))
        ]
        self.base: FloatArray | None = None
        self.parts = self._parts()

    def _parts(self) -> list[OptimizerPart]:
        """Cut the pieces into chunks, and put neighbouring chunks together. A chunk is a part at most."""
        parts, chunks, size = list[OptimizerPart](), list[Chunk](), 0
        for piece in sorted((piece for pieces in self.pieces for piece in pieces), key=lambda piece: piece.low):
            shape = self._whole(piece)
            most = piece.high - piece.low if shape is not None else PART_VALUES
            for low in range(piece.low, piece.high, most):
                high = min(piece.high, low + most)
                if chunks and size + high - low > PART_VALUES:
                    parts.append(OptimizerPart(chunks, self.arrays, self.ruled))
                    chunks, size = [], 0
                empty = torch.nn.Parameter(torch.empty(0), requires_grad=False)
                chunks.append(Chunk(piece, low, high, (high - low,) if shape is None else shape, empty))
                size += high - low
        return [*parts, OptimizerPart(chunks, self.arrays, self.ruled)] if chunks else parts

    def _whole(self, piece: TensorPiece) -> tuple[int, ...] | None:
        """Return the shape of a tensor that its optimizer steps as a whole; None: it steps chunks."""
        plan, _, _ = self.made_of
        name, tensor = plan.kinds[piece.group], plan.tensors[piece.tensor]
        if name not in WHOLE_TENSORS:
            return None
        if piece.high - piece.low != tensor.size:
            raise RemoteProtocolError(
                f"{name} steps whole tensors, and a shard has a part of {tensor.name!r}: use --cut tensors"
            )
        return tensor.shape or (1,)  # state without an axis is a number that holds for all keys

    def __getstate__(self) -> tuple[Any, ...]:
        """Return plain values: torch's state and parameters are views of the weights, and pickle would copy them."""
        return (*self.made_of, self.arrays, self.state(), self.checked, self.first)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        plan, begin, end, arrays, values, checked, first = state
        self.__init__(plan, begin, end, arrays=arrays)  # type: ignore[misc]
        self._take(values)
        self.checked, self.first = checked, first

    def step(self, weights: FloatArray, gradient: Mean, hyper: bytes, absent: Sequence[int], scale: float) -> None:
        """Take one step; see ServerOptimizer."""
        groups = self._groups(hyper)
        for values, parameters in zip(groups, self.parameters, strict=True):
            values["lr"] = float(values.get("lr", parameters["lr"].default)) * scale
        missing = set(absent)
        if weights is not self.base:
            whole = torch.from_numpy(weights)
            for part in self.parts:
                part.show(whole)
            self.base = weights
        rules = {group: self._rule(group, groups[group]) for group in self.ruled}
        stateful = [group for group in self.ruled if rules[group].names]
        ruled = [(p, rules[p.group]) for group in stateful for p in self.pieces[group] if p.tensor not in missing]
        for piece, rule in ruled:
            piece.prepare(rule, self.arrays)
        with torch.no_grad():
            made = 0
            for part in self.parts:
                made += part.step(self.kinds, rules, weights, gradient, groups, missing)
                if made == MADE_MAX or (made and part is self.parts[-1]):
                    _give_back()
                    made = 0
        for piece, rule in ruled:
            piece.count(rule)

    def _rule(self, group: int, values: dict[str, Any]) -> StepRule:
        """Return the rule of a group with these hyper-parameters. What they leave out has torch's default."""
        defaults = {name: each.default for name, each in self.parameters[group].items()}
        return RULES[self.kinds[group].__name__](defaults | values)

    def check(self, hyper: bytes) -> None:
        """Raise RemoteProtocolError for hyper-parameters that torch refuses. Called before anything is folded."""
        if hyper == self.checked:
            return
        groups = self._groups(hyper)
        first = self.first or groups
        for kind, before, values in zip(self.kinds, first, groups, strict=True):
            try:
                _try(kind, values)
                if _kinds(values) != _kinds(before):  # then one may need state that the other lacks, as with amsgrad
                    _try(kind, before, values)
                    _try(kind, values, before)
            except Exception as error:  # torch may raise anything for values of any type
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise RemoteProtocolError(f"{kind.__name__} refuses its hyper-parameters: {text[:200]}") from None
        self.checked, self.first = hyper, first

    def _groups(self, hyper: bytes) -> list[dict[str, Any]]:
        """Unpack and check the hyper-parameters: one map of known names for each parameter group."""
        value = unpack(hyper) if hyper else None
        if not isinstance(value, list) or len(value) != len(self.pieces):
            raise RemoteProtocolError("hyper-parameters are a list with one map for each parameter group")
        groups = []
        for group, kind, parameters in zip(value, self.kinds, self.parameters, strict=True):
            if not isinstance(group, dict) or not set(group) <= set(parameters) - {"self", "params"}:
                raise RemoteProtocolError(f"hyper-parameters that {kind.__name__} does not know")
            plain = {k: tuple(v) if isinstance(v, list) else v for k, v in group.items()}
            groups.append({k: v for k, v in plain.items() if k not in IMPLEMENTATION})
        return groups

    def _values(self) -> Iterator[tuple[TensorPiece, str, str, FloatArray]]:
        """Yield (piece, its name in a checkpoint, name, value) of all state, without copies."""
        for pieces in self.pieces:
            for index, piece in enumerate(pieces):
                for name, value in piece.values():
                    yield piece, f"{piece.group}.{index}.{name}", name, value

    def state(self) -> dict[str, FloatArray]:
        """Return the state as "group.piece.name" -> float32 array; the arrays of pieces are not copied."""
        return {named: value for _, named, _, value in self._values()}

    def kept(self) -> list[list[Any]]:
        """See ServerOptimizer."""
        return [[piece.tensor, name, None if v.ndim else float(v)] for piece, _, name, v in self._values()]

    def read(self, name: str, begin: int, end: int) -> FloatArray:
        """See ServerOptimizer."""
        found = np.zeros(end - begin, np.float32)
        for piece, _, which, values in self._values():
            first, last = max(piece.low, begin), min(piece.high, end)
            if which == name and values.ndim and first < last:
                found[first - begin : last - begin] = values[first - piece.low : last - piece.low]
        return found

    def load(self, state: dict[str, FloatArray]) -> None:
        """Take over the state of an earlier process; the next step uses it."""
        taken = {}
        for name, values in state.items():
            taken[name] = self.arrays.empty(values.size).reshape(values.shape)
            np.copyto(taken[name], values)
        self._take(taken)

    def _take(self, state: dict[str, FloatArray]) -> None:
        """Make these arrays the state of the pieces. The next step builds torch's optimizers anew."""
        for part in self.parts:
            part.drop()
        self.base = None
        for piece in (piece for pieces in self.pieces for piece in pieces):
            piece.state, piece.loaded, piece.live = {}, {}, {}
        for key, values in state.items():
            group, index, name = key.split(".", 2)
            piece = self.pieces[int(group)][int(index)]
            piece.state[name] = piece.loaded[name] = values
