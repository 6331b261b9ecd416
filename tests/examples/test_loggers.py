"""record() with the real TensorBoard and W&B: what reaches their files. `make examples` installs them.
tests/unit/worker/test_logger_forwarding.py has the rules, without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="make examples installs it, apart")

pytestmark = pytest.mark.timeout(120)
COUNT = 6
LIMIT_S = 100.0

# Who else logs to the run of W&B between two values of ours.
OTHERS = {
    "nobody": ("", ""),
    "the script": ("wandb.log({'mine': step})", ""),
    "the script, twice": ("wandb.log({'mine': step}); wandb.log({'more': step})", ""),
    "the script, with its own step": ("wandb.log({'mine': step}, step=step)", ""),
    "the script afterwards, with its own step": ("", "wandb.log({'mine': step}, step=step)"),
}
WANDB = f"""
import wandb
from narrows.worker.runtime.logger_forwarding import LoggerForwarding
wandb.init(mode="offline", project="narrows", settings=wandb.Settings(console="off", x_disable_stats=True))
forwarding = LoggerForwarding()
for step in range({COUNT}):
    BEFORE
    forwarding.forward({{"loss": 10.0 - step}}, 100 + step)
    AFTER
wandb.finish()
"""


def test_tensorboard_has_each_value_at_the_runs_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from narrows.worker import record, session

    with SummaryWriter(str(tmp_path / "old")), SummaryWriter(str(tmp_path / "here")) as writer:
        before = session.step_count()
        for step in range(COUNT):
            record(loss=10.0 - step, accuracy=step / 10)
            session.current().clock += 1  # type: ignore[misc]
        writer.flush()
        read = EventAccumulator(str(tmp_path / "here")).Reload()
        found = [(each.step - before, each.value) for each in read.Scalars("loss")]
        assert found == [(step, 10.0 - step) for step in range(COUNT)]
        assert len(read.Scalars("accuracy")) == COUNT
        assert not EventAccumulator(str(tmp_path / "old")).Reload().Tags()["scalars"], (
            "the newest that is open has them"
        )


@pytest.mark.parametrize("who", OTHERS)
def test_wandb_drops_no_value_of_ours_nor_of_the_script(who: str, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="make examples installs it, apart")
    before, after = OTHERS[who]
    (tmp_path / "script.py").write_text(WANDB.replace("BEFORE", before or "pass").replace("AFTER", after or "pass"))
    env = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, env=env
    )
    assert done.returncode == 0 and "less than the current step" not in done.stderr, done.stderr
    drawn = dict(re.findall(r"^wandb: +(\w+) ([▁-█]+)", done.stderr, re.M))  # of each name a bar for each value
    named = {"loss", "step_count", *re.findall(r"'(\w+)'", before + after)}
    assert {name: len(bars) for name, bars in drawn.items()} == dict.fromkeys(named, COUNT), done.stderr
