"""Finds what a script changes of its model other than by training it, and warns the user.

How it works
1. `WeightEditCheck.look` runs before each step, and before the shared model is shown.
2. `RegisteredTensor` compares the model's parameters with those that it had when DistributedOptimizer was made. A
   replaced or converted parameter ends the worker with a sentence. A new parameter, which no other worker has, is named
   once.
3. `WeightEditCheck` warns once if the script has written a weight between two steps, in modes in which an update does
   not carry that change as it is.
4. `OwnedTensor` has the parameters that no optimizer steps, such as a teacher that the script moves towards its
   student. It compares a sample of their values. The user is told once of those that have changed, and
   worker/checkpoint/optimizer_state.py keeps them in its file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import is_

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from narrows.protocols.config.model_spec import TRAINED
from narrows.protocols.config.modes import FoldRule
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import UsageError
from narrows.worker.model.flat import FlatModel, dtype_of, plain, raw_bytes
from narrows.worker.runtime.launcher_pipe import say, say_here

LOST = (
    "{!r} was changed between two steps: where gradients are pushed the server's model holds, and that change is lost; load "
    "weights before DistributedOptimizer is made, or use --push update"
)
NOT_JUST_THAT = (
    "{!r} was changed between two steps: with --outer-momentum the model goes on changing so, with --merge-delay it keeps "
    "a part of that; load weights before DistributedOptimizer is made, or use --outer-momentum 0 and no --merge-delay"
)
REPLACED = (
    "the parameter {!r} was replaced after DistributedOptimizer was made, and no worker trains the {!r} in its place: replace "
    "modules, call load_state_dict(assign=True) and add parametrizations before that"
)
CONVERTED = "the parameter {!r} was {} when DistributedOptimizer was made, and is {} now: convert the model before that"
LATE = (
    "{!r} came into the model after DistributedOptimizer was made: no optimizer of the run steps it and it is not shared; add "
    "modules before that"
)
OWNED = (
    "the script changes {!r}{}, which no optimizer of the run steps: each worker has its own, and no server has it; {}"
)
KEPT = "its values are kept in {} for --resume"
NOT_KEPT = (
    "give ps-worker --checkpoint-dir, or --resume begins with its first values; servers keep module buffers alone"
)
SAMPLE = 256  # values of a tensor that are compared: a moving average changes nearly all of them


class RegisteredTensor:
    """The parameters that a model had when its optimizer was wrapped."""

    def __init__(self, flat: FlatModel) -> None:
        self.flat = flat
        self.shapes = [(parameter.shape, parameter.dtype) for parameter in flat.parameters]
        self.sharded = any(hasattr(parameter, "placements") for parameter in flat.parameters)
        self.known: dict[int, torch.Tensor] = {}  # by id; a tensor in this dict keeps its id
        self.lost: set[str] = set()  # names of parameters that are no longer in the model
        self._take()

    def _take(self) -> None:
        modules = list(self.flat.model.modules())
        self.seen = [(each, tuple(each._parameters.values()), tuple(each._modules.values())) for each in modules]
        self.known |= {id(parameter): parameter for parameter in self.flat.model.parameters()}

    def _same(self) -> bool:
        """Return whether each module has the parameters and children that it had at the last check."""
        return all(
            len(parameters) == len(module._parameters)
            and len(children) == len(module._modules)
            and all(map(is_, parameters, module._parameters.values()))
            and all(map(is_, children, module._modules.values()))
            for module, parameters, children in self.seen
        )

    def check(self) -> None:
        """Warn of each new parameter once. Raises UsageError if a parameter of the run was replaced or converted."""
        for name, parameter, had in zip(self.flat.names, self.flat.parameters, self.shapes, strict=True):
            if (parameter.shape, parameter.dtype) != had:
                before, now = (
                    f"{str(dtype).removeprefix('torch.')}{list(shape)}"
                    for shape, dtype in (had, (parameter.shape, parameter.dtype))
                )
                raise UsageError(CONVERTED.format(name, before, now))
        if self.sharded or self._same():  # FSDP replaces parameters by its own for a while
            return
        named = {plain(name): parameter for name, parameter in self.flat.model.named_parameters(remove_duplicate=False)}
        here = {id(parameter) for parameter in named.values()}
        late = [name for name, p in named.items() if p.requires_grad and id(p) not in self.known]
        lost = [name for name, p in zip(self.flat.names, self.flat.parameters, strict=True) if id(p) not in here]
        replaced = [name for name in lost if name in late or name not in self.lost]
        if late and replaced:
            raise UsageError(REPLACED.format(replaced[0], replaced[0] if replaced[0] in late else late[0]))
        if late:
            say(LATE.format(late[0]))
        self.lost |= {*lost}
        self._take()


class OwnedTensor:
    """The parameters of a model that no optimizer steps."""

    def __init__(self, flat: FlatModel, stepped: Collection[int]) -> None:
        """Take samples of the parameters of `flat.model`, except those whose ids are in `stepped`."""
        self.tensors = {
            plain(name): parameter
            for name, parameter in flat.model.named_parameters()
            if id(parameter) not in stepped and _readable(parameter)
        }
        self._kept_in = ""  # the folder in which their state is kept; "": none
        self._first = {name: _sample(tensor) for name, tensor in self.tensors.items()}
        self._changed: set[str] = set()
        self._told = False

    def keep_in(self, folder: str) -> None:
        """Note that the state of these tensors is kept in this folder."""
        self._kept_in = folder

    def look(self, step: int) -> None:
        """Compare the samples after steps 1, 2, 4, 8, ..., and warn once if some tensors have changed."""
        if self._told or step & (step - 1) or not (names := self.changed()):
            return
        self._told = True
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        say(OWNED.format(names[0], more, KEPT.format(self._kept_in) if self._kept_in else NOT_KEPT))

    def changed(self) -> list[str]:
        """Return the names of the tensors that have changed since the optimizer was wrapped, in the model's order."""
        same = [name for name in self.tensors if name not in self._changed]
        self._changed |= {name for name in same if _sample(self.tensors[name]) != self._first[name]}
        return [name for name in self.tensors if name in self._changed]

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the tensors that have changed, on the host."""
        return {name: self.tensors[name].detach().to("cpu", copy=True) for name in self.changed()}

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `state` returned in another process. It warns of tensors of other names or shapes, left out."""
        for name, values in state.items():
            mine = self.tensors.get(name)
            if mine is None or mine.shape != values.shape:
                say(f"a state of {name!r} is kept, and this model has none of its name and shape: it is left out")
                continue
            mine.copy_(values)
            self._changed.add(name)


