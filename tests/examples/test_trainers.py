"""narrows.worker.transformers and narrows.worker.lightning: what trainers save is the shared
model, and a Trainer of a run that goes on does so where the run is. `make examples` installs them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
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
