"""Each of examples/ with two workers ends where it ends alone on the whole batch. `make examples` installs their imports."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from narrows import worker

for library in ("accelerate", "lightning", "litdata", "peft", "sklearn", "torchtitan", "transformers"):
    pytest.importorskip(library, reason="make examples installs it, apart")

pytestmark = pytest.mark.timeout(900)
EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = {"bsp": ["--sync", "bsp"], "ssp": ["--sync", "ssp", "--compress", "topk:0.05+int8"]}
STEPS = 60
LIMIT_S = 300.0
LOSS_MAX = 1.02  # of that alone
ACCURACY_LEAST = -0.01  # beside that alone
# Batch of a worker: alone it has that of two.
BATCHES = {
    "hf_trainer": 16, "accelerate_loop": 8, "lightning_module": 32, "lora": 16, "gpt": 8, "cnn": 32, "litdata_stream": 16,
    "titan": 8, "clicks": 256, "epochs": 32, "student": 16,
}  # fmt: skip
LENGTHS = {"epochs": ["--epochs", "5"]}  # else steps
MORE = {"litdata_stream": ["--rank-variables"], "titan": ["--push", "update"]}  # flags
# Lines that a script in plain torch, or of the trainer, does not have: what names Narrows, and calls of the wrapped optimizer.
LINES = dict.fromkeys(BATCHES, 3) | {"hf_trainer": 2, "accelerate_loop": 4, "epochs": 6, "student": 6, "teacher": 2}
# torch.nn has an Embedding of the same arguments: the import is the line.
CALLED = [name for name in (*worker.__all__, "distributed", "NarrowsCallback") if name not in ("clock", "Embedding")]
SAME, SAME_DROPOUT = "all workers draw the same random numbers in the forward pass", ("lora", "accelerate_loop")
OURS = re.compile(
    rf"\bnarrows\b|(?<![.\w])({'|'.join(CALLED)})\(|\boptimizers?\.(eval|train|shared|finish|step_samples)\(|\.epochs\("
    r"|\bteacher\.\w+\(|\bif soft\b|\bsoft\.loss\("
)


def ends(words: list[str], workers: int, name: str) -> tuple[list[float], str]:
    """The figure that each worker printed, and all that was said."""
    script = [str(EXAMPLES / f"{name}.py"), *LENGTHS.get(name, ["--steps", str(STEPS)])]
    script += ["--batch", str(2 * BATCHES[name] // workers)]
    # One thread, as each of two workers on two cores has: several that share busy cores wait for each other for minutes.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:  # for what it writes
        done = subprocess.run([*words, *script], capture_output=True, text=True, timeout=LIMIT_S, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"^(?:loss|accuracy) ([0-9.]+)", done.stdout, re.M)], done.stderr


@pytest.mark.parametrize("name", BATCHES)
def test_two_workers_end_where_one_ends(name: str) -> None:
    (alone,), _ = ends([sys.executable], 1, name)
    for mode in FLAGS.values():
        command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "2", *mode, *MORE.get(name, [])]
        told, err = ends(command, 2, name)
        print(name, *mode, "alone", alone, "two workers", *told)  # with pytest -s
        assert len(told) == 2 and "2 of 2 workers done" in err
        for figure in told:
            good = figure >= alone + ACCURACY_LEAST if alone < 1 else figure <= LOSS_MAX * alone
            assert good, (mode, alone, told)


@pytest.mark.parametrize("name", LINES)
def test_each_line_of_ours_has_a_number(name: str) -> None:
    """docs/trainers.md says how many an example has."""
    body = (EXAMPLES / f"{name}.py").read_text("utf-8").split('"""', 2)[2]
    ours = [line for line in body.splitlines() if OURS.search(line)]
    numbers = [int(found[1]) for line in body.splitlines() if (found := re.search(r"  # (\d)(:|$)", line))]
    assert numbers == list(range(1, LINES[name] + 1)) and len(ours) == LINES[name]
    table = (EXAMPLES.parent / "docs" / "trainers.md").read_text("utf-8")
    assert f"| examples/{name}.py | {LINES[name]} |" in table


