"""narrows.worker.transformers and narrows.worker.lightning: what trainers save is the shared
model, and a Trainer of a run that goes on does so where the run is. `make examples` installs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

for library in ("lightning", "transformers"):
    pytest.importorskip(library, reason="make examples installs it, apart")

pytestmark = pytest.mark.timeout(300)
STEPS, BATCH, SAMPLES = (
    12,
    4,
    36,
)  # two workers have 18 samples each, so 5 steps an epoch, of which the last has 2 samples
RATE = 0.1
LIMIT_S = 200.0
PS_WORKER = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "2"]
# What a worker holds back is in its own parameters, and not in the shared model; behind a barrier all see the same of that.
LOSSY = ["--sync", "bsp", "--push", "update", "--compress", "topk:0.05+int8"]

COMMON = f"""
import json, os, sys, time, torch, warnings
STEPS, BATCH, SAMPLES, RATE = {STEPS}, {BATCH}, {SAMPLES}, {RATE}
os.environ["NARROWS_LOCAL_RANK"] = "0"  # else of the workers of a machine only the first one saves
from narrows.worker import rank
def rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 8, generator=generator)
    return [{{"x": torch.cat([x[i], torch.tensor([float(i)])]), "y": x[i].sum()}} for i in range(SAMPLES)]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    def forward(self, x, y):
        return {{"loss": ((self.net(x[:, :8])[:, 0] - y) ** 2).mean()}}
def told(step, rate, x):
    print("step", json.dumps([rank(), step, rate, x[:, 8].int().tolist()]), flush=True)
    time.sleep(PAUSE)
def ended(model):
    torch.save(model.state_dict(), f"ended-{{rank()}}.pt")
    print("ended", flush=True)
"""
TRANSFORMERS = """
from transformers import Trainer, TrainingArguments
from narrows.worker.transformers import distributed
class Told(Trainer):
    def training_step(self, model, inputs, *rest):
        told(self.state.global_step, self.lr_scheduler.get_last_lr()[0], inputs["x"])
        return super().training_step(model, inputs, *rest)
args = TrainingArguments(f"saved-{rank()}", LENGTH, per_device_train_batch_size=BATCH, learning_rate=RATE,
    logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, label_names=["y"], SAVES)
model = Net()
trainer = distributed(Told)(model, args, train_dataset=rows(), eval_dataset=rows())
trainer.train()
trainer.save_model(f"saved-{rank()}/last")
ended(model)
"""
# Rows that stream: nobody cuts them; files of Hugging Face; cut by its function; or by the dataset itself.
STREAMS = {
    "rows": "Stream()",
    "files": "generated(2)",
    "split": "split_dataset_by_node(generated(1), rank(), 2)",
    "itself": "Itself()",
}
STREAMING = """
import datasets
from datasets.distributed import split_dataset_by_node
from narrows.worker import world_size
def each(files, count):
    for number in files:
        yield from rows()[number::count]
def generated(count):
    return datasets.IterableDataset.from_generator(each, gen_kwargs={"files": [*range(count)], "count": count})
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows())
class Itself(Stream):
    def __iter__(self):
        return iter(rows()[rank() :: world_size()])
