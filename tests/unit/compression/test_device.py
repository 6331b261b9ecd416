"""A worker's work on a GPU, but for the GPU's own kernels: torch tensors of the CPU, real sizes, the host's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kit.specs import EACH_STAGE, OF_README

from narrows import compression
from narrows.compression import ErrorFeedback, NonFiniteError, PayloadError, parse
from narrows.compression.buffers import DeviceDifference
from narrows.compression.compressor import Chain
from narrows.compression.device import DeviceErrorFeedback, Staging, accumulate, add_raw, decode, kernels_for
from narrows.compression.device.home import DeviceHome
from narrows.compression.device.host import HostKernels
from narrows.compression.device.stages import DevicePool
from narrows.compression.replica import ArrayReplica
from narrows.compression.sparsifiers import TopK
from narrows.compression.value_codings import FP32, INT8
from narrows.protocols.config.key_ranges import parts
from narrows.worker.model.device_placement import device_home

ROUNDED = ("cycle:0.2+sign", "2bit", "topk:4/100+2bit")  # the sum of the rest and a coded value is rounded
EXACT = (
    "topk:0.02",
    "topk:0.02+int8",
    "threshold:1.5+int8",
)  # the rest is not rounded when a coded value is added again
SIZES = (1, 64, 65, 4097, 300_001)
STEPS = 3


def updates_of(count: int) -> Iterator[torch.Tensor]:
    """With few values that are not zero in the last, so that indices are clustered."""
    for step in range(STEPS):
        update = torch.from_numpy(np.random.default_rng(step).standard_normal(count, dtype=np.float32))
        if step == STEPS - 1:
            update[torch.arange(count) // 64 % 7 != 3] = 0
        yield update


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("spec", EACH_STAGE)
def test_payloads_residuals_and_sums_are_the_cpus(spec: str, count: int) -> None:
    for decay in (1.0, 0.9):
        kernels = kernels_for("host")
        ours = DeviceErrorFeedback(kernels, parse(spec), count, decay=decay, seed=3)
        theirs = ErrorFeedback(parse(spec), count, decay=decay, seed=3)
        for update in updates_of(count):
            payload = ours.encode(update)
            assert payload == theirs.encode(update.numpy())
            mine, yours = ours.state_dict(), theirs.state_dict()
            assert mine.keys() == yours.keys()
            assert all(mine[name].tobytes() == yours[name].tobytes() for name in yours)
            got, want = torch.ones(count), np.ones(count, np.float32)
            accumulate(kernels, payload, 0.3, got)
            compression.accumulate(payload, 0.3, want)
            assert got.numpy().tobytes() == want.tobytes()
            decode(kernels, payload, got)
            compression.decode(payload, want)
            assert got.numpy().tobytes() == want.tobytes()


@pytest.mark.parametrize("spec", EACH_STAGE)
def test_the_coded_values_on_the_device_are_those_of_the_payload(spec: str) -> None:
    """Also after later encodes, and while others are held."""
    kernels, count = kernels_for("host"), SIZES[-1]
    feedback, held = DeviceErrorFeedback(kernels, parse(spec), count), []
    for update in updates_of(count):
        payload = feedback.encode(update)
        held.append((bytes(payload), feedback.coded))
    assert [coded is None for _, coded in held] == [parse(spec).lossless] * STEPS
    for sent, coded in held:
        if coded is not None:
            got, want = torch.ones(count), torch.ones(count)
            coded.add(0.3, kernels.view(got))
            accumulate(kernels, sent, 0.3, want)
            assert got.numpy().tobytes() == want.numpy().tobytes()


@pytest.mark.parametrize("spec", EACH_STAGE)
def test_encodes_of_two_shards_are_launched_before_the_first_ends(spec: str) -> None:
    """Payloads are the CPU's, also if the first sample misled, or an encode was launched for another update."""
    kernels, count = kernels_for("host"), 70_001
    ours = [DeviceErrorFeedback(kernels, parse(spec), count, seed=shard) for shard in range(2)]
    theirs = [ErrorFeedback(parse(spec), count, seed=shard) for shard in range(2)]
    for update in (torch.ones(count), *updates_of(count)):
        updates = [update, update.flip(0)]
        ours[1].start_encode(torch.zeros(count))  # it is not wanted
        for feedback, each in zip(ours, updates, strict=True):
            feedback.start_encode(each)
        for mine, yours, each in zip(ours, theirs, updates, strict=True):
            assert mine.encode(each) == yours.encode(each.numpy())
    for mine, yours in zip(ours, theirs, strict=True):
        mine.start_encode(update)
        mine.change(parse("int8"))
        yours.change(parse("int8"))
        assert mine.encode(update) == yours.encode(update.numpy())


