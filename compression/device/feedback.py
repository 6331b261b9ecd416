"""Error feedback where the arrays are: on a GPU, or wherever kernels_for() has kernels for. Only payloads cross PCIe.

Rules
- Payloads are byte for byte the CPU's. Headers, layouts and checks are those of payload.py and the codings' own objects;
  what is written here is only the order of kernels.
- Arrays are float32[count], contiguous, with a __cuda_array_interface__ (torch's CUDA tensors have one), and of the kernels'
  device. Work goes to the caller's stream, where it follows what the caller has put there.
- This module imports anywhere; what it does needs kernels.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from narrows.compression.buffers import Parts, Payload
from narrows.compression.compressor import Chain, Compressor
from narrows.compression.device.stages import (
    INDEX_READERS,
    CodedIndices,
    DeviceArray,
    encode_indices,
    encode_strided,
    pairs,
    select_above,
    select_blocks,
    select_top,
    select_top_of,
)
from narrows.compression.device.staging import Staging
from narrows.compression.feedback import State, load_memory, memory_state, restored
from narrows.compression.index_codings import EVERY_INDEX, STRATA, stride_count
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.sums import Sum
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import COUNT_MAX, HEADER_BYTES, Header, Opened, open_payload, raw_values
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
from narrows.compression.value_codings import Sectioned, non_finite_at

Coded: TypeAlias = tuple[DeviceArray, ...]


class Reduced(NamedTuple):
    """As reducers.Reduced, on the device; places: the indices themselves, None for all. code: makes what is sent of them.
    checked: keys that say whether a value is NaN or infinite, which the values themselves do not say."""

    values: DeviceArray
    code: Callable[[], CodedIndices]
    places: DeviceArray | None
    checked: tuple[Any, ...] = ()


def all_indices() -> CodedIndices:
    return CodedIndices(EVERY_INDEX, 0, [])


def no_indices() -> CodedIndices:
    return CodedIndices(*NOTHING[:2], [])


def _device_floats(kernels: Any, array: Any, name: str) -> DeviceArray:
    view = kernels.view(array)
    if view.dtype != np.float32 or view.ndim != 1 or not view.is_c_contiguous():
        raise TypeError(f"{name} must be a contiguous 1-D float32 array on the device, not {view.ndim}-D {view.dtype}")
    return view


class DeviceErrorFeedback:
    """ErrorFeedback with the residual on the device of these kernels. Not for two threads at once.

    Takes what ErrorFeedback takes, and where payloads are staged: feedbacks may share that. Device memory: 8 bytes a value
    (the residual, and the buffer that its successor is built in, so that an update that is refused leaves it as it was), and
    scratch that all streams of these kernels share: an eighth of a byte a value and some 20 bytes for each that is kept.
    """

    def __init__(
        self,
        kernels: Any,
        compressor: Compressor,
        count: int,
        *,
        decay: float = 1.0,
        seed: int = 0,
        staging: Staging | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be from 0 to 1, not {decay}")
        if count > COUNT_MAX:
            raise ValueError(f"{count} values do not fit one payload; at most {COUNT_MAX} do")
        self.kernels = kernels
        self.compressor = _chain(compressor)
        self.count = count
        self.decay = np.float32(decay)
        self.memory = Memory(seed)
        self.residual: DeviceArray | None = None if self.compressor.lossless else self._zeros()
        self._successor: DeviceArray | None = None
        self.staging = staging or Staging(kernels)

    def encode(self, update: Any) -> memoryview:
        """Payload of decay * residual + update, float32[count] on the device; what it does not carry becomes the residual.

        The payload is pinned host memory (not with lz4), and stays as it is as long as anyone holds it. NonFiniteError (lossy
        compressors) for NaN or infinity in update, or in the sum, leaves the residual as it was.
        """
        with self.kernels.active():
            return self._encode(update)

    def _encode(self, update: Any) -> memoryview:
        update = _device_floats(self.kernels, update, "update")
        if update.size != self.count:
            raise ValueError(f"update has {update.size} values; this stream has {self.count}")
        if self.compressor.lossless:
            values = self._lossless(update)
            payload = self._send(values.size, all_indices(), (values,))()
            self.memory.step += 1
            return payload
        if self._successor is None:
            self._successor = self._zeros()
        sums = self._successor
        self.kernels.forget()
        reduced = self._reduce(update, sums)
        name, coded, largest = self._encode_values(reduced.values, sums)
        # NaN and infinity have the largest keys: if there are any, some were selected.
        if any(int(key) >= INFINITY_KEY for key in (*reduced.checked, *largest)):
            raise _non_finite(self.kernels, update, sums)
        finish = self._send(reduced.values.size, reduced.code(), coded)
        # While the payload crosses to the host, what it carries is taken out of what becomes the residual.
        _add(self.kernels, name, coded, reduced.places, np.float32(-1.0), sums)
        self.residual, self._successor = sums, self.residual
        self.memory.step += 1
        return finish()

    def encode_parts(self, update: Any) -> Parts:
        """As `encode`: one part, for what is sent is a copy in any case."""
        return [self.encode(update)]

    def change(self, compressor: Compressor) -> None:
        """Goes on with another compressor; the residual stays, and a lossless one sends it with its next update."""
        self.compressor = _chain(compressor)
        if self.residual is None and not self.compressor.lossless:
            self.residual = self._zeros()

    def restore(self, payload: Payload, weight: float = 1.0) -> None:
        """Gives `weight` of a payload that was definitely refused back to the residual, to be sent with the next."""
        if self.residual is None:
            self.residual = self._zeros()
        accumulate(self.kernels, payload, weight, self.residual)

    def state_dict(self) -> State:
        """Copies on the host, as ErrorFeedback's, which can take them over."""
        with self.kernels.active():
            residual = {} if self.residual is None else {"residual": self.kernels.read(self.residual)}
        return memory_state(self.memory) | residual

    def load_state_dict(self, state: State) -> None:
        """Takes over a residual kept anywhere; ValueError, with nothing changed, for one of another size."""
        residual = restored(state, "residual", self.count)
        self.residual = None if residual is None and self.compressor.lossless else self._zeros()
        if self.residual is not None and residual is not None:
            with self.kernels.active():
                self.kernels.load(residual, self.residual)
        load_memory(self.memory, state)

    def _zeros(self) -> DeviceArray:
        with self.kernels.active():
            return self.kernels.zeros(self.count, np.float32)

    def _lossless(self, update: DeviceArray) -> DeviceArray:
        if self.residual is None:
            return update
        residual, self.residual = self.residual, None
        self.kernels.sum_of(Sum(residual, self.decay, update, residual))
        return residual

    def _reduce(self, update: DeviceArray, sums: DeviceArray) -> Reduced:
        """What is sent of decay * residual + update, which is written to sums, whole."""
        kernels, reducer = self.kernels, self.compressor.reducer
        addends = Sum(self.residual, self.decay, update, sums)
        if isinstance(reducer, TopK) and self.count > DENSE_COUNT_MAX:
            places, bits = select_top(kernels, addends, reducer.kept_max(self.count), reducer.dropped_bits)
        else:
            kernels.sum_of(addends)
            if reducer is None or self.count <= DENSE_COUNT_MAX:
                return Reduced(sums, all_indices, None)
            if isinstance(reducer, RandomK):
                return self._random(reducer.kept_max(self.count), sums)
            if isinstance(reducer, CycleTop):
                return self._top_of_strided(reducer, sums)
            if isinstance(reducer, Cycle):
                return self._strided(reducer, sums)
            select = select_above if isinstance(reducer, Threshold) else select_blocks
            places, bits = select(kernels, reducer, sums)
        if not places.size:
            return Reduced(bits.view(np.float32), no_indices, places)
        return Reduced(bits.view(np.float32), encode_indices(kernels, places, self.count), places)

    def _random(self, kept: int, sums: DeviceArray) -> Reduced:
        """RandomK.reduce, unscaled."""
        words = np.empty(RANDOM_BLOCK, np.uint32)
        cpu.random_words(*self.memory.key, 0, words)
        seed = int(words[0])
        places, chosen = pairs(self.kernels, kept)
        self.kernels.strata(seed, 0, kept, self.count, None, places)
        self.kernels.take(sums.view(np.uint32), places, chosen)
        checked = (self.kernels.largest_key(sums),)
        return Reduced(chosen.view(np.float32), lambda: CodedIndices(STRATA.wire_id, seed, []), places, checked)

    def _strided(self, reducer: Cycle, sums: DeviceArray) -> Reduced:
        """Cycle.reduce."""
        phase = self.memory.step % reducer.stride
        places, chosen = pairs(self.kernels, stride_count(phase, reducer.stride, self.count))
        self.kernels.strided(phase, reducer.stride, 0, places)
        self.kernels.take(sums.view(np.uint32), places, chosen)
        coded = reducer.indices(self.count, self.memory)
        checked = (self.kernels.largest_key(sums),)
        return Reduced(chosen.view(np.float32), lambda: CodedIndices(*coded[:2], []), places, checked)

    def _top_of_strided(self, reducer: CycleTop, sums: DeviceArray) -> Reduced:
        """CycleTop.reduce."""
        kernels, stride = self.kernels, reducer.stride
        phase = self.memory.step % stride
        count = stride_count(phase, stride, self.count)
        strided = kernels.scratch("strided", count, np.uint32)
        checked = (kernels.largest_key(sums),)
        if count:
            places = pairs(kernels, count)[0]  # which the selection overwrites
            kernels.strided(phase, stride, 0, places)
            kernels.take(sums.view(np.uint32), places, strided)
            places, bits = select_top_of(kernels, strided, kept_of(reducer.share, count))
            if places.size:
                code = encode_strided(kernels, places, phase, stride, self.count)

                def stretched() -> CodedIndices:
                    coded = code()
                    kernels.stretch(phase, stride, places)
                    return coded

                return Reduced(bits.view(np.float32), stretched, places, checked)
        return Reduced(strided[:0].view(np.float32), no_indices, strided[:0], checked)

    def _encode_values(self, values: DeviceArray, sums: DeviceArray) -> tuple[str, Coded, tuple[Any, ...]]:
        """(name of the coding, arrays of the sections, the largest key of all values, if there are any)"""
        coding, kernels = self.compressor.value_coding, self.kernels
        if not isinstance(coding, Sectioned):
            largest = (kernels.largest_key(values),) if values.size else ()
            if values is sums and sums.size:  # from which the payload is subtracted while it crosses to the host
                values = kernels.scratch("coded 0", sums.size, np.float32)
                kernels.copy(sums, values)
            return "fp32", (values,), largest
        coded = tuple(
            kernels.scratch(f"coded {i}", part.size(values.size), part.dtype) for i, part in enumerate(coding.sections)
        )
        extra = (coding.unbiased, *self.memory.key, None) if coding.random else ()
        name = _decoder_name(coding.decode_kernel)
        if not values.size:
            return name, coded, ()
        return name, coded, (getattr(kernels, coding.encode_kernel.__name__)(values, *extra, *coded),)

    def _send(self, kept: int, indices: CodedIndices, coded: Coded) -> Callable[[], memoryview]:
        """Starts the copy of a whole payload to the host; call what is returned to wait for it."""
        chain = self.compressor
        parts = [(part, part.dtype.itemsize * part.size) for part in coded] + indices.parts
        total = HEADER_BYTES + sum(size for _, size in parts)
        lent = self.staging.lend(total)
        payload = np.frombuffer(lent, np.uint8)

        def header(byte_coding: int) -> bytes:
            fields = (chain.value_coding.wire_id, byte_coding, self.count, kept, indices.parameter)
            return Header(indices.wire_id, *fields).pack()

        sources, targets, end = [], [], HEADER_BYTES
        for part, size in parts:
            begin, end = end, end + size
            if type(part) is np.ndarray:  # made on the host
                payload[begin:end] = part[:size]
            elif size:
                sources.append(part.view(np.uint8)[:size])
                targets.append(payload[begin:end])
        payload[:HEADER_BYTES] = np.frombuffer(header(0), np.uint8)
        landing = self.kernels.fetch(sources, targets)

        def finish() -> memoryview:
            landing.wait()
            packed = chain.byte_coding.encode(payload[HEADER_BYTES:]) if chain.byte_coding else None
            if packed is None:
                return lent
            assert chain.byte_coding is not None
            return memoryview(header(chain.byte_coding.wire_id) + packed)

        return finish


