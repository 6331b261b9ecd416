"""The parameter space: one flat index space per model, cut into half-open key ranges [begin, end).

Owns the signature of a model (tensors in registration order), the split over shards and the cut into parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.wire import FRAME_VALUES, pack, unpack

KEYS_MAX = 1 << 40  # parameters of one model
NAME_MAX = 1024  # characters of a tensor's name


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model: its name, shape, and the dtype that the workers hold it in."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker declares: its tensors in order, and its optimizer as plain values.

    `groups[g]` are the tensor indices of parameter group g. `optimizer` is the class name in torch.optim, or "" where
    the server does not need one (pushed updates). `max_grad_norm` <= 0: none.
    """

    tensors: tuple[TensorSpec, ...]
    optimizer: str
    groups: tuple[tuple[int, ...], ...]
    max_grad_norm: float = 0.0

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    def offsets(self) -> list[int]:
        """Begin of each tensor in the flat space, and the end of the last."""
        offsets = [0]
        for tensor in self.tensors:
            offsets.append(offsets[-1] + tensor.size)
        return offsets

    def packed(self) -> bytes:
        tensors = [[t.name, list(t.shape), t.dtype] for t in self.tensors]
        return pack([tensors, self.optimizer, [list(g) for g in self.groups], self.max_grad_norm])

    @staticmethod
    def unpacked(packed: bytes) -> Plan:
        """Raises RemoteProtocolError where `packed` is no plan."""
        value: Any = unpack(packed)
        try:
            tensors, optimizer, groups, norm = value
            plan = Plan(
                tuple(TensorSpec(str(n)[:NAME_MAX], tuple(int(e) for e in s), str(d)) for n, s, d in tensors),
                str(optimizer),
                tuple(tuple(int(i) for i in g) for g in groups),
                float(norm),
            )
        except (TypeError, ValueError):
            raise RemoteProtocolError("a plan is a list of tensors, an optimizer, its groups and a norm") from None
        if any(extent < 0 for tensor in plan.tensors for extent in tensor.shape) or not 0 < plan.size <= KEYS_MAX:
            raise RemoteProtocolError(f"a model has 1 to {KEYS_MAX} parameters, this plan has {plan.size}")
        if any(not 0 <= i < len(plan.tensors) for group in plan.groups for i in group):
            raise RemoteProtocolError("a parameter group of the plan names a tensor that it does not have")
        return plan

    def check_same(self, other: Plan) -> None:
        """Raise IncompatibleError naming the first thing in which `other`, a joiner's plan, differs from this run's."""
        for ours, theirs in zip(self.tensors, other.tensors, strict=False):
            if ours != theirs:
                raise IncompatibleError(
                    f"the model differs from the run's: tensor {theirs.name!r} is {theirs.dtype}{list(theirs.shape)}, "
                    f"the run has {ours.name!r} as {ours.dtype}{list(ours.shape)} there; "
                    "start every worker with the same script and arguments"
                )
        if len(self.tensors) != len(other.tensors):
            longer = self.tensors if len(self.tensors) > len(other.tensors) else other.tensors
            extra = longer[min(len(self.tensors), len(other.tensors))]
            raise IncompatibleError(
                f"the model differs from the run's: it has {len(other.tensors)} tensors, the run has "
                f"{len(self.tensors)}; the first that one of them lacks is {extra.name!r}"
            )
        for what, mine, yours in (
            ("optimizer", self.optimizer, other.optimizer),
            ("parameter groups", self.groups, other.groups),
            ("max_grad_norm", self.max_grad_norm, other.max_grad_norm),
        ):
            if mine != yours:
                raise IncompatibleError(f"{what}: this worker has {yours}, the run has {mine}; use the run's")


def split(size: int, shards: int) -> list[tuple[int, int]]:
    """Cut [0, size) into `shards` consecutive ranges whose sizes differ by at most one."""
    cuts = [size * i // shards for i in range(shards + 1)]
    return list(pairwise(cuts))


def parts(begin: int, end: int, values_max: int = FRAME_VALUES) -> Iterator[tuple[int, int]]:
    """Cut [begin, end) into runs of at most `values_max` keys. An empty range is one empty part."""
    if begin == end:
        yield begin, end
    for start in range(begin, end, values_max):
        yield start, min(end, start + values_max)


def covers(pieces: Sequence[tuple[int, int]], begin: int, end: int) -> bool:
    """Whether `pieces`, in any order, cover [begin, end) exactly once."""
    at = begin
    for piece_begin, piece_end in sorted(pieces):
        if piece_begin != at:
            return False
        at = piece_end
    return at == end


def pack_arrays(arrays: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """Named small arrays (module buffers) as bytes: name -> dtype, shape, raw little-endian values."""
    return pack({name: [dtype, list(shape), raw] for name, (dtype, shape, raw) in arrays.items()})


def unpack_arrays(packed: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The inverse of `pack_arrays`; empty for no bytes. Raises RemoteProtocolError."""
    value: Any = unpack(packed) if packed else {}
    try:
        return {str(n): (str(d), tuple(int(e) for e in s), bytes(r)) for n, (d, s, r) in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise RemoteProtocolError("module buffers are named arrays") from None
