"""Real commands on one host: what goes through shared memory, that it changes no result, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from kit.processes import GONE_S, LIMIT_S, Server, descendants, finished, serving, started, until
from safetensors.torch import load_file

from narrows.protocols.runtime.network.shared_memory import available

pytestmark = pytest.mark.skipif(not available(), reason="the system has no shared memory")

FRAME_BYTES = 1 << 19  # of the raw values of a shard, which its first weights are too
# A model of two frames for each of two shards; %s is done before each step.
SCRIPT = """
import os, random, sys, threading, torch
from narrows.worker import DistributedOptimizer, rank, step_count

torch.manual_seed(0)
model = torch.nn.Linear(512, 512)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
inputs = torch.randn(8, 512, generator=torch.Generator().manual_seed(rank()))
while step_count() < int(sys.argv[1]):
    %s
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""
# A thread that writes to all frames that this worker has sent, as long as it runs.
SCRIBBLES = """
    if rank() == 1 and step_count() == 5:
        memory = optimizer._session.link._sockets.memory
        pools = [line.link.pool for line in memory.lines.values()]
        def scribble():
            while True:
                pool = random.choice(pools)
                at = random.randrange(max(1, pool.end - 4096))
                pool.values[at:at + 4096] = random.randrange(256)
        threading.Thread(target=scribble, daemon=True).start()
"""


def script(folder: Path, each: str = "pass") -> str:
    path = folder / "script.py"
    path.write_text(SCRIPT % each)
    return str(path)


def ways(record: Path) -> list[list[str]]:
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return [event["ways"] for event in events if event["event"] == "links"]


@pytest.mark.parametrize("flags", ["--sync bsp", "--sync bsp --push update", "--sync local --local-steps 2"])
def test_shared_memory_changes_no_bit_of_the_model(tmp_path: Path, flags: str) -> None:
    models = []
    for shared, way in (("1", "shared memory"), ("0", "Unix socket")):
        folder, record = tmp_path / shared, tmp_path / f"{shared}.jsonl"
        words = f"-n 2 --shards 2 {flags} --checkpoint-dir {folder} --record {record} {script(tmp_path)} 20"
        code, _, err = finished("ps-worker", *words.split(), env={"NARROWS_SHARED_MEMORY": shared})
        assert code == 0, err
        assert ways(record) == [[way] * 2] * 2
        models.append(load_file(folder / "model.safetensors"))
    assert models[0].keys() == models[1].keys()
    assert all(models[0][name].equal(values) for name, values in models[1].items())


@pytest.mark.parametrize("flags", ["--sync bsp", "--sync ssp --staleness 1 --compress topk:0.5+int8", "--sync async"])
def test_a_worker_that_scribbles_over_its_frames_spoils_its_own_share_alone(tmp_path: Path, flags: str) -> None:
    """Its payloads may be anything by the time that the shard copies them. The shard takes them, leaves them out or refuses
    them; it does not die, and the other worker comes to its end."""
    folder, record = tmp_path / "kept", tmp_path / "run.jsonl"
    words = (
        f"-n 2 --shards 2 {flags} --checkpoint-dir {folder} --record {record} {script(tmp_path, SCRIBBLES.strip())} 60"
    )
    _, _, err = finished("ps-worker", *words.split())
    events = [json.loads(line) for line in record.read_text().splitlines()]
    assert events[-1]["exit_codes"].count(0) >= 1, err
    assert not any(event.get("what") == "restart" for event in events), err  # no shard was lost
    model = load_file(folder / "model.safetensors")
    assert all(values.isfinite().all() for values in model.values())


def event_bytes(server: Server) -> list[int]:
    """The bytes of memory that the events of each shard's journal take."""
    found = []
    for shard in server.pids[1:]:
        for entry in Path(f"/proc/{shard}/fd").iterdir():
            if "memfd:narrows-events" in os.readlink(entry):
                found.append(512 * entry.stat().st_blocks)
                break
    return found


