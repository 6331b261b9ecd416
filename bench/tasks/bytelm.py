"""A small GPT on the bytes of Python's own standard library: about 11 MB of text that every machine already has.

An ordinary script; the lines marked "Narrows" join it to a parameter server. Run as plain python it trains alone.
Every tenth file by sorted path is held out; the last line is the loss on fixed windows of those, in nats a byte.
With --teacher-weight it learns from a teacher too: the one that ps-worker --teacher names, which bytelm_teacher.py serves, or
with --teacher-file one in this process, all of whose classes count. A line of JSON then says what came of the teacher.
The library's text differs between patch versions of Python: compare figures only under one sha256.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrows.worker import (
    DistributedOptimizer,
    device,
    ranges,
    rank,
    record,
    step_count,
    teacher,
    world_size,
)  # Narrows

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SHAPE = {"layers": 4, "width": 160, "heads": 5, "context": 64}  # of the model: defaults of its flags
VALIDATION_WINDOWS = 1024
AHEAD = 4  # steps whose soft targets are asked for before the step that uses them
SETTLED = 10  # steps after which the longest is looked for: the first ones open connections and compile
MUON = (
    "muon: Muon for the matrices of the blocks, AdamW for the rest; needs torch 2.9, and pushed updates or --cut tensors "
    "(default adamw)"
)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.attention_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for into, out in ((self.qkv, self.attention_out), (self.mlp_in, self.mlp_out)):
            nn.init.normal_(into.weight, std=0.02)
            nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * layers))  # as GPT-2: it adds to the residual stream

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attention_out(mixed)
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.norm_mlp(x))))
        return out


class ByteGPT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 160, heads: int = 5, context: int = 64) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, layers) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for weight in (self.bytes.weight, self.positions.weight, self.head.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.bytes(x) + self.positions.weight[: x.shape[1]])))
        return out


def library() -> tuple[Tensor, Tensor, str]:
    """(training bytes, held-out bytes, sha256 of all of them in the order of their sorted paths)."""
    root, files = sysconfig.get_path("stdlib"), []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED_FOLDERS
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [path.read_bytes() for path in sorted(files, key=lambda path: path.relative_to(root).as_posix())]
    training = b"".join(text for i, text in enumerate(texts) if i % 10 != 9)
    held_out = b"".join(texts[9::10])
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (training, held_out)]
    return tensors[0], tensors[1], hashlib.sha256(b"".join(texts)).hexdigest()


def windows(text: Tensor, starts: np.ndarray, context: int) -> Tensor:
    return text[torch.from_numpy(starts)[:, None] + torch.arange(context + 1)].long()


def batch_rows(text: Tensor, seed: int, step: int, batch: int, context: int, worker: int = 0, of: int = 1) -> Tensor:
    """One worker's rows of the global batch, which seed and step alone decide."""
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - context, size=batch)
    return windows(text, starts[worker::of], context)


