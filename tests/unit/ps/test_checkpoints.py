"""Checkpoints: whole or absent, bit for bit, and a run that goes on from one is the run that was never interrupted.

The servers' own runner writes and reads them; only its sockets are replaced, by the function calls of in_process.py.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit import in_process, streaming_reference
from kit.on_disk import OnDisk
from kit.scripts import Array, Run, build, flat, loss_of, run, seeded
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from narrows.protocols.config.key_ranges import split
from narrows.protocols.config.model_spec import ModelSpec, TensorSpec
from narrows.protocols.config.settings import Settings
from narrows.protocols.errors import IncompatibleError, UsageError
from narrows.ps.checkpoints import array_files, checkpoint_files, checkpoint_writer
from narrows.ps.checkpoints import whole_model as model_file
from narrows.ps.checkpoints.array_files import write_file
from narrows.ps.checkpoints.checkpoint_files import KEPT, clocks, newest, path_of, read, write
from narrows.ps.checkpoints.checkpoint_writer import CheckpointWriter
from narrows.ps.checkpoints.whole_model import buffers, merge
from narrows.ps.command.serve import begin_anew, ended
from narrows.worker import DistributedOptimizer, clock

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 14
PLAN = ModelSpec(
    (
        TensorSpec("a", (2, 3), "float32"),
        TensorSpec("half", (5,), "bfloat16"),
        TensorSpec("scalar", (), "float16"),
        TensorSpec("none", (0, 4), "float32"),
    ),
    "",
    ((0, 1, 2, 3),),
    0.0,
    (("tied", 0),),
)
FACTS: dict[str, Any] = {"publication": 3, "shards": 1, "plan": PLAN.packed(), "buffers": b""}


def values(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def store_of(count: int = 12, seed: int = 1) -> dict[str, Array]:
    step = np.array(7.0, np.float32)
    return {"x": values(count, seed), "p": values(count, seed + 1), "optimizer.0.0.step": step, "e": values(0)}


# Files.


def test_why_a_run_begins_anew(tmp_path: Path) -> None:
    """The folder was mistyped, or is the one above: what else is in it says nothing."""
    for name in (".lock", "optimizer-0.pt", "model.safetensors"):
        (tmp_path / name).touch()
    anew = f"{tmp_path} has no checkpoint, so the run begins anew"
    (tmp_path / "empty").mkdir()
    assert checkpoint_files.why_anew(str(tmp_path)) == anew
    for index, name in enumerate(("older", "newer")):
        write(tmp_path / name, 1, 5, store_of(), FACTS)
        os.utime(tmp_path / name, (index, index))
    newer = tmp_path / "newer"
    assert checkpoint_files.why_anew(str(tmp_path)) == f"{anew}; {newer} has one: name that folder to go on from there"
    assert checkpoint_files.why_anew(str(newer)) == ""


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    arrays = store_of()
    arrays["x"][:3] = [np.nan, -np.inf, -0.0]
    facts = FACTS | {"buffers": bytes(range(256))}
    assert write(tmp_path / "new" / "folder", 0, 5, arrays, facts) == (5,)
    back, back_facts = read(tmp_path / "new" / "folder", 0, 5)
    assert back_facts == facts | {"clock": 5}
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape, name
        assert back[name].tobytes() == array.tobytes(), name
    assert set(read(tmp_path / "new" / "folder", 0, 5, only=("x",))[0]) == {"x"}


def test_an_array_that_is_not_contiguous_and_a_large_fact_are_written_as_they_are(tmp_path: Path) -> None:
    arrays = store_of() | {"x": values(24)[::2]}
    huge = bytes(3_000_000)  # as hex in a header, 100 MB of buffers would be refused by every reader
    write(tmp_path, 0, 1, arrays, FACTS | {"buffers": huge})
    back, facts = read(tmp_path, 0, 1)
    assert np.array_equal(back["x"], arrays["x"]) and facts["buffers"] == huge
    with open(path_of(tmp_path, 0, 1), "rb") as file:
        assert int.from_bytes(file.read(8), "little") < 10_000


def test_a_bounded_number_of_files_is_kept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "shard-0.clock-3.safetensors.99999.tmp").write_bytes(b"of a process that was killed")
    (tmp_path / "notes.txt").write_text("not ours")
    for number in range(9):
        for shard in range(2):
            write(tmp_path, shard, number, store_of(seed=number), FACTS | {"shards": 2})
            assert clocks(tmp_path, shard) == tuple(range(max(0, number + 1 - KEPT), number + 1))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", *(f"shard-{s}.clock-{c}.safetensors" for s in range(2) for c in range(9 - KEPT, 9))]
    assert clocks(tmp_path / "absent", 0) == () and newest(tmp_path, 2) == 8


def test_a_run_that_begins_anew_does_not_drop_its_own_for_those_of_an_older_one(tmp_path: Path) -> None:
    for number in (480, 500):
        write(tmp_path, 0, number, store_of(), FACTS)
    assert write(tmp_path, 0, 10, store_of(seed=9), FACTS) == (10,)
    assert newest(tmp_path, 1) == 10


@pytest.mark.parametrize("block", [1, 5, 1 << 20])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_the_model_is_whole_whatever_the_number_of_shards_and_the_size_of_a_block(
    shards: int, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_file, "BLOCK", block)
    whole = values(PLAN.size)
    for shard, (begin, end) in enumerate(split(PLAN.size, shards)):
        part = {"x": whole[begin:end], "p": whole[begin:end]}
        write(tmp_path, shard, 3, part, FACTS | {"shards": shards})
    found = load_file(merge(tmp_path, 3, {}))
    want = torch.from_numpy(whole)
    assert torch.equal(found["a"], want[:6].view(2, 3)) and torch.equal(found["tied"], found["a"])
    assert torch.equal(found["half"], want[6:11].bfloat16()) and torch.equal(found["scalar"], want[11].half())
    assert found["none"].shape == (0, 4)


def test_the_model_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    plan = ModelSpec(
        tuple(TensorSpec(str(i), (1 << 20,), "float32") for i in range(8)), "", (tuple(range(8)),), 0.0, ()
    )
    whole = np.zeros(plan.size, np.float32)
    for shard, (begin, end) in enumerate(split(plan.size, 3)):
        part = {"x": whole[begin:end], "p": whole[begin:end]}
        write(tmp_path, shard, 3, part, FACTS | {"shards": 3, "plan": plan.packed()})
    assert peak_of(lambda: merge(tmp_path, 3, {})) < 4 * 4 * model_file.BLOCK <= whole.nbytes / 2


def peak_of(call: Callable[[], object]) -> int:
    """Return the most bytes that Python and NumPy have had at a time during a call, beyond those before it."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_checkpoint_is_checked_by_blocks_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_files, "BLOCK_BYTES", 1 << 16)
    plan = ModelSpec((TensorSpec("a", (1 << 20,), "float32"),), "", ((0,),), 0.0, ())
    whole, facts = values(plan.size), FACTS | {"shards": 2, "plan": plan.packed()}
    for shard, (begin, end) in enumerate(split(plan.size, 2)):
        write(tmp_path, shard, 3, {"x": whole[begin:end], "p": whole[begin:end]}, facts)
    half, few = whole.nbytes // 2, 1 << 18
    for shards in (2, 3):
        assert peak_of(partial(checkpoint_files.sound, tmp_path, 0, shards)) < few
    assert peak_of(lambda: checkpoint_files.whole(tmp_path)) < few
    for shards, own in ((2, 0), (4, half)):
        load = partial(
            checkpoint_files.read_for, tmp_path, 1, shards, "values", 3, checkpoint_files.facts_of(tmp_path, 3)
        )
        assert peak_of(load) < own + few, "parts of x and p, and a block; whole ones are mapped"
        begin, end = split(plan.size, shards)[1]
        assert np.array_equal(load()[0].arrays["p"], whole[begin:end])


