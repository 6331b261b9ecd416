"""The model as a worker declares it: tensors in registration order, the optimizer, and the module buffers.

How it works
1. A worker makes a `ModelSpec` of its module and optimizer, and sends it `packed` in Declare.
2. The coordinator reads it (`unpacked`), which checks every field. The first worker's spec is that of the run; a later
   worker's must equal it (`check_same`).
3. `offsets` places the tensors in the flat key space, in order. `ranges` cuts it for the shards.
   `pieces` gives a shard's part of each tensor.
4. Module buffers travel beside the keys, as named arrays (`pack_arrays`, `unpack_arrays`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from narrows.protocols.config.embedding_spec import TABLES_MAX, TableSpec
from narrows.protocols.config.key_ranges import TENSORS, Keys, borders_of, split, split_at
from narrows.protocols.config.modes import ELEMENTWISE, WHOLE_TENSORS
from narrows.protocols.errors import IncompatibleError, RemoteProtocolError
from narrows.protocols.wire import FIELDS_BYTES_MAX, HEADER_BYTES_MAX, pack, unpack

KEYS_MAX = 1 << 40  # parameters of one model
NAME_MAX = 1024  # characters of a tensor's name
OPTIMIZER_MAX = 1 << 16  # characters of the names of the optimizer's classes
BUFFERS_BYTES_MAX = HEADER_BYTES_MAX - FIELDS_BYTES_MAX  # of a model's buffers, packed: a Ready has room for them
UNEVEN = 1.5  # keys of the largest shard, times those of an even cut, from which on the user is told
EXTENTS_MAX = 64  # dimensions of a tensor, as in torch


class Dtype(NamedTuple):
    """How tensors of one dtype are carried.

    A trained parameter travels as float32 keys. A module buffer travels as its raw bytes. A frozen parameter of any dtype stays
    on its worker, and a digest of its raw bytes is compared.

    Attributes:
        bytes: Size of one value.
        file: The name that safetensors has for it. "": no file holds it, so a buffer of it does not travel.
        keys: float32 keys of one value of a trained parameter: 2 for a complex number, its real and its imaginary part.
            0: a parameter of it is refused, for no optimizer of torch steps it.
        rounded: float32 does not hold all of its values: a trained parameter is rounded.
    """

    bytes: int
    file: str
    keys: int = 0
    rounded: bool = False


# By torch's name. A trained parameter of another dtype is refused; a buffer of another dtype stays on its worker.
DTYPES = {
    "bool": Dtype(1, "BOOL"),
    "uint8": Dtype(1, "U8"),
    "int8": Dtype(1, "I8"),
    "int16": Dtype(2, "I16"),
    "int32": Dtype(4, "I32"),
    "int64": Dtype(8, "I64"),
    "uint16": Dtype(2, "U16"),
    "uint32": Dtype(4, "U32"),
    "uint64": Dtype(8, "U64"),
    "float16": Dtype(2, "F16", keys=1),
    "bfloat16": Dtype(2, "BF16", keys=1),
    "float32": Dtype(4, "F32", keys=1),
    "float64": Dtype(8, "F64", keys=1, rounded=True),
    "float8_e4m3fn": Dtype(1, "F8_E4M3"),
    "float8_e5m2": Dtype(1, "F8_E5M2"),
    "float8_e8m0fnu": Dtype(1, "F8_E8M0"),
    "complex64": Dtype(8, "C64", keys=2),
    "complex128": Dtype(16, "", keys=2, rounded=True),
}
TRAINED = tuple(name for name, dtype in DTYPES.items() if dtype.keys)
RESERVED = "__metadata__"  # no tensor of a safetensors file has this name
NamedArray = tuple[str, tuple[int, ...], bytes | memoryview]  # dtype, shape, raw little-endian values


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the model: its name, shape, and the dtype that the workers hold it in."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of its values."""
        return prod(self.shape)

    @property
    def key_count(self) -> int:
        """Number of float32 keys that it has in the flat space."""
        return self.size * DTYPES[self.dtype].keys


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The declaration of a worker: its tensors in order, and its optimizer as plain values."""

    tensors: tuple[TensorSpec, ...]
    optimizer: str  # class name; of several classes one name for each group, joined by "+"; "": the server needs none
    groups: tuple[tuple[int, ...], ...]  # tensor indices of each parameter group; each tensor is in one group
    max_grad_norm: float = 0.0  # <= 0: none
    aliases: tuple[tuple[str, int], ...] = ()  # further names of shared tensors, with the index; checkpoints have all
    degree: float = 1.0  # how an update grows with the gradient, from 0 (AdamW) to 1 (SGD)
    tables: tuple[TableSpec, ...] = ()  # embedding tables; their rows are not keys
    frozen: tuple[tuple[str, str], ...] = ()  # name, digest of values: not trained, not sent, so alike on all workers

    @property
    def size(self) -> int:
        """Number of keys of the flat space."""
        return sum(tensor.key_count for tensor in self.tensors)

    def offsets(self) -> list[int]:
        """Return the first key of each tensor in the flat space, and the end of the last."""
        offsets = [0]
        for tensor in self.tensors:
            offsets.append(offsets[-1] + tensor.key_count)
        return offsets

    def ranges(self, shards: int, cut: str) -> list[Keys]:
        """Return the keys of each shard.

        Args:
            shards: number of shards.
            cut: one of CUTS: shards begin anywhere, or at tensors.

        Raises:
            IncompatibleError: to be cut at tensors the model has fewer of them than `shards`.
        """
        if why := self.why_not_cut(shards, cut):
            raise IncompatibleError(why)
        return (
            split_at(borders_of(0, self.size, self.offsets()), shards) if cut == TENSORS else split(self.size, shards)
        )

    def why_not_cut(self, shards: int, cut: str) -> str:
        """Return why the model cannot be cut for so many shards; "" if it can."""
        if cut != TENSORS or (tensors := len(borders_of(0, self.size, self.offsets())) - 1) >= shards:
            return ""
        return (
            f"--cut tensors: the model has {tensors} tensor{'s' * (tensors > 1)}, too few for {shards} shards; give --shards "
            f"{tensors} at most, or --cut values"
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The optimizer's class name of each parameter group."""
        names = self.optimizer.split("+")
        return tuple(names) if len(names) > 1 else tuple(names * len(self.groups))

    def why_not_stepped(self, cut: str) -> str:
        """Return why servers cannot step the optimizer where they cut the model in this way; "" if they can."""
        for kind, group in zip(self.kinds, self.groups, strict=True):
            if kind not in (*ELEMENTWISE, *WHOLE_TENSORS):
                return f"the server cannot rebuild optimizer {kind[:60]!r}: use --push update"
            if kind in ELEMENTWISE:
                continue
            if cut != TENSORS:
                other = "use --push update, or start the server with --cut tensors"
                return f"{kind} steps whole tensors, and shards cut tensors: {other}"
            for tensor in (self.tensors[index] for index in group):
                if DTYPES[tensor.dtype].keys != 1:
                    return (
                        f"servers step no complex tensor by {kind}, and {tensor.name[:60]!r} is one: use --push update"
                    )
                if kind == "Muon" and len(tensor.shape) != 2:
                    return f"Muon steps matrices, and {tensor.name[:60]!r} has the shape {list(tensor.shape)[:8]}"
        return ""

    def why_not_held(self, shards: int, cut: str, steps: bool) -> str:
        """Return why so many shards cannot hold the model; "" if they can. `steps`: they step its optimizer."""
        return (self.why_not_stepped(cut) if steps else "") or self.why_not_cut(shards, cut)

    def imbalance(self, shards: int, cut: str) -> str:
        """Return why shards are uneven: cut at tensors one has over UNEVEN times its share; "" if none has."""
        if cut != TENSORS:
            return ""
        ranges, offsets = self.ranges(shards, TENSORS), self.offsets()
        begin, end = max(ranges, key=lambda keys: keys[1] - keys[0])
        if (end - begin) * shards <= UNEVEN * self.size:
            return ""
        inside = [i for i, offset in enumerate(offsets[:-1]) if begin <= offset < end]
        tensor = self.tensors[max(inside, key=lambda i: offsets[i + 1] - offsets[i])]
        whole, one = (end - begin) / self.size, tensor.key_count / self.size
        return (
            f"--cut tensors: shard {ranges.index((begin, end))} of {shards} has {whole:.0%} of the model, of which the tensor "
            f"{tensor.name!r} alone is {one:.0%}: fewer --shards or --cut values make the shards even"
        )

    def pieces(self, begin: int, end: int) -> list[list[tuple[int, int, int]]]:
        """Return the pieces of tensors in keys [begin, end): for each group, (tensor, begin, end) of each piece."""
        offsets = self.offsets()
        cut = [[(t, max(offsets[t], begin), min(offsets[t + 1], end)) for t in group] for group in self.groups]
        return [[piece for piece in group if piece[1] < piece[2]] for group in cut]

    def matrices(self, begin: int, end: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return (first key, key after the last, shape) of each tensor of two dimensions, not complex, in keys [begin, end)."""
        offsets = self.offsets()
        placed = zip(self.tensors, offsets, offsets[1:], strict=False)
        return [(low, high, tensor.shape) for tensor, low, high in placed
                if len(tensor.shape) == 2 and DTYPES[tensor.dtype].keys == 1 and begin <= low < high <= end]  # fmt: skip

    def packed(self) -> bytes:
        tensors = [[t.name, list(t.shape), t.dtype] for t in self.tensors]
        groups = [list(group) for group in self.groups]
        aliases = [list(alias) for alias in self.aliases]
        tables = [[getattr(table, name) for name in TableSpec.__slots__] for table in self.tables]
        frozen = [list(each) for each in self.frozen]
        return pack([tensors, self.optimizer, groups, self.max_grad_norm, aliases, self.degree, tables, frozen])

    @staticmethod
    def unpacked(packed: bytes) -> ModelSpec:
        """Read and check a packed spec. Raises RemoteProtocolError if it is not valid."""
        value: Any = unpack(packed)
        try:
            tensors, optimizer, groups, norm, aliases, degree, tables, frozen = value
            plan = ModelSpec(
                tuple(_trained(*row) for row in tensors),
                _text(optimizer, OPTIMIZER_MAX),
                tuple(tuple(_count(i) for i in group) for group in groups),
                float(norm),
                tuple((_text(name), _count(i)) for name, i in aliases),
                float(degree),
                tuple(_table(*row) for row in tables),
                tuple((_text(name), _text(digest)) for name, digest in frozen),
            )
        except (TypeError, ValueError):
            raise RemoteProtocolError(
                "a plan is a list of tensors, an optimizer, its groups, a norm, a list of aliases, a degree, tables and "
                "what is frozen"
            ) from None
        for table in plan.tables:
            table.check()
        if len(plan.tables) > TABLES_MAX or sum(table.rows * table.dim for table in plan.tables) > KEYS_MAX:
            raise RemoteProtocolError(
                f"a model has at most {TABLES_MAX} tables of {KEYS_MAX} values in all, this plan has {len(plan.tables)}"
            )
        if not 0 < plan.size <= KEYS_MAX or not 0 <= plan.max_grad_norm < float("inf"):
            raise RemoteProtocolError(
                f"a model has 1 to {KEYS_MAX} parameters and a finite norm, this plan has {plan.size} and "
                f"{plan.max_grad_norm}"
            )
        if not 0 <= plan.degree <= 1:
            raise RemoteProtocolError(f"the degree of an optimizer is from 0 to 1, this plan has {plan.degree}")
        names = [tensor.name for tensor in plan.tensors] + [name for name, _ in plan.aliases]
        names += [table.name for table in plan.tables]
        if len(set(names)) != len(names) or any(i >= len(plan.tensors) for _, i in plan.aliases):
            raise RemoteProtocolError("two tensors of the plan have one name, or a name has no tensor")
        if sorted(i for group in plan.groups for i in group) != list(range(len(plan.tensors))):
            raise RemoteProtocolError("the parameter groups of the plan do not hold each of its tensors once")
        if len(plan.kinds) != len(plan.groups):
            raise RemoteProtocolError(
                f"{len(plan.groups)} parameter groups have {len(plan.kinds)} classes of optimizers"
            )
        return plan

    def check_same(self, other: ModelSpec) -> None:
        """Raise IncompatibleError if `other`, the spec of a worker that joins, differs; names the first difference."""
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
            ("optimizer", self.optimizer or "none (--push update)", other.optimizer or "none (--push update)"),
            ("parameter groups", self.groups, other.groups),
            ("max_grad_norm", self.max_grad_norm, other.max_grad_norm),
            ("embedding tables", *([replace(table, seed=0) for table in plan.tables] for plan in (self, other))),
        ):
            if mine != yours:
                raise IncompatibleError(f"{what}: this worker has {yours}, the run has {mine}; use the run's")
        either = {*self.frozen} ^ {*other.frozen}
        if name := next((name for name, digest in (*other.frozen, *self.frozen) if (name, digest) in either), ""):
            raise IncompatibleError(
                f"the frozen parameter {name!r} is not the run's, and frozen parameters are not sent: load the same weights "
                "in each worker, or seed each alike before the model is made"
            )


def pack_arrays(arrays: dict[str, NamedArray]) -> bytes:
    """Pack named small arrays (module buffers): name -> dtype, shape, raw little-endian values."""
    return pack({name: [dtype, list(shape), raw] for name, (dtype, shape, raw) in arrays.items()})


def unpack_arrays(packed: bytes) -> dict[str, NamedArray]:
    """Return the arrays that `pack_arrays` packed; {} for b"". Raises RemoteProtocolError if they are not valid."""
    if len(packed) > BUFFERS_BYTES_MAX:
        raise RemoteProtocolError(f"module buffers have {len(packed)} bytes, more than {BUFFERS_BYTES_MAX}")
    value: Any = unpack(packed, rows=True) if packed else {}
    arrays: dict[str, NamedArray] = {}
    try:
        for name, (dtype, shape, raw) in value.items():
            spec = _spec(name, shape, dtype)
            if type(raw) is not bytes or not DTYPES[spec.dtype].file:
                raise ValueError
            if len(raw) != spec.size * DTYPES[spec.dtype].bytes:
                raise ValueError
            arrays[spec.name] = (spec.dtype, spec.shape, raw)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RemoteProtocolError("module buffers are named arrays of the dtype, shape and bytes they state") from None
    return arrays


def _spec(name: object, shape: Any, dtype: object) -> TensorSpec:
    if len(shape) > EXTENTS_MAX:
        raise ValueError
    return TensorSpec(_text(name), tuple(map(_count, shape)), _text(dtype))


def _trained(name: object, shape: Any, dtype: object) -> TensorSpec:
    spec = _spec(name, shape, dtype)
    if spec.dtype not in TRAINED:
        raise RemoteProtocolError(f"tensor {spec.name!r} is {spec.dtype:.40}: a parameter is {', '.join(TRAINED)}")
    return spec


def _table(name: object, rows: object, dim: object, seed: object, std: object, optimizer: object) -> TableSpec:
    return TableSpec(_text(name), _count(rows), _count(dim), _count(seed), float(std), _text(optimizer))  # type: ignore[arg-type]


def _text(value: object, most: int = NAME_MAX) -> str:
    if type(value) is not str or len(value) > most or value == RESERVED:
        raise TypeError
    return value


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError
    return value
