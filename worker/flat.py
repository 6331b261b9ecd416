"""The parameters of a model as one flat float32 array, in registration order, and back.

Takes parameters of any floating dtype and device; shared parameters are there once, frozen ones and those that the
optimizer does not have are not.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from narrows.protocols.errors import UsageError
from narrows.protocols.keys import Keys
from narrows.protocols.plan import Plan, TensorSpec

FloatArray = npt.NDArray[np.float32]
Array: TypeAlias = Any  # float32[count] where a worker's arrays live (home.py): NumPy's, or torch's on a device


class Flat:
    """Tensors that lie one after the other, as float32 keys [offsets[0], offsets[-1])."""

    def __init__(self, names: list[str], parameters: Sequence[torch.Tensor], offsets: list[int]) -> None:
        self.names, self.parameters, self.offsets = names, list(parameters), offsets
        self.versions: list[int] = []  # of the parameters, as torch counts what is written to them, when we last wrote
        self.held: torch.Tensor | None = None  # the parameters are views of it, one after the other
        self._places: list[int] = []

    @property
    def begin(self) -> int:
        return self.offsets[0]

    @property
    def keys(self) -> Keys:
        return self.offsets[0], self.offsets[-1]

    @property
    def size(self) -> int:
        return self.offsets[-1] - self.offsets[0]

    @property
    def total(self) -> int:
        """Keys of the whole model."""
        return self.size

    def written(self) -> None:
        """The parameters are as we want them."""
        self.versions = [parameter._version for parameter in self.parameters]

    def overwritten(self) -> str:
        """The first tensor that somebody else has written to since, or ""."""
        pairs = zip(self.names, self.parameters, self.versions, strict=True)
        return next((name for name, parameter, version in pairs if parameter._version != version), "")

    def anywhere(self, here: bool) -> bool:
        """Whether something is so in any process that has keys of this model; `here`: in this one."""
        return here

    def whole(self, values: FloatArray) -> FloatArray:
        """Values of the whole model, float32[total], of which these are those of our keys, on the host."""
        return values

    def hold(self) -> None:
        """Have the parameters lie one after the other in memory, where that can be."""

    def moves(self, ranges: Sequence[Keys]) -> bool:
        """Whether keys go from one process to another where the shards have these."""
        return False

    def own(self, ranges: Sequence[Keys]) -> range:
        """The shards have these keys. Which of them this process exchanges."""
        return range(len(ranges))

    def memory(self, begin: int, end: int) -> torch.Tensor | None:
        """Keys [begin, end) of the parameters as they lie in memory, unless the script has put a parameter elsewhere."""
        if self.held is None or any(p.data_ptr() != at for p, at in zip(self.parameters, self._places, strict=True)):
            return None
        return self.held[begin - self.begin : end - self.begin]

    @property
    def plain(self) -> bool:
        """Every parameter is float32, contiguous and on the CPU: keys [begin, end) of it are memory that NumPy can name."""
        return all(_plain(parameter) for parameter in self.parameters)

    def name_of(self, key: int) -> str:
        """The tensor that has this key."""
        return self.names[bisect_right(self.offsets, key) - 1]

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(tensor, low, high) of each tensor that has keys in [begin, end): its keys there are [low, high)."""
        tensor = bisect_right(self.offsets, begin) - 1
        while tensor < len(self.parameters) and self.offsets[tensor] < end:
            low, high = max(begin, self.offsets[tensor]), min(end, self.offsets[tensor + 1])
            if low < high:
                yield tensor, low, high
            tensor += 1

    @torch.no_grad()
    def write_keys(self, begin: int, values: Array) -> None:
        """Set keys [begin, begin + len(values)) of the parameters; in one pass where they are plain."""
        held = self.memory(begin, begin + len(values))
        if held is not None:
            held.copy_(as_tensor(values))
            return
        for tensor, low, high in self.within(begin, begin + len(values)):
            parameter, at = self.parameters[tensor], self.offsets[tensor]
            part = values[low - begin : high - begin]
            if _plain(parameter) and isinstance(part, np.ndarray):
                np.copyto(parameter.detach().view(-1).numpy()[low - at : high - at], part)
                continue
            flat = parameter.detach().reshape(-1)  # a copy, where it is not contiguous
            flat[low - at : high - at].copy_(as_tensor(part))
            if not parameter.is_contiguous():
                parameter.copy_(flat.view(parameter.shape))

    @torch.no_grad()
    def read_keys(self, begin: int, out: Array) -> None:
        """Copy keys [begin, begin + len(out)) of the parameters into `out`."""
        target = as_tensor(out)
        held = self.memory(begin, begin + len(out))
        if held is not None:
            target.copy_(held)
            return
        for tensor, low, high in self.within(begin, begin + len(out)):
            at = self.offsets[tensor]
            target[low - begin : high - begin].copy_(self.parameters[tensor].reshape(-1)[low - at : high - at])

    def lend_gradient(self, begin: int, end: int) -> FloatArray | None:
        """Keys [begin, end) of the gradients as they lie in memory, or None where they are not one plain run."""
        tensor = bisect_right(self.offsets, begin) - 1
        gradient = self.parameters[tensor].grad
        if end > self.offsets[tensor + 1] or gradient is None or not _plain(gradient):
            return None
        flat: FloatArray = gradient.detach().view(-1).numpy()
        return flat[begin - self.offsets[tensor] : end - self.offsets[tensor]]

    def zeros(self) -> FloatArray:
        """float32[size]."""
        return np.zeros(self.size, np.float32)

    def copy(self) -> FloatArray:
        """A copy of the parameters, float32[size]."""
        out = np.empty(self.size, np.float32)
        self.read_keys(self.begin, out)
        return out

    @torch.no_grad()
    def write(self, flat: Array) -> None:
        """Set the parameters from float32[size]."""
        whole, held = as_tensor(flat), self.memory(*self.keys)
        if held is not None:
            held.copy_(whole)
            return
        for i, parameter in enumerate(self.parameters):
            at = self.offsets[i] - self.begin
            parameter.copy_(whole[at : at + parameter.numel()].view(parameter.shape))

    def absent(self) -> list[int]:
        """Indices of the tensors that have no gradient. Raises UsageError for a sparse one."""
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"the gradient of {name!r} is sparse, which cannot be pushed as a gradient: "
                    "use --push update, or Embedding(sparse=False)"
                )
        return [i for i, parameter in enumerate(self.parameters) if parameter.grad is None]

    @torch.no_grad()
    def read_gradients(self, begin: int, out: Array) -> None:
        """Copy keys [begin, begin + len(out)) of the gradients into `out`, zeros where there is none."""
        whole = as_tensor(out)
        for tensor, low, high in self.within(begin, begin + len(out)):
            target = whole[low - begin : high - begin]
            gradient = self.parameters[tensor].grad
            if gradient is None:
                target.zero_()
            else:
                at = self.offsets[tensor]
                target.copy_(gradient.reshape(-1)[low - at : high - at])


