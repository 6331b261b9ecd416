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
from narrows.compression.device.stages import INDEX_READERS, Arena, DeviceArray, arena, pairs, select_top
from narrows.compression.device.staging import Staging
from narrows.compression.feedback import State, load_memory, memory_state, restored
from narrows.compression.index_codings import (
    EVERY_INDEX,
    STRATA,
    STRIDE_UNIT,
    STRIDED_RICE,
    bytes_of,
    indices_max_bytes,
    stride_count,
)
from narrows.compression.kernels import cpu
from narrows.compression.kernels.random import RANDOM_BLOCK
from narrows.compression.kernels.record import (
    HEAD_BYTES,
    INDEX_CODING,
    LARGEST,
    LOW_BITS,
    MISLED,
    MISSING,
    PARAMETER,
    TOLD,
    UNARY_BITS,
)
from narrows.compression.kernels.sums import Sum
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import COUNT_MAX, HEADER_BYTES, CheckedPayload, Header, open_payload, raw_values
from narrows.compression.reducers import DENSE_COUNT_MAX, Memory
from narrows.compression.sparsifiers import NOTHING, BlockTopK, Cycle, CycleTop, RandomK, Threshold, TopK, kept_of
from narrows.compression.value_codings import Section, Sectioned, non_finite_at

Coded: TypeAlias = tuple[DeviceArray, ...]
RECORD_BYTES = 8 * TOLD
BODY = RECORD_BYTES + HEADER_BYTES  # where the body of a payload lies behind a record
FP32_SECTIONS = (Section(np.float32, 1, 1),)


class PendingEncode(NamedTuple):
    """A record and a payload on their way to `lent`. room: values that are kept at most; indices: wire id and parameter, None
    where the record tells; landed: a kernel writes as many bytes as there are."""

    landing: Any
    lent: memoryview
    room: int
    indices: tuple[int, int] | None
    landed: bool = False


def _device_floats(kernels: Any, array: Any, name: str) -> DeviceArray:
    view = kernels.view(array)
    if view.dtype != np.float32 or view.ndim != 1 or not view.is_c_contiguous():
        raise TypeError(f"{name} must be a contiguous 1-D float32 array on the device, not {view.ndim}-D {view.dtype}")
    return view