@pytest.mark.parametrize("kills", [(), (0, 1, 0, 1), (0, "worker")], ids=len)
def test_a_shard_that_is_killed_folds_what_lies_in_the_workers_memory(
    tmp_path: Path, kills: tuple[object, ...]
) -> None:
    """Pushes stay there: the events only name them. The next process reads them again, also when the worker is gone."""
    path, folder = script(tmp_path, "import time; time.sleep(0.02)"), tmp_path / "kept"
    flags = f"--sync bsp --shards 2 --workers 2 --lease 2 --checkpoint-dir {folder}"
    with (
        serving(*flags.split()) as server,
        started("ps-worker", "--server", server.address, "-n", "2", path, "150") as command,
    ):
        until(lambda: re.search(r"clock [1-9]\d", command.err) or command.process.poll() is not None, command)
        assert max(event_bytes(server)) < 4 * FRAME_BYTES, "those of one clock, and there were many"
        for each in kills:
            if each == "worker":
                os.kill(min(holders() & set(descendants(command.process.pid))), signal.SIGKILL)
            server.kill_shard(each if isinstance(each, int) else 1)
            time.sleep(0.2)
        code, ended, said = command.wait(), server.command.wait(), server.command.out
        assert ended == 0 and code == ("worker" in kills), f"{command} {server.command}"
        assert said.count("goes on where it was") == len(kills) and "goes back" not in said and "lost" not in said, said
    if "worker" not in kills:
        alone = tmp_path / "alone"
        code, _, err = finished("ps-worker", *f"-n 2 --shards 2 --sync bsp --checkpoint-dir {alone} {path} 150".split())
        assert code == 0, err
        models = [load_file(each / "model.safetensors") for each in (folder, alone)]
        assert all(models[0][name].equal(values) for name, values in models[1].items())


def test_a_shard_that_is_killed_goes_on_with_what_a_scribbler_has_left_of_its_pushes(tmp_path: Path) -> None:
    """The next process reads other bytes than the first one did: they are still the scribbler's share alone."""
    path, folder = script(tmp_path, f"import time; time.sleep(0.01){SCRIBBLES.rstrip()}"), tmp_path / "kept"
    flags = f"--sync bsp --shards 2 --workers 2 --lease 2 --checkpoint-dir {folder}"
    with (
        serving(*flags.split()) as server,
        started("ps-worker", "--server", server.address, "-n", "2", path, "100") as command,
    ):
        until(lambda: "is left out" in server.command.out, server.command)  # it has begun
        for shard in (0, 1):
            server.kill_shard(shard)
        command.wait()
        assert server.command.wait() == 0, f"{command} {server.command}"
        assert server.command.out.count("goes on where it was") == 2 and "goes back" not in server.command.out
        assert "1 of 2 workers done" in command.err or "2 of 2 workers done" in command.err, command
    model = load_file(folder / "model.safetensors")
    assert all(values.isfinite().all() for values in model.values())


def holders() -> set[int]:
    """Processes that hold memory of this module's runs: it is that of all runs on this machine."""
    found = set()
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and "memfd:narrows-" in Path(f"/proc/{entry}/maps").read_text():
                found.add(int(entry))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_of_processes_that_were_killed(tmp_path: Path, seed: int) -> None:
    """One process of the command is killed at a time of its own, then ps-worker itself with its server."""
    rng = random.Random(seed)
    words = f"-n 2 --shards 2 --sync bsp --checkpoint-dir none {script(tmp_path)} 100000"
    with started("ps-worker", *words.split()) as command:
        until(lambda: holders() & set(descendants(command.process.pid)), command)
        time.sleep(rng.uniform(0, 0.5))
        everyone = set(descendants(command.process.pid))
        struck = rng.choice(sorted(everyone & holders()))
        os.kill(struck, signal.SIGKILL)
        time.sleep(rng.uniform(0, 1))
        everyone |= set(descendants(command.process.pid))
        for each in (command.process.pid, *everyone):
            try:
                os.kill(each, signal.SIGKILL)
            except ProcessLookupError:
                continue
    until(lambda: not holders() & everyone, "no process that maps frames", GONE_S)
    assert LIMIT_S > GONE_S
