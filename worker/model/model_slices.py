"""The slice of one rank of a group: some of the model's keys in float32, and the optimizer's state of these keys.

How it works (`ModelCut`, where each rank has the whole model)

    backward     whole gradients on each rank
    reduce       sum over the ranks; each rank keeps its slice
    step         the optimizer steps the slice: the parameter groups name it meanwhile (`stepped`)
    exchange     the rank pushes and pulls the keys of its slice, with its shards only
    spread       each rank's slice to the parameters of all ranks

`FsdpSlices` (fsdp_slices.py) does the same for a model that FSDP has sharded: there FSDP reduces and gathers.

Rules
- Slices follow the shards: a rank has the keys of consecutive shards, and exchanges no others.
- The script's model, gradients and parameter groups stay whole. Only the optimizer sees slices, and only while it
  steps.
- Every rank calls all methods but those of `FlatSpace`, in the same order.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.model_spec import ModelSpec
from narrows.protocols.errors import UsageError
from narrows.protocols.wire import HEADER_BYTES_MAX, pack, unpack
from narrows.worker.group.group import Group, shares
from narrows.worker.model.flat import Array, FlatModel, FlatSpace, FloatArray, as_parameter, as_tensor, real, writing
from narrows.worker.model.module_buffers import load_buffers, pack_buffers
from narrows.worker.model.optimizers import each_of, why_whole

State = dict[str, Any]
GradientCheck = Callable[[], tuple[bool, float]]  # `SkippedSteps.check`
SCALARS = ("step",)  # entries of an optimizer's state that are never cut, also if the parameter has no dimension


class ModelSlice(FlatSpace):
    """The base class of slices: the model, the group, and module buffers.

    Args:
        flat: the model as this rank has it.
        inner: the script's optimizer.
        group: the group of this rank.
        check: returns whether this rank's gradient is finite, and its scale (torch.amp.GradScaler).

    Raises:
        UsageError: the optimizer cannot step pieces of tensors, or the ranks have different models.
    """

    def __init__(self, flat: FlatModel, inner: torch.optim.Optimizer, group: Group, check: GradientCheck) -> None:
        super().__init__([], [], [0])
        for reason in filter(None, (why_whole(type(each)) for each in each_of(inner))):
            raise UsageError(f"each process of a group steps a slice of the model, but {reason}: leave out --group")
        self.flat, self.inner, self.group, self.check = flat, inner, group, check
        self._check_same()
        self.slices: list[Keys] = []  # the keys of each rank
        self.lacking: list[int] = []  # tensors without a gradient on any rank, in the newest step
        self.samples = 0  # samples of this rank's gradient; 0 has weight 0 if another rank has samples
        self.counted = 0  # samples of the newest gradients of all ranks; 0: unknown
        self.scale = 1.0  # of this rank's newest gradient

    def _check_same(self) -> None:
        """Raise UsageError if the ranks have different models."""
        plans = self.group.told(hashlib.sha256(self.flat.plan("", 0.0).packed()).digest())
        for rank, plan in enumerate(plans):
            if plan != plans[0]:
                raise UsageError(
                    f"the model of process {rank} of this group is not that of process 0: build the same in each"
                )

    @property
    def total(self) -> int:
        return self.flat.size

    def plan(self, optimizer: str, max_grad_norm: float, degree: float) -> ModelSpec:
        """Return the ModelSpec of the whole model, as `FlatModel.plan` does."""
        return self.flat.plan(optimizer, max_grad_norm, degree)

    def take_buffers(self) -> None:
        """Load the module buffers of rank 0 in all ranks."""
        buffers = self.group.share(pack_buffers(self.flat.model) if self.group.leads else b"")
        if buffers and not self.group.leads:
            load_buffers(self.flat.model, buffers)

    # Steps.

    def weigh(self, samples: int) -> None:
        """Add `samples` to those of this rank's gradient."""
        self.samples += samples

    def step(self, norm: float) -> None:
        """Clip the gradients of all ranks to the L2 norm `norm` (0: no clipping), and step this rank's slice."""
        if norm > 0:
            self._clip(norm)
        with self.stepped():
            self.inner.step()

    def stepped(self) -> AbstractContextManager[None]:
        """Context in which the optimizer's groups name the tensors of the slice."""
        return nullcontext()

    def reduce(self) -> bool:
        """Make the gradients of this slice the mean over the ranks.

        Returns False, without a mean, if a gradient of any rank is not finite.
        """
        raise NotImplementedError

    def tallied(self) -> bool:
        """Tell all ranks which tensors have a gradient, and of how many samples. Returns whether all are finite."""
        missing = set(self.flat.absent())
        present = [int(tensor not in missing) for tensor in range(len(self.flat.parameters))]
        finite, self.scale = self.check()
        self.counted, wrong, *ranks = self.group.sums([self.samples, int(not finite), *present])
        self.lacking = [tensor for tensor, count in enumerate(ranks) if not count]
        return not wrong

    def _clip(self, norm: float) -> None:
        """Clip the slices of all ranks together, as torch.nn.utils.clip_grad_norm_ does."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in gradients]
        squares = float(torch.stack(norms).square().sum()) if norms else 0.0  # the host waits for the device once
        length = math.sqrt(self.group.sum(squares))
        if length > norm or not math.isfinite(length):
            torch._foreach_mul_(gradients, norm / (length + 1e-6)) if gradients else None

    def absent(self) -> list[int]:
        return self.lacking

    def spread(self, values: Array | None = None) -> None:
        """Write each rank's slice to the parameters of all ranks.

        Args:
            values: values of this rank's slice, float32[size]; None: the slice itself.
        """
        raise NotImplementedError

    def refresh(self) -> None:
        """Note that the parameters of this rank were changed in place."""

    def anywhere(self, here: bool) -> bool:
        return bool(self.group.sums([here])[0])

    def whole(self, values: FloatArray) -> FloatArray:
        """Gather the values of all ranks' keys, float32[total]; each rank gives its own, float32[size] on the host."""
        found = torch.zeros(self.total)
        found[self.begin : self.offsets[-1]] = torch.from_numpy(values)
        self.group.assemble(found)
        whole: FloatArray = found.numpy()
        return whole

    # The optimizer's state.

    def take_state(self) -> None:
        """Keep this rank's slice of a state of whole tensors, as a script has loaded it."""

    def whole_state(self) -> AbstractContextManager[None]:
        """Context in which the optimizer's state is of whole tensors, on the host."""
        return nullcontext()


