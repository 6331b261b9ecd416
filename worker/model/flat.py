"""The parameters of a model as one flat float32 array, in registration order, and back.

How it works

    parameters    weight [2, 3]        bias [2]      scale (complex) []
    keys          0 1 2 3 4 5          6 7           8 9 (real, imaginary)
    offsets       0                    6             8                10

1. `FlatModel` takes the parameters that the optimizer steps, and gives each a range of keys. Any dtype of
   protocols/config/model_spec.py: TRAINED is taken, on any device.
2. A complex number is two keys, its real and its imaginary part. A shared parameter is there once. Frozen parameters
   and those that the optimizer does not have are left out.
3. `read_keys`, `write_keys` and `read_gradients` copy ranges of keys. Values are converted to and from float32.
4. `hold` may move all parameters into one tensor, so that a copy of keys is one copy (`memory`).
5. `writing` keeps torch's version counters right, so that `overwritten` finds only what the script has changed.
6. Small tensors are copied many at a time (`alike`): a call of torch for each of 10,000 takes longer than the step.
7. A parameter that FSDP2 has placed on a mesh of one process is whole here, inside a DTensor: `local_part`. FSDP then
   computes on copies, and drops them when parameters are written (`reshard`).

`FlatSpace` is what a whole model and a slice of it (model_slices.py) have in common.
"""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.dlpack import from_dlpack

from narrows.protocols.config.key_ranges import Keys
from narrows.protocols.config.model_spec import DTYPES, TRAINED, ModelSpec, TensorSpec
from narrows.protocols.errors import UsageError

FloatArray = npt.NDArray[np.float32]
DENSE = {torch.Tensor, torch.nn.Parameter}  # classes without a part elsewhere
DTYPE, LAYOUT = attrgetter("dtype"), attrgetter("layout")  # map() calls these in half the time of a loop
MANY, SMALL = 16, 1 << 14  # so many tensors of so few values in the mean are copied together
SPARSE_ROWS, SPARSE_COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
Array: TypeAlias = (
    Any  # float32[count] where a worker's arrays live (device_placement.py): NumPy's, or torch's on a device
)


