"""The state that workers' optimizers keep, with real processes that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from kit.processes import Command, free_ports, serving, started, until

from narrows.ps.checkpoints.checkpoint_files import clocks

# Two machines, of one worker each. Without argv[2] it trains for ever.
SCRIPT = """
import sys, torch
from narrows.worker import DistributedOptimizer, rank

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
torch.save([optimizer.clock, optimizer.state_dict()["state"]], sys.argv[1])
steps = 0
while len(sys.argv) < 3 or steps < int(sys.argv[2]):
    optimizer.zero_grad()
    (model(torch.randn(16, 4)) - rank()).square().mean().backward()
    optimizer.step()
    steps += 1
"""


def test_moments_outlive_a_server_and_workers_that_were_killed(tmp_path: Path) -> None:
    """The file of one machine is another model's by then."""
    script, port, places = tmp_path / "script.py", free_ports(2), ("leipzig", "jena")
    script.write_text(SCRIPT)
    run = ["--workers", "2", "--shards", "2", "--sync", "ssp", "--checkpoint-every", "0.3"]
    run += ["--checkpoint-dir", str(tmp_path / "run")]

    @contextmanager
    def workers(address: str, *words: str) -> Iterator[list[Command]]:
        with ExitStack() as stack:
            yield [
                stack.enter_context(
                    started("ps-worker", "--server", address, "--checkpoint-dir", str(tmp_path / place),
                            str(script), str(tmp_path / f"{place}.began"), *words)
                )
                for place in places
            ]  # fmt: skip

    def kept(place: str) -> Path:
        return next((tmp_path / place).glob("narrows-optimizer-*.pt"), tmp_path / "none")

    with serving(*run, port=port) as server, workers(server.address) as commands:
        until(lambda: all(kept(place).exists() for place in places), "a file on each machine")
        until(lambda: max(clocks(tmp_path / "run", 0), default=0) > 0, "a checkpoint")
        server.kill()
        for command in commands:
            command.end()
    files: dict[str, Any] = {place: torch.load(kept(place)) for place in places}
    assert files["jena"]["of"]["tensors"][0] == ["0.weight", [8, 4], "torch.float32"]
    files["jena"]["of"]["tensors"][0][1] = [9, 4]
    torch.save(files["jena"], kept("jena"))

    with serving(*run, "--resume", port=port) as server, workers(server.address, "5") as commands:
        assert [command.wait() for command in commands] == [0, 0], [*map(str, commands)]
        said = {place: command.err for place, command in zip(places, commands, strict=True)}
    clock, state = torch.load(tmp_path / "leipzig.began")
    assert clock > 0 and [*state] == [0, 1, 2, 3] and len(files["leipzig"]["state"]) == 4
    for ours, there in zip(state.values(), files["leipzig"]["state"].values(), strict=True):
        assert {*ours} == {*there} == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(ours[name], there[name]) for name in ours) and ours["exp_avg"].any()
    assert f"optimizers go on with their states in {tmp_path / 'leipzig'}\n" in said["leipzig"]
    assert torch.load(tmp_path / "jena.began") == [clock, {}]
    assert f"begins anew: {tmp_path / 'jena'}/narrows-optimizer-" in said["jena"], said["jena"]
    assert "is of another model, another optimizer or another part of the model\n" in said["jena"]
    # By rank: leipzig may have another one now, and the file of the old one stays.
    last = max(torch.load(path)["clock"] for path in (tmp_path / "leipzig").glob("narrows-optimizer-*.pt"))
    assert last >= clock + 5, "one is written at the end"
