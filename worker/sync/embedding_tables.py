"""The worker's side of embedding tables: pulls the rows of a batch from the servers, and pushes their gradients.

The main thread owns it; autograd's threads may hand in gradients of rows.

How it works

    Embedding.forward    EmbeddingTables                       shards (row r is on shard r % shards)
    indices         ──>  look_up: RowsRequest to each shard   ──>  answer once the staleness bound allows
    rows            <──  float32[n, dim], rows rising     <──
    backward        ──>  collect(rows, gradient)
    step            ──>  pieces: sums by row, coded       ──>  part of the push; the shard steps these rows

1. The constructor finds the tables of the model and the optimizer of each, and makes their `TableSpec`.
2. `prefetch` may ask for the rows of the next clock before step(). `look_up` uses them if they hold all rows it needs
   and the clock is as expected; else it asks anew.
3. If the worker rejoins while it waits for rows, `look_up` asks again in the new epoch.

Rules
- No worker holds a table. A forward pass looks its rows up in a small tensor, whose gradient is that of these rows.
- A worker asks for rows at the clock that computes on them. The shard answers once its staleness bound allows that
  clock, as with a state.
- The gradients that were collected since the last push leave with the next push, summed by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from narrows.compression import PayloadError, rows
from narrows.compression.codecs import ROWS, Piece
from narrows.protocols import messages as m
from narrows.protocols.config.embedding_spec import ASKS_MAX, ROWWISE, TableSpec, rows_of
from narrows.protocols.config.model_spec import DTYPES
from narrows.protocols.config.timing import WAIT_LIMIT_S
from narrows.protocols.effects import RowsArrived
from narrows.protocols.errors import RemoteProtocolError, UsageError
from narrows.protocols.messages import Buffer
from narrows.protocols.wire import pack
from narrows.worker.model.embedding import Embedding
from narrows.worker.model.flat import FloatArray, dtype_of
from narrows.worker.model.optimizers import as_one, each_of
from narrows.worker.sync.shard_exchanges import ShardExchanges

Numbers = npt.NDArray[np.int64]  # row numbers of a table, int64[n]


@dataclass(frozen=True, slots=True)
class RowsLookup:
    """One request for rows, to one shard."""

    shard: int
    request: int  # number of the request, from 1
    at: Numbers  # positions of its rows among the rows that are looked up, int64[n]


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows that were asked for and have not been used yet."""

    place: tuple[int, int]  # epoch and clock for which they were asked
    numbers: Numbers  # all rows of the requests, rising
    asks: tuple[RowsLookup, ...]