class FlatSpace:
    """Tensors laid out one after the other, as float32 keys [offsets[0], offsets[-1]).

    Args:
        names: the name of each tensor.
        parameters: the tensors.
        offsets: the first key of each tensor, and the end of the last; rising.
    """

    fsdp: Sequence[Any] = ()  # the modules that FSDP2 has sharded
    announced: bool = False  # what comes counts as written already (`announce`)

    def __init__(self, names: list[str], parameters: Sequence[torch.Tensor], offsets: list[int]) -> None:
        self.names, self.parameters, self.offsets = names, list(parameters), offsets
        self.versions: list[int] = []  # torch's version of each parameter after this class last wrote
        self.held: torch.Tensor | None = None  # float32[size], the memory of all parameters; None: separate memory
        self._places: list[int] = []  # the address of each parameter in `held`

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
        """Number of keys of the whole model, of which `size` are here."""
        return self.size

    def written(self) -> None:
        """Note the parameters' versions: later changes are the script's."""
        self.versions = [parameter._version for parameter in self.parameters]

    def overwritten(self) -> str:
        """Name the first tensor that the script has changed since `written`; "" if none."""
        pairs = zip(self.names, self.parameters, self.versions, strict=True)
        return next((name for name, parameter, version in pairs if parameter._version != version), "")

    def anywhere(self, here: bool) -> bool:
        """Return whether `here` is true in any process that has keys of this model."""
        return here

    def whole(self, values: FloatArray) -> FloatArray:
        """Return the values of the whole model, float32[total] on the host.

        Args:
            values: the values of this process's keys, float32[size] on the host.
        """
        return values

    def hold(self) -> None:
        """Move the parameters into one block of memory, if they allow it."""

    def moves(self, ranges: Sequence[Keys]) -> bool:
        """Return whether keys must go from one process to another if the shards have these key ranges."""
        return False

    def own(self, ranges: Sequence[Keys]) -> range:
        """Take over new key ranges of the shards. Returns the shards with which this process exchanges."""
        return range(len(ranges))

    def memory(self, begin: int, end: int) -> torch.Tensor | None:
        """Return the memory of keys [begin, end); None without `hold`, or if the script has moved a parameter."""
        if self.held is None or any(p.data_ptr() != at for p, at in zip(self.parameters, self._places, strict=True)):
            return None
        return self.held[begin - self.begin : end - self.begin]

    @property
    def plain(self) -> bool:
        """True if every parameter is float32, contiguous and on the CPU, so that NumPy can view its memory."""
        return all(_plain(parameter) for parameter in self.parameters)

    def name_of(self, key: int) -> str:
        """Name the tensor that has this key."""
        return self.names[bisect_right(self.offsets, key) - 1]

    def touched(self, begin: int, end: int) -> range:
        """Return the tensors that may have keys in [begin, end)."""
        return range(bisect_right(self.offsets, begin) - 1, min(bisect_left(self.offsets, end), len(self.parameters)))

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield (tensor, low, high) for each tensor with keys in [begin, end): its keys there are [low, high)."""
        for tensor in self.touched(begin, end):
            low, high = max(begin, self.offsets[tensor]), min(end, self.offsets[tensor + 1])
            if low < high:
                yield tensor, low, high

    @torch.no_grad()
    def write_keys(self, begin: int, values: Array) -> None:
        """Set keys [begin, begin + len(values)) of the parameters to `values`, float32[n]."""
        with nullcontext() if self.announced else writing(self, begin, begin + len(values)):
            self._write_keys(begin, values)

    def _write_keys(self, begin: int, values: Array) -> None:
        held = self.memory(begin, begin + len(values))
        if held is not None:
            held.copy_(as_tensor(values))
            return
        end = begin + len(values)
        first, last = bisect_left(self.offsets, begin), bisect_right(self.offsets, end) - 1
        whole = self.parameters[first:last]  # all their keys are here
        if alike(whole):
            low, high = self.offsets[first], self.offsets[last]
            torch._foreach_copy_(whole, _unflatten_dense_tensors(as_tensor(values)[low - begin : high - begin], whole))
            cuts = [*self.within(begin, low), *self.within(high, end)]
        else:
            cuts = [*self.within(begin, end)]
        for tensor, low, high in cuts:
            parameter, at = self.parameters[tensor], self.offsets[tensor]
            part = values[low - begin : high - begin]
            if _plain(parameter) and isinstance(part, np.ndarray):
                np.copyto(parameter.detach().view(-1).numpy()[low - at : high - at], part)
                continue
            numbers = real(parameter.detach())
            flat = numbers.reshape(-1)  # a copy, if not contiguous
            flat[low - at : high - at].copy_(as_tensor(part))
            if not numbers.is_contiguous():
                numbers.copy_(flat.view(numbers.shape))

    @torch.no_grad()
    def read_keys(self, begin: int, out: Array, start: Array | None = None) -> None:
        """Copy keys [begin, begin + len(out)) of the parameters into `out`, float32[n].

        Args:
            begin: the first key.
            out: overwritten.
            start: float32[n], what is subtracted from the keys; None: nothing.
        """
        target = as_tensor(out)
        held = self.memory(begin, begin + len(out))
        if held is not None:
            target.copy_(held) if start is None else torch.sub(held, as_tensor(start), out=target)
            return
        for tensor, low, high in self.within(begin, begin + len(out)):
            at = self.offsets[tensor]
            flat = real(self.parameters[tensor]).reshape(-1)
            target[low - begin : high - begin].copy_(flat[low - at : high - at])
        if start is not None:
            target -= as_tensor(start)

    def lend_gradient(self, begin: int, end: int) -> FloatArray | None:
        """Return the memory of keys [begin, end) of the gradients; None if it is not one run of float32 on the CPU."""
        tensor = bisect_right(self.offsets, begin) - 1
        gradient = self.parameters[tensor].grad
        if end > self.offsets[tensor + 1] or gradient is None or not _plain(gradient):
            return None
        flat: FloatArray = gradient.detach().view(-1).numpy()
        return flat[begin - self.offsets[tensor] : end - self.offsets[tensor]]

    def copy(self) -> FloatArray:
        """A copy of the parameters, float32[size]."""
        out = np.empty(self.size, np.float32)
        self.read_keys(self.begin, out)
        return out

    @torch.no_grad()
    def write(self, flat: Array) -> None:
        """Set the parameters from float32[size]."""
        whole, held = as_tensor(flat), self.memory(*self.keys)
        with writing(self, *self.keys):
            if held is not None:
                held.copy_(whole)
                return
            for i, parameter in enumerate(self.parameters):
                at, numbers = self.offsets[i] - self.begin, real(parameter)
                numbers.copy_(whole[at : at + numbers.numel()].view(numbers.shape))

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
        """Copy keys [begin, begin + len(out)) of the gradients into `out`, zeros for tensors without a gradient."""
        whole, tensors = as_tensor(out), self.touched(begin, begin + len(out))
        gradients = [parameter.grad for parameter in self.parameters[tensors.start : tensors.stop]]
        if alike(gradients):
            first = begin - self.offsets[tensors.start]
            whole.copy_(_flatten_dense_tensors(gradients)[first : first + len(out)])
            return
        for tensor, low, high in self.within(begin, begin + len(out)):
            target = whole[low - begin : high - begin]
            gradient = self.parameters[tensor].grad
            if gradient is None:
                target.zero_()
            else:
                at = self.offsets[tensor]
                target.copy_(real(gradient).reshape(-1)[low - at : high - at])


def plain(name: str) -> str:
    """Return a tensor's name without the prefix of torch.compile, so that an uncompiled model loads the run's model."""
    return name.replace("_orig_mod.", "")


class FlatModel(FlatSpace):
    """The parameters of a model that its optimizer steps.

    Args:
        model: the module.
        optimizer: its optimizer; several as a `CombinedOptimizer`.
        apart: ids of parameters that are left out: the embedding tables that servers hold.

    Raises:
        UsageError: a parameter has no shape yet or cannot be trained, or optimizer and model do not fit.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, apart: Collection[int] = ()) -> None:
        self.fsdp = _fsdp_modules(model)
        reshard(self)  # else a forward pass before may have left its copies as the parameters
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if is_lazy(tensor):
                raise UsageError(
                    f"{name!r} has no shape yet: call the model on a batch before DistributedOptimizer is made"
                )
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
        for name, p in named:
            if why := _why_not_trained(p):
                raise UsageError(f"the parameter {name!r} {why}")
        self.specs = tuple(TensorSpec(name, tuple(p.shape), dtype_of(p)) for name, p in named)
        super().__init__([name for name, _ in named], [p for _, p in named], ModelSpec(self.specs, "", ()).offsets())
        index = {id(p): i for i, (_, p) in enumerate(named)}
        self.aliases = tuple(
            (plain(name), index[id(p)])
            for name, p in model.named_parameters(remove_duplicate=False)
            if id(p) in index and plain(name) != self.names[index[id(p)]]
        )
        fixed = ((plain(name), fingerprint([p])) for name, p in model.named_parameters() if not p.requires_grad)
        self.frozen = tuple((name, digest) for name, digest in fixed if digest)
        self.rounded = [spec.name for spec in self.specs if DTYPES[spec.dtype].rounded]
        self.model = model
        self.group_of = [position[id(p)] for p in self.parameters]
        self.groups = len(optimizer.param_groups)

    @torch.no_grad()
    def hold(self) -> None:
        """Move the parameters into one tensor, float32[size], if all of them allow it. A copy of keys is then one copy.

        Parameters stay where they are if one is not dense float32, if they are on several devices, or if the model has
        a recurrent layer, whose parameters already share one tensor, as cuDNN needs it.

        Each parameter gets a storage of its own, which is its part of the memory. If all were views of one storage,
        saving any of them would save the memory of all; safetensors refuses such tensors.
        """
        of_recurrent = {id(p) for m in self.model.modules() if isinstance(m, torch.nn.RNNBase) for p in m.parameters()}
        devices = {p.device for p in self.parameters}
        if len(devices) > 1 or any(not _dense(p) or id(p) in of_recurrent for p in self.parameters):
            return
        held = torch.cat([parameter.detach().view(-1) for parameter in self.parameters])
        for i, parameter in enumerate(self.parameters):
            parameter.data = from_dlpack(held[self.offsets[i] : self.offsets[i + 1]]).view(parameter.shape)
        self.held, self._places = held, [parameter.data_ptr() for parameter in self.parameters]

    def plan(self, optimizer: str, max_grad_norm: float, degree: float = 1.0) -> ModelSpec:
        groups = tuple(tuple(i for i, g in enumerate(self.group_of) if g == group) for group in range(self.groups))
        return ModelSpec(self.specs, optimizer, groups, max_grad_norm, self.aliases, degree, frozen=self.frozen)

    def kept(self) -> list[torch.Tensor]:
        """Return copies of the parameters, on their devices and in their dtypes, for `put_back`."""
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def put_back(self, kept: Sequence[torch.Tensor]) -> None:
        for parameter, values in zip(self.parameters, kept, strict=True):
            parameter.copy_(values)
        reshard(self)


