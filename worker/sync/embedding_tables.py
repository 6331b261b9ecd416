"""The embedding tables of a worker's model, which the servers hold: which rows are asked for, and what is pushed of them. The
main thread owns it; gradients of rows may come from autograd's threads.

Rules
- No worker holds a table. A forward pass looks its rows up in a small tensor, whose gradient is that of these rows.
- Rows are asked for at the clock that is computed with, and the shard answers once its bound allows that: the rule of a state.
- Gradients that were collected since the last push go along with the next one, summed by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from narrows.compression import PayloadError, parse, rows
from narrows.compression.codecs import ROWS, Piece
from narrows.compression.compressor import Chain
from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import ASKS_MAX, ROWWISE, TableSpec, rows_of
from narrows.protocols.config.model_spec import DTYPES
from narrows.protocols.config.settings import Settings
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import RowsArrived
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import Buffer
from narrows.protocols.wire import pack
from narrows.worker.model.embedding import Embedding
from narrows.worker.model.flat import FloatArray, dtype_of
from narrows.worker.model.optimizers import as_one, each_of
from narrows.worker.sync.shards import ShardExchanges, ShardWait

Numbers = npt.NDArray[np.int64]  # of rows of a table


@dataclass(frozen=True, slots=True)
class RowsLookup:
    """Rows of one shard that were asked for, `at` these places of the rows that are looked up."""

    shard: int
    request: int
    at: Numbers


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows that are on their way, for the place in the run and the clock that they are asked for."""

    place: tuple[int, int]  # epoch, clock
    numbers: Numbers  # rising
    asks: tuple[RowsLookup, ...]


