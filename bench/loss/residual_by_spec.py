"""Each SPEC codes the same updates of the byte GPT, with error feedback. The bench measures how much it holds back.

    python bench/loss/residual_by_spec.py  # all of SPECS
    python bench/loss/residual_by_spec.py --specs topk:0.05+int8,topk:0.11+sign  # these
    python bench/loss/residual_by_spec.py --gradients  # the gradients, clipped, instead of the updates

Rules
- One process trains the model without a code. Each SPEC codes each update of it, the change of the parameters in a step, with
  error feedback of its own. The model never steps by a coded update, so all SPECs get the same updates.
- "Held back" is the norm of the residual after an encode over the norm of the update: so many updates wait to be sent.
  Both columns are means over the second half of the steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import numpy as np
import numpy.typing as npt
import torch

from narrows.compression import ErrorFeedback, SpecError, parse

sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "tasks")]

import bytelm
from lab import launch, record

FloatArray = npt.NDArray[np.float32]
SPECS = (
    "fp16", "bf16", "int8", "int8:stochastic", "uint8minmax", "int4", "int4:stochastic", "2bit", "sign",
    "topk:0.5+2bit", "topk:0.27+sign", "topk:0.2+sign", "threshold:0.002+int8",
    "topk:0.05", "topk:0.05+fp16", "topk:0.05+int8", "topk:0.05+int4", "topk:0.08+2bit", "topk:0.11+sign",
    "topk:0.06+sign", "cycle:0.5/0.3+sign", "cycle:0.33/0.3+sign",
    "topk:123/4096+2bit", "topk:0.03+2bit", "topk:0.035+sign", "cycle:0.25+sign", "cycle:0.25/0.24+sign",
    "topk:0.01+int8", "mstopk:0.01+int8", "randk:0.01", "randk:0.15+sign", "topk:64/4096+2bit", "topk:0.015+2bit",
    "topk:0.018+sign", "cycle:0.15+sign", "cycle:0.15/0.24+sign", "cycle:0.15/0.23+sign", "cycle:0.1667/0.19+sign",
    "topk:0.007+sign", "cycle:0.06+sign", "cycle:0.06/0.22+sign",
)  # fmt: skip


def stream(steps: int, gradients: bool) -> Iterator[FloatArray]:
    """Yield the updates, or the gradients, of bytelm.py as it runs alone with its default flags."""
    args = bytelm.arguments([])
    torch.manual_seed(args.seed)
    training = bytelm.library()[0]
    model = bytelm.ByteGPT(args.layers, args.width, args.heads, args.context)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    before = flat(model.parameters())
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = bytelm.learning_rate(step, args.steps, args.lr, args.warm_up)
        adamw.zero_grad()
        loss = bytelm.loss_sum(model, bytelm.batch_rows(training, args.seed, step, args.batch, args.context))
        (loss / (args.batch * args.context)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        if gradients:
            yield flat([p.grad for p in model.parameters() if p.grad is not None])
        adamw.step()
        if not gradients:
            after = flat(model.parameters())
            yield after - before
            before = after


def flat(tensors: Iterable[torch.Tensor]) -> FloatArray:
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in tensors])


def compared(specs: list[str], steps: int, gradients: bool) -> dict[str, record.Figures]:
    """What each SPEC holds back, the one with the most bytes first."""
    feedbacks: dict[str, ErrorFeedback] = {}
    ratios: dict[str, list[float]] = {spec: [] for spec in specs}
    held: dict[str, list[float]] = {spec: [] for spec in specs}
    for step, update in enumerate(stream(steps, gradients), 1):
        size = float(np.linalg.norm(update))
        for spec in specs:
            feedback = feedbacks.setdefault(spec, ErrorFeedback(parse(spec), update.size))
            payload = feedback.encode(update)
            if 2 * step >= steps:
                residual = 0.0 if feedback.residual is None else float(np.linalg.norm(feedback.residual))
                ratios[spec].append(update.nbytes / len(payload))
                held[spec].append(residual / size)
    means = {spec: (float(np.mean(held[spec])), float(np.mean(ratios[spec]))) for spec in specs}
    return {
        spec: {"held back": (back, "norms"), "ratio": (ratio, "")}
        for spec, (back, ratio) in sorted(means.items(), key=lambda each: each[1][1])
    }


@click.command(context_settings={"show_default": True})
@click.option("--specs", default=",".join(SPECS), show_default=False, help="SPECs, separated by commas")
@click.option("--steps", type=click.IntRange(min=2), default=120, help="of the byte GPT; the second half counts")
@click.option("--gradients", is_flag=True, help="of the same run, instead of its updates")
@record.out_option("loss/residual_by_spec")
def main(specs: str, steps: int, gradients: bool, out: Path) -> None:
    """Compare SPECs on one stream of updates: bytes, and what error feedback holds back."""
    try:
        names = [parse(spec).spec for spec in specs.split(",")]
    except SpecError as error:
        raise click.UsageError(str(error)) from error
    launch.one_thread()
    torch.set_num_threads(1)
    with record.Recorder("loss/residual_by_spec", out) as recorder:
        for spec, figures in compared(names, steps, gradients).items():
            table = "gradients" if gradients else "updates"
            recorder.add(spec, figures, table=table, seed=0, arguments={"steps": steps})


if __name__ == "__main__":
    main()