@contextmanager
def writing(flat: FlatSpace, begin: int, end: int) -> Iterator[None]:
    """Context in which this package writes keys [begin, end) of the parameters.

    Torch does not see a write through NumPy or through another tensor of the same memory. On exit their versions are
    increased, so that a backward pass through overwritten values raises an error. `overwritten` does not count the
    write.
    """
    tensors = flat.touched(begin, end) if (begin, end) != flat.keys else range(len(flat.parameters))
    parameters = flat.parameters[tensors.start : tensors.stop]
    before = [parameter._version for parameter in parameters]
    try:
        yield
    finally:
        torch.autograd.graph.increment_version(
            [each for each, version in zip(parameters, before, strict=True) if each._version == version]
        )
        if flat.versions:
            for tensor, parameter, version in zip(tensors, parameters, before, strict=True):
                if flat.versions[tensor] == version:
                    flat.versions[tensor] = parameter._version
        reshard(flat)


def announce(flat: FlatSpace, coming: bool) -> None:
    """Count all parameters as written now: until another call their versions do not change when they are.

    Nobody uses a parameter before its values have come, so a graph of autograd has the new values from here on.

    Args:
        flat: the parameters.
        coming: values of all parameters will be written; False: they have been.
    """
    if coming:
        with writing(flat, *flat.keys):
            pass
    flat.announced = coming