def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = FACTS | {"shards": 2}
    for shard in range(2):
        write(tmp_path, shard, 5, store_of(seed=shard), facts)
    write(tmp_path, 0, 10, store_of(seed=3), facts)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, killed)
            with pytest.raises(KeyboardInterrupt):
                write(tmp_path, 1, 10, store_of(seed=4), facts)
        left = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".tmp"}
        assert left == before and newest(tmp_path, 2) == 5
    assert np.array_equal(read(tmp_path, 1, 5)[0]["x"], store_of(seed=1)["x"])
    write(tmp_path, 1, 10, store_of(seed=4), facts)
    assert newest(tmp_path, 2) == 10 and not list(tmp_path.glob("*.tmp"))


def cut(data: bytes) -> Iterator[tuple[str, bytes]]:
    header = 8 + int.from_bytes(data[:8], "little")
    yield "empty", b""
    yield "a few bytes", data[:5]
    yield "half a header", data[: header // 2]
    yield "header only", data[:header]
    yield "one byte short", data[:-1]
    yield "longer", data + b"\0"
    yield "a header of 2^60 bytes", (1 << 60).to_bytes(8, "little") + data[8:]
    yield "no json", data[:8] + b"?" * (header - 8) + data[header:]
    yield "no utf-8", data[:8] + b"\xff" * (header - 8) + data[header:]
    yield "not ours", data.replace(b'"narrows"', b'"norrows"')
    yield "another clock", data.replace(b'\\"clock\\": 5', b'\\"clock\\": 6')
    yield "no publication", data.replace(b"publication", b"publicotion")
    yield "text", b"hello, world\n" * 100
    for at in range(header, len(data), 13):
        yield f"bit flipped at {at}", data[:at] + bytes((data[at] ^ 4,)) + data[at + 1 :]


@pytest.mark.parametrize(("name", "array", "why"), [
    ("x", np.ones(12), "x is float64 with 1 dimensions"),
    ("x", np.ones((3, 4), np.float32), "x is float32 with 2 dimensions"),
    ("optimizer.0.0.step", np.ones(1, np.int64), "optimizer.0.0.step is int64 with 1 dimensions"),
])  # fmt: skip
def test_arrays_of_another_kind_are_no_checkpoint(name: str, array: Any, why: str, tmp_path: Path) -> None:
    write(tmp_path, 0, 5, store_of() | {name: array}, FACTS)
    with pytest.raises(IncompatibleError, match=rf"shard-0\.clock-5\.safetensors is damaged .*{why}"):
        read(tmp_path, 0, 5)


@pytest.mark.parametrize("shards", [1, 2])
def test_arrays_of_another_size_than_the_model_are_no_checkpoint(shards: int, tmp_path: Path) -> None:
    write(tmp_path, 0, 5, store_of() | {"p": values(11)}, FACTS)
    with pytest.raises(IncompatibleError, match="has 11 values of p, and by its plan its shard has 12"):
        checkpoint_files.read_for(tmp_path, 0, shards, "values", 5, checkpoint_files.facts_of(tmp_path, 5))


def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path: Path) -> None:
    write(tmp_path, 0, 5, store_of(), FACTS)
    path = path_of(tmp_path, 0, 5)
    data = path.read_bytes()
    seen = 0
    for what, damaged in cut(data):
        assert damaged != data, what
        path.write_bytes(damaged)
        with pytest.raises(IncompatibleError) as caught:
            read(tmp_path, 0, 5)
        text = str(caught.value)
        assert str(path) in text and "\n" not in text and len(text) < 600, (what, text)
        seen += 1
    assert seen > 20
    path.unlink()
    with pytest.raises(IncompatibleError, match="is missing"):
        read(tmp_path, 0, 5)


