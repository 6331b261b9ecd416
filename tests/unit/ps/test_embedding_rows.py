"""Rows of tables on a shard and in its checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from narrows.compression import PayloadError, codecs, rows
from narrows.compression.errors import NonFinitePayloadError
from narrows.protocols.config.embedding_spec import TableSpec
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.errors import IncompatibleError
from narrows.protocols.wire import pack
from narrows.ps.checkpoints import checkpoint_files, whole_model
from narrows.ps.store.changes import FloatArray
from narrows.ps.store.embedding_rows import EmbeddingRows

SPEC = TableSpec("t", 1000, 3, 5, 0.5, "SGD")
PLAN = ModelSpec((TensorSpec("w", (4,), "float32"),), "", ((0,),), tables=(SPEC,))
RATES = pack([{"lr": 1.0}])


def pushed(tables: EmbeddingRows, at: list[int], value: float) -> tuple[float, codecs.Piece]:
    values = np.full((len(at), SPEC.dim), value, np.float32)
    payload = rows.encode(0, tables.tables[0].count, np.array(at, np.uint32), values)
    return 1.0, codecs.Piece(codecs.ROWS, 4, 4, payload)


def first(numbers: list[int]) -> FloatArray:
    return rows.first_values(np.array(numbers, np.uint64), SPEC.dim, SPEC.seed, SPEC.std)


def test_first_values_are_normal_and_follow_from_the_row_alone() -> None:
    many = first([*range(20_000)])
    assert abs(many.mean()) < 0.01 and abs(many.std() - SPEC.std) < 0.01
    assert abs(np.corrcoef(many[:-1].ravel(), many[1:].ravel())[0, 1]) < 0.02
    assert np.array_equal(first([7, 19_999]), many[[7, 19_999]])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_none(value: float) -> None:
    piece = pushed(EmbeddingRows([SPEC]), [3], value)[1]
    codecs.check(piece)
    with pytest.raises(NonFinitePayloadError):
        codecs.check(piece, finite=True)
    with pytest.raises(PayloadError, match="no keys"):
        codecs.check(piece._replace(begin=0))


def test_a_row_in_two_updates_is_summed_and_stepped_once() -> None:
    tables = EmbeddingRows([SPEC], 1, 2)
    tables.fold([pushed(tables, [3, 8], 0.25), pushed(tables, [8], 0.5)], RATES)
    tables.fold([pushed(tables, [3], 9.0)], b"")  # nobody has said how
    table = tables.tables[0]
    assert np.allclose(table.read(np.array([2, 3, 8])), first([5, 7, 17]) - [[0.0], [0.25], [0.75]])
    assert (table.touched, table.steps, tables.nbytes) == (2, 1, 2 * 12)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_checkpoint_gives_back_the_rows_whatever_the_number_of_shards(shards: int, tmp_path: Path) -> None:
    """Each of the two shards that wrote it has folded two updates."""
    plan = replace(PLAN, tables=(replace(SPEC, optimizer="Adagrad"),))
    rates, x = (
        pack([{"lr": 1.0, "eps": 0.5, "initial_accumulator_value": 0.0}]),
        np.zeros(2, np.float32),
    )
    before = []
    for shard in range(2):
        before.append(written := EmbeddingRows(plan.tables, shard, 2))
        for value in (0.5, 0.25):
            written.fold([pushed(written, [0, 4, 499], value)], rates)
        facts = {"publication": 1, "shards": 2, "plan": plan.packed(), "buffers": b"", "epoch": 1}
        checkpoint_files.write(tmp_path, shard, 9, {"x": x, "p": x, **written.arrays()}, facts)
    asked = np.arange(SPEC.rows)
    found, wanted = np.zeros((2, SPEC.rows, SPEC.dim), np.float32)
    for shard, each in enumerate(before):
        wanted[shard::2] = each.tables[0].read(asked[: each.tables[0].count])
    for shard in range(shards):
        load, *_ = checkpoint_files.read_for(
            tmp_path, shard, shards, "values", 9, checkpoint_files.facts_of(tmp_path, 9)
        )
        loaded = EmbeddingRows(plan.tables, shard, shards)
        loaded.load(load.arrays)
        assert loaded.tables[0].steps == 2
        found[shard::shards] = loaded.tables[0].read(asked[: loaded.tables[0].count])
    assert np.array_equal(found, wanted) and np.any(found[999] != first([999])[0])


@pytest.mark.parametrize("name", ["rows", "values", "steps"])
def test_a_checkpoint_whose_rows_are_of_another_kind_is_none(name: str, tmp_path: Path) -> None:
    tables, x = EmbeddingRows([SPEC], 0, 1), np.zeros(4, np.float32)
    tables.fold([pushed(tables, [7], 0.5)], RATES)
    arrays = {"x": x, "p": x, **tables.arrays()}
    arrays[f"table.0.{name}"] = arrays[f"table.0.{name}"].astype(np.float64)
    checkpoint_files.write(tmp_path, 0, 9, arrays, {"publication": 1, "plan": PLAN.packed()})
    with pytest.raises(IncompatibleError, match=rf"damaged .*table\.0\.{name} is float64"):
        checkpoint_files.read(tmp_path, 0, 9)


def test_the_file_of_the_model_has_all_rows_and_shows_damage(tmp_path: Path) -> None:
    """It is written a block at a time, out of the rows that each shard holds."""
    wanted = first([*range(SPEC.rows)])
    for shard in range(2):
        tables = EmbeddingRows([SPEC], shard, 2)
        tables.fold([pushed(tables, [0, 4, 499], 0.5)], RATES)
        wanted[[shard, 8 + shard, 998 + shard]] -= 0.5
        x = np.zeros(2, np.float32)
        facts = {"publication": 1, "shards": 2, "plan": PLAN.packed(), "buffers": b"", "epoch": 1}
        checkpoint_files.write(tmp_path, shard, 9, {"x": x, "p": x, **tables.arrays()}, facts)
    assert np.array_equal(load_file(whole_model.merge(tmp_path, 9, {}))["t"], wanted)
    damaged = checkpoint_files.path_of(tmp_path, 1, 9)
    raw = bytearray(damaged.read_bytes())
    at = raw.index(wanted[999].tobytes())
    raw[at] ^= 1
    damaged.write_bytes(raw)
    with pytest.raises(IncompatibleError, match="table 't' differs from what was written"):
        whole_model.merge(tmp_path, 9, {})
    assert not [*tmp_path.glob("*.tmp")]
