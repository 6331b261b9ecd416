"""A teacher: its model answers the requests of students until the process is told to end.

How it works
1. `serve` listens. Requests wait in the machine (protocols/distillation/teacher.py).
2. The calling thread takes requests that fit together, up to BATCH_SAMPLES samples. Samples whose answers are cached need
   no model. All others go through it in calls of at most BATCH_SAMPLES, without gradients.
3. Of each position the K most likely classes are coded (compression/logits) and sent.

Rules
- A request that the model cannot compute ends with a sentence for its student; the teacher goes on.
- The cache is keyed by a digest that the teacher computes itself, or by the index of its own dataset: no student can put an
  answer under the inputs of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from narrows.compression.logits import LogitCoding, parse_logits, warm_up
from narrows.protocols.distillation.limits import ANSWER_BYTES_MAX, POSITIONS_MAX
from narrows.protocols.distillation.teacher import QueuedRequest
from narrows.protocols.errors import IncompatibleError, NarrowsError, RemoteProtocolError, UsageError
from narrows.protocols.runtime.cli.output import CommandConsole
from narrows.protocols.runtime.network.sockets import Drops
from narrows.protocols.runtime.processes import signals
from narrows.protocols.wire import pack
from narrows.worker.distillation.answer_cache import AnswerCache, CachedAnswer
from narrows.worker.distillation.batches import ALONE, Inputs, Samples, opened, samples_of, tensors
from narrows.worker.distillation.teacher_place import TeacherPlace
from narrows.worker.distillation.teacher_record import TeacherRecord
from narrows.worker.distillation.teacher_runner import TeacherRunner
from narrows.worker.model.flat import Array

BATCH_SAMPLES = 64  # in one call of the model
CACHE_MIB = 256
TURN_S = 0.2  # between two looks at `until`
REPORT_S = 60.0  # between two lines with the counts
LEAST = -1e4  # a log-probability of a class that cannot be, whose logit is -inf
SENTENCE_MAX = 300  # characters of a model's error that a student gets
say = CommandConsole("ps-teach").say


class AnsweringModel:
    """Computes and codes the answers of requests.

    Args:
        model: a module, or a function of a batch that returns logits [samples, *positions, classes].
        dataset: its samples, by index; None: requests bring their inputs.
        inputs: makes the model's inputs of a collated batch of `dataset`.
        cache_bytes: of answers that are kept.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        dataset: Sequence[Any] | None = None,
        inputs: Callable[[Any], Inputs] = lambda batch: batch,
        cache_bytes: int = CACHE_MIB << 20,
    ) -> None:
        self.model, self.dataset, self.inputs = model, dataset, inputs
        self.cache = AnswerCache(cache_bytes)
        self.samples = self.positions = 0  # samples that the model has computed; predictions in all answers
        self.device, self.table_rows = torch.device("cpu"), 0
        if isinstance(model, torch.nn.Module):
            model.eval()
            self.device = next((each.device for each in model.parameters()), self.device)
            tables = [each for each in model.modules() if isinstance(each, torch.nn.Embedding)]
            self.table_rows = max((each.num_embeddings for each in tables), default=0)

    def answers(self, requests: Sequence[QueuedRequest]) -> list[tuple[int, tuple[int, ...], bytes]]:
        """Return the classes, the positions and the payload of the answer to each request.

        Args:
            requests: of equal fields, coding and temperature.

        Raises:
            NarrowsError: the requests or the model's output are not as they must be, in one sentence.
        """
        first = requests[0]
        coding = parse_logits(first.coding)
        keys = list[Any]()
        rows = list[tuple[Samples | None, int]]()
        for request in requests:
            keys += self._keys(request, coding, rows)
        found = [self.cache.get(key) for key in keys]
        missing = [place for place, answer in enumerate(found) if answer is None]
        size = 0
        for begin in range(0, len(missing), BATCH_SAMPLES):
            part = missing[begin : begin + BATCH_SAMPLES]
            for place, answer in zip(part, self._computed([rows[place] for place in part], coding, first), strict=True):
                found[place] = answer
                size += len(answer.records)
                self.cache.put(keys[place], answer)
            if size > ANSWER_BYTES_MAX:  # `_payloads` looks at each request
                raise IncompatibleError(
                    f"answers of {size} bytes are too long: ask for fewer samples, or a smaller top:K"
                )
        answered = [answer for answer in found if answer is not None]
        return [*self._payloads(requests, answered, coding)]

    def _keys(self, request: QueuedRequest, coding: LogitCoding, rows: list[tuple[Samples | None, int]]) -> list[Any]:
        """Return the key of each sample of a request, and add where its inputs are to `rows`."""
        message, of = request.message, (coding.spec, request.temperature)
        if message.fields != BY_INDEX:
            samples = opened(message.fields, message.payload, message.samples)
            rows += [(samples, row) for row in range(len(samples))]
            return [(*of, digest) for digest in samples.digests()]
        if self.dataset is None:
            raise IncompatibleError(
                "the teacher has no dataset: give the inputs of the samples, not their indices alone"
            )
        if len(message.payload) != 8 * message.samples:
            raise RemoteProtocolError("a request by index has 8 bytes for each sample")
        indices = np.frombuffer(message.payload, np.int64)
        size = len(self.dataset)
        if indices.min() < 0 or indices.max() >= size:
            raise IncompatibleError(f"the teacher's dataset has {size} samples, and none with index {indices.max()}")
        rows += [(None, int(index)) for index in indices]
        return [(*of, int(index)) for index in indices]

    def _computed(
        self, rows: Sequence[tuple[Samples | None, int]], coding: LogitCoding, request: QueuedRequest
    ) -> list[CachedAnswer]:
        """Have the model answer samples."""
        try:
            samples = self._joined(rows)
        except NarrowsError:
            raise
        except Exception as error:
            raise IncompatibleError(f"the teacher cannot read these samples of its dataset: {_said(error)}") from error
        if self.table_rows:
            for (name, *_), array in zip(samples.fields, samples.arrays, strict=True):
                if array.dtype.kind in "iu" and array.size and not 0 <= array.min() <= array.max() < self.table_rows:
                    raise IncompatibleError(
                        f"the input {name!r} has values from {array.min()} to {array.max()}, and the largest table of the "
                        f"teacher's model has {self.table_rows} rows: both models need the same tokenizer"
                    )
        named = tensors(samples, np.arange(len(samples)), self.device)
        try:
            with torch.inference_mode():
                output = self.model(named[ALONE]) if [*named] == [ALONE] else self.model(**named)
                logits = getattr(output, "logits", output)
                if not isinstance(logits, torch.Tensor) or logits.dim() < 2 or len(logits) != len(samples):
                    raise UsageError("the teacher's model returns no logits [samples, ..., classes]")
                top, ids = _top(logits, request.temperature, coding.top)
        except NarrowsError:
            raise
        except Exception as error:  # of whatever type: a request ends no teacher
            raise IncompatibleError(f"the teacher's model cannot compute these samples: {_said(error)}") from error
        positions, classes = tuple(logits.shape[1:-1]), logits.shape[-1]
        if len(positions) > POSITIONS_MAX:
            raise UsageError(
                f"the teacher's model returns {len(positions)} dimensions for a sample, more than {POSITIONS_MAX}"
            )
        try:
            records = coding.encode(top.reshape(-1, top.shape[-1]), ids.reshape(-1, ids.shape[-1]), classes)
        except ValueError as error:
            raise IncompatibleError(f"the teacher's logits cannot be coded: {error}") from error
        each = len(records) // len(samples)
        self.samples += len(samples)
        return [
            CachedAnswer(classes, positions, records[row * each : (row + 1) * each].tobytes())
            for row in range(len(samples))
        ]

    def _joined(self, rows: Sequence[tuple[Samples | None, int]]) -> Samples:
        """Return the inputs of rows of several requests, or of the dataset, as those of one batch."""
        first = rows[0][0]
        if first is None:
            assert self.dataset is not None
            return samples_of(self.inputs(default_collate([self.dataset[index] for _, index in rows])))
        arrays = []
        for field in range(len(first.arrays)):
            arrays.append(np.stack([samples.arrays[field][row] for samples, row in rows if samples is not None]))
        return Samples(first.fields, tuple(arrays))

    def _payloads(
        self, requests: Sequence[QueuedRequest], answers: Sequence[CachedAnswer], coding: LogitCoding
    ) -> Iterator[tuple[int, tuple[int, ...], bytes]]:
        at = 0
        for request in requests:
            own = answers[at : at + request.message.samples]
            at += request.message.samples
            classes, positions = own[0].classes, own[0].positions
            if any((each.classes, each.positions) != (classes, positions) for each in own):
                raise IncompatibleError(
                    "the teacher's model returns another shape for each sample: ask for them one by one"
                )
            size = sum(len(each.records) for each in own)
            if size > ANSWER_BYTES_MAX // 2:
                raise IncompatibleError(
                    f"an answer of {size} bytes is too long: ask for fewer samples, or a smaller top:K"
                )
            records = np.frombuffer(b"".join(each.records for each in own), np.uint8)
            records = records.reshape(-1, coding.record_bytes(classes))
            self.positions += len(records)
            yield classes, positions, coding.pack(records, classes)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:SENTENCE_MAX]}"


