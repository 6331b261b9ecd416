"""The inputs of samples as bytes: tensors to the payload of a request, and back.

How it works
1. The inputs of a batch are one tensor, or tensors by name; the first dimension counts the samples.
2. Whole numbers travel in the smallest type that holds those of the batch: token ids of a byte model take one byte each.
3. The teacher restores the dtypes, and calls its model with the tensor, or with the tensors as keywords.

Rules
- A sample's digest and the model's inputs both follow from the values in the tensor's own type, whatever type they travelled
  in: so a sample has the same digest in each batch, and no other inputs can have it.
- A number travels in a type that loses nothing. A request that names another pair of types is refused.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import Buffer
from narrows.protocols.wire import pack, unpack
from narrows.worker.model.flat import Array

DIGEST_BYTES = 16
FIELDS_MAX = 16  # tensors of a batch
DIMENSIONS_MAX = 8
NAME_MAX = 64  # characters of a tensor's name
ALONE = ""  # the name of a batch's only tensor
DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
HELD = {"bfloat16": "float32"}  # the type of an array of this dtype, where NumPy has none
NAMES = {dtype: name for name, dtype in DTYPES.items()}
NARROW = ("uint8", "int8", "uint16", "int16", "uint32", "int32")  # tried in this order for whole numbers

Inputs = torch.Tensor | Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Samples:
    """The inputs of some samples as arrays.

    Attributes:
        fields: for each tensor its name, the type in which it travels, its dtype, and the shape of one sample.
        arrays: one for each tensor, [samples, ...], in its own type.
    """

    fields: tuple[tuple[str, str, str, tuple[int, ...]], ...]
    arrays: tuple[Array, ...]

    def __len__(self) -> int:
        return len(self.arrays[0])

    @property
    def sample_bytes(self) -> int:
        """The bytes of a sample in a request."""
        return sum(math.prod(shape) * np.dtype(sent).itemsize for _, sent, _, shape in self.fields)

    @property
    def packed_fields(self) -> bytes:
        return pack(self.fields)

    def payload(self, rows: Array) -> bytes:
        """Return the bytes of these samples: each tensor's rows, one tensor after the other."""
        return b"".join(
            np.ascontiguousarray(array[rows], sent).tobytes()
            for array, (_, sent, _, _) in zip(self.arrays, self.fields, strict=True)
        )

    def digests(self) -> list[bytes]:
        """Return a digest of each sample: equal inputs have equal ones."""
        head = pack([(name, dtype, shape) for name, _, dtype, shape in self.fields])
        found = []
        for row in range(len(self)):
            digest = hashlib.blake2b(head, digest_size=DIGEST_BYTES)
            for array in self.arrays:
                digest.update(np.ascontiguousarray(array[row]).tobytes())
            found.append(digest.digest())
        return found


def samples_of(inputs: Inputs) -> Samples:
    """Return the inputs of a batch as arrays.

    Raises:
        UsageError: the inputs are no tensors, have no samples, or their number of samples differs.
    """
    named = {ALONE: inputs} if isinstance(inputs, torch.Tensor) else dict(inputs)
    if not named or not all(isinstance(each, torch.Tensor) for each in named.values()) or len(named) > FIELDS_MAX:
        raise UsageError(
            f"a batch for a teacher is a tensor, or 1 to {FIELDS_MAX} tensors by name: give model inputs alone"
        )
    fields, arrays = [], []
    for name, tensor in named.items():
        if tensor.dtype not in NAMES or not 1 <= tensor.dim() <= DIMENSIONS_MAX or 0 in tensor.shape[1:]:
            raise UsageError(
                f"the input {name!r} of a teacher has dtype {tensor.dtype} and shape {tuple(tensor.shape)}: the first of 1 to "
                f"{DIMENSIONS_MAX} dimensions counts the samples, none of the others is 0, and the dtype is one of "
                f"{', '.join(DTYPES)}"
            )
        if len(name) > NAME_MAX or not (name == ALONE or name.isidentifier()):
            raise UsageError(f"the input {name!r} of a teacher is a keyword of its model: give it the name of one")
        here = tensor.detach().cpu()
        array: Array = (here.float() if tensor.dtype is torch.bfloat16 else here).numpy()
        fields.append((name, _narrowest(array), NAMES[tensor.dtype], tuple(tensor.shape[1:])))
        arrays.append(array)
    counts = {len(array) for array in arrays}
    if len(counts) != 1 or 0 in counts:
        raise UsageError(
            f"the inputs of a teacher have {' and '.join(map(str, sorted(counts)))} samples: give as many of each"
        )
    return Samples(tuple(fields), tuple(arrays))