def test_a_shard_that_is_not_finite_leaves_the_other_as_it_was() -> None:
    kernels, count = kernels_for("host"), 2000
    ours = [DeviceErrorFeedback(kernels, parse("topk:0.1+int8"), count) for _ in range(2)]
    theirs = ErrorFeedback(parse("topk:0.1+int8"), count)
    good, *_ = updates_of(count)
    bad = good.clone()
    bad[7] = np.nan
    for feedback, update in zip(ours, (bad, good), strict=True):
        feedback.start_encode(update)
    with pytest.raises(NonFiniteError, match=r"1 of 2,?000 values"):
        ours[0].encode(bad)
    ours[1].drop_encode()
    for feedback in ours:
        assert not feedback.state_dict()["residual"].any()
        theirs.load_state_dict({})
        assert feedback.encode(good) == theirs.encode(good.numpy())


def test_memory_of_coded_values_is_lent_again() -> None:
    kernels, pool = kernels_for("host"), DevicePool(kernels_for("host"))
    feedback = DeviceErrorFeedback(kernels, parse("topk:0.1+int8"), 3000, pool=pool)
    held: list[Any] = []
    for update in (torch.randn(3000) for _ in range(6)):
        feedback.encode(update)
        held = [*held, feedback.coded][-2:]
    assert len({id(coded.buffer.base) for coded in held if coded is not None}) == 2 and len(pool.free) == 1


def test_an_own_update_is_added_without_its_payload() -> None:
    """So a worker's replica copies nothing to the device but states."""
    home, count = device_home(torch.device("cpu")), 3000
    replica: Any = ArrayReplica(
        0, count, [((0, count), home.feedback(parse("topk:0.1+int8"), count, 0))], parts, home=home
    )
    pieces, out = replica.encode(torch.randn(count), 0), home.zeros(count)
    home.kernels.counts.clear()
    replica.base([(0.5, piece) for piece in pieces], 0, count, out)
    assert not home.kernels.counts["bytes up"]
    want = home.zeros(count)
    replica.base([(0.5, piece._replace(on_device=None)) for piece in pieces], 0, count, want)
    assert home.kernels.counts["bytes up"] and out.numpy().tobytes() == want.numpy().tobytes()


def test_a_sparsifier_that_no_device_codes_is_named() -> None:
    """It was coded as a threshold."""

    class Largest(TopK):
        pass

    unknown = Chain(Largest(0.1), FP32, None)
    feedback = DeviceErrorFeedback(kernels_for("host"), parse("topk:0.1"), 100)
    for take in (feedback.change, lambda chain: DeviceErrorFeedback(kernels_for("host"), chain, 100)):
        with pytest.raises(TypeError, match="add Largest to REDUCES"):
            take(unknown)


def test_a_value_coding_of_too_many_sections_is_named() -> None:
    four = dataclasses.replace(INT8, sections=(*INT8.sections, *INT8.sections))
    with pytest.raises(TypeError, match="at most 3 sections"):
        DeviceErrorFeedback(kernels_for("host"), Chain(TopK(0.1), four, None), 100)


def test_another_compressor_takes_the_residual_over() -> None:
    """As `auto` changes it, from lossy to lossless and back."""
    kernels, count = kernels_for("host"), 5000
    ours, theirs = DeviceErrorFeedback(kernels, parse("topk:0.02"), count), ErrorFeedback(parse("topk:0.02"), count)
    for spec in ("int8", "dense", "dense", "fp16", "topk:0.1+int8", "dense"):
        for update in updates_of(count):
            assert ours.encode(update) == theirs.encode(update.numpy())
        ours.change(parse(spec))
        theirs.change(parse(spec))
        assert b"".join(ours.encode_parts(update)) == theirs.encode(update.numpy())


def test_a_payload_stays_as_it_is_while_anyone_holds_it() -> None:
    """The tenth update goes out while the first is still being sent, or is sent again."""
    kernels, count = kernels_for("host"), 3000
    feedback = DeviceErrorFeedback(kernels, parse("topk:0.1+int8"), count)
    payloads, copies = [], []
    for step in range(10):
        update = torch.from_numpy(np.random.default_rng(step).standard_normal(count, dtype=np.float32))
        payloads.append(feedback.encode(update)[4:])  # a slice, as a message of several frames has
        copies.append(bytes(payloads[-1]))
    assert payloads == copies


def test_what_nobody_holds_is_lent_again() -> None:
    staging = Staging(kernels_for("host"))
    first = staging.lend(1000)
    kept = first[10:20]
    address = np.frombuffer(first, np.uint8).ctypes.data
    del first
    second = staging.lend(1000)
    assert np.frombuffer(second, np.uint8).ctypes.data != address  # a slice holds it
    del kept
    assert np.frombuffer(staging.lend(900), np.uint8).ctypes.data == address
    for size in (1000, 5000, 30, 7000):
        assert len(staging.lend(size)) == size
    assert len(staging.free) <= 4