def _chain(compressor: Compressor) -> Chain:
    chain = compressor.contraction()
    assert isinstance(chain, Chain)
    return chain


def accumulate(kernels: Any, payload: Payload, weight: float, out: Any) -> None:
    """out[i] = out[i] + float32(weight) * value[i] on the device, as payload.accumulate; the bytes are checked first."""
    with kernels.active():
        out = _device_floats(kernels, out, "out")
        _accumulate(kernels, open_payload(payload, out.size), np.float32(weight), out)


def decode(kernels: Any, payload: Payload, out: Any) -> None:
    """Writes all values into out, on the device: zero where a sparse payload has none; as payload.decode."""
    with kernels.active():
        out = _device_floats(kernels, out, "out")
        opened = open_payload(payload, out.size)
        if opened.header.index_coding == EVERY_INDEX:
            name, coded = _upload(kernels, opened)
            if out.size:
                kernels.decode_as(name, coded, out)
        else:
            kernels.zero(out)
            _accumulate(kernels, opened, np.float32(1.0), out)


def add_raw(kernels: Any, raw: Payload, weight: float, out: Any) -> None:
    """out += float32(weight) * values on the device, for bytes that are float32[count] and nothing else, as payload.add_raw."""
    with kernels.active():
        out = _device_floats(kernels, out, "out")
        values = raw_values(raw, out.size)
        if values.size:
            kernels.add_as("fp32", (kernels.upload("fp32", values),), np.float32(weight), out)


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
        kernels.add_as(name, coded, weight, out)
    elif places is not None and places.size:
        kernels.scatter_add_as(name, coded, places, weight, out)


def _decoder_name(decode_kernel: Callable[..., None]) -> str:
    """Kernels have one name on every device."""
    return decode_kernel.__name__.removeprefix("decode_")


def _upload(kernels: Any, opened: Opened) -> tuple[str, Coded]:
    """(name among DECODERS, the sections of the values)"""
    values: Any = opened.values
    if not hasattr(values, "decode"):
        return "fp32", (kernels.upload("fp32", values.values),)
    coded = tuple(kernels.upload(f"section {i}", array) for i, array in enumerate(values.arrays))
    return _decoder_name(values.decode), coded


def _non_finite(kernels: Any, update: DeviceArray, sums: DeviceArray) -> Exception:
    """The error for whichever holds NaN or infinity; of both, it is the caller's. It is found on the device."""
    for values in (update, sums):
        bits = values.view(np.uint32)
        wrong = kernels.count_above(bits, INFINITY_KEY - 1)
        if not wrong:
            continue
        low, high = 0, int(bits.size)  # all below low are finite, one in [low, high) is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if kernels.count_above(bits[low:middle], INFINITY_KEY - 1) else (middle, high)
        return non_finite_at(wrong, int(bits.size), low, kernels.read(values[low:high])[0])
    raise AssertionError("all values are finite")