def _narrowest(array: Array) -> str:
    """Return the smallest type that holds these numbers; floating-point numbers keep theirs."""
    if array.dtype.kind in "iu" and array.size:
        low, high = int(array.min()), int(array.max())
        for name in NARROW:
            limits = np.iinfo(name)
            if np.dtype(name).itemsize < array.dtype.itemsize and limits.min <= low and high <= limits.max:
                return name
    return str(array.dtype)


def _holds(dtype: str, sent: str) -> bool:
    """True if a tensor of this dtype may travel in this type: in its own, or whole numbers in a narrower one."""
    own = np.dtype(HELD.get(dtype, dtype))
    return sent == own.name or (own.kind in "iu" and sent in NARROW and np.dtype(sent).itemsize < own.itemsize)


def opened(fields: bytes, payload: Buffer, samples: int) -> Samples:
    """Return the samples of a request that came.

    Raises:
        RemoteProtocolError: the fields are not valid, or the payload has another size.
    """
    rows = unpack(fields)
    if not isinstance(rows, list) or not 1 <= len(rows) <= FIELDS_MAX:
        raise RemoteProtocolError(f"a request names 1 to {FIELDS_MAX} tensors")
    named, arrays, at = [], [], 0
    for row in rows:
        name, sent, dtype, shape = _field(row)
        nbytes = samples * math.prod(shape) * np.dtype(sent).itemsize
        if at + nbytes > len(payload):
            raise RemoteProtocolError(f"a payload of {len(payload)} bytes is too short for its fields")
        part = np.frombuffer(memoryview(payload).cast("B")[at : at + nbytes], np.uint8)
        if sent == "bool" and part.max() > 1:
            raise RemoteProtocolError("a value of type bool is neither 0 nor 1")
        array = np.ndarray((samples, *shape), sent, part.tobytes())
        arrays.append(array.astype(HELD.get(dtype, dtype), copy=False))
        named.append((name, sent, dtype, shape))
        at += nbytes
    if at != len(payload):
        raise RemoteProtocolError(f"a payload of {len(payload)} bytes is longer than its fields say")
    if len({name for name, *_ in named}) != len(named):
        raise RemoteProtocolError("two tensors of a request have one name")
    return Samples(tuple(named), tuple(arrays))


def _field(row: object) -> tuple[str, str, str, tuple[int, ...]]:
    match row:
        case [str(name), str(sent), str(dtype), list(shape)] if (
            len(name) <= NAME_MAX
            and (name == ALONE or name.isidentifier())
            and dtype in DTYPES
            and _holds(dtype, sent)
            and len(shape) < DIMENSIONS_MAX
            and all(type(size) is int and 1 <= size <= 1 << 31 for size in shape)
        ):
            return name, sent, dtype, tuple(shape)
    raise RemoteProtocolError("a field of a request is no name, type, dtype and shape")


def tensors(samples: Samples, rows: Array, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors of these samples, by name, in their own dtypes."""
    return {
        name: torch.from_numpy(array[rows]).to(device=device, dtype=DTYPES[dtype])
        for (name, _, dtype, _), array in zip(samples.fields, samples.arrays, strict=True)
    }