class EmbeddingTables:
    """The embedding tables of one worker's model. Raises UsageError for a table that the server cannot train."""

    def __init__(self, model: torch.nn.Module, inner: torch.optim.Optimizer) -> None:
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, Embedding)]
        self.modules = [module for _, module in named]
        self.weights = {id(module.weight) for module in self.modules}
        of = {id(p): (each, g) for each in each_of(inner) for g in each.param_groups for p in g["params"]}
        self.groups: list[dict[str, Any]] = []  # for each table the parameter group of its weight
        self.rounded: list[str] = []  # names of weights that float32 does not hold exactly
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
        self._shards: ShardExchanges | None = None  # None before and after the run
        self.up = self.down = 0  # codings of rows, keys of rows.CODINGS: of gradients, and of values
        self.touched: list[list[tuple[Numbers, torch.Tensor]]] = [[] for _ in self.specs]  # since the last push
        self.prefetched: dict[int, PendingRows] = {}  # prefetched rows, by table
        self.wanted: dict[tuple[int, int], Buffer | None] = {}  # answers by (shard, request); None: not received yet
        self.requests = 0
        self.rates()  # raises UsageError for hyper-parameters that no row can be stepped with

    def check(self, group: bool, overlap: bool, max_grad_norm: float) -> None:
        """Raise UsageError if this worker uses a feature that embedding tables do not support."""
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

    def begin(self, shards: ShardExchanges) -> None:
        """Start to serve the modules: the run has begun.

        Args:
            shards: the exchanges with all shards.
        """
        self._shards = shards
        self.up, self.down = shards.tuning.codecs.up.row_coding, shards.tuning.codecs.down.row_coding
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
        """Stop to serve the modules: this worker has left the run."""
        self._shards = None

    # Looking up.

    def look_up(self, number: int, numbers: Numbers) -> FloatArray:
        """Pull rows of a table, and wait for them.

        Args:
            number: the table, counted in the order of the model's modules.
            numbers: rows, int64[n], rising and distinct.

        Returns:
            float32[n, dim].

        Raises:
            NarrowsError: the rows have not come within WAIT_LIMIT_S.
        """
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
        """Ask for rows of the next step, int64[n] rising, and return at once.

        If they need more requests than a shard keeps, nothing is asked for, and the step itself pulls the rows.
        """
        before = self.prefetched.pop(number, None)
        if before is not None:
            self._forget(before)
        if 0 < numbers.size <= self.specs[number].ask_rows_max * ASKS_MAX:
            self.prefetched[number] = self._ask(number, numbers, self.shards.clock + 1)

    def _ahead(self, number: int, numbers: Numbers) -> PendingRows | None:
        """Return the prefetched rows of this table if they hold all of `numbers` and are of this clock; else None."""
        coming, shards = self.prefetched.get(number), self.shards
        if coming is None or coming.place[1] > shards.clock:
            return None
        del self.prefetched[number]
        at = np.minimum(np.searchsorted(coming.numbers, numbers), coming.numbers.size - 1)
        if coming.place == (shards.epoch, shards.clock) and (coming.numbers[at] == numbers).all():
            return coming
        self._forget(coming)
        return None

    def _ask(self, number: int, numbers: Numbers, clock: int) -> PendingRows:
        """Send each shard the requests for its rows of these."""
        shards, spec, asks = self.shards, self.specs[number], []
        for shard in range(shards.count):
            ours = np.flatnonzero(numbers % shards.count == shard)
            for begin in range(0, ours.size, spec.ask_rows_max):
                self.requests += 1
                at = ours[begin : begin + spec.ask_rows_max]
                payload = rows.encode(number, *_local(spec, numbers[at], shard, shards.count), coding=self.down)
                asks.append(RowsLookup(shard, self.requests, at))
                self.wanted[shard, self.requests] = None
                shards.link.send(shard, [m.RowsRequest(shards.worker, shards.epoch, self.requests, clock, payload)])
        return PendingRows((shards.epoch, clock), numbers, tuple(asks))

    def arrived(self, event: RowsArrived) -> None:
        if (event.shard, event.request) in self.wanted:
            self.wanted[event.shard, event.request] = event.payload

    def _wait(self, asked: PendingRows, spec: TableSpec) -> None:
        """Wait until all answers are received, or until this worker has rejoined."""
        shards, missing = self.shards, [(ask.shard, ask.request) for ask in asked.asks]

        def done() -> bool:
            while missing and self.wanted[missing[-1]] is not None:
                missing.pop()
            return not missing or shards.epoch != asked.place[0]

        what = f"{asked.numbers.size} rows of table {spec.name!r} at clock {asked.place[1]}"
        shards.wait(done, WAIT_LIMIT_S, what)

    def _take(self, asked: PendingRows, out: FloatArray) -> bool:
        """Decode the received rows into `out`, float32[n, dim]. Returns False if an answer is missing."""
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
        """Keep the gradient, float[n, dim], of the rows of one forward pass until the next push."""
        self.touched[number].append((numbers, gradient))

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """The gradients that were collected since the last push, each with the name of its table."""
        each = zip(self.specs, self.touched, strict=True)
        return [(spec.name, gradient) for spec, touched in each for _, gradient in touched]

    def pending(self) -> list[tuple[int, Numbers]]:
        """For each table its number of rows, and the rows that have a gradient: int64[n], rising."""
        none = np.empty(0, np.int64)
        each = [[numbers for numbers, _ in touched] for touched in self.touched]
        return [(s.rows, np.unique(np.concatenate([none, *found]))) for s, found in zip(self.specs, each, strict=True)]

    def drop(self) -> None:
        """Forget the gradients that were collected since the last push."""
        for touched in self.touched:
            touched.clear()

    def rates(self) -> bytes:
        """Pack the hyper-parameters of each table's optimizer; b"" without tables.

        Raises UsageError for a hyper-parameter that a step of single rows does not allow, such as a weight decay.
        """
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
        """Code the collected gradients for each shard, summed by row, and forget them."""
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
    """Return `inner` without the optimizers that step embedding tables only."""
    each = each_of(inner)
    kept = [o for o in each if any(id(p) not in tables.weights for g in o.param_groups for p in g["params"])]
    return inner if len(kept) in (0, len(each)) else as_one(kept, model)


def _local(spec: TableSpec, numbers: Numbers, shard: int, shards: int) -> tuple[int, npt.NDArray[np.uint32]]:
    """Return how many rows of the table the shard has, and the positions of these rows there, uint32[n]."""
    return rows_of(spec.rows, shard, shards), (numbers // shards).astype(np.uint32)


def _summed(terms: Sequence[tuple[Numbers, torch.Tensor]]) -> tuple[Numbers, FloatArray]:
    """Return the distinct rows of all terms, rising, and the sums of their gradients, float32[n, dim]."""
    found = [gradient.to("cpu", torch.float32).numpy() for _, gradient in terms]
    if len(found) == 1:
        return terms[0][0], found[0]
    numbers = np.unique(np.concatenate([numbers for numbers, _ in terms]))
    total = np.zeros((numbers.size, found[0].shape[1]), np.float32)
    for (at, _), values in zip(terms, found, strict=True):
        total[np.searchsorted(numbers, at)] += values
    return numbers, total