class ModelCut(ModelSlice):
    """Slices of a model that each rank has whole. The ranks sum gradients, and gather parameters.

    Memory on the parameters' device: 4 bytes for each key of the model, in which gradients are summed, 4 bytes for each
    key of the slice, and the optimizer's state of the slice. On CPUs the group has 8 bytes for each key of the model besides.
    """

    def __init__(self, flat: FlatModel, inner: torch.optim.Optimizer, group: Group, check: GradientCheck) -> None:
        super().__init__(flat, inner, group, check)
        self.tensors: list[int] = []  # tensors of which the slice has keys
        flat.hold()
        for each in each_of(inner):  # a loaded state is of whole tensors
            each.register_load_state_dict_post_hook(lambda _: self.take_state())
        self.gradient = group.gradients(flat.size, flat.parameters[0].device)
        self._alike()

    def _alike(self) -> None:
        """Load the parameters and module buffers of rank 0 in all ranks."""
        self.gradient.copy_(as_tensor(self.flat.copy()))
        self.group.spread(self.gradient, [(0, self.total)] + [(0, 0)] * (self.group.size - 1))
        self.flat.write(self.gradient)
        self.take_buffers()

    # Which keys.

    def _of(self, ranges: Sequence[Keys]) -> list[Keys]:
        """The keys of each rank."""
        ends = [begin for begin, _ in ranges] + [self.total]
        return [(ends[first], ends[last]) for first, last in shares(len(ranges), self.group.size)]

    def moves(self, ranges: Sequence[Keys]) -> bool:
        return bool(self.slices) and self._of(ranges) != self.slices

    def own(self, ranges: Sequence[Keys]) -> range:
        """Take over new key ranges, as `FlatSpace.own`. The optimizer's state moves with its keys."""
        slices = self._of(ranges)
        if slices != self.slices:
            states = self._whole_states() if self.slices else None
            self.slices = slices
            self._cut()
            if states is not None:
                for tensor, state in states.items():
                    self.inner.state[self.flat.parameters[tensor]] = state
            self.take_state()
        return range(*shares(len(ranges), self.group.size)[self.group.rank])

    @torch.no_grad()
    def _cut(self) -> None:
        begin, end = self.slices[self.group.rank]
        cuts = list(self.flat.within(begin, end))
        self.tensors = [tensor for tensor, _, _ in cuts]
        self.held = torch.empty(end - begin, device=self.gradient.device)
        self.flat.read_keys(begin, self.held)
        self.parameters = [torch.nn.Parameter(self.held[low - begin : high - begin]) for _, low, high in cuts]
        self.names = [self.flat.names[tensor] for tensor in self.tensors]
        self.offsets = [*(low for _, low, _ in cuts), end] if cuts else [begin]
        self._places = [parameter.data_ptr() for parameter in self.parameters]

    # Steps.

    def reduce(self) -> bool:
        """Make the gradients of this slice the mean over the ranks, weighted by samples if they are known.

        Returns False, without a mean, if a gradient of any rank is not finite.
        """
        usable, total = self.tallied(), self.counted  # the ranks meet: none sums the gradients before these any more
        weight = (self.samples / total if total else 1.0) / self.scale
        self.samples = 0
        if not usable:
            return False
        self.flat.read_gradients(0, self.gradient)
        if weight != 1.0:
            self.gradient *= weight
        self.group.reduce(self.gradient, self.slices)
        own = self.gradient[self.begin : self.offsets[-1]]
        if not total:
            own *= 1 / self.group.size
        for i, (tensor, parameter) in enumerate(zip(self.tensors, self.parameters, strict=True)):
            at = self.offsets[i] - self.begin
            parameter.grad = None if tensor in self.lacking else own[at : at + parameter.numel()]
        return True

    @torch.no_grad()
    def spread(self, values: Array | None = None) -> None:
        """Write each rank's slice, or `values` of it, to the parameters of all ranks."""
        held = self.flat.memory(0, self.total)
        whole = self.gradient if held is None else held
        assert self.held is not None
        with writing(self.flat, 0, self.total):
            whole[self.begin : self.offsets[-1]].copy_(self.held if values is None else as_tensor(values))
            self.group.spread(whole, self.slices)
            if held is None:
                self.flat.write(whole)

    # The optimizer's state.

    @contextmanager
    def stepped(self) -> Iterator[None]:
        """Context in which the optimizer's groups name the tensors of the slice."""
        groups = self.inner.param_groups
        kept = [group["params"] for group in groups]
        slices: list[list[torch.Tensor]] = [[] for _ in groups]
        for tensor, parameter in zip(self.tensors, self.parameters, strict=True):
            slices[self.flat.group_of[tensor]].append(parameter)
        try:
            for group, ours in zip(groups, slices, strict=True):
                group["params"] = ours
            yield
        finally:
            for group, before in zip(groups, kept, strict=True):
                group["params"] = before

    def take_state(self) -> None:
        """Keep this rank's slice of a state of whole tensors, as a script has loaded it."""
        state, groups, taken = self.inner.state, self.inner.param_groups, dict[int, State]()
        for tensor, parameter in enumerate(self.flat.parameters):
            if parameter in state:
                taken[tensor] = dict(state[parameter])
                del state[parameter]
        with self.stepped():
            for i, (tensor, ours) in enumerate(zip(self.tensors, self.parameters, strict=True)):
                if tensor in taken:
                    begin = self.offsets[i] - self.flat.offsets[tensor]
                    keys = slice(begin, begin + ours.numel())
                    shape, group = self.flat.parameters[tensor].shape, groups[self.flat.group_of[tensor]]
                    values = taken[tensor].items()
                    state[ours] = {name: _cut(name, value, shape, keys, ours, group) for name, value in values}

    @contextmanager
    def whole_state(self) -> Iterator[None]:
        """Context in which the optimizer's state is of whole tensors, on the host."""
        state = self.inner.state
        with self.stepped():
            kept = {ours: state[ours] for ours in self.parameters if ours in state}
        whole = self._whole_states()
        try:
            for tensor, values in whole.items():
                state[self.flat.parameters[tensor]] = values
            yield
        finally:
            for tensor in whole:
                del state[self.flat.parameters[tensor]]
            with self.stepped():
                for ours, own in kept.items():
                    state[ours] = own

    def _whole_states(self) -> dict[int, State]:
        """Gather the state of each tensor from all ranks, and remove this rank's parts from the optimizer."""
        state, parts, plain = self.inner.state, dict[tuple[int, str], torch.Tensor](), list[list[Any]]()
        with self.stepped():
            for tensor, ours in zip(self.tensors, self.parameters, strict=True):
                for name, value in state[ours].items() if ours in state else ():
                    if _is_part(name, value, ours.shape):
                        parts[tensor, name] = value
                        plain.append([tensor, name, str(value.dtype).removeprefix("torch."), None])
                    elif isinstance(value, torch.Tensor):
                        plain.append([tensor, name, str(value.dtype).removeprefix("torch."), value.tolist()])
                    else:
                        plain.append([tensor, name, "", value])
                state.pop(ours, None)
        told: list[Any] = [unpack(each, HEADER_BYTES_MAX) for each in self.group.told(pack(plain))]
        whole: dict[int, State] = {}
        known = {(tensor, name): (dtype, value) for rows in told for tensor, name, dtype, value in rows}
        for (tensor, name), (dtype, value) in sorted(known.items()):
            if not dtype:
                found: Any = value
            elif value is not None:
                found = torch.tensor(value, dtype=getattr(torch, dtype))
            else:
                flat = torch.zeros(self.flat.specs[tensor].key_count, dtype=getattr(torch, dtype))
                if (tensor, name) in parts:
                    at = self.offsets[self.tensors.index(tensor)] - self.flat.offsets[tensor]
                    flat[at : at + parts[tensor, name].numel()] = parts[tensor, name].cpu()
                self.group.assemble(flat)
                found = as_parameter(flat, self.flat.specs[tensor])
            whole.setdefault(tensor, {})[name] = found
        return whole


def _is_part(name: str, value: Any, shape: torch.Size) -> bool:
    """True if `value` has one entry for each entry of the parameter, so that it is cut with it."""
    return isinstance(value, torch.Tensor) and value.shape == shape and name not in SCALARS


def _cut(name: str, value: Any, shape: torch.Size, keys: slice, ours: torch.Tensor, group: dict[str, Any]) -> Any:
    if not _is_part(name, value, shape):
        return placed(name, value, ours, group)
    part = real(value.detach()).reshape(-1)[keys].to(ours.device, copy=True)
    return part.float() if part.is_floating_point() else part


def placed(name: str, value: Any, ours: torch.Tensor, group: dict[str, Any]) -> Any:
    """Return `value` on the device on which torch's load_state_dict puts it.

    Step counts are on the host, unless the optimizer is capturable or fused and reads them on the device.
    """
    there = name not in SCALARS or group.get("capturable") or group.get("fused")
    return value.to(ours.device) if there and isinstance(value, torch.Tensor) else value
