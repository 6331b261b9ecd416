"""Several torch optimizers as one, such as Muon for the matrices of hidden layers and AdamW for the rest.

Rules
- Groups and state are read from the optimizers at each access, so a script or a scheduler may go on using each of them.
- A closure is evaluated once, before the first optimizer steps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from narrows.protocols.config.key_ranges import TENSORS, VALUES
from narrows.protocols.config.modes import ELEMENTWISE, WHOLE_TENSORS
from narrows.protocols.errors import UsageError
from narrows.protocols.layerwise import LAMB, LARS

LAYERWISE: tuple[type[torch.optim.Optimizer], ...] = (LAMB, LARS)


def as_one(
    inner: torch.optim.Optimizer | Iterable[torch.optim.Optimizer], model: torch.nn.Module
) -> torch.optim.Optimizer:
    """Return one optimizer for one or several: a single one itself, several as a `CombinedOptimizer`.

    Args:
        inner: an optimizer, or a list or container of optimizers.
        model: the module, which names parameters in errors.

    Raises:
        UsageError: the arguments are no optimizer and no module, or the optimizers cannot step together.
    """
    signature = "DistributedOptimizer(optimizer, model)"
    if isinstance(inner, torch.nn.Module):
        raise UsageError(f"{signature}: the optimizer is a {type(inner).__name__}, a module; give the optimizer first")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{signature}: the model is a {type(model).__name__}; give the torch.nn.Module that is trained"
        )
    for one in inner if isinstance(inner, Iterable) else (inner,):
        if not hasattr(one, "param_groups"):
            raise UsageError(f"{signature}: a {type(one).__name__} is no torch optimizer; give one, or a list of them")
    if not isinstance(inner, Iterable):  # a container of optimizers, such as torchtitan's, is one too
        return inner
    each = tuple(inner)
    if not each:
        raise UsageError("DistributedOptimizer got an empty list: give it at least one optimizer")
    return each[0] if len(each) == 1 else CombinedOptimizer(each, model)


def each_of(inner: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    return inner.optimizers if isinstance(inner, CombinedOptimizer) else (inner,)


def why_whole(kind: type[torch.optim.Optimizer], cut: str = VALUES) -> str:
    """Return why servers, or a slice, cannot step an optimizer of this class; "" if they can.

    Args:
        kind: the class.
        cut: one of CUTS. Where tensors are not cut, it may step whole tensors.
    """
    name = kind.__name__
    if kind.__module__.split(".")[:2] != ["torch", "optim"] and kind not in LAYERWISE:
        return f"{kind.__module__}.{name} is not in torch.optim"
    if name in ELEMENTWISE or (name in WHOLE_TENSORS and cut == TENSORS):
        return ""
    return f"{name} is not elementwise" + (", and shards cut tensors" if cut == VALUES else "")


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: it has the groups and the state of all, and each step steps all of them in order.

    Args:
        optimizers: the optimizers, each with its own parameters.
        model: the module, which names parameters in errors.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
        self.optimizers = tuple(optimizers)
        for optimizer in self.optimizers:
            _check_takes_no_closure(optimizer)
        _check_disjoint(self.optimizers, model)
        first, *others = self.optimizers
        # A scheduler looks here for names that it then expects in every group.
        self._building = True
        common = {name: value for name, value in first.defaults.items() if all(name in o.defaults for o in others)}
        super().__init__(self.param_groups, common)
        self._building = False
        self.state: Any = CombinedState(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Give each optimizer as many groups as it has, in order. An assignment by torch's constructor is ignored."""
        if self._building:
            return
        if len(groups) != len(self.param_groups):
            raise UsageError(
                f"param_groups = ...: {len(self.optimizers)} optimizers are wrapped, which have "
                f"{len(self.param_groups)} groups, and these are {len(groups)}: set those of each optimizer"
            )
        left = iter(groups)
        for optimizer in self.optimizers:
            optimizer.param_groups = [next(left) for _ in optimizer.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Accept the groups that torch's constructor adds. Raises UsageError for any other group."""
        if not any(param_group is group for group in self.param_groups):
            raise UsageError(
                f"add_param_group: {len(self.optimizers)} optimizers are wrapped, and the group may be for any of them: "
                "call it on the optimizer that will step it"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure once, step each optimizer along the same gradients, and return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state_dict of each optimizer, in order, as a list under "optimizers"."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each optimizer. Raises UsageError for a state of another number of optimizers."""
        states = state_dict.get("optimizers", [state_dict])
        if len(states) != len(self.optimizers):
            raise UsageError(
                f"this state_dict is of {len(states)} of the {len(self.optimizers)} optimizers that are wrapped: "
                "load one that DistributedOptimizer made of as many"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


class CombinedState(MutableMapping[Any, Any]):
    """The state of several optimizers, by parameter. A value is set in the optimizer that steps the parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def _with(self, key: Any) -> dict[Any, Any]:
        """Return the state of the optimizer that has this parameter."""
        for optimizer in self.optimizers:
            if key in optimizer.state or any(key is p for g in optimizer.param_groups for p in g["params"]):
                return optimizer.state
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        return self._with(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._with(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._with(key)[key]

    def __contains__(self, key: object) -> bool:
        """Look the parameter up without adding it: torch's states are defaultdicts."""
        return any(key in optimizer.state for optimizer in self.optimizers)

    def __iter__(self) -> Iterator[Any]:
        return (key for optimizer in self.optimizers for key in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.optimizers)


def call_step_hooks(inner: torch.optim.Optimizer, after: bool) -> None:
    """Call the step hooks of each optimizer in torch's order, although the server takes the step.

    A pre hook may return other arguments for step(). They are ignored: step() is not called here.

    Args:
        inner: the optimizer.
        after: call the post hooks; else the pre hooks.
    """
    for each in each_of(inner):
        of_all = _global_optimizer_post_hooks if after else _global_optimizer_pre_hooks
        own = each._optimizer_step_post_hooks if after else each._optimizer_step_pre_hooks
        hooks: list[Callable[..., Any]] = (
            [*own.values(), *of_all.values()] if after else [*of_all.values(), *own.values()]
        )
        for hook in hooks:
            hook(each, (each,), {})


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """True if this optimizer cannot step without a closure, as LBFGS."""
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    return any(a.default is a.empty and a.kind in (a.POSITIONAL_ONLY, a.POSITIONAL_OR_KEYWORD) for a in arguments)


def _check_takes_no_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that cannot step without a closure."""
    if needs_closure(optimizer):
        name = type(optimizer).__name__
        raise UsageError(
            f"{name} calls its closure itself, and several optimizers step after one evaluation of it: wrap {name} alone"
        )


def _check_disjoint(optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module) -> None:
    """Raise UsageError with the name of a parameter that two of the optimizers have."""
    names = {id(p): repr(name) for name, p in model.named_parameters()}
    seen: set[int] = set()
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in parameters:
            if id(p) in seen:
                name = names.get(id(p), f"of shape {list(p.shape)}")
                raise UsageError(f"parameter {name} is in two of the optimizers: give each parameter to one of them")
        seen |= {id(p) for p in parameters}