BY_INDEX = pack([])  # the fields of a request that names samples of the teacher's dataset


def _top(logits: torch.Tensor, temperature: float, most: int) -> tuple[Array, Array]:
    """Return the largest log-probabilities of each position, and their classes.

    Args:
        logits: float[samples, *positions, classes].
        temperature: by which the logits are divided.
        most: K; a model of fewer classes has all of them.

    Returns:
        float32 and int64[samples, *positions, min(K, classes)].
    """
    scaled = logits.float() / temperature
    top, ids = scaled.topk(min(most, scaled.shape[-1]), dim=-1)
    log_probs = (top - scaled.logsumexp(-1, keepdim=True)).clamp(LEAST, 0)
    return log_probs.cpu().numpy(), ids.cpu().numpy()


class TeacherService:
    """Takes requests from a runner, and gives it the answers.

    Args:
        runner: listens.
        answering: computes.
        say: gets sentences for the user.
        note: gets an event and its fields for the record.
    """

    def __init__(
        self,
        runner: TeacherRunner,
        answering: AnsweringModel,
        say: Callable[[str], None],
        note: Callable[..., None] = lambda event, **values: None,
    ) -> None:
        self.runner, self.answering, self.say, self.note = runner, answering, say, note
        self.failures = Drops(say)  # says each sentence once, and not too many
        self.report_s = time.monotonic() + REPORT_S
        self.told = 0

    @property
    def text(self) -> str:
        answering, runner = self.answering, self.runner
        each = runner.bytes_up / max(1, answering.positions)
        return (
            f"{answering.samples:,} samples computed, {answering.cache.hits:,} answered from the cache; "
            f"{runner.bytes_up / 1e6:,.2f} MB sent ({each:.1f} bytes a prediction), "
            f"{runner.bytes_down / 1e6:,.2f} MB received; students: {runner.students}"
        )

    def turn(self) -> None:
        """Answer the requests that wait, or wait for some for TURN_S."""
        if requests := self.runner.next_requests(BATCH_SAMPLES, TURN_S):
            self._answer(requests)
        if time.monotonic() >= self.report_s:
            self.report_s = time.monotonic() + REPORT_S
            if self.answering.samples + self.answering.cache.hits > self.told:
                self.told = self.answering.samples + self.answering.cache.hits
                self.say(self.text)
                self.note("counts", **self.counts)

    @property
    def counts(self) -> dict[str, int]:
        """The counters since the teacher began, and the students that it has."""
        answering, runner = self.answering, self.runner
        return {
            "samples": answering.samples,
            "cached": answering.cache.hits,
            "predictions": answering.positions,
            "bytes_up": runner.bytes_up,
            "bytes_down": runner.bytes_down,
            "refused": runner.refused,
            "students": runner.students,
        }

    def end(self) -> None:
        """Tell the last counts."""
        self.say(self.text)
        self.note("done", **self.counts)

    def _answer(self, requests: list[QueuedRequest]) -> None:
        try:
            answers = self.answering.answers(requests)
        except NarrowsError as error:
            if len(requests) > 1:  # one of them may be at fault
                for each in requests:
                    self._answer([each])
                return
            self.runner.failed(requests[0], str(error))
            self.failures.refuse(f"a request has no answer: {error}")
            return
        for request, answer in zip(requests, answers, strict=True):
            self.runner.answered(request, *answer)


