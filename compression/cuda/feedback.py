"""Compression where the gradients are: error feedback, decoding and accumulating on a GPU. Only payloads cross PCIe.

Rules
- Payloads are byte for byte the CPU's. Headers, layouts and checks are those of payload.py and the codings' own objects;
  what is written here is only the order of kernels.
- Arrays are float32[count], contiguous, with a __cuda_array_interface__ (torch's CUDA tensors have one), and ready on the
  default stream, on which all kernels run.
- This module imports anywhere; what it does needs a GPU and numba-cuda, or a RuntimeError says so.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from narrows.compression.buffers import Payload
from narrows.compression.compressor import Chain, Compressor
from narrows.compression.cuda.stages import (
    INDEX_READERS,
    CodedIndices,
    DeviceArray,
    encode_indices,
    encode_strided,
    load_kernels,
    pairs,
    select_above,
    select_blocks,
    select_top,
    select_top_of,
    upload,
)
from narrows.compression.feedback import State, load_memory, memory_state, restored
from narrows.compression.index_codings import EVERY_INDEX, STRATA, stride_count
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import COUNT_MAX, HEADER_BYTES, Header, Opened, open_payload
from narrows.compression.reducers import DENSE_COUNT_MAX, Memory
from narrows.compression.sparsifiers import (
    NOTHING,
    Cycle,
    CycleTop,
    RandomK,
    Threshold,
    TopK,
    kept_of,
)
from narrows.compression.value_codings import Sectioned, non_finite

Coded: TypeAlias = tuple[DeviceArray, ...]

PAYLOADS_KEPT = 2  # an encode may run while the payload before it is still being sent


class Reduced(NamedTuple):
    """As reducers.Reduced, on the device; places: the indices themselves, None for all."""

    values: DeviceArray
    indices: CodedIndices
    places: DeviceArray | None


ALL = CodedIndices(EVERY_INDEX, 0, [])
NO_INDICES = CodedIndices(*NOTHING[:2], [])


def _device_floats(array: Any, name: str) -> DeviceArray:
    view = load_kernels().device_view(array)
    if view.dtype != np.float32 or view.ndim != 1 or not view.is_c_contiguous():
        raise TypeError(f"{name} must be a contiguous 1-D float32 array on the GPU, not {view.ndim}-D {view.dtype}")
    return view


class CudaErrorFeedback:
    """ErrorFeedback with the residual on the device. Not for two threads at once.

    Takes what ErrorFeedback takes. Device memory: 8 bytes a value (the residual,
    and the buffer that its successor is built in, so that an update that is refused leaves it as it was), and scratch
    that streams of one thread share: an eighth of a byte a value and some 20 bytes for each that is kept.
    """

    def __init__(self, compressor: Compressor, count: int, *, decay: float = 1.0, seed: int = 0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be from 0 to 1, not {decay}")
        if count > COUNT_MAX:
            raise ValueError(f"{count} values do not fit one payload; at most {COUNT_MAX} do")
        chain = compressor.contraction()
        assert isinstance(chain, Chain)
        self.kernels = load_kernels()
        self.compressor = chain
        self.count = count
        self.decay = np.float32(decay)
        self.memory = Memory(seed)
        self.residual: DeviceArray | None = None if chain.lossless else self._zeros()
        self._successor: DeviceArray | None = None
        self._stream = self.kernels.copy_stream()
        self._pinned = [np.zeros(0, np.uint8)] * PAYLOADS_KEPT
        self._turn = 0

    def encode(self, update: Any) -> memoryview:
        """Payload of decay * residual + update, float32[count] on the device; what it does not carry becomes the residual.

        The payload is pinned host memory (not with lz4), good until PAYLOADS_KEPT further encodes. NonFiniteError (lossy
        compressors) for NaN or infinity in update, or in the sum, leaves the residual as it was.
        """
        update = _device_floats(update, "update")
        if update.size != self.count:
            raise ValueError(f"update has {update.size} values; this stream has {self.count}")
        if self.compressor.lossless:
            values = self._lossless(update)
            payload = self._send(Reduced(values, ALL, None), (values,))()
            self.memory.step += 1
            return payload
        if self._successor is None:
            self._successor = self._zeros()
        sums = self._successor
        reduced = self._reduce(update, sums)
        name, coded = self._encode_values(reduced.values, update, sums)
        finish = self._send(reduced, coded)
        # While the payload crosses to the host, what it carries is taken out of what becomes the residual.
        _add(self.kernels, name, coded, reduced.places, np.float32(-1.0), sums)
        self.residual, self._successor = sums, self.residual
        self.memory.step += 1
        return finish()

    def restore(self, payload: Payload, weight: float = 1.0) -> None:
        """Gives `weight` of a payload that was definitely refused back to the residual, to be sent with the next."""
        if self.residual is None:
            self.residual = self._zeros()
        accumulate(payload, weight, self.residual)

    def state_dict(self) -> State:
        """Copies on the host, as ErrorFeedback's, which can take them over."""
        residual = {} if self.residual is None else {"residual": self.residual.copy_to_host()}
        return memory_state(self.memory) | residual

    def load_state_dict(self, state: State) -> None:
        """Takes over a residual kept anywhere; ValueError, with nothing changed, for one of another size."""
        residual = restored(state, "residual", self.count)
        self.residual = None if residual is None and self.compressor.lossless else self._zeros()
        if self.residual is not None and residual is not None:
            self.residual.copy_to_device(residual)
        load_memory(self.memory, state)

    def _zeros(self) -> DeviceArray:
        return self.kernels.device_zeros(self.count, np.float32)

    def _lossless(self, update: DeviceArray) -> DeviceArray:
        if self.residual is None:
            return update
        residual, self.residual = self.residual, None
        self.kernels.sum_of(self.kernels.Sum(residual, self.decay, update, residual))
        return residual

    def _reduce(self, update: DeviceArray, sums: DeviceArray) -> Reduced:
        """What is sent of decay * residual + update, which is written to sums, whole."""
        kernels, reducer = self.kernels, self.compressor.reducer
        addends = kernels.Sum(self.residual, self.decay, update, sums)
        if isinstance(reducer, TopK) and self.count > DENSE_COUNT_MAX:
            places, bits = select_top(kernels, addends, reducer.kept_max(self.count), reducer.dropped_bits)
        else:
            kernels.sum_of(addends)
            if reducer is None:
                return Reduced(sums, ALL, None)
            dense = self.count <= DENSE_COUNT_MAX
            if (dense or isinstance(reducer, RandomK | Cycle)) and kernels.largest_key(sums) >= INFINITY_KEY:
                raise _non_finite(update, sums)
            if dense:
                return Reduced(sums, ALL, None)
            if isinstance(reducer, RandomK):
                return self._random(reducer.kept_max(self.count), sums)
            if isinstance(reducer, CycleTop):
                return self._top_of_strided(reducer, sums)
            if isinstance(reducer, Cycle):
                return self._strided(reducer, sums)
            select = select_above if isinstance(reducer, Threshold) else select_blocks
            places, bits = select(kernels, reducer, sums)
        values = bits.view(np.float32)
        # NaN and infinity have the largest keys: if there are any, some were selected.
        if values.size and kernels.largest_key(values) >= INFINITY_KEY:
            raise _non_finite(update, sums)
        return Reduced(values, encode_indices(kernels, places, self.count) if values.size else NO_INDICES, places)

    def _random(self, kept: int, sums: DeviceArray) -> Reduced:
        """RandomK.reduce, unscaled."""
        words = np.empty(RANDOM_BLOCK, np.uint32)
        cpu.random_words(*self.memory.key, 0, words)
        seed = int(words[0])
        places, chosen = pairs(self.kernels, kept)
        self.kernels.strata(seed, 0, kept, self.count, None, places)
        self.kernels.take(sums.view(np.uint32), places, chosen)
        return Reduced(chosen.view(np.float32), CodedIndices(STRATA.wire_id, seed, []), places)

    def _strided(self, reducer: Cycle, sums: DeviceArray) -> Reduced:
        """Cycle.reduce."""
        phase = self.memory.step % reducer.stride
        places, chosen = pairs(self.kernels, stride_count(phase, reducer.stride, self.count))
        self.kernels.strided(phase, reducer.stride, 0, places)
        self.kernels.take(sums.view(np.uint32), places, chosen)
        coded = reducer.indices(self.count, self.memory)
        return Reduced(chosen.view(np.float32), CodedIndices(*coded[:2], []), places)

    def _top_of_strided(self, reducer: CycleTop, sums: DeviceArray) -> Reduced:
        """CycleTop.reduce."""
        kernels, stride = self.kernels, reducer.stride
        phase = self.memory.step % stride
        count = stride_count(phase, stride, self.count)
        strided = kernels.scratch("strided", count, np.uint32)
        if count:
            places = pairs(kernels, count)[0]  # which the selection overwrites
            kernels.strided(phase, stride, 0, places)
            kernels.take(sums.view(np.uint32), places, strided)
            places, bits = select_top_of(kernels, strided, kept_of(reducer.share, count))
            if places.size:
                indices = encode_strided(kernels, places, phase, stride, self.count)
                kernels.stretch(phase, stride, places)
                return Reduced(bits.view(np.float32), indices, places)
        return Reduced(strided[:0].view(np.float32), NO_INDICES, strided[:0])

    def _encode_values(self, values: DeviceArray, update: DeviceArray, sums: DeviceArray) -> tuple[str, Coded]:
        """(name among DECODERS, arrays of the sections)"""
        coding = self.compressor.value_coding
        if not isinstance(coding, Sectioned):
            if values is sums and sums.size:  # from which the payload is subtracted while it crosses to the host
                values = self.kernels.scratch("coded 0", sums.size, np.float32)
                values.copy_to_device(sums)
            return "fp32", (values,)
        coded = tuple(
            self.kernels.scratch(f"coded {i}", part.size(values.size), part.dtype)
            for i, part in enumerate(coding.sections)
        )
        extra = (coding.unbiased, *self.memory.key, None) if coding.random else ()
        if values.size:
            largest = getattr(self.kernels, coding.encode_kernel.__name__)(values, *extra, *coded)
            if largest >= INFINITY_KEY:
                raise _non_finite(update, sums)
        return _decoder_name(coding.decode_kernel), coded

    def _send(self, reduced: Reduced, coded: Coded) -> Callable[[], memoryview]:
        """Starts the copy of a whole payload to the host; call what is returned to wait for it."""
        indices, chain = reduced.indices, self.compressor
        parts = [(part, part.dtype.itemsize * part.size) for part in coded] + indices.parts
        total = HEADER_BYTES + sum(size for _, size in parts)
        self._turn = (self._turn + 1) % PAYLOADS_KEPT
        if self._pinned[self._turn].size < total:
            self._pinned[self._turn] = self.kernels.pinned_bytes(total + total // 8)
        payload = self._pinned[self._turn][:total]

        def header(byte_coding: int) -> bytes:
            fields = (chain.value_coding.wire_id, byte_coding, self.count, reduced.values.size, indices.parameter)
            return Header(indices.wire_id, *fields).pack()

        sources, targets, end = [], [], HEADER_BYTES
        for part, size in parts:
            begin, end = end, end + size
            if isinstance(part, np.ndarray):
                payload[begin:end] = part[:size]
            elif size:
                sources.append(part.view(np.uint8)[:size])
                targets.append(payload[begin:end])
        payload[:HEADER_BYTES] = np.frombuffer(header(0), np.uint8)
        self.kernels.copy_after(sources, targets, self._stream)

        def finish() -> memoryview:
            self._stream.synchronize()
            packed = chain.byte_coding.encode(payload[HEADER_BYTES:]) if chain.byte_coding else None
            if packed is None:
                return payload.data
            assert chain.byte_coding is not None
            return memoryview(header(chain.byte_coding.wire_id) + packed)

        return finish


def accumulate(payload: Payload, weight: float, out: Any) -> None:
    """out[i] = out[i] + float32(weight) * value[i] on the device, as payload.accumulate; the bytes are checked first."""
    out = _device_floats(out, "out")
    opened = open_payload(payload, out.size)
    _accumulate(load_kernels(), opened, np.float32(weight), out)


def decode(payload: Payload, out: Any) -> None:
    """Writes all values into out, on the device: zero where a sparse payload has none; as payload.decode."""
    out, kernels = _device_floats(out, "out"), load_kernels()
    opened = open_payload(payload, out.size)
    if opened.header.index_coding == EVERY_INDEX:
        name, coded = _upload(kernels, opened)
        if out.size:
            kernels.decode_with(kernels.DECODERS[name].decode, coded, out)
    else:
        kernels.zero(out)
        _accumulate(kernels, opened, np.float32(1.0), out)


def _accumulate(kernels: Any, opened: Opened, weight: np.float32, out: DeviceArray) -> None:
    header = opened.header
    if not header.kept:
        return
    name, coded = _upload(kernels, opened)
    places = None
    if header.index_coding != EVERY_INDEX:
        places = kernels.scratch("indices", header.kept, np.uint32)
        INDEX_READERS[header.index_coding](kernels, opened.index_part, header, places)
    _add(kernels, name, coded, places, weight, out)


def _add(
    kernels: Any, name: str, coded: Coded, places: DeviceArray | None, weight: np.float32, out: DeviceArray
) -> None:
    if places is None and out.size:
        kernels.add_with(kernels.DECODERS[name].add, coded, weight, out)
    elif places is not None and places.size:
        kernels.scatter_add_with(kernels.DECODERS[name].scatter_add, coded, places, weight, out)


def _decoder_name(decode_kernel: Callable[..., None]) -> str:
    """Kernels have one name on every device."""
    return decode_kernel.__name__.removeprefix("decode_")


def _upload(kernels: Any, opened: Opened) -> tuple[str, Coded]:
    """(name among DECODERS, the sections of the values)"""
    values: Any = opened.values
    if not hasattr(values, "decode"):
        return "fp32", (upload(kernels, "fp32", values.values),)
    coded = tuple(upload(kernels, f"section {i}", array) for i, array in enumerate(values.arrays))
    return _decoder_name(values.decode), coded


def _non_finite(update: DeviceArray, sums: DeviceArray) -> Exception:
    """The error for whichever holds NaN or infinity; of both, it is the caller's."""
    host = update.copy_to_host()
    return non_finite(sums.copy_to_host() if np.isfinite(host).all() else host)
