"""A student's side for scripts: ask ahead, take later.

How it works
1. `Teachers.ask` looks each sample up in the cache. It sends the others to the teachers, in requests of a bounded size, and
   returns at once.
2. `Asked.take` waits for the answers, keeps them in the cache, and makes the tensors of the batch.
3. `ahead` asks for batches a few steps before the script uses them: the link and the teacher work during these steps.

Rules
- A sample without an index is known by a digest of its inputs: random crops and augmented samples are right as they are.
- With several processes each asks for its own batches, in every sync mode: teachers are no members of the run.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.profiler import record_function

from narrows.compression.logits import LogitCoding, parse_logits, warm_up
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.distillation.limits import (
    REQUEST_BYTES_MAX,
    SAMPLES_MAX,
    TEMPERATURE_LEAST,
    TEMPERATURE_MOST,
)
from narrows.protocols.errors import IncompatibleError, NarrowsError, ServerLostError, UsageError
from narrows.protocols.messages import TeacherAnswer
from narrows.protocols.runtime.network.key_files import SecretKeyFile, member_key
from narrows.protocols.wire import pack
from narrows.worker.distillation.answer_cache import AnswerCache, CachedAnswer
from narrows.worker.distillation.batches import Inputs, Samples, samples_of
from narrows.worker.distillation.soft_targets import SoftTargets
from narrows.worker.distillation.student_runner import StudentRunner
from narrows.worker.model.flat import Array
from narrows.worker.runtime.child_process import only_here
from narrows.worker.runtime.config import WorkerConfig
from narrows.worker.runtime.launcher_pipe import say
from narrows.worker.runtime.teacher_meter import METER, TeacherMeter

CACHE_MIB = 256
DEPTH = 4  # batches that `ahead` asks for before their use
LABELS = ("labels", "label", "label_ids")  # of a batch by name: no inputs of a model
GO_ON = "go-on"  # a value of --teacher-lost

Batch = TypeVar("Batch")


class Asked:
    """A batch whose soft targets were asked for.

    Args:
        teachers: were asked; None: the script has no teacher.
        keys: of its samples.
        numbers: of the requests, each with the keys of the samples in it.
        cached: answers that were in the cache.
    """

    def __init__(
        self,
        teachers: Teachers | None,
        keys: Sequence[Hashable] = (),
        numbers: Mapping[int, Sequence[Hashable]] | None = None,
        cached: Mapping[Hashable, CachedAnswer] | None = None,
    ) -> None:
        self._teachers, self._keys, self._numbers = teachers, keys, dict(numbers or {})
        self._answers = dict(cached or {})
        self._taken = teachers is None
        self._targets: SoftTargets | None = None
        self._error: NarrowsError | None = None  # why they are not there
        if teachers is not None and self._numbers:
            self._end = weakref.finalize(self, teachers.runner.forget, tuple(self._numbers))
            self._end.atexit = False

    @property
    def ready(self) -> bool:
        """True if `take` would not wait."""
        return self._taken or self._teachers is None or self._teachers.runner.ready([*self._numbers])

    def take(self, limit_s: float = WAIT_LIMIT_S) -> SoftTargets | None:
        """Return the soft targets of the batch. A second call returns, or raises, the same.

        Args:
            limit_s: of the wait. It may be short: the batch can be taken again later.

        Returns:
            None if the script has no teacher, if all are lost and --teacher-lost is go-on, or if the answers are not there
            within a `limit_s` that is shorter than WAIT_LIMIT_S.

        Raises:
            ServerLostError: no answer came within WAIT_LIMIT_S.
            IncompatibleError: the teacher cannot answer; the sentence says why.
            NarrowsError: another error that ended the connections.
        """
        if self._error is not None:
            raise self._error
        if self._taken:
            return self._targets
        assert self._teachers is not None
        if not self._teachers.waited([*self._numbers], limit_s):
            if limit_s < WAIT_LIMIT_S:
                return None
            raise ServerLostError(f"no teacher answered within {limit_s:.0f} s")
        self._taken = True
        if self._numbers:
            self._end.detach()
        came = [(self._teachers.runner.take(number), keys) for number, keys in self._numbers.items()]
        try:
            for answer, keys in came:
                if answer is not None:
                    self._answers |= self._teachers.opened(answer, keys)
            if all(answer is not None for answer, _ in came):
                self._targets = self._teachers.targets([self._answers[key] for key in self._keys])
            else:
                self._teachers.meter.missed()
        except NarrowsError as error:
            self._error = error
            raise
        finally:
            self._answers.clear()
        return self._targets


class Teachers:
    """The teachers of this process, and the answers that it has from them.

    Args:
        keys: the key file for each teacher, by address; None: that teacher has no keys.
        coding: SPEC of the answers, such as top:32+int8.
        temperature: by which the teachers divide their logits.
        waits: while no teacher is there, batches wait for one; False: they have no soft targets.
        cache_mib: MiB of answers that are kept, by sample.
        start_s: seconds for a first teacher to answer.
        tell: gets sentences for the user.
        meter: counts what is asked, and what comes; None: a meter of its own.

    Raises:
        UsageError: the coding or the temperature is wrong.
    """

    def __init__(
        self,
        keys: Mapping[str, SecretKeyFile | None],
        coding: str,
        temperature: float = 1.0,
        waits: bool = True,
        cache_mib: float = CACHE_MIB,
        start_s: float = 30.0,
        tell: Callable[[str], None] = say,
        meter: TeacherMeter | None = None,
    ) -> None:
        self.coding, self.temperature = coding_of(coding), float(temperature)
        if not TEMPERATURE_LEAST <= self.temperature <= TEMPERATURE_MOST:
            raise UsageError(
                f"temperature={temperature:g}: give a number from {TEMPERATURE_LEAST:g} to {TEMPERATURE_MOST:g}"
            )
        self.cache = AnswerCache(int(cache_mib * (1 << 20)))
        self.classes = 0  # of the teachers' model; 0: no answer has come
        self.meter = meter or TeacherMeter()
        self.runner = StudentRunner(
            keys, self.coding.spec, self.temperature, self._check, waits, start_s, tell, self.meter
        )

    def _check(self, answer: TeacherAnswer, samples: int) -> None:
        """Raise ValueError if the payload of an answer is not valid. The thread of the sockets calls this."""
        _records(self.coding, answer, samples)

    def ask(self, inputs: Inputs | None = None, ids: Sequence[int] | torch.Tensor | None = None) -> Asked:
        """Ask for the soft targets of a batch, and return at once.

        Args:
            inputs: of the teacher's model: a tensor, or tensors by name. None: the teacher looks the samples up in its
                dataset.
            ids: the index of each sample. The inputs of an index must never change; None: inputs are known by a digest.

        Raises:
            UsageError: there are neither inputs nor ids, or their numbers differ.
            NarrowsError: an error that ended the connections.
        """
        numbers = None if ids is None else np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids, np.int64)
        if inputs is None and numbers is None:
            raise UsageError("ask() needs inputs, or the ids of samples in the teacher's dataset")
        samples = None if inputs is None else samples_of(inputs)
        count = len(samples) if samples is not None else len(numbers) if numbers is not None else 0
        if not count:
            raise UsageError("ask() got no ids: give one for each sample")
        if numbers is not None and numbers.shape != (count,):
            raise UsageError(f"ask() got ids of shape {numbers.shape} for {count} samples: give one for each")
        keys: list[Hashable] = [*samples.digests()] if numbers is None and samples is not None else [*_plain(numbers)]
        cached, missing = dict[Hashable, CachedAnswer](), dict[Hashable, int]()
        for row, key in enumerate(keys):
            if key not in cached and key not in missing:
                if (found := self.cache.get(key)) is not None:
                    cached[key] = found
                else:
                    missing[key] = row
        self.meter.asked(count, sum(key in cached for key in keys))
        asked = dict[int, Sequence[Hashable]]()
        each = 8 if samples is None else samples.sample_bytes
        if each > REQUEST_BYTES_MAX:
            raise UsageError(
                f"a sample of {each} bytes is more than a teacher takes ({REQUEST_BYTES_MAX}): give ids alone"
            )
        step = max(1, min(SAMPLES_MAX, REQUEST_BYTES_MAX // max(1, each)))
        rest = [*missing]
        for begin in range(0, len(rest), step):
            part = rest[begin : begin + step]
            rows = np.array([missing[key] for key in part])
            asked[self._send(samples, numbers, rows)] = part
        return Asked(self, keys, asked, cached)

    def _send(self, samples: Samples | None, numbers: Array | None, rows: Array) -> int:
        if samples is not None:
            return self.runner.ask(len(rows), samples.packed_fields, samples.payload(rows))
        assert numbers is not None
        return self.runner.ask(len(rows), pack([]), numbers[rows].tobytes())

    def waited(self, numbers: Sequence[int], limit_s: float) -> bool:
        """Wait for requests as `StudentRunner.wait` does, and count the time. A profiler records a wait as a range."""
        if self.runner.ready(numbers):
            return self.runner.wait(numbers, limit_s)
        began_s = time.monotonic()
        try:
            with record_function("narrows: teacher"):
                return self.runner.wait(numbers, limit_s)
        finally:
            self.meter.waited(time.monotonic() - began_s)

    def opened(self, answer: TeacherAnswer, keys: Sequence[Hashable]) -> dict[Hashable, CachedAnswer]:
        """Return the answer of each sample of a request, and keep it.

        Raises:
            IncompatibleError: the teacher says why it has none, or its model has other classes than before.
        """
        if answer.text:
            raise IncompatibleError(f"a teacher has no answer: {answer.text}")
        self.classes = self.classes or answer.classes
        if answer.classes != self.classes:
            raise IncompatibleError(
                f"one teacher has {self.classes} classes and another {answer.classes}: give all of them the same model"
            )
        records = _records(self.coding, answer, len(keys), check=False)  # it was checked as it came
        self.meter.answered(len(records))
        each = len(records) // len(keys)
        found = dict[Hashable, CachedAnswer]()
        for row, key in enumerate(keys):
            own = records[row * each : (row + 1) * each].tobytes()
            found[key] = CachedAnswer(answer.classes, answer.positions, own)
            self.cache.put(key, found[key])
        return found

    def targets(self, answers: Sequence[CachedAnswer]) -> SoftTargets:
        """Return the tensors of a batch. Raises IncompatibleError if the samples have different shapes."""
        positions, classes = answers[0].positions, answers[0].classes
        if any(each.positions != positions for each in answers):
            raise IncompatibleError("the teacher's answers to samples of this batch have different shapes")
        width = self.coding.record_bytes(classes)
        records = np.frombuffer(b"".join(each.records for each in answers), np.uint8).reshape(-1, width)
        log_probs, ids = self.coding.decode(records, classes)
        shape = (len(answers), *positions, ids.shape[-1])
        return SoftTargets(
            torch.from_numpy(ids).reshape(shape), torch.from_numpy(log_probs).reshape(shape), classes, self.temperature
        )

    def close(self) -> None:
        """End the connections."""
        self.runner.close()


def _records(coding: LogitCoding, answer: TeacherAnswer, samples: int, check: bool = True) -> Array:
    """Return the records of an answer, uint8[predictions, bytes]; with `check` they are valid. Raises PayloadError."""
    predictions = samples
    for size in answer.positions:
        predictions *= size
        if size < 1 or predictions > len(answer.payload):
            raise ValueError(f"{len(answer.payload)} bytes cannot answer {samples} samples of shape {answer.positions}")
    records: Array = coding.open(answer.payload, answer.classes, predictions, check)
    return records


def _plain(numbers: Array | None) -> list[int]:
    return [] if numbers is None else [int(number) for number in numbers]


def coding_of(spec: str) -> LogitCoding:
    """Return the coding of a SPEC. Raises UsageError."""
    try:
        return parse_logits(spec)
    except ValueError as error:
        raise UsageError(f"--teacher-coding {spec}: {error}") from None


# The teachers of this process, by its flags.

_teachers: Teachers | None = None
_told_alone = False


def connect(temperature: float | None = None, cache_mib: float = CACHE_MIB) -> Teachers | None:
    """Connect to the teachers of --teacher; None if there is no such flag. The first ask() does so with these defaults.

    Args:
        temperature: by which the teachers divide their logits; None: 1, or that of an earlier call.
        cache_mib: MiB of answers that are kept, by sample.

    Raises:
        UsageError: a flag or an argument is wrong, or this process is connected already with another temperature.
    """
    global _teachers, _told_alone
    if _teachers is not None:
        if temperature not in (None, _teachers.temperature):
            raise UsageError(
                f"connect(temperature={temperature:g}): this process asks at {_teachers.temperature:g} already"
            )
        return _teachers
    config = WorkerConfig.from_environment()
    if not config.teachers:
        if not _told_alone:
            _told_alone = True
            say("the script asks a teacher, and no --teacher ADDRESS names one: it trains without soft targets")
        return None
    warm_up(say)  # else the first answer compiles kernels, and the teacher hears nothing meanwhile
    keys = dict(zip(config.teachers, _key_files(config), strict=True))
    waits, start_s = config.teacher_lost != GO_ON, config.connect_timeout
    _teachers = Teachers(keys, config.teacher_coding, temperature or 1.0, waits, cache_mib, start_s, meter=METER)
    atexit.register(only_here(_teachers.close))
    return _teachers


def _key_files(config: WorkerConfig) -> list[SecretKeyFile | None]:
    """Return the key of each teacher: one file for each, one for all, or none."""
    files = config.teacher_keys
    if len(files) not in (0, 1, len(config.teachers)):
        raise UsageError(
            f"--teacher-key names {len(files)} files for {len(config.teachers)} teachers: give one for each, or one"
        )
    named = files * (len(config.teachers) if len(files) == 1 else 1) or ("",) * len(config.teachers)
    return [member_key(file, "--teacher-key") if file else None for file in named]


def ask(inputs: Inputs | None = None, ids: Sequence[int] | torch.Tensor | None = None) -> Asked:
    """Ask the teachers of --teacher for the soft targets of a batch, and return at once: see `Teachers.ask`.

    Without --teacher the batch has no soft targets: `take` returns None.
    """
    teachers = _teachers or connect()
    return Asked(None) if teachers is None else teachers.ask(inputs, ids)


def model_inputs(batch: Any) -> Inputs:
    """Return the part of a batch that a model gets: the tensor, the first of a tuple, or what is no label in a dict.

    Raises:
        UsageError: the batch is none of these.
    """
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and name not in LABELS}
    if isinstance(batch, (tuple, list)) and batch:
        return model_inputs(batch[0])
    raise UsageError(
        f"a batch of type {type(batch).__name__}: tell ahead() by inputs= what of it the teacher's model gets"
    )


def asked_ahead(
    batches: Iterable[Batch],
    inputs: Callable[[Batch], Inputs | None] = model_inputs,
    ids: Callable[[Batch], Sequence[int] | torch.Tensor | None] = lambda batch: None,
    depth: int = DEPTH,
) -> Iterator[tuple[Batch, Asked]]:
    """Yield each batch with what was asked for it `depth` batches before. The arguments are those of `ahead`."""
    waiting = deque[tuple[Batch, Asked]]()
    for batch in batches:
        waiting.append((batch, ask(inputs(batch), ids(batch))))
        if len(waiting) > depth:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


class Ahead(Generic[Batch]):
    """Batches with their soft targets, as `ahead` makes them: it can be read again, and has the length of its loader."""

    def __init__(
        self,
        batches: Iterable[Batch],
        inputs: Callable[[Batch], Inputs | None],
        ids: Callable[[Batch], Sequence[int] | torch.Tensor | None],
        depth: int,
    ) -> None:
        self.batches, self.inputs, self.ids, self.depth = batches, inputs, ids, depth

    def __len__(self) -> int:
        """Return the number of batches. Raises TypeError if the loader has no length."""
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[Batch, SoftTargets | None]]:
        for batch, asked in asked_ahead(self.batches, self.inputs, self.ids, self.depth):
            yield batch, asked.take()


def ahead(
    batches: Iterable[Batch],
    inputs: Callable[[Batch], Inputs | None] = model_inputs,
    ids: Callable[[Batch], Sequence[int] | torch.Tensor | None] = lambda batch: None,
    depth: int = DEPTH,
) -> Ahead[Batch]:
    """Return an iterable of batches with their soft targets, which are asked for `depth` batches before.

    Args:
        batches: such as a DataLoader.
        inputs: of a batch, as in `Teachers.ask`.
        ids: of a batch, as in `Teachers.ask`.
        depth: batches that are asked for and not yielded yet.

    Returns:
        Each batch, and its soft targets; None as from `Asked.take`. Reading it raises what `Asked.take` raises.

    Raises:
        UsageError: `depth` is below 1.
    """
    if depth < 1:
        raise UsageError(f"depth={depth}: ask for 1 batch ahead, at least")
    return Ahead(batches, inputs, ids, depth)