def reshard(flat: FlatSpace) -> None:
    """Drop the copies of parameters that FSDP computes on, since the parameters were written."""
    for module in flat.fsdp:
        module.reshard()


def as_tensor(values: Array) -> torch.Tensor:
    """Return a tensor of the same memory."""
    return values if isinstance(values, torch.Tensor) else torch.from_numpy(values)


def alike(tensors: Sequence[Any]) -> bool:
    """Return True if these are many small dense tensors of one real dtype on one device, so that one call copies all."""
    if len(tensors) < MANY or not {*map(type, tensors)} <= DENSE:
        return False
    (dtype, *others), layouts = {*map(DTYPE, tensors)}, {*map(LAYOUT, tensors)}
    if others or dtype.is_complex or layouts != {torch.strided} or len({*map(torch.Tensor.get_device, tensors)}) > 1:
        return False
    return sum(map(torch.Tensor.numel, tensors)) <= SMALL * len(tensors)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; of a DTensor, as FSDP2 makes them, the part that this process has."""
    return tensor if type(tensor) in DENSE else tensor.to_local() if hasattr(tensor, "to_local") else tensor


def real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as real numbers; a complex tensor as [..., 2], its real and imaginary parts.

    A gradient that torch keeps as the conjugate of another tensor is copied. Of a DTensor the local part is taken.
    """
    here = local_part(tensor)
    return torch.view_as_real(here.resolve_conj()) if here.is_complex() else here


def as_parameter(values: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the values of one tensor's keys, float32[keys], in the tensor's shape; complex if the tensor is."""
    if DTYPES[spec.dtype].keys > 1:
        return torch.view_as_complex(values.view(*spec.shape, 2))
    return values.view(spec.shape)


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the tensor's dtype as protocols/config/model_spec.py: DTYPES names it."""
    return str(tensor.dtype).removeprefix("torch.")


def raw_bytes(tensor: torch.Tensor) -> FloatArray:
    """Return the bytes of a strided tensor's values, uint8[bytes] on the host."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride() != (1,):  # a single value of another tensor counts as contiguous too
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw: FloatArray = flat.view(torch.uint8).numpy()
    return raw


def _fsdp_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules that FSDP2 has sharded. Only a script that uses FSDP imports it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _why_not_trained(parameter: torch.Tensor) -> str:
    """Return why a run cannot train this parameter, and what to do; "" if it can."""
    if dtype_of(parameter) not in TRAINED:
        return (
            f"is {dtype_of(parameter)}, and no optimizer of torch steps it: keep it in one of {', '.join(TRAINED)}, and "
            "convert it in forward()"
        )
    if parameter.layout != torch.strided or parameter.is_conj():
        kind = "a conjugate view" if parameter.is_conj() else str(parameter.layout).removeprefix("torch.")
        return f"is {kind} and not a dense tensor: make it of tensor.to_dense().resolve_conj().clone()"
    return ""


def fingerprint(leaves: Iterable[Any]) -> str:
    """Return a hash of the tensors among `leaves`, 16 hexadecimal digits; "" if there are none.

    Tensors that FSDP has sharded are gathered one by one.
    """
    digest, any_ = hashlib.blake2b(digest_size=8), False
    for leaf in leaves:
        for part in _strided(leaf) if isinstance(leaf, torch.Tensor) else ():
            if part.numel() and not part.is_meta:
                any_ = True
                digest.update(f"{part.dtype}{list(part.shape)}".encode())
                digest.update(raw_bytes(part).data)
    return digest.hexdigest() if any_ else ""


def _strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the strided tensors that hold the values of `tensor`.

    A quantized, sparse or sharded tensor, or one of a subclass that wraps other tensors, such as torchao's, has others
    inside. Any other tensor is yielded itself.
    """
    if hasattr(tensor, "full_tensor"):
        yield from _strided(tensor.full_tensor())
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _strided(getattr(tensor, name))
    elif tensor.is_quantized:
        yield tensor.dequantize()  # so that its scales count too
    elif tensor.layout == torch.sparse_coo:
        known = tensor.detach().coalesce()
        yield from (known.indices(), known.values())
    elif tensor.layout in SPARSE_ROWS:
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in SPARSE_COLUMNS:
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    elif tensor.layout == torch.strided:
        yield tensor


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is its own memory, of float32 values one after the other."""
    if tensor.dtype != torch.float32 or hasattr(tensor, "to_local"):
        return False
    return tensor.layout == torch.strided and tensor.is_contiguous()


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and _dense(tensor)
