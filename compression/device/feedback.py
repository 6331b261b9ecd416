"""Error feedback on a GPU, or on any device for which kernels_for() has kernels. Only payloads cross PCIe.

How it works

    update, residual ──> sum ──> selection ──> codes ──> sections ──┐    kernels on the caller's stream
                          │                      │                  │
                          └── minus the decoded values: the residual│    beside it, on a stream of its own:
                                                                    └──> page-locked memory, with the record

1. The kernels add residual and update, select and code values, and write their findings to a record on the device
   (kernels/record.py): the largest key, the number of kept values, the chosen index coding.
2. `_fetch` (the host knows all sizes) or `_land` (the record has them) begins the copy to the host. Meanwhile the
   device subtracts the coded values from the sum.
3. `_hold` copies the codes to memory of their own: the worker adds its own updates from there (`DeviceCodes`).
4. `_told` waits once for the copy to the host, reads the record, and writes the header.
5. If the sample of a top-k misled, steps 1 to 4 are repeated without a sample, and add nothing: the sum is there.

The sum is in the memory of the residual, and an update may be two arrays whose difference no array holds
(`DeviceDifference`). So the first kernel, `guard`, only looks at all sums. If one is not finite, the later kernels add
nothing to the residual and code the residual alone; what they took out is added again.

Rules
- Payloads are byte for byte those of the CPU. Headers, layouts and checks are in payload.py and in the codings; this
  file has only the order of kernels.
- Arrays are float32[count], contiguous, on the device of the kernels, with a __cuda_array_interface__, as torch's CUDA
  tensors have. Work is queued on the caller's stream, after the work that the caller has queued there.
- The module can be imported on any machine; its functions need kernels.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from narrows.compression.buffers import CHUNK, DeviceDifference, FloatArray, Parts, Payload
from narrows.compression.compressor import LAST, Chain, Compressor
from narrows.compression.device.stages import (
    INDEX_READERS,
    Arena,
    DeviceArray,
    DeviceCodes,
    DevicePool,
    Staging,
    UploadPart,
    add_values,
    arena,
    pairs,
    select_top,
)
from narrows.compression.feedback import State, load_memory, memory_state, restored
from narrows.compression.index_codings import (
    EVERY_INDEX,
    STRATA,
    STRIDE,
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
    Sum,
)
from narrows.compression.kernels.values import INFINITY_KEY
from narrows.compression.payload import COUNT_MAX, HEADER_BYTES, CheckedPayload, Header, open_payload, raw_values
from narrows.compression.reducers import DENSE_COUNT_MAX, Memory
from narrows.compression.sparsifiers import NOTHING, BlockTopK, Cycle, CycleTop, RandomK, Threshold, TopK, kept_of
from narrows.compression.value_codings import INT12, Section, Sectioned, non_finite_at

Coded: TypeAlias = tuple[DeviceArray, ...]
Result = TypeVar("Result")
Told: TypeAlias = tuple[list[int], Callable[[], memoryview], DeviceCodes | None]
RECORD_BYTES = 8 * TOLD
BODY = RECORD_BYTES + HEADER_BYTES  # the offset of a payload's body in staging memory: record, header, body
FP32_SECTIONS = (Section(np.float32, 1, 1),)
SECTIONS_MAX = 3  # value sections of a payload that `gather_sections` (cuda/landing.py) copies


class PendingEncode(NamedTuple):
    """A record and a payload on their way to the host."""

    landing: Any  # the copy under way
    lent: memoryview  # staging memory, its target
    room: int  # the largest number of values that may be kept
    indices: tuple[int, int] | None  # wire id and parameter of the index coding; None: the record has them
    landed: bool = False  # a kernel writes the sections, and no byte more
    held: DeviceCodes | None = None  # room for all values; None: no value may be kept


class BegunEncode(NamedTuple):
    """An encode that is launched.

    Attributes:
        addends: the sum that is encoded.
        step: of the memory.
        way: its payload on the way to the host.
    """

    addends: Sum
    step: int
    way: PendingEncode


class LandPlan(NamedTuple):
    """How the sections of an encode cross to the host, if only the device knows their sizes.

    Attributes:
        arguments: of `land`, but for the target.
        size: the bytes of the target, at most.
    """

    arguments: tuple[Any, ...]
    size: int


def _address_of(array: DeviceArray) -> int:
    """Return the address of an array of the device, or of the host in its place."""
    return int(array.address if hasattr(array, "address") else array.ctypes.data)


def _same(one: Sum, other: Sum) -> bool:
    """Return whether two updates are the same memory."""
    mine, yours = ([part for part in (each.update, each.start) if part is not None] for each in (one, other))
    return list(map(_address_of, mine)) == list(map(_address_of, yours))


def _device_floats(kernels: Any, array: Any, name: str) -> DeviceArray:
    view = kernels.view(array)
    if view.dtype != np.float32 or view.ndim != 1 or not view.is_c_contiguous():
        raise TypeError(f"{name} must be a contiguous 1-D float32 array on the device, not {view.ndim}-D {view.dtype}")
    return view


class DeviceErrorFeedback:
    """ErrorFeedback whose residual is on the device of its kernels. One thread at a time may use it.

    Device memory: 4 bytes a value, for the residual. All streams of the kernels share scratch memory: an eighth of a byte
    a value, and some 35 bytes for each kept value. A payload that somebody holds by `coded` takes its values' bytes, and
    4 for each index.

    Args:
        kernels: from `kernels_for`.
        compressor, count, decay, seed: as in `ErrorFeedback`.
        staging: page-locked memory for payloads, which several feedbacks may share; None: its own.
        pool: memory for `coded`, which several feedbacks may share; None: its own.

    Attributes:
        coded: the values of the newest payload; None: there is none, or the compressor is lossless.

    Raises:
        ValueError: `decay` is not from 0 to 1, or `count` values do not fit one payload.
        TypeError: no device has a kernel for this sparsifier or value coding.
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
        pool: DevicePool | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be from 0 to 1, not {decay}")
        if count > COUNT_MAX:
            raise ValueError(f"{count} values do not fit one payload; at most {COUNT_MAX} do")
        self.kernels = kernels
        self.compressor = _chain(compressor)
        self._spec = self.compressor.spec  # its text is made at each call, and a step asks often
        self.count = count
        self.decay = np.float32(decay)
        self.memory = Memory(seed)
        self.residual: DeviceArray | None = None if self.compressor.lossless else self._zeros()
        self._phase = self._seed = 0  # of the present encode
        self.staging = staging or Staging(kernels)
        self.pool = pool or DevicePool(kernels)
        self.coded: DeviceCodes | None = None
        self._begun: BegunEncode | None = None

    def start_encode(self, update: Any) -> None:
        """Launch the encode of an update, whose payload the next `encode` returns.

        So several feedbacks can launch their encodes before the host waits for the first payload.

        Args:
            update: as in `encode`, which gets it next, or `drop_encode` is called. It must not change before.

        Raises:
            NonFiniteError: as `encode`; of most compressors `encode` raises it.
            TypeError, ValueError: as `encode`.
        """
        if self.compressor.lossless:
            return
        with self.kernels.active():
            addends = self._addends(update)
            self.drop_encode()
            self._begun = BegunEncode(addends, self.memory.step, self._launched(addends, sampled=True))

    def encode(self, update: Any) -> memoryview:
        """Encode decay * residual + update. What the payload leaves out becomes the residual.

        Args:
            update: float32[count], contiguous, on the device, or such a `DeviceDifference`. It is not
                changed.

        Returns:
            The payload. Without lz4 it is page-locked host memory, which does not change while anyone refers to it.

        Raises:
            NonFiniteError: the compressor is lossy, and the update or the sum holds NaN or infinity. The residual stays
                as it was, but for a rounding where coded values are not exact multiples, as with sign.
            TypeError, ValueError: the update has another dtype, shape or size.
        """
        with self.kernels.active():
            return self._encode(update)

    def drop_encode(self) -> None:
        """Forget an encode that was launched and is not wanted. The residual is what it was, but for roundings."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        with self.kernels.active():
            told, _, coded = self._told(begun.way)
            self._put_back(coded)
            if told[LARGEST] >= INFINITY_KEY:  # the update was not added
                self.kernels.forget_inputs()
                return
            residual, _, update, _, start = begun.addends
            negative = Sum(update, np.float32(-1.0), residual, residual)
            self.kernels.sum_of(negative if start is None else Sum(residual, np.float32(1.0), start, residual, update))

    def _put_back(self, coded: DeviceCodes | None) -> None:
        if coded is not None:
            coded.add(1.0, self.residual)

    def _addends(self, update: Any) -> Sum:
        """Return the sum of the residual and an update, in the memory of the residual, if there is one."""
        values, start = update if isinstance(update, DeviceDifference) else (update, None)
        values = _device_floats(self.kernels, values, "update")
        if start is not None:
            start = _device_floats(self.kernels, start, "the start of the update")
        for each in (values,) if start is None else (values, start):
            if each.size != self.count:
                raise ValueError(f"update has {each.size} values; this stream has {self.count}")
        return Sum(self.residual, self.decay, values, self.residual, start)

    def _encode(self, update: Any) -> memoryview:
        addends, begun = self._addends(update), self._begun
        if begun is not None and (begun.step != self.memory.step or not _same(begun.addends, addends)):
            self.drop_encode()
        begun, self._begun = self._begun, None
        self.coded = None
        if self.compressor.lossless:
            values, self.residual = self._summed(addends), None
            _, finish, _ = self._told(self._fetch((values,), self.count, (EVERY_INDEX, 0)))
            self.memory.advance()
            return finish()
        way = self._launched(addends, sampled=True) if begun is None else begun.way
        told, finish, coded = self._told(way)
        finite = told[LARGEST] < INFINITY_KEY
        if finite and told[MISLED]:  # the sample misled: no value was kept
            self.kernels.counts["misled"] += 1
            told, finish, coded = self._told(self._launched(addends.unchanged(), sampled=False))
        if not finite:
            self._put_back(coded)
            raise self._non_finite(addends)
        self.memory.advance()
        self.coded = coded
        return finish()

    def take(self, update: Any) -> DeviceArray:
        """Return decay * residual + update, as `ErrorFeedback.take` does. Raises no NonFiniteError."""
        with self.kernels.active():
            self.drop_encode()
            values = self._summed(self._addends(update))
        self.residual = None if self.compressor.lossless else self._zeros()
        return values

    def encode_last(self, update: Any, cuts: Iterable[tuple[int, int]]) -> list[memoryview]:
        """Encode the last update, as `ErrorFeedback.encode_last` does: the host codes the values, piece by piece.

        Raises:
            NonFiniteError: the update or the sum holds NaN or infinity: the residual stays as it was.
            TypeError, ValueError: as `encode`.
        """
        with self.kernels.active():
            self.drop_encode()
            addends = self._addends(update)
            if self.residual is not None:
                self._check_sums(addends)
            values = self._summed(addends)
            return [LAST.encode(self.kernels.read(values[begin:end])) for begin, end in cuts]

    def forget(self) -> None:
        """Set the residual to zero: `encode_last` has sent it."""
        self.drop_encode()
        if self.residual is None or self.compressor.lossless:
            self.residual = None
            return
        with self.kernels.active():
            self.kernels.zero(self.residual)

    def encode_parts(self, update: Any) -> Parts:
        """Encode, and return one part: the payload is a copy in any case."""
        return [self.encode(update)]

    def change(self, compressor: Compressor) -> None:
        """Change to another compressor. The residual stays; a lossless compressor sends it with the next update."""
        self.drop_encode()
        self.compressor = _chain(compressor)
        self._spec = self.compressor.spec
        if self.residual is None and not self.compressor.lossless:
            self.residual = self._zeros()

    def restore(self, payload: Payload, weight: float = 1.0) -> None:
        """Add weight * payload to the residual, as `ErrorFeedback.restore` does."""
        self.drop_encode()
        if self.residual is None:
            self.residual = self._zeros()
        accumulate(self.kernels, payload, weight, self.residual)

    def state_dict(self) -> State:
        """Return copies on the host, in the form of `ErrorFeedback.state_dict`, which can load them."""
        with self.kernels.active():
            residual = {} if self.residual is None else {"residual": self.kernels.read(self.residual)}
        return memory_state(self.memory) | residual

    def load_state_dict(self, state: State) -> None:
        """Load a saved state, of the host or of a device. Raises ValueError for another size; then nothing changes."""
        residual = restored(state, "residual", self.count)
        self.drop_encode()
        self.residual = None if residual is None and self.compressor.lossless else self._zeros()
        if self.residual is not None and residual is not None:
            with self.kernels.active():
                self.kernels.load(residual, self.residual)
        load_memory(self.memory, state)

    def _zeros(self) -> DeviceArray:
        with self.kernels.active():
            return self.kernels.zeros(self.count, np.float32)

    def _summed(self, addends: Sum) -> DeviceArray:
        """Return decay * residual + update, in the memory of the residual; without a residual the update as an array."""
        if addends.sums is None:
            if addends.start is None:
                return addends.update
            zeros = self._zeros()
            addends = addends._replace(residual=zeros, sums=zeros)
        self.kernels.sum_of(addends)
        return addends.sums

    def _check_sums(self, addends: Sum) -> None:
        """Raise NonFiniteError unless all sums are finite. Waits for the device, and changes nothing."""
        record = self.kernels.record()
        self.kernels.guarded(self._begin(addends), record)
        if int(self.kernels.read(record[LARGEST : LARGEST + 1])[0]) >= INFINITY_KEY:
            raise self._non_finite(addends)

    def _non_finite(self, addends: Sum) -> Exception:
        """Make the error for an update or a sum with NaN or infinity; if both have some, for the update."""
        self.kernels.forget_inputs()
        read, (residual, decay, update, _, start) = self.kernels.read, addends
        for summed in (False, True):
            wrong, first, value = 0, -1, np.float32(0)
            for begin in range(0, self.count, CHUNK):
                part = slice(begin, begin + CHUNK)
                with np.errstate(over="ignore", invalid="ignore"):
                    values = read(update[part]) if start is None else read(update[part]) - read(start[part])
                    values = decay * read(residual[part]) + values if summed else values
                at = np.flatnonzero(~np.isfinite(values))
                if at.size and not wrong:
                    first, value = begin + int(at[0]), values[at[0]]
                wrong += at.size
            if wrong:
                return non_finite_at(wrong, self.count, first, value)
        raise AssertionError("all values are finite")

    def _begin(self, addends: Sum) -> Sum:
        """Tell the kernels what differs from the last encode, and return the addends."""
        reducer, seed = self.compressor.reducer, 0
        phase = self.memory.step % reducer.stride if isinstance(reducer, Cycle | CycleTop) else 0
        if isinstance(reducer, RandomK):
            words = np.empty(RANDOM_BLOCK, np.uint32)
            cpu.random_words(*self.memory.key, 0, words)
            seed = int(words[0])
        self._phase, self._seed = phase, seed
        return cast(Sum, self.kernels.begin(addends, phase, seed, self.memory.key))

    def _captured(self, part: str, sampled: bool, room: int, launches: Callable[[], Result], among: int = 0) -> Result:
        """Launch a part of an encode, as a CUDA graph if it has been launched before.

        Args:
            part: which part.
            sampled: False for what follows a sample that misled: too rare for a graph.
            room: the largest number of kept values.
            launches: as in `Queue.captured`.
            among: the number of values that they are selected among, if it differs between turns.
        """
        if not sampled:
            return launches()
        key = (part, self._spec, self.count, float(self.decay), room, among)
        return cast(Result, self.kernels.captured(key, launches))

    def _launched(self, addends: Sum, sampled: bool) -> PendingEncode:
        """Launch an encode. While the payload crosses to the host its values are subtracted from the sum.

        Args:
            addends: the sum.
            sampled: a sample may choose the threshold of a top-k.

        Returns:
            The payload on its way.
        """
        self.kernels.after_landings()  # the payload before may still be read from the scratch memory
        reducer = self.compressor.reducer
        if isinstance(reducer, Threshold):  # its kernels begin with the finished sum
            self._check_sums(addends)
        addends = self._begin(addends)
        if reducer is None or self.count <= DENSE_COUNT_MAX:
            return self._all(addends)
        return REDUCES[type(reducer)](self, reducer, addends, sampled)

    def _all(self, addends: Sum) -> PendingEncode:
        """Code all values in the kernel that sums them."""

        def launches() -> tuple[DeviceArray, Arena]:
            record, sections = self.kernels.record(), self._arena(self.count)
            if self.count:
                guarded = self.kernels.guarded(addends, record)
                self.kernels.encode_sum_as(self._name, guarded, self._extra, sections.parts, record)
            return record, sections

        record, sections = self._captured("all", True, self.count, launches)
        way = self._fetch(sections.parts, self.count, (EVERY_INDEX, 0), record)
        return way._replace(held=self._hold(sections))

    def _strided(self, reducer: Cycle, addends: Sum, sampled: bool) -> PendingEncode:
        """Do Cycle.reduce, and code its values in the kernel that sums them."""
        kernels, phase, stride = self.kernels, self._phase, reducer.stride
        kept = stride_count(phase, stride, self.count)

        def launches() -> tuple[DeviceArray, Arena]:
            record, sections = kernels.record(), self._arena(kept)
            guarded, extra = kernels.guarded(addends, record), self._extra
            kernels.encode_strided_as(self._name, guarded, phase, stride, kept, extra, sections.parts, record)
            return record, sections

        record, sections = self._captured("strided", sampled, kept, launches)
        way = self._fetch(sections.parts, kept, reducer.indices(self.count, self.memory)[:2], record)
        return way._replace(held=self._hold(sections, turn=(phase, stride)))

    def _random(self, reducer: RandomK, addends: Sum, sampled: bool) -> PendingEncode:
        """Do RandomK.reduce, unscaled, and code its values."""
        kernels, kept, seed = self.kernels, reducer.kept_max(self.count), self._seed

        def launches() -> tuple[DeviceArray, Arena, DeviceArray]:
            record, sections, (places, bits) = kernels.record(), self._arena(kept), pairs(kernels, kept)
            kernels.sum_of(kernels.guarded(addends, record))
            kernels.strata(seed, 0, kept, self.count, None, places)
            kernels.take(addends.sums.view(np.uint32), places, bits)
            kernels.encode_as(self._name, bits.view(np.float32), self._extra, sections.parts, record)
            return record, sections, places

        def taking_out() -> None:
            kernels.scatter_add_as(self._name, sections.parts, places, np.float32(-1.0), addends.sums)

        record, sections, places = self._captured("random", sampled, kept, launches)
        way = self._fetch(sections.parts, kept, (STRATA.wire_id, seed), record)
        self._captured("random, taken out", sampled, kept, taking_out)
        return way._replace(held=self._hold(sections, places))

    def _selected(self, reducer: Any, addends: Sum, sampled: bool) -> PendingEncode:
        """Do the reduce of TopK, BlockTopK, Threshold or CycleTop, and code its values.

        Only the device knows which values are kept, and how long their codes are.
        """
        kernels, sums, phase = self.kernels, addends.sums, self._phase
        below, room, count, stride = 0, reducer.kept_max(self.count), self.count, 1
        turns, counted = isinstance(reducer, CycleTop), isinstance(reducer, Threshold)
        if counted:
            below = int(np.float32(reducer.threshold).view(np.uint32)) - 1
            kernels.sum_of(addends)
            room = kernels.count_above(sums.view(np.uint32), below)  # waits for the device: it may be any number
            sampled = False
        if turns:
            stride, count = reducer.stride, stride_count(phase, reducer.stride, self.count)
            room = min(room, kept_of(reducer.share, count))

        def launches() -> tuple[DeviceArray, DeviceArray, Arena | None, LandPlan | None]:
            record, (places, kept) = kernels.record(), pairs(kernels, room)
            bits = kernels.scratch("strided", count, np.uint32) if turns else sums.view(np.uint32)
            guarded = addends if counted else kernels.guarded(addends, record)
            if turns:
                kernels.sum_strided(guarded, phase, stride, bits.view(np.float32), record)
            if not room:
                return record, places, None, None
            if turns:
                select_top(kernels, bits, room, 0, sampled, places, kept, record)
            elif isinstance(reducer, TopK):
                select_top(kernels, guarded, room, reducer.dropped_bits, sampled, places, kept, record)
            elif isinstance(reducer, BlockTopK):
                kernels.top_of_blocks(guarded, reducer.k, reducer.block, places, kept, record)
            else:
                assert counted
                kernels.compact_above(bits, below, places, kept, record)
            sections = self.code(places, kept, count, turns, record)
            return record, places, sections, self._plan(sections, room, record)

        def taking_out() -> None:
            if turns:
                kernels.stretch(phase, stride, places)
            kernels.scatter_add_as(self._name, coded, places, np.float32(-1.0), sums, record)

        record, places, sections, plan = self._captured("selected", sampled, room, launches, count)
        if plan is None or sections is None:
            return self._fetch((), 0, NOTHING[:2], record)
        coded = sections.parts[:-3]
        indices = (STRIDED_RICE.wire_id, phase * STRIDE_UNIT + stride) if turns else None
        way = self._land(plan, room, indices)
        self._captured("taken out", sampled, room, taking_out, count)
        return way._replace(held=self._hold(sections, places))

    def code(self, places: DeviceArray, kept: DeviceArray, count: int, strided: bool, record: DeviceArray) -> Arena:
        """Code kept values and their indices.

        Args:
            places: rising indices below `count`, uint32; record[MISSING] of them, at the end, are unused.
            kept: the bit patterns of the values, uint32, likewise.
            count: the number of values of the dense array.
            strided: the indices are positions of a turn of CycleTop.
            record: the record of this encode.

        Returns:
            The value sections, and the three parts of the index section.
        """
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
        """Begin to copy sections to the host, if the host knows all sizes."""
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

    def _plan(self, sections: Arena, room: int, record: DeviceArray) -> LandPlan:
        sizes = [(part.items * np.dtype(part.dtype).itemsize, part.per) for part in self._sections]
        spare = SECTIONS_MAX - len(sizes)
        begins = sections.begins[:-3] + (0,) * spare + sections.begins[-3:]
        total = sum(part.byte_count(room) for part in self._sections) + sections.parts[-1].size
        flat = tuple(number for size in [*sizes, *[(0, 1)] * spare] for number in size)
        return LandPlan((sections.whole, begins, flat, room, record), BODY + (total // 4 + 2) * 4)

    def _land(self, plan: LandPlan, room: int, indices: tuple[int, int] | None) -> PendingEncode:
        """Begin to copy sections whose sizes only the device knows: a kernel writes exactly their bytes."""
        lent = self.staging.lend(plan.size)
        landing = self.kernels.land(*plan.arguments, np.frombuffer(lent, np.uint8))
        return PendingEncode(landing, lent, room, indices, landed=True)

    def _hold(
        self, sections: Arena, places: DeviceArray | None = None, turn: tuple[int, int] | None = None
    ) -> DeviceCodes:
        """Begin to copy the coded values, and their indices, out of the scratch memory. `turn` as in `DeviceCodes`."""
        values, copy = len(self._sections), self.kernels.copy
        end = sections.begins[values] if values < len(sections.begins) else sections.whole.size
        if places is None:
            buffer = self.pool.lend(end)
            copy(sections.whole[:end], buffer[:end])
        else:
            buffer = self.pool.lend(end + places.nbytes)
            copy(sections.whole[:end], buffer[:end])
            copy(places.view(np.uint8), buffer[end : end + places.nbytes])
        return DeviceCodes(self.pool, buffer, self._name, sections, end, places is not None, turn)

    def _told(self, way: PendingEncode) -> Told:
        """Wait for the copy to the host.

        Returns:
            The record, a function that finishes the payload, and the coded values that stay on the device.
        """
        self.kernels.counts["waits"] += 1
        way.landing.wait()
        told = np.frombuffer(way.lent, np.int64, TOLD).tolist()
        kept, indices = way.room - told[MISSING], way.indices
        size = sum(part.byte_count(kept) for part in self._sections)
        if way.landed:
            size += told[HEAD_BYTES] + bytes_of(told[LOW_BITS]) + bytes_of(told[UNARY_BITS])
            self.kernels.counts["bytes down"] += RECORD_BYTES + size
            if not kept:
                indices = NOTHING[:2]
        wire_id, parameter = indices or (told[INDEX_CODING], told[PARAMETER])
        if way.held is not None:
            way.held.landed(kept, [part.size(kept) for part in self._sections])
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

        return told, finish, way.held


# How a device does the reduce of each sparsifier.
REDUCES: dict[type, Callable[[DeviceErrorFeedback, Any, Sum, bool], PendingEncode]] = {
    TopK: DeviceErrorFeedback._selected,
    BlockTopK: DeviceErrorFeedback._selected,
    RandomK: DeviceErrorFeedback._random,
    Cycle: DeviceErrorFeedback._strided,
    CycleTop: DeviceErrorFeedback._selected,
    Threshold: DeviceErrorFeedback._selected,
}


def _chain(compressor: Compressor) -> Chain:
    chain = compressor.contraction()
    assert isinstance(chain, Chain)
    if chain.reducer is not None and type(chain.reducer) not in REDUCES:
        raise TypeError(
            f"no device codes {chain.spec}: add {type(chain.reducer).__name__} to REDUCES, device/feedback.py"
        )
    coding = chain.value_coding
    if isinstance(coding, Sectioned) and len(coding.sections) > SECTIONS_MAX:
        raise TypeError(f"no device codes {chain.spec}: a value coding has at most {SECTIONS_MAX} sections there")
    return chain


def accumulate(kernels: Any, payload: Payload, weight: float, out: Any) -> None:
    """Set out[i] = out[i] + float32(weight) * value[i] on the device, as payload.accumulate does.

    Args:
        kernels: from `kernels_for`.
        payload: any C-contiguous buffer of the host. It is checked before anything is written.
        weight: the factor, rounded to float32.
        out: float32[count], contiguous, on the device.

    Raises:
        PayloadError: the payload is not valid for `count` values; `out` has not changed.
        TypeError: `out` has another dtype or shape.
    """
    with kernels.active():
        out = _device_floats(kernels, out, "out")
        _accumulate(kernels, open_payload(payload, out.size), np.float32(weight), out)


def decode(kernels: Any, payload: Payload, out: Any) -> None:
    """Write all values of a payload to `out`, float32[count] on the device. Errors as in `accumulate`."""
    with kernels.active():
        out = _device_floats(kernels, out, "out")
        opened = open_payload(payload, out.size)
        if opened.header.index_coding == EVERY_INDEX:
            name, sections = _sections_of(opened)
            if out.size:
                kernels.decode_as(name, tuple(kernels.upload(sections)), out)
        else:
            kernels.zero(out)
            _accumulate(kernels, opened, np.float32(1.0), out)


def add_raw(kernels: Any, raw: Payload, weight: float, out: Any) -> None:
    """Set out += float32(weight) * values for the bytes of a plain float32[count]. Errors as in `accumulate`."""
    with kernels.active():
        out = _device_floats(kernels, out, "out")
        values = raw_values(raw, out.size)
        if values.size:
            kernels.add_as("fp32", tuple(kernels.upload([values])), np.float32(weight), out)


def _accumulate(kernels: Any, opened: CheckedPayload, weight: np.float32, out: DeviceArray) -> None:
    header = opened.header
    if not header.kept:
        return
    name, sections = _sections_of(opened)
    reader, places, turn = None, None, None
    if header.index_coding == STRIDE.wire_id:
        turn = divmod(header.parameter, STRIDE_UNIT)
    elif header.index_coding != EVERY_INDEX:
        reader = INDEX_READERS[header.index_coding](opened.index_part, header)
    there = kernels.upload([*sections, *(reader.parts if reader is not None else ())])
    if reader is not None:
        places = kernels.scratch("indices", header.kept, np.uint32)
        reader.read(kernels, there[len(sections) :], places)
    add_values(kernels, name, tuple(there[: len(sections)]), header.kept, places, turn, weight, out)


def _decoder_name(decode_kernel: Callable[..., None]) -> str:
    """Return the name of a coding: its kernels have the same name on each device."""
    return decode_kernel.__name__.removeprefix("decode_")


def _sections_of(opened: CheckedPayload) -> tuple[str, list[UploadPart]]:
    """Return the name of a payload's value coding and the value sections. No device knows int12: the host decodes it."""
    values: Any = opened.values
    if opened.header.value_coding == INT12.wire_id:
        decoded: FloatArray = np.empty(opened.header.kept, np.float32)
        values.decode(*values.arrays, decoded)
        return "fp32", [decoded]
    if not hasattr(values, "decode"):
        return "fp32", [values.values]
    return _decoder_name(values.decode), [*values.arrays]
