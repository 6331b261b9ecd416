"""A grid of stages and replicas from one plan.json, as a user starts it: a stage is killed; then what served it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kit.planned_networks import cities, planned, told
from kit.processes import Command, descendants, free_ports, started, until

from narrows.protocols.config.deployment import parse
from narrows.protocols.runtime.network.key_files import add, make
from narrows.ps.checkpoints.checkpoint_files import whole
from narrows.ps.command.stage_servers import go_back

STAGES, REPLICAS, STEPS, EVERY = 2, 2, 60, 5
SCRIPT = """
import time, torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from narrows.worker import DistributedOptimizer, ScheduleEager1F1B, pipeline, replica, replicas
from narrows.worker import stage, stage_layers, stages, step_count

torch.manual_seed(stage())
group = pipeline()
module = nn.Sequential(*(nn.Linear(4, 4) for _ in stage_layers(3)))
optimizer = DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), module)
example = torch.zeros(8 // replicas() // 2, 4, requires_grad=True)
here = {"input_args": example, "output_args": example, "group": group}
piece = PipelineStage(module, stage(), stages(), torch.device("cpu"), **here)
schedule = ScheduleEager1F1B(piece, 2, loss_fn=lambda out, target: (out - target).square().mean())
print(f"stage {stage()} has layers {stage_layers(3)} and {schedule.warm_up} micro-batches")
while (step := step_count()) < %d:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[replica() :: replicas()]
    optimizer.zero_grad()
    schedule.step(*([rows] if piece.is_first else []), **({"target": -rows} if piece.is_last else {}))
    optimizer.step()
    time.sleep(0.02)
optimizer.finish()
"""


def grid(key: str, replicas: int = REPLICAS) -> dict[str, Any]:
    ports = iter(range(free := free_ports(STAGES * (1 + replicas)), free + STAGES * (1 + replicas)))
    flags = {"sync": "ssp", "compress": "topk:0.5+int8"}
    return {
        "version": 1,
        "hosts": {"here": "127.0.0.1"},
        "stages": [{"host": "here", "port": next(ports), "flags": flags, "layers": 1 + i} for i in range(STAGES)],
        "edges": [{"forward": "int8", "backward": "int8", "in_flight": 1}],
        "processes": [
            {"stage": stage, "replica": replica, "host": "here", "port": next(ports), "key": key}
            for replica in range(replicas)
            for stage in range(STAGES)
        ],
        "lease": 1.0,
        "checkpoint_clocks": EVERY,
    }


def of_stage(worker: Command, stage: int, replica: int) -> int:
    """The pid of a process of a host that has the whole grid: they are numbered by replica, then stage."""
    name = f"ps-worker-{STAGES * replica + stage}"
    return next(pid for pid in descendants(worker.pid) if Path(f"/proc/{pid}/comm").read_text().strip() == name)


def clocks(server: Command, stage: int) -> list[int]:
    return [int(clock) for clock in re.findall(rf"stage {stage}: shard 0: checkpoint of clock (\d+)", server.out)]


def test_a_killed_stage_ends_its_pipeline_and_stages_go_back_to_a_clock_that_all_have(tmp_path: Path) -> None:
    """With keys: each process has that of its host."""
    keys, plan, script = tmp_path / "KEYS", tmp_path / "plan.json", tmp_path / "script.py"
    make(str(keys))
    key = add(str(keys), "here", "worker")
    plan.write_text(json.dumps(grid(json.loads(key.read_text())["public"])))
    assert parse(plan.read_text()).replicas == REPLICAS
    script.write_text(SCRIPT % STEPS)
    here = ("--plan", str(plan), "--host", "here")
    serve = ("ps-serve", *here, "--keys", str(keys), "--checkpoint-dir", str(tmp_path / "checkpoints"))
    work = ("ps-worker", *here, "--key", str(key), "--checkpoint-dir", str(tmp_path / "checkpoints"), str(script))
    with started(*serve, cwd=tmp_path) as server, started(*work, cwd=tmp_path) as worker:
        until(lambda: all(max(clocks(server, stage), default=0) > 2 * EVERY for stage in range(STAGES)), worker)
        assert re.search(r"stage 0 has layers range\(0, 1\) and 2 micro", worker.out), worker
        assert re.search(r"stage 1 has layers range\(1, 3\) and 1 micro", worker.out), worker
        os.kill(of_stage(worker, 1, 0), signal.SIGKILL)
        assert worker.wait() == 6, worker
        assert "stage 1 of replica 0 on here was not heard for 1 s" in worker.err, worker
        assert server.wait() == 0, server
    layout, folder = parse(plan.read_text()), tmp_path / "checkpoints"
    assert {path.parent.name for path in folder.glob("*/narrows-optimizer-*.pt")} == {"stage-0", "stage-1"}
    newest = max(found := whole(folder / "stage-1"))
    (folder / "stage-1" / f"shard-0.clock-{newest}.safetensors").unlink()  # as if this stage had been slower
    assert go_back(layout, "here", folder, "") == max(set(found) - {newest}) == max(whole(folder / "stage-0"))
    with started(*serve, "--resume", "--steps", "1000", cwd=tmp_path) as server:
        until(lambda: server.out.count("serves 1 shard") == STAGES, server)
        servers = descendants(server.pid)
        assert len(servers) >= 2 * STAGES
        os.kill(server.pid, signal.SIGKILL)  # nobody is left to end them
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in servers), f"{servers} {server}")


def test_servers_end_with_the_only_pipeline_and_the_printed_way_back_goes_on(tmp_path: Path) -> None:
    """A stage is killed, and nobody is left. The servers end by themselves, so that the same commands can begin again."""
    (tmp_path / "plan.json").write_text(json.dumps(grid("", 1)))
    (tmp_path / "script.py").write_text(SCRIPT % 25)
    here = ("--plan", "plan.json", "--host", "here", "--checkpoint-dir", "saved")
    with (
        started("ps-serve", *here, cwd=tmp_path) as server,
        started("ps-worker", *here, "script.py", cwd=tmp_path) as worker,
    ):
        until(lambda: all(max(clocks(server, stage), default=0) >= EVERY for stage in range(STAGES)), worker)
        os.kill(of_stage(worker, 1, 0), signal.SIGKILL)
        assert worker.wait() == 6, worker
        assert "was ended by signal 9 (SIGKILL); its pipeline ends\n" in worker.err, worker
        assert server.wait() == 6, server
        assert "the last worker of this stage is lost, and the run ends: once the servers" in server.err, server
    with (
        started("ps-serve", *here, "--resume", cwd=tmp_path) as server,
        started("ps-worker", *here, "script.py", cwd=tmp_path) as worker,
    ):
        assert worker.wait() == 0 and server.wait() == 0, (worker, server)
        assert "all stages go on from clock" in server.out + server.err, server


def test_the_commands_that_ps_plan_prints_run_its_pipeline(tmp_path: Path) -> None:
    """Two hosts that are addresses of this machine, which nobody else has: ports are ps-plan's own. Keys are those of hosts."""
    place, network, keys = random.SystemRandom().randrange(1 << 14), cities([1, 1], 20, 20), str(tmp_path / "KEYS")
    address = {name: f"127.{64 + place // 256}.{place % 256}.{i + 1}" for i, name in enumerate(network.hosts)}
    (tmp_path / "script.py").write_text(SCRIPT % 6)
    make(keys)
    for name in network.hosts:
        add(keys, name, "worker").rename(tmp_path / f"{name}.key")
    output, plan = planned(
        tmp_path, network, "--pipeline", "2", "--layers", "3", "--micro-batches", "2", "--activation-bytes", "64",
        "--keys", keys, "--script", "script.py", *(word for each in address.items() for word in ("--address", "=".join(each))),
        compute=[1.0, 2.0],
    )  # fmt: skip
    assert [stage["layers"] for stage in plan["stages"]] == [1, 2]
    commands = [words for words in told(output) if words[0] in ("ps-serve", "ps-worker")]
    assert len(commands) == 4
    with ExitStack() as stack:
        running = [stack.enter_context(started(*words, cwd=tmp_path)) for words in commands]
        for command in sorted(running, key=lambda command: command.words[0], reverse=True):  # workers first
            assert command.wait() == 0, "\n".join(map(str, running))
        said = "".join(command.out for command in running)
    warm_up = min(2, 2 + plan["edges"][0]["in_flight"])
    assert f"stage 0 has layers range(0, 1) and {warm_up} micro-batches" in said, said
    assert "stage 1 has layers range(1, 3) and 1 micro-batches" in said, said