@pytest.mark.parametrize("name", BATCHES)
def test_the_check_says_fine_of_each_example(name: str) -> None:
    flags = ["--rank-variables"] if name == "litdata_stream" else []
    command = [sys.executable, "-m", "narrows.worker.command.cli", "--check", *flags]
    done = subprocess.run([*command, str(EXAMPLES / f"{name}.py")], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and "fine         2 workers made 2 steps each" in done.stdout, done.stdout + done.stderr
    notices = re.findall(r"^notice +(.*)$", done.stdout, re.M)
    assert [text.partition(" (dropout)")[0] for text in notices] == [SAME] * (name in SAME_DROPOUT)


@pytest.mark.parametrize("flags", [["--dtype", "float16"], ["--compile"]], ids=" ".join)
def test_the_gpt_trains_with_a_scaler_and_compiled(flags: list[str]) -> None:
    command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "2", *FLAGS["ssp"]]
    script = [str(EXAMPLES / "gpt.py"), "--steps", "10", *flags]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=LIMIT_S)
    losses = [float(value) for value in re.findall(r"^loss ([0-9.]+)", done.stdout, re.M)]
    assert done.returncode == 0 and len(losses) == 2 and max(losses) < 5.0, done.stderr  # ln 256 is 5.5


def test_torchtitans_containers_train_a_sharded_model() -> None:
    """FSDP2 shards the model over the two processes of one worker."""
    (alone,), _ = ends([sys.executable], 1, "titan")
    command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "2", "--group", *FLAGS["ssp"]]
    told, _ = ends(command, 2, "titan")
    assert len(told) == 2 and max(told) <= LOSS_MAX * alone, (alone, told)


def test_an_adapter_travels_alone() -> None:
    """A dense push has the bytes of what is trained, to 1 %, and the first weights and the last flush have no more."""
    command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "1", "--sync", "ssp", "--compress", "dense"]
    script = [str(EXAMPLES / "lora.py"), "--steps", str(STEPS)]
    done = subprocess.run([*command, *script], capture_output=True, text=True, timeout=LIMIT_S)
    trained = re.search(r"(\d+) of (\d+) parameters are", done.stdout)
    sent = re.search(r"up ([0-9.]+) MB", done.stderr)
    assert trained is not None and sent is not None, done.stderr
    pushes = STEPS + 1  # the first weights are one more
    assert 1.0 <= float(sent[1]) * 1e6 / (4 * int(trained[1]) * pushes) < 1.01
    assert int(trained[1]) < int(trained[2]) / 10


def test_a_student_learns_from_the_teacher(tmp_path: Path) -> None:
    """Two workers ask it for each batch, and end no higher than from the text alone."""
    ready = tmp_path / "ready.json"
    flags = ["--bind", "tcp://127.0.0.1:0", "--ready-file", str(ready)]
    words = [
        sys.executable,
        "-m",
        "narrows.worker.command.teach",
        *flags,
        str(EXAMPLES / "teacher.py"),
        "--steps",
        "300",
    ]
    command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "2", *FLAGS["bsp"]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as service:
        try:
            deadline = time.monotonic() + LIMIT_S
            while not ready.exists() and service.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            address = json.loads(ready.read_text())["address"]
            taught, _ = ends([*command, "--teacher", address], 2, "student")
        finally:
            service.terminate()
            said = service.communicate(timeout=LIMIT_S)[0]
    plain, err = ends(command, 2, "student")
    print("student: with the teacher", *taught, "without", *plain)  # with pytest -s
    counts = re.search(r"([\d,]+) samples computed, ([\d,]+) answered from the cache", said)
    assert (
        counts is not None
        and sum(int(each.replace(",", "")) for each in counts.groups()) >= STEPS * 2 * BATCHES["student"]
    )
    assert "no --teacher ADDRESS names one" in err
    assert len(taught) == 2 and max(taught) <= LOSS_MAX * min(plain), (taught, plain)
