"""Each of examples/ with two workers ends where it ends alone on the whole batch. `make examples` installs their imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

for library in ("accelerate", "lightning", "peft", "sklearn", "transformers"):
    pytest.importorskip(library, reason="make examples installs it, apart")

pytestmark = pytest.mark.timeout(900)
EXAMPLES = Path(__file__).parents[2] / "examples"
MODES = {"bsp": ["--sync", "bsp"], "ssp": ["--sync", "ssp", "--compress", "topk:0.05+int8"]}
STEPS = 60
LIMIT_S = 300.0
LOSS_MAX = 1.02  # of that alone
ACCURACY_LEAST = -0.01  # beside that alone
# Batch of a worker: alone it has that of two.
BATCHES = {"hf_trainer": 16, "accelerate_loop": 8, "lightning_module": 32, "lora": 16, "clicks": 256}


def ends(words: list[str], workers: int, name: str) -> tuple[list[float], str]:
    """The figure that each worker printed, and all that was said."""
    script = [str(EXAMPLES / f"{name}.py"), "--steps", str(STEPS), "--batch", str(2 * BATCHES[name] // workers)]
    done = subprocess.run([*words, *script], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return [float(value) for value in re.findall(r"^(?:loss|accuracy) ([0-9.]+)", done.stdout, re.M)], done.stderr


@pytest.mark.parametrize("name", BATCHES)
def test_two_workers_end_where_one_ends(name: str) -> None:
    (alone,), _ = ends([sys.executable], 1, name)
    for mode in MODES.values():
        command = [sys.executable, "-m", "narrows.worker.command.cli", "-n", "2", *mode]
        told, err = ends(command, 2, name)
        print(name, *mode, "alone", alone, "two workers", *told)  # with pytest -s
        assert len(told) == 2 and "2 of 2 workers done" in err
        for figure in told:
            good = figure >= alone + ACCURACY_LEAST if name == "lightning_module" else figure <= LOSS_MAX * alone
            assert good, (mode, alone, told)


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
