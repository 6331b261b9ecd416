"""Each coding of log-probabilities codes the same answers of a made teacher. The bench measures its bytes and its KL.

    python bench/loss/logit_codings.py             # the tables of docs/logits.md, as Markdown; two minutes of a core
    python bench/loss/logit_codings.py --tokens 8  # of fewer tokens

Rules
- A teacher's logits are drawn from each of DISTRIBUTIONS: heavy tails, and Zipf's law with noise as of words. A figure is the
  mean over all of them.
- KL is KL(decoded || true) in nats, over the K classes and one for all others, which has what the K leave of 1. It is the loss
  that a student who equals the teacher is still told of. What the K leave out is no error here: it is the same for each coding.
- The second table has codings that were not taken: int4 of equal steps, and int4 that keeps the largest value, not the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from narrows.compression.logits import LogitCoding, parse_logits
from narrows.compression.logits.layout import INT4, LogitValueCoding

Array = npt.NDArray[Any]
Random = np.random.Generator
CODINGS = ("int4", "int8", "fp16")
TOPS = (8, 32, 128)
CLASSES = (256, 50257, 152_000)
SEED = 1
EQUAL_STEPS = LogitValueCoding("equal", 0, 4, INT4.deepest, (np.arange(16) / 15).astype(np.float32))


def zipf(exponent: float) -> Callable[[Random, tuple[int, int]], Array]:
    return lambda draw, shape: draw.standard_normal(shape) - exponent * np.log(np.arange(1, shape[1] + 1))


# Each gives logits, [tokens, classes].
DISTRIBUTIONS: dict[str, Callable[[Random, tuple[int, int]], Array]] = {
    "t": lambda draw, shape: draw.standard_t(4, shape),
    "2t": lambda draw, shape: 2 * draw.standard_t(4, shape),
    "3n": lambda draw, shape: 3 * draw.standard_normal(shape),
    "zipf 1": zipf(1.0),
    "zipf 1.5": zipf(1.5),
    "zipf 2.5": zipf(2.5),
}


def answers(classes: int, tokens: int) -> Iterator[tuple[Array, Array]]:
    """Yield the log-probabilities and ids of the largest TOPS[-1] classes, in falling order, for each distribution."""
    draw = np.random.default_rng([SEED, classes])
    for logits_of in DISTRIBUTIONS.values():
        logits = logits_of(draw, (tokens, classes))
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        ids = np.argpartition(-logits, TOPS[-1] - 1, axis=1)[:, : TOPS[-1]]
        ids = np.take_along_axis(ids, np.argsort(-np.take_along_axis(logits, ids, 1), axis=1), 1)
        yield np.take_along_axis(logits, ids, 1).astype(np.float32), ids


def with_others(log_probs: Array) -> Array:
    """Return probabilities, and as the last one what they leave of 1. They sum to 1."""
    probabilities = np.exp(log_probs.astype(np.float64))
    rest = np.maximum(1 - probabilities.sum(1, keepdims=True), 0)
    found: Array = np.concatenate((probabilities, rest), 1)
    found /= found.sum(1, keepdims=True)
    return found


def divergence(decoded: Array, true: Array) -> float:
    """Return the mean KL(decoded || true), in nats, of log-probabilities [tokens, K]."""
    q, p = with_others(decoded), np.maximum(with_others(true), 1e-12)
    return float((q * np.log(np.where(q > 0, q, 1) / p)).sum(1).mean())


def largest_kept(decoded: Array, true: Array) -> Array:
    """Return what would be decoded if records kept the largest value as a half, and not the sum."""
    largest = true.max(1, keepdims=True).astype(np.float16).astype(np.float32)
    moved: Array = decoded - decoded.max(1, keepdims=True) + largest
    return moved


def measured(coding: LogitCoding, classes: int, given: list[tuple[Array, Array]], sum_kept: bool = True) -> float:
    """Return the mean KL of a coding over all distributions."""
    found = []
    for log_probs, ids in given:
        true, named = log_probs[:, : coding.top], ids[:, : coding.top]
        decoded, _ = coding.decode(coding.encode(true, named, classes), classes)
        true = np.take_along_axis(true, np.argsort(named, axis=1), 1)
        found.append(divergence(decoded if sum_kept else largest_kept(decoded, true), true))
    return float(np.mean(found))


@click.command(context_settings={"show_default": True})
@click.option("--tokens", default=64, help="of each distribution; 16 times as many of 256 classes")
def main(tokens: int) -> None:
    """Measure bytes and KL of each coding of log-probabilities."""
    click.echo(f"| V | K | kept | {' | '.join(f'{coding}: bytes | KL' for coding in CODINGS)} |")
    click.echo(f"|---|---|---|{'---|---|' * len(CODINGS)}")
    others = []
    for classes in CLASSES:
        given = list(answers(classes, tokens * (16 if classes == CLASSES[0] else 1)))
        for top in TOPS:
            kept = np.mean([np.exp(log_probs[:, :top].astype(np.float64)).sum(1).mean() for log_probs, _ in given])
            cells = []
            for coding in (parse_logits(f"top:{top}+{name}") for name in CODINGS):
                cells += [f"{coding.record_bytes(classes)}", f"{measured(coding, classes, given):.1e}"]
            click.echo(f"| {classes} | {top} | {kept:.2f} | {' | '.join(cells)} |")
            taken = LogitCoding(top, INT4)
            kinds = [(taken, True), (LogitCoding(top, EQUAL_STEPS), True), (taken, False)]
            figures = [f"{measured(coding, classes, given, sum_kept):.1e}" for coding, sum_kept in kinds]
            others.append(f"| {classes} | {top} | {' | '.join(figures)} |")
    click.echo("\n| V | K | int4 | of equal steps | the largest kept, not the sum |\n|---|---|---|---|---|")
    click.echo("\n".join(others))


if __name__ == "__main__":
    main()