@pytest.mark.parametrize("spec", ["topk:0.01+int8", "mstopk:0.02", "cycle:0.3/0.02+sign"])
def test_a_sample_that_misleads_costs_one_wait_more(spec: str) -> None:
    """Where all values are alike, more lie above the sample's threshold than there is room for."""
    kernels, count = kernels_for("host"), 300_001
    ours, theirs = DeviceErrorFeedback(kernels, parse(spec), count), ErrorFeedback(parse(spec), count)
    for step, update in enumerate((torch.ones(count), next(updates_of(count)))):
        assert ours.encode(update) == theirs.encode(update.numpy())
        assert ours.state_dict()["residual"].tobytes() == theirs.state_dict()["residual"].tobytes()
        assert (kernels.counts["misled"], kernels.counts["waits"]) == (1, 2 + step)


def test_a_step_crosses_with_its_payload_and_little_else() -> None:
    """Down goes what is sent, up what came; an encode is waited for once."""
    for spec in OF_README:
        kernels, count = kernels_for("host"), 70_001
        feedback, state = DeviceErrorFeedback(kernels, parse(spec), count), torch.zeros(count)
        came = bytes(ErrorFeedback(parse(spec), count).encode(next(updates_of(count)).numpy()))
        for update in updates_of(count):
            kernels.counts.clear()
            sent = feedback.encode(update)
            accumulate(kernels, came, 1.0, state)
            crossed = kernels.counts["bytes down"] + kernels.counts["bytes up"]
            assert crossed <= len(sent) + len(came) + 1024, spec
            assert (kernels.counts["waits"], kernels.counts["misled"]) == (1, 0), spec


@pytest.mark.parametrize("spec", ["topk:0.1+int8", "randk:0.1", "cycle:0.2+sign", "int8", "2bit", "topk:4/100+2bit"])
def test_what_is_not_finite_is_named_and_changes_nothing(spec: str) -> None:
    kernels, count = kernels_for("host"), 2000
    ours, theirs = DeviceErrorFeedback(kernels, parse(spec), count), ErrorFeedback(parse(spec), count)
    good, *_ = updates_of(count)
    ours.encode(good)
    theirs.encode(good.numpy())
    before = ours.state_dict()["residual"].tobytes()
    for places, value in (((1999,), np.nan), ((0, 7), np.inf), ((3, 1000, 1001), -np.inf)):
        bad = good.clone()
        bad[list(places)] = value
        with pytest.raises(NonFiniteError) as error:
            ours.encode(bad)
        with pytest.raises(NonFiniteError) as wanted:
            theirs.encode(bad.numpy())
        assert str(error.value) == str(wanted.value)
        after = ours.state_dict()["residual"]
        if spec in ROUNDED:
            np.testing.assert_allclose(after, np.frombuffer(before, np.float32), rtol=0, atol=1e-6)
        else:
            assert after.tobytes() == before


def test_bytes_that_are_no_payload_change_nothing() -> None:
    kernels, out = kernels_for("host"), torch.ones(100)
    payload = bytes(ErrorFeedback(parse("topk:0.9+int8"), 100).encode(np.arange(100, dtype=np.float32)))
    for spoiled in (payload[:-1], b"", payload + b"\0"):
        with pytest.raises(PayloadError):
            accumulate(kernels, spoiled, 1.0, out)
        with pytest.raises(PayloadError):
            decode(kernels, spoiled, out)
    with pytest.raises(PayloadError, match="100 raw values are 400 bytes, not 399"):
        add_raw(kernels, bytes(399), 1.0, out)
    assert bool((out == 1.0).all())


def test_raw_values_are_added_as_on_the_cpu() -> None:
    kernels, values = kernels_for("host"), np.random.default_rng(0).standard_normal(1001, dtype=np.float32)
    got, want = torch.ones(1001), np.ones(1001, np.float32)
    add_raw(kernels, values.data, 0.3, got)
    compression.add_raw(values.data, 0.3, want)
    assert got.numpy().tobytes() == want.tobytes()


class Watched(HostKernels):
    """Knows what was asked of it."""

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "__dict__").setdefault("asked", set()).add(name)
        return super().__getattribute__(name)


def test_a_warm_up_reaches_every_kernel_that_is_used() -> None:
    """By the SPECs of all tests here."""
    warm, used = Watched(), Watched()
    DeviceHome(warm, torch.zeros, "host").warm_up()
    for spec in EACH_STAGE:
        feedback = DeviceErrorFeedback(used, parse(spec), 70_001)
        for update in updates_of(70_001):
            accumulate(used, feedback.encode(update), 0.3, torch.ones(70_001))
    assert used.asked - warm.asked <= {"asked"}


