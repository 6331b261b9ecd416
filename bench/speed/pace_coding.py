"""The seconds that coding takes, by SPEC, for pace.py: on this CPU, measured alone, and on a GPU, by codec_costs.py.

On this CPU: the CPU seconds of one thread on real arrays, medians of ROUNDS. A worker codes all keys, a server the keys of
one shard. On a GPU: a worker's seconds are those of the table `Codes` in h200.md, interpolated between its sizes; the server
still codes on its CPU. A SPEC that was not measured on a GPU takes the figures of a SPEC that codes in the same way and keeps
at least as many values.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from narrows.compression import ladder, parse, warm_up
from narrows.compression.buffers import FloatArray
from narrows.compression.codecs import Piece, coded_piece
from narrows.compression.home import HOST
from narrows.protocols.config.key_ranges import parts
from narrows.ps.planner.codec_costs import GPU_MS, GPU_VALUES, gpu_row
from narrows.ps.store.changes import Fold, OuterStep, Publish, SetFirstWeights
from narrows.ps.store.store import Store
from narrows.worker.model.arrays import WorkerArrays
from narrows.worker.model.flat import FlatModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lab.replay import MADE, Coding, Payloads, Still, model_of, updates_of

ROUNDS = 5
GPU_HOST_S = 1.8e-3 / 8  # messages of 8 shards, 100 M parameters, before 2026-11-27's change


def cpu_s(call: Callable[[], object]) -> float:
    before = time.thread_time()
    call()
    return time.thread_time() - before


def on_this_cpu(spec: str, size: str, shards: int, outer: tuple[float, float] | None) -> Coding:
    """Measure a SPEC. `outer`: rate and momentum of a server that takes outer steps; None: the server adds updates."""
    warm_up()
    model = model_of(size)
    updates, payloads = np.load(updates_of(size), mmap_mode="r"), Payloads(spec, updates_of(size))
    count = updates.shape[1]
    taken: dict[str, list[float]] = {name: [] for name in ("encode", "fold", "compose", "add", "publish")}
    worker(model, spec, updates, taken)
    server(spec, count // shards, payloads, outer, taken)
    values = {name: count if name in ("encode", "fold", "compose") else count // shards for name in taken}
    return Coding(**{name: statistics.median(seconds) / values[name] for name, seconds in taken.items()})


def worker(model: torch.nn.Module, spec: str, updates: FloatArray, taken: dict[str, list[float]]) -> None:
    flat = FlatModel(model, Still(model.parameters()), [])
    arrays = WorkerArrays(flat, shared=False, direct=False, rounds=2)
    compressor, keys = parse(spec), flat.keys
    replica = arrays.replica(*keys, [(keys, HOST.feedback(compressor, flat.size, 0))])
    for clock in range(ROUNDS + 1):
        with torch.no_grad():
            moved = torch.from_numpy(arrays.start + updates[clock % MADE])
            torch.nn.utils.vector_to_parameters(moved, model.parameters())
        made: list[Piece] = []

        def encode(clock: int = clock, made: list[Piece] = made) -> None:
            made += replica.encode(arrays.moved(keys, clock, not compressor.lossless), clock)

        def fold(made: list[Piece] = made) -> None:
            replica.absorb(made, not compressor.lossless)

        def compose(made: list[Piece] = made) -> None:
            replica.base([(1.0, piece) for piece in made], *keys, arrays.base)
            flat.write(arrays.base)

        for call in (encode, fold, compose):
            seconds = cpu_s(call)
            if clock:  # the first encode has no residual
                taken[call.__name__].append(seconds)


def server(
    spec: str, size: int, payloads: Payloads, outer: tuple[float, float] | None, taken: dict[str, list[float]]
) -> None:
    store = Store(0, size, barrier=outer is not None, codings=ladder(spec), outer=outer, lent=lambda: False)
    store.apply(SetFirstWeights(HOST.raw_pieces(np.zeros(size, np.float32), 0, parts(0, size))))
    for turn in range(ROUNDS + 1):
        if payloads.raw:
            pieces = HOST.raw_pieces(payloads.values(0, size, turn), 0, parts(0, size))
        else:
            pieces = [coded_piece(payloads.of(0, size, turn), 0, size)]
        terms = ((0.5, pieces), (0.5, pieces))
        change = OuterStep(terms, (0, size)) if outer else Fold(terms, ((0, 0.5), (1, 0.5)))
        add, publish = cpu_s(lambda change=change: store.apply(change)), cpu_s(lambda: store.apply(Publish()))  # type: ignore[misc]
        if turn:
            taken["add"].append(add / len(terms))
            taken["publish"].append(publish)


def on_a_gpu(spec: str, count: int, server: Coding) -> Coding:
    """Return the seconds a value of a worker that codes `count` values on a GPU, with those of `server` for the server."""
    row = GPU_MS[gpu_row(spec)]
    encode, fold, whole = (
        float(np.interp(count, GPU_VALUES, row[part])) / 1e3 / count for part in ("encode", "fold", "whole step")
    )
    return Coding(encode, fold, whole - encode - fold, server.add, server.publish, GPU_HOST_S)
