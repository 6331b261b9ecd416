"""Runs whose checkpoints, states and records are in an object store, with processes that are killed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch
from kit.processes import (
    SCRIPT,
    Command,
    Worker,
    finished,
    free_ports,
    serving,
    small_model,
    started,
    trained_alone,
    until,
)
from kit.s3 import Bucket
from kit.scripts import distance, flat
from safetensors.torch import load

SHARDS = 2
# Of one worker. Without argv[2] it trains for ever.
STATEFUL = """
import sys, torch
from narrows.worker import DistributedOptimizer, record

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), model)
torch.save([optimizer.clock, optimizer.state_dict()["state"]], sys.argv[1])
steps = 0
while len(sys.argv) < 3 or steps < int(sys.argv[2]):
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    record(loss=1.0)
    steps += 1
"""


def whole(bucket: Bucket, folder: str) -> int:
    """The newest clock of which all shards have an object."""
    found = [re.fullmatch(r"shard-(\d+)\.clock-(\d+)\.safetensors", name) for name in bucket.names(f"{folder}/")]
    held = [{int(match[2]) for match in found if match and int(match[1]) == shard} for shard in range(SHARDS)]
    return max(set.intersection(*held), default=-1)


def test_a_killed_run_goes_on_elsewhere_as_if_it_had_not_been_killed(bucket: Bucket, tmp_path: Path) -> None:
    """The temporary folder of the first server is of no use to the second. The model is, bit for bit, that of a run that was
    not killed and has a folder."""
    address = f"{bucket}/run"
    flags = ("--sync", "bsp", "--shards", str(SHARDS), "--checkpoint-every", "0.2", "--checkpoint-dir", address)
    with serving(*flags) as server:
        worker = Worker(server.address)
        assert f"checkpoints and the final model go to {address};" in server.command.out

        def step() -> bool:
            worker.step()
            return whole(bucket, "run") > 5

        until(step, "a checkpoint of all shards")
        server.kill()
        worker.session.link.close()
    newest = whole(bucket, "run")
    with serving(*flags, "--resume") as server:
        with Worker(server.address) as again:
            assert again.clock == newest and f"goes on from the checkpoint of clock {newest}\n" in server.command.out
            again.train(20)
        assert server.command.wait() == 0, server.command
        assert f"the model at clock {newest + 20} is in {address}/model.safetensors\n" in server.command.out
    model = small_model()
    model.load_state_dict(load(bucket.read("run/model.safetensors")))
    assert distance(flat(model), trained_alone(newest + 20)) < 1e-5
    here = (*flags[:-1], str(tmp_path), "--checkpoint-every", "0")
    with serving(*here) as server:
        with Worker(server.address) as undisturbed:
            undisturbed.train(newest + 20)
        assert server.command.wait() == 0, server.command
    local = load((tmp_path / "model.safetensors").read_bytes())
    assert all(torch.equal(local[name], tensor) for name, tensor in model.state_dict().items()), "bit for bit"
    code, _, err = finished("ps-serve", *flags)
    assert code == 2 and f"--checkpoint-dir {address} holds the model of a run: go on with it by --resume" in err, err


def test_a_shard_that_is_killed_goes_on_from_its_journal_or_the_store_copy(bucket: Bucket) -> None:
    """Without a journal the run goes back to the newest checkpoint of all shards, which this machine has."""
    address = f"{bucket}/run"
    flags = (
        "--sync",
        "bsp",
        "--shards",
        str(SHARDS),
        "--no-journal",
        "--checkpoint-every",
        "0.2",
        "--checkpoint-dir",
        address,
    )
    with serving(*flags) as server:
        worker = Worker(server.address)

        def step() -> bool:
            worker.step()
            return whole(bucket, "run") > 5

        until(step, "a checkpoint of all shards")
        server.kill_shard(1)

        def joined() -> bool:
            worker.step()
            return server.command.out.count(" joined at clock ") > 1

        until(joined, "the second life")
        worker.train(5)
        worker.close()
        assert server.command.wait() == 0, server.command
    model = small_model()
    model.load_state_dict(load(bucket.read("run/model.safetensors")))
    assert distance(flat(model), trained_alone(worker.clock)) < 1e-5


def test_a_store_that_is_gone_ends_nothing_and_the_missing_model_is_named(bucket: Bucket) -> None:
    """As a full disk: once while the run lasts, and with exit code 7 at its end."""
    address = f"{bucket}/run"
    with serving("--sync", "bsp", "--checkpoint-every", "0.1", "--checkpoint-dir", address) as server:
        with Worker(server.address) as worker:

            def step(done: Callable[[], bool]) -> Callable[[], bool]:
                return lambda: worker.step() or done()  # type: ignore[func-returns-value]

            until(step(lambda: bool(bucket.names("run/"))), "a checkpoint")
            until(step(bucket.gone), "a bucket without objects")
            until(step(lambda: "cannot write" in server.command.out), "the trouble to be told")
            worker.train(30)
        assert server.command.wait() == 7, server.command
        said = server.command.out + server.command.err
    assert said.count("shard 0 cannot write a checkpoint and tries again: s3://") == 1, said
    missing = f"{address}/model.safetensors is missing: shard 0: {address}: an object was not written"
    assert f"the run was trained, but {missing}" in said
    assert "Traceback" not in said and "narrows-" not in said, "no name of the temporary folder"


def test_states_of_optimizers_and_the_record_outlive_their_machine(bucket: Bucket, tmp_path: Path) -> None:
    """ps-worker and its server are killed with their records; the moments go on, bit for bit, and a plot is drawn."""
    script, address, record = tmp_path / "script.py", f"{bucket}/run", f"{bucket}/run.jsonl"
    script.write_text(STATEFUL)
    words = ["ps-worker", "--sync", "ssp", "--checkpoint-every", "0.3", "--checkpoint-dir", address, "--record", record]

    def kept() -> bool:
        return whole_one(bucket) > 0 and "narrows-optimizer-0.pt" in bucket.names("run/")

    def parts() -> list[str]:
        return bucket.names("run.jsonl/1/")

    with started(*words, str(script), str(tmp_path / "began")) as command:
        until(lambda: kept() and len(parts()) > 1, command)
        kill(command)
    state = tmp_path / "state"
    state.write_bytes(bucket.read("run/narrows-optimizer-0.pt"))
    there = torch.load(state)
    code, _, err = finished(*words, "--resume", str(script), str(tmp_path / "began"), "5")
    assert code == 0 and f"optimizers go on with their states in {address}\n" in err, err
    assert f"the record of an earlier run is kept as {record}/1\n" in err
    clock, moments = torch.load(tmp_path / "began")
    assert clock > 0 and len(moments) == len(there["state"]) == 4
    for ours, theirs in zip(moments.values(), there["state"].values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours["exp_avg"].any()
    lines = b"".join(bucket.read(f"run.jsonl/2/{name}") for name in bucket.names("run.jsonl/2/")).splitlines()
    assert [json.loads(line)["event"] for line in lines].count("step") == 5
    assert json.loads(lines[-1])["event"] == "done"
    code, _, err = finished("ps-plot", record, f"{record}/1", "--out", str(tmp_path / "both.png"))
    assert code == 0 and (tmp_path / "both.png").stat().st_size > 1000, err
    assert finished("ps-top", "--record", record, "--once")[0] == 0


def whole_one(bucket: Bucket) -> int:
    found = [re.fullmatch(r"shard-0\.clock-(\d+)\.safetensors", name) for name in bucket.names("run/")]
    return max((int(match[1]) for match in found if match), default=-1)


def kill(command: Command) -> None:
    from kit.processes import kill_all

    kill_all(command.pid)
    command.process.wait()


def test_a_wrong_bucket_or_flag_is_refused_before_the_run(bucket: Bucket, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT % "")
    for flag in ("--checkpoint-dir", "--record"):
        for words in (("ps-serve",), ("ps-worker", str(script), "1")):
            code, _, err = finished(words[0], flag, "s3://no-such-bucket/run", *words[1:])
            (sentence,) = err.splitlines()
            assert code == 2 and re.match(rf"{words[0]}: {flag} s3://no-such-bucket/run: .*bucket", sentence), err
    code, _, err = finished("ps-serve", "--checkpoint-dir", "ftp://host/run")
    assert code == 2 and "ftp:// is no store that is known" in err
    port = free_ports(1)
    server = f"tcp://127.0.0.1:{port}"
    code, _, err = finished(
        "ps-worker", "--server", server, "--checkpoint-dir", "s3://no-such-bucket/run", str(script), "1"
    )
    assert code == 2 and "s3://no-such-bucket/run" in err, err


def test_a_folder_by_its_address_is_that_folder(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "kept here"
    script.write_text(SCRIPT % "")
    address = f"file://{folder}".replace(" ", "%20")
    words = ("ps-worker", "--checkpoint-dir", address, "--record", f"{address}/run.jsonl", str(script), "3")
    folder.mkdir()
    code, _, err = finished(*words)
    assert code == 0 and f"is in {folder / 'model.safetensors'}\n" in err, err
    assert (folder / "model.safetensors").exists() and (folder / "run.jsonl").stat().st_size