def serve(
    model: Callable[..., Any],
    dataset: Sequence[Any] | None = None,
    inputs: Callable[[Any], Inputs] = lambda batch: batch,
    cache_mib: float = CACHE_MIB,
) -> None:
    """Answer students until SIGINT or SIGTERM. Only the main thread may call this.

    The address, the keys and the other flags are those of ps-teach, or of its variables under plain python.

    Args:
        model: a module, which is put into eval mode, or a function. It gets the inputs that a student asks for (a tensor, or
            tensors as keywords) and returns logits [samples, ..., classes], or an object that has them as `logits`.
        dataset: its samples, by index: students may then ask by index alone, and send no inputs.
        inputs: makes the model's inputs of a batch that torch's default_collate has made of samples of `dataset`.
        cache_mib: MiB of coded answers that are kept, by sample.

    Raises:
        UsageError: a flag is wrong, the address is taken, or the folder has no keys.
    """
    place = TeacherPlace.of_environment()
    heard = list[int]()
    signals.hear(heard)
    warm_up(say)  # else the first answer compiles kernels, and students hear nothing meanwhile
    answering = AnsweringModel(model, dataset, inputs, int(cache_mib * (1 << 20)))
    record = TeacherRecord(place.record, say)
    try:
        runner = TeacherRunner(
            place.bind, len(dataset) if dataset is not None else 0, parse_logits, say, place.keys, note=record.note
        )
        service = TeacherService(runner, answering, say, record.note)
        try:
            place.announce(runner.port, say)
            while not heard:
                service.turn()
        finally:
            runner.close()
            service.end()
    finally:
        record.close()