def _readable(parameter: torch.Tensor) -> bool:
    """Return whether a script may change the parameter in place, and this process has all of it."""
    strided = (
        parameter.layout == torch.strided and not parameter.is_meta and not is_traceable_wrapper_subclass(parameter)
    )
    return strided and dtype_of(parameter) in TRAINED and parameter.numel() > 0


def _sample(tensor: torch.Tensor) -> bytes:
    """Return the bytes of about SAMPLE values of the tensor, or of all values if it has fewer."""
    stride = 1 + tensor.numel() // SAMPLE
    if tensor.is_contiguous():
        return raw_bytes(tensor.detach().view(-1)[::stride]).tobytes()
    return raw_bytes(
        torch.take(tensor.detach(), torch.arange(0, tensor.numel(), stride, device=tensor.device))
    ).tobytes()


class WeightEditCheck:
    """Finds the script's changes of one model.

    Args:
        flat: the parameters of the run.
        apart: ids of the parameters that are embedding tables of the servers.
        settings: the settings of the run.
    """

    def __init__(self, flat: FlatModel, apart: Collection[int], settings: Settings) -> None:
        self.flat = flat
        self.change(settings)
        self.registered = RegisteredTensor(flat)
        self.owned = OwnedTensor(flat, {*map(id, flat.parameters), *apart})

    def change(self, settings: Settings) -> None:
        """Check by the rule of the plan that the run has from now on."""
        inexact = NOT_JUST_THAT if settings.outer_momentum > 0 or settings.merge_delay > 0 else ""
        self.text = LOST if settings.mode().rule is FoldRule.OPTIMIZER else inexact

    def look(self) -> None:
        """Check what the script has changed since the last call.

        Raises UsageError if a parameter of the run was replaced or converted.
        """
        self.registered.check()
        if self.text and (tensor := self.flat.overwritten()):
            say_here(self.text.format(tensor))
            self.text = ""