class Wrong(HostKernels):
    """In the last bit of what is added."""

    def scatter_add_as(self, name: str, coded: Any, indices: Any, weight: Any, out: Any, record: Any = None) -> None:
        super().scatter_add_as(name, coded, indices, np.float32(weight) * np.float32(1 + 2**-23), out, record)


def test_a_device_that_computes_something_else_is_not_used() -> None:
    with pytest.raises(RuntimeError, match=r"this device \w+ .*otherwise than the CPU"):
        DeviceHome(Wrong(), torch.zeros, "wrong").warm_up()


def test_an_array_that_is_none_of_a_devices_is_refused() -> None:
    feedback = DeviceErrorFeedback(kernels_for("host"), parse("topk:0.1"), 100)
    for wrong in (torch.zeros(100, dtype=torch.float64), torch.zeros(10, 10), torch.zeros(200)[::2]):
        with pytest.raises(TypeError, match="contiguous 1-D float32 array on the device"):
            feedback.encode(wrong)
    with pytest.raises(ValueError, match="update has 99 values; this stream has 100"):
        feedback.encode(torch.zeros(99))
    with pytest.raises(RuntimeError, match="there are no kernels for mps"):
        kernels_for("mps")


@pytest.mark.parametrize("spec", EACH_STAGE[1:])
def test_an_update_of_two_arrays_is_coded_as_their_difference(spec: str) -> None:
    """As a worker gives the parameters and their start: neither is changed, and the payload is the CPU's."""
    home: Any = device_home(torch.device("cpu"))
    count = 70_001
    replica: Any = ArrayReplica(0, count, [((0, count), home.feedback(parse(spec), count, 3))], parts, home=home)
    ours, theirs = replica.feedbacks[0][1], ErrorFeedback(parse(spec), count, seed=3)
    for clock, update in enumerate(updates_of(count)):
        start = update.roll(5)
        moved = update + start
        before = moved.clone(), start.clone()
        theirs.memory.go_to(clock)
        want = theirs.encode((moved - start).numpy())
        if not ours.compressor.lossless:
            replica.start_encode(DeviceDifference(moved, start), clock)
        (piece,) = replica.encode(DeviceDifference(moved, start), clock)
        assert bytes(piece.payload) == bytes(want)
        assert torch.equal(moved, before[0]) and torch.equal(start, before[1])
        if theirs.residual is not None:
            assert home.host(ours.residual).tobytes() == theirs.residual.tobytes()
            places = home.places(np.arange(0, count, 7))
            sample = home.sampling(DeviceDifference(moved, start), places, 0).read()
            assert sample.tobytes() == (moved - start).numpy()[::7].astype(np.float64).tobytes()


@pytest.mark.parametrize("spec", EACH_STAGE)
def test_an_encode_that_is_dropped_leaves_the_residual(spec: str) -> None:
    """But for roundings, also if its update is not finite."""
    kernels, count = kernels_for("host"), 70_001
    feedback = DeviceErrorFeedback(kernels, parse(spec), count)
    first, update, _ = updates_of(count)
    feedback.encode(first)
    before = feedback.state_dict()
    bad, start = update.clone(), update.roll(3)
    bad[9] = torch.inf
    for given in (update, DeviceDifference(update, start), bad):
        try:
            feedback.start_encode(given)
        except NonFiniteError:
            assert given is bad and spec.startswith("threshold")
        feedback.drop_encode()
        after = feedback.state_dict()
        assert after.keys() == before.keys() and after["step"] == before["step"]
        if "residual" in before:
            np.testing.assert_allclose(after["residual"], before["residual"], rtol=0, atol=4e-6)
    assert feedback.residual is None or np.isfinite(feedback.encode(update)).all()


@pytest.mark.parametrize("spec", EACH_STAGE)
def test_a_sum_that_overflows_leaves_the_residual(spec: str) -> None:
    kernels, count = kernels_for("host"), 3000
    feedback = DeviceErrorFeedback(kernels, parse(spec), count)
    if feedback.compressor.lossless:
        return
    residual = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    residual[7] = update_of_7 = np.float32(3e38)
    feedback.load_state_dict({"residual": residual})
    update = torch.zeros(count)
    update[7] = float(update_of_7)
    for encode in (feedback.encode, lambda values: feedback.encode_last(values, [(0, count)])):
        with pytest.raises(NonFiniteError, match=r"1 of 3000 values .* at index 7"):
            encode(update)
        after = feedback.state_dict()["residual"]
        assert np.isfinite(after).all()
        if spec in EXACT:
            assert after.tobytes() == residual.tobytes()