class DeviceErrorFeedback:
    """ErrorFeedback with the residual on the device of these kernels. Not for two threads at once.

    Takes what ErrorFeedback takes, and where payloads are staged: feedbacks may share that. Device memory: 8 bytes a value
    (the residual, and the buffer that its successor is built in, so that an update that is refused leaves it as it was), and
    scratch that all streams of these kernels share: an eighth of a byte a value and some 35 bytes for each that is kept.
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
            finish = self._told(self._fetch((values,), self.count, (EVERY_INDEX, 0)))[1]
            self.memory.step += 1
            return finish()
        if self._successor is None:
            self._successor = self._zeros()
        addends = Sum(self.residual, self.decay, update, self._successor)
        told, finish = self._coded(addends, sampled=True)
        if told[MISLED]:  # nothing was kept, and the sum is there
            self.kernels.counts["misled"] += 1
            told, finish = self._coded(addends, sampled=False)
        if told[LARGEST] >= INFINITY_KEY:
            raise _non_finite(self.kernels, addends)
        self.residual, self._successor = addends.sums, self.residual
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

    def _coded(self, addends: Sum, sampled: bool) -> tuple[list[int], Callable[[], memoryview]]:
        """The record, and the payload of the sum, which is made. The values that it carries are taken out of the sum while it
        crosses to the host. sampled: whether a sample may choose a threshold."""
        reducer = self.compressor.reducer
        if reducer is None or self.count <= DENSE_COUNT_MAX:
            return self._told(self._all(addends))
        if isinstance(reducer, RandomK):
            return self._told(self._random(reducer, addends))
        if isinstance(reducer, Cycle) and not isinstance(reducer, CycleTop):
            return self._told(self._strided(reducer, addends))
        return self._told(self._selected(reducer, addends, sampled))

    def _all(self, addends: Sum) -> PendingEncode:
        """Every value, coded as it is summed."""
        record, coded = self.kernels.record(), self._arena(self.count).parts
        if self.count:
            self.kernels.encode_sum_as(self._name, addends, self._extra, coded, record)
        return self._fetch(coded, self.count, (EVERY_INDEX, 0), record)

    def _strided(self, reducer: Cycle, addends: Sum) -> PendingEncode:
        """Cycle.reduce, coded as it is summed."""
        phase = self.memory.step % reducer.stride
        kept = stride_count(phase, reducer.stride, self.count)
        record, coded = self.kernels.record(), self._arena(kept).parts
        chosen = self.kernels.scratch("strided", kept, np.float32)
        self.kernels.encode_strided_as(self._name, addends, phase, reducer.stride, chosen, self._extra, coded, record)
        return self._fetch(coded, kept, reducer.indices(self.count, self.memory)[:2], record)

    def _random(self, reducer: RandomK, addends: Sum) -> PendingEncode:
        """RandomK.reduce, unscaled."""
        kernels, kept = self.kernels, reducer.kept_max(self.count)
        words = np.empty(RANDOM_BLOCK, np.uint32)
        cpu.random_words(*self.memory.key, 0, words)
        seed = int(words[0])
        record, coded, (places, bits) = kernels.record(), self._arena(kept).parts, pairs(kernels, kept)
        kernels.sum_strided(addends, 0, 1, addends.sums[:0], record)
        kernels.strata(seed, 0, kept, self.count, None, places)
        kernels.take(addends.sums.view(np.uint32), places, bits)
        kernels.encode_as(self._name, bits.view(np.float32), self._extra, coded, record)
        way = self._fetch(coded, kept, (STRATA.wire_id, seed), record)
        kernels.scatter_add_as(self._name, coded, places, np.float32(-1.0), addends.sums)
        return way

    def _selected(self, reducer: Any, addends: Sum, sampled: bool) -> PendingEncode:
        """TopK, BlockTopK, Threshold and CycleTop.reduce: the device alone knows which, and how long their codes are."""
        kernels, sums = self.kernels, addends.sums
        bits, phase, stride, turns = sums.view(np.uint32), 0, 1, isinstance(reducer, CycleTop)
        below, room = 0, reducer.kept_max(self.count)
        if isinstance(reducer, Threshold):
            below = int(np.float32(reducer.threshold).view(np.uint32)) - 1
            kernels.sum_of(addends)
            room = kernels.count_above(bits, below)  # which waits: it may be any number
        record, count = kernels.record(), self.count
        if turns:
            phase, stride = self.memory.step % reducer.stride, reducer.stride
            count = stride_count(phase, stride, self.count)
            room = min(room, kept_of(reducer.share, count))
            strided = kernels.scratch("strided", count, np.uint32)
            kernels.sum_strided(addends, phase, stride, strided.view(np.float32), record)
            bits = strided
        places, kept = pairs(kernels, room)
        if not room:
            return self._fetch((), 0, NOTHING[:2], record)
        if isinstance(reducer, TopK):
            select_top(kernels, addends, room, reducer.dropped_bits, sampled, places, kept, record)
        elif turns:
            select_top(kernels, bits, room, 0, sampled, places, kept, record)
        elif isinstance(reducer, BlockTopK):
            kernels.top_of_blocks(addends, reducer.k, reducer.block, places, kept, record)
        else:
            kernels.compact_above(bits, below, places, kept, record)
        sections = self.code(places, kept, count, turns, record)
        indices = (STRIDED_RICE.wire_id, phase * STRIDE_UNIT + stride) if turns else None
        way = self._land(sections, room, indices, record)
        if turns:
            kernels.stretch(phase, stride, places)
        kernels.scatter_add_as(self._name, sections.parts[:-3], places, np.float32(-1.0), sums, record)
        return way

    def code(self, places: DeviceArray, kept: DeviceArray, count: int, strided: bool, record: DeviceArray) -> Arena:
        """The sections of values and of indices, of which there may be as many as places: rising, below count."""
        at_most = -(-indices_max_bytes(places.size, count) // 8) * 8 + 8
        sections = self._arena(places.size, [(np.uint8, at_most)] * 3)
        self.kernels.encode_as(self._name, kept.view(np.float32), self._extra, sections.parts[:-3], record)
        self.kernels.code_indices(places, count, strided, *sections.parts[-3:], record)
        return sections

    # The value coding.

    @property
    def _name(self) -> str:
        coding = self.compressor.value_coding
        return _decoder_name(coding.decode_kernel) if isinstance(coding, Sectioned) else "fp32"

    @property
    def _sections(self) -> tuple[Section, ...]:
        coding = self.compressor.value_coding
        return coding.sections if isinstance(coding, Sectioned) else FP32_SECTIONS

    @property
    def _extra(self) -> tuple[int, int, int]:
        coding = self.compressor.value_coding
        rounded = isinstance(coding, Sectioned) and coding.random
        return (int(coding.unbiased), *self.memory.key) if rounded else (0, 0, 0)

    def _arena(self, kept: int, more: Any = ()) -> Arena:
        return arena(self.kernels, [(part.dtype, part.size(kept)) for part in self._sections] + list(more))

    # The way to the host.

    def _fetch(
        self, coded: Coded, kept: int, indices: tuple[int, int], record: DeviceArray | None = None
    ) -> PendingEncode:
        """Copies, where the host knows all sizes."""
        sources = [part.view(np.uint8) for part in coded if part.size]
        total = sum(part.nbytes for part in sources)
        lent = self.staging.lend(BODY + total)
        target = np.frombuffer(lent, np.uint8)
        targets, end = [], BODY
        for part in sources:
            targets.append(target[end : end + part.nbytes])
            end += part.nbytes
        if record is None:
            target[:RECORD_BYTES] = 0
        else:
            sources.append(record[:TOLD].view(np.uint8))
            targets.append(target[:RECORD_BYTES])
        return PendingEncode(self.kernels.fetch(sources, targets), lent, kept, indices)

    def _land(self, sections: Arena, room: int, indices: tuple[int, int] | None, record: DeviceArray) -> PendingEncode:
        """As many bytes as there are, written by a kernel."""
        sizes = [(part.items * np.dtype(part.dtype).itemsize, part.per) for part in self._sections]
        spare = 3 - len(sizes)
        begins = sections.begins[:-3] + (0,) * spare + sections.begins[-3:]
        total = sum(part.byte_count(room) for part in self._sections) + sections.parts[-1].size
        lent = self.staging.lend(BODY + (total // 4 + 2) * 4)
        flat = tuple(number for size in [*sizes, *[(0, 1)] * spare] for number in size)
        landing = self.kernels.land(sections.whole, begins, flat, room, record, np.frombuffer(lent, np.uint8))
        return PendingEncode(landing, lent, room, indices, landed=True)

    def _told(self, way: PendingEncode) -> tuple[list[int], Callable[[], memoryview]]:
        """Waits, once. The record, and a function that makes the payload."""
        self.kernels.counts["waits"] += 1
        way.landing.wait()
        record = np.frombuffer(way.lent, np.int64, TOLD)
        told = [int(number) for number in record]
        kept, indices = way.room - told[MISSING], way.indices
        size = sum(part.byte_count(kept) for part in self._sections)
        if way.landed:
            size += told[HEAD_BYTES] + bytes_of(told[LOW_BITS]) + bytes_of(told[UNARY_BITS])
            self.kernels.counts["bytes down"] += RECORD_BYTES + size
            if not kept:
                indices = NOTHING[:2]
        wire_id, parameter = indices or (told[INDEX_CODING], told[PARAMETER])
        chain = self.compressor

        def header(byte_coding: int) -> bytes:
            return Header(wire_id, chain.value_coding.wire_id, byte_coding, self.count, kept, parameter).pack()

        def finish() -> memoryview:
            payload = way.lent[RECORD_BYTES : BODY + size]
            payload[:HEADER_BYTES] = header(0)
            body = np.frombuffer(payload, np.uint8)[HEADER_BYTES:]
            packed = chain.byte_coding.encode(body) if chain.byte_coding else None
            if packed is None:
                return payload
            assert chain.byte_coding is not None
            return memoryview(header(chain.byte_coding.wire_id) + packed)

        return told, finish


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


def _accumulate(kernels: Any, opened: CheckedPayload, weight: np.float32, out: DeviceArray) -> None:
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


def _upload(kernels: Any, opened: CheckedPayload) -> tuple[str, Coded]:
    """(name among DECODERS, the sections of the values)"""
    values: Any = opened.values
    if not hasattr(values, "decode"):
        return "fp32", (kernels.upload("fp32", values.values),)
    coded = tuple(kernels.upload(f"section {i}", array) for i, array in enumerate(values.arrays))
    return _decoder_name(values.decode), coded


def _non_finite(kernels: Any, addends: Sum) -> Exception:
    """The error for whichever holds NaN or infinity; of both, it is the caller's. It is found on the device."""
    kernels.sum_of(addends)  # of which values were taken out
    for values in (addends.update, addends.sums):
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