"""
LIGHTNING = """
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from narrows.worker.lightning import NarrowsCallback, sampler
warnings.filterwarnings("ignore", module="lightning")
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Net()
    def training_step(self, batch, index):
        told(self.trainer.global_step, self.lr_schedulers().get_last_lr()[0], batch["x"])
        return self.model(**batch)["loss"]
    def test_step(self, batch, index):
        self.log("loss", self.model(**batch)["loss"])
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), RATE)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
saves = ModelCheckpoint(f"saved-{rank()}", save_top_k=-1, SAVES)
trainer = lightning.Trainer(LENGTH, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[saves, NarrowsCallback()])
module, data = Module(), rows()
trainer.fit(module, torch.utils.data.DataLoader(data, BATCH, sampler=sampler(data, BATCH)))
trainer.save_checkpoint(f"saved-{rank()}/last.ckpt")
(figures,) = trainer.test(module, torch.utils.data.DataLoader(data, SAMPLES), verbose=False)
print("tested", figures["loss"], flush=True)
ended(module.model)
"""


def script(folder: Path, trainer: str, saves: str, length: str, pause: float = 0.0) -> list[str]:
    text = COMMON + trainer.replace("SAVES", saves).replace("LENGTH", length)
    (folder / "script.py").write_text(text.replace("PAUSE", str(pause)))
    return ["script.py"]


def weights(path: Path) -> dict[str, torch.Tensor]:
    """The parameters of a file that somebody saved, by their names in Net."""
    if path.suffix == ".safetensors":
        found = load_file(path)
    else:
        found = torch.load(path, weights_only=False)
        found = found.get("state_dict", found)
    return {name.removeprefix("model."): value for name, value in found.items()}


def equal(one: Path, other: Path) -> bool:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


CASES = {
    "transformers, epochs": (TRANSFORMERS, 'save_strategy="epoch"', "num_train_epochs=3", [5, 10, 15]),
    "transformers, steps": (TRANSFORMERS, 'save_strategy="steps", save_steps=4', "max_steps=STEPS", [4, 8, 12]),
    "transformers, at the end": (TRANSFORMERS, 'save_strategy="no"', "max_steps=7", []),
    "transformers, the best": (
        TRANSFORMERS, 'save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True', "num_train_epochs=3",
        [5, 10, 15],
    ),
    "lightning, epochs": (LIGHTNING, "", "max_epochs=3", [5, 10, 15]),
    "lightning, steps": (LIGHTNING, "every_n_train_steps=4", "max_steps=STEPS", [4, 8, 12]),
    "lightning, weights": (LIGHTNING, "every_n_train_steps=4, save_weights_only=True", "max_steps=8", [4, 8]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_trainer_saves_is_the_shared_model(name: str, tmp_path: Path) -> None:
    """Two workers save the same, the last of which all workers end with, and before that not what each trains on."""
    trainer, saves, length, steps = CASES[name]
    words = [*LOSSY, "--checkpoint-dir", "kept", *script(tmp_path, trainer, saves, length)]
    done = subprocess.run([*PS_WORKER, *words], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and done.stdout.count("ended") == 2, done.stderr
    suffix = "ckpt" if trainer is LIGHTNING else "safetensors"
    first, second = (sorted((tmp_path / f"saved-{rank}").rglob(f"*.{suffix}")) for rank in range(2))
    saved_at = [int(found[1]) for path in first if (found := re.search(r"(?:checkpoint-|step=)(\d+)", str(path)))]
    assert sorted(saved_at) == steps and len(first) == len(second) == len(steps) + 1
    assert all(equal(one, other) for one, other in zip(first, second, strict=True))
    files = dict(zip(saved_at, first, strict=False))
    (last,) = [path for path in first if "last" in str(path)]
    end = tmp_path / "kept" / "model.safetensors"
    assert equal(tmp_path / "ended-0.pt", tmp_path / "ended-1.pt") and equal(tmp_path / "ended-0.pt", last)
    if "best" in name:
        best = re.search(r"checkpoint-(\d+)", json.loads((files[15].parent / "trainer_state.json").read_text())[
            "best_model_checkpoint"])  # fmt: skip
        assert best is not None and equal(last, files[int(best[1])])
    else:
        assert equal(last, end)
    if steps:
        assert equal(files[steps[-1]], end), "what is saved after the last step is what all workers end with"
        assert not equal(files[steps[0]], end)
    if trainer is LIGHTNING:
        tested = {float(value) for value in re.findall(r"^tested (\S+)", done.stdout, re.M)}
        assert len(tested) == 1


# Each worker evaluates all of the data, and has another figure of it.
EVALUATED = """
    def validation_step(self, batch, index):
        self.log("held_out", self.model(**batch)["loss"] + 0.01 * rank())
    def configure_optimizers"""
TESTED = """
trainer.fit(module, torch.utils.data.DataLoader(data, BATCH, sampler=sampler(data, BATCH)), whole)
assert trainer.test(module, whole, ckpt_path="last", verbose=False)
(figures,) = trainer.test(module, whole, ckpt_path="best", verbose=False)
print("tested", figures["loss"], flush=True)
ended(module.model)
"""
BEST = {
    "transformers": (
        TRANSFORMERS.replace("saved-{rank()}", "saved"),
        'save_strategy="epoch", eval_strategy="epoch", load_best_model_at_end=True, save_total_limit=1',
        "num_train_epochs=3", "trainer.state.best_model_checkpoint",
    ),
    "lightning": (
        LIGHTNING.partition("trainer.fit")[0].replace("\n    def configure_optimizers", EVALUATED)
        .replace("save_top_k=-1, ", "") + "whole = torch.utils.data.DataLoader(data, SAMPLES)" + TESTED,
        "save_top_k=1, monitor='held_out', save_last=True", "max_epochs=3", "saves.best_model_path",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainer", BEST)
def test_all_workers_of_a_machine_find_the_best_checkpoint_of_the_first(trainer: str, tmp_path: Path) -> None:
    """The first worker alone saves, as with DDP. Each ends with the model of that checkpoint."""
    text, saves, length, path = BEST[trainer]
    text += f'\nprint("best", {path}, flush=True)'
    script(tmp_path, text, saves, length)
    source = (tmp_path / "script.py").read_text().replace('os.environ["NARROWS_LOCAL_RANK"] = "0"', "pass")
    (tmp_path / "script.py").write_text(source)
    done = subprocess.run(
        [*PS_WORKER, *LOSSY, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0 and done.stdout.count("ended") == 2, done.stderr
    first, second = re.findall(r"^best (\S+)", done.stdout, re.M)
    assert first == second and len(list(tmp_path.glob("saved*"))) == 1  # ranks are in the order in which workers join
    found = tmp_path / first / "model.safetensors" if trainer == "transformers" else Path(first)
    assert equal(tmp_path / "ended-0.pt", found) and equal(tmp_path / "ended-1.pt", found)
    assert len({float(value) for value in re.findall(r"^tested (\S+)", done.stdout, re.M)}) == (trainer == "lightning")


@pytest.mark.parametrize("trainer", [TRANSFORMERS, LIGHTNING], ids=["transformers", "lightning"])
def test_a_trainer_of_a_run_that_goes_on_does_so_where_the_run_is(trainer: str, tmp_path: Path) -> None:
    """Its steps, its rate and its samples are those of an unbroken run, and it ends with the run's last step."""
    saves = 'save_strategy="no"' if trainer is TRANSFORMERS else ""
    words = [
        "--sync",
        "bsp",
        "--checkpoint-dir",
        "kept",
        "--resume",
        *script(tmp_path, trainer, saves, "max_steps=STEPS", 0.1),
    ]
    begun, rest = interrupted(words, tmp_path)
    begins = min(step for _, step in rest)
    assert 5 <= begins <= 7, "it was resumed, and did not begin anew"
    assert [step for rank, step in rest if rank == 0] == list(range(begins, STEPS))
    assert all(rate == pytest.approx(RATE * (1 - step / STEPS)) for (_, step), (rate, _) in (begun | rest).items())
    assert all(begun[key] == rest[key] for key in begun.keys() & rest.keys())
    for epoch in range(2):
        own = [samples for (_, step), (_, samples) in (begun | rest).items() if step // 5 == epoch]
        assert sorted(sample for samples in own for sample in samples) == list(range(SAMPLES)), (
            "each sample of an epoch once"
        )


def streamed(name: str, rank: int, step: int) -> list[int]:
    """The rows that this worker trains on in this step: 36 of an epoch are completed to 40, 18 files' rows to none."""
    if name == "rows":
        begin = step % 5 * 8 + rank * BATCH
        return [row % SAMPLES for row in range(begin, begin + BATCH)]
    own = list(range(rank, SAMPLES, 2))
    return own[step % 5 * BATCH :][:BATCH]


def streaming(name: str, folder: Path, pause: float = 0.0) -> list[str]:
    stream = STREAMING + TRANSFORMERS.replace("train_dataset=rows()", f"train_dataset={STREAMS[name]}")
    return script(folder, stream, 'save_strategy="no"', "max_steps=STEPS", pause)


@pytest.mark.parametrize("name", STREAMS)
def test_each_worker_has_its_share_of_a_stream(name: str, tmp_path: Path) -> None:
    words = ["--sync", "bsp", *streaming(name, tmp_path)]
    done = subprocess.run([*PS_WORKER, *words], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    seen = {key: samples for key, (_, samples) in lines(done.stdout).items()}
    assert seen == {(rank, step): streamed(name, rank, step) for rank in range(2) for step in range(STEPS)}


def test_a_stream_goes_on_where_the_run_is(tmp_path: Path) -> None:
    """In the second epoch: what the run has used is read past."""
    words = ["--sync", "bsp", "--checkpoint-dir", "kept", "--resume", *streaming("rows", tmp_path, 0.1)]
    begun, rest = interrupted(words, tmp_path)
    assert min(step for _, step in rest) >= 5, "it was resumed, and did not begin anew"
    seen = {key: samples for key, (_, samples) in (begun | rest).items()}
    assert seen == {(rank, step): streamed("rows", rank, step) for rank in range(2) for step in range(STEPS)}
    assert all(begun[key] == rest[key] for key in begun.keys() & rest.keys())


def interrupted(words: list[str], folder: Path) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The lines of a run that is stopped at step 6, and those of the same run when it goes on."""
    with subprocess.Popen([*PS_WORKER, *words], cwd=folder, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        out = ""
        for line in first.stdout:
            out += line
            if line.startswith("step [0, 6,"):
                first.send_signal(signal.SIGINT)
        assert first.wait(LIMIT_S) == 128 + signal.SIGINT
    again = subprocess.run([*PS_WORKER, *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    assert again.returncode == 0, again.stderr
    return lines(out), lines(again.stdout)


def lines(text: str) -> dict[tuple[int, int], tuple[float, list[int]]]:
    """Rate and samples of each step, by rank and step."""
    found: list[Any] = [json.loads(line) for line in re.findall(r"^step (.*)$", text, re.M)]
    assert len({(rank, step) for rank, step, _, _ in found}) == len(found), "no step twice"
    return {(rank, step): (rate, samples) for rank, step, rate, samples in found}


TEACHER = """
import torch
class Net(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11)
    def forward(self, input_ids, attention_mask=None):
        return self.head(torch.tanh(self.table(input_ids).cumsum(1)))
if __name__ == "__main__":
    from narrows.worker import teacher
    teacher.serve(Net(1))
"""
# HEAD is the signature of a model's forward: Trainer gives the number of a step's labels to one that takes any keyword.
STUDENT = """
import torch
from net import Net
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments
from narrows.worker import teacher
from narrows.worker.transformers import distributed
class Student(Net):
    def forward(self, input_ids, attention_mask, labels=None, HEAD):
        logits = super().forward(input_ids)
        summed = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": summed / (num_items_in_batch or (labels[:, 1:] != -100).sum()), "logits": logits}
seen = []
class Told(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **values):
        assert "soft_targets" not in inputs
        if model.training:
            seen.append({name: value.clone() for name, value in inputs.items()})
        return super().compute_loss(model, inputs, return_outputs, **values)
def padded(rows):
    length = max(map(len, rows))
    names = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    full = {name: torch.full((len(rows), length), value) for name, value in names.items()}
    for row, tokens in enumerate(rows):
        full["input_ids"][row, :len(tokens)] = full["labels"][row, :len(tokens)] = tokens
        full["attention_mask"][row, :len(tokens)] = 1
    return full
drawn = torch.Generator().manual_seed(3)
rows = [torch.randint(0, 11, (int(n),), generator=drawn) for n in torch.randint(3, 9, (24,), generator=drawn)]
args = TrainingArguments("saved", max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=3, learning_rate=0.5,
    lr_scheduler_type="constant", optim="sgd", max_grad_norm=1e9, use_cpu=True, report_to="none", disable_tqdm=True,
    save_strategy="no", remove_unused_columns=False)
if TEMPERATURE != 1:
    teacher.connect(temperature=TEMPERATURE)
model = Student(2)
others = [10 - row for row in rows]
trainer = distributed(Told, teacher=0.25)(model, args, train_dataset=rows, eval_dataset=others, data_collator=padded)
trainer.train()
torch.save((seen, model.state_dict()), "ended.pt")
print("evaluated", trainer.evaluate()["eval_loss"])
"""
HEADS = {"step's labels": "num_items_in_batch=None, **rest", "batch's labels": "num_items_in_batch=None"}


def taught(batches: list[dict[str, torch.Tensor]], whole_step: bool, temperature: float, weight: float) -> Any:
    """The student after three steps of SGD over three batches each, in the words of the papers."""
    space: dict[str, Any] = {"__name__": "net"}
    exec(TEACHER, space)
    student, guide = space["Net"](2), space["Net"](1)
    for step in range(3):
        own = batches[3 * step : 3 * step + 3]
        labels = [int((batch["labels"][:, 1:] != -100).sum()) for batch in own]
        places = [int(batch["attention_mask"].sum()) for batch in own]
        total = torch.zeros(())
        for batch, count, place in zip(own, labels, places, strict=True):
            logits = student(batch["input_ids"])
            known = batch["labels"][:, 1:] != -100
            chosen = logits.log_softmax(-1)[:, :-1].gather(-1, batch["labels"][:, 1:].clamp(min=0)[..., None])[..., 0]
            hard = -(chosen * known).sum() / (sum(labels) if whole_step else 3 * count)
            with torch.no_grad():
                p = (guide(batch["input_ids"]) / temperature).softmax(-1)
            divergence = (p * (p.log() - (logits / temperature).log_softmax(-1))).sum(-1) * temperature**2
            soft = (divergence * batch["attention_mask"]).sum() / (sum(places) if whole_step else 3 * place)
            total = total + (1 - weight) * hard + weight * soft
        gradients = torch.autograd.grad(total, [*student.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(student.parameters(), gradients, strict=True):
                parameter -= 0.5 * gradient
    return student.state_dict()


@contextmanager
def teaching(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a teacher of TEACHER, and what it has said, once it has ended."""
    (folder / "net.py").write_text(TEACHER)
    ready, said = folder / "ready.json", list[str]()
    words = ["-m", "narrows.worker.command.teach", "--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready), "net.py"]
    with subprocess.Popen(
        [sys.executable, *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as service:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not ready.exists() and service.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            yield json.loads(ready.read_text())["address"], said
        finally:
            service.terminate()
            said.append(service.communicate(timeout=LIMIT_S)[0])


def plain(folder: Path, env: dict[str, str]) -> str:
    """What student.py prints, under plain python."""
    done = subprocess.run(
        [sys.executable, "student.py"],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("head", "temperature"), [("step's labels", 1.0), ("batch's labels", 2.0)])
def test_a_trainer_learns_from_a_teacher_as_the_formula_says(head: str, temperature: float, tmp_path: Path) -> None:
    """Accumulated gradients, padded batches; without a teacher it trains as ever, and an evaluation asks nothing."""
    text = STUDENT.replace("HEAD", HEADS[head]).replace("TEMPERATURE", str(temperature))
    (tmp_path / "student.py").write_text(text)
    whole_step = head == "step's labels"
    with teaching(tmp_path) as (address, said):
        assert "evaluated" in plain(tmp_path, {"NARROWS_TEACHER": address, "NARROWS_TEACHER_CODING": "top:11+fp16"})
    batches, ended = torch.load(tmp_path / "ended.pt")
    wanted, untaught = (taught(batches, whole_step, temperature, weight) for weight in (0.25, 0.0))
    for name, value in ended.items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=2e-3)
    apart = max((value - untaught[name]).abs().max() for name, value in ended.items())
    assert apart > 0.01, "the soft targets count"
    counts = re.search(r"(\d+) samples computed, (\d+) answered from the cache", said[0])
    assert counts is not None and 18 <= int(counts[1]) + int(counts[2]) <= 24, said
    assert "evaluated" in plain(tmp_path, {})
    batches, ended = torch.load(tmp_path / "ended.pt")
    for name, value in taught(batches, whole_step, temperature, 0.0).items():
        torch.testing.assert_close(ended[name], value, rtol=0, atol=1e-5)


LOOP = """
import lightning, torch
from net import Net
from narrows.worker import teacher
from narrows.worker.lightning import NarrowsCallback, sampler
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.taught = Net(2), 0
    def training_step(self, batch, index):
        (tokens,), soft = batch
        logits = self.model(tokens)
        self.taught += soft is not None
        loss = logits.logsumexp(-1).mean()
        return loss if soft is None else 0.5 * loss + 0.5 * soft.loss(logits)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.arange(60).reshape(12, 5) % 11)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, callbacks=[NarrowsCallback()])
module = Module()
trainer.fit(module, teacher.ahead(torch.utils.data.DataLoader(data, 4, sampler=sampler(data, 4))))
print("taught", module.taught, "of", trainer.global_step)
"""


def test_lightning_reads_the_loader_that_asks_ahead(tmp_path: Path) -> None:
    """In each epoch anew."""
    (tmp_path / "student.py").write_text(LOOP)
    with teaching(tmp_path) as (address, _):
        assert "taught 6 of 6" in plain(tmp_path, {"NARROWS_TEACHER": address})
