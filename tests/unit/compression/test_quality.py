"""The worth of a SPEC: ratios, entropy, mass, bias, rank; on random numbers and on gradients of the byte GPT."""

import math
from collections.abc import Callable

import bytelm
import numpy as np
import pytest
import torch
from kit import reference_payload
from kit.reference import Array, values_of
from kit.specs import held

from narrows.compression import ErrorFeedback, Memory, decode, indices, parse
from narrows.compression.index_codings import GROUPED_RICE, RICE


def gradients() -> Array:
    """Flat gradients of the byte GPT after 4 steps of AdamW: clustered by row and tensor as no random numbers are."""
    torch.manual_seed(0)
    model = bytelm.ByteGPT(layers=2, width=96, heads=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = bytelm.library()[0][:1_000_000]
    for step in range(4):
        optimizer.zero_grad()
        bytelm.loss_sum(model, bytelm.batch_rows(text, 0, step, 8, 64)).backward()
        optimizer.step()
    return np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])


REAL: dict[str, Callable[[np.random.Generator], Array]] = {
    "normal": lambda rng: rng.standard_normal(1_000_000),
    "laplace": lambda rng: rng.laplace(size=1_000_000),
    "student-t(3)": lambda rng: rng.standard_t(3, size=1_000_000),
    "gradients": lambda rng: gradients(),
}


@pytest.mark.parametrize("name", REAL)
def test_mstopk_mass(name: str) -> None:
    """Shi et al., 2010.10458, sec. 3: exactly k values, of nearly the mass of the true top k."""
    values = REAL[name](np.random.default_rng(4)).astype(np.float32)
    for density in (0.001, 0.01, 0.1):
        k = round(density * values.size)
        decoded = np.zeros(values.size, np.float32)
        decode(parse(f"mstopk:{density}").encode(values), decoded)
        assert np.count_nonzero(decoded) == k
        top = np.sort(np.abs(values.astype(np.float64)))[-k:]
        assert np.abs(decoded.astype(np.float64)).sum() >= 0.999 * top.sum()
        assert np.square(decoded.astype(np.float64)).sum() >= 0.999 * np.square(top).sum()


def test_indices_of_gradients_are_coded_by_group() -> None:
    """Rows of unused bytes are zero, layers differ: a parameter for each group of gaps halves what one for all takes."""
    values = gradients()
    kept = round(0.01 * values.size)
    payload = parse("topk:0.01").encode(values)
    assert bytes(payload)[1] == GROUPED_RICE.wire_id
    grouped_bits = 8 * (len(payload) - 16) / kept - 32
    rice_bits = 8 * RICE.cheapest(held(payload, values.size), values.size)[0] / kept
    assert grouped_bits < 0.75 * rice_bits


def test_ratios() -> None:
    """SparseLoCo's format (64 of 4096 values, 2 bits each) takes 1/146; its entropy is worth 1/215."""
    values = np.random.default_rng(0).standard_normal(1 << 22, dtype=np.float32)
    for spec, least in (("topk:64/4096+2bit", 213), ("topk:32/4096+2bit", 385)):
        assert values.nbytes / len(parse(spec).encode(values)) >= least
    kept = round(0.001 * values.size)
    index_bits = 8 * (len(parse("topk:0.001+int8").encode(values)) - 16 - kept - 2 * -(-kept // 256)) / kept
    entropy = sum(math.log2((values.size - i) / (kept - i)) for i in range(kept)) / kept  # log2 C(n, k) / k
    assert entropy < index_bits < entropy + 0.1


@pytest.mark.parametrize("spec", ["int8:stochastic", "int4:stochastic", "randk:0.1", "randk:0.1+int8:stochastic"])
def test_unbiased(spec: str) -> None:
    """The mean over keys comes to the input as 1 / sqrt(their number): within five of the largest standard error."""
    values, memory = values_of("normal", 1000), Memory(seed=3)
    compressor, turns = parse(spec), 400
    assert compressor.unbiased
    sums, squares = np.zeros(1000), np.zeros(1000)
    out = np.empty(1000, np.float32)
    for _ in range(turns):
        decode(compressor.encode(values, memory), out)
        sums += out
        squares += np.square(out, dtype=np.float64)
    mean = sums / turns
    error = np.sqrt((squares / turns - mean**2).clip(0) / turns)
    assert memory.step == turns
    assert np.all(np.abs(mean - values) <= 5 * error.max())
    assert np.mean(np.abs(mean - values) <= error) > 0.6


def test_keys_tell_streams_and_steps_apart() -> None:
    values = values_of("normal", 1000)
    one, two = (ErrorFeedback(parse("randk:0.1"), 1000, seed=seed) for seed in (1, 2))
    drawn = [held(feedback.encode(values), 1000).tolist() for feedback in (one, one, two)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    state = one.state_dict()
    again = ErrorFeedback(parse("randk:0.1"), 1000, seed=1)
    again.load_state_dict(state)
    assert bytes(again.encode(values)) == bytes(one.encode(values))


def test_a_cycle_takes_each_value_once() -> None:
    """All senders alike at one step, whatever their seed; every value once in as many steps as it has strides."""
    values, counts = values_of("normal", 1003), np.zeros(1003, np.int64)
    for step in range(2 * 7):
        payloads = [bytes(parse("cycle:0.15").encode(values, Memory(seed, step))) for seed in (1, 2)]
        assert payloads[0] == payloads[1] == reference_payload.encode("cycle:0.15", values, step=step)
        counts[indices(payloads[0], 1003)] += 1
    assert np.all(counts == 2)


def test_a_cycle_with_a_share_takes_the_largest_of_its_turn() -> None:
    """The reference at every step of a cycle, and beyond the last phase that an array has; places as without a share."""
    compressor = parse("cycle:0.15/0.4+int8")
    for count, spec in ((1003, "cycle:0.15/0.4+int8"), (65, "cycle:0.0125/0.5")):
        values = values_of("normal", count)
        turns = round(1 / float(spec[6:].partition("/")[0]))
        taken = [bytes(parse(spec).encode(values, Memory(9, step))) for step in range(turns)]
        assert taken == [reference_payload.encode(spec, values, step=step) for step in range(turns)]
    for step in range(7):
        sent = indices(compressor.encode(values_of("normal", 1003), Memory(0, step)), 1003)
        assert sent is not None and np.all(sent % 7 == step)
    assert len(taken[64]) == 16 + 4 + 2 and len(taken[65]) == 16, "one value, and none"