class EmbeddingTables:
    """Raises UsageError for a table that cannot be trained by the server."""

    def __init__(self, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, Embedding)]
        self.modules = [module for _, module in named]
        self.weights = {id(module.weight) for module in self.modules}
        of = {id(p): (each, g) for each in each_of(inner) for g in each.param_groups for p in g["params"]}
        self.groups: list[dict[str, Any]] = []  # of each table's optimizer
        self.rounded: list[str] = []  # weights that float32 rows do not hold exactly
        self.specs: list[TableSpec] = []
        for name, module in named:
            if id(module.weight) not in of or not module.weight.requires_grad:
                raise UsageError(f"no optimizer steps embedding table {name!r}: give its parameters to one of them")
            optimizer, group = of[id(module.weight)]
            kind = type(optimizer).__name__
            if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"] or kind not in ROWWISE:
                raise UsageError(
                    f"{kind} cannot step the rows of embedding table {name!r} on the servers: give its parameters to "
                    f"torch.optim.{' or torch.optim.'.join(ROWWISE)}, and list both in DistributedOptimizer"
                )
            spec = DTYPES.get(dtype_of(module.weight))
            if spec is None or spec.keys != 1:
                raise UsageError(
                    f"embedding table {name!r} is {dtype_of(module.weight)}, and the servers hold float32 rows: make it "
                    "float32, bfloat16 or float16"
                )
            self.rounded += [f"{name}.weight"] if spec.rounded else []
            self.groups.append(group)
            shape = (module.num_embeddings, module.embedding_dim)
            self.specs.append(TableSpec(f"{name}.weight", *shape, module.seed, module.std, kind))
        self._wait_until: ShardWait | None = None
        self._shards: ShardExchanges | None = None  # while the run lasts
        self.up = self.down = 0  # what rows are coded with, of rows.CODINGS: gradients, and values
        self.touched: list[list[tuple[Numbers, torch.Tensor]]] = [[] for _ in self.specs]  # since the last push
        self.ahead: dict[int, PendingRows] = {}  # by table
        self.wanted: dict[tuple[int, int], Buffer | None] = {}  # by shard and request; None: not here yet
        self.requests = 0
        self.rates()  # raises

    def check(self, group: bool, overlap: bool, max_grad_norm: float) -> None:
        """Raise UsageError where this worker does what rows cannot follow."""
        reasons = (
            (group, "processes of a --group cut the parameters, and a table has none of them"),
            (overlap, "with overlap=True gradients leave before it is known which rows have one"),
            (max_grad_norm > 0, "max_grad_norm is of dense gradients"),
        )
        for found, why in reasons:
            if found and self.specs:
                raise UsageError(
                    f"{why}, and the model has an embedding table on the servers: leave out one of the two"
                )

    def begin(self, shards: ShardExchanges, wait: ShardWait, settings: Settings) -> None:
        """The run has begun: rows can be asked for. `wait`: handles events until something is done."""
        self._shards, self._wait_until = shards, wait
        self.up, self.down = (coding_of(spec) for spec in (settings.compress, settings.compress_down))
        for number, module in enumerate(self.modules):
            module.held_by(self, number)

    @property
    def shards(self) -> ShardExchanges:
        if self._shards is None:
            raise UsageError(
                "the rows of an embedding table are on the servers, and this worker has no part in the run any more: evaluate "
                "inside `with optimizer.shared():`, before finish(), or load model.safetensors"
            )
        return self._shards

    def end(self) -> None:
        """This worker has no part in the run any more: no row can be asked for."""
        self._shards = None

    # Looking up.

    def look_up(self, number: int, numbers: Numbers) -> FloatArray:
        """Rows of table `number`, float32[n, dim]; `numbers` rise. Raises NarrowsError after WAIT_LIMIT_S."""
        spec, out = self.specs[number], np.empty((numbers.size, self.specs[number].dim), np.float32)
        while True:
            epoch, coming = self.shards.epoch, self._ahead(number, numbers)
            if coming is not None:
                self._wait(coming, spec)
                whole = np.empty((coming.numbers.size, spec.dim), np.float32)
                if self._take(coming, whole):
                    return whole[np.searchsorted(coming.numbers, numbers)]
            most = spec.ask_rows_max * ASKS_MAX
            for begin in range(0, numbers.size, most):
                asked = self._ask(number, numbers[begin : begin + most], self.shards.clock)
                self._wait(asked, spec)
                if not self._take(asked, out[begin : begin + most]):
                    break
            if self.shards.epoch == epoch:
                return out

    def prefetch(self, number: int, numbers: Numbers) -> None:
        """Ask for rows of the next step. More than a shard keeps asks for are left to the step itself."""
        before = self.ahead.pop(number, None)
        if before is not None:
            self._forget(before)
        if 0 < numbers.size <= self.specs[number].ask_rows_max * ASKS_MAX:
            self.ahead[number] = self._ask(number, numbers, self.shards.clock + 1)

    def _ahead(self, number: int, numbers: Numbers) -> PendingRows | None:
        """The rows asked for before, where these are among them and the clock is the same; else None."""
        coming, shards = self.ahead.get(number), self.shards
        if coming is None or coming.place[1] > shards.clock:
            return None
        del self.ahead[number]
        at = np.minimum(np.searchsorted(coming.numbers, numbers), coming.numbers.size - 1)
        if coming.place == (shards.epoch, shards.clock) and (coming.numbers[at] == numbers).all():
            return coming
        self._forget(coming)
        return None

    def _ask(self, number: int, numbers: Numbers, clock: int) -> PendingRows:
        """Ask all shards for these rows."""
        shards, spec, asks = self.shards, self.specs[number], []
        for shard in range(shards.count):
            ours = np.flatnonzero(numbers % shards.count == shard)
            for begin in range(0, ours.size, spec.ask_rows_max):
                self.requests += 1
                at = ours[begin : begin + spec.ask_rows_max]
                payload = rows.encode(number, *_local(spec, numbers[at], shard, shards.count), coding=self.down)
                asks.append(RowsLookup(shard, self.requests, at))
                self.wanted[shard, self.requests] = None
                shards.say(shard, [m.RowsAsk(shards.worker, shards.epoch, self.requests, clock, payload)])
        return PendingRows((shards.epoch, clock), numbers, tuple(asks))

    def arrived(self, event: RowsArrived) -> None:
        if (event.shard, event.request) in self.wanted:
            self.wanted[event.shard, event.request] = event.payload

    def _wait(self, asked: PendingRows, spec: TableSpec) -> None:
        """Until all are here, or the place that they were asked for is no more."""
        shards, missing = self.shards, [(ask.shard, ask.request) for ask in asked.asks]

        def done() -> bool:
            while missing and self.wanted[missing[-1]] is not None:
                missing.pop()
            return not missing or shards.epoch != asked.place[0]

        assert self._wait_until is not None
        what = f"{asked.numbers.size} rows of table {spec.name!r} at clock {asked.place[1]}"
        self._wait_until(done, WAIT_LIMIT_S, what)

    def _take(self, asked: PendingRows, out: FloatArray) -> bool:
        """The rows that have come, into float32[n, dim]; False where they have not all."""
        found = [self.wanted.pop((ask.shard, ask.request)) for ask in asked.asks]
        for ask, payload in zip(asked.asks, found, strict=True):
            if payload is None:
                return False
            body, coding = memoryview(payload)[:-1], memoryview(payload)[-1] if len(payload) else -1
            try:
                out[ask.at] = rows.decode_values(body, ask.at.size, out.shape[1], coding)
            except PayloadError as error:
                raise RemoteProtocolError(f"shard {ask.shard} sent no rows: {error}") from None
        return True

    def _forget(self, asked: PendingRows) -> None:
        for ask in asked.asks:
            self.wanted.pop((ask.shard, ask.request), None)

    # Pushing.

    def collect(self, number: int, numbers: Numbers, gradient: torch.Tensor) -> None:
        """The gradient of these rows, of one forward pass."""
        self.touched[number].append((numbers, gradient))

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Those that were collected since the last push, each with the name of its table."""
        each = zip(self.specs, self.touched, strict=True)
        return [(repr(spec.name), gradient) for spec, touched in each for _, gradient in touched]

    def pending(self) -> list[tuple[int, Numbers]]:
        """For each table, how many rows it has, and which of them have a gradient: int64[n], rising."""
        none = np.empty(0, np.int64)
        each = [[numbers for numbers, _ in touched] for touched in self.touched]
        return [(s.rows, np.unique(np.concatenate([none, *found]))) for s, found in zip(self.specs, each, strict=True)]

    def drop(self) -> None:
        """Forget the gradients."""
        for touched in self.touched:
            touched.clear()

    def rates(self) -> bytes:
        """Hyper-parameters of each table's optimizer, packed; b"" without tables. Raises UsageError for those that no row
        can be stepped with."""
        said = []
        for spec, group in zip(self.specs, self.groups, strict=True):
            rule = ROWWISE[spec.optimizer]
            if name := next((name for name in rule.off if group.get(name)), ""):
                raise UsageError(
                    f"{spec.optimizer} steps the rows of {spec.name!r} one by one, which {name}={group[name]} does not allow: "
                    f"set {name} to 0 in a parameter group of the table's own"
                )
            given = [(name, group[name]) for name in rule.sent]
            said.append({name: [*map(float, v)] if isinstance(v, (list, tuple)) else float(v) for name, v in given})
        return pack(said) if said else b""

    def pieces(self) -> list[list[Piece]]:
        """For each shard, what it is to step; from then on, nothing is."""
        made: list[list[Piece]] = [[] for _ in range(self.shards.count)] if self.specs else []
        for number, (spec, touched) in enumerate(zip(self.specs, self.touched, strict=True)):
            terms, touched[:] = [*touched], []
            if not terms:
                continue
            numbers, values = _summed(terms)
            for shard, pieces in enumerate(made):
                ours, end = np.flatnonzero(numbers % len(made) == shard), self.shards.exchanges[shard].replica.end
                for begin in range(0, ours.size, spec.ask_rows_max):
                    at = ours[begin : begin + spec.ask_rows_max]
                    payload = rows.encode(number, *_local(spec, numbers[at], shard, len(made)), values[at], self.up)
                    pieces.append(Piece(ROWS, end, end, payload))
        return made


def dense_of(inner: torch.optim.Optimizer, model: torch.nn.Module, tables: EmbeddingTables) -> torch.optim.Optimizer:
    """Without the optimizers that step tables alone."""
    each = each_of(inner)
    kept = [o for o in each if any(id(p) not in tables.weights for g in o.param_groups for p in g["params"])]
    return inner if len(kept) in (0, len(each)) else as_one(kept, model)


def coding_of(spec: str) -> int:
    """How rows are coded in a run of this SPEC: by its value coding, rounded to the nearest, where it keeps every value."""
    chain = None if spec.startswith("auto") else parse(spec)
    dense = isinstance(chain, Chain) and chain.reducer is None
    return chain.value_coding.wire_id if dense and chain.value_coding.wire_id in rows.CODINGS else 0  # type: ignore[union-attr]


def _local(spec: TableSpec, numbers: Numbers, shard: int, shards: int) -> tuple[int, npt.NDArray[np.uint32]]:
    """How many rows the shard has, and where it has these."""
    return rows_of(spec.rows, shard, shards), (numbers // shards).astype(np.uint32)


def _summed(terms: Sequence[tuple[Numbers, torch.Tensor]]) -> tuple[Numbers, FloatArray]:
    """Rows that differ and rise, and float32[n, dim]: the sum of their gradients."""
    found = [gradient.to("cpu", torch.float32).numpy() for _, gradient in terms]
    if len(found) == 1:
        return terms[0][0], found[0]
    numbers = np.unique(np.concatenate([numbers for numbers, _ in terms]))
    total = np.zeros((numbers.size, found[0].shape[1]), np.float32)
    for (at, _), values in zip(terms, found, strict=True):
        total[np.searchsorted(numbers, at)] += values
    return numbers, total