def shares(text: Tensor, args: argparse.Namespace) -> Iterator[tuple[int, Tensor]]:
    """Each step's number and rows: this worker's of each step, or those that the run hands out, of the same global batches."""
    if not args.ranges:
        while (step := step_count()) < args.steps:
            yield step, batch_rows(text, args.seed, step, args.batch, args.context, rank(), world_size())
        return
    for positions in ranges(args.steps * args.batch, args.batch // world_size(), shuffle=False):
        step = int(positions[0]) // args.batch
        batch = batch_rows(text, args.seed, step, args.batch, args.context)
        yield step, batch[positions % args.batch]


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak: from the step alone, so that a joiner has it right."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def saved(path: str) -> ByteGPT:
    """The model of a file that --save has written."""
    content = torch.load(path, weights_only=True)
    model = ByteGPT(**content["shape"])
    model.load_state_dict(content["model"])
    return model.eval()


class Taught:
    """The soft targets of the rows of each step, of a teacher that is asked ahead or of one in this process."""

    def __init__(self, text: Tensor, args: argparse.Namespace) -> None:
        self.text, self.args = text, args
        self.own = saved(args.teacher_file).to(device()) if args.teacher_file else None
        self.teachers = None if self.own else teacher.connect(temperature=args.temperature)  # Narrows
        self.asked: dict[tuple[int, int, int], teacher.Asked] = {}  # by step, rank and world size
        self.missed, self.waited_s = 0, 0.0

    def take(self, step: int, rows: Tensor) -> teacher.SoftTargets | None:
        """Those of a step; asks for those of the next AHEAD steps."""
        if self.own is not None:
            return self._computed(self.own, rows[:, :-1].to(device()))
        args, mine = self.args, (rank(), world_size())
        for later in range(step, min(step + AHEAD, args.steps - 1) + 1):
            if (later, *mine) not in self.asked:
                ahead = (
                    rows if later == step else batch_rows(self.text, args.seed, later, args.batch, args.context, *mine)
                )
                self.asked[later, *mine] = teacher.ask(ahead[:, :-1])  # Narrows
        before = time.perf_counter()
        soft = self.asked[step, *mine].take()  # Narrows
        self.waited_s += time.perf_counter() - before
        self.missed += soft is None
        self.asked = {key: asked for key, asked in self.asked.items() if key[0] > step}
        return soft

    @torch.no_grad()
    def _computed(self, model: ByteGPT, x: Tensor) -> teacher.SoftTargets:
        """Return all classes with their log-probabilities, uncoded."""
        log_probs = F.log_softmax(model(x) / self.args.temperature, -1)
        ids = torch.arange(log_probs.shape[-1]).expand(log_probs.shape)
        return teacher.SoftTargets(ids, log_probs, log_probs.shape[-1], self.args.temperature)

    def told(self, seconds: Sequence[float]) -> str:
        """The line about the teacher, as JSON."""
        facts: dict[str, float] = {
            "missed": self.missed,
            "waited_s": self.waited_s,
            "longest_s": max(seconds[SETTLED:], default=0),
        }
        if self.teachers is not None:
            totals = self.teachers.meter.totals
            facts |= {"bytes_up": totals.bytes_up, "bytes_down": totals.bytes_down, "hits": totals.cached}
        return json.dumps(facts)


def loss_sum(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


def taught_loss_sum(model: nn.Module, rows: Tensor, soft: teacher.SoftTargets, weight: float) -> Tensor:
    """loss_sum and the loss against the teacher, (1 - weight) to weight."""
    logits = model(rows[:, :-1])
    hard = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return (1 - weight) * hard + weight * soft.loss(logits) * rows[:, 1:].numel()


@torch.no_grad()
def validation_loss(model: nn.Module, text: Tensor, context: int) -> float:
    """Mean over evenly spaced windows, the same ones for every run."""
    starts = np.linspace(0, len(text) - context - 1, VALIDATION_WINDOWS).astype(np.int64)
    device = next(model.parameters()).device
    total = sum(loss_sum(model, part.to(device)).item() for part in windows(text, starts, context).split(64))
    return total / (VALIDATION_WINDOWS * context)


def orthogonal(gradient: Tensor, coefficients: tuple[float, float, float], steps: int, least: float) -> Tensor:
    """Muon's Newton-Schulz iteration in float32; torch's is in bfloat16, which a CPU without it computes ten times slower."""
    a, b, c = coefficients
    tall = gradient.shape[0] > gradient.shape[1]
    x = gradient.float().T if tall else gradient.float()
    x = x / x.norm().clamp(min=least)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def optimizers(model: ByteGPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Together they have every parameter: AdamW those that are no matrix of a block, or all."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2] if args.optimizer == "muon" else []
    of_muon = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in of_muon]
    adamw = torch.optim.AdamW(rest, lr=args.lr, betas=(args.beta1, 0.95), weight_decay=args.weight_decay)
    if not matrices:
        return [adamw]
    if args.muon_float32:
        vars(sys.modules["torch.optim._muon"])["_zeropower_via_newtonschulz"] = orthogonal
    scale = "match_rms_adamw"  # so that the rate of AdamW fits it
    muon = torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, momentum=0.95, adjust_lr_fn=scale)
    return [muon, adamw]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT on the bytes of Python's standard library.")
    training = {"steps": 400, "warm-up": 40, "seed": 0, "lr": 2e-3, "beta1": 0.9, "weight-decay": 0.1, "clip": 1.0}
    for flag, default in (SHAPE | training).items():
        parser.add_argument(f"--{flag}", type=type(default), default=default, help=f"(default {default})")
    parser.add_argument("--batch", type=int, default=32, help="windows a step, over all workers (default 32)")
    pause = "seconds that a step waits besides, as for a GPU: they cost no core (default 0)"
    parser.add_argument("--pause", type=float, default=0.0, help=pause)
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help=MUON)
    float32 = "Muon's iteration in float32: faster on a CPU without bfloat16"
    parser.add_argument("--muon-float32", action="store_true", help=float32)
    parser.add_argument(
        "--ranges", action="store_true", help="rows are handed out by the run, also those of a dead worker"
    )
    parser.add_argument("--overlap", action="store_true", help="send gradients during backward, clip their mean")
    save = "file that gets the weights at the end; bytelm_teacher.py serves them"
    parser.add_argument("--save", default="", metavar="FILE", help=save)
    weight = "of the loss against a teacher, beside that against the text (default 0: no teacher)"
    parser.add_argument("--teacher-weight", type=float, default=0.0, metavar="W", help=weight)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the teacher's answers (default 1)")
    file = "a model that --save has written teaches, in this process (default: the teacher of ps-worker --teacher)"
    parser.add_argument("--teacher-file", default="", metavar="FILE", help=file)
    deterministic = "torch's deterministic algorithms alone; print the losses of all steps as JSON"
    parser.add_argument("--deterministic", action="store_true", help=deterministic)
    args = parser.parse_args(argv)
    if args.teacher_weight and args.ranges:
        parser.error(
            "--teacher-weight asks for the rows of later steps, and --ranges hands them out later: leave one out"
        )
    return args


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(args.deterministic)
    training, held_out, sha256 = library()
    here = device()
    model = ByteGPT(args.layers, args.width, args.heads, args.context).to(here)
    clip = args.clip if args.overlap else None
    inner = optimizers(model, args)
    optimizer = DistributedOptimizer(inner, model, overlap=args.overlap, max_grad_norm=clip)  # Narrows
    if rank() == 0:
        size = sum(p.numel() for p in model.parameters())
        print(f"text sha256 {sha256}, {len(training):,} + {len(held_out):,} bytes; {size:,} parameters", flush=True)

    taught = Taught(training, args) if args.teacher_weight else None
    seconds, losses, before = [], [], time.perf_counter()
    for step, rows in shares(training, args):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr, args.warm_up)
        optimizer.zero_grad()
        # Its mean over the workers is the mean over the global batch, even if the workers' shares differ by a row.
        soft = taught.take(step, rows) if taught else None
        rows = rows.to(here)
        summed = taught_loss_sum(model, rows, soft, args.teacher_weight) if soft else loss_sum(model, rows)
        loss = summed * world_size() / (args.batch * args.context)
        loss.backward()
        time.sleep(args.pause)
        if not args.overlap:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        losses.append(loss.item())
        record(loss=losses[-1], total_steps=args.steps)
        seconds.append(time.perf_counter() - before)
        before = time.perf_counter()

    optimizer.finish()  # Narrows
    with optimizer.shared():  # Narrows
        result = validation_loss(model, held_out, args.context)
        if args.save and rank() == 0:
            shape = {name: getattr(args, name) for name in SHAPE}
            torch.save({"shape": shape, "model": model.state_dict()}, args.save)
    record(loss=result)
    who = f"rank {rank()}: " if world_size() > 1 else ""
    if args.deterministic:
        print(f"{who}losses {json.dumps(losses)}")
    if seconds:
        print(f"{who}median step {statistics.median(seconds):.4f} s over {len(seconds)} steps")
    if taught:
        print(f"{who}teacher {taught.told(seconds)}")
    print(f"{who}validation loss {result:.4f} nats a byte")


if __name__ == "__main__":
    main(arguments())