# The whole model.


def test_the_merged_model_has_every_name_in_the_dtype_of_the_workers(tmp_path: Path) -> None:
    whole = np.concatenate([values(PLAN.size - 5), [3.3895314e38, np.nan, -0.0, 1e-40, 1.00390625]]).astype(np.float32)
    cuts = [0, 5, 12]
    for shard in range(2):
        part = whole[cuts[shard] : cuts[shard + 1]]
        write(tmp_path, shard, 3, {"x": part, "p": part}, FACTS | {"shards": 2})
    buffer = ("int64", (), (17).to_bytes(8, "little"))
    tensors = load_file(merge(tmp_path, 3, {"count": buffer}))
    full = torch.from_numpy(whole)
    expected = {
        "a": full[:6].reshape(2, 3),
        "tied": full[:6].reshape(2, 3),
        "half": full[6:11].bfloat16(),
        "scalar": full[11].half(),
        "none": torch.empty(0, 4),
        "count": torch.tensor(17),
    }
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        got = tensors[name]
        assert got.dtype == tensor.dtype and got.shape == tensor.shape, name
        assert torch.equal(got.nan_to_num(7.0), tensor.nan_to_num(7.0)), name
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert json.loads(file.metadata()["narrows"]) == {"clock": 3}


def test_a_model_of_the_user_is_kept_and_one_of_a_run_is_replaced(tmp_path: Path) -> None:
    """The folder of a model that was downloaded, or a script that saves its best model there."""
    save_file({"theirs": torch.ones(3)}, tmp_path / "model.safetensors")
    for at in (3, 4):
        write(tmp_path, 0, at, store_of(), FACTS)
        assert "a" in load_file(merge(tmp_path, at, {}))
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors", "model.safetensors.1"}
    assert [*load_file(tmp_path / "model.safetensors.1")] == ["theirs"]


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    bits = np.concatenate(
        [
            np.random.default_rng(3).integers(0, 1 << 32, 200_000, dtype=np.uint32),
            np.array([0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00008000, 0x00018000, 0x3F808000, 0x7F800001], np.uint32),
        ]
    )
    whole = bits.view(np.float32)
    ours = torch.from_numpy(model_file._bfloat16(whole).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(whole).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~theirs.isnan()
    assert torch.equal(ours[numbers].view(torch.int16), theirs[numbers].view(torch.int16))


def test_a_merge_wants_every_shard_of_the_clock(tmp_path: Path) -> None:
    write(tmp_path, 0, 3, store_of(), FACTS | {"shards": 2})
    with pytest.raises(IncompatibleError, match=r"shard-1\.clock-3\.safetensors is missing"):
        merge(tmp_path, 3, {})
    write(tmp_path, 1, 3, store_of(), FACTS | {"shards": 2})
    with pytest.raises(IncompatibleError, match="have 24 keys, not 12"):
        merge(tmp_path, 3, {})


# Runs. The runner of each server process carries out what concerns the disk.

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=3e-3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def train(
    started: Run, make: Make, until: int, finish: bool, checkpoint_at: Sequence[int] = (), seed: int = 7
) -> Array:
    """Every worker trains up to clock `until`; the run's clock says where it begins."""
    settings = started.cluster.settings
    turn = threading.Barrier(settings.workers)

    def script(worker: int) -> Array:
        net = build(seed)
        optimizer = DistributedOptimizer(make(net.parameters()), net)
        while clock() < until:
            step = clock()
            if step in checkpoint_at:
                if turn.wait(60.0) == 0:
                    cast(OnDisk, started.cluster).checkpoint_soon()
                turn.wait(60.0)
            for inner in range(settings.local_steps):
                optimizer.zero_grad()
                loss_of(net, settings.local_steps * step + inner, worker, settings.workers).backward()
                optimizer.step()
        if finish:
            optimizer.finish()
        with optimizer.shared():
            return flat(net)

    results = started.together(script)
    if finish or settings.mode().barrier:  # without either each sees the model as it was when it asked
        assert all(np.array_equal(results[0], other) for other in results)
    return cast(Array, results[0])


def straight(settings: Settings, make: Make) -> Array:
    with run(settings) as started:
        return train(started, make, STEPS, finish=True)


BSP = Settings(sync="bsp", workers=2, shards=2)
LOCAL = Settings(sync="local", local_steps=3, workers=2, shards=2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    cluster = OnDisk(BSP, tmp_path)
    with run(BSP, cluster) as started:
        train(started, make, 6, finish=False)
        cluster.interrupt()
    assert newest(tmp_path, 2) == 6
    with run(BSP, OnDisk(BSP, tmp_path, resume=True)) as started:
        resumed = train(started, make, STEPS, finish=True, seed=99)  # the weights come from the checkpoint
    assert np.array_equal(resumed, straight(BSP, make)), "bit for bit: optimizer state included"


def test_the_outer_momentum_goes_on_too(tmp_path: Path) -> None:
    make: Make = lambda p: torch.optim.SGD(p, lr=0.05)  # noqa: E731
    cluster = OnDisk(LOCAL, tmp_path)
    with run(LOCAL, cluster) as started:
        train(started, make, 6, finish=False)
        cluster.interrupt()
    with run(LOCAL, OnDisk(LOCAL, tmp_path, resume=True)) as started:
        resumed = train(started, make, STEPS, finish=True, seed=99)
    assert np.array_equal(resumed, straight(LOCAL, make))


def test_the_gain_of_a_mean_of_updates_goes_on_too(tmp_path: Path) -> None:
    """The first state that a worker has is of the gain that was measured before, and so is the first weight."""
    settings, make = Settings(sync="ssp", workers=2, shards=2), OPTIMIZERS["AdamW"]
    cluster = OnDisk(settings, tmp_path)
    with run(settings, cluster) as started:
        train(started, make, 20, finish=False)
        before = [in_process.store_of(server).gain.factor for server in cluster.servers]
        cluster.interrupt()
    assert all(gain > 1.02 for gain in before)
    again = OnDisk(settings, tmp_path, resume=True)
    with run(settings, again) as started:

        def script(worker: int) -> Array:
            net = build(99)
            engine = DistributedOptimizer(make(net.parameters()), net)._engine
            assert engine is not None
            return np.array([exchange.gain for exchange in cast(Any, engine.sync).shards.exchanges])

        for gains in started.together(script):
            np.testing.assert_allclose(gains, before, rtol=1e-6)
        np.testing.assert_allclose([in_process.store_of(each).gain.factor for each in again.servers], before, rtol=1e-6)


@pytest.mark.parametrize("spec", ["dense", "topk:0.2"])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_run_in_fragments_goes_on_with_the_fragment_whose_turn_it_is(delay: int, spec: str, tmp_path: Path) -> None:
    """Inner steps that were not pushed end with their workers; momentum, and what the downlink left out, do not."""
    settings = replace(streaming_reference.DENSE, fragments=4, merge_delay=delay, shards=2, compress=spec)
    reference = streaming_reference.Reference(settings)
    with run(settings, OnDisk(settings, tmp_path)) as started:
        streaming_reference.compare(started, reference, range(1, 13 + delay), exact=False, finish=False)
        cast(OnDisk, started.cluster).interrupt()
    assert newest(tmp_path, 2) == 6
    reference.resume()
    with run(settings, OnDisk(settings, tmp_path, resume=True)) as started:
        streaming_reference.compare(started, reference, range(13, 28), exact=False)


def test_a_crash_goes_back_to_the_newest_checkpoint_that_all_shards_have(tmp_path: Path) -> None:
    """Trace: clock 4 on both shards; clock 9 on shard 0; the machine dies while shard 1 writes it; resume at 4; the file
    of clock 9 on shard 0 is of a life that is over, and never again half of a checkpoint."""
    settings = Settings(sync="bsp", workers=2, shards=2, checkpoint_every=1.0)
    make = OPTIMIZERS["AdamW"]
    cluster = OnDisk(settings, tmp_path)
    with run(settings, cluster) as started:
        train(started, make, 11, finish=False, checkpoint_at=(3, 8))
    assert [clocks(tmp_path, shard) for shard in range(2)] == [(4, 9), (4, 9)]
    data = path_of(tmp_path, 1, 9).read_bytes()
    path_of(tmp_path, 1, 9).unlink()
    (tmp_path / "shard-1.clock-9.safetensors.12345.tmp").write_bytes(data[: len(data) // 2])
    assert newest(tmp_path, 2) == 4
    with run(settings, OnDisk(settings, tmp_path, resume=True)) as started:
        train(started, make, 5, finish=False)  # and dies again
    assert [clocks(tmp_path, shard) for shard in range(2)] == [(4,), (4,)]
    with run(settings, OnDisk(settings, tmp_path, resume=True)) as started:
        resumed = train(started, make, STEPS, finish=True, checkpoint_at=(6,), seed=99)
    assert np.array_equal(resumed, straight(settings, make))
    assert [clocks(tmp_path, shard) for shard in range(2)] == [(4, 7, STEPS), (4, 7, STEPS)]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_run_goes_on_over_another_number_of_shards(shards: int, tmp_path: Path) -> None:
    """Trace: 2 shards to clock 6; resumed over `shards`, which is stopped before its first checkpoint of its own; again."""
    make, other = OPTIMIZERS["AdamW"], replace(BSP, shards=shards)
    with run(BSP, OnDisk(BSP, tmp_path)) as started:
        train(started, make, 6, finish=False)
        cast(OnDisk, started.cluster).interrupt()
    OnDisk(other, tmp_path, resume=True).interrupt()
    assert newest(tmp_path, shards) == newest(tmp_path, 2) == 6
    with run(other, OnDisk(other, tmp_path, resume=True)) as started:
        resumed = train(started, make, STEPS, finish=True, seed=99)
    assert np.array_equal(resumed, straight(BSP, make))
    assert load_file(merge(tmp_path, STEPS, {}))["0.weight"].shape == (17, 9)


def test_a_disk_that_refuses_for_long_costs_no_checkpoint_that_all_shards_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trace: clock 3 on both shards; the disk of shard 1 refuses 6 and 9; shard 0, which keeps two, must keep 3 too."""
    settings = Settings(sync="bsp", shards=2, checkpoint_every=1.0)
    cluster = OnDisk(settings, tmp_path)
    whole = array_files.publish

    def refuses(temporary: Path, path: Path, size: int, *copy: Any) -> None:
        if path.name in ("shard-1.clock-6.safetensors", "shard-1.clock-9.safetensors"):
            raise OSError(28, "No space left on device")
        whole(temporary, path, size, *copy)

    monkeypatch.setattr(checkpoint_files, "publish", refuses)
    with run(settings, cluster) as started:
        train(started, OPTIMIZERS["SGD"], 11, finish=False, checkpoint_at=(2, 5, 8))
    assert [clocks(tmp_path, shard) for shard in range(2)] == [(3, 6, 9), (3,)]
    assert newest(tmp_path, 2) == 3


def resume_once(folder: Path) -> None:
    with run(BSP, OnDisk(BSP, folder, resume=True)) as started:
        train(started, OPTIMIZERS["SGD"], STEPS, finish=True)


def test_a_damaged_checkpoint_stops_a_resume_in_one_sentence(tmp_path: Path) -> None:
    cluster = OnDisk(BSP, tmp_path)
    with run(BSP, cluster) as started:
        train(started, OPTIMIZERS["SGD"], 3, finish=True)
    for shard in range(2):
        broken = tmp_path / f"broken-{shard}"
        shutil.copytree(tmp_path, broken, ignore=shutil.ignore_patterns("broken-*"))
        path = path_of(broken, shard, 3)
        path.write_bytes(path.read_bytes()[:-7])
        with pytest.raises(IncompatibleError, match=rf"shard-{shard}\.clock-3\.safetensors is damaged"):
            resume_once(broken)


def test_another_model_or_optimizer_than_the_checkpoints_is_refused(tmp_path: Path) -> None:
    settings = Settings(sync="bsp")
    cluster = OnDisk(settings, tmp_path)
    with run(settings, cluster) as started:
        train(started, OPTIMIZERS["SGD"], 2, finish=True)
    other: tuple[tuple[nn.Module, Make, str], ...] = (
        (nn.Linear(3, 3), OPTIMIZERS["SGD"], "the model differs"),
        (build(), OPTIMIZERS["AdamW"], "optimizer: this worker has AdamW, the run has SGD"),
    )
    for net, make, words in other:
        with run(settings, OnDisk(settings, tmp_path, resume=True)), pytest.raises(RuntimeError, match=words):
            DistributedOptimizer(make(net.parameters()), net)


class Whole(nn.Module):
    """Tied weights, half precision, a scalar, buffers saved and not saved, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(9, 9)
        self.tied = nn.Linear(9, 9)
        self.tied.weight = self.body.weight
        self.norm = nn.BatchNorm1d(9)
        self.head = nn.Linear(9, 5).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.full((2,), 0.3, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.tied(torch.tanh(self.body(x)))) * self.scale
        out: torch.Tensor = self.head(hidden.to(torch.bfloat16)).float()
        return out


@pytest.mark.parametrize("sync", ["bsp", "ssp"])
def test_a_plain_model_loads_what_a_run_leaves(sync: str, tmp_path: Path) -> None:
    settings = Settings(sync=sync, shards=3)
    cluster = OnDisk(settings, tmp_path)
    with run(settings, cluster):
        net = seeded(Whole)
        optimizer = DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net)
        for step in range(5):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            optimizer.step()
        optimizer.finish()
        with optimizer.shared():
            trained = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        last = newest(tmp_path, 3)
    tensors = load_file(merge(tmp_path, last, buffers(tmp_path, last)))
    assert set(tensors) == set(trained)
    for name, tensor in trained.items():
        assert tensors[name].dtype == tensor.dtype and tensors[name].shape == tensor.shape, name
        assert torch.equal(tensors[name], tensor), name
    assert trained["norm.num_batches_tracked"] == 5
    plain = seeded(Whole, seed=8)
    plain.load_state_dict(tensors)  # strict
    assert plain.get_parameter("tied.weight") is plain.get_parameter("body.weight")
    x = torch.randn(4, 9)
    with optimizer.shared(), torch.no_grad():
        assert torch.equal(plain.eval()(x), net.eval()(x))


@pytest.mark.parametrize("direct_s", [60.0, 0.0])
def test_what_is_on_disk_is_what_was_given(direct_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever names an array has, and however much a slow disk has taken before the shard goes on."""
    monkeypatch.setattr(checkpoint_writer, "DIRECT_S", direct_s)
    monkeypatch.setattr(checkpoint_files, "BLOCK_BYTES", 16)
    writer = CheckpointWriter(tmp_path, 0)
    facts = {"publication": 0, "shards": 1, "plan": b"", "buffers": b"", "epoch": 0}
    one, two, longer = (np.full(size, value, np.float32) for size, value in ((9, 1.0), (9, 2.0), (20, 3.0)))
    rounds: list[dict[str, Array]] = [
        {"x": one, "p": one},
        {"x": two, "p": one},
        {"x": longer, "p": longer, "outer.momentum": two},
        {"p": two, "x": longer[::2]},
    ]
    for number, arrays in enumerate(rounds):
        writer.write(number, arrays, facts)
        for array in (one, two, longer):
            array += 10  # while it is written
        writer.wait()
        written = writer.take()
        assert written is not None and written.clock == number and not written.trouble
        found, _ = read(tmp_path, 0, number)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array - 10, err_msg=f"{name} of round {number}")


def test_a_checkpoint_is_written_without_a_copy_of_its_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint_files, array_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 16)
    writer, arrays = CheckpointWriter(tmp_path, 0), {name: values(1 << 20) for name in ("x", "p", "outer.momentum")}

    def written() -> None:
        writer.write(3, arrays, FACTS)
        writer.wait()

    assert peak_of(written) < 1 << 18
    assert np.array_equal(read(tmp_path, 0, 3)[0]["x"], arrays["x"])


# Runs that have ended.


def ended_in(folder: Path, **facts: Any) -> None:
    write_file(folder / model_file.NAME, {}, {"narrows": json.dumps({"clock": 60, **facts})})
    (folder / "shard-0.clock-60.safetensors").touch()


def test_a_run_that_has_ended_is_told_from_one_that_was_stopped_or_has_gone_on(tmp_path: Path) -> None:
    assert model_file.end_of(tmp_path) is None and ended(tmp_path, "", 0) == ""
    ended_in(tmp_path)
    assert model_file.end_of(tmp_path) is None, "it was stopped: its model is not that of an end"
    ended_in(tmp_path, steps=600, run_id="one")
    assert model_file.end_of(tmp_path) == {"clock": 60, "steps": 600, "run_id": "one"}
    for run_id, steps in (("", 0), ("two", 0), ("", 600)):
        with pytest.raises(
            UsageError, match=r"has ended, after 600 steps: name another .* more than 600 .* --fresh-run"
        ):
            ended(tmp_path, run_id, steps)
    assert ended(tmp_path, "", 601) == "" and "workers of run one" in ended(tmp_path, "one", 0)
    (tmp_path / "shard-0.clock-64.safetensors").touch()
    assert model_file.end_of(tmp_path) is None, "it has gone on since, and was killed"


def test_a_fresh_run_moves_what_an_earlier_one_left_and_nothing_else(tmp_path: Path) -> None:
    ended_in(tmp_path, steps=600)
    for name in ("narrows-optimizer-0.pt", "notes.txt"):
        (tmp_path / name).write_text(name)
    begin_anew(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "earlier-1"}
    ended_in(tmp_path, steps=20)
    begin_anew(str(tmp_path))
    assert model_file.end_of(tmp_path / "earlier-2") == {"clock": 60, "steps": 20}
    assert model_file.end_of(tmp_path / "earlier-1") == {"clock": 60, "steps": 600}
    begin_anew(str(tmp_path))
    assert not (tmp_path / "earlier-3").exists(), "there was nothing"
    with pytest.raises(UsageError, match="--fresh-run: name the folder with --checkpoint-dir"):
        begin_anew("")