def plain(name: str) -> str:
    """The name of a tensor in the model that torch.compile was given: a run's model is what an uncompiled one loads."""
    return name.replace("_orig_mod.", "")


class FlatModel(Flat):
    """Parameters of `model` that `optimizer` steps, but for those whose ids are `apart`: the tables that servers hold."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, apart: Collection[int] = ()) -> None:
        groups = [[p for p in group["params"] if id(p) not in apart] for group in optimizer.param_groups]
        position = {id(p): g for g, group in enumerate(groups) for p in group}
        named = [(plain(name), p) for name, p in model.named_parameters() if id(p) in position and p.requires_grad]
        missing = sum(p.requires_grad for group in groups for p in group) - len(named)
        if missing:
            raise UsageError(
                f"the optimizer has {missing} parameters that are not in the model given to DistributedOptimizer: give both "
                "the same model, and make the optimizer after the last change of its parameters"
            )
        if not named:
            beside = " beside its embedding tables: add one, such as a bias"
            untrained = ": make it of model.parameters() that require a gradient"
            raise UsageError(
                f"the optimizer has no trainable parameter of the model given to DistributedOptimizer"
                f"{beside if apart else untrained}"
            )
        self.specs = tuple(TensorSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch.")) for name, p in named)
        super().__init__([name for name, _ in named], [p for _, p in named], Plan(self.specs, "", ()).offsets())
        index = {id(p): i for i, (_, p) in enumerate(named)}
        self.aliases = tuple(
            (plain(name), index[id(p)])
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in index and plain(name) != self.names[index[id(p)]]
        )
        fixed = ((plain(name), fingerprint([p])) for name, p in model.named_parameters() if not p.requires_grad)
        self.frozen = tuple((name, digest) for name, digest in fixed if digest)
        self.model = model
        self.group_of = [position[id(p)] for p in self.parameters]
        self.groups = len(optimizer.param_groups)

    @torch.no_grad()
    def hold(self) -> None:
        """Make the parameters views of one tensor, float32[size], where all of them can be. Then no copy of keys is of many
        tensors. The layers of a recurrent net have one tensor of their own already, which cuDNN asks for."""
        of_recurrent = {id(p) for m in self.model.modules() if isinstance(m, torch.nn.RNNBase) for p in m.parameters()}
        devices = {p.device for p in self.parameters}
        if len(devices) > 1 or any(not _dense(p) or id(p) in of_recurrent for p in self.parameters):
            return
        held = torch.cat([parameter.detach().view(-1) for parameter in self.parameters])
        for i, parameter in enumerate(self.parameters):
            parameter.data = held[self.offsets[i] : self.offsets[i + 1]].view(parameter.shape)
        self.held, self._places = held, [parameter.data_ptr() for parameter in self.parameters]

    def plan(self, optimizer: str, max_grad_norm: float, degree: float = 1.0) -> Plan:
        groups = tuple(tuple(i for i, g in enumerate(self.group_of) if g == group) for group in range(self.groups))
        return Plan(self.specs, optimizer, groups, max_grad_norm, self.aliases, degree, frozen=self.frozen)

    def kept(self) -> list[torch.Tensor]:
        """Copies of the parameters where they are, in their own dtypes; for `put_back`."""
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def put_back(self, kept: Sequence[torch.Tensor]) -> None:
        for parameter, values in zip(self.parameters, kept, strict=True):
            parameter.copy_(values)


def as_tensor(values: Array) -> torch.Tensor:
    """The same memory."""
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def fingerprint(leaves: Iterable[Any]) -> str:
    """A hash of the tensors among these, 16 digits; "": there is none. FSDP gathers what it has sharded, one by one."""
    digest, any_ = hashlib.blake2b(digest_size=8), False
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel() and not leaf.is_meta:
            any_, whole = True, leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
            digest.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
            digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest() if any_ else ""


def _dense(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.layout == torch.strided and tensor.is_contiguous()


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and _dense(tensor)
